"""Which modules a piece of code asks for, found without running it: from source text, and from a function's code objects.

Names are the deepest candidates that the syntax gives: `from sklearn.svm import LinearSVC` is `sklearn.svm.LinearSVC`.
Whether the last part is a module is for the reader to find out: a name that is not an item stands for its longest
prefix that is one. Standard library only, so that any Python can run this file.
"""

import ast
import builtins
import contextlib
import dis
import functools
import importlib
import importlib.util
import itertools
import os
import sys
import sysconfig
import types
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from readie.loaders import NOT_TEXT, resources_of_call
from readie.resources import is_resource

MAX_SOURCE = 10_000_000  # bytes of bytes, characters of text: parsing takes some 30 times as much memory
MAX_PARTS = 8  # of a name that is followed through attributes
MAX_NAME = 1024
MAX_VALUES = 5_000  # looked at for one function
MAX_ELEMENTS = 1000  # looked at in one list, tuple, set or dict

_FAILURES = (SyntaxError, ValueError, RecursionError, MemoryError, SystemError)
#: Functions whose first argument, where it is a literal, is a module to import.
_IMPORTERS = frozenset({"__import__", "builtins.__import__", "importlib.__import__", "importlib.import_module"})
_IMPORTERS |= {"pytest.importorskip"}
#: The function whose first argument, where it is a literal, is the key of a dataset, model or tokenizer.
_RESOURCE = frozenset({"readie.resource", "readie.resources.resource"})
#: On every worker as part of the executor, or nowhere: never a reason for a checkpoint.
_OWN = frozenset({"readie", "cloudpickle"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True)
class SourceFailure:
    """Why a source could not be read: the exception's class and its message."""

    filename: str
    kind: str
    message: str


@dataclass(frozen=True)
class Found:
    """Modules that a source asks for, deepest candidates only; `errors` says why there are none.

    `resources` are the datasets, models and tokenizers that it loads, by key (readie/loaders.py).
    """

    names: frozenset[str] = frozenset()
    errors: tuple[SourceFailure, ...] = ()
    resources: frozenset[str] = frozenset()


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
        read = _Source(package)
        names = read.read(tree)
    except _FAILURES as error:
        return Found(errors=(SourceFailure(filename, type(error).__name__, str(error)),))
    return Found(deepest(outside_stdlib(names)), resources=frozenset(read.resources))


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
        self.calls: list[ast.Call] = []
        self.stars: set[str] = set()  # modules that `from x import *` names
        self.texts: dict[
            str, str | None
        ] = {}  # what the source defines → the text that it is all along; None: not known
        self.resources: set[str] = set()

    def read(self, tree: ast.AST) -> set[str]:
        waiting: list[ast.AST] = [tree]
        while waiting:
            waiting += reversed(self.enter(waiting.pop()))
        for name, attributes in self.chains:
            for module in self.bound.get(name, ()):
                self.names.add(follow(module, list(attributes)))
        for call in self.calls:  # only now is it known what all names are bound to
            self.names.update(self.imported_by(call))
            self.resources.update(self.loaded_by(call))
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
                        if star:
                            self.stars.add(module)
                        else:
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
                self.calls.append(node)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str() as text)):
                self.texts[name] = None if name in self.texts else text
                return []
            case ast.Name(ctx=ast.Store() | ast.Del(), id=name) | ast.arg(arg=name):
                self.texts[name] = None
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self.texts[name] = None
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
        known = self.bound.get(below.id)
        if known is None:
            known = set() if below.id in self.texts else {f"{module}.{below.id}" for module in self.stars}
        return {".".join([module, *attributes]) for module in known}

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
        arguments = _arguments(call)
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

    def loaded_by(self, call: ast.Call) -> set[str]:
        """Keys of what a call such as `AutoModel.from_pretrained("gpt2")` loads."""
        functions = self.meant(call.func)
        if not functions or any(isinstance(each, ast.Starred) for each in call.args):
            return set()
        arguments = {place: self.text(value) for place, value in _arguments(call).items()}
        return {key for function in functions for key in resources_of_call(function, arguments)}

    def text(self, node: ast.expr) -> str | None:
        """The text that an argument is for certain: a literal, or a variable that is only ever one."""
        if isinstance(node, ast.Name):
            return self.texts.get(node.id, NOT_TEXT)
        found = _text(node)
        return NOT_TEXT if found is None else found


