"""The Triton kernels compute attention: in Triton's interpreter, since this machine may have no GPU."""

import os
import re
import subprocess
import sys

from places import ROOT


def test_kernels_are_windowed_attention() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "VOXTRAL_TEST_DEVICE": "cpu"}
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_gpu_kernels.py"]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and int(found[1]) >= 30, done.stdout
