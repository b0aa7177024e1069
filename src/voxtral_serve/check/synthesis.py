"""Voxtral TTS and VoxCPM2, which vLLM-Omni serves: its version, its options, and the checkpoint."""

import difflib
import json
from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from voxtral_serve import shims
from voxtral_serve.check.device import first_device
from voxtral_serve.check.report import ConfigError, Report, size
from voxtral_serve.checkpoint import SpeechCheckpoint, Synthesis

OMNI = "--omni"
LIBRARY = "vllm-omni"
SERVED = "0.32.0rc1"  # the tests serve with it
READ = "0.20.0"  # its source was read
DROPPED = ("default_sampling_params",)  # of stage_overrides; 0.32.0rc1's resolve_omni_config keeps the deploy file's
REFUSED = {"0.24": "it does not serve Voxtral TTS (vllm-omni issue 4954)"}


def check_omni(report: Report) -> None:
    """The version of vllm-omni, which has to be that of vLLM."""
    report.section("vllm-omni")
    try:
        installed = version(LIBRARY)
    except PackageNotFoundError:
        report.problem(f"{LIBRARY} is not installed, and {OMNI} needs it: pip install 'vllm-omni=={SERVED}'")
        return
    minor, of_vllm = (".".join(number.split(".")[:2]) for number in (installed, shims.installed("vllm") or ""))
    if minor in REFUSED:
        report.problem(f"{LIBRARY} {installed}: {REFUSED[minor]}. Install {READ} or {SERVED}, each beside its vLLM")
    elif minor != of_vllm:
        report.problem(
            f"{LIBRARY} {installed} is for vLLM {minor}, and vLLM {shims.installed('vllm')} is installed: install the "
            f"{LIBRARY} of vLLM {of_vllm}"
        )
    else:
        untested = "" if installed in (SERVED, READ) else f"  not tested; tested: {SERVED}"
        report.row(LIBRARY, installed + untested)


def make_parser(base: type) -> Any:
    """The parser of `vllm serve --omni`. `base` is the class of parser to make."""
    from vllm_omni.entrypoints.cli.serve import OmniServeCommand

    return OmniServeCommand().subparser_init(base().add_subparsers())


def stage_overrides(values: Namespace) -> dict[str, dict[str, Any]]:
    """The options of each stage, by its number. vllm-omni 0.20.0's parser leaves them as JSON."""
    overrides: Any = getattr(values, "stage_overrides", None) or {}
    by_stage: dict[str, dict[str, Any]] = json.loads(overrides) if isinstance(overrides, str) else overrides
    return by_stage


def check_stages(report: Report, overrides: dict[str, dict[str, Any]], stages: Sequence[str]) -> None:
    """`stage_overrides`: vLLM-Omni drops stages that the model has not, DROPPED, and with a warning unknown options."""
    from dataclasses import fields

    from vllm_omni.config.stage_config import StageDeployConfig
    from vllm_omni.engine.arg_utils import OmniEngineArgs

    known = {field.name for kind in (StageDeployConfig, OmniEngineArgs) for field in fields(kind)}
    for stage, options in overrides.items():
        if stage not in stages:
            report.problem(f"stage_overrides has stage {stage!r}: expected {' or '.join(stages)}")
            continue
        for name in options:
            if name in DROPPED:
                report.problem(
                    f"stage_overrides: stage {stage}: {LIBRARY} drops {name} here: set it in a copy of its deploy "
                    "file, with --deploy-config"
                )
            elif name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                report.problem(f"stage_overrides: stage {stage}: {name} is not an option of {LIBRARY}{hint}")


def report_speech(report: Report, held: SpeechCheckpoint) -> None:
    """The rows of a checkpoint of Voxtral TTS."""
    dtypes = sorted({tensor.dtype for tensor in held.tensors.values()})
    report.row("model", held.NAME)
    report.row(
        "tensors",
        f"{len(held.tensors):,}, {size(held.weight_bytes)}, {held.parameters:,} parameters, {', '.join(dtypes)}",
    )
    least, most = min(held.voices.values()), max(held.voices.values())
    report.row("voices", f"{len(held.voices)}, of {least} to {most} audio tokens: {', '.join(sorted(held.voices))}")


def check_memory_of_speech(report: Report, held: Synthesis, overrides: dict[str, dict[str, Any]]) -> None:
    """Compare the weights with the share of the device that stage 0 gets."""
    from vllm.platforms import current_platform

    report.row("weights", f"{size(held.weight_bytes)} (as stored); this check computes nothing else for this model")
    try:
        device = first_device(current_platform)
    except ConfigError as error:
        report.problem(str(error))
        return
    report.row("device", f"{device.name}: {size(device.total)} in total, {size(device.free)} free")
    part = overrides.get("0", {}).get("gpu_memory_utilization")
    if part is None or current_platform.is_cpu():
        return
    if held.weight_bytes > int(device.total * part):
        report.problem(
            f"the weights take {size(held.weight_bytes)}, but gpu_memory_utilization {part} of stage 0 and "
            f"{device.name} is only {size(int(device.total * part))}: use a larger GPU"
        )
