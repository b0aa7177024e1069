"""The launcher of `vllm serve`, with a fake `vllm` command in place of the real one."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from fakeserver import MODEL
from fakevllm import DEATH, Vllm, wait_until
from places import ROOT

from bench.measure import engine, leash
from bench.measure.errors import MeasureError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    fake = Vllm(tmp_path)
    monkeypatch.setattr(sys, "executable", str(fake.python))
    yield fake
    fake.kill()


@pytest.fixture
def subreaper() -> Iterator[None]:
    """Orphans fall to this process, which does not wait for them: as in a container without an init."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def test_bench_and_the_package_have_the_same_launcher() -> None:
    link = ROOT / "bench/measure"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "src/voxtral_serve/measure"


# ---- Up, and down again


def test_up_within_and_gone_after(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # has no part in reaching 127.0.0.1
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with vllm.server("--flag", "x") as server:
        monkeypatch.delenv("HTTP_PROXY")
        models = requests.get(f"{server.url}/v1/models", timeout=5).json()
        assert models["data"][0]["id"] == MODEL
        (call,) = vllm.calls()
        assert vllm.left() == {call["pid"], call["child"]}
        assert (call["pid"], server.poll(), server.healthy()) == (server.pid, None, True)
    own = ["--host", "127.0.0.1", "--port", str(vllm.port)]
    assert call["arguments"] == ["serve", "--config", str(vllm.config), *own, "--flag", "x"]
    assert vllm.left() == set()
    assert (server.wait(), server.healthy()) == (-signal.SIGTERM, False)
    assert vllm.log.read_text().startswith("vLLM starts")
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert [name for name, _ in server.phases] == ["importing vLLM"]
    assert "vLLM is ready after " in capsys.readouterr().err


def test_a_model_a_key_and_variables(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is in no argument, which vLLM logs, and no file has other keys."""
    for name in engine.OTHER_KEYS:
        monkeypatch.setenv(name, "keys.yaml")
    with vllm.server(model="name", key="secret", environment={"NO_KEY": "x"}, show=False):
        (call,) = vllm.calls()
    assert call["arguments"][:2] == ["serve", "name"]
    assert "secret" not in call["arguments"]
    assert call["keys"].items() >= {"VLLM_API_KEY": "secret", "NO_KEY": "x"}.items()
    assert not call["keys"].keys() & set(engine.OTHER_KEYS)


def test_the_exit_status_of_a_server_that_is_told_to_end(vllm: Vllm) -> None:
    with vllm.server() as server:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == -signal.SIGTERM
        server.send_signal(signal.SIGTERM)  # to nobody: its process id may be another's
        wait_until(lambda: not vllm.left())  # the child as well


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_gone_after_an_exception(vllm: Vllm, error: type[BaseException]) -> None:
    with pytest.raises(error, match="inside"), vllm.server():
        assert len(vllm.left()) == 2
        raise error("inside")
    assert vllm.left() == set()


@pytest.mark.parametrize("deaf", ["both", "child"])
def test_who_ignores_sigterm_is_killed(vllm: Vllm, deaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a child alone, whose parent has ended by then."""
    monkeypatch.setattr(engine, "STOP_S", 0.6)
    vllm.does(deaf=deaf)
    with vllm.server():
        assert len(vllm.left()) == 2
    assert vllm.left() == set()
    assert (vllm.directory / "told").exists() == (deaf == "both")  # politely first


def test_a_child_in_a_group_of_its_own_ends_too(vllm: Vllm) -> None:
    vllm.does(**{"own group": True})
    with vllm.server():
        assert len(vllm.left()) == 2
    assert vllm.left() == set()


@pytest.mark.usefixtures("subreaper")
def test_zombies_are_not_waited_for(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "STOP_S", 10_000)
    with vllm.server():
        pass
    assert vllm.left() == set()
    assert psutil.Process(vllm.calls()[0]["child"]).status() == psutil.STATUS_ZOMBIE  # or this tested nothing


# ---- However the launcher ends


@pytest.mark.parametrize("deaf", [None, "both"])
def test_the_server_ends_with_a_launcher_that_is_killed(vllm: Vllm, deaf: str | None) -> None:
    vllm.does(deaf=deaf)
    launcher = vllm.start(vllm.serve_flags(), stop_s=1)
    assert launcher.stdout
    launcher.stdout.readline()
    # A Ray worker that ends kills its children: none of these may be one.
    below = [each for each in psutil.Process(launcher.pid).children() if each.status() != psutil.STATUS_ZOMBIE]
    assert (below, len(vllm.left())) == ([], 2)
    launcher.kill()
    wait_until(lambda: not vllm.left())
    launcher.communicate()


@pytest.mark.parametrize("dies", [None, "at once"])
def test_the_server_ends_with_a_launcher_that_ended_before_it_was_told_of_the_server(
    vllm: Vllm, dies: str | None
) -> None:
    """Nobody reads the process id or the exit status, nor waits for the server."""
    vllm.does(**({"dies": dies} if dies else {}))
    read, write = os.pipe()
    os.close(read)
    command = [str(vllm.python.with_name("vllm")), "--port", str(vllm.port)]
    with vllm.log.open("wb") as log:
        leashed = subprocess.Popen(
            [sys.executable, "-P", leash.__file__, str(write), "1", *command],
            cwd=vllm.directory,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(write,),
        )
    os.close(write)
    leashed.wait()
    wait_until(lambda: len(vllm.calls()) == 1)
    assert leashed.stdin
    leashed.stdin.close()
    wait_until(lambda: not vllm.left())
    assert "BrokenPipeError" not in vllm.log.read_text()


def test_the_child_of_a_server_that_is_killed_ends_with_it(vllm: Vllm) -> None:
    with vllm.server() as server:
        server.send_signal(signal.SIGKILL)
        assert server.wait(60) == -signal.SIGKILL
        wait_until(lambda: not vllm.left())


def test_the_server_ends_with_a_leash_that_is_killed(vllm: Vllm) -> None:
    with vllm.server() as server:
        os.kill(vllm.calls()[0]["leash"], signal.SIGKILL)
        assert server.wait(60) == -signal.SIGKILL
        wait_until(lambda: not vllm.left())


# ---- It does not come up


def test_a_death_at_the_start_names_its_cause(vllm: Vllm) -> None:
    vllm.does(dies="\n".join(f"loading {number}" for number in range(100)) + "\n" + DEATH)
    with pytest.raises(MeasureError) as raised, vllm.server():
        pytest.fail("it never answered")
    lines = str(raised.value).splitlines()
    assert lines[0] == "vllm serve exited with status 3 during its start."
    assert lines[1] == f"The last lines of {vllm.log}:"
    expected = [f"loading {number}" for number in range(100)] + DEATH.splitlines()
    assert lines[2:-1] == [f"  {line}" for line in expected[-25:]]
    assert lines[-1] == "cause: torch.OutOfMemoryError: 3 GiB are missing"
    assert raised.value.one_line() == (
        "vllm serve exited with status 3 during its start: torch.OutOfMemoryError: 3 GiB are missing"
    )
    assert len(vllm.calls()) == 1
    assert vllm.left() == set()  # the child, too, which outlived its parent


def test_a_death_without_an_exception(vllm: Vllm) -> None:
    vllm.does(dies="error: no such option")
    with pytest.raises(MeasureError, match=r"status 3(.|\n)*  error: no such option\nThe log has no exception\.$"):
        vllm.server().__enter__()


@pytest.mark.parametrize("config", [{"hangs": True}, {"health": 503}])
def test_no_answer_in_time(vllm: Vllm, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.does(**config)
    healthy = engine.Engine.healthy

    def late(server: engine.Engine) -> bool:
        if vllm.calls():
            monkeypatch.setattr(engine, "START_TIMEOUT_S", 0)
        return healthy(server)

    monkeypatch.setattr(engine.Engine, "healthy", late)
    with pytest.raises(MeasureError) as raised, vllm.server():
        pytest.fail("it never answered")
    assert f"did not respond at http://127.0.0.1:{vllm.port} within 0 s" in str(raised.value)
    assert "  vLLM starts" in str(raised.value)
    assert len(vllm.calls()) == 1
    assert vllm.left() == set()


def test_a_port_that_is_taken(vllm: Vllm) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", vllm.port))
        other.listen()
        with pytest.raises(MeasureError, match=f"port {vllm.port} of 127.0.0.1 is in use"), vllm.server():
            pass
    assert vllm.calls() == []


@pytest.mark.parametrize("missing", ["config", "directory"])
def test_a_path_that_is_missing(vllm: Vllm, missing: str) -> None:
    path = vllm.config.with_name("elsewhere")
    setattr(vllm, missing, path)
    kind = {"config": "a vLLM config file", "directory": "the checkpoint's directory"}[missing]
    with pytest.raises(MeasureError, match=f"^{path} does not exist: expected {kind}$"), vllm.server():
        pass


def test_no_vllm(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    command = vllm.python.with_name("vllm")
    elsewhere = vllm.directory.parent / "path"
    elsewhere.mkdir()
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{elsewhere}{os.pathsep}{path}")
    command.rename(elsewhere / "vllm")
    with vllm.server():  # found on PATH
        pass
    monkeypatch.setenv("PATH", str(command.parent))
    with pytest.raises(MeasureError, match=f"no `vllm` command beside {vllm.python} or on PATH"), vllm.server():
        pass


def test_a_command_that_cannot_be_started(vllm: Vllm) -> None:
    with pytest.raises(MeasureError) as raised, vllm.server(command=("/no/vllm",)):
        pass
    assert raised.value.one_line() == (
        "/no/vllm cannot be started: FileNotFoundError: [Errno 2] No such file or directory: '/no/vllm'"
    )


def test_a_start_says_what_took_its_time() -> None:
    phases = [("importing vLLM", 14.2), ("starting the engine", 25.8), ("starting the API", 1.1)]
    assert engine.spent(phases) == "41 s: importing vLLM 14 s, starting the engine 26 s, starting the API 1 s"
