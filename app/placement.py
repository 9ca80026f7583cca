"""Placement: a worker for a call, then the checkpoint its sandbox starts from, then the lease, in one transaction.

Ranking and filtering are `rank_workers` of placement.sql; scoring is app/scoring.py's. A call whose session has a sandbox
goes there instead, and nothing is chosen. Same state, same call: same placement. Calls that arrive together share the
transaction: scoring and all writing is one statement for all of them.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, RowMapping

from app.catalogue import find_active_catalogue, list_checkpoints, read_distributions
from app.database import Database
from app.rows import in_parts, write_rows
from app.scoring import (
    Choice,
    ScoreRequest,
    catalogue_for_worker,
    conflicting_distributions,
    held_checkpoints,
    score_calls,
)
from app.session import check_turn, expired, read_sessions, stop_waiting, wait_for_turns
from app.settings import RouterSettings
from app.sql import declared_parameters, statement
from readie.errors import (
    BadBudget,
    BadRequest,
    CheckpointConflict,
    NoCapacity,
    NoWorkers,
    ReadieError,
    SessionBusy,
    SessionConflict,
    UnknownCheckpoint,
)
from readie.flavor import Flavor
from readie.requirements import parse_requirement, split_requirements
from readie.units import ns_to_seconds
from readie.wire import CallPlaced, CallRequest, KeptPackage, Placement, SkippedPackage

PPM = 1_000_000

#: The reason of a placement in the sandbox that a session has.
SESSION = "session"

#: The lock of whoever chooses workers, or takes one away. One transaction of all routers has it at a time and sees what
#: was placed before: so no worker is overcommitted, and nobody has to choose again. Groups of calls share it.
PLACEMENTS = "placements"


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a call asks of a worker: the call's own words, with the budgets worked out, in bytes."""

    gpu: bool
    memory_bytes: int
    max_memory_bytes: int
    gpu_memory_bytes: int | None  # None on a GPU call: the worker's whole GPU memory
    max_gpu_memory_bytes: int | None
    modules: Sequence[str]
    packages: Sequence[str]
    checkpoint_id: str | None  # pinned
    cold: bool


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """Where a call is to go, and what it is to install there; to be written by the same transaction: a worker that has
    room for it, or, if it `continues`, the one that has its session's sandbox.
    """

    demand: Demand
    worker: RowMapping  # of rank_workers, or of sessions_asked_for
    continues: bool = False
    gpu_memory_bytes: int
    catalogue: RowMapping | None  # that prices calls on this worker; None: nothing is priced
    held: frozenset[str]  # the checkpoints of that catalogue which the worker offers
    skipped: list[SkippedPackage]
    kept: list[KeptPackage]

    @property
    def worker_id(self) -> str:
        return str(self.worker["worker_id"])


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a call's sandbox starts from on its worker, and what that should cost; `checkpoint_id` None: cold."""

    checkpoint_id: str | None = None
    cost_ns: int | None = None
    cold_cost_ns: int | None = None
    predicted_ready_ns: int | None = None
    reason: str
    items: Mapping[str, str] = field(default_factory=dict)  # module → what it stands for
    unmatched: Sequence[str] = ()


#: `choose_starts`, or what does that and something besides.
Chooser = Callable[[Connection, Sequence[Reserved]], list[Start]]


def read_demand(request: CallRequest, default_memory: int) -> Demand:
    """The demand of a request, by the rules of the budgets: a maximum alone is also the start.

    Raises `BadBudget` for a maximum below its start, `BadRequest` for a checkpoint together with `cold`,
    `BadRequirement` for a package that is not a requirement.
    """
    if request.checkpoint_id is not None and request.cold:
        raise BadRequest("checkpoint_id and cold=True exclude each other", "Give one of the two.")
    for package in request.packages:
        parse_requirement(package)
    memory, max_memory = _start_and_maximum("memory", request.memory, request.max_memory)
    gpu_memory, max_gpu_memory = _start_and_maximum("gpu_memory", request.gpu_memory, request.max_gpu_memory)
    return Demand(
        gpu=request.gpu or gpu_memory is not None,
        memory_bytes=memory or default_memory,
        max_memory_bytes=max_memory or default_memory,
        gpu_memory_bytes=gpu_memory,
        max_gpu_memory_bytes=max_gpu_memory,
        modules=request.modules,
        packages=request.packages,
        checkpoint_id=request.checkpoint_id,
        cold=request.cold,
    )


