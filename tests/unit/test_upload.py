"""An upload from its form to the pieces that vLLM gets."""

import io
from fractions import Fraction

import numpy as np
import pytest
import soundfile
from guarding import RATE, RULES, SAMPLES, form, heard, refusal

from tools import inputs
from voxtral_serve.audio.speech import Detector
from voxtral_serve.guard import upload
from voxtral_serve.guard.ask import piece_form
from voxtral_serve.guard.limits import Rules

DETECTOR = Detector()


def read(body: bytes, content_type: str, rules: Rules, task: str = "transcribe") -> upload.Upload:
    return upload.read(body, content_type, task, rules, DETECTOR, {"voxtral"}.__contains__)


def first_form(found: upload.Upload) -> tuple[str, bytes]:
    """(content type, body) of what vLLM gets for the first piece."""
    content_type, content = piece_form(upload.sent(found.request), found.audio, 0)
    return content_type.decode(), content


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT"])
@pytest.mark.parametrize("channels", [1, 2, 5])
def test_samples_are_those_that_vllm_would_read(subtype: str, channels: int) -> None:
    spread = np.stack([SAMPLES * (1 - 0.1 * index) for index in range(channels)], 1)
    content = inputs.encoded(spread, subtype=subtype)
    body, kind = form(file=("clip.wav", content), model=(None, "voxtral"), prompt=(None, "żółw"))
    found = read(body, kind, RULES)
    _, content_given = first_form(found)
    samples, rate = heard(content_given)
    direct = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)[0].T.mean(axis=0)
    assert rate == RATE
    np.testing.assert_array_equal(samples, direct)
    assert found.audio.clip.seconds == 2
    assert "żółw".encode() in content_given and found.request.ignored == ("prompt",)


def test_what_is_written_is_a_form() -> None:
    """Read by the parser that it goes to, and by ours: again the same."""
    body, kind = form(file=("clip.wav", inputs.encoded(SAMPLES)), model=(None, "voxtral"))
    once = read(body, kind, RULES)
    kind_given, content = first_form(once)
    twice = read(content, kind_given, RULES)
    np.testing.assert_array_equal(heard(content)[0], heard(first_form(twice)[1])[0])
    assert twice.audio.clip.seconds == once.audio.clip.seconds


def test_fields_of_a_list_all_count() -> None:
    body, kind = form(file=("clip.wav", inputs.encoded(SAMPLES)))
    more = b'\r\nContent-Disposition: form-data; name="include[]"\r\n\r\n'
    boundary = b"--" + kind.partition("boundary=")[2].encode()
    doubled = boundary + more + b"logprobs\r\n" + boundary + more + b"others\r\n" + body
    found = read(doubled, kind, RULES)
    assert (found.request.logprobs, found.request.ignored) == (True, ("include",))


@pytest.mark.parametrize(
    ("fields", "timed", "logprobs", "ignored"),
    [
        ({}, True, False, ()),
        ({"include[]": "logprobs"}, True, True, ()),
        ({"include": "logprobs", "stream": "true"}, True, True, ()),
        ({"include[]": "logprobs", "response_format": "verbose_json"}, True, False, ("logprobs",)),
        ({"include[]": "logprobs"}, False, False, ("logprobs",)),
        ({"include[]": "usage"}, True, False, ("include",)),
        ({"include[]": ""}, True, False, ()),
    ],
)
def test_logprobs_are_given_or_named(
    fields: dict[str, str], timed: bool, logprobs: bool, ignored: tuple[str, ...]
) -> None:
    more = {name: (None, value) for name, value in fields.items()}
    found = read(*form(file=("clip.wav", inputs.encoded(SAMPLES)), **more), RULES._replace(timed=timed)).request
    assert (found.logprobs, found.ignored) == (logprobs, ignored)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": "xml"}, ["response_format is 'xml'", "json, text, verbose_json, srt, vtt"]),
        ({"timestamp_granularities[]": "word"}, ["needs response_format verbose_json, found json"]),
        ({"response_format": "srt", "stream": "true"}, ["srt is not available with stream"]),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, str], words: list[str]) -> None:
    body, kind = form(
        file=("clip.wav", inputs.encoded(SAMPLES)), **{name: (None, value) for name, value in fields.items()}
    )
    assert all(word in str(refusal(read, body, kind, RULES)) for word in words)


def test_what_a_model_cannot_do() -> None:
    body, kind = form(
        file=("clip.wav", inputs.encoded(SAMPLES)),
        language=(None, "en"),
        prompt=(None, "names"),
        hotwords=(None, ""),
        chunking_strategy=(None, "auto"),
        **{
            "response_format": (None, "verbose_json"),
            "timestamp_granularities[]": (None, "word"),
        },
    )
    assert read(body, kind, RULES).request.ignored == ("language", "prompt")
    assert read(body, kind, RULES._replace(can=frozenset({"prompt"}))).request.ignored == ("language",)
    assert "gives no word times" in str(refusal(read, body, kind, RULES._replace(timed=False)))
    assert "does not translate" in str(refusal(read, body, kind, RULES, "translate"))
    translated = read(body, kind, RULES._replace(can=frozenset({"translate"})), "translate")
    assert translated.request.form.task == "translate"


@pytest.mark.parametrize("piece_s", [4, 1])  # sent whole, or cut into pieces if anybody spoke
def test_silence_is_a_tenth_of_a_second(piece_s: int) -> None:
    body, kind = form(file=("clip.wav", inputs.encoded(np.zeros(2 * RATE, np.float32))))
    found = read(body, kind, RULES._replace(piece_s=Fraction(piece_s)))
    assert found.audio.silent and found.audio.clip.seconds == 2
    assert len(heard(first_form(found)[1])[0]) == RATE / 10


def test_a_file_that_is_too_large() -> None:
    body, kind = form(file=("clip.wav", bytes((1 << 20) + 1)))
    error = refusal(read, body, kind, RULES)
    assert (error.status, error.param, error.code) == (413, "file", "file_too_large")
    assert "1048577 bytes, but this server accepts at most 1048576 (1 MiB" in str(error)
