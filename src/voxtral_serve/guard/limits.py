"""Limits on requests, from the environment and from the served model.

These environment variables are read when this module is imported. An invalid value ends the server. Defaults are in
brackets:
  VLLM_MAX_AUDIO_CLIP_FILESIZE_MB   MiB of one audio file (25)
  VLLM_MAX_AUDIO_DECODE_DURATION_S  seconds of one clip (600)
  VLLM_MAX_AUDIO_DECODE_BYTES       bytes of one clip's samples at the model's rate (268435456)
  VOXTRAL_SERVE_MAX_IN_FLIGHT       requests in flight whose bodies are complete, including waiting ones (4 x
                                    max_num_seqs, at least 16); divided among the `api_server_count` processes
  VOXTRAL_SERVE_LIVE_IDLE_S         seconds after which a live session without audio and events is closed (60)
  VOXTRAL_SERVE_LIVE_SESSION_S      seconds after which a live session is ended (none)
  VOXTRAL_SERVE_LIVE_BACKLOG_S      seconds of audio by which the engine may lag behind a live session; at this limit,
                                    further audio waits in the API process (60)
  VOXTRAL_SERVE_LIVE_ORIGINS        web pages, separated by commas, that may open live sessions and use a server without
                                    keys, such as https://app.example.org; * for all (none but the server's own)
  VOXTRAL_SERVE_MEDIA_HOSTS         hosts, separated by commas, whose URLs vLLM may fetch audio from (none)
  VOXTRAL_SERVE_PAGE                1 to serve the page at /, 0 for no page (1)
  VOXTRAL_SERVE_SPEAKERS_DEVICE     device of speaker labels: cpu, cuda, or cuda:N for the GPU with this number (cpu)
  VOXTRAL_SERVE_SHUTDOWN_S          seconds that running requests have to finish after SIGTERM, with vLLM-Omni (30); the
                                    container's entrypoint gives it to vLLM as --shutdown-timeout
"""

import os
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from voxtral_serve.audio.decode import Bounds
from voxtral_serve.engine.keywords import PhraseTokens
from voxtral_serve.engine.session import SessionShape
from voxtral_serve.units import MIB

FIELDS_BYTES = MIB  # limit for the fields of a form without the file, and for the JSON of a chat without its audio
SEQUENCES = 16  # the largest `n` of a chat: each sequence takes a place in vLLM's batch
REFERENCES_BYTES = 8 * MIB  # of a form's clips of known speakers, in base64: they count among the bytes of the body
# Limits for bodies that are still arriving (guard.body), over all API processes. In addition to its bytes, a body takes
# about 25 KB of memory for its connection and its task (tests/server/test_slow_clients.py).
OPEN_BODIES = 512
OPEN_BYTES = 256 * MIB
LEAST_IN_FLIGHT = 16


