"""OpenAI's package for Python against a real server: formats, words, streams, models, logprobs."""

import asyncio
import math

import numpy as np
import openai
import pytest
import soundfile
from openai.types.audio import TranscriptionTextDeltaEvent, TranscriptionTextDoneEvent
from places import DATA
from servers import short
from uploads import KEY, upload

from bench import dataset
from voxtral_serve.audio.decode import Clip, wav


@pytest.fixture(scope="module")
def client(fast_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fast_url}/v1", api_key=KEY, timeout=120)


@pytest.fixture(scope="module")
def clip() -> dataset.Clip:
    return short(dataset.load(DATA).clips, 1, longest_s=4)[0]


@pytest.fixture(scope="module")
def text(client: openai.OpenAI, clip: dataset.Clip) -> str:
    return client.audio.transcriptions.create(model="voxtral", file=clip.path).text


def test_json_has_no_blank_before_its_text(text: str) -> None:
    assert text and text == text.strip()


def test_the_async_client(fast_url: str, clip: dataset.Clip, text: str) -> None:
    async def heard() -> str:
        async with openai.AsyncOpenAI(base_url=f"{fast_url}/v1", api_key=KEY) as client:
            return (await client.audio.transcriptions.create(model="voxtral", file=clip.path)).text

    assert asyncio.run(heard()) == text


@pytest.mark.parametrize("name", ["whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe"])
def test_openais_names(client: openai.OpenAI, clip: dataset.Clip, text: str, name: str) -> None:
    assert client.audio.transcriptions.create(model=name, file=clip.path).text == text


def test_formats(client: openai.OpenAI, clip: dataset.Clip, text: str) -> None:
    create = client.audio.transcriptions.create
    assert create(model="voxtral", file=clip.path, response_format="text") == text + "\n"
    assert create(model="voxtral", file=clip.path, response_format="srt").startswith("1\n00:00:0")
    assert create(model="voxtral", file=clip.path, response_format="vtt").startswith("WEBVTT\n")
    verbose = create(
        model="voxtral",
        file=clip.path,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert verbose.text == text
    assert verbose.words is not None and verbose.segments
    assert " ".join(word.word for word in verbose.words) == text
    assert all(0 <= word.start < word.end for word in verbose.words)


def test_a_stream(client: openai.OpenAI, clip: dataset.Clip, text: str) -> None:
    *deltas, done = client.audio.transcriptions.create(model="voxtral", file=clip.path, stream=True)
    assert isinstance(done, TranscriptionTextDoneEvent) and done.text == text
    assert done.usage is not None and done.usage.total_tokens > 0
    assert "".join(each.delta for each in deltas if isinstance(each, TranscriptionTextDeltaEvent)) == text


def test_models(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert {model.id for model in listed} >= {"voxtral", "whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe"}
    for model in listed:
        found = client.models.retrieve(model.id)
        assert (found.id, found.object) == (model.id, "model")
    for name in ("gpt-9", "mistralai/Voxtral-Mini-3B-2507"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(name)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert name in caught.value.message
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.retrieve("voxtral")


def test_logprobs(client: openai.OpenAI, clip: dataset.Clip, text: str) -> None:
    found = client.audio.transcriptions.create(model="voxtral", file=clip.path, include=["logprobs"])
    assert found.text == text and found.logprobs
    assert "".join(each.token or "" for each in found.logprobs) == text
    assert b"".join(bytes(map(int, each.bytes or ())) for each in found.logprobs).decode() == text
    assert all(each.logprob is not None and -20 < each.logprob <= 0 for each in found.logprobs)
    probabilities = [math.exp(each.logprob or 0) for each in found.logprobs]
    print(f"{len(probabilities)} tokens, least probability {min(probabilities):.3f}, {probabilities[:3]}")
    assert sum(probabilities) > 0.5 * len(probabilities)  # of the tokens that were chosen, not of some other
    usual = client.audio.transcriptions.create(model="voxtral", file=clip.path)
    assert usual.logprobs is None


def test_languages_of_gpt_transcribe(client: openai.OpenAI, clip: dataset.Clip, text: str) -> None:
    found = client.audio.transcriptions.create(model="gpt-transcribe", file=clip.path, language="fr")
    assert (found.text, [each.code for each in found.languages or ()]) == (text, ["en"])
    *_, done = client.audio.transcriptions.create(model="gpt-transcribe", file=clip.path, stream=True)
    assert isinstance(done, TranscriptionTextDoneEvent) and [each.code for each in done.languages or ()] == ["en"]
    assert client.audio.transcriptions.create(model="voxtral", file=clip.path).languages is None


def test_logprobs_of_a_stream(client: openai.OpenAI, clip: dataset.Clip, text: str) -> None:
    *deltas, done = client.audio.transcriptions.create(
        model="voxtral", file=clip.path, stream=True, include=["logprobs"]
    )
    assert isinstance(done, TranscriptionTextDoneEvent) and done.text == text and done.logprobs
    assert "".join(each.token or "" for each in done.logprobs) == text
    parts = [each.logprobs or [] for each in deltas if isinstance(each, TranscriptionTextDeltaEvent)]
    assert [each.token for part in parts for each in part] == [each.token for each in done.logprobs]
    for each, part in zip(deltas, parts, strict=True):
        assert isinstance(each, TranscriptionTextDeltaEvent)
        assert "".join(token.token or "" for token in part) == each.delta


def test_logprobs_of_several_pieces_and_of_none(fast_url: str, client: openai.OpenAI, clip: dataset.Clip) -> None:
    samples, rate = soundfile.read(clip.path, dtype="float32")
    pause = np.zeros(rate, np.float32)
    long = np.concatenate([part for _ in range(20) for part in (samples, pause)])[: 40 * rate]  # one piece is 37 s
    assert len(long) == 40 * rate
    found = client.audio.transcriptions.create(model="voxtral", file=wav(Clip(long, rate)), include=["logprobs"])
    assert found.logprobs and "".join(each.token or "" for each in found.logprobs) == found.text
    silent = wav(Clip(pause, rate))
    assert upload(fast_url, silent, **{"include[]": "logprobs"}).json()["logprobs"] == []


def test_logprobs_that_cannot_be_had_are_named(fast_url: str, clip: dataset.Clip) -> None:
    answer = upload(fast_url, clip.path, response_format="verbose_json", **{"include[]": "logprobs"})
    assert (answer.status_code, answer.headers["x-voxtral-ignored"]) == (200, "logprobs")
    assert "logprobs" not in answer.json()
