"""Routes for worker agents: report, fetch placements, say what became of them; and for people: the workers."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

from litestar import get, post, put
from litestar.concurrency import sync_to_thread
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, PathParameter, QueryParameter
from sqlalchemy import Connection

from app.api import PROBLEMS, FlavorQuery, Serving
from app.api.calls import Offset, Wait
from app.database import Database
from app.lease import START_SECONDS, Taker, accept_placements, add_output, end_placements, find_orders
from app.liveness import expire_unreported, report_status
from app.sql import statement
from app.waiting import call_topic, worker_topic
from readie.errors import PlacementTaken, ResultTooLarge, UnknownPlacement, UnknownWorker
from readie.flavor import Flavor, parse_flavor
from readie.units import ns_to_seconds
from readie.wire import (
    IDENTIFIER,
    MAX_NAME,
    MAX_SECONDS,
    HeldGeneration,
    Orders,
    Output,
    Result,
    WorkerState,
    WorkerStatus,
    WorkerView,
    problem_of,
)

#: Workers that one answer lists at most.
MOST_WORKERS = 10_000


@put("/workers/{worker_id:str}", operation_id="reportWorker", status_code=204, sync_to_thread=True, responses=PROBLEMS)
def report(
    worker_id: Annotated[str, PathParameter(pattern=IDENTIFIER)],
    data: JSONBody[WorkerStatus],
    serving: NamedDependency[Serving],
) -> None:
    """What a worker is and has, every 10 seconds and at each change; it replaces what was reported before."""
    with serving.database.transaction() as connection:
        topics = report_status(connection, worker_id, data)
    serving.wake_ups.ring(*topics, *expire_unreported(serving.database, worker_id))


@get("/workers/{worker_id:str}/placements", operation_id="fetchPlacements", responses=PROBLEMS)
async def fetch(worker_id: FromPath[str], serving: NamedDependency[Serving], wait: Wait = 0.0) -> Orders:
    """What the agent has to do: at once if there is something, else when there is, or after `wait` seconds."""
    return await serving.wake_ups.wait(
        worker_topic(worker_id),
        wait,
        lambda: sync_to_thread(find_orders, serving.database, worker_id),
        lambda orders: bool(orders.run or orders.cancel or orders.end_sessions),
    )


@post(
    "/placements/{placement_id:str}/accept",
    operation_id="acceptPlacement",
    status_code=204,
    responses=PROBLEMS,
)
async def accept(
    placement_id: FromPath[str],
    worker_id: Annotated[str, QueryParameter(pattern=IDENTIFIER)],
    serving: NamedDependency[Serving],
    incarnation: Annotated[str | None, QueryParameter(max_length=MAX_NAME, description="the agent's own")] = None,
    start: Annotated[
        float, QueryParameter(ge=0, le=MAX_SECONDS, description="seconds that it may take until the function runs")
    ] = START_SECONDS,
) -> None:
    """The agent of this worker runs the placement, and nobody else; to say so twice is fine."""
    await serving.accepting.ask(Taker(placement_id, worker_id, incarnation, start))


def accept_together(database: Database, takers: Sequence[Taker]) -> Sequence[UnknownPlacement | PlacementTaken | None]:
    """Accepts a group of placements in one transaction."""
    with database.transaction() as connection:
        return accept_placements(connection, takers)


@post(
    "/placements/{placement_id:str}/output",
    operation_id="addOutput",
    status_code=204,
    sync_to_thread=True,
    responses=PROBLEMS,
)
def output(
    placement_id: FromPath[str],
    data: JSONBody[Output],
    serving: NamedDependency[Serving],
) -> None:
    """A piece of what the call printed; a repeated sequence number is ignored."""
    with serving.database.transaction() as connection:
        call_id = add_output(connection, placement_id, data)
    serving.wake_ups.ring(call_topic(call_id))


@put(
    "/placements/{placement_id:str}/result",
    operation_id="endPlacement",
    status_code=200,
    responses=PROBLEMS,
)
async def result(
    placement_id: FromPath[str],
    data: JSONBody[Result],
    serving: NamedDependency[Serving],
    worker_id: Annotated[
        str | None, QueryParameter(pattern=IDENTIFIER, description="whose agent asks for what it has to do next")
    ] = None,
) -> Orders:
    """How the placement ended; to say so twice is fine, the first time counts.

    The answer has what the agent of `worker_id` has to do now, as if it had fetched that without waiting.
    """
    most = serving.settings.max_payload
    if len(data.payload) > most:
        error = ResultTooLarge(f"the result has {len(data.payload)} bytes, MAX_PAYLOAD is {most}")
        data = Result(
            outcome="failed",
            problem=problem_of(error),
            python=data.python,
            started=data.started,
            phases=data.phases,
        )
    serving.wake_ups.ring(*await serving.ending.ask((placement_id, data)))
    with suppress(UnknownWorker):  # it has to report first
        if worker_id is not None:
            return await sync_to_thread(find_orders, serving.database, worker_id)
    return Orders()


def end_together(database: Database, results: Sequence[tuple[str, Result]]) -> Sequence[list[str] | UnknownPlacement]:
    """Ends a group of placements by their results, in one transaction."""
    with database.transaction() as connection:
        return end_placements(connection, results)


@get("/workers", operation_id="listWorkers", sync_to_thread=True, responses=PROBLEMS)
def list_workers(
    database: NamedDependency[Database],
    flavor: FlavorQuery = None,
    in_state: Annotated[WorkerState | None, QueryParameter(name="state")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=MOST_WORKERS)] = 1000,
    offset: Offset = 0,
) -> list[WorkerView]:
    """Workers, by id, with what is taken of them."""
    asked = None if flavor is None else parse_flavor(flavor)
    with database.reading() as connection:
        return read_workers(connection, flavor=asked, state=in_state, limit=limit, offset=offset)


def read_workers(
    connection: Connection,
    *,
    flavor: Flavor | None = None,
    state: WorkerState | None = None,
    limit: int = MOST_WORKERS,
    offset: int = 0,
) -> list[WorkerView]:
    """A page of the workers of this flavor in this state (None: any), by id."""
    asked = {"flavor": None if flavor is None else flavor.value, "state": state, "at_most": limit, "skip": offset}
    rows = connection.execute(statement("worker_rows"), asked).all()
    listed = {"worker_ids": [row.worker_id for row in rows]}
    held: dict[str, dict[str, HeldGeneration]] = {}
    for row in connection.execute(statement("generations_of_workers"), listed):
        generation = held.setdefault(row.worker_id, {}).setdefault(
            row.generation,
            HeldGeneration(
                generation=row.generation,
                checkpoint_ids=[],
                restore_fixed=ns_to_seconds(row.restore_fixed_ns),
                cold_fixed=ns_to_seconds(row.cold_fixed_ns),
            ),
        )
        if row.checkpoint_id is not None:
            generation.checkpoint_ids.append(row.checkpoint_id)
    return [
        WorkerView(
            worker_id=row.worker_id,
            flavor=Flavor(row.flavor),
            state=row.state,
            runtime=row.runtime,
            python=row.python,
            memory_total=row.memory_total_bytes,
            memory_used=int(row.memory_used),
            memory_reserved=int(row.memory_reserved),
            gpu_total=row.gpu_total_bytes,
            gpu_used=int(row.gpu_used),
            gpu_reserved=int(row.gpu_reserved),
            max_sandboxes=row.max_sandboxes,
            sandboxes=row.sandboxes,
            in_flight=row.in_flight,
            heard_at=row.heard_at,
            generations=list(held.get(row.worker_id, {}).values()),
        )
        for row in rows
    ]
