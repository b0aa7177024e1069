"""Measure Voxtral TTS on a GPU, full size, random weights: eager and CUDA graphs, with 1, 16 and 32 requests in flight.

python -m tools.speech_rows --out results/speech-gpu.json --logs results/speech-gpu --dir /tmp/voxtral-tts

Run it in the environment that serves (vLLM and its vllm-omni, and voxtral-serve[bench]). It first tests that their
imports work and that there is a GPU. Then it writes the checkpoint, unless DIR has one, and starts one server after the
other with profiles/voxtral-tts.yaml. `python -m bench speech` measures each load after the other, each with twice as
many texts as requests in flight, eight at least. The file is written after each load. The table at the end has the form
of the published one: latency to the first audio, RTF, characters per second, wait rate.

Every speech has the same length: random weights would end when they like, so the end is ignored and the number of
frames is fixed. Speed does not depend on the values; nothing is said of what is heard, which is noise.
"""

import argparse
import contextlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from bench import BenchError, environment, results
from bench.measure import engine
from tools import speech_checkpoint

ROOT = Path(__file__).parent.parent
PROFILE = ROOT / "profiles/voxtral-tts.yaml"
# What vllm-omni imports for this model, and what measures
MODULES = ("vllm", "vllm_omni.entrypoints.cli.serve", "vllm_omni.model_executor.models.voxtral_tts.voxtral_tts")
MODES = {"eager": True, "graphs": False}  # enforce_eager of stage 0
FRAMES_PER_S = 12.5
LEAST_TEXTS = 8  # of a load
LIBRARIES = ("vllm", "vllm-omni", "torch", "transformers", "mistral-common", "nvidia-ml-py")
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


def describe(given: argparse.Namespace) -> dict[str, Any]:
    """The description of this run for the file: machine, versions, settings."""
    return {
        **environment.describe(None, LIBRARIES),
        "command": "python -m tools.speech_rows",
        "profile": PROFILE.read_text(encoding="utf-8"),
        "seconds_each": given.seconds,
        "characters_each": given.characters,
        "voice": given.voice,
        "note": "The weights are random: the audio is noise of a fixed length. Speed does not depend on the values.",
    }


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


def measure(mode: str, given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Serve in one mode, measure all loads, and write the file after each."""
    port = engine.free_port()
    deploy = given.logs.resolve() / "deploy.yaml"
    write_deploy(deploy, given.seconds)
    flags = ("--omni", "--deploy-config", str(deploy), "--stage-overrides", json.dumps(overrides(MODES[mode])))
    log = given.logs / f"{mode}.log"
    command = (
        (str(Path(sys.executable).with_name("vllm")),) if given.command is None else tuple(shlex.split(given.command))
    )
    with engine.served(PROFILE, given.dir, port, log, *flags, command=command, model="."):
        for load in map(int, given.concurrency.split(",")):
            out = given.logs / f"{mode}-{load}"
            arguments = ["--url", f"http://127.0.0.1:{port}", "--out", str(out), "--random-weights"]
            arguments += ["--voice", given.voice, "--characters", str(given.characters), "--concurrency", str(load)]
            arguments += ["--samples", str(max(LEAST_TEXTS, 2 * load)), "--timeout", "600"]
            subprocess.run([sys.executable, "-m", "bench", "speech", *arguments], cwd=ROOT, check=True)
            summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
            found["rows"] += [{"mode": mode, **each} for each in summary["loads"]]
            results.write_json(given.out, found)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """In the form of the published tables. `rows` are loads of `bench speech` with their mode."""
    lines = [
        "| configuration | in flight | latency P50 | RTF P50 | characters/s | wait rate |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        first, rtf, waits = row["first_audio_ms"], row["rtf"], row["wait_rate"]
        cells = (
            "not measured" if first is None else f"{first['p50']:.0f} ms",
            "not measured" if rtf is None else f"{rtf['p50']:.3f}",
            "not measured" if row["characters_per_s"] is None else f"{row['characters_per_s']:.1f}",
            "not measured" if waits is None else f"{waits:.0%}",
        )
        lines.append(f"| {row['mode']} | {row['concurrency']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="JSON file to write")
    add("--logs", type=Path, required=True, metavar="DIR", help="folder of the logs and requests; it must not exist")
    add("--dir", type=Path, required=True, help="folder of the checkpoint, which is written if it is empty (8 GB)")
    add("--modes", default=",".join(MODES), help="of %(default)s")
    add("--concurrency", default="1,16,32")
    add("--command", help="command to run as `vllm` (default: the one beside this Python)")
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
        try:
            given.logs.mkdir(parents=True)
        except FileExistsError as error:
            raise BenchError(f"--logs {given.logs} exists: expected the name of a new folder") from error
        given.out.parent.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {"schema_version": 1, "run": describe(given), "rows": []}
        if not (given.dir / "params.json").is_file():
            with contextlib.suppress(FileNotFoundError):
                if (free := shutil.disk_usage(given.dir.parent).free) < 9 * 2**30:
                    raise BenchError(f"{given.dir.parent} has {free >> 30} GiB free: expected 9 for the checkpoint")
            speech_checkpoint.write(given.dir)
        for mode in modes:
            measure(mode, given, found)
        print(table(found["rows"]))
    except BenchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
