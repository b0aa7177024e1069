"""`voxtral-serve check`: what it refuses, and that its figures are vLLM's."""

import importlib.metadata
import json
import os
import re
import resource
import shlex
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from places import CONFIG, PICO, ROOT
from vllm import platforms
from vllm.third_party import pynvml

import voxtral_serve
from pico import others
from voxtral_serve import checkpoint, shims
from voxtral_serve.check import (
    Report,
    check_all,
    clip_length,
    device,
    installation,
    kv_cache,
    memory,
    options,
    other_gpu,
    parallel,
    plan,
)
from voxtral_serve.check.device import Device
from voxtral_serve.checkpoint import CheckpointError
from voxtral_serve.engine.draft_network import FILE, Head, HeadNetwork, tokenizer_hash
from voxtral_serve.engine.names import ENCODE_ONCE
from voxtral_serve.engine.session import session_blocks
from voxtral_serve.units import GIB, MIB

OK = "ok: this configuration can be served"
LONG = ROOT / "profiles/long.yaml"
UPLOAD_LIMITS = dict(re.findall(r"(VLLM_MAX_AUDIO_\w+)=(\d+)", LONG.read_text()))  # what its comment says to set


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    for name in ("VLLM_PLUGINS", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(memory, "runs_on_cpu", lambda: True)  # vLLM 0.20.0's does not
    # Whatever else runs here
    monkeypatch.setattr(memory, "first_device", lambda _: Device("memory node 0 (CPU)", 24 * GIB, 20 * GIB))


def write(path: Path, **options: object) -> Path:
    path.write_text(json.dumps({"model": str(PICO), **options}))  # JSON is YAML
    return path


def run(tmp_path: Path, **options: object) -> Report:
    return check_all(write(tmp_path / "config.yaml", **options), None)


def only_problem(report: Report) -> str:
    (problem,) = report.problems
    assert f"  PROBLEM           {problem}" in report.lines
    assert report.verdict().startswith("1 problem in ")
    return problem


def row(report: Report, name: str) -> str:
    (line,) = [line for line in report.lines if line.startswith(f"  {name} ")]
    return line.removeprefix(f"  {name}").strip()


# The command


def command(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    words = [sys.executable, "-m", "voxtral_serve.cli", *arguments]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow  # of CPU seconds, which a second suite beside it lengthens
def test_it_answers_in_time(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = command("check", "--config", str(CONFIG), cwd=PICO)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = done.stdout.splitlines()
    assert "  directory         " + str(PICO) in lines
    assert done.stderr == ""
    assert (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime) < 10
    if shims.installed("vllm") == "0.20.0":
        assert "cannot run its own Voxtral Realtime model on a CPU" in done.stdout
    else:
        assert (lines[-1], done.returncode) == (OK, 0)


@pytest.mark.slow
def test_its_exit_status_tells_a_failure(tmp_path: Path) -> None:
    done = command("check", "--config", str(tmp_path / "none.yaml"), str(tmp_path))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "2 problems in config, checkpoint, marked PROBLEM above"


@pytest.mark.parametrize(
    "arguments", [[], ["chek"], ["check", "--config"], ["check", "--config=a.yaml"], ["--port", "1", "check"]]
)
def test_a_wrong_command_line(arguments: list[str]) -> None:
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: voxtral-serve")


@pytest.mark.slow
def test_it_takes_the_arguments_of_vllm_serve() -> None:
    """The model as a word of its own, and options that count more than the config's 512 and 1."""
    done = command("check", "--config", str(CONFIG), str(PICO), "--max-model-len", "1k", "--max_num_seqs=2")
    lines = done.stdout.splitlines()
    assert "  directory         " + str(PICO) in lines
    assert "  length            76.08 s: 951 tokens of audio and 49 of padding" in lines
    assert any("max_num_seqs = 2 sequences" in line for line in lines)


def test_its_version() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"voxtral-serve {voxtral_serve.__version__}\n")


def test_a_model_that_vllm_would_pass_over() -> None:
    done = command("check", "--gate", "--config", str(CONFIG), str(PICO))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{PICO} must come before --config" in done.stderr


def test_a_model_before_the_config_is_the_one_that_is_checked(tmp_path: Path) -> None:
    """The config's last option takes all words behind it."""
    config = write(tmp_path / "config.yaml", max_model_len=512, served_model_name="voxtral")
    report = check_all(config, None, ["/no/such/model", "--port", "1"])
    assert "/no/such/model is not a local directory" in only_problem(report)


@pytest.mark.slow
def test_the_gate_says_problems_alone(tmp_path: Path) -> None:
    config = write(tmp_path / "config.yaml", max_model_len=49, max_num_seqs=1, max_num_seq_s=1)
    done = command("check", "--gate", "--config", str(config), "--port", "1", "--host", "no.such.host.invalid")
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert [line.split(": ")[:3] for line in lines] == [
        ["voxtral-serve", "refused", section] for section in ("config", "server", "server")
    ]
    assert lines[0].endswith("did you mean max_num_seqs?")
    assert lines[1].startswith("voxtral-serve: refused: server: cannot listen on host no.such.host.invalid, port 1")
    assert lines[2].startswith("voxtral-serve: refused: server: no API key: set VLLM_API_KEY")


# The installation


def test_nothing_wrong() -> None:
    report = check_all(CONFIG, PICO)
    assert (report.problems, report.verdict()) == ([], OK)
    assert row(report, "layout") == "mistral"
    assert row(report, "tensors") == "107, 18.34 MiB, 9,615,360 parameters, BF16"


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "LIBRARIES", ("vllm", "no-such-library"))
    assert only_problem(check_all(CONFIG, PICO)).startswith("no-such-library is not installed")


def test_without_vllm_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(library: str) -> str | None:
        return None if library == "vllm" else "1"

    monkeypatch.setattr(shims, "installed", installed)
    monkeypatch.setattr(installation, "LIBRARIES", ("vllm-not-here",))
    report = check_all(CONFIG, PICO)
    assert only_problem(report).startswith("vllm-not-here is not installed")
    assert report.lines.count("  not computed      the config must be valid first") == 2
    assert row(report, "layout") == "mistral"


def test_an_untested_version_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shims, "TESTED", shims.TESTED | {"vllm": ("0.1", "0.2")})
    report = check_all(CONFIG, PICO)
    assert row(report, "vllm").endswith("not tested; tested: 0.1, 0.2")
    assert report.problems == []


