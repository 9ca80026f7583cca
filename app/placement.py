"""Placement: a worker for a call, then the checkpoint its sandbox starts from, then the lease, in one transaction.

Ranking and filtering are `rank_workers` of placement.sql; scoring is app/scoring.py's. Same state, same call: same
placement.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, RowMapping

from app.catalogue import find_active_catalogue, list_checkpoints, read_distributions
from app.database import Database
from app.scoring import ScoreRequest, catalogue_for_worker, conflicting_distributions, score_calls
from app.settings import RouterSettings
from app.sql import statement
from readie.errors import BadBudget, BadRequest, NoCapacity, NoWorkers, SessionsUnavailable, UnknownCheckpoint
from readie.flavor import Flavor
from readie.requirements import parse_requirement, split_requirements
from readie.units import ns_to_seconds
from readie.wire import CallPlaced, CallRequest, KeptPackage, Placement, SkippedPackage

PPM = 1_000_000


class WorkerFilled(Exception):
    """Another transaction took the room of the chosen worker while this one waited for it: place the call anew."""


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
class Start:
    """What a call's sandbox starts from on its worker, and what that should cost; `checkpoint_id` None: cold."""

    catalogue_id: int | None = None
    generation: str | None = None
    checkpoint_id: str | None = None
    checkpoint_flavor: str | None = None  # its catalogue's, which the tables compare with the worker's
    cost_ns: int | None = None
    cold_cost_ns: int | None = None
    predicted_ready_ns: int | None = None
    reason: str
    items: Sequence[str | None] = ()  # what each module stands for; None: it matches nothing
    unmatched: Sequence[str] = ()
    skipped: Sequence[SkippedPackage] = ()
    kept: Sequence[KeptPackage] = ()


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
    """Places a new call: its row, its payload and its lease, or nothing.

    Raises `NoWorkers` and `NoCapacity` where no worker can take it, `UnknownCheckpoint` for a pinned one that the
    chosen worker's catalogue does not list, `WorkerFilled`, and what `read_demand` raises.
    """
    if request.session_id is not None:
        raise SessionsUnavailable(f"session_id {request.session_id} was given")
    demand = read_demand(request, int(settings.default_memory))
    worker = choose_worker(connection, database, settings, demand)
    start = choose_start(connection, settings, worker, demand)
    call_id = uuid4().hex
    placement = _placement_columns(call_id, 1, worker, start)
    timeout_s = settings.call_timeout if request.timeout is None else request.timeout
    connection.execute(
        statement("insert_call"),
        {
            "function": request.function,
            "python": request.python,
            "gpu": demand.gpu,
            "memory_bytes": demand.memory_bytes,
            "max_memory_bytes": demand.max_memory_bytes,
            "gpu_memory_bytes": demand.gpu_memory_bytes,
            "max_gpu_memory_bytes": demand.max_gpu_memory_bytes,
            "session_id": None,
            "pinned_checkpoint_id": demand.checkpoint_id,
            "cold": demand.cold,
            "retry": request.retry,
            "timeout_ms": ceil(timeout_s * 1000),
            **placement,
        },
    )
    connection.execute(statement("insert_payload"), {"call_id": call_id, "payload": request.payload})
    if demand.modules:
        connection.execute(
            statement("insert_call_modules"),
            {
                "call_id": call_id,
                "positions": list(range(len(demand.modules))),
                "modules": list(demand.modules),
                "items": list(start.items) or [None] * len(demand.modules),
            },
        )
    _insert_packages(connection, call_id, start)
    _insert_lease(connection, settings, demand, worker, placement)
    return CallPlaced(
        call_id=call_id,
        placement=placement_of(placement),
        skipped=list(start.skipped),
        kept=list(start.kept),
        unmatched=list(start.unmatched),
    )


def place_again(connection: Connection, database: Database, settings: RouterSettings, call_id: str) -> Placement:
    """Gives a call, whose last lease has ended, its next placement. Raises as `place_call`."""
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
    worker = choose_worker(connection, database, settings, demand)
    start = choose_start(connection, settings, worker, demand)
    placement = _placement_columns(call_id, call["attempts"] + 1, worker, start)
    connection.execute(statement("place_call_again"), placement)
    connection.execute(statement("delete_call_packages"), {"call_id": call_id})
    _insert_packages(connection, call_id, start)
    _insert_lease(connection, settings, demand, worker, placement)
    return placement_of(placement)


def choose_worker(connection: Connection, database: Database, settings: RouterSettings, demand: Demand) -> RowMapping:
    """The best worker that can take the call now, locked until the transaction ends.

    Raises `NoWorkers`, `NoCapacity`, `WorkerFilled`.
    """
    asked = {
        "gpu": demand.gpu,
        "memory_bytes": demand.memory_bytes,
        "gpu_bytes": demand.gpu_memory_bytes,
        "headroom_ppm": round(settings.memory_headroom * PPM),
        "ttl_ms": round(settings.worker_ttl * 1000),
    }
    best = connection.execute(statement("rank_workers"), {**asked, "worker_id": None}).mappings().first()
    if best is None:
        raise NoWorkers("no worker is ready")
    if not best["fits"]:
        raise _no_capacity(best, demand)
    database.lock_worker(connection, best["worker_id"])
    # What others placed on it before we had the lock counts too.
    again = connection.execute(statement("rank_workers"), {**asked, "worker_id": best["worker_id"]})
    locked = again.mappings().first()
    if locked is None or not locked["fits"]:
        raise WorkerFilled
    return locked


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


