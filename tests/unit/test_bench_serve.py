"""The life of the server that the benchmark starts, with a fake `vllm` command in place of the real one."""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from fakeserver import MODEL, write_dataset

from bench import BenchError, serve
from bench.__main__ import main

pytestmark = pytest.mark.flaky(reruns=2)  # it compares times, and a core may be busy: tests/README.md

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
TEXTS = {f"c{number:02}": f"alpha beta number {number}" for number in range(6)}
PR_SET_CHILD_SUBREAPER = 36

# Where it runs, behaviour.json says what it does and calls.jsonl what became of it. Like the real one it has a child
# that ends only when it is told to, and that holds no port.
FAKE_VLLM = """\
import json, os, signal, subprocess, sys, threading, time
from pathlib import Path
sys.path.insert(0, {tests!r})

config = json.loads(Path("behaviour.json").read_text())
port = int(sys.argv[sys.argv.index("--port") + 1])
print("vLLM starts", flush=True)
print(config.get("says", ""), flush=True)
if config.get("deaf") == "child":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = subprocess.Popen(["/bin/sleep", "300"], process_group=0 if config.get("own group") else None)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
if config.get("deaf") == "both":
    signal.signal(signal.SIGTERM, lambda *_: Path("told").touch())
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps(dict(pid=os.getpid(), child=sleeper.pid, port=port, arguments=sys.argv[1:])) + "\\n")
if "dies" in config:
    print(config["dies"], file=sys.stderr)
    sys.exit(3)
if config.get("hangs"):
    time.sleep(300)

import fakeserver
from fakeserver import Answer, FakeServer

get = fakeserver._Handler.do_GET
def do_get(self):
    if self.path == "/health":
        self._send(config.get("health", 200), b"")
    elif config.get("keyed") and self.path == "/v1/models":
        self._send(401, b"")
    elif config.get("keyed") and self.path == "/":
        self._send(200, b"", headers=[("Content-Type", "text/html; charset=utf-8")])
    else:
        get(self)
fakeserver._Handler.do_GET = do_get
fake = FakeServer({{name: Answer(**answer) for name, answer in config.get("answers", {{}}).items()}})
fake._lock = threading.Lock()
if config.get("leaves"):
    threading.Timer(config["leaves"], os._exit, [7]).start()
fakeserver._Server(("127.0.0.1", port), fake).serve_forever(0.02)
"""


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


class Vllm:
    """A fake `vllm` command, its config, and the directory that it serves."""

    def __init__(self, root: Path) -> None:
        self.config, self.directory, self.log = root / "vllm.yaml", root / "checkpoint", root / "vllm.log"
        self.python = root / "bin/python"  # as whose neighbour bench.serve finds `vllm`
        self.data, self.out = root / "data", root / "out"
        self.port = serve.free_port()
        self.directory.mkdir()
        self.config.write_text("model: .")
        self.python.parent.mkdir()
        command = self.python.with_name("vllm")
        command.write_text(f"#!{PYTHON}\n" + FAKE_VLLM.format(tests=str(ROOT / "tests/support")))
        command.chmod(0o755)
        self.does()

    def does(self, **config: Any) -> None:
        (self.directory / "behaviour.json").write_text(json.dumps(config))

    def transcribes(self, **changes: Any) -> None:
        """Answer perfectly, but for the changed clips."""
        answers = {f"{clip}.wav": {"text": text} for clip, text in TEXTS.items()}
        self.does(answers=answers | {f"{clip}.wav": answer for clip, answer in changes.items()})

    def server(self) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        return serve.server(self.config, self.directory, self.port, self.log)

    def calls(self) -> list[dict[str, Any]]:
        path = self.directory / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def left(self) -> set[int]:
        """The processes that it ever started and that still run: found by their pids, and by their session."""
        pids = {call[name] for call in self.calls() for name in ("pid", "child")}
        leaders = {call["pid"] for call in self.calls()}
        left = set()
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                known = each.pid in pids or os.getsid(each.pid) in leaders
                if known and each.status() != psutil.STATUS_ZOMBIE:
                    left.add(each.pid)
        return left

    def run_flags(self, *more: str) -> list[str]:
        paths = ["--serve", str(self.config), "--dir", str(self.directory), "--dataset", str(self.data)]
        return ["run", *paths, "--out", str(self.out), "--warmup", "1", *more]

    def serve_flags(self) -> list[str]:
        paths = ["--config", str(self.config), "--dir", str(self.directory)]
        return ["serve", *paths, "--port", str(self.port)]

    def start(self, flags: list[str], stop_timeout_s: float = 10) -> subprocess.Popen[str]:
        """`python -m bench FLAGS` as a process that finds the fake, with SIGINT on as it is in a terminal."""
        code = f"""if True:
            import runpy, signal, sys
            sys.executable = {str(self.python)!r}
            signal.signal(signal.SIGINT, signal.default_int_handler)
            from bench import serve
            serve.STOP_TIMEOUT_S = {stop_timeout_s}
            runpy.run_module("bench", run_name="__main__")"""
        command = [PYTHON, "-c", code, *flags]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    fake = Vllm(tmp_path)
    monkeypatch.setattr(sys, "executable", str(fake.python))
    monkeypatch.setattr(serve, "START_TIMEOUT_S", 20)
    yield fake
    for pid in fake.left():  # of a test that failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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


