"""A `vllm serve` of a worker's own, on a free port of 127.0.0.1; it ends with the worker, however that ends."""

import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import requests

from voxtral_serve.batch import leash
from voxtral_serve.batch.job import JobError
from voxtral_serve.client.cause import cause
from voxtral_serve.client.server import Server

START_S = 1800  # a first start compiles for minutes
POLL_S = 0.5
FORK_S = 60  # of the process that starts the leash
STOP_S = leash.GRACE_S + 5
SHOWN_LINES = 15


def health(server: Server) -> int | None:
    """The status of GET /health, None without an answer."""
    try:
        with requests.Session() as session:
            session.trust_env = server.proxied
            return session.get(f"{server.url}/health", timeout=10).status_code
    except requests.RequestException:
        return None


class Engine:
    """One `vllm serve`. It sees the GPU that CUDA_VISIBLE_DEVICES names, which Ray sets in the worker."""

    def __init__(self, config: str, directory: Path, arguments: Sequence[str]) -> None:
        """`config` is the content of the YAML, and `directory` the one to start in. Raises JobError without `vllm`."""
        command = shutil.which("vllm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        if command is None:
            raise JobError(f"no `vllm` command beside {sys.executable} or on PATH: install vLLM, or use --url")
        self._folder = tempfile.TemporaryDirectory(prefix="voxtral-batch-")
        self._log = Path(self._folder.name, "vllm.log")
        path = Path(self._folder.name, "config.yaml")
        path.write_text(config, encoding="utf-8")
        self.key = secrets.token_hex(16)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        # It is at its end when the leash is gone, and the leash does not go before the engine.
        self._alive, held = os.pipe()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, leash.__file__, command, "serve", "--config", str(path)),
                    *("--host", "127.0.0.1", "--port", str(port), *arguments),
                ],
                cwd=directory,
                # vLLM logs its options, so the key is none of them.
                env={**os.environ, "VLLM_API_KEY": self.key},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(held,),
            )
        os.close(held)
        self._process.wait(FORK_S)

    def ended(self, within_s: float = 0.0) -> bool:
        return bool(select.select([self._alive], [], [], within_s)[0])

    def wait_until_up(self) -> None:
        """Poll /health until it answers 200. Raises JobError if the engine ends, or is too slow."""
        until = time.monotonic() + START_S
        while not self.healthy():
            if self.ended():
                raise JobError(f"vllm serve ended during its start.\n{self.last_words()}")
            if time.monotonic() > until:
                raise JobError(f"vllm serve did not answer within {START_S} s.\n{self.last_words()}")
            time.sleep(POLL_S)

    def healthy(self) -> bool:
        return health(Server(self.url, None)) == 200

    def last_words(self) -> str:
        """The log's last lines, and the exception that ended the engine."""
        text = self._log.read_text(errors="replace")
        told = cause(text)
        lines = [f"  {line}" for line in text.splitlines()[-SHOWN_LINES:]]
        return "\n".join([*lines, "The log has no exception." if told is None else f"cause: {told}"])

    def stop(self) -> None:
        """End it. It ends as well when this process does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not self.ended(STOP_S):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
