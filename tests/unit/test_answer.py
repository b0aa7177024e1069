"""Pieces of a clip, each a request of its own to the engine, and one answer of them."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from engines import PROMPT, EngineClient, transcriber
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from voxtral_serve.audio.decode import Clip
from voxtral_serve.audio.speech import Piece
from voxtral_serve.guard.answer import answered
from voxtral_serve.guard.asgi import GoneError, connected
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.fields import Sampling, TranscriptRequest
from voxtral_serve.guard.labeller import LabelError, Labels
from voxtral_serve.guard.pieces import ClipPieces, joined
from voxtral_serve.guard.timing import UploadTiming
from voxtral_serve.guard.transcriber import AT_ONCE
from voxtral_serve.transcript.formats import AnswerFormat
from voxtral_serve.transcript.words import TokenStream

RATE = 16000
PIECES = 20


def refused() -> Exception:
    return VLLMValidationError("the clip lasts too long")


def request_of(form: AnswerFormat, streamed: bool, language: str | None) -> TranscriptRequest:
    return TranscriptRequest(
        form=form,
        streamed=streamed,
        logprobs=False,
        ignored=("prompt", "language"),
        model="voxtral",
        language=language,
        prompt="",
        sampling=Sampling(),
    )


class Upload(NamedTuple):
    request: TranscriptRequest
    audio: ClipPieces


def upload(streamed: bool = False, silent: bool = False, form: str = "json", language: str | None = None) -> Upload:
    """Pieces of a second, whose samples say which they are."""
    count = 1 if silent else PIECES
    samples = np.repeat(np.arange(1, count + 1, dtype=np.float32) / 100, RATE)
    pieces = tuple(Piece(n, n + 1, (n, n + 1)) for n in range(count))
    answer_format = AnswerFormat(form, frozenset({"segment"}), language, "transcribe")
    return Upload(
        request_of(answer_format, streamed, language),
        ClipPieces(Clip(samples, RATE), pieces, (None,) * count, silent),
    )


def number_of(samples: Any) -> int:
    return round(float(samples[0]) * 100) - 1


def engine(failing: int | None = None, error: Any = None, step_s: float = 0.02) -> EngineClient:
    """It answers a piece with its number, the later pieces first."""
    return EngineClient(
        lambda samples: ["", " ", f" {number_of(samples)}", "."],
        lambda samples: number_of(samples) == failing,
        error,
        lambda samples: step_s * (1 + (PIECES - number_of(samples)) % AT_ONCE),
    )


def run(
    client: EngineClient,
    asked: Upload,
    gone_after: float | None = None,
    stream: TokenStream | None = None,
    labels: Labels | None = None,
    sent: list[Any] | None = None,
) -> list[Any]:
    """What the client is sent, in `sent` as it is sent. Raises RefusedError and GoneError."""
    sent = [] if sent is None else sent

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await (asyncio.sleep(gone_after) if gone_after is not None else asyncio.Event().wait())
        return {"type": "http.disconnect"}

    async def whole() -> None:
        before = asyncio.all_tasks()
        try:
            async with connected(receive):
                made = transcriber(client)
                language = made.check(asked.request)
                timing = UploadTiming(time.monotonic())
                sent.extend(await answered(made, *asked, language, stream, "abc", send, timing, labels))
        finally:
            await asyncio.sleep(0)  # in which those that were told to end do
            assert asyncio.all_tasks() == before

    asyncio.run(asyncio.wait_for(whole(), 20))
    return sent


def data(sent: list[Any]) -> list[Any]:
    lines = b"".join(message.get("body", b"") for message in sent).decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


NUMBERS = " ".join(f"{number}." for number in range(PIECES))


def test_pieces_are_joined_in_order_and_not_all_at_once() -> None:
    client = engine()
    start, body = run(client, upload())
    assert start["status"] == 200
    assert dict(start["headers"])[b"x-voxtral-ignored"] == b"prompt, language"
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(body["body"])
    assert json.loads(body["body"]) == {"text": NUMBERS, "usage": {"type": "duration", "seconds": PIECES}}
    assert client.most == AT_ONCE
    assert sorted(client.ids) == sorted(["abc", *(f"abc-{number}" for number in range(1, PIECES))])


def test_a_language_without_blanks_has_none_between_pieces() -> None:
    _, body = run(engine(), upload(language="ja"))
    assert json.loads(body["body"])["text"] == NUMBERS.replace(" ", "")


def test_events_are_openais() -> None:
    start, *rest = run(engine(), upload(streamed=True))
    assert start["status"] == 200
    assert dict(start["headers"])[b"content-type"].startswith(b"text/event-stream")
    *deltas, done = data(rest)
    assert {delta["type"] for delta in deltas} == {"transcript.text.delta"}
    assert "".join(delta["delta"] for delta in deltas) == NUMBERS
    counts = {"input_tokens": PROMPT * PIECES, "output_tokens": 4 * PIECES, "total_tokens": (PROMPT + 4) * PIECES}
    assert done == {"type": "transcript.text.done", "text": NUMBERS, "usage": {"type": "tokens", **counts}}
    assert rest[-1] == {"type": "http.response.body", "body": b""}


SENTENCE = " Straßenbahnhaltestellenverzeichnis."  # one word, as the tokens below write


@pytest.mark.parametrize(
    ("model", "form", "text", "hint", "expected"),
    [
        ("voxtral", "verbose_json", SENTENCE, None, {"language": "german"}),
        ("voxtral", "verbose_json", SENTENCE, "fr", {"language": "german"}),  # a hint has no effect
        ("voxtral", "verbose_json", " Ja.", "fr", {"language": "french"}),
        ("voxtral", "verbose_json", " Ja.", "sw", {"language": "swahili"}),
        ("voxtral", "verbose_json", " Ja.", None, {"language": None}),
        ("voxtral", "json", SENTENCE, None, {}),
        ("gpt-transcribe", "json", SENTENCE, "fr", {"languages": [{"code": "de"}]}),
        ("gpt-transcribe", "json", " Ja.", "fr", {"languages": []}),
    ],
)
def test_the_language_of_the_text(model: str, form: str, text: str, hint: str | None, expected: dict[str, Any]) -> None:
    """Of a model whose tokens have times, which are those that are not told the language."""
    stream = STREAM._replace(decode=lambda tokens: text)

    def asked(streamed: bool) -> Upload:
        plain = upload(streamed, form=form, language=hint)
        audio = ClipPieces(
            Clip(np.full(RATE, 0.01, np.float32), RATE), plain.audio.pieces[:1], (np.zeros(0, bool),), False
        )
        return Upload(plain.request._replace(model=model), audio)

    client = engine()
    client.texts = lambda samples: [text]
    _, body = run(client, asked(False), stream=stream)
    done = data(run(client, asked(True), stream=stream)[1:])[-1]
    for content in (json.loads(body["body"]), done):
        assert {name: content[name] for name in ("language", "languages") if name in content} == expected


def test_a_model_that_is_told_the_language_has_it_in_its_answer() -> None:
    client = engine()
    client.texts = lambda samples: [SENTENCE]
    for hint, task, told in (
        ("fr", "transcribe", "french"),
        ("pl", "transcribe", "polish"),
        (None, "transcribe", "german"),
        ("ja", "translate", "english"),
    ):
        asked = upload(form="verbose_json", language=hint)
        form = asked.request.form._replace(task=task)
        _, body = run(client, asked._replace(request=asked.request._replace(form=form)))
        answer = json.loads(body["body"])
        assert (answer["language"], answer["text"].count(" ")) == (told, PIECES - 1)


def test_each_text_is_sent_before_the_engine_makes_the_next() -> None:
    sent: list[Any] = []

    class Waiting(EngineClient):
        """It goes on with a piece once the client has its last text."""

        async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            async for output in super().generate(*args, **kwargs):
                yield output
                while output.outputs[0].text.encode() not in b"".join(each.get("body", b"") for each in sent):
                    await asyncio.sleep(0.001)

    client = Waiting(lambda samples: [f"{part}{number_of(samples)}." for part in "abc"])
    *deltas, done = data(run(client, upload(streamed=True), sent=sent)[1:])
    assert len(deltas) == 3 * PIECES
    assert done["text"] == " ".join(f"a{number}.b{number}.c{number}." for number in range(PIECES))


def test_the_last_event_has_the_fields_of_verbose_json() -> None:
    (_, body) = run(engine(), upload(form="verbose_json"))
    *deltas, done = data(run(engine(), upload(streamed=True, form="verbose_json"))[1:])
    assert "".join(delta["delta"] for delta in deltas) == NUMBERS
    assert len(done["segments"]) == PIECES
    assert done == {"type": "transcript.text.done"} | json.loads(body["body"])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(None, 500, "failed"), (refused, 400, "invalid_value"), (EngineDeadError, 503, "engine_dead")],
)
def test_a_failure_before_any_text_has_its_status(streamed: bool, error: Any, status: int, code: str) -> None:
    client = engine(failing=0, error=error)
    client.texts = lambda samples: [f"{number_of(samples)}"]
    with pytest.raises(RefusedError) as caught:
        run(client, upload(streamed))
    assert (caught.value.status, caught.value.code) == (status, code)
    assert client.running == 0


def test_a_failure_in_the_middle_ends_the_stream_without_done() -> None:
    client = engine(failing=3)
    *deltas, failed = data(run(client, upload(streamed=True))[1:])
    assert "".join(delta["delta"] for delta in deltas).startswith("0. 1. 2.")
    assert (failed["error"]["type"], failed["error"]["code"]) == ("server_error", "failed")
    assert client.running == 0


def test_an_unknown_language_and_a_dead_engine_are_refused_at_once() -> None:
    client = engine()
    with pytest.raises(RefusedError, match="Unsupported language") as caught:
        run(client, upload(language="xx"))
    assert (caught.value.status, caught.value.param) == (400, "language")
    client.errored = True
    with pytest.raises(RefusedError, match="the engine has died"):
        run(client, upload())
    assert client.ids == []


STREAM = TokenStream(32, 33, 0.08, lambda tokens: " word", lambda token: b" word")


Finder = Callable[[Any], Awaitable[Sequence[int | str]]]  # from words to speakers


class Found(Labels):
    """Labels of a function."""

    def __init__(self, find: Finder, error: LabelError | None = None) -> None:
        self.find, self.error = find, error

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    async def __call__(self, words: Any) -> Sequence[int | str]:
        return await self.find(words)


def diarized(
    form: str,
    streamed: bool,
    find: Finder,
    optional: bool = False,
    error: LabelError | None = None,
    text: str = " word",
) -> list[Any]:
    """What a client is sent that asks for the speakers of a word in each piece."""
    asked = upload(streamed, form=form)
    answer_format = asked.request.form._replace(speakers=True)
    request = asked.request._replace(form=answer_format, optional=optional, ignored=())
    audio = asked.audio._replace(voiced=(np.zeros(0, bool),) * PIECES)
    client = engine()
    client.texts = lambda samples: [text]
    return run(client, Upload(request, audio), stream=STREAM, labels=Found(find, error))


async def odd(words: Any) -> list[int]:
    """Two speakers, a piece each."""
    assert [int(start) for start, _ in words] == list(range(PIECES))
    return [number % 2 for number in range(PIECES)]


async def broken(words: Any) -> list[int]:
    raise LabelError("the process that labels speakers ended with signal SIGKILL")


def test_speakers_in_json_are_mistrals() -> None:
    answer = json.loads(diarized("json", False, odd)[1]["body"])
    assert (answer["text"], answer["model"]) == (" ".join(["word"] * PIECES), "voxtral")
    assert answer["segments"][1] == {
        **{"type": "transcription_segment", "text": "word", "start": 1.0, "end": 1.04},
        "speaker_id": "speaker_2",
    }
    assert data(diarized("json", True, odd)[1:])[-1]["segments"] == answer["segments"]


def mistrals(streamed: bool, text: str, *granularities: str, find: Finder | None = None) -> list[Any]:
    """What Mistral's client is sent, for a text of a piece."""
    asked = upload(streamed)
    form = asked.request.form._replace(granularities=frozenset(granularities), speakers=find is not None)
    request = asked.request._replace(form=form, mistral=True, optional=True, ignored=())
    audio = asked.audio._replace(pieces=asked.audio.pieces[:1], voiced=(np.zeros(0, bool),))
    client = engine()
    client.texts = lambda samples: [text]
    found = None if find is None else Found(find)
    return run(client, Upload(request, audio), stream=STREAM._replace(decode=lambda tokens: text), labels=found)


