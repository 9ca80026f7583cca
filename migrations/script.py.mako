"""${message}

Works on DuckDB and on PostgreSQL, up and down, with data in the tables. Its text is frozen: it uses nothing of `app/`.
A router of the version before may still be running: what it reads and writes must go on working.
"""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    ${downgrades if downgrades else "pass"}
