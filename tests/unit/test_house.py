"""What each room of the repository may import, and how long a function may be. Read with `ast`; nothing is imported."""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from imports import Imports, room_of
from places import ROOT

MODEL_LIBRARIES = ("torch", "transformers", "vllm")
NAMES = (
    "voxtral_serve.engine.clip_length",
    "voxtral_serve.engine.keywords",
    "voxtral_serve.engine.names",
    "voxtral_serve.engine.session",
)  # what a session is: shapes, names


class Rule(NamedTuple):
    """What a room may import of this repository besides itself, and what never of others."""

    reason: str
    may: tuple[str, ...] = ()  # modules, and all below them
    never: tuple[str, ...] = ()
    standard_library: bool = False  # at module level; inside functions anything


# A room is a folder or a module of voxtral_serve, or a package at the root; a longer name is an exception within one.
HOUSE = {
    "voxtral_serve": Rule("Python runs its __init__ at every start.", standard_library=True),
    "voxtral_serve.shims": Rule("It runs alone, as sitecustomize.py, at every start.", standard_library=True),
    "voxtral_serve.units": Rule("Numbers that all rooms use.", standard_library=True),
    "voxtral_serve.keys": Rule("The file of API keys, which the server and `check` read."),
    "voxtral_serve.logs": Rule("Lines of the log, in every process of vLLM.", standard_library=True),
    "voxtral_serve.checkpoint": Rule(
        "It reads files before anything heavy is imported.", ("voxtral_serve.units",), standard_library=True
    ),
    "voxtral_serve.patches": Rule(
        "They load before the libraries that they change.",
        ("voxtral_serve.engine", "voxtral_serve.shims", "voxtral_serve.units"),
        standard_library=True,
    ),
    "voxtral_serve.engine": Rule(
        "It runs in vLLM's engine, which serves without HTTP.",
        ("voxtral_serve.checkpoint", "voxtral_serve.shims", "voxtral_serve.units"),
    ),
    "voxtral_serve.audio": Rule("Sound alone, whatever transcribes it.", ("voxtral_serve.units",)),
    "voxtral_serve.speakers": Rule(
        "Sound and times alone, in a process without vLLM.",
        ("voxtral_serve.audio.decode_worker",),
        never=("transformers", "vllm"),
    ),
    "voxtral_serve.transcript": Rule(
        "Text and times, whatever server they come from.", ("voxtral_serve.audio", "voxtral_serve.units")
    ),
    "voxtral_serve.guard": Rule(
        "It runs in vLLM's API server, without the engine's code.",
        (
            *("voxtral_serve.audio", "voxtral_serve.speakers", "voxtral_serve.transcript"),
            *("voxtral_serve.shims", "voxtral_serve.units"),
            *("voxtral_serve.keys", "voxtral_serve.logs"),
            *("voxtral_serve.patches.live_server", *NAMES),  # the records of what it sets on live objects
        ),
    ),
    "voxtral_serve.measure": Rule(
        "`bench` runs with it alone, without the rest of the package.", never=MODEL_LIBRARIES
    ),
    "voxtral_serve.client": Rule(
        "It is installed where there is no server.",
        ("voxtral_serve.measure", "voxtral_serve.transcript.subtitles"),
        never=MODEL_LIBRARIES,
    ),
    "voxtral_serve.batch": Rule(
        "It sends files to servers, as a client does; vLLM runs in other processes.",
        ("voxtral_serve.client", "voxtral_serve.measure", "voxtral_serve.transcript"),
        never=MODEL_LIBRARIES,
    ),
    "voxtral_serve.check": Rule(
        "It asks the installation; it runs no engine and no server.",
        (
            *("voxtral_serve.checkpoint", "voxtral_serve.patches", "voxtral_serve.plugin", "voxtral_serve.shims"),
            *("voxtral_serve.keys", "voxtral_serve.logs", "voxtral_serve.units", *NAMES),
        ),
    ),
    "voxtral_serve.prove": Rule(
        "It judges a server from outside, as its clients see it; vLLM runs in other processes.",
        ("voxtral_serve.check", "voxtral_serve.checkpoint", "voxtral_serve.client", "voxtral_serve.measure"),
        never=MODEL_LIBRARIES,
    ),
    "voxtral_serve.draft": Rule(
        "It trains beside the engine, on files, without a server.",
        (
            *("voxtral_serve.audio", "voxtral_serve.checkpoint", "voxtral_serve.engine", "voxtral_serve.shims"),
            *("voxtral_serve.client.errors", "voxtral_serve.client.files", "voxtral_serve.client.text"),
        ),
    ),
    "voxtral_serve.deploy": Rule("It runs around a server, as probes that take no time.", standard_library=True),
    "voxtral_serve.plugin": Rule(
        "vLLM passes over an error in importing it.",
        ("voxtral_serve.engine", "voxtral_serve.logs", "voxtral_serve.patches", "voxtral_serve.shims"),
        standard_library=True,
    ),
    "voxtral_serve.cli": Rule(
        "A front: `transcribe` needs no vLLM, and `check` no client.",
        (
            *("voxtral_serve.batch", "voxtral_serve.check", "voxtral_serve.client", "voxtral_serve.deploy"),
            *("voxtral_serve.draft", "voxtral_serve.prove", "voxtral_serve.speakers"),
        ),
        standard_library=True,
    ),
    "voxtral_serve.realtime": Rule("A name that configs use.", ("voxtral_serve.guard",)),
    "voxtral_serve.drafter": Rule("A name that configs use.", ("voxtral_serve.engine",)),
    "bench": Rule("It measures any server from outside.", ("mistral_layout",), never=MODEL_LIBRARIES),
    "pico": Rule("The independent reference of the model.", ("mistral_layout",), never=("vllm",)),
    "bench.gpu.kernels": Rule("It times the engine's kernels.", ("voxtral_serve", "bench", "mistral_layout")),
    "bench.gpu.head": Rule(
        "Its drafters are those of the engine, and their rows those of the reference.",
        ("bench", "pico", "voxtral_serve.engine.draft_network", "mistral_layout"),
        never=("vllm",),
    ),
    "bench.speakers": Rule(
        "It scores the labels themselves, as the server's process makes them.",
        ("bench", "voxtral_serve.audio", "voxtral_serve.guard.labeller", "voxtral_serve.speakers"),
        never=("transformers", "vllm"),
    ),
    "bench.gpu.speech_checkpoint": Rule("PyTorch makes the numbers.", ("bench", "mistral_layout"), never=("vllm",)),
    "bench.gpu.voxcpm2_checkpoint": Rule("PyTorch makes the numbers.", ("bench", "voxtral_serve.check")),
    "pico.evaluate": Rule("It scores as the benchmark does.", ("bench", "mistral_layout"), never=("vllm",)),
    "pico.hearing": Rule("It scores as the benchmark does.", ("bench", "mistral_layout"), never=("vllm",)),
    "pico.keywords": Rule(
        "It takes the engine's rule, and scores as the benchmark does.",
        ("bench", "mistral_layout", "voxtral_serve.engine.keywords"),
        never=("vllm",),
    ),
    "pico.damage": Rule("It scores as the benchmark does.", ("bench", "mistral_layout"), never=("vllm",)),
    "mistral_layout": Rule("Below both writers of a checkpoint.", never=MODEL_LIBRARIES, standard_library=True),
    "tools": Rule("They compare all of it.", ("voxtral_serve", "bench", "pico", "mistral_layout")),
}

