"""The events of vLLM's `/v1/realtime`, as its own server has them.

session.update names the model, input_audio_buffer.commit begins a text, input_audio_buffer.append has its audio, a
commit that is `final` ends it. The answers are one transcription.delta for each token, most of them empty, and
transcription.done; then another text may begin. An event that is wrong gets an error event, and the socket stays.
What vLLM's server does not have: the socket is closed with an error event and a reason where it cannot go on.
"""

import json
import time
from typing import Any

from voxtral_serve.guard.live import commands, outputs
from voxtral_serve.guard.live.codec import Codec, CodecContext, Command, audio_of, retry_after, written
from voxtral_serve.guard.live.cuts import SAMPLE_BYTES
from voxtral_serve.guard.live.endings import Ending
from voxtral_serve.guard.live.events import Event, EventError, value
from voxtral_serve.guard.live.outputs import Output

LONGEST_NAME = 200  # characters that an error repeats
EMPTY = '{"type":"transcription.delta","delta":""}'
NOT_VALIDATED = "Model not validated. Make sure to validate the model by sending a session.update event."


class VllmCodec(Codec):
    """One text follows the other."""

    def __init__(self, context: CodecContext) -> None:
        super().__init__(context)
        self._model_known = False

    def open(self) -> list[Command]:
        return [commands.Answer(written("session.created", id=f"sess-{self.context.id}", created=int(time.time())))]

    def decode(self, event: Event, begun: bool) -> list[Command]:
        kind = event.type
        if kind == "input_audio_buffer.append":
            return [pcm16(event)]
        if kind == "session.update":
            self._update(value(event.model))
            return []
        if kind == "input_audio_buffer.commit":
            if not self._model_known:
                raise EventError(NOT_VALIDATED, "model_not_validated")
            return [commands.End() if str(value(event.final)).lower() in ("true", "1") else commands.Begin()]
        raise EventError(f"Unknown event type: {kind[:LONGEST_NAME]}", "unknown_event")

    def encode(self, output: Output) -> list[str]:
        match output:
            case outputs.Tokens("", count):
                return [EMPTY] * count
            case outputs.Tokens(text, count):
                delta = '{"type":"transcription.delta","delta":' + json.dumps(text, ensure_ascii=False) + "}"
                return [EMPTY] * (count - 1) + [delta]
            case outputs.TextDone(text, prompt_tokens, tokens):
                usage = {
                    "prompt_tokens": prompt_tokens,
                    "total_tokens": prompt_tokens + tokens,
                    "completion_tokens": tokens,
                    "prompt_tokens_details": None,
                }
                return [written("transcription.done", text=text, usage=usage)]
        raise TypeError(f"{output!r:.80} has no event in vLLM's protocol")

    def refuse(self, error: EventError, event: Event | None) -> str:
        return written("error", error=str(error), code=error.code)

    def last_words(self, ending: Ending) -> list[str]:
        return [written("error", error=ending.words, code=ending.code, **retry_after(ending))]

    def _update(self, model: Any) -> None:
        if model is None:
            raise EventError("Missing required field: model", "invalid_event")
        if not self.context.serves(model):
            raise EventError(f"The model `{str(model)[:LONGEST_NAME]}` does not exist.", "model_not_found")
        self._model_known = True


def pcm16(event: Event) -> commands.Append:
    """Whole samples of PCM16. Raises EventError."""
    pcm = audio_of(event)
    if not pcm or len(pcm) % SAMPLE_BYTES:
        raise EventError("Invalid audio data", "invalid_audio")
    return commands.Append(pcm)
