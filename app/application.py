"""The router's web application: every route on one screen, every error a problem document."""

import asyncio
import ipaddress
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import structlog
from litestar import Litestar, Request, Response, Router
from litestar.concurrency import sync_to_thread
from litestar.connection import ASGIConnection
from litestar.di import Provide
from litestar.exceptions import HTTPException, ValidationException
from litestar.handlers import BaseRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme

from app.api import (
    PROBLEM,
    Serving,
    WireRequest,
    WireResponse,
    WireSchemas,
    calls,
    catalogues,
    check_path,
    operations,
    page_guard,
    rate_guard,
    recorded,
    sessions,
    sql,
    token_guard,
    workers,
)
from app.dashboard import make_dashboard
from app.database import Database
from app.groups import Groups
from app.liveness import STALLED_SECONDS, mark_read, prune, sweep
from app.metrics import Metrics
from app.placement import choose_starts
from app.relay import relaying
from app.requests import follow_requests
from app.settings import RouterSettings
from app.waiting import WakeUps
from readie.errors import (
    BadRequest,
    BadSetting,
    DatabaseUnavailable,
    MethodNotAllowed,
    NoCapacity,
    NotFound,
    NoWorkers,
    PayloadTooLarge,
    RateLimited,
    ReadieError,
    SessionBusy,
    Unauthorized,
)
from readie.settings import check_token
from readie.version import this_version
from readie.wire import problem_of

#: Seconds between two looks for payloads and results that are past their time.
PRUNE_INTERVAL = 60.0

#: Threads for requests, besides those of the groups: more than there are connections to the database.
THREADS = 32

#: What a body may have besides its payload: 10,000 modules and 1,000 packages of 1,024 characters.
MOST_OF_THE_REST = 16 * 1024 * 1024

log = structlog.get_logger(__name__)


def create_app(settings: RouterSettings, database: Database, wake_ups: WakeUps | None = None) -> Litestar:
    """The application over an open database at the current schema.

    Raises `BadSetting` when it would serve anyone on an address that others reach.
    """
    check_tokens(settings)
    metrics = Metrics()
    place = partial(calls.place_together, database, settings, choose=metrics.time_selecting(choose_starts))
    database.on_ended = metrics.count_ended
    serving = Serving(
        database=database,
        settings=settings,
        wake_ups=wake_ups or WakeUps(),
        metrics=metrics,
        naming=Groups("name", partial(calls.name_together, database)),
        # Two, so that the database works for one while the other's answers are written.
        explaining=Groups("explain", partial(calls.explain_together, database, settings), most=16, at_once=2),
        placing=Groups("place", metrics.time_placing(place)),
        accepting=Groups("accept", partial(workers.accept_together, database)),
        ending=Groups("end", partial(workers.end_together, database)),
    )
    check_rate = rate_guard(settings.rate_limit)  # one, so that it counts the dashboard's requests with the clients'
    clients = Router(
        "/v1",
        route_handlers=[
            calls.place,
            calls.read,
            calls.cancel,
            calls.list_calls,
            recorded.read_recorded_imports,
            calls.explain_modules,
            sessions.end,
            sessions.list_sessions,
            catalogues.list_all,
            catalogues.import_one,
            catalogues.activate,
            catalogues.read_active,
            catalogues.read_one_item,
            catalogues.read_one_checkpoint,
            workers.list_workers,
            sql.run_sql,
        ],
        guards=[check_rate, token_guard(settings.auth_token)],
        tags=["clients"],
    )
    agents = Router(
        "/v1",
        route_handlers=[workers.report, workers.fetch, workers.accept, workers.output, workers.result],
        guards=[token_guard(settings.worker_token)],
        tags=["worker agents"],
    )
    operators = Router(
        "/",
        route_handlers=[operations.health, operations.ready, operations.metrics],
        tags=["operators"],
        security=[{}],  # no token
    )
    application = Litestar(
        route_handlers=[clients, agents, operators, make_dashboard(serving, check_rate, answer_problem)],
        guards=[check_path, page_guard(settings.auth_token)],
        dependencies={
            "database": Provide(lambda: database, sync_to_thread=False),
            "settings": Provide(lambda: settings, sync_to_thread=False),
            "serving": Provide(lambda: serving, sync_to_thread=False),
        },
        exception_handlers={Exception: answer_problem},
        lifespan=[_threads, _relaying(database, serving.wake_ups), _sweeping(serving)],
        request_class=WireRequest,
        response_class=WireResponse,
        request_max_body_size=settings.max_payload * 4 // 3 + MOST_OF_THE_REST,  # in JSON a payload is base64
        openapi_config=_openapi(),
        plugins=[WireSchemas()],
        logging_config=None,
        debug=False,
    )
    # Around the whole of it: middleware of Litestar's sees no request for which there is no route.
    application.asgi_handler = follow_requests(application.asgi_handler, database, metrics)
    return application


def check_tokens(settings: RouterSettings) -> None:
    """Says loudly which tokens are not set. Raises as `missing_tokens` does."""
    missing = missing_tokens(settings)
    if missing:
        log.warning("NO TOKEN IS SET: EVERY PROCESS ON THIS MACHINE MAY SEND CALLS OR RUN THEM", unset=missing)


