// The half of the page for files: they are chosen or dropped, and each becomes a card.

import { Card } from "./card.js";
import { duration, element, size } from "./elements.js";
import * as speakers from "./speakers.js";

const AT_ONCE = 2; // files that are on their way
const OPEN = 3; // cards that open by themselves; further ones are opened by the user

export function start(section, context) {
  const queue = new Queue();
  const list = element("ul", { class: "cards", "aria-label": "Files" });
  const input = element("input", {
    type: "file",
    id: "file-input",
    multiple: true,
    accept: "audio/*,video/*",
    class: "unseen",
  });
  const limits = element("p", { class: "muted", id: "file-limits" });
  const choose = element("label", { for: "file-input", class: "choose" }, "Choose files");
  const drop = element(
    "div",
    { class: "drop" },
    element("p", {}, "Drop audio or video files here, or"),
    input,
    choose,
    limits,
  );
  input.setAttribute("aria-describedby", "file-limits");
  const choice = speakers.choice(context.server);
  section.append(element("h2", { class: "unseen" }, "Files"), drop, choice, list);
  const add = (files) => {
    for (const file of files) {
      const card = new Card(file, context, queue, choice.value);
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
    limits.textContent = facts
      ? `At most ${size(facts.limits.file_bytes)} and ${duration(facts.limits.clip_s)} each.`
      : "";
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
    if (this.#running >= AT_ONCE) await this.#turn(signal);
    else this.#running += 1;
    try {
      return await job();
    } finally {
      const next = this.#waiting.shift();
      if (next) next();
      else this.#running -= 1;
    }
  }

  // Resolves when a job before has ended, whose place is passed on.
  #turn(signal) {
    return new Promise((resolve, reject) => {
      this.#waiting.push(resolve);
      const leave = () => {
        if (!this.#waiting.includes(resolve)) return;
        this.#waiting = this.#waiting.filter((each) => each !== resolve);
        reject(signal.reason);
      };
      signal.addEventListener("abort", leave);
    });
  }
}
