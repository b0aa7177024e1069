"""Who may use the server, and which web pages may read its answers, as vLLM's live objects say."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from voxtral_serve import keys
from voxtral_serve.guard.keyring import KeyRing
from voxtral_serve.guard.usage import Usage, shared_file


def _has_key(state: Any) -> bool:
    """Whether vLLM itself asks for a key."""
    return any(state.args.api_key or [os.environ.get("VLLM_API_KEY")])


def ring(state: Any, processes: int) -> KeyRing | None:
    """Raises KeysError if the file cannot be used, or vLLM has a key as well."""
    if (file := os.environ.get(keys.VARIABLE)) is None:
        return None
    if _has_key(state):
        raise keys.KeysError(keys.BOTH)
    rank = state.engine_client.vllm_config.parallel_config._api_process_rank
    return KeyRing(Path(file), Usage(shared_file(processes), rank))


def verify(state: Any, app: Any) -> Callable[[Any], bool] | None:
    """Whether a request's headers hold vLLM's key; None if it has none."""
    if not _has_key(state):
        return None
    while type(app).__name__ != "AuthenticationMiddleware":
        app = app.app
    verified: Callable[[Any], bool] = app.verify_token
    return verified


def cors(state: Any) -> Callable[[str], list[tuple[bytes, bytes]]]:
    """A function from an `Origin` to the headers that let its page read an answer (vLLM's --allowed-origins).

    vLLM's own answers have them from this middleware of Starlette's.
    """
    from starlette.middleware.cors import CORSMiddleware

    args = state.args
    made = CORSMiddleware(
        app=None,  # type: ignore[arg-type,unused-ignore]
        allow_origins=args.allowed_origins,
        allow_credentials=args.allow_credentials,
    )

    def headers(origin: str) -> list[tuple[bytes, bytes]]:
        if not made.is_allowed_origin(origin):
            return []
        own = {name.lower(): value for name, value in made.simple_headers.items()}
        own = {"access-control-allow-origin": origin, "vary": "Origin"} | own  # `*` for all, if it is allowed
        return [(name.encode(), value.encode("latin-1", "replace")) for name, value in own.items()]

    return headers
