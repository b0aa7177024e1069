"""How late the text of live audio is: the lag of its tokens, the delay of its words, and who fell behind.

A server of Voxtral Realtime makes one token for each 80 ms of audio, and vLLM's /v1/realtime sends one
transcription.delta for each token, most of them empty. Token k, from 0, is sampled at prompt position 32 + D + k, with
32 tokens of left padding and a delay of D tokens, and it needs the audio row of that position: row r needs
(r + 1 - 32) * 1280 + 40 samples of the client's audio, or the audio's end where that is shorter. (40 samples are half a
window of the spectrogram.) The lag of the token is when the client has its delta, less when the client sent the last
sample that its row needs, or said that the audio had ended.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .sound import RATE_HZ, TOKEN

TOKEN_MS = 1000 * TOKEN // RATE_HZ
DELAY_MS = 480  # of the published checkpoint; vLLM's protocol has no field for another
DELAY = DELAY_MS // TOKEN_MS  # tokens
RIGHT_PADDING = 11  # tokens behind a clip, besides the delay
LOOK_AHEAD = 40  # samples past its end that a row needs
FELL_BEHIND_MS = 500
LAST_S = 5.0  # of a session's audio, in which a lag above FELL_BEHIND_MS says that it has fallen behind

Times = Sequence[float]  # of time.perf_counter, in s
Lag = tuple[float, float]  # seconds of audio that a token or word needs, ms of lag


def delay_tokens(delay_ms: int) -> int:
    """Raises ValueError for a delay that is not a positive multiple of 80 ms."""
    if delay_ms < TOKEN_MS or delay_ms % TOKEN_MS:
        raise ValueError(f"expected a multiple of {TOKEN_MS} ms")
    return delay_ms // TOKEN_MS


def complete_tokens(samples: int, delay: int) -> int:
    """How many tokens' rows are complete after so many samples of audio that goes on."""
    return max(0, (samples - LOOK_AHEAD) // TOKEN - delay)


def is_one_delta_a_token(deltas: int, counted: int | None, samples: int, delay: int) -> bool:
    """Whether a session's deltas can be its tokens, one by one.

    `counted` are the tokens by the server's `usage`; null where it tells none, and then the audio's length says it, to
    within the two tokens by which servers pad differently. A last delta may be there for the end alone.
    """
    if counted is not None:
        return deltas - counted in (0, 1)
    most = -(-samples // TOKEN) + RIGHT_PADDING
    return most - 2 <= deltas <= most + 1


def token_lags(arrivals: Times, sent: Times, ended: float, samples: int, skipped: int, delay: int) -> list[Lag]:
    """The lag of each token whose row needs more than `skipped` samples, as a row of requests.jsonl has it.

    `arrivals` are those of the deltas, one a token; `sent` when each 80 ms of the audio's `samples` were sent, and
    `ended` when the client said that there are no more.
    """
    if not len(arrivals):
        return []
    need = (np.arange(len(arrivals)) + delay + 1) * TOKEN + LOOK_AHEAD
    piece = (np.minimum(need, samples) - 1) // TOKEN
    due = np.where(need <= samples, np.asarray(sent)[piece], ended)
    lags: npt.NDArray[np.float64] = 1000 * (np.asarray(arrivals) - due)
    kept = need > skipped
    return [
        (round(float(age), 3), round(float(lag), 2)) for age, lag in zip(need[kept] / RATE_HZ, lags[kept], strict=True)
    ]


def fell_behind(lags: Sequence[Lag], audio_s: float, complete: bool) -> bool:
    """Whether any lag in the audio's last 5 s is over 500 ms, or, as not `complete`, a token of the audio is missing.

    `audio_s` is the end of the audio in the ages' own count; what needs more than the audio is not looked at.
    """
    return not complete or any(
        lag > FELL_BEHIND_MS for age, lag in lags if audio_s - LAST_S < age <= audio_s + 1 / RATE_HZ
    )


def word_lags(delays: Sequence[tuple[float, float]], delay_ms: int = DELAY_MS) -> list[Lag]:
    """For a server whose deltas are not its tokens: (end of the word in s, its delay beyond the model's own in ms)."""
    return [(round(end, 3), round(ms - delay_ms, 2)) for end, ms in delays]


# ---- Words


def word_delays(words: Sequence[Sequence[Any]], pieces: Sequence[tuple[float, str]]) -> list[tuple[float, float]]:
    """(end of a word in s, ms from there until the piece came that completed it) of each word that was heard right.

    `words` are [word, start_s, end_s] of the reference, `pieces` (arrival in s, text); both count from the speech's
    beginning. The two texts are aligned by words without case and punctuation; others have no delay.
    """
    import jiwer  # for words only: others who know of lags do without

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
                arrival, end = arrivals[int(np.searchsorted(ends, heard[got][0]))], reference[said][1]
                delays.append((end, round((arrival - end) * 1000, 3)))
    return delays


def _plain_words(text: str) -> Iterator[tuple[int, str]]:
    """The words without case and punctuation, each with the place behind its last letter or digit."""
    for found in re.finditer(r"\S+", text):
        letters = list(re.finditer(r"\w", found[0]))
        if letters:
            plain = "".join(letter[0] for letter in letters).casefold()
            yield found.start() + letters[-1].end(), plain
