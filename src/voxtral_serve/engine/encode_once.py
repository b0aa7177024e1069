"""The encode-once model of Voxtral Realtime: the encoder runs once over all audio, and a decode step runs only the LM.

vLLM's own model runs the encoder on four frames in every decode step, with a KV cache for each encoder layer, because
audio may arrive in pieces. The encoder is causal, so encoding all frames at once gives the same rows.

Uploaded clips: `embed_multimodal` encodes the clip at prefill and returns one audio row per token position. `AudioRows`
holds the rows until the request ends. A step gets token ids and positions. The model's forward adds the rows to the
token embeddings, inside the CUDA graph if there is one.

Live sessions (`/v1/realtime`, if `max_live_sessions` is set): live_scheduler waits for the audio of each row,
live_encoder encodes it as it arrives and writes the rows into `AudioRows`. The forward is the same.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mistral_common.tokens.tokenizers.audio import Audio
from torch import nn
from vllm.config import ModelConfig, SpeechToTextConfig, VllmConfig
from vllm.config.speech_to_text import SpeechToTextParams
from vllm.inputs import PromptType, TokensPrompt
from vllm.model_executor.models.utils import init_vllm_registered_model, maybe_prefix
from vllm.model_executor.models.voxtral import (
    AudioLanguageAdapter,
    VoxtralDummyInputsBuilder,
    VoxtralForConditionalGeneration,
    VoxtralProcessingInfo,
)
from vllm.model_executor.models.voxtral_realtime import (
    TimeEmbedding,
    VoxtralRealtimeGeneration,
    VoxtralRealtimeMultiModalProcessor,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors
from vllm.tokenizers import cached_tokenizer_from_config

from voxtral_serve.engine import draft_network, drafter
from voxtral_serve.engine.audio_rows import AudioRows
from voxtral_serve.engine.clip_length import ClipLength, clip_positions
from voxtral_serve.engine.config import live_sessions
from voxtral_serve.engine.encoder import EncodeOnceEncoder
from voxtral_serve.engine.live_encoder import LiveEncoder
from voxtral_serve.engine.session import DELAYS, SessionShape, has_delays
from voxtral_serve.engine.weights import EitherLayout


class OneClip(VoxtralProcessingInfo):
    """One clip per request. vLLM sizes its encoder cache and its profiling run for the longest clip."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"audio": 1}

    def get_max_audio_tokens(self) -> int:
        return clip_positions(self.ctx.model_config)

    def get_max_audio_array_len(self) -> int:
        """Samples of the longest clip. With padding it fills its positions, so no frame exceeds the rotary table."""
        clip = ClipLength.of_tokenizer(self.get_tokenizer())
        return max(clip.longest(self.get_max_audio_tokens()), clip.samples_per_position)


