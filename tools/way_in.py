"""What does an upload cost before the engine has it, in one checkout of this repository and in another?

    python -m tools.way_in --tree before=../old --tree after=. --out bench/results/way-in.json

Both serve pico with profiles/fast.yaml on this machine's CPU. Each round goes first, second, second, first, so that a
drift of the machine falls on both alike. A turn is one upload after the other of one length. Of each turn: the CPU time
of the API process and its helpers (all processes but the engine's), the time from a request's last byte to the engine's
first step with it, the most memory of these processes above that of their start, and the latency. A ratio is the
geometric mean over the pairs of all rounds, with the lowest and the highest of them. Exit status 1 where an upload
failed.
"""

import argparse
import contextlib
import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import requests
import soundfile

from bench import environment, results, serve
from mistral_layout.audio import SAMPLE_RATE
from pico import huggingface
from tools import inputs
from tools.compare_layouts import LIBRARIES, ROOT
from tools.compare_trees import ORDER, command, over_pairs

TURNS = {12: 20, 600: 1}  # seconds of audio -> uploads of a turn
ROUNDS = 3
SAMPLE_S = 0.02  # between two looks at the memory
STEPS_S = 1.5  # after which the engine has written its steps (engine/steps.py, FLUSH_S)
ENGINE = ("VLLM::EngineCore", "VLLM::Worker")
FLAGS = (
    *("--enforce-eager", "--gpu-memory-utilization", "0.3", "--api-server-count", "1", "--max-model-len", "512"),
    *("--additional-config", json.dumps({"max_live_sessions": 4, "max_clip_positions": 512})),
)
# vLLM would bind the workers of both servers to the same core.
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
COMPARED = ("api_cpu_s", "to_engine_ms", "peak_bytes", "p50_ms")


class Tree:
    """A checkout's server."""

    def __init__(self, name: str, url: str, process: psutil.Process, steps: Path) -> None:
        self.name, self.url, self.process, self.steps = name, url, process, steps
        self.idle_bytes = self.memory()  # before the first upload

    def frontend(self) -> list[psutil.Process]:
        """The API process, with what it has started besides the engine."""
        processes = [self.process, *self.process.children(recursive=True)]
        return [each for each in processes if not any(name in " ".join(each.cmdline()) for name in ENGINE)]

    def cpu_s(self) -> float:
        """Seconds of these processes, with those that have ended."""
        return sum(sum(process.cpu_times()[:4]) for process in self.frontend())

    def memory(self) -> int:
        total = 0
        for process in self.frontend():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def begun(self) -> list[float]:
        """The times at which requests had their first step."""
        steps = (json.loads(line) for line in self.steps.read_text(encoding="utf-8").splitlines())
        return [step["at"] for step in steps if step["new"]]


def upload(url: str, file: bytes) -> tuple[float, float]:
    """(when the last byte was sent, when the answer was complete), of time.time(). Raises OSError if it failed."""
    prepared = requests.Request("POST", url, files={"file": ("clip", file)}, data={"model": "voxtral"}).prepare()
    assert isinstance(prepared.body, bytes)
    parts = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)) as connection:
        connection.request("POST", inputs.UPLOAD, prepared.body, dict(prepared.headers))
        sent = time.time()
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200 or not json.loads(content)["text"]:
            raise OSError(f"HTTP {answer.status}: {content[:200]!r}")
    return sent, time.time()


