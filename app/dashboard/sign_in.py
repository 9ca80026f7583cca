"""Signing in: who shows the clients' token gets a cookie, good for the dashboard's pages and for nothing else.

The cookie is the time of its end and an HMAC of that with the token as its key. So the token is not in it, no router has
to remember it, any router of a cluster believes it, and with another token all are void.
"""

import hmac
import re
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

from litestar import Response, get, post
from litestar.connection import ASGIConnection
from litestar.datastructures import Cookie
from litestar.di import NamedDependency
from litestar.handlers import BaseRouteHandler
from litestar.params import QueryParameter
from litestar.response import Redirect

from app.api import WireRequest, check_text
from app.dashboard.render import page, pass_ends
from app.settings import RouterSettings
from readie.errors import Unauthorized

COOKIE: Final = "readie-dashboard"

#: Seconds that a cookie is good for.
LIFETIME: Final = 12 * 3600

#: What an address may have as it is (RFC 3986), and characters of one to come back to at most.
URL_CHARACTERS: Final = "!$&'()*+,-./:;=?@_~%"
MOST_NEXT: Final = 16_000

#: Where to go after signing in: a page of ours, never another host's.
_OURS = re.compile(rf"/(?!/)[\w{re.escape(URL_CHARACTERS)}]*", re.ASCII)

_Next = Annotated[str, QueryParameter(name="next", max_length=MOST_NEXT)]


def make_pass(token: str, until: int) -> str:
    """What the cookie of who knows the token says, until that second of the epoch."""
    digest = hmac.new(token.encode(), f"readie dashboard until {until}".encode(), "sha256").hexdigest()
    return f"{until}.{digest}"


def read_pass(token: str, said: str) -> int | None:
    """When a cookie ends, a second of the epoch; None: it has ended, or was not made with this token."""
    until, _, _ = said.partition(".")
    if not re.fullmatch(r"[0-9]{1,12}", until) or int(until) <= time.time():
        return None
    is_ours = hmac.compare_digest(make_pass(token, int(until)).encode(), said.encode(errors="replace"))
    return int(until) if is_ours else None


def sign_in_guard(
    token: str | None,
) -> Callable[[ASGIConnection[Any, Any, Any, Any], BaseRouteHandler], Awaitable[None]]:
    """A guard that lets those through who have signed in; None: all."""

    async def check_pass(connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
        ends = None if token is None else read_pass(token, connection.cookies.get(COOKIE, ""))
        if token is not None and ends is None:
            raise Unauthorized("nobody has signed in, or not for a while", "Sign in at /sign-in.")
        pass_ends.set(ends)

    return check_pass


@get("/sign-in", operation_id="showSignIn", sync_to_thread=False)
def show_sign_in(settings: NamedDependency[RouterSettings], next_page: _Next = "/") -> Response[str] | Redirect:
    """The form that asks for the clients' token; where none is set there is nothing to sign in to."""
    if settings.auth_token is None:
        return Redirect("/", status_code=303)
    return page("sign_in.html", next_page=next_page, refused=False)


@post("/sign-in", operation_id="signIn", status_code=200)
async def sign_in(request: WireRequest, settings: NamedDependency[RouterSettings]) -> Response[str] | Redirect:
    """Compares the token, in constant time, and sets the cookie."""
    form = await request.form()
    sent, next_page = (str(form.get(name, "")) for name in ("token", "next"))
    check_text(sent + next_page)
    token = settings.auth_token
    if token is not None and not hmac.compare_digest(sent.encode(), token.encode()):
        return page("sign_in.html", status_code=401, next_page=next_page, refused=True)
    answer = Redirect(next_page if _OURS.fullmatch(next_page) else "/", status_code=303)
    if token is not None:
        answer.set_cookie(_cookie(make_pass(token, int(time.time()) + LIFETIME), LIFETIME, request, settings))
    return answer


@post("/sign-out", operation_id="signOut", status_code=303, sync_to_thread=False)
def sign_out(request: WireRequest, settings: NamedDependency[RouterSettings]) -> Redirect:
    """Has the browser forget the cookie."""
    answer = Redirect("/sign-in", status_code=303)
    answer.set_cookie(_cookie("", 0, request, settings))
    return answer


def _cookie(value: str, seconds: int, request: WireRequest, settings: RouterSettings) -> Cookie:
    by_tls = settings.tls_cert is not None or request.url.scheme == "https"
    return Cookie(key=COOKIE, value=value, path="/", max_age=seconds, httponly=True, samesite="strict", secure=by_tls)
