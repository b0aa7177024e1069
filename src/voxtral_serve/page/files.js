// The half of the page for files: choose or drop them, and each becomes a card with its progress, player and text.

import { ApiError } from "./api.js";
import { button, clock, duration, element, size } from "./elements.js";
import { Player } from "./player.js";
import { transcribe } from "./transcribe.js";
import { FORMATS } from "./transcript.js";
import { Words } from "./words.js";

const AT_ONCE = 2; // files that are on their way
const OPEN = 3; // cards that open by themselves; further ones are opened by the user
const ANNOUNCE_MS = 3000; // how often a screen reader is told new words

export function start(section, context) {
  const queue = new Queue();
  const list = element("ul", { class: "cards", "aria-label": "Files" });
  const input = element("input", { type: "file", id: "file-input", multiple: true, accept: "audio/*,video/*", class: "unseen" });
  const limits = element("p", { class: "muted", id: "file-limits" });
  const choose = element("label", { for: "file-input", class: "choose" }, "Choose files");
  const drop = element("div", { class: "drop" }, element("p", {}, "Drop audio or video files here, or"), input, choose, limits);
  input.setAttribute("aria-describedby", "file-limits");
  section.append(element("h2", { class: "unseen" }, "Files"), drop, list);
  const add = (files) => {
    for (const file of files) {
      const card = new Card(file, context, queue);
      list.append(card.element);
      card.open(list.children.length <= OPEN);
      card.send();
    }
  };
  input.addEventListener("change", () => {
    add([...input.files]);
    input.value = ""; // so that the same file can be chosen again
  });
  acceptDrops(section, drop, add);
  context.server.addEventListener("change", () => {
    const facts = context.server.facts;
    limits.textContent = facts ? `At most ${size(facts.limits.file_bytes)} and ${duration(facts.limits.clip_s)} each.` : "";
  });
}

// Files that are dropped anywhere, while the half for files is shown.
function acceptDrops(section, drop, add) {
  const holdsFiles = (event) => !section.hidden && event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    drop.classList.add("over");
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) drop.classList.remove("over");
  });
  addEventListener("drop", (event) => {
    drop.classList.remove("over");
    if (!holdsFiles(event)) return;
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });
}

// Runs at most AT_ONCE jobs, in the order in which they came.
class Queue {
  #running = 0;
  #waiting = [];

  async run(job, signal) {
    if (this.#running >= AT_ONCE) await new Promise((resolve) => this.#waiting.push(resolve));
    else this.#running += 1;
    try {
      signal.throwIfAborted();
      return await job();
    } finally {
      const next = this.#waiting.shift();
      if (next) next();
      else this.#running -= 1;
    }
  }
}

let cards = 0; // so far

class Card {
  constructor(file, context, queue) {
    Object.assign(this, { file, context, queue, transcript: null, player: null, aborter: null, announced: 0, unsaid: "" });
    this.status = element("p", { class: "status" });
    this.progress = element("progress", { max: 1, value: 0, "aria-label": "Upload", hidden: true });
    this.stop = button("Cancel", () => this.aborter.abort(), { hidden: true });
    this.again = button("Send again", () => this.send(), { hidden: true });
    this.remove = button("Remove", () => this.#remove(), { "aria-label": `Remove ${file.name}` });
    this.draft = element("p", { class: "draft", hidden: true });
    this.result = element("div", { class: "result", hidden: true });
    this.body = element("div", { id: `file-${(cards += 1)}` }, this.draft, this.result);
    this.title = button(file.name, () => this.open(this.body.hidden), { class: "name", "aria-controls": this.body.id });
    const heading = element("div", { class: "title" }, element("h3", {}, this.title), element("span", { class: "muted" }, size(file.size)));
    const head = element("div", { class: "head" }, heading, this.status, this.progress, this.stop, this.again, this.remove);
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
      if (signal.aborted) this.#show("Cancelled.");
      else this.#fail(error);
    }
  }

