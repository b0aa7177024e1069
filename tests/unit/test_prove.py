"""`voxtral-serve prove` without a server: texts, outcomes, bounds, and what a report has and has not."""

import html
import json
import re
import socket
import sys
import tomllib
from array import array
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
import soundfile
from places import DATA, PICO, ROOT

from bench import dataset
from voxtral_serve import cli
from voxtral_serve.client.errors import RequestError, UsageError
from voxtral_serve.measure.live import Timeline
from voxtral_serve.prove import clips, facts, live, page, private, report, service, texts
from voxtral_serve.prove.job import FULL, QUICK, ProveJob
from voxtral_serve.prove.outcome import Part, Result, SkippedError, judged
from voxtral_serve.prove.run import OTHERS, PARTS, measured, sampler
from voxtral_serve.prove.state import Run

PROVE = ROOT / "src/voxtral_serve/prove"
SCHEMA = json.loads((PROVE / "report.schema.json").read_text(encoding="utf-8"))
NAMES = ["check", "start", *(name for name, *_ in (*PARTS, *OTHERS))]
KEY = "sk-very-secret-0123456789"


def job(**changed: Any) -> ProveJob:
    given: dict[str, Any] = dict.fromkeys(("url", "profile", "directory", "clips"))
    flags = dict.fromkeys(("random_weights", "quick", "with_texts"), False)
    return ProveJob(**{**given, **flags, "arguments": (), "out": Path("out"), **changed})


def state(**changed: Any) -> Run:
    return Run(job(), QUICK, clips.load(clips.BUNDLED, 3)[0], [], 0, **changed)


def problems(made: dict[str, Any]) -> list[str]:
    return [f"{each.json_path}: {each.message}" for each in jsonschema.Draft202012Validator(SCHEMA).iter_errors(made)]


# ---- Clips


def test_bundled_clips_are_those_of_the_benchmark() -> None:
    known = {clip.path.name: clip for clip in dataset.load(DATA).clips}
    bundled, count = clips.load(clips.BUNDLED, 100)
    assert len(bundled) == count == FULL.clips
    for clip in bundled:
        assert clip.path.read_bytes() == known[clip.path.name].path.read_bytes()
        assert clip.text == known[clip.path.name].text
        assert clip.seconds == pytest.approx(known[clip.path.name].duration_s, abs=0.01)
    assert sum(clip.path.stat().st_size for clip in bundled) < 300_000
    assert {path.name for path in clips.BUNDLED.parent.glob("*.opus")} == {clip.path.name for clip in bundled}


