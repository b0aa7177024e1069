"""Without the patches `vllm serve` ends as their records say, one crash behind the other."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import scratch

from voxtral_serve.shims import PATCHES, installed

pytestmark = pytest.mark.slow
# In the order of the crashes, which is the order of the records.
NEEDED = [patch for patch in PATCHES if patch.needed[installed(patch.library)]]
# What the patches cannot mend, since vLLM takes such a checkpoint for a model of its Transformers backend, which knows
# no audio: for this the package has a plugin.
BEYOND = {
    "0.20.0": "ValueError: Following weights were not initialized from checkpoint: "
    "{'model.language_model.lm_head.weight'}",
    "0.32.0": "ValueError: `tokenizer` must be a `MistralCommonBackend` tokenizer.",
}


@pytest.fixture(scope="module")
def ends(
    stock: Path, hugging_face: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Future[scratch.End]]]:
    """`vllm serve` on Hugging Face's layout with the first 0, 1, ... of NEEDED switched on; two at a time."""

    def end(count: int) -> scratch.End:
        only = [patch.name for patch in NEEDED[:count]]
        some = scratch.sitecustomize(
            tmp_path_factory.mktemp("some"),
            scratch.LOADED,
            f"finder.patches = tuple(patches[name] for name in {only!r})",
            # vllm.plugins is left out, so that nobody misses the others.
            "finder.targets = {patch.target for patch in finder.patches}",
        )
        return scratch.serve_until_end(stock, hugging_face, PYTHONPATH=str(some), VLLM_PLUGINS="")

    with ThreadPoolExecutor(2) as pool:
        yield [pool.submit(end, count) for count in range(len(NEEDED) + 1)]


@pytest.mark.parametrize("count", range(len(NEEDED) + 1))
def test_each_crash_comes_when_those_before_it_are_patched(ends: list[Future[scratch.End]], count: int) -> None:
    expected = [patch.breaks for patch in NEEDED] + [BEYOND[installed("vllm")]]
    end = ends[count].result()
    assert expected[count] in end.log, end.log[-5000:]
    assert end.status != 0
    assert not end.opened
    others = [message for message in expected if message != expected[count]]
    assert not [message for message in others if message in end.log]
