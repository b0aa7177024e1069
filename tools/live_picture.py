"""Draw the lag of live sessions by their number, from bench/results/live.json, as an SVG.

    python -m tools.live_picture            # writes docs/pages/live-lag.svg
    python -m tools.live_picture --check    # changes nothing; exit status 1 when the picture is stale

Rows `live` and `stock` of new sessions, without uploads, that are not one clip each. Of several rows with the same
number of sessions, the one with the longest counts.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import tostring

from bench.measure import plots

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURE = ROOT / "bench/results/live.json", ROOT / "docs/pages/live-lag.svg"
NAMES = {"live": "ours", "stock": "stock"}  # name of the rows -> in the picture
VERSION = "0.32.0"  # of vLLM
STYLE = """
:root{color-scheme:light dark;--ink:#1c1c1a;--soft:#5d5c58;--rule:#e2e1dc;--page:#fff;
--s0:#2a78d6;--s1:#7fb0ea;--s2:#d95926;--s3:#eda07f}
@media(prefers-color-scheme:dark){:root{--ink:#ecebe6;--soft:#a5a39b;--rule:#37362f;--page:#1f1f1d;
--s0:#5aa2f0;--s1:#3a6ba3;--s2:#f08a5d;--s3:#a0583a}}
svg{background:var(--page)}
text{font:11.5px sans-serif;fill:var(--ink)}
.faint{fill:var(--soft)}.middle{text-anchor:middle}.end{text-anchor:end}.named{fill:var(--c)}
.grid{stroke:var(--rule);fill:none}.axis{stroke:var(--soft);fill:none}
.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}.dot{fill:var(--c)}
.s0{--c:var(--s0)}.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}
"""


def lines(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Name of a line -> (sessions, milliseconds), by sessions."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, shown in NAMES.items():
        own = [
            row
            for row in rows
            if row["name"] == name
            and row["vllm"] == VERSION
            and not (row["age_s"] or row["uploads"] or row.get("clips"))
        ]
        longest = {row["sessions"]: row for row in sorted(own, key=lambda row: float(row["seconds_each"]))}
        chosen = [longest[sessions] for sessions in sorted(longest)]
        for percentile in ("p99", "p50"):
            line = [(float(row["sessions"]), float(row["lag_ms"][percentile])) for row in chosen]
            found[f"{shown}, {percentile.upper()}"] = line
    return found


def drawn(rows: Sequence[dict[str, Any]]) -> str:
    picture = plots.logarithmic(lines(rows), "live sessions", "lag, ms")
    picture.set("xmlns", "http://www.w3.org/2000/svg")
    picture.insert(0, plots.tag("style", STYLE))
    return tostring(picture, encoding="unicode") + "\n"


def main(arguments: Sequence[str], picture: Path = PICTURE) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.live_picture", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 when the picture is stale")
    check = parser.parse_args(arguments).check
    new = drawn(json.loads(RESULTS.read_bytes())["rows"])
    if check and (not picture.exists() or picture.read_text(encoding="utf-8") != new):
        print(f"{picture.name} is stale: run `python -m tools.live_picture`", file=sys.stderr)
        return 1
    if not check:
        picture.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
