"""Catalogues in the database (DESIGN §3 "At start", §8): whole and active afterwards, or nothing has changed."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from psycopg import sql
from sqlalchemy import event, insert, text

from app.catalogue import (
    PhysicalForm,
    activate_catalogue,
    atomize,
    find_active_catalogue,
    find_catalogue,
    import_catalogue,
    list_catalogues,
    list_checkpoints,
    load_catalogue_dir,
    read_checkpoint,
    read_distributions,
    read_item,
)
from app.database import Database, RowRefused, open_database
from app.tables import catalogues, items, metadata, worker_generations
from readie.closure import compute_closures
from readie.cost import closure, price_catalogue
from readie.document import Catalogue, _Source, peek_flavor
from readie.errors import BadDocument, DatabaseUnavailable, UnknownCatalogue
from readie.flavor import Flavor
from readie.projection import load_catalogue, write_projection
from tests.catalogues import documents, make_checkpoint, make_document, make_item, make_worked_example, read, write

CATALOGUE_TABLES = [table for table in metadata.sorted_tables if "catalogue_id" in table.c and table.name != "calls"]


def active(database: Database, flavor: str = "cpu") -> str | None:
    """The SHA-256 of the active catalogue of a flavor."""
    with database.reading() as connection:
        row = find_active_catalogue(connection, Flavor(flavor))
        return row and str(row.sha256)


def imported(database: Database) -> set[str]:
    """The SHA-256 of all catalogues that are there."""
    with database.reading() as connection:
        return {row.sha256 for row in list_catalogues(connection)}


def contents(database: Database) -> dict[str, list[Any]]:
    """All rows of all catalogue tables, without times."""
    with database.reading() as connection:
        return {
            table.name: sorted(
                tuple(str(row[column.name]) for column in table.c if not column.name.endswith("_at"))
                for row in connection.execute(table.select()).mappings()
            )
            for table in CATALOGUE_TABLES
        }


def numbered(number: int, flavor: str = "cpu") -> dict[str, Any]:
    """Documents of as many generations as there are numbers."""
    return make_document({"numpy": make_item(0.2)}, [make_checkpoint(f"checkpoint_{number}")], flavor=flavor)


# ---- what is stored ----


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=documents())
def test_what_is_stored_is_the_document(database: Database, document: dict[str, Any]) -> None:
    """Items with their closures, checkpoints with their items and distributions are read back as the oracle has them."""
    catalogue = read(document)
    catalogue_id = import_catalogue(database, catalogue)
    priced, _ = price_catalogue(catalogue)
    with database.reading() as connection:
        assert read_distributions(connection, catalogue_id) == document["distributions"]
        assert read_distributions(connection, catalogue_id, ["two", "three"]) == {"two": "2"}
        for number, key in enumerate(catalogue.keys):
            item = read_item(connection, catalogue_id, key)
            assert item is not None
            needed = closure(priced, [key])
            assert item.closure == sorted(needed)
            assert item.closure_load_ns == sum(priced[needed_key].load_ns for needed_key in needed)
            assert item.closure_size_mb == len(needed)
            assert item.load_ns == catalogue.load_ns[number]
            assert (item.resource_type, item.distribution) == (
                catalogue.resource_types[number],
                catalogue.item_distributions[number],
            )
        listed = list_checkpoints(connection, catalogue_id)
        assert [row.checkpoint_id for row in listed] == [each["id"] for each in document["checkpoints"]]
        assert [(row.size_ns, row.size_bytes) for row in listed] == [
            (each.size_ns, each.size_bytes) for each in catalogue.checkpoints
        ]
        for ordinal, each in enumerate(document["checkpoints"]):
            checkpoint = read_checkpoint(connection, catalogue_id, each["id"])
            assert checkpoint is not None
            assert (checkpoint.ordinal, checkpoint.size_mb) == (ordinal, each["size_mb"])
            assert (checkpoint.items, checkpoint.canonical) == (each["items"], each["canonical"])
        assert read_item(connection, catalogue_id, "no such item") is None
        assert read_checkpoint(connection, catalogue_id, "no such checkpoint") is None


class TestAtomize:
    """Atoms are the items that all closures and all checkpoints treat alike; planes price what an option lacks."""

    def test_items_that_need_each_other_are_one_atom(self) -> None:
        """A cycle is one atom; its load times are added."""
        items_ = {"a": make_item(0.1, ["b"]), "b": make_item(0.2, ["a"]), "c": make_item(0.4, ["a"])}
        form = self._atomize(make_document(items_, [make_checkpoint("checkpoint_0", ["a", "b"])]))

        assert form.atom_of[0] == form.atom_of[1] != form.atom_of[2]
        assert form.atoms == 2
        assert self._price(form, -1) == {form.atom_of[0]: 300_000_000, form.atom_of[2]: 400_000_000}

    def test_a_checkpoint_lacks_what_it_does_not_hold(self) -> None:
        """The planes of an option add up to the load times of the atoms that are not in it."""
        items_ = {"a": make_item(0.1, ["b"]), "b": make_item(0.2, ["a"]), "c": make_item(0.4, ["a"])}
        form = self._atomize(make_document(items_, [make_checkpoint("checkpoint_0", ["a", "b"])]))

        assert self._price(form, 0)[form.atom_of[2]] == 400_000_000
        assert form.atom_of[0] not in self._price(form, 0)

    def test_a_checkpoint_that_is_no_closed_set_splits_them(self) -> None:
        """Where a checkpoint holds one item of a cycle only, the two are two atoms of one closure."""
        items_ = {"a": make_item(0.1, ["b"]), "b": make_item(0.2, ["a"])}
        form = self._atomize(make_document(items_, [make_checkpoint("checkpoint_0", ["a"])]))

        assert form.atom_of[0] != form.atom_of[1]
        assert form.closure_of[0] == form.closure_of[1]
        assert form.closures == [b"\x20", b"\xc0"]
        assert form.contents == [b"\x80" if form.atom_of[0] == 0 else b"\x40"]

    def test_a_document_without_items_has_none(self) -> None:
        """No item, no atom; each option has an empty plane."""
        form = self._atomize(make_document({}, [make_checkpoint("checkpoint_0")]))

        assert (form.atoms, form.closures, form.contents) == (0, [b"\x80"], [b"\0"])
        assert form.planes == [(-1, 1, b"\0"), (0, 1, b"\0")]

    def test_the_last_atom_costs_the_size(self) -> None:
        """Every call needs it; with a checkpoint it costs alpha × size_mb, cold nothing."""
        form = self._atomize(make_document({"a": make_item(0.1)}, [make_checkpoint("checkpoint_0", ["a"], 100)]))

        assert form.closures == [b"\x40", b"\x80"]
        assert (self._price(form, -1), self._price(form, 0)) == ({0: 100_000_000}, {1: 600_000_000})

    def _price(self, form: PhysicalForm, ordinal: int) -> dict[int, int]:
        """Atom → load_ns, of those that the option lacks."""
        prices: dict[int, int] = {}
        for of, weight, bits in form.planes:
            for atom in np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8))).tolist() if of == ordinal else []:
                prices[atom] = prices.get(atom, 0) + weight
        return prices

    def _atomize(self, document: dict[str, Any]) -> PhysicalForm:
        catalogue = read(document)
        return atomize(catalogue, compute_closures(catalogue))


def test_names_come_back_as_they_went_in(database: Database) -> None:
    """Tabs, newlines, backslashes, COPY's own marks, other scripts: the same text, none null."""
    names = ["tab\tnl\nbs\\N", "\\N", "\\.", "'", '"', "ключ", "\U0001f40d", "NULL", " "]
    catalogue = read(make_document({name: make_item() for name in names}, [make_checkpoint("\\N", names)]))
    catalogue_id = import_catalogue(database, catalogue)
    with database.reading() as connection:
        checkpoint = read_checkpoint(connection, catalogue_id, "\\N")

        assert checkpoint is not None
        assert checkpoint.items == sorted(names)
        for name in names:
            assert read_item(connection, catalogue_id, name) is not None


