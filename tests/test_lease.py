"""What becomes of a placement (DESIGN §6): accepted, printing, ended by its result, its client, its time or its worker."""

from typing import Any

import msgspec
import pytest
from sqlalchemy import text

from app.database import Database
from app.lease import Taker, accept_placements, add_output, call_of, cancel_call, end_placements, find_orders
from app.liveness import SWEEP, evict_worker, prune, report_status, sweep
from app.placement import place_call
from app.settings import RouterSettings
from readie.errors import BadRequest, PlacementTaken, UnknownCall, UnknownPlacement, UnknownWorker
from readie.flavor import Flavor
from readie.settings import Bytes
from readie.wire import (
    CallPlaced,
    CallRequest,
    Orders,
    Output,
    Phases,
    Problem,
    Result,
    SandboxStatus,
    Started,
    WorkerStatus,
)

GIB = 2**30
SETTINGS = RouterSettings(default_memory=Bytes(GIB))
RETURNED = Result(outcome="returned", payload=b"value", started=Started(how="cold"), phases=Phases(ready=0.25))


def report(database: Database, worker_id: str = "w", **changes: Any) -> None:
    defaults: dict[str, Any] = {
        "flavor": Flavor.CPU,
        "state": "ready",
        "python": "3.11.7",
        "runtime": "fork",
        "memory_total": 4 * GIB,
        "incarnation": "first",
    }
    with database.transaction() as connection:
        report_status(connection, worker_id, WorkerStatus(**(defaults | changes)))


def place(database: Database, **asked: Any) -> CallPlaced:
    with database.transaction() as connection:
        return place_call(connection, database, SETTINGS, CallRequest(payload=b"function", python="3.11", **asked))


def placed(database: Database, **asked: Any) -> str:
    """The placement id of a call that waits for worker w to accept it."""
    report(database)
    return place(database, **asked).placement.placement_id


def accepted(database: Database, **asked: Any) -> str:
    """The placement id of a call that worker w runs."""
    placement_id = placed(database, **asked)
    accept(database, placement_id)
    return placement_id


def accept(database: Database, placement_id: str, worker_id: str = "w") -> None:
    with database.transaction() as connection:
        (refused,) = accept_placements(connection, [Taker(placement_id, worker_id)])
    if refused is not None:
        raise refused


def end(database: Database, placement_id: str, result: Result = RETURNED) -> list[str]:
    (ended,) = end_all(database, [(placement_id, result)])
    if isinstance(ended, UnknownPlacement):
        raise ended
    return ended


def end_all(database: Database, results: list[tuple[str, Result]]) -> list[list[str] | UnknownPlacement]:
    with database.transaction() as connection:
        return end_placements(connection, results)


def cancel(database: Database, call_id: str) -> list[str]:
    with database.transaction() as connection:
        return cancel_call(connection, call_id)


def orders(database: Database, worker_id: str = "w") -> Orders:
    return find_orders(database, worker_id)


def rows(database: Database, query: str) -> list[Any]:
    with database.reading() as connection:
        return list(connection.execute(text(query)).mappings())


def the_call(database: Database) -> Any:
    (call,) = rows(database, "SELECT * FROM calls")
    return call


def the_result(database: Database) -> Result:
    (row,) = rows(database, "SELECT result FROM call_results")
    return msgspec.msgpack.decode(row["result"], type=Result)


def change(database: Database, statement: str) -> None:
    with database.transaction() as connection:
        connection.execute(text(statement))


def fall_silent(database: Database) -> None:
    change(database, "UPDATE workers SET heard_at = heard_at - INTERVAL '31 seconds' WHERE worker_id = 'w'")


def let_the_deadline_pass(database: Database) -> None:
    change(database, "UPDATE leases SET deadline_at = now() - INTERVAL '1 second'")


# ---- handed over and accepted ----


def test_an_agent_gets_all_that_it_needs(database: Database) -> None:
    """A placement comes with payload, modules in order, budgets and timeout, again and again until it is accepted."""
    placement_id = placed(database, function="train", modules=["b", "a"], max_memory=2 * GIB, timeout=7.5)

    (assignment,) = orders(database).run
    assert [again.placement_id for again in orders(database).run] == [placement_id]
    assert (assignment.placement_id, assignment.call_id) == (placement_id, call_of(placement_id))
    assert (assignment.payload, assignment.function, assignment.python) == (b"function", "train", "3.11")
    assert (assignment.modules, assignment.packages) == (["b", "a"], [])
    assert (assignment.memory, assignment.max_memory, assignment.timeout) == (2 * GIB, 2 * GIB, 7.5)
    assert 0 <= assignment.queue < 60
    accept(database, placement_id)
    assert orders(database) == Orders()