def manifest(folder: Path, *lines: object) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_clips_of_a_manifest(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.full((8000, 2), 0.5), 8000)
    given, count = clips.load(
        manifest(
            tmp_path,
            {"audio_filepath": "a.wav"},
            {"path": str(tmp_path / "a.wav"), "text": "x", "language": "de"},
            {"path": "gone"},
        ),
        2,
    )
    assert [(clip.text, clip.language, clip.seconds) for clip in given] == [(None, "en", 1), ("x", "de", 1)]
    assert count == 3  # the third is not read
    assert given[0].wav[:4] == b"RIFF"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no JSON", 'line 1 is not a clip: expected {"path": FILE, "text": REFERENCE}'),
        ({"text": "a"}, "line 1 is not a clip"),
        ({"path": 3}, "line 1: path is 3, expected a string"),
        ({"path": "a.wav", "text": 3}, "line 1: text is 3, expected a string"),
        ({"path": "gone.wav"}, "cannot decode"),
        ("", "has no lines"),
    ],
)
def test_a_manifest_that_is_wrong(line: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        clips.load(manifest(tmp_path, line), 5)


def test_joined_clips_have_their_length_and_begin_elsewhere() -> None:
    bundled = clips.load(clips.BUNDLED, 3)[0]
    first, second = (clips.joined(bundled, number, 0.64, 30) for number in (0, 1))
    assert len(first) == len(second) == 30 * 16000
    np.testing.assert_array_equal(second[:1000], bundled[1].samples[:1000])


# ---- Texts


def words(count: int, wrong: int = 0) -> str:
    return " ".join(["ocean"] * wrong + ["river"] * (count - wrong))


@pytest.mark.parametrize(("wrong", "outcome"), [(0, "passed"), (3, "passed"), (4, "failed"), (100, "failed")])
def test_texts_may_differ_in_three_words_of_a_hundred(wrong: int, outcome: str) -> None:
    run = state(uploads=[words(50), words(50), words(0)])
    first, second = min(wrong, 50), max(wrong - 50, 0)
    result = texts.compared_with(run, {"streamed": [(0, words(50, first)), (1, words(50, second))]})
    assert result.outcome == outcome
    different = (first > 0) + (second > 0)
    assert result.figures["paths"] == [
        {"path": "streamed", "texts": 2, "different": different, "errors": wrong, "words": 100}
    ]
    assert len(result.texts) == different
    if outcome == "failed":
        assert result.reason == f"streamed: {wrong}.0 % of the words differ from those of uploads, over 3.0 %"


def test_uploads_without_words_are_no_agreement() -> None:
    result = texts.compared_with(state(uploads=["", "", ""]), {"live": [(0, ""), (1, "")]})
    assert (result.outcome, result.reason) == ("failed", "uploads have no words")


def test_random_weights_skip_what_needs_words() -> None:
    run = state(random="the checkpoint has random weights (norm.weight is not trained)")
    run.config = {"hf_overrides": {"architectures": [texts.ENCODE_ONCE]}}
    for part in (texts.clips, texts.texts, texts.speculative, texts.stock, live.pauses):
        result = measured("a", "A", part, run).result
        assert result.outcome == "skipped"
        assert "random weights" in result.reason


def test_random_weights_are_found_in_the_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    assert facts.random_weights(PICO) is None
    for name in ("params.json", "tekken.json"):
        (tmp_path / name).write_bytes((PICO / name).read_bytes())
    tensors = load_file(PICO / "consolidated.safetensors")
    trained = tensors["norm.weight"]
    for norm in (trained.normal_(0, 0.02).clone(), trained.fill_(1).clone()):
        save_file({**tensors, "norm.weight": norm}, tmp_path / "consolidated.safetensors")
        assert facts.random_weights(tmp_path) == "the checkpoint has random weights (norm.weight is not trained)"
    assert facts.random_weights(tmp_path / "nothing") is None


def test_options_of_the_profile_stay_with_it() -> None:
    given = ["--a", "1", "--additional-config", "{}", "--b", "--additional-config={}", "--c", "2"]
    assert texts.others(given) == ["--a", "1", "--b", "--c", "2"]


# ---- Live sessions


@pytest.mark.parametrize("tokens", [None, 38, 41])
def test_deltas_that_are_no_tokens_have_no_lag(tokens: int | None) -> None:
    line = Timeline(sent=array("d", [0.0]), samples=1280, ended=1.0, arrivals=array("d", [1.0] * 40), done=2.0)
    line.tokens = tokens
    assert line.lags() is None
    figures = texts.live_figures([line])
    assert figures["lag_s"] is None
    assert figures["lag_reason"] == "lag not measured: the server's deltas are not its tokens"


def test_words_of_a_pause() -> None:
    """Speech of 1 s, 4 s of silence, speech; the first two seconds of the silence may have its last words."""
    sent = array("d", [0.08 * number for number in range(75)])
    line = Timeline(sent=sent, pieces=[(0.9, "a"), (2.9, " b"), (3.2, " c"), (5.2, " d"), (9.0, " e")])
    assert live.pause_texts(line, 1.0, 5.0) == (" c", " d e")


def test_numbers_of_sessions() -> None:
    assert [live.numbers(most) for most in (1, 2, 8, 150)] == [
        [1],
        [1, 2],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 16, 32, 64, 128, 150],
    ]


@pytest.mark.parametrize(
    ("lag_s", "final_s", "bound"),
    [(0.5, 2.0, None), (0.51, 0.1, "lag P99 0.51 s, over 0.5 s"), (0.1, 2.01, "time to final P90 2.01 s, over 2.0 s")],
)
def test_the_bounds_of_live_sessions(lag_s: float, final_s: float, bound: str | None) -> None:
    level = {"lag_s": {"p99": lag_s}, "final_s": {"p90": final_s}}
    assert live.over(level) == bound
    assert live.over({**level, "lag_s": None}) == (bound if final_s > 2 else None)


