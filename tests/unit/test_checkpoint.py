"""A checkpoint directory is read, or refused with a message that names what is wrong with it."""

import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import PICO

from pico import huggingface
from voxtral_serve import checkpoint
from voxtral_serve.checkpoint import CheckpointError, shapes

PARAMS = json.loads((PICO / "params.json").read_text())
WQ = "mm_streams_embeddings.embedding_module.whisper_encoder.transformer.layers.1.attention.wq.weight"
HF_WQ = "audio_tower.layers.1.self_attn.q_proj.weight"
# What transformers has called the modules: its files' names of 5.6 and of later versions, and its modules' own.
VARIANTS: dict[str, Callable[[str], str]] = {
    "language_model.model": lambda name: name,
    "language_model.model.model": lambda name: name.replace("language_model.model.", "language_model.model.model."),
    "model.language_model": lambda name: "model." + name.replace("language_model.model.", "language_model."),
}

Entries = dict[str, tuple[str, list[int], bytes]]  # name -> (dtype, shape, data)


def load(path: Path) -> Entries:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    data = content[8 + length :]
    return {name: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for name, e in header.items()}


def save(path: Path, entries: Entries) -> None:
    header, end = {}, 0
    for name, (dtype, shape, content) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(content)]}
        end += len(content)
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(b"".join([framed(text), *(content for _, _, content in entries.values())]))


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def encoder_args(params: dict[str, Any]) -> dict[str, Any]:
    args: dict[str, Any] = params["multimodal"]["whisper_model_args"]["encoder_args"]
    return args


@pytest.fixture(scope="module")
def tensors() -> Entries:
    return load(PICO / "consolidated.safetensors")


@pytest.fixture
def mistral(tmp_path: Path) -> Path:
    directory = tmp_path / "mistral"
    shutil.copytree(PICO, directory)
    return directory


def config_json() -> dict[str, Any]:
    """The config.json that says what pico's params.json says, as far as it is read."""
    e = encoder_args(PARAMS)
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return {
        "model_type": "voxtral_realtime",
        "architectures": ["VoxtralRealtimeForConditionalGeneration"],
        "downsample_factor": 4,
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": True,
        "text_config": {
            "hidden_size": PARAMS["dim"],
            "num_hidden_layers": PARAMS["n_layers"],
            "head_dim": PARAMS["head_dim"],
            "intermediate_size": PARAMS["hidden_dim"],
            "num_attention_heads": PARAMS["n_heads"],
            "num_key_value_heads": PARAMS["n_kv_heads"],
            "rms_norm_eps": PARAMS["norm_eps"],
            "vocab_size": PARAMS["vocab_size"],
            "sliding_window": PARAMS["sliding_window"],
            "max_position_embeddings": PARAMS["max_position_embeddings"],
            "hidden_act": "silu",
            "rope_parameters": rope,
        },
        "audio_config": {
            "hidden_size": e["dim"],
            "num_hidden_layers": e["n_layers"],
            "head_dim": e["head_dim"],
            "intermediate_size": e["hidden_dim"],
            "num_attention_heads": e["n_heads"],
            "num_mel_bins": 128,
            "vocab_size": e["vocab_size"],
            "rms_norm_eps": e["norm_eps"],
            "sliding_window": e["sliding_window"],
            "hidden_act": "silu",
            "rope_parameters": rope,
        },
    }


def write_hugging_face(directory: Path, tensors: Entries, variant: str = "language_model.model") -> None:
    """Names and shapes as save_pretrained writes them; the order of rows does not matter here."""
    directory.mkdir(exist_ok=True)
    rename = VARIANTS[variant]
    save(directory / "model.safetensors", {rename(huggingface.hf_name(name)): entry for name, entry in tensors.items()})
    (directory / "config.json").write_text(json.dumps(config_json()))
    shutil.copy(PICO / "tekken.json", directory)


@pytest.fixture
def hugging_face(tmp_path: Path, tensors: Entries) -> Path:
    write_hugging_face(tmp_path / "hf", tensors)
    return tmp_path / "hf"


