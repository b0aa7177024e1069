"""The two layouts of Voxtral Realtime checkpoints, and the tensor names of each.

Mistral's layout has params.json and consolidated*.safetensors. Hugging Face's layout, which transformers'
`save_pretrained` writes, has config.json and model*.safetensors. Its tensors have other names, and the rows of its
query and key projections have another order. Both layouts need tekken.json.
"""

import re
from collections.abc import Iterable

MISTRAL = "mistral"
HUGGING_FACE = "hugging face"

AUDIO = "mm_streams_embeddings.embedding_module."
ENCODER = f"{AUDIO}whisper_encoder."
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
_REST = {
    "audio_tower.embedder.conv1": f"{ENCODER}conv_layers.0.conv",
    "audio_tower.embedder.conv2": f"{ENCODER}conv_layers.1.conv",
    "audio_tower.norm": f"{ENCODER}transformer.norm",
    "multi_modal_projector.linear_1": f"{AUDIO}audio_language_projection.0",
    "multi_modal_projector.linear_2": f"{AUDIO}audio_language_projection.2",
    "language_model.embed_tokens": f"{AUDIO}tok_embeddings",
    "language_model.norm": "norm",
    "lm_head": "output",
}


def mistral_name(name: str) -> str:
    """The Mistral name of a tensor with a Hugging Face name. Mistral names are returned unchanged.

    transformers stores the same tensors as `language_model.model.*` (5.6.2) or `language_model.model.model.*` (5.19.0).
    With save_original_format=False, it uses the names of its modules, `model.language_model.*`.
    """
    module, _, kind = name.rpartition(".")
    bare = re.sub(r"^(model\.)?language_model\.((model\.)*)", "language_model.", module).removeprefix("model.")
    bare = bare.replace("language_model.lm_head", "lm_head")
    if bare in _REST:
        return f"{_REST[bare]}.{kind}"
    match = re.fullmatch(r"(audio_tower|language_model)\.layers\.(\d+)\.(.+)", bare)
    if match:
        tower, number, part = match.groups()
        names, prefix = (_ENCODER_LAYER, f"{ENCODER}transformer.") if tower == "audio_tower" else (_TEXT_LAYER, "")
        if part in names:
            return f"{prefix}layers.{number}.{names[part]}.{kind}"
    return re.sub(r"(whisper_encoder\.conv_layers\.\d)\.(weight|bias)$", r"\1.conv.\2", name)


def is_rotated(name: str) -> bool:
    """Whether the rows of this tensor (a Mistral name) have another order in Hugging Face's layout."""
    return re.search(r"\.attention\.w[qk]\.(weight|bias)$", name) is not None


def stored_name(name: str, layout: str, stored: Iterable[str]) -> str:
    """The name that a missing tensor would have in a weight file.

    `name` is the Mistral name. `stored` are the tensor names in the files; the result has the same spelling.
    """
    if layout == MISTRAL:
        return name
    module, _, kind = name.rpartition(".")
    back = {ours: theirs for theirs, ours in _REST.items()}
    if module in back:
        theirs = back[module]
    else:
        in_encoder = module.startswith(ENCODER)
        number, part = module.removeprefix(f"{ENCODER}transformer.").removeprefix("layers.").split(".", 1)
        parts = {ours: theirs for theirs, ours in (_ENCODER_LAYER if in_encoder else _TEXT_LAYER).items()}
        theirs = f"{'audio_tower' if in_encoder else 'language_model'}.layers.{number}.{parts[part]}"
    tower, _, rest = theirs.partition(".")
    if tower == "language_model":
        match = (re.match(r"(.*?)(layers\.\d+|embed_tokens|norm)\.", each) for each in stored)
        theirs = (
            next((found[1] for found in match if found and "language_model." in found[1]), f"{tower}.model.") + rest
        )
    return f"{theirs}.{kind}"
