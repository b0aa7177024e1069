"""Are the texts of one clip that a GPU gave differently near-ties? By pico's independent reference, on a CPU.

    python -m tools.near_ties bench/results/live-texts-h200.json

The file has a list `differ` of clips with two texts, `live` and `upload`, and a list `both_differ` of clips with one
text, `text`, other than the reference's. The reference model generates each clip greedily in float32. A text that it
does not give must follow from another choice at a few places: there, the token with the second highest logit is chosen,
and the rest is generated greedily again. Of the places where both logits are at most MOST_UNITS apart, the one is taken
whose text agrees longest with the text that is looked for, MOST_PLACES times at most. The places are written to the
clip as `near_ties`: the position, both tokens, both logits, and their distance in units in the last place of bfloat16
at the greater's size.

Exit status 1 if a text was not found.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench import dataset, results
from pico import evaluate, huggingface, model
from pico.tokenizer import TextTokenizer
from tools.compare_layouts import ROOT
from tools.compare_models import shown, unit_in_last_place

MOST_UNITS, MOST_PLACES = 6.0, 4
LISTS = {"differ": ("live", "upload"), "both_differ": ("text",)}  # of a file, and the texts of their clips


class Tie(NamedTuple):
    """The two highest logits of a position."""

    at: int
    first: int
    second: int
    logits: tuple[float, float]

    @property
    def units(self) -> float:
        return (self.logits[0] - self.logits[1]) / unit_in_last_place(max(abs(each) for each in self.logits))


class Generated(NamedTuple):
    text: str
    ties: list[Tie]


class Clip:
    """One clip in the reference model."""

    def __init__(self, net: model.Voxtral, tokenizer: TextTokenizer, audio: np.ndarray) -> None:
        self.net, self.tokenizer, self.audio = net, tokenizer, audio

    def generate(self, chosen: Mapping[int, int]) -> Generated:
        """Greedily, but with the tokens of `chosen` at their positions."""
        ties: list[Tie] = []
        begin = model.prompt_tokens(model.DELAY_TOKENS)

        def choose(logits: torch.Tensor) -> torch.Tensor:
            (high, low), (first, second) = (each.tolist() for each in logits[0].topk(2))
            ties.append(Tie(begin + len(ties), first, second, (high, low)))
            return torch.tensor([chosen.get(ties[-1].at, first)])

        (tokens,) = self.net.transcribe([self.audio], choose=choose)
        return Generated(self.tokenizer.decode(tokens).strip(), ties[: len(tokens) + 1])  # the last chose the end


def near_ties(clip: Clip, text: str) -> list[Tie] | None:
    """The ties at which the reference chooses otherwise to give this text; None if it was not found."""
    chosen: dict[int, int] = {}
    ties: list[Tie] = []
    path = clip.generate(chosen)
    while path.text != text:
        last = max(chosen, default=-1)
        close = [tie for tie in path.ties if tie.at > last and tie.units <= MOST_UNITS]
        others = [(tie, clip.generate({**chosen, tie.at: tie.second})) for tie in close]
        agreed = agreement(path.text, text)
        better = [(tie, other) for tie, other in others if other.text == text or agreement(other.text, text) > agreed]
        if not better or len(ties) == MOST_PLACES:
            return None
        tie, path = max(better, key=lambda pair: (pair[1].text == text, agreement(pair[1].text, text), -pair[0].units))
        chosen[tie.at] = tie.second
        ties.append(tie)
    return ties


def agreement(text: str, other: str) -> int:
    """Characters that both begin with."""
    parted = (at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
    return next(parted, min(len(text), len(other)))


def described(tie: Tie, tokenizer: TextTokenizer) -> dict[str, Any]:
    tokens = {
        name: {"id": token, "text": shown(token, tokenizer)}
        for name, token in (("reference", tie.first), ("other", tie.second))
    }
    return {"at": tie.at, **tokens, "logits": list(tie.logits), "units": tie.units}


def main() -> int:
    summary = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tools.near_ties", description=summary)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    found = json.loads(file.read_text(encoding="utf-8"))
    net, tokenizer = model.load(huggingface.PICO), TextTokenizer.from_file(huggingface.PICO / "tekken.json")
    clips = {clip.id: clip for clip in dataset.load(ROOT / "bench/data").clips}
    missing = 0
    for each, name in [(each, name) for of, names in LISTS.items() for each in found[of] for name in names]:
        clip = Clip(net, tokenizer, evaluate.read_audio(clips[each["id"]].path))
        ties = near_ties(clip, each[name])
        missing += ties is None
        described_ties = None if ties is None else [described(tie, tokenizer) for tie in ties]
        each["near_ties"] = each.get("near_ties", {}) | {name: described_ties}
        units = "not found" if ties is None else ", ".join(f"{tie.units:.2f} units" for tie in ties) or "as here"
        print(f"{each['id']} {name:>6}: {units}", flush=True)
    results.write_json(file, found)
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
