// A transcript whose words can be edited, and its files. It starts as the server's verbose_json.

import * as subtitles from "./subtitles.js";

export const FORMATS = { txt: "text/plain", srt: "application/x-subrip", vtt: "text/vtt", json: "application/json" };

export class Transcript {
  // `json` is the text of a verbose_json with segments, and with words where the model gives their times. Each of
  // `units`, {text, start, end, original, segment}, is a word, or a segment where there are no words.
  constructor(json) {
    this.json = json;
    this.content = JSON.parse(json);
    this.timedWords = Array.isArray(this.content.words);
    this.units = this.timedWords ? this.#words() : this.content.segments.map((each, number) => unit(each, number));
  }

  #words() {
    const { words, segments } = this.content;
    const units = [];
    for (const [number, segment] of segments.entries()) {
      let text = "";
      while (text !== segment.text) {
        const word = words[units.length];
        if (!word || !segment.text.startsWith(text)) throw new Error(`segment ${number} is not made of the words`);
        text = text ? `${text} ${word.word}` : word.word;
        units.push(unit({ ...word, text: word.word }, number));
      }
    }
    if (units.length !== words.length) throw new Error("there are more words than the segments have");
    return units;
  }

  get edited() {
    return this.units.some((each) => each.text !== each.original);
  }

  // An empty text removes the word from the files.
  edit(index, text) {
    this.units[index].text = text.trim().split(/\s+/).join(" ");
  }

  revert() {
    for (const each of this.units) each.text = each.original;
  }

  // [{start, end, text}], without those whose words were all removed.
  segments() {
    const texts = this.content.segments.map(() => []);
    for (const each of this.units) if (each.text) texts[each.segment].push(each.text);
    return this.content.segments
      .map((segment, number) => ({ ...segment, text: texts[number].join(" ") }))
      .filter((segment) => segment.text)
      .map((segment, id) => ({ ...segment, id }));
  }

  text() {
    return this.segments()
      .map((segment) => segment.text)
      .join(" ");
  }

  // The content of a file of one of FORMATS. Without edits it is the server's answer in that format.
  file(format) {
    if (format === "txt") return `${this.text()}\n`;
    if (format === "srt") return subtitles.srt(this.segments());
    if (format === "vtt") return subtitles.vtt(this.segments());
    return this.edited ? JSON.stringify(this.#edited()) : this.json;
  }

  #edited() {
    const changed = { ...this.content, text: this.text(), segments: this.segments() };
    if (this.timedWords) {
      const kept = this.units.filter((each) => each.text);
      changed.words = kept.map(({ text, start, end }) => ({ word: text, start, end }));
    }
    return changed;
  }
}

function unit({ text, start, end }, segment) {
  return { text, start, end, original: text, segment };
}
