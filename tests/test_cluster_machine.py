"""A cluster in any order of events (DESIGN §6): every step of the router is that of the plain model.

The functions and the databases are the real ones. Agents are those of tests/cluster_model.py: they crash, come back as
another incarnation, fall silent, and report what they have. Time passes by moving the stored times back.
"""

import os
from collections import Counter
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import text

from app.catalogue import import_catalogue
from app.check import check_rows
from app.database import Database
from app.lease import Taker, accept_placements, cancel_call, end_placements, end_session, read_orders
from app.liveness import expire_unreported, prune, report_status, sweep
from app.placement import place_calls
from app.session import stop_waiting
from readie.errors import CallCancelled, ReadieError, UnknownWorker
from readie.flavor import Flavor
from readie.wire import CallRequest, Result, problem_of
from tests.catalogues import make_worked_example, read
from tests.cluster_model import SETTINGS, Router, Run, changed, new_agent

TABLES = (
    *("workers", "worker_generations", "worker_checkpoints", "sandboxes", "leases", "cancellations", "sessions"),
    *("session_waits", "calls", "call_payloads", "call_modules", "call_packages", "call_output", "call_results"),
)
TIMES = {
    "workers": ["heard_at"],
    "calls": ["created_at", "accepted_at", "finished_at"],
    "leases": ["placed_at", "accepted_at", "deadline_at"],
    "cancellations": ["created_at"],
    "sessions": ["created_at", "used_at", "settles_at", "expired_at"],
    "session_waits": ["seen_at"],
}

#: Seconds, more than all that the machine lets pass.
FAR = 1_000_000

worker_ids = st.sampled_from("abc")
offers = st.fixed_dictionaries(
    {
        "flavor": st.sampled_from(Flavor),
        "memory_total": st.sampled_from([2000, 4000, 6000, None]),
        "gpu_total": st.sampled_from([None, 500, 1000]),
        "max_sandboxes": st.sampled_from([0, 0, 1, 3]),
        "held": st.booleans(),
    }
)
session_ids = st.none() | st.sampled_from("st")
numbers = st.integers(0, 7)


