"""The codecs of live protocols as functions: events to commands, outputs to events. No socket, session or engine."""

import json
from typing import Any

import phrases
import pytest
from livefakes import RATE, SHAPE, STREAM, context

from voxtral_serve.audio.stream import StreamFormat
from voxtral_serve.guard.live import commands, outputs
from voxtral_serve.guard.live.codec import Become, Codec, Command
from voxtral_serve.guard.live.events import EventError, parsed
from voxtral_serve.guard.live.handshake import UndecidedCodec
from voxtral_serve.guard.live.items import TurnText
from voxtral_serve.guard.live.mistral_codec import ENDED, MistralCodec, TurnDetection
from voxtral_serve.guard.live.openai_codec import OpenAiCodec
from voxtral_serve.guard.live.turns import SignFinder, SignRule, SpeechEnd, SpeechStart, TurnRule, TurnSign
from voxtral_serve.guard.live.vllm_codec import VllmCodec
from voxtral_serve.transcript.subtitles import Segment
from voxtral_serve.transcript.turns import TimedSegment
from voxtral_serve.transcript.words import Word

TEXT, INPUT = "conversation.item.input_audio_transcription", "input_audio_buffer"
TOO_LONG = "A" * (15 * 2**20 + 4)


def decoded(codec: Codec, kind: str, begun: bool = False, **fields: Any) -> list[Command]:
    return codec.decode(parsed(json.dumps({"type": kind, **fields})), begun)


def refused(codec: Codec, event: str, begun: bool = False) -> dict[str, Any]:
    """The answer to an event that is wrong."""
    content = None
    with pytest.raises(EventError) as caught:
        content = parsed(event)
        codec.decode(content, begun)
    answer: dict[str, Any] = json.loads(codec.refuse(caught.value, content))
    assert answer["type"] == "error" and len(json.dumps(answer)) < 2000
    return answer


def updated(codec: Codec, begun: bool = False, **session: Any) -> Any:
    """The `session` of the answer to an update."""
    *_, answer = decoded(codec, "session.update", begun, session=session)
    assert isinstance(answer, commands.Answer)
    event = json.loads(answer.event)
    assert event["type"] == "session.updated"
    return event["session"]


def encoded(codec: Codec, output: outputs.Output) -> list[dict[str, Any]]:
    return [json.loads(event) for event in codec.encode(output)]


def opened(codec: Codec) -> tuple[list[dict[str, Any]], list[Command]]:
    """(the events, the other commands) of a connection's begin"""
    done = codec.open()
    answers = [json.loads(command.event) for command in done if isinstance(command, commands.Answer)]
    return answers, [command for command in done if not isinstance(command, commands.Answer)]


def turn(number: int = 0, begin: int = 0, end: int | None = None) -> TurnText:
    text = TurnText(number, begin, STREAM, RATE)
    text.end = end
    return text


SEGMENT = TimedSegment(Segment("w4 w9.", 0.28, 0.7604), [Word("w4", 0.28, 0.36), Word("w9.", 0.68, 0.7604)])


# ---- All protocols


@pytest.mark.parametrize(
    ("codec", "keys"),
    [
        (OpenAiCodec(context()), ["type", "event_id", "id", "created", "session"]),
        (UndecidedCodec(context()), ["type", "id", "created", "session"]),
        (VllmCodec(context()), ["type", "id", "created"]),
        (MistralCodec(context(), None), ["type", "session"]),
    ],
)
def test_the_first_event(codec: Codec, keys: list[str]) -> None:
    (created,), others = opened(codec)
    assert (created["type"], list(created), others) == ("session.created", keys, [])


