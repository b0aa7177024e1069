"""The command line: `python -m bench speakers make|score ...`. Exit status: 0, or 2 for an error.

python -m bench speakers make SOURCES --out FOLDER      # recordings of human voices: bench/speakers/recordings.py
python -m bench speakers score FOLDER --out bench/results/speakers.json
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import BenchError
from bench.speakers import recordings, score


def main(arguments: Sequence[str]) -> int:
    """Run a command line (without `speakers`) and return the exit status."""
    flags = parse(arguments)
    try:
        if flags.command == "make":
            recordings.make(flags.sources, flags.out)
            return 0
        content = score.score(flags.folder, flags.device)
    except (BenchError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    flags.out.write_text(json.dumps(content, indent=1) + "\n")
    print(score.table(content))
    for name, sums in content["known"].items():
        print(f"known speakers, {name}: {sums}")
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags of a command line. Raises SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m bench speakers", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="recordings with known speakers, from open sources")
    make.add_argument("sources", type=Path, help="a folder with what bench/speakers/recordings.py names")
    make.add_argument("--out", type=Path, required=True, help="a folder for the recordings")
    scored = commands.add_parser("score", help="count the words with the wrong speaker")
    scored.add_argument("folder", type=Path, help="what `make` wrote")
    scored.add_argument("--device", default="cpu", help="of the network, a name of PyTorch's (default cpu)")
    scored.add_argument("--out", type=Path, required=True, help="a JSON file for the figures")
    return parser.parse_args(arguments)
