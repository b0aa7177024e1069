"""Read a checkpoint directory of Voxtral TTS, and check that it is complete. Standard library only.

vLLM-Omni serves this model. It starts without a voice's file, and the first request for that voice fails in its engine.
"""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from voxtral_serve.checkpoint.errors import CheckpointError
from voxtral_serve.checkpoint.files import LFS, check_download, layout_of, read_json, refuse_pointer
from voxtral_serve.checkpoint.headers import Tensor, read_tensors
from voxtral_serve.checkpoint.layouts import MISTRAL
from voxtral_serve.checkpoint.shapes import check_tensors
from voxtral_serve.checkpoint.speechshapes import OPTIONAL, speech_shapes

MODEL_TYPE = "voxtral_tts"  # of params.json
SMALLEST_NUMBER = 2  # bytes; a voice is stored in bfloat16 or wider


@dataclass(frozen=True)
class SpeechCheckpoint:
    """A complete directory of Voxtral TTS. Its layout is Mistral's; there is no other."""

    NAME: ClassVar = "Voxtral TTS"
    STAGES: ClassVar = ("0", "1")  # text to codes, codes to samples

    directory: Path
    params: dict[str, Any]
    tensors: dict[str, Tensor]
    voices: dict[str, int]  # name -> audio tokens that stand for it in a prompt

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def parameters(self) -> int:
        return sum(prod(tensor.shape) for tensor in self.tensors.values())


def read_speech(directory: Path) -> SpeechCheckpoint | None:
    """Read and check a directory of Voxtral TTS. None for one of another model.

    Raises CheckpointError for missing files, voices and tensors, for wrong shapes, and for files of another model.
    """
    source = directory / "params.json"
    if not directory.is_dir():
        return None
    check_download(directory)
    if not source.is_file():
        return None
    params = read_json(source)
    if params.get("model_type") != MODEL_TYPE:
        return None
    if layout_of(directory) != MISTRAL or not any(directory.glob("consolidated*.safetensors")):
        raise CheckpointError(f"{directory} has no consolidated.safetensors, which {source.name} of Voxtral TTS needs")
    try:
        expected = speech_shapes(params)
        named = params["multimodal"]["audio_tokenizer_args"]["voice"]
        rate = params["multimodal"]["audio_model_args"]["audio_encoding_args"]["sampling_rate"]
    except KeyError as error:
        raise CheckpointError(f"{source} lacks {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{source}: {error}") from error
    voices = _voices(directory, named, rate)
    for name, tokens in voices.items():
        _check_voice(directory / "voice_embedding" / f"{name}.pt", tokens, params["dim"])
    tensors = read_tensors(directory, "consolidated")
    if not params.get("quantization"):
        known = {name: tensor for name, tensor in tensors.items() if not name.startswith(OPTIONAL)}
        check_tensors(directory, expected, known, MISTRAL)
    return SpeechCheckpoint(directory, params, tensors, voices)


def _voices(directory: Path, named: Any, rate: Any) -> dict[str, int]:
    """The voices that params.json names, with their tokens from tekken.json."""
    tekken = directory / "tekken.json"
    found = read_json(tekken).get("audio")
    audio = found if isinstance(found, dict) else {}
    counts = audio.get("voice_num_audio_tokens")
    if not isinstance(counts, dict) or not counts:
        raise CheckpointError(
            f"{tekken} has no `audio` part with voice_num_audio_tokens: it is not Voxtral TTS's tokenizer"
        )
    if audio.get("sampling_rate") != rate:
        raise CheckpointError(
            f"{directory} mixes two models: params.json has sampling_rate {rate!r}, tekken.json "
            f"{audio.get('sampling_rate')!r}"
        )
    if not isinstance(named, Mapping) or not named:
        raise CheckpointError(f"{directory / 'params.json'}: audio_tokenizer_args names no voice: {named!r}")
    if apart := sorted(set(named) ^ set(counts)):
        here, there = ("params.json", "tekken.json") if apart[0] in named else ("tekken.json", "params.json")
        raise CheckpointError(f"{directory} mixes two models: {here} has the voice {apart[0]!r}, {there} has not")
    for name, tokens in counts.items():
        if type(tokens) is not int or tokens < 1:
            raise CheckpointError(f"{tekken}: the voice {name!r} has {tokens!r} audio tokens, expected a whole number")
    return dict(counts)


def _check_voice(path: Path, tokens: int, dim: int) -> None:
    """Raises CheckpointError unless the file is there and has the numbers of its tokens.

    torch.save writes a zip file whose entries `*/data/N` hold the numbers (https://docs.pytorch.org/docs/stable/notes/serialization.html).
    """
    try:
        with path.open("rb") as file:
            refuse_pointer(path, file.read(len(LFS)))
        with zipfile.ZipFile(path) as content:
            stored = max((each.file_size for each in content.infolist() if "/data/" in each.filename), default=0)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing, but params.json names this voice: download it") from error
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is not a complete file of torch.save: {error}") from error
    if stored < tokens * dim * SMALLEST_NUMBER:
        raise CheckpointError(
            f"{path} has {stored} bytes of numbers, but tekken.json gives this voice {tokens} audio tokens of {dim} "
            f"numbers: expected at least {tokens * dim * SMALLEST_NUMBER}"
        )
