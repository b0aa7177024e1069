"""Write the generated tables of README.md and docs/pages, between `<!-- table: NAME -->` and `<!-- end -->`.

    python -m tools.tables            # writes them
    python -m tools.tables --check    # changes nothing; exit status 1 if a page is stale

The figures are those of `python -m bench gpu report`: each table of one file, one GPU, one run. `gpus` also has the
bounds of GPUs that were not measured (bench.gpu.bounds). The tables of patches and of fields are made of the code's
own records.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bench import delays
from bench.gpu import bounds, tested
from bench.gpu.rows import TITLES
from bench.speakers import score
from bench.tables import code
from bench.tables import trusted_table as markdown
from pico import keywords
from voxtral_serve.guard.chat import ChatFields
from voxtral_serve.guard.fields import UploadFields
from voxtral_serve.guard.speech.fields import SpeechFields
from voxtral_serve.guard.timing import STAGES
from voxtral_serve.guard.typed import expected, field_schemas
from voxtral_serve.patches import every

ROOT = Path(__file__).resolve().parent.parent
REPORT = "bench/results/report-h200.json"
STOCK = "bench/results/stock-h200.json"  # a report of 2.0.0, whose profiles/fast.yaml has no drafts
SPEECH = "bench/results/speech-h200.json"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SPEED = ("fast-plain@1", "fast@1", "fast-plain@64", "fast@64", "throughput-plain@256", "throughput@256")
OF_STOCK = ("contest@1", "stock-full@1", "fast@1", "stock-full@64", "fast@64")
LIVE = "realtime@150live"
LIVE_FILES = ("bench/results/live-h200.json", "bench/results/live-h100.json")
PLAIN = {"fast": "fast-plain", "throughput": "throughput-plain", "useless": "throughput-plain"}  # the same, no drafts
HOURS, DOLLARS = 100_000, 3.0  # of an archive; for an hour of a GPU
GB, MIB = 1e9, 2**20


class Reports:
    """The results of a checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, name: str) -> dict[str, Any]:
        """The content of a file. Raises ValueError without it."""
        try:
            content: dict[str, Any] = json.loads((self.root / name).read_bytes())
        except OSError as error:
            told = f"cannot read {self.root / name} ({error.strerror})"
            raise ValueError(f"{told}: make it on a GPU with `python -m bench gpu report --out {name}`") from None
        return content

    def row(self, name: str, file: str = REPORT) -> dict[str, Any]:
        """The row of this name. Raises ValueError if it was not measured, or had a failed request."""
        for row in self.read(file)["rows"]:
            if row["row"] == name and not row["failed"]:
                found: dict[str, Any] = row
                return found
        raise ValueError(f"{file} has no row {name!r} without failures: run its `bench gpu report` again")

    def has(self, name: str) -> bool:
        return any(row["row"] == name for row in self.read(REPORT)["rows"])

    def rows(self, kind: str, file: str = REPORT) -> list[dict[str, Any]]:
        """The rows of a kind, by configuration. Raises ValueError if one of them had a failed request."""
        rows = [row for row in self.read(file)["rows"] if row["kind"] == kind]
        return [self.row(each["row"], file) for each in sorted(rows, key=lambda row: [*TITLES].index(row["server"]))]

    def all(self) -> list[dict[str, Any]]:
        """The content of every file report-NAME.json."""
        return [json.loads(path.read_bytes()) for path in sorted((self.root / REPORT).parent.glob("report-*.json"))]

    def source(self, file: str = REPORT) -> str:
        content = self.read(file)
        gpu = ", ".join(content["machine"]["gpu"] or ["no GPU"])
        when = f"{content['date_utc'][:10]}, commit {content['machine']['git_commit'][:7]}"
        return f"{gpu}, vLLM {content['rows'][0]['vllm']}, random weights of full size, {when} (`{file}`)."