def test_an_unknown_worker_has_to_report_first(database: Database) -> None:
    """Who never reported gets no orders, but is told what to do."""
    with pytest.raises(UnknownWorker, match="reports its status"):
        orders(database, "stranger")


def test_accepting_twice_is_fine(database: Database) -> None:
    """An agent whose answer got lost accepts again; the call runs once."""
    placement_id = accepted(database)
    accept(database, placement_id)

    assert the_call(database)["state"] == "accepted"


def test_accepting_gives_the_function_its_time(database: Database) -> None:
    """From the acceptance on, a placement's time is the function's timeout and what a start may take."""
    accepted(database, timeout=100)

    (row,) = rows(database, "SELECT extract(epoch FROM deadline_at - accepted_at) AS seconds FROM leases")
    assert float(row["seconds"]) == 400


def test_an_agent_says_what_a_start_may_take(database: Database) -> None:
    """Its function is not over time while its packages are still installed; of two that accept at once more counts."""
    placement_id = placed(database, timeout=100)
    with database.transaction() as connection:
        accept_placements(connection, [Taker(placement_id, "w", start_s=each) for each in (900, 600)])

    (row,) = rows(database, "SELECT extract(epoch FROM deadline_at - accepted_at) AS seconds FROM leases")
    assert float(row["seconds"]) == 1000


def test_another_worker_cannot_accept(database: Database) -> None:
    """A placement is one worker's."""
    placement_id = placed(database)

    with pytest.raises(PlacementTaken):
        accept(database, placement_id, "other")


def test_of_two_agents_with_one_worker_id_one_accepts(database: Database) -> None:
    """It is the one that reported last: the other must not run the same call, however often it asks."""
    placement_id = placed(database)
    report(database, incarnation="second")

    for incarnation, accepts in [("first", False), ("second", True), ("second", True), ("first", False)]:
        with database.transaction() as connection:
            (refused,) = accept_placements(connection, [Taker(placement_id, "w", incarnation)])
        assert isinstance(refused, PlacementTaken) != accepts
    assert the_call(database)["state"] == "accepted"


def test_an_ended_placement_cannot_be_accepted(database: Database) -> None:
    """What was cancelled before it was accepted is never run."""
    placement_id = placed(database)
    cancel(database, call_of(placement_id))

    with pytest.raises(UnknownPlacement):
        accept(database, placement_id)


def test_a_worker_that_leaves_gets_nothing_new(database: Database) -> None:
    """A removed worker may finish what it accepted; what it did not accept goes to another."""
    placement_id = placed(database)
    report(database, state="removed")
    report(database, "other")

    assert orders(database) == Orders()
    sweep(database, SETTINGS)
    (assignment,) = orders(database, "other").run
    assert assignment.placement_id == call_of(placement_id) + "-2"


# ---- output ----


def test_output_is_kept_once_in_order(database: Database) -> None:
    """Pieces come in any order and more than once; NUL, which no database text has, is replaced."""
    placement_id = accepted(database)
    for sequence, piece in [(1, "b"), (0, "a\0"), (1, "again")]:
        with database.transaction() as connection:
            add_output(connection, placement_id, Output(sequence=sequence, stream="stdout", text=piece))

    found = rows(database, "SELECT sequence, text FROM call_output ORDER BY sequence")
    assert [(row["sequence"], row["text"]) for row in found] == [(0, "a\ufffd"), (1, "b")]


def test_output_of_an_ended_placement_is_refused(database: Database) -> None:
    """Nothing is added to a call that has ended."""
    placement_id = accepted(database)
    end(database, placement_id)

    with pytest.raises(UnknownPlacement), database.transaction() as connection:
        add_output(connection, placement_id, Output(sequence=0, stream="stdout", text="late"))


# ---- results ----


