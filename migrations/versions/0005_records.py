"""What a cluster remembers: which report of a worker was the latest and what its idle sessions take, which key a call
came with, who administered what.

Works on DuckDB and on PostgreSQL, up and down, with data in the tables. Its text is frozen: it uses nothing of `app/`.
The way back forgets the keys and the audit log.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    for column in ("report", "kept_memory_bytes", "kept_gpu_memory_bytes", "kept_sandboxes"):
        op.add_column("workers", sa.Column(column, sa.BigInteger(), server_default=sa.text("0"), nullable=True))
        # In a second step: DuckDB adds no column that must not be null.
        op.execute(f"ALTER TABLE workers ALTER COLUMN {column} SET NOT NULL")
    op.add_column("sandboxes", sa.Column("kept", sa.Boolean(), server_default=sa.false(), nullable=True))
    op.execute("ALTER TABLE sandboxes ALTER COLUMN kept SET NOT NULL")
    op.create_table(
        "call_keys",
        sa.Column("call_key", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("request_sha256", sa.Text(), nullable=False),
        sa.Column("answer", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("call_key", name=op.f("pk_call_keys")),
    )
    op.create_table(
        "audit",
        sa.Column("request_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("asked_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_audit")),
    )
    if op.get_context().dialect.name == "postgresql":  # DuckDB scans a column as fast, and would check each update
        op.create_index("ix_calls_created_at", "calls", ["created_at"])
        op.create_index("ix_leases_worker_id", "leases", ["worker_id"])
        op.create_index("ix_sandboxes_not_kept", "sandboxes", ["worker_id"], postgresql_where=sa.text("NOT kept"))
        op.create_index("ix_sessions_worker_id", "sessions", ["worker_id"])


def downgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.drop_index("ix_sessions_worker_id", "sessions")
        op.drop_index("ix_sandboxes_not_kept", "sandboxes")
        op.drop_index("ix_leases_worker_id", "leases")
        op.drop_index("ix_calls_created_at", "calls")
    op.drop_table("audit")
    op.drop_table("call_keys")
    op.drop_column("sandboxes", "kept")
    for column in ("kept_sandboxes", "kept_gpu_memory_bytes", "kept_memory_bytes", "report"):
        op.drop_column("workers", column)
