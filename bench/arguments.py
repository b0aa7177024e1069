"""The command line of `python -m bench`, parsed into a plan. An invalid one ends the program with status 2."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import loads
from bench.client import CHAT_PROMPT
from bench.measure import lag
from bench.measure.lag import DELAY_MS
from bench.plan import (
    OWN_DATA,
    ComparePlan,
    LivePlan,
    MatrixPlan,
    Plan,
    ReportPlan,
    RunPlan,
    SearchPlan,
    ServedConfig,
    ServePlan,
    SpeechPlan,
)

# Flags of `bench run` and their minimum
LOWEST = (
    ("samples", 1),
    ("warmup", 0),
    ("timeout_s", 1),
    ("seconds", 1),
    ("least_seconds", 1),
    ("age", 0),
    ("most_sessions", 1),
)
SPEECH_LOWEST = (("samples", 1), ("characters", 20), ("warmup", 0), ("timeout_s", 1))
SECONDS, LAG_MS, MOST = 60, 160, 512  # of a session; of the P99 of its lag, and sessions that --find-sessions tries


def parse(arguments: Sequence[str] | None = None) -> Plan:
    """The plan of a command line (default: this process's). Raises SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure a transcription server.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands)
    _add_speech(commands)
    _add_serve(commands)
    _add_report(commands)
    _add_compare(commands)
    _add_matrix(commands)
    commands.add_parser("gpu", help="measure configurations on a GPU: python -m bench gpu --help")  # bench/__main__.py
    commands.add_parser("speakers", help="speaker labels on human voices: python -m bench speakers --help")
    commands.add_parser("confidence", help="whether `probability` of words is true: python -m bench confidence --help")
    commands.add_parser("delays", help="uploads at several delays: python -m bench delays --help")
    flags = parser.parse_args(arguments)
    if flags.command == "run":
        return _run_plan(parser, flags)
    if flags.command == "speech":
        return _speech_plan(parser, flags)
    if flags.command == "serve":
        return ServePlan(flags.config, flags.dir, flags.port, tuple(flags.flags))
    if flags.command == "report":
        return ReportPlan(flags.out)
    if flags.command == "compare":
        return ComparePlan(flags.baseline, tuple(flags.others), flags.json)
    return MatrixPlan(flags.file, flags.out, flags.resume)


def parse_run(arguments: Sequence[str]) -> RunPlan:
    """The plan of `run` and its flags. Raises SystemExit."""
    plan = parse(["run", *arguments])
    assert isinstance(plan, RunPlan)
    return plan


def _run_plan(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> RunPlan:
    _check_lowest(parser, flags, LOWEST)
    if flags.api == "chat" and flags.mode == "realtime":
        parser.error("--api chat: not allowed with --realtime")
    if flags.prompt is not None and flags.api != "chat":
        parser.error("--prompt: only with --api chat")
    live = _live_plan(parser, flags)
    return RunPlan(
        server=flags.url if flags.serve is None else ServedConfig(flags.serve, flags.dir),
        dataset=flags.dataset,
        out=flags.out,
        samples=flags.samples,
        seed=flags.seed,
        loads=tuple(flags.loads),
        warmup=flags.warmup,
        mode=flags.mode,
        api=flags.api,
        prompt=CHAT_PROMPT if flags.prompt is None else flags.prompt,
        language=flags.language,
        model=flags.model,
        timeout_s=flags.timeout_s,
        api_key_env=flags.api_key_env,
        resume=flags.resume,
        live=live,
    )


def _check_lowest(
    parser: argparse.ArgumentParser, flags: argparse.Namespace, lowest: Sequence[tuple[str, int]]
) -> None:
    for name, least in lowest:
        if (value := getattr(flags, name)) is not None and value < least:
            flag = name.removesuffix("_s").replace("_", "-")
            parser.error(f"--{flag} {value}: must be at least {least}")


def _speech_plan(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> SpeechPlan:
    _check_lowest(parser, flags, SPEECH_LOWEST)
    if flags.transcribe and flags.random_weights:
        parser.error("--transcribe: not allowed with --random-weights: such speech has no words")
    if flags.transcribe and flags.characters:
        parser.error("--transcribe: not allowed with --characters: there is no clip of these texts to compare with")
    if flags.transcribe_key_env and not flags.transcribe:
        parser.error("--transcribe-key-env: only with --transcribe")
    return SpeechPlan(
        url=flags.url,
        out=flags.out,
        loads=tuple(flags.loads),
        dataset=flags.dataset,
        samples=flags.samples,
        seed=flags.seed,
        characters=flags.characters,
        warmup=flags.warmup,
        voice=flags.voice,
        model=flags.model,
        form=flags.format,
        stream=not flags.whole,
        timeout_s=flags.timeout_s,
        api_key_env=flags.api_key_env,
        transcriber=flags.transcribe,
        transcriber_key_env=flags.transcribe_key_env,
        random_weights=flags.random_weights,
        note=flags.note,
    )


def _live_plan(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> LivePlan | None:
    """What the flags of live sessions say, null without --sessions. Ends the program where they do not fit."""
    if flags.loads[0].sessions is None:
        for name in ("seconds", "least_seconds", "age", "find_sessions", "most_sessions", "lag_ms"):
            if getattr(flags, name):
                parser.error(f"--{name.replace('_', '-')}: only with --sessions")
        return None
    if flags.mode != "realtime":
        parser.error("--sessions: only with --realtime")
    if flags.find_sessions and (flags.resume or len(flags.loads) > 1):
        wrong = "not allowed with --resume" if flags.resume else "--sessions takes one number, to begin with"
        parser.error(f"--find-sessions: {wrong}")
    try:
        lag.delay_tokens(flags.delay_ms)
    except ValueError as error:
        parser.error(f"--delay-ms {flags.delay_ms}: {error}")
    search = SearchPlan(flags.most_sessions or MOST, flags.lag_ms or LAG_MS) if flags.find_sessions else None
    seconds = flags.seconds or SECONDS
    if flags.least_seconds and flags.least_seconds > seconds:
        parser.error(f"--least-seconds {flags.least_seconds}: must be at most --seconds, {seconds}")
    return LivePlan(seconds, flags.age or 0, flags.delay_ms, search, flags.least_seconds)


# ---- Commands


def _add_run(commands: Any) -> None:
    run = commands.add_parser("run", help="send clips to a server; measure latency, speed and word error rate")
    _add_server(run)
    add = run.add_argument
    clips = "directory, manifest or .tsv of clips, or hf:OWNER/NAME[:CONFIG]:SPLIT (default: bench/data)"
    add("--dataset", default=OWN_DATA, metavar="DATA", help=clips)
    add("--out", required=True, type=Path, help="directory for the results")
    add("--samples", type=int, metavar="N", help="number of clips, selected with --seed (default: all)")
    add("--seed", type=int, default=0, metavar="N", help="random seed of --samples and --rate (default: 0)")
    _add_loads(run)
    _add_sessions(run)
    _add_request(run)
    silence = "seconds without data from the server after which a request fails (default: 600)"
    add("--timeout", dest="timeout_s", type=int, default=600, metavar="S", help=silence)
    add("--api-key-env", metavar="NAME", help="name of the environment variable that contains the API key")
    add("--resume", action="store_true", help="continue the run in --out: send the requests that failed or are missing")


def _add_server(run: argparse.ArgumentParser) -> None:
    where = run.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="base URL of a running server, such as http://127.0.0.1:8000")
    where.add_argument(
        "--serve", type=Path, metavar="YAML", help="start a server with this vLLM config, and stop it after the run"
    )
    _add_directory(run)


def _add_directory(parser: argparse.ArgumentParser) -> None:
    place = "working directory of the server, the config's `model: .` (default: the current directory)"
    parser.add_argument("--dir", type=Path, default=Path(), help=place)


def _add_loads(run: argparse.ArgumentParser) -> None:
    load = run.add_mutually_exclusive_group().add_argument
    one = "requests in flight; a list such as 1,4,16 is measured one after the other (default: 1)"
    load("--concurrency", dest="loads", type=_loads(loads.closed), metavar="N,...", help=one, default="1")
    open_loop = "requests per second, sent at random times (Poisson) without waiting for responses"
    load("--rate", dest="loads", type=_loads(loads.open_loop), metavar="R,...", help=open_loop)
    live = "instead, with --realtime: live sessions at once, whose audio is clips joined in a seeded order"
    load("--sessions", dest="loads", type=_loads(loads.live), metavar="N,...", help=live)
    warmup = "requests before each load that are not measured (default: 2)"
    run.add_argument("--warmup", type=int, default=2, metavar="N", help=warmup)


def _add_sessions(run: argparse.ArgumentParser) -> None:
    """What --sessions are."""
    add = run.add_argument
    add("--seconds", type=float, metavar="S", help=f"of a session that are measured (default: {SECONDS})")
    least = "draw the length of each session between this and --seconds, so that they end at different times"
    add("--least-seconds", type=float, metavar="S", help=least)
    age = "seconds of audio that each session sends before those, as fast as the server takes them (default: 0)"
    add("--age", type=float, metavar="S", help=age)
    add("--delay-ms", type=int, default=DELAY_MS, metavar="MS", help=f"the model's delay (default: {DELAY_MS})")
    find = "search the most sessions that the server holds, from the number of --sessions on"
    add("--find-sessions", action="store_true", help=find)
    add("--most-sessions", type=int, metavar="N", help=f"that the search tries (default: {MOST})")
    bound = f"P99 of the lag up to which the server holds them, if none falls behind (default: {LAG_MS})"
    add("--lag-ms", type=float, metavar="MS", help=bound)


def _add_request(run: argparse.ArgumentParser) -> None:
    """The flags about a request's content."""
    mode = run.add_mutually_exclusive_group().add_argument
    mode("--stream", dest="mode", action="store_const", const="stream", help="request a stream of text")
    live = "send audio in real time to vLLM's WebSocket /v1/realtime"
    mode("--realtime", dest="mode", action="store_const", const="realtime", help=live)
    run.set_defaults(mode="whole")
    add = run.add_argument
    api = "/v1/audio/transcriptions or /v1/chat/completions with audio_url (default: transcriptions)"
    add("--api", choices=("transcriptions", "chat"), default="transcriptions", help=api)
    add("--prompt", metavar="TEXT", help=f"instruction that --api chat sends (default: {CHAT_PROMPT!r})")
    language = "language code such as en, for scoring and for the request (default: the dataset's, not sent)"
    add("--language", metavar="CODE", help=language)
    add("--model", metavar="NAME", help="model to request (default: the first one in /v1/models)")


def _add_speech(commands: Any) -> None:
    speech = commands.add_parser("speech", help="send texts to /v1/audio/speech; measure first audio, RTF and waits")
    add = speech.add_argument
    add("--url", required=True, help="base URL of a running server, such as http://127.0.0.1:8000")
    clips = "clips whose references are the texts, as `bench run` takes them (default: bench/data)"
    add("--dataset", default=OWN_DATA, metavar="DATA", help=clips)
    add("--out", required=True, type=Path, help="directory for the results")
    add("--samples", type=int, metavar="N", help="number of texts, selected with --seed (default: all)")
    add("--seed", type=int, default=0, metavar="N", help="random seed of --samples and --characters (default: 0)")
    add("--characters", type=int, metavar="N", help="texts of up to N characters, each of several references joined")
    one = "requests in flight; a list such as 1,16,32 is measured one after the other (default: 1)"
    add("--concurrency", dest="loads", type=_loads(loads.closed), metavar="N,...", help=one, default="1")
    add(
        "--warmup",
        type=int,
        default=2,
        metavar="N",
        help="requests before each load that are not measured (default: 2)",
    )
    add("--voice", metavar="NAME", help="voice to request (default: the first one in /v1/audio/voices)")
    add("--format", choices=("pcm", "wav"), default="pcm", help="response_format, 16-bit PCM either way (default: pcm)")
    add("--whole", action="store_true", help="do not ask for a stream, for servers that know no `stream`")
    add("--model", metavar="NAME", help="model to request (default: the first one in /v1/models)")
    silence = "seconds without data from the server after which a request fails (default: 600)"
    add("--timeout", dest="timeout_s", type=int, default=600, metavar="S", help=silence)
    key = "name of the environment variable that contains the API key"
    add("--api-key-env", metavar="NAME", help=key)
    heard = "server with /v1/audio/transcriptions: transcribe the speech of the first load and score it"
    add("--transcribe", metavar="URL", help=heard)
    add("--transcribe-key-env", metavar="NAME", help=f"{key} of --transcribe")
    noise = "the model's weights are random: the report says what its figures do not show"
    add("--random-weights", action="store_true", help=noise)
    add("--note", metavar="TEXT", help="line at the top of the report, such as what kind of server this is")


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="run a vLLM server until Ctrl-C, and print an example request")
    parser.add_argument("--config", required=True, type=Path, metavar="YAML", help="vLLM config")
    _add_directory(parser)
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port of 127.0.0.1 (default: 8000)")
    parser.add_argument(
        "flags", nargs="*", metavar="FLAG", help="after `--`: options of `vllm serve` that override the config"
    )


def _add_report(commands: Any) -> None:
    parser = commands.add_parser("report", help="score a finished run again, without a server")
    parser.add_argument("out", metavar="DIR", type=Path)


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser("compare", help="compare runs clip by clip, without a server")
    parser.add_argument("baseline", metavar="A", type=Path, help="directory of the baseline run")
    parser.add_argument(
        "others", metavar="B", type=Path, nargs="+", help="directories of the runs to compare with the baseline"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")


def _add_matrix(commands: Any) -> None:
    parser = commands.add_parser("matrix", help="measure several configurations on one machine, in several rounds")
    parser.add_argument("file", metavar="FILE.yaml", type=Path, help="matrix file; `pydoc bench.matrix` describes it")
    parser.add_argument("--out", required=True, type=Path, help="directory for the results")
    parser.add_argument(
        "--resume", action="store_true", help="continue the matrix in --out: make the runs that are not finished"
    )


def _loads(read: Callable[[str], list[loads.Load]]) -> Callable[[str], list[loads.Load]]:
    """The type of an argument that lists loads."""

    def convert(text: str) -> list[loads.Load]:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: expected numbers such as 1,4,16 ({error})") from None

    return convert
