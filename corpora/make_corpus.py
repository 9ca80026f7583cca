"""Makes cpu.jsonl.gz again: the import sets of the examples, documentation and tests that distributions bring along.

Nothing of the code is run; only import sets and file names are written, and the figures in README.md, which has the
rules. Same input, same content.

    python corpora/make_corpus.py --rootfs rootfs --sources sources

`--rootfs` is a root filesystem with the distributions of `--list` installed, `--sources` a folder that
fetch_sources.py has filled.
"""

import argparse
import hashlib
import os
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from email.parser import BytesHeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.analyze import find_modules
from pipeline.corpus import Corpus, ImportSet, imports_of_file, imports_of_pieces, write_corpus
from pipeline.examples import examples_of_docstrings
from pipeline.rootfs import RootFilesystem, list_rootfs
from readie.imports import deepest
from readie.resources import is_resource

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- made by make_corpus.py -->", "<!-- end -->"

MAX_FILE = 2_000_000  # bytes; what is larger was generated
MAX_MODULES = 20  # of one set; a file that asks for more drives a test suite, and nobody's call looks like it
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
TEST_PARTS = frozenset(
    {"conftest", "test", "test_utils", "testclient", "testing", "testing_utils", "tests", "testutils"}
)
#: Models and datasets that only their library's own tests load.
TEST_KEYS = ":hf-internal-testing/"


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
    for module, distribution in rootfs.modules.items():
        by_folder.setdefault(rootfs.relative_paths[module].partition("/")[0], Counter())[distribution] += 1
    for site in sorted(path for path in rootfs.path.glob("lib/python*/site-packages") if path.is_dir()):
        for path in files_below(site):
            relative = path.relative_to(site)
            if relative.parts[0].endswith((".dist-info", ".egg-info")):
                if path.name == "METADATA":
                    read_description(path, collected)
                continue
            owner = rootfs.files.get(str(path)) or main_owner(by_folder.get(relative.parts[0]))
            if owner is None:
                continue
            if path.suffix == ".py" or path.suffix in PAGES:
                collected.read(path, f"{owner}/{relative}", whole=path.suffix in PAGES or is_example(relative))


def main_owner(owners: Counter[str] | None) -> str | None:
    """The distribution with most of a folder's modules."""
    return min(owners, key=lambda name: (-owners[name], name)) if owners else None


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


def make_sets(rootfs: RootFilesystem, listed: set[str], examples: Iterable[Example]) -> list[ImportSet]:
    """The import sets that ask for a listed distribution, in modules that the root filesystem has.

    Most frequent first: how often a set occurs is in how many files.
    """
    examples = list(examples)
    names = {name for example in examples for name in example.names if not is_resource(name)}
    found = find_modules(rootfs.path / "bin" / "python", names)
    modules = {name: public_module(found[name]) for name in names}
    owners = {module: rootfs.distribution_of(module) for module in modules.values() if module is not None}
    sources: dict[tuple[str, ...], set[str]] = {}
    for example in examples:
        asked = {modules.get(name) for name in example.names}
        kept = deepest(module for module in asked if module is not None and owners[module] is not None)
        if 0 < len(kept) <= MAX_MODULES and not listed.isdisjoint(str(owners[module]) for module in kept):
            keys = {name for name in example.names if is_resource(name) and TEST_KEYS not in name}
            # Many docstrings of one file say the same.
            sources.setdefault(tuple(sorted(kept | keys)), set()).add(example.source)
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


def read_list(path: Path) -> set[str]:
    """Canonical names of the distributions that a requirements file lists."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("-")}


# ---- the command line ----


def main(typed: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Makes the committed corpus again.")
    parser.add_argument("--rootfs", type=Path, required=True, help="a root filesystem with the distributions installed")
    parser.add_argument("--sources", type=Path, help="a folder of source distributions")
    parser.add_argument("--list", type=Path, default=ROOT / "catalogues" / "requirements-cpu.txt")
    parser.add_argument("--out", type=Path, default=ROOT / "corpora" / "cpu.jsonl.gz")
    parser.add_argument("--readme", type=Path, default=ROOT / "corpora" / "README.md")
    arguments = parser.parse_args(typed)
    rootfs = list_rootfs(arguments.rootfs)
    collected = Collected()
    if arguments.sources is not None:
        read_sources(arguments.sources, rootfs, collected)
    read_rootfs(rootfs, collected)
    sets = make_sets(rootfs, read_list(arguments.list), collected.examples)
    write_corpus(Corpus(tuple(sets), (), (), collected.files, 0), arguments.out)
    read = f"{collected.files:,} files were read, {collected.unread} of them in part or not at all."
    figures = f"{read}\n\n{describe_sets(sets)}"
    print(figures)
    before, _, rest = arguments.readme.read_text().partition(BEGIN)
    arguments.readme.write_text(f"{before}{BEGIN}\n{figures}\n{END}{rest.partition(END)[2]}")
    return 0


def describe_sets(sets: Sequence[ImportSet]) -> str:
    """The figures that README.md has."""
    requests = sum(one.count for one in sets)
    sizes = Counter(min(len(one.modules), 9) for one in sets)
    modules, tops = Counter[str](), Counter[str]()
    for one in sets:
        for module in one.modules:
            modules[module] += one.count
        for top in {module.partition(".")[0] for module in one.modules if not is_resource(module)}:
            tops[top] += one.count
    keys = sum(is_resource(module) for module in modules)
    lines = [
        (
            f"{len(sets):,} distinct sets, {requests:,} in all, {len(modules) - keys:,} modules of {len(tops)} packages, "
            f"{keys} keys of datasets, models and tokenizers."
        ),
        "",
        "| names in a set | " + " | ".join(f"{size}" if size < 9 else "9 to 20" for size in sorted(sizes)) + " |",
        "|---" * (len(sizes) + 1) + "|",
        "| distinct sets | " + " | ".join(f"{sizes[size]:,}" for size in sorted(sizes)) + " |",
        "",
        "Asked for most: " + ", ".join(f"`{name}` {count:,}" for name, count in most_common(modules)) + ".",
        "",
        "By package: " + ", ".join(f"`{name}` {count:,}" for name, count in most_common(tops)) + ".",
    ]
    return "\n".join(lines)


def most_common(counter: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counter.items(), key=lambda entry: (-entry[1], entry[0]))[:30]


if __name__ == "__main__":
    sys.exit(main())
