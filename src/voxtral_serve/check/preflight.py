"""Check whether `vllm serve` would start with a config and a checkpoint, without starting an engine.

vLLM's own parser reads the options, vLLM makes its engine's config of them and computes the KV cache, and
mistral-common computes the padding of clips. The results are therefore those of the installed versions. Only the
headers of the weight files are read.
"""

from collections.abc import Sequence
from pathlib import Path

from voxtral_serve import shims
from voxtral_serve.check.clip import check_clip
from voxtral_serve.check.device import Device
from voxtral_serve.check.gate import check_gate
from voxtral_serve.check.installation import check_patches, check_plugin, check_versions
from voxtral_serve.check.live import check_live
from voxtral_serve.check.memory import check_memory, check_memory_of_other
from voxtral_serve.check.model_directory import check_model
from voxtral_serve.check.options import ServeOptions, is_option, read_options
from voxtral_serve.check.parallel import check_parallel
from voxtral_serve.check.plan import Plan
from voxtral_serve.check.profiles import fitting
from voxtral_serve.check.report import ConfigError, Report
from voxtral_serve.check.synthesis import OMNI, check_memory_of_speech, check_omni, check_stages, stage_overrides
from voxtral_serve.checkpoint import HUGGING_FACE, Checkpoint, OtherModel, Synthesis
from voxtral_serve.engine.names import ENCODE_ONCE


def check_all(
    config: Path | None,
    model: Path | None,
    words: Sequence[str] = (),
    gate: bool = False,
    device: Device | None = None,
) -> Report:
    """Check the installation, `config` (a YAML for `vllm serve --config`; None for vLLM's defaults) and a checkpoint.

    `words` are further arguments of `vllm serve`, which override the config. `model` defaults to the model in `words`,
    then to that of the config, then to the current directory. `gate` also checks that the port is free, and that an API
    key is set or explicitly switched off. `device` is a GPU to compute memory for in place of this machine's.
    """
    report = Report()
    check_versions(report)
    vllm = shims.installed("vllm") is not None
    if vllm:
        check_patches(report)
    if OMNI in words:
        check_omni(report)
    absent = check_plugin(report)
    options = read_options(report, config, words, device) if vllm else None
    if options:
        check_parallel(report, options, gate)
    if gate and options:
        check_gate(report, options.values)
    if options is None and model is None and words and not is_option(words[0]):
        model = Path(words[0])
    held = check_model(report, options, model)
    if OMNI in words and held is not None and not isinstance(held, Synthesis):
        report.problem(f"{OMNI} is for Voxtral TTS and VoxCPM2, and this is another model: remove {OMNI}")
    elif OMNI not in words and isinstance(held, Synthesis):
        report.problem(f"{held.NAME} is served by vLLM-Omni: add {OMNI} to the command line")
    elif options and isinstance(held, Synthesis):
        check_stages(report, stage_overrides(options.values), held.STAGES)
    encode_once = options is not None and options.encode_once
    if absent and (encode_once or (isinstance(held, Checkpoint) and held.layout == HUGGING_FACE)):
        report.problem(f"vLLM does not load the plugin for {ENCODE_ONCE if encode_once else 'this layout'}: {absent}")
    _check_memory_and_clip(report, options, held)
    return report


def _check_memory_and_clip(
    report: Report, options: ServeOptions | None, held: Checkpoint | OtherModel | Synthesis | None
) -> None:
    right = {"config": options is not None and options.valid, "checkpoint": held is not None}
    missing = " and ".join(name for name in right if not right[name])
    report.section("memory")
    plan = None
    if options and isinstance(held, Synthesis) and not missing:
        check_memory_of_speech(report, held, stage_overrides(options.values))
        return
    if options and isinstance(held, OtherModel) and not missing:
        check_memory_of_other(report, options.values, held)
        return
    if options and isinstance(held, Checkpoint) and options.values.hf_overrides and not options.encode_once:
        report.row("not computed", f"hf_overrides may select another model, and this check knows {ENCODE_ONCE} only")
        return
    if isinstance(held, Checkpoint) and "checkpoint" in report.sections:
        missing = "formats"  # vLLM would report them again
    if options and isinstance(held, Checkpoint) and not missing:
        try:
            plan = Plan.of(options.values, held)
        except ConfigError as error:
            missing = "config"
            report.problem(f"config: {error}")
        else:
            check_memory(report, options, held, plan, lambda: fitting(held, options.device))
    else:
        report.row("not computed", f"the {missing} must be valid first")
    report.section("longest clip")
    if isinstance(held, Checkpoint) and plan:
        check_clip(report, held, plan.clip_positions, plan.upload_delay_ms)
    else:
        report.row("not computed", f"the {missing} must be valid first")
    if options and isinstance(held, Checkpoint) and plan:
        check_live(report, options, held, plan)
