// Where live audio comes from: a microphone, or a file at the pace of speech. Either gives pieces of PCM16.

import { pcm16 } from "./pcm.js";

export const RATE = 16000; // Hz: the model's
const PIECE = 640; // samples, 40 ms: half of the audio of a token
const LARGEST_FILE = 256 * 1024 * 1024; // bytes; a browser holds all samples of a file in memory
const TICK_MS = 40;

/** Why there is no audio, in words that say what to do. */
export class CaptureError extends Error {}

function needHttps() {
  const port = location.port || 80;
  return (
    "This page was opened over http from another machine, and browsers lend the microphone only to pages of https or of " +
    `localhost. Serve it over https; or run ssh -L 8000:localhost:${port} ${location.hostname} and open localhost:8000. ` +
    "A file can be played as if it were live."
  );
}

const REFUSALS = {
  NotAllowedError:
    "The microphone is not allowed. Allow it for this page (the sign beside the address, or the browser's settings), " +
    "and in the settings of the system, then start again.",
  NotFoundError: "No microphone was found. Connect one, then start again.",
  NotReadableError: "The microphone cannot be used: another program may have it. End that program, then start again.",
  OverconstrainedError: "The microphone that was chosen is gone. Choose another one, then start again.",
};

/** What a source calls: onPiece(Int16Array), onEnd() after the last piece, onError(CaptureError) once it has broken. */
const SILENT = { onPiece() {}, onEnd() {}, onError() {} };

export class Microphone {
  constructor(device = "", events = {}) {
    this.device = device;
    this.events = { ...SILENT, ...events };
  }

  /** Ask for the microphone and record. Throws CaptureError. */
  async start() {
    if (!navigator.mediaDevices?.getUserMedia) {
      throw new CaptureError(isSecureContext ? "This browser has no access to microphones." : needHttps());
    }
    const plain = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
    const audio = this.device ? { ...plain, deviceId: { exact: this.device } } : plain;
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({ audio });
    } catch (error) {
      throw new CaptureError(REFUSALS[error.name] ?? `The microphone cannot be used: ${error.message}`);
    }
    try {
      await this.connect();
    } catch (error) {
      this.close();
      throw new CaptureError(`The browser cannot record: ${error.message}`);
    }
  }

  async connect() {
    const [track] = this.stream.getAudioTracks();
    track.onended = () => this.events.onError(new CaptureError("The microphone is gone: it was disconnected or taken back."));
    this.context = new AudioContext();
    await this.context.audioWorklet.addModule(new URL("capture-worklet.js", import.meta.url));
    const processorOptions = { rate: RATE, piece: PIECE };
    this.node = new AudioWorkletNode(this.context, "capture", { processorOptions });
    this.node.port.onmessage = ({ data }) => (data === null ? this.close(true) : this.events.onPiece(data));
    // The node writes silence; without the way to the speakers, browsers would not run it.
    this.context.createMediaStreamSource(this.stream).connect(this.node).connect(this.context.destination);
  }

  /** Whether the browser waits for a click before it runs audio. */
  get blocked() {
    return this.context?.state === "suspended";
  }

  async pause() {
    this.stream.getAudioTracks().forEach((track) => (track.enabled = false));
    await this.context.suspend();
  }

  async resume() {
    this.stream.getAudioTracks().forEach((track) => (track.enabled = true));
    await this.context.resume();
  }

  /** The end, which onEnd tells once the last piece has come. */
  async stop() {
    await this.context.resume(); // the audio thread answers no message while it is suspended
    this.node.port.postMessage("end");
  }

  close(told = false) {
    this.stream?.getTracks().forEach((track) => {
      track.onended = null;
      track.stop();
    });
    this.context?.close();
    if (told) this.events.onEnd();
  }
}

/** The microphones, by their names where the browser tells them: once one was allowed. */
export async function microphones() {
  const devices = (await navigator.mediaDevices?.enumerateDevices?.()) ?? [];
  return devices.filter(({ kind, deviceId }) => kind === "audioinput" && deviceId);
}

/** A file's audio, given out as fast as it would be spoken. `audible`: it is played, too. */
export class PacedFile {
  constructor(file, audible, events = {}) {
    this.file = file;
    this.audible = audible;
    this.events = { ...SILENT, ...events };
    this.sent = 0; // samples
    this.heard = 0; // samples up to the last pause
  }

  /** Read the file and begin. Throws CaptureError. */
  async start() {
    if (this.file.size > LARGEST_FILE) {
      const mib = Math.round(this.file.size / 1024 / 1024);
      throw new CaptureError(`The file has ${mib} MiB, and this page plays files of at most 256 MiB. Choose a shorter one.`);
    }
    let decoded;
    try {
      const content = await this.file.arrayBuffer();
      decoded = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(content);
    } catch (error) {
      throw new CaptureError(`The browser cannot play ${this.file.name}: it is no audio file, or of a kind that it does not know.`);
    }
    this.buffer = decoded;
    this.pcm = mono(decoded);
    await this.resume();
  }

  get blocked() {
    return false;
  }

  get seconds() {
    return this.pcm.length / RATE;
  }

  async resume() {
    this.play();
    this.since = performance.now();
    this.timer = setInterval(() => this.tick(), TICK_MS);
  }

  async pause() {
    this.tick();
    this.halt();
    this.heard = this.sent;
  }

  /** The end, before that of the file perhaps. */
  async stop() {
    if (this.timer !== undefined) this.tick(); // until now
    this.close(true);
  }

  close(told = false) {
    if (this.closed) return;
    this.closed = true;
    this.halt();
    this.player?.close();
    if (told) this.events.onEnd();
  }

  /** Give out what has been spoken by now. A hidden page's timers are slow: then it is more than one piece. */
  tick() {
    const spoken = this.heard + Math.floor(((performance.now() - this.since) * RATE) / 1000);
    const end = Math.min(spoken, this.pcm.length);
    while (this.sent < end && !this.closed) {
      const next = Math.min(this.sent + PIECE, end);
      this.events.onPiece(this.pcm.slice(this.sent, next));
      this.sent = next;
    }
    if (this.sent === this.pcm.length) this.close(true);
  }

  halt() {
    clearInterval(this.timer);
    this.timer = undefined;
    this.sound?.stop();
    this.sound = undefined;
  }

  play() {
    if (!this.audible) return;
    this.player ??= new AudioContext();
    this.sound = new AudioBufferSourceNode(this.player, { buffer: this.buffer });
    this.sound.connect(this.player.destination);
    this.sound.start(0, this.sent / RATE);
  }
}

/** Int16Array, mono. The samples of a 16-bit file of RATE come out as they were. */
function mono(buffer) {
  const channels = Array.from({ length: buffer.numberOfChannels }, (_, index) => buffer.getChannelData(index));
  return Int16Array.from(channels[0], (_, index) => {
    const sum = channels.reduce((all, channel) => all + channel[index], 0);
    return pcm16(sum / channels.length);
  });
}

/** The level of a piece in dB below full scale: 0 is the loudest, -90 about one bit. */
export function level(pcm) {
  const power = pcm.reduce((sum, sample) => sum + sample * sample, 0) / Math.max(pcm.length, 1);
  return power === 0 ? -100 : 10 * Math.log10(power / 2 ** 30);
}
