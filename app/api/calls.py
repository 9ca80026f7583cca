"""Routes for clients: place a call, follow it, cancel it; explain what one would cost."""

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import cycle
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from litestar import delete, get, post
from litestar.concurrency import sync_to_thread
from litestar.di import NamedDependency
from litestar.params import FromPath, HeaderParameter, JSONBody, QueryParameter
from sqlalchemy import Connection, Row

from app.api import PROBLEMS, Serving, Time, parse_time
from app.catalogue import find_active_catalogue, find_catalogue
from app.database import Database
from app.explain import explain_calls, remembered
from app.keys import Asked, answer_again, remember_answers
from app.lease import cancel_call
from app.placement import PLACEMENTS, Chooser, place_calls, placement_of
from app.session import stop_waiting
from app.settings import RouterSettings
from app.sql import statement
from app.waiting import CAPACITY, call_topic, session_topic, worker_topic
from readie.errors import (
    NoCapacity,
    NoWorkers,
    PayloadTooLarge,
    PlacementError,
    ReadieError,
    RouterStopping,
    SessionBusy,
    UnknownCall,
)
from readie.flavor import Flavor
from readie.units import ns_to_seconds
from readie.wire import (
    IDENTIFIER,
    MAX_NAME,
    MAX_WAIT,
    CallPlaced,
    CallRequest,
    CallState,
    CallStatus,
    CallView,
    ExplainRequest,
    Explanation,
    OutputPiece,
    Result,
)

Wait = Annotated[float, QueryParameter(ge=0, le=MAX_WAIT, description="seconds to wait for something to tell")]
#: Modules of a request at most that is explained together with others, which then wait for it.
MOST_TOGETHER = 100

#: Flavors and SHA-256 whose catalogues are remembered.
MOST_NAMED = 1000

#: Calls, and sessions, that one answer lists at most.
MOST_LISTED = 1000

Limit = Annotated[int, QueryParameter(ge=1, le=MOST_LISTED)]
Offset = Annotated[int, QueryParameter(ge=0, le=2**31 - 1)]


@post("/calls", operation_id="placeCall", responses=PROBLEMS)
async def place(
    data: JSONBody[CallRequest],
    serving: NamedDependency[Serving],
    idempotency_key: Annotated[
        str | None,
        HeaderParameter(
            name="Idempotency-Key",
            pattern=r"^[\x21-\x7e]{1,255}$",
            description="of the client's choice: the same call, sent again with the same key within a day, is placed once",
        ),
    ] = None,
) -> CallPlaced:
    """Places a call on a worker, waiting up to its queue_timeout for one that can take it, and for its turn in its
    session.
    """
    most = serving.settings.max_payload
    if len(data.payload) > most:
        raise PayloadTooLarge(f"the payload has {len(data.payload)} bytes, MAX_PAYLOAD is {most}")
    asked = Asked(call_id=uuid4().hex, request=data, key=idempotency_key)
    placed = None
    try:
        placed = await serving.metrics.count_placement(data, _wait_to_place(serving, asked))
    finally:
        if data.session_id is not None and (placed is None or placed.call_id != asked.call_id):
            await sync_to_thread(_stop_waiting, serving.database, asked.call_id)
            serving.wake_ups.ring(session_topic(data.session_id))
    serving.wake_ups.ring(worker_topic(placed.placement.worker_id))
    return placed


async def _wait_to_place(serving: Serving, asked: Asked) -> CallPlaced:
    """Places a call when it is its turn in its session, and there is room for it.

    Raises what `place_calls` answers, `SessionBusy`, `NoCapacity` and `NoWorkers` when the time for that is over, and
    `RouterStopping` when this process ends before.
    """

    async def try_to_place() -> CallPlaced | NoWorkers | NoCapacity | SessionBusy:
        try:
            return await serving.placing.ask(asked)
        except (NoWorkers, NoCapacity, SessionBusy) as error:
            return error

    data = asked.request
    began_at = time.monotonic()
    for_room = (NoWorkers, NoCapacity), CAPACITY, data.queue_timeout
    waits: list[tuple[tuple[type[PlacementError], ...], str, float]] = [for_room]
    if data.session_id is not None:
        waits.insert(0, ((SessionBusy,), session_topic(data.session_id), serving.settings.session_wait_timeout))
    for refusals, topic, seconds in cycle(waits):
        left = began_at + seconds - time.monotonic()
        answer = await serving.wake_ups.wait(topic, left, try_to_place, _other_than(refusals))
        if isinstance(answer, CallPlaced):
            return answer
        if isinstance(answer, refusals):
            if serving.wake_ups.closed and time.monotonic() < began_at + seconds:
                raise RouterStopping("the call was waiting, and was not placed")
            raise answer
    raise AssertionError("a cycle does not end")


