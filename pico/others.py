"""Write tiny checkpoints of the other two models with profiles. The weights are random, so the texts are meaningless.

    python -m pico.others voxtral-3b DIR
    python -m pico.others whisper DIR

They are for tests that do not depend on the weights: that vLLM starts with the profile and that its responses have the
right format. Files, keys and tensor names are those of Voxtral-Mini-3B-2507 in Mistral's layout and of OpenAI's Whisper
in Hugging Face's. The output rows of words (Voxtral) or letters (Whisper) are scaled up, so that the models emit these.
"""

import argparse
import json
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mistral_layout import tensors
from mistral_layout.audio import FRAME_RATE, SAMPLE_RATE, SPECTROGRAM
from mistral_layout.tekken import N_SPECIAL
from pico import tokenizer

PICO = Path(__file__).parent / "checkpoint"
SEED = 0
LOUD = 4.0  # scale of the output rows of words or letters
FRAMES = 1500  # encoder frames in 30 s
MISTRAL_AUDIO = {"sampling_rate": SAMPLE_RATE, **SPECTROGRAM}

# ---- Voxtral-Mini-3B-2507

PARAMS: dict[str, Any] = {
    "dim": 128,
    "n_layers": 2,
    "head_dim": 32,
    "hidden_dim": 256,
    "n_heads": 4,
    "n_kv_heads": 2,
    "rope_theta": 100000000.0,
    "norm_eps": 1e-05,
    "vocab_size": 5200,
    "max_position_embeddings": 32768,
    "multimodal": {
        "whisper_model_args": {
            "encoder_args": {
                "audio_encoding_args": MISTRAL_AUDIO,
                "dim": 128,
                "n_layers": 2,
                "head_dim": 64,
                "hidden_dim": 256,
                "n_heads": 2,
                "vocab_size": 51866,
                "max_source_positions": FRAMES,
            },
            "downsample_args": {"downsample_factor": 4},
        }
    },
}


def write_voxtral_3b(directory: Path) -> None:
    """params.json, tekken.json with pico's vocabulary, consolidated.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "params.json", PARAMS)
    tekken = json.loads((PICO / "tekken.json").read_text(encoding="utf-8"))
    for token in tekken["special_tokens"]:
        if "STREAMING" in token["token_str"]:  # this model does not have these tokens
            token["token_str"] = f"<SPECIAL_{token['rank']}>"
    tekken["audio"] = {
        "sampling_rate": SAMPLE_RATE,
        "frame_rate": FRAME_RATE,
        "audio_encoding_config": SPECTROGRAM,
        "chunk_length_s": 30.0,
    }
    _write_json(directory / "tekken.json", tekken)
    _write_weights(directory / "consolidated.safetensors", voxtral_3b_shapes(PARAMS), torch.bfloat16, _words)


def voxtral_3b_shapes(params: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of consolidated.safetensors, by its name."""
    encoder = params["multimodal"]["whisper_model_args"]["encoder_args"]
    factor = params["multimodal"]["whisper_model_args"]["downsample_args"]["downsample_factor"]
    dim, wide = params["dim"], encoder["dim"]
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (dim,), "output.weight": (params["vocab_size"], dim)}
    for number in range(params["n_layers"]):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in tensors.layer(params).items()}
    audio = "mm_whisper_embeddings."
    shapes |= {
        f"{audio}tok_embeddings.weight": (params["vocab_size"], dim),
        f"{audio}audio_language_projection.0.weight": (dim, wide * factor),
        f"{audio}audio_language_projection.2.weight": (dim, dim),
    }
    tower = f"{audio}whisper_encoder."
    mels = encoder["audio_encoding_args"]["num_mel_bins"]
    shapes |= {f"{tower}conv_layers.0.weight": (wide, mels, 3), f"{tower}conv_layers.1.weight": (wide, wide, 3)}
    shapes |= {f"{tower}conv_layers.{number}.bias": (wide,) for number in range(2)}
    shapes |= _with_bias(f"{tower}transformer.norm", (wide,))
    for number in range(encoder["n_layers"]):
        layer = f"{tower}transformer.layers.{number}."
        for name in ("attention_norm", "ffn_norm"):
            shapes |= _with_bias(f"{layer}{name}", (wide,))
        for name in ("wq", "wv", "wo"):
            shapes |= _with_bias(f"{layer}attention.{name}", (wide, wide))
        shapes[f"{layer}attention.wk.weight"] = (wide, wide)
        shapes |= _with_bias(f"{layer}feed_forward.w1", (encoder["hidden_dim"], wide))
        shapes |= _with_bias(f"{layer}feed_forward.w2", (wide, encoder["hidden_dim"]))
    return shapes


def _words(name: str, tensor: Tensor) -> None:
    if name == "output.weight":
        tensor[N_SPECIAL + 256 :] *= LOUD  # not the single bytes, which are rarely valid text


# ---- Whisper