LONGEST = 60  # lines of a function, from `def` to its end
TABLES = {("tests/support/inputs.py", "chats"): "one request after the other, each with what must come of it"}


class House(Imports):
    """The rooms of a repository, and which imports break their rules."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.tops = {name.partition(".")[0] for name in self.paths}
        # tests/ and folders in it are on pytest's path, so their modules have short names as well.
        self.tests = {"tests", *(path.stem for path in (root / "tests").rglob("*") if path.suffix in ("", ".py"))}
        self.tests -= self.tops | sys.stdlib_module_names

    def violations(self, room: str) -> Iterator[str]:
        """Each import in this room of the table that its rule forbids."""
        rule = HOUSE[room]
        for module, imports in self.imports.items():
            if holder(module, HOUSE) != room or (room == "voxtral_serve" and module != room):
                continue
            # voxtral_serve/__init__.py may not import what lies below it.
            allowed = (*rule.may, *(() if module == "voxtral_serve" else (room_of(module),)))
            for each in imports:
                top = each.name.partition(".")[0]
                forbidden = top in rule.never or top in self.tests
                # The package itself is its version, which any of its rooms may tell.
                version = each.name == module.partition(".")[0]
                forbidden |= top in self.tops and not version and holder(each.name, allowed) is None
                heavy = list(self._heavy(each.name)) if rule.standard_library and each.at_module_level else []
                if forbidden or heavy:
                    why = f", and so {heavy[0]}, at module level" if heavy else ""
                    file = self.paths[module].relative_to(self.root)
                    yield f"{file}:{each.line} imports {each.name}{why}. {rule.reason}"

    def _heavy(self, name: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
        """Modules that are not of the standard library and are imported with this one, or with its packages."""
        parts = name.split(".")
        if parts[0] not in self.tops and parts[0] not in sys.stdlib_module_names:
            yield name
        for module in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            if module in self.paths and module not in seen:
                for each in self.imports[module]:
                    if each.at_module_level:
                        yield from self._heavy(each.name, seen | {module})

    def circles(self, room: str) -> list[str]:
        """Circles of imports between the modules of a room; those inside functions count."""
        graph: dict[str, set[str]] = {}
        for module, imports in self.imports.items():
            if room_of(module) == room:
                graph[module] = {name for name, *_ in imports if room_of(name) == room and name != module}
        return circles_of(graph)

    def circles_of_rooms(self) -> list[str]:
        """Circles of imports between the rooms of voxtral_serve; those inside functions count."""
        return circles_of(
            {room: others for room, others in self.of_rooms().items() if room.startswith("voxtral_serve")}
        )

    def long_functions(self) -> Iterator[str]:
        """Functions of more than LONGEST lines that are not among TABLES."""
        for module, tree in self.trees.items():
            file = str(self.paths[module].relative_to(self.root))
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (file, node.name) not in TABLES:
                    lines = (node.end_lineno or node.lineno) - node.lineno + 1
                    if lines > LONGEST:
                        yield f"{file}: {node.name} has {lines} lines"


def holder(module: str, packages: Iterable[str]) -> str | None:
    """The longest of these names that is the module's or that of a package around it."""
    return max((each for each in packages if f"{module}.".startswith(f"{each}.")), key=len, default=None)


