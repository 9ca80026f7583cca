"""Finds modules without importing any. Standard library only: the root filesystem's own Python runs this file.

`python -I -B rootfs_modules.py` reads a JSON list of dotted names from stdin, and writes to stdout, as JSON, for each its
longest prefix that is a module, or null.
"""

import json
import pkgutil
import sys
from collections.abc import Sequence


def look(name: str, path: Sequence[str] | None) -> tuple[bool, list[str]]:
    """Whether there is a module of that full name, on `path` or at the top, and where its submodules are."""
    if path is None:
        for finder in list(sys.meta_path):
            try:
                spec = finder.find_spec(name, None)
            except Exception:  # noqa: BLE001, S112 - a finder that somebody installed may fail in any way
                continue
            if spec is not None:
                return True, list(spec.submodule_search_locations or ())
        return False, []
    # importlib would import the packages around; the folders' own finders do not.
    portions: list[str] = []
    for entry in path:
        importer = pkgutil.get_importer(entry)
        spec = importer.find_spec(name, None) if importer is not None else None
        if spec is not None:
            if spec.loader is not None:
                return True, list(spec.submodule_search_locations or ())
            portions += spec.submodule_search_locations or ()
    return bool(portions), portions


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
