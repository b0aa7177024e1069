// The turns of a live session: on the page as paragraphs, and as files.

import { element } from "./dom.js";

const LINE = 42; // characters of a subtitle's line, as the server's subtitles of files have them
const NEAR = 40; // pixels from the end within which a transcript keeps to its end

/** Shows turns in `place`. Completed ones are in a log, which screen readers read out; those that go on are below it. */
export class TurnView {
  constructor(place) {
    this.place = place;
    this.turns = [];
    this.partial = [];
    this.log = element("div", { className: "turns", role: "log", ariaLabel: "Transcript" });
    this.growing = element("div", { className: "growing", ariaLabel: "Being spoken", role: "group" });
    this.growing.setAttribute("aria-live", "off");
    this.hint = element("p", { className: "muted hint" });
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
  const time = element("time", { textContent: start === null ? "" : shortClock(start) });
  return element("p", {}, time, " ", element("span", { textContent: text }));
}

// ---- Files

/** A line for each turn. */
export function asText(turns) {
  return turns.map(({ text }) => `${text}\n`).join("");
}

/** SubRip's format: https://www.matroska.org/technical/subtitles.html#srt-subtitles */
export function asSubtitles(turns) {
  const cues = turns.flatMap(({ segments }) => segments).filter(({ text }) => text);
  return cues
    .map(({ start, end, text }, index) => `${index + 1}\n${clock(start)} --> ${clock(end)}\n${wrap(text)}\n\n`)
    .join("");
}

/** Times are seconds of the audio that was heard: pauses take none. */
export function asJson(turns) {
  const text = turns.map((turn) => turn.text).join(" ");
  return `${JSON.stringify({ text, turns: turns.map(({ number, ...turn }) => turn) }, null, 2)}\n`;
}

function wrap(text) {
  const lines = [""];
  for (const word of text.split(/\s+/).flatMap(parts)) {
    const line = lines.at(-1);
    if (line && line.length + 1 + word.length > LINE) lines.push(word);
    else lines[lines.length - 1] = line ? `${line} ${word}` : word;
  }
  return lines.join("\n");
}

/** A word that is longer than a line, in pieces. */
function parts(word) {
  return word.match(new RegExp(`.{1,${LINE}}`, "gsu")) ?? [];
}

function clock(seconds) {
  const ms = Math.round(seconds * 1000);
  const [hours, minutes, whole] = [Math.floor(ms / 3600000), Math.floor(ms / 60000) % 60, Math.floor(ms / 1000) % 60];
  return `${[hours, minutes, whole].map((each) => String(each).padStart(2, "0")).join(":")},${String(ms % 1000).padStart(3, "0")}`;
}

/** 3:07, and 1:00:07 from an hour on. */
export function shortClock(seconds) {
  const whole = Math.floor(seconds);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const last = String(whole % 60).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${last}` : `${minutes}:${last}`;
}
