"""Modules of the page's live half, in a Chromium: sessions over cut connections, what is kept, resampling, files."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from browser import chromium
from fakerealtime import RATE, FakeTurns, blocks
from playwright.sync_api import Page

from voxtral_serve.guard import page as files

WORDS = {1: "Alpha", 2: " beta.", 3: "Gamma", 4: " delta.", 5: "Last", 6: " words."}
# 80 ms each; 7 is noise in which nothing is said
NUMBERS = [0, 0, 1, 7, 2, 0, 0, 0, 7, 3, 7, 7, 4, 0, 0, 7, 5, 6]
TURNS = [("Alpha beta.", 0.16, 0.4), ("Gamma delta.", 0.72, 1.04), ("Last words.", 1.28, 1.44)]
# Sends `pcm` in pieces of 40 ms and returns the events. `steps` are calls of the session, by the number of the piece
# that follows. They wait for a connection; after "pause", all that was said has its text before it goes on.
SESSION = """async ({address, pcm, options, steps, status}) => {
  const { LiveSession } = await import("/page/live-session.js");
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const until = async (met) => {
    for (let waited = 0; !met() && waited < 60000; waited += 10) await pause(10);
  };
  const session = new LiveSession({ address, key: "", probe: async () => status, wait_ms: [10], ...options });
  const events = [];
  const over = new Promise((done) => {
    for (const kind of ["state", "partial", "turn", "lost", "failed"]) {
      session.addEventListener(kind, ({ detail }) => {
        events.push([kind, structuredClone(detail)]);
        if (kind === "failed" || detail.state === "ended") done();
      });
    }
  });
  session.open();
  for (let start = 0; start < pcm.length; start += 640) {
    const step = steps[start / 640];
    if (step) {
      if (step !== "resume") await until(() => session.ready);
      session[step]();
      if (step === "pause") await until(() => session.tape.first === session.tape.end);
    }
    session.record(Int16Array.from(pcm.slice(start, start + 640)));
    await pause(2);
  }
  if (!session.over) session.end();
  await Promise.race([over, pause(60000)]);
  return [...events, ...(session.over ? [] : [["failed", { words: "no end within a minute" }]])];
}"""


class Files(SimpleHTTPRequestHandler):
    """The page's files, as the guard names them; a page with nothing on it is at /empty."""

    def translate_path(self, path: str) -> str:
        return str(files.DIRECTORY / path.removeprefix("/page/"))

    def do_GET(self) -> None:
        if self.path != "/empty":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()

    def log_message(self, format: str, *values: Any) -> None:
        pass


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page with nothing on it, which can import the page's modules."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server, chromium() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = browser.new_page()
        found.goto(f"http://127.0.0.1:{server.server_port}/empty")
        yield found
        server.shutdown()


def session(
    page: Page, server: FakeTurns, steps: dict[int, str] | None = None, status: int = 0, **options: Any
) -> list[tuple[str, Any]]:
    address = f"{server.url.replace('http', 'ws')}/v1/realtime?intent=transcription"
    pcm = np.rint(blocks(NUMBERS) * 32767).astype(int).tolist()
    given = {"address": address, "pcm": pcm, "options": options, "steps": steps or {}, "status": status}
    return [(kind, detail) for kind, detail in page.evaluate(SESSION, given)]


def turns(events: list[tuple[str, Any]]) -> list[tuple[str, float, float]]:
    return [(each["text"], round(each["start"], 2), round(each["end"], 2)) for kind, each in events if kind == "turn"]


def failure(events: list[tuple[str, Any]]) -> str:
    (words,) = (detail["words"] for kind, detail in events if kind == "failed")
    return str(words)


# ---- Sessions


def test_a_session_asks_for_what_was_chosen(page: Page) -> None:
    with FakeTurns(WORDS) as server:
        events = session(page, server, delay="low", turns="semantic_vad")
    assert turns(events) == TURNS
    (one,) = server.sessions
    assert one.settings["audio"]["input"] == {
        "format": {"type": "audio/pcm", "rate": RATE},
        "transcription": {"delay": "low"},
        "turn_detection": {"type": "semantic_vad"},
    }
    assert one.kinds[-2:] == ["input_audio_buffer.commit", "input_audio_buffer.clear"]
    assert np.array_equal(np.frombuffer(one.audio, "<i2"), np.rint(blocks(NUMBERS) * 32767))
    grown = [detail[-1]["text"] for kind, detail in events if kind == "partial" and detail]
    assert grown[:2] == ["Alpha", "Alpha beta."]


