"""What a checkpoint directory holds: its layout, its shapes, and whether a tensor or a file is missing.

Voxtral Realtime is stored in two layouts. Mistral's: params.json and consolidated*.safetensors. Hugging Face's, as
transformers' `save_pretrained` writes it: config.json and model*.safetensors, with other names, and with the rows of
the query and key projections in another order. Both need tekken.json. Here everything is told in Mistral's names, since
vLLM's native model reads those; only headers of weight files are read. Standard library only.
"""

import json
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MISTRAL = "mistral"
HUGGING_FACE = "hugging face"

_AUDIO = "mm_streams_embeddings.embedding_module."
_ENCODER = f"{_AUDIO}whisper_encoder."
# Hugging Face's module names -> Mistral's
_LAYER = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
_ENCODER_LAYER = _LAYER | {"self_attn_layer_norm": "attention_norm", "final_layer_norm": "ffn_norm"}
_TEXT_LAYER = _LAYER | {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "ada_rms_norm.linear1": "ada_rms_norm_t_cond.0",
    "ada_rms_norm.linear2": "ada_rms_norm_t_cond.2",
}
_OTHER = {
    "audio_tower.embedder.conv1": f"{_ENCODER}conv_layers.0.conv",
    "audio_tower.embedder.conv2": f"{_ENCODER}conv_layers.1.conv",
    "audio_tower.norm": f"{_ENCODER}transformer.norm",
    "multi_modal_projector.linear_1": f"{_AUDIO}audio_language_projection.0",
    "multi_modal_projector.linear_2": f"{_AUDIO}audio_language_projection.2",
    "language_model.embed_tokens": f"{_AUDIO}tok_embeddings",
    "language_model.norm": "norm",
    "lm_head": "output",
}
# Built into vLLM's encoder, so a checkpoint with another value would be served wrongly.
_FIXED = {"rope_theta": 1e6, "norm_eps": 1e-5, "causal": True, "pos_embed": "rope"}
# VoxtralRealtimeTextAdaRmsNorm and VoxtralRealtimeFeatureExtractor of transformers have these built in as well.
_T_COND_DIM = 32
_FEATURES = {
    "sampling_rate": 16000,
    "feature_size": 128,
    "hop_length": 160,
    "win_length": 400,
    "global_log_mel_max": 1.5,
}
FRAME_RATE = 12.5  # Hz; one text token for each
LFS = b"version https://git-lfs"  # what the pointer begins with that stands for a file until `git lfs pull`


class CheckpointError(RuntimeError):
    """A checkpoint cannot be served as it is. The message names the file or tensor and what was expected."""


@dataclass(frozen=True)
class Tensor:
    """What a safetensors header says of one tensor."""

    dtype: str  # as safetensors spells it, "BF16"
    shape: tuple[int, ...]
    nbytes: int
    stored_as: str  # its name in the file


@dataclass(frozen=True)
class Checkpoint:
    """A directory that was read and found complete.

    `params` has the form of Mistral's params.json whatever the layout; `tensors` goes by Mistral's names; `unused`
    lists weight files of the other layout that lie beside those served.
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
class Other:
    """A directory with another model, Voxtral-Mini-3B-2507 or Whisper: its files are whole, no more is known."""

    directory: Path
    weight_bytes: int
    model: str = "Voxtral, but not Realtime"


def mistral_name(name: str) -> str:
    """Mistral's name of a tensor that is stored under Hugging Face's; a Mistral name comes back as it is.

    transformers stores the same model as `language_model.model.*` (5.6.2), `language_model.model.model.*` (5.19.0), or,
    with save_original_format=False, under its modules' names, `model.language_model.*`.
    """
    module, _, kind = name.rpartition(".")
    bare = re.sub(r"^(model\.)?language_model\.((model\.)*)", "language_model.", module).removeprefix("model.")
    bare = bare.replace("language_model.lm_head", "lm_head")
    if bare in _OTHER:
        return f"{_OTHER[bare]}.{kind}"
    match = re.fullmatch(r"(audio_tower|language_model)\.layers\.(\d+)\.(.+)", bare)
    if match:
        tower, number, part = match.groups()
        names, prefix = (_ENCODER_LAYER, f"{_ENCODER}transformer.") if tower == "audio_tower" else (_TEXT_LAYER, "")
        if part in names:
            return f"{prefix}layers.{number}.{names[part]}.{kind}"
    return re.sub(r"(whisper_encoder\.conv_layers\.\d)\.(weight|bias)$", r"\1.conv.\2", name)


def is_rotated(name: str) -> bool:
    """Whether the rows of this tensor, by its Mistral name, stand in another order in Hugging Face's layout."""
    return re.search(r"\.attention\.w[qk]\.(weight|bias)$", name) is not None


