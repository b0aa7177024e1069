"""The values that the guard reads from the live objects of vLLM's API server.

The guard changes these objects only by the records in voxtral_serve.patches.live_server, which `attach` settles.
"""

import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

from voxtral_serve import keys, logs, shims
from voxtral_serve.audio.decode import Bounds
from voxtral_serve.audio.speech import Detector
from voxtral_serve.engine.clip_length import OPTION as POSITIONS
from voxtral_serve.engine.clip_length import ClipLength, clip_positions
from voxtral_serve.engine.keywords import PhraseTokens, usable
from voxtral_serve.engine.names import ENCODE_ONCE, REALTIME
from voxtral_serve.engine.session import LEAST_UPLOAD_S, OPTION, UPLOAD_DELAY, SessionShape, has_delays
from voxtral_serve.guard import access
from voxtral_serve.guard.about import about
from voxtral_serve.guard.budget import Budget
from voxtral_serve.guard.decoders import Decoders
from voxtral_serve.guard.fields import DIARIZER
from voxtral_serve.guard.keyring import KeyRing
from voxtral_serve.guard.labeller import Labeller, unlabelled
from voxtral_serve.guard.limits import LIMITS, OpenLimits, Rules, most_in_flight
from voxtral_serve.guard.live.cuts import ContextError
from voxtral_serve.guard.live.link import Engine
from voxtral_serve.guard.live.service import LiveService, most_sockets
from voxtral_serve.guard.speech import facts as speech_facts
from voxtral_serve.guard.speech.facts import KindError, SpeechFacts
from voxtral_serve.guard.transcriber import Transcriber
from voxtral_serve.patches.live_server import (
    ClientWatch,
    ConnectionHeaders,
    FileLimit,
    GracefulStop,
    HeaderLimit,
    NoCompression,
)
from voxtral_serve.transcript import language
from voxtral_serve.transcript.words import TokenStream

# What uvicorn writes of each WebSocket, beside the guard's own line, with the query of its URL
WEBSOCKET_LINES = ('%s - "WebSocket %s" [accepted]', "connection open", "connection closed")


class ServerFacts(NamedTuple):
    """Facts about the server, read after vLLM has started.

    rules           for the bodies of requests
    detector        of speech
    transcriber     the engine, for uploads
    decoders        processes that decode the audio of this process's requests
    budget          bytes of bodies and decoded audio of this process
    most_in_flight  requests at a time, of this process, whose bodies are whole
    live            whether vLLM serves /v1/realtime
    chats           whether the model can chat
    verify          whether a request's headers hold vLLM's key; None if it has none
    cors            from an Origin to the headers that let its page read an answer
    stream          how to read the model's tokens; None for a model whose tokens have no times
    open            limits on bodies that are still arriving at this process
    sessions        live sessions of the encode-once model; None where the server has none of its own
    about           what GET /v1/server says
    keys            those of VOXTRAL_SERVE_KEYS; None if it is not set
    labeller        of speakers; None where it cannot be had
    """

    rules: Rules
    detector: Detector
    transcriber: Transcriber
    decoders: Decoders
    budget: Budget
    most_in_flight: int
    live: bool
    chats: bool
    verify: Callable[[Any], bool] | None
    cors: Callable[[str], list[tuple[bytes, bytes]]] = lambda origin: []
    stream: TokenStream | None = None
    open: OpenLimits = OpenLimits.of_process(1, 0)
    sessions: LiveService | None = None
    about: Mapping[str, Any] = MappingProxyType({})
    keys: KeyRing | None = None
    labeller: Labeller | None = None

    @property
    def stopping(self) -> bool:
        """Whether the server drains its live sessions."""
        return self.sessions is not None and self.sessions.stopping

    async def aclose(self) -> None:
        """End what runs beside the server's process."""
        await self.decoders.aclose()
        if self.labeller is not None:
            await self.labeller.aclose()

    def watches(self) -> Iterator[Coroutine[Any, Any, None]]:
        """What runs for as long as the server does."""
        if self.keys is not None:
            yield self.keys.watch()


def attach(state: Any, threads: Executor) -> ServerFacts | SpeechFacts:
    """Read vLLM's server and settle the patches of it.

    state    that of vLLM's application
    threads  those of the guard

    Raises KindError, KeysError, LogError, PatchError, AttributeError or another error if vLLM is not as expected.
    """
    logs.check_settings()
    logs.check_loggers()
    engine = state.engine_client
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg not in WEBSOCKET_LINES)
    if getattr(state, "openai_serving_speech", None) is not None:  # of vLLM-Omni, whatever it serves
        speech = speech_facts.read(state)
        GracefulStop(speech.stages, grace_s=speech.stages.grace_s).settle_on(state.server)
        HeaderLimit().settle_on(state.server.config)
        return speech
    if getattr(state, "openai_serving_transcription", None) is None:
        raise speech_facts.unknown(engine)
    return _attach_transcription(state, threads)


def _attach_transcription(state: Any, threads: Executor) -> ServerFacts:
    engine = state.engine_client
    facts = read_facts(state, threads)
    if facts.sessions is None:
        GracefulStop(engine).settle_on(state.server)
    else:
        GracefulStop(engine, facts.sessions.drain).settle_on(state.server)
        ConnectionHeaders().settle_on(state.server.config)
        ClientWatch().settle_on(state.server.config)
    HeaderLimit().settle_on(state.server.config)
    NoCompression().settle_on(state.server.config)
    if facts.chats:
        FileLimit(LIMITS.file_bytes, LIMITS.decode_bytes).settle_on(state)
    if engine.vllm_config.parallel_config._api_process_count > 1:
        shims.require("api_process_drain")
    return facts


