"""An upload's form and its fields together, and the pieces of its clip."""

from fractions import Fraction

import inputs
import numpy as np
import pytest
from guarding import RATE, RULES, SAMPLES, form, refusal

from voxtral_serve.audio.decode import Clip
from voxtral_serve.audio.speech import Detector
from voxtral_serve.guard import fields, pieces
from voxtral_serve.guard.fields import TranscriptRequest
from voxtral_serve.guard.form import parse as form_of
from voxtral_serve.guard.limits import Rules

DETECTOR = Detector()


def read(body: bytes, content_type: str, rules: Rules, task: str = "transcribe") -> TranscriptRequest:
    return fields.read(form_of(body, content_type), task, rules, {"voxtral"}.__contains__)[0]


def test_fields_of_a_list_all_count() -> None:
    body, kind = form(file=("clip.wav", inputs.encoded(SAMPLES)))
    more = b'\r\nContent-Disposition: form-data; name="include[]"\r\n\r\n'
    boundary = b"--" + kind.partition("boundary=")[2].encode()
    doubled = boundary + more + b"logprobs\r\n" + boundary + more + b"others\r\n" + body
    found = read(doubled, kind, RULES)
    assert (found.logprobs, found.ignored) == (True, ("include",))


@pytest.mark.parametrize(
    ("fields", "timed", "logprobs", "ignored"),
    [
        ({}, True, False, ()),
        ({"include[]": "logprobs"}, True, True, ()),
        ({"include": "logprobs", "stream": "true"}, True, True, ()),
        ({"include[]": "logprobs", "response_format": "text"}, True, False, ("logprobs",)),
        ({"include[]": "logprobs", "response_format": "verbose_json"}, True, True, ("logprobs",)),
        ({"response_format": "verbose_json"}, True, True, ()),  # for its confidence
        ({"response_format": "verbose_json"}, False, False, ()),
        ({"response_format": "srt"}, True, False, ()),
        ({"include[]": "logprobs"}, False, False, ("logprobs",)),
        ({"include[]": "usage"}, True, False, ("include",)),
        ({"include[]": ""}, True, False, ()),
    ],
)
def test_logprobs_are_given_or_named(
    fields: dict[str, str], timed: bool, logprobs: bool, ignored: tuple[str, ...]
) -> None:
    more = {name: (None, value) for name, value in fields.items()}
    found = read(*form(file=("clip.wav", inputs.encoded(SAMPLES)), **more), RULES._replace(timed=timed))
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
    assert read(body, kind, RULES).ignored == ("language", "prompt")
    assert read(body, kind, RULES._replace(can=frozenset({"prompt"}))).ignored == ("language",)
    assert "gives no word times" in str(refusal(read, body, kind, RULES._replace(timed=False)))
    assert "does not translate" in str(refusal(fields.check_task, "translate", RULES.can))
    translated = read(body, kind, RULES._replace(can=frozenset({"translate"})), "translate")
    assert translated.form.task == "translate"


@pytest.mark.parametrize("piece_s", [4, 1])  # sent whole, or cut into pieces if anybody spoke
def test_silence_is_one_piece_without_speech(piece_s: int) -> None:
    clip = Clip(np.zeros(2 * RATE, np.float32), RATE)
    found = pieces.split(clip, False, RULES._replace(piece_s=Fraction(piece_s)), DETECTOR)
    assert found.silent and len(found.pieces) == 1 and found.clip.seconds == 2


@pytest.mark.parametrize("piece_s", [4, 1])
@pytest.mark.parametrize("samples", [SAMPLES, np.zeros_like(SAMPLES)])
def test_labels_of_speakers_need_no_second_pass_of_detection(
    piece_s: int, samples: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip, rules = Clip(samples, RATE), RULES._replace(piece_s=Fraction(piece_s))
    without, stretches = pieces.split(clip, True, rules, DETECTOR), tuple(DETECTOR.stretches(clip))
    assert without.speech == ()
    passes, compute = [], DETECTOR.probabilities
    monkeypatch.setattr(DETECTOR, "probabilities", lambda clip: passes.append(clip) or compute(clip))
    found = pieces.split(clip, True, rules, DETECTOR, speakers=True)
    assert (found.pieces, found.silent, found.speech) == (without.pieces, without.silent, stretches)
    assert len(passes) == 1 and bool(stretches) != found.silent


def test_a_file_that_is_too_large() -> None:
    body, kind = form(file=("clip.wav", bytes((1 << 20) + 1)))
    error = refusal(read, body, kind, RULES)
    assert (error.status, error.param, error.code) == (413, "file", "file_too_large")
    assert "1048577 bytes, but this server accepts at most 1048576 (1 MiB" in str(error)
