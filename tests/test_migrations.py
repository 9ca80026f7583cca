"""Migrations (DESIGN §8): either database, up and down, on data; what they build is what `app/tables.py` says."""

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Table, func, insert, select, text

from app.catalogue import find_active_catalogue, import_catalogue
from app.database import Database, check_schema, migrate, open_database
from app.tables import metadata
from readie.flavor import Flavor
from tests.catalogues import make_document, make_item, make_worked_example, read

ROOT = Path(__file__).parents[1]


def config(database: Database) -> Config:
    return Config(ROOT / "alembic.ini", attributes={"database": database})


def describe(connection: Connection, *, duckdb: bool) -> list[Any]:
    """Columns and constraints of all tables, in words of the database itself."""
    if duckdb:
        queries = [
            """SELECT table_name, column_name, data_type, is_nullable, column_default, column_index
            FROM duckdb_columns() WHERE NOT internal AND table_name IN (SELECT table_name FROM duckdb_tables())""",
            """SELECT table_name, constraint_type, constraint_text, NULL, NULL, NULL FROM duckdb_constraints()""",
        ]
    else:
        queries = [
            """SELECT table_name, column_name, data_type, is_nullable, column_default, ordinal_position
            FROM information_schema.columns JOIN information_schema.tables USING (table_schema, table_name)
            WHERE table_schema = 'public' AND table_type = 'BASE TABLE'""",
            """SELECT CAST(conrelid AS regclass), contype, pg_get_constraintdef(oid), conname, NULL, NULL
            FROM pg_constraint WHERE connamespace = CAST('public' AS regnamespace)""",
            """SELECT tablename, indexname, indexdef, NULL, NULL, NULL FROM pg_indexes WHERE schemaname = 'public'""",
        ]
    rows = [tuple(map(str, row)) for query in queries for row in connection.execute(text(query))]
    return sorted(row for row in rows if row[0] != "alembic_version")


def test_the_migrated_schema_is_that_of_the_tables(empty_database_url: str, kind: str) -> None:
    """Built by migrations or from `app/tables.py`: the same columns, types, defaults, constraints and indexes."""
    database = open_database(empty_database_url)
    duckdb = kind == "duckdb"
    migrate(database)
    with database.reading() as connection:
        migrated = describe(connection, duckdb=duckdb)
    command.downgrade(config(database), "base")
    with database.transaction() as connection:
        assert describe(connection, duckdb=duckdb) == []
        metadata.create_all(connection)
        created = describe(connection, duckdb=duckdb)
    database.close()

    assert len(created) > 150
    assert migrated == created


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_alembic_finds_nothing_to_change(database: Database, kind: str) -> None:
    """Its own comparison of the migrated database with the tables is empty."""
    with database.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_names_fit_into_postgresql() -> None:
    """PostgreSQL cuts names after 63 bytes, so that two long ones would become one."""
    names = [table.name for table in metadata.sorted_tables]
    names += [str(constraint.name) for table in metadata.sorted_tables for constraint in table.constraints]
    names += [column.name for table in metadata.sorted_tables for column in table.c]

    assert [name for name in names if len(name.encode()) > 63] == []


