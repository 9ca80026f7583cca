"""The pages about calls: the search, and one call with its phases and why it was started as it was."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, get_args
from urllib.parse import urlencode

import msgspec
from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter
from sqlalchemy import Row

from app.api import FlavorQuery
from app.dashboard.charts import Bar, stack
from app.dashboard.render import page
from app.database import Database
from app.sql import statement
from readie.errors import UnknownCall
from readie.flavor import parse_flavor
from readie.units import seconds_to_ns
from readie.wire import MAX_NAME, CallState, Phases, Problem, Started

#: Calls on one page of the search.
PAGE = 50

#: Characters of the query in a link.
MOST_QUERY = 12_000

STATES = get_args(CallState)

_Words = Annotated[str, QueryParameter(max_length=MAX_NAME)]


class _End(msgspec.Struct, frozen=True):
    """Of a call's result, what people may see: not its payload."""

    phases: Phases = Phases()
    started: Started | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class Timeline:
    """Bars over one scale: what start-up was predicted to take and took, and the whole call."""

    predicted: list[Bar]
    measured: list[Bar]
    whole: list[Bar]


@get("/calls", operation_id="showCalls", sync_to_thread=True)
def show_calls(
    *,
    database: NamedDependency[Database],
    wanted: _Words = "",
    module: _Words = "",
    in_state: Annotated[str, QueryParameter(name="state", pattern=f"^({'|'.join(STATES)})?$")] = "",
    flavor: FlavorQuery = None,
    started: Annotated[str, QueryParameter(pattern="^(restored|cold)?$")] = "",
    skip: Annotated[int, QueryParameter(ge=0, le=2**31 - 1)] = 0,
) -> Response[str]:
    """Calls that match, the latest first."""
    asked: dict[str, Any] = {
        "wanted": wanted.strip() or None,
        "module": module.strip() or None,
        "state": in_state or None,
        "flavor": parse_flavor(flavor).value if flavor else None,
        "started": started or None,
    }
    with database.browsing() as connection:
        # One more than a page says whether there is another.
        found = connection.execute(statement("search_calls"), {**asked, "at_most": PAGE + 1, "skip": skip}).all()
    kept = {name: value for name, value in asked.items() if value is not None}
    return page(
        "calls.html",
        asked=asked,
        states=STATES,
        calls=found[:PAGE],
        skip=skip,
        earlier=None if not skip else "/calls?" + urlencode({**kept, "skip": max(0, skip - PAGE)}),
        later=None if len(found) <= PAGE else "/calls?" + urlencode({**kept, "skip": skip + PAGE}),
    )


@get("/calls/{call_id:str}", operation_id="showCall", sync_to_thread=True)
def show_call(call_id: FromPath[str], database: NamedDependency[Database]) -> Response[str]:
    """One call: its phases, predicted against measured, why this checkpoint, why cold."""
    asked = {"call_id": call_id}
    with database.browsing() as connection:
        call = connection.execute(statement("call_with_choice"), asked).one_or_none()
        if call is None:
            raise UnknownCall(f"{call_id} was never placed, or is forgotten")
        modules = connection.execute(statement("modules_with_items"), asked).all()
        packages = connection.execute(statement("packages_with_reasons"), asked).all()
    end = None if call.result is None else msgspec.msgpack.decode(call.result, type=_End)
    asked_again = [*(("module", row.module) for row in modules), ("flavor", call.worker_flavor or "cpu")]
    explain = urlencode(asked_again)
    return page(
        "call.html",
        call=call,
        modules=modules,
        packages=packages,
        end=end,
        timeline=_timeline(call, end),
        explain=f"/explain?{explain}" if modules and len(explain) <= MOST_QUERY else None,
    )


def _timeline(call: Row[Any], end: _End | None) -> Timeline:
    predicted: list[tuple[str, str, float]] = []
    if call.predicted_ready_ns is not None:
        predicted = [("fixed part", "s5", call.predicted_ready_ns - call.cost_ns)]
        if call.checkpoint_id is None:
            predicted += [("imports", "s2", call.cost_ns)]
        elif call.size_ns is None:  # the catalogue is forgotten that priced its size
            predicted += [("size of the checkpoint and imports that it lacks", "s1", call.cost_ns)]
        else:
            predicted += [
                ("size of the checkpoint", "s1", call.size_ns),
                ("imports that it lacks", "s2", call.cost_ns - call.size_ns),
            ]
    measured: list[tuple[str, str, float]] = []
    after: list[tuple[str, str, float]] = []
    queue: list[tuple[str, str, float]] = []
    if end is not None:
        phases = {name: seconds_to_ns(Decimal(str(getattr(end.phases, name)))) for name in Phases.__struct_fields__}
        rest = phases["ready"] - phases["restore"] - phases["install"] - phases["imports"]
        measured = [
            ("restore" if call.started == "restored" else "cold start", "s1", phases["restore"]),
            ("installing packages", "s4", phases["install"]),
            ("imports", "s2", phases["imports"]),
            ("rest", "s5", rest),
        ]
        queue, after = [("queue", "s6", phases["queue"])], [("function", "s3", phases["run"])]
    elif call.measured_ready_ns is not None:
        measured = [("until ready", "s1", call.measured_ready_ns)]
    scale = max(_sum(predicted), _sum(measured))
    whole = [*queue, *measured, *after] if end is not None else []
    return Timeline(predicted=stack(predicted, scale), measured=stack(measured, scale), whole=stack(whole, _sum(whole)))


def _sum(parts: list[tuple[str, str, float]]) -> float:
    return sum(max(value, 0.0) for _, _, value in parts)
