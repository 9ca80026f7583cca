"""The pool: restored sandboxes kept ready for what is asked for most."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readie.manifest import CheckpointSpec
from readie.wire import Assignment
from tests.sandboxes import PYTHON, dump_call, make_rootfs, make_sealed_rootfs, needs_runsc, wait_for
from worker.agent import Agent, Run
from worker.host import open_runtime
from worker.output import OutputSender
from worker.pool import Pool, share_out
from worker.router import Router
from worker.runsc import Options
from worker.runtime import Call, Runtime, Stop, Talk, Ties, run_in
from worker.settings import read_worker_settings

GIB = 2**30


@pytest.fixture(scope="module", params=["fork", "runsc"])
def runtime(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "runsc":
        needs_runsc()
    make = make_rootfs if request.param == "fork" else make_sealed_rootfs
    running = open_runtime(request.param, make(folder / "rootfs", {}), folder, Options())
    for spec in (FIRST, SECOND):
        running.save(spec, folder / spec.checkpoint_id, timeout=60)
        running.load(spec, folder / spec.checkpoint_id, timeout=60)
    yield running
    running.close()


FIRST, SECOND = (CheckpointSpec(checkpoint_id=name, generation="g") for name in ("first", "second"))


@pytest.fixture
def pool(runtime: Runtime) -> Iterator[Pool]:
    """With room for two sandboxes, of two checkpoints."""
    pool = Pool(runtime, 2, 60.0)
    pool.offer(FIRST)
    pool.offer(SECOND)
    yield pool
    pool.close()


def held(pool: Pool) -> dict[str, int]:
    with pool.changed:
        return {key[1]: len(talks) for key, talks in pool.ready.items() if talks}


def use(talk: Talk, function: Any) -> Any:
    """Runs one call in a sandbox of the pool, and ends it."""
    import pickle

    call = Call(dump_call(function), talk.python, [], GIB, GIB, 30.0, 30.0, 2**20)
    with Stop() as stop:
        result = run_in(talk, call, Ties(stop=stop), arrived=time.monotonic(), restore=0.0)
    talk.close()
    assert result.outcome == "returned", result.problem
    return pickle.loads(result.payload)


def test_what_nobody_asked_for_is_not_restored(pool: Pool) -> None:
    """An idle pool is empty."""
    time.sleep(0.5)

    assert held(pool) == {}
    assert pool.memory == 0


def test_what_is_asked_for_is_kept_ready(pool: Pool) -> None:
    """The first call finds nothing; then there are two of its checkpoint, and their memory is counted."""
    assert pool.take(FIRST) is None

    wait_for(lambda: held(pool) == {"first": 2})
    assert pool.memory > 2 * 1_000_000


def test_each_sandbox_serves_one_call(pool: Pool) -> None:
    """What the pool has given away never comes back, and is replaced."""
    pool.take(FIRST)
    wait_for(lambda: held(pool) == {"first": 2})

    taken = [pool.take(FIRST), pool.take(FIRST)]

    assert all(taken)
    assert taken[0] is not taken[1]
    assert [use(talk, os.getpid) > 0 for talk in taken if talk] == [True, True]
    wait_for(lambda: held(pool) == {"first": 2})
    again = pool.take(FIRST)
    assert again not in taken
    assert again
    again.close()


def test_two_checkpoints_share_it_by_how_often_they_are_asked_for(pool: Pool) -> None:
    """Asked for as often, each has one: the surplus of the first makes room."""
    pool.take(FIRST)
    wait_for(lambda: held(pool) == {"first": 2})

    pool.take(SECOND)

    wait_for(lambda: held(pool) == {"first": 1, "second": 1})


def test_a_dead_one_is_not_given_away(pool: Pool) -> None:
    """A sandbox that ended while it waited is removed; the call restores its own."""
    pool.take(FIRST)
    wait_for(lambda: held(pool) == {"first": 2})
    with pool.changed:
        dead = list(pool.ready[FIRST.key])
    for talk in dead:
        signal.pidfd_send_signal(talk.sandbox.exit_descriptor, signal.SIGKILL)
    wait_for(lambda: not any(talk.idle for talk in dead))

    found = pool.take(FIRST)

    assert found not in dead
    assert all(not talk.sandbox.folder.path.exists() for talk in dead)
    if found:
        found.close()


def test_nothing_is_restored_for_which_there_is_no_room(runtime: Runtime) -> None:
    """Calls come first: what is kept ready may use only what they leave."""
    asked: list[int] = []

    def little() -> int:
        asked.append(1)
        return 1_000_000

    pool = Pool(runtime, 1, 60.0, room=little)
    pool.offer(FIRST)
    pool.take(FIRST)

    wait_for(lambda: asked)
    assert held(pool) == {}
    pool.close()


def test_what_calls_leave_no_more_room_for_is_ended(runtime: Runtime) -> None:
    """No more than that, and first what is asked for least; once there is room, others are made."""
    room = [GIB]
    pool = Pool(runtime, 3, 60.0, room=lambda: room[0])
    pool.offer(FIRST)
    pool.offer(SECOND)
    for spec in (FIRST, FIRST, FIRST, SECOND):
        pool.take(spec)
    wait_for(lambda: held(pool) == {"first": 2, "second": 1})
    talks = [talk for spec in (SECOND, FIRST) for talk in pool.ready[spec.key]]

    room[0] = pool.memory - 1
    pool.give_way()

    assert held(pool) == {"first": 2}
    assert [talk.sandbox.folder.path.exists() for talk in talks] == [False, True, True]
    room[0] = 0
    pool.give_way()
    assert (held(pool), pool.memory) == ({}, 0)
    room[0] = GIB
    wait_for(lambda: held(pool) == {"first": 2, "second": 1})
    pool.close()


@pytest.fixture
def agent(runtime: Runtime, tmp_path: Path) -> Iterator[Agent]:
    """An agent without a router, with 8 GiB and a pool of two, which is full."""
    settings = read_worker_settings(
        {"ROOTFS": "rootfs", "WORKER_DIR": str(tmp_path), "WORKER_MEM_TOTAL": "8Gi", "POOL_SIZE": "2"}
    )
    agent = Agent(settings, runtime, Router(settings))
    agent.pool.offer(FIRST)
    agent.pool.take(FIRST)
    wait_for(lambda: held(agent.pool) == {"first": 2})
    yield agent
    agent.pool.close()


def place(agent: Agent, memory: int) -> Run:
    """A call that the agent has, with so many bytes for its sandbox."""
    assignment = Assignment(
        placement_id="p",
        call_id="c",
        payload=dump_call(os.getpid),
        function="getpid",
        python=PYTHON,
        modules=[],
        packages=[],
        memory=memory,
        max_memory=memory,
        gpu=False,
        gpu_memory=0,
        timeout=30.0,
        queue=0.0,
    )
    run = Run(assignment, time.monotonic(), memory, Stop())
    agent.runs[run.placement_id] = run
    return run


def test_the_pool_takes_nothing_from_what_a_worker_offers(agent: Agent) -> None:
    """Its report names the total for calls as if there were no pool."""
    assert agent.pool.memory > 0
    assert agent.status().memory_total == 8 * GIB - agent.runtime.overhead


def test_a_call_that_needs_the_pools_memory_gets_it(agent: Agent) -> None:
    """As many pooled sandboxes as it takes have ended when the call's own starts; it runs."""
    used = agent.pool.memory
    run = place(agent, (agent.memory_total or 0) - used * 3 // 4)

    result = agent.attempt(run, None, None, OutputSender(lambda _: None, 1000), lambda: True)

    assert result.outcome == "returned", result.problem
    assert held(agent.pool) == {"first": 1}
    run.stop.close()


def test_a_limit_that_grows_takes_the_pools_memory(agent: Agent) -> None:
    """Growth is refused only where other calls have the memory."""
    run = place(agent, GIB)
    total = agent.memory_total or 0

    assert agent.grow(run, total)
    assert held(agent.pool) == {}
    assert not agent.grow(run, total + 1)
    run.stop.close()


def test_a_withdrawn_checkpoint_leaves_it(pool: Pool) -> None:
    """Its sandboxes end at once, and no more are made."""
    pool.take(FIRST)
    wait_for(lambda: held(pool) == {"first": 2})

    pool.withdraw(FIRST)

    time.sleep(0.3)
    assert held(pool) == {}
    assert pool.take(FIRST) is None


def test_nothing_is_left_of_a_closed_one(runtime: Runtime, tmp_path: Path) -> None:
    """Its sandboxes' folders are gone."""
    pool = Pool(runtime, 1, 60.0)
    pool.offer(FIRST)
    pool.take(FIRST)
    wait_for(lambda: held(pool) == {"first": 1})
    [talk] = pool.ready[FIRST.key]

    pool.close()

    assert not talk.sandbox.folder.path.exists()


@given(
    st.dictionaries(st.tuples(st.just("g"), st.text("abc", min_size=1, max_size=2)), st.floats(0.1, 1e6), max_size=6),
    st.integers(0, 20),
)
def test_shares_follow_demand(asked: dict[tuple[str, str], float], size: int) -> None:
    """All of the pool is shared out, and who is asked for more often never has less."""
    shares = share_out(asked, size)

    assert sum(shares.values()) == (size if asked else 0)
    for one, often in asked.items():
        assert all(often <= asked[other] or shares[one] >= shares[other] for other in asked)
