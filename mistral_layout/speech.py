"""Voxtral TTS in Mistral's layout: params.json, the `audio` block of tekken.json, and the tensors of its weights.

Sources: vllm-omni 0.32.0rc1 (model_executor/models/voxtral_tts, transformers_utils/parsers/voxtral_tts.py), which
names each tensor that it reads; sizes as public readers of Voxtral-4B-TTS-2603 have them. One frame is 80 ms: 1920
samples at 24 kHz, a semantic code and 36 acoustic ones.
"""

import copy
from typing import Any

from mistral_layout import tekken
from mistral_layout.audio import FRAME_RATE, SPECTROGRAM
from mistral_layout.tensors import Shape, layer

SAMPLE_RATE = 24000  # Hz
SPECIAL_CODES = 2  # of each codebook, before its own: no audio, end of the audio
PADDED = 128  # the rows of the codes' embeddings and of the semantic output are a multiple of it
# The published checkpoint's preset voices
VOICES = (
    *("casual_female", "casual_male", "cheerful_female", "neutral_female", "neutral_male"),
    *("pt_male", "pt_female", "nl_male", "nl_female", "it_male", "it_female", "fr_male", "fr_female"),
    *("es_male", "es_female", "de_male", "de_female", "ar_male", "hi_male", "hi_female"),
)
# Content of params.json
PARAMS: dict[str, Any] = {
    "model_type": "voxtral_tts",
    "dim": 3072,
    "n_layers": 26,
    "head_dim": 128,
    "hidden_dim": 9216,
    "n_heads": 32,
    "n_kv_heads": 8,
    "rope_theta": 1e6,
    "norm_eps": 1e-5,
    "vocab_size": 131072,
    "tied_embeddings": True,
    "use_biases": False,
    "causal": True,
    "max_position_embeddings": 128000,
    "multimodal": {
        "bos_token_id": 1,
        "audio_model_args": {
            "semantic_codebook_size": 8192,
            "acoustic_codebook_size": 21,
            "n_acoustic_codebook": 36,
            "audio_token_id": 24,
            "begin_audio_token_id": 25,
            "input_embedding_concat_type": "sum",
            "audio_encoding_args": {
                "codebook_pattern": "parallel",
                "num_codebooks": 37,
                "sampling_rate": SAMPLE_RATE,
                "frame_rate": FRAME_RATE,
            },
            "acoustic_transformer_args": {
                "input_dim": 3072,
                "dim": 3072,
                "n_layers": 3,
                "head_dim": 128,
                "hidden_dim": 9216,
                "n_heads": 32,
                "n_kv_heads": 8,
                "use_biases": False,
                "sigma": 1e-5,
            },
        },
        "audio_tokenizer_args": {
            "channels": 1,
            "sampling_rate": SAMPLE_RATE,
            "pretransform_patch_size": 240,
            "patch_proj_kernel_size": 7,
            "semantic_codebook_size": 8192,
            "semantic_dim": 256,
            "acoustic_codebook_size": 21,
            "acoustic_dim": 36,
            "conv_weight_norm": True,
            "causal": True,
            "attn_sliding_window_size": 16,
            "half_attn_window_upon_downsampling": True,
            "dim": 1024,
            "hidden_dim": 4096,
            "head_dim": 128,
            "n_heads": 8,
            "n_kv_heads": 8,
            "qk_norm": True,
            "qk_norm_eps": 1e-6,
            "use_biases": False,
            "norm_eps": 1e-2,
            "layer_scale": True,
            "encoder_transformer_lengths_str": "2,2,2,2",
            "encoder_convs_kernels_str": "4,4,4,3",
            "encoder_convs_strides_str": "2,2,2,1",
            "decoder_transformer_lengths_str": "2,2,2,2",
            "decoder_convs_kernels_str": "3,4,4,4",
            "decoder_convs_strides_str": "1,2,2,2",
            "voice": {name: number for number, name in enumerate(VOICES)},
        },
    },
}


def tiny() -> dict[str, Any]:
    """params.json of the smallest model that vLLM serves on a CPU: 3 MB, the rates and the parts of the real one."""
    params = copy.deepcopy(PARAMS)
    stack = {"n_layers": 2, "head_dim": 64, "hidden_dim": 256, "n_heads": 2, "n_kv_heads": 1}
    params |= {"dim": 128, "vocab_size": 2048, "max_position_embeddings": 8192, **stack}
    model, codec = params["multimodal"]["audio_model_args"], params["multimodal"]["audio_tokenizer_args"]
    model["semantic_codebook_size"] = codec["semantic_codebook_size"] = 256
    model["acoustic_transformer_args"] |= {"input_dim": 128, "dim": 128, **stack}
    codec |= {"dim": 64, "hidden_dim": 128, "head_dim": 32, "n_heads": 2, "n_kv_heads": 2, "semantic_dim": 32}
    codec["encoder_transformer_lengths_str"] = codec["decoder_transformer_lengths_str"] = "1,1,1,1"
    return params