def test_the_first_event_fits_both_protocols() -> None:
    for codec in (OpenAiCodec(context()), UndecidedCodec(context())):
        (created,), _ = opened(codec)
        session = created["session"]
        assert (session["object"], session["type"]) == ("realtime.transcription_session", "transcription")
        assert session["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24000}
        assert session["audio"]["input"]["transcription"] == {"model": "voxtral"}
        assert session["audio"]["input"]["turn_detection"]["type"] == "server_vad"


@pytest.mark.parametrize(
    ("codec", "code"),
    [
        (OpenAiCodec(context(), is_beta=True), "beta_api_shape_disabled"),
        (OpenAiCodec(context(), model="whisper-9"), "model_not_found"),
        (MistralCodec(context(), "whisper-9"), "model_not_found"),
    ],
)
def test_a_connection_that_is_not_served_is_closed(codec: Codec, code: str) -> None:
    _, (close,) = opened(codec)
    assert isinstance(close, commands.Close)
    assert (close.ending.close, close.ending.reason, close.ending.code) == (1008, "refused", code)
    assert code == "beta_api_shape_disabled" or "expected voxtral" in close.ending.words
    assert codec.last_words(close.ending)


# What each protocol says of events that are wrong: (OpenAI's code and param, vLLM's code); Mistral has a status only.
@pytest.mark.parametrize(
    ("event", "openai", "param", "vllm"),
    [
        ("{", "invalid_json", None, "invalid_json"),
        ("[]", "processing_error", None, "processing_error"),
        ("[" * 100_000, "invalid_json", None, "invalid_json"),
        ('{"type":"\\ud800"}', "invalid_json", None, "invalid_json"),
        ("{}", "invalid_value", "type", "unknown_event"),
        ('{"type":"response.create"}', "invalid_value", "type", "unknown_event"),
        ('{"type":"transcription_session.update"}', "beta_api_shape_disabled", None, "unknown_event"),
        ('{"type":"input_audio_buffer.append"}', "processing_error", "audio", "processing_error"),
        ('{"type":"input_audio_buffer.append","audio":7}', "processing_error", "audio", "processing_error"),
        ('{"type":"input_audio_buffer.append","audio":"AAA"}', "invalid_audio", "audio", "invalid_audio"),
        ('{"type":"input_audio_buffer.append","audio":"' + TOO_LONG + '"}', "invalid_audio", "audio", "invalid_audio"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_event_is_named(event: str, openai: str, param: str | None, vllm: str) -> None:
    error = refused(OpenAiCodec(context()), event)["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", openai, param)
    assert refused(VllmCodec(context()), event)["code"] == vllm
    error = refused(MistralCodec(context(), None), event.replace("_buffer.", "."))["error"]
    assert error["code"] == 400 and error["message"]


def test_an_error_names_the_event_if_its_name_is_short() -> None:
    for event_id, repeated in (("mine", "mine"), ("x" * 513, None), (7, None)):
        event = json.dumps({"type": "hello", "event_id": event_id})
        assert refused(OpenAiCodec(context()), event)["error"]["event_id"] == repeated


# ---- vLLM's protocol


def vllms() -> VllmCodec:
    codec = VllmCodec(context())
    assert decoded(codec, "session.update", model="voxtral") == []
    return codec


def test_vllms_commands() -> None:
    codec = vllms()
    assert decoded(codec, f"{INPUT}.append", audio="AAEC/w==") == [commands.Append(b"\0\1\2\xff")]
    assert decoded(codec, f"{INPUT}.commit") == decoded(codec, f"{INPUT}.commit", final=False) == [commands.Begin()]
    for final in (True, "true", "True", 1, "1"):
        assert decoded(codec, f"{INPUT}.commit", final=final) == [commands.End()]


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"type": f"{INPUT}.clear"}, "unknown_event"),
        ({"type": "session.update"}, "invalid_event"),
        ({"type": "session.update", "model": "other"}, "model_not_found"),
        ({"type": "session.update", "model": ["other"]}, "model_not_found"),
        ({"type": f"{INPUT}.append", "audio": ""}, "invalid_audio"),
        ({"type": f"{INPUT}.append", "audio": "AAAA"}, "invalid_audio"),  # three bytes
        ({"type": f"{INPUT}.commit"}, "model_not_validated"),
    ],
    ids=str,
)
def test_what_vllms_protocol_refuses(event: dict[str, Any], code: str) -> None:
    assert refused(VllmCodec(context()), json.dumps(event))["code"] == code


@pytest.mark.parametrize("kind", ["hello" * 1000, "session.update"])
def test_errors_of_vllms_protocol_repeat_little(kind: str) -> None:
    assert len(refused(VllmCodec(context()), json.dumps({"type": kind, "model": "m" * 3000}))["error"]) < 300


