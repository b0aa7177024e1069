"""Local paths and URIs of object stores, through `pyarrow.fs`."""

import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from pyarrow import ArrowException, fs  # type: ignore[import-untyped]

from voxtral_serve.batch.job import JobError
from voxtral_serve.client.errors import UsageError

LONGEST_WAIT_S = 30.0  # between two attempts
# What is wrong with one file. Any other error may be gone at the next attempt.
OF_ONE_FILE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EINVAL, errno.EIO),
}
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # no attempt is better than the first

T = TypeVar("T")


class Place(NamedTuple):
    """A file or folder: `path` is that of `system`, without a scheme."""

    system: fs.FileSystem
    path: str

    @property
    def local(self) -> bool:
        return isinstance(self.system, fs.LocalFileSystem)

    def below(self, name: str) -> "Place":
        return Place(self.system, f"{self.path.rstrip('/')}/{name}")


def place(where: str) -> Place:
    """The place of a path or URI. Nothing in a URI is percent-decoded: keys of object stores are given as they are.

    Raises UsageError for one that pyarrow does not know, and OSError for a store that does not answer.
    """
    scheme, mark, rest = where.partition("://")
    if not mark:
        return Place(fs.LocalFileSystem(), os.path.abspath(where))
    host, _, path = rest.partition("/")
    system, base = _system(f"{scheme}://{host}/")
    return Place(system, f"{base.rstrip('/')}/{path}".rstrip("/"))


@lru_cache(maxsize=64)
def _system(root: str) -> tuple[fs.FileSystem, str]:
    try:
        found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(root)
    except (ArrowException, ValueError) as error:
        if isinstance(error, OSError):
            raise
        raise UsageError(f"{root} cannot be used: {error}") from None
    return found


def resolved(where: str, folder: str) -> str:
    """A manifest's path as one that leads there from anywhere: relative ones are below `folder`, the manifest's."""
    return where if "://" in where or where.startswith("/") else f"{folder.rstrip('/')}/{where}"


def parent(where: str) -> str:
    """The folder that holds a path or URI; of a local path, absolute."""
    if "://" in where:
        return where.rpartition("/")[0]
    return os.path.dirname(os.path.abspath(where))


def is_of_one_file(error: OSError) -> bool:
    return error.errno in OF_ONE_FILE


def patiently(action: Callable[[], T], what: str, patience_s: float) -> T:
    """The result of `action`. After an OSError that may pass it is repeated for `patience_s` seconds.

    Raises OSError for what `is_of_one_file`, and JobError for all else.
    """
    until, wait_s = time.monotonic() + patience_s, 1.0
    while True:
        try:
            return action()
        except OSError as error:
            if is_of_one_file(error):
                raise
            cause = error.strerror or str(error)
            if error.errno in FULL:
                raise JobError(f"{what}: {cause}") from None
            if time.monotonic() + wait_s > until:
                raise JobError(f"{what}: {cause} (tried for {patience_s:.0f} s)") from None
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


@contextmanager
def local_copy(source: str, patience_s: float) -> Iterator[Path]:
    """The file itself if it is local, else a copy with the same suffix. Raises as `patiently` does."""
    where = patiently(lambda: place(source), source, patience_s)
    if where.local:
        path = Path(where.path)
        if not stat.S_ISREG(patiently(path.stat, source, patience_s).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=PurePosixPath(where.path).suffix) as file:

        def copy() -> None:
            file.seek(0)
            file.truncate()
            with where.system.open_input_stream(where.path) as stream:
                shutil.copyfileobj(stream, file)
            file.flush()

        patiently(copy, source, patience_s)
        yield Path(file.name)


def write(where: Place, content: bytes, patience_s: float) -> None:
    """Write a file and the folders that hold it. Raises JobError."""

    def action() -> None:
        if where.local:
            os.makedirs(os.path.dirname(where.path), exist_ok=True)
        with where.system.open_output_stream(where.path) as stream:
            stream.write(content)

    try:
        patiently(action, where.path, patience_s)
    except OSError as error:
        raise JobError(f"{where.path} cannot be written: {error.strerror or error}") from None


def files(folder: Place, suffix: str) -> list[Any]:
    """The files of a folder with this suffix, as pyarrow's FileInfo; none where there is no folder."""
    selector = fs.FileSelector(folder.path, allow_not_found=True)
    return [each for each in folder.system.get_file_info(selector) if each.is_file and each.path.endswith(suffix)]
