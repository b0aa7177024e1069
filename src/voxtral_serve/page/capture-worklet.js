// In the audio thread: the microphone's samples become pieces of mono PCM16 at the session's rate.

import { pcm16 } from "./pcm.js";
import { Resampler } from "./resampler.js";

class Capture extends AudioWorkletProcessor {
  /** processorOptions: `rate` in Hz, and `piece`, the samples of a piece at that rate. */
  constructor({ processorOptions: { rate, piece } }) {
    super();
    this.resampler = new Resampler(sampleRate, rate);
    this.piece = new Int16Array(piece);
    this.filled = 0;
    this.ended = false;
    this.port.onmessage = () => this.end();
  }

  process([channels]) {
    if (channels.length && !this.ended) this.take(mono(channels));
    return !this.ended;
  }

  take(samples) {
    for (const sample of this.resampler.take(samples)) {
      this.piece[this.filled++] = pcm16(sample);
      if (this.filled === this.piece.length) this.send();
    }
  }

  send() {
    const pcm = this.piece.slice(0, this.filled);
    this.filled = 0;
    this.port.postMessage(pcm, [pcm.buffer]);
  }

  /** What is left, and then that this was all. */
  end() {
    if (this.ended) return;
    this.take(new Float32Array(2 * this.resampler.reach));
    this.send();
    this.ended = true;
    this.port.postMessage(null);
  }
}

function mono(channels) {
  if (channels.length === 1) return channels[0];
  return channels[0].map((_, index) => channels.reduce((sum, channel) => sum + channel[index], 0) / channels.length);
}

registerProcessor("capture", Capture);