@pytest.mark.parametrize(
    ("rollovers", "audio_s", "context_s", "seen"),
    [(1, 10, 40, True), (0, 99, 40, False), (None, 41, 40, True), (None, 40, 40, False), (None, 99, None, False)],
)
def test_a_rollover(rollovers: int | None, audio_s: float, context_s: float | None, seen: bool) -> None:
    assert live.rolled_over(rollovers, audio_s, context_s) is seen


def test_the_end_of_a_text() -> None:
    assert live.end_errors("the last words", "many words and then the last words", "en") == (0, 0, 0, 3)
    assert live.end_errors("the last words", "many words and then nothing", "en").total > 1


# ---- Outcomes


def part(name: str, result: Result) -> Part:
    return Part(name, name.title(), 1.5, result)


def whole(results: dict[str, Result], with_texts: bool = False, run: Run | None = None) -> dict[str, Any]:
    parts = [part(name, results.get(name, Result("skipped", "not run"))) for name in NAMES]
    about = facts.of_run(run or state(), None, datetime(2026, 1, 1, tzinfo=UTC))
    return report.whole(about, parts, 12.3, with_texts)


def test_one_part_that_failed_fails_the_run() -> None:
    good, bad = judged([], "well", {"problems": []}), judged(["one", "two"], "well", {"problems": ["one", "two"]})
    assert (good.outcome, good.reason, bad.outcome, bad.reason) == ("passed", "well", "failed", "one; two")
    assert report.verdict(whole({"check": good})) == "passed: 1 passed, 0 failed, 12 skipped, in 12 s"
    assert report.verdict(whole({"check": bad})) == "failed: 0 passed, 1 failed, 12 skipped, in 12 s"


def raises(error: Exception) -> Any:
    def function(_: Run) -> Result:
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (SkippedError("not here"), "skipped", "not here"),
        (RequestError("429: busy\nnow"), "failed", "429: busy now"),
        (ConnectionResetError(), "failed", "ConnectionResetError"),
    ],
)
def test_an_error_is_the_outcome_of_its_part(error: Exception, outcome: str, reason: str) -> None:
    result = measured("a", "A", raises(error), state()).result
    assert (result.outcome, result.reason) == (outcome, reason)


def test_a_mistake_of_the_command_is_no_outcome() -> None:
    with pytest.raises(ZeroDivisionError):
        measured("a", "A", raises(ZeroDivisionError()), state())


# ---- Reports


def test_texts_are_in_a_report_only_if_they_are_wanted() -> None:
    heard = [{"set": "given", "clip": 1, "reference": "a private matter", "text": "a private batter"}]
    result = Result("passed", "1 given clip", {"given_in_manifest": 1, "bundled": None, "given": None}, heard)
    for wanted in (False, True):
        made = whole({"clips": result}, wanted)
        assert problems(made) == []
        for text in (json.dumps(made), page.page(made)):
            assert ("private" in text) is wanted


def test_private_things_are_hidden(tmp_path: Path) -> None:
    home = tmp_path / "someone"
    names = private.secrets(["http://gpu-box.example:8000"], [KEY, None], [home / "weights"])
    told = {
        "a": f"cannot read {home}/weights/x.json, nor /opt/models/y, ../z/w.bin, ~/v; see C:\\Users\\me\\u.wav",
        "b": [f"Bearer {KEY}", "http://gpu-box.example:8000/v1/models at 10.1.2.3", f"on {socket.gethostname()}"],
        "c": "/v1/realtime answers 404: 3/4 of them, 600 / 30, key/value",
        "d": 3,
    }
    shown = private.hidden(told, names)
    text = json.dumps(shown)
    for secret in (KEY, str(tmp_path), "weights", "models/y", "w.bin", "u.wav", "gpu-box", "10.1.2.3"):
        assert secret not in text.replace("/v1/models", "")
    assert shown["c"] == told["c"]
    assert shown["d"] == 3


