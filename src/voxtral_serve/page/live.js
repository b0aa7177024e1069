// The half of the page for live speech: a microphone, or a file as if it were live; words as they are spoken.

import { CHANNEL, lastTurns } from "./captions-channel.js";
import { CaptureError, level, Microphone, microphones, PacedFile, RATE } from "./capture.js";
import { button, clock, element } from "./elements.js";
import { DELAYS, LiveSession } from "./live-session.js";
import { asJson, asSubtitles, asText, TurnView } from "./turns.js";

const METER_MS = 100; // between two positions of the level meter
const STILL_MS = 1000; // the same for people who asked for less motion
const BLOCKED_MS = 5000; // after which audio that has not started is told. Firefox starts none without an output device
const QUIET_DB = -60; // of the meter's low end
const SAVED = [
  ["txt", "text/plain", asText],
  ["srt", "application/x-subrip", asSubtitles],
  ["json", "application/json", asJson],
];

export function start(section, context) {
  new Live(section, context);
}

class Live {
  constructor(section, context) {
    Object.assign(this, { section, context });
    this.channel = new BroadcastChannel(CHANNEL);
    this.channel.onmessage = ({ data }) => data === "hello" && this.caption();
    this.build();
    this.view = new TurnView(this.transcript);
    this.view.hint.textContent = "Press Start and speak. Words appear here as they are spoken.";
    this.show("idle");
    this.listMicrophones();
    navigator.mediaDevices?.addEventListener?.("devicechange", () => this.listMicrophones());
    addEventListener("online", () => this.session?.reconnect());
    addEventListener("beforeunload", (event) => this.running && event.preventDefault());
  }

  // ---- What is on the page

  build() {
    this.microphone = element("input", { type: "radio", name: "live-source", id: "live-microphone", checked: true });
    this.fromFile = element("input", { type: "radio", name: "live-source", id: "live-from-file" });
    this.device = element("select", { id: "live-device", "aria-label": "Which microphone" });
    const kinds = { accept: "audio/*,video/*", "aria-label": "File to play" };
    this.file = element("input", { type: "file", id: "live-file", change: () => this.chooseFile(), ...kinds });
    this.audible = element("input", { type: "checkbox", id: "live-audible", checked: true });
    const range = { min: 0, max: DELAYS.length - 1, step: 1, value: 2, input: () => this.showDelay() };
    this.delay = element("input", { type: "range", id: "live-delay", ...range });
    this.delayShown = element("output", { for: "live-delay", id: "live-delay-shown" });
    this.turns = element(
      "select",
      { id: "live-turns" },
      element("option", { value: "server_vad" }, "at pauses"),
      element("option", { value: "semantic_vad" }, "at ends of sentences"),
    );
    this.startButton = button("Start", () => this.start(), { id: "live-start", class: "primary" });
    this.pauseButton = button("Pause", () => this.pauseOrResume(), { id: "live-pause" });
    this.stopButton = button("Stop", () => this.stop(), { id: "live-stop" });
    const scale = { min: QUIET_DB, max: 0, low: -45, high: -6, optimum: -20, value: QUIET_DB };
    this.meter = element("meter", { id: "live-level", "aria-label": "Level of the sound", ...scale });
    this.clock = element("span", { id: "live-clock", class: "clock" });
    this.status = element("p", { id: "live-status", role: "status" });
    this.problem = element("p", { id: "live-problem", class: "error", role: "alert" });
    const region = { tabindex: 0, role: "region", "aria-label": "Transcript" };
    this.transcript = element("div", { id: "live-transcript", ...region });
    this.section.append(this.settings(), this.controls(), this.problem, this.transcript, this.actions());
    for (const each of [this.microphone, this.fromFile]) each.addEventListener("change", () => this.show());
    this.showDelay();
  }

  settings() {
    this.audibleRow = element("div", { class: "below" }, this.audible, label(this.audible, "Play it aloud"));
    const source = element(
      "fieldset",
      {},
      element("legend", {}, "Source"),
      element("div", {}, this.microphone, label(this.microphone, "Microphone"), this.device),
      element("div", {}, this.fromFile, label(this.fromFile, "A file, as if it were live"), this.file),
      this.audibleRow,
    );
    const text = element(
      "fieldset",
      {},
      element("legend", {}, "Text"),
      element("div", {}, label(this.delay, "Delay"), this.delay, this.delayShown),
      element("div", {}, label(this.turns, "Paragraphs end"), this.turns),
    );
    return element("div", { class: "live-settings" }, source, text);
  }

