"""Makes cpu.jsonl again: the import sets of the examples, documentation and tests that distributions bring along.

Nothing of the code is run; only import sets and file names are written. Same input, same bytes.

    python corpora/make_corpus.py --rootfs rootfs --sources sources --out corpora/cpu.jsonl

`--rootfs` is a root filesystem with the distributions installed: read are their modules' docstrings, their test and
example folders, and the description in their metadata. `--sources`, if given, holds source distributions, as archives
or unpacked, of which the same is read, and all pages and notebooks besides. See README.md for the rules.
"""

import argparse
import hashlib
import os
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from email.parser import BytesHeaderParser
from pathlib import Path

from packaging.utils import canonicalize_name

from pipeline.analyze import find_modules
from pipeline.corpus import Corpus, ImportSet, imports_of_file, imports_of_pieces, write_corpus
from pipeline.examples import examples_of_docstrings
from pipeline.rootfs import RootFilesystem, list_rootfs

MAX_FILE = 2_000_000  # bytes; what is larger was generated
MAX_MODULES = 40  # of one set; a file that asks for more drives a test suite, and nobody's call looks like it
MAX_SOURCES = 3

#: Folders whose programs are examples or tests. Any part of the path counts.
EXAMPLE_FOLDERS = frozenset(
    {
        "cookbook",
        "demo",
        "demos",
        "doc",
        "doc_src",
        "docs",
        "docs_src",
        "documentation",
        "example",
        "examples",
        "galleries",
        "gallery",
        "guide",
        "guides",
        "notebooks",
        "quickstart",
        "recipes",
        "sample",
        "samples",
        "snippets",
        "test",
        "tests",
        "tutorial",
        "tutorials",
    }
)
#: Files that run or build a project.
BUILD_FILES = frozenset({"conf.py", "conftest.py", "noxfile.py", "setup.py", "tasks.py", "versioneer.py"})
SKIPPED_FOLDERS = frozenset({"__pycache__", "_vendor", "_vendored", "node_modules", "vendor", "vendored"})
PAGES = frozenset({".ipynb", ".markdown", ".md", ".rst"})
#: What drives tests, builds and documentation: never what a call is about.
TOOLS = frozenset(
    {
        "asv",
        "coverage",
        "hypothesis",
        "mock",
        "mypy",
        "nose",
        "nox",
        "numpydoc",
        "pip",
        "pkg_resources",
        "pytest",
        "setuptools",
        "sphinx",
        "sphinx_gallery",
        "tox",
        "wheel",
    }
)
TEST_PARTS = frozenset({"conftest", "test", "testing", "tests"})


@dataclass(frozen=True)
class Example:
    """One piece of code: where it is from, and the names that it asks for."""

    source: str  # distribution/path
    names: frozenset[str]


@dataclass
class Collected:
    """The examples so far, and what became of the rest."""

    examples: list[Example] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)  # digests of what was read: a source distribution repeats a wheel
    unread: int = 0
    files: int = 0

    def add(self, source: str, names: Iterable[str]) -> None:
        found = frozenset(names)
        if found:
            self.examples.append(Example(source, found))

    def read(self, path: Path, source: str, *, whole: bool) -> None:
        """Reads one file: its docstrings, and, if it is an example as a `whole`, what it imports itself."""
        try:
            if path.stat().st_size > MAX_FILE:
                return
            data = path.read_bytes()
        except OSError:
            self.unread += 1
            return
        digest = hashlib.sha256(data).hexdigest()
        if digest in self.seen:
            return
        self.seen.add(digest)
        self.files += 1
        if whole:
            names, errors = imports_of_file(path, source, data)
            self.unread += bool(errors)
            self.add(source, names)
        if path.suffix == ".py" and any(mark in data for mark in (b">>>", b"```", b"::\n")):
            self.read_docstrings(path, source, data)

    def read_docstrings(self, path: Path, source: str, data: bytes) -> None:
        try:
            docstrings = examples_of_docstrings(data, path.name)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return  # counted where it is read as a whole; in an installed package it is a template
        for _, pieces in docstrings:
            self.add(source, imports_of_pieces(pieces)[0])


# ---- what is read ----


def read_rootfs(rootfs: RootFilesystem, collected: Collected) -> None:
    """Docstrings of all modules, test and example folders, and descriptions, in a fixed order."""
    by_folder: dict[str, Counter[str]] = {}
    for module, owner in rootfs.modules.items():
        by_folder.setdefault(rootfs.relative_paths[module].partition("/")[0], Counter())[owner] += 1
    for site in sorted(path for path in rootfs.path.glob("lib/python*/site-packages") if path.is_dir()):
        for path in files_below(site):
            relative = path.relative_to(site)
            if relative.parts[0].endswith((".dist-info", ".egg-info")):
                if path.name == "METADATA":
                    read_description(path, collected)
                continue
            owner = rootfs.files.get(str(path))
            if owner is None:
                owners = by_folder.get(relative.parts[0])
                if not owners:
                    continue
                owner = min(owners, key=lambda name: (-owners[name], name))
            if path.suffix == ".py" or path.suffix in PAGES:
                collected.read(path, f"{owner}/{relative}", whole=path.suffix in PAGES or is_example(relative))


