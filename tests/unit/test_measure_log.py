"""What is read in the log of a `vllm serve`."""

import pytest

from bench.measure import log
from bench.measure.cause import cause as cause_of

AT = "11-24 12:36:04"
WARNED = f"(EngineCore pid=7) WARNING {AT} [cpu.py:9] RuntimeError: could not create a primitive descriptor"
DIED = f"""\
{WARNED}
(APIServer pid=6) WARNING {AT} [audio.py:478] torchcodec unavailable (ImportError('torchcodec: none'))
(APIServer pid=6) ERROR {AT} [a.py:1] ValueError: of one request
(EngineCore pid=7) ERROR {AT} [core.py:1512] Traceback (most recent call last):
(EngineCore pid=7) ERROR {AT} [core.py:1512] KeyError: 'x'
(EngineCore pid=7) ERROR {AT} [core.py:1512] During handling of the above exception, another exception occurred:
(EngineCore pid=7) ERROR {AT} [core.py:1512] TypeError: unhashable type: 'list'
(APIServer pid=6) ERROR {AT} [async_llm.py:906] vllm.v1.EngineDeadError: See stack trace (above) for the root cause.
voxtral_serve.patches.live_server.EngineDeadError: vLLM's engine has died, so the server stops
"""
OF_A_WORKER = f"""\
(Worker_TP0 pid=8) ERROR {AT} [w.py:1] torch.OutOfMemoryError: 3 GiB are missing
(EngineCore_DP0 pid=7) ERROR {AT} [c.py:1] RuntimeError: Worker failed, please see the stack trace for the root cause
"""
OF_THE_API = "(APIServer pid=6) ERROR:    PatchError: it has drifted\n(APIServer pid=6) RuntimeError: no start\n"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (DIED, "TypeError: unhashable type: 'list'"),
        (OF_A_WORKER, "torch.OutOfMemoryError: 3 GiB are missing"),
        (OF_THE_API, "PatchError: it has drifted"),
        (WARNED, None),
    ],
)
def test_the_cause_of_a_death(text: str, cause: str | None) -> None:
    """The engine's last exception: no warning that quotes one, no request's, and none that points to another."""
    assert cause_of(text) == cause


def test_the_cause_of_an_invalid_argument() -> None:
    """pydantic's exception says what is wrong in its next line."""
    text = (
        "(A pid=1) a.ValidationError: 1 validation error for C\n(A pid=1)   Value error, no (GPU) [type=value_error]\n"
    )
    assert cause_of(text) == "a.ValidationError: 1 validation error for C: Value error, no (GPU)"


WEIGHTS = "(Worker pid=9) INFO [model_runner.py:425] Model loading took 8.27 GiB memory and 2.5 seconds"
CPU_CACHE = "(Worker pid=9) INFO [cpu_worker.py:260] Explicitly set (1.0/23.54) GiB for KV cache on node 0."


@pytest.mark.parametrize(
    ("lines", "weights", "cache"),
    [
        ([WEIGHTS, "INFO [gpu_worker.py:760] Available KV cache memory: 74.2 GiB"], 8.27, 74.2),
        (["Initial free memory 139.1 GiB, reserved 2.0 GiB memory for KV Cache as specified by"], None, 2.0),
        ([WEIGHTS, CPU_CACHE, CPU_CACHE], 8.27, 1.0),
        ([WEIGHTS, WEIGHTS.replace("8.27", "8.28")], None, None),  # two processes, and neither tells of both
        (["Free memory on device (23.5/23.54 GiB)"], None, None),
    ],
)
def test_memory_in_the_log(lines: list[str], weights: float | None, cache: float | None) -> None:
    expected = [None if amount is None else round(amount * 2**30) for amount in (weights, cache)]
    assert list(log.memory("\n".join(lines)).values()) == expected


PATCHES = "voxtral-serve patches: from_pretrained applied, is_fast not needed"


@pytest.mark.parametrize(
    ("text", "patches"),
    [
        (f"(EngineCore pid=7) INFO [plugin.py:55] {PATCHES}\nnext", "from_pretrained applied, is_fast not needed"),
        (f'{{"message": "{PATCHES}", "level": "INFO"}}', "from_pretrained applied, is_fast not needed"),
        ("INFO no word of them", None),
    ],
)
def test_patches_in_the_log(text: str, patches: str | None) -> None:
    assert log.patches(text) == patches


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", "importing vLLM"),
        ("INFO [model.py:733] Resolved architecture: VoxtralRealtimeEncodeOnce\n", "starting the engine"),
        ("Resolved architecture: A\nLoading weights took 0.22 seconds\n", "compiling and warming up"),
    ],
)
def test_the_phase_of_a_start(lines: str, expected: str) -> None:
    assert log.phase(lines) == expected