def _start_and_maximum(name: str, start: int | None, maximum: int | None) -> tuple[int | None, int | None]:
    if start is None:
        return maximum, maximum
    if maximum is None:
        return start, start
    if maximum < start:
        raise BadBudget(f"max_{name} {maximum} is below {name} {start}")
    return start, maximum


def place_call(
    connection: Connection, database: Database, settings: RouterSettings, request: CallRequest
) -> CallPlaced:
    """Places one new call. Raises what `place_calls` answers."""
    database.lock(connection, PLACEMENTS)
    (placed,) = place_calls(connection, settings, [request])
    if isinstance(placed, ReadieError):
        raise placed
    return placed


def place_calls(
    connection: Connection,
    settings: RouterSettings,
    requests: Sequence[CallRequest],
    call_ids: Sequence[str] | None = None,
    choose: Chooser | None = None,
) -> list[CallPlaced | ReadieError]:
    """Places new calls, one after the other: each as if those before it were placed already; the caller holds
    `PLACEMENTS`.

    Answers each with its placement, or with why there is none: what `read_demand`, `check_turn`, `continue_session` and
    `reserve` raise. Of that call nothing is written then, but for its place among those that wait for the same session,
    if it is to ask again; then it has to come with the same id.
    """
    call_ids = [uuid4().hex for _ in requests] if call_ids is None else call_ids
    named = dict.fromkeys(request.session_id for request in requests if request.session_id is not None)
    sessions = read_sessions(connection, named)
    begun: set[str | None] = set()  # the sessions that calls of these have now
    reserved: list[Reserved] = []
    refused: dict[int, ReadieError] = {}
    for number, (call_id, request) in enumerate(zip(call_ids, requests, strict=True)):
        session = None if request.session_id is None else sessions[request.session_id]
        try:
            demand = read_demand(request, int(settings.default_memory))
            if session is not None:
                check_turn(session, call_id, begun)
            if session is None or session["state"] is None:
                room = reserve(connection, settings, demand, reserved)
            else:
                room = continue_session(connection, settings, demand, session)
                _check_session(connection, session, request, room.kept)
        except ReadieError as error:
            refused[number] = error
        else:
            begun.add(request.session_id)
            reserved.append(room)
    starts = (choose or choose_starts)(connection, reserved)
    taken = [each for number, each in enumerate(zip(call_ids, requests, strict=True)) if number not in refused]
    rows = [
        {
            **_placement_row(call_id, 1, room, start, settings),
            "function": request.function,
            "python": request.python,
            "max_memory_bytes": room.demand.max_memory_bytes,
            "gpu_memory_bytes": room.demand.gpu_memory_bytes,
            "max_gpu_memory_bytes": room.demand.max_gpu_memory_bytes,
            "session_id": request.session_id,
            "pinned_checkpoint_id": room.demand.checkpoint_id,
            "cold": room.demand.cold,
            "retry": request.retry,
            "timeout_ms": ceil((settings.call_timeout if request.timeout is None else request.timeout) * 1000),
            "queue_ms": ceil(request.queue_timeout * 1000),
            "payload": request.payload,
        }
        for (call_id, request), room, start in zip(taken, reserved, starts, strict=True)
    ]
    write_rows(connection, "insert_calls", rows)
    for part in in_parts(rows, "payload"):
        write_rows(connection, "insert_payloads", part)
    modules: list[dict[str, Any]] = []
    packages: list[dict[str, Any]] = []
    placed: list[CallPlaced] = []
    for row, room, start in zip(rows, reserved, starts, strict=True):
        modules += _module_rows(row["call_id"], room.demand, start)
        packages += _package_rows(row["call_id"], room)
        placed.append(
            CallPlaced(
                call_id=row["call_id"],
                placement=placement_of(row),
                skipped=room.skipped,
                kept=room.kept,
                unmatched=list(start.unmatched),
            )
        )
    write_rows(connection, "insert_call_modules", modules)
    write_rows(connection, "insert_call_packages", packages)
    write_rows(connection, "insert_leases", rows)
    write_rows(connection, "bind_sessions", [row for row in rows if row["session_id"] and not row["continues"]])
    placements = iter(placed)
    answers = [refused[number] if number in refused else next(placements) for number in range(len(requests))]
    _keep_places(connection, sessions, zip(call_ids, requests, answers, strict=True))
    return answers