@pytest.mark.parametrize(
    ("result", "state", "outcome"),
    [
        (RETURNED, "finished", "returned"),
        (Result(outcome="raised", payload=b"error"), "finished", "raised"),
        (Result(outcome="cancelled"), "cancelled", "cancelled"),
        (
            Result(outcome="failed", problem=Problem(type="urn:readie:problem:out-of-memory", title="…")),
            "failed",
            "out-of-memory",
        ),
    ],
)
def test_a_result_ends_lease_and_call(database: Database, result: Result, state: str, outcome: str) -> None:
    """A result is kept as it was sent; what the placement reserved is free again."""
    placement_id = accepted(database)
    end(database, placement_id, result)

    call = the_call(database)
    assert (call["state"], call["outcome"]) == (state, outcome)
    assert the_result(database) == result
    assert rows(database, "SELECT * FROM leases") == []


def test_the_seconds_to_ready_are_recorded(database: Database) -> None:
    """A recorded call has what it measured beside what was predicted, in nanoseconds."""
    end(database, accepted(database))

    assert (the_call(database)["measured_ready_ns"], the_call(database)["started"]) == (250_000_000, "cold")


def test_the_first_result_counts(database: Database) -> None:
    """A result sent again changes nothing, and is no error."""
    placement_id = accepted(database)
    end(database, placement_id)

    assert end(database, placement_id, Result(outcome="returned", payload=b"another")) == []
    assert the_result(database) == RETURNED


def test_a_result_frees_its_sandbox(database: Database) -> None:
    """A sandbox that was reported ends with its call, before the next report."""
    placement_id = accepted(database)
    report(database, sandboxes=[SandboxStatus(sandbox_id="s", placement_id=placement_id, memory=GIB)])
    end(database, placement_id)

    assert rows(database, "SELECT * FROM sandboxes") == []


def test_a_result_of_a_placement_that_never_was_is_refused(database: Database) -> None:
    """An agent is told to drop what the router does not know."""
    with pytest.raises(UnknownPlacement):
        end(database, "nonsense-1")


def test_results_in_one_transaction_each_end_their_own(database: Database) -> None:
    """Of two for one placement the first counts; one of a placement that never was is refused, the others are not."""
    report(database)
    first, second, third = [place(database).placement.placement_id for _ in range(3)]
    cancel(database, call_of(third))
    raised = Result(outcome="raised", payload=b"error")
    repeated = Result(outcome="returned", payload=b"another")
    answers = end_all(
        database, [(second, raised), ("nonsense-1", RETURNED), (first, RETURNED), (second, repeated), (third, RETURNED)]
    )

    assert isinstance(answers[1], UnknownPlacement)
    topics = [[f"call:{call_of(placement_id)}", "capacity"] for placement_id in (second, first)]
    assert [*answers[:1], *answers[2:]] == [*topics, [], []]
    states = {row["call_id"]: row["outcome"] for row in rows(database, "SELECT call_id, outcome FROM calls")}
    assert states == {call_of(first): "returned", call_of(second): "raised", call_of(third): "cancelled"}
    results = {row["call_id"]: row["result"] for row in rows(database, "SELECT call_id, result FROM call_results")}
    assert msgspec.msgpack.decode(results[call_of(second)], type=Result) == raised
    assert msgspec.msgpack.decode(results[call_of(first)], type=Result) == RETURNED
    assert rows(database, "SELECT * FROM leases") == []


def test_placements_accepted_in_one_transaction(database: Database) -> None:
    """Each by its own worker; who is not that is told so, and hinders nobody."""
    report(database)
    first, second = [place(database).placement.placement_id for _ in range(2)]
    accept(database, first)
    with database.transaction() as connection:
        asked = [(first, "w"), (second, "other"), ("nonsense-1", "w"), (second, "w")]
        answers = accept_placements(connection, [Taker(*each) for each in asked])

    assert [type(answer) for answer in answers] == [type(None), PlacementTaken, UnknownPlacement, type(None)]
    assert [row["state"] for row in rows(database, "SELECT state FROM calls")] == ["accepted", "accepted"]


# ---- cancel ----


def test_cancelling_before_it_is_accepted(database: Database) -> None:
    """The agent never hears of the call again, and its reservation is gone."""
    placement_id = placed(database)

    assert cancel(database, call_of(placement_id)) == ["worker:w", f"call:{call_of(placement_id)}", "capacity"]
    assert orders(database) == Orders()
    assert the_call(database)["state"] == "cancelled"
    assert the_result(database).outcome == "cancelled"


