"""The `session` object of OpenAI's Realtime transcription: what a client may set, and what it means here.

A field that an update leaves out stays as it was, and null switches off. A field that is unknown, or whose value is
not valid, is refused with its path. `language`, `languages`, `prompt`, `keywords` and `noise_reduction` are kept and
have no effect: Voxtral Realtime has no such input.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from voxtral_serve.audio.stream import StreamFormat
from voxtral_serve.guard.live.service import LiveService
from voxtral_serve.guard.live.socket import EventError
from voxtral_serve.guard.live.turns import TurnRule

LOGPROBS = "item.input_audio_transcription.logprobs"
DELAYS_MS = {"minimal": 160, "low": 240, "medium": 480, "high": 960, "xhigh": 2400}
# Formats, with the rates in Hz that they may have; the first is the default.
FORMATS = {"audio/pcm": (24000, 16000), "audio/pcmu": (8000,), "audio/pcma": (8000,)}
ENCODINGS = {"audio/pcm": "pcm_s16le", "audio/pcmu": "pcm_mulaw", "audio/pcma": "pcm_alaw"}
SERVER_VAD = {"threshold": 0.5, "prefix_padding_ms": 300, "silence_duration_ms": 500, "idle_timeout_ms": None}
SEMANTIC_VAD = {"eagerness": "auto"}
SILENCE_S = {"low": 8.0, "medium": 4.0, "auto": 4.0, "high": 2.0}  # OpenAI's limits of its semantic_vad
# A sentence's end stands in the text this long after the model's delay: the token of the word, and the one after it.
SENTENCE_S = 0.32
LONGEST_MS = 60_000  # of a time in turn_detection
Check = Callable[[Any, str], Any]


def refusal(path: str, value: Any, expected: str, code: str = "invalid_value") -> EventError:
    return EventError(f"{path} is {ascii(value)[:60]}: expected {expected}", code, path)


def choice(*names: str) -> Check:
    def check(value: Any, path: str) -> Any:
        if value not in names:
            raise refusal(path, value, f"one of {', '.join(names)}" if len(names) > 1 else repr(names[0]))
        return value

    return check


def number(low: float, high: float, whole: bool = False) -> Check:
    def check(value: Any, path: str) -> Any:
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            raise refusal(path, value, f"a {'whole ' if whole else ''}number from {low} to {high}")
        return value

    return check


def text(value: Any, path: str) -> Any:
    if not isinstance(value, str):
        raise refusal(path, value, "text")
    return value


def texts(value: Any, path: str) -> Any:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise refusal(path, value, "a list of texts")
    return value


def flag(value: Any, path: str) -> Any:
    if not isinstance(value, bool):
        raise refusal(path, value, "true or false")
    return value


def includes(value: Any, path: str) -> Any:
    if not isinstance(value, list) or any(each != LOGPROBS for each in value):
        raise refusal(path, value, f"a list of {LOGPROBS!r}")
    return value


NOISE_REDUCTION = {"type": choice("near_field", "far_field"), "strength": number(0, 1)}
TRANSCRIPTION = {
    **{"model": text, "language": text, "languages": texts, "prompt": text, "keywords": texts},
    "delay": choice(*DELAYS_MS),
}
ANSWERS = {"create_response": flag, "interrupt_response": flag}  # of conversations: no effect on a transcription
TURNS: dict[str, dict[str, Check]] = {
    "server_vad": {
        "threshold": number(0, 1),
        **dict.fromkeys(("prefix_padding_ms", "silence_duration_ms"), number(0, LONGEST_MS, whole=True)),
        "idle_timeout_ms": number(1, LONGEST_MS, whole=True),
        **ANSWERS,
    },
    "semantic_vad": {"eagerness": choice(*SILENCE_S), **ANSWERS},
}


def merged(old: Mapping[str, Any], given: Any, fields: Mapping[str, Check], path: str) -> dict[str, Any]:
    """`old` with the fields that are given. Raises EventError for others, and for values that are not valid."""
    if not isinstance(given, dict):
        raise refusal(path, given, "an object")
    new = dict(old)
    for name, value in given.items():
        where = f"{path}.{name[:80]}"
        if name not in fields:
            raise EventError(f"{where} is no field here: expected {', '.join(fields)}", "unknown_parameter", where)
        new[name] = value if value is None else fields[name](value, where)
    return new


class OpenAiSettings:
    """Those of one session. `session` is as OpenAI's object has it, without its id."""

    def __init__(self, service: LiveService) -> None:
        self._service = service
        self.session: dict[str, Any] = {
            "type": "transcription",
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": 24000},
                    "transcription": {"model": service.model},
                    "noise_reduction": None,
                    "turn_detection": {"type": "server_vad", **SERVER_VAD},
                }
            },
            "include": None,
        }

    def updated(self, given: Any) -> "OpenAiSettings":
        """New settings, with what an update gives. Raises EventError."""
        new = copy.copy(self)
        new.session = copy.deepcopy(self.session)
        checks = {"type": choice("transcription"), "audio": new._audio, "include": includes}
        new.session = merged(new.session, given, checks, "session")
        if new.session["type"] is None or new.session["audio"] is None:
            raise EventError("session.type and session.audio cannot be null", "invalid_value", "session")
        return new

    @property
    def input(self) -> dict[str, Any]:
        found: dict[str, Any] = self.session["audio"]["input"]
        return found

    @property
    def form(self) -> StreamFormat:
        form = self.input["format"]
        return StreamFormat(ENCODINGS[form["type"]], form.get("rate") or FORMATS[form["type"]][0])

    @property
    def transcribes(self) -> bool:
        return self.input["transcription"] is not None

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.session["include"] or ())

    @property
    def delay_ms(self) -> int | None:
        """None for the checkpoint's."""
        delay = (self.input["transcription"] or {}).get("delay")
        return None if delay is None else DELAYS_MS[delay]

    def turn_rule(self, rate_hz: int) -> TurnRule | None:
        """For sessions at this rate; None where the client ends its turns."""
        if (rule := self.input["turn_detection"]) is None:
            return None
        per_ms = rate_hz // 1000
        if rule["type"] == "semantic_vad":
            short = round((self.delay_ms or self._service.delay_ms) * per_ms + SENTENCE_S * rate_hz)
            silence = round(SILENCE_S[rule["eagerness"]] * rate_hz)
            prefix = SERVER_VAD["prefix_padding_ms"] or 0
            return TurnRule(SERVER_VAD["threshold"] or 0.5, silence, round(prefix * per_ms), None, short)
        idle = rule["idle_timeout_ms"]
        return TurnRule(
            rule["threshold"],
            rule["silence_duration_ms"] * per_ms,
            rule["prefix_padding_ms"] * per_ms,
            None if idle is None else idle * per_ms,
        )

    def _audio(self, given: Any, path: str) -> dict[str, Any]:
        return merged(self.session["audio"], given, {"input": self._input}, path)

    def _input(self, given: Any, path: str) -> dict[str, Any]:
        checks = {
            "format": self._format,
            "transcription": self._transcription,
            "noise_reduction": lambda value, where: merged(
                self.input["noise_reduction"] or {}, value, NOISE_REDUCTION, where
            ),
            "turn_detection": self._turn_detection,
        }
        new = merged(self.input, given, checks, path)
        if new["format"] is None:
            raise refusal(f"{path}.format", None, "an object with `type`")
        return new

    def _format(self, given: Any, path: str) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise refusal(path, given, "an object with `type`")
        kind = given.get("type", self.input["format"]["type"])
        choice(*FORMATS)(kind, f"{path}.type")
        rates = FORMATS[kind]
        rate = given.get("rate") or rates[0]
        if rate not in rates:
            raise refusal(f"{path}.rate", rate, f"{' or '.join(map(str, rates))} Hz for {kind}")
        merged({}, given, {"type": text, "rate": number(1, 1 << 20, whole=True)}, path)
        return {"type": kind, "rate": rate} if kind == "audio/pcm" else {"type": kind}

    def _transcription(self, given: Any, path: str) -> dict[str, Any]:
        new = merged(self.input["transcription"] or {}, given, TRANSCRIPTION, path)
        if new.get("model") is None:
            new["model"] = self._service.model
        if not self._service.serves(new["model"]):
            where = f"{path}.model"
            raise refusal(
                where, new["model"], f"a model of this server, such as {self._service.model}", "model_not_found"
            )
        if new.get("delay") is not None:
            try:
                self._service.check_delay(DELAYS_MS[new["delay"]])
            except ValueError as error:
                where = f"{path}.delay"
                raise EventError(f"{where} is {new['delay']!r}, {error}", "invalid_value", where) from None
        return new

    def _turn_detection(self, given: Any, path: str) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise refusal(path, given, "an object with `type`, or null")
        old = self.input["turn_detection"] or {}
        kind = str(given.get("type", old.get("type")))
        choice(*TURNS)(kind, f"{path}.type")
        if old.get("type") != kind:
            old = {"type": kind, **(SERVER_VAD if kind == "server_vad" else SEMANTIC_VAD)}
        new = merged(old, given, {"type": text, **TURNS[kind]}, path)
        for name, default in (SERVER_VAD if kind == "server_vad" else SEMANTIC_VAD).items():
            if new[name] is None and default is not None:
                new[name] = default
        return new
