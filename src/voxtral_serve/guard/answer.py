"""The answer to an upload in OpenAI's format (https://platform.openai.com/docs/api-reference/audio), or in Mistral's.

It is one body or a stream of events, made of the chunks of the clip's pieces, which come in order.
"""

import contextlib
import json
import math
from collections.abc import Sequence
from typing import Any

from voxtral_serve.guard.asgi import Message, Send
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.fields import DIARIZE, TranscriptRequest
from voxtral_serve.guard.labeller import LabelError, Labels
from voxtral_serve.guard.pieces import ClipPieces
from voxtral_serve.guard.timing import UploadTiming
from voxtral_serve.guard.transcriber import PieceChunk, Transcriber
from voxtral_serve.transcript.formats import (
    DIARIZED,
    VERBOSE,
    AnswerFormat,
    PieceTranscript,
    TimeError,
    diarized,
    merged_text,
    mistrals_segments,
    timed_words,
    verbose,
    written,
)
from voxtral_serve.transcript.language import listed, recognised_later
from voxtral_serve.transcript.logprobs import TokenLogprobs
from voxtral_serve.transcript.words import TokenStream, Word

IGNORED_HEADER = b"x-voxtral-ignored"  # names the fields that have no effect with this model
LANGUAGE = "transcription.language"  # Mistral's event
ENGLISH = "en"  # of a translation, whatever was spoken
EVENTS = b"text/event-stream; charset=utf-8"


async def answered(
    transcriber: Transcriber,
    request: TranscriptRequest,
    audio: ClipPieces,
    language: str | None,
    stream: TokenStream | None,
    request_id: str,
    send: Send,
    timing: UploadTiming,
    labels: Labels | None = None,
) -> list[Message]:
    """Transcribe an upload; a streamed answer is sent as its text comes. Returns the messages that end the answer.

    language  that of the prompt; None for the model to detect it, if it needs one
    stream    how to read the model's tokens; None for a model whose tokens have no times
    labels    what labels the words of a clip that is not silent, if the request asks for speakers

    Raises RefusedError while the client has got nothing.
    """
    task = request.form.task
    if language is None and not audio.silent:
        language = await transcriber.language_of(audio, task, request_id)
    text_language = ENGLISH if task == "translate" else language
    form = request.form._replace(separator=transcriber.separator(text_language, task))
    answer = (MistralAnswer if request.mistral else Answer)(request, audio, form, stream)
    writer = EventWriter(answer, send) if request.streamed else None
    try:
        if not audio.silent:
            async with contextlib.aclosing(transcriber.chunks(request, audio, language, request_id)) as chunks:
                async for number, chunk in chunks:
                    if labels is not None and not request.optional:
                        labels.check()
                    timing.add(chunk.times)
                    if writer is None:
                        answer.add(number, chunk)
                    else:
                        await writer.add(number, chunk)
        if form.speakers:
            await answer.label(labels)
            timing.end("speakers")
        if form.channels:
            answer.merge_channels()
        # Whisper has been told the language, or has said it.
        known = text_language if stream is None else None
        answer.take_language(known or await answer.recognised())
        return answer.messages() if writer is None else await writer.end()
    except (RefusedError, LabelError) as failure:
        error = unlabelled(failure) if isinstance(failure, LabelError) else failure
        if writer is None or not writer.started:
            raise error from failure
        return writer.failed(error)


def unlabelled(error: LabelError) -> RefusedError:
    """The error of a request that needs labels."""
    return RefusedError(503, f"no speaker labels: {error}", "no_speaker_labels")


