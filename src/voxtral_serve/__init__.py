"""Voxtral speech-to-text on vLLM."""

__version__ = "0.2.0"
