"""An engine client that costs nothing, for the guard's unit tests: it answers each piece of an upload with a text.

The real one runs in tests/server. What is used of it here is what voxtral_serve.guard.transcriber uses.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from voxtral_serve.guard.transcriber import SpeechTask, Transcriber

THREADS = ThreadPoolExecutor(2)
PROMPT = 39  # tokens


class Model:
    """vLLM's class of a model of speech-to-text."""

    no_space_languages = frozenset({"ja"})

    @staticmethod
    def validate_language(language: str | None) -> str | None:
        if language == "xx":
            raise ValueError("Unsupported language: 'xx'")
        return language

    @staticmethod
    def get_generation_prompt(params: Any) -> Any:
        return {"prompt_token_ids": [1] * PROMPT, "multi_modal_data": {"audio": (params.audio, 16000)}}

    @staticmethod
    def get_num_audio_tokens(*_: Any) -> int | None:
        return None

    @staticmethod
    def post_process_output(text: str) -> str:
        return text


class EngineClient:
    """vLLM's EngineClient.

    texts    what the model writes in a piece, whose samples it is given
    failing  whether the engine fails at a piece, whose samples it is given; it then raises what `error` makes, or
             finishes with "error" if that is None
    step_s   from a request to its first output, by its samples
    stats    whether its outputs have times
    """

    def __init__(
        self,
        texts: Callable[[Any], list[str]] = lambda samples: [""],
        failing: Callable[[Any], bool] = lambda samples: False,
        error: Callable[[], Exception] | None = None,
        step_s: Callable[[Any], float] = lambda samples: 0.0,
    ) -> None:
        self.texts, self.failing, self.error, self.step_s = texts, failing, error, step_s
        self.errored, self.stats = False, True
        self.running = self.most = self.dropped = 0
        self.ids: list[str] = []
        self.params: list[Any] = []
        self.samples: list[Any] = []
        self.renderer = self
        model = SimpleNamespace(max_model_len=1024, is_encoder_decoder=False)
        self.vllm_config = SimpleNamespace(model_config=model)

    async def render_cmpl_async(self, prompts: list[Any], skip_mm_cache: bool) -> list[Any]:
        return prompts

    async def generate(self, prompt: Any, params: Any, request_id: str, lora_request: Any) -> AsyncIterator[Any]:
        samples, _ = prompt["multi_modal_data"]["audio"]
        self.ids.append(request_id)
        self.params.append(params)
        self.samples.append(samples)
        self.running += 1
        self.most = max(self.most, self.running)
        begun = time.monotonic()
        try:
            await asyncio.sleep(self.step_s(samples))
            first = time.monotonic()
            texts = self.texts(samples)
            if params.output_kind.name == "FINAL_ONLY":
                texts = ["".join(texts)]
            for number, text in enumerate(texts, 1):
                failed = number == len(texts) and self.failing(samples)
                if failed and self.error is not None:
                    raise self.error()
                reason = ("error" if failed else "length") if number == len(texts) else None
                answer = SimpleNamespace(text=text, token_ids=[number], logprobs=None, finish_reason=reason)
                stats = SimpleNamespace(
                    queued_ts=begun, scheduled_ts=begun, first_token_ts=first, last_token_ts=time.monotonic()
                )
                yield SimpleNamespace(
                    outputs=[answer],
                    prompt_token_ids=prompt["prompt_token_ids"],
                    metrics=stats if self.stats else None,
                )
        except (asyncio.CancelledError, GeneratorExit):
            self.dropped += 1
            raise
        finally:
            self.running -= 1


def transcriber(client: EngineClient | None = None) -> Transcriber:
    models = SimpleNamespace(is_base_model=lambda name: name in ("", "voxtral"), lora_requests={})
    task = SpeechTask(Model, None, {}, None)
    return Transcriber(client or EngineClient(), {"transcribe": task, "translate": task}, models, THREADS)
