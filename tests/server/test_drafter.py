"""Speculation: with any drafter the tokens are the reference's, as without one, and drafts are accepted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import heads
import numpy as np
import offline
import pytest
import torch
from places import PICO
from vllm.engine.arg_utils import EngineArgs

from pico import keywords, model, sounds
from voxtral_serve.engine.draft_network import FILE
from voxtral_serve.engine.keywords import KEYWORDS
from voxtral_serve.engine.session import UPLOAD_DELAY
from voxtral_serve.transcript.logprobs import chosen_logprobs

PADS, DRAFTER = "voxtral_serve.drafter.PadDrafter", "voxtral_serve.drafter.Drafter"
LATE = ("154", "217")  # pico says no EOS within a clip, so drafts reach beyond its end
NAMES = [*offline.varied(6, longest_s=8.0), *LATE]
AT_ONCE, CONTEXT, CHUNK = 4, 192, 48
SAMPLES, HOT = 400, 2.0  # requests whose tokens are counted, and their temperature
DELAYED, DELAYS = {UPLOAD_DELAY: 480}, [30, 6, 1]  # of the options; of uploads, in token positions
SCHEDULE = [[1, 2, 15], [3, 4, 3]]
PREFERRED = [*keywords.names()[::4], "the morning", "in the garden", "a lot of", "my brother", "they were"]


class Case(NamedTuple):
    """What drafts: options of vllm.LLM; of its drafts, `least` to `most` are right in a step of one clip."""

    options: dict[str, Any]
    least: float
    most: float


def speculation(name: str, drafts: int, **other: Any) -> dict[str, Any]:
    return {"speculative_config": {"model": name, "num_speculative_tokens": drafts, **other}}


@pytest.fixture(scope="module", params=["pads", pytest.param("trained", marks=pytest.mark.gpu), "random"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Pads; a drafter that knows these clips, whose prompts are cut into chunks; and one that knows nothing."""
    path = tmp_path_factory.mktemp("draft") / "head.safetensors"
    if request.param == "pads":  # pico says a pad more often than not
        return Case(speculation(PADS, 5, method="custom_class") | {"additional_config": DELAYED}, 1, 5)
    if request.param == "trained":
        options = speculation(DRAFTER, 15) | {"max_num_batched_tokens": CHUNK}
        return Case(options | {"additional_config": DELAYED | {"draft_head": str(heads.trained(path, NAMES))}}, 8, 15)
    options = speculation(DRAFTER, 15, num_speculative_tokens_per_batch_size=SCHEDULE)
    return Case(
        options | {"additional_config": DELAYED | {"draft_head": str(heads.random(path))}}, 0, 5
    )  # or pads in their place


@pytest.fixture(scope="module")
def llm(case: Case) -> Iterator[Any]:
    """With a KV cache that is too small for four of the longer clips: drafts of preempted requests are lost."""
    with offline.crowded(CONTEXT, AT_ONCE, **case.options) as running:
        yield running


@pytest.mark.slow
def test_the_tokens_are_those_without_it(llm: Any, case: Case) -> None:
    before = offline.counters(llm)
    # Their drafts reach beyond their clips.
    assert [offline.generate(llm, [offline.read(name)])[0] for name in NAMES] == offline.reference_tokens(NAMES)
    after = offline.counters(llm)
    accepted, drafts = (
        after[name] - before[name] for name in ("spec_decode_num_accepted_tokens", "spec_decode_num_drafts")
    )
    assert after["num_preemptions"] == before["num_preemptions"]
    assert case.least <= accepted / drafts <= case.most


@pytest.mark.slow
def test_logprobs_are_the_references(llm: Any) -> None:
    """One for each token, of drafts that were accepted, of those in place of a rejected one, and of bonus tokens."""
    sampling = offline.sampling(logprobs=0, flat_logprobs=True)
    answers = llm.generate([offline.prompt(offline.read(name)) for name in NAMES], sampling, use_tqdm=False)
    least = 0.0
    for name, answer in zip(NAMES, answers, strict=True):
        (said,) = answer.outputs
        expected = logprobs(offline.read(name), [*said.token_ids])
        assert chosen_logprobs(said) == pytest.approx(expected, abs=2e-3)
        least = min(least, *expected)
    assert least < -0.5


@pytest.mark.slow
def test_so_are_those_of_several_at_once(llm: Any, case: Case) -> None:
    before = offline.counters(llm)
    names = [*NAMES, *NAMES[::-1]]
    assert offline.generate(llm, [offline.read(name) for name in names]) == offline.reference_tokens(names)
    after = offline.counters(llm)
    assert after["num_preemptions"] > before["num_preemptions"]
    accepted = after["spec_decode_num_accepted_tokens"] - before["spec_decode_num_accepted_tokens"]
    assert accepted > 0 or not case.least


