"""Compare runs clip by clip: `python -m bench compare A B [C ...]` compares each directory with A, the baseline.

It reads run.json and requests.jsonl. For each load it uses the clips that completed in both runs. Each clip is compared
with itself, so that its length and difficulty cancel out. The intervals are percentile bootstraps over the clips (Efron
and Tibshirani 1993, chapter 13). They do not cover changes of the machine between the runs; `python -m bench matrix`
repeats the runs in turn for this reason.
"""

import itertools
import json
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
from numpy.typing import NDArray

from bench import BenchError, metrics, report, results
from bench.answers import Row
from bench.measure import scoring, spread
from bench.page import one_line
from bench.plan import ComparePlan

FEW_CLIPS = 20
CAVEAT = (
    "The intervals cover the variation over clips, not changes of the machine between the runs. Before you trust a\n"
    "small difference, repeat the runs in turn (`python -m bench matrix`)."
)
SHOWN_IDS = 50
SHOWN_DIFFS = 10
# Keys of `environment` about the machine and its software
MACHINE = ("platform", "cpu", "cores", "gpu", "gpu_driver", "gpu_memory_bytes")
VERSIONS = ("server_version", "python", "libraries", "git_commit")
# Keys of `run` that do not describe the server, are compared separately, or are in the warnings
NO_SETTING = (
    *("ids", "loads", "manifest_sha256", "api", "mode", "dataset", "timeout_s", "seed"),
    *("language", "warmup"),
)
MEASURES = {"latency_ms": "latency", "first_text_ms": "first text"}

Picks = NDArray[np.int64]
Values = NDArray[np.float64]


def main(plan: ComparePlan) -> int:
    """Print how each run differs from the baseline. Returns the exit status, 0.

    Raises BenchError for a run that cannot be read, and for two runs that cannot be compared.
    """
    directories = [plan.baseline, *plan.others]
    if len(directories) > (most := len(string.ascii_uppercase)):
        raise BenchError(f"{len(directories)} directories: at most {most} can be compared at once")
    runs = [read(directory, name) for name, directory in zip(string.ascii_uppercase, directories, strict=False)]
    pairs = [compare(runs[0], run) for run in runs[1:]]
    if plan.json:
        try:
            results.write_json(plan.json, {"schema_version": 1, "pairs": pairs})
        except OSError as error:
            raise BenchError(f"cannot write --json {plan.json} ({error.strerror})") from None
    for run in runs:
        print(f"{run.name}  {run.directory}{'  (baseline)' if run is runs[0] else ''}")
    for pair in pairs:
        print(f"\n{console(pair)}")
    print(f"\n{CAVEAT}")
    return 0


@dataclass(frozen=True)
class Run:
    """A run's directory: `attempts` by load, in the file's order; `name` is its letter in the output."""

    name: str
    directory: Path
    record: dict[str, Any]
    attempts: dict[str, list[Row]]

    def get(self, key: str) -> Any:
        return self.record["run"][key]

    def summary(self) -> dict[str, Any]:
        """Its summary.json; empty if the run was not scored."""
        path = self.directory / results.SUMMARY
        try:
            found: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise BenchError(
                f"cannot read {path} ({error}): `bench report {self.directory}` creates it again"
            ) from None
        return found

    def last(self, load: str) -> dict[str, Row]:
        """The last attempt of each clip."""
        return {row.id: row for row in self.attempts[load]}


def read(directory: Path, name: str) -> Run:
    record, attempts = report.read(directory)
    for row in itertools.chain(*attempts.values()):
        for measure in MEASURES:
            value = getattr(row, measure)
            if value is not None and value <= 0:
                rows = directory / results.ROWS
                raise BenchError(f"{rows}: {measure} of {row.id} is {value!r}, expected more than 0")
    return Run(name, directory, record, attempts)


