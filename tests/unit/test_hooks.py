"""tools.hooks: hooks.json has what the code uses of vLLM, and the installed vLLM is as recorded there."""

from importlib.metadata import version
from pathlib import Path

import pytest

from tools import hooks

RECORD = "edit tools/hooks.json, or run `python -m tools.hooks --record VERSION`"
MODULE = """
from vllm.base import Base

class Worker(Base):
    size: int = 1

    def __init__(self, config: object) -> None:
        self.config, self.model = config, None

    async def run(self, steps: int = 1) -> None: ...
"""


@pytest.fixture
def source(tmp_path: Path) -> hooks.Source:
    files = {
        "base.py": "class Base:\n    @property\n    def name(self): ...\n",
        "worker.py": MODULE,
        "__init__.py": "from vllm.worker import Worker as Runner\n",
        "entrypoints/server.py": "def start(state):\n    state.engine: object = 1\n",
    }
    for name, content in files.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return hooks.Source(tmp_path / "vllm")


@pytest.mark.parametrize(
    ("path", "signature"),
    [
        ("vllm.worker", "module"),
        ("vllm.worker:Worker", "class(Base)"),
        ("vllm:Runner.run", "async (self, steps=1)"),
        ("vllm.worker:Worker.name", "property (self)"),
        ("vllm.worker:Worker.size", "attribute"),
        ("vllm.worker:Worker.model", "attribute"),
        ("vllm.worker:Worker.gone", None),
        ("vllm.gone:Worker", None),
        ("state:engine", "attribute"),
        ("state:gone", None),
    ],
)
def test_a_signature(source: hooks.Source, path: str, signature: str | None) -> None:
    assert source.signature(path) == signature


def test_the_installed_vllm_is_as_recorded() -> None:
    source = hooks.Source(hooks.installed())
    recorded = hooks.read()[version("vllm").partition("+")[0]]
    assert {path: source.signature(path) for path in recorded} == recorded, RECORD


def test_every_import_is_recorded() -> None:
    for recorded in hooks.read().values():
        assert hooks.imported() <= set(recorded), RECORD
