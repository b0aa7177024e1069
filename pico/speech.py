"""Synthetic English speech with exact word times, for training and tests of a tiny speech recogniser.

The synthesiser is espeak-ng (library and voices of the `espeakng-loader` wheel). Word times are from its events. All
audio is 16 kHz mono float32. All results are determined by the `numpy.random.Generator` argument.

    words = speak(["the cat sat, then it left.", "did it?"], rng, "en-us+f3").words

Properties of the library (1.52.0), and how this file handles them:
- A WORD event marks the first sound of a word. No event marks its end. A word ends at the event after its last
  sounding phoneme: the next WORD, a pause phoneme (`_` or `_:`), or END.
- Phrases in its dictionary ("in the", "of the", "there are", "would have") become one word with one event. A
  no-break space between the words prevents this. It is not used after punctuation, where it would change the prosody.
- It does not treat ". " before a lower-case letter as the end of a sentence, so the text has a capital there.
- Flutter, gain and wave phase are in C statics that no call resets, and its noise is seeded with the clock.
  Therefore every utterance loads a new copy of the library (4 ms including the voice) and seeds it. The library's
  helper thread ends with the utterance, so forking workers is safe.
- It ignores unknown variants ("en-us+zz"), so names are checked here. Its voice for en-gb is called "en".
"""

import _ctypes
import contextlib
import ctypes
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import espeakng_loader
import numpy as np

from pico.sounds import SAMPLE_RATE, fast_size

NATIVE_RATE = 22_050  # Hz, output of espeak-ng
SPEED_WPM = (130, 230)  # espeak's words per minute, before the speaker factor; higher with short words
PITCH = (30, 70)  # espeak's scale 0-99: 50 is the voice's own, 30 is 0.75 times, 70 is 1.3 times
PITCH_RANGE = (25, 85)  # espeak's scale 0-99: 50 is the voice's own
VOLUME = 80  # espeak's scale; at the default of 100, some voices clip
WORD_GAP = (1, 4)  # units of about 10 ms of silence between words, in WORD_GAP_SHARE of utterances
WORD_GAP_SHARE = 0.2
PAUSE_S = (0.15, 1.2)  # between sentences: from the end of the last word to the start of the next
EDGE_S = (0.0, 0.6)  # silence before the first and after the last word
# Output samples per 441 native samples. 320 gives the original voice; more give a slower and deeper one (at most 1.09
# times), fewer a faster and higher one (at least 0.92 times). Their small prime factors keep the FFTs fast.
RATIOS = (294, 297, 300, 308, 315, 320, 324, 330, 336, 343, 350)

LANGUAGES = (
    "en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029"
)  # fmt: skip
TRAIN_VARIANTS = ("", "+f2", "+f3", "+f4", "+f5", "+m2", "+m4", "+m5", "+m6", "+m7", "+m8")
BENCH_VARIANTS = ("+f1", "+m1", "+m3")  # ordinary voices, unlike the other variants; never used in training
HELD_OUT = (  # one combination per language whose language and variant are trained only separately
    "en-us+f2", "en-gb+m6", "en-gb-scotland+f4", "en-gb-x-rp+m7", "en-gb-x-gbclan+f3", "en-gb-x-gbcwmd+m4",
    "en-029+m2",
)  # fmt: skip
TRAIN_VOICES = [lang + v for lang in LANGUAGES for v in TRAIN_VARIANTS if lang + v not in HELD_OUT]
BENCH_VOICES = [lang + v for lang in LANGUAGES for v in BENCH_VARIANTS] + list(HELD_OUT)

# From speak_lib.h
_SYNCHRONOUS, _PHONEME_EVENTS, _DONT_EXIT = 2, 0x0001, 0x8000
_CHARS_UTF8, _POS_CHARACTER = 1, 1
_PARAMETERS = {"speed": 1, "volume": 2, "pitch": 3, "pitch_range": 4, "word_gap": 7}
_EVENT_WORD, _EVENT_PHONEME = 1, 7
_BUFFER_MS = 1000  # audio per callback; 220 events fit, more would be dropped
_TOKEN = re.compile(r"(?=[^A-Za-z]*[A-Za-z])[A-Za-z']+[,.?]*")


class UnknownVoiceError(ValueError):
    """The requested voice does not exist."""


class EspeakError(RuntimeError):
    """espeak-ng could not be loaded or refused a call."""


class WordTimingError(RuntimeError):
    """The events of espeak-ng do not give exactly one interval for each word."""


