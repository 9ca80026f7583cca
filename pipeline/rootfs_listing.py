"""Lists what a root filesystem holds. Standard library only: the root filesystem's own Python runs this file.

`python -I -B rootfs_listing.py RESULT` writes one JSON object to RESULT: what was found, without a judgement.
"""

import ast
import csv
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import sys
import sysconfig
import urllib.parse
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

if sys.version_info < (3, 11):  # noqa: UP036 (any Python may be asked to run this)
    sys.exit(f"Python 3.11 or later is needed, and this is {platform.python_version()}")

#: Endings of module files, in the order in which the import system tries them.
SUFFIXES = [*importlib.machinery.EXTENSION_SUFFIXES, *importlib.machinery.SOURCE_SUFFIXES]
SUFFIXES += importlib.machinery.BYTECODE_SUFFIXES

#: Folders of a project that are no packages, although Python would take them for namespaces.
NOT_PACKAGES = {"benchmark", "benchmarks", "build", "dist", "doc", "docs", "example", "examples", "sample", "samples"}


def read_text(path: Path) -> str | None:
    """A text file, None where there is none. Old distributions wrote Latin-1."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def recorded_files(folder: Path) -> list[Path] | None:
    """Module and path files that a distribution says it installed, and that exist; None: it does not say."""
    base = folder.parent
    text = read_text(folder / "RECORD")
    if text is not None:
        names = [row[0] for row in csv.reader(text.splitlines()) if row]
    else:
        base, text = folder, read_text(folder / "installed-files.txt")
        if text is None:
            return None
        names = text.splitlines()
    wanted = {os.path.normpath(base / name) for name in names if name.endswith((*SUFFIXES, ".pth"))}
    # A leftover RECORD names files that are long gone: only what exists is owned.
    return [Path(path) for path in sorted(wanted) if "__pycache__" not in path and Path(path).is_file()]


def path_file_folders(path: Path) -> list[str]:
    """The folders that a .pth file adds to the module path."""
    lines = [line.strip() for line in (read_text(path) or "").splitlines()]
    lines = [line for line in lines if line and not line.startswith(("#", "import ", "import\t"))]
    return [folder for line in lines if Path(folder := os.path.normpath(path.parent / line)).is_dir()]


def finder_mapping(source: str) -> dict[str, str]:
    """Import name → file or folder, from the literal tables in an editable install's finder module."""
    mapping: dict[str, str] = {}
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return mapping
    for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                name, path = key.value, value.value
                if isinstance(name, str) and isinstance(path, str) and Path(path).is_absolute():
                    mapping[name] = os.path.normpath(path)
    return mapping


def editable(folder: Path, files: list[Path]) -> dict[str, Any]:
    """Where an editable install keeps its code: folders on the module path, import names, the project's folder."""
    folders: list[str] = []
    mapping: dict[str, str] = {}
    for path in files:
        if path.suffix == ".pth":
            folders += path_file_folders(path)
        elif path.name.startswith("_") and "editable" in path.name and path.suffix == ".py":
            mapping |= finder_mapping(read_text(path) or "")
    project = ""
    try:
        direct = json.loads(read_text(folder / "direct_url.json") or "{}")
        url = urllib.parse.urlsplit(direct["url"])
        if direct["dir_info"].get("editable") is True and url.scheme == "file":
            project = os.path.normpath(urllib.parse.unquote(url.path))
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # not installed from a folder
    return {"folders": folders, "mapping": mapping, "project": project}


def only_declares_namespace(source: str) -> bool:
    """Whether an `__init__.py` does nothing but declare a namespace, in pkgutil's or pkg_resources' style."""
    try:
        waiting: list[ast.stmt] = list(ast.parse(source).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    declares = False
    while waiting:
        statement = waiting.pop()
        if isinstance(statement, ast.Try):
            waiting += [*statement.body, *statement.orelse, *statement.finalbody]
            waiting += [inner for handler in statement.handlers for inner in handler.body]
            continue
        if isinstance(statement, ast.Assign):
            if [ast.unparse(target) for target in statement.targets] != ["__path__"]:
                return False
        elif isinstance(statement, ast.Expr):
            if not isinstance(statement.value, ast.Constant | ast.Call):
                return False
        elif not isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass):
            return False
        text = ast.unparse(statement)
        declares = declares or "extend_path(" in text or "declare_namespace(" in text
    return declares


