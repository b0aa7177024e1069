"""Where the words of a live session go: the screen as they come, files as each turn is complete."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self, TextIO

from voxtral_serve.client.dialects import Turn
from voxtral_serve.client.errors import UsageError
from voxtral_serve.client.text import shown
from voxtral_serve.transcript.subtitles import Segment, cue


class Captions:
    """A context. With `out`, `out`/NAME.txt has a line for each turn, and with `form` srt `out`/NAME.srt its subtitles.

    Words go to stdout as they come, each turn on a line of its own; without `out` but with `form` srt, subtitles do.
    Raises UsageError for files that cannot be written.
    """

    def __init__(self, out: Path | None, audio: Path | None, form: str, again: bool) -> None:
        self.form = form
        self._names: list[Path] = []
        if out is not None:
            # A microphone's recording cannot be repeated: it gets a name of its own.
            name = audio.stem if audio else time.strftime("live-%Y%m%d-%H%M%S")
            self._names = [out / f"{name}{suffix}" for suffix in ((".txt", ".srt") if form == "srt" else (".txt",))]
        if not again and (there := [path for path in self._names if path.exists()]):
            raise UsageError(f"{shown(there[0])} exists: --again replaces it")
        self._screen = _Screen(hidden=form == "srt" and not out)
        self._stack = ExitStack()
        self._text: TextIO | None = None
        self._subtitles: TextIO | None = None
        self._cues = 0

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        """Make the files."""
        try:
            for path in self._names:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = self._stack.enter_context(path.open("w", encoding="utf-8"))
                if path.suffix == ".txt":
                    self._text = file
                else:
                    self._subtitles = file
        except OSError as error:
            raise UsageError(f"--out {shown(path)}: {error.strerror}") from None

    def __exit__(self, *_: object) -> None:
        """A turn that is not complete is written as far as it came."""
        self._write(self._text, self._screen.rest())
        self._screen.end()
        self._stack.close()

    def again(self) -> None:
        """The turn that is not complete comes once more, on another connection."""
        self._screen.again()

    def delta(self, text: str) -> None:
        self._screen.delta(text)

    def turn(self, turn: Turn) -> None:
        self._screen.turn(turn.text)
        self._write(self._text, turn.text)
        if self.form == "srt":
            for segment in turn.segments:
                if segment.text:
                    self._cues += 1
                    text = cue(self._cues, Segment(segment.text, segment.start_s, segment.end_s))
                    if self._subtitles:
                        self._subtitles.write(text)
                        self._subtitles.flush()
                    else:
                        print(text, end="", flush=True)

    def _write(self, file: TextIO | None, text: str) -> None:
        if file and text:
            file.write(f"{text}\n")
            file.flush()


class _Screen:
    """Words on stdout as they come, each turn on its line. What is said once more is not shown twice."""

    def __init__(self, hidden: bool) -> None:
        self.hidden = hidden
        self._shown = self._said = ""  # of this turn: on the screen, and on this connection

    def again(self) -> None:
        self._said = ""

    def delta(self, text: str) -> None:
        self._said = (self._said + text).lstrip()
        if self._shown.startswith(self._said):
            return
        if not self._said.startswith(self._shown):
            self.end()  # other words than before: all of them, on another line
        self._print(self._said[len(self._shown) :])
        self._shown = self._said

    def turn(self, text: str) -> None:
        if not self._said:
            self.delta(text)
        self.end()
        self._said = ""

    def rest(self) -> str:
        return self._shown.strip()

    def end(self) -> None:
        if self._shown:
            self._print("\n")
        self._shown = ""

    def _print(self, text: str) -> None:
        if not self.hidden:
            print(text, end="", flush=True)
