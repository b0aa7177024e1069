"""Live sessions of the encode-once model: how many, and how long one request of a session is."""

from voxtral_serve.check.clip import audio_config
from voxtral_serve.check.options import ServeOptions
from voxtral_serve.check.plan import Plan
from voxtral_serve.check.report import Report
from voxtral_serve.checkpoint import Checkpoint, CheckpointError
from voxtral_serve.engine.names import ENCODE_ONCE
from voxtral_serve.engine.session import OPTION, ROLL_OVER, SessionShape, least_positions


def check_live(report: Report, options: ServeOptions, held: Checkpoint, plan: Plan) -> None:
    """Report what `additional_config` says of live sessions. Nothing for a model that has none."""
    sessions = (options.values.additional_config or {}).get(OPTION)
    if not options.encode_once:
        if sessions:
            report.section("live audio")
            report.problem(f"additional_config: {OPTION} is {sessions!r}, and only {ENCODE_ONCE} reads it")
        return
    report.section("live audio")
    if not sessions:
        report.row("sessions", f"none: `additional_config: {{{OPTION}: N}}` serves N at a time on /v1/realtime")
        return
    try:
        shape = SessionShape.of(audio_config(held.tekken))
    except CheckpointError:  # told under the longest clip
        return
    length, least = plan.max_model_len, least_positions(shape)
    report.row("sessions", f"{sessions:,} at a time ({OPTION}); others are refused")
    if length < least:
        report.problem(f"max_model_len is {length}, and live sessions need at least {least}: raise it")
    else:
        seconds = (length - shape.left - shape.right) * shape.samples / shape.rate_hz
        report.row(
            "one request", f"{seconds:.0f} s of audio: at a pause after {ROLL_OVER:.0%}, the next one takes over"
        )
