"""The Python files of a release of vLLM: installed, in a folder, in a wheel or sdist, or in the package index.

A wheel of vLLM has hundreds of MB, and its Python files 12 MB. From an index that answers range requests only these are
read; from another one the sdist is downloaded, which has 50 MB.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import requests

PACKAGE = "vllm"
SIMPLE = "application/vnd.pypi.simple.v1+json"  # PEP 691
TIMEOUT_S = 120
CHUNK = 1 << 20  # bytes of a range request


class ReleaseError(ValueError):
    """There is no such release, or its files cannot be read."""


def installed_version() -> str:
    """Without the local part: "0.32.0" of "0.32.0+cpu"."""
    return version(PACKAGE).partition("+")[0]


def installed() -> "Files":
    """The files of the installed vLLM, which is not imported."""
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    return Files.of_folder(Path(spec.origin).parent)


class Files(Mapping[str, str]):
    """Path ("vllm/v1/request.py") -> content. Files of a folder are read as they are asked for."""

    def __init__(self, found: dict[str, bytes | Path]) -> None:
        self._found = found

    @classmethod
    def of_folder(cls, folder: Path) -> "Files":
        """`folder` is the package vllm itself."""
        return cls({f"{PACKAGE}/{path.relative_to(folder).as_posix()}": path for path in folder.rglob("*.py")})

    @classmethod
    def of_wheel(cls, file: Any) -> "Files":
        with zipfile.ZipFile(file) as wheel:
            # In their order in the file: neighbours come with one range request.
            infos = sorted(wheel.infolist(), key=lambda info: info.header_offset)
            return cls({info.filename: wheel.read(info) for info in infos if _wanted(info.filename)})

    @classmethod
    def of_sdist(cls, file: Any) -> "Files":
        found: dict[str, bytes | Path] = {}
        with tarfile.open(fileobj=file, mode="r:gz") as archive:
            for member in archive:
                name = member.name.partition("/")[2]
                if _wanted(name) and (content := archive.extractfile(member)) is not None:
                    found[name] = content.read()
        return cls(found)

    def __getitem__(self, name: str) -> str:
        content = self._found[name]
        return (content.read_bytes() if isinstance(content, Path) else content).decode()

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _wanted(name: str) -> bool:
    return name.startswith(f"{PACKAGE}/") and name.endswith(".py")


class Remote(io.RawIOBase):
    """A file on a server that answers range requests."""

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size, self.at = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self.size - self.at)
        if count <= 0:
            return 0
        part = {"Range": f"bytes={self.at}-{self.at + count - 1}"}
        answer = requests.get(self.url, headers=part, timeout=TIMEOUT_S, stream=True)
        if answer.status_code != requests.codes.partial_content:
            raise ReleaseError(f"{self.url}: status {answer.status_code} for a range request, expected 206")
        content = answer.content
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)


def read(release: str) -> Files:
    """`release`: a version, or the path of a wheel, an sdist, or the folder of the package. Raises ReleaseError."""
    path = Path(release)
    if path.is_dir():
        return Files.of_folder(path)
    if path.is_file():
        with path.open("rb") as file:
            return Files.of_wheel(file) if path.suffix == ".whl" else Files.of_sdist(file)
    return installed() if release == installed_version() else _of_index(release)


def _of_index(release: str) -> Files:
    found = _listed(release)
    wheels = sorted(name for name in found if name.endswith(".whl"))
    for name in reversed(wheels):  # x86_64 after aarch64; their Python files are the same
        try:
            return Files.of_wheel(io.BufferedReader(Remote(*found[name]), CHUNK))
        except ReleaseError as error:
            print(f"{error}: downloading the sdist", file=sys.stderr)
            break
    name = next((name for name in found if name.endswith(".tar.gz")), *wheels[-1:])
    with tempfile.TemporaryFile() as file, requests.get(found[name][0], timeout=TIMEOUT_S, stream=True) as answer:
        answer.raise_for_status()
        for chunk in answer.iter_content(CHUNK):
            file.write(chunk)
        file.seek(0)
        return Files.of_wheel(file) if name.endswith(".whl") else Files.of_sdist(file)


def _listed(release: str) -> dict[str, tuple[str, int]]:
    """{name of a file of the release: (url, bytes)} in pip's configured index. Raises ReleaseError."""
    index = _index()
    answer = requests.get(f"{index}/{PACKAGE}/", headers={"Accept": SIMPLE}, timeout=TIMEOUT_S)
    if not answer.ok or SIMPLE.partition("+")[0] not in answer.headers.get("Content-Type", ""):
        raise ReleaseError(f"{index} has no list of files in JSON (PEP 691; status {answer.status_code})")
    files = json.loads(answer.content)["files"]
    of_release = (f"{PACKAGE}-{release}-", f"{PACKAGE}-{release}.tar.gz")
    found = {each["filename"]: (each["url"], each.get("size", 0)) for each in files}
    found = {name: each for name, each in found.items() if name.startswith(of_release)}
    if not found:
        raise ReleaseError(f"{index} has no file of {PACKAGE} {release}: expected a version or a path that exists")
    return found


def _index() -> str:
    if named := os.environ.get("PIP_INDEX_URL"):
        return named.rstrip("/")
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    return (asked.stdout.strip() or "https://pypi.org/simple").rstrip("/")
