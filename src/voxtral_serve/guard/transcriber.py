"""The pieces of an upload in vLLM's engine: prompts, sampling parameters, tokens and text.

No HTTP and no files: samples go to the engine client, as vLLM's own speech-to-text handlers send them, and its outputs
come back. What is used of vLLM is the same in 0.20.0, 0.32.0 and 0.33.0: the model's class and configuration, read from
the handlers of the API server (vllm.model_executor.models.interfaces.SupportsTranscription), the engine client's
renderer, and `generate`.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import Executor
from typing import Any, NamedTuple

from voxtral_serve.audio.level import raised
from voxtral_serve.engine.keywords import KEYWORDS
from voxtral_serve.engine.session import DELAY
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.fields import Sampling, TranscriptRequest
from voxtral_serve.guard.pieces import ClipPieces
from voxtral_serve.guard.timing import EngineTimes
from voxtral_serve.patches.live_server import log
from voxtral_serve.transcript.logprobs import chosen_logprobs

AT_ONCE = 8  # pieces of one clip in the engine: enough for vLLM's batch, with room for other requests
FAILED_REASONS = ("error", "abort")  # finish reasons of a request that the engine gave up


class PieceChunk(NamedTuple):
    """What one output of the engine adds to the text of a piece.

    text           the new text
    tokens         ids of the new tokens
    logprobs       one for each token; empty unless the request asks for them
    prompt_tokens  tokens of the piece's prompt in its first chunk, and 0 in later ones
    times          of the engine; None if vLLM does not measure them
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    prompt_tokens: int
    times: EngineTimes | None


class SpeechTask(NamedTuple):
    """What vLLM's handler of a task, `transcribe` or `translate`, knows of the model.

    model      the model's class, with vLLM's interface SupportsTranscription
    config     vLLM's SpeechToTextConfig
    defaults   sampling parameters of the checkpoint's generation_config.json and of --override-generation-config
    tokenizer  for the detection of a language; None for a model without it
    """

    model: Any
    config: Any
    defaults: Mapping[str, Any]
    tokenizer: Any

    @classmethod
    def of_handler(cls, handler: Any) -> "SpeechTask":
        """Read vLLM's handler. Raises AttributeError if it is not as expected."""
        return cls(
            handler.model_cls,
            handler.asr_config,
            handler.default_sampling_params,
            getattr(handler, "tokenizer", None),
        )


