"""The committed transcripts of the 500 clips: complete, and as right as the reference model's."""

import json

from places import DATA, ROOT

from bench import metrics, results

RESULTS = ROOT / "bench/results"


def test_all_500_clips() -> None:
    """What `make bench-full` and `make reference` wrote: all clips, none empty, at most 2 % WER, within 0.3 points."""
    served, reference = (
        {row.id: row for row in results.read_rows(RESULTS / name / results.ROWS)}
        for name in ("pico-cpu", "pico-reference")
    )
    lines = [json.loads(line) for line in (DATA / "manifest.jsonl").read_text().splitlines()]
    spoken = {line["path"].split("/")[1].split(".")[0]: line["text"] for line in lines}
    assert {clip: row.reference for clip, row in served.items()} == spoken
    assert served.keys() == reference.keys()
    assert all(row.error is None and row.text and row.text.strip() for row in served.values())
    wer, theirs = (metrics.wer([rows[clip] for clip in sorted(rows)]) for rows in (served, reference))
    assert wer["value"] <= 0.02 and abs(wer["value"] - theirs["value"]) <= 0.003
    assert wer["value"] == json.loads((RESULTS / "pico-cpu" / results.SUMMARY).read_text())["quality"]["wer"]["value"]
    assert theirs == json.loads((RESULTS / "pico-reference/wer.json").read_text())
