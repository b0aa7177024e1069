"""The name by which configs ask for it: `middleware: voxtral_serve.guard.Guard`."""

from voxtral_serve.guard.middleware import Guard

__all__ = ["Guard"]
