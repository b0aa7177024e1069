"""Turns: the finder, the pool of voices, cuts of a session, and times of words."""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from livefakes import PAD, RATE, SHAPE, SPOKEN, STREAM, WORD, FakeEngine, chunks, noise, service, speech, tokens_of
from places import DATA

from pico.evaluate import read_audio
from voxtral_serve.audio.level import StreamPower, voiced
from voxtral_serve.audio.stream import StreamDecoder, StreamFormat
from voxtral_serve.audio.voice import FRAME, VoiceModel, VoiceStream
from voxtral_serve.guard.live.items import SessionOutput, TurnEnd
from voxtral_serve.guard.live.turns import IdleTimeout, SpeechEnd, SpeechStart, TurnFinder, TurnRule
from voxtral_serve.guard.live.voices import VoicePool
from voxtral_serve.transcript.turns import TimedSegment, TurnWords

MODEL = VoiceModel()


# ---- Cuts of a session


@pytest.mark.parametrize("piece", [333, 16000, 10**6])
@pytest.mark.parametrize("cuts", [[0.5], [1.0, 1.001, 7.3], [20.0, 39.0], [15.6, 16.0, 19.9, 20.0]])
def test_every_sample_is_in_one_turn(cuts: list[float], piece: int) -> None:
    """Also where a turn takes several requests, and where audio was held back: a context of 256 positions."""
    pcm, points = speech(40, [5, 17, 30]), [round(cut * RATE) for cut in cuts]

    async def run() -> None:
        engine = FakeEngine(positions=256, most=1)
        session = service(engine).session(lambda why: pytest.fail(why))
        await session.begin()
        found: dict[int, list[SessionOutput]] = {}
        ends: list[int] = []

        async def read() -> None:
            async for output in session.outputs():
                if isinstance(output, TurnEnd):
                    ends.append(output.turn)
                else:
                    assert len(ends) == output.turn
                    found.setdefault(output.turn, []).append(output)

        reader = asyncio.ensure_future(read())
        for first, last in itertools.pairwise([0, *points, len(pcm) // 2]):
            for part in chunks(pcm[2 * first : 2 * last], itertools.repeat(piece)):
                await session.feed(part)
                await asyncio.sleep(0)
            if last < len(pcm) // 2:
                session.cut()
        session.end()
        async with asyncio.timeout(20):
            await reader
        session.close()
        assert ends == list(range(len(cuts) + 1))
        assert session.samples == len(pcm) // 2
        assert b"".join(bytes(engine.audio[name]) for name in engine.opened) == pcm
        starts = np.cumsum([0, *(len(engine.audio[name]) // 2 for name in engine.opened)]).tolist()
        assert {0, *points} <= set(starts)
        for turn, outputs in found.items():
            low, high = [0, *points, len(pcm) // 2][turn : turn + 2]
            mine = [(start, end) for start, end in itertools.pairwise(starts) if low <= start < high]
            assert [start for start, _ in mine] == list(dict.fromkeys(output.start for output in outputs))
            assert sum(len(output.tokens) for output in outputs) == sum(tokens_of(end - start) for start, end in mine)
        # A cut is no rollover
        assert session.rollovers == len(engine.opened) - 1 - len(cuts)

    asyncio.run(run())


def test_a_cut_of_nothing_is_an_empty_turn() -> None:
    async def run() -> None:
        engine = FakeEngine(most=1)
        session = service(engine).session(lambda why: pytest.fail(why))
        await session.begin()
        session.cut()
        session.cut()
        await session.feed(noise(1))
        session.end()
        session.cut()
        found = [output.turn for output in [each async for each in session.outputs()] if isinstance(output, TurnEnd)]
        assert found == [0, 1, 2]
        session.close()
        assert len(engine.requests) == 1

    asyncio.run(run())


# ---- The finder


def events(rule: TurnRule, probabilities: list[float], over: Any = lambda at: False) -> list[Any]:
    finder = TurnFinder(rule, 0, over)
    found = []
    for number, probability in enumerate(probabilities):
        event = finder.step(probability, number * FRAME, (number + 1) * FRAME)
        if event is not None:
            found.append(event)
            if not isinstance(event, SpeechStart):
                finder.reset((number + 1) * FRAME)
    return found


RULE = TurnRule(0.5, 4 * FRAME, FRAME)


def test_a_turn_ends_after_its_silence() -> None:
    """Silence begins below 0.35, and lasts until two frames of 0.5."""
    assert events(RULE, [0.1, 0.2, 0.6, 0.6, 0.47, 0.36, 0.34, 0.3, 0.2, 0.1, 0.1]) == [
        SpeechStart(FRAME),
        SpeechEnd(10 * FRAME),
    ]


def test_a_short_pause_ends_nothing() -> None:
    assert events(RULE, [0.9, 0.9, 0.1, 0.1, 0.1, 0.9, 0.9, 0.1, 0.1, 0.1]) == [SpeechStart(0)]


def test_one_frame_is_no_speech() -> None:
    """Neither in silence nor in a pause, where it keeps the turn from ending until the next frame."""
    assert events(RULE, [0.1, 0.9, 0.1, 0.4, 0.9, 0.4]) == []
    assert events(RULE, [0.9, 0.9, 0.1, 0.1, 0.9, 0.1]) == [SpeechStart(0), SpeechEnd(6 * FRAME)]
    assert events(RULE, [0.9, 0.9, 0.1, 0.1, 0.1, 0.9, 0.1]) == [SpeechStart(0), SpeechEnd(7 * FRAME)]


def test_no_turn_ends_in_a_frame_that_is_neither() -> None:
    assert events(RULE, [0.9, 0.9, 0.1, 0.4, 0.4, 0.4, 0.4, 0.3]) == [SpeechStart(0), SpeechEnd(8 * FRAME)]


def test_a_turn_does_not_start_before_the_one_before_has_ended() -> None:
    rule = RULE._replace(silence=FRAME, prefix=10 * FRAME)
    assert events(rule, [0.9, 0.9, 0.1, 0.9, 0.9]) == [SpeechStart(0), SpeechEnd(3 * FRAME), SpeechStart(3 * FRAME)]


def test_silence_between_turns() -> None:
    rule = RULE._replace(idle=3 * FRAME)
    assert events(rule, [0.1] * 7) == [IdleTimeout(0, 3 * FRAME), IdleTimeout(3 * FRAME, 6 * FRAME)]
    assert events(rule, [0.1, 0.1, 0.9, 0.9]) == [SpeechStart(FRAME)]


def test_the_end_of_a_sentence() -> None:
    rule = RULE._replace(silence=100 * FRAME, sentence=2 * FRAME)
    asked: list[int] = []

    def over(at: int) -> bool:
        asked.append(at)
        return len(asked) == 3

    assert events(rule, [0.9, 0.9, *[0.1] * 6], over) == [SpeechStart(0), SpeechEnd(6 * FRAME)]
    assert asked == [2 * FRAME] * 3


# ---- Silero VAD on streams


def test_probabilities_do_not_depend_on_pieces_nor_on_others() -> None:
    rng = np.random.default_rng(0)
    pcms = [noise(2, seed=n, loud=float(rng.uniform(100, 9000))) for n in range(5)]

    def alone(pcm: bytes) -> np.ndarray:
        stream = VoiceStream()
        return MODEL.probabilities([stream], [stream.frames(pcm)])[0]

    async def run() -> None:
        pool = VoicePool(lambda: MODEL)

        async def one(pcm: bytes, piece: int) -> np.ndarray:
            stream, found = VoiceStream(), []
            for part in chunks(pcm, itertools.repeat(piece)):
                found.append(await pool.probabilities(stream, part))
            return np.concatenate(found)

        found = await asyncio.gather(*map(one, pcms, [160, 512, 1000, 16000, 10**6]))
        for each, pcm in zip(found, pcms, strict=True):
            assert len(each) == len(pcm) // 2 // FRAME
            np.testing.assert_allclose(each, alone(pcm), atol=1e-4)
        pool.close()

    asyncio.run(run())


def test_a_model_that_fails_fails_its_sessions() -> None:
    class Broken:
        def probabilities(self, streams: Any, frames: Any) -> Any:
            raise RuntimeError("no model")

    async def run() -> None:
        pool = VoicePool(Broken)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no model"):
                await pool.probabilities(VoiceStream(), noise(1))

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("gain_db", [0, -20])
def test_sentence_ends_of_the_live_set(gain_db: float) -> None:
    """Pauses of 700 ms and more after a sentence, those below -50 dBFS and those with noise; and ends in a sentence."""
    found, words, inside, late = {True: [0, 0], False: [0, 0]}, 0, 0, 0
    for row in map(json.loads, (DATA / "live.jsonl").read_text().splitlines()):
        samples = read_audio(DATA / row["path"])
        stream, finder = VoiceStream(), TurnFinder(TurnRule(0.5, RATE // 2, 0), 0, lambda at: False)
        pcm = np.rint(samples * 10 ** (gain_db / 20) * 32767).clip(-(2**15), 2**15 - 1).astype("<i2").tobytes()
        stops = []
        for number, probability in enumerate(MODEL.probabilities([stream], [stream.frames(pcm)])[0].tolist()):
            event = finder.step(probability, number * FRAME, (number + 1) * FRAME)
            if isinstance(event, SpeechEnd):
                stops.append(event.at / RATE)
                finder.reset(event.at)
        begins = True  # a sentence, with the next word
        for (word, start, end), (_, following, _) in itertools.pairwise([*row["words"], ("", row["duration"], 0)]):
            words += 1
            within = sum(start + 0.05 < stop < end - 0.05 for stop in stops)
            late, inside = late + within * begins, inside + within * (not begins)
            begins = word[-1] in ".?!"
            pause = samples[round(end * RATE) :][: round(0.7 * RATE)]
            if not begins:
                inside += sum(end - 0.05 <= stop <= following + 0.05 for stop in stops)
            elif following - end >= 0.7 and len(pause) == round(0.7 * RATE):
                loudest = np.sqrt((pause.reshape(-1, 160) ** 2).mean(1)).max()
                counts = found[bool(20 * np.log10(loudest + 1e-9) < -50)]
                counts[0] += any(end - 0.05 <= stop <= following + 0.2 for stop in stops)
                counts[1] += 1
    (quiet, of_quiet), (noisy, of_noisy) = found[True], found[False]
    print(f"quiet {quiet}/{of_quiet}, noisy {noisy}/{of_noisy}, inside a sentence {inside}, in its first word {late}")
    assert of_quiet > 100 and of_noisy > 60
    assert quiet >= 0.99 * of_quiet
    assert noisy >= 0.97 * of_noisy
    # With the rule before this one (a frame of 0.45 was speech) they were 11 and 2, and 12 and 4 at -20 dB.
    assert inside <= 11 and late <= 3


# ---- Levels, formats, times


def test_levels_of_pieces_are_those_of_the_whole() -> None:
    pcm = speech(5, [2.0])
    power = StreamPower(RATE)
    for part in chunks(pcm, itertools.cycle([1, 159, 400, 5000])):
        power.take(part)
    samples = np.frombuffer(pcm, "<i2").astype(np.float32) / 2**15
    from voxtral_serve.audio.level import loud_frames

    assert (loud_frames(power.power(0, 500)) == voiced(samples, RATE)).all()
    whole = power.power(100, 300)
    power.forget(150)
    assert (power.power(150, 300) == whole[50:]).all() and power.first == 150
    assert len(power.power(0, 100)) == 0


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_a_resampled_stream_has_the_length_of_the_whole(rate: int) -> None:
    decoder = StreamDecoder(StreamFormat("pcm_s16le", rate), RATE)
    pcm = noise(1)[: 2 * rate // 2 * 2]
    found = b"".join(map(decoder.take, chunks(pcm, itertools.repeat(111)))) + decoder.flush()
    assert abs(len(found) / 2 - len(pcm) / 2 * RATE / rate) <= 1
    again = b"".join(map(decoder.take, chunks(pcm, itertools.repeat(50_000)))) + decoder.flush()
    assert found == again


def power_of(seconds: float, silent: Sequence[tuple[float, float]] = ()) -> StreamPower:
    """Of noise, without a sound in between."""
    samples = np.frombuffer(noise(seconds), "<i2").copy()
    for start, end in silent:
        samples[round(start * RATE) : round(end * RATE)] = 0
    power = StreamPower(RATE)
    power.take(samples.tobytes())
    return power


def test_words_of_a_turn_are_in_order_and_within_it() -> None:
    """Of two requests, from 1.0 and 2.0 s on; the last words are written late."""
    turn = TurnWords(STREAM, 1.0)
    turn.add(1.0, [PAD] * 4 + [SPOKEN + 4] + [PAD] * 9, " w4")
    turn.add(2.0, [PAD] * 11 + [SPOKEN + 11, PAD, SPOKEN + 13], " w11 w13")
    (found,) = [each.words for each in turn.rest(power_of(3), 3.0)]
    assert [word.text for word in found] == ["w4", "w11", "w13"]
    assert found[0].end == pytest.approx(1.36)
    assert found[1].end == pytest.approx(2.92)
    assert found[2].end == pytest.approx(3.0)
    for one, other in itertools.pairwise(found):
        assert one.start < one.end <= other.start + 1e-9
    assert SHAPE.samples == 1280


# Words of a stream for segments: " w7", and each third one ends a sentence. GLUED is text without a blank before it.
GLUED = 5


def _sentence_piece(token: int) -> bytes:
    if token == GLUED:
        return b'"'
    return f" w{token - SPOKEN}{'.' * (token % 3 == 0)}".encode() if token >= SPOKEN else b""


def _sentence_text(tokens: Sequence[int]) -> str:
    return b"".join(map(_sentence_piece, tokens)).decode()


SENTENCES = STREAM._replace(decode=_sentence_text, piece=_sentence_piece)


def outputs_of(tokens: Sequence[int], sizes: Iterator[int]) -> Iterator[tuple[list[int], str]]:
    first = 0
    while first < len(tokens):
        part = [*tokens[first : first + next(sizes)]]
        first += len(part)
        yield part, _sentence_text(part)


@pytest.mark.parametrize("seed", range(20))
def test_segments_of_a_turn_hold_each_word_once(seed: int) -> None:
    """However its tokens come: in segments of the whole, each as soon as the next word shows that it is complete."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    for word in range(60):
        tokens += [PAD] * int(rng.choice([0, 1, 3, 30, 120], p=[0.3, 0.3, 0.2, 0.15, 0.05]))
        tokens += [WORD, SPOKEN + word] if rng.random() < 0.7 else [PAD, SPOKEN + word]
    begin = 7.0
    end = begin + 0.08 * len(tokens) + 0.5
    requests = [(begin, tokens[:200]), (begin + 200 * 0.08, tokens[200:])]

    def given(sizes: Callable[[], Iterator[int]]) -> tuple[list[TimedSegment], int]:
        turn, found, early = TurnWords(SENTENCES, begin), list[TimedSegment](), 0
        power = power_of(end)
        for start, mine in requests:
            for part, text in outputs_of(mine, sizes()):
                if turn.add(start, part, text):
                    found += turn.complete(power)
                    early = len(found)
        return found + turn.rest(power, end), early

    whole, _ = given(lambda: itertools.repeat(10**6))
    found, early = given(lambda: itertools.repeat(1))
    third, _ = given(lambda: itertools.cycle([3, 1, 7]))
    texts = [word.text for each in found for word in each.words]
    assert texts == [_sentence_text([SPOKEN + word]).strip() for word in range(60)]
    # Times may differ a little: what is loud is judged by the audio so far.
    assert [each.segment.text for each in whole] == [each.segment.text for each in found]
    assert [each.segment.text for each in third] == [each.segment.text for each in found]
    assert early >= len(found) - 1
    words = [word for each in found for word in each.words]
    for one, other in itertools.pairwise(words):
        assert begin <= one.start < one.end <= other.start + 1e-9
    ends = {word.text: word.end for each in whole for word in each.words}
    assert {word.text: word.end for word in words} == pytest.approx(ends)
    for each in found:
        assert (each.segment.start, each.segment.end) == (each.words[0].start, each.words[-1].end)
        assert each.segment.text == " ".join(word.text for word in each.words)


def test_a_sentence_is_complete_after_a_pause() -> None:
    """Of 400 ms. What follows it without a blank is a word of its own then, and part of the last word before."""
    power = power_of(6)
    turn = TurnWords(SENTENCES, 0.0)
    last = SPOKEN + 2 - (SPOKEN + 2) % 3 + 3  # the end of a sentence
    assert not turn.add(0.0, [PAD, WORD, last, GLUED], _sentence_text([last, GLUED]))
    assert not turn.add(0.0, [PAD] * 5, "")
    turn = TurnWords(SENTENCES, 0.0)
    turn.add(0.0, [PAD, WORD, last], _sentence_text([last]))
    assert [turn.add(0.0, [PAD], "") for _ in range(8)] == [False] * 4 + [True] + [False] * 3
    (first,) = turn.complete(power)
    assert first.segment.end == pytest.approx(0.12) and not turn.complete(power)
    turn.add(0.0, [WORD], "")
    turn.add(0.0, [GLUED, PAD], '"')
    turn.add(0.0, [WORD, SPOKEN + 1], " w1")
    (second,) = turn.rest(power, 6.0)
    assert [word.text for word in second.words] == ['"', "w1"]
    assert second.words[0].end == pytest.approx(11.5 * 0.08)


def test_what_a_long_turn_keeps_is_bounded() -> None:
    """Half an hour with a sentence each 20 s: neither its tokens nor the loudness of its audio stay."""
    turn, power, audio = TurnWords(SENTENCES, 0.0), StreamPower(RATE), noise(20)
    word = SPOKEN + 3 - SPOKEN % 3
    count = 0
    for _ in range(90):
        power.take(audio)
        for part, text in outputs_of([PAD] * 248 + [WORD, word], itertools.repeat(1)):
            if turn.add(0.0, part, text):
                count += len(turn.complete(power))
    assert count == 89
    assert sum(len(each.tokens) for each in turn._requests) < 300
    assert power.last - power.first < 6000
    assert len(turn.rest(power, 1800.0)) == 1