def tokenizer(vocab_size: int, voices: dict[str, int]) -> dict[str, Any]:
    """The content of tekken.json: mistral-common's own vocabulary, and how many audio tokens stand for each voice.

    The published file is of version v7, which names [REPEAT_AUDIO_TEXT] and [NEXT_AUDIO_TEXT] at 35 and 36. Raises
    ModuleNotFoundError without mistral_common.
    """
    found = tekken.packaged(vocab_size)
    names = [each["token_str"] for each in found["special_tokens"]]
    for place, name in ((35, "[REPEAT_AUDIO_TEXT]"), (36, "[NEXT_AUDIO_TEXT]")):
        other = names.index(name)
        names[place], names[other] = names[other], names[place]
    found["special_tokens"] = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    found["config"]["version"] = "v7"
    found["audio"] = {
        "sampling_rate": SAMPLE_RATE,
        "frame_rate": FRAME_RATE,
        "audio_encoding_config": SPECTROGRAM,
        "voice_num_audio_tokens": voices,
    }
    return found


def shapes(params: dict[str, Any]) -> dict[str, Shape]:
    """The shape of each tensor by its name, in the order of the file that is written.

    `params` is the content of params.json. As in the published checkpoint, the codec's encoder is left out, so no
    voice can be cloned. A matrix is [out, in], a convolution [out, in, width], an upsampling one [in, out, width].
    """
    model, codec = params["multimodal"]["audio_model_args"], params["multimodal"]["audio_tokenizer_args"]
    codes = [model["semantic_codebook_size"], *[model["acoustic_codebook_size"]] * model["n_acoustic_codebook"]]
    found: dict[str, Shape] = {
        "mm_audio_embeddings.tok_embeddings.weight": (params["vocab_size"], params["dim"]),
        "mm_audio_embeddings.audio_codebook_embeddings.embeddings.weight": (
            _padded(sum(size + SPECIAL_CODES for size in codes)),
            params["dim"],
        ),
        "norm.weight": (params["dim"],),
    }
    found |= {f"layers.{n}.{name}": shape for n in range(params["n_layers"]) for name, shape in layer(params).items()}
    found |= {f"acoustic_transformer.{name}": shape for name, shape in _acoustic(model).items()}
    return found | {f"audio_tokenizer.{name}": shape for name, shape in _codec(codec).items()}


def _padded(rows: int) -> int:
    return -(-rows // PADDED) * PADDED


def _acoustic(model: dict[str, Any]) -> dict[str, Shape]:
    """The transformer that turns the language model's output into the codes of one frame."""
    stack, codebooks = model["acoustic_transformer_args"], model["n_acoustic_codebook"]
    dim = stack["dim"]
    found: dict[str, Shape] = {
        "input_projection.weight": (dim, codebooks),
        "time_projection.weight": (dim, dim),
        "llm_projection.weight": (dim, stack["input_dim"]),
        "semantic_codebook_output.weight": (_padded(model["semantic_codebook_size"] + SPECIAL_CODES), dim),
        "acoustic_codebook_output.weight": (codebooks, dim),
        "norm.weight": (dim,),
    }
    own = layer(stack)
    return found | {f"layers.{n}.{name}": shape for n in range(stack["n_layers"]) for name, shape in own.items()}


def _codec(codec: dict[str, Any]) -> dict[str, Shape]:
    """The decoder that turns codes into samples. It goes up in rate between its blocks."""
    dim = codec["dim"]
    heads, keys = (codec[name] * codec["head_dim"] for name in ("n_heads", "n_kv_heads"))
    lengths, widths, strides = (
        [int(each) for each in codec[f"decoder_{name}_str"].split(",")]
        for name in ("transformer_lengths", "convs_kernels", "convs_strides")
    )
    block = layer(codec) | {"attention.q_norm.weight": (heads,), "attention.k_norm.weight": (keys,)}
    block |= {"attention_scale": (dim,), "ffn_scale": (dim,)}
    found: dict[str, Shape] = {
        "quantizer.semantic_codebook.cluster_usage": (codec["semantic_codebook_size"],),
        "quantizer.semantic_codebook.embedding_sum": (codec["semantic_codebook_size"], codec["semantic_dim"]),
    }
    found |= _convolution("decoder_blocks.0", (dim, codec["semantic_dim"] + codec["acoustic_dim"], widths[0]))
    place = 1
    for number, n_layers in enumerate(lengths):
        found |= {
            f"decoder_blocks.{place}.layers.{n}.{name}": shape for n in range(n_layers) for name, shape in block.items()
        }
        place += 1
        if number + 1 < len(lengths) and (widths[number + 1], strides[number + 1]) != (1, 1):
            found |= _convolution(f"decoder_blocks.{place}", (dim, dim, widths[number + 1]))
            place += 1
    return found | _convolution("output_proj", (codec["pretransform_patch_size"], dim, codec["patch_proj_kernel_size"]))


def _convolution(name: str, shape: Shape) -> dict[str, Shape]:
    """PyTorch's weight normalisation keeps the length of each row (original0) and its direction (original1)."""
    weight = f"{name}.conv.parametrizations.weight"
    return {f"{weight}.original0": (shape[0], 1, 1), f"{weight}.original1": shape}
