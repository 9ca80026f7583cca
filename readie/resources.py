"""Datasets, models and tokenizers: declared in `resources.toml`, loaded once, and handed to functions by `resource`.

    ["dataset:sklearn/iris"]                    # the kind, a colon, and a name
    loader = "sklearn.datasets:load_iris"       # module:function
    keywords = { as_frame = true }              # and `arguments = [...]`, in order
    needs = ["pandas"]                          # modules, and other keys, that are loaded before

The file lies at the top of the root filesystem. Inside a sandbox this module is part of what the executor brings along,
so it needs the standard library alone.
"""

import functools
import hashlib
import importlib
import importlib.util
import json
import math
import os
import re
import sys
import threading
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, NoReturn

from readie.errors import BadFile, UnknownResource

KINDS = ("dataset", "model", "tokenizer")
FILE = "resources.toml"
MAX_KEY = 1024

_FIELDS = ("kind", "loader", "arguments", "keywords", "needs")
_EXAMPLE = "Write ['dataset:sklearn/iris'] and below it loader = \"sklearn.datasets:load_iris\"."
_LOADER = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")
_MODULE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_PLACE = re.compile(r"\A\{((?:[^\W\d]\w*(?:\.[^\W\d]\w*)*)?)\}(?=/|$)")


def is_resource(name: str) -> bool:
    """Whether `name` is the key of a dataset, model or tokenizer, such as `model:gpt2`; a module's name never is."""
    kind, colon, rest = name.partition(":")
    return bool(colon) and kind in KINDS and bool(rest) and rest.isprintable() and rest == rest.strip()


@dataclass(frozen=True)
class Resource:
    """One declaration. Text in `arguments` and `keywords` may begin with a place, such as `{sklearn}/…`: see `load`."""

    key: str
    loader: str  # module:function
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    folder: str = ""  # where it was declared

    @property
    def kind(self) -> str:
        return self.key.partition(":")[0]

    @property
    def modules(self) -> list[str]:
        """What is imported before the loader is called: the modules that it needs, then its own."""
        module = self.loader.partition(":")[0]
        return [name for name in self.needs if not is_resource(name) and name != module] + [module]

    @property
    def resources(self) -> list[str]:
        """The keys that it needs."""
        return [name for name in self.needs if is_resource(name)]

    def load(self) -> Any:
        """Imports what is needed and calls the loader. Raises whatever that raises.

        `{package}/…` in its arguments is a path in the folder of that package, `{}/…` one beside `resources.toml`.
        """
        for name in self.modules:
            importlib.import_module(name)
        module, _, function = self.loader.partition(":")
        loader: Any = functools.reduce(getattr, function.split("."), sys.modules[module])
        return loader(*self._place(list(self.arguments)), **self._place(dict(self.keywords)))

    def _place(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._place(part) for part in value]
        if isinstance(value, dict):
            return {name: self._place(part) for name, part in value.items()}
        if isinstance(value, str):
            return _PLACE.sub(lambda match: folder_of(match[1]) if match[1] else self.folder, value, count=1)
        return value


