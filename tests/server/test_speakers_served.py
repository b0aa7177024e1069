"""Speakers from a real server of pico: formats, streams, clips in several pieces, and what is left without the process.

Voices of espeak cannot judge the labels: here they are those of the same functions in the test's process. How good they
are on human voices: `python -m bench speakers`.
"""

import asyncio
import base64
import contextlib
import functools
import io
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import live
import numpy as np
import openai
import psutil
import pytest
import soundfile
from openai.types.audio import TranscriptionDiarized, TranscriptionTextSegmentEvent
from places import DATA
from servers import Server
from uploads import KEY, RATE, upload
from websockets.exceptions import ConnectionClosedOK

from voxtral_serve.audio.decode import Clip, wav
from voxtral_serve.audio.speech import Detector
from voxtral_serve.guard.labeller import Labeller

SECONDS = 40  # of three voices: two pieces, since the server's context has 37 s
SHORT = slice(4 * RATE, 21 * RATE)  # two voices
GRANULARITIES = {"timestamp_granularities[]": ["word", "segment"]}


@pytest.fixture(scope="module")
def audio() -> np.ndarray:
    """float32 samples of 16 bits, as WAV has them."""
    samples = soundfile.read(DATA / "live/06.opus", dtype="int16")[0][: SECONDS * RATE]
    return (samples / 32768).astype(np.float32)


@pytest.fixture(scope="module")
def whole(fast: Server, audio: np.ndarray) -> dict[str, Any]:
    """verbose_json of all samples; the process starts for it, and not for a request without speakers."""
    for process in labellers(fast):  # which other tests have needed
        process.kill()
        process.wait()
    assert upload(fast.url, audio[SHORT]).status_code == 200
    assert labellers(fast) == []
    answer = upload(fast.url, audio, response_format="verbose_json", diarize="true", **GRANULARITIES)
    assert answer.status_code == 200, answer.text
    assert len(labellers(fast)) == 1
    stages = re.findall(r"(\w+);dur=", answer.headers["server-timing"])
    assert stages[-2:] == ["speakers", "text"]
    content: dict[str, Any] = answer.json()
    return content


@pytest.fixture(scope="module")
def verbose(fast: Server, audio: np.ndarray) -> dict[str, Any]:
    """verbose_json of two voices, of which it is told that they are two."""
    content: dict[str, Any] = asked(fast, audio, response_format="verbose_json", **GRANULARITIES).json()
    assert {word["speaker"] for word in content["words"]} == {"SPEAKER_1", "SPEAKER_2"}
    return content


def asked(fast: Server, audio: np.ndarray, **fields: Any) -> Any:
    return upload(fast.url, audio[SHORT], **{"diarize": "true", "num_speakers": "2", **fields})


def labellers(server: Server) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("voxtral_serve.speakers.worker" in argument for argument in process.cmdline()):
                found.append(process)
    return found


def turns(segments: list[dict[str, Any]], name: str = "speaker") -> list[tuple[str, str]]:
    return [(re.sub(r"\w+_", "", each[name]), each["text"]) for each in segments]


def test_labels_of_a_clip_in_pieces_are_those_of_the_whole(whole: dict[str, Any], audio: np.ndarray) -> None:
    words = whole["words"]
    assert words[-1]["end"] > 30 and len(words) > 40
    clip = Clip(audio, RATE)

    async def expected() -> list[int]:
        here = Labeller()
        try:
            voices = await here.voices(clip, Detector().stretches(clip))
            return await here.labels(voices, [(word["start"], word["end"]) for word in words])
        finally:
            await here.aclose()

    assert [word["speaker"] for word in words] == [f"SPEAKER_{label + 1}" for label in asyncio.run(expected())]
    spoken = iter(words)
    for segment in whole["segments"]:
        inside = list(itertools.islice(spoken, len(segment["text"].split())))
        assert {word["speaker"] for word in inside} == {segment["speaker"]}
    assert list(spoken) == []


