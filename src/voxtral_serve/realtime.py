"""The name by which configs ask for it: `middleware: voxtral_serve.realtime.WholeClipsOnly`."""

from voxtral_serve.guard.live.whole_clips import WholeClipsOnly

__all__ = ["WholeClipsOnly"]