def circles_of(graph: Mapping[str, set[str]]) -> list[str]:
    """A shortest circle through each name that is the first in one, by the alphabet."""
    found = []
    for start in sorted(graph):
        ways, seen = [[start]], {start}
        for way in ways:
            following = graph.get(way[-1], set())
            if start in following and start == min(way):
                found.append(" -> ".join([*way, start]))
                break
            ways += [[*way, name] for name in sorted(following - seen)]
            seen |= following
    return found


@pytest.fixture(scope="module")
def house() -> House:
    return House(ROOT)


def test_every_room_is_in_the_table_and_none_that_is_gone(house: House) -> None:
    assert {room_of(module) for module in house.paths} - set(HOUSE) == set()
    assert set(HOUSE) - set(house.paths) == set()


@pytest.mark.parametrize("room", HOUSE)
def test_a_room_imports_what_it_may(house: House, room: str) -> None:
    assert list(house.violations(room)) == []


@pytest.mark.parametrize("room", sorted({room_of(room) for room in HOUSE}))
def test_no_circle_in_a_room(house: House, room: str) -> None:
    assert house.circles(room) == []


def test_no_circle_of_rooms(house: House) -> None:
    assert house.circles_of_rooms() == []


def test_names_of_test_files_are_unique() -> None:
    """pytest imports each as a top-level module, except in a package: `pytest tests` ends if two have one name."""
    files = (ROOT / "tests").glob("*/test_*.py")
    names = [path.name for path in files if not (path.parent / "__init__.py").exists()]
    assert names and sorted(names) == sorted(set(names))


