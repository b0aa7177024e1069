"""Serve pico to one live session for hours of audio; tell whether its text, lag and memory stay as they were.

    python -m tools.soak_live --out bench/results/soak-live-cpu.json

The session gets the live set (bench/data/live.jsonl) again and again, PACE times faster than speech, with silence
after each recording, until it has had so many minutes of audio. Each pass over the set is scored on its own: the word
error rate, the lag of its tokens, and the server's memory. Exit status 1 if the last pass is worse than the first, or
anything failed.

The server runs with tcmalloc, as in tools/soak.py.
"""

import argparse
import asyncio
import base64
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml  # type: ignore[import-untyped,unused-ignore]
from websockets.asyncio.client import ClientConnection, connect

from bench import dataset, environment, metrics, prometheus, results, serve, sound
from bench.answers import Row
from bench.measure import lag, spread
from mistral_layout.audio import DELAY_MS, SAMPLE_RATE
from mistral_layout.audio import SAMPLES_PER_TOKEN as PIECE
from pico import huggingface
from tools.compare_layouts import LIBRARIES, ROOT
from tools.soak import CONFIG, resident, tcmalloc

PACE = 10
MINUTES = 180
SILENCE_S = 4  # after each recording: its last words are written before the next one begins
SAMPLE_S = 5
SLOWER, WORSE, GROWN_BYTES = 1.5, 0.003, 32 << 20  # the most that the last pass may have above the first
FLAGS: tuple[str, ...] = ("--enforce-eager", "--kv-cache-memory-bytes", str(128 << 20), "--api-server-count", "1")
PIECE_S = PIECE / SAMPLE_RATE


@dataclass(frozen=True)
class Pass:
    """Pieces of audio, from `first` to before `last`, and what was said in them."""

    first: int
    last: int
    text: str


def passes(clips: list[dataset.Clip], minutes: float) -> tuple[np.ndarray, list[Pass]]:
    """(int16 samples of the set, what is said in each pass). A shorter pass ends with a recording."""
    rest = np.zeros(SILENCE_S * SAMPLE_RATE, np.int16)
    wanted, sent, found = minutes * 60, 0, list[Pass]()
    audio: list[np.ndarray] = []
    while sent * PIECE_S < wanted:
        first, said = sent, []
        for clip in clips:
            if sent * PIECE_S >= wanted:
                break
            samples = np.concatenate([sound.pcm16(clip), rest])
            samples = np.pad(samples, (0, -len(samples) % PIECE))
            if not found:
                audio.append(samples)
            said.append(clip.text)
            sent += len(samples) // PIECE
        found.append(Pass(first, sent, " ".join(said)))
    return np.concatenate(audio), found