def _arguments(call: ast.Call) -> dict[str, ast.expr]:
    """Arguments by place, `"0"` and so on, or by keyword."""
    arguments = {f"{place}": value for place, value in enumerate(call.args)}
    return arguments | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


# ---- functions ----


@dataclass(frozen=True)
class Reached:
    """What a function needs that is not in it."""

    modules: list[str]  # outside the standard library and the caller's own code, and keys of resources; sorted
    uses: list[tuple[str, object]]  # such as ("global LOCK of f", the lock): what is sent along with it
    members: dict[str, set[str] | None]  # local module → what is used of it; None: anything
    absent: list[str]  # local modules that are imported where the function runs, and are not there


def imports_of_function(function: object) -> list[str]:
    """Modules that calling `function` asks for, sorted: see `reach`."""
    return reach(function).modules


def reach(function: object) -> Reached:
    """What `function` needs, found from its code objects, so that no source is needed, and nothing is run.

    Followed are globals it loads, closure cells, defaults, nested functions, functions and classes that are sent by
    value (those of `__main__` and of local modules), partials and methods. Where a name is a module, its attributes
    are followed as far as they are modules. A call is `functools.partial(function, *args)`.
    """
    seen = _Function()
    seen.look_at(function)
    names = outside_stdlib(seen.names)
    foreign = deepest(name for name in names if name.partition(".")[0] not in _OWN and not is_local(name))
    return Reached(
        modules=sorted(foreign | set(filter(is_resource, names))),
        uses=seen.uses,
        members={name: used for name, used in seen.members.items() if is_local(name)},
        absent=sorted(seen.absent),
    )


def is_local(module: str) -> bool:
    """Whether a module is the caller's own: neither of the standard library nor installed as (part of) a distribution.

    An editable install is the caller's own: no root filesystem has it. A module that is not found here is not local.
    """
    top = module.partition(".")[0]
    if top in {"__main__", "__mp_main__"}:
        return True
    if top in sys.stdlib_module_names or top in _OWN:
        return False
    name = module
    while name:
        loaded = sys.modules.get(name)
        if loaded is not None:
            files = _files(_members(loaded))
            if files:
                return not any(map(_is_installed, files))
        name = name.rpartition(".")[0]
    if top in sys.modules:
        return False  # made by hand, as extension modules do
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return False
    # A folder of that name in the working directory is a namespace package to Python, and mostly data.
    return spec is not None and spec.has_location and not _is_installed(spec.origin or "")


def _files(members: Mapping[str, Any]) -> list[str]:
    """Where a module was loaded from: its file, or the folders of a namespace package."""
    file = members.get("__file__")
    if isinstance(file, str):
        return [file]
    spec = members.get("__spec__")
    folders = getattr(spec, "submodule_search_locations", None) or members.get("__path__") or ()
    return [str(folder) for folder in folders]


def _is_installed(file: str) -> bool:
    return not _INSTALLED.isdisjoint(file.replace("\\", "/").split("/")) or file.startswith(_standard_library())


@functools.cache
def _standard_library() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})


def _members(value: object) -> Mapping[str, Any]:
    """The attributes of a module, class or instance, past every `__getattr__`: a look must not load a lazy module."""
    if issubclass(type(value), type):
        members = type.__getattribute__(value, "__dict__")
    else:
        try:
            members = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return {}
    return members if issubclass(type(members), dict | types.MappingProxyType) else {}


def home(value: types.FunctionType | type) -> str | None:
    """The module from which a function or class can be imported by its name; None where there is none."""
    module = sys.modules.get(value.__module__) if isinstance(value.__module__, str) else None
    found: Any = module
    for part in value.__qualname__.split("."):
        found = _members(found).get(part)
    if type(found) in {staticmethod, classmethod}:
        found = found.__func__
    return value.__module__ if found is value else None


