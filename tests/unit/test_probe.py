"""The probes of a container, against a server that answers as told."""

from pathlib import Path

import pytest
from fakeserver import Answer, FakeServer
from places import DATA

from voxtral_serve import cli
from voxtral_serve.deploy import probe

SECRET = {"VLLM_API_KEY": "of-the-server"}


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