class Session:
    """Sends the samples over and over, and keeps when each piece went and when each token came."""

    def __init__(self, socket: ClientConnection, samples: np.ndarray, pieces: int) -> None:
        self.socket, self.samples, self.pieces = socket, samples, pieces
        self.sent = np.zeros(pieces)
        self.tokens: list[tuple[float, str]] = []

    async def run(self) -> None:
        """Raises RuntimeError if the server ends the session."""
        await self._say("session.update", model="voxtral")
        await self._say("input_audio_buffer.commit")
        sender = asyncio.create_task(self._send())
        try:
            async for message in self.socket:
                event = json.loads(message)
                if event["type"] == "transcription.delta":
                    self.tokens.append((time.monotonic(), event["delta"]))
                elif event["type"] == "transcription.done":
                    return
                elif event["type"] == "error":
                    raise RuntimeError(f"the server says: {event['error']}")
            raise RuntimeError("the server closed the session")
        finally:
            sender.cancel()

    async def _send(self) -> None:
        whole, start = len(self.samples) // PIECE, time.monotonic()
        for number in range(self.pieces):
            if (wait_s := start + number * PIECE_S / PACE - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            at = number % whole * PIECE
            pcm = self.samples[at : at + PIECE].tobytes()
            await self._say("input_audio_buffer.append", audio=base64.b64encode(pcm).decode())
            self.sent[number] = time.monotonic()
        await self._say("input_audio_buffer.commit", final=True)

    async def _say(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    def scores(self, each: Pass) -> dict[str, Any]:
        """Of one pass. Token k has the words that end in piece k, and needs the audio up to piece k + delay + 1."""
        delay = lag.delay_tokens(DELAY_MS)
        own = self.tokens[each.first : each.last]
        text = "".join(delta for _, delta in own)
        lags = []
        for number, (came, _) in enumerate(own, start=each.first):
            piece = number + delay + 1
            if piece < self.pieces:
                lags.append(1000 * (came - self.sent[piece]))
        row = Row("pass", (each.last - each.first) * PIECE_S, 1, 0.0, 1.0, None, None, text, each.text, None)
        wer = metrics.wer([row])
        return {
            "from_minute": round(each.first * PIECE_S / 60, 2),
            "to_minute": round(each.last * PIECE_S / 60, 2),
            "tokens": len(own),
            "wer": wer["value"],
            "words": wer["words"],
            "inserted": wer["insertions"],
            "lag_ms": spread.percentiles(lags, (50, 99)),
        }


async def hold(url: str, samples: np.ndarray, pieces: int, process: psutil.Process) -> tuple[Session, list[Any]]:
    """(the session, [(time, resident bytes)] of the server)"""
    memory: list[tuple[float, int]] = []

    async def watch() -> None:
        while True:
            memory.append((time.monotonic(), sum(resident([process, *process.children(recursive=True)]).values())))
            await asyncio.sleep(SAMPLE_S)

    address = "ws" + url.removeprefix("http") + "/v1/realtime"
    async with connect(address, compression=None, ping_interval=None, max_size=None) as socket:
        session = Session(socket, samples, pieces)
        watching = asyncio.create_task(watch())
        try:
            await session.run()
        finally:
            watching.cancel()
    return session, memory


def soak(minutes: float, scratch: Path, flags: tuple[str, ...], preloaded: str | None) -> dict[str, Any]:
    """What the JSON file holds. `flags` are more of vLLM's, `preloaded` is the library that allocates its memory."""
    variables = {"LD_PRELOAD": preloaded} if preloaded else {}
    clips = dataset.load(ROOT / "bench/data/live.jsonl")[0]
    samples, every = passes(clips, minutes)
    port, log = serve.free_port(), scratch / "server.log"
    with serve.server(CONFIG, huggingface.PICO, port, log, *FLAGS, *flags, environment=variables) as process:
        url = f"http://127.0.0.1:{port}"
        version = serve.get(f"{url}/version", timeout_s=10).json()["version"]
        session, memory = asyncio.run(hold(url, samples, every[-1].last, psutil.Process(process.pid)))
        told = serve.get(f"{url}/metrics", 10).text
        alive = process.poll() is None
    scored = [session.scores(each) for each in every]
    for each, score in zip(every, scored, strict=True):
        begin, end = session.sent[each.first], session.sent[each.last - 1]
        held = [size for at, size in memory if begin <= at <= end]
        score["rss_mean_bytes"] = round(statistics.mean(held)) if held else None
    first, last = scored[0], scored[-1]
    grown = (last["rss_mean_bytes"] or 0) - (scored[len(scored) // 3]["rss_mean_bytes"] or 0)
    rollovers = prometheus.total(told, "voxtral_serve_live_rollovers_total")
    return {
        "command": f"python -m tools.soak_live --minutes {minutes:g}",
        "config": yaml.safe_load(CONFIG.read_text()),
        "flags": [*FLAGS, *flags],
        "variables": variables,
        "environment": environment.describe(version) | {"served_by": environment.versions(LIBRARIES)},
        "minutes": minutes,
        "pace": PACE,
        "passes": scored,
        "pieces": every[-1].last,
        "tokens": len(session.tokens),
        "rollovers": rollovers,
        "verdict": {
            "still_up": alive,
            "no_session_left": prometheus.total(told, "voxtral_serve_live_sessions") == 0,
            "rolled_over": bool(rollovers),
            "as_right": last["wer"] <= first["wer"] + WORSE,
            "not_slower": last["lag_ms"]["p50"] <= SLOWER * first["lag_ms"]["p50"],
            "no_growth": grown <= GROWN_BYTES,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"of audio (default: {MINUTES})")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        outcome = soak(flags.minutes, Path(scratch), (), tcmalloc())
    results.write_json(flags.out, outcome)
    for each in outcome["passes"]:
        print(each)
    print(f"{outcome['rollovers']} rollovers, {outcome['verdict']}: {flags.out}")
    if not all(outcome["verdict"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
