"""Readie: remote Python calls that start at once, because what they import is already loaded."""

from typing import TYPE_CHECKING, Any

from readie.errors import (
    BadBudget,
    BadFunction,
    BadRequest,
    BadRequirement,
    BadResult,
    BadSetting,
    BadSize,
    CallCancelled,
    CallError,
    CallTimeout,
    InstallFailed,
    NoCapacity,
    NoWorkers,
    OutOfMemory,
    PayloadTooLarge,
    PlacementError,
    PythonMismatch,
    RateLimited,
    ReadieError,
    RemoteError,
    ResultTooLarge,
    RouterNotTrusted,
    RouterStopping,
    RouterUnreachable,
    SandboxFailed,
    SessionBusy,
    SessionConflict,
    SessionExpired,
    Unauthorized,
    Unavailable,
    UnknownCheckpoint,
    UnknownResource,
    UsageError,
    WorkerLost,
)

if TYPE_CHECKING:
    from readie.client import Call as Call
    from readie.client import Remote as Remote
    from readie.client import remote as remote
    from readie.resources import resource as resource
    from readie.restore import after_restore as after_restore

__all__ = [
    "BadBudget",
    "BadFunction",
    "BadRequest",
    "BadRequirement",
    "BadResult",
    "BadSetting",
    "BadSize",
    "Call",
    "CallCancelled",
    "CallError",
    "CallTimeout",
    "InstallFailed",
    "NoCapacity",
    "NoWorkers",
    "OutOfMemory",
    "PayloadTooLarge",
    "PlacementError",
    "PythonMismatch",
    "RateLimited",
    "ReadieError",
    "Remote",
    "RemoteError",
    "ResultTooLarge",
    "RouterNotTrusted",
    "RouterStopping",
    "RouterUnreachable",
    "SandboxFailed",
    "SessionBusy",
    "SessionConflict",
    "SessionExpired",
    "Unauthorized",
    "Unavailable",
    "UnknownCheckpoint",
    "UnknownResource",
    "UsageError",
    "WorkerLost",
    "after_restore",
    "remote",
    "resource",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import readie.units` in a worker does not load the HTTP client.
    if name in {"Call", "Remote", "remote"}:
        from readie import client

        return getattr(client, name)
    if name == "resource":
        from readie.resources import resource

        return resource
    if name == "after_restore":
        from readie.restore import after_restore

        return after_restore
    raise AttributeError(f"module 'readie' has no attribute {name!r}")
