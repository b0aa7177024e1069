"""The guard's rules by themselves: limits, forms, audio that lies, and URLs that vLLM must not fetch."""

import asyncio
import base64
import io
import json
import re
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import soundfile
from conftest import DATA
from requests import Request

from tools import inputs
from voxtral_serve.audio import decode as audio
from voxtral_serve.audio import speech
from voxtral_serve.guard import forms as bodies
from voxtral_serve.guard import middleware as guard

RATE = 16000
REQUESTS = 50
BOUNDS = audio.Bounds(Fraction(4), "a test's limit", 1 << 28)
HOSTS = frozenset({"media.example.org", "other.example.org:8080"})
RULES = bodies.Rules(1 << 20, BOUNDS, BOUNDS, RATE, HOSTS, Fraction(37), True, frozenset(), speech.Detector())
SAMPLES = soundfile.read(DATA / "clips/010.opus", 2 * RATE, dtype="float32")[0]


def form(**fields: Any) -> tuple[bytes, str]:
    """A form as `requests` writes it, and its type."""
    prepared = Request("POST", "http://x", files=list(fields.items())).prepare()
    assert isinstance(prepared.body, bytes)
    return prepared.body, prepared.headers["Content-Type"]


def refusal(read: Any, *arguments: Any) -> bodies.RefusedError:
    with pytest.raises(bodies.RefusedError) as caught:
        read(*arguments)
    return caught.value


def heard(body: bytes) -> tuple[np.ndarray, int]:
    """The audio in a form that the guard has written."""
    start = body.index(b"RIFF")
    samples, rate = soundfile.read(io.BytesIO(body[start:]), dtype="float32", always_2d=False)
    return samples, rate


def test_limits_of_an_empty_environment() -> None:
    assert guard.limits({}) == (25 << 20, 600, 256 << 20, None, frozenset())


def test_limits() -> None:
    hosts = {"VOXTRAL_SERVE_MEDIA_HOSTS": " A.example.org, b:80,", "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}
    numbers = {"VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": "1", "VOXTRAL_SERVE_MAX_IN_FLIGHT": "7"}
    found = guard.limits({**hosts, **numbers})
    assert (found.file_bytes, found.in_flight, found.hosts) == (1 << 20, 7, {"a.example.org", "b:80"})


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "many", "1e3", " 1", "٣"])
@pytest.mark.parametrize("name", ["VLLM_MAX_AUDIO_DECODE_DURATION_S", "VOXTRAL_SERVE_MAX_IN_FLIGHT"])
def test_a_wrong_limit_is_named(name: str, value: str) -> None:
    with pytest.raises(guard.LimitError, match=f"{name} is .*expected a whole number"):
        guard.limits({name: value})


@pytest.mark.parametrize("hosts", ["http://a", "a/b", "*", "a b", "a@b"])
def test_a_wrong_host_is_named(hosts: str) -> None:
    with pytest.raises(guard.LimitError, match="expected hosts"):
        guard.limits({"VOXTRAL_SERVE_MEDIA_HOSTS": hosts, "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"})


def test_an_allowed_host_must_not_redirect() -> None:
    with pytest.raises(guard.LimitError, match="VLLM_MEDIA_URL_ALLOW_REDIRECTS=0"):
        guard.limits({"VOXTRAL_SERVE_MEDIA_HOSTS": "a"})


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT"])
@pytest.mark.parametrize("channels", [1, 2, 5])
def test_samples_are_those_that_vllm_would_read(subtype: str, channels: int) -> None:
    spread = np.stack([SAMPLES * (1 - 0.1 * index) for index in range(channels)], 1)
    content = inputs.encoded(spread, subtype=subtype)
    body, kind = form(file=("clip.wav", content), model=(None, "voxtral"), prompt=(None, "żółw"))
    clean = bodies.upload(body, kind, RULES)
    _, content_given = clean.form(0)
    samples, rate = heard(content_given)
    direct = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)[0].T.mean(axis=0)
    assert rate == RATE
    np.testing.assert_array_equal(samples, direct)
    assert clean.seconds == 2
    assert b'name="model"\r\n\r\nvoxtral\r\n' in content_given
    assert "żółw".encode() in content_given and clean.ignored == ["prompt"]


