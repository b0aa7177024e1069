// Captions for a video mixer such as OBS: large words in a few lines on a transparent page. They come from the Live tab
// of the page in the same browser, or from a microphone that this page opens itself. Options are in the fragment of the
// address, which no server sees.

import * as api from "./api.js";
import { CHANNEL, lastTurns } from "./captions-channel.js";
import { CaptureError, Microphone } from "./capture.js";
import { DELAYS, LiveSession } from "./live-session.js";

const HINT_MS = 15000; // for which the page says what it waits for

/** What options may be, and their defaults. */
const OPTIONS = {
  lines: { ...whole(1, 10), value: 2 },
  size: { ...whole(10, 400), value: 48 }, // pixels
  clear: { ...whole(1, 3600), value: 8 }, // seconds without a word after which the caption goes
  source: { ...oneOf("tab", "microphone"), value: "tab" },
  delay: { ...oneOf(...DELAYS.map(({ name }) => name)), value: "medium" },
  turns: { ...oneOf("server_vad", "semantic_vad"), value: "server_vad" },
  key: { expected: "", accept: (text) => text, value: "" },
};

function whole(low, high) {
  const accept = (text) => (/^\d{1,4}$/.test(text) && text >= low && text <= high ? Number(text) : undefined);
  return { expected: `a whole number from ${low} to ${high}`, accept };
}

function oneOf(...names) {
  return { expected: `one of ${names.join(", ")}`, accept: (text) => (names.includes(text) ? text : undefined) };
}

/** The options of the fragment. Throws an Error with words for one that is unknown or not valid. */
function options(fragment) {
  const found = Object.fromEntries(Object.entries(OPTIONS).map(([name, { value }]) => [name, value]));
  for (const [name, text] of new URLSearchParams(fragment)) {
    if (!Object.hasOwn(OPTIONS, name)) throw new Error(`"${name}" is no option: expected ${Object.keys(OPTIONS).join(", ")}`);
    const value = OPTIONS[name].accept(text);
    if (value === undefined) throw new Error(`${name} is "${text}": expected ${OPTIONS[name].expected}`);
    found[name] = value;
  }
  return found;
}

const byId = (id) => document.getElementById(id);

class Caption {
  constructor({ lines, size, clear }) {
    document.documentElement.style.setProperty("--lines", lines);
    document.documentElement.style.setProperty("--size", `${size}px`);
    this.clearMs = clear * 1000;
    this.shown = "";
    this.gone = { number: -1, text: "" }; // the last turn when the caption went
  }

  /** The last turns, [{number, text}]. */
  show(turns) {
    const { gone } = this;
    if ((turns.at(-1)?.number ?? gone.number) < gone.number) this.gone = { number: -1, text: "" }; // another session
    const news = turns
      .filter(({ number }) => number >= this.gone.number)
      .map(({ number, text }) => (number === this.gone.number ? text.slice(this.gone.text.length) : text));
    const words = news.join(" ").trim();
    if (words === this.shown) return;
    byId("words").textContent = this.shown = words;
    note("");
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.clear(turns), this.clearMs);
  }

  clear(turns) {
    this.gone = turns.at(-1) ?? this.gone;
    byId("words").textContent = this.shown = "";
  }
}

function note(words) {
  if (byId("note").textContent !== words) byId("note").textContent = words;
}

/** Words of the Live tab of this browser. */
function followTab(caption) {
  const channel = new BroadcastChannel(CHANNEL);
  channel.onmessage = ({ data }) => data.turns && caption.show(data.turns);
  channel.postMessage("hello");
  const hint = "Captions of the Live tab in this browser appear here.";
  note(hint);
  setTimeout(() => byId("note").textContent === hint && note(""), HINT_MS);
}

/** Words of a microphone that this page opens. */
async function listen(caption, { delay, turns }) {
  const session = new LiveSession({
    address: api.url("../v1/realtime?intent=transcription", "ws"),
    key: api.key.value,
    probe: () => api.request("../v1/models").then(({ status }) => status, (error) => error.status ?? 0),
    delay,
    turns,
  });
  const complete = [];
  let growing = [];
  const show = () => caption.show(lastTurns([...complete, ...growing]));
  session.addEventListener("turn", ({ detail }) => complete.push(detail));
  session.addEventListener("partial", ({ detail }) => {
    growing = detail;
    complete.splice(0, complete.length - 10);
    show();
  });
  session.addEventListener("state", ({ detail: { state, words } }) => note(state === "waiting" ? `Connecting again: ${words}.` : ""));
  session.addEventListener("failed", ({ detail: { words } }) => {
    microphone.close();
    note(words);
  });
  const microphone = new Microphone("", {
    onPiece: (pcm) => session.record(pcm),
    onError: (error) => {
      session.abandon();
      note(error.message);
    },
  });
  try {
    await microphone.start();
  } catch (error) {
    if (!(error instanceof CaptureError)) throw error;
    note(error.message);
    return;
  }
  session.open();
  if (microphone.blocked) askForClick(microphone);
}

/** Browsers run no audio before a click. OBS does. */
function askForClick(microphone) {
  const button = byId("begin");
  button.hidden = false;
  const started = () => (button.hidden = !microphone.blocked);
  microphone.context.addEventListener("statechange", started);
  button.addEventListener("click", () => microphone.resume());
}

function start() {
  let chosen;
  try {
    chosen = options(location.hash.slice(1));
  } catch (error) {
    note(error.message);
    return;
  } finally {
    hideKey();
  }
  api.key.set(chosen.key);
  const caption = new Caption(chosen);
  if (chosen.source === "tab") followTab(caption);
  else listen(caption, chosen);
}

/** Out of the address, and so out of the history and of screenshots. */
function hideKey() {
  const rest = new URLSearchParams(location.hash.slice(1));
  if (!rest.has("key")) return;
  rest.delete("key");
  history.replaceState(null, "", `${location.pathname}${location.search}#${rest}`);
}

start();
addEventListener("hashchange", () => location.reload());
