"""The JSON of a chat: its audio made clean, and URLs that vLLM must not fetch."""

import base64
import io
import json
import re
from fractions import Fraction
from typing import Any

import inputs
import numpy as np
import pytest
import soundfile
from guarding import RATE, RULES, SAMPLES, refusal
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from voxtral_serve.audio.decode import AudioError, Clip, decode
from voxtral_serve.guard import chat
from voxtral_serve.guard.errors import RefusedError


def chat_of(part: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()


def decoded(request: chat.ChatRequest) -> list[Clip]:
    """In this process, where the server has others for it."""
    clips, seconds = list[Clip](), Fraction(0)
    for audio in request.audio:
        try:
            clips.append(decode(audio.data, chat.bounds(RULES, seconds), RATE))
        except AudioError as error:
            raise RefusedError(400, f"{audio.where}: {error}", error.code, audio.where) from error
        seconds += Fraction(len(clips[-1].samples), RATE)
    return clips


def heard(file: bytes) -> tuple[Any, int]:
    samples, rate = soundfile.read(io.BytesIO(file), dtype="float32")
    return samples, rate


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
    request = chat.read(url(address), RULES)
    assert request.audio == ()
    passed = json.loads(chat.written(request, []))
    assert passed["messages"][0]["content"][0]["audio_url"]["url"] == address


@pytest.mark.parametrize("scheme", ["data:audio/mpeg;base64,", "DATA:;base64,", "data:audio/wav;codecs=1;BASE64,"])
def test_audio_in_a_data_url_is_made_clean(scheme: str) -> None:
    text = base64.b64encode(inputs.encoded(SAMPLES, subtype="FLOAT")).decode()
    for part in (
        {"type": "audio_url", "audio_url": {"url": scheme + text}},
        {"type": "audio_url", "audio_url": scheme + text},
    ):
        request = chat.read(chat_of(part), RULES)
        clips = decoded(request)
        assert [clip.seconds for clip in clips] == [2]
        clean = json.loads(chat.written(request, clips))["messages"][0]["content"][0]["audio_url"]["url"]
        assert clean.startswith("data:audio/wav;base64,")
        np.testing.assert_array_equal(heard(base64.b64decode(clean.partition(",")[2]))[0], SAMPLES)


def test_clips_of_one_chat_share_the_limit() -> None:
    """Of 4 s: two of 2 s are taken, and a third is not."""
    data = base64.b64encode(inputs.encoded(SAMPLES)).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    asked = {"messages": [{"role": "user", "content": [part, part]}]}
    request = chat.read(json.dumps(asked).encode(), RULES)
    assert [audio.where for audio in request.audio] == [f"messages[0].content[{n}].input_audio" for n in range(2)]
    clips = decoded(request)
    assert [clip.seconds for clip in clips] == [2, 2]
    parts = json.loads(chat.written(request, clips))["messages"][0]["content"]
    assert [heard(base64.b64decode(part["input_audio"]["data"]))[0].size for part in parts] == [SAMPLES.size] * 2
    asked["messages"].append(asked["messages"][0])
    error = refusal(decoded, chat.read(json.dumps(asked).encode(), RULES))
    assert (error.code, error.param) == ("clip_too_long", "messages[1].content[0].input_audio")
    assert "takes at most 0.00 s (of 4.00 s per chat)" in str(error)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"audio_url": {"url": "http://127.0.0.1/"}}, ["data: URLs"]),
        ({"type": "audio_url"}, ["is of type audio_url and has no audio_url"]),
        ({"type": "audio_url", "audio_url": {"url": 7}}, ["].audio_url.url is 7: expected text"]),
        ({"type": "audio_url", "audio_url": {"url": "data:audio/wav,AAAA"}}, ["base64"]),
        ({"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}}, ["not valid base64"]),
        (
            {"type": "text", "text": "a", "image_url": "data:;base64,AAAA"},
            ["].image_url is no field here: expected type, text, audio_url, input_audio"],
        ),
        ({"type": "audio_url", "audio_url": None, "uuid": "of another client"}, ["].uuid is no field here"]),
        ({"type": "image_url"}, ["].type is 'image_url': expected one of text, audio_url, input_audio"]),
        (7, ["is 7: expected text or an object"]),
    ],
)
def test_a_part_of_a_chat_that_is_refused(content: Any, words: list[str]) -> None:
    error = refusal(chat.read, chat_of(content), RULES)
    assert error.status == 400
    assert all(word in str(error) for word in ("messages[0].content", *words)), str(error)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"a": NaN}',
        b"[]",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)
def test_a_body_that_is_no_chat(body: bytes) -> None:
    assert refusal(chat.read, body, RULES).code == "invalid_json"


