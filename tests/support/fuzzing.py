"""Inputs of clients, made from the models that the guard reads them with: valid, nearly valid, and junk.

A strategy of Hypothesis makes each; `examples` says how many of a test, and makes them the same each time.
"""

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from pydantic import BaseModel

Field = tuple[str, tuple[str | None, bytes]]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)
# What a number, a name or a list can be that is next to what it should be.
ODD = st.sampled_from(
    [
        *("", " ", "nan", "inf", "-1", "0", "1e400", "1e-400", "9" * 30, str(2**63), str(-(2**63) - 1), "0x10", "1_0"),
        *("true", "null", "[]", "{}", '["x"]', '{"voxtral_serve_session":["x"]}', "\x00", "é" * 200, "x" * 5000),
    ]
)
UNKNOWN = st.sampled_from(
    [
        *("vllm_xargs", "extra_args", "mm_processor_kwargs", "structured_outputs", "guided_json", "logit_bias"),
        *("min_tokens", "max_tokens", "stop", "priority", "request_id", "keywords", "diarize"),
        *("context_bias[]", "timestamp_granularities", "include", "best_of", "__class__", "a.b", "[]", "file[]"),
    ]
)


def examples(count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a test that asks a server, whose answers take as long as they take."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=checks)


def valid(model: type[BaseModel]) -> st.SearchStrategy[Any]:
    whole = model.model_json_schema()
    return of_schema(whole, whole)


def of_schema(whole: Mapping[str, Any], place: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """What a part of pydantic's schema `whole` allows, within Hypothesis' usual sizes."""
    if "$ref" in place:
        return of_schema(whole, whole["$defs"][place["$ref"].rpartition("/")[2]])
    if options := place.get("anyOf", place.get("oneOf")):
        return st.one_of([of_schema(whole, option) for option in options])
    if "const" in place or "enum" in place:
        return st.sampled_from(place.get("enum") or [place["const"]])
    low, high = (place.get(name, place.get(f"exclusive{name.capitalize()}")) for name in ("minimum", "maximum"))
    match place.get("type"):
        case "object":
            inner = {name: of_schema(whole, each) for name, each in place.get("properties", {}).items()}
            needed = {name: inner.pop(name) for name in place.get("required", ())}
            return st.fixed_dictionaries(needed, optional=inner)
        case "array":
            return st.lists(of_schema(whole, place["items"]), max_size=min(3, place.get("maxItems", 3)))
        case "string":
            return st.text(min_size=place.get("minLength", 0), max_size=min(40, place.get("maxLength", 40)))
        case "integer":
            return st.integers(low, high)
        case "number":
            edges = {f"exclude_{end}": f"exclusive{end.capitalize()}imum" in place for end in ("min", "max")}
            return st.floats(low, high, **edges)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return JSON


# ---- Forms


def words(value: Any) -> str:
    """As a form has a value of JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def form(model: type[BaseModel]) -> st.SearchStrategy[list[Field]]:
    """The fields of a form besides its file."""
    names = st.sampled_from(sorted(model.model_json_schema()["properties"]))
    texts = ODD | st.text(max_size=30) | JSON.map(json.dumps)
    plain = st.tuples(names | UNKNOWN, st.tuples(st.none(), texts.map(lambda text: text.encode(errors="replace"))))
    junk = st.tuples(st.text(max_size=70), st.tuples(st.none() | st.text(max_size=20), st.binary(max_size=100)))

    def fields(content: Mapping[str, Any]) -> list[Field]:
        """What goes together: a form has no null, its model is served, and times need their format."""
        times = {"response_format": "verbose_json"} if content.get("timestamp_granularities[]") else {}
        given = {name: value for name, value in {**content, "model": "voxtral", **times}.items() if value is not None}
        lists = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
        return [(name, (None, words(item).encode())) for name, items in lists.items() for item in items]

    good = valid(model).map(fields)
    # Mostly fields of the model: a form with a wrong one is refused, whatever the others are.
    return st.one_of(
        good,
        st.tuples(good, st.lists(plain, max_size=2)).map(lambda pair: pair[0] + pair[1]),
        st.lists(plain, max_size=6),
        st.lists(plain | junk, max_size=6),
    )


# ---- Events of a live session


@st.composite
def damaged(draw: st.DrawFn, sound: st.SearchStrategy[Any]) -> Any:
    """What is valid with one part of it left out, replaced, or added."""
    content = draw(sound)
    place, path = content, draw(st.integers(0, 3))
    while path and isinstance(place, dict) and (inner := [each for each in place.values() if isinstance(each, dict)]):
        place, path = draw(st.sampled_from(inner)), path - 1
    if not isinstance(place, dict):
        return content
    name = draw(st.sampled_from([*place, "new"]) | UNKNOWN)
    if draw(st.booleans()):
        place.pop(name, None)
    else:
        place[name] = draw(JSON | ODD)
    return content


def audio(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    """Appends of up to a quarter of a second."""
    pcm = st.integers(0, 8000).map(bytes) | st.binary(max_size=200)
    return pcm.map(lambda content: {"type": kind, "audio": base64.b64encode(content).decode()})


def messages(kinds: list[str], append: str, update: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """What a client sends in one session: text or bytes. `kinds` are of events that have no content, `update` makes
    events that do."""
    bare = st.sampled_from(kinds).map(lambda kind: {"type": kind})
    sound = st.one_of(audio(append), audio(append), bare, update)
    odd = damaged(sound) | JSON
    told = st.one_of(sound, sound, odd).map(json.dumps)
    broken = st.one_of(told.map(lambda text: text[: len(text) // 2]), st.text(max_size=50), st.binary(max_size=50))
    return st.lists(st.one_of(told, told, told, broken), min_size=1, max_size=8)
