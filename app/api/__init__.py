"""What all routes share: bodies as JSON or MessagePack, tokens, who answers what.

Bodies are decoded here once, straight into the wire type that the route names, and strictly.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Any, Final

import msgspec
from litestar import Request, Response
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.response.base import ASGIResponse

from app.database import Database
from app.groups import Groups
from app.settings import RouterSettings
from app.waiting import WakeUps
from readie.errors import BadFlavor, BadRequest, Unauthorized
from readie.flavor import Flavor
from readie.wire import MAX_NAME, CallPlaced, CallRequest, ExplainRequest, Explanation, Output, Problem, Result

JSON: Final = "application/json"
#: The registered name first; the others are in use.
MSGPACK: Final = ("application/vnd.msgpack", "application/msgpack", "application/x-msgpack")
PROBLEM: Final = "application/problem+json"

#: In the OpenAPI document: whatever goes wrong is answered with a problem document.
PROBLEMS: Final = {
    status: ResponseSpec(Problem, description="A problem document", media_type=PROBLEM, generate_examples=False)
    for status in (400, 401, 404, 409, 410, 413, 422, 500, 503)
}


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What the routes of an application share, in one dependency: Litestar starts a task for each of several."""

    database: Database
    settings: RouterSettings
    wake_ups: WakeUps
    naming: Groups[Flavor | str, str | None]  # a flavor or a SHA-256; the SHA-256 of its catalogue, if there is one
    explaining: Groups[ExplainRequest, Explanation]
    placing: Groups[tuple[str, CallRequest], CallPlaced]  # the call's id, and what it asks for
    accepting: Groups[tuple[str, str, str | None], None]  # placement, worker, the incarnation of its agent
    named: dict[str, tuple[int | None, str | None]] = field(default_factory=dict)  # the database's version too
    ending: Groups[tuple[str, Result], list[str]]  # placement and its result; topics of who waits for that


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
        if not math.isfinite(value):
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


async def check_path(connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
    """A guard: names in the path are text that a database holds, and no longer than names are."""
    path: str = connection.scope["path"]
    check_text(path)
    # No name has a / but an item's key, which comes last.
    if len(path) > 2 * MAX_NAME or any(len(name) > MAX_NAME for name in path.split("/")):
        raise BadRequest(f"the path is longer than that of any name of {MAX_NAME} characters")