def test_every_form_has_the_same_speakers(fast: Server, audio: np.ndarray, verbose: dict[str, Any]) -> None:
    expected = turns(verbose["segments"])
    mistrals = asked(fast, audio).json()
    assert turns(mistrals["segments"], "speaker_id") == expected
    assert (mistrals["text"], mistrals["model"], mistrals["segments"][0]["speaker_id"]) == (
        verbose["text"],
        "voxtral",
        "speaker_1",
    )
    for form in ("srt", "vtt"):
        found = re.findall(r"SPEAKER_(\d+): ((?:.+\n)+)", asked(fast, audio, response_format=form).text)
        assert [(speaker, " ".join(text.split())) for speaker, text in found] == expected
    lines = asked(fast, audio, response_format="text").text.splitlines()
    groups = itertools.groupby(expected, lambda turn: turn[0])
    assert lines == [f"SPEAKER_{name}: {' '.join(text for _, text in group)}" for name, group in groups]


def test_openais_client(fast: Server, audio: np.ndarray, verbose: dict[str, Any]) -> None:
    client = openai.OpenAI(base_url=f"{fast.url}/v1", api_key=KEY, timeout=120)
    create: Any = functools.partial(
        client.audio.transcriptions.create,
        model="gpt-4o-transcribe-diarize",
        file=("clip.wav", wav(Clip(audio[SHORT], RATE))),
        response_format="diarized_json",
        chunking_strategy="auto",
        extra_body={"num_speakers": 2},
    )
    answer = create()
    assert isinstance(answer, TranscriptionDiarized)
    assert (answer.task, answer.text) == ("transcribe", verbose["text"])
    expected = [(chr(ord("A") + int(name) - 1), text) for name, text in turns(verbose["segments"])]
    assert [(each.speaker, each.text) for each in answer.segments] == expected
    events = list(create(stream=True))
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    assert kinds == [f"transcript.text.{kind}" for kind in ("delta", "segment", "done")]
    segments = [event for event in events if isinstance(event, TranscriptionTextSegmentEvent)]
    assert [each.model_dump() for each in segments] == [each.model_dump() for each in answer.segments]


def clip_of(words: list[dict[str, Any]], speaker: str, audio: np.ndarray) -> str:
    """The longest of this speaker's turns in `audio`, of 10 s at most, as a data: URL."""
    found = [[*each] for name, each in itertools.groupby(words, lambda word: word["speaker"]) if name == speaker]
    turn = max(found, key=lambda each: each[-1]["end"] - each[0]["start"])
    first, end = turn[0]["start"], min(turn[-1]["end"], turn[0]["start"] + 10)
    assert end - first >= 2, turn
    return data_url(wav(Clip(audio[round(first * RATE) : round(end * RATE)], RATE)))


def data_url(file: bytes) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(file).decode()}"


def test_known_speakers_with_openais_client(fast: Server, audio: np.ndarray, verbose: dict[str, Any]) -> None:
    """Both are known, or the second one only: the other one is then A."""
    clips = {name: clip_of(verbose["words"], name, audio[SHORT]) for name in ("SPEAKER_1", "SPEAKER_2")}
    client = openai.OpenAI(base_url=f"{fast.url}/v1", api_key=KEY, timeout=120)
    create: Any = functools.partial(
        client.audio.transcriptions.create,
        model="gpt-4o-transcribe-diarize",
        file=("clip.wav", wav(Clip(audio[SHORT], RATE))),
        response_format="diarized_json",
        chunking_strategy="auto",
        extra_body={"num_speakers": 2},
    )
    both = create(
        known_speaker_names=["Bob & <b>Co</b>", "Ann"],
        known_speaker_references=[clips["SPEAKER_2"], clips["SPEAKER_1"]],
    )
    names = {"1": "Ann", "2": "Bob & <b>Co</b>"}
    assert [(each.speaker, each.text) for each in both.segments] == [
        (names[name], text) for name, text in turns(verbose["segments"])
    ]
    events = list(create(known_speaker_names=["Bob"], known_speaker_references=[clips["SPEAKER_2"]], stream=True))
    segments = [event for event in events if isinstance(event, TranscriptionTextSegmentEvent)]
    names = {"1": "A", "2": "Bob"}
    assert [each.speaker for each in segments] == [names[name] for name, _ in turns(verbose["segments"])]


