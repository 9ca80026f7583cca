"""Each request: its id, which is in its answer and in every line that is logged while it is served; its count; and
its row in the audit log, if it administers something.
"""

import re
import time
from collections import deque
from uuid import uuid4

import structlog
from litestar.concurrency import sync_to_thread
from litestar.datastructures import MutableScopeHeaders
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from app.audit import ADMINISTRATIVE, write_audit
from app.database import Database
from app.metrics import Metrics
from readie.errors import RateLimited, Unauthorized

#: The header with a request's id, in requests and in answers.
HEADER = "X-Request-Id"

_SENT = HEADER.lower().encode()
_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


#: Requests without the token that one router writes to the database at most in a minute: all are in the log.
MOST_REFUSED = 60

#: Characters of an address and of a path that are kept at most.
_MOST = 1024


def follow_requests(serve: ASGIApp, database: Database, metrics: Metrics) -> ASGIApp:
    """Serves requests with their ids: what the client sent as one, or a new one. Those that no route has, too."""
    refused: deque[float] = deque(maxlen=MOST_REFUSED)  # when they came, time.monotonic()

    def is_flood(status: int) -> bool:
        """Whether a request without the token is one too many: whoever sends those is not to fill the database."""
        if status != Unauthorized.status:
            return False
        now = time.monotonic()
        if len(refused) == MOST_REFUSED and now < refused[0] + 60:
            return True
        refused.append(now)
        return False

    async def serve_one(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await serve(scope, receive, send)
            return
        sent = next((value for name, value in scope["headers"] if name == _SENT), b"")
        request_id = sent.decode() if _ID.fullmatch(sent) else uuid4().hex
        scope["state"]["request_id"] = request_id

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableScopeHeaders.from_message(message)[HEADER] = request_id
                route, status = _route_of(scope), message["status"]
                metrics.count_request(route, status)
                if route in ADMINISTRATIVE and status != RateLimited.status:  # a flood is not to reach the database
                    request: dict[str, str | int] = {
                        "address": (scope["client"] or ("",))[0][:_MOST],
                        "action": route,
                        # as it was sent: decoded, it may be no text
                        "target": scope["raw_path"].partition(b"?")[0].decode(errors="replace")[:_MOST],
                        "status": status,
                    }
                    await sync_to_thread(write_audit, None if is_flood(status) else database, request_id, **request)
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            await serve(scope, receive, answer)

    return serve_one


def _route_of(scope: Scope) -> str:
    """The operation id of the route that a request has; `none`: it has no route."""
    handler = scope.get("route_handler")
    if handler is None:
        return "none"
    operation_id = getattr(handler, "operation_id", None)
    return operation_id if isinstance(operation_id, str) else "schema"
