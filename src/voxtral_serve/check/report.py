"""Would `vllm serve` start with this config and this checkpoint? Answered from headers and vLLM's own code, no engine.

Everything is asked of what is installed: options are read by vLLM's own parser, the KV cache is laid out by vLLM's own
functions, clips are padded by mistral-common's own numbers. Memory for activations and CUDA graphs cannot be known
without loading the model, so it is the rest that is compared with what there is.
"""

import difflib
import errno
import math
import os
import platform
import re
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped,unused-ignore]

from voxtral_serve import checkpoint, shims
from voxtral_serve.checkpoint import Checkpoint, CheckpointError, OtherModel

LIBRARIES = ("vllm", "transformers", "mistral-common", "torch")
PLUGIN = "voxtral_serve.plugin:register"
PLUGIN_GROUP = "vllm.general_plugins"
ENCODE_ONCE = "VoxtralRealtimeEncodeOnce"
MIB, GIB = 1 << 20, 1 << 30
WIDTH = 16  # of the names in the printed rows
# In a wheel they lie inside the package, in a checkout beside src.
PLACES = (Path(__file__).parents[1] / "profiles", Path(__file__).parents[3] / "profiles")
PROFILES = next(filter(Path.is_dir, PLACES), None)
OTHERS = ("voxtral-3b", "whisper")  # of the profiles: for other models than Voxtral Realtime
POOL = 1 << 60  # bytes; a KV cache so large that rounding to whole blocks does not show


class ConfigError(ValueError):
    """vLLM would not take this config. The message names what it refuses."""


