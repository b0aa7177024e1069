"""Serve pico for half an hour to clients, live sessions and attackers, then to one live session for hours of audio.

    make soak        # python -m soak --out bench/results/soak-cpu.json, with tests/support on Python's path

Of 16 clients, each of which sends one request after another, one request in ten is one of `inputs`, and one in ten is
given up before its answer comes. The other clips must come back with the text of the committed reference. Beside them
the attacks of `attackers` take turns, each followed by a pause of its length. The second half of the time is cut into
thirds, in each of which each attack has one turn: the server's memory, and the latency of the good clips, must be in
the last what they are in the first. No request, session or place may be left at the end.

The long session gets the live set (bench/data/live.jsonl) again and again, LONG_PACE times faster than speech, with
silence after each recording. Each pass over the set is scored on its own: word error rate, lag, memory of the server.
The last must be as good as the first. Exit status 1 where any of this does not hold, or anything failed.

The server runs with tcmalloc, which vLLM asks for on a CPU (https://docs.vllm.ai, "set LD_PRELOAD"). With glibc's
malloc the worker's heap fragments and grows for longer than this lasts.
"""

import argparse
import asyncio
import base64
import contextlib
import ctypes.util
import itertools
import json
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import attackers
import inputs
import numpy as np
import psutil
import requests
import yaml  # type: ignore[import-untyped,unused-ignore]
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from bench import dataset, environment, metrics, prometheus, results, sound
from bench.answers import Row
from bench.measure import engine, lag, spread
from mistral_layout.audio import DELAY_MS, SAMPLE_RATE
from mistral_layout.audio import SAMPLES_PER_TOKEN as PIECE
from pico import huggingface

ROOT = Path(__file__).parents[2]
LIBRARIES = environment.SERVER_LIBRARIES
CLIENTS = 16
BAD_SHARE, GONE_SHARE = 0.1, 0.1
LIVE_CLIENTS, PACE = 3, 3
LIVE = ("live", "live lost", "live silent")
LOST_SHARE, SILENT_SHARE = 0.2, 0.2
LIVE_TIMEOUT_S = 120
PIECE_S = PIECE / SAMPLE_RATE
LEFT_S = 5  # after the last request: a session whose client is gone is closed by then
SAMPLE_S = 2
SLOWER = 1.25  # the most that a third's median latency may be of the first's
GROWN_BYTES = 32 << 20  # the most that a third's mean memory may be above the first's
CONFIG = ROOT / "profiles/fast.yaml"
# Without minutes of compiling, and in what a small machine has. The KV cache holds four times what the clients need: a
# page of it is resident from the first time that it is written, so a larger one would look like growth.
FLAGS: tuple[str, ...] = (
    "--enforce-eager",
    "--kv-cache-memory-bytes",
    str(64 << 20),
    "--api-server-count",
    "1",
    "--max-model-len",
    "512",
    # Places for attackers, and for sessions whose connection was just lost; the profile's longest clip is longer than
    # this context.
    "--additional-config",
    json.dumps({"max_live_sessions": 2 * (LIVE_CLIENTS + attackers.BACKLOGS), "max_clip_positions": 512}),
    *("--api-key", inputs.KEY),
)
# What a server that nobody asks has 0 of
LEFT = {
    "no_request_left": "vllm:num_requests_running",
    "no_session_left": "voxtral_serve_live_sessions",
    "no_place_left": "voxtral_serve_requests_in_flight",
}
# Where several are decoded in one step, sums of bfloat16 fall otherwise and a near-tie may too: words of a clip.
NEAR_TIES = 2


@dataclass(frozen=True)
class SentRequest:
    """One request: seconds since the start, what was sent, seconds until its end, and what was wrong with it."""

    start: float
    kind: str
    took: float
    problem: str | None


