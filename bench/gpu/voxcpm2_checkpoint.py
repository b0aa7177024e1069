"""Write a checkpoint of VoxCPM2 with random weights: 5 GB, or 1 MB for a CPU. The package voxcpm names its tensors.

It makes noise, and no speech of it ends before the limit of the request or the context: it serves to measure speed and
to test servers. The vocabulary is the 256 bytes.

python -m bench.gpu.voxcpm2_checkpoint DIRECTORY
python -m bench.gpu.voxcpm2_checkpoint DIRECTORY --tiny
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models

from bench.gpu.speech_checkpoint import write_weights
from voxtral_serve.check.voxcpm2 import model_shapes

SPECIAL = ("<unk>", "<s>", "</s>")
NEVER_ENDS = "stop_head.weight"  # with zeros, its two numbers are equal, and speech goes on
LOCAL = {"hidden_dim": 1024, "ffn_dim": 4096, "num_heads": 16, "num_layers": 12, "kv_channels": 128}
# Content of config.json: sizes as public readers of openbmb/VoxCPM2 have them. It has no `model_type`.
CONFIG: dict[str, Any] = {
    "architecture": "voxcpm2",
    "lm_config": {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 32768,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "kv_channels": 128,
        "vocab_size": 73448,
        "use_mup": False,
        "scale_emb": 12,
        "dim_model_base": 256,
        "scale_depth": 1.4,
    },
    "patch_size": 4,
    "feat_dim": 64,
    "residual_lm_num_layers": 8,
    "residual_lm_no_rope": True,
    "scalar_quantization_latent_dim": 512,
    "scalar_quantization_scale": 9,
    "encoder_config": LOCAL,
    "dit_config": {
        **LOCAL,
        "cfm_config": {"sigma_min": 1e-6, "solver": "euler", "t_scheduler": "log-norm", "inference_cfg_rate": 2.0},
    },
    "audio_vae_config": {
        "encoder_dim": 128,
        "encoder_rates": [2, 5, 8, 8],
        "latent_dim": 64,
        "decoder_dim": 2048,
        "decoder_rates": [8, 6, 5, 2, 2, 2],
        "sr_bin_boundaries": [20000, 30000, 40000],
        "sample_rate": 16000,
        "out_sample_rate": 48000,
    },
    "max_length": 8192,
    "device": "cuda",
    "dtype": "bfloat16",
}


def config(small: bool) -> dict[str, Any]:
    """config.json. The factors of the rotary positions are all one. The small one has the rates of the real one."""
    found = copy.deepcopy(CONFIG)
    language = found["lm_config"]
    if small:
        local = {"hidden_dim": 64, "ffn_dim": 128, "num_heads": 2, "num_layers": 1, "kv_channels": 32}
        language |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}
        language |= {"num_key_value_heads": 1, "kv_channels": 32, "vocab_size": 320, "max_position_embeddings": 8192}
        found |= {"residual_lm_num_layers": 1, "scalar_quantization_latent_dim": 32, "max_length": 512}
        found["encoder_config"] = local
        found["dit_config"] |= local
        found["audio_vae_config"] |= {"encoder_dim": 2, "decoder_dim": 64, "cond_dim": 16}
    ones = [1.0] * (language["kv_channels"] // 2)
    factors = {"type": "longrope", "long_factor": ones, "short_factor": ones}
    language["rope_scaling"] = factors | {"original_max_position_embeddings": language["max_position_embeddings"]}
    return found


def write(directory: Path, small: bool = False) -> None:
    """Write config.json, model.safetensors, audiovae.pth, tokenizer.json and tokenizer_config.json into `directory`.

    Raises ModuleNotFoundError if voxcpm is not installed.
    """
    from voxcpm.modules.audiovae import AudioVAEConfigV2, AudioVAEV2

    directory.mkdir(parents=True, exist_ok=True)
    content = config(small)
    (directory / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    _write_tokenizer(directory)
    torch.manual_seed(0)
    codec = AudioVAEV2(AudioVAEConfigV2(**content["audio_vae_config"]))
    torch.save({"state_dict": codec.state_dict()}, directory / "audiovae.pth")
    shapes = model_shapes(content)
    ends = shapes.pop(NEVER_ENDS)
    write_weights(directory / "model.safetensors", shapes, {NEVER_ENDS: ends})


def _write_tokenizer(directory: Path) -> None:
    vocabulary = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    numbers = {token: number for number, token in enumerate(vocabulary)}
    made = Tokenizer(models.BPE(vocab=numbers, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.ByteFallback()
    made.save(str(directory / "tokenizer.json"))
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    told = {"tokenizer_class": "LlamaTokenizerFast", **names, "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(told, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tiny", action="store_true", help="1 MB, for a CPU")
    arguments = parser.parse_args()
    write(arguments.directory, arguments.tiny)


if __name__ == "__main__":
    main()
