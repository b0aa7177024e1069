"""`make test-gpu`: the tests of a GPU, in processes that run at the same time, and the record of them.

    python tests/gpu/run.py [--out FOLDER] [--commit SHA] [--only GROUP ...]

It needs the checkout, and a Python with vLLM 0.32.0, what `voxtral-serve[gpu,bench]` installs beside it, and pytest; no
network. The package need not be installed: this program names its entry point to vLLM. Each group of tests has an
engine or servers of its own on the one GPU. Writes FOLDER/GPU-vllm-VERSION.json, and beside it the logs of each group
in which something failed, as GROUP.log.xz. Exit status 1 unless every test passed or was skipped for a reason; after
LIMIT_S, what still runs is ended and has failed.
"""

import argparse
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.gpu import tested  # noqa: E402

# What vLLM does not bring, or not in every installation
NEEDED = (
    "jiwer",
    "py3langid",
    "pynvml",
    "pytest",
    "silero_vad",
    "soundfile",
    "soxr",
    "vllm",
    "websockets",
    "whisper_normalizer",
)
LIMIT_S = 480
LIBRARIES = ("vllm", "torch", "triton", "transformers", "mistral-common", "pytest")
GROUPS = {
    "served": ("tests/gpu/test_gpu_served.py",),
    "engine": ("tests/gpu/test_gpu_engine.py",),
    "kernels": ("tests/gpu/test_gpu_kernels.py", "tests/unit/test_draft_stream.py"),
    # In float32, exactly
    "rows": ("tests/server/test_encode_once_exact.py", "tests/server/test_encode_once_scheduled.py"),
    "live": ("tests/server/test_live_engine.py",),
    "drafts": ("tests/server/test_drafter.py",),
}
ENTRY_POINT = "[vllm.general_plugins]\nvoxtral_serve = voxtral_serve.plugin:register\n"


class Group(NamedTuple):
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    results: Path


