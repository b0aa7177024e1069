"""`make test-gpu` (tests/gpu/run.py): pico as it is served on a GPU, and the kernels.

Without a GPU these tests are skipped. VOXTRAL_TEST_DEVICE=cpu runs the engine and the servers on a CPU, with fewer
clips: Model Runner V1, no graphs.
"""

import os

import offline
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if offline.ON_GPU or os.environ.get("VOXTRAL_TEST_DEVICE") == "cpu":
        return
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.skip(reason="no CUDA: VOXTRAL_TEST_DEVICE=cpu runs it on a CPU"))
