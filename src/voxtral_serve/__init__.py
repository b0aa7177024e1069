"""Voxtral speech-to-text on vLLM."""

from importlib.metadata import version

__version__ = version("voxtral-serve")
