"""Voxtral-Mini-3B-2507 and Whisper, with random weights, on vLLM 0.20.0: each starts with its profile and answers.

tests/server/test_other_models.py asks for more of them, of vLLM 0.32.0.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from places import DATA, ROOT

from bench.measure import engine
from pico import others

FLAGS = ("--enforce-eager", "--gpu-memory-utilization", "0.3")


@pytest.mark.parametrize(
    ("name", "write"), [("voxtral-3b", others.write_voxtral_3b), ("whisper", others.write_whisper)]
)
def test_a_transcription_and_a_chat(name: str, write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "checkpoint")
    port = engine.free_port()
    with engine.served(ROOT / f"profiles/{name}.yaml", tmp_path / "checkpoint", port, tmp_path / "server.log", *FLAGS):
        answers = [
            requests.post(
                f"http://127.0.0.1:{port}/v1/audio/transcriptions",
                files={"file": ("001.opus", (DATA / "clips/001.opus").read_bytes())},
                data={"model": "whisper-1", "language": "en", "max_completion_tokens": 8, "response_format": form},
                timeout=120,
            )
            for form in ("json", "text")
        ]
        asked = {"model": "whisper-1", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        chat = requests.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=asked, timeout=120)
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    if name == "whisper":
        assert (chat.status_code, chat.json()["error"]["code"]) == (400, "no_chat")
    else:
        assert chat.json()["choices"][0]["message"]["content"].strip()
    text = answers[0].json()["text"]
    assert text.strip()
    assert answers[1].text == text.strip() + "\n"