class Soak:
    def __init__(self, url: str, minutes: float) -> None:
        self.url, self.end_s = url, 60 * minutes
        self.begun = time.monotonic()
        rows = results.read_rows(ROOT / "bench/results/pico-cpu" / results.ROWS)
        self.texts = {row.id: inputs.plain(row.text or "") for row in rows}
        # Those that pico hears. In what it mishears, many words hang on one near-tie.
        self.clips = [
            clip
            for clip in dataset.load(ROOT / "bench/data")[0]
            if inputs.differing(inputs.plain(clip.text), self.texts[clip.id]) <= NEAR_TIES
        ]
        # Without those that name the limit of inputs.ENVIRONMENT: here, a file may have ten minutes.
        limit = inputs.ENVIRONMENT["VLLM_MAX_AUDIO_DECODE_DURATION_S"]
        made = inputs.of_no_chat(inputs.inputs(attackers.CLIP))
        self.inputs = [each for each in made if not each.slow and limit not in each.pattern]
        self.sent: list[SentRequest] = []
        self.memory: list[tuple[float, dict[str, int]]] = []

    def now(self) -> float:
        return time.monotonic() - self.begun

    def run(self, process: psutil.Process) -> None:
        clients = [threading.Thread(target=self.client, args=(seed,)) for seed in range(CLIENTS)]
        clients += [threading.Thread(target=self.speaker, args=(CLIENTS + n,)) for n in range(LIVE_CLIENTS)]
        clients.append(threading.Thread(target=self.attack))
        for client in clients:
            client.start()
        while self.now() < self.end_s:
            self.memory.append((self.now(), resident([process, *process.children(recursive=True)])))
            time.sleep(SAMPLE_S)
        for client in clients:
            client.join()

    def attack(self) -> None:
        turn_s = self.end_s / 6 / (2 * len(attackers.ATTACKS))
        for turn, (name, attack) in enumerate(itertools.cycle(attackers.ATTACKS.items())):
            if (start := self.now()) >= self.end_s:
                return
            with attackers.attacked(self.url, attack):
                time.sleep(max(0.0, (2 * turn + 1) * turn_s - self.now()))
            self.sent.append(SentRequest(start, name, self.now() - start, None))
            time.sleep(max(0.0, (2 * turn + 2) * turn_s - self.now()))

    def client(self, seed: int) -> None:
        choose, session = random.Random(seed), requests.Session()
        while self.now() < self.end_s:
            kind = choose.choices(("bad", "gone", "good"), (BAD_SHARE, GONE_SHARE, 1 - BAD_SHARE - GONE_SHARE))[0]
            start = self.now()
            try:
                problem = getattr(self, kind)(session, choose)
            except requests.RequestException as error:
                problem = f"no answer: {error}"
            self.sent.append(SentRequest(start, kind, self.now() - start, problem))

    def speaker(self, seed: int) -> None:
        choose = random.Random(seed)
        while self.now() < self.end_s:
            kind = choose.choices(LIVE, (1 - LOST_SHARE - SILENT_SHARE, LOST_SHARE, SILENT_SHARE))[0]
            clip, start = choose.choice(self.clips), self.now()
            took: float | None = None
            try:
                took, problem = self.session(clip, kind, choose)
            except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
                problem = f"{clip.id}: {type(error).__name__}: {error}"
            self.sent.append(SentRequest(start, kind, self.now() - start if took is None else took, problem))

    def session(self, clip: dataset.Clip, kind: str, choose: random.Random) -> tuple[float | None, str | None]:
        """Hold one live session -> (seconds from its last audio to its text if it has one, what was wrong with it)."""
        pcm = sound.pcm16(clip).tobytes()
        size = 2 * PIECE
        pieces = [pcm[at : at + size] for at in range(0, len(pcm), size)]
        with connect(
            "ws" + self.url.removeprefix("http") + "/v1/realtime",
            additional_headers={"Authorization": f"Bearer {inputs.KEY}"},
            compression=None,
            open_timeout=LIVE_TIMEOUT_S,
            close_timeout=1,
            ping_interval=None,
        ) as socket:
            socket.recv(timeout=LIVE_TIMEOUT_S)
            socket.send(json.dumps({"type": "session.update", "model": "voxtral"}))
            if kind == "live silent":
                time.sleep(choose.uniform(0, 2))
                attackers.end(socket.socket, 2)
                return None, None
            socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
            begun, heard = time.monotonic(), list[dict[str, Any]]()
            for number, piece in enumerate(pieces[: choose.randrange(len(pieces))] if kind == "live lost" else pieces):
                time.sleep(max(0.0, begun + number * PIECE / SAMPLE_RATE / PACE - time.monotonic()))
                audio = base64.b64encode(piece).decode()
                socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
                with contextlib.suppress(TimeoutError):
                    while True:
                        heard.append(json.loads(socket.recv(timeout=0)))
            if kind == "live lost":
                attackers.end(socket.socket, 2)
                return None, None
            socket.send(json.dumps({"type": "input_audio_buffer.commit", "final": True}))
            spoken = time.monotonic()
            while not heard or heard[-1]["type"] == "transcription.delta":
                heard.append(json.loads(socket.recv(timeout=LIVE_TIMEOUT_S)))
            took = time.monotonic() - spoken
        last = heard[-1]
        if last["type"] != "transcription.done":
            return took, f"{clip.id}: {json.dumps(last)[:200]}"
        words = inputs.plain(last["text"])
        wrong = inputs.differing(self.texts[clip.id], words)
        return took, f"{clip.id}: {wrong} words differ live: {' '.join(words)}" if wrong > NEAR_TIES else None

    def good(self, session: requests.Session, choose: random.Random) -> str | None:
        clip = choose.choice(self.clips)
        answer = attackers.post(self.url, clip.path.read_bytes(), 300, session)
        if answer.status_code != 200:
            return f"{clip.id}: HTTP {answer.status_code}: {answer.text[:200]}"
        heard = inputs.plain(answer.json()["text"])
        wrong = inputs.differing(self.texts[clip.id], heard)
        return f"{clip.id}: {wrong} words differ: {' '.join(heard)}" if wrong > NEAR_TIES else None

    def gone(self, session: requests.Session, choose: random.Random) -> str | None:
        try:
            clip = choose.choice(self.clips).path.read_bytes()
            answer = attackers.post(self.url, clip, choose.uniform(0.01, 1), session)
        except requests.exceptions.Timeout:
            return None
        return None if answer.status_code == 200 else f"HTTP {answer.status_code}: {answer.text[:200]}"

    def bad(self, session: requests.Session, choose: random.Random) -> str | None:
        each = choose.choice(self.inputs)
        arguments = each.arguments()
        prepared = session.prepare_request(requests.Request(**arguments | {"url": self.url + "/"}))
        prepared.url = self.url + arguments["url"]  # as it is: requests would mend it
        answer = session.send(prepared, timeout=300)
        try:
            content = answer.json()
        except ValueError:
            content = answer.text
        code = content.get("error", {}).get("code") if isinstance(content, dict) else None
        if (answer.status_code, code) == (429, "overloaded"):  # beside long files, an invalid request may come later
            return None
        found = each.problem(answer.status_code, content, self.texts["001"])
        return None if found is None else f"{each.name}: {found}"


