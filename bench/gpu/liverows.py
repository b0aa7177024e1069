"""The format of bench/results/live.json and of its rows. This module runs nothing.

name, vllm              name of the configuration (stock, live or another one), version of vLLM
sessions, seconds_each  concurrent live sessions, and the seconds of audio that each sent at the pace of speech; with
                        `clips`, the mean of the clips
clips                   clips that were sent, each in a session of its own; null where a session is not one clip
age_s                   seconds of audio that each session had sent before, faster than speech
uploads                 clips in flight during the sessions
lag_ms                  P50 and P99 over all tokens with a known lag (bench/lag.py); null if there are none
lag_in_audio_ms         the same without the tokens that need the end of the audio
final_ms                P50, P95 and P99 of the time from the end of the audio to the final text
fell_behind             sessions with a lag above 500 ms in their last 5 s, or without text for part of their audio
failed, errors          sessions that ended without a text, and error messages
joules_per_audio_second energy of all GPUs of the machine during the sessions / seconds of audio, live and uploaded
upload_rtfx             seconds of audio of the uploads that ended during the sessions / duration of the sessions
host_bytes              resident bytes of the server's processes at the end of the sessions; host_bytes_before: at
                        the beginning. A shared page counts in each process
client_*                CPU seconds of the client per second of a session, and how late it sent its audio
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.answers import Row
from bench.gpu.meanwhile import Samples
from bench.gpu.plan import Trial

KEY = ("name", "vllm", "sessions", "seconds_each", "age_s", "uploads")
SHOWN_ERRORS = 5


def row(
    trial: Trial, load: Mapping[str, Any], sessions: Sequence[Row], uploads: Sequence[Row], samples: Samples
) -> dict[str, Any]:
    """A row without name and version. `load` is from the client's summary.json; `sessions` are its rows at this load.

    `uploads` are all uploads that ended during the trial. Without sessions, `load` has only `begin` and `end`.
    """
    begin = min((each.start for each in sessions), default=load.get("begin"))
    end = max((each.end for each in sessions), default=load.get("end"))
    assert begin is not None and end is not None
    ended = [each for each in uploads if begin <= each.end <= end]
    uploaded_s = sum(each.duration_s for each in ended if each.error is None)
    live_s = sum(each.duration_s for each in sessions if each.error is None)
    joules, host = samples.joules(begin, end), samples.host_bytes(begin, end)
    errors = sorted({each.error[:300] for each in (*sessions, *ended) if each.error is not None})
    mean_s = sum(each.duration_s for each in sessions) / len(sessions) if trial.clips and sessions else trial.seconds
    return {
        "sessions": load.get("sessions") or load.get("concurrency") or 0,
        "seconds_each": round(mean_s, 3),
        "clips": trial.clips,
        "age_s": trial.age_s,
        "uploads": trial.uploads,
        "lag_ms": _some(load.get("lag_ms")),
        "lag_in_audio_ms": _some(load.get("lag_in_audio_ms")),
        "lag_of": load.get("lag_of"),
        "final_ms": _some(load.get("latency_ms"), "p50", "p95", "p99"),
        "fell_behind": load.get("fell_behind"),
        "failed": load.get("failed", 0) + load.get("missing", 0),
        "errors": errors[:SHOWN_ERRORS],
        "joules_per_audio_second": joules / (live_s + uploaded_s) if joules and live_s + uploaded_s else None,
        "upload_rtfx": uploaded_s / (end - begin) if uploaded_s and end > begin else None,
        "uploads_failed": sum(each.error is not None for each in ended),
        "host_bytes": host[1],
        "host_bytes_before": host[0],
        "client_cpu_per_session_s": load.get("harness_cpu_per_session_s"),
        "client_late_sends_ms": load.get("late_sends_ms"),
        "audio_s": round(live_s, 3),
        "wall_s": round(end - begin, 3),
    }


def _some(spread: Mapping[str, Any] | None, *names: str) -> dict[str, float] | None:
    """The percentiles of these names, P50 and P99 if none is given; null if there are none."""
    return {name: spread[name] for name in names or ("p50", "p99")} if spread and spread["p50"] is not None else None


def merge(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Merge several files. Of rows with the same values in KEY, the last one is kept."""
    runs: list[dict[str, Any]] = []
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part in parts:
        rows |= {tuple(each[name] for name in KEY): {**each, "run": each["run"] + len(runs)} for each in part["rows"]}
        runs += part["runs"]
    lacking = {number for number, run in enumerate(runs) if run["not_measured"]}
    used = sorted({each["run"] for each in rows.values()} | lacking)
    kept = [{**each, "run": used.index(each["run"])} for each in rows.values()]
    hashes = {each["config_sha256"] for each in kept}
    configs = {sha: text for part in parts for sha, text in part["configs"].items() if sha in hashes}
    return {"schema_version": 1, "runs": [runs[number] for number in used], "configs": configs, "rows": kept}


def table(outcome: Mapping[str, Any]) -> str:
    """The rows as a text table."""
    titles = ["name", "vllm", "sessions", "seconds", "age s", "uploads", "lag P50", "P99", "final P50", "P99"]
    titles += ["behind", "failed", "J/s", "RTFx", "host GB", "client late P99"]
    body = [titles]
    for each in outcome["rows"]:
        lags = [(each[name] or {}).get(q) for name in ("lag_ms", "final_ms") for q in ("p50", "p99")]
        host = each["host_bytes"] and each["host_bytes"] / 1e9
        late = (each["client_late_sends_ms"] or {}).get("p99")
        rest = [each[name] for name in ("fell_behind", "failed", "joules_per_audio_second", "upload_rtfx")]
        body.append([_cell(value) for value in (*(each[name] for name in KEY), *lags, *rest, host, late)])
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in body)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
