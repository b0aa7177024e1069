"""Build a release from the last commit and check it: sdist, wheel, bills of materials, checksums. Publishes nothing.

    make release        # .venv-release/bin/python -m tools.release --out results/release

Each check prints a line. The first that fails ends with status 1 and says what was expected. Two builds, of two copies
of the commit in other folders, must be the same bytes. It needs the network: the wheel is installed into an empty
environment, and the extras for GPUs are resolved.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from configparser import ConfigParser
from email.parser import BytesParser
from pathlib import Path
from zipfile import ZipFile

from bench import BenchError
from bench.gpu import tested

ROOT = Path(__file__).resolve().parent.parent
# What a release is made of, and what names its version
SOURCES = (
    *(".gitignore", "CHANGELOG.md", "Dockerfile", "LICENSE", "README.md", "profiles", "pyproject.toml", "requirements"),
    *("sitecustomize.py", "src"),
)
GPU_EXTRAS = ("gpu", "contest")
# Of an environment that has the wheel and nothing for a GPU
INSTALLED = """
import json
from importlib.metadata import entry_points
import voxtral_serve.check
(plugin,) = entry_points(group="vllm.general_plugins")
profiles = sorted(path.name for path in voxtral_serve.check.PROFILES.iterdir())
print(json.dumps({"plugin": plugin.load().__module__, "profiles": profiles}))
"""


class ReleaseError(RuntimeError):
    """What the commit, or a file made of it, is not as a release must be."""


def run(*words: object, cwd: Path, status: int = 0, **environment: str) -> str:
    """The output of a command. Raises ReleaseError with its last lines if it ends with another status."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SOURCE_DATE_EPOCH")}
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, env=kept | environment, capture_output=True, text=True)
    if done.returncode != status:
        raise ReleaseError(
            f"{' '.join(command)} ended with {done.returncode}, expected {status}:\n"
            + (done.stdout + done.stderr)[-4000:]
        )
    return done.stdout


# ---- The commit