def compare(a: Run, b: Run) -> dict[str, Any]:
    """The comparison of `b` with `a`, for JSON. Raises BenchError if no clip can be compared."""
    _refuse(a, b)
    shared = [load for load in a.attempts if load in b.attempts]
    loads = [_compare_load(a, b, load) for load in shared]
    if not any(load["clips"] for load in loads):
        found = "; ".join(f"{run.name} has {', '.join(run.attempts)}" for run in (a, b))
        why = "; ".join(f"{load['load']}: {_counts(load['left_out'])}" for load in loads)
        raise BenchError(
            f"{a.directory} and {b.directory} have no clip that completed in both at the same load: {why or found}"
        )
    memories = [run.record.get("memory") or {} for run in (a, b)]
    return {
        "a": {"name": a.name, "directory": str(a.directory)},
        "b": {"name": b.name, "directory": str(b.directory)},
        "warnings": list(_warnings(a, b)),
        "settings": list(_settings(a, b)),
        "loads_of_one": [f"{load} in {run.name}" for run in (a, b) for load in run.attempts if load not in shared],
        "memory": {
            "a": {key: memories[0].get(key) for key in ("peak_bytes", "source")},
            "b": {key: memories[1].get(key) for key in ("peak_bytes", "source")},
        },
        "bootstrap": {"resamples": spread.RESAMPLES, "seed": spread.SEED},
        "loads": loads,
    }


def _refuse(a: Run, b: Run) -> None:
    for key in ("manifest_sha256", "api", "mode"):
        values = [run.get(key) for run in (a, b)]
        if values[0] != values[1]:
            raise BenchError(
                f"cannot compare {a.directory} with {b.directory}: {key} is {values[0]!r} in the first, "
                f"{values[1]!r} in the second. Compare runs with the same dataset, --api and mode."
            )
    if not set(a.get("ids")) & set(b.get("ids")):
        raise BenchError(
            f"cannot compare {a.directory} with {b.directory}: they have no clip in common. "
            f"Measure both with the same --samples and --seed."
        )


def _differences(values: Sequence[dict[str, Any]], names: str, prefix: str = "") -> Iterator[str]:
    """Every entry in which two objects differ, with dotted names for nested objects; a missing entry is null."""
    for key in dict.fromkeys(itertools.chain(*values)):
        found = [each.get(key) for each in values]
        if all(isinstance(each, dict) for each in found):
            yield from _differences(found, names, f"{prefix}{key}.")  # type: ignore[arg-type]
        elif found[0] != found[1]:
            shown = ", ".join(f"{json.dumps(each)} in {name}" for each, name in zip(found, names, strict=True))
            yield f"{prefix}{key}: {shown}"


def _warnings(a: Run, b: Run) -> Iterator[str]:
    """Differences between the runs other than their configurations."""
    names = a.name + b.name
    environments = [run.record["environment"] for run in (a, b)]
    for kind, keys in (("different machines", MACHINE), ("different versions", VERSIONS)):
        # A key that one run lacks was not recorded there, so it is not a difference.
        known = [key for key in keys if all(key in each for each in environments)]
        values = [{key: each[key] for key in known} for each in environments]
        yield from (f"{kind}: {difference}" for difference in _differences(values, names))
    servers = [run.record["environment"].get("server") or {} for run in (a, b)]
    if all(server.get("versions") for server in servers):
        versions = [server["versions"] for server in servers]
        yield from (f"different versions: server.{each}" for each in _differences(versions, names))
    for key in ("language", "warmup"):
        values = [{key: run.get(key)} for run in (a, b)]
        yield from (f"different measurement: {difference}" for difference in _differences(values, names))
    normalizers = [{"normalizer": _normalizer(run.summary())} for run in (a, b)]
    if all(each["normalizer"] for each in normalizers):
        again = "the WERs below are scored again with one normaliser"
        yield from (f"different normalisers: {each} ({again})" for each in _differences(normalizers, names))
    sources = [{"memory.source": (run.record.get("memory") or {}).get("source")} for run in (a, b)]
    if all(each["memory.source"] for each in sources):
        yield from (f"peak memory from different sources: {each}" for each in _differences(sources, names))


def _settings(a: Run, b: Run) -> Iterator[str]:
    """Different settings: usually the subject of the comparison."""
    servers = [run.record["environment"].get("server") or {} for run in (a, b)]
    known = all(server.get("config") for server in servers)
    hidden = (*NO_SETTING, "config_sha256") if known else NO_SETTING
    runs = [{key: value for key, value in run.record["run"].items() if key not in hidden} for run in (a, b)]
    yield from _differences(runs, a.name + b.name)
    for key in ("config", "patches"):
        if all(server.get(key) is not None for server in servers):
            values = [{key: server[key]} for server in servers]
            yield from _differences(values, a.name + b.name, "server.")


