"""The database's clock was set back: what was written by it before lies in the future, and is moved to now."""

import structlog

from app.database import Database
from app.session import REPORT_SECONDS
from app.sql import declared_parameters, statement

#: Between what two transactions call now there may be this much, while one waits for the other.
AHEAD_SECONDS = 5

_TABLES = ("workers", "leases", "cancellations", "sessions", "session_waits", "calls")

log = structlog.get_logger(__name__)


def set_times_back(database: Database) -> None:
    """Moves times that lie in the future to now, and deadlines with them; does nothing where there are none."""
    limits = {"ahead_ms": AHEAD_SECONDS * 1000, "settle_ms": REPORT_SECONDS * 1000}
    with database.reading() as connection:
        ahead = connection.execute(statement("times_ahead"), {"ahead_ms": limits["ahead_ms"]}).scalars().all()
    if not ahead:
        return
    log.warning("the database's clock was set back: times that lie in the future are set to now", tables=sorted(ahead))
    for table in _TABLES:  # a transaction each, so that none waits with rows of two
        name = f"set_back_{table}"
        with database.transaction() as connection:
            connection.execute(statement(name), {each: limits[each] for each in declared_parameters(name)})
