"""Which modules code asks for: from source text, and from a function's code objects."""

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readie.imports import (
    MAX_SOURCE,
    deepest,
    imports_of_function,
    imports_of_source,
    is_local,
    outside_stdlib,
    reach,
)

# ---- source text ----

SOURCES = {
    "import numpy": {"numpy"},
    "import numpy as np, a.b.c": {"numpy", "a.b.c"},
    "from sklearn.svm import LinearSVC": {"sklearn.svm.LinearSVC"},
    "from a.b import c as d, e": {"a.b.c", "a.b.e"},
    "from numpy import *": {"numpy"},
    "import numpy\nimport numpy.linalg": {"numpy.linalg"},
    "import os, sys, xml.etree.ElementTree\nfrom __future__ import annotations": set(),
    "import __main__": set(),
    # guarded, conditional, lazy
    "try:\n    import ujson\nexcept ImportError:\n    import simplejson": {"ujson", "simplejson"},
    "try:\n    pass\nexcept* E:\n    import a\nelse:\n    import b\nfinally:\n    import c": {"a", "b", "c"},
    "if x:\n    import a\nelif y:\n    import b\nelse:\n    import c": {"a", "b", "c"},
    "def f():\n    async def g():\n        class C:\n            import a.b\n    return lambda: __import__('c')": {
        "a.b",
        "c",
    },
    "with x:\n    import a\nfor _ in y:\n    import b\nwhile z:\n    import c": {"a", "b", "c"},
    "match x:\n    case 1:\n        import a": {"a"},
    "await foo()\nimport trio": {"trio"},
    # for type checkers only
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\nelse:\n    import b": {"b"},
    "import typing as t\nif t.TYPE_CHECKING:\n    import a\nimport b": {"b"},
    "from typing import TYPE_CHECKING as TC\nif TC:\n    import a\nif not TC:\n    import b": {"b"},
    "if not TYPE_CHECKING:\n    import a\nelse:\n    import b": {"a"},
    "if TYPE_CHECKING and x:\n    import a\nif TYPE_CHECKING or x:\n    import b": {"b"},
    "if False:\n    import a\nif 0:\n    import b\nif True:\n    import c": {"c"},
    "x = __import__('a') if TYPE_CHECKING else __import__('b')": {"b"},
    # relative
    "from . import a\nfrom .b import c\nfrom .. import d": set(),
    # by functions
    "import importlib\nimportlib.import_module('a.b')": {"a.b"},
    "import importlib as i\ni.import_module(name='a.b')": {"a.b"},
    "from importlib import import_module as load\nload('a')\nload(variable)\nload(f'{x}')": {"a"},
    "import importlib\nimportlib.import_module('.b', 'a')\nimportlib.import_module('..c', package='a.x')": {
        "a.b",
        "a.c",
    },
    "import importlib\nimportlib.import_module('.b', __package__)": set(),
    "__import__('a.b')\n__import__('c', fromlist=['d'])\n__import__('e', None, None, ('f', '*'))": {
        "a.b",
        "c.d",
        "e.f",
    },
    "import pytest\nnp = pytest.importorskip('numpy')": {"pytest", "numpy"},
    "__import__('not a module')\n__import__('')\nother.import_module('x')": set(),
    # attributes lead to submodules; the last one is what is used
    "import scipy\nscipy.signal.windows": {"scipy.signal"},
    "import numpy as np\nnp.linalg.norm(x)\nnp.sin(x)": {"numpy.linalg"},
    "from scipy import signal as s\ns.windows.hann(3)": {"scipy.signal.windows"},
    "import a.b\na.b.c.d()": {"a.b.c"},
    "x.a.b.c\nimport y": {"y"},
    "import a\na" + ".b" * 40: {"a" + ".b" * 7},
    "try:\n    import ujson as json\nexcept ImportError:\n    import rjson as json\njson.a.b": {"ujson.a", "rjson.a"},
}


@pytest.mark.parametrize(("source", "names"), SOURCES.items())
def test_source_gives_its_deepest_candidates(source: str, names: set[str]) -> None:
    """What a source imports in any branch is found, except what only type checkers import."""
    assert imports_of_source(source, "x.py").names == names
    assert imports_of_source(source.encode(), "x.py").errors == ()


def test_relative_imports_are_resolved_in_the_package_that_is_given() -> None:
    """With a package, dots stand for it and what is above it; beyond its top they mean nothing."""
    source = "from . import a\nfrom .b import c\nfrom .. import d\nfrom ..e.f import *\nfrom ... import g"
    source += "\nimport importlib\nimportlib.import_module('.h', __package__)"

    assert imports_of_source(source, "x.py", package="p.q").names == {"p.q.a", "p.q.b.c", "p.d", "p.e.f", "p.q.h"}


