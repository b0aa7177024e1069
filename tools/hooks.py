"""The names of vLLM that voxtral-serve uses, with their signatures in each version of vLLM that it was tried with.

    python -m tools.hooks                        compare the installed vLLM with hooks.json
    python -m tools.hooks unpacked/vllm          compare another one, such as the package of an unpacked wheel
    python -m tools.hooks unpacked/vllm --record 0.34.0    write its signatures into hooks.json

Only the Python files are read: no GPU is needed, and nothing is imported. `hooks.json` has the signatures of each
path, in the order of `versions`: null where that version lacks it, "=" where it is that of the version before.
`vllm.v1.request` is a module, and `vllm.v1.request:Request.max_tokens` a member of a class, of its bases, or an
attribute that its methods set. `state:engine_client` is an attribute of the state of vLLM's server. `--record` adds the
names that voxtral-serve imports; others are added by hand, with an empty list. Exit status 1 if a name is missing or
has another signature.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path

RECORD = Path(__file__).with_name("hooks.json")
OWN = Path(__file__).resolve().parents[1] / "src/voxtral_serve"
SAME = "="  # as in the version before
Signatures = dict[str, str | None]
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Where other versions have the names of a module: the code tries both places.
ALSO_IN = {
    "vllm.entrypoints.launchers.cli_args": ("vllm.entrypoints.openai.cli_args", "vllm.entrypoints.common.cli_args"),
    "vllm.entrypoints.speech_to_text.transcription.serving": ("vllm.entrypoints.openai.speech_to_text.serving",),
    "vllm.v1.core.kv_cache_utils": ("vllm.v1.core.kv_cache_planning",),
}


def installed() -> Path:
    """The folder of the installed package vllm."""
    return Path(str(distribution("vllm").locate_file("vllm")))


class Source:
    """The Python files of one vLLM. `folder` is that of its package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = cache(self._tree)

    def signature(self, path: str) -> str | None:
        """The parameters of a function, the bases of a class, `attribute` or `module`; None for what it lacks."""
        module, _, name = path.partition(":")
        if module == "state":
            return "attribute" if name in self.state() else None
        for place in (module, *ALSO_IN.get(module, ())):
            if not name and self.tree(place) is not None:
                return "module"
            if (node := self.find(place, name)) is not None:
                return described(node)
        return None

    def _tree(self, module: str) -> ast.Module | None:
        path = self.folder.parent / module.replace(".", "/")
        file = next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
        return None if file is None else ast.parse(file.read_text(encoding="utf-8"))

    def find(self, module: str, name: str) -> ast.AST | None:
        """The node that defines a name, or a member of a class, of a module. Imports within vLLM are followed."""
        owner, _, member = name.partition(".")
        found = self.defined(module, owner)
        return found and (self.member(*found, member) if member else found[1])

    def defined(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """(the module that defines it, its node)."""
        for node in statements(self.tree(module) or ast.Module([], [])):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name) or alias.name == "*":
                        origin = self.absolute(module, node)
                        wanted = name if alias.name == "*" else alias.name
                        if origin != module and (found := self.defined(origin, wanted)):
                            return found
                        if (tree := self.tree(f"{origin}.{wanted}")) is not None:
                            return f"{origin}.{wanted}", tree
                        if alias.name != "*" and not origin.startswith("vllm"):
                            return module, node
            elif name in names(node):
                return module, node
        submodule = self.tree(f"{module}.{name}")
        return (f"{module}.{name}", submodule) if submodule is not None else None

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = (self.folder.parent / module.replace(".", "/") / "__init__.py").is_file()
        parts = module.split(".")[: None if package and node.level == 1 else (1 if package else 0) - node.level]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def member(self, module: str, owner: ast.AST, name: str) -> ast.AST | None:
        """Of a class or its bases, by their order in the source."""
        if isinstance(owner, ast.Module):
            return (self.defined(module, name) or (module, None))[1]
        if not isinstance(owner, ast.ClassDef):
            return None
        own = [node for node in statements(owner) if name in names(node)]
        set_on_self = (node for node in ast.walk(owner) if f"self.{name}" in targets(node))
        if (node := own[-1] if own else next(set_on_self, None)) is not None:
            return node
        for base in owner.bases:
            text = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            found = self.defined(module, text.rpartition(".")[2])
            if found and (node := self.member(*found, name)) is not None:
                return node
        return None

    @cache  # noqa: B019
    def state(self) -> set[str]:
        """The attributes that vLLM's server sets on its application's state."""
        texts = (file.read_text(encoding="utf-8") for file in sorted((self.folder / "entrypoints").rglob("*.py")))
        return {match[1] for text in texts for match in re.finditer(r"\bstate\.(\w+)(?:: [\w.\[\] |]+)? =", text)}


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Those of a module or class, and those nested in `if`, `try` and `with`; not those of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from statements(child)


