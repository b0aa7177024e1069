"""Paths and servers' messages as printable text."""

import os
from pathlib import Path


def shown(path: Path) -> str:
    """A path as printable text: its name may hold control characters, and bytes that are not valid UTF-8."""
    return plain(os.fsencode(path).decode(errors="replace"))


def plain(text: str) -> str:
    """The text with replacement characters for all that is not printable."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)
