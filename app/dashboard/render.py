"""Templates and the files that pages load: everything is in the package, nothing is fetched from elsewhere."""

import hashlib
from contextvars import ContextVar
from datetime import datetime
from importlib.resources import files
from typing import Any, Final

import jinja2
from litestar import MediaType, Response

#: Name of a file → its media type.
_STATIC: Final = {
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "theme.js": "text/javascript",
    "htmx.min.js": "text/javascript",
    "sse.min.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}

#: Name of a file → its bytes and its media type. They are few and small.
STATIC: Final = {
    name: (files(__name__.rpartition(".")[0]).joinpath("static", name).read_bytes(), media_type)
    for name, media_type in _STATIC.items()
}

#: On every answer: nothing but what this router serves is loaded, nothing inline runs, nobody frames it.
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}

#: When the cookie ends with which the request that is being answered came, a second of the epoch; None: nobody had to
#: sign in. With it pages offer to sign out.
pass_ends: ContextVar[int | None] = ContextVar("pass_ends", default=None)


def static_url(name: str) -> str:
    """Where a file is, with a part of its SHA-256: browsers keep it until it changes."""
    return f"/static/{name}?v={hashlib.sha256(STATIC[name][0]).hexdigest()[:16]}"


def format_size(size_bytes: float | None) -> str:
    """1.5 GB; MB are 10⁶ bytes. None: —."""
    if size_bytes is None:
        return "—"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size_bytes) >= scale:
            return (
                f"{size_bytes / scale:.3g} {unit}" if size_bytes < 999.5 * scale else f"{size_bytes / scale:.0f} {unit}"
            )
    return f"{size_bytes:.0f} B"


def format_ns(nanoseconds: float | None) -> str:
    """Nanoseconds as 1.24 s, 3.5 ms or 80 µs. None: —."""
    if nanoseconds is None:
        return "—"
    if abs(nanoseconds) >= 1e8:
        return f"{nanoseconds / 1e9:,.2f} s"
    if abs(nanoseconds) >= 1e5:
        return f"{nanoseconds / 1e6:.1f} ms"
    return f"{nanoseconds / 1e3:.0f} µs" if nanoseconds else "0 s"


def format_time(time: datetime) -> str:
    """2026-11-30 14:05:12, with the offset from UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z").strip()


_environment = jinja2.Environment(
    loader=jinja2.PackageLoader(__name__.rpartition(".")[0]),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters |= {"size": format_size, "ns": format_ns, "time": format_time}
_environment.globals |= {"static": static_url}


def render(template: str, **context: Any) -> str:
    """The text of a template; whatever is put into it is escaped."""
    return _environment.get_template(template).render(context, signed_in=pass_ends.get() is not None)


def page(template: str, *, status_code: int = 200, **context: Any) -> Response[str]:
    """A page or a part of one. It is of its moment: nobody is to keep it."""
    body = render(template, **context)
    return Response(body, media_type=MediaType.HTML, status_code=status_code, headers={"Cache-Control": "no-store"})