def expected_shapes(params: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Mistral's name -> shape for every tensor of the architecture that `params` describes.

    Raises KeyError for a value that is missing, ValueError for a size that is none.
    """
    e = params["multimodal"]["whisper_model_args"]["encoder_args"]
    downsample = params["multimodal"]["whisper_model_args"]["downsample_args"]
    sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size")
    for block, names in (
        (e, sizes),
        (e["audio_encoding_args"], ("num_mel_bins",)),
        (params, (*sizes, "ada_rms_norm_t_cond_dim")),
        (downsample, ("downsample_factor",)),
    ):
        for name in names:
            if type(block[name]) is not int or block[name] < 1:
                raise ValueError(f"{name} is {block[name]!r}, expected a whole number of at least 1")
    factor = downsample["downsample_factor"]
    dim, wide = e["dim"], params["dim"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{_ENCODER}conv_layers.0.conv.weight": (dim, e["audio_encoding_args"]["num_mel_bins"], 3),
        f"{_ENCODER}conv_layers.0.conv.bias": (dim,),
        f"{_ENCODER}conv_layers.1.conv.weight": (dim, dim, 3),
        f"{_ENCODER}conv_layers.1.conv.bias": (dim,),
        f"{_ENCODER}transformer.norm.weight": (dim,),
        f"{_AUDIO}audio_language_projection.0.weight": (wide, factor * dim),
        f"{_AUDIO}audio_language_projection.2.weight": (wide, wide),
        f"{_AUDIO}tok_embeddings.weight": (params["vocab_size"], wide),
        "norm.weight": (wide,),
    }
    if not params.get("tied_embeddings"):  # vLLM's default, too
        shapes["output.weight"] = (params["vocab_size"], wide)
    for number in range(e["n_layers"]):
        prefix = f"{_ENCODER}transformer.layers.{number}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(e).items()}
        heads = e["n_heads"] * e["head_dim"]
        if e["use_biases"]:
            shapes |= {
                f"{prefix}attention.wq.bias": (heads,),
                f"{prefix}attention.wv.bias": (heads,),
                f"{prefix}attention.wo.bias": (dim,),
                f"{prefix}feed_forward.w2.bias": (dim,),
            }
    for number in range(params["n_layers"]):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in _layer_shapes(params).items()}
        narrow = params["ada_rms_norm_t_cond_dim"]
        shapes[f"layers.{number}.ada_rms_norm_t_cond.0.weight"] = (narrow, wide)
        shapes[f"layers.{number}.ada_rms_norm_t_cond.2.weight"] = (wide, narrow)
    return shapes


def _layer_shapes(block: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, hidden = block["dim"], block["hidden_dim"]
    queries, keys = block["n_heads"] * block["head_dim"], block["n_kv_heads"] * block["head_dim"]
    return {
        "attention.wq.weight": (queries, dim),
        "attention.wk.weight": (keys, dim),
        "attention.wv.weight": (keys, dim),
        "attention.wo.weight": (dim, queries),
        "attention_norm.weight": (dim,),
        "feed_forward.w1.weight": (hidden, dim),
        "feed_forward.w2.weight": (dim, hidden),
        "feed_forward.w3.weight": (hidden, dim),
        "ffn_norm.weight": (dim,),
    }


def to_params(config: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The params.json that says what Hugging Face's `config.json` and `processor_config.json` say.

    Without a processor file, the feature extractor's values are those that transformers has built in. Raises
    CheckpointError for a value that vLLM's model would not follow.
    """
    if config.get("quantization_config"):
        raise CheckpointError("config.json has a quantization_config: this layout is served unquantized only")
    text, audio = config["text_config"], config["audio_config"]
    for name, block in (("text_config", text), ("audio_config", audio)):
        if not isinstance(block, Mapping):
            raise CheckpointError(f"config.json: {name} is {block!r}, expected an object")
    features = {**_FEATURES, **((processor or {}).get("feature_extractor") or processor or {})}
    if features["feature_size"] != audio["num_mel_bins"]:
        raise CheckpointError(
            f"config.json has num_mel_bins {audio['num_mel_bins']}, "
            f"the processor has feature_size {features['feature_size']}"
        )
    for where, block, name, value in (
        ("config.json: audio_config", audio, "hidden_act", "silu"),
        ("config.json: audio_config", audio, "activation_function", "gelu"),
        ("config.json: text_config", text, "hidden_act", "silu"),
        ("config.json", config, "projector_hidden_act", "gelu"),
    ):
        if block.get(name, value) != value:
            raise CheckpointError(f"{where}.{name} is {block[name]!r}: vLLM's Voxtral model has {value!r} only")
    return {
        "dim": text["hidden_size"],
        "n_layers": text["num_hidden_layers"],
        "head_dim": text["head_dim"],
        "hidden_dim": text["intermediate_size"],
        "n_heads": text["num_attention_heads"],
        "n_kv_heads": text["num_key_value_heads"],
        "rope_theta": _rope_theta("text_config", text),
        "norm_eps": text["rms_norm_eps"],
        "vocab_size": text["vocab_size"],
        # transformers 5.6 writes it for the text model only
        "tied_embeddings": config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)),
        "sliding_window": text["sliding_window"],
        "model_max_length": text["max_position_embeddings"],
        "max_position_embeddings": text["max_position_embeddings"],
        "causal": True,
        "use_biases": False,
        "ada_rms_norm_t_cond": True,
        "ada_rms_norm_t_cond_dim": _T_COND_DIM,
        "multimodal": {
            "whisper_model_args": {
                "encoder_args": {
                    "audio_encoding_args": {
                        "sampling_rate": features["sampling_rate"],
                        "frame_rate": FRAME_RATE,
                        "num_mel_bins": audio["num_mel_bins"],
                        "hop_length": features["hop_length"],
                        "window_size": features["win_length"],
                        "chunk_length_s": None,
                        "global_log_mel_max": float(features["global_log_mel_max"]),
                        "transcription_format": "streaming",
                    },
                    "dim": audio["hidden_size"],
                    "n_layers": audio["num_hidden_layers"],
                    "head_dim": audio["head_dim"],
                    "hidden_dim": audio["intermediate_size"],
                    "n_heads": audio["num_attention_heads"],
                    "n_kv_heads": audio.get("num_key_value_heads", audio["num_attention_heads"]),
                    "vocab_size": audio["vocab_size"],
                    "use_biases": True,
                    "rope_theta": _rope_theta("audio_config", audio),
                    "causal": True,
                    "norm_eps": audio["rms_norm_eps"],
                    "pos_embed": "rope",
                    "max_source_positions": None,
                    "ffn_type": "swiglu",
                    "norm_type": "rms_norm",
                    "sliding_window": audio["sliding_window"],
                },
                "downsample_args": {"downsample_factor": config["downsample_factor"]},
            }
        },
    }


