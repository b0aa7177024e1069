"""What typed models say of values that they do not take: where, what was expected, and a code."""

from typing import Annotated, Any, Literal

import pytest
from guarding import refusal
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from voxtral_serve.guard import typed


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text", "audio"]
    text: str | None = None


class Server(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["server"]


class Client(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["client"]
    wait: int = 0


def no_blank(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("blank", "name is blank: expected a name")
    return value


class Content(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    name: Annotated[str, AfterValidator(no_blank)] = "a"
    speed: float = Field(1, ge=0.25, le=4)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    penalty: float | None = Field(None, gt=0, le=10)
    on: bool = False
    parts: Annotated[str, Field(max_length=5)] | Annotated[list[Part], Field(max_length=3)] = ""
    words: list[str] = Field([], alias="words[]")
    turns: Annotated[Server | Client, Field(discriminator="type")] | None = None
    kind: Literal["only"] = "only"


FAULTS = [
    ({"speed": 10**400}, "speed", f"is 1{'0' * 59}: expected a number from 0.25 to 4"),
    ({"speed": True}, "speed", "is True: expected a number from 0.25 to 4"),
    ({"speed": float("nan")}, "speed", "is nan: expected a number from 0.25 to 4"),
    (
        {"seed": 2**63},
        "seed",
        "is 9223372036854775808: expected a whole number from -9223372036854775808 to 9223372036854775807",
    ),
    ({"penalty": 0}, "penalty", "is 0: expected a number more than 0 and at most 10"),
    ({"on": "yes"}, "on", "is 'yes': expected true or false"),
    ({"kind": "other"}, "kind", "is 'other': expected only"),
    ({"parts": 7}, "parts", "is 7: expected text of at most 5 characters or a list of at most 3"),
    ({"parts": "x" * 100_000}, "parts", "has 100,000 characters: expected text of at most 5 characters or a list of"),
    ({"parts": "\ud800"}, "parts", "is '\\ud800': expected valid Unicode"),
    ({"parts": [{}] * 100_000}, "parts", "has 100,000 items: expected text of at most 5 characters or a list of"),
    ({"parts": [{"type": "text"}, {"type": "x" * 100_000}]}, "parts[1].type", f"is '{'x' * 59}: expected one of text,"),
    ({"parts": [{"type": ["text"]}]}, "parts[0].type", "is a list: expected one of text, audio"),
    ({"parts": [{}]}, "parts[0].type", "is missing: expected one of text, audio"),
    ({"words[]": ["a", 7]}, "words[]", "is 7: expected text"),
    ({"turns": {"type": "both"}}, "turns.type", "is 'both': expected one of 'server', 'client'"),
    ({"turns": {}}, "turns.type", "is missing: expected text"),
    ({"turns": {"type": "client", "wait": "a"}}, "turns.wait", "is 'a': expected a whole number"),
    ({"turns": 1}, "turns", "is 1: expected an object"),
]


@pytest.mark.parametrize(("content", "path", "words"), FAULTS)
def test_a_fault_is_named(content: dict[str, Any], path: str, words: str) -> None:
    error = refusal(typed.checked, Content, content)
    assert (error.status, error.code, error.param) == (400, "invalid_value", path)
    assert str(error).startswith(f"{path} {words}") and len(str(error)) < 300
    with pytest.raises(ValidationError) as caught:
        Content.model_validate(content)
    assert typed.fault(caught.value, Content, "session").path == f"session.{path}"


@pytest.mark.parametrize("name", ["x", "x\r\ny", "é", "x" * 100_000])
def test_a_field_that_a_model_has_not(name: str) -> None:
    error = refusal(typed.checked, Content, {"parts": [{"type": "text", name: 1}]})
    assert error.code == "unknown_parameter" and str(error).isascii() and "\n" not in str(error)
    assert str(error).startswith(f"parts[0].{ascii(name)[1:59][:-1]}"[:20])
    assert str(error).endswith(" is no field here: expected type, text") and len(str(error)) < 300


def test_an_error_with_words_of_its_own() -> None:
    error = refusal(typed.checked, Content, {"name": " "})
    assert (error.code, error.param, str(error)) == ("blank", "name", "name is blank: expected a name")


def test_what_is_no_object() -> None:
    error = refusal(typed.checked, Content, [])
    assert (error.param, str(error)) == (None, "the body is a list: expected an object")


def test_what_a_field_may_be() -> None:
    found = {name: typed.expected(places) for name, places in typed.field_schemas(Content).items()}
    assert found["penalty"] == "a number more than 0 and at most 10"
    assert found["words[]"] == "a list"
    assert found["turns"] == "an object"


def test_a_field_of_another_model_of_several() -> None:
    error = refusal(typed.checked, Content, {"turns": {"type": "server", "wait": 1}})
    assert (error.code, str(error)) == ("unknown_parameter", "turns.wait is no field here: expected type")
