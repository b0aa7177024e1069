"""Live audio over `/v1/realtime` of vLLM's own model, tests/support/vllm-live.yaml; server/test_live.py has ours."""

import base64
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import live
import pytest
from places import DATA, ROOT
from runs import all_valid
from transcribing import start

from bench import dataset, results
from bench.__main__ import main as bench
from bench.client import Client
from pico import evaluate

REFERENCE = ROOT / "bench/results/pico-reference" / results.ROWS
SAMPLES, FEW = 10, 5

pytestmark = pytest.mark.slow  # the fallback; test_live.py has what profiles serve
# Of these, the clips that vLLM hears otherwise live. Frames of its spectrogram are then 2.5 ms before those of a whole
# clip: a piece begins 52.5 ms before its token, and not a whole number of hops of 10 ms.
DIFFERENT = {"215"}
AT_ONCE = 4


@pytest.fixture(scope="module")
def clips() -> list[dataset.Clip]:
    return sorted(dataset.select(dataset.load(DATA)[0], SAMPLES, seed=0), key=lambda clip: clip.duration_s)


@pytest.fixture(scope="module")
def url(live_url: str) -> str:
    return live_url


@pytest.fixture(scope="module")
def expected() -> dict[str, str | None]:
    return {row.id: row.text for row in results.read_rows(REFERENCE)}


def heard(url: str, clip: dataset.Clip, piece: int) -> str:
    created, *deltas, done = live.transcribe(url, evaluate.read_audio(clip.path), piece)
    assert (created["type"], done["type"]) == ("session.created", "transcription.done"), done
    assert "".join(delta["delta"] for delta in deltas) == done["text"]
    text: str = done["text"]
    return text.strip()


@pytest.mark.parametrize("count", [FEW, pytest.param(SAMPLES, marks=pytest.mark.slow)])
def test_live_audio_has_the_text_of_the_whole_clip(
    url: str, clips: list[dataset.Clip], expected: dict[str, str | None], count: int
) -> None:
    """In pieces of 0.1 s, which is what microphones send, and of other lengths; several sessions at once."""
    clips, pieces = clips[:count], [1600, 480, 4001, 16000, 100000]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        texts = list(pool.map(heard, [url] * count, clips, pieces * (count // len(pieces))))
    heard_so = dict(zip([clip.id for clip in clips], texts, strict=True))
    different = {id: (text, expected[id]) for id, text in heard_so.items() if text != expected[id]}
    assert different.keys() <= DIFFERENT, different


def test_a_model_of_another_name_is_an_error(url: str) -> None:
    with live.session(url) as socket:
        live.receive(socket)
        live.send(socket, "session.update", model="other")
        assert live.receive(socket) == {
            "type": "error",
            "error": "The model `other` does not exist.",
            "code": "model_not_found",
        }


def test_the_protocol_is_as_the_readme_has_it(
    url: str, clips: list[dataset.Clip], expected: dict[str, str | None]
) -> None:
    """A session goes on after an error, and takes one text after the other."""
    clip = next(clip for clip in clips if clip.id not in DIFFERENT)
    audio = base64.b64encode(live.pcm16(evaluate.read_audio(clip.path))).decode()
    append, commit = "input_audio_buffer.append", "input_audio_buffer.commit"
    with live.session(url) as socket:
        assert live.receive(socket).keys() == {"type", "id", "created"}
        for kind, code in (
            ("session.update", "invalid_event"),  # without `model` beside `type`
            ("input_audio_buffer.clear", "unknown_event"),
            (commit, "model_not_validated"),
        ):
            live.send(socket, kind, session={"type": "transcription"})
            event = live.receive(socket)
            assert (event["type"], event["code"], type(event["error"])) == ("error", code, str)
        live.send(socket, "session.update", model="voxtral")
        for first, second in (((commit, {}), (append, {"audio": audio})), ((append, {"audio": audio}), (commit, {}))):
            live.send(socket, first[0], **first[1])
            live.send(socket, second[0], **second[1])
            live.send(socket, commit, final=True)
            while (event := live.receive(socket))["type"] == "transcription.delta":
                assert event.keys() == {"type", "delta"}
            assert event.keys() == {"type", "text", "usage"}
            assert event["text"].strip() == expected[clip.id]


def test_uploaded_clips_are_transcribed_as_well(
    url: str, clips: list[dataset.Clip], expected: dict[str, str | None]
) -> None:
    client = Client(url, timeout_s=60)
    client.model = "voxtral"
    assert (client.transcribe(clips[0], part=1).text or "").strip() == expected[clips[0].id]


def test_bench_measures_when_words_come(url: str, tmp_path: Path) -> None:
    """The model says a word 480 ms after its end at the earliest, and then computes."""
    out = tmp_path / "run"
    assert (
        bench(
            [
                "run",
                "--out",
                str(out),
                "--url",
                url,
                "--realtime",
                "--concurrency",
                "2",
                "--samples",
                "3",
                "--seed",
                "29",
            ]
        )
        == 0
    )
    all_valid(out)
    for row in results.read_rows(out / results.ROWS):
        assert row.end - row.start > row.duration_s - 0.1  # it was spoken, not uploaded
        assert row.latency_ms is not None and row.latency_ms < 5000
        assert row.words_ms and row.deltas_ms
        assert len(row.words_ms) >= 0.8 * len(row.reference.split())
        assert 400 < statistics.median(row.words_ms) < 2000


def test_the_command_prints_words_while_they_are_spoken(
    url: str, clips: list[dataset.Clip], expected: dict[str, str | None]
) -> None:
    long = [clip for clip in clips if clip.duration_s > 7 and clip.id not in DIFFERENT]
    clip = min(long, key=lambda clip: clip.duration_s)
    begun, text, arrivals = time.monotonic(), "", []
    with start("--live", clip.path, "--url", url) as process:
        assert process.stdout and process.stderr
        while sign := process.stdout.read(1):
            text += sign
            arrivals.append(time.monotonic() - begun)
        assert (process.stderr.read(), process.wait(10)) == ("", 0)
    assert text == f"{expected[clip.id]}\n"
    # The start of Python is in these: the clip is through later than its duration says.
    assert arrivals[len(text) // 2] < clip.duration_s < arrivals[-1]
