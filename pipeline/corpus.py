"""The corpus: which modules example code asks for together, and how often. Nothing of the code is run.

One import set a file: a program, a notebook and a page are one each, because what they ask for is needed in
one process. Names are as the source has them (`sklearn.svm.LinearSVC`); resolving them against measured items is for
the reader. The standard library is left out, for it is never an item.
"""

import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Annotated

import msgspec

from pipeline.examples import Piece, Unread, blocks_of_markdown, blocks_of_rest, cells_of_notebook
from readie.errors import BadFile
from readie.files import replaced
from readie.imports import MAX_NAME, deepest, imports_of_source
from readie.resources import is_resource

MAX_FILE = 10_000_000  # bytes: 10 MB
MAX_SOURCES = 5

_SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__"})
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")  # a folder with one of these is an installed Python, not an example


@dataclass(frozen=True)
class ImportSet:
    """Modules that one piece of code asks for together: sorted, distinct, not empty."""

    modules: tuple[str, ...]
    count: int  # how often the set was met
    sources: tuple[str, ...] = ()  # up to five of the files, as the paths were given


@dataclass(frozen=True)
class Corpus:
    """What `collect_corpus` found. `sets` come most frequent first; the other lists are sorted by path."""

    sets: tuple[ImportSet, ...]
    errors: tuple[Unread, ...]
    over_limit: tuple[str, ...]  # files over 10 MB, not read
    files: int  # looked at, over the limit or not
    without_imports: int  # files that ask for nothing outside the standard library


def collect_corpus(paths: Iterable[Path]) -> Corpus:
    """The import sets of Python files, notebooks, Markdown and reStructuredText pages, and of all that folders hold of them.

    In folders, hidden ones, virtual environments and `node_modules` are left out, and links are not followed.
    The order is fixed. Raises `BadFile` for a path that is not there or of another kind.
    """
    sources: dict[tuple[str, ...], list[str]] = {}
    errors: list[Unread] = []
    over_limit: list[str] = []
    seen: set[str] = set()
    without_imports = 0
    for path in _files_of(paths, errors):
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        name = str(path).encode("utf-8", "backslashreplace").decode()
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE + 1)
        except OSError as error:
            errors.append(Unread(name, "", type(error).__name__, error.strerror or str(error)))
            continue
        if len(data) > MAX_FILE:
            over_limit.append(name)
            continue
        names, unread = imports_of_file(path, name, data)
        errors += unread
        if names:
            sources.setdefault(tuple(sorted(names)), []).append(name)
        elif not unread:
            without_imports += 1
    sets = [ImportSet(modules, len(files), tuple(files[:MAX_SOURCES])) for modules, files in sources.items()]
    return Corpus(
        sets=tuple(sorted(sets, key=lambda found: (-found.count, found.modules))),
        errors=tuple(sorted(errors)),
        over_limit=tuple(sorted(over_limit)),
        files=len(seen),
        without_imports=without_imports,
    )