def choose_start(connection: Connection, settings: RouterSettings, worker: RowMapping, demand: Demand) -> Start:
    """What the call's sandbox starts from on this worker: the cheapest checkpoint that it holds, the pinned one, or
    nothing. Raises `UnknownCheckpoint` and `BadRequirement`.
    """
    catalogue = catalogue_for_worker(connection, worker["worker_id"])
    skipped, kept = _split_packages(connection, settings, worker, demand, catalogue)
    if catalogue is None:
        if demand.checkpoint_id is not None:
            raise UnknownCheckpoint(
                f"{demand.checkpoint_id}: worker {worker['worker_id']} holds no generation of any {worker['flavor']} "
                "catalogue",
                "Pin none, or start the worker with the checkpoints of an imported catalogue.",
            )
        reason = f"cold: worker {worker['worker_id']} holds no generation of a {worker['flavor']} catalogue"
        return Start(reason=reason, unmatched=demand.modules, skipped=skipped, kept=kept)
    of_catalogue: dict[str, Any] = {
        "catalogue_id": catalogue["catalogue_id"],
        "generation": catalogue["generation"],
        "skipped": skipped,
        "kept": kept,
    }
    if demand.checkpoint_id is not None:
        listed = [row.checkpoint_id for row in list_checkpoints(connection, catalogue["catalogue_id"])]
        if demand.checkpoint_id not in listed:
            named = ", ".join(listed) or "none"
            raise UnknownCheckpoint(f"{demand.checkpoint_id}: the {worker['flavor']} catalogue lists {named}")
        return Start(
            checkpoint_id=demand.checkpoint_id, checkpoint_flavor=catalogue["flavor"], reason="pinned", **of_catalogue
        )
    choice = score_calls(
        connection,
        [
            ScoreRequest(
                catalogue_id=catalogue["catalogue_id"],
                modules=demand.modules,
                worker_id=worker["worker_id"],
                generation=catalogue["generation"],
                kept_distributions=conflicting_distributions(kept),
                memory_bytes=demand.memory_bytes,
                base_bytes=worker["base_bytes"],
            )
        ],
    )[0]
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
        checkpoint_flavor=None if checkpoint_id is None else catalogue["flavor"],
        cost_ns=cost_ns,
        cold_cost_ns=choice.cold_cost_ns,
        predicted_ready_ns=cost_ns + fixed_ns,
        reason=reason,
        items=[choice.items.get(module) for module in demand.modules],
        unmatched=choice.unmatched,
        **of_catalogue,
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


def _placement_columns(call_id: str, attempt: int, worker: RowMapping, start: Start) -> dict[str, Any]:
    return {
        "call_id": call_id,
        "placement_id": f"{call_id}-{attempt}",
        "worker_id": worker["worker_id"],
        "worker_flavor": worker["flavor"],
        "catalogue_id": start.catalogue_id,
        "generation": start.generation,
        "checkpoint_id": start.checkpoint_id,
        "checkpoint_flavor": start.checkpoint_flavor,
        "cost_ns": start.cost_ns,
        "cold_cost_ns": start.cold_cost_ns,
        "predicted_ready_ns": start.predicted_ready_ns,
        "reason": start.reason,
    }


def _insert_packages(connection: Connection, call_id: str, start: Start) -> None:
    rows: list[tuple[str, bool, str | None, str]] = [
        *((package.requirement, True, package.installed, package.reason) for package in start.skipped),
        *((package.requirement, False, package.installed, package.reason) for package in start.kept),
    ]
    if rows:
        requirements, skipped, installed, reasons = zip(*rows, strict=True)
        connection.execute(
            statement("insert_call_packages"),
            {
                "call_id": call_id,
                "positions": list(range(len(rows))),
                "requirements": list(requirements),
                "skipped": list(skipped),
                "installed": list(installed),
                "reasons": list(reasons),
            },
        )


def _insert_lease(
    connection: Connection,
    settings: RouterSettings,
    demand: Demand,
    worker: RowMapping,
    placement: Mapping[str, Any],
) -> None:
    gpu_memory = worker["gpu_total_bytes"] if demand.gpu_memory_bytes is None else demand.gpu_memory_bytes
    names = (
        "placement_id",
        "call_id",
        "worker_id",
        "worker_flavor",
        "generation",
        "checkpoint_id",
        "checkpoint_flavor",
    )
    connection.execute(
        statement("insert_lease"),
        {
            **{name: placement[name] for name in names},
            "gpu": demand.gpu,
            "memory_bytes": demand.memory_bytes,
            "gpu_memory_bytes": (gpu_memory or 0) if demand.gpu else 0,
            "accept_ms": round(settings.accept_timeout * 1000),
        },
    )


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