def _other_than(kinds: tuple[type[PlacementError], ...]) -> Callable[[object], bool]:
    return lambda answer: not isinstance(answer, kinds)


def place_together(
    database: Database, settings: RouterSettings, asked: Sequence[Asked], choose: Chooser | None = None
) -> list[CallPlaced | ReadieError]:
    """Places a group of calls in one transaction; those whose key has come before are answered as then."""
    answers: dict[int, CallPlaced | ReadieError] = {}
    with database.transaction() as connection:
        database.lock(connection, PLACEMENTS)
        while left := {number: each for number, each in enumerate(asked) if number not in answers}:
            answers |= answer_again(connection, left)
            first: dict[str, tuple[int, Asked]] = {}  # of several with one key
            for number, each in left.items():
                if number not in answers:
                    first.setdefault(each.call_id if each.key is None else each.key, (number, each))
            numbers, calls = [number for number, _ in first.values()], [each for _, each in first.values()]
            requests, call_ids = [each.request for each in calls], [each.call_id for each in calls]
            placed = place_calls(connection, settings, requests, call_ids, choose) if calls else []
            remember_answers(connection, list(zip(calls, placed, strict=True)))
            answers |= zip(numbers, placed, strict=True)
    return [answers[number] for number in range(len(asked))]


def _stop_waiting(database: Database, call_id: str) -> None:
    with database.transaction() as connection:
        stop_waiting(connection, [call_id])


@get("/calls/{call_id:str}", operation_id="readCall", responses=PROBLEMS)
async def read(
    call_id: FromPath[str],
    serving: NamedDependency[Serving],
    wait: Wait = 0.0,
    seen: Annotated[int | None, QueryParameter(ge=0, le=2**31 - 1)] = None,
) -> CallStatus:
    """How a call goes: at once, or when it has ended or printed more than `seen` pieces, or after `wait` seconds."""
    return await serving.wake_ups.wait(
        call_topic(call_id),
        wait,
        lambda: sync_to_thread(_read_status, serving, call_id, seen),
        lambda status: status.result is not None or (seen is not None and bool(status.output)),
    )


def _read_status(serving: Serving, call_id: str, seen: int | None) -> CallStatus:
    with serving.database.glancing() as connection:
        call = connection.execute(statement("call_status"), {"call_id": call_id}).mappings().first()
        if call is None:
            raise UnknownCall(f"{call_id} was never placed")
        output: Sequence[Row[Any]] = ()
        if call["has_output"]:
            printed = {"call_id": call_id, "placement_id": call["placement_id"]}
            output = connection.execute(statement("output_of_call"), printed).all()
    ended = call["state"] in ("finished", "failed", "cancelled")
    if ended and call["result"] is None:
        raise UnknownCall(f"{call_id} has {call['state']}, and its result was dropped since")
    if ended and not call["was_read"]:
        serving.were_read.append(call_id)
    # Pieces that a client has not seen: of another placement it has seen none, and fewer may be there.
    first = seen if seen is not None and seen <= len(output) else 0
    return CallStatus(
        call_id=call_id,
        state=call["state"],
        function=call["function"],
        created_at=call["created_at"],
        placement=placement_of(call),
        output=[OutputPiece(stream=row.stream, text=row.text) for row in output[first:]],
        output_from=first,
        result=None if call["result"] is None else msgspec.msgpack.decode(call["result"], type=Result),
    )