class TestOnData:
    """Each revision is applied to and taken from a database with rows in it."""

    def test_0001_the_catalogues(self, empty_database_url: str) -> None:
        """Taken away, it leaves nothing; applied again, a catalogue can be imported again."""
        database = open_database(empty_database_url)
        catalogue = read(make_worked_example())
        for _ in range(2):
            migrate(database)
            import_catalogue(database, catalogue)
            with database.reading() as connection:
                assert find_active_catalogue(connection, Flavor.CPU) is not None
            command.downgrade(config(database), "base")
            with database.reading() as connection:
                assert MigrationContext.configure(connection).get_current_revision() is None
        database.close()

    def test_0002_the_cluster(self, database: Database) -> None:
        """Taken away, the catalogues are still there, and its own rows are gone when it is applied again."""
        catalogue = read(make_worked_example())
        import_catalogue(database, catalogue)
        with database.transaction() as connection:
            connection.execute(
                text(
                    "INSERT INTO sessions (session_id, worker_id, call_id, created_at, used_at) "
                    "VALUES ('s', 'w', 'c', now(), now())"
                )
            )
        command.downgrade(config(database), "0001")
        with database.reading() as connection:
            active = find_active_catalogue(connection, Flavor.CPU)
            assert active is not None
            assert active.sha256 == catalogue.sha256
        migrate(database)
        with database.reading() as connection:
            assert connection.execute(text("SELECT count(*) FROM sessions")).scalar_one() == 0

    def test_0003_the_planes(self, database: Database) -> None:
        """Taken away and applied again, every table of the catalogue is as the import filled it."""
        for document in (make_worked_example(), make_document({}, []), make_document({"a": make_item(0.0)}, [])):
            import_catalogue(database, read(document))
        tables = [table for table in metadata.sorted_tables if "catalogue_id" in table.c]
        before = [self._rows(database, table) for table in tables]
        command.downgrade(config(database), "0002")
        with database.reading() as connection:
            atoms = connection.execute(text("SELECT load_ns FROM atoms WHERE catalogue_id = 1")).scalars().all()
            assert sorted(atoms) == [200_000_000, 500_000_000, 2_000_000_000]
        migrate(database)

        assert [self._rows(database, table) for table in tables] == before

    def test_0004_the_sessions(self, database: Database) -> None:
        """Taken away, calls, leases and cancellations lose their session; sessions stay, until it is applied again."""
        of_call = {"call_id": "c", "session_id": "s", "continues": True, "gpu": False, "memory_bytes": 1}
        call = {"state": "placed", "function": "f", "python": "3.11", "max_memory_bytes": 1, "cold": False}
        call |= {"retry": False, "timeout_ms": 1, "attempts": 1, "reason": "session", "created_at": func.now()}
        lease = {"placement_id": "c-1", "worker_id": "w", "worker_flavor": "cpu", "gpu_memory_bytes": 0}
        lease |= {"placed_at": func.now(), "deadline_at": func.now()}
        session = {"session_id": "s", "worker_id": "w", "call_id": "c", "created_at": func.now(), "used_at": func.now()}
        rows: dict[str, dict[str, Any]] = {
            "calls": call | of_call,
            "leases": lease | of_call,
            "cancellations": {"placement_id": "p", "worker_id": "w", "session_id": "s", "created_at": func.now()},
            "sessions": session,
            "session_waits": {"call_id": "d", "session_id": "s", "ticket": 1, "seen_at": func.now()},
        }
        with database.transaction() as connection:
            for table, row in rows.items():
                connection.execute(insert(metadata.tables[table]).values(**row))
        command.downgrade(config(database), "0003")
        assert self._ask(database, "SELECT session_id, worker_id, sandbox_id FROM sessions") == [("s", "w", None)]
        assert self._ask(database, "SELECT placement_id, call_id, memory_bytes FROM leases") == [("c-1", "c", 1)]
        migrate(database)

        assert self._ask(database, "SELECT call_id, session_id, continues FROM calls") == [("c", "s", False)]
        assert self._ask(database, "SELECT call_id, session_id, continues FROM leases") == [("c", None, False)]
        assert self._ask(database, "SELECT placement_id, session_id FROM cancellations") == [("p", None)]
        assert self._ask(database, "SELECT * FROM sessions") == self._ask(database, "SELECT * FROM session_waits") == []

    def test_0005_the_records(self, database: Database) -> None:
        """Taken away and applied again, workers and calls stay; keys and the audit log are gone."""
        worker: dict[str, Any] = {"worker_id": "w", "flavor": "cpu", "state": "ready", "runtime": "fork"}
        worker |= {"python": "3.11.7", "markers": "{}", "max_sandboxes": 0, "base_bytes": 1, "incarnation": "i"}
        worker |= {"heard_at": func.now()}
        rows: dict[str, dict[str, Any]] = {
            "workers": worker | {"report": 7},
            "call_keys": {
                "call_key": "k",
                "call_id": "c",
                "request_sha256": "0",
                "answer": b"",
                "created_at": func.now(),
            },
            "audit": {
                "request_id": "r",
                "asked_at": func.now(),
                "address": "a",
                "action": "x",
                "target": "/",
                "status": 200,
            },
        }
        with database.transaction() as connection:
            for table, row in rows.items():
                connection.execute(insert(metadata.tables[table]).values(**row))
        command.downgrade(config(database), "0004")
        migrate(database)

        assert self._ask(database, "SELECT worker_id, report FROM workers") == [("w", 0)]
        assert self._ask(database, "SELECT * FROM call_keys") == self._ask(database, "SELECT * FROM audit") == []

    def test_0006_the_queue(self, database: Database) -> None:
        """Taken away and applied again, calls stay; how long they may wait is forgotten: not at all."""
        call: dict[str, Any] = {"call_id": "c", "state": "placed", "function": "f", "python": "3.11", "gpu": False}
        call |= {"memory_bytes": 1, "max_memory_bytes": 1, "cold": False, "retry": False, "timeout_ms": 1}
        call |= {"attempts": 1, "reason": "pinned", "created_at": func.now(), "queue_ms": 5}
        with database.transaction() as connection:
            connection.execute(insert(metadata.tables["calls"]).values(**call))
        command.downgrade(config(database), "0005")
        migrate(database)

        assert self._ask(database, "SELECT call_id, queue_ms FROM calls") == [("c", 0)]

    def _ask(self, database: Database, query: str) -> list[tuple[Any, ...]]:
        with database.reading() as connection:
            return [tuple(row) for row in connection.execute(text(query))]

    def _rows(self, database: Database, table: Table) -> list[str]:
        with database.reading() as connection:
            return sorted(map(str, connection.execute(select(table))))

    def test_every_revision_is_tested_here(self) -> None:
        """A new revision without a test on data fails this one."""
        tested = {name.split("_")[1] for name in dir(self) if name.startswith("test_0")}

        assert tested == {
            script.revision for script in ScriptDirectory.from_config(Config(ROOT / "alembic.ini")).walk_revisions()
        }


