"""Routes for sessions: end one; and for people: the list."""

from typing import Annotated

from litestar import delete, get
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter
from sqlalchemy import Connection

from app.api import PROBLEMS, Serving
from app.api.calls import Limit, Offset
from app.database import Database
from app.lease import end_session
from app.session import STALE_SECONDS
from app.sql import statement
from readie.wire import IDENTIFIER, SessionState, SessionView


@delete(
    "/sessions/{session_id:str}", operation_id="endSession", status_code=204, sync_to_thread=True, responses=PROBLEMS
)
def end(session_id: FromPath[str], serving: NamedDependency[Serving]) -> None:
    """Ends a session, its sandbox and the call that runs in it; one that is over stays so."""
    with serving.database.transaction() as connection:
        topics = end_session(connection, serving.database, session_id)
    serving.wake_ups.ring(*topics)


@get("/sessions", operation_id="listSessions", sync_to_thread=True, responses=PROBLEMS)
def list_sessions(
    database: NamedDependency[Database],
    worker_id: Annotated[str | None, QueryParameter(pattern=IDENTIFIER)] = None,
    in_state: Annotated[SessionState | None, QueryParameter(name="state")] = None,
    limit: Limit = 100,
    offset: Offset = 0,
) -> list[SessionView]:
    """Sessions, the latest first; those that have expired are remembered for a day."""
    with database.reading() as connection:
        return read_sessions(connection, worker_id=worker_id, state=in_state, limit=limit, offset=offset)


def read_sessions(
    connection: Connection,
    *,
    worker_id: str | None = None,
    state: SessionState | None = None,
    limit: int = 100,
    offset: int = 0,
) -> list[SessionView]:
    """A page of the sessions of this worker in this state (None: any), the latest first."""
    asked = {"worker_id": worker_id, "state": state, "stale_ms": STALE_SECONDS * 1000}
    rows = connection.execute(statement("session_rows"), {**asked, "at_most": limit, "skip": offset})
    return [
        SessionView(
            session_id=row.session_id,
            worker_id=row.worker_id,
            state=row.state,
            call_id=row.call_id,
            waiting=row.waiting,
            memory=row.memory_bytes,
            created_at=row.created_at,
            used_at=row.used_at,
            expired_at=row.expired_at,
        )
        for row in rows
    ]