_MISSING = object()
_SKIPPED_OPS = frozenset({"PUSH_NULL", "CACHE", "EXTENDED_ARG", "NOP"})
_ATTRIBUTE_OPS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_CELL_OPS = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_CONSTANT_OPS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or like one
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_CONTAINERS = (list, tuple, set, frozenset, deque)


@dataclass(frozen=True)
class _Imported:
    """A variable that holds what import statements in the code give it: names, nothing live."""

    names: frozenset[str]


@dataclass(frozen=True)
class _Scope:
    """Where a piece of code looks names up."""

    label: str
    variables: Mapping[str, Any]  # globals
    cells: Mapping[str, object]
    member: str | None  # the method's name where the code is reached through its class only


@dataclass
class _Function:
    """Everything that was reached from one function, breadth first, each thing once."""

    names: set[str] = field(default_factory=set)
    uses: list[tuple[str, object]] = field(default_factory=list)
    members: dict[str, set[str] | None] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)  # every attribute that reached code loads
    waiting: deque[tuple[object, str | None]] = field(default_factory=deque)
    data: deque[tuple[object, str | None]] = field(default_factory=deque)
    seen: dict[tuple[int, bool], object] = field(default_factory=dict)  # keeps alive what it knows by id
    lazy: list[tuple[str, str, str]] = field(default_factory=list)  # (method, imported module, name) of class members

    def look_at(self, function: object) -> None:
        self.push("", function)
        while (self.waiting or self.data) and len(self.seen) < MAX_VALUES:
            self.enter(*(self.waiting or self.data).popleft())
        # A class is sent whole, but only the methods that somebody calls will import anything.
        for method, module, name in self.lazy:
            if method in self.attributes or method.startswith("__"):
                self.imported(module, name, None)

    def push(self, use: str, value: object, member: str | None = None) -> None:
        key = id(value), member is None
        if type(value) in _ATOMS or key in self.seen:
            return
        self.seen[key] = value
        self.waiting.append((value, member))
        if use:
            self.uses.append((use, value))

    def elements(self, values: Iterable[object]) -> None:
        """What is in a container: after everything else, so that much data does not hide code."""
        for value in itertools.islice(values, MAX_ELEMENTS):
            key = id(value), True
            if type(value) not in _ATOMS and key not in self.seen:
                self.seen[key] = value
                self.data.append((value, None))

    def enter(self, value: object, member: str | None) -> None:
        kind = type(value)
        if issubclass(kind, types.ModuleType):
            self.module(value, [])
        elif kind is types.FunctionType:
            self.function(value, member)  # type: ignore[arg-type]
        elif issubclass(kind, type):
            self.class_(value)  # type: ignore[arg-type]
        elif kind is types.MethodType:
            self.push("", value.__func__, member)  # type: ignore[attr-defined]
            self.push("", value.__self__)  # type: ignore[attr-defined]
        elif issubclass(kind, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):  # type: ignore[attr-defined]
                self.push("", part, member)
        elif kind in {staticmethod, classmethod}:
            self.push("", value.__func__, member)  # type: ignore[attr-defined]
        elif kind is property:
            for part in (value.fget, value.fset, value.fdel):  # type: ignore[attr-defined]
                self.push("", part, member)
        elif kind is dict:
            self.elements(itertools.chain.from_iterable(value.items()))  # type: ignore[attr-defined]
        elif kind in _CONTAINERS:
            self.elements(value)  # type: ignore[arg-type]
        elif issubclass(kind, types.BuiltinFunctionType):
            self.builtin(value)  # type: ignore[arg-type]
        else:
            self.instance(value, member)

    def builtin(self, value: types.BuiltinFunctionType) -> None:
        self.names.update(filter(None, [value.__module__]))
        if not issubclass(type(value.__self__), types.ModuleType):
            self.push("", value.__self__)

    def instance(self, value: object, member: str | None) -> None:
        kind = type(value)
        module = None
        with contextlib.suppress(Exception):  # a proxy may do anything
            module = value.__module__  # of a compiled function; else the class's
        if isinstance(module, str) and module != kind.__module__:
            self.names.add(module)
        else:
            self.push("", kind)
        members = _members(value)
        for name, part in list(members.items()):
            # Caches and other decorators, cached properties, objects that hold a function: wherever they are defined.
            if name == "__wrapped__" or type(part) in {types.FunctionType, types.MethodType, functools.partial}:
                self.push("", part, member)
        if members and is_local(kind.__module__):
            self.elements(members.values())

    def class_(self, value: type) -> None:
        place = home(value) or value.__module__
        made_here = value.__flags__ & _HEAP_TYPE and (place == "builtins" or is_local(place))  # exec names no module
        if not made_here:
            self.names.add(place)
            return
        for base in (type(value), *value.__bases__):
            self.push("", base)
        for name, part in list(_members(value).items()):
            if name not in {"__dict__", "__weakref__"}:
                self.push(f"{name} of class {value.__qualname__}", part, None if name.startswith("__") else name)

    def function(self, value: types.FunctionType, member: str | None) -> None:
        place = home(value)
        if place is not None and not is_local(place):
            self.names.add(place)
            return
        label = value.__qualname__
        cells: dict[str, object] = {}
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not bound yet
                cells[name] = cell.cell_contents
        self.code(value.__code__, _Scope(label, value.__globals__, cells, member))
        for element in value.__defaults__ or ():
            self.push(f"a default of {label}", element)
        for name, element in (value.__kwdefaults__ or {}).items():
            self.push(f"the default {name} of {label}", element)
        for name, element in value.__dict__.items():
            self.push(f"attribute {name} of {label}", element)
        with contextlib.suppress(NameError):  # annotations may be evaluated only now
            for name, element in value.__annotations__.items():
                self.push(f"the annotation of {name} in {label}", element)

    def code(self, code: types.CodeType, scope: _Scope) -> None:
        waiting: list[tuple[types.CodeType, dict[str, frozenset[str]]]] = [(code, {})]
        while waiting:
            inner, outer = waiting.pop()
            bound = dict(outer)  # variable → what an import statement bound it to
            self.instructions(inner, scope, bound)
            waiting += [(part, bound) for part in inner.co_consts if isinstance(part, types.CodeType)]

    def instructions(self, code: types.CodeType, scope: _Scope, bound: dict[str, frozenset[str]]) -> None:
        head: tuple[str, object] | None = None  # what a chain of attributes begins with: (use, value)
        attributes: list[str] = []
        constants: tuple[Any, Any] = None, None  # the last two
        importing, names_parts, pending = "", False, ""
        for op, argument in _operations(code):
            if op in _ATTRIBUTE_OPS or op == "LOAD_SUPER_ATTR":
                self.attributes.add(argument)
                attributes.append(argument)
                continue
            if head is not None:  # the chain ends here
                callee = self.chain(*head, attributes, scope.label)
                names = op == "LOAD_CONST" and isinstance(argument, str)
                if names and (callee in _IMPORTERS or (callee in _RESOURCE and is_resource(argument))):
                    self.imported(argument, argument, scope.member)
            head, attributes = None, []
            if op in _CONSTANT_OPS:
                constants = constants[1], argument
            elif op == "IMPORT_NAME":
                level, parts = constants
                importing = absolute(argument, level, _package(scope.variables)) or ""
                names_parts = bool(parts)
                pending = "" if names_parts else importing.partition(".")[0]
                for part in parts or [None]:
                    name = importing if part in {None, "*"} else f"{importing}.{part}"
                    self.imported(importing, name, scope.member)
            elif op == "IMPORT_FROM":
                pending = f"{importing}.{argument}" if names_parts else importing
            elif op.startswith("STORE_") and pending and op not in {"STORE_SUBSCR", "STORE_SLICE", "STORE_ATTR"}:
                bound[argument] = bound.get(argument, frozenset()) | {pending}
                pending = ""
            elif op in _GLOBAL_OPS or op in _CELL_OPS:
                head = self.loaded(op, argument, scope, bound)
            elif op.startswith("LOAD_FAST") and argument in bound:
                head = "", _Imported(bound[argument])

    def loaded(
        self, op: str, name: str, scope: _Scope, bound: Mapping[str, frozenset[str]]
    ) -> tuple[str, object] | None:
        """What a name stands for: what an import in the code bound it to, or what it holds now."""
        places: list[tuple[str, Mapping[str, object]]] = [("global", scope.variables)]
        if op in _CELL_OPS or op in {"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}:
            places = [("closure variable", scope.cells), *(places if op not in _CELL_OPS else [])]
            if name in bound:
                return "", _Imported(bound[name])
        for word, place in places:
            if name in place:
                return f"{word} {name}", place[name]
        if name in bound:  # a global that the code itself imports
            return "", _Imported(bound[name])
        return ("", builtins.__import__) if name == "__import__" else None

    def chain(self, use: str, value: object, attributes: list[str], label: str) -> str:
        """Takes down what a chain such as `np.linalg.norm` says; returns the full name of what it ends with."""
        if type(value) is _Imported:  # isinstance would wake a lazy module
            self.names.update(follow(name, attributes) for name in value.names)
            return max(".".join([name, *attributes]) for name in value.names)
        if issubclass(type(value), types.ModuleType):
            name = ".".join([_name(value), *attributes])
            if name in _RESOURCE:
                return name
            value = self.module(value, attributes)
            use = ".".join([use, *attributes])
        if type(value) is types.FunctionType and f"{value.__module__}.{value.__qualname__}" in _RESOURCE:
            return "readie.resource"
        if value is importlib.import_module:
            return "importlib.import_module"
        if value is builtins.__import__:
            return "__import__"
        if value is not _MISSING:
            self.push(f"{use} of {label}", value)
        return ""

    def module(self, value: object, attributes: list[str]) -> object:
        """Follows `attributes` from a module through modules; returns what is used of the last one, if it is here.

        The last attribute is what is used, so `scipy.signal.windows` asks for `scipy.signal`; a submodule that is
        named alone, as in `scipy.signal`, is asked for itself.
        """
        path = [value]
        for attribute in attributes:
            below = self.member(path[-1], attribute)
            if not issubclass(type(below), types.ModuleType):
                break
            path.append(below)
        rest = attributes[len(path) - 1 :]
        for module, attribute in zip(path, attributes, strict=False):
            used = self.members.setdefault(_name(module), set())
            if used is not None:
                used.add(attribute)
        if not rest:
            if is_local(_name(path[-1])):
                self.members[_name(path[-1])] = None
            self.names.update({_name(path[0]), _name(path[-2] if len(path) > 2 else path[-1])})
            return _MISSING
        name = _name(path[-1])
        self.names.update({_name(path[0]), name})
        found = self.member(path[-1], rest[0])
        if found is _MISSING:  # lazily loaded: what it will be is known by name only
            self.names.add(follow(name, rest) if len(rest) > 1 else f"{name}.{rest[0]}")
            return _MISSING
        known = found is importlib.import_module or found is builtins.__import__
        return found if known or is_local(name) else _MISSING

    def member(self, module: object, attribute: str) -> object:
        loaded = sys.modules.get(f"{_name(module)}.{attribute}", _MISSING)
        return _members(module).get(attribute, loaded)

    def imported(self, module: str, name: str, member: str | None) -> None:
        """An import statement, or a call that is one, in a code object."""
        if member is not None:
            self.lazy.append((member, module, name))
        elif module and is_local(module):
            self.absent.add(module)
        elif module:
            self.names.add(name)


def _operations(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """Operations of a code object; those that newer Pythons fuse are taken apart again."""
    for instruction in dis.get_instructions(code):
        op, argument = instruction.opname, instruction.argval
        if op in _SKIPPED_OPS:
            continue
        if isinstance(argument, tuple) and op.count("_FAST") == 2:  # such as STORE_FAST_LOAD_FAST
            yield op.partition("_FAST")[0] + "_FAST", argument[0]
            yield "STORE_FAST" if op.endswith("STORE_FAST") else "LOAD_FAST", argument[1]
        else:
            yield op, argument


def _name(module: object) -> str:
    name = _members(module).get("__name__")
    return name if isinstance(name, str) else ""


def _package(variables: Mapping[str, Any]) -> str | None:
    """The package that relative imports start from, as `importlib` finds it."""
    package = variables.get("__package__")
    if isinstance(package, str) and package:
        return package
    name = variables.get("__name__")
    if not isinstance(name, str):
        return None
    return name if "__path__" in variables else name.rpartition(".")[0]
