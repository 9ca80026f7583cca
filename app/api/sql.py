"""The route for people's SQL: one SELECT over the views."""

from litestar import post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from app.api import PROBLEMS
from app.database import Database
from app.query import run_query
from readie.wire import SqlAnswer, SqlRequest


@post("/sql", operation_id="runSql", status_code=200, sync_to_thread=True, responses=PROBLEMS)
def run_sql(data: JSONBody[SqlRequest], database: NamedDependency[Database]) -> SqlAnswer:
    """Runs one SELECT over the views that docs/sql.md describes, in a read-only transaction with a time limit."""
    return run_query(database, data)
