"""Measure Voxtral TTS on a GPU, full size, random weights: eager and CUDA graphs, with 1, 16 and 32 requests in flight.

python -m tools.speech_rows --out results/speech-gpu --dir /tmp/voxtral-tts

Run it in the environment that serves (vLLM and its vllm-omni, and voxtral-serve[bench]). It first tests that their
imports work and that there is a GPU. Then it writes the checkpoint, unless DIR has one, and starts one server after the
other with profiles/voxtral-tts.yaml. `python -m bench speech` measures each, and the table at the end has the form of
the published one: latency to the first audio, RTF, characters per second, wait rate.

Every speech has the same length: random weights would end when they like, so the end is ignored and the number of
frames is fixed. Speed does not depend on the values; nothing is said of what is heard, which is noise.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from bench import BenchError, serve
from tools import speech_checkpoint

ROOT = Path(__file__).parent.parent
PROFILE = ROOT / "profiles/voxtral-tts.yaml"
# What vllm-omni imports for this model, and what measures
MODULES = ("vllm", "vllm_omni.entrypoints.cli.serve", "vllm_omni.model_executor.models.voxtral_tts.voxtral_tts")
MODES = {"eager": True, "graphs": False}  # enforce_eager of stage 0
FRAMES_PER_S = 12.5
DEPLOY = "deploy/voxtral_tts.yaml"  # of vllm-omni


def check_machine() -> str:
    """The GPU's name. Raises BenchError if an import fails, the versions differ or there is no GPU."""
    for name in MODULES:
        try:
            import_module(name)
        except ImportError as error:
            raise BenchError(f"{name} cannot be imported: {error}. Install vllm-omni beside its vLLM") from error
    found = {name: version(name).split(".")[:2] for name in ("vllm", "vllm-omni")}
    if found["vllm"] != found["vllm-omni"]:
        raise BenchError(f"vllm {version('vllm')} and vllm-omni {version('vllm-omni')}: expected one minor version")
    import torch

    if not torch.cuda.is_available():
        raise BenchError("PyTorch finds no GPU: this measures one")
    return str(torch.cuda.get_device_name())


def overrides(eager: bool) -> dict[str, Any]:
    """`stage_overrides` of the profile."""
    stages: dict[str, Any] = yaml.safe_load(PROFILE.read_text(encoding="utf-8"))["stage_overrides"]
    stages["0"]["enforce_eager"] = eager
    return stages


def write_deploy(path: Path, seconds: float) -> None:
    """Write a deploy file: that of vllm-omni, with a fixed length of speech in stage 0.

    vllm-omni 0.32.0rc1 drops `default_sampling_params` in `stage_overrides`.
    """
    import vllm_omni

    base = Path(vllm_omni.__file__).parent / DEPLOY
    first = yaml.safe_load(base.read_text(encoding="utf-8"))["stages"][0]
    length = {"max_tokens": round(seconds * FRAMES_PER_S), "ignore_eos": True}
    sampling = first["default_sampling_params"] | length
    stage = {"stage_id": first["stage_id"], "default_sampling_params": sampling}
    path.write_text(yaml.safe_dump({"base_config": str(base), "stages": [stage]}), encoding="utf-8")


def measure(mode: str, given: argparse.Namespace) -> dict[str, Any]:
    """Serve in one mode, measure all loads; the content of summary.json."""
    out = given.out / mode
    port = serve.free_port()
    deploy = given.out.resolve() / "deploy.yaml"
    write_deploy(deploy, given.seconds)
    flags = ("--omni", "--deploy-config", str(deploy), "--stage-overrides", json.dumps(overrides(MODES[mode])))
    log = given.out / f"{mode}.log"
    command = (str(Path(sys.executable).with_name("vllm")),)
    with serve.server(PROFILE, given.dir, port, log, *flags, command=command, model="."):
        arguments = ["--url", f"http://127.0.0.1:{port}", "--out", str(out), "--random-weights", "--voice", given.voice]
        arguments += ["--characters", str(given.characters), "--samples", str(given.samples)]
        arguments += ["--concurrency", given.concurrency, "--timeout", "600"]
        subprocess.run([sys.executable, "-m", "bench", "speech", *arguments], cwd=ROOT, check=True)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


def table(rows: dict[str, dict[str, Any]]) -> str:
    """In the form of the published tables."""
    lines = [
        "| configuration | in flight | latency P50 | RTF P50 | characters/s | wait rate |",
        "|---|---|---|---|---|---|",
    ]
    for mode, summary in rows.items():
        for load in summary["loads"]:
            first, rtf, waits = load["first_audio_ms"], load["rtf"], load["wait_rate"]
            cells = (
                "not measured" if first is None else f"{first['p50']:.0f} ms",
                "not measured" if rtf is None else f"{rtf['p50']:.3f}",
                "not measured" if load["characters_per_s"] is None else f"{load['characters_per_s']:.1f}",
                "not measured" if waits is None else f"{waits:.0%}",
            )
            lines.append(f"| {mode} | {load['concurrency']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the results; it must not exist")
    add("--dir", type=Path, required=True, help="folder of the checkpoint, which is written if it is empty (8 GB)")
    add("--modes", default=",".join(MODES), help="of %(default)s")
    add("--concurrency", default="1,16,32")
    add("--samples", type=int, default=96, help="texts for each load (default: %(default)s)")
    add("--characters", type=int, default=500, help="of each text (default: %(default)s, as published)")
    add(
        "--seconds",
        type=float,
        default=37,
        help="of each speech (default: %(default)s, as the published figures imply)",
    )
    add("--voice", default="casual_male")
    given = parser.parse_args()
    try:
        modes = given.modes.split(",")
        if unknown := set(modes) - set(MODES):
            raise BenchError(f"--modes has {min(unknown)}: expected of {', '.join(MODES)}")
        print(f"{check_machine()}, vllm {version('vllm')}, vllm-omni {version('vllm-omni')}")
        if not (given.dir / "params.json").is_file():
            with contextlib.suppress(FileNotFoundError):
                if (free := shutil.disk_usage(given.dir.parent).free) < 9 * 2**30:
                    raise BenchError(f"{given.dir.parent} has {free >> 30} GiB free: expected 9 for the checkpoint")
            speech_checkpoint.write(given.dir)
        given.out.mkdir(parents=True)
        print(table({mode: measure(mode, given) for mode in modes}))
    except BenchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
