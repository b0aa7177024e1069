"""What `GET /v1/server` says: the parts of a server's configuration that its clients can notice.

OpenAI's API has no such path. `/v1/models` has the models' names, and `/metrics` what changes while the server runs.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from voxtral_serve import shims
from voxtral_serve.guard.limits import Limits, Rules
from voxtral_serve.guard.speech.fields import CHARACTERS

CONFIG = "--config"  # of `vllm serve`, which takes it out of the arguments that it keeps


def about(
    models: Sequence[str], rules: Rules, limits: Limits, most_in_flight: int, live_sessions: int | None
) -> dict[str, Any]:
    """The answer, as JSON's types.

    models          names that clients use
    most_in_flight  requests at a time, of all API processes together
    live_sessions   at a time; None for a server without them
    """
    return {
        "object": "server",
        "versions": {name: shims.installed(name) for name in ("voxtral-serve", "vllm")},
        "models": list(models),
        "profile": profile(sys.argv),
        "capabilities": {
            "word_times": rules.timed,
            "speakers": rules.unlabelled is None,
            "live": live_sessions is not None,
            "keywords": rules.phrases is not None,
            **abilities(rules),
        },
        "limits": {
            "file_bytes": limits.file_bytes,
            "clip_s": limits.decode_s,
            "in_flight": most_in_flight,
            "live_sessions": live_sessions,
            "live_idle_s": limits.live_idle_s if live_sessions is not None else None,
            "live_session_s": limits.live_session_s if live_sessions is not None else None,
        },
    }


def about_speech(models: Sequence[str], most_in_flight: int) -> dict[str, Any]:
    """The answer of a server of speech synthesis, as JSON's types."""
    return {
        "object": "server",
        "versions": {name: shims.installed(name) for name in ("voxtral-serve", "vllm", "vllm-omni")},
        "models": list(models),
        "profile": profile(sys.argv),
        "capabilities": {"speech": True},
        "limits": {"characters": CHARACTERS, "in_flight": most_in_flight},
    }


def abilities(rules: Rules) -> dict[str, bool]:
    return {name: name in rules.can for name in ("language", "prompt", "translate")}


def profile(arguments: Sequence[str]) -> str | None:
    """The name of the file that `vllm serve` was given with --config, without its directory. None if there is none."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument == CONFIG and following:
            return Path(following).name
        if argument.startswith(f"{CONFIG}="):
            return Path(argument.removeprefix(f"{CONFIG}=")).name
    return None