def read_facts(state: Any, threads: Executor) -> ServerFacts:
    """What vLLM's live objects say, the detector of speech, which it loads, and the file of keys.

    Raises KeysError, ImportError, AttributeError or another error if vLLM is not as expected.
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
    all_in_flight = most_in_flight(config)
    processes = config.parallel_config._api_process_count
    in_flight = -(-all_in_flight // processes)
    rules = Rules(
        *(LIMITS.file_bytes, LIMITS.bounds, chat_bounds, rate, LIMITS.hosts, piece_s, realtime, can),
        *(unlabelled(realtime), *_delays(engine), _phrases(engine)),
    )
    _check_delay(rules, clip_positions(config.model_config))
    detector = Detector()
    labeller = Labeller.of_environment(in_flight) if rules.unlabelled is None else None
    language.check()
    sessions = _sessions(state, detector, labeller, rules)
    names = [each.name for each in state.openai_serving_models.base_model_paths]
    return ServerFacts(
        rules=rules,
        detector=detector,
        transcriber=Transcriber.of_vllm(state, threads),
        decoders=Decoders.of_process(processes, rules),
        budget=Budget.of_process(processes, in_flight, rules),
        most_in_flight=in_flight,
        live=live,
        chats=chats and not realtime,  # vLLM has a chat handler for Voxtral Realtime too, and a chat ends its engine
        verify=access.verify(state),
        cors=access.cors(state),
        stream=TokenStream.of_tokenizer(engine.input_processor.tokenizer) if realtime else None,
        open=OpenLimits.of_process(processes, rules.chat_bytes),
        sessions=sessions,
        keys=access.ring(state, processes),
        labeller=labeller,
        about=about(names, rules, LIMITS, all_in_flight, _options(config)[OPTION] if sessions is not None else None),
    )


def _options(config: Any) -> Mapping[str, Any]:
    # A dict, or an object of a platform's own
    return config.additional_config if isinstance(config.additional_config, dict) else {}


def _delays(engine: Any) -> tuple[SessionShape | None, int | None]:
    """`shape` and `delay_ms` of Rules."""
    options = _options(engine.vllm_config)
    if engine.vllm_config.model_config.architecture != ENCODE_ONCE or not has_delays(options):
        return None, None
    shape = SessionShape.of(engine.input_processor.tokenizer.instruct.audio_encoder.audio_config)
    return shape, options.get(UPLOAD_DELAY)


def _check_delay(rules: Rules, positions: int) -> None:
    """Raises ContextError for a delay of uploads whose padding has no room in their positions."""
    if rules.shape is None or rules.delay_ms is None:
        return
    shape = rules.shape.with_delay_ms(rules.delay_ms)
    if rules.longest_s(shape) < LEAST_UPLOAD_S:
        needed = math.ceil(LEAST_UPLOAD_S * shape.rate_hz / shape.samples) + shape.left + shape.right
        raise ContextError(
            f"{UPLOAD_DELAY} is {rules.delay_ms}, and uploads have {positions} positions: expected at least {needed}. "
            f"Raise max_model_len or {POSITIONS}, or lower {UPLOAD_DELAY}"
        )


def _phrases(engine: Any) -> PhraseTokens | None:
    """`phrases` of Rules."""
    if engine.vllm_config.model_config.architecture != ENCODE_ONCE or not usable(engine.vllm_config):
        return None
    return PhraseTokens.of_tokenizer(engine.input_processor.tokenizer)


def _sessions(state: Any, detector: Detector, labeller: Labeller | None, rules: Rules) -> LiveService | None:
    engine = state.engine_client
    config = engine.vllm_config
    if config.model_config.architecture != ENCODE_ONCE or not _options(config).get(OPTION):
        return None
    shape = SessionShape.of(engine.input_processor.tokenizer.instruct.audio_encoder.audio_config)
    models = state.openai_serving_models
    service = LiveService(
        Engine.of_vllm(engine),
        shape,
        detector,
        lambda name: name != DIARIZER and models.is_base_model(name),  # which asks for speakers as soon as they speak
        LIMITS.live_idle_s,
        LIMITS.live_backlog_s,
        models.base_model_paths[0].name,
        TokenStream.of_tokenizer(engine.input_processor.tokenizer),
        LIMITS.live_session_s,
        most_sockets(_options(config)[OPTION]),
        labeller,
        rules.unlabelled,
        rules.phrases,
    )
    service.voices.prepare()
    return service


def _longest(state: Any) -> tuple[int, Bounds, Fraction]:
    """(the model's rate in Hz, the longest clips of a chat, seconds of audio in one transcription request)"""
    engine, served = state.engine_client, state.openai_serving_transcription.asr_config
    model, bounds = engine.vllm_config.model_config, LIMITS.bounds
    rate = int(served.sample_rate)
    if served.allow_audio_chunking:  # Whisper, which takes one piece after another
        return rate, bounds, Fraction(served.max_audio_clip_s)
    tokenizer = engine.input_processor.tokenizer
    if model.architecture in REALTIME:
        return rate, bounds, Fraction(ClipLength.of_tokenizer(tokenizer).longest(clip_positions(model)), rate)
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


def drifted(error: Exception) -> str:
    """Why the server cannot start: what `attach` raised."""
    if isinstance(error, ContextError | KindError | logs.LogError | keys.KeysError):
        return str(error)
    if isinstance(error, shims.PatchError):
        return f"PatchError: {error}"
    found = f"{type(error).__name__}: {error}"
    return f"PatchError: voxtral_serve.guard has drifted on vllm {shims.installed('vllm')}: {found}. {shims.ADVICE}"
