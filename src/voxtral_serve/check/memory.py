"""Whether the model and its caches fit into the memory of one device.

vLLM measures the memory of activations and CUDA graphs after it has loaded the model. For the device of this machine it
is not counted, so that nothing is refused that may start; for another GPU it is taken to be as on an H200.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from typing import Any

from voxtral_serve.check.clip import audio_config
from voxtral_serve.check.device import Device, explicit_kv_bytes, first_device, on_cpu, runs_on_cpu
from voxtral_serve.check.kv_cache import KvCache
from voxtral_serve.check.model_directory import parameters
from voxtral_serve.check.options import ServeOptions
from voxtral_serve.check.plan import Plan
from voxtral_serve.check.report import ConfigError, Report, size
from voxtral_serve.checkpoint import Checkpoint, CheckpointError, OtherModel
from voxtral_serve.checkpoint.headers import read_header
from voxtral_serve.engine.names import ENCODE_ONCE
from voxtral_serve.engine.session import AGE, OPTION, SessionShape, request_positions, session_blocks

# Activations, CUDA graphs and the CUDA context of an H200: peak memory less the rest (bench/results/report-h200.json,
# stock-h200.json)
EAGER_BYTES = 1_250_000_000
STOCK_BYTES = 3_500_000_000  # vLLM's own model with full CUDA graphs
ENCODE_ONCE_BYTES = 2_400_000_000
DRAFTS_BYTES = 500_000_000  # more with drafts: graphs for each number of them
AGES_S = (90, 660)  # of live sessions whose number is told
LIVE_ROWS = 8  # of a session that one pass of the encoder computes at most (LiveEncoder)


@dataclass(frozen=True)
class MemoryNeeds:
    """Memory of the model and its caches on one device, in bytes."""

    weights: int
    quantized: bool  # if so, `weights` is the size of the stored tensors
    encoder_cache: int
    audio_rows: int  # 0 without the encode-once model
    sessions: int  # the encoder's keys and values for live sessions
    drafter: int  # 0 without drafts, and for pads
    others: int  # of an H200
    kv: KvCache
    session: int  # of `audio_rows` and `sessions`, what one live session takes

    @property
    def beside_kv(self) -> int:
        """Without `others`."""
        return self.weights + self.encoder_cache + self.audio_rows + self.sessions + self.drafter

    @classmethod
    def of(cls, options: ServeOptions, held: Checkpoint, plan: Plan, kv: KvCache) -> "MemoryNeeds":
        encoder = held.params["multimodal"]["whisper_model_args"]["encoder_args"]
        pooled = held.params["multimodal"]["whisper_model_args"]["downsample_args"]["downsample_factor"]
        quantized = bool(held.params.get("quantization") or options.values.quantization)
        weights = held.weight_bytes if quantized else parameters(held) * plan.element_bytes
        row = (held.params["dim"] if options.encode_once else encoder["dim"] * pooled) * plan.element_bytes
        audio_rows = plan.audio_rows * row if options.encode_once else 0
        sessions = _session_bytes(encoder, pooled, plan) if options.encode_once and plan.sessions else 0
        drafter, others = _drafter_bytes(held, plan), _other_bytes(options, held, plan)
        session = sessions // (plan.sessions + 1) + plan.session_rows * row
        return cls(weights, quantized, plan.encoder_cache * row, audio_rows, sessions, drafter, others, kv, session)


def _session_bytes(encoder: dict[str, Any], pooled: int, plan: Plan) -> int:
    """Of the rings of voxtral_serve.engine.live_encoder.LiveEncoder, which has one place more for unused ones."""
    frames = encoder["sliding_window"] - 1 + LIVE_ROWS * pooled
    ring = -(-frames // pooled) * pooled
    heads: int = encoder["n_layers"] * encoder["n_heads"] * encoder["head_dim"]
    return 2 * (plan.sessions + 1) * heads * ring * plan.element_bytes


def _drafter_bytes(held: Checkpoint, plan: Plan) -> int:
    """Of the network, the embeddings of the tokens that it knows, and the guesses of all requests
    (voxtral_serve.engine.draft_stream.DraftTokens)."""
    path = plan.draft_head(held.directory)
    if path is None:
        return 0
    shapes = {name: entry["shape"] for name, entry in read_header(path)[0].items()}
    network = sum(prod(shape) for name, shape in shapes.items() if name.startswith("network."))
    embeddings: int = shapes["tokens"][0] * held.params["dim"]
    guesses = (plan.max_num_seqs + 1) * (plan.clip_positions + 1 + plan.drafts)
    return (network + embeddings) * plan.element_bytes + 4 * guesses


def _other_bytes(options: ServeOptions, held: Checkpoint, plan: Plan) -> int:
    if options.values.enforce_eager:
        return EAGER_BYTES
    if not options.encode_once:
        return STOCK_BYTES
    # vLLM's warm-up has float32 logits for all drafts of all requests.
    logits = 4 * held.params["vocab_size"] * plan.max_num_seqs * (1 + plan.drafts)
    return ENCODE_ONCE_BYTES + (DRAFTS_BYTES + logits if plan.drafts else 0)


def check_memory(
    report: Report, options: ServeOptions, held: Checkpoint, plan: Plan, advice: Callable[[], str]
) -> None:
    """Compare the memory that Voxtral Realtime needs with that of the device.

    `advice` returns text that is appended to a problem about too little memory.
    """
    values = options.values
    if values.tensor_parallel_size * values.pipeline_parallel_size > 1:
        report.row("not computed", "the config uses several devices, and this check computes the memory of one")
        return
    try:
        kv = KvCache.of(held.params, plan, options.encode_once)
    except ConfigError as error:
        report.row("KV cache", f"not computed: {error}")
        return
    except (AttributeError, ImportError, TypeError) as error:  # internals of vLLM that another version has otherwise
        report.row("KV cache", f"not computed on vLLM {version('vllm')}: {type(error).__name__}: {error}")
        return
    try:
        needs = MemoryNeeds.of(options, held, plan, kv)
    except CheckpointError as error:  # of the drafter's file
        report.problem(str(error))
        return
    _report_needs(report, needs, plan)
    _report_drafts(report, needs, plan)
    pool = _check_room(report, options, needs, plan, advice)
    if pool is not None and needs.sessions:
        _report_sessions(report, held, needs, plan, pool)


def _report_needs(report: Report, needs: MemoryNeeds, plan: Plan) -> None:
    seqs = plan.max_num_seqs
    stored = " (as stored)" if needs.quantized else f" ({8 * plan.element_bytes} bits per parameter)"
    report.row("weights", f"{size(needs.weights)}{stored}")
    report.row("KV cache", f"{size(needs.kv.bytes_of(1))} for one sequence of {plan.max_model_len:,} tokens")
    if seqs > 1:
        report.row("", f"{size(needs.kv.bytes_of(seqs))} for max_num_seqs = {seqs:,} sequences")
    report.row("encoder cache", f"{size(needs.encoder_cache)} for {plan.encoder_cache:,} audio tokens")
    if needs.audio_rows:
        report.row(
            "audio rows", f"{size(needs.audio_rows)} for max_num_seqs = {seqs:,} clips, in addition to the KV cache"
        )
    if needs.sessions:
        report.row("live sessions", f"{size(needs.sessions)} for the encoder's keys and values of {plan.sessions:,}")


def _report_drafts(report: Report, needs: MemoryNeeds, plan: Plan) -> None:
    drafts = f"up to {plan.drafts} a step"
    if needs.drafter:
        report.row("drafts", f"{drafts}, by the drafter of this checkpoint: {size(needs.drafter)}")
    elif plan.drafts:
        report.row("drafts", f"{drafts}, pads: this checkpoint has no drafter (`voxtral-serve draft train`)")
    else:
        report.row("drafts", "none")


def _check_room(
    report: Report, options: ServeOptions, needs: MemoryNeeds, plan: Plan, advice: Callable[[], str]
) -> int | None:
    """Returns the bytes of the KV cache; None if they are not known, or too few."""
    from vllm.platforms import current_platform

    cpu = on_cpu() and options.device is None
    try:
        device = options.device or first_device(current_platform)
        explicit = explicit_kv_bytes(options.values, cpu)
    except ConfigError as error:
        report.problem(str(error))
        return None
    beside_kv = needs.beside_kv + (0 if device.present else needs.others)
    _report_device(report, device, needs, cpu)
    if cpu and not options.encode_once and not runs_on_cpu():
        report.problem(
            f"vLLM {version('vllm')} cannot run its own Voxtral Realtime model on a CPU. Use vLLM 0.32.0, or set "
            f"hf_overrides: {{architectures: [{ENCODE_ONCE}]}}"
        )
    part = options.values.gpu_memory_utilization
    share = int(device.total * part)
    if explicit is None:
        pool, source = share - beside_kv, f"gpu_memory_utilization {part} of {size(device.total)}"
        report.row("share", f"{size(share)}: {source}")
    else:
        pool, source = explicit
        report.row("KV cache space", f"{size(pool)}: {source}")
    if not (explicit and cpu) and share > device.free:
        report.problem(
            f"gpu_memory_utilization {part} reserves {size(share)} of {device.name}, but only {size(device.free)} is "
            "free, so vLLM does not start. Lower gpu_memory_utilization, or stop the processes that use the memory"
            + advice()
        )
    if explicit and beside_kv + pool > device.free:
        audio = f"encoder cache {size(needs.encoder_cache)}"
        audio += f", audio rows {size(needs.audio_rows)}" if needs.audio_rows else ""
        audio += f", live sessions {size(needs.sessions)}" if needs.sessions else ""
        audio += f", drafter {size(needs.drafter)}" if needs.drafter else ""
        audio += "" if device.present else f", activations and CUDA graphs {size(needs.others)}"
        report.problem(
            f"weights {size(needs.weights)}, {audio} and KV cache {size(pool)} ({source}) need more than the "
            f"{size(device.free)} that is free on {device.name}" + advice()
        )
    one = needs.kv.bytes_of(1)
    if one > pool:
        left = size(pool) if pool > 0 else "nothing"
        report.problem(
            f"one sequence of max_model_len {plan.max_model_len:,} needs {size(one)} of KV cache in addition to "
            f"weights of {size(needs.weights)}, but {source} leaves {left}: raise this setting, or lower max_model_len"
            + advice()
        )
        return None
    sequences = pool // needs.kv.block_bytes / needs.kv.blocks
    bound = "" if explicit else "at most " if device.present else "about "
    report.row("room for", f"{bound}{sequences:.2f} sequences of {plan.max_model_len:,} tokens at a time")
    return pool


def _report_sessions(report: Report, held: Checkpoint, needs: MemoryNeeds, plan: Plan, pool: int) -> None:
    """How many live sessions are admitted with `pool` bytes of KV cache, and how many a server for them could have."""
    try:
        shape = SessionShape.of(audio_config(held.tekken))
        promised = request_positions(shape, plan.max_model_len, plan.age_s)
    except (CheckpointError, ValueError):  # told under the longest clip and under live audio
        return
    block, blocks = needs.kv.block_bytes, pool // needs.kv.block_bytes - 1  # one is vLLM's own
    admitted = min(plan.sessions, blocks // _session_blocks(needs, plan, promised))
    promise = f"{AGE} {plan.age_s}" if plan.age_s else f"{AGE} is not set: those of max_model_len"
    report.row("admitted", f"{admitted:,} live sessions of {OPTION} {plan.sessions:,} ({promise})")
    free = pool - block + plan.sessions * needs.session
    most = [
        free // (needs.session + block * _session_blocks(needs, plan, min(positions, plan.max_model_len)))
        for positions in (shape.total_rows(age_s * shape.rate_hz) + 1 for age_s in AGES_S)
    ]
    report.row("", f"with another {OPTION} at most {most[0]:,} of 90 s, or {most[1]:,} of 11 minutes")


def _session_blocks(needs: MemoryNeeds, plan: Plan, positions: int) -> int:
    return session_blocks(needs.kv.layers, positions, plan.max_model_len, plan.drafts)


def _report_device(report: Report, device: Device, needs: MemoryNeeds, cpu: bool) -> None:
    others = "activations, CUDA graphs and PyTorch's own buffers"
    if cpu:
        report.row("not counted", f"{others}: vLLM measures them when it starts")
    elif device.present:
        report.row("not counted", f"{others}: vLLM measures them when it starts, about {size(needs.others)} on an H200")
    else:
        report.row("others", f"{size(needs.others)} for {others}, as on an H200")
    free = f", {size(device.free)} free" if device.present else ", as --gpu says"
    report.row("device", f"{device.name}: {size(device.total)} in total{free}")


def check_memory_of_other(report: Report, values: Namespace, held: OtherModel) -> None:
    """Compare the weights of another model with gpu_memory_utilization's share of the device."""
    from vllm.platforms import current_platform

    report.row("weights", f"{size(held.weight_bytes)} (as stored); this check computes nothing else for this model")
    try:
        device = first_device(current_platform)
    except ConfigError as error:
        report.problem(str(error))
        return
    report.row("device", f"{device.name}: {size(device.total)} in total, {size(device.free)} free")
    share = int(device.total * values.gpu_memory_utilization)
    if not on_cpu() and not values.quantization and held.weight_bytes > share:
        report.problem(
            f"the weights take {size(held.weight_bytes)}, but gpu_memory_utilization {values.gpu_memory_utilization} "
            f"of {device.name} is only {size(share)}: raise gpu_memory_utilization, or use a larger GPU"
        )
