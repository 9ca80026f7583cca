"""The Parquet projection of a catalogue document: a folder beside it, for a fast import and for people's SQL.

`catalogue.parquet` has one row, with the SHA-256 of the document and of each other file; the rest is named and shaped
like the router's tables. Ids are dense integers, in the document's order.
"""

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from readie.document import (
    MAX_NS,
    RESOURCE_TYPES,
    VERSION,
    Catalogue,
    Checkpoint,
    hash_document,
    name_generation,
    read_document,
)
from readie.errors import BadDocument, BadFile, BadProjection
from readie.flavor import Flavor


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, type_, nullable=False) for name, type_ in columns.items()])


_TABLES = {
    "distributions": _schema(name=pa.string(), version=pa.string()),
    "items": _schema(
        item_id=pa.int32(),
        key=pa.string(),
        load_ns=pa.int64(),
        size_mb=pa.float64(),
        resource_type=pa.string(),
        distribution=pa.string(),
    ),
    "dependencies": _schema(item_id=pa.int32(), dependency_id=pa.int32()),
    "checkpoints": _schema(
        ordinal=pa.int32(),
        checkpoint_id=pa.string(),
        size_mb=pa.float64(),
        size_bytes=pa.int64(),
        size_ns=pa.int64(),
    ),
    "checkpoint_items": _schema(ordinal=pa.int32(), item_id=pa.int32(), canonical=pa.bool_()),
}
_ANOTHER_DOCUMENT = "it belongs to another document"
_CATALOGUE = _schema(
    version=pa.int32(),
    flavor=pa.string(),
    alpha=pa.float64(),
    generation=pa.string(),
    sha256=pa.string(),
    **{f"{name}_sha256": pa.string() for name in _TABLES},
)


def projection_path(json_path: Path) -> Path:
    """Where the projection of the document `json_path` lies: `cpu.json` → `cpu.parquet`."""
    return json_path.with_suffix(".parquet")


def write_projection(catalogue: Catalogue, folder: Path) -> None:
    """Writes the projection; a reader finds the old one, none, or the new one, never a mixture. Raises `BadFile`."""
    aside = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        digests = {}
        for name, columns in _columns(catalogue).items():
            digests[f"{name}_sha256"] = _write_table(aside, name, columns, _TABLES[name])
        row = {
            "version": VERSION,
            "flavor": catalogue.flavor.value,
            "alpha": catalogue.alpha,
            "generation": catalogue.generation,
            "sha256": catalogue.sha256,
            **digests,
        }
        _write_table(aside, "catalogue", {column: [value] for column, value in row.items()}, _CATALOGUE)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    except OSError as error:
        raise BadFile(f"{folder}: {error.strerror or error}", "The document is good without it.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _columns(catalogue: Catalogue) -> dict[str, dict[str, Any]]:
    items = np.arange(len(catalogue.keys), dtype=np.int32)
    checkpoints = catalogue.checkpoints
    held = [each.items for each in checkpoints]
    return {
        "distributions": {
            "name": list(catalogue.distributions),
            "version": list(catalogue.distributions.values()),
        },
        "items": {
            "item_id": items,
            "key": catalogue.keys,
            "load_ns": catalogue.load_ns,
            "size_mb": catalogue.size_mb,
            "resource_type": catalogue.resource_types,
            "distribution": catalogue.item_distributions,
        },
        "dependencies": {
            "item_id": np.repeat(items, np.diff(catalogue.offsets)),
            "dependency_id": catalogue.dependencies,
        },
        "checkpoints": {
            "ordinal": range(len(checkpoints)),
            "checkpoint_id": [each.checkpoint_id for each in checkpoints],
            "size_mb": [each.size_mb for each in checkpoints],
            "size_bytes": [each.size_bytes for each in checkpoints],
            "size_ns": [each.size_ns for each in checkpoints],
        },
        "checkpoint_items": {
            "ordinal": np.repeat(np.arange(len(held), dtype=np.int32), [len(ids) for ids in held]),
            "item_id": np.concatenate(held) if held else [],
            "canonical": np.concatenate([np.isin(each.items, each.canonical) for each in checkpoints]) if held else [],
        },
    }


def _write_table(folder: Path, name: str, columns: dict[str, Any], schema: pa.Schema) -> str:
    """Writes `<name>.parquet` and returns the SHA-256 of its bytes."""
    path = folder / f"{name}.parquet"
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), path, compression="zstd")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_projection(folder: Path, sha256: str | None) -> Catalogue:
    """The catalogue of the document with this SHA-256 (None: of whichever it is), from its projection.

    Raises `BadProjection`: it is not there, not whole, of another document, or says what no document can.
    """
    if not folder.is_dir():
        raise BadProjection("there is none")
    catalogue = _read_table(folder, "catalogue", _CATALOGUE, None)
    _hold(len(catalogue["sha256"]) == 1, "catalogue.parquet has not one row")
    row = {name: column[0] for name, column in catalogue.items()}
    _hold(sha256 in (None, row["sha256"]), _ANOTHER_DOCUMENT)
    _hold(row["version"] == VERSION, f"it is of version {row['version']}")
    _hold(row["flavor"] in list(Flavor) and 0 < row["alpha"] < np.inf, "catalogue.parquet is not valid")
    tables = {name: _read_table(folder, name, schema, row[f"{name}_sha256"]) for name, schema in _TABLES.items()}
    return _assemble(row, tables)


