"""The committed results hold what README and methodology say of them."""

import json

from conftest import DATA, ROOT

from bench import metrics, results

RESULTS = ROOT / "bench/results"


def test_all_500_clips() -> None:
    """Served by stock vLLM: at most 2 % WER, none empty; the reference model's within 0.3 points, 8 texts apart."""
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
    same = sum((served[i].text or "").strip() == reference[i].text for i in served)
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
    peaks = [found["0.32.0", name, 1]["peak_vram_bytes"] / 1e9 for name in ("stock-vram", "fast-vram")]
    slower, thirstier = (eager[key] / graphs[key] for key in ("p50_ms", "joules_per_audio_second"))
    quoted = [
        f"P50 {eager['p50_ms']:.0f} ms eager, {graphs['p50_ms']:.0f} ms with piecewise graphs",
        f"{eager['joules_per_audio_second']:.2f} and {graphs['joules_per_audio_second']:.2f} J per second of audio",
        f"eager is {slower:.1f} times slower and takes {thirstier:.1f} times the energy",
        f"eager alone makes P50 {slower:.1f} times longer",
        f"{sent} requests in one run, {failed} failed",
        f"{peaks[0]:.2f} GB with 2 GiB of KV cache; {peaks[1]:.2f} GB is the least",
    ]
    assert [words for words in quoted if words not in table] == []
    assert len({row["run"] for row in together}) == 1