async def one(words: Any) -> list[int]:
    return [0]


@pytest.mark.parametrize("find", [None, one, broken])
@pytest.mark.parametrize("granularities", [(), ("segment",), ("word",), ("word", "segment")])
def test_mistrals_answer(granularities: tuple[str, ...], find: Finder | None) -> None:
    """The fields and events of mistralai.client.models: transcriptionresponse.py and transcriptionstream*.py."""
    start, body = mistrals(False, SENTENCE, *granularities, find=find)
    answer = json.loads(body["body"])
    speaker = "speaker_1" if find is one else None
    times = {"text": SENTENCE.strip(), "start": 0.0, "end": 0.04, "speaker_id": speaker}
    assert answer == {
        **{"text": SENTENCE.strip(), "model": "voxtral", "language": "de"},
        "usage": {
            **{"prompt_tokens": PROMPT, "completion_tokens": 1, "total_tokens": PROMPT + 1},
            "prompt_audio_seconds": PIECES,
        },
        "segments": [{"type": "transcription_segment", **times}] if granularities or find is one else [],
    }
    events = [message["body"].decode() for message in mistrals(True, SENTENCE, *granularities, find=find)[1:-1]]
    parts = [event.rstrip("\n").split("\n") for event in events]
    contents = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name for name, _ in parts] == [f"event: {content['type']}" for content in contents]
    delta, language, *segments, done = contents
    assert delta == {"type": "transcription.text.delta", "text": SENTENCE.strip()}
    assert language == {"type": "transcription.language", "audio_language": "de"}
    assert segments == [{**each, "type": "transcription.segment"} for each in answer["segments"]]
    unlabelled = {"ignored": ["diarize"]} if find is broken else {}
    assert done == {**answer, "type": "transcription.done", **unlabelled}
    assert (b"x-voxtral-ignored" in dict(start["headers"])) == bool(unlabelled)


