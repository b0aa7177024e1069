// A transcript whose words and names of speakers can be edited, and its files. It starts as the server's verbose_json.

import * as subtitles from "./subtitles.js";

export const FORMATS = { txt: "text/plain", srt: "application/x-subrip", vtt: "text/vtt", json: "application/json" };

export class Transcript {
  // `json` is the text of a verbose_json with segments, and with words where the model gives their times. Each of
  // `units`, {text, start, end, speaker, probability, original, segment}, is a word, or a segment where there are no words. Each
  // segment has one of `speakers`, in the order in which they speak first; there are none where nobody asked for them.
  constructor(json) {
    this.json = json;
    this.content = JSON.parse(json);
    this.timedWords = Array.isArray(this.content.words);
    this.units = this.timedWords ? this.#words() : this.content.segments.map((each, number) => unit(each, number));
    this.speakers = [...new Set(this.content.segments.map((each) => each.speaker).filter(Boolean))];
    this.names = new Map();
    this.revert();
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
    const renamed = this.speakers.some((each) => this.name(each) !== each);
    return renamed || this.units.some((each) => each.text !== each.original);
  }

  // An empty text removes the word from the files.
  edit(index, text) {
    this.units[index].text = oneLine(text);
  }

  name(speaker) {
    return this.names.get(speaker);
  }

  // An empty name gives the speaker the server's one again.
  rename(speaker, name) {
    this.names.set(speaker, oneLine(name) || speaker);
  }

  revert() {
    for (const each of this.units) each.text = each.original;
    for (const each of this.speakers) this.names.set(each, each);
  }

  // [{start, end, text, speaker}], without those whose words were all removed. `speaker` is the name, if there is one.
  segments() {
    const texts = this.content.segments.map(() => []);
    for (const each of this.units) if (each.text) texts[each.segment].push(each.text);
    return this.content.segments
      .map((segment, number) => this.#named({ ...segment, text: texts[number].join(" ") }))
      .filter((segment) => segment.text)
      .map((segment, id) => ({ ...segment, id }));
  }

  #named(each) {
    return each.speaker ? { ...each, speaker: this.name(each.speaker) } : each;
  }

  // With speakers, a line for each turn.
  text() {
    const turns = [];
    for (const { speaker, text } of this.segments()) {
      const last = turns.at(-1);
      if (last && last.speaker === speaker) last.text += ` ${text}`;
      else turns.push({ speaker, text });
    }
    return turns.map(subtitles.said).join("\n");
  }

  // The content of a file of one of FORMATS. Without edits it is the server's answer in that format.
  file(format) {
    if (format === "txt") return `${this.text()}\n`;
    if (format === "srt") return subtitles.srt(this.segments());
    if (format === "vtt") return subtitles.vtt(this.segments());
    return this.edited ? JSON.stringify(this.#edited()) : this.json;
  }

  #edited() {
    const segments = this.segments();
    const changed = { ...this.content, text: segments.map((segment) => segment.text).join(" "), segments };
    if (this.timedWords) {
      const kept = this.units.filter((each) => each.text);
      changed.words = kept.map(({ text, start, end, speaker, original, probability }) =>
        this.#named({ word: text, start, end, speaker, probability: text === original ? probability : undefined }),
      );
    }
    return changed;
  }
}

function unit({ text, start, end, speaker, probability }, segment) {
  return { text, start, end, speaker, probability, original: text, segment };
}

function oneLine(text) {
  return text.replace(/\p{Cc}/gu, " ").trim().split(/\s+/).join(" ");
}
