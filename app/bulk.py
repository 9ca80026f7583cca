"""Bulk loads: columns become Arrow, are checked value by value, and enter a table in one statement.

Apart from app/database.py, which imports it for a load only: Arrow costs every start of a router a tenth of a second.
"""

from collections.abc import Mapping
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.pq import Format
from sqlalchemy import BigInteger, Column, Connection, Double, Integer, Table, Text, cast, column, select, table

from app.database import MAX_TEXT_BYTES, RowRefused
from app.tables import BitString


def checked(into: Table, columns: Mapping[str, Any]) -> pa.Table:
    """The columns as Arrow, every value of its column's type; what a database would refuse or alter is refused here."""
    arrays = {name: _array(into, into.c[name], values) for name, values in columns.items()}
    return pa.table(arrays)


def _array(into: Table, target: "Column[Any]", values: Any) -> pa.Array:
    kind = _arrow_type(target)
    try:
        array = _convert(values, kind)
    except _NOT_CONVERTED as error:
        row = _first_not_converted(values, kind)
        raise RowRefused(into.name, row, target.name, f"{values[row]!r:.80} is no {target.type}: {error}") from error
    wrong: dict[str, Any] = {}
    if not target.nullable:
        wrong["is missing"] = pc.is_null(array)
    if pa.types.is_floating(kind):
        wrong["is not a finite number"] = pc.invert(pc.is_finite(array))
    if pa.types.is_string(kind):
        wrong["contains NUL"] = pc.match_substring(array, "\0")
        wrong[f"is longer than {MAX_TEXT_BYTES} bytes"] = pc.greater(pc.binary_length(array), MAX_TEXT_BYTES)
    for rule, where in wrong.items():
        row = pc.index(where, value=True).as_py()
        if row >= 0:
            raise RowRefused(into.name, row, target.name, f"{array[row].as_py()!r:.80} {rule}")
    return array


_NOT_CONVERTED = (pa.ArrowException, OverflowError, TypeError, ValueError)


def _first_not_converted(values: Any, kind: pa.DataType) -> int:
    """The row at which conversion fails, by halving."""
    good, bad = 0, len(values)  # this many from the start convert, and do not
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            _convert(values[:middle], kind)
        except _NOT_CONVERTED:
            bad = middle
        else:
            good = middle
    return good


def _convert(values: Any, kind: pa.DataType) -> pa.Array:
    if pa.types.is_integer(kind):  # told the type, Arrow makes 2 of 2.5; cast, it refuses
        return pa.array(values).cast(kind)
    return pa.array(values, type=kind)


def _arrow_type(target: "Column[Any]") -> pa.DataType:
    match target.type:
        case BigInteger():
            return pa.int64()
        case Integer():
            return pa.int32()
        case Double():
            return pa.float64()
        case Text():
            return pa.string()
        case BitString():
            return pa.binary()
        case other:
            raise NotImplementedError(f"{target}: no bulk load of {other!r}")


def insert(connection: Connection, into: Table, rows: pa.Table) -> None:
    """DuckDB reads the Arrow table where it lies. Bytes become bits."""
    driver = connection.connection.driver_connection
    if driver is None:
        raise RuntimeError("the connection is closed")
    driver.register("loading", rows)
    names = rows.column_names
    source = select(*(cast(column(name), into.c[name].type) for name in names)).select_from(table("loading"))
    connection.execute(into.insert().from_select(names, source))
    driver.unregister("loading")  # after a failure it goes with the transaction


_POSTGRESQL_TYPES = {pa.int64(): "int8", pa.int32(): "int4", pa.float64(): "float8", pa.string(): "text"}
_POSTGRESQL_TYPES |= {pa.binary(): "varbit"}


class _BitsDumper(Dumper):
    """Bytes as `bit varying`: the number of bits, then the bytes."""

    format = Format.BINARY
    oid = psycopg.postgres.types["varbit"].oid

    def dump(self, obj: bytes) -> Buffer:
        return (8 * len(obj)).to_bytes(4, "big") + obj


def copy(connection: Connection, into: Table, rows: pa.Table) -> None:
    driver = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection):
        raise TypeError("the connection is not psycopg's")
    names = [sql.Identifier(name) for name in rows.column_names]
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)")
    with driver.cursor() as cursor:
        cursor.adapters.register_dumper(bytes, _BitsDumper)
        with cursor.copy(statement.format(sql.Identifier(into.name), sql.SQL(", ").join(names))) as copy:
            copy.set_types([_POSTGRESQL_TYPES[kind] for kind in rows.schema.types])
            for batch in rows.to_batches(max_chunksize=10_000):
                for row in zip(*(values.to_pylist() for values in batch.columns), strict=True):
                    copy.write_row(row)
