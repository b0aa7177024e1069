"""`voxtral-serve prove`: its parts one after the other, a line for each, and the two reports."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

from voxtral_serve.client.errors import RequestError, UsageError, report_end
from voxtral_serve.client.server import api_key
from voxtral_serve.measure.engine import spent, terminable, vllm
from voxtral_serve.measure.errors import MeasureError
from voxtral_serve.measure.gpus import Gpus, MemorySampler
from voxtral_serve.prove import clips, engine, facts, live, private, report, service, texts
from voxtral_serve.prove.job import FULL, QUICK, ProveJob
from voxtral_serve.prove.outcome import Part, Result, SkippedError, judged, skip
from voxtral_serve.prove.state import Run
from voxtral_serve.prove.target import Target

CHECK_S = 300
PROBLEM = "PROBLEM"  # how `voxtral-serve check` marks one
NEEDS_SERVE = "needs --serve"
Measure = Callable[[Run], Result]
# Behind `check` and `start`, in this order: memory before what ends the server, and the other servers after it.
PARTS: tuple[tuple[str, str, Measure], ...] = (
    ("clips", "Clips against their references", texts.clips),
    ("delays", "Delays", texts.delays),
    ("texts", "The same text on every path", texts.texts),
    ("live", "Live sessions at once", live.sessions),
    ("pauses", "A long pause", live.pauses),
    ("hour", "An hour, compressed", live.hour),
    ("memory", "Memory and energy", service.memory),
    ("refusals", "Refusals", service.refusals),
    ("sigterm", "SIGTERM", service.sigterm),
)
OTHERS: tuple[tuple[str, str, Measure], ...] = (
    ("speculative", "The text with and without drafts", texts.speculative),
    ("stock", "The text of vLLM's own model", texts.stock),
)


def run(job: ProveJob) -> int:
    """Exit status: 0; 1 if a part failed; 2 for arguments that cannot be used; 130 for Ctrl-C."""
    try:
        with terminable():
            return _run(job)
    except (UsageError, KeyboardInterrupt) as error:
        return report_end(error)


def _run(job: ProveJob) -> int:
    size, began, started = QUICK if job.quick else FULL, datetime.now(UTC), time.monotonic()
    given, given_total = clips.load(job.clips, size.given) if job.clips else ([], 0)
    state = Run(job, size, clips.load(clips.BUNDLED, size.clips)[0], given, given_total)
    key = api_key(os.environ) if job.url else None
    if job.profile is not None and job.directory is not None:
        _need_vllm()
        state.config = facts.profile(job.profile)
        state.random = facts.random_weights(job.directory)
    if job.random_weights:
        state.random = "the weights are random, as --random-weights says"
    try:
        job.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {job.out} cannot be written: {error.strerror}") from None
    parts: list[Part] = []
    gpus = Gpus() if job.url is None or is_local(job.url) else None

    def measure(name: str, title: str, function: Measure) -> Part:
        part = measured(name, title, function, state)
        print(f"{part.result.outcome:8} {name:12} {part.result.reason} ({part.seconds:.1f} s)", flush=True)
        parts.append(part)
        return part

    hidden: list[str] = private.secrets([job.url or ""], [key], [job.profile, job.directory, job.clips, job.out])
    with contextlib.ExitStack() as stack:
        measure("check", "Check", check)
        checked = parts[0].result.outcome != "failed"
        measure("start", "Start", lambda _: _started(state, stack, key, checked))
        for each in PARTS:
            measure(*each)
        if state.engine is not None and state.engine.key is not None:
            hidden.append(state.engine.key)
        found = facts.of_run(state, gpus, began)
    for each in OTHERS:
        measure(*each)
    whole = report.whole(found, parts, time.monotonic() - started, job.with_texts)
    report.write(job.out, private.hidden(whole, hidden))
    print(report.verdict(whole))
    print(f"{job.out / report.PAGE} and {job.out / report.JSON}")
    return 1 if whole["outcome"] == "failed" else 0


def measured(name: str, title: str, function: Measure, state: Run) -> Part:
    """A part; what it raises of a server is its failure."""
    began = time.monotonic()
    try:
        result = function(state)
    except SkippedError as error:
        result = Result("skipped", str(error))
    except (RequestError, MeasureError, OSError) as error:
        result = Result("failed", " ".join(str(error).split()) or type(error).__name__)
    return Part(name, title, round(time.monotonic() - began, 2), result)


def _need_vllm() -> None:
    try:
        vllm()
    except MeasureError as error:
        raise UsageError(str(error)) from None


def is_local(url: str) -> bool:
    from voxtral_serve.client.server import Server

    return not Server(url, None).http.proxied


def check(state: Run) -> Result:
    """`voxtral-serve check` with the same arguments, as a process of its own: it imports vLLM."""
    job = state.job
    if job.profile is None or job.directory is None:
        skip(NEEDS_SERVE)
    words = ["check", "--config", str(job.profile.resolve()), str(job.directory.resolve()), *job.arguments]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "voxtral_serve.cli", *words], capture_output=True, text=True, timeout=CHECK_S
        )
    except subprocess.TimeoutExpired:
        return Result("failed", f"voxtral-serve check took more than {CHECK_S} s")
    lines = done.stdout.splitlines()
    problems = [line.strip().removeprefix(PROBLEM).strip() for line in lines if line.strip().startswith(PROBLEM)]
    if done.returncode and not problems:
        problems = [f"voxtral-serve check ended with status {done.returncode}: {last_line(done.stderr)}"]
    return judged(problems, lines[-1] if lines else "", {"problems": problems})


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def _started(state: Run, stack: contextlib.ExitStack, key: str | None, checked: bool) -> Result:
    """Start the server, or look at the one that is up. It is in `state` then, with a sampler of its memory."""
    job = state.job
    if job.url is not None:
        state.server = Target(job.url, key, capped=state.random is not None)
        state.gpu = sampler(job.url)
        skip(NEEDS_SERVE)
    if not checked:
        skip("the check found problems")
    assert job.profile is not None and job.directory is not None
    state.engine = stack.enter_context(engine.started(job.profile, job.directory, job.arguments))
    state.server = Target(state.engine.url, state.engine.key, capped=state.random is not None)
    state.gpu = sampler(state.engine.url)
    seconds = sum(phase_s for _, phase_s in state.engine.phases)
    phases = [{"name": name, "seconds": round(phase_s, 2)} for name, phase_s in state.engine.phases]
    return judged([], f"ready after {spent(state.engine.phases)}", {"phases": phases, "seconds": round(seconds, 2)})


def sampler(url: str) -> MemorySampler:
    """A sampler of the memory of the server at this URL that has begun."""
    made = MemorySampler(url)
    made.start()
    return made
