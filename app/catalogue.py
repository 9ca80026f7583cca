"""Catalogues in the database: import, activation, the files of CATALOGUE_DIR, look-ups."""

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import structlog
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, delete

from app.database import Database, RowRefused
from app.sql import statement
from app.tables import (
    canonical_items,
    catalogues,
    checkpoints,
    closures,
    contents,
    distributions,
    items,
    planes,
)
from readie.closure import Closures, compute_closures
from readie.cost import COLD
from readie.document import Catalogue, Ids, hash_document, peek_flavor, read_document
from readie.errors import BadDocument, UnknownCatalogue
from readie.flavor import Flavor
from readie.projection import changed_while_read, load_catalogue

log = structlog.get_logger()

ActivatedBy = Literal["file", "request"]

#: Every table that belongs to a catalogue; what refers to another comes after it.
_TABLES = (catalogues, distributions, checkpoints, contents, planes, closures, items, canonical_items)


MAX_NS = 2**63 - 1

#: Seconds that an import may compute, and files may be read, between two statements.
LONGEST_PAUSE = 600.0

#: Documents are read one at a time: a big one takes up to 800 MB meanwhile.
_turn = threading.Lock()

# ---- import and activation ----


def import_document(database: Database, path: Path, sha256: str, name: str) -> tuple[str, ...]:
    """Makes the document in the file `path`, which has this SHA-256 and stays as it is, the active catalogue of its
    flavor. One that is there already is not read again.

    Returns what was ignored or dropped in it. Raises `BadDocument`, which calls it `name`; nothing has changed then.
    """
    with database.reading() as connection:
        known = find_catalogue(connection, sha256)
    if known is not None:
        with suppress(UnknownCatalogue):  # dropped in the meantime
            activate_catalogue(database, sha256)
            return ()
    with _turn:
        catalogue = read_document(path, name)
        import_catalogue(database, catalogue)
    return catalogue.warnings


def import_catalogue(database: Database, catalogue: Catalogue, activated_by: ActivatedBy = "request") -> int:
    """Stores a catalogue, makes it the active one of its flavor and drops those that nothing needs any more.

    All in one transaction: afterwards it is whole and active, or nothing has changed. One that is there already is
    only activated. Returns its id. Raises `BadDocument` when a row is refused, with its place.
    """
    with database.reading() as connection:
        known = find_catalogue(connection, catalogue.sha256)
    form = None if known else atomize(catalogue, compute_closures(catalogue))  # outside the transaction: it takes time
    with database.transaction() as connection:
        database.let_pause(connection, LONGEST_PAUSE)
        database.lock(connection, "catalogues")
        known = find_catalogue(connection, catalogue.sha256)
        if known is not None:
            catalogue_id = int(known.catalogue_id)
        else:
            form = form or atomize(catalogue, compute_closures(catalogue))
            catalogue_id = int(connection.execute(statement("next_catalogue_id")).scalar_one())
            _load(database, connection, catalogue_id, catalogue, form)
        file_sha256 = catalogue.sha256 if activated_by == "file" else None
        _activate(connection, catalogue_id, activated_by, file_sha256)
    log.info(
        "catalogue activated",
        flavor=str(catalogue.flavor),
        sha256=catalogue.sha256,
        generation=catalogue.generation,
        activated_by=activated_by,
        imported=known is None,
        **({} if form is None else {"items": len(catalogue.keys), "atoms": form.atoms}),
    )
    return catalogue_id