def versions(monkeypatch: pytest.MonkeyPatch, vllm: str) -> Report:
    """The section of an environment with this vLLM."""
    monkeypatch.setattr(shims, "installed", lambda library: vllm if library == "vllm" else "1")
    installation.check_versions(report := Report())
    return report


def test_the_recommended_vllm_has_no_further_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = versions(monkeypatch, shims.TESTED["vllm"][-1]).lines
    assert not any(line.startswith(("  recommended", "  not in")) for line in lines)


@pytest.mark.parametrize("vllm", ["0.20.0", "0.25.0"])
def test_what_another_vllm_cannot_do(vllm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = versions(monkeypatch, vllm)
    assert row(report, "recommended") == "vllm 0.32.0: pip install 'voxtral-serve[gpu]'"
    told = [line for line in report.lines if line.startswith(f"  not in {vllm}")]
    assert len(told) == len(installation.LACKS.get(vllm, ()))
    assert report.problems == []


def test_each_older_vllm_that_is_supported_has_its_lines_and_its_profiles() -> None:
    """Those of vLLM-Omni are for the recommended vLLM only, as their first lines say."""
    assert set(installation.LACKS) == set(shims.TESTED["vllm"][:-1])
    newer = {path.name for path in (ROOT / "profiles").glob("*.yaml") if "--omni" in path.read_text(encoding="utf-8")}
    for lacks in installation.LACKS.values():
        named = " ".join(lack.partition(":")[0] for lack in lacks if lack.startswith("profiles/"))
        assert set(re.findall(r"[\w.-]+\.yaml", named)) == newer


def test_patches_that_are_not_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [finder for finder in sys.meta_path if type(finder).__name__ != "PostImport"]
    monkeypatch.setattr(sys, "meta_path", others)
    assert "Reinstall voxtral-serve" in only_problem(check_all(CONFIG, PICO))


def test_a_patch_that_drifted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drifted(shims.Patch):
        name, target, library = "drifting", "json", "vllm"
        needed = {}  # noqa: RUF012

        def probe(self, module: object) -> bool:
            raise AttributeError("nothing is where it was")

    others = [finder for finder in sys.meta_path if type(finder).__name__ != "PostImport"]
    monkeypatch.setattr(sys, "meta_path", [shims.PostImport((Drifted(),), shims.__file__), *others])
    report = check_all(CONFIG, PICO)
    assert row(report, "drifted") == "drifting: AttributeError: nothing is where it was"
    assert "patch drifting (of json) has drifted on vllm" in only_problem(report)


def test_no_entry_point(hugging_face: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "PLUGIN", "voxtral_serve.plugin:other")
    assert "is not an entry point of vllm.general_plugins" in only_problem(check_all(CONFIG, hugging_face))


@pytest.mark.parametrize("allowed", ["", "other"])
def test_a_plugin_that_is_left_out(allowed: str, hugging_face: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert f"VLLM_PLUGINS={allowed!r} does not include voxtral_serve" in only_problem(check_all(CONFIG, hugging_face))


def test_mistrals_layout_does_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    report = check_all(CONFIG, PICO)
    assert report.problems == []
    assert "VLLM_PLUGINS='' does not include voxtral_serve" in row(report, "not loaded")


def test_encode_once_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    report = run(tmp_path, hf_overrides={"architectures": ["VoxtralRealtimeEncodeOnce"]})
    assert "vLLM does not load the plugin for VoxtralRealtimeEncodeOnce" in only_problem(report)


@pytest.mark.parametrize("option", ["config_format", "load_format"])
def test_a_format_of_the_other_layout(option: str, hugging_face: Path, tmp_path: Path) -> None:
    config = write(tmp_path / "config.yaml", model=str(hugging_face), **{option: "mistral"})
    assert f"{option} is 'mistral'" in only_problem(check_all(config, None))


def test_a_tokenizer_of_another_kind(tmp_path: Path) -> None:
    assert "tokenizer_mode is 'hf'" in only_problem(run(tmp_path, tokenizer_mode="hf"))


def test_an_installation_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ImportError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(options, "vllm_parser", broken)
    assert "vLLM cannot be imported: ImportError: libcuda.so.1" in only_problem(check_all(CONFIG, PICO))


def test_a_plugin_that_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other,voxtral_serve")
    assert check_all(CONFIG, PICO).problems == []


# The config


def test_every_wrong_option_is_named(tmp_path: Path) -> None:
    report = run(tmp_path, max_model_len="abc", max_num_seq_s=1, dtype="bf16", **{"gpu-memory-utilisation": 0.5})
    version = importlib.metadata.version("vllm")
    prefix = f"{tmp_path / 'config.yaml'}: "
    length, unknown, dtype, dashes = (problem.removeprefix(prefix) for problem in report.problems)
    assert length == "max_model_len: invalid human_readable_int_or_auto value: 'abc'"
    assert unknown == f"max_num_seq_s is not an option of vllm serve {version}; did you mean max_num_seqs?"
    assert dtype.startswith("dtype: invalid choice: 'bf16' (choose from ")
    assert dashes.endswith("did you mean gpu_memory_utilization?")
    assert row(report, "layout") == "mistral"
    assert report.lines.count("  not computed      the config must be valid first") == 2
    assert report.verdict() == "4 problems in config, marked PROBLEM above"


def test_a_wrong_option_of_speculation() -> None:
    """vLLM's parser takes it, and the engine ends over it."""
    words = ["--speculative-config", '{"method": "ngram", "num_speculative_token": 2}']
    problem = only_problem(check_all(CONFIG, PICO, words))
    vllm = importlib.metadata.version("vllm")
    name = "num_speculative_token"
    assert problem == f"speculative_config: {name} is not an option of vllm {vllm}; did you mean {name}s?"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--max-num-seq-s", "1"], "max_num_seq_s is not an option of vllm serve"),
        (["--max-num-seq-s=1"], "did you mean max_num_seqs?"),
        (["--port", "http"], "port: invalid int value: 'http'"),
        (["--enforce-eager", "a", "b"], "b: unexpected value after enforce_eager"),
        (["a", "b"], "b: unexpected value"),
        (["-tp", "two"], "tp: invalid int value: 'two'"),
    ],
)
def test_a_wrong_word(words: list[str], part: str) -> None:
    problem = only_problem(check_all(CONFIG, PICO, words))
    assert problem.startswith("command line: ")
    assert part in problem


