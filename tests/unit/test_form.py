"""Forms, as clients write them: the file is a part of the body and not a copy."""

import random

import pytest
from guarding import refusal

from voxtral_serve.guard import form
from voxtral_serve.guard.form import Part
from voxtral_serve.guard.limits import FIELDS_BYTES

BOUNDARY = b"x-boundary"
TYPE = f"multipart/form-data; boundary={BOUNDARY.decode()}"
# What a parser may take for a boundary
PIECES = (b"", b"\r", b"\n", b"\r\n", b"-", b"--", b"\r\n--", b"\r\n--x-bound", b"--" + BOUNDARY, b"a", bytes(300))


def written(*fields: tuple[bytes, bytes | None, bytes]) -> bytes:
    lines = []
    for name, filename, data in fields:
        as_file = b"" if filename is None else b'; filename="%b"' % filename
        lines.append(
            b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (BOUNDARY, name, as_file, data)
        )
    return b"".join(lines) + b"--%b--\r\n" % BOUNDARY


def test_the_file_is_a_view_of_the_body() -> None:
    body = written((b"model", None, b"voxtral"), (b"file", b"a.wav", b"RIFF" * 1000), (b"language", b"a", b"en"))
    model, file, language = form.parse(body, TYPE)
    assert (model, language) == (Part(b"model", None, b"voxtral"), Part(b"language", b"a", b"en"))
    assert (file.name, file.filename, file.data) == (b"file", b"a.wav", b"RIFF" * 1000)
    assert isinstance(file.data, memoryview) and file.data.obj is body


@pytest.mark.parametrize("seed", range(20))
def test_data_with_what_looks_like_a_boundary(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        contents = [b"".join(chance.choices(PIECES, k=chance.randrange(8))) for _ in range(4)]
        contents = [content for content in contents if b"\r\n--" + BOUNDARY not in b"\r\n" + content]
        fields = [(b"file" if number == 1 else b"f%d" % number, b"f", each) for number, each in enumerate(contents)]
        parts = form.parse(written(*fields), TYPE)
        assert [(part.name, part.filename, bytes(part.data)) for part in parts] == fields


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b"file_url=http%3A%2F%2F10.0.0.1%2Fa.wav&model=m", "file_url"),
        (b"model=m&file_id=" + b"a" * 1_000_000, "file_id"),
        (b"model=m&file_url=&file=a", None),
        (b"profile_url=a&x=file_url=b", None),
        (b"&" * 1_000_000, None),
    ],
)
def test_a_form_without_a_file_as_mistrals_client_writes_it(body: bytes, name: str | None) -> None:
    error = refusal(form.parse, body, "application/x-www-form-urlencoded")
    assert (error.status, error.param) == ((400, name) if name else (415, None))


def test_a_form_without_a_file_is_not_searched_if_it_is_large() -> None:
    body = b"&" * FIELDS_BYTES + b"file_id=a"
    error = refusal(form.parse, body, "application/x-www-form-urlencoded")
    assert (error.status, error.code) == (413, "form_too_large")