def test_known_speakers_in_every_form(fast: Server, audio: np.ndarray, verbose: dict[str, Any]) -> None:
    clip = clip_of(verbose["words"], "SPEAKER_1", audio[SHORT])
    known = {"known_speaker_names[]": "<b>Ann</b>", "known_speaker_references[]": clip}
    srt = asked(fast, audio, response_format="srt", **known).text
    assert "\nbAnn/b: " in srt and "\nSPEAKER_1: " in srt and "SPEAKER_2" not in srt
    assert "\n&lt;b&gt;Ann&lt;/b&gt;: " in asked(fast, audio, response_format="vtt", **known).text
    mistrals = asked(fast, audio, speaker_references=json.dumps({"Ann": clip.partition(",")[2]})).json()
    assert {each["speaker_id"] for each in mistrals["segments"]} == {"Ann", "speaker_1"}


@pytest.mark.parametrize("what", ["noise", "ten minutes"])
def test_a_clip_of_a_known_speaker_without_a_voice(fast: Server, audio: np.ndarray, what: str) -> None:
    samples = np.random.default_rng(0).normal(0, 0.1, {"noise": 5, "ten minutes": 600}[what] * 2000).clip(-1, 1)
    file = io.BytesIO()
    soundfile.write(file, samples, 2000, format="WAV", subtype="ULAW")
    known = {"known_speaker_names[]": "Ann", "known_speaker_references[]": data_url(file.getvalue())}
    answer = asked(fast, audio, **known)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "known_speaker_references[0]")
    assert {"noise": "has 0.00 s of speech", "ten minutes": "lasts 600.00 s"}[what] in error["message"]


def lived(url: str, samples: np.ndarray, flush: int | None = None) -> list[dict[str, Any]]:
    """The events of a session of Mistral's protocol that asks for speakers; with a flush after so many samples."""
    events = []
    with live.opened(url, "model=voxtral", "/v1/audio/transcriptions/realtime") as socket:
        live.send(socket, "session.update", session={"diarize": True})
        pcm = live.pcm16(samples)
        for part in (pcm,) if flush is None else (pcm[: 2 * flush], pcm[2 * flush :]):
            live.append(socket, part, 32_000, "input_audio.append")
            live.send(socket, "input_audio.flush")
        live.send(socket, "input_audio.end")
        with contextlib.suppress(ConnectionClosedOK):
            while True:
                events.append(live.receive(socket))
    return events


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == f"transcription.{kind}"]


def speeches(segments: list[dict[str, Any]], name: str) -> list[tuple[str, str]]:
    """The text of each speaker until another one speaks."""
    groups = itertools.groupby(turns(segments, name), lambda turn: turn[0])
    return [(speaker, " ".join(text for _, text in group)) for speaker, group in groups]


@pytest.mark.parametrize("flush", [None, 7 * RATE], ids=["one text", "two"])
def test_a_live_session_has_the_speakers_of_the_upload(fast: Server, audio: np.ndarray, flush: int | None) -> None:
    """At its end, and not before. A flush cuts its text, and no speaker."""
    events = lived(fast.url, audio[SHORT], flush)
    dones = of(events, "done")
    assert len(dones) == (1 if flush is None else 2)
    first = next(number for number, event in enumerate(events) if event["type"] == "transcription.segment")
    assert {event["type"] for event in events[first:-1]} == {"transcription.segment"} and events[-1] == dones[-1]
    segments = of(events, "segment")
    assert [{**each, "type": "transcription_segment"} for each in segments] == dones[-1]["segments"]
    assert " ".join(each["text"] for each in segments) == " ".join(each["text"] for each in dones)
    assert {each["speaker_id"] for each in segments} == {"speaker_1", "speaker_2"}
    if flush is None:
        upload_segments = asked(fast, audio, num_speakers="", response_format="verbose_json").json()["segments"]
        assert speeches(segments, "speaker_id") == speeches(upload_segments, "speaker")


