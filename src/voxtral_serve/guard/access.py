"""Who may use the server, and which web pages may read its answers, as vLLM's live objects say."""

import hmac
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from voxtral_serve import keys
from voxtral_serve.guard.keyring import KeyRing
from voxtral_serve.guard.usage import Usage, shared_file


def _keys(state: Any) -> list[str]:
    """The keys that vLLM itself asks for: those of --api-key, or VLLM_API_KEY."""
    return [key for key in state.args.api_key or [os.environ.get("VLLM_API_KEY")] if key]


def ring(state: Any, processes: int) -> KeyRing | None:
    """Raises KeysError if the file cannot be used, or vLLM has a key as well."""
    if (file := os.environ.get(keys.VARIABLE)) is None:
        return None
    if _keys(state):
        raise keys.KeysError(keys.BOTH)
    rank = state.engine_client.vllm_config.parallel_config._api_process_rank
    return KeyRing(Path(file), Usage(shared_file(processes), rank))


def verify(state: Any) -> Callable[[Any], bool] | None:
    """Whether a request's headers hold one of vLLM's keys, in constant time; None if vLLM has none."""
    digests = [keys.digest(key.encode()) for key in _keys(state)]
    if not digests:
        return None

    def verified(headers: Any) -> bool:
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        digest, matches = keys.digest(token.encode()), False
        for known in digests:  # all of them, so that the time does not tell which one matches
            matches |= hmac.compare_digest(known, digest)
        return matches and scheme.lower() == "bearer"

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