def namespace_inits(owned: list[list[Path]]) -> list[str]:
    """The `__init__.py` files that only declare a namespace, in folders that several distributions fill."""
    owners: dict[Path, set[int]] = {}
    for number, files in enumerate(owned):
        for folder in {parent for path in files for parent in path.parents}:
            owners.setdefault(folder, set()).add(number)
    inits = {path for files in owned for path in files if path.name == "__init__.py"}
    shared = (path for path in sorted(inits) if len(owners[path.parent]) > 1)
    return [str(path) for path in shared if only_declares_namespace(read_text(path) or "")]


def names_in(folder: Path, depth: int = 3) -> dict[str, list[str]]:
    """Packages and single-file modules that a folder of the module path offers, those in namespaces with dots."""
    packages: list[str] = []
    modules: list[str] = []
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        entries = []
    for entry in entries:
        if entry.is_dir():
            if not entry.name.isidentifier():
                continue
            if (entry / "__init__.py").is_file():
                packages.append(entry.name)
            elif depth and entry.name not in NOT_PACKAGES:
                packages += [f"{entry.name}.{below}" for below in names_in(entry, depth - 1)["packages"]]
        else:
            name = next((entry.name.removesuffix(suffix) for suffix in SUFFIXES if entry.name.endswith(suffix)), "")
            modules += [name] if name.isidentifier() else []
    return {"packages": packages, "modules": modules}


def list_distributions() -> tuple[list[dict[str, Any]], list[list[Path]]]:
    """One record a metadata folder, in a fixed order: by place on the module path, then by name; and their files."""
    found: dict[Path, tuple[dict[str, Any], list[Path]]] = {}
    for distribution in importlib.metadata.distributions():
        path = getattr(distribution, "_path", None)
        if not isinstance(path, Path):
            continue  # in a zip file: no files of its own
        folder = Path(os.path.realpath(path.parent), path.name)  # lib64 is often a link to lib
        if folder in found:
            continue
        if folder.is_file():  # an .egg-info file is its own metadata
            text, files = read_text(folder), None
        else:
            text, files = read_text(folder / "METADATA") or read_text(folder / "PKG-INFO"), recorded_files(folder)
        header = HeaderParser().parsestr(text or "")
        record = {
            "folder": folder.name,
            "place": str(folder.parent),
            "name": header["Name"],
            "version": (header["Version"] or "").strip(),
            "files": None if files is None else [str(file) for file in files if file.suffix != ".pth"],
            "top_level": (read_text(folder / "top_level.txt") or "").split(),
            "editable": editable(folder, files or []),
        }
        found[folder] = record, files or []
    places = {os.path.realpath(entry): position for position, entry in reversed(list(enumerate(sys.path)))}
    order = sorted(found, key=lambda folder: (places.get(str(folder.parent), len(places)), str(folder)))
    return [found[folder][0] for folder in order], [found[folder][1] for folder in order]


def list_everything() -> dict[str, Any]:
    """Python, its module path and standard library, and the distributions."""
    records, files = list_distributions()
    folders = {folder for record in records for folder in [record["place"], *record["editable"]["folders"]]}
    return {
        "python": platform.python_version(),
        "suffixes": SUFFIXES,
        "path": [os.path.realpath(entry) for entry in sys.path if Path(entry).is_dir()],
        "stdlib": sorted(sys.stdlib_module_names),
        "stdlib_folders": sorted({os.path.realpath(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib")}),
        "distributions": records,
        "namespace_inits": namespace_inits(files),
        "names": {folder: names_in(Path(folder)) for folder in sorted(folders)},
    }


if __name__ == "__main__":
    # ASCII, so that a file name that is no text survives as an escape.
    Path(sys.argv[1]).write_text(json.dumps(list_everything()), encoding="ascii")
