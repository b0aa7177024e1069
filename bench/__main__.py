"""The command line: `python -m bench run|serve|report|compare|matrix ...`.

Exit status: 0 all clips completed; 1 a request failed or is missing; 2 a mistake in the usage or the data,
or no server; 130 stopped by Ctrl-C.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import BenchError, client, compare, loads, matrix, report, results, serve
from bench.run import check, claim, measure


def main(arguments: Sequence[str] | None = None) -> int:
    flags = _parse(arguments)
    try:
        if flags.command == "serve":
            serve.stay_up(flags.config, flags.dir, flags.port)
            return 0
        if flags.command == "compare":
            return compare.main(flags)
        if flags.command == "matrix":
            return matrix.main(flags, _parse, _run)
        interrupted = flags.command == "run" and _run(flags)
        summary, rows = report.score(flags.out)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted; there is nothing new to score.", file=sys.stderr)
        return 130
    print(report.console(flags.out, summary, rows))
    complete = summary["completed"] == summary["samples"]
    if not complete:
        print("To send what failed or is missing, add --resume to the `bench run` command.", file=sys.stderr)
    return 130 if interrupted else int(not complete)


def _run(flags: argparse.Namespace) -> bool:
    if flags.serve is None:
        return measure(flags)
    check(flags)  # before vLLM takes its half minute
    claim(flags.out, flags.resume)
    port, begun = serve.free_port(), time.monotonic()
    flags.url = f"http://127.0.0.1:{port}"
    own = {"command": flags.server_command, "environment": flags.server_environment}
    with serve.server(flags.serve, flags.dir, port, flags.out / results.LOG, **own):
        return measure(flags, startup_s=round(time.monotonic() - begun, 3))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure a transcription server.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="send clips, time and score the answers")
    where = run.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="root of the server, such as http://127.0.0.1:8000")
    where.add_argument("--serve", type=Path, metavar="YAML", help="vLLM config: serve it for the time of the run")
    run.set_defaults(server_command=(), server_environment=None)  # bench.matrix has its own
    add = run.add_argument
    add(
        "--dir",
        type=Path,
        default=Path(),
        help="directory to serve in, the config's `model: .` (default: this one)",
    )
    clips = "directory, manifest or .tsv of clips, or hf:OWNER/NAME[:CONFIG]:SPLIT (default: bench/data)"
    add("--dataset", default=os.path.relpath(Path(__file__).parent / "data"), metavar="DATA", help=clips)
    add("--out", required=True, type=Path, help="directory for the results")
    add("--samples", type=int, metavar="N", help="clips to pick with --seed (default: all)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the pick (default: 0)")
    load = run.add_mutually_exclusive_group().add_argument
    one = "requests in flight; several numbers are measured one after the other, as in 1,4,16 (default: 1)"
    load("--concurrency", dest="loads", type=_loads(loads.closed), metavar="N,...", help=one, default="1")
    open_loop = "instead: requests a second, starting at random times (Poisson, --seed) whatever is in flight"
    load("--rate", dest="loads", type=_loads(loads.open_loop), metavar="R,...", help=open_loop)
    add("--warmup", type=int, default=2, metavar="N", help="uncounted requests sent first at each load (default: 2)")
    mode = run.add_mutually_exclusive_group().add_argument
    mode("--stream", dest="mode", action="store_const", const="stream", help="ask for the text as it is made")
    live = "send audio at the pace of speech to vLLM's WebSocket /v1/realtime"
    mode("--realtime", dest="mode", action="store_const", const="realtime", help=live)
    run.set_defaults(mode="whole")
    api = "/v1/audio/transcriptions or /v1/chat/completions with audio_url (default: transcriptions)"
    add("--api", choices=("transcriptions", "chat"), default="transcriptions", help=api)
    add("--prompt", metavar="TEXT", help=f"what --api chat asks for (default: {client.CHAT_PROMPT!r})")
    language = "such as en, to score by and to send to /v1/audio/transcriptions (default: the dataset's, and not sent)"
    add("--language", metavar="CODE", help=language)
    add("--model", metavar="NAME", help="model to ask for (default: the first of /v1/models)")
    silence = "seconds without a byte from the server until a request fails (default: 600)"
    add("--timeout", dest="timeout_s", type=int, default=600, metavar="S", help=silence)
    add("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    add("--resume", action="store_true", help="continue the run in --out: what failed or is missing")
    add = commands.add_parser("serve", help="serve on this machine until Ctrl-C, with a request to paste").add_argument
    add("--config", required=True, type=Path, metavar="YAML", help="vLLM config")
    add(
        "--dir",
        type=Path,
        default=Path(),
        help="directory to serve in, the config's `model: .` (default: this one)",
    )
    add("--port", type=int, default=8000, metavar="N", help="port of 127.0.0.1 (default: 8000)")
    add = commands.add_parser("report", help="score a run's directory again, without a server").add_argument
    add("out", metavar="DIR", type=Path)
    compare.add_parser(commands)
    matrix.add_parser(commands)
    flags = parser.parse_args(arguments)
    if flags.command == "run":
        for name, lowest in (("samples", 1), ("warmup", 0), ("timeout_s", 1)):
            if (value := getattr(flags, name)) is not None and value < lowest:
                parser.error(f"--{name.removesuffix('_s')} {value}: must be at least {lowest}")
        if flags.api == "chat" and flags.mode == "realtime":
            parser.error("--api chat: not allowed with --realtime")
        if flags.prompt is not None and flags.api != "chat":
            parser.error("--prompt: only with --api chat")
        flags.prompt = client.CHAT_PROMPT if flags.prompt is None else flags.prompt
    return flags


def _loads(read: Callable[[str], list[loads.Load]]) -> Callable[[str], list[loads.Load]]:
    """The type of an argument that lists loads."""

    def convert(text: str) -> list[loads.Load]:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: expected numbers as in 1,4,16 ({error})") from None

    return convert


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written. After Ctrl-C, threads still wait for answers, and a plain exit would wait with them.
    os._exit(status)
