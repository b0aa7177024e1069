"""The name by which configs ask for speculation: `model: voxtral_serve.drafter.PadDrafter`."""

from voxtral_serve.engine.drafter import PadDrafter

__all__ = ["PadDrafter"]
