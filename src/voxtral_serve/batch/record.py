"""What made an output: the model, and the options that can change its texts. OUT/run.json keeps it, with its hash.

A hash that differs refuses a second run into the same output, which would otherwise hold texts of two models.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from voxtral_serve.batch.job import BatchJob
from voxtral_serve.batch.places import Place
from voxtral_serve.client.errors import UsageError

SMALL = 1 << 20  # bytes of a file whose content is hashed; of a larger one, weights, only the size
# Options that place a server and change no text, so that a rerun may have others. No key gets into a file.
NEUTRAL = {
    *("host", "port", "api_key", "api_server_count", "gpu_memory_utilization", "shutdown_timeout", "uvicorn_log_level"),
    *("disable_uvicorn_access_log", "max_num_seqs"),
}
OURS = ("config", "host", "port", "api_key")  # options that each engine gets from its worker


def read_config(path: Path) -> dict[str, Any]:
    """The options in the YAML of `vllm serve --config`, names with underscores. Raises UsageError."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"--config {path} is not a mapping of options: expected the YAML of `vllm serve --config`")
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def options(words: Sequence[str]) -> dict[str, Any]:
    """Options of a command line: `--max-model-len 512 --enforce-eager` is {"max_model_len": "512", "enforce_eager":
    True}. Raises UsageError for a word that belongs to none, and for an option that the engine gets from its worker."""
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            head, mark, value = word.lstrip("-").partition("=")
            name = head.replace("-", "_")
            if name in OURS:
                raise UsageError(f"{word}: each engine gets its own {'--' + head}; it cannot be given after --")
            found[name] = value if mark else True
        elif not name:
            raise UsageError(f"{word!r} after -- belongs to no option: expected options of `vllm serve`")
        else:
            found[name] = word if found[name] is True else f"{found[name]} {word}"
    return found


def of_engines(job: BatchJob, config: Mapping[str, Any]) -> dict[str, Any]:
    """The record of engines that the job starts. Raises UsageError if the checkpoint cannot be read."""
    given = dict(config) | options(job.arguments)
    named = given.get("model")
    # A name that is no folder is one of the Hub, or of a folder that only other machines have.
    folder = job.directory / str(named) if named is not None else job.directory
    model: Any = _fingerprint(folder) if folder.is_dir() else named
    kept = {name: value for name, value in given.items() if name not in NEUTRAL}
    return {"model": model, "config": kept, **_asked(job)}


def of_servers(model: str, job: BatchJob) -> dict[str, Any]:
    """The record of servers that are up: of their configuration, only the model's name is known."""
    return {"model": model, "config": None, **_asked(job)}


def _asked(job: BatchJob) -> dict[str, Any]:
    """What each request asks for."""
    more = {"speakers": job.speakers, "delay_ms": job.delay_ms, "keywords": [*job.keywords] or None}
    return {"language": job.language, **{name: value for name, value in more.items() if value is not None}}


def _fingerprint(folder: Path) -> dict[str, str]:
    """Each file of a checkpoint with its size, and the hash of what is in it if it is small."""
    found = {}
    try:
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                size = path.stat().st_size
                digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if size <= SMALL else ""
                found[path.name] = f"{size} {digest}".strip()
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}") from None
    if not found:
        raise UsageError(f"{folder} has no files: expected a checkpoint (--dir DIR)")
    return found


def config_hash(record: Mapping[str, Any]) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check(out: Place, record: Mapping[str, Any]) -> bool:
    """Whether the output has a record, which is the same. Raises UsageError with the first difference if it is not."""
    file = out.below("run.json")
    try:
        with file.system.open_input_stream(file.path) as stream:
            there = json.loads(stream.read())
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise UsageError(f"{file.path} cannot be read: {error}") from None
    if there.get("hash") == config_hash(record):
        return True
    before, now = (_flat(each) for each in (there.get("record", {}), json.loads(json.dumps(record, default=str))))
    name = min((name for name in {*before, *now} if before.get(name) != now.get(name)), default="its record")
    raise UsageError(
        f"{out.path} has rows of another model or config: {name} was {before.get(name)!r}, and is {now.get(name)!r}: "
        "use another --out, or the model and config of that run"
    )


def written(record: Mapping[str, Any]) -> bytes:
    """The content of run.json."""
    content = {"hash": config_hash(record), "record": record}
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, default=str).encode() + b"\n"


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """{"config": {"a": 1}} as {"config.a": 1}."""
    if not isinstance(value, dict):
        return {name: value}
    return {key: each for part in value for key, each in _flat(value[part], f"{name}.{part}".lstrip(".")).items()}
