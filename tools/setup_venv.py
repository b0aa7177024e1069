"""Set up .venv from the locked requirements: a CPU vLLM, the benchmark, this package. Standard library only.

python3.11 tools/setup_venv.py            # what `make demo` needs
python3.11 tools/setup_venv.py --dev      # and what `make test` needs on top
python3.11 tools/setup_venv.py --clients  # .venv-clients: published clients of live speech, for `make test-clients`
python3.11 tools/setup_venv.py --release  # .venv-release: what builds and checks a release, for `make release`
python3.11 tools/setup_venv.py --omni     # .venv-omni: vLLM-Omni on top of .venv, for `make test-speech`
python3.12 tools/setup_venv.py --recipes  # .venv-recipes: proxies between clients and a server, for `make test-clients`
python3.12 tools/setup_venv.py --pinned   # .venv-pinned: the contest's vLLM, for `make test-pinned`
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
PINNED = ROOT / ".venv-pinned"
CLIENTS = ROOT / ".venv-clients"
RECIPES = ROOT / ".venv-recipes"
RELEASE = ROOT / ".venv-release"
OMNI = ROOT / ".venv-omni"
REQUIREMENTS = ROOT / "requirements"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def check_machine(python: str, remedy: str) -> None:
    """The lock holds wheels of one kind; say so before pip fails with something less clear."""
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if (version, platform.system(), platform.machine()) != (python, "Linux", "x86_64"):
        sys.exit(
            f"error: found {found} ({sys.executable}); the locked environment is for Python {python} on "
            f"Linux x86_64. {remedy}"
        )
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        sys.exit(
            f"error: {sys.executable} has no ensurepip, so it cannot make a virtual environment; Debian and Ubuntu "
            "ship it as python3-venv"
        )


def pip(venv: Path, label: str, packages: int, *arguments: str) -> bool:
    """Install into `venv` with a bar over `packages`. Returns whether it succeeded; if not, prints pip's last lines."""
    options = ("--no-deps", "--no-compile", "--disable-pip-version-check")
    command = [str(venv / "bin/python"), "-m", "pip", "install", *options, *arguments]

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
            seen += line.startswith(("Collecting ", "Processing ", "Obtaining ", "Requirement already satisfied: "))
            doing = "installing" if line.startswith("Installing collected") else "fetching"
            show(f"{min(seen, packages)}/{packages} {doing}", min(seen, packages) / packages)
    failed = process.returncode != 0
    outcome = f"{'FAILED' if failed else 'done'} after {time.monotonic() - start:.0f} s"
    show(outcome, min(seen, packages) / packages, last=True)
    if failed:
        print("".join(lines), file=sys.stderr)
    return not failed


def install(venv: Path, label: str, lock: Path, *arguments: str) -> bool:
    count = sum("==" in line and not line.startswith("#") for line in lock.read_text().splitlines())
    return pip(venv, label, count, "--require-hashes", "-r", str(lock), *arguments)


def install_or_exit(venv: Path, label: str, lock: Path) -> None:
    if not install(venv, label, lock):
        sys.exit(f"error: requirements/{lock.name} could not be installed: see above")


def install_torch(venv: Path) -> None:
    torch = REQUIREMENTS / "torch-cpu.txt"
    if not install(venv, "PyTorch", torch):
        print(f"No PyTorch for CPUs where pip looks; trying {TORCH_INDEX}", file=sys.stderr)
        if not install(venv, "PyTorch", torch, "--index-url", TORCH_INDEX):
            sys.exit("error: no torch==2.13.0+cpu to be had: see above")


def install_local(venv: Path, alias: str) -> None:
    packages = (str(REQUIREMENTS / alias), "--editable", str(ROOT))
    if not pip(venv, "voxtral-serve", 2, "--no-build-isolation", *packages):
        sys.exit("error: the local packages could not be installed: see above")


def stack(venv: Path, below: Path) -> None:
    """Put the packages of `below` behind those of `venv`, and after them what vLLM-Omni needs on a CPU.

    A .pth file does it: vLLM and PyTorch take 2 GB and are not installed twice.
    """
    packages = Path("lib/python3.11/site-packages")
    (venv / packages).mkdir(parents=True, exist_ok=True)
    lines = (f"import site; site.addsitedir({str(below / packages)!r})", str(ROOT / "tests/support/omni_cpu"))
    (venv / packages / "voxtral_omni.pth").write_text("\n".join(lines) + "\n")


def create(venv: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)


def install_tools(venv: Path, label: str, lock: Path) -> None:
    """An environment of its own that has what `lock` names, and neither vLLM nor this package."""
    if not (venv / "ready").exists():
        create(venv)
        install_or_exit(venv, label, lock)
        (venv / "ready").touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--dev", action="store_true", help="also what the tests and checks need")
    which.add_argument("--clients", action="store_true", help="instead .venv-clients, with published live clients")
    which.add_argument("--recipes", action="store_true", help="instead .venv-recipes, with published proxies")
    which.add_argument("--release", action="store_true", help="instead .venv-release, with what builds a release")
    which.add_argument("--omni", action="store_true", help="instead .venv-omni, with vLLM-Omni on top of .venv")
    which.add_argument("--pinned", action="store_true", help="instead .venv-pinned, with vLLM 0.20.0")
    arguments = parser.parse_args()
    if arguments.pinned:
        check_machine("3.12", "Name one with `make PYTHON312=/path/to/python3.12 test-pinned`.")
        if not (PINNED / "ready").exists():
            create(PINNED)
            install_or_exit(PINNED, "vLLM 0.20.0 and tests", REQUIREMENTS / "pinned.txt")
            install_local(PINNED, "vllm-alias-pinned")
            (PINNED / "ready").touch()
        return
    if arguments.recipes:
        check_machine("3.12", "Name one with `make PYTHON312=/path/to/python3.12 test-clients`.")
        return install_tools(RECIPES, "proxies", REQUIREMENTS / "recipes.txt")
    check_machine("3.11", "Name one with `make PYTHON=/path/to/python3.11`, or serve on a GPU: see README.md.")
    if arguments.clients:
        return install_tools(CLIENTS, "live clients", REQUIREMENTS / "clients.txt")
    if arguments.release:
        return install_tools(RELEASE, "release tools", REQUIREMENTS / "release.txt")
    if arguments.omni:
        if not (VENV / "ready").exists():
            sys.exit("error: .venv-omni is on top of .venv: run tools/setup_venv.py first, or `make test-speech`")
        if not (OMNI / "ready").exists():
            create(OMNI)
            install_or_exit(OMNI, "vLLM-Omni", REQUIREMENTS / "omni.txt")
            stack(OMNI, VENV)
            (OMNI / "ready").touch()
        return
    if not (VENV / "ready").exists():
        create(VENV)
        install_torch(VENV)
        install_or_exit(VENV, "vLLM and the benchmark", REQUIREMENTS / "cpu.txt")
        install_local(VENV, "vllm-alias")
        (VENV / "ready").touch()
    if arguments.dev and not (VENV / "ready-dev").exists():
        install_or_exit(VENV, "test tools", REQUIREMENTS / "dev.txt")
        (VENV / "ready-dev").touch()


if __name__ == "__main__":
    main()
