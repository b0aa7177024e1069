"""The parts that hold live sessions: more and more at once, a long pause, an hour as fast as it goes."""

import asyncio
import math
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

from voxtral_serve.measure import scoring, sound
from voxtral_serve.measure.live import LiveError, Timeline
from voxtral_serve.measure.scoring import Errors
from voxtral_serve.measure.sound import RATE_HZ, TOKEN, Pcm, Samples
from voxtral_serve.prove.clips import Clip, joined
from voxtral_serve.prove.outcome import (
    BROKEN_WER,
    FINAL_S,
    LAG_S,
    SETTLED_S,
    Result,
    judged,
    number,
    percent,
)
from voxtral_serve.prove.sessions import at_once, session, spoken
from voxtral_serve.prove.state import Run
from voxtral_serve.prove.texts import live_figures

GAP_S = 0.64  # between clips of one recording: eight tokens
LONGER_S = 60.0  # that an hour may take if its audio does not fill a request by then
CLIENT_LATE_S = 0.1  # from where on a bound says as much of the client as of the server
AHEAD_S = 20.0  # that a session which is sent as fast as it goes may be ahead of its text
UNKNOWN_MOST = 64  # sessions to try where the server names no limit


def sessions(run: Run) -> Result:
    """1, 2, 4 … live sessions at once, until one number passes a bound or the server's limit is reached."""
    run.need_live()
    most = min(run.target.limit("live_sessions") or UNKNOWN_MOST, run.size.sessions)
    levels: list[dict[str, Any]] = []
    holds, why = 0, f"{most} were tried at most"
    for at in numbers(most):
        sounds = [joined(run.bundled, each, GAP_S, run.size.level_s) for each in range(at)]
        try:
            found = live_figures(asyncio.run(at_once(run.target, sounds)))
        except LiveError as error:
            why = f"{at} failed: {error}"
            break
        levels.append(found)
        if passed := over(found):
            why = f"{at} passed a bound: {passed}"
            if (late := found["client_late_s"]["p99"]) > CLIENT_LATE_S:
                why += f"; this client itself sent its audio {late:.2f} s late (P99)"
            break
        holds = at
    figures = {"most": most, "holds": holds, "stopped": why, "levels": levels, "seconds_each": run.size.level_s}
    return judged([] if holds else [why], f"{number(holds, 'session')} within the bounds; {why}", figures)


def numbers(most: int) -> list[int]:
    """1, 2, 4 … and `most`."""
    return sorted({most, *(2**power for power in range(most.bit_length()) if 2**power <= most)})


def over(level: dict[str, Any]) -> str | None:
    """The bound that sessions have passed, None if none."""
    if level["lag_s"] and level["lag_s"]["p99"] > LAG_S:
        return f"lag P99 {level['lag_s']['p99']:.2f} s, over {LAG_S} s"
    if level["final_s"]["p90"] > FINAL_S:
        return f"time to final P90 {level['final_s']['p90']:.2f} s, over {FINAL_S} s"
    return None


def pauses(run: Run) -> Result:
    """One session: speech, a long silence, speech. No words may come of the silence, and the second speech's must."""
    run.need_words()
    run.need_live()
    first, second = longest(run.bundled)
    silence = np.zeros(round(run.size.silence_s * RATE_HZ), np.float32)
    line = asyncio.run(spoken(run.target, np.concatenate([first.samples, silence, second.samples])))
    within, after = pause_texts(line, first.seconds, first.seconds + run.size.silence_s)
    assert second.text is not None  # as all bundled clips
    errors = scoring.word_errors(second.text, after, second.language)
    problems = [f"{number(len(within.split()), 'word')} came of the silence"] if within.strip() else []
    if errors.rate is None or errors.rate > BROKEN_WER:
        problems.append(f"the speech after the silence has a WER of {percent(errors.rate)}")
    figures = {
        "silence_s": run.size.silence_s,
        "words_within": len(within.split()),
        "errors_after": errors.total,
        "words_after": errors.words,
    }
    texts = [{"within": within, "after": after, "reference": second.text}]
    told = f"no words in {run.size.silence_s:.0f} s of silence, and the session went on"
    return judged(problems, told, figures, texts)


def longest(clips: list[Clip]) -> tuple[Clip, Clip]:
    """Two clips of at most 8 s, the longest ones, so that both have words and the run stays short."""
    fit = sorted((clip for clip in clips if clip.seconds <= 8), key=lambda clip: clip.seconds)
    return fit[-1], fit[-2]


