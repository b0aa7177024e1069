// The words of a transcript: heard by a click, edited in place, lit while they sound. All words are one stop of the Tab
// key; arrows go from one to the next.

import { clock, element } from "./elements.js";
import { tint } from "./speakers.js";

// Events: "play", with the second to play from; "edited".
export class Words extends EventTarget {
  constructor(transcript) {
    super();
    this.transcript = transcript;
    this.editing = false; // whether a click edits
    this.heard = -1;
    this.spans = transcript.units.map((each, index) => this.#span(each, index));
    this.turns = []; // {element, heading, speaker}
    const hint = "Words of the transcript. Arrow keys move, Enter plays a word, F2 edits it.";
    this.element = element("div", { class: "words", role: "group", "aria-label": hint }, ...this.#paragraphs());
    this.element.addEventListener("click", (event) => this.#click(event));
    this.element.addEventListener("dblclick", (event) => this.#edit(this.#index(event.target)));
    this.element.addEventListener("keydown", (event) => this.#key(event));
    if (this.spans.length) this.spans[0].tabIndex = 0;
  }

  #span(each, index) {
    const attributes = {
      class: "word",
      role: "button",
      "aria-roledescription": "word",
      tabindex: -1,
      "data-index": index,
    };
    const span = element("span", attributes);
    this.#write(span, each);
    return span;
  }

  #write(span, { text, original }) {
    span.textContent = text || "…";
    span.classList.toggle("edited", text !== original);
    span.title = text === original ? "" : `was: ${original}`;
    if (text) span.removeAttribute("aria-label");
    else span.setAttribute("aria-label", `removed: ${original}`);
  }

  #paragraphs() {
    const { units, content } = this.transcript;
    const paragraphs = content.segments.map((segment) => {
      return element("p", {}, element("span", { class: "at muted", "aria-hidden": "true" }, clock(segment.start)));
    });
    for (const [index, each] of units.entries()) paragraphs[each.segment].append(" ", this.spans[index]);
    return this.transcript.speakers.length ? this.#turns(paragraphs) : paragraphs;
  }

  // Those of one speaker after the other, each with the name above.
  #turns(paragraphs) {
    for (const [number, { speaker }] of this.transcript.content.segments.entries()) {
      if (this.turns.at(-1)?.speaker !== speaker) {
        const heading = element("p", { class: "who" });
        this.turns.push({ element: element("div", { class: "turn" }, heading), heading, speaker });
      }
      this.turns.at(-1).element.append(paragraphs[number]);
    }
    this.#name();
    return this.turns.map((turn) => turn.element);
  }

  #name() {
    for (const turn of this.turns) {
      turn.heading.textContent = this.transcript.name(turn.speaker);
      tint(turn.element, this.transcript, turn.speaker);
    }
  }

  #index(target) {
    const span = target instanceof Element ? target.closest(".word") : null;
    return span ? Number(span.dataset.index) : -1;
  }

  #click(event) {
    const index = this.#index(event.target);
    if (index < 0 || event.target.tagName === "INPUT") return;
    this.#focus(index);
    if (this.editing) this.#edit(index);
    else this.#play(index);
  }

  #play(index) {
    this.dispatchEvent(new CustomEvent("play", { detail: this.transcript.units[index].start }));
  }

  #focus(index) {
    for (const span of this.element.querySelectorAll(".word[tabindex='0']")) span.tabIndex = -1;
    this.spans[index].tabIndex = 0;
    this.spans[index].focus();
  }

  #key(event) {
    const index = this.#index(event.target);
    if (index < 0 || event.target.tagName === "INPUT" || event.ctrlKey || event.altKey || event.metaKey) return;
    const last = this.spans.length - 1;
    const to = { ArrowRight: index + 1, ArrowLeft: index - 1, ArrowDown: this.#segment(index, 1) }[event.key];
    const next = { ArrowUp: this.#segment(index, -1), Home: 0, End: last }[event.key] ?? to;
    if (next !== undefined) this.#focus(Math.min(Math.max(next, 0), last));
    else if (event.key === "Enter" || event.key === " ") this.#play(index);
    else if (event.key === "F2") this.#edit(index);
    else return;
    event.preventDefault();
  }

  // The first word of the segment after (1) or before (-1) that of a word; the word itself where there is none.
  #segment(index, step) {
    const { units } = this.transcript;
    const found = units.findIndex((each) => each.segment === units[index].segment + step);
    return found < 0 ? index : found;
  }

  #edit(index) {
    if (index < 0 || this.spans[index].querySelector("input")) return;
    const span = this.spans[index];
    const { text, original } = this.transcript.units[index];
    const field = element("input", {
      class: "edit",
      value: text,
      "aria-label": `Edit: ${original}`,
      spellcheck: "true",
    });
    field.size = Math.max(text.length, 4);
    span.removeAttribute("role"); // a button holds no field
    span.removeAttribute("aria-roledescription");
    span.removeAttribute("tabindex");
    span.replaceChildren(field);
    field.focus();
    field.select();
    let open = true;
    const close = (save, refocus) => {
      if (!open) return;
      open = false;
      if (save) this.transcript.edit(index, field.value);
      span.setAttribute("role", "button");
      span.setAttribute("aria-roledescription", "word");
      this.#write(span, this.transcript.units[index]);
      span.tabIndex = 0;
      if (refocus) this.#focus(index);
      if (save) this.dispatchEvent(new Event("edited"));
    };
    field.addEventListener("blur", () => close(true, false));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === "Escape") {
        event.preventDefault();
        close(event.key === "Enter", true);
      }
      event.stopPropagation();
    });
  }

  // After the transcript was changed from elsewhere.
  refresh() {
    for (const [index, span] of this.spans.entries()) this.#write(span, this.transcript.units[index]);
    this.#name();
  }

  // Lights the word that sounds at `seconds`; none where `seconds` is null.
  light(seconds, follow) {
    const found = seconds === null ? -1 : this.#at(seconds);
    if (found === this.heard) return;
    this.spans[this.heard]?.removeAttribute("aria-current");
    this.heard = found;
    if (found < 0) return;
    this.spans[found].setAttribute("aria-current", "true");
    if (follow) this.spans[found].scrollIntoView({ block: "nearest" });
  }

  #at(seconds) {
    const { units } = this.transcript;
    let low = 0;
    let high = units.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (units[middle].start <= seconds) low = middle + 1;
      else high = middle;
    }
    return low && seconds < units[low - 1].end ? low - 1 : -1;
  }
}
