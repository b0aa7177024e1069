"""The files of the page, as the guard reads and serves them."""

import asyncio
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import EngineClient
from guarding import facts
from places import ROOT

from voxtral_serve.guard import limits, middleware, page
from voxtral_serve.guard.transcription import TranscriptionRequest
from voxtral_serve.transcript import subtitles
from voxtral_serve.transcript.subtitles import Segment

FILES = page.read()
LARGEST = 300 * 1024  # bytes of all files: one load of the page
NODE = shutil.which("node")


class Answer:
    """What a client of the guard gets: no application is behind it."""

    def __init__(self, path: str, method: str = "GET", root: str = "", started: bool = True, **headers: str) -> None:
        self.status, self.headers, self.body = 0, dict[str, str](), b""
        made = middleware.Guard(self._app)
        if started:  # with a key, which the page does not need
            made.facts = facts(EngineClient())._replace(verify=lambda headers: False)
        scope = {
            **{"type": "http", "method": method, "path": root + path, "root_path": root},
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
        }
        asyncio.run(made(scope, asyncio.Event().wait, self._send))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the request went to vLLM")

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]


def test_the_files_are_small_and_served_with_their_types() -> None:
    assert {"/", "/page/main.js", "/page/api.js", "/page/style.css"} <= FILES.keys()
    assert sum(len(file.content) for file in FILES.values()) < LARGEST
    for path, file in FILES.items():
        answer = Answer(path)
        assert (answer.status, len(answer.body)) == (200, int(answer.headers["content-length"])), path
        assert answer.headers["content-type"] == file.kind.decode()
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_index_allows_nothing_inline_and_nothing_from_elsewhere() -> None:
    first, second = Answer("/"), Answer("/")
    policy = dict(each.strip().split(" ", 1) for each in first.headers["content-security-policy"].split(";"))
    nonce = re.search(r"'nonce-([\w-]{20,})'", policy.pop("style-src"))
    assert nonce
    assert nonce[1] in first.body.decode()
    assert nonce[1] not in second.body.decode()
    assert "unsafe" not in first.headers["content-security-policy"]
    assert set(policy.values()) <= {"'none'", "'self'", "blob:"}
    assert (policy["default-src"], policy["frame-ancestors"]) == ("'none'", "'none'")
    assert first.headers["permissions-policy"].startswith("microphone=(self)")
    assert first.headers["cache-control"] == "no-store"


def test_no_file_names_another_host_or_an_absolute_path() -> None:
    for path, file in FILES.items():
        if "/vendor/" not in path and path.endswith((".html", ".js", ".css")):
            text = re.sub(r"(^|\s)//.*", "", file.content.decode())  # without comments, which name their sources
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
            assert not re.search(r"""(src|href|from|url\(|import\()\s*=?\s*["']?/""", text), path
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\bstyle=", text), path


