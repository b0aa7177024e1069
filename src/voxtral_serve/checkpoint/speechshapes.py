"""The tensors of Voxtral TTS with their shapes, as vLLM-Omni reads them (model_executor/models/voxtral_tts)."""

from collections.abc import Mapping
from typing import Any

from voxtral_serve.checkpoint.shapes import Shapes, check_sizes, layer_shapes

# A checkpoint may have them, and vLLM-Omni does without: the codec's encoder, which clones voices, and a constant.
OPTIONAL = (
    "audio_tokenizer.input_proj.",
    "audio_tokenizer.encoder_blocks.",
    "acoustic_transformer.time_embedding.",
)
SPECIAL_CODES = 2  # of each codebook
MULTIPLE = 128  # to which vLLM-Omni pads codebooks
LAYER_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim")
# vLLM-Omni's AudioTokenizerArgs, for what params.json leaves out
CODEC = {
    "pretransform_patch_size": 240,
    "patch_proj_kernel_size": 7,
    "semantic_codebook_size": 8192,
    "semantic_dim": 256,
    "acoustic_dim": 36,
    "dim": 1024,
    "hidden_dim": 4096,
    "head_dim": 128,
    "n_heads": 8,
    "n_kv_heads": 8,
    "conv_weight_norm": True,
    "qk_norm": True,
    "layer_scale": True,
    "decoder_transformer_lengths_str": "2,2,2,2",
    "decoder_convs_kernels_str": "3,4,4,4",
    "decoder_convs_strides_str": "1,2,2,2",
}


def speech_shapes(params: Mapping[str, Any]) -> Shapes:
    """The shape of each tensor by its name.

    Raises KeyError for a missing value, ValueError or TypeError for an invalid one.
    """
    model = params["multimodal"]["audio_model_args"]
    check_sizes(params, (*LAYER_SIZES, "vocab_size"))
    semantic, acoustic = _codebooks(model)
    wide = params["dim"]
    shapes: Shapes = {
        "mm_audio_embeddings.tok_embeddings.weight": (params["vocab_size"], wide),
        "mm_audio_embeddings.audio_codebook_embeddings.embeddings.weight": (
            _padded(sum(size + SPECIAL_CODES for size in (semantic, *acoustic))),
            wide,
        ),
        "norm.weight": (wide,),
    }
    if not params.get("tied_embeddings"):
        shapes["output.weight"] = (params["vocab_size"], wide)
    for number in range(params["n_layers"]):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer_shapes(params).items()}
    shapes |= _acoustic(model["acoustic_transformer_args"], semantic, len(acoustic))
    return shapes | _codec(CODEC | params["multimodal"]["audio_tokenizer_args"])


def _codebooks(model: Mapping[str, Any]) -> tuple[int, list[int]]:
    """Codes of the semantic codebook, and of each acoustic one. Two spellings are in use."""
    if "codebook_sizes" in model:
        semantic, *acoustic = (int(each) for each in model["codebook_sizes"].split(","))
        return semantic, acoustic
    check_sizes(model, ("semantic_codebook_size", "acoustic_codebook_size", "n_acoustic_codebook"))
    return model["semantic_codebook_size"], [model["acoustic_codebook_size"]] * model["n_acoustic_codebook"]


def _padded(rows: int) -> int:
    return (rows + MULTIPLE - 1) // MULTIPLE * MULTIPLE


def _acoustic(block: Mapping[str, Any], semantic: int, codebooks: int) -> Shapes:
    check_sizes(block, (*LAYER_SIZES, "input_dim"))
    dim = block["dim"]
    shapes: Shapes = {
        "input_projection.weight": (dim, codebooks),
        "time_projection.weight": (dim, dim),
        "llm_projection.weight": (dim, block["input_dim"]),
        "semantic_codebook_output.weight": (_padded(semantic + SPECIAL_CODES), dim),
        "acoustic_codebook_output.weight": (codebooks, dim),
        "norm.weight": (dim,),
    }
    for number in range(block["n_layers"]):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer_shapes(block).items()}
    return {f"acoustic_transformer.{name}": shape for name, shape in shapes.items()}


def _codec(block: Mapping[str, Any]) -> Shapes:
    """The decoder: a convolution, then transformers with an upsampling convolution before each but the first."""
    check_sizes(block, ("dim", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "semantic_dim", "acoustic_dim"))
    check_sizes(block, ("semantic_codebook_size", "pretransform_patch_size", "patch_proj_kernel_size"))
    dim = block["dim"]
    lengths, kernels, strides = (
        tuple(int(each) for each in block[f"decoder_{name}_str"].split(","))
        for name in ("transformer_lengths", "convs_kernels", "convs_strides")
    )
    shapes: Shapes = {
        "quantizer.semantic_codebook.cluster_usage": (block["semantic_codebook_size"],),
        "quantizer.semantic_codebook.embedding_sum": (block["semantic_codebook_size"], block["semantic_dim"]),
        **_normalised("decoder_blocks.0", (dim, block["semantic_dim"] + block["acoustic_dim"], kernels[0])),
    }
    place = 1
    for number, layers in enumerate(lengths):
        if number and (kernels[number], strides[number]) != (1, 1):
            shapes |= _normalised(f"decoder_blocks.{place}", (dim, dim, kernels[number]))
            place += 1
        for layer in range(layers):
            prefix = f"decoder_blocks.{place}.layers.{layer}."
            shapes |= {prefix + name: shape for name, shape in _codec_layer(block).items()}
        place += 1
    last = (block["pretransform_patch_size"], dim, block["patch_proj_kernel_size"])
    shapes |= _normalised("output_proj", last) if block["conv_weight_norm"] else {"output_proj.conv.weight": last}
    return {f"audio_tokenizer.{name}": shape for name, shape in shapes.items()}


def _codec_layer(block: Mapping[str, Any]) -> Shapes:
    shapes = layer_shapes(block)
    if block["qk_norm"]:
        shapes["attention.q_norm.weight"] = (block["n_heads"] * block["head_dim"],)
        shapes["attention.k_norm.weight"] = (block["n_kv_heads"] * block["head_dim"],)
    if block["layer_scale"]:
        shapes |= {"attention_scale": (block["dim"],), "ffn_scale": (block["dim"],)}
    return shapes


def _normalised(name: str, shape: tuple[int, ...]) -> Shapes:
    """A convolution under PyTorch's weight normalisation: a length per row, and directions."""
    stem = f"{name}.conv.parametrizations.weight.original"
    return {f"{stem}0": (shape[0], 1, 1), f"{stem}1": shape}
