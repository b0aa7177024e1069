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
        description="Say whether `vllm serve` would start with this config and checkpoint. Starts no engine.",
    )
    command.add_argument("--config", type=Path, metavar="FILE", help="the YAML of `vllm serve --config`")
    command.add_argument(
        "model",
        nargs="?",
        type=Path,
        metavar="MODEL_DIR",
        help="the checkpoint's directory; by default the config's `model`, else the current directory",
    )
    given = parser.parse_args(arguments)

    # Warnings of vLLM and PyTorch are for a server's log.
    logging.disable(logging.WARNING)
    # Importing vLLM makes millions of objects that stay: looking for garbage among them takes 2 s of 9.
    gc.disable()
    from voxtral_serve import check

    report = check.check(given.config, given.model)
    print("\n".join((*report.lines, report.verdict())))
    return 1 if report.problems else 0


if __name__ == "__main__":
    main()