def test_several_values_where_vllm_takes_one(tmp_path: Path) -> None:
    """vLLM would serve a model called "c"."""
    assert "middleware has several values, and vLLM takes the last one as the model" in only_problem(
        run(tmp_path, middleware=["a.b", "c"])
    )


def test_middleware_of_the_command_line_comes_on_top(tmp_path: Path) -> None:
    config = write(tmp_path / "config.yaml", middleware="a.InTheConfig")
    read = options.read_options(Report(), config, ["--middleware", "a.OnTheCommandLine"])
    assert read is not None
    assert read.values.middleware == ["a.InTheConfig", "a.OnTheCommandLine"]


@pytest.mark.parametrize(
    ("words", "rust", "part"),
    [
        (
            ["--data-parallel-size", "2", "--additional-config", '{"max_live_sessions": 4}'],
            "0",
            "max_live_sessions 4: exp",
        ),
        (["--grpc"], "0", "the guard is left out"),
        ([], "1", "VLLM_USE_RUST_FRONTEND is set"),
    ],
)
def test_several_engines_and_other_frontends(
    words: list[str], rust: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", rust)
    problems = check_all(ROOT / "profiles/fast.yaml", PICO, words).problems
    assert any(part in problem for problem in problems), problems


def test_internal_data_parallel_of_uploads_is_for_the_newer_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, problems in (("0.20.0", 1), ("0.32.0", 0)):
        monkeypatch.setattr(parallel, "version", lambda name, version=version: version)
        read = options.read_options(Report(), CONFIG, ["--data-parallel-size", "2"])
        assert read is not None
        parallel.check_parallel(report := Report(), read, gate=True)
        assert len(report.problems) == problems
    assert "different engines" not in "".join(report.problems)


# Before a start: the port and the key


def gate(config: Path, *words: str) -> Report:
    return check_all(config, PICO, words, gate=True)


@pytest.fixture
def port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_the_contest_s_config_asks_for_no_key(port: str) -> None:
    report = gate(CONFIG, "--port", port)
    assert report.problems == []
    assert row(report, "listens on") == f"all addresses, port {port}"
    assert row(report, "API key") == "none, as additional_config sets it"


def test_a_file_of_keys(port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, secret = tmp_path / "keys.yaml", "0123456789abcdef"
    monkeypatch.setenv("VOXTRAL_SERVE_KEYS", str(file))
    assert f"VOXTRAL_SERVE_KEYS names {file}, which cannot be read" in only_problem(gate(CONFIG, "--port", port))
    file.write_text(f"- {{name: billing, key: {secret}, in_flight: many}}")
    found = only_problem(gate(CONFIG, "--port", port))
    assert "entry 1 (billing): its in_flight is 'many': expected a whole number" in found and secret not in found
    file.write_text(f"- {{name: billing, key: {secret}}}")
    report = gate(CONFIG, "--port", port)
    assert not report.problems and f"1, of {file}" in str(report.lines)
    monkeypatch.setenv("VLLM_API_KEY", secret)
    assert "so is vLLM's own key" in only_problem(gate(CONFIG, "--port", port))


@pytest.mark.parametrize("profile", sorted(path.name for path in (ROOT / "profiles").glob("*.yaml")))
def test_the_profiles_ask_for_one(profile: str, port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = [each for each in gate(ROOT / "profiles" / profile, "--port", port).problems if "API key" in each]
    assert problem.startswith("no API key: set VLLM_API_KEY, or set VLLM_API_KEY_FILE")
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    report = gate(ROOT / "profiles" / profile, "--port", port)
    assert row(report, "API key") == "from the environment"
    assert "s3cret" not in "\n".join(report.lines)


def test_a_key_that_vllm_would_log(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "another")
    report = gate(CONFIG, "--port", port, "--api-key", "s3cret")
    assert only_problem(report).startswith("the option api_key is set, and vLLM logs its options")
    assert "s3cret" not in "\n".join(report.lines)


def test_a_switch_that_is_none(tmp_path: Path, port: str) -> None:
    config = write(tmp_path / "config.yaml", max_model_len=512, additional_config={"voxtral_serve": {"api_key": "no"}})
    assert "api_key is 'no': set it to none" in only_problem(gate(config, "--port", port))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_port_that_is_taken(host: str) -> None:
    """By one that would share it, as vLLM's own sockets do."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, 0))
        listener.listen()
        taken = listener.getsockname()[1]
        problem = only_problem(gate(CONFIG, "--host", host, "--port", str(taken)))
    assert problem == f"port {taken} is in use: stop the process that listens on it, or choose another --port"


def test_without_the_gate_a_port_may_be_taken() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        words = ["--host", "127.0.0.1", "--port", str(listener.getsockname()[1])]
        assert check_all(CONFIG, PICO, words).problems == []


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.yaml", "a: [1", "is not valid YAML"),
        ("a.yaml", "", "contains NoneType"),
        ("a.yaml", "- model", "contains list"),
        ("a.yaml", "1: 2", "1 is not an option name"),
        ("a.txt", "model: .", "yaml"),
    ],
)
def test_a_config_that_is_none(tmp_path: Path, name: str, content: str, part: str) -> None:
    (tmp_path / name).write_text(content)
    problem = only_problem(check_all(tmp_path / name, PICO))
    assert part in problem
    assert str(tmp_path / name) in problem


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5: Input should be less than or equal to 1"),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 4},
            "max_num_batched_tokens (4) must be greater than or equal to max_num_seqs (8)",
        ),
        ({"max_model_len": 200000}, "User-specified max_model_len (200000) is greater than the derived max_model_len"),
    ],
)
def test_values_that_vllm_s_engine_refuses(tmp_path: Path, options: dict[str, Any], part: str) -> None:
    problem = only_problem(run(tmp_path, **options))
    assert problem.startswith("config: ")
    assert part in problem


def test_no_config_is_vllm_s_defaults() -> None:
    report = check_all(None, PICO)
    assert row(report, "file") == "none: vLLM's defaults"
    assert "for one sequence of 131,072 tokens" in "".join(report.lines)


# The checkpoint


def test_the_config_s_model_is_relative_to_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PICO.parent)
    config = write(tmp_path / "config.yaml", model=PICO.name, max_model_len=512)
    assert row(check_all(config, None), "directory") == str(PICO)
    assert row(check_all(config, tmp_path), "directory") == str(tmp_path)
    monkeypatch.chdir(PICO)
    assert row(check_all(None, None), "directory") == str(PICO)


def test_a_name_of_the_hub_is_refused(tmp_path: Path) -> None:
    problem = only_problem(run(tmp_path, model="mistralai/Voxtral-Mini-4B-Realtime-2602"))
    assert problem.startswith("mistralai/Voxtral-Mini-4B-Realtime-2602 is not a local directory")
    assert "hf download" in problem


def test_a_name_of_the_hub_that_vllm_may_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    report = run(tmp_path, model="mistralai/Voxtral-Mini-4B-Realtime-2602")
    assert report.problems == []
    assert "vLLM downloads mistralai/Voxtral-Mini-4B-Realtime-2602" in "".join(report.lines)
    assert "is not a local directory" in only_problem(run(tmp_path, model="/no/such/directory"))


def another(directory: Path) -> Path:
    """As Voxtral-Mini-3B-2507: an encoder that is not causal. The tensors stay pico's."""
    shutil.copytree(PICO, directory)
    params = json.loads((PICO / "params.json").read_text())
    del params["multimodal"]["whisper_model_args"]["encoder_args"]["causal"]
    (directory / "params.json").write_text(json.dumps(params))
    return directory


def test_another_voxtral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ROOT / "profiles/voxtral-3b.yaml"
    directory = another(tmp_path / "model")
    report = check_all(config, directory)
    assert report.problems == []
    assert row(report, "model").startswith("Voxtral, but not Realtime")
    assert row(report, "weights") == "18.34 MiB (as stored); this check computes nothing else for this model"
    on_gpu(monkeypatch, 0.1, 0.1)
    assert "the weights take 18.34 MiB, but gpu_memory_utilization 0.15 of NVIDIA L4 is only 15.36 MiB" in only_problem(
        check_all(config, directory)
    )
    with (directory / "consolidated.safetensors").open("r+b") as file:
        file.truncate(1_000_000)
    assert "has 1000000 bytes, but its header requires" in only_problem(check_all(config, directory))


def test_whisper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ROOT / "profiles/whisper.yaml"
    others.write_whisper(tmp_path)
    report = check_all(config, tmp_path)
    assert report.problems == []
    assert row(report, "model").startswith("Whisper: its files are complete")
    assert row(report, "weights").startswith("1.67 MiB (as stored)")
    on_gpu(monkeypatch, 0.001, 0.001)
    assert "the weights take 1.67 MiB, but gpu_memory_utilization 0.9" in only_problem(check_all(config, tmp_path))
    (tmp_path / "model.safetensors").unlink()
    assert "has the config.json of Whisper, but no model.safetensors" in only_problem(check_all(config, tmp_path))


def test_a_broken_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(PICO, tmp_path / "pico")
    (tmp_path / "pico/tekken.json").unlink()
    report = run(tmp_path, model=str(tmp_path / "pico"))
    assert "tekken.json is missing" in only_problem(report)
    assert report.lines.count("  not computed      the checkpoint must be valid first") == 2


# Memory


def full_size(directory: Path) -> Path:
    """A checkpoint of the published model's shapes, its 8 GiB of weights a hole in a file."""
    directory.mkdir()
    params = json.loads((PICO / "params.json").read_text())
    params |= {"dim": 3072, "n_layers": 26, "head_dim": 128, "hidden_dim": 9216}
    params |= {"n_heads": 32, "n_kv_heads": 8, "vocab_size": 131072}
    encoder = params["multimodal"]["whisper_model_args"]["encoder_args"]
    encoder |= {"dim": 1280, "n_layers": 32, "head_dim": 64, "hidden_dim": 5120, "n_heads": 32, "n_kv_heads": 32}
    (directory / "params.json").write_text(json.dumps(params))
    shutil.copy(PICO / "tekken.json", directory)
    header, end = {}, 0
    for name, shape in checkpoint.expected_shapes(params).items():
        start, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1) * (shape[2] if len(shape) > 2 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / "consolidated.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return directory


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_size(tmp_path_factory.mktemp("full") / "checkpoint")


def laid_out(directory: Path, config: Path, encode_once: bool = False) -> kv_cache.KvCache:
    read = options.read_options(Report(), config)
    assert read is not None
    held = checkpoint.read(directory)
    return kv_cache.KvCache.of(held.params, plan.Plan.of(read.values, held), encode_once)


def test_kv_cache_of_pico_is_what_a_server_logs(tmp_path: Path) -> None:
    """vLLM 0.32.0 on a CPU logged "Maximum concurrency for 512 tokens per request": 56.83x and 68.25x."""
    one = laid_out(PICO, write(tmp_path / "a.yaml", max_model_len=512, max_num_seqs=1))
    assert f"{GIB // one.block_bytes / one.blocks:.2f}" == "56.83"
    four = laid_out(PICO, write(tmp_path / "b.yaml", max_model_len=512, max_num_seqs=4, block_size=64))
    assert f"{GIB // four.block_bytes / four.blocks:.2f}" == "68.25"


def test_kv_cache_of_the_full_size(full: Path, tmp_path: Path) -> None:
    """By hand, with a GPU's blocks of 16 tokens, K and V of 2 bytes.

    An encoder layer's page: 16 tokens x 4 frames x 32 heads x 64. A language model layer's is made as large: 128
    tokens. Both kinds are padded to 32 layers. 512 tokens take 32 + 1 and 4 + 1 blocks, one each for a window that
    starts within a block.
    """
    config = write(tmp_path / "a.yaml", max_model_len=512, max_num_seqs=1, block_size=16)
    page = 2 * 2 * 16 * 4 * 32 * 64
    assert page == 2 * 2 * 128 * 8 * 128
    stock = laid_out(full, config)
    assert (stock.block_bytes, stock.blocks) == (32 * page, 33 + 5)
    # The encoder run once: 26 layers with pages of 16 tokens
    once = laid_out(full, config, encode_once=True)
    assert once == kv_cache.KvCache(26 * 2 * 2 * 16 * 8 * 128, 33, ((16, 8192),))


def test_blocks_of_a_live_session() -> None:
    """A step may be a token past its request's end, and drafts further; a window of 8,192 may begin within a block."""
    assert session_blocks([(16, 8192)], 160, 9216, 0) == 11
    assert session_blocks([(16, 8192)], 160, 9216, 15) == 12
    assert session_blocks([(16, 0)], 9216, 9216, 15) == 576
    assert session_blocks([(16, 8192)], 9216, 9216, 15) == 518
    assert session_blocks([(16, 0), (128, 0)], 160, 9216, 0) == 11 + 2


@pytest.mark.skipif(shims.installed("vllm") == "0.20.0", reason="on a CPU it refuses an FP8 KV cache")
def test_an_eight_bit_kv_cache_is_half_as_large(full: Path, tmp_path: Path) -> None:
    sixteen = laid_out(full, write(tmp_path / "a.yaml", max_model_len=512))
    eight = laid_out(full, write(tmp_path / "b.yaml", max_model_len=512, kv_cache_dtype="fp8"))
    assert 2 * eight.bytes_of(1) == sixteen.bytes_of(1)


GPU_BLOCKS = ("--block-size", "16")  # the default of a GPU


newest = pytest.mark.skipif(shims.installed("vllm") == "0.20.0", reason="it drafts nothing")


def on_gpu(monkeypatch: pytest.MonkeyPatch, total: float, free: float) -> None:
    monkeypatch.setattr(memory, "on_cpu", lambda: False)
    monkeypatch.setattr(memory, "first_device", lambda _: Device("NVIDIA L4", int(total * GIB), int(free * GIB)))


def test_the_contest_s_gpu_holds_the_full_size(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, 22.5, 22.2)
    report = check_all(CONFIG, full, GPU_BLOCKS)
    assert report.problems == []
    assert row(report, "weights") == "8.25 GiB (16 bits per parameter)"
    assert row(report, "KV cache") == "624.00 MiB for one sequence of 512 tokens"
    assert row(report, "encoder cache") == "5.00 MiB for 512 audio tokens"
    assert row(report, "device") == "NVIDIA L4: 22.50 GiB in total, 22.20 GiB free"
    assert row(report, "share") == "14.62 GiB: gpu_memory_utilization 0.65 of 22.50 GiB"
    assert row(report, "room for") == "at most 10.71 sequences of 512 tokens at a time"


def test_a_gpu_that_is_too_small(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, 12, 12)
    problem = only_problem(check_all(CONFIG, full, GPU_BLOCKS))
    assert "max_model_len 512 needs 624.00 MiB of KV cache in addition to weights of 8.25 GiB" in problem
    assert "gpu_memory_utilization 0.65 of 12.00 GiB leaves nothing" in problem
    fitting = problem.partition("Profiles that fit: ")[2].split(", ")
    assert "profiles/long.yaml" in fitting
    assert "profiles/realtime.yaml" not in fitting  # 150 live sessions
    assert not {"profiles/voxtral-3b.yaml", "profiles/whisper.yaml"} & set(fitting)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's CUDA build sees a machine without a driver."""
    monkeypatch.setattr(platforms, "_current_platform", platforms.interface.UnspecifiedPlatform())
    problem = only_problem(check_all(CONFIG, PICO))
    assert problem.startswith("no GPU: vLLM ")
    assert "docker run --gpus all" in problem


def test_a_gpu_that_no_profile_fits(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, 6, 6)
    assert only_problem(check_all(CONFIG, full)).endswith("Profiles that fit: none")


def write_drafter(directory: Path, tokens: int) -> None:
    shape = {"dim": 3072, "width": 512, "blocks": 6, "kernel": 7}
    known, rates = torch.arange(tokens), [0.9**place for place in range(1, 16)]
    network, tokenizer = HeadNetwork(**shape, tokens=tokens), tokenizer_hash(directory / "tekken.json")
    head = Head(network, known, 131072, 6, tokenizer, 39, rates, 1.0, torch.zeros(74, 3072), shape)
    head.write(directory / FILE)


@pytest.fixture
def drafter(full: Path) -> Iterator[int]:
    """A drafter of 30,000 tokens beside the checkpoint of full size. Yields the parameters of its network."""
    write_drafter(full, 30_000)
    yield sum(value.numel() for name, value in Head.read(full / FILE).network.state_dict().items())
    shutil.rmtree(full / FILE.parent)


@newest
def test_the_drafter_is_counted(full: Path, drafter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its network and the embeddings of its tokens, of 2 bytes each, and int32 guesses for each request."""
    on_gpu(monkeypatch, 22.5, 22.2)
    report = check_all(ROOT / "profiles/fast.yaml", full, GPU_BLOCKS)
    assert report.problems == []
    size = 2 * (drafter + 30_000 * 3072) + 4 * 65 * (1024 + 1 + 15)
    assert row(report, "drafts") == f"up to 15 a step, by the drafter of this checkpoint: {size / MIB:.2f} MiB"
    assert row(report, "not counted").endswith("vLLM measures them when it starts, about 3.20 GiB on an H200")


@newest
def test_a_checkpoint_without_a_drafter_has_pads(full: Path) -> None:
    told = row(check_all(ROOT / "profiles/throughput.yaml", full), "drafts")
    assert told == "up to 15 a step, pads: this checkpoint has no drafter (`voxtral-serve draft train`)"
    assert row(check_all(LONG, full), "drafts") == "none"


def documented(gpu: str) -> tuple[float, list[str]]:
    """The command of `check` that a bullet of gpus.md has for a GPU: its --gpu, and its options of vLLM."""
    page = (ROOT / "docs/pages/gpus.md").read_text(encoding="utf-8")
    command = page.partition(f"**{gpu}")[2].partition("```\n")[2].partition("```")[0].replace("\\\n", "")
    name, check, flag, gib, config, file, _, *words = shlex.split(command)
    assert [name, check, flag, config, file] == [*("voxtral-serve", "check", "--gpu", "--config", "profiles/fast.yaml")]
    return float(gib), words


@newest
@pytest.mark.usefixtures("drafter")
@pytest.mark.parametrize(("gpu", "others"), [("24 GB", "3.20"), ("16 GB", "2.83")])
def test_the_default_profile_fits_a_small_gpu_with_drafts(gpu: str, others: str, full: Path) -> None:
    """As the page says: 24 GB as it is, 16 GB with fewer requests and live sessions, and not without these options."""
    gib, words = documented(gpu)
    report = check_all(ROOT / "profiles/fast.yaml", full, [*GPU_BLOCKS, *words], device=other_gpu(gib))
    assert report.problems == []
    assert row(report, "drafts").startswith("up to 15 a step, by the drafter of this checkpoint: ")
    assert (
        row(report, "others") == f"{others} GiB for activations, CUDA graphs and PyTorch's own buffers, as on an H200"
    )
    assert row(report, "device") == f"a GPU with {gib:g} GiB: {gib:.2f} GiB in total, as --gpu says"
    assert row(report, "room for").startswith("about ")
    if words:
        problem = only_problem(check_all(ROOT / "profiles/fast.yaml", full, GPU_BLOCKS, device=other_gpu(gib)))
        assert f"gpu_memory_utilization 0.9 of {gib:.2f} GiB leaves" in problem


@newest
def test_memory_that_is_not_counted_is_as_measured(full: Path, tmp_path: Path) -> None:
    """The peak of each server of the report is what the check computes, to 0.6 GB."""
    report = json.loads((ROOT / "bench/results/report-h200.json").read_text())
    peaks = {row["server"]: row["peak_vram_bytes"] for row in report["rows"] if row.get("peak_vram_bytes")}
    for name, peak in peaks.items():
        described = report["configs"][name]
        if described.get("checkpoint", "random weights") != "random weights":
            continue
        config = described["config"] | {"model": str(full)}
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        read = options.read_options(Report(), tmp_path / "config.yaml", GPU_BLOCKS)
        assert read is not None
        held = checkpoint.read(full)
        planned = plan.Plan.of(read.values, held)
        kv = kv_cache.KvCache.of(held.params, planned, read.encode_once)
        needs = memory.MemoryNeeds.of(read, held, planned, kv)
        computed = needs.beside_kv + needs.others + config["kv_cache_memory_bytes"]
        # At this commit, a live session had 2,048 audio rows.
        if planned.sessions and report["machine"]["git_commit"] == "30e2c62":
            computed += (planned.sessions + 1) * (2048 - planned.session_rows) * 6 * 1024
        assert computed == pytest.approx(peak, abs=6e8), name


@pytest.mark.parametrize("gpu", ["0", "nan", "2000"])
def test_a_gpu_that_cannot_be(gpu: str) -> None:
    done = command("check", "--gpu", gpu, "--config", str(CONFIG), str(PICO))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--gpu {gpu}: expected 1 to 1024 GiB" in done.stderr


def test_a_gpu_that_others_use(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, 22.5, 11.25)
    assert "gpu_memory_utilization 0.65 reserves 14.62 GiB of NVIDIA L4, but only 11.25 GiB is free" in only_problem(
        check_all(CONFIG, full)
    )


def test_encode_once(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "runs_on_cpu", lambda: False)
    overrides = {"architectures": [ENCODE_ONCE]}
    report = run(tmp_path, model=str(full), max_model_len=512, max_num_seqs=1, hf_overrides=overrides)
    assert report.problems == []
    assert row(report, "encoder cache") == "3.00 MiB for 512 audio tokens"


def test_the_rows_of_audio_are_counted(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(4 clips x 45,088 positions + 512, max_num_batched_tokens) x 3072 numbers x 2 bytes: 1060 MiB."""
    on_gpu(monkeypatch, 22.5, 22.2)
    report = check_all(LONG, full, GPU_BLOCKS)
    assert report.problems == []
    assert row(report, "audio rows") == "1.03 GiB for max_num_seqs = 4 clips, in addition to the KV cache"
    on_gpu(monkeypatch, 12, 12)
    assert row(check_all(LONG, full, GPU_BLOCKS), "room for").startswith("at most 1.")
    on_gpu(monkeypatch, 11.25, 11.25)  # without the rows, one clip would fit
    assert "max_model_len 45,088 needs 887.25 MiB of KV cache" in only_problem(check_all(LONG, full, GPU_BLOCKS))


@pytest.mark.parametrize("profile", ["fast", "long", "realtime"])
def test_a_profile_is_served_and_its_limit_told(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = check_all(ROOT / f"profiles/{profile}.yaml", PICO)
    assert report.problems == []
    assert row(report, "length").startswith("78.00 s" if profile in ("fast", "realtime") else "3601.20 s")
    assert any("  audio rows  " in line for line in report.lines)
    sessions = {"fast": "16 at a time", "realtime": "256 at a time"}.get(profile, "none: ")
    assert row(report, "sessions").startswith(sessions)


def test_what_uploads_are_limited_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def limits() -> list[str]:
        return [line.split("  ")[-1] for line in check_all(LONG, PICO).lines if line.startswith("  upload limit")]

    assert len(UPLOAD_LIMITS) == 3
    for name, value in UPLOAD_LIMITS.items():
        monkeypatch.setenv(name, value)
    assert limits() == []
    monkeypatch.delenv("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB")
    (limit,) = limits()
    assert limit.startswith("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB=25 allows 819 s of 16-bit WAV. Set it to 110 or more")
    for name in UPLOAD_LIMITS:
        monkeypatch.delenv(name, raising=False)
    known = 1 if shims.installed("vllm") == "0.20.0" else 2
    assert [limit.partition("=")[0] for limit in limits()] == list(UPLOAD_LIMITS)[:known]
    assert not any("upload limit" in line for line in check_all(ROOT / "profiles/fast.yaml", PICO).lines)


def test_another_override_is_not_guessed_at(tmp_path: Path) -> None:
    report = run(tmp_path, hf_overrides={"architectures": ["Other"]})
    assert row(report, "not computed").startswith("hf_overrides may select another model")


def test_vllm_s_own_model_where_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "runs_on_cpu", lambda: False)
    assert "cannot run its own Voxtral Realtime model on a CPU" in only_problem(check_all(CONFIG, PICO))


def test_several_gpus_are_not_guessed_at(tmp_path: Path) -> None:
    assert "several" in row(run(tmp_path, tensor_parallel_size=2), "not computed")


def test_ram_s_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    monkeypatch.setattr(memory, "first_device", lambda _: Device("memory node 0 (CPU)", 8 * GIB, 4 * GIB))
    report = check_all(CONFIG, PICO)
    assert row(report, "share") == "5.20 GiB: gpu_memory_utilization 0.65 of 8.00 GiB"
    assert "5.20 GiB of memory node 0 (CPU), but only 4.00 GiB is free" in only_problem(report)


def test_a_kv_cache_space_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1.5")
    assert (
        only_problem(check_all(CONFIG, PICO))
        == "config: VLLM_CPU_KVCACHE_SPACE is '1.5', expected a whole number of GiB"
    )


def test_more_kv_cache_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1000000")
    assert "more than the" in only_problem(check_all(CONFIG, PICO))


def test_less_kv_cache_than_one_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    problem = only_problem(run(tmp_path, max_model_len=512, max_num_seqs=1, kv_cache_memory_bytes=2 * MIB))
    assert "needs 19.50 MiB of KV cache in addition to weights of 18.34 MiB, but " in problem
    assert "kv_cache_memory_bytes 2097152 leaves 2.00 MiB" in problem


class Platform:
    """Of vllm.platforms.Platform what is asked where it is no CPU."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.device_name = cuda, "cuda" if cuda else "unspecified"

    def is_cpu(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return self.cuda

    def device_id_to_physical_device_id(self, number: int) -> int:
        return number + 3


def test_nvml_is_asked_for_the_gpu_that_vllm_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        total, free = 24 * GIB, 20 * GIB

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
        "nvmlDeviceGetMemoryInfo": lambda handle: Memory,
        "nvmlDeviceGetName": lambda handle: handle,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    assert device.first_device(Platform(cuda=True)) == Device("handle 3", 24 * GIB, 20 * GIB)


def test_a_gpu_that_nvml_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    with pytest.raises(device.ConfigError, match="NVML cannot read the memory of the first GPU"):
        device.first_device(Platform(cuda=True))


def test_no_gpu_for_a_build_that_needs_one() -> None:
    with pytest.raises(device.ConfigError, match="not a CPU build and finds no NVIDIA GPU"):
        device.first_device(Platform(cuda=False))


# The longest clip; tests/server/test_check_limits.py holds it against a server


@pytest.mark.parametrize(
    ("length", "clip"),
    [
        (512, "37.04 s: 463 tokens of audio and 49 of padding"),
        ("1k", "76.08 s: 951 tokens of audio and 49 of padding"),
        ("1K", "78.00 s: 975 tokens of audio and 49 of padding"),
        (50, "0.08 s: 1 tokens of audio and 49 of padding"),
    ],
)
def test_longest_clip(tmp_path: Path, length: object, clip: str) -> None:
    report = run(tmp_path, max_model_len=length, max_num_seqs=1)
    assert row(report, "length") == clip
    assert row(report, "longer clips") == "refused with HTTP status 400"


def test_a_context_that_padding_fills(tmp_path: Path) -> None:
    assert only_problem(run(tmp_path, max_model_len=49)) == (
        "max_model_len is 49, but the padding of a clip alone takes 49 tokens: raise max_model_len"
    )
    delayed = {"hf_overrides": {"architectures": [ENCODE_ONCE]}, "additional_config": {"upload_delay_ms": 2400}}
    report = run(tmp_path, max_model_len=86, max_num_seqs=1, **delayed)  # 1.04 s, as the guard wants it
    assert row(report, "length") == "1.04 s: 13 tokens of audio and 73 of padding"
    assert only_problem(run(tmp_path, max_model_len=85, max_num_seqs=1, **delayed)) == (
        "max_model_len is 85, but the padding of a clip alone takes 73 tokens, with upload_delay_ms 2400: raise "
        "max_model_len"
    )


def test_the_delay_is_the_tokenizer_s() -> None:
    tekken = json.loads((PICO / "tekken.json").read_text())["audio"]
    length = clip_length(tekken)
    assert (length.longest(512), length.padding, length.rate_hz) == (463 * 1280, 49, 16000)
    later = clip_length(tekken | {"transcription_delay_ms": 960})
    assert (later.longest(512), later.padding, later.rate_hz) == (457 * 1280, 55, 16000)


@pytest.mark.parametrize("change", [{"frame_rate": -1}, {"unheard_of": 1}, {"transcription_delay_ms": 481}])
def test_a_tokenizer_that_mistral_common_refuses(change: dict[str, Any]) -> None:
    tekken = json.loads((PICO / "tekken.json").read_text())["audio"]
    with pytest.raises(CheckpointError, match=r"audio section of tekken\.json"):
        clip_length(tekken | change)


# Live sessions


LIVE = {"hf_overrides": {"architectures": [ENCODE_ONCE]}, "max_model_len": 512}


def live(tmp_path: Path, **options: Any) -> Report:
    return check_all(write(tmp_path / "config.yaml", **options), PICO)


def test_live_sessions_are_told(tmp_path: Path) -> None:
    report = live(tmp_path, **LIVE)
    assert (
        row(report, "sessions")
        == "none: `additional_config: {max_live_sessions: N}` serves N at a time on /v1/realtime"
    )
    report = live(tmp_path, **LIVE, additional_config={"max_live_sessions": 8})
    assert report.problems == []
    assert row(report, "sessions") == "8 at a time (max_live_sessions); others are refused"
    assert row(report, "one request") == "37 s of audio: at a pause after 80%, the next one takes over"
    report = live(tmp_path, **LIVE, additional_config={"max_live_sessions": 8, "max_live_age_s": 20})
    assert report.problems == []
    assert row(report, "one request") == "20 s of audio: at a pause after 80%, the next one takes over"


@pytest.mark.parametrize(
    ("age_s", "problem"),
    [
        (5, "max_live_age_s is 5, which is 113 positions, and live sessions need at least "),
        (38, "additional_config: max_live_age_s is 38, and max_model_len 512 has room for 36 s: lower max_live_age_s"),
    ],
)
def test_an_age_that_no_request_has(tmp_path: Path, age_s: int, problem: str) -> None:
    report = live(tmp_path, **LIVE, additional_config={"max_live_sessions": 8, "max_live_age_s": age_s})
    assert [problem in each for each in report.problems] == [True]


@pytest.mark.parametrize(
    ("gib", "profile", "change", "admitted", "most"),
    [
        (139.8, "realtime", None, "256 live sessions of max_live_sessions 256 (max_live_age_s 180)", (354, 109)),
        (79.2, "realtime", (150, 120), "150 live sessions of max_live_sessions 150 (max_live_age_s 120)", (179, 55)),
        (22.5, "fast", (16, 180), "16 live sessions of max_live_sessions 16 (max_live_age_s 180)", (26, 8)),
        (
            22.5,
            "fast",
            None,
            "6 live sessions of max_live_sessions 16 (max_live_age_s is not set: those of max_model_len)",
            (26, 8),
        ),
    ],
)
def test_live_sessions_that_a_gpu_holds(
    full: Path, gib: float, profile: str, change: tuple[int, int] | None, admitted: str, most: tuple[int, int]
) -> None:
    """What the comments of the profiles and gpus.md say."""
    sessions, age_s = change or (0, 0)
    options = {"max_live_sessions": sessions, "max_live_age_s": age_s, "max_clip_positions": 1024}
    words = ["--additional-config", json.dumps(options)] if change else []
    report = check_all(ROOT / f"profiles/{profile}.yaml", full, [*GPU_BLOCKS, *words], device=other_gpu(gib))
    assert row(report, "admitted") == admitted
    of_90_s, of_11_minutes = most
    assert any(
        line.endswith(f"with another max_live_sessions at most {of_90_s} of 90 s, or {of_11_minutes} of 11 minutes")
        for line in report.lines
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({**LIVE, "max_model_len": 128}, "max_model_len is 128, and live sessions need at least "),
        ({**LIVE, "max_num_seqs": 7}, "max_num_seqs is 7 with max_live_sessions 8: expected 8 or more"),
        ({"max_model_len": 512}, "max_live_sessions is 8, and only VoxtralRealtimeEncodeOnce reads it"),
    ],
)
def test_live_sessions_that_cannot_be(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    report = live(tmp_path, **options, additional_config={"max_live_sessions": 8})
    assert [each for each in report.problems if problem in each] == report.problems != []


@pytest.mark.parametrize("value", [-1, "many", True])
def test_a_wrong_number_of_live_sessions(tmp_path: Path, value: Any) -> None:
    report = live(tmp_path, **LIVE, additional_config={"max_live_sessions": value})
    assert [f"max_live_sessions is {value!r}: expected a whole number" in each for each in report.problems] == [True]


def test_memory_of_live_sessions(tmp_path: Path) -> None:
    """As the engine allocates it: rings of keys and values, and audio rows of clips that are shorter than a session."""
    report = live(
        tmp_path, **LIVE, max_num_seqs=16, additional_config={"max_live_sessions": 8, "max_clip_positions": 128}
    )
    ring = 784  # frames: 749 before, and those of 8 rows, in whole rows
    keys_and_values = 2 * (8 + 1) * 5 * 4 * 64 * ring * 2
    assert row(report, "live sessions") == f"{keys_and_values / MIB:.2f} MiB for the encoder's keys and values of 8"
    assert "6.32 s" in "\n".join(report.lines)
