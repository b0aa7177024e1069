"""Messages and requests of all sessions of an API process to vLLM's engine.

A utility call costs both processes some 0.1 ms, whatever it carries. So the messages of all sessions go in one call
per tick, and there is one call at a time, which keeps them in order.

The ticks are multiples of TICK_S on the machine's clock, so the calls of all API processes come at the same time. The
engine then computes more sessions in one step. Between the ticks it has steps without the audio encoder, in which the
last tokens of sessions that have ended come twice as fast. With many sessions the ticks are MANY_TICK_S, because fewer
steps need less energy. The end of a session's audio does not wait for a tick: its speaker waits for the text.
"""

import asyncio
import contextlib
import contextvars
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

from voxtral_serve.engine.keywords import KEYWORDS
from voxtral_serve.engine.session import AGE, SESSION, UTILITY, SessionShape, request_positions
from voxtral_serve.patches.live_server import log

TICK_S = 0.016
MANY_TICK_S, MANY = 0.080 / 3, 8  # with more than this number of sessions in the process; a token is 0.080 s of audio
POLL_S = 1.0  # between looks at an engine that does not answer: vLLM leaves calls to a dead engine unanswered
ENDS, RETRY_S, LONGEST_RETRY_S = 8, 10, 60  # of the time that a refused client is told to wait
ABOVE_UPLOADS = -1  # priority of a session's request; vLLM serves the least first


class LinkError(RuntimeError):
    """The engine does not take the session. The message is for the client."""


class EngineGoneError(LinkError):
    """vLLM's engine has died."""


class Engine(NamedTuple):
    """vLLM's engine as sessions use it.

    call       await call(method, messages) is a utility call
    generate   (prompt, sampling_params, request_id, priority=) -> vLLM's RequestOutputs
    dead       whether the engine has died
    request    (session, shape, max_tokens) -> (prompt, sampling_params)
    priority   of requests of sessions
    positions  that one request can have
    """

    call: Callable[..., Any]
    generate: Callable[..., Any]
    dead: Callable[[], bool]
    request: Callable[[str, SessionShape, int], tuple[Any, Any]]
    priority: int
    positions: int

    @classmethod
    def of_vllm(cls, client: Any) -> "Engine":
        """Of vLLM's EngineClient. Raises AttributeError if it is not as expected."""
        config, instruct = client.vllm_config, client.input_processor.tokenizer.instruct
        begin, pad = instruct.start(), instruct.audio_encoder.streaming_pad
        shape = SessionShape.of(instruct.audio_encoder.audio_config)

        def request(session: str, shape: SessionShape, max_tokens: int) -> tuple[Any, Any]:
            from vllm.inputs import TokensPrompt
            from vllm.sampling_params import RequestOutputKind, SamplingParams

            params = SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
                extra_args={SESSION: session},
            )
            return TokensPrompt(prompt_token_ids=[*begin, *[pad] * (shape.prompt - len(begin))]), params

        def dead() -> bool:
            errored: bool = client.errored
            return errored

        dead()  # so that an AttributeError is raised now
        return cls(
            client.engine_core.call_utility_async,
            client.generate,
            dead,
            request,
            ABOVE_UPLOADS if config.scheduler_config.policy == "priority" else 0,
            request_positions(shape, config.model_config.max_model_len, config.additional_config.get(AGE)),
        )


