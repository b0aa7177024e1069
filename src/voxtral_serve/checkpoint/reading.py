"""Read a checkpoint directory and check its layout, values, tensors and files.

All names and values are in Mistral's form for both layouts, because vLLM's native model reads this form. Only the
headers of weight files are read. Standard library only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxtral_serve.checkpoint.errors import CheckpointError
from voxtral_serve.checkpoint.files import check_download, layout_of, read_json, weight_files
from voxtral_serve.checkpoint.headers import Tensor, read_tensors, stored_bytes, tensor_bytes
from voxtral_serve.checkpoint.layouts import ENCODER, MISTRAL
from voxtral_serve.checkpoint.params import is_realtime, to_params
from voxtral_serve.checkpoint.shapes import check_tensors, expected_shapes

# Constants in the code of vLLM's encoder. A checkpoint with other values would give wrong results.
FIXED = {"rope_theta": 1e6, "norm_eps": 1e-5, "causal": True, "pos_embed": "rope"}


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint directory.

    For both layouts, `params` has the form of Mistral's params.json, and `tensors` has Mistral's names. `unused` are
    weight files of the other layout in the same directory.
    """

    directory: Path
    layout: str
    params: dict[str, Any]
    tekken: dict[str, Any]  # the `audio` part of tekken.json
    tensors: dict[str, Tensor]
    unused: tuple[Path, ...] = ()

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class OtherModel:
    """A directory with Voxtral-Mini-3B-2507 or Whisper. Its files are complete; nothing else is checked."""

    directory: Path
    weight_bytes: int
    model: str = "Voxtral, but not Realtime"


def read(directory: Path) -> Checkpoint:
    """Read and check a directory. Raises CheckpointError for missing files and tensors, and for wrong shapes."""
    layout = layout_of(directory)
    tekken = _audio_of_tekken(directory / "tekken.json")
    unused: tuple[Path, ...] = ()
    if layout == MISTRAL:
        params = read_json(directory / "params.json")
        if not is_realtime(params):
            raise CheckpointError(
                f"{directory / 'params.json'} does not belong to Voxtral Realtime: it has no causal audio encoder"
            )
        tensors = read_tensors(directory, "consolidated")
        if (directory / "config.json").is_file():
            unused = tuple(sorted(directory.glob("model*.safetensors")))
            if unused:
                _compare(directory, params, tensors)
    else:
        params = _params_of_hugging_face(directory)
        tensors = read_tensors(directory, "model")
        _refuse_strangers(directory)
    source = directory / ("params.json" if layout == MISTRAL else "config.json")
    _check_values(params, source)
    try:
        expected = expected_shapes(params)
    except KeyError as error:
        raise CheckpointError(f"{source} lacks {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: {error}") from error
    if not params.get("quantization"):  # quantized tensors have other shapes and additional scales
        check_tensors(directory, expected, tensors, layout)
    return Checkpoint(directory, layout, params, tekken, tensors, unused)


def _check_values(params: Mapping[str, Any], source: Path) -> None:
    encoder = params["multimodal"]["whisper_model_args"]["encoder_args"]
    for name, value in FIXED.items():
        if encoder.get(name, value) != value:
            raise CheckpointError(
                f"the encoder's {name} is {encoder[name]!r}: vLLM's Voxtral encoder supports {value!r} only"
            )
    if not encoder.get("sliding_window"):
        raise CheckpointError(
            f"the encoder's sliding_window is {encoder.get('sliding_window')!r}: vLLM's Voxtral encoder needs a window"
        )
    for name in ("rope_theta", "norm_eps"):
        if not isinstance(params.get(name), int | float):
            raise CheckpointError(f"{source}: {name} is {params.get(name)!r}, expected a number")


def _params_of_hugging_face(directory: Path) -> dict[str, Any]:
    config = read_json(directory / "config.json")
    if config.get("model_type") != "voxtral_realtime":
        raise CheckpointError(
            f"{directory / 'config.json'}: model_type is {config.get('model_type')!r}, expected 'voxtral_realtime'"
        )
    files = (directory / name for name in ("processor_config.json", "preprocessor_config.json"))
    processor = next((read_json(file) for file in files if file.is_file()), None)
    try:
        return to_params(config, processor)
    except KeyError as error:
        raise CheckpointError(f"{directory / 'config.json'} lacks {error.args[0]!r}") from error


def _refuse_strangers(directory: Path) -> None:
    """Raises CheckpointError for other *.safetensors files.

    Without an index vLLM loads all of them, and of two tensors with the same name the last one wins.
    """
    if (directory / "model.safetensors.index.json").is_file():
        return
    strangers = sorted(set(directory.glob("*.safetensors")) - set(weight_files(directory, "model")))
    if strangers:
        raise CheckpointError(
            f"{strangers[0]} is beside model.safetensors, and vLLM would load both: move it to another directory"
        )


def _compare(directory: Path, params: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError if the two layouts in a directory are of different models: other shapes or final norms."""
    try:
        theirs, other = _params_of_hugging_face(directory), read_tensors(directory, "model")
    except CheckpointError:
        return  # this layout is not served, so its errors do not matter
    for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size"):
        if params.get(name) != theirs[name]:
            raise CheckpointError(
                f"{directory} mixes two models: params.json has {name} {params.get(name)}, config.json {theirs[name]}. "
                "Keep the files of one layout"
            )
    for name in ("norm.weight", f"{ENCODER}transformer.norm.weight"):
        if name not in other or name not in tensors:
            stem = "model" if name in tensors else "consolidated"
            raise CheckpointError(
                f"{directory} mixes two models: {stem}*.safetensors has no {name}. Keep the files of one layout"
            )
        same_type = tensors[name].dtype == other[name].dtype
        if same_type and tensor_bytes(directory, "consolidated", tensors[name]) != tensor_bytes(
            directory, "model", other[name]
        ):
            raise CheckpointError(
                f"{directory} mixes two models: {tensors[name].stored_as} of consolidated.safetensors and "
                f"{other[name].stored_as} of model.safetensors differ. Keep the files of one layout"
            )


def _audio_of_tekken(path: Path) -> dict[str, Any]:
    audio = read_json(path).get("audio")
    if not isinstance(audio, dict) or audio.get("transcription_format") != "streaming":
        raise CheckpointError(
            f"{path} has no `audio` part with transcription_format 'streaming': it is not Voxtral Realtime's tokenizer"
        )
    return audio


def other_model(directory: Path) -> OtherModel | None:
    """Another Voxtral model in Mistral's layout, or Whisper in Hugging Face's. None for Voxtral Realtime and others.

    Raises CheckpointError if files are missing, unreadable or incomplete.
    """
    if _is_whisper(directory):
        return OtherModel(directory, stored_bytes(directory, "model"), "Whisper")
    if layout_of(directory) != MISTRAL:
        return None
    params = read_json(directory / "params.json")
    multimodal = params.get("multimodal")
    if is_realtime(params) or not isinstance(multimodal, dict) or "whisper_model_args" not in multimodal:
        return None
    return OtherModel(directory, stored_bytes(directory, "consolidated"))


def _is_whisper(directory: Path) -> bool:
    """Whether the directory has Whisper. Raises CheckpointError if it has, but without weights."""
    if not directory.is_dir():
        return False
    check_download(directory)
    config = directory / "config.json"
    if not config.is_file() or read_json(config).get("model_type") != "whisper":
        return False
    if not any(directory.glob("model*.safetensors")):
        raise CheckpointError(f"{directory} has the config.json of Whisper, but no model.safetensors: download it")
    return True