def test_vllms_events() -> None:
    codec = vllms()
    deltas = [event["delta"] for event in encoded(codec, outputs.Tokens(" é", 3))]
    assert deltas == ["", "", " é"]
    assert [event["delta"] for event in encoded(codec, outputs.Tokens("", 2))] == ["", ""]
    (done,) = encoded(codec, outputs.TextDone("text", 39, 5))
    usage = {"prompt_tokens": 39, "total_tokens": 44, "completion_tokens": 5, "prompt_tokens_details": None}
    assert done == {"type": "transcription.done", "text": "text", "usage": usage}


@pytest.mark.parametrize("is_beta", [False, True])
def test_the_first_update_tells_the_protocol(is_beta: bool) -> None:
    for kind, fields in (("session.update", {"session": {}}), ("transcription_session.update", {})):
        (become,) = decoded(UndecidedCodec(context(), is_beta), kind, **fields)
        assert isinstance(become, Become) and isinstance(become.codec, OpenAiCodec) and become.opens is is_beta
    codec = UndecidedCodec(context(), is_beta)
    assert decoded(codec, "session.update", model="voxtral", session={}) == []
    assert refused(codec, '{"type":"session.update","session":{}}')["code"] == "invalid_event"


# ---- OpenAI's protocol


def test_openais_commands() -> None:
    codec = OpenAiCodec(context())
    assert decoded(codec, f"{INPUT}.append", audio="AA==") == [commands.Append(b"\0")]
    assert decoded(codec, f"{INPUT}.append", audio="") == [commands.Append(b"")]
    clear, answer = decoded(codec, f"{INPUT}.clear")
    assert isinstance(answer, commands.Answer)
    assert (clear, json.loads(answer.event)["type"]) == (commands.Clear(), f"{INPUT}.cleared")
    (cut,) = decoded(codec, f"{INPUT}.commit")
    assert isinstance(cut, commands.Cut) and cut.empty is not None
    assert cut.empty.code == "input_audio_buffer_commit_empty"


def test_openais_settings_are_the_options_of_the_session() -> None:
    codec = OpenAiCodec(context())
    assert codec.options == commands.Options(StreamFormat("pcm_s16le", 24000), None, False, TurnRule(0.5, 8000, 4800))
    audio = {"format": {"type": "audio/pcmu"}, "transcription": {"delay": "high"}, "turn_detection": None}
    include = ["item.input_audio_transcription.logprobs"]
    configure, _ = decoded(codec, "session.update", session={"audio": {"input": audio}, "include": include})
    options = commands.Options(StreamFormat("pcm_mulaw", 8000), 960, True, None)
    assert configure == commands.Configure(options, find=True) and codec.options == options
    configure, _ = decoded(codec, "session.update", session={})
    assert configure == commands.Configure(options, find=False)


@pytest.mark.parametrize(("eagerness", "longest_s"), [("low", 8.0), ("medium", 4.0), ("auto", 4.0), ("high", 2.0)])
def test_the_limits_of_semantic_vad(eagerness: str, longest_s: float) -> None:
    codec = OpenAiCodec(context())
    updated(codec, audio={"input": {"turn_detection": {"type": "semantic_vad", "eagerness": eagerness}}})
    assert codec.options.rule == TurnRule(0.5, round(longest_s * RATE), 4800, None, round(0.8 * RATE))


