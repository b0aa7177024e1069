"""How pico's names are judged with and without lists: the set, the count of errors, and the choice of strengths."""

import json
from pathlib import Path

import numpy as np
import pytest
from places import ROOT

from pico import keywords
from pico.keywords import LISTS, LONG, MIDDLE, Errors, NamedClip, chosen, phrases, scored
from voxtral_serve.engine.keywords import Strengths

CLIP = NamedClip(np.zeros(0, np.float32), ["hazel", "saw", "torres", "and", "the", "dog"], ["Hazel", "Torres"])


@pytest.mark.parametrize(
    ("heard", "expected"),
    [
        ("hazel saw torres and the dog", (2, 0, 4, 0)),
        ("hazel saw howard and the dog", (2, 1, 4, 0)),
        ("hazel saw torres torres and a dog", (2, 0, 4, 2)),  # one more, and another word
        ("", (2, 2, 4, 4)),
    ],
)
def test_words_that_are_wrong(heard: str, expected: tuple[int, ...]) -> None:
    assert scored(CLIP, heard.split()) == expected


def test_lists() -> None:
    found = {name: phrases(CLIP, name) for name in LISTS}
    assert (found["none"], found["spoken"]) == ([], CLIP.names)
    for name in ("among 100", "100 others"):
        assert len({*found[name]}) == LONG
        assert {each for phrase in found[name] for each in phrase.split()} <= {*keywords.names()}
    assert {*CLIP.names} <= {*found["among 100"]} and not {*CLIP.names} & {*found["100 others"]}
    assert phrases(CLIP, "among 100") == found["among 100"]
    assert phrases(CLIP._replace(words=["hazel", "torres", "saw", "hazel"]), "spoken") == ["Hazel Torres", "Hazel"]


def test_the_best_that_does_no_harm_is_chosen() -> None:
    def errors(names: int, others: int = 40, misled: int = 100) -> dict[str, Errors]:
        heard = Errors(500, names, 1000, others)
        return {"spoken": heard, "among 100": heard, "100 others": Errors(500, misled, 1000, 40)}

    before = (Strengths(0, 0), {"none": Errors(500, 100, 1000, 40)})
    weak, strong, harmful, misleading = (MIDDLE._replace(first=first) for first in range(4))
    rows = [
        before,
        (weak, errors(90)),
        (strong, errors(70)),
        (harmful, errors(50, others=45)),
        (misleading, errors(30, misled=150)),
        (strong._replace(later=9), errors(68)),  # no difference
    ]
    assert chosen(rows) == strong


def test_clips_have_names_and_are_the_same_again() -> None:
    made, again = (keywords.clips(3, 1) for _ in range(2))
    for clip, other in zip(made, again, strict=True):
        assert {name.lower() for name in clip.names} <= {*clip.words} and clip.names
        assert np.array_equal(clip.audio, other.audio) and 0.01 < np.abs(clip.audio).max() <= 1


def test_the_committed_figures_are_those_of_the_default() -> None:
    content = json.loads((ROOT / Path(keywords.OUT)).read_bytes())
    assert content["chosen"] == Strengths()._asdict()
    assert [*content["judged"]] == [*LISTS]
    none, spoken, among, others = (content["judged"][name] for name in LISTS)
    assert spoken["listed"] <= among["listed"] < none["listed"]
    assert others["all"] <= 1.1 * none["all"]
