"""The parts about a server's service: what it refuses, how it ends, what it takes."""

import io
import signal
import time
from typing import Any, NamedTuple

import numpy as np
import soundfile

from voxtral_serve.client.errors import RequestError
from voxtral_serve.measure.sound import RATE_HZ
from voxtral_serve.prove.clips import Clip, joined
from voxtral_serve.prove.live import GAP_S
from voxtral_serve.prove.outcome import Result, judged, number, skip
from voxtral_serve.prove.state import Run
from voxtral_serve.prove.target import Answer, Target, Upload, threads

BEYOND_S = 30.0  # by which a clip passes the server's limit
WRONG_KEY, WRONG_MODEL = "voxtral-prove-wrong-key", "voxtral-prove-no-such-model"
UNDER_WAY_S, TOLD_S = 0.5, 0.5  # before SIGTERM; from there to a new request
GRACE_S = 60.0  # in which it must have ended: profiles have a shutdown_timeout of 30 s
GIB = 1 << 30


class Refusal(NamedTuple):
    """A request that must be refused with one of `statuses`; `why` it is not sent, or None."""

    name: str
    statuses: tuple[int, ...]
    upload: Upload | None
    why: str | None = None


def refusals(run: Run) -> Result:
    """Requests that are wrong, by status and message; after them a right one."""
    target, rows, problems = run.target, [], []
    good = target.clip(run.bundled[0])
    for each in _refusals(target, good):
        answer = None if each.upload is None else target.send(each.upload)
        rows.append(
            {
                "request": each.name,
                "expected": list(each.statuses),
                "status": answer.status if answer else None,
                "message": answer.text if answer else each.why,
            }
        )
        if answer and answer.status not in each.statuses:
            problems.append(f"{each.name}: {answer.status}, expected {' or '.join(map(str, each.statuses))}")
        elif answer and not answer.text:
            problems.append(f"{each.name}: {answer.status} without a message")
    status = target.send(good).status
    if status != 200:
        problems.append(f"a right request after them: {status}")
    sent = [row for row in rows if row["status"]]
    told = ", ".join(f"{row['request']} {row['status']}" for row in sent)
    left = "".join(f"; {row['request']} not sent: {row['message']}" for row in rows if not row["status"])
    return judged(problems, told + left, {"requests": rows})


def _refusals(target: Target, good: Upload) -> list[Refusal]:
    clip_s = target.limit("clip_s")
    return [
        Refusal("bad file", (400,), Upload(b"no audio at all", fields=good.fields)),
        Refusal(
            "too long",
            (400, 413),
            Upload(silence(clip_s + BEYOND_S), "clip.flac") if clip_s else None,
            None if clip_s else "the server does not name its longest clip",
        ),
        Refusal(
            "wrong key",
            (401,),
            Upload(good.content, fields=good.fields, key=WRONG_KEY) if target.key else None,
            None if target.key else "the server asks for no key",
        ),
        Refusal("unknown model", (404,), Upload(good.content, fields=(*good.fields, ("model", WRONG_MODEL)))),
    ]


def silence(seconds: float) -> bytes:
    """A FLAC file, of some kilobytes."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(round(seconds * RATE_HZ), np.int16), RATE_HZ, format="FLAC")
    return file.getvalue()


def sigterm(run: Run) -> Result:
    """The server is told to stop while requests run: they finish, a new one is refused, and the exit status is 0."""
    target, engine = run.target, run.engine
    if engine is None:
        skip("needs --serve: a server that it did not start is not stopped")
    most = run.size.running
    clip = Clip(run.bundled[0].path, None, "en", joined(run.bundled, 0, GAP_S, run.size.running_s))
    with threads(most) as pool:
        running = [pool.submit(_answer, target, target.clip(clip)) for _ in range(most)]
        time.sleep(UNDER_WAY_S)
        done_before = sum(each.done() for each in running)
        engine.send_signal(signal.SIGTERM)
        began = time.monotonic()
        time.sleep(TOLD_S)
        new = _answer(target, target.clip(run.bundled[0]))
        status = engine.wait(GRACE_S)
        ended_s = time.monotonic() - began
        engine.stop()  # or its requests would be waited for
        answers = [each.result() for each in running]
    finished = sum(isinstance(each, Answer) and each.status == 200 for each in answers)
    figures: dict[str, Any] = {
        "running": most,
        "done_before": done_before,
        "finished": finished,
        "new_request": str(new.status) if isinstance(new, Answer) else "no connection",
        "exit_status": status,
        "ended_s": round(ended_s, 2),
    }
    problems = [] if finished == most else [f"{most - finished} of {most} running requests did not finish"]
    if isinstance(new, Answer) and new.status != 503:
        problems.append(f"a new request got {new.status}, expected 503 or no connection")
    if status != 0:
        problems.append(f"exit status {status}, expected 0" if status is not None else f"it runs after {GRACE_S:.0f} s")
    if not problems and done_before == most:
        skip(f"the requests of {run.size.running_s:.0f} s were done before SIGTERM; exit status {status}")
    told = (
        f"{number(finished, 'running request')} finished, a new one got {figures['new_request']}, exit status {status}"
    )
    return judged(problems, f"{told} after {ended_s:.1f} s", figures)


def _answer(target: Target, upload: Upload) -> Answer | RequestError:
    try:
        return target.send(upload)
    except RequestError as error:
        return error


def memory(run: Run) -> Result:
    """The most memory that was in use on the server's GPUs until now, and the energy of the batched requests."""
    run.target  # noqa: B018  there is one, or this part is skipped
    peak = run.sampler.stop()["device_peak_bytes"]
    why = run.sampler.device_reason()
    figures = {
        "peak_bytes": peak,
        "joules_per_audio_s": None if run.batched_j_per_s is None else round(run.batched_j_per_s, 4),
        "not_measured": why,
    }
    if peak is None:
        return Result("skipped", f"not measured: {why}", figures)
    energy = figures["joules_per_audio_s"]
    told = f"{energy:.2f} J per s of audio, batched" if energy else "energy not measured: NVML does not tell it"
    return judged([], f"{peak / GIB:.2f} GiB in use on the GPU at most, by all processes; {told}", figures)
