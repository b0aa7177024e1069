"""Who may use the server: vLLM's key, or the keys of VOXTRAL_SERVE_KEYS, as vLLM's live objects say."""

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