def load_catalogue(json_path: Path) -> Catalogue:
    """The catalogue of the document `json_path`: from its projection where that is good, else from the document,
    with the reason as the first of its `warnings`. Raises `BadDocument`, also for a file that changes meanwhile.
    """
    folder = projection_path(json_path)
    with ThreadPoolExecutor(1) as pool:  # the one takes about as long as the other
        hashing = pool.submit(hash_document, json_path)
        try:
            catalogue = read_projection(folder, None)
            reason = _ANOTHER_DOCUMENT
        except BadProjection as error:
            catalogue, reason = None, error.detail
        sha256 = hashing.result()
    if catalogue is not None and catalogue.sha256 == sha256:
        return catalogue
    del catalogue  # before another one takes memory
    document = _read_unchanged(json_path, sha256)
    warning = f"{json_path}: read from JSON, without the projection {folder.name}: {reason}"
    return replace(document, warnings=(warning, *document.warnings))


def _read_unchanged(path: Path, sha256: str) -> Catalogue:
    """The document, if what is read is what was hashed: not the half of one file and the half of the next."""
    try:
        catalogue = read_document(path)
    except BadDocument as error:
        if hash_document(path) == sha256:
            raise
        raise changed_while_read(path) from error
    if catalogue.sha256 != sha256:
        raise changed_while_read(path)
    return catalogue


def changed_while_read(path: Path) -> BadDocument:
    """What is said of a file that somebody was writing."""
    return BadDocument(f"{path}: it changed while it was read, and is left alone", "Import it again when it is whole.")


def _hold(true: object, reason: str) -> None:
    if not true:
        raise BadProjection(reason)


def _read_table(folder: Path, name: str, schema: pa.Schema, sha256: str | None) -> dict[str, Any]:
    """The columns of `<name>.parquet`: numbers as arrays, texts as lists."""
    try:
        data = (folder / f"{name}.parquet").read_bytes()
        _hold(sha256 in (None, hashlib.sha256(data).hexdigest()), f"{name}.parquet is not the file that was written")
        table = pq.ParquetFile(pa.BufferReader(data)).read()
        _hold(table.schema.equals(schema), f"{name}.parquet has other columns")
        return {
            field.name: table[field.name].to_pylist()
            if pa.types.is_string(field.type)
            else table[field.name].to_numpy()
            for field in schema
        }
    except FileNotFoundError as error:
        raise BadProjection(f"{name}.parquet is missing") from error
    except (OSError, pa.ArrowException, ValueError) as error:
        raise BadProjection(f"{name}.parquet cannot be read: {str(error).partition(chr(10))[0]}") from error


