"""The name by which configs ask for it: `middleware: voxtral_serve.realtime.WholeClipsOnly`."""

from voxtral_serve.guard.live import WholeClipsOnly

__all__ = ["WholeClipsOnly"]
