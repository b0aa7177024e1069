// The turns of a live session: on the page as paragraphs, and as files.

import { clock, element } from "./elements.js";
import { srt } from "./subtitles.js";

const NEAR = 40; // pixels from the end within which a transcript keeps to its end

/** Shows turns in `place`. Completed ones are in a log, which screen readers read out; those that go on are below it. */
export class TurnView {
  constructor(place) {
    this.place = place;
    this.turns = [];
    this.partial = [];
    this.log = element("div", { class: "turns", role: "log", "aria-label": "Complete turns" });
    this.growing = element("div", { class: "growing", role: "group", "aria-label": "Being spoken", "aria-live": "off" });
    this.hint = element("p", { class: "muted hint" });
    place.append(this.hint, this.log, this.growing);
  }

  turn(turn) {
    this.turns.push(turn);
    this.keepToEnd(() => this.log.append(paragraph(turn)));
  }

  /** Turns that are not complete; what they say may be longer with the next call, or begin again. */
  update(partial) {
    this.partial = partial;
    this.keepToEnd(() => {
      while (this.growing.children.length > partial.length) this.growing.lastChild.remove();
      partial.forEach((turn, index) => {
        const shown = this.growing.children[index];
        if (!shown) this.growing.append(paragraph(turn));
        else if (shown.lastChild.textContent !== turn.text) shown.replaceWith(paragraph(turn));
      });
    });
  }

  clear() {
    this.turns = [];
    this.log.replaceChildren();
    this.update([]);
  }

  keepToEnd(change) {
    const { place } = this;
    const near = place.scrollHeight - place.scrollTop - place.clientHeight < NEAR;
    change();
    if (near) place.scrollTop = place.scrollHeight;
  }
}

function paragraph({ start, text }) {
  return element("p", {}, element("time", {}, start === null ? "" : clock(start)), " ", element("span", {}, text));
}

// ---- Files

/** A line for each turn. */
export function asText(turns) {
  return turns.map(({ text }) => `${text}\n`).join("");
}

export function asSubtitles(turns) {
  return srt(turns.flatMap(({ segments }) => segments).filter(({ text }) => text));
}

/** Times are seconds of the audio that was heard: pauses take none. */
export function asJson(turns) {
  const text = turns.map((turn) => turn.text).join(" ");
  return `${JSON.stringify({ text, turns: turns.map(({ number, ...turn }) => turn) }, null, 2)}\n`;
}
