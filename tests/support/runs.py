"""Directories of runs: ones that never were, for tests of what reads them, and whether any keeps to the schemas."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from places import ROOT
from referencing import Registry, Resource

from bench import results
from bench.answers import Row

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "omicron",
    "pi",
    "rho",
    "sigma",
    "tau",
]
EPOCH = 1_800_000_000.0
SCHEMAS = {path.name: json.loads(path.read_text()) for path in (ROOT / "bench/schema").glob("*.json")}
REGISTRY: Registry[Any] = Registry().with_resources(
    (name, Resource.from_contents(schema)) for name, schema in SCHEMAS.items()
)


def make_rows(clips: int, loads: Sequence[str], mode: str = "stream", wrong: float = 0.03) -> list[Row]:
    """Each clip once at each load; a share of `wrong` words comes back as another one.

    The more in flight, the slower each is. Of a load's wall clock, every request takes its turn in `cN` lanes.
    """
    rows: list[Row] = []
    start = EPOCH
    for load in loads:
        dice = random.Random(0)  # the same clips at each load
        lanes = int(load[1:]) if load[0] == "c" else 8
        free, due = [start] * lanes, start
        for number in range(clips):
            words = [dice.choice(WORDS) for _ in range(dice.randint(3, 60))]
            heard = [dice.choice(WORDS) if dice.random() < wrong else word for word in words]
            duration_s = round(0.4 * len(words) + dice.random(), 3)
            lane = min(range(lanes), key=free.__getitem__)
            due += dice.expovariate(float(load[1:])) if load[0] == "r" else 0
            begin = max(free[lane], due) + 0.001
            took_ms = (40 + 55 * duration_s) * lanes**0.4 * dice.lognormvariate(0, 0.15)
            free[lane] = begin + took_ms / 1000
            intended = due if load[0] == "r" else begin
            latency_ms = round((free[lane] - intended) * 1000, 3)
            streams = mode in ("stream", "realtime")
            deltas = [round(latency_ms * (place + 1) / len(heard), 3) for place in range(len(heard))]
            rows.append(
                Row(
                    id=f"c{number:04}",
                    load=load,
                    duration_s=duration_s,
                    part=1,
                    due=due if load[0] == "r" else None,
                    start=begin,
                    end=free[lane],
                    latency_ms=latency_ms,
                    first_text_ms=deltas[0] if streams else None,
                    deltas_ms=deltas if streams else None,
                    words_ms=[480 + 40 * dice.random() for _ in words] if mode == "realtime" else None,
                    status=200,
                    text=" ".join(heard),
                    reference=" ".join(words),
                    error=None,
                )
            )
        start = max(free) + 5
    return rows


def fail(row: Row, error: str = "HTTP 500: made to fail", status: int | None = 500) -> Row:
    nothing: dict[str, Any] = dict.fromkeys(("latency_ms", "first_text_ms", "deltas_ms", "words_ms", "text"))
    return replace(row, **nothing, status=status, error=error)


def write_run(out: Path, rows: Sequence[Row], mode: str = "stream", **changes: Any) -> Path:
    """Write a run of these rows; `changes` go into run.json's `run`, or over its other parts by their names."""
    loads = list(dict.fromkeys(row.load for row in rows))
    record: dict[str, Any] = {
        "schema_version": 2,
        "run": {
            "url": None,
            "serve": "profiles/fast.yaml",
            "config_sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            "dir": "voxtral-realtime",
            "model": "voxtral",
            "dataset": "bench/data",
            "dataset_format": "bench",
            "manifest_sha256": "60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752",
            "api": "transcriptions",
            "mode": mode,
            "loads": loads,
            "seed": 0,
            "warmup": 2,
            "timeout_s": 600,
            "language": None,
            "prompt": None,
            "ids": list(dict.fromkeys(row.id for row in rows)),
        },
        "loads": {
            load: {
                "joules": 1000.0 + 10 * number,
                "joules_reason": None,
                "queued": number,
                "queue_threshold_s": 0.3,
                "harness_cpu_s": 0.25,
            }
            for number, load in enumerate(loads)
        },
        "environment": {
            "date_utc": "2027-01-15T08:00:00+00:00",
            "server_version": "0.32.0",
            "platform": "Linux-6.1-x86_64-with-glibc2.36",
            "python": "3.11.7",
            "cpu": "A CPU",
            "cores": 16,
            "ram_bytes": 128 * 2**30,
            "gpu": ["NVIDIA H200"],
            "gpu_driver": "570.86.15",
            "gpu_memory_bytes": [143771 * 2**20],
            "libraries": {"jiwer": "4.0.0", "numpy": "2.3.5"},
            "git_commit": "6246256337815e814f0a5c8495c28552fd3e65e4",
            "server": {
                "startup_s": 41.5,
                "patches": {"a patch": "applied"},
                "versions": {"vllm": "0.32.0"},
                "config": {"model": ".", "max_model_len": 1024},
            },
        },
        "memory": {
            "peak_bytes": 20 * 2**30,
            "end_bytes": 19 * 2**30,
            "source": "nvml_process_tree",
            "reason": None,
            "device_peak_bytes": 21 * 2**30,
            "host_rss_peak_bytes": 4 * 2**30,
            "weights_bytes": 9 * 2**30,
            "kv_cache_bytes": 8 * 2**30,
            "other_bytes": 3 * 2**30,
        },
    }
    for name, value in changes.items():
        (record if name in record else record["run"])[name] = value
    out.mkdir(parents=True, exist_ok=True)
    results.write_json(out / results.RUN, record)
    results.write(out / results.ROWS, "".join(map(results.row_line, rows)))
    return out


def valid(name: str, document: Any) -> None:
    Draft202012Validator(SCHEMAS[f"{name}.schema.json"], registry=REGISTRY).validate(document)


def is_valid(name: str, document: Any) -> bool:
    return Draft202012Validator(SCHEMAS[f"{name}.schema.json"], registry=REGISTRY).is_valid(document)


def all_valid(out: Path) -> None:
    """The files of a run, as they are on the disk."""
    for name in ("run", "summary"):
        valid(name, json.loads((out / f"{name}.json").read_text()))
    for line in (out / results.ROWS).read_text().splitlines():
        valid("requests", json.loads(line))


HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)> & "quoted" | \x1b[31m \ud800\u2028end'


class Page(HTMLParser):
    """The elements of an HTML file: (name, attributes) of each, those that are open, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] != "style":
            self.text += data

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.elements)
