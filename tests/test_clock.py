"""The database's clock is set back (DESIGN §6): what it wrote before lies in the future, and nothing may wait for that.

Moving all stored times into the future is the same to the database, and leaves the machine's clock alone.
"""

from typing import Any

import pytest
from sqlalchemy import text

from app.check import check_rows
from app.database import Database
from app.lease import Taker, accept_placements, cancel_call, end_placements
from app.liveness import report_status, sweep
from app.placement import place_calls
from app.settings import RouterSettings
from readie.flavor import Flavor
from readie.wire import CallPlaced, CallRequest, Result, Started, WorkerStatus

SETTINGS = RouterSettings()
TIMES = {
    "workers": ["heard_at"],
    "calls": ["created_at", "accepted_at", "finished_at", "read_at"],
    "leases": ["placed_at", "accepted_at", "deadline_at"],
    "cancellations": ["created_at"],
    "sessions": ["created_at", "used_at", "settles_at", "expired_at"],
    "session_waits": ["seen_at"],
}


def move(database: Database, interval: str) -> None:
    """Moves all stored times: as if the clock had been set by as much the other way."""
    with database.transaction() as connection:
        for table, columns in TIMES.items():
            moved = ", ".join(f"{column} = {column} + INTERVAL '{interval}'" for column in columns)
            connection.execute(text(f"UPDATE {table} SET {moved}"))


def place(database: Database, call_id: str, *, accepted: bool, **asked: Any) -> CallPlaced:
    request = CallRequest(payload=b"", python="3.11", **asked)
    with database.transaction() as connection:
        (placed,) = place_calls(connection, SETTINGS, [request], [call_id])
        assert isinstance(placed, CallPlaced)
        if accepted:
            accept_placements(connection, [Taker(placed.placement.placement_id, "w")])
    return placed


@pytest.fixture
def later(database: Database) -> Database:
    """Worker w, calls in all their states and an idle session, an hour before the clock was set back by an hour."""
    with database.transaction() as connection:
        report_status(connection, "w", WorkerStatus(flavor=Flavor.CPU, state="ready", python="3.11.7", runtime="fork"))
    place(database, "waits", accepted=False)
    place(database, "runs", accepted=True, timeout=100)
    place(database, "ended", accepted=True)
    first = place(database, "first", accepted=True, session_id="s")
    with database.transaction() as connection:
        end_placements(
            connection, [(first.placement.placement_id, Result(outcome="returned", started=Started(how="cold")))]
        )
        cancel_call(connection, "ended")
    move(database, "1 hour")
    return database


def rows(database: Database, query: str) -> list[Any]:
    with database.reading() as connection:
        return list(connection.execute(text(query)).mappings())


def test_a_sweep_moves_what_lies_in_the_future_to_now(later: Database) -> None:
    """Before it `readie-router check` finds those times, after it nothing; no call and no session is lost by it."""
    with later.reading() as connection:
        assert {each.rule for each in check_rows(connection, SETTINGS)} == {"times_to_come"}
    sweep(later, SETTINGS)

    with later.reading() as connection:
        assert check_rows(connection, SETTINGS) == []
    assert {row["call_id"]: row["state"] for row in rows(later, "SELECT * FROM calls")} == {
        "waits": "placed",
        "runs": "accepted",
        "ended": "cancelled",
        "first": "finished",
    }
    assert [row["expired_at"] for row in rows(later, "SELECT * FROM sessions")] == [None]


def test_deadlines_move_with_what_they_are_deadlines_of(later: Database) -> None:
    """What was accepted keeps its function's time and what a start takes, what waits its time to be accepted."""
    sweep(later, SETTINGS)
    left = {
        row["call_id"]: round(float(row["seconds"]))
        for row in rows(later, "SELECT call_id, extract(epoch FROM deadline_at - now()) AS seconds FROM leases")
    }

    assert left["runs"] in range(340, 401)
    assert left["waits"] in range(1, 31)


def test_a_worker_that_is_gone_is_missed_in_time(later: Database) -> None:
    """WORKER_TTL after the sweep, not an hour later: its calls end, and it is evicted."""
    sweep(later, SETTINGS)
    move(later, "-31 seconds")
    sweep(later, SETTINGS)

    assert rows(later, "SELECT * FROM workers") == []
    assert {row["outcome"] for row in rows(later, "SELECT * FROM calls WHERE call_id IN ('waits', 'runs')")} == {
        "no-workers",
        "worker-lost",
    }


def test_a_deadline_passes_in_time(later: Database) -> None:
    """A function that does not end is given up after its own time."""
    sweep(later, SETTINGS)
    move(later, "-401 seconds")
    with later.transaction() as connection:
        connection.execute(text("UPDATE workers SET heard_at = now()"))
    sweep(later, SETTINGS)

    (call,) = rows(later, "SELECT * FROM calls WHERE call_id = 'runs'")
    assert (call["state"], call["outcome"]) == ("failed", "call-timeout")


def test_seconds_between_two_transactions_are_no_clock_set_back(later: Database) -> None:
    """What another transaction wrote a moment after this one began stays as it is."""
    move(later, "-3597 seconds")
    before = rows(later, "SELECT heard_at FROM workers")
    sweep(later, SETTINGS)

    assert rows(later, "SELECT heard_at FROM workers") == before
