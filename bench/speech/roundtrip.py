"""What was spoken, transcribed by another server, and the transcripts of the dataset's own clips beside it.

The word error rate of the speech has two parts that cannot be told apart: words that were not spoken well, and words
that the transcriber misheard. The clips are the same texts, so the transcriber's own errors stand beside them.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import BenchError, loads, metrics, results
from bench.answers import Row
from bench.client import Client, clean_url
from bench.dataset import Clip
from bench.plan import SpeechPlan
from bench.run import first_model
from bench.speech.rows import SpeechRow

HEARD, OWN = "transcripts.jsonl", "clip-transcripts.jsonl"  # bench/schema/requests.schema.json
AUDIO = "audio"
NOT_SPOKEN = "not spoken"
IN_FLIGHT = loads.Load("c4", concurrency=4)


def transcriber(plan: SpeechPlan) -> Client | None:
    """The client of --transcribe, null without. Raises BenchError if that server does not answer."""
    if plan.transcriber is None:
        return None
    key = os.environ[plan.transcriber_key_env] if plan.transcriber_key_env else None
    client = Client(clean_url(plan.transcriber, "--transcribe"), plan.timeout_s, key)
    client.model = first_model(client)
    return client


def hear(client: Client, out: Path, clips: Sequence[Clip], spoken: Mapping[str, SpeechRow]) -> None:
    """Transcribe the files in `out`/audio and the clips; write both into `out`.

    `spoken` has the row of each text of the first load. Speech that failed has no transcript, and its row says so.
    """
    files = [
        replace(clip, path=out / AUDIO / f"{clip.id}.wav", duration_s=spoken[clip.id].audio_s or 0.0)
        for clip in clips
        if clip.id in spoken and spoken[clip.id].error is None
    ]
    with tqdm(total=len(files) + len(clips), unit="clip", desc="transcribing", file=sys.stderr) as bar:
        heard = {row.id: row for row in _transcripts(client, files, bar)}
        own = {row.id: row for row in _transcripts(client, clips, bar)}
    rows = [heard.get(clip.id) or _unspoken(clip, spoken.get(clip.id)) for clip in clips]
    for name, found in ((HEARD, rows), (OWN, [own[clip.id] for clip in clips])):
        results.write(out / name, "".join(map(results.row_line, found)))


def figures(out: Path, client: Mapping[str, Any], language: str | None) -> dict[str, Any] | None:
    """`round_trip` of summary.json; null if the transcripts are missing. `client` is that of run.json."""
    if not (out / HEARD).exists():
        return None
    heard, own = (results.read_rows(out / name) for name in (HEARD, OWN))
    return {
        "transcriber": dict(client),
        "failed": sum(row.error is not None for row in (*heard, *own)),
        "speech": metrics.quality(heard, language),
        "clips": metrics.quality(own, language),
    }


def failures(out: Path) -> list[tuple[str, str, int | None, str]]:
    """(file, clip, HTTP status, error) of each transcription that failed. What was not spoken is none."""
    return [
        (name, row.id, row.status, row.error)
        for name in (HEARD, OWN)
        if (out / name).exists()
        for row in results.read_rows(out / name)
        if row.error is not None and not row.error.startswith(NOT_SPOKEN)
    ]


def _transcripts(client: Client, clips: Sequence[Clip], bar: Any) -> list[Row]:
    rows, pool = [], ThreadPoolExecutor(IN_FLIGHT.concurrency)
    try:
        for row in loads.send(IN_FLIGHT, pool, clips, partial(_transcribe, client), seed=0):
            rows.append(row)
            bar.update()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return rows


def _transcribe(client: Client, clip: Clip, due: float | None) -> Row:
    return client.transcribe(clip, 1, IN_FLIGHT.name, due)


def _unspoken(clip: Clip, speech: SpeechRow | None) -> Row:
    why = "the request has no row" if speech is None else speech.error
    return Row(
        id=clip.id,
        duration_s=clip.duration_s,
        part=1,
        start=speech.start if speech else 0.0,
        end=speech.end if speech else 0.0,
        latency_ms=None,
        status=None,
        text=None,
        reference=clip.text,
        error=f"{NOT_SPOKEN}: {why}",
        load=IN_FLIGHT.name,
    )


def check_key(plan: SpeechPlan) -> None:
    """Raises BenchError if a variable that should have a key has none."""
    for flag, name in (("--api-key-env", plan.api_key_env), ("--transcribe-key-env", plan.transcriber_key_env)):
        if name and not os.environ.get(name):
            raise BenchError(f"{flag}: the environment variable {name} is empty or not set")
