"""The hooks of voxtral-serve, derived from its source: what it imports, subclasses, overrides, calls, reads and sets.

The values of names are followed through assignments, attributes, calls and loops of each function, with vLLM's own
annotations for what its attributes and functions are (`types`). What cannot be followed is declared in `objects`, or
is among the `problems`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.hooks.objects import DYNAMIC, ELSEWHERE, MIXED_INTO, NAMES, NEEDED, TARGETS
from tools.hooks.source import Function, Source, statements
from tools.hooks.types import Instance, Items, Module, Thing, Types, Unknown, Value, declared

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src/voxtral_serve"
OURS = "voxtral_serve"  # names that voxtral-serve itself adds to vLLM's objects begin with this
MODULE_NAME = re.compile(r"vllm(\.[a-z_0-9]+)+")
VIEWS = ("items", "values", "get", "pop", "popleft", "copy")  # of containers: what they return is of the same elements
COPIES = ("list", "tuple", "set", "sorted", "reversed", "iter", "deque", "aclosing")
# Those that ask for the parameters of a function, or for fields, or whether something is there
PROBES = ("hasattr", "find_spec", "getattr", "get")


class Use(NamedTuple):
    place: str  # "engine/worker.py:25"
    how: str  # import, subclass, override, call, read, set
    optional: bool  # whether the code also works without it


class Hooks:
    """`uses`: {path: its uses}; `problems`: what was not followed, one line each."""

    def __init__(self, source: Source) -> None:
        self.source, self.types = source, Types(source)
        self.uses: dict[str, list[Use]] = {}
        self.problems: list[str] = []
        modules = [Reading(self, file) for file in sorted(PACKAGE.rglob("*.py")) if file.name != "__init__.py"]
        for each in modules:
            each.run()

    def add(self, path: str, use: Use) -> bool:
        """False if vLLM has no such thing."""
        if self.source.find(path) is None:
            owner = self.source.find(path.rpartition(".")[0]) if ":" in path else None
            ours = use.how == "set" or (owner is not None and owner.nodes and not self.source.is_closed(owner))
            if not use.optional and not ours and path not in ELSEWHERE:
                self.problems.append(f"{use.place}: {path} is {use.how}, and vLLM has none")
            return False
        uses = self.uses.setdefault(path, [])
        if use not in uses:
            uses.append(use)
        return True

    def needed(self, path: str) -> bool:
        return path in NEEDED or any(not use.optional for use in self.uses[path])

    def is_made(self, path: str) -> bool:
        """Whether a class is called as it is, so that all of its code counts; of a base class, what is used does."""
        hows = {use.how for use in self.uses[path]}
        return "call" in hows and "subclass" not in hows


class Own(NamedTuple):
    """A class of voxtral_serve: the classes of vLLM that are among its bases, at run time too."""

    node: ast.ClassDef
    bases: tuple[str, ...]
    names: frozenset[str]  # that it and its bases in the module define
    target: Value  # of a patch


class Reading:
    """One module of voxtral_serve."""

    def __init__(self, hooks: Hooks, file: Path) -> None:
        self.hooks, self.types = hooks, hooks.types
        self.file = file.relative_to(PACKAGE).as_posix()
        self.name = self.file.removesuffix(".py").replace("/", ".")
        self.tree = ast.parse(file.read_text(encoding="utf-8"))
        self.attributes: dict[tuple[str, str], Value] = {}
        self.own: dict[str, Own] = {}
        self.where: list[str] = []  # functions and classes around

    def run(self) -> None:
        scope = Scope(self, {}, None)
        self.constants()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                scope.imported(node)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                self.own[node.name] = self._own(node, scope)
        for node in self.tree.body:
            scope.statement(node)

    def place(self, node: ast.AST) -> str:
        return f"{self.file}:{getattr(node, 'lineno', 0)}"

    def declared(self, name: str, function: str) -> Value:
        for key in (f"{self.name}.{function}", self.name):
            if name in NAMES.get(key, {}):
                return declared(NAMES[key][name])
        return None

    def constants(self) -> None:
        """Modules of vLLM by their names in strings, as in `target` of a patch."""
        inside = {part: call for call in ast.walk(self.tree) if isinstance(call, ast.Call) for part in call.args}
        targets = {
            node.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign) and [*map(ast.unparse, node.targets)] == ["target"]
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE_NAME.fullmatch(node.value):
                call = inside.get(node)
                asked = call is not None and ast.unparse(call.func).rpartition(".")[2] in PROBES
                optional = asked or node not in targets
                if self.hooks.source.find(node.value) is not None or not optional:
                    self._named(node, node.value, optional)

    def _named(self, node: ast.AST, name: str, optional: bool) -> None:
        """`vllm.module`, or `vllm.module.Class.method`."""
        parts = name.split(".")
        modules = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        module = next(each for each in modules if self.hooks.source.tree(each) is not None or each == "vllm")
        rest = name.removeprefix(module).removeprefix(".")
        if module != "vllm":
            self.hooks.add(f"{module}:{rest}" if rest else module, Use(self.place(node), "import", optional))

    def _own(self, node: ast.ClassDef, scope: "Scope") -> Own:
        bases: list[str] = list(MIXED_INTO.get(node.name, ()))
        names = {name for each in node.body for name in _defines(each)}
        target: Value = None
        for base in node.bases:
            value = scope.names.get(ast.unparse(base)) or self.declared(ast.unparse(base), "")
            if isinstance(value, Thing):
                bases.append(value.path)
            if (ours := self.own.get(ast.unparse(base))) is not None:
                bases += ours.bases
                names |= ours.names
                target = ours.target
        for other in ast.walk(self.tree):  # a mixin of this module
            if isinstance(other, ast.ClassDef) and node.name in map(ast.unparse, other.bases):
                values = (scope.names.get(ast.unparse(base)) for base in other.bases)
                bases += [value.path for value in values if isinstance(value, Thing)]
        for each in node.body:
            match each:
                case ast.Assign(targets=[ast.Name(id="target")], value=ast.Constant(value=str(text))):
                    if self.hooks.source.tree(text) is not None:
                        target = Module(text)
        if node.name in TARGETS:
            target = declared(TARGETS[node.name])
        return Own(node, tuple(dict.fromkeys(bases)), frozenset(names), target)


def _defines(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
            for each in ast.walk(node):
                match each:
                    case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ast.Store()):
                        yield attr
        case ast.Assign(targets=[ast.Name(id=name)]):
            yield name
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            yield name


class Scope:
    """The names of a function or of the module, and what they are."""

    def __init__(self, reading: Reading, names: dict[str, Value], owner: Own | None, function: str = "") -> None:
        self.reading, self.hooks, self.types = reading, reading.hooks, reading.types
        self.names, self.owner, self.within = names, owner, function

    # statements

    def imported(self, node: ast.Import | ast.ImportFrom) -> None:
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "vllm":
            return
        for each in node.names:
            path = f"{node.module}:{each.name}"
            submodule = f"{node.module}.{each.name}"
            if self.hooks.source.name(node.module or "", each.name) is None or node.module == "vllm":
                path = submodule if self.hooks.source.tree(submodule) is not None else path
            optional = any(
                isinstance(outer, ast.Try) and node in ast.walk(outer) for outer in ast.walk(self.reading.tree)
            ) and self.reading.name.startswith("check.")
            self.hooks.add(path, Use(self.reading.place(node), "import", optional))
            self.names[each.asname or each.name] = self.types.read(path)

    def statement(self, node: ast.AST) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self.imported(node)
            case ast.ClassDef():
                self._class(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.function(node)
            case ast.Assign(targets=targets, value=value):
                held = self.value(value)
                for target in targets:
                    self.bind(target, held, value)
            case ast.AnnAssign(target=target, value=value):
                held = self.value(value) if value is not None else None
                if value is not None:
                    self.bind(target, held, value)
            case ast.AugAssign(target=target, value=value):
                self.value(value)
                self.value(target)
            case ast.For(target=target, iter=each) | ast.AsyncFor(target=target, iter=each):
                self.bind_element(target, each)
                self._all([*node.body, *node.orelse])
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    held = self.value(item.context_expr)
                    if item.optional_vars is not None:
                        self.bind(item.optional_vars, held, item.context_expr)
                self._all(body)
            case ast.expr():
                self.value(node)
            case _:
                self._all(ast.iter_child_nodes(node))

    def _all(self, nodes: Iterator[ast.AST] | list[ast.stmt]) -> None:
        for node in nodes:
            self.statement(node)

    def _class(self, node: ast.ClassDef) -> None:
        own = self.reading.own[node.name]
        for base in own.bases:
            self.hooks.add(base, Use(self.reading.place(node), "subclass", False))
            for name in sorted(_methods(node)):
                path = f"{base}.{name}"
                found = self.hooks.source.find(path)
                if name != "__init__" and found is not None and found.nodes:
                    self.hooks.add(path, Use(self.reading.place(node), "override", False))
        for decorator in node.decorator_list:
            self.value(decorator)
        inner = Scope(self.reading, dict(self.names), own)
        for each in node.body:
            inner.statement(each)

    def function(self, node: Function) -> None:
        names = dict(self.names)
        arguments = node.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            names[each.arg] = self._parameter(each, node.name)
        for decorator in node.decorator_list:
            self.value(decorator)
        inner = Scope(self.reading, names, self.owner, node.name)
        for statement in node.body:
            inner.statement(statement)

    def _parameter(self, node: ast.arg, function: str) -> Value:
        name = node.arg
        if (value := self.reading.declared(name, function)) is not None:
            return value
        if self.owner is not None and name == "module":
            return self.owner.target
        hint = "" if node.annotation is None else ast.unparse(node.annotation)
        found = self.names.get(hint.strip("'\"").partition(" |")[0])
        return Instance((found.path,)) if isinstance(found, Thing) else None

    def bind(self, target: ast.expr, held: Value, value: ast.expr) -> None:
        match target:
            case ast.Name() if held is None and ast.unparse(value).startswith("import_module("):
                pass  # a place of another version
            case ast.Name(id=name):
                self.names[name] = held or self.reading.declared(name, self.within)
            case ast.Tuple(elts=targets) if isinstance(value, ast.Tuple) and len(value.elts) == len(targets):
                for each, part in zip(targets, value.elts, strict=True):
                    self.bind(each, self.value(part), part)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for each in targets:
                    self.bind(each, held.of if isinstance(held, Items) else None, value)
            case ast.Attribute(value=ast.Name(id="self"), attr=attr) if self.owner is not None:
                if self.within == "__init__":
                    self.reading.attributes[self.owner.node.name, attr] = held
                self.attribute(target)
            case ast.Attribute():
                self.attribute(target)
            case ast.Subscript() | ast.Starred():
                self.value(target)

    def bind_element(self, target: ast.expr, each: ast.expr) -> None:
        held = self.value(each)
        of = held.of if isinstance(held, Items) else None
        if isinstance(target, ast.Tuple):  # of `items()`: the values are the last
            for part in target.elts[:-1]:
                self.bind(part, None, each)
            target = target.elts[-1]
        self.bind(target, of, each)

    # expressions

    def value(self, node: ast.expr) -> Value:
        match node:
            case ast.Name(id=name):
                return self.names.get(name) or self.reading.declared(name, self.within)
            case ast.Attribute():
                return self.attribute(node)
            case ast.Call():
                return self.call(node)
            case ast.NamedExpr(target=target, value=value):
                held = self.value(value)
                self.bind(target, held, value)
                return held
            case ast.Await(value=value) | ast.Starred(value=value):
                return self.value(value)
            case ast.Subscript(value=value, slice=inner):
                held = self.value(value)
                self.value(inner)
                return held.of if isinstance(held, Items) and not isinstance(inner, ast.Slice) else held
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node)
            case ast.Lambda(body=body):
                self.value(body)
                return None
            case _:
                return self._parts(node)

    def _parts(self, node: ast.expr) -> Value:
        """`a or b`, `a if b else c`, `a + b`, `[*a]`: the first that is vLLM's."""
        parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        if isinstance(node, ast.IfExp):
            parts = [node.test, node.body, node.orelse]
        held = [self.value(each) for each in parts]
        if isinstance(node, ast.BoolOp | ast.BinOp | ast.IfExp):
            return next((each for each in held[isinstance(node, ast.IfExp) :] if each is not None), None)
        if isinstance(node, ast.List | ast.Tuple):
            found = next((each for each in held if each is not None), None)
            return None if found is None else found if isinstance(found, Items) else Items(found)
        return None

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        inner = Scope(self.reading, dict(self.names), self.owner, self.within)
        for each in node.generators:
            inner.bind_element(each.target, each.iter)
            for test in each.ifs:
                inner.value(test)
        if isinstance(node, ast.DictComp):
            inner.value(node.key)
        held = inner.value(node.value if isinstance(node, ast.DictComp) else node.elt)
        return None if held is None else Items(held)

    def attribute(self, node: ast.Attribute, optional: bool = False) -> Value:
        if (value := self.reading.declared(ast.unparse(node), self.within)) is not None:
            return value
        how = "set" if isinstance(node.ctx, ast.Store) else "read"
        return self.read(self.base(node.value), node.attr, Use(self.reading.place(node), how, optional))

    def base(self, node: ast.expr) -> Value:
        """Of the object whose attribute is meant; `self` and `super()` are the bases of the class."""
        match node:
            case ast.Name(id="self" | "cls") if self.owner is not None and self.owner.bases:
                return Thing("self")
            case ast.Call(func=ast.Name(id="super")) if self.owner is not None and self.owner.bases:
                return Thing("super")
        return self.value(node)

    def read(self, held: Value, attr: str, use: Use) -> Value:
        if isinstance(held, Items) or held is None or attr.startswith(("__", OURS)):
            return held if isinstance(held, Items) else None
        if isinstance(held, Unknown):
            self.hooks.problems.append(f"{use.place}: {held.path} has no type in vLLM's source: {attr} is {use.how}")
            return None
        if isinstance(held, Module):
            return self._of([f"{held.name}:{attr}"], use)
        if isinstance(held, Thing) and held.path in ("self", "super"):
            return self._of_self(held.path, attr, use)
        if isinstance(held, Thing):
            found = self.hooks.source.find(held.path)
            if found is None or not found.nodes or not isinstance(found.nodes[0], ast.ClassDef):
                return None  # an attribute of a function
        return self._of([f"{path}.{attr}" for path in (held.paths if isinstance(held, Instance) else [held.path])], use)

    def _of(self, paths: list[str], use: Use) -> Value:
        path = next((path for path in paths if self.hooks.source.find(path) is not None), paths[0])
        return self.types.read(path) if self.hooks.add(path, use) else None

    def _of_self(self, kind: str, attr: str, use: Use) -> Value:
        assert self.owner is not None
        if kind == "self" and attr in _methods(self.owner.node):
            return None
        held: Value = None
        for base in self.owner.bases:
            path = f"{base}.{attr}"
            found = self.hooks.source.find(path)
            if found is not None and found.nodes and self.hooks.add(path, use):
                held = held or self.types.read(path)
        key = self.owner.node.name, attr
        return self.reading.attributes[key] if kind == "self" and key in self.reading.attributes else held

    def call(self, node: ast.Call) -> Value:
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in ("getattr", "hasattr", "setattr") and len(node.args) >= 2:
            return self._attribute_by_name(node, name)
        called = self.value(node.func)
        held = [self.value(each) for each in node.args]
        for keyword in node.keywords:
            self.value(keyword.value)
        if (isinstance(node.func, ast.Name) and name in COPIES) or name == "aclosing":
            return next((each for each in held if each is not None), None)
        if isinstance(called, Items) and name in VIEWS:
            return called.of if name in ("get", "pop", "popleft") else called
        if isinstance(called, Thing) and called.path not in ("self", "super"):
            self._constructed(called.path, node)
            return self.types.returned(called.path)
        if isinstance(called, Instance):
            self.read(called, "forward", Use(self.reading.place(node), "call", False))
        if name == "type" and held and isinstance(held[0], Instance):
            return Thing(held[0].paths[0])
        return None

    def _constructed(self, path: str, node: ast.Call) -> None:
        """A class that is called: its constructor, or the fields that are given."""
        found = self.hooks.source.find(path)
        if found is None or not found.nodes or not isinstance(found.nodes[0], ast.ClassDef):
            return
        use = Use(self.reading.place(node), "call", False)
        self.hooks.add(path, use)
        if (init := self.hooks.source.find(f"{path}.__init__")) is not None and init.nodes:
            self.hooks.add(f"{path}.__init__", use)
            return
        for keyword in node.keywords:
            if keyword.arg is not None:
                self.hooks.add(f"{path}.{keyword.arg}", use)

    def _attribute_by_name(self, node: ast.Call, called: str) -> Value:
        held, name = self.base(node.args[0]), node.args[1]
        for each in node.args[2:]:
            self.value(each)
        place = self.reading.place(node)
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            optional = called == "hasattr" or (len(node.args) > 2 and called == "getattr")
            return self.read(held, name.value, Use(place, "set" if called == "setattr" else "read", optional))
        if held is not None:
            key = f"{self.reading.name}: {ast.unparse(node)}"
            if key not in DYNAMIC:
                self.hooks.problems.append(f"{place}: a name that is made at run time: {key!r}")
            for path in DYNAMIC.get(key, ()):
                optional = called == "hasattr" or (called == "getattr" and len(node.args) > 2)
                self.hooks.add(path, Use(place, "read", optional))
        return None


def _methods(node: ast.ClassDef) -> set[str]:
    return {each.name for each in statements(node) if isinstance(each, Function)}


def untyped_parameters() -> Iterator[tuple[str, str, str]]:
    """(module, function, name) of the parameters that are typed `Any`, in the rooms that get objects of vLLM."""
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix().removesuffix(".py").replace("/", ".")
        guards = ("guard.server", "guard.live.link", "guard.transcriber")
        rooms = ("engine.", "patches.", "check.", "shims", "plugin", *guards)
        if name.startswith((*rooms, "guard.")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, Function):
                    for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                        server = each.arg in ("state", "app", "engine", "client", "server")
                        if not (server or name.startswith(rooms)) or each.annotation is None:
                            continue
                        if ast.unparse(each.annotation).strip("'") == "Any":
                            yield name, node.name, each.arg
