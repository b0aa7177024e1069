"""vLLM's scheduler with live sessions: a request whose next row of audio has not arrived is left out of the step.

`scheduler_cls` names `live_scheduler`, which vLLM has for this; the config hook of the model sets it (config.py). The
scheduler of vLLM has no public interface, so `expected` checks what is used of it before the engine starts.

While vLLM's scheduler decides on a step, it does not see the running requests that wait for audio, and the number of
requests that may run is lowered by theirs. They keep their KV cache, and the engine's loop blocks until audio arrives
where no other request runs.
"""

import inspect
import time
from typing import Any

from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from voxtral_serve import shims
from voxtral_serve.engine.live_audio import AHEAD, LivePart, SessionAudio
from voxtral_serve.engine.session import OPTION, SESSION, SessionShape

logger = init_logger("vllm.voxtral_serve.live")
# vLLM 0.32.0 has both of these limits, 0.20.0 the first.
MOST_RUNNING = ("max_num_running_reqs", "max_num_active_reqs")
MOST_AHEAD = 128  # rows of all sessions that a step encodes ahead: more would delay the tokens of other sessions
# What is used of vLLM's scheduler: methods and their parameters, attributes that its source sets.
METHODS = {
    "schedule": (),
    "add_request": ("request",),
    "finish_requests": ("request_ids", "finished_status"),
    "_free_request": ("request",),
    "_preempt_request": ("request",),
    "get_num_unfinished_requests": (),
}
ATTRIBUTES = (
    *("self.running", "self.waiting", "self.requests", "self.max_num_running_reqs"),
    *("request.max_tokens", "request.num_output_placeholders"),
)