@dataclass
class Report:
    """The lines to print, and the problems that would keep the server from starting or from being what it seems."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)  # the titles over the problems
    title: str = ""

    def section(self, title: str) -> None:
        self.title = title
        self.lines.append(title)

    def row(self, name: str, value: str) -> None:
        self.lines.append(f"  {name:{WIDTH}}  {value}")

    def problem(self, text: str) -> None:
        self.problems.append(text)
        self.sections.append(self.title)
        self.row("PROBLEM", text)

    def verdict(self) -> str:
        if not self.problems:
            return "ok: this configuration can be served"
        count, where = len(self.problems), ", ".join(dict.fromkeys(self.sections))
        return f"{count} problem{'s' if count > 1 else ''}: {where}, marked PROBLEM above"

    def refusals(self) -> list[str]:
        """One line for each problem, to be read in a log without the rest."""
        pairs = zip(self.sections, self.problems, strict=True)
        return [f"voxtral-serve: refused: {section}: {' '.join(problem.split())}" for section, problem in pairs]


def check(config: Path | None, model: Path | None, words: Sequence[str] = (), gate: bool = False) -> Report:
    """Check the installation, `config` (a YAML for `vllm serve --config`; None for vLLM's defaults) and a checkpoint.

    `words` are further arguments of `vllm serve`, which count more than the config. `model` defaults to the model that
    they name, then to the config's, then to the current directory. `gate` asks besides for what a server on a network
    needs at the moment of its start: a port that is free, and an API key, or word that there is to be none.
    """
    report = Report()
    _versions(report)
    vllm = shims.installed("vllm") is not None
    if vllm:
        _patches(report)
    absent = _plugin(report)
    options = _options(report, config, words) if vllm else None
    if gate and options:
        _gate(report, options)
    if options is None and model is None and words and not _is_option(words[0]):
        model = Path(words[0])
    held = _checkpoint(report, options, model)
    ours = options is not None and options.hf_overrides == {"architectures": [ENCODE_ONCE]}
    if absent and (ours or (isinstance(held, Checkpoint) and held.layout == checkpoint.HUGGING_FACE)):
        report.problem(f"{absent}, and vLLM would not know {ENCODE_ONCE if ours else 'this layout'}")
    _memory_and_clip(report, options, held)
    return report


def _versions(report: Report) -> None:
    report.section("versions")
    report.row("python", platform.python_version())
    for library in LIBRARIES:
        try:
            found = version(library)
        except PackageNotFoundError:
            report.problem(f"{library} is not installed for {sys.executable}: install voxtral-serve[gpu] there")
            continue
        tested = shims.TESTED.get(library, (shims.installed(library),))
        untested = "" if shims.installed(library) in tested else f"  not tested; tested: {', '.join(map(str, tested))}"
        report.row(library, found + untested)


def _patches(report: Report) -> None:
    """Settle every patch, which imports what they patch (seconds), then let the plugin itself judge and register."""
    from voxtral_serve import plugin

    report.section("patches")
    in_force = shims.active()
    if in_force is not None:
        for name, (outcome, found) in in_force.settled().items():
            report.row(outcome, f"{name}: {found}")
    try:
        plugin.register()
    except Exception as error:  # whatever it is ends every vLLM process
        kind = "" if isinstance(error, shims.PatchError) else f"{type(error).__name__}: "
        report.problem(f"{kind}{error}")


def _plugin(report: Report) -> str | None:
    """Whether vLLM will load the plugin; if not, why, which is a problem for what only the plugin can serve."""
    report.section("plugin")
    names = [entry.name for entry in entry_points(group=PLUGIN_GROUP) if entry.value == PLUGIN]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not names:
        absent = f"no entry point of {PLUGIN_GROUP} is {PLUGIN}: reinstall voxtral-serve for {sys.executable}"
    elif allowed is not None and not set(names) & set(allowed.split(",")):
        absent = f"VLLM_PLUGINS={allowed!r} leaves out {names[0]}: unset VLLM_PLUGINS, or add {names[0]} to it"
    else:
        report.row(names[0], f"vLLM loads {PLUGIN}")
        return None
    report.row("not loaded", f"{absent}. Mistral's layout is served without it")
    return absent


def _options(report: Report, path: Path | None, words: Sequence[str] = ()) -> Namespace | None:
    """The options as `vllm serve` reads them; `given`, the names that are set; `right`, whether it takes all.

    With a wrong option among them the others are read all the same; None where there is no reading the config.
    """
    report.section("config")
    report.row("file", "none: vLLM's defaults" if path is None else str(path))
    try:
        parser = _parser()
        flat = [] if path is None else _flatten(parser, path)
    except ConfigError as error:
        report.problem(str(error))
        return None
    except shims.PatchError:  # told under "patches"; vLLM's parser loads the plugins
        report.row("not read", "vLLM would end before")
        return None
    except Exception as error:  # an installation in which vLLM cannot even be imported
        report.problem(f"vLLM does not come up: {type(error).__name__}: {error}")
        return None
    of_words = _parts(words)
    # In vLLM's order: the model, the config, the rest. The config's last option might take a name behind it as its own.
    lead = of_words[:1] if words and not _is_option(words[0]) else []
    right: list[str] = []
    given: set[str] = set()
    all_right = True
    for source, part in [
        *((None, part) for part in lead),
        *((path, part) for part in _parts(flat)),
        *((None, part) for part in of_words[len(lead) :]),
    ]:
        name = part[0].lstrip("-").partition("=")[0].replace("-", "_") if _is_option(part[0]) else ""
        where = f"{source}: " if source else "command line: "
        try:
            alone = parser.parse_args(part)
        except (ConfigError, ValueError) as error:
            report.problem(where + _why(parser, name, str(error)))
            all_right = False
            continue
        if source and alone.model_tag is not None:
            report.problem(f"{where}{name} has several values, and vLLM takes the last for the model: give one")
            all_right = False
            continue
        right += part
        given.add(name)
    options = Namespace(**vars(parser.parse_args(right)), given=given, right=all_right)
    for problem in _speculation(options.speculative_config):
        report.problem(problem)
        options.right = False
    return options


def _speculation(given: Any) -> list[str]:
    """What is wrong with the one nested config that vLLM's parser takes as it comes; its engine would end over it."""
    from vllm.config import SpeculativeConfig

    known = {each.name for each in fields(SpeculativeConfig)}
    return [
        f"speculative_config: {name} is no option of vllm {version('vllm')}{_instead(name, known)}"
        for name in given or {}
        if name not in known
    ]


def _is_option(word: str) -> bool:
    return re.match(r"--|-[A-Za-z]", word) is not None


def _parts(words: Sequence[str]) -> list[list[str]]:
    """Each option with what follows it; before that, the words that come before any option."""
    starts = sorted({0, *(index for index, word in enumerate(words) if _is_option(word)), len(words)})
    return [list(words[start:end]) for start, end in pairwise(starts)]


def _parser() -> Any:
    """`vllm serve`'s own argument parser, raising ConfigError where it would end the process."""
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if current_platform.is_unspecified():
        raise ConfigError(
            f"no GPU: vLLM {version('vllm')} finds no device here that it was built for. A container is given one by "
            "`docker run --gpus all`, or `podman run --device nvidia.com/gpu=all`"
        )

    class Parser(FlexibleArgumentParser):  # type: ignore[misc,unused-ignore]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(message)

    places = ("vllm.entrypoints.openai.cli_args", "vllm.entrypoints.launchers.cli_args")  # in vLLM 0.20.0 and in 0.32.0
    for place in places:
        try:
            module = import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise
        else:
            return module.make_arg_parser(Parser())
    raise ConfigError(
        f"the options of vLLM {version('vllm')} are in none of {', '.join(places)}: install a tested version"
    )


def _flatten(parser: Any, path: Path) -> list[str]:
    """The command line that vLLM makes of a config file."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: expected a YAML file for `vllm serve --config`")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, expected options as `name: value`")
    if names := [name for name in content if not isinstance(name, str)]:
        raise ConfigError(f"{path}: {names[0]!r} is no option's name, expected text")
    try:
        flat: list[str] = parser.load_config_file(str(path))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return flat


def _why(parser: Any, name: str, message: str) -> str:
    stray = message.partition("unrecognized arguments: ")[2]
    if stray and not _is_option(stray):
        return f"{stray}: vLLM does not know what it belongs to" + (f", after {name}" if name else "")
    if not stray:
        return f"{name}: {message.partition(': ')[2] or message}"
    known = {option.removeprefix("--").replace("-", "_") for option in parser._option_string_actions}
    return f"{name} is no option of vllm serve {version('vllm')}{_instead(name.replace('-', '_'), known)}"


def _instead(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _gate(report: Report, options: Namespace) -> None:
    """The port and the key. The key's value goes nowhere."""
    report.section("server")
    host, port = options.host or "", options.port
    report.row("listens at", options.uds or f"{host or 'all addresses'}, port {port}")
    try:
        if not options.uds:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                # Without SO_REUSEPORT, which vLLM sets: it would start beside another vLLM and share its requests.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            report.problem(f"port {port} is taken: end what listens there, or give another with --port")
        else:
            report.problem(f"nothing can listen at host {host or 'any'}, port {port}: {error.strerror or error}")

    ours = (options.additional_config or {}).get("voxtral_serve", {})
    switch = ours.get("api_key") if isinstance(ours, dict) else ours
    if options.api_key:
        report.problem(
            "api_key is an option's value, which vLLM writes into its log: give it as VLLM_API_KEY, or in a file that "
            "VLLM_API_KEY_FILE names"
        )
    elif switch not in (None, "none"):
        report.problem(f"additional_config: voxtral_serve: api_key is {switch!r}, expected none, or no such line")
    elif os.environ.get("VLLM_API_KEY"):
        report.row("API key", "from the environment")
    elif switch == "none":
        report.row("API key", "none: additional_config says so")
    else:
        report.problem(
            "no API key: set VLLM_API_KEY, or VLLM_API_KEY_FILE to a file that holds it; to serve whoever asks, write "
            "`additional_config: {voxtral_serve: {api_key: none}}` into the config"
        )


def _checkpoint(report: Report, options: Namespace | None, model: Path | None) -> Checkpoint | OtherModel | None:
    report.section("checkpoint")
    if model is None:
        named = options and (options.model_tag or ("model" in options.given and options.model))
        model = Path(named or ".")
    try:
        directory, there = model.resolve(), model.is_dir()
    except PermissionError as error:
        report.problem(str(checkpoint.unreadable(Path(os.path.abspath(model)), error)))
        return None
    report.row("directory", str(directory))
    if not there and os.environ.get("HF_HUB_OFFLINE") == "0" and re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)):
        report.row("not checked", f"HF_HUB_OFFLINE=0: vLLM downloads {model} at its start")
        return None
    if not there:
        report.problem(
            f"{model} is no directory here: check reads local checkpoints. Download it "
            "(`hf download NAME --local-dir DIR`), and give DIR"
        )
        return None
    try:
        another = checkpoint.other_model(directory)
        held = another or checkpoint.read(directory)
    except CheckpointError as error:
        report.problem(str(error))
        return None
    if isinstance(held, OtherModel):
        report.row("model", f"{held.model}: its files are whole; vLLM checks the rest at its start")
        return held
    dtypes = sorted({tensor.dtype for tensor in held.tensors.values()})
    report.row("layout", held.layout)
    report.row(
        "tensors",
        f"{len(held.tensors):,}, {_size(held.weight_bytes)}, {parameters(held):,} parameters, {', '.join(dtypes)}",
    )
    if held.unused:
        report.row("unused", f"{', '.join(path.name for path in held.unused)}: the other layout's, of the same model")
    for name in ("config_format", "load_format"):
        if options and held.layout == checkpoint.HUGGING_FACE and getattr(options, name) == "mistral":
            report.problem(f"{name} is 'mistral', and the checkpoint is of Hugging Face's layout: remove it")
    if options and options.config_format == "hf" and not (directory / "config.json").is_file():
        report.problem("config_format is 'hf', and there is no config.json: remove it")
    if options and options.tokenizer_mode not in ("auto", "mistral"):
        report.problem(
            f"tokenizer_mode is {options.tokenizer_mode!r}: Voxtral Realtime is served with 'mistral' (or 'auto')"
        )
    return held


