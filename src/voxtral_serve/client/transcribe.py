"""`voxtral-serve transcribe`: send audio files to a server's /v1/audio/transcriptions; print the answers or keep them.

An output is there as a whole or not at all, and what is there is not asked for again: a run that was cut, repeated,
does the rest. Imports neither vLLM nor PyTorch.
"""

import contextlib
import itertools
import json
import os
import re
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import urlsplit

import requests
import urllib3
from tqdm import tqdm

# What the guard of a server reads (voxtral_serve.audio.decode); a file that is named itself may have any other.
EXTENSIONS = {
    *(".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aiff", ".aif", ".au", ".caf"),
    *(".m4a", ".mp4", ".webm", ".aac", ".amr"),
}
FORMATS = {"text": ".txt", "json": ".json", "verbose_json": ".json", "srt": ".srt", "vtt": ".vtt"}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
BUSY = (429, 503)
RETRIES = 7
WAIT_S, LONGEST_WAIT_S = 1.0, 60.0  # before the first of them, where the server does not say; before any
CONNECT_S = 10
ANSWER_S = 3600  # an hour of audio takes a small machine many minutes, and not a byte comes before its end
SHOWN = 300  # characters of an answer that is no error of OpenAI's form


class UsageError(Exception):
    """What the command was given cannot be used, and nothing was sent. Worded for the user; exit status 2."""


class RequestError(Exception):
    """One request came to nothing. Worded for the user, with the status and the server's own words."""


class GoneError(RequestError):
    """Nobody listens there, so no other request can succeed either."""


class StoppedError(Exception):
    """The run ends, and this request was not answered yet."""


class Found(NamedTuple):
    """An audio file: as it was named, and its path below the folder that was given (its name if it was itself)."""

    path: Path
    below: Path


def find(given: Sequence[Path]) -> list[Found]:
    """All files, those of folders by extension and without hidden ones, none twice. Raises UsageError."""
    found: dict[str, Found] = {}
    for each in given:
        if each.is_dir():
            paths = list(_audio_in(each))
            if not paths:
                raise UsageError(f"{shown(each)} has no audio files ({' '.join(sorted(EXTENSIONS))})")
        elif each.is_file():
            paths = [each]
        else:
            raise UsageError(f"{shown(each)} is {'no regular file' if each.exists() else 'not there'}")
        for path in paths:
            below = path.relative_to(each) if each.is_dir() else Path(path.name)
            found.setdefault(os.path.abspath(path), Found(path, below))
    return list(found.values())


