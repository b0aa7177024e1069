"""The probes of the patches, on the Python code of a release that is not installed.

Its Python files are put before the installed vLLM, with the dependencies and without the compiled parts of that one. So
this shows what the probes find, and whether our classes can be made from its classes; nothing is served. What needs a
package that is not installed here is told as `not probed`, which is no failure.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.hooks.release import PACKAGE, Files
from tools.hooks.uses import ROOT

PROBE = """
import importlib, re, sys
from voxtral_serve import patches, plugin, shims

finder, failed = shims.active(), False
def settle(name, find):
    try:
        outcome, found = find()
    except Exception as error:
        outcome, found = "drifted", f"{type(error).__name__}: {error}"
    lacking = re.search("ModuleNotFoundError: No module named '(?!vllm)", found)
    outcome = "not probed" if lacking else outcome
    print(f"  {outcome:18}  {name}  {found}", flush=True)
    return outcome == "drifted"
for patch in (*shims.PATCHES, *patches.RECORDS):
    finder.add([patch] if patch in patches.RECORDS else [])
    failed |= settle(patch.name, lambda patch=patch: finder.settled([patch])[patch.name])

def scheduler():
    from vllm.v1.core.sched.scheduler import Scheduler
    from voxtral_serve.engine.live_scheduler import expected
    lacking = expected(Scheduler)
    return ("drifted", ", ".join(lacking)) if lacking else ("as expected", "")
def runner():
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from voxtral_serve.engine.model_runner import with_audio_rows
    return "as expected", with_audio_rows(GPUModelRunner).__name__
def module(name):
    importlib.import_module(f"voxtral_serve.engine.{name}")
    return "imported", ""
failed |= settle("live_scheduler", scheduler)
failed |= settle("model_runner", runner)
for name in ("config", "encode_once", "model_state", "worker", "drafter", "weights"):
    failed |= settle(f"voxtral_serve.engine.{name}", lambda name=name: module(name))
sys.exit(failed)
"""


def run(files: Files, release: str) -> bool:
    """Print one line for each probe. Whether all are as expected."""
    with tempfile.TemporaryDirectory() as folder:
        for name in files:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[name], encoding="utf-8")
        # vLLM takes "cpu" in its version for its platform, without which it finds none here.
        metadata = Path(folder, f"{PACKAGE}-{release}+cpu.dist-info")
        metadata.mkdir()
        text = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {release}+cpu\n"
        (metadata / "METADATA").write_text(text, encoding="utf-8")
        variables = dict(os.environ, PYTHONPATH=f"{folder}:{ROOT}:{ROOT / 'src'}", VLLM_LOGGING_LEVEL="ERROR")
        print(f"probes on the Python code of {release}:", flush=True)
        done = subprocess.run(
            [sys.executable, "-c", PROBE], env=variables, cwd=folder, stderr=subprocess.DEVNULL, check=False
        )
        return done.returncode == 0