def test_a_browser_asks_whether_a_file_has_changed() -> None:
    first = Answer("/page/main.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for given in (tag, f'"x", W/{tag}', "*"):
        again = Answer("/page/main.js", if_none_match=given)
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
    assert Answer("/page/main.js", if_none_match='"x"').status == 200


def test_head_has_the_headers_alone() -> None:
    get, head = Answer("/page/style.css"), Answer("/page/style.css", "HEAD")
    get.headers.pop("x-request-id")
    head.headers.pop("x-request-id")
    assert (head.status, head.body, head.headers) == (200, b"", get.headers)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_other_methods_are_refused(method: str) -> None:
    answer = Answer("/", method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


def test_below_a_root_path() -> None:
    assert Answer("/", root="/speech").body
    assert Answer("/page/main.js", root="/speech").status == 200


@pytest.mark.parametrize(
    "path", ["/page", "/page/", "/page/index.html", "/page/../limits.py", "/page/%2e%2e/limits.py", "/page//main.js"]
)
def test_no_other_path_is_a_file(path: str) -> None:
    assert Answer(path).status == 404


def test_the_page_is_there_while_the_server_starts_or_stops() -> None:
    assert Answer("/", started=False).status == 200


def test_without_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not limits.limits({"VOXTRAL_SERVE_PAGE": "0"}).page
    monkeypatch.setenv("VOXTRAL_SERVE_PAGE", "0")
    code = "from voxtral_serve.guard.transcription import TranscriptionRequest; print(dict(TranscriptionRequest.PAGES))"
    served = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert served.stdout == "{}\n"
    monkeypatch.setattr(TranscriptionRequest, "PAGES", {})
    assert (Answer("/").status, Answer("/page/main.js").status) == (404, 404)


@pytest.mark.parametrize("value", ["", "no", "2", "true"])
def test_a_wrong_switch_is_named(value: str) -> None:
    with pytest.raises(limits.LimitError, match=f"VOXTRAL_SERVE_PAGE is '{value}': expected 0 or 1"):
        limits.limits({"VOXTRAL_SERVE_PAGE": value})


def test_a_directory_that_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(page.PageError, match=r"has no index\.html: install voxtral-serve again"):
        page.read(tmp_path)
    (tmp_path / "index.html").touch()
    (tmp_path / "notes.docx").touch()
    with pytest.raises(page.PageError, match=r"notes\.docx is not a file of the page"):
        page.read(tmp_path)


def test_what_the_server_is_needs_the_key() -> None:
    answer = Answer("/v1/server")
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")


def test_vendored_files_are_unmodified() -> None:
    """Each has a line in the README beside it, with its sum."""
    for folder in (page.DIRECTORY / "vendor", ROOT / "tests/support/axe"):
        listed = dict(
            re.findall(r"^\| `([\w.]+\.js)` .* `([0-9a-f]{64})` \|$", (folder / "README.md").read_text(), re.M)
        )
        assert listed.keys() == {path.name for path in folder.glob("*.js")}
        for name, expected in listed.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected, name


SIGNS = [
    "a",
    "word",
    "well-known",
    "-",
    "--",
    "3-4",
    "x-ray",
    "é",
    "e\u0301",
    "日本",
    "²",
    "Ⅷ",
    "😀",
    "'",
    '"',
    "&",
    "<b>",
    "_",
    "٣",
]


needs_node = pytest.mark.skipif(NODE is None, reason="not run: no node. Debian's package is `nodejs`")


def module(name: str) -> str:
    return json.dumps(str(page.DIRECTORY / name))


def by_node(script: str) -> Any:
    """What a script prints, as JSON."""
    command = [str(NODE), "--input-type=module", "-e", script]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@needs_node
def test_subtitles_are_those_of_the_server(tmp_path: Path) -> None:
    """Segments of hyphens, dashes, digits and signs of several scripts, wrapped by the page and by the server."""
    chosen = random.Random(0)
    segments = []
    for number in range(3000):
        words = [
            "".join(chosen.choices(SIGNS, k=chosen.choice([1, 1, 2, 4, 20]))) for _ in range(chosen.randint(1, 14))
        ]
        speaker = " ".join(words[: number % 3]) or None  # of every third one: none
        segments.append(Segment(" ".join(words), number * 1.7, number * 1.7 + chosen.random(), speaker))
    rounded = [s._replace(start=round(s.start, 3), end=round(s.end, 3))._asdict() for s in segments]
    (tmp_path / "segments.json").write_text(json.dumps(rounded))
    found = by_node(
        f"""import {{ readFileSync }} from "node:fs";
        import {{ srt, vtt }} from {module("subtitles.js")};
        const segments = JSON.parse(readFileSync({json.dumps(str(tmp_path / "segments.json"))}, "utf-8"));
        console.log(JSON.stringify([srt(segments), vtt(segments)]));"""
    )
    assert found == [subtitles.srt(segments), subtitles.vtt(segments)]


SAID = (("SPEAKER_1", "Yes."), ("SPEAKER_2", "No no."), ("SPEAKER_1", "Yes."), ("SPEAKER_3", "Yes."))


@needs_node
def test_a_speaker_s_name_is_changed_everywhere() -> None:
    """And names are one line, escaped where the format has markup; two speakers with one name are one in the text."""
    times = [{"start": n, "end": n + 1} for n in range(len(SAID))]
    segments = [{"id": n, **times[n], "text": text, "speaker": speaker} for n, (speaker, text) in enumerate(SAID)]
    words = [
        {"word": word, **times[n], "speaker": speaker}
        for n, (speaker, text) in enumerate(SAID)
        for word in text.split()
    ]
    content = {"text": "Yes. No no. Yes. Yes.", "duration": 4, "segments": segments, "words": words}
    found = by_node(
        f"""import {{ Transcript }} from {module("transcript.js")};
        const made = new Transcript({json.dumps(json.dumps(content))});
        const files = () => ["txt", "srt", "vtt", "json"].map((format) => made.file(format));
        const all = [made.speakers, files()];
        made.rename("SPEAKER_1", "  <b>A&B</b>\\n\\u0000\\n-->  C ");
        made.rename("SPEAKER_3", "<b>A&B</b> --> C");
        all.push(made.edited, files());
        made.rename("SPEAKER_1", " ");
        all.push(made.name("SPEAKER_1"));
        made.revert();
        console.log(JSON.stringify([...all, made.edited, files()]));"""
    )
    speakers, before, edited, (txt, srt, vtt, changed), emptied, edited_again, after = found
    assert speakers == ["SPEAKER_1", "SPEAKER_2", "SPEAKER_3"]
    assert before[0] == "SPEAKER_1: Yes.\nSPEAKER_2: No no.\nSPEAKER_1: Yes.\nSPEAKER_3: Yes.\n"
    assert json.loads(before[3]) == content
    name = "<b>A&B</b> --> C"
    names = {"SPEAKER_1": name, "SPEAKER_2": "SPEAKER_2", "SPEAKER_3": name}
    named = [Segment(text, n, n + 1, names[speaker]) for n, (speaker, text) in enumerate(SAID)]
    assert (edited, txt) == (True, f"{name}: Yes.\nSPEAKER_2: No no.\n{name}: Yes. Yes.\n")
    assert (srt, vtt) == (subtitles.srt(named), subtitles.vtt(named))
    assert "<b>" not in vtt and "\n&lt;b&gt;A&amp;B&lt;/b&gt; --&gt; C: Yes.\n" in vtt
    assert json.loads(changed) == {
        **content,
        "segments": [{**each, "speaker": names[each["speaker"]]} for each in segments],
        "words": [{**each, "speaker": names[each["speaker"]]} for each in words],
    }
    assert (emptied, edited_again, after) == ("SPEAKER_1", False, before)


@needs_node
@pytest.mark.parametrize("timed", [True, False], ids=["words", "segments only"])
def test_a_removed_word_leaves_no_empty_segment(timed: bool) -> None:
    """Of a model without times of words, each segment is edited as a whole."""
    segments = [{"id": n, "start": n, "end": n + 1, "text": text} for n, text in enumerate(("Yes.", "No no."))]
    words = [{"word": word, "start": n, "end": n + 1} for n, word in ((0, "Yes."), (1, "No"), (1, "no."))]
    content = {"text": "Yes. No no.", "duration": 2, "segments": segments, **({"words": words} if timed else {})}
    found = by_node(
        f"""import {{ Transcript }} from {module("transcript.js")};
        const made = new Transcript({json.dumps(json.dumps(content))});
        const before = [made.file("txt"), made.file("json")];
        made.edit(0, " ");
        console.log(JSON.stringify([...before, made.file("txt"), made.file("srt"), JSON.parse(made.file("json"))]));"""
    )
    text, unedited, edited, srt, changed = found
    assert (text, json.loads(unedited), edited) == ("Yes. No no.\n", content, "No no.\n")
    assert srt == "1\n00:00:01,000 --> 00:00:02,000\nNo no.\n\n"
    assert changed["segments"] == [{**segments[1], "id": 0}]
    assert changed.get("words") == (words[1:] if timed else None)
