"""The JSON of a request's body."""

import json
from typing import Any

from voxtral_serve.guard.errors import RefusedError

VALUES = 200_000  # the most values in one body: as an object of Python each takes up to 232 bytes


def parsed(body: bytes) -> dict[str, Any]:
    """The object in a body, without its fields that are null. Raises RefusedError if it is not JSON as RFC 8259 has it,
    in UTF-8."""

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    if body.count(b",") + body.count(b"[") + body.count(b"{") > VALUES:
        raise RefusedError(400, f"the body has more than {VALUES:,} values, or commas and brackets", "invalid_json")
    try:
        content = json.loads(body.decode(), parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise RefusedError(
            400, f"the body is not valid JSON: {ascii(str(error))[1:-1][:120]}", "invalid_json"
        ) from error
    if not isinstance(content, dict):
        raise RefusedError(400, "the body is not a JSON object", "invalid_json")
    return {name: value for name, value in content.items() if value is not None}


def written(content: Any) -> bytes:
    """A body with this value. Raises RefusedError if it has text that UTF-8 cannot hold."""
    try:
        return json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # one half of a surrogate pair
        raise RefusedError(400, "the body has text that is not valid Unicode", "invalid_json") from error
