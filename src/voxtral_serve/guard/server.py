"""vLLM's API server behind the guard: what the guard reads from its live objects, and what it changes in them.

Each change is one function: `finish_requests` and `end_with_engine` (uvicorn's server), `lift_file_limit` (vLLM's
handlers and environment), `record_tokens` (vLLM's engine client) and `abort_start`. `attach` applies them.
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from fractions import Fraction
from typing import Any, NamedTuple

from voxtral_serve import shims
from voxtral_serve.audio.decode import Bounds
from voxtral_serve.audio.speech import Detector
from voxtral_serve.engine.clip_length import ClipLength
from voxtral_serve.engine.names import REALTIME
from voxtral_serve.guard.limits import LIMITS, Rules
from voxtral_serve.transcript.words import TokenStream
from voxtral_serve.units import MIB

LEAST_IN_FLIGHT = 16
# vLLM logs below "vllm" with a handler and a format that this logger then has too.
log = logging.getLogger("vllm.voxtral_serve.guard")


class EngineDeadError(RuntimeError):
    """vLLM's engine has died. Raised out of uvicorn's shutdown, so that the process ends with a non-zero status."""


class ServerFacts(NamedTuple):
    """What is known of the server once vLLM is up.

    rules           for the bodies of requests
    detector        of speech
    most_in_flight  requests at a time, of this process
    live            whether vLLM serves /v1/realtime
    chats           whether the model can chat
    verify          whether a request's headers hold a valid key; None if no key is needed
    stream          how to read the model's tokens; None for a model whose tokens have no times
    """

    rules: Rules
    detector: Detector
    most_in_flight: int
    live: bool
    chats: bool
    verify: Callable[[Any], bool] | None
    stream: TokenStream | None = None


def attach(state: Any, app: Any) -> ServerFacts:
    """Read vLLM's server and apply all changes to it. `state` is the application's, `app` what the guard wraps.

    Raises AttributeError or another error if vLLM is not as expected.
    """
    end_with_engine(state.server, state.engine_client)
    finish_requests(state.server, state.engine_client)
    lift_file_limit(state)
    facts = read_facts(state, app)
    if facts.stream is not None:
        record_tokens(state.engine_client)
    return facts


def read_facts(state: Any, app: Any) -> ServerFacts:
    """What vLLM's live objects say, and the detector of speech, which it loads.

    Raises AttributeError or another error if vLLM is not as expected.
    """
    engine = state.engine_client
    config = engine.vllm_config
    architecture = config.model_config.architecture
    realtime = architecture in REALTIME
    can = frozenset[str]() if realtime else frozenset({"language"})
    if "Whisper" in architecture:
        can |= {"prompt", "translate"}
    rate, chat_bounds, piece_s = _longest(state)
    # vLLM has these handlers only for a model that supports them. The application's routes are no source: newer
    # versions of FastAPI nest them.
    live, chats = (getattr(state, f"openai_serving_{name}", None) is not None for name in ("realtime", "chat"))
    in_flight = LIMITS.in_flight or max(LEAST_IN_FLIGHT, 4 * config.scheduler_config.max_num_seqs)
    return ServerFacts(
        rules=Rules(LIMITS.file_bytes, LIMITS.bounds, chat_bounds, rate, LIMITS.hosts, piece_s, realtime, can),
        detector=Detector(),
        most_in_flight=-(-in_flight // config.parallel_config._api_process_count),
        live=live,
        chats=chats and not realtime,  # vLLM has a chat handler for Voxtral Realtime too, and a chat ends its engine
        verify=_verify(state, app),
        stream=TokenStream.of_tokenizer(engine.input_processor.tokenizer) if realtime else None,
    )


def _verify(state: Any, app: Any) -> Callable[[Any], bool] | None:
    if not [key for key in (state.args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]:
        return None
    while type(app).__name__ != "AuthenticationMiddleware":
        app = app.app
    verify: Callable[[Any], bool] = app.verify_token
    return verify


def _longest(state: Any) -> tuple[int, Bounds, Fraction]:
    """(the model's rate in Hz, the longest clips of a chat, seconds of audio in one transcription request)"""
    engine, served = state.engine_client, state.openai_serving_transcription.asr_config
    model, bounds = engine.vllm_config.model_config, LIMITS.bounds
    rate = int(served.sample_rate)
    if served.allow_audio_chunking:  # Whisper, which takes one piece after another
        return rate, bounds, Fraction(served.max_audio_clip_s)
    tokenizer = engine.input_processor.tokenizer
    if model.architecture in REALTIME:
        return rate, bounds, Fraction(ClipLength.of_tokenizer(tokenizer).longest(model.max_model_len), rate)
    audio = tokenizer.instruct.audio_encoder.audio_config
    piece = round(audio.chunk_length_s * audio.frame_rate)
    longest = model.max_model_len // piece * Fraction(audio.chunk_length_s)
    because = (
        f"its max_model_len is {model.max_model_len} tokens, and audio takes {piece} for each "
        f"{audio.chunk_length_s:g} s that it has begun"
    )
    chat_bounds = bounds._replace(seconds=longest, because=because) if longest < bounds.seconds else bounds
    # Half of the context is for the text, which never takes more tokens than its audio.
    return rate, chat_bounds, max(model.max_model_len // 2 // piece, 1) * Fraction(audio.chunk_length_s)


def finish_requests(server: Any, engine: Any) -> None:
    """On SIGTERM and SIGINT, let uvicorn's `server` finish running requests within vLLM's --shutdown-timeout.

    vLLM itself stops the engine first, so that running requests fail. With this, uvicorn stops listening and waits for
    the requests; then vLLM stops the engine. A second signal ends the server at once.
    """
    grace_s = engine.vllm_config.shutdown_timeout
    server.config.timeout_graceful_shutdown = grace_s

    def stop() -> None:
        if server.should_exit:
            server.force_exit = True
            return
        log.info("told to stop: %d s for the requests that run (--shutdown-timeout)", grace_s)
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)


def end_with_engine(server: Any, engine: Any) -> None:
    """Have uvicorn's `server` raise EngineDeadError after its shutdown if vLLM's engine has died.

    vLLM itself ends such a server with status 0.
    """

    def errored() -> Any:
        return engine.errored

    errored()  # so that an AttributeError is raised now and not at the shutdown
    stock = server.shutdown

    async def shutdown(*args: Any, **kwargs: Any) -> None:
        died = errored()
        await stock(*args, **kwargs)
        if died:
            raise EngineDeadError("vLLM's engine has died (the lines above may say why): the server ends with it")

    server.shutdown = shutdown


def lift_file_limit(state: Any) -> None:
    """Raise vLLM's limit on a file's bytes, so that it takes a clip's decoded samples.

    The guard has checked the client's file against the limit before.
    """
    most = max(LIMITS.file_bytes, LIMITS.decode_bytes) // MIB + 1
    os.environ["VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"] = str(most)  # vLLM 0.32.0 reads it for each file
    for name in ("openai_serving_transcription", "openai_serving_translation"):
        handler: Any = getattr(state, name, None)
        if hasattr(handler, "max_audio_filesize_mb"):  # vLLM 0.20.0 has read the variable already
            handler.max_audio_filesize_mb = most


def record_tokens(engine: Any) -> None:
    """Have vLLM's EngineClient `engine` put generated tokens into the list of `recorded_tokens`."""
    engine.generate = recording(engine.generate)


def abort_start(server: Any, error: Exception) -> None:
    """Stop uvicorn's `server`, whose shutdown then raises a PatchError with `error` in its message."""
    server.should_exit = True
    stock, problem = server.shutdown, f"{type(error).__name__}: {error}"

    async def shutdown(*args: Any, **kwargs: Any) -> None:
        await stock(*args, **kwargs)
        raise shims.PatchError(
            f"voxtral_serve.guard has drifted on vllm {shims.installed('vllm')}: {problem}. {shims.ADVICE}"
        )

    server.shutdown = shutdown


# The list for the tokens of the request that is being served; None if nobody needs them
_TOKENS: ContextVar[list[int] | None] = ContextVar("_TOKENS", default=None)


@contextlib.contextmanager
def recorded_tokens() -> Iterator[list[int]]:
    """A list that gets the tokens of calls of `recording` within this context, and in no other task."""
    tokens: list[int] = []
    before = _TOKENS.set(tokens)
    try:
        yield tokens
    finally:
        _TOKENS.reset(before)


def recording(generate: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's EngineClient.generate, whose tokens also go to the list of `recorded_tokens` at the time of the call."""

    @functools.wraps(generate)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        outputs, kept = generate(*args, **kwargs), _TOKENS.get()
        return outputs if kept is None else _kept(outputs, kept)

    return recorded


async def _kept(outputs: Any, kept: list[int]) -> AsyncIterator[Any]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            # Either all tokens at once or the new ones of each output: vLLM's transcription asks for one of these.
            kept.extend(output.outputs[0].token_ids)
            yield output
