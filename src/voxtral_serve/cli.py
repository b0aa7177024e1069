"""The command `voxtral-serve`."""

import argparse
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from voxtral_serve import __version__
from voxtral_serve.batch.job import PATIENCE_S, SUBTITLES, BatchJob
from voxtral_serve.client.jobs import DELAYS_MS, FORMATS, LIVE_FORMATS, FilesJob, LiveJob
from voxtral_serve.draft.job import TrainJob
from voxtral_serve.prove.job import OUT, ProveJob
from voxtral_serve.speakers import MOST as MOST_SPEAKERS


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


class Call(NamedTuple):
    """A command line: the options of its subcommand, and the words that are options of `vllm serve`."""

    given: argparse.Namespace
    serve: list[str]
    parser: argparse.ArgumentParser  # of the subcommand; its `error` ends the process with status 2
    words: list[str]  # all of the command line


def run(arguments: list[str]) -> int:
    """Run a subcommand. Exit status: 0 if all is well, 1 if not; a wrong command line raises SystemExit(2)."""
    parser = argparse.ArgumentParser(prog="voxtral-serve", description="Voxtral speech-to-text served by vLLM.")
    parser.add_argument("--version", action="version", version=f"voxtral-serve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {name: add(commands) for name, (add, _) in COMMANDS.items()}
    own, serve = arguments, list[str]()
    if arguments[:1] in (["batch"], ["draft"], ["prove"]) and "--" in arguments:
        mark = arguments.index("--")
        own, serve = arguments[:mark], arguments[mark + 1 :]
    given, unknown = parser.parse_known_args(own)
    if given.command == "check":
        serve = unknown  # vLLM's own parser knows each of its options by name
    elif unknown:
        parsers[given.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    _, begin = COMMANDS[given.command]
    return begin(Call(given, serve, parsers[given.command], arguments))


def _add_check(commands: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="report whether vLLM can serve a checkpoint on this machine, and how much memory that takes",
        usage="voxtral-serve check [--gate] [--gpu GIB] [--config FILE] [MODEL_DIR] [OPTION OF VLLM SERVE ...]",
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
    gpu = "compute for a GPU with so much memory, in GiB as nvidia-smi has it: 22.5 for an L4, 15 for a GPU of 16 GB"
    command.add_argument("--gpu", type=float, metavar="GIB", help=gpu)
    return command


def _check(call: Call) -> int:
    given, serve, words = call.given, call.serve, call.words
    if any(word.startswith("--config=") for word in words):
        call.parser.error("write `--config FILE`: vLLM ignores `--config=FILE`")
    if given.gate and serve and not serve[0].startswith("-") and words[words.index("--gate") + 1] != serve[0]:
        call.parser.error(f"{serve[0]} must come before --config; otherwise vLLM uses the config's model")
    if given.gpu is not None and (given.gate or not 1 <= given.gpu <= 1024):
        call.parser.error(f"--gpu {given.gpu:g}: expected 1 to 1024 GiB, and no --gate, which is for this machine")
    # Warnings of vLLM and PyTorch are for a server's log.
    logging.disable(logging.WARNING)
    # Importing vLLM makes millions of objects that stay: looking for garbage among them takes 2 s of 9.
    gc.disable()
    from voxtral_serve.check import check_all, other_gpu

    device = None if given.gpu is None else other_gpu(given.gpu)
    report = check_all(given.config, None, serve, given.gate, device)
    if given.gate:
        print("\n".join(report.refusals() or [f"voxtral-serve: {report.verdict()}"]), file=sys.stderr)
    else:
        print("\n".join((*report.lines, report.verdict())))
    return 1 if report.problems else 0


def _lacks(command: str, error: ImportError, extra: str) -> int:
    """Exit status 2: a package of an extra is not installed."""
    what = f"{command} needs the package {error.name}: pip install 'voxtral-serve[{extra}]'"
    print(f"voxtral-serve: {what}", file=sys.stderr)
    return 2


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
    _add_speakers(command)
    add("--jobs", type=int, default=4, metavar="N", help="files in flight at a time (default: %(default)s)")
    live = "print words as they arrive, from the microphone or from one file; Ctrl-C ends the audio"
    add("--live", action="store_true", help=live)
    _add_delay(command)
    _add_keywords(command)
    return command


def _transcribe(call: Call) -> int:
    given, command = call.given, call.parser
    if given.live:
        if len(given.files) > 1:
            command.error("--live takes one FILE, or none for the microphone")
        for name in ("language", "speakers", "jobs"):
            if getattr(given, name) != command.get_default(name):
                command.error(f"--{name} is not for --live")
        if given.format not in LIVE_FORMATS:
            command.error(f"--format {given.format} is not for --live, which has {' and '.join(LIVE_FORMATS)}")
    elif not given.files:
        command.error("name a FILE, or --live for the microphone")
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
        return _lacks("transcribe", error, "client")
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
                keywords=tuple(given.keyword),
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
            speakers=given.speakers,
            delay_ms=given.delay,
            keywords=tuple(given.keyword),
            in_flight=given.jobs,
        )
    )


def _add_delay(command: argparse.ArgumentParser) -> None:
    what = "of the text behind the speech: %(choices)s ms; a longer one has fewer errors, as Mistral reports "
    what += "(default: the server's)"
    command.add_argument("--delay", type=int, choices=DELAYS_MS, metavar="MS", help=what)


def _add_keywords(command: argparse.ArgumentParser) -> None:
    what = "word or phrase to prefer where the audio allows it, such as a name; repeatable, at most 100"
    command.add_argument("--keyword", action="append", default=[], metavar="PHRASE", help=what)


def _add_speakers(command: argparse.ArgumentParser) -> None:
    what = "label who says what; N is the number of speakers, if it is known. Name the files before it"
    command.add_argument("--speakers", type=_speakers, nargs="?", const=0, metavar="N", help=what)


def _speakers(word: str) -> int:
    """The number of speakers in a command line. Raises argparse.ArgumentTypeError."""
    if not (word.isascii() and word.isdigit() and len(word) < 3 and 1 <= int(word) <= MOST_SPEAKERS):
        told = f"{word!r} is not a number of speakers: expected 1 to {MOST_SPEAKERS}, or files before --speakers"
        raise argparse.ArgumentTypeError(told)
    return int(word)


def _add_batch(commands: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        "batch",
        help="transcribe an archive: a manifest or a folder, with one engine for each GPU, resumable",
        usage="voxtral-serve batch MANIFEST --out URI --config FILE [OPTION ...] [-- OPTION OF VLLM SERVE ...]\n"
        "       voxtral-serve batch MANIFEST --out URI --url URL [--url URL ...] [OPTION ...]",
        description="Transcribe the files of a manifest (.jsonl or .parquet with audio_filepath), or of a folder, with "
        "Ray Data. Results are Parquet and JSON lines. MANIFEST, URI and the files are paths, or URIs such as "
        "s3://bucket/name. "
        "Run the same command again to go on after an interruption. The key of servers at --url is in the environment "
        "variable OPENAI_API_KEY. Exit status: 0; 1 if rows failed or the job stopped; 2 for arguments that cannot be "
        "used; 130 for Ctrl-C.",
        allow_abbrev=False,
    )
    add = command.add_argument
    add("manifest", metavar="MANIFEST", help="what to transcribe")
    add("--out", required=True, metavar="URI", help="folder for the results")
    add("--config", type=Path, metavar="FILE", help="the YAML of `vllm serve --config`, for engines that it starts")
    add("--dir", type=Path, default=Path(), metavar="DIR", help="the checkpoint's directory (default: the current one)")
    add("--engines", type=int, metavar="N", help="engines to start (default: one for each GPU that Ray finds)")
    add("--url", action="append", default=[], metavar="URL", help="use this server, and start none; repeatable")
    add("--model", metavar="NAME", help="model to request (default: the first that a server lists)")
    add("--language", metavar="CODE", help="such as en, for models that take a language")
    _add_speakers(command)
    _add_delay(command)
    _add_keywords(command)
    in_flight = "requests in flight at each server (default: the config's max_num_seqs, or 16; 4 with --speakers)"
    add("--in-flight", type=int, metavar="N", help=in_flight)
    rows = "rows of a file of results, which are done together (default: 16 to 1024, by the manifest's length)"
    add("--rows-per-file", type=int, metavar="N", help=rows)
    add("--subtitles", default="", metavar="FORMS", help="also write subtitles: srt, vtt, or srt,vtt")
    patience = "seconds to wait for a server or a storage that does not answer (default: %(default).0f)"
    add("--patience", type=float, default=PATIENCE_S, metavar="S", help=patience)
    add("--address", metavar="ADDRESS", help="a Ray cluster, such as auto (default: this machine alone)")
    return command


def _batch(call: Call) -> int:
    given, command = call.given, call.parser
    if bool(given.url) == bool(given.config):
        command.error("name either --config, to start engines, or --url, for servers that are up")
    if given.url and (call.serve or given.engines is not None or given.dir != Path()):
        command.error("--dir, --engines and options of vllm serve are for engines that it starts, not for --url")
    for name in ("engines", "in_flight", "rows_per_file"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            command.error(f"--{name.replace('_', '-')} {getattr(given, name)}: must be at least 1")
    subtitles = tuple(filter(None, given.subtitles.split(",")))
    if set(subtitles) - set(SUBTITLES):
        command.error(f"--subtitles {given.subtitles}: expected {', '.join(SUBTITLES)} or both with a comma")
    try:
        from voxtral_serve.batch import run as batch
    except ImportError as error:
        return _lacks("batch", error, "batch")
    return batch.run(
        BatchJob(
            manifest=given.manifest,
            out=given.out,
            urls=tuple(given.url),
            config=given.config,
            directory=given.dir,
            engines=given.engines,
            arguments=tuple(call.serve),
            model=given.model,
            language=given.language,
            speakers=given.speakers,
            delay_ms=given.delay,
            keywords=tuple(given.keyword),
            in_flight=given.in_flight,
            rows_per_file=given.rows_per_file,
            subtitles=subtitles,
            patience_s=given.patience,
            address=given.address,
        )
    )


def _add_prove(commands: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        "prove",
        help="the acceptance run: whether a server on your GPU and weights does what it should, as a report to share",
        usage="voxtral-serve prove --serve PROFILE --model DIR [OPTION ...] [-- OPTION OF VLLM SERVE ...]\n"
        "       voxtral-serve prove --url URL [OPTION ...]",
        description="Measure a server in about ten minutes, and write report.html and report.json, without audio, "
        "texts, keys, paths and names of hosts. --serve starts `vllm serve`, and stops it. The key of a server at "
        "--url is in the environment variable OPENAI_API_KEY. Exit status: 0; 1 if a part failed; 2 for arguments that "
        "cannot be used; 130 for Ctrl-C.",
        allow_abbrev=False,
    )
    add = command.add_argument
    add("--serve", type=Path, metavar="PROFILE", help="the YAML of `vllm serve --config`, to start a server")
    add("--model", type=Path, metavar="DIR", help="with --serve: the checkpoint's directory")
    add("--url", metavar="URL", help="use this server, and start none")
    add("--clips", type=Path, metavar="MANIFEST", help="your clips: JSON lines with path and, for WER, text")
    add("--out", type=Path, default=OUT, metavar="DIR", help="folder for the reports (default: %(default)s)")
    texts = "put the texts of clips into the reports (default: none)"
    add("--with-texts", action="store_true", help=texts)
    random = "the weights are random: skip the parts that need words (with --serve, this is detected)"
    add("--random-weights", action="store_true", help=random)
    add("--quick", action="store_true", help="few clips and short sessions, for CI")
    return command


def _prove(call: Call) -> int:
    given, command = call.given, call.parser
    if bool(given.url) == bool(given.serve):
        command.error("name either --serve, to start a server, or --url, for one that is up")
    if given.serve and not given.model:
        command.error("--serve needs --model, the checkpoint's directory")
    if given.url and (given.model or call.serve):
        command.error("--model and options of vllm serve are for --serve, not for --url")
    for name, path in (("serve", given.serve), ("model", given.model)):
        if path and not path.exists():
            command.error(f"--{name} {path} does not exist")
    try:
        from voxtral_serve.prove.run import run as prove
    except ImportError as error:
        return _lacks("prove", error, "prove")
    return prove(
        ProveJob(
            url=given.url,
            profile=given.serve,
            directory=given.model,
            arguments=tuple(call.serve),
            clips=given.clips,
            out=given.out,
            random_weights=given.random_weights,
            quick=given.quick,
            with_texts=given.with_texts,
        )
    )


def _add_draft(commands: Any) -> argparse.ArgumentParser:
    draft = commands.add_parser("draft", help="train the drafter, which makes transcripts faster", allow_abbrev=False)
    command: argparse.ArgumentParser = draft.add_subparsers(required=True, metavar="train").add_parser(
        "train",
        usage="voxtral-serve draft train --clips PATH... --checkpoint DIR [OPTION ...] [-- OPTION OF VLLM SERVE ...]",
        description="Train a drafter for a checkpoint from recordings without transcripts, on this machine's GPU, and "
        "print a table of what it is worth. Run the same command again to go on after an interruption. Exit status: 0; "
        "2 for arguments or recordings that cannot be used; 130 for Ctrl-C.",
        allow_abbrev=False,
    )
    add = command.add_argument
    clips = "folders with recordings, recordings, or manifests (.jsonl with audio_filepath)"
    add("--clips", type=Path, nargs="+", required=True, metavar="PATH", help=clips)
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="the checkpoint's directory")
    add("--hours", type=float, metavar="N", help="of audio to train on (default: all)")
    held_out = "recordings to judge by (default: some of --clips)"
    add("--held-out", type=Path, nargs="+", default=[], metavar="PATH", help=held_out)
    add("--out", type=Path, metavar="FILE", help="the drafter (default: draft/head.safetensors in DIR)")
    add("--work", type=Path, metavar="DIR", help="folder for audio rows (default: `work` beside the drafter)")
    add("--replace", action="store_true", help="replace a drafter that exists")
    return command


def _draft(call: Call) -> int:
    given, command = call.given, call.parser
    if given.hours is not None and not given.hours > 0:
        command.error(f"--hours {given.hours}: must be more than 0")
    # Their warnings would hide the progress. They are read when vLLM is imported, also in its processes.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        from voxtral_serve.draft.run import run as train
    except ImportError as error:
        return _lacks("draft", error, "gpu")
    return train(
        TrainJob(
            clips=tuple(given.clips),
            checkpoint=given.checkpoint,
            out=given.out,
            work=given.work,
            held_out=tuple(given.held_out),
            hours=given.hours,
            replace=given.replace,
            arguments=tuple(call.serve),
        )
    )


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


def _ready(call: Call) -> int:
    from voxtral_serve.deploy import probe

    try:
        probe.ready(call.given.url, call.given.seen, probe.api_key(os.environ))
    except probe.NotReadyError as error:
        print(f"voxtral-serve: not ready: {error}", file=sys.stderr)
        return 1
    return 0


def _drain(call: Call) -> int:
    from voxtral_serve.deploy import probe

    return 1 if probe.drain(call.given.url, call.given.within) else 0


# The subcommands: what adds the parser of each, and what runs it.
COMMANDS: dict[str, tuple[Callable[[Any], argparse.ArgumentParser], Callable[[Call], int]]] = {
    "check": (_add_check, _check),
    "transcribe": (_add_transcribe, _transcribe),
    "batch": (_add_batch, _batch),
    "prove": (_add_prove, _prove),
    "draft": (_add_draft, _draft),
    "ready": (_add_ready, _ready),
    "drain": (_add_drain, _drain),
}

if __name__ == "__main__":
    main()
