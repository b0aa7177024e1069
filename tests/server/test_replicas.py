"""One address, several replicas: nginx with the configuration of deploy/nginx in front of processes that are killed.

The replicas are fakes with the routes of a server (support/fakereplica.py), and in the last test two servers of pico;
nginx is real. These tests need Debian's package `nginx-light`. Without it they are reported as not run.
"""

import contextlib
import http.client
import io
import json
import shutil
import signal
import socket
import ssl
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fakereplica
import live
import pytest
import requests
import soundfile
import uploads
from local_nginx import COMMAND, DEPLOYED, NGINX, FakeReplica, Proxy, answered_by
from places import PICO, ROOT
from servers import EAGER, at_once, short
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from bench import dataset
from bench.measure import engine
from voxtral_serve.deploy import probe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason=f"not run: nginx is not installed, `{COMMAND}` installs it"),
]
KEY = "a-key-that-no-log-may-have"
HEADERS = {"Authorization": f"Bearer {KEY}"}
MIB = 1 << 20
FAIL_S = 2  # fail_timeout of deploy/nginx/upstreams.conf.template
OUT_S = BACK_S = 5  # the longest time until a dead replica gets no request, and until one that is up again gets some


def post(url: str, size: int = 20_000, **fields: str) -> requests.Response:
    """One upload on a connection of its own."""
    path = fields.pop("path", "/v1/audio/transcriptions")
    data = io.BytesIO(bytes(size))
    return requests.post(f"{url}{path}", files={"file": ("a.wav", data)}, data=fields, headers=HEADERS, timeout=60)


class Load:
    """Clients that each send an upload after the other until they are told to stop. A context manager."""

    def __init__(self, url: str, clients: int = 16) -> None:
        self.url = url
        self.statuses: list[int] = []
        self.failures: list[str] = []
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def _client(self, number: int) -> None:
        while not self.stopping.is_set():
            try:
                answer = post(self.url, 10_000 + 1000 * number)
                self.statuses.append(answer.status_code)
                if answer.status_code != 200:
                    self.failures.append(f"{answer.status_code} {answer.text[:100]}")
            except requests.RequestException as error:
                self.failures.append(repr(error))


@pytest.fixture
def two(request: pytest.FixtureRequest) -> Iterator[list[FakeReplica]]:
    """Two fake replicas, with the test's parameter as their options."""
    replicas = [FakeReplica(*getattr(request, "param", ())) for _ in range(2)]
    try:
        for each in replicas:
            each.start()
        yield replicas
    finally:
        for each in replicas:
            if hasattr(each, "process") and each.process.poll() is None:
                each.end(signal.SIGKILL)


@pytest.fixture
def proxy(two: list[FakeReplica], tmp_path: Path) -> Iterator[Proxy]:
    with Proxy(tmp_path, [each.port for each in two]) as made:
        yield made