def refused(directory: Path, *parts: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(directory)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message


def test_both_layouts_say_the_same(mistral: Path, hugging_face: Path) -> None:
    a, b = checkpoint.read(mistral), checkpoint.read(hugging_face)
    assert (a.layout, b.layout) == (checkpoint.MISTRAL, checkpoint.HUGGING_FACE)
    assert a.params == b.params
    assert a.tekken == b.tekken
    assert {name: (t.dtype, t.shape, t.nbytes) for name, t in a.tensors.items()} == {
        name: (t.dtype, t.shape, t.nbytes) for name, t in b.tensors.items()
    }
    assert a.weight_bytes == sum(t.nbytes for t in a.tensors.values()) > 19e6
    assert a.tensors[WQ].stored_as == WQ
    assert b.tensors[WQ].stored_as == HF_WQ


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_naming_of_hugging_face(tmp_path: Path, tensors: Entries, variant: str) -> None:
    write_hugging_face(tmp_path / "hf", tensors, variant)
    assert set(checkpoint.read(tmp_path / "hf").tensors) == set(tensors)


@pytest.mark.parametrize(
    "stored", ["lm_head.weight", "language_model.lm_head.weight", "model.language_model.lm_head.weight"]
)
def test_the_head_by_any_name(stored: str) -> None:
    assert checkpoint.mistral_name(stored) == "output.weight"


def test_the_reference_names_stay(tensors: Entries) -> None:
    assert [checkpoint.mistral_name(name) for name in tensors] == list(tensors)


def test_mistral_s_older_name_of_a_convolution() -> None:
    name = "mm_streams_embeddings.embedding_module.whisper_encoder.conv_layers.0.weight"
    assert checkpoint.mistral_name(name) == name.replace(".weight", ".conv.weight")


def test_queries_and_keys_alone_are_rotated(tensors: Entries) -> None:
    kinds = {name.split("attention.")[1] for name in tensors if checkpoint.is_rotated(name)}
    assert kinds == {"wq.weight", "wk.weight", "wq.bias"}


# Which files lie there


def test_no_directory(tmp_path: Path) -> None:
    refused(tmp_path / "none", "none is not a directory")


def test_an_empty_directory(tmp_path: Path) -> None:
    refused(tmp_path, "expected params.json and consolidated.safetensors", "found nothing")


def test_no_weights(mistral: Path) -> None:
    (mistral / "consolidated.safetensors").unlink()
    refused(mistral, "contains no checkpoint", "found draft, params.json, tekken.json")


@pytest.mark.parametrize("layout", ["mistral", "hugging_face"])
def test_no_tokenizer(layout: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(layout)
    (directory / "tekken.json").unlink()
    refused(directory, f"{directory / 'tekken.json'} is missing")


def test_mistral_weights_with_hugging_face_s_config(mistral: Path, hugging_face: Path) -> None:
    (mistral / "params.json").unlink()
    shutil.copy(hugging_face / "config.json", mistral)
    refused(mistral, "mixes two layouts", "consolidated.safetensors", "params.json, which is missing")


def test_hugging_face_s_weights_with_mistral_s_config(mistral: Path, hugging_face: Path) -> None:
    (mistral / "consolidated.safetensors").unlink()
    shutil.copy(hugging_face / "model.safetensors", mistral)
    refused(mistral, "mixes two layouts", "params.json", "model.safetensors", "config.json, which is missing")


def both(mistral: Path, hugging_face: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(hugging_face / name, mistral)
    return mistral


def test_both_layouts_of_one_model(mistral: Path, hugging_face: Path) -> None:
    held = checkpoint.read(both(mistral, hugging_face))
    assert held.layout == checkpoint.MISTRAL
    assert [path.name for path in held.unused] == ["model.safetensors"]


def test_both_layouts_of_two_models(mistral: Path, hugging_face: Path, tensors: Entries) -> None:
    dtype, shape, data = tensors["norm.weight"]
    write_hugging_face(hugging_face, tensors | {"norm.weight": (dtype, shape, data[::-1])})
    refused(both(mistral, hugging_face), "mixes two models", "norm.weight", "language_model.model.norm.weight")


def test_both_layouts_of_two_encoders(mistral: Path, hugging_face: Path, tensors: Entries) -> None:
    name = "mm_streams_embeddings.embedding_module.whisper_encoder.transformer.norm.weight"
    dtype, shape, data = tensors[name]
    write_hugging_face(hugging_face, tensors | {name: (dtype, shape, data[::-1])})
    refused(both(mistral, hugging_face), "mixes two models", name, "audio_tower.norm.weight")


def test_both_layouts_of_two_sizes(mistral: Path, hugging_face: Path) -> None:
    edit(hugging_face / "config.json", lambda config: config["text_config"].update(num_hidden_layers=2))
    refused(both(mistral, hugging_face), "mixes two models", "n_layers 3, config.json 2")


def test_both_layouts_one_without_its_norm(mistral: Path, hugging_face: Path, tensors: Entries) -> None:
    write_hugging_face(hugging_face, {name: entry for name, entry in tensors.items() if name != "norm.weight"})
    refused(both(mistral, hugging_face), "norm.weight", "model*.safetensors")


def test_a_config_alone_beside_mistral_s_files_is_no_second_layout(mistral: Path) -> None:
    (mistral / "config.json").write_text("{}")
    assert checkpoint.read(mistral).unused == ()


# What the JSON files say


@pytest.mark.parametrize("name", ["params.json", "tekken.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_unreadable_json(mistral: Path, name: str, text: str) -> None:
    (mistral / name).write_bytes(text.encode("latin-1"))
    refused(mistral, str(mistral / name))


def test_another_voxtral(mistral: Path) -> None:
    edit(mistral / "params.json", lambda params: encoder_args(params).update(causal=False))
    refused(mistral, "params.json", "does not belong to Voxtral Realtime")


@pytest.mark.parametrize("content", [{}, {"multimodal": None}, {"multimodal": {"whisper_model_args": ["x"]}}])
def test_no_voxtral_at_all(mistral: Path, content: dict[str, Any]) -> None:
    (mistral / "params.json").write_text(json.dumps(content))
    refused(mistral, "params.json", "does not belong to Voxtral Realtime")


@pytest.mark.parametrize("key", ["dim", "n_layers", "vocab_size", "ada_rms_norm_t_cond_dim"])
def test_params_without_a_value(mistral: Path, key: str) -> None:
    edit(mistral / "params.json", lambda params: params.pop(key))
    refused(mistral, "params.json", repr(key))


@pytest.mark.parametrize("key", ["dim", "n_heads", "use_biases", "audio_encoding_args"])
def test_params_without_a_value_of_the_encoder(mistral: Path, key: str) -> None:
    edit(mistral / "params.json", lambda params: encoder_args(params).pop(key))
    refused(mistral, "params.json", repr(key))


def test_params_with_a_value_of_the_wrong_type(mistral: Path) -> None:
    edit(mistral / "params.json", lambda params: params.update(n_layers="three"))
    refused(mistral, "params.json", "'three'")


def test_no_downsampling(mistral: Path) -> None:
    edit(mistral / "params.json", lambda params: params["multimodal"]["whisper_model_args"].pop("downsample_args"))
    refused(mistral, "params.json", "'downsample_args'")


@pytest.mark.parametrize(
    ("name", "value"), [("rope_theta", 1e4), ("norm_eps", 1e-6), ("pos_embed", "sinusoidal"), ("sliding_window", None)]
)
def test_an_encoder_that_vllm_would_run_otherwise(mistral: Path, name: str, value: object) -> None:
    edit(mistral / "params.json", lambda params: encoder_args(params).update({name: value}))
    refused(mistral, name, repr(value))


@pytest.mark.parametrize("audio", [None, {}, {"transcription_format": "instruct"}])
def test_another_tokenizer(mistral: Path, audio: object) -> None:
    edit(mistral / "tekken.json", lambda tekken: tekken.update(audio=audio))
    refused(mistral, "tekken.json", "'streaming'")


def test_another_model_type(hugging_face: Path) -> None:
    edit(hugging_face / "config.json", lambda config: config.update(model_type="voxtral"))
    refused(hugging_face, "config.json", "'voxtral'", "'voxtral_realtime'")


@pytest.mark.parametrize("key", ["text_config", "audio_config", "downsample_factor"])
def test_config_without_a_part(hugging_face: Path, key: str) -> None:
    edit(hugging_face / "config.json", lambda config: config.pop(key))
    refused(hugging_face, "config.json", repr(key))


@pytest.mark.parametrize("value", [None, [], "x"])
def test_config_with_a_part_of_the_wrong_type(hugging_face: Path, value: object) -> None:
    edit(hugging_face / "config.json", lambda config: config.update(text_config=value))
    refused(hugging_face, "config.json", "text_config")


@pytest.mark.parametrize(("where", "key"), [("text_config", "head_dim"), ("audio_config", "num_mel_bins")])
def test_config_without_a_value(hugging_face: Path, where: str, key: str) -> None:
    edit(hugging_face / "config.json", lambda config: config[where].pop(key))
    refused(hugging_face, "config.json", repr(key))


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("audio_config", "hidden_act", "gelu"),
        ("audio_config", "activation_function", "relu"),
        ("text_config", "hidden_act", "relu"),
    ],
)
def test_another_activation(hugging_face: Path, where: str, key: str, value: str) -> None:
    edit(hugging_face / "config.json", lambda config: config[where].update({key: value}))
    refused(hugging_face, f"{where}.{key}", repr(value))


def test_another_projector(hugging_face: Path) -> None:
    edit(hugging_face / "config.json", lambda config: config.update(projector_hidden_act="relu"))
    refused(hugging_face, "projector_hidden_act", "'relu'", "'gelu'")


def test_another_rotation_of_the_encoder(hugging_face: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    edit(hugging_face / "config.json", lambda config: config["audio_config"].update(rope_parameters=rope))
    refused(hugging_face, "rope_theta", "10000.0", "1000000.0")


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "rope_theta": 1e6}, {}, None, {"rope_theta": "much"}])
def test_a_rotation_that_is_not_plain(hugging_face: Path, rope: object) -> None:
    edit(hugging_face / "config.json", lambda config: config["text_config"].update(rope_parameters=rope))
    refused(hugging_face, "config.json", "text_config", "rope_")


def test_rope_theta_where_older_configs_have_it(hugging_face: Path) -> None:
    def older(config: dict[str, Any]) -> None:
        del config["text_config"]["rope_parameters"]
        config["text_config"]["rope_theta"] = 5e5

    edit(hugging_face / "config.json", older)
    assert checkpoint.read(hugging_face).params["rope_theta"] == 5e5


def test_quantized_hugging_face_layout(hugging_face: Path) -> None:
    edit(hugging_face / "config.json", lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    refused(hugging_face, "quantization_config", "unquantized only")


def test_quantized_mistral_layout_is_vllm_s_to_judge(mistral: Path, tensors: Entries) -> None:
    edit(mistral / "params.json", lambda params: params.update(quantization={"qformat_weight": "fp8_e4m3"}))
    save(mistral / "consolidated.safetensors", tensors | {"layers.0.attention.wq.qscale_weight": ("BF16", [], b"\0\0")})
    assert checkpoint.read(mistral).params["quantization"]


def test_the_processor_s_values_are_taken(hugging_face: Path) -> None:
    (hugging_face / "processor_config.json").write_text(json.dumps({"feature_extractor": {"hop_length": 320}}))
    args = encoder_args(checkpoint.read(hugging_face).params)["audio_encoding_args"]
    assert (args["hop_length"], args["window_size"], args["frame_rate"]) == (320, 400, 12.5)


# Tensors


@pytest.mark.parametrize("layout", ["mistral", "hugging_face"])
def test_every_single_missing_tensor_is_named_as_stored(
    layout: str, request: pytest.FixtureRequest, tensors: Entries
) -> None:
    directory: Path = request.getfixturevalue(layout)
    held = checkpoint.read(directory)
    for name in tensors:
        rest = {other: tensor for other, tensor in held.tensors.items() if other != name}
        with pytest.raises(CheckpointError, match=re.escape(f"lacks tensor {held.tensors[name].stored_as}") + "$"):
            shapes.check_tensors(directory, checkpoint.expected_shapes(held.params), rest, held.layout)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_missing_tensor_is_named_as_its_file_names_them(tmp_path: Path, tensors: Entries, variant: str) -> None:
    name = "layers.2.attention.wk.weight"
    write_hugging_face(tmp_path / "hf", {key: entry for key, entry in tensors.items() if key != name}, variant)
    refused(tmp_path / "hf", f"lacks tensor {VARIANTS[variant](huggingface.hf_name(name))}")


def test_many_missing_tensors_are_counted(mistral: Path, tensors: Entries) -> None:
    save(mistral / "consolidated.safetensors", {k: v for k, v in tensors.items() if not k.startswith("layers.1.")})
    refused(mistral, "lacks tensor layers.1.attention.wq.weight", "and 8 more")


@pytest.mark.parametrize(
    "change", [lambda params: params.update(tied_embeddings=False), lambda p: p.pop("tied_embeddings")]
)
def test_untied_embeddings_need_their_head(mistral: Path, change: Callable[[Any], object]) -> None:
    edit(mistral / "params.json", change)
    refused(mistral, "lacks tensor output.weight")


def test_untied_embeddings_of_hugging_face_s_layout(hugging_face: Path) -> None:
    edit(hugging_face / "config.json", lambda config: config.update(tie_word_embeddings=False))
    refused(hugging_face, "lm_head.weight")


def test_untied_embeddings_as_transformers_5_6_says_it(hugging_face: Path) -> None:
    """It writes the key for the text model alone."""

    def untie(config: dict[str, Any]) -> None:
        del config["tie_word_embeddings"]
        config["text_config"]["tie_word_embeddings"] = False

    edit(hugging_face / "config.json", untie)
    refused(hugging_face, "lm_head.weight")


def test_weights_that_vllm_would_load_as_well(hugging_face: Path) -> None:
    shutil.copy(hugging_face / "model.safetensors", hugging_face / "ema.safetensors")
    refused(hugging_face, "ema.safetensors", "beside model.safetensors")


def test_a_processor_of_another_mel_spectrogram(hugging_face: Path) -> None:
    (hugging_face / "processor_config.json").write_text(json.dumps({"feature_extractor": {"feature_size": 80}}))
    refused(hugging_face, "num_mel_bins 128", "feature_size 80")


def test_a_preprocessor_file_is_read_where_there_is_no_processor_file(hugging_face: Path) -> None:
    (hugging_face / "processor_config.json").unlink(missing_ok=True)
    (hugging_face / "preprocessor_config.json").write_text(json.dumps({"global_log_mel_max": 2}))
    audio = encoder_args(checkpoint.read(hugging_face).params)["audio_encoding_args"]
    assert repr(audio["global_log_mel_max"]) == "2.0"


def test_what_ails_the_unused_layout_is_no_matter(mistral: Path, hugging_face: Path) -> None:
    edit(hugging_face / "config.json", lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    assert checkpoint.read(both(mistral, hugging_face)).layout == checkpoint.MISTRAL


@pytest.mark.parametrize("name", ["rope_theta", "norm_eps"])
def test_a_number_of_the_text_model_that_is_none(name: str, mistral: Path) -> None:
    edit(mistral / "params.json", lambda params: params.update({name: "x"}))
    refused(mistral, f"{name} is 'x'", "expected a number")


def test_a_block_that_is_none(mistral: Path) -> None:
    edit(mistral / "params.json", lambda p: p["multimodal"]["whisper_model_args"].update(downsample_args=None))
    refused(mistral, "params.json")


def test_a_copy_of_tied_embeddings_is_no_stranger(hugging_face: Path, tensors: Entries) -> None:
    held = load(hugging_face / "model.safetensors")
    save(
        hugging_face / "model.safetensors", held | {"lm_head.weight": held["language_model.model.embed_tokens.weight"]}
    )
    assert "output.weight" in checkpoint.read(hugging_face).tensors


@pytest.mark.parametrize(
    ("layout", "file", "name"),
    [
        ("mistral", "consolidated.safetensors", "layers.3.attention.wq.weight"),
        ("mistral", "consolidated.safetensors", "model.norm.weight"),
        ("hugging_face", "model.safetensors", "language_model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        ("hugging_face", "model.safetensors", "audio_tower.layers.5.self_attn.q_proj.weight"),
    ],
)
def test_unknown_tensors(layout: str, file: str, name: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(layout)
    save(directory / file, load(directory / file) | {name: ("BF16", [1], b"\0\0")})
    refused(directory, f"tensor {name}")


def test_a_tensor_stored_twice(hugging_face: Path) -> None:
    held = load(hugging_face / "model.safetensors")
    twice = "model.language_model.norm.weight"
    save(hugging_face / "model.safetensors", held | {twice: held["language_model.model.norm.weight"]})
    refused(hugging_face, "twice", twice, "language_model.model.norm.weight")


def test_a_misshapen_tensor(mistral: Path, tensors: Entries) -> None:
    save(mistral / "consolidated.safetensors", tensors | {"norm.weight": ("BF16", [2, 128], tensors["norm.weight"][2])})
    refused(mistral, "norm.weight has shape [2, 128], expected [256]")


def test_a_misshapen_tensor_by_its_stored_name(hugging_face: Path) -> None:
    held = load(hugging_face / "model.safetensors")
    dtype, shape, data = held[HF_WQ]
    save(hugging_face / "model.safetensors", held | {HF_WQ: (dtype, [shape[0] * 2, shape[1] // 2], data)})
    refused(hugging_face, f"{HF_WQ} has shape [512, 128], expected [256, 256]")


# Weight files


def framed(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "not a complete safetensors file"),
        (b"\x08\0\0", "not a complete safetensors file"),
        (b"\xff" * 64, "not a complete safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 19246064\n", "is a Git LFS pointer"),
        (framed(b"[]"), "not a complete safetensors file"),
        (framed(b'{"a": [1]}'), "not a complete safetensors file"),
        (framed(b'{"a": {}}'), "not a complete safetensors file"),
        (framed(b'{"a": {"data_offsets": [0, 0]}}'), "not a complete safetensors file"),
        (framed(b'{"a": {"dtype": "BF16", "shape": [], "data_offsets": [0]}}'), "not a complete safetensors file"),
        (framed(b"{}"), "lacks tensor"),
    ],
)
def test_no_weight_file(mistral: Path, content: bytes, part: str) -> None:
    (mistral / "consolidated.safetensors").write_bytes(content)
    refused(mistral, part)


@pytest.mark.parametrize("keep", [100, 8000, 1_000_000, -1])
def test_a_truncated_weight_file(mistral: Path, keep: int) -> None:
    path = mistral / "consolidated.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(mistral, str(path))


def test_a_weight_file_that_a_link_leads_nowhere(mistral: Path) -> None:
    path = mistral / "consolidated.safetensors"
    path.unlink()
    path.symlink_to(mistral / "gone")
    refused(mistral, str(path))


def shard(directory: Path, stem: str, index: bool = True) -> list[Path]:
    held = load(directory / f"{stem}.safetensors")
    (directory / f"{stem}.safetensors").unlink()
    names, files, where = sorted(held), [], {}
    for number in (1, 2):
        file = directory / f"{stem}-0000{number}-of-00002.safetensors"
        part = names[number - 1 :: 2]
        save(file, {name: held[name] for name in part})
        where |= dict.fromkeys(part, file.name)
        files.append(file)
    if index:
        (directory / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return files


@pytest.mark.parametrize(("layout", "stem"), [("mistral", "consolidated"), ("hugging_face", "model")])
@pytest.mark.parametrize("index", [True, False])
def test_sharded(layout: str, stem: str, index: bool, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(layout)
    whole = checkpoint.read(directory)
    shard(directory, stem, index)
    assert checkpoint.read(directory).tensors == whole.tensors


@pytest.mark.parametrize(("layout", "stem"), [("mistral", "consolidated"), ("hugging_face", "model")])
def test_a_missing_shard(layout: str, stem: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(layout)
    files = shard(directory, stem)
    files[1].unlink()
    refused(directory, f"{files[1]} is missing", f"{stem}.safetensors.index.json")


def test_a_missing_shard_without_an_index_and_with_other_names_is_missing_tensors(mistral: Path) -> None:
    first, second = shard(mistral, "consolidated", index=False)
    first.rename(mistral / "consolidated.00.safetensors")
    second.unlink()
    refused(mistral, "lacks tensor", "more")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "x"])
def test_a_broken_index(hugging_face: Path, content: str) -> None:
    shard(hugging_face, "model")
    (hugging_face / "model.safetensors.index.json").write_text(content)
    refused(hugging_face, "model.safetensors.index.json")


# ---- Half a download


@pytest.mark.parametrize("place", ["tekken.json.incomplete", ".cache/huggingface/download/AbC=.0123.incomplete"])
def test_half_a_download(mistral: Path, place: str) -> None:
    (mistral / place).parent.mkdir(parents=True, exist_ok=True)
    (mistral / place).touch()
    refused(mistral, str(mistral / place), "incomplete download")


@pytest.mark.parametrize("name", ["consolidated.safetensors", "params.json", "tekken.json"])
def test_a_pointer_of_git_lfs(mistral: Path, name: str) -> None:
    (mistral / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 8859462744\n")
    refused(mistral, f"{mistral / name} is a Git LFS pointer", "git lfs pull")


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_shard_that_the_others_count(mistral: Path, tensors: Entries, missing: int) -> None:
    (mistral / "consolidated.safetensors").unlink()
    names = sorted(tensors)
    for number in range(1, 4):
        part = {name: tensors[name] for name in names[number - 1 :: 3]}
        save(mistral / f"consolidated-0000{number}-of-00003.safetensors", part)
    assert len(checkpoint.read(mistral).tensors) == len(tensors)
    shard = mistral / f"consolidated-0000{missing}-of-00003.safetensors"
    shard.unlink()
    refused(mistral, f"{shard} is missing", "-of-00003.safetensors requires it")


@pytest.mark.parametrize("name", ["", "consolidated.safetensors"])
def test_what_this_user_may_not_read(name: str) -> None:
    """As another user where this one is root, who may read all."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch, "mistral")
        shutil.copytree(PICO, directory)
        for path in (Path(scratch), directory):
            path.chmod(0o755)
        (directory / name).chmod(0)
        before = os.geteuid()
        if before == 0:
            os.seteuid(65534)
        try:
            refused(directory, f"{directory} cannot be read by uid {os.geteuid()} (", "chmod -R a+rX")
        finally:
            os.seteuid(before)
            (directory / name).chmod(0o755)


# ---- Another Voxtral


def test_another_voxtral_is_told_by_its_encoder(mistral: Path, hugging_face: Path) -> None:
    assert checkpoint.other_model(mistral) is None
    assert checkpoint.other_model(hugging_face) is None
    edit(mistral / "params.json", lambda params: encoder_args(params).pop("causal"))
    assert checkpoint.other_model(mistral) == checkpoint.OtherModel(mistral, checkpoint.read(PICO).weight_bytes)
    edit(mistral / "params.json", lambda params: params.pop("multimodal"))
    assert checkpoint.other_model(mistral) is None
