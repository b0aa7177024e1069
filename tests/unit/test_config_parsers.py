"""The config parsers that replace vLLM's: which models they read themselves, and which the parser before them reads."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import PICO
from vllm.transformers_utils.config import MistralConfigParser

from voxtral_serve.engine.config import PARSERS, MistralLayout
from voxtral_serve.patches.config_hooks import ConfigParsers


class Omni(MistralConfigParser):
    """As vLLM-Omni registers one."""

    def parse(self, model: str | Path, *_: Any, **__: Any) -> Any:
        return ({"read_by": "omni"}, model)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """The parsers of a vLLM into which vLLM-Omni has put its own, after the patch."""
    monkeypatch.setattr(MistralLayout, "before", MistralConfigParser)
    found: dict[str, type] = dict.fromkeys(PARSERS, Omni)

    def register(name: str) -> Any:
        return lambda parser: found.__setitem__(name, parser)

    module = SimpleNamespace(
        __name__="vllm", get_config_parser=lambda name: found[name](), register_config_parser=register
    )
    assert ConfigParsers().probe(module)
    ConfigParsers().apply(module)
    assert not ConfigParsers().probe(module)
    return found


def test_other_models_are_left_to_the_parser_before(registered: dict[str, type], tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps({"model_type": "voxtral_tts", "dim": 64}))
    assert registered["mistral"]().parse(tmp_path, False) == ({"read_by": "omni"}, tmp_path)


def test_voxtral_realtime_is_not(registered: dict[str, type]) -> None:
    _, config = registered["mistral"]().parse(PICO, False)
    assert config.architectures == ["VoxtralRealtimeGeneration"]