@pytest.mark.slow
def test_uploads_of_several_delays_in_one_batch_have_the_tokens_of_each_alone(llm: Any) -> None:
    """Also after preemption. The drafter guesses for one of the delays; the others have pads."""
    before = offline.counters(llm)
    audios, delays = [offline.read(name) for name in NAMES for _ in DELAYS], DELAYS * len(NAMES)
    assert offline.generate_at(llm, audios, delays) == offline.referred(audios, delays)
    assert offline.counters(llm)["num_preemptions"] > before["num_preemptions"]
    audios = [offline.read(name) for name in NAMES]
    assert offline.generate(llm, audios) == offline.reference_tokens(NAMES)  # slots that had other delays


@pytest.mark.slow
def test_custom_words_beside_requests_without_them(llm: Any, case: Case) -> None:
    """In the same steps, also after preemption, whatever is drafted: the tokens are those that the rule gives one at a
    time, and requests without custom words have theirs."""
    before = offline.counters(llm)
    names = [*NAMES, *NAMES]
    audios = [offline.read(name) for name in names]
    tables = [None if number % 3 else offline.table(*PREFERRED) for number in range(len(names))]
    expected = offline.referred_preferring(audios, tables)
    plain = offline.reference_tokens(names)
    changed = [each != other for each, other in zip(expected, plain, strict=True)]
    assert sum(changed) >= 3
    assert not any(each for each, table in zip(changed, tables, strict=True) if table is None)
    assert offline.generate_preferring(llm, audios, tables) == expected
    after = offline.counters(llm)
    assert after["num_preemptions"] > before["num_preemptions"]
    accepted = after["spec_decode_num_accepted_tokens"] - before["spec_decode_num_accepted_tokens"]
    assert accepted > 0 or not case.least
    assert offline.generate(llm, [offline.read(name) for name in NAMES]) == offline.reference_tokens(NAMES)
    noise = sounds.not_speech(np.random.default_rng(0), 4.0, "pink")
    (silent,) = offline.generate_preferring(llm, [noise], tables[:1])
    assert {*silent} == {model.STREAMING_PAD}


@pytest.mark.slow
def test_custom_words_leave_the_logprobs_those_of_the_model(llm: Any) -> None:
    clip, table = offline.read(NAMES[0]), offline.table(*PREFERRED)
    sampling = offline.sampling(logprobs=0, flat_logprobs=True, extra_args={KEYWORDS: table})
    (answer,) = llm.generate([offline.prompt(clip)], sampling, use_tqdm=False)
    (said,) = answer.outputs
    assert chosen_logprobs(said) == pytest.approx(logprobs(clip, [*said.token_ids]), abs=2e-3)


@torch.no_grad()
def logprobs(clip: np.ndarray, tokens: list[int]) -> list[float]:
    """The reference's, of these tokens after the prompt."""
    asked = torch.tensor([offline.prompt(clip)["prompt_token_ids"] + tokens[:-1]])
    logits = offline.reference().decode(offline.reference_rows(clip)[None, : asked.shape[1]], asked)[0, -len(tokens) :]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@torch.no_grad()
def usual(clip: np.ndarray, tokens: list[int]) -> float:
    """The reference's probability at the temperature HOT that the last of these tokens follows the others."""
    asked = torch.tensor([offline.prompt(clip)["prompt_token_ids"] + tokens[:-1]])
    logits = offline.reference().decode(offline.reference_rows(clip)[None, : asked.shape[1]], asked)[0, -1]
    return float((logits / HOT).softmax(0)[tokens[-1]])


@pytest.mark.slow
def test_at_a_temperature_tokens_are_as_frequent_as_without_it(llm: Any, case: Case) -> None:
    """vLLM accepts a draft with the probability that the model gives it, and otherwise makes one of the other tokens.
    That takes random numbers of its own: with a seed, tokens are not those without drafts, but as likely."""
    clip, (tokens,) = offline.read(LATE[0]), offline.reference_tokens(LATE[:1])
    # On a CPU, vLLM's engine ends with a prompt in chunks that has a seed.
    seeded = "max_num_batched_tokens" not in case.options
    sampling = [
        offline.sampling(temperature=HOT, seed=seed if seeded else None, max_tokens=6) for seed in range(SAMPLES)
    ]
    answers = llm.generate([offline.prompt(clip)] * SAMPLES, sampling, use_tqdm=False)
    said = [[*answer.outputs[0].token_ids] for answer in answers]
    for number in range(5):  # the first is made with the prompt, without a draft
        those = [each[number] == tokens[number] for each in said if each[:number] == tokens[:number]]
        chance = usual(clip, tokens[: number + 1])
        deviation = (chance * (1 - chance) / len(those)) ** 0.5
        assert abs(sum(those) / len(those) - chance) < 4 * deviation, (number, chance, len(those), sum(those))


