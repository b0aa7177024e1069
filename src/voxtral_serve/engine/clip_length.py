"""Convert between the length of a clip and its token positions, including padding.

The numbers are those of mistral-common's AudioConfig, which reads them from the `audio` part of tekken.json.
Standard library only.
"""

from typing import Any, NamedTuple

OPTION = "max_clip_positions"  # key of additional_config: token positions of the longest clip; default max_model_len


def clip_positions(model_config: Any) -> int:
    """Token positions of the longest uploaded clip, from vLLM's ModelConfig.

    This limit is separate from the context, because live sessions need a context of many minutes, but memory for the
    audio rows of a clip is reserved for its whole length.
    """
    return int(getattr(model_config.hf_config, OPTION, model_config.max_model_len))


class ClipLength(NamedTuple):
    """`padding`: token positions of left and right padding together. The sampling rate is in Hz."""

    padding: int
    samples_per_position: int
    rate_hz: int

    @classmethod
    def of(cls, audio: Any) -> "ClipLength":
        """From mistral_common.tokens.tokenizers.audio.AudioConfig."""
        padding = audio.n_left_pad_tokens + audio.n_right_pad_tokens()
        return cls(padding, audio.raw_audio_length_per_tok, audio.sampling_rate)

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> "ClipLength":
        """From vLLM's MistralTokenizer."""
        return cls.of(tokenizer.instruct.audio_encoder.audio_config)

    @property
    def position_ms(self) -> float:
        """Milliseconds of audio for one token position."""
        return 1000 * self.samples_per_position / self.rate_hz

    def longest(self, positions: int) -> int:
        """Samples of the longest clip with at most `positions` token positions; negative if padding alone has more."""
        return (positions - self.padding) * self.samples_per_position

    def seconds(self, positions: int) -> float:
        """Seconds of the longest clip with at most `positions` token positions, at least 0."""
        return max(0, self.longest(positions)) / self.rate_hz
