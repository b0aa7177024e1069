"""Read the fields of an upload's form: an allow-list of typed fields, as OpenAI's API and vLLM's have them.

Every other field has no effect, and the answer names it. docs/pages/speech-api.md has a table of these models.
"""

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from voxtral_serve.engine.keywords import LONGEST_TEXT, KeywordError, table
from voxtral_serve.engine.keywords import MOST as MOST_PHRASES
from voxtral_serve.engine.session import LEAST_UPLOAD_S, SessionShape
from voxtral_serve.guard.errors import RefusedError, refusing, too_large
from voxtral_serve.guard.form import ELSEWHERE, Part, elsewhere
from voxtral_serve.guard.limits import FIELDS_BYTES, REFERENCES_BYTES, Rules
from voxtral_serve.guard.typed import FIELD_NAME, checked, named, shown
from voxtral_serve.speakers import MOST
from voxtral_serve.speakers.known import KnownSpeakerError, check_names
from voxtral_serve.transcript.formats import DIARIZED, VERBOSE, AnswerFormat, FormatName, Granularity
from voxtral_serve.transcript.language import TELLING

INT32, INT64 = 2**31 - 1, 2**63 - 1
NAME_LENGTH = 256  # characters of a model's name
SUBTITLES = ("srt", "vtt")  # files, which are not streamed
GRANULARITIES_FIELD = "timestamp_granularities[]"
NAMES_FIELD, CLIPS_FIELD = "known_speaker_names[]", "known_speaker_references[]"
MISTRALS_CLIPS_FIELD = "speaker_references"
DELAY = "target_streaming_delay_ms"  # Mistral's name
KEYWORDS, HOTWORDS, CONTEXT_BIAS = "keywords", "hotwords", "context_bias"  # OpenAI's, vLLM's and Mistral's names
LISTED_TEXT = MOST_PHRASES * (LONGEST_TEXT + 2)  # characters of phrases in one text, with commas between them
LOGPROBS = "logprobs"  # of `include[]`
DIARIZE = "diarize"
SEPARATE = "separate"  # of `channels`
OPTIONAL = "optional"
DIARIZER = "gpt-4o-transcribe-diarize"  # the name of a model that asks for speakers, where the server has it


def _no_beams(value: bool) -> bool:
    if value:  # with the encode-once model, vLLM 0.32.0 answers with status 200 and an empty text
        raise PydanticCustomError("invalid_value", "use_beam_search is not supported: leave it out")
    return value


