"""Which modules a piece of code asks for, found without running it: from source text, and from a function's code objects.

Names are the deepest candidates that the syntax gives: `from sklearn.svm import LinearSVC` is `sklearn.svm.LinearSVC`.
Whether the last part is a module is for the reader to find out: a name that is not an item stands for its longest
prefix that is one. Standard library only, so that any Python can run this file.
"""

import ast
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

MAX_SOURCE = 10_000_000  # bytes of bytes, characters of text: parsing takes some 30 times as much memory
MAX_PARTS = 8  # of a name that is followed through attributes
MAX_NAME = 1024

_FAILURES = (SyntaxError, ValueError, RecursionError, MemoryError, SystemError)
#: Functions whose first argument, where it is a literal, is a module to import.
_IMPORTERS = frozenset({"__import__", "builtins.__import__", "importlib.__import__", "importlib.import_module"})
_IMPORTERS |= {"pytest.importorskip"}


@dataclass(frozen=True)
class SourceFailure:
    """Why a source could not be read: the exception's class and its message."""

    filename: str
    kind: str
    message: str


@dataclass(frozen=True)
class Found:
    """Modules that a source asks for, deepest candidates only; `errors` says why there are none."""

    names: frozenset[str] = frozenset()
    errors: tuple[SourceFailure, ...] = ()


def imports_of_source(source: str | bytes, filename: str, package: str | None = None) -> Found:
    """Modules outside the standard library that `source` asks for; nothing is run, and no failure is raised.

    Guarded, conditional and lazy imports count; those for type checkers only do not. Relative imports are resolved
    in `package` where it is given, and left out otherwise. Bytes are decoded by their cookie or byte order mark.
    """
    try:
        if len(source) > MAX_SOURCE:
            message = f"{len(source)} is over the limit of {MAX_SOURCE}"
            return Found(errors=(SourceFailure(filename, "OverLimit", message),))
        if isinstance(source, str):
            source = source.removeprefix("\ufeff")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes: of no interest here
            tree = ast.parse(source, filename)
        names = _Source(package).read(tree)
    except _FAILURES as error:
        return Found(errors=(SourceFailure(filename, type(error).__name__, str(error)),))
    return Found(deepest(outside_stdlib(names)))


def outside_stdlib(names: Iterable[str]) -> set[str]:
    """The names that are not in the standard library of this Python."""
    return {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names | {"__main__"}}


def deepest(names: Iterable[str]) -> frozenset[str]:
    """The names without those that another one contains: importing `a.b` imports `a`."""
    found = {name for name in names if len(name) <= MAX_NAME and all(map(str.isidentifier, name.split(".")))}
    parents = {name[:dot] for name in found for dot in range(len(name)) if name[dot] == "."}
    return frozenset(found - parents)


def absolute(name: str, level: int, package: str | None) -> str | None:
    """The module that `name` means inside `package`, `level` dots up; None where that is not known."""
    if not level:
        return name
    parts = package.split(".") if package else []
    if level > len(parts):
        return None
    return ".".join([*parts[: len(parts) - level + 1], *filter(None, [name])])


def follow(name: str, attributes: list[str]) -> str:
    """The module behind `np.linalg.norm`: the last attribute is what is used of it, those before lead to it."""
    return ".".join([name, *attributes[:-1]][:MAX_PARTS])


class _Source:
    """One source's tree, walked without recursion: its depth is the author's, not ours."""

    def __init__(self, package: str | None) -> None:
        self.package = package
        self.names: set[str] = set()
        self.bound: dict[str, set[str]] = {"__import__": {"__import__"}}  # name in the source → what it was imported as
        self.chains: set[tuple[str, tuple[str, ...]]] = set()  # (name, attributes) that the source uses

    def read(self, tree: ast.AST) -> set[str]:
        waiting: list[ast.AST] = [tree]
        while waiting:
            waiting += reversed(self.enter(waiting.pop()))
        for name, attributes in self.chains:
            for module in self.bound.get(name, ()):
                self.names.add(follow(module, list(attributes)))
        self.names.discard("__import__")
        return self.names

    def enter(self, node: ast.AST) -> list[ast.AST]:
        """Takes down what the node says; returns the nodes below it that are still to be read, in order."""
        match node:
            case ast.Import():
                for alias in node.names:
                    self.names.add(alias.name)
                    self.bind(alias.asname or alias.name.partition(".")[0], alias.name if alias.asname else "")
            case ast.ImportFrom():
                module = absolute(node.module or "", node.level, self.package)
                if module is not None:
                    for alias in node.names:
                        star = alias.name == "*"
                        self.names.add(module if star else f"{module}.{alias.name}")
                        if not star:
                            self.bind(alias.asname or alias.name, f"{module}.{alias.name}")
            case ast.If() | ast.IfExp():
                taken = self.truth(node.test)
                body = [node.body] if isinstance(node, ast.IfExp) else node.body
                orelse = [node.orelse] if isinstance(node, ast.IfExp) else node.orelse
                return [node.test, *(body if taken is not False else []), *(orelse if taken is not True else [])]
            case ast.Attribute():
                below, attributes = self.chain(node)
                if isinstance(below, ast.Name):
                    self.chains.add((below.id, tuple(attributes[:MAX_PARTS])))
                    return []
                return [below]
            case ast.Call():
                self.names.update(self.imported_by(node))
        return list(ast.iter_child_nodes(node))

    def bind(self, name: str, module: str) -> None:
        self.bound.setdefault(name, set()).add(module or name)

    def chain(self, node: ast.expr) -> tuple[ast.expr, list[str]]:
        """What a chain of attributes begins with, and the attributes."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        return node, attributes[::-1]

    def meant(self, node: ast.expr) -> set[str]:
        """The imported things that an expression such as `np.linalg` names so far."""
        below, attributes = self.chain(node)
        if not isinstance(below, ast.Name):
            return set()
        return {".".join([module, *attributes]) for module in self.bound.get(below.id, ())}

    def truth(self, test: ast.expr) -> bool | None:
        """What a condition is at run time, where that is certain: `TYPE_CHECKING` is false."""
        match test:
            case ast.Constant():
                return bool(test.value)
            case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
                return False
            case ast.Name() if "typing.TYPE_CHECKING" in self.meant(test):
                return False
            case ast.UnaryOp(op=ast.Not(), operand=ast.expr() as operand) if not isinstance(operand, ast.UnaryOp):
                below = self.truth(operand)
                return None if below is None else not below
            case ast.BoolOp(op=ast.And(), values=values) if not any(isinstance(value, ast.BoolOp) for value in values):
                return False if any(self.truth(value) is False for value in values) else None
        return None

    def imported_by(self, call: ast.Call) -> set[str]:
        """Modules that a call such as `importlib.import_module("x")` imports."""
        if not self.meant(call.func) & _IMPORTERS:
            return set()
        arguments = {f"{place}": value for place, value in enumerate(call.args)}
        arguments |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        name = _text(arguments.get("0") or arguments.get("name") or arguments.get("modname"))
        if not name:
            return set()
        relative = name.lstrip(".")
        package = _text(arguments.get("1") or arguments.get("package")) or self.package
        module = absolute(relative, len(name) - len(relative), package)
        if module is None:
            return set()
        below = arguments.get("fromlist") or arguments.get("3")
        parts = [_text(part) for part in below.elts] if isinstance(below, ast.List | ast.Tuple) else []
        return {module, *(f"{module}.{part}" for part in parts if part and part != "*")}


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
