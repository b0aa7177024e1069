"""The live half of the page, in a Chromium: microphone and file, cuts and refusals, files and captions."""

import io
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
from browser import PATIENCE_MS, chromium, visit
from cutting import CutProxy
from firefox import Firefox
from live import CLOSE, COMPLETED, INPUT, PCM, RATE, TEXT, append, metric, opened, until_free, uploaded
from places import DATA, ROOT
from playwright.sync_api import Browser, Page, expect
from servers import MOST_LIVE
from uploads import KEY

from bench import dataset
from bench.measure import scoring
from pico import evaluate

PAUSE = np.zeros(RATE, np.float32)
PICTURES = {"live-light-1000": "page-live.png", "caption": "page-captions.png"}  # those of docs/pages/page.md
AXE = ROOT / "tests/support/axe/axe.min.js"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def pictures(tmp_path: Path, pytestconfig: pytest.Config) -> Callable[[Page, str], bytes]:
    """Takes a picture of a page. With `--pictures FOLDER`, those of the documentation are written there."""
    folder = pytestconfig.getoption("pictures")

    def take(page: Page, name: str) -> bytes:
        place = Path(folder) if folder and name in PICTURES else tmp_path
        return page.screenshot(path=place / PICTURES.get(name, f"{name}.png"), omit_background=True, scale="css")

    return take


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
def live_tab(
    browser: Browser, url: str, key: str = KEY, allowed: str = "WebSocket connection to", **options: Any
) -> Iterator[Page]:
    """The Live tab. Only a connection that fails may write an error to the console."""
    with visit(browser, url, key, allowed=allowed, **options) as page:
        page.get_by_role("tab", name="Live").click()
        yield page


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
    expect(page.locator("#live-status")).to_have_text(re.compile(r"^Done: \d+:\d\d of audio\.$"))
    assert page.locator("#live-problem").inner_text() == ""
    return turns(page)


def saved(page: Page, suffix: str) -> str:
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Save .{suffix}").click()
    assert download.value.suggested_filename == f"live.{suffix}"
    return Path(download.value.path()).read_text(encoding="utf-8")


def session_events(url: str, audio: np.ndarray, kind: str = "server_vad") -> list[dict[str, Any]]:
    """What a client of the protocol gets for this audio."""
    with opened(url, ping_interval=None) as socket:
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
    """Errors are told; texts, times and files are those of the protocol."""
    with live_tab(browser, fast_url, key="wrong") as page:
        start(page)
        expect(page.get_by_role("alert")).to_contain_text("No microphone was found. Connect one")
        choose(page, wav(tmp_path, two_turns))
        start(page)
        expect(page.get_by_role("alert")).to_contain_text("refuses this key")
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


# ---- Slow: a microphone, cuts, a busy server, captions


@contextmanager
def speaking(folder: Path, audio: np.ndarray, *flags: str) -> Iterator[Browser]:
    """A browser whose microphone hears a second of silence, `audio` once, and silence."""
    path = wav(folder, np.concatenate([PAUSE, audio]))
    fakes = ("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream")
    with chromium(*fakes, f"--use-file-for-fake-audio-capture={path}%noloop", *flags) as browser:
        yield browser


def heard_for(page: Page, seconds: float) -> None:
    """Until so much audio was recorded."""
    until_ms = time.monotonic() + PATIENCE_MS / 1000 + seconds
    while (text := page.locator("#live-clock").inner_text()) == "" or seconds_of(text) < seconds:
        assert time.monotonic() < until_ms, f"{text} of audio"
        time.sleep(0.2)


def seconds_of(text: str) -> int:
    minutes, seconds = text.split(":")
    return 60 * int(minutes) + int(seconds)


def errors(reference: str, text: str) -> float:
    """Percent of words."""
    found = scoring.word_errors(reference, text)
    return 100 * (found.substitutions + found.deletions + found.insertions) / found.words


