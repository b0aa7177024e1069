"""The page's half for files, in Chromium and Firefox, on a real server of pico."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import inputs
import numpy as np
import pytest
import requests
import soundfile
from browser import chromium, visit
from firefox import Firefox
from local_nginx import COMMAND, NGINX, Proxy, wait_for_port
from places import DATA, ROOT
from playwright.sync_api import Browser, Page, Route, expect
from servers import EAGER, UNBOUND
from uploads import AUTHORIZED, KEY, upload

from bench import dataset
from bench.measure import engine
from voxtral_serve.transcript import subtitles
from voxtral_serve.transcript.subtitles import Segment

RATE = 16000
FORMS = {"txt": "text", "srt": "srt", "vtt": "vtt", "json": "verbose_json"}
NO_TIMES = {"timestamp_granularities[]": []}
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


def watch_statuses(page: Page) -> None:
    """Keep each status of the next files in `window.statuses`."""
    page.evaluate("""() => {
        window.statuses = [];
        const found = document.getElementsByClassName("status");
        const keep = () => window.statuses.push(...[...found].map((each) => each.textContent));
        new MutationObserver(keep).observe(document.getElementById("files"), { subtree: true, childList: true });
    }""")


def watch_words(page: Page) -> None:
    """Keep the number of each word that is lit in `window.lit`."""
    page.evaluate("""() => {
        window.lit = [];
        const keep = (changes) => {
            for (const { target } of changes) if (target.ariaCurrent) window.lit.push(Number(target.dataset.index));
        };
        const options = { subtree: true, attributeFilter: ["aria-current"] };
        new MutationObserver(keep).observe(document.querySelector(".words"), options);
    }""")


def words(page: Page) -> list[str]:
    return page.locator(".word").all_text_contents()


def test_a_file_becomes_the_apis_text_and_files(url: str, browser: Browser, clip: dataset.Clip) -> None:
    granularities = {"timestamp_granularities[]": ["word", "segment"]}
    answers = {
        suffix: upload(url, clip.path, response_format=form, **(granularities if suffix == "json" else {}))
        for suffix, form in FORMS.items()
    }
    verbose = answers["json"].json()
    assert len(verbose["segments"]) > 1
    with visit(browser, url) as page:
        watch_statuses(page)
        choose(page, str(clip.path))
        page.wait_for_selector(DONE)
        assert words(page) == verbose["text"].split()
        counts = re.findall(r"Transcribing: (\d+) word", str(page.evaluate("window.statuses")))
        assert len(set(counts)) > 1 and sorted(counts, key=int) == counts  # as the text is made
        for suffix, answer in answers.items():
            assert downloaded(page, suffix) == answer.content, suffix
        page.wait_for_selector(".wave[data-drawn]")
        assert page.evaluate("document.querySelector('.wave > div').shadowRoot.querySelector('canvas').width") > 100

        # A click plays from the word, and words are lit one after the other to the end
        number = len(verbose["words"]) // 2
        watch_words(page)
        page.locator(".word").nth(number).click()
        expect(page.locator(".time")).to_have_text(re.compile(r"^(\S+) / \1$"))
        lit = page.evaluate("window.lit")
        assert lit[0] >= number and len(lit) >= 3
        assert sorted(set(lit)) == lit

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


@pytest.fixture(scope="module")
def voices() -> np.ndarray:
    """float32 samples of two voices."""
    samples = soundfile.read(DATA / "live/06.opus", dtype="int16")[0][4 * RATE : 21 * RATE]
    return (samples / 32768).astype(np.float32)


# The least contrast of the names of 20 speakers with what is behind them, by WCAG 2.1
CONTRAST = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const light = (colour) => {
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const linear = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255)
            .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    };
    const turn = document.querySelector(".turn").cloneNode(true);
    document.querySelector(".words").append(turn);
    const behind = light(getComputedStyle(document.querySelector(".card")).backgroundColor);
    const found = new Map();
    for (let number = 0; number < 20; number += 1) {
        turn.style.setProperty("--hue", String((250 + number * 137.5) % 360));
        const colour = getComputedStyle(turn.querySelector(".who")).color;
        const [less, more] = [light(colour), behind].sort((a, b) => a - b);
        found.set(colour, (more + 0.05) / (less + 0.05));
    }
    turn.remove();
    return [found.size, Math.min(...found.values())];
}"""


