"""Workers: what they report, and what becomes of leases and workers whose time is over.

The database's clock decides. Of several routers one sweeps at a time. Each lease is ended in a transaction of its own, by
one statement that a result or a cancellation may win.
"""

import json
import time
from collections import deque
from typing import Any

import structlog
from sqlalchemy import Connection, Row

from app.audit import KEPT_DAYS
from app.clock import set_times_back
from app.database import Database
from app.lease import fail_call, stop_placement
from app.placement import PLACEMENTS, place_again
from app.session import EXPIRED_SECONDS, STALE_SECONDS, expire_sessions, leave_sessions, unreported_sessions
from app.settings import RouterSettings
from app.sql import statement
from app.waiting import CAPACITY, call_topic, session_topic, worker_topic
from readie.errors import (
    BadRequest,
    CallTimeout,
    DatabaseUnavailable,
    NoCapacity,
    NoWorkers,
    PlacementError,
    ReadieError,
    WorkerLost,
)
from readie.flavor import Flavor
from readie.units import MAX_BYTES, NS_PER_SECOND
from readie.wire import WorkerStatus

#: Seconds after which another router may sweep, too: the one that does stalls.
LONGEST_SWEEP = 60.0

#: A call is placed this often at most before it fails, when no worker accepts it in time.
MOST_PLACEMENTS = 3

#: The same of one that may run twice and whose workers are lost: it may be what they die of.
MOST_RUNS = 5

#: Payloads and results are kept this long after the result was read, and this long after the call's end at most.
READ_SECONDS, UNREAD_SECONDS = 3600, 86_400

#: A database that takes this long to answer a sweep has stood still.
STALLED_SECONDS = 5.0

#: The key of a call is remembered this long: a client that sends the call again later has given it up before.
KEY_SECONDS = 86_400

#: An agent that has not reported a placement's sandbox for this long after the order to end it does not know it.
SETTLE_SECONDS = 10

#: The lock of the router that sweeps, or prunes.
SWEEP = "sweep"

log = structlog.get_logger(__name__)


def report_status(connection: Connection, worker_id: str, status: WorkerStatus) -> list[str]:
    """Replaces all that is known of a worker by what it reports; gives the topics of who waits for that.

    None: a later report of the same agent came before, and this one says nothing new. Sessions whose sandboxes are not
    reported any more are for `expire_unreported` to expire. Raises `BadRequest` for a sandbox, a placement or a session listed twice, and for GPU memory of a cpu worker.
    """
    if status.flavor is Flavor.CPU and status.gpu_total is not None:
        raise BadRequest(f"gpu_total {status.gpu_total}: the flavor is cpu", "Leave it out, or report flavor gpu.")
    placements = [sandbox.placement_id for sandbox in status.sandboxes if sandbox.placement_id is not None]
    sessions = [sandbox.session_id for sandbox in status.sandboxes if sandbox.session_id is not None]
    if any(len(set(ids)) < len(ids) for ids in ([each.sandbox_id for each in status.sandboxes], placements, sessions)):
        raise BadRequest("sandboxes: a sandbox_id, a placement_id or a session_id is listed twice")
    worker = {"worker_id": worker_id}
    kept = [sandbox for sandbox in status.sandboxes if sandbox.placement_id is None]
    # A placement meanwhile sees the worker as it was or as it will be: it ranks by one statement, of one state.
    heard = connection.execute(
        statement("upsert_worker"),
        {
            **worker,
            "flavor": status.flavor.value,
            "state": status.state,
            "runtime": status.runtime,
            "python": status.python,
            "markers": json.dumps(status.markers, sort_keys=True),
            "memory_total_bytes": status.memory_total,
            "gpu_total_bytes": status.gpu_total,
            "max_sandboxes": status.max_sandboxes,
            "base_bytes": status.base_memory,
            "incarnation": status.incarnation,
            "report": status.report,
            "kept_memory_bytes": min(MAX_BYTES, sum(sandbox.memory for sandbox in kept)),
            "kept_gpu_memory_bytes": min(MAX_BYTES, sum(sandbox.gpu_memory for sandbox in kept)),
            "kept_sandboxes": len(kept),
        },
    ).first()
    if heard is None:
        return []
    # Before the sandboxes, as in end_placements: in the same order no two transactions wait for one another.
    connection.execute(
        statement("delete_done_cancellations"),
        {**worker, "placement_ids": placements, "settle_ms": SETTLE_SECONDS * 1000},
    )
    _forget_worker(connection, worker_id, reported_sessions=sessions)
    held = {generation.generation: generation for generation in status.generations}
    if held:
        connection.execute(
            statement("insert_worker_generations"),
            {
                **worker,
                "generations": list(held),
                "restore_fixed_ns": [round(g.restore_fixed * NS_PER_SECOND) for g in held.values()],
                "cold_fixed_ns": [round(g.cold_fixed * NS_PER_SECOND) for g in held.values()],
            },
        )
    offered = [
        (g.generation, checkpoint_id) for g in held.values() for checkpoint_id in dict.fromkeys(g.checkpoint_ids)
    ]
    if offered:
        generations, checkpoint_ids = zip(*offered, strict=True)
        connection.execute(
            statement("insert_worker_checkpoints"),
            {**worker, "generations": list(generations), "checkpoint_ids": list(checkpoint_ids)},
        )
    if status.sandboxes:
        connection.execute(
            statement("insert_sandboxes"),
            {
                **worker,
                "sandbox_ids": [sandbox.sandbox_id for sandbox in status.sandboxes],
                "placement_ids": [sandbox.placement_id for sandbox in status.sandboxes],
                "session_ids": [sandbox.session_id for sandbox in status.sandboxes],
                "memory_bytes": [sandbox.memory for sandbox in status.sandboxes],
                "gpu_memory_bytes": [sandbox.gpu_memory for sandbox in status.sandboxes],
            },
        )
    if sessions:
        connection.execute(statement("settle_sessions"), {**worker, "session_ids": sessions})
    return [worker_topic(worker_id), CAPACITY]