@pytest.mark.slow
def test_a_microphone(fast_url: str, tmp_path: Path) -> None:
    """A minute of speech through the browser's capture and the page's resampling has the word error rate of the same
    samples sent by a client of the protocol. Turns, which an upload has not, cost pico a point beside."""
    clips = dataset.select(dataset.load(DATA)[0], 6, seed=3)
    audio = np.concatenate([part for clip in clips for part in (evaluate.read_audio(clip.path), PAUSE)])
    reference = " ".join(clip.text for clip in clips)
    with speaking(tmp_path, audio) as browser, live_tab(browser, fast_url) as page:
        start(page)
        heard_for(page, len(audio) / RATE + 3)
        level = float(page.locator("#live-level").evaluate("meter => meter.value"))
        page.get_by_role("button", name="Stop").click()
        text = " ".join(finished(page))
        expect(page.get_by_role("button", name="Start")).to_be_focused()
    assert level <= -50  # silence
    sent = " ".join(texts_of(session_events(fast_url, audio)))
    by_page, by_client, by_upload = (errors(reference, each) for each in (text, sent, uploaded(fast_url, audio)))
    assert by_page <= min(by_client + 1, by_upload + 3), (by_page, by_client, by_upload, text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [((), "No microphone was found"), (("--use-fake-device-for-media-stream",), "The microphone is not allowed")],
)
def test_no_microphone_is_told(fast_url: str, flags: tuple[str, ...], words: str) -> None:
    with chromium(*flags) as browser, live_tab(browser, fast_url) as page:
        start(page)
        expect(page.get_by_role("alert")).to_contain_text(words)
        expect(page.get_by_role("button", name="Start")).to_be_focused()


@pytest.mark.slow
def test_a_page_over_http_of_another_host(fast_url: str, two_turns: np.ndarray, tmp_path: Path) -> None:
    """It has no microphone, which is told with what to do; a file works."""
    port = fast_url.rpartition(":")[2]
    flag = "--host-resolver-rules=MAP voxtral.example 127.0.0.1"
    url = f"http://voxtral.example:{port}"
    with chromium(flag) as browser, live_tab(browser, url, allowed="Cross-Origin") as page:
        start(page)
        expect(page.get_by_role("alert")).to_contain_text("https")
        expect(page.get_by_role("alert")).to_contain_text("ssh -L")
        choose(page, wav(tmp_path, two_turns))
        start(page)
        assert len(finished(page)) == 2


@pytest.mark.slow
def test_a_pause(browser: Browser, fast_url: str, two_turns: np.ndarray, tmp_path: Path) -> None:
    """Nothing is sent in a pause, and nothing is lost by it."""
    silence = np.zeros(8 * RATE, np.float32)
    audio = np.concatenate([two_turns[: -len(PAUSE)], silence, two_turns])
    with live_tab(browser, fast_url) as page:
        choose(page, wav(tmp_path, audio))
        page.get_by_label("Paragraphs end").select_option("semantic_vad")
        start(page)
        expect(page.locator(".turns p")).not_to_have_count(0)
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("#live-status")).to_have_text("Paused.")
        expect(page.locator(".growing p")).to_have_count(0)  # the turn was ended
        stopped = page.locator("#live-clock").inner_text()
        time.sleep(3)
        assert page.locator("#live-clock").inner_text() == stopped
        page.get_by_role("button", name="Resume").click()
        found = " ".join(finished(page))
    expected = " ".join(texts_of(session_events(fast_url, audio, "semantic_vad")))
    assert errors(expected, found) <= 20, (expected, found)  # the pause may have cut a word


@pytest.mark.slow
def test_a_cut_in_a_session(browser: Browser, fast_url: str, two_turns: np.ndarray, tmp_path: Path) -> None:
    """The connection is lost in the second turn, and the server is away for seconds: text and times are complete."""
    audio = np.concatenate([two_turns, PAUSE, two_turns])
    away = "WebSocket connection to|net::ERR_"  # the page also asks whether the server is there
    with CutProxy(fast_url) as proxy, live_tab(browser, proxy.url, allowed=away) as page:
        choose(page, wav(tmp_path, audio))
        start(page)
        expect(page.locator(".turns p")).to_have_count(1)
        expect(page.locator(".growing p")).to_have_count(1)
        proxy.closed = True
        assert proxy.cut() >= 1
        expect(page.locator("#live-status")).to_contain_text("What you say meanwhile is kept.")
        time.sleep(3)
        proxy.closed = False
        found = finished(page)
        told = json.loads(saved(page, "json"))
    events = session_events(fast_url, audio)
    assert found == texts_of(events)
    starts = [event["start"] for event in events if event["type"] == f"{TEXT}.segment"]
    assert [part["start"] for turn in told["turns"] for part in turn["segments"]] == pytest.approx(starts, abs=0.25)


