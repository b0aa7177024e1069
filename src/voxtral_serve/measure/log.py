"""What the log of a `vllm serve` says: the phase of its start, its memory, its patches, how it ended."""

import re
from pathlib import Path

from .cause import cause

SHOWN_LINES = 25
# The phases of a start, and the text in vLLM's log (0.20.0 and 0.32.0) that begins each.
PHASES = (
    ("importing vLLM", ""),
    ("starting the engine", "Resolved architecture"),  # one or two more processes, which also import vLLM
    ("loading the weights", "Starting to load model"),
    ("compiling and warming up", "Loading weights took"),
    ("starting the API", "init engine"),
)
# vLLM 0.20.0 and 0.32.0 log their memory in GiB, on a CPU without the weights (v1/worker/gpu_worker.py, cpu_worker.py).
MEMORY = {
    "weights_bytes": re.compile(r"Model loading took ([\d.]+) GiB"),
    "kv_cache_bytes": re.compile(
        r"Available KV cache memory: ([\d.]+) GiB"
        r"|reserved ([\d.]+) GiB memory for KV Cache"  # with kv_cache_memory_bytes
        r"|set \(([\d.]+)/[\d.]+\) GiB for KV cache"  # on a CPU
    ),
}
PATCHES = re.compile(r'voxtral-serve patches: ([^"\n]+)')  # up to the quote, where the log is JSON


def read(log: Path) -> str:
    return log.read_text(errors="replace")


def phase(text: str) -> str:
    """The last phase of PHASES that the log has reached."""
    return [name for name, begin in PHASES if begin in text][-1]


def memory(text: str) -> dict[str, int | None]:
    """Bytes of the server's weights and of its KV cache.

    None if the log has no number, or several different ones, as with one process per GPU.
    """
    amounts: dict[str, int | None] = {}
    for name, pattern in MEMORY.items():
        numbers = {number for match in pattern.finditer(text) for number in match.groups() if number}
        amounts[name] = round(float(numbers.pop()) * 2**30) if len(numbers) == 1 else None
    return amounts


def patches(text: str) -> str | None:
    """The outcome of each patch of voxtral-serve, "NAME OUTCOME, ...", of the server's first process; None without."""
    line = PATCHES.search(text)
    return line[1].strip() if line else None


def end(log: Path) -> str:
    """The last lines of the log, and the exception that ended the server."""
    text = read(log)
    lines = "\n".join(f"  {line}" for line in text.splitlines()[-SHOWN_LINES:])
    reason = cause(text)
    return f"The last lines of {log}:\n{lines}\n{'The log has no exception.' if reason is None else f'cause: {reason}'}"
