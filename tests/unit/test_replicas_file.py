"""The compose file of several replicas, and the probes of a container, against a server that answers as told."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import DATA, ROOT
from fakeserver import Answer, FakeServer

from voxtral_serve import cli
from voxtral_serve.deploy import compose, probe

SECRET = {"VLLM_API_KEY": "of-the-server"}


def made(*gpus: str, tls: bool = False) -> Any:
    return yaml.safe_load(compose.compose(ROOT, gpus, "/profiles/realtime.yaml", tls))


def test_each_gpu_has_a_replica_and_nginx_the_port() -> None:
    services = made("0", "3", tls=True)["services"]
    one = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["realtime"]
    for number, gpu in enumerate(("0", "3")):
        replica = services[f"replica-{number}"]
        (device,) = replica["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "device_ids": [gpu], "capabilities": ["gpu"]}
        assert replica["networks"] == {"default": {"aliases": ["replicas"]}}
        assert f"replica-{number}-cache:/cache" in replica["volumes"]
        assert replica["command"] == ["--config", "/profiles/realtime.yaml"]
        assert replica["environment"] == one["environment"] | {"VOXTRAL_SERVE_REPLICA": f"replica-{number}"}
        # All else is that of the one server.
        changed = {name for name in one if replica.get(name) != one[name]}
        assert changed == {"command", "deploy", "environment", "ports", "volumes"}
    ports = {name: each["ports"] for name, each in services.items() if "ports" in each and name != "grafana"}
    assert ports == {"proxy": ["8000:8000", "443:8443"]}


def test_the_files_that_nginx_gets_are_there() -> None:
    proxy = made("0")["services"]["proxy"]
    for mount in proxy["volumes"]:
        assert (ROOT / mount.partition(":")[0]).is_file(), mount
    template = (ROOT / "deploy/nginx/upstreams.conf.template").read_text(encoding="utf-8")
    given = {*proxy["environment"], "NGINX_LOCAL_RESOLVERS"}
    assert {
        name for name in ("VOXTRAL_UPLOADS", "VOXTRAL_LIVE", "NGINX_LOCAL_RESOLVERS") if f"${{{name}}}" in template
    } <= given
    assert f"include {proxy['environment']['NGINX_ENVSUBST_OUTPUT_DIR']}/upstreams.conf;" in (
        ROOT / "deploy/nginx/nginx.conf"
    ).read_text(encoding="utf-8")
    assert not any("tls" in mount for mount in proxy["volumes"])
    assert sum("tls" in mount for mount in made("0", tls=True)["services"]["proxy"]["volumes"]) == 3


def test_the_file_fits_compose_s_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replicas", "--gpus", "0,1", "--tls"]) == 0
    (tmp_path / "made.yaml").write_text(capsys.readouterr().out)
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "made.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("gpus", ["", "0,", "0,0", "a", "0;1", "GPU 1"])
def test_gpus_that_are_none(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replicas", "--gpus", gpus]) == 1
    assert capsys.readouterr().err.startswith("voxtral-serve: --gpus has ")


def test_gpus_by_their_ids() -> None:
    ids = "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77,MIG-1b1b2c55-1c2c-5e5e-9d9d-000000000000"
    assert compose.gpu_ids(ids) == ids.split(",")


def test_without_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["replicas", "--gpus", "0"]) == 1
    assert "compose.yaml does not exist" in capsys.readouterr().err


# ---- The probes


def test_the_limits_of_nginx_are_just_above_the_guard_s() -> None:
    from voxtral_serve.guard.limits import FIELDS_BYTES, limits
    from voxtral_serve.units import MIB

    file_bytes = limits({}).file_bytes
    text = (ROOT / "deploy/nginx/nginx.conf").read_text(encoding="utf-8")
    upload, chat = (int(line.split()[1].rstrip("m;")) for line in text.splitlines() if "client_max_body_size" in line)
    for most, guard in ((upload, file_bytes + FIELDS_BYTES), (chat, file_bytes * 4 // 3 + FIELDS_BYTES)):
        assert guard < most * MIB <= guard + 2 * MIB


def test_the_clip_is_one_of_the_benchmark_s() -> None:
    assert probe.CLIP.read_bytes() == (DATA / "clips/000.opus").read_bytes()


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    return tmp_path / "seen"


def server(text: str, status: int = 200, sessions: str = "") -> FakeServer:
    """Its /health is /metrics: FakeServer has no /health of its own."""
    return FakeServer(default=Answer(text, status), metrics=lambda: sessions)


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = probe._get
    monkeypatch.setattr(probe, "_get", lambda url, *rest: real(url.replace("/health", "/metrics"), *rest))


@pytest.mark.usefixtures("healthy")
def test_ready_once_a_clip_is_transcribed_and_again_after_a_restart(
    seen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server("some words") as fake:
        for _ in range(3):
            probe.ready(fake.url, seen, probe.api_key(SECRET))
        assert fake.sent() == ["clip.opus"]
        assert fake.received[0].authorization == "Bearer of-the-server"
        assert fake.received[0].size == probe.CLIP.stat().st_size
        monkeypatch.setattr(probe, "server_start", lambda: "another")
        probe.ready(fake.url, seen, "")
        assert len(fake.sent()) == 2


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize(("text", "status", "why"), [(" ", 200, "empty transcript"), ("", 503, "answers 503")])
def test_not_ready_without_words(seen: Path, text: str, status: int, why: str) -> None:
    with server(text, status) as fake, pytest.raises(probe.NotReadyError, match=why):
        probe.ready(fake.url, seen, "")
    assert not seen.exists()


def test_not_ready_without_a_server(seen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["ready", "--url", "http://127.0.0.1:1", "--seen", str(seen)]) == 1
    assert capsys.readouterr().err.startswith("voxtral-serve: not ready: http://127.0.0.1:1/health does not answer")


def test_the_key_is_read_from_the_server_s_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("of-a-file\n")
    assert probe.api_key({**SECRET, "VLLM_API_KEY_FILE": str(tmp_path / "key")}) == "of-a-file"
    assert probe.api_key({}) == ""


def test_drain_waits_for_the_last_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "POLL_S", 0.01)
    left = iter((2, 1, 0))
    name = "voxtral_serve_live_sessions"
    with FakeServer(metrics=lambda: f"# TYPE {name} gauge\n{name}_ended_total 9.0\n{name} {next(left)}.0\n") as fake:
        assert cli.run(["drain", "--url", fake.url]) == 0
    assert next(left, None) is None
    with server("", sessions=f"{name} 3.0\n") as fake:
        assert cli.run(["drain", "--url", fake.url, "--within", "0.05"]) == 1
    assert probe.drain("http://127.0.0.1:1", 5) == 0
