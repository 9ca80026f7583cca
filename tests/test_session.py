"""Sessions (DESIGN §6.1): calls that share a sandbox, one at a time, and what becomes of it."""

import threading
import time
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.markers import default_environment
from sqlalchemy import Connection, exc, text

from app import liveness
from app.api.workers import read_workers
from app.catalogue import import_catalogue
from app.database import Database
from app.lease import Taker, accept_placements, cancel_call, end_placements, end_session, find_orders
from app.liveness import expire_unreported, prune, report_status, sweep
from app.placement import place_call, place_calls
from app.session import stop_waiting
from app.settings import RouterSettings
from app.waiting import session_topic
from readie.errors import (
    BadRequest,
    BadResult,
    DatabaseUnavailable,
    NoCapacity,
    NoWorkers,
    OutOfMemory,
    ReadieError,
    SandboxFailed,
    SessionBusy,
    SessionConflict,
    SessionExpired,
    UnknownSession,
    problems,
)
from readie.flavor import Flavor
from readie.settings import Bytes
from readie.wire import (
    CallPlaced,
    CallRequest,
    HeldGeneration,
    Orders,
    Result,
    SandboxStatus,
    Started,
    WorkerStatus,
    problem_of,
)
from tests import placement_oracle as oracle
from tests.catalogues import make_worked_example, read
from tests.sandboxes import wait_for

GIB = 2**30
SETTINGS = RouterSettings()
COLD = Started(how="cold")
RETURNED = Result(outcome="returned", started=COLD)
RESTORED = Result(outcome="returned", started=Started(how="restored", checkpoint_id="B"))
RAISED = Result(outcome="raised", started=COLD)


def failed(error: ReadieError, started: Started | None = COLD) -> Result:
    return Result(outcome="failed", problem=problem_of(error), started=started)


def idle(session_id: str = "s", **changes: Any) -> SandboxStatus:
    """What a worker reports of a sandbox that it keeps for a session."""
    return SandboxStatus(**{"sandbox_id": f"box-{session_id}", "session_id": session_id, "memory": GIB, **changes})


def report(database: Database, worker_id: str = "w", *sandboxes: SandboxStatus, **changes: Any) -> None:
    defaults: dict[str, Any] = {
        "flavor": Flavor.CPU,
        "state": "ready",
        "python": "3.11.7",
        "runtime": "fork",
        "memory_total": 10 * GIB,
        "incarnation": "first",
    }
    with database.transaction() as connection:
        report_status(connection, worker_id, WorkerStatus(**(defaults | changes), sandboxes=list(sandboxes)))
    expire_unreported(database, worker_id)


def call(session_id: str | None = "s", **asked: Any) -> CallRequest:
    return CallRequest(payload=b"", python="3.11", session_id=session_id, **asked)


def place(database: Database, session_id: str | None = "s", **asked: Any) -> CallPlaced:
    with database.transaction() as connection:
        return place_call(connection, database, SETTINGS, call(session_id, **asked))


def place_all(database: Database, **asked: CallRequest) -> list[str]:
    """Places calls with these ids in one transaction; where each went, or why it was refused."""
    with database.transaction() as connection:
        answers = place_calls(connection, SETTINGS, list(asked.values()), list(asked))
    return [each.placement.worker_id if isinstance(each, CallPlaced) else each.slug for each in answers]


def accept(database: Database, placed: CallPlaced) -> CallPlaced:
    with database.transaction() as connection:
        return accept_in(connection, placed)


def accept_in(connection: Connection, placed: CallPlaced) -> CallPlaced:
    assert accept_placements(connection, [Taker(placed.placement.placement_id, placed.placement.worker_id)]) == [None]
    return placed


def end(database: Database, placed: CallPlaced, result: Result = RETURNED) -> list[str]:
    with database.transaction() as connection:
        (topics,) = end_placements(connection, [(placed.placement.placement_id, result)])
    assert isinstance(topics, list)
    return topics


def begun(database: Database, **asked: Any) -> CallPlaced:
    """The first call of session s, which worker w runs."""
    report(database)
    return accept(database, place(database, **asked))


def kept(database: Database, result: Result = RETURNED, **asked: Any) -> CallPlaced:
    """The first call of session s, which has ended on worker w, and left it its sandbox."""
    placed = begun(database, **asked)
    end(database, placed, result)
    report(database, "w", idle(memory=asked.get("memory", GIB)))
    return placed


def cancel(database: Database, placed: CallPlaced) -> None:
    with database.transaction() as connection:
        cancel_call(connection, placed.call_id)


def end_by_request(database: Database, session_id: str = "s") -> list[str]:
    with database.transaction() as connection:
        return end_session(connection, database, session_id)


def orders(database: Database, worker_id: str = "w") -> Orders:
    return find_orders(database, worker_id)


