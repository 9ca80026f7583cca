"""Takes files of example code apart: the Python in notebooks, Markdown and reStructuredText pages, and docstrings.

Nothing of it is run. What only IPython understands (magics, shell lines, help requests) becomes `pass`; prompts go.
"""

import ast
import inspect
import json
import re
import textwrap
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from markdown_it import MarkdownIt

from readie.imports import imports_of_source


class Unread(NamedTuple):
    """A file, or a part of one, that could not be read as Python. `error` is a class name, `place` a cell or line."""

    path: str
    place: str
    error: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}{f', {self.place}' if self.place else ''}: {self.error}: {self.detail}"


class Piece(NamedTuple):
    """A part of a file that is Python: a notebook's cell, a page's block."""

    place: str
    source: str


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
        lines = _without_prompts(lines)
        first = next((i for i, line in enumerate(lines) if line.strip()), 0)
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    lines = [line.removeprefix(indent) for line in lines]
    text = "\n".join(lines)
    # What is Python as it stands needs no guess: a line that begins with % may go on an expression.
    return text if _is_python(text) else "\n".join(_without_magics(lines))


def _without_prompts(lines: list[str]) -> list[str]:
    """What was typed at the prompts of a console; what it answered becomes empty lines."""
    return [_CONTINUED_PROMPT.sub("", line, count=1) if _CONTINUED_PROMPT.match(line) else "" for line in lines]


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


# Pages

_PYTHON_NAMES = frozenset({"ipython", "ipython3", "py", "py3", "pycon", "pycon3", "python", "python3"})
_PYTHON_NAMES |= {"doctest", "ipythonconsole", "python-repl", "pyrepl", "repl"}
#: Directives whose first argument is the language: of a fence in MyST, and of reStructuredText.
_CODE_DIRECTIVES = frozenset({"code", "code-block", "code-cell", "highlight", "sourcecode"})
#: Directives that hold Python and say so with their name.
_PYTHON_DIRECTIVES = frozenset({"altair-plot", "bokeh-plot", "doctest", "exec_code", "ipython", "jupyter-execute"})
_PYTHON_DIRECTIVES |= {"nbplot", "plot", "plotly", "prompt", "pyvista-plot", "testcode", "testsetup"}
_DIRECTIVE = re.compile(r"(\s*)\.\. ([\w:.+-]+)::(?:\s+(.*))?")
_OPTION = re.compile(r"\s*:[\w-]+:")
#: Lines that Sphinx's ipython directive reads itself.
_PSEUDO_DECORATOR = re.compile(r"\s*@(?:doctest|okexcept|okwarning|savefig|suppress|verbatim)\b")


def blocks_of_markdown(data: bytes) -> tuple[list[Piece], list[Unread]]:
    """The Python blocks of a Markdown page. Raises `ValueError` if it is not UTF-8.

    Fenced ones that are tagged as Python count; those without a tag, and indented ones, where they read as Python
    that imports something.
    """
    parser = MarkdownIt("commonmark")
    parser.core.ruler.enableOnly(["normalize", "block"])  # what stands inside lines is of no interest
    pieces = []
    for token in parser.parse(data.decode("utf-8-sig")):
        if token.type not in {"fence", "code_block"}:
            continue
        words = [word for word in re.findall(r"[\w-]+", token.info.lower()) if word not in _CODE_DIRECTIVES]
        if not words or words[0] in _PYTHON_NAMES | _PYTHON_DIRECTIVES:
            python = _python_of_block(token.content, tagged=bool(words))
            if python is not None:
                pieces.append(Piece(f"line {token.map[0] + 1 if token.map else 0}", python))
    return pieces, []


