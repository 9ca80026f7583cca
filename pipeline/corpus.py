"""The corpus: which modules example code asks for together, and how often. Nothing of the code is run.

One import set a file: a program, a notebook and a Markdown page are one each, because what they ask for is needed in
one process. Names are as the source has them (`sklearn.svm.LinearSVC`); resolving them against measured items is for
the reader. The standard library is left out, for it is never an item.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from markdown_it import MarkdownIt

from readie.errors import BadFile
from readie.files import replaced
from readie.imports import MAX_NAME, imports_of_source

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


class Unread(NamedTuple):
    """A file, or a part of one, that could not be read as Python. `error` is a class name, `place` a cell or line."""

    path: str
    place: str
    error: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}{f', {self.place}' if self.place else ''}: {self.error}: {self.detail}"


@dataclass(frozen=True)
class Corpus:
    """What `collect_corpus` found. `sets` come most frequent first; the other lists are sorted by path."""

    sets: tuple[ImportSet, ...]
    errors: tuple[Unread, ...]
    over_limit: tuple[str, ...]  # files over 10 MB, not read
    files: int  # looked at, over the limit or not
    without_imports: int  # files that ask for nothing outside the standard library


def collect_corpus(paths: Iterable[Path]) -> Corpus:
    """The import sets of `.py`, `.ipynb` and `.md` files, and of all that folders hold of them.

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
        names, unread = _imports_of_file(path, name, data)
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


class Piece(NamedTuple):
    """A part of a file that is Python: a notebook's cell, a Markdown page's block."""

    place: str
    source: str


def _imports_of_file(path: Path, name: str, data: bytes) -> tuple[frozenset[str], list[Unread]]:
    pieces_of = _PIECES[path.suffix.lower()]
    if pieces_of is None:
        found = imports_of_source(data, path.name, _package_of(path))
        return found.names, [Unread(name, "", error.kind, error.message) for error in found.errors]
    try:
        pieces, unread = pieces_of(data)
    except (ValueError, RecursionError, MemoryError) as error:
        return frozenset(), [Unread(name, "", type(error).__name__, str(error))]
    errors = [Unread(name, place, error, detail) for _, place, error, detail in unread]
    good: list[str] = []
    names: set[str] = set()
    for place, source in pieces:
        found = imports_of_source(source, place)
        errors += [Unread(name, place, error.kind, error.message) for error in found.errors]
        if not found.errors:
            good.append(source)
            names |= found.names
    # Once more together: one cell imports numpy as np, and a later one uses np.linalg.
    together = imports_of_source("\n".join(good), path.name)
    return (frozenset(names) if together.errors else together.names), errors


def _package_of(path: Path) -> str | None:
    """The package that a file belongs to, by the `__init__.py` beside it and above: relative imports need it."""
    inside = takewhile(lambda folder: (folder / "__init__.py").is_file(), path.absolute().parents)
    return ".".join(reversed([folder.name for folder in inside])) or None


# Notebooks


def cells_of_notebook(data: bytes) -> tuple[list[Piece], list[Unread]]:
    """The Python of a notebook's code cells, and what could not be read. Raises `ValueError` if it is not JSON."""
    document = json.loads(data.decode("utf-8-sig"))
    if not isinstance(document, dict):
        return [], [Unread("", "", "BadNotebook", "not a JSON object")]
    language = _language_of(document.get("metadata"))
    if not language.startswith(("python", "ipython")):
        return [], [Unread("", "", "NotPython", f"its language is {language}")]
    cells = document.get("cells")
    if cells is None and isinstance(document.get("worksheets"), list):  # nbformat 3
        sheets = [sheet.get("cells") for sheet in document["worksheets"] if isinstance(sheet, dict)]
        cells = [cell for sheet in sheets if isinstance(sheet, list) for cell in sheet]
    if not isinstance(cells, list):
        return [], [Unread("", "", "BadNotebook", "it has no list of cells")]
    pieces, errors = [], []
    for number, cell in enumerate(cells, 1):
        place = f"cell {number}"
        if not isinstance(cell, dict):
            errors.append(Unread("", place, "BadNotebook", "the cell is not an object"))
            continue
        if cell.get("cell_type") != "code" or not str(cell.get("language") or "python").startswith("python"):
            continue
        source = cell.get("source", cell.get("input"))  # nbformat 3 says input
        if isinstance(source, list) and all(isinstance(line, str) for line in source):
            source = "".join(source)
        if not isinstance(source, str):
            errors.append(Unread("", place, "BadNotebook", "the cell's source is neither text nor lines"))
            continue
        python = python_of_cell(source)
        if python is not None:
            pieces.append(Piece(place, python))
    return pieces, errors


def _language_of(metadata: object) -> str:
    if isinstance(metadata, dict):
        for key, field in (("kernelspec", "language"), ("language_info", "name")):
            value = metadata.get(key)
            if isinstance(value, dict) and isinstance(value.get(field), str) and value[field]:
                return str(value[field]).lower()
    return "python"


