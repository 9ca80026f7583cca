"""Sessions: calls that share one sandbox, one at a time, in the order in which they asked.

A session begins with the placement of its first call and is bound to that worker. It is over, and remembered as expired,
when its sandbox is gone. All of it is in the database: whoever places a call, of whichever router, holds `PLACEMENTS` of
app/placement.py, and sees who has a session and who waits for it.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, RowMapping

from app.rows import write_rows
from app.sql import statement
from readie.errors import SessionBusy, SessionExpired
from readie.wire import Result

#: A call that waits for its turn has gone if its router has not asked for this long: it asks every DATABASE_POLL.
STALE_SECONDS = 10

#: A report that arrives this long after a sandbox's first call has ended was made when the sandbox was there.
REPORT_SECONDS = 10

#: An expired session is remembered for this long.
EXPIRED_SECONDS = 86_400


def read_sessions(
    connection: Connection, session_ids: Iterable[str], *, ttl_s: float | None = None
) -> dict[str, RowMapping]:
    """What calls have to know of their sessions: rows of `sessions_asked_for`, by id; the caller holds `PLACEMENTS`.

    Those whose sandbox is gone, or whose worker was not heard from for `ttl_s` (None: ever), are expired first.
    """
    asked = list(session_ids)
    if not asked:
        return {}
    expire_sessions(connection, asked, ttl_ms=None if ttl_s is None else round(ttl_s * 1000))
    parameters = {"session_ids": asked, "stale_ms": STALE_SECONDS * 1000}
    rows = connection.execute(statement("sessions_asked_for"), parameters).mappings()
    return {row["session_id"]: row for row in rows}


def expire_sessions(connection: Connection, session_ids: Sequence[str], *, ttl_ms: int | None = None) -> list[str]:
    """Marks those of these sessions as expired whose sandbox is gone; gives their ids."""
    asked = {"session_ids": list(session_ids), "ttl_ms": ttl_ms}
    return list(connection.execute(statement("expire_sessions"), asked).scalars()) if session_ids else []


def unreported_sessions(connection: Connection, worker_id: str | None = None) -> Sequence[str]:
    """The sessions (of one worker, or all) whose sandboxes are not reported: those that may have expired."""
    return connection.execute(statement("unreported_sessions"), {"worker_id": worker_id}).scalars().all()


def check_turn(session: RowMapping, call_id: str, begun: Collection[str | None]) -> None:
    """Raises `SessionExpired` where a session (a row of `read_sessions`) is over, and `SessionBusy` where another call has
    it, came earlier, or has `begun` in it just now.
    """
    if session["state"] == "expired":
        raise expired(session)
    first = session["next_call_id"] in {None, call_id}
    if session["state"] == "busy" or session["session_id"] in begun or not first:
        raise SessionBusy(f"session {session['session_id']} runs one call at a time, and others came before")


def expired(session: RowMapping) -> SessionExpired:
    """What a call of a session is told that is over."""
    return SessionExpired(f"session {session['session_id']} has expired: its sandbox was ended, or its worker is gone")


def wait_for_turns(connection: Connection, waiting: Sequence[tuple[str, str]]) -> None:
    """Calls (each with its session) keep the place where they first asked; the caller holds `PLACEMENTS`."""
    rows = [
        {"call_id": call_id, "session_id": session_id, "position": position}
        for position, (call_id, session_id) in enumerate(waiting, start=1)
    ]
    write_rows(connection, "wait_in_sessions", rows)


def stop_waiting(connection: Connection, call_ids: Sequence[str]) -> None:
    """Calls wait for no turn any more."""
    write_rows(connection, "stop_waiting", [{"call_id": call_id} for call_id in call_ids])


def leave_sessions(connection: Connection, ended: Iterable[tuple[Row[Any], Result | None]]) -> None:
    """Calls have ended: their leases, which ended in this transaction, each with the result that its agent sent.

    None: it sent none, and whether there is a sandbox is for its reports to say. Leases without a session are left out.
    """
    left = [(lease, _left(lease, result)) for lease, result in ended if lease.session_id is not None]
    write_rows(connection, "leave_sessions", [row for _, row in left])
    first = [row for lease, row in left if not lease.continues]
    for name in ("insert_session_sandboxes", "forget_sessions", "delete_forgotten_sandboxes"):
        write_rows(connection, name, first)


def _says_expired(result: Result) -> bool:
    return result.problem is not None and result.problem.type == SessionExpired().type


def _left(lease: Row[Any], result: Result | None) -> dict[str, Any]:
    """An ended lease as the statements about sessions take it."""
    if result is None:
        ran, kept = bool(lease.accepted), False
    else:
        kept = result.outcome in {"returned", "raised"} if result.lives is None else result.lives
        ran = result.outcome in {"returned", "raised"} or result.started is not None
    return {
        **{name: getattr(lease, name) for name in ("session_id", "call_id", "placement_id", "worker_id")},
        **{name: getattr(lease, name) for name in ("memory_bytes", "gpu_memory_bytes")},
        "ran": ran,
        "settle_ms": REPORT_SECONDS * 1000 if kept else None,
        "gone": result is not None and (_says_expired(result) or (ran and result.lives is False)),
    }
