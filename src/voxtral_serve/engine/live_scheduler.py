"""vLLM's scheduler with live sessions: a request whose next row of audio has not arrived is left out of the step.

While vLLM's scheduler decides on a step, it does not see the running requests that wait for audio, and the number of
requests that may run is lowered by theirs. They keep their KV cache, and the engine's loop blocks until audio arrives
where no other request runs.

A session is admitted if the KV cache can hold it, and all others that are open, at its longest: a request of
`max_live_age_s` seconds, after which a session goes on in another one. Uploads use what sessions leave: vLLM preempts
them where a session, which has priority, needs their memory. A session that is preempted nevertheless is computed again
in parts of PART rows, and RESUMING sessions at a time, while the others go on.

What is wrong with one session or one request ends that request alone: a request that names no open session, or one that
has a request already, when it is added; one whose rows are not there, when a step is decided; one that the worker marks
(audio_rows), when the step's output comes. `_end` ends it in vLLM's scheduler, as an abort does, and keeps an output
for its client, which goes out with the next step's. vLLM has such a step at once, since the worker must be told.

A session whose rows are not all there gets no drafts: they would need the audio to come. Once its audio has ended and
its last row is encoded, it has as many as an upload (draft_scheduler). Drafts past its last row do no harm: the request
ends before their tokens (`_bound`), and their rows are old ones of the session's ring.
"""

import time
from collections.abc import Iterable
from typing import Any, ClassVar

from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import RequestStatus

from voxtral_serve.engine.live_audio import AHEAD, FAULTS, STEP, LivePart, LiveStep, SessionAudio
from voxtral_serve.engine.session import (
    AGE,
    NAME,
    OPTION,
    PART,
    RING,
    SESSION,
    SessionShape,
    request_positions,
    session_blocks,
)

logger = init_logger("vllm.voxtral_serve.live")
# vLLM 0.32.0 has both of these limits, 0.20.0 the first.
RUNNING_LIMITS = ("max_num_running_reqs", "max_num_active_reqs")
TOKENS = "max_num_scheduled_tokens"  # of a step
MOST_AHEAD = 128  # rows of all sessions that a step encodes ahead: more would delay the tokens of other sessions
RESUMING = 3  # sessions that are computed again at a time after preemption; PART rows of each are within MOST_AHEAD