def naming(ignored: Sequence[str], send: Send) -> Send:
    """`send`, with the names of fields that had no effect among the headers of an answer."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_ignored(ignored)]
        await send(message)

    return sent


def _ignored(names: Sequence[str]) -> list[tuple[bytes, bytes]]:
    return [(IGNORED_HEADER, ", ".join(names).encode())] if names else []


class Answer:
    """The text of an upload as its chunks come.

    stream  how to read the model's tokens; None for a model whose tokens have no times
    text    so far, without blanks at its beginning
    """

    DELTA = ("transcript.text.delta", "delta")  # the type of an event with new text, and the name of that

    def __init__(
        self, request: TranscriptRequest, audio: ClipPieces, form: AnswerFormat, stream: TokenStream | None
    ) -> None:
        self.request, self.audio, self.form, self.stream = request, audio, form, stream
        self.text = ""
        self.usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
        self._texts, self._tokens = [""] * len(audio.pieces), [list[int]() for _ in audio.pieces]
        self._token_logprobs = [list[float]() for _ in audio.pieces]
        told = request.logprobs and form.name == "json"
        self._logprobs = TokenLogprobs(stream) if told and stream is not None else None
        self._unsent: list[dict[str, Any]] = []  # logprobs whose text has not been sent
        self._number: int | None = None  # of the last piece that has text
        self._words: list[Word] | None = None  # with their speakers, if the request asks for them
        self._ignored = request.ignored
        self._language: str | None = None  # code of that of the text

    def add(self, number: int, chunk: PieceChunk) -> dict[str, Any] | None:
        """Take a chunk of a piece. Returns the event for it, or None if the text has not grown."""
        self.usage["input_tokens"] += chunk.prompt_tokens
        self.usage["output_tokens"] += len(chunk.tokens)
        self.usage["total_tokens"] += chunk.prompt_tokens + len(chunk.tokens)
        if self._logprobs is not None:
            if not self._tokens[number]:
                self._logprobs.begin_piece()
            self._unsent += self._logprobs.add(chunk.tokens, chunk.logprobs)
        self._texts[number] += chunk.text
        self._tokens[number] += chunk.tokens
        self._token_logprobs[number] += chunk.logprobs
        delta = chunk.text
        if number != self._number and (delta := delta.lstrip()):
            self._number = number
            delta = self.form.separator + delta if self.text else delta
        if not delta:
            return None
        self.text += delta
        kind, name = self.DELTA
        event: dict[str, Any] = {"type": kind, name: delta}
        if self._logprobs is not None:
            event["logprobs"], self._unsent = self._unsent, []
        return event

    async def label(self, labels: Labels | None) -> None:
        """Find the speakers, for a request that asks for them, when its text is complete. `labels` as for `answered`.

        Raises RefusedError if they cannot be found and the request needs them, or if the tokens do not give times.
        """
        self._words = []
        if labels is None:
            return
        assert self.stream is not None  # a model without word times has no labels
        try:
            words = timed_words(self._pieces(), self.stream)
            found = await labels([(word.start, word.end) for word in words]) if words else []
        except (TimeError, LabelError) as error:
            if not self.request.optional:
                raise (self._no_times(error) if isinstance(error, TimeError) else unlabelled(error)) from error
            self._words, self._ignored = None, (*self._ignored, DIARIZE)
            return
        pairs = zip(words, map(self.form.speaker, found), strict=True)
        self._words = [word._replace(speaker=speaker) for word, speaker in pairs]

    def merge_channels(self) -> None:
        """Merge the words of channels by time, when their texts are complete. Raises RefusedError as `label`."""
        assert self.stream is not None  # fields.read has refused a model without word times
        pieces: dict[int, list[PieceTranscript]] = {}
        for (channel, _), piece in zip(self.audio.channels, self._pieces(), strict=False):
            pieces.setdefault(channel, []).append(piece)
        try:
            words = [
                word._replace(speaker=f"channel-{channel + 1}")
                for channel, own in pieces.items()
                for word in timed_words(own, self.stream)
            ]
        except TimeError as error:
            raise self._no_times(error) from error
        self._words = sorted(words, key=lambda word: word.start)

    async def recognised(self) -> str | None:
        """The code of the text's language; None if it is not clear, or nothing of the answer tells it."""
        request = self.request
        told = self.form.name == VERBOSE or self._words is not None or request.tells_languages or request.mistral
        return await recognised_later(self.text) if told else None

    def take_language(self, code: str | None) -> None:
        """The language of the text; None if it is not known."""
        self._language = code
        if code is not None:
            self.form = self.form._replace(language=code)

    def end(self) -> list[dict[str, Any]]:
        """The last events of a stream. Raises RefusedError if times are asked for and the tokens do not give them."""
        text: dict[str, Any] = {"text": self.text.rstrip(), "usage": {"type": "tokens", **self.usage}}
        segments: list[dict[str, Any]] = []
        try:
            if self.form.name == VERBOSE:
                content = verbose(*self._timed())
            elif self.form.name == DIARIZED:
                segments, content = diarized(*self._timed())["segments"], text
            else:
                content = self._json(**text)
        except TimeError as error:
            raise self._no_times(error) from error
        return [*segments, {"type": "transcript.text.done", **content, **self._unlabelled()}]

    def body(self) -> tuple[bytes, bytes]:
        """(content type, body) of an answer that is not streamed. Raises RefusedError as `end`."""
        try:
            if self.form.name == "json":
                # The model's text begins with a blank, as its first word does; OpenAI's does not.
                text = merged_text(self.form, self._pieces(), self._words)
                content = self._json(text, self._duration())
                return b"application/json", json.dumps(content, ensure_ascii=False).encode()
            kind, text = written(*self._timed())
        except TimeError as error:
            raise self._no_times(error) from error
        return kind.encode(), text.encode()

    def _json(self, text: str, usage: dict[str, Any]) -> dict[str, Any]:
        """`json`, or what the last event of its stream has. Raises TimeError."""
        content = {"text": text, "usage": usage, **self._languages(), **self._all_logprobs()}
        return content if self._words is None else content | self._segments()

    def _unlabelled(self) -> dict[str, Any]:
        """For the last event of a stream, whose headers have been sent."""
        return {"ignored": [DIARIZE]} if self._ignored != self.request.ignored else {}

    def messages(self) -> list[Message]:
        """The ASGI messages of an answer that is not streamed. Raises RefusedError as `end`."""
        kind, body = self.body()
        start = self._start([(b"content-type", kind), (b"content-length", b"%d" % len(body))])
        return [start, {"type": "http.response.body", "body": body}]

    def beginning(self) -> Message:
        """The ASGI message that begins a stream of events."""
        return self._start([(b"content-type", EVENTS), (b"cache-control", b"no-cache")])

    def _start(self, headers: list[tuple[bytes, bytes]]) -> Message:
        return {"type": "http.response.start", "status": 200, "headers": [*headers, *_ignored(self._ignored)]}

    def _all_logprobs(self) -> dict[str, Any]:
        return {} if self._logprobs is None else {"logprobs": self._logprobs.finish()}

    def _languages(self) -> dict[str, Any]:
        return {"languages": listed(self._language)} if self.request.tells_languages else {}

    def _segments(self) -> dict[str, Any]:
        """Segments as Mistral has them in JSON; its client wants model and language. Raises TimeError."""
        form, wanted = self.form, self.form.granularities or self._words is not None
        found = mistrals_segments(form, self._pieces(), self.stream, self._words) if wanted else []
        return {"model": self.request.model, "language": form.language, "segments": found}

    def _timed(self) -> tuple[Any, ...]:
        """What `written` takes, and others."""
        return self.form, self._pieces(), self.stream, self.audio.clip.seconds, self._duration(), self._words

    def _duration(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": math.ceil(self.audio.seconds)}

    def _pieces(self) -> list[PieceTranscript]:
        audio = self.audio
        parts = zip(self._texts, self._tokens, audio.pieces, audio.voiced, self._token_logprobs, strict=True)
        return [PieceTranscript(*part) for part in parts]

    def _no_times(self, error: TimeError) -> RefusedError:
        return RefusedError(500, f"no times for {self.form.name}: {error}", "no_times")


class MistralAnswer(Answer):
    """The same as Mistral has it (https://docs.mistral.ai/api/endpoint/audio/transcriptions)."""

    DELTA = ("transcription.text.delta", "text")

    def end(self) -> list[dict[str, Any]]:
        """As Answer.end: the language, if it is clear, the segments, and all of it."""
        try:
            content = self._json(self.text.rstrip(), {})
        except TimeError as error:
            raise self._no_times(error) from error
        spoken = [] if self._language is None else [{"type": LANGUAGE, "audio_language": self._language}]
        segments = [{**each, "type": "transcription.segment"} for each in content["segments"]]
        return [*spoken, *segments, {"type": "transcription.done", **content, **self._unlabelled()}]

    def _json(self, text: str, usage: dict[str, Any]) -> dict[str, Any]:
        names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens", "total_tokens": "total_tokens"}
        counted = {theirs: self.usage[ours] for theirs, ours in names.items()}
        content = super()._json(text, counted | {"prompt_audio_seconds": math.ceil(self.audio.seconds)})
        return content | self._segments()


class EventWriter:
    """The events of a streamed answer on their way to the client. `started`: the client has got the status."""

    def __init__(self, answer: Answer, send: Send) -> None:
        self.answer, self.send = answer, send
        self.started = False

    async def add(self, number: int, chunk: PieceChunk) -> None:
        """Send the new text of a chunk."""
        event = self.answer.add(number, chunk)
        await self._begin()
        if event is not None:
            await self.send(_event(event))

    async def end(self) -> list[Message]:
        """The messages that end the stream. Raises RefusedError as `Answer.end`."""
        events = list(map(_event, self.answer.end()))
        await self._begin()
        return [*events, {"type": "http.response.body", "body": b""}]

    def failed(self, error: RefusedError) -> list[Message]:
        """The messages that end a stream that has started with an error in OpenAI's form."""
        return [_event({"error": error.content}), {"type": "http.response.body", "body": b""}]

    async def _begin(self) -> None:
        if not self.started:
            self.started = True
            await self.send(self.answer.beginning())


def _event(content: dict[str, Any]) -> Message:
    kind = str(content.get("type", ""))
    name = f"event: {kind}\n" if kind.startswith("transcription.") else ""  # Mistral's client reads events by name
    line = f"{name}data: {json.dumps(content, ensure_ascii=False)}\n\n"
    return {"type": "http.response.body", "body": line.encode(), "more_body": True}
