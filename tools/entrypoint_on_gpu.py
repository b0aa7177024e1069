"""Run entrypoint.sh on a GPU, without the container: what it refuses there, and how a server that it started ends.

    python -m tools.entrypoint_on_gpu --out bench/results/gpu-entrypoint.json

What tests/container cannot try, for want of a GPU. The checkpoint has the real one's size and random weights
(bench/gpu/checkpoint.py): no text is right. Exit status 1 where anything is not as it should be.

As in the container, its servers listen on all interfaces, the first of them (vllm_config.yaml) without a key.
"""

import argparse
import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import requests

from bench import dataset, environment, prometheus, results
from bench.gpu import checkpoint
from bench.measure import engine
from bench.measure.gpus import Gpus
from tools.compare_layouts import LIBRARIES, ROOT

CONTEST, FAST = ROOT / "vllm_config.yaml", ROOT / "profiles/fast.yaml"
REFUSAL_S, END_S, LEFT_S = 120, 60, 5
HELD_GIB = 8  # left free by the process that stands for another user of the GPU
# name: (config, further words, environment, what the line must say).
REFUSALS: dict[str, tuple[Path, tuple[str, ...], dict[str, str], str]] = {
    "no GPU": (CONTEST, (), {"CUDA_VISIBLE_DEVICES": ""}, r"no GPU"),
    "share too small": (
        CONTEST,
        ("--gpu-memory-utilization", "0.03"),
        {},
        r"needs .* of KV cache in addition to weights .* Profiles that fit: .*profiles/fast\.yaml",
    ),
    "memory in use": (
        CONTEST,
        (),
        {},
        r"gpu_memory_utilization 0\.65 reserves .* is free, .* Profiles that fit: none",
    ),
    "no key": (FAST, (), {}, r"server: no API key"),
    "port taken": (CONTEST, (), {}, r"port \d+"),
}