def _files_of(paths: Iterable[Path], errors: list[Unread]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from _files_below(path, errors)
        elif not path.exists():
            raise BadFile(f"{path}: no such file or folder")
        elif path.suffix.lower() not in _PIECES or not path.is_file():
            raise BadFile(f"{path}: not example code", f"Give folders, or files that end in {', '.join(_PIECES)}.")
        else:
            yield path


def _files_below(root: Path, errors: list[Unread]) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        errors.append(Unread(str(error.filename), "", type(error).__name__, error.strerror or str(error)))

    for folder, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = sorted(name for name in folders if _is_example_folder(Path(folder, name)))
        for name in sorted(files):
            path = Path(folder, name)
            # Only plain files: opening a pipe would wait for ever.
            if path.suffix.lower() in _PIECES and not name.startswith(".") and not path.is_symlink() and path.is_file():
                yield path


def _is_example_folder(path: Path) -> bool:
    if path.name.startswith(".") or path.name in _SKIPPED_FOLDERS or path.is_symlink():
        return False
    return not any((path / mark).exists() for mark in _ENVIRONMENT_MARKS)


def imports_of_file(path: Path, name: str, data: bytes) -> tuple[frozenset[str], list[Unread]]:
    pieces_of = _PIECES[path.suffix.lower()]
    if pieces_of is None:
        found = imports_of_source(data, path.name, _package_of(path))
        return found.names | found.resources, [Unread(name, "", error.kind, error.message) for error in found.errors]
    try:
        pieces, unread = pieces_of(data)
    except (ValueError, RecursionError, MemoryError) as error:
        return frozenset(), [Unread(name, "", type(error).__name__, str(error))]
    names, errors = imports_of_pieces(pieces)
    return names, [Unread(name, place, error, detail) for _, place, error, detail in [*unread, *errors]]


def imports_of_pieces(pieces: Iterable[Piece]) -> tuple[frozenset[str], list[Unread]]:
    """What the pieces of one file ask for together; a piece that is broken is left out, and listed."""
    good: list[str] = []
    names: set[str] = set()
    keys: set[str] = set()
    errors: list[Unread] = []
    for place, source in pieces:
        found = imports_of_source(source, place)
        errors += [Unread("", place, error.kind, error.message) for error in found.errors]
        if not found.errors:
            good.append(source)
            names |= found.names
            keys |= found.resources
    # Once more together: one cell imports numpy as np, and a later one uses np.linalg.
    together = imports_of_source("\n".join(good), "")
    keys |= together.resources
    return (deepest(names) if together.errors else together.names) | keys, errors


def _package_of(path: Path) -> str | None:
    """The package that a file belongs to, by the `__init__.py` beside it and above: relative imports need it."""
    inside = takewhile(lambda folder: (folder / "__init__.py").is_file(), path.absolute().parents)
    return ".".join(reversed([folder.name for folder in inside])) or None


#: File ending → what takes the file apart; None: the file is Python as a whole.
_PIECES: dict[str, Callable[[bytes], tuple[list[Piece], list[Unread]]] | None] = {
    ".py": None,
    ".ipynb": cells_of_notebook,
    ".md": blocks_of_markdown,
    ".markdown": blocks_of_markdown,
    ".rst": blocks_of_rest,
}


# corpus.jsonl


class _Line(msgspec.Struct):
    modules: Annotated[
        list[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]], msgspec.Meta(min_length=1)
    ]
    count: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    sources: list[str] = []


def write_corpus(corpus: Corpus, path: Path) -> None:
    """Writes `path` whole or not at all: one JSON object a line, most frequent set first; compressed for `.gz`."""
    lines = [_Line(list(found.modules), found.count, list(found.sources)) for found in corpus.sets]
    with replaced(path) as aside:
        data = msgspec.json.Encoder().encode_lines(lines)
        aside.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def read_corpus(path: Path) -> list[ImportSet]:
    """The import sets of a `corpus.jsonl`, or of a `.jsonl.gz`; sets that are in it twice are added up.

    Most frequent first. Raises `BadFile`, which names the line and the rule.
    """
    decoder = msgspec.json.Decoder(_Line)
    sets: list[ImportSet] = []
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    line = decoder.decode(text)
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    raise _bad_line(path, number, str(error)) from error
                for name in line.modules:
                    if not is_item_name(name):
                        raise _bad_line(path, number, f"{name!r} is neither a dotted import name nor kind:name")
                sets.append(ImportSet(tuple(sorted(set(line.modules))), line.count, tuple(line.sources)))
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadFile(f"{path}: {reason}", "Collect a corpus with readie-pipeline corpus.") from error
    return merge_sets(sets)


def _bad_line(path: Path, number: int, rule: str) -> BadFile:
    return BadFile(f"{path}: line {number}: {rule}", "Collect the corpus again with readie-pipeline corpus.")


def is_item_name(name: str) -> bool:
    """Whether an item can have that key: a dotted import name, or `kind:name`."""
    return is_resource(name) if ":" in name else all(part.isidentifier() for part in name.split("."))


def merge_sets(*corpora: Iterable[ImportSet]) -> list[ImportSet]:
    """The sets of several corpora, counts of the same set added up, most frequent first."""
    counts: dict[tuple[str, ...], int] = {}
    sources: dict[tuple[str, ...], list[str]] = {}
    for one in chain.from_iterable(corpora):
        counts[one.modules] = counts.get(one.modules, 0) + one.count
        sources.setdefault(one.modules, []).extend(one.sources)
    sets = [ImportSet(modules, count, tuple(sources[modules][:MAX_SOURCES])) for modules, count in counts.items()]
    return sorted(sets, key=lambda found: (-found.count, found.modules))
