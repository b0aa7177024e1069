"""A patch that does not fit ends `vllm serve` before its port opens, and says which, where, and what was found.

Each case is the real libraries in a stock environment that has our sitecustomize alone, with something changed by the
test's own.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import scratch
from places import PICO

from voxtral_serve.shims import PATCHES, TESTED, Patch, installed

pytestmark = pytest.mark.slow
# Needed on every tested version, so that there is something to contradict and to apply.
ALWAYS = next(patch for patch in PATCHES if all(patch.needed.values()))
VERSION = installed(ALWAYS.library)

# Edits of the libraries' own code that a later version of them might bring, and what is found then.
RENAMED = {
    "vllm.tokenizers.hf": {"def get_cached_tokenizer(": "def get_cached_tokenizer(cache, "},
    "transformers.tokenization_mistral_common": {"def from_pretrained(": "def load_pretrained("},
    "vllm.model_executor.models.transformers.multimodal": {"def get_max_": "def get_most_"},
}
FOUND = {
    "is_fast": "TypeError: get_cached_tokenizer() missing 1 required positional argument",
    "from_pretrained": "the probe says not needed, but the patch was measured as needed on this version",
    "_get_num_multimodal_tokens": "has neither get_max_audio_tokens nor get_max_image_tokens",
}
UNGUARDED = {"vllm.plugins": {"def load_general_plugins(": "def load_plugins("}}
CONTRADICTED = f"patches[{ALWAYS.name!r}].needed = {{{VERSION!r}: False}}"
RAISING = f"patches[{ALWAYS.name!r}].apply = lambda module: 1 / 0"


@pytest.fixture(scope="module")
def ends(
    stock: Path, hugging_face: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[scratch.End]]]:
    """Each case's `vllm serve`, two at a time. VLLM_PLUGINS="" has vLLM load no plugin at all."""

    def end(change: str, directory: Path, **variables: str) -> scratch.End:
        changed = scratch.sitecustomize(tmp_path_factory.mktemp("changed"), scratch.LOADED, change)
        return scratch.serve_until_end(stock, directory, PYTHONPATH=str(changed), **variables)

    cases: dict[str, Callable[[], scratch.End]] = {
        "renamed": partial(end, scratch.edited(RENAMED), hugging_face),
        "raising": partial(end, RAISING, hugging_face, VLLM_PLUGINS=""),
        "contradicted": partial(end, CONTRADICTED, PICO, VLLM_PLUGINS=""),
        "unguarded": partial(end, scratch.edited(UNGUARDED), PICO),
    }
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(case) for name, case in cases.items()}


def refusal(end: scratch.End) -> str:
    """The message that it ended with, after checking that it did before anybody could connect."""
    assert end.status != 0
    assert not end.opened
    messages = [line for line in end.log.splitlines() if "PatchError: " in line]
    assert messages, end.log[-5000:]
    return messages[-1].partition("PatchError: ")[2]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_target_that_was_rewritten(ends: dict[str, Future[scratch.End]], patch: Patch) -> None:
    message = refusal(ends["renamed"].result())
    version = installed(patch.library)
    named = f"patch {patch.name} (of {patch.target}) has drifted on {patch.library} {version}: "
    assert named in message
    assert FOUND[patch.name] in message.partition(named)[2]


def test_the_message_says_what_would_do(ends: dict[str, Future[scratch.End]]) -> None:
    message = refusal(ends["renamed"].result())
    assert all(version in message for versions in TESTED.values() for version in versions)


def test_an_exception_inside_a_patch_without_plugins(ends: dict[str, Future[scratch.End]]) -> None:
    assert refusal(ends["raising"].result()).startswith(
        f"patch {ALWAYS.name} (of {ALWAYS.target}) has drifted on {ALWAYS.library} {VERSION}: ZeroDivisionError: "
        "division by zero. Nothing is served."
    )


def test_a_measurement_that_the_probe_contradicts_in_mistrals_layout(ends: dict[str, Future[scratch.End]]) -> None:
    """That layout would start without the patches; what a record gets wrong is refused all the same."""
    assert refusal(ends["contradicted"].result()).startswith(
        f"patch {ALWAYS.name} (of {ALWAYS.target}) has drifted on {ALWAYS.library} {VERSION}: the probe says needed, "
        "but the patch was measured as not needed on this version. Nothing is served."
    )


def test_a_vllm_that_loads_its_plugins_elsewhere(ends: dict[str, Future[scratch.End]]) -> None:
    """Nobody would verify the patches then."""
    message = refusal(ends["unguarded"].result())
    assert message.startswith(
        f"vllm.plugins of vllm {installed('vllm')} has no load_general_plugins, so the patches cannot be verified"
    )