@contextlib.contextmanager
def holding(name: str, port: int) -> Iterator[None]:
    """What another process has while the refusal is asked for."""
    if name == "port taken":
        with socket.create_server(("0.0.0.0", port)):
            yield
    elif name == "memory in use":
        code = (
            "import sys, torch\n"
            f"free = torch.cuda.mem_get_info()[0] - ({HELD_GIB} << 30)\n"
            "held = torch.empty(free, dtype=torch.uint8, device='cuda')\n"
            "print('held', flush=True)\n"
            "sys.stdin.read()\n"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            if other.stdout is None or other.stdout.readline() != b"held\n":
                sys.exit("error: the process that should hold the GPU's memory did not get it")
            yield
    else:
        yield


def refusal(name: str, model: Path) -> dict[str, Any]:
    config, words, variables, expected = REFUSALS[name]
    port = engine.free_port()
    with holding(name, port):
        start = time.monotonic()
        command = ["sh", str(ROOT / "entrypoint.sh"), "--config", str(config), "--port", str(port), *words]
        inherited = {key: value for key, value in os.environ.items() if key != "VLLM_API_KEY"}
        done = subprocess.run(
            command, cwd=model, env=inherited | variables, capture_output=True, text=True, timeout=REFUSAL_S
        )
        took = time.monotonic() - start
    lines = [line for line in done.stderr.splitlines() if line.startswith("voxtral-serve: refused: ")]
    good = done.returncode == 1 and len(lines) == 1 and re.search(expected, lines[0]) is not None
    said = lines if lines else done.stderr.splitlines()[-5:]
    return {"name": name, "status": done.returncode, "seconds": round(took, 1), "said": said, "as_expected": good}


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Server:
    """entrypoint.sh with a configuration, in a session of its own."""

    def __init__(self, config: Path, model: Path, log: Path, **variables: str) -> None:
        port = engine.free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        # The longest, so that there is time to see it run.
        self.clip = max(dataset.load(ROOT / "bench/data").clips, key=lambda clip: clip.duration_s).path
        self.key = variables.get("VLLM_API_KEY")
        command = ["sh", str(ROOT / "entrypoint.sh"), "--config", str(config), "--port", str(port)]
        self.begun = time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=model, env=os.environ | variables, stdout=output, stderr=output, start_new_session=True
            )
        self.processes: list[psutil.Process] = []

    def wait_until_up(self) -> float:
        """Seconds from its start. Ends this process if it does not come up."""
        while True:
            with contextlib.suppress(requests.RequestException):
                if engine.get(f"{self.url}/health", timeout_s=2).status_code == 200:
                    break
            if self.process.poll() is not None or time.monotonic() - self.begun > engine.START_TIMEOUT_S:
                sys.exit(f"error: the server did not come up: {self.log.read_text()}")
            time.sleep(engine.POLL_S)
        self.processes = psutil.Process(self.process.pid).children(recursive=True)
        return round(time.monotonic() - self.begun, 1)

    def ask(self, key: str | None) -> int | None:
        """The status of one clip's transcription; null if the connection ended."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            answer = requests.post(
                f"{self.url}/v1/audio/transcriptions",
                files={"file": (self.clip.name, self.clip.read_bytes())},
                data={"model": "voxtral"},
                headers=headers,
                timeout=60,
            )
        except requests.RequestException:
            return None
        return answer.status_code

    def ended_while_asked(self, end: Any) -> dict[str, Any]:
        """Ask, call `end` when the request runs, and wait: the request's status, the server's, and seconds."""
        answers: list[int | None] = []
        asking = threading.Thread(target=lambda: answers.append(self.ask(self.key)))
        asking.start()
        while not prometheus.total(self.metrics(), "vllm:num_requests_running"):
            if answers:
                sys.exit(f"error: the request ended ({answers[0]}) before it was seen to run: see {self.log}")
            time.sleep(0.01)
        start = time.monotonic()
        end()
        status = self.process.wait(END_S)
        took = time.monotonic() - start
        asking.join(END_S)
        deadline = time.monotonic() + LEFT_S
        while (left := sum(map(runs, self.processes))) and time.monotonic() < deadline:
            time.sleep(0.1)
        return {"request": answers[0], "status": status, "seconds": round(took, 1), "processes_left": left}

    def metrics(self) -> str:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return requests.get(f"{self.url}/metrics", headers=headers, timeout=10).text

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def server(config: Path, model: Path, log: Path, **variables: str) -> Iterator[Server]:
    found = Server(config, model, log, **variables)
    try:
        yield found
    finally:
        found.kill()


def sigterm(model: Path, scratch: Path) -> dict[str, Any]:
    with server(CONTEST, model, scratch / "sigterm.log") as served:
        start_s, before = served.wait_until_up(), served.ask(None)
        told = served.ended_while_asked(served.process.terminate)
        good = (before, told["request"], told["status"], told["processes_left"]) == (200, 200, 0, 0)
        return {"name": "SIGTERM", "start_s": start_s, "before": before, **told, "as_expected": good}


def dead_engine(model: Path, scratch: Path) -> dict[str, Any]:
    key = secrets.token_hex(16)
    with server(FAST, model, scratch / "engine.log", VLLM_API_KEY=key) as served:
        start_s, without, before = served.wait_until_up(), served.ask(None), served.ask(key)
        engines = [process for process in served.processes if "EngineCore" in " ".join(process.cmdline())]
        told = served.ended_while_asked(engines[0].kill)
        good = (without, before) == (401, 200) and told["request"] != 200 and told["status"] not in (0, -9)
        good = good and told["processes_left"] == 0 and key not in served.log.read_text()
        return {"name": "engine killed", "start_s": start_s, "before": before, **told, "as_expected": good}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint's directory (default: one is written, 8.9 GB)")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    flags = parser.parse_args()
    if not Gpus().handles:
        sys.exit("error: no NVIDIA GPU here; tests/container has what can be tried without one")
    with tempfile.TemporaryDirectory() as scratch:
        model = flags.model or Path(scratch) / "model"
        if flags.model is None:
            model.mkdir()
            checkpoint.write(model)
        rows = []
        for name in REFUSALS:
            rows.append(refusal(name, model))
            print(rows[-1], flush=True)
        for ending in (sigterm, dead_engine):
            rows.append(ending(model, Path(scratch)))
            print(rows[-1], flush=True)
    described = environment.describe(None) | {"served_by": environment.versions(LIBRARIES)}
    command = "python -m tools.entrypoint_on_gpu"
    results.write_json(flags.out, {"command": command, "environment": described, "rows": rows})
    if not all(row["as_expected"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