def activate_catalogue(
    database: Database, sha256: str, flavor: Flavor | None = None, activated_by: ActivatedBy = "request"
) -> int:
    """Makes an imported catalogue the active one of its flavor. Returns its id.

    Earlier ones can be activated as long as they are kept. Raises `UnknownCatalogue` if there is none with this
    SHA-256, or it is of another flavor than `flavor`.
    """
    with database.transaction() as connection:
        database.lock(connection, "catalogues")
        known = find_catalogue(connection, sha256)
        if known is None:
            way_out = "readie-router catalogues --json lists those that are imported, readie-router import adds one."
            raise UnknownCatalogue(f"no catalogue {sha256} is imported", way_out)
        if flavor is not None and known.flavor != flavor:
            way_out = f"Activate it for flavor {known.flavor}."
            raise UnknownCatalogue(f"catalogue {sha256} is of flavor {known.flavor}, not {flavor}", way_out)
        _activate(connection, known.catalogue_id, activated_by, sha256 if activated_by == "file" else None)
    log.info("catalogue activated", flavor=known.flavor, sha256=sha256, activated_by=activated_by, imported=False)
    return int(known.catalogue_id)


@dataclass(frozen=True, eq=False)
class PhysicalForm:
    """A catalogue's closures and checkpoints as the tables hold them (docs/decisions/0001-closures.md).

    An atom is a set of items that all closures and all checkpoints treat alike. One atom more, the last, belongs to no
    item: every call needs it, and it costs the size of whatever checkpoint is restored. Bit strings are over atoms, of
    whole bytes: number 0 is the first byte's highest bit.
    """

    closure_of: Ids  # (items,): the component that it belongs to
    atom_of: NDArray[np.int64]  # (items,)
    atoms: int  # without the last
    closures: list[bytes]  # (components + 1,): what each needs; the first is what every call needs
    contents: list[bytes]  # (checkpoints,): what each holds
    planes: list[tuple[int, int, bytes]]  # (ordinal, weight, atoms whose price there has this binary digit)


def atomize(catalogue: Catalogue, reached: Closures) -> PhysicalForm:
    """The physical form of a catalogue and its closures."""
    held = np.zeros((len(catalogue.keys), len(catalogue.checkpoints)), np.bool_)
    for ordinal, checkpoint in enumerate(catalogue.checkpoints):
        held[checkpoint.items, ordinal] = True
    item_class, patterns = _alike(held)
    components = len(reached.reach)
    found, atom_of = np.unique(item_class * components + reached.component, return_inverse=True)
    atom_class, atom_component = np.divmod(found, max(components, 1))
    load_ns = np.zeros(len(found), np.int64)
    np.add.at(load_ns, atom_of, catalogue.load_ns)

    closures = _pack(np.eye(1, len(found) + 1, len(found), np.bool_))
    for start in range(0, components, 256):  # in parts: unpacked they are eight times as large
        needed = np.unpackbits(reached.reach[start : start + 256], axis=1)[:, atom_component]
        closures += _pack(np.pad(needed, [(0, 0), (0, 1)]))
    contents: list[bytes] = []
    planes = list(_slice(COLD, np.append(load_ns, 0)))
    for ordinal, checkpoint in enumerate(catalogue.checkpoints):
        holds = patterns[atom_class, ordinal]
        contents += _pack(np.append(holds, [False])[None])
        size_ns = min(checkpoint.size_ns, MAX_NS)  # the database refuses a larger one, and its row is named
        planes += _slice(ordinal, np.append(np.where(holds, 0, load_ns), size_ns))
    return PhysicalForm(
        closure_of=reached.component,
        atom_of=atom_of,
        atoms=len(found),
        closures=closures,
        contents=contents,
        planes=planes,
    )


def _slice(ordinal: int, prices_ns: NDArray[np.int64]) -> Iterator[tuple[int, int, bytes]]:
    """The binary digits of the prices that the atoms have with one option: a plane for each that any of them has.

    That of weight 1 is always there, so that whatever is needed costs something, though it be 0.
    """
    digits = np.arange(max(int(prices_ns.max()).bit_length(), 1))
    bits = prices_ns >> digits[:, None] & 1
    for digit, row in enumerate(_pack(bits)):
        if digit == 0 or any(row):
            yield ordinal, 1 << digit, row


