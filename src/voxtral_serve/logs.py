"""The log as lines of JSON, with VOXTRAL_SERVE_LOG=json: the formatter, and the fields that a line has of its request.

    time        UTC, with milliseconds
    level, logger, process, pid, message
    replica     VOXTRAL_SERVE_REPLICA, by default the host's name
    request_id  of the request that is served, if there is one; session_id, of its live session
    exception   the traceback
    and the fields that the caller gives by `fields`

Other attributes of a record are left out, so that the log contains only fields that were reviewed. uvicorn's lines have
paths without their queries.

vLLM and uvicorn read the configuration of their loggers from logs.json (VLLM_LOGGING_CONFIG_PATH). vLLM reads the
variable while it is imported, before it loads plugins, so `voxtral_serve/__init__.py` sets it. vLLM's own JSON (0.32.0,
`--logging-config.formatter json`) has no request, session and replica; 0.20.0 has no JSON.
"""

import copy
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).with_suffix(".json")
# The ids of the request that the task serves: request_id, and session_id of a live session. Lines of other libraries
# have them too. The dict is emptied when the request ends, because tasks that it has started may go on for others.
SERVED: ContextVar[dict[str, str] | None] = ContextVar("SERVED", default=None)
FIELDS = "voxtral_serve"  # attribute of a LogRecord: a dict of further fields


def fields(**values: Any) -> Mapping[str, Any]:
    """The argument `extra` of a logging call: fields of the line of JSON. The line of text stays as it is."""
    return {FIELDS: values}


class LogError(ValueError):
    """The log is not as VOXTRAL_SERVE_LOG says. The message says what to do."""


def check_settings() -> None:
    """Check the environment variables of the log. Raises LogError for a value that is not valid."""
    form = os.environ.get("VOXTRAL_SERVE_LOG", "text")
    replica = os.environ.get("VOXTRAL_SERVE_REPLICA", "-")
    config = os.environ.get("VLLM_LOGGING_CONFIG_PATH")
    if form not in ("text", "json"):
        raise LogError(f"VOXTRAL_SERVE_LOG is {form!r}: expected json, or text, which is the default")
    if not (replica.isprintable() and 1 <= len(replica) <= 253):
        raise LogError(f"VOXTRAL_SERVE_REPLICA is {replica!r}: expected a name of 1 to 253 printable characters")
    if form == "json" and config != str(CONFIG):
        raise LogError(f"VOXTRAL_SERVE_LOG is json, and VLLM_LOGGING_CONFIG_PATH is {config!r}: unset one of them")


def check_loggers() -> None:
    """Check the loggers of a server that has started. Raises LogError if VOXTRAL_SERVE_LOG is json, and they are not.

    The options --log-config-file and --logging-config are read after the environment was checked.
    """
    if os.environ.get("VOXTRAL_SERVE_LOG") != "json":
        return
    for name in ("vllm", "uvicorn"):
        if {type(handler.formatter) for handler in logging.getLogger(name).handlers} != {JsonLines}:
            raise LogError(
                f"VOXTRAL_SERVE_LOG is json, but the log of {name} has another configuration: remove --log-config-file "
                "and --logging-config, or unset VOXTRAL_SERVE_LOG"
            )


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._replica = os.environ.get("VOXTRAL_SERVE_REPLICA") or socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        if record.name.startswith("uvicorn") and isinstance(record.args, tuple):
            without = tuple(value.partition("?")[0] if isinstance(value, str) else value for value in record.args)
            record = copy.copy(record)
            record.args = without
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "process": getattr(record, "vllm_process_name", record.processName),  # vLLM 0.32.0 has its own
            "pid": record.process,
            "replica": self._replica,
            "message": record.getMessage(),
        }
        line |= SERVED.get() or {}
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class LineHandler(logging.StreamHandler):
    """Writes to the stream that VLLM_LOGGING_STREAM names, by a file object of its own.

    vLLM 0.20.0 has sys.stdout put the process's name before each line. A line is one write, so that lines of several
    processes are not mixed.
    """

    def __init__(self) -> None:
        name = os.environ.get("VLLM_LOGGING_STREAM", "ext://sys.stdout").removeprefix("ext://sys.")
        if name not in ("stdout", "stderr"):
            raise ValueError(
                f"VLLM_LOGGING_STREAM is {os.environ['VLLM_LOGGING_STREAM']!r}: with VOXTRAL_SERVE_LOG=json, expected "
                "ext://sys.stdout or ext://sys.stderr"
            )
        number = getattr(sys, f"__{name}__").fileno()
        # Open as long as the process, which writes lines until it ends.
        stream = open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        super().__init__(stream)
