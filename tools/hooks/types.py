"""What vLLM's annotations and assignments say of the types of its attributes and of what its functions return."""

import ast
from typing import NamedTuple, TypeAlias

from tools.hooks.objects import TYPES, Declared
from tools.hooks.source import STATE, Found, Function, Source

HELD = {  # containers, by the argument of their annotation that is an element
    **dict.fromkeys(("list", "set", "frozenset", "tuple", "deque", "Sequence", "Iterable", "Iterator"), 0),
    **dict.fromkeys(("AsyncGenerator", "AsyncIterator", "Generator", "Collection"), 0),
    **dict.fromkeys(("dict", "Mapping", "defaultdict", "OrderedDict"), -1),
}
SAME = ("Optional", "Union", "ClassVar", "Final", "Annotated", "Awaitable", "Coroutine")


class Module(NamedTuple):
    name: str


class Thing(NamedTuple):
    """A class, function or value of a module, or a member of a class."""

    path: str


class Instance(NamedTuple):
    """Of the first of these classes that has the attribute that is asked for."""

    paths: tuple[str, ...]


class Items(NamedTuple):
    """A container of these, or an iterator over them."""

    of: "Value"


class Unknown(NamedTuple):
    """Something of vLLM's whose type is not known."""

    path: str


Value: TypeAlias = "Module | Thing | Instance | Items | Unknown | None"  # None: nothing of vLLM


def declared(value: Declared) -> Value:
    if value == STATE:
        return Module(STATE)
    if isinstance(value, str) and value.startswith("type "):
        return Thing(value.removeprefix("type "))
    if isinstance(value, str) and value.startswith("["):
        return Items(Instance((value.strip("[]"),)))
    return Instance((value,) if isinstance(value, str) else value) if value else None


class Types:
    def __init__(self, source: Source) -> None:
        self.source = source

    def read(self, path: str) -> Value:
        """The value of a name or an attribute."""
        found = self.source.find(path)
        if found is None or not found.nodes:
            return None
        node = found.nodes[0]
        if path in TYPES and not isinstance(node, Function):
            return declared(TYPES[path])
        if isinstance(node, ast.Module):
            return Module(found.module)
        if isinstance(node, Function):
            kinds = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
            return self.returned(path) if kinds & {"property", "cached_property"} else Thing(path)
        if isinstance(node, ast.ClassDef):
            return Thing(path)
        return self._assigned(path, found)

    def _assigned(self, path: str, found: Found) -> Value:
        hinted = [node for node in found.nodes if isinstance(node, ast.AnnAssign)]
        if hinted:
            return self.annotation(found.module, hinted[0].annotation, path)
        for node in found.nodes:
            value = self._expression(path, found.module, node.value) if isinstance(node, ast.Assign) else None
            if value is not None:
                return value
        return Unknown(path)

    def _expression(self, path: str, module: str, node: ast.expr) -> Value:
        """Of the right side of an assignment to `path`."""
        owner = path.rpartition(".")[0]
        match node:
            case ast.Constant() | ast.List() | ast.Dict() | ast.Compare() | ast.JoinedStr() | ast.ListComp():
                return None
            case ast.Name(id=name):
                return self._parameter(module, owner, path, name)
            case ast.Attribute(value=ast.Name(id="self"), attr=attr):
                return self.read(f"{owner}.{attr}")
            case ast.Attribute(value=inner, attr=attr):
                held = self._expression(path, module, inner)
                if isinstance(held, Instance):
                    return self.read(f"{held.paths[0]}.{attr}")
            case ast.Call(func=ast.Name() as called):
                found = self.source.of_expression(module, called)
                if found and found.nodes and isinstance(found.nodes[0], ast.ClassDef):
                    return Instance((f"{found.module}:{found.nodes[0].name}",))
        return Unknown(path)

    def _parameter(self, module: str, owner: str, path: str, name: str) -> Value:
        """Of the parameter that a method of `owner` stores in the attribute `path`."""
        found = self.source.find(owner) if owner else None
        for _, each in self.source.mro(found) if found else ():
            for method in ast.walk(each):
                if isinstance(method, Function):
                    for argument in (*method.args.args, *method.args.kwonlyargs):
                        if argument.arg == name and argument.annotation is not None:
                            return self.annotation(module, argument.annotation, path)
        return Unknown(path)

    def returned(self, path: str) -> Value:
        """By a call of a function, or of a class."""
        if path in TYPES:
            return declared(TYPES[path])
        found = self.source.find(path)
        node = found.nodes[-1] if found and found.nodes else None
        if isinstance(node, ast.ClassDef) and found:
            return Instance((f"{found.module}:{node.name}",))
        if isinstance(node, Function) and found:
            return Unknown(path) if node.returns is None else self.annotation(found.module, node.returns, path)
        return None if node is None else Unknown(path)

    def annotation(self, module: str, node: ast.expr, path: str) -> Value:
        match node:
            case ast.Constant(value=str(text)):
                return self.annotation(module, ast.parse(text, mode="eval").body, path)
            case ast.BinOp(left=left, right=right):
                return self.annotation(module, left, path) or self.annotation(module, right, path)
            case ast.Name(id="Any") | ast.Name(id="object"):
                return Unknown(path)
            case ast.Name(id="Self"):
                return Instance((path.rpartition(".")[0],))
            case ast.Subscript(value=head, slice=inner):
                return self._generic(module, ast.unparse(head).rpartition(".")[2], inner, path)
            case ast.Name() | ast.Attribute():
                found = self.source.of_expression(module, node)
                if found and found.nodes and isinstance(found.nodes[0], ast.ClassDef):
                    return Instance((f"{found.module}:{found.nodes[0].name}",))
        return None

    def _generic(self, module: str, head: str, inner: ast.expr, path: str) -> Value:
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if head in HELD:
            of = self.annotation(module, parts[HELD[head]], path)
            return None if of is None or isinstance(of, Unknown) else Items(of)
        if head in SAME:
            return self.annotation(module, parts[-1 if head == "Coroutine" else 0], path)
        if head == "type":
            of = self.annotation(module, parts[0], path)
            return Thing(of.paths[0]) if isinstance(of, Instance) else None
        return None