def figure(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def pair(spread: Mapping[str, float] | None) -> str:
    """P50 and P99 in ms."""
    return "-" if spread is None else f"{figure(spread['p50'])} / {figure(spread['p99'])}"


def small(value: float | None) -> str:
    """With more digits for less than 10."""
    return figure(value, 0 if value is None or value >= 100 else 1 if value >= 10 else 2)


Table = Callable[[Reports], str]


SPEEDS = ("configuration", "requests at once", "P50 ms", "RTFx", "J per s of audio")


def of_speed(row: Mapping[str, Any], server: str) -> tuple[str, ...]:
    cells = (figure(row["p50_ms"]), small(row["rtfx"]), small(row["joules_per_audio_second"]))
    return (TITLES[server], str(row["in_flight"]), *cells)


def speed(reports: Reports) -> str:
    lines = [of_speed(row, row["server"]) for row in map(reports.row, SPEED)]
    row = reports.row(LIVE)
    cells = (f"lag {pair(row['lag_ms'])} (P99)", "-", small(row["joules_per_audio_second"]))
    lines.append((f"{TITLES['realtime']}, live", f"{row['sessions']} sessions", *cells))
    return f"{markdown(SPEEDS, lines)}\n\n{reports.source()}"


def stock(reports: Reports) -> str:
    rows = [reports.row(name, STOCK) for name in OF_STOCK]
    lines = [of_speed(row, PLAIN.get(row["server"], row["server"])) for row in rows]
    return f"{markdown(SPEEDS, lines)}\n\n{reports.source(STOCK)} The first row has {rows[0]['clips']} clips."


def general(row: Mapping[str, Any]) -> bool:
    """Whether a row is of a configuration to serve. The others are about drafts alone."""
    return row["server"] not in ("useless", "pico")


def uploads(reports: Reports) -> str:
    lines = []
    for row in filter(general, reports.rows("uploads")):
        cells = (str(row["in_flight"]), str(row["clips"]), figure(row["p50_ms"]), figure(row["p95_ms"]))
        memory = figure(row["peak_vram_bytes"] and row["peak_vram_bytes"] / GB, 1)
        lines.append((TITLES[row["server"]], *cells, small(row["rtfx"]), small(row["joules_per_audio_second"]), memory))
    heads = ("configuration", "in flight", "clips", "P50 ms", "P95 ms", "RTFx", "J per s of audio", "peak GB")
    return f"{markdown(heads, lines)}\n\n{reports.source()}"


def live(reports: Reports, file: str) -> str:
    lines = []
    for row in reports.rows("live", file):
        length = f"{figure(row['least_s'])} to {figure(row['most_s'])} s"
        times = [pair(row[name]) for name in ("lag_ms", "lag_in_audio_ms", "final_ms")]
        beside = f"{row['uploads']} of {figure(row['upload_s'])} s" if row["uploads"] else "-"
        cells = (beside, *times, str(row["fell_behind"]), small(row["joules_per_audio_second"]))
        lines.append((TITLES[row["server"]], str(row["sessions"]), length, *cells))
    heads = ["configuration", "sessions", "length", "uploads beside", "lag ms: P50 / P99", "within the audio"]
    heads += ["final text ms: P50 / P99", "fell behind", "J per s of audio"]
    return f"{markdown(heads, lines)}\n\n{reports.source(file)}"


def all_live(reports: Reports) -> str:  # machines and states of the code are not mixed
    return "\n\n".join(live(reports, file) for file in (REPORT, *LIVE_FILES))


def start(reports: Reports) -> str:
    """Starts and memory by configuration. The rows of a server have its start."""
    rows = [*filter(general, reports.rows("uploads")), *reports.rows("live")]
    lines = []
    for server in dict.fromkeys(row["server"] for row in rows):
        own = [row for row in rows if row["server"] == server]
        starts = {row["start_caches"]: row["start_s"] for row in own}
        memory = max((row.get("peak_vram_bytes") or 0 for row in own), default=0) / GB
        seconds = [figure(starts.get(caches)) for caches in ("warm", "cold")]
        lines.append((TITLES[server], *seconds, figure(memory or None, 1)))
    heads = ("configuration", "start s, caches filled", "start s, caches empty", "peak GB")
    return f"{markdown(heads, lines)}\n\n{reports.source()}"


def drafts(reports: Reports) -> str:
    """Each row with drafts beside that of the same load without, and those of pico, whose drafts are real."""
    lines = []
    for row in reports.rows("uploads"):
        plain = f"{PLAIN.get(row['server'])}@{row['in_flight']}"
        if row["server"].startswith("pico") or reports.has(plain):
            without = reports.row(plain) if reports.has(plain) else {}
            names = ("p50_ms", "rtfx", "joules_per_audio_second")
            cells = [small(each.get(name)) for name in names for each in (without, row)]
            steps = figure(row.get("tokens_per_step"), 2)
            lines.append((TITLES[row["server"]], str(row["in_flight"]), steps, *cells))
    heads = ["configuration", "in flight", "tokens a step", "P50 ms without drafts", "with", "RTFx without", "with"]
    heads += ["J per s of audio without", "with"]
    return f"{markdown(heads, lines)}\n\n{reports.source()}"


def archive(reports: Reports) -> str:
    lines = []
    for row in map(reports.row, ("fast-plain@64", "fast@64", "throughput@256")):
        hours = HOURS / row["rtfx"]
        energy = row["joules_per_audio_second"] and row["joules_per_audio_second"] * HOURS / 1000  # kWh
        cells = (small(row["rtfx"]), figure(hours), figure(hours * DOLLARS), figure(energy))
        lines.append((TITLES[row["server"]], str(row["in_flight"]), *cells))
    dollars = f"$ at {DOLLARS:g} an hour"
    heads = ("configuration", "in flight", "RTFx", f"GPU hours for {HOURS:,} hours", dollars, "kWh of the GPU")
    return f"{markdown(heads, lines)}\n\n{reports.source()}"


def speech(reports: Reports) -> str:
    lines = []
    for row in reports.read(SPEECH)["rows"]:
        mode = {"graphs": "CUDA graphs", "eager": "eager"}[row["mode"]]
        times = (f"{row['first_audio_ms']['p50']:.0f} ms", f"{row['latency_ms']['p50'] / 1000:.1f} s")
        rates = (f"{row['rtf']['p50']:.3f}", figure(row["characters_per_s"], 1), figure(row["audio_s_per_s"], 1))
        joules = figure(row["joules_per_audio_second"], 2)
        lines.append((mode, str(row["concurrency"]), *times, *rates, f"{100 * row['wait_rate']:.0f} %", joules))
    heads = ("configuration", "in flight", "latency to first audio", "latency to the end", "RTF", "characters/s")
    return markdown((*heads, "s of audio per s", "wait rate", "J per s of audio"), lines)


def gpus(reports: Reports) -> str:
    """What fits on each GPU and the bounds of its speed, and what was measured on some."""
    config, accepted = reports.read(REPORT)["configs"]["fast"]["config"], reports.row("fast@1").get("acceptance")
    beside = bounds.beside(config, reports.row("fast@64")["peak_vram_bytes"])
    lines = []
    for name, gpu in bounds.GPUS.items():
        bound = bounds.bounds(gpu, beside, accepted)
        sessions = [figure(number) for number in bound.sessions]
        cells = (figure(bound.step_ms, 1), figure(bound.clip_s, 2), figure(bound.drafted_s, 2), figure(bound.rtfx))
        measured = (content for content in reports.all() if name in content["machine"]["gpu"][0])
        rtfx = max((row.get("rtfx") or 0 for content in measured for row in content["rows"]), default=0)
        lines.append((name, *sessions, *cells, figure(rtfx) if rtfx else "not measured"))
    heads = ["GPU", "live sessions of 90 s, at most", "of 11 minutes and more", "ms a step, at least"]
    heads += [f"s for a clip of {bounds.CLIP_S} s alone, at least", "with drafts"]
    return f"{markdown((*heads, 'RTFx, at most', 'RTFx, measured'), lines)}\n\nMeasured: {reports.source()}"


def patches(_: Reports) -> str:
    """A row for each record. The record also has what it does, who uses it, where upstream stands, its expiry test."""
    lines = []
    for patch in every():
        versions = f"{patch.library} {', '.join(version for version, needed in patch.needed.items() if needed)}"
        lines.append((code(patch.name), code(patch.breaks), versions, patch.until))
    return markdown(("patch", "what breaks without it", "needed on", "goes when"), lines)


def fields(model: type[BaseModel], inherited: bool = True) -> Table:
    """Name, values and meaning of each field of a form; those of the model itself before the inherited ones."""

    def table(_: Reports) -> str:
        own, values = model.__annotations__, field_schemas(model)
        named = sorted(model.model_fields.items(), key=lambda item: item[0] not in own)
        rows = [(field.alias or name, field.description or "") for name, field in named if inherited or name in own]
        cells = [(code(name), expected(values[name]), text) for name, text in rows]
        return markdown(("field", "values", "meaning"), cells)

    return table


PAGES: dict[str, dict[str, Table]] = {
    "README.md": {"speed": speed},
    "docs/pages/performance.md": {"stock": stock, "uploads": uploads, "live": all_live, "start": start},
    "docs/pages/drafts.md": {"drafts": drafts},
    "docs/pages/gpus.md": {"gpus": gpus},
    "docs/pages/batch.md": {"archive": archive},
    "docs/pages/speech-synthesis.md": {"speech": speech},
    "docs/pages/architecture.md": {"gpu_tests": lambda reports: markdown(*tested.table(reports.root))},
    "docs/pages/speakers.md": {"speakers": lambda reports: score.table(reports.read(score.OUT))},
    "docs/pages/checkpoints.md": {"patches": patches},
    "docs/pages/monitoring.md": {
        "stages": lambda _: markdown(("stage", "what happens"), [(code(name), text) for name, text in STAGES.items()])
    },
    "docs/pages/profiles.md": {"delays": lambda reports: delays.table(reports.read(delays.OUT))},
    "docs/pages/speech-api.md": {"upload_fields": fields(UploadFields), "speech_fields": fields(SpeechFields)}
    | {"keywords": lambda reports: keywords.table(reports.read(str(keywords.OUT)))},
    "docs/pages/other-models.md": {"chat_fields": fields(ChatFields, inherited=False)},
}


def updated(text: str, tables: Mapping[str, Table], reports: Reports) -> str:
    """A page with its tables. Raises ValueError unless its marks are those of `tables`, each once."""
    marked = [name for _, name, _ in MARKED.findall(text)]
    if sorted(marked) != sorted(tables):
        raise ValueError(f"marks of the tables {sorted(marked)}: expected `<!-- table: NAME -->` of {sorted(tables)}")
    return MARKED.sub(lambda mark: f"{mark[1]}\n{tables[mark[2]](reports)}\n\n{mark[3]}", text)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.tables", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a page is stale")
    check = parser.parse_args(arguments).check
    status, reports = 0, Reports(root)
    for name, tables in PAGES.items():
        old = (root / name).read_text(encoding="utf-8")
        try:
            new = updated(old, tables, reports)
        except ValueError as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            status = 1
            continue
        if check and new != old:
            print(f"{name} is stale: run `python -m tools.tables`", file=sys.stderr)
            status = 1
        elif new != old:
            (root / name).write_text(new, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
