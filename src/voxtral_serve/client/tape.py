"""The audio of a live session that no text has answered yet, so that it can be sent again on another connection."""

import threading
from collections import deque

SAMPLE_BYTES = 2


class Tape:
    """PCM16 between the thread that records it and the one that sends it.

    It keeps what was recorded and not answered, at most `most` samples: beyond them it drops the oldest piece.
    Positions are samples of the whole recording.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.first = self.end = 0  # positions of the audio that it keeps
        self.ended = False  # whether all is recorded
        self.lost = 0  # samples that were dropped and never sent
        self._pieces: deque[bytes] = deque()
        self._next = 0  # index of the piece to send next
        self._at = self._sent = 0  # position of that piece; and the highest that was ever sent
        self._changed = threading.Condition()

    def record(self, pcm: bytes) -> None:
        with self._changed:
            self._pieces.append(pcm)
            self.end += len(pcm) // SAMPLE_BYTES
            while self.end - self.first > self.most:
                first = self.first
                self._drop()
                self.lost += max(0, self.first - max(first, self._sent))
            self._changed.notify_all()

    def finish(self) -> None:
        """All is recorded."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def rewind(self) -> int:
        """Send all that is kept once more. Returns the position at which it begins."""
        with self._changed:
            self._next, self._at = 0, self.first
            return self.first

    def take(self, stop: threading.Event) -> bytes | None:
        """The next piece, once it is recorded. None after the last one, and once `stop` is set and `wake` called."""
        with self._changed:
            while not stop.is_set():
                if self._next < len(self._pieces):
                    piece = self._pieces[self._next]
                    self._next += 1
                    self._at += len(piece) // SAMPLE_BYTES
                    self._sent = max(self._sent, self._at)
                    return piece
                if self.ended:
                    return None
                self._changed.wait()
        return None

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def answered(self, position: int) -> None:
        """The audio up to `position` has its text, as far as it was sent on this connection: it is kept no longer."""
        with self._changed:
            position = min(position, self._at)
            while self._pieces and self.first + len(self._pieces[0]) // SAMPLE_BYTES <= position:
                self._drop()
            if self.first < position:
                self._pieces[0] = self._pieces[0][(position - self.first) * SAMPLE_BYTES :]
                self.first = position

    def _drop(self) -> None:
        self.first += len(self._pieces.popleft()) // SAMPLE_BYTES
        if self._next:
            self._next -= 1
        else:
            self._at = self.first