#: Cell magics whose body runs as Python; all others (%%bash, %%html, %%writefile, ...) hold something else.
_PYTHON_CELL_MAGICS = frozenset({"capture", "debug", "memit", "prun", "python", "python3", "time", "timeit"})
#: Magics whose line is a statement that runs.
_STATEMENT_MAGICS = frozenset({"lprun", "memit", "mprun", "prun", "time", "timeit"})
#: Line magics that some notebooks begin a cell of another language with.
_LANGUAGE_MAGICS = frozenset({"md", "scala", "sh"})
#: Magics that are often written without their %.
_AUTOMAGICS = frozenset(
    {"cat", "cd", "conda", "cp", "load_ext", "ls", "mamba", "man", "matplotlib", "mkdir", "mv", "pip"}
)
_AUTOMAGICS |= {"pwd", "rm", "run", "uv"}

_MAGIC = re.compile(r"\s*(%%?)\s*([\w.]+)[ \t]*(.*)", re.DOTALL)
_PROMPT = re.compile(r"\s*(?:>>>|In \[\d+\]:)(?:\s|$)")
_CONTINUED_PROMPT = re.compile(r"\s*(?:>>>|\.\.\.:?|In \[\d+\]:)(?: |$)")
#: Options before a magic's statement; of some, the next word is the value.
_OPTIONS = re.compile(r"(?:(?:-[nrlsTDfmp]\s*\S+|-\w+)(?:\s+|$))*")
#: `files = !ls`, `rows = %sql SELECT 1`
_MAGIC_VALUE = re.compile(r"""((?:[^='"#]|'[^']*'|"[^"]*")+?)\s*=\s*[!%]""")
_TOKEN = re.compile(r'#.*|"""|\'\'\'|"(?:\\.|[^"\\])*"?|\'(?:\\.|[^\'\\])*\'?|[()\[\]{}]')
_CLOSING = {'"""': re.compile(r'(?:\\.|[^\\])*?"""'), "'''": re.compile(r"(?:\\.|[^\\])*?'''")}


def python_of_cell(source: str) -> str | None:
    """The Python in a notebook's code cell, line for line: magics, shell lines and help requests become `pass`.

    None where the cell is in another language.
    """
    lines = source.replace("\r\n", "\n").split("\n")
    while True:
        first = next((i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), None)
        if first is None:
            return ""
        magic = _MAGIC.fullmatch(lines[first])
        if magic is None or (magic[1] == "%" and magic[2] not in _LANGUAGE_MAGICS):
            break
        if magic[2] not in _PYTHON_CELL_MAGICS:
            return None
        lines[first] = _statement(magic[3]) if magic[2] in _STATEMENT_MAGICS else ""
        lines[:first] = [""] * first
        if lines[first]:
            break
    if _PROMPT.match(lines[first]):
        lines = [_CONTINUED_PROMPT.sub("", line, count=1) if _CONTINUED_PROMPT.match(line) else "" for line in lines]
        first = next((i for i, line in enumerate(lines) if line.strip()), 0)
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    lines = [line.removeprefix(indent) for line in lines]
    text = "\n".join(lines)
    # What is Python as it stands needs no guess: a line that begins with % may go on an expression.
    return text if _is_python(text) else "\n".join(_without_magics(lines))


def _is_python(text: str) -> bool:
    return not imports_of_source(text, "").errors


def _without_magics(lines: list[str]) -> Iterator[str]:
    depth, quote, continued = 0, "", False
    position = 0
    while position < len(lines):
        if not depth and not quote and not continued:  # a statement begins here
            end = position
            while end + 1 < len(lines) and lines[end].endswith("\\"):
                end += 1
            statement = " ".join(line.removesuffix("\\") for line in lines[position : end + 1])
            python = _python_of_magic(statement)
            if python is not None:
                yield statement[: len(statement) - len(statement.lstrip())] + python
                yield from [""] * (end - position)
                position = end + 1
                continue
        line = lines[position]
        depth, quote, code = _scan(line, depth, quote)
        continued = code.endswith("\\")
        yield line
        position += 1


def _scan(line: str, depth: int = 0, quote: str = "") -> tuple[int, str, str]:
    """After this line: the depth of open brackets, the triple quote that is open, and the line without its strings."""
    code = ""
    position = 0
    while position < len(line):
        if quote:
            closing = _CLOSING[quote].match(line, position)
            if closing is None:
                break
            position, quote = closing.end(), ""
            continue
        token = _TOKEN.search(line, position)
        code += line[position : token.start()] if token else line[position:]
        if token is None or token[0].startswith("#"):
            break
        if token[0] in _CLOSING:
            quote = token[0]
        elif token[0][0] not in "\"'":
            depth = max(0, depth + (1 if token[0] in "([{" else -1))
            code += token[0]
        position = token.end()
    return depth, quote, code


