"""The parts that look at texts: of clips against references, of one path against another, of other configurations."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from voxtral_serve.check import PROFILES
from voxtral_serve.client.errors import RequestError
from voxtral_serve.measure import scoring, spread
from voxtral_serve.measure.live import LiveError, Timeline
from voxtral_serve.prove import engine
from voxtral_serve.prove.clips import Clip
from voxtral_serve.prove.outcome import BROKEN_WER, DIFFERENT, Result, SkippedError, judged, number, percent, skip
from voxtral_serve.prove.sessions import spoken
from voxtral_serve.prove.state import Run
from voxtral_serve.prove.target import Answer, Target, Upload

ENCODE_ONCE = "VoxtralRealtimeEncodeOnce"
OWN_OPTION = "--additional-config"  # belongs to the profile that it was given for
PERCENTILES = (50, 90, 99)
PROFILE = "throughput.yaml"  # of the other servers
PLAIN = ("--speculative-config", "null")
PADS = ("--speculative-config", '{"model": "voxtral_serve.drafter.PadDrafter", "num_speculative_tokens": 5}')
OLDER = "0.20.0"
OLDER_GRAPHS = ("--attention-backend", "TRITON_ATTN", "--compilation-config.cudagraph_mode", "FULL_AND_PIECEWISE")
# As vLLM's own model runs on every version: without drafts, and with no full graphs, which 0.20.0 lacks.
STOCK = (
    *("--hf-overrides", "{}", "--attention-backend", "TRITON_ATTN"),
    *("--compilation-config.cudagraph_mode", "PIECEWISE"),
    *PLAIN,
)
NO_UPLOADS = "there are no texts of uploads to compare with"


def clips(run: Run) -> Result:
    """The files as they are, one at a time, and their word error rate."""
    run.need_words()
    sets = {"bundled": run.bundled, "given": run.given}
    figures: dict[str, Any] = {"given_in_manifest": run.given_total}
    texts: list[dict[str, Any]] = []
    problems, told = [], []
    for name, each in sets.items():
        if not each:
            figures[name] = None
            continue
        found, heard = _clips(run.target, name, each)
        figures[name] = found
        texts += heard
        told.append(f"{number(len(each), f'{name} clip')}, WER {percent(found['wer'])}")
        if found["wer"] is not None and found["wer"] > BROKEN_WER:
            problems.append(f"WER of the {name} clips is {percent(found['wer'])}, over {percent(BROKEN_WER)}")
        if found["wer"] is None and not any(one["text"] for one in heard):
            problems.append(f"none of the {name} clips has a text")
    if run.given_total > len(run.given):
        told.append(f"the first {len(run.given)} of {run.given_total:,} in the manifest")
    return judged(problems, "; ".join(told), figures, texts)


def _clips(target: Target, name: str, each: Sequence[Clip]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    uploads = [Upload(clip.path.read_bytes(), f"clip{clip.path.suffix}") for clip in each]
    answers = target.send_all(uploads, in_flight=1)
    errors, texts, rows = [], [], []
    for place, (clip, answer) in enumerate(zip(each, answers, strict=True), 1):
        found = None if clip.text is None else scoring.word_errors(clip.text, answer.text, clip.language)
        errors += [found] if found else []
        rows.append(
            {
                "clip": place,
                "audio_s": round(clip.seconds, 3),
                "seconds": round(answer.seconds, 4),
                "errors": found.total if found else None,
                "words": found.words if found else None,
            }
        )
        texts.append({"set": name, "clip": place, "reference": clip.text, "text": answer.text})
    total = scoring.total(errors)
    figures = {"clips": rows, "errors": total.total, "words": total.words, "wer": total.rate}
    return figures, texts


def delays(run: Run) -> Result:
    """Clips over all paths, for their times; `texts` compares what they say."""
    target, compared = run.target, run.compared
    uploads = target.send_all([target.clip(clip) for clip in compared], in_flight=1)
    run.uploads = [answer.text for answer in uploads]
    streamed = _streamed(run)
    figures: dict[str, Any] = {
        "upload_s": percentiles([answer.seconds for answer in uploads]),
        "first_text_s": percentiles([answer.first_s for answer in streamed if answer.first_s is not None]),
        "batched": _batched(run),
        "live": None,
    }
    told = [] if streamed else ["no streams of OpenAI's events"]
    told += [f"upload P50 {figures['upload_s']['p50']:.3f} s", f"{figures['batched']['rtfx']:.0f} x real time batched"]
    try:
        run.need_live()
        figures["live"] = live = asyncio.run(_live(run))
    except (LiveError, SkippedError) as error:
        if isinstance(error, LiveError) and not error.refused:
            raise
        run.live = " ".join(str(error).split())
        told.append("no live sessions")
    else:
        lag = f"lag P99 {live['lag_s']['p99']:.3f} s" if live["lag_s"] else live["lag_reason"]
        told += [f"live {lag}", f"time to final P50 {live['final_s']['p50']:.3f} s"]
    return judged([], ", ".join(told), figures)


def _streamed(run: Run) -> list[Answer]:
    """Answers as streams, one at a time; none by a server without the guard, whose events are vLLM's own."""
    target = run.target
    uploads = [target.clip(clip, stream=True) for clip in run.compared]
    try:
        answers = target.send_all(uploads, in_flight=1)
    except RequestError as error:
        if target.about is None and error.status == 200:
            return []
        raise
    run.passes["streamed"] = [(place, answer.text) for place, answer in enumerate(answers)]
    return answers


