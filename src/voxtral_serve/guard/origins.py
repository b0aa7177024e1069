"""Which web pages may use the server, by the header `Origin`: browsers send it with each POST and each WebSocket.

Clients that are no browsers send none and are not concerned. A page may use the server whose page it is: its `Origin`
has the `Host` that was asked. That is also true of a page of evil.example if that name's owner gives it the address of
this server afterwards (DNS rebinding), so a server without keys takes its own pages by names only that no stranger
owns: IP addresses, localhost, those of the machine, and hosts of VOXTRAL_SERVE_LIVE_ORIGINS.
"""

import functools
import ipaddress
import re
import socket
from collections.abc import Mapping

from voxtral_serve.guard.errors import RefusedError

ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/\s]+)")
HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")
OWN_PORTS = {"http": 80, "https": 443}


def check(headers: Mapping[bytes, bytes], allowed: frozenset[str], keyless: bool) -> None:
    """Raises RefusedError for a page that is neither of this server nor of the origins `allowed`.

    `keyless` says that the server asks for no key.
    """
    origin = headers.get(b"origin", b"").decode("latin-1").lower()
    if not origin or "*" in allowed or origin in allowed:
        return
    host = headers.get(b"host", b"").decode("latin-1").lower()
    shown = f"the web page {ascii(origin)[1:-1][:80]} may not use this server at {ascii(host)[1:-1][:80]}"
    page = ORIGIN.fullmatch(origin)
    # Browsers leave out a scheme's own port; some proxies add it.
    if page is None or host.removesuffix(f":{OWN_PORTS.get(page[1])}") != page[2]:
        raise RefusedError(
            403,
            f"{shown}, which allows its own pages, if a proxy before it passes Host on, and those of "
            "VOXTRAL_SERVE_LIVE_ORIGINS",
            "origin_not_allowed",
        )
    if keyless and not _is_own(host, allowed):
        raise RefusedError(
            403,
            f"{shown}: a server without keys allows pages at its IP addresses, localhost and the machine's name, and "
            "those of VOXTRAL_SERVE_LIVE_ORIGINS. Add the page's origin there, or set a key",
            "origin_not_allowed",
        )


def _is_own(host: str, allowed: frozenset[str]) -> bool:
    """Whether no stranger owns the name in a Host header."""
    name = _name(host)
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        hosts = {_name(origin.partition("://")[2]) for origin in allowed}
        return name == "localhost" or name.endswith(".localhost") or name in own_names() | hosts
    return True


def _name(host: str) -> str:
    """The name in `name:port`, empty if there is none."""
    found = HOST.fullmatch(host)
    return found[1].removesuffix(".") if found else ""


@functools.cache
def own_names() -> frozenset[str]:
    """The names of this machine. The first call may ask a name server for seconds."""
    name = socket.gethostname().lower()
    return frozenset({name, f"{name}.local", socket.getfqdn().lower()})