def pause_texts(line: Timeline, begin_s: float, end_s: float) -> tuple[str, str]:
    """What came in a silence from `begin_s` to `end_s` of the audio, from SETTLED_S on; and what came after it."""
    spoken_at = [*line.sent, math.inf]
    begin = spoken_at[min(int(begin_s * RATE_HZ / TOKEN), len(line.sent))] + SETTLED_S
    end = spoken_at[min(int(end_s * RATE_HZ / TOKEN), len(line.sent))]
    within = "".join(text for at, text in line.pieces if begin < at < end)
    after = "".join(text for at, text in line.pieces if at >= end)
    return within, after


def hour(run: Run) -> Result:
    """One session of up to an hour of audio, sent as fast as the server takes it, for a bounded time."""
    run.need_live()
    before = run.target.rollovers()
    began = time.perf_counter()
    line, sent = asyncio.run(_hour(run))
    wall_s = time.perf_counter() - began
    after, audio_s, context_s = run.target.rollovers(), line.samples / RATE_HZ, run.target.context_s
    rollovers = None if before is None or after is None else after - before
    figures: dict[str, Any] = {
        "audio_s": round(audio_s, 1),
        "wall_s": round(wall_s, 2),
        "times_real_time": round(audio_s / wall_s, 2),
        "rollovers": rollovers,
        "context_s": context_s,
        "wer": None,
        "errors_of_last_clip": None,
        "words_of_last_clip": None,
    }
    told = f"{audio_s:.0f} s of audio in {wall_s:.0f} s, {number(rollovers or 0, 'rollover')}"
    problems, texts = [], []
    if not run.random:
        clips = [run.bundled[place % len(run.bundled)] for place in range(sent)]
        reference = " ".join(clip.text or "" for clip in clips)
        all_words = scoring.word_errors(reference, line.text.strip(), clips[0].language)
        tail = end_errors(clips[-1].text or "", line.text, clips[-1].language)
        figures |= {"wer": all_words.rate, "errors_of_last_clip": tail.total, "words_of_last_clip": tail.words}
        told += f", WER {percent(all_words.rate)}"
        texts = [{"reference": reference, "text": line.text.strip()}]
        if all_words.rate is None or all_words.rate > BROKEN_WER:
            problems.append(f"WER is {percent(all_words.rate)}, over {percent(BROKEN_WER)}")
        if tail.rate is None or tail.rate > BROKEN_WER:
            problems.append("the text's end is not that of the audio")
    if not problems and not rolled_over(rollovers, audio_s, context_s):
        why = (
            f"a request of this server takes {context_s:.0f} s" if context_s else "the server does not say its context"
        )
        return Result("skipped", f"{told}: too little for a rollover, or none was seen ({why})", figures, texts)
    return judged(problems, told, figures, texts)


def rolled_over(rollovers: int | None, audio_s: float, context_s: float | None) -> bool:
    """By the server's count; without one, audio that no single request holds."""
    return rollovers > 0 if rollovers is not None else context_s is not None and audio_s > context_s


def end_errors(reference: str, text: str, language: str) -> Errors:
    """Errors of the text's last words, as many as the reference has."""
    expected = scoring.normalize(reference, language).split()
    heard = scoring.normalize(text, language).split()[-len(expected) :]
    return scoring.word_errors(" ".join(expected), " ".join(heard), language)


async def _hour(run: Run) -> tuple[Timeline, int]:
    """The session, and how many clips were sent."""
    sent = 0

    def pieces() -> Iterator[Pcm]:
        nonlocal sent
        audio_s = 0.0
        for place in count():
            piece = padded(run.bundled[place % len(run.bundled)].samples)
            audio_s += len(piece) / RATE_HZ
            if audio_s > run.size.hour_s:
                return
            yield sound.pcm16(piece)
            sent += 1  # once it has been sent

    async with session(run.target) as opened:
        line, until = opened.timeline, time.perf_counter() + run.size.hour_wall_s
        enough = round((run.target.context_s or 0.0) * RATE_HZ)

        def go_on() -> bool:
            return time.perf_counter() <= (until if line.samples >= enough else until + LONGER_S)

        await opened.hurry(pieces(), round(AHEAD_S * RATE_HZ / TOKEN), go_on)
        await opened.finish()
        return line, sent


def padded(samples: Samples) -> Samples:
    """With GAP_S of silence or a little more, to whole tokens."""
    gap = round(GAP_S * RATE_HZ)
    length = -(-(len(samples) + gap) // TOKEN) * TOKEN
    return np.pad(samples, (0, length - len(samples)))
