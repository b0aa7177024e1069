"""A log record as one line of JSON.

    time        UTC, with milliseconds
    level, logger, process, pid, message
    replica     VOXTRAL_SERVE_REPLICA, by default the host's name
    request_id  of the request that is served, where there is one; session_id, of its live session
    exception   the traceback
    and the fields that the caller gives by `fields`

Other attributes of a record are left out, so that nothing gets into the log that nobody has looked at. uvicorn's lines
have paths without their queries.
"""

import copy
import logging
import os
import socket
import sys
from datetime import UTC, datetime
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from voxtral_serve.logs import FIELDS, SERVED


class JsonLines(JsonFormatter):
    """The formatter."""

    def __init__(self) -> None:
        super().__init__(json_ensure_ascii=False)
        self._replica = os.environ.get("VOXTRAL_SERVE_REPLICA") or socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        if record.name.startswith("uvicorn") and isinstance(record.args, tuple):
            without = tuple(each.partition("?")[0] if isinstance(each, str) else each for each in record.args)
            record = copy.copy(record)
            record.args = without
        return super().format(record)

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        log_data |= {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "process": getattr(record, "vllm_process_name", record.processName),  # vLLM 0.32.0 has its own
            "pid": record.process,
            "replica": self._replica,
            "message": record.getMessage(),
        }
        log_data |= SERVED.get() or {}
        log_data |= getattr(record, FIELDS, {})
        if "exc_info" in message_dict:
            log_data["exception"] = message_dict["exc_info"]


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
        # Open as long as the process: at its end, too, there are lines.
        stream = open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        super().__init__(stream)
