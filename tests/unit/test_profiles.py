"""The fast profiles are profiles/fast.yaml with what their names say, and nothing else; what all profiles have."""

from typing import Any

import pytest
import yaml
from conftest import ROOT

from voxtral_serve.check import Report
from voxtral_serve.check.options import read_options
from voxtral_serve.check.profiles import OF_OTHER_MODELS

ALL = sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml"))
# vLLM-Omni's parser reads the options of speech synthesis: tests/speech/test_check.py.
NAMES = [name for name in ALL if name not in ("voxcpm2", "voxtral-tts")]


def profile(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / f"profiles/{name}.yaml").read_text(encoding="utf-8"))
    return content


def test_fp8_is_fast_with_quantized_weights() -> None:
    assert profile("fast-fp8") == profile("fast") | {"quantization": "fp8"}


def test_spec_is_fast_with_drafts() -> None:
    """And without what is compiled for steps of one token, which drafts make longer, and without live sessions, which
    drafts exclude: its context is the longest clip of fast.yaml."""
    fast, spec = profile("fast"), profile("fast-spec")
    drafts = spec.pop("speculative_config")
    assert fast["compilation_config"].pop("compile_sizes") == [1]
    assert fast.pop("scheduling_policy") == "priority"
    assert "realtime" in fast["served_model_name"].pop()  # for live clients
    fast["max_model_len"] = fast.pop("additional_config")["max_clip_positions"]
    assert spec == fast
    by_requests = drafts["num_speculative_tokens_per_batch_size"]
    assert by_requests[0][2] == drafts["num_speculative_tokens"]
    assert by_requests[-1][1] == fast["max_num_seqs"]


def test_throughput_spec_is_throughput_with_drafts() -> None:
    """And without what is compiled for steps of one token, as fast-spec.yaml."""
    plain, spec = profile("throughput"), profile("throughput-spec")
    drafts, of_fast = spec.pop("speculative_config"), profile("fast-spec")["speculative_config"]
    assert plain["compilation_config"].pop("compile_sizes") == [1]
    assert spec == plain
    by_requests = [each.pop("num_speculative_tokens_per_batch_size") for each in (drafts, of_fast)]
    assert drafts == of_fast
    assert by_requests[0][0] == by_requests[1][0]
    assert by_requests[0][-1][1] == plain["max_num_seqs"]


@pytest.mark.parametrize("name", ["fast-spec", "throughput-spec"])
def test_the_most_requests_of_each_number_of_drafts_fill_a_graph(name: str) -> None:
    """A step with drafts has one token more than these for each request."""
    content = profile(name)
    sizes = content["compilation_config"]["cudagraph_capture_sizes"]
    first = 1
    for begin, end, drafts in content["speculative_config"]["num_speculative_tokens_per_batch_size"]:
        assert begin == first and end * (drafts + 1) in sizes
        first = end + 1


def test_realtime_is_fast_with_more_live_sessions() -> None:
    fast, live = profile("fast"), profile("realtime")
    assert live["additional_config"].pop("max_live_sessions") > fast["additional_config"].pop("max_live_sessions")
    assert live.pop("max_num_seqs") > fast.pop("max_num_seqs")
    assert live == fast


@pytest.mark.parametrize("name", NAMES)
def test_live_sessions_fit_among_the_requests(name: str) -> None:
    """What the engine asks for at its start (voxtral_serve.engine.config)."""
    options = profile(name).get("additional_config", {})
    assert options.get("max_live_sessions", 0) <= profile(name)["max_num_seqs"]
    assert options.get("max_clip_positions", 1) <= profile(name)["max_model_len"]


def test_spec_of_0_20_0_drafts_as_many_whatever_runs() -> None:
    """Of the two numbers of drafts, that vLLM knows one. CUSTOM and FULL were not tried on a GPU with drafts and it."""
    spec, older = profile("fast-spec"), profile("fast-spec-0.20.0")
    del spec["speculative_config"]["num_speculative_tokens_per_batch_size"]
    spec["compilation_config"]["cudagraph_mode"] = "FULL_AND_PIECEWISE"
    assert older == spec | {"attention_backend": "TRITON_ATTN"}


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
    live = (options.additional_config or {}).get("max_live_sessions")
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