@pytest.mark.parametrize("cut_s", [0.1, 0.3, 0.45, 0.5, 0.9, 1.2, 1.44])
def test_a_connection_that_is_cut(page: Page, cut_s: float) -> None:
    """Wherever that happens, nothing is lost and nothing doubled, and times stay."""
    with FakeTurns(WORDS, cuts={0: cut_s, 1: 0.2}, refuses={2: "too_many_sessions"}) as server:
        events = session(page, server)
    assert turns(events) == TURNS
    assert len(server.sessions) == 4
    waits = [detail["words"] for kind, detail in events if kind == "state" and detail["state"] == "waiting"]
    assert waits == ["the connection is lost", "the connection is lost", "the server says: not now"]


def test_a_turn_that_fails_is_sent_again(page: Page) -> None:
    with FakeTurns(WORDS, fails={0: 2, 1: 1}) as server:
        assert turns(session(page, server)) == TURNS
    assert len(server.sessions) == 3


def test_a_pause_ends_the_turn(page: Page) -> None:
    """Within a turn, here, whose text is complete before the rest of the audio is there."""
    with FakeTurns(WORDS) as server:
        events = session(page, server, {6: "pause", 7: "resume"})  # between Alpha and beta
    assert [text for text, *_ in turns(events)] == ["Alpha", "beta.", "Gamma delta.", "Last words."]
    states = [detail["state"] for kind, detail in events if kind == "state"]
    assert states == ["connecting", "listening", "paused", "listening", "ended"]
    kinds = [kind for kind, _ in events]
    assert kinds.index("turn") < [event[1] for event in events].index({"state": "listening"}, 3)
    assert len(server.sessions) == 1


def test_a_pause_that_is_cut(page: Page) -> None:
    """While all has its text, nothing is connected again before there is more audio."""
    with FakeTurns(WORDS, cuts={0: 0.48}) as server:  # with the piece before the pause
        events = session(page, server, {12: "pause", 14: "resume"})
    assert turns(events)[-2:] == TURNS[1:] and " ".join(text for text, *_ in turns(events)[:-2]) == "Alpha beta."
    assert len(server.sessions) == 2


@pytest.mark.parametrize(("status", "why"), [(401, "asks for a key"), (200, "profiles/fast.yaml")])
def test_no_connection_is_told_by_another_request(page: Page, status: int, why: str) -> None:
    with FakeTurns(WORDS) as server:
        pass  # it is gone
    assert why in failure(session(page, server, status=status))


def test_a_key_that_a_browser_cannot_send(page: Page) -> None:
    with FakeTurns(WORDS) as server:
        assert "letters, digits" in failure(session(page, server, key="a/b=="))
        assert server.sessions == []


def test_an_error_that_will_not_pass_ends_the_session(page: Page) -> None:
    with FakeTurns(WORDS, refuses={0: "model_not_found"}) as server:
        assert failure(session(page, server)) == "The server refuses: not now"
    assert len(server.sessions) == 1


# ---- What is kept


TAPE = """async ({most, pieces, calls}) => {
  const { Tape } = await import("/page/tape.js");
  const tape = new Tape(most);
  let position = 0;
  const found = [];
  for (const length of pieces) tape.record(Int16Array.from({ length }, () => position++));
  for (const [name, ...given] of calls) {
    const got = tape[name](...given);
    if (name === "take") found.push(got && [...got]);
  }
  const rest = [];
  for (let piece; (piece = tape.take()); ) rest.push(...piece);
  return { found, rest, first: tape.first, end: tape.end, lost: tape.lost };
}"""


