"""The audio encoder of Voxtral Realtime for whole clips: short clips packed together, long clips in pieces.

The encoder is causal, with a window of 750 frames (15 s). Encoding all frames of a clip together therefore gives the
same result as encoding four at a time. A piece of a clip needs only the last 749 keys and values of each layer before
it. Every clip begins with the same silence, its left padding, whose frames are computed once.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from mistral_common.audio import mel_filter_bank
from torch import nn
from vllm._custom_ops import fused_add_rms_norm
from vllm.config import VllmConfig
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.mistral import MistralMLP
from vllm.model_executor.models.utils import maybe_prefix
from vllm.model_executor.models.voxtral import VoxtralEncoderModel
from vllm.model_executor.models.whisper_causal import WhisperCausalConv1d

from voxtral_serve.engine.clip_length import clip_positions
from voxtral_serve.engine.packed_attention import packed_attention

# Constants of the encoder that its config does not have; they are in the code of WhisperCausalEncoder.
ROPE_THETA = 1e6
NORM_EPS = 1e-5
# Frames that are computed at once: 164 s of audio. This limits the memory for activations and is enough to keep a large
# GPU busy.
FRAMES = 8192
# Sizes of the CUDA graphs in frames, up to FRAMES or the longest clip: close together, since a pass computes the unused
# frames as well. CLIPS is the limit of clips in one graph.
SIZES = (*range(128, 2048, 128), *range(2048, 4096, 256), 4096, 6144)
CLIPS = 8
# Windows of the spectrogram are computed in multiples of this number.
WINDOWS = 256
# Windows of the spectrogram that the convolutions read before the two of a frame itself
WINDOWS_BEFORE = 3
# Queries per attention call on a CPU. The mask is BLOCK by BLOCK + window at most.
BLOCK = 1024


class Spans(NamedTuple):
    """Numbers of queries and keys of each packed clip. The cumulative sums are for the GPU kernel, else None.

    `left`: keys and values by layer, [n, heads, head_dim] each, that come before those of every clip.
    """

    queries: list[int]
    keys: list[int]
    query_starts: torch.Tensor | None = None
    key_starts: torch.Tensor | None = None
    left: "dict[EncoderAttention, tuple[torch.Tensor, torch.Tensor]] | None" = None

    @classmethod
    def of(cls, queries: list[int], keys: list[int], like: torch.Tensor) -> "Spans":
        if not like.is_cuda or like.dtype == torch.float32:
            return cls(queries, keys)
        starts = torch.tensor([[0, *accumulate(lengths)] for lengths in (queries, keys)], dtype=torch.int32)
        # Pinned memory, because another copy would make the CPU wait for the GPU.
        return cls(queries, keys, *starts.pin_memory().to(like.device, non_blocking=True))

    def attend(self, layer: "EncoderAttention", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        left = None if self.left is None else self.left[layer]
        return attention(q, k, v, self, layer.window, left)


class Attending(Protocol):
    """The attention of packed frames: `Spans` for whole clips, live_encoder.RingStep for live sessions."""

    def attend(self, layer: "EncoderAttention", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q, k (rotated) and v of packed frames, each [n, heads, head_dim] -> [n, heads, head_dim]."""
        ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: Spans,
    window: int,
    left: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention of packed clips, q [sum of queries, heads, head_dim], k and v [sum of keys, heads, head_dim].

    The queries of a clip are its last positions. A position attends to itself and the window - 1 positions before.
    `left`: keys and values that come before those of every clip.
    """
    if spans.query_starts is not None and spans.key_starts is not None:
        return packed_attention(q, k, v, spans.query_starts, spans.key_starts, window, left)
    clips = zip(q.split(spans.queries), k.split(spans.keys), v.split(spans.keys), strict=True)
    done = []
    for clip_q, *clip_kv in clips:
        if left is not None:
            clip_kv = [torch.cat(both) for both in zip(left, clip_kv, strict=True)]
        one_q, one_k, one_v = (x.transpose(0, 1) for x in (clip_q, *clip_kv))
        done.append(windowed_attention(one_q, one_k, one_v, window).transpose(0, 1))
    return torch.cat(done)


def windowed_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Attention of one clip: q [heads, n, head_dim] at the last n of m positions, k and v [heads, m, head_dim]."""
    n, before = q.shape[1], k.shape[1] - q.shape[1]
    out = []
    for start in range(0, n, BLOCK):
        end = min(start + BLOCK, n)
        first, last = max(0, before + start - window + 1), before + end
        rows = torch.arange(before + start, last, device=q.device)[:, None]
        columns = torch.arange(first, last, device=q.device)[None]
        mask = (columns <= rows) & (columns > rows - window)
        out.append(F.scaled_dot_product_attention(q[:, start:end], k[:, first:last], v[:, first:last], attn_mask=mask))
    return torch.cat(out, 1)


