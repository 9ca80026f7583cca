"""What all routes share: bodies as JSON or MessagePack, tokens, who answers what.

Bodies are decoded here once, straight into the wire type that the route names, and strictly.
"""

import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from hmac import compare_digest
from ipaddress import ip_address
from math import ceil, isfinite
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec
from limits import RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter
from litestar import Request, Response
from litestar._openapi.schema_generation import SchemaCreator
from litestar._openapi.schema_generation.plugins.struct import StructSchemaPlugin
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import Schema
from litestar.params import PathParameter, QueryParameter
from litestar.response.base import ASGIResponse
from litestar.typing import FieldDefinition

from app.database import Database
from app.groups import Groups
from app.keys import Asked
from app.lease import Taker
from app.metrics import Metrics
from app.settings import RouterSettings
from app.waiting import WakeUps
from readie.errors import BadFlavor, BadRequest, ForeignPage, RateLimited, Unauthorized
from readie.flavor import Flavor
from readie.wire import MAX_NAME, CallPlaced, ExplainRequest, Explanation, Output, Problem, Result

_ENUM = {"enum": [flavor.value for flavor in Flavor]}

#: A flavor in a path and in a query: described as one of two, and refused by `parse_flavor`, with what is accepted.
FlavorPath = Annotated[str, PathParameter(schema_extra=_ENUM)]
FlavorQuery = Annotated[str | None, QueryParameter(description="default: both", schema_extra=_ENUM)]

#: A time in a query, for `parse_time`: as a datetime, numbers would be times, too.
Time = Annotated[
    str | None,
    QueryParameter(
        description="with an offset from UTC: 2026-11-30T12:00:00Z",
        schema_extra={"type": "string", "format": "date-time"},
    ),
]

JSON: Final = "application/json"
#: The registered name first; the others are in use.
MSGPACK: Final = ("application/vnd.msgpack", "application/msgpack", "application/x-msgpack")
PROBLEM: Final = "application/problem+json"

#: Seconds of one window of RATE_LIMIT: a burst may have as much as so many seconds.
RATE_WINDOW: Final = 10

#: In the OpenAPI document: whatever goes wrong is answered with a problem document.
PROBLEMS: Final = {
    status: ResponseSpec(Problem, description="A problem document", media_type=PROBLEM, generate_examples=False)
    for status in (400, 401, 404, 409, 410, 413, 422, 429, 500, 503)
}


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What the routes of an application share, in one dependency: Litestar starts a task for each of several."""

    database: Database
    settings: RouterSettings
    wake_ups: WakeUps
    metrics: Metrics
    naming: Groups[Flavor | str, str | None]  # a flavor or a SHA-256; the SHA-256 of its catalogue, if there is one
    explaining: Groups[ExplainRequest, Explanation]
    placing: Groups[Asked, CallPlaced]
    accepting: Groups[Taker, None]
    named: dict[str, tuple[int | None, str | None]] = field(default_factory=dict)  # the database's version too
    were_read: deque[str] = field(default_factory=deque)  # calls whose ends were read, to be written down
    ending: Groups[tuple[str, Result], list[str]]  # placement and its result; topics of who waits for that


class WireSchemas(StructSchemaPlugin):
    """How the OpenAPI document describes wire types: it says, too, which refuse fields that they do not have."""

    def to_openapi_schema(self, field_definition: FieldDefinition, schema_creator: SchemaCreator) -> Schema:
        schema = super().to_openapi_schema(field_definition, schema_creator)
        if field_definition.annotation.__struct_config__.forbid_unknown_fields:
            schema.additional_properties = False
        return schema


class WireRequest(Request[Any, Any, Any]):
    """A request whose body is JSON or MessagePack, as its Content-Type says (JSON where it says nothing)."""

    async def json(self) -> Any:
        """The body as the type that the route's `data` has. Raises `BadRequest` and `BadFlavor`."""
        content_type = self.content_type[0].lower()
        field = self.route_handler.parsed_data_field
        kind = Any if field is None else field.annotation
        if content_type in MSGPACK:
            decode: Callable[..., Any] = msgspec.msgpack.decode
        elif content_type in ("", JSON) or content_type.endswith("+json"):
            decode = msgspec.json.decode
        else:
            raise BadRequest(f"Content-Type {content_type} is not served", f"Send {JSON} or {MSGPACK[0]}.")
        try:
            body = decode(await self.body(), type=kind)
            # What agents relay is whatever a program prints and raises; all else goes into the database as text.
            _check(body, text=not isinstance(body, Output | Result))
        except RecursionError:
            raise BadRequest("the body is nested too deeply") from None
        except msgspec.MsgspecError as error:
            if str(error).endswith("`$.flavor`"):
                raise BadFlavor(str(error)) from error
            raise BadRequest(str(error)) from error
        return body


def _check(value: Any, *, text: bool) -> None:
    """Refuses what decoders let through and databases do not hold: NUL in text, numbers that are not finite."""
    if isinstance(value, str):
        if text:
            check_text(value)
    elif isinstance(value, float):
        if not isfinite(value):
            raise BadRequest(f"{value} is not a finite number")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check(key, text=text)
            _check(inner, text=text)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, text=text)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _check(getattr(value, name), text=text)


