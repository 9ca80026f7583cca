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
from tests.sandboxes import dump_call, make_rootfs, make_sealed_rootfs, needs_runsc, wait_for
from worker.host import open_runtime
from worker.pool import Pool, share_out
from worker.runsc import Options
from worker.runtime import Call, Runtime, Stop, Talk, Ties, run_in

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

    def refuse(size: int) -> bool:
        asked.append(size)
        return False

    pool = Pool(runtime, 1, 60.0, has_room=refuse)
    pool.offer(FIRST)
    pool.take(FIRST)

    wait_for(lambda: asked)
    assert held(pool) == {}
    pool.close()


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
