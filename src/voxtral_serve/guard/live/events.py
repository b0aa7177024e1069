"""What a client sends: one message of JSON is one event, of which nothing is built but the fields that are served.

A field that no protocol has costs no memory, however large or deep it is; `session` stays JSON until the codec reads it
as a model. Decoding an append into this type takes less time than into a dict.
"""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from voxtral_serve.guard.typed import fault
from voxtral_serve.units import MIB

SETTINGS_BYTES = MIB  # of the JSON of `session`
FIELDS = 100  # of one object in it: pydantic makes an error of each that is unknown
LONGEST_VALUE = 4096  # bytes of the JSON of `model` or `final`
Name = Annotated[str, StringConstraints(max_length=200)]
Names = Annotated[list[Name], Field(max_length=100)]


class EventError(Exception):
    """An event is answered with an error event. `param` names the field that it is about."""

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class Settings(BaseModel):
    """A part of `session`: of the types of JSON, and with no other fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, content: Any) -> Any:
        if isinstance(content, dict) and len(content) > FIELDS:
            raise PydanticCustomError(
                "invalid_value", f"an object has {len(content)} fields: expected at most {FIELDS}"
            )
        return content


Model = TypeVar("Model", bound=Settings)


class Event(msgspec.Struct):
    """`audio` is None where there is no text; the others are JSON, of any type."""

    type: str = ""
    audio: str | None = None
    session: Raw | UnsetType = UNSET
    model: Raw | UnsetType = UNSET
    final: Raw | UnsetType = UNSET
    event_id: Raw | UnsetType = UNSET


class _Loose(msgspec.Struct):
    """The same, where `type` or `audio` is no text."""

    type: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET
    session: Raw | UnsetType = UNSET
    model: Raw | UnsetType = UNSET
    final: Raw | UnsetType = UNSET
    event_id: Raw | UnsetType = UNSET


_decode, _decode_loose = msgspec.json.Decoder(Event).decode, msgspec.json.Decoder(_Loose).decode
_skip = msgspec.json.Decoder(Raw).decode


def parsed(content: str | bytes) -> Event:
    """Raises EventError for what is no event."""
    try:
        try:
            return _decode(content)
        except msgspec.ValidationError:
            _skip(content)  # raises for what is no JSON behind the wrong type
            loose = _decode_loose(content)
    except msgspec.ValidationError:
        raise EventError("an event is a JSON object with `type`", "processing_error") from None
    except (ValueError, RecursionError):  # msgspec's errors are of the first kind; too many levels of the second
        raise EventError("Invalid JSON", "invalid_json") from None
    kind = value(loose.type)
    kind = kind if isinstance(kind, str) else ascii(kind)
    return Event(kind, text(loose.audio), loose.session, loose.model, loose.final, loose.event_id)


def value(json: Raw | UnsetType) -> Any:
    """What a short field holds; None where there is none, its first characters where it is too long."""
    if isinstance(json, UnsetType):
        return None
    content = bytes(json)
    return _built(content) if len(content) <= LONGEST_VALUE else content[:80].decode(errors="replace")


def text(json: Raw | UnsetType) -> str | None:
    """What a field holds, if it is text."""
    if isinstance(json, UnsetType) or not bytes(json).startswith(b'"'):
        return None
    try:
        return msgspec.json.decode(json, type=str)
    except ValueError:  # half of a surrogate pair
        return None


def is_object(json: Raw | UnsetType) -> bool:
    return not isinstance(json, UnsetType) and bytes(json).startswith(b"{")


def settings(json: Raw | UnsetType) -> Any:
    """What `session` holds. Raises EventError for more than SETTINGS_BYTES."""
    if isinstance(json, UnsetType):
        return None
    content = bytes(json)
    if (size := len(content)) > SETTINGS_BYTES:
        raise EventError(f"session has {size} bytes: expected at most {SETTINGS_BYTES}", "invalid_value", "session")
    return _built(content)


def _built(json: bytes) -> Any:
    try:
        return msgspec.json.decode(json)
    except (ValueError, RecursionError):  # of more levels than could be passed over
        raise EventError("Invalid JSON", "invalid_json") from None


def read(model: type[Model], content: Any, context: Any = None) -> Model:
    """The model of `session`; `context` is for its validators. Raises EventError."""
    try:
        return model.model_validate(content, context=context)
    except ValidationError as error:
        problem = fault(error, model, "session")
        raise EventError(problem.message, problem.code, problem.path) from None
