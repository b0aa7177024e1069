"""The live half of the page, in a Chromium: microphone and file, cuts and refusals, files and captions."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import live
import numpy as np
import pytest
import soundfile
from browser import chromium
from conftest import DATA, MOST_LIVE
from cutting import CutProxy
from playwright.sync_api import Browser, Page, expect
from test_live import CLOSE, metric, uploaded
from test_live_protocols import COMPLETED, INPUT, PCM, RATE, TEXT, append, opened, until, until_free
from uploads import KEY

from bench import dataset, metrics
from pico import evaluate

LATER_MS = 120_000  # for what a busy machine may take long to do
PAUSE = np.zeros(RATE, np.float32)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def clips() -> list[dataset.Clip]:
    found = dataset.select(dataset.load(DATA)[0], 30, seed=0)
    return sorted((clip for clip in found if clip.id not in CLOSE), key=lambda clip: clip.duration_s)


@pytest.fixture(scope="module")
def two_turns(clips: list[dataset.Clip]) -> np.ndarray:
    """Two clips with a pause between them, float32."""
    first, second = (evaluate.read_audio(clip.path) for clip in clips[:2])
    return np.concatenate([first, PAUSE, second])


@contextmanager
def live_tab(browser: Browser, url: str, key: str = KEY, **options: Any) -> Iterator[Page]:
    """The Live tab. An error in a script of the page fails the test."""
    context = browser.new_context(**options)
    page = context.new_page()
    errors: list[Any] = []
    page.on("pageerror", lambda error: errors.append(error))
    try:
        page.goto(f"{url}/#live")
        page.get_by_label("API key").fill(key)
        page.get_by_label("API key").press("Tab")
        yield page
    finally:
        context.close()
    assert errors == []


def wav(folder: Path, audio: np.ndarray) -> Path:
    path = folder / "speech.wav"
    soundfile.write(path, np.frombuffer(live.pcm16(audio), "<i2"), RATE)
    return path


def choose(page: Page, file: Path) -> None:
    page.get_by_label("A file, as if it were live").check()
    page.get_by_label("File to play").set_input_files(file)


def start(page: Page) -> None:
    page.get_by_role("button", name="Start").click()


def turns(page: Page) -> list[str]:
    return page.locator(".turns p span").all_inner_texts()


def finished(page: Page) -> list[str]:
    """The texts of the turns, once the session is over."""
    expect(page.locator("#live-status")).to_have_text(re.compile(r"^Done: \d+:\d\d of audio\.$"), timeout=LATER_MS)
    assert page.locator("#live-problem").inner_text() == ""
    return turns(page)


def saved(page: Page, suffix: str) -> str:
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Save .{suffix}").click()
    assert download.value.suggested_filename == f"live.{suffix}"
    return Path(download.value.path()).read_text(encoding="utf-8")


def session_events(url: str, audio: np.ndarray, kind: str = "server_vad") -> list[dict[str, Any]]:
    """What a client of the protocol gets for this audio."""
    with opened(url) as socket:
        found = {"input": {"format": PCM, "turn_detection": {"type": kind}}}
        live.send(socket, "session.update", session={"type": "transcription", "audio": found})
        append(socket, live.pcm16(audio))
        for last in ("commit", "clear"):
            live.send(socket, f"{INPUT}.{last}")
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] != f"{INPUT}.cleared":
            events.append(live.receive(socket))
        items = sum(event["type"] == f"{INPUT}.committed" for event in events)
        while sum(event["type"] == COMPLETED for event in events) < items:
            events.append(live.receive(socket))
    return events


def texts_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["transcript"] for event in events if event["type"] == COMPLETED and event["transcript"]]


def clock(seconds: float) -> str:
    ms = round(seconds * 1000)
    return f"00:00:{ms // 1000:02},{ms % 1000:03}"


def test_a_file_as_if_it_were_live(browser: Browser, fast_url: str, two_turns: np.ndarray, tmp_path: Path) -> None:
    """A wrong key and a microphone that is not there are told; then texts, times and files are those of the protocol."""
    with live_tab(browser, fast_url, key="wrong") as page:
        start(page)
        expect(page.get_by_role("alert")).to_contain_text("No microphone was found. Connect one")
        choose(page, wav(tmp_path, two_turns))
        start(page)
        expect(page.get_by_role("alert")).to_contain_text("refuses this key", timeout=LATER_MS)
        page.get_by_label("API key").fill(KEY)
        page.get_by_label("API key").press("Tab")
        page.get_by_label("Play it aloud").uncheck()
        start(page)
        expect(page.locator("#live-pause")).to_be_focused()
        found = finished(page)
        text, subtitles, document = (saved(page, suffix) for suffix in ("txt", "srt", "json"))
    events = session_events(fast_url, two_turns)
    assert len(found) == 2 and found == texts_of(events)
    assert text == "".join(f"{each}\n" for each in found)
    segments = [event for event in events if event["type"] == f"{TEXT}.segment"]
    times = [f"{clock(each['start'])} --> {clock(each['end'])}" for each in segments]
    cues = [cue.split("\n") for cue in subtitles.strip().split("\n\n")]
    assert [cue[1] for cue in cues] == times
    assert [" ".join(cue[2:]) for cue in cues] == [each["text"].strip() for each in segments]
    told = json.loads(document)
    assert told["text"] == " ".join(found)
    assert [word for turn in told["turns"] for part in turn["segments"] for word in part["words"]] == [
        word for each in segments for word in each["words"]
    ]