def test_channels_have_the_words_of_their_pieces() -> None:
    """Two channels of two pieces each; the second is silent in the first half."""
    asked = upload(form="json")
    clips = [Clip(np.full(2 * RATE, level, np.float32), RATE) for level in (0.01, 0.02)]
    whole = [Piece(n, n + 1, (n, n + 1)) for n in range(2)]
    audio = joined(
        [
            ClipPieces(clips[0], tuple(whole), (np.zeros(0, bool),) * 2, False),
            ClipPieces(clips[1], (whole[1],), (np.zeros(0, bool),), False),
        ]
    )
    assert [audio.clip_of(number).samples[0] for number in range(3)] == [np.float32(0.01)] * 2 + [np.float32(0.02)]
    request = asked.request._replace(form=asked.request.form._replace(channels=True, granularities=frozenset({"word"})))
    client = engine()
    client.texts = lambda samples: [" word"]
    answer = json.loads(run(client, Upload(request, audio), stream=STREAM)[1]["body"])
    assert (answer["text"], answer["usage"]["seconds"]) == ("word word word", 4)
    assert [(each["speaker_id"], each["start"]) for each in answer["segments"]] == [
        ("channel-1", 0.0), ("channel-1", 1.0), ("channel-2", 1.0)
    ]  # fmt: skip
    silent = ClipPieces(clips[0], (whole[0],), (None,), True)
    empty = json.loads(run(engine(), Upload(request, joined([silent, silent])), stream=STREAM)[1]["body"])
    assert (empty["text"], empty["segments"], empty["usage"]["seconds"]) == ("", [], 4)


