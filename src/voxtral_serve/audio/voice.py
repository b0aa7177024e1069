"""The probability of speech in audio that arrives in pieces, of many streams at once.

Silero VAD, with the state of each stream kept between its pieces.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from voxtral_serve.audio import silero
from voxtral_serve.audio.level import NORMAL_DB, decibels
from voxtral_serve.audio.silero import CONTEXT, FRAME, RATE, STATE

BLOCK = 128  # samples whose power tells how loud a frame is
# A frame is amplified as the loudest of the last LOUD_S would have to be to reach NORMAL_DB, as whole clips are: Silero
# VAD misses quiet voices. By at most MOST_DB: silence and faint noise stay faint.
LOUD_S, MOST_DB = 3.0, 20.0
LEAST_DB = -12.0  # of the gain
# After speech, the model's probability falls slowly where faint or steady noise follows. Without these two rules, 5 of
# 115 quiet pauses of 700 ms and more of the live benchmark set were not found; all are with them. A frame is no speech
# if it is FAINT_DB below the loudest of LOUD_S; nor, unless the model is SURE, if STEADY frames differ by at most
# STEADY_DB.
FAINT_DB = 30.0
STEADY, STEADY_DB, SURE = 5, 3.0, 0.9
NONE = 0.0  # their probability


class VoiceStream:
    """What is kept of one stream: frames that are not complete, the loudness so far, and the model's state."""

    def __init__(self) -> None:
        self.pending = b""  # PCM16 of a frame that is not complete
        self.state = np.zeros((STATE[0], 1, STATE[1]), np.float32)
        self.context = np.zeros(CONTEXT, np.float32)
        self._loud: deque[float] = deque(maxlen=round(LOUD_S * RATE / FRAME))
        self._levels: deque[float] = deque(maxlen=STEADY)  # dB, of frames
        self._quiet: deque[tuple[bool, bool]] = deque()  # of frames to come to the model: whether faint, steady

    def frames(self, pcm: bytes) -> np.ndarray:
        """float32 [n, FRAME]: the frames that this PCM16 completes, at a common loudness."""
        data = self.pending + pcm
        whole = len(data) - len(data) % (2 * FRAME)
        self.pending = data[whole:]
        samples = np.frombuffer(data[:whole], "<i2").astype(np.float32).reshape(-1, FRAME) / 2**15
        blocks = samples.reshape(len(samples), FRAME // BLOCK, BLOCK)
        power = decibels(np.einsum("fbs,fbs->fb", blocks, blocks) / BLOCK)
        levels = decibels(np.einsum("fs,fs->f", samples, samples) / FRAME)
        gains = np.empty(len(samples), np.float32)
        for number, (peak, level) in enumerate(zip(power.max(1).tolist(), levels.tolist(), strict=True)):
            self._loud.append(peak)
            self._levels.append(level)
            loudest = max(self._loud)
            gains[number] = 10 ** (min(max(NORMAL_DB - loudest, LEAST_DB), MOST_DB) / 20)
            steady = len(self._levels) == STEADY and max(self._levels) - min(self._levels) <= STEADY_DB
            self._quiet.append((peak < loudest - FAINT_DB, steady))
        return np.clip(samples * gains[:, None], -1, 1)

    def judged(self, probabilities: np.ndarray) -> np.ndarray:
        """float [n]: those of the model for the next frames, and NONE for frames that are faint or steady."""
        kept = np.ones(len(probabilities), bool)
        for number, probability in enumerate(probabilities.tolist()):
            faint, steady = self._quiet.popleft()
            kept[number] = not (faint or (steady and probability < SURE))
        return np.where(kept, probabilities, np.float32(NONE))


class VoiceModel:
    """Silero VAD for several streams in one call. Load it once in a process; one thread at a time may use it."""

    def __init__(self) -> None:
        """Raises ImportError where silero-vad or onnxruntime is not installed."""
        self._model = silero.for_streams()
        self._rate = np.array(RATE, np.int64)

    def probabilities(self, streams: Sequence[VoiceStream], frames: Sequence[np.ndarray]) -> list[np.ndarray]:
        """float [n] for each stream: those of its next frames, float32 [n, FRAME]. Streams differ."""
        results = [np.zeros(len(of_stream), np.float32) for of_stream in frames]
        for step in range(max((len(of_stream) for of_stream in frames), default=0)):
            active = [number for number, of_stream in enumerate(frames) if len(of_stream) > step]
            inputs = np.stack([np.concatenate([streams[n].context, frames[n][step]]) for n in active])
            state = np.concatenate([streams[n].state for n in active], axis=1)
            output, state = self._model.run(None, {"input": inputs, "state": state, "sr": self._rate})
            for row, number in enumerate(active):
                results[number][step] = output[row, 0]
                streams[number].state = state[:, row : row + 1]
                streams[number].context = inputs[row, -CONTEXT:]
        return [stream.judged(result) for stream, result in zip(streams, results, strict=True)]