def _normalizer(summary: dict[str, Any]) -> str | None:
    name: str | None = (summary.get("quality") or {}).get("normalizer")
    return name


def _compare_load(a: Run, b: Run, load: str) -> dict[str, Any]:
    of_a, of_b = a.last(load), b.last(load)
    chosen = [set(run.get("ids")) for run in (a, b)]
    left_out: Counter[str] = Counter()
    pairs: list[tuple[Row, Row]] = []
    for clip in dict.fromkeys((*a.get("ids"), *b.get("ids"))):
        states = _state(of_a.get(clip), clip in chosen[0]), _state(of_b.get(clip), clip in chosen[1])
        troubles = {run.name: state for run, state in zip((a, b), states, strict=True) if state}
        if not troubles:
            pairs.append((of_a[clip], of_b[clip]))
        elif len(set(troubles.values())) == 1:
            left_out[f"{next(iter(troubles.values()))} in {' and '.join(troubles)}"] += 1
        else:
            left_out[", ".join(f"{state} in {name}" for name, state in troubles.items())] += 1
    found: dict[str, Any] = {"load": load, "clips": len(pairs), "left_out": dict(left_out)}
    if not pairs:
        return found
    before, after = ([pair[side] for pair in pairs] for side in (0, 1))
    found |= {
        **{
            measure: _paired([getattr(row, measure) for row in before], [getattr(row, measure) for row in after])
            for measure in MEASURES
        },
        "rtfx": {"a": _rtfx(a, load), "b": _rtfx(b, load)},
        "joules_per_audio_second": {"a": _joules(a, load), "b": _joules(b, load)},
        "wer": _wer(before, after, a.get("language")),
        "changed": _changed(before, after, a.get("language")),
    }
    return found


def _state(row: Row | None, chosen: bool) -> str | None:
    """The reason why a run has no transcript of a clip; null if it has one."""
    if not chosen:
        return "not chosen"
    if row is None:
        return "without an answer"
    return None if row.error is None else "failed"


def _rtfx(run: Run, load: str) -> float | None:
    """RTFx of the whole run, because the wall clock covers all its requests, compared or not."""
    return metrics.rtfx([*run.last(load).values()], metrics.wall_seconds(run.attempts[load]))


def _joules(run: Run, load: str) -> float | None:
    """Joules per audio second of the whole run, over its completed clips."""
    joules: float | None = run.record["loads"].get(load, {}).get("joules")
    audio_s = sum(row.duration_s for row in run.last(load).values() if row.error is None)
    return joules / audio_s if joules is not None and audio_s else None


def _intervals(count: int, statistics: dict[str, Callable[[Picks], Values]]) -> dict[str, list[float] | None]:
    """95 % percentile bootstrap intervals over `count` clips, null for a single one.

    Each statistic takes picks of shape (resamples, clips) and returns one value per resample. All see the same picks.
    """
    if count < 2:
        return dict.fromkeys(statistics)
    values: dict[str, list[Values]] = {name: [] for name in statistics}
    for picks in spread.resamples(count):
        for name, statistic in statistics.items():
            values[name].append(statistic(picks))
    joined = {name: np.concatenate(each) for name, each in values.items()}
    finite = {name: each[np.isfinite(each)] for name, each in joined.items()}
    return {name: spread.interval(each) for name, each in finite.items()}


def _paired(before: Sequence[float | None], after: Sequence[float | None]) -> dict[str, Any] | None:
    """Differences in ms and ratios of one measure, over the clips for which both runs have it; null without any."""
    both = [(x, y) for x, y in zip(before, after, strict=True) if x is not None and y is not None]
    if not both:
        return None
    first, second = np.array(both, dtype=float).T
    difference, ratio, logarithm = second - first, second / first, np.log(second / first)
    statistics: dict[str, Callable[[Picks], Values]] = {
        "difference_median": lambda picks: np.median(difference[picks], axis=1),
        "difference_mean": lambda picks: difference[picks].mean(axis=1),
        "ratio_median": lambda picks: np.median(ratio[picks], axis=1),
        "ratio_geometric_mean": lambda picks: np.exp(logarithm[picks].mean(axis=1)),
    }
    everything = np.arange(len(both))[None]
    intervals = _intervals(len(both), statistics)
    numbers = {
        name: {"value": float(statistic(everything)[0]), "ci95": intervals[name]}
        for name, statistic in statistics.items()
    }
    verdict = _side(intervals["ratio_geometric_mean"], 1, ("faster", "slower"))
    sides = {
        name: {"median": float(np.median(values)), "mean": float(values.mean())}
        for name, values in (("a", first), ("b", second))
    }
    return {"clips": len(both), **sides, **numbers, "verdict": verdict}


