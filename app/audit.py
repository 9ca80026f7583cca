"""The audit log: who administered what, and how it was answered. Refused requests are in it, too."""

from uuid import uuid4

import structlog

from app.database import Database
from app.sql import statement
from readie.errors import DatabaseUnavailable

#: The operation ids of the routes that administer something, or read whatever they like.
ADMINISTRATIVE = frozenset({"importCatalogue", "activateCatalogue", "cancelCall", "endSession", "runSql"})

#: How long its rows are kept.
KEPT_DAYS = 90

log = structlog.get_logger(__name__)


def write_audit(database: Database | None, request_id: str, **request: str | int) -> None:
    """Logs an administrative request (address, action, target, status) and writes it down; without a database, and
    while that is away, it is in the log alone.
    """
    log.info("administrative request", **request)
    if database is None:
        return
    # Clients choose ids, and one that was used before must not keep a row out: the view shows what is before the ~.
    row = {**request, "request_id": f"{request_id}~{uuid4().hex}"}
    try:
        with database.transaction() as connection:
            connection.execute(statement("insert_audit"), row)
    except DatabaseUnavailable as error:
        log.warning("the audit log was not written", reason=error.detail)