@pytest.mark.slow
def test_at_temperature_0_beside_others_the_tokens_are_the_references(llm: Any) -> None:
    """In the same steps."""
    sampling = [offline.sampling(temperature=HOT * (number % 2)) for number in range(2 * len(NAMES))]
    prompts = [offline.prompt(offline.read(name)) for name in NAMES for _ in range(2)]
    answers = llm.generate(prompts, sampling, use_tqdm=False)[::2]
    assert [offline.without_eos(answer.outputs[0].token_ids) for answer in answers] == offline.reference_tokens(NAMES)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not (PICO / FILE).is_file(), reason="pico has no drafter")
def test_all_clips_with_picos_own_drafter() -> None:
    """Sixteen at once, with prompts in chunks and a KV cache for some of them."""
    names = sorted(offline.clips())
    said = []
    for drafts in ({}, speculation(DRAFTER, 15, num_speculative_tokens_per_batch_size=[[1, 4, 15], [5, 16, 3]])):
        with offline.crowded(512, 16, max_num_batched_tokens=256, **drafts) as llm:
            said.append(offline.generate(llm, [offline.read(name) for name in names]))
            counters = offline.counters(llm)
            assert counters["num_preemptions"] > 0
    assert [name for name, *both in zip(names, *said, strict=True) if both[0] != both[1]] == []
    assert counters["spec_decode_num_accepted_tokens"] > 2 * counters["spec_decode_num_drafts"]


# What is refused, before anything starts


REFUSED = {"model": PADS, "num_speculative_tokens": 5, "method": "custom_class"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hf_overrides": {}, "speculative_config": REFUSED}, "speculative_config with vLLM's own model of Voxtral"),
        (
            {"hf_overrides": {}, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config with vLLM's own model of Voxtral Realtime: expected none",
        ),
        (
            {"speculative_config": REFUSED | {"method": "ngram_gpu"}},
            f"has method 'ngram_gpu' and model '{PADS}': expected",
        ),
        ({"speculative_config": REFUSED | {"method": "ngram"}}, f"has method 'ngram' and model '{PADS}': expected"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2: expected 1 for VoxtralRealtimeEncodeOnce"),
        (
            speculation(DRAFTER, 15) | {"additional_config": {"draft_head": "no/such.file"}},
            f"draft_head is 'no/such.file', and there is no file {PICO}/no/such.file: expected one that",
        ),
        (
            {"additional_config": {"draft_head": "a.file"}},
            "additional_config: draft_head is 'a.file', and nothing would use it: expected speculative_config with",
        ),
    ],
    ids=["stock, pads", "stock, n-grams", "ngram_gpu without Triton", "ngram", "pipeline", "no file", "no use"],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"speculative_config|pipeline|draft_head") as refused:
        EngineArgs(**offline.OPTIONS | options).create_engine_config()
    assert words in str(refused.value)


def with_head(path: Path) -> dict[str, Any]:
    return offline.OPTIONS | speculation(DRAFTER, 15) | {"additional_config": {"draft_head": str(path)}}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"shape": heads.SHAPE | {"dim": 3072}}, "its dimension is 3072, expected 256. Train a drafter"),
        ({"vocabulary": 131072}, "its vocabulary is 131072, expected 5200. Train"),
        ({"delay": 12}, "its delay in positions of 80 ms is 12, expected 6. Train"),
        ({"tokenizer": "0" * 64}, f"its SHA-256 of tekken.json is '{'0' * 64}', expected '"),
    ],
    ids=["dimension", "vocabulary", "delay", "tokenizer"],
)
def test_a_drafter_of_another_checkpoint_is_refused_by_what_it_says(
    other: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = heads.random(tmp_path / "head.safetensors", **other)
    with pytest.raises(ValueError, match="does not fit this checkpoint") as refused:
        EngineArgs(**with_head(path)).create_engine_config()
    assert f"{path} does not fit this checkpoint: {words}" in str(refused.value)


def test_a_file_that_is_no_drafter_or_half_of_one_is_refused(tmp_path: Path) -> None:
    path = heads.random(tmp_path / "head.safetensors")
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:100], b"", (PICO / "consolidated.safetensors").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot be read as a drafter|has format None: expected") as refused:
            EngineArgs(**with_head(path)).create_engine_config()
        assert str(path) in str(refused.value)


@pytest.mark.slow
def test_a_drafter_of_other_weights_ends_the_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = heads.random(tmp_path / "head.safetensors", chirp=torch.randn(74, 256))
    with pytest.raises(RuntimeError, match="Engine core initialization failed"), offline.running(**with_head(path)):
        pass
    said = capfd.readouterr()
    assert "the drafter was trained with other weights: row" in said.out + said.err