def _audio_in(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UsageError(f"{shown(Path(error.filename))} cannot be read: {error.strerror}")

    for directory, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(directory, name)
            if not name.startswith(".") and path.suffix.lower() in EXTENSIONS and path.is_file():
                yield path


def targets(found: Sequence[Found], out: Path, suffix: str) -> list[Path]:
    """Where each file's transcript goes.

    `out`/NAME`suffix`, NAME being the path below the folder that was given. Those that would be the same, also where
    a file system knows no upper case, get their path below the folder that all files are in; and where that is still
    the same, as of x.wav and x.mp3, with the file's extension.
    """
    together = os.path.commonpath([os.path.dirname(os.path.abspath(each.path)) for each in found])

    def name(each: Found, level: int) -> str:
        path = each.below if level == 0 else Path(os.path.relpath(each.path, together))
        return str(path if level == 2 else path.with_suffix("")) + suffix

    levels = [0] * len(found)
    while True:
        names = [name(each, level) for each, level in zip(found, levels, strict=True)]
        same: dict[str, list[int]] = {}
        for number, each in enumerate(names):
            same.setdefault(each.casefold(), []).append(number)
        clashes = [numbers for numbers in same.values() if len(numbers) > 1]
        if not clashes:
            return [out / each for each in names]
        for numbers in clashes:
            lowest = min(levels[number] for number in numbers)
            for number in numbers:
                levels[number] += levels[number] == lowest


def shown(path: Path) -> str:
    """The path as text that any terminal takes: names may hold bytes that are no UTF-8, and control characters."""
    return _plain(os.fsencode(path).decode(errors="replace"))


def _plain(text: str) -> str:
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def api_key(environ: Mapping[str, str]) -> str | None:
    """The key of OPENAI_API_KEY, null if there is none. Raises UsageError, which does not show it."""
    key = environ.get("OPENAI_API_KEY", "").strip()
    if not re.fullmatch(r"[\x21-\x7e]*", key):
        raise UsageError("OPENAI_API_KEY holds a space, or another character that no key has")
    return key or None


def root(url: str) -> str:
    """The server's root, without a trailing slash or /v1. Raises UsageError."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # no number for a port, or an open bracket
        good = False
    if not good:
        raise UsageError(f"--url {url!r} must look like http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise UsageError("--url must hold no password, which others could read off the list of processes")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Upload:
    """The body of a request with a file in a form, read from the disk as it is sent. requests would read all of it."""

    def __init__(self, file: BinaryIO, name: str, fields: Mapping[str, str]) -> None:
        empty, self.content_type = urllib3.encode_multipart_formdata([*fields.items(), ("file", (name, b""))])
        end = empty.rindex(b"\r\n--")  # where the file's content belongs
        self._parts = [empty[:end], empty[end:]]
        self._file = file
        self._left = os.fstat(file.fileno()).st_size
        self._length = len(empty) + self._left

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[bytes]:
        yield self._parts[0]
        while self._left:
            block = self._file.read(min(self._left, 1 << 16))
            if not block:
                raise OSError("the file became shorter while it was read")
            self._left -= len(block)
            yield block
        yield self._parts[1]


class Server:
    """A transcription server. Usable from many threads: each has a session, and so a connection, of its own.

    All methods raise RequestError, and StoppedError once `stop` is set.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.url = root(url)
        self.stop = threading.Event()
        # No proxy of the environment has a part in what is on this machine: its 127.0.0.1 is another.
        self.proxied = urlsplit(self.url).hostname not in LOOPBACK
        self._key = key
        self._threads = threading.local()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def model(self) -> str:
        """The first model that the server names."""

        def send() -> requests.Response:
            return self._session().get(f"{self.url}/v1/models", timeout=CONNECT_S, allow_redirects=False)

        response = self._answer(send)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise RequestError(f"{self.url}/v1/models names no model: {_start(response)}: give --model") from None

    def transcribe(self, path: Path, model: str, form: str, language: str | None) -> bytes:
        """The content of the file's transcript in the form that was asked for."""
        # `text` is made of `json` here: stock vLLM answers JSON to either.
        fields = {"model": model, "response_format": "json" if form == "text" else form}
        if language:
            fields["language"] = language

        def send() -> requests.Response:
            with path.open("rb") as file:
                upload = Upload(file, shown(Path(path.name)), fields)
                return self._session().post(
                    f"{self.url}/v1/audio/transcriptions",
                    data=upload,
                    headers={"Content-Type": upload.content_type},
                    timeout=(CONNECT_S, ANSWER_S),
                    allow_redirects=False,
                )

        response = self._answer(send)
        told_json = response.headers.get("Content-Type", "").startswith("application/json")
        if form in ("srt", "vtt"):
            if told_json:
                raise RequestError(f"200, but JSON instead of {form}: {_start(response)}")
            return response.content
        try:
            text = response.json()["text"]
        except (ValueError, LookupError, TypeError):
            text = None
        if not isinstance(text, str):
            raise RequestError(f"200, but no JSON object with a 'text': {_start(response)}")
        return f"{text.strip()}\n".encode() if form == "text" else response.content

    def _answer(self, send: Callable[[], requests.Response]) -> requests.Response:
        """What is answered with 200. A server that is busy is asked again, after twice as long each time."""
        for attempt in itertools.count():
            try:
                response = send()
            except requests.RequestException as error:
                cause = _cause(error)
                if _unreached(error):
                    raise GoneError(f"nothing answers at {self.url}: {cause}") from None
                raise RequestError(f"no answer: {cause}") from None
            except OSError as error:
                raise RequestError(f"cannot be read: {error.strerror or error}") from None
            if response.status_code not in BUSY or attempt == RETRIES:
                break
            told = response.headers.get("Retry-After", "")
            first_s = float(told) if re.fullmatch(r"[0-9]{1,6}", told) else WAIT_S
            if self.stop.wait(min(first_s * 2**attempt, LONGEST_WAIT_S)):
                raise StoppedError
        if response.status_code != 200:
            raise RequestError(f"{response.status_code}: {said(response.content) or response.reason}")
        return response

    def _session(self) -> requests.Session:
        if not hasattr(self._threads, "session"):
            self._threads.session = requests.Session()
            self._threads.session.trust_env = self.proxied
            # As `auth` rather than as a header, which would silently yield to an entry in ~/.netrc.
            self._threads.session.auth = self._authorize
        session: requests.Session = self._threads.session
        return session

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers.update(self.headers)
        return request


def said(body: bytes) -> str:
    """What an answer says in one line: the message of an error in OpenAI's form, else its first characters."""
    text = body[: 1 << 20].decode(errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return _plain(" ".join(str(json.loads(text)["error"]["message"]).split()))
    return _plain(" ".join(text[:SHOWN].split()))


def _start(response: requests.Response) -> str:
    return repr(response.content[:SHOWN].decode(errors="replace"))


def _cause(error: BaseException) -> str:
    """The words of the error beneath those of the libraries."""
    while under := error.__cause__ or error.__context__:
        error = under
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _unreached(error: requests.RequestException) -> bool:
    """Whether there was no connection to send anything over."""
    under = error.args[0] if error.args else None
    never = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)
    return isinstance(error, requests.ConnectTimeout) or isinstance(getattr(under, "reason", None), never)


def write(path: Path, content: bytes) -> None:
    """At once, so that no reader and no next run sees a part of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def main(flags: Namespace) -> int:
    """Exit status: 0 all is there; 1 something failed; 2 the files or settings cannot be used; 130 for Ctrl-C."""
    try:
        found = find(flags.files)
        if len(found) > 1 and not flags.out and flags.format != "text":
            raise UsageError(f"{len(found)} files: --format {flags.format} needs --out DIR for them")
        outputs = targets(found, flags.out, FORMATS[flags.format]) if flags.out else [None] * len(found)
        server = Server(flags.url, api_key(os.environ))
        if flags.out:
            try:
                flags.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"--out {shown(flags.out)}: {error.strerror}") from None
        pairs = list(zip(found, outputs, strict=True))
        todo = [(each, output) for each, output in pairs if flags.again or output is None or not output.exists()]
        run = _Run(flags, server, len(found), len(found) - len(todo))
        return run.all([(each.path, output) for each, output in todo])
    except UsageError as error:
        return _end(str(error), 2)
    except RequestError as error:
        return _end(str(error), 1)
    except KeyboardInterrupt:
        return _end("stopped", 130)


def _end(message: str, status: int) -> int:
    print(f"voxtral-serve: {message}", file=sys.stderr)
    return status


class _Run:
    """One run, and what became of its files: `failed` with the reason, `done` how many."""

    def __init__(self, flags: Namespace, server: Server, total: int, there: int) -> None:
        self.flags, self.server, self.total, self.there = flags, server, total, there
        self.done = 0
        self.failed: list[tuple[Path, str]] = []

    def all(self, todo: Sequence[tuple[Path, Path | None]]) -> int:
        if not todo:
            return self.report(0)
        model = self.flags.model or self.server.model()
        # None: on a terminal only.
        hidden = None if self.total > 1 else True
        bar = tqdm(total=self.total, initial=self.there, unit="file", file=sys.stderr, disable=hidden)
        pool = ThreadPoolExecutor(self.flags.jobs)
        futures: dict[Future[bytes], int] = {}
        ready: dict[int, bytes | None] = {}
        following = 0
        interrupted = False
        try:
            for number, each in enumerate(todo):
                futures[pool.submit(self.one, model, *each)] = number
            for future in as_completed(futures):
                number = futures.pop(future)
                ready[number] = self.take(todo[number][0], future)
                bar.update()
                while following in ready:
                    self.show(todo[following][0], ready.pop(following))
                    following += 1
        except KeyboardInterrupt:
            interrupted = True
            self.server.stop.set()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            bar.close()
        for future, number in futures.items():
            if future.done() and not future.cancelled():
                self.take(todo[number][0], future)
        return self.report(130 if interrupted else 1 if self.failed else 0)

    def one(self, model: str, path: Path, output: Path | None) -> bytes:
        """In a thread: transcribe a file, and write its output if it has one. Raises as Server does."""
        if self.server.stop.is_set():
            raise StoppedError
        try:
            content = self.server.transcribe(path, model, self.flags.format, self.flags.language)
        except GoneError:
            self.server.stop.set()
            raise
        if output is not None:
            try:
                write(output, content)
            except OSError as error:
                raise RequestError(f"{shown(output)} cannot be written: {error.strerror}") from None
        return content

    def take(self, path: Path, future: "Future[bytes]") -> bytes | None:
        try:
            content = future.result()
        except StoppedError:
            return None
        except RequestError as error:
            self.failed.append((path, str(error)))
            return None
        self.done += 1
        return content

    def show(self, path: Path, content: bytes | None) -> None:
        """On stdout, where there is no --out; with the file's name in front if there are several."""
        if content is None or self.flags.out:
            return
        text = content.decode(errors="replace").removesuffix("\n")
        tqdm.write(f"{shown(path)}: {text}" if self.total > 1 else text, file=sys.stdout)
        sys.stdout.flush()

    def report(self, status: int) -> int:
        for path, error in sorted(self.failed):
            print(f"failed: {shown(path)}: {error}", file=sys.stderr)
        left = self.total - self.done - self.there - len(self.failed)
        counts = {
            "transcribed": self.done,
            "there already (--again makes them anew)": self.there,
            "failed": len(self.failed),
            "not sent or not answered": left,
        }
        if self.flags.out or (status and self.total > 1):
            told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
            print(f"{self.total} file{'s' * (self.total > 1)}: {told}", file=sys.stderr)
        if self.flags.out and left:
            print("The same command does the rest.", file=sys.stderr)
        return status
