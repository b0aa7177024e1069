"""Write a checkpoint with the shapes of Voxtral-Mini-4B-Realtime and random weights, in Mistral's layout: 8.9 GB.

vLLM's `load_format: dummy` is not used, because its random numbers need GPU memory that real weights do not need. The
vocabulary is the one in the mistral-common package. The speed depends on its size, 131,072 tokens, not on its texts.
"""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from mistral_layout import tekken, tensors
from mistral_layout.audio import FRAME_RATE, SAMPLE_RATE, SPECTROGRAM

VOCABULARY = 131072
# Content of params.json, as published with Voxtral-Mini-4B-Realtime-2602
PARAMS: dict[str, Any] = {
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
                    "sampling_rate": SAMPLE_RATE,
                    "frame_rate": FRAME_RATE,
                    **SPECTROGRAM,
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
    """Write params.json, tekken.json and consolidated.safetensors into `directory`, which is created if needed.

    `layers` sets the number of layers of the encoder and of the language model, for tests. Raises ModuleNotFoundError
    if mistral_common, which has the vocabulary, is not installed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    params = copy.deepcopy(PARAMS)
    if layers:
        params["n_layers"] = params["multimodal"]["whisper_model_args"]["encoder_args"]["n_layers"] = layers
    (directory / "params.json").write_text(json.dumps(params, indent=2) + "\n")
    (directory / "tekken.json").write_text(json.dumps(tekken.packaged(params["vocab_size"])))
    _write_weights(directory / "consolidated.safetensors", tensors.shapes(params))


def _write_weights(path: Path, shapes: dict[str, tensors.Shape]) -> None:
    """Write one tensor after the other. safetensors' save_file would need all 8.9 GB in memory at once.

    Format: the length of the header, the header, the tensors without gaps (https://huggingface.co/docs/safetensors).
    """
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # bfloat16 is the upper half of float32. The same 16 MB are repeated; their odd length makes all rows different.
    numbers = np.random.default_rng(0).normal(0, 0.02, 2**23 - 1).astype(np.float32)
    block = (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(block)):
            file.write(block[: end - start])