def test_versions_come_back_as_they_went_in(database: Database) -> None:
    """K20: also the empty one, which the root filesystem does not name, and which is not null."""
    versions = {"one": "tab\tnl\nbs\\N", "two": "\\N", "three": "\\.", "four": ""}
    catalogue_id = import_catalogue(database, read(make_document({}, distributions=versions)))
    with database.reading() as connection:
        assert read_distributions(connection, catalogue_id) == versions


def test_keys_are_listed_by_code_points(database: Database) -> None:
    """Upper case before lower case, accents last, whatever the server's language."""
    names = ["b", "B", "a", "_a", "é", "z", "A.b"]
    catalogue = read(make_document({name: make_item() for name in names}, [make_checkpoint("checkpoint_0", names)]))
    catalogue_id = import_catalogue(database, catalogue)
    with database.reading() as connection:
        checkpoint = read_checkpoint(connection, catalogue_id, "checkpoint_0")

    assert checkpoint is not None
    assert checkpoint.items == sorted(names)


# ---- import and activation ----


@contextmanager
def counted_statements(database: Database) -> Iterator[list[str]]:
    """All statements that reach the driver, bulk loads included."""
    executed: list[str] = []

    class Cursor(psycopg.Cursor[Any]):
        def execute(self, query: Any, *arguments: Any, **options: Any) -> "Cursor":
            executed.append(str(query))
            super().execute(query, *arguments, **options)
            return self

        def copy(self, statement: Any, *arguments: Any, **options: Any) -> Any:
            executed.append(str(statement))
            return super().copy(statement, *arguments, **options)

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        executed.append(statement)

    def count_cursors(driver_connection: Any, *_rest: Any) -> None:
        driver_connection.cursor_factory = Cursor

    if database.engine.dialect.name == "duckdb":
        event.listen(database.engine, "before_cursor_execute", note)
    else:
        database.engine.dispose()
        event.listen(database.engine, "connect", count_cursors)
    yield executed