@contextlib.contextmanager
def peak(tree: Tree) -> Iterator[list[int]]:
    """A list of one number: the most bytes so far that the API process and its helpers have above their idle memory."""
    stop, found = threading.Event(), [0]

    def sample() -> None:
        while not stop.wait(SAMPLE_S):
            found[0] = max(found[0], tree.memory() - tree.idle_bytes)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def turn(tree: Tree, file: bytes, uploads: int) -> dict[str, float]:
    """The figures of one turn: CPU seconds of one upload, medians of the times, peak over the idle memory."""
    before_s = tree.cpu_s()
    with peak(tree) as most:
        times = [upload(tree.url, file) for _ in range(uploads)]
    spent_s = tree.cpu_s() - before_s
    time.sleep(STEPS_S)
    begun = np.array(tree.begun())
    waits = [float(begun[begun >= sent].min()) - sent for sent, _ in times]
    return {
        "api_cpu_s": spent_s / uploads,
        "to_engine_ms": 1000 * statistics.median(waits),
        "peak_bytes": float(most[0]),
        "p50_ms": 1000 * statistics.median(end - sent for sent, end in times),
    }


def speech(seconds: int) -> bytes:
    """A FLAC file of the benchmark's clips, joined."""
    clips = sorted((ROOT / "bench/data/clips").glob("*.opus"))[:90]
    parts = [soundfile.read(clip, dtype="float32")[0] for clip in clips]
    return inputs.encoded(np.resize(np.concatenate(parts), seconds * SAMPLE_RATE), SAMPLE_RATE, "FLAC")


def start(trees: Mapping[str, Path], model: Path, scratch: Path, up: contextlib.ExitStack) -> list[Tree]:
    ready = []
    for name, place in trees.items():
        own, port = scratch / name, serve.free_port()
        own.mkdir()
        vllm, config = command(place.resolve(), own), place.resolve() / "profiles/fast.yaml"
        steps = own / "steps.jsonl"
        variables = {"VOXTRAL_SERVE_STEPS": str(steps), **UNBOUND}
        log = own / "server.log"
        process = up.enter_context(serve.server(config, model, port, log, *FLAGS, command=vllm, environment=variables))
        ready.append(Tree(name, f"http://127.0.0.1:{port}", psutil.Process(process.pid), steps))
    return ready


def ratios(names: Sequence[str], turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The second tree's figures over the first's."""
    found = []
    for seconds in TURNS:
        own = [each for each in turns if each["audio_s"] == seconds]
        first, second = ([each for each in own if each["tree"] == name] for name in names)  # in the order of the pairs
        values = {
            name: over_pairs([(a[name], b[name]) for a, b in zip(first, second, strict=True)]) for name in COMPARED
        }
        found.append({"audio_s": seconds, "of": names[1], "to": names[0], "pairs": len(first), **values})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.way_in", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", action="append", required=True, metavar="NAME=DIR", help="twice: baseline, and other")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="of four turns (default: %(default)s)")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the JSON file to write")
    flags = parser.parse_args()
    trees = {name: Path(place) for name, _, place in (word.partition("=") for word in flags.tree)}
    if len(trees) != 2:
        parser.error("--tree: expected two of different names")
    files, turns, names = {seconds: speech(seconds) for seconds in TURNS}, list[dict[str, Any]](), [*trees]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as up:
        model = Path(directory, "checkpoint")
        huggingface.write(model)
        ready = start(trees, model, Path(directory), up)
        for tree in ready:
            for file in files.values():
                upload(tree.url, file)
        for which in ORDER * flags.rounds:
            for seconds, uploads in TURNS.items():
                figures = turn(ready[which], files[seconds], uploads)
                turns.append({"tree": names[which], "audio_s": seconds, **figures})
                print(turns[-1], flush=True)
        version = serve.get(f"{ready[0].url}/version", timeout_s=10).json()["version"]
    outcome = {
        "command": f"python -m tools.way_in --rounds {flags.rounds}",
        "environment": environment.describe(version) | {"served_by": environment.versions(LIBRARIES)},
        "configs": {name: (place / "profiles/fast.yaml").read_text() for name, place in trees.items()},
        "flags": list(FLAGS),
        "uploads": TURNS,
        "turns": turns,
        "ratios": ratios(names, turns),
    }
    results.write_json(flags.out, outcome)
    print(json.dumps(outcome["ratios"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