def _keep_places(
    connection: Connection,
    sessions: Mapping[str, RowMapping],
    answered: Iterable[tuple[str, CallRequest, CallPlaced | ReadieError]],
) -> None:
    """Those that will ask again for their turn in a session, or for room to begin it, keep their places; others go."""
    waiting: list[tuple[str, str]] = []
    through: list[str] = []
    for call_id, request, answer in answered:
        if request.session_id is None:
            continue
        for_room = isinstance(answer, NoCapacity | NoWorkers) and request.queue_timeout > 0
        if for_room or isinstance(answer, SessionBusy):
            waiting.append((call_id, request.session_id))
        elif sessions[request.session_id]["next_call_id"] is not None:
            through.append(call_id)
    wait_for_turns(connection, waiting)
    stop_waiting(connection, through)


def place_again(connection: Connection, settings: RouterSettings, call_id: str) -> Placement:
    """Gives a call, whose last lease has ended, its next placement; one in the sandbox of a session stays there. The
    caller holds `PLACEMENTS`.

    Raises as `reserve`, and `SessionExpired`.
    """
    call = connection.execute(statement("call_to_place"), {"call_id": call_id}).mappings().one()
    demand = Demand(
        gpu=call["gpu"],
        memory_bytes=call["memory_bytes"],
        max_memory_bytes=call["max_memory_bytes"],
        gpu_memory_bytes=call["gpu_memory_bytes"],
        max_gpu_memory_bytes=call["max_gpu_memory_bytes"],
        modules=connection.execute(statement("modules_of_call"), {"call_id": call_id}).scalars().all(),
        packages=connection.execute(statement("requirements_of_call"), {"call_id": call_id}).scalars().all(),
        checkpoint_id=call["pinned_checkpoint_id"],
        cold=call["cold"],
    )
    if call["continues"]:
        (session,) = read_sessions(connection, [call["session_id"]], ttl_s=settings.worker_ttl).values()
        if session["state"] != "idle":
            raise expired(session)
        room = continue_session(connection, settings, demand, session)
    else:
        room = reserve(connection, settings, demand, [])
    (start,) = choose_starts(connection, [room])
    row = _placement_row(call_id, call["attempts"] + 1, room, start, settings) | {"session_id": call["session_id"]}
    columns = {name: row[name] for name in declared_parameters("place_call_again")}
    connection.execute(statement("place_call_again"), columns)
    connection.execute(statement("delete_call_packages"), {"call_id": call_id})
    write_rows(connection, "insert_call_packages", _package_rows(call_id, room))
    write_rows(connection, "insert_leases", [row])
    if row["session_id"] and not room.continues:  # the sandbox that it may have had is lost: it begins anew
        write_rows(connection, "bind_sessions", [row])
    return placement_of(row)


