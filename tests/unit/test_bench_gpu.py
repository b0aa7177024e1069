"""bench.gpu: tokens of a clip, configs, figures, merging and ratios; a whole run against a fake vLLM; gpu.json."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import DATA, PICO, ROOT
from mistral_common.protocol.transcription.request import StreamingMode, TranscriptionRequest
from mistral_common.tokens.tokenizers.audio import Audio
from mistral_common.tokens.tokenizers.base import SpecialTokens
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from safetensors import safe_open

from bench import BenchError, dataset
from bench.answers import Row
from bench.gpu import checkpoint, measure, readings, rows
from bench.gpu.__main__ import main
from bench.gpu.run import RANDOM
from bench.gpu.servers import Server
from bench.gpu.tasks import decode, tasks_of
from mistral_layout import tensors
from mistral_layout.audio import PROMPT_TOKENS
from mistral_layout.tekken import CONTROL_TOKENS

pytestmark = pytest.mark.flaky(reruns=2)  # it compares times, and a core may be busy: tests/README.md

RESULT = ROOT / "bench/results/gpu.json"
KEYS = {
    *("name", "vllm", "concurrency", "clips", "failed", "p50_ms", "p90_ms", "p95_ms", "ms_per_token", "rtfx", "tokens"),
    *("joules_per_audio_second", "peak_vram_bytes", "start_s", "audio_s", "wall_s", "acceptance", "config_sha256"),
}


# ---- Tokens and the checkpoint


@pytest.mark.parametrize("samples", [1, 159, 1279, 1280, 1281, 16000, 36176, 190688, 465408])
def test_tokens_are_those_of_mistral_common(samples: int) -> None:
    """vLLM takes `num_audio_tokens` of the padded audio for the clip's positions (`_maybe_apply_prompt_updates`)."""
    mistral = MistralTokenizer.from_file(PICO / "tekken.json").instruct_tokenizer
    audio = Audio(np.zeros(samples, dtype=np.float32), 16000, "wav").to_base64("wav")
    request = TranscriptionRequest(audio=audio, streaming=StreamingMode.OFFLINE, language=None)
    encoded = mistral.encode_transcription(request)
    positions = mistral.audio_encoder.audio_config.num_audio_tokens(len(encoded.audios[0].audio_array))
    assert len(encoded.tokens) == PROMPT_TOKENS
    assert rows.tokens(samples) == positions - len(encoded.tokens) + 1


def test_the_checkpoint_is_of_full_size() -> None:
    pico = json.loads((PICO / "params.json").read_text())

    def shape(value: Any) -> Any:
        return {key: shape(each) for key, each in value.items()} if isinstance(value, dict) else type(value)

    assert shape(checkpoint.PARAMS) == shape(pico)
    sizes = [math.prod(each) for each in tensors.shapes(checkpoint.PARAMS).values()]
    assert sum(sizes) == pytest.approx(4.43e9, rel=0.01)


def test_its_tensors_are_named_and_shaped_as_picos() -> None:
    with safe_open(PICO / "consolidated.safetensors", "np") as held:
        found = {name: tuple(held.get_slice(name).get_shape()) for name in held.keys()}  # noqa: SIM118
    assert tensors.shapes(json.loads((PICO / "params.json").read_text())) == found


@pytest.mark.slow
def test_the_checkpoint_of_one_layer_each(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, layers=1)
    params = json.loads((tmp_path / "params.json").read_text())
    with safe_open(tmp_path / "consolidated.safetensors", "pt") as held:
        assert set(held.keys()) == set(tensors.shapes(params))
        weight = held.get_tensor("layers.0.attention.wk.weight")
    assert (str(weight.dtype), tuple(weight.shape)) == ("torch.bfloat16", (1024, 3072))
    assert weight.float().std() == pytest.approx(0.02, rel=0.05)
    tekken = MistralTokenizer.from_file(tmp_path / "tekken.json").instruct_tokenizer.tokenizer
    assert tekken.n_words == params["vocab_size"] == 131072
    assert {token.value for token in SpecialTokens} <= set(CONTROL_TOKENS)
    assert tekken.decode(tekken.encode("Hello there, Sam.", bos=False, eos=False)) == "Hello there, Sam."


