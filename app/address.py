"""The address that a router listens on."""

import errno
import socket
from contextlib import ExitStack

from app.settings import RouterSettings
from readie.errors import BadSetting, PortTaken


def listen(settings: RouterSettings) -> socket.socket:
    """A socket that listens on ROUTER_HOST and ROUTER_PORT. Raises `PortTaken`, `BadSetting`."""
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        with ExitStack() as on_failure:
            on_failure.enter_context(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
            on_failure.pop_all()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(f"another process listens on {where}") from error
        raise BadSetting(f"ROUTER_HOST and ROUTER_PORT: cannot listen on {where}: {error.strerror}") from error
    return listener
