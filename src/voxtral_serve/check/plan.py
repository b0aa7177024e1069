"""The config of vLLM's engine for these options and this checkpoint: vLLM makes it, as it does before a start."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxtral_serve.check.device import explicit_kv_bytes, on_cpu
from voxtral_serve.check.report import ConfigError
from voxtral_serve.checkpoint import Checkpoint
from voxtral_serve.engine.clip_length import OPTION as POSITIONS
from voxtral_serve.engine.names import DRAFT_FILE, DRAFT_HEAD, DRAFTER
from voxtral_serve.engine.session import AGE, RING, UPLOAD_DELAY
from voxtral_serve.engine.session import OPTION as SESSIONS


@dataclass(frozen=True)
class Plan:
    """What the memory of a server depends on. Lengths are in token positions of 80 ms."""

    config: Any  # vllm.config.VllmConfig

    @property
    def max_model_len(self) -> int:
        return int(self.config.model_config.max_model_len)

    @property
    def max_num_seqs(self) -> int:
        return int(self.config.scheduler_config.max_num_seqs)

    @property
    def element_bytes(self) -> int:
        """Bytes of a number of the weights and activations."""
        return int(self.config.model_config.dtype.itemsize)

    @property
    def clip_positions(self) -> int:
        """The longest clip: max_model_len, or less if additional_config says so."""
        return int(self.config.additional_config.get(POSITIONS, self.max_model_len))

    @property
    def sessions(self) -> int:
        """The most live sessions."""
        return int(self.config.additional_config.get(SESSIONS, 0))

    @property
    def upload_delay_ms(self) -> int | None:
        """The delay of uploads that name none; None is the checkpoint's."""
        delay_ms: int | None = self.config.additional_config.get(UPLOAD_DELAY)
        return delay_ms

    @property
    def age_s(self) -> int | None:
        """Seconds of one request of a live session; None is max_model_len's."""
        age_s: int | None = self.config.additional_config.get(AGE)
        return age_s

    @property
    def encoder_cache(self) -> int:
        """Audio tokens that the encoder cache holds (vllm.v1.core.encoder_cache_manager.compute_mm_encoder_budget)."""
        return max(self.config.scheduler_config.max_num_batched_tokens, self.clip_positions)

    @property
    def audio_rows(self) -> int:
        """Rows of the LM's width that the encode-once model keeps (voxtral_serve.engine.audio_rows.AudioRows)."""
        tokens = int(self.config.scheduler_config.max_num_batched_tokens)
        # One ring more than sessions, for the unused places of the live encoder's graphs.
        live = (self.sessions + 1) * self.session_rows if self.sessions else 0
        return self.max_num_seqs * self.clip_positions + tokens + live

    @property
    def session_rows(self) -> int:
        """Of these, rows of one live session."""
        return min(RING, int(self.config.scheduler_config.max_num_batched_tokens), self.max_model_len)

    @property
    def drafts(self) -> int:
        """The most tokens that a step drafts for a request; 0 without drafts."""
        speculative = self.config.speculative_config
        return 0 if speculative is None else int(speculative.num_speculative_tokens)

    def draft_head(self, directory: Path) -> Path | None:
        """The file of the drafter that guesses from the audio; None if there is none (engine.drafter.head_file)."""
        speculative = self.config.speculative_config
        path = directory / self.config.additional_config.get(DRAFT_HEAD, DRAFT_FILE)
        return path if speculative is not None and speculative.model == DRAFTER and path.is_file() else None

    @classmethod
    def of(cls, values: Namespace, held: Checkpoint) -> "Plan":
        """From vLLM's options and a checkpoint. Raises ConfigError for values that vLLM or the plugin refuses."""
        from pydantic import ValidationError
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext

        explicit_kv_bytes(values, on_cpu())  # vLLM's error does not name the variable
        try:
            arguments = AsyncEngineArgs.from_cli_args(Namespace(**(vars(values) | {"model": str(held.directory)})))
            return cls(arguments.create_engine_config(UsageContext.OPENAI_API_SERVER))
        except ValidationError as error:
            raise ConfigError("; ".join(map(_why, error.errors()))) from error
        except Exception as error:  # any exception here would end the server
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ConfigError(kind + " ".join(str(error).split())) from error


def _why(error: Any) -> str:
    """One of pydantic's errors as text."""
    where = f"{error['loc'][0]} is {error['input']!r}: " if error["loc"] else ""
    return where + " ".join(error["msg"].removeprefix("Value error, ").split())