def test_no_function_is_longer_than_a_page(house: House) -> None:
    assert list(house.long_functions()) == []
    for file, name in TABLES:  # nor is one excused that is short, or gone
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        (table,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
        assert table.end_lineno is not None and table.end_lineno - table.lineno >= LONGEST


# ---- Each rule can fail: small trees with one import each


def tree(root: Path, files: Mapping[str, str]) -> House:
    """Every room of the table, empty, with these files in it."""
    for room in HOUSE:
        place = root / ("src" if room.startswith("voxtral_serve") else "") / room.replace(".", "/")
        place.mkdir(parents=True, exist_ok=True)
        (place / "__init__.py").touch()
    for name in (
        "engine/names",
        "engine/clip_length",
        "engine/config",
        "shims",
        "patches/clip_end",
        "patches/live_server",
    ):
        files = {f"src/voxtral_serve/{name}.py": "", **files}
    for name, source in {"tests/unit/test_a.py": "", "tests/uploads.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return House(root)


S = "src/voxtral_serve"
INSIDE = "def f():\n    "
FORBIDDEN = [
    *((f"{S}/engine/a.py", f"import voxtral_serve.{room}") for room in ("guard", "client", "check", "patches")),
    (f"{S}/engine/a.py", f"{INSIDE}from voxtral_serve.guard import live"),
    (f"{S}/engine/a.py", "from ..check import report"),
    (f"{S}/guard/a.py", "from voxtral_serve.engine import config"),
    (f"{S}/guard/a.py", "from voxtral_serve import engine"),
    (f"{S}/guard/a.py", "from voxtral_serve.patches import clip_end"),
    (f"{S}/guard/a.py", "import voxtral_serve.client.server"),
    *((f"{S}/audio/a.py", f"from voxtral_serve.{room} import a") for room in ("guard", "transcript", "engine")),
    *((f"{S}/transcript/a.py", f"from voxtral_serve import {room}") for room in ("guard", "engine")),
    *((f"{S}/client/a.py", f"{INSIDE}import {name}") for name in (*MODEL_LIBRARIES, "torch.nn", "bench.client")),
    (f"{S}/client/a.py", "from voxtral_serve.audio import decode"),
    (f"{S}/client/a.py", f"{INSIDE}from voxtral_serve.batch import a"),
    *(
        (f"{S}/batch/a.py", f"{INSIDE}import {name}")
        for name in (*MODEL_LIBRARIES, "bench.serve", "voxtral_serve.guard")
    ),
    *((f"{S}/measure/a.py", f"import {name}") for name in (*MODEL_LIBRARIES, "bench.client", "voxtral_serve.units")),
    (f"{S}/measure/a.py", f"{INSIDE}from ..client import server"),
    *(("bench/a.py", f"import {name}") for name in (*MODEL_LIBRARIES, "voxtral_serve.units", "pico.model")),
    *(
        (f"{S}/prove/a.py", f"{INSIDE}import {name}")
        for name in (*MODEL_LIBRARIES, "bench.serve", "voxtral_serve.batch")
    ),
    *((f"{S}/draft/a.py", f"import voxtral_serve.{room}") for room in ("guard", "check", "client.server")),
    ("bench/gpu/a.py", f"{INSIDE}from pico.tokenizer import AUDIO"),
    ("bench/a.py", f"from importlib import import_module\n{INSIDE}import_module('vllm.config')"),
    ("bench/a.py", "import importlib\nimportlib.import_module('voxtral_serve.client.server')"),
    ("bench/a.py", "__import__('torch')"),
    *(("pico/a.py", f"{INSIDE}import {name}") for name in ("vllm", "voxtral_serve.engine.names", "bench.metrics")),
    ("pico/train.py", "from bench.gpu import checkpoint"),
    ("pico/evaluate.py", "from voxtral_serve import checkpoint"),
    ("pico/damage.py", "import vllm"),
    ("mistral_layout/a.py", "from pico import model"),
    ("mistral_layout/a.py", "import numpy"),
    *((f"{S}/{room}/a.py", "import yaml") for room in ("checkpoint", "patches")),
    (f"{S}/checkpoint/a.py", "class A:\n    import numpy"),
    (f"{S}/checkpoint/a.py", "try:\n    import numpy\nexcept ImportError:\n    pass"),
    (f"{S}/checkpoint/a.py", f"{INSIDE}from voxtral_serve.engine import names"),
    (f"{S}/check/a.py", "from voxtral_serve.engine import config"),
    (f"{S}/check/a.py", "from voxtral_serve.guard import limits"),
    (f"{S}/plugin.py", "import vllm"),
    (f"{S}/cli.py", "import requests"),
    (f"{S}/cli.py", f"{INSIDE}from voxtral_serve.engine import names"),
    (f"{S}/units.py", "import numpy"),
    (f"{S}/__init__.py", "from voxtral_serve import units"),
    (f"{S}/shims.py", "import transformers"),
    (f"{S}/drafter.py", "from voxtral_serve.guard import live"),
    (f"{S}/realtime.py", "from voxtral_serve.engine import drafter"),
    *((f"{place}/a.py", "import tests.uploads") for place in (f"{S}/guard", "bench", "pico", "tools")),
    ("tools/a.py", f"{INSIDE}from uploads import upload"),
    ("bench/a.py", "from unit.test_a import run"),
]


def test_forbidden_imports_are_found(tmp_path: Path) -> None:
    """Each in a file of its own, all in one tree."""
    files = {
        file.replace("/a.py", f"/a{number}.py"): source
        for number, (file, source) in enumerate(FORBIDDEN)
        if file.endswith("/a.py")
    }
    grown = tree(tmp_path, files)
    found = [each.partition(":")[0] for room in HOUSE for each in grown.violations(room)]
    assert sorted(found) == sorted(files)


@pytest.mark.parametrize(("file", "source"), [pair for pair in FORBIDDEN if not pair[0].endswith("/a.py")])
def test_a_forbidden_import_of_a_module_is_found(tmp_path: Path, file: str, source: str) -> None:
    found = [each for room in HOUSE for each in tree(tmp_path, {file: source}).violations(room)]
    assert len(found) == 1
    assert found[0].startswith(f"{file}:")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (f"{S}/guard/a.py", "from voxtral_serve.engine import clip_length, names\nimport starlette"),
        (f"{S}/guard/a.py", "from voxtral_serve.engine.names import REALTIME\nfrom . import b"),
        (f"{S}/guard/a.py", "from voxtral_serve.patches import live_server"),
        (f"{S}/patches/a.py", f"from voxtral_serve import shims\n{INSIDE}import vllm\n    import yaml"),
        (f"{S}/checkpoint/a.py", f"import json\n{INSIDE}import numpy"),
        (f"{S}/cli.py", f"from voxtral_serve.client import jobs\n{INSIDE}from voxtral_serve.client import server"),
        ("pico/evaluate.py", "from bench import metrics\nimport torch"),
        ("tools/a.py", "import vllm, bench.client, pico.model, voxtral_serve.engine.config"),
        ("bench/a.py", "import_module(name)"),
        ("bench/a.py", "from bench.measure import engine"),
        (f"{S}/prove/a.py", "from voxtral_serve.measure import engine"),
        (f"{S}/measure/a.py", "from . import b\nfrom .b import c\nimport requests"),
    ],
)
def test_an_import_that_is_allowed(tmp_path: Path, file: str, source: str) -> None:
    assert [each for room in HOUSE for each in tree(tmp_path, {file: source}).violations(room)] == []


