"""The Triton kernels compute attention: in Triton's interpreter, since this machine may have no GPU."""

import json
import os
import subprocess
import sys

from places import ROOT

BOUND = 2e-3  # of float16: its products are rounded to 1e-3 of values of about 1


def test_kernels_are_windowed_attention() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    program = [sys.executable, str(ROOT / "tests/support/interpreted_kernels.py")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 23
    assert all(each["error"] < BOUND for each in found), found