  controls() {
    const buttons = [this.startButton, this.pauseButton, this.stopButton];
    const row = element("div", { class: "live-controls" }, ...buttons, this.meter, this.clock);
    return element("div", {}, row, this.status);
  }

  actions() {
    const copy = button("Copy", () => this.copy(), { id: "live-copy" });
    const saves = SAVED.map(([suffix, type, form]) =>
      button(`Save .${suffix}`, () => save(form(this.view.turns), type, `live.${suffix}`), { id: `live-save-${suffix}` }),
    );
    this.clearButton = button("Clear", () => this.clear(), { id: "live-clear" });
    this.results = [copy, ...saves, this.clearButton];
    const caption = { href: new URL("caption.html", import.meta.url).href, target: "_blank", id: "live-caption" };
    return element("div", { class: "live-actions" }, ...this.results, element("a", caption, "Caption view"));
  }

  showDelay() {
    const { ms, name } = DELAYS[this.delay.value];
    this.delayShown.textContent = `${ms} ms`;
    this.delay.setAttribute("aria-valuetext", `${ms} ms: ${name}`);
  }

  /** `state`: idle, starting, running, paused or finishing. */
  show(state = this.state) {
    this.state = this.section.dataset.state = state;
    const idle = state === "idle";
    for (const each of this.section.querySelectorAll("fieldset")) each.disabled = !idle;
    this.device.hidden = this.device.length < 2 || !this.microphone.checked;
    this.file.hidden = this.audibleRow.hidden = !this.fromFile.checked;
    const focused = document.activeElement;
    this.startButton.hidden = !idle;
    this.pauseButton.hidden = idle;
    this.pauseButton.disabled = state === "finishing"; // not while it starts, to have the focus then
    this.pauseButton.textContent = state === "paused" ? "Resume" : "Pause";
    this.stopButton.hidden = idle;
    this.stopButton.textContent = state === "finishing" ? "Leave out the rest" : "Stop";
    this.meter.value = state === "running" ? this.meter.value : QUIET_DB;
    if (focused?.closest(".live-controls") && (focused.hidden || focused.disabled)) {
      (idle ? this.startButton : this.pauseButton.disabled ? this.stopButton : this.pauseButton).focus();
    }
    this.showResults();
  }

  showResults() {
    const some = this.view?.turns.length > 0;
    for (const each of this.results) each.disabled = !some;
    this.clearButton.disabled ||= this.state !== "idle";
    if (this.view) this.view.hint.hidden = some || this.view.partial.length > 0;
  }

  say(words) {
    if (this.status.textContent !== words) this.status.textContent = words;
  }

  async listMicrophones() {
    const found = await microphones();
    const chosen = this.device.value;
    const options = found.map(({ deviceId, label: name }, index) =>
      element("option", { value: deviceId }, name || `Microphone ${index + 1}`),
    );
    this.device.replaceChildren(...options);
    if (found.some(({ deviceId }) => deviceId === chosen)) this.device.value = chosen;
    this.show();
  }

  chooseFile() {
    this.fromFile.checked = true;
    this.show();
  }

  // ---- A session

  get running() {
    return this.state !== "idle";
  }

  async start() {
    this.problem.textContent = "";
    if (this.fromFile.checked && !this.file.files.length) {
      this.problem.textContent = "Choose a file first.";
      this.file.focus();
      return;
    }
    if (this.context.server.facts?.capabilities.live === false) {
      this.problem.textContent = "This server has no live speech. Serve profiles/fast.yaml or profiles/realtime.yaml.";
      return;
    }
    this.show("starting");
    this.view.clear();
    this.heard = 0;
    this.lost = "";
    this.say(this.fromFile.checked ? "Reading the file …" : "Asking for the microphone …");
    const session = (this.session = this.newSession());
    this.source = this.newSource();
    try {
      await this.source.start();
    } catch (error) {
      this.end();
      if (!(error instanceof CaptureError)) throw error;
      this.problem.textContent = error.message;
      return;
    }
    if (this.state !== "starting" || session !== this.session) return;
    this.show("running");
    this.listMicrophones();
    session.open();
    setTimeout(() => session === this.session && this.checkSource(), BLOCKED_MS);
  }

  checkSource() {
    if (this.state !== "running" || !this.source.blocked) return;
    this.problem.textContent =
      "The browser's audio does not start. Connect a device for sound output, or headphones, then stop and start again.";
  }

