"""What the guard's unit tests share: forms as clients write them, the rules of a server, and a clip of 2 s."""

from fractions import Fraction
from typing import Any

import pytest
import soundfile
from conftest import DATA
from requests import Request

from voxtral_serve.audio.decode import Bounds
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.limits import Rules

RATE = 16000
BOUNDS = Bounds(Fraction(4), "a test's limit", 1 << 28)
HOSTS = frozenset({"media.example.org", "other.example.org:8080"})
RULES = Rules(1 << 20, BOUNDS, BOUNDS, RATE, HOSTS, Fraction(37), True, frozenset())
SAMPLES = soundfile.read(DATA / "clips/010.opus", 2 * RATE, dtype="float32")[0]


def form(**fields: Any) -> tuple[bytes, str]:
    """A form as `requests` writes it, and its type."""
    prepared = Request("POST", "http://x", files=list(fields.items())).prepare()
    assert isinstance(prepared.body, bytes)
    return prepared.body, prepared.headers["Content-Type"]


def refusal(read: Any, *arguments: Any) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        read(*arguments)
    return caught.value
