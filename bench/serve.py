"""`python -m bench serve`: a server that stays up, and a request to try."""

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import requests

from bench.measure import engine

SAMPLE = "bench/data/clips/001.opus"  # relative to the repository, the current directory after `make serve`


def stay_up(config: Path, directory: Path, port: int, flags: Sequence[str] = ()) -> None:
    """Serve until Ctrl-C, and print an example request. `flags` are further options of `vllm serve`."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "vllm.log")
        with contextlib.suppress(KeyboardInterrupt), engine.served(config, directory, port, log, *flags) as server:
            try:
                models = engine.get(f"{server.url}/v1/models", timeout_s=10)
                page = engine.get(server.url, timeout_s=10).headers.get("content-type", "").startswith("text/html")
            except requests.RequestException as error:
                status = server.wait(10)
                ended = f"exited with status {status}" if status is not None else f"does not answer ({error})"
                raise server.error(f"vllm serve {ended}.") from None
            keyed = models.status_code == 401  # with --api-key, which is not told here
            model = "MODEL" if keyed else models.json()["data"][0]["id"]
            key = ' -H "Authorization: Bearer KEY"' if keyed else ""
            name = "with a key" if keyed else model
            print(f"Serving {name} at {server.url} (this machine only). Press Ctrl-C to stop.")
            if page:
                print(f"To try it in a browser: {server.url}")
            print("In another terminal:\n")
            print(f"  curl {server.url}/v1/audio/transcriptions{key} -F model={model} -F file=@{SAMPLE}\n", flush=True)
            raise server.error(f"vllm serve exited with status {server.wait()}.")
