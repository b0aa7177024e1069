"""The pages for those who come from OpenAI or Mistral have each parameter, and say of it what the server does.

The parameters of Mistral's client are compared with the page in tests/clients, where that client is installed.
"""

import json
import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

import phrases
import pytest
import yaml
from guarding import RULES
from livefakes import context
from openai.types.audio import speech_create_params, transcription_create_params, translation_create_params
from openai.types.realtime import audio_transcription_param
from openai.types.realtime import realtime_transcription_session_create_request_param as session_params
from pages import Parameters
from places import ROOT
from typing_extensions import get_type_hints, is_typeddict

from voxtral_serve.guard import fields
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.form import Part
from voxtral_serve.guard.live import commands
from voxtral_serve.guard.live.codec import Codec
from voxtral_serve.guard.live.events import EventError, parsed
from voxtral_serve.guard.live.mistral_codec import MistralCodec
from voxtral_serve.guard.live.openai_codec import OpenAiCodec
from voxtral_serve.guard.speech import fields as speech_fields

INPUT = "audio.input."
CLIP = "data:audio/wav;base64,UklGRg=="
# Values that differ from those of a request without the parameter; what a parameter needs stands before it.
UPLOADS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "model": (("model", "gpt-transcribe"),),
    "response_format": (("response_format", "srt"),),
    "timestamp_granularities": (("response_format", "verbose_json"), ("timestamp_granularities[]", "word")),
    "include": (("include[]", "logprobs"),),
    "stream": (("stream", "true"),),
    "temperature": (("temperature", "0.5"),),
    "chunking_strategy": (("chunking_strategy", '{"type": "server_vad"}'),),
    "language": (("language", "fr"),),
    "languages": (("languages[]", "fr"),),
    "prompt": (("prompt", "Voxtral"),),
    "keywords": (("keywords[]", "b"),),
    "context_bias": (("context_bias", "b"),),
    "diarize": (("diarize", "true"),),
    "speaker_references": (("diarize", "true"), ("speaker_references", json.dumps({"Ann": "UklGRg=="}))),
    "file_url": (("file_url", "http://example.org"),),
    "file_id": (("file_id", "1"),),
    **dict.fromkeys(
        ("known_speaker_names", "known_speaker_references"),
        (("response_format", "diarized_json"), ("known_speaker_names[]", "Ann"), ("known_speaker_references[]", CLIP)),
    ),
}
SESSIONS: Mapping[str, Mapping[str, Any]] = {
    "include": {"include": ["item.input_audio_transcription.logprobs"]},
    "format": {"format": {"type": "audio/pcmu"}},
    "transcription.model": {"transcription": {"model": "gpt-live-transcribe"}},
    "transcription.delay": {"transcription": {"delay": "high"}},
    "transcription.keywords": {"transcription": {"keywords": ["b"]}},
    "transcription.language": {"transcription": {"language": "fr"}},
    "transcription.languages": {"transcription": {"languages": ["fr"]}},
    "transcription.prompt": {"transcription": {"prompt": "Voxtral"}},
    "turn_detection": {"turn_detection": {"type": "semantic_vad"}},
    "turn_detection.create_response": {"turn_detection": {"type": "server_vad", "create_response": True}},
    "turn_detection.interrupt_response": {"turn_detection": {"type": "server_vad", "interrupt_response": True}},
    "noise_reduction": {"noise_reduction": {"type": "near_field"}},
}
MISTRALS_SESSIONS: Mapping[str, Any] = {
    "audio_format": {"encoding": "pcm_mulaw", "sample_rate": 8000},
    "target_streaming_delay_ms": 960,
    "turn_detection": {},
    "context_bias": ["b"],
    "diarize": True,
    "language": "fr",
    "speaker_references": {"Ann": "UklGRg=="},
}
SPEECH = {
    "input": "Two cups, please.",
    "model": "voxtral-tts",
    "speed": 2,
    "voice": "ann",
    "response_format": "wav",
    "stream_format": "sse",
    "stream": True,
    "ref_audio": "UklGRg==",
}
FILES = Parameters("from-openai.md", "Files")
LIVE = Parameters("from-openai.md", "Live")
SPOKEN = Parameters("from-openai.md", "Speech")
MISTRALS_FILES = Parameters("from-mistral.md", "Files")
MISTRALS_LIVE = Parameters("from-mistral.md", "Live")
MISTRALS_SPOKEN = Parameters("from-mistral.md", "Speech")


def names(params: Any) -> set[str]:
    """The parameters of one of OpenAI's methods: of a TypedDict, or of each in a union of them."""
    return set().union(*(get_type_hints(each) for each in get_args(params) or (params,)))


def leaves(hint: Any, path: str = "") -> Iterator[str]:
    """The paths of what can be set in a TypedDict, and in those in it."""
    if is_typeddict(hint):
        for name, inner in get_type_hints(hint).items():
            inside = list(leaves(inner, f"{path}{name}."))
            yield from inside or [f"{path}{name}"]
    elif get_origin(hint) in (Union, UnionType):
        for each in get_args(hint):
            yield from leaves(each, path)