def parameters(held: Checkpoint) -> int:
    """Elements of all tensors that vLLM loads: a copy of tied embeddings is not."""
    total = 0
    for name, tensor in held.tensors.items():
        if name == "output.weight" and held.params.get("tied_embeddings"):
            continue
        count = 1
        for size in tensor.shape:
            count *= size
        total += count
    return total


def _memory_and_clip(report: Report, options: Namespace | None, held: Checkpoint | OtherModel | None) -> None:
    right = {"config": options is not None and options.right, "checkpoint": held is not None}
    missing = " and ".join(name for name in right if not right[name])
    report.section("memory")
    plan = None
    if options and isinstance(held, OtherModel) and not missing:
        _memory_of_another(report, options, held)
        return
    if options and isinstance(held, Checkpoint) and not missing:
        try:
            plan = Plan.of(options, held)
        except ConfigError as error:
            missing = "config"
            report.problem(f"config: {error}")
        else:
            _memory(report, options, held, plan, lambda: _fitting(held))
    else:
        report.row("not computed", f"the {missing} must be right first")
    report.section("longest clip")
    if isinstance(held, Checkpoint) and plan:
        _clip(report, held, plan)
    else:
        report.row("not computed", f"the {missing} must be right first")


@dataclass(frozen=True)
class Plan:
    """What vLLM makes of the options before it knows any memory. Lengths in token positions of 80 ms."""

    max_model_len: int
    max_num_seqs: int
    cache: Any  # vllm.config.CacheConfig
    scheduler: Any  # vllm.config.SchedulerConfig
    element_bytes: int  # of weights and activations

    @property
    def encoder_cache(self) -> int:
        """Audio tokens that the encoder cache holds (vllm.v1.core.encoder_cache_manager.compute_mm_encoder_budget)."""
        return max(self.scheduler.max_num_batched_tokens, self.max_model_len)

    @property
    def audio_rows(self) -> int:
        """Rows of the LM's width that the encode-once model keeps (voxtral_serve.engine.audio_rows.AudioRows)."""
        return self.max_num_seqs * self.max_model_len + int(self.scheduler.max_num_batched_tokens)

    @classmethod
    def of(cls, options: Namespace, held: Checkpoint) -> "Plan":
        """Raises ConfigError for values that vLLM refuses."""
        from pydantic import ValidationError
        from vllm.config import CacheConfig, SchedulerConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext

        # As ModelConfig derives it: model_max_length counts for more than the other.
        longest = held.params.get("model_max_length") or held.params.get("max_position_embeddings")
        length = options.max_model_len
        if length is None or length == -1:
            if longest is None:
                raise ConfigError(
                    "max_model_len is not set, and the checkpoint names no max_position_embeddings: set it"
                )
            length = longest
        elif length < 1:
            raise ConfigError(f"max_model_len is {length}, expected at least 1")
        elif longest is not None and length > longest:
            raise ConfigError(f"max_model_len is {length}, and the checkpoint was made for at most {longest}")
        # As EngineArgs._set_default_max_num_seqs_and_batched_tokens_args
        defaults = AsyncEngineArgs.get_batch_defaults(options.pipeline_parallel_size * options.tensor_parallel_size)
        tokens, seqs = (default[UsageContext.OPENAI_API_SERVER] for default in defaults)
        seqs = options.max_num_seqs or seqs
        tokens = options.max_num_batched_tokens or min(tokens, seqs * length)
        if options.max_num_seqs is None:
            seqs = min(seqs, tokens)
        makers = {
            CacheConfig: {
                "gpu_memory_utilization": options.gpu_memory_utilization,
                "cache_dtype": options.kv_cache_dtype,
                **({} if options.block_size is None else {"block_size": options.block_size}),
            },
            SchedulerConfig: {
                "max_model_len": length,
                "is_encoder_decoder": False,
                "max_num_batched_tokens": tokens,
                "max_num_seqs": seqs,
                "disable_hybrid_kv_cache_manager": options.disable_hybrid_kv_cache_manager,
            },
        }
        made, wrong = [], []
        for make, values in makers.items():
            try:
                made.append(make(**values))
            except ValidationError as error:
                for each in error.errors():
                    where = f"{each['loc'][0]} is {each['input']!r}: " if each["loc"] else ""
                    wrong.append(where + each["msg"].removeprefix("Value error, "))
        if wrong:
            raise ConfigError("; ".join(wrong))
        cache, scheduler = made
        # `auto` keeps 16 bits as they are and has 32 bits rounded to 16 (vllm.config.model._resolve_auto_dtype).
        return cls(length, seqs, cache, scheduler, 4 if options.dtype in ("float", "float32") else 2)


