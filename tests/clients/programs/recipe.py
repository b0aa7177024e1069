"""A recipe of docs/pages/from-openai.md: its settings as the page has them, and a program that runs with them."""

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from clip import KEY, Server

PAGE = Path(__file__).parents[3] / "docs/pages/from-openai.md"
LONGEST_S = 120  # of a start


def settings(title: str, server: Server) -> dict[str, Any]:
    """The block of the page with this title, for the server of the test and its key."""
    (block,) = re.findall(
        rf"^```yaml\n# {title}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    for shown, here in (("http://gpu-box:8000", server.url), ("change-me", KEY)):
        if shown not in block:
            raise RuntimeError(f"the recipe has no {shown}")
        block = block.replace(shown, here)
    read: dict[str, Any] = yaml.safe_load(block)
    return read


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(command: Sequence[str], port: int, environment: Mapping[str, str]) -> Iterator[None]:
    """A process that listens on `port` of this host. It ends with the block."""
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + LONGEST_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(
                        f"{command[0]} does not listen on {port}; exit status {process.poll()}"
                    ) from None
                time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(30)