def test_speakers_have_names_that_can_be_edited(url: str, browser: Browser, voices: np.ndarray) -> None:
    fields = {"diarize": "true", "num_speakers": "2", "timestamp_granularities[]": ["word", "segment"]}
    answers = {
        suffix: upload(url, voices, response_format=form, **(fields if suffix == "json" else {**fields, **NO_TIMES}))
        for suffix, form in FORMS.items()
    }
    segments = answers["json"].json()["segments"]
    turns = [speaker for speaker, _ in itertools.groupby(each["speaker"] for each in segments)]
    assert set(turns) == {"SPEAKER_1", "SPEAKER_2"}
    with visit(browser, url) as page:
        page.select_option("#speakers", "2")
        choose(page, named("voices.wav", inputs.encoded(voices)))
        page.wait_for_selector(DONE)
        who = page.locator(".who")
        assert who.all_text_contents() == turns
        assert page.locator(".turn p:not(.who)").count() == len(segments)
        for suffix, answer in answers.items():
            assert downloaded(page, suffix) == answer.content, suffix
        hues = page.locator(".turn").evaluate_all("each => each.map((turn) => turn.style.getPropertyValue('--hue'))")
        assert len(set(hues)) == len(set(zip(hues, turns, strict=True))) == 2
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            different, contrast = page.evaluate(CONTRAST)
            assert different == 20 and contrast >= 4.5, (theme, contrast)

        # An edited name is in all files and at each turn; it is no markup
        name = f"{MARKUP} --> Zoë"[:60]
        page.fill('[aria-label="Name of SPEAKER_2"]', f"  {name} ")
        page.press('[aria-label="Name of SPEAKER_2"]', "Enter")
        names = {"SPEAKER_1": "SPEAKER_1", "SPEAKER_2": name}
        assert who.all_text_contents() == [names[turn] for turn in turns]
        assert page.locator("img").count() == 0 and page.title() == "voxtral-serve"
        assert downloaded(page, "txt").decode() == answers["txt"].text.replace("SPEAKER_2: ", f"{name}: ")
        edited = json.loads(downloaded(page, "json"))
        assert [each["speaker"] for each in edited["segments"]] == [names[each["speaker"]] for each in segments]
        cues = [Segment(each["text"], each["start"], each["end"], names[each["speaker"]]) for each in segments]
        assert downloaded(page, "srt").decode() == subtitles.srt(cues)
        vtt = downloaded(page, "vtt").decode()
        assert vtt == subtitles.vtt(cues) and "<img" not in vtt
        page.click("text=Undo edits")
        assert downloaded(page, "json") == answers["json"].content
        assert who.all_text_contents() == turns


def test_speakers_are_asked_for_where_the_server_has_them(url: str, browser: Browser, voices: np.ndarray) -> None:
    """Server and answers are replaced. While labels are busy the file is sent again, in the end without them."""
    facts = requests.get(f"{url}/v1/server", headers=AUTHORIZED, timeout=60).json()
    assert facts["capabilities"]["speakers"] is True
    forms = list[list[bytes]]()
    error = {"message": "no speaker labels: busy: try again soon", "type": "server_error", "code": "no_speaker_labels"}
    done = {"type": "transcript.text.done", "text": "a", "duration": 1.0, "ignored": ["diarize"]}
    done |= {"words": [{"word": "a", "start": 0.0, "end": 1.0}], "segments": [{"start": 0.0, "end": 1.0, "text": "a"}]}
    events = [{"error": error}, done]

    def answer(route: Route) -> None:
        body = route.request.post_data_buffer or b""
        forms.append(re.findall(rb'name="(?:diarize|num_speakers)"\r\n\r\n(\w+)', body))
        event = events[not forms[-1] or b"optional" in forms[-1]]
        route.fulfill(body=f"data: {json.dumps(event)}\n\n", content_type="text/event-stream")

    clip = named("voices.wav", inputs.encoded(voices))
    with visit(browser, url, key=None) as page:
        choice = page.locator("#speakers")
        page.route("**/v1/audio/transcriptions", answer)
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        assert choice.locator("option").all_text_contents() == ["Off", "Automatic", *map(str, range(2, 21))]
        choice.select_option("Automatic")
        page.clock.install()
        choose(page, clip)
        status = page.locator(".status")
        expect(status).to_have_text(re.compile("^No speaker labels: busy: try again soon. It is sent again in"))
        page.clock.fast_forward(121_000)
        expect(status).to_have_text("0:01, 1 word without labels of speakers")
        assert forms[0] == [b"true"] and forms[-1] == [b"optional"]
        expect(page.locator(".voices, .who")).to_have_count(1)
        expect(page.locator(".voices")).to_be_hidden()
        page.route("**/v1/server", lambda route: route.fulfill(json={**facts, "capabilities": {"word_times": True}}))
        page.fill("#key", KEY + " ")
        page.press("#key", "Enter")
        expect(choice).to_be_hidden()
        choose(page, clip)
        expect(page.locator(DONE)).to_have_count(2)
        assert forms[-1] == []