def test_cancelling_what_runs(database: Database) -> None:
    """The client sees the end at once; the agent is told until it has ended the placement, whose memory counts so long."""
    placement_id = accepted(database)
    cancel(database, call_of(placement_id))

    assert the_call(database)["state"] == "cancelled"
    assert orders(database) == Orders(cancel=[placement_id])
    assert [row["memory_bytes"] for row in rows(database, "SELECT memory_bytes FROM sandboxes")] == [GIB]
    assert end(database, placement_id, Result(outcome="cancelled")) == []
    assert orders(database) == Orders()
    assert rows(database, "SELECT * FROM sandboxes") == []


def test_cancelling_what_has_ended_changes_nothing(database: Database) -> None:
    """A call that has finished stays finished."""
    placement_id = accepted(database)
    end(database, placement_id)

    assert cancel(database, call_of(placement_id)) == []
    assert the_call(database)["state"] == "finished"


def test_cancelling_what_never_was(database: Database) -> None:
    """An unknown call is an error."""
    with pytest.raises(UnknownCall):
        cancel(database, "nonsense")


def test_an_agent_that_does_not_know_a_placement_is_not_asked_for_ever(database: Database) -> None:
    """An order to end a placement goes when the agent has not reported its sandbox for some seconds."""
    placement_id = accepted(database)
    cancel(database, call_of(placement_id))
    report(database)
    assert orders(database).cancel == [placement_id]
    change(database, "UPDATE cancellations SET created_at = created_at - INTERVAL '11 seconds'")
    report(database)

    assert orders(database) == Orders()


# ---- deadlines ----


def test_a_placement_not_accepted_in_time_is_placed_again(database: Database) -> None:
    """A call that nobody accepted has not run: it gets its next placement."""
    placement_id = placed(database, modules=["numpy"])
    let_the_deadline_pass(database)
    sweep(database, SETTINGS)

    (assignment,) = orders(database).run
    assert assignment.placement_id == call_of(placement_id) + "-2"
    assert (assignment.modules, assignment.payload) == (["numpy"], b"function")


def test_a_call_that_nobody_accepts_fails_in_the_end(database: Database) -> None:
    """After three placements the call fails, and says that nothing ran."""
    placed(database)
    for _ in range(3):
        let_the_deadline_pass(database)
        sweep(database, SETTINGS)

    assert (the_call(database)["state"], the_call(database)["outcome"]) == ("failed", "not-placed")
    assert "placed 3 times" in (the_result(database).problem or Problem(type="", title="")).detail


def test_a_call_that_runs_past_its_deadline_fails(database: Database) -> None:
    """A worker that sends no result in time loses the call, and is told to end it."""
    placement_id = accepted(database, retry=True)
    let_the_deadline_pass(database)
    sweep(database, SETTINGS)

    assert the_call(database)["outcome"] == "call-timeout"
    assert orders(database) == Orders(cancel=[placement_id])


def test_a_late_result_does_not_change_the_outcome(database: Database) -> None:
    """What was stated stays stated."""
    placement_id = accepted(database)
    let_the_deadline_pass(database)
    sweep(database, SETTINGS)
    end(database, placement_id)

    assert the_call(database)["outcome"] == "call-timeout"


# ---- workers that are lost ----


def test_a_silent_worker_is_evicted(database: Database) -> None:
    """Not heard from for WORKER_TTL by the database's clock: nothing is left of the worker."""
    report(database, sandboxes=[SandboxStatus(sandbox_id="s", memory=1)])
    report(database, "other")
    fall_silent(database)
    sweep(database, SETTINGS)

    assert [row["worker_id"] for row in rows(database, "SELECT worker_id FROM workers")] == ["other"]
    assert rows(database, "SELECT * FROM sandboxes") == []


def test_a_call_whose_worker_dies_before_it_accepts_is_placed_again(database: Database) -> None:
    """Nothing ran: another worker gets the call."""
    placement_id = placed(database)
    report(database, "other")
    fall_silent(database)
    sweep(database, SETTINGS)

    assert [a.placement_id for a in orders(database, "other").run] == [call_of(placement_id) + "-2"]
    assert the_call(database)["state"] == "placed"