def reserve(connection: Connection, settings: RouterSettings, demand: Demand, before: Sequence[Reserved]) -> Reserved:
    """Room on the best worker that can take the call now, after those `before` it; the caller holds `PLACEMENTS`.

    Raises `NoWorkers` and `NoCapacity` where no worker can take it, `UnknownCheckpoint` for a pinned checkpoint that
    the chosen worker's catalogue does not list, `CheckpointConflict` for one that holds what is to be installed anew.
    """
    asked = {
        "gpu": demand.gpu,
        "memory_bytes": demand.memory_bytes,
        "gpu_bytes": demand.gpu_memory_bytes,
        "headroom_ppm": round(settings.memory_headroom * PPM),
        "ttl_ms": round(settings.worker_ttl * 1000),
        "before_worker_ids": [room.worker_id for room in before],
        # what continues is in a sandbox that counts already
        "before_memory_bytes": [0 if room.continues else room.demand.memory_bytes for room in before],
        "before_gpu_memory_bytes": [0 if room.continues else room.gpu_memory_bytes for room in before],
        "before_sandboxes": [0 if room.continues else 1 for room in before],
    }
    worker = connection.execute(statement("rank_workers"), asked).mappings().first()
    if worker is None:
        raise NoWorkers("no worker is ready")
    if not worker["fits"]:
        raise _no_capacity(worker, demand)
    same = next((room for room in before if room.worker_id == worker["worker_id"] and not room.continues), None)
    if same is None:
        catalogue = catalogue_for_worker(connection, worker["worker_id"])
        held = held_checkpoints(connection, worker["worker_id"], catalogue["generation"]) if catalogue else frozenset()
    else:
        catalogue, held = same.catalogue, same.held
    skipped, kept = _split_packages(connection, settings, worker, demand, catalogue)
    if demand.checkpoint_id is not None:
        _check_pinned(connection, worker, demand.checkpoint_id, catalogue, kept)
    gpu_memory_bytes = demand.gpu_memory_bytes
    if demand.gpu and gpu_memory_bytes is None:
        gpu_memory_bytes = worker["gpu_total_bytes"]
    return Reserved(
        demand=demand,
        worker=worker,
        gpu_memory_bytes=gpu_memory_bytes or 0,
        catalogue=catalogue,
        held=held,
        skipped=skipped,
        kept=kept,
    )


def continue_session(connection: Connection, settings: RouterSettings, demand: Demand, session: RowMapping) -> Reserved:
    """The sandbox that a session (a row of `read_sessions`) has, for its next call, which gets what that has."""
    catalogue = catalogue_for_worker(connection, session["worker_id"]) if demand.packages else None
    skipped, kept = _split_packages(connection, settings, session, demand, catalogue)
    budgets = ("gpu", "memory_bytes", "max_memory_bytes", "gpu_memory_bytes", "max_gpu_memory_bytes")
    gpu_memory_bytes = session["gpu_memory_bytes"]
    if session["gpu"] and gpu_memory_bytes is None:
        gpu_memory_bytes = session["gpu_total_bytes"]
    return Reserved(
        demand=replace(demand, **{name: session[name] for name in budgets}),
        worker=session,
        continues=True,
        gpu_memory_bytes=gpu_memory_bytes or 0,
        catalogue=None,
        held=frozenset(),
        skipped=skipped,
        kept=kept,
    )


def _check_session(
    connection: Connection, session: RowMapping, request: CallRequest, kept: Sequence[KeptPackage]
) -> None:
    """Raises `SessionConflict` where a call asks for what the session's sandbox does not have.

    What a call leaves open is no demand: a budget that it does not name, how a sandbox is started.
    """
    memory = request.max_memory or request.memory
    gpu_memory = request.max_gpu_memory or request.gpu_memory
    most_gpu_memory = session["max_gpu_memory_bytes"] or session["gpu_total_bytes"]
    first, started_from = {"call_id": session["call_id"]}, session["checkpoint_id"]
    installed = connection.execute(statement("installed_for_call"), first).scalars().all() if kept else ()
    missing = [package.requirement for package in kept if package.requirement not in installed]
    reasons = {
        "it has no GPU": (request.gpu or gpu_memory) and not session["gpu"],
        f"its memory is {session['max_memory_bytes']} bytes at most, {memory} are asked for": (
            memory and memory > session["max_memory_bytes"]
        ),
        f"its GPU memory is {most_gpu_memory} bytes at most, {gpu_memory} are asked for": (
            session["gpu"] and gpu_memory and most_gpu_memory and gpu_memory > most_gpu_memory
        ),
        f"it was started from {started_from or 'no checkpoint'}, {request.checkpoint_id} is pinned": (
            request.checkpoint_id and request.checkpoint_id != started_from
        ),
        f"it was started from {started_from}, a cold start is asked for": (
            request.cold and started_from and session["started"] != "cold"
        ),
        f"its first call did not have {', '.join(missing)} installed": missing,
    }
    if any(reasons.values()):
        said = "; ".join(reason for reason, holds in reasons.items() if holds)
        raise SessionConflict(f"session {request.session_id}: {said}")


