"""Sessions: which call has one, what its sandbox is, and who waits for a turn in it.

Works on DuckDB and on PostgreSQL, up and down, with data in the tables. Its text is frozen: it uses nothing of `app/`.
Nothing wrote sessions before: what is in the table is dropped. The way back keeps them.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("leases", sa.Column("session_id", sa.Text(), nullable=True))
    for table in ("leases", "calls"):
        op.add_column(table, sa.Column("continues", sa.Boolean(), server_default=sa.false(), nullable=True))
        # In a second step: DuckDB adds no column that must not be null.
        op.execute(f"ALTER TABLE {table} ALTER COLUMN continues SET NOT NULL")
    op.create_index(
        "uq_leases_session_id", "leases", ["session_id"], unique=True
    )  # now: DuckDB alters no indexed table
    op.add_column("cancellations", sa.Column("session_id", sa.Text(), nullable=True))
    op.drop_table("sessions")
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("settles_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("expired_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("session_id", name=op.f("pk_sessions")),
    )
    op.create_table(
        "session_waits",
        sa.Column("call_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("ticket", sa.BigInteger(), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("call_id", name=op.f("pk_session_waits")),
    )


def downgrade() -> None:
    op.drop_table("session_waits")
    set_aside("sessions")
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
    put_back("sessions", "session_id, worker_id, created_at, used_at, expired_at")
    # As a whole: DuckDB drops no column whose index was dropped in the same transaction.
    set_aside("leases")
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
    put_back(
        "leases",
        "placement_id, call_id, worker_id, worker_flavor, generation, checkpoint_id, checkpoint_flavor, gpu, "
        "memory_bytes, gpu_memory_bytes, incarnation, placed_at, accepted_at, deadline_at",
    )
    op.drop_column("cancellations", "session_id")
    op.drop_column("calls", "continues")


def set_aside(table: str) -> None:
    """Drops a table, and keeps its rows in another."""
    op.execute(f"CREATE TABLE {table}_aside AS SELECT * FROM {table}")  # noqa: S608 - a name of ours
    op.drop_table(table)


def put_back(table: str, columns: str) -> None:
    op.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {table}_aside")  # noqa: S608 - names of ours
    op.drop_table(f"{table}_aside")