def variables(device: str, places: Path) -> dict[str, str]:
    """Of the processes of all groups. They share caches of compiled kernels and graphs, which are empty."""
    version = re.search(r'"(.*)"', (ROOT / "src/voxtral_serve/__init__.py").read_text(encoding="utf-8"))
    assert version
    (info := places / f"site/voxtral_serve-{version[1]}.dist-info").mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: voxtral-serve\nVersion: {version[1]}\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    given = os.environ.get("PYTHONPATH", "")
    paths = [str(ROOT / "src"), str(ROOT), *([given] if given else []), str(places / "site")]
    caches = {name: str(places / name.lower()) for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")}
    return {
        **os.environ,
        **caches,
        "PYTHONPATH": os.pathsep.join(paths),
        "VOXTRAL_TEST_DEVICE": device,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_WAIT_POLICY": "passive",  # the reference computes on the CPU, in several groups at once
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    }


def start(name: str, values: dict[str, str], places: Path) -> Group:
    results, log = places / f"{name}.xml", places / f"{name}.log"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
    command += ["-m", "gpu", f"--junitxml={results}", f"--basetemp={places / name}", *GROUPS[name]]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=values, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Group(name, process, log, results)


def end(group: Group) -> None:
    """All of its processes, first as Ctrl-C does, so that servers are ended by what started them."""
    for number, seconds in ((signal.SIGINT, 15), (signal.SIGKILL, 5)):
        try:
            os.killpg(group.process.pid, number)
            group.process.wait(seconds)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def results_of(group: Group, seconds: float) -> dict[str, Any]:
    """Counts, figures and reasons of a group that has ended."""
    status = group.process.returncode
    made: dict[str, Any] = {"seconds": round(seconds, 1), "status": status, "figures": {}, "skipped": {}, "failed": {}}
    counts: Counter[str] = Counter(passed=0, failed=0, skipped=0)
    cases = ElementTree.parse(group.results).iter("testcase") if group.results.exists() else ()
    for case in cases:
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        made["figures"] |= {each.get("name"): each.get("value") for each in case.iter("property")}
        bad, skipped = [*case.iter("failure"), *case.iter("error")], case.find("skipped")
        if bad:
            made["failed"][name] = (bad[0].get("message") or "")[:300]
        elif skipped is not None:
            made["skipped"][name] = skipped.get("message")
        counts["failed" if bad else "passed" if skipped is None else "skipped"] += 1
    if status not in (0, 1) or not counts.total():
        counts["failed"] += 1
        made["failed"][group.name] = f"pytest ended with {status}, 0 or 1 expected"
    return {"counts": dict(counts), **made}


def watch(groups: list[Group], began: float) -> dict[str, dict[str, Any]]:
    """The results of all groups, once they have ended or LIMIT_S is over."""
    done: dict[str, dict[str, Any]] = {}
    while len(done) < len(groups):
        late = time.monotonic() - began > LIMIT_S
        for group in groups:
            if group.name not in done and (late or group.process.poll() is not None):
                if group.process.poll() is None:
                    end(group)
                done[group.name] = made = results_of(group, time.monotonic() - began)
                if late and made["status"] not in (0, 1):
                    made["failed"][group.name] = f"not done after {LIMIT_S} s"
                print(f"{group.name:8} {made['seconds']:6.1f} s  {made['counts']}", flush=True)
                for name, why in made["failed"].items():
                    print(f"    FAILED {name}: {why.splitlines()[0] if why else ''}", flush=True)
        time.sleep(0.5)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / tested.FOLDER, help=f"default: {tested.FOLDER}")
    parser.add_argument("--commit", help="of a checkout without git")
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="these groups, and no record")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: as far as it goes, no record")
    given = parser.parse_args()
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(
            f"error: {sys.executable} has no {', '.join(missing)}: expected pytest and voxtral-serve[gpu,bench]",
            file=sys.stderr,
        )
        return 2
    from bench import environment

    described = environment.describe(None, LIBRARIES)
    if given.device == "cuda" and not described["gpu"]:
        print("error: NVML finds no GPU: expected one, or --device cpu", file=sys.stderr)
        return 2
    commit = given.commit or described["git_commit"]
    if commit is None:
        print("error: this is no checkout of git: expected --commit SHA", file=sys.stderr)
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="test-gpu-") as name:
        places = Path(name)
        values = variables(given.device, places)
        groups = [start(each, values, places) for each in given.only or GROUPS]
        try:
            done = watch(groups, began)
        finally:
            for group in groups:
                if group.process.poll() is None:
                    end(group)
        failed = any(made["counts"]["failed"] for made in done.values())
        given.out.mkdir(parents=True, exist_ok=True)
        for group in groups:
            if done[group.name]["counts"]["failed"]:
                logs = [group.log, *sorted((places / group.name).rglob("*.log"))]  # its own, and its servers'
                content = b"".join(b"==> %s\n%s" % (log.name.encode(), log.read_bytes()) for log in logs)
                (given.out / f"{group.name}.log.xz").write_bytes(lzma.compress(content))
    counts = sum((Counter(made["counts"]) for made in done.values()), Counter(passed=0, failed=0, skipped=0))
    record = {
        "schema_version": 1,
        "date_utc": described["date_utc"],
        "commit": commit,
        "engine_sha256": tested.engine_hash(ROOT),
        "gpu": described["gpu"] and described["gpu"][0],
        "gpu_driver": described["gpu_driver"],
        "python": described["python"],
        "versions": described["libraries"],
        "seconds": round(time.monotonic() - began, 1),
        "counts": {name: counts[name] for name in ("passed", "failed", "skipped")},
        "groups": done,
    }
    print(f"{record['seconds']} s, {record['counts']}")
    if given.device == "cuda" and not given.only:
        slug = re.sub(r"\W+", "-", record["gpu"].lower()).strip("-")
        file = given.out / f"{slug}-vllm-{record['versions']['vllm']}.json"
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"written: {file}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
