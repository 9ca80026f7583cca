"""The dashboard at `/`: pages for people, made on the server, that work without anything from elsewhere.

It changes nothing in the cluster. Where a token is set for clients, who signs in with it sees the pages (`sign_in.py`);
the JSON API goes on asking for the token itself.
"""

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import msgspec
from litestar import Request, Response, Router, get
from litestar.connection import ASGIConnection
from litestar.di import Provide
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath
from litestar.response import Redirect

from app.api import Serving
from app.dashboard import calls, catalogue, cluster, explain, sign_in, sql
from app.dashboard.cluster import ClusterWatch
from app.dashboard.render import HEADERS, STATIC, page
from app.dashboard.sign_in import MOST_NEXT, URL_CHARACTERS
from readie.errors import NotFound, Unauthorized
from readie.wire import Problem

Guard = Callable[[ASGIConnection[Any, Any, Any, Any], BaseRouteHandler], Awaitable[None]]
Answer = Callable[[Request[Any, Any, Any], Exception], Response[bytes]]

#: Bytes of a form: what the longest code that is taken comes to in one.
MOST_BODY = 2 * 2**20

#: Seconds that browsers keep a file whose address has its hash.
_A_YEAR = 365 * 86_400


def make_dashboard(serving: Serving, check_rate: Guard, answer_problem: Answer) -> Router:
    """The dashboard's routes. Their errors are pages; `answer_problem` says what went wrong, as for the API."""
    token = serving.settings.auth_token
    watch = ClusterWatch(serving.database, serving.wake_ups)

    def answer_page(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
        known = answer_problem(request, error)
        problem = msgspec.json.decode(known.content, type=Problem)
        in_part = "hx-request" in request.headers
        if isinstance(error, Unauthorized):
            comes_back = request.method == "GET" and not in_part
            to = f"/sign-in?next={quote(_target_of(request))}" if comes_back else "/sign-in"
            if in_part:  # the page around it is to go there
                return Response("", status_code=401, headers={**HEADERS, "HX-Redirect": to})
            if request.url.path != "/events":  # which no page could follow
                return Redirect(to, status_code=303, headers=HEADERS)
        answer = page("problem_part.html" if in_part else "problem.html", status_code=problem.status, problem=problem)
        answer.headers |= HEADERS | {name: value for name, value in known.headers.items() if name == "Retry-After"}
        return answer

    pages = Router(
        "/",
        route_handlers=[
            cluster.show_cluster,
            cluster.follow_cluster,
            calls.show_calls,
            calls.show_call,
            catalogue.show_catalogue,
            catalogue.search_items,
            explain.show_explain,
            explain.explain_text,
            sql.show_sql,
            sql.ask_sql,
        ],
        guards=[check_rate, sign_in.sign_in_guard(token)],
        dependencies={"watch": Provide(lambda: watch, sync_to_thread=False)},
    )
    door = Router("/", route_handlers=[sign_in.show_sign_in, sign_in.sign_in, sign_in.sign_out], guards=[check_rate])
    return Router(
        "/",
        route_handlers=[pages, door, read_static],
        exception_handlers={Exception: answer_page},
        response_headers=HEADERS,
        request_max_body_size=MOST_BODY,
        include_in_schema=False,
    )


def _target_of(request: Request[Any, Any, Any]) -> str:
    """The page that was asked for, with its query where that is not too long to come back to."""
    path, query = quote(request.url.path), quote(request.scope["query_string"], safe=URL_CHARACTERS)
    return f"{path}?{query}" if query and len(path) + len(query) < MOST_NEXT else path


@get("/static/{name:str}", operation_id="readStatic", sync_to_thread=False)
def read_static(name: FromPath[str]) -> Response[bytes]:
    """A file that the pages load: style, script, icon. It has nothing of the cluster, so that anybody may read it."""
    if name not in STATIC:
        raise NotFound("no such file")
    content, media_type = STATIC[name]
    headers = {"Cache-Control": f"public, max-age={_A_YEAR}, immutable"}
    return Response(content, media_type=media_type, headers=headers)