  newSource() {
    const { session } = this;
    const mine = (act) => (value) => session === this.session && act(value);
    const events = {
      onPiece: mine((pcm) => this.hear(pcm)),
      onEnd: mine(() => this.finish()),
      onError: mine((error) => {
        this.problem.textContent = error.message;
        this.source.stop();
      }),
    };
    if (!this.fromFile.checked) return new Microphone(this.device.value, events);
    return new PacedFile(this.file.files[0], this.audible.checked, events);
  }

  newSession() {
    const { api } = this.context;
    const session = new LiveSession({
      address: api.url("v1/realtime?intent=transcription", "ws"),
      key: api.key.value,
      probe: () => api.request("v1/models").then(({ status }) => status, (error) => error.status ?? 0),
      delay: DELAYS[this.delay.value].name,
      turns: this.turns.value,
    });
    const on = (kind, act) => session.addEventListener(kind, ({ detail }) => session === this.session && act(detail));
    on("state", (detail) => this.changed(detail));
    on("partial", (partial) => this.grown(partial));
    on("turn", (turn) => this.complete(turn));
    on("lost", ({ seconds }) => (this.lost = ` ${Math.round(seconds)} s of audio are lost.`));
    on("failed", ({ words }) => {
      this.problem.textContent = words;
      this.source.close();
      this.end("Stopped.");
    });
    return session;
  }

  hear(pcm) {
    this.session.record(pcm);
    this.heard += pcm.length;
    const now = performance.now();
    const every = matchMedia("(prefers-reduced-motion: reduce)").matches ? STILL_MS : METER_MS;
    this.loudest = Math.max(this.loudest ?? QUIET_DB, level(pcm));
    if (now - (this.metered ?? 0) < every) return;
    this.meter.value = this.loudest;
    this.meter.title = `${Math.round(this.loudest)} dBFS`;
    this.clock.textContent = clock(this.heard / RATE);
    this.metered = now;
    this.loudest = QUIET_DB;
  }

  async pauseOrResume() {
    if (this.state === "paused") {
      await this.source.resume();
      this.session.resume();
      this.show("running");
    } else if (this.state === "running") {
      this.show("paused");
      await this.source.pause();
      this.session.pause();
    }
  }

  stop() {
    if (this.state === "finishing") this.session.abandon();
    else if (this.state === "starting") {
      this.source.close();
      this.end("Stopped.");
    } else {
      this.show("finishing");
      this.source.stop();
    }
  }

  /** All audio is here; its text is not. */
  finish() {
    if (!this.running) return;
    this.show("finishing");
    this.say("Waiting for the last words …");
    this.session.end();
  }

  end(words = "") {
    this.session = undefined;
    this.view.update([]);
    this.caption();
    this.say(words);
    this.show("idle");
  }

  changed({ state, words, wait_ms }) {
    if (state === "ended") {
      this.end(`Done: ${clock(this.heard / RATE)} of audio.${this.lost}`);
      return;
    }
    const rest = this.state === "finishing";
    const said = {
      connecting: "Connecting …",
      listening: rest ? "Waiting for the last words …" : "Listening.",
      paused: "Paused.",
      waiting: `Trying again in ${Math.ceil(wait_ms / 1000)} s: ${words}. What you say meanwhile is kept.`,
    };
    this.say(said[state] + this.lost);
  }

  // ---- Text

  grown(partial) {
    this.view.update(partial);
    this.showResults();
    this.caption();
  }

  complete(turn) {
    this.view.turn(turn);
    this.showResults();
  }

  caption() {
    this.channel.postMessage({ turns: lastTurns([...this.view.turns, ...this.view.partial]) });
  }

  clear() {
    this.view.clear();
    this.say("");
    this.clock.textContent = "";
    this.caption();
    this.showResults();
    this.startButton.focus();
  }

  async copy() {
    const text = asText(this.view.turns);
    try {
      await navigator.clipboard.writeText(text);
      this.say("Copied.");
    } catch {
      getSelection().selectAllChildren(this.view.log);
      this.say("The browser does not allow to copy here. The text is selected: press Ctrl+C.");
    }
  }
}

function label(control, text) {
  return element("label", { for: control.id }, text);
}

function save(content, type, name) {
  const address = URL.createObjectURL(new Blob([content], { type: `${type};charset=utf-8` }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000); // once the browser has read it
}