@pytest.mark.slow
def test_a_server_that_is_full(browser: Browser, fast_url: str, two_turns: np.ndarray, tmp_path: Path) -> None:
    """The page waits for a place, with the audio, and says so."""
    until_free(fast_url)
    with ExitStack() as others, live_tab(browser, fast_url) as page:
        for _ in range(MOST_LIVE):
            append(others.enter_context(opened(fast_url)), bytes(3200))
        begun = time.monotonic()
        while metric(fast_url, "sessions ") < MOST_LIVE:
            assert time.monotonic() < begun + 60
            time.sleep(0.1)
        choose(page, wav(tmp_path, two_turns))
        start(page)
        expect(page.locator("#live-status")).to_contain_text("max_live_sessions")
        expect(page.locator("#live-status")).to_contain_text("Trying again in")
        others.close()
        found = finished(page)
    assert found == texts_of(session_events(fast_url, two_turns))


@pytest.mark.slow
def test_by_keyboard_alone(fast_url: str, clips: list[dataset.Clip], tmp_path: Path) -> None:
    """Settings, start, pause, stop and a download; what a screen reader says are completed phrases."""
    audio = np.concatenate([evaluate.read_audio(clips[0].path), PAUSE, PAUSE])
    with speaking(tmp_path, audio) as browser, live_tab(browser, fast_url) as page:
        frames: list[str] = []
        page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: frames.append(str(frame))))

        def tab_to(id: str, most: int = 12) -> None:
            for _ in range(most):
                if page.evaluate("document.activeElement.id") == id:
                    return
                page.keyboard.press("Tab")
            raise AssertionError(f"no way to {id}: {page.evaluate('document.activeElement.id')} has the focus")

        tab_to("live-delay")
        page.keyboard.press("ArrowLeft")
        assert page.locator("#live-delay").get_attribute("aria-valuetext") == "240 ms: low"
        tab_to("live-turns")
        page.keyboard.press("ArrowDown")
        tab_to("live-start")
        page.keyboard.press("Enter")
        expect(page.locator("#live-pause")).to_be_focused()
        expect(page.locator(".turns p")).to_have_count(1)
        page.keyboard.press("Space")
        expect(page.locator("#live-status")).to_have_text("Paused.")
        expect(page.locator("#live-pause")).to_have_text("Resume")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        found = finished(page)
        expect(page.locator("#live-start")).to_be_focused()
        tab_to("live-save-txt")
        with page.expect_download() as download:
            page.keyboard.press("Enter")
        assert Path(download.value.path()).read_text(encoding="utf-8") == "".join(f"{each}\n" for each in found)
        assert page.locator("[role=log]").inner_text().endswith(found[-1])
        assert page.locator(".growing").get_attribute("aria-live") == "off"
    (updated,) = {frame for frame in frames if '"session.updated"' in frame}
    told = json.loads(updated)["session"]["audio"]["input"]
    assert (told["transcription"]["delay"], told["turn_detection"]["type"]) == ("low", "semantic_vad")


# ---- Slow: captions


