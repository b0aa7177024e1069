"""Decoders in processes of their own: what a file that crashes, swells or hangs one costs, and what is left of it.

The faults are planted in the module `soundfile` that the processes import; the processes are real ones.
"""

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine
from fractions import Fraction
from pathlib import Path
from typing import Any

import inputs
import numpy as np
import psutil
import pytest
import uvloop
from guarding import BOUNDS, RATE, RULES, SAMPLES
from places import ROOT

from voxtral_serve.audio import decode
from voxtral_serve.audio.decode import Clip
from voxtral_serve.guard import decoders, processes
from voxtral_serve.guard.budget import COPIES, Budget
from voxtral_serve.guard.decoders import Decoders
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.units import GIB, MIB

MEMORY = 512 * MIB
GOOD = inputs.encoded(SAMPLES)
# A file whose bytes say what its decoder does. FACTS gives samples: whether vLLM is imported, how many variables its
# environment has, and whether it can open a file.
PLANTED = """
    import ctypes, importlib.util, os, sys, time
    from pathlib import Path

    here = Path(__file__).parent
    path = next(Path(each) / "soundfile.py" for each in sys.path if each and Path(each) != here
                and (Path(each) / "soundfile.py").exists())
    spec = importlib.util.spec_from_file_location("real_soundfile", path)
    real = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(real)
    LibsndfileError = real.LibsndfileError

    def openable():
        try:
            open("/proc/self/status").close()
        except OSError:
            return False
        return True

    def SoundFile(file):
        import io, numpy
        data = file.getvalue()
        if b"SEGV" in data:
            ctypes.string_at(0)
        if b"SWELL" in data:
            kept = []
            while True:
                kept.append(bytes(1 << 24))
        while b"HANG" in data:
            time.sleep(0.01)
        if b"NOISE" in data:
            os.write(2, b"a line of a client")
        if b"FACTS" in data:
            samples = numpy.array(["vllm" in sys.modules, len(os.environ), openable()], numpy.float32)
            made = io.BytesIO()
            real.write(made, samples, 16000, format="WAV", subtype="FLOAT")
            file = io.BytesIO(made.getvalue())
        return real.SoundFile(file)
"""

# A process that answers an order, for a file of so many bytes, with a line of its own
LIAR = """
import sys
orders, answers = sys.stdin.buffer, sys.stdout.buffer
answers.write(b"ready\\n")
answers.flush()
orders.readline()
orders.read(%d)
answers.write(%r + b"\\n")
answers.flush()
orders.read()
"""


