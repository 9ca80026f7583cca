"""Routes for operators: does the process live, can it serve."""

from typing import Literal

from litestar import get
from litestar.di import NamedDependency

from app.api import PROBLEMS
from app.database import Database, check_schema
from readie.wire import Answer


class Health(Answer, frozen=True, kw_only=True):
    """The process answers."""

    status: Literal["ok"] = "ok"


@get("/health", operation_id="health", sync_to_thread=False)
def health() -> Health:
    """The process lives; it says nothing about the database."""
    return Health()


@get("/ready", operation_id="ready", sync_to_thread=True, responses=PROBLEMS)
def ready(database: NamedDependency[Database]) -> Health:
    """The database answers, and has this version's schema."""
    check_schema(database)
    return Health()
