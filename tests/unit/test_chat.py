"""The JSON of a chat: its audio made clean, and URLs that vLLM must not fetch."""

import base64
import json
from typing import Any

import numpy as np
import pytest
from guarding import RULES, SAMPLES, heard, refusal

from tools import inputs
from voxtral_serve.guard import chat


def chat_of(part: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()


def url(address: str) -> bytes:
    return chat_of({"type": "audio_url", "audio_url": {"url": address}})


@pytest.mark.parametrize(
    "address",
    [
        *(
            "http://example.org/a.wav",
            "https://127.0.0.1/",
            "http://[::1]/",
            "http://[::1",
            "http://0/",
            "http://2130706433/",
        ),
        *("file:///etc/passwd", "FILE:///etc/passwd", "file:/etc/passwd", "/etc/passwd", "//example.org/a", ""),
        *(" data:audio/wav;base64,AAAA", "\tdata:;base64,AAAA", "dat\na:;base64,AAAA", "data", "data;base64,AAAA"),
        *("ftp://media.example.org/a", "gopher://media.example.org/", "ws://media.example.org/"),
        *(
            "http://media.example.org@127.0.0.1/",
            "http://127.0.0.1\\@media.example.org/",
            "http://media.example.org:22/",
        ),
        *(
            "http://media.example.org.evil.org/",
            "http://evil.org/media.example.org",
            "http://evil.org#media.example.org",
        ),
        *(
            "http://media.example.org /",
            " http://media.example.org/",
            "http://other.example.org/",
            "http:media.example.org/",
        ),
        *("http://mediа.example.org/", "http://media.example.org%00.evil.org/", "http://user@media.example.org/"),
    ],
)
def test_a_url_that_is_not_fetched(address: str) -> None:
    error = refusal(chat.read, url(address), RULES)
    assert error.status == 400
    assert "this server accepts data: URLs and URLs of media.example.org" in str(error)


@pytest.mark.parametrize(
    "address", ["https://media.example.org/a.wav?b=c", "HTTP://Media.Example.ORG/", "http://other.example.org:8080/"]
)
def test_a_url_of_an_allowed_host(address: str) -> None:
    passed = json.loads(chat.read(url(address), RULES).content)
    assert passed["messages"][0]["content"][0]["audio_url"]["url"] == address


@pytest.mark.parametrize("scheme", ["data:audio/mpeg;base64,", "DATA:;base64,", "data:audio/wav;codecs=1;BASE64,"])
def test_audio_in_a_data_url_is_made_clean(scheme: str) -> None:
    text = base64.b64encode(inputs.encoded(SAMPLES, subtype="FLOAT")).decode()
    for part in (
        {"type": "audio_url", "audio_url": {"url": scheme + text}},
        {"type": "audio_url", "audio_url": scheme + text},
    ):
        body = chat.read(chat_of(part), RULES)
        assert body.seconds == 2
        clean = json.loads(body.content)["messages"][0]["content"][0]["audio_url"]["url"]
        assert clean.startswith("data:audio/wav;base64,")
        np.testing.assert_array_equal(heard(base64.b64decode(clean.partition(",")[2]))[0], SAMPLES)


def test_clips_of_one_chat_share_the_limit() -> None:
    """Of 4 s: two of 2 s are taken, and a third is not."""
    data = base64.b64encode(inputs.encoded(SAMPLES)).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    asked = {"messages": [{"role": "user", "content": [part, part]}]}
    assert chat.read(json.dumps(asked).encode(), RULES).seconds == 4
    asked["messages"].append(asked["messages"][0])
    assert refusal(chat.read, json.dumps(asked).encode(), RULES).code == "clip_too_long"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"audio_url": {"url": "http://127.0.0.1/"}}, ["data: URLs"]),
        ({"type": "audio_url"}, ["without audio_url"]),
        ({"type": "audio_url", "audio_url": {"url": 7}}, ["must have text in `url`"]),
        ({"type": "audio_url", "audio_url": {"url": "data:audio/wav,AAAA"}}, ["base64"]),
        ({"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}}, ["not valid base64"]),
        (
            {"type": "text", "text": "a", "image_url": "data:;base64,AAAA"},
            ["has image_url", "audio_url, input_audio, text"],
        ),
        ({"type": "audio_url", "audio_url": None, "uuid": "of another client"}, ["has uuid"]),
        (7, ["not an object"]),
    ],
)
def test_a_part_of_a_chat_that_is_refused(content: Any, words: list[str]) -> None:
    error = refusal(chat.read, chat_of(content), RULES)
    assert error.status == 400
    assert all(word in str(error) for word in ("messages[0].content", *words)), str(error)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a": NaN}', b"[]", b'{"messages": 1}'])
def test_a_body_that_is_no_chat(body: bytes) -> None:
    assert refusal(chat.read, body, RULES).code == "invalid_json"


def test_text_of_a_chat_is_kept() -> None:
    asked = {
        "messages": [
            {"role": "system", "content": "żółw"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ]
    }
    asked |= {"model": "m", "temperature": 0.5, "other": {"kept": [1, None]}}  # type: ignore[dict-item]
    assert json.loads(chat.read(json.dumps(asked).encode(), RULES).content) == asked
