"""tools/release.py: two builds are the same bytes, the files have what they should, and what is wrong is told.

The wheel is installed and the extras are resolved by the slow test, which runs `make release` in a clone.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest
from places import ROOT

import voxtral_serve
from bench import BenchError
from bench.gpu import tested
from tools import release

EPOCH = 1_700_000_000
VERSION = voxtral_serve.__version__


@pytest.fixture(scope="module")
def other_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the package is made of, elsewhere, with other times and permissions."""
    tree = tmp_path_factory.mktemp("elsewhere") / "a-longer-name"
    tree.mkdir()
    for name in release.SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    for path in tree.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o600)
            os.utime(path, (1, 1))
    return tree


@pytest.fixture(scope="module")
def built(other_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    directories = [tmp_path_factory.mktemp("dist") for _ in range(2)]
    return [release.build(tree, each, EPOCH) for tree, each in zip((ROOT, other_tree), directories, strict=True)]


def test_two_builds_are_the_same_bytes(built: list[tuple[Path, Path]], tmp_path: Path) -> None:
    release.compare(*built)
    assert [path.name for path in built[0]] == [
        f"voxtral_serve-{VERSION}.tar.gz",
        f"voxtral_serve-{VERSION}-py3-none-any.whl",
    ]
    changed = Path(shutil.copy(built[1][1], tmp_path))
    changed.write_bytes(changed.read_bytes()[:-1] + b"!")
    with pytest.raises(
        release.ReleaseError, match=rf"two builds differ: voxtral_serve-{VERSION}-py3-none-any.whl, \w+"
    ):
        release.compare(built[0], (built[1][0], changed))


def test_the_files_have_what_the_package_is_made_of(built: list[tuple[Path, Path]]) -> None:
    sdist, wheel = built[0]
    count = len([*release.package_files(ROOT)])
    assert count > 150
    assert release.check_wheel(wheel, ROOT, VERSION) == count + 5
    assert release.check_sdist(sdist, ROOT, VERSION) >= count + 5


def test_nothing_but_the_package_gets_into_an_environment(built: list[tuple[Path, Path]]) -> None:
    """No `bench`: docs/pages/releases.md says why."""
    with ZipFile(built[0][1]) as wheel:
        top = {name.partition("/")[0] for name in wheel.namelist()}
    assert top == {"voxtral_serve", "voxtral_serve.pth", f"voxtral_serve-{VERSION}.dist-info"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("voxtral_serve/left-over.txt", b"", "missing, or not of the package: voxtral_serve/left-over.txt"),
        ("voxtral_serve/profiles/fast.yaml", None, "not of the package: voxtral_serve/profiles/fast.yaml"),
        ("voxtral_serve.pth", b"import os\n", "voxtral_serve.pth differs from"),
        (f"voxtral_serve-{VERSION}.dist-info/entry_points.txt", b"[console_scripts]\n", "entry points"),
        (
            f"voxtral_serve-{VERSION}.dist-info/METADATA",
            b"Name: voxtral-serve\nVersion: 0.9.0\n",
            "it says voxtral-serve 0.9.0 with the extras",
        ),
    ],
)
def test_a_wheel_that_is_not_right(
    name: str, content: bytes | None, message: str, built: list[tuple[Path, Path]], tmp_path: Path
) -> None:
    changed = tmp_path / built[0][1].name
    with ZipFile(built[0][1]) as wheel, ZipFile(changed, "w") as copy:
        for each in wheel.namelist():
            if each != name:
                copy.writestr(each, wheel.read(each))
        if content is not None:
            copy.writestr(name, content)
    with pytest.raises(release.ReleaseError, match=re.escape(message)):
        release.check_wheel(changed, ROOT, VERSION)


def test_an_sdist_that_lacks_a_file(built: list[tuple[Path, Path]], other_tree: Path) -> None:
    (added := other_tree / "profiles/added.yaml").write_text("")
    try:
        with pytest.raises(release.ReleaseError, match=r"missing, or not of the package: \S+/profiles/added.yaml"):
            release.check_sdist(built[0][0], other_tree, VERSION)
    finally:
        added.unlink()


