"""The committed transcripts of the 500 clips, served and of the reference model."""

import json

from places import DATA, ROOT

from bench import metrics, results

RESULTS = ROOT / "bench/results"


def test_all_500_clips() -> None:
    """Served by stock vLLM: at most 2 % WER, none empty; the reference model's within 0.3 points, few texts apart."""
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
    assert same >= 490
