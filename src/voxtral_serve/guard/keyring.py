"""The keys of VOXTRAL_SERVE_KEYS in an API process: whose a request is, what its key may still use, and reloads.

Each API process reads the file every CHECK_S. A changed file takes over for new requests once it has been the same
twice, so that one that is being written is not taken; requests and sessions that run keep the limits they began with,
but for seconds of audio, and live connections of a key that is gone are closed. One that is not valid is an error in
the log, and the keys stay as they are.
"""

import asyncio
import contextlib
import hmac
import math
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, TypeVar

from voxtral_serve import keys
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.metrics import key_metrics
from voxtral_serve.guard.usage import Usage
from voxtral_serve.keys import Key, KeysError
from voxtral_serve.patches.live_server import log

CHECK_S = 1.0
CHARGED_S = 1.0  # of live audio that are counted together: a count takes tens of microseconds
LEAST_S = 0.1  # of audio that a key must have left before more is received
IN_FLIGHT, LIVE, AUDIO = keys.LIMITS
Result = TypeVar("Result")


class KeyRing:
    """The only one of a process.

    SQLite may wait for seconds for another process, so all of `usage` runs in one thread, in the order of the calls.
    """

    def __init__(self, file: Path, usage: Usage) -> None:
        """Raises KeysError if the file cannot be used."""
        self.file, self.usage = file, usage
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keys")
        self.metrics = key_metrics()
        content = keys.content(file)
        self.keys = {key.name: key for key in keys.parsed(content, str(file))}
        self._taken = self._seen = content  # of the file: in force or refused; at the last look
        self._unread = ""  # why the file could not be read at the last look

    def find(self, authorization: bytes) -> Key | None:
        """Whose the value of this header is. All keys are compared, each in constant time."""
        scheme, _, token = authorization.partition(b" ")
        digest, match = keys.digest(token), None
        for key in self.keys.values():
            if hmac.compare_digest(key.digest, digest):
                match = key
        return match if scheme.lower() == b"bearer" else None

    def valid(self, key: Key) -> bool:
        """Whether a key that was found is still in the file, by whatever name."""
        return any(other.digest == key.digest for other in self.keys.values())

    @contextlib.asynccontextmanager
    async def place(self, key: Key, what: str) -> AsyncIterator[None]:
        """A place of the key's among `what`, IN_FLIGHT or LIVE. Raises RefusedError if there is none."""
        limit = getattr(key, what)
        taken = self._thread.submit(self.usage.take, key.name, what, limit)
        try:
            # Without a limit there is nothing to wait for.
            if limit is not None and not await asyncio.wrap_future(taken):
                self._refuse(key, what, "Try again when one has ended")
            with (
                (self.metrics.in_flight if what == IN_FLIGHT else self.metrics.live).labels(key.name).track_inprogress()
            ):
                yield
        finally:
            self._thread.submit(_give, self.usage, taken, key.name, what)

    async def check_place(self, key: Key, what: str) -> None:
        """Raises RefusedError if the key has no place now: before a body is received."""
        limit = getattr(key, what)
        if limit is not None and await self._counted(self.usage.held, key.name, what) >= limit:
            self._refuse(key, what, "Try again when one has ended")

    async def check_audio(self, key: Key) -> None:
        """Raises RefusedError if the key has no audio left: before a body or a session is received."""
        a_minute = self._allowance(key)
        if a_minute is not None:
            wait_s = await self._counted(self.usage.wait_s, key.name, LEAST_S, a_minute)
            if wait_s > 0:
                self._refuse_audio(key, a_minute, wait_s)

    async def spend(self, key: Key, seconds: float, kind: str) -> None:
        """Count seconds of audio of a key. Raises RefusedError, and counts nothing, if they are more than is left."""
        a_minute = self._allowance(key)
        if a_minute is not None:
            wait_s = await self._counted(self.usage.spend, key.name, seconds, a_minute)
            if wait_s > 0:
                self._refuse_audio(key, a_minute, wait_s, seconds)
        self.metrics.audio.labels(key.name, kind).inc(seconds)

    def spend_anyway(self, key: Key, seconds: float, kind: str) -> None:
        """Count seconds of audio that the engine has."""
        if (a_minute := self._allowance(key)) is not None:
            self._thread.submit(_spend_anyway, self.usage, key.name, seconds, a_minute)
        self.metrics.audio.labels(key.name, kind).inc(seconds)

    async def _counted(self, count: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.wrap_future(self._thread.submit(count, *arguments))

    def _allowance(self, key: Key) -> int | None:
        """As the file has it now: of a session that was there before, too."""
        return self.keys.get(key.name, key).audio_seconds_per_minute

    def _refuse(self, key: Key, what: str, advice: str, retry_s: int = 1) -> NoReturn:
        self.metrics.refused.labels(key.name, what).inc()
        raise RefusedError(
            429,
            f"the limit {what} of the key {key.name} is reached, which is {getattr(key, what)}. {advice}",
            "rate_limit_exceeded",
            retry_s=retry_s,
        )

    def _refuse_audio(self, key: Key, a_minute: int, wait_s: float, seconds: float = 0.0) -> NoReturn:
        if seconds > a_minute:
            self.metrics.refused.labels(key.name, AUDIO).inc()
            raise RefusedError(
                400,
                f"{seconds:.2f} s of audio at once are more than the limit {AUDIO} of the key {key.name}, which is "
                f"{a_minute}: send less at once",
                "clip_too_long",
                "file",
            )
        retry_s = max(1, math.ceil(wait_s))
        key = key._replace(audio_seconds_per_minute=a_minute)
        self._refuse(key, AUDIO, f"Try again in {retry_s} s", retry_s)

    async def watch(self) -> None:
        """Read the file every CHECK_S, for as long as the task runs."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                content = await asyncio.to_thread(self.file.read_bytes)
            except OSError as error:
                if self._unread != str(error):
                    log.error("%s cannot be read (%s): the keys stay as they are", self.file, error.strerror)
                self._unread = str(error)
                continue
            self._unread = ""
            self.take(content)

    def take(self, content: bytes) -> None:
        """What the file holds at this look."""
        settled = content == self._seen
        self._seen = content
        if not settled or content == self._taken:
            return
        self._taken = content
        try:
            entries = keys.parsed(content, str(self.file))
        except KeysError as error:
            log.error("the keys stay as they are: %s", error)
            return
        self.keys = {key.name: key for key in entries}
        log.info("%d keys of %s are in force: %s", len(entries), self.file, ", ".join(self.keys))


def _give(usage: Usage, taken: Future[bool], name: str, what: str) -> None:
    """Give back what `take` has taken before, in the same thread: nothing, if its request was refused or cancelled."""
    if not taken.cancelled() and taken.exception() is None and taken.result():
        _logged(usage.give, name, what)


def _spend_anyway(usage: Usage, name: str, seconds: float, a_minute: int) -> None:
    _logged(usage.spend, name, seconds, a_minute, anyway=True)


def _logged(count: Callable[..., object], *arguments: object, **more: object) -> None:
    """Count something that nobody waits for: an error is in the log."""
    try:
        count(*arguments, **more)
    except sqlite3.Error:
        log.exception("what a key uses was not counted")


class KeyAudio:
    """The audio of one socket, counted against its key's limit."""

    def __init__(self, ring: KeyRing, key: Key) -> None:
        self._ring, self._key = ring, key
        self._uncounted_s = 0.0

    async def add(self, seconds: float) -> None:
        """Raises RefusedError, and counts nothing of it, if the key has not so much left."""
        if self._uncounted_s + seconds >= CHARGED_S:
            await self._ring.spend(self._key, self._uncounted_s + seconds, "live")
            self._uncounted_s = 0.0
        else:
            self._uncounted_s += seconds

    def close(self) -> None:
        """Count what was not counted yet."""
        if self._uncounted_s:
            self._ring.spend_anyway(self._key, self._uncounted_s, "live")
            self._uncounted_s = 0.0
