"""What Kubernetes runs in a server's container: whether it is ready, and waiting for its live sessions to end.

A server is ready once it has transcribed one real clip: /health answers as soon as the port is open, but the first
request may still load or compile, and a wrong checkpoint answers with nothing.
"""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

CLIP = Path(__file__).parent / "clip.opus"
HEALTH_S, FIRST_S = 4, 120  # the longest wait for an answer
POLL_S = 1.0


class NotReadyError(Exception):
    """The server does not serve yet. The message says what failed."""


def api_key(environ: Mapping[str, str]) -> str:
    """The server's own key, as its entrypoint takes it; empty without one. With a file of keys, OPENAI_API_KEY."""
    if "VOXTRAL_SERVE_KEYS" in environ:
        return environ.get("OPENAI_API_KEY", "")
    file = environ.get("VLLM_API_KEY_FILE")
    return Path(file).read_text(encoding="utf-8").strip() if file else environ.get("VLLM_API_KEY", "")


def server_start() -> str:
    """What is the same for as long as process 1 runs, in a container the server: the time of its start in ticks."""
    return Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]


def ready(url: str, seen: Path, key: str) -> None:
    """Raises NotReadyError until the server answers /health and has transcribed the clip once.

    `seen` is a file that keeps that it did, with the server's start: after a restart the clip is sent again.
    """
    _get(f"{url}/health", key)
    start = server_start()
    if seen.is_file() and seen.read_text() == start:
        return
    model = json.loads(_get(f"{url}/v1/models", key))["data"][0]["id"]
    from urllib3.filepost import encode_multipart_formdata  # vLLM has it; its import takes time

    form = encode_multipart_formdata({"model": model, "file": (CLIP.name, CLIP.read_bytes(), "audio/ogg")})
    text = json.loads(_get(f"{url}/v1/audio/transcriptions", key, form)).get("text", "")
    if not text.strip():
        raise NotReadyError("the clip with speech has an empty transcript")
    seen.write_text(start)


def drain(url: str, within_s: float) -> int:
    """Wait until no live session has text to come, for `within_s` at most. Returns how many are left.

    A server that does not answer has none.
    """
    until = time.monotonic() + within_s
    while (left := _sessions(url)) and time.monotonic() < until:
        time.sleep(POLL_S)
    return left


def _sessions(url: str) -> int:
    try:
        text = _get(f"{url}/metrics", "").decode()
    except NotReadyError:
        return 0
    return int(sum(map(float, re.findall(r"^voxtral_serve_live_sessions(?:\{.*\})? (\S+)$", text, re.MULTILINE))))


def _get(url: str, key: str, form: tuple[bytes, str] | None = None) -> bytes:
    """The body of an answer 200. With `form`, a body and its Content-Type, the request is a POST.

    Raises NotReadyError for another answer, or none.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body, kind = form or (None, "")
    if form is not None:
        headers["Content-Type"] = kind
    try:
        request = urllib.request.Request(url, body, headers)
        # A proxy of the environment's is for downloads.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=HEALTH_S if form is None else FIRST_S) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        raise NotReadyError(f"{url} answers {error.code}") from error
    except OSError as error:
        raise NotReadyError(f"{url} does not answer: {error}") from error