def rows(database: Database, query: str) -> list[Any]:
    with database.reading() as connection:
        return list(connection.execute(text(query)).mappings())


def change(database: Database, statement: str) -> None:
    with database.transaction() as connection:
        connection.execute(text(statement))


def fall_silent(database: Database, worker_id: str = "w") -> None:
    change(database, f"UPDATE workers SET heard_at = now() - INTERVAL '31 seconds' WHERE worker_id = '{worker_id}'")


def taken(database: Database, worker_id: str = "w") -> tuple[int, int]:
    """(GiB that sandboxes use and leases reserve, sandboxes and leases without one) of a worker, by its own list."""
    with database.reading() as connection:
        (view,) = [view for view in read_workers(connection) if view.worker_id == worker_id]
    return (view.memory_used + view.memory_reserved) // GIB, view.sandboxes


# ---- the first call, and those after it ----


def test_the_first_call_is_placed_like_any_other(database: Database) -> None:
    """A session that was never seen is placed by filters, rank and cost; its agent is told to keep the sandbox."""
    catalogue = read(make_worked_example())
    import_catalogue(database, catalogue)
    held = HeldGeneration(generation=catalogue.generation, checkpoint_ids=["A", "B", "C"])
    report(database, generations=[held])
    placement = place(database, modules=["pandas"]).placement

    assert (placement.checkpoint_id, placement.reason) == ("B", "the cheapest start")
    (assignment,) = orders(database).run
    assert (assignment.session_id, assignment.continues) == ("s", False)


def test_a_later_call_goes_to_the_session_s_sandbox(database: Database) -> None:
    """It goes to its worker, however full, and no other; nothing is scored, and the placement says so."""
    catalogue = read(make_worked_example())
    import_catalogue(database, catalogue)
    kept(database, memory=8 * GIB)
    held = HeldGeneration(generation=catalogue.generation, checkpoint_ids=["A", "B", "C"])
    report(database, "w", idle(memory=8 * GIB), generations=[held])
    report(database, "empty", generations=[held])
    placed = place(database, modules=["pandas"])

    placement = placed.placement
    assert (placement.worker_id, placement.reason) == ("w", "session")
    assert (placement.checkpoint_id, placement.generation, placement.cost) == (None, None, None)
    assert placed.unmatched == []
    (assignment,) = orders(database).run
    assert (assignment.session_id, assignment.continues, assignment.memory) == ("s", True, 8 * GIB)


def test_a_session_stays_on_its_worker_before_it_is_reported(database: Database) -> None:
    """The first call's placement binds the session: the next call need not wait for the worker's report."""
    report(database, "a")
    report(database, "b")
    first = place(database)
    end(database, accept(database, first))
    others = [place(database, None) for _ in range(3)]

    assert {each.placement.worker_id for each in others} == {"a", "b"}
    assert place(database).placement.worker_id == first.placement.worker_id == "a"


