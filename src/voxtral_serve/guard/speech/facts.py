"""Facts about a server of speech synthesis, read from the live objects of vLLM-Omni's API server."""

from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, NamedTuple

from voxtral_serve import shims
from voxtral_serve.guard import access
from voxtral_serve.guard.about import about_speech
from voxtral_serve.guard.keyring import KeyRing
from voxtral_serve.guard.limits import LIMITS, OpenLimits, most_in_flight
from voxtral_serve.guard.speech.stages import Stages

ARCHITECTURES = ("VoxtralTTSForConditionalGeneration", "VoxCPM2TalkerForConditionalGeneration")
BODY_BYTES = 128 << 10  # the largest body: CHARACTERS as \uXXXX\uXXXX are 48 KiB
MIDDLEWARE = "`middleware: voxtral_serve.guard.Guard`"


class KindError(RuntimeError):
    """The guard has no part for what the server serves. The message says what to do."""


class SpeechFacts(NamedTuple):
    """What the guard knows of the server.

    voices          names, in lower case and sorted
    most_in_flight  requests at a time whose bodies are whole
    verify          whether a request's headers hold vLLM's key; None if it has none
    open            limits on bodies that are still arriving
    about           what GET /v1/server says
    stages          of the engine
    models          names of the model
    keys            those of VOXTRAL_SERVE_KEYS; None if it is not set
    """

    voices: tuple[str, ...]
    most_in_flight: int
    verify: Callable[[Any], bool] | None
    open: OpenLimits
    about: Mapping[str, Any]
    stages: Stages
    models: tuple[str, ...]
    keys: KeyRing | None = None

    @property
    def stopping(self) -> bool:
        """Whether sessions are drained: there are none."""
        return False

    async def aclose(self) -> None:
        """Nothing runs beside the server's process."""

    def watches(self) -> Iterator[Coroutine[Any, Any, None]]:
        """What runs for as long as the server does."""
        yield self.stages.watch()
        if self.keys is not None:
            yield self.keys.watch()


def read(state: Any) -> SpeechFacts:
    """What vLLM-Omni's live objects say. `state` is the application's.

    Raises KindError, KeysError, AttributeError or another error if vLLM-Omni is not as expected.
    """
    engine = state.engine_client
    config = engine.vllm_config
    if config is None or config.model_config.architecture not in ARCHITECTURES:
        raise unknown(engine)
    if not hasattr(state.openai_serving_speech, "_generate_audio_sse_events"):
        raise KindError(
            f"vllm-omni {shims.installed('vllm-omni')} has no events for speech: {MIDDLEWARE} needs 0.32.0rc1 or newer"
        )
    if (processes := config.parallel_config._api_process_count) != 1:
        raise KindError(f"api_server_count is {processes}: expected 1 for speech synthesis behind {MIDDLEWARE}")
    voices, in_flight = _voices(state.openai_serving_speech), most_in_flight(config)
    names = tuple(model.name for model in state.openai_serving_models.base_model_paths)
    return SpeechFacts(
        voices=voices,
        most_in_flight=in_flight,
        verify=access.verify(state),
        open=OpenLimits.of_process(1, BODY_BYTES),
        about=about_speech(names, in_flight),
        stages=Stages(engine, LIMITS.shutdown_s, state.server),  # vLLM-Omni 0.32.0rc1 refuses shutdown_timeout
        models=names,
        keys=access.ring(state, 1),
    )


def _voices(serving: Any) -> tuple[str, ...]:
    """Those that vLLM-Omni says the model has, not those that were uploaded to it. Raises KindError without any."""
    has = serving._get_tts_adapter().capabilities
    voices = tuple(sorted({name.lower() for name in (*has.supported_speakers, *has.precomputed_speakers)}))
    if not voices:
        raise KindError("vllm-omni has no voices for this checkpoint: expected at least one")
    return voices


def unknown(engine: Any) -> KindError:
    """The error for a server of neither speech-to-text nor ARCHITECTURES. `engine`: vLLM's EngineClient."""
    config = engine.vllm_config
    served = "a model without a language model" if config is None else config.model_config.architecture
    return KindError(
        f"voxtral_serve.guard cannot serve {served}: expected a model of speech-to-text, or "
        f"{' or '.join(ARCHITECTURES)}. Remove {MIDDLEWARE} for this model"
    )