class LiveSessions:
    """Mixin for vLLM's scheduler classes. What it uses of them is in METHODS and ATTRIBUTES (scheduler.expected)."""

    SERVES = "live sessions"
    METHODS: ClassVar[dict[str, tuple[str, ...]]] = {
        "schedule": (),
        "update_from_output": ("scheduler_output", "model_runner_output"),
        "update_draft_token_ids": ("draft_token_ids",),
        "add_request": ("request",),
        "finish_requests": ("request_ids", "finished_status"),
        "_free_request": ("request",),
        "_preempt_request": ("request",),
        "get_num_unfinished_requests": (),
        "get_request_counts": (),
    }
    ATTRIBUTES: ClassVar[tuple[str, ...]] = (
        *("self.running", "self.waiting", "self.requests", "self.max_num_running_reqs"),
        *("self.max_num_scheduled_tokens", "long_prefill_token_threshold", "self.kv_cache_config"),
        *("request.num_preemptions", "request.num_computed_tokens"),
        *("request.max_tokens", "request.num_output_placeholders", "request.spec_token_ids", "self.num_spec_tokens"),
    )

    running: list[Any]
    waiting: Any
    requests: dict[str, Any]
    num_spec_tokens: int
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        tokenizer: Any = cached_tokenizer_from_config(config.model_config)
        self.shape = SessionShape.of(tokenizer.instruct.audio_encoder.audio_config)
        self.sessions: dict[str, SessionAudio] = {}
        self.audio_of: dict[str, SessionAudio] = {}  # by request id
        context = config.model_config.max_model_len
        self.ring = min(RING, config.scheduler_config.max_num_batched_tokens, context)
        self.ahead = min(AHEAD, self.ring)
        age_s: int | None = config.additional_config.get(AGE)
        self.positions = request_positions(self.shape, context, age_s)
        self.session_limit, self.full = self._limit(config.additional_config[OPTION], age_s)
        self.preempted: dict[str, Any] = {}  # requests of sessions that were preempted and may not run yet
        self.untold: set[str] = set()  # requests that were preempted since the last step that had tokens
        self.faults: dict[str, str] = {}  # requests to end when the next output comes, and why
        self.ended: list[tuple[int, EngineCoreOutput]] = []  # (client, output) of requests that ended here
        self.running_limits = [name for name in RUNNING_LIMITS if hasattr(self, name)]

    def _limit(self, sessions: int, age_s: int | None) -> tuple[int, str]:
        """The most sessions that may be open, and why no further one is admitted. Raises ValueError if the KV cache
        holds none."""
        cache: Any = self.kv_cache_config  # type: ignore[attr-defined]
        context = self.vllm_config.model_config.max_model_len  # type: ignore[attr-defined]
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        layers = [
            (spec.block_size, spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0) for spec in specs
        ]
        each = session_blocks(layers, self.positions, context, self.num_spec_tokens)
        blocks = cache.num_blocks - 1  # one is vLLM's own
        fitting = blocks // each
        audio = self.positions - 1 - self.shape.left - self.shape.right
        held = f"the KV cache holds {fitting} live sessions of {audio * self.shape.samples // self.shape.rate_hz} s"
        if not fitting:
            raise ValueError(f"the KV cache has {blocks} blocks, and a live session needs {each}: lower {AGE}")
        if fitting >= sessions:
            return sessions, f"{OPTION} is {sessions}"
        option = f"{AGE} {age_s}" if age_s else f"max_model_len, as {AGE} is not set"
        logger.warning("%s is %d, but %s (%s): further sessions are refused", OPTION, sessions, held, option)
        return fitting, held

    def live(self, messages: list[list[Any]]) -> dict[str, str]:
        """Take messages (voxtral_serve.engine.session) -> {session: reason} of those that were refused. Never raises:
        one call has the messages of all sessions of a process."""
        refused: dict[str, str] = {}
        for message in messages if isinstance(messages, list) else [messages]:
            try:
                self._take(message)
            except ValueError as error:
                has_name = isinstance(message, list) and len(message) > 1 and isinstance(message[1], str)
                refused[message[1] if has_name else ""] = str(error)
        return refused

    def _take(self, message: Any) -> None:
        """Raises ValueError for a message that is refused."""
        match message:
            case ["open", str(name)] | ["open", str(name), _]:
                self._open(name, *message[2:])
            case ["close", str(name)]:
                self._close(name)
            case ["audio" | "end", str(name), *_] if name not in self.sessions:
                raise ValueError("unknown session")
            case ["audio", str(name), bytes(pcm)]:
                self.sessions[name].add(pcm)
            case ["end", str(name)]:
                self.sessions[name].end()
                self._bound(self.sessions[name])
            case _:
                raise ValueError(f"unknown message {message!r:.80}: expected open, audio, end or close of a session")

    def _open(self, name: str, delay: Any = None) -> None:
        if not NAME.fullmatch(name):
            raise ValueError(f"a session named {name!r:.80}: expected {NAME.pattern}")
        if name in self.sessions:
            raise ValueError("the session is open already")
        if len(self.sessions) >= self.session_limit:
            raise ValueError(self.full)
        self.sessions[name] = SessionAudio(self.shape.with_delay(delay), self.positions)

    def _close(self, name: str) -> None:
        audio = self.sessions.pop(name, None)
        if audio is not None and audio.request is not None:
            self._end(audio.request, RequestStatus.FINISHED_ABORTED, "the session is closed")

    def _bound(self, audio: SessionAudio) -> None:
        """Have the request of a session that has ended end with its last row, as an uploaded clip's does."""
        if audio.request in self.audio_of:
            request = self.requests[audio.request]
            request.max_tokens = min(request.max_tokens, audio.rows - request.num_prompt_tokens + 1)

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        name = (getattr(request.sampling_params, "extra_args", None) or {}).get(SESSION)
        if name is None:
            return
        try:
            audio = self._audio_for(request, name)
        except ValueError as error:
            self._end(request.request_id, RequestStatus.FINISHED_ERROR, str(error))
            return
        audio.request = request.request_id
        self.audio_of[request.request_id] = audio
        if audio.ended:
            self._bound(audio)

    def _audio_for(self, request: Any, name: Any) -> SessionAudio:
        """The audio of the session that a request names, which any client may have written. Raises ValueError."""
        audio = self.sessions.get(name) if isinstance(name, str) else None
        if audio is None:
            raise ValueError("it names no session that is open")  # perhaps its client has gone in the meantime
        if audio.request is not None:
            raise ValueError("it names a session that has a request already")
        if request.resumable or request.mm_features:
            raise ValueError("it names a session and brings audio of its own")
        prompt, rows = audio.shape.prompt, audio.rows
        if not request.num_prompt_tokens == prompt <= rows:
            tokens = request.num_prompt_tokens
            raise ValueError(f"its prompt has {tokens} tokens, and its session one of {prompt} with {rows} rows")
        return audio

    def _end(self, request_id: str, status: RequestStatus, reason: str) -> None:
        """End a request that may have ended already, and tell its client."""
        request = self.requests.get(request_id)
        if request is None or request.is_finished():
            return
        if status == RequestStatus.FINISHED_ERROR:
            logger.warning("request %s ends with an error: %s", request_id, reason)
        if not request.num_computed_tokens:
            # vLLM's histograms have the time from one event to the next: without this one, since the machine started.
            request.record_event(EngineCoreEventType.SCHEDULED)
        self.finish_requests(request_id, status)  # type: ignore[attr-defined]
        output = EngineCoreOutput(request_id, [], finish_reason=request.get_finished_reason(), stop_reason=reason)
        output.events = request.take_events()
        self.ended.append((request.client_index, output))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        for request_id, reason in (self.faults | getattr(model_runner_output, FAULTS, {})).items():
            self._end(request_id, RequestStatus.FINISHED_ERROR, reason)
        self.faults = {}
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        for client, output in self.ended:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        self.ended = []
        return outputs

    def waits(self, request: Any) -> bool:
        """Whether a request has to wait: its next token needs a row that has not arrived, or it has all its tokens."""
        audio = self.audio_of.get(request.request_id)
        if audio is None:
            return False
        # Of a step under way, drafts may turn out wrong; one token is certain.
        under_way = min(request.num_output_placeholders, 1) if audio.ended else request.num_output_placeholders
        return bool(request.num_tokens + under_way > audio.rows)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        parts = self._parts(output.num_scheduled_tokens)
        setattr(output, STEP, LiveStep(parts, self.untold))
        if output.num_scheduled_tokens:
            self.untold = set()
        self._drop_drafts(output.num_scheduled_tokens)
        return output

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]
        self._drop_drafts(draft_token_ids.req_ids)

    def _drop_drafts(self, request_ids: Iterable[str]) -> None:
        """Leave no drafts for the next step to sessions whose rows are not all encoded. The drafter knows one delay."""
        for request_id in request_ids:
            audio = self.audio_of.get(request_id)
            if audio is not None and not (audio.is_encoded and audio.shape.delay == self.shape.delay):
                self.requests[request_id].spec_token_ids = []

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Decide on a step without the requests that wait for audio."""
        if not self.audio_of:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        waiting, ready = list[Any](), list[Any]()
        for request in self.running:
            (waiting if self.waits(request) else ready).append(request)
        limits = {name: getattr(self, name) for name in (*self.running_limits, TOKENS)}
        resuming, preempted = sum(map(self._resumes, ready)), list[Any]()
        for request in self._preempted():
            # All rows but the last of a request that was preempted are there. That one is waited for, too.
            if self.waits(request) or resuming >= RESUMING:
                preempted.append(request)
            else:
                resuming += 1
        if preempted:
            self.waiting.remove_requests(preempted)
        self.running = ready
        for name in self.running_limits:
            setattr(self, name, limits[name] - len(waiting))
        if resuming and sum(self.get_request_counts()) == 1:  # type: ignore[attr-defined]
            # vLLM 0.32.0 computes the only request without regard to long_prefill_token_threshold.
            self.max_num_scheduled_tokens = min(PART, self.max_num_scheduled_tokens)
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.running = waiting + self.running
            for request in preempted:
                self.waiting.prepend_request(request)
            for name, limit in limits.items():
                setattr(self, name, limit)
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
        self.untold.add(request.request_id)
        if (audio := self.audio_of.get(request.request_id)) is not None:
            audio.encoded = 0  # the worker forgets its rows
            self.preempted[request.request_id] = request

    def _preempted(self) -> list[Any]:
        """The requests of sessions that were preempted and do not run yet."""
        self.preempted = {
            request_id: request
            for request_id, request in self.preempted.items()
            if request.status == RequestStatus.PREEMPTED and request_id in self.audio_of
        }
        return [*self.preempted.values()]

    def _resumes(self, request: Any) -> bool:
        """Whether a running request is computed again after it was preempted."""
        if request.request_id not in self.audio_of:
            return False
        return bool(request.num_preemptions and request.num_tokens - request.num_computed_tokens > 1)

    def _parts(self, scheduled: dict[str, int]) -> dict[str, LivePart]:
        """The audio that the worker encodes in a step, by request id. A request whose rows are not there gets none, and
        ends when an output comes: it is in the step."""
        parts = {}
        spare = MOST_AHEAD
        for request_id, count in scheduled.items():
            if (audio := self.audio_of.get(request_id)) is not None:
                first = self.requests[request_id].num_computed_tokens - count
                try:
                    if count > self.ring:
                        raise ValueError(f"{count} tokens of a session in one step: expected at most {self.ring}")
                    part = audio.next_part(first, count, self.ahead if spare > 0 else 0, self.num_spec_tokens > 0)
                except ValueError as error:
                    self.faults[request_id] = str(error)
                    continue
                if part is not None:
                    parts[request_id] = part
                    spare -= part.rows - count
        return parts

    def get_num_unfinished_requests(self) -> int:
        """Return 0 if all of them wait for audio: the engine's loop then blocks until a message comes."""
        unfinished: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        admitted = len(self.running) + sum(map(self.waits, self._preempted()))
        return 0 if self.audio_of and unfinished == admitted and all(map(self.waits, self.running)) else unfinished

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.audio_of.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
