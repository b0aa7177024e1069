"""Whether `probability` of words in `verbose_json` is how often such words are right: `python -m bench confidence`.

    python -m bench confidence --url http://127.0.0.1:8000 --out confidence.json --plot confidence.svg

A word is right if the alignment with the reference has it as it is, each word after Whisper's normalisation; one that
normalises to several is right if all of them are. Words that were not transcribed have no probability: `deletions`.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import tostring

import jiwer

from bench import BenchError, dataset, results
from bench.dataset import Clip
from bench.measure import plots, upload
from bench.measure.scoring import normalize
from bench.plan import OWN_DATA

EDGES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)  # of the probabilities that are counted together
FLAGGED = (0.5, 0.8, 0.9)  # probabilities below which a reader may look at a word again
TIMEOUT_S, REQUESTS = 600, 4
STYLE = (
    "svg{font-family:sans-serif}text{font-size:11.5px;fill:#333}.faint{fill:#667}.middle{text-anchor:middle}"
    ".end{text-anchor:end}.grid{stroke:#dde;fill:none}.axis{stroke:#667;fill:none}"
    ".line{stroke:#2a78d6;fill:none;stroke-width:1.2}.dashed{stroke:#667;stroke-dasharray:5 3}.dot{fill:#2a78d6}"
)


class HeardWord(NamedTuple):
    """A word of a transcript: its probability, and whether it was spoken."""

    probability: float
    right: bool


def main(words: Sequence[str]) -> int:
    """Run a command line (without `confidence`) and return the exit status: 0, or 2 for an error."""
    flags = parse(words)
    try:
        content = measure(flags.url, dataset.select(dataset.load(flags.dataset).clips, flags.samples, seed=0))
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results.write_json(flags.out, content)
    if flags.plot is not None:
        flags.plot.write_text(picture(content))
    print(json.dumps(content, indent=1))
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The flags of a command line. Raises SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m bench confidence", description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="base URL of a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--dataset", default=OWN_DATA, help="English clips, as `bench run` takes them")
    parser.add_argument("--samples", type=int, help="number of clips (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file for the figures")
    parser.add_argument("--plot", type=Path, help="an SVG file for the plot")
    return parser.parse_args(words)


def measure(url: str, clips: Sequence[Clip]) -> dict[str, Any]:
    """The figures of these clips. Raises BenchError for an answer without words that have a probability."""
    server = upload.Server(upload.root(url, "--url", "must not contain a password"), None, TIMEOUT_S)
    try:
        (model, *_) = (each["id"] for each in server.get("/v1/models", TIMEOUT_S).json()["data"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{url} has no models: {error}") from None
    fields = [("model", model), ("response_format", "verbose_json"), ("timestamp_granularities[]", "word")]

    def heard(clip: Clip) -> tuple[list[HeardWord], int]:
        content = clip.path.read_bytes()
        answer = upload.until_answered(
            lambda first: server.transcribe(server.transcription(clip.path.name, content, fields))
        )
        if answer.error is not None:
            raise BenchError(f"{clip.id}: {answer.error}")
        try:
            pairs = [(each["word"], each["probability"]) for each in json.loads(answer.body)["words"]]
        except (LookupError, TypeError) as error:
            raise BenchError(f"{clip.id}: its words have no probability ({error!r})") from None
        return judged(clip.text, pairs)

    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(heard, clips))
    deletions = sum(deleted for _, deleted in answers)
    return {
        "schema_version": 1,
        "clips": len(clips),
        **figures([word for found, _ in answers for word in found], deletions),
    }


def judged(reference: str, words: Sequence[tuple[str, float]]) -> tuple[list[HeardWord], int]:
    """(each word, how many of the reference are in no word) of a transcript's words with their probabilities."""
    parts = [normalize(word).split() for word, _ in words]
    owners = [number for number, own in enumerate(parts) for _ in own]
    spoken = " ".join(normalize(word) for word in reference.split())  # as the words are: "twenty six" is no 26
    alignment = jiwer.process_words(spoken, " ".join(part for own in parts for part in own))
    wrong = {
        owners[number]
        for chunk in alignment.alignments[0]
        if chunk.type != "equal"
        for number in range(chunk.hyp_start_idx, chunk.hyp_end_idx)
    }
    judged = [HeardWord(words[n][1], n not in wrong) for n, own in enumerate(parts) if own]
    return judged, alignment.deletions


def figures(words: Sequence[HeardWord], deletions: int) -> dict[str, Any]:
    """What the JSON file has of all words.

    error  the mean distance of a bin's probabilities from its share of right words, weighted by words (the expected
           calibration error of Guo et al. 2017, arXiv 1706.04599, for these bins)
    order  the chance that a right word has a higher probability than a wrong one (the area under the ROC curve)
    below  for each of FLAGGED: the share of all words with a lower probability, and of the wrong ones

    Raises BenchError without words, or if none is wrong or none right.
    """
    rights, wrongs = ([w.probability for w in words if w.right is kind] for kind in (True, False))
    if not (rights and wrongs):
        raise BenchError(f"{len(rights)} words are right and {len(wrongs)} wrong: expected some of both")
    bins, gap = [], 0.0
    for low, high in itertools.pairwise(EDGES):
        own = [w for w in words if low <= w.probability < high or high == w.probability == 1.0]
        right, total = sum(w.right for w in own), sum(w.probability for w in own)
        mean = total / len(own) if own else None
        gap += abs(total - right)
        bins.append({"from": low, "to": high, "words": len(own), "right": right, "mean": mean})
    above = sum((r > w) + (r == w) / 2 for r in rights for w in wrongs)
    return {
        **{"words": len(words), "wrong": len(wrongs), "deletions": deletions},
        "mean": sum(w.probability for w in words) / len(words),
        "error": gap / len(words),
        "order": above / len(rights) / len(wrongs),
        "below": [
            {
                "probability": limit,
                "words": sum(w.probability < limit for w in words) / len(words),
                "wrong": sum(w < limit for w in wrongs) / len(wrongs),
            }
            for limit in FLAGGED
        ],
        "bins": bins,
    }


def picture(content: dict[str, Any]) -> str:
    """The share of right words over the probability, as an SVG file."""
    points = [(each["mean"], each["right"], each["words"]) for each in content["bins"] if each["words"]]
    drawn = plots.reliability(points)
    drawn.set("xmlns", "http://www.w3.org/2000/svg")
    size = {"width": plots.WIDTH, "height": plots.HEIGHT}
    drawn[:0] = [plots.tag("style", STYLE), plots.tag("rect", fill="#fff", rx=8, **size)]
    return tostring(drawn, encoding="unicode") + "\n"
