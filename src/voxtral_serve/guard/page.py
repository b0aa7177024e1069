"""The page to try the server in a browser: static files of `voxtral_serve/page`, served at `/` and `/page/`.

The files are public. All that they do needs the API key, which the browser keeps in memory. Nothing is loaded from
other hosts, and URLs in the files are relative, so that the page works behind a proxy and below `root_path`.
"""

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from voxtral_serve.guard.asgi import Message

DIRECTORY = Path(__file__).parent.parent / "page"
INDEX, PREFIX = "/", "/page/"  # where index.html is served, and the other files
METHODS = ("GET", "HEAD")
TYPES = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".md": b"text/plain; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}
NONCE = b"{nonce}"  # in index.html. The waveform's library writes a <style> element, which needs it
# https://www.w3.org/TR/CSP3/. blob: is a file that the user has chosen.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src {styles}; connect-src 'self'; img-src 'self'; "
    "media-src blob:; worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"permissions-policy", b"microphone=(self), camera=(), geolocation=()"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class PageError(RuntimeError):
    """The page's directory is missing or holds a file that is not one of a page."""


class PageFile(NamedTuple):
    """A file's bytes, its content type, and the entity tag of those bytes (RFC 9110, section 8.8.3)."""

    content: bytes
    kind: bytes
    tag: bytes


def read(directory: Path = DIRECTORY) -> dict[str, PageFile]:
    """The files of the page by the path of their URL. Raises PageError."""
    if not (directory / "index.html").is_file():
        raise PageError(f"{directory} has no index.html: install voxtral-serve again, or set VOXTRAL_SERVE_PAGE=0")
    found = {}
    for path in sorted(each for each in directory.rglob("*") if each.is_file()):
        if path.suffix not in TYPES:
            raise PageError(f"{path} is not a file of the page: expected one of {', '.join(TYPES)}. Remove it")
        name = path.relative_to(directory).as_posix()
        content = path.read_bytes()
        tag = b'"%s"' % hashlib.sha256(content).hexdigest()[:32].encode()
        found[INDEX if name == "index.html" else PREFIX + name] = PageFile(content, TYPES[path.suffix], tag)
    return found


def response(file: PageFile, method: str, headers: Mapping[bytes, bytes]) -> list[Message]:
    """The ASGI messages that answer a request with `method` and `headers` for a file."""
    nonce = secrets.token_urlsafe(16).encode() if NONCE in file.content else b""
    content = file.content.replace(NONCE, nonce)
    styles = f"'self' 'nonce-{nonce.decode()}'" if nonce else "'self'"
    policy = (b"content-security-policy", POLICY.format(styles=styles).encode())
    if nonce:  # another one each time
        cached = [(b"cache-control", b"no-store")]
    else:  # kept by the browser, which asks each time whether it has changed
        cached = [(b"cache-control", b"no-cache"), (b"etag", file.tag)]
        if _has_tag(headers.get(b"if-none-match", b""), file.tag):
            start = {"type": "http.response.start", "status": 304, "headers": [*cached, policy, *HEADERS]}
            return [start, {"type": "http.response.body", "body": b""}]
    described = [(b"content-type", file.kind), (b"content-length", b"%d" % len(content))]
    return [
        {"type": "http.response.start", "status": 200, "headers": [*described, *cached, policy, *HEADERS]},
        {"type": "http.response.body", "body": b"" if method == "HEAD" else content},
    ]


def _has_tag(header: bytes, tag: bytes) -> bool:
    """Whether `If-None-Match` names the tag, also as a weak one: proxies that compress make it weak."""
    tags = [each.strip().removeprefix(b"W/") for each in header.split(b",")]
    return tag in tags or b"*" in tags
