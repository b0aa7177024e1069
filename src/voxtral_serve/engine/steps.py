"""A timeline of the engine's steps, as lines of JSON in the file that VOXTRAL_SERVE_STEPS names.

A step is one `execute_model` of the worker with scheduled tokens, and the `sample_tokens` that follows it. Each line:

    at           seconds since 1970 at which `execute_model` began
    execute_ms   milliseconds of the host inside `execute_model`
    sample_ms    milliseconds of the host inside `sample_tokens`; 0 if `execute_model` returned the tokens
    gpu_ms       milliseconds of the GPU's stream between the begin and the end of the step; null on a CPU
    gpu_idle_ms  milliseconds of the stream between the end of the previous step and the begin of this one; null on a
                 CPU and in the first line
    requests     requests with tokens in the step
    tokens       tokens of the step
    new          requests that begin, or begin again after they were preempted
    encode       clips that the encoder runs over; parts of live sessions do not count

The times of the GPU are those of two CUDA events, recorded on the current stream at the begin of `execute_model` and at
the end of `sample_tokens`. Between them the stream counts as busy: a gap inside a step, such as one between kernels
that the host starts one by one, is part of `gpu_ms`. The host does not wait for an event. It reads the times in a later
step, when the GPU has reached the event.

Lines are written in groups, at the latest after BATCH steps or FLUSH_S seconds, and when the engine has no tokens to
compute, so the file of an idle server is complete, except perhaps for the last step. vLLM's steps of warming up are not
in it. With several workers the first one of the first engine writes. The file is made anew at each start.
"""

import collections
import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

VARIABLE = "VOXTRAL_SERVE_STEPS"
BATCH = 256  # lines
FLUSH_S = 1.0

log = logging.getLogger("vllm.voxtral_serve")


class StepsError(RuntimeError):
    """The file of VOXTRAL_SERVE_STEPS cannot be written."""


def probe_of(worker: Any, environ: Mapping[str, str] = os.environ) -> "StepProbe | None":
    """The probe of a worker of vLLM; None without VOXTRAL_SERVE_STEPS, and for all workers but the first.

    Raises StepsError if the file cannot be written.
    """
    name = environ.get(VARIABLE)
    if not name or worker.rank or worker.parallel_config.data_parallel_index:
        return None
    try:
        file = Path(name).open("w", encoding="utf-8")  # noqa: SIM115 (open as long as the server)
    except OSError as error:
        raise StepsError(
            f"{VARIABLE} is {name!r}, which cannot be written ({error.strerror}): expected a file in a directory that "
            f"exists, or no {VARIABLE}"
        ) from error
    return StepProbe(file)


class StepProbe:
    """Writes a line for each step of a worker; `attach` begins."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lines: list[str] = []
        self._flushed = time.monotonic()
        self._cuda = False
        # On CUDA: steps whose times are not read yet, with their two events; the end of the last step that was read.
        self._waiting: collections.deque[tuple[str, Any, Any]] = collections.deque()
        self._before: Any = None
        self._spare: list[Any] = []

    def attach(self, worker: Any) -> None:
        """Wrap the methods of this worker, after it has warmed up."""
        execute, sample, shutdown = worker.execute_model, worker.sample_tokens, worker.shutdown
        self._cuda = worker.device_config.device_type == "cuda"
        clock = time.perf_counter
        step: tuple[Any, Any, float, float] | None = None

        def execute_model(scheduled: Any) -> Any:
            nonlocal step
            if not scheduled.total_num_scheduled_tokens:
                output = execute(scheduled)
                self._collect()
                self._flush()
                return output
            at, start, begun = time.time(), self._event(), clock()
            output = execute(scheduled)
            step = scheduled, start, at, clock() - begun
            if output is not None:
                self._end(*step, 0.0)
                step = None
            return output

        def sample_tokens(grammar: Any) -> Any:
            nonlocal step
            begun = clock()
            output = sample(grammar)
            if step is not None:
                self._end(*step, clock() - begun)
                step = None
            return output

        def stop() -> None:
            self._collect()
            self._flush()
            self._file.close()
            shutdown()

        worker.execute_model, worker.sample_tokens, worker.shutdown = execute_model, sample_tokens, stop

    def _event(self) -> Any:
        """A CUDA event recorded now, on the current stream; None on a CPU."""
        if not self._cuda:
            return None
        if self._spare:
            event = self._spare.pop()
        else:
            import torch

            event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _end(self, scheduled: Any, start: Any, at: float, execute_s: float, sample_s: float) -> None:
        end = self._event()
        encode = sum(map(len, scheduled.scheduled_encoder_inputs.values()))
        line = (
            f'{{"at": {at:.6f}, "execute_ms": {1e3 * execute_s:.3f}, "sample_ms": {1e3 * sample_s:.3f}, '
            f'"requests": {len(scheduled.num_scheduled_tokens)}, "tokens": {scheduled.total_num_scheduled_tokens}, '
            f'"new": {len(scheduled.scheduled_new_reqs)}, "encode": {encode}, '
        )
        if self._cuda:
            self._waiting.append((line, start, end))
            self._collect()
        else:
            self._lines.append(f'{line}"gpu_ms": null, "gpu_idle_ms": null}}\n')
        if len(self._lines) >= BATCH or time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

    def _collect(self) -> None:
        """Complete the lines of the steps that the GPU has finished."""
        while self._waiting and self._waiting[0][2].query():
            line, start, end = self._waiting.popleft()
            idle = "null"
            if self._before is not None:
                idle = f"{self._before.elapsed_time(start):.3f}"
                self._spare.append(self._before)
            self._lines.append(f'{line}"gpu_ms": {start.elapsed_time(end):.3f}, "gpu_idle_ms": {idle}}}\n')
            self._spare.append(start)
            self._before = end

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        self._flushed = time.monotonic()
        if not lines or self._file.closed:
            return
        try:
            self._file.write("".join(lines))
            self._file.flush()
        except OSError as error:  # the server goes on
            log.error("%s: %s cannot be written any more: %s. It ends here.", VARIABLE, self._file.name, error)
            with contextlib.suppress(OSError):  # it tries to write again
                self._file.close()
