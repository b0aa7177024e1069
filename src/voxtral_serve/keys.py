"""The file of API keys that VOXTRAL_SERVE_KEYS names: a YAML list of keys, each with a name and limits of its own.

    - name: billing                  # in the log and in metrics: 1 to 64 of A-Z a-z 0-9 . _ -
      key: 3f0c…                     # 16 or more printable ASCII characters without a space; or:
      sha256: 9a41…                  # SHA-256 of the key in hex; with both, that of `key`
      in_flight: 8                   # uploads and chats at a time
      live_sessions: 2               # live connections at a time
      audio_seconds_per_minute: 600  # seconds of audio, refilled continuously

A limit that is left out is none. No message has a key, or a value that might be one.
"""

import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped,unused-ignore]

VARIABLE = "VOXTRAL_SERVE_KEYS"
SHORTEST = 16  # characters of a key
SECRETS, LIMITS = ("key", "sha256"), ("in_flight", "live_sessions", "audio_seconds_per_minute")
FIELDS = ("name", *SECRETS, *LIMITS)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
KEY = re.compile(rf"[!-~]{{{SHORTEST},}}", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
BOTH = (
    f"{VARIABLE} is set, and so is vLLM's own key (--api-key, VLLM_API_KEY or VLLM_API_KEY_FILE): add that key to the "
    "file as an entry, and unset it here"
)


class Key(NamedTuple):
    """One entry. `digest` is the SHA-256 of the key; a limit is None where there is none."""

    name: str
    digest: bytes
    in_flight: int | None = None
    live_sessions: int | None = None
    audio_seconds_per_minute: int | None = None


class KeysError(ValueError):
    """The file of keys cannot be used. The message has the file, the entry and the field, and never a key."""


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has a field twice, of which YAML's own takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        fields = [each.value for each, _ in pairs if isinstance(each, yaml.ScalarNode)]
        if len(fields) != len(set(fields)):
            raise yaml.MarkedYAMLError(problem="a field is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def content(path: Path) -> bytes:
    """Of a file of keys. Raises KeysError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise KeysError(
            f"{VARIABLE} names {path}, which cannot be read ({error.strerror}): expected a YAML file of keys"
        ) from None


def parsed(content: bytes, file: str) -> tuple[Key, ...]:
    """The keys of a file's content; `file` is its name in messages. Raises KeysError."""
    try:
        entries = yaml.load(content, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        twice = ", where a field is given twice" if error.problem == "a field is given twice" else ""
        raise KeysError(f"{file} is not valid YAML{where}{twice}: expected a list of keys") from None
    except (yaml.YAMLError, AttributeError, RecursionError, TypeError, ValueError):  # of tags that do not fit
        raise KeysError(f"{file} is not valid YAML: expected a list of keys, in UTF-8") from None
    if not isinstance(entries, list) or not entries:
        raise KeysError(f"{file} holds {_kind(entries)}: expected a list of one or more keys, each with name and key")
    found: dict[str, Key] = {}
    for number, entry in enumerate(entries, 1):
        key = _entry(f"{file}, entry {number}", entry)
        if key.name in found:
            raise KeysError(f"{file}, entry {number}: its name is {key.name!r}, as another entry's: expected its own")
        if same := [name for name, each in found.items() if each.digest == key.digest]:
            raise KeysError(
                f"{file}, entry {number} ({key.name}): it has the key of {same[0]}: expected a key of its own"
            )
        found[key.name] = key
    return tuple(found.values())


def digest(key: bytes) -> bytes:
    """What is compared instead of keys."""
    return hashlib.sha256(key).digest()


def _entry(where: str, entry: Any) -> Key:
    if not isinstance(entry, dict):
        raise KeysError(f"{where} is {_kind(entry)}: expected a mapping with name and key")
    if unknown := [each for each in entry if each not in FIELDS]:
        raise KeysError(f"{where} has a field {_shown(unknown[0])}: expected some of {', '.join(FIELDS)}")
    name = entry.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise KeysError(
            f"{where}: its name is {_shown(name)}: expected text of 1 to 64 of A-Z a-z 0-9 . _ -, with a letter or a "
            "digit first"
        )
    where = f"{where} ({name})"
    limits = [_limit(where, field, entry[field]) if field in entry else None for field in LIMITS]
    return Key(name, _secret(where, entry), *limits)


def _secret(where: str, entry: dict[str, Any]) -> bytes:
    if not any(field in entry for field in SECRETS):
        raise KeysError(f"{where} has neither key nor sha256: expected at least one of them")
    key, given = (entry.get(field) for field in SECRETS)
    if "key" in entry and not (isinstance(key, str) and KEY.fullmatch(key)):
        raise KeysError(
            f"{where}: its key is {_kind(key)}: expected text of {SHORTEST} or more printable ASCII characters "
            "without a space; quote digits"
        )
    if "sha256" in entry and not (isinstance(given, str) and SHA256.fullmatch(given.lower())):
        raise KeysError(f"{where}: its sha256 is {_kind(given)}: expected text of 64 digits 0-9 a-f; quote digits")
    if isinstance(key, str):
        found = digest(key.encode())
        if isinstance(given, str) and bytes.fromhex(given) != found:
            raise KeysError(f"{where}: its sha256 is not that of its key: correct it, or leave one of them out")
        return found
    assert isinstance(given, str)
    return bytes.fromhex(given)


def _limit(where: str, field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise KeysError(f"{where}: its {field} is {_shown(value)}: expected a whole number of 1 or more")
    return value


def _kind(value: Any) -> str:
    """What a value is, without the value."""
    if value is None:
        return "empty"
    if isinstance(value, str):
        return f"text of {len(value)} characters" if value else "empty"
    return f"a {type(value).__name__}"


def _shown(value: Any) -> str:
    """The value, unless it is long enough to be a key."""
    text = ascii(value)
    return text if len(text) < SHORTEST and not isinstance(value, list | dict) else _kind(value)
