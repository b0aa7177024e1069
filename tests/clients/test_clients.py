"""Published clients and proxies, unmodified, against a real server: each has the words of an upload.

`make test-clients` runs them. Each program of programs/ is a process of .venv-clients or .venv-recipes, which sends
clips at the pace of speech.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import soundfile
from pages import Parameters
from places import DATA, ROOT
from uploads import KEY, upload

from bench import dataset
from bench.measure.scoring import normalize, word_errors
from pico import evaluate

CLIENTS, RECIPES = "clients", "recipes"  # environments
PROGRAMS = Path(__file__).parent / "programs"
OF_RECIPES = ("home_assistant", "litellm_gateway", "open_webui")
OF_BOTH = ("mistral_stream", "mistral_upload", "mistral_upload_rest")  # in the newest version of mistralai, too
# In all programs but those that say otherwise
MODEL = "voxtral"
# livekit-plugins-mistralai speaks its live protocol for models with `realtime` in their name only. Two of OpenAI tell
# the language of the text.
MODELS = {
    "livekit_mistral": "voxtral-mini-transcribe-realtime-2602",
    **{"openai_async": "gpt-live-transcribe", "openai_upload_rest": "gpt-transcribe"},
}
CLIPS = 3
LONGEST_S = 5.0
TIMEOUT_S = 240
# Of the words of all clips. Where a client resamples, or speech detection cuts a turn within a clip, a word may differ.
MOST_ERRORS = 0.1


class Spoken(NamedTuple):
    path: Path  # 16 bits, 16 kHz
    text: str  # the upload's


def python(environment: str) -> str:
    return str(ROOT / f".venv-{environment}/bin/python")


def programs() -> list[tuple[str, str]]:
    """(environment, program)"""
    found = [path.stem for path in sorted(PROGRAMS.glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]
    assert len(found) >= 12
    both = [(RECIPES, program) for program in OF_BOTH]
    return [*((RECIPES if program in OF_RECIPES else CLIENTS, program) for program in found), *both]


@pytest.fixture(scope="module")
def spoken(fast_url: str, tmp_path_factory: pytest.TempPathFactory) -> list[Spoken]:
    folder = tmp_path_factory.mktemp("spoken")
    clips = [clip for clip in dataset.select(dataset.load(DATA).clips, 60, seed=0) if clip.duration_s <= LONGEST_S]
    found = []
    for clip in clips[:CLIPS]:
        path = folder / f"{clip.id}.wav"
        soundfile.write(path, np.asarray(evaluate.read_audio(clip.path)), 16000, subtype="PCM_16")
        found.append(Spoken(path, upload(fast_url, path).json()["text"].strip()))
    assert len(found) == CLIPS and all(each.text for each in found)
    return found


@pytest.mark.parametrize(("environment", "program"), programs())
def test_a_client_has_the_words_of_the_upload(
    environment: str, program: str, fast_url: str, spoken: list[Spoken]
) -> None:
    """Exact for all clips but one, and at most MOST_ERRORS of all words are others."""
    command = [python(environment), PROGRAMS / f"{program}.py", fast_url, MODELS.get(program, MODEL)]
    done = subprocess.run(
        [*map(str, command), *(str(each.path) for each in spoken)],
        env={**os.environ, "OPENAI_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert (done.returncode, len(lines)) == (0, CLIPS), done.stderr[-4000:]
    print("\n".join(map(str, lines)))
    pairs = [(each.text, line["text"]) for each, line in zip(spoken, lines, strict=True)]
    errors = [word_errors(reference, text) for reference, text in pairs]
    words = sum(len(normalize(reference).split()) for reference, _ in pairs)
    wrong = sum(each.total for each in errors)
    assert wrong <= MOST_ERRORS * words, pairs
    assert sum(normalize(reference) != normalize(text) for reference, text in pairs) <= 1, pairs
    assert all(line["turns"] >= 1 for line in lines)
    assert all(-1 < line["final_s"] < 30 for line in lines), lines


def test_the_page_has_each_parameter_of_mistrals_client() -> None:
    """Those of OpenAI's are in tests/unit/test_parameters.py: vLLM needs that client."""
    script = Path(__file__).parent / "mistral_parameters.py"
    done = subprocess.run([python(RECIPES), script], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    tables = json.loads(done.stdout)
    assert {heading: len(names) > 7 for heading, names in tables.items()} == {
        "Files": True,
        "Live": True,
        "Speech": True,
    }
    for heading, names in tables.items():
        page = Parameters("from-mistral.md", heading)
        for name in names:
            page.of(name)  # or it raises KeyError
