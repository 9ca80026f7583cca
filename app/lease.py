"""A placement after it was reserved: handed to its agent, accepted, printing, ended; and how its call ends.

A lease is ended by one `DELETE … RETURNING`: of a result, a cancellation and a sweep that meet, one finds it. What
arrives together is one transaction, and one statement of each kind.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Row

from app.database import Database, tell
from app.placement import PLACEMENTS
from app.rows import in_parts, write_rows
from app.session import leave_sessions
from app.sql import statement
from app.waiting import CAPACITY, call_topic, session_topic, worker_topic
from readie.errors import (
    PREFIX,
    CallCancelled,
    CallError,
    PlacementTaken,
    ReadieError,
    UnknownCall,
    UnknownPlacement,
    UnknownSession,
    UnknownWorker,
    problems,
)
from readie.units import NS_PER_SECOND
from readie.wire import MAX_SECONDS, Assignment, Orders, Output, Result, problem_of

#: Placements that one answer to an agent carries at most: their payloads are in it.
MOST_AT_ONCE = 8

#: What a start may take before the function runs (restore or cold start, installation, imports), where the agent does
#: not say.
START_SECONDS = 300.0

_STATES = {"returned": "finished", "raised": "finished", "failed": "failed", "cancelled": "cancelled"}


def call_of(placement_id: str) -> str:
    """The call of a placement: its id is the call's, a dash, and the count of placements."""
    return placement_id.rpartition("-")[0]


def find_orders(database: Database, worker_id: str) -> Orders:
    """What the agent of a worker has to do now. Raises `UnknownWorker`.

    It is read without a transaction: a placement does not change while it lasts, and one that ends meanwhile is not
    accepted any more.
    """
    with database.glancing() as connection:
        return read_orders(connection, worker_id)


def read_orders(connection: Connection, worker_id: str) -> Orders:
    """What the agent of a worker has to do now. Raises `UnknownWorker`."""
    asked: dict[str, Any] = {"worker_id": worker_id}
    news = connection.execute(statement("worker_news"), asked).first()
    if news is None:
        raise UnknownWorker(f"{worker_id} has not reported, or was not heard from for too long")
    # Each is asked for only if there may be some: most of the time there is nothing, or something to run.
    run = _read_assignments(connection, worker_id) if news.has_run else []
    cancel = connection.execute(statement("placements_to_cancel"), asked).scalars().all() if news.has_cancel else []
    over = connection.execute(statement("sessions_to_end"), asked).scalars().all() if news.keeps_sessions else []
    return Orders(run=run, cancel=list(cancel), end_sessions=list(over))


def _read_assignments(connection: Connection, worker_id: str) -> list[Assignment]:
    rows = connection.execute(statement("placements_to_run"), {"worker_id": worker_id, "at_most": MOST_AT_ONCE}).all()
    modules: dict[str, list[str]] = defaultdict(list)
    packages: dict[str, list[str]] = defaultdict(list)
    if rows:
        asked = {"call_ids": [row.call_id for row in rows]}
        for call_id, is_module, name, _ in connection.execute(statement("names_to_run"), asked):
            (modules if is_module else packages)[call_id].append(name)
    return [
        Assignment(
            placement_id=row.placement_id,
            call_id=row.call_id,
            payload=row.payload,
            function=row.function,
            python=row.python,
            modules=modules[row.call_id],
            packages=[] if row.continues else packages[row.call_id],  # its first call had them installed
            memory=row.memory_bytes,
            max_memory=row.max_memory_bytes,
            gpu=row.gpu,
            gpu_memory=row.gpu_memory_bytes,
            timeout=row.timeout_ms / 1000,
            queue=row.queue,
            generation=row.generation,
            checkpoint_id=row.checkpoint_id,
            session_id=row.session_id,
            continues=row.continues,
        )
        for row in rows
    ]


class Taker(NamedTuple):
    """Who runs a placement: the worker, and which agent speaks for it (None: not known); what a start may take there."""

    placement_id: str
    worker_id: str
    incarnation: str | None = None
    start_s: float = START_SECONDS


