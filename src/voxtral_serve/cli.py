"""The command `voxtral-serve`."""

import argparse
import contextlib
import gc
import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from voxtral_serve.client.jobs import DELAYS_MS, FORMATS, LIVE_FORMATS, FilesJob, LiveJob


def main() -> NoReturn:
    """The console script. Ends the process without the 2 s that Python takes to unload vLLM and PyTorch."""
    status = 1
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # the reader of the output has closed it
    except KeyboardInterrupt:
        status = 130
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.flush()
    os._exit(status)


def run(arguments: list[str]) -> int:
    """Run a subcommand. Exit status: 0 if all is well, 1 if not; a wrong command line raises SystemExit(2)."""
    parser = argparse.ArgumentParser(prog="voxtral-serve", description="Voxtral speech-to-text served by vLLM.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check, transcribe = _add_check(commands), _add_transcribe(commands)
    deployment = {"replicas": _add_replicas(commands), "ready": _add_ready(commands), "drain": _add_drain(commands)}
    # The rest goes to vLLM's own parser, which knows each of its options by name.
    given, words = parser.parse_known_args(arguments)
    if given.command != "check" and words:
        {"transcribe": transcribe, **deployment}[given.command].error(f"unrecognized arguments: {' '.join(words)}")
    if given.command == "transcribe":
        return _transcribe(given, transcribe)
    if given.command == "replicas":
        return _replicas(given)
    if given.command in deployment:
        return _probe(given)
    return _check(given, words, arguments, check)


def _add_check(commands: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="report whether vLLM can serve a checkpoint on this machine, and how much memory that takes",
        usage="voxtral-serve check [--gate] [--config FILE] [MODEL_DIR] [OPTION OF VLLM SERVE ...]",
        description="Report whether `vllm serve` would start with these arguments. Starts no engine.",
        allow_abbrev=False,
    )
    command.add_argument("--config", type=Path, metavar="FILE", help="the YAML of `vllm serve --config`")
    command.add_argument(
        "--gate",
        action="store_true",
        help="also require a free port, and an API key or `api_key: none`, as the container does; print problems only, "
        "one line each, on stderr",
    )
    return command


def _check(given: argparse.Namespace, words: list[str], arguments: list[str], command: argparse.ArgumentParser) -> int:
    if any(word.startswith("--config=") for word in arguments):
        command.error("write `--config FILE`: vLLM ignores `--config=FILE`")

    if given.gate and words and not words[0].startswith("-") and arguments[arguments.index("--gate") + 1] != words[0]:
        command.error(f"{words[0]} must come before --config; otherwise vLLM uses the config's model")

    # Warnings of vLLM and PyTorch are for a server's log.
    logging.disable(logging.WARNING)
    # Importing vLLM makes millions of objects that stay: looking for garbage among them takes 2 s of 9.
    gc.disable()
    from voxtral_serve.check import check_all

    report = check_all(given.config, None, words, given.gate)
    if given.gate:
        print("\n".join(report.refusals() or [f"voxtral-serve: {report.verdict()}"]), file=sys.stderr)
    else:
        print("\n".join((*report.lines, report.verdict())))
    return 1 if report.problems else 0


def _add_transcribe(commands: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        "transcribe",
        help="send audio files, or a microphone, to a server that is up",
        usage="voxtral-serve transcribe FILE... [--out DIR] [OPTION ...]\n"
        "       voxtral-serve transcribe --live [FILE] [--out DIR] [--format text|srt] [--delay MS] [OPTION ...]",
        description="Transcribe files, and the audio files in folders, with a server that is up. The server's key is "
        "in the environment variable OPENAI_API_KEY. Exit status: 0; 1 if something failed; 2 for arguments that "
        "cannot be used; 130 for Ctrl-C.",
        allow_abbrev=False,
    )
    add = command.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="audio file, or folder with audio files")
    add("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    add("--format", choices=tuple(FORMATS), default="text", help="format of the transcripts (default: %(default)s)")
    out = "write NAME.txt, .json, .srt or .vtt to DIR and skip those that exist (default: print the transcripts)"
    add("--out", type=Path, metavar="DIR", help=out)
    add("--again", action="store_true", help="with --out: transcribe files again whose transcripts exist")
    add("--model", metavar="NAME", help="model to request (default: the first that the server lists)")
    add("--language", metavar="CODE", help="such as en, for models that take a language")
    add("--jobs", type=int, default=4, metavar="N", help="files in flight at a time (default: %(default)s)")
    live = "print words as they arrive, from the microphone or from one file; Ctrl-C ends the audio"
    add("--live", action="store_true", help=live)
    delay = "with --live: how far the text is behind the speech: %(choices)s ms (default: the server's)"
    add("--delay", type=int, choices=DELAYS_MS, metavar="MS", help=delay)
    return command


def _transcribe(given: argparse.Namespace, command: argparse.ArgumentParser) -> int:
    if given.live:
        if len(given.files) > 1:
            command.error("--live takes one FILE, or none for the microphone")
        for name in ("language", "jobs"):
            if getattr(given, name) != command.get_default(name):
                command.error(f"--{name} is not for --live")
        if given.format not in LIVE_FORMATS:
            command.error(f"--format {given.format} is not for --live, which has {' and '.join(LIVE_FORMATS)}")
    elif not given.files:
        command.error("name a FILE, or --live for the microphone")
    elif given.delay is not None:
        command.error("--delay is for --live")
    if given.again and not given.out:
        command.error("--again: only with --out")
    if given.jobs < 1:
        command.error(f"--jobs {given.jobs}: must be at least 1")
    try:
        # They need packages that a server does without.
        if given.live:
            from voxtral_serve.client import live
        else:
            from voxtral_serve.client import transcribe
    except ImportError as error:
        print(
            f"voxtral-serve: transcribe needs the package {error.name}: pip install 'voxtral-serve[client]'",
            file=sys.stderr,
        )
        return 2
    if given.live:
        return live.run(
            LiveJob(
                path=given.files[0] if given.files else None,
                url=given.url,
                form=given.format,
                out=given.out,
                again=given.again,
                model=given.model,
                delay_ms=given.delay,
            )
        )
    return transcribe.run(
        FilesJob(
            paths=tuple(given.files),
            url=given.url,
            form=given.format,
            out=given.out,
            again=given.again,
            model=given.model,
            language=given.language,
            in_flight=given.jobs,
        )
    )


def _add_replicas(commands: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        "replicas",
        help="print a compose file with one server for each GPU, and nginx in front",
        usage="voxtral-serve replicas --gpus 0,1,2 [--config FILE] [--tls] > compose.replicas.yaml",
        description="Print a compose file made of the current directory's compose.yaml: one server for each GPU, and "
        "nginx in front on port 8000.",
        allow_abbrev=False,
    )
    add = command.add_argument
    add("--gpus", required=True, metavar="LIST", help="indices, or ids as `nvidia-smi -L` prints them, with commas")
    profile = "the profile, a path in the image (default: %(default)s)"
    add("--config", default="/profiles/fast.yaml", metavar="FILE", help=profile)
    add("--tls", action="store_true", help="also listen on port 443, with the files tls.crt and tls.key")
    return command


def _replicas(given: argparse.Namespace) -> int:
    from voxtral_serve.deploy.compose import ComposeError, compose, gpu_ids

    try:
        print(compose(Path(), gpu_ids(given.gpus), given.config, given.tls), end="")
    except ComposeError as error:
        print(f"voxtral-serve: {error}", file=sys.stderr)
        return 1
    return 0


def _add_ready(commands: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        "ready",
        help="a probe for the server's container: whether it has transcribed a clip",
        description="Exit with status 0 if the server answers /health and has transcribed one clip since its start. "
        "The key is that of the server, in VLLM_API_KEY or VLLM_API_KEY_FILE.",
        allow_abbrev=False,
    )
    _add_probe(command)
    command.add_argument(
        "--seen", type=Path, default=Path("/tmp/voxtral-ready"), help="keeps that it has (%(default)s)"
    )
    return command


def _add_drain(commands: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        "drain",
        help="wait in the server's container until its live sessions have ended",
        description="Wait until the server has no live session. Exit status: 1 if some are left.",
        allow_abbrev=False,
    )
    _add_probe(command)
    command.add_argument(
        "--within", type=float, default=3600, metavar="S", help="seconds to wait (default: %(default)s)"
    )
    return command


def _add_probe(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")


def _probe(given: argparse.Namespace) -> int:
    from voxtral_serve.deploy import probe

    if given.command == "drain":
        return 1 if probe.drain(given.url, given.within) else 0
    try:
        probe.ready(given.url, given.seen, probe.api_key(os.environ))
    except probe.NotReadyError as error:
        print(f"voxtral-serve: not ready: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()
