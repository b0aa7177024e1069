// Plays a file: its waveform with the playhead, a button, and a slider for the keyboard.

import { button, clock, element } from "./elements.js";
import WaveSurfer from "./vendor/wavesurfer.esm.js";

const HEIGHT = 64; // pixels of the waveform
const WITHOUT_WAVE_S = 2 * 3600; // of longer files no waveform is drawn: the browser would decode them into memory

let sounding = null; // the player that is heard: one at a time

// Event: "time" {seconds, playing}, many a second while it plays.
export class Player extends EventTarget {
  // `seconds` is the file's length.
  constructor(file, seconds, styleNonce) {
    super();
    this.failed = false;
    this.audio = element("audio", { preload: "metadata" });
    this.wave = element("div", { class: "wave", "aria-hidden": "true" });
    this.toggle = button("Play", () => (this.audio.paused ? this.play() : this.audio.pause()), {
      class: "play",
      disabled: true,
    });
    this.slider = element("input", {
      ...{ type: "range", class: "position", min: 0, max: 0, step: 0.1, value: 0, disabled: true },
      ...{ "aria-label": "Position", input: () => this.seek(Number(this.slider.value)) },
    });
    this.time = element("span", { class: "time muted" }, "0:00");
    this.note = element("p", { class: "muted", hidden: true });
    const controls = element("div", { class: "controls" }, this.toggle, this.slider, this.time);
    this.element = element("div", { class: "player" }, this.wave, controls, this.note);
    this.#listen();
    if (seconds < WITHOUT_WAVE_S) {
      this.#draw(file, styleNonce);
    } else {
      this.wave.hidden = true;
      this.address = URL.createObjectURL(file);
      this.audio.src = this.address;
    }
  }

  #listen() {
    this.audio.addEventListener("loadedmetadata", () => {
      this.slider.max = Number.isFinite(this.audio.duration) ? this.audio.duration : 0;
      this.slider.disabled = this.toggle.disabled = false;
      this.#show();
    });
    this.audio.addEventListener("error", () => this.#fail());
    this.audio.addEventListener("play", () => {
      if (sounding && sounding !== this) sounding.audio.pause();
      sounding = this;
      this.toggle.textContent = "Pause";
      this.#tick();
    });
    for (const name of ["pause", "ended", "emptied"]) {
      this.audio.addEventListener(name, () => {
        this.toggle.textContent = "Play";
        this.#show();
      });
    }
    this.audio.addEventListener("seeked", () => this.#show());
    this.audio.addEventListener("durationchange", () => this.#show());
  }

  async #draw(file, styleNonce) {
    const wave = WaveSurfer.create({
      ...{ container: this.wave, media: this.audio, height: HEIGHT, cspNonce: styleNonce, dragToSeek: true },
      ...{ barWidth: 2, barGap: 1, barRadius: 1, normalize: true, hideScrollbar: true, cursorWidth: 2 },
      ...colours(),
    });
    this.surfer = wave;
    wave.on("error", () => {}); // told by the promise below, or by the audio's event
    this.theme = matchMedia("(prefers-color-scheme: dark)");
    this.recolour = () => wave.setOptions(colours());
    this.theme.addEventListener("change", this.recolour);
    try {
      await wave.loadBlob(file); // this sets the audio's source, too
      this.wave.dataset.drawn = "true";
    } catch {
      this.wave.hidden = true; // a format that the browser plays and does not decode
    }
  }

  #fail() {
    this.failed = true;
    this.wave.hidden = true;
    this.toggle.disabled = this.slider.disabled = true;
    this.note.hidden = false;
    this.note.textContent = "This browser cannot play the file. Its text is not affected.";
  }

  #tick() {
    this.#show();
    if (this.audio.paused) return;
    requestAnimationFrame(() => this.#tick());
  }

  #show() {
    const { currentTime, duration, paused } = this.audio;
    const total = Number.isFinite(duration) ? clock(duration) : "";
    this.slider.value = currentTime;
    this.time.textContent = total ? `${clock(currentTime)} / ${total}` : clock(currentTime);
    this.slider.setAttribute("aria-valuetext", total ? `${clock(currentTime)} of ${total}` : clock(currentTime));
    this.dispatchEvent(new CustomEvent("time", { detail: { seconds: currentTime, playing: !paused } }));
  }

  seek(seconds) {
    this.audio.currentTime = seconds;
  }

  // From `start` on, or from where it is.
  play(start = null) {
    if (this.failed) return;
    if (start !== null) this.audio.currentTime = start;
    this.audio.play().catch(() => {}); // paused again before it began, or an error, which the event tells
  }

  destroy() {
    this.audio.pause();
    this.theme?.removeEventListener("change", this.recolour);
    this.surfer?.destroy();
    this.audio.removeAttribute("src");
    this.audio.load();
    if (this.address) URL.revokeObjectURL(this.address);
  }
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  return { waveColor: colour("--wave"), progressColor: colour("--accent"), cursorColor: colour("--text") };
}
