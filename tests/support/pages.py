"""The tables of parameters in docs/pages: what a page says of each parameter of another API."""

import re
from typing import NamedTuple

from places import ROOT

ROW = re.compile(r"^\| (`[^|]+`) \| (yes|ignored|refused) \|(.*)\|$", re.MULTILINE)
NAME = re.compile(r"`([\w.]+)`")


class Entry(NamedTuple):
    """What a row says of a parameter: `verdict` is "yes", "ignored" or "refused", `note` the last cell."""

    verdict: str
    note: str


class Parameters:
    """The rows of one table, by the names in their first cell."""

    def __init__(self, page: str, heading: str) -> None:
        text = (ROOT / "docs/pages" / page).read_text(encoding="utf-8")
        section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        self.entries = {
            name: Entry(verdict, note) for names, verdict, note in ROW.findall(section) for name in NAME.findall(names)
        }

    def of(self, path: str) -> Entry:
        """The row of a parameter, or of the object that it is in, whose row then names it. Raises KeyError."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            entry = self.entries.get(".".join(parts[:length]))
            if entry is not None and (length == len(parts) or f"`{parts[-1]}`" in entry.note):
                return entry
        raise KeyError(path)