def _wer(before: Sequence[Row], after: Sequence[Row], language: str | None) -> dict[str, Any]:
    scores = [[scoring.word_errors(row.reference, row.text, language) for row in rows] for rows in (before, after)]
    first, second = (np.array([score.total for score in side]) for side in scores)
    words = np.array([score.words for score in scores[0]])

    def difference(picks: Picks) -> Values:
        with np.errstate(invalid="ignore", divide="ignore"):  # a resample without words has no rate
            rates: Values = (second - first)[picks].sum(axis=1) / words[picks].sum(axis=1)
        return rates

    interval = _intervals(len(before), {"difference": difference})["difference"]
    total = int(words.sum())
    return {
        # In a language without spaces, every letter counts as a word.
        "name": "WER" if scoring.has_spaces(language) else "CER",
        "a": float(first.sum() / total) if total else None,
        "b": float(second.sum() / total) if total else None,
        "words": total,
        "difference": {"value": float((second - first).sum() / total) if total else None, "ci95": interval},
        "verdict": _side(interval, 0, ("lower", "higher")),
    }


def _side(interval: list[float] | None, even: float, names: tuple[str, str]) -> str | None:
    """The side of `even` on which the whole interval lies; null without an interval."""
    if interval is None:
        return None
    low, high = interval
    return names[0] if high < even else names[1] if low > even else "no difference seen"


def _changed(before: Sequence[Row], after: Sequence[Row], language: str | None) -> dict[str, Any]:
    """The texts that differ in any character, and the first of them word by word.

    Whitespace around a text is ignored: vLLM's own server adds a space at the beginning.
    """

    def said(row: Row) -> str | None:
        return row.text and row.text.strip()

    changed = [(x, y) for x, y in zip(before, after, strict=True) if said(x) != said(y)]
    # Texts that are equal after normalisation.
    form = sum(scoring.word_errors(x.text or "", y.text, language).total == 0 for x, y in changed)
    shown = [
        {
            "id": x.id,
            "errors": [scoring.word_errors(row.reference, row.text, language).total for row in (x, y)],
            "diff": word_diff(x.text or "", y.text or ""),
        }
        for x, y in changed[:SHOWN_DIFFS]
    ]
    return {"count": len(changed), "only_form": form, "ids": [x.id for x, _ in changed], "first": shown}


def word_diff(before: str, after: str) -> str:
    """Both texts in one line as `wdiff` writes them: [-words of the first-] {+words of the second+}."""
    result = jiwer.process_words(before, after)
    old, new = result.references[0], result.hypotheses[0]
    pieces: list[str] = []
    for chunk in result.alignments[0]:
        words = " ".join(old[chunk.ref_start_idx : chunk.ref_end_idx])
        others = " ".join(new[chunk.hyp_start_idx : chunk.hyp_end_idx])
        if chunk.type == "equal":
            pieces.append(words)
        else:
            pieces += [f"[-{words}-]"] * bool(words) + [f"{{+{others}+}}"] * bool(others)
    return " ".join(pieces) if old != new else f"{' '.join(old)} (same words, different whitespace)"


# ---- For the terminal


def console(pair: dict[str, Any]) -> str:
    a, b = pair["a"]["name"], pair["b"]["name"]
    lines = [f"==== {b} against {a}"]
    lines += [f"warning: {one_line(warning)}" for warning in pair["warnings"]]
    lines += [f"differs: {one_line(setting)}" for setting in pair["settings"]]
    if pair["loads_of_one"]:
        lines.append(f"not compared, because only one run has this load: {', '.join(pair['loads_of_one'])}")
    peaks = [pair["memory"][side] for side in "ab"]
    shown = [
        f"{name} {_number(peak['peak_bytes'], '{:.2f} GiB', 2**30)}{_source(peak)}"
        for name, peak in zip((a, b), peaks, strict=True)
    ]
    lines.append(f"peak memory: {', '.join(shown)}; one value per run, no interval")
    for load in pair["loads"]:
        lines += ["", *_load_lines(load, a, b)]
    return "\n".join(lines)


