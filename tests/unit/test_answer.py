"""Pieces of a clip, each a request of its own to the application behind the guard, and one answer of them."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from voxtral_serve.audio.decode import Clip
from voxtral_serve.audio.speech import Piece
from voxtral_serve.guard.ask import AT_ONCE
from voxtral_serve.guard.fields import TranscriptRequest
from voxtral_serve.guard.pieces import ClipPieces
from voxtral_serve.guard.upload import Upload, answer
from voxtral_serve.transcript.formats import AnswerFormat

RATE = 16000
PIECES = 20


def upload(streamed: bool = False, silent: bool = False, form: str = "json") -> Upload:
    """Pieces of a second, whose samples say which they are."""
    count = 1 if silent else PIECES
    samples = np.repeat(np.arange(1, count + 1, dtype=np.float32) / 100, RATE)
    pieces = tuple(Piece(n, n + 1, (n, n + 1)) for n in range(count))
    answer_format = AnswerFormat(form, frozenset({"segment"}), None, "transcribe")
    return Upload(
        TranscriptRequest(answer_format, streamed, ignored=("prompt", "language")),
        ClipPieces(Clip(samples, RATE), pieces, (None,) * count, silent),
    )


class Vllm:
    """Answers a piece with its number, the later pieces first."""

    def __init__(self, failing: int | None = None, late: bool = False, step_s: float = 0.02) -> None:
        self.failing, self.late, self.step_s = failing, late, step_s
        self.running, self.most, self.dropped = 0, 0, 0
        self.cut, self.refuses = False, not late
        self.ids: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.answer(scope, await receive(), receive, send)
        finally:
            self.running -= 1

    async def answer(self, scope: Any, asked: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        self.ids.append(headers[b"x-request-id"])
        content = asked["body"]
        assert int(headers[b"content-length"]) == len(content)
        samples = np.frombuffer(content[content.index(b"data", content.index(b"RIFF")) + 8 :][: RATE * 4], "<f4")
        number = round(float(samples[0]) * 100) - 1
        gone = asyncio.create_task(receive())
        try:
            await asyncio.wait([gone], timeout=self.step_s * (1 + (PIECES - number) % AT_ONCE))
        finally:
            gone.cancel()
        if gone.done():
            assert gone.result() == {"type": "http.disconnect"}
            self.dropped += 1
            return
        failed = number == self.failing
        status = 404 if failed and self.refuses else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-vllm", b"1")]})
        if status != 200:
            await send({"type": "http.response.body", "body": b'{"error": "no such model"}'})
        elif b'name="stream"' not in content and not self.late:
            text = {"text": f" {number}.", "usage": {"type": "duration", "seconds": 1}}
            await send({"type": "http.response.body", "body": json.dumps(text).encode()})
        else:
            await self.events(number, failed, send)

    async def events(self, number: int, failed: bool, send: Any) -> None:
        usage = {"prompt_tokens": 39, "completion_tokens": 2, "total_tokens": 41}
        events: list[Any] = [{"choices": [{"delta": {"content": text}}]} for text in ("", " ", f" {number}", ".")]
        events += [{"choices": [], "usage": usage}]
        if failed:  # vLLM 0.20.0 tells a wrong language like this, at the beginning
            events[0 if number == 0 else -1] = {"error": {"message": "boom", "code": 400}}
        data = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
        data += b"" if self.cut else b"data: [DONE]\n\n"
        for start in range(0, len(data), 7):  # wherever the network cuts them
            await send({"type": "http.response.body", "body": data[start : start + 7], "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def run(vllm: Vllm, asked: Upload, gone_after: float | None = None) -> list[Any]:
    """What the client is sent."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await (asyncio.sleep(gone_after) if gone_after is not None else asyncio.Event().wait())
        return {"type": "http.disconnect"}

    async def whole() -> None:
        scope = {"type": "http", "headers": [(b"content-length", b"9"), (b"authorization", b"Bearer x")]}
        before = asyncio.all_tasks()
        await answer(asked, vllm, scope, receive, send, "abc", None)
        await asyncio.sleep(0)  # in which those that were told to end do
        assert asyncio.all_tasks() == before

    asyncio.run(asyncio.wait_for(whole(), 20))
    return sent


def data(sent: list[Any]) -> list[Any]:
    lines = b"".join(message.get("body", b"") for message in sent).decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


NUMBERS = " ".join(f"{number}." for number in range(PIECES))


