"""The JSON of a request's body."""

import json
from typing import Any

from voxtral_serve.guard.errors import RefusedError


def parsed(body: bytes) -> Any:
    """The value in a body. Raises RefusedError if it is not JSON as RFC 8259 has it, in UTF-8."""

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(body.decode(), parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise RefusedError(
            400, f"the body is not valid JSON: {ascii(str(error))[1:-1][:120]}", "invalid_json"
        ) from error


def written(content: Any) -> bytes:
    """A body with this value. Raises RefusedError if it has text that UTF-8 cannot hold."""
    try:
        return json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # for example one half of a surrogate pair
        raise RefusedError(400, "the body has text that is not valid Unicode", "invalid_json") from error