# ---- Configurations


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """A repository's configs: the contest's own, and stand-ins for the profiles."""
    (tmp_path / rows.CONTEST).write_text((ROOT / rows.CONTEST).read_text())
    (tmp_path / "profiles").mkdir()
    fast = {
        "model": "elsewhere",
        "hf_overrides": {"architectures": ["VoxtralRealtimeEncodeOnce"]},
        "max_model_len": 4096,
        "max_num_seqs": 64,
    }
    drafting = fast | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    for name, content in (("fast", fast), ("fast-fp8", fast), ("long", fast), ("fast-spec", drafting)):
        (tmp_path / "profiles" / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


def test_the_contest_config_differs_by_what_measuring_needs() -> None:
    own = yaml.safe_load((ROOT / rows.CONTEST).read_text())
    config = rows.config("stock-eager")
    assert config.keys() == own.keys() | {"kv_cache_memory_bytes"}
    assert {key for key in own if config[key] != own[key]} == {"gpu_memory_utilization"}
    assert config["kv_cache_memory_bytes"] == 2 * 2**30
    assert rows.config("stock-eager", kv_gib=0.5)["kv_cache_memory_bytes"] == 2**29


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stock-piecewise", {"enforce_eager": False, "max_num_seqs": 64}),
        ("stock-full", {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}, "enforce_eager": False}),
        ("stock-eager:attention_backend=TRITON_ATTN", {"attention_backend": "TRITON_ATTN", "enforce_eager": True}),
        ("stock-eager:enforce_eager=null:max_num_seqs=256", {"enforce_eager": None, "max_num_seqs": 256}),
        ("stock-eager:gpu_memory_utilization=0.4", {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": None}),
        ("fast", {"model": ".", "served_model_name": "voxtral", "max_num_seqs": 64, "speculative_config": None}),
        ("fast-spec", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}),
        ("fast-vram", {"max_model_len": 512, "max_num_seqs": 1, "kv_cache_memory_bytes": 2**26}),
        ("long", {"max_model_len": 4096}),
    ],
)
def test_what_a_name_asks_for(name: str, expected: dict[str, Any], profiles: Path) -> None:
    config = rows.config(name, profiles)
    assert {key: config.get(key) for key in expected} == expected
    assert ("attention_backend" in config) == ("attention_backend" in name)  # else vLLM's choice


def test_speculation_at_a_given_acceptance(profiles: Path) -> None:
    config = rows.config("fast-spec", profiles, acceptance=[0.75, 0.5])
    assert config["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.75, 0.5],
    }
    assert rows.acceptance_of(config) == [0.75, 0.5]
    assert rows.acceptance_of(rows.config("fast-spec", profiles)) is None
    assert rows.acceptance_of(rows.config("fast", profiles)) is None
    (profiles / "profiles/fast-spec.yaml").unlink()
    with pytest.raises(BenchError, match=r"cannot read profiles/fast-spec.yaml .* row 'fast-spec'"):
        rows.config("fast-spec", profiles)