class OpenLimits(NamedTuple):
    """Limits of one API process for bodies that are still arriving: their number, and their bytes in memory."""

    bodies: int
    size: int

    @classmethod
    def of_process(cls, processes: int, largest: int) -> "OpenLimits":
        """The limits of one of `processes` API processes, with room for at least two bodies of `largest` bytes."""
        return cls(max(OPEN_BODIES // processes, 1), max(OPEN_BYTES // processes, 2 * largest))


class Limits(NamedTuple):
    """The values of the environment variables above. `in_flight` and `live_session_s` may be None: not set."""

    file_bytes: int
    decode_s: int
    decode_bytes: int
    in_flight: int | None
    hosts: frozenset[str]
    live_idle_s: int
    live_backlog_s: int
    live_session_s: int | None
    live_origins: frozenset[str]
    page: bool
    shutdown_s: int
    speakers_device: str

    @property
    def bounds(self) -> Bounds:
        """The limits for one clip."""
        because = "its VLLM_MAX_AUDIO_DECODE_DURATION_S, 600 by default"
        return Bounds(Fraction(self.decode_s), because, self.decode_bytes)


class LimitError(ValueError):
    """An environment variable has an invalid value. The message has its name and the value."""


def limits(environ: Mapping[str, str]) -> Limits:
    """The limits that are set by environment variables. Raises LimitError."""

    def number(name: str, default: int | None, least: int = 1) -> Any:
        text = environ.get(name)
        if text is None:
            return default
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
            raise LimitError(f"{name} is {text!r}: expected a whole number of {least} or more")
        return int(text)

    hosts = {host.strip().lower() for host in environ.get("VOXTRAL_SERVE_MEDIA_HOSTS", "").split(",") if host.strip()}
    if wrong := sorted(
        host for host in hosts if not re.fullmatch(r"[a-z0-9.-]+(:[0-9]+)?|\[[0-9a-f:]+\](:[0-9]+)?", host)
    ):
        raise LimitError(f"VOXTRAL_SERVE_MEDIA_HOSTS has {wrong[0]!r}: expected hosts, such as media.example.org")
    if hosts and environ.get("VLLM_MEDIA_URL_ALLOW_REDIRECTS") != "0":
        raise LimitError(
            "VOXTRAL_SERVE_MEDIA_HOSTS allows hosts, which could redirect vLLM to other hosts: also set "
            "VLLM_MEDIA_URL_ALLOW_REDIRECTS=0"
        )
    return Limits(
        number("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", 25) * MIB,
        number("VLLM_MAX_AUDIO_DECODE_DURATION_S", 600),
        number("VLLM_MAX_AUDIO_DECODE_BYTES", 256 * MIB),
        number("VOXTRAL_SERVE_MAX_IN_FLIGHT", None),
        frozenset(hosts),
        number("VOXTRAL_SERVE_LIVE_IDLE_S", 60),
        number("VOXTRAL_SERVE_LIVE_BACKLOG_S", 60),
        number("VOXTRAL_SERVE_LIVE_SESSION_S", None),
        origins(environ.get("VOXTRAL_SERVE_LIVE_ORIGINS", "")),
        switch(environ, "VOXTRAL_SERVE_PAGE", True),
        number("VOXTRAL_SERVE_SHUTDOWN_S", 30, 0),
        device(environ, "VOXTRAL_SERVE_SPEAKERS_DEVICE"),
    )


def device(environ: Mapping[str, str], name: str) -> str:
    """PyTorch's name of a device that a variable names, by default the CPU. Raises LimitError."""
    text = environ.get(name, "cpu")
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", text):
        raise LimitError(f"{name} is {text!r}: expected cpu, cuda, or cuda:N for the GPU with this number")
    return text


def switch(environ: Mapping[str, str], name: str, default: bool) -> bool:
    """Whether a variable is 1. Raises LimitError if it is neither 1 nor 0."""
    text = environ.get(name, "1" if default else "0")
    if text not in ("0", "1"):
        raise LimitError(f"{name} is {text!r}: expected 0 or 1")
    return text == "1"


def origins(listed: str) -> frozenset[str]:
    """Origins as browsers send them. Raises LimitError."""
    found = {each.strip().lower().rstrip("/") for each in listed.split(",") if each.strip()}
    if wrong := sorted(
        each for each in found if each != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", each)
    ):
        raise LimitError(
            f"VOXTRAL_SERVE_LIVE_ORIGINS has {wrong[0]!r}: expected origins, such as https://app.example.org"
        )
    return frozenset(found)


LIMITS = limits(os.environ)


def most_in_flight(config: Any) -> int:
    """Requests at a time, of all API processes together. `config`: vLLM's VllmConfig."""
    return LIMITS.in_flight or max(LEAST_IN_FLIGHT, 4 * int(config.scheduler_config.max_num_seqs))


class Rules(NamedTuple):
    """Limits on the content of a request, and abilities of the model.

    file_bytes   bytes of one audio file
    bounds       limits for one clip
    chat_bounds  limits for all clips of one chat together
    rate         the model's sampling rate in Hz
    hosts        hosts from which vLLM may fetch audio
    piece_s      the most seconds of audio that the model transcribes in one request
    timed        whether the model's tokens have times
    can          which of "language", "prompt" and "translate" the model supports
    unlabelled   why speakers cannot be labelled; None if they can
    shape        token positions of an upload with the checkpoint's delay; None if no other delay is possible
    delay_ms     of uploads that name none; None is the checkpoint's
    phrases      how to write custom words; None if the model cannot prefer them
    """

    file_bytes: int
    bounds: Bounds
    chat_bounds: Bounds
    rate: int
    hosts: frozenset[str]
    piece_s: Fraction
    timed: bool
    can: frozenset[str]
    unlabelled: str | None = None
    shape: SessionShape | None = None
    delay_ms: int | None = None
    phrases: PhraseTokens | None = None

    def longest_s(self, shape: SessionShape | None) -> Fraction:
        """`piece_s` for an upload of another shape than the checkpoint's; at most 0 if its padding has no room."""
        if shape is None or self.shape is None:
            return self.piece_s
        return self.piece_s - Fraction((shape.right - self.shape.right) * shape.samples, shape.rate_hz)

    @property
    def upload_bytes(self) -> int:
        """The largest body of an upload, in bytes."""
        return self.file_bytes + FIELDS_BYTES

    @property
    def chat_bytes(self) -> int:
        """The largest body of a chat, in bytes. Its audio is in base64."""
        return self.file_bytes * 4 // 3 + FIELDS_BYTES
