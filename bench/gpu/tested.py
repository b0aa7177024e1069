"""What `make test-gpu` has recorded, and whether that was of this state of the engine.

    bench/results/gpu-tests/NAME.json   the last run on a GPU, by tests/gpu/run.py

A record is of this state if its hash is that of the syntax trees of the engine's files today: comments, docstrings
and the form of the source do not count. `make release` fails without a record of this state in which nothing failed.
Only the standard library is used: the release's environment has nothing else.
"""

import ast
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import BenchError

FOLDER = "bench/results/gpu-tests"
# What runs in vLLM's engine, below src/voxtral_serve
FILES = ("engine/*.py", "patches/*.py", "checkpoint/*.py", "drafter.py", "plugin.py", "shims.py", "units.py")
HEADS = ("GPU", "vLLM", "tests", "commit", "of this state of the engine")


def engine_hash(root: Path) -> str:
    """SHA-256 of the syntax trees of FILES, by name."""
    package, digest = root / "src/voxtral_serve", hashlib.sha256()
    for path in sorted(path for pattern in FILES for path in package.glob(pattern)):
        content = plain(ast.parse(path.read_text(encoding="utf-8")))
        digest.update(json.dumps([path.relative_to(package).as_posix(), content]).encode())
    return digest.hexdigest()


def plain(node: Any) -> Any:
    """A syntax tree as lists, the same of every version of Python: without fields that are empty, and docstrings."""
    if isinstance(node, list):
        return [plain(each) for each in node]
    if isinstance(node, ast.JoinedStr):
        return ["JoinedStr", *joined(node)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
        fields["body"] = node.body[1:]
    return [type(node).__name__, *([name, plain(value)] for name, value in fields.items() if value not in (None, []))]


def joined(node: ast.JoinedStr) -> Iterator[Any]:
    """The parts of an f-string. Versions of Python differ in how they split the text between its values."""
    text = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
            continue
        yield from [text] if text else []
        yield plain(part)
        text = ""
    yield from [text] if text else []


def records(root: Path) -> list[dict[str, Any]]:
    """The content of every record, by name."""
    return [json.loads(path.read_bytes()) for path in sorted((root / FOLDER).glob("*.json"))]


def passed(record: dict[str, Any]) -> bool:
    return not record["counts"]["failed"] and record["counts"]["passed"] > 0


def check(root: Path) -> str:
    """A line about the record of this state. Raises BenchError without one."""
    digest = engine_hash(root)
    for record in records(root):
        if record["engine_sha256"] == digest and passed(record):
            return f"{record['counts']['passed']} passed on {record['gpu']}, commit {record['commit'][:7]}"
    raise BenchError(
        f"{FOLDER} has no record of this state of the engine, {digest[:12]}, in which every test passed: run "
        "`make test-gpu` on a GPU and commit the file that it writes"
    )


def table(root: Path) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(heads, rows) for docs/pages/architecture.md."""
    digest, rows = engine_hash(root), list[tuple[str, ...]]()
    for record in records(root):
        counts = ", ".join(f"{count} {what}" for what, count in record["counts"].items())
        commit = f"{record['commit'][:7]}, {record['date_utc'][:10]}"
        same = "yes" if record["engine_sha256"] == digest else "**no**"
        rows.append((record["gpu"], record["versions"]["vllm"], counts, commit, same))
    return HEADS, rows or [("no record", *"-" * (len(HEADS) - 1))]
