"""Databases for the tests: each test gets a fresh one, on DuckDB and on a real PostgreSQL."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
import structlog
from hypothesis import settings
from psycopg import sql
from sqlalchemy import make_url

from app.database import Database, migrate, open_database
from app.tables import metadata
from tests.postgres import running_postgresql

# `make test` is to stay under five minutes; HYPOTHESIS_EXAMPLES=1000 looks deeper.
settings.register_profile("readie", deadline=None, max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "40")))
settings.load_profile("readie")

KINDS = ["duckdb", "postgresql"]

_CUT_OTHERS = """SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()"""
# Whatever is created, altered or dropped changes one of these.
_RELATIONS = """SELECT
    (SELECT string_agg(concat(oid, relname, relfilenode <> 0), ',' ORDER BY oid) FROM pg_class WHERE oid >= 16384),
    (SELECT count(*) FROM pg_attribute WHERE attrelid >= 16384), (SELECT max(oid) FROM pg_constraint),
    (SELECT count(*) FROM pg_db_role_setting AS setting JOIN pg_database ON pg_database.oid = setting.setdatabase
        WHERE datname = current_database()),
    (SELECT string_agg(version_num, ',') FROM alembic_version)"""
_EMPTY = "; ".join(f"DELETE FROM {table.name}" for table in reversed(metadata.sorted_tables))


class Cluster:
    """A PostgreSQL server on which the tests create databases, and a template with the schema in it."""

    def __init__(self, url: str) -> None:
        self.url = url
        with self._connect() as connection:  # copying files is faster than copying through the log, where it is known
            self.strategy = sql.SQL("STRATEGY FILE_COPY" if connection.info.server_version >= 150_000 else "")
        self.template = self.create()
        self.emptied: list[str] = []
        database = open_database(self.template)
        migrate(database)
        database.close()
        with psycopg.connect(self.template.replace("+psycopg", "")) as connection:
            self.relations = connection.execute(_RELATIONS).fetchone()

    def create(self, template: str | None = None) -> str:
        """The URL of a new database, a copy of the one at `template` if given."""
        name = f"readie_{uuid4().hex}"
        source = (template and make_url(template).database) or "template0"
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {} {}").format(
            sql.Identifier(name), sql.Identifier(source), self.strategy
        )
        self._run(statement)
        return make_url(self.url).set(database=name).render_as_string(hide_password=False)

    def drop(self, url: str) -> None:
        """Drops a database, and the role that its views were granted to."""
        name = make_url(url).database or ""
        with self._connect() as connection:
            found = connection.execute("SELECT oid FROM pg_database WHERE datname = %s", [name]).fetchone()
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
            with suppress(psycopg.errors.DependentObjectsStillExist):  # copies of a template still name its role
                role = sql.Identifier(f"readie_views_{found and found[0]}")
                connection.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(role))

    @contextmanager
    def lend(self) -> Iterator[str]:
        """The URL of a database with the schema and no rows: one that was emptied, or a new one, which takes longer."""
        url = self.emptied.pop() if self.emptied else self.create(self.template)
        yield url
        if self._empty(url):
            self.emptied.append(url)
        else:
            self.drop(url)

    def _empty(self, url: str) -> bool:
        """Empties a database that is not in use any more, if it has the relations of the template, and no more."""
        try:
            with psycopg.connect(url.replace("+psycopg", ""), options="-c lock_timeout=1000") as connection:
                connection.execute(_CUT_OTHERS)
                found = connection.execute(_RELATIONS).fetchone()
                if found != self.relations:
                    return False
                connection.execute(_EMPTY)
        except psycopg.Error:
            return False
        return True

    def _run(self, statement: sql.Composed) -> None:
        with self._connect() as connection:
            connection.execute(statement)

    def _connect(self) -> "psycopg.Connection[tuple[object, ...]]":
        return psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True)


@pytest.fixture(autouse=True)
def fresh_logs() -> Iterator[None]:
    """Command lines that run inside a test point the logs at its own stderr: the next test must not inherit that."""
    handlers = logging.root.handlers[:]
    yield
    structlog.reset_defaults()
    logging.root.handlers[:] = handlers


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One PostgreSQL server for the run (one for each process under pytest-xdist)."""
    with running_postgresql() as url:
        running = Cluster(url)
        yield running
        for each in [*running.emptied, running.template]:
            running.drop(each)


@pytest.fixture(scope="session")
def duckdb_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DuckDB file with the schema in it."""
    path = tmp_path_factory.mktemp("duckdb") / "template.duckdb"
    database = open_database(f"duckdb:///{path}")
    migrate(database)
    database.close()
    return path


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which database this test runs on: it runs on both."""
    return str(request.param)


@pytest.fixture
def empty_database_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database without any table."""
    if kind == "duckdb":
        yield f"duckdb:///{tmp_path / 'empty.duckdb'}"
    else:
        cluster: Cluster = request.getfixturevalue("cluster")
        url = cluster.create()
        yield url
        cluster.drop(url)


@pytest.fixture
def database_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a fresh database at the current schema, open nowhere: for tests that start a process."""
    if kind == "duckdb":
        path = tmp_path / "readie.duckdb"
        shutil.copyfile(request.getfixturevalue("duckdb_template"), path)
        yield f"duckdb:///{path}"
    else:
        cluster: Cluster = request.getfixturevalue("cluster")
        with cluster.lend() as url:
            yield url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A fresh, open database at the current schema."""
    opened = open_database(database_url)
    yield opened
    opened.close()