def rows_with_ink(picture: bytes) -> np.ndarray:
    """uint8 [height, width]: how opaque each pixel of a PNG is."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(picture)).convert("RGBA"))[:, :, 3]


@pytest.mark.slow
def test_captions_of_the_live_tab(
    browser: Browser, fast_url: str, two_turns: np.ndarray, tmp_path: Path, pictures: Callable[[Page, str], bytes]
) -> None:
    """In another tab of the browser: two lines at the bottom of a transparent page, and nothing else."""
    with live_tab(browser, fast_url, viewport={"width": 1280, "height": 360}) as page:
        captions = page.context.new_page()
        captions.goto(f"{fast_url}/page/caption.html#lines=2&size=40&clear=1000")
        choose(page, wav(tmp_path, two_turns))
        start(page)
        found = finished(page)
        expect(captions.locator("#words")).to_have_text(" ".join(found))
        expect(captions.locator("#note")).to_have_text("")
        ink = rows_with_ink(pictures(captions, "caption"))
        assert ink[: 360 - 2 * 54 - 20].max() == 0 and ink[:, :20].max() == 0
        assert ink.max() == 255
        page.get_by_role("button", name="Clear").click()
        expect(captions.locator("#words")).to_have_text("")
        captions.goto("about:blank")
        captions.goto(f"{fast_url}/page/caption.html#lines=0")
        expect(captions.locator("#note")).to_have_text('lines is "0": expected a whole number from 1 to 10')


@pytest.mark.slow
def test_captions_of_a_microphone(fast_url: str, clips: list[dataset.Clip], tmp_path: Path) -> None:
    """The page opens it itself, without a click; the key is gone from the address."""
    audio = np.concatenate([evaluate.read_audio(clip.path) for clip in clips[:2]])
    with speaking(tmp_path, audio, "--autoplay-policy=no-user-gesture-required") as browser:  # as OBS has it
        page = browser.new_page()
        page.goto(f"{fast_url}/page/caption.html#source=microphone&key={KEY}&clear=600")
        expect(page.locator("#words")).to_contain_text(clips[1].text.split()[-1])
        expect(page.get_by_role("button")).to_be_hidden()
        assert KEY not in page.url and page.url.endswith("#source=microphone&clear=600")


# ---- Slow: how it looks


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1000])
def test_how_it_looks(
    browser: Browser,
    fast_url: str,
    two_turns: np.ndarray,
    tmp_path: Path,
    pictures: Callable[[Page, str], bytes],
    scheme: str,
    width: int,
) -> None:
    """With a turn that is complete and one that is being spoken: nothing is wider than the window, and axe
    has no complaint."""
    look = {"viewport": {"width": width, "height": 760}, "color_scheme": scheme, "reduced_motion": "reduce"}
    # axe writes a <style> element, which the page does not allow
    with live_tab(browser, fast_url, allowed="Applying inline style", **look) as page:
        choose(page, wav(tmp_path, np.concatenate([two_turns, PAUSE, two_turns])))
        start(page)
        expect(page.locator(".turns p")).to_have_count(1)
        expect(page.locator(".growing p")).to_have_count(1)
        pictures(page, f"live-{scheme}-{width}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.evaluate(AXE.read_text(encoding="utf-8"))
        found = page.evaluate("axe.run()")
        assert len(found["passes"]) > 10
        assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []
        finished(page)


@pytest.mark.slow
def test_firefox(fast_url: str, two_turns: np.ndarray, tmp_path: Path) -> None:
    """A file's text. Its microphone needs a machine with a device for sound output."""
    profile = tmp_path / "profile"
    profile.mkdir()
    with Firefox(profile) as firefox:
        firefox.visit(f"{fast_url}/#live")
        firefox.wait_for("document.documentElement.dataset.ready")
        firefox.evaluate(
            "window.blocked = [];"
            "addEventListener('securitypolicyviolation', (event) => blocked.push(event.blockedURI));"
            f"key.value = {json.dumps(KEY)}; void key.dispatchEvent(new Event('change'))"
        )
        text = "document.getElementById('live-status').textContent"
        firefox.choose("#live-file", wav(tmp_path, two_turns))
        firefox.evaluate("void document.getElementById('live-start').click()")
        firefox.wait_for("document.querySelector('.growing p') !== null")
        firefox.wait_for(f"{text}.startsWith('Done: ')")
        found = firefox.evaluate("[...document.querySelectorAll('.turns p span')].map((p) => p.textContent).join(' ')")
        assert firefox.evaluate("blocked.join()") == ""
        assert firefox.evaluate("document.getElementById('live-problem').textContent") == ""
    expected = " ".join(texts_of(session_events(fast_url, two_turns)))
    assert errors(expected, found) <= 10, (expected, found)  # Firefox's samples differ by the last bit
