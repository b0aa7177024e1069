"""Names and shapes of the tensors of consolidated.safetensors, by params.json."""

from typing import Any

Shape = tuple[int, ...]
# What is not of the language model's layers and norm
EMBEDDINGS = "mm_streams_embeddings.embedding_module."
ENCODER = f"{EMBEDDINGS}whisper_encoder."


def shapes(params: dict[str, Any]) -> dict[str, Shape]:
    """The shape of each tensor of Voxtral Realtime by its name, in the order of the file that is written.

    `params` is the content of params.json. A matrix is [out, in], a convolution [out, in, 3].
    """
    audio = params["multimodal"]["whisper_model_args"]
    encoder, downsampling = audio["encoder_args"], audio["downsample_args"]["downsample_factor"]
    dim, width = params["dim"], encoder["dim"]
    found: dict[str, Shape] = {
        f"{EMBEDDINGS}tok_embeddings.weight": (params["vocab_size"], dim),
        f"{EMBEDDINGS}audio_language_projection.0.weight": (dim, width * downsampling),
        f"{EMBEDDINGS}audio_language_projection.2.weight": (dim, dim),
        "norm.weight": (dim,),
        f"{ENCODER}transformer.norm.weight": (width,),
    }
    for number, channels in enumerate((encoder["audio_encoding_args"]["num_mel_bins"], width)):
        found[f"{ENCODER}conv_layers.{number}.conv.weight"] = (width, channels, 3)
        found[f"{ENCODER}conv_layers.{number}.conv.bias"] = (width,)
    for prefix, stack in (("", params), (f"{ENCODER}transformer.", encoder)):
        own = layer(stack)
        found |= {f"{prefix}layers.{n}.{name}": shape for n in range(stack["n_layers"]) for name, shape in own.items()}
    return found


def layer(stack: dict[str, Any]) -> dict[str, Shape]:
    """The shape of each tensor of one transformer layer, by its name within the layer.

    `stack` is params.json, for the language model's, or its `encoder_args`. Biases and the scaling by the delay are
    there where it sets `use_biases` and `ada_rms_norm_t_cond`.
    """
    queries, keys = (stack[heads] * stack["head_dim"] for heads in ("n_heads", "n_kv_heads"))
    dim, hidden = stack["dim"], stack["hidden_dim"]
    found: dict[str, Shape] = {
        "attention.wq.weight": (queries, dim),
        "attention.wk.weight": (keys, dim),
        "attention.wv.weight": (keys, dim),
        "attention.wo.weight": (dim, queries),
        "attention_norm.weight": (dim,),
        "ffn_norm.weight": (dim,),
        "feed_forward.w1.weight": (hidden, dim),
        "feed_forward.w2.weight": (dim, hidden),
        "feed_forward.w3.weight": (hidden, dim),
    }
    if stack.get("use_biases"):
        found |= {
            "attention.wq.bias": (queries,),
            "attention.wv.bias": (keys,),
            "attention.wo.bias": (dim,),
            "feed_forward.w2.bias": (dim,),
        }
    if stack.get("ada_rms_norm_t_cond"):
        rank = stack["ada_rms_norm_t_cond_dim"]
        found |= {"ada_rms_norm_t_cond.0.weight": (rank, dim), "ada_rms_norm_t_cond.2.weight": (dim, rank)}
    return found
