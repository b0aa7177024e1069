"""What a live session is to vLLM's engine, and how the API server's process speaks to it. Standard library only.

A session is one ordinary request of the encode-once model. Its prompt is BOS, the left padding and the delay, as that
of an uploaded clip; each further token needs one more row of 80 ms of audio, and the scheduler waits for it
(live_scheduler). Audio reaches the scheduler by the utility call `UTILITY` of vLLM's EngineCore, with one list of
messages for all sessions of an API process:

    ["open", session, delay]     before the request is added; refused where max_live_sessions are open, or as many as
                                 the KV cache can hold (live_scheduler). `delay` is in token positions; without it, or
                                 with None, it is the checkpoint's
    ["audio", session, bytes]    mono PCM16, little-endian, 16 kHz
    ["end", session]             no more audio: the right padding follows
    ["close", session]           forget the session, and abort its request if it runs. A session that goes on in a
                                 second request has one place: "close" and the next "open" go in the same call

The answer is a dict {session: reason} of the messages that were refused; a message that names no session is refused
under "". The request names its session in `SamplingParams.extra_args[SESSION]`, and is added once `ready_samples` of
audio were sent, so that it never waits for its prompt's rows.

A session has a name of the form NAME, which the API server makes at random, and one request. The scheduler ends any
other request that names a session with the finish reason "error", and says why in the stop reason.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

UTILITY = "voxtral_serve_live"
SESSION = "voxtral_serve_session"
NAME = re.compile(r"[0-9a-f]{32}-[0-9]{1,9}")  # of a session: 128 random bits, and a number of a request
DELAY = "voxtral_serve_delay"  # in SamplingParams.extra_args: token positions of an uploaded clip's delay
UPLOAD_DELAY = "upload_delay_ms"  # of additional_config: of uploads that name none, if it is not the checkpoint's
# Seconds that a delay must leave to an upload beside its padding: shorter pieces of a long clip would have no whole
# words between their margins (audio.speech).
LEAST_UPLOAD_S = 1
OPTION = "max_live_sessions"  # of vLLM's additional_config: clients that may be live at a time; 0 is none
AGE = "max_live_age_s"  # of the same: seconds of audio of one request, for which each session has KV cache
ROLL_OVER = 0.80  # share of a request's positions from which its session goes on in another one, at a pause
LEVELS_S = 5  # seconds by whose levels a pause is one
# Token positions of delay that a session may have: 80 ms to 2.4 s. Mistral names those up to 1.2 s, and 2.4 s, for
# Voxtral-Mini-4B-Realtime-2602.
DELAYS = range(1, 31)
# Tokens, and so rows, of a request in one step: a preempted session is computed again in parts of this length, which
# are five passes of the encoder. A prompt at the checkpoint's delay (39 tokens) is within.
PART = 40
RING = 128  # rows of a session that the worker keeps: those of a step, and those before the end that have drafts
LOOK_AHEAD = 40  # samples past a row's end that its last spectrogram frame sees: half a window less a hop


class SessionShape(NamedTuple):
    """Token positions and samples of a session, or of an uploaded clip.

    left, delay, right   positions of padding before the audio, of the delay, and after the audio
    samples              of one position, at `rate_hz`
    """

    left: int
    delay: int
    right: int
    samples: int
    rate_hz: int

    @classmethod
    def of(cls, audio: Any) -> "SessionShape":
        """From mistral_common.tokens.tokenizers.audio.AudioConfig."""
        return cls(
            audio.n_left_pad_tokens,
            audio.get_num_delay_tokens(),
            audio.n_right_pad_tokens(),
            audio.raw_audio_length_per_tok,
            audio.sampling_rate,
        )

    def with_delay(self, delay: int | None = None) -> "SessionShape":
        """This shape, the checkpoint's, with another delay in token positions; None keeps it. Raises ValueError for a
        delay that is neither in DELAYS nor the checkpoint's."""
        if delay is None:
            return self
        if type(delay) is not int or delay not in (*DELAYS, self.delay):
            raise ValueError(f"a delay of {delay!r} positions: expected {DELAYS[0]} to {DELAYS[-1]}")
        # mistral-common pads the right by the delay and a number of positions that does not depend on it.
        return self._replace(delay=delay, right=self.right - self.delay + delay)

    def with_delay_ms(self, delay_ms: int | None = None) -> "SessionShape":
        """The same in milliseconds. The ValueError has the valid values, for the client that asked."""
        if delay_ms is None:
            return self
        step = self.position_ms
        if type(delay_ms) is not int or delay_ms % step or delay_ms // step not in (*DELAYS, self.delay):
            expected = f"a multiple of {step} from {DELAYS[0] * step} to {DELAYS[-1] * step}"
            raise ValueError(f"a delay of {delay_ms!r} ms: expected {expected}")
        return self.with_delay(delay_ms // step)

    @property
    def position_ms(self) -> int:
        """Milliseconds of audio of one position."""
        return 1000 * self.samples // self.rate_hz

    @property
    def silence(self) -> int:
        """Samples of the left padding whose rows no audio reaches: all but its last position."""
        return (self.left - 1) * self.samples

    @property
    def delay_ms(self) -> int:
        return self.delay * self.position_ms

    @property
    def prompt(self) -> int:
        """Tokens of the prompt: BOS, the left padding, the delay."""
        return 1 + self.left + self.delay

    @property
    def ready_samples(self) -> int:
        """Samples of audio after which the prompt's rows are complete."""
        return (self.prompt - self.left) * self.samples + LOOK_AHEAD

    def rows(self, n: int) -> int:
        """Rows that are complete after n samples, while more are to come."""
        return self.left + (n - LOOK_AHEAD) // self.samples

    def total_rows(self, n: int) -> int:
        """Rows of a session of n samples once it has ended; those of an uploaded clip of this length."""
        return self.left + -(-n // self.samples) + self.right


def request_positions(shape: SessionShape, context: int, age_s: int | None = None) -> int:
    """The most token positions of a request of a session: those of `age_s` seconds of audio (AGE) with its padding at
    the checkpoint's delay; None is the whole context. Raises ValueError if the context is shorter."""
    if age_s is None:
        return context
    positions = shape.total_rows(age_s * shape.rate_hz) + 1  # the last token needs no row
    if positions > context:
        longest = (context - 1 - shape.left - shape.right) * shape.samples // shape.rate_hz
        raise ValueError(f"{AGE} is {age_s}, and max_model_len {context} has room for {max(longest, 0)} s: lower {AGE}")
    return positions


def session_blocks(layers: Sequence[tuple[int, int]], positions: int, context: int, drafts: int) -> int:
    """The most blocks of the KV cache that a request of a session has at a time.

    layers     (tokens of a block, tokens of the sliding window or 0 for none) of each of vLLM's groups of layers
    positions  tokens of the request
    context    max_model_len
    drafts     the most tokens that a step drafts for a request
    """
    ahead = 2 * (1 + drafts)  # of a step, and of one under way: drafts may lie past the request's end
    blocks = 0
    for block, window in layers:
        tokens, edge = min(positions + ahead, context), 0
        if window and tokens > window - 1 + PART + ahead:
            tokens, edge = window - 1 + PART + ahead, 1  # the window may begin within a block
        blocks += -(-tokens // block) + edge
    return blocks


def has_delays(options: Any) -> bool:
    """Whether requests may have delays of their own, with these options of additional_config."""
    return isinstance(options, dict) and bool(options.get(OPTION) or options.get(UPLOAD_DELAY))


def upload_delay(params: Any) -> int | None:
    """Token positions of the delay that vLLM's SamplingParams of an upload name; None for those that name none."""
    return (getattr(params, "extra_args", None) or {}).get(DELAY)


def least_positions(shape: SessionShape) -> int:
    """The shortest context (max_model_len) in which a request has LEVELS_S of audio before its session goes on."""
    audio = -(-(shape.ready_samples + LEVELS_S * shape.rate_hz) // shape.samples)
    return math.ceil((audio + shape.left + shape.right + 1) / ROLL_OVER) + 2
