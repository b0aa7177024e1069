"""The committed results hold what the documentation and the methodology say of them."""

import hashlib
import json
from dataclasses import replace

import pytest
from places import DATA, ROOT
from tools.entrypoint_on_gpu import REFUSALS

from bench import metrics, results

RESULTS = ROOT / "bench/results"
PAGES = ROOT / "docs/pages"
FORMER = json.loads((RESULTS / "former-pico.json").read_text())  # texts of pico's former checkpoint


def test_all_500_clips() -> None:
    """Served by stock vLLM: at most 2 % WER, none empty; the reference model's within 0.3 points, 8 texts apart.

    The served ones are of pico's former checkpoint, so the texts are compared with that one's reference.
    """
    served, reference = (
        {row.id: row for row in results.read_rows(RESULTS / name / results.ROWS)}
        for name in ("pico-cpu", "pico-reference")
    )
    references = {}
    for line in (DATA / "manifest.jsonl").read_text().splitlines():
        entry = json.loads(line)
        references[entry["path"].split("/")[1].split(".")[0]] = entry["text"]
    assert {row.id: row.reference for row in served.values()} == references
    assert served.keys() == reference.keys()
    assert all(row.error is None and row.text and row.text.strip() for row in served.values())
    wer = metrics.wer([served[i] for i in sorted(served)])
    assert wer["value"] <= 0.02
    assert wer["value"] == json.loads((RESULTS / "pico-cpu" / results.SUMMARY).read_text())["quality"]["wer"]["value"]
    theirs = metrics.wer([reference[i] for i in sorted(reference)])
    assert theirs == json.loads((RESULTS / "pico-reference/wer.json").read_text())
    assert abs(wer["value"] - theirs["value"]) <= 0.003
    same = sum((served[i].text or "").strip() == (reference[i].text or "").strip() for i in served)
    assert f"{same} of the 500 texts are the same" in (ROOT / "pico/README.md").read_text()
    for value in (wer["value"], theirs["value"]):
        assert f"{value:.2%}".replace("%", " %") in (ROOT / "ROUND1_METHODOLOGY.md").read_text()


def test_what_is_said_of_the_contest_package() -> None:
    """The methodology's table of its claims, from the GPU's rows and pico's texts."""
    text = (ROOT / "ROUND1_METHODOLOGY.md").read_text()
    table = text.partition("| it says | measured here |")[2].partition("\n\n")[0]
    rows = json.loads((RESULTS / "gpu.json").read_text())["rows"]
    found = {(row["vllm"], row["name"], row["concurrency"]): row for row in rows}
    eager, graphs = (found["0.20.0", name, 1] for name in ("stock-eager", "stock-piecewise"))
    together = [eager, graphs, found["0.20.0", "stock-piecewise", 64]]
    sent, failed = (graphs[key] + together[2][key] for key in ("clips", "failed"))
    least = found["0.32.0", "fast-vram", 1]["peak_vram_bytes"]
    share = json.loads((CONTEST / "gpu-shares.json").read_text())["rows"][0]
    slower, thirstier = (eager[key] / graphs[key] for key in ("p50_ms", "joules_per_audio_second"))
    quoted = [
        f"P50 {eager['p50_ms']:.0f} ms eager, {graphs['p50_ms']:.0f} ms with piecewise graphs",
        f"{eager['joules_per_audio_second']:.2f} and {graphs['joules_per_audio_second']:.2f} J per second of audio",
        f"eager is {slower:.1f} times slower and takes {thirstier:.1f} times the energy",
        f"eager alone makes P50 {slower:.1f} times longer",
        f"{sent} requests in one run, {failed} failed",
        f"{share['peak_vram_bytes'] / 1e9:.2f} GB at the same bytes of an H200; {least / 1e9:.2f} GB is the least",
    ]
    assert [words for words in quoted if words not in table] == []
    assert len({row["run"] for row in together}) == 1


CONTEST = RESULTS / "contest"


def _section() -> str:
    text = (ROOT / "ROUND1_METHODOLOGY.md").read_text()
    return text.partition("## The contest package's claims")[2].partition("\n## ")[0]