def test_what_is_written_is_a_form() -> None:
    """Read by the parser that it goes to, and by ours: again the same."""
    body, kind = form(file=("clip.wav", inputs.encoded(SAMPLES)), model=(None, "voxtral"))
    once = bodies.upload(body, kind, RULES)
    kind_given, content = once.form(0)
    twice = bodies.upload(content, kind_given.decode(), RULES)
    np.testing.assert_array_equal(heard(content)[0], heard(twice.form(0)[1])[0])
    assert twice.seconds == once.seconds


def test_fields_of_a_list_are_all_kept() -> None:
    body, kind = form(file=("clip.wav", inputs.encoded(SAMPLES)))
    more = b'\r\nContent-Disposition: form-data; name="include[]"\r\n\r\n'
    boundary = b"--" + kind.partition("boundary=")[2].encode()
    doubled = boundary + more + b"logprobs\r\n" + boundary + more + b"others\r\n" + body
    clean = bodies.upload(doubled, kind, RULES)
    assert clean.form(0)[1].count(b'name="include[]"') == 2
    assert clean.ignored == ["include"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": "xml"}, ["response_format is 'xml'", "json, text, verbose_json, srt, vtt"]),
        ({"timestamp_granularities[]": "word"}, ["is for verbose_json, and response_format is json"]),
        ({"response_format": "srt", "stream": "true"}, ["srt cannot be had with stream"]),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, str], words: list[str]) -> None:
    body, kind = form(
        file=("clip.wav", inputs.encoded(SAMPLES)), **{name: (None, value) for name, value in fields.items()}
    )
    assert all(word in str(refusal(bodies.upload, body, kind, RULES)) for word in words)


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
    assert bodies.upload(body, kind, RULES).ignored == ["language", "prompt"]
    assert bodies.upload(body, kind, RULES._replace(can=frozenset({"prompt"}))).ignored == ["language"]
    assert "words have no times" in str(refusal(bodies.upload, body, kind, RULES._replace(timed=False)))
    assert "does not translate" in str(refusal(bodies.translation, body, kind, RULES))
    assert bodies.translation(body, kind, RULES._replace(can=frozenset({"translate"}))).asked.task == "translate"


@pytest.mark.parametrize("piece_s", [4, 1])  # sent whole, or cut into pieces if anybody spoke
def test_silence_is_a_tenth_of_a_second(piece_s: int) -> None:
    body, kind = form(file=("clip.wav", inputs.encoded(np.zeros(2 * RATE, np.float32))))
    clean = bodies.upload(body, kind, RULES._replace(piece_s=Fraction(piece_s)))
    assert clean.silent and clean.seconds == 2
    assert len(heard(clean.form(0)[1])[0]) == RATE / 10


def test_the_longest_clip_is_exact() -> None:
    longest = np.zeros(4 * RATE + 1, np.float32)
    assert audio.decode(inputs.encoded(longest[:-1]), BOUNDS, RATE).seconds == 4
    with pytest.raises(audio.AudioError, match=r"lasts 4\.00 s and this server takes at most 4\.00 s"):
        audio.decode(inputs.encoded(longest), BOUNDS, RATE)


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_no_other_rate_makes_a_clip_longer(rate: int) -> None:
    """Once at the model's rate, a clip of the longest length has no sample more than the longest clip."""
    clip = audio.decode(inputs.encoded(np.zeros(4 * rate, np.float32), rate), BOUNDS, RATE)
    assert len(clip.samples) * Fraction(RATE, clip.rate) == 4 * RATE
    with pytest.raises(audio.AudioError, match="at most"):
        audio.decode(inputs.encoded(np.zeros(4 * rate + 1, np.float32), rate), BOUNDS, RATE)