def test_a_call_whose_worker_dies_before_it_accepts_fails_where_there_is_no_other(database: Database) -> None:
    """Nothing ran, and nobody can run it: the call fails as no-workers."""
    placed(database)
    fall_silent(database)
    sweep(database, SETTINGS)

    assert (the_call(database)["state"], the_call(database)["outcome"]) == ("failed", "no-workers")


def test_a_call_whose_worker_dies_after_it_accepted_is_lost(database: Database) -> None:
    """A function may have had effects: at most once."""
    accepted(database)
    report(database, "other")
    fall_silent(database)
    sweep(database, SETTINGS)

    assert (the_call(database)["state"], the_call(database)["outcome"]) == ("failed", "worker-lost")
    assert orders(database, "other") == Orders()


def test_a_call_with_retry_is_placed_again_after_it_was_accepted(database: Database) -> None:
    """retry=True: the call may run twice. The first placement's output and late result are not the second's."""
    placement_id = accepted(database, retry=True)
    report(database, "other")
    fall_silent(database)
    sweep(database, SETTINGS)

    second = call_of(placement_id) + "-2"
    assert [a.placement_id for a in orders(database, "other").run] == [second]
    accept(database, second, "other")
    end(database, placement_id, Result(outcome="returned", payload=b"late"))
    assert the_call(database)["state"] == "accepted"
    end(database, second)
    assert the_result(database) == RETURNED


def test_a_call_that_may_wait_for_room_does_so_again(database: Database) -> None:
    """Where its worker is lost before it accepted, and no other has room: until its queue_timeout is over."""
    placement_id = placed(database, queue_timeout=60)
    fall_silent(database)
    sweep(database, SETTINGS)
    assert (the_call(database)["state"], the_call(database)["attempts"]) == ("placed", 1)
    assert rows(database, "SELECT * FROM workers") == []  # it is gone all the same, with its sessions
    report(database, "other")
    sweep(database, SETTINGS)

    assert [each.placement_id for each in orders(database, "other").run] == [call_of(placement_id) + "-2"]


def test_a_call_that_has_waited_for_room_long_enough_fails(database: Database) -> None:
    """The time counts from when it should have been accepted: before that its worker may yet come back."""
    placed(database, queue_timeout=60)
    fall_silent(database)
    for seconds, state in [(30, "placed"), (90, "failed")]:
        change(database, f"UPDATE leases SET deadline_at = now() - INTERVAL '{seconds} seconds'")
        sweep(database, SETTINGS)
        assert the_call(database)["state"] == state

    assert the_call(database)["outcome"] == "no-workers"
    assert rows(database, "SELECT * FROM workers") == []


def test_a_call_that_all_its_workers_are_lost_with_is_not_placed_for_ever(database: Database) -> None:
    """retry=True: five times, for it may be what they die of."""
    placement_id = accepted(database, retry=True)
    for attempt in range(2, 7):
        report(database, "w", incarnation=f"agent {attempt}")  # the one before was restarted
        sweep(database, SETTINGS)
        if attempt <= 5:
            assert [each.placement_id for each in orders(database).run] == [f"{call_of(placement_id)}-{attempt}"]
            accept(database, f"{call_of(placement_id)}-{attempt}")

    call = the_call(database)
    assert (call["state"], call["outcome"], call["attempts"]) == ("failed", "worker-lost", 5)


def test_a_call_that_ran_on_a_lost_worker_is_lost_where_there_is_no_other(database: Database) -> None:
    """retry=True: it may have had effects, so that it is not said that nothing ran."""
    accepted(database, retry=True, queue_timeout=60)
    fall_silent(database)
    sweep(database, SETTINGS)

    assert (the_call(database)["state"], the_call(database)["outcome"]) == ("failed", "worker-lost")
    problem = the_result(database).problem
    assert problem is not None
    assert "no worker is ready" in problem.detail


def test_a_worker_that_was_restarted_has_lost_what_it_ran(database: Database) -> None:
    """Another agent process speaks for the worker: what the first accepted is lost, what it did not is the second's."""
    accepted(database)
    waiting = place(database)
    report(database, incarnation="second")
    sweep(database, SETTINGS)

    outcomes = {row["call_id"]: row["outcome"] for row in rows(database, "SELECT call_id, outcome FROM calls")}
    assert sorted(outcomes.values(), key=str) == [None, "worker-lost"]
    assert [a.call_id for a in orders(database).run] == [waiting.call_id]


