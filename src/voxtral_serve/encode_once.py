"""Voxtral Realtime for clips that are there as a whole: the encoder runs once, at prefill, and decoding is the LM's.

vLLM's own model runs the encoder on four frames for every token, with a KV cache for each of its layers, since audio
may arrive in pieces. The encoder is causal, so all its frames at once give the same rows: `embed_multimodal` returns
one row for each token position, ready for the LM; vLLM keeps them in its encoder cache while the request lives, and
each step adds the rows of its positions to the token embeddings. Live audio over `/v1/realtime` still needs vLLM's
model.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import ModelConfig, SpeechToTextConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.inputs import PromptType
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.mistral import MistralMLP
from vllm.model_executor.models.utils import init_vllm_registered_model, maybe_prefix
from vllm.model_executor.models.voxtral import (
    AudioLanguageAdapter,
    VoxtralDummyInputsBuilder,
    VoxtralEncoderModel,
    VoxtralForConditionalGeneration,
    VoxtralProcessingInfo,
)
from vllm.model_executor.models.voxtral_realtime import (
    TimeEmbedding,
    VoxtralRealtimeGeneration,
    VoxtralRealtimeMultiModalProcessor,
)
from vllm.model_executor.models.whisper_causal import WhisperCausalConv1d
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors
from vllm.tokenizers import cached_tokenizer_from_config

from voxtral_serve.model import EitherLayout

# The encoder's, not in its config: WhisperCausalEncoder has both built in.
ROPE_THETA = 1e6
NORM_EPS = 1e-5
# Queries that attend at once. With the window before them they bound the mask, so that time and memory grow with the
# length of a clip, not with its square.
BLOCK = 1024
# Tokens past a clip's end that still get a row. The LM may end its text only there: in 16 of pico's 500 clips with the
# first token past the end. vLLM's model goes on over frames of zeros, and without a row the LM never ends.
TAIL = 16


def windowed_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Causal attention of [heads, n, head_dim] in which a position sees itself and the window - 1 before it."""
    n = q.shape[1]
    out = []
    for start in range(0, n, BLOCK):
        end = min(start + BLOCK, n)
        first = max(0, start - window + 1)
        rows = torch.arange(start, end, device=q.device)[:, None]
        columns = torch.arange(first, end, device=q.device)[None]
        mask = (columns <= rows) & (columns > rows - window)
        out.append(F.scaled_dot_product_attention(q[:, start:end], k[:, first:end], v[:, first:end], attn_mask=mask))
    return torch.cat(out, 1)