def _source(peak: dict[str, Any]) -> str:
    return f" ({peak['source']})" if peak["source"] else ""


def _load_lines(load: dict[str, Any], a: str, b: str) -> Iterator[str]:
    left_out = sum(load["left_out"].values())
    yield f"-- load {load['load']}: {load['clips']} clips completed in both, {left_out} left out" + (
        f" ({_counts(load['left_out'])})" if left_out else ""
    )
    if not load["clips"]:
        return
    if load["clips"] < FEW_CLIPS:
        yield f"warning: bootstrap intervals of fewer than {FEW_CLIPS} clips tend to be too narrow"
    table: list[tuple[str, ...]] = [("", a, b, f"{b} against {a}, with 95 % intervals over the clips")]
    verdicts = []
    for measure, title in MEASURES.items():
        if numbers := load[measure]:
            for name in ("median", "mean"):
                change = _with_interval(numbers[f"difference_{name}"], "{:+.1f}")
                sides = [f"{numbers[side][name]:.1f} ms" for side in "ab"]
                table.append((f"{title}, {name}", *sides, f"{name} of the differences {change} ms"))
            ratio = _with_interval(numbers["ratio_median"], "{:.3f}")
            table.append((f"{title}, ratio", "", "", f"median {ratio}"))
            ratio = _with_interval(numbers["ratio_geometric_mean"], "{:.3f}")
            table.append(("", "", "", f"geometric mean {ratio}"))
            of = f"{ratio} times {a}'s {title}"
            verdicts.append(
                {
                    None: f"no verdict on {title}: one clip gives no interval",
                    "no difference seen": f"no difference seen in {title}: {b} has {of}",
                }.get(numbers["verdict"], f"{b} is {numbers['verdict']}: {of}")
            )
    for key, title in (("rtfx", "RTFx"), ("joules_per_audio_second", "J per audio s")):
        sides = [_number(load[key][side], "{:.2f}") for side in "ab"]
        both = all(load[key][side] is not None for side in "ab")
        table.append((title, *sides, "one value per run: no interval" if both else ""))
    wer = load["wer"]
    sides = [_number(wer[side], "{:.2%}") for side in "ab"]
    points = _with_interval(wer["difference"], "{:+.2f}", 0.01)
    name = wer["name"]
    table.append((name, *sides, f"{points} points, {wer['words']} words" if wer["words"] else ""))
    against = f"{sides[1]} against {sides[0]}, {points} points"
    verdicts.append(
        {
            None: f"no verdict on {name}: no interval",
            "no difference seen": f"no difference seen in {name}: {against}",
        }.get(wer["verdict"], f"{b} has the {wer['verdict']} {name}: {against}")
    )
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for title, *sides, change in table:
        yield f"{title:<{widths[0]}}  {sides[0]:>{widths[1]}}  {sides[1]:>{widths[2]}}  {change}".rstrip()
    yield from _changed_lines(load["changed"], a, b)
    yield from verdicts


def _changed_lines(changed: dict[str, Any], a: str, b: str) -> Iterator[str]:
    if not changed["count"]:
        yield "transcripts: none changed"
        return
    ids = ", ".join(map(one_line, changed["ids"][:SHOWN_IDS]))
    if more := changed["ids"][SHOWN_IDS:]:
        ids += f" and {len(more)} more (--json has all)"
    yield f"transcripts: {changed['count']} changed, {changed['only_form']} only in case or punctuation: {ids}"
    for each in changed["first"]:
        yield f"  {one_line(each['id'])}: word errors {a} {each['errors'][0]}, {b} {each['errors'][1]}"
        yield f"    {one_line(each['diff'])}"


def _counts(left_out: dict[str, int]) -> str:
    return "; ".join(f"{count} {why}" for why, count in left_out.items())


def _with_interval(number: dict[str, Any], pattern: str, unit: float = 1) -> str:
    value = _number(number["value"], pattern, unit)
    if number["ci95"] is None:
        return value
    return f"{value} ({' to '.join(_number(bound, pattern, unit) for bound in number['ci95'])})"


def _number(value: float | None, pattern: str, unit: float = 1) -> str:
    return "not measured" if value is None else pattern.format(value / unit)
