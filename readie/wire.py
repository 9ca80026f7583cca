"""What travels between client, router and agents, as JSON or MessagePack. Bytes are base64 in JSON.

Sizes are bytes, durations seconds, unless a name says otherwise. Times are ISO 8601 with a time zone.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from readie.errors import ReadieError
from readie.flavor import Flavor

MAX_NAME = 1024
MAX_MODULES = 10_000
MAX_PACKAGES = 1_000
MAX_SECONDS = 7 * 86_400.0
MAX_WAIT = 60.0
MAX_PAYLOAD = 16 * 1024 * 1024  # the default of the setting
REPORT_SECONDS = 10.0  # between two reports of an agent at most

END = r"$(?!\n)"  # of a pattern: `$` alone also ends before a line feed, and JSON Schema has no `\Z`
IDENTIFIER = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}" + END

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Identifier = Annotated[str, msgspec.Meta(pattern=IDENTIFIER)]
Bytes = Annotated[int, msgspec.Meta(gt=0, le=2**62)]
Amount = Annotated[int, msgspec.Meta(ge=0, le=2**62)]  # bytes, none included
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}" + END)]
Modules = Annotated[list[Name], msgspec.Meta(max_length=MAX_MODULES)]
Markers = Annotated[dict[Text, Text], msgspec.Meta(max_length=100)]  # a PEP 508 marker environment

#: placed: a worker was chosen → accepted: the agent runs it → finished | failed | cancelled
CallState = Literal["placed", "accepted", "finished", "failed", "cancelled"]
#: starting: not a candidate yet → ready: takes calls → removed: finishes what it runs, gets nothing new
WorkerState = Literal["starting", "ready", "removed"]
#: busy: a call has it, or is being ended in it; idle: its sandbox waits for the next; expired: its sandbox is gone
SessionState = Literal["busy", "idle", "expired"]
Stream = Literal["stdout", "stderr"]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request: unknown fields are refused, so that a misspelt option is not silently ignored."""


class Answer(msgspec.Struct, frozen=True):
    """An answer: unknown fields are ignored, so that an older client understands a newer router."""


# ---- clients: place a call, follow it ----


class CallRequest(Record, frozen=True, kw_only=True):
    """`POST /v1/calls`. `payload` is opaque to the router: a cloudpickle of (function, args, kwargs)."""

    payload: bytes
    function: Name = "function"  # for people: its qualified name
    python: Annotated[str, msgspec.Meta(pattern=r"^3\.[0-9]{1,2}" + END)]  # the client's minor version
    modules: Modules = []
    gpu: bool = False
    memory: Bytes | None = None
    max_memory: Bytes | None = None
    gpu_memory: Bytes | None = None
    max_gpu_memory: Bytes | None = None
    packages: Annotated[list[Name], msgspec.Meta(max_length=MAX_PACKAGES)] = []
    session_id: Identifier | None = None
    checkpoint_id: Name | None = None  # pinned: no scoring
    cold: bool = False
    retry: bool = False
    timeout: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] | None = None  # of the function; default CALL_TIMEOUT
    queue_timeout: Seconds = 0.0


class Placement(Answer, frozen=True, kw_only=True):
    """Where a call went: a worker, and the checkpoint that its sandbox starts from (None: cold start, or, where `reason`
    is `session`, the sandbox that its session has).
    """

    placement_id: str
    worker_id: str
    flavor: Flavor
    generation: str | None = None
    checkpoint_id: str | None = None
    cost: float | None = None  # seconds, by the cost model; None where nothing was scored
    cold_cost: float | None = None  # seconds, the cold start's
    predicted_ready: float | None = None  # seconds to ready: cost plus the runtime's fixed part
    reason: str = ""  # why this checkpoint, or why cold; session: it goes into the session's sandbox


class SkippedPackage(Answer, frozen=True, kw_only=True):
    """A requirement that the root filesystem has, or whose marker is false there."""

    requirement: str
    installed: str  # version; "": it names none, or does not have it
    reason: str = ""  # why there is nothing to install, where that is not the reason


class KeptPackage(Answer, frozen=True, kw_only=True):
    """A requirement that is installed for the call, and why."""

    requirement: str
    reason: str
    installed: str | None = None  # the version that the root filesystem has of it, if any


class CallPlaced(Answer, frozen=True, kw_only=True):
    call_id: str
    placement: Placement
    skipped: list[SkippedPackage] = []
    kept: list[KeptPackage] = []
    unmatched: list[str] = []  # modules that match no item of the catalogue: they count nowhere


class Phases(Answer, frozen=True, kw_only=True):
    """Seconds of each phase of a call on its worker. `ready` is from the placement's arrival at the agent to the
    first line of the function, and contains `restore` (or the cold start), `install` and `imports`.
    """

    queue: float = 0.0  # placed → arrived at the agent
    restore: float = 0.0  # sandbox started: restored or cold
    install: float = 0.0
    imports: float = 0.0
    ready: float = 0.0
    run: float = 0.0


