"""What all profiles have, their drafts, and the variant that is a commented line in one of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import PICO, ROOT

from voxtral_serve import shims
from voxtral_serve.check import Report, check_all
from voxtral_serve.check.options import read_options
from voxtral_serve.check.profiles import OF_OTHER_MODELS
from voxtral_serve.engine.names import DRAFTER
from voxtral_serve.engine.names import PAD_DRAFTER as PADS

ALL = sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml"))
# vLLM-Omni's parser reads the options of speech synthesis: tests/speech/test_check.py.
NAMES = [name for name in ALL if name not in ("voxcpm2", "voxtral-tts")]

DRAFTING = ("fast", "realtime", "throughput")


def profile(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / f"profiles/{name}.yaml").read_text(encoding="utf-8"))
    return content


def variant(name: str, first: str) -> dict[str, Any]:
    """The options in the commented lines of a profile from the line `# FIRST` on, as if they were not comments."""
    lines = (ROOT / f"profiles/{name}.yaml").read_text(encoding="utf-8").splitlines()
    begin = lines.index(f"# {first}")
    end = next((place for place in range(begin, len(lines)) if not lines[place].startswith("# ")), len(lines))
    content: dict[str, Any] = yaml.safe_load("\n".join(line.removeprefix("# ") for line in lines[begin:end]))
    return content


def test_vllm_accepts_the_variant(tmp_path: Path) -> None:
    (tmp_path / "variant.yaml").write_text(yaml.safe_dump(profile("fast") | variant("fast", "quantization: fp8")))
    read_options(report := Report(), tmp_path / "variant.yaml")
    assert report.problems == []


@pytest.mark.parametrize("name", DRAFTING)
def test_drafts_are_served_or_left_out_on_each_version(name: str) -> None:
    """With live sessions where the profile has them. vLLM 0.20.0 knows neither the drafter nor the last key."""
    report = check_all(ROOT / f"profiles/{name}.yaml", PICO)
    assert report.problems == []
    (told,) = [line for line in report.lines if line.startswith("  drafts ")]
    assert told.split()[1] == ("none" if shims.installed("vllm") == "0.20.0" else "up")


def test_vllm_has_no_drafts_where_the_command_line_says_so() -> None:
    report = check_all(ROOT / "profiles/fast.yaml", PICO, ["--speculative-config", "null"])
    assert report.problems == []
    assert "  drafts            none" in report.lines


def test_pads_alone_are_for_a_gpu() -> None:
    """Where the config names vLLM's method."""
    words = ["--speculative-config", json.dumps({"method": "ngram_gpu", "model": PADS, "num_speculative_tokens": 5})]
    (on_a_cpu,) = check_all(ROOT / "profiles/throughput.yaml", PICO, words).problems
    assert "speculative_config has method 'ngram_gpu' and model" in on_a_cpu and "on cpu" in on_a_cpu


@pytest.mark.parametrize("name", DRAFTING)
def test_the_most_requests_of_each_number_of_drafts_fill_a_graph(name: str) -> None:
    """A step with drafts has one token more than these for each request."""
    content = profile(name)
    drafts = content["speculative_config"]
    sizes = content["compilation_config"]["cudagraph_capture_sizes"]
    first, by_requests = 1, drafts["num_speculative_tokens_per_batch_size"]
    for begin, end, count in by_requests:
        assert begin == first and end * (count + 1) in sizes
        first = end + 1
    assert by_requests[0][2] == drafts["num_speculative_tokens"]
    assert by_requests[-1][1] == content["max_num_seqs"]
    assert drafts["model"] == DRAFTER


def test_realtime_is_fast_with_more_live_sessions() -> None:
    fast, live = profile("fast"), profile("realtime")
    assert live["additional_config"].pop("max_live_sessions") > fast["additional_config"].pop("max_live_sessions")
    del live["additional_config"]["max_live_age_s"]
    assert live.pop("max_num_seqs") > fast.pop("max_num_seqs")
    few, many = (each["speculative_config"].pop("num_speculative_tokens_per_batch_size") for each in (fast, live))
    assert many[: len(few)] == few
    fewer, more = (each["compilation_config"].pop("cudagraph_capture_sizes") for each in (fast, live))
    assert more[: len(fewer)] == fewer
    assert live == fast


@pytest.mark.parametrize("name", NAMES)
def test_live_sessions_fit_among_the_requests(name: str) -> None:
    """What the engine asks for at its start (voxtral_serve.engine.config)."""
    options = profile(name).get("additional_config", {})
    assert options.get("max_live_sessions", 0) <= profile(name)["max_num_seqs"]
    assert options.get("max_clip_positions", 1) <= profile(name)["max_model_len"]


@pytest.mark.parametrize("name", NAMES)
def test_names_and_guard_as_vllm_reads_them(name: str) -> None:
    read = read_options(report := Report(), ROOT / f"profiles/{name}.yaml")
    assert report.problems == []
    assert read is not None
    options = read.values
    assert options.served_model_name == profile(name)["served_model_name"]
    first, *others = options.served_model_name
    assert first == (name if name in OF_OTHER_MODELS else "voxtral")
    assert others[:3] == ["whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe"]  # OpenAI's
    assert ("gpt-4o-transcribe-diarize" in others) == (name not in OF_OTHER_MODELS)  # of models with word times
    assert ("gpt-transcribe" in others) == (name not in OF_OTHER_MODELS)  # its answers have the recognised language
    live = (options.additional_config or {}).get("max_live_sessions")
    assert ("gpt-live-transcribe" in others) == bool(live)
    assert ("voxtral-mini-transcribe-realtime-2602" in others) == bool(live)  # Mistral's
    assert (options.middleware, options.shutdown_timeout) == (["voxtral_serve.guard.Guard"], 30)
    assert options.disable_uvicorn_access_log


def test_profiles_of_other_models_are_told_by_their_names() -> None:
    """The others serve pico's architecture."""
    assert set(OF_OTHER_MODELS) <= set(ALL)
    assert {name for name in ALL if "voxtral" not in profile(name)["served_model_name"]} == set(OF_OTHER_MODELS)


def test_the_profile_of_speech_synthesis() -> None:
    """The stages are as many as vLLM-Omni has, and speak as many texts as it has CUDA graphs for."""
    content = profile("voxtral-tts")
    assert content["served_model_name"][:4] == ["voxtral-tts", "tts-1", "tts-1-hd", "gpt-4o-mini-tts"]
    assert content["middleware"] == "voxtral_serve.guard.Guard"
    assert "shutdown_timeout" not in content  # vLLM-Omni refuses it
    assert content["disable_uvicorn_access_log"]
    stages = content["stage_overrides"]
    assert [stages[stage]["max_num_seqs"] for stage in ("0", "1")] == [32, 32]
    assert sum(stage["gpu_memory_utilization"] for stage in stages.values()) == pytest.approx(0.9)
    assert "model" not in content and "omni" not in content  # on the command line only


def test_the_profile_of_voxcpm2() -> None:
    """The values of vllm-omni's deploy file, as the profile says: it speaks as many texts as it has CUDA graphs for."""
    content = profile("voxcpm2")
    assert content["served_model_name"] == ["voxcpm2", "tts-1", "tts-1-hd", "gpt-4o-mini-tts"]
    assert {name: content[name] for name in content if name not in ("served_model_name", "stage_overrides")} == {
        "middleware": "voxtral_serve.guard.Guard",
        "disable_uvicorn_access_log": True,
    }
    (stage,) = content["stage_overrides"].values()
    assert stage["max_num_seqs"] == 8
