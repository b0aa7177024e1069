"""Send a clip as a microphone would, over the WebSocket /v1/realtime of vLLM 0.32.0, and time the text that comes back.

The protocol is that of vLLM's entrypoints/speech_to_text/realtime: session.created, session.update with the model,
input_audio_buffer.commit, then input_audio_buffer.append with base64 PCM16 at 16 kHz, and a commit that is final;
transcription.delta while it goes on, transcription.done at the end, or error.
A piece of audio is sent when its last sample would have been spoken: the n-th, from 1, n * 80 ms after the speech
began, whatever became of those before it.
"""

import base64
import json
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from socket import SO_SNDTIMEO, SOL_SOCKET
from typing import Any

import jiwer
import numpy as np
import soundfile
import soxr
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from bench import BenchError
from bench.answers import Answer, wait_until
from bench.dataset import Clip

SAMPLE_RATE = 16000
PIECE_S = 0.08  # one token of Voxtral Realtime


class LiveError(Exception):
    """The session ended otherwise than with a transcript."""


def transcribe(
    url: str, model: str, clip: Clip, due: float | None, timeout_s: float, headers: Mapping[str, str], *, proxy: bool
) -> Answer:
    """Hold one session. Decoding the clip and opening the session come before its start, the first audio sent."""
    audio = pcm16(clip)
    answer = Answer(start := time.perf_counter(), start, pieces=[])
    try:
        # Base64 of sound hardly shrinks, and a ping that a busy server leaves unanswered would end the session.
        with connect(
            "ws" + url.removeprefix("http") + "/v1/realtime",
            additional_headers=headers,
            compression=None,
            open_timeout=timeout_s,
            close_timeout=1,
            ping_interval=None,
            proxy=True if proxy else None,
        ) as socket:
            answer.status = 101
            # websockets bounds receiving alone; a server that reads no more would hold a send for ever.
            socket.socket.setsockopt(SOL_SOCKET, SO_SNDTIMEO, struct.pack("ll", *divmod(round(timeout_s * 1e6), 10**6)))
            session = _Session(socket, answer, timeout_s)
            session.open(model)
            wait_until(due)
            session.speak(audio)
            answer.text = session.text()
    except InvalidStatus as problem:
        answer.status = problem.response.status_code
        shown = (problem.response.body or b"")[:300].decode(errors="replace")
        answer.error = f"HTTP {answer.status} instead of a WebSocket: {shown}"
    except LiveError as problem:
        answer.error = str(problem)
    except ConnectionClosed as problem:
        answer.error = f"the connection was closed before transcription.done: {problem}"
    except (OSError, WebSocketException) as problem:  # TimeoutError is an OSError
        answer.error = f"{type(problem).__name__} after {time.perf_counter() - answer.start:.3f} s: {problem}"
    if answer.error is not None:
        answer.end = time.perf_counter()
    elif words := clip.extra.get("words"):
        # The speech began one piece before the first piece was sent.
        began = answer.start - min(PIECE_S, len(audio) / SAMPLE_RATE)
        answer.words_ms = word_delays(words, [(at - began, text) for at, text in answer.pieces or ()])
    return answer


