"""Interpreters that have this environment's libraries and nothing of ours, and `vllm serve` in them."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import starts
from places import CONFIG, ROOT

from bench.measure import engine

SOURCE = ROOT / "sitecustomize.py"
START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 20
# Our source by its path, without the chain to what it shadows: a test's own sitecustomize then changes what it holds.
LOADED = f"""
import importlib.util
import sys

spec = importlib.util.spec_from_file_location("shims_of_the_test", {str(SOURCE)!r})
shims = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shims)
finder = shims.active()
patches = {{patch.name: patch for patch in shims.PATCHES}}
"""
# A finder behind ours: the real modules, each with some of its text replaced.
EDITED = """
from importlib.machinery import PathFinder, SourceFileLoader


class Edited(SourceFileLoader):
    def get_code(self, fullname):
        source = self.get_source(fullname)
        for old, new in EDITS[fullname].items():
            if old not in source:
                raise LookupError(f"the test finds no {old!r} in {fullname}")
            source = source.replace(old, new)
        return compile(source, self.path, "exec")


class Editor:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name in EDITS else None
        if spec is not None:
            spec.loader = Edited(name, spec.origin)
        return spec


sys.meta_path.insert(sys.meta_path.index(finder) + 1, Editor())
"""
# Has this process' vLLM load its plugins, as each of its own processes does, and prints what became of the patches.
VERIFY = """
import json, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
print(json.dumps(next(f for f in sys.meta_path if type(f).__name__ == "PostImport").outcomes))
"""


def interpreter(directory: Path, libraries: bool = True) -> Path:
    """A Python with a prefix of its own and no sitecustomize; returns its binary, beside which is a `vllm` command.

    `libraries` come by a .pth file that names this environment's site-packages. In a folder named so Python reads no
    .pth files, hence neither ours nor that of an editable install. A venv would not do: it shares the standard library
    with its base, and that may hold a distribution's sitecustomize.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    own = directory / stdlib.relative_to(sys.base_prefix)
    own.mkdir(parents=True)
    for each in stdlib.iterdir():
        if each.name not in ("site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py"):
            (own / each.name).symlink_to(each)
    (directory / "bin").mkdir()
    # Python looks for its prefix from where its binary really lies, so a link would lead it back.
    python = Path(shutil.copy(os.path.realpath(sys.executable), directory / "bin/python3"))
    site_packages(python).mkdir(parents=True, exist_ok=True)
    if libraries:
        (site_packages(python) / "libraries.pth").write_text(sysconfig.get_path("purelib"))
        command = directory / "bin/vllm"
        command.write_text(
            f"#!{python}\nfrom vllm.entrypoints.cli.main import main\n\nif __name__ == '__main__':\n    main()\n"
        )
        command.chmod(0o755)
    return python


def site_packages(python: Path) -> Path:
    return Path(run(python, "-c", "import site; print(site.getsitepackages()[0])").stdout.strip())


def standard_library(python: Path) -> Path:
    return Path(run(python, "-c", "import os; print(os.path.dirname(os.__file__))").stdout.strip())


def environment(**variables: str) -> dict[str, str]:
    """Ours without what would steer Python or choose plugins, and with what vLLM needs on a CPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_PLUGINS"))}
    fixed = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}
    return kept | fixed | variables


def run(
    python: Path | str, *arguments: str, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *arguments],
        env=environment(**variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )


def sitecustomize(directory: Path, *parts: str) -> Path:
    """Write a sitecustomize.py of these parts into `directory`, for PYTHONPATH."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text("\n".join(parts))
    return directory


def edited(edits: dict[str, dict[str, str]]) -> str:
    """The part of a sitecustomize that replaces texts, old -> new, in each named module as it is imported."""
    return f"EDITS = {edits!r}\n{EDITED}"


@dataclass(frozen=True)
class End:
    """How a `vllm serve` ended. `opened`: its port took a connection, after which it was stopped."""

    status: int
    opened: bool
    log: str


@contextlib.contextmanager
def started(
    python: Path, directory: Path, port: int, log: Path, config: Path = CONFIG, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """`vllm serve --config CONFIG` in `directory`; on the way out no process of it is left."""
    starts.record(config, directory)
    command = [python.with_name("vllm"), "serve", "--config", config, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def takes_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def serve_until_end(python: Path, directory: Path, config: Path = CONFIG, **variables: str) -> End:
    """Run `vllm serve` where it is not to come up, watching its port all the while."""
    port, opened = engine.free_port(), False
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        with started(python, directory, port, log, config, **variables) as process:
            deadline = time.monotonic() + START_TIMEOUT_S
            while process.poll() is None and not opened:
                opened = takes_connections(port)
                assert time.monotonic() < deadline, log.read_text(errors="replace")[-5000:]
                time.sleep(0.05)
        return End(process.returncode, opened, log.read_text(errors="replace"))
