"""The checks of --gate: the port is free, and an API key is set or explicitly switched off."""

import errno
import os
import socket
from argparse import Namespace
from pathlib import Path

from voxtral_serve import keys
from voxtral_serve.check.report import Report


def check_gate(report: Report, values: Namespace) -> None:
    """Check the port and the key in `values`, vLLM's options. The key itself is never printed."""
    report.section("server")
    _check_port(report, values)
    _check_key(report, values)


def _check_port(report: Report, values: Namespace) -> None:
    host, port = values.host or "", values.port
    report.row("listens on", values.uds or f"{host or 'all addresses'}, port {port}")
    try:
        if not values.uds:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                # Without SO_REUSEPORT, which vLLM sets: it would start beside another vLLM and share its requests.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            report.problem(f"port {port} is in use: stop the process that listens on it, or choose another --port")
        else:
            report.problem(f"cannot listen on host {host or 'any'}, port {port}: {error.strerror or error}")


def _check_key(report: Report, values: Namespace) -> None:
    ours = (values.additional_config or {}).get("voxtral_serve", {})
    switch = ours.get("api_key") if isinstance(ours, dict) else ours
    if values.api_key:
        report.problem(
            "the option api_key is set, and vLLM logs its options: remove it. Set VLLM_API_KEY, or set "
            "VLLM_API_KEY_FILE to a file that contains the key"
        )
    elif switch not in (None, "none"):
        report.problem(f"additional_config: voxtral_serve: api_key is {switch!r}: set it to none, or remove it")
    elif keys.VARIABLE in os.environ:
        _check_keys(report, Path(os.environ[keys.VARIABLE]))
    elif os.environ.get("VLLM_API_KEY"):
        report.row("API key", "from the environment")
    elif switch == "none":
        report.row("API key", "none, as additional_config sets it")
    else:
        report.problem(
            "no API key: set VLLM_API_KEY, or set VLLM_API_KEY_FILE to a file that contains the key, or "
            "VOXTRAL_SERVE_KEYS to a file of several keys. To serve without a key, add "
            "`additional_config: {voxtral_serve: {api_key: none}}` to the config"
        )


def _check_keys(report: Report, file: Path) -> None:
    """The file of keys, as the guard reads it."""
    try:
        entries = keys.parsed(keys.content(file), str(file))
    except keys.KeysError as error:
        report.problem(str(error))
        return
    report.row("API keys", f"{len(entries)}, of {file}")
    if os.environ.get("VLLM_API_KEY"):
        report.problem(keys.BOTH)
