"""bench gpu: tokens of a clip, configs, figures, the plan of a report; whole calls against a fake vLLM."""

import contextlib
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from fakevllm import Vllm, wait_until
from mistral_common.protocol.transcription.request import StreamingMode, TranscriptionRequest
from mistral_common.tokens.tokenizers.audio import Audio
from mistral_common.tokens.tokenizers.base import SpecialTokens
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from places import DATA, PICO, ROOT
from safetensors import safe_open
from vllm.config import CacheConfig, SpeculativeConfig

from bench import BenchError, dataset
from bench.answers import Row
from bench.gpu import checkpoint, measure, readings, report, rows, servers
from bench.gpu import head as head_of_bench
from bench.gpu.clock import Clock
from bench.gpu.command import main
from bench.gpu.plan import StartPlan, Uploads
from bench.gpu.report import together
from bench.gpu.servers import Launch, Server
from bench.gpu.tasks import task_of
from mistral_layout import tensors
from mistral_layout.audio import PROMPT_TOKENS
from mistral_layout.tekken import CONTROL_TOKENS
from voxtral_serve.engine.draft_network import FILE, Head, HeadNetwork, tokenizer_hash

SURVIVAL = [round(0.9**place, 4) for place in range(1, 19)]


@pytest.fixture(autouse=True)
def a_drafter(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header of a drafter of 18 rates in place of pico's."""
    monkeypatch.setattr(rows, "HEAD", tmp_path_factory.mktemp("draft") / "head.safetensors")
    header = {"__metadata__": {"format": "voxtral-serve draft 1", "facts": json.dumps({"survival": SURVIVAL})}}
    text = json.dumps(header).encode()
    rows.HEAD.write_bytes(len(text).to_bytes(8, "little") + text)


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


def write_head(path: Path, dim: int = 256) -> Head:
    shape = {"dim": dim, "width": 8, "blocks": 1, "kernel": 3}
    network, tokens = HeadNetwork(**shape, tokens=5), torch.arange(5)
    head = Head(network, tokens, 20000, 6, "hash", 39, SURVIVAL, 1.5, head_of_bench.chirp_rows(PICO), shape)
    head.write(path)
    return head


@pytest.mark.slow
def test_the_checkpoint_of_one_layer_each(tmp_path: Path) -> None:
    write_head(rows.HEAD)
    head_of_bench.write_checkpoint(tmp_path, layers=1, tokens=100)
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
    head = Head.read(tmp_path / FILE)
    assert (head.shape["dim"], head.shape["width"], head.vocabulary, head.delay) == (3072, 8, 131072, 6)
    assert head.tokenizer == tokenizer_hash(tmp_path / "tekken.json")
    assert head.tokens.tolist() == list(range(1000, 1100))  # text: none ends a request
    assert head.chirp.shape == (74, 3072)
    assert (head.chirp.norm(dim=1) > 0.1).all()  # rows that float16 holds


# ---- Configurations


def test_the_contest_config_differs_by_what_measuring_needs() -> None:
    own = yaml.safe_load((ROOT / rows.CONTEST).read_text())
    config = rows.config("contest")
    assert config.keys() == own.keys() | {"kv_cache_memory_bytes"}
    assert {key for key in own if config[key] != own[key]} == {"gpu_memory_utilization"}
    assert config["kv_cache_memory_bytes"] == 2 * 2**30
    assert rows.config("contest", kv_gib=0.5)["kv_cache_memory_bytes"] == 2**29
    assert rows.described("contest", config)["changes"] == {
        "gpu_memory_utilization": 0.04,
        "kv_cache_memory_bytes": 2 * 2**30,
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stock-full", {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}, "enforce_eager": False}),
        ("fast-plain", {"speculative_config": None, "max_num_seqs": 64}),
        ("contest:attention_backend=TRITON_ATTN", {"attention_backend": "TRITON_ATTN", "enforce_eager": True}),
        ("contest:enforce_eager=null:max_num_seqs=256", {"enforce_eager": None, "max_num_seqs": 256}),
        ("contest:gpu_memory_utilization=0.4", {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": None}),
        ("fast", {"model": ".", "served_model_name": "voxtral", "max_num_seqs": 64}),
        ("vllm_config.yaml", {"gpu_memory_utilization": 0.65, "kv_cache_memory_bytes": None, "max_num_seqs": 1}),
    ],
)
def test_what_a_name_asks_for(name: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = rows.config(name)
    assert {key: config.get(key) for key in expected} == expected
    assert rows.config(name, changes={"max_num_seqs": 7})["max_num_seqs"] == 7


def test_drafts_are_accepted_at_the_rates_of_picos_drafter() -> None:
    """Each as many as the profile drafts; the weights decide where pico is served, and with a useless drafter."""
    for name in ("fast", "throughput", "realtime"):
        own = yaml.safe_load((ROOT / f"profiles/{name}.yaml").read_text())["speculative_config"]
        drafts = rows.config(name)["speculative_config"]
        assert drafts == own | {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": SURVIVAL[: own["num_speculative_tokens"]],
        }
        plain = rows.config(f"{name}:speculative_config=null")
        assert "speculative_config" not in plain
        if name + "-plain" in rows.SERVERS:
            assert rows.config(f"{name}-plain") == plain
    for name in ("useless", "pico", "fast-plain", "contest"):
        assert rows.acceptance_of(rows.config(name)) is None
    assert rows.config("useless") == rows.config("throughput", acceptance=[])
    assert rows.config("pico") == rows.config("fast", kv_gib=1, acceptance=[])


def test_drafts_at_given_rates() -> None:
    drafts = rows.config("fast", acceptance=[0.75, 0.5])["speculative_config"]
    assert (drafts["num_speculative_tokens"], drafts["synthetic_acceptance_rates"]) == (2, [0.75, 0.5])
    assert rows.acceptance_of(rows.config("fast", acceptance=[])) is None


def test_vllm_takes_the_rates() -> None:
    """And none that grow. It takes the first ones where it drafts fewer (rejection_sampler_utils, `rates_ptr + i`)."""
    resolve = SpeculativeConfig._resolve_synthetic_acceptance_rates
    rates = rows.config("throughput")["speculative_config"]["synthetic_acceptance_rates"]
    assert resolve(15, rates, None) == rates
    with pytest.raises(ValueError, match="non-increasing"):
        resolve(15, rates[::-1], None)


def test_a_drafter_that_has_no_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows.head_rates(rows.HEAD, 18) == SURVIVAL
    with pytest.raises(BenchError, match="has rates of 18 drafts: expected 19 or more"):
        rows.head_rates(rows.HEAD, 19)
    with pytest.raises(BenchError, match=r"cannot read .*none \(No such file or directory\): make it with"):
        rows.head_rates(tmp_path / "none", 15)
    for content in (b"", b"\x02\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 100):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(BenchError, match="is not a drafter"):
            rows.head_rates(tmp_path / "other", 15)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fastest", "'fastest' is not a known server: expected one of contest, stock-full, fast, fast-plain"),
        ("none.yaml", "cannot read none.yaml (No such file or directory), the config of the server 'none.yaml'"),
        ("fast:max_num_seqs", "'max_num_seqs' in 'fast:max_num_seqs': expected KEY=VALUE, such as max_num_seqs=256"),
        ("fast:=2", "'=2' in 'fast:=2': expected KEY=VALUE"),
        ("fast:a=[", "'[' in 'fast:a=[' is not valid YAML"),
    ],
)
def test_a_wrong_name_is_refused(name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--out", str(tmp_path / "never.json"), "--servers", f"contest,{name}"]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---- The plan


def test_which_servers_fill_their_caches_together() -> None:
    """Most of the report's on a GPU of 141 GB, and fewer on one of 80 GB; none without a GPU."""
    names = ("fast-plain", "fast", "throughput-plain", "throughput", "realtime", "stock-full")
    configs = {name: rows.filling(rows.config(name)) for name in names}
    assert together(configs, 150_754_820_096) == [[*names[:5]]]
    assert together(configs, 85_520_809_984) == [[*names[:4]]]
    assert together(configs, 0) == []
    assert together({"fast": configs["fast"]}, 150_754_820_096) == []


def test_a_start_that_fills_caches_differs_in_the_kv_cache_alone() -> None:
    """vLLM's key of compiled code leaves its size out, and how drafts are accepted."""
    for name in ("stock-full", "throughput"):
        config = rows.config(name)
        assert rows.filling(config) == config | {"kv_cache_memory_bytes": 2 * 2**30}
    ignored = inspect.getsource(CacheConfig.compute_hash)
    assert '"kv_cache_memory_bytes"' in ignored and '"gpu_memory_utilization"' in ignored
    assert rows.cache_of("useless") == "throughput"
    assert "synthetic" not in inspect.getsource(SpeculativeConfig.compute_hash)
    assert [rows.cache_of(name) for name in ("fast", "useless:max_num_seqs=8")] == ["fast", "useless:max_num_seqs=8"]


def test_the_report_is_as_the_pages_say() -> None:
    assert [item.row for item in rows.REPORT] == [
        *("fast-plain@1", "fast-plain@16", "fast-plain@64", "fast@1", "fast@16", "fast@64"),
        *(f"throughput-plain@{level}" for level in (1, 16, 64, 128, 256)),
        *("throughput@128", "throughput@256", "useless@1", "useless@16", "useless@64", "useless@256"),
        *("realtime@64live", "realtime@150live", "pico@1", "pico@64"),
        *("stock-full@1", "stock-full@64", "contest@1"),
    ]
    for item in rows.REPORT:
        if isinstance(item, Uploads):
            assert len(task_of(item, rows.config(item.server)).clips) == item.clips


def test_the_clips_of_a_row() -> None:
    """Rows with as many requests in flight have the same clips. A server with a cache of clips gets none twice."""
    stock, fast = rows.config("stock-full"), rows.config("fast")
    alone = [task_of(Uploads(name, 1, 12), config) for name, config in (("stock-full", stock), ("fast", fast))]
    many = [task_of(Uploads(name, 64, 320), config) for name, config in (("stock-full", stock), ("fast", fast))]
    assert alone[0].clips == alone[1].clips
    assert many[0].clips == many[1].clips
    sent = [clip.id for task in (alone[0], many[0]) for clip in (*task.warm_up, *task.clips)]
    assert len(sent) == len(set(sent)) == 12 + 3 + 320 + 64
    mean = np.mean([clip.duration_s for clip in many[0].clips])
    assert mean == pytest.approx(np.mean([clip.duration_s for clip in dataset.load(DATA)[0]]), rel=0.1)
    assert len(task_of(Uploads("fast", 64, 768), fast).clips) == 768
    with pytest.raises(BenchError, match=r"stock-full@64: 768 clips, but the cache .* of stock-full .* more than 413"):
        task_of(Uploads("stock-full", 64, 768), stock)
    with pytest.raises(BenchError, match="contest@2: contest has max_num_seqs 1"):
        task_of(Uploads("contest", 2, 4), rows.config("contest"))


def test_wrong_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in (
        (["run", "--servers", "fast", "--clips", "1,2"], "--clips has 2 numbers: expected 1, or 3 as --in-flight"),
        (["run", "--servers", "fast", "--in-flight", "0"], "expected whole numbers of at least 1"),
        (["run", "--servers", "fast", "--set", "dtype"], "expected KEY=VALUE with a value in YAML"),
        (
            ["report", "--only", "fast@1,quick"],
            "--only 'quick': expected a server, `uploads`, `live`, or",
        ),
        (["live", "--sessions", "2", "--seconds", "9-3"], "expected LEAST-MOST in seconds"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*flags, "--out", "never.json"])
        assert said in capsys.readouterr().err


def test_a_plan_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--out", str(tmp_path / "never.json"), "--plan", "--only", "fast,live"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "one start: fast@1 (12 s), fast@16 (12 s), fast@64 (15 s)"
    assert lines[1] == "one start: realtime@64live (75 s), realtime@150live (105 s)"
    assert not list(tmp_path.iterdir())


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
    assert {row[name] for name in ("p50_ms", "p90_ms", "p95_ms", "ms_per_token", "rtfx")} == {None}
    assert row["errors"] == ["HTTP 500: made to fail"]


def test_a_failed_request_stays_and_hides_nothing() -> None:
    row = figures([100.0, None, 300.0])
    assert (row["clips"], row["failed"], row["p50_ms"]) == (3, 1, 200)
    assert row["audio_s"] == 20
    assert row["wall_s"] == pytest.approx(2.3)  # from the first start to the last end, the failure within
    assert row["joules_per_audio_second"] == pytest.approx(25)
    assert (row["tokens"], row["tokens_by"], row["tokens_expected"]) == (200, "clip length", 300)


def test_figures_of_drafts() -> None:
    """Ten steps of a request with drafts; eight accept the first draft, three both."""
    accepted = {rows.ACCEPTED: 11.0, f"{rows.ACCEPTED} 0": 8.0, f"{rows.ACCEPTED} 1": 3.0}
    found = rows.drafts({rows.GENERATED: 21.0, rows.DRAFTED: 10.0, rows.DRAFTS: 20.0, **accepted})
    assert found == {
        **{"accepted_drafts": pytest.approx(0.55), "tokens_per_step": pytest.approx(2.1)},
        **{"survival": pytest.approx([0.8, 0.3]), "draft_steps": 10},
    }
    nothing = {"accepted_drafts": None, "tokens_per_step": None, "survival": None}
    assert rows.drafts({rows.DRAFTED: 0.0, rows.ACCEPTED: 0.0}) == nothing | {"draft_steps": 0}
    assert rows.drafts({rows.GENERATED: 21.0}) == nothing | {"draft_steps": None}
    assert measure.gained({"a": 1.0}, {"a": 3.0, "b": 2.0}) == {"a": 2.0, "b": 2.0}
    assert measure.gained({}, {"a": 3.0}) == {}


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
import json, os, sys, threading, time, yaml
from pathlib import Path
sys.path.insert(0, {tests!r})
import fakeserver
from fakeserver import Answer, FakeServer

port = int(sys.argv[sys.argv.index("--port") + 1])
config = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
with open("starts.txt", "a") as file:
    print("start", file=file)
if config.get("enforce_eager") is False and Path("stock fails").exists():
    sys.exit("AssertionError: made to fail")
served, tokens = [], [5]
names = ["generation_tokens"]
names += [f"spec_decode_num_{{what}}" for what in ("drafts", "draft_tokens")]
names += [f"spec_decode_num_accepted_tokens{{what}}" for what in ("", "_per_pos")]
get, begin = fakeserver._Handler.do_GET, FakeServer.begin

def do_get(self):
    if self.path == "/metrics":
        lines = [f'vllm:{{name}}_total{{{{engine="0",position="0"}}}} {{tokens[0]}}.0\\n' for name in names]
        self._send(200, "".join(lines).encode())
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

    def call(self, *words: str) -> int:
        paths = ["--out", str(self.out), "--model", str(self.model), "--command", f"{sys.executable} {self.engine}"]
        return main([*words, *paths])

    def run(self, *more: str) -> int:
        return self.call("run", "--servers", "contest,stock-full", "--in-flight", "1", "--clips", "3", *more)

    def result(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.out.read_text())
        return content

    def starts(self) -> int:
        path = self.model / "starts.txt"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


@pytest.mark.slow
def test_a_report_goes_on_where_it_stopped(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row once, in the plan's order; a failed row and a server that did not start are measured again."""
    (case.model / "stock fails").touch()
    first = task_of(Uploads("contest", 1, 2), rows.config("contest")).clips[0]
    (case.model / "fails").write_text(f"{first.id}.wav")
    wanted = ["report", "--most-clips", "2", "--only", "stock-full@1,fast@1,contest@1"]
    assert case.call(*wanted[:-1], "stock-full@1,contest@1") == 1
    result = case.result()
    check(result)
    assert [(row["row"], row["failed"]) for row in result["rows"]] == [("contest@1", 1)]
    assert result["rows"][0]["errors"] == ['HTTP 500: {"error": "made to fail"}']
    assert "cause: AssertionError: made to fail" in result["not_measured"]["stock-full@1"]
    (case.model / "fails").unlink()
    (case.model / "stock fails").unlink()
    assert case.call(*wanted) == 0
    result = case.result()
    check(result)
    names = ["fast@1", "stock-full@1", "contest@1"]
    assert [(row["row"], row["failed"]) for row in result["rows"]] == [(name, 0) for name in names]
    assert [row["start_caches"] for row in result["rows"]] == ["cold"] * 3  # the fake one fills no cache
    assert (len(result["calls"]), result["not_measured"]) == (2, {})
    started = case.starts()
    assert started == 2 + 3
    assert case.call(*wanted) == 0
    assert case.starts() == started  # nothing was missing
    assert "0 rows to measure" in capsys.readouterr().err


def test_an_interrupted_report_keeps_its_rows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while the second server's row is measured. Its server is stopped, and the next call measures it."""
    measure_row = report.measure

    def interrupted(server: Server, *rest: Any) -> dict[str, Any]:
        if server.name == "stock-full":
            raise KeyboardInterrupt
        return measure_row(server, *rest)

    monkeypatch.setattr(report, "measure", interrupted)
    assert case.run() == 130
    assert [row["row"] for row in case.result()["rows"]] == ["contest@1"]
    assert not [child for child in psutil.Process().children() if "fake_vllm.py" in " ".join(child.cmdline())]
    monkeypatch.undo()
    assert case.run() == 0
    assert [row["row"] for row in case.result()["rows"]] == ["contest@1", "stock-full@1"]
    assert case.starts() == 3


def test_a_report_ends_in_time(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.run("--minutes", "1") == 3
    assert case.starts() == 0
    assert case.result()["rows"] == []
    assert "the start of contest with contest@1 may take 270 s, but --minutes leaves" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("gpu_uuid", ["GPU-1"], "gpu_uuid was ['GPU-1'], is None"),
        ("boot_id", "another", "boot_id was 'another', is"),
        ("git_commit", "0123", "git_commit was '0123', is"),
        ("libraries", {"vllm": "0.1"}, "libraries was {'vllm': '0.1'}, is"),
    ],
)
def test_another_machine_or_code_is_refused(
    case: Case, name: str, value: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert case.run("--minutes", "1") == 3
    other = case.result()
    other["machine"][name] = value
    case.out.write_text(json.dumps(other))
    assert case.run() == 2
    assert said in capsys.readouterr().err
    assert case.result() == other
    assert case.starts() == 0


def test_another_configuration_is_refused(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.run("--only", "contest") == 0
    assert case.run("--set", "dtype=half") == 2
    assert "config of contest was" in capsys.readouterr().err


def test_the_rows_of_uploads(case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert case.run() == 0
    result = case.result()
    check(result)
    for row in result["rows"]:
        assert (row["clips"], row["tokens"], row["tokens_by"]) == (3, row["tokens_expected"], "server")
        drafted = (row["draft_steps"], row["accepted_drafts"], row["tokens_per_step"], row["survival"])
        assert drafted == (row["tokens"], 1, 2, [1])  # as the fake vLLM counts them
        assert (row["joules_per_audio_second"], row["peak_vram_bytes"]) == (None, None)  # there is no GPU here, not 0
        assert row["start_caches"] == "cold"
    (call,) = result["calls"]
    assert call["settings"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "OMP_NUM_THREADS" not in call["settings"]
    assert str(case.out.parent) not in call["command"].partition("--command")[0]
    assert result["weights"] == "checkpoint"
    sent = [line.split() for line in (case.model / "requests.txt").read_text().splitlines()]
    assert len(sent) == len({(port, name) for port, name, *_ in sent}) == 2 * (3 + 3)
    durations = {clip.id: clip.duration_s for clip in dataset.load(DATA)[0]}
    for _, name, size, model in sent:
        assert model == "voxtral"
        assert int(size) == pytest.approx(44 + 32000 * durations[Path(name).stem], abs=100)  # 16-bit WAV
    assert "contest@1" in capsys.readouterr().out


def test_a_long_clip_is_made_of_others(case: Case) -> None:
    assert case.call("run", "--servers", "long", "--long", "1") == 0
    (row,) = case.result()["rows"]
    assert (row["row"], row["clips"], row["failed"], row["audio_s"]) == ("long@1min", 1, 0, 60.0)


def test_the_steps_of_a_row_are_those_of_its_clips(case: Case) -> None:
    """Those of the warm-up are left out. A server that writes none has null."""
    logs = case.out.parent / "logs"
    assert case.run("--steps", "--logs", str(logs)) == 0
    none, some = (row["steps"] for row in case.result()["rows"])
    assert none is None
    begin, idle = some
    assert (begin["kind"], begin["count"], begin["requests_mean"], begin["tokens_mean"]) == ("begin", 3, 1, 40)
    assert (idle["kind"], idle["count"], idle["ms"]["p50"]) == ("idle", 2, 5.0)
    assert begin["gpu_busy_share"] == pytest.approx(3 / 5)
    assert len((logs / "stock-full.steps.jsonl").read_text().splitlines()) == 3 + 3


def test_bench_gpu_imports_no_engine() -> None:
    code = "import sys; before = set(sys.modules); import bench.gpu.command; print(*set(sys.modules) - before)"
    names = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()
    assert "bench.gpu.rows" in names
    assert not {"vllm", "torch", "transformers", "voxtral_serve", "mistral_common"} & set(names)


def check(result: dict[str, Any]) -> None:
    """What any file of `bench gpu` must be."""
    json.dumps(result, allow_nan=False)
    names = [row["row"] for row in result["rows"]]
    assert names and len(names) == len(set(names))
    for row in result["rows"]:
        assert row["server"] in result["configs"]
        if row["kind"] == "uploads":
            assert 0 <= row["failed"] <= row["clips"]
            assert bool(row["errors"]) == bool(row["failed"])
            assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p95_ms"]
            assert row["tokens"] > 0 and row["rtfx"] > 0
            config = result["configs"][row["server"]]["config"]
            assert rows.acceptance_of(config) == row["acceptance"]
            assert config.get("max_num_seqs", row["in_flight"]) >= row["in_flight"]
            assert row["start_s"] > 0
    assert result["machine"].keys() >= {"gpu", "gpu_uuid", "boot_id", "gpu_driver", "cpu", "libraries", "git_commit"}


def test_ctrl_c_during_a_start_does_not_wait_for_it(tmp_path: Path) -> None:
    vllm = Vllm(tmp_path)
    vllm.does(hangs=True)

    def interrupt() -> None:
        wait_until(lambda: len(vllm.calls()) == 1)
        os.kill(os.getpid(), signal.SIGINT)

    config, plan = rows.config("fast"), StartPlan(None, None, (str(vllm.python.with_name("vllm")),))
    sender = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with contextlib.ExitStack() as up, pytest.raises(KeyboardInterrupt):
            sender.start()
            servers.start({"fast": Launch(config, vllm.directory, "fast")}, plan, tmp_path, up, Clock())
    finally:
        signal.signal(signal.SIGINT, before)
    sender.join()
    wait_until(lambda: vllm.left() == set())  # Ctrl-C may come before the server's start has returned
