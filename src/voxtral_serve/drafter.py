"""The names by which configs ask for speculation: `model: voxtral_serve.drafter.Drafter`, or `PadDrafter`."""

from voxtral_serve.engine.drafter import Drafter, PadDrafter

__all__ = ["Drafter", "PadDrafter"]