def test_files_sort_by_revision() -> None:
    """A file's name begins with its revision, and each follows the one before."""
    names = sorted(path.stem for path in (ROOT / "migrations" / "versions").glob("*.py"))
    before = None
    for name in names:
        script = import_module(f"migrations.versions.{name}")
        assert name.startswith(f"{script.revision}_")
        assert script.down_revision == before
        before = script.revision


# ---- as commands ----


def run_alembic(*arguments: str, url: str, folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        check=False,
        cwd=folder,
        env={**os.environ, "DATABASE_URL": url},
        capture_output=True,
        text=True,
    )


def test_alembic_upgrades_from_a_checkout(empty_database_url: str) -> None:
    """`alembic upgrade head` builds the database at DATABASE_URL, and `downgrade base` takes it away."""
    done = run_alembic("upgrade", "head", url=empty_database_url)
    assert done.returncode == 0, done.stderr
    database = open_database(empty_database_url)
    check_schema(database)
    database.close()
    done = run_alembic("downgrade", "base", url=empty_database_url)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:///file", "Accepted: duckdb:///file.duckdb"),
        ("postgresql://user:very-secret@127.0.0.1:1/readie", "Check DATABASE_URL"),
    ],
)
def test_alembic_says_what_is_wrong_without_a_traceback(url: str, message: str) -> None:
    """One message with the way out, and no password."""
    done = run_alembic("upgrade", "head", url=url)

    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "very-secret" not in done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_three_upgrades_at_once_end_well(empty_database_url: str, kind: str) -> None:
    """Three processes on an empty database: one works, the others wait, and the schema is there once."""
    upgrades = [
        subprocess.Popen(
            [sys.executable, "-m", "alembic", "upgrade", "head"],
            cwd=ROOT,
            env={**os.environ, "DATABASE_URL": empty_database_url},
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    results = [(upgrade.communicate()[1], upgrade.returncode) for upgrade in upgrades]

    assert [code for _, code in results] == [0, 0, 0], results
    database = open_database(empty_database_url)
    check_schema(database)
    with database.reading() as connection:
        assert connection.execute(text("SELECT count(*) FROM alembic_version")).scalar_one() == 1
    database.close()


def test_the_migrations_are_found_without_a_checkout(tmp_path: Path) -> None:
    """As an installed wheel has them: the packages in some folder on the path, no alembic.ini, another directory."""
    for package in ("readie", "app", "migrations"):
        shutil.copytree(ROOT / package, tmp_path / "site" / package, ignore=shutil.ignore_patterns("__pycache__"))
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from app.database import check_schema, migrate, open_database
database = open_database("duckdb:///installed.duckdb")
migrate(database)
check_schema(database)
print(sys.modules["app"].__file__)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path / "site")],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(tmp_path))