class _Session:
    def __init__(self, socket: ClientConnection, answer: Answer, timeout_s: float) -> None:
        self._socket, self._answer, self._timeout_s = socket, answer, timeout_s
        self._done: str | None = None

    def open(self, model: str) -> None:
        if (created := self._receive(self._timeout_s)).get("type") != "session.created":
            raise LiveError(f"expected session.created, received {json.dumps(created)[:300]}")
        self._send("session.update", model=model)
        self._send("input_audio_buffer.commit")

    def speak(self, audio: np.ndarray) -> None:
        size = round(PIECE_S * SAMPLE_RATE)
        pieces = [base64.b64encode(audio[at : at + size].tobytes()).decode() for at in range(0, len(audio), size)]
        first = self._answer.start = time.perf_counter()
        for number, piece in enumerate(pieces):
            # The last one is shorter, and so is the time that it takes to say it.
            self._listen_until(first + min(number * size, len(audio) - size) / SAMPLE_RATE if number else first)
            self._send("input_audio_buffer.append", audio=piece)
        self._answer.spoken = time.perf_counter()
        self._send("input_audio_buffer.commit", final=True)

    def text(self) -> str:
        """Wait for the end. A timeout is the longest silence, as in the other modes."""
        while self._done is None:
            self._take(self._timeout_s)
        return self._done

    def _listen_until(self, due: float) -> None:
        while (left := due - time.perf_counter()) > 0:
            try:
                self._take(left)
            except TimeoutError:
                return

    def _take(self, timeout_s: float) -> None:
        event = self._receive(timeout_s)
        at = time.perf_counter()
        kind = event.get("type")
        name = {"transcription.delta": "delta", "transcription.done": "text"}.get(str(kind))
        if name is None:
            return
        if not isinstance(text := event.get(name), str):
            raise LiveError(f"{kind} has no string {name!r}: {json.dumps(event)[:300]}")
        if name == "text":
            if self._answer.spoken is None:
                raise LiveError(f"transcription.done before the audio's end: {text[:300]!r}")
            self._done, self._answer.end = text, at
        elif text and self._answer.pieces is not None:
            self._answer.pieces.append((at, text))

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        message = self._socket.recv(timeout_s)
        try:
            event = json.loads(message)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise LiveError(f"a message is no JSON object: {message[:300]!r}")
        if event.get("type") == "error":
            raise LiveError(f"the server says: {json.dumps(event, ensure_ascii=False)[:300]}")
        return event

    def _send(self, kind: str, **fields: Any) -> None:
        self._socket.send(json.dumps({"type": kind, **fields}))


def pcm16(clip: Clip) -> np.ndarray:
    """The clip's samples: mono, 16 kHz, int16. Raises BenchError if its file cannot be decoded."""
    try:
        samples, rate = soundfile.read(clip.path, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise BenchError(f"cannot decode {clip.path.name} of clip {clip.id}: {error}") from None
    mono = samples.mean(axis=1)
    if rate != SAMPLE_RATE:
        mono = soxr.resample(mono, rate, SAMPLE_RATE)
    if not len(mono):
        raise BenchError(f"{clip.path.name} of clip {clip.id} has no samples")
    return (mono.clip(-1, 1) * 32767).round().astype("<i2")


def check(clip: Clip) -> None:
    """Raise BenchError if soundfile cannot read the clip, or any of its `words` is not [word, start_s, end_s]."""
    try:
        soundfile.info(str(clip.path))
    except soundfile.SoundFileError as error:
        raise BenchError(f"--realtime: cannot decode {clip.path.name} of clip {clip.id}: {error}") from None
    for word in clip.extra.get("words") or ():
        if not (isinstance(word, list) and [isinstance(part, str) for part in word] == [True, False, False]):
            raise BenchError(f"clip {clip.id}: 'words' must list [word, start_s, end_s], found {word!r}")


def word_delays(words: Sequence[Sequence[Any]], pieces: Sequence[tuple[float, str]]) -> list[float]:
    """Milliseconds from the end of each word that was heard right until the piece came that completed it.

    `words` are [word, start_s, end_s] of the reference, `pieces` (arrival in s, text); both count from the speech's
    beginning. The two texts are aligned by words without case and punctuation; others have no delay.
    """
    reference = [(plain, word[2]) for word in words for _, plain in _plain_words(word[0])]
    text = "".join(piece for _, piece in pieces)
    heard = list(_plain_words(text))
    if not reference or not heard:
        return []
    ends, arrivals = np.cumsum([len(piece) for _, piece in pieces]), [at for at, _ in pieces]
    aligned = jiwer.process_words(" ".join(word for word, _ in reference), " ".join(word for _, word in heard))
    delays = []
    for chunk in aligned.alignments[0]:
        if chunk.type == "equal":
            for said, got in zip(
                range(chunk.ref_start_idx, chunk.ref_end_idx),
                range(chunk.hyp_start_idx, chunk.hyp_end_idx),
                strict=True,
            ):
                arrival = arrivals[int(np.searchsorted(ends, heard[got][0]))]
                delays.append(round((arrival - reference[said][1]) * 1000, 3))
    return delays


def _plain_words(text: str) -> Iterator[tuple[int, str]]:
    """The words without case and punctuation, each with the place behind its last letter or digit."""
    for found in re.finditer(r"\S+", text):
        letters = list(re.finditer(r"\w", found[0]))
        if letters:
            plain = "".join(letter[0] for letter in letters).casefold()
            yield found.start() + letters[-1].end(), plain