  async #transcribe(signal) {
    const { server } = this.context;
    const facts = server.facts ?? (await this.context.api.resending(() => server.load(), { signal, waiting: (...told) => this.#wait(...told) }));
    const most = facts.limits.file_bytes;
    if (this.file.size > most) {
      throw new ApiError(413, `The file has ${size(this.file.size)}, and this server takes at most ${size(most)}. Send a compressed format such as Opus, or a shorter file.`);
    }
    if (!this.file.size) throw new ApiError(400, "The file is empty.");
    return transcribe(this.file, facts, signal, {
      uploaded: (share) => this.#upload(share),
      text: (text, delta) => this.#write(text, delta),
      waiting: (error, seconds) => this.#wait(error, seconds),
    });
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
    const sent = `Uploading: ${Math.round(100 * share)} %`;
    this.#show(share < 1 ? sent : "Uploaded. The server reads it.", { running: true, progress: share < 1 ? share : null });
    this.progress.setAttribute("aria-label", share < 1 ? "Upload" : "Transcription");
  }

  #write(text, delta) {
    if (!delta) this.draft.textContent = "";
    this.draft.hidden = !text;
    if (!delta) return;
    this.draft.append(delta);
    const count = text.trim().split(/\s+/).length;
    this.#show(`Transcribing: ${count} ${count === 1 ? "word" : "words"}`, { running: true });
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
    this.#show(`${error.message} It is sent again in ${about} ${about === 1 ? "second" : "seconds"}.`, { running: true });
  }

  #fail(error) {
    this.failed = error;
    this.draft.hidden = true;
    if (!(error instanceof ApiError)) console.error(error);
    this.#show(error.message, { error: true });
    this.context.announce(`${this.file.name}: ${error.message}`);
  }

  #done() {
    const { content, units } = this.transcript;
    const empty = !units.length;
    const count = content.text.split(/\s+/).filter(Boolean).length;
    this.#show(empty ? `${clock(content.duration)}, no speech was found.` : `${clock(content.duration)}, ${count} ${count === 1 ? "word" : "words"}`);
    this.draft.hidden = true;
    this.context.announce(`${this.unsaid} ${this.file.name}: done, ${count} words.`);
    this.#fill();
  }

  // The player and the words, once there is a transcript that the user sees.
  #fill() {
    if (!this.transcript || this.body.hidden || this.player) return;
    this.player = new Player(this.file, this.transcript.content.duration, this.context.styleNonce);
    this.words = new Words(this.transcript);
    this.words.addEventListener("play", ({ detail }) => this.player.play(detail));
    this.player.addEventListener("time", ({ detail }) => this.words.light(detail.seconds || detail.playing ? detail.seconds : null, detail.playing));
    const edit = button("Edit words", () => {
      this.words.editing = !this.words.editing;
      edit.setAttribute("aria-pressed", String(this.words.editing));
    }, { "aria-pressed": "false", title: "A click edits a word. Without it: double-click, or F2." });
    const revert = button("Undo edits", () => {
      this.transcript.revert();
      this.words.refresh();
      revert.disabled = true;
    }, { disabled: true });
    this.words.addEventListener("edited", () => (revert.disabled = !this.transcript.edited));
    const downloads = Object.keys(FORMATS).map((format) => button(`.${format}`, () => this.#download(format), { "aria-label": `Download .${format}` }));
    const copy = button("Copy text", async () => {
      await navigator.clipboard.writeText(this.transcript.text());
      this.context.announce("The text is copied.");
    }, { hidden: !navigator.clipboard }); // browsers have a clipboard on https:// and localhost only
    const tools = element("div", { class: "tools", role: "group", "aria-label": "Transcript" }, edit, revert, copy, element("span", { class: "muted" }, "Download"), ...downloads);
    this.result.append(this.player.element, this.words.element, tools);
    this.result.hidden = false;
  }

  #download(format) {
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