def test_sessions_have_nothing_to_do_with_one_another(database: Database) -> None:
    """Each has its own sandbox and its own turns, on one worker or on several."""
    kept(database)
    report(database, "empty", memory_total=GIB // 2)

    assert place(database, "t").placement.reason != "session"
    assert place(database, "s").placement.reason == "session"


def test_an_exception_of_the_function_keeps_the_session(database: Database) -> None:
    """What a call raises is its result, and the next call finds what it left."""
    kept(database, RAISED)

    assert place(database).placement.reason == "session"


# ---- what a session counts ----


def test_an_idle_session_counts_its_budget(database: Database) -> None:
    """Its sandbox uses memory and is one of the worker's sandboxes, whether a call runs in it or not."""
    kept(database, memory=8 * GIB)

    assert taken(database) == (8, 1)
    with pytest.raises(NoCapacity, match="memory left"):
        place(database, None, memory=2 * GIB)
    report(database, "w", idle(), max_sandboxes=1)
    with pytest.raises(NoCapacity, match="sandboxes in use"):
        place(database, None, memory=1)


def test_an_idle_session_counts_before_it_is_reported(database: Database) -> None:
    """Between the first call's end and the worker's next report nothing is given away."""
    end(database, begun(database, memory=8 * GIB))

    assert taken(database) == (8, 1)
    with pytest.raises(NoCapacity):
        place(database, None, memory=2 * GIB)


def test_an_idle_session_on_a_gpu_counts_its_gpu_memory(database: Database) -> None:
    """A session that was given a whole GPU has it, idle or not; its next call has it as well."""
    report(database, flavor=Flavor.GPU, gpu_total=16 * GIB)
    end(database, accept(database, place(database, gpu=True)))
    with pytest.raises(NoCapacity):
        place(database, None, gpu_memory=1)
    placed = place(database, gpu=True)

    assert placed.placement.reason == "session"
    (assignment,) = orders(database).run
    assert (assignment.gpu, assignment.gpu_memory) == (True, 16 * GIB)


@pytest.mark.parametrize("reported", [False, True])
def test_a_call_in_a_session_reserves_nothing_more(database: Database, *, reported: bool) -> None:
    """The sandbox counts once: idle, with a call that was just placed, and with one that the report names."""
    kept(database, memory=4 * GIB)
    placed = accept(database, place(database))
    if reported:
        report(database, "w", idle(memory=4 * GIB, placement_id=placed.placement.placement_id))

    assert taken(database) == (4, 1)
    place(database, None, memory=5 * GIB)
    with pytest.raises(NoCapacity):
        place(database, None, memory=1)


def test_calls_of_one_transaction_see_what_continues(database: Database) -> None:
    """A call in a session takes no room from those that are placed with it; its worker has one call more in flight."""
    kept(database, memory=4 * GIB)
    report(database, "x", idle("t", memory=4 * GIB))
    answers = place_all(database, a=call(), b=call(None, memory=2 * GIB), c=call(None, memory=3 * GIB))

    assert answers == ["w", "x", "w"]
    assert (taken(database, "w"), taken(database, "x")) == ((7, 1), (6, 1))


# ---- one call at a time ----


def test_one_call_at_a_time(database: Database) -> None:
    """While a call of a session is placed or runs, the next one is told to wait; then it is its turn."""
    report(database)
    first = place(database)
    with pytest.raises(SessionBusy, match="session s runs one call at a time"):
        place(database)
    accept(database, first)
    with pytest.raises(SessionBusy):
        place(database)
    assert end(database, first) == [f"call:{first.call_id}", "capacity", session_topic("s")]

    assert place(database).placement.worker_id == "w"


def test_calls_of_one_transaction_take_turns(database: Database) -> None:
    """Of calls that arrive together the first has the session."""
    report(database)

    assert place_all(database, a=call(), b=call(), c=call("t"), d=call()) == ["w", "session-busy", "w", "session-busy"]


def test_those_who_wait_are_served_in_the_order_of_arrival(database: Database) -> None:
    """Whoever asks again first: a call has its turn when all that came before it have had theirs."""
    ending = begun(database).placement.placement_id
    place_all(database, b=call(), a=call())
    place_all(database, c=call())
    waiting, order = ["c", "a", "b"], []
    while waiting:
        with database.transaction() as connection:
            end_placements(connection, [(ending, RETURNED)])
        answers = place_all(database, **{call_id: call() for call_id in waiting})
        (turn,) = [call_id for call_id, answer in zip(waiting, answers, strict=True) if answer == "w"]
        order.append(turn)
        waiting.remove(turn)
        ending = f"{turn}-1"

    assert order == ["b", "a", "c"]


def test_who_comes_later_does_not_pass_those_who_wait(database: Database) -> None:
    """A session that has just become free is the one's that waits for it, even before that one has asked again."""
    first = begun(database)
    place_all(database, a=call())
    end(database, first)

    assert place_all(database, b=call()) == ["session-busy"]
    assert place_all(database, a=call()) == ["w"]


def test_who_asks_no_more_is_passed(database: Database) -> None:
    """The router of a waiting call may have gone: after ten seconds without a question others have their turn."""
    first = begun(database)
    place_all(database, a=call())
    end(database, first)
    change(database, "UPDATE session_waits SET seen_at = seen_at - INTERVAL '11 seconds'")

    assert place_all(database, b=call()) == ["w"]
    prune(database, SETTINGS)
    assert rows(database, "SELECT * FROM session_waits") == []


def test_who_gives_up_is_passed(database: Database) -> None:
    """A call that has waited too long leaves its place."""
    first = begun(database)
    place_all(database, a=call())
    end(database, first)
    with database.transaction() as connection:
        stop_waiting(connection, ["a"])

    assert place_all(database, b=call()) == ["w"]


def test_a_call_that_waits_for_room_has_its_place_in_the_session(database: Database) -> None:
    """With a queue_timeout it comes before those that ask later; without one it is refused and leaves none."""
    report(database, memory_total=1)

    assert place_all(database, a=call(queue_timeout=5), b=call()) == ["no-capacity", "no-capacity"]
    assert place_all(database, c=call()) == ["session-busy"]
    report(database)
    assert place_all(database, c=call()) == ["session-busy"]
    assert place_all(database, a=call(queue_timeout=5)) == ["w"]


def test_the_tables_refuse_a_second_call_in_a_session(database: Database) -> None:
    """Whatever the code does: no two leases name one session."""
    begun(database)
    place(database, None)

    with pytest.raises(exc.SQLAlchemyError), database.transaction() as connection:
        connection.execute(text("UPDATE leases SET session_id = 's'"))


def test_threads_never_split_a_session(database: Database) -> None:
    """Eight threads place calls in three sessions on two workers: at each time one call each, always on one worker."""
    for worker_id in ("a", "b"):
        report(database, worker_id)
    asked = iter(range(48))
    outcomes: list[tuple[str, str]] = []

    def place_some() -> None:
        for number in asked:
            session_id = f"s{number % 3}"
            try:
                placed = accept(database, place(database, session_id))
            except SessionBusy:
                continue
            outcomes.append((session_id, placed.placement.worker_id))
            end(database, placed)

    threads = [threading.Thread(target=place_some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(outcomes)) == 3
    assert len(outcomes) == len(rows(database, "SELECT * FROM calls WHERE state = 'finished'")) >= 3
    assert sum(taken(database, worker_id)[1] for worker_id in ("a", "b")) == 3


# ---- expired ----


def refuses(database: Database, session_id: str = "s") -> bool:
    """Whether the session has expired, for the next call and in the table."""
    assert place_all(database, refused=call(session_id)) == ["session-expired"]
    (row,) = rows(database, f"SELECT expired_at FROM sessions WHERE session_id = '{session_id}'")
    return row["expired_at"] is not None


def test_a_session_whose_sandbox_is_not_reported_any_more_has_expired(database: Database) -> None:
    """The worker has ended it, by its idle time, say."""
    kept(database)
    report(database)

    assert refuses(database)
    assert taken(database) == (0, 0)


@pytest.mark.parametrize(
    "result",
    [
        failed(OutOfMemory("too much")),
        failed(SandboxFailed("gone")),
        Result(outcome="cancelled", started=COLD),
    ],
    ids=["out-of-memory", "sandbox-failed", "cancelled"],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_call_that_ends_the_sandbox_ends_the_session(database: Database, result: Result, *, first: bool) -> None:
    """Once the worker reports without it; until then its budget counts."""
    if first:
        placed = begun(database)
    else:
        kept(database)
        placed = accept(database, place(database))
    end(database, placed, result)
    assert taken(database) == (1, 1)
    report(database)

    assert refuses(database)
    assert taken(database) == (0, 0)


def test_a_call_that_fails_and_leaves_the_sandbox_keeps_the_session(database: Database) -> None:
    """The worker's report decides."""
    kept(database)
    end(database, accept(database, place(database)), failed(SandboxFailed("said too much")))
    report(database, "w", idle())

    assert place(database).placement.reason == "session"


def test_the_agent_s_word_that_there_is_no_sandbox(database: Database) -> None:
    """A call that it refuses as session-expired ends the session at once."""
    kept(database)
    end(database, accept(database, place(database)), failed(SessionExpired("no sandbox"), None))

    assert refuses(database)


def test_a_report_that_is_older_than_the_sandbox_ends_nothing(database: Database) -> None:
    """A report that was on its way while the first call ran and ended knows no sandbox; one that comes later does."""
    end(database, begun(database, memory=8 * GIB))
    report(database)

    assert taken(database) == (8, 1)
    assert place(database).placement.reason == "session"


@pytest.mark.parametrize("reported_first", [True, False])
def test_a_sandbox_that_is_never_reported_is_none(database: Database, *, reported_first: bool) -> None:
    """Once it was reported, or some seconds after the call has ended, a report without it is believed."""
    end(database, begun(database))
    if reported_first:
        report(database, "w", idle())
    else:
        change(database, "UPDATE sessions SET settles_at = settles_at - INTERVAL '11 seconds'")
    report(database)

    assert refuses(database)


def test_cancelling_the_call_ends_the_session(database: Database) -> None:
    """While the worker ends the sandbox others wait; when it reports without it the session has expired."""
    kept(database)
    running = accept(database, place(database))
    cancel(database, running)
    with pytest.raises(SessionBusy):
        place(database)
    assert end(database, running, Result(outcome="cancelled", started=COLD)) == [session_topic("s")]
    report(database)

    assert refuses(database)


def test_a_call_past_its_deadline_ends_the_session(database: Database) -> None:
    """It is ended as a cancelled one is."""
    running = begun(database)
    change(database, "UPDATE leases SET deadline_at = now() - INTERVAL '1 second'")
    assert session_topic("s") in sweep(database, SETTINGS)
    assert orders(database) == Orders(cancel=[running.placement.placement_id])
    end(database, running, Result(outcome="cancelled", started=COLD))
    report(database)

    assert refuses(database)


def test_a_session_expires_with_its_worker(database: Database) -> None:
    """Evicting a worker expires its sessions, and only those."""
    kept(database)
    report(database, "other")
    placed = accept(database, place(database, "t"))
    assert placed.placement.worker_id == "other"
    end(database, placed)
    fall_silent(database)
    sweep(database, SETTINGS)

    assert refuses(database)
    assert place(database, "t").placement.worker_id == "other"


def test_a_silent_worker_has_its_sessions_until_it_is_evicted(database: Database) -> None:
    """It may have been the routers that did not hear: a call still goes there, and fails with the worker."""
    kept(database)
    fall_silent(database)
    placed = place(database)
    assert placed.placement.worker_id == "w"
    sweep(database, SETTINGS)

    (ended,) = rows(database, f"SELECT outcome FROM calls WHERE call_id = '{placed.call_id}'")
    assert ended["outcome"] == "session-expired"
    assert refuses(database)


def test_a_report_that_arrives_after_a_later_one_is_ignored(database: Database) -> None:
    """It would end a session that began meanwhile. Another agent of the worker counts anew."""
    kept(database)
    report(database, "w", idle(), report=8)
    report(database, "w", report=7)
    assert taken(database) == (1, 1)
    report(database, "w", report=1, incarnation="second")

    assert taken(database) == (0, 0)


#: How many wait for a lock in this database.
WAITING = """
SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database
WHERE datname = current_database() AND NOT granted
"""


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_a_database_that_stood_still_says_of_no_worker_that_it_is_silent(
    database: Database, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No report came through meanwhile: the sweep is put off, and workers get their time to be heard."""
    monkeypatch.setattr(liveness, "STALLED_SECONDS", 0.2)
    kept(database)
    fall_silent(database)
    locked = threading.Event()

    def stand_still() -> None:
        with database.transaction() as connection:
            connection.execute(text("LOCK TABLE workers IN ACCESS EXCLUSIVE MODE"))
            locked.set()
            wait_for(lambda: connection.execute(text(WAITING)).scalar())
            time.sleep(0.5)

    holder = threading.Thread(target=stand_still)
    holder.start()
    locked.wait()
    with pytest.raises(DatabaseUnavailable, match="seconds to say"):
        sweep(database, SETTINGS)
    holder.join()

    assert [row["worker_id"] for row in rows(database, "SELECT worker_id FROM workers")] == ["w"]


def test_what_a_session_has_installed_is_remembered_as_long_as_the_session(database: Database) -> None:
    """Its first call may have ended long ago: a later one that asks for the same packages goes on."""
    kept(database, packages=["extra"])
    change(database, "UPDATE calls SET finished_at = now() - INTERVAL '31 days'")
    prune(database, SETTINGS)

    assert place(database, packages=["extra"]).placement.worker_id == "w"


def test_a_result_that_says_so_ends_the_session(database: Database) -> None:
    """The call has ended its sandbox: the next one is not sent there, even before the worker reports."""
    kept(database)
    placed = accept(database, place(database))
    end(database, placed, msgspec.structs.replace(failed(OutOfMemory("")), lives=False))

    assert refuses(database)


def test_a_failed_call_may_leave_the_sandbox(database: Database) -> None:
    """A result that cannot be sent, say: its agent says that the sandbox lives on."""
    kept(database)
    placed = accept(database, place(database))
    end(database, placed, msgspec.structs.replace(failed(BadResult("")), lives=True))

    assert place(database).placement.worker_id == "w"


@pytest.mark.parametrize("changes", [{"incarnation": "second"}, {"state": "removed"}])
def test_a_session_expires_when_its_agent_goes(database: Database, changes: dict[str, str]) -> None:
    """Another process speaks for the worker, or the worker leaves: even if it reports the sandbox still."""
    kept(database)
    report(database, "w", idle(), **changes)

    assert refuses(database)


def test_a_worker_that_leaves_finishes_the_call_of_a_session(database: Database) -> None:
    """The session is over when its call has ended."""
    kept(database)
    running = accept(database, place(database))
    report(database, "w", idle(placement_id=running.placement.placement_id), state="removed")
    with pytest.raises(SessionBusy):
        place(database)
    end(database, running)

    assert refuses(database)


def test_an_expired_session_is_remembered_for_a_day(database: Database) -> None:
    """Then its id is one that was never seen."""
    kept(database)
    report(database)
    for hours, remembered in ((23, True), (2, False)):
        change(database, f"UPDATE sessions SET expired_at = expired_at - INTERVAL '{hours} hours'")
        prune(database, SETTINGS)
        assert bool(rows(database, "SELECT * FROM sessions")) == remembered
    assert place(database).placement.reason != "session"


# ---- a session that never had a sandbox ----


def test_a_first_call_that_nobody_accepts_is_placed_anew(database: Database) -> None:
    """Its worker died before: the session goes with the call to another worker, and who waits goes there too."""
    report(database)
    first = place(database)
    place_all(database, b=call())
    report(database, "other")
    fall_silent(database)
    sweep(database, SETTINGS)

    (assignment,) = orders(database, "other").run
    assert (assignment.call_id, assignment.session_id, assignment.continues) == (first.call_id, "s", False)
    assert place_all(database, b=call()) == ["session-busy"]
    with database.transaction() as connection:
        accept_placements(connection, [Taker(assignment.placement_id, "other")])
        end_placements(connection, [(assignment.placement_id, RETURNED)])
    assert place_all(database, b=call()) == ["other"]


def test_a_first_call_that_nobody_can_take_leaves_no_session(database: Database) -> None:
    """Its id is free."""
    report(database)
    place(database)
    fall_silent(database)
    sweep(database, SETTINGS)
    with pytest.raises(NoWorkers):
        place(database)
    report(database, "other")

    assert place(database).placement.worker_id == "other"


def test_a_first_call_that_is_cancelled_before_it_was_accepted_leaves_no_session(database: Database) -> None:
    """Nothing was started for it."""
    report(database)
    cancel(database, place(database))

    assert rows(database, "SELECT * FROM sessions") == []
    assert place(database).placement.reason != "session"


def test_a_first_call_for_which_no_sandbox_was_started_leaves_no_session(database: Database) -> None:
    """An agent that refuses a call says nothing of a start; what it reported of the call is forgotten with it."""
    first = begun(database)
    report(database, "w", idle(placement_id=first.placement.placement_id))
    end(database, first, failed(SandboxFailed("no sandbox could be started"), None))

    assert taken(database) == (0, 0)
    assert place(database).placement.reason != "session"


def test_a_first_call_with_retry_takes_its_session_along(database: Database) -> None:
    """Its worker was lost with all that the session had, which is this call's: both begin anew on another worker."""
    begun(database, retry=True)
    report(database, "other")
    fall_silent(database)
    sweep(database, SETTINGS)

    (assignment,) = orders(database, "other").run
    assert (assignment.session_id, assignment.continues) == ("s", False)
    report(database, "w", idle())
    assert orders(database, "w").end_sessions == ["s"]


def test_a_first_call_whose_worker_is_lost_ends_its_session(database: Database) -> None:
    """Without retry the call may have had effects: there is no other session of that name."""
    begun(database)
    fall_silent(database)
    sweep(database, SETTINGS)
    report(database, "other")

    assert refuses(database)


# ---- a later call that does not come through ----


def the_call(database: Database, placed: CallPlaced) -> Any:
    (row,) = rows(database, f"SELECT state, outcome, attempts FROM calls WHERE call_id = '{placed.call_id}'")
    return tuple(row.values())


def test_a_later_call_that_is_not_accepted_in_time_stays_with_its_session(database: Database) -> None:
    """It is placed again in the same sandbox."""
    kept(database)
    report(database, "empty")
    placed = place(database)
    change(database, "UPDATE leases SET deadline_at = now() - INTERVAL '1 second'")
    sweep(database, SETTINGS)

    (assignment,) = orders(database).run
    assert (assignment.placement_id, assignment.continues) == (f"{placed.call_id}-2", True)
    assert taken(database) == (1, 1)


def test_a_later_call_whose_worker_dies_before_it_accepts_fails_as_session_expired(database: Database) -> None:
    """There is no other worker that has what it needs."""
    kept(database)
    report(database, "other")
    placed = place(database)
    fall_silent(database)
    sweep(database, SETTINGS)

    assert the_call(database, placed) == ("failed", "session-expired", 1)
    assert refuses(database)


@pytest.mark.parametrize("retry", [False, True])
def test_a_later_call_whose_worker_dies_after_it_accepted_is_lost(database: Database, *, retry: bool) -> None:
    """retry=True or not: the session is lost, and the function may have had effects."""
    kept(database)
    report(database, "other")
    placed = accept(database, place(database, retry=retry))
    fall_silent(database)
    sweep(database, SETTINGS)

    assert the_call(database, placed) == ("failed", "worker-lost", 1)
    assert refuses(database)


def test_cancelling_a_later_call_before_it_was_accepted_keeps_the_session(database: Database) -> None:
    """Nothing ran in the sandbox."""
    kept(database)
    cancel(database, place(database))

    assert place(database).placement.reason == "session"


# ---- demands that the sandbox cannot meet ----

FIRST: dict[str, Any] = {"memory": 2 * GIB, "max_memory": 3 * GIB}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"gpu": True}, "it has no GPU"),
        ({"gpu_memory": 1}, "it has no GPU"),
        ({"memory": 3 * GIB + 1}, f"its memory is {3 * GIB} bytes at most, {3 * GIB + 1} are asked for"),
        ({"max_memory": 4 * GIB}, f"its memory is {3 * GIB} bytes at most, {4 * GIB} are asked for"),
        ({"checkpoint_id": "A"}, "it was started from B, A is pinned"),
        ({"cold": True}, "it was started from B, a cold start is asked for"),
        ({"packages": ["requests"]}, "its first call did not have requests installed"),
        ({"gpu": True, "cold": True}, "it has no GPU; it was started from B, a cold start is asked for"),
    ],
)
def test_a_demand_that_the_sandbox_cannot_meet(database: Database, asked: dict[str, Any], says: str) -> None:
    """It is refused, with what is in the way; the session stays as it is."""
    prepare_packages(database)
    end(database, accept(database, place(database, modules=["pandas"], **FIRST)), RESTORED)
    with pytest.raises(SessionConflict, match=f"^session s: {says}"):
        place(database, **asked)

    assert place(database).placement.reason == "session"


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"memory": 1},
        {"memory": 3 * GIB},
        {"max_memory": 3 * GIB},
        {"checkpoint_id": "B"},
        {"packages": ["numpy>=2", "pandas"]},
        {"modules": ["torch"]},
    ],
)
def test_a_demand_that_the_sandbox_meets(database: Database, asked: dict[str, Any]) -> None:
    """A call gets what the sandbox has, which may be more than it asks for; what it leaves open is no demand."""
    prepare_packages(database)
    end(database, accept(database, place(database, modules=["pandas"], **FIRST)), RESTORED)
    place(database, **asked)

    (assignment,) = orders(database).run
    assert (assignment.memory, assignment.max_memory, assignment.packages) == (2 * GIB, 3 * GIB, [])


