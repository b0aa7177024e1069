"""The multipart/form-data body of a request (https://www.rfc-editor.org/rfc/rfc7578)."""

import re
from typing import Any, NamedTuple

from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.limits import FIELDS_BYTES

FIELDS = 1000  # the most fields of one form
FILE = b"file"  # the field that may be large


# Mistral's names for audio that is not in the form. Its clients write a form without a file in the style of URLs.
ELSEWHERE = re.compile(rb"(?:^|&)(file_url|file_id)=[^&]")


class Part(NamedTuple):
    """One field of a form; `filename` is None for a field that is not a file.

    The data of the field FILE is a view of the body, which is not copied: release it to free the body.
    """

    name: bytes
    filename: bytes | None
    data: bytes | memoryview


def parse(body: bytes, content_type: str) -> list[Part]:
    """The fields of a form, in order. Raises RefusedError."""
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    kind, options = parse_options_header(content_type)
    if kind == b"application/x-www-form-urlencoded":  # which has no file
        if len(body) > FIELDS_BYTES:
            raise RefusedError(413, f"the form has more than {FIELDS_BYTES} bytes besides its audio", "form_too_large")
        if named := ELSEWHERE.search(body):
            raise elsewhere(named[1].decode())
    if kind != b"multipart/form-data":
        raise RefusedError(
            415,
            f"the body's type is {ascii(content_type)[:80]}: expected multipart/form-data, with the audio as `file`",
            "invalid_form",
        )
    if not options.get(b"boundary"):
        raise RefusedError(
            400, "the Content-Type has no boundary: expected multipart/form-data; boundary=…", "invalid_form"
        )
    collector = _Collector(body)
    try:
        parser = MultipartParser(options[b"boundary"], collector.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise RefusedError(400, f"the body is not a valid multipart form: {error}", "invalid_form") from error
    if not collector.ended:
        raise RefusedError(400, "the form is incomplete: its last boundary is missing", "invalid_form")
    return collector.parts


def elsewhere(name: str) -> RefusedError:
    """The error for a form whose audio is elsewhere, where its field `name` says."""
    return RefusedError(400, f"`{name}`: this server fetches no audio: send it as `file`", "no_file", name)


class _Collector:
    """Collects the parts of the form `body`. The methods on_… are callbacks of python_multipart's MultipartParser.

    The parser gets the body in one piece. It then calls back with the body itself, and with the bounds of its parts.
    """

    def __init__(self, body: bytes) -> None:
        self.parts: list[Part] = []
        self._body = body
        self.ended = False
        self._header, self._value, self._disposition = bytearray(), bytearray(), bytearray()
        self._start = self._end = 0  # of the part's data in the body

    def callbacks(self) -> Any:
        return {name: getattr(self, name) for name in dir(self) if name.startswith("on_")}

    def on_part_begin(self) -> None:
        if len(self.parts) > FIELDS:
            raise RefusedError(413, f"the form has more than {FIELDS} fields", "form_too_large")
        self._disposition.clear()
        self._start = self._end = 0

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header.extend(data[start:end])

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value.extend(data[start:end])

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition[:] = self._value
        self._header.clear()
        self._value.clear()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._start = self._start or start  # no data is at the body's beginning
        self._end = end

    def on_part_end(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, named = parse_options_header(bytes(self._disposition))
        name, view = named.get(b"name", b""), memoryview(self._body)[self._start : self._end]
        self.parts.append(Part(name, named.get(b"filename"), view if name == FILE else bytes(view)))

    def on_end(self) -> None:
        self.ended = True