class EncoderAttention(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.heads = config.encoder_attention_heads // get_tensor_model_parallel_world_size()
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
        self.rotary_emb = get_rope(
            self.head_dim,
            max_position=config.max_position_embeddings + TAIL * config.downsample_factor,
            is_neox_style=False,
            rope_parameters={"rope_theta": ROPE_THETA},
        )

    def forward(self, frames: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(frames)[0].chunk(3, dim=-1)
        q, k = self.rotary_emb(positions, q.contiguous(), k.contiguous())
        q, k, v = (x.unflatten(-1, (self.heads, self.head_dim)).transpose(0, 1) for x in (q, k, v))
        return self.out_proj(windowed_attention(q, k, v, self.window).transpose(0, 1).flatten(1))[0]


class EncoderLayer(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.self_attn = EncoderAttention(vllm_config, f"{prefix}.self_attn")
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

    def forward(self, frames: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        frames = frames + self.self_attn(self.self_attn_layer_norm(frames), positions)
        return frames + self.mlp(self.final_layer_norm(frames))


class Encoder(nn.Module):
    """Mel frames [1, bins, 2 n] -> [n and the tail's, dim].

    Parameters are named as WhisperCausalEncoder's, whose loader is used.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.conv1 = WhisperCausalConv1d(config.num_mel_bins, config.d_model, kernel_size=3)
        self.conv2 = WhisperCausalConv1d(config.d_model, config.d_model, stride=2, kernel_size=3)
        self.layers = nn.ModuleList(
            [EncoderLayer(vllm_config, f"{prefix}.layers.{number}") for number in range(config.encoder_layers)]
        )
        self.layer_norm = RMSNorm(config.d_model, eps=NORM_EPS)
        self.tail = TAIL * config.downsample_factor

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        frames = F.pad(F.gelu(self.conv2(F.gelu(self.conv1(mel)))), (0, self.tail))[0].transpose(0, 1).contiguous()
        positions = torch.arange(len(frames), device=frames.device)
        for layer in self.layers:
            frames = layer(frames, positions)
        return self.layer_norm(frames)


class EncodeOnceEncoder(VoxtralEncoderModel):
    """vLLM's mel spectrogram and loader around the encoder above."""

    def __init__(self, vllm_config: VllmConfig, *, prefix: str = "") -> None:
        nn.Module.__init__(self)
        stock = VoxtralEncoderModel.__init__.__globals__  # its mel filter bank, wherever that version takes it from
        config: Any = vllm_config.model_config.hf_config
        self.config = config
        self.dtype = vllm_config.model_config.dtype
        self.is_causal = True
        self.whisper_encoder = Encoder(vllm_config, maybe_prefix(prefix, "whisper_encoder"))
        filters = stock["mel_filter_bank"](
            num_frequency_bins=1 + self.config.window_size // 2,
            num_mel_bins=self.config.num_mel_bins,
            min_frequency=0.0,
            max_frequency=8000.0,
            sampling_rate=self.config.sampling_rate,
        )
        self.register_buffer("mel_filters", torch.tensor(filters, dtype=torch.float32), persistent=False)

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        """float32 [samples] at the config's rate -> [samples / 320 and the tail's, dim]: one frame for every 20 ms."""
        mel = self.compute_whisper_melspec(audio).to(self.dtype)
        return self.whisper_encoder(mel[None, :, mel.shape[1] % 2 :])


class OneClip(VoxtralProcessingInfo):
    """One whole clip a request; vLLM sizes its encoder cache and its trial run by the longest that fits the context."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"audio": 1}


class WithTail(VoxtralRealtimeMultiModalProcessor):
    """A clip's rows include the tail's, as far as the context goes."""

    def _maybe_apply_prompt_updates(self, *args: Any, **kwargs: Any) -> Any:
        prompt, placeholders = super()._maybe_apply_prompt_updates(*args, **kwargs)
        (clip,) = placeholders["audio"]
        room = self.info.get_max_audio_tokens() - len(clip.tokens)
        tail = [0] * min(TAIL, max(0, room))
        return prompt, {"audio": [dataclasses.replace(clip, tokens=[*clip.tokens, *tail])]}


@MULTIMODAL_REGISTRY.register_processor(WithTail, info=OneClip, dummy_inputs=VoxtralDummyInputsBuilder)
class VoxtralRealtimeEncodeOnce(EitherLayout, VoxtralForConditionalGeneration):
    """Voxtral Realtime for `/v1/audio/transcriptions`; chosen by `hf_overrides: {architectures: [...]}`."""

    requires_raw_input_tokens = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
        config = vllm_config.model_config.hf_config
        self.config = config
        self.downsample_factor = config.audio_config.downsample_factor
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config, hf_config=config.text_config, prefix=maybe_prefix(prefix, "language_model")
            )
        with self._mark_tower_model(vllm_config, "audio"):
            self.whisper_encoder = EncodeOnceEncoder(
                vllm_config.with_hf_config(config.audio_config), prefix=maybe_prefix(prefix, "whisper_encoder")
            )
            self.audio_language_adapter = AudioLanguageAdapter(
                hidden_size=config.audio_config.d_model * self.downsample_factor, dim=config.text_config.hidden_size
            )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors
        self.time_embedding = TimeEmbedding(dim=config.text_config.hidden_size)
        self.n_delay_tokens = self.tokenizer.instruct.audio_encoder.audio_config.get_num_delay_tokens()

    def embed_multimodal(self, **kwargs: object) -> list[torch.Tensor]:
        """Waveforms `audio_arrays`, each [samples] -> for each one row of the LM's width for every 80 ms, and TAIL."""
        rows = []
        for audio in self._parse_and_validate_audio_arrays(**kwargs) or []:
            frames = self.whisper_encoder(audio)
            frames = frames[len(frames) % self.downsample_factor :]
            rows.append(self.audio_language_adapter(frames.unflatten(0, (-1, self.downsample_factor)).flatten(1)))
        return rows

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Iterable[torch.Tensor] | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[n] tokens -> [n, dim]: text embeddings, plus audio rows where `is_multimodal`: up to the tail's end."""
        embeddings = self.language_model.embed_input_ids(input_ids)
        rows = list(multimodal_embeddings or ())
        if rows:
            assert is_multimodal is not None
            embeddings[is_multimodal.to(embeddings.device)] += torch.cat(rows).to(embeddings.dtype)
        return embeddings

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor | IntermediateTensors:
        delay = torch.full((1,), self.n_delay_tokens, device=positions.device, dtype=self.whisper_encoder.dtype)
        return self.language_model.model(
            input_ids,
            positions,
            intermediate_tensors,
            inputs_embeds=inputs_embeds,
            t_cond=self.time_embedding(delay),
        )

    @classmethod
    def get_speech_to_text_config(cls, model_config: ModelConfig, task_type: str) -> SpeechToTextConfig:
        return VoxtralRealtimeGeneration.get_speech_to_text_config(model_config, task_type)

    @classmethod
    def get_generation_prompt(cls, *args: Any, **kwargs: Any) -> PromptType:
        return VoxtralRealtimeGeneration.get_generation_prompt(*args, **kwargs)