def test_mistrals_answer_without_a_clear_language() -> None:
    _, body = mistrals(False, " Ja.")
    assert json.loads(body["body"])["language"] is None
    _, *events, _ = mistrals(True, " Ja.")
    kinds = [event["body"].decode().split("\n")[0] for event in events]
    assert kinds == ["event: transcription.text.delta", "event: transcription.done"]


def test_known_speakers_have_their_names() -> None:
    async def named(words: Any) -> list[int | str]:
        return ["Ann", 0] * (PIECES // 2)

    for form, key, unknown in (("json", "speaker_id", "speaker_1"), ("diarized_json", "speaker", "A")):
        (_, body) = diarized(form, False, named)
        assert [each[key] for each in json.loads(body["body"])["segments"]] == ["Ann", unknown] * (PIECES // 2)


def test_events_of_segments_come_between_the_text_and_its_end() -> None:
    (_, body) = diarized("diarized_json", False, odd)
    events = data(diarized("diarized_json", True, odd)[1:])
    deltas, segments, done = events[:PIECES], events[PIECES:-1], events[-1]
    assert {each["type"] for each in deltas} == {"transcript.text.delta"}
    assert segments == json.loads(body["body"])["segments"]
    assert [each["speaker"] for each in segments] == ["A", "B"] * (PIECES // 2)
    assert done["type"] == "transcript.text.done" and done.keys() == {"type", "text", "usage"}


def test_speakers_that_cannot_be_had() -> None:
    with pytest.raises(RefusedError, match=r"^no speaker labels: .* ended with signal SIGKILL$") as caught:
        diarized("srt", False, broken)
    assert (caught.value.status, caught.value.code) == (503, "no_speaker_labels")
    *deltas, failed = data(diarized("diarized_json", True, broken)[1:])
    assert len(deltas) == PIECES and failed["error"]["code"] == "no_speaker_labels"


def test_labels_that_have_failed_end_the_text() -> None:
    error = LabelError("the process that labels speakers ended with signal SIGKILL")

    async def never(words: Any) -> list[int]:
        raise AssertionError("the text was completed")

    for streamed in (False, True):
        with pytest.raises(RefusedError, match=r"^no speaker labels: ") as caught:
            diarized("diarized_json", streamed, never, error=error)
        assert (caught.value.status, caught.value.code) == (503, "no_speaker_labels")
    _, body = diarized("json", False, broken, optional=True, error=error)
    assert json.loads(body["body"])["text"] == " ".join(["word"] * PIECES)


def test_optional_speakers_that_cannot_be_had() -> None:
    start, body = diarized("srt", False, broken, optional=True)
    assert dict(start["headers"])[b"x-voxtral-ignored"] == b"diarize"
    assert body["body"].startswith(b"1\n00:00:00,000 --> 00:00:06,040\nword word")
    start, body = diarized("json", False, broken, optional=True)
    assert json.loads(body["body"]).keys() == {"text", "usage"}
    start, *rest = diarized("diarized_json", True, broken, optional=True)
    assert b"x-voxtral-ignored" not in dict(start["headers"])  # they are sent before
    *_, segment, done = data(rest)
    assert segment["speaker"] is None and done["ignored"] == ["diarize"]


def test_optional_speakers_of_words_without_times() -> None:
    """Only a format that has times itself fails."""
    for form in ("json", "text"):
        start, body = diarized(form, False, odd, optional=True, text=" two words")
        assert dict(start["headers"])[b"x-voxtral-ignored"] == b"diarize" and b"two words" in body["body"]
    for form, optional in (("json", False), ("diarized_json", True)):
        with pytest.raises(RefusedError, match=f"^no times for {form}: ") as caught:
            diarized(form, False, odd, optional=optional, text=" two words")
        assert (caught.value.status, caught.value.code) == (500, "no_times")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_ends_its_pieces(streamed: bool) -> None:
    client = engine(step_s=60)
    with pytest.raises(GoneError):
        run(client, upload(streamed), gone_after=0.05)
    assert client.dropped == len(client.ids) == AT_ONCE and client.running == 0


def test_the_last_message_may_be_sent_when_the_client_has_left() -> None:
    """The server says so once an answer is complete; nothing of that reaches what comes after `connected`."""

    async def whole() -> bool:
        complete = asyncio.Event()

        async def receive() -> Any:
            await complete.wait()
            return {"type": "http.disconnect"}

        with contextlib.suppress(GoneError):
            async with connected(receive):
                complete.set()
        await asyncio.sleep(0.01)
        return asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    assert asyncio.run(whole())


@pytest.mark.parametrize(
    ("form", "expected"), [("text", b"\n"), ("srt", b""), ("vtt", b"WEBVTT\n\n"), ("json", b'{"text": ""')]
)
def test_silence_has_no_text_and_costs_the_engine_nothing(form: str, expected: bytes) -> None:
    client = engine()
    start, body = run(client, upload(silent=True, form=form))
    assert start["status"] == 200
    assert body["body"].startswith(expected) and b"0." not in body["body"]
    (done,) = data(run(client, upload(streamed=True, silent=True))[1:])
    assert done["text"] == "" and done["usage"]["total_tokens"] == 0
    assert client.ids == []


def test_only_values_that_are_named_reach_the_engine() -> None:
    client, asked = engine(), upload()
    sampling = Sampling(temperature=0.7, seed=5, top_p=0.5, max_completion_tokens=2000)
    run(client, asked._replace(request=asked.request._replace(sampling=sampling)))
    params = client.params[0]
    assert (params.temperature, params.seed, params.top_p, params.max_tokens) == (0.7, 5, 0.5, 1024)
    assert params.extra_args is None and params.structured_outputs is None
    run(client, asked)
    assert (client.params[-1].temperature, client.params[-1].max_tokens) == (0.0, 1024)