class EngineLink:
    """The only one of a process. `shape` is that of the checkpoint's delay."""

    def __init__(self, engine: Engine, shape: SessionShape, tick_s: float = TICK_S) -> None:
        self.engine, self.shape = engine, shape
        self.on_refused: dict[str, Callable[[str], None]] = {}  # by session, told what the engine refused
        self._tick_s = tick_s
        self.sessions: set[str] = set()  # that are open
        self._ends = deque[float](maxlen=ENDS)  # when the last sessions left, of time.monotonic
        self._messages: list[list[Any]] = []
        self._audio: dict[str, list[bytes]] = {}  # of the messages that are waiting, joined when they go
        self._opening: dict[str, asyncio.Future[None]] = {}
        self._waiters: list[asyncio.Future[None]] = []  # for all that was put before to be answered
        self._pump: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()  # a message says so

    async def open(self, session: str, delay: int | None = None) -> None:
        """A new session, with a delay in token positions; None is the checkpoint's. Raises LinkError if the engine
        refuses it."""
        opening = self._opening[session] = asyncio.get_running_loop().create_future()
        self.sessions.add(session)
        self._put(["open", session, delay])
        try:
            await opening
        finally:
            self._opening.pop(session, None)

    def open_next(self, session: str, delay: int | None = None) -> None:
        """A session that takes over from one that was closed, in the same call: the engine has a place for it."""
        self.sessions.add(session)
        self._put(["open", session, delay])

    def audio(self, session: str, pcm: bytes) -> None:
        if (waiting := self._audio.get(session)) is not None:
            waiting.append(pcm)
        else:
            self._audio[session] = waiting = [pcm]
            self._put(["audio", session, waiting])

    def end(self, session: str) -> None:
        self._audio.pop(session, None)  # its message stays; none is added to it
        self._put(["end", session])
        self._ended.set()

    def close(self, session: str) -> None:
        self._audio.pop(session, None)
        self.on_refused.pop(session, None)
        self.sessions.discard(session)
        self._put(["close", session])

    def left(self) -> None:
        """A client's session is over, and its place free for another."""
        self._ends.append(time.monotonic())

    def retry_s(self) -> int:
        """Seconds after which a place may be free: the mean time between the ends of the last ENDS sessions of this
        process, from 1 to LONGEST_RETRY_S; RETRY_S before any session has ended."""
        if not self._ends:
            return RETRY_S
        mean_s = (time.monotonic() - self._ends[0]) / len(self._ends)
        return min(max(math.ceil(mean_s), 1), LONGEST_RETRY_S)

    async def delivered(self) -> None:
        """Wait until the engine has all messages so far."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._start()
        await waiter

    def tokens(
        self, session: str, shape: SessionShape, logprobs: bool = False, keywords: bytes | None = None
    ) -> AsyncGenerator[Any, None]:
        """vLLM's outputs for a session of this shape, with a table of custom words; closing the iterator aborts its
        request."""
        prompt, params = self.engine.request(session, shape, self.engine.positions - shape.prompt)
        if logprobs:
            params.logprobs = 0  # only that of the sampled token
        if keywords is not None:
            params.extra_args[KEYWORDS] = keywords
        outputs: AsyncGenerator[Any, None] = self.engine.generate(
            prompt, params, session, priority=self.engine.priority
        )
        return outputs

    def _put(self, message: list[Any]) -> None:
        self._messages.append(message)
        self._start()

    def _start(self) -> None:
        if self._pump is None or self._pump.done():
            # In a context of its own: its lines in the log are not of the session that started it.
            self._pump = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())

    async def _run(self) -> None:
        while self._messages or self._waiters:
            if self._messages:
                await asyncio.sleep(0)  # a turn of the loop, in which others may add to this call
                if wait_s := self.wait_s(time.monotonic()):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._ended.wait(), wait_s)
            self._ended.clear()
            messages, self._messages = self._messages, []
            waiters, self._waiters = self._waiters, []
            self._audio.clear()
            if messages:
                await self._deliver(messages)
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def wait_s(self, now: float) -> float:
        """Seconds from `now`, of time.monotonic, until the next call. That clock is the same in all processes."""
        tick_s = max(self._tick_s, MANY_TICK_S if len(self.sessions) > MANY else 0)
        return tick_s - now % tick_s if tick_s else 0.0

    async def _deliver(self, messages: list[list[Any]]) -> None:
        for message in messages:
            if message[0] == "audio":
                message[2] = b"".join(message[2])
        try:
            refused = await self._call(messages)
        except Exception as error:
            gone = isinstance(error, EngineGoneError)
            if not gone:  # of the whole call: all that it carried is lost
                log.exception("the engine failed %d messages of live sessions", len(messages))
            refused = dict.fromkeys((message[1] for message in messages), str(error))
            self._settle(messages, refused, EngineGoneError if gone else LinkError)
        else:
            self._settle(messages, refused or {}, LinkError)

    async def _call(self, messages: list[list[Any]]) -> Any:
        call = asyncio.ensure_future(self.engine.call(UTILITY, messages))
        while not (await asyncio.wait({call}, timeout=POLL_S))[0]:
            if self.engine.dead():
                call.cancel()
                raise EngineGoneError("the engine has died")
        return call.result()

    def _settle(self, messages: list[list[Any]], refused: dict[str, str], kind: type[LinkError]) -> None:
        for what, session, *_ in messages:
            opening = self._opening.get(session) if what == "open" else None
            if opening is not None and not opening.done():
                if session in refused:
                    opening.set_exception(kind(refused[session]))
                else:
                    opening.set_result(None)
            elif what != "close" and session in refused and (told := self.on_refused.get(session)) is not None:
                told(refused[session])
