// Subtitle files as the server writes them, from segments {start, end, text, speaker} with seconds; a segment may have
// no speaker. The server's own are made by src/voxtral_serve/transcript/subtitles.py; tests require that both are equal
// to the byte.

const LINE = 42; // characters

// What Python's textwrap calls a chunk: blanks, a word, a part of a word that ends with a hyphen, or a dash.
const LETTER = "[\\p{L}\\p{N}_]";
const NO_DIGIT = "[\\p{L}\\p{Nl}\\p{No}_]";
const BEFORE_DASH = "(?<=[\\p{L}\\p{N}_!\"'&.,?])";
const AFTER_HYPHEN = `-(?:(?<=${NO_DIGIT}{2}-)|(?<=${NO_DIGIT}-${NO_DIGIT}-))(?=${NO_DIGIT}-?${NO_DIGIT})`;
const CHUNK = new RegExp(
  `( +|${BEFORE_DASH}-{2,}(?=${LETTER})|[^ ]+?(?:${AFTER_HYPHEN}|(?= |$)|${BEFORE_DASH}(?=-{2,}${LETTER})))`,
  "u",
);

// The lines of a text whose words have one blank between them, each of at most LINE characters.
export function lines(text) {
  const chunks = text
    .split(CHUNK)
    .filter(Boolean)
    .map((chunk) => [...chunk]);
  const found = [];
  while (chunks.length) {
    if (found.length && chunks[0].join("").trim() === "") chunks.shift();
    const line = [];
    while (chunks.length && line.length + chunks[0].length <= LINE) line.push(...chunks.shift());
    const left = LINE - line.length;
    const long = chunks.length > 0 && chunks[0].length > LINE;
    if (long) line.push(...chunks[0].splice(0, room(chunks[0], left)));
    // textwrap leaves the blank at the end of a line that is full where a word longer than a line follows.
    const written = long && !left ? line.join("") : line.join("").replace(/ +$/, "");
    if (written) found.push(written);
  }
  return found;
}

// How many characters of a word that is too long for a line go on the present one: up to its last hyphen there.
function room(word, left) {
  const hyphen = word.slice(0, left).lastIndexOf("-");
  return hyphen > 0 && word.slice(0, hyphen).some((sign) => sign !== "-") ? hyphen + 1 : left;
}

function stamp(seconds, mark) {
  const milliseconds = Math.round(seconds * 1000);
  const pad = (value, digits) => String(value).padStart(digits, "0");
  const minutes = Math.floor(milliseconds / 60000);
  const rest = milliseconds % 60000;
  const time = [Math.floor(minutes / 60), minutes % 60, Math.floor(rest / 1000)].map((value) => pad(value, 2));
  return `${time.join(":")}${mark}${pad(rest % 1000, 3)}`;
}

export function said({ speaker, text }) {
  return speaker ? `${speaker}: ${text}` : text;
}

// SubRip has no escapes: a name loses what may be markup.
export function srt(segments) {
  return segments
    .map(({ text, start, end, speaker }, index) => {
      const spoken = lines(said({ text, speaker: speaker?.replace(/[<>{}\\]/g, "") })).join("\n");
      return `${index + 1}\n${stamp(start, ",")} --> ${stamp(end, ",")}\n${spoken}\n\n`;
    })
    .join("");
}

export function vtt(segments) {
  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const cues = segments.map((segment) => {
    const { start, end } = segment;
    return `${stamp(start, ".")} --> ${stamp(end, ".")}\n${escaped(lines(said(segment)).join("\n"))}\n\n`;
  });
  return `WEBVTT\n\n${cues.join("")}`;
}
