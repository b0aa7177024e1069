// One file's request: its upload, its text as it is made, and its transcript at the end.

import { ApiError, authorization, errorOf, NO_LABELS, resending, url } from "./api.js";
import { Transcript } from "./transcript.js";

const PATH = "v1/audio/transcriptions";
// guard/answer.py: the last event is the verbose_json with this at its beginning.
const DONE = '{"type": "transcript.text.done", ';
const LABELS_MS = 120_000; // that labels are waited for, from the first error; then the text comes without them

// Resolves to a Transcript. `facts` is the server's v1/server, `speakers` a value of speakers.js. Functions of `told`,
// all optional:
//   uploaded(share)        0 to 1
//   text(text, delta)      all of the text so far, and what is new; ("", "") where the request is sent again
//   waiting(error, s)      the server is busy or away: the request is sent again in s seconds
// Rejects with ApiError, or with what `signal` was aborted with.
export function transcribe(file, facts, speakers, signal, told = {}) {
  let unlabelled = null; // when the server first had no labels
  const attempt = async () => {
    const late = unlabelled !== null && performance.now() - unlabelled > LABELS_MS;
    told.uploaded?.(0);
    told.text?.("", "");
    const events = new Events(told);
    await post(
      form(file, facts, speakers, late ? "optional" : "true"),
      signal,
      (share) => told.uploaded?.(share),
      (received) => events.read(received),
    ).catch((error) => {
      if (error.code === NO_LABELS) unlabelled ??= performance.now();
      throw error;
    });
    if (events.done === null) throw new ApiError(0, "The connection ended before the text was complete.");
    return new Transcript(events.done);
  };
  return resending(attempt, { signal, waiting: told.waiting });
}

function form(file, facts, speakers, diarize) {
  const made = new FormData();
  made.append("model", facts.models[0]);
  made.append("response_format", "verbose_json");
  for (const each of facts.capabilities.word_times ? ["word", "segment"] : ["segment"]) {
    made.append("timestamp_granularities[]", each);
  }
  if (speakers) made.append("diarize", diarize);
  if (Number(speakers)) made.append("num_speakers", speakers);
  made.append("stream", "true");
  made.append("file", file, "audio"); // the file's name stays here
  return made;
}

// XMLHttpRequest, as fetch does not tell how much is uploaded. `received` gets all of the answer so far.
function post(body, signal, uploaded, received) {
  return new Promise((resolve, reject) => {
    signal.throwIfAborted();
    const request = new XMLHttpRequest();
    request.open("POST", url(PATH));
    for (const [name, value] of Object.entries(authorization())) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", (event) => uploaded(event.loaded / event.total));
    request.upload.addEventListener("load", () => uploaded(1));
    const attempt = (act) => {
      try {
        act();
      } catch (error) {
        reject(error);
        request.abort();
      }
    };
    request.addEventListener("progress", () => attempt(() => request.status === 200 && received(request.responseText)));
    request.addEventListener("load", () => {
      if (request.status !== 200) {
        reject(errorOf(request.status, request.responseText, request.getResponseHeader("retry-after")));
      } else {
        attempt(() => resolve(received(request.responseText)));
      }
    });
    request.addEventListener("error", () => reject(errorOf(0, "")));
    signal.addEventListener("abort", () => {
      request.abort();
      reject(signal.reason);
    });
    request.send(body);
  });
}

// Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) as the server writes them: one line.
class Events {
  constructor(told) {
    this.told = told;
    this.text = "";
    this.done = null; // the text of the verbose_json
    this.end = 0; // of what was read
  }

  // `received` is all of the answer so far.
  read(received) {
    for (;;) {
      const end = received.indexOf("\n\n", this.end);
      if (end < 0) return;
      this.#event(received.slice(this.end, end).replace(/^data: /, ""));
      this.end = end + 2;
    }
  }

  #event(data) {
    const event = JSON.parse(data);
    if (event.error) {
      const { code } = event.error;
      throw errorOf(Number.isInteger(code) ? code : code === NO_LABELS ? 503 : 500, data);
    }
    if (event.type === "transcript.text.delta") {
      this.text += event.delta;
      this.told.text?.(this.text, event.delta);
    } else if (event.type === "transcript.text.done") {
      if (!data.startsWith(DONE)) throw new Error(`an event starts with ${data.slice(0, 40)}: expected ${DONE}`);
      this.done = `{${data.slice(DONE.length)}`;
    }
  }
}
