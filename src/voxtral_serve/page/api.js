// The server's API as this page uses it: the key, URLs relative to the page, errors in words, and requests that are sent
// again while the server is busy or away.

// The API key. It is kept in memory only: a reload of the page forgets it.
export const key = {
  value: "",
  set(value) {
    this.value = value.trim();
    events.dispatchEvent(new CustomEvent("key", { detail: this.value }));
  },
};

// "key": the key has changed (detail: the key); "unauthorized": the server has refused it;
// "waiting": a request waits before it is sent again (detail: {error, seconds}).
export const events = new EventTarget();

export const NO_LABELS = "no_speaker_labels"; // code of a 503, which says nothing of the server as a whole
const AGAIN = new Set([0, 429, 502, 503, 504]); // statuses that can pass; 0 is a connection that failed
const KEEP_TRYING_S = 600; // a server that is started again may load and compile for minutes
const LONGEST_WAIT_S = 30;

// The URL of `path` ("v1/models") on the server that this page came from, also below a proxy's prefix.
export function url(path, scheme = "http") {
  const found = new URL(path, document.baseURI);
  if (scheme === "ws") found.protocol = found.protocol === "https:" ? "wss:" : "ws:";
  return found;
}

export function authorization() {
  return key.value ? { Authorization: `Bearer ${key.value}` } : {};
}

// An answer that is an error, or no answer (status 0). `message` is for the user: what is wrong and what to do.
export class ApiError extends Error {
  constructor(status, message, code = null, retryAfter = null) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter; // seconds, or null
  }
}

// What to do about an error, by its status. The server's own message says what is wrong.
const ADVICE = {
  0: "The server does not answer. Check that it is running and that you are connected.",
  401: "Enter the server's API key at the top of the page.",
  403: "The server does not allow this from here.",
  429: "The server is busy.",
  502: "The server behind the proxy does not answer.",
  503: "The server is starting or stopping.",
  504: "The server behind the proxy does not answer in time.",
};

// The error of an answer. `body` is its text: OpenAI's form of an error, or a proxy's page, of which nothing is shown.
export function errorOf(status, body, retryAfter = null) {
  let error = {};
  try {
    error = JSON.parse(body)?.error ?? {};
  } catch {
    // a proxy's page
  }
  const said = typeof error.message === "string" ? sentence(error.message) : "";
  const own = error.code === NO_LABELS; // its message says what to do
  const advice = own ? "" : (ADVICE[status] ?? (said ? "" : `The server answered with status ${status}.`));
  const seconds = Number.parseFloat(retryAfter);
  if (status === 401) events.dispatchEvent(new CustomEvent("unauthorized"));
  const message = [said, advice].filter(Boolean).join(" ");
  return new ApiError(status, message, error.code ?? null, Number.isFinite(seconds) ? seconds : null);
}

function sentence(text) {
  const trimmed = text.trim().replace(/^file: /, ""); // the name of the form's field
  return trimmed.charAt(0).toUpperCase() + trimmed.slice(1) + (/[.!?]$/.test(trimmed) ? "" : ".");
}

// Calls `attempt` until it returns. Errors that can pass are waited for, as long as the server says or a second, two,
// four and so on, for ten minutes. `waiting(error, seconds)` is called before each wait. `signal` ends the waiting.
export async function resending(attempt, { signal, waiting } = {}) {
  const start = performance.now();
  for (let number = 1; ; number += 1) {
    try {
      return await attempt();
    } catch (error) {
      if (!(error instanceof ApiError) || !AGAIN.has(error.status)) throw error;
      if (performance.now() - start > KEEP_TRYING_S * 1000) throw error;
      const seconds = Math.min(error.retryAfter ?? 2 ** (number - 1), LONGEST_WAIT_S);
      waiting?.(error, seconds);
      events.dispatchEvent(new CustomEvent("waiting", { detail: { error, seconds } }));
      await pause(seconds, signal);
    }
  }
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const timer = setTimeout(resolve, seconds * 1000 * (1 + Math.random() / 4)); // not all pages at the same time
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

// fetch with the key. Throws ApiError for every status but 2xx; sends again with `again: true`.
export async function request(path, init = {}) {
  const { again = false, waiting, ...rest } = init;
  const attempt = async () => {
    let answer;
    try {
      answer = await fetch(url(path), { ...rest, headers: { ...authorization(), ...rest.headers } });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw errorOf(0, "");
    }
    if (!answer.ok) throw errorOf(answer.status, await answer.text(), answer.headers.get("retry-after"));
    return answer;
  };
  return again ? resending(attempt, { signal: rest.signal, waiting }) : attempt();
}
