// A live session over OpenAI's Realtime transcription: audio in, turns of text out, over as many connections as it takes.
// Nothing here knows the page. docs/pages/live-protocols.md has the events.

import { RATE } from "./capture.js";
import { Tape } from "./tape.js";

const KEPT_S = 600; // seconds of audio without text that are kept for another connection
const WAIT_MS = [1000, 2000, 4000, 8000, 15000];
const OPEN_MS = 15000; // for a connection to open
const PING_MS = 15000; // between questions whether the server is there
const DEAD_MS = 60000; // without any answer, after which a connection is given up
const MOST_BUFFERED = 256 * 1024; // bytes that wait in the browser
const FULL_MS = 50; // until that is looked at again
const SILENT_MS = 30000; // of silence that the server takes for a turn without text, so that it is not kept
const KEY = /^[!#$%&'*+.^_`|~0-9A-Za-z-]+$/; // what a subprotocol may be made of (RFC 9110, `token`)
const ITEM = "conversation.item.input_audio_transcription";
const BUFFER = "input_audio_buffer";
// Errors that another connection may not meet.
const PASSING = [
  "too_many_sessions",
  "rate_limit_exceeded",
  "idle_timeout",
  "session_expired",
  "unread",
  "engine_stalled",
  "engine_dead",
];

export const DELAYS = [
  { name: "minimal", ms: 160 },
  { name: "low", ms: 240 },
  { name: "medium", ms: 480 },
  { name: "high", ms: 960 },
  { name: "xhigh", ms: 2400 },
];

/**
 * Events, each with `detail`:
 *   state    {state, words, wait_ms}  "connecting", "listening", "waiting" (for another connection), "paused", "ended"
 *   partial  [{number, start, text}]  turns whose text is not complete, in their order
 *   turn     {number, start, end, text, segments: [{start, end, text, words}]}   a text that does not change any more
 *   lost     {seconds}                audio in all that was dropped, since no server took it
 *   failed   {words}                  the session is over, and why
 * Times are seconds of the recording; null where the server did not tell them.
 */
export class LiveSession extends EventTarget {
  /**
   * address   of the WebSocket
   * key       the API key, or ""
   * wait_ms   before connecting again: the first time, the second and so on; the last one from then on
   * probe     async (): the status of a small request to the server with the key, or 0 where none comes
   */
  constructor({ address, key, probe, delay = "medium", turns = "server_vad", wait_ms = WAIT_MS }) {
    super();
    Object.assign(this, { address, key, probe, delay, turns, wait_ms });
    this.tape = new Tape(KEPT_S * RATE);
    this.marks = []; // positions at which turns end by a commit
    this.attempt = 0; // since text came last
    this.number = 0; // of the next turn
    this.paused = this.ending = this.over = this.asking = false;
    this.forget();
  }

  // ---- What the page calls

  /** Connect. Audio may have been recorded before. */
  open() {
    if (this.key && !KEY.test(this.key)) {
      this.fail(
        "Browsers cannot send this key over a WebSocket: it has a character beside letters, digits and !#$%&'*+-.^_`|~. " +
          "Give the server a key without it.",
      );
      return;
    }
    this.connect();
  }

  record(pcm) {
    if (this.over || !pcm.length) return;
    const lost = this.tape.lost;
    this.tape.record(pcm);
    if (this.tape.lost > lost) this.tell("lost", { seconds: this.tape.lost / RATE });
    this.pump();
  }

  /** End the turn; no audio comes until `resume`. The server may close the connection meanwhile. */
  pause() {
    this.paused = true;
    this.mark();
    this.tell("state", { state: "paused" });
  }

  resume() {
    this.paused = false;
    if (this.socket) this.tell("state", { state: this.ready ? "listening" : "connecting" });
    else if (this.timer === undefined && !this.asking) this.connect();
  }

  /** Do not wait any longer before connecting again. */
  reconnect() {
    if (this.timer === undefined) return;
    clearTimeout(this.timer);
    this.connect();
  }

  /** All is recorded: "ended" comes once its text is complete. */
  end() {
    this.ending = true;
    this.paused = false;
    this.mark();
    const idle = !this.socket && this.timer === undefined && !this.asking;
    if (idle && this.tape.end > this.tape.first) this.connect();
    else if (idle) this.finish();
  }

  /** End now, without the text of the audio that has none. */
  abandon() {
    this.finish();
  }

  // ---- Connections

  connect() {
    this.timer = undefined;
    this.tell("state", { state: "connecting" });
    const protocols = this.key ? ["realtime", `openai-insecure-api-key.${this.key}`] : ["realtime"];
    const socket = (this.socket = new WebSocket(this.address, protocols));
    this.opened = this.ready = false;
    const mine = (act) => (event) => socket === this.socket && act(event);
    socket.onopen = mine(() => (this.opened = true));
    socket.onmessage = mine(({ data }) => this.receive(data));
    socket.onclose = mine(({ code, reason }) => this.closed(code, reason));
    this.heard = performance.now();
    this.watch = setInterval(() => this.look(), PING_MS);
    setTimeout(mine(() => this.opened || this.cut("the server does not answer")), OPEN_MS);
  }

  /** Forget what this connection said and was sent. */
  forget() {
    this.items = new Map(); // turns that are not complete, by the server's names
    this.committed = new Set(); // items whose text has not come
    this.asked = []; // positions of commits that were sent and not answered
    this.nextMark = 0; // index of the mark to send next
    this.base = 0; // position at which the connection's audio begins
    this.cleared = this.lastSent = this.ready = false;
  }

  hangUp() {
    clearInterval(this.watch);
    clearTimeout(this.full);
    this.full = undefined;
    const socket = this.socket;
    this.socket = undefined;
    if (socket) {
      socket.onopen = socket.onmessage = socket.onclose = null;
      socket.close();
    }
  }

  /** Is the server there? A lost network closes no connection for minutes. */
  look() {
    if (performance.now() - this.heard > DEAD_MS) this.cut("the server has stopped to answer");
    else if (this.ready && !this.paused) this.send({ type: "session.update", session: { type: "transcription" } });
  }

  async closed(code, reason) {
    const { opened } = this;
    this.hangUp();
    if (this.cleared && !this.committed.size) this.finish();
    else if (opened) this.cut(reason || (code === 1006 ? "the connection is lost" : `the server closed it (${code})`));
    else await this.refused();
  }

  /** No connection. A browser does not tell why: ask the server in another way. */
  async refused() {
    this.asking = true;
    const status = await this.probe();
    this.asking = false;
    if (this.over) return;
    if (status === 401 || status === 403) {
      this.fail(this.key ? "The server refuses this key. Correct it, then start again." : "The server asks for a key. Fill it in above, then start again.");
    } else if (status === 200 && !this.tape.sent) {
      this.fail(
        "The server answers, but not to live audio. It must serve profiles/fast.yaml or profiles/realtime.yaml. A proxy " +
          "before it must pass WebSockets on, with the Host that the browser asked for; a page of another address must be " +
          "named in VOXTRAL_SERVE_LIVE_ORIGINS.",
      );
    } else {
      this.cut(status === 0 ? "the server cannot be reached" : "the server takes no connection");
    }
  }

  /** This connection is over; another one goes on from the last complete turn, not before `least_ms`. */
  cut(words, least_ms = 0) {
    this.hangUp();
    if (this.over) return;
    this.forget();
    const answered = this.tape.end === this.tape.first;
    if (answered && this.paused) return; // until the page resumes
    if (answered && this.ending) {
      this.finish();
      return;
    }
    const wait_ms = Math.max(least_ms, this.wait_ms[Math.min(this.attempt++, this.wait_ms.length - 1)]);
    this.timer = setTimeout(() => this.connect(), wait_ms);
    this.tell("state", { state: "waiting", words, wait_ms });
  }

  fail(words) {
    this.over = true;
    this.hangUp();
    clearTimeout(this.timer);
    this.tell("failed", { words });
  }

  finish() {
    if (this.over) return;
    this.over = true;
    this.hangUp();
    clearTimeout(this.timer);
    this.tell("partial", []);
    this.tell("state", { state: "ended" });
  }

  // ---- What is sent

  send(event) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(event));
  }

  mark() {
    if (this.tape.end > (this.marks.at(-1) ?? 0)) this.marks.push(this.tape.end);
    this.pump();
  }

  /** Send what there is, as far as the connection takes it. */
  pump() {
    if (!this.ready || this.full !== undefined) return;
    for (;;) {
      if (this.socket.bufferedAmount > MOST_BUFFERED) {
        this.full = setTimeout(() => {
          this.full = undefined;
          this.pump();
        }, FULL_MS);
        return;
      }
      const mark = this.marks[this.nextMark];
      const pcm = this.tape.take(mark);
      if (pcm) {
        this.send({ type: `${BUFFER}.append`, audio: base64(pcm) });
      } else if (mark !== undefined && this.tape.at >= mark) {
        this.nextMark++;
        this.commit(mark);
      } else {
        break;
      }
    }
    if (this.ending && !this.lastSent) {
      this.lastSent = true; // its answer comes behind those to all commits
      this.send({ type: `${BUFFER}.clear` });
    }
  }

  commit(position) {
    this.asked.push(position);
    this.send({ type: `${BUFFER}.commit`, event_id: `commit-${position}` });
  }

  // ---- What comes

  receive(data) {
    this.heard = performance.now();
    const event = JSON.parse(data);
    const kind = event.type;
    if (kind === "session.created") this.greeted(event);
    else if (kind === "session.updated") this.begin();
    else if (kind === "error") this.refuse(event.error, false);
    else if (kind === `${ITEM}.failed`) this.refuse(event.error, true); // its audio is kept
    else if (kind === `${BUFFER}.cleared`) this.cleared = true;
    else this.take(kind, event);
    if (this.cleared && !this.committed.size) this.finish();
  }

  greeted(event) {
    if (!event.session) {
      this.fail("The server speaks vLLM's own live protocol, which has no turns. Serve profiles/fast.yaml or profiles/realtime.yaml.");
      return;
    }
    const detection = { type: this.turns, ...(this.turns === "server_vad" && { idle_timeout_ms: SILENT_MS }) };
    const input = {
      format: { type: "audio/pcm", rate: RATE },
      transcription: { delay: this.delay },
      turn_detection: detection,
    };
    this.send({ type: "session.update", session: { type: "transcription", audio: { input } } });
  }

  /** The settings are taken: send audio. */
  begin() {
    if (this.ready) return; // the answer to `look`
    this.base = this.tape.rewind();
    this.marks = this.marks.filter((mark) => mark > this.base);
    this.nextMark = 0;
    this.ready = true;
    this.tell("state", { state: this.paused ? "paused" : "listening" });
    this.pump();
  }

  refuse(error, failed) {
    const empty = error.code === "input_audio_buffer_commit_empty" && String(error.event_id).startsWith("commit-");
    if (empty) {
      this.asked.shift(); // the server had found the turn's end already
    } else if (failed || PASSING.includes(error.code)) {
      this.cut(`the server says: ${error.message}`, 1000 * (error.retry_after ?? 0));
    } else {
      this.fail(`The server refuses: ${error.message}`);
    }
  }

  take(kind, event) {
    if (event.item_id === undefined) return;
    if (kind === "conversation.item.added" || kind === "conversation.item.done") return;
    const item = this.item(event.item_id);
    if (kind === `${BUFFER}.speech_started`) item.start = this.seconds(event.audio_start_ms);
    else if (kind === `${BUFFER}.speech_stopped`) item.end = this.position(event.audio_end_ms);
    else if (kind === `${BUFFER}.timeout_triggered`) item.end = this.position(event.audio_end_ms);
    else if (kind === `${BUFFER}.committed`) {
      this.committed.add(event.item_id);
      item.end ??= this.asked.shift() ?? null;
    } else if (kind === `${ITEM}.delta`) item.text += event.delta;
    else if (kind === `${ITEM}.segment`) item.segments.push(this.segment(event));
    else if (kind === `${ITEM}.completed`) {
      item.complete = event.transcript.trim();
      this.committed.delete(event.item_id);
    }
    this.give();
  }

  item(name) {
    if (!this.items.has(name)) {
      this.items.set(name, { number: this.number++, start: null, end: null, text: "", segments: [] });
    }
    return this.items.get(name);
  }

  /** Hand out turns in their order, whatever that of their texts. */
  give() {
    for (const [name, item] of this.items) {
      if (item.complete === undefined) break;
      this.items.delete(name);
      this.attempt = 0;
      const last = item.segments.at(-1); // of a turn that the server has ended because it stops
      const end = item.end ?? (last && Math.round(last.end * RATE));
      if (end !== undefined) this.tape.answered(end);
      if (item.complete) this.tell("turn", turn(item));
    }
    const partial = [...this.items.values()].filter(({ text }) => text.trim());
    this.tell("partial", partial.map(({ number, start, text }) => ({ number, start, text: text.trim() })));
  }

  segment({ start, end, text, words = [] }) {
    const shift = this.base / RATE;
    const moved = words.map(({ word, ...times }) => ({ word, start: times.start + shift, end: times.end + shift }));
    return { start: start + shift, end: end + shift, text: text.trim(), words: moved };
  }

  position(ms) {
    return this.base + Math.round((ms * RATE) / 1000);
  }

  seconds(ms) {
    return this.position(ms) / RATE;
  }

  tell(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

function turn({ number, start, end, complete, segments }) {
  const last = end === null ? null : end / RATE;
  const whole = { start: segments[0]?.start ?? start, end: segments.at(-1)?.end ?? last, text: complete };
  const timed = whole.start !== null && whole.end !== null;
  return { number, ...whole, segments: segments.length ? segments : timed ? [{ ...whole, words: [] }] : [] };
}

/** PCM16 as the protocol has it; all machines that run browsers are little-endian. */
function base64(pcm) {
  return btoa(String.fromCharCode(...new Uint8Array(pcm.buffer, pcm.byteOffset, pcm.byteLength)));
}