def test_the_page_has_each_parameter_of_openais_client() -> None:
    for params in (
        transcription_create_params.TranscriptionCreateParams,
        translation_create_params.TranslationCreateParams,
    ):
        assert names(params) - set(FILES.entries) == set()
    assert names(speech_create_params.SpeechCreateParams) == set(SPOKEN.entries)
    paths = set(leaves(session_params.RealtimeTranscriptionSessionCreateRequestParam))
    assert len(paths) > 18 and f"{INPUT}transcription.keywords" in paths
    for path in paths:
        LIVE.of(path.removeprefix(INPUT))  # or it raises KeyError


def test_the_names_of_openais_models_are_names_of_the_profile() -> None:
    """But for one that the page names, and those with a date."""
    profile = yaml.safe_load((ROOT / "profiles/fast.yaml").read_text(encoding="utf-8"))
    hint = get_type_hints(audio_transcription_param.AudioTranscriptionParam)["model"]
    models = {name for each in get_args(hint) for name in get_args(each)}
    others = models - set(profile["served_model_name"])
    assert len(models) > 6 and {name for name in others if not re.search(r"-\d{4}-", name)} == {"gpt-realtime-whisper"}


def verdicts(table: Parameters, *but: str) -> dict[str, str]:
    return {name: entry.verdict for name, entry in table.entries.items() if name not in but}


def uploaded(*given: tuple[str, str]) -> tuple[fields.TranscriptRequest, Any]:
    """(request, how the model chooses tokens) of a form; one of another place of the audio has no file."""
    file = [] if given and given[0][0].startswith("file_") else [Part(b"file", b"clip.wav", b"RIFF")]
    parts = [*file, *(Part(name.encode(), None, text.encode()) for name, text in given)]
    request = fields.read(
        parts, "transcribe", RULES._replace(phrases=phrases.TOKENS), {"voxtral", "gpt-transcribe"}.__contains__
    )[0]
    chosen = request.sampling.model_dump(include=set(fields.Sampling.model_fields))
    return request._replace(sampling=fields.Sampling.model_validate({})), chosen


def of_upload(name: str) -> str:
    given = UPLOADS[name]
    try:
        found = uploaded(*given)
    except RefusedError as error:
        assert error.param == name
        return "refused"
    if ignored := found[0].ignored:
        assert [each.removesuffix("[]") for each in ignored] == [name]
        return "ignored"
    assert found != uploaded(*given[: len(given) // 2])
    return "yes"


@pytest.mark.parametrize("table", [FILES, MISTRALS_FILES], ids=["openai", "mistral"])
def test_what_a_page_says_of_an_upload(table: Parameters) -> None:
    said = verdicts(table, "file")
    assert said == {name: of_upload(name) for name in said}


def of_session(codec: Codec, session: Mapping[str, Any]) -> str:
    """Whether an update with these settings changes what the session does."""
    before = codec.options
    event = parsed(json.dumps({"type": "session.update", "session": session}))
    try:
        done = codec.decode(event, begun=False)
    except EventError:
        return "refused"
    assert any(isinstance(command, commands.Answer) for command in done)
    return "ignored" if codec.options == before else "yes"


def test_what_the_page_says_of_openais_sessions() -> None:
    here = context()._replace(phrases=phrases.TOKENS, serves=lambda name: name in ("voxtral", "gpt-live-transcribe"))
    said = verdicts(LIVE, "type")
    found = {}
    for name in said:
        given = SESSIONS[name]
        session = given if name == "include" else {"audio": {"input": given}}
        found[name] = of_session(OpenAiCodec(here), {"type": "transcription", **session})
    assert said == found


def test_what_the_page_says_of_mistrals_sessions() -> None:
    here = context()._replace(phrases=phrases.TOKENS, unlabelled=None)
    said = verdicts(MISTRALS_LIVE, "model")
    found = {name: of_session(MistralCodec(here, None), {name: MISTRALS_SESSIONS[name]}) for name in said}
    assert said == found


@pytest.mark.parametrize("table", [SPOKEN, MISTRALS_SPOKEN], ids=["openai", "mistral"])
def test_what_a_page_says_of_speech(table: Parameters) -> None:
    usual = {"input": "Hello.", "voice": "bob", "response_format": "pcm"}

    def of_speech(name: str) -> str:
        def read(**given: Any) -> speech_fields.SpeechParameters:
            body = json.dumps(usual | given).encode()
            return speech_fields.read(body, ["ann", "bob"], ["voxtral-tts"])

        try:
            request = read(**{name: SPEECH.get(name, "other")})
        except RefusedError:
            return "refused"
        if request.ignored:
            assert request.ignored == (name,)
            return "ignored"
        assert request != read()
        return "yes"

    assert verdicts(table) == {name: of_speech(name) for name in table.entries}