def told(what: str) -> bytes:
    """A WAV file that makes a planted decoder do something."""
    return GOOD + what.encode()


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "soundfile.py").write_text(textwrap.dedent(PLANTED))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@pytest.fixture(
    params=[pytest.param(asyncio.run, id="asyncio", marks=pytest.mark.slow), pytest.param(uvloop.run, id="uvloop")]
)
def run(request: pytest.FixtureRequest) -> Callable[[Callable[["Server"], Coroutine[Any, Any, None]]], None]:
    """Run a test with decoders; nothing of them may be left."""

    def whole(test: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
        async def inside() -> None:
            first = Decoders(1, MEMORY)
            await first._worker()  # the loop opens what it needs for processes
            await first.aclose()
            await until(lambda: not worker_processes())
            before = psutil.Process().num_fds()
            server = Server()
            try:
                await test(server)
            finally:
                await server.decoders.aclose()
            assert server.budget.used == 0
            await until(lambda: psutil.Process().num_fds() <= before)
            await until(lambda: not worker_processes())

        request.param(inside())

    return whole


class Server:
    """Two decoders and a budget."""

    def __init__(self) -> None:
        self.decoders, self.budget = Decoders(2, MEMORY), Budget(64 * MIB, 32 * MIB)

    async def decode(self, data: bytes) -> Clip:
        with self.budget.hold() as held:
            await held.add_body(len(data))
            clip = await self.decoders.decode(memoryview(data), BOUNDS, RATE, "file", held)
            assert (held.body, held.audio) == (0, COPIES * clip.samples.nbytes)
            return clip

    async def refusal(self, data: bytes) -> RefusedError:
        with pytest.raises(RefusedError) as caught:
            await self.decode(data)
        return caught.value

    async def works(self) -> None:
        """Two good files at a time."""
        for clip in await asyncio.gather(self.decode(GOOD), self.decode(GOOD)):
            assert (clip.samples == decode.decode(GOOD, BOUNDS, RATE).samples).all()


def worker_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


async def until(true: Callable[[], bool], seconds: float = 2.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_files_are_decoded_and_refused_as_in_one_process(run: Any) -> None:
    async def test(server: Server) -> None:
        for rate, form, subtype in ((RATE, "WAV", "FLOAT"), (8000, "FLAC", "PCM_16"), (48000, "OGG", "OPUS")):
            data = inputs.encoded(np.stack([SAMPLES, SAMPLES / 2], 1)[: 3 * rate], rate, form, subtype)
            assert (await server.decode(data)).samples.tobytes() == decode.decode(data, BOUNDS, RATE).samples.tobytes()
        for data in (b"", b"no audio", inputs.encoded(np.zeros(5 * RATE, np.float32)), GOOD[:30]):
            refusal = await server.refusal(data)
            with pytest.raises(decode.AudioError) as caught:
                decode.decode(data, BOUNDS, RATE)
            assert (refusal.status, str(refusal), refusal.code, refusal.param) == (
                *(400, f"file: {caught.value}"),
                *(caught.value.code, "file"),
            )
        assert len(worker_processes()) == 1  # one after the other

    run(test)


def test_a_crash_costs_its_own_request_only(run: Any, planted: None) -> None:
    async def test(server: Server) -> None:
        beside = asyncio.create_task(server.works())
        refusal = await server.refusal(told("SEGV"))
        assert (refusal.status, refusal.code) == (400, "invalid_audio")
        assert "file: the decoder ended with signal SIGSEGV: the file is damaged" in str(refusal)
        await beside
        await server.works()

    run(test)


def test_memory_is_limited(run: Any, planted: None) -> None:
    async def test(server: Server) -> None:
        refusal = await server.refusal(told("SWELL"))
        assert (refusal.status, refusal.code) == (400, "invalid_audio")
        assert f"the decoder ended at its memory limit of {MEMORY} bytes" in str(refusal)
        await server.works()

    run(test)


def test_time_is_limited(run: Any, planted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "DEADLINE_S", 0)  # and one second for the 4 s of the longest clip

    async def test(server: Server) -> None:
        start = time.monotonic()
        refusal = await server.refusal(told("HANG"))
        assert time.monotonic() - start < 5
        assert (refusal.status, refusal.code) == (400, "invalid_audio")
        assert "the decoder ended at its deadline of 1 s" in str(refusal)
        await until(lambda: not worker_processes())

    run(test)


def test_the_process_of_a_cancelled_request_is_killed(run: Any, planted: None) -> None:
    async def test(server: Server) -> None:
        asked = asyncio.create_task(server.decode(told("HANG")))
        await until(lambda: len(server.decoders._all) == 1, 10)
        await asyncio.sleep(0.1)
        (process,) = worker_processes()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await until(lambda: not process.is_running(), 1)
        await server.works()

    run(test)


def test_a_process_that_died_idle_is_replaced(run: Any) -> None:
    async def test(server: Server) -> None:
        await server.decode(GOOD)
        (process,) = worker_processes()
        process.kill()
        await until(lambda: not process.is_running())
        await asyncio.sleep(0.1)
        await server.works()

    run(test)


def test_the_wait_for_a_process_is_limited(run: Any, planted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "FREE_S", 0.5)

    async def test(server: Server) -> None:
        hanging = [asyncio.create_task(server.decode(told("HANG"))) for _ in range(2)]
        await asyncio.sleep(0)
        refusal = await server.refusal(GOOD)
        assert (refusal.status, refusal.code) == (429, "overloaded")
        waiting = [asyncio.create_task(server.decode(GOOD)) for _ in range(2)]
        await asyncio.sleep(0.1)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*waiting)
        assert len(server.decoders._all) <= 2

    run(test)


def test_the_smallest_file_is_decoded_first(run: Any) -> None:
    order: list[int] = []

    async def test(server: Server) -> None:
        places = decoders.Places(1)
        await places.take(1)

        async def one(size: int) -> None:
            await places.take(size)
            order.append(size)
            places.give()

        waiting = [asyncio.create_task(one(size)) for size in (30, 10, 20, 40)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        places.give()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert order == [20, 30, 40] and places.free == 1

    run(test)
    assert order


def test_long_files_that_wait_for_room_keep_no_short_one_waiting(run: Any) -> None:
    """A long file without room leaves its process, and is decoded again once there is room."""

    async def test(server: Server) -> None:
        short = 3 * len(SAMPLES) // 2
        server.budget = Budget(64 * MIB, 32 * MIB, COPIES * 4 * short)
        long = inputs.encoded(np.tile(SAMPLES, 2))
        with server.budget.hold() as other:
            await other.add_clip((64 * MIB - MIB) * 7 // 8 // COPIES)
            waiting = [asyncio.create_task(server.decode(long)) for _ in range(4)]
            await until(lambda: len(server.budget._audio) == 4, 10)
            await server.decode(GOOD)
            assert len(server.budget._audio) == 4
        for clip in await asyncio.gather(*waiting):
            assert (clip.samples == decode.decode(long, BOUNDS, RATE).samples).all()

    run(test)


def test_samples_without_room_are_a_429(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("voxtral_serve.guard.budget.WAIT_S", 0.1)

    async def test(server: Server) -> None:
        with server.budget.hold() as other, server.budget.hold() as held:
            await other.add_clip(server.budget.size // COPIES - 1000)
            with pytest.raises(RefusedError, match="as much audio as this server takes"):
                await server.decoders.decode(GOOD, BOUNDS, RATE, "file", held)
        await server.works()

    run(test)


def test_a_decoder_has_no_environment_no_files_and_no_vllm(run: Any, planted: None) -> None:
    async def test(server: Server) -> None:
        imported, variables, openable = (await server.decode(told("FACTS"))).samples
        kept = sum(name in os.environ for name in processes.KEPT)
        assert (imported, openable) == (0, 0)
        assert variables <= len(decoders.ENVIRONMENT) + kept + 1  # Python itself may set LC_CTYPE

    run(test)


def test_a_decoder_inherits_no_files(run: Any) -> None:
    """uvloop does not close those that are inheritable."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)

    async def test(server: Server) -> None:
        worker = await server.decoders._worker()
        server.decoders._idle.append(worker)
        assert sorted(os.listdir(f"/proc/{worker.process.pid}/fd")) == ["0", "1", "2"]

    try:
        run(test)
    finally:
        os.close(reader)
        os.close(writer)


def test_nothing_is_written_to_the_servers_output(run: Any, planted: None, capfd: pytest.CaptureFixture[str]) -> None:
    run(lambda server: server.decode(told("NOISE")))
    assert capfd.readouterr() == ("", "")


def test_a_decoder_that_cannot_start_says_why(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "soundfile.py").write_text("raise OSError('no libsndfile here')")

    async def test(server: Server) -> None:
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        with pytest.raises(RuntimeError, match=r"a decoder cannot start .*OSError: no libsndfile here"):
            await server.decode(GOOD)

    run(test)


def test_no_decoder_outlives_the_server(planted: None) -> None:
    """Killed at once, while a decoder hangs."""
    code = f"""
        import asyncio, sys
        sys.path[:] = {sys.path[1:]!r}
        from fractions import Fraction
        from voxtral_serve.audio.decode import Bounds
        from voxtral_serve.guard.budget import Budget
        from voxtral_serve.guard.decoders import Decoders

        async def main():
            sys.path.insert(0, {sys.path[0]!r})
            decoders, budget = Decoders(1, {MEMORY}), Budget(1 << 26, 1 << 25)
            with budget.hold() as held:
                await decoders.decode(bytes.fromhex({told("HANG").hex()!r}), Bounds(Fraction(4), "", 1 << 20), 16000,
                                      "file", held)

        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT) as server:
        try:
            end = time.monotonic() + 30
            while not (children := psutil.Process(server.pid).children()):
                assert time.monotonic() < end
                time.sleep(0.05)
            time.sleep(1)
        finally:
            server.kill()
    time.sleep(1)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_memory_follows_from_the_limits() -> None:
    assert Decoders.of_process(1, RULES).memory > 512 * MIB
    bounds = BOUNDS._replace(seconds=Fraction(3601), most_bytes=1_500_000_000)
    assert Decoders.of_process(1, RULES._replace(file_bytes=GIB, bounds=bounds)).memory > 2 * GIB + 2 * 3600 * RATE * 4


def test_an_answer_that_is_none_ends_the_decoder(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that runs a client's code: more samples than were asked for, codes of its own, no JSON."""
    monkeypatch.setattr(processes, "END_S", 0.05)
    real = decoders.START
    answers = [b"{}", b"[]", b"\xff", json.dumps({"samples": 1 << 40}).encode(), json.dumps({"samples": "1"}).encode()]
    answers += [json.dumps({"error": "a", "code": code, "ends": False}).encode() for code in ("made_up", ["x"])]

    async def test(server: Server) -> None:
        for answer in answers:
            monkeypatch.setattr(decoders, "START", LIAR % (len(GOOD), answer))
            refusal = await server.refusal(GOOD)
            assert (refusal.status, refusal.code) == (400, "invalid_audio"), answer
            assert str(refusal).startswith("file: the decoder ended with signal SIGKILL")
        monkeypatch.setattr(decoders, "START", real)
        await server.works()

    run(test)
