"""Measure how many names pico hears with a list of names, and choose how much the engine prefers listed phrases.

    python -m pico.keywords                # writes bench/results/pico-keywords.json

The clips are made for it: one sentence each that training never had, with at least one name of pico's 330, by voices
that training never had, in rooms and noise that make it confuse names. Half of the voices choose the strengths
(`sweep`), the others judge what was chosen (`judged`). The reference model in float32 takes the engine's rule
(voxtral_serve.engine.keywords), whose results the engine's tests compare with this.

Each clip is heard without a list, with a list of the names that are spoken in it, with these among 100 names, and with
100 names that are not spoken. `listed` is the share of spoken names that are wrong, whether they are listed or not;
`others` that of the other words, to which words count that were not spoken. Case and punctuation are ignored.
"""

import argparse
import hashlib
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jiwer
import numpy as np
import torch

from bench import environment, results
from pico import evaluate, model, sounds, text
from pico.tokenizer import TextTokenizer
from voxtral_serve.engine.keywords import Automaton, PhraseTokens, Strengths

OUT = Path("bench/results/pico-keywords.json")
CLIPS, LONGEST_S = 400, 8.0  # of each half
SNR_DB = (3.0, 12.0)  # of pink noise, beside the rooms and microphones of training
LISTS = {  # names, and what tables call them
    "none": "no list",
    "spoken": "the names that are spoken",
    "among 100": "100 names, these among them",
    "100 others": "100 names that are not spoken",
}
LONG = 100  # names of the two long lists
BATCH = 80  # clips
FULL_NAMES = 0.25  # share of the long lists
MIDDLE = Strengths(3.0, 4.0)
FIRSTS, LATERS = (1.5, 2.25, 3.0, 4.0, 5.0, 7.0), (0.0, 2.0, 4.0, 6.0, 8.0)
SAME = 0.005
HARM = 1.1  # `others`, and all words with names that are not spoken, may have this many times the errors


class NamedClip(NamedTuple):
    """A clip, its words in lower case, and the names among them as they are written."""

    audio: np.ndarray
    words: list[str]
    names: list[str]