def test_a_config_keeps_its_values_but_for_paths_and_secrets() -> None:
    given = {
        "model": "/data/weights",
        "max_model_len": 9216,
        "api_key": [KEY],
        "middleware": "voxtral_serve.guard.Guard",
        "hf_token": KEY,
        "additional_config": {"voxtral_serve": {"api_key": KEY}, "live": 8},
    }
    assert private.config(given) == {
        "model": "[path]",
        "max_model_len": 9216,
        "api_key": ["[hidden]"],
        "middleware": "voxtral_serve.guard.Guard",
        "hf_token": "[hidden]",
        "additional_config": {"voxtral_serve": {"api_key": "[hidden]"}, "live": 8},
    }
    options = [
        "--dtype",
        "float32",
        "--api-key",
        KEY,
        "--download-dir=/data/x",
        "--enforce-eager",
        "--a",
        '{"key": "k"}',
    ]
    assert private.options(options) == [
        *("--dtype", "float32", "--api-key", "[hidden]", "--download-dir=[path]", "--enforce-eager"),
        *("--a", '{"key": "[hidden]"}'),
    ]


def test_a_report_with_every_figure_fits_its_schema_and_its_page() -> None:
    made = whole(RESULTS)
    assert problems(made) == []
    text = page.page(made)
    for each in RESULTS.values():
        assert html.escape(each.reason) in text
    assert "<script" not in text and "http:" not in text and "https:" not in text
    assert text.count("<svg") == 6
    for name in NAMES:
        assert f'<section id="{name}">' in text


@pytest.mark.parametrize("name", [name for name in NAMES if name != "check"])
def test_a_figure_that_is_missing_is_found_by_the_schema(name: str) -> None:
    whole_figures = RESULTS[name].figures
    for missing in whole_figures:
        kept = {key: value for key, value in whole_figures.items() if key != missing}
        assert problems(whole({name: Result("passed", "x", kept)})) != []
    assert problems(whole({name: Result("passed", "x", {**whole_figures, "more": 1})})) != []


def test_a_page_of_skipped_parts_has_no_zeros_for_what_was_not_measured() -> None:
    text = page.page(whole({}))
    tiles = text.partition('<dl class="tiles">')[2].partition("</dl>")[0]
    assert re.findall(r"<dd>([^<]*)", tiles) == ["not known", *["–"] * 7]


def test_memory_that_is_not_measured_has_a_reason() -> None:
    run = state(server=SimpleNamespace(), gpu=sampler("http://192.0.2.1:8000"))
    run.sampler._sampled.wait()
    result = service.memory(run)
    reason = run.sampler.device_reason()
    assert reason is not None
    assert (result.outcome, result.reason) == ("skipped", f"not measured: {reason}")
    assert result.figures == {"peak_bytes": None, "joules_per_audio_s": None, "not_measured": reason}


def test_refused_values_of_memory() -> None:
    """The schema takes null, and no 0."""
    for peak, fits in ((None, True), (0, False), (1, True)):
        figures = {"peak_bytes": peak, "joules_per_audio_s": None, "not_measured": None}
        assert (problems(whole({"memory": Result("skipped", "x", figures)})) == []) is fits


