"""The page about the cluster: workers, what is taken of them, and the calls that they have now.

It stays up to date by server-sent events. The state is read once a second for all browsers together, and only while one
looks.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from litestar import Response, get
from litestar.concurrency import sync_to_thread
from litestar.di import NamedDependency
from litestar.response import ServerSentEvent
from litestar.response.sse import ServerSentEventMessage
from sqlalchemy import Row

from app.api.workers import MOST_WORKERS
from app.dashboard.render import page, pass_ends, render
from app.database import Database
from app.sql import statement
from app.waiting import WakeUps
from readie.flavor import Flavor

#: Seconds between two looks into the database.
INTERVAL: Final = 1.0

#: Seconds of silence after which a comment says that the connection is there.
KEEP_ALIVE: Final = 15.0

#: The part that says whether the others are of now.
STATE: Final = "state"

#: Workers and calls that the page lists; the totals are over all.
MOST_LISTED: Final = 100

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Totals:
    """A flavor's workers together. Bytes; a worker that reports no total adds nothing to it."""

    flavor: str
    states: dict[str, int]
    memory: tuple[int, int, int]  # used, reserved, total
    gpu: tuple[int, int, int]
    sandboxes: int
    calls: int


def read_cluster(database: Database) -> dict[str, str]:
    """The parts of the page that change, by name."""
    with database.browsing() as connection:
        everything = {"flavor": None, "state": None, "at_most": MOST_WORKERS, "skip": 0}
        workers = connection.execute(statement("worker_rows"), everything).all()
        calls = connection.execute(statement("live_calls"), {"at_most": MOST_LISTED}).all()
    return {
        "totals": render("cluster_totals.html", totals=[_sum_up(flavor, workers) for flavor in Flavor]),
        "workers": render("cluster_workers.html", workers=workers[:MOST_LISTED], count=len(workers)),
        "calls": render("cluster_calls.html", calls=calls, count=calls[0].calls if calls else 0),
    }


def _sum_up(flavor: Flavor, workers: Sequence[Row[Any]]) -> Totals:
    mine = [worker for worker in workers if worker.flavor == flavor]

    def sums(*columns: str) -> tuple[int, int, int]:
        used, reserved, total = (sum(int(getattr(worker, name) or 0) for worker in mine) for name in columns)
        return used, reserved, total

    return Totals(
        flavor=flavor.value,
        states={state: sum(worker.state == state for worker in mine) for state in ("ready", "starting", "removed")},
        memory=sums("memory_used", "memory_reserved", "memory_total_bytes"),
        gpu=sums("gpu_used", "gpu_reserved", "gpu_total_bytes"),
        sandboxes=sum(worker.sandboxes for worker in mine),
        calls=sum(worker.in_flight for worker in mine),
    )


@dataclass
class ClusterWatch:
    """The parts of the page as they were read last for those who watch now, and who waits for the next."""

    database: Database
    wake_ups: WakeUps
    parts: dict[str, str] = field(default_factory=dict)
    _watchers: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _reading: "asyncio.Task[None] | None" = None

    async def follow(self, until: float = math.inf) -> AsyncGenerator[ServerSentEventMessage, None]:
        """Each part, and again each time that it has changed.

        It ends when the router stops, when the browser has gone, and at `until`, in seconds of the epoch.
        """
        self._watchers += 1
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_on())
        seen: dict[str, str] = {}
        try:
            while not self.wake_ups.closed and (left := until - time.time()) > 0:
                changed = self._changed  # before looking: what is read from here on sets this one
                for name, part in self.parts.items():
                    if seen.get(name) != part:
                        seen[name] = part
                        yield ServerSentEventMessage(event=name, data=part)
                try:
                    await asyncio.wait_for(changed.wait(), min(KEEP_ALIVE, left))
                except TimeoutError:
                    yield ServerSentEventMessage(comment="still there", data=None)
        finally:
            self._watchers -= 1
            if not self._watchers and self._reading is not None:
                self._reading.cancel()
                self._reading = None
                self.parts = {}  # who comes later is not told of what was

    async def _read_on(self) -> None:
        while not self.wake_ups.closed:
            try:
                parts = {STATE: "Live"} | await sync_to_thread(read_cluster, self.database)
            except Exception as error:  # noqa: BLE001 - pages keep what they have, and say that it is old
                log.warning("cluster was not read", reason=str(error).partition("\n")[0])
                parts = {STATE: "Out of date: the database is not read"}
            if parts != self.parts:
                self.parts = parts
                self._tell()
            await asyncio.sleep(INTERVAL)
        self._tell()

    def _tell(self) -> None:
        told, self._changed = self._changed, asyncio.Event()
        told.set()


@get("/", operation_id="showCluster", sync_to_thread=True)
def show_cluster(database: NamedDependency[Database]) -> Response[str]:
    """Workers by flavor, what is taken of their memory, their sandboxes, and live calls."""
    return page("cluster.html", parts=read_cluster(database))


@get("/events", operation_id="followCluster")
async def follow_cluster(watch: NamedDependency[ClusterWatch]) -> ServerSentEvent:
    """The parts of that page as they change, for as long as who asks is signed in."""
    ends = pass_ends.get()
    until = math.inf if ends is None else ends
    return ServerSentEvent(watch.follow(until), headers={"Cache-Control": "no-store"})
