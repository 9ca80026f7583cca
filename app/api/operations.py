"""Routes for operators: does the process live, can it serve, what does it count."""

import asyncio
from typing import Literal

from litestar import Response, get
from litestar.concurrency import sync_to_thread
from litestar.di import NamedDependency
from prometheus_client import CONTENT_TYPE_LATEST

from app.api import PROBLEMS, Serving
from app.database import Database, check_schema
from app.metrics import read_state, render
from readie.errors import DatabaseUnavailable
from readie.wire import Answer

#: Seconds that a scrape waits for the database: less than Prometheus waits for the scrape.
SCRAPE_SECONDS = 5.0


class Health(Answer, frozen=True, kw_only=True):
    """The process answers."""

    status: Literal["ok"] = "ok"


@get("/health", operation_id="health", sync_to_thread=False)
def health() -> Health:
    """The process lives; it says nothing about the database."""
    return Health()


@get("/ready", operation_id="ready", sync_to_thread=True, responses=PROBLEMS)
def ready(database: NamedDependency[Database]) -> Health:
    """The database answers, and has this version's schema."""
    check_schema(database)
    return Health()


@get("/metrics", operation_id="readMetrics", media_type="text/plain")
async def metrics(serving: NamedDependency[Serving]) -> Response[bytes]:
    """Counts of this router and the state of the cluster, for Prometheus; without the latter while the database is
    away.
    """
    try:
        state = await asyncio.wait_for(sync_to_thread(read_state, serving.database), SCRAPE_SECONDS)
    except (DatabaseUnavailable, TimeoutError):
        state = None
    return Response(render(serving.metrics, state), media_type=CONTENT_TYPE_LATEST)