def _python_of_magic(statement: str) -> str | None:
    """What stands for a line that only IPython understands; None for a line of Python."""
    text = statement.strip()
    if text.startswith("%"):
        magic = _MAGIC.fullmatch(text)
        return (magic is not None and magic[2] in _STATEMENT_MAGICS and _statement(magic[3])) or "pass"
    if text.startswith(("!", "?", "/", ",", ";")):  # shell, help, and calls without brackets
        return "pass"
    depth, quote, code = _scan(text)
    if not depth and not quote and code.rstrip().endswith("?"):
        return "pass"
    value = _MAGIC_VALUE.match(text[:1000])  # the match may try every place
    if value is not None:
        return f"{value[1]} = None"
    if text.partition(" ")[0] in _AUTOMAGICS and not _is_python(text):
        return "pass"
    return None


def _statement(line: str) -> str:
    """The statement that `%timeit -n 10 import numpy` runs, without the options; "" where there is none."""
    statement = _OPTIONS.sub("", line, count=1)
    return statement if _is_python(statement) else ""


# Markdown

_PYTHON_FENCES = frozenset({"ipython", "ipython3", "py", "py3", "pycon", "python", "python3"})
_FENCE_DIRECTIVES = frozenset({"code", "code-block", "code-cell", "sourcecode"})


def blocks_of_markdown(data: bytes) -> tuple[list[Piece], list[Unread]]:
    """The Python blocks of a Markdown page: fenced, and tagged as Python. Raises `ValueError` if it is not UTF-8."""
    parser = MarkdownIt("commonmark")
    parser.core.ruler.enableOnly(["normalize", "block"])  # what stands inside lines is of no interest
    pieces = []
    for token in parser.parse(data.decode("utf-8-sig")):
        words = [word for word in re.findall(r"[\w-]+", token.info.lower()) if word not in _FENCE_DIRECTIVES]
        if token.type != "fence" or not words or words[0] not in _PYTHON_FENCES:
            continue
        python = python_of_cell(_without_options(token.content))
        if python is not None:
            pieces.append(Piece(f"line {token.map[0] + 1 if token.map else 0}", python))
    return pieces, []


def _without_options(block: str) -> str:
    """A block without the options that directives begin with: `:name: value` lines, or a header between `---`."""
    lines = block.split("\n")
    if lines[0].strip() == "---" and "---" in map(str.strip, lines[1:]):
        lines = lines[[line.strip() for line in lines].index("---", 1) + 1 :]
    while lines and re.match(r":[\w-]+:", lines[0]):
        del lines[0]
    return "\n".join(lines)


#: File ending → what takes the file apart; None: the file is Python as a whole.
_PIECES: dict[str, Callable[[bytes], tuple[list[Piece], list[Unread]]] | None] = {
    ".py": None,
    ".ipynb": cells_of_notebook,
    ".md": blocks_of_markdown,
}


# corpus.jsonl


class _Line(msgspec.Struct):
    modules: Annotated[
        list[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]], msgspec.Meta(min_length=1)
    ]
    count: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    sources: list[str] = []


def write_corpus(corpus: Corpus, path: Path) -> None:
    """Writes `path` whole or not at all: one JSON object a line, most frequent set first."""
    lines = [_Line(list(found.modules), found.count, list(found.sources)) for found in corpus.sets]
    with replaced(path) as aside:
        aside.write_bytes(msgspec.json.Encoder().encode_lines(lines))


def read_corpus(path: Path) -> list[ImportSet]:
    """The import sets of a `corpus.jsonl`; sets that are in it twice are added up, most frequent first.

    Raises `BadFile`, which names the line and the rule.
    """
    decoder = msgspec.json.Decoder(_Line)
    counts: dict[tuple[str, ...], int] = {}
    sources: dict[tuple[str, ...], list[str]] = {}
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    line = decoder.decode(text)
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    raise _bad_line(path, number, str(error)) from error
                for name in line.modules:
                    if not _is_item_name(name):
                        raise _bad_line(path, number, f"{name!r} is neither a dotted import name nor kind:name")
                modules = tuple(sorted(set(line.modules)))
                counts[modules] = counts.get(modules, 0) + line.count
                sources.setdefault(modules, []).extend(line.sources)
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}", "Collect a corpus with readie-pipeline corpus.") from error
    sets = [ImportSet(modules, count, tuple(sources[modules][:MAX_SOURCES])) for modules, count in counts.items()]
    return sorted(sets, key=lambda found: (-found.count, found.modules))


def _bad_line(path: Path, number: int, rule: str) -> BadFile:
    return BadFile(f"{path}: line {number}: {rule}", "Collect the corpus again with readie-pipeline corpus.")


def _is_item_name(name: str) -> bool:
    kind, colon, rest = name.partition(":")
    if colon:
        return kind in {"dataset", "model", "tokenizer"} and bool(rest) and rest.isprintable()
    return all(part.isidentifier() for part in name.split("."))