class Sampling(BaseModel):
    """How the model chooses tokens. None stands for the server's default."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    temperature: float | None = Field(
        None, ge=0, le=2, description="0 takes the likeliest token; the default of uploads"
    )
    top_p: float | None = Field(None, gt=0, le=1, description="samples from the likeliest tokens with this probability")
    top_k: int | None = Field(None, ge=-1, le=INT32, description="samples from this many tokens; 0 and -1: from all")
    min_p: float | None = Field(None, ge=0, le=1, description="least probability, relative to the likeliest token's")
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64, description="equal seeds repeat what is sampled")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="for each time that a token was written")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="for a token that was written")
    repetition_penalty: float | None = Field(None, gt=0, le=10, description="factor, for a token that was written")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=INT32, description="most tokens of a text; of each piece of a long clip"
    )


class UploadFields(Sampling):
    """The fields of a form, beside `file`. Values are the form's texts; numbers and switches are parsed from them."""

    model: str | None = Field(None, max_length=NAME_LENGTH, description="a name of `GET /v1/models`")
    response_format: FormatName = Field("json", description="how the transcript is written")
    timestamp_granularities: list[Granularity] = Field(
        [],
        alias="timestamp_granularities[]",
        max_length=16,
        description="times in `verbose_json`: `segment` is the default; in `json` with `diarize`, as Mistral has them",
    )
    include: list[Annotated[str, Field(max_length=64)]] = Field(
        [],
        alias="include[]",
        max_length=16,
        description="`logprobs`, of tokens, in `json` with a Realtime model; nothing else",
    )
    stream: bool = Field(False, description="sends events as the text is made")
    stream_include_usage: bool = Field(False, description="vLLM's; the last event always has the usage")
    language: str | None = Field(None, max_length=64, description="of the speech, as `en`, for models that take it")
    prompt: str = Field("", max_length=1 << 16, description="text before the transcript, for models that take it")
    target_streaming_delay_ms: int | None = Field(
        None,
        ge=80,
        le=2400,
        multiple_of=80,
        description="of the text behind the audio: a longer one has fewer errors as Mistral reports",
    )
    keywords: list[Annotated[str, Field(max_length=LONGEST_TEXT)]] = Field(
        [],
        alias="keywords[]",
        max_length=MOST_PHRASES,
        description="words or phrases that are preferred where the audio allows it, at most 100 of 16 tokens each",
    )
    hotwords: str = Field("", max_length=LISTED_TEXT, description="vLLM's: the same in one text, with commas between")
    context_bias: list[Annotated[str, Field(max_length=LISTED_TEXT)]] = Field(
        [], max_length=MOST_PHRASES, description="Mistral's: the same; `_` stands for a blank, and commas separate"
    )
    chunking_strategy: str = Field("auto", max_length=1024, description="`auto`; others have no effect")
    n: Literal["1"] = Field("1", description="number of transcripts")
    diarize: bool | Literal["optional"] | None = Field(
        None,
        description="labels speakers; `optional`: answers without labels, if there are none. `json` is Mistral's then",
    )
    channels: Literal["mixed", "separate"] = Field(
        "mixed", description="`separate`: each channel by itself, merged by time; `channel-1` is then a `speaker`"
    )
    num_speakers: int | None = Field(None, ge=1, le=MOST, description="of the clip, if it is known")
    known_speaker_names: list[str] = Field(
        [], alias="known_speaker_names[]", max_length=MOST, description="of speakers who may be in the clip"
    )
    known_speaker_references: list[str] = Field(
        [],
        alias="known_speaker_references[]",
        max_length=MOST,
        description="a clip of each, 2 to 10 s, as a `data:` URL in base64",
    )
    speaker_references: str | None = Field(
        None, description="Mistral's: a JSON object of names, each with its clip in base64"
    )
    use_beam_search: Annotated[bool, AfterValidator(_no_beams)] = Field(False, description="refused, if it is true")


LISTS = {
    "include": "include[]",
    "timestamp_granularities": GRANULARITIES_FIELD,
    "known_speaker_names": NAMES_FIELD,
    "known_speaker_references": CLIPS_FIELD,
    KEYWORDS: "keywords[]",
    CONTEXT_BIAS: CONTEXT_BIAS,
}
KNOWN = frozenset(UploadFields.model_fields) - frozenset(LISTS)
OF_SPEAKERS = ("num_speakers", "known_speaker_names", "known_speaker_references", MISTRALS_CLIPS_FIELD)
CLIPS = frozenset(name.encode() for name in OF_SPEAKERS if name.endswith("_references"))


class KnownSpeaker(NamedTuple):
    """The name of a speaker, a file of audio with their voice, and the field that has it."""

    name: str
    audio: bytes
    where: str


class TranscriptRequest(NamedTuple):
    """The request in an upload.

    form      how to write the answer
    streamed  whether to send it as events
    logprobs  whether the engine gives the logprobs of the tokens: for `include[]=logprobs` with `json`, and for the
              confidence in `verbose_json`
    ignored   names of fields without effect, for the header: "logprobs" if they are not available
    language  as the client wrote it; None if it did not
    prompt    empty if there is none
    sampling  of the client's values
    model     the name that the client gives it; None if it gives none
    number    of speakers; None if it is not known
    optional  whether the text is given without speakers if they cannot be told apart
    known     speakers who get their names
    mistral   whether the answer is as Mistral's: `json` for a form with `diarize`, which Mistral's clients always send
    shape     token positions for a delay that is not the checkpoint's; None for that
    keywords  the engine's table of custom words; None without any
    """

    form: AnswerFormat
    streamed: bool = False
    logprobs: bool = False
    ignored: tuple[str, ...] = ()
    language: str | None = None
    prompt: str = ""
    sampling: Sampling = Sampling.model_validate({})
    model: str | None = None
    number: int | None = None
    optional: bool = False
    known: tuple[KnownSpeaker, ...] = ()
    mistral: bool = False
    shape: SessionShape | None = None
    keywords: bytes | None = None

    @property
    def tells_languages(self) -> bool:
        """Whether `json`, and the last event of its stream, has `languages`."""
        return self.form.name == "json" and self.model in TELLING