def _no_capacity(counts: RowMapping, demand: Demand) -> NoCapacity:
    if counts["other_flavor"] == counts["ready"]:
        return NoCapacity(
            f"a GPU call needs a gpu worker, and all {counts['ready']} ready workers are cpu workers",
            "Start a worker with WORKER_FLAVOR=gpu, or call without gpu, gpu_memory and max_gpu_memory.",
        )
    gpu_memory = "the whole GPU memory" if demand.gpu_memory_bytes is None else f"{demand.gpu_memory_bytes} bytes"
    reasons = {
        f"{counts['other_flavor']} have no GPU": counts["other_flavor"],
        f"{counts['short_of_memory']} have no {demand.memory_bytes} bytes of memory left": counts["short_of_memory"],
        f"{counts['short_of_gpu']} cannot give it {gpu_memory}": counts["short_of_gpu"],
        f"{counts['full']} have all their sandboxes in use": counts["full"],
    }
    return NoCapacity(f"of {counts['ready']} ready workers, " + ", ".join(text for text, n in reasons.items() if n))


def _check_pinned(
    connection: Connection,
    worker: RowMapping,
    checkpoint_id: str,
    catalogue: RowMapping | None,
    kept: Sequence[KeptPackage],
) -> None:
    if catalogue is None:
        raise UnknownCheckpoint(
            f"{checkpoint_id}: worker {worker['worker_id']} holds no generation of any {worker['flavor']} catalogue",
            "Pin none, or start the worker with the checkpoints of an imported catalogue.",
        )
    of = catalogue["catalogue_id"]
    listed = {row.checkpoint_id: row.ordinal for row in list_checkpoints(connection, of)}
    if checkpoint_id not in listed:
        named = ", ".join(listed) or "none"
        raise UnknownCheckpoint(f"{checkpoint_id}: the {worker['flavor']} catalogue lists {named}")
    anew = {name: each.requirement for each in kept for name in conflicting_distributions([each])}
    if not anew:
        return
    asked = {"requests": [0] * len(anew), "catalogue_ids": [of] * len(anew), "distributions": list(anew)}
    for row in connection.execute(statement("list_spoiled"), asked):
        if row.ordinal == listed[checkpoint_id]:
            raise CheckpointConflict(
                f"{checkpoint_id} has loaded modules of {row.distribution}, and {anew[row.distribution]} is to be "
                "installed: the loaded ones would win"
            )


def _split_packages(
    connection: Connection,
    settings: RouterSettings,
    worker: RowMapping,
    demand: Demand,
    catalogue: RowMapping | None,
) -> tuple[list[SkippedPackage], list[KeptPackage]]:
    if not demand.packages:
        return [], []
    names = {parse_requirement(package).name for package in demand.packages}
    # A worker that holds no generation has the root filesystem of its flavor all the same: the active catalogue's.
    active = None if catalogue else find_active_catalogue(connection, Flavor(worker["flavor"]))
    described: int | None = catalogue["catalogue_id"] if catalogue else active and active.catalogue_id
    distributions = {} if described is None else read_distributions(connection, described, names)
    return split_requirements(demand.packages, distributions, json.loads(worker["markers"]), settings.packages_policy)


def choose_starts(connection: Connection, reserved: Sequence[Reserved]) -> list[Start]:
    """What the sandbox of each starts from on its worker: the cheapest checkpoint that the worker holds, the pinned
    one, or nothing. All are scored together.
    """
    asked = [_score_request(room) for room in reserved]
    scored = [request for request in asked if request is not None]
    choices = iter(score_calls(connection, scored) if scored else ())
    return [
        _start(room, None if request is None else next(choices)) for room, request in zip(reserved, asked, strict=True)
    ]


def _score_request(room: Reserved) -> ScoreRequest | None:
    """None: nothing is to be scored."""
    if room.catalogue is None or room.demand.checkpoint_id is not None:
        return None
    return ScoreRequest(
        catalogue_id=room.catalogue["catalogue_id"],
        sha256=room.catalogue["sha256"],
        modules=room.demand.modules,
        held=room.held,
        kept_distributions=conflicting_distributions(room.kept),
        memory_bytes=room.demand.memory_bytes,
        base_bytes=room.worker["base_bytes"],
    )