class Known(nn.Module):
    """Replaces a layer whose input is constant. `value` is the output of that layer, computed once."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value, persistent=False)

    def forward(self, _: torch.Tensor) -> Any:
        return self.value


class ByDelay(nn.Module):
    """Replaces a layer whose input is a delay. `table` has the outputs of that layer for all delays, computed once.

    vLLM's decoder layers multiply by the output, which may have one row for all tokens or one for each.
    """

    table: torch.Tensor

    def __init__(self, table: torch.Tensor) -> None:
        """table [delays, dim]: row d is the output for a delay of d positions."""
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, delays: torch.Tensor) -> torch.Tensor:
        """Delays [n] of the tokens -> [n, dim]."""
        return F.embedding(delays, self.table)


class PaddedClip(VoxtralRealtimeMultiModalProcessor):
    """vLLM's processor, which runs in the API server, with a check of the left padding."""

    def _get_mm_fields_config(self, hf_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError for a clip without its left padding, whose rows the encoder computes once for all clips."""
        tokenizer: Any = self.info.get_tokenizer()
        silence = SessionShape.of(tokenizer.instruct.audio_encoder.audio_config).silence
        for audio in hf_inputs.get("audio_arrays", ()):
            if audio[:silence].any():
                raise ValueError(
                    f"a clip has sound in its first {silence} samples: expected the zeros of its left padding, as "
                    "mistral-common's audio encoder adds them"
                )
        return super()._get_mm_fields_config(hf_inputs, *args, **kwargs)


@MULTIMODAL_REGISTRY.register_processor(PaddedClip, info=OneClip, dummy_inputs=VoxtralDummyInputsBuilder)
class VoxtralRealtimeEncodeOnce(EitherLayout, VoxtralForConditionalGeneration):
    """The model of uploads and live sessions. Select it with `hf_overrides: {architectures: [...]}`."""

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
        shape = SessionShape.of(self.tokenizer.instruct.audio_encoder.audio_config)
        with self._mark_tower_model(vllm_config, "audio"):
            self.whisper_encoder = EncodeOnceEncoder(
                vllm_config.with_hf_config(config.audio_config),
                shape.silence,
                prefix=maybe_prefix(prefix, "whisper_encoder"),
            )
            self.audio_language_adapter = AudioLanguageAdapter(
                hidden_size=config.audio_config.d_model * self.downsample_factor, dim=config.text_config.hidden_size
            )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors
        self.time_embedding = TimeEmbedding(dim=config.text_config.hidden_size)
        self.n_delay_tokens = shape.delay
        self.has_delays = has_delays(vllm_config.additional_config)
        sessions = live_sessions(vllm_config)
        # One additional slot, for the unused places of the live encoder's CUDA graphs
        self.audio_rows = AudioRows(vllm_config, sessions + 1 if sessions else 0, self.n_delay_tokens)
        self.live: LiveEncoder | None = None
        if sessions:
            self.live = LiveEncoder(self.whisper_encoder, self.project, self.audio_rows, shape, sessions)
        self.drafts = drafter.draft_tokens(vllm_config, self.audio_rows)
        self.is_prepared = False  # whether the encoders are

    def embed_multimodal(self, **kwargs: object) -> list[torch.Tensor]:
        """Waveforms `audio_arrays`, [samples] each -> rows [n, LM dim] each, one row per 80 ms of audio."""
        audios = self._parse_and_validate_audio_arrays(**kwargs) or []
        step = self.whisper_encoder.samples * self.downsample_factor
        whole = [F.pad(audio, (0, -len(audio) % step)) for audio in audios]
        encoded: list[torch.Tensor] = self.whisper_encoder(whole, self.project, self.downsample_factor)
        return encoded

    def project(self, frames: torch.Tensor) -> torch.Tensor:
        """[n, encoder dim] -> [n / 4, LM dim]."""
        projected: torch.Tensor = self.audio_language_adapter(
            frames.unflatten(0, (-1, self.downsample_factor)).flatten(1)
        )
        return projected

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor | IntermediateTensors:
        if input_ids is None or inputs_embeds is not None:
            raise RuntimeError(
                "VoxtralRealtimeEncodeOnce was given embeddings: expected token ids, because the model adds the audio "
                "rows itself. worker_cls must be the worker of voxtral_serve.engine.worker"
            )
        if not self.is_prepared:
            self.prepare()
        delay = self.audio_rows.delays(len(positions)) if self.has_delays else self.delay
        embeddings = self.audio_rows.added_to(self.language_model.model.embed_input_ids(input_ids), positions)
        return self.language_model.model(None, positions, None, inputs_embeds=embeddings, t_cond=delay)

    @torch.inference_mode()
    def weights_loaded(self) -> None:
        """The worker calls it when vLLM has loaded the weights, before the first run. vLLM itself has no such call."""
        self.delay = self.settle_delay(self.audio_rows.pool.device)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Encode the left padding, compare the drafter with the weights, and capture the CUDA graphs of both, once.

        It is part of the first run, because that is the profiling run in which vLLM measures how much memory is left
        for the KV cache. With a fixed KV cache size, vLLM encodes no audio in that run, so `forward` does it.
        """
        if self.is_prepared:
            return
        self.whisper_encoder.prepare(self.project, self.downsample_factor)
        if self.live is not None:
            self.live.prepare()
        if self.drafts is not None:
            graphs = self.whisper_encoder.use_graphs and self.audio_rows.pool.is_cuda
            self.drafts.prepare(self.language_model.model.embed_input_ids, self.rows_of_chirp(), graphs)
        self.is_prepared = True

    def rows_of_chirp(self) -> torch.Tensor:
        """The audio rows [n, LM dim] of draft_network.chirp as an uploaded clip."""
        audio = self.tokenizer.instruct.audio_encoder
        rate = audio.audio_config.sampling_rate
        clip = audio.encode_audio(Audio(draft_network.chirp(rate), rate, format="wav")).audio.audio_array
        return self.embed_multimodal(audio_arrays=[torch.from_numpy(clip).to(self.audio_rows.pool.device)])[0]

    def settle_delay(self, device: torch.device) -> torch.Tensor:
        """Replace the decoder layers' projections of the delay by their outputs, which do not depend on the text.

        The checkpoint's delay is the only one, or each of DELAYS is possible (config.has_delays).
        Returns the embedding [1, LM dim] of the checkpoint's delay.
        """

        def embedded(delay: int) -> torch.Tensor:
            tokens = torch.full((1,), delay, device=device, dtype=self.whisper_encoder.dtype)
            return self.time_embedding(tokens)

        delay = embedded(self.n_delay_tokens)
        longest = max(DELAYS[-1], self.n_delay_tokens)
        # One delay at a time: a matrix product of several rows may round differently, and uploads should have the same
        # text as on a server with one delay.
        delays = [embedded(positions) for positions in range(longest + 1)] if self.has_delays else [delay]
        for layer in self.language_model.model.layers:
            values = torch.cat([layer.ada_rms_norm_t_cond(embedding) for embedding in delays])
            layer.ada_rms_norm_t_cond = ByDelay(values) if self.has_delays else Known(values)
        return delay

    @classmethod
    def get_model_state_cls(cls) -> type:
        """The class of this model's state in vLLM's Model Runner V2, the only caller."""
        from voxtral_serve.engine import model_state

        return model_state.RowsState

    @classmethod
    def get_speech_to_text_config(cls, model_config: ModelConfig, task_type: str) -> SpeechToTextConfig:
        return VoxtralRealtimeGeneration.get_speech_to_text_config(model_config, task_type)

    @classmethod
    def get_generation_prompt(cls, stt_params: SpeechToTextParams) -> PromptType:
        """The same prompt as from vLLM's own model, without its conversion to a WAV file in base64."""
        return cls.prompt_with_delay(stt_params, None)

    @classmethod
    def prompt_with_delay(cls, stt_params: SpeechToTextParams, delay_ms: int | None) -> PromptType:
        """The same for a delay; None is the checkpoint's. The request must name another one in its sampling parameters,
        in token positions (session.DELAY)."""
        rate = int(stt_params.stt_config.sample_rate)
        instruct: Any = cached_tokenizer_from_config(stt_params.model_config).instruct
        # vLLM's conversion rounds samples to 16 bits, as libsndfile does. Both models must get the same samples.
        rounded = np.floor(np.rint(stt_params.audio * np.float32(2**31)) / 2**16).clip(-(2**15), 2**15 - 1) / 2**15
        audio = Audio(rounded.astype(np.float32), rate, format="wav")
        clip = instruct.audio_encoder.encode_audio(audio, transcription_delay_ms=delay_ms)
        return TokensPrompt(
            prompt_token_ids=[*instruct.start(), *clip.tokens],
            multi_modal_data={"audio": (clip.audio.audio_array, rate)},
        )
