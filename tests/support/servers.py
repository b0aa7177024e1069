"""Real servers of vLLM on a CPU: their flags, their starts, and what they say of clips."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from uploads import KEY

from bench import dataset
from bench.client import Client, Row
from bench.measure import engine

# A share of RAM that vLLM wants to be free when it starts, whatever the KV cache takes: all servers have room. Profiles
# ask for 0.9, and for graphs that take minutes to compile.
SMALL = ("--gpu-memory-utilization", "0.3")
EAGER = ("--enforce-eager", *SMALL)
# vLLM would bind the workers of all servers to the same one of two cores. 0.20.0 does not start without binding them
# (IndexError in OMPProcessManager).
NOBIND = {} if version("vllm").startswith("0.20.0") else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# Nor do they compile vLLM's sampling of log probabilities, which takes 8 s.
UNBOUND = {**NOBIND, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
SAMPLES = 30  # of the 500 clips; all of them are `make bench-full`
# pico says no EOS within a clip: a text ends with its clip. Further clips that show it; none is among the 30.
LATE = ("057", "154", "162", "499")
MOST_LIVE = 8  # live sessions of the server `fast`
LIVE_AGE_S = 20  # of one request of such a session


class Server(NamedTuple):
    url: str
    log: Path
    process: engine.Engine


def begin(stack: contextlib.ExitStack, log: Path, config: Path, checkpoint: Path, *flags: str) -> Server:
    """One that is not up yet; the end of `stack` ends it."""
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        pytest.exit("the Makefile sets what vLLM needs on a CPU: run the tests with `make test`", returncode=2)
    port = engine.free_port()
    process = stack.enter_context(engine.served(config, checkpoint, port, log, *flags, environment=UNBOUND, wait=False))
    return Server(f"http://127.0.0.1:{port}", log, process)


def up(server: Server) -> Server:
    server.process.wait_until_up()
    return server


@contextlib.contextmanager
def at_once(config: Path, directories: Mapping[str, Path], logs: Path, *flags: str) -> Iterator[dict[str, Server]]:
    """One server for each directory, all started at the same time; their logs are in `logs`."""
    with contextlib.ExitStack() as stack:
        servers = {
            name: begin(stack, logs / f"{name}.log", config, directory, *flags)
            for name, directory in directories.items()
        }
        yield {name: up(server) for name, server in servers.items()}


def short(clips: list[dataset.Clip], count: int, longest_s: float = 8) -> list[dataset.Clip]:
    """The shortest `count`, none longer: `make test` has minutes for all."""
    found = sorted((clip for clip in clips if clip.duration_s <= longest_s), key=lambda clip: clip.duration_s)[:count]
    assert len(found) == count
    return found


def transcribe(url: str, clips: list[dataset.Clip]) -> list[Row]:
    """One clip after the other."""
    client = Client(url, timeout_s=120, api_key=KEY)
    client.model = "voxtral"
    return [client.transcribe(clip, part=1) for clip in clips]
