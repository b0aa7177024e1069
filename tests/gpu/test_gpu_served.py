"""profiles/fast.yaml on pico behind the guard, with drafts and without: the texts of the benchmark's clips, sixteen at
once; live sessions beside uploads; a session whose context is full; clients that go.

On a GPU all 500 clips, in bfloat16 and with torch.compile. Two servers compute some sums in another order, so a few
texts differ: each in a near-tie, where the logprobs of the two first tokens that differ are at most NEAR apart.
"""

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import live
import numpy as np
import offline
import pytest
import servers
import yaml
from offline import ON_GPU
from places import DATA, PICO, ROOT
from uploads import AUTHORIZED, KEY, upload

from bench import dataset
from bench.measure import engine
from bench.measure.scoring import normalize, word_errors
from pico import evaluate

pytestmark = pytest.mark.gpu

SAMPLES = 500 if ON_GPU else 12
AT_ONCE = 16
NEAR, DIFFERENT = 0.25, 8 if ON_GPU else 0  # natural logarithms; texts
WER = 0.02
LIVE = 8
CONTEXT = 512  # tokens: 37 s of a live session, then it goes on in the next
COMMAND = (sys.executable, "-m", "vllm.entrypoints.cli.main")  # where no script `vllm` is installed
FLAGS = ("--max-model-len", str(CONTEXT), "--api-key", KEY, "--additional-config", f'{{"max_live_sessions": {LIVE}}}')
SMALL = ("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(1 << 30))
ON_DEVICE = (*(SMALL if ON_GPU else servers.EAGER), "--api-server-count", "1")
ENVIRONMENT = offline.GPU_ENVIRONMENT if ON_GPU else servers.UNBOUND


class Text(NamedTuple):
    text: str
    tokens: tuple[tuple[str, float], ...]  # those that write something, with their logprobs


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Two servers, which start together: "drafts" and "plain"."""
    folder = tmp_path_factory.mktemp("servers")
    profile = yaml.safe_load((ROOT / "profiles/fast.yaml").read_text(encoding="utf-8"))
    plain = {name: value for name, value in profile.items() if name != "speculative_config"}
    with contextlib.ExitStack() as stack:
        started = {}
        for name, config in (("drafts", profile), ("plain", plain)):
            file = folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump(config), encoding="utf-8")
            options: dict[str, Any] = {"command": COMMAND, "environment": ENVIRONMENT, "wait": False}
            arguments = (file, PICO, engine.free_port(), folder / f"{name}.log", *FLAGS, *ON_DEVICE)
            started[name] = stack.enter_context(engine.served(*arguments, **options))
        for server in started.values():
            server.wait_until_up()
        if ON_GPU:
            for name in started:
                assert "Using V2 Model Runner" in (folder / f"{name}.log").read_text(errors="replace")
        yield {name: server.url for name, server in started.items()}


@pytest.fixture(scope="module")
def clips() -> list[dataset.Clip]:
    return dataset.select(dataset.load(DATA)[0], SAMPLES, seed=0)


def transcribed(url: str, path: Path) -> Text:
    response = upload(url, path, **{"include[]": "logprobs"})
    assert response.status_code == 200, response.text
    answer = response.json()
    return Text(answer["text"].strip(), tuple((each["token"], each["logprob"]) for each in answer["logprobs"]))


def all_of(url: str, clips: list[dataset.Clip]) -> list[Text]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda clip: transcribed(url, clip.path), clips))


@pytest.fixture(scope="module")
def texts(urls: dict[str, str], clips: list[dataset.Clip]) -> dict[str, list[Text]]:
    return {name: all_of(url, clips) for name, url in urls.items()}


def first_difference(one: Text, other: Text) -> dict[str, Any]:
    pairs = zip((*one.tokens, ("", -np.inf)), (*other.tokens, ("", -np.inf)), strict=False)
    at, (ours, theirs) = next((at, pair) for at, pair in enumerate(pairs) if pair[0][0] != pair[1][0])
    return {"at": at, "plain": ours, "drafts": theirs, "gap": abs(ours[1] - theirs[1])}


def test_drafts_change_no_text(
    texts: dict[str, list[Text]], clips: list[dataset.Clip], record_property: Callable[[str, object], None]
) -> None:
    found = {
        clip.id: first_difference(plain, drafts)
        for clip, plain, drafts in zip(clips, texts["plain"], texts["drafts"], strict=True)
        if plain.text != drafts.text
    }
    record_property("texts with drafts as without", f"{len(clips) - len(found)} of {len(clips)}")
    record_property("texts that differ", json.dumps(found))
    assert all(each["gap"] <= NEAR for each in found.values()), found
    assert len(found) <= DIFFERENT, found


@pytest.mark.parametrize("name", ["drafts", "plain"])
def test_word_errors(
    name: str,
    texts: dict[str, list[Text]],
    clips: list[dataset.Clip],
    record_property: Callable[[str, object], None],
) -> None:
    errors = [
        word_errors(normalize(clip.text), normalize(each.text)) for clip, each in zip(clips, texts[name], strict=True)
    ]
    rate = sum(each.total for each in errors) / sum(each.words for each in errors)
    record_property(f"word error rate, {name}", f"{rate:.4f}")
    assert rate <= WER


def test_drafts_are_accepted(
    urls: dict[str, str], texts: dict[str, list[Text]], record_property: Callable[[str, object], None]
) -> None:
    counted = {name: metric(urls["drafts"], f"spec_decode_num_{name}_total") for name in ("drafts", "accepted_tokens")}
    record_property("tokens a step", f"{1 + counted['accepted_tokens'] / counted['drafts']:.2f}")
    assert counted["accepted_tokens"] > 4 * counted["drafts"]
    assert metric(urls["plain"], "spec_decode_num_drafts_total") == 0


def metric(url: str, name: str) -> float:
    """The sum of a counter or gauge of vLLM; 0 without one."""
    lines = live.requests.get(f"{url}/metrics", headers=AUTHORIZED, timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}"))


# Live sessions


def spoken(url: str, audio: np.ndarray, piece: int) -> str:
    created, *deltas, done = live.transcribe(url, audio, piece)
    assert (created["type"], done["type"]) == ("session.created", "transcription.done"), done
    assert "".join(delta["delta"] for delta in deltas) == done["text"]
    text: str = done["text"]
    return text.strip()


@pytest.fixture(scope="module")
def spoken_clips(clips: list[dataset.Clip]) -> list[np.ndarray]:
    shortest = sorted((clip for clip in clips if clip.id not in live.CLOSE), key=lambda clip: clip.duration_s)
    return [evaluate.read_audio(clip.path) for clip in shortest[:LIVE]]


@pytest.mark.parametrize("name", ["drafts", "plain"])
def test_live_sessions_beside_uploads(
    name: str,
    urls: dict[str, str],
    spoken_clips: list[np.ndarray],
    record_property: Callable[[str, object], None],
) -> None:
    """A session's kernels are others than an upload's: a near-tie may cost a word."""
    url = urls[name]
    expected = [live.uploaded(url, audio) for audio in spoken_clips]
    assert all(expected)
    pieces = [1280, 480, 4001, 100_000] * LIVE
    with ThreadPoolExecutor(3 * LIVE) as pool:
        beside = [pool.submit(live.uploaded, url, audio) for audio in spoken_clips * 2]
        heard = list(pool.map(spoken, [url] * LIVE, spoken_clips, pieces))
        uploads = [each.result() for each in beside]
    for what, got, wanted in (("live", heard, expected), ("uploads", uploads, expected * 2)):
        apart = [word_errors(one, other).total for one, other in zip(wanted, got, strict=True)]
        record_property(f"{what} beside each other, {name}", f"{apart.count(0)} of {len(apart)} texts equal")
        assert sum(map(bool, apart)) <= 1 + len(apart) // 8 and max(apart) <= 3, (wanted, got)


def test_a_session_goes_on_when_its_context_is_full(urls: dict[str, str], spoken_clips: list[np.ndarray]) -> None:
    """The same sentence until two contexts are full: none is lost, none doubled."""
    audio, pause = spoken_clips[0], np.zeros(9600, np.float32)
    count = round(80 / ((len(audio) + len(pause)) / 16000))
    before = live.metric(urls["drafts"], "rollovers_total")
    text = spoken(urls["drafts"], np.concatenate([audio, pause] * count), 1280)
    assert live.metric(urls["drafts"], "rollovers_total") >= before + 2
    last = live.uploaded(urls["drafts"], audio).split()[-1]
    assert text.split().count(last) == count, text


# Clients that go


def test_clients_that_go_leave_nothing(
    urls: dict[str, str], clips: list[dataset.Clip], spoken_clips: list[Any]
) -> None:
    """Uploads that nobody waits for, and sessions with much of their audio unsent: the server has nothing left to do,
    and then all places."""
    url = urls["drafts"]
    expected = live.uploaded(url, spoken_clips[0])
    longest = max(clips, key=lambda clip: clip.duration_s).path.read_bytes()
    host, port = url.removeprefix("http://").split(":")
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + longest + b"\r\n--x--\r\n"
    head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(form)}\r\n\r\n"
    for number in range(AT_ONCE):
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(head.encode() + form)
            time.sleep(0.01 * number)
    for number in range(LIVE):
        with live.session(url) as session:
            live.receive(session)
            live.send(session, "session.update", model="voxtral")
            live.send(session, "input_audio_buffer.commit")
            sent = spoken_clips[number][: 16_000 + 4_000 * number]
            data = live.base64.b64encode(live.pcm16(sent)).decode()
            live.send(session, "input_audio_buffer.append", audio=data)
            if number % 2:
                live.receive(session)
            session.socket.close()
    begun = time.monotonic()
    while metric(url, "num_requests_running") or metric(url, "num_requests_waiting") or live.metric(url, "sessions "):
        assert time.monotonic() - begun < 30
        time.sleep(0.1)
    with ThreadPoolExecutor(LIVE) as pool:
        assert list(pool.map(spoken, [url] * LIVE, [spoken_clips[0]] * LIVE, [1280] * LIVE)) == [expected] * LIVE
    assert live.uploaded(url, spoken_clips[0]) == expected
