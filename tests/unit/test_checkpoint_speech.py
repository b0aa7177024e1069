"""Checkpoints of Voxtral TTS: what is complete, and what is missing, mixed or damaged, by its name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import PICO, ROOT

from bench.gpu import speech_checkpoint
from mistral_layout import speech
from voxtral_serve import shims
from voxtral_serve.check import check_all, synthesis
from voxtral_serve.check.report import Report
from voxtral_serve.checkpoint import CheckpointError, read_speech
from voxtral_serve.checkpoint.speechshapes import speech_shapes


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("speech")
    speech_checkpoint.write(directory, small=True)
    return directory


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        read_speech(directory)
    return str(refused.value)


def test_random_weights_are_complete(whole: Path) -> None:
    held = read_speech(whole)
    assert held is not None
    assert (len(held.voices), held.voices["casual_male"]) == (20, 7)
    assert held.weight_bytes == 2 * held.parameters


def test_both_lists_of_tensors_agree() -> None:
    """That of the writer and that of the check are written apart."""
    for params in (speech.PARAMS, speech.tiny()):
        assert speech_shapes(params) == speech.shapes(params)
    sizes = dict.fromkeys(speech_shapes(speech.PARAMS), 1)
    assert len(sizes) == 386


def test_the_other_spelling_of_the_codebooks() -> None:
    params = speech.tiny()
    model = params["multimodal"]["audio_model_args"]
    model["codebook_sizes"] = ",".join([str(model.pop("semantic_codebook_size")), *["21"] * 36])
    assert speech_shapes(params) == speech.shapes(speech.tiny())


def test_a_codec_with_an_encoder(whole: Path, copy: Path) -> None:
    """It clones voices. vLLM-Omni reads it, and the check lets it pass."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(whole / "consolidated.safetensors")
    name = "audio_tokenizer.input_proj.conv.parametrizations.weight.original0"
    save_file(tensors | {name: tensors["norm.weight"].clone()}, copy / "consolidated.safetensors")
    assert read_speech(copy) is not None
    save_file(tensors | {"audio_tokenizer.other": tensors["norm.weight"].clone()}, copy / "consolidated.safetensors")
    assert "has tensor audio_tokenizer.other, which this architecture does not have" in refusal(copy)
    save_file({key: tensors[key] for key in tensors if key != "layers.1.ffn_norm.weight"}, copy / "x.safetensors")
    (copy / "x.safetensors").rename(copy / "consolidated.safetensors")
    assert refusal(copy).endswith("lacks tensor layers.1.ffn_norm.weight")


@pytest.mark.parametrize("name", ["tekken.json", "consolidated.safetensors", "voice_embedding/fr_male.pt"])
def test_a_missing_file(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert Path(name).name in refusal(copy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        (b"PK\x03\x04", "is not a complete file of torch.save"),
        (b"", "is not a complete file of torch.save"),
    ],
)
def test_a_damaged_voice(copy: Path, content: bytes, message: str) -> None:
    (copy / "voice_embedding/de_male.pt").write_bytes(content)
    assert "de_male.pt" in refusal(copy)
    assert message in refusal(copy)


def test_a_voice_of_another_length(copy: Path) -> None:
    shutil.copy(copy / "voice_embedding/casual_female.pt", copy / "voice_embedding/hi_female.pt")
    assert "hi_female.pt has 1536 bytes of numbers" in refusal(copy)
    assert "25 audio tokens of 128 numbers: expected at least 6400" in refusal(copy)


def test_files_of_another_model(copy: Path) -> None:
    shutil.copy(PICO / "tekken.json", copy / "tekken.json")
    assert "tekken.json has no `audio` part with voice_num_audio_tokens" in refusal(copy)
    speech_checkpoint.write(copy, small=True)
    shutil.copy(PICO / "consolidated.safetensors", copy / "consolidated.safetensors")
    assert "lacks tensor mm_audio_embeddings.tok_embeddings.weight" in refusal(copy)


def test_voices_that_only_one_file_names(copy: Path) -> None:
    edit(copy / "tekken.json", lambda content: content["audio"]["voice_num_audio_tokens"].update(anna=3))
    assert "tekken.json has the voice 'anna', params.json has not" in refusal(copy)
    edit(copy / "tekken.json", lambda content: content["audio"].update(voice_num_audio_tokens={"casual_male": 7}))
    assert "params.json has the voice 'ar_male', tekken.json has not" in refusal(copy)


def test_values_of_params(copy: Path) -> None:
    tokenizer = copy / "tekken.json"
    edit(tokenizer, lambda content: content["audio"].update(sampling_rate=16000))
    assert "mixes two models: params.json has sampling_rate 24000, tekken.json 16000" in refusal(copy)
    edit(tokenizer, lambda content: content["audio"].update(sampling_rate=24000))
    edit(copy / "params.json", lambda content: content.update(n_layers=0))
    assert "n_layers is 0, expected a whole number of at least 1" in refusal(copy)
    edit(copy / "params.json", lambda content: content["multimodal"].pop("audio_tokenizer_args"))
    edit(copy / "params.json", lambda content: content.update(n_layers=2))
    assert "params.json lacks 'audio_tokenizer_args'" in refusal(copy)


def test_other_models_are_left_to_others(tmp_path: Path) -> None:
    assert read_speech(PICO) is None
    assert read_speech(tmp_path) is None
    assert read_speech(tmp_path / "absent") is None


# ---- voxtral-serve check


def test_without_omni_on_the_command_line(whole: Path) -> None:
    report = check_all(None, whole)
    assert report.problems == ["Voxtral TTS is served by vLLM-Omni: add --omni to the command line"]
    assert any(line.startswith("  voices            20, of 6 to 25 audio tokens") for line in report.lines)


@pytest.mark.parametrize(
    ("found", "vllm", "message"),
    [
        (None, "0.32.0", "vllm-omni is not installed, and --omni needs it: pip install 'vllm-omni=="),
        ("0.24.0", "0.24.0", "vllm-omni 0.24.0: it does not serve Voxtral TTS (vllm-omni issue 4954)"),
        ("0.20.0", "0.32.0", "vllm-omni 0.20.0 is for vLLM 0.20, and vLLM 0.32.0 is installed"),
        ("0.20.0", "0.20.0", None),
        ("0.32.0rc1", "0.32.0", None),
    ],
)
def test_versions(found: str | None, vllm: str, message: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(library: str) -> str:
        assert library == "vllm-omni"
        if found is None:
            raise synthesis.PackageNotFoundError
        return found

    monkeypatch.setattr(synthesis, "version", version)
    monkeypatch.setattr(shims, "installed", lambda library: vllm)
    synthesis.check_omni(report := Report())
    assert [message in problem for problem in report.problems] == ([True] if message else [])  # type: ignore[operator]


def test_the_gate_of_a_container_without_vllm_omni(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthesis, "version", lambda library: (_ for _ in ()).throw(synthesis.PackageNotFoundError))
    report = check_all(ROOT / "profiles/voxtral-tts.yaml", None, [str(whole), "--omni"])
    assert "vllm-omni is not installed" in report.problems[0]
