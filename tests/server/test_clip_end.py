"""No clip's text goes past the clip, on vLLM's own model: what the server says it generated, and what it logs."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import requests
import soundfile
from places import DATA, ROOT
from uploads import upload

from bench import dataset, results
from pico import model, sounds

REFERENCE = ROOT / "bench/results/pico-reference"
# pico says no EOS within a clip, so each of its texts shows this.
LATE = ("154", "057", "499")
LOG_LINES = 20  # a request writes 1 to 4; decoding on to the context would write one for each token
CONTEXT = 512


class Answer(NamedTuple):
    response: requests.Response
    tokens: int  # generated
    reason: str  # why it ended
    log: str

    @property
    def text(self) -> str:
        assert self.response.status_code == 200, self.response.text
        return self.response.json()["text"].strip()


def limit(audio: np.ndarray) -> int:
    """Tokens from the end of the prompt to the one that is sampled at the clip's last position."""
    return model.n_tokens(len(audio)) - model.PROMPT_TOKENS + 1


@pytest.fixture
def ask(pico_url: str, pico_log: Path) -> Callable[..., Answer]:
    def counters() -> dict[str, int]:
        text = requests.get(f"{pico_url}/metrics", timeout=10).text
        found = {"tokens": re.findall(r"^vllm:generation_tokens_total\{.*?\} (\S+)$", text, re.MULTILINE)[0]}
        found |= re.findall(r'^vllm:request_success_total\{.*finished_reason="(\w+)".*\} (\S+)$', text, re.MULTILINE)
        return {name: int(float(value)) for name, value in found.items()}

    def ask(audio: np.ndarray, **form: object) -> Answer:
        before, logged = counters(), len(pico_log.read_text())
        response = upload(pico_url, audio, **form)
        deadline = time.monotonic() + (10 if response.status_code == 200 else 0)
        while not (ended := [name for name, count in counters().items() if count > before[name] and name != "tokens"]):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        tokens = counters()["tokens"] - before["tokens"]
        return Answer(response, tokens, "".join(ended), pico_log.read_text()[logged:])

    return ask


def read(clip: str) -> np.ndarray:
    (found,) = [each for each in dataset.load(DATA)[0] if each.id == clip]
    audio, rate = soundfile.read(found.path, dtype="float32")
    assert rate == model.SAMPLE_RATE
    return audio


def of_kind(kind: str) -> np.ndarray:
    if kind == "truncated speech":
        return read("057")[: 5 * model.SAMPLE_RATE + 777]
    if kind == "one sample":
        return np.zeros(1, np.float32)
    if kind == "0.05 s":
        return np.full(model.SAMPLE_RATE // 20, 0.1, np.float32)
    if kind == "440 Hz":
        return (0.3 * np.sin(2 * np.pi * 440 / model.SAMPLE_RATE * np.arange(4 * model.SAMPLE_RATE))).astype(np.float32)
    return sounds.not_speech(np.random.default_rng(3), 4.0, kind)


slow = pytest.mark.slow
KINDS = [*(pytest.param(kind, marks=slow) for kind in (*sounds.NOT_SPEECH, "0.05 s")), "440 Hz", "one sample"]


@pytest.mark.parametrize("kind", [*KINDS, "truncated speech"])
def test_no_clip_decodes_past_its_end(ask: Callable[..., Answer], kind: str) -> None:
    audio = of_kind(kind)
    answer = ask(audio)
    assert answer.response.status_code == 200
    assert 1 <= answer.tokens <= limit(audio)
    assert (answer.reason == "length") <= (answer.tokens == limit(audio))
    assert "empty multimodal embeddings" not in answer.log
    assert len(answer.log.splitlines()) <= LOG_LINES


@pytest.mark.parametrize("clip", [LATE[0], *(pytest.param(clip, marks=slow) for clip in LATE[1:])])
def test_the_text_is_whole_where_the_model_says_no_eos(ask: Callable[..., Answer], clip: str) -> None:
    (expected,) = [row.text for row in results.read_rows(REFERENCE / results.ROWS) if row.id == clip]
    audio = read(clip)
    answer = ask(audio)
    assert answer.text == expected
    assert (answer.tokens, answer.reason) == (limit(audio), "length")
    assert "empty multimodal embeddings" not in answer.log


@slow
def test_sampling_options_work_and_end_too(ask: Callable[..., Answer]) -> None:
    audio = read("057")
    greedy, warm, again, hot = (ask(audio, temperature=temperature, seed=8) for temperature in (0, 0.7, 0.7, 2.0))
    assert all(answer.tokens <= limit(audio) for answer in (greedy, warm, again, hot))
    assert warm.text == again.text != ""
    assert hot.text != greedy.text
    fewer = ask(audio, max_completion_tokens=50)
    assert (fewer.tokens, fewer.reason) == (50, "length")
    assert greedy.text.startswith(fewer.text)


@slow
def test_clips_around_the_longest(ask: Callable[..., Answer]) -> None:
    """pico says no EOS. With every position of the context in use, vLLM ends one token earlier."""
    longest = (CONTEXT - model.n_tokens(0)) * model.SAMPLES_PER_TOKEN
    noise = np.random.default_rng(0).normal(0, 0.1, longest + 1).astype(np.float32)
    for samples, tokens in ((longest - model.SAMPLES_PER_TOKEN, 473), (longest, 473)):
        answer = ask(noise[:samples])
        assert (answer.response.status_code, answer.tokens) == (200, tokens)
        assert model.n_tokens(samples) == CONTEXT - (samples < longest)
        assert "empty multimodal embeddings" not in answer.log
    assert limit(noise[: longest - model.SAMPLES_PER_TOKEN]) == 473
    refused = ask(noise)
    assert (refused.response.status_code, refused.tokens) == (400, 0)
    assert refused.response.json()["error"]["message"] == (
        "the clip lasts 37.12 s and this server takes at most 37.04 s: its max_model_len is 512 tokens of 80 ms, 49 of "
        "them padding. Send a shorter clip, or set max_model_len to 513 or more in the server's config"
    )


@slow
def test_beam_search_ends_within_the_clip_or_is_refused(ask: Callable[..., Answer], pico_url: str) -> None:
    """vLLM's goes on to max_completion_tokens. Without the refusal the engine ends, and with it the server."""
    audio = np.zeros(800, np.float32)
    assert ask(audio, use_beam_search="true", n=2, max_completion_tokens=limit(audio)).response.status_code == 200
    refused = ask(audio, use_beam_search="true", n=2).response
    assert refused.status_code == 400
    assert "In a beam search" in refused.json()["error"]["message"]
    assert ask(audio).response.status_code == 200