@pytest.mark.parametrize(
    "source",
    [
        "# -*- coding: latin-1 -*-\nimport zarr  # é".encode("latin-1"),
        "# vim: set fileencoding=cp1251 :\nimport zarr  # ж".encode("cp1251"),
        b"\xef\xbb\xbfimport zarr",
        "\ufeffimport zarr",
        "# coding: latin-1\nimport zarr  # ж",
        b"import zarr\r\nx = '\\d'\r\n",
        b"\x0cimport zarr",
    ],
)
def test_encoding_is_that_of_the_cookie_or_mark(source: str | bytes) -> None:
    """Bytes are decoded as Python does it; text needs no cookie; a warning of the parser is nobody's."""
    assert imports_of_source(source, "x.py").names == {"zarr"}


# Each either gives einops or is listed: which of the two depends on the Python that reads it.
TROUBLE: dict[str, str | bytes] = {
    "py2.py": 'import einops\nprint "x"\n',
    "conflict.py": "import einops\n<<<<<<< HEAD\nimport a\n=======\nimport b\n>>>>>>> x\n",
    "plus.py": "import einops\nx = " + "+".join(["1"] * 3000) + "\n",
    "attr.py": "import einops\nx = a" + ".b" * 20000 + "\n",
    "call.py": "import einops\nx = a" + ".b()" * 3000 + "\n",
    "minus.py": "import einops\nx = " + "-" * 20000 + "1\n",
    "paren.py": "import einops\nx = " + "(" * 300 + "1" + ")" * 300 + "\n",
    "tabs.py": "if 1:\n\timport einops\n        import zarr\n",
    "nul.py": "import einops\n\0",
    "surrogate.py": "import einops\nx = '\ud800'",
    "cookie.py": b"# coding: nonsense\nimport einops\n",
    "utf16.py": "import einops".encode("utf-16"),
}
LISTED = {"py2.py", "conflict.py", "paren.py", "tabs.py", "nul.py", "surrogate.py", "cookie.py", "utf16.py"}


@pytest.mark.parametrize("name", TROUBLE)
def test_source_that_cannot_be_read_is_listed_with_its_error(name: str) -> None:
    """Nothing is raised and nothing silently missing: a source gives its imports, or class and message of its error."""
    found = imports_of_source(TROUBLE[name], name)

    assert (found.names == {"einops"}) is not bool(found.errors)
    assert all(error.filename == name and error.kind.endswith("Error") for error in found.errors)
    assert found.errors or name not in LISTED


def test_source_over_the_size_limit_is_listed_and_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source of 24 MB costs no time."""
    source = "import einops\n" + "V = 1\n" * 4_000_000
    monkeypatch.setattr("ast.parse", lambda *_: pytest.fail("it was parsed"))
    found = imports_of_source(source, "big.py")

    assert len(source) > MAX_SOURCE
    assert [(error.filename, error.kind) for error in found.errors] == [("big.py", "OverLimit")]


@pytest.mark.parametrize(
    "source",
    [
        "if a: pass\n" + "elif b: import x\n" * 900,
        "not " * 900 + "y\nimport x",
        "if " + "not " * 900 + "1:\n    import x",
        "a" + ".b" * 900 + "\nimport x",
        "a" + ".b(c)" * 400 + "\nimport x",
        "a" + "[b]" * 900 + "\nimport x",
        "(" * 150 + "a" + ")" * 150 + "\nimport x",
        "x = " + "[" * 90 + "__import__('x')" + "]" * 90,
    ],
)
def test_depth_that_the_parser_takes_is_read(source: str) -> None:
    """The tree is walked without recursion: a caller deep in its own stack gets the same answer."""

    def deep(frames: int) -> frozenset[str]:
        return deep(frames - 1) if frames else imports_of_source(source, "x.py").names

    assert imports_of_source(source, "x.py").names == {"x"}
    assert deep(20) == {"x"}


def test_standard_library_is_left_out_in_a_step_of_its_own() -> None:
    """Names are compared by their first part."""
    assert outside_stdlib(["os", "os.path", "osx", "xml.etree", "numpy.os", "__main__"]) == {"osx", "numpy.os"}


def test_deepest_names_contain_no_other() -> None:
    """A name is left out if another one goes further; what is no dotted name is left out too."""
    assert deepest(["a", "a.b", "ab", "a.b.c", "", ".x", "a..b", "b-c", "d" * 2000]) == {"ab", "a.b.c"}


# ---- functions: the cases, as one program ----

PROGRAM = """
import functools
import numpy as np, os.path as osp, threading
import xml.etree.ElementTree as ET
import scipy, scipy.signal
LOCK, STATE = threading.Lock(), {}
@remote
def f1(x):
    import einops
    return np.sin(x)
