"""Send texts to a server's /v1/audio/speech, OpenAI's API, and time the audio as it arrives.

A request completes only with HTTP 200 and whole samples of the requested format. It is sent again as measure/upload.py
says.
"""

import io
import time
import wave
from pathlib import Path
from typing import Any

import requests

from bench import BenchError
from bench.client import Client
from bench.measure.upload import shown, until_answered
from bench.speech.rows import Speech, SpeechRow, Text
from bench.speech.samples import BYTES, Samples

PIECE_BYTES = 65536
PATH, VOICES = "/v1/audio/speech", "/v1/audio/voices"
NOT_AUDIO = ("application/json", "text/")


class SpeechClient(Client):
    """A client of one server. `voice` and `model` are set before the first request. Thread-safe."""

    does = "synthesize speech"

    def __init__(self, url: str, timeout_s: float, api_key: str | None, form: str, stream: bool) -> None:
        """`form` is "pcm" or "wav". `stream` asks vLLM-Omni for raw audio as it is made."""
        super().__init__(url, timeout_s, api_key)
        self.voice = ""
        self._form, self._stream = form, stream

    def first_voice(self) -> str:
        """The first voice that the server lists. Raises BenchError if it lists none; OpenAI's API has no list."""
        found = self.get(VOICES)
        voices = found.get("voices") if isinstance(found, dict) else None
        if not isinstance(voices, list) or not voices or not isinstance(voices[0], str):
            raise BenchError(f"{self.url}{VOICES} lists no voice: name one with --voice ({str(found)[:200]})")
        return voices[0]

    def speak(self, text: Text, load: str, folder: Path | None = None) -> SpeechRow:
        """Send one text and wait for all of its audio, which goes to ID.wav in `folder`.

        Building the request and writing the file are not in the latency.
        """
        speech = until_answered(lambda _: self._speak_once(text))
        complete = speech.error is None
        per_s = speech.rate_hz * speech.channels * BYTES
        pieces = [(_ms(speech.start, at), round(size / per_s, 6)) for at, size in speech.pieces] if complete else None
        if complete and folder is not None:
            (folder / f"{text.id}.wav").write_bytes(wav(speech))
        return SpeechRow(
            id=text.id,
            load=load,
            text=text.text,
            start=self._epoch + speech.start,
            end=self._epoch + speech.end,
            latency_ms=_ms(speech.start, speech.end) if complete else None,
            first_audio_ms=pieces[0][0] if pieces else None,
            audio_s=round(len(speech.samples) / per_s, 6) if complete else None,
            pieces=pieces,
            rate_hz=speech.rate_hz if complete else None,
            rate_told=speech.rate_told if complete else None,
            streamed=speech.streamed if complete else None,
            status=speech.status,
            error=speech.error,
            sends=speech.sends,
        )

    def _speak_once(self, text: Text) -> Speech:
        speech = Speech()
        request = requests.Request("POST", self.url + PATH, json=self._body(text))
        self._server.exchange(request, speech, lambda response: self._read(response, speech))
        return speech

    def _body(self, text: Text) -> dict[str, Any]:
        body = {"model": self.model, "input": text.text, "voice": self.voice, "response_format": self._form}
        # vLLM-Omni 0.20 streams raw audio with `stream`, 0.32 with both.
        return body | ({"stream": True, "stream_format": "audio"} if self._stream else {})

    def _read(self, response: requests.Response, speech: Speech) -> None:
        """Fill in the speech of a response whose body is still to come. Raises SamplesError."""
        kind = response.headers.get("Content-Type", "none")
        if response.status_code != 200 or kind.startswith(NOT_AUDIO):
            body = response.content
            speech.end = time.perf_counter()
            speech.error = f"HTTP {response.status_code}: {shown(body)}"
            if response.status_code == 200:
                speech.error = f"HTTP 200, but the Content-Type is {kind} instead of audio: {shown(body)!r}"
            return
        samples = Samples(self._form, response.headers)
        while received := response.raw.read1(PIECE_BYTES):
            at = time.perf_counter()
            if size := samples.feed(received):
                speech.pieces.append((at, size))
        speech.end = time.perf_counter()
        samples.end()
        speech.rate_hz, speech.channels, speech.rate_told = samples.rate_hz, samples.channels, samples.told
        speech.samples = bytes(samples.body)
        speech.streamed = "Content-Length" not in response.headers


def wav(speech: Speech) -> bytes:
    """The samples as a WAV file with its real length, which every decoder reads."""
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(speech.channels)
        audio.setsampwidth(BYTES)
        audio.setframerate(speech.rate_hz)
        audio.writeframes(speech.samples)
    return file.getvalue()


def _ms(start: float, at: float) -> float:
    return round((at - start) * 1000, 3)
