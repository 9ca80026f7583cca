"""The statements of this folder's `.sql` files, by name, and the views for people.

A statement begins with `-- name: <name>`, then a sentence of intent, its parameters (`-- parameters: a integer[], b
text`, or `none`; repeated where one line is not enough) and what it returns. The same text runs on both databases.
"""

import re
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import NamedTuple

from sqlalchemy import TextClause, text

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
#: Where the views are, in the order in which they build on one another.
VIEW_FILES = ("views_tables.sql", "views.sql", "views_calls.sql", "views_audit.sql")

_VIEW = re.compile(r"((?:^-- [^\n]+\n)+)^CREATE VIEW (\w+) AS\n(.+?);$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"--.*$", re.MULTILINE)
_PARAMETERS = re.compile(r"^-- parameters: (.+)$", re.MULTILINE)


@cache
def texts() -> dict[str, str]:
    """Name → SQL text, in the order of the files' names and of the statements in them."""
    named: dict[str, str] = {}
    for file in sorted(files(__name__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".sql"):
            _, *parts = _NAME.split(file.read_text(encoding="utf-8"))
            for name, body in zip(parts[::2], parts[1::2], strict=True):
                if name in named:
                    raise ValueError(f"{file.name}: a second statement is named {name}")
                named[name] = body.strip().removesuffix(";")
    return named


@cache
def statement(name: str) -> TextClause:
    """The statement called `name`, to be executed with its parameters. Raises `KeyError`."""
    # Without comments and indentation: psycopg parses what is longer than 4,096 characters anew each time.
    return text(f"/* {name} */ " + " ".join(_COMMENT.sub("", texts()[name]).split()))


def statement_text(name: str) -> str:
    """The statement called `name` as people read it: its lines without the comments. Raises `KeyError`."""
    lines = texts()[name].splitlines()
    return "\n".join(line for line in lines if not line.startswith("--"))


@cache
def declared_parameters(name: str) -> dict[str, str]:
    """Parameter → SQL type, as the statement's `-- parameters:` lines declare them."""
    lines = (line.split(", ") for line in _PARAMETERS.findall(texts()[name]) if line != "none")
    return dict((declaration.split(" ", 1)) for declaration in chain.from_iterable(lines))


class View(NamedTuple):
    """A view for people: what it tells (its comment in the file) and its SELECT."""

    about: str
    query: str


@cache
def views() -> dict[str, View]:
    """Name → view, each after those that it reads."""
    found: dict[str, View] = {}
    for file in VIEW_FILES:
        for comment, name, query in _VIEW.findall(files(__name__).joinpath(file).read_text(encoding="utf-8")):
            about = " ".join(line.removeprefix("--").strip() for line in comment.splitlines())
            found[name] = View(about, query)
    return found