@dataclass
class Utterance:
    """`audio`: float32 [n], 16 kHz, in [-1, 1]. `words`: (word as written, start s, end s), in order."""

    audio: np.ndarray
    words: list[tuple[str, float, float]]


class _Event(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("type", "identifier", "text_position", "length", "ms", "sample")),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),  # the name of the phoneme in a phoneme event
    ]


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Event))
_LOCK = threading.Lock()  # espeak-ng's state is global to the process: one Espeak at a time
_LOCK_TIMEOUT_S = 60


class Espeak:
    """A new espeak-ng with one voice, as a context manager. Other threads wait until it is closed.

    `seed` is for its noise. `parameters` have the names in _PARAMETERS and the scales above; the default is espeak's.
    Raises UnknownVoiceError, and EspeakError, for example if the library is already loaded in this process.
    """

    def __init__(self, voice: str, seed: int = 1, **parameters: int) -> None:
        language, plus, variant = voice.partition("+")
        variants = Path(espeakng_loader.get_data_path(), "voices", "!v")
        if language not in LANGUAGES or (plus and variant not in os.listdir(variants)):
            raise UnknownVoiceError(
                f"voice {voice!r}: expected one of {', '.join(LANGUAGES)}, alone or with a variant "
                "of espeak-ng such as +f3 or +m1"
            )
        self._voice, self._seed = voice, seed
        self._name = {"en-gb": "en"}.get(language, language) + plus + variant
        self._parameters = {"volume": VOLUME, **parameters}
        self._chunks: list[bytes] = []
        self._events: list[tuple[int, int, int, bytes]] = []  # type, text position, sample, phoneme
        self._callback = _Callback(self._receive)
        self._lib: ctypes.CDLL | None = None

    def __enter__(self) -> Self:
        if not _LOCK.acquire(timeout=_LOCK_TIMEOUT_S):
            raise EspeakError(f"another Espeak has been open for {_LOCK_TIMEOUT_S} s: close it first")
        try:
            self._load()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._lib is not None:
            self._lib.espeak_Terminate()  # joins its thread; without this, unloading would crash
            _ctypes.dlclose(self._lib._handle)
            self._lib = None
        _LOCK.release()

    def _load(self) -> None:
        path, data = espeakng_loader.get_library_path(), espeakng_loader.get_data_path()
        with contextlib.suppress(OSError):  # not loaded yet, as required
            _ctypes.dlclose(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)._handle)
            raise EspeakError(f"{path} is already loaded in this process: its state cannot be reset")
        self._lib = lib = ctypes.CDLL(path)
        rate = lib.espeak_Initialize(_SYNCHRONOUS, _BUFFER_MS, data.encode(), _PHONEME_EVENTS | _DONT_EXIT)
        if rate != NATIVE_RATE:
            raise EspeakError(f"espeak_Initialize with {data}: got {rate}, expected {NATIVE_RATE} Hz")
        lib.espeak_SetSynthCallback(self._callback)
        lib.espeak_ng_SetRandSeed(ctypes.c_long(self._seed))
        if status := lib.espeak_SetVoiceByName(self._name.encode()):
            raise UnknownVoiceError(f"voice {self._voice!r}: espeak-ng has no {self._name!r} (status {status})")
        for name, value in self._parameters.items():
            if status := lib.espeak_SetParameter(_PARAMETERS[name], value, 0):
                raise EspeakError(f"espeak_SetParameter({name}, {value}): status {status}")

    def _receive(self, wave: int | None, n: int, events: "ctypes._Pointer[_Event]") -> int:
        i = 0
        while kind := events[i].type:
            e = events[i]
            self._events.append((kind, e.text_position, e.sample, e.id if kind == _EVENT_PHONEME else b""))
            i += 1
        if wave and n > 0:
            self._chunks.append(ctypes.string_at(wave, 2 * n))
        return 0

    def say(self, text: str) -> tuple[np.ndarray, list[tuple[str, int, int]]]:
        """Speak words of a-z and apostrophes. A word may be followed by `,`, `.` or `?`.

        Returns samples (float32 [n], 22,050 Hz, in [-1, 1]) and, for every word, (word as written, start, end) in
        samples. Raises ValueError for an invalid text, EspeakError, WordTimingError.
        """
        tokens = text.split()
        odd = [token for token in tokens if not _TOKEN.fullmatch(token)]
        if odd or not tokens:
            raise ValueError(f"text {text!r}: expected words of a-z and ' followed by , . ?; got {odd}")
        spoken, positions, new_sentence = "", [], True
        for token in tokens:
            if spoken:
                spoken += " " if spoken[-1] in ",.?" else "\N{NO-BREAK SPACE}"
            positions.append(len(spoken) + 1)
            spoken += re.sub("[a-z]", lambda m: m[0].upper(), token, count=1) if new_sentence else token
            new_sentence = token[-1] in ".?"
        assert self._lib is not None, "use it in a `with` block"
        self._chunks.clear()
        self._events.clear()
        data = spoken.encode() + b"\0"
        if status := self._lib.espeak_Synth(data, len(data), 0, _POS_CHARACTER, 0, _CHARS_UTF8, None, None):
            raise EspeakError(f"espeak_Synth({text!r}): status {status}")
        audio = np.frombuffer(b"".join(self._chunks), np.int16).astype(np.float32) / 32768
        return audio, self._word_times(tokens, positions, len(audio))

    def _word_times(self, tokens: list[str], positions: list[int], n: int) -> list[tuple[str, int, int]]:
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        word = -1  # of the latest WORD event
        sounding = False  # whether the previous event was a sounding phoneme
        for kind, position, sample, phoneme in [*self._events, (0, 0, n, b"")]:
            if sounding:
                ends[word] = sample
            if kind == _EVENT_WORD:
                word = bisect_right(positions, position) - 1
                starts.setdefault(word, sample)
            sounding = kind == _EVENT_PHONEME and not phoneme.startswith(b"_")
        times = [(token, starts.get(i, -1), ends.get(i, -1)) for i, token in enumerate(tokens)]
        edges = [0, *(t for _, start, end in times for t in (start, end)), n]
        if edges != sorted(edges) or any(start == end for _, start, end in times):
            raise WordTimingError(f"voice {self._voice!r}: no exact time for every word (-1: none): {times}")
        return times


