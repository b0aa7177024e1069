"""`voxtral-serve prove` on real servers of pico, in a process of its own. How fast they are decides nothing here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from places import PICO, ROOT
from servers import EAGER, UNBOUND
from uploads import KEY

SCHEMA = json.loads((ROOT / "src/voxtral_serve/prove/report.schema.json").read_text(encoding="utf-8"))
OTHERS = ("speculative", "stock")  # other servers on the same weights
SERVE = ("check", "start", "sigterm", *OTHERS)  # parts that need --serve


def prove(out: Path, *words: object, **environment: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The command with --quick, and its report, which fits the schema."""
    command = [sys.executable, "-m", "voxtral_serve.cli", "prove", "--quick", "--out", str(out), *map(str, words)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    print(done.stdout)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    jsonschema.validate(report, SCHEMA)
    assert done.returncode == (report["outcome"] == "failed")
    return done, {part["name"]: part for part in report["parts"]}


@pytest.mark.slow
def test_a_server_that_is_up(fast_url: str, tmp_path: Path) -> None:
    manifest = tmp_path / "mine.jsonl"
    manifest.write_text(json.dumps({"path": str(ROOT / "bench/data/clips/024.opus"), "text": "not what it says"}))
    done, parts = prove(tmp_path / "out", "--url", fast_url, "--clips", manifest, OPENAI_API_KEY=KEY)
    assert done.stderr == ""
    assert {name for name, part in parts.items() if part["outcome"] == "skipped"} == {*SERVE, "memory"}
    clips = parts["clips"]["figures"]
    assert clips["bundled"]["wer"] < 0.1
    assert clips["given"]["wer"] > 0.5
    assert parts["clips"]["outcome"] == "failed"
    assert "WER of the given clips" in parts["clips"]["reason"]
    for name in ("delays", "texts", "pauses", "hour", "refusals"):
        assert (parts[name]["outcome"], parts[name]["texts"]) == ("passed", None), parts[name]
    assert {path["path"]: path["errors"] for path in parts["texts"]["figures"]["paths"]} == dict.fromkeys(
        ("streamed", "batched", "live"), 0
    )
    assert parts["pauses"]["figures"]["words_within"] == 0
    assert parts["hour"]["figures"]["rollovers"] > 0
    assert [each["status"] for each in parts["refusals"]["figures"]["requests"]] == [400, 400, 401, 404]
    level = parts["live"]["figures"]["levels"][0]
    assert level["sessions"] == 1
    assert 0 < level["lag_s"]["p50"] < level["lag_s"]["p99"]
    for file in ("report.json", "report.html"):
        text = (tmp_path / "out" / file).read_text(encoding="utf-8")
        for secret in (KEY, fast_url, str(tmp_path), str(ROOT), "Texas"):  # a word of a clip
            assert secret not in text


@pytest.mark.slow
def test_a_server_that_it_starts(tmp_path: Path) -> None:
    flags = (*EAGER, "--api-server-count", "1", "--max-model-len", "512")
    live = ("--additional-config", json.dumps({"max_live_sessions": 2}))
    profile = ROOT / "profiles/fast.yaml"
    _, parts = prove(tmp_path, "--serve", profile, "--model", PICO, "--with-texts", "--", *flags, *live, **UNBOUND)
    for name in ("check", "start", "clips", "delays", "texts", "pauses", "hour", "refusals", "sigterm", *OTHERS):
        assert parts[name]["outcome"] == "passed", parts[name]
    assert parts["speculative"]["figures"]["profile"] == "throughput.yaml, no drafts"
    assert parts["start"]["figures"]["phases"][0]["name"] == "importing vLLM"
    ended = parts["sigterm"]["figures"]
    assert (ended["finished"], ended["exit_status"]) == (ended["running"], 0)
    assert parts["clips"]["texts"][0]["reference"] == parts["clips"]["texts"][0]["text"]


@pytest.mark.slow
def test_random_weights(tmp_path: Path) -> None:
    """They are found, what needs words is skipped, and the rest is measured."""
    from safetensors.torch import load_file, save_file

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name in ("params.json", "tekken.json"):
        (checkpoint / name).write_bytes((PICO / name).read_bytes())
    tensors = load_file(PICO / "consolidated.safetensors")
    noise = {name: tensor.normal_(0, 0.02) for name, tensor in tensors.items()}
    save_file(noise, checkpoint / "consolidated.safetensors")
    flags = (*EAGER, "--api-server-count", "1", "--max-model-len", "512")
    live = ("--additional-config", json.dumps({"max_live_sessions": 2}))
    _, parts = prove(
        tmp_path / "out",
        *("--serve", ROOT / "profiles/fast.yaml", "--model", checkpoint, "--", *flags, *live),
        **UNBOUND,
    )
    for name in ("clips", "texts", "pauses", "speculative", "stock"):
        assert parts[name]["outcome"] == "skipped"
        assert "random weights" in parts[name]["reason"]
    for name in ("check", "start", "delays", "hour", "refusals", "sigterm"):
        assert parts[name]["outcome"] == "passed", parts[name]
    assert parts["hour"]["figures"]["wer"] is None
