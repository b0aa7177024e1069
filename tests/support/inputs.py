"""What strangers send to a server: audio of every kind, damaged and lying files, and requests that are wrong.

`inputs()` makes them from one clip; each says what must come of it. tests/server/test_bad_inputs.py sends each of them
to a real server, and tests/support/soak.py mixes them into a long run.
"""

import base64
import gzip
import io
import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import soundfile

from voxtral_serve.audio.decode import PYAV

RATE = 16000
UPLOAD, CHAT = "/v1/audio/transcriptions", "/v1/chat/completions"
KEY = "correct-horse-battery-staple"
PIECE = 1 << 16
# What the server must have in its environment: a limit that small files pass.
ENVIRONMENT = {"VLLM_MAX_AUDIO_DECODE_DURATION_S": "37"}


@dataclass(frozen=True)
class Input:
    """One request and what must come of it.

    `wrong` is for a transcript: how many of the clip's words may differ; None where any text will do. `status` and
    `pattern` are for a refusal: its HTTP status, and a regular expression that its message matches. `slow` marks what
    takes more than a second to send or to answer, `silent` what has no words.
    """

    name: str
    method: str = "POST"
    path: str = UPLOAD
    headers: dict[str, str] = field(default_factory=dict)
    files: Any = None
    data: Any = None
    wrong: int | None = None
    status: int = 200
    pattern: str = ""
    slow: bool = False
    silent: bool = False

    def arguments(self) -> dict[str, Any]:
        """For requests.request, with the URL's path as `url`. `data` may be a function that makes an iterator."""
        headers = {"Authorization": f"Bearer {KEY}"} | self.headers
        data = self.data() if callable(self.data) else self.data
        kept = {name: value for name, value in headers.items() if value}  # an empty one is left out
        return {"method": self.method, "url": self.path, "headers": kept, "files": self.files, "data": data}

    def problem(self, status: int, answer: Any, words: list[str]) -> str | None:
        """What is wrong with a response, if anything is; `words` are the clip's, `answer` is its JSON or its text."""
        if status != self.status:
            return f"HTTP {status}, expected {self.status}: {str(answer)[:300]}"
        if status == 200:
            text = answer.get("text") if isinstance(answer, dict) else answer
            if self.path == UPLOAD and not isinstance(text, str):
                return f"no text: {str(answer)[:300]}"
            if self.silent and text != "":
                return f"words where none are spoken: {text!r}"
            if self.wrong is not None and (count := differing(words, plain(str(text)))) > self.wrong:
                return f"{count} of {len(words)} words differ, expected at most {self.wrong}: {text!r}"
            return None
        error = answer.get("error") if isinstance(answer, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        if not isinstance(message, str):
            return f"no error in OpenAI's form: {str(answer)[:300]}"
        return None if re.search(self.pattern, message) else f"{message!r} does not match {self.pattern!r}"


def plain(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def differing(expected: list[str], heard: list[str]) -> int:
    """Word errors: substitutions, deletions and insertions. No word may have a space in it."""
    found = jiwer.process_words(" ".join(expected), " ".join(heard))
    return found.substitutions + found.deletions + found.insertions


def encoded(samples: np.ndarray, rate: int = RATE, form: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    return file.getvalue()


def at_rate(samples: np.ndarray, rate: int) -> np.ndarray:
    import soxr

    resampled: np.ndarray = soxr.resample(samples, RATE, rate)
    return resampled


def wav(samples: np.ndarray, **header: int) -> bytes:
    """A 16-bit WAV file whose header says what it is told to."""
    data = (samples.clip(-1, 1) * 32767).astype("<i2").tobytes()
    told = {"riff": 36 + len(data), "tag": 1, "channels": 1, "rate": RATE, "bytes": 2 * RATE, "align": 2, "bits": 16}
    told |= {"data": len(data)} | header
    return (
        struct.pack("<4sI4s4sI", b"RIFF", told["riff"], b"WAVE", b"fmt ", 16)
        + struct.pack("<HHIIHH", *(told[name] for name in ("tag", "channels", "rate", "bytes", "align", "bits")))
        + struct.pack("<4sI", b"data", told["data"])
        + data
    )


def file(name: str, content: bytes, filename: str = "clip.wav", /, **expected: Any) -> Input:
    return Input(name, files={"file": (filename, content)}, data={"model": "voxtral"}, **expected)


def refused(name: str, content: bytes, pattern: str, **expected: Any) -> Input:
    return file(name, content, **{"status": 400, "pattern": pattern, **expected})


def inputs(clip: Path) -> list[Input]:
    """All of them. `clip` is a file of speech at 16 kHz, of at most 10 s."""
    samples, _ = soundfile.read(clip, dtype="float32")
    made = [*formats(samples), *headers(samples), *odd(samples), *damaged(samples), *too_long(samples), *large()]
    made += [*forms(samples), *options(samples), *requests_of_other_kinds(samples), *chats(samples)]
    assert len({each.name for each in made}) == len(made)
    return made


def formats(samples: np.ndarray) -> Iterator[Input]:
    for subtype in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM"):
        lossy = subtype in ("PCM_U8", "ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM")
        yield file(f"wav {subtype}", encoded(samples, subtype=subtype), wrong=1 if lossy else 0)
    for rate in (8000, 11025, 22050, 24000, 32000, 44100, 48000, 96000, 192000):
        yield file(f"wav {rate} Hz", encoded(at_rate(samples, rate), rate, subtype="FLOAT"), wrong=1)
    for channels in range(2, 9):
        spread = np.repeat(samples[:, None], channels, 1)
        yield file(f"wav {channels} channels", encoded(spread, subtype="FLOAT"), wrong=0)
    one_side = np.stack([samples, np.zeros_like(samples)], 1)
    yield file("speech on one channel of two", encoded(one_side, subtype="FLOAT"), wrong=1)
    for form, subtype in (
        ("FLAC", "PCM_16"),
        ("FLAC", "PCM_24"),
        ("AIFF", "PCM_16"),
        ("AU", "PCM_16"),
        ("CAF", "FLOAT"),
    ):
        yield file(f"{form} {subtype}", encoded(samples, RATE, form, subtype), f"clip.{form.lower()}", wrong=0)
    for form, subtype in (("W64", "FLOAT"), ("RF64", "PCM_16"), ("WAVEX", "PCM_16")):
        yield file(f"{form} {subtype}", encoded(samples, RATE, form, subtype), f"clip.{form.lower()}", wrong=0)
    for form, codec in (("OGG", "OPUS"), ("OGG", "VORBIS"), ("MP3", None)):
        name, filename = codec or form, f"clip.{form.lower()}"
        yield file(name, encoded(samples, RATE, form, codec), filename, wrong=1)
        faster = encoded(at_rate(samples, 48000), 48000, form, codec)
        yield file(f"{name} 48000 Hz", faster, filename, wrong=1)
    yield from containers(samples)
    yield file("wav called mp3", encoded(samples), "clip.mp3", wrong=0)
    yield file("flac called txt", encoded(samples, RATE, "FLAC"), "notes.txt", wrong=0)
    yield file("mp3 called wav", encoded(samples, RATE, "MP3"), wrong=1)
    tagged = b"ID3\x03" + bytes(5) + b"\x08" + b"title..." + encoded(samples, RATE, "MP3")
    yield file("mp3 with a tag", tagged, "clip.mp3", wrong=1)
    yield file("no extension", encoded(samples), "clip", wrong=0)
    yield file("a path for a name", encoded(samples), "../../etc/passwd", wrong=0)
    yield file("a name of 3000 letters", encoded(samples), "a" * 3000 + ".wav", wrong=0)
    yield file("a name that is no ASCII", encoded(samples), 'ż"ółw\r\n.wav', wrong=0)


def containers(samples: np.ndarray) -> Iterator[Input]:
    """What only PyAV reads; without it, as a phone would have begun it."""
    if not PYAV:
        yield refused("M4A", b"\x00\x00\x00\x1cftypM4A \x00\x00\x02\x00M4A isommp42" + bytes(1000), "no audio.*`av`")
        yield refused("WebM", bytes.fromhex("1a45dfa3") + bytes(1000), "no audio.*`av`")
        yield refused("AMR", b"#!AMR\n" + bytes(1000), "no audio.*`av`")
        return
    for form, codec, rate in (("mp4", "aac", 44100), ("webm", "libopus", 48000), ("amr", "libopencore_amrnb", 8000)):
        content = contained(samples, form, codec, rate)
        yield file(f"{form} {codec}", content, f"clip.{form}", wrong=1 if rate > RATE else None)
        minute = contained(np.tile(samples, 9), form, codec, rate)
        yield refused(f"a minute of {form}", minute, r"more than 37\.00 s and this server takes at most 37\.00 s")
    yield refused("half an mp4", contained(samples, "mp4", "aac", 44100)[:20_000], "no audio|damaged")


def contained(samples: np.ndarray, form: str, codec: str, rate: int) -> bytes:
    import av  # type: ignore[import-not-found,unused-ignore]

    made = io.BytesIO()
    with av.open(made, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = RATE
        resampler = av.AudioResampler(format=stream.format, layout="mono", rate=rate)
        for resampled in (*resampler.resample(frame), *resampler.resample(None), None):
            container.mux(stream.encode(resampled))
    return made.getvalue()


def headers(samples: np.ndarray) -> Iterator[Input]:
    yield file("data size 0xFFFFFFFF", wav(samples, data=0xFFFFFFFF, riff=0xFFFFFFFF), wrong=0)
    yield file("data size more than there is", wav(samples, data=10 * samples.nbytes), wrong=0)
    yield file("RIFF size 0", wav(samples, riff=0), wrong=0)
    yield file("wrong byte rate", wav(samples, bytes=1), wrong=0)
    yield file("garbage after the data", wav(samples) + b"garbage" * 100, wrong=0)
    yield refused("data size 0", wav(samples, data=0, riff=36), "no samples|cut short")
    yield refused("no channel", wav(samples, channels=0), "no audio")
    yield refused("rate 0", wav(samples, rate=0), "no audio|sample rate")
    yield refused("rate 4 GHz", wav(samples, rate=0xFFFFFFFF), "no audio|sample rate")
    yield refused("rate 1 Hz", wav(samples, rate=1), "sample rate is 1 Hz: expected 2000 to 384000")
    yield refused("65535 channels", wav(samples, channels=65535, align=65535), "no audio|channels")
    yield refused("64 channels", encoded(np.zeros((100, 64), np.float32)), "64 channels: expected at most 32")
    yield file("13 bits", wav(samples, bits=13), wrong=0)
    yield refused("unknown codec", wav(samples, tag=0x7777), "no audio")
    yield refused("no data chunk", wav(samples)[:36], "no audio|no samples")
    yield file("wrong block align", wav(samples, align=7), wrong=0)


def odd(samples: np.ndarray) -> Iterator[Input]:
    yield file("0.01 s", encoded(samples[: RATE // 100]), silent=True)
    yield file("one sample", encoded(samples[:1]), silent=True)
    yield file("silence", encoded(np.zeros(3 * RATE, np.float32)), silent=True)
    yield file("noise", encoded(np.random.default_rng(0).uniform(-1, 1, 3 * RATE).astype(np.float32)), silent=True)
    yield file("constant offset", encoded(samples * 0.5 + 0.3, subtype="FLOAT"), wrong=2)
    yield file("ten times too loud", encoded(samples * 10, subtype="FLOAT"), wrong=6)
    yield file("a thousand times too quiet", encoded(samples / 1000, subtype="FLOAT"), wrong=1)
    for name, value in (("NaN", np.nan), ("infinite", np.inf)):
        broken = samples.copy()
        broken[len(broken) // 2] = value
        yield refused(f"{name} sample", encoded(broken, subtype="FLOAT"), "no numbers")
    yield refused("sample of 1e30", encoded(samples * np.float32(1e30), subtype="FLOAT"), "between -1 and 1")
    yield refused("all NaN", encoded(np.full(RATE, np.nan, np.float32), subtype="FLOAT"), "no numbers")


def damaged(samples: np.ndarray) -> Iterator[Input]:
    flac, mp3, opus = (encoded(samples, RATE, *form) for form in (("FLAC",), ("MP3",), ("OGG", "OPUS")))
    random = np.random.default_rng(1)
    yield refused("empty file", b"", "empty")
    yield refused("no samples", encoded(samples[:0]), "no samples")
    for seed, size in enumerate((1, 100, 10_000, 300_000)):
        yield refused(f"{size} random bytes", np.random.default_rng(seed).bytes(size), "no audio|no samples")
    yield refused("zeros", bytes(100_000), "no audio")
    yield refused("HTML", b"<!DOCTYPE html><html><body>404 Not Found</body></html>" * 50, "no audio")
    yield refused("a file of JSON", json.dumps({"audio": [0.1] * 1000}).encode(), "no audio")
    yield refused("text", b"this is a text file\n" * 100, "no audio")
    yield refused("PNG", b"\x89PNG\r\n\x1a\n" + random.bytes(5000), "no audio")
    yield refused("zip", b"PK\x03\x04" + random.bytes(5000), "no audio")
    yield refused("gzip of a wav", gzip.compress(encoded(samples)), "no audio")
    yield refused("playlist", b"#EXTM3U\n#EXTINF:10,\nhttp://127.0.0.1:1/a.ts\n", "no audio")
    # libsndfile takes minutes for these, be it that a tag hides the form.
    endless = b"FORM" + struct.pack(">I", 1 << 20) + b"8SVX" + struct.pack(">4sI", b"NAME", 0) * (1 << 17)
    yield refused("8SVX of empty chunks", endless, "no audio")
    yield refused("8SVX behind a tag", b"ID3\x03" + bytes(6) + endless, "no audio")
    yield refused("8SVX behind two tags", (b"ID3\x03" + bytes(5) + b"\x04abcd") * 2 + endless, "no audio")
    yield refused("tags only", (b"ID3\x03" + bytes(6)) * 10_000, "no audio")
    yield refused("raw samples", (samples * 32767).astype("<i2").tobytes(), "no audio")
    yield refused("a wav's first 20 bytes", encoded(samples)[:20], "no audio")
    yield refused("a flac's first 100 bytes", flac[:100], "no audio|cut short|damaged|no samples")
    yield refused("half a flac", flac[: len(flac) // 2], "cut short|damaged")
    yield refused("an opus' first 60 bytes", opus[:60], "no audio|no samples")
    yield refused("a flac with a hole", flac[:9000] + bytes(9000) + flac[18000:], "cut short|damaged")
    yield refused("a flac of noise", flac[:200] + random.bytes(20000), "cut short|damaged|no samples")
    yield file("half a wav", encoded(samples)[: len(samples)])
    yield file("half an mp3", mp3[: len(mp3) // 2])
    yield file("half an opus", opus[: len(opus) // 2])


def too_long(samples: np.ndarray) -> Iterator[Input]:
    limit = r"(lasts|more than) [\d.]+ s and this server takes at most 37\.00 s \(its VLLM_MAX_AUDIO_DECODE_DURATION_S"
    minute = np.tile(samples, 60 * RATE // len(samples) + 1)[: 60 * RATE]
    yield refused("60 s", encoded(minute), "lasts 60.00 s and this server takes at most 37.00 s")
    yield refused("60 s of opus", encoded(minute, RATE, "OGG", "OPUS"), limit)
    yield refused("60 s of mp3", encoded(minute, RATE, "MP3"), limit)
    hours = encoded(np.zeros(3 * 3600 * RATE, np.int16), RATE, "FLAC")
    yield refused("a flac that unpacks to 3 hours", hours, "lasts 10800.00 s .*at most 37.00 s")
    # STREAMINFO's number of samples is its last 36 bits before the MD5: unknown, then a lie.
    for name, count in (("of unknown length", 0), ("that says 1 s", RATE)):
        lying = bytearray(hours)
        lying[21] &= 0xF0
        lying[22:26] = struct.pack(">I", count)
        name = f"3 hours of flac {name}"
        yield file(name, bytes(lying)) if count else refused(name, bytes(lying), limit)
    yield refused("an hour at 2 kHz", encoded(np.zeros(3600 * 2000, np.int16), 2000), limit)
    yield refused("8 channels of a minute", encoded(np.zeros((60 * 8000, 8), np.int16), 8000), limit)


def large() -> Iterator[Input]:
    size = 100 << 20

    def pieces(count: int) -> Callable[[], Iterator[bytes]]:
        return lambda: (bytes(PIECE) for _ in range(count // PIECE))

    form = {"Content-Type": "multipart/form-data; boundary=x"}
    limit: dict[str, Any] = {"status": 413, "pattern": r"accepts at most \d+ \(26 MiB", "slow": True}
    yield Input("100 MB", data=lambda: bytes(size), headers=form, **limit)
    yield Input("40 MB in chunks of no told length", data=pieces(40 << 20), headers=form, **limit)
    yield Input("a chat of 100 MB", path=CHAT, data=lambda: bytes(size), **limit | {"pattern": "accepts at most"})
    yield file("a file of 25.5 MiB", bytes(51 << 19), status=413, pattern="`file` has 26738688 bytes", slow=True)


def forms(samples: np.ndarray) -> Iterator[Input]:
    clip, model = encoded(samples), {"model": "voxtral"}
    bad: dict[str, Any] = {"status": 400}
    yield Input("no file", files={"model": (None, "voxtral")}, pattern="no field called `file`.*model", **bad)
    yield Input("the field is called audio", files={"audio": ("a.wav", clip)}, pattern="`file`.*audio", **bad)
    yield Input("the field is called File", files={"File": ("a.wav", clip)}, pattern="`file`.*File", **bad)
    yield Input("file as text", files={"file": (None, "clip.wav")}, pattern="sent as text", **bad)
    both = [("file", ("a.wav", clip)), ("file", ("b.wav", clip))]
    yield Input("two files", files=both, data=model, pattern="two fields called `file`", **bad)
    yield Input("model as a file", files={"file": ("a.wav", clip), "model": ("m", b"x")}, pattern="`model` was", **bad)
    yield Input(
        "a field that is no UTF-8", files={"file": ("a.wav", clip), "prompt": (None, b"\xff")}, pattern="UTF-8", **bad
    )
    strange = {"file": ("a.wav", clip), "a b": (None, "x")}
    yield Input("a field of a strange name", files=strange, pattern="plain name", **bad)
    yield Input("no body", data=b"", status=415, pattern="expected multipart/form-data")
    yield Input("bare audio", data=clip, headers={"Content-Type": "audio/wav"}, status=415, pattern="'audio/wav'")
    yield Input(
        "JSON", data=b'{"file": "a"}', headers={"Content-Type": "application/json"}, status=415, pattern="multipart"
    )
    yield Input("urlencoded", data={"file": "a"}, status=415, pattern="multipart")
    kind = "multipart/form-data"
    yield Input("no boundary", data=clip, headers={"Content-Type": kind}, pattern="no boundary", **bad)
    other = {"Content-Type": f"{kind}; boundary=other"}
    yield Input("another boundary", data=b"--x\r\n" + clip, headers=other, pattern="not a valid multipart form", **bad)
    cut = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + clip
    yield Input(
        "a form cut short", data=cut, headers={"Content-Type": f"{kind}; boundary=x"}, pattern="incomplete", **bad
    )
    packed = {"Content-Type": f"{kind}; boundary=x", "Content-Encoding": "gzip"}
    yield Input("a gzipped form", data=gzip.compress(cut), headers=packed, status=415, pattern="Content-Encoding")
    many = [(f"f{index}", (None, "x")) for index in range(2000)]
    yield Input("2000 fields", files=[*many, ("file", ("a.wav", clip))], status=413, pattern="more than 1000 fields")
    prompt = {"file": ("a.wav", clip), "prompt": (None, "word " * 400_000)}
    yield Input("a prompt of 2 MB", files=prompt, status=413, pattern="1048576 bytes")


def options(samples: np.ndarray) -> Iterator[Input]:
    clip = encoded(samples)

    def option(name: str, value: str, status: int = 400, pattern: str = "", **expected: Any) -> Input:
        fields = {"model": "voxtral", name: value}
        expected |= {"status": status, "pattern": pattern or name}
        return Input(f"{name} {value}"[:40], files={"file": ("a.wav", clip)}, data=fields, **expected)

    yield option("model", "whisper-9", 404, "whisper-9")
    yield option("language", "xx", pattern="xx")
    yield option("language", "English", pattern="English")
    yield option("language", "en", 200, wrong=0)
    for form, heading in (
        ("text", 0),
        ("verbose_json", 0),
        ("srt", 0),
        ("vtt", 1),
    ):  # words that are none of the clip's
        yield option("response_format", form, 200, wrong=heading)
    yield option("timestamp_granularities[]", "word", pattern="needs response_format verbose_json")
    yield option("timestamp_granularities[]", "sentence", pattern="expected one of word, segment")
    yield option("response_format", "nonsense", pattern="expected one of json, text, verbose_json, srt, vtt")
    for name, value in (("temperature", "-1"), ("temperature", "hot"), ("temperature", "nan"), ("temperature", "inf")):
        yield option(name, value)
    for name, value in (("top_p", "5"), ("top_k", "-5"), ("min_p", "2"), ("seed", "abc"), ("seed", "9" * 30)):
        yield option(name, value)
    for name, value in (("repetition_penalty", "0"), ("presence_penalty", "9"), ("frequency_penalty", "-9")):
        yield option(name, value)
    for name, value in (("stream", "maybe"), ("max_completion_tokens", "many"), ("n", "100000")):
        yield option(name, value)
    for name, value in (("hotwords", "kebab"), ("prompt", "word " * 10_000), ("to_language", "xx")):
        yield option(name, value, 200)
    for name, value in (("vllm_xargs", "{"), ("vllm_xargs", '{"voxtral_serve_session": ["x"]}')):
        yield option(name, value, 200)
    yield option("max_completion_tokens", "999999999", 200)
    yield option("use_beam_search", "true", pattern="use_beam_search is not supported")
    yield option("max_completion_tokens", "-1", pattern="max_tokens|max_completion_tokens")
    yield option("unknown_field", "x", 200, wrong=0)


def requests_of_other_kinds(samples: np.ndarray) -> Iterator[Input]:
    good: dict[str, Any] = {"files": {"file": ("a.wav", encoded(samples))}, "data": {"model": "voxtral"}}
    for name, key in (
        ("no key", ""),
        ("a wrong key", "Bearer wrong"),
        ("a key by name", f"Basic {KEY}"),
        ("half a key", "Bearer"),
    ):
        yield Input(name, headers={"Authorization": key}, status=401, pattern="key.*Authorization: Bearer KEY", **good)
    # vLLM 0.20.0 builds the path that it checks from this header as well.
    trick = {"Authorization": "", "Host": "a/health?"}
    yield Input("a host that looks like a path", headers=trick, status=401, pattern="no key", **good)
    yield Input(
        "100 MB without a key",
        headers={"Authorization": ""},
        data=lambda: bytes(100 << 20),
        status=401,
        pattern="no key",
        slow=True,
    )
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        yield Input(f"{method}", method=method, status=405, pattern=f"takes POST, not {method}")
    yield Input("POST to models", path="/v1/models", status=405, pattern="takes GET")
    yield Input("POST to the page", path="/", status=405, pattern="takes GET or HEAD")
    paths = "/docs /redoc /openapi.json /v1/completions /v1/embeddings /tokenize /detokenize /invocations /v1/responses"
    paths += (
        " /collective_rpc /sleep /server_info /reset_prefix_cache /v1/load_lora_adapter /scale_elastic_ep /metrics/x"
    )
    paths += " /v1/audio/transcriptions/ //v1/audio/transcriptions /V1/audio/transcriptions /v1/messages /pause"
    paths += " /page /page/none.js"
    for path in paths.split():
        yield Input(f"path {path}", path=path, status=404, pattern="there is no", data=b"{}")
    yield Input("realtime without WebSocket", method="GET", path="/v1/realtime", status=404, pattern="there is no")


NO_CHAT = "this model does not chat: send audio to"


def of_no_chat(made: list[Input]) -> list[Input]:
    """For a model that does not chat: each chat is refused before it is read."""
    return [replace(each, pattern=NO_CHAT) if each.path == CHAT and each.status == 400 else each for each in made]


def chats(samples: np.ndarray) -> Iterator[Input]:
    def raw(name: str, body: bytes, pattern: str, status: int = 400) -> Input:
        return Input(
            f"chat: {name}",
            path=CHAT,
            data=body,
            headers={"Content-Type": "application/json"},
            status=status,
            pattern=pattern,
        )

    def parts(name: str, part: Any, pattern: str, **more: Any) -> Input:
        asked = {"model": "voxtral", "messages": [{"role": "user", "content": [part]}], **more}
        return raw(name, json.dumps(asked).encode(), pattern)

    def url(address: str) -> Input:
        return parts(
            f"url {address[:40]!r}", {"type": "audio_url", "audio_url": {"url": address}}, "accepts data: URLs"
        )

    yield raw("no JSON", b"{", "not valid JSON")
    yield raw("empty", b"", "not valid JSON")
    yield raw("a list", b"[]", "not a JSON object")
    yield raw("no messages", b'{"model": "voxtral"}', "messages")
    yield raw("binary", b"\xff\xfe\x00", "not valid JSON")
    yield raw("NaN", b'{"messages": [], "temperature": NaN}', "NaN")
    yield raw("nested 100000 deep", b"[" * 100_000, "not valid JSON")
    yield raw("half a surrogate pair", rb'{"messages": [{"role": "user", "content": "\ud800"}]}', "Unicode")
    yield raw(
        "no messages in the list",
        b'{"model": "voxtral", "messages": []}',
        "messages has 0 items: expected a list of 1 to",
    )
    for address in (
        "http://169.254.169.254/latest/meta-data/",
        "http://localhost:8000/x",
        "http://127.0.0.1/",
        "HTTP://x",
    ):
        yield url(address)
    for address in (
        "file:///etc/passwd",
        "FILE:/etc/passwd",
        "http://[::1]/x",
        "http://[::1",
        " http://x",
        "\thttp://x",
    ):
        yield url(address)
    for address in (
        "ftp://x/a.wav",
        "gopher://x",
        "//x/a.wav",
        "/etc/passwd",
        "",
        "http://user:pass@x/",
        "http:\\\\x",
        " data:,",
    ):
        yield url(address)
    yield parts("url as text", {"type": "audio_url", "audio_url": "http://127.0.0.1/"}, "accepts data: URLs")
    yield parts("url with no type", {"audio_url": {"url": "http://127.0.0.1/"}}, "accepts data: URLs")
    yield parts(
        "url in a text part", {"type": "text", "text": "a", "audio_url": "http://127.0.0.1/"}, "accepts data: URLs"
    )
    for kind in ("image_url", "video_url"):
        yield parts(
            kind,
            {"type": kind, kind: {"url": "http://127.0.0.1/a"}},
            f"type is '{kind}': expected one of text, audio_url, input_audio",
        )
        inline = f"data:{kind[:5]}/png;base64,AAAA"
        yield parts(f"{kind} inline", {"type": kind, kind: {"url": inline}}, f"type is '{kind}': expected")
    for kind in ("audio_embeds", "image_embeds", "input_image", "file"):
        yield parts(kind, {"type": kind, kind: "AAAA"}, f"type is '{kind}': expected")
    yield parts(
        "no base64", {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,!!"}}, "not valid base64"
    )
    yield parts("plain data url", {"type": "audio_url", "audio_url": {"url": "data:audio/wav,abc"}}, "in base64")
    html = base64.b64encode(b"<html>" * 100).decode()
    yield parts("HTML", {"type": "audio_url", "audio_url": {"url": f"DATA:audio/wav;base64,{html}"}}, NO_CHAT)
    yield parts("HTML as input_audio", {"type": "input_audio", "input_audio": {"data": html, "format": "wav"}}, NO_CHAT)
    long = base64.b64encode(encoded(np.zeros(3600 * RATE, np.int16), RATE, "FLAC")).decode()
    yield parts("an hour", {"type": "input_audio", "input_audio": {"data": long, "format": "flac"}}, NO_CHAT)
    yield parts("processing", {"type": "text", "text": "a"}, NO_CHAT, media_io_kwargs={"audio": {}})
    yield parts("n", {"type": "text", "text": "a"}, "expected a whole number from 1 to 16", n=16384)
    # vLLM would end its engine over these: the model needs audio, and in its own prompt.
    inline = base64.b64encode(encoded(samples)).decode()
    yield parts("text", {"type": "text", "text": "hello"}, NO_CHAT)
    clip = {"type": "input_audio", "input_audio": {"data": inline, "format": "wav"}}
    yield parts("audio", clip, NO_CHAT)
    yield parts("a part that is a number", 7, "expected text or an object")
    asked = {"model": "voxtral", "messages": [{"role": "user", "content": [clip] * 20}]}
    yield raw("20 clips", json.dumps(asked).encode(), NO_CHAT)
