"""Planes, which price what an option lacks in binary digits, in place of atoms with prices and of classes of them.

Works on DuckDB and on PostgreSQL, up and down, with data in the tables: catalogues stay, because the new tables are
computed from the old ones, and the other way round. Its text is frozen: it uses nothing of `app/`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import sqlalchemy as sa
from alembic import op
from numpy.typing import NDArray
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import UserDefinedType

revision = "0003"
down_revision = "0002"


class Bits(UserDefinedType[str]):
    """A bit string of any length."""

    cache_ok = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_options: object) -> str:
        return self.name


def bits_type() -> str:
    return "BIT VARYING" if op.get_bind().dialect.name == "postgresql" else "BIT"


def of_catalogue(table: str) -> list[sa.ForeignKeyConstraint]:
    # DuckDB refuses to delete a row and those that refer to it in one transaction: foreign keys are PostgreSQL's only.
    if op.get_bind().dialect.name != "postgresql":
        return []
    name = op.f(f"fk_{table}_catalogue_id")
    return [sa.ForeignKeyConstraint(["catalogue_id"], ["catalogues.catalogue_id"], name=name)]


def upgrade() -> None:
    op.create_table(
        "contents",
        sa.Column("catalogue_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("bits", Bits(bits_type()), nullable=False),
        *of_catalogue("contents"),
        sa.PrimaryKeyConstraint("catalogue_id", "ordinal", name=op.f("pk_contents")),
    )
    op.create_table(
        "planes",
        sa.Column("catalogue_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("weight", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("bits", Bits(bits_type()), nullable=False),
        sa.CheckConstraint("weight > 0", name=op.f("ck_planes_weight")),
        *of_catalogue("planes"),
        sa.PrimaryKeyConstraint("catalogue_id", "ordinal", "weight", name=op.f("pk_planes")),
    )
    for catalogue_id in catalogue_ids():
        atoms = select("SELECT class_id, load_ns FROM atoms WHERE catalogue_id = :id ORDER BY atom_id", catalogue_id)
        ordinals = dict(select("SELECT class_id, ordinals FROM classes WHERE catalogue_id = :id", catalogue_id))
        sizes = select("SELECT size_ns FROM checkpoints WHERE catalogue_id = :id ORDER BY ordinal", catalogue_id)
        old_length, length = round_up(len(atoms)), round_up(len(atoms) + 1)
        prices = np.zeros((1 + len(sizes), length), np.int64)  # of the cold start, and of each checkpoint
        held = np.zeros((1 + len(sizes), length), np.bool_)
        for atom_id, (class_id, load_ns) in enumerate(atoms):
            prices[:, atom_id] = load_ns
            held[[ordinal + 1 for ordinal in ordinals[class_id]], atom_id] = True
        prices[held] = 0
        prices[1:, len(atoms)] = [size_ns for (size_ns,) in sizes]
        every = np.arange(length) == len(atoms)
        insert("contents (ordinal, bits)", catalogue_id, [(n, as_text(row)) for n, row in enumerate(held[1:])])
        insert("planes (ordinal, weight, bits)", catalogue_id, find_planes(prices))
        if length > old_length:
            more = f"bits || CAST(:more AS {bits_type()})"
            op.get_bind().execute(
                sa.text(f"UPDATE closures SET bits = {more} WHERE catalogue_id = :id"),  # noqa: S608
                {"more": "0" * (length - old_length), "id": catalogue_id},
            )
        insert("closures (closure_id, bits)", catalogue_id, [(-1, as_text(every))])
    op.drop_table("atoms")
    op.drop_table("classes")


def downgrade() -> None:
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
        "classes",
        sa.Column("catalogue_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("class_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ordinals", postgresql.ARRAY(sa.Integer()), nullable=False),
        *of_catalogue("classes"),
        sa.PrimaryKeyConstraint("catalogue_id", "class_id", name=op.f("pk_classes")),
    )
    for catalogue_id in catalogue_ids():
        [(count,)] = select("SELECT coalesce(max(atom_id) + 1, 0) FROM items WHERE catalogue_id = :id", catalogue_id)
        planes = select(
            "SELECT weight, CAST(bits AS text) FROM planes WHERE catalogue_id = :id AND ordinal = -1", catalogue_id
        )
        contents = select(
            "SELECT CAST(bits AS text) FROM contents WHERE catalogue_id = :id ORDER BY ordinal", catalogue_id
        )
        load_ns = sum((weight * as_array(bits) for weight, bits in planes), np.zeros(1, np.int64))
        op.get_bind().execute(
            sa.text(
                f"UPDATE closures SET bits = CAST(substring(CAST(bits AS text), 1, :length) AS {bits_type()}) "  # noqa: S608
                "WHERE catalogue_id = :id"
            ),
            {"length": round_up(count), "id": catalogue_id},
        )
        classes: dict[tuple[int, ...], int] = {}
        held = np.array([as_array(bits) for (bits,) in contents]).reshape(len(contents), len(load_ns))
        rows = []
        for atom_id in range(count):
            ordinals = tuple(np.flatnonzero(held[:, atom_id]).tolist())
            rows.append((atom_id, classes.setdefault(ordinals, len(classes)), int(load_ns[atom_id])))
        insert("atoms (atom_id, class_id, load_ns)", catalogue_id, rows)
        for ordinals, class_id in classes.items():
            op.get_bind().execute(
                sa.text("INSERT INTO classes VALUES (:catalogue_id, :class_id, CAST(:ordinals AS integer[]))"),
                {"catalogue_id": catalogue_id, "class_id": class_id, "ordinals": list(ordinals)},
            )
    op.execute("DELETE FROM closures WHERE closure_id = -1")
    op.drop_table("planes")
    op.drop_table("contents")


def round_up(bits: int) -> int:
    """Bit strings are of whole bytes."""
    return (bits + 7) // 8 * 8


def find_planes(prices: NDArray[np.int64]) -> Iterator[tuple[int, int, str]]:
    """The binary digits of the prices of each option, the cold start (ordinal -1) first: a plane for each that any atom
    has, and always that of weight 1.
    """
    for ordinal, mine in enumerate(prices, start=-1):
        for digit in range(max(int(mine.max()).bit_length(), 1)):
            bits = (mine >> digit & 1).astype(np.bool_)
            if digit == 0 or bits.any():
                yield ordinal, 1 << digit, as_text(bits)


def as_text(bits: NDArray[np.bool_]) -> str:
    return (bits.astype(np.uint8) + ord("0")).tobytes().decode()


def as_array(bits: str) -> NDArray[np.int64]:
    return (np.frombuffer(bits.encode(), np.uint8) - ord("0")).astype(np.int64)


def catalogue_ids() -> list[int]:
    return list(op.get_bind().execute(sa.text("SELECT catalogue_id FROM catalogues")).scalars())


def select(query: str, catalogue_id: int) -> list[Any]:
    return list(op.get_bind().execute(sa.text(query), {"id": catalogue_id}))


def insert(into: str, catalogue_id: int, rows: Iterable[tuple[int | str, ...]]) -> None:
    """All rows in one statement, a list a column; `into` names the table and its columns."""
    table, _, names = into.removesuffix(")").partition(" (")
    types = {"bits": "text[]", "weight": "bigint[]", "load_ns": "bigint[]"}
    columns = names.split(", ")
    values = [f"unnest(CAST(:{name} AS {types.get(name, 'integer[]')})) AS {name}" for name in columns]
    wanted = [f"CAST({name} AS {bits_type()})" if name == "bits" else name for name in columns]
    lists = zip(*rows, strict=True)
    parameters = dict(zip(columns, map(list, lists), strict=False))
    if parameters:
        op.get_bind().execute(
            sa.text(
                f"INSERT INTO {table} (catalogue_id, {names}) "  # noqa: S608 - names of ours
                f"SELECT :catalogue_id, {', '.join(wanted)} FROM (SELECT {', '.join(values)}) AS given"
            ),
            {"catalogue_id": catalogue_id, **parameters},
        )
