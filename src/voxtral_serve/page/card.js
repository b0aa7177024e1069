// A file: its request, with progress and errors in words, and its player, words and files once there is a transcript.

import { ApiError, resending } from "./api.js";
import { button, clock, element, size } from "./elements.js";
import { Player } from "./player.js";
import { names } from "./speakers.js";
import { transcribe } from "./transcribe.js";
import { FORMATS } from "./transcript.js";
import { Words } from "./words.js";

const ANNOUNCE_MS = 3000; // how often a screen reader is told new words

let cards = 0; // so far

// `queue` runs its request when it is its turn; `speakers` is a value of speakers.js.
export class Card {
  constructor(file, context, queue, speakers) {
    Object.assign(this, { file, context, queue, speakers });
    this.transcript = this.player = this.aborter = this.failed = null;
    this.announced = 0; // when a screen reader was told words
    this.unsaid = "";
    this.status = element("p", { class: "status" });
    this.progress = element("progress", { max: 1, value: 0, "aria-label": "Upload", hidden: true });
    this.stop = button("Cancel", () => this.aborter.abort(), { hidden: true });
    this.again = button("Send again", () => this.send(), { hidden: true });
    this.remove = button("Remove", () => this.#remove(), { "aria-label": `Remove ${file.name}` });
    this.draft = element("p", { class: "draft", hidden: true });
    this.result = element("div", { class: "result", hidden: true });
    this.body = element("div", { id: `file-${(cards += 1)}` }, this.draft, this.result);
    this.title = button(file.name, () => this.open(this.body.hidden), { class: "name", "aria-controls": this.body.id });
    const bytes = element("span", { class: "muted" }, size(file.size));
    const heading = element("div", { class: "title" }, element("h3", {}, this.title), bytes);
    const controls = [this.status, this.progress, this.stop, this.again, this.remove];
    const head = element("div", { class: "head" }, heading, ...controls);
    this.element = element("li", { class: "card" }, head, this.body);
    this.removed = new AbortController();
    const retry = () => this.failed?.status === 401 && this.send();
    context.api.events.addEventListener("key", retry, { signal: this.removed.signal });
  }

  open(open) {
    this.body.hidden = !open;
    this.title.setAttribute("aria-expanded", String(open));
    this.#fill();
  }

  async send() {
    this.aborter = new AbortController();
    const { signal } = this.aborter;
    this.failed = null;
    this.#show("Waiting for other files.", { running: true });
    try {
      this.transcript = await this.queue.run(() => this.#transcribe(signal), signal);
      this.#done();
    } catch (error) {
      this.draft.hidden = true;
      if (signal.aborted) this.#show("Cancelled.");
      else this.#fail(error);
    }
  }

  async #transcribe(signal) {
    const { server } = this.context;
    const waiting = (error, seconds) => this.#wait(error, seconds);
    const facts = server.facts ?? (await resending(() => server.load(), { signal, waiting }));
    await this.#check(facts.limits.file_bytes);
    const uploaded = (share) => this.#upload(share);
    const text = (all, delta) => this.#write(all, delta);
    return transcribe(this.file, facts, this.speakers, signal, { uploaded, text, waiting });
  }

  // Throws ApiError for a file that need not be sent.
  async #check(most) {
    const found = this.file.size;
    if (found > most) {
      const sizes = `The file has ${size(found)}, and this server takes at most ${size(most)}.`;
      throw new ApiError(413, `${sizes} Send a compressed format such as Opus, or a shorter file.`);
    }
    await this.file
      .slice(0, 1)
      .arrayBuffer()
      .catch(() => {
        throw new ApiError(400, "The browser cannot read it. Of a folder, choose the files in it.");
      });
    if (!found) throw new ApiError(400, "The file is empty.");
  }

