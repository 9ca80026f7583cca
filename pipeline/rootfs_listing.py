"""Lists what a root filesystem holds. Standard library only: the root filesystem's own Python runs this file.

`python -I -B rootfs_listing.py RESULT` writes one JSON object to RESULT: what was found, without a judgement.
"""

import ast
import csv
import importlib.machinery
import importlib.metadata
import json
import os
import pkgutil
import platform
import site
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

#: What declares a namespace in the older styles.
DECLARERS = {"pkgutil", "pkg_resources"}

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


def recorded_names(record: str) -> list[str]:
    """The paths in a RECORD, as far as it can be read."""
    lines = record.replace("\0", "").splitlines()
    try:
        return [row[0] for row in csv.reader(lines) if row]
    except csv.Error:
        return [line.partition(",")[0] for line in lines]


def recorded_files(folder: Path) -> list[Path] | None:
    """Module and path files that a distribution says it installed, and that exist; None: it does not say."""
    base = folder.parent
    text = read_text(folder / "RECORD")
    if text is not None:
        names = recorded_names(text)
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
        match statement:
            case ast.Import(names=names):
                harmless = {alias.name for alias in names} <= DECLARERS
            case ast.ImportFrom(module=module):
                harmless = module in DECLARERS or module == "__future__"
            case ast.Assign(targets=[ast.Name(id="__path__")]):
                harmless = True
            case ast.Expr(value=ast.Call()):
                harmless = "declare_namespace(" in ast.unparse(statement)
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                continue
            case _:
                harmless = False
        if not harmless:
            return False
        text = ast.unparse(statement)
        declares = declares or "extend_path(" in text or "declare_namespace(" in text
    return declares


def namespace_inits(files: list[Path]) -> list[str]:
    """The `__init__.py` files that only declare a namespace: others may fill it, whether they are installed or not."""
    inits = sorted({path for path in files if path.name == "__init__.py"})
    return [str(path) for path in inits if path.stat().st_size < 4096 and declares_namespace(path)]


def declares_namespace(path: Path) -> bool:
    text = read_text(path) or ""
    return ("extend_path" in text or "declare_namespace" in text) and only_declares_namespace(text)


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


def names_in_archive(path: str) -> dict[str, list[str]]:
    """The same of an archive on the module path."""
    found = list(pkgutil.iter_modules([path]))
    return {
        "packages": [module.name for module in found if module.ispkg],
        "modules": [module.name for module in found if not module.ispkg],
    }


def is_leftover(folder: Path) -> bool:
    """Whether it was being removed: pip takes its first letter away before, and an interrupted removal leaves it so."""
    return folder.name.startswith(("~", "-"))


def list_distributions() -> tuple[list[dict[str, Any]], list[Path]]:
    """One record a metadata folder, in a fixed order: by place on the module path, then by name; and their files."""
    found: dict[Path, dict[str, Any]] = {}
    owned: list[Path] = []
    for distribution in importlib.metadata.distributions():
        path: Any = getattr(distribution, "_path", None)
        if path is None:
            continue
        folder = Path(str(path))  # of an archive, where it would be in it
        if isinstance(path, Path):
            folder = Path(os.path.realpath(path.parent), path.name)  # lib64 is often a link to lib
        if folder in found:
            continue
        files = None
        if folder.is_file():  # an .egg-info file is its own metadata
            text = read_text(folder)
        elif isinstance(path, Path):
            text, files = read_text(folder / "METADATA") or read_text(folder / "PKG-INFO"), recorded_files(folder)
        else:
            text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")
        header = HeaderParser().parsestr(text or "")
        top_level = distribution.read_text("top_level.txt") if not isinstance(path, Path) else None
        found[folder] = {
            "folder": folder.name,
            "place": str(folder.parent),
            "name": None if is_leftover(folder) else header["Name"],
            "version": (header["Version"] or "").strip(),
            "files": None if files is None else [str(file) for file in files if file.suffix != ".pth"],
            "top_level": (top_level or read_text(folder / "top_level.txt") or "").split(),
            "editable": editable(folder, files or []),
        }
        owned += files or []
    places = {os.path.realpath(entry): position for position, entry in reversed(list(enumerate(sys.path)))}
    order = sorted(found, key=lambda folder: (places.get(str(folder.parent), len(places)), str(folder)))
    return [found[folder] for folder in order], owned


def list_everything() -> dict[str, Any]:
    """Python, its module path and standard library, and the distributions."""
    records, files = list_distributions()
    folders = {folder for record in records for folder in [record["place"], *record["editable"]["folders"]]}
    projects = {record["editable"]["project"] for record in records} - {""}
    folders |= projects | {str(Path(project, "src")) for project in projects}
    return {
        "python": platform.python_version(),
        "suffixes": SUFFIXES,
        "path": [os.path.realpath(entry) for entry in sys.path if Path(entry).exists()],
        "sites": [os.path.realpath(entry) for entry in site.getsitepackages()],
        "stdlib": sorted(sys.stdlib_module_names),
        "stdlib_folders": sorted({os.path.realpath(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib")}),
        "distributions": records,
        "namespace_inits": namespace_inits(files),
        "names": {
            folder: names_in(Path(folder)) if Path(folder).is_dir() else names_in_archive(folder)
            for folder in sorted(folders)
        },
    }


if __name__ == "__main__":
    # ASCII, so that a file name that is no text survives as an escape.
    Path(sys.argv[1]).write_text(json.dumps(list_everything()), encoding="ascii")