def test_importing_is_a_fixed_number_of_statements(database: Database) -> None:
    """Whatever the number of items, checkpoints and distributions."""
    small = read(make_worked_example())
    keys = [f"package{number}" for number in range(2_000)]
    checkpoints = [make_checkpoint(f"checkpoint_{number}", keys[number:]) for number in range(50)]
    large = read(make_document({key: make_item(0.1) for key in keys}, checkpoints))
    numbers = []
    with counted_statements(database) as executed:
        import_catalogue(database, small)
        for catalogue in (large, read(numbered(1))):
            executed.clear()
            import_catalogue(database, catalogue)
            numbers.append(len(executed))

    assert numbers[0] == numbers[1]
    assert 10 < numbers[0] < 30


def test_importing_again_only_activates(database: Database) -> None:
    """The same document twice is one catalogue; the second time it becomes the active one again."""
    first, second = read(numbered(1)), read(numbered(2))
    first_id = import_catalogue(database, first)
    import_catalogue(database, second)
    before = imported(database)

    assert active(database) == second.sha256
    assert import_catalogue(database, first) == first_id
    assert active(database) == first.sha256
    assert imported(database) == before


def test_importing_at_once_gives_one_catalogue(database: Database) -> None:
    """Eight threads that import the same document end with it there once, and active."""
    catalogue = read(make_worked_example())
    ids: list[int] = []
    threads = [threading.Thread(target=lambda: ids.append(import_catalogue(database, catalogue))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert ids == [ids[0]] * 8
    assert imported(database) == {active(database)} == {catalogue.sha256}


def test_flavors_do_not_touch_each_other(database: Database) -> None:
    """Each flavor has its own active catalogue."""
    cpu, gpu = read(numbered(1)), read(numbered(1, "gpu"))
    import_catalogue(database, cpu)
    import_catalogue(database, gpu)

    assert (active(database, "cpu"), active(database, "gpu")) == (cpu.sha256, gpu.sha256)


def test_an_imported_catalogue_can_be_activated(database: Database) -> None:
    """By its SHA-256; it is the first of its flavor in the list then."""
    first, second = read(numbered(1)), read(numbered(2))
    import_catalogue(database, first)
    import_catalogue(database, second)
    activate_catalogue(database, first.sha256, Flavor.CPU)
    with database.reading() as connection:
        listed = [(row.sha256, row.active) for row in list_catalogues(connection, Flavor.CPU)]

        assert listed == [(first.sha256, True), (second.sha256, False)]
        assert list_catalogues(connection, Flavor.GPU) == []


@pytest.mark.parametrize("flavor", [None, Flavor.GPU])
def test_only_a_known_catalogue_of_the_flavor_can_be_activated(database: Database, flavor: Flavor | None) -> None:
    """An unknown SHA-256, and a cpu catalogue for gpu, are refused."""
    catalogue = read(make_worked_example())
    import_catalogue(database, catalogue)
    with pytest.raises(UnknownCatalogue):
        activate_catalogue(database, catalogue.sha256 if flavor else "0" * 64, flavor)


def test_readers_see_the_old_catalogue_until_the_new_one_is_whole(database: Database) -> None:
    """While an import runs, another connection reads what was there before, and nothing of the new one."""
    old, new = read(numbered(1)), read(numbered(2))
    import_catalogue(database, old)
    seen: list[Any] = []
    load = database.load

    def load_and_look(connection: Any, into: Any, columns: Any) -> None:
        load(connection, into, columns)
        seen.append((imported(database), active(database)))

    database.load = load_and_look  # type: ignore[method-assign]
    import_catalogue(database, new)

    assert len(seen) == 8
    assert set(map(str, seen)) == {str(({old.sha256}, old.sha256))}
    assert active(database) == new.sha256


# ---- what is kept ----


class TestPruning:
    """Earlier catalogues stay as long as a worker holds their generation, and the last two of a flavor besides."""

    def test_the_last_two_earlier_ones_stay(self, database: Database) -> None:
        """Of five imported ones the active one and two earlier ones are left, with all that belongs to them only."""
        found = [read(numbered(number)) for number in range(5)]
        gpu = read(numbered(0, "gpu"))
        import_catalogue(database, gpu)
        for catalogue in found:
            import_catalogue(database, catalogue)

        assert imported(database) == {catalogue.sha256 for catalogue in [*found[2:], gpu]}
        with database.reading() as connection:
            ids = {row.catalogue_id for row in list_catalogues(connection)}
            for table in CATALOGUE_TABLES:
                kept = connection.execute(text(f"SELECT DISTINCT catalogue_id FROM {table.name}")).scalars()
                assert set(kept) <= ids, table.name

    def test_one_that_a_worker_holds_stays(self, database: Database) -> None:
        """It goes with the first import after the worker has let go of its generation."""
        found = [read(numbered(number)) for number in range(6)]
        held = {"worker_id": "w", "generation": found[0].generation, "restore_fixed_ns": 0, "cold_fixed_ns": 0}
        with database.transaction() as connection:
            connection.execute(insert(worker_generations).values(**held))
        for catalogue in found[:5]:
            import_catalogue(database, catalogue)
        assert imported(database) == {catalogue.sha256 for catalogue in [found[0], *found[2:5]]}

        with database.transaction() as connection:
            connection.execute(worker_generations.delete())
        import_catalogue(database, found[5])
        assert imported(database) == {catalogue.sha256 for catalogue in found[3:]}

    def test_activation_drops_what_no_worker_holds_any_more(self, database: Database) -> None:
        """The last two stay when an earlier one becomes active again."""
        found = [read(numbered(number)) for number in range(4)]
        held = {"worker_id": "w", "generation": found[0].generation, "restore_fixed_ns": 0, "cold_fixed_ns": 0}
        with database.transaction() as connection:
            connection.execute(insert(worker_generations).values(**held))
        for catalogue in found:
            import_catalogue(database, catalogue)
        with database.transaction() as connection:
            connection.execute(worker_generations.delete())
        activate_catalogue(database, found[2].sha256)

        assert imported(database) == {catalogue.sha256 for catalogue in found[1:]}

    def test_an_old_one_that_is_active_stays(self, database: Database) -> None:
        """Activation, not age, decides what is in use."""
        found = [read(numbered(number)) for number in range(3)]
        for catalogue in found:
            import_catalogue(database, catalogue)
        activate_catalogue(database, found[0].sha256)

        assert imported(database) == {catalogue.sha256 for catalogue in found}
        assert active(database) == found[0].sha256


# ---- a load that fails ----


class TestFailedLoad:
    """Nothing of it is visible, the row is named, the old catalogue is served, and the pool goes on working (K20)."""

    @pytest.fixture
    def catalogue(self) -> Catalogue:
        """600 items and 60 checkpoints."""
        keys = [f"package{number}" for number in range(600)]
        checkpoints = [make_checkpoint(f"checkpoint_{number}", [keys[number]]) for number in range(60)]
        return read(make_document({key: make_item() for key in keys}, checkpoints))

    def test_fifty_failures_in_a_row_leave_a_pool_of_five_in_order(
        self, database_url: str, catalogue: Catalogue
    ) -> None:
        """A checkpoint whose size does not fit is named, fifty times, and the next request is answered each time."""
        checkpoints = list(catalogue.checkpoints)
        checkpoints[50] = replace(checkpoints[50], size_ns=2**63)
        broken = replace(catalogue, checkpoints=checkpoints)
        database = open_database(database_url, pool_size=5, pool_timeout_s=1)
        try:
            good = read(make_worked_example())
            import_catalogue(database, good)
            before = contents(database)
            for _ in range(50):
                with pytest.raises(
                    BadDocument, match=r"checkpoints row 50, size_ns: 9223372036854775808 .*checkpoint_50"
                ):
                    import_catalogue(database, broken)
                assert active(database) == good.sha256
            assert contents(database) == before
        finally:
            database.close()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"load_ns": 2**63}, r"items row 500, load_ns: 9223372036854775808 .*package500"),
            ({"load_ns": 2.5}, r"items row 500, load_ns: 2.5 .*package500"),
            ({"load_ns": None}, r"items row 500, load_ns: None is missing .*package500"),
            ({"size_mb": float("nan")}, r"items row 500, size_mb: nan is not a finite number .*package500"),
            ({"size_mb": float("inf")}, r"items row 500, size_mb: inf is not a finite number .*package500"),
            ({"keys": "a\0b"}, r"items row 500, key: 'a\\x00b' contains NUL"),
            ({"keys": "\ud800"}, r"items row 500, key: '\\ud800' is no TEXT"),
            ({"keys": "x" * 9_000}, r"items row 500, key: 'xxx.* is longer than 2600 bytes"),
            ({"keys": "package1"}, r"items: .*package1"),
            ({"size_mb": -1.0}, r"items: .*(not_negative|size_mb >= 0)"),
            ({"resource_types": "tensor"}, r"items: .*resource_type"),
        ],
    )
    def test_the_row_is_named(
        self, database: Database, catalogue: Catalogue, change: dict[str, Any], message: str
    ) -> None:
        """What a database would refuse, and what one of them would silently alter, is refused on both."""
        [(name, value)] = change.items()
        column = list(getattr(catalogue, name))
        column[500] = value
        changed: dict[str, Any] = {} if name == "load_ns" else {name: column}
        broken = replace(catalogue, **changed)
        before = contents(database)
        load = database.load

        def load_broken(connection: Any, into: Any, columns: Any) -> None:
            # Atoms have sums of load times, which must be right for the load to get as far as the items.
            load(connection, into, {**columns, "load_ns": column} if into is items and name == "load_ns" else columns)

        database.load = load_broken  # type: ignore[method-assign]
        with pytest.raises(BadDocument, match=message):
            import_catalogue(database, broken)

        assert contents(database) == before
        database.load = load  # type: ignore[method-assign]
        import_catalogue(database, catalogue)
        assert active(database) == catalogue.sha256

    def test_a_name_as_long_as_names_may_be_fits_in_any_script(self, database: Database) -> None:
        """1,024 random characters of two bytes each are a key like any other."""
        random = np.random.default_rng(0)
        key = "".join(map(chr, random.integers(0x430, 0x44F, 1024)))
        catalogue_id = import_catalogue(database, read(make_document({key: make_item()})))
        with database.reading() as connection:
            assert read_item(connection, catalogue_id, key) is not None


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
@pytest.mark.parametrize("last", ["planes", "canonical_items"])
def test_a_connection_that_is_lost_during_an_import_changes_nothing(database: Database, kind: str, last: str) -> None:
    """Cut in the middle of the COPYs, or after the last row: the old catalogue is whole, the next request is answered."""
    old, new = read(numbered(1)), read(numbered(2))
    import_catalogue(database, old)
    before = contents(database)
    load = database.load

    def load_and_lose(connection: Any, into: Any, columns: Any) -> None:
        load(connection, into, columns)
        if into.name == last:
            terminate(database, connection.connection.driver_connection.info.backend_pid)

    database.load = load_and_lose  # type: ignore[method-assign]
    with pytest.raises(DatabaseUnavailable):
        import_catalogue(database, new)

    assert contents(database) == before
    database.load = load  # type: ignore[method-assign]
    import_catalogue(database, new)
    assert active(database) == new.sha256


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_a_connection_that_is_lost_within_a_copy_changes_nothing(database: Database, kind: str) -> None:
    """Cut while rows are on their way."""

    class Cutting(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(5)
            terminate(database, pid[0])
            yield from range(5, 10)

    def copy_rows() -> None:
        with database.transaction() as connection:
            driver = connection.connection.driver_connection
            assert isinstance(driver, psycopg.Connection)
            pid.append(driver.info.backend_pid)
            with driver.cursor() as cursor, cursor.copy(sql.SQL("COPY distributions FROM STDIN")) as copy:
                for number in Cutting():
                    copy.write(f"1\tname{number}\t1.0\n")

    pid: list[int] = []
    with pytest.raises(DatabaseUnavailable):
        copy_rows()

    assert imported(database) == set()


def terminate(database: Database, backend_pid: int) -> None:
    """Ends a server process, and waits until it is gone."""
    with database.reading() as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": backend_pid})


def test_rows_are_checked_before_any_is_sent(database: Database) -> None:
    """A column of a wrong type is refused with the first row that is wrong."""
    columns = {column.name: [1, 2] for column in catalogues.c if not column.name.endswith("_at")}
    with pytest.raises(RowRefused) as refused, database.transaction() as connection:
        database.load(connection, catalogues, {**columns, "sha256": ["a", 2]})

    assert (refused.value.table, refused.value.row, refused.value.column) == ("catalogues", 1, "sha256")


# ---- CATALOGUE_DIR ----


def load(database: Database, folder: Path | None) -> list[str]:
    """Loads CATALOGUE_DIR; the warnings, but for those of a JSON file without a Parquet projection beside it."""
    return [warning for warning in load_catalogue_dir(database, folder) if "without the projection" not in warning]


class TestCatalogueDir:
    """The router looks at every `*.json` of CATALOGUE_DIR at start: the file decides, and it always starts."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """An empty CATALOGUE_DIR."""
        folder = tmp_path / "catalogues"
        folder.mkdir()
        return folder

    def test_each_file_becomes_active_for_its_flavor(self, database: Database, folder: Path) -> None:
        """A cpu and a gpu file, no warning."""
        cpu, gpu = read(numbered(1)), read(numbered(1, "gpu"))
        write(folder / "cpu.json", numbered(1))
        write(folder / "gpu.json", numbered(1, "gpu"))

        assert load(database, folder) == []
        assert (active(database, "cpu"), active(database, "gpu")) == (cpu.sha256, gpu.sha256)

    def test_the_flavor_is_the_documents_not_the_files(self, database: Database, folder: Path) -> None:
        """A gpu document in `cpu.json` is the gpu catalogue."""
        write(folder / "cpu.json", numbered(1, "gpu"))
        load(database, folder)

        assert active(database, "cpu") is None
        assert active(database, "gpu") == read(numbered(1, "gpu")).sha256

    def test_other_files_are_left_alone(self, database: Database, folder: Path) -> None:
        """Only names that end in .json count."""
        write(folder / "cpu.json.partial", numbered(1))
        (folder / "README").write_text("no catalogue")

        assert load(database, folder) == []
        assert imported(database) == set()

    def test_a_changed_file_takes_effect(self, database: Database, folder: Path) -> None:
        """The file decides: a new document, and the first one again."""
        for number in (1, 2, 1):
            write(folder / "cpu.json", numbered(number))
            assert load(database, folder) == []
            assert active(database) == read(numbered(number)).sha256

    def test_an_imported_file_is_not_read_again(
        self, database: Database, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its hash is enough, also when another catalogue was active in between."""
        write(folder / "cpu.json", numbered(1))
        load(database, folder)
        write(folder / "cpu.json", numbered(2))
        load(database, folder)
        write(folder / "cpu.json", numbered(1))
        monkeypatch.setattr("app.catalogue.load_catalogue", None)

        assert load(database, folder) == []
        assert active(database) == read(numbered(1)).sha256

    def test_a_flavor_without_a_file_has_no_active_catalogue(self, database: Database, folder: Path) -> None:
        """Its calls start cold; the catalogue itself stays."""
        write(folder / "cpu.json", numbered(1))
        load(database, folder)
        (folder / "cpu.json").unlink()

        assert load(database, folder) == []
        assert active(database) is None
        assert imported(database) == {read(numbered(1)).sha256}

    def test_without_a_folder_there_are_no_files(self, database: Database, folder: Path) -> None:
        """CATALOGUE_DIR unset: what a file activated is active no more."""
        write(folder / "cpu.json", numbered(1))
        load(database, folder)

        assert load(database, None) == []
        assert active(database) is None

    def test_a_folder_that_cannot_be_read_changes_nothing(self, database: Database, folder: Path) -> None:
        """One warning that names it."""
        write(folder / "cpu.json", numbered(1))
        load(database, folder)
        [warning] = load(database, folder / "missing")

        assert str(folder / "missing") in warning
        assert active(database) == read(numbered(1)).sha256

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("cpu.json", "{"),
            ("cpu.json", ""),
            ("cpu.json", json.dumps({**numbered(2), "alpha": -1})),
            ("cpu.json", json.dumps({**numbered(2), "flavor": "tpu"})),
            ("other.json", json.dumps({**numbered(2), "items": {"numpy": {}}})),
            ("other.json", "\0"),
            ("other.json", None),
        ],
    )
    def test_a_flavor_whose_file_is_bad_keeps_its_last_good_one(
        self, database: Database, folder: Path, name: str, content: str | None
    ) -> None:
        """One warning that names the file; nothing of it is imported."""
        write(folder / name, numbered(1))
        load(database, folder)
        before = contents(database)
        (folder / name).unlink()
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_text(content)
        [warning] = load(database, folder)

        assert str(folder / name) in warning
        assert contents(database) == before

    def test_a_bad_file_of_one_flavor_does_not_keep_another(self, database: Database, folder: Path) -> None:
        """`gpu.json` gone and `cpu.json` bad: cpu keeps its catalogue, gpu has none."""
        for flavor in ("cpu", "gpu"):
            write(folder / f"{flavor}.json", numbered(1, flavor))
        load(database, folder)
        (folder / "gpu.json").unlink()
        (folder / "cpu.json").write_text("{")
        load(database, folder)

        assert active(database, "cpu") == read(numbered(1)).sha256
        assert active(database, "gpu") is None

    def test_a_bad_file_does_not_hinder_the_others(self, database: Database, folder: Path) -> None:
        """One is skipped, the good ones are imported."""
        (folder / "a.json").write_text("[]")
        write(folder / "b.json", numbered(1))
        (folder / "gpu.json").symlink_to(folder / "nowhere")
        warnings = load(database, folder)

        assert len(warnings) == 2
        assert active(database) == read(numbered(1)).sha256

    def test_a_pipe_is_not_waited_for(self, database: Database, folder: Path) -> None:
        """What is not a file is a bad file."""
        os.mkfifo(folder / "cpu.json")

        assert len(load(database, folder)) == 1

    @pytest.mark.parametrize(("names", "used"), [(["a.json", "cpu.json"], 1), (["b.json", "c.json"], 0)])
    def test_of_two_files_of_one_flavor_one_is_used(
        self, database: Database, folder: Path, names: list[str], used: int
    ) -> None:
        """`<flavor>.json` wins, else the first by name; one warning names both."""
        for number, name in enumerate(names):
            write(folder / name, numbered(number))
        for _ in range(2):
            [warning] = load(database, folder)

            assert names[0] in warning
            assert names[1] in warning
            assert active(database) == read(numbered(used)).sha256

    def test_a_request_holds_until_the_file_changes(self, database: Database, folder: Path) -> None:
        """A restart with the same file leaves it; a file with other bytes takes over."""
        write(folder / "cpu.json", numbered(1))
        load(database, folder)
        import_catalogue(database, read(numbered(2)))

        assert load(database, folder) == []
        assert active(database) == read(numbered(2)).sha256
        write(folder / "cpu.json", numbered(3))
        load(database, folder)
        assert active(database) == read(numbered(3)).sha256

    def test_a_request_holds_while_there_is_no_file(self, database: Database, folder: Path) -> None:
        """A flavor that never had one keeps what was asked for, until one appears."""
        import_catalogue(database, read(numbered(1)))
        load(database, folder)

        assert active(database) == read(numbered(1)).sha256
        write(folder / "cpu.json", numbered(2))
        load(database, folder)
        assert active(database) == read(numbered(2)).sha256

    def test_a_request_ends_with_the_file(self, database: Database, folder: Path) -> None:
        """Taking the file away is a change of the file."""
        write(folder / "cpu.json", numbered(1))
        load(database, folder)
        import_catalogue(database, read(numbered(2)))
        (folder / "cpu.json").unlink()
        load(database, folder)

        assert active(database) is None

    def test_a_request_holds_over_a_bad_file(self, database: Database, folder: Path) -> None:
        """And still when the old file is back."""
        write(folder / "cpu.json", numbered(1))
        load(database, folder)
        import_catalogue(database, read(numbered(2)))
        (folder / "cpu.json").write_text("{")
        load(database, folder)
        assert active(database) == read(numbered(2)).sha256

        write(folder / "cpu.json", numbered(1))
        load(database, folder)
        assert active(database) == read(numbered(2)).sha256

    def test_what_a_document_loses_is_warned_of(self, database: Database, folder: Path) -> None:
        """Unknown keys and dependencies on unknown items: the catalogue is used, and the warning names the file."""
        write(folder / "cpu.json", make_document({"a": make_item(0.1, ["unknown"])}, size="large"))
        warnings = load(database, folder)

        assert len(warnings) == 2
        assert all(str(folder / "cpu.json") in warning for warning in warnings)
        assert active(database) is not None

    def test_a_file_that_is_replaced_while_it_is_looked_at_is_left_alone(
        self, database: Database, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another document than the one that was hashed, of another flavor even: one warning, the earlier one stays."""
        write(folder / "cpu.json", numbered(1))
        load(database, folder)
        write(folder / "cpu.json", numbered(2))

        def replace_and_load(path: Path) -> Catalogue:
            write(path, numbered(3, "gpu"))
            return load_catalogue(path)

        with monkeypatch.context() as patched:
            patched.setattr("app.catalogue.load_catalogue", replace_and_load)
            [warning] = load(database, folder)

        assert f"{folder / 'cpu.json'}: it changed while it was read" in warning
        assert imported(database) == {active(database)} == {read(numbered(1)).sha256}
        write(folder / "cpu.json", numbered(2))
        assert load(database, folder) == []
        assert active(database) == read(numbered(2)).sha256

    @pytest.mark.parametrize("ending", ["", "x"])
    def test_a_file_that_is_overwritten_while_it_is_read_is_left_alone(
        self, database: Database, folder: Path, monkeypatch: pytest.MonkeyPatch, ending: str
    ) -> None:
        """The first half of one document and the second half of the next are no document, whether or not it is JSON."""
        path = folder / "cpu.json"
        texts = [
            json.dumps(make_document({f"package{number}": make_item(load_time) for number in range(3_000)}))
            for load_time in (0.1, 0.2)
        ]
        path.write_text(texts[0])
        read_piece = _Source.read

        def read_and_overwrite(source: _Source, size: int) -> bytes:
            piece = read_piece(source, size)
            if len(texts) > 1:
                path.write_text(texts.pop() + ending)
            return piece

        with monkeypatch.context() as patched:

            def overwrite_from_now_on(path: Path) -> Catalogue:
                patched.setattr(_Source, "read", read_and_overwrite)
                return load_catalogue(path)

            patched.setattr("app.catalogue.load_catalogue", overwrite_from_now_on)
            [warning] = load(database, folder)

        assert f"{path}: it changed while it was read" in warning
        assert imported(database) == set()

    def test_the_projection_gives_the_same_tables(self, database: Database, folder: Path) -> None:
        """Parquet beside the JSON is imported instead of it; one that is torn is not, with a warning."""
        document = make_worked_example()
        write(folder / "cpu.json", document)
        write_projection(read(document), folder / "cpu.parquet")
        assert load_catalogue_dir(database, folder) == []
        projected = contents(database)
        with database.transaction() as connection:
            for table in reversed(CATALOGUE_TABLES):
                connection.execute(table.delete())
        (folder / "cpu.parquet" / "items.parquet").unlink()
        [warning] = load_catalogue_dir(database, folder)

        assert "cpu" in warning
        assert contents(database) == projected


def test_a_catalogue_that_is_not_there_is_not_found(database: Database) -> None:
    """By an unknown SHA-256, and for a flavor without one."""
    with database.reading() as connection:
        assert find_catalogue(connection, "0" * 64) is None
        assert find_active_catalogue(connection, Flavor.GPU) is None


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_files_may_take_longer_to_read_than_a_transaction_may_pause(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk keeps no router from starting."""
    write(tmp_path / "cpu.json", make_worked_example())

    def read_slowly(path: Path) -> Flavor | None:
        time.sleep(4.5)
        return peek_flavor(path)

    monkeypatch.setattr("app.catalogue.peek_flavor", read_slowly)
    with closing(open_database(database_url, idle_s=4.0)) as database:
        load_catalogue_dir(database, tmp_path)

        assert len(imported(database)) == 1