def expire_unreported(database: Database, worker_id: str) -> list[str]:
    """Expires the sessions of a worker whose sandboxes it reports no more; gives the topics of who waits for that.

    In a transaction of its own, after the report's: whoever has rows of workers must not wait for `PLACEMENTS`.
    """
    with database.reading() as connection:
        unreported = unreported_sessions(connection, worker_id)
    if not unreported:
        return []
    with database.transaction() as connection:
        database.lock(connection, PLACEMENTS)
        return [session_topic(session_id) for session_id in expire_sessions(connection, unreported)]


def _forget_worker(connection: Connection, worker_id: str, reported_sessions: list[str]) -> None:
    """Forgets what a worker holds, offers and runs, but for a session's sandbox that is too new for its report."""
    worker = {"worker_id": worker_id}
    connection.execute(statement("delete_worker_generations"), worker)
    connection.execute(statement("delete_worker_checkpoints"), worker)
    connection.execute(statement("delete_sandboxes"), {**worker, "session_ids": reported_sessions})
    connection.execute(statement("keep_no_more"), worker)


def sweep(database: Database, settings: RouterSettings, *, heard: bool = True) -> list[str]:
    """Ends the leases whose time is over, then evicts silent workers; gives the topics of who waits for that.

    `heard` false: workers could not be heard for long enough yet, so that none is silent and nothing is late. Does
    nothing while another router sweeps.
    """
    asked_at = time.monotonic()
    with database.reading() as guard:  # held until this one is through; what it does is in other transactions
        if not database.try_lock(guard, SWEEP):
            return []
        database.let_pause(guard, LONGEST_SWEEP)
        set_times_back(database)
        return _sweep(database, settings, asked_at, guard) if heard else []


def _sweep(database: Database, settings: RouterSettings, asked_at: float, guard: Connection) -> list[str]:
    topics: list[str] = []
    ttl = {"ttl_ms": round(settings.worker_ttl * 1000)}
    with database.reading() as connection:
        due = connection.execute(statement("due_leases"), ttl).all()
    took = time.monotonic() - asked_at
    if took > STALLED_SECONDS:  # no report came through either
        raise DatabaseUnavailable(f"it took {took:.0f} seconds to say which workers are silent")
    for lease in due:
        guard.exec_driver_sql("SELECT 1")  # it does something: this sweep does not stall
        try:
            with database.transaction() as connection:
                topics += end_due_lease(connection, database, settings, lease)
        except _WaitsForRoom as waits:
            log.debug("call waits for room", placement_id=lease.placement_id, cause=lease.cause, reason=str(waits))
        except DatabaseUnavailable:
            raise
        except Exception:  # one that cannot be ended must not keep the others waiting
            log.exception("lease cannot be ended", placement_id=lease.placement_id)
    with database.reading() as connection:
        silent = connection.execute(statement("silent_workers"), ttl).scalars().all()
    for worker_id in silent:
        guard.exec_driver_sql("SELECT 1")
        try:
            with database.transaction() as connection:
                database.lock(connection, PLACEMENTS)  # nothing is placed on it meanwhile
                evicted = evict_worker(connection, worker_id, settings)
        except DatabaseUnavailable:
            raise
        except Exception:
            log.exception("worker cannot be evicted", worker_id=worker_id)
        else:
            if evicted:
                log.warning("worker evicted", worker_id=worker_id, ttl_s=settings.worker_ttl)
                topics.append(worker_topic(worker_id))
    return topics


class _WaitsForRoom(Exception):
    """A call cannot be placed again yet, and has time to wait: nothing is to change, and the next sweep tries again."""