class Transcriber:
    """The only one of an API process.

    client   vLLM's EngineClient
    tasks    by name; one without `translate` for a model that vLLM has no such handler for
    models   vLLM's OpenAIServingModels
    threads  for what would occupy the event loop for milliseconds
    """

    def __init__(self, client: Any, tasks: Mapping[str, SpeechTask], models: Any, threads: Executor) -> None:
        self.client, self.tasks, self.models, self.threads = client, tasks, models, threads

    @classmethod
    def of_vllm(cls, state: Any, threads: Executor) -> "Transcriber":
        """Read the state of vLLM's application. Raises AttributeError if it is not as expected."""
        client = state.engine_client
        for name in ("generate", "errored", "renderer"):
            getattr(client, name)
        names = {"transcribe": "openai_serving_transcription", "translate": "openai_serving_translation"}
        handlers = {task: getattr(state, name, None) for task, name in names.items()}
        tasks = {task: SpeechTask.of_handler(handler) for task, handler in handlers.items() if handler is not None}
        return cls(client, tasks, state.openai_serving_models, threads)

    def serves(self, name: str) -> bool:
        """Whether a request may name this model: one of the server's names, or an adapter."""
        return self.models.is_base_model(name) or name in self.models.lora_requests

    def check(self, request: TranscriptRequest) -> str | None:
        """The language of a request as the model has it. Raises RefusedError for one that vLLM does not know, and if
        the engine has died."""
        self._check_engine()
        try:
            language: str | None = self.tasks[request.form.task].model.validate_language(request.language)
        except ValueError as error:
            raise RefusedError(400, str(error), "invalid_value", "language") from error
        return language

    async def language_of(self, audio: ClipPieces, task: str, request_id: str) -> str | None:
        """The language that the model hears in the first piece; None for a model that is not asked for it.

        Whisper needs the language in its prompt. It is detected once for all pieces of a file.
        """
        speech = self.tasks[task]
        if not getattr(speech.model, "supports_explicit_language_detection", False):
            return None
        from vllm.sampling_params import SamplingParams

        prompt = speech.model.get_language_detection_prompt(audio.clip_of(0).samples, speech.config)
        params = SamplingParams(
            max_tokens=1, temperature=0.0, allowed_token_ids=speech.model.get_language_token_ids(speech.tokenizer)
        )
        tokens: list[int] = []
        async for output in self._outputs(prompt, params, f"{request_id}-language", None):
            tokens = list(output.outputs[0].token_ids)
        language: str = speech.model.parse_language_detection_output(tokens, speech.tokenizer)
        log.info("detected language: %s, id %s", language, request_id)
        return language

    def separator(self, language: str | None, task: str) -> str:
        """What stands between the texts of two pieces: nothing in a language without blanks."""
        return "" if language in self.tasks[task].model.no_space_languages else " "

    async def chunks(
        self, request: TranscriptRequest, audio: ClipPieces, language: str | None, request_id: str
    ) -> AsyncGenerator[tuple[int, PieceChunk], None]:
        """Yield (number of the piece, chunk) in the clip's order, of AT_ONCE pieces at a time.

        A request that is not streamed has one chunk for each piece. Closing the generator ends the requests in the
        engine. Raises RefusedError for what vLLM refuses or the engine gives up.
        """
        queues: list[asyncio.Queue[PieceChunk | Exception | None]] = [asyncio.Queue() for _ in audio.pieces]
        room = asyncio.Semaphore(AT_ONCE)

        async def run(number: int) -> None:
            name = f"{request_id}-{number}" if number else request_id
            try:
                async with room, contextlib.aclosing(self._piece(request, audio, number, language, name)) as chunks:
                    async for chunk in chunks:
                        queues[number].put_nowait(chunk)
                queues[number].put_nowait(None)
            except Exception as error:
                queues[number].put_nowait(error)

        tasks = [asyncio.create_task(run(number)) for number in range(len(queues))]
        try:
            for number, queue in enumerate(queues):
                while (chunk := await queue.get()) is not None:
                    if isinstance(chunk, Exception):
                        raise chunk
                    yield number, chunk
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _piece(
        self, request: TranscriptRequest, audio: ClipPieces, number: int, language: str | None, request_id: str
    ) -> AsyncGenerator[PieceChunk, None]:
        speech = self.tasks[request.form.task]
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(self.threads, self._prompt, request, audio, number, language)
        params = self._params(speech, request)
        adapter = self.models.lora_requests.get(request.model)
        clean = _text_of(speech.model, request.streamed)
        async with contextlib.aclosing(self._outputs(prompt, params, request_id, adapter)) as outputs:
            prompt_tokens: int | None = self._audio_tokens(speech, audio, number)
            async for output in outputs:
                answer = output.outputs[0]
                if prompt_tokens is not None:
                    prompt_tokens += len(output.prompt_token_ids or ())
                logprobs = chosen_logprobs(answer) if request.logprobs else []
                text = clean(answer.text, answer.finish_reason is not None)
                times = EngineTimes.of_output(output)
                yield PieceChunk(text, list(answer.token_ids), logprobs, prompt_tokens or 0, times)
                prompt_tokens = None

    def _prompt(self, request: TranscriptRequest, audio: ClipPieces, number: int, language: str | None) -> Any:
        """vLLM's prompt for a piece, which is amplified if it is quiet. For a thread."""
        from vllm.config.speech_to_text import SpeechToTextParams

        speech = self.tasks[request.form.task]
        params = SpeechToTextParams(
            audio=raised(audio.clip_of(number)).samples,
            stt_config=speech.config,
            model_config=self.client.vllm_config.model_config,
            language=language,
            task_type=request.form.task,
            request_prompt=request.prompt,
        )
        if request.shape is not None:  # the encode-once model has such prompts
            return speech.model.prompt_with_delay(params, request.shape.delay_ms)
        return speech.model.get_generation_prompt(params)

    def _audio_tokens(self, speech: SpeechTask, audio: ClipPieces, number: int) -> int:
        """Tokens of a piece's audio that are no tokens of its prompt, as vLLM counts them."""
        piece, model = audio.pieces[number], self.client.vllm_config.model_config
        return speech.model.get_num_audio_tokens(piece.end - piece.start, speech.config, model) or 0

    def _params(self, speech: SpeechTask, request: TranscriptRequest) -> Any:
        """vLLM's SamplingParams: the request's values, then the server's, then vLLM's. Nothing else of a request."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        given: Sampling = request.sampling
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        values = {name: getattr(given, name) for name in neutral}
        for name, value in neutral.items():
            if values[name] is None:
                values[name] = speech.defaults.get(name, value)
        # vLLM's own default is 16 tokens.
        context = self.client.vllm_config.model_config.max_model_len
        extra = {DELAY: request.shape and request.shape.delay, KEYWORDS: request.keywords}
        most = (context, given.max_completion_tokens, speech.defaults.get("max_tokens"))
        return SamplingParams(
            temperature=given.temperature or 0.0,
            seed=given.seed,
            frequency_penalty=given.frequency_penalty or 0.0,
            presence_penalty=given.presence_penalty or 0.0,
            max_tokens=min(number for number in most if number is not None),
            logprobs=0 if request.logprobs else None,  # 0: only that of the sampled token
            flat_logprobs=True,  # lists of numbers instead of an object for each token
            extra_args={name: value for name, value in extra.items() if value is not None} or None,
            output_kind=RequestOutputKind.DELTA if request.streamed else RequestOutputKind.FINAL_ONLY,
            **values,
        )

    async def _outputs(self, prompt: Any, params: Any, request_id: str, adapter: Any) -> AsyncGenerator[Any, None]:
        """vLLM's RequestOutputs. Raises RefusedError."""
        from vllm.renderers.inputs.preprocess import parse_model_prompt
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            parsed = parse_model_prompt(self.client.vllm_config.model_config, prompt)
            # No clip comes twice, so vLLM's cache of processed audio would only take memory.
            (rendered,) = await self.client.renderer.render_cmpl_async([parsed], skip_mm_cache=True)
            outputs: AsyncGenerator[Any, None]
            outputs = self.client.generate(rendered, params, request_id, lora_request=adapter)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    if output.outputs[0].finish_reason in FAILED_REASONS:
                        raise RefusedError(500, "the engine has given up this request", "failed")
                    yield output
        except EngineDeadError as error:
            raise engine_dead() from error
        except _client_error() as error:
            raise RefusedError(400, str(error), "invalid_value", getattr(error, "parameter", None)) from error
        except _busy_error() as error:
            raise RefusedError(503, str(error), "overloaded") from error

    def _check_engine(self) -> None:
        if self.client.errored:
            raise engine_dead()


def engine_dead() -> RefusedError:
    """The error for a request to a server whose engine has died, and which will stop."""
    return RefusedError(503, "the engine has died, and the server stops: send this again to another one", "engine_dead")


def _client_error() -> type[Exception]:
    """What vLLM raises for a request that it refuses: ValueError in 0.20.0."""
    from vllm import exceptions

    error: type[Exception] = getattr(exceptions, "VLLMClientError", ValueError)
    return error


def _busy_error() -> tuple[type[Exception], ...]:
    """What vLLM raises where its own limits on queued requests are reached: nothing in 0.20.0, which has none."""
    from vllm import exceptions

    error: type[Exception] | None = getattr(exceptions, "GracefulHTTPError", None)
    return () if error is None else (error,)


def _text_of(model: Any, streamed: bool) -> Any:
    """A function from (text, whether it is the last) to the text without what some models write around it."""
    if not streamed:
        return lambda text, last: model.post_process_output(text)
    processor = getattr(model, "get_streaming_post_processor_cls", None)  # not in 0.20.0
    return processor()().process_delta if processor is not None else lambda text, last: text