def blocks_of_rest(data: bytes) -> tuple[list[Piece], list[Unread]]:
    """The Python blocks of a reStructuredText page. Raises `ValueError` if it is not UTF-8.

    Code directives count by their language, doctest blocks by their prompts; literal blocks, and directives that name
    no language, where they read as Python that imports something.
    """
    lines = data.decode("utf-8-sig").expandtabs(8).splitlines()
    pieces = []
    position = 0
    while position < len(lines):
        line = lines[position]
        start, tagged, body = position, False, ""
        directive = _DIRECTIVE.fullmatch(line)
        position += 1
        if directive is not None:
            name, language = directive[2].lower(), (directive[3] or "").lower().split()
            tagged = name in _PYTHON_DIRECTIVES or (name in _CODE_DIRECTIVES and language[:1] != [])
            if name not in _PYTHON_DIRECTIVES | _CODE_DIRECTIVES or name == "highlight":
                continue  # a note, say, which can hold blocks in its turn
            body, position = _below(lines, position, len(directive[1]))
            if name in _CODE_DIRECTIVES and language and language[0] not in _PYTHON_NAMES:
                continue
        elif _PROMPT.match(line):
            end = next((end for end in range(position, len(lines)) if not lines[end].strip()), len(lines))
            body, position, tagged = "\n".join(lines[start:end]), end, True
        elif line.rstrip().endswith("::") and not line.lstrip().startswith(".. "):
            body, position = _below(lines, position, len(line) - len(line.lstrip()))
        python = _python_of_block(body, tagged=tagged) if body else None
        if python is not None:
            pieces.append(Piece(f"line {start + 1}", python))
    return pieces, []


def _below(lines: list[str], position: int, indent: int) -> tuple[str, int]:
    """The lines that stand further in than `indent`, from `position` on, and where they end."""
    end = position
    while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > indent):
        end += 1
    return textwrap.dedent("\n".join(lines[position:end])).strip("\n"), end


def _python_of_block(block: str, *, tagged: bool) -> str | None:
    """The Python in a block; None where it holds something else, as far as one can tell without a tag."""
    block = _without_options(block)
    lines = ["" if _PSEUDO_DECORATOR.match(line) else line for line in block.split("\n")]
    text = "\n".join(lines)
    if any(map(_PROMPT.match, lines)) and not _is_python(textwrap.dedent(text)):  # what stands before a prompt is talk
        lines = _without_prompts(lines)
        return python_of_cell("\n".join(lines)) or None
    if tagged:
        return python_of_cell(text)
    # Java's imports are Python's but for the semicolon.
    if re.search(r"^\s*(?:import|from)\s", text, re.MULTILINE) and not re.search(r";\s*$", text, re.MULTILINE):
        text = textwrap.dedent(text)
        return text if _is_python(text) else None
    return None


def _without_options(block: str) -> str:
    """A block without the options that directives begin with: `:name: value` lines, or a header between `---`."""
    lines = block.split("\n")
    if lines[0].strip() == "---" and "---" in map(str.strip, lines[1:]):
        lines = lines[[line.strip() for line in lines].index("---", 1) + 1 :]
    while lines and _OPTION.match(lines[0]):
        del lines[0]
    return "\n".join(lines)


# Docstrings


class Docstring(NamedTuple):
    """The Python blocks of one docstring."""

    owner: str  # the class or function inside its module; "" for the module's own
    pieces: list[Piece]


def examples_of_docstrings(data: bytes, filename: str) -> list[Docstring]:
    """The examples in a program's docstrings, those without any left out. Raises what parsing the program raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes: of no interest here
        tree = ast.parse(data, filename)
    found = []
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        owner, node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            pieces = _blocks_of_docstring(inspect.cleandoc(text)) if text else []
            if pieces:
                found.append(Docstring(owner, pieces))
        for below in ast.iter_child_nodes(node):
            if isinstance(below, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                waiting.append((f"{owner}.{below.name}".lstrip("."), below))
            elif isinstance(below, ast.stmt | ast.excepthandler | ast.match_case):
                waiting.append((owner, below))
    return sorted(found)


def _blocks_of_docstring(text: str) -> list[Piece]:
    try:
        data = text.encode()
    except UnicodeEncodeError:  # a lone surrogate, by an escape
        return []
    if "```" in text:
        return blocks_of_markdown(data)[0]
    return blocks_of_rest(data)[0]
