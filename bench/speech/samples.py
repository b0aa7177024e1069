"""The samples of a response of /v1/audio/speech, raw PCM or WAV, as its bytes arrive.

PCM is 16-bit little-endian samples without a header. Its rate is that of the header X-Audio-Sample-Rate, which
vLLM-Omni sends since 0.32; without it 24 kHz mono, OpenAI's format
(https://developers.openai.com/api/docs/guides/text-to-speech). WAV says its rate itself; a stream of it begins with a
header whose sizes are placeholders.
"""

import struct
from collections.abc import Mapping

from bench import BenchError

OPENAI_HZ = 24_000
BYTES = 2  # of a sample
RATE, CHANNELS = "X-Audio-Sample-Rate", "X-Audio-Channels"
LONGEST_HEADER = 65536
PCM_TAGS = (1, 0xFFFE)  # integers, and WAVE_FORMAT_EXTENSIBLE


class SamplesError(BenchError):
    """The response is not audio of the expected format."""


class Samples:
    """Collects the samples. `told` is whether the server said their rate."""

    def __init__(self, form: str, headers: Mapping[str, str]) -> None:
        """`form` is "pcm" or "wav". Raises SamplesError for headers that are no numbers."""
        self.told = RATE in headers
        self.rate_hz = _number(headers, RATE, OPENAI_HZ)
        self.channels = _number(headers, CHANNELS, 1)
        self.body = bytearray()
        self._header: bytearray | None = bytearray() if form == "wav" else None
        self._size: int | None = None  # of the samples, as the header says
        # A stream begins before its length is known.
        self._sized = "Content-Length" in headers

    def feed(self, received: bytes) -> int:
        """Take what arrived; return how many bytes of samples were in it. Raises SamplesError."""
        before = len(self.body)
        if self._header is None:
            self.body += received
        else:
            self._header += received
            self._read_header(self._header)
        if self._size is not None:
            del self.body[self._size :]  # other parts of a WAV may follow
        return len(self.body) - before

    def end(self) -> None:
        """Raises SamplesError unless there are samples, and all of them."""
        if self._header is not None:
            raise SamplesError(f"the WAV ends in its header, after {len(self._header)} bytes")
        if not self.body:
            raise SamplesError("the response has no samples")
        if self._size is not None and len(self.body) < self._size:
            raise SamplesError(f"the WAV has {len(self.body)} bytes of samples, its header says {self._size}")
        if len(self.body) % (BYTES * self.channels):
            raise SamplesError(f"{len(self.body)} bytes are no whole number of {8 * BYTES}-bit samples")

    def _read_header(self, header: bytearray) -> None:
        """Look for the chunk `data`; the samples follow it. https://www.mmsp.ece.mcgill.ca/Documents/AudioFormats/WAVE"""
        if len(header) >= 12 and (header[:4] != b"RIFF" or header[8:12] != b"WAVE"):
            raise SamplesError(f"the response is no WAV: it begins with {bytes(header[:40])!r}")
        place, known = 12, False
        while len(header) >= place + 8:
            name, size = bytes(header[place : place + 4]), int.from_bytes(header[place + 4 : place + 8], "little")
            place += 8
            if name == b"data":
                if not known:
                    raise SamplesError("the WAV has no 'fmt ' before its samples")
                self.body += header[place:]
                self._size = size if self._sized else None
                self._header = None
                return
            if name == b"fmt " and len(header) >= place + 16:
                self._format(bytes(header[place : place + 16]))
                known = True
            place += size + size % 2
        if len(header) > LONGEST_HEADER:
            raise SamplesError(f"the WAV has no samples in its first {LONGEST_HEADER} bytes")

    def _format(self, content: bytes) -> None:
        tag, self.channels, self.rate_hz, _, _, bits = struct.unpack("<HHIIHH", content)
        self.told = True
        if tag not in PCM_TAGS or bits != 8 * BYTES or not self.channels or not self.rate_hz:
            found = f"format {tag}, {bits} bits, {self.channels} channels, {self.rate_hz} Hz"
            raise SamplesError(f"the WAV must have {8 * BYTES}-bit PCM samples, found {found}")


def _number(headers: Mapping[str, str], name: str, otherwise: int) -> int:
    told = headers.get(name, str(otherwise))
    if not (told.isascii() and told.isdigit() and 0 < int(told) < 1_000_000):
        raise SamplesError(f"the header {name} must be a number, found {told[:40]!r}")
    return int(told)
