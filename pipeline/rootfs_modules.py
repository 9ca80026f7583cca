"""Finds modules without importing any. Standard library only: the root filesystem's own Python runs this file.

`python -I -B rootfs_modules.py` reads a JSON list of dotted names from stdin, and writes to stdout, as JSON, for each its
longest prefix that is a module, or null.
"""

import json
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def look(name: str, path: Sequence[str] | None) -> tuple[bool, list[str]]:
    """Whether there is a module of that full name, on `path` or at the top, and where its submodules are."""
    for finder in list(sys.meta_path):
        # PathFinder would want the package around to be imported; the finders of the places do not.
        in_places = finder is PathFinder and path is not None
        found = look_in_places(name, path or ()) if in_places else ask(finder, name, path)
        if found[0]:
            return found
    return False, []


def ask(finder: object, *arguments: object) -> tuple[bool, list[str]]:
    """The answer of one finder. It may be anybody's, and fail in any way."""
    try:
        spec: ModuleSpec | None = finder.find_spec(*arguments)  # type: ignore[attr-defined]
        if spec is None:
            return False, []
        locations = spec.submodule_search_locations
        portions = list(getattr(locations, "_path", locations) or ())
        return spec.loader is not None or bool(portions), add_declared(spec, portions)
    except Exception:  # noqa: BLE001
        return False, []


def look_in_places(name: str, places: Sequence[str]) -> tuple[bool, list[str]]:
    """As the import system does it: the first module counts, else every folder of that name is a part of it."""
    portions: list[str] = []
    for place in places:
        try:
            importer = pkgutil.get_importer(place)
            spec = importer.find_spec(name) if importer is not None else None
        except Exception:  # noqa: BLE001, S112
            continue
        if spec is not None:
            if spec.loader is not None:
                return True, add_declared(spec, list(spec.submodule_search_locations or ()), places)
            portions += spec.submodule_search_locations or ()
    return bool(portions), portions


def add_declared(spec: ModuleSpec, portions: list[str], places: Sequence[str] | None = None) -> list[str]:
    """The parts of a package, with those that its code, which does not run here, would look for in every place."""
    if spec.origin and portions and declares_namespace(spec.origin):
        own = spec.name.rpartition(".")[2]
        everywhere = (str(Path(place, own)) for place in (sys.path if places is None else places))
        portions += [folder for folder in everywhere if folder not in portions and Path(folder).is_dir()]
    return portions


def declares_namespace(file: str) -> bool:
    try:
        text = Path(file).read_bytes()
    except OSError:
        return False
    return b"extend_path" in text or b"declare_namespace" in text


def deepest(name: str) -> str | None:
    found, path, parts = None, None, name.split(".")
    for end in range(1, len(parts) + 1):
        there, path = look(".".join(parts[:end]), path)
        if not there:
            break
        found = ".".join(parts[:end])
        if not path:
            break
    return found


if __name__ == "__main__":
    names = json.load(sys.stdin)
    print(json.dumps({name: deepest(name) for name in names}))