@pytest.mark.parametrize("name", ["stock", "fastest", "long", "long-", "long-1m", "fastest:dtype=half"])
def test_an_unknown_row_is_refused_with_the_known_ones(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--out", "never.json", "--rows", f"stock-eager,{name}"]) == 2
    error = capsys.readouterr().err
    assert f"{name.partition(':')[0]!r} is not a known row: expected one of stock-eager, stock-piecewise" in error
    assert "long-MINUTES" in error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fast:max_num_seqs", "'max_num_seqs' in 'fast:max_num_seqs': expected KEY=VALUE, such as max_num_seqs=256"),
        ("fast:=2", "'=2' in 'fast:=2': expected KEY=VALUE"),
        ("fast:a=[", "'[' in 'fast:a=[' is not valid YAML"),
        (
            "stock-eager:gpu_memory_utilization=0.4",
            "takes a share of the GPU, so no other server may be up: add --alone",
        ),
    ],
)
def test_a_wrong_change_is_refused(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--out", "never.json", "--rows", name]) == 2
    assert message in capsys.readouterr().err


def test_a_profile_that_is_missing(profiles: Path) -> None:
    (profiles / "profiles/fast-fp8.yaml").unlink()
    with pytest.raises(BenchError, match=r"cannot read profiles/fast-fp8.yaml .*, the config of the row 'fast-fp8'"):
        rows.config("fast-fp8", profiles)


# ---- The plan


def test_the_plan_takes_turns_and_repeats_no_clip(profiles: Path) -> None:
    names = ["stock-eager", "stock-piecewise", "long-10", "fast", "long-1"]
    configs = {name: rows.config(name, profiles) for name in ("stock-eager", "stock-piecewise", "fast", "long")}
    tasks = tasks_of(names, {1: 12, 16: 48, 64: 128}, configs)
    assert [(task.row, task.concurrency) for task in tasks] == [
        *(("stock-eager", 1), ("stock-piecewise", 1), ("fast", 1)),
        *(("stock-piecewise", 16), ("fast", 16), ("stock-piecewise", 64), ("fast", 64)),
        *(("long-10", 1), ("long-1", 1)),
    ]
    by_concurrency = {task.concurrency: task for task in tasks[:7]}
    for task in tasks[:7]:  # the same for all
        assert task.clips == by_concurrency[task.concurrency].clips
    sent = [clip.id for task in by_concurrency.values() for clip in (*task.warm_up, *task.clips)]
    assert len(sent) == len(set(sent)) == 3 + 12 + 16 + 48 + 64 + 128
    mean = np.mean([clip.duration_s for clip in by_concurrency[64].clips])
    assert mean == pytest.approx(np.mean([clip.duration_s for clip in dataset.load(DATA)[0]]), rel=0.1)
    assert [clip.duration_s for clip in tasks[-2].clips] == [600]
    assert {task.server for task in tasks[-2:]} == {"long"}
    with pytest.raises(BenchError, match="617 clips including the warm-ups, but the dataset has 500"):
        tasks_of(names, {1: 100, 64: 450}, configs)


def test_rows_of_one_length_share_the_server_and_are_not_compared(tmp_path: Path) -> None:
    configs = {"fast": rows.config("fast")}
    assert (rows.server_of("fast-10s"), rows.length_of("fast-10s")) == (("fast", None), 10)
    assert rows.server_of("fast-10s:max_num_seqs=8") == ("fast:max_num_seqs=8", None)
    assert rows.length_of("fast") is rows.length_of("long-10") is rows.length_of("fast:model=x-10s") is None
    usual, made = tasks_of(["fast", "fast-10s"], {2: 5}, configs)
    assert (made.server, made.warm_up) == ("fast", usual.warm_up)
    assert [clip.duration_s for clip in made.clips] == [10.0] * 5
    assert len({clip.id for clip in made.clips}) == 5
    with pytest.raises(BenchError, match="'stock-eager-10s' sends the same clips again"):
        tasks_of(["stock-eager-10s"], {1: 5}, {"stock-eager": rows.config("stock-eager")})
    (tmp_path / "clips").mkdir()
    written = [decode(clip, tmp_path / "clips", usual.warm_up) for clip in made.clips[:2]]
    assert {clip.duration_s for clip in written} == {10.0}
    assert written[0].path.read_bytes() != written[1].path.read_bytes()
    made_row = {"vllm": "0.32.0", "concurrency": 2, "failed": 0, "acceptance": None} | dict.fromkeys(rows.COMPARED, 1.0)
    assert not rows.ratios([made_row | {"name": name} for name in ("stock-eager", "fast-10s")])
    assert rows.ratios([made_row | {"name": name} for name in ("stock-eager", "fast")])


# ---- Figures


def answer(number: int, latency_ms: float | None = 100.0, start: float = 0.0, duration_s: float = 10.0) -> Row:
    error = None if latency_ms is not None else "HTTP 500: made to fail"
    end = start + (latency_ms or 700) / 1000
    return Row(f"c{number}", duration_s, 1, start, end, latency_ms, 200 if latency_ms else 500, "", "a", error)


def figures(latencies: list[float | None], **changes: Any) -> dict[str, Any]:
    answers = [answer(number, latency, start=number * 1.0) for number, latency in enumerate(latencies)]
    settings: dict[str, Any] = {"counted": 100.0 * len(latencies), "joules": 500.0} | changes
    return rows.figures(answers, {row.id: 100 for row in answers}, **settings)


def test_figures_of_fixed_readings() -> None:
    row = figures([100.0, 200.0, 300.0, 400.0, 500.0])
    assert (row["p50_ms"], row["p90_ms"], row["p95_ms"]) == pytest.approx((300, 460, 480))
    assert row["ms_per_token"] == pytest.approx(1500 / 500)
    assert row["rtfx"] == pytest.approx(50 / 4.5)
    assert row["joules_per_audio_second"] == pytest.approx(10)
    assert (row["clips"], row["failed"], row["errors"], row["audio_s"]) == (5, 0, [], 50)
    assert (row["tokens"], row["tokens_by"], row["tokens_expected"]) == (500, "server", 500)


def test_the_servers_count_of_tokens_counts() -> None:
    row = figures([100.0, 100.0], counted=160.0)
    assert (row["tokens"], row["tokens_expected"], row["ms_per_token"]) == (160, 200, pytest.approx(200 / 160))
    assert figures([100.0, 100.0], counted=None)["tokens_by"] == "clip length"


def test_what_was_not_measured_is_null() -> None:
    assert figures([100.0], joules=None)["joules_per_audio_second"] is None
    row = figures([None, None])
    assert (row["failed"], row["clips"], row["tokens"]) == (2, 2, 0)
    assert {row[name] for name in (*rows.COMPARED, "ms_per_token")} == {None}
    assert row["errors"] == ["HTTP 500: made to fail"]


def test_a_failed_request_stays_and_hides_nothing() -> None:
    row = figures([100.0, None, 300.0])
    assert (row["clips"], row["failed"], row["p50_ms"]) == (3, 1, 200)
    assert row["audio_s"] == 20
    assert row["wall_s"] == pytest.approx(2.3)  # from the first start to the last end, the failure within
    assert row["joules_per_audio_second"] == pytest.approx(25)
    assert (row["tokens"], row["tokens_by"], row["tokens_expected"]) == (200, "clip length", 300)


# ---- Ratios and merging


def measured(name: str, p50: float = 100.0, vllm: str = "0.20.0", concurrency: int = 1, **changes: Any) -> Any:
    figures = {"p50_ms": p50, "p90_ms": 2 * p50, "p95_ms": 3 * p50, "rtfx": 1e4 / p50, "joules_per_audio_second": 5.0}
    rest = {"failed": 0, "acceptance": None, "config_sha256": f"sha {name}", "run": 0}
    return {"name": name, "vllm": vllm, "concurrency": concurrency, **figures, **rest, **changes}


def test_ratios_are_against_the_best_in_each_figure() -> None:
    found = rows.ratios(
        [
            measured("stock-eager", 1200, joules_per_audio_second=90.0),
            measured("stock-piecewise", 300, joules_per_audio_second=30.0),
            measured("stock-vanilla", 400, rtfx=100.0, joules_per_audio_second=None),
            measured("stock-full", 10, vllm="0.32.0"),
            measured("stock-full", 10, concurrency=16),
            measured("stock-full", 10, failed=1),
            measured("stock-vram", 10),
            measured("fast", 100),
            measured("fast-vram", 100),
            measured("fast-fp8", 100, failed=1),
            measured("long-1", 100),
        ]
    )
    assert [(ratio["name"], ratio["against"]) for ratio in found] == [("fast", "stock-eager"), ("fast", "best stock")]
    assert found[0] | {"best": None} == {
        **{"name": "fast", "vllm": "0.20.0", "concurrency": 1, "acceptance": None, "against": "stock-eager"},
        **{"p50_ms": 12, "p90_ms": 12, "p95_ms": 12, "rtfx": pytest.approx(12), "joules_per_audio_second": 18},
        "best": None,
    }
    assert (found[1]["p50_ms"], found[1]["rtfx"], found[1]["joules_per_audio_second"]) == (3, 1, 6)
    assert found[1]["best"] == {
        **dict.fromkeys(("p50_ms", "p90_ms", "p95_ms", "joules_per_audio_second"), "stock-piecewise"),
        "rtfx": "stock-vanilla",
    }


def test_a_ratio_of_nothing_is_null() -> None:
    found = rows.ratios([measured("stock-eager", joules_per_audio_second=None), measured("fast", 50)])
    assert [ratio["joules_per_audio_second"] for ratio in found] == [None, None]
    assert [ratio["p50_ms"] for ratio in found] == [2, 2]


def outcome(*rows_of: Any, **not_measured: str) -> dict[str, Any]:
    configs = {row["config_sha256"]: row["name"] for row in rows_of}
    vllm = rows_of[0]["vllm"] if rows_of else "0.20.0"
    return {"runs": [{"vllm": vllm, "not_measured": not_measured}], "configs": configs, "rows": list(rows_of)}


def test_merging_keeps_versions_apart_and_the_last_of_each_row() -> None:
    old = outcome(measured("stock-eager", 1000), measured("fast", 500))
    new = outcome(measured("fast", 100, config_sha256="sha new"))
    other = outcome(measured("fast", 50, vllm="0.32.0"))
    whole = rows.merge(old, other, new)
    assert [(row["vllm"], row["name"], row["p50_ms"], row["run"]) for row in whole["rows"]] == [
        *(("0.20.0", "stock-eager", 1000, 0), ("0.20.0", "fast", 100, 2), ("0.32.0", "fast", 50, 1)),
    ]
    assert whole["configs"].keys() == {"sha stock-eager", "sha fast", "sha new"}
    assert [ratio["p50_ms"] for ratio in whole["ratios"]] == [10, 10]
    assert rows.merge(whole) == whole
    again = rows.merge(whole, outcome(measured("fast", 40, vllm="0.32.0"), measured("stock-eager", 800)))
    assert [run["vllm"] for run in again["runs"]] == ["0.20.0", "0.32.0"]  # of the first, nothing is left
    assert [row["run"] for row in again["rows"]] == [1, 0, 1]


def test_a_server_that_never_came_up_is_remembered_until_it_does() -> None:
    failed = outcome(measured("fast"), **{"stock-full": "AssertionError"})
    assert rows.merge(failed, outcome(measured("fast")))["runs"][0]["not_measured"]
    assert len(rows.merge(failed, outcome(measured("fast"), measured("stock-full")))["runs"]) == 1


def test_merge_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = {"clips": 2, "ms_per_token": 1.0, "peak_vram_bytes": None, "start_s": 3.0}
    for name, part in (("a", measured("stock-eager", 1000, **start)), ("b", measured("fast", 100, **start))):
        (tmp_path / f"{name}.json").write_text(json.dumps(outcome(part)))
    out = tmp_path / "out.json"
    assert main(["merge", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", str(out)]) == 0
    assert [ratio["p50_ms"] for ratio in json.loads(out.read_text())["ratios"]] == [10, 10]
    assert "best stock" in capsys.readouterr().out


# ---- GPU readings


class FakeGpus:
    """`theirs` bytes of the server's processes and `whole` in use, in turn, the last for ever."""

    def __init__(self, theirs: int, *whole: int) -> None:
        self.handles = {0: None}
        self._theirs, self._whole = theirs, list(whole)

    def of_processes(self, pids: set[int]) -> int:
        return self._theirs

    def in_use(self, minors: Any) -> int:
        return self._whole.pop(0) if len(self._whole) > 1 else self._whole[0]


def memory(gpus: Any, held: int | None, peak: int = 0) -> tuple[dict[str, Any], Server]:
    server = Server("fast", {"served_model_name": "voxtral"}, "http://127.0.0.1:9", 0, "cold", held=held, peak=peak)
    watch = readings.MemoryWatch(gpus, set)
    watch.start()
    watch.stop()
    return measure.memory(server, watch, gpus), server


def test_memory_of_the_servers_processes() -> None:
    assert memory(FakeGpus(9, 50), held=None)[0] == {"peak_vram_bytes": 9, "peak_vram_source": "nvml_process_tree"}
    assert memory(FakeGpus(9, 50), held=8, peak=11)[0]["peak_vram_bytes"] == 11  # its start took more


def test_memory_by_growth_where_nvml_names_no_process() -> None:
    """100 in use before, of which 30 are this server's; then 120, then 110, of which it keeps 40."""
    row, server = memory(FakeGpus(0, 100, 120, 110), held=30)
    assert row == {"peak_vram_bytes": 50, "peak_vram_source": "nvml_growth"}
    assert server.held == 40


def test_memory_of_the_whole_gpu_is_named_so() -> None:
    assert memory(FakeGpus(0, 100), held=None)[0] == {"peak_vram_bytes": 100, "peak_vram_source": "nvml_device"}


def test_no_gpu_is_null() -> None:
    nothing = {"peak_vram_bytes": None, "peak_vram_source": None}
    assert memory(FakeGpus(0, 0), held=0)[0] == nothing


def test_power_without_a_counter_of_energy_is_null() -> None:
    gpus: Any = SimpleNamespace(handles={0: None}, joules=lambda minors: None)
    assert (readings.joules(gpus), readings.watts(gpus)) == (None, None)


# ---- A whole run


FAKE_VLLM = """\
import json, os, psutil, sys, threading, time, yaml
from pathlib import Path
sys.path.insert(0, {tests!r})
import fakeserver
from fakeserver import Answer, FakeServer

port = int(sys.argv[sys.argv.index("--port") + 1])
config = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
def serves(process):
    try:
        return process.cmdline()[1:2] == sys.argv[:1]
    except psutil.Error:  # it has ended
        return False

with open("starts.txt", "a") as file:
    print("others", sum(map(serves, psutil.process_iter())) - 1, file=file)
if config.get("max_num_seqs") == 64 and Path("piecewise fails").exists():
    sys.exit("AssertionError: made to fail")
served, tokens = [], [5]
get, begin = fakeserver._Handler.do_GET, FakeServer.begin

def do_get(self):
    if self.path == "/metrics":
        self._send(200, f'vllm:generation_tokens_total{{{{engine="0"}}}} {{tokens[0]}}.0\\n'.encode())
    else:
        self._send(200, b"") if self.path == "/health" else get(self)

def count(self, received):
    tokens[0] += int(received.fields["max_completion_tokens"])
    with open("requests.txt", "a") as file:
        print(port, received.name, received.size, received.fields["model"], file=file)
    steps = os.environ.get("VOXTRAL_SERVE_STEPS")
    if steps and not config.get("enforce_eager"):  # as voxtral-serve's worker does: tests/unit/test_steps.py
        step = dict(at=time.time(), execute_ms=4.0, sample_ms=1.0, gpu_ms=5.0, gpu_idle_ms=5.0)
        with open(steps, "a") as file:
            print(json.dumps(step | dict(requests=1, tokens=40, new=1, encode=1)), file=file)
    begin(self, received)

fakeserver._Handler.do_GET, FakeServer.begin = do_get, count
fails = Path("fails").read_text().split() if Path("fails").exists() else []
fake = FakeServer({{name: Answer(status=500) for name in fails}}, default=Answer("text", delay_s=0.02))
fake._lock = threading.Lock()
fakeserver._Server(("127.0.0.1", port), fake).serve_forever(0.02)
"""


class Case:
    """A fake vLLM and a checkpoint's directory, in which it leaves what it was sent."""

    def __init__(self, root: Path) -> None:
        self.model, self.out = root / "checkpoint", root / "gpu.json"
        self.model.mkdir()
        self.engine = root / "fake_vllm.py"
        self.engine.write_text(FAKE_VLLM.format(tests=str(ROOT / "tests/support")))

    def run(self, *more: str) -> int:
        paths = ["--out", str(self.out), "--model", str(self.model), "--command", f"{sys.executable} {self.engine}"]
        return main(["run", *paths, "--concurrency", "1,2", "--clips", "3,4", *more])

    def result(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.out.read_text())
        return content


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_long_clips_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made of the dataset's own, also where no other row asks for those. Set variables are recorded."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert case.run("--rows", "long-1") == 0
    ((row,), (run,)) = case.result()["rows"], case.result()["runs"]
    assert (row["name"], row["clips"], row["failed"], row["audio_s"]) == ("long-1", 1, 0, 60.0)
    assert run["settings"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert run["settings"]["PYTHONDONTWRITEBYTECODE"] == "1"  # starts are slower with it
    assert "OMP_NUM_THREADS" not in run["settings"]


@pytest.mark.slow
def test_a_whole_run(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.run("--rows", "stock-eager,stock-piecewise") == 0
    result = case.result()
    assert [(row["name"], row["concurrency"], row["clips"], row["failed"]) for row in result["rows"]] == [
        *(("stock-eager", 1, 3, 0), ("stock-piecewise", 1, 3, 0), ("stock-piecewise", 2, 4, 0)),
    ]
    check(result)
    for row in result["rows"]:
        assert row["tokens"] == row["tokens_expected"] > 100
        assert row["tokens_by"] == "server"
        assert row["p50_ms"] >= 20
        assert (row["joules_per_audio_second"], row["peak_vram_bytes"]) == (None, None)  # there is no GPU here, not 0
        assert (row["start_s"], row["start_caches"], row["start_warm_s"]) == (row["start_cold_s"], "cold", None)
    run = result["runs"][0]
    assert (run["vllm"], run["idle_watts"], run["gpu"], run["not_measured"]) == ("0.0.fake", None, None, {})
    assert str(case.out.parent) not in run["command"].partition("--command")[0]
    assert run["settings"]["HF_HUB_OFFLINE"] == "1"
    assert RANDOM not in run["notes"]  # it was given a checkpoint
    sent = [line.split() for line in (case.model / "requests.txt").read_text().splitlines()]
    assert len({port for port, *_ in sent}) == 2
    assert len(sent) == len({(port, name) for port, name, *_ in sent}) == 2 * (3 + 3) + 3 + 4
    durations = {clip.id: clip.duration_s for clip in dataset.load(DATA)[0]}
    for _, name, size, model in sent:
        assert model == "voxtral"
        assert int(size) == pytest.approx(44 + 32000 * durations[Path(name).stem], abs=100)  # 16-bit WAV
    printed = capsys.readouterr()
    assert "stock-piecewise at   2:   3 to warm up,    4 to measure" in printed.err
    assert "stock-piecewise     2      4       0" in printed.out


@pytest.mark.slow
def test_a_failing_request_and_a_server_that_does_not_start(case: Case) -> None:
    sent = tasks_of(["stock-eager"], {1: 3, 2: 4}, {"stock-eager": rows.config("stock-eager")})[0].clips
    (case.model / "fails").write_text(f"{sent[1].id}.wav")
    (case.model / "piecewise fails").touch()
    assert case.run("--rows", "stock-eager,stock-piecewise", "--together") == 1
    result = case.result()
    check(result)
    (row,) = result["rows"]
    assert (row["name"], row["clips"], row["failed"]) == ("stock-eager", 3, 1)
    assert row["errors"] == ['HTTP 500: {"error": "made to fail"}']
    assert row["tokens_by"] == "clip length"
    (run,) = result["runs"]
    assert list(run["not_measured"]) == ["stock-piecewise"]
    assert "cause: AssertionError: made to fail" in run["not_measured"]["stock-piecewise"]
    (case.model / "fails").unlink()
    (case.model / "piecewise fails").unlink()
    assert case.run("--rows", "stock-eager,stock-piecewise") == 0  # into the same file
    assert [row["failed"] for row in case.result()["rows"]] == [0, 0, 0]
    assert len(case.result()["runs"]) == 1


def test_one_server_at_a_time(case: Case) -> None:
    """Each ends before the next one starts, also one that takes a share of the GPU, and one that never comes up."""
    (case.model / "piecewise fails").touch()
    share = "stock-eager:gpu_memory_utilization=0.4"
    assert case.run("--rows", f"stock-eager,stock-piecewise,{share}", "--alone") == 1
    result = case.result()
    check(result)
    assert [row["name"] for row in result["rows"]] == ["stock-eager", share]
    assert list(result["runs"][0]["not_measured"]) == ["stock-piecewise"]
    assert result["runs"][0]["servers"] == "one up at a time"
    config = yaml.safe_load(result["configs"][result["rows"][1]["config_sha256"]])
    assert (config["gpu_memory_utilization"], config.get("kv_cache_memory_bytes")) == (0.4, None)
    starts = [line.split()[1] for line in (case.model / "starts.txt").read_text().splitlines()]
    assert starts == ["0", "0", "0"]  # servers that were up already


def test_the_steps_of_a_row_are_those_of_its_clips(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the warm-up and of the other rows are left out. A server that writes none has null."""
    logs = case.out.parent / "logs"
    assert case.run("--rows", "stock-eager,stock-piecewise", "--steps", "--logs", str(logs)) == 0
    by_key = {(row["name"], row["concurrency"]): row["steps"] for row in case.result()["rows"]}
    assert by_key[("stock-eager", 1)] is None
    for concurrency, clips in ((1, 3), (2, 4)):
        begin, idle = by_key[("stock-piecewise", concurrency)]
        assert (begin["kind"], begin["count"], begin["requests_mean"], begin["tokens_mean"]) == ("begin", clips, 1, 40)
        assert (idle["kind"], idle["count"], idle["ms"]["p50"]) == ("idle", clips - 1, 5.0)
        assert begin["gpu_busy_share"] == pytest.approx(clips / (2 * clips - 1))
    shown = capsys.readouterr().err
    assert "this server has written none" in shown and "GPU busy" in shown
    assert len((logs / "stock-piecewise.steps.jsonl").read_text().splitlines()) == 2 * 3 + 3 + 4
    assert case.run("--rows", "stock-piecewise", "--concurrency", "1", "--clips", "3") == 0
    assert {(row["name"], row["concurrency"]): row["steps"] for row in case.result()["rows"]}[
        ("stock-piecewise", 1)
    ] is None


def test_both_starts_are_timed(case: Case) -> None:
    cache = case.out.parent / "cache"
    (cache / "stock-eager").mkdir(parents=True)
    (cache / "stock-eager" / "graph").touch()
    assert case.run("--rows", "stock-eager", "--restart", "--cache", str(cache)) == 0
    (row,) = case.result()["rows"]
    assert (row["start_caches"], row["start_cold_s"], row["start_warm_s"]) == ("warm", None, row["start_s"])


def test_a_plan_starts_nothing(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.run("--rows", "stock-eager", "--plan") == 0
    assert not case.out.exists()
    assert not (case.model / "requests.txt").exists()
    assert "6 requests; 1 servers with 2.0 GiB of KV cache" in capsys.readouterr().err


def test_wrong_flags(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--clips", "1,2,3"], ["--concurrency", "0"], ["--clips", "x"]):
        with pytest.raises(SystemExit, match="2"):
            case.run(*flags)
    assert "--clips has 3 numbers: expected 1, or 2 as --concurrency" in capsys.readouterr().err
    assert case.run("--rows", "stock-eager", "--kv", "fast=2") == 2
    assert "--kv: 'fast' is not a server of --rows: expected one of stock-eager" in capsys.readouterr().err


def test_bench_gpu_imports_no_engine() -> None:
    code = "import sys; before = set(sys.modules); import bench.gpu.__main__; print(*set(sys.modules) - before)"
    names = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()
    assert "bench.gpu.rows" in names
    assert not {"vllm", "torch", "transformers", "voxtral_serve", "mistral_common", "jiwer"} & set(names)


# ---- What is committed


def check(result: dict[str, Any]) -> None:
    """What any file of `bench.gpu run` must be."""
    json.dumps(result, allow_nan=False)
    assert result["rows"]
    keys = [rows.key(row) for row in result["rows"]]
    assert len(keys) == len(set(keys))
    for row in result["rows"]:
        assert row.keys() >= KEYS
        assert 0 <= row["failed"] <= row["clips"]
        assert bool(row["errors"]) == bool(row["failed"])
        figures = [row[name] for name in ("p50_ms", "p90_ms", "p95_ms", "ms_per_token", "rtfx", "wall_s", "audio_s")]
        if row["failed"] < row["clips"]:
            assert all(math.isfinite(figure) and figure > 0 for figure in figures)
            assert row["p50_ms"] <= row["p90_ms"] <= row["p95_ms"]
            assert row["tokens"] > 0
        config = yaml.safe_load(result["configs"][row["config_sha256"]])
        assert rows.acceptance_of(config) == row["acceptance"]
        assert config.get("max_num_seqs", row["concurrency"]) >= row["concurrency"]
        run = result["runs"][row["run"]]
        assert run["vllm"] == row["vllm"]
        assert run.keys() >= {"gpu", "gpu_driver", "cores", "libraries", "command", "date_utc", "git_commit"}
    assert rows.merge(result) == result


@pytest.mark.skipif(not RESULT.exists(), reason="nothing was measured on a GPU yet")
def test_the_committed_figures() -> None:
    result = json.loads(RESULT.read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is no number"))
    check(result)
    for row in result["rows"]:
        assert row["failed"] == 0
        assert row["tokens"] == row["tokens_expected"]  # both sides did the same work
        assert row["joules_per_audio_second"] and row["peak_vram_bytes"] and row["start_s"]
    assert all(run["gpu"] for run in result["runs"])
    assert re.findall(r"(?<![\w.:/])/\w+/\S*", RESULT.read_text()) == []  # where files lay on the machine
