"""The options of `vllm serve`. vLLM's own parser reads them from the config file and the command line."""

import difflib
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped,unused-ignore]

from voxtral_serve import shims
from voxtral_serve.check import synthesis
from voxtral_serve.check.device import Device
from voxtral_serve.check.report import ConfigError, Report
from voxtral_serve.engine.names import DRAFTER, ENCODE_ONCE

# Where vLLM's parser is, in 0.20.0, in 0.32.0 and in 0.33.0
PARSER_MODULES = (
    "vllm.entrypoints.openai.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.common.cli_args",
)


WITHOUT_DRAFTER = "0.20.0"  # of vLLM: profiles with a drafter are served without drafts


@dataclass(frozen=True)
class ServeOptions:
    """All options of `vllm serve`. An option that is not set has vLLM's default."""

    values: Namespace  # as vLLM's parser makes it
    named: frozenset[str]  # options that the config or the command line sets
    valid: bool  # whether vLLM accepts all options; `values` has only those that it accepts
    device: Device | None = None  # the GPU to check for; None for the one of this machine

    @property
    def encode_once(self) -> bool:
        """Whether the options select the encode-once model."""
        overrides: object = self.values.hf_overrides
        return overrides == {"architectures": [ENCODE_ONCE]}


def read_options(
    report: Report, path: Path | None, words: Sequence[str] = (), device: Device | None = None
) -> ServeOptions | None:
    """The options as `vllm serve` reads them from the config at `path`, and from `words` of its command line.

    Each option is parsed alone, so that each invalid option is reported. Returns None if the config cannot be read.
    """
    report.section("config")
    report.row("file", "none: vLLM's defaults" if path is None else str(path))
    try:
        parser = vllm_parser(synthesis.OMNI in words)
        flat = [] if path is None else _flatten(parser, path)
    except ConfigError as error:
        report.problem(str(error))
        return None
    except shims.PatchError:  # reported under "patches"; vLLM's parser loads the plugins
        report.row("not read", "vLLM ends before it reads the config: see patches")
        return None
    except Exception as error:  # vLLM or vLLM-Omni cannot be imported
        report.problem(f"vLLM cannot be imported: {type(error).__name__}: {error}")
        return None
    accepted: list[str] = []
    named: set[str] = set()
    valid = True
    for source, part in _in_order(path, flat, words):
        name = part[0].lstrip("-").partition("=")[0].replace("-", "_") if is_option(part[0]) else ""
        where = f"{source}: " if source else "command line: "
        try:
            alone = parser.parse_args(part)
        except (ConfigError, ValueError) as error:
            report.problem(where + _why(parser, name, str(error)))
            valid = False
            continue
        if source and alone.model_tag is not None:
            report.problem(f"{where}{name} has several values, and vLLM takes the last one as the model: set one value")
            valid = False
            continue
        accepted += part
        named.add(name)
    values = parser.parse_args(accepted)
    unknown = _unknown_speculation(values.speculative_config)
    for problem in unknown:
        report.problem(problem)
    return ServeOptions(values, frozenset(named), valid and not unknown, device)


def _in_order(path: Path | None, flat: Sequence[str], words: Sequence[str]) -> list[tuple[Path | None, list[str]]]:
    """Each option with its source (None: the command line), in vLLM's order: the model, the config, the rest.

    The model comes first, because the config's last option may take the words that follow it as its values.
    """
    of_words = _parts(words)
    lead = 1 if words and not is_option(words[0]) else 0
    return [
        *((None, part) for part in of_words[:lead]),
        *((path, part) for part in _parts(flat)),
        *((None, part) for part in of_words[lead:]),
    ]


def _unknown_speculation(speculative_config: Any) -> list[str]:
    """A problem for each unknown option of speculative_config. vLLM's parser does not check these; its engine does."""
    from vllm.config import SpeculativeConfig

    if version("vllm") == WITHOUT_DRAFTER and (speculative_config or {}).get("model") == DRAFTER:
        return []  # a patch leaves out the whole of it
    known = {field.name for field in fields(SpeculativeConfig)}
    return [
        f"speculative_config: {name} is not an option of vllm {version('vllm')}{_instead(name, known)}"
        for name in speculative_config or {}
        if name not in known
    ]


def is_option(word: str) -> bool:
    """Whether a word of a command line is the name of an option, rather than a value or the model."""
    return re.match(r"--|-[A-Za-z]", word) is not None


def _parts(words: Sequence[str]) -> list[list[str]]:
    """Each option with its values, preceded by the words before the first option."""
    starts = sorted({0, *(index for index, word in enumerate(words) if is_option(word)), len(words)})
    return [list(words[start:end]) for start, end in pairwise(starts)]


def vllm_parser(omni: bool = False) -> Any:
    """The argument parser of `vllm serve`, or of `vllm serve --omni`. It raises ConfigError instead of an exit."""
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if current_platform.is_unspecified():
        raise ConfigError(
            f"no GPU: vLLM {version('vllm')} finds no device that it was built for. In a container, use "
            "`docker run --gpus all`, or `podman run --device nvidia.com/gpu=all`"
        )

    class Parser(FlexibleArgumentParser):  # type: ignore[misc,unused-ignore]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(message)

    if omni:
        return synthesis.make_parser(Parser)
    for place in PARSER_MODULES:
        try:
            module = import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise
        else:
            return module.make_arg_parser(Parser())
    raise ConfigError(
        f"cannot find the option parser of vLLM {version('vllm')} in {' or '.join(PARSER_MODULES)}: install a "
        "tested version"
    )


def _flatten(parser: Any, path: Path) -> list[str]:
    """The command line that vLLM makes of a config file. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: expected a YAML file for `vllm serve --config`")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} contains {type(content).__name__}, expected options as `name: value`")
    if names := [name for name in content if not isinstance(name, str)]:
        raise ConfigError(f"{path}: {names[0]!r} is not an option name, expected text")
    try:
        flat: list[str] = parser.load_config_file(str(path))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return flat


def _why(parser: Any, name: str, message: str) -> str:
    """The text of a problem, from argparse's `message` about the option `name`."""
    stray = message.partition("unrecognized arguments: ")[2]
    if stray and not is_option(stray):
        return f"{stray}: unexpected value" + (f" after {name}" if name else "")
    if not stray:
        return f"{name}: {message.partition(': ')[2] or message}"
    known = {option.removeprefix("--").replace("-", "_") for option in parser._option_string_actions}
    return f"{name} is not an option of vllm serve {version('vllm')}{_instead(name.replace('-', '_'), known)}"


def _instead(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
