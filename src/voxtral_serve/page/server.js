// The corner that says what the server is and how busy it is. GET v1/server has the first, /metrics the second.

import { request } from "./api.js";
import { duration, element, size } from "./elements.js";

const EVERY_MS = 5000;

// "change" when `facts` has changed: the content of GET v1/server, or null while it is not known.
class ServerState extends EventTarget {
  facts = null;
  error = null; // why it is not known
  #asking = null;

  // Resolves to `facts`, and rejects with ApiError where the server does not say them.
  load() {
    this.#asking ??= this.#ask().finally(() => (this.#asking = null));
    return this.#asking;
  }

  async #ask() {
    try {
      this.#tell(await (await request("v1/server")).json(), null);
    } catch (error) {
      this.#tell(null, error);
      throw error;
    }
    return this.facts;
  }

  #tell(facts, error) {
    Object.assign(this, { facts, error });
    this.dispatchEvent(new Event("change"));
  }
}

export const state = new ServerState();

export function start(corner, { api }) {
  const list = element("dl");
  const note = element("p", { class: "muted", role: "status" });
  corner.append(element("h2", {}, "Server"), note, list);
  const figures = new Figures();
  const show = () => {
    note.textContent = state.facts
      ? ""
      : state.error?.status === 401
        ? "Enter the API key to see it."
        : (state.error?.message ?? "");
    note.hidden = !note.textContent;
    const rows = state.facts ? [...described(state.facts), ...figures.rows(state.facts)] : [];
    list.hidden = !rows.length;
    list.replaceChildren(
      ...rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
    );
  };
  const load = () => state.load().catch(() => {}); // shown by `show`
  const poll = async () => {
    if (document.hidden) return;
    if (!state.facts && state.error?.status !== 401) await load();
    if (state.facts && (await figures.read())) show();
    else if (state.facts) await load();
  };
  state.addEventListener("change", show);
  api.events.addEventListener("key", load);
  document.addEventListener("visibilitychange", poll);
  load().then(poll);
  setInterval(poll, EVERY_MS);
}

function described({ models, profile, versions, limits, capabilities }) {
  const rows = [["Model", models[0]]];
  if (profile) rows.push(["Profile", profile]);
  rows.push(["vLLM", versions.vllm ?? "unknown"]);
  rows.push(["Longest file", `${duration(limits.clip_s)}, ${size(limits.file_bytes)}`]);
  rows.push(["Requests at a time", String(limits.in_flight)]);
  rows.push(["Live sessions", capabilities.live ? `up to ${limits.live_sessions}` : "none"]);
  return rows;
}

// Figures of /metrics (https://prometheus.io/docs/instrumenting/exposition_formats/), and what they gained since the last.
class Figures {
  #now = null;
  #before = null;

  // Whether the server answered.
  async read() {
    try {
      const text = await (await request("metrics")).text();
      this.#before = this.#now;
      this.#now = { at: performance.now() / 1000, values: parsed(text) };
      return true;
    } catch {
      return false;
    }
  }

  rows({ capabilities }) {
    if (!this.#now) return [];
    const { values } = this.#now;
    const rows = [];
    const inFlight = sum(values, "voxtral_serve_requests_in_flight");
    const waiting = sum(values, "vllm:num_requests_waiting");
    if (inFlight !== null)
      rows.push(["In flight", waiting ? `${inFlight}, ${waiting} of them waiting` : String(inFlight)]);
    const sessions = capabilities.live ? sum(values, "voxtral_serve_live_sessions") : null;
    if (sessions !== null) rows.push(["Live now", String(sessions)]);
    const lag = this.#lag();
    if (lag !== null) rows.push(["Live lag, 95 %", lag]);
    const steps = this.#gained("vllm:spec_decode_num_drafts_total");
    const accepted = this.#gained("vllm:spec_decode_num_accepted_tokens_total");
    if (steps && accepted !== null) rows.push(["Tokens a step", (1 + accepted / steps).toFixed(1)]);
    const rate = this.#rate("voxtral_serve_audio_seconds_total");
    if (rate !== null) rows.push(["Audio per second", `${rate < 10 ? rate.toFixed(1) : Math.round(rate)} s`]);
    return rows;
  }

  #rate(name) {
    const gained = this.#gained(name);
    return gained === null ? null : gained / (this.#now.at - this.#before.at);
  }

  #gained(name, labels = "") {
    if (!this.#before) return null;
    const now = sum(this.#now.values, name, labels);
    const before = sum(this.#before.values, name, labels) ?? 0;
    return now === null || now < before ? null : now - before; // less: the server was started again
  }

  // In which bucket of the histogram 95 of 100 tokens since the last time are. Null if there were none.
  #lag() {
    const name = "voxtral_serve_live_lag_seconds_bucket";
    const all = this.#gained(name, 'le="+Inf"');
    if (!all) return null;
    const edges = new Set([...(this.#now.values.get(name) ?? [])].map(([labels]) => /le="([^"]+)"/.exec(labels)?.[1]));
    for (const edge of [...edges].sort((a, b) => Number.parseFloat(a) - Number.parseFloat(b))) {
      if (edge !== "+Inf" && this.#gained(name, `le="${edge}"`) >= 0.95 * all)
        return `${Math.round(edge * 1000)} ms at most`;
    }
    return "over a minute";
  }
}

// name -> [[labels, value]]
function parsed(text) {
  const found = new Map();
  for (const [, name, labels, value] of text.matchAll(/^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/gm)) {
    if (!found.has(name)) found.set(name, []);
    found.get(name).push([labels ?? "", Number(value)]);
  }
  return found;
}

function sum(values, name, labels = "") {
  const rows = values.get(name)?.filter(([each]) => each.includes(labels));
  return rows?.length ? rows.reduce((total, [, value]) => total + value, 0) : null;
}
