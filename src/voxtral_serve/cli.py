"""The command `voxtral-serve`."""

import argparse
import gc
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """The console script. Ends the process without the 2 s that Python takes to unload vLLM and PyTorch."""
    status = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(arguments: list[str]) -> int:
    """Run a subcommand. Exit status: 0 if all is well, 1 if not; a wrong command line raises SystemExit(2)."""
    parser = argparse.ArgumentParser(prog="voxtral-serve", description="Voxtral speech-to-text served by vLLM.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "check",
        help="say whether vLLM can serve a checkpoint here, and with how much memory",
        usage="voxtral-serve check [--gate] [--config FILE] [MODEL_DIR] [OPTION OF VLLM SERVE ...]",
        description="Say whether `vllm serve` would start with these arguments, which are its own. Starts no engine.",
        allow_abbrev=False,
    )
    command.add_argument("--config", type=Path, metavar="FILE", help="the YAML of `vllm serve --config`")
    command.add_argument(
        "--gate",
        action="store_true",
        help="as the container does before its start: the port must be free, an API key set or switched off by name; "
        "prints problems only, each in one line on stderr",
    )
    # The rest goes to vLLM's own parser, which knows each of its options by name.
    given, words = parser.parse_known_args(arguments)
    if any(word.startswith("--config=") for word in arguments):
        command.error("write `--config FILE`: vLLM passes over `--config=FILE`")

    if given.gate and words and not words[0].startswith("-") and arguments[arguments.index("--gate") + 1] != words[0]:
        command.error(f"{words[0]} must come before --config, or vLLM takes the config's model")

    # Warnings of vLLM and PyTorch are for a server's log.
    logging.disable(logging.WARNING)
    # Importing vLLM makes millions of objects that stay: looking for garbage among them takes 2 s of 9.
    gc.disable()
    from voxtral_serve import check

    report = check.check(given.config, None, words, given.gate)
    if given.gate:
        print("\n".join(report.refusals() or [f"voxtral-serve: {report.verdict()}"]), file=sys.stderr)
    else:
        print("\n".join((*report.lines, report.verdict())))
    return 1 if report.problems else 0


if __name__ == "__main__":
    main()
