"""tools.hooks: versions.json has all hooks of the code, and the installed vLLM is as recorded there."""

import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from conftest import ROOT

from tools.hooks import __main__, objects, release, versions
from tools.hooks.source import Source
from tools.hooks.uses import Hooks, untyped_parameters

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
AGAIN = "run `python -m tools.hooks --record`"


@pytest.fixture(scope="module")
def hooks() -> Hooks:
    return Hooks(Source(release.installed()))


def test_all_that_the_code_uses_was_followed(hooks: Hooks) -> None:
    """An attribute of an object whose class is not known, a name made at run time, a name that vLLM lacks."""
    assert sorted(set(hooks.problems)) == [], "declare them in tools/hooks/objects.py"


def test_versions_json_has_every_hook_of_the_code(hooks: Hooks) -> None:
    for recorded in versions.read().values():
        assert set(hooks.uses) - set(recorded) == set(), AGAIN
        assert set(recorded) - set(hooks.uses) == set(), AGAIN


def test_the_installed_vllm_is_as_recorded(hooks: Hooks) -> None:
    recorded = versions.read()[release.installed_version()]
    found = __main__.facts_of(hooks, hooks.source)
    assert {path: facts for path, facts in found.items() if facts != recorded.get(path)} == {}, AGAIN


def test_what_a_parameter_without_a_type_is_was_declared() -> None:
    """`module` is the target of a patch."""
    known = objects.NAMES
    lacking = {
        (module, function, name)
        for module, function, name in untyped_parameters()
        if name != "module" and not any(name in known.get(key, {}) for key in (module, f"{module}.{function}"))
    }
    assert lacking == set(), "declare them in tools/hooks/objects.py"


def test_the_hooks_of_each_kind_are_found(hooks: Hooks) -> None:
    """One of each that would be easy to lose: `hows` are those of the first that was written by hand."""
    hows = {
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": {"override", "read"},
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._preprocess": {"override", "read"},
        "vllm.v1.worker.gpu_worker:Worker.sample_tokens": {"read", "set"},
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs": {"read", "set"},
        "vllm.v1.request:Request.max_tokens": {"read", "set"},
        "vllm.model_executor.models.mistral:MistralDecoderLayer.ada_rms_norm_t_cond": {"read", "set"},
        "vllm.sampling_params:SamplingParams.ignore_eos": {"call"},
        "state:openai_serving_models": {"read"},
    }
    found = {path: {use.how for use in hooks.uses[path]} for path in hows}
    assert {path for path, how in hows.items() if not how <= found[path]} == set()


def edited(source: str, *changes: tuple[str, str]) -> Source:
    """The installed vLLM with one file changed."""
    files = release.installed()
    content = files[source]
    for old, new in changes:
        assert old in content
        content = content.replace(old, new)
    return Source(release.Files({**files._found, source: content.encode()}))


def test_each_kind_of_change_is_told(hooks: Hooks) -> None:
    changed = edited(
        SCHEDULER,
        ("def _preempt_request(", "def _evict_request("),
        (
            "def _free_request(\n        self, request: Request",
            "def _free_request(\n        self, request: Request, why: str",
        ),
        (
            "    def get_num_unfinished_requests(self) -> int:\n",
            "    def get_num_unfinished_requests(self):\n        1\n",
        ),
        (
            "    def add_request(self, request: Request) -> None:\n",
            "    def add_request(self, request: Request) -> None:\n        # No change\n        'It is said.'\n",
        ),
    )
    found = versions.changes(hooks, __main__.facts_of(hooks, hooks.source), __main__.facts_of(hooks, changed))
    of_scheduler = {each.path.rpartition(".")[2]: each for each in found if ":Scheduler." in each.path}
    assert {name: each.what for name, each in of_scheduler.items()} == {
        "_preempt_request": versions.MISSING,
        "_free_request": versions.SIGNATURE,
        "get_num_unfinished_requests": versions.BODY,
    }
    assert [of_scheduler[name].fails for name in ("_preempt_request", "_free_request")] == [True, True]
    assert not of_scheduler["get_num_unfinished_requests"].fails


def test_nothing_of_the_newest_recorded_version_is_missing(hooks: Hooks) -> None:
    """docs/pages/install.md says so of 0.33.0, with these counts."""
    recorded = versions.read()
    assert list(recorded) == ["0.20.0", "0.32.0", "0.33.0"]
    found = versions.changes(hooks, recorded["0.32.0"], recorded["0.33.0"])
    assert [change for change in found if change.what != versions.BODY] == []
    page = " ".join((ROOT / "docs/pages/install.md").read_text().split())
    assert (
        f"of {len(hooks.uses)} hooks, {len(hooks.uses) - len(found)} are unchanged, {len(found)} have another" in page
    )


class Index(BaseHTTPRequestHandler):
    """A package index with one release; `ranges`: whether it answers range requests."""

    files: ClassVar[dict[str, bytes]] = {}
    ranges = True
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if not name:
            port = self.server.server_address[1]
            listed = [
                {"filename": name, "url": f"http://127.0.0.1:{port}/{name}", "size": len(content)}
                for name, content in self.files.items()
            ]
            return self.answer(200, json.dumps({"files": listed}).encode(), release.SIMPLE)
        content = self.files[name]
        type(self).asked.append(name)
        asked = self.headers.get("Range")
        if asked and self.ranges:
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            return self.answer(206, content[first : last + 1])
        return self.answer(200, content)

    def answer(self, status: int, content: bytes, kind: str = "application/octet-stream") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Index]]:
    wheel, sdist = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/request.py", "of = 'wheel'")
        archive.writestr("vllm/_C.so", bytes(3 << 20))
    with tarfile.open(fileobj=sdist, mode="w:gz") as tar:
        content = b"of = 'sdist'"
        for name in ("vllm-9.9.9/vllm/request.py", "vllm-9.9.9/setup.py"):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    files = {"vllm-9.9.9-cp38-abi3-x86_64.whl": wheel.getvalue(), "vllm-9.9.9.tar.gz": sdist.getvalue()}
    handler = type("Handler", (Index,), {"files": files, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple/")
    yield handler
    server.shutdown()
    server.server_close()


def test_only_the_python_files_of_a_wheel_are_read(index: type[Index]) -> None:
    files = release.read("9.9.9")
    assert {name: files[name] for name in files} == {"vllm/request.py": "of = 'wheel'"}


def test_an_index_without_ranges(index: type[Index], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "ranges", False)
    files = release.read("9.9.9")
    assert {name: files[name] for name in files} == {"vllm/request.py": "of = 'sdist'"}
    assert index.asked[-1].endswith(".tar.gz")


def test_a_version_that_the_index_lacks(index: type[Index]) -> None:
    with pytest.raises(release.ReleaseError, match=r"has no file of vllm 9\.9\.8"):
        release.read("9.9.8")
