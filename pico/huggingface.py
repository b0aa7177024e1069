"""Write pico in Hugging Face's layout: config.json, model.safetensors, tekken.json, processor files.

    python -m pico.huggingface DIR

Checkpoints that were fine-tuned with transformers have this layout. Its rotary embedding differs from Mistral's:
transformers rotates the first half of a head with the second half, Mistral rotates each even element with the next odd
one. The rows of the query and key projections are therefore reordered.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mistral_layout.tensors import EMBEDDINGS, ENCODER

PICO = Path(__file__).parent / "checkpoint"
_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "ada_rms_norm_t_cond.0": "ada_rms_norm.linear1",
    "ada_rms_norm_t_cond.2": "ada_rms_norm.linear2",
}
_ENCODER_NORMS = {"attention_norm": "self_attn_layer_norm", "ffn_norm": "final_layer_norm"}
_LM_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_OTHER = {
    f"{ENCODER}conv_layers.0.conv": "audio_tower.embedder.conv1",
    f"{ENCODER}conv_layers.1.conv": "audio_tower.embedder.conv2",
    f"{ENCODER}transformer.norm": "audio_tower.norm",
    f"{EMBEDDINGS}audio_language_projection.0": "multi_modal_projector.linear_1",
    f"{EMBEDDINGS}audio_language_projection.2": "multi_modal_projector.linear_2",
    f"{EMBEDDINGS}tok_embeddings": "language_model.model.embed_tokens",
    "norm": "language_model.model.norm",
}


def to_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head in [heads * head_dim, ...] from interleaved pairs to (first half, second half)."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor of consolidated.safetensors. Raises KeyError for an unknown tensor."""
    module, kind = name.rsplit(".", 1)
    if module in _OTHER:
        return f"{_OTHER[module]}.{kind}"
    encoder = f"{ENCODER}transformer.layers."
    root, norms = ("audio_tower", _ENCODER_NORMS) if module.startswith(encoder) else ("language_model.model", _LM_NORMS)
    number, part = module.removeprefix(encoder).removeprefix("layers.").split(".", 1)
    return f"{root}.layers.{number}.{(_LAYER | norms)[part]}.{kind}"


def write(directory: Path, source: Path = PICO) -> None:
    """Convert `source`, a directory in Mistral's layout, to `directory` with the installed transformers."""
    model, processor = load(source)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)


def load(source: Path = PICO, device: str = "cpu") -> tuple[Any, Any]:
    """(model in bfloat16, processor) of transformers, loaded from `source`, a directory in Mistral's layout."""
    from transformers import VoxtralRealtimeConfig, VoxtralRealtimeForConditionalGeneration, VoxtralRealtimeProcessor
    from transformers.models.voxtral_realtime.feature_extraction_voxtral_realtime import VoxtralRealtimeFeatureExtractor
    from transformers.tokenization_mistral_common import MistralCommonBackend

    params = json.loads((source / "params.json").read_text())
    encoder = params["multimodal"]["whisper_model_args"]["encoder_args"]
    audio = encoder["audio_encoding_args"]
    config = VoxtralRealtimeConfig(
        audio_config={
            "vocab_size": encoder["vocab_size"],
            "hidden_size": encoder["dim"],
            "intermediate_size": encoder["hidden_dim"],
            "num_hidden_layers": encoder["n_layers"],
            "num_attention_heads": encoder["n_heads"],
            "head_dim": encoder["head_dim"],
            "num_mel_bins": audio["num_mel_bins"],
            "rms_norm_eps": encoder["norm_eps"],
            "sliding_window": encoder["sliding_window"],
            "rope_parameters": {"rope_type": "default", "rope_theta": encoder["rope_theta"]},
        },
        text_config={
            "vocab_size": params["vocab_size"],
            "hidden_size": params["dim"],
            "intermediate_size": params["hidden_dim"],
            "num_hidden_layers": params["n_layers"],
            "num_attention_heads": params["n_heads"],
            "num_key_value_heads": params["n_kv_heads"],
            "head_dim": params["head_dim"],
            "max_position_embeddings": params["max_position_embeddings"],
            "rms_norm_eps": params["norm_eps"],
            "sliding_window": params["sliding_window"],
            "tie_word_embeddings": params["tied_embeddings"],
            "rope_parameters": {"rope_type": "default", "rope_theta": params["rope_theta"]},
        },
        tie_word_embeddings=params["tied_embeddings"],
    )
    tensors = {}
    for name, tensor in load_file(source / "consolidated.safetensors").items():
        block = encoder if "whisper_encoder" in name else params
        in_halves = ".wq." in name or ".wk." in name
        tensors[hf_name(name)] = to_halves(tensor, block["head_dim"]) if in_halves else tensor
    with torch.device(device):
        model = VoxtralRealtimeForConditionalGeneration(config).to(torch.bfloat16)
    # Up to transformers 5.6, the modules have the names of the file. Later versions renamed the modules only.
    own = {_in_file(name): name for name in model.state_dict()}
    tensors["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"]  # tied
    model.load_state_dict({own[name]: tensor for name, tensor in tensors.items()}, strict=True)
    features = VoxtralRealtimeFeatureExtractor(
        feature_size=audio["num_mel_bins"],
        hop_length=audio["hop_length"],
        n_fft=audio["window_size"],
        win_length=audio["window_size"],
        global_log_mel_max=audio["global_log_mel_max"],
    )
    tokenizer = MistralCommonBackend(str(source / "tekken.json"))
    return model, VoxtralRealtimeProcessor(features, tokenizer)


def _in_file(name: str) -> str:
    if name.startswith("model."):
        return name.removeprefix("model.").replace("language_model.", "language_model.model.", 1)
    return f"language_model.{name}" if name.startswith("lm_head.") else name


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    write(parser.parse_args().directory)