  #show(text, { running = false, error = false, progress = null } = {}) {
    this.status.textContent = text;
    this.status.classList.toggle("error", error);
    this.stop.hidden = !running;
    this.again.hidden = running || this.transcript !== null;
    this.progress.hidden = !running;
    if (progress === null) this.progress.removeAttribute("value");
    else this.progress.value = progress;
    this.element.dataset.state = running ? "running" : error ? "failed" : this.transcript ? "done" : "stopped";
  }

  #upload(share) {
    if (share < 1) this.#show(`Uploading: ${Math.round(100 * share)} %`, { running: true, progress: share });
    else this.#show("Uploaded. The server reads it.", { running: true });
    this.progress.setAttribute("aria-label", share < 1 ? "Upload" : "Transcription");
  }

  #write(text, delta) {
    if (!delta) this.draft.textContent = "";
    this.draft.hidden = !text;
    if (!delta) return;
    this.draft.append(delta);
    this.#show(`Transcribing: ${counted(text)}`, { running: true });
    this.#say(delta);
  }

  // New words, a few at a time: a screen reader would be interrupted by each.
  #say(delta) {
    this.unsaid += delta;
    if (Date.now() - this.announced < ANNOUNCE_MS) return;
    this.announced = Date.now();
    this.context.announce(this.unsaid);
    this.unsaid = "";
  }

  #wait(error, seconds) {
    const about = Math.max(1, Math.round(seconds));
    const again = `It is sent again in ${about} ${about === 1 ? "second" : "seconds"}.`;
    this.#show(`${error.message} ${again}`, { running: true });
  }

  #fail(error) {
    this.failed = error;
    if (!(error instanceof ApiError)) console.error(error);
    this.#show(error.message, { error: true });
    this.context.announce(`${this.file.name}: ${error.message}`);
  }

  #done() {
    const { content, units, speakers } = this.transcript;
    const found = units.length ? counted(content.text) : "no speech was found.";
    const unlabelled = this.speakers && units.length && !speakers.length ? " without labels of speakers" : "";
    this.#show(`${clock(content.duration)}, ${found}${unlabelled}`);
    this.draft.hidden = true;
    this.context.announce(`${this.unsaid} ${this.file.name}: done, ${found}`);
    this.#fill();
  }

  // The player and the words, once there is a transcript that the user sees.
  #fill() {
    if (!this.transcript || this.body.hidden || this.player) return;
    const player = (this.player = new Player(this.file, this.transcript.content.duration, this.context.styleNonce));
    const words = new Words(this.transcript);
    words.addEventListener("play", ({ detail }) => player.play(detail));
    player.addEventListener("time", ({ detail: { seconds, playing } }) => {
      words.light(seconds || playing ? seconds : null, playing);
    });
    const voices = names(this.transcript);
    voices.addEventListener("change", () => {
      words.refresh();
      words.dispatchEvent(new Event("edited"));
    });
    this.result.append(player.element, voices, words.element, this.#tools(words, voices));
    this.result.hidden = false;
  }

  #tools(words, voices) {
    const edit = button("Edit words", () => toggle(), {
      "aria-pressed": "false",
      title: "A click edits a word. Without it: double-click, or F2.",
    });
    const toggle = () => {
      words.editing = !words.editing;
      edit.setAttribute("aria-pressed", String(words.editing));
    };
    const revert = button("Undo edits", () => undo(), { disabled: true });
    const undo = () => {
      this.transcript.revert();
      words.refresh();
      voices.refresh();
      revert.disabled = true;
    };
    words.addEventListener("edited", () => (revert.disabled = !this.transcript.edited));
    // Browsers have a clipboard on https:// and localhost only.
    const copy = button("Copy text", () => this.#copy(), { hidden: !navigator.clipboard });
    const saves = Object.keys(FORMATS).map((format) => {
      return button(`.${format}`, () => this.#save(format), { "aria-label": `Download .${format}` });
    });
    const label = element("span", { class: "muted" }, "Download");
    const attributes = { class: "tools", role: "group", "aria-label": "Transcript" };
    return element("div", attributes, edit, revert, copy, label, ...saves);
  }

  async #copy() {
    await navigator.clipboard.writeText(this.transcript.text());
    this.context.announce("The text is copied.");
  }

  #save(format) {
    const address = URL.createObjectURL(new Blob([this.transcript.file(format)], { type: FORMATS[format] }));
    const name = `${this.file.name.replace(/\.[^.]+$/, "") || "transcript"}.${format}`;
    element("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
  }

  #remove() {
    this.aborter.abort();
    this.removed.abort();
    this.player?.destroy();
    const next = this.element.nextElementSibling ?? this.element.previousElementSibling;
    (next?.querySelector(".name") ?? document.getElementById("file-input")).focus();
    this.element.remove();
  }
}

function counted(text) {
  const count = text.split(/\s+/).filter(Boolean).length;
  return `${count} ${count === 1 ? "word" : "words"}`;
}
