"""What Prometheus scrapes: counts of this router since its start, and the state of the cluster as the database has it.

docs/metrics.md describes each. No label has the id of anything, a function's name or an address: their number is small.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import product
from typing import Any, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from sqlalchemy import Row

from app.database import Database
from app.placement import SESSION
from app.session import STALE_SECONDS
from app.sql import statement
from readie.errors import ReadieError
from readie.flavor import Flavor
from readie.units import ns_to_seconds
from readie.wire import CallPlaced, CallRequest, SessionState, WorkerState

C = TypeVar("C")
R = TypeVar("R")
T = TypeVar("T")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)

_FLAVORS = [flavor.value for flavor in Flavor]


class Metrics:
    """The counts of one router, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "readie_requests", "Requests that were answered.", ["route", "status"], registry=self.registry
        )
        self._placements = Counter(
            "readie_placements",
            "Calls that were placed, or refused by the problem of that name.",
            ["flavor", "outcome", "checkpoint"],
            registry=self.registry,
        )
        self._placing = Histogram(
            "readie_placement_seconds",
            "Choosing and writing a placement, for each attempt.",
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._selecting = Histogram(
            "readie_selection_seconds",
            "Choosing what the sandboxes of calls start from, which is part of placing them, for each attempt.",
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._waiting = Gauge(
            "readie_calls_placing",
            "Calls that this router is about to place: those that wait for room or for their turn, too.",
            registry=self.registry,
        )
        self._ended = Counter("readie_calls_ended", "Calls that ended.", ["outcome"], registry=self.registry)
        self._ready = Histogram(
            "readie_ready_seconds",
            "Seconds to ready of ended calls that have both, as predicted and as measured.",
            ["which"],
            registry=self.registry,
            buckets=(*_SECONDS[2:], 25, 60),
        )
        self._ratio = Histogram(
            "readie_ready_ratio",
            "Measured by predicted seconds to ready of these calls.",
            registry=self.registry,
            buckets=_RATIOS,
        )

    def count_request(self, route: str, status: int) -> None:
        """A request was answered."""
        self._requests.labels(route, status).inc()

    async def count_placement(self, request: CallRequest, placing: Awaitable[CallPlaced]) -> CallPlaced:
        """Waits for what becomes of a call that is to be placed, and counts it."""
        try:
            with self._waiting.track_inprogress():
                placed = await placing
        except Exception as error:
            slug = error.slug if isinstance(error, ReadieError) else ReadieError.slug
            asked = Flavor.GPU if request.gpu or request.gpu_memory or request.max_gpu_memory else Flavor.CPU
            self._placements.labels(asked.value, slug, "").inc()
            raise
        placement = placed.placement
        kind = "session" if placement.reason == SESSION else "checkpoint" if placement.checkpoint_id else "cold"
        self._placements.labels(placement.flavor.value, "placed", kind).inc()
        return placed

    def time_placing(self, place: Callable[[Sequence[T]], R]) -> Callable[[Sequence[T]], R]:
        """The function, which places a group of calls: how long it takes is how long each of them takes."""

        def timed(asked: Sequence[T]) -> R:
            with _time_each(self._placing, asked):
                return place(asked)

        return timed

    def time_selecting(self, choose: Callable[[C, Sequence[T]], R]) -> Callable[[C, Sequence[T]], R]:
        """The function, which chooses what a group of calls starts from, likewise."""

        def timed(connection: C, reserved: Sequence[T]) -> R:
            with _time_each(self._selecting, reserved):
                return choose(connection, reserved)

        return timed

    def count_ended(self, calls: Sequence[Row[Any]]) -> None:
        """These calls (rows of `finish_calls`) have ended."""
        for call in calls:
            self._ended.labels(call.outcome).inc()
            if call.predicted_ready_ns and call.measured_ready_ns is not None:
                self._ready.labels("predicted").observe(ns_to_seconds(call.predicted_ready_ns))
                self._ready.labels("measured").observe(ns_to_seconds(call.measured_ready_ns))
                self._ratio.observe(call.measured_ready_ns / call.predicted_ready_ns)


@contextmanager
def _time_each(seconds: Histogram, group: Sized) -> Iterator[None]:
    began_at = time.perf_counter()
    try:
        yield
    finally:
        took = time.perf_counter() - began_at
        for _ in range(len(group)):
            seconds.observe(took)


def read_state(database: Database) -> list[Row[Any]]:
    """The rows of `state_of_cluster`. Raises `DatabaseUnavailable`."""
    with database.reading() as connection:
        rows = connection.execute(statement("state_of_cluster"), {"stale_ms": STALE_SECONDS * 1000}).all()
    return list(rows)


def render(metrics: Metrics, state: Sequence[Row[Any]] | None) -> bytes:
    """All metrics in Prometheus' text format; `state` None: the database did not answer."""
    registry = CollectorRegistry()
    up = Gauge("readie_database_up", "1: the database answered this scrape.", registry=registry)
    up.set(state is not None)
    if state is not None:
        _add_gauges(registry, state)
    return generate_latest(metrics.registry) + generate_latest(registry)


#: Gauge of `state_of_cluster` → what it tells, and its labels, each with the values that are there even if none is so.
_GAUGES: Mapping[str, tuple[str, Mapping[str, Sequence[str]]]] = {
    "workers": ("Workers, by what they reported last.", {"flavor": _FLAVORS, "state": get_args(WorkerState)}),
    "leases": (
        "Calls that are placed and have not ended, by whether their worker has accepted them.",
        {"flavor": _FLAVORS, "accepted": ("no", "yes")},
    ),
    "sandboxes": ("Sandboxes that live on workers.", {"flavor": _FLAVORS}),
    "sessions": ("Sessions; those that have expired are remembered for a day.", {"state": get_args(SessionState)}),
    "calls_waiting": ("Calls that wait for their turn in a session.", {}),
    "catalogue": ("1: the generation of the flavor's active catalogue.", {"flavor": (), "generation": ()}),
}


def _add_gauges(registry: CollectorRegistry, state: Sequence[Row[Any]]) -> None:
    for name, (about, labels) in _GAUGES.items():
        suffix = "_info" if name == "catalogue" else ""
        gauge = Gauge(f"readie_{name}{suffix}", about, list(labels), registry=registry)
        values = dict.fromkeys(product(*labels.values()), 0)
        values |= {(row.first, row.second)[: len(labels)]: row.value for row in state if row.gauge == name}
        for combination, value in values.items():
            (gauge.labels(*combination) if labels else gauge).set(value)
