"""What the API does beyond one clip and one format, on profiles/fast.yaml and pico: long files, silence and noise,
quiet speech, events, names of models, and fields that the model has no use for.

With a context of 512 tokens, so that 37 s are a long file.
"""

import itertools
import json
import re
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import inputs
import numpy as np
import pytest
import requests
import soundfile
from places import DATA, ROOT
from servers import short
from uploads import AUTHORIZED, upload

from bench import dataset, metrics, results
from bench.client import Row

RATE = 16000
SAMPLES, FEW = 40, 4
FILE_S, TURN_S = 600, 0.5  # of the long file, which is as long as the default limit allows


@pytest.fixture(scope="module")
def url(fast_url: str) -> str:
    return fast_url


@pytest.fixture(scope="module")
def clips() -> list[dataset.Clip]:
    return dataset.select(dataset.load(DATA).clips, SAMPLES, seed=4)


@pytest.fixture(scope="module")
def content(clips: list[dataset.Clip]) -> bytes:
    """A short clip's file."""
    return short(clips, 1)[0].path.read_bytes()


@pytest.fixture(scope="module")
def alone() -> dict[str, Row]:
    """What pico says to each clip by itself, by the reference model."""
    return {row.id: row for row in results.read_rows(ROOT / "bench/results/pico-reference" / results.ROWS)}


def read(clip: dataset.Clip) -> np.ndarray:
    samples: np.ndarray = soundfile.read(clip.path, dtype="float32")[0]
    return samples


def wer(rows: list[Row]) -> float:
    return float(metrics.wer(rows)["value"])


# ---- Long files


@pytest.fixture(scope="module")
def file() -> tuple[np.ndarray, list[dataset.Clip]]:
    """Ten minutes of clips, with half a second between two, as where speakers take turns."""
    parts: list[np.ndarray] = []
    chosen: list[dataset.Clip] = []
    seconds = 0.0
    for clip in dataset.select(dataset.load(DATA).clips, 80, seed=5):
        samples = read(clip)
        if seconds + len(samples) / RATE + TURN_S <= FILE_S:
            parts += [samples, np.zeros(round(TURN_S * RATE), np.float32)]
            chosen.append(clip)
            seconds += len(samples) / RATE + TURN_S
    return np.concatenate(parts), chosen


@pytest.mark.slow
def test_ten_minutes(url: str, file: tuple[np.ndarray, list[dataset.Clip]], alone: dict[str, Row]) -> None:
    """The word error rate is that of the clips alone, within a point, which is a sentence at a cut. Words have their
    times in the file."""
    samples, chosen = file
    assert len(samples) / RATE > FILE_S - 30
    granularities = {"timestamp_granularities[]": "word"}
    start = time.monotonic()
    answer = upload(url, inputs.encoded(samples, RATE, "FLAC"), response_format="verbose_json", **granularities)
    took = time.monotonic() - start
    assert answer.status_code == 200, answer.text
    heard = answer.json()
    apart = [alone[clip.id] for clip in chosen]
    said = " ".join(row.reference for row in apart)
    joined = [replace(apart[0], reference=said, text=heard["text"])]
    print(f"{len(samples) / RATE:.1f} s in {took:.1f} s; WER {wer(joined):.2%} joined, {wer(apart):.2%} apart")
    assert abs(wer(joined) - wer(apart)) <= 0.01
    assert heard["duration"] == pytest.approx(len(samples) / RATE, abs=0.01)
    for word, after in itertools.pairwise(heard["words"]):
        assert 0 <= word["start"] < word["end"] <= after["start"]
    # Of the words that come once in both, the times can be compared without asking which is which.
    spoken, offset = [], 0.0
    for clip in chosen:
        spoken += [(plain(word), at + offset) for word, at, _ in clip.extra["words"]]
        offset += clip.duration_s + TURN_S
    once, once_heard = single(spoken), single([(plain(word["word"]), word["start"]) for word in heard["words"]])
    off = [abs(once_heard[word] - at) for word, at in once.items() if word in once_heard]
    median, most = np.percentile(off, (50, 95))
    print(f"{len(off)} words: median {1000 * median:.0f} ms, 95 % {1000 * most:.0f} ms")
    assert len(off) > 100
    assert median <= 0.080 and most <= 0.240


def single(words: list[tuple[str, float]]) -> dict[str, float]:
    counts = Counter(word for word, _ in words)
    return {word: at for word, at in words if counts[word] == 1}


def plain(word: str) -> str:
    return re.sub(r"\W", "", word).casefold()


def test_what_is_too_long_is_named(url: str) -> None:
    answer = upload(url, inputs.encoded(np.zeros((FILE_S + 1) * RATE, np.int16), RATE, "FLAC"))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "lasts 601.00 s and this server takes at most 600.00 s" in message
    assert "VLLM_MAX_AUDIO_DECODE_DURATION_S" in message


# ---- No speech, and quiet speech


@pytest.mark.parametrize("level", [-3, -20, -40])
@pytest.mark.parametrize("name", ["440 Hz", "white noise", "hum", "silence"])
def test_no_words_where_nobody_speaks(url: str, name: str, level: float) -> None:
    t = np.arange(10 * RATE) / RATE
    sound = {
        "440 Hz": np.sin(2 * np.pi * 440 * t),
        "white noise": np.random.default_rng(0).uniform(-1, 1, t.size),
        "hum": sum(np.sin(2 * np.pi * 50 * k * t) / k for k in (1, 2, 3, 5)) / 2,
        "silence": np.zeros(t.size),
    }[name]
    content = inputs.encoded((sound * 10 ** (level / 20)).astype(np.float32))
    answer = upload(url, content)
    assert (answer.status_code, answer.json()["text"]) == (200, "")
    # pico by itself says nothing here, either: what shows is that it was not asked for 125 tokens.
    (done,), _ = events(url, content)
    assert done["text"] == "" and done["usage"]["total_tokens"] < 80


