"""The route that tells what calls import together, and how often: what `readie-pipeline corpus` plans from."""

from typing import Annotated

from litestar import get
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from app.api import PROBLEMS, FlavorQuery, Time, parse_time
from app.database import Database
from app.sql import statement
from readie.flavor import parse_flavor
from readie.wire import RecordedImports, RecordedSet


@get("/calls/imports", operation_id="readRecordedImports", sync_to_thread=True, responses=PROBLEMS)
def read_recorded_imports(
    *,
    database: NamedDependency[Database],
    since: Time = None,
    until: Time = None,
    flavor: FlavorQuery = None,
    limit: Annotated[int, QueryParameter(ge=1, le=10_000)] = 1000,
    offset: Annotated[int, QueryParameter(ge=0, le=2**31 - 1)] = 0,
) -> RecordedImports:
    """The sets of modules that calls asked for, most frequent first. Later pages take `until` from the first one."""
    last = parse_time(until)
    parameters = {
        "since": parse_time(since),
        "until": last,
        "flavor": None if flavor is None else parse_flavor(flavor),
        "at_most": limit,
        "skip": offset,
    }
    with database.reading() as connection:
        rows = connection.execute(statement("recorded_imports"), parameters).all()
    return RecordedImports(
        until=rows[0].until if rows else last, sets=[RecordedSet(modules=row.modules, calls=row.calls) for row in rows]
    )
