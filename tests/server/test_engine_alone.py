"""vLLM's engine in one process, on two clips of pico."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow
# What a CPU needs beside the profile
CPU = "enforce_eager=true:kv_cache_memory_bytes=1073741824:gpu_memory_utilization=null:additional_config={}"
ROW = f"fast:max_num_seqs=2:{CPU}"


def test_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "alone.json"
    earlier = {"name": "fast", "vllm": "0.32.0", "concurrency": 64, "rtfx": 1.0}
    out.write_text(json.dumps({"schema_version": 1, "rows": [earlier]}))
    flags = ("--row", ROW, "--clips", "2", "--model", "pico/checkpoint", "--out", str(out))
    done = subprocess.run([sys.executable, "-m", "tools.engine_alone", *flags], cwd=ROOT, check=False)
    kept, row = json.loads(out.read_text())["rows"]
    assert kept == earlier
    assert (row["name"], row["concurrency"], row["clips"]) == (ROW, 2, 2)
    assert row["rtfx"] == pytest.approx(row["audio_s"] / row["wall_s"], rel=1e-3)
    # A trained model may end its text one token before its audio.
    assert row["tokens_expected"] - 2 <= row["tokens"] <= row["tokens_expected"]
    assert done.returncode == int(row["tokens"] != row["tokens_expected"])
