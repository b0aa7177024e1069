// How the Live tab tells caption views in other tabs of the same browser what was said.

export const CHANNEL = "voxtral-serve-live"; // a BroadcastChannel; a caption view begins with "hello"
const MOST = 400; // characters: more than a caption shows

/** The last of these turns, as many as a caption may show: [{number, text}]. */
export function lastTurns(turns) {
  const found = [];
  let length = 0;
  for (const { number, text } of turns.toReversed()) {
    if (length >= MOST) break;
    found.unshift({ number, text });
    length += text.length;
  }
  return found;
}
