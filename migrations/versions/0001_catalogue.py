"""The catalogues: documents, their items, closures and checkpoints.

Works on DuckDB and on PostgreSQL, up and down, with data in the tables. Its text is frozen: it uses nothing of `app/`.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import UserDefinedType

revision = "0001"
down_revision = None

TABLES = [
    "catalogues",
    "active_catalogues",
    "distributions",
    "items",
    "atoms",
    "closures",
    "classes",
    "checkpoints",
    "canonical_items",
]


class Bits(UserDefinedType[str]):
    """A bit string of any length."""

    cache_ok = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_options: object) -> str:
        return self.name


def of_catalogue(table: str) -> list[sa.ForeignKeyConstraint]:
    # DuckDB refuses to delete a row and those that refer to it in one transaction: foreign keys are PostgreSQL's only.
    if op.get_bind().dialect.name != "postgresql":
        return []
    name = op.f(f"fk_{table}_catalogue_id")
    return [sa.ForeignKeyConstraint(["catalogue_id"], ["catalogues.catalogue_id"], name=name)]


def upgrade() -> None:
    on_postgresql = op.get_bind().dialect.name == "postgresql"
    bits = Bits("BIT VARYING" if on_postgresql else "BIT")
    flavored = (
        [
            sa.ForeignKeyConstraint(
                ["catalogue_id", "flavor"],
                ["catalogues.catalogue_id", "catalogues.flavor"],
                name=op.f("fk_active_catalogues_catalogue_id_flavor"),
            )
        ]
        if on_postgresql
        else []
    )
    op.create_table(
        "catalogues",
        sa.Column("catalogue_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("generation", sa.Text(), nullable=False),
        sa.Column("flavor", sa.Text(), nullable=False),
        sa.Column("alpha", sa.Double(), nullable=False),
        sa.Column("item_count", sa.Integer(), nullable=False),
        sa.Column("checkpoint_count", sa.Integer(), nullable=False),
        sa.Column("distribution_count", sa.Integer(), nullable=False),
        sa.Column("imported_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("flavor IN ('cpu', 'gpu')", name=op.f("ck_catalogues_flavor")),
        sa.CheckConstraint("alpha > 0", name=op.f("ck_catalogues_alpha")),
        sa.PrimaryKeyConstraint("catalogue_id", name=op.f("pk_catalogues")),
        sa.UniqueConstraint("catalogue_id", "flavor", name=op.f("uq_catalogues_catalogue_id_flavor")),
        sa.UniqueConstraint("sha256", name=op.f("uq_catalogues_sha256")),
    )
    op.create_table(
        "active_catalogues",
        sa.Column("flavor", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("catalogue_id", sa.Integer(), nullable=False),
        sa.Column("activated_by", sa.Text(), nullable=False),
        sa.Column("file_sha256", sa.Text(), nullable=True),
        sa.Column("activated_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("activated_by IN ('file', 'request')", name=op.f("ck_active_catalogues_activated_by")),
        sa.CheckConstraint("flavor IN ('cpu', 'gpu')", name=op.f("ck_active_catalogues_flavor")),
        *flavored,
        sa.PrimaryKeyConstraint("flavor", name=op.f("pk_active_catalogues")),
    )
    op.create_table(
        "distributions",
        sa.Column("catalogue_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        *of_catalogue("distributions"),
        sa.PrimaryKeyConstraint("catalogue_id", "name", name=op.f("pk_distributions")),
    )
    op.create_table(
        "items",
        sa.Column("catalogue_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("item_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("load_ns", sa.BigInteger(), nullable=False),
        sa.Column("size_mb", sa.Double(), nullable=False),
        sa.Column("resource_type", sa.Text(), nullable=False),
        sa.Column("distribution", sa.Text(), nullable=False),
        sa.Column("closure_id", sa.Integer(), nullable=False),
        sa.Column("atom_id", sa.Integer(), nullable=False),
        sa.CheckConstraint(
            "resource_type IN ('package', 'dataset', 'model', 'tokenizer')", name=op.f("ck_items_resource_type")
        ),
        sa.CheckConstraint("load_ns >= 0 AND size_mb >= 0", name=op.f("ck_items_not_negative")),
        *of_catalogue("items"),
        sa.PrimaryKeyConstraint("catalogue_id", "item_id", name=op.f("pk_items")),
        sa.UniqueConstraint("catalogue_id", "key", name=op.f("uq_items_catalogue_id_key")),
    )
    op.create_table(
        "atoms",
        sa.Column("catalogue_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("atom_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("class_id", sa.Integer(), nullable=False),
        sa.Column("load_ns", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("load_ns >= 0", name=op.f("ck_atoms_not_negative")),
        *of_catalogue("atoms"),
        sa.PrimaryKeyConstraint("catalogue_id", "atom_id", name=op.f("pk_atoms")),
    )
    op.create_table(
        "closures",
        sa.Column("catalogue_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("closure_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("bits", bits, nullable=False),
        *of_catalogue("closures"),
        sa.PrimaryKeyConstraint("catalogue_id", "closure_id", name=op.f("pk_closures")),
    )
    op.create_table(
        "classes",
        sa.Column("catalogue_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("class_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ordinals", postgresql.ARRAY(sa.Integer()), nullable=False),
        *of_catalogue("classes"),
        sa.PrimaryKeyConstraint("catalogue_id", "class_id", name=op.f("pk_classes")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("catalogue_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("checkpoint_id", sa.Text(), nullable=False),
        sa.Column("size_mb", sa.Double(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("size_ns", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "size_mb >= 0 AND size_bytes >= 0 AND size_ns >= 0", name=op.f("ck_checkpoints_not_negative")
        ),
        *of_catalogue("checkpoints"),
        sa.PrimaryKeyConstraint("catalogue_id", "ordinal", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("catalogue_id", "checkpoint_id", name=op.f("uq_checkpoints_catalogue_id_checkpoint_id")),
    )
    op.create_table(
        "canonical_items",
        sa.Column("catalogue_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("item_id", sa.Integer(), autoincrement=False, nullable=False),
        *of_catalogue("canonical_items"),
        sa.PrimaryKeyConstraint("catalogue_id", "ordinal", "item_id", name=op.f("pk_canonical_items")),
    )


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)