def missing_tokens(settings: RouterSettings) -> str:
    """The tokens that are not set, for people. Raises `BadSetting` where others than this machine could use that,
    and for one that cannot be sent.
    """
    check_token("AUTH_TOKEN", settings.auth_token or "")
    check_token("WORKER_TOKEN", settings.worker_token or "")
    missing = [name for name in ("auth_token", "worker_token") if getattr(settings, name) is None]
    names = " and ".join(name.upper() for name in missing)
    if missing and not is_loopback(settings.host):
        raise BadSetting(
            f"ROUTER_HOST={settings.host!r}: {names} not set, and others than this machine reach that address",
            f"Set {names}, or serve on 127.0.0.1.",
        )
    return names


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: it may stand for any address


def answer_problem(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The problem document of whatever went wrong. What is not in the table is logged whole and answered without."""
    known = _as_problem(error)
    instance = None
    if known is None or isinstance(known, DatabaseUnavailable):
        # Where the database is, and what went wrong in here, is for the operator alone.
        known = ReadieError() if known is None else DatabaseUnavailable("it does not answer", "Try again later.")
        instance = f"urn:readie:request:{request.state.request_id}"
        log.error("request failed", method=request.method, path=request.url.path, exc_info=error)
    headers = {}
    if isinstance(known, NoCapacity | NoWorkers | SessionBusy):
        headers["Retry-After"] = "1"
    if isinstance(known, RateLimited):
        headers["Retry-After"] = str(known.retry_after)
    if isinstance(known, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, HTTPException) and error.headers and "Allow" in error.headers:
        headers["Allow"] = error.headers["Allow"]
    body = msgspec.json.encode(problem_of(known, instance))
    return Response(body, status_code=known.status, media_type=PROBLEM, headers=headers)


def _as_problem(error: Exception) -> ReadieError | None:
    match error:
        case ReadieError():
            return error
        case ValidationException(extra=[{"key": "data", "message": "'data'"}]):
            return BadRequest("the request has no body")
        case ValidationException(extra=list() as found):
            # `state` is a name of Litestar's: the handler calls that parameter in_state.
            names = [str(each.get("key", "")).replace("in_state", "state") for each in found]
            places = [
                ": ".join(filter(None, [name, each.get("message")])) for name, each in zip(names, found, strict=True)
            ]
            return BadRequest("; ".join(places) or error.detail)
        case HTTPException(status_code=404):
            return NotFound("no such route")
        case HTTPException(status_code=405):
            return MethodNotAllowed("the route is there, but not for this method")
        case HTTPException(status_code=413):
            return PayloadTooLarge("the body is larger than MAX_PAYLOAD and the rest of a request can be")
        case HTTPException(status_code=500, detail="client disconnected prematurely"):
            return BadRequest("the body ended before it was whole")
        case HTTPException(status_code=status) if 400 <= status < 500:
            return BadRequest(error.detail)
    return None


@asynccontextmanager
async def _threads(_application: Litestar) -> AsyncIterator[None]:
    """Threads for what requests do in the database: asyncio's own number of them goes by the processors alone."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="request"))
    yield


def _sweeping(serving: Serving) -> Callable[[Litestar], Any]:
    """Sweeps while the application runs."""
    settings, database, wake_ups = serving.settings, serving.database, serving.wake_ups

    async def sweep_forever() -> None:
        pruned_at = -PRUNE_INTERVAL
        listening_since = swept_at = time.monotonic()
        while True:
            if time.monotonic() - swept_at > settings.sweep_interval + STALLED_SECONDS:  # this process stood still
                listening_since = time.monotonic()
            swept_at = time.monotonic()
            try:
                await sync_to_thread(mark_read, database, serving.were_read)
                # Who could not be heard is not silent: after a start, and while the database is away, all get their time.
                heard = time.monotonic() - listening_since >= settings.worker_ttl
                wake_ups.ring(*await sync_to_thread(sweep, database, settings, heard=heard))
                if time.monotonic() - pruned_at >= PRUNE_INTERVAL:
                    await sync_to_thread(prune, database, settings)
                    pruned_at = time.monotonic()
            except DatabaseUnavailable as error:  # for a while: a later sweep does the work
                log.warning("sweep put off", reason=error.detail)
                listening_since = time.monotonic()
            except Exception:
                log.exception("sweep failed")
            await asyncio.sleep(settings.sweep_interval)

    @asynccontextmanager
    async def sweeping(_app: Litestar) -> AsyncIterator[None]:
        task = asyncio.create_task(sweep_forever())
        yield
        wake_ups.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    return sweeping


def _relaying(database: Database, wake_ups: WakeUps) -> Callable[[Litestar], Any]:
    """Wakes and is woken by other routers while the application runs."""

    @asynccontextmanager
    async def relayed(_app: Litestar) -> AsyncIterator[None]:
        with relaying(database, wake_ups):
            yield

    return relayed


async def refuse_other_schemas(connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
    """A guard: below /schema Litestar has a page of its own for what is not there, whose route alone has a parameter."""
    if "path" in connection.path_params:
        raise NotFound("no such route")


def _openapi() -> OpenAPIConfig:
    return OpenAPIConfig(
        title="Readie router",
        version=this_version(),
        openapi_router=Router("/schema", route_handlers=[], guards=[refuse_other_schemas], include_in_schema=False),
        render_plugins=[JsonRenderPlugin(path=["/", "/openapi.json"])],
        components=Components(security_schemes={"token": SecurityScheme(type="http", scheme="bearer")}),
        security=[{"token": []}],
        use_handler_docstrings=True,
    )
