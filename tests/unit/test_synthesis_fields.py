"""The fields of a request for speech: what vLLM-Omni is sent, and what is refused by name."""

import json
from typing import Any

import pytest
from guarding import refusal
from speaking import MODELS, VOICES, said

from voxtral_serve.guard.speech import fields


def read(**more: Any) -> fields.SpeechParameters:
    return fields.read(json.dumps(said(**more)).encode(), VOICES, MODELS)


def refused(content: Any) -> Any:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return refusal(fields.read, body, VOICES, MODELS)


def test_what_vllm_omni_is_sent() -> None:
    found = read(speed=1.5, max_new_tokens=64)
    assert json.loads(found.content) == {
        **{"model": "voxtral-tts", "input": "Two cups, please.", "voice": VOICES[0]},
        **{"response_format": "mp3", "speed": 1.5, "max_new_tokens": 64},
    }
    assert found[1:] == (len("Two cups, please."), VOICES[0], "mp3", False, False, ())


@pytest.mark.parametrize(
    ("given", "sent", "events", "streamed"),
    [
        ({}, None, False, False),
        ({"response_format": "pcm"}, "audio", False, True),
        ({"response_format": "pcm", "speed": 2}, None, False, False),
        ({"response_format": "wav", "stream_format": "audio"}, None, False, False),
        ({"response_format": "flac", "stream_format": "audio"}, None, False, False),
        ({"response_format": "pcm", "stream_format": "sse"}, "sse", True, False),
        ({"response_format": "pcm", "stream": True}, "sse", True, False),
        ({"response_format": "pcm", "stream": True, "stream_format": "audio"}, "audio", False, True),
        ({"response_format": "wav", "stream": False}, None, False, False),
    ],
)
def test_how_the_answer_is_sent(given: dict[str, Any], sent: str | None, events: bool, streamed: bool) -> None:
    found = read(**given)
    assert (found.events, found.streamed and not events) == (events, streamed)
    assert json.loads(found.content).get("stream_format") == sent


def test_names_of_voices() -> None:
    assert read(voice="Casual_Female").voice == "casual_female"
    assert read(voice={"id": "neutral_male"}).voice == "neutral_male"


def test_what_has_no_effect_is_named() -> None:
    more = {"instructions": "Whisper.", "language": "en", "seed": 1, "unheard_of": {}, "task_type": None, "user": ""}
    found = read(**more)
    assert found.ignored == ("instructions", "language", "seed", "unheard_of")
    assert not set(more) & set(json.loads(found.content))


WRONG = [
    ({"input": None}, "input", "input is missing or blank"),
    ({"input": " \n"}, "input", "input is missing or blank"),
    ({"input": ["a"]}, "input", "input is a list: expected text"),
    ({"model": 1}, "model", "model is 1: expected text"),
    ({"voice": None}, "voice", "voice is missing: expected one of casual_female, neutral_male"),
    ({"voice": "alloy"}, "voice", "voice is 'alloy': expected one of casual_female, neutral_male"),
    ({"voice": "default"}, "voice", "voice is 'default'"),
    ({"voice": {"name": "casual_female"}}, "voice", "voice is missing"),
    ({"voice": ["casual_female"]}, "voice", "voice is a list: expected one of"),
    ({"response_format": "aac"}, "response_format", "response_format is 'aac': expected one of mp3, opus, flac, wav"),
    ({"response_format": ""}, "response_format", "response_format is '': expected one of"),
    ({"stream_format": "mp3"}, "stream_format", "stream_format is 'mp3': expected one of audio, sse"),
    ({"stream": "yes"}, "stream", "stream is 'yes': expected true or false"),
    ({"stream": 1}, "stream", "stream is 1: expected true or false"),
    ({"speed": 0.2}, "speed", "speed is 0.2: expected a number from 0.25 to 4"),
    ({"speed": 4.01}, "speed", "speed is 4.01: expected"),
    ({"speed": "1"}, "speed", "speed is '1': expected"),
    ({"speed": True}, "speed", "speed is True: expected"),
    ({"speed": False}, "speed", "speed is False: expected"),
    ({"speed": 10**400}, "speed", "speed is 1000"),
    ({"stream_format": "sse"}, "response_format", "response_format is mp3, and stream_format is sse: expected pcm"),
    (
        {"stream": True, "response_format": "wav"},
        "response_format",
        "response_format is wav, and stream_format is sse: ",
    ),
    ({"stream": True, "response_format": "flac"}, "response_format", "response_format is flac, and stream_format is"),
    (
        {"stream_format": "sse", "response_format": "pcm", "speed": 2},
        *("speed", "speed is 2, and stream_format is sse: expected 1"),
    ),
    ({"max_new_tokens": 0}, "max_new_tokens", "max_new_tokens is 0: expected a whole number from 1 to 4096"),
    ({"max_new_tokens": 4097}, "max_new_tokens", "max_new_tokens is 4097: expected"),
    ({"sample_rate": 8000}, "sample_rate", "`sample_rate` is not supported: the audio has the model's rate"),
    ({"extra_params": {}}, "extra_params", "`extra_params` is not supported: the server sets how the model samples"),
    ({"word_timestamps": True}, "word_timestamps", "`word_timestamps` is not supported: this server has no aligner"),
    ({"speaker": "casual_female"}, "speaker", "`speaker` is not supported: send the voice's name as `voice`"),
]