def test_no_more_is_decoded_than_the_longest_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two hours in a small file: a block past the limit, and no more."""
    hours = inputs.encoded(np.zeros(2 * 3600 * RATE, np.int16), RATE, "FLAC")
    assert len(hours) < 1 << 20
    read: list[int] = []

    class Counting(soundfile.SoundFile):  # type: ignore[misc,unused-ignore]
        def read(self, *args: Any, **kwargs: Any) -> Any:
            block = super().read(*args, **kwargs)
            read.append(len(block))
            return block

    monkeypatch.setattr(audio.soundfile, "SoundFile", Counting)
    with pytest.raises(audio.AudioError, match=r"lasts 7200\.00 s"):
        audio.decode(hours, BOUNDS, RATE)
    assert 4 * RATE < sum(read) <= 4 * RATE + audio.BLOCK_SAMPLES


def test_bytes_of_samples_are_bounded() -> None:
    small = BOUNDS._replace(most_bytes=4 * RATE)
    with pytest.raises(audio.AudioError, match="VLLM_MAX_AUDIO_DECODE_BYTES"):
        audio.decode(inputs.encoded(SAMPLES), small, RATE)


def test_a_file_that_is_too_large() -> None:
    body, kind = form(file=("clip.wav", bytes((1 << 20) + 1)))
    error = refusal(bodies.upload, body, kind, RULES)
    assert (error.status, error.param, error.code) == (413, "file", "file_too_large")
    assert "1048577 bytes and this server takes at most 1048576 (1 MiB" in str(error)


def chat(part: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()


def url(address: str) -> bytes:
    return chat({"type": "audio_url", "audio_url": {"url": address}})


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
    error = refusal(bodies.chat, url(address), "application/json", RULES)
    assert error.status == 400
    assert "this server takes data: URLs or URLs of media.example.org" in str(error)


@pytest.mark.parametrize(
    "address", ["https://media.example.org/a.wav?b=c", "HTTP://Media.Example.ORG/", "http://other.example.org:8080/"]
)
def test_a_url_of_an_allowed_host(address: str) -> None:
    passed = json.loads(bodies.chat(url(address), "application/json", RULES).content)
    assert passed["messages"][0]["content"][0]["audio_url"]["url"] == address


@pytest.mark.parametrize("scheme", ["data:audio/mpeg;base64,", "DATA:;base64,", "data:audio/wav;codecs=1;BASE64,"])
def test_audio_in_a_data_url_is_made_clean(scheme: str) -> None:
    text = base64.b64encode(inputs.encoded(SAMPLES, subtype="FLOAT")).decode()
    for part in (
        {"type": "audio_url", "audio_url": {"url": scheme + text}},
        {"type": "audio_url", "audio_url": scheme + text},
    ):
        body = bodies.chat(chat(part), "application/json", RULES)
        assert body.seconds == 2
        clean = json.loads(body.content)["messages"][0]["content"][0]["audio_url"]["url"]
        assert clean.startswith("data:audio/wav;base64,")
        np.testing.assert_array_equal(heard(base64.b64decode(clean.partition(",")[2]))[0], SAMPLES)


def test_clips_of_one_chat_share_the_limit() -> None:
    """Of 4 s: two of 2 s are taken, and a third is not."""
    data = base64.b64encode(inputs.encoded(SAMPLES)).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    asked = {"messages": [{"role": "user", "content": [part, part]}]}
    assert bodies.chat(json.dumps(asked).encode(), "", RULES).seconds == 4
    asked["messages"].append(asked["messages"][0])
    assert refusal(bodies.chat, json.dumps(asked).encode(), "", RULES).code == "clip_too_long"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"audio_url": {"url": "http://127.0.0.1/"}}, ["data: URLs"]),
        ({"type": "audio_url"}, ["has none"]),
        ({"type": "audio_url", "audio_url": {"url": 7}}, ["no text called url"]),
        ({"type": "audio_url", "audio_url": {"url": "data:audio/wav,AAAA"}}, ["base64"]),
        ({"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}}, ["no base64"]),
        (
            {"type": "text", "text": "a", "image_url": "data:;base64,AAAA"},
            ["has image_url", "audio_url, input_audio, text"],
        ),
        ({"type": "audio_url", "audio_url": None, "uuid": "of another client"}, ["has uuid"]),
        (7, ["no object"]),
    ],
)
def test_a_part_of_a_chat_that_is_refused(content: Any, words: list[str]) -> None:
    error = refusal(bodies.chat, chat(content), "", RULES)
    assert error.status == 400
    assert all(word in str(error) for word in ("messages[0].content", *words)), str(error)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a": NaN}', b"[]", b'{"messages": 1}'])
def test_a_body_that_is_no_chat(body: bytes) -> None:
    assert refusal(bodies.chat, body, "", RULES).code == "invalid_json"


def test_text_of_a_chat_is_kept() -> None:
    asked = {
        "messages": [
            {"role": "system", "content": "żółw"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ]
    }
    asked |= {"model": "m", "temperature": 0.5, "other": {"kept": [1, None]}}  # type: ignore[dict-item]
    assert json.loads(bodies.chat(json.dumps(asked).encode(), "", RULES).content) == asked


# ---- The middleware around an application of no cost


class Asked:
    """What the application behind the guard got, and what a client of the guard was answered."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.status = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers.append(dict(scope["headers"]))
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"text": ""}'})

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)


