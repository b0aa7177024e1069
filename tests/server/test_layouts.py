"""Real vLLM serves Hugging Face's layout with the text of Mistral's, and names what is wrong with a broken directory.

A directory is what `save_pretrained` writes, changed by the test; vLLM runs in it as `make serve` runs it.
"""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import scratch
import yaml
from places import CONFIG, PICO
from safetensors.torch import load_file, save_file
from servers import SMALL, at_once, transcribe

from bench import dataset
from bench.client import Row
from bench.measure.cause import cause as cause_of
from bench.measure.log import SHOWN_LINES

pytestmark = pytest.mark.slow

FEW = 6
Texts = dict[str, str | None]


def texts(rows: list[Row]) -> Texts:
    assert [row.error for row in rows] == [None] * len(rows)
    return {row.id: row.text for row in rows}


def differing(texts: Texts, expected: Texts) -> dict[str, tuple[str | None, str | None]]:
    return {id: (text, expected[id]) for id, text in texts.items() if text != expected[id]}


@pytest.fixture(scope="module")
def mistral(pico_url: str, served: list[Row], late: list[dataset.Clip]) -> Texts:
    return texts(served + transcribe(pico_url, late))


# What is served


def both_layouts(directory: Path) -> None:
    """The published repository holds both. Here Hugging Face's weights would give other texts."""
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if name.endswith("q_proj.weight"):
            tensors[name].zero_()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    shutil.copytree(PICO, directory, dirs_exist_ok=True)


def left_over_params(directory: Path) -> None:
    shutil.copy(PICO / "params.json", directory)


def no_processor_config(directory: Path) -> None:
    (directory / "processor_config.json").unlink()


CHANGES = (both_layouts, left_over_params, no_processor_config)


@pytest.fixture(scope="module")
def heard(
    hugging_face: Path,
    clips: list[dataset.Clip],
    late: list[dataset.Clip],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Texts]:
    """What a server of Hugging Face's layout says, and one of each change to it, of FEW clips."""
    assert not (hugging_face / "params.json").exists()
    assert not list(hugging_face.glob("consolidated*"))
    scratch = tmp_path_factory.mktemp("changed")
    directories, asked = {"as it is": hugging_face}, {"as it is": clips + late}
    for change in CHANGES:
        directories[change.__name__], asked[change.__name__] = scratch / change.__name__, clips[:FEW]
        shutil.copytree(hugging_face, scratch / change.__name__)
        change(scratch / change.__name__)
    with at_once(CONFIG, directories, scratch, *SMALL) as servers, ThreadPoolExecutor() as pool:
        rows = pool.map(lambda name: transcribe(servers[name].url, asked[name]), directories)
        return dict(zip(directories, map(texts, rows), strict=True))


def test_hugging_faces_layout_says_what_mistrals_says(heard: dict[str, Texts], mistral: Texts) -> None:
    assert differing(heard["as it is"], mistral) == {}


def test_both_layouts_side_by_side_are_served_as_mistrals(heard: dict[str, Texts], mistral: Texts) -> None:
    assert differing(heard[both_layouts.__name__], mistral) == {}


@pytest.mark.parametrize("change", [left_over_params.__name__, no_processor_config.__name__])
def test_what_is_left_over_or_not_needed_does_not_matter(change: str, heard: dict[str, Texts], mistral: Texts) -> None:
    assert differing(heard[change], mistral) == {}


# What is refused. Each change returns what the error has to say.


def no_tokenizer(directory: Path) -> list[str]:
    (directory / "tekken.json").unlink()
    return ["tekken.json is missing"]


def no_params(directory: Path) -> list[str]:
    """Mistral's weights with Hugging Face's config."""
    (directory / "params.json").unlink()
    (directory / "config.json").write_text('{"model_type": "voxtral_realtime"}')
    return ["mixes two layouts", "needs params.json, which is missing"]


def weights(directory: Path) -> Path:
    (path,) = directory.glob("*.safetensors")
    return path


def no_tensor(directory: Path) -> list[str]:
    """A weight of the LM, by the name that its file gives it."""
    path = weights(directory)
    tensors = load_file(path)
    lm_key = re.compile(r"(language_model\..*)?layers\.2\.(self_attn\.k_proj|attention\.wk)\.weight")
    (name,) = filter(lm_key.fullmatch, tensors)
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})
    return [f"lacks tensor {name}"]


def half_a_file(directory: Path) -> list[str]:
    path = weights(directory)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    return [f"{path.name} has {size // 2} bytes, but its header requires {size}"]


CASES: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "no tekken.json, Mistral's": ("mistral", no_tokenizer),
    "no tekken.json, Hugging Face's": ("hugging_face", no_tokenizer),
    "no params.json": ("mistral", no_params),
    "a tensor missing, Mistral's": ("mistral", no_tensor),
    "a tensor missing, Hugging Face's": ("hugging_face", no_tensor),
    "a truncated file, Mistral's": ("mistral", half_a_file),
    "a truncated file, Hugging Face's": ("hugging_face", half_a_file),
}


@pytest.fixture(scope="module")
def ends(
    hugging_face: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[tuple[scratch.End, list[str]]]]]:
    """How `vllm serve` ended in each case, and what its error has to say. Two run at a time."""
    sources = {"mistral": PICO, "hugging_face": hugging_face}

    def end(layout: str, break_it: Callable[[Path], list[str]]) -> tuple[scratch.End, list[str]]:
        directory = tmp_path_factory.mktemp("broken") / "checkpoint"
        shutil.copytree(sources[layout], directory)
        words = break_it(directory)
        return scratch.serve_until_end(Path(sys.executable), directory), words

    with ThreadPoolExecutor(2) as pool:
        yield {case: pool.submit(end, *what) for case, what in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_directory_is_refused(ends: dict[str, Future[tuple[scratch.End, list[str]]]], case: str) -> None:
    """By the exception that `make serve` shows as the cause."""
    end, words = ends[case].result()
    assert (end.status != 0, end.opened) == (True, False)
    cause = cause_of(end.log)
    assert cause, end.log[-5000:]
    for word in words:
        assert word in cause


def test_another_tokenizer_mode_is_refused(hugging_face: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(CONFIG.read_text()) | {"tokenizer_mode": "hf"}))
    end = scratch.serve_until_end(Path(sys.executable), hugging_face, config)
    assert (end.status != 0, end.opened) == (True, False)
    # vLLM's config is pydantic's, which puts the message in the line after its exception.
    last = "\n".join(end.log.splitlines()[-SHOWN_LINES:])
    assert "tokenizer_mode is 'hf': expected 'auto' or 'mistral' for Voxtral Realtime" in last