def folder_of(package: str) -> str:
    """The folder of an installed package, which is not imported for that. Raises `ModuleNotFoundError`."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if spec and not folders and spec.has_location:
        folders = [os.path.dirname(spec.origin or "")]  # noqa: PTH120 - text in, text out
    if not folders:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return folders[0]


# ---- the file ----


def read_resources(path: str | os.PathLike[str]) -> dict[str, Resource]:
    """The declarations in the file, by key, in its order; none where there is no file.

    Raises `BadFile`, which names the file, the key and the rule.
    """
    text = os.fspath(path)
    try:
        with open(text, "rb") as file:  # noqa: PTH123 - pathlib takes as long to import as all the rest
            tables = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error) or type(error).__name__
        raise BadFile(f"{text}: {reason}", _EXAMPLE) from error
    folder = os.path.dirname(os.path.abspath(text))  # noqa: PTH100, PTH120
    read = {key: _Reader(text, folder, key).read(table) for key, table in tables.items()}
    for key, one in read.items():
        for needed in one.resources:
            if needed not in read:
                _Reader(text, folder, key).refuse("needs", f"{needed} is not declared")
    in_order(read, read, text)
    return read


class _Reader:
    """Reads one table of the file; what is wrong with it is said with its place."""

    def __init__(self, path: str, folder: str, key: str) -> None:
        self.path = path
        self.folder = folder
        self.key = key

    def refuse(self, field: str, rule: str) -> NoReturn:
        place = f'["{self.key}"]' + (f".{field}" if field else "")
        place = "".join(c if c.isprintable() else "\ufffd" for c in place)
        raise BadFile(f"{self.path}: {place}: {rule}", _EXAMPLE)

    def read(self, table: Any) -> Resource:
        if not is_resource(self.key) or len(self.key) > MAX_KEY:
            kinds = ", ".join(f"{kind}:" for kind in KINDS)
            self.refuse("", f"a key is one of {kinds} and a name of printable characters, {MAX_KEY} at most in all")
        if not isinstance(table, dict):
            self.refuse("", "must be a table")
        for name in table:
            if name not in _FIELDS:
                self.refuse(name, f"no such field; there are {', '.join(_FIELDS)}")
        kind = self.key.partition(":")[0]
        if table.get("kind", kind) != kind:
            self.refuse("kind", f"must be {kind}, as the key says, or left out")
        loader = table.get("loader")
        if not isinstance(loader, str) or not _LOADER.fullmatch(loader):
            self.refuse("loader", 'must be "module:function"' if "loader" in table else "is missing")
        arguments, keywords = table.get("arguments", []), table.get("keywords", {})
        if not isinstance(arguments, list):
            self.refuse("arguments", "must be a list")
        if not isinstance(keywords, dict) or not all(map(str.isidentifier, keywords)):
            self.refuse("keywords", "must be a table of names")
        self.check("arguments", arguments)
        self.check("keywords", keywords)
        needs = table.get("needs", [])
        if not isinstance(needs, list):
            self.refuse("needs", "must be a list")
        for name in needs:
            if not isinstance(name, str) or not (_MODULE.fullmatch(name) or is_resource(name)):
                self.refuse("needs", f"{name!r} is neither a module's name nor a key")
        return Resource(self.key, loader, tuple(arguments), keywords, tuple(dict.fromkeys(needs)), self.folder)

    def check(self, field: str, value: Any) -> None:
        """Values that mean the same everywhere: dates depend on who reads them."""
        if isinstance(value, list):
            for part in value:
                self.check(field, part)
        elif isinstance(value, dict):
            for part in value.values():
                self.check(field, part)
        elif not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
            self.refuse(field, f"{value} is none of text, number, true, false, list, table")


def in_order(declared: Mapping[str, Resource], keys: Iterable[str], path: str = FILE) -> list[str]:
    """The keys and all that they need, each after what it needs. Raises `BadFile` where some need each other."""
    needs: dict[str, list[str]] = {}
    waiting = list(keys)
    while waiting:
        key = waiting.pop()
        if key not in needs:
            needs[key] = declared[key].resources
            waiting += needs[key]
    try:
        return list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        circle = " → ".join(error.args[1])
        raise BadFile(f"{path}: needs: {circle}: none of them can be loaded first", _EXAMPLE) from error


def hash_resources(declared: Mapping[str, Resource], keys: Iterable[str]) -> str:
    """SHA-256 over the declarations of the keys and of what they need, "" for no keys. Raises `UnknownResource`.

    A checkpoint carries it: what it holds was loaded by these.
    """
    keys = [key for key in keys if is_resource(key)]
    for key in keys:
        if key not in declared:
            raise UnknownResource(f"{key} is not declared")
    found = [declared[key] for key in sorted(in_order(declared, keys))]
    content = [[one.key, one.loader, one.arguments, one.keywords, one.needs] for one in found]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest() if content else ""


# ---- what is loaded ----


class Store:
    """The resources of one file that this process has loaded. A fork has them too, and changes only its own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.declared = read_resources(path)
        self.loaded: dict[str, Any] = {}
        self.lock = threading.RLock()  # a loader may ask for another resource

    def get(self, key: str) -> Any:
        """Raises `UnknownResource`, or what the loader raises, with a note on whose loader it is."""
        with self.lock:
            if key in self.loaded:
                return self.loaded[key]
            if key not in self.declared:
                known = ", ".join(self.declared) or "nothing"
                raise UnknownResource(f"{key!r} is not declared: {self.path} declares {known}")
            for needed in in_order(self.declared, [key]):
                if needed not in self.loaded:
                    try:
                        value = self.declared[needed].load()
                    except BaseException as error:
                        error.add_note(f"while {needed} was loaded as {self.path} declares it")
                        raise
                    self.loaded.setdefault(needed, value)
            return self.loaded[key]


@functools.cache
def open_store(path: str) -> Store:
    """The store of a file; read once in a process."""
    return Store(path)


def resource(key: str) -> Any:
    """The dataset, model or tokenizer `key`, as `resources.toml` declares it; the same object each time.

    On a worker it is there already where the checkpoint holds it; otherwise it is loaded at the first call. Elsewhere
    it is loaded as the file that RESOURCES names declares it. Raises `UnknownResource`, or what its loader raises.
    """
    executor: Any = sys.modules.get("readie_executor")
    if executor is not None:
        return open_store(executor.RESOURCES).get(key)
    from readie.client import read_client_settings

    return open_store(os.path.abspath(read_client_settings().resources)).get(key)  # noqa: PTH100
