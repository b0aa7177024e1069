"""Write the table of patches in docs/pages/checkpoints.md, from voxtral_serve.patches. Standard library only.

python -m tools.patch_table            # rewrites what stands between the two marks
python -m tools.patch_table --check    # changes nothing; exit status 1 when the table is stale
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/pages/checkpoints.md"
BEGIN = "<!-- patches: made by tools/patch_table.py -->"
END = "<!-- /patches -->"
HEADS = ("patch", "what breaks without it", "needed on", "goes when")


def records() -> tuple[Any, ...]:
    """Every record of this checkout."""
    if "voxtral_serve" not in sys.modules:
        sys.path.insert(0, str(ROOT / "src"))
    from voxtral_serve.patches import every

    return tuple(every())


def table(patches: Iterable[Any]) -> str:
    """A row for each record. The record also has what it does, who uses it, where upstream stands, its expiry test."""
    rows = []
    for patch in patches:
        versions = ", ".join(version for version, needed in patch.needed.items() if needed)
        rows.append((code(patch.name), code(patch.breaks), f"{patch.library} {versions}", patch.until))
    return markdown(HEADS, rows)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    """As a code span, which needs more backticks around it than the text has in a row."""
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def updated(text: str, new: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with `new` between the marks. Raises ValueError unless each of them is there once, in their order."""
    head, first, rest = text.partition(begin)
    _, last, tail = rest.partition(end)
    if not (first and last) or begin in rest or end in head + tail:
        raise ValueError(f"expected one {begin} and one {end} behind it")
    return f"{head}{begin}\n\n{new}\n\n{end}{tail}"


def main(arguments: Sequence[str] | None = None, page: Path = PAGE) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.patch_table", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 when the table is stale")
    check = parser.parse_args(arguments).check
    return write(page, {(BEGIN, END): table(records())}, "table of patches", parser.prog, check)


def write(page: Path, tables: Mapping[tuple[str, str], str], what: str, command: str, check: bool) -> int:
    """Write tables between their marks in a page, or only check that they are there. Returns an exit status."""
    old = new = page.read_text(encoding="utf-8")
    try:
        for (begin, end), content in tables.items():
            new = updated(new, content, begin, end)
    except ValueError as error:
        print(f"error: {page}: {error}", file=sys.stderr)
        return 1
    if check and new != old:
        print(f"{page.name}'s {what} is stale: run `{command}`", file=sys.stderr)
        return 1
    if new != old:
        page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