f2 = remote(lambda x: np.cos(x))
f3, f4 = remote(lambda x: np.cos(x)), remote(lambda y: y)
@tagged(tags=(1, 2), key=lambda v: v + 1)
def f5():
    import zarr
def make(k):
    import h5py
    def inner(): return h5py.version, k
    return remote(inner)
f6 = make(3)
@remote
def f7(): return scipy.signal.windows
@remote
def f8():
    STATE["x"] = 1
    return len(STATE)
@remote
def f9():
    with LOCK: return 1
def helper(): import fiona; return 1
@remote
def f10(): return helper()
ns = {"remote": remote}
exec("@remote\\ndef f11():\\n    import netCDF4\\n    return 1\\n", ns)
f11 = ns["f11"]
f12 = remote(functools.partial(f1.__wrapped__, 1))
@remote
async def f13():
    import trio
class C:
    @remote
    def m(self): import shapely
f14 = C.m
f15 = C().m
f16 = remote(len)
@remote
def f17(): return osp.join("a", ET.__name__)
"""

ANSWERS = {
    "f1": ["einops", "numpy"],
    "f2": ["numpy"],
    "f3": ["numpy"],
    "f4": [],
    "f5": ["zarr"],
    "f6": ["h5py"],
    "f7": ["scipy.signal"],
    "f8": [],
    "f9": [],
    "f10": ["fiona"],
    "f11": ["netCDF4"],
    "f12": ["einops", "numpy"],
    "f13": ["trio"],
    "f14": ["shapely"],
    "f15": ["shapely"],
    "f16": [],
    "f17": [],
}

Write = Callable[[str, str], ModuleType]


@pytest.fixture
def forgotten(tmp_path: Path) -> Iterator[None]:
    """Modules below the test's folder are forgotten afterwards."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in repr(sys.modules[name]):
            del sys.modules[name]


