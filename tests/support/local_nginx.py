"""nginx with the configuration of deploy/nginx, in front of servers of this host: for tests and for measurements.

Of the configuration, only what names places is replaced: ports, folders, and how the replicas are found. Debian's nginx
lacks the parameter `resolve` (nginx 1.27.3); the replicas' addresses are listed instead.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests
from places import ROOT

from bench.measure import engine

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy/nginx"
COMMAND = "apt-get install -y nginx-light"
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def configure(folder: Path, ports: Sequence[int], listen: int, status: int) -> Path:
    """Write the configuration for replicas at these ports of this host; return its file.

    Raises ValueError if the configuration in deploy/nginx does not name a place that is replaced.
    """
    template = (DEPLOYED / "upstreams.conf.template").read_text(encoding="utf-8")
    text = re.sub(r"^resolver .*$", "", template, flags=re.MULTILINE)
    for name in ("VOXTRAL_UPLOADS", "VOXTRAL_LIVE"):
        (line,) = re.findall(rf"^ *server \${{{name}}} resolve (.*);$", text, re.MULTILINE)
        servers = "".join(f"    server 127.0.0.1:{port} {line};\n" for port in ports)
        text = re.sub(rf"^ *server \${{{name}}} .*\n", servers, text, flags=re.MULTILINE)
    (folder / "upstreams.conf").write_text(text, encoding="utf-8")
    conf = (DEPLOYED / "nginx.conf").read_text(encoding="utf-8")
    for place, here in (
        ("/tmp/", f"{folder}/"),
        ("/dev/stdout", f"{folder}/access.log"),
        ("/dev/stderr", f"{folder}/error.log"),
        ("listen 8000;", f"listen 127.0.0.1:{listen};"),
        ("listen 127.0.0.1:8001;", f"listen 127.0.0.1:{status};"),
    ):
        if place not in conf:
            raise ValueError(f"deploy/nginx/nginx.conf has no {place!r}: expected the configuration that is deployed")
        conf = conf.replace(place, here)
    if os.geteuid() == 0:  # the workers of a master that is root would be `nobody`, who may not open these folders
        conf = f"user root;\n{conf}"
    (folder / "nginx.conf").write_text(conf, encoding="utf-8")
    return folder / "nginx.conf"


class Proxy:
    """nginx on ports of its own. A context manager."""

    def __init__(self, folder: Path, ports: Sequence[int]) -> None:
        self.folder, self.port, self.status_port = folder, engine.free_port(), engine.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.conf = configure(folder, ports, self.port, self.status_port)
        self.command = [str(NGINX), "-e", "stderr", "-p", str(folder), "-c", str(self.conf)]

    def __enter__(self) -> Self:
        self.process = subprocess.Popen([*self.command, "-g", "daemon off;"], stderr=subprocess.PIPE)
        wait_for_port(self.port, self.process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.communicate(timeout=20)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the access log."""
        return [json.loads(line) for line in (self.folder / "access.log").read_text().splitlines()]


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Raises ChildProcessError if the process ends, TimeoutError if nothing listens in time."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if process.poll() is not None:
            raise ChildProcessError(f"it ended with status {process.returncode}: {process.communicate()[1]!r}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


# ---- Fake replicas, to put behind it


class FakeReplica:
    """The process of fakereplica.py, which keeps its port when it is started again."""

    def __init__(self, *options: object) -> None:
        self.port = engine.free_port()
        self.options = options
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, *options: object) -> Self:
        words = [str(each) for each in (self.port, *(options or self.options))]
        self.process = subprocess.Popen([sys.executable, str(ROOT / "tests/support/fakereplica.py"), *words])
        wait_for_port(self.port, self.process)
        return self

    def end(self, signal: int) -> None:
        self.process.send_signal(signal)
        self.process.wait(timeout=60)


def answered_by(url: str) -> int:
    """The process that answers one small request."""
    return int(requests.get(f"{url}/v1/models", timeout=10).json()["pid"])
