"""Talking to a router over HTTP: what the client, the agents and the command lines have in common."""

import ssl
from functools import cache
from typing import Any, TypeVar

import httpx
import msgspec

from readie.errors import BadSetting, ReadieError, RouterNotTrusted, RouterUnreachable, problem_from
from readie.settings import DEFAULT_ROUTER_URL
from readie.wire import Problem

MESSAGEPACK = "application/vnd.msgpack"

T = TypeVar("T")


def connection(
    router_url: str, token: str, router_ca: str | None = None, *, named: str = "ROUTER_URL="
) -> dict[str, Any]:
    """What an HTTP client for this router is made of: base URL, headers, certificates, whether proxies count.

    Raises `BadSetting`, which says the URL behind `named`, where it was read, or ROUTER_CA.
    """
    way_out = f"Give a URL such as {DEFAULT_ROUTER_URL}."
    try:
        url = httpx.URL(router_url)
    except httpx.InvalidURL as error:
        raise BadSetting(f"{named}{router_url!r}: {error}", way_out) from None
    if url.scheme not in {"http", "https"} or not url.host or (url.port or 0) > 65535:
        raise BadSetting(f"{named}{router_url!r} is no URL of a router", way_out)
    here = url.host in {"127.0.0.1", "::1", "localhost"}  # no proxy can reach it
    return {
        "base_url": url,
        "headers": {"Authorization": f"Bearer {token}"} if token else {},
        "verify": _certificates(router_ca),
        "trust_env": not here,
    }


@cache  # loading them takes longer than a whole call
def _certificates(router_ca: str | None) -> ssl.SSLContext:
    if router_ca is None:
        return httpx.create_ssl_context()
    try:
        return ssl.create_default_context(cafile=router_ca)
    except OSError as error:  # ssl.SSLError is one, too
        reason = "there is no certificate in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise BadSetting(f"ROUTER_CA={router_ca!r}: {reason}", "Name a file of certificates (PEM).") from error


def unreachable(router_url: object, error: httpx.HTTPError) -> RouterUnreachable:
    """What it means that a router cannot be asked: nobody answers there, or somebody whose certificate is not trusted."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return RouterNotTrusted(f"{router_url}: {cause.verify_message}")
        cause = cause.__cause__ or cause.__context__
    return RouterUnreachable(f"{router_url}: {type(error).__name__}: {error}")


def read_answer(answer: httpx.Response, kind: type[T]) -> T:
    """The record in an answer, JSON or MessagePack. Raises what its problem document says, or `RouterUnreachable`."""
    if not answer.is_success:
        raise problem_in(answer)
    try:
        return _decode(answer, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # also what is valid, but something else
        raise _no_router(answer) from None


def problem_in(answer: httpx.Response) -> ReadieError:
    """What the problem document of an answer says; of one that has none: that no router answers there."""
    try:
        problem = _decode(answer, Problem)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _no_router(answer)
    said = problem.detail or problem.title
    # what the router's log has the lines under
    return problem_from(problem.type, f"{said} ({problem.instance})" if problem.instance else said, problem.way_out)


def retry_after(answer: httpx.Response) -> float:
    """The seconds that an answer asks to wait; 1 where it does not say."""
    try:
        return max(0.0, float(answer.headers.get("retry-after", "1")))
    except ValueError:  # a date: no router says that
        return 1.0


def _decode(answer: httpx.Response, kind: type[T]) -> T:
    decode = msgspec.msgpack.decode if "msgpack" in answer.headers.get("content-type", "") else msgspec.json.decode
    return decode(answer.content, type=kind)


def _no_router(answer: httpx.Response) -> RouterUnreachable:
    message = f"{answer.url.copy_with(query=None)} answered {answer.status_code}, and not as a router does"
    return RouterUnreachable(message, "Set ROUTER_URL to a Readie router.")
