"""How long a call may wait for room: also when its placement ended before it ran.

Works on DuckDB and on PostgreSQL, up and down, with data in the tables. Its text is frozen: it uses nothing of `app/`.
Of calls that were placed before it is not known: they do not wait.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("calls", sa.Column("queue_ms", sa.BigInteger(), server_default=sa.text("0"), nullable=True))
    # In a second step: DuckDB adds no column that must not be null.
    op.execute("ALTER TABLE calls ALTER COLUMN queue_ms SET NOT NULL")


def downgrade() -> None:
    op.drop_column("calls", "queue_ms")
