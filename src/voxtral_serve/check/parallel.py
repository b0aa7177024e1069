"""Options of several workers, engines or of another frontend that end the start, or with which a server would start and
then fail its clients."""

import os
from importlib.metadata import version

from voxtral_serve.check.options import ServeOptions
from voxtral_serve.check.report import Report
from voxtral_serve.engine.names import SPLITS, UNSPLIT
from voxtral_serve.engine.session import OPTION

GUARD = "voxtral_serve.guard.Guard"


def check_parallel(report: Report, options: ServeOptions, gate: bool) -> None:
    """Check that the encode-once model is on one GPU, vLLM's internal data parallel, and that the guard is in the
    frontend. With `gate`, the guard is added."""
    values = options.values
    for name in SPLITS if options.encode_once else ():
        if (workers := getattr(values, name)) != 1:
            report.problem(f"{name} is {workers}: {UNSPLIT}")
    engines, sessions = values.data_parallel_size, (values.additional_config or {}).get(OPTION)
    if engines > 1 and sessions:
        report.problem(
            f"data_parallel_size is {engines} with {OPTION} {sessions}: expected 1. Start one server per GPU, or set "
            f"{OPTION} to 0"
        )
    elif engines > 1 and version("vllm").startswith("0.20."):
        report.problem(
            f"data_parallel_size is {engines} on vllm {version('vllm')}, which may send the parts of one live session "
            "to different engines: start one server per GPU, or use vLLM 0.32.0"
        )
    if not gate and GUARD not in values.middleware:
        return
    if values.grpc:
        report.problem("grpc: vLLM's gRPC frontend has no middleware, so the guard is left out: remove the option")
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        report.problem("VLLM_USE_RUST_FRONTEND is set, and that frontend leaves the guard out: unset it")