def _pack(rows: NDArray[Any]) -> list[bytes]:
    """Each row as a string of bits."""
    return [row.tobytes() for row in np.packbits(rows.astype(np.bool_), axis=1)]


def _alike(rows: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The number of each row's pattern, and the distinct patterns."""
    if rows.shape[1] == 0:
        return np.zeros(len(rows), np.int64), rows[:1]
    packed = np.packbits(rows, axis=1)
    _, first, number = np.unique(packed.view(f"V{packed.shape[1]}").ravel(), return_index=True, return_inverse=True)
    return number.astype(np.int64), rows[first]


def _load(
    database: Database, connection: Connection, catalogue_id: int, catalogue: Catalogue, form: PhysicalForm
) -> None:
    """Fills the tables of one catalogue, one statement each."""
    listed = catalogue.checkpoints
    canonical = [checkpoint.canonical for checkpoint in listed]
    columns: dict[str, dict[str, Any]] = {
        "catalogues": {
            "sha256": [catalogue.sha256],
            "generation": [catalogue.generation],
            "flavor": [str(catalogue.flavor)],
            "alpha": [catalogue.alpha],
            "item_count": [len(catalogue.keys)],
            "checkpoint_count": [len(listed)],
            "distribution_count": [len(catalogue.distributions)],
        },
        "distributions": {"name": list(catalogue.distributions), "version": list(catalogue.distributions.values())},
        "checkpoints": {
            "ordinal": range(len(listed)),
            "checkpoint_id": [checkpoint.checkpoint_id for checkpoint in listed],
            "size_mb": [checkpoint.size_mb for checkpoint in listed],
            "size_bytes": [checkpoint.size_bytes for checkpoint in listed],
            "size_ns": [checkpoint.size_ns for checkpoint in listed],
        },
        "contents": {"ordinal": range(len(listed)), "bits": form.contents},
        "planes": dict(zip(("ordinal", "weight", "bits"), zip(*form.planes, strict=True), strict=True)),
        "closures": {"closure_id": range(-1, len(form.closures) - 1), "bits": form.closures},
        "items": {
            "item_id": range(len(catalogue.keys)),
            "key": catalogue.keys,
            "load_ns": catalogue.load_ns,
            "size_mb": catalogue.size_mb,
            "resource_type": catalogue.resource_types,
            "distribution": catalogue.item_distributions,
            "closure_id": form.closure_of,
            "atom_id": form.atom_of,
        },
        "canonical_items": {
            "ordinal": np.repeat(np.arange(len(listed)), [len(ids) for ids in canonical]),
            "item_id": np.concatenate([np.zeros(0, np.int32), *canonical]),
        },
    }
    for table in _TABLES:
        rows = columns[table.name]
        count = len(next(iter(rows.values())))
        try:
            database.load(connection, table, {"catalogue_id": np.full(count, catalogue_id), **rows})
        except RowRefused as error:
            names = rows.get("key") or rows.get("checkpoint_id") or rows.get("name")
            named = f" ({names[error.row]!r:.80})" if names and error.row is not None else ""
            raise BadDocument(f"{catalogue.flavor} catalogue {catalogue.sha256}: {error}{named}") from error
    database.analyze(connection, _TABLES)


def _activate(connection: Connection, catalogue_id: int, activated_by: ActivatedBy, file_sha256: str | None) -> None:
    parameters = {"catalogue_id": catalogue_id, "activated_by": activated_by, "file_sha256": file_sha256}
    connection.execute(statement("activate_catalogue"), parameters)
    _prune(connection)


def _prune(connection: Connection) -> None:
    ids = connection.execute(statement("list_prunable_catalogues")).scalars().all()
    if ids:
        for table in reversed(_TABLES):
            connection.execute(delete(table).where(table.c.catalogue_id.in_(ids)))


# ---- the files of CATALOGUE_DIR ----


@dataclass(frozen=True)
class _File:
    path: Path
    sha256: str
    flavor: Flavor | None  # None: it names none, so it is no document
    imported: bool  # a catalogue of these bytes is in the database


def load_catalogue_dir(database: Database, folder: Path | None) -> list[str]:
    """Makes the catalogue of every `*.json` in `folder` the active one of its flavor (None: there are no files).

    A flavor without a file loses its active catalogue; one whose file is bad keeps it, and one that a request
    activated keeps it until the file's bytes change. Returns the warnings, one for each file that is not used and for
    each doubt about one that is, which are logged too. Never raises for a bad file.
    """
    warnings: list[str] = []

    def warn(reason: str) -> None:
        warnings.append(reason)
        log.warning("catalogue file", reason=reason)

    files: list[_File] = []
    doubtful: set[Flavor] = set()  # a bad file may be theirs
    with database.reading() as connection:
        database.let_pause(connection, LONGEST_PAUSE)  # while it reads files
        active = {row.flavor: row for row in connection.execute(statement("list_active_catalogues"))}
        if folder is not None:
            try:
                paths = sorted(
                    (path for path in folder.iterdir() if path.suffix == ".json"), key=lambda path: path.name
                )
            except OSError as error:
                warn(f"CATALOGUE_DIR {folder}: cannot be read, what was active stays so: {error.strerror}")
                return warnings
            for path in paths:
                try:
                    files.append(_look_at(connection, path))
                except BadDocument as error:
                    warn(error.detail)
                    doubtful |= _may_be(path)

    for file in files:
        if file.flavor is None:
            doubtful |= _may_be(file.path)
            try:
                load_catalogue(file.path)
                warn(changed_while_read(file.path).detail)
            except BadDocument as error:
                warn(error.detail)
    for flavor in Flavor:
        mine = [file for file in files if file.flavor is flavor]
        mine.sort(key=lambda file: file.path.name != f"{flavor}.json")  # stable: by name otherwise
        used: _File | None = None
        for file in mine:
            if used is not None:
                warn(f"{file.path}: not used, because {used.path.name} is of flavor {flavor} too and comes first")
                continue
            try:
                for reason in _use(database, file, flavor, active.get(flavor)):
                    warn(reason)
            except BadDocument as error:
                warn(error.detail)
                doubtful.add(flavor)
            else:
                used = file
        row = active.get(flavor)
        if used is None and flavor not in doubtful and row is not None and row.file_sha256 is not None:
            with database.transaction() as connection:
                connection.execute(statement("deactivate_flavor"), {"flavor": str(flavor)})
            log.info("catalogue deactivated", flavor=str(flavor), reason="CATALOGUE_DIR has no file of it")
    return warnings


def _look_at(connection: Connection, path: Path) -> _File:
    """Hashes before anything else: a file that was imported before is not read again."""
    sha256 = hash_document(path)
    known = find_catalogue(connection, sha256)
    if known is not None:
        return _File(path, sha256, Flavor(known.flavor), imported=True)
    return _File(path, sha256, peek_flavor(path), imported=False)


def _may_be(path: Path) -> set[Flavor]:
    """The flavors whose file a bad one may have been: its name's, else any."""
    return {flavor for flavor in Flavor if path.name == f"{flavor}.json"} or set(Flavor)


def _use(database: Database, file: _File, flavor: Flavor, active: Row[Any] | None) -> tuple[str, ...]:
    """Makes a file's catalogue the active one, unless a request decided otherwise since its bytes changed."""
    if active is not None and active.file_sha256 == file.sha256:
        return ()
    if file.imported:
        with suppress(UnknownCatalogue):  # dropped in the meantime
            activate_catalogue(database, file.sha256, flavor, "file")
            return ()
    with _turn:
        catalogue = load_catalogue(file.path)
        if catalogue.sha256 != file.sha256:  # it may be of another flavor, too
            raise changed_while_read(file.path)
        try:
            import_catalogue(database, catalogue, "file")
        except BadDocument as error:
            raise BadDocument(f"{file.path}: {error.detail}") from error
    return catalogue.warnings


# ---- look-ups ----


def find_catalogue(connection: Connection, sha256: str) -> Row[Any] | None:
    """(catalogue_id, sha256, generation, flavor, alpha) of the catalogue with this SHA-256, active or not."""
    return connection.execute(statement("find_catalogue"), {"sha256": sha256}).one_or_none()


def find_active_catalogue(connection: Connection, flavor: Flavor) -> Row[Any] | None:
    """(catalogue_id, sha256, generation, flavor, alpha) of the active catalogue of a flavor."""
    return connection.execute(statement("find_active_catalogue"), {"flavor": str(flavor)}).one_or_none()


def list_catalogues(connection: Connection, flavor: Flavor | None = None) -> Sequence[Row[Any]]:
    """(catalogue_id, sha256, generation, flavor, alpha, active, imported_at, item_count, checkpoint_count,
    distribution_count) of all catalogues, or those of one flavor: the active one first, then the newest.
    """
    return connection.execute(statement("list_catalogues"), {"flavor": flavor and str(flavor)}).all()


def read_distributions(connection: Connection, catalogue_id: int, names: Iterable[str] | None = None) -> dict[str, str]:
    """Canonical name → version of the root filesystem's distributions, all or those of these names."""
    parameters = {"catalogue_id": catalogue_id, "names": None if names is None else list(names)}
    rows = connection.execute(statement("list_distributions"), parameters)
    return {row.name: row.version for row in rows}


def list_checkpoints(connection: Connection, catalogue_id: int) -> Sequence[Row[Any]]:
    """(ordinal, checkpoint_id, size_mb, size_bytes, size_ns) of a catalogue's checkpoints, in its order."""
    parameters = {"catalogue_id": catalogue_id, "checkpoint_id": None}
    return connection.execute(statement("list_checkpoints"), parameters).all()


@dataclass(frozen=True)
class CheckpointDetail:
    """A checkpoint and what it holds; keys in the order of code points."""

    checkpoint_id: str
    ordinal: int
    size_mb: float
    canonical: list[str]
    items: list[str]


def read_checkpoint(connection: Connection, catalogue_id: int, checkpoint_id: str) -> CheckpointDetail | None:
    """One checkpoint with its items; None: the catalogue lists no such checkpoint."""
    parameters = {"catalogue_id": catalogue_id, "checkpoint_id": checkpoint_id}
    row = connection.execute(statement("list_checkpoints"), parameters).one_or_none()
    if row is None:
        return None
    parameters = {"catalogue_id": catalogue_id, "ordinal": row.ordinal}
    held = connection.execute(statement("list_checkpoint_items"), parameters).all()
    canonical = [item.key for item in held if item.canonical]
    return CheckpointDetail(row.checkpoint_id, row.ordinal, row.size_mb, canonical, [item.key for item in held])


@dataclass(frozen=True)
class ItemDetail:
    """An item and its closure, itself included; keys in the order of code points."""

    key: str
    load_ns: int
    size_mb: float
    resource_type: str
    distribution: str
    closure: list[str]
    closure_load_ns: int
    closure_size_mb: float


def read_item(connection: Connection, catalogue_id: int, key: str) -> ItemDetail | None:
    """One item with its closure; None: the catalogue has no such item."""
    parameters = {"catalogue_id": catalogue_id, "key": key}
    row = connection.execute(statement("find_item"), parameters).one_or_none()
    if row is None:
        return None
    needed = connection.execute(statement("list_closure_items"), parameters).all()
    return ItemDetail(
        key=row.key,
        load_ns=row.load_ns,
        size_mb=row.size_mb,
        resource_type=row.resource_type,
        distribution=row.distribution,
        closure=[item.key for item in needed],
        closure_load_ns=sum(item.load_ns for item in needed),
        closure_size_mb=math.fsum(item.size_mb for item in needed),
    )