def _memory_of_another(report: Report, options: Namespace, held: OtherModel) -> None:
    from vllm.platforms import current_platform

    report.row("weights", f"{_size(held.weight_bytes)}, as stored; nothing else is known of this model")
    try:
        device = _device(current_platform)
    except ConfigError as error:
        report.problem(str(error))
        return
    report.row("device", f"{device.name}: {_size(device.total)}, {_size(device.free)} of it free")
    share = int(device.total * options.gpu_memory_utilization)
    if not current_platform.is_cpu() and not options.quantization and held.weight_bytes > share:
        report.problem(
            f"the weights take {_size(held.weight_bytes)}, and gpu_memory_utilization {options.gpu_memory_utilization} "
            f"of {device.name} is {_size(share)}: raise it, or take a larger GPU"
        )


def _fitting(held: Checkpoint) -> str:
    """Which of the profiles that come with this package would fit here, as the end of a message."""
    names = []
    for path in sorted(PROFILES.glob("*.yaml")) if PROFILES else []:
        if path.stem in OTHERS:
            continue
        trial = Report()
        options = _options(trial, path)
        if options is None or not options.right:
            continue
        try:
            _memory(trial, options, held, Plan.of(options, held), lambda: "")
        except ConfigError:
            continue
        if not trial.problems and any(line.startswith("  room for ") for line in trial.lines):
            names.append(f"profiles/{path.name}")
    return f". What would fit here: {', '.join(names) or 'no profile of this package'}"


