"""Convert config.json of Hugging Face's layout to the content of params.json."""

from collections.abc import Mapping
from typing import Any

from voxtral_serve.checkpoint.errors import CheckpointError

# Constants in the code of transformers: VoxtralRealtimeTextAdaRmsNorm and VoxtralRealtimeFeatureExtractor
T_COND_DIM = 32
FEATURES = {
    "sampling_rate": 16000,  # Hz
    "feature_size": 128,  # mel bins
    "hop_length": 160,  # samples
    "win_length": 400,  # samples
    "global_log_mel_max": 1.5,
}
FRAME_RATE_HZ = 12.5  # one text token per frame


def is_realtime(params: Mapping[str, Any]) -> bool:
    """Whether params.json belongs to Voxtral Realtime, the only Voxtral model with a causal audio encoder."""
    block: Any = params
    for name in ("multimodal", "whisper_model_args", "encoder_args", "causal"):
        block = block.get(name) if isinstance(block, Mapping) else None
    return bool(block)


def to_params(config: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of params.json that is equivalent to Hugging Face's `config.json` and `processor_config.json`.

    Without a processor file, the feature extractor has the defaults of transformers. Raises CheckpointError for a value
    that vLLM's model does not support, KeyError for a missing value.
    """
    if config.get("quantization_config"):
        raise CheckpointError("config.json has a quantization_config: Hugging Face's layout is served unquantized only")
    text, audio = config["text_config"], config["audio_config"]
    for name, block in (("text_config", text), ("audio_config", audio)):
        if not isinstance(block, Mapping):
            raise CheckpointError(f"config.json: {name} is {block!r}, expected an object")
    features = {**FEATURES, **((processor or {}).get("feature_extractor") or processor or {})}
    _refuse_unsupported(config, features)
    return {
        **_text_params(text),
        # transformers 5.6 writes this value for the text model only
        "tied_embeddings": config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)),
        "multimodal": {
            "whisper_model_args": {
                "encoder_args": _encoder_params(audio, features),
                "downsample_args": {"downsample_factor": config["downsample_factor"]},
            }
        },
    }


def _refuse_unsupported(config: Mapping[str, Any], features: Mapping[str, Any]) -> None:
    text, audio = config["text_config"], config["audio_config"]
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
            raise CheckpointError(f"{where}.{name} is {block[name]!r}: vLLM's Voxtral model supports {value!r} only")


def _text_params(text: Mapping[str, Any]) -> dict[str, Any]:
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
        "sliding_window": text["sliding_window"],
        "model_max_length": text["max_position_embeddings"],
        "max_position_embeddings": text["max_position_embeddings"],
        "causal": True,
        "use_biases": False,
        "ada_rms_norm_t_cond": True,
        "ada_rms_norm_t_cond_dim": T_COND_DIM,
    }


def _encoder_params(audio: Mapping[str, Any], features: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "audio_encoding_args": {
            "sampling_rate": features["sampling_rate"],
            "frame_rate": FRAME_RATE_HZ,
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
