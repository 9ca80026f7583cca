"""Compiles byte code ahead. Standard library only: the root filesystem's own Python runs this file.

`python -I -B rootfs_compile.py` reads a JSON list of files from stdin (null: all that programs import), and writes one
JSON object to stdout: how many files were compiled, and how many cannot be. What is installed gets unchecked hashes, so
that an import never looks at the source; the standard library, which others may use as well, keeps its time stamps.
"""

import compileall
import importlib.util
import json
import multiprocessing
import os
import py_compile
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

NOT_IMPORTED = {"__pycache__", "test", "tests"}  # where something is imported from these after all, it is listed later
NOT_STDLIB = {"site-packages", "dist-packages", "idlelib", "lib2to3"}
UNCHECKED = 1  # the flags of byte code that is good for the source with this hash, and never checked


def is_stale(path: str, *, unchecked: bool) -> bool:
    """Whether there is no byte code for the source as it is now, of the kind that is wanted."""
    try:
        with Path(importlib.util.cache_from_source(path)).open("rb") as file:
            head = file.read(16)
        if head[:4] != importlib.util.MAGIC_NUMBER:
            return True
        flags = int.from_bytes(head[4:8], "little")
        if flags:
            return (unchecked and flags != UNCHECKED) or head[8:] != importlib.util.source_hash(Path(path).read_bytes())
        status = Path(path).stat()
    except OSError:
        return True
    stamp = (int(status.st_mtime) & 0xFFFFFFFF).to_bytes(4, "little") + (status.st_size & 0xFFFFFFFF).to_bytes(
        4, "little"
    )
    return unchecked or head[8:] != stamp


def sources(top: str, left_out: set[str]) -> Iterator[str]:
    for folder, names, files in os.walk(top):
        names[:] = [name for name in names if name not in left_out]
        yield from (str(Path(folder, name)) for name in files if name.endswith(".py"))


def compile_file(path: str, unchecked: bool) -> bool:
    kind = py_compile.PycInvalidationMode.UNCHECKED_HASH if unchecked else py_compile.PycInvalidationMode.TIMESTAMP
    return bool(compileall.compile_file(path, quiet=2, force=True, invalidation_mode=kind))


def main() -> None:
    """The files listed, or each folder of installed packages and the standard library."""
    installed = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    stdlib = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")} - installed
    listed = json.load(sys.stdin)
    wanted = [(path, path.startswith(tuple(installed))) for path in listed or ()]
    if listed is None:
        wanted = [(path, True) for top in installed for path in sources(top, NOT_IMPORTED)]
        wanted += [(path, False) for top in stdlib for path in sources(top, NOT_IMPORTED | NOT_STDLIB)]
    wanted = [(path, unchecked) for path, unchecked in wanted if is_stale(path, unchecked=unchecked)]
    done = []
    if wanted:
        print(f"{len(wanted)} files to compile", file=sys.stderr, flush=True)
        workers = len(os.sched_getaffinity(0))
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
            done = list(pool.map(compile_file, *zip(*wanted, strict=True), chunksize=20))
    print(json.dumps({"compiled": sum(done), "failed": len(done) - sum(done)}))


if __name__ == "__main__":
    main()