def test_a_field_that_is_left_out_stays_and_null_switches_off() -> None:
    codec = OpenAiCodec(context())
    updated(codec, audio={"input": {"turn_detection": {"silence_duration_ms": 700}}})
    updated(codec, audio={"input": {"transcription": {"language": "de"}}})
    updated(codec, audio={"input": {"noise_reduction": {"type": "near_field"}}})
    session = updated(codec, include=["item.input_audio_transcription.logprobs"])
    audio = session["audio"]["input"]
    detection = {"type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 300}
    assert audio["turn_detection"] == {**detection, "silence_duration_ms": 700, "idle_timeout_ms": None}
    assert audio["transcription"] == {"model": "voxtral", "language": "de"}
    assert (audio["noise_reduction"], len(session["include"])) == ({"type": "near_field"}, 1)
    session = updated(codec, include=None, audio={"input": {"turn_detection": None, "noise_reduction": None}})
    assert session["audio"]["input"]["turn_detection"] is session["audio"]["input"]["noise_reduction"] is None
    assert session["include"] is None


def audio_input(**fields: Any) -> dict[str, Any]:
    return {"audio": {"input": fields}}


def transcription(**fields: Any) -> dict[str, Any]:
    return audio_input(transcription=fields)


OF_INPUT, OF_TRANSCRIPTION = "session.audio.input", "session.audio.input.transcription"


@pytest.mark.parametrize(
    ("session", "param", "code"),
    [
        (None, "session", "invalid_value"),
        ({"type": "realtime"}, "session.type", "invalid_value"),
        ({"voice": "alloy"}, "session.voice", "unknown_parameter"),
        ({"include": ["text"]}, "session.include[0]", "invalid_value"),
        ({"include": ["item.input_audio_transcription.logprobs"] * 11}, "session.include", "invalid_value"),
        ({"audio": []}, "session.audio", "invalid_value"),
        ({"audio": "x" * (1 << 20)}, "session", "invalid_value"),
        ({"audio": {"output": {}}}, "session.audio.output", "unknown_parameter"),
        ({"x" * 1000: 1}, f"session.{'x' * 58}", "unknown_parameter"),
        ({f"x{number}": 1 for number in range(101)}, "session", "invalid_value"),
        (audio_input(format={"type": "audio/opus"}), f"{OF_INPUT}.format.type", "invalid_value"),
        (audio_input(format={"type": "audio/pcm", "rate": 44100}), f"{OF_INPUT}.format.rate", "invalid_value"),
        (audio_input(format=None), f"{OF_INPUT}.format", "invalid_value"),
        (audio_input(turn_detection={"type": "vad"}), f"{OF_INPUT}.turn_detection.type", "invalid_value"),
        (audio_input(turn_detection={"threshold": 2}), f"{OF_INPUT}.turn_detection.threshold", "invalid_value"),
        (audio_input(turn_detection={"eagerness": "low"}), f"{OF_INPUT}.turn_detection.eagerness", "unknown_parameter"),
        (transcription(model="whisper-9"), f"{OF_TRANSCRIPTION}.model", "model_not_found"),
        (transcription(model="x" * 201), f"{OF_TRANSCRIPTION}.model", "invalid_value"),
        (transcription(delay="slow"), f"{OF_TRANSCRIPTION}.delay", "invalid_value"),
        (transcription(prompt="x" * 4097), f"{OF_TRANSCRIPTION}.prompt", "invalid_value"),
        (transcription(keywords=["x"] * 101), f"{OF_TRANSCRIPTION}.keywords", "invalid_value"),
        (transcription(keywords=["x" * 201]), f"{OF_TRANSCRIPTION}.keywords[0]", "invalid_value"),
        (transcription(languages=["x"] * 101), f"{OF_TRANSCRIPTION}.languages", "invalid_value"),
        (transcription(language="x" * 201), f"{OF_TRANSCRIPTION}.language", "invalid_value"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_setting_that_is_wrong_is_named_and_changes_nothing(session: Any, param: str, code: str) -> None:
    codec = OpenAiCodec(context())
    before = updated(codec)
    error = refused(codec, json.dumps({"type": "session.update", "session": session, "event_id": "mine"}))["error"]
    assert (error["param"], error["code"], error["event_id"]) == (param, code, "mine")
    assert param in error["message"] or len(json.dumps(session)) > 1000
    assert "expected" in error["message"] and updated(codec) == before


def test_the_largest_settings_are_taken() -> None:
    fields = {"prompt": "x" * 4096, "keywords": ["k" * 200] * 100, "languages": ["l" * 200] * 100}
    session = updated(OpenAiCodec(context()), **transcription(**fields))
    assert session["audio"]["input"]["transcription"] == {"model": "voxtral", **fields}


def test_openais_delay_is_fixed_once_there_is_audio() -> None:
    codec = OpenAiCodec(context())
    updated(codec, begun=True, **transcription(delay="medium"))  # the checkpoint's
    event = json.dumps({"type": "session.update", "session": transcription(delay="high")})
    error = refused(codec, event, begun=True)["error"]
    assert "cannot change once there is audio" in error["message"] and error["param"] == f"{OF_TRANSCRIPTION}.delay"
    assert codec.options.delay_ms == SHAPE.delay_ms


def test_openais_events_of_two_turns() -> None:
    codec = OpenAiCodec(context())
    first, second = turn(0), turn(1, RATE)
    (started,) = encoded(codec, outputs.TurnHeard(first, SpeechStart(160)))
    (delta,) = encoded(codec, outputs.TurnDelta(first, "w4", []))
    (stopped,) = encoded(codec, outputs.TurnHeard(first, SpeechEnd(16000)))
    assert (started["audio_start_ms"], stopped["audio_end_ms"], delta["delta"]) == (10, 1000, "w4")
    first.end, second.end, first.text = RATE, 2 * RATE, "w4 w9."
    committed, added = encoded(codec, outputs.TurnCut(first))
    assert (committed["previous_item_id"], added["item"]["status"]) == (None, "completed")
    (committed, _) = encoded(codec, outputs.TurnCut(second))
    assert committed["previous_item_id"] == delta["item_id"]
    segment, completed, done = encoded(codec, outputs.TurnDone(first, [SEGMENT], SHAPE.prompt))
    assert (segment["start"], segment["end"], segment["text"], "speaker" in segment) == (0.28, 0.76, "w4 w9.", False)
    assert [word["word"] for word in segment["words"]] == ["w4", "w9."]
    assert completed["usage"] == {"type": "duration", "seconds": 1.0}
    assert done["item"]["content"] == [{"type": "input_audio", "transcript": "w4 w9."}]
    mine = (started, delta, stopped, segment, completed)
    assert {event["item_id"] for event in mine} == {done["item"]["id"]} == {delta["item_id"]}
    # The second item has no text yet: it fails with the connection.
    failed, error = map(json.loads, codec.last_words(ENDED._replace(code="engine_dead", words="dead")))
    assert (failed["type"], failed["item_id"]) == (f"{TEXT}.failed", committed["item_id"])
    assert (error["error"]["type"], error["error"]["code"]) == ("server_error", "engine_dead")


def test_what_a_client_does_not_ask_for_is_not_sent() -> None:
    codec = OpenAiCodec(context())
    updated(codec, **audio_input(transcription=None))
    ended = turn(end=RATE)
    for output in (outputs.TurnDelta(ended, "w4", []), outputs.TurnSegment(ended, SEGMENT)):
        assert encoded(codec, output) == []
    assert len(encoded(codec, outputs.TurnCut(ended))) == 2
    assert encoded(codec, outputs.TurnDone(ended, [SEGMENT], 39)) == []
    assert encoded(OpenAiCodec(context()), outputs.TurnDone(turn(), [], 0)) == []  # its audio was cleared


# ---- Mistral's protocol


def mistrals() -> MistralCodec:
    return MistralCodec(context(), None)


def test_mistrals_commands() -> None:
    codec = mistrals()
    assert decoded(codec, "input_audio.append", audio="AA==") == [commands.Append(b"\0")]
    assert decoded(codec, "input_audio.flush") == [commands.Cut()]
    assert decoded(codec, "input_audio.end") == [commands.Cut(), commands.End(ENDED)]
    assert decoded(codec, "input_audio.flush") == decoded(codec, "input_audio.end") == []
    message = refused(codec, '{"type":"input_audio.append","audio":"AA=="}')["error"]["message"]
    assert "input_audio.append after input_audio.end" in message


def test_mistrals_settings_are_the_options_of_the_session() -> None:
    codec = mistrals()
    assert codec.options == commands.Options(StreamFormat("pcm_s16le", RATE), segment_languages=True, languages=True)
    session = {
        "audio_format": {"encoding": "pcm_f32le", "sample_rate": 8000},
        "target_streaming_delay_ms": 240,
        "turn_detection": {"min_silence_ms": 400, "end_timeout_ms": None, "end_threshold": None},
    }
    configure, answer = decoded(codec, "session.update", session=session)
    rule = SignRule(0.5, 0.5, 0.33, 6400)
    options = commands.Options(
        StreamFormat("pcm_f32le", 8000), 240, False, rule, segment_languages=True, languages=True
    )
    assert configure == commands.Configure(options, find=True)
    assert isinstance(answer, commands.Answer)
    told = json.loads(answer.event)["session"]
    assert (told["audio_format"], told["target_streaming_delay_ms"]) == (session["audio_format"], 240)
    assert told["turn_detection"]["min_silence_ms"] == 400
    configure, _ = decoded(codec, "session.update", session={})
    assert configure == commands.Configure(options, find=False)


def test_speakers_are_a_setting_until_there_is_audio() -> None:
    """Where there are none, the setting is refused with the reason. OpenAI's protocol has no end at which they come."""
    codec = MistralCodec(context()._replace(unlabelled=None), None)
    assert updated(codec)["diarize"] is False
    assert updated(codec, diarize=True)["diarize"] is True and codec.options.speakers
    assert updated(codec, begun=True, diarize=True, language="en")["diarize"] is True
    update = '{"type": "session.update", "session": {"diarize": %s}}'
    error = refused(codec, update % "false", begun=True)["error"]
    assert error["message"] == "session.diarize cannot change once there is audio"
    error = refused(mistrals(), update % "true")["error"]
    assert error["message"] == "session.diarize is true: this server has no labels"
    openais = {"type": "transcription", "audio": {"input": {"transcription": {"diarize": True}}}}
    error = refused(OpenAiCodec(context()), json.dumps({"type": "session.update", "session": openais}))["error"]
    assert error["param"] == "session.audio.input.transcription.diarize"


def test_what_has_no_effect_is_no_error() -> None:
    codec = mistrals()
    before = codec.options
    fields = {"context_bias": ["Voxtral"], "language": "en", "speaker_references": {"a": "A" * 500_000}}
    assert updated(codec, diarize=False, **fields)["diarize"] is False
    assert codec.options == before


def test_custom_words_are_those_of_the_next_turn() -> None:
    preferring = context()._replace(phrases=phrases.TOKENS)
    table = phrases.TOKENS.table(["ab c", "b"])
    mistral, openai = MistralCodec(preferring, None), OpenAiCodec(preferring)
    assert updated(mistral, begun=True, context_bias=["ab_c", "b"])["context_bias"] == ["ab_c", "b"]
    updated(openai, begun=True, **transcription(keywords=["ab c", " b "]))
    assert mistral.options.keywords == openai.options.keywords == table
    assert "context_bias" in updated(mistral, begun=True, language="en")
    assert "context_bias" not in updated(mistral, begun=True, context_bias=None)
    updated(openai, begun=True, **transcription(keywords=None))
    assert mistral.options.keywords is openai.options.keywords is None


@pytest.mark.parametrize("entry", ["a" * 17, "a\0b", "...", "a," * 101], ids=ascii)
def test_custom_words_that_are_refused_change_nothing(entry: str) -> None:
    preferring = context()._replace(phrases=phrases.TOKENS)
    mistral, openai = MistralCodec(preferring, None), OpenAiCodec(preferring)
    before = mistral.options, openai.options
    event = {"type": "session.update", "session": {"context_bias": ["a", entry], "turn_detection": {}}}
    assert "context_bias" in refused(mistral, json.dumps(event))["error"]["message"]
    assert updated(mistral, language="en")["turn_detection"] is None
    error = refused(openai, json.dumps(event | {"session": transcription(keywords=["a", entry])}))["error"]
    assert error["param"].startswith(f"{OF_TRANSCRIPTION}.keywords") or error["param"] is None
    assert (mistral.options, openai.options) == before


@pytest.mark.parametrize(
    ("session", "named"),
    [
        (None, "session"),
        ({"audio_format": {"encoding": "mp3"}}, "session.audio_format.encoding"),
        ({"audio_format": {"encoding": "pcm_s16le", "sample_rate": 1}}, "session.audio_format.sample_rate"),
        ({"target_streaming_delay_ms": 481}, "streaming_delay_ms is a delay of 481 ms: expected a multiple of 80"),
        ({"target_streaming_delay_ms": "fast"}, "session.target_streaming_delay_ms"),
        ({"turn_detection": {"end_threshold": 7}}, "session.turn_detection.end_threshold"),
        ({"context_bias": ["x"] * 101}, "session.context_bias"),
        ({"language": "x" * 201}, "session.language"),
        ({"speed": 2}, "session.speed"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_setting_that_is_wrong_is_named(session: Any, named: str) -> None:
    codec = mistrals()
    before = codec.options
    error = refused(codec, json.dumps({"type": "session.update", "session": session}))["error"]
    assert error["code"] == 400 and named in error["message"] and "expected" in error["message"]
    assert codec.options == before


def test_what_is_fixed_once_there_is_audio() -> None:
    codec = mistrals()
    updated(codec, begun=True, audio_format={"sample_rate": RATE}, target_streaming_delay_ms=SHAPE.delay_ms)
    for session in ({"audio_format": {"sample_rate": 8000}}, {"target_streaming_delay_ms": 240}):
        event = json.dumps({"type": "session.update", "session": session})
        assert "cannot change once there is audio" in refused(codec, event, begun=True)["error"]["message"]


def test_mistrals_events() -> None:
    codec, flushed = mistrals(), turn(end=2 * RATE)
    flushed.text, flushed.tokens = "w4 w9.", 7
    (sign,) = encoded(codec, TurnSign("end", 1600, "timeout"))
    assert sign == {"type": "turn.end", "time_s": 0.1, "end_reason": "timeout"}
    assert encoded(codec, TurnSign("start", 0)) == [{"type": "turn.start", "time_s": 0.0}]
    assert encoded(codec, outputs.TurnCut(flushed)) == []
    assert encoded(codec, outputs.TurnDelta(flushed, "w4", [])) == [{"type": "transcription.text.delta", "text": "w4"}]
    segment = {"text": "w4 w9.", "start": 0.28, "end": 0.76}
    assert encoded(codec, outputs.TurnSegment(flushed, SEGMENT)) == [{"type": "transcription.segment", **segment}]
    *_, done = encoded(codec, outputs.TurnDone(flushed, [SEGMENT], SHAPE.prompt))
    assert (done["model"], done["text"], done["language"]) == ("voxtral", "w4 w9.", None)
    assert done["segments"] == [{"type": "transcription_segment", **segment}] * 2
    assert done["usage"] == {
        "prompt_tokens": SHAPE.prompt,
        "completion_tokens": 7,
        "total_tokens": SHAPE.prompt + 7,
        "prompt_audio_seconds": 2,
    }
    *_, done = encoded(codec, outputs.TurnDone(turn(1, 2 * RATE, 3 * RATE), [], SHAPE.prompt))
    assert done["segments"] == []


def test_mistrals_event_of_a_language_comes_once_and_when_it_changes() -> None:
    codec, first = mistrals(), turn(end=2 * RATE)

    def said(output: Any) -> list[Any]:
        events = encoded(codec, output)
        return [
            event.get("audio_language", event.get("language")) for event in events if "segment" not in event["type"]
        ]

    assert said(outputs.TurnSegment(first, SEGMENT)) == []
    event, segment = encoded(codec, outputs.TurnSegment(first, SEGMENT, "de"))
    assert event == {"type": "transcription.language", "audio_language": "de"}
    assert segment["type"] == "transcription.segment"
    assert said(outputs.TurnSegment(first, SEGMENT, "de")) == []
    assert said(outputs.TurnDone(first, [], SHAPE.prompt, language="de")) == ["de"]  # of transcription.done
    assert said(outputs.TurnDone(turn(1, 2 * RATE, 3 * RATE), [], SHAPE.prompt, language="fr")) == ["fr", "fr"]
    assert said(outputs.TurnDone(turn(2, 3 * RATE, 4 * RATE), [], SHAPE.prompt)) == [None]


def test_openais_languages_are_told_by_the_models_that_tell_them() -> None:
    telling = context()._replace(serves={"voxtral", "gpt-transcribe", "gpt-live-transcribe"}.__contains__)
    for name, told in (
        ("voxtral", None),
        ("gpt-transcribe", [{"code": "de"}]),
        ("gpt-live-transcribe", [{"code": "de"}]),
    ):
        codec = OpenAiCodec(telling)
        updated(codec, **transcription(model=name))
        assert codec.options.languages == (told is not None)
        ended = turn(end=RATE)
        encoded(codec, outputs.TurnCut(ended))
        completed, _ = encoded(codec, outputs.TurnDone(ended, [], SHAPE.prompt, language="de"))
        assert completed.get("languages") == told
    encoded(codec, outputs.TurnCut(ended))
    completed, _ = encoded(codec, outputs.TurnDone(ended, [], SHAPE.prompt))
    assert completed["languages"] == []


def test_a_turn_that_may_be_over_ends_with_its_timeout() -> None:
    finder = SignFinder(TurnDetection(end_threshold=0.3, min_silence_ms=64, end_timeout_ms=96).rule(RATE))
    signs = [finder.step(p, 512 * n, 512 * (n + 1)) for n, p in enumerate([0.9, 0.4, 0.4, 0.4, 0.4, 0.4])]
    assert [sign and (sign.kind, sign.reason) for sign in signs] == [
        *(("start", None), ("eager_end", None), None, None, ("end", "timeout"), None),
    ]