def _memory(report: Report, options: Namespace, held: Checkpoint, plan: Plan, advice: Callable[[], str]) -> None:
    """`advice` ends a message about too little memory."""
    from vllm.platforms import current_platform

    if options.tensor_parallel_size * options.pipeline_parallel_size > 1:
        report.row("not computed", "this adds up what one device needs, and the config spreads the model over several")
        return
    encode_once = options.hf_overrides == {"architectures": [ENCODE_ONCE]}
    if options.hf_overrides and not encode_once:
        report.row("not computed", f"hf_overrides may make another model of it; {ENCODE_ONCE} alone is known here")
        return
    encoder = held.params["multimodal"]["whisper_model_args"]["encoder_args"]
    pooled = held.params["multimodal"]["whisper_model_args"]["downsample_args"]["downsample_factor"]
    quantized = held.params.get("quantization") or options.quantization
    weights = held.weight_bytes if quantized else parameters(held) * plan.element_bytes
    row = held.params["dim"] if encode_once else encoder["dim"] * pooled
    encoder_cache = plan.encoder_cache * row * plan.element_bytes
    rows = plan.audio_rows * row * plan.element_bytes if encode_once else 0
    try:
        kv = KvCache.of(held.params, plan, options.async_scheduling is not False, encode_once)
    except ConfigError as error:
        report.row("KV cache", f"not computed: {error}")
        return
    except (AttributeError, ImportError, TypeError) as error:  # internals of vLLM that another version has otherwise
        report.row("KV cache", f"not computed on vLLM {version('vllm')}: {type(error).__name__}: {error}")
        return
    length, seqs = plan.max_model_len, plan.max_num_seqs
    report.row("weights", f"{_size(weights)}{', as stored' if quantized else f', {8 * plan.element_bytes} bits each'}")
    report.row("KV cache", f"{_size(kv.bytes_of(1))} for one sequence of {length:,} tokens")
    if seqs > 1:
        report.row("", f"{_size(kv.bytes_of(seqs))} for max_num_seqs = {seqs:,} of them")
    report.row("encoder cache", f"{_size(encoder_cache)} for {plan.encoder_cache:,} audio tokens")
    if encode_once:
        report.row("audio rows", f"{_size(rows)} for max_num_seqs = {seqs:,} clips, held beside the KV cache")
    report.row("not counted", "activations, CUDA graphs and what PyTorch keeps: vLLM measures them at its start")

    try:
        device = _device(current_platform)
        explicit = _explicit_kv_bytes(options, current_platform.is_cpu())
    except ConfigError as error:
        report.problem(str(error))
        return
    report.row("device", f"{device.name}: {_size(device.total)}, {_size(device.free)} of it free")
    if current_platform.is_cpu() and not encode_once and not _runs_on_cpu():
        report.problem(
            f"vLLM {version('vllm')} cannot run its own Voxtral Realtime on a CPU; 0.32.0 can. "
            f"hf_overrides: {{architectures: [{ENCODE_ONCE}]}} runs on either"
        )
    part = plan.cache.gpu_memory_utilization
    share = int(device.total * part)
    if explicit is None:
        pool, source = share - weights - encoder_cache - rows, f"gpu_memory_utilization {part} of {_size(device.total)}"
        report.row("share", f"{_size(share)}: {source}")
    else:
        pool, source = explicit
        report.row("KV cache space", f"{_size(pool)}: {source}")
    if not (explicit and current_platform.is_cpu()) and share > device.free:
        report.problem(
            f"gpu_memory_utilization {part} is {_size(share)} of {device.name}, and {_size(device.free)} of it is "
            "free: vLLM refuses to start. Lower it, or end what uses the memory" + advice()
        )
    if explicit and weights + encoder_cache + rows + pool > device.free:
        audio = f"encoder cache {_size(encoder_cache)}" + (f", audio rows {_size(rows)}" if rows else "")
        report.problem(
            f"weights {_size(weights)}, {audio} and KV cache {_size(pool)} ({source}) are more than the "
            f"{_size(device.free)} that {device.name} has free" + advice()
        )
    if kv.bytes_of(1) > pool:
        left = f"{_size(pool)}" if pool > 0 else "nothing"
        report.problem(
            f"one sequence of max_model_len {length:,} needs {_size(kv.bytes_of(1))} of KV cache beside weights of "
            f"{_size(weights)}, and {source} leaves {left} for it: raise it, or lower max_model_len{advice()}"
        )
        return
    bound = "" if explicit else "at most "
    report.row("room for", f"{bound}{pool // kv.block_bytes / kv.blocks:.2f} sequences of {length:,} tokens at a time")