def test_the_version_is_the_same_everywhere() -> None:
    assert release.version_of(ROOT) == VERSION


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("src/voxtral_serve/__init__.py", VERSION, "next", "has the version ['next']: expected one, such as 1.0.0"),
        ("CHANGELOG.md", f"## {VERSION}", "## 9.9.9", f"begins with the section '9.9.9': expected '{VERSION}'"),
        ("Dockerfile", f'"{VERSION}"', '"9.9.9"', f"is another: expected {VERSION}"),
    ],
)
def test_another_version_somewhere(file: str, old: str, new: str, message: str, other_tree: Path) -> None:
    path = other_tree / file
    content = path.read_text(encoding="utf-8")
    assert old in content
    path.write_text(content.replace(old, new, 1), encoding="utf-8")
    try:
        with pytest.raises(release.ReleaseError, match=re.escape(message)):
            release.version_of(other_tree)
    finally:
        path.write_text(content, encoding="utf-8")


def git(directory: Path, *words: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *identity, *words], cwd=directory, check=True, capture_output=True)


def test_only_what_is_committed_is_released(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    sha, epoch = release.commit(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{40}", sha)
    assert epoch > EPOCH
    (tmp_path / "file").write_text("2")
    with pytest.raises(release.ReleaseError, match=r"1 files differ from the last commit, such as 'M? ?M? file'"):
        release.commit(tmp_path)


def test_the_names_of_a_release() -> None:
    tag, *images = release.tags(ROOT, "1.2.3", "abc")
    assert tag == "git tag -a v1.2.3 -m 'voxtral-serve 1.2.3' abc"
    assert images == [
        "docker build --build-arg VLLM=0.20.0 --build-arg REVISION=abc -t vllm-voxtral:1.2.3-vllm0.20.0 .",
        "docker build --build-arg VLLM=0.32.0 --build-arg REVISION=abc -t vllm-voxtral:1.2.3-vllm0.32.0 "
        "-t vllm-voxtral:1.2.3 .",
    ]


@pytest.mark.slow  # it installs its tools, and needs the network
def test_the_whole_of_it(tmp_path: Path) -> None:
    """Without a record of the GPU's tests nothing is built; the clone gets one if the commit has none of its state."""
    clone, environment = (
        tmp_path / "clone",
        {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MAKEFLAGS")},
    )
    git(tmp_path, "clone", "--quiet", str(ROOT), str(clone))
    try:
        tested.check(clone)
    except BenchError:
        refused = subprocess.run(["make", "release"], cwd=clone, env=environment, capture_output=True, text=True)
        assert refused.returncode != 0 and "has no record of this state of the engine" in refused.stderr
        counts = {"passed": 1, "failed": 0, "skipped": 0}
        made = {"engine_sha256": tested.engine_hash(clone), "counts": counts, "gpu": "none", "commit": "0" * 40}
        (clone / tested.FOLDER).mkdir(parents=True, exist_ok=True)
        (clone / tested.FOLDER / "made.json").write_text(json.dumps(made))
        git(clone, "add", "--all")
        git(clone, "commit", "--quiet", "--message", "a record")
    done = subprocess.run(["make", "release"], cwd=clone, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    begun = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    said = (
        "commit",
        "GPU",
        "built",
        "contents",
        "metadata",
        "installed",
        "resolved",
        "resolved",
        "materials",
        "materials",
        "written",
    )
    assert [*said] == begun[-len(said) :]
    out = clone / "results/release"
    sums = dict(reversed(line.split("  ")) for line in (out / "SHA256SUMS").read_text().splitlines())
    assert sums == {path.name: release.digest(path) for path in out.iterdir() if path.name != "SHA256SUMS"}
    assert len(sums) == 4