def test_pieces_are_joined_in_order_and_not_all_at_once() -> None:
    vllm = Vllm()
    start, body = run(vllm, upload())
    assert start["status"] == 200
    assert dict(start["headers"])[b"x-voxtral-ignored"] == b"prompt, language"
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(body["body"])
    assert json.loads(body["body"]) == {"text": NUMBERS, "usage": {"type": "duration", "seconds": PIECES}}
    assert vllm.most == AT_ONCE
    assert sorted(vllm.ids) == sorted([b"abc", *(b"abc-%d" % number for number in range(1, PIECES))])


def test_events_are_openais() -> None:
    start, *rest = run(Vllm(late=True), upload(streamed=True))
    assert start["status"] == 200
    assert dict(start["headers"])[b"content-type"].startswith(b"text/event-stream")
    *deltas, done = data(rest)
    assert {delta["type"] for delta in deltas} == {"transcript.text.delta"}
    assert "".join(delta["delta"] for delta in deltas) == NUMBERS
    usage = {"type": "tokens", "input_tokens": 39 * PIECES, "output_tokens": 2 * PIECES, "total_tokens": 41 * PIECES}
    assert done == {"type": "transcript.text.done", "text": NUMBERS, "usage": usage}
    assert rest[-1] == {"type": "http.response.body", "body": b""}


def test_the_last_event_has_the_fields_of_verbose_json() -> None:
    (_, body) = run(Vllm(), upload(form="verbose_json"))
    *deltas, done = data(run(Vllm(late=True), upload(streamed=True, form="verbose_json"))[1:])
    assert "".join(delta["delta"] for delta in deltas) == NUMBERS
    assert len(done["segments"]) == PIECES
    assert done == {"type": "transcript.text.done"} | json.loads(body["body"])


@pytest.mark.parametrize("streamed", [False, True])
def test_what_vllm_refuses_is_passed_on(streamed: bool) -> None:
    vllm = Vllm(failing=0)
    start, body = run(vllm, upload(streamed))
    assert (start["status"], body["body"]) == (404, b'{"error": "no such model"}')
    assert vllm.running == 0


def test_a_failure_in_the_middle_ends_the_stream_without_done() -> None:
    vllm = Vllm(failing=3, late=True)
    *deltas, failed = data(run(vllm, upload(streamed=True))[1:])
    assert "".join(delta["delta"] for delta in deltas).startswith("0. 1. 2.")
    assert failed == {"error": {"message": "boom", "code": 400}}  # vLLM's own
    assert vllm.running == 0


def test_a_piece_refused_after_others_were_sent_is_an_error_of_the_stream() -> None:
    vllm = Vllm(failing=3, late=True)
    vllm.refuses = True
    failed = data(run(vllm, upload(streamed=True))[1:])[-1]["error"]
    assert failed["type"] == "server_error" and "404" in failed["message"] and "no such model" in failed["message"]


def test_a_stream_without_an_end_has_failed() -> None:
    vllm = Vllm(late=True)
    vllm.cut = True
    assert "ended without [DONE]" in data(run(vllm, upload(streamed=True))[1:])[-1]["error"]["message"]


def test_a_failure_at_the_beginning_of_a_stream_has_its_status() -> None:
    start, body = run(Vllm(failing=0, late=True), upload(streamed=True))
    assert start["status"] == 400
    assert json.loads(body["body"])["error"]["message"] == "boom"


@pytest.mark.parametrize("streamed", [False, True])
def test_who_goes_has_his_pieces_dropped(streamed: bool) -> None:
    """vLLM is told of the first; what is left of the others is cancelled."""
    vllm = Vllm(late=streamed, step_s=60)
    assert run(vllm, upload(streamed), gone_after=0.01) == []
    assert vllm.dropped >= 1 and vllm.running == 0 and len(vllm.ids) <= AT_ONCE


@pytest.mark.parametrize(
    ("form", "expected"), [("text", b"\n"), ("srt", b""), ("vtt", b"WEBVTT\n\n"), ("json", b'{"text": ""')]
)
def test_silence_has_no_text(form: str, expected: bytes) -> None:
    start, body = run(Vllm(), upload(silent=True, form=form))
    assert start["status"] == 200
    assert body["body"].startswith(expected) and b"0." not in body["body"]
    (done,) = data(run(Vllm(late=True), upload(streamed=True, silent=True))[1:])
    assert done["text"] == "" and done["usage"]["total_tokens"] == 41
