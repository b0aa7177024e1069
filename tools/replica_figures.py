"""Are two servers behind nginx as fast as two servers? Measures one replica, all replicas behind nginx, and vLLM's own
data parallel, on the GPUs of one host.

    python -m tools.replica_figures --gpus 0,1 --out results/replicas.json

All servers are resident, one on each GPU. A turn sends clips with --in-flight requests in flight to the first server,
or that many for each server to nginx. Each round goes one, all, all, one, so that a drift of the machine falls on both
alike. A ratio is the geometric mean over the pairs, with the lowest and the highest. Afterwards one server with
`--data-parallel-size` is measured with the same requests. Needs nginx. Without --model, weights are random and of full
size. Options of vLLM follow `--`. Exit status 1 if a request failed, 2 if a server did not start.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from bench import BenchError, dataset, environment, results
from bench.answers import Row
from bench.client import Client
from bench.dataset import Clip
from bench.gpu import checkpoint, rows, servers
from bench.gpu.run import LIBRARIES
from bench.gpu.tasks import SEED, decode
from bench.measure import engine
from tools import local_nginx
from tools.compare_trees import over_pairs

ONE, ALL, PARALLEL = "one replica", "replicas behind nginx", "data parallel"
ORDER = (ONE, ALL, ALL, ONE)
RATIOS = ("rtfx", "p50_ms", "p95_ms")


def send(url: str, clips: Sequence[Clip], in_flight: int) -> list[Row]:
    """The answers to the clips, `in_flight` at a time. Random weights end no text, so each has its clip's length."""
    client = Client(url, timeout_s=600)
    client.model = client.get("/v1/models")["data"][0]["id"]
    with ThreadPoolExecutor(in_flight) as pool:
        return list(
            pool.map(
                lambda clip: client.transcribe(clip, part=1, max_completion_tokens=str(clip.extra["tokens"])), clips
            )
        )


def ratios(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All replicas over one, for each figure in RATIOS."""
    one, every = ([row for row in measured if row["name"] == name] for name in (ONE, ALL))
    return {
        figure: over_pairs([(before[figure], after[figure]) for before, after in zip(one, every, strict=True)])
        for figure in RATIOS
    }


def parallel(config: Path, engines: int) -> tuple[str, ...]:
    """Options of vLLM's data parallel, which has no live sessions with the encode-once model."""
    own = yaml.safe_load(config.read_text(encoding="utf-8")).get("additional_config", {})
    own.pop("max_live_sessions", None)
    return "--data-parallel-size", str(engines), "--additional-config", json.dumps(own)


class Figures:
    """Sends each turn its clips and keeps its row."""

    def __init__(self, clips: Sequence[Clip]) -> None:
        self.clips = clips
        self.rows: list[dict[str, Any]] = []

    def turn(self, name: str, url: str, in_flight: int, count: int) -> None:
        """Measure one turn. Its clips are the first `count`, from the beginning again where that is more than all."""
        clips = list(itertools.islice(itertools.cycle(self.clips), count))
        answers = send(url, clips, in_flight)
        lengths = {clip.id: clip.extra["tokens"] for clip in clips}
        row = {"name": name, "in_flight": in_flight, **rows.figures(answers, lengths, None, None)}
        del row["joules_per_audio_second"]
        self.rows.append(row)
        print(json.dumps({key: row[key] for key in ("name", "in_flight", "failed", *RATIOS)}), file=sys.stderr)


def measure(flags: argparse.Namespace, model: Path, scratch: Path) -> dict[str, Any]:
    """Serve and measure. Raises BenchError where a server does not start."""
    gpus = flags.gpus.split(",")
    every = dataset.load(rows.ROOT / "bench/data").clips
    chosen = random.Random(SEED).sample(every, min(len(every), flags.clips * len(gpus)))
    figures = Figures([decode(clip, scratch, ()) for clip in chosen])
    own = servers.variables()

    def start(up: contextlib.ExitStack, visible: str, name: str, *options: str) -> engine.Engine:
        port, log = engine.free_port(), scratch / f"{name}.log"
        variables = own | {"CUDA_VISIBLE_DEVICES": visible}
        if "VLLM_CACHE_ROOT" not in os.environ:  # one that is given should hold the compiled model already
            variables["VLLM_CACHE_ROOT"] = str(scratch / "cache" / name)
        return up.enter_context(
            engine.served(flags.config, model, port, log, *flags.options, *options, environment=variables, wait=False)
        )

    def turn(name: str, url: str) -> None:
        many = 1 if name == ONE else len(gpus)
        figures.turn(name, url, flags.in_flight * many, flags.clips * many)

    with contextlib.ExitStack() as up:
        started = [start(up, gpu, f"replica-{number}") for number, gpu in enumerate(gpus)]
        for server in started:
            server.wait_until_up(show=False)
        urls = [server.url for server in started]
        version = engine.get(f"{urls[0]}/version", timeout_s=10).json()["version"]
        ports = [int(url.rpartition(":")[2]) for url in urls]
        proxy = up.enter_context(local_nginx.Proxy(scratch, ports))
        for url in urls:
            send(url, figures.clips[: flags.in_flight], flags.in_flight)  # warm-up
        for name in ORDER * flags.rounds:
            turn(name, urls[0] if name == ONE else proxy.url)
    outcome = {
        **environment.describe(version, LIBRARIES),
        "schema_version": 1,
        "config": flags.config.read_text(encoding="utf-8"),
        "options": flags.options,
        "replicas": len(gpus),
        "ratios": ratios(figures.rows),
    }
    if flags.data_parallel:
        with contextlib.ExitStack() as up:
            server = start(up, flags.gpus, "data-parallel", *parallel(flags.config, len(gpus)))
            server.wait_until_up(show=False)
            send(server.url, figures.clips[: flags.in_flight * len(gpus)], flags.in_flight * len(gpus))
            for _ in range(2 * flags.rounds):
                turn(PARALLEL, server.url)
    return outcome | {"rows": figures.rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of this process) and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.replica_figures", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--gpus", required=True, metavar="0,1", help="a replica on each, as CUDA_VISIBLE_DEVICES has them"
    )
    parser.add_argument("--config", type=Path, default=rows.ROOT / "profiles/fast.yaml", help="profile of all servers")
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint (default: random weights of full size)")
    parser.add_argument(
        "--in-flight", type=int, default=64, metavar="N", help="for each replica (default: %(default)s)"
    )
    parser.add_argument(
        "--clips", type=int, default=256, metavar="N", help="of a turn, for each replica (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--no-data-parallel", dest="data_parallel", action="store_false", help="leave that out")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="of vllm serve, after --")
    words = list(sys.argv[1:] if arguments is None else arguments)
    flags = parser.parse_args(words)
    if local_nginx.NGINX is None:
        parser.error(f"nginx is not installed: `{local_nginx.COMMAND}` installs it")
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        model = flags.model
        if model is None:
            checkpoint.write(model := scratch / "checkpoint")
        try:
            outcome = measure(flags, model, scratch)
        except BenchError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    outcome["command"] = shlex.join(["python", "-m", "tools.replica_figures", *words])
    results.write_json(flags.out, outcome)
    print(json.dumps(outcome["ratios"], indent=1))
    return int(any(row["failed"] for row in outcome["rows"]))


if __name__ == "__main__":
    sys.exit(main())
