"""The cluster: workers and their sandboxes, calls, leases, sessions.

Works on DuckDB and on PostgreSQL, up and down, with data in the tables. Its text is frozen: it uses nothing of `app/`.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

TABLES = [
    "workers",
    "worker_generations",
    "worker_checkpoints",
    "sandboxes",
    "calls",
    "call_payloads",
    "call_modules",
    "call_packages",
    "call_output",
    "call_results",
    "leases",
    "cancellations",
    "sessions",
]


def upgrade() -> None:
    op.create_table(
        "workers",
        sa.Column("worker_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("flavor", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("runtime", sa.Text(), nullable=False),
        sa.Column("python", sa.Text(), nullable=False),
        sa.Column("markers", sa.Text(), nullable=False),
        sa.Column("memory_total_bytes", sa.BigInteger(), nullable=True),
        sa.Column("gpu_total_bytes", sa.BigInteger(), nullable=True),
        sa.Column("max_sandboxes", sa.Integer(), nullable=False),
        sa.Column("base_bytes", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("heard_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("flavor IN ('cpu', 'gpu')", name=op.f("ck_workers_flavor")),
        sa.CheckConstraint("state IN ('starting', 'ready', 'removed')", name=op.f("ck_workers_state")),
        sa.CheckConstraint("memory_total_bytes > 0 AND gpu_total_bytes > 0", name=op.f("ck_workers_totals")),
        sa.PrimaryKeyConstraint("worker_id", name=op.f("pk_workers")),
    )
    op.create_table(
        "worker_generations",
        sa.Column("worker_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("restore_fixed_ns", sa.BigInteger(), nullable=False),
        sa.Column("cold_fixed_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("worker_id", "generation", name=op.f("pk_worker_generations")),
    )
    op.create_table(
        "worker_checkpoints",
        sa.Column("worker_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("checkpoint_id", sa.Text(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("worker_id", "generation", "checkpoint_id", name=op.f("pk_worker_checkpoints")),
    )
    op.create_table(
        "sandboxes",
        sa.Column("worker_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("sandbox_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("placement_id", sa.Text(), nullable=True),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("gpu_memory_bytes", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("memory_bytes > 0 AND gpu_memory_bytes >= 0", name=op.f("ck_sandboxes_budgets")),
        sa.PrimaryKeyConstraint("worker_id", "sandbox_id", name=op.f("pk_sandboxes")),
    )
    op.create_table(
        "calls",
        sa.Column("call_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("python", sa.Text(), nullable=False),
        sa.Column("gpu", sa.Boolean(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("max_memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("gpu_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("max_gpu_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("pinned_checkpoint_id", sa.Text(), nullable=True),
        sa.Column("cold", sa.Boolean(), nullable=False),
        sa.Column("retry", sa.Boolean(), nullable=False),
        sa.Column("timeout_ms", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("placement_id", sa.Text(), nullable=True),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("worker_flavor", sa.Text(), nullable=True),
        sa.Column("catalogue_id", sa.Integer(), nullable=True),
        sa.Column("generation", sa.Text(), nullable=True),
        sa.Column("checkpoint_id", sa.Text(), nullable=True),
        sa.Column("checkpoint_flavor", sa.Text(), nullable=True),
        sa.Column("cost_ns", sa.BigInteger(), nullable=True),
        sa.Column("cold_cost_ns", sa.BigInteger(), nullable=True),
        sa.Column("predicted_ready_ns", sa.BigInteger(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("measured_ready_ns", sa.BigInteger(), nullable=True),
        sa.Column("started", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("accepted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("read_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("NOT gpu OR worker_flavor = 'gpu'", name=op.f("ck_calls_gpu_worker")),
        sa.CheckConstraint(
            "state IN ('placed', 'accepted', 'finished', 'failed', 'cancelled')", name=op.f("ck_calls_state")
        ),
        sa.CheckConstraint("checkpoint_flavor = worker_flavor", name=op.f("ck_calls_checkpoint_flavor")),
        sa.CheckConstraint(
            "max_gpu_memory_bytes >= gpu_memory_bytes AND gpu_memory_bytes > 0", name=op.f("ck_calls_gpu_memory")
        ),
        sa.CheckConstraint("max_memory_bytes >= memory_bytes AND memory_bytes > 0", name=op.f("ck_calls_memory")),
        sa.PrimaryKeyConstraint("call_id", name=op.f("pk_calls")),
    )
    op.create_table(
        "call_payloads",
        sa.Column("call_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("call_id", name=op.f("pk_call_payloads")),
    )
    op.create_table(
        "call_modules",
        sa.Column("call_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("module", sa.Text(), nullable=False),
        sa.Column("item", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("call_id", "position", name=op.f("pk_call_modules")),
    )
    op.create_table(
        "call_packages",
        sa.Column("call_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("requirement", sa.Text(), nullable=False),
        sa.Column("skipped", sa.Boolean(), nullable=False),
        sa.Column("installed", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("call_id", "position", name=op.f("pk_call_packages")),
    )
    op.create_table(
        "call_output",
        sa.Column("call_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("placement_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("sequence", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.CheckConstraint("stream IN ('stdout', 'stderr')", name=op.f("ck_call_output_stream")),
        sa.PrimaryKeyConstraint("call_id", "placement_id", "sequence", name=op.f("pk_call_output")),
    )
    op.create_table(
        "call_results",
        sa.Column("call_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("call_id", name=op.f("pk_call_results")),
    )
    op.create_table(
        "leases",
        sa.Column("placement_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("worker_flavor", sa.Text(), nullable=False),
        sa.Column("generation", sa.Text(), nullable=True),
        sa.Column("checkpoint_id", sa.Text(), nullable=True),
        sa.Column("checkpoint_flavor", sa.Text(), nullable=True),
        sa.Column("gpu", sa.Boolean(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("gpu_memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=True),
        sa.Column("placed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("accepted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("NOT gpu OR worker_flavor = 'gpu'", name=op.f("ck_leases_gpu_worker")),
        sa.CheckConstraint("worker_flavor IN ('cpu', 'gpu')", name=op.f("ck_leases_worker_flavor")),
        sa.CheckConstraint("checkpoint_flavor = worker_flavor", name=op.f("ck_leases_checkpoint_flavor")),
        sa.CheckConstraint("memory_bytes > 0 AND gpu_memory_bytes >= 0", name=op.f("ck_leases_budgets")),
        sa.PrimaryKeyConstraint("placement_id", name=op.f("pk_leases")),
        sa.UniqueConstraint("call_id", name=op.f("uq_leases_call_id")),
    )
    op.create_table(
        "cancellations",
        sa.Column("placement_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("placement_id", name=op.f("pk_cancellations")),
    )
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("sandbox_id", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("expired_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("session_id", name=op.f("pk_sessions")),
    )


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)
