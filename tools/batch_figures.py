"""RTFx of `voxtral-serve batch` beside that of online requests: the same clips, configuration and requests in flight.

    python -m tools.batch_figures --config profiles/fast.yaml --dir voxtral-realtime --out batch.json

Three parts, one after the other, each with a server of its own: online, batch, online again, so that a machine that
drifts shows it. Online is `python -m bench run` with --concurrency. Of batch, the time from the first request on
counts, because a long job starts its engines once. Options of `vllm serve` follow --. On one GPU, or on a CPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import dataset, environment
from bench.measure import engine
from tools.compare_layouts import LIBRARIES, ROOT

DATA = ROOT / "bench/data"


def online(job: argparse.Namespace, flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """The load's summary, as bench writes it, in part."""
    port = engine.free_port()
    with engine.served(job.config, job.dir, port, folder / "vllm.log", *flags):
        url, out = f"http://127.0.0.1:{port}", folder / "online"
        options = ["--samples", str(job.samples), "--concurrency", str(job.in_flight), "--out", str(out)]
        subprocess.run([sys.executable, "-m", "bench", "run", "--url", url, *options], cwd=ROOT, check=True)
    (load,) = json.loads((out / "summary.json").read_text(encoding="utf-8"))["loads"]
    return {key: load[key] for key in ("samples", "completed", "wall_s", "rtfx")}


def batch(job: argparse.Namespace, flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """The run's summary, as the command writes it, in part."""
    clips = dataset.select(dataset.load(DATA).clips, job.samples, seed=0)
    manifest, out = folder / "manifest.jsonl", folder / "batch"
    rows = [json.dumps({"id": clip.id, "audio_filepath": str(clip.path.resolve())}) for clip in clips]
    manifest.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    command = [sys.executable, "-m", "voxtral_serve.cli", "batch", str(manifest), "--out", str(out)]
    command += ["--config", str(job.config), "--dir", str(job.dir), "--in-flight", str(job.in_flight)]
    command += ["--engines", "1", "--", *flags]
    subprocess.run(command, cwd=ROOT, check=True)
    run = json.loads((out / "summary.json").read_text(encoding="utf-8"))["this_run"]
    seconds = run["wall_without_start_s"]
    return {
        "samples": len(clips),
        "completed": run["rows"] - run["failed"],
        "wall_s": seconds,
        "rtfx": run["audio_s"] / seconds,
        "wall_with_start_s": run["wall_s"],
    }


def main(arguments: Sequence[str]) -> int:
    words, mark = list(arguments), arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="python -m tools.batch_figures", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="the YAML of `vllm serve --config`")
    parser.add_argument("--dir", type=Path, required=True, help="the checkpoint's directory")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--samples", type=int, default=500, help="of the benchmark's 500 clips (default: all)")
    parser.add_argument("--in-flight", type=int, default=64, help="requests at a time (default: %(default)s)")
    job = parser.parse_args(words[:mark])
    job.config, job.dir = job.config.resolve(), job.dir.resolve()
    flags = words[mark + 1 :]
    found = []
    for kind in (online, batch, online):
        with tempfile.TemporaryDirectory() as folder:
            found.append({"kind": kind.__name__, **kind(job, flags, Path(folder))})
        print(json.dumps(found[-1]), flush=True)
    content = {
        "command": ["python", "-m", "tools.batch_figures", *arguments],
        "environment": environment.describe(None, LIBRARIES),
        "in_flight": job.in_flight,
        "parts": found,
    }
    job.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
