"""A placement after it was reserved: handed to its agent, accepted, printing, ended; and how its call ends.

A lease is ended by one `DELETE … RETURNING`: of a result, a cancellation and a sweep that meet, one finds it.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
from sqlalchemy import Connection, Row

from app.sql import statement
from readie.errors import (
    PREFIX,
    CallCancelled,
    CallError,
    PlacementTaken,
    ReadieError,
    UnknownCall,
    UnknownPlacement,
    UnknownWorker,
    problems,
)
from readie.units import NS_PER_SECOND
from readie.wire import MAX_SECONDS, Assignment, Orders, Output, Result, problem_of

#: Placements that one answer to an agent carries at most: their payloads are in it.
MOST_AT_ONCE = 8

#: What a start may take before the function runs: restore or cold start, installation, imports.
START_SECONDS = 300.0

_STATES = {"returned": "finished", "raised": "finished", "failed": "failed", "cancelled": "cancelled"}


def call_of(placement_id: str) -> str:
    """The call of a placement: its id is the call's, a dash, and the count of placements."""
    return placement_id.rpartition("-")[0]


def read_orders(connection: Connection, worker_id: str) -> Orders:
    """What the agent of a worker has to do now. Raises `UnknownWorker`."""
    if connection.execute(statement("worker_state"), {"worker_id": worker_id}).first() is None:
        raise UnknownWorker(f"{worker_id} has not reported, or was not heard from for too long")
    rows = connection.execute(statement("placements_to_run"), {"worker_id": worker_id, "at_most": MOST_AT_ONCE}).all()
    modules: dict[str, list[str]] = {}
    packages: dict[str, list[str]] = {}
    if rows:
        call_ids = {"call_ids": [row.call_id for row in rows]}
        modules = _lists(connection.execute(statement("modules_to_run"), call_ids))
        packages = _lists(connection.execute(statement("packages_to_install"), call_ids))
    cancel = connection.execute(statement("placements_to_cancel"), {"worker_id": worker_id}).scalars().all()
    run = [
        Assignment(
            placement_id=row.placement_id,
            call_id=row.call_id,
            payload=row.payload,
            function=row.function,
            python=row.python,
            modules=modules.get(row.call_id, []),
            packages=packages.get(row.call_id, []),
            memory=row.memory_bytes,
            max_memory=row.max_memory_bytes,
            gpu=row.gpu,
            gpu_memory=row.gpu_memory_bytes,
            timeout=row.timeout_ms / 1000,
            queue=row.queue,
            generation=row.generation,
            checkpoint_id=row.checkpoint_id,
            session_id=row.session_id,
        )
        for row in rows
    ]
    return Orders(run=run, cancel=list(cancel))


def _lists(rows: Iterable[Any]) -> dict[str, list[str]]:
    lists: dict[str, list[str]] = defaultdict(list)
    for call_id, value in rows:
        lists[call_id].append(value)
    return lists


def accept_placement(connection: Connection, placement_id: str, worker_id: str) -> None:
    """The agent of this worker runs the placement; to say so twice is fine.

    Raises `UnknownPlacement` when it has ended, `PlacementTaken` when it is another worker's.
    """
    accepted = connection.execute(
        statement("accept_lease"),
        {"placement_id": placement_id, "worker_id": worker_id, "start_ms": round(START_SECONDS * 1000)},
    ).first()
    if accepted is not None:
        connection.execute(statement("accept_call"), {"call_id": accepted.call_id})
        return
    lease = connection.execute(statement("lease_of_placement"), {"placement_id": placement_id}).first()
    if lease is None:
        raise UnknownPlacement(f"{placement_id} has ended, or there never was one")
    if lease.worker_id != worker_id:
        raise PlacementTaken(f"{placement_id} is worker {lease.worker_id}'s, not {worker_id}'s")