class ClusterMachine(RuleBasedStateMachine):
    """The real router and the model of it, which get the same."""

    def __init__(self, database: Database, generations: dict[Flavor, str]) -> None:
        super().__init__()
        self.database, self.generations = database, generations
        self.model = Router()
        self.agents: dict[str, Any] = {}
        self.count = self.steps = 0
        self.starts: Counter[str] = Counter()  # of a call's function
        with database.transaction() as connection:
            for table in TABLES:
                connection.execute(text(f"DELETE FROM {table}"))

    def next_id(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count:03}"

    def report(self, worker_id: str) -> None:
        status = self.agents[worker_id].report()
        with self.database.transaction() as connection:
            report_status(connection, worker_id, status)
        expire_unreported(self.database, worker_id)
        self.model.report(worker_id, status)

    # -- workers --

    @initialize(offers=st.fixed_dictionaries(dict.fromkeys("abc", offers)))
    def there_are_two_workers(self, offers: dict[str, dict[str, Any]]) -> None:
        self.offers = offers
        for worker_id in "ab":
            self.an_agent_starts(worker_id, other_flavor=False)

    @rule(worker_id=worker_ids, other_flavor=st.sampled_from([False, False, True]))
    def an_agent_starts(self, worker_id: str, *, other_flavor: bool) -> None:
        """The first of this worker, or the next after a crash; it may have been given another flavor."""
        offers = dict(self.offers[worker_id])
        if other_flavor:
            offers["flavor"] = Flavor.GPU if offers["flavor"] is Flavor.CPU else Flavor.CPU
        if offers["flavor"] is Flavor.CPU:
            offers["gpu_total"] = None
        held = self.generations[offers["flavor"]] if offers["held"] else None
        self.agents[worker_id] = new_agent(self.next_id("agent"), **offers | {"held": held})
        self.report(worker_id)

    @rule(number=numbers, comes_back=st.sampled_from([True, True, False]))
    @precondition(lambda self: self.agents)
    def an_agent_crashes(self, number: int, *, comes_back: bool) -> None:
        worker_id = self.some(self.agents, number)
        del self.agents[worker_id]
        if comes_back:
            self.an_agent_starts(worker_id, other_flavor=False)

    @rule(number=numbers)
    @precondition(lambda self: len(self.agents) > 1)
    def an_agent_leaves(self, number: int) -> None:
        """It finishes what it runs."""
        worker_id = self.some(self.agents, number)
        agent = self.agents[worker_id]
        agent.status = changed(agent.status, state="removed")
        agent.sessions = {name: kept for name, kept in agent.sessions.items() if kept.run is not None}
        self.report(worker_id)

    @rule(number=numbers)
    @precondition(lambda self: self.agents)
    def an_agent_reports(self, number: int) -> None:
        self.report(self.some(self.agents, number))

    @rule(number=numbers, accepts=st.booleans())
    @precondition(lambda self: self.agents)
    def an_agent_fetches(self, number: int, *, accepts: bool) -> None:
        """Gets what it has to do, and begins with it."""
        self.fetch(self.some(self.agents, number), accepts=accepts)

    def fetch(self, worker_id: str, *, accepts: bool) -> None:
        agent, expected = self.agents[worker_id], self.model.orders(worker_id)
        if expected is None:
            with pytest.raises(UnknownWorker), self.database.reading() as connection:
                read_orders(connection, worker_id)
            self.report(worker_id)
            return
        with self.database.reading() as connection:
            orders = read_orders(connection, worker_id)
        assert ([each.placement_id for each in orders.run], sorted(orders.cancel), orders.end_sessions) == expected
        agent.end_sessions(orders.end_sessions)
        for assignment in orders.run:
            assert not assignment.gpu or agent.status.flavor is Flavor.GPU
            agent.runs.setdefault(assignment.placement_id, Run(assignment))
        for placement_id in orders.cancel:
            if placement_id in agent.runs:
                agent.finish(placement_id, "failed")
            self.send(placement_id, Result(outcome="cancelled", problem=problem_of(CallCancelled("as ordered"))))
        for placement_id in [name for name, run in agent.runs.items() if accepts and not run.accepted]:
            self.accept(worker_id, placement_id)

    # -- calls --

    @rule(
        session_id=session_ids,
        memory=st.sampled_from([None, None, 300, 1500]),
        gpu=st.sampled_from([False, False, True]),
        gpu_memory=st.sampled_from([None, None, 200, 600]),
        retry=st.booleans(),
        start=st.sampled_from([{}, {}, {"cold": True}, {"checkpoint_id": "A"}]),
    )
    def a_call_is_placed(self, session_id: str | None, start: dict[str, Any], *, gpu: bool, **asked: Any) -> None:
        if not gpu:
            asked["gpu_memory"] = None
        self.place(session_id=session_id, gpu=gpu, **asked, **start)

    @rule(
        session_id=st.sampled_from([None, "s", "s", "t"]),
        retry=st.booleans(),
        how=st.sampled_from([None, None, "returned", "returned", "failed"]),
    )
    def a_call_is_placed_and_runs(self, how: str | None, **asked: Any) -> None:
        """It asks for nothing special; its agent takes it, and perhaps ends it."""
        worker_id = self.place(**asked)
        if worker_id in self.agents:
            self.fetch(worker_id, accepts=True)
            placement_id = f"call{self.count:03}-1"
            if how and placement_id in self.agents[worker_id].runs:
                self.send(placement_id, self.agents[worker_id].finish(placement_id, how))

    def place(self, **asked: Any) -> str:
        """Where a new call goes, or why it does not."""
        request = CallRequest(payload=b"", python="3.11", **asked)
        call_id = self.next_id("call")
        with self.database.transaction() as connection:
            (placed,) = place_calls(connection, SETTINGS, [request], [call_id])
        if isinstance(placed, ReadieError):  # the client gives up at once
            with self.database.transaction() as connection:
                stop_waiting(connection, [call_id])
        got = placed.slug if isinstance(placed, ReadieError) else placed.placement.worker_id
        assert got == self.model.place(call_id, request)
        return got

    @rule(number=numbers)
    @precondition(lambda self: self.runs(accepted=False))
    def an_agent_accepts(self, number: int) -> None:
        """From now on the function runs."""
        self.accept(*self.some(self.runs(accepted=False), number))

    def accept(self, worker_id: str, placement_id: str) -> None:
        agent = self.agents[worker_id]
        run = agent.runs[placement_id]
        agent.enter(run)
        with self.database.transaction() as connection:
            (refused,) = accept_placements(connection, [Taker(placement_id, worker_id)])
        run.accepted = refused is None
        assert run.accepted == self.model.accept(placement_id, worker_id)
        if not run.accepted:
            agent.drop(placement_id)
            return
        call_id = run.assignment.call_id
        if run.kept:
            assert run.kept.first == self.model.sessions[run.assignment.session_id].call_id
        if run.kept or not run.assignment.continues:
            self.starts[call_id] += 1
        assert self.starts[call_id] <= 1 or self.model.calls[call_id].request.retry

    @rule(number=numbers, how=st.sampled_from(["returned", "returned", "raised", "failed", "never"]))
    @precondition(lambda self: self.runs(accepted=True))
    def a_call_ends(self, number: int, how: str) -> None:
        worker_id, placement_id = self.some(self.runs(accepted=True), number)
        self.send(placement_id, self.agents[worker_id].finish(placement_id, how))

    def send(self, placement_id: str, result: Result) -> None:
        with self.database.transaction() as connection:
            end_placements(connection, [(placement_id, result)])
        self.model.end(placement_id, result)

    @rule(number=numbers)
    @precondition(lambda self: self.model.leases)
    def a_call_is_cancelled(self, number: int) -> None:
        placement_id = self.some(self.model.leases, number)
        with self.database.transaction() as connection:
            cancel_call(connection, self.model.leases[placement_id].call_id)
        self.model.cancel(placement_id)

    @rule(number=numbers)
    @precondition(lambda self: self.model.sessions)
    def a_session_is_ended(self, number: int) -> None:
        session_id = self.some(self.model.sessions, number)
        with self.database.transaction() as connection:
            end_session(connection, self.database, session_id)
        if not self.model.sessions[session_id].expired:
            self.model.end_session(session_id)

    # -- time --

    @rule(seconds=st.sampled_from([20, 20, 310, 510, 2000]), silent=st.sets(worker_ids, max_size=1))
    def time_passes(self, seconds: int, silent: set[str]) -> None:
        """Agents report in it, but for one at most, and give up what they could not accept."""
        self.move_times(f"- INTERVAL '{seconds} seconds'")
        self.model.now += seconds
        for agent in self.agents.values():
            agent.give_up()
        for worker_id in sorted(self.agents.keys() - silent):
            self.report(worker_id)

    @rule(worker_id=worker_ids)
    def the_clock_is_set_back(self, worker_id: str) -> None:
        """By far; what a sweep makes of it, and then a report of one worker."""
        self.move_times(f"+ INTERVAL '{FAR} seconds'")
        sweep(self.database, SETTINGS)
        self.model.set_back()
        self.model.sweep()
        if worker_id in self.agents:
            self.report(worker_id)

    def move_times(self, change: str) -> None:
        with self.database.transaction() as connection:
            for table, columns in TIMES.items():
                moved = ", ".join(f"{column} = {column} {change}" for column in columns)
                connection.execute(text(f"UPDATE {table} SET {moved}"))

    @rule()
    def a_router_sweeps(self) -> None:
        sweep(self.database, SETTINGS)
        self.model.sweep()

    @rule()
    def a_router_prunes(self) -> None:
        prune(self.database, SETTINGS)
        self.model.expire()

    # -- what holds after each step --

    @invariant()
    def the_tables_are_those_of_the_model(self) -> None:
        model = self.model
        assert self.rows("SELECT call_id, state, outcome, attempts, worker_id FROM calls") == {
            (name, call.state, call.outcome, call.attempts, call.worker_id) for name, call in model.calls.items()
        }
        assert self.rows("SELECT placement_id, worker_id, incarnation, session_id FROM leases") == {
            (name, lease.worker_id, lease.incarnation, lease.session_id) for name, lease in model.leases.items()
        }
        sessions = "SELECT session_id, worker_id, call_id, incarnation, expired_at IS NOT NULL FROM sessions"
        assert self.rows(sessions) == {
            (name, each.worker_id, each.call_id, each.incarnation, each.expired)
            for name, each in model.sessions.items()
        }
        sandboxes = (
            "SELECT worker_id, sandbox_id, placement_id, session_id, memory_bytes, gpu_memory_bytes FROM sandboxes"
        )
        assert self.rows(sandboxes) == {
            (name, box.sandbox_id, box.placement_id, box.session_id, box.memory, box.gpu_memory)
            for name, worker in model.workers.items()
            for box in worker.sandboxes
        }

    @invariant()
    def every_call_has_a_lease_or_an_end(self) -> None:
        leased = {lease.call_id for lease in self.model.leases.values()}

        assert leased == {name for name, call in self.model.calls.items() if call.outcome is None}

    @invariant()
    def no_worker_is_overcommitted(self) -> None:
        """What is taken of it leaves the headroom, of a GPU that no call has whole too."""
        for worker_id, worker in self.model.workers.items():
            memory, gpu_memory, sandboxes = self.model.taken(worker_id)
            status = worker.status
            assert status.memory_total is None or memory * 10 <= status.memory_total * 9
            assert status.gpu_total is None or gpu_memory * 10 <= status.gpu_total * 9 or gpu_memory == status.gpu_total
            assert status.max_sandboxes == 0 or sandboxes <= status.max_sandboxes

    def check(self) -> None:
        with self.database.reading() as connection:
            findings = check_rows(connection, SETTINGS)
        assert [each for each in findings if each.rule not in {"leases_overdue", "sessions_elsewhere"}] == []

    @invariant()
    def nothing_is_wrong(self) -> None:
        """Asked now and then, and at the end: it takes longer than all else."""
        self.steps += 1
        if self.steps % 10 == 0:
            self.check()

    def teardown(self) -> None:
        self.check()

    # -- who and what --

    def rows(self, query: str) -> set[Any]:
        with self.database.reading() as connection:
            return {tuple(row) for row in connection.execute(text(query))}

    def runs(self, *, accepted: bool) -> list[tuple[str, str]]:
        return [
            (worker_id, placement_id)
            for worker_id, agent in self.agents.items()
            for placement_id, run in agent.runs.items()
            if run.accepted == accepted
        ]

    @staticmethod
    def some(things: Any, number: int) -> Any:
        listed = list(things)
        return listed[number % len(listed)]


def test_a_cluster_is_that_of_the_plain_model(database: Database, kind: str) -> None:
    """Workers, placements, sessions and calls, step by step; nothing is lost, run twice or overcommitted."""
    generations = {}
    for flavor in Flavor:
        catalogue = read(make_worked_example(flavor=flavor))
        import_catalogue(database, catalogue)
        generations[flavor] = catalogue.generation

    class Machine(ClusterMachine):
        def __init__(self) -> None:
            super().__init__(database, generations)

    examples = int(os.environ.get("HYPOTHESIS_EXAMPLES", "8"))
    run_state_machine_as_test(
        Machine,
        settings=hypothesis.settings(
            max_examples=examples if kind == "duckdb" else max(1, examples // 2),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