def read_sources(folder: Path, rootfs: RootFilesystem, collected: Collected) -> None:
    """Source distributions of what the root filesystem holds: archives, or unpacked folders named like them."""
    for entry in sorted(folder.iterdir()):
        stem = entry.name.removesuffix(".tar.gz").removesuffix(".zip")
        name = canonicalize_name(stem.rpartition("-")[0])
        if name not in rootfs.distributions:
            continue
        if entry.is_dir():
            read_project(entry, name, collected)
            continue
        with tempfile.TemporaryDirectory() as unpacked:
            if entry.suffix == ".zip":
                with zipfile.ZipFile(entry) as archive:
                    archive.extractall(unpacked)  # noqa: S202 (zipfile keeps to the folder)
            else:
                with tarfile.open(entry) as archive:
                    archive.extractall(unpacked, filter="data")
            inside = sorted(Path(unpacked).iterdir())
            read_project(inside[0] if len(inside) == 1 else Path(unpacked), name, collected)


def read_project(folder: Path, name: str, collected: Collected) -> None:
    """A project's examples, documentation and tests; its own modules' docstrings too."""
    for path in files_below(folder):
        relative = path.relative_to(folder)
        if path.suffix == ".py" or path.suffix in PAGES:
            collected.read(path, f"{name}/{relative}", whole=path.suffix in PAGES or is_example(relative))


def read_description(path: Path, collected: Collected) -> None:
    """The page in a distribution's metadata: its README, mostly."""
    data = path.read_bytes()
    head, _, body = data.partition(b"\n\n")
    headers = BytesHeaderParser().parsebytes(head)
    name = canonicalize_name(headers.get("Name", ""))
    suffix = ".md" if "markdown" in headers.get("Description-Content-Type", "") else ".rst"
    names, errors = imports_of_file(Path(f"description{suffix}"), name, body)
    collected.files += 1
    collected.unread += bool(errors)
    collected.add(f"{name}/description", names)


def files_below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name not in SKIPPED_FOLDERS and not name.startswith(".") and not Path(place, name).is_symlink()
        )
        for name in sorted(files):
            path = Path(place, name)
            if not path.is_symlink() and name not in BUILD_FILES:
                yield path


def is_example(relative: Path) -> bool:
    return not EXAMPLE_FOLDERS.isdisjoint(part.lower() for part in relative.parts[:-1])


# ---- what is kept ----


def make_sets(rootfs: RootFilesystem, examples: list[Example]) -> list[ImportSet]:
    """The import sets, in modules that the root filesystem has, most frequent first."""
    names = {name for example in examples for name in example.names}
    found = find_modules(rootfs.path / "bin" / "python", names)
    modules = {name: public_module(found[name]) for name in names}
    sources: dict[tuple[str, ...], set[str]] = {}
    for example in examples:
        asked = {modules[name] for name in example.names} - {None}
        kept = tuple(sorted(deepest(name for name in asked if name and rootfs.distribution_of(name) is not None)))
        if 0 < len(kept) <= MAX_MODULES:
            sources.setdefault(kept, set()).add(example.source)  # many docstrings of one file say the same
    sets = [ImportSet(kept, len(where), tuple(sorted(where)[:MAX_SOURCES])) for kept, where in sources.items()]
    return sorted(sets, key=lambda one: (-one.count, one.modules))


def public_module(module: str | None) -> str | None:
    """What of a module a user would name: above its first private part; None for tests and tools."""
    if module is None:
        return None
    parts = module.split(".")
    private = next((place for place, part in enumerate(parts) if part.startswith("_")), len(parts))
    parts = parts[:private]
    if not parts or parts[0] in TOOLS or not TEST_PARTS.isdisjoint(parts):
        return None
    return ".".join(parts)


def deepest(names: Iterable[str]) -> set[str]:
    found = set(names)
    return found - {name[:dot] for name in found for dot in range(len(name)) if name[dot] == "."}


# ---- the command line ----


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes the committed corpus again.")
    parser.add_argument("--rootfs", type=Path, required=True, help="a root filesystem with the distributions installed")
    parser.add_argument("--sources", type=Path, help="a folder of source distributions")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("cpu.jsonl"))
    arguments = parser.parse_args()
    rootfs = list_rootfs(arguments.rootfs)
    collected = Collected()
    if arguments.sources is not None:
        read_sources(arguments.sources, rootfs, collected)
    read_rootfs(rootfs, collected)
    sets = make_sets(rootfs, collected.examples)
    write_corpus(Corpus(tuple(sets), (), (), collected.files, 0), arguments.out)
    print(describe(sets, collected))
    return 0


def describe(sets: list[ImportSet], collected: Collected) -> str:
    """The statistics, as README.md has them."""
    requests = sum(one.count for one in sets)
    sizes = Counter(min(len(one.modules), 11) for one in sets)
    asked: Counter[str] = Counter()
    for one in sets:
        for module in one.modules:
            asked[module] += one.count
    lines = [f"{collected.files} files, {collected.unread} not read as a whole, {len(collected.examples)} with imports"]
    lines += [f"{len(sets)} distinct sets, {requests} in all, {len(asked)} modules"]
    lines += ["", "| modules in a set | distinct sets |", "|---|---|"]
    lines += [f"| {size if size < 11 else '11 or more'} | {count} |" for size, count in sorted(sizes.items())]
    lines += ["", "| module | asked for |", "|---|---|"]
    lines += [f"| `{module}` | {count} |" for module, count in asked.most_common(25)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