def test_what_is_refused_is_said_in_words(url: str, browser: Browser, tmp_path: Path) -> None:
    silence = np.zeros(601 * RATE, np.int16)
    files = {
        "nonsense.wav": (b"nonsense", "The file is no audio that this server reads: expected WAV"),
        "empty.wav": (b"", "The file is empty"),
        "large.wav": (b"", "The file has 26 MiB, and this server takes at most 25 MiB. Send a compressed"),
        "long.flac": (inputs.encoded(silence, RATE, "FLAC"), "The clip lasts 601.00 s and this server takes at most"),
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


def test_a_file_is_cancelled_and_sent_again(url: str, browser: Browser) -> None:
    silence = named("silence.wav", inputs.encoded(np.zeros(RATE, np.float32)))
    with visit(browser, url, allowed="ERR_") as page:
        page.route("**/v1/audio/transcriptions", lambda route: None)  # an answer that does not come
        choose(page, *[silence] * 4)
        statuses, cancel = page.locator(".status"), page.locator('button:text-is("Cancel")')
        expect(statuses).to_have_text([re.compile("^Upload")] * 2 + ["Waiting for other files."] * 2)
        cancel.nth(2).click()
        expect(statuses.nth(2)).to_have_text("Cancelled.")
        cancel.nth(0).click()
        expect(statuses).to_have_text(["Cancelled.", *[re.compile("^Upload")], "Cancelled.", re.compile("^Upload")])
        page.locator("text=Send again").nth(2).click()
        expect(statuses.nth(2)).to_have_text("Waiting for other files.")
        page.unroute_all()  # the two answers that were waited for may come now
        page.locator("text=Remove").nth(1).click()
        expect(page.locator(".card").nth(1)).to_have_attribute("data-state", "done")


def test_the_corner_says_what_the_server_is(url: str, browser: Browser, clip: dataset.Clip) -> None:
    """And how many tokens a step makes while something is transcribed: the profile has drafts."""
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
        assert upload(url, clip.path).status_code == 200
        expect(corner).to_contain_text(re.compile(r"Tokens a step[1-9][0-9]*\.[0-9]"), timeout=30_000)


# ---- Slow: what a browser and a user may be


@pytest.mark.slow
def test_by_keyboard_alone(url: str, browser: Browser, clip: dataset.Clip) -> None:
    with visit(browser, url, key=None) as page:
        press, focused = page.keyboard.press, page.locator(":focus")
        press("Tab")
        expect(focused).to_have_attribute("id", "key")
        page.keyboard.type(KEY)
        press("Enter")
        expect(page.locator("#key-state")).to_have_text("accepted")
        press("Tab")
        expect(focused).to_have_attribute("id", "tab-files")
        press("ArrowRight")
        expect(page.locator("#live")).to_be_visible()
        press("ArrowLeft")
        expect(page.locator("#files")).to_be_visible()
        press("Tab")
        expect(focused).to_have_attribute("id", "file-input")
        with page.expect_file_chooser() as chooser:
            press("Enter")
        chooser.value.set_files(str(clip.path))
        page.wait_for_selector(DONE)
        expect(page.locator(".play")).to_be_enabled()
        for name in (None, "name", None, "play", "position", "word"):  # None: the choice of speakers, and Remove
            press("Tab")
            if name is not None:
                expect(focused).to_have_class(re.compile(rf"\b{name}\b"))
        press("ArrowRight")
        press("Enter")
        expect(page.locator(".word[aria-current]")).to_have_count(1)
        press("Home")
        press("F2")
        page.keyboard.type("Typed")
        press("Escape")
        press("F2")
        page.keyboard.type("Kept")
        press("Enter")
        expect(focused).to_have_text("Kept")
        press("ArrowDown")
        assert int(focused.get_attribute("data-index") or 0) > 1
        for _ in range(4):  # Edit words, Undo edits, Copy text, .txt
            press("Tab")
        with page.expect_download() as download:
            press("Enter")
        assert Path(download.value.path()).read_text().startswith("Kept ")
        assert download.value.suggested_filename == f"{clip.id}.txt"


AXE = ROOT / "tests/support/axe/axe.min.js"


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_has_no_complaint(url: str, browser: Browser, clip: dataset.Clip, theme: str, tmp_path: Path) -> None:
    (tmp_path / "nonsense.wav").write_bytes(b"nonsense")
    # axe writes a <style> element, which the page does not allow
    with visit(browser, url, allowed="Applying inline style", color_scheme=theme) as page:
        choose(page, str(clip.path), str(tmp_path / "nonsense.wav"))
        page.wait_for_selector(".wave[data-drawn]")
        page.wait_for_selector('.card[data-state="failed"]')
        page.locator(".word").nth(2).dblclick()
        page.fill(".edit", "edited")
        page.evaluate(AXE.read_text(encoding="utf-8"))
        for act in (None, ".word >> nth=3", "#tab-live"):  # while a word is edited, while one is heard, the other half
            if act:
                page.click(act)
            found = page.evaluate("axe.run()")
            assert len(found["passes"]) > 10
            assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []


WIDTHS = (390, 820, 1280)  # a phone, a tablet, a desk
PICTURES = {("light", 1280): "page-files.png", ("dark", 390): "page-phone.png"}  # those of docs/pages/page.md


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures(
    url: str, browser: Browser, clip: dataset.Clip, theme: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Nothing is wider than the window. With `--pictures FOLDER`, those of the documentation are written there."""
    folder = pytestconfig.getoption("pictures")
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    word = upload(url, clip.path, **fields).json()["words"][6]
    for width in WIDTHS:
        with visit(browser, url, color_scheme=theme, viewport={"width": width, "height": 760}) as page:
            choose(page, str(clip.path))
            page.wait_for_selector(DONE)
            page.wait_for_selector(".wave[data-drawn]")
            page.fill(".position", f"{(word['start'] + word['end']) / 2:.1f}")
            expect(page.locator(".word").nth(6)).to_have_attribute("aria-current", "true")
            page.evaluate("document.activeElement.blur()")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            name = PICTURES.get((theme, width))
            place = Path(folder) / name if folder and name else tmp_path / f"{width}.png"
            assert len(page.screenshot(path=place, full_page=True, scale="css")) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_speakers_on_the_page(
    url: str, browser: Browser, voices: np.ndarray, theme: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """axe has no complaint, and nothing is wider than a phone or a desk."""
    folder = pytestconfig.getoption("pictures")
    for width in (390, 1000):
        options: Any = {"color_scheme": theme, "viewport": {"width": width, "height": 760}}
        with visit(browser, url, allowed="Applying inline style", **options) as page:
            page.select_option("#speakers", "2")
            choose(page, named("voices.wav", inputs.encoded(voices)))
            page.wait_for_selector(DONE)
            page.wait_for_selector(".wave[data-drawn]")
            page.fill('[aria-label="Name of SPEAKER_2"]', "Mara")
            page.press('[aria-label="Name of SPEAKER_2"]', "Enter")
            page.evaluate("document.activeElement.blur()")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            wanted = folder and theme == "light" and width == 1000
            place = Path(folder) / "page-speakers.png" if wanted else tmp_path / f"{width}.png"
            assert len(page.screenshot(path=place, full_page=True, scale="css")) > 10_000
            page.evaluate(AXE.read_text(encoding="utf-8"))
            found = page.evaluate("axe.run()")
            assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []


@pytest.mark.slow
def test_firefox(url: str, clip: dataset.Clip, tmp_path: Path) -> None:
    text = upload(url, clip.path).json()["text"]
    with Firefox(tmp_path) as firefox:
        firefox.visit(f"{url}/")
        firefox.wait_for("document.documentElement.dataset.ready")
        firefox.evaluate(
            "window.blocked = [];"
            "addEventListener('securitypolicyviolation', (event) => blocked.push(event.blockedURI));"
            f"key.value = {json.dumps(KEY)}; void key.dispatchEvent(new Event('change'))"
        )
        firefox.wait_for("document.getElementById('key-state').textContent === 'accepted'")
        firefox.choose("#file-input", clip.path)
        firefox.wait_for("document.querySelector('.card[data-state=done] .wave[data-drawn]') !== null")
        found = "[...document.querySelectorAll('.word')].map((each) => each.textContent).join(' ')"
        assert firefox.evaluate(found) == text
        firefox.evaluate("void document.querySelectorAll('.word')[2].click()")
        firefox.wait_for("document.querySelector('.word[aria-current]')?.dataset.index > 2")
        assert firefox.evaluate("blocked.join()") == ""
        wave = "document.querySelector('.wave > div').shadowRoot.querySelector('.scroll')"
        assert firefox.evaluate(f"getComputedStyle({wave}).overflowY") == "hidden"  # the style with the nonce


PREFIXED = """
daemon off; pid {folder}/pid; error_log stderr; {user}
events {{}}
http {{
  access_log off; client_max_body_size 30m;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location /speech/ {{ proxy_pass {url}/; proxy_http_version 1.1; proxy_buffering off; }}
  }}
}}
"""


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason=f"not run: no nginx: {COMMAND}")
def test_behind_nginx_and_below_a_prefix(url: str, browser: Browser, clip: dataset.Clip, tmp_path: Path) -> None:
    user = "user root;" if os.geteuid() == 0 else ""
    port = engine.free_port()
    (tmp_path / "nginx.conf").write_text(PREFIXED.format(folder=tmp_path, port=port, url=url, user=user))
    process = subprocess.Popen([str(NGINX), "-e", "stderr", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")])
    try:
        wait_for_port(port, process)
        with visit(browser, f"http://127.0.0.1:{port}/speech") as page:
            choose(page, str(clip.path))
            page.wait_for_selector(DONE)
            expect(page.locator("#server")).to_contain_text("In flight")
    finally:
        process.terminate()
        process.wait(timeout=60)
    (tmp_path / "deployed").mkdir()
    with Proxy(tmp_path / "deployed", [int(url.rpartition(":")[2])]) as proxy, visit(browser, proxy.url) as page:
        choose(page, str(clip.path))
        page.wait_for_selector(DONE)


@pytest.mark.slow
def test_a_busy_server_and_one_that_is_started_again(
    browser: Browser, clip: dataset.Clip, hugging_face: Path, tmp_path: Path
) -> None:
    """One request at a time: the page waits for its turn. Then the server is killed while it transcribes."""
    port = engine.free_port()
    url = f"http://127.0.0.1:{port}"
    flags = (*EAGER, "--api-server-count", "1", "--api-key", KEY)
    environment = {**UNBOUND, "VOXTRAL_SERVE_MAX_IN_FLIGHT": "1"}

    def started(log: str) -> contextlib.AbstractContextManager[engine.Engine]:
        config = ROOT / "profiles/fast.yaml"
        return engine.served(config, hugging_face, port, tmp_path / log, *flags, environment=environment)

    samples = np.tile(soundfile.read(clip.path, dtype="float32")[0], 20)
    soundfile.write(tmp_path / "long.flac", samples, RATE)
    with contextlib.ExitStack() as stack:
        with started("first.log") as server:
            page = stack.enter_context(visit(browser, url, allowed="ERR_"))
            watch_statuses(page)
            choose(page, str(tmp_path / "long.flac"), str(clip.path))  # two at a time
            expect(page.locator(DONE)).to_have_count(2)
            waits = (
                "1 requests are in flight, as many as this server takes at a time: try again soon. The server is busy."
            )
            assert waits in str(page.evaluate("window.statuses"))
            choose(page, str(tmp_path / "long.flac"))
            status = page.locator(".card .status").nth(2)
            expect(status).to_contain_text("Transcribing")
            server.send_signal(signal.SIGKILL)
            expect(status).to_contain_text("The server does not answer. Check that it is running")
            expect(page.locator("#server")).to_contain_text("The server does not answer.")
        with started("second.log"):
            expect(page.locator(DONE)).to_have_count(3)
            expect(page.locator("#server")).to_contain_text("fast.yaml")
