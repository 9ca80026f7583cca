"""Every problem that a user can meet, in one table, shared by the router, the client and the command lines.

ReadieError                     a sentence, the way out, and a stable `type` (RFC 9457: `urn:readie:problem:<slug>`)
├── UsageError                  the caller's input is at fault (command lines exit with 2)
│   ├── BadFlavor, BadSize, BadRequirement, BadSetting, BadRequest, BadFunction, ...
│   └── NotFound
│       └── UnknownCall, UnknownCheckpoint, UnknownResource, UnknownCatalogue, UnknownItem, UnknownWorker,
│           UnknownPlacement, UnknownSession
├── PlacementError              no worker could take the call
│   └── NoWorkers, NoCapacity, SessionBusy, SessionExpired
├── CallError                   the call was placed, and has no result
│   └── WorkerLost, OutOfMemory, CallTimeout, CallCancelled, PythonMismatch, InstallFailed, SandboxFailed, RemoteError, ...
└── Unavailable                 something else is at fault: database behind, router not reachable, rate limited, ...
"""

from typing import ClassVar

PREFIX = "urn:readie:problem:"


class ReadieError(Exception):
    """Base of all problems. Each class is one row of the table: `slug` (never changed, never reused), the HTTP
    `status`, the `title`, and `way_out`: what to do about it. The message says what happened to which thing.
    """

    slug: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"
    way_out: ClassVar[str] = "Look into the log of the process that answered; the request id finds the lines."

    def __init__(self, detail: str = "", way_out: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.hint = self.way_out if way_out is None else way_out

    def __str__(self) -> str:
        return ": ".join(filter(None, [self.title.lower() if not self.detail else "", self.detail])) + (
            f". {self.hint}" if self.hint else ""
        )

    @property
    def type(self) -> str:
        return PREFIX + self.slug


class UsageError(ReadieError):
    """The caller's input is at fault."""

    slug, status, title = "usage", 400, "Bad usage"
    way_out = ""


class BadRequest(UsageError):
    slug, status, title = "bad-request", 400, "The request is not valid"
    way_out = "The OpenAPI document at /schema describes what is accepted."


class BadQuery(UsageError):
    slug, status, title = "bad-query", 400, "The query cannot be run"
    way_out = "Write one SELECT over the views and functions that docs/sql.md lists."


class BadFlavor(UsageError):
    slug, status, title = "bad-flavor", 400, "Unknown flavor"
    way_out = "Use cpu or gpu."


class BadSize(UsageError):
    slug, status, title = "bad-size", 400, "Not a size"
    way_out = "Give whole bytes, or a whole number with Ki, Mi, Gi, Ti (1024) or K, M, G, T (1000), such as 512Mi."


class BadBudget(UsageError):
    slug, status, title = "bad-budget", 400, "The budgets contradict each other"
    way_out = "A maximum must be at least its start."


class BadRequirement(UsageError):
    slug, status, title = "bad-requirement", 400, "Not a requirement"
    way_out = "Write it as in PEP 508, for example numpy>=1.26 or requests[security]."


class BadSetting(UsageError):
    slug, status, title = "bad-setting", 400, "A setting is not valid"
    way_out = ""


class BadFunction(UsageError):
    slug, status, title = "bad-function", 400, "The function cannot be sent"
    way_out = "Pass what it needs as arguments, or create it inside the function."


class BadFile(UsageError):
    slug, status, title = "bad-file", 400, "A file cannot be used"
    way_out = ""


class RootfsUnreadable(UsageError):
    slug, status, title = "rootfs-unreadable", 400, "The root filesystem cannot be listed"
    way_out = "Give a folder with a Python of its own, such as a virtual environment: its bin/python must run."


class BadDocument(UsageError):
    """A catalogue document that is not valid version 2; nothing of it was imported."""

    slug, status, title = "bad-document", 422, "The catalogue document is not valid"
    way_out = "Nothing of it was imported. Write it again with readie-pipeline."


class BadProjection(UsageError):
    """A Parquet projection that is not whole, or not of the document beside it; the document is read instead."""

    slug, status, title = "bad-projection", 422, "The Parquet projection cannot be used"
    way_out = "The document itself can. Write both again with readie-pipeline."


class PayloadTooLarge(UsageError):
    slug, status, title = "payload-too-large", 413, "The payload is too large"
    way_out = "Send less with the call, or raise MAX_PAYLOAD on the router and the workers."


class ForeignPage(UsageError):
    slug, status, title = "foreign-page", 403, "The request comes from another site's page"
    way_out = "Send it from the router's own pages or from a program; a proxy before the router passes Host on."


class Unauthorized(UsageError):
    slug, status, title = "unauthorized", 401, "The token is missing or wrong"
    way_out = "Send Authorization: Bearer with AUTH_TOKEN (clients) or WORKER_TOKEN (agents)."


class NotFound(UsageError):
    slug, status, title = "not-found", 404, "No such thing"
    way_out = "The OpenAPI document at /schema lists every route."


class MethodNotAllowed(UsageError):
    slug, status, title = "method-not-allowed", 405, "The route does not take this method"
    way_out = "The OpenAPI document at /schema lists every route with its methods."


class UnknownCall(NotFound):
    slug, title = "unknown-call", "No such call"
    way_out = "Calls are remembered for CALLS_KEPT_DAYS, their results for an hour after they were read, a day at most."


class UnknownCheckpoint(NotFound):
    slug, status, title = "unknown-checkpoint", 422, "The catalogue lists no such checkpoint"
    way_out = "Pin one of the ids that it lists, or pin none."


class CheckpointConflict(UsageError):
    slug, status, title = "checkpoint-conflict", 409, "The pinned checkpoint has loaded what is to be installed anew"
    way_out = "Pin another checkpoint or none, or leave the requirement to the root filesystem's version."


class UnknownResource(NotFound):
    slug, title = "unknown-resource", "No such dataset, model or tokenizer"
    way_out = "Declare it in the resources.toml of the root filesystem."


class UnknownCatalogue(NotFound):
    slug, title = "unknown-catalogue", "No such catalogue"
    way_out = (
        "Put a catalogue of that flavor into CATALOGUE_DIR and send the router SIGHUP, or run readie-router import."
    )


class UnknownItem(NotFound):
    slug, title = "unknown-item", "The catalogue has no such item"
    way_out = "GET /v1/catalogues/{flavor} describes the catalogue."


class UnknownWorker(NotFound):
    slug, title = "unknown-worker", "No such worker"
    way_out = "An agent reports its status (PUT /v1/workers/{id}) before anything else."


class UnknownPlacement(NotFound):
    slug, status, title = "unknown-placement", 404, "No such placement"
    way_out = "It ended, or it was given to another worker: drop it."


class PlacementTaken(UsageError):
    slug, status, title = "placement-taken", 409, "The placement has been accepted before"
    way_out = "Run it once only: drop it."


class UnknownSession(NotFound):
    slug, title = "unknown-session", "No such session"
    way_out = "A session begins with its first call; one that has expired is remembered for a day."


class SessionConflict(UsageError):
    slug, status, title = "session-conflict", 409, "The session's sandbox cannot give what the call asks for"
    way_out = "Ask for no more than the session's first call did, or use another session_id."


class KeyReused(UsageError):
    slug, status, title = "key-reused", 422, "The key of the call came before, with another call"
    way_out = "Give each call an Idempotency-Key of its own; repeat one only to send the same call again."


class PlacementError(ReadieError):
    """No worker could take the call; nothing ran."""

    slug, status, title = "not-placed", 503, "The call was not placed"


class NoWorkers(PlacementError):
    slug, status, title = "no-workers", 503, "No worker is ready"
    way_out = "Start one with readie-worker serve, or wait for one to report."


class NoCapacity(PlacementError):
    slug, status, title = "no-capacity", 503, "No worker can take the call now"
    way_out = "Ask for less memory, give the call a queue_timeout, or add a worker."


class SessionBusy(PlacementError):
    slug, status, title = "session-busy", 503, "Other calls have the session"
    way_out = "Calls of a session run one at a time. Try again, or raise SESSION_WAIT_TIMEOUT on the router."


class SessionExpired(PlacementError):
    slug, status, title = "session-expired", 410, "The session's sandbox is gone"
    way_out = "What it held is lost. Begin another session; this session_id can be used again after a day."


class CallError(ReadieError):
    """The call was placed, and has no result."""

    slug, status, title = "call-failed", 500, "The call failed"


class WorkerLost(CallError):
    slug, status, title = "worker-lost", 502, "The worker was lost while it ran the call"
    way_out = "The function may have had effects. Send it with retry=True if it may run twice."


class OutOfMemory(CallError):
    slug, status, title = "out-of-memory", 507, "The call used more memory than its budget"
    way_out = "Give it a larger memory or max_memory."


class CallTimeout(CallError):
    slug, status, title = "call-timeout", 504, "The call ran longer than its timeout"
    way_out = "Give it a larger timeout."


class CallCancelled(CallError):
    slug, status, title = "call-cancelled", 409, "The call was cancelled"
    way_out = ""


class PythonMismatch(CallError):
    slug, status, title = "python-mismatch", 409, "The worker runs another Python version"
    way_out = "Call from the same minor version as the worker's root filesystem."


class InstallFailed(CallError):
    slug, status, title = "install-failed", 502, "The packages could not be installed"
    way_out = "Leave packages out, or have the operator allow an index or a wheel folder on the worker."


class SandboxFailed(CallError):
    slug, status, title = "sandbox-failed", 502, "The sandbox ended before the call did"
    way_out = "The function may have ended the process; the call's output may say more."


class ResultTooLarge(CallError):
    slug, status, title = "result-too-large", 507, "The result is too large"
    way_out = "Return less, or raise MAX_PAYLOAD on the router and the workers."


class BadResult(CallError):
    slug, status, title = "bad-result", 502, "The result cannot be sent back"
    way_out = "Return values that cloudpickle can carry."


class RemoteError(CallError):
    """The function raised something that cannot be raised here: the detail has its type, text and traceback."""

    slug, status, title = "remote-error", 500, "The function raised an exception"
    way_out = ""


class Unavailable(ReadieError):
    """Something other than the caller's input is at fault."""

    slug, status, title = "unavailable", 503, "Not available"


class RateLimited(Unavailable):
    """The router did nothing: to ask again after `retry_after` seconds is safe."""

    slug, status, title = "rate-limited", 429, "Too many requests came from this address"
    way_out = "Ask less often, or raise RATE_LIMIT on the router."

    def __init__(self, detail: str = "", way_out: str | None = None, retry_after: int = 1) -> None:
        super().__init__(detail, way_out)
        self.retry_after = retry_after


class DatabaseBehind(Unavailable):
    slug, title = "database-behind", "The database is behind this version"
    way_out = "Run readie-router upgrade (or alembic upgrade head), or start with readie-router serve --migrate."


class QueryTimeout(Unavailable):
    slug, title = "query-timeout", "The query took too long"
    way_out = "Ask for less, or allow it more: readie-router sql --seconds."


class QueryBusy(Unavailable):
    slug, title = "query-busy", "Other queries are running"
    way_out = "Try again when they have ended."


class DatabaseUnavailable(Unavailable):
    slug, title = "database-unavailable", "The database cannot be used"
    way_out = "Check DATABASE_URL, and that the server runs."


class DatabaseInUse(Unavailable):
    slug, title = "database-in-use", "Another process has the DuckDB file open"
    way_out = "One process owns a DuckDB file. Ask the router that serves it (--router URL), or stop it first."


class PortTaken(Unavailable):
    slug, title = "port-taken", "The port is taken"
    way_out = "Stop the process that listens there, or choose another with --port."


class RouterUnreachable(Unavailable):
    slug, title = "router-unreachable", "The router does not answer"
    way_out = "Start one with readie-router serve, or set ROUTER_URL to the one that runs."


class RouterNotTrusted(RouterUnreachable):
    slug, title = "router-not-trusted", "The router's certificate is not trusted"
    way_out = "Set ROUTER_CA to a file with the certificate of its issuer, and ask by a name that its certificate has."


class RouterStopping(Unavailable):
    """What waited at a router that ends was not placed: to send it again is safe."""

    slug, title = "router-stopping", "The router stops while the call waits"
    way_out = "Send it again: another router takes it, or this one once it is back."


class RuntimeUnavailable(Unavailable):
    slug, title = "runtime-unavailable", "The runtime cannot be used on this host"
    way_out = "readie-worker doctor says what the runtime needs."


class NeedsGpu(Unavailable):
    slug, title = "needs-gpu", "This host has no NVIDIA GPU"
    way_out = "Run it on a host with NVIDIA devices, or build flavor cpu."


class CaptureFailed(Unavailable):
    slug, title = "capture-failed", "A checkpoint could not be captured"
    way_out = ""


def problems() -> dict[str, type[ReadieError]]:
    """The table: slug → class, for every problem."""
    table: dict[str, type[ReadieError]] = {}
    waiting: list[type[ReadieError]] = [ReadieError]
    while waiting:
        problem = waiting.pop()
        if "slug" in vars(problem):  # a part's own kind of a problem is no other row
            table[problem.slug] = problem
        waiting += problem.__subclasses__()
    return table


def problem_from(type_: str, detail: str, hint: str = "") -> ReadieError:
    """The exception for a problem document's `type`; a type that is not in the table gives a plain `ReadieError`."""
    return problems().get(type_.removeprefix(PREFIX), ReadieError)(detail, hint or None)
