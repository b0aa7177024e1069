"""`python -m bench serve` and `bench run --serve`, with a fake `vllm` command in place of the real one."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakeserver import MODEL, write_dataset
from fakevllm import DEATH, TEXTS, Vllm, wait_until
from places import ROOT

from bench import serve
from bench.__main__ import main


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    fake = Vllm(tmp_path)
    monkeypatch.setattr(sys, "executable", str(fake.python))
    yield fake
    fake.kill()


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


def test_serve_notices_that_vllm_ended_before_it_said_its_model(vllm: Vllm) -> None:
    vllm.does(leaves="once it is up")
    process = vllm.start(vllm.serve_flags())
    stdout, error = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (2, "")
    assert "error: vllm serve exited with status 7." in error
    assert "Traceback (most recent call last)" not in error
    assert vllm.left() == set()


def test_serve_notices_that_vllm_ended(vllm: Vllm) -> None:
    process = vllm.start(vllm.serve_flags())
    assert process.stdout
    process.stdout.readline()  # it is up
    (vllm.directory / "leave").touch()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "error: vllm serve exited with status 7." in error
    assert "  vLLM starts" in error
    assert vllm.left() == set()


# ---- python -m bench run --serve


PATCHES = "(EngineCore pid=7) INFO [plugin.py:55] voxtral-serve patches: from_pretrained applied, is_fast not needed"
WEIGHTS = "(Worker pid=9) INFO [model_runner.py:425] Model loading took 8.27 GiB memory and 2.5 seconds"
CPU_CACHE = "(Worker pid=9) INFO [cpu_worker.py:260] Explicitly set (1.0/23.54) GiB for KV cache on node 0."
LOG = "\n".join([PATCHES, WEIGHTS, CPU_CACHE])


def test_a_whole_run(vllm: Vllm) -> None:
    write_dataset(vllm.data, TEXTS)
    vllm.transcribes()
    vllm.does(**json.loads((vllm.directory / "behaviour.json").read_text()), says=LOG)
    process = vllm.start(vllm.run_flags())
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "6/6 completed, 0 failed" in stdout
    assert (vllm.out / "server.log").read_text().startswith("vLLM starts")
    summary = json.loads((vllm.out / "summary.json").read_text())
    assert (summary["completed"], summary["quality"]["wer"]["value"]) == (6, 0.0)
    assert summary["memory"]["source"] == "rss_process_tree"
    assert (summary["run"]["serve"], summary["run"]["url"]) == (str(vllm.config), None)
    record = json.loads((vllm.out / "run.json").read_text())
    server, memory = record["environment"]["server"], record["memory"]
    assert server["startup_s"] > 0
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


@pytest.mark.parametrize(("config", "flags"), [("profiles/fast.yaml", True), ("vllm_config.yaml", False)])
def test_make_serve_changes_profiles_for_a_cpu_and_not_the_contests_configuration(config: str, flags: bool) -> None:
    command = ["make", "--dry-run", "serve", *([] if flags else [f"CONFIG={config}"])]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"bench serve --config {config} " in printed
    assert ("--enforce-eager" in printed) == flags