@delete("/calls/{call_id:str}", operation_id="cancelCall", status_code=204, sync_to_thread=True, responses=PROBLEMS)
def cancel(call_id: FromPath[str], serving: NamedDependency[Serving]) -> None:
    """Ends a call; one that has ended stays as it is."""
    with serving.database.transaction() as connection:
        topics = cancel_call(connection, call_id)
    serving.wake_ups.ring(*topics)


@get("/calls", operation_id="listCalls", sync_to_thread=True, responses=PROBLEMS)
def list_calls(
    *,
    database: NamedDependency[Database],
    in_state: Annotated[CallState | None, QueryParameter(name="state")] = None,
    function: Annotated[str | None, QueryParameter(max_length=MAX_NAME)] = None,
    worker_id: Annotated[str | None, QueryParameter(pattern=IDENTIFIER, description="of the latest placement")] = None,
    since: Time = None,
    limit: Limit = 100,
    offset: Offset = 0,
) -> list[CallView]:
    """Calls, the latest first."""
    placed_since = parse_time(since)
    with database.reading() as connection:
        return read_calls(
            connection,
            state=in_state,
            function=function,
            worker_id=worker_id,
            since=placed_since,
            limit=limit,
            offset=offset,
        )


def read_calls(
    connection: Connection,
    *,
    state: CallState | None = None,
    function: str | None = None,
    worker_id: str | None = None,
    since: datetime | None = None,
    limit: int = 100,
    offset: int = 0,
) -> list[CallView]:
    """A page of the calls that are as asked (None: any), the latest first."""
    asked = {"state": state, "function": function, "worker_id": worker_id, "since": since}
    rows = connection.execute(statement("call_rows"), {**asked, "at_most": limit, "skip": offset})
    return [
        CallView(
            call_id=row.call_id,
            state=row.state,
            function=row.function,
            created_at=row.created_at,
            finished_at=row.finished_at,
            worker_id=row.worker_id,
            checkpoint_id=row.checkpoint_id,
            generation=row.generation,
            predicted_ready=None if row.predicted_ready_ns is None else ns_to_seconds(row.predicted_ready_ns),
            measured_ready=None if row.measured_ready_ns is None else ns_to_seconds(row.measured_ready_ns),
        )
        for row in rows
    ]


@post("/explain", operation_id="explain", status_code=200, responses=PROBLEMS)
async def explain_modules(data: JSONBody[ExplainRequest], serving: NamedDependency[Serving]) -> Explanation:
    """What every checkpoint would cost for these modules, cheapest first, and why."""
    if not data.packages:  # what becomes of those is never remembered
        sha256 = await _name(serving, data.catalogue or data.flavor)
        if sha256 and (known := remembered(sha256, data)):
            return known
    if len(data.modules) > MOST_TOGETHER:
        return (await sync_to_thread(explain_together, serving.database, serving.settings, [data]))[0]
    return await serving.explaining.ask(data)


def explain_together(
    database: Database, settings: RouterSettings, requests: Sequence[ExplainRequest]
) -> Sequence[Explanation]:
    """A group's explanations, all of the same state."""
    with database.reading() as connection:
        return explain_calls(connection, requests, settings.packages_policy)


async def _name(serving: Serving, asked: Flavor | str) -> str | None:
    """As `name_together` says for one; from memory as long as nothing was written that it does not know of."""
    version = serving.database.version  # before looking: what is written meanwhile makes the answer an old one
    known_at, sha256 = serving.named.get(asked, (None, None))
    if version is None or version != known_at:
        sha256 = await serving.naming.ask(asked)
        if version is not None:
            if len(serving.named) >= MOST_NAMED:
                serving.named.clear()
            serving.named[asked] = version, sha256
    return sha256


def name_together(database: Database, asked: Sequence[Flavor | str]) -> list[str | None]:
    """The SHA-256 of the catalogue that is active for a flavor, or that has this SHA-256; None: there is none."""
    with database.reading() as connection:
        found = {
            each: find_active_catalogue(connection, each)
            if isinstance(each, Flavor)
            else find_catalogue(connection, each)
            for each in dict.fromkeys(asked)
        }
    return [row and row.sha256 for row in map(found.get, asked)]