@pytest.mark.parametrize("between", ["engine/names.py", "engine/__init__.py", "__init__.py"])
def test_what_comes_with_an_import_counts(tmp_path: Path, between: str) -> None:
    """Patches may import engine.names, unless that imports torch, or a package around it does."""
    made = tree(
        tmp_path,
        {f"{S}/{between}": "import torch", f"{S}/patches/a.py": "from voxtral_serve.engine.names import STOCK"},
    )
    assert ["names, and so torch, at module level" in each for each in made.violations("voxtral_serve.patches")] == [
        True
    ]


def test_a_room_that_is_not_in_the_table(tmp_path: Path) -> None:
    made = tree(tmp_path, {f"{S}/radio/__init__.py": "", f"{S}/extra.py": "", "lab/__init__.py": ""})
    rooms = {room_of(module) for module in made.paths}
    assert rooms - set(HOUSE) == {"voxtral_serve.radio", "voxtral_serve.extra", "lab"}


def test_circles(tmp_path: Path) -> None:
    made = tree(
        tmp_path,
        {
            "bench/a.py": "from bench import b",
            "bench/b.py": "import bench.c",
            "bench/c.py": f"{INSIDE}from bench.a import run",
            "bench/d.py": "from bench import a",
            f"{S}/checkpoint/__init__.py": "from voxtral_serve.checkpoint.reading import read",
            f"{S}/checkpoint/reading.py": "from voxtral_serve.checkpoint import CheckpointError",
            f"{S}/audio/a.py": f"{INSIDE}import voxtral_serve.transcript",
            f"{S}/transcript/a.py": "from voxtral_serve.audio import b",
        },
    )
    assert made.circles("bench") == ["bench.a -> bench.b -> bench.c -> bench.a"]
    package = "voxtral_serve.checkpoint"
    assert made.circles(package) == [f"{package} -> {package}.reading -> {package}"]
    assert made.circles("pico") == []
    assert made.circles_of_rooms() == ["voxtral_serve.audio -> voxtral_serve.transcript -> voxtral_serve.audio"]


def test_a_long_function(tmp_path: Path) -> None:
    body = "    pass\n"
    made = tree(
        tmp_path,
        {
            "tools/a.py": f"def short():\n{body * 59}",
            "bench/a.py": f"class A:\n    async def far(self):\n{('    ' + body) * 60}",
        },
    )
    assert list(made.long_functions()) == ["bench/a.py: far has 61 lines"]
