"""vLLM 0.20.0 is as tools/hooks.json has it."""

from importlib.metadata import version

from tools import hooks


def test_the_installed_vllm_is_as_recorded() -> None:
    source = hooks.Source(hooks.installed())
    recorded = hooks.read()[version("vllm").partition("+")[0]]
    assert {path: source.signature(path) for path in recorded} == recorded
    assert sum(signature is not None for signature in recorded.values()) > len(recorded) / 2