def test_a_live_session_without_the_process(fast: Server, audio: np.ndarray) -> None:
    with no_labellers(fast):
        for labeller in labellers(fast):
            labeller.kill()
        events = lived(fast.url, audio[SHORT])
    (done,) = of(events, "done")
    assert done["error"]["message"].startswith("no speaker labels: the process that labels speakers ")
    segments = of(events, "segment")
    assert " ".join(each["text"] for each in segments) == done["text"] != ""
    assert not any("speaker_id" in each for each in segments)
    assert "speaker_id" in of(lived(fast.url, audio[SHORT]), "segment")[0]


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/audio/transcriptions/realtime"])
def test_a_live_model_that_would_label_as_they_speak_is_refused(fast: Server, path: str) -> None:
    with live.opened(fast.url, "intent=transcription&model=gpt-4o-transcribe-diarize", path) as socket:
        code, reason = live.close_of(socket)
    assert code == 1008 and reason.startswith("the model 'gpt-4o-transcribe-diarize' does not exist")


@contextlib.contextmanager
def no_labellers(server: Server) -> Iterator[None]:
    """Each is killed soon after it is ready: a start that fails is not repeated for a minute."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.02):
            for process in labellers(server):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.rlimit(psutil.RLIMIT_NOFILE)[0] == 3:  # set just before it is ready
                        time.sleep(0.02)
                        process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        over.set()
        killer.join()


def test_without_the_process(fast: Server, audio: np.ndarray, verbose: dict[str, Any]) -> None:
    """The request says so, or has its text without labels; the next one has another process."""
    with no_labellers(fast):
        answer = asked(fast, audio, response_format="srt")
        assert answer.status_code == 503 and answer.headers["retry-after"]
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "no_speaker_labels")
        assert error["message"].startswith("no speaker labels: the process that labels speakers ")
        answer = asked(fast, audio, diarize="optional")
        assert (answer.status_code, answer.headers["x-voxtral-ignored"]) == (200, "diarize")
        mistrals = answer.json()
        assert mistrals.keys() == {"model", "text", "language", "segments", "usage"}
        assert mistrals["text"] == verbose["text"]
        assert not any("speaker_id" in segment for segment in mistrals["segments"])
    assert turns(asked(fast, audio, diarize="optional").json()["segments"], "speaker_id") == turns(verbose["segments"])


@pytest.mark.parametrize("samples", ["second", "silence", "ten minutes of noise"])
def test_clips_with_little_or_no_speech(fast: Server, audio: np.ndarray, samples: str) -> None:
    clip = {
        "second": audio[6 * RATE : 7 * RATE],
        "silence": np.zeros(RATE, np.float32),
        "ten minutes of noise": np.random.default_rng(0).normal(0, 0.1, 600 * RATE).astype(np.float32),
    }[samples]
    answer = upload(fast.url, clip, response_format="diarized_json", num_speakers="20")
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert " ".join(each["text"] for each in content["segments"]) == content["text"]
    assert {each["speaker"] for each in content["segments"]} == ({"A"} if samples == "second" else set())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_speakers": "64"}, "num_speakers is '64': expected a whole number from 1 to 20"),
        ({"diarize": "perhaps"}, "diarize is 'perhaps': expected true or false or optional"),
        ({"response_format": "diarized_json", "diarize": "false"}, "diarize is false, but response_format is"),
        (
            {"known_speaker_names[]": ["Ann"] * 100},
            "known_speaker_names[] has 100 items: expected a list of at most 20",
        ),
        ({"known_speaker_names[]": "Ann"}, "1 known_speaker_names[] and 0 known_speaker_references[]"),
    ],
)
def test_what_is_refused(fast: Server, audio: np.ndarray, fields: dict[str, str], message: str) -> None:
    answer = asked(fast, audio, **fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