def _rope_theta(where: str, block: Mapping[str, Any]) -> float:
    rope = block.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(f"config.json: {where} has rope_type {rope['rope_type']!r}, expected 'default'")
    theta = rope.get("rope_theta", block.get("rope_theta"))
    if theta is None:
        raise CheckpointError(f"config.json: {where} has no rope_theta")
    if not isinstance(theta, int | float):
        raise CheckpointError(f"config.json: {where} has rope_theta {theta!r}, expected a number")
    return float(theta)


def is_realtime(params: Mapping[str, Any]) -> bool:
    """Whether a params.json is of Voxtral Realtime: a causal speech encoder, where other Voxtral models have not."""
    block: Any = params
    for name in ("multimodal", "whisper_model_args", "encoder_args", "causal"):
        block = block.get(name) if isinstance(block, Mapping) else None
    return bool(block)


def layout_of(directory: Path) -> str:
    """MISTRAL or HUGGING_FACE, from the names of the files alone. A directory with both is served as Mistral's.

    Raises CheckpointError naming the file that is missing or does not belong there.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory: expected one that holds a checkpoint")
    _check_download(directory)
    has = {name: (directory / name).is_file() for name in ("params.json", "config.json", "tekken.json")}
    consolidated = sorted(directory.glob("consolidated*.safetensors"))
    model = sorted(directory.glob("model*.safetensors"))
    if has["params.json"] and consolidated:
        layout = MISTRAL
    elif consolidated and has["config.json"]:
        raise CheckpointError(
            f"{directory} mixes two layouts: {consolidated[0].name} is Mistral's and needs params.json, which is "
            "missing; config.json is Hugging Face's. Add params.json, or remove consolidated*.safetensors"
        )
    elif has["config.json"] and model:
        layout = HUGGING_FACE
    elif has["params.json"] and model:
        raise CheckpointError(
            f"{directory} mixes two layouts: params.json is Mistral's and needs consolidated.safetensors, which is "
            f"missing; {model[0].name} is Hugging Face's and needs config.json, which is missing as well"
        )
    else:
        found = ", ".join(sorted(path.name for path in directory.iterdir())[:12]) or "nothing"
        raise CheckpointError(
            f"{directory} holds no checkpoint: expected params.json and consolidated.safetensors (Mistral's layout) or "
            f"config.json and model.safetensors (Hugging Face's); found {found}"
        )
    if not has["tekken.json"]:
        raise CheckpointError(f"{directory / 'tekken.json'} is missing: no layout can do without this tokenizer")
    return layout


def _check_download(directory: Path) -> None:
    """Raises CheckpointError for what cannot be read, or was not downloaded to its end."""
    try:
        for path in sorted(directory.iterdir()):
            if path.is_file() and not os.access(path, os.R_OK, effective_ids=True):
                raise PermissionError(f"{path.name} is not readable")
    except PermissionError as error:
        raise unreadable(directory, error) from error
    # `hf download --local-dir` keeps them in the folder below, other tools beside the file they will be.
    for folder in (directory, directory / ".cache/huggingface/download"):
        for path in sorted(folder.glob("*.incomplete")):
            raise CheckpointError(f"{path} is half a download: download again, or remove it if nothing is missing")


def unreadable(directory: Path, error: PermissionError) -> CheckpointError:
    return CheckpointError(
        f"{directory} cannot be read by uid {os.geteuid()} ({error.strerror or error}): make it readable for others "
        "(chmod -R a+rX); a container's mount may need a label, too (`:z` with SELinux)"
    )


def other(directory: Path) -> Other | None:
    """The Voxtral model that it holds in Mistral's layout, if it is not Voxtral Realtime, or Whisper in Hugging Face's;
    None for all else.

    Raises CheckpointError where files are missing, unreadable or half there.
    """
    if _is_whisper(directory):
        return Other(directory, _stored_bytes(directory, "model"), "Whisper")
    if layout_of(directory) != MISTRAL:
        return None
    params = _json(directory / "params.json")
    multimodal = params.get("multimodal")
    if is_realtime(params) or not isinstance(multimodal, dict) or "whisper_model_args" not in multimodal:
        return None
    return Other(directory, _stored_bytes(directory, "consolidated"))


def _is_whisper(directory: Path) -> bool:
    """Raises CheckpointError where it is, and lacks its weights."""
    if not directory.is_dir():
        return False
    _check_download(directory)
    config = directory / "config.json"
    if not config.is_file() or _json(config).get("model_type") != "whisper":
        return False
    if not any(directory.glob("model*.safetensors")):
        raise CheckpointError(f"{directory} has the config.json of Whisper, and no model.safetensors: download it")
    return True


def _stored_bytes(directory: Path, stem: str) -> int:
    stored = (entry for path in _files(directory, stem) for entry in _header(path)[0].values())
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in stored)


def read(directory: Path) -> Checkpoint:
    """Read and check a directory. Raises CheckpointError unless every file and tensor is there and fits the config."""
    layout = layout_of(directory)
    tekken = _audio_of_tekken(directory / "tekken.json")
    other: tuple[Path, ...] = ()
    if layout == MISTRAL:
        params = _json(directory / "params.json")
        if not is_realtime(params):
            raise CheckpointError(
                f"{directory / 'params.json'} is not of Voxtral Realtime: it has no causal audio encoder"
            )
        tensors = _tensors(directory, "consolidated")
        if (directory / "config.json").is_file():
            other = tuple(sorted(directory.glob("model*.safetensors")))
            if other:
                _compare(directory, params, tensors)
    else:
        params = _params_of_hugging_face(directory)
        tensors = _tensors(directory, "model")
        _refuse_strangers(directory)
    encoder = params["multimodal"]["whisper_model_args"]["encoder_args"]
    for name, value in _FIXED.items():
        if encoder.get(name, value) != value:
            raise CheckpointError(
                f"the encoder's {name} is {encoder[name]!r}: vLLM's Voxtral encoder has {value!r} built in"
            )
    if not encoder.get("sliding_window"):
        raise CheckpointError(
            f"the encoder's sliding_window is {encoder.get('sliding_window')!r}: vLLM's Voxtral encoder needs a window"
        )
    source = directory / ("params.json" if layout == MISTRAL else "config.json")
    for name in ("rope_theta", "norm_eps"):
        if not isinstance(params.get(name), int | float):
            raise CheckpointError(f"{source}: {name} is {params.get(name)!r}, expected a number")
    try:
        expected = expected_shapes(params)
    except KeyError as error:
        raise CheckpointError(f"{source} lacks {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: {error}") from error
    if not params.get("quantization"):  # quantized tensors have scales beside them and other shapes
        _check_tensors(directory, expected, tensors, layout)
    return Checkpoint(directory, layout, params, tekken, tensors, other)


def _params_of_hugging_face(directory: Path) -> dict[str, Any]:
    config = _json(directory / "config.json")
    if config.get("model_type") != "voxtral_realtime":
        raise CheckpointError(
            f"{directory / 'config.json'}: model_type is {config.get('model_type')!r}, expected 'voxtral_realtime'"
        )
    files = (directory / name for name in ("processor_config.json", "preprocessor_config.json"))
    processor = next((_json(file) for file in files if file.is_file()), None)
    try:
        return to_params(config, processor)
    except KeyError as error:
        raise CheckpointError(f"{directory / 'config.json'} lacks {error.args[0]!r}") from error


def _check_tensors(
    directory: Path, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], layout: str
) -> None:
    missing = [name for name in expected if name not in tensors]
    if missing:
        names = [_stored_name(name, layout, tensors) for name in missing]
        raise CheckpointError(f"{directory} lacks {_some(names)}")
    unknown = [tensor.stored_as for name, tensor in tensors.items() if name not in expected and name != "output.weight"]
    if unknown:
        raise CheckpointError(f"{directory} holds what this architecture has not: {_some(unknown)}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{directory}: tensor {tensors[name].stored_as} has shape {list(tensors[name].shape)}, "
                f"expected {list(shape)} by the config"
            )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return f"tensor {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _stored_name(name: str, layout: str, tensors: Mapping[str, Tensor]) -> str:
    """A missing tensor's name as the file would have it, by how it names those that it has."""
    if layout == MISTRAL:
        return name
    module, _, kind = name.rpartition(".")
    back = {ours: theirs for theirs, ours in _OTHER.items()}
    if module in back:
        theirs = back[module]
    else:
        in_encoder = module.startswith(_ENCODER)
        number, part = module.removeprefix(f"{_ENCODER}transformer.").removeprefix("layers.").split(".", 1)
        parts = {ours: theirs for theirs, ours in (_ENCODER_LAYER if in_encoder else _TEXT_LAYER).items()}
        theirs = f"{'audio_tower' if in_encoder else 'language_model'}.layers.{number}.{parts[part]}"
    tower, _, rest = theirs.partition(".")
    if tower == "language_model":
        match = (re.match(r"(.*?)(layers\.\d+|embed_tokens|norm)\.", each.stored_as) for each in tensors.values())
        theirs = (
            next((found[1] for found in match if found and "language_model." in found[1]), f"{tower}.model.") + rest
        )
    return f"{theirs}.{kind}"


