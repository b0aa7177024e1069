"""What a job needs to know of a checkpoint, without its engine."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mistral_common.tokens.tokenizers.audio import AudioConfig, AudioSpectrogramConfig
from safetensors import safe_open

from voxtral_serve import checkpoint
from voxtral_serve.checkpoint.files import weight_files
from voxtral_serve.checkpoint.layouts import AUDIO, MISTRAL
from voxtral_serve.draft.job import DraftError
from voxtral_serve.engine.draft_network import tokenizer_hash
from voxtral_serve.engine.session import SessionShape

EMBEDDINGS = f"{AUDIO}tok_embeddings.weight"
PAD = "[STREAMING_PAD]"
TYPES = ("BF16", "F16", "F32")


class Model(NamedTuple):
    """dim and vocabulary of the language model; tokenizer: SHA-256 of tekken.json; pad: id of [STREAMING_PAD]."""

    checkpoint: checkpoint.Checkpoint
    dim: int
    vocabulary: int
    shape: SessionShape
    tokenizer: str
    pad: int

    @classmethod
    def read(cls, directory: Path) -> "Model":
        """Raises DraftError for a directory that has no checkpoint of Voxtral Realtime."""
        try:
            found = checkpoint.read(directory)
            audio = dict(found.tekken)
            spectrogram = AudioSpectrogramConfig(**audio.pop("audio_encoding_config"))
            shape = SessionShape.of(AudioConfig(encoding_config=spectrogram, **audio))
            special = json.loads((directory / "tekken.json").read_bytes())["special_tokens"]
            pad = next(token["rank"] for token in special if token["token_str"] == PAD)
        except (checkpoint.CheckpointError, KeyError, TypeError, ValueError, AssertionError, StopIteration) as error:
            raise DraftError(f"--checkpoint {directory}: {error}") from None
        dim, vocabulary = found.params["dim"], found.params["vocab_size"]
        return cls(found, dim, vocabulary, shape, tokenizer_hash(directory / "tekken.json"), pad)

    @property
    def files(self) -> list[Path]:
        stem = "consolidated" if self.checkpoint.layout == MISTRAL else "model"
        return weight_files(self.checkpoint.directory, stem)

    def identity(self) -> dict[str, Any]:
        """What audio rows and tokens depend on, for the work folder: the weights by their files, and the delay."""
        states = [(file.name, file.stat()) for file in self.files]
        weights = [[name, state.st_size, state.st_mtime_ns] for name, state in states]
        return {"delay": self.shape.delay, "tokenizer": self.tokenizer, "checkpoint": json.loads(json.dumps(weights))}

    def rows_bytes(self, seconds: float, clips: int) -> int:
        """Bytes of the audio rows of so many clips with so much audio together."""
        audio = seconds * self.shape.rate_hz / self.shape.samples
        return round((audio + clips * (self.shape.left + self.shape.right + 1)) * self.dim * 2)

    def embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, dim]: the language model's input embeddings of these token ids."""
        tensor = self.checkpoint.tensors[EMBEDDINGS]
        if tensor.dtype not in TYPES:
            raise DraftError(f"the token embeddings have type {tensor.dtype}: expected one of {', '.join(TYPES)}")
        for path in self.files:
            with safe_open(path, "pt") as file:
                if tensor.stored_as in file.keys():  # noqa: SIM118 (not a dict)
                    whole: torch.Tensor = file.get_tensor(tensor.stored_as)
                    return whole[tokens].float()
        raise DraftError(f"{self.checkpoint.directory} lacks {tensor.stored_as}")