# In the order of Whisper's tokens
LANGUAGES = re.findall(
    r"\w+",
    """
    en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml
    cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am
    yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su
    """,
)
END, START = "<|endoftext|>", "<|startoftranscript|>"
TASKS = [f"<|{name}|>" for name in ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")]
SPECIAL = [END, START, *(f"<|{language}|>" for language in LANGUAGES), *TASKS]
TIMES = [f"<|{step / 50:.2f}|>" for step in range(FRAMES + 1)]
BYTES = tokenizer.byte_level_characters()
VOCABULARY = [*BYTES.values(), *SPECIAL, *TIMES]
WHISPER: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "activation_function": "gelu",
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 128,
    "num_mel_bins": 80,
    "max_source_positions": FRAMES,
    "max_target_positions": 448,
    "vocab_size": len(VOCABULARY),
    "scale_embedding": False,
    "bos_token_id": VOCABULARY.index(END),
    "eos_token_id": VOCABULARY.index(END),
    "pad_token_id": VOCABULARY.index(END),
    "decoder_start_token_id": VOCABULARY.index(START),
    "torch_dtype": "float32",
}


def write_whisper(directory: Path) -> None:
    """config.json, generation_config.json, preprocessor_config.json, tokenizer files of bytes, model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = {name: WHISPER[name] for name in WHISPER if name.endswith("token_id")}
    _write_json(directory / "config.json", WHISPER)
    _write_json(
        directory / "generation_config.json",
        ids
        | {
            "is_multilingual": True,
            "lang_to_id": {f"<|{language}|>": VOCABULARY.index(f"<|{language}|>") for language in LANGUAGES},
            "task_to_id": {task: VOCABULARY.index(f"<|{task}|>") for task in ("transcribe", "translate")},
            "no_timestamps_token_id": VOCABULARY.index("<|notimestamps|>"),
            "max_length": WHISPER["max_target_positions"],
        },
    )
    _write_json(
        directory / "preprocessor_config.json",
        {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "processor_class": "WhisperProcessor",
            "feature_size": WHISPER["num_mel_bins"],
            "sampling_rate": 16000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": 30,
            "n_samples": 480000,
            "nb_max_frames": 2 * FRAMES,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": False,
        },
    )
    _write_tokenizer(directory)
    _write_weights(directory / "model.safetensors", whisper_shapes(WHISPER), torch.float32, _letters)


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: index for index, character in enumerate(BYTES.values())}
    written = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    written.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    written.decoder = decoders.ByteLevel()
    written.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    written.add_tokens([AddedToken(token, normalized=False) for token in TIMES])
    written.save(str(directory / "tokenizer.json"))
    _write_json(directory / "vocab.json", vocabulary)
    (directory / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END)
    _write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor", "add_prefix_space": False}
        | names
        | {"model_max_length": WHISPER["max_target_positions"]},
    )


def whisper_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of model.safetensors, by its name. The output layer is the embedding."""
    dim, mels = config["d_model"], config["num_mel_bins"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.encoder.embed_positions.weight": (config["max_source_positions"], dim),
        "model.decoder.embed_positions.weight": (config["max_target_positions"], dim),
        "model.decoder.embed_tokens.weight": (config["vocab_size"], dim),
    }
    shapes |= _with_bias("model.encoder.conv1", (dim, mels, 3)) | _with_bias("model.encoder.conv2", (dim, dim, 3))
    for side, attentions in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn"))):
        shapes |= _with_bias(f"model.{side}.layer_norm", (dim,))
        for number in range(config[f"{side}_layers"]):
            layer = f"model.{side}.layers.{number}."
            for attention in attentions:
                for name in ("q_proj", "v_proj", "out_proj"):
                    shapes |= _with_bias(f"{layer}{attention}.{name}", (dim, dim))
                shapes[f"{layer}{attention}.k_proj.weight"] = (dim, dim)
                shapes |= _with_bias(f"{layer}{attention}_layer_norm", (dim,))
            shapes |= _with_bias(f"{layer}fc1", (config[f"{side}_ffn_dim"], dim))
            shapes |= _with_bias(f"{layer}fc2", (dim, config[f"{side}_ffn_dim"]))
            shapes |= _with_bias(f"{layer}final_layer_norm", (dim,))
    return shapes


def _letters(name: str, tensor: Tensor) -> None:
    if name == "model.decoder.embed_tokens.weight":
        tensor[[VOCABULARY.index(letter) for letter in string.ascii_letters]] *= LOUD


# ---- Both


def _with_bias(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _write_weights(
    path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, change: Callable[[str, Tensor], None]
) -> None:
    """Write random weights; norms are 1, biases 0. `change` may modify each tensor in place."""
    dice = torch.Generator().manual_seed(SEED)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        if name.endswith(".bias"):
            tensor = torch.zeros(shape)
        elif "norm" in name:
            tensor = torch.ones(shape)
        else:
            fan_in = torch.Size(shape[1:]).numel()
            tensor = torch.randn(shape, generator=dice) / fan_in**0.5
        change(name, tensor)
        tensors[name] = tensor.to(dtype)
    save_file(tensors, path, {"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=("voxtral-3b", "whisper"))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    {"voxtral-3b": write_voxtral_3b, "whisper": write_whisper}[arguments.model](arguments.directory)