def accept_placements(
    connection: Connection, takers: Sequence[Taker]
) -> list[UnknownPlacement | PlacementTaken | None]:
    """The agents of these workers run these placements; to say so twice is fine.

    Answers with `UnknownPlacement` where it has ended, with `PlacementTaken` where it is another worker's, or another
    agent speaks for that.
    """
    placement_ids = [taker.placement_id for taker in takers]
    asked = {
        "placement_ids": placement_ids,
        "worker_ids": [taker.worker_id for taker in takers],
        "incarnations": [taker.incarnation for taker in takers],
        "start_ms": [round(taker.start_s * 1000) for taker in takers],
    }
    rows = connection.execute(statement("accept_leases"), asked).all()
    if rows:
        connection.execute(statement("accept_calls"), {"call_ids": [row.call_id for row in rows]})
    begun = [row.placement_id for row in rows if row.session_id is not None]
    if begun:
        connection.execute(statement("start_sessions"), {"placement_ids": begun})
    holders = {row.placement_id: row for row in rows}
    if len(holders) < len(takers):
        others = connection.execute(statement("holders_of_placements"), {"placement_ids": placement_ids})
        holders |= {row.placement_id: row for row in others}
    return [_why_not_accepted(holders.get(taker.placement_id), taker) for taker in takers]


def _why_not_accepted(holder: Row[Any] | None, taker: Taker) -> UnknownPlacement | PlacementTaken | None:
    placement_id, worker_id, incarnation, _ = taker
    if holder is None:
        return UnknownPlacement(f"{placement_id} has ended, or there never was one")
    if holder.worker_id != worker_id:
        return PlacementTaken(f"{placement_id} is worker {holder.worker_id}'s, not {worker_id}'s")
    if holder.incarnation is None or incarnation not in {None, holder.incarnation}:
        return PlacementTaken(f"{placement_id}: another agent speaks for worker {worker_id}")
    return None


def add_output(connection: Connection, placement_id: str, output: Output) -> str:
    """Keeps a piece of what a call printed, once; gives the call's id. Raises `UnknownPlacement` when it has ended."""
    named = {"placement_ids": [placement_id]}
    lease = connection.execute(statement("holders_of_placements"), named).first()
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


def end_placements(connection: Connection, results: Sequence[tuple[str, Result]]) -> list[list[str] | UnknownPlacement]:
    """The results of placements end their leases and their calls; of several for one placement the first counts.

    Answers each with the topics of who waits for that, none where the end was known already, and with `UnknownPlacement`
    where the call went on without it.
    """
    placement_ids = list(dict.fromkeys(placement_id for placement_id, _ in results))
    first = dict(reversed(results))  # of several
    named = {"placement_ids": placement_ids}
    ordered = connection.execute(statement("delete_cancellations"), named).all()
    ended = connection.execute(statement("end_leases"), named).all()
    leave_sessions(connection, [(lease, first[lease.placement_id]) for lease in ended])
    if ordered or ended:
        gone = dict.fromkeys((row.worker_id, row.placement_id) for row in [*ordered, *ended])
        worker_ids, sandboxes_of = map(list, zip(*gone, strict=True))
        pairs = {"worker_ids": worker_ids, "placement_ids": sandboxes_of}
        connection.execute(statement("delete_sandboxes_of_placements"), pairs)
    finish_calls(connection, {lease.call_id: first[lease.placement_id] for lease in ended})
    topics = {row.placement_id: _session_topics(row) for row in ordered}
    topics |= {lease.placement_id: [call_topic(lease.call_id), CAPACITY, *_session_topics(lease)] for lease in ended}
    known = set(topics)
    rest = [placement_id for placement_id in placement_ids if placement_id not in known]
    if rest:
        latest = connection.execute(statement("latest_placements"), {"call_ids": [call_of(each) for each in rest]})
        known |= set(latest.scalars())
    return [
        topics.pop(placement_id, [])  # once
        if placement_id in known
        else UnknownPlacement(f"{placement_id} has ended, or there never was one")
        for placement_id, _ in results
    ]