class Problem(Answer, frozen=True, kw_only=True):
    """RFC 9457. `type` is one of readie.errors' table; `way_out` says what to do; `traceback` is the remote one."""

    type: str
    title: str
    status: Count = 500
    detail: str = ""
    way_out: str = ""
    instance: str | None = None
    traceback: str | None = None


def problem_of(error: ReadieError, instance: str | None = None) -> Problem:
    """The problem document of an error."""
    return Problem(
        type=error.type,
        title=error.title,
        status=error.status,
        detail=error.detail,
        way_out=error.hint,
        instance=instance,
    )


class Started(Answer, frozen=True, kw_only=True):
    """What the sandbox really started from."""

    how: Literal["restored", "cold"]
    generation: str | None = None
    checkpoint_id: str | None = None
    fallback: str | None = None  # why it is cold although a checkpoint was sent


class Result(Record, frozen=True, kw_only=True):
    """`PUT /v1/placements/{id}/result`: how a call ended.

    `returned`: payload is a cloudpickle of the value. `raised`: payload is a cloudpickle of the exception (empty if
    it cannot be pickled) and `problem` carries its text and traceback. `failed`: no result; `problem` says why.
    """

    outcome: Literal["returned", "raised", "failed", "cancelled"]
    payload: bytes = b""
    problem: Problem | None = None
    python: str = ""  # the worker's minor version: the client compares it before it unpickles
    started: Started | None = None
    phases: Phases = Phases()
    lives: bool | None = None  # of a session's call: whether its sandbox lives on; None: not known


class Output(Record, frozen=True, kw_only=True):
    """`POST /v1/placements/{id}/output`: a piece of what the call printed."""

    sequence: Count  # counts from 0 within the placement; a repeated one is ignored
    stream: Stream
    text: Annotated[str, msgspec.Meta(max_length=1024 * 1024)]


class OutputPiece(Answer, frozen=True, kw_only=True):
    stream: Stream
    text: str


class CallStatus(Answer, frozen=True, kw_only=True):
    """`GET /v1/calls/{id}?wait=30&seen=3`: answers once the call has ended, or more than `seen` pieces of output are
    there; else after `wait` seconds. `result` is there once the state is finished, failed or cancelled.
    """

    call_id: str
    state: CallState
    function: str
    created_at: datetime
    placement: Placement | None = None
    output: list[OutputPiece] = []
    output_from: Count = 0  # how many pieces come before `output`: `seen`, or 0 where all are there
    result: Result | None = None


# ---- SQL for people ----


class SqlRequest(Record, frozen=True, kw_only=True):
    """`POST /v1/sql`: one SELECT over the views for people, with its limits."""

    query: Annotated[str, msgspec.Meta(min_length=1, max_length=100_000)]
    rows: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1000
    seconds: Annotated[float, msgspec.Meta(gt=0, le=300)] = 20.0


class SqlAnswer(Answer, frozen=True, kw_only=True):
    """Rows of numbers, text, booleans, nulls and lists of them; whatever else is text. `more`: some were left out."""

    columns: list[str]
    rows: list[list[Any]]
    more: bool


# ---- explain ----


class ExplainRequest(Record, frozen=True, kw_only=True):
    modules: Modules
    flavor: Flavor = Flavor.CPU
    catalogue: Digest | None = None  # SHA-256 of an imported catalogue; default: the active one
    packages: Annotated[list[Name], msgspec.Meta(max_length=MAX_PACKAGES)] = []
    memory: Bytes | None = None
    items_of: Name | None = None  # list this checkpoint's missing items too ("cold": the cold start's)


class Match(Answer, frozen=True, kw_only=True):
    module: str
    item: str | None  # None: matches nothing, counts nowhere


class MissingItem(Answer, frozen=True, kw_only=True):
    item: str
    seconds: float


class Option(Answer, frozen=True, kw_only=True):
    """One row of the ranking, cheapest first. `checkpoint_id` None is the cold start. total = size + missing, seconds."""

    checkpoint_id: str | None
    size: float
    missing: float
    total: float
    total_ns: int
    excluded: str | None = None  # why it is not an option; excluded ones come last
    items: list[MissingItem] | None = None


class Explanation(Answer, frozen=True, kw_only=True):
    flavor: Flavor
    catalogue: str | None
    generation: str | None
    alpha: float | None  # seconds per MB
    matches: list[Match]
    options: list[Option]
    skipped: list[SkippedPackage] = []
    kept: list[KeptPackage] = []


# ---- worker agents ----


class HeldGeneration(Record, frozen=True, kw_only=True):
    """A generation whose checkpoints the worker offers, with the fixed seconds of its manifest."""

    generation: Digest
    checkpoint_ids: Annotated[list[Name], msgspec.Meta(max_length=10_000)]
    restore_fixed: Seconds = 0.0
    cold_fixed: Seconds = 0.0


