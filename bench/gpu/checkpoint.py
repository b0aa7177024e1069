"""A checkpoint of Voxtral-Mini-4B-Realtime's shapes in Mistral's layout, with random weights: 8.9 GB.

Written, rather than left to vLLM's `load_format: dummy`, whose random numbers take GPU memory that real weights do not.
The vocabulary is the one that mistral-common packages. Which text a token stands for has no part in the speed; that
there are 131,072 of them has.
"""

import copy
import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from pico.tokenizer import AUDIO, CONTROL_TOKENS, N_SPECIAL

VOCABULARY = 131072
SHAPES: dict[str, Any] = {
    "dim": 3072,
    "n_layers": 26,
    "head_dim": 128,
    "hidden_dim": 9216,
    "n_heads": 32,
    "n_kv_heads": 8,
    "rope_theta": 1e6,
    "norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "tied_embeddings": True,
    "sliding_window": 8192,
    "model_max_length": 131072,
    "max_position_embeddings": 131072,
    "causal": True,
    "use_biases": False,
    "ada_rms_norm_t_cond": True,
    "ada_rms_norm_t_cond_dim": 32,
    "multimodal": {
        "whisper_model_args": {
            "encoder_args": {
                "audio_encoding_args": {
                    "sampling_rate": 16000,
                    "frame_rate": 12.5,
                    "num_mel_bins": 128,
                    "hop_length": 160,
                    "window_size": 400,
                    "chunk_length_s": None,
                    "global_log_mel_max": 1.5,
                    "transcription_format": "streaming",
                },
                "dim": 1280,
                "n_layers": 32,
                "head_dim": 64,
                "hidden_dim": 5120,
                "n_heads": 32,
                "n_kv_heads": 32,
                "vocab_size": VOCABULARY,
                "use_biases": True,
                "rope_theta": 1e6,
                "causal": True,
                "norm_eps": 1e-5,
                "pos_embed": "rope",
                "max_source_positions": None,
                "ffn_type": "swiglu",
                "norm_type": "rms_norm",
                "sliding_window": 750,
            },
            "downsample_args": {"downsample_factor": 4},
        }
    },
}


def write(directory: Path, layers: int | None = None) -> None:
    """Write params.json, tekken.json and consolidated.safetensors; with `layers`, the encoder and the LM have that many
    each, for a trial."""
    directory.mkdir(parents=True, exist_ok=True)
    params = copy.deepcopy(SHAPES)
    if layers:
        params["n_layers"] = params["multimodal"]["whisper_model_args"]["encoder_args"]["n_layers"] = layers
    (directory / "params.json").write_text(json.dumps(params, indent=2) + "\n")
    (directory / "tekken.json").write_text(json.dumps(tokenizer()))
    _write_weights(directory / "consolidated.safetensors", tensors(params))


def tensors(params: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The name and shape of each tensor of Mistral's layout; a convolution's are [out, in, 3]."""
    audio = params["multimodal"]["whisper_model_args"]
    encoder, downsampling = audio["encoder_args"], audio["downsample_args"]["downsample_factor"]
    inside = "mm_streams_embeddings.embedding_module."
    dim, width = params["dim"], encoder["dim"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{inside}tok_embeddings.weight": (params["vocab_size"], dim),
        f"{inside}audio_language_projection.0.weight": (dim, width * downsampling),
        f"{inside}audio_language_projection.2.weight": (dim, dim),
        "norm.weight": (dim,),
        f"{inside}whisper_encoder.transformer.norm.weight": (width,),
    }
    for number, channels in enumerate((encoder["audio_encoding_args"]["num_mel_bins"], width)):
        shapes[f"{inside}whisper_encoder.conv_layers.{number}.conv.weight"] = (width, channels, 3)
        shapes[f"{inside}whisper_encoder.conv_layers.{number}.conv.bias"] = (width,)
    for prefix, part in (("", params), (f"{inside}whisper_encoder.transformer.", encoder)):
        queries, keys = (part[heads] * part["head_dim"] for heads in ("n_heads", "n_kv_heads"))
        d, hidden = part["dim"], part["hidden_dim"]
        layer: dict[str, tuple[int, ...]] = {
            "attention.wq.weight": (queries, d),
            "attention.wk.weight": (keys, d),
            "attention.wv.weight": (keys, d),
            "attention.wo.weight": (d, queries),
            "attention_norm.weight": (d,),
            "ffn_norm.weight": (d,),
            "feed_forward.w1.weight": (hidden, d),
            "feed_forward.w2.weight": (d, hidden),
            "feed_forward.w3.weight": (hidden, d),
        }
        if part["use_biases"]:
            layer |= {
                "attention.wq.bias": (queries,),
                "attention.wv.bias": (keys,),
                "attention.wo.bias": (d,),
                "feed_forward.w2.bias": (d,),
            }
        if part.get("ada_rms_norm_t_cond"):
            rank = part["ada_rms_norm_t_cond_dim"]
            layer |= {"ada_rms_norm_t_cond.0.weight": (rank, d), "ada_rms_norm_t_cond.2.weight": (d, rank)}
        shapes |= {
            f"{prefix}layers.{n}.{name}": shape for n in range(part["n_layers"]) for name, shape in layer.items()
        }
    return shapes


def _write_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """https://huggingface.co/docs/safetensors: the header's length, the header, the tensors without gaps."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # bfloat16 is the upper half of float32. The same 16 MB over and over: what counts is that no two rows are alike.
    numbers = np.random.default_rng(0).normal(0, 0.02, 2**23 - 1).astype(np.float32)
    block = (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(block)):
            file.write(block[: end - start])


def tokenizer() -> dict[str, Any]:
    packaged = json.loads(files("mistral_common").joinpath("data/tekken_240911.json").read_text(encoding="utf-8"))
    config = packaged["config"] | {"version": "v13", "num_vocab_tokens": VOCABULARY - N_SPECIAL}
    return {
        "config": config | {"default_vocab_size": VOCABULARY, "default_num_special_tokens": N_SPECIAL},
        "vocab": packaged["vocab"][: VOCABULARY - N_SPECIAL],
        "special_tokens": [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(CONTROL_TOKENS)],
        "audio": AUDIO,
    }
