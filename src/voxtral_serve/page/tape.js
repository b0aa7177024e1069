// The audio of a live session that no text has answered yet, so that it can be sent again on another connection.

/** Pieces of PCM16. Positions are samples of the whole recording. */
export class Tape {
  /** `most`: samples that are kept; beyond them, the oldest piece is dropped. */
  constructor(most) {
    this.most = most;
    this.first = 0; // position of the audio that is kept,
    this.end = 0; // and its end
    this.lost = 0; // samples that were dropped and never sent
    this.sent = 0; // the highest position that was ever sent
    this.at = 0; // position of the next sample to send
    this.pieces = [];
  }

  record(pcm) {
    this.pieces.push(pcm);
    this.end += pcm.length;
    while (this.end - this.first > this.most) {
      const first = this.first;
      this.drop(this.pieces[0].length);
      this.lost += Math.max(0, this.first - Math.max(first, this.sent));
    }
  }

  /** The next samples to send, not beyond `limit`; null where there are none. */
  take(limit = Infinity) {
    let start = this.first;
    for (const piece of this.pieces) {
      if (this.at < start + piece.length) {
        if (this.at >= limit) return null;
        const found = piece.subarray(this.at - start, Math.min(piece.length, limit - start));
        this.at += found.length;
        this.sent = Math.max(this.sent, this.at);
        return found;
      }
      start += piece.length;
    }
    return null;
  }

  /** Send all that is kept once more. Returns the position at which it begins. */
  rewind() {
    this.at = this.first;
    return this.first;
  }

  /** The audio up to `position` has its text, as far as it was sent on this connection: it is kept no longer. */
  answered(position) {
    this.drop(Math.min(position, this.at) - this.first);
  }

  drop(samples) {
    while (samples > 0) {
      const piece = this.pieces.shift();
      if (piece.length > samples) this.pieces.unshift(piece.subarray(samples));
      const gone = Math.min(piece.length, samples);
      this.first += gone;
      samples -= gone;
    }
    this.at = Math.max(this.at, this.first);
  }
}
