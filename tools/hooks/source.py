"""The modules, classes and functions of a vLLM whose files are read, not imported.

A path names a thing: `vllm.v1.request` a module, `vllm.v1.request:Request` a name in it, and
`vllm.v1.request:Request.max_tokens` a member of a class, which may be a base class's, or an attribute that its methods
set on `self`. `state:engine_client` is an attribute that vLLM's API server sets on the state of its application.
"""

import ast
import hashlib
import re
from collections.abc import Iterator
from functools import cache, cached_property
from typing import NamedTuple

from tools.hooks.objects import ALSO_IN
from tools.hooks.release import Files

STATE = "state"
SERVER = "vllm/entrypoints/"  # files that set attributes of the application's state
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.Module | ast.ClassDef | Function | ast.Assign | ast.AnnAssign


class Found(NamedTuple):
    """The module where a thing is defined, and the nodes that define it: several for an attribute that is set twice."""

    module: str
    nodes: tuple[Definition, ...]


class Facts(NamedTuple):
    """What is compared. `signature` is None for a module; `body` is None for a thing whose content is not compared."""

    signature: str | None
    body: str | None


class Source:
    """One version of vLLM."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.tree = cache(self._tree)
        self.names = cache(self._names)
        self.find = cache(self._find)
        self.members = cache(self._members)

    def _tree(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        name = next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in self.files), None)
        return None if name is None else ast.parse(self.files[name])

    def is_package(self, module: str) -> bool:
        return f"{module.replace('.', '/')}/__init__.py" in self.files

    def _names(self, module: str) -> dict[str, list[ast.AST]]:
        """The nodes that define or import each name of a module, those in `if`, `try` and `with` too."""
        names: dict[str, list[ast.AST]] = {}
        for node in statements(self.tree(module) or ast.Module([], [])):
            for name in defined(node):
                names.setdefault(name, []).append(node)
        return names

    def _find(self, path: str) -> Found | None:
        """None if there is no such thing, here or in another module of ALSO_IN."""
        module, _, name = path.partition(":")
        for place in (module, *ALSO_IN.get(module, ())):
            if found := self._in_module(place, name):
                return found
        return None

    def _in_module(self, module: str, name: str) -> Found | None:
        if module == STATE:
            return self._state(name)
        if not name:
            tree = self.tree(module)
            return None if tree is None else Found(module, (tree,))
        owner, _, member = name.partition(".")
        found = self.name(module, owner)
        return self.member(found, member) if found and member else found

    def name(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Found | None:
        """A name of a module, where it is defined: imports within vLLM are followed."""
        if (module, name) in seen:
            return None
        nodes = self.names(module).get(name, [])
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                base = self._absolute(module, node)
                original = next(each.name for each in node.names if name in (each.asname, each.name))
                if found := self.name(base, original, seen | {(module, name)}):
                    return found
                if (tree := self.tree(f"{base}.{original}")) is not None:
                    return Found(f"{base}.{original}", (tree,))
            if isinstance(node, ast.Import):
                return Found(module, ())  # of another library
        kept = tuple(node for node in nodes if isinstance(node, Definition))
        if kept:
            return Found(module, kept)
        for node in self.names(module).get("*", []):
            if found := self.name(self._absolute(module, node), name, seen | {(module, name)}):  # type: ignore[arg-type]
                return found
        if self.is_package(module) and (tree := self.tree(f"{module}.{name}")) is not None:
            return Found(f"{module}.{name}", (tree,))
        if nodes:
            return Found(module, ())  # imported from another library
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + (1 if self.is_package(module) else 0)]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def mro(self, found: Found) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and its bases within vLLM, depth first, each with its module."""
        for node in found.nodes:
            if isinstance(node, ast.ClassDef):
                yield found.module, node
                for base in node.bases:
                    named = base.value if isinstance(base, ast.Subscript) else base
                    if held := self.of_expression(found.module, named):
                        yield from self.mro(held)

    def of_expression(self, module: str, node: ast.expr) -> Found | None:
        """What a name, or a dotted name, in a module stands for."""
        if isinstance(node, ast.Name):
            return self.name(module, node.id)
        if isinstance(node, ast.Attribute):
            held = self.of_expression(module, node.value)
            if held and held.nodes and isinstance(held.nodes[0], ast.Module):
                return self.name(held.module, node.attr)
        return None

    def is_closed(self, found: Found) -> bool:
        """Whether a class and all its bases are of vLLM, so that another library has none of its attributes."""
        named = ("Protocol", "Generic", "ABC", "object")
        for module, node in self.mro(found):
            for base in node.bases:
                expression = base.value if isinstance(base, ast.Subscript) else base
                held = self.of_expression(module, expression)
                if (held is None or not held.nodes) and ast.unparse(expression).rpartition(".")[2] not in named:
                    return False
        return True

    def member(self, found: Found, name: str) -> Found | None:
        for module, owner in self.mro(found):
            if members := self.members(owner).get(name):
                return Found(module, tuple(members))
        return None

    def _members(self, owner: ast.ClassDef) -> dict[str, list[Definition]]:
        """What a class defines, and what its methods set on `self`, by name."""
        members: dict[str, list[Definition]] = {}
        for node in statements(owner):
            if isinstance(node, Definition):
                for name in defined(node):
                    members.setdefault(name, []).append(node)
        on_self: dict[str, list[Definition]] = {}
        for part in ast.walk(owner):
            for name in set_on_self(part):
                on_self.setdefault(name, []).append(part)  # type: ignore[arg-type]
        return on_self | members

    def _state(self, name: str) -> Found | None:
        nodes = [node for node in self.state_nodes if _sets_state(node, name)]
        return Found(STATE, tuple(nodes)) if nodes else None

    @cached_property
    def state_nodes(self) -> list[Definition]:
        """Assignments to attributes of the application's state."""
        nodes: list[Definition] = []
        for file in sorted(name for name in self.files if name.startswith(SERVER)):
            content = self.files[file]
            if re.search(r"\bstate\.\w+(: [\w.]+)? =", content):
                nodes += [node for node in ast.walk(ast.parse(content)) if isinstance(node, ast.Assign | ast.AnnAssign)]
        return nodes

    def facts(self, path: str, whole: bool = True) -> Facts | None:
        """None if the thing does not exist. `whole`: whether all of a class counts, or its bases only."""
        found = self.find(path)
        if found is None:
            return None
        if not found.nodes:
            return Facts("of another library", None)
        first = found.nodes[-1]  # the last of overloads
        if isinstance(first, ast.Module):
            return Facts(None, None)
        if isinstance(first, ast.ClassDef):
            bases = ", ".join(map(ast.unparse, first.bases))
            return Facts(f"class({bases})", digest(*found.nodes) if whole else None)
        if isinstance(first, Function):
            return Facts(signature(first), digest(*found.nodes))
        hints = [node.annotation for node in found.nodes if isinstance(node, ast.AnnAssign)]
        values = [node.value for node in found.nodes if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
        return Facts("attribute", digest(*hints, *values))

    def text(self, path: str) -> str:
        """The code of a thing without comments and layout, to compare by eye."""
        found = self.find(path)
        return "" if found is None else "\n".join(ast.unparse(node) for node in found.nodes) + "\n"


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Those of a module or class, and those nested in `if`, `try` and `with`; not those of functions."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.stmt):
            yield each
        if isinstance(each, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from statements(each)


def defined(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node.name
        case ast.Assign():
            yield from (each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Import() | ast.ImportFrom():
            yield from (each.asname or each.name.partition(".")[0] for each in node.names)


def set_on_self(node: ast.AST) -> Iterator[str]:
    """The attributes that an assignment sets."""
    for target in (part for each in _targets(node) for part in ast.walk(each)):
        match target:
            case ast.Attribute(value=ast.Name(id="self"), attr=attr):
                yield attr


def _targets(node: ast.AST) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []


def _sets_state(node: ast.AST, name: str) -> bool:
    return any(ast.unparse(each).endswith(f"state.{name}") for each in _targets(node))


def signature(node: Function) -> str:
    """Names, kinds and defaults of the parameters, without annotations."""
    arguments = node.args
    bare = ast.arguments(
        posonlyargs=[ast.arg(each.arg) for each in arguments.posonlyargs],
        args=[ast.arg(each.arg) for each in arguments.args],
        vararg=arguments.vararg and ast.arg(arguments.vararg.arg),
        kwonlyargs=[ast.arg(each.arg) for each in arguments.kwonlyargs],
        kw_defaults=arguments.kw_defaults,
        kwarg=arguments.kwarg and ast.arg(arguments.kwarg.arg),
        defaults=arguments.defaults,
    )
    kinds = [ast.unparse(each) for each in node.decorator_list]
    kinds += ["async"] if isinstance(node, ast.AsyncFunctionDef) else []
    return " ".join([*kinds, f"({ast.unparse(bare)})"])


def digest(*nodes: ast.AST) -> str:
    """Of the code without comments, layout and docstrings; the same with every Python."""
    return hashlib.sha256("\n".join(map(plain, nodes)).encode()).hexdigest()[:12]


def plain(node: object) -> str:
    if isinstance(node, list):
        return f"[{','.join(map(plain, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list) and value and _is_docstring(value[0]):
            value = value[1:]
        # What newer versions of Python add is empty in code that older ones can read.
        if value not in (None, []) and name not in ("ctx", "kind", "type_comment"):
            fields.append(f"{name}={plain(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