def names(node: ast.AST) -> list[str]:
    """What a statement defines."""
    if isinstance(node, ast.ClassDef | Function):
        return [node.name]
    if isinstance(node, ast.Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    return targets(node)


def targets(node: ast.AST) -> list[str]:
    """What an assignment sets, such as `self.length`."""
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        return [ast.unparse(node.target)]
    if not isinstance(node, ast.Assign):
        return []
    parts = (part for target in node.targets for part in getattr(target, "elts", [target]))
    return [ast.unparse(part) for part in parts]


def described(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class({', '.join(map(ast.unparse, node.bases))})"
    if not isinstance(node, Function):
        return "module" if isinstance(node, ast.Module) else "attribute"
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    kinds = [ast.unparse(decorator) for decorator in node.decorator_list]
    kinds += ["async"] if isinstance(node, ast.AsyncFunctionDef) else []
    return " ".join([*kinds, f"({ast.unparse(arguments)})"])


def imported() -> set[str]:
    """The paths of the names that the code of voxtral-serve imports from vLLM."""
    paths = set()
    for file in OWN.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                mark = "." if node.module == "vllm" else ":"  # `from vllm import envs` imports a module
                paths |= {f"{node.module}{mark}{alias.name}" for alias in node.names}
    return paths


def read() -> dict[str, Signatures]:
    """The signature of each path, by version."""
    content = json.loads(RECORD.read_text(encoding="utf-8"))
    recorded: dict[str, Signatures] = {}
    for index, name in enumerate(content["versions"]):
        before = list(recorded.values())[-1:]
        recorded[name] = {
            path: before[0][path] if cells[index : index + 1] == [SAME] else (cells[index] if cells else None)
            for path, cells in content["hooks"].items()
        }
    return recorded


def write(recorded: dict[str, Signatures]) -> None:
    paths = sorted({path for signatures in recorded.values() for path in signatures})
    lines = []
    for path in paths:
        cells = [signatures.get(path) for signatures in recorded.values()]
        shown = [SAME if index and cell == cells[index - 1] else cell for index, cell in enumerate(cells)]
        lines.append(f"{json.dumps(path)}: {json.dumps(shown)}")
    body = ",\n".join(lines)
    RECORD.write_text(f'{{"versions": {json.dumps(list(recorded))}, "hooks": {{\n{body}\n}}}}\n', encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.hooks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="a package vllm (default: the installed one)")
    parser.add_argument("--record", metavar="VERSION", help="write its signatures into hooks.json as of this version")
    flags = parser.parse_args()
    recorded = read()
    source = Source(flags.folder or installed())
    name = flags.record or ("" if flags.folder else version("vllm").partition("+")[0])
    before = name if name in recorded else list(recorded)[-1]
    paths = sorted({*recorded[before], *(imported() if flags.record else ())})
    signatures = {path: source.signature(path) for path in paths}
    changed = [path for path in paths if signatures[path] != recorded[before].get(path)]
    for path in changed:
        print(f"{path}\n  {before}: {recorded[before].get(path)}\n  now: {signatures[path]}")
    print(f"{len(paths)} names of vLLM, {len(changed)} not as in {before}")
    if flags.record:
        write({**recorded, flags.record: signatures})
        return 0
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
