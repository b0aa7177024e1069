"""Draw the rooms of src/voxtral_serve and who imports whom, from the code, as an SVG. Standard library only.

python -m tools.rooms_picture            # writes docs/pages/rooms.svg
python -m tools.rooms_picture --check    # changes nothing; exit status 1 when the picture is stale

A row of the picture imports rows below it only. A module that is not a folder and that many rooms import (units, shims)
is named in the picture's last line instead of drawn. The text in a box is that of voxtral_serve/__init__.py.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from tools.imports import Imports

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/pages/rooms.svg"
PACKAGE = "voxtral_serve."
MANY = 3  # rooms that import a module which is then not drawn
# Pixels
WIDTH, BOX, HEIGHT, ROW, MARGIN = 1280, 188, 66, 118, 24
PASSING = 36  # the room that an arrow takes in a row that it passes
LINE = 27  # characters in a line of a box

Graph = Mapping[str, set[str]]


def rooms() -> tuple[dict[str, set[str]], list[str]]:
    """Each room that is drawn with the rooms that it imports, and the rooms that are not drawn."""
    found = Imports(ROOT).of_rooms()
    graph = {
        room.removeprefix(PACKAGE): {each.removeprefix(PACKAGE) for each in others if each.startswith(PACKAGE)}
        for room, others in found.items()
        if room.startswith(PACKAGE)
    }
    folders = {path.parent.name for path in (ROOT / "src/voxtral_serve").glob("*/__init__.py")}
    left_out = sorted(
        room for room in graph if room not in folders and sum(room in others for others in graph.values()) >= MANY
    )
    return {room: others - {*left_out} for room, others in graph.items() if room not in left_out}, left_out


def descriptions() -> dict[str, str]:
    """What the package's docstring says of each room, up to the first colon, semicolon or full stop."""
    text = (ROOT / "src/voxtral_serve/__init__.py").read_text(encoding="utf-8")
    return {
        name: re.split("[:;.]", rest)[0].replace("`", "")
        for name, rest in re.findall(r"^  (\w+) {2,}(.+)$", text, re.MULTILINE)
    }


def rows(graph: Graph) -> dict[str, int]:
    """The row of each room: below all that import it, and just above what it imports if nobody imports it."""
    row = dict.fromkeys(graph, 0)
    for _ in graph:
        for room, others in graph.items():
            for each in others:
                row[each] = max(row[each], row[room] + 1)
    imported = {each for others in graph.values() for each in others}
    for room in graph.keys() - imported:
        row[room] = min((row[each] for each in graph[room]), default=1) - 1
    return row


def places(graph: Graph, row: Mapping[str, int]) -> tuple[dict[str, float], dict[tuple[str, str], list[str]]]:
    """The x of the middle of each box and of each passing arrow, and for each arrow the names that it runs through."""
    arrows: dict[tuple[str, str], list[str]] = {}
    lines: list[list[str]] = [[] for _ in range(max(row.values()) + 1)]
    for room in sorted(graph):
        lines[row[room]].append(room)
    for room in sorted(graph):
        for each in sorted(graph[room]):
            passed = [f"{room}>{each}@{level}" for level in range(row[room] + 1, row[each])]
            for level, name in enumerate(passed, row[room] + 1):
                lines[level].append(name)
            arrows[room, each] = [room, *passed, each]
    neighbours: dict[str, list[str]] = {name: [] for line in lines for name in line}
    for way in arrows.values():
        for above, below in pairwise(way):
            neighbours[above].append(below)
            neighbours[below].append(above)
    x = {name: WIDTH * (index + 1) / (len(line) + 1) for line in lines for index, name in enumerate(line)}
    for _ in range(40):
        for line in lines:
            wanted = {
                name: sum(x[each] for each in neighbours[name] or [name]) / max(1, len(neighbours[name]))
                for name in line
            }
            line.sort(key=lambda name: (wanted[name], name))
            x |= spread(line, wanted)
    return x, arrows


def spread(line: Sequence[str], wanted: Mapping[str, float]) -> dict[str, float]:
    """Places near the wanted ones, from left to right, that do not overlap and lie within the picture."""
    sizes = {name: PASSING if "@" in name else BOX for name in line}
    gap = 14
    placed: dict[str, float] = {}
    left = float(MARGIN)
    for name in line:
        placed[name] = max(wanted[name], left + sizes[name] / 2)
        left = placed[name] + sizes[name] / 2 + gap
    right = float(WIDTH - MARGIN)
    for name in reversed(line):
        placed[name] = min(placed[name], right - sizes[name] / 2)
        right = placed[name] - sizes[name] / 2 - gap
    return placed


def picture() -> str:
    graph, left_out = rooms()
    row, said = rows(graph), descriptions()
    x, arrows = places(graph, row)
    height = (max(row.values()) + 1) * ROW + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif">',
        "<title>The rooms of voxtral_serve: an arrow means that a room imports another</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#667"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fff"/>',
    ]
    for way in arrows.values():
        points = [(x[name], MARGIN + ROW * (row[way[0]] + step)) for step, name in enumerate(way)]
        parts.append(
            f'<path d="{curve(points)}" fill="none" stroke="#667" stroke-width="1.3" marker-end="url(#head)"/>'
        )
    for room in sorted(graph):
        parts += box(room, x[room], MARGIN + ROW * row[room], said.get(room, ""))
    parts.append(
        f'<text x="{WIDTH / 2:.0f}" y="{height - 14}" font-size="13" fill="#445" text-anchor="middle">'
        f"An arrow means: imports. Not drawn: {escape(' and '.join(left_out))}, which most rooms import.</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def curve(points: Sequence[tuple[float, float]]) -> str:
    """From the lower edge of the first box through the rows between to the upper edge of the last."""
    (x, y), *rest = points
    y += HEIGHT
    path = f"M{x:.0f} {y:.0f}"
    for index, (to_x, top) in enumerate(rest):
        middle = (y + top) / 2
        path += f"C{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {top:.0f}"
        x, y = to_x, top
        if index < len(rest) - 1:  # straight past the boxes of the row
            y += HEIGHT
            path += f"V{y:.0f}"
    return path


def box(room: str, x: float, y: float, said: str) -> list[str]:
    lines: list[str] = []
    for word in said.split():
        if lines and len(lines[-1]) + len(word) < LINE:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    start = y + (26 if lines else 36) - (6 if len(lines) > 1 else 0)
    texts = [f'<text x="{x:.0f}" y="{start:.0f}" font-size="16" font-weight="600" fill="#112">{escape(room)}</text>']
    for number, line in enumerate(lines, 1):
        texts.append(
            f'<text x="{x:.0f}" y="{start + 4 + 15 * number:.0f}" font-size="12.5" fill="#445">{escape(line)}</text>'
        )
    return [
        f'<rect x="{x - BOX / 2:.0f}" y="{y:.0f}" width="{BOX}" height="{HEIGHT}" rx="6" fill="#fff4ec" '
        'stroke="#e8590c"/>',
        f'<g text-anchor="middle">{"".join(texts)}</g>',
    ]


def main(arguments: Sequence[str] | None = None, path: Path = PICTURE) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.rooms_picture", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if the picture is stale")
    check = parser.parse_args(arguments).check
    new = picture()
    if path.is_file() and path.read_text(encoding="utf-8") == new:
        return 0
    if check:
        print(f"{path.name} is stale: run `python -m tools.rooms_picture`", file=sys.stderr)
        return 1
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