def check_task(task: str, can: frozenset[str]) -> None:
    """Raises RefusedError for a translation by a model that cannot translate: vLLM would answer with a transcript."""
    if task == "translate" and "translate" not in can:
        raise RefusedError(
            400, "this model does not translate: send audio to /v1/audio/transcriptions", "no_translation", "model"
        )


def read(
    parts: Iterable[Part], task: str, rules: Rules, serves: Callable[[str], bool]
) -> tuple[TranscriptRequest, bytes | memoryview]:
    """(request, audio file) in a form. `task` is "transcribe" or "translate"; `serves` says whether the server has a
    model of this name. Raises RefusedError."""
    file, values, others = _apart(parts, rules.file_bytes)
    fields = checked(UploadFields, values)
    if fields.model is not None and not serves(fields.model):
        name = ascii(fields.model)[1:-1][:80]
        raise RefusedError(404, f"The model `{name}` does not exist", "model_not_found", "model")
    _check_together(fields, rules.timed)
    separate = fields.channels == SEPARATE
    asking = None if separate else _asking(fields)
    speakers = asking is not None and _labels(asking, fields, rules)
    usual = () if fields.response_format == "json" else ("segment",)
    granularities = frozenset(fields.timestamp_granularities or usual)
    form = AnswerFormat(
        fields.response_format, granularities, fields.language, task, speakers=speakers, channels=separate
    )
    listed = LOGPROBS in fields.include and form.name == "json"
    logprobs = rules.timed and (listed or form.name == VERBOSE)
    without_effect = {
        "language": bool(fields.language) and "language" not in rules.can,
        "prompt": bool(fields.prompt) and "prompt" not in rules.can,
        "chunking_strategy": fields.chunking_strategy != "auto",  # long clips are always cut, as with "auto"
        DELAY: fields.target_streaming_delay_ms is not None and rules.shape is None,
        **{name: bool(getattr(fields, name)) and rules.phrases is None for name in (KEYWORDS, HOTWORDS, CONTEXT_BIAS)},
        LOGPROBS: LOGPROBS in fields.include and not (listed and rules.timed),
        "include": bool(set(fields.include) - {LOGPROBS}),
        DIARIZE: asking is not None and not speakers,
        **{name: bool(getattr(fields, name)) and not speakers for name in OF_SPEAKERS},
    }
    ignored = named([*(name for name, true in without_effect.items() if true), *others])
    request = TranscriptRequest(
        form,
        fields.stream,
        logprobs,
        ignored,
        fields.language,
        fields.prompt,
        Sampling(**{name: getattr(fields, name) for name in Sampling.model_fields}),
        fields.model,
        fields.num_speakers,
        fields.diarize == OPTIONAL,
        tuple(_known(fields)) if speakers else (),
        fields.response_format == "json" and fields.diarize is not None,
        _shape(fields, rules),
        _keywords(fields, rules),
    )
    return request, file


def _check_channels(fields: UploadFields, timed: bool) -> None:
    """Raises RefusedError for what does not go together with `channels=separate`."""
    problem = None
    if not timed:
        problem = "this model gives no word times, by which channels are merged"
    elif fields.diarize:
        problem = f"its speakers are the channels: leave out {DIARIZE}"
    elif fields.stream:
        problem = "it is not available with stream: texts are merged when all are complete"
    elif LOGPROBS in fields.include:
        problem = f"its words are merged by time, but tokens are not: leave out {LOGPROBS} of include[]"
    if problem:
        raise RefusedError(400, f"channels {SEPARATE}: {problem}", "invalid_value", "channels")


def _asking(fields: UploadFields) -> str | None:
    """The name of the field that asks for speakers; None if none does."""
    if fields.response_format == DIARIZED:
        return "response_format"
    if fields.diarize is None:
        return "model" if fields.model == DIARIZER else None
    return DIARIZE if fields.diarize else None


def _labels(asking: str, fields: UploadFields, rules: Rules) -> bool:
    """Whether speakers are labelled, for which the field `asking` asks. Raises RefusedError."""
    if rules.unlabelled is not None and fields.diarize != OPTIONAL:
        value = str(getattr(fields, asking)).lower()
        raise RefusedError(400, f"{asking} {value}: {rules.unlabelled}", "no_speaker_labels", asking)
    return rules.unlabelled is None


