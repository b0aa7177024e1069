"""The check of the checkpoint directory."""

import os
import re
from math import prod
from pathlib import Path

from voxtral_serve import checkpoint
from voxtral_serve.check.options import ServeOptions
from voxtral_serve.check.report import Report, size
from voxtral_serve.check.synthesis import report_speech
from voxtral_serve.check.voxcpm2 import report_voxcpm2
from voxtral_serve.checkpoint import (
    Checkpoint,
    CheckpointError,
    OtherModel,
    SpeechCheckpoint,
    Synthesis,
    VoxCPM2Checkpoint,
)


def check_model(
    report: Report, options: ServeOptions | None, model: Path | None
) -> Checkpoint | OtherModel | Synthesis | None:
    """Read the directory `model`; if it is None, the options' model, else the current directory.

    Returns None if it cannot be read.
    """
    report.section("checkpoint")
    if model is None:
        model = _named_model(options)
    try:
        directory, there = model.resolve(), model.is_dir()
    except PermissionError as error:
        report.problem(str(checkpoint.unreadable(Path(os.path.abspath(model)), error)))
        return None
    report.row("directory", str(directory))
    if not there and os.environ.get("HF_HUB_OFFLINE") == "0" and re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)):
        report.row("not checked", f"HF_HUB_OFFLINE=0: vLLM downloads {model} when it starts")
        return None
    if not there:
        report.problem(
            f"{model} is not a local directory, and check reads local checkpoints only. Download it "
            "(`hf download NAME --local-dir DIR`), and pass DIR"
        )
        return None
    try:
        speech = checkpoint.read_speech(directory) or checkpoint.read_voxcpm2(directory)
        held = speech or checkpoint.other_model(directory) or checkpoint.read(directory)
    except CheckpointError as error:
        report.problem(str(error))
        return None
    if isinstance(held, SpeechCheckpoint):
        report_speech(report, held)
        return held
    if isinstance(held, VoxCPM2Checkpoint):
        report_voxcpm2(report, held)
        return held
    if isinstance(held, OtherModel):
        report.row("model", f"{held.model}: its files are complete; vLLM checks the rest when it starts")
        return held
    _report_tensors(report, held)
    if options:
        _check_formats(report, options, held)
    return held


def _named_model(options: ServeOptions | None) -> Path:
    if options is None:
        return Path()
    model = options.values.model if "model" in options.named else None
    return Path(options.values.model_tag or model or ".")


def _report_tensors(report: Report, held: Checkpoint) -> None:
    dtypes = sorted({tensor.dtype for tensor in held.tensors.values()})
    report.row("layout", held.layout)
    report.row(
        "tensors",
        f"{len(held.tensors):,}, {size(held.weight_bytes)}, {parameters(held):,} parameters, {', '.join(dtypes)}",
    )
    if held.unused:
        report.row(
            "unused", f"{', '.join(path.name for path in held.unused)}: files of the other layout, of the same model"
        )


def _check_formats(report: Report, options: ServeOptions, held: Checkpoint) -> None:
    values = options.values
    for name in ("config_format", "load_format"):
        if held.layout == checkpoint.HUGGING_FACE and getattr(values, name) == "mistral":
            report.problem(f"{name} is 'mistral', but the checkpoint has Hugging Face's layout: remove {name}")
    if values.config_format == "hf" and not (held.directory / "config.json").is_file():
        report.problem("config_format is 'hf', but the checkpoint has no config.json: remove config_format")
    if values.tokenizer_mode not in ("auto", "mistral"):
        report.problem(f"tokenizer_mode is {values.tokenizer_mode!r}: Voxtral Realtime needs 'mistral' or 'auto'")


def parameters(held: Checkpoint) -> int:
    """Number of parameters that vLLM loads: without the second copy of tied embeddings."""
    total = 0
    for name, tensor in held.tensors.items():
        if name == "output.weight" and held.params.get("tied_embeddings"):
            continue
        total += prod(tensor.shape)
    return total