def end_due_lease(connection: Connection, database: Database, settings: RouterSettings, due: Row[Any]) -> list[str]:
    """Ends a row of `due_leases`. A call that has not run, or that may run twice, is placed again; any other fails.

    Gives the topics of who waits for that; none when somebody else has ended it. Raises `_WaitsForRoom`.
    """
    database.lock(connection, PLACEMENTS)  # before the lease: whoever ends a session takes them in this order
    lease = connection.execute(
        statement("end_lease"), {"placement_id": due.placement_id, "accepted": due.accepted}
    ).first()
    if lease is None:
        return []
    topics = [call_topic(lease.call_id), worker_topic(lease.worker_id), CAPACITY]
    if lease.session_id is not None:
        topics.append(session_topic(lease.session_id))
    if lease.accepted:
        stop_placement(connection, lease)
    call = connection.execute(statement("call_to_place"), {"call_id": lease.call_id}).one()
    error = _reason_to_fail(due.cause, lease, call)
    if error is None:
        try:
            placement = place_again(connection, settings, lease.call_id)
        except ReadieError as refused:
            if due.may_wait and isinstance(refused, NoCapacity | NoWorkers):
                raise _WaitsForRoom(refused.detail) from refused
            lost = f"worker {lease.worker_id} was lost, and the call cannot be placed again: {refused.detail}"
            error = WorkerLost(lost) if lease.accepted else refused
        else:
            log.info("call placed again", call_id=lease.call_id, cause=due.cause, worker_id=placement.worker_id)
            return [*topics, worker_topic(placement.worker_id)]
    log.warning("call failed", call_id=lease.call_id, cause=due.cause, problem=error.slug)
    fail_call(connection, lease.call_id, error)
    leave_sessions(connection, [(lease, None)])
    return topics


def _reason_to_fail(cause: str, lease: Row[Any], call: Row[Any]) -> ReadieError | None:
    """Why the call of an ended lease fails; None: it is placed again."""
    if not lease.accepted:
        if call.attempts < (MOST_RUNS if call.retry else MOST_PLACEMENTS):
            return None
        return PlacementError(
            f"no worker accepted the call: it was placed {call.attempts} times, last on {lease.worker_id}",
            ("" if call.retry else "Nothing ran. ")
            + "See whether the agents of the workers still fetch their placements.",
        )
    if cause == "deadline":
        return CallTimeout(f"worker {lease.worker_id} sent no result in time")
    how = {"silent": "was not heard from in time", "restarted": "was restarted"}[cause]
    if not call.retry or call.continues:  # the sandbox that it needs is lost
        return WorkerLost(f"worker {lease.worker_id} {how}")
    if call.attempts < MOST_RUNS:
        return None
    return WorkerLost(
        f"worker {lease.worker_id} {how}; the call was placed {call.attempts} times",
        "See in the workers' logs whether it is the function that ends them.",
    )


def evict_worker(connection: Connection, worker_id: str, settings: RouterSettings) -> bool:
    """Forgets a worker and all that it reported, and expires its sessions; says whether it did: not if it was heard from
    or got a call meanwhile.
    """
    worker = {"worker_id": worker_id}
    evicted = connection.execute(
        statement("evict_worker"), {**worker, "ttl_ms": round(settings.worker_ttl * 1000)}
    ).first()
    if evicted is None:
        return False
    expire_sessions(connection, unreported_sessions(connection, worker_id))
    _forget_worker(connection, worker_id, reported_sessions=[])
    return True


def mark_read(database: Database, call_ids: deque[str]) -> None:
    """Writes down that the ends of calls were read, and takes them from the list: from then on their results need not be
    kept for long.
    """
    read = sorted({call_ids.popleft() for _ in range(len(call_ids))})
    if not read:
        return
    try:
        with database.transaction() as connection:
            connection.execute(statement("mark_read"), {"call_ids": read})
    except BaseException:
        call_ids.extend(read)  # another time
        raise


def prune(database: Database, settings: RouterSettings) -> None:
    """Drops payloads, results, output and calls that are past their time, orders that nobody came for, and what was
    remembered of calls' keys, of expired sessions and of administrative requests.

    Does nothing while another router sweeps or prunes.
    """
    keep = {"read_ms": READ_SECONDS * 1000, "unread_ms": UNREAD_SECONDS * 1000}
    with database.transaction() as connection:
        if not database.try_lock(connection, SWEEP):
            return
        for name in ("delete_old_payloads", "delete_old_results", "delete_old_output"):
            connection.execute(statement(name), keep)
        connection.execute(statement("delete_old_cancellations"), {"unread_ms": keep["unread_ms"]})
        ended = {"kept_s": settings.calls_kept_days * 86_400}
        for name in ("delete_old_call_modules", "delete_old_call_packages", "delete_old_calls"):
            connection.execute(statement(name), ended)
        connection.execute(statement("delete_old_call_keys"), {"kept_s": KEY_SECONDS})
        connection.execute(statement("delete_old_audit"), {"kept_days": KEPT_DAYS})
    with database.transaction() as connection:
        database.lock(connection, PLACEMENTS)
        expire_sessions(connection, unreported_sessions(connection))
        connection.execute(statement("delete_old_sessions"), {"expired_ms": EXPIRED_SECONDS * 1000})
        connection.execute(statement("delete_old_session_waits"), {"stale_ms": STALE_SECONDS * 1000})
