"""`voxtral-serve batch` as a user runs it, in a process of its own, and what it wrote."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from voxtral_serve.batch import places

COMMAND = [sys.executable, "-m", "voxtral_serve.cli", "batch"]


def start(log: Path, *words: object, **environment: str) -> "subprocess.Popen[bytes]":
    """The command, with its output in `log`."""
    with log.open("wb") as file:
        return subprocess.Popen(
            [*COMMAND, *map(str, words)],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def run(*words: object, timeout_s: float = 1800, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, *map(str, words)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout_s)


def write_manifest(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def rows(out: str) -> list[dict[str, Any]]:
    """Those of the Parquet files. Checks that the JSON lines have the same."""
    where = places.place(out)
    found, lines = [], []
    for file in places.files(where.below("rows/parquet"), ".parquet"):
        found += pq.read_table(file.path, filesystem=where.system).to_pylist()
    for file in places.files(where.below("rows/jsonl"), ".jsonl"):
        with where.system.open_input_stream(file.path) as stream:
            lines += [json.loads(line) for line in stream.read().splitlines()]
    for row in found:
        row["manifest"] = json.loads(row["manifest"])
    assert sorted(found, key=lambda row: row["id"]) == sorted(lines, key=lambda row: row["id"])
    return found


def done(out: str) -> int:
    """How many parts are done."""
    where = places.place(out)
    return sum(not file.path.endswith(".pending.parquet") for file in places.files(where.below("done"), ".parquet"))


def descendants(process: "subprocess.Popen[bytes]", name: str = "") -> list[psutil.Process]:
    """The processes below this one with `name` in their command line."""
    found = []
    for each in psutil.Process(process.pid).children(recursive=True):
        try:
            if name in " ".join(each.cmdline()) or name in each.name():
                found.append(each)
        except psutil.Error:
            continue
    return found


def engines(folder: Path) -> list[psutil.Process]:
    """The processes of engines whose configuration is in a folder of this one: `vllm serve`, and those below it."""
    found = []
    for each in psutil.process_iter():
        try:
            if f"{folder}/voxtral-batch-" in " ".join(each.cmdline()):
                found += [each, *each.children(recursive=True)]
        except psutil.Error:
            continue
    return found


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until the condition holds, while the process runs."""
    until = time.monotonic() + 1800
    while not condition():
        assert process.poll() is None, f"the command ended with status {process.returncode}: {log.read_text()}"
        assert time.monotonic() < until
        time.sleep(0.5)
