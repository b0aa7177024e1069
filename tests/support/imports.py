"""Which module of this repository imports which. Read with `ast`: nothing is imported. Imports inside functions count.

tests/unit/test_house.py holds the rules.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    name: str  # of a module, absolute
    line: int
    at_module_level: bool


class Imports:
    """The modules of the packages below `root`, and what they import. Names are dotted, as in `import`.

    `paths` maps a module to its file, `trees` to its syntax tree, `imports` to its imports.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths: dict[str, Path] = {}
        packages = {path.parent for path in root.glob("*/__init__.py")} | {root / "src/voxtral_serve"}
        for package in sorted(packages - {root / "tests"}):
            for path in sorted(package.rglob("*.py")):
                parts = path.relative_to(package.parent).with_suffix("").parts
                self.paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.paths.items()}
        self.imports = {name: list(self._imports(name)) for name in self.paths}

    def of_rooms(self) -> dict[str, set[str]]:
        """Each room with the other rooms that its modules import."""
        graph: dict[str, set[str]] = {}
        for module, imports in self.imports.items():
            here = room_of(module)
            rooms = {room_of(each.name) for each in imports if each.name in self.paths}
            graph.setdefault(here, set()).update(rooms - {here})
        return graph

    def _imports(self, module: str) -> Iterator[Import]:
        tree = self.trees[module]
        package = module if self.paths[module].stem == "__init__" else module.rpartition(".")[0]
        at_module_level = set(nodes(tree, in_functions=False))
        for node in nodes(tree, in_functions=True):
            for name in self._names(node, package):
                yield Import(name, getattr(node, "lineno", 0), node in at_module_level)

    def _names(self, node: ast.AST, package: str) -> Iterator[str]:
        """The modules that a statement or an expression of a module of this package imports."""
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                outer = package.split(".")
                parts = outer[: len(outer) - node.level + 1] if node.level else []
                base = ".".join([*parts, node.module] if node.module else parts)
                inner = (f"{base}.{alias.name}" for alias in node.names)
                yield from dict.fromkeys(name if name in self.paths else base for name in inner)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def nodes(tree: ast.AST, in_functions: bool) -> Iterator[ast.AST]:
    """The nodes below `tree`, those inside functions only if asked for."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from nodes(node, in_functions)


def room_of(module: str) -> str:
    """The room of a module: a folder or module of voxtral_serve, or a package at the root."""
    return ".".join(module.split(".")[: 2 if module.startswith("voxtral_serve.") else 1])