def convolution(x: torch.Tensor, layer: nn.Module, stride: int = 1) -> torch.Tensor:
    """[clips, m, channels] -> [clips, n, dim], without padding, as a matrix product.

    cuDNN would search a plan for each new length, which takes the host 1.5 ms.
    """
    weight = layer.weight
    return F.linear(x.unfold(1, weight.shape[2], stride).flatten(2), weight.flatten(1), layer.bias)


def add_and_normalise(added: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised sum, sum), both [n, dim]. On a GPU this is one kernel, which overwrites the arguments."""
    if not added.is_cuda:
        residual = residual + added
        return norm(residual), residual
    fused_add_rms_norm(added, residual, norm.weight.data, norm.variance_epsilon)
    return added, residual


class Past:
    """Keys and values of the last window - 1 frames before a piece, by layer. It is empty before the first frame."""

    def __init__(self, window: int, left: "LeftPadding | None" = None) -> None:
        """`left` has the frames before the first piece; None if there are none."""
        self.window = window
        self.kv = dict(left.kv) if left is not None else {}

    def extend(self, layer: "EncoderAttention", *kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys and values [n, heads, head_dim] -> the stored ones and these together. Stores the last window - 1."""
        if layer in self.kv:
            kv = tuple(torch.cat(both) for both in zip(self.kv[layer], kv, strict=True))
        first = len(kv[0]) - min(self.window - 1, len(kv[0]))
        last_k, last_v = (x[first:].clone(memory_format=torch.contiguous_format) for x in kv)
        self.kv[layer] = last_k, last_v
        return kv

    def __len__(self) -> int:
        """The number of stored frames, to which the next piece attends."""
        return len(next(iter(self.kv.values()))[0]) if self.kv else 0


class LeftPadding(NamedTuple):
    """Result of encoding the silence with which every clip begins. It is the same for all clips and computed once.

    kv       keys and values [n, heads, head_dim] by layer, of the last frames: later frames attend to these
    frames   number of all frames of the silence
    rows     audio rows of the silence, [frames / stride, dim]
    """

    kv: "dict[EncoderAttention, tuple[torch.Tensor, torch.Tensor]]"
    frames: int
    rows: torch.Tensor