@dataclass(frozen=True)
class KvCache:
    """vLLM's layout of the KV cache: blocks from one pool, and how many of them one sequence of full length takes."""

    block_bytes: int
    blocks: int

    def bytes_of(self, sequences: int) -> int:
        """Bytes for so many sequences of max_model_len, and for the one block that vLLM keeps back."""
        return (sequences * self.blocks + 1) * self.block_bytes

    @classmethod
    def of(cls, params: dict[str, Any], plan: Plan, asynchronous: bool, encode_once: bool) -> "KvCache":
        """Lay out the cache by vLLM's own functions, for Voxtral Realtime on one device.

        Its layers are of two kinds (vllm.model_executor.models.whisper_causal, .llama): language model, one entry per
        token; encoder, as many per token as are pooled into one, in a window of its own. vLLM gives both pages of one
        size and groups of one number of layers. With the encoder run once, its layers have none. Raises ConfigError
        for a kv_cache_dtype whose pages are laid out otherwise.
        """
        from vllm.platforms import current_platform
        from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
        from vllm.v1.core import kv_cache_utils

        cache = plan.cache
        if cache.cache_dtype not in ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"):
            raise ConfigError(f"the pages of kv_cache_dtype {cache.cache_dtype} are not known here")
        name = {2: "bfloat16", 4: "float32"}[plan.element_bytes] if cache.cache_dtype == "auto" else cache.cache_dtype
        on_cpu = current_platform.is_cpu()
        if on_cpu and not cache.user_specified_block_size:
            cache.block_size = 128  # vllm.platforms.cpu.CpuPlatform.check_and_update_config
        batches = 2 if asynchronous and not on_cpu else 1  # VllmConfig.max_concurrent_batches
        # As much of a VllmConfig as the functions below read; a real one loads the tokenizer and inspects the model.
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=plan.max_model_len),
            cache_config=cache,
            scheduler_config=plan.scheduler,
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
            speculative_config=None,
            kv_transfer_config=None,
            max_in_flight_tokens=batches * plan.scheduler.max_num_batched_tokens,
        )
        if hasattr(cache, "kv_cache_layout"):  # vLLM 0.32.0; backends for this model have layers outermost
            cache.kv_cache_layout = "LBHNC"
        specs = _kv_specs(params, cache.block_size, STR_DTYPE_TO_TORCH_DTYPE[name], encode_once)
        groups = kv_cache_utils.get_kv_cache_groups(config, specs)
        layout = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, POOL)
        concurrency = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, layout)
        return cls(POOL // layout.num_blocks, round(layout.num_blocks / concurrency))


def _kv_specs(params: dict[str, Any], block_size: int, dtype: Any, encode_once: bool) -> dict[str, Any]:
    """One spec per attention layer with a KV cache, as the layers' own get_kv_cache_spec make them."""
    from dataclasses import fields

    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    encoder = params["multimodal"]["whisper_model_args"]["encoder_args"]
    pooled = params["multimodal"]["whisper_model_args"]["downsample_args"]["downsample_factor"]
    heads, window = encoder["n_heads"], encoder["sliding_window"]
    text = {"num_kv_heads": params["n_kv_heads"], "head_size": params["head_dim"]}
    audio: dict[str, Any] = {"head_size": encoder["head_dim"]}
    if "tokens_per_state" in {each.name for each in fields(SlidingWindowSpec)}:
        audio |= {
            "num_kv_heads": heads,
            "tokens_per_state": Fraction(1, pooled),
            "sliding_window": -(-window // pooled) + 1,
        }
    else:  # vLLM 0.20.0: pooled frames count as heads, the window's frames as tokens
        audio |= {"num_kv_heads": heads * pooled, "sliding_window": window}
    common = {"block_size": block_size, "dtype": dtype}
    of_text: Any
    if params.get("sliding_window"):
        of_text = SlidingWindowSpec(**common, **text, sliding_window=params["sliding_window"])
    else:
        of_text = FullAttentionSpec(**common, **text)
    specs = {f"text.{number}": of_text for number in range(params["n_layers"])}
    if not encode_once:
        specs |= {f"encoder.{number}": SlidingWindowSpec(**common, **audio) for number in range(encoder["n_layers"])}
    return specs


@dataclass(frozen=True)
class Device:
    """The first device that vLLM would use. Memory in bytes."""

    name: str
    total: int
    free: int


def _device(current: Any) -> Device:
    """Raises ConfigError where there is none, or none that can be asked without starting CUDA."""
    if current.is_cpu():
        from vllm.utils.cpu_resource_utils import get_memory_node_info

        node = get_memory_node_info(0)
        return Device("memory node 0 (CPU)", node.total_memory, node.available_memory)
    if not current.is_cuda():
        raise ConfigError(
            f"vLLM {version('vllm')} is no CPU build and sees no NVIDIA GPU (its platform is {current.device_name!r}): "
            "look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    from vllm.third_party import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        raise ConfigError("CUDA_VISIBLE_DEVICES is set and empty, so that no GPU can be seen: unset it, or name one")
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(current.device_id_to_physical_device_id(0))
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        name = pynvml.nvmlDeviceGetName(handle)
    except (pynvml.NVMLError, RuntimeError, IndexError, ValueError) as error:
        raise ConfigError(
            f"NVML does not tell the memory of the first GPU (CUDA_VISIBLE_DEVICES is {visible!r}): "
            f"{type(error).__name__}: {error}"
        ) from error
    return Device(name, int(memory.total), int(memory.free))


def _explicit_kv_bytes(options: Namespace, on_cpu: bool) -> tuple[int, str] | None:
    """A KV cache of a size that is given, in bytes, and what gives it."""
    if on_cpu and (text := os.environ.get("VLLM_CPU_KVCACHE_SPACE")):
        try:
            return int(text) * GIB, f"VLLM_CPU_KVCACHE_SPACE={text}"
        except ValueError:
            raise ConfigError(f"VLLM_CPU_KVCACHE_SPACE is {text!r}, expected a whole number of GiB") from None
    if options.kv_cache_memory_bytes:
        return options.kv_cache_memory_bytes, f"kv_cache_memory_bytes {options.kv_cache_memory_bytes}"
    return None


def _runs_on_cpu() -> bool:
    """Whether vLLM's encoder attention takes its CPU backend: asked, not known by version."""
    from vllm.model_executor.models.whisper_causal import create_whisper_attention_backend_with_block_pooling
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    try:
        create_whisper_attention_backend_with_block_pooling(CPUAttentionBackend, 4)
    except NotImplementedError:
        return False
    return True


def _clip(report: Report, held: Checkpoint, plan: Plan) -> None:
    try:
        longest, padding, rate = longest_clip(held.tekken, plan.max_model_len)
    except CheckpointError as error:
        report.problem(str(error))
        return
    if longest < 1:
        report.problem(f"max_model_len is {plan.max_model_len}, and padding alone takes {padding} tokens: raise it")
        return
    report.row(
        "transcribed", f"{longest / rate:.2f} s: {plan.max_model_len - padding:,} tokens, and {padding} of padding"
    )
    report.row("beyond", "refused with status 400")
    for limit in _upload_limits(longest, rate):
        report.row("upload limit", limit)


def _upload_limits(samples: int, rate: int) -> Iterator[str]:
    """Limits of vLLM's own, from the environment, that a clip of so many samples would exceed."""
    from vllm import envs

    for name, per_sample, of in (
        ("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", 2 / MIB, " of 16-bit WAV"),
        ("VLLM_MAX_AUDIO_DECODE_DURATION_S", 1 / rate, ""),  # this and the next not in vLLM 0.20.0
        ("VLLM_MAX_AUDIO_DECODE_BYTES", 4, f" of one channel at {rate / 1000:g} kHz"),
    ):
        limit, needed = getattr(envs, name, None), math.ceil(samples * per_sample)
        if limit is not None and limit < needed:
            takes = limit / per_sample / rate
            yield f"{name} is {limit}: {takes:.0f} s{of} at most. For the longest clip set it to {needed} or more"


def longest_clip(tekken: dict[str, Any], tokens: int) -> tuple[int, int, int]:
    """(samples of the longest clip that takes at most so many token positions, positions of its padding, Hz).

    `tekken` is the `audio` part of tekken.json; mistral-common's AudioConfig says what is padded on either side. Raises
    CheckpointError for values that it refuses.
    """
    from mistral_common.tokens.tokenizers.audio import AudioConfig, AudioSpectrogramConfig

    values = dict(tekken)
    try:
        encoding = AudioSpectrogramConfig(**values.pop("audio_encoding_config"))
        audio = AudioConfig(encoding_config=encoding, **values)
    except (AssertionError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"mistral-common refuses the audio part of tekken.json: {type(error).__name__}: {error}"
        ) from error
    padding = audio.n_left_pad_tokens + audio.n_right_pad_tokens()
    return (tokens - padding) * audio.raw_audio_length_per_tok, padding, audio.sampling_rate


def _size(amount: int) -> str:
    return f"{amount / GIB:.2f} GiB" if amount >= GIB else f"{amount / MIB:.2f} MiB"