def _assemble(row: dict[str, Any], tables: dict[str, dict[str, Any]]) -> Catalogue:
    """The catalogue, held to the rules that its readers rely on. The values are the document's: it was read once."""
    items, edges = tables["items"], tables["dependencies"]
    count = len(items["key"])
    _hold(np.array_equal(items["item_id"], np.arange(count)), "item ids are not dense")
    _hold(len(set(items["key"])) == count, "an item is there twice")
    _hold(set(items["resource_type"]) <= set(RESOURCE_TYPES), "an item has an unknown resource type")
    _hold(np.all(items["load_ns"] >= 0) and sum(items["load_ns"].tolist()) < MAX_NS, "load times are out of range")
    _hold(np.all(items["size_mb"] >= 0) and np.all(np.isfinite(items["size_mb"])), "sizes are out of range")
    _hold(_is_relation(edges["item_id"], edges["dependency_id"], count, count), "dependencies are not in order")
    checkpoints = _assemble_checkpoints(tables["checkpoints"], tables["checkpoint_items"], count)
    keys = items["key"]
    flavor = Flavor(row["flavor"])
    distributions = dict(zip(tables["distributions"]["name"], tables["distributions"]["version"], strict=True))
    generation = name_generation(flavor, distributions, keys, checkpoints)
    _hold(generation == row["generation"], "its contents are not of the generation that it names")
    return Catalogue(
        flavor=flavor,
        alpha=float(row["alpha"]),
        sha256=row["sha256"],
        generation=generation,
        distributions=distributions,
        keys=keys,
        load_ns=items["load_ns"],
        size_mb=items["size_mb"],
        resource_types=items["resource_type"],
        item_distributions=items["distribution"],
        offsets=np.searchsorted(edges["item_id"], np.arange(count + 1, dtype=np.int32)).astype(np.int64),
        dependencies=edges["dependency_id"],
        checkpoints=checkpoints,
    )


def _assemble_checkpoints(checkpoints: dict[str, Any], held: dict[str, Any], items: int) -> list[Checkpoint]:
    count = len(checkpoints["checkpoint_id"])
    _hold(np.array_equal(checkpoints["ordinal"], np.arange(count)), "checkpoints are not in order")
    _hold(len(set(checkpoints["checkpoint_id"])) == count, "a checkpoint is there twice")
    for column in ("size_mb", "size_bytes", "size_ns"):
        values = checkpoints[column]
        _hold(np.all(values >= 0) and np.all(np.isfinite(values)), "sizes of checkpoints are out of range")
    _hold(np.all(checkpoints["size_ns"] < MAX_NS), "prices of checkpoints are out of range")
    _hold(_is_relation(held["ordinal"], held["item_id"], count, items), "items of checkpoints are not in order")
    bounds = np.searchsorted(held["ordinal"], np.arange(count + 1, dtype=np.int32))
    assembled = []
    for n in range(count):
        ids = held["item_id"][bounds[n] : bounds[n + 1]]
        assembled.append(
            Checkpoint(
                checkpoint_id=checkpoints["checkpoint_id"][n],
                items=ids,
                canonical=ids[held["canonical"][bounds[n] : bounds[n + 1]]],
                size_mb=float(checkpoints["size_mb"][n]),
                size_bytes=int(checkpoints["size_bytes"][n]),
                size_ns=int(checkpoints["size_ns"][n]),
            )
        )
    return assembled


def _is_relation(lefts: Any, rights: Any, left_count: int, right_count: int) -> bool:
    """Whether the pairs are sorted and distinct, and both sides are ids."""
    if not len(lefts):
        return True
    if lefts[0] < 0 or lefts[-1] >= left_count or rights.min() < 0 or rights.max() >= right_count:
        return False
    same = lefts[1:] == lefts[:-1]
    return bool(np.all((lefts[1:] > lefts[:-1]) | (same & (rights[1:] > rights[:-1]))))