def _start(room: Reserved, choice: Choice | None) -> Start:
    demand, catalogue = room.demand, room.catalogue
    if room.continues:
        return Start(reason=SESSION)
    if catalogue is None:
        reason = f"cold: worker {room.worker_id} holds no generation of a {room.worker['flavor']} catalogue"
        return Start(reason=reason, unmatched=demand.modules)
    if choice is None:
        return Start(checkpoint_id=demand.checkpoint_id, reason="pinned")
    checkpoint_id = None if demand.cold else choice.checkpoint_id
    cost_ns = choice.cold_cost_ns if demand.cold else choice.cost_ns
    if demand.cold:
        reason = "cold: asked for"
    elif checkpoint_id is None:
        reason = "cold: the cheapest start"
    else:
        reason = "the cheapest start"
    fixed_ns = catalogue["cold_fixed_ns"] if checkpoint_id is None else catalogue["restore_fixed_ns"]
    return Start(
        checkpoint_id=checkpoint_id,
        cost_ns=cost_ns,
        cold_cost_ns=choice.cold_cost_ns,
        predicted_ready_ns=cost_ns + fixed_ns,
        reason=reason,
        items=choice.items,
        unmatched=choice.unmatched,
    )


def _placement_row(
    call_id: str, attempt: int, room: Reserved, start: Start, settings: RouterSettings
) -> dict[str, Any]:
    """A placement as the columns of calls and of leases have it."""
    demand, catalogue = room.demand, room.catalogue
    return {
        "call_id": call_id,
        "placement_id": f"{call_id}-{attempt}",
        "worker_id": room.worker_id,
        "worker_flavor": room.worker["flavor"],
        "catalogue_id": None if catalogue is None else catalogue["catalogue_id"],
        "generation": None if catalogue is None else catalogue["generation"],
        "checkpoint_id": start.checkpoint_id,
        # its catalogue's own, which the tables compare with the worker's
        "checkpoint_flavor": None if catalogue is None or start.checkpoint_id is None else catalogue["flavor"],
        "cost_ns": start.cost_ns,
        "cold_cost_ns": start.cold_cost_ns,
        "predicted_ready_ns": start.predicted_ready_ns,
        "reason": start.reason,
        "continues": room.continues,
        "gpu": demand.gpu,
        "memory_bytes": demand.memory_bytes,
        "reserved_gpu_memory_bytes": room.gpu_memory_bytes,
        "accept_ms": round(settings.accept_timeout * 1000),
    }


def _module_rows(call_id: str, demand: Demand, start: Start) -> list[dict[str, Any]]:
    return [
        {"call_id": call_id, "position": position, "module": module, "item": start.items.get(module)}
        for position, module in enumerate(demand.modules)
    ]


def _package_rows(call_id: str, room: Reserved) -> list[dict[str, Any]]:
    packages: list[SkippedPackage | KeptPackage] = [*room.skipped, *room.kept]
    return [
        {
            "call_id": call_id,
            "position": position,
            "requirement": package.requirement,
            "skipped": isinstance(package, SkippedPackage),
            "installed": package.installed,
            "reason": package.reason,
        }
        for position, package in enumerate(packages)
    ]


def placement_of(columns: Mapping[str, Any] | RowMapping) -> Placement:
    """What clients see of a placement, from its columns of the table calls."""
    cost_ns, cold_cost_ns, ready_ns = (columns[name] for name in ("cost_ns", "cold_cost_ns", "predicted_ready_ns"))
    return Placement(
        placement_id=columns["placement_id"],
        worker_id=columns["worker_id"],
        flavor=Flavor(columns["worker_flavor"]),
        generation=columns["generation"],
        checkpoint_id=columns["checkpoint_id"],
        cost=None if cost_ns is None else ns_to_seconds(cost_ns),
        cold_cost=None if cold_cost_ns is None else ns_to_seconds(cold_cost_ns),
        predicted_ready=None if ready_ns is None else ns_to_seconds(ready_ns),
        reason=columns["reason"],
    )