def _session_topics(row: Row[Any]) -> list[str]:
    return [] if row.session_id is None else [session_topic(row.session_id)]


def finish_calls(connection: Connection, results: Mapping[str, Result]) -> None:
    """Writes down how calls ended; their leases have ended before, in this transaction."""
    rows = [
        {
            "call_id": call_id,
            "state": _STATES[result.outcome],
            "outcome": _outcome(result),
            "started": None if result.started is None else result.started.how,
            "measured_ready_ns": _measured_ready_ns(result),
            "result": msgspec.msgpack.encode(result),
        }
        for call_id, result in results.items()
    ]
    tell(connection, write_rows(connection, "finish_calls", rows))
    for part in in_parts(rows, "result"):
        write_rows(connection, "insert_results", part)


def _outcome(result: Result) -> str:
    if result.outcome != "failed" or result.problem is None:
        return result.outcome
    slug = result.problem.type.removeprefix(PREFIX)
    return slug if slug in problems() else CallError.slug  # an agent may report whatever it likes


def _measured_ready_ns(result: Result) -> int | None:
    if result.started is None or not 0 <= result.phases.ready <= MAX_SECONDS:
        return None
    return round(result.phases.ready * NS_PER_SECOND)


def fail_call(connection: Connection, call_id: str, error: ReadieError) -> None:
    """Writes down that a call has no result, and why; its lease has ended before, in this transaction."""
    finish_calls(connection, {call_id: Result(outcome="failed", problem=problem_of(error))})


def stop_placement(connection: Connection, lease: Row[Any]) -> None:
    """Orders the agent to end a placement that it accepted, and whose lease (a row of `end_lease`) has just ended."""
    connection.execute(
        statement("insert_unreported_sandbox"),
        {
            "worker_id": lease.worker_id,
            "placement_id": lease.placement_id,
            "session_id": lease.session_id,
            "memory_bytes": lease.memory_bytes,
            "gpu_memory_bytes": lease.gpu_memory_bytes,
        },
    )
    connection.execute(
        statement("insert_cancellation"),
        {"placement_id": lease.placement_id, "worker_id": lease.worker_id, "session_id": lease.session_id},
    )


def cancel_call(connection: Connection, call_id: str) -> list[str]:
    """Ends a call at once; gives the topics of who waits for that. None: it had ended before, and stays as it is.

    Raises `UnknownCall`.
    """
    lease = connection.execute(statement("end_lease_of_call"), {"call_id": call_id}).first()
    if lease is None:
        if connection.execute(statement("call_status"), {"call_id": call_id}).first() is None:
            raise UnknownCall(f"{call_id} was never placed")
        return []
    return _cancel(connection, lease, f"{call_id} was cancelled")


def end_session(connection: Connection, database: Database, session_id: str) -> list[str]:
    """Ends a session, and the call that it has; gives the topics of who waits for that. None: it was over before.

    Its worker is ordered to end the sandbox until it reports none. Raises `UnknownSession`.
    """
    database.lock(connection, PLACEMENTS)  # nothing is placed in it meanwhile
    named = {"session_id": session_id}
    lease = connection.execute(statement("end_lease_of_session"), named).first()
    session = connection.execute(statement("expire_session"), named).first()
    if session is None:
        if connection.execute(statement("session_of"), named).first() is None:
            raise UnknownSession(f"{session_id} was never begun, or it was over more than a day ago")
        return []
    topics = [worker_topic(session.worker_id), session_topic(session_id)]
    if lease is not None:
        topics += _cancel(connection, lease, f"{lease.call_id} was cancelled: session {session_id} was ended")
    return topics


def _cancel(connection: Connection, lease: Row[Any], why: str) -> list[str]:
    """Ends the call of a lease that has just ended; gives the topics of who waits for that."""
    if lease.accepted:
        stop_placement(connection, lease)
    finish_calls(connection, {lease.call_id: Result(outcome="cancelled", problem=problem_of(CallCancelled(why)))})
    leave_sessions(connection, [(lease, None)])
    return [worker_topic(lease.worker_id), call_topic(lease.call_id), CAPACITY, *_session_topics(lease)]
