"""The schema. Rules that must never break are constraints here; Python may be wrong, the tables may not.

Catalogue tables are written once, at import, never updated, and deleted a whole catalogue at a time. State tables
change: what changes is never a list and never in an index, because DuckDB refuses such updates where other rows refer
to them. It also refuses to delete a row and those that refer to it in one transaction, so that
foreign keys are PostgreSQL's only. Units are in the names; times are the database's.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import BIT
from sqlalchemy.ext.compiler import compiles

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)


class BitString(BIT):
    """`bit varying` in PostgreSQL, `BIT` (of any length too) in DuckDB: position 0 is the leftmost bit."""

    cache_ok = True

    def __init__(self) -> None:
        super().__init__(varying=True)


@compiles(BitString, "duckdb")
def _duckdb_bits(_type: BitString, _compiler: Any, **_options: Any) -> str:
    return "BIT"


def _key(name: str, type_: Any = Text, *constraints: Any) -> "Column[Any]":
    """A primary key column whose value we always give: DuckDB has no SERIAL."""
    return Column(name, type_, *constraints, primary_key=True, autoincrement=False)


def _flavor(name: str = "flavor", nullable: bool = False) -> "Column[Any]":
    return Column(name, Text, nullable=nullable)


def _time(name: str, nullable: bool = True, **options: Any) -> "Column[Any]":
    return Column(name, DateTime(timezone=True), nullable=nullable, **options)


def _of_catalogue() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["catalogue_id"], ["catalogues.catalogue_id"]).ddl_if(dialect="postgresql")


def _is_flavor(column: str = "flavor") -> CheckConstraint:
    return CheckConstraint(f"{column} IN ('cpu', 'gpu')", name=column)


# ---- the catalogue: one document a row, and its contents ----

catalogues = Table(
    "catalogues",
    metadata,
    _key("catalogue_id", Integer),
    Column("sha256", Text, nullable=False, unique=True),  # of the document's bytes
    Column("generation", Text, nullable=False),
    _flavor(),
    Column("alpha", Double, nullable=False),  # seconds per MB, for people: prices are size_ns
    Column("item_count", Integer, nullable=False),
    Column("checkpoint_count", Integer, nullable=False),
    Column("distribution_count", Integer, nullable=False),
    _time("imported_at", nullable=False, server_default=func.now()),
    UniqueConstraint("catalogue_id", "flavor"),  # what active_catalogues refers to: its flavor cannot differ
    _is_flavor(),
    CheckConstraint("alpha > 0", name="alpha"),
)

active_catalogues = Table(
    "active_catalogues",
    metadata,
    _key("flavor"),
    Column("catalogue_id", Integer, nullable=False),
    Column("activated_by", Text, nullable=False),  # file: CATALOGUE_DIR's; request: API or CLI
    Column("file_sha256", Text),  # of the file when it was last looked at: a request holds until this changes
    _time("activated_at", nullable=False),
    ForeignKeyConstraint(["catalogue_id", "flavor"], ["catalogues.catalogue_id", "catalogues.flavor"]).ddl_if(
        dialect="postgresql"
    ),
    _is_flavor(),
    CheckConstraint("activated_by IN ('file', 'request')", name="activated_by"),
)

distributions = Table(
    "distributions",
    metadata,
    _key("catalogue_id", Integer),
    _key("name"),  # canonical, PEP 503
    Column("version", Text, nullable=False),  # '': the root filesystem names none
    _of_catalogue(),
)

items = Table(
    "items",
    metadata,
    _key("catalogue_id", Integer),
    _key("item_id", Integer),  # dense, from 0, in the document's order
    Column("key", Text, nullable=False),
    Column("load_ns", BigInteger, nullable=False),  # exclusive
    Column("size_mb", Double, nullable=False),  # exclusive
    Column("resource_type", Text, nullable=False),
    Column("distribution", Text, nullable=False),  # canonical; '' for a dataset, model or tokenizer
    Column("closure_id", Integer, nullable=False),  # whose bits are the atoms that this item needs
    Column("atom_id", Integer, nullable=False),  # its atom: a position in bit strings, from 0
    UniqueConstraint("catalogue_id", "key"),
    CheckConstraint("load_ns >= 0 AND size_mb >= 0", name="not_negative"),
    CheckConstraint("resource_type IN ('package', 'dataset', 'model', 'tokenizer')", name="resource_type"),
    _of_catalogue(),
)

# Bit strings over atoms: an atom is a set of items that every closure and every checkpoint treats alike
# (docs/decisions/0001-closures.md). One atom more belongs to no item: every call needs it, and what it costs is the size
# of whatever is restored. The strings of one catalogue are equally long.
closures = Table(
    "closures",
    metadata,
    _key("catalogue_id", Integer),
    _key("closure_id", Integer),  # -1: what every call needs
    Column("bits", BitString, nullable=False),  # the atoms that it needs
    _of_catalogue(),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _key("catalogue_id", Integer),
    _key("ordinal", Integer),  # place in the document, from 0: the later one wins a tie
    Column("checkpoint_id", Text, nullable=False),
    Column("size_mb", Double, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("size_ns", BigInteger, nullable=False),  # alpha × size_mb
    UniqueConstraint("catalogue_id", "checkpoint_id"),
    CheckConstraint("size_mb >= 0 AND size_bytes >= 0 AND size_ns >= 0", name="not_negative"),
    _of_catalogue(),
)

contents = Table(
    "contents",
    metadata,
    _key("catalogue_id", Integer),
    _key("ordinal", Integer),
    Column("bits", BitString, nullable=False),  # the atoms that the checkpoint holds
    _of_catalogue(),
)

# What each atom costs a call with each option, in binary digits: a plane has the atoms whose price has this digit. So the
# sum of weight x bit_count(bits & needed) is the option's cost. What a checkpoint holds costs nothing.
planes = Table(
    "planes",
    metadata,
    _key("catalogue_id", Integer),
    _key("ordinal", Integer),  # of the checkpoint; -1: the cold start
    _key("weight", BigInteger),  # a power of two, nanoseconds
    Column("bits", BitString, nullable=False),
    CheckConstraint("weight > 0", name="weight"),
    _of_catalogue(),
)

canonical_items = Table(
    "canonical_items",
    metadata,
    _key("catalogue_id", Integer),
    _key("ordinal", Integer),
    _key("item_id", Integer),
    _of_catalogue(),
)

# ---- workers, as they last reported ----

workers = Table(
    "workers",
    metadata,
    _key("worker_id"),
    _flavor(),
    Column("state", Text, nullable=False),
    Column("runtime", Text, nullable=False),
    Column("python", Text, nullable=False),  # 3.11.7, of the root filesystem
    Column("markers", Text, nullable=False),  # PEP 508 marker environment, JSON
    Column("memory_total_bytes", BigInteger),  # null: unknown, memory is not a filter
    Column("gpu_total_bytes", BigInteger),
    Column("max_sandboxes", Integer, nullable=False),  # 0: no limit
    Column("base_bytes", BigInteger, nullable=False),  # a sandbox before any checkpoint
    Column("incarnation", Text, nullable=False),
    _time("heard_at", nullable=False),
    Column("report", BigInteger, nullable=False, server_default=text("0")),  # the number of what it reported last
    # There are many sandboxes, and only reports change these sums.
    Column("kept_memory_bytes", BigInteger, nullable=False, server_default=text("0")),  # of its `kept` sandboxes
    Column("kept_gpu_memory_bytes", BigInteger, nullable=False, server_default=text("0")),  # of these
    Column("kept_sandboxes", BigInteger, nullable=False, server_default=text("0")),  # how many these are
    _is_flavor(),
    CheckConstraint("state IN ('starting', 'ready', 'removed')", name="state"),
    CheckConstraint("memory_total_bytes > 0 AND gpu_total_bytes > 0", name="totals"),  # null passes
)

worker_generations = Table(
    "worker_generations",
    metadata,
    _key("worker_id"),
    _key("generation"),
    Column("restore_fixed_ns", BigInteger, nullable=False),
    Column("cold_fixed_ns", BigInteger, nullable=False),
)

worker_checkpoints = Table(
    "worker_checkpoints",
    metadata,
    _key("worker_id"),
    _key("generation"),
    _key("checkpoint_id"),
)

sandboxes = Table(
    "sandboxes",
    metadata,
    _key("worker_id"),
    _key("sandbox_id"),
    Column("placement_id", Text),  # the call that it runs; null: an idle session
    Column("session_id", Text),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("gpu_memory_bytes", BigInteger, nullable=False),
    # Its worker's row has counted it, and it stays until the next report.
    Column("kept", Boolean, nullable=False, server_default=false()),  # it was reported without a call
    Index("ix_sandboxes_not_kept", "worker_id", postgresql_where=text("NOT kept")).ddl_if(dialect="postgresql"),
    CheckConstraint("memory_bytes > 0 AND gpu_memory_bytes >= 0", name="budgets"),
)

# ---- calls ----

calls = Table(
    "calls",
    metadata,
    _key("call_id"),
    Column("state", Text, nullable=False),
    Column("function", Text, nullable=False),
    Column("python", Text, nullable=False),  # 3.11, the client's
    Column("gpu", Boolean, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("max_memory_bytes", BigInteger, nullable=False),
    Column("gpu_memory_bytes", BigInteger),  # null on a GPU call: the worker's whole GPU memory
    Column("max_gpu_memory_bytes", BigInteger),
    Column("session_id", Text),
    Column("pinned_checkpoint_id", Text),
    Column("cold", Boolean, nullable=False),
    Column("retry", Boolean, nullable=False),
    Column("timeout_ms", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False),  # placements so far
    # the latest placement
    Column("placement_id", Text),
    Column("worker_id", Text),
    _flavor("worker_flavor", nullable=True),
    Column("catalogue_id", Integer),
    Column("generation", Text),
    Column("checkpoint_id", Text),  # null: cold start
    _flavor("checkpoint_flavor", nullable=True),
    Column("cost_ns", BigInteger),
    Column("cold_cost_ns", BigInteger),
    Column("predicted_ready_ns", BigInteger),
    Column("reason", Text, nullable=False),
    # what happened
    Column("measured_ready_ns", BigInteger),
    Column("started", Text),  # restored or cold
    Column("outcome", Text),
    _time("created_at", nullable=False),
    _time("accepted_at"),
    _time("finished_at"),
    _time("read_at"),
    Column("continues", Boolean, nullable=False, server_default=false()),  # in its session's sandbox: nothing chosen
    # Before it is placed, and again where its placement ended before it ran.
    Column("queue_ms", BigInteger, nullable=False, server_default=text("0")),  # how long it may wait for room
    Index("ix_calls_created_at", "created_at").ddl_if(dialect="postgresql"),
    CheckConstraint("state IN ('placed', 'accepted', 'finished', 'failed', 'cancelled')", name="state"),
    CheckConstraint("max_memory_bytes >= memory_bytes AND memory_bytes > 0", name="memory"),
    CheckConstraint("max_gpu_memory_bytes >= gpu_memory_bytes AND gpu_memory_bytes > 0", name="gpu_memory"),
    CheckConstraint("NOT gpu OR worker_flavor = 'gpu'", name="gpu_worker"),
    CheckConstraint("checkpoint_flavor = worker_flavor", name="checkpoint_flavor"),  # null passes: cold
)

call_payloads = Table("call_payloads", metadata, _key("call_id"), Column("payload", LargeBinary, nullable=False))

call_modules = Table(
    "call_modules",
    metadata,
    _key("call_id"),
    _key("position", Integer),
    Column("module", Text, nullable=False),
    Column("item", Text),  # the item that it stands for; null: matched nothing
)

call_packages = Table(
    "call_packages",
    metadata,
    _key("call_id"),
    _key("position", Integer),
    Column("requirement", Text, nullable=False),
    Column("skipped", Boolean, nullable=False),
    Column("installed", Text),  # the root filesystem's version
    Column("reason", Text, nullable=False),
)

call_output = Table(
    "call_output",
    metadata,
    _key("call_id"),
    _key("placement_id"),
    _key("sequence", Integer),
    Column("stream", Text, nullable=False),
    Column("text", Text, nullable=False),
    CheckConstraint("stream IN ('stdout', 'stderr')", name="stream"),
)

call_results = Table(
    "call_results",
    metadata,
    _key("call_id"),
    Column("result", LargeBinary, nullable=False),  # readie.wire.Result as MessagePack
)

# ---- leases: what placed calls reserve ----

leases = Table(
    "leases",
    metadata,
    _key("placement_id"),
    Column("call_id", Text, nullable=False, unique=True),  # one lease a call
    Column("worker_id", Text, nullable=False),
    _flavor("worker_flavor"),
    Column("generation", Text),
    Column("checkpoint_id", Text),
    _flavor("checkpoint_flavor", nullable=True),
    Column("gpu", Boolean, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("gpu_memory_bytes", BigInteger, nullable=False),
    Column("incarnation", Text),  # of the agent that accepted it: another one of the same worker has lost it
    _time("placed_at", nullable=False),
    _time("accepted_at"),
    _time("deadline_at", nullable=False),
    Column("session_id", Text),
    # in the sandbox that the session has: it reserves no other
    Column("continues", Boolean, nullable=False, server_default=false()),
    Index("uq_leases_session_id", "session_id", unique=True),  # one call at a time in a session
    Index("ix_leases_worker_id", "worker_id").ddl_if(dialect="postgresql"),
    _is_flavor("worker_flavor"),
    CheckConstraint("checkpoint_flavor = worker_flavor", name="checkpoint_flavor"),  # null passes: cold
    CheckConstraint("NOT gpu OR worker_flavor = 'gpu'", name="gpu_worker"),
    CheckConstraint("memory_bytes > 0 AND gpu_memory_bytes >= 0", name="budgets"),
)

# Accepted placements that the agent has to end. A row goes when the agent reports the placement's end.
cancellations = Table(
    "cancellations",
    metadata,
    _key("placement_id"),
    Column("worker_id", Text, nullable=False),
    _time("created_at", nullable=False),
    Column("session_id", Text),  # whose sandbox ends with the placement
)

# ---- sessions: calls that share one sandbox ----

sessions = Table(
    "sessions",
    metadata,
    _key("session_id"),
    Column("worker_id", Text, nullable=False),
    Column("call_id", Text, nullable=False),  # for which its sandbox was started: what that has is what this call got
    Column("incarnation", Text),  # of the agent that has its sandbox; null: none has started one yet
    _time("created_at", nullable=False),
    _time("used_at", nullable=False),  # a call began it, or the latest one ended
    _time("settles_at"),  # until then a report without its sandbox may be older than the sandbox; null: none is
    _time("expired_at"),  # its sandbox is gone; remembered for a day
    Index("ix_sessions_worker_id", "worker_id").ddl_if(dialect="postgresql"),
)

# Calls that wait for their turn in a session: requests that were not answered yet, of whichever router.
session_waits = Table(
    "session_waits",
    metadata,
    _key("call_id"),
    Column("session_id", Text, nullable=False),
    Column("ticket", BigInteger, nullable=False),  # the lower one came earlier
    _time("seen_at", nullable=False),  # its router asked for its turn last; one that asks no more has gone
)

# ---- what is remembered of requests ----

# The keys that clients gave their calls, so that one which is sent twice is placed once.
call_keys = Table(
    "call_keys",
    metadata,
    _key("call_key"),
    Column("call_id", Text, nullable=False),
    Column("request_sha256", Text, nullable=False),  # the same key with another request is refused
    Column("answer", LargeBinary, nullable=False),  # readie.wire.CallPlaced as MessagePack
    _time("created_at", nullable=False),
)

# Administrative requests, and how they were answered.
audit = Table(
    "audit",
    metadata,
    _key("request_id"),
    _time("asked_at", nullable=False),
    Column("address", Text, nullable=False),  # the client's, as the router sees it
    Column("action", Text, nullable=False),  # the route's operation id
    Column("target", Text, nullable=False),  # the path
    Column("status", Integer, nullable=False),  # of the answer
)
