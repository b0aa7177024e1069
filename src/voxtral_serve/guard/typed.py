"""Typed models of what clients send, and pydantic's errors about them in this server's words.

A model's JSON schema says what each of its fields may be. `expected` puts that into words, for errors and for the
tables of the documentation.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core.core_schema import ErrorType

from voxtral_serve.guard.errors import RefusedError

SHOWN = 60  # characters of a value that an error repeats
FIELD_NAME = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)
NAMED = 20  # names in one header, each of at most 64 characters
UNKNOWN = "unknown_parameter"
PYDANTICS = frozenset(get_args(ErrorType))
Schema = Mapping[str, Any]
Model = TypeVar("Model", bound=BaseModel)


class Fault(NamedTuple):
    """What is wrong with a value: where it is (`messages[0].content`), the message, and the error's code.

    The code is "invalid_value", "unknown_parameter" for a field that the model does not have, or that of a
    PydanticCustomError.
    """

    path: str
    message: str
    code: str


def checked(model: type[Model], content: Any, context: Any = None) -> Model:
    """The model of `content`, a dict; `context` is for its validators. Raises RefusedError with status 400."""
    try:
        return model.model_validate(content, context=context)
    except ValidationError as error:
        problem = fault(error, model)
        raise RefusedError(400, problem.message, problem.code, problem.path or None) from error


def fault(error: ValidationError, model: type[BaseModel], root: str = "") -> Fault:
    """The error that goes deepest: pydantic has one for each type that a value may have, and those come last."""
    problem = max(
        error.errors(include_url=False), key=lambda each: (len(each["loc"]), not each["type"].endswith("_type"))
    )
    whole = schema(model)
    kind, value = problem["type"], problem["input"]
    extra = kind == "extra_forbidden"
    path, places = _located(whole, problem["loc"][:-1] if extra else problem["loc"], root)
    if extra:
        names = ", ".join(name for place in places for name in place.get("properties", ()))
        path = _joined(path, shown(problem["loc"][-1])[1:-1])
        return Fault(path, f"{path} is no field here: expected {names}", UNKNOWN)
    if kind not in PYDANTICS:
        return Fault(path, problem["msg"], kind)
    wanted = "valid Unicode" if kind == "string_unicode" else expected(places)
    if kind.startswith("union_tag"):  # what says which of several models an object is
        path = _joined(path, problem["ctx"]["discriminator"].strip("'"))
        value = value.get(path.rpartition(".")[2]) if isinstance(value, dict) else value
        wanted = f"one of {problem['ctx']['expected_tags']}" if "expected_tags" in problem["ctx"] else "text"
    has = f"is {shown(value)}"
    if kind in ("missing", "union_tag_not_found"):
        has = "is missing"
    elif kind.endswith(("too_long", "too_short")):
        has = f"has {len(value):,} {'characters' if isinstance(value, str) else 'items'}"
    return Fault(path, f"{path or 'the body'} {has}: expected {wanted}", "invalid_value")


def named(names: Iterable[str]) -> tuple[str, ...]:
    """Names of fields without effect as x-voxtral-ignored has them: each once, plain, at most NAMED."""
    return tuple(name for name in dict.fromkeys(names) if FIELD_NAME.fullmatch(name))[:NAMED]


def shown(value: Any) -> str:
    """A value as an error repeats it, in ASCII and short."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return ascii(value[: SHOWN + 1] if isinstance(value, str) else value)[:SHOWN]


@functools.cache
def schema(model: type[BaseModel]) -> Schema:
    return model.model_json_schema()


def field_schemas(model: type[BaseModel]) -> dict[str, list[Schema]]:
    """For each field that a client may send, by the name that it sends: what it may be."""
    whole = schema(model)
    return {name: list(_alternatives(whole, each)) for name, each in whole["properties"].items()}


def expected(places: Iterable[Schema]) -> str:
    """In words: what a value may be that one of these schemas describes."""
    return " or ".join(dict.fromkeys(_words(place) for place in places)) or "another value"


def _words(place: Schema) -> str:
    if "const" in place:
        return str(place["const"])
    if "enum" in place:
        return f"one of {', '.join(map(str, place['enum']))}"
    kind = place.get("type")
    if kind in ("integer", "number"):
        step = place.get("multipleOf")
        words = f"a multiple of {step}" if step else "a whole number" if kind == "integer" else "a number"
        return words + _range(place)
    if kind == "string":
        least, most = place.get("minLength"), place.get("maxLength")
        return f"text of {least or 'at most'}{' to' if least else ''} {most:,} characters" if most else "text"
    if kind == "array":
        least, most = place.get("minItems"), place.get("maxItems")
        items = f" of {', '.join(place['items'].get('enum', ()))}" if "enum" in place.get("items", {}) else ""
        return f"a list of {least or 'at most'}{' to' if least else ''} {most:,}{items}" if most else f"a list{items}"
    return {"boolean": "true or false", "object": "an object"}.get(str(kind), "another value")


def _range(place: Schema) -> str:
    low, high = place.get("minimum"), place.get("maximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    bounds = (("more than", place.get("exclusiveMinimum")), ("at least", low), ("at most", high))
    words = " and ".join(f"{word} {value}" for word, value in bounds if value is not None)
    return f" {words}" if words else ""


def _located(whole: Schema, location: tuple[str | int, ...], root: str) -> tuple[str, list[Schema]]:
    """(path, the schemas of what it leads to). A location also has names of types that pydantic tried, which a path has
    not."""
    path, places, last = root, list(_alternatives(whole, whole)), ""
    for name in location:
        if isinstance(name, int):
            inner = [place["items"] for place in places if "items" in place]
            path = path if last.endswith("[]") else f"{path}[{name}]"  # of a form's list, which has no order
        else:
            inner = [place["properties"][name] for place in places if name in place.get("properties", ())]
            if not inner:  # of several models, the one that the object says it is
                places = [place for place in places if name in _constants(place)] or places
                continue
            path, last = _joined(path, name), name
        places = [place for each in inner for place in _alternatives(whole, each)]
    return path, places


def _constants(place: Schema) -> list[Any]:
    return [each["const"] for each in place.get("properties", {}).values() if "const" in each]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _alternatives(whole: Schema, place: Schema) -> Iterator[Schema]:
    """The schemas that `place` stands for, without those of null."""
    if "$ref" in place:
        yield from _alternatives(whole, whole["$defs"][place["$ref"].rpartition("/")[2]])
    elif inner := place.get("anyOf", place.get("oneOf")):
        for each in inner:
            yield from _alternatives(whole, each)
    elif place.get("type") != "null":
        yield place
