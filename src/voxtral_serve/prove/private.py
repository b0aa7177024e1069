"""What a report must not have: keys, paths, names of hosts. A report can be published as it is."""

import contextlib
import getpass
import json
import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PATH, HIDDEN = "[path]", "[hidden]"
# An absolute path, or one that begins with a dot or a tilde; not those of the API, and no fraction such as 3/4
PATHS = re.compile(
    r"(?<![\w:/.~\]])(?:[A-Za-z]:\\[^\s'\"]+|(?:\.{1,2}|~)?/(?!v1/|health|metrics|version)[^\s'\",;:()\[\]]+)"
)
URLS = re.compile(r"\b(?:https?|wss?)://[^\s'\",;)\]]+")
ADDRESSES = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)  # in an option's name
SHORTEST = 4  # characters of a name that is looked for in texts; shorter ones are parts of words


def secrets(urls: Iterable[str], keys: Iterable[str | None], paths: Iterable[Path | None]) -> list[str]:
    """What is hidden wherever it is, longest first: keys, hosts, paths as they were given and resolved, this machine's
    name, this user's."""
    found = {key for key in keys if key}
    found |= {urlsplit(url).hostname or "" for url in urls} | {socket.gethostname(), socket.getfqdn()}
    for path in (*paths, Path.home(), Path.cwd()):
        if path is not None:
            found |= {str(path), str(path.resolve())}
    with contextlib.suppress(KeyError, OSError):  # a user without a name, as in a container
        found.add(getpass.getuser())
    return sorted((each for each in found if len(each) >= SHORTEST and each != "root"), key=len, reverse=True)


def hidden(value: Any, names: Sequence[str]) -> Any:
    """The same JSON without what is private, in strings and in keys."""
    if isinstance(value, dict):
        return {hidden(key, names): hidden(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [hidden(each, names) for each in value]
    if not isinstance(value, str):
        return value
    for name in names:
        value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", HIDDEN, value)
    for pattern, instead in ((URLS, HIDDEN), (ADDRESSES, HIDDEN), (PATHS, PATH)):
        value = pattern.sub(instead, value)
    return value


def config(value: Any, name: str = "") -> Any:
    """A profile's content without the values of options that hold a secret, and without paths."""
    if isinstance(value, dict):
        return {str(key): config(each, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [config(each, name) for each in value]
    if isinstance(value, str):
        if SECRET.search(name):
            return HIDDEN
        if "/" in value or "\\" in value:
            return PATH
    return value


def options(arguments: Sequence[str]) -> list[str]:
    """Options of vllm serve in the same way: --name value, and --name=value."""
    found: list[str] = []
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name, mark, value = word.partition("=")
            found.append(name + mark + (_value(value, name) if mark else ""))
        else:
            found.append(_value(word, name))
    return found


def _value(word: str, name: str) -> str:
    """An option's value, which may be JSON."""
    with contextlib.suppress(ValueError):
        given = json.loads(word)
        if isinstance(given, dict | list):
            return json.dumps(config(given, name))
    return str(config(word, name))
