"""Live sessions of the encode-once model: how many, and how long one request of a session is."""

from voxtral_serve.check.clip import audio_config
from voxtral_serve.check.options import ServeOptions
from voxtral_serve.check.plan import Plan
from voxtral_serve.check.report import Report
from voxtral_serve.checkpoint import Checkpoint, CheckpointError
from voxtral_serve.engine.names import ENCODE_ONCE
from voxtral_serve.engine.session import AGE, OPTION, ROLL_OVER, SessionShape, least_positions, request_positions


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
    try:
        length, least = request_positions(shape, plan.max_model_len, plan.age_s), least_positions(shape)
    except ValueError as error:
        report.problem(f"additional_config: {error}")
        return
    report.row("sessions", f"{sessions:,} at a time ({OPTION}); others are refused")
    if length < least:
        option = f"{AGE} is {plan.age_s}, which is {length} positions" if plan.age_s else f"max_model_len is {length}"
        report.problem(f"{option}, and live sessions need at least {least}: raise it")
    else:
        seconds = (length - shape.left - shape.right) * shape.samples / shape.rate_hz
        report.row(
            "one request", f"{seconds:.0f} s of audio: at a pause after {ROLL_OVER:.0%}, the next one takes over"
        )