def test_each_parameter_alone_and_all_at_once_on_a_gpu() -> None:
    lines = []
    names = ("alone", "together", "shares", "four")
    runs = {name: json.loads((CONTEST / f"gpu-{name}.json").read_text())["rows"] for name in names}
    for run, rows in runs.items():
        for row in rows:
            assert (row["failed"], row["vllm"], row["concurrency"]) == (0, "0.20.0", 1)
            changes = row["name"].split(":")[1:]
            change = ", ".join(f"`{one.replace('=', ': ')}`" for one in changes)
            shown = change or "nothing else"
            if "131072" in change:
                shown += ", 60 GiB of KV cache"
            lines.append(
                f"| {run} | {shown} | {row['p50_ms']:.0f} | {row['joules_per_audio_second']:.1f} "
                f"| {row['peak_vram_bytes'] / 1e9:.2f} | {row['start_s']:.0f} |"
            )
    assert [line for line in lines if line not in _section()] == []
    assert sum(_section().count(f"\n| {name} |") for name in names) == len(lines) == 15
    by_name = {row["name"]: row for row in runs["alone"]}
    eager, graphs = by_name["stock-eager"], by_name["stock-eager:enforce_eager=false"]
    slower, thirstier = (eager[key] / graphs[key] for key in ("p50_ms", "joules_per_audio_second"))
    assert f"costs {slower:.1f} times the latency and {thirstier:.1f} times the energy" in _section()
    words = " ".join(_section().split())
    p50s = [row["p50_ms"] for row in runs["shares"]]
    assert f"P50 is {min(p50s):.0f} to {max(p50s):.0f} ms with no order in it" in words
    gpu = json.loads((CONTEST / "gpu-shares.json").read_text())["runs"][0]["gpu_memory_bytes"][0]
    above = [row["peak_vram_bytes"] - float(row["name"].partition("=")[2]) * gpu for row in runs["shares"]]
    assert f"takes {min(above) / 1e9:.1f} to {max(above) / 1e9:.1f} GB more than its share" in words
    tuned, back, defaults = runs["four"]
    times, energy = (tuned[key] / back[key] for key in ("p50_ms", "joules_per_audio_second"))
    assert f"{times:.1f} times faster than the four together, for {energy:.1f} times less energy" in words
    assert f"are {tuned['p50_ms'] / defaults['p50_ms']:.1f} times faster" in words
    assert f"all four set back are {times:.1f} times faster" in words


def test_the_guard_costs_nothing_that_shows_on_a_gpu() -> None:
    rows = json.loads((RESULTS / "gpu-guard.json").read_text())["rows"]
    found = {(row["name"], row["concurrency"]): row for row in rows}
    assert [row["failed"] for row in rows] == [0] * 4
    alone = [found[name, 1]["p50_ms"] for name in ("fast", "fast:middleware=null")]
    many = [found[name, 32]["rtfx"] for name in ("fast", "fast:middleware=null")]
    text = " ".join((PAGES / "performance.md").read_text().split())
    assert f"P50 {alone[0]:.0f} ms with it and {alone[1]:.0f} ms without for one clip at a time" in text
    assert f"{many[0]:.0f} and {many[1]:.0f} RTFx with 32" in text


def test_the_entrypoint_on_a_gpu() -> None:
    entrypoint = json.loads((RESULTS / "gpu-entrypoint.json").read_text())
    rows = {row["name"]: row for row in entrypoint["rows"]}
    assert set(rows) == {*REFUSALS, "SIGTERM", "engine killed"}
    assert all(row["as_expected"] for row in rows.values())
    assert f"ended with status 1 after {rows['engine killed']['seconds']} s" in (PAGES / "container.md").read_text()
    assert entrypoint["environment"]["gpu"] == ["NVIDIA H200"]


def test_the_model_in_transformers() -> None:
    full = json.loads((CONTEST / "transformers-full.json").read_text())
    words = (
        f"P50 {full['p50_ms']:.0f} ms, {full['ms_per_token']:.1f} ms a token, RTFx {full['rtfx']:.2f}, "
        f"{full['joules_per_audio_second']:.1f} J per second of audio, {full['peak_vram_bytes'] / 1e9:.2f} GB"
    )
    assert words in " ".join(_section().split())
    assert f"Transformers {full['environment']['libraries']['transformers']}" in _section()
    assert full["clips"] == 3
    # On pico's former checkpoint it says what vLLM's own model says.
    texts = json.loads((CONTEST / "transformers-pico.json").read_text())["texts"]
    assert {clip: FORMER["served"][clip].strip() for clip in texts} == texts


@pytest.mark.slow
def test_words_lost_on_a_gpu() -> None:
    """With pico's former checkpoint."""
    served = {row.id: row for row in results.read_rows(RESULTS / "pico-cpu" / results.ROWS)}
    for server in json.loads((CONTEST / "pico-h200.json").read_text())["servers"]:
        texts = FORMER["served"] | server["differ"]
        given = json.dumps(dict(sorted(texts.items()))).encode()
        assert hashlib.sha256(given).hexdigest() == server["texts_sha256"]
        errors = metrics.wer([replace(row, text=texts[clip]) for clip, row in served.items()])
        assert f"| {errors['value']:.2%}".replace("%", " %") + f" | {len(server['differ'])} |" in _section()