SPREAD = {"p50": 0.1, "p90": 0.2, "p99": 0.3}
LIVE = {"sessions": 1, "lag_s": SPREAD, "lag_reason": None, "final_s": SPREAD, "client_late_s": SPREAD}
NO_LAG = {**LIVE, "sessions": 2, "lag_s": None, "lag_reason": "not its tokens"}
PATHS = {"paths": [{"path": "streamed", "texts": 3, "different": 1, "errors": 1, "words": 60}]}
CLIPS = {
    "clips": [
        {"clip": 1, "audio_s": 2.5, "seconds": 0.1, "errors": 1, "words": 9},
        {"clip": 2, "audio_s": 3.5, "seconds": 0.1, "errors": None, "words": None},
    ],
    "errors": 1,
    "words": 9,
    "wer": 0.1111,
}
BATCHED = {"requests": 64, "in_flight": 32, "audio_s": 450.0, "wall_s": 2.0, "rtfx": 225.0, "seconds": SPREAD}
OTHER = {**PATHS, "profile": "throughput.yaml, drafts", "start_s": 60.0, "upload_s": SPREAD}
PHASES = [{"name": "importing vLLM", "seconds": 9.0}, {"name": "starting the API", "seconds": 1.0}]
RESULTS = {
    "check": Result("failed", "a <b> & c", {"problems": ["too little <memory>"]}),
    "start": Result(
        "passed",
        "ready",
        {"phases": PHASES, "seconds": 10.0},
    ),
    "clips": Result("passed", "2 bundled clips", {"given_in_manifest": 2, "bundled": CLIPS, "given": CLIPS}),
    "delays": Result("passed", "quick", {"upload_s": SPREAD, "first_text_s": SPREAD, "batched": BATCHED, "live": LIVE}),
    "texts": Result("passed", "the same", PATHS),
    "live": Result(
        "passed", "holds 1", {"most": 2, "holds": 1, "stopped": "2", "levels": [LIVE, NO_LAG], "seconds_each": 15.0}
    ),
    "pauses": Result("passed", "silent", {"silence_s": 20.0, "words_within": 0, "errors_after": 0, "words_after": 9}),
    "hour": Result(
        "passed",
        "rolled over",
        {
            **{"audio_s": 900.0, "wall_s": 90.0, "times_real_time": 10.0, "rollovers": None, "context_s": 737.0},
            **{"wer": None, "errors_of_last_clip": None, "words_of_last_clip": None},
        },
    ),
    "memory": Result("passed", "much", {"peak_bytes": 2**34, "joules_per_audio_s": 0.8, "not_measured": None}),
    "refusals": Result(
        "passed",
        "bad file 400",
        {
            "requests": [
                {"request": "bad file", "expected": [400], "status": 400, "message": "no <audio>"},
                {"request": "wrong key", "expected": [401], "status": None, "message": "the server asks for no key"},
            ]
        },
    ),
    "sigterm": Result(
        "passed",
        "ended",
        {"running": 4, "done_before": 0, "finished": 4, "new_request": "503", "exit_status": 0, "ended_s": 3.2},
    ),
    "speculative": Result("passed", "the same, faster", OTHER),
    "stock": Result("passed", "the same, slower", OTHER),
}


# ---- The command


def prove(*words: object) -> int:
    return cli.run(["prove", *map(str, words)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name either --serve, to start a server, or --url"),
        (["--url", "http://a", "--serve", ROOT], "name either --serve, to start a server, or --url"),
        (["--serve", ROOT], "--serve needs --model"),
        (["--serve", "gone.yaml", "--model", ROOT], "--serve gone.yaml does not exist"),
        (["--url", "http://a", "--", "--enforce-eager"], "--model and options of vllm serve are for --serve"),
        (["--url", "http://a", "--enforce-eager"], "unrecognized arguments: --enforce-eager"),
    ],
)
def test_arguments_that_cannot_be_used(words: list[object], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        prove(*words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_profile_that_is_no_mapping(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("- a\n")
    assert prove("--serve", path, "--model", PICO, "--out", tmp_path / "out") == 2
    assert "is no mapping of options: expected a YAML file" in capsys.readouterr().err


def test_a_server_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All parts have an outcome, and the report has nothing of the address, the key and the folder."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert prove("--url", url, "--quick", "--out", tmp_path / "out") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:13]] == [
        ["failed" if name == "start" else "skipped", name] for name in NAMES
    ]
    assert lines[13].startswith("failed: 0 passed, 1 failed, 12 skipped")
    made = json.loads((tmp_path / "out/report.json").read_text())
    assert problems(made) == []
    for text in (json.dumps(made), (tmp_path / "out/report.html").read_text()):
        for secret in (KEY, url, "127.0.0.1", str(tmp_path), str(Path.home()), socket.gethostname()):
            assert secret not in text


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "voxtral_serve.prove.run", None)
    assert prove("--url", "http://127.0.0.1:1") == 2
    assert "pip install 'voxtral-serve[prove]'" in capsys.readouterr().err


def test_the_extra_has_what_prove_imports() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {re.match(r"[\w-]+", each)[0] for each in (*extras["prove"], *extras["client"])}  # type: ignore[index]
    found = {
        name or other
        for path in (*PROVE.glob("*.py"), *(PROVE.parent / "measure").glob("*.py"))
        for name, other in re.findall(r"^ *(?:from (\w+)[\w.]* import|import (\w+))", path.read_text(), re.MULTILINE)
    }
    distributions = {"pynvml": "nvidia-ml-py", "whisper_normalizer": "whisper-normalizer", "markupsafe": "jinja2"}
    known = set(sys.stdlib_module_names) | {"voxtral_serve", "yaml"}
    assert {distributions.get(name, name) for name in found - known} <= named