def test_some_quiet_speech_is_not_dropped(url: str, clips: list[dataset.Clip], alone: dict[str, Row]) -> None:
    check_quiet(url, short(clips, FEW), alone)


@pytest.mark.slow
def test_quiet_speech_is_not_dropped(url: str, clips: list[dataset.Clip], alone: dict[str, Row]) -> None:
    check_quiet(url, clips, alone)


def check_quiet(url: str, clips: list[dataset.Clip], alone: dict[str, Row]) -> None:
    """At -40 dBFS, by its peak: at most 0.5 points worse than the clips as they are."""
    quiet = []
    for clip in clips:
        samples = read(clip)
        content = inputs.encoded(samples * np.float32(0.01 / np.abs(samples).max()), subtype="FLOAT")
        quiet.append(replace(alone[clip.id], text=upload(url, content).json()["text"]))
    usual = [alone[clip.id] for clip in clips]
    print(f"{len(clips)} clips: WER {wer(quiet):.2%} at -40 dBFS, {wer(usual):.2%} as they are")
    assert wer(quiet) - wer(usual) <= 0.005


# ---- Events


def events(url: str, content: bytes, **fields: Any) -> tuple[list[Any], list[str]]:
    """The events of an answer, and the stages of the upload that had ended when it began (guard/timing.py)."""
    with requests.post(
        f"{url}/v1/audio/transcriptions",
        files={"file": ("clip", content)},
        data={"model": "voxtral", "stream": "true", **fields},
        headers=AUTHORIZED,
        timeout=600,
        stream=True,
    ) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        stages = re.findall(r"(\w+);dur=", answer.headers["server-timing"])
        return [json.loads(line.removeprefix(b"data: ")) for line in answer.iter_lines() if line], stages


def texts_and_done(url: str, content: bytes) -> tuple[list[str], Any]:
    """The texts of an answer that begins with the engine's first token, and its last event.

    When the client has them is no measure: on a busy machine it waits for a core while the server sends. That each text
    is sent before the engine makes the next, tests/unit/test_answer.py has.
    """
    (*deltas, done), stages = events(url, content)
    assert stages[-1] == "encoder"  # `steps` and `text` follow
    assert {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert len(deltas) > 10
    assert done["type"] == "transcript.text.done"
    return [event["delta"] for event in deltas], done


def test_the_last_event_is_verbose_json(url: str, content: bytes) -> None:
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    (*deltas, done), _ = events(url, content, **fields)
    verbose = upload(url, content, **fields)
    assert done == {"type": "transcript.text.done"} | verbose.json()
    assert len(done["words"]) > 3
    assert "".join(event["delta"] for event in deltas).strip() == done["text"]


def test_events_come_as_text_is_made(url: str, clips: list[dataset.Clip]) -> None:
    clip = min((each for each in clips if each.duration_s > 10), key=lambda each: each.duration_s)
    content = clip.path.read_bytes()
    texts, done = texts_and_done(url, content)
    assert "".join(texts).strip() == done["text"] == upload(url, content).json()["text"].strip()
    usage = done["usage"]
    assert usage["type"] == "tokens"
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"] > clip.duration_s * 12


def test_events_of_a_long_file(url: str, file: tuple[np.ndarray, list[dataset.Clip]]) -> None:
    samples = file[0][: 40 * RATE]
    content = inputs.encoded(samples, RATE, "FLAC")
    texts, done = texts_and_done(url, content)
    assert "".join(texts) == done["text"] == upload(url, content).json()["text"].strip()


def test_events_of_silence(url: str) -> None:
    found, _ = events(url, inputs.encoded(np.zeros(RATE, np.int16)))
    assert [(event["type"], event["text"]) for event in found] == [("transcript.text.done", "")]


# ---- Names, and fields without use


def test_names_of_the_model(url: str, content: bytes) -> None:
    answers = [upload(url, content, model=name) for name in ("voxtral", "whisper-1")]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json() == answers[1].json()
    for fields in ({}, {"stream": "true"}, {"response_format": "srt"}):
        refused = upload(url, content, model="whisper-9", **fields)
        assert (refused.status_code, "whisper-9" in refused.json()["error"]["message"]) == (404, True)
    silence = inputs.encoded(np.zeros(RATE, np.int16))
    assert upload(url, silence, model="whisper-9").status_code == 404


@pytest.mark.parametrize("fields", [{}, {"stream": "true"}, {"response_format": "text"}])
def test_what_has_no_effect_is_said(url: str, content: bytes, fields: dict[str, str]) -> None:
    assert "x-voxtral-ignored" not in upload(url, content, temperature="0", **fields).headers
    answer = upload(url, content, language="en", prompt="Names: Noah.", **fields)
    assert (answer.status_code, answer.headers["x-voxtral-ignored"]) == (200, "language, prompt")
    assert upload(url, content, language="xx", **fields).status_code == 400


@pytest.mark.slow
def test_temperature_is_honoured(url: str, clips: list[dataset.Clip]) -> None:
    content = clips[0].path.read_bytes()
    usual = upload(url, content).json()["text"]
    assert upload(url, content, temperature="0").json()["text"] == usual
    hot, again = (upload(url, content, temperature="2", seed="1").json()["text"] for _ in range(2))
    assert hot == again != usual


def test_translations_are_refused_by_name(url: str, content: bytes) -> None:
    files = {"file": ("clip", content)}
    answer = requests.post(f"{url}/v1/audio/translations", files=files, headers=AUTHORIZED, timeout=60)
    assert (answer.status_code, "does not translate" in answer.json()["error"]["message"]) == (400, True)