class EncoderAttention(nn.Module):
    def __init__(self, vllm_config: VllmConfig, number: int, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.number = number  # of this layer; live_encoder selects the layer's rings by it
        self.heads = config.encoder_attention_heads
        self.head_dim, self.window = config.encoder_head_dim, config.sliding_window
        quantization = vllm_config.quant_config
        self.qkv_proj = QKVParallelLinear(
            hidden_size=config.d_model,
            head_size=self.head_dim,
            total_num_heads=config.encoder_attention_heads,
            bias=True,
            quant_config=quantization,
            prefix=f"{prefix}.qkv_proj",
        )
        self.out_proj = RowParallelLinear(
            input_size=config.encoder_attention_heads * self.head_dim,
            output_size=config.d_model,
            bias=True,
            quant_config=quantization,
            prefix=f"{prefix}.out_proj",
        )
        # Only the frames that fit the context: the table for all positions of the model would have 67 MB.
        self.rotary_emb = get_rope(
            self.head_dim,
            max_position=vllm_config.model_config.max_model_len * config.block_pool_size,
            is_neox_style=False,
            rope_parameters={"rope_theta": ROPE_THETA},
        )

    def forward(
        self, frames: torch.Tensor, positions: torch.Tensor, spans: Attending, past: Past | None = None
    ) -> torch.Tensor:
        q, k, v = self.qkv_proj(frames)[0].chunk(3, dim=-1)
        if not q.is_cuda:  # vLLM's CPU kernel needs contiguous rows
            q, k = q.contiguous(), k.contiguous()
        q, k = self.rotary_emb(positions, q, k)
        q, k, v = (x.unflatten(-1, (self.heads, self.head_dim)) for x in (q, k, v))
        if past is not None:
            k, v = past.extend(self, k, v)
        return self.out_proj(spans.attend(self, q, k, v).flatten(1))[0]


class EncoderLayer(nn.Module):
    def __init__(self, vllm_config: VllmConfig, number: int, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.self_attn = EncoderAttention(vllm_config, number, f"{prefix}.self_attn")
        self.self_attn_layer_norm = RMSNorm(config.d_model, eps=NORM_EPS)
        self.mlp = MistralMLP(
            hidden_size=config.d_model,
            intermediate_size=config.encoder_ffn_dim,
            hidden_act="silu",
            quant_config=vllm_config.quant_config,
            bias=True,
            gate_up_proj_bias=False,
            prefix=f"{prefix}.mlp",
        )
        self.final_layer_norm = RMSNorm(config.d_model, eps=NORM_EPS)

    def forward(
        self, added: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, spans: Attending, past: Past | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output of the previous layer, residual stream without it) -> the same for this layer."""
        frames, residual = add_and_normalise(added, residual, self.self_attn_layer_norm)
        frames, residual = add_and_normalise(
            self.self_attn(frames, positions, spans, past), residual, self.final_layer_norm
        )
        return self.mlp(frames), residual


class Encoder(nn.Module):
    """The layers of the encoder. Its parameters have the names of WhisperCausalEncoder, whose loader is used."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.window = config.sliding_window
        self.conv1 = WhisperCausalConv1d(config.num_mel_bins, config.d_model, kernel_size=3)
        self.conv2 = WhisperCausalConv1d(config.d_model, config.d_model, stride=2, kernel_size=3)
        self.layers = nn.ModuleList(
            [EncoderLayer(vllm_config, number, f"{prefix}.layers.{number}") for number in range(config.encoder_layers)]
        )
        self.layer_norm = RMSNorm(config.d_model, eps=NORM_EPS)
        # If vLLM compiles the model, it disables its own kernels. The encoder is not compiled, so they are enabled.
        for module in self.modules():
            if isinstance(module, CustomOp) and next(self.parameters()).is_cuda:
                module._forward_method = module.forward_cuda

    def convolve(self, mel: torch.Tensor, first: bool) -> torch.Tensor:
        """Spectrogram [clips, m, bins] -> [clips, n, dim], one frame per two windows of the spectrogram.

        For the first piece of a clip m = 2 n, and both convolutions are padded with zeros on the left. For other pieces
        m = 2 n + WINDOWS_BEFORE: they start with the last windows of the previous piece.
        """
        x = mel
        x = F.gelu(convolution(F.pad(x, (0, 0, 2, 0)) if first else x, self.conv1))
        return F.gelu(convolution(F.pad(x, (0, 0, 1, 0)) if first else x, self.conv2, stride=2))

    def convolve_at(self, mel: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Spectrogram [m, bins] -> the frames [n, dim] that begin at its windows `places` [n] and read five of them."""
        x = F.gelu(convolution(mel[None], self.conv1))[0]
        read = x.unfold(0, self.conv2.weight.shape[2], 1)[places]
        return F.gelu(F.linear(read.flatten(1), self.conv2.weight.flatten(1), self.conv2.bias))

    def forward(
        self, frames: torch.Tensor, positions: torch.Tensor, spans: Attending, past: Past | None = None
    ) -> torch.Tensor:
        """Packed frames [n, dim] at positions [n] in their clips -> [n, dim]."""
        residual = torch.zeros_like(frames)
        for layer in self.layers:
            frames, residual = layer(frames, residual, positions, spans, past)
        return add_and_normalise(frames, residual, self.layer_norm)[0]


class EncodeOnceEncoder(VoxtralEncoderModel):
    """The log-mel spectrogram and the encoder, with vLLM's weight loader."""

    def __init__(self, vllm_config: VllmConfig, silence: int, *, prefix: str = "") -> None:
        """`silence`: the samples of zeros, a multiple of a row, with which every clip begins and which determine the
        rows that they are in."""
        nn.Module.__init__(self)
        config: Any = vllm_config.model_config.hf_config
        self.config = config
        self.dtype = vllm_config.model_config.dtype
        self.is_causal = True
        self.samples = config.hop_length * 2  # per encoder frame
        self.clip_frames = clip_positions(vllm_config.model_config) * config.block_pool_size
        half = self.dtype in (torch.bfloat16, torch.float16)
        self.use_graphs = half and not vllm_config.model_config.enforce_eager
        self.silence = silence
        self.left: LeftPadding | None = None
        self.graphs: Graphs | None = None
        self.whisper_encoder = Encoder(vllm_config, maybe_prefix(prefix, "whisper_encoder"))
        filters = mel_filter_bank(
            num_frequency_bins=1 + config.window_size // 2,
            num_mel_bins=config.num_mel_bins,
            min_frequency=0.0,
            max_frequency=8000.0,
            sampling_rate=config.sampling_rate,
        )
        self.register_buffer("mel_filters", torch.tensor(filters, dtype=torch.float32), persistent=False)
        self.register_buffer("hann", torch.hann_window(config.window_size, dtype=torch.float32), persistent=False)

    def log_mel(self, windows: torch.Tensor) -> torch.Tensor:
        """Samples [..., n, window] -> [..., n, bins]."""
        power = torch.fft.rfft(windows * self.hann).abs() ** 2
        log = (power @ self.mel_filters).clamp(min=1e-10).log10()
        return (log.clamp(min=self.config.global_log_mel_max - 8.0) + 4.0) / 4.0

    def spectrogram(self, padded: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """[last - first, bins] of a waveform that is padded with half a window of reflection on each side."""
        hop, size, count = self.config.hop_length, self.config.window_size, last - first
        # cuFFT makes a plan for each number of windows, which takes the host a millisecond: there are few numbers.
        samples = padded[first * hop : (last - 1) * hop + size]
        return self.log_mel(F.pad(samples, (0, -count % WINDOWS * hop)).unfold(0, size, hop))[:count]

    def reflected(self, audio: torch.Tensor) -> torch.Tensor:
        """A waveform [samples] padded with half a window of reflection on each side, as float32."""
        half = self.config.window_size // 2
        return F.pad(audio.float()[None], (half, half), mode="reflect")[0]

    def pieces(self, audio: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
        """Yield the encoder's input for the frames of a clip from `first` on, in pieces [n, dim], n at most FRAMES."""
        padded, total = self.reflected(audio), len(audio) // self.samples
        for start in range(first, total, FRAMES):
            end = min(start + FRAMES, total)
            mel = self.spectrogram(padded, max(0, 2 * start - WINDOWS_BEFORE), 2 * end).to(self.dtype)
            yield self.whisper_encoder.convolve(mel[None], first=start == 0)[0]

    def encode(self, pieces: list[torch.Tensor], start: int = 0, past: Past | None = None) -> torch.Tensor:
        """Encode pieces of clips packed together that follow the left padding, or one piece from frame `start` on with
        its `past` -> [sum of n, dim]."""
        left = None
        if past is None and self.left is not None:
            left, start = self.left.kv, self.left.frames
        lengths = [len(piece) for piece in pieces]
        positions = torch.cat([torch.arange(start, start + n, device=pieces[0].device) for n in lengths])
        spans = Spans.of(lengths, [n + len(past or ()) for n in lengths], pieces[0])._replace(left=left)
        return self.whisper_encoder(torch.cat(pieces), positions, spans, past)

    @torch.inference_mode()
    def prepare(self, project: Callable[[torch.Tensor], torch.Tensor], stride: int) -> LeftPadding:
        """Compute the left padding and capture the CUDA graphs, if the configuration has any, unless that is done. The
        weights are loaded then. `project` and `stride` are those of `forward`."""
        if self.left is None:
            past = Past(self.whisper_encoder.window)
            (piece,) = self.pieces(torch.zeros(self.silence, device=self.hann.device), 0)
            rows = project(self.encode([piece], past=past))
            self.left = LeftPadding(past.kv, len(piece), rows)
        if self.graphs is None and self.use_graphs and self.mel_filters.is_cuda:
            self.graphs = Graphs(self, self.left, project, stride)
        return self.left

    def forward(  # type: ignore[override]
        self, audios: list[torch.Tensor], project: Callable[[torch.Tensor], torch.Tensor], stride: int
    ) -> list[torch.Tensor]:
        """float32 waveforms [samples], a multiple of a row each, with the silence at their start -> rows [n, dim of
        `project`] each.

        `project` turns `stride` frames into one row.
        """
        left = self.prepare(project, stride)
        out: dict[int, torch.Tensor] = {}
        waiting: dict[int, torch.Tensor] = {}

        def encode_waiting() -> None:
            if waiting:
                packed = list(waiting.values())
                if self.graphs:
                    rows = self.graphs.replay(packed)
                else:
                    pieces = [piece for audio in packed for piece in self.pieces(audio, left.frames)]
                    rows = project(self.encode(pieces))
                parts = rows.split([frames_of[number] // stride for number in waiting])
                out.update((number, torch.cat([left.rows, part])) for number, part in zip(waiting, parts, strict=True))
                waiting.clear()

        limit = self.graphs.frames if self.graphs else FRAMES
        frames_of = [len(audio) // self.samples - left.frames for audio in audios]
        for number, (audio, frames) in enumerate(zip(audios, frames_of, strict=True)):
            if frames <= 0:
                out[number] = left.rows[: len(audio) // self.samples // stride]
            elif frames > limit:
                out[number] = self._long(audio, left, project)
            else:
                if sum(frames_of[clip] for clip in waiting) + frames > limit or len(waiting) == CLIPS:
                    encode_waiting()
                waiting[number] = audio
        encode_waiting()
        return [out[number] for number in range(len(audios))]

    def _long(
        self, audio: torch.Tensor, left: LeftPadding, project: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The rows of a clip that is encoded in pieces."""
        past, start, done = Past(self.whisper_encoder.window, left), left.frames, [left.rows]
        for piece in self.pieces(audio, left.frames):
            done.append(project(self.encode([piece], start=start, past=past)))
            start += len(piece)
        return torch.cat(done)


class PackedClips:
    """Waveforms of several clips one after the other, and the pass from them to audio rows, for CUDA graphs.

    A clip of n frames behind the left padding has 2 n + `more` windows of the spectrogram: before those of its frames
    the WINDOWS_BEFORE ones that the convolutions read, and after them those that reach into the next clip, which nobody
    reads. Places that a pass does not use keep what an earlier one has left, and the rows computed of it are dropped.
    """

    def __init__(
        self,
        encoder: EncodeOnceEncoder,
        left: LeftPadding,
        project: Callable[[torch.Tensor], torch.Tensor],
        frames: int,
    ) -> None:
        """`frames`: the limit of one pass, without left padding."""
        self.encoder, self.left, self.project = encoder, left, project
        self.hop, self.window = encoder.config.hop_length, encoder.config.window_size
        self.more = WINDOWS_BEFORE + -(-self.window // self.hop) - 1
        device = encoder.mel_filters.device
        self.samples = torch.zeros(self._windows(frames) * self.hop + self.window, device=device)
        self.places = torch.zeros(frames, dtype=torch.int64, device=device)  # first window that a frame reads
        self.positions = torch.zeros_like(self.places)
        self.starts = torch.zeros(CLIPS + 1, dtype=torch.int32, device=device)
        self.numbers = torch.arange(frames, dtype=torch.int32, device=device)

    def _windows(self, frames: int) -> int:
        return 2 * frames + CLIPS * self.more

    def put(self, audios: list[torch.Tensor]) -> list[int]:
        """Copy at most CLIPS clips, waveforms with their left padding. Returns their frames without it."""
        first = (2 * self.left.frames - WINDOWS_BEFORE) * self.hop
        lengths = [len(audio) // self.encoder.samples - self.left.frames for audio in audios]
        windows = [0, *accumulate(2 * n + self.more for n in lengths)]
        for audio, n, at in zip(audios, lengths, windows, strict=False):
            count = (2 * n + WINDOWS_BEFORE - 1) * self.hop + self.window
            self.samples[at * self.hop :][:count] = self.encoder.reflected(audio)[first : first + count]
        ends = [*accumulate(lengths)]
        starts = torch.tensor([0, *ends] + [ends[-1]] * (CLIPS - len(ends)), dtype=torch.int32)
        # From pinned memory, because another copy would make the CPU wait for the GPU.
        self.starts.copy_(starts.pin_memory() if self.starts.is_cuda else starts, non_blocking=True)
        return lengths

    def plan(self, size: int) -> None:
        """Compute `places` and `positions` of the first `size` frames from `starts`. A frame that no clip has counts to
        the last place for a clip: what it reads is within the buffer."""
        numbers = self.numbers[:size]
        clips = torch.bucketize(numbers, self.starts[1:], right=True).clamp_(max=CLIPS - 1)
        self.places[:size] = 2 * numbers + self.more * clips
        self.positions[:size] = numbers - self.starts[clips] + self.left.frames

    def run(self, size: int, spans: Spans) -> torch.Tensor:
        """Rows [size / stride, dim] of the first `size` frames; `spans`: the clips that they are of."""
        self.plan(size)
        samples = self.samples[: (self._windows(size) - 1) * self.hop + self.window]
        mel = self.encoder.log_mel(samples.unfold(0, self.window, self.hop)).to(self.encoder.dtype)
        frames = self.encoder.whisper_encoder.convolve_at(mel, self.places[:size])
        return self.project(self.encoder.whisper_encoder(frames, self.positions[:size], spans))


class Graphs:
    """CUDA graphs of the pass of packed clips. Each graph has a number of frames from `sizes`."""

    def __init__(
        self,
        encoder: EncodeOnceEncoder,
        left: LeftPadding,
        project: Callable[[torch.Tensor], torch.Tensor],
        stride: int,
    ) -> None:
        self.frames = min(FRAMES, max(encoder.clip_frames - left.frames, stride))
        self.sizes = [size for size in SIZES if size < self.frames] + [self.frames]
        self.stride = stride
        self.clips = PackedClips(encoder, left, project, self.frames)
        self.output: dict[int, torch.Tensor] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # The kernel reads the lengths from `starts`.
        spans = Spans([], [], self.clips.starts, self.clips.starts, left.kv)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # one for all graphs, because the allocator does not share memory between streams
        for size in reversed(self.sizes):  # the largest first, so that the others reuse its memory
            self.clips.starts[1:] = size
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.clips.run(size, spans)  # the setup in the first call of a kernel cannot be captured
            torch.cuda.current_stream().wait_stream(stream)
            self.graphs[size] = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.output[size] = self.clips.run(size, spans)
        torch.cuda.empty_cache()  # frees the memory of the runs outside the graphs

    def replay(self, audios: list[torch.Tensor]) -> torch.Tensor:
        """At most CLIPS clips, waveforms with their left padding, with at most `frames` frames without it in total ->
        rows [sum of n / stride, ...] of what follows it."""
        total = sum(self.clips.put(audios))
        size = next(size for size in self.sizes if size >= total)
        self.graphs[size].replay()
        return self.output[size][: total // self.stride].clone()