def _refuse_strangers(directory: Path) -> None:
    """Without an index vLLM loads every *.safetensors of this layout, and the last of two of one name wins."""
    if (directory / "model.safetensors.index.json").is_file():
        return
    strangers = sorted(set(directory.glob("*.safetensors")) - set(_files(directory, "model")))
    if strangers:
        raise CheckpointError(
            f"{strangers[0]} lies beside model.safetensors, and vLLM would load both: move it out of the directory"
        )


def _compare(directory: Path, params: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Where both layouts lie side by side, they must be of one model: same shapes, same last norms."""
    try:
        theirs, other = _params_of_hugging_face(directory), _tensors(directory, "model")
    except CheckpointError:
        return  # it is not served, so what ails it is no matter
    for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size"):
        if params.get(name) != theirs[name]:
            raise CheckpointError(
                f"{directory} mixes two models: params.json has {name} {params.get(name)}, config.json {theirs[name]}. "
                "Keep the files of one layout"
            )
    for name in ("norm.weight", f"{_ENCODER}transformer.norm.weight"):
        if name not in other or name not in tensors:
            stem = "model" if name in tensors else "consolidated"
            raise CheckpointError(
                f"{directory} mixes two models: {stem}*.safetensors has no {name}. Keep the files of one layout"
            )
        same_type = tensors[name].dtype == other[name].dtype
        if same_type and _bytes(directory, "consolidated", tensors[name]) != _bytes(directory, "model", other[name]):
            raise CheckpointError(
                f"{directory} mixes two models: {tensors[name].stored_as} of consolidated.safetensors and "
                f"{other[name].stored_as} of model.safetensors differ. Keep the files of one layout"
            )


def _audio_of_tekken(path: Path) -> dict[str, Any]:
    audio = _json(path).get("audio")
    if not isinstance(audio, dict) or audio.get("transcription_format") != "streaming":
        raise CheckpointError(
            f"{path} has no `audio` part with transcription_format 'streaming': it is not Voxtral Realtime's tokenizer"
        )
    return audio


def _json(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        _refuse_pointer(path, raw)
        content = json.loads(raw.decode("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def _refuse_pointer(path: Path, begins: bytes) -> None:
    if begins.startswith(LFS):
        raise CheckpointError(f"{path} is a pointer of Git LFS and not the file itself: run `git lfs pull` beside it")


def _files(directory: Path, stem: str) -> list[Path]:
    """The weight files of one layout, by its index where there is one, else by the numbers in their names."""
    index = directory / f"{stem}.safetensors.index.json"
    if not index.is_file():
        files = sorted(directory.glob(f"{stem}*.safetensors"))
        for file in files:
            if numbered := re.fullmatch(r"(.+-)(\d+)-of-(\d+)\.safetensors", file.name):
                start, digits, last = numbered[1], len(numbered[2]), numbered[3]
                for number in range(1, int(last) + 1):
                    shard = directory / f"{start}{number:0{digits}}-of-{last}.safetensors"
                    if not shard.is_file():
                        raise CheckpointError(f"{shard} is missing, and {file.name} counts it: download it")
        return files
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no `weight_map` of tensor names to file names")
    files = [directory / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, and {index.name} names it")
    return files


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file and where its data begins (https://github.com/huggingface/safetensors#format)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            _refuse_pointer(path, file.read(len(LFS)))
            file.seek(0)
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, size)))
        header.pop("__metadata__", None)
        ends = [
            int(entry["data_offsets"][1]) for entry in header.values() if entry["dtype"] and entry["shape"] is not None
        ]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{path} is no safetensors file, or half of one: {error!r}") from error
    end = 8 + length + max(ends, default=0)
    if size != end:
        raise CheckpointError(f"{path} has {size} bytes, its header announces {end}: download it again")
    return header, 8 + length


def _tensors(directory: Path, stem: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in _files(directory, stem):
        for name, entry in _header(path)[0].items():
            start, end = entry["data_offsets"]
            held = Tensor(entry["dtype"], tuple(entry["shape"]), end - start, name)
            before = tensors.setdefault(mistral_name(name), held)
            if before is not held:
                raise CheckpointError(
                    f"{directory} holds one tensor twice: as {before.stored_as} and as {name} ({path.name})"
                )
    return tensors


def _bytes(directory: Path, stem: str, tensor: Tensor) -> bytes:
    for path in _files(directory, stem):
        header, data = _header(path)
        if tensor.stored_as in header:
            start, end = header[tensor.stored_as]["data_offsets"]
            with path.open("rb") as file:
                file.seek(data + start)
                return file.read(end - start)
    raise CheckpointError(f"{directory} lacks tensor {tensor.stored_as}")
