"""The tensors of an architecture with their shapes, and the check that a checkpoint has all of them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from voxtral_serve.checkpoint.errors import CheckpointError
from voxtral_serve.checkpoint.headers import Tensor
from voxtral_serve.checkpoint.layouts import AUDIO, ENCODER, stored_name

Shapes = dict[str, tuple[int, ...]]  # Mistral's name -> shape
_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size")


def expected_shapes(params: Mapping[str, Any]) -> Shapes:
    """Mistral's name -> shape of every tensor of the architecture in `params`.

    Raises KeyError for a missing value, ValueError or TypeError for an invalid size.
    """
    e = params["multimodal"]["whisper_model_args"]["encoder_args"]
    downsample = params["multimodal"]["whisper_model_args"]["downsample_args"]
    check_sizes(e, _SIZES)
    check_sizes(e["audio_encoding_args"], ("num_mel_bins",))
    check_sizes(params, (*_SIZES, "ada_rms_norm_t_cond_dim"))
    check_sizes(downsample, ("downsample_factor",))
    factor = downsample["downsample_factor"]
    dim, wide = e["dim"], params["dim"]
    shapes: Shapes = {
        f"{ENCODER}conv_layers.0.conv.weight": (dim, e["audio_encoding_args"]["num_mel_bins"], 3),
        f"{ENCODER}conv_layers.0.conv.bias": (dim,),
        f"{ENCODER}conv_layers.1.conv.weight": (dim, dim, 3),
        f"{ENCODER}conv_layers.1.conv.bias": (dim,),
        f"{ENCODER}transformer.norm.weight": (dim,),
        f"{AUDIO}audio_language_projection.0.weight": (wide, factor * dim),
        f"{AUDIO}audio_language_projection.2.weight": (wide, wide),
        f"{AUDIO}tok_embeddings.weight": (params["vocab_size"], wide),
        "norm.weight": (wide,),
    }
    if not params.get("tied_embeddings"):  # the default of vLLM as well
        shapes["output.weight"] = (params["vocab_size"], wide)
    for number in range(e["n_layers"]):
        prefix = f"{ENCODER}transformer.layers.{number}."
        shapes |= {prefix + name: shape for name, shape in layer_shapes(e).items()}
        heads = e["n_heads"] * e["head_dim"]
        if e["use_biases"]:
            shapes |= {
                f"{prefix}attention.wq.bias": (heads,),
                f"{prefix}attention.wv.bias": (heads,),
                f"{prefix}attention.wo.bias": (dim,),
                f"{prefix}feed_forward.w2.bias": (dim,),
            }
    for number in range(params["n_layers"]):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer_shapes(params).items()}
        narrow = params["ada_rms_norm_t_cond_dim"]
        shapes[f"layers.{number}.ada_rms_norm_t_cond.0.weight"] = (narrow, wide)
        shapes[f"layers.{number}.ada_rms_norm_t_cond.2.weight"] = (wide, narrow)
    return shapes


def check_sizes(block: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if type(block[name]) is not int or block[name] < 1:
            raise ValueError(f"{name} is {block[name]!r}, expected a whole number of at least 1")


def layer_shapes(block: Mapping[str, Any]) -> Shapes:
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


def check_tensors(directory: Path, expected: Shapes, tensors: Mapping[str, Tensor], layout: str) -> None:
    """Raises CheckpointError for missing or unknown tensors and wrong shapes. The message has the stored names."""
    missing = [name for name in expected if name not in tensors]
    if missing:
        stored = [tensor.stored_as for tensor in tensors.values()]
        names = [stored_name(name, layout, stored) for name in missing]
        raise CheckpointError(f"{directory} lacks {_some(names)}")
    unknown = [tensor.stored_as for name, tensor in tensors.items() if name not in expected and name != "output.weight"]
    if unknown:
        raise CheckpointError(f"{directory} has {_some(unknown)}, which this architecture does not have")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{directory}: tensor {tensors[name].stored_as} has shape {list(tensors[name].shape)}, "
                f"expected {list(shape)} according to the config"
            )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return f"tensor {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