MESSAGES = [
    {"role": "system", "content": "żółw"},
    {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": ""},
]
ASKED = {
    **{"model": "m", "messages": MESSAGES, "temperature": 0.5, "top_p": 1, "max_tokens": 8, "seed": 1, "n": 16},
    **{"stop": ["a"], "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2},
}


def asked(**more: Any) -> bytes:
    return json.dumps(ASKED | more).encode()


def test_what_a_chat_may_have_is_kept() -> None:
    request = chat.read(asked(), RULES)
    assert json.loads(chat.written(request, [])) == ASKED
    assert (request.audio, request.ignored) == ((), ())


VLLMS = set(ChatCompletionRequest.model_fields) - set(chat.ChatFields.model_fields)


@pytest.mark.parametrize("name", [*sorted(VLLMS), "guided_json", "store", "other"])
def test_a_field_that_is_not_listed_does_not_pass(name: str) -> None:
    assert {"vllm_xargs", "mm_processor_kwargs", "media_io_kwargs", "structured_outputs", "chat_template"} < VLLMS
    request = chat.read(asked(**{name: {"a": ["b"]}}), RULES)
    assert request.ignored == (name,)
    assert json.loads(chat.written(request, [])) == ASKED
    assert chat.read(asked(**{name: None}), RULES).ignored == ()


def test_a_header_has_plain_names_only() -> None:
    more = {"a\r\nset-cookie": 1, "żółw": 1, "x" * 65: 1, "user": 1}
    assert chat.read(asked(**more), RULES).ignored == ("user",)


def test_a_field_of_a_message_that_is_not_listed_does_not_pass() -> None:
    request = chat.read(asked(messages=[message | {"tool_calls": [1]} for message in MESSAGES]), RULES)
    assert json.loads(chat.written(request, [])) == ASKED


WRONG = [
    ({"messages": None}, "messages", "is missing: expected a list of 1 to 1,000"),
    ({"messages": 1}, "messages", "is 1: expected a list of 1 to 1,000"),
    ({"messages": []}, "messages", "has 0 items: expected a list of 1 to 1,000"),
    ({"messages": [7]}, "messages[0]", "is 7: expected an object"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "is missing: expected one of system, user, assistant"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing: expected text or a list of at most 100"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "is 7: expected text or a list of at most"),
    ({"messages": [MESSAGES[0]] * 1001}, "messages", "has 1,001 items: expected a list of 1 to 1,000"),
    ({"temperature": "0"}, "temperature", "is '0': expected a number from 0 to 2"),
    ({"seed": 2**63}, "seed", "is 9223372036854775808: expected a whole number from -9223372036854775808 to"),
    ({"n": 17}, "n", "is 17: expected a whole number from 1 to 16"),
    ({"n": True}, "n", "is True: expected a whole number from 1 to 16"),
    ({"stop": [1]}, "stop[0]", "is 1: expected text"),
    ({"stop": "x" * 257}, "stop", "has 257 characters: expected text of at most 256 characters or a list"),
    ({"stream": "true"}, "stream", "is 'true': expected true or false"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "is 1: expected true or false"),
    ({"top_logprobs": 21}, "top_logprobs", "is 21: expected a whole number from 0 to 20"),
]


@pytest.mark.parametrize(("more", "path", "words"), WRONG)
def test_a_value_that_is_not_valid_is_named(more: dict[str, Any], path: str, words: str) -> None:
    error = refusal(chat.read, asked(**more), RULES)
    assert (error.status, error.code, error.param) == (400, "invalid_value", path)
    assert str(error).startswith(f"{path} {words}") and len(str(error)) < 300


def test_what_a_chat_has_beside_its_audio_is_bounded() -> None:
    data = base64.b64encode(bytes(1 << 20)).decode()
    clip = {"type": "input_audio", "input_audio": {"data": data}}
    many = [{"role": "user", "content": [clip]}] * 2
    assert len(chat.read(asked(messages=many), RULES).audio) == 2
    error = refusal(chat.read, asked(messages=[{"role": "user", "content": "a" * (1 << 20)}]), RULES)
    assert (error.status, error.code) == (413, "chat_too_large")
    small = {"type": "input_audio", "input_audio": {"data": ""}}
    error = refusal(chat.read, asked(messages=[{"role": "user", "content": [small] * 51}] * 2), RULES)
    assert str(error) == "the chat has 102 clips: expected at most 100"
    error = refusal(chat.read, asked(other=[[]] * 200_000), RULES)
    assert str(error).startswith("the body has more than 200,000 values")


def test_many_faults_cost_no_more_than_one() -> None:
    with pytest.raises(ValidationError) as caught:
        chat.ChatFields.model_validate({"messages": [{"role": "user", "content": [{}, 7] * 50}] * 2 + [{}] * 900})
    assert caught.value.error_count() < 5


REFUSED = [chat_input for chat_input in inputs.chats(SAMPLES) if chat_input.pattern != inputs.NO_CHAT]


@pytest.mark.parametrize("chat_input", REFUSED, ids=lambda chat_input: chat_input.name)
def test_chats_that_are_sent_to_servers(chat_input: inputs.Input) -> None:
    error = refusal(chat.read, chat_input.data, RULES._replace(hosts=frozenset()))
    assert error.status == chat_input.status and re.search(chat_input.pattern, str(error))
