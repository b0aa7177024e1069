"""The measuring stage: for each load, warm up and send the texts; write run.json and requests.jsonl.

Ctrl-C or a kill loses the requests in flight, those not sent, and the round trip. The report is of the others.
"""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench import BenchError, dataset, environment, loads, results
from bench.client import Client, clean_url
from bench.dataset import Clip, Dataset
from bench.loads import Load
from bench.measuring import Measurement
from bench.plan import SpeechPlan
from bench.run import claim, first_model
from bench.sending import Meter, load_meter
from bench.speech import report, roundtrip
from bench.speech.client import SpeechClient
from bench.speech.rows import SpeechRow, Text, joined

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
                measurement.run(load, selection.texts)
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


class _Measurement(Measurement):
    """Sends the texts."""

    killed = KILLED

    def __init__(self, plan: SpeechPlan, selection: Selection, client: SpeechClient, record: dict[str, Any]) -> None:
        self._plan, self._speaker = plan, client
        warm_ups = [selection.texts[number % len(selection.texts)] for number in range(plan.warmup)]
        super().__init__(plan.out, client, record, warm_ups, "text", len(selection.texts) * len(plan.loads))
        self._audio: Path | None = None
        if plan.transcriber is not None:
            self._audio = plan.out / roundtrip.AUDIO
            self._audio.mkdir(exist_ok=True)

    def warm(self, load: Load) -> Callable[[Any], Any]:
        return partial(self._speaker.speak, load=load.name)

    def send(self, pool: Executor, load: Load, items: Sequence[Text]) -> tuple[Iterator[SpeechRow], Meter]:
        folder = self._audio if load == self._plan.loads[0] else None

        def one(text: Text, _: float | None) -> SpeechRow:
            return self._speaker.speak(text, load.name, folder)

        read = load_meter(self._sampler)
        return loads.send(load, pool, items, one, self._plan.seed), read
