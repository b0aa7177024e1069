"""`python -m bench confidence`: which words are right, how often words of a probability are, and the committed plot."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakeserver import Answer, FakeServer, write_dataset
from places import ROOT

from bench import BenchError, confidence
from bench.__main__ import main
from bench.confidence import HeardWord, figures, judged, picture

RESULTS = ROOT / "bench/results/pico-confidence.json"


@pytest.mark.parametrize(
    ("reference", "heard", "right", "deletions"),
    [
        ("Hello, world.", "hello world", "11", 0),
        ("Hello world", "Hello old world", "101", 0),
        ("Hello world", "Hello wort", "10", 0),
        ("Say hello to the world", "Say hello world", "111", 2),
        ("twenty six hours", "twenty six hours", "111", 0),  # 26 hours, if they were one text
        ("We can't go", "We can go", "111", 1),
        ("We can go", "We can't go", "101", 0),  # of "can not" one is wrong
        ("Hello", "um hello", "1", 0),  # a word that the normaliser takes away is none
        ("", "Hello", "0", 0),
    ],
)
def test_right_words(reference: str, heard: str, right: str, deletions: int) -> None:
    words = [(word, number / 10) for number, word in enumerate(heard.split(), 1)]
    found, deleted = judged(reference, words)
    assert ("".join(str(int(word.right)) for word in found), deleted) == (right, deletions)
    assert {word.probability for word in found} <= {probability for _, probability in words}


def test_figures() -> None:
    words = [HeardWord(0.4, False), HeardWord(0.95, True), HeardWord(0.97, False), HeardWord(1.0, True)]
    found = figures(words, 3)
    assert {name: found[name] for name in ("words", "wrong", "deletions")} == {"words": 4, "wrong": 2, "deletions": 3}
    assert found["mean"] == pytest.approx(0.83)
    assert found["error"] == pytest.approx((0.4 + (0.95 + 0.97 - 1) + 0) / 4)
    assert found["order"] == 3 / 4
    assert [(each["probability"], each["words"], each["wrong"]) for each in found["below"]] == [
        (limit, 1 / 4, 1 / 2) for limit in confidence.FLAGGED
    ]
    counted = {each["from"]: (each["words"], each["right"], each["mean"]) for each in found["bins"] if each["words"]}
    assert counted == {0.0: (1, 0, 0.4), 0.95: (2, 1, pytest.approx(0.96)), 0.99: (1, 1, 1.0)}
    assert picture({"bins": found["bins"]}).count("<circle") == 3
    for kind in (True, False):
        with pytest.raises(BenchError, match="expected some of both"):
            figures([HeardWord(0.5, kind)], 0)


def answer(*words: Any) -> Answer:
    listed = [{"word": word, "probability": probability} for word, probability in words]
    return Answer(body=json.dumps({"text": " ".join(word for word, _ in words), "words": listed}).encode())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_dataset(tmp_path / "data", {"a": "Hello world", "b": "Good morning"})
    out, plot = tmp_path / "confidence.json", tmp_path / "plot.svg"
    answers = {"a.wav": answer(("Hello", 0.9), ("world", 0.8)), "b.wav": answer(("Good", 0.9), ("mourning", 0.2))}
    with FakeServer(answers) as server:
        line = ["confidence", "--url", server.url, "--dataset", str(data), "--out", str(out), "--plot", str(plot)]
        assert main(line) == 0
        assert {each.fields["response_format"] for each in server.received} == {"verbose_json"}
        content = json.loads(out.read_text())
        assert (content["clips"], content["words"], content["wrong"]) == (2, 4, 1)
        assert plot.read_text() == picture(content)
        for wrong, said in (
            (Answer(text="Hello"), "its words have no probability (KeyError('words'))"),
            (Answer(status=400, body=b"{}"), "HTTP 400"),
        ):
            server.answers, server.default = {}, wrong
            assert main(line) == 2
            assert said in capsys.readouterr().err


def test_the_plot_of_the_pages_is_that_of_the_results() -> None:
    content = json.loads(RESULTS.read_text())
    assert content["clips"] == 500
    assert (ROOT / "docs/pages/confidence.svg").read_text() == picture(content)
    ((limit, words, wrong),) = ([*each.values()] for each in content["below"] if each["probability"] == 0.8)
    said = f"Words below {limit} are {100 * words:.1f} % of all and {100 * wrong:.0f} % of the wrong ones."
    assert said in (ROOT / "docs/pages/speech-api.md").read_text()