class Errors(NamedTuple):
    """Numbers of words, and of those that are wrong."""

    names: int
    wrong_names: int
    others: int
    wrong_others: int

    @property
    def listed(self) -> float:
        return self.wrong_names / self.names

    @property
    def rest(self) -> float:
        return self.wrong_others / self.others

    @property
    def all(self) -> float:
        return (self.wrong_names + self.wrong_others) / (self.names + self.others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=evaluate.CHECKPOINT)
    parser.add_argument("--clips", type=int, default=CLIPS, help="of each half (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    judge = Judge(args.checkpoint)
    choosing, judging = (clips(args.clips, half) for half in range(2))
    swept = [*judge.sweep(choosing)]
    best = chosen(swept)
    print("chosen:", best, flush=True)
    judged = {name: described(judge.errors(judging, name, best)) for name in LISTS}
    content = {
        "schema_version": 1,
        "machine": environment.describe(None),
        "clips": args.clips,
        "names": len(names()),
        "chosen": best._asdict(),
        "judged": judged,
        "sweep": [
            {**strengths._asdict(), **{name: described(each) for name, each in errors.items()}}
            for strengths, errors in swept
        ],
    }
    results.write_json(args.out, content)
    print(table(content))


@cache
def names() -> list[str]:
    """All names of persons that pico's sentences have."""
    return sorted({name for key in ("woman", "man", "surname") for name in text._GRAMMAR[key]})


def clips(count: int, half: int) -> list[NamedClip]:
    """The clips of one half: 0 or 1."""
    from pico import data, speech  # they need espeak-ng, which tests of the engine do without

    rng, known = np.random.default_rng([half, 43]), {name.lower(): name for name in names()}
    voices = speech.BENCH_VOICES[half::2]
    found = list[NamedClip]()
    while len(found) < count:
        sentence = text.sentence(random.Random(int(rng.integers(2**62))), held_out=True)
        words = text.words(sentence)
        spoken = [known[word] for word in words if word in known]
        if not spoken:
            continue
        said = speech.speak([sentence], rng, voices[int(rng.integers(len(voices)))])
        audio = data.settle_end(sounds.augment(said.audio, rng), rng)
        if len(audio) <= LONGEST_S * model.SAMPLE_RATE:
            found.append(NamedClip(noisy(audio, rng), words, spoken))
    return found


def noisy(audio: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The audio in pink noise, with a peak of at most 1."""
    noise = sounds.not_speech(rng, len(audio) / model.SAMPLE_RATE + 1, "pink")[: len(audio)]
    level = sounds.speech_rms(audio) / float(np.sqrt((noise**2).mean())) * 10 ** (-rng.uniform(*SNR_DB) / 20)
    mixed = audio + noise * level
    return (mixed / max(1.0, float(np.abs(mixed).max()))).astype(np.float32)


def phrases(clip: NamedClip, name: str) -> list[str]:
    """The list of one of LISTS for a clip. Names that follow each other are one phrase."""
    known, spoken = {each.lower(): each for each in clip.names}, list[list[str]]()
    for before, word in zip(["", *clip.words], clip.words, strict=False):
        if word in known and before not in known:
            spoken.append([])
        if word in known:
            spoken[-1].append(known[word])
    said = list(dict.fromkeys(map(" ".join, spoken)))
    chance = random.Random(" ".join(clip.words))
    others = chance.sample([each for each in names() if each not in clip.names], 2 * LONG)
    others = [f"{a} {b}" if chance.random() < FULL_NAMES else a for a, b in zip(others[::2], others[1::2], strict=True)]
    return {"none": [], "spoken": said, "among 100": (said + others)[:LONG], "100 others": others}[name]


class Choice:
    """The likeliest token of each clip in a batch, with what its list adds."""

    def __init__(self, tables: Sequence[bytes | None]) -> None:
        self.automata = [None if each is None else Automaton(each) for each in tables]
        self.nodes, self.last = [0] * len(tables), [model.STREAMING_PAD] * len(tables)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        for place, automaton in enumerate(self.automata):
            if automaton is not None:
                automaton.boost(logits[place], self.nodes[place], self.last[place])
        tokens = logits.argmax(-1)
        for place, (automaton, token) in enumerate(zip(self.automata, tokens.tolist(), strict=True)):
            if automaton is not None:
                self.nodes[place] = automaton.step(self.nodes[place], token, self.last[place])
                self.last[place] = token
        return tokens


def phrase_tokens(tokenizer: TextTokenizer) -> PhraseTokens:
    """How pico's tokenizer writes phrases."""
    pad, word = model.STREAMING_PAD, model.STREAMING_WORD
    return PhraseTokens(tokenizer.encode, lambda token: tokenizer.decode([token]).encode(), pad, word)


class Judge:
    """The reference model of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self.net = model.load(checkpoint, "cuda" if torch.cuda.is_available() else "cpu")
        encode, known = self.net.embed_audio, dict[bytes, torch.Tensor]()

        def encoded(mel: torch.Tensor) -> torch.Tensor:
            """Each batch of clips is heard many times."""
            key = hashlib.sha256(mel.cpu().numpy()).digest()
            known[key] = known[key] if key in known else encode(mel)
            return known[key]

        self.net.embed_audio = encoded  # type: ignore[assignment]
        self.tokenizer = TextTokenizer.from_file(checkpoint / "tekken.json")
        self.tokens = phrase_tokens(self.tokenizer)

    def sweep(self, clips: Sequence[NamedClip]) -> Iterator[tuple[Strengths, dict[str, Errors]]]:
        """Without a list, and each strength with each list. One of the two numbers changes at a time."""
        nothing = Strengths(0.0, 0.0)
        yield nothing, {"none": self.errors(clips, "none", nothing)}
        tried = [MIDDLE._replace(first=first) for first in FIRSTS]
        tried += [MIDDLE._replace(later=later) for later in LATERS]
        for strengths in dict.fromkeys(tried):
            start = time.time()
            errors = {name: self.errors(clips, name, strengths) for name in [*LISTS][1:]}
            said = " ".join(f"{name}: {each.listed:.2%} {each.rest:.2%}" for name, each in errors.items())
            print(strengths, said, f"{time.time() - start:.0f} s", flush=True)
            yield strengths, errors

    def errors(self, clips: Sequence[NamedClip], name: str, strengths: Strengths) -> Errors:
        """What is wrong with a list."""
        counts = np.zeros(4, int)
        order = sorted(clips, key=lambda clip: len(clip.audio))
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            tables = [self.tokens.table(phrases(clip, name), strengths) for clip in batch]
            said = self.net.transcribe([clip.audio for clip in batch], choose=Choice(tables))
            for clip, tokens in zip(batch, said, strict=True):
                counts += scored(clip, text.words(self.tokenizer.decode(tokens)))
        return Errors(*counts.tolist())


def scored(clip: NamedClip, heard: Iterable[str]) -> tuple[int, int, int, int]:
    """The numbers of Errors for a transcript's words."""
    spoken = {name.lower() for name in clip.names}
    alignment = jiwer.process_words(" ".join(clip.words), " ".join(heard))
    right = {
        place
        for chunk in alignment.alignments[0]
        if chunk.type == "equal"
        for place in range(chunk.ref_start_idx, chunk.ref_end_idx)
    }
    wrong = [word for place, word in enumerate(clip.words) if place not in right]
    wrong_names, count = sum(word in spoken for word in wrong), sum(word in spoken for word in clip.words)
    return count, wrong_names, len(clip.words) - count, len(wrong) - wrong_names + alignment.insertions


def chosen(swept: Sequence[tuple[Strengths, dict[str, Errors]]]) -> Strengths:
    """The strengths with the fewest wrong names among 100, of those that do not make the other words, or all words with
    a list of other names, wrong HARM times as often as without a list. Differences of up to SAME of the names count as
    none: then those nearest to MIDDLE."""
    (_, before), *rest = swept
    none = before["none"]
    harmless = [
        (strengths, errors)
        for strengths, errors in rest
        if errors["100 others"].all <= HARM * none.all
        and max(errors[name].rest for name in ("spoken", "among 100")) <= HARM * none.rest
    ]
    least = min(errors["among 100"].listed for _, errors in harmless)
    best = [strengths for strengths, errors in harmless if errors["among 100"].listed <= least + SAME]
    return min(best, key=lambda each: sum(abs(a - b) for a, b in zip(each, MIDDLE, strict=True)))


def described(errors: Errors) -> dict[str, Any]:
    return {**errors._asdict(), "listed": errors.listed, "rest": errors.rest, "all": errors.all}


def table(content: dict[str, Any]) -> str:
    """The figures that judge what was chosen, as a table of Markdown."""
    lines = ["| list | names that are wrong | other words | all words |", "|---|---|---|---|"]
    for name, errors in content["judged"].items():
        cells = LISTS[name], f"{errors['listed']:.1%}", f"{errors['rest']:.2%}", f"{errors['all']:.2%}"
        lines.append(f"| {' | '.join(cells)} |")
    said = content["judged"]["none"]
    words = f"{said['names']} names and {said['others']:,} other words in {content['clips']} clips"
    return "\n".join(lines) + f"\n\n{words}; the reference model in float32 (`{OUT}`)."


if __name__ == "__main__":
    main()
