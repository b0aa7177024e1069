"""The measuring stage: for each load, warm up and send the texts; write run.json and requests.jsonl.

Ctrl-C or a kill loses the requests in flight, those not sent, and the round trip. The report is of the others.
"""

import os
import random
import sys
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from bench import BenchError, dataset, environment, loads, results
from bench.client import Client, clean_url
from bench.dataset import Clip, Dataset
from bench.loads import Load
from bench.measure.gpus import MemorySampler
from bench.plan import SpeechPlan
from bench.run import HOPELESS, claim, first_model
from bench.sending import load_meter
from bench.speech import report, roundtrip
from bench.speech.client import SpeechClient
from bench.speech.rows import SpeechRow, Text, joined, row_line

KILLED = {"joules": None, "joules_reason": "this load was killed", "harness_cpu_s": None}


class Selection(NamedTuple):
    """What a run sends: `texts` in the order in which they are sent. `clips` are those with their references."""

    data: Dataset
    clips: list[Clip]
    texts: list[Text]


def measure(plan: SpeechPlan) -> dict[str, Any]:
    """Carry out the plan and write its report; return summary.json. Ctrl-C raises KeyboardInterrupt.

    Raises BenchError for invalid data or settings, another run in `out`, and a server that does not answer.
    """
    if execute(plan):
        raise KeyboardInterrupt
    return report.score(plan.out)


def execute(plan: SpeechPlan) -> bool:
    """Measure all loads and transcribe the speech; return whether Ctrl-C stopped it. Raises BenchError as `measure`."""
    roundtrip.check_key(plan)
    selection = select(plan)
    url = clean_url(plan.url)
    claim(plan.out, resume=False)
    key = os.environ[plan.api_key_env] if plan.api_key_env else None
    client = SpeechClient(url, plan.timeout_s, key, plan.form, plan.stream)
    version = client.get("/version")
    client.model = plan.model or first_model(client)
    client.voice = plan.voice or client.first_voice()
    listener = roundtrip.transcriber(plan)
    record = _record(plan, selection, client, version, listener)
    with _Measurement(plan, selection, client, record) as measurement:
        try:
            for load in plan.loads:
                measurement.run(load)
        except KeyboardInterrupt:
            if not (plan.out / results.ROWS).exists():
                raise  # during the warm-up
            return True
    if listener is not None:
        first = report.rows_of(plan.out, record)[plan.loads[0].name]
        try:
            roundtrip.hear(listener, plan.out, selection.clips, {row.id: row for row in first})
        except KeyboardInterrupt:
            return True
    return False


def select(plan: SpeechPlan) -> Selection:
    """Read the dataset and choose the texts. Raises BenchError."""
    data = dataset.load(plan.dataset)
    clips = dataset.select(data.clips, plan.samples, plan.seed)
    if plan.characters is None:
        return Selection(data, clips, [Text(clip.id, clip.text) for clip in clips])
    return Selection(data, clips, [_long(number, data.clips, plan) for number in range(1, len(clips) + 1)])


def _long(number: int, clips: Sequence[Clip], plan: SpeechPlan) -> Text:
    """The text of this number: references of the whole dataset in a seeded order, to at most --characters."""
    order = random.Random(f"{plan.seed} {number}").sample(clips, len(clips))
    text = joined([clip.text for clip in order], plan.characters or 0)
    if not text:
        raise BenchError(f"--characters {plan.characters}: the first word of clip {order[0].id} is longer")
    return Text(f"text-{number:04}", text)


def _record(
    plan: SpeechPlan, selection: Selection, client: SpeechClient, version: Any, listener: Client | None
) -> dict[str, Any]:
    """The content of run.json before the first load; `version` is the server's response to GET /version."""
    told = version.get("version") if isinstance(version, dict) else None
    heard_by = None
    if listener is not None:
        found = listener.get("/version")
        heard_by = {
            "url": listener.url,
            "model": listener.model,
            "version": found.get("version") if isinstance(found, dict) else None,
        }
    return {
        "schema_version": report.SCHEMA_VERSION,
        "kind": report.KIND,
        "run": {
            "url": client.url,
            "model": client.model,
            "voice": client.voice,
            "format": plan.form,
            "stream": plan.stream,
            "dataset": plan.dataset,
            "manifest_sha256": selection.data.manifest_sha256,
            "language": selection.data.language,
            "characters": plan.characters,
            "loads": [load.name for load in plan.loads],
            "seed": plan.seed,
            "warmup": plan.warmup,
            "timeout_s": plan.timeout_s,
            "random_weights": plan.random_weights,
            "note": plan.note,
            "transcriber": heard_by,
            "ids": [text.id for text in selection.texts],
        },
        "loads": {},
        "environment": environment.describe(told),
        "memory": None,
    }


class _Measurement:
    """Sends the texts. Inside the `with` block, memory is sampled and a progress bar is shown."""

    def __init__(self, plan: SpeechPlan, selection: Selection, client: SpeechClient, record: dict[str, Any]) -> None:
        """`record` is the content of run.json, which is extended."""
        self._plan, self._texts, self._client, self._record = plan, selection.texts, client, record
        self._sampler = MemorySampler(client.url)
        self._bar = tqdm(total=len(self._texts) * len(plan.loads), unit="text", file=sys.stderr)
        self._audio: Path | None = None
        if plan.transcriber is not None:
            self._audio = plan.out / roundtrip.AUDIO
            self._audio.mkdir(exist_ok=True)

    def __enter__(self) -> "_Measurement":
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        memory = self._sampler.stop()
        if (self._plan.out / results.ROWS).exists():
            self._record["memory"] = memory
            results.write_json(self._plan.out / results.RUN, self._record)

    def run(self, load: Load) -> None:
        """Warm up, send the texts, write their rows, and write this load's resources to run.json."""
        self._bar.set_description(load.name)
        pool = loads.pool(load, len(self._texts))
        folder = self._audio if load == self._plan.loads[0] else None
        try:
            self._warm_up(pool, load)
            self._write(load, KILLED)  # stays there if this process is killed
            read = load_meter(self._sampler)
            try:
                self._send(pool, load, folder)
            finally:
                self._write(load, read())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, pool: Executor, load: Load, folder: Path | None) -> None:
        def one(text: Text, _: float | None) -> SpeechRow:
            return self._client.speak(text, load.name, folder)

        with (self._plan.out / results.ROWS).open("a", encoding="ascii") as file:
            for row in loads.send(load, pool, self._texts, one, self._plan.seed):
                file.write(row_line(row))
                file.flush()
                self._bar.update()

    def _warm_up(self, pool: Executor, load: Load) -> None:
        """Send texts that are not measured, through the same threads and therefore the same connections."""
        texts = [self._texts[number % len(self._texts)] for number in range(self._plan.warmup)]
        for row in pool.map(partial(self._client.speak, load=load.name), texts):
            if row.error and row.status in HOPELESS:
                raise self._client.hopeless(f"warm-up with {row.id}: {row.error}")
            if row.error:
                print(f"warm-up with {row.id} failed, the measurement continues: {row.error}", file=sys.stderr)

    def _write(self, load: Load, took: dict[str, Any]) -> None:
        self._record["loads"][load.name] = took
        results.write_json(self._plan.out / results.RUN, self._record)