def version_of(tree: Path) -> str:
    """The version that the package, the changelog's first section and the image's label agree on."""
    found = re.findall(r'^__version__ = "(.*)"$', (tree / "src/voxtral_serve/__init__.py").read_text(), re.MULTILINE)
    if len(found) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+", found[0]):
        raise ReleaseError(f"src/voxtral_serve/__init__.py has the version {found}: expected one, such as 1.0.0")
    (version,) = found
    first = re.findall(r"^## (.*)$", (tree / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    if first != version:
        raise ReleaseError(f"CHANGELOG.md begins with the section {first!r}: expected {version!r}")
    if f'org.opencontainers.image.version="{version}"' not in (tree / "Dockerfile").read_text():
        raise ReleaseError(f"Dockerfile's label org.opencontainers.image.version is another: expected {version}")
    return version


def commit(root: Path) -> tuple[str, int]:
    """(the last commit, its time in seconds since 1970). Raises ReleaseError if files differ from it."""
    changed = run("git", "status", "--porcelain", cwd=root).splitlines()
    if changed:
        raise ReleaseError(f"{len(changed)} files differ from the last commit, such as {changed[0]!r}: commit first")
    sha, epoch = run("git", "log", "-1", "--format=%H %ct", cwd=root).split()
    return sha, int(epoch)


def export(root: Path, directory: Path) -> Path:
    """A copy of the last commit's files in `directory`."""
    archive = directory.with_suffix(".tar")
    run("git", "archive", "--output", archive, "HEAD", *SOURCES, cwd=root)
    with tarfile.open(archive) as opened:
        opened.extractall(directory, filter="data")
    return directory


# ---- The files


def build(tree: Path, directory: Path, epoch: int) -> tuple[Path, Path]:
    """(sdist, wheel) of `tree`, in `directory`. The wheel is made of the sdist. `epoch` is the time of their files."""
    hatchling = (sys.executable, "-m", "hatchling", "build")
    run(*hatchling, "-t", "sdist", "-d", directory, cwd=tree, SOURCE_DATE_EPOCH=str(epoch))
    (sdist,) = directory.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(sdist) as opened:
            opened.extractall(unpacked, filter="data")
        (source,) = Path(unpacked).iterdir()
        run(*hatchling, "-t", "wheel", "-d", directory, cwd=source, SOURCE_DATE_EPOCH=str(epoch))
    (wheel,) = directory.glob("*.whl")
    return sdist, wheel


def compare(first: tuple[Path, ...], second: tuple[Path, ...]) -> None:
    """Raise ReleaseError if the files differ in their names or bytes."""
    for one, other in zip(first, second, strict=True):
        if one.name != other.name or one.read_bytes() != other.read_bytes():
            raise ReleaseError(f"two builds differ: {one.name}, {digest(one)} and {other.name}, {digest(other)}")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def package_files(tree: Path) -> Iterator[tuple[str, Path]]:
    """(name in the wheel, file) of all that the wheel has but its metadata."""
    yield "voxtral_serve.pth", tree / "src/voxtral_serve.pth"
    for folder, place in ((tree / "src/voxtral_serve", "voxtral_serve"), (tree / "profiles", "voxtral_serve/profiles")):
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{place}/{path.relative_to(folder).as_posix()}", path


def check_wheel(wheel: Path, tree: Path, version: str) -> int:
    """Check that the wheel has `tree`'s files and no other, its entry points and extras. Returns their number."""
    info = f"voxtral_serve-{version}.dist-info"
    metadata = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    files = dict(package_files(tree))
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    with ZipFile(wheel) as opened:
        held = {name for name in opened.namelist() if not name.endswith("/")}
        if held != metadata | set(files):
            wrong = sorted(held ^ (metadata | set(files)))
            raise ReleaseError(f"{wheel.name}: missing, or not of the package: {', '.join(wrong[:5])}")
        for name, path in files.items():
            if opened.read(name) != path.read_bytes():
                raise ReleaseError(f"{wheel.name}: {name} differs from {path}")
        points = ConfigParser()
        points.read_string(opened.read(f"{info}/entry_points.txt").decode())
        head = BytesParser().parsebytes(opened.read(f"{info}/METADATA"))
    found = {section: dict(points[section]) for section in points.sections()}
    expected = {"console_scripts": project["scripts"], **project["entry-points"]}
    if found != expected:
        raise ReleaseError(f"{wheel.name}: entry points {found}, expected {expected}")
    extras = head.get_all("Provides-Extra", [])
    if (head["Name"], head["Version"], sorted(extras)) != (
        project["name"],
        version,
        sorted(project["optional-dependencies"]),
    ):
        raise ReleaseError(f"{wheel.name}: it says {head['Name']} {head['Version']} with the extras {extras}")
    return len(held)


def check_sdist(sdist: Path, tree: Path, version: str) -> int:
    """Check that the sdist has what the wheel is made of, and no other file. Returns the number of its files."""
    top = f"voxtral_serve-{version}"
    single = (".gitignore", "LICENSE", "README.md", "pyproject.toml", "sitecustomize.py")
    expected = {f"{top}/{name}" for name in (*single, "PKG-INFO")}
    expected |= {f"{top}/{path.relative_to(tree).as_posix()}" for _, path in package_files(tree)}
    with tarfile.open(sdist) as opened:
        held = {member.name for member in opened.getmembers() if not member.isdir()}
    if held != expected:
        wrong = sorted(held ^ expected)
        raise ReleaseError(f"{sdist.name}: missing, or not of the package: {', '.join(wrong[:5])}")
    return len(held)


# ---- What a user does with them


def check_installed(wheel: Path, directory: Path, version: str) -> None:
    """Install the wheel into an empty environment, without any extra, and run it outside of the repository."""
    run(sys.executable, "-m", "venv", directory, cwd=wheel.parent)
    python, command = directory / "bin/python", directory / "bin/voxtral-serve"
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=directory)
    if (said := run(command, "--version", cwd=directory)) != f"voxtral-serve {version}\n":
        raise ReleaseError(f"voxtral-serve --version says {said!r}, expected {version}")
    usage = run(command, "--help", cwd=directory)
    commands = re.findall(r'commands\.add_parser\(\s*"([a-z-]+)"', (ROOT / "src/voxtral_serve/cli.py").read_text())
    if missing := [name for name in commands if not re.search(rf"^    {name}\b", usage, re.MULTILINE)]:
        raise ReleaseError(f"voxtral-serve --help has no {', '.join(missing)}:\n{usage}")
    found = json.loads(run(python, "-c", INSTALLED, cwd=directory))
    expected = {
        "plugin": "voxtral_serve.plugin",
        "profiles": sorted(path.name for path in (ROOT / "profiles").iterdir()),
    }
    if found != expected:
        raise ReleaseError(f"the installed package has {found}, expected {expected}")
    # No vLLM: it says what to install, and still reads the checkpoint. Python itself starts without a word.
    model = ROOT / "pico/checkpoint"
    said = run(command, "check", "--config", ROOT / "profiles/fast.yaml", model, cwd=directory, status=1)
    for line in (
        "install voxtral-serve[gpu]",
        "vLLM loads voxtral_serve.plugin:register",
        "  layout            mistral",
    ):
        if line not in said:
            raise ReleaseError(f"voxtral-serve check does not say {line!r}:\n{said}")


def resolve(wheel: Path, extra: str, directory: Path) -> list[str]:
    """Resolve wheel[extra] for Linux and Python 3.12, as pip would install it. Returns its pins of vLLM and torch."""
    source = directory / f"{extra}.in"
    source.write_text(f"voxtral-serve[{extra}] @ {wheel.as_uri()}\n")
    uv = (sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate")
    pins = run(
        *(*uv, "--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28", source), cwd=directory
    ).split("\n")
    return [pin for pin in pins if re.match(r"(vllm|transformers|mistral-common|torch)==", pin)]


def bill_of_materials(tree: Path, lock: Path, out: Path, version: str, epoch: int) -> int:
    """Write a CycloneDX file of what `lock` installs beside this package. Returns the number of its components."""
    with tempfile.TemporaryDirectory() as scratch:
        # cyclonedx-py reads no version that is in another file.
        project = (tree / "pyproject.toml").read_text().replace('dynamic = ["version"]', f'version = "{version}"')
        (described := Path(scratch) / "pyproject.toml").write_text(project)
        words = ("requirements", lock, "--pyproject", described, "--output-reproducible", "--validate", "-o", out)
        run(sys.executable, "-m", "cyclonedx_py", *words, cwd=tree, SOURCE_DATE_EPOCH=str(epoch))
    bill = json.loads(out.read_text())
    locked = re.findall(r"^([\w.-]+)==", lock.read_text(), re.MULTILINE)
    root = bill["metadata"]["component"]
    if len(bill["components"]) != len(locked) or root.get("version") != version:
        raise ReleaseError(f"{out.name}: {len(bill['components'])} components of {root}, expected {len(locked)}")
    return len(locked)


def vllms(tree: Path) -> tuple[str, list[str]]:
    """(the image's vLLM by default, all that have a lock)."""
    (default,) = re.findall(r"^ARG VLLM=(\S+)$", (tree / "Dockerfile").read_text(), re.MULTILINE)
    names = [path.stem.removeprefix("container-") for path in tree.glob("requirements/container-[0-9]*.txt")]
    return default, sorted(names)


def tags(tree: Path, version: str, sha: str) -> Iterator[str]:
    """The commands that give the commit and the images their names. They are for a person to run."""
    yield f"git tag -a v{version} -m 'voxtral-serve {version}' {sha}"
    default, known = vllms(tree)
    for vllm in known:
        name = f"vllm-voxtral:{version}-vllm{vllm}"
        also = f" -t vllm-voxtral:{version}" if vllm == default else ""
        yield f"docker build --build-arg VLLM={vllm} --build-arg REVISION={sha} -t {name}{also} ."


def release(root: Path, out: Path) -> None:
    """All of it, into `out`, which is emptied. Raises ReleaseError."""
    sha, epoch = commit(root)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        tree = export(root, scratch / "one")
        version = version_of(tree)
        print(f"commit     {sha}, version {version}")
        print(f"GPU tests  {tested.check(root)}")
        files = build(tree, out, epoch)
        compare(files, build(export(root, scratch / "the-other"), scratch / "again", epoch))
        print(f"built      {', '.join(path.name for path in files)}; twice, with the same bytes")
        print(f"contents   {check_sdist(files[0], tree, version)} and {check_wheel(files[1], tree, version)} files")
        run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=out)
        print("metadata   twine check --strict: passed")
        check_installed(files[1], scratch / "environment", version)
        print("installed  into an empty environment: commands, plugin, profiles")
        for extra in GPU_EXTRAS:
            print(f"resolved   [{extra}]: {', '.join(resolve(files[1], extra, scratch))}")
        for vllm in vllms(tree)[1]:
            bill = out / f"voxtral-serve-{version}-vllm{vllm}.cdx.json"
            lock = tree / f"requirements/container-{vllm}.txt"
            print(f"materials  {bill.name}: {bill_of_materials(tree, lock, bill, version, epoch)} components")
        sums = "".join(f"{digest(path)}  {path.name}\n" for path in sorted(out.iterdir()))
        (out / "SHA256SUMS").write_text(sums)
        print(f"written    to {out}, with SHA256SUMS. Nothing is published. The names:")
        print("\n".join(f"           {command}" for command in tags(tree, version, sha)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results/release", help="folder (default: results/release)")
    try:
        release(ROOT, parser.parse_args().out.resolve())
    except (BenchError, ReleaseError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