def test_a_call_without_a_budget_is_not_too_large_for_a_small_session(database: Database) -> None:
    """The default budget is for calls that get a sandbox of their own."""
    kept(database, memory=GIB // 2)

    assert place(database).placement.reason == "session"


@pytest.mark.parametrize(
    ("first", "asked", "fits"),
    [
        ({"gpu_memory": 4 * GIB}, {"gpu": True}, True),
        ({"gpu_memory": 4 * GIB}, {"gpu_memory": 4 * GIB}, True),
        ({"gpu_memory": 4 * GIB}, {"gpu_memory": 5 * GIB}, False),
        ({"gpu_memory": 4 * GIB, "max_gpu_memory": 5 * GIB}, {"gpu_memory": 5 * GIB}, True),
        ({"gpu": True}, {"gpu_memory": 16 * GIB}, True),
        ({"gpu": True}, {"gpu_memory": 17 * GIB}, False),
        ({}, {"gpu": True}, False),
    ],
)
def test_the_gpu_of_a_session(database: Database, first: dict[str, Any], asked: dict[str, Any], *, fits: bool) -> None:
    """What the first call got is what there is, even on a gpu worker; gpu=True alone asks for no amount."""
    report(database, flavor=Flavor.GPU, gpu_total=16 * GIB)
    end(database, accept(database, place(database, **first)))
    if fits:
        assert place(database, **asked).placement.reason == "session"
        return
    with pytest.raises(SessionConflict):
        place(database, **asked)


def test_a_cold_start_that_was_a_fallback_is_one(database: Database) -> None:
    """A sandbox that was to come from a checkpoint and did not meets cold=True, and the same pin as before."""
    prepare_packages(database)
    end(database, accept(database, place(database, checkpoint_id="B")), RETURNED)
    for asked in ({"cold": True}, {"checkpoint_id": "B"}):
        end(database, accept(database, place(database, **asked)))


def test_what_the_first_call_had_installed_is_there_for_all(database: Database) -> None:
    """It may be asked for again, in the same words; nothing is installed a second time."""
    prepare_packages(database)
    end(database, accept(database, place(database, packages=["requests>=2", "numpy"])))
    placed = place(database, packages=["Requests >= 2"])

    assert [package.requirement for package in placed.kept] == ["requests>=2"]
    (assignment,) = orders(database).run
    assert assignment.packages == []
    end(database, accept(database, placed))
    with pytest.raises(SessionConflict, match="did not have requests>=3 installed"):
        place(database, packages=["requests>=3"])


def prepare_packages(database: Database) -> None:
    """The worked example, its items owned by distributions of their names; a worker with Python 3.11 holds it."""
    document = make_worked_example() | {"distributions": {"numpy": "2.0.2", "pandas": "2.2.0"}}
    for key, item in document["items"].items():
        item["distribution"] = key
    catalogue = read(document)
    import_catalogue(database, catalogue)
    markers = {name: str(value) for name, value in default_environment().items()} | {"python_version": "3.11"}
    held = HeldGeneration(generation=catalogue.generation, checkpoint_ids=["A", "B", "C"])
    report(database, generations=[held], markers=markers)


# ---- ending a session ----


def test_ending_an_idle_session(database: Database) -> None:
    """It has expired at once; its worker is ordered to end the sandbox until it does not report it any more."""
    kept(database)
    assert orders(database) == Orders()
    assert end_by_request(database) == ["worker:w", session_topic("s")]

    assert refuses(database)
    assert orders(database) == Orders(end_sessions=["s"])
    report(database, "w", idle())
    assert orders(database) == Orders(end_sessions=["s"])
    assert taken(database) == (1, 1)
    report(database)
    assert orders(database) == Orders()
    assert taken(database) == (0, 0)


def test_ending_a_session_that_was_not_reported_yet(database: Database) -> None:
    """The order goes out before the sandbox is reported, and with each report that has it."""
    end(database, begun(database))
    end_by_request(database)
    assert orders(database).end_sessions == ["s"]
    report(database)
    assert orders(database).end_sessions == []
    report(database, "w", idle())

    assert orders(database).end_sessions == ["s"]


def test_ending_a_session_cancels_its_call(database: Database) -> None:
    """The call that it has ends as cancelled, and the sandbox with it."""
    kept(database)
    running = accept(database, place(database))
    report(database, "w", idle(placement_id=running.placement.placement_id))
    topics = end_by_request(database)

    assert {"worker:w", session_topic("s"), f"call:{running.call_id}", "capacity"} == set(topics)
    assert the_call(database, running) == ("cancelled", "cancelled", 1)
    assert orders(database) == Orders(cancel=[running.placement.placement_id])
    assert refuses(database)
    end(database, running, Result(outcome="cancelled", started=COLD))
    report(database)
    assert orders(database) == Orders()


def test_ending_a_session_whose_first_call_waits_for_its_agent(database: Database) -> None:
    """The agent never hears of it; the session has expired all the same."""
    report(database)
    placed = place(database)
    end_by_request(database)

    assert orders(database) == Orders()
    assert the_call(database, placed) == ("cancelled", "cancelled", 1)
    assert refuses(database)


def test_ending_a_session_twice_is_fine(database: Database) -> None:
    """One that is over stays so."""
    kept(database)
    end_by_request(database)

    assert end_by_request(database) == []


def test_ending_what_never_was(database: Database) -> None:
    """An unknown session is an error."""
    with pytest.raises(UnknownSession):
        end_by_request(database)


def test_sandboxes_of_sessions_that_nobody_knows_are_ended(database: Database) -> None:
    """A worker that keeps a sandbox for a session that is not its own, or was forgotten, is told to end it."""
    kept(database)
    report(database, "w", idle(), idle("forgotten"))
    report(database, "other", idle())

    assert orders(database).end_sessions == ["forgotten"]
    assert orders(database, "other").end_sessions == ["s"]


def test_a_report_names_no_session_twice(database: Database) -> None:
    """A session has one sandbox."""
    with pytest.raises(BadRequest, match="listed twice"):
        report(database, "w", idle(), idle(sandbox_id="another"))


# ---- all of it, against the plain model ----

steps = st.one_of(
    st.tuples(st.just("call"), st.sampled_from([None, "s", "t"]), st.sampled_from([None, 300, 1500])),
    st.tuples(st.just("call"), st.sampled_from(["s", "t"]), st.none()),
    st.tuples(st.just("end"), st.integers(0, 5), st.sampled_from([RETURNED, RAISED, failed(OutOfMemory("all"))])),
    st.tuples(st.just("report"), st.sampled_from("ab"), st.none()),
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(steps, min_size=1, max_size=25), totals=st.tuples(*[st.sampled_from([1000, 2000, 4000])] * 2))
def test_sessions_are_those_of_the_plain_model(database: Database, script: list[Any], totals: tuple[int, int]) -> None:
    """Whatever is called, ends and is reported: where each call goes, why it is refused, and what counts of a worker.

    The reports name no placements: the worker reports when calls have ended, and their results are on the way.
    """
    router = RouterSettings(default_memory=Bytes(700))
    for table in ("workers", "sandboxes", "leases", "calls", "sessions"):
        change(database, f"DELETE FROM {table}")
    model = oracle.Cluster(dict(zip("ab", totals, strict=True)))
    for worker_id, total in model.totals.items():
        report(database, worker_id, memory_total=total)
    running: list[CallPlaced] = []
    for kind, what, how in script:
        if kind == "call":
            request = call(what, memory=how)
            expected = model.place(request, 700, 900_000)
            if expected in problems():
                with pytest.raises(problems()[expected]), database.transaction() as connection:
                    place_call(connection, database, router, request)
            else:
                with database.transaction() as connection:
                    placed = accept_in(connection, place_call(connection, database, router, request))
                assert placed.placement.worker_id == expected
                running.append(placed)
        elif kind == "end" and running:
            number = what % len(running)
            result = how if model.has_sandbox(number) else failed(SessionExpired("no sandbox"), None)
            end(database, running.pop(number), result)
            model.end(number, lives=result.outcome != "failed")
        elif kind == "report":
            boxes = [
                SandboxStatus(sandbox_id=f"box-{session_id}", memory=memory, session_id=session_id)
                for session_id, memory in model.report(what)
            ]
            report(database, what, *boxes, memory_total=model.totals[what])
        with database.reading() as connection:
            views = read_workers(connection)
        counted = {view.worker_id: view.memory_used + view.memory_reserved for view in views}
        assert counted == {worker_id: model.memory(worker_id) for worker_id in "ab"}
