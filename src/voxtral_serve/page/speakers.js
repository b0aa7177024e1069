// Who speaks: the choice before files are sent, and the names of a transcript's speakers, which the user may edit. A
// choice's value is "" (off), "auto", or the number of the speakers.

import { element } from "./elements.js";

const MOST = 20; // guard/fields.py: num_speakers
const LONGEST_NAME = 60; // characters
const FIRST_HUE = 250; // degrees
const HUE_STEP = 137.5; // the golden angle: any number of speakers have hues far from each other

// Hidden, and off, while the server does not say that it labels speakers.
export function choice(server) {
  const numbers = Array.from({ length: MOST - 1 }, (_, index) => element("option", {}, String(index + 2)));
  const words = [element("option", { value: "" }, "Off"), element("option", { value: "auto" }, "Automatic")];
  const select = element("select", { id: "speakers" }, ...words, ...numbers);
  const label = element("label", { for: "speakers" }, "Speakers");
  const made = element("p", { class: "choice", hidden: true }, label, select);
  server.addEventListener("change", () => {
    made.hidden = !server.facts?.capabilities.speakers;
  });
  Object.defineProperty(made, "value", { get: () => (made.hidden ? "" : select.value) });
  return made;
}

// A field for each speaker's name. Event: "change", when the transcript has another name. `refresh()` shows its names.
export function names(transcript) {
  const fields = transcript.speakers.map((speaker) => {
    const rename = () => {
      transcript.rename(speaker, field.value);
      made.refresh();
    };
    const field = element("input", {
      ...{ class: "voice", maxlength: LONGEST_NAME, spellcheck: "false" },
      ...{ "aria-label": `Name of ${speaker}`, change: rename },
    });
    return field;
  });
  const label = element("span", { class: "muted" }, "Speakers");
  const group = { class: "voices", role: "group", "aria-label": "Names of speakers", hidden: !fields.length };
  const made = element("div", group, label, ...fields);
  made.refresh = () => {
    for (const [number, speaker] of transcript.speakers.entries()) {
      fields[number].value = transcript.name(speaker);
      tint(fields[number], transcript, speaker);
    }
  };
  made.refresh();
  return made;
}

// Gives an element the hue of a speaker. Speakers with one name have one hue. style.css makes a colour of it.
export function tint(place, transcript, speaker) {
  const number = transcript.speakers.findIndex((each) => transcript.name(each) === transcript.name(speaker));
  place.style.setProperty("--hue", String((FIRST_HUE + number * HUE_STEP) % 360));
}
