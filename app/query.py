"""SQL that people send: held to one SELECT over the views before the database sees it, and to its limits.

What is allowed is a list, of kinds of expression and of functions; everything else is refused. What runs is the SQL
written again from what was understood, so that the database cannot understand another thing. The transaction is
read-only besides, on either database, and DuckDB has no access to files (`app/database.py`).
"""

import math
import threading
from decimal import Decimal
from typing import Any

import msgspec

from app.database import Database
from app.sql import views
from readie.errors import QueryBusy
from readie.wire import SqlAnswer, SqlRequest

#: Queries that one router runs at a time: they share the machine with the placing of calls.
MOST_AT_ONCE = 2

_running = threading.BoundedSemaphore(MOST_AT_ONCE)


def run_query(database: Database, request: SqlRequest) -> SqlAnswer:
    """The answer to one SELECT over the views.

    Raises `BadQuery` for anything else and for what the database refuses, `QueryTimeout`, and `QueryBusy` when as many
    queries as may run are running.
    """
    from app.parsing import check_query

    # One row more than asked for says whether there are more.
    query = check_query(request.query, database.sql_dialect, request.rows + 1)
    if not _running.acquire(blocking=False):
        raise QueryBusy(f"{MOST_AT_ONCE} are running")
    try:
        columns, rows = database.query(query, request.seconds)
    finally:
        _running.release()
    return SqlAnswer(
        columns=columns,
        rows=[[_plain(value) for value in row] for row in rows[: request.rows]],
        more=len(rows) > request.rows,
    )


def list_views() -> list[tuple[str, str]]:
    """The views, in the order in which docs/sql.md has them: name, what it tells."""
    return [(name, view.about) for name, view in views().items()]


def _plain(value: Any) -> Any:
    """The value as JSON has it: a number that it has none for is a text."""
    match value:
        case None | bool() | str():
            return value
        case float():
            return value if math.isfinite(value) else _in_full(Decimal(value))
        case int():
            return value if -(2**63) <= value < 2**63 else _in_full(Decimal(value))
        case Decimal():
            if value.is_finite() and value == value.to_integral_value():
                return int(value) if -(2**63) <= value < 2**63 else _in_full(value)
            return float(value) if math.isfinite(float(value)) else _in_full(value)
        case list() | tuple():
            return [_plain(each) for each in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _in_full(number: Decimal) -> str:
    """Each digit, however many; Infinity and NaN have these names."""
    return f"{number:f}"


def cell_of_csv(value: object) -> object:
    """A value as a CSV file has it: lists, true and false as in JSON."""
    return msgspec.json.encode(value).decode() if isinstance(value, list | bool) else value
