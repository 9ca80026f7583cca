"""Many rows in one statement: it takes a list for each of its parameters, one value a row."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row

from app.sql import declared_parameters, statement

#: Payloads and results in one statement, bytes: each is in memory more than once meanwhile.
MOST_BYTES = 8 * 2**20


def write_rows(connection: Connection, name: str, rows: Sequence[Mapping[str, Any]]) -> Sequence[Row[Any]]:
    """Runs the statement called `name` for all rows, of which it takes what it has parameters for; not without rows.

    Gives what it returns.
    """
    if not rows:
        return ()
    columns = {column: [row[column] for row in rows] for column in declared_parameters(name)}
    written = connection.execute(statement(name), columns)
    return written.all() if written.returns_rows else ()


def in_parts(rows: Sequence[Mapping[str, Any]], column: str) -> Iterator[list[Mapping[str, Any]]]:
    """Rows in lists of at most `MOST_BYTES` of this column, or of one row."""
    part: list[Mapping[str, Any]] = []
    size = 0
    for row in rows:
        if part and size + len(row[column]) > MOST_BYTES:
            yield part
            part, size = [], 0
        part.append(row)
        size += len(row[column])
    if part:
        yield part
