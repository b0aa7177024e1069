"""The facts of the hooks in recorded versions of vLLM (`versions.json`), and how two versions differ."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.hooks.source import Facts
from tools.hooks.uses import Hooks

RECORD = Path(__file__).with_name("versions.json")
SAME = "="  # as in the version before
MISSING, SIGNATURE, BODY, NEW = "missing", "signature changed", "body changed", "new"
FAILURES = (MISSING, SIGNATURE)


class Change(NamedTuple):
    path: str
    what: str  # MISSING, SIGNATURE, BODY or NEW
    optional: bool
    before: Facts | None
    after: Facts | None

    @property
    def fails(self) -> bool:
        return self.what in FAILURES and not (self.optional and self.what == MISSING)


Recorded = dict[str, dict[str, Facts | None]]  # version -> path -> facts


def read(file: Path = RECORD) -> Recorded:
    content = json.loads(file.read_text(encoding="utf-8"))
    recorded: Recorded = {version: {} for version in content["versions"]}
    for path, line in content["hooks"].items():
        facts: Facts | None = None
        for version, cell in zip(content["versions"], line, strict=True):
            if cell != SAME:
                facts = None if cell is None else Facts(*cell)
            recorded[version][path] = facts
    return recorded


def write(recorded: Mapping[str, Mapping[str, Facts | None]], file: Path = RECORD) -> None:
    """One line for each hook."""
    versions = list(recorded)
    lines = []
    for path in sorted(recorded[versions[0]]):
        cells: list[object] = []
        for version in versions:
            facts = recorded[version][path]
            before = recorded[versions[len(cells) - 1]][path] if cells else ()
            cells.append(SAME if facts == before else facts)
        lines.append(f"{json.dumps(path)}: {json.dumps(cells)}")
    body = ",\n".join(lines)
    file.write_text(f'{{"versions": {json.dumps(versions)}, "hooks": {{\n{body}\n}}}}\n', encoding="utf-8")


def changes(hooks: Hooks, before: Mapping[str, Facts | None], after: Mapping[str, Facts | None]) -> Sequence[Change]:
    """Of all hooks, those that differ."""
    found = []
    for path in sorted(hooks.uses):
        old, new = before[path], after[path]
        if old == new:
            continue
        if new is None:
            what = MISSING
        elif old is None:
            what = NEW
        else:
            what = SIGNATURE if old.signature != new.signature else BODY
        found.append(Change(path, what, not hooks.needed(path), old, new))
    return found
