"""The page's half for files, in Chromium, on a real server of pico."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from browser import chromium, visit
from conftest import DATA, short
from playwright.sync_api import Browser, Page, expect
from uploads import AUTHORIZED, KEY, upload

from bench import dataset
from tools import inputs

RATE = 16000
FORMS = {"txt": "text", "srt": "srt", "vtt": "vtt", "json": "verbose_json"}
MARKUP = '<img src=x onerror="document.title=1">'
DONE = '.card[data-state="done"]'


@pytest.fixture(scope="module")
def url(fast_url: str) -> str:
    return fast_url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium("--autoplay-policy=no-user-gesture-required") as found:
        yield found


@pytest.fixture(scope="module")
def clip() -> dataset.Clip:
    """One with several segments."""
    clips = [each for each in dataset.select(dataset.load(DATA).clips, 40, seed=1) if each.duration_s > 9]
    return min(clips, key=lambda each: each.duration_s)


def named(name: str, content: bytes) -> Any:
    return {"name": name, "mimeType": "audio/wav", "buffer": content}


def choose(page: Page, *files: Any) -> None:
    page.set_input_files("#file-input", list(files))


def downloaded(page: Page, suffix: str) -> bytes:
    with page.expect_download() as download:
        page.click(f"text=.{suffix}")
    return Path(download.value.path()).read_bytes()


def words(page: Page) -> list[str]:
    return page.locator(".word").all_text_contents()


def played_at(page: Page) -> float:
    found: float = page.evaluate("[...document.querySelectorAll('.time')].at(-1).textContent.split(':')[1] * 1")
    return found


def test_a_file_becomes_the_apis_text_and_files(url: str, browser: Browser, clip: dataset.Clip) -> None:
    granularities = {"timestamp_granularities[]": ["word", "segment"]}
    answers = {
        suffix: upload(url, clip.path, response_format=form, **(granularities if suffix == "json" else {}))
        for suffix, form in FORMS.items()
    }
    verbose = answers["json"].json()
    assert len(verbose["segments"]) > 1
    with visit(browser, url) as page:
        choose(page, str(clip.path))
        page.wait_for_selector(DONE)
        assert words(page) == verbose["text"].split()
        for suffix, answer in answers.items():
            assert downloaded(page, suffix) == answer.content, suffix
        page.wait_for_selector(".wave[data-drawn]")
        assert page.evaluate("document.querySelector('.wave > div').shadowRoot.querySelector('canvas').width") > 100

        # A click plays the word: it is lit, and later ones after it
        number = len(verbose["words"]) // 2
        page.locator(".word").nth(number).click()
        lit = page.locator(".word[aria-current]")
        expect(lit).to_have_count(1)
        assert int(lit.get_attribute("data-index") or -1) >= number
        expect(page.locator(".word").nth(number + 2)).to_have_attribute("aria-current", "true")
        page.click("text=Pause")

        # An edited word is in all files, and the rest is as it was
        page.locator(".word").nth(0).dblclick()
        page.fill(".edit", "  <b>Edited</b>   twice ")
        page.press(".edit", "Enter")
        assert words(page)[0] == "<b>Edited</b> twice"
        text = " ".join(["<b>Edited</b> twice", *verbose["text"].split()[1:]])
        assert downloaded(page, "txt").decode() == f"{text}\n"
        edited = json.loads(downloaded(page, "json"))
        assert (edited["text"], edited["words"][0]["word"]) == (text, "<b>Edited</b> twice")
        assert edited["words"][1:] == verbose["words"][1:]
        assert b"<b>Edited</b> twice" in downloaded(page, "srt")
        assert b"&lt;b&gt;Edited&lt;/b&gt; twice" in downloaded(page, "vtt")
        page.click("text=Undo edits")
        assert downloaded(page, "json") == answers["json"].content


def test_a_wrong_key_is_said_and_the_right_one_goes_on(url: str, browser: Browser, clip: dataset.Clip) -> None:
    with visit(browser, url, key="wrong") as page:
        expect(page.locator("#key-state")).to_have_text("not accepted")
        choose(page, str(clip.path))
        status = page.locator(".card .status")
        expect(status).to_contain_text("a key that this server does not know")
        expect(status).to_contain_text("Enter the server's API key at the top of the page.")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        page.wait_for_selector(DONE)
        expect(page.locator("#key-state")).to_have_text("accepted")
        assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0


def test_names_and_texts_are_never_markup(url: str, browser: Browser) -> None:
    """The server's answer is replaced: pico has no word with markup."""
    name = f"{MARKUP}.wav"
    segment = {"start": 0.0, "end": 1.0, "text": f"{MARKUP} &amp;"}
    words = [{"word": word, "start": 0.0, "end": 1.0} for word in segment["text"].split()]
    events = [
        {"type": "transcript.text.delta", "delta": MARKUP},
        {
            "type": "transcript.text.done",
            "text": segment["text"],
            "duration": 1.0,
            "words": words,
            "segments": [segment],
        },
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    with visit(browser, url) as page:
        page.route(
            "**/v1/audio/transcriptions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
        )
        choose(page, named(name, inputs.encoded(np.zeros(RATE, np.float32))))
        page.wait_for_selector(DONE)
        assert page.locator(".name").text_content() == name
        assert " ".join(page.locator(".word").all_text_contents()) == segment["text"]
        assert page.locator("img").count() == 0
        assert page.title() == "voxtral-serve"


def test_what_is_refused_is_said_in_words(url: str, browser: Browser, tmp_path: Path) -> None:
    silence = np.zeros(601 * RATE, np.int16)
    files = {
        "nonsense.wav": (b"nonsense", "The file is no audio that this server reads: expected WAV"),
        "empty.wav": (b"", "The file is empty"),
        "large.wav": (b"", "The file has 26 MiB, and this server takes at most 25 MiB. Send a compressed"),
        "long.flac": (inputs.encoded(silence, RATE, "FLAC"), "The file lasts 601.00 s and this server takes at most"),
    }
    for name, (content, _) in files.items():
        (tmp_path / name).write_bytes(content)
    os.truncate(tmp_path / "large.wav", 26 << 20)
    with visit(browser, url) as page:
        expect(page.locator("#file-limits")).to_have_text("At most 25 MiB and 10 min each.")
        choose(page, *(str(tmp_path / name) for name in files))
        expect(page.locator('.card[data-state="failed"]')).to_have_count(len(files))
        for number, (_, message) in enumerate(files.values()):
            expect(page.locator(".card .status").nth(number)).to_contain_text(message)
        expect(page.locator("text=Send again")).to_have_count(len(files))


def test_silence_and_files_that_wait_for_others(url: str, browser: Browser, clip: dataset.Clip) -> None:
    with visit(browser, url) as page:
        silence = named("silence.wav", inputs.encoded(np.zeros(RATE, np.float32)))
        choose(page, silence, named(clip.path.name, clip.path.read_bytes()), silence, silence)
        expect(page.locator(DONE)).to_have_count(4)
        expect(page.locator(".card .status").first).to_have_text("0:01, no speech was found.")
        expect(page.locator(".name[aria-expanded=true]")).to_have_count(3)
        page.locator(".name").nth(3).click()
        expect(page.locator(".card").nth(3).locator(".player")).to_be_visible()
        page.locator("text=Remove").nth(0).click()
        expect(page.locator(".card")).to_have_count(3)


def test_the_corner_says_what_the_server_is(url: str, browser: Browser) -> None:
    facts = requests.get(f"{url}/v1/server", headers=AUTHORIZED, timeout=60).json()
    assert (facts["profile"], facts["models"][0], facts["limits"]["clip_s"]) == ("fast.yaml", "voxtral", 600)
    with visit(browser, url, key=None) as page:
        corner = page.locator("#server")
        expect(corner).to_contain_text("Enter the API key to see it.")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        for row in ("Modelvoxtral", "Profilefast.yaml", f"Live sessionsup to {facts['limits']['live_sessions']}"):
            expect(corner).to_contain_text(row)
        expect(corner).to_contain_text("In flight")