def _shape(fields: UploadFields, rules: Rules) -> SessionShape | None:
    """The shape of an upload whose delay is not the checkpoint's. Raises RefusedError."""
    asked = fields.target_streaming_delay_ms
    if rules.shape is None:
        return None
    with refusing(ValueError, DELAY):
        shape = rules.shape.with_delay_ms(rules.delay_ms if asked is None else asked)
        if shape != rules.shape and rules.longest_s(shape) < LEAST_UPLOAD_S:
            raise ValueError(f"a delay of {shape.delay_ms} ms: its padding leaves this server's clips too little room")
    return None if shape == rules.shape else shape


def _keywords(fields: UploadFields, rules: Rules) -> bytes | None:
    """The table of the custom words in all three fields. Raises RefusedError, of the field that has the fault."""
    if rules.phrases is None:
        return None
    phrases: list[str] = []
    made = None
    for name, given in (
        (KEYWORDS, fields.keywords),
        (HOTWORDS, separated(fields.hotwords)),
        (CONTEXT_BIAS, (phrase for entry in fields.context_bias for phrase in bias_phrases(entry))),
    ):
        known = len(phrases)
        phrases += islice(given, MOST_PHRASES + 1)  # the table refuses one too many
        if len(phrases) > known:
            with refusing(KeywordError, name):
                made = table(rules.phrases, tuple(phrases))
    return made


def separated(text: str) -> list[str]:
    """The phrases in a text with commas between them."""
    return [phrase.strip() for phrase in re.split("[,\uff0c\u3001\n]", text) if phrase.strip()]


def bias_phrases(entry: str) -> list[str]:
    """The phrases in an entry of Mistral's `context_bias`, which earlier versions of its API have without blanks."""
    return [phrase if " " in phrase else phrase.replace("_", " ") for phrase in separated(entry)]


def _known(fields: UploadFields) -> Iterator[KnownSpeaker]:
    """The known speakers of OpenAI's fields, or of Mistral's. Raises RefusedError."""
    names, clips = fields.known_speaker_names, fields.known_speaker_references
    of_names, of_clips = NAMES_FIELD, CLIPS_FIELD
    if fields.speaker_references is not None:
        if names or clips:
            message = f"known speakers are in {MISTRALS_CLIPS_FIELD}, and in {NAMES_FIELD} or {CLIPS_FIELD}"
            raise RefusedError(400, f"{message}: send one of both", "invalid_value", MISTRALS_CLIPS_FIELD)
        known = _object(fields.speaker_references)
        names, clips = list(known), list(known.values())
        of_names = of_clips = MISTRALS_CLIPS_FIELD
    if len(names) != len(clips):
        message = f"the form has {len(names)} {NAMES_FIELD} and {len(clips)} {CLIPS_FIELD}: expected a clip of each"
        raise RefusedError(400, message, "invalid_value", CLIPS_FIELD if names else NAMES_FIELD)
    with refusing(KnownSpeakerError, of_names):
        check_names(names)
    audio: dict[bytes, str] = {}
    for number, (name, clip) in enumerate(zip(names, clips, strict=True)):
        where = f"{of_clips.removesuffix('[]')}[{number}]"
        url = of_clips == CLIPS_FIELD or clip[:5].lower() == "data:"
        data = from_base64(base64_of(clip, where) if url else clip, where)
        if data in audio:
            raise RefusedError(
                400, f"{where} is also the clip of {audio[data]!a}: expected one of {name!a}", "invalid_value", where
            )
        audio[data] = name
        yield KnownSpeaker(name, data, where)


def _object(text: str) -> dict[str, str]:
    """Mistral's known speakers: clips by name. Raises RefusedError."""
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        message = f"{MISTRALS_CLIPS_FIELD} is {shown(text)}: expected a JSON object of names, each with text in base64"
        raise RefusedError(400, message, "invalid_value", MISTRALS_CLIPS_FIELD) from error


def base64_of(url: str, where: str) -> str:
    """The base64 text of a data: URL in the field `where`. Raises RefusedError."""
    form, comma, text = url[5:].partition(",")
    if url[:5].lower() != "data:" or not comma or not form.lower().endswith(";base64"):
        raise RefusedError(
            400, f"{where} is not a data: URL in base64: expected data:audio/wav;base64,…", "invalid_url", where
        )
    return text


