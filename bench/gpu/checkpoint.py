"""A checkpoint directory without weights, for `load_format: dummy`: Voxtral-Mini-4B-Realtime's shapes and a tokenizer.

The vocabulary is the one that mistral-common packages. Which text a token stands for has no part in the speed; that
there are 131,072 of them has.
"""

import copy
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

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
    """Write params.json and tekken.json; with `layers`, the encoder and the LM have that many each, for a trial."""
    directory.mkdir(parents=True, exist_ok=True)
    params = copy.deepcopy(SHAPES)
    if layers:
        params["n_layers"] = params["multimodal"]["whisper_model_args"]["encoder_args"]["n_layers"] = layers
    (directory / "params.json").write_text(json.dumps(params, indent=2) + "\n")
    (directory / "tekken.json").write_text(json.dumps(tokenizer()))


def tokenizer() -> dict[str, Any]:
    packaged = json.loads(files("mistral_common").joinpath("data/tekken_240911.json").read_text(encoding="utf-8"))
    config = packaged["config"] | {"version": "v13", "num_vocab_tokens": VOCABULARY - N_SPECIAL}
    return {
        "config": config | {"default_vocab_size": VOCABULARY, "default_num_special_tokens": N_SPECIAL},
        "vocab": packaged["vocab"][: VOCABULARY - N_SPECIAL],
        "special_tokens": [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(CONTROL_TOKENS)],
        "audio": AUDIO,
    }
