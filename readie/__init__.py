"""Readie: remote Python calls that start at once, because what they import is already loaded."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from readie.client import remote as remote

__all__ = ["remote"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import readie.units` in a worker does not load the HTTP client.
    if name == "remote":
        from readie.client import remote

        return remote
    raise AttributeError(f"module 'readie' has no attribute {name!r}")