def from_base64(text: str, where: str) -> bytes:
    """What `text`, in the field `where`, is in base64. Raises RefusedError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusedError(400, f"{where} is not valid base64: {error}", "invalid_value", where) from error


def _apart(parts: Iterable[Part], file_bytes: int) -> tuple[bytes | memoryview, dict[str, Any], list[str]]:
    """(audio file, texts of the known fields, names of others) in a form. A field without text is not given.

    The last field of a name counts, of a list all.
    """
    files, fields = list[Part](), list[Part]()
    for part in parts:
        name = part.name.decode(errors="replace")
        if not FIELD_NAME.fullmatch(name):
            raise RefusedError(
                400, f"the form has a field called {ascii(name)[:80]}: expected a plain name", "invalid_form"
            )
        (files if part.name == b"file" else fields).append(part)
    audio = _audio(files, fields, file_bytes)
    clips = sum(len(part.data) for part in fields if part.name.partition(b"[")[0] in CLIPS)
    if clips > REFERENCES_BYTES:
        message = f"the clips of known speakers have {clips} bytes in base64: expected at most {REFERENCES_BYTES}"
        raise RefusedError(413, message, "form_too_large", CLIPS_FIELD)
    if sum(len(part.data) for part in fields) - clips > FIELDS_BYTES:
        raise RefusedError(413, f"the form has more than {FIELDS_BYTES} bytes besides its audio", "form_too_large")
    values, others = dict[str, Any](), list[str]()
    for part in fields:
        name, text = part.name.decode(), _text(part)
        base = name.partition("[")[0]  # as in include[], or chunking_strategy[type]
        if base in LISTS and text:
            values.setdefault(LISTS[base], []).append(text)
        elif name in KNOWN and text:
            values[name] = text
        elif text:
            others.append(base or name)
    return audio, values, others


def _text(part: Part) -> str:
    name = part.name.decode()
    if part.filename is not None:
        raise RefusedError(
            400, f"`{name}` was sent as a file: send the audio as `file`, other fields as text", "invalid_form", name
        )
    try:
        return str(part.data, "utf-8")
    except UnicodeDecodeError as error:
        raise RefusedError(400, f"`{name}` is not UTF-8: {error.reason}", "invalid_form", name) from error


def _audio(files: Sequence[Part], others: Iterable[Part], file_bytes: int) -> bytes | memoryview:
    """What is in `file`."""
    if not files:
        for part in others:
            if ELSEWHERE.fullmatch(b"%b=%b" % (part.name, bytes(part.data[:1]))):
                raise elsewhere(part.name.decode())
        names = ", ".join(named(sorted(part.name.decode() for part in others))) or "none"
        raise RefusedError(
            400,
            f"the form has no field called `file` (its fields: {names}): send the audio as `file`",
            "no_file",
            "file",
        )
    if len(files) > 1:
        raise RefusedError(
            400, "the form has two fields called `file`: send one clip per request", "invalid_form", "file"
        )
    (file,) = files
    if file.filename is None:
        raise RefusedError(
            400,
            "`file` was sent as text: send it as a file, with a filename (curl: -F file=@clip.wav, with the @)",
            "invalid_form",
            "file",
        )
    if len(file.data) > file_bytes:
        raise too_large("`file`", len(file.data), file_bytes)
    return file.data


def _check_together(fields: UploadFields, timed: bool) -> None:
    """Raises RefusedError for fields that do not go together, or not with a model whose tokens have no times."""
    form, granularities, problem = fields.response_format, fields.timestamp_granularities, None
    if "word" in granularities and not timed:
        problem = f"{GRANULARITIES_FIELD} has word, but this model gives no word times"
    elif granularities and form != VERBOSE and not (form == "json" and fields.diarize is not None):
        problem = f"{GRANULARITIES_FIELD} needs response_format verbose_json, found {form}"
    if problem:
        raise RefusedError(400, problem, "invalid_value", GRANULARITIES_FIELD)
    if fields.channels == SEPARATE:
        _check_channels(fields, timed)
    elif form == DIARIZED and fields.diarize is False:
        raise RefusedError(400, f"diarize is false, but response_format is {form}", "invalid_value", DIARIZE)
    if fields.stream and form in SUBTITLES:
        raise RefusedError(
            400, f"response_format {form} is not available with stream", "invalid_value", "response_format"
        )
