"""vLLM 0.20.0 is as tools/hooks/versions.json has it. Without the hooks' derivation, which needs the newest vLLM."""

from tools.hooks import release, versions
from tools.hooks.source import Source


def test_the_installed_vllm_is_as_recorded() -> None:
    recorded = versions.read()[release.installed_version()]
    source = Source(release.installed())
    found = {
        path: source.facts(path, whole=facts is not None and facts.body is not None) for path, facts in recorded.items()
    }
    assert {path: facts for path, facts in found.items() if facts != recorded[path]} == {}
    assert sum(facts is not None for facts in found.values()) > len(found) / 2