@pytest.mark.parametrize(("more", "param", "message"), WRONG)
def test_a_wrong_value_is_named(more: dict[str, Any], param: str, message: str) -> None:
    error = refused(said(**more))
    assert (error.status, error.param) == (400, param)
    assert error.code == ("voice_not_found" if param == "voice" else "invalid_value")
    assert str(error).startswith(message)


def test_names_of_the_model() -> None:
    assert json.loads(read(model="tts-1").content)["model"] == "tts-1"
    assert "model" not in json.loads(read(model=None).content)
    error = refused(said(model="other"))
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert str(error) == "the model 'other' does not exist: this server has voxtral-tts, tts-1"


@pytest.mark.parametrize("name", fields.REFERENCES)
@pytest.mark.parametrize("value", ["http://169.254.169.254/", "file:///etc/passwd", "data:,", ["http://a/"], True, 1])
def test_references_are_refused_by_name(name: str, value: Any) -> None:
    error = refused(said(**{name: value}))
    assert (error.status, error.code, error.param) == (400, "reference_not_allowed", name)
    assert str(error).startswith(f"`{name}` is not supported: this server takes no reference voices")


@pytest.mark.parametrize("name", (*fields.REFERENCES, *fields.REFUSED))
def test_a_field_that_is_off_is_no_reference(name: str) -> None:
    for value in (None, False, ""):
        assert name not in json.loads(read(**{name: value}).content)


@pytest.mark.parametrize("letter", ["a", "é", "好", "😀"])
def test_the_longest_input(letter: str) -> None:
    assert read(input=letter * 4096).characters == 4096
    error = refused(said(input=letter * 4097))
    assert (error.code, error.param) == ("input_too_long", "input")
    assert str(error).startswith("input has 4097 characters: expected at most 4096")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not valid JSON"),
        (b"{", "the body is not valid JSON"),
        (b"[]", "the body is not a JSON object"),
        (b'"text"', "the body is not a JSON object"),
        (b'{"input": "a", "voice": "casual_female", "speed": NaN}', "the body is not valid JSON: NaN"),
        (b'{"input": "\xff", "voice": "casual_female"}', "the body is not valid JSON"),
        (b'{"input": "\\ud800", "voice": "casual_female"}', "the body has text that is not valid Unicode"),
        (b'{"a\\r\\nset-cookie": 1}', r"the body has a field called 'a\r\nset-cookie': expected a plain name"),
        (json.dumps(dict.fromkeys(map(str, range(101)), 1)).encode(), "the body has 101 fields: expected at most 100"),
        (b"[" * 100_000, "the body is not valid JSON"),
    ],
)
def test_a_body_that_is_no_request(body: bytes, message: str) -> None:
    error = refused(body)
    assert (error.status, error.code) == (400, "invalid_json")
    assert str(error).startswith(message)