def tape(page: Page, most: int, pieces: list[int], *calls: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate(TAPE, {"most": most, "pieces": pieces, "calls": [*calls]})
    return found


def test_all_is_sent_once_and_again_from_what_was_answered(page: Page) -> None:
    found = tape(page, 1000, [10, 10, 10], ["take"], ["take"], ["answered", 15], ["rewind"])
    assert found["found"] == [list(range(10)), list(range(10, 20))]
    assert (found["first"], found["rest"]) == (15, list(range(15, 30)))


def test_what_was_not_sent_is_not_answered(page: Page) -> None:
    found = tape(page, 1000, [10, 10, 10], ["take"], ["answered", 25])
    assert (found["first"], found["rest"]) == (10, list(range(10, 30)))


def test_a_mark_within_a_piece(page: Page) -> None:
    found = tape(page, 1000, [10, 10], ["take", 4], ["take", 4], ["take", 12], ["take", 12])
    assert found["found"] == [[0, 1, 2, 3], None, [4, 5, 6, 7, 8, 9], [10, 11]]
    assert found["rest"] == list(range(12, 20))


@pytest.mark.parametrize(("sent", "lost"), [(0, 20), (1, 10), (2, 0), (4, 0)])
def test_the_oldest_audio_is_dropped_and_counted_where_it_was_never_sent(page: Page, sent: int, lost: int) -> None:
    script = TAPE.replace("  const rest", "  for (const _ of [1, 2]) tape.record(new Int16Array(10));\n  const rest")
    found = page.evaluate(script, {"most": 40, "pieces": [10] * 4, "calls": [["take"]] * sent})
    assert (found["first"], found["end"], found["lost"]) == (20, 60, lost)


# ---- Samples


@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000, 96000])
def test_resampling(page: Page, rate: int) -> None:
    """Tones below 6.5 kHz keep their level and place, tones above the model's band go, whatever the pieces."""
    script = """async ({rate, tone}) => {
      const { Resampler } = await import("/page/resampler.js");
      const input = Float32Array.from({ length: rate / 2 }, (_, n) => Math.sin((2 * Math.PI * tone * n) / rate));
      const parts = new Resampler(rate, 16000);
      const found = [];
      for (let at = 0; at < input.length; at += 128) found.push(...parts.take(input.subarray(at, at + 128)));
      const whole = new Resampler(rate, 16000).take(input);
      return { found, same: whole.length === found.length && whole.every((value, n) => value === found[n]) };
    }"""
    for tone in (200, 3000, 6500, 9500, 15000):
        if tone < rate / 2 * 0.9:
            result = page.evaluate(script, {"rate": rate, "tone": tone})
            found = np.array(result["found"])
            expected = np.sin(2 * np.pi * tone * np.arange(len(found)) / 16000) * (tone < 8000)
            assert result["same"]
            assert abs(len(found) - 8000) < 100
            error = (found - expected)[200:-200]
            assert 20 * np.log10(np.abs(error).max()) < -60, (rate, tone)


def test_levels(page: Page) -> None:
    script = """async (samples) => (await import("/page/capture.js")).level(Int16Array.from(samples))"""
    tone = np.sin(np.arange(640) * 2 * np.pi / 64)
    for peak, expected in ((32767, -3.0), (3277, -23.0), (0, -100)):
        assert page.evaluate(script, np.rint(tone * peak).tolist()) == pytest.approx(expected, abs=0.1)


# ---- Text


def saved(page: Page, form: str, found: list[Any]) -> str:
    script = """async ({form, turns}) => (await import("/page/turns.js"))[form](turns)"""
    return str(page.evaluate(script, {"form": form, "turns": found}))


def test_files(page: Page) -> None:
    word = {"word": "Alpha", "start": 3599.9996, "end": 3600.5}
    long = "one two three four five six seven eight nine ten " + "x" * 50
    parts = [
        {"start": 3599.9996, "end": 3600.5, "text": "Alpha", "words": [word]},
        {"start": 3601, "end": 3602.25, "text": long, "words": []},
    ]
    both = {"number": 3, "start": 3599.9996, "end": 3602.25, "text": f"Alpha {long}", "segments": parts}
    assert saved(page, "asText", [both, {**both, "text": "Beta"}]) == f"Alpha {long}\nBeta\n"
    first, second = saved(page, "asSubtitles", [both]).strip().split("\n\n")
    assert first == "1\n01:00:00,000 --> 01:00:00,500\nAlpha"
    number, times, *lines = second.split("\n")
    assert (number, times) == ("2", "01:00:01,000 --> 01:00:02,250")
    assert lines == ["one two three four five six seven eight", "nine ten " + "x" * 33, "x" * 17]
    told = json.loads(saved(page, "asJson", [both]))
    assert told == {"text": both["text"], "turns": [{key: both[key] for key in both if key != "number"}]}


def test_text_is_never_markup(page: Page) -> None:
    script = """async (text) => {
      const { TurnView } = await import("/page/turns.js");
      const place = document.createElement("div");
      const view = new TurnView(place);
      view.turn({ number: 0, start: 1, end: 2, text, segments: [] });
      view.update([{ number: 1, start: 65, text }]);
      return [place.querySelectorAll("img, b").length, place.textContent];
    }"""
    text = "<img src=x onerror=alert(1)> <b>bold</b> &amp;"
    count, shown = page.evaluate(script, text)
    assert count == 0
    assert re.sub(r"\s+", " ", shown) == f"0:01 {text}1:05 {text}"