def test_nginx_takes_the_configuration(tmp_path: Path) -> None:
    made = Proxy(tmp_path, [1, 2])
    done = subprocess.run([*made.command, "-t"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr


def test_every_route_and_both_kinds_of_stream(proxy: Proxy) -> None:
    for path in fakereplica.READ:
        assert requests.get(proxy.url + path, timeout=10).json()["path"] == path
    for path in fakereplica.WRITTEN:
        assert post(proxy.url, path=path).json()["path"] == path
    assert requests.get(f"{proxy.url}/docs", timeout=10).status_code == 404
    for path in fakereplica.LIVE:
        with connect(proxy.url.replace("http", "ws") + path, additional_headers=HEADERS) as stream:
            assert json.loads(stream.recv())["path"] == path
            for number in range(20):
                stream.send(str(number))
                assert stream.recv(timeout=5) == str(number)
    with requests.post(
        f"{proxy.url}/v1/audio/transcriptions", files={"file": b"0"}, data={"stream": "true"}, stream=True, timeout=30
    ) as answer:
        times = [time.monotonic() for line in answer.iter_lines() if line]
    assert len(times) == fakereplica.EVENTS
    # Each event came by itself, not all of them at the end.
    assert times[-1] - times[0] > 0.5 * fakereplica.BETWEEN_S * (fakereplica.EVENTS - 1)


def test_the_largest_upload_arrives_unchanged_and_larger_ones_are_413(proxy: Proxy, two: list[FakeReplica]) -> None:
    through, direct = post(proxy.url, 24 * MIB), post(two[0].url, 24 * MIB)
    assert through.json()["size"] - direct.json()["size"] == 0
    assert through.status_code == 200
    assert post(proxy.url, 26 * MIB).json()["error"]["code"] == "the_guard_s"  # which says the limit
    refused = post(proxy.url, 28 * MIB)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_large")
    assert refused.headers["x-request-id"]
    assert post(proxy.url, 34 * MIB, path="/v1/chat/completions").status_code == 200


@pytest.mark.parametrize("two", [(0.2,)], indirect=True)
def test_a_killed_replica_loses_no_upload(two: list[FakeReplica], proxy: Proxy) -> None:
    first = two[0]
    with Load(proxy.url) as load:
        time.sleep(2)
        first.end(signal.SIGKILL)
        killed = time.time()
        time.sleep(OUT_S + 2)
    assert load.failures == []
    assert len(load.statuses) > 50
    lines = proxy.lines()
    resent = [line for line in lines if "," in line["upstream_status"]]
    assert resent, "nothing was in flight at the replica that was killed"
    # It is out of rotation: one request in FAIL_S tries it, and is sent to the other one.
    late = [line for line in resent if after(line, killed + OUT_S)]
    assert len(late) <= 1 + 2 / FAIL_S
    first.start()
    begin = time.monotonic()
    with Load(proxy.url, 4) as load:
        while not any(first.process.pid == answered_by(proxy.url) for _ in range(4)):
            assert time.monotonic() - begin < BACK_S
            time.sleep(0.2)
    assert load.failures == []


def after(line: dict[str, Any], moment: float) -> bool:
    return time.mktime(time.strptime(line["time"][:19], "%Y-%m-%dT%H:%M:%S")) > moment


@pytest.mark.parametrize("two", [(0.3,)], indirect=True)
def test_a_rolling_restart_loses_no_upload(two: list[FakeReplica], proxy: Proxy) -> None:
    with Load(proxy.url, 8) as load:
        for each in two:
            time.sleep(1)
            each.end(signal.SIGTERM)
            assert each.process.returncode in (0, -signal.SIGTERM)
            time.sleep(0.5)
            each.start("0.3", "1000", "starting")  # listens, and answers 503
            time.sleep(1)
            each.end(signal.SIGKILL)
            each.start()
            time.sleep(BACK_S)
    assert load.failures == []
    assert len(load.statuses) > 50


@pytest.mark.parametrize("two", [(1.0, 2)], indirect=True)
def test_when_all_are_full_the_answer_is_the_guard_s_429(two: list[FakeReplica], proxy: Proxy) -> None:
    answers: list[requests.Response] = []
    for _ in range(2):  # the second time shows that 429 took no replica out of rotation
        threads = [threading.Thread(target=lambda: answers.append(post(proxy.url))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 8  # two of each replica, each time
    assert all(answer.headers["retry-after"] == "1" for answer in answers if answer.status_code == 429)
    assert {each["upstream_status"] for each in proxy.lines()} == {"200", "429"}  # none was sent twice


def test_when_none_is_there_the_answer_is_503_and_says_when_to_come_again(two: list[FakeReplica], proxy: Proxy) -> None:
    for each in two:
        each.end(signal.SIGKILL)
    for _ in range(5):
        answer = post(proxy.url)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "not_ready"
    two[0].start()
    time.sleep(BACK_S)
    assert post(proxy.url).status_code == 200


@pytest.mark.parametrize("two", [(0.0, 1000, "starting")], indirect=True)
def test_a_replica_s_own_503_is_passed_on_when_all_are_starting(two: list[FakeReplica], proxy: Proxy) -> None:
    answers = [post(proxy.url) for _ in range(4)]
    assert {answer.status_code for answer in answers} == {503}
    assert {answer.headers["retry-after"] for answer in answers} == {"1"}
    assert {answer.json()["error"]["code"] for answer in answers} == {"not_ready"}


def test_streams_of_a_killed_replica_end_and_the_streamconnects_again(two: list[FakeReplica], proxy: Proxy) -> None:
    address = proxy.url.replace("http", "ws") + fakereplica.LIVE[0]
    with connect(address) as stream:
        pid = json.loads(stream.recv())["pid"]
        (dead,) = (each for each in two if each.process.pid == pid)
        dead.end(signal.SIGKILL)
        with pytest.raises(ConnectionClosed):
            stream.recv(timeout=OUT_S)
    for _ in range(4):
        with connect(address) as stream:
            assert json.loads(stream.recv())["pid"] != pid
    dead.start()
    time.sleep(BACK_S)
    url = f"{proxy.url}/v1/audio/transcriptions"
    with requests.post(url, files={"file": b"0"}, data={"stream": "true"}, stream=True, timeout=30) as answer:
        lines = answer.iter_lines()
        pid = json.loads(next(lines).removeprefix(b"data: "))["pid"]
        next(each for each in two if each.process.pid == pid).end(signal.SIGKILL)
        with pytest.raises(requests.exceptions.ChunkedEncodingError):
            list(lines)
    assert post(proxy.url, stream="true").text.count("data:") == fakereplica.EVENTS


@pytest.fixture
def five(tmp_path: Path) -> Iterator[tuple[list[FakeReplica], Proxy]]:
    """Five fake replicas behind nginx, which has sent uploads to each of them."""
    with contextlib.ExitStack() as stack:
        replicas = [FakeReplica(0.2).start() for _ in range(5)]
        for replica in replicas:
            stack.callback(replica.process.kill)
        proxy = stack.enter_context(Proxy(tmp_path, [replica.port for replica in replicas]))
        with ThreadPoolExecutor(20) as pool:
            assert {answer.status_code for answer in pool.map(lambda _: post(proxy.url), range(40))} == {200}
        yield replicas, proxy


def dead(replicas: list[FakeReplica]) -> list[FakeReplica]:
    time.sleep(1)
    return [replica for replica in replicas if replica.process.poll() is not None]


def test_an_upload_that_ends_a_replica_ends_one_other_at_most(five: tuple[list[FakeReplica], Proxy]) -> None:
    replicas, proxy = five
    answer = post(proxy.url, fatal="1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert len(dead(replicas)) == 2
    assert proxy.lines()[-1]["upstream_status"] == "502, 502"


def fails(address: str) -> int:
    with pytest.raises(InvalidStatus) as raised:
        connect(address)
    assert json.loads(raised.value.response.body)["error"]["code"] == "not_ready"
    return raised.value.response.status_code


@pytest.mark.parametrize("path", fakereplica.LIVE)
def test_a_handshake_that_ends_a_replica_ends_no_other(path: str, five: tuple[list[FakeReplica], Proxy]) -> None:
    replicas, proxy = five
    address = proxy.url.replace("http", "ws") + path
    assert fails(f"{address}?fatal=1") == 503
    (ended,) = dead(replicas)
    # Of one that is down, nothing has seen the handshake: it goes to another one.
    for _ in range(10):
        with connect(address) as stream:
            assert json.loads(stream.recv())["pid"] != ended.process.pid
    tried = [line["upstream"] for line in proxy.lines() if line["path"] == path]
    assert not any(f":{ended.port}" in addresses for addresses in tried[-2:])  # it is out of rotation
    for replica in replicas:
        replica.process.kill()
        replica.process.wait()
    assert fails(address) == 503


def test_a_handshake_goes_on_from_a_replica_that_is_down(two: list[FakeReplica], proxy: Proxy) -> None:
    address = proxy.url.replace("http", "ws") + fakereplica.LIVE[0]
    two[0].end(signal.SIGKILL)
    for _ in range(4):
        with connect(address) as stream:
            assert json.loads(stream.recv())["pid"] == two[1].process.pid
        time.sleep(FAIL_S / 2)
    assert any(str(two[0].port) in line["upstream"] for line in proxy.lines())
    two[0].start("0", "1000", "starting")  # it answers 503
    for _ in range(4):
        with connect(address) as stream:
            assert json.loads(stream.recv())["pid"] == two[1].process.pid
    assert any("503" in line["upstream_status"] for line in proxy.lines())


def test_a_handshake_goes_on_from_a_host_that_does_not_answer(two: list[FakeReplica], tmp_path: Path) -> None:
    """As one that is gone: no connection comes about, here because the queue of a listener is full."""
    with socket.socket() as deaf, socket.socket() as first, socket.socket() as second:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for client in (first, second):
            client.setblocking(False)
            client.connect_ex(deaf.getsockname())
        with Proxy(tmp_path, [deaf.getsockname()[1], two[0].port]) as proxy:
            address = proxy.url.replace("http", "ws") + fakereplica.LIVE[0]
            for _ in range(2):
                with connect(address) as stream:
                    assert json.loads(stream.recv())["pid"] == two[0].process.pid
            assert any("504" in line["upstream_status"] for line in proxy.lines())


def test_uploads_go_to_the_replica_with_the_fewest(two: list[FakeReplica], proxy: Proxy) -> None:
    for each in two:
        each.end(signal.SIGTERM)
    two[0].start(1.0)
    two[1].start(0.05)
    with Load(proxy.url, 8):
        time.sleep(6)
    by_port = [sum(line["upstream"].endswith(str(each.port)) for line in proxy.lines()) for each in two]
    assert by_port[1] > 3 * by_port[0] > 0  # by turns, both would have as many


def test_the_log_has_ids_and_no_key_and_no_query(two: list[FakeReplica], proxy: Proxy) -> None:
    secret = "secret-of-the-query"
    given = requests.get(
        f"{proxy.url}/v1/models?key={secret}", headers={"X-Request-Id": "mine-1", **HEADERS}, timeout=9
    )
    assert given.headers["x-request-id"] == "mine-1"
    made = post(proxy.url, path=f"/v1/audio/transcriptions?key={secret}")
    wrong = requests.get(f"{proxy.url}/v1/models", headers={"X-Request-Id": f"{secret} x"}, timeout=9)
    assert wrong.headers["x-request-id"] not in ("", f"{secret} x")
    with connect(f"{proxy.url.replace('http', 'ws')}/v1/realtime?token={secret}", additional_headers=HEADERS) as stream:
        stream.recv()
    for each in two:
        each.end(signal.SIGKILL)  # nginx has errors to tell
    assert post(proxy.url, path=f"/v1/audio/transcriptions?key={secret}").status_code == 503
    raw = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=9)
    raw.request("GET", f"/%zz?key={secret}")  # as `requests` would not send it
    assert raw.getresponse().status == 400
    assert [line["id"] for line in proxy.lines()[:2]] == ["mine-1", made.headers["x-request-id"]]
    for file in ("access.log", "error.log"):
        text = (proxy.folder / file).read_text()
        assert secret not in text and KEY not in text, file


@pytest.mark.skipif(shutil.which("openssl") is None, reason="not run: openssl, which makes the certificate, is missing")
def test_https_by_mounting_a_certificate(two: list[FakeReplica], tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    made = ["-keyout", str(tmp_path / "tls/tls.key"), "-out", str(tmp_path / "tls/tls.crt"), "-subj", "/CN=localhost"]
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    subprocess.run([*words, "-addext", "subjectAltName=DNS:localhost", *made], check=True, capture_output=True)
    port = engine.free_port()
    text = (DEPLOYED / "tls.conf").read_text().replace("listen 8443 ", f"listen 127.0.0.1:{port} ")
    (tmp_path / "tls/tls.conf").write_text(text.replace("/etc/nginx/", f"{tmp_path}/"))
    with Proxy(tmp_path, [each.port for each in two]) as proxy:
        for url in (f"https://localhost:{port}", proxy.url):
            assert requests.get(f"{url}/v1/models", timeout=9, verify=str(tmp_path / "tls/tls.crt")).status_code == 200
        trusted = ssl.create_default_context(cafile=str(tmp_path / "tls/tls.crt"))
        with connect(f"wss://localhost:{port}/v1/realtime", ssl=trusted) as stream:
            assert json.loads(stream.recv())["path"] == "/v1/realtime"


def test_the_counts_are_for_this_host_only(proxy: Proxy) -> None:
    text = requests.get(f"http://127.0.0.1:{proxy.status_port}/status", timeout=9).text
    assert "Active connections" in text
    assert requests.get(f"{proxy.url}/status", timeout=9).status_code == 404
    listen = [line.strip() for line in proxy.conf.read_text().splitlines() if line.strip().startswith("listen")]
    assert listen[1] == f"listen 127.0.0.1:{proxy.status_port};"


def test_nginx_costs_5_ms_at_most(proxy: Proxy, two: list[FakeReplica]) -> None:
    """Clips of 64 KB on kept connections, by turns direct and through nginx: a slow moment is in both."""
    file = bytes(64_000)
    with requests.Session() as session:
        spent: dict[str, list[float]] = {two[0].url: [], proxy.url: []}
        for _ in range(200):
            for url, times in spent.items():
                begin = time.perf_counter()
                answer = session.post(f"{url}/v1/audio/transcriptions", files={"file": file}, timeout=30)
                times.append(1000 * (time.perf_counter() - begin))
                assert answer.status_code == 200
    direct, through = (statistics.median(times) for times in spent.values())
    print(f"P50 direct {direct:.2f} ms, through nginx {through:.2f} ms")
    assert through - direct <= 5


# ---- Two real servers


def test_two_real_servers_lose_no_upload_when_one_is_killed(
    clips: list[dataset.Clip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every text through nginx is that of one server, also while one of the two is killed with requests in flight."""
    # Of each server: one more than the clients, whose next request may come before the place of the last one is free.
    monkeypatch.setenv("VOXTRAL_SERVE_MAX_IN_FLIGHT", "5")
    flags = ("--dtype", "float32", "--api-server-count", "1", "--max-model-len", "512", "--api-key", uploads.KEY)
    live_sessions = ("--additional-config", json.dumps({"max_live_sessions": 2}))
    files = [clip.path for clip in short(clips, 4)]
    with at_once(
        ROOT / "profiles/fast.yaml", dict.fromkeys(("one", "two"), PICO), tmp_path, *EAGER, *flags, *live_sessions
    ) as servers:
        one, two = servers.values()
        ports = [int(server.url.rpartition(":")[2]) for server in (one, two)]
        with Proxy(tmp_path, ports) as proxy:
            probe.ready(proxy.url, tmp_path / "ready", uploads.KEY)
            alone = {file: uploads.upload(two.url, file).json()["text"] for file in files}
            for text in alone.values():
                assert len(text) > 10
            samples, _ = soundfile.read(files[0], dtype="float32")
            *_, done = live.transcribe(proxy.url, samples, 1280)
            assert done["type"] == "transcription.done" and done["text"].strip() == alone[files[0]]
            assert "transcript.text.done" in uploads.upload(proxy.url, files[0], stream="true").text
            # Both are full: the guard's 429 and nothing else.
            with ThreadPoolExecutor(24) as pool:
                full = list(pool.map(lambda _: uploads.upload(proxy.url, files[0]), range(24)))
            assert {answer.status_code for answer in full} == {200, 429}
            assert {answer.headers.get("retry-after") for answer in full if answer.status_code == 429} == {"1"}
            answers: list[tuple[Path, requests.Response]] = []

            def client(number: int) -> None:
                for file in files[number % 4 :] + files[: number % 4]:
                    answers.append((file, uploads.upload(proxy.url, file)))

            threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(1)
            one.process.send_signal(signal.SIGKILL)
            for thread in threads:
                thread.join()
            assert [answer.status_code for _, answer in answers] == [200] * 16
            assert all(answer.json()["text"] == alone[file] for file, answer in answers)
            assert any("," in line["upstream_status"] for line in proxy.lines())