def test_each_parameter_alone_on_a_cpu() -> None:
    found = json.loads((CONTEST / "cpu.json").read_text())
    assert {run["status"] for run in found["runs"]} == {"finished"}
    assert {run["environment"]["cores"] for run in found["runs"]} == {2}
    assert {run["environment"]["git_commit"] for run in found["runs"]} == {"b29713b5d12036a5218d4adf82127190dfcbf9eb"}
    for row in found["table"]:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in row["latency_ratio"]["values"])
        cells = f"{row['p50_ms']['median']:.1f} | {'' if row['name'] == 'contest' else ratios + ' '}"
        assert f"| {cells}| {row['error_rate']['median']:.2%}".replace("%", " %") + " |" in _section(), row["name"]
        assert row["failed"] == 0


def test_quiet_clips_and_long_files() -> None:
    """Within 0.5 points of the clips as they are, but for files in which voices touch."""
    found = json.loads((RESULTS / "speech-cpu.json").read_text())["results"]
    section = (PAGES / "findings.md").read_text().partition("## Quiet clips and long files")[2]
    for name, each in found.items():
        assert f"| {name} | {each['requests']} | {each['wer']:.2%}".replace("%", " %") + " |" in section
        assert (each["words"], each["empty"]) == (13546, 0)
    usual, quiet, files, _ = (each["wer"] for each in found.values())
    assert max(abs(quiet - usual), abs(files - usual)) <= 0.005


def test_accepted_drafts() -> None:
    """What the log of findings, and the profiles with drafts, say of the present checkpoint."""
    found = json.loads((RESULTS / "drafts-cpu.json").read_text())["results"]
    steps, per_step = found["steps"], f"{found['tokens_per_step']:.2f} tokens"
    positions = [f"{share:.0%}".rstrip("%") for share in found["by_position"]]
    text = " ".join((PAGES / "findings.md").read_text().split())
    assert (
        f"{found['accepted']:,} of {found['drafts']:,} in {steps:,} steps, {per_step} a step; by position "
        f"{', '.join(positions[:-1])} and {positions[-1]} %; WER {100 * found['wer']:.2f} %"
    ) in text
    assert found["tokens_per_step"] == pytest.approx(1 + found["accepted"] / steps) and found["clips"] == 500
    for name in ("fast-spec", "fast-spec-0.20.0", "throughput-spec"):
        assert f"{per_step} per step" in (ROOT / f"profiles/{name}.yaml").read_text()


def test_the_soak_of_three_hours() -> None:
    """What docs/pages/live.md says of it, and that all was as it should be."""
    soak = json.loads((RESULTS / "soak-live-cpu.json").read_text())
    assert (soak["minutes"], soak["pace"]) == (180, 10) and all(soak["verdict"].values())
    text = " ".join((PAGES / "live.md").read_text().split())
    rates = [f"{100 * each['wer']:.2f}" for each in soak["passes"]]
    memory = [f"{each['rss_mean_bytes'] / 1e9:.2f}" for each in soak["passes"]]
    lags = [each["lag_ms"]["p50"] / 1000 for each in soak["passes"]]
    assert f"{soak['rollovers']:.0f} rollovers; word error rates of {', '.join(rates[:-1])} and {rates[-1]} %" in text
    assert f"{', '.join(memory[:-1])} and {memory[-1]} GB of memory" in text
    assert f"the text was {min(lags):.0f} to {max(lags):.0f} s behind" in text


def test_the_soak() -> None:
    """What docs/pages/security.md says of it, and that all was as it should be."""
    soak = json.loads((RESULTS / "soak-cpu.json").read_text())
    assert soak["minutes"] == 30 and all(soak["verdict"].values()) and soak["failed"] == []
    sent, thirds = soak["requests"], soak["thirds"]
    text = " ".join((PAGES / "security.md").read_text().split())
    assert f"{sent['good']:,} good clips, {sent['bad']:,} bad inputs and {sent['gone']:,} given up" in text
    p50 = [f"{each['latency_s']['p50']:.2f}" for each in thirds]
    memory = [f"{each['rss_mean_bytes'] / 1e9:.2f}" for each in thirds]
    assert f"no slower (P50 {p50[0]}, {p50[1]} and {p50[2]} s)" in text
    assert f"memory ({memory[0]}, {memory[1]} and {memory[2]} GB" in text
    lost, silent = (f"{sent[f'live {name}']:,}" for name in ("lost", "silent"))
    assert f"{sent['live']:,} that ended, {lost} that lost their connection and {silent} that fell silent" in text
    final = [f"{each['final_s']['p50']:.1f}" for each in thirds]
    assert f"final text came after {final[0]}, {final[1]} and {final[2]} s" in text
