"""`python -m bench delays`: each clip at each delay, in turn, with vLLM's counts of tokens."""

import json
from pathlib import Path

import pytest
from fakeserver import Answer, FakeServer, write_dataset

from bench import delays
from bench.__main__ import main

TEXTS = {"a": "hello world", "b": "good morning", "c": "good evening"}


def command(server: FakeServer, folder: Path, *more: str) -> list[str]:
    data = write_dataset(folder / "data", TEXTS)
    return ["delays", "--url", server.url, "--dataset", str(data), "--out", str(folder / "delays.json"), *more]


def counting(server: FakeServer, per_position: int) -> None:
    """Tokens as vLLM counts them: of two counters, more for a longer delay."""

    def text() -> str:
        sent = [int(each.fields["target_streaming_delay_ms"]) // 80 for each in server.received]
        prompt = sum(33 + per_position * delay for delay in sent)
        return (
            "# TYPE vllm:prompt_tokens counter\n"
            f'vllm:prompt_tokens_total{{engine="0"}} {prompt}\n'
            "# TYPE vllm:generation_tokens counter\n"
            f'vllm:generation_tokens_total{{engine="0"}} {10 * len(sent)}\n'
        )

    server.metrics = text


def test_a_row_for_each_delay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {"a.wav": Answer("hello world"), "b.wav": Answer("good mourning"), "c.wav": Answer("good evening")}
    with FakeServer(answers) as server:
        counting(server, 2)
        assert main(command(server, tmp_path, "--delays", "480", "2400")) == 0
        sent = [(each.name, each.fields["target_streaming_delay_ms"]) for each in server.received]
    assert sent[2:] == [(f"{name}.wav", delay) for name in TEXTS for delay in ("480", "2400")]
    content = json.loads((tmp_path / "delays.json").read_text())
    assert [(row["delay_ms"], row["tokens"], row["words"]) for row in content["rows"]] == [(480, 55, 6), (2400, 103, 6)]
    assert {row["wer"] for row in content["rows"]} == {1 / 6}
    assert "| 2,400 ms | 16.67% |" in capsys.readouterr().out


def test_what_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(default=Answer("hello world")) as server:
        line = command(server, tmp_path)
        assert main(line) == 2
        assert "/metrics has no vllm:prompt_tokens_total" in capsys.readouterr().err
        counting(server, 0)
        assert main(line) == 2
        assert "The server has one delay" in capsys.readouterr().err
        server.answers = {"b.wav": Answer(status=400, body=b"{}")}
        assert main(line) == 2
        assert "b at 480 ms: HTTP 400" in capsys.readouterr().err
    assert not (tmp_path / delays.OUT).exists() and not (tmp_path / "delays.json").exists()