def guarded(**more: Any) -> tuple[guard.Guard, Asked]:
    app = Asked()
    made = guard.Guard(app)
    bounds = audio.Bounds(Fraction(600), "a test's limit", 1 << 28)
    made.settled = guard.Settled(RULES._replace(bounds=bounds), 16, False, True, None)._replace(**more)
    return made, app


async def post(made: guard.Guard, app: Asked, body: bytes, kind: str, *more: tuple[bytes, bytes]) -> None:
    """In pieces of 64 KiB, as uvicorn hands them on."""
    pieces = [body[start : start + (1 << 16)] for start in range(0, len(body), 1 << 16)]
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    waiting = iter(messages)

    async def receive() -> Any:
        if (message := next(waiting, None)) is None:
            await asyncio.Event().wait()  # a client that stays
        return message

    headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body)), *more]
    scope = {"type": "http", "method": "POST", "path": "/v1/audio/transcriptions", "headers": headers}
    await made(scope, receive, app.send)


def test_the_application_gets_the_new_body_and_no_old_header() -> None:
    made, app = guarded()
    body, kind = form(file=("clip.flac", inputs.encoded(SAMPLES, RATE, "FLAC")))
    asyncio.run(post(made, app, body, kind, (b"transfer-encoding", b"chunked"), (b"x-request-id", b"a b\r\nc")))
    (headers,) = app.headers
    assert app.status == 200
    assert headers[b"content-length"] == b"%d" % len(app.bodies[0])
    assert b"transfer-encoding" not in headers
    assert re.fullmatch(rb"[0-9a-f]{32}", headers[b"x-request-id"])
    np.testing.assert_allclose(heard(app.bodies[0])[0], SAMPLES, atol=1e-4)


def test_the_key_is_asked_for_before_the_body() -> None:
    made, app = guarded(verify=lambda headers: False)

    async def receive() -> Any:
        raise AssertionError("the body was read")

    scope = {"type": "http", "method": "POST", "path": "/v1/audio/transcriptions", "headers": []}
    asyncio.run(made(scope, receive, app.send))
    assert (app.status, app.bodies) == (401, [])


def test_a_request_ends_with_its_slot_free() -> None:
    """Whether it is served, refused, or given up while its body comes."""
    made, app = guarded(most=1)
    good, bad = form(file=("clip.wav", inputs.encoded(SAMPLES))), form(file=("clip.wav", b"nonsense"))

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def all_of_them() -> list[int]:
        statuses = []
        for body, kind in (good, bad, good):
            await post(made, app, body, kind)
            statuses.append(app.status)
        await made({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}, gone, app.send)
        await post(made, app, *good)
        return [*statuses, app.status]

    assert asyncio.run(all_of_them()) == [200, 400, 200, 200]
    assert made.in_flight == 0


def test_named_twice_it_acts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a profile names it and the container's entrypoint does."""
    lines: list[str] = []
    monkeypatch.setattr(guard.log, "info", lambda line, *values: lines.append(line % values))
    outer, app = guarded()
    outer.app = guard.Guard(outer.app)
    body, kind = form(file=("clip.wav", inputs.encoded(SAMPLES)))
    asyncio.run(post(outer, app, body, kind))
    assert (app.status, len(app.bodies)) == (200, 1)  # the inner one, which knows no vLLM, would say 503
    assert len(lines) == 1


def test_nothing_is_served_before_vllm_is_known() -> None:
    made, app = guarded()
    made.settled = None
    body, kind = form(file=("clip.wav", inputs.encoded(SAMPLES)))
    asyncio.run(post(made, app, body, kind))
    assert (app.status, app.bodies) == (503, [])


@pytest.mark.parametrize(("container", "subtype"), [("WAV", "PCM_16"), ("OGG", "OPUS")])
def test_a_clip_takes_less_than_2_ms_of_the_event_loop(container: str, subtype: str) -> None:
    """12 s of it: the rest is work of other threads."""
    made, app = guarded()
    body, kind = form(
        file=("clip", inputs.encoded(np.tile(SAMPLES, 6), RATE, container, subtype)), model=(None, "voxtral")
    )

    async def measured() -> float:
        for _ in range(3):
            await post(made, app, body, kind)
        start = time.thread_time()
        for _ in range(REQUESTS):
            await post(made, app, body, kind)
        return (time.thread_time() - start) / REQUESTS

    took = asyncio.run(measured())
    print(f"{container}: {1000 * took:.2f} ms of the event loop's thread for each of {REQUESTS} requests")
    assert app.status == 200
    assert took < 0.002
