"""The committed comparison of the encode-once model with vLLM's own: few texts differ, each for a near-tie."""

import hashlib
import json
from typing import Any

import pytest
import torch
from conftest import DATA, ROOT

from bench import dataset, results
from bench.measure import scoring
from pico import model
from tools import compare_models

COMPARISON = ROOT / "bench/results/encode-once/cpu-vllm-0.32.0.json"


def texts_of(name: str) -> dict[str, str]:
    """By clip, of results of all 500: those of vLLM's own model, pico-cpu, or of the reference, pico-reference."""
    return {row.id: row.text or "" for row in results.read_rows(ROOT / "bench/results" / name / results.ROWS)}


@pytest.fixture(scope="module")
def comparison() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(COMPARISON.read_text())
    return read


def test_all_clips_were_asked_for(comparison: dict[str, Any]) -> None:
    ids = [clip.id for clip in dataset.select(dataset.load(DATA)[0], None, seed=0)]
    assert [*comparison["texts"]] == ids
    assert (comparison["clips"], comparison["failed"]) == (500, [])
    assert comparison["config"]["hf_overrides"] == {"architectures": ["VoxtralRealtimeEncodeOnce"]}


def test_it_names_every_clip_that_differs_and_there_are_few(comparison: dict[str, Any]) -> None:
    """From the texts themselves, of both models."""
    stock = texts_of("pico-cpu")
    parted = {id: (stock[id], text) for id, text in comparison["texts"].items() if text != stock[id]}
    assert {each["id"]: (each["stock"], each["encode_once"]) for each in comparison["different"]} == parted
    assert len(parted) <= 4
    assert comparison["identical"] == 500 - len(parted)


def test_each_that_differs_is_a_near_tie(comparison: dict[str, Any]) -> None:
    """From the logits: those of one path are within two units of bfloat16, and those of neither are far apart."""
    reference = texts_of("pico-reference")
    for each in comparison["different"]:
        for path, logits in each["logits"].items():
            for logit in logits.values():
                assert logit % (compare_models.unit_in_last_place(logit)) == 0  # it was computed in bfloat16
            gap = abs(logits["stock"] - logits["encode_once"]) / each["unit"]
            assert gap == each["gap_in_units"][path] <= 4
            other = "encode_once" if path == "stock" else "stock"
            assert logits[path] >= logits[other]  # each path took its own greatest
        assert each["unit"] == max(
            compare_models.unit_in_last_place(logit) for path in each["logits"].values() for logit in path.values()
        )
        assert min(each["gap_in_units"].values()) <= 2
        assert each["float32"]["same_tokens_as_the_reference"] == {"stock": True, "encode_once": True}
        assert each["float32"]["text"].strip() == reference[each["id"]].strip()
        assert each["near_tie"] and compare_models.near_tie(each)


@pytest.mark.parametrize(
    ("logit", "unit"), [(1.0, 2**-7), (1.99, 2**-7), (-2.0, 2**-6), (14.5, 2**-4), (16.0, 2**-3), (0.75, 2**-8)]
)
def test_the_unit_in_the_last_place(logit: float, unit: float) -> None:
    assert compare_models.unit_in_last_place(logit) == unit
    here = torch.tensor(abs(logit), dtype=torch.bfloat16)
    assert (torch.nextafter(here, torch.tensor(torch.inf, dtype=torch.bfloat16)) - here).item() == unit


def path(*steps: dict[int, float]) -> compare_models.Generated:
    return compare_models.Generated([max(step, key=lambda token: step[token]) for step in steps], [*steps])


def test_where_two_paths_part() -> None:
    tokenizer: Any = None
    word, pad = model.STREAMING_WORD, model.STREAMING_PAD
    here = compare_models.parting(
        path({pad: 9.0, word: 1.0}, {word: 17.0, pad: 16.875}, {pad: 3.0}),
        path({pad: 9.0, word: 2.0}, {pad: 16.875, word: 16.75}),
        tokenizer,
    )
    assert here is not None
    assert (here["token"], here["unit"]) == (1, 0.125)
    assert here["chosen"]["stock"] == {"id": word, "text": "[STREAMING_WORD]"}
    assert here["logits"]["encode_once"] == {"stock": 16.75, "encode_once": 16.875}
    assert here["gap_in_units"] == {"stock": 1.0, "encode_once": 1.0}


def test_two_paths_of_the_same_tokens_part_nowhere() -> None:
    tokenizer: Any = None
    assert compare_models.parting(path({3: 1.0}, {4: 2.0}), path({3: 1.5}, {4: 2.5}), tokenizer) is None


# ---- On a GPU


@pytest.fixture(scope="module")
def h200() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((COMPARISON.parent / "h200-texts.json").read_text())
    return read


def test_speculation_changed_no_text_there(h200: dict[str, Any]) -> None:
    assert h200["others"]["fast-spec, vLLM 0.32.0 *"] == {}
    given = json.dumps(dict(sorted(h200["texts"].items()))).encode()
    assert h200["texts_sha256"] == {"fast-spec-0.20.0, vLLM 0.20.0": hashlib.sha256(given).hexdigest()}
    counted = h200["speculation"]
    assert sum(counted["accepted_per_position"]) == counted["accepted_tokens"] > counted["drafts"]


@pytest.mark.parametrize(
    ("server", "wer"),
    [
        ("fast, vLLM 0.20.0 *", 0.0139),
        ("fast, vLLM 0.32.0, with the encoder as CUDA graphs", 0.0141),
        ("fast-spec, vLLM 0.32.0 *", 0.0141),
        ("fast-fp8, vLLM 0.32.0 *", 0.0145),
    ],
)
def test_word_error_rates_there(h200: dict[str, Any], server: str, wer: float) -> None:
    """As docs/pages/performance.md gives them."""
    texts = h200["texts"] | h200["others"][server]
    clips = {clip.id: clip.text for clip in dataset.load(DATA)[0]}
    assert texts.keys() == clips.keys()
    counts = [scoring.word_errors(clips[id], text) for id, text in texts.items()]
    assert sum(count.total for count in counts) / sum(count.words for count in counts) == pytest.approx(wer, abs=5e-5)
