"""report.json and report.html. report.schema.json describes the first; the second shows the same."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from voxtral_serve.client.files import write as replace
from voxtral_serve.prove import page
from voxtral_serve.prove.outcome import BOUNDS, Part

SCHEMA_VERSION = 1
JSON, PAGE = "report.json", "report.html"
OUTCOMES = ("passed", "failed", "skipped")


def whole(facts: dict[str, Any], parts: Sequence[Part], seconds: float, with_texts: bool) -> dict[str, Any]:
    """The report, as JSON's types. Texts of clips are in it only if they are wanted."""
    return {
        "schema_version": SCHEMA_VERSION,
        "outcome": "failed" if any(part.result.outcome == "failed" for part in parts) else "passed",
        "seconds": round(seconds, 1),
        **facts,
        "bounds": BOUNDS,
        "parts": [
            {
                "name": part.name,
                "title": part.title,
                "outcome": part.result.outcome,
                "reason": part.result.reason,
                "seconds": part.seconds,
                "figures": part.result.figures,
                "texts": part.result.texts if with_texts else None,
            }
            for part in parts
        ],
    }


def verdict(report: dict[str, Any]) -> str:
    """One line: passed or failed, with the numbers of parts by outcome."""
    outcomes = [part["outcome"] for part in report["parts"]]
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in OUTCOMES)
    return f"{report['outcome']}: {counts}, in {report['seconds']:.0f} s"


def write(folder: Path, report: dict[str, Any]) -> None:
    """Both files. Raises OSError, and ValueError for a number that JSON does not have."""
    replace(folder / JSON, (json.dumps(report, indent=2, allow_nan=False) + "\n").encode())
    replace(folder / PAGE, page.page(report).encode())
