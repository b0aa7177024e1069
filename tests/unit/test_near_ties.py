"""tools.near_ties finds the choice behind a text that the reference model does not give."""

import pytest

from bench import dataset
from pico import evaluate, huggingface, model
from pico.tokenizer import TextTokenizer
from tools import near_ties
from tools.compare_layouts import ROOT


@pytest.fixture(scope="module")
def clip() -> near_ties.Clip:
    shortest = min(dataset.load(ROOT / "bench/data").clips, key=lambda clip: clip.duration_s)
    tokenizer = TextTokenizer.from_file(huggingface.PICO / "tekken.json")
    return near_ties.Clip(model.load(huggingface.PICO), tokenizer, evaluate.read_audio(shortest.path))


def test_it_generates_as_the_reference(clip: near_ties.Clip) -> None:
    found = clip.generate({})
    assert len(found.text) > 10
    assert near_ties.near_ties(clip, found.text) == []


def test_a_text_of_another_choice(clip: near_ties.Clip, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = clip.generate({})
    others = ((tie, clip.generate({tie.at: tie.second}).text) for tie in sorted(whole.ties, key=lambda tie: tie.units))
    tie, text = next((tie, text) for tie, text in others if text != whole.text)
    monkeypatch.setattr(near_ties, "MOST_UNITS", tie.units)
    found = near_ties.near_ties(clip, text)
    assert found is not None
    assert clip.generate({each.at: each.second for each in found}).text == text
    monkeypatch.setattr(near_ties, "MOST_UNITS", min(each.units for each in whole.ties) / 2)
    assert near_ties.near_ties(clip, text) is None


def test_units_are_of_bfloat16_at_the_greater_logit() -> None:
    assert near_ties.Tie(0, 1, 2, (9.0, 8.9375)).units == 1.0
    assert near_ties.Tie(0, 1, 2, (7.0, 6.9375)).units == 2.0
