"""The log as lines of JSON, with VOXTRAL_SERVE_LOG=json: what a line says of its request.

    json_lines.json  the logging configuration that vLLM and uvicorn are given; sitecustomize.py names it to vLLM
    json_lines       the formatter and the handler that it uses

vLLM's own JSON (0.32.0, `--logging-config.formatter json`) has no request, session and replica; 0.20.0 has no JSON.
"""

import logging
import os
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

# Of the request that the task serves: request_id, and session_id of a live session. Lines of other libraries have them
# too. The dict is emptied when the request ends, as tasks that it has started may go on for others.
SERVED: ContextVar[dict[str, str] | None] = ContextVar("SERVED", default=None)
FIELDS = "voxtral_serve"  # of a LogRecord: a dict of further fields


def fields(**values: Any) -> Mapping[str, Any]:
    """The argument `extra` of a logging call: fields of the line of JSON. The line of text stays as it is."""
    return {FIELDS: values}


class LogError(ValueError):
    """The log is not as VOXTRAL_SERVE_LOG says. The message says what to do."""


def check() -> None:
    """Of a server that has started. Raises LogError if its lines are not JSON although VOXTRAL_SERVE_LOG=json."""
    for name in ("vllm", "uvicorn"):
        formatters = {type(handler.formatter).__name__ for handler in logging.getLogger(name).handlers}
        if os.environ.get("VOXTRAL_SERVE_LOG") == "json" and formatters != {"JsonLines"}:
            raise LogError(
                f"VOXTRAL_SERVE_LOG is json, but the log of {name} has another configuration: remove --log-config-file "
                "and --logging-config, or unset VOXTRAL_SERVE_LOG"
            )