@pytest.fixture
def installed(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Installs a module of this name and source, as an installer would: below a folder `site-packages`."""
    folder = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(folder)

    def install(name: str, source: str) -> None:
        path = folder.joinpath(*name.split("."))
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text(source)
        importlib.invalidate_caches()

    return install


@pytest.fixture
def local(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a module of the user's own, and imports it."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def write(name: str, source: str) -> ModuleType:
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent != folder:
            (path.parent / "__init__.py").touch()
        path.write_text(source)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return write


@pytest.fixture
def program(local: Write, installed: Callable[[str, str], None]) -> ModuleType:
    """The program of the cases, as a file that is imported. What it imports in bodies is not installed."""
    installed("h5py", "version = 1")
    head = "from readie import remote\ndef tagged(**options): return remote\n"
    return local("cases", head + PROGRAM)


@pytest.mark.parametrize(("name", "modules"), ANSWERS.items())
def test_function_asks_for_what_it_uses_and_no_more(program: ModuleType, name: str, modules: list[str]) -> None:
    """Bodies, globals, closures, partials, methods, lambdas and functions without source are all read."""
    assert imports_of_function(getattr(program, name)) == modules


def test_program_in_main_gives_the_same_answers(
    installed: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a file or a source, as in an interactive session, nothing is different."""
    installed("h5py", "version = 1")
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec("from readie import remote\ndef tagged(**options): return remote\n" + PROGRAM, vars(main))

    assert {name: imports_of_function(getattr(main, name)) for name in ANSWERS} == ANSWERS


# ---- functions: one rule each ----


def body(source: str, **variables: object) -> types.FunctionType:
    """The function `f` of a source, with these globals."""
    space: dict[str, object] = {"__name__": "__main__", **variables}
    exec(source, space)
    function = space["f"]
    assert isinstance(function, types.FunctionType)
    return function


BODIES = {
    "import a.b.c as x; x.d.e()": ["a.b.c.d"],
    "import a.b.c; a.b.c.d.e()": ["a.b.c.d"],
    "from a.b import c, d as e; return e.f.g, c": ["a.b.c", "a.b.d.f"],
    "import a\n    def g():\n        return a.b.c\n    return g": ["a.b"],
    "import a\n    return [a.b.c for _ in y]": ["a.b"],
    "import a\n    class C(a.b.c):\n        import d\n        x = d.e.f\n    return C": ["a.b", "d.e"],
    "try:\n        import a as j\n    except ImportError:\n        import b as j\n    return j.c.d": ["a.c", "b.c"],
    "import a, b; return b.c.d if a else (lambda: a.e.f)": ["a.e", "b.c"],
    "global np; import numpy as np; return np.linalg.norm": ["numpy.linalg"],
    "import importlib; importlib.import_module('a.b')": ["a.b"],
    "from importlib import import_module; return import_module('a')": ["a"],
    "return __import__('a.b'), __import__(y), str('c')": ["a.b"],
    "import os.path, sys; return os.path.join": [],
    "if y:\n        import a\n    while y:\n        import b\n    with y:\n        import c": ["a", "b", "c"],
    "match y:\n        case 1: import a": ["a"],
    "from . import a\n    from .b import c": [],
    "import a; b = a.c; d = b; return b.e.f, d": ["a"],
    "x = y = z = 1; import a as b, c as d; return b.e.f, d.e.f": ["a.e", "c.e"],
}


@pytest.mark.parametrize(("source", "modules"), BODIES.items())
def test_body_is_read_from_its_code_object(source: str, modules: list[str]) -> None:
    """Imports in bodies, and attributes of what they bind, whatever the bytecode of this Python looks like."""
    assert imports_of_function(body(f"def f(y=1):\n    {source}")) == modules


MODULES = st.sampled_from(["a", "b", "a.b", "a.b.c", "c.a", "os", "os.path"])


@st.composite
def statements(draw: st.DrawFn, depth: int = 3) -> list[str]:
    """Lines of import statements, in any nesting of other statements."""
    module, part = draw(MODULES), draw(st.sampled_from(["x", "y", "b"]))
    lines = [
        draw(st.sampled_from([f"import {module}", f"import {module} as {part}", f"from {module} import {part}, z"]))
    ]
    if depth:
        inner = ["    " + line for line in draw(statements(depth - 1))]
        heads = ["if t:", "for v in t:", "while t:", "with t:", "def g():", "async def h():", "class K:"]
        block = draw(st.sampled_from([*heads, "try:", ""]))
        ends = {"": [], "try:": ["except E:", *inner]}
        lines += [block, *inner, *ends.get(block, [])] if block else draw(statements(depth - 1))
    return lines


@settings(max_examples=40, deadline=None)
@given(statements())
def test_imports_in_a_body_are_those_of_its_source(lines: list[str]) -> None:
    """Both readers find the same import statements, in any nesting."""
    function = body("def f(t, E):\n" + "\n".join("    " + line for line in lines))

    assert set(imports_of_function(function)) == imports_of_source("\n".join(lines), "x.py").names


def test_functions_that_are_sent_along_are_followed(local: Write) -> None:
    """Functions of local modules and of the program, called by name or through their module, at any distance."""
    local("mine.deep", "def last():\n    import c\ndef unused():\n    import never\n")
    mine = local("mine.near", "from mine.deep import last\ndef g():\n    import b\n    return last()\n")
    f = body("def h():\n    import a\n    return near.g()\ndef f():\n    return h()", near=mine)

    assert imports_of_function(f) == ["a", "b", "c"]


def test_functions_that_call_each_other_end() -> None:
    """Recursion is followed once."""
    assert imports_of_function(
        body("def f():\n    import a\n    return g()\ndef g():\n    import b\n    return f()")
    ) == [
        "a",
        "b",
    ]


def test_installed_function_stands_for_its_module(installed: Callable[[str, str], None]) -> None:
    """What is installed is not followed: the catalogue knows what it needs."""
    installed("theirs", "def g():\n    import a\nclass K: pass\nthing = K()")
    theirs = importlib.import_module("theirs")
    f = body("def f():\n    return g, K, thing", g=theirs.g, K=theirs.K, thing=theirs.thing)

    assert imports_of_function(f) == ["theirs"]
    assert imports_of_function(theirs.g) == ["theirs"]


def test_methods_that_nobody_calls_import_nothing() -> None:
    """A class is sent whole, so its globals count; imports in its methods do where a method is used."""
    source = """
class Base:
    def inherited(self):
        import a
class K(Base):
    kind = np.int64
    def __init__(self):
        import b
    def used(self):
        import c
        return self.size
    @property
    def size(self):
        import d
    @staticmethod
    def unused():
        import e
    def writes(self):
        return sp.linalg
def f():
    return K().used(), K().inherited()
"""
    import numpy as np
    import scipy as sp

    assert imports_of_function(body(source, np=np, sp=sp)) == ["a", "b", "c", "d", "numpy", "scipy.linalg"]


def test_values_stand_for_the_modules_of_their_types() -> None:
    """A global, default, annotation, cell or argument is unpickled on the worker, which imports its module."""
    import numpy as np
    from scipy import sparse

    by_global = body("def f():\n    return rows", rows=[{"x": np.zeros(1)}])
    by_default = body("def f(x=rows): pass", rows=np.zeros(1))
    by_annotation = body("def f(x: kind): pass", kind=sparse.csr_matrix)
    by_argument = functools.partial(body("def f(x): pass"), ([np.zeros(1)],), y={"z": sparse.csr_matrix((1, 1))})

    assert imports_of_function(by_global) == ["numpy"]
    assert imports_of_function(by_default) == ["numpy"]
    assert imports_of_function(by_annotation) == ["scipy.sparse._csr"]
    assert imports_of_function(by_argument) == ["numpy", "scipy.sparse._csr"]


def test_much_data_does_not_hide_code() -> None:
    """What an argument holds is looked at last, and only so much of it."""
    f = body("def f(rows):\n    return g()\ndef g():\n    return h()\ndef h():\n    import a")
    rows = [[object() for _ in range(200)] for _ in range(2000)]
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(count)
    try:
        found = imports_of_function(functools.partial(f, rows))
    finally:
        sys.setprofile(None)

    assert found == ["a"]
    assert steps < len(rows) * len(rows[0])


def test_lazy_module_is_not_loaded_by_looking(installed: Callable[[str, str], None]) -> None:
    """Attributes are read past `__getattr__`, and what they would load is known by name."""
    installed("lazy", "def __getattr__(name):\n    raise SystemExit('loaded')")
    installed("later", "raise SystemExit('loaded')")
    lazy = importlib.import_module("lazy")
    spec = importlib.util.find_spec("later")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    later = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(later)
    f = body("def f():\n    return lazy.sub.x(), later.y", lazy=lazy, later=later)

    assert imports_of_function(f) == ["later.y", "lazy.sub"]


def test_local_module_imported_in_a_body_is_named_as_absent(local: Write) -> None:
    """It is neither sent along nor on the worker."""
    local("mine.near", "")
    found = reach(body("def f():\n    import numpy, os, nowhere\n    from mine.near import x\n    import mine"))

    assert found.absent == ["mine", "mine.near"]
    assert found.modules == ["nowhere", "numpy"]


def test_what_is_used_of_a_local_module_is_known(local: Write) -> None:
    """Single attributes where only those are used; anything where the module itself is passed on."""
    local("two", "y = 1")
    one = local("one", "import two\nx = 1\ndef g(): return two.y")
    found = reach(body("def f():\n    return one.g(), one.x", one=one))

    assert found.members == {"one": {"g", "x"}, "two": {"y"}}
    assert reach(body("def f():\n    return print(one)", one=one)).members == {"one": None}


def test_what_is_sent_along_is_named_by_where_it_is(local: Write) -> None:
    """So that an error can say which global, cell or default is at fault."""
    thing = object()
    module = local("mine", "def make(k, d):\n    def g(x=d): return k, G\n    return g")
    module.G = thing  # type: ignore[attr-defined]
    uses = [
        use for use, value in reach(body("def f():\n    return g()", g=module.make([], thing))).uses if value is thing
    ]

    assert uses == ["global G of make.<locals>.g"]
    assert ("closure variable k of make.<locals>.g", []) in reach(module.make([], thing)).uses


def test_local_is_what_is_neither_installed_nor_standard(
    local: Write, installed: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a module's file lies decides; a folder that only has the name of a module is not one."""
    local("mine.near", "")
    local("alone", "")
    installed("space.theirs", "")
    importlib.import_module("space.theirs")
    (tmp_path / "project" / "data").mkdir()
    (tmp_path / "project" / "unloaded.py").write_text("")
    monkeypatch.setitem(sys.modules, "handmade", ModuleType("handmade"))

    mine = ["mine", "mine.near", "mine.near.f", "alone", "unloaded", "__main__", __name__]
    theirs = ["numpy", "numpy.linalg", "space", "space.theirs", "os", "os.path", "test.support", "data", "handmade"]
    assert [name for name in mine + theirs + ["nowhere", "readie.client", "cloudpickle", ""] if is_local(name)] == mine
