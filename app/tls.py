"""The router's certificate: what TLS_CERT and TLS_KEY name."""

import ssl
from pathlib import Path

from app.settings import RouterSettings
from readie.errors import BadSetting


def server_certificate(settings: RouterSettings) -> ssl.SSLContext | None:
    """What TLS is served with; None: it is not.

    Raises `BadSetting` where one of the two is missing or cannot be read, or where they do not belong together.
    """
    files = {"TLS_CERT": settings.tls_cert, "TLS_KEY": settings.tls_key}
    missing = [name for name, file in files.items() if file is None]
    if len(missing) == len(files):
        return None
    if missing:
        raise BadSetting(f"{missing[0]} is not set, and the other of the two is", "Set TLS_CERT and TLS_KEY, or none.")
    for name, file in files.items():
        try:
            Path(file or "").read_bytes()
        except OSError as error:
            raise BadSetting(f"{name}={file!r}: {error.strerror}", "Name a file that the router can read.") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # without a password, which would be asked for on the terminal
        context.load_cert_chain(settings.tls_cert or "", settings.tls_key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise BadSetting(
            f"TLS_CERT={settings.tls_cert!r} and TLS_KEY={settings.tls_key!r}: {error}",
            "Name a certificate (with those that lead to its issuer after it) and its key without a password, both PEM.",
        ) from error
    return context
