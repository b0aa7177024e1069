"""Set up .venv from the locked requirements: a CPU vLLM, the benchmark, this package. Standard library only.

python3.11 tools/setup_venv.py            # what `make demo` needs
python3.11 tools/setup_venv.py --dev      # and what `make test` needs on top
"""

import argparse
import platform
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
REQUIREMENTS = ROOT / "requirements"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def check_machine() -> None:
    """The lock holds wheels of one kind; say so before pip fails with something less clear."""
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] != (3, 11) or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.exit(
            f"error: found {found} ({sys.executable}); the locked CPU environment is for Python 3.11 on "
            "Linux x86_64. Name one with `make PYTHON=/path/to/python3.11`, or serve on a GPU: see README.md."
        )
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        sys.exit(
            f"error: {sys.executable} has no ensurepip, so it cannot make a .venv; Debian and Ubuntu "
            "ship it as python3-venv"
        )


def pip(label: str, packages: int, *arguments: str) -> bool:
    """Run pip install with a bar over `packages`. Returns whether it succeeded; prints pip's last lines if not."""
    command = [
        str(VENV / "bin/python"),
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-compile",
        "--disable-pip-version-check",
        *arguments,
    ]

    def show(doing: str, share: float, last: bool = False) -> None:
        if last or sys.stderr.isatty():
            bar = "#" * int(24 * share)
            print(f"\r{label:<24} [{bar:.<24}] {doing:<24}", end="\n" if last else "", file=sys.stderr, flush=True)

    lines: deque[str] = deque(maxlen=15)
    seen, start = 0, time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            seen += line.startswith(("Collecting ", "Processing ", "Obtaining "))
            doing = "installing" if line.startswith("Installing collected") else "fetching"
            show(f"{min(seen, packages)}/{packages} {doing}", min(seen, packages) / packages)
    failed = process.returncode != 0
    outcome = f"{'FAILED' if failed else 'done'} after {time.monotonic() - start:.0f} s"
    show(outcome, min(seen, packages) / packages, last=True)
    if failed:
        print("".join(lines), file=sys.stderr)
    return not failed


def install(label: str, lock: Path, *arguments: str) -> bool:
    count = sum("==" in line and not line.startswith("#") for line in lock.read_text().splitlines())
    return pip(label, count, "--require-hashes", "-r", str(lock), *arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dev", action="store_true", help="also what the tests and checks need")
    dev = parser.parse_args().dev
    check_machine()
    if not (VENV / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
        torch = REQUIREMENTS / "torch-cpu.txt"
        if not install("PyTorch", torch):
            print(f"No PyTorch for CPUs where pip looks; trying {TORCH_INDEX}", file=sys.stderr)
            if not install("PyTorch", torch, "--index-url", TORCH_INDEX):
                sys.exit("error: no torch==2.13.0+cpu to be had: see above")
        if not install("vLLM and the benchmark", REQUIREMENTS / "cpu.txt"):
            sys.exit("error: requirements/cpu.txt could not be installed: see above")
        alias = str(REQUIREMENTS / "vllm-alias")
        if not pip("voxtral-serve", 2, "--no-build-isolation", alias, "--editable", str(ROOT)):
            sys.exit("error: the local packages could not be installed: see above")
        (VENV / "ready").touch()
    if dev and not (VENV / "ready-dev").exists():
        if not install("test tools", REQUIREMENTS / "dev.txt"):
            sys.exit("error: requirements/dev.txt could not be installed: see above")
        (VENV / "ready-dev").touch()


if __name__ == "__main__":
    main()
