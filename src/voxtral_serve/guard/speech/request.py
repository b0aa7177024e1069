"""The requests of a server of speech synthesis. Every other path of vLLM-Omni's is 404."""

from typing import Any, ClassVar

from voxtral_serve.guard import asgi
from voxtral_serve.guard.asgi import Message, Receive, Send
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.keyring import IN_FLIGHT
from voxtral_serve.guard.request import MODELS, SERVER, Frontend, Request
from voxtral_serve.guard.speech import fields
from voxtral_serve.guard.speech.answer import SpeechAnswer
from voxtral_serve.guard.speech.facts import BODY_BYTES, SpeechFacts
from voxtral_serve.guard.speech.metrics import metrics

SPEECH, VOICES = "/v1/audio/speech", "/v1/audio/voices"
JSON = b"application/json"


class SpeechRequest(Request):
    """`answer` is vLLM-Omni's, of a request for speech."""

    METHODS: ClassVar = dict.fromkeys(("/health", "/metrics", MODELS, SERVER, VOICES), ("GET",)) | {SPEECH: ("POST",)}
    READ = frozenset(("/health", "/metrics", MODELS))
    KEYLESS = frozenset(("/health", "/metrics"))

    def __init__(self, guard: Frontend, scope: Message, receive: Receive, send: Send) -> None:
        super().__init__(guard, scope, receive, send)
        self.answer: SpeechAnswer | None = None

    def _wrong_method(self) -> RefusedError:
        if self.path == VOICES:
            message = f"this server has the voices of its checkpoint and takes no others: GET {VOICES} lists them"
            return RefusedError(405, message, "method_not_allowed")
        return super()._wrong_method()

    def _described(self) -> tuple[str, dict[str, Any]]:
        if self.answer is None:
            return super()._described()
        parameters, answer = self.answer.parameters, self.answer
        self.seconds = answer.seconds
        line, more = super()._described()
        form = f"{parameters.format} events" if parameters.events else parameters.format
        more |= {
            "characters": parameters.characters,
            "voice": parameters.voice,
            "format": parameters.format,
            "events": parameters.events,
        }
        line = f"{line}, {parameters.characters} characters, voice {parameters.voice}, {form}"
        if answer.first_byte_s is not None:
            more |= {"first_byte_ms": round(1000 * answer.first_byte_s), "complete": answer.complete}
            line = f"{line}, first byte {1000 * answer.first_byte_s:.0f} ms{'' if answer.complete else ', incomplete'}"
        return line, more

    async def _answer(self, facts: SpeechFacts) -> None:
        if self.path == VOICES:
            await self._json({"voices": facts.voices, "uploaded_voices": []})  # vLLM-Omni's form
            return
        body = await self._body(BODY_BYTES, facts, _too_large)
        if body is None:
            return
        async with self._place(facts), self._key_place(facts, IN_FLIGHT):
            parameters = fields.read(body, facts.voices, facts.models)
            metrics().characters.inc(parameters.characters)
            answer = SpeechAnswer(parameters, self.start, self.send, self.guard.threads)
            self.answer = answer
            # After the body, the client's own messages: vLLM-Omni waits for its http.disconnect, to abort the request.
            request = asgi.request(self.scope, JSON, parameters.content, self.id, self.receive)
            try:
                await self.guard.app(*request, answer.send)
            finally:
                self._count_audio(facts, answer)
            if answer.failed is not None:
                raise answer.failed

    def _count_audio(self, facts: SpeechFacts, answer: SpeechAnswer) -> None:
        parameters, counted = answer.parameters, metrics()
        counted.seconds.labels(parameters.format).inc(answer.seconds)
        if facts.keys is not None and self.key is not None:
            facts.keys.spend_anyway(self.key, answer.seconds, "speech")
        if answer.first_byte_s is not None:
            streamed = parameters.events or parameters.streamed
            counted.first_byte.labels("yes" if streamed else "no").observe(answer.first_byte_s)
            if not answer.complete:
                counted.incomplete.inc()


def _too_large(what: str, size: int | str, most: int) -> RefusedError:
    return RefusedError(413, f"{what} has {size} bytes, but this server accepts at most {most}", "body_too_large")