def test_a_worker_of_another_flavor_gets_nothing_of_the_first(database: Database) -> None:
    """A checkpoint of one flavor is never handed to the other."""
    placed(database)
    report(database, flavor=Flavor.GPU)

    assert orders(database) == Orders()


def test_a_sweep_leaves_what_goes_well(database: Database) -> None:
    """Live workers and leases in time stay as they are."""
    accepted(database)
    before = rows(database, "SELECT * FROM leases"), rows(database, "SELECT * FROM workers")

    assert sweep(database, SETTINGS) == []
    assert (rows(database, "SELECT * FROM leases"), rows(database, "SELECT * FROM workers")) == before


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_one_router_sweeps_at_a_time(database: Database, kind: str) -> None:
    """While another router sweeps this one does nothing; afterwards it does what is due."""
    report(database)
    fall_silent(database)
    with database.transaction() as connection:
        assert database.try_lock(connection, SWEEP)
        assert sweep(database, SETTINGS) == []
        assert len(rows(database, "SELECT * FROM workers")) == 1

    assert sweep(database, SETTINGS) == ["worker:w"]
    assert rows(database, "SELECT * FROM workers") == []


def test_a_silent_worker_with_a_call_is_not_evicted(database: Database) -> None:
    """Its lease has to be ended first, so that no lease is on a worker that is not there."""
    placed(database)
    fall_silent(database)

    with database.transaction() as connection:
        assert not evict_worker(connection, "w", SETTINGS)


def test_a_report_names_no_sandbox_or_placement_twice(database: Database) -> None:
    """A report that contradicts itself is refused whole."""
    for sandboxes in (
        [SandboxStatus(sandbox_id="s", memory=1)] * 2,
        [SandboxStatus(sandbox_id=name, placement_id="p", memory=1) for name in "ab"],
    ):
        with pytest.raises(BadRequest):
            report(database, sandboxes=sandboxes)
    assert rows(database, "SELECT * FROM workers") == []


# ---- what is kept ----


@pytest.mark.parametrize(
    ("read_ago", "ended_ago", "kept"),
    [
        (None, "23 hours", True),
        (None, "25 hours", False),
        ("59 minutes", "2 hours", True),
        ("61 minutes", "2 hours", False),
    ],
)
def test_payloads_and_results_are_dropped(
    database: Database, read_ago: str | None, ended_ago: str, *, kept: bool
) -> None:
    """They are kept until an hour after they were read, a day at most; the call itself is kept."""
    placement_id = accepted(database)
    with database.transaction() as connection:
        add_output(connection, placement_id, Output(sequence=0, stream="stdout", text="a"))
    end(database, placement_id)
    read_at = "NULL" if read_ago is None else f"now() - INTERVAL '{read_ago}'"
    change(database, f"UPDATE calls SET read_at = {read_at}, finished_at = now() - INTERVAL '{ended_ago}'")
    prune(database, SETTINGS)

    for table in ("call_payloads", "call_results", "call_output"):
        assert bool(rows(database, f"SELECT * FROM {table}")) == kept
    assert the_call(database)["state"] == "finished"


def test_what_runs_keeps_its_payload(database: Database) -> None:
    """A call that has not ended may be placed again, however old it is."""
    accepted(database)
    change(database, "UPDATE calls SET created_at = created_at - INTERVAL '3 days'")
    prune(database, SETTINGS)

    assert len(rows(database, "SELECT * FROM call_payloads")) == 1


@pytest.mark.parametrize(("ended_ago", "kept"), [("29 days", True), ("31 days", False)])
def test_calls_are_remembered_for_some_time(database: Database, ended_ago: str, *, kept: bool) -> None:
    """CALLS_KEPT_DAYS after their end, with what they imported and installed."""
    end(database, accepted(database, modules=["pandas"], packages=["extra"]))
    change(database, f"UPDATE calls SET finished_at = now() - INTERVAL '{ended_ago}'")
    prune(database, SETTINGS)

    for table in ("calls", "call_modules", "call_packages"):
        assert bool(rows(database, f"SELECT * FROM {table}")) == kept
