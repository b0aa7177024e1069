// One file's request: its upload, its text as it is made, and its transcript at the end.

import { ApiError, authorization, errorOf, resending, url } from "./api.js";
import { Transcript } from "./transcript.js";

const PATH = "v1/audio/transcriptions";
// guard/answer.py: the last event is the verbose_json with this at its beginning.
const DONE = '{"type": "transcript.text.done", ';

// Resolves to a Transcript. `facts` is the server's v1/server. Functions of `told`, all optional:
//   uploaded(share)        0 to 1
//   text(text, delta)      all of the text so far, and what is new; ("", "") where the request is sent again
//   waiting(error, s)      the server is busy or away: the request is sent again in s seconds
// Rejects with ApiError, or with what `signal` was aborted with.
export function transcribe(file, facts, signal, told = {}) {
  const attempt = async () => {
    told.uploaded?.(0);
    told.text?.("", "");
    const events = new Events(told);
    await post(
      form(file, facts),
      signal,
      (share) => told.uploaded?.(share),
      (received) => events.read(received),
    );
    if (events.done === null) throw new ApiError(0, "The connection ended before the text was complete.");
    return new Transcript(events.done);
  };
  return resending(attempt, { signal, waiting: told.waiting });
}

function form(file, facts) {
  const made = new FormData();
  made.append("model", facts.models[0]);
  made.append("response_format", "verbose_json");
  for (const each of facts.capabilities.word_times ? ["word", "segment"] : ["segment"]) {
    made.append("timestamp_granularities[]", each);
  }
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
      const status = Number.isInteger(event.error.code) ? event.error.code : 500;
      throw errorOf(status, data);
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