class LiveSessions:
    """Put before one of vLLM's scheduler classes."""

    running: list[Any]
    waiting: Any
    requests: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        self.most_sessions = int(config.additional_config[OPTION])
        tokenizer: Any = cached_tokenizer_from_config(config.model_config)
        self.shape = SessionShape.of(tokenizer.instruct.audio_encoder.audio_config)
        self.sessions: dict[str, SessionAudio] = {}
        self.audio_of: dict[str, SessionAudio] = {}  # by request id
        # The rows of a session are a ring of this length, or longer (AudioRows).
        self.ahead = min(AHEAD, config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len)
        self.preempted: dict[str, Any] = {}  # requests of sessions that were preempted and may not run yet
        self.most_running = [name for name in MOST_RUNNING if hasattr(self, name)]

    def live(self, messages: list[list[Any]]) -> dict[str, str]:
        """Take messages (voxtral_serve.engine.session) -> {session: reason} of those that were refused."""
        refused: dict[str, str] = {}
        for kind, name, *rest in messages:
            audio = self.sessions.get(name)
            if kind == "open":
                if audio is not None or len(self.sessions) >= self.most_sessions:
                    refused[name] = f"{OPTION} is {self.most_sessions}"
                    continue
                try:
                    self.sessions[name] = SessionAudio(self.shape.with_delay(*rest))
                except ValueError as error:
                    refused[name] = str(error)
            elif kind == "close":
                self.sessions.pop(name, None)
            elif audio is None:
                refused[name] = "unknown session"
            elif kind == "audio":
                try:
                    audio.add(rest[0])
                except ValueError as error:
                    refused[name] = str(error)
            elif kind == "end":
                audio.end()
                self._bound(audio)
            else:
                refused[name] = f"unknown message {kind!r}"
        return refused

    def _bound(self, audio: SessionAudio) -> None:
        """Have the request of a session that has ended end with its last row, as an uploaded clip's does."""
        for request_id, held in self.audio_of.items():
            if held is audio and (request := self.requests.get(request_id)) is not None:
                request.max_tokens = min(request.max_tokens, audio.rows - request.num_prompt_tokens + 1)

    def add_request(self, request: Any) -> None:
        name = (getattr(request.sampling_params, "extra_args", None) or {}).get(SESSION)
        super().add_request(request)  # type: ignore[misc]
        if name is None:
            return
        audio = self.sessions.get(name)
        if audio is None or not request.num_prompt_tokens == audio.shape.prompt <= audio.rows:
            # Its client has gone in the meantime, or its prompt came before its audio, or is that of another delay.
            logger.warning("request %s: no session has the audio and the delay of its prompt", request.request_id)
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)  # type: ignore[attr-defined]
            return
        self.audio_of[request.request_id] = audio
        if audio.ended:
            self._bound(audio)

    def waits(self, request: Any) -> bool:
        """Whether a request's next token needs a row of audio that has not arrived."""
        audio = self.audio_of.get(request.request_id)
        return audio is not None and request.num_tokens + request.num_output_placeholders > audio.rows

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if not self.audio_of:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        waiting, ready = list[Any](), list[Any]()
        for request in self.running:
            (waiting if self.waits(request) else ready).append(request)
        limits = {name: getattr(self, name) for name in self.most_running}
        # All rows but the last of a request that was preempted are there. That one is waited for, too.
        preempted = self._preempted_waiting()
        if preempted:
            self.waiting.remove_requests(preempted)
        self.running = ready
        for name, most in limits.items():
            setattr(self, name, most - len(waiting))
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.running = waiting + self.running
            for request in preempted:
                self.waiting.prepend_request(request)
            for name, most in limits.items():
                setattr(self, name, most)
        output.voxtral_serve_live = self._parts(output.num_scheduled_tokens)
        if waiting and not output.num_scheduled_tokens:
            self._make_room(waiting)
        return output

    def _make_room(self, waiting: list[Any]) -> None:
        """Preempt one of the running requests that wait for audio, if a session that could go on finds no KV cache.

        That vLLM does not see them would otherwise block both for ever. A server whose sessions fit never comes here.
        """
        ready = [self.requests[name] for name in self.audio_of if name in self.requests]
        if any(not self.waits(request) for request in ready):
            idle = [request for request in waiting if not request.num_output_placeholders]
            if idle:
                self.running.remove(idle[-1])
                self._preempt_request(idle[-1], time.monotonic())

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        if (audio := self.audio_of.get(request.request_id)) is not None:
            audio.encoded = 0  # the worker forgets its rows
            self.preempted[request.request_id] = request

    def _preempted_waiting(self) -> list[Any]:
        self.preempted = {
            request_id: request
            for request_id, request in self.preempted.items()
            if request.status == RequestStatus.PREEMPTED and request_id in self.audio_of
        }
        return [request for request in self.preempted.values() if self.waits(request)]

    def _parts(self, scheduled: dict[str, int]) -> dict[str, LivePart]:
        """The audio that the worker encodes in a step, by request id."""
        parts = {}
        spare = MOST_AHEAD
        for request_id, count in scheduled.items():
            if (audio := self.audio_of.get(request_id)) is not None:
                first = self.requests[request_id].num_computed_tokens - count
                part = audio.next_part(first, count, self.ahead if spare > 0 else 0)
                if part is not None:
                    parts[request_id] = part
                    spare -= part.rows - count
        return parts

    def get_num_unfinished_requests(self) -> int:
        """0 where all of them wait for audio: the engine's loop then blocks until a message comes."""
        unfinished: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        held = len(self.running) + len(self._preempted_waiting())
        return 0 if self.audio_of and unfinished == held and all(map(self.waits, self.running)) else unfinished

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.audio_of.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]


class LiveScheduler(LiveSessions, Scheduler):
    pass


class LiveAsyncScheduler(LiveSessions, AsyncScheduler):
    pass


def live_scheduler(*args: Any, vllm_config: Any, **kwargs: Any) -> LiveSessions:
    """What vLLM makes its scheduler with. Raises PatchError where its own is not as expected."""
    if lacking := expected(Scheduler):
        raise shims.PatchError(
            f"vllm {shims.installed('vllm')}: its scheduler has no {', '.join(lacking)}: live sessions cannot be "
            f"served with it. {shims.ADVICE}"
        )
    chosen = LiveAsyncScheduler if vllm_config.scheduler_config.async_scheduling else LiveScheduler
    return chosen(*args, vllm_config=vllm_config, **kwargs)


def expected(scheduler: type) -> list[str]:
    """What is used of vLLM's scheduler and is not there."""
    source = inspect.getsource(inspect.getmodule(scheduler))  # type: ignore[arg-type]
    lacking = [name for name in ATTRIBUTES if name not in source]
    for name, parameters in METHODS.items():
        method = getattr(scheduler, name, None)
        found = inspect.signature(method).parameters if method else {}
        if method is None or not set(parameters) <= set(found):
            lacking.append(f"{name}({', '.join(parameters)})")
    return lacking
