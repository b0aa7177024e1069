"""profiles/fast.yaml from Hugging Face's layout, in bfloat16: the reference model's texts; clients that come and go.

All texts different: the directory's weights or the model. (In float32, Mistral's layout: test_encode_once_exact.py.)
"""

import contextlib
import re
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import pytest
import requests
from places import DATA, ROOT
from servers import Server, short, transcribe
from uploads import AUTHORIZED, KEY

from bench import dataset, results
from bench.client import Client, Row

REFERENCE = ROOT / "bench/results/pico-reference" / results.ROWS
NEAR_TIES = 1  # of few clips: in bfloat16 two candidates may be as close as two orders of summation
LATE = ["154", "057", "162", "499"]  # beside those of conftest.clips
FEW, LEAVING = 6, 8


@pytest.fixture(scope="module")
def url(fast: Server) -> str:
    assert "VoxtralRealtimeEncodeOnce" in fast.log.read_text()
    return fast.url


@pytest.fixture(scope="module")
def reference() -> dict[str, str | None]:
    return {row.id: row.text for row in results.read_rows(REFERENCE)}


def client(url: str) -> Client:
    made = Client(url, timeout_s=120, api_key=KEY)
    made.model = "voxtral"
    return made


def counter(url: str, name: str) -> float:
    text = requests.get(f"{url}/metrics", timeout=10).text
    return sum(map(float, re.findall(rf"^vllm:{name} (\S+)$", text, re.MULTILINE)))


def by_length() -> list[dataset.Clip]:
    return sorted(dataset.load(DATA)[0], key=lambda clip: clip.duration_s)


def texts_of(url: str, clips: list[dataset.Clip]) -> dict[str, str | None]:
    rows = transcribe(url, clips)
    assert [row.error for row in rows] == [None] * len(rows)
    return {row.id: row.text for row in rows}


def different(
    texts: dict[str, str | None], expected: dict[str, str | None]
) -> dict[str, tuple[str | None, str | None]]:
    return {id: (text, expected[id]) for id, text in texts.items() if text != expected[id]}


def test_the_texts_of_some_are_the_references(
    url: str, clips: list[dataset.Clip], reference: dict[str, str | None]
) -> None:
    asked = {clip.id for clip in short(clips, FEW)} | {LATE[0]}
    texts = texts_of(url, [clip for clip in dataset.load(DATA)[0] if clip.id in asked])
    assert len(different(texts, reference)) <= NEAR_TIES, different(texts, reference)


@pytest.mark.slow
def test_the_texts_are_the_references(url: str, clips: list[dataset.Clip], reference: dict[str, str | None]) -> None:
    asked = {clip.id for clip in clips} | {*LATE, by_length()[-1].id}
    texts = texts_of(url, [clip for clip in dataset.load(DATA)[0] if clip.id in asked])
    assert len(different(texts, reference)) <= 2 * NEAR_TIES, different(texts, reference)


def test_more_clients_than_are_served_at_once(url: str, reference: dict[str, str | None]) -> None:
    """That the texts are the same is shown in float32, by test_encode_once_scheduled.py."""
    clips = by_length()[20:32]

    def one(clip: dataset.Clip) -> Row:
        return client(url).transcribe(clip, part=1)

    with ThreadPoolExecutor(len(clips)) as pool:
        rows = [*pool.map(one, clips)]
    assert [row.error for row in rows] == [None] * len(rows)
    assert sum(row.text != reference[row.id] for row in rows) <= NEAR_TIES


def test_clients_that_leave_half_way_make_room(url: str, reference: dict[str, str | None]) -> None:
    """They leave once the first of them has a token. Then other clips take their places."""
    generated, leaving = r"generation_tokens_total\{.*\}", by_length()[-100 : LEAVING - 100]
    before = counter(url, generated)
    with contextlib.ExitStack() as connections:
        for clip in leaving:
            files = {"file": (clip.path.name, clip.path.read_bytes())}
            asked = requests.Request("POST", url, AUTHORIZED, files, {"model": "voxtral"}).prepare()
            connection = HTTPConnection(url.removeprefix("http://"))
            connections.enter_context(contextlib.closing(connection))
            connection.request("POST", "/v1/audio/transcriptions", asked.body, dict(asked.headers))
        deadline = time.monotonic() + 30
        # The last token of an earlier test may be counted after `before` was read.
        while counter(url, generated) == before or not counter(url, r"num_requests_(?:running|waiting)\{.*\}"):
            assert time.monotonic() < deadline
    deadline = time.monotonic() + 60  # an encoder's step that has begun is not broken off
    while counter(url, r"num_requests_(?:running|waiting)\{.*\}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    whole = sum(clip.duration_s for clip in leaving) * 12.5
    assert 0 < counter(url, generated) - before < whole / 2
    clips = by_length()[:8]
    assert len(different(texts_of(url, clips), reference)) <= NEAR_TIES