def _batched(run: Run) -> dict[str, Any]:
    """Requests of all clips over and over, many in flight."""
    target, compared, size = run.target, run.compared, run.size
    places = [place % len(compared) for place in range(max(size.requests, len(compared)))]
    # More than a server takes get 429. Each of its processes has a part of the limit, and some get more requests.
    in_flight = max(1, min(size.in_flight, (target.limit("in_flight") or 2 * size.in_flight) // 2))
    audio_s = sum(compared[place].seconds for place in places)
    meter, began = run.sampler.meter(), time.perf_counter()
    answers = target.send_all([target.clip(compared[place]) for place in places], in_flight)
    wall_s, (joules, _) = time.perf_counter() - began, meter()
    run.batched_j_per_s = joules / audio_s if joules else None
    run.passes["batched"] = [(place, answer.text) for place, answer in zip(places, answers, strict=True)]
    return {
        "requests": len(places),
        "in_flight": in_flight,
        "audio_s": round(audio_s, 3),
        "wall_s": round(wall_s, 3),
        "rtfx": round(audio_s / wall_s, 2),
        "seconds": percentiles([answer.seconds for answer in answers]),
    }


async def _live(run: Run) -> dict[str, Any]:
    """Sessions one after the other, at the pace of speech. Raises LiveError."""
    lines: list[Timeline] = []
    for clip in run.bundled[: run.size.at_pace]:
        lines.append(await spoken(run.target, clip.samples))
    run.passes["live"] = [(place, line.text.strip()) for place, line in enumerate(lines)]
    return live_figures(lines)


def live_figures(lines: Sequence[Timeline]) -> dict[str, Any]:
    """Percentiles in s over all tokens and sessions; `lag_reason` says why there is no lag."""
    lags = [line.lags() for line in lines]
    counted = [ms / 1000 for each in lags if each is not None for _, ms in each]
    why = None if None not in lags and counted else "lag not measured: the server's deltas are not its tokens"
    return {
        "sessions": len(lines),
        "lag_s": None if why else percentiles(counted),
        "lag_reason": why,
        "final_s": percentiles([line.final_s for line in lines if line.final_s is not None]),
        "client_late_s": percentiles([late for line in lines for late in line.late_s]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Of seconds, as all figures of a report; None without values."""
    return spread.percentiles(values, PERCENTILES, digits=4)


def texts(run: Run) -> Result:
    """The paths against uploads that are sent one at a time."""
    run.need_words()
    if not run.uploads:
        skip(NO_UPLOADS)
    return compared_with(run, run.passes)


def compared_with(run: Run, passes: dict[str, list[tuple[int, str]]]) -> Result:
    """The texts of these paths with those of uploads, word by word."""
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    heard: list[dict[str, Any]] = []
    for path, each in passes.items():
        found = run.differences(each)
        total = scoring.total(found)
        differing = sum(one.total > 0 for one in found)
        rows.append(
            {"path": path, "texts": len(each), "different": differing, "errors": total.total, "words": total.words}
        )
        heard += [
            {"path": path, "clip": place + 1, "upload": run.uploads[place], "text": text}
            for (place, text), one in zip(each, found, strict=True)
            if one.total
        ]
        if (total.rate or 0) > DIFFERENT:
            problems.append(
                f"{path}: {percent(total.rate)} of the words differ from those of uploads, over {percent(DIFFERENT)}"
            )
    if not any(row["words"] for row in rows):
        problems.append("uploads have no words")
    told = ", ".join(f"{row['path']} {row['texts'] - row['different']} of {row['texts']}" for row in rows)
    return judged(problems, f"the same as the uploads': {told}", {"paths": rows}, heard)


# ---- Other configurations of the same weights


def speculative(run: Run) -> Result:
    """With pads as drafts if the server has no drafts, and without drafts if it has."""
    _own_config(run)
    assert run.server is not None
    if run.server.drafts:
        return _other(run, "no drafts", *PLAIN)
    return _other(run, "pads", *PADS, *(OLDER_GRAPHS if run.server.version == OLDER else ()))


def stock(run: Run) -> Result:
    architectures = (_own_config(run).get("hf_overrides") or {}).get("architectures", [])
    if ENCODE_ONCE not in architectures:
        skip("the profile itself serves vLLM's own model")
    return _other(run, "stock", *STOCK)


def _own_config(run: Run) -> dict[str, Any]:
    """The content of the profile. Raises SkippedError where no other server can be started, or has nothing to say."""
    if run.config is None:
        skip("needs --serve: it starts another server on the same weights")
    run.need_words()
    return run.config


def _other(run: Run, name: str, *arguments: str) -> Result:
    """The uploads' texts by PROFILE with these arguments on the same weights. Its server runs alone."""
    if not run.uploads:
        skip(NO_UPLOADS)
    assert PROFILES is not None and run.job.directory is not None  # the first is part of every installation
    began = time.monotonic()
    try:
        with engine.started(PROFILES / PROFILE, run.job.directory, [*others(run.job.arguments), *arguments]) as other:
            start_s = time.monotonic() - began
            target = Target(other.url, other.key)
            answers = target.send_all([target.clip(clip) for clip in run.compared], in_flight=1)
    except engine.StartError as error:
        skip(f"profiles/{PROFILE} with {name} could not be started: {error}")
    result = compared_with(run, {name: [(place, each.text) for place, each in enumerate(answers)]})
    seconds = percentiles([each.seconds for each in answers])
    figures = {**result.figures, "profile": f"{PROFILE}, {name}", "start_s": round(start_s, 2), "upload_s": seconds}
    return Result(result.outcome, result.reason, figures, result.texts)


def others(arguments: Sequence[str]) -> list[str]:
    """Without OWN_OPTION and its value."""
    kept: list[str] = []
    dropped = False
    for word in arguments:
        if not dropped and word != OWN_OPTION and not word.startswith(f"{OWN_OPTION}="):
            kept.append(word)
        dropped = word == OWN_OPTION
    return kept