class SandboxStatus(Record, frozen=True, kw_only=True):
    sandbox_id: Identifier
    placement_id: Identifier | None = None
    session_id: Identifier | None = None
    memory: Bytes
    gpu_memory: Amount = 0


class WorkerStatus(Record, frozen=True, kw_only=True):
    """`PUT /v1/workers/{id}`, every 10 s and at each change."""

    flavor: Flavor
    state: WorkerState
    python: Name  # "3.11.7", of the root filesystem
    markers: Markers = {}  # of the root filesystem
    runtime: Literal["fork", "runsc"]
    memory_total: Bytes | None = None  # None: unknown, memory is not a filter
    gpu_total: Bytes | None = None
    max_sandboxes: Count = 0  # 0: no limit
    base_memory: Amount = 0  # bytes a sandbox uses before any checkpoint
    sandboxes: Annotated[list[SandboxStatus], msgspec.Meta(max_length=100_000)] = []
    generations: Annotated[list[HeldGeneration], msgspec.Meta(max_length=1_000)] = []
    incarnation: Text = ""  # a random id of the agent process
    report: Count = 0  # the agent's reports count from 1: one that arrives after a later one is ignored. 0: not counted


class Assignment(Answer, frozen=True, kw_only=True):
    """A call to run: everything the agent needs."""

    placement_id: str
    call_id: str
    payload: bytes
    function: str
    python: str
    modules: list[str]
    packages: list[str]  # what to install: the kept ones; none in a session's sandbox, which has them
    memory: int
    max_memory: int
    gpu: bool
    gpu_memory: int
    timeout: float
    queue: float  # seconds since the call was placed, by the database's clock
    generation: str | None = None
    checkpoint_id: str | None = None
    session_id: str | None = None
    continues: bool = False  # in the sandbox that the session has; else a new one is started, and kept for the session


class Orders(Answer, frozen=True, kw_only=True):
    """`GET /v1/workers/{id}/placements?wait=`: what the agent has to do. Repeated until accepted or reported."""

    run: list[Assignment] = []
    cancel: list[str] = []  # placement ids
    end_sessions: list[str] = []  # session ids whose sandboxes are to end


# ---- people and scripts ----


class CatalogueSummary(Answer, frozen=True, kw_only=True):
    sha256: str
    generation: str
    flavor: Flavor
    alpha: float
    active: bool
    imported_at: datetime
    items: int
    checkpoints: int
    distributions: int


class ImportedCatalogue(CatalogueSummary, frozen=True, kw_only=True):
    """`POST /v1/catalogues`: the catalogue, now active."""

    warnings: list[str] = []  # what was ignored or dropped in the document; none if it was imported before


class ActivateRequest(Record, frozen=True, kw_only=True):
    """`POST /v1/catalogues/{flavor}/activate`."""

    sha256: Digest  # of an imported catalogue


class ItemView(Answer, frozen=True, kw_only=True):
    key: str
    load_time: float
    size_mb: float
    resource_type: str
    distribution: str
    closure: list[str]
    closure_load_time: float
    closure_size_mb: float


class CheckpointView(Answer, frozen=True, kw_only=True):
    checkpoint_id: str
    ordinal: int
    size_mb: float
    canonical: list[str]
    items: list[str]


class WorkerView(Answer, frozen=True, kw_only=True):
    worker_id: str
    flavor: Flavor
    state: str
    runtime: str
    python: str
    memory_total: int | None
    memory_used: int
    memory_reserved: int
    gpu_total: int | None
    gpu_used: int
    gpu_reserved: int
    max_sandboxes: int
    sandboxes: int
    in_flight: int
    heard_at: datetime
    generations: list[HeldGeneration] = []


class SessionView(Answer, frozen=True, kw_only=True):
    session_id: str
    worker_id: str
    state: str
    call_id: str | None  # the call that has it now
    waiting: int  # calls that wait for their turn
    memory: int | None  # bytes, the budget of its sandbox; None: none is known of
    created_at: datetime
    used_at: datetime  # a call began it, or the latest one ended
    expired_at: datetime | None


class RecordedSet(Answer, frozen=True, kw_only=True):
    """What some calls asked for: the same modules, sorted."""

    modules: list[str]
    calls: int


class RecordedImports(Answer, frozen=True, kw_only=True):
    """A page of what calls asked for, most frequent first; pages of one `until` are pages of one list."""

    until: datetime | None  # None: there are no calls
    sets: list[RecordedSet]


class CallView(Answer, frozen=True, kw_only=True):
    call_id: str
    state: str
    function: str
    created_at: datetime
    finished_at: datetime | None
    worker_id: str | None
    checkpoint_id: str | None
    generation: str | None
    predicted_ready: float | None
    measured_ready: float | None