def parse_time(text: str | None) -> datetime | None:
    """The time that a text is. Raises `BadRequest`, also for one that does not say its offset from UTC."""
    way_out = "Write 2026-11-30T12:00:00Z, say."
    if text is None:
        return None
    try:
        time = msgspec.convert(text, datetime)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{text!r} is no time: {error}", way_out) from error
    if time.tzinfo is None:
        raise BadRequest(f"{text} says no offset from UTC", way_out)
    return time


def check_text(text: str) -> None:
    """Raises `BadRequest` for text with NUL or a lone surrogate: no database holds it."""
    if "\0" in text:
        raise BadRequest("a string contains NUL")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRequest("a string contains a lone surrogate") from None


class WireResponse(Response[Any]):
    """An answer in JSON, or in MessagePack for who asks for that."""

    def to_asgi_response(self, app: Any, request: Request[Any, Any, Any], **options: Any) -> ASGIResponse:
        """The answer in the first media type of the request's Accept that is served."""
        if (self.media_type or options.get("media_type") or JSON) == JSON:
            self.media_type = _accepted(request.headers.get("accept", ""))
        return super().to_asgi_response(app, request, **options)

    def render(self, content: Any, media_type: str, *encoders: Any) -> bytes:
        """The bytes of an answer; none of one that says nothing."""
        if content is None:
            return b""
        if media_type in MSGPACK:
            return msgspec.msgpack.encode(content)
        return super().render(content, media_type, *encoders)


def _accepted(accept: str) -> str:
    for part in accept.split(","):
        media_type = part.partition(";")[0].strip().lower()
        if media_type in MSGPACK:
            return media_type
        if media_type in (JSON, "application/*", "*/*"):
            break
    return JSON


# Guards are asynchronous although they wait for nothing: Litestar runs others in a thread, each for each request.


def token_guard(token: str | None) -> Callable[[ASGIConnection[Any, Any, Any, Any], BaseRouteHandler], Awaitable[None]]:
    """A guard that lets requests with this bearer token through; None: all."""
    wanted = None if token is None else f"Bearer {token}".encode()

    async def check_token(connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
        sent = connection.headers.get("authorization", "").encode(errors="replace")
        if wanted is not None and not compare_digest(sent, wanted):
            raise Unauthorized("no valid token came with the request")

    return check_token


def rate_guard(
    requests_per_second: float | None,
) -> Callable[[ASGIConnection[Any, Any, Any, Any], BaseRouteHandler], Awaitable[None]]:
    """A guard that lets each address have so many requests, counted in windows of ten seconds; None: any number."""
    if requests_per_second is None:
        return _let_through
    most = RateLimitItemPerSecond(ceil(requests_per_second * RATE_WINDOW), RATE_WINDOW)
    limiter = FixedWindowRateLimiter(MemoryStorage())

    async def check_rate(connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
        address = connection.client.host if connection.client else ""
        if not limiter.hit(most, address):
            seconds = max(1, ceil(limiter.get_window_stats(most, address).reset_time - time.time()))
            way_out = f"Try again in {seconds} seconds, or raise RATE_LIMIT on the router."
            raise RateLimited(f"{most.amount} requests came within {RATE_WINDOW} seconds", way_out, seconds)

    return check_rate


async def _let_through(_connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
    pass


def page_guard(token: str | None) -> Callable[[ASGIConnection[Any, Any, Any, Any], BaseRouteHandler], Awaitable[None]]:
    """A guard against pages of other sites, in a browser that reaches this router.

    Such a page may send a request that changes something without asking first; browsers say where it comes from. It
    reads no answer, unless its own name leads here (DNS rebinding). Whom that must not help is a router whose clients
    need no token: to it only addresses are its own, and names that no public name server gives.
    """

    async def check_page(connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
        headers = connection.headers
        host, origin = headers.get("host", ""), headers.get("origin")
        if connection.scope.get("method", "GET") not in {"GET", "HEAD"}:
            site = headers.get("sec-fetch-site")
            foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
            if site not in {None, "same-origin", "none"} or (site is None and foreign):
                raise ForeignPage(f"it comes from a page of {origin or 'another site'}")
        if token is None and not _is_local(host):
            way_out = "Ask for the router by an address or as localhost, or set AUTH_TOKEN."
            raise ForeignPage(f"{host} may be anybody's name for this router", way_out)

    return check_page


def _is_local(host: str) -> bool:
    name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    with suppress(ValueError):
        return bool(ip_address(name))
    return "." not in name or name.endswith((".localhost", ".local", ".internal"))


async def check_path(connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
    """A guard: what is in the path and in the query is text that a database holds, and names are no longer than that."""
    path: str = connection.scope["path"]
    check_text(path)
    if connection.scope["query_string"]:
        for _, value in connection.query_params.multi_items():
            check_text(value)
    # No name has a / but an item's key, which comes last.
    if len(path) > 2 * MAX_NAME or any(len(name) > MAX_NAME for name in path.split("/")):
        raise BadRequest(f"the path is longer than that of any name of {MAX_NAME} characters")