def add_output(connection: Connection, placement_id: str, output: Output) -> str:
    """Keeps a piece of what a call printed, once; gives the call's id. Raises `UnknownPlacement` when it has ended."""
    lease = connection.execute(statement("lease_of_placement"), {"placement_id": placement_id}).first()
    if lease is None:
        raise UnknownPlacement(f"{placement_id} has ended, or there never was one")
    connection.execute(
        statement("insert_output"),
        {
            "call_id": lease.call_id,
            "placement_id": placement_id,
            "sequence": output.sequence,
            "stream": output.stream,
            "text": output.text.replace("\0", "\ufffd"),  # programs print NUL, PostgreSQL has no such text
        },
    )
    return str(lease.call_id)


def end_placement(connection: Connection, placement_id: str, result: Result) -> str | None:
    """A placement's result ends its lease and its call; gives the call's id. None: that was known already.

    Raises `UnknownPlacement` when the call went on without it.
    """
    ordered = connection.execute(statement("delete_cancellation"), {"placement_id": placement_id}).first()
    if ordered is not None:
        _delete_sandbox(connection, ordered.worker_id, placement_id)
    lease = connection.execute(statement("end_lease"), {"placement_id": placement_id, "accepted": None}).first()
    if lease is not None:
        _delete_sandbox(connection, lease.worker_id, placement_id)
        finish_call(connection, lease.call_id, result)
        return str(lease.call_id)
    call = connection.execute(statement("call_status"), {"call_id": call_of(placement_id)}).first()
    if ordered is None and (call is None or call.placement_id != placement_id):
        raise UnknownPlacement(f"{placement_id} has ended, or there never was one")
    return None


def _delete_sandbox(connection: Connection, worker_id: str, placement_id: str) -> None:
    connection.execute(statement("delete_sandbox_of_placement"), {"worker_id": worker_id, "placement_id": placement_id})


def finish_call(connection: Connection, call_id: str, result: Result) -> None:
    """Writes down how a call ended; its lease has ended before, in this transaction."""
    outcome: str = result.outcome
    if outcome == "failed" and result.problem is not None:
        slug = result.problem.type.removeprefix(PREFIX)
        outcome = slug if slug in problems() else CallError.slug  # an agent may report whatever it likes
    connection.execute(
        statement("finish_call"),
        {
            "call_id": call_id,
            "state": _STATES[result.outcome],
            "outcome": outcome,
            "started": None if result.started is None else result.started.how,
            "measured_ready_ns": _measured_ready_ns(result),
        },
    )
    connection.execute(statement("insert_result"), {"call_id": call_id, "result": msgspec.msgpack.encode(result)})


def _measured_ready_ns(result: Result) -> int | None:
    if result.started is None or not 0 <= result.phases.ready <= MAX_SECONDS:
        return None
    return round(result.phases.ready * NS_PER_SECOND)


def fail_call(connection: Connection, call_id: str, error: ReadieError) -> None:
    """Writes down that a call has no result, and why; its lease has ended before, in this transaction."""
    finish_call(connection, call_id, Result(outcome="failed", problem=problem_of(error)))


def stop_placement(connection: Connection, lease: Row[Any]) -> None:
    """Orders the agent to end a placement that it accepted, and whose lease (a row of `end_lease`) has just ended."""
    connection.execute(
        statement("insert_unreported_sandbox"),
        {
            "worker_id": lease.worker_id,
            "placement_id": lease.placement_id,
            "memory_bytes": lease.memory_bytes,
            "gpu_memory_bytes": lease.gpu_memory_bytes,
        },
    )
    connection.execute(
        statement("insert_cancellation"), {"placement_id": lease.placement_id, "worker_id": lease.worker_id}
    )


def cancel_call(connection: Connection, call_id: str) -> str | None:
    """Ends a call at once; gives the worker that it was on. None: it had ended before, and stays as it is.

    Raises `UnknownCall`.
    """
    lease = connection.execute(statement("end_lease_of_call"), {"call_id": call_id}).first()
    if lease is None:
        if connection.execute(statement("call_status"), {"call_id": call_id}).first() is None:
            raise UnknownCall(f"{call_id} was never placed")
        return None
    if lease.accepted:
        stop_placement(connection, lease)
    cancelled = Result(outcome="cancelled", problem=problem_of(CallCancelled(f"{call_id} was cancelled")))
    finish_call(connection, call_id, cancelled)
    return str(lease.worker_id)
