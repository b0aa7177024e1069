"""What a server on a network needs at its start: a free port, and an API key or the setting that there is none."""

import errno
import os
import socket
from argparse import Namespace

from voxtral_serve.check.report import Report


def check_gate(report: Report, values: Namespace) -> None:
    """Check the port and the key in `values`, vLLM's options. The key itself is never printed."""
    report.section("server")
    _check_port(report, values)
    _check_key(report, values)


def _check_port(report: Report, values: Namespace) -> None:
    host, port = values.host or "", values.port
    report.row("listens at", values.uds or f"{host or 'all addresses'}, port {port}")
    try:
        if not values.uds:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                # Without SO_REUSEPORT, which vLLM sets: it would start beside another vLLM and share its requests.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            report.problem(f"port {port} is taken: end what listens there, or give another with --port")
        else:
            report.problem(f"nothing can listen at host {host or 'any'}, port {port}: {error.strerror or error}")


def _check_key(report: Report, values: Namespace) -> None:
    ours = (values.additional_config or {}).get("voxtral_serve", {})
    switch = ours.get("api_key") if isinstance(ours, dict) else ours
    if values.api_key:
        report.problem(
            "api_key is an option's value, which vLLM writes into its log: give it as VLLM_API_KEY, or in a file that "
            "VLLM_API_KEY_FILE names"
        )
    elif switch not in (None, "none"):
        report.problem(f"additional_config: voxtral_serve: api_key is {switch!r}, expected none, or no such line")
    elif os.environ.get("VLLM_API_KEY"):
        report.row("API key", "from the environment")
    elif switch == "none":
        report.row("API key", "none: additional_config says so")
    else:
        report.problem(
            "no API key: set VLLM_API_KEY, or VLLM_API_KEY_FILE to a file that holds it; to serve whoever asks, write "
            "`additional_config: {voxtral_serve: {api_key: none}}` into the config"
        )
