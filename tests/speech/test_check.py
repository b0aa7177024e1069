"""`voxtral-serve check` with vLLM-Omni installed: its options, its version, and the profile."""

from pathlib import Path

import pytest
import yaml

from speech.conftest import CONFIG
from voxtral_serve.check import check_all


def check(directory: Path, config: Path = CONFIG, *words: str) -> list[str]:
    return check_all(config, None, [str(directory), "--omni", *words]).problems


def test_the_profile_and_the_checkpoint_are_right(tiny: Path) -> None:
    assert check(tiny) == []


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"0": {"max_num_seq": 32}}, "stage 0: max_num_seq is not an option of vllm-omni; did you mean max_num_seqs?"),
        (
            {"0": {"default_sampling_params": {"max_tokens": 9}}},
            "vllm-omni drops default_sampling_params here: set it in",
        ),
        ({"2": {"max_num_seqs": 32}}, "stage_overrides has stage '2': expected 0 or 1"),
    ],
)
def test_options_that_vllm_omni_would_drop(tiny: Path, tmp_path: Path, stages: dict, message: str) -> None:  # type: ignore[type-arg]
    content = yaml.safe_load(CONFIG.read_text()) | {"stage_overrides": stages}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    (problem,) = check(tiny, tmp_path / "config.yaml")
    assert message in problem


def test_an_option_of_the_engine(tiny: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(CONFIG.read_text())
    content["stage_overrides"]["0"]["kv_cache_memory_bytes"] = 1 << 30
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    assert check(tiny, tmp_path / "config.yaml") == []


def test_an_unknown_option(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.read_text() + "stage_overides: {}\n")
    (problem,) = check(tiny, tmp_path / "config.yaml")
    assert "stage_overides is not an option" in problem
    assert "did you mean stage_overrides?" in problem