# ---- Up, and down again


def test_up_within_and_gone_after(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # has no part in reaching 127.0.0.1
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with serve.server(vllm.config, vllm.directory, vllm.port, vllm.log, "--flag", "x") as process:
        monkeypatch.delenv("HTTP_PROXY")
        models = requests.get(f"http://127.0.0.1:{vllm.port}/v1/models", timeout=5).json()
        assert models["data"][0]["id"] == MODEL
        (call,) = vllm.calls()
        assert vllm.left() == {call["pid"], call["child"]}
        assert call["pid"] == process.pid
    own = ["--host", "127.0.0.1", "--port", str(vllm.port)]
    assert call["arguments"] == ["serve", "--config", str(vllm.config), *own, "--flag", "x"]
    assert vllm.left() == set()
    assert process.returncode == -signal.SIGTERM
    assert vllm.log.read_text().startswith("vLLM starts")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_gone_after_an_exception(vllm: Vllm, error: type[BaseException]) -> None:
    with pytest.raises(error, match="inside"), vllm.server():
        assert len(vllm.left()) == 2
        raise error("inside")
    assert vllm.left() == set()


@pytest.mark.parametrize("deaf", ["both", "child"])
def test_who_ignores_sigterm_is_killed(vllm: Vllm, deaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a child alone, whose parent has ended by then."""
    monkeypatch.setattr(serve, "STOP_TIMEOUT_S", 0.6)
    vllm.does(deaf=deaf)
    with vllm.server():
        assert len(vllm.left()) == 2
        start = time.monotonic()
    assert time.monotonic() - start >= 0.6
    assert vllm.left() == set()
    assert (vllm.directory / "told").exists() == (deaf == "both")  # politely first


def test_a_child_in_a_group_of_its_own_ends_too(vllm: Vllm) -> None:
    vllm.does(**{"own group": True})
    with vllm.server():
        assert len(vllm.left()) == 2
    assert vllm.left() == set()


@pytest.mark.usefixtures("subreaper")
def test_zombies_are_not_waited_for(vllm: Vllm) -> None:
    with vllm.server():
        start = time.monotonic()
    assert time.monotonic() - start < 5
    assert vllm.left() == set()
    assert psutil.Process(vllm.calls()[0]["child"]).status() == psutil.STATUS_ZOMBIE  # or this tested nothing


# ---- It does not come up


DEATH = """\
(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7)   File "core.py", line 1, in <module>
(EngineCore pid=7)     raise error
(EngineCore pid=7) torch.OutOfMemoryError: 3 GiB are missing
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above."""


def test_a_death_at_the_start_names_its_cause(vllm: Vllm) -> None:
    vllm.does(dies="\n".join(f"loading {number}" for number in range(100)) + "\n" + DEATH)
    with pytest.raises(BenchError) as raised, vllm.server():
        pytest.fail("it never answered")
    lines = str(raised.value).splitlines()
    assert lines[0] == "vllm serve exited with status 3 during its start."
    assert lines[1] == f"The last lines of {vllm.log}:"
    expected = [f"loading {number}" for number in range(100)] + DEATH.splitlines()
    assert lines[2:-1] == [f"  {line}" for line in expected[-25:]]
    assert lines[-1] == "cause: torch.OutOfMemoryError: 3 GiB are missing"
    assert len(vllm.calls()) == 1
    assert vllm.left() == set()  # the child, too, which outlived its parent


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
    ("log", "cause"),
    [
        (DIED, "TypeError: unhashable type: 'list'"),
        (OF_A_WORKER, "torch.OutOfMemoryError: 3 GiB are missing"),
        (OF_THE_API, "PatchError: it has drifted"),
        (WARNED, None),
    ],
)
def test_the_cause_of_a_death(log: str, cause: str | None) -> None:
    """The engine's last exception: no warning that quotes one, no request's, and none that points to another."""
    assert serve.cause(log) == cause


def test_a_death_without_an_exception(vllm: Vllm) -> None:
    vllm.does(dies="error: no such option")
    with pytest.raises(BenchError, match=r"status 3(.|\n)*  error: no such option\nThe log has no exception\."):
        vllm.server().__enter__()


@pytest.mark.parametrize("config", [{"hangs": True}, {"health": 503}])
def test_no_answer_in_time(vllm: Vllm, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "START_TIMEOUT_S", 1.5)
    vllm.does(**config)
    with pytest.raises(BenchError) as raised, vllm.server():
        pytest.fail("it never answered")
    assert f"did not respond at http://127.0.0.1:{vllm.port} within 1.5 s" in str(raised.value)
    assert "  vLLM starts" in str(raised.value)
    assert len(vllm.calls()) == 1
    assert vllm.left() == set()


def test_a_port_that_is_taken(vllm: Vllm, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", vllm.port))
        other.listen()
        assert main(vllm.serve_flags()) == 2
    assert f"error: port {vllm.port} of 127.0.0.1 is in use" in capsys.readouterr().err
    assert vllm.calls() == []


@pytest.mark.parametrize("missing", ["config", "directory"])
def test_a_path_that_is_missing(vllm: Vllm, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = vllm.config.with_name("elsewhere")
    setattr(vllm, missing, path)
    assert main(vllm.serve_flags()) == 2
    kind = {"config": "a vLLM config file", "directory": "the checkpoint's directory"}[missing]
    assert f"error: {path} does not exist: expected {kind}" in capsys.readouterr().err


def test_no_vllm(vllm: Vllm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = vllm.python.with_name("vllm")
    elsewhere = vllm.directory.parent / "path"
    elsewhere.mkdir()
    monkeypatch.setenv("PATH", str(elsewhere))
    command.rename(elsewhere / "vllm")
    with vllm.server():  # found on PATH
        pass
    (elsewhere / "vllm").unlink()
    assert main(vllm.serve_flags()) == 2
    assert f"error: no `vllm` command beside {vllm.python} or on PATH" in capsys.readouterr().err


# ---- python -m bench serve


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_serve_until_a_signal(vllm: Vllm, number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # under nohup it would be ignored there as well
    process = vllm.start([*vllm.serve_flags(), "--", "--flag", "x"])
    signal.signal(number, before)
    assert process.stdout
    url = f"http://127.0.0.1:{vllm.port}"
    assert process.stdout.readline() == f"Serving {MODEL} at {url} (this machine only). Press Ctrl-C to stop.\n"
    assert process.stdout.readline() == "In another terminal:\n"
    assert process.stdout.readline() == "\n"
    request = process.stdout.readline()
    assert request == f"  curl {url}/v1/audio/transcriptions -F model={MODEL} -F file=@{serve.SAMPLE}\n"
    assert (ROOT / serve.SAMPLE).is_file()
    assert vllm.calls()[0]["arguments"][-2:] == ["--flag", "x"]
    assert len(vllm.left()) == 2
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in stderr
    assert re.search(r"vLLM is ready after \d+ s: importing vLLM \d+ s", stderr)
    assert vllm.left() == set()


def test_serve_with_a_key(vllm: Vllm) -> None:
    """It is not told, and the page is."""
    vllm.does(keyed=True)
    process = vllm.start(vllm.serve_flags())
    assert process.stdout
    url = f"http://127.0.0.1:{vllm.port}"
    assert process.stdout.readline() == f"Serving with a key at {url} (this machine only). Press Ctrl-C to stop.\n"
    assert process.stdout.readline() == f"To try it in a browser: {url}\n"
    told = [process.stdout.readline() for _ in range(3)]
    assert told[2].startswith(f'  curl {url}/v1/audio/transcriptions -H "Authorization: Bearer KEY" -F model=MODEL ')
    process.terminate()
    process.communicate(timeout=60)


def test_sigterm_before_it_is_up(vllm: Vllm) -> None:
    vllm.does(hangs=True)
    process = vllm.start(vllm.serve_flags())
    wait_until(lambda: len(vllm.calls()) == 1)
    process.terminate()
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (0, "")
    assert "Traceback" not in stderr
    assert vllm.left() == set()


def test_a_second_ctrl_c_leaves_nothing_behind(vllm: Vllm) -> None:
    vllm.does(deaf="both")
    process = vllm.start(vllm.serve_flags(), 1)
    assert process.stdout
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    wait_until(lambda: (vllm.directory / "told").exists())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in stderr
    assert vllm.left() == set()


def test_serve_notices_that_vllm_ended(vllm: Vllm, capsys: pytest.CaptureFixture[str]) -> None:
    vllm.does(leaves=1.5)
    assert main(vllm.serve_flags()) == 2
    error = capsys.readouterr().err
    assert "error: vllm serve exited with status 7." in error
    assert "  vLLM starts" in error
    assert vllm.left() == set()


# ---- python -m bench run --serve


PATCHES = "(EngineCore pid=7) INFO [plugin.py:55] voxtral-serve patches: from_pretrained applied, is_fast not needed"
WEIGHTS = "(Worker pid=9) INFO [model_runner.py:425] Model loading took 8.27 GiB memory and 2.5 seconds"
CPU_CACHE = "(Worker pid=9) INFO [cpu_worker.py:260] Explicitly set (1.0/23.54) GiB for KV cache on node 0."
LOG = "\n".join([PATCHES, WEIGHTS, CPU_CACHE])


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
def test_memory_in_the_log(tmp_path: Path, lines: list[str], weights: float | None, cache: float | None) -> None:
    log = tmp_path / "server.log"
    log.write_text("\n".join(lines))
    expected = [None if amount is None else round(amount * 2**30) for amount in (weights, cache)]
    assert list(serve.logged_memory(log).values()) == expected
    assert serve.logged_patches(log) is None


def test_a_whole_run(vllm: Vllm) -> None:
    write_dataset(vllm.data, TEXTS)
    vllm.transcribes()
    vllm.does(**json.loads((vllm.directory / "behaviour.json").read_text()), says=LOG)
    process = vllm.start(vllm.run_flags())
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 0, stderr
    assert "6/6 completed, 0 failed" in stdout
    assert (vllm.out / "server.log").read_text().startswith("vLLM starts")
    summary = json.loads((vllm.out / "summary.json").read_text())
    assert (summary["completed"], summary["quality"]["wer"]["value"]) == (6, 0.0)
    assert summary["memory"]["source"] == "rss_process_tree"
    assert (summary["run"]["serve"], summary["run"]["url"]) == (str(vllm.config), None)
    record = json.loads((vllm.out / "run.json").read_text())
    server, memory = record["environment"]["server"], record["memory"]
    assert 0.2 < server["startup_s"] < 20
    assert server["patches"] == {"from_pretrained": "applied", "is_fast": "not needed"}
    assert server["config"] == {"model": "."}
    assert server["versions"]["voxtral-serve"]
    assert (memory["weights_bytes"], memory["kv_cache_bytes"]) == (round(8.27 * 2**30), 2**30)
    assert memory["host_rss_peak_bytes"] == memory["peak_bytes"] >= memory["end_bytes"] > 2**20
    assert (memory["device_peak_bytes"], memory["other_bytes"]) == (None, None)  # what is resident has no such parts
    assert len(vllm.calls()) == 1
    assert vllm.left() == set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted(vllm: Vllm, number: signal.Signals) -> None:
    write_dataset(vllm.data, TEXTS)
    vllm.transcribes(c03={"text": "late", "delay_s": 60})
    process = vllm.start(vllm.run_flags())
    rows = vllm.out / "requests.jsonl"
    wait_until(lambda: rows.exists() and rows.read_text().count("\n") == 3)
    assert len(vllm.left()) == 2
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "3/6 completed, 0 failed, 3 without an answer yet" in stdout
    assert "Traceback" not in stderr
    assert vllm.left() == set()


def test_resume_on_another_port(vllm: Vllm, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(vllm.data, TEXTS)
    vllm.transcribes(c02={"status": 500})
    assert main(vllm.run_flags()) == 1
    vllm.transcribes()
    with socket.socket() as holder:  # of the port, so that it cannot be given out again
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", vllm.calls()[0]["port"]))
        assert main(vllm.run_flags("--resume")) == 0
    first, second = vllm.calls()
    assert first["port"] != second["port"]
    ids = [json.loads(line)["id"] for line in (vllm.out / "requests.jsonl").read_text().splitlines()]
    assert ids == [*TEXTS, "c02"]

    log = (vllm.out / "server.log").read_bytes()
    here, there = vllm.config, vllm.config.with_name("other.yaml")
    there.write_text(here.read_text())
    vllm.config = there
    capsys.readouterr()
    assert main(vllm.run_flags("--resume")) == 2
    assert f"serve was '{here}', is '{there}'" in capsys.readouterr().err
    vllm.config = here
    here.write_text("max_model_len: 1024")
    assert main(vllm.run_flags("--resume")) == 2
    assert "config_sha256 was" in capsys.readouterr().err
    here.unlink()
    assert main(vllm.run_flags("--resume")) == 2
    assert f"cannot read {here} (No such file or directory)" in capsys.readouterr().err
    # Refused before a server starts
    assert len(vllm.calls()) == 2
    assert (vllm.out / "server.log").read_bytes() == log
    assert vllm.left() == set()


def test_a_run_whose_server_dies(vllm: Vllm, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(vllm.data, TEXTS)
    vllm.does(dies=DEATH)
    assert main(vllm.run_flags()) == 2
    error = capsys.readouterr().err
    assert f"The last lines of {vllm.out / 'server.log'}:" in error
    assert "cause: torch.OutOfMemoryError" in error
    assert not (vllm.out / "requests.jsonl").exists()


def test_a_url_and_a_config_are_one_too_many(vllm: Vllm, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(vllm.run_flags("--url", "http://127.0.0.1:1"))
    assert stopped.value.code == 2
    assert "--url: not allowed with argument --serve" in capsys.readouterr().err
    assert vllm.calls() == []


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", "importing vLLM"),
        ("INFO [model.py:733] Resolved architecture: VoxtralRealtimeEncodeOnce\n", "starting the engine"),
        ("Resolved architecture: A\nLoading weights took 0.22 seconds\n", "compiling and warming up"),
    ],
)
def test_the_phase_of_a_start(lines: str, expected: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(lines)
    assert serve.phase(log) == expected


def test_a_start_says_what_took_its_time() -> None:
    begun = {"importing vLLM": 100.0, "starting the engine": 114.2, "starting the API": 140.0}
    assert serve.took(begun, 141.1) == (
        "vLLM is ready after 41 s: importing vLLM 14 s, starting the engine 26 s, starting the API 1 s"
    )


@pytest.mark.parametrize(("config", "flags"), [("profiles/fast.yaml", True), ("vllm_config.yaml", False)])
def test_make_serve_changes_profiles_for_a_cpu_and_not_the_contests_configuration(config: str, flags: bool) -> None:
    command = ["make", "--dry-run", "serve", *([] if flags else [f"CONFIG={config}"])]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"bench serve --config {config} " in printed
    assert ("--enforce-eager" in printed) == flags