def speak(text_sentences: Sequence[str], rng: np.random.Generator, voice: str) -> Utterance:
    """Speak sentences with random speed, pitch, word gap and speaker factor, and random pauses.

    Raises ValueError (no sentence, or other characters), UnknownVoiceError, EspeakError, WordTimingError.
    """
    if not text_sentences:
        raise ValueError("text_sentences is empty: expected at least one sentence")
    ratio = int(rng.choice(RATIOS))
    manner = {
        "seed": int(rng.integers(1, 2**31)),
        "speed": int(rng.integers(*SPEED_WPM, endpoint=True)),
        "pitch": int(rng.integers(*PITCH, endpoint=True)),
        "pitch_range": int(rng.integers(*PITCH_RANGE, endpoint=True)),
        "word_gap": int(rng.integers(*WORD_GAP, endpoint=True)) if rng.random() < WORD_GAP_SHARE else 0,
    }
    per_second = 441 * SAMPLE_RATE / ratio  # native samples per second of output
    silences = per_second * np.array([rng.uniform(*EDGE_S), *rng.uniform(*PAUSE_S, len(text_sentences) - 1)])
    with Espeak(voice, **manner) as espeak:
        pieces = [espeak.say(text) for text in text_sentences]
    placed, words, end = [], [], 0
    for silence, (samples, times) in zip(silences, pieces, strict=True):
        offset = end + int(silence)
        placed.append((offset, samples))
        words += [(w, (offset + a) / per_second, (offset + b) / per_second) for w, a, b in times]
        end = offset + times[-1][2]
    audio = np.zeros(end + int(per_second * rng.uniform(*EDGE_S)), np.float32)
    for offset, samples in placed:  # added, because the echo of a voice may be longer than a short pause
        room = audio[offset : offset + len(samples)]
        room += samples[: len(room)]
    audio = _resample(audio, ratio)
    return Utterance(audio / max(1.0, float(np.abs(audio).max())), words)


def _resample(x: np.ndarray, ratio: int) -> np.ndarray:
    """Resample float32 [n] to float32 [ceil(n * ratio / 441)], with this exact ratio and without delay.

    Cuts the spectrum at the new Nyquist frequency. A raised-cosine edge from 94 % of it on prevents ringing. The
    padding prevents the FFT from wrapping around into the sound.
    """
    blocks = fast_size(-(-(len(x) + 1024) // 441))
    spectrum = np.fft.rfft(x, 441 * blocks)[: ratio * blocks // 2 + 1]
    edge = len(spectrum) * 6 // 100
    spectrum[-edge:] *= 0.5 + 0.5 * np.cos(np.linspace(0, np.pi, edge))
    y = np.fft.irfft(spectrum, ratio * blocks) * (ratio / 441)
    return y[: -(-len(x) * ratio // 441)].astype(np.float32)
