"""Read a transcript from server-sent events, with the arrival time of each piece.

Two formats are supported. vLLM, and all chats, send `data: {"choices": [{"delta": {"content": "..."}}]}` and at the end
`data: [DONE]` (vLLM 0.32.0, entrypoints/speech_to_text/base/serving.py). OpenAI sends `transcript.text.delta` and
`transcript.text.done`, whose `text` is the whole transcript (https://developers.openai.com/api/reference/resources/audio).
A stream without its end event is incomplete. Format of the events: https://html.spec.whatwg.org/#server-sent-events
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from .errors import MeasureError

PIECE_BYTES = 65536


class StreamError(MeasureError):
    """The server's stream is not a complete transcript."""


def read(receive: Callable[[int], bytes], limited: bool = False) -> tuple[str, list[tuple[float, str]], float]:
    """Read to the end. Returns the text, its non-empty pieces with their arrivals, and the arrival of the end event.

    `receive(n)` waits for data and returns 1 to n bytes, or none at the end. Times are those of time.perf_counter.
    Raises StreamError for an error event, an incomplete stream, and a stream in an unknown format. With `limited`, for
    requests that set max_tokens, it also raises StreamError for a text that reached this limit.
    """
    pieces: list[tuple[float, str]] = []
    whole: str | None = None
    end: float | None = None
    known = False
    data = ""
    for at, data in _events(receive):
        if end is not None and data == "[DONE]":
            continue  # some servers also send it after transcript.text.done
        if data == "[DONE]":
            end = at
            continue
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise StreamError(f"an event of the stream is not JSON: {data[:300]!r}") from None
        if not isinstance(event, dict) or event.get("error") or event.get("type") == "error":
            raise StreamError(f"the stream has an error event: {data[:300]}")
        kind = event.get("type")
        if kind == "transcript.text.done":
            known, whole, end = True, _string(event, "text", data), at
        elif kind == "transcript.text.delta":
            known = True
            if text := _string(event, "delta", data):
                pieces.append((at, text))
        elif "choices" in event:
            known = True
            if text := _content(event["choices"], data, limited):
                pieces.append((at, text))
    if end is None:
        raise StreamError(f"the stream ended without [DONE] or transcript.text.done; its last event is {data[:300]!r}")
    if not known:
        raise StreamError(
            f"the stream has neither choices nor transcript.text events; its last event is {data[:300]!r}"
        )
    return "".join(text for _, text in pieces) if whole is None else whole, pieces, end


def _events(receive: Callable[[int], bytes]) -> Iterator[tuple[float, str]]:
    """The data of each event with the arrival of its last byte. Names, ids and comments are ignored."""
    rest, data = b"", []
    while received := receive(PIECE_BYTES):
        at = time.perf_counter()
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode(errors="replace"))
            elif not line and data:
                yield at, "\n".join(data)
                data = []


def _content(choices: Any, data: str, limited: bool) -> str:
    """The text of a chunk. The last chunks may have no choices or no content."""
    try:
        if not choices:
            return ""
        if limited and choices[0].get("finish_reason") == "length":
            raise StreamError(f"the text was cut off at max_tokens: {data[:300]}")
        text = choices[0]["delta"].get("content")
    except (LookupError, TypeError, AttributeError):
        raise StreamError(f"the choices of an event have no delta: {data[:300]!r}") from None
    if text is not None and not isinstance(text, str):
        raise StreamError(f"the content of an event is not a string: {data[:300]!r}")
    return text or ""


def _string(event: dict[str, Any], name: str, data: str) -> str:
    text = event.get(name)
    if not isinstance(text, str):
        raise StreamError(f"an event has no string {name!r}: {data[:300]!r}")
    return text