def resident(processes: list[psutil.Process]) -> dict[str, int]:
    """Bytes by the name that vLLM gives its processes; shared pages count in each."""
    sizes: dict[str, int] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # ended between the two
            found = re.search(r"VLLM::\w+", " ".join(process.cmdline()))
            name = found[0] if found else "vllm serve and its helpers"
            sizes[name] = sizes.get(name, 0) + process.memory_info().rss
    return sizes


def minutely(memory: list[tuple[float, dict[str, int]]]) -> list[int]:
    """The mean of each minute."""
    by_minute: dict[int, list[int]] = {}
    for at, sizes in memory:
        by_minute.setdefault(int(at // 60), []).append(sum(sizes.values()))
    return [round(statistics.mean(totals)) for totals in by_minute.values()]


def thirds(soak: Soak) -> list[dict[str, Any]]:
    """Of the second half: good requests, their latency in seconds, and the mean memory in bytes."""
    warm_s = soak.end_s / 2  # in which the worker's memory grows to where it then stays
    length = (soak.end_s - warm_s) / 3
    found = []
    for index in range(3):
        start, end = warm_s + index * length, warm_s + (index + 1) * length
        took, final = (
            [sent.took for sent in soak.sent if sent.kind == kind and start <= sent.start < end]
            for kind in ("good", "live")
        )
        memory = [sizes for at, sizes in soak.memory if start <= at < end]
        totals = [sum(sizes.values()) for sizes in memory]
        found.append(
            {
                "from_s": round(start, 1),
                "good_requests": len(took),
                "latency_s": spread.percentiles(took, (50, 95)),
                "live_sessions": len(final),
                "final_s": spread.percentiles(final, (50, 95)),
                "rss_mean_bytes": round(statistics.mean(totals)),
                "rss_max_bytes": max(totals),
                "rss_mean_bytes_of": {
                    name: round(statistics.mean(sizes.get(name, 0) for sizes in memory)) for name in memory[-1]
                },
            }
        )
    return found


def tcmalloc() -> str:
    """The library's name, for LD_PRELOAD. Ends the program where it is not installed."""
    found = ctypes.util.find_library("tcmalloc_minimal")
    if found is None:
        sys.exit(
            "error: the soak needs libtcmalloc_minimal; on Debian and Ubuntu: apt-get install libtcmalloc-minimal4"
        )
    return found


def clients(minutes: float, scratch: Path) -> dict[str, Any]:
    """What the JSON file holds."""
    port, log = engine.free_port(), scratch / "server.log"
    many = {"VOXTRAL_SERVE_MAX_IN_FLIGHT": str(8 * CLIENTS), "LD_PRELOAD": tcmalloc()}
    with engine.served(CONFIG, huggingface.PICO, port, log, *FLAGS, environment=many) as process:
        url = f"http://127.0.0.1:{port}"
        version = engine.get(f"{url}/version", timeout_s=10).json()["version"]
        run = Soak(url, minutes)
        run.run(psutil.Process(process.pid))
        time.sleep(LEFT_S)
        left = engine.get(f"{url}/metrics", 10).text
        alive = process.poll() is None
    first, _, last = parts = thirds(run)
    problems = [asdict(sent) for sent in run.sent if sent.problem]
    return {
        "command": f"python -m soak --minutes {minutes:g}",
        "config": yaml.safe_load(CONFIG.read_text()),
        "flags": list(FLAGS),
        "variables": many,
        "environment": environment.describe(version) | {"served_by": environment.versions(LIBRARIES)},
        "minutes": minutes,
        "clients": CLIENTS,
        "live_clients": LIVE_CLIENTS,
        "requests": dict(Counter(sent.kind for sent in run.sent)),
        "thirds": parts,
        "rss_bytes_each_minute": minutely(run.memory),
        "failed": problems,
        "verdict": {
            "no_failure": not problems,
            "still_up": alive,
            **{name: prometheus.total(left, gauge) == 0 for name, gauge in LEFT.items()},
            "no_growth": last["rss_mean_bytes"] - first["rss_mean_bytes"] <= GROWN_BYTES,
            "not_slower": all(last[name]["p50"] <= SLOWER * first[name]["p50"] for name in ("latency_s", "final_s")),
        },
    }


# ---- One long session

LONG_PACE = 10
LONG_MINUTES = 180
SILENCE_S = 4  # after each recording: its last words are written before the next one begins
LONG_SAMPLE_S = 5
LONG_SLOWER, WORSE = 1.5, 0.003  # the most that the last pass may have above the first
LONG_FLAGS: tuple[str, ...] = ("--enforce-eager", "--kv-cache-memory-bytes", str(128 << 20), "--api-server-count", "1")


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


class LongSession:
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
            if (wait_s := start + number * PIECE_S / LONG_PACE - time.monotonic()) > 0:
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


async def hold(url: str, samples: np.ndarray, pieces: int, process: psutil.Process) -> tuple[LongSession, list[Any]]:
    """(the session, [(time, resident bytes)] of the server)"""
    memory: list[tuple[float, int]] = []

    async def watch() -> None:
        while True:
            memory.append((time.monotonic(), sum(resident([process, *process.children(recursive=True)]).values())))
            await asyncio.sleep(LONG_SAMPLE_S)

    address = "ws" + url.removeprefix("http") + "/v1/realtime"
    async with connect_async(address, compression=None, ping_interval=None, max_size=None) as socket:
        session = LongSession(socket, samples, pieces)
        watching = asyncio.create_task(watch())
        try:
            await session.run()
        finally:
            watching.cancel()
    return session, memory


def one_session(minutes: float, scratch: Path, flags: tuple[str, ...], preloaded: str | None) -> dict[str, Any]:
    """What the JSON file holds. `flags` are more of vLLM's, `preloaded` is the library that allocates its memory."""
    variables = {"LD_PRELOAD": preloaded} if preloaded else {}
    clips = dataset.load(ROOT / "bench/data/live.jsonl")[0]
    samples, every = passes(clips, minutes)
    port, log = engine.free_port(), scratch / "server.log"
    with engine.served(CONFIG, huggingface.PICO, port, log, *LONG_FLAGS, *flags, environment=variables) as process:
        url = f"http://127.0.0.1:{port}"
        version = engine.get(f"{url}/version", timeout_s=10).json()["version"]
        session, memory = asyncio.run(hold(url, samples, every[-1].last, psutil.Process(process.pid)))
        told = engine.get(f"{url}/metrics", 10).text
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
        "command": f"python -m soak --minutes {minutes:g}",
        "config": yaml.safe_load(CONFIG.read_text()),
        "flags": [*LONG_FLAGS, *flags],
        "variables": variables,
        "environment": environment.describe(version) | {"served_by": environment.versions(LIBRARIES)},
        "minutes": minutes,
        "pace": LONG_PACE,
        "passes": scored,
        "pieces": every[-1].last,
        "tokens": len(session.tokens),
        "rollovers": rollovers,
        "verdict": {
            "still_up": alive,
            "no_session_left": prometheus.total(told, "voxtral_serve_live_sessions") == 0,
            "rolled_over": bool(rollovers),
            "as_right": last["wer"] <= first["wer"] + WORSE,
            "not_slower": last["lag_ms"]["p50"] <= LONG_SLOWER * first["lag_ms"]["p50"],
            "no_growth": grown <= GROWN_BYTES,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="of the clients (default: 30)")
    parser.add_argument("--audio", type=float, default=LONG_MINUTES, help="minutes of audio of the long session (180)")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    flags = parser.parse_args()
    outcome = {}
    for name, part in (
        ("clients", lambda scratch: clients(flags.minutes, scratch)),
        ("session", lambda scratch: one_session(flags.audio, scratch, (), tcmalloc())),
    ):
        with tempfile.TemporaryDirectory() as scratch:
            outcome[name] = part(Path(scratch))
        results.write_json(flags.out, outcome)
        print(f"{name}: {outcome[name]['verdict']}: {flags.out}")
    for failed in outcome["clients"]["failed"]:
        print(f"{failed['start']:.1f} s, {failed['kind']}: {failed['problem']}")
    if not all(verdict for part in outcome.values() for verdict in part["verdict"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
