"""The database, DuckDB or PostgreSQL: connections, transactions, locks, bulk loads, the schema's state.

The only file that knows which of the two it is. Everything else takes a connection and runs `app.sql` statements.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from select import POLLIN, poll
from typing import Any, Literal, NamedTuple

import duckdb
import psycopg
from psycopg import sql
from sqlalchemy import URL, Connection, Engine, Row, Table, create_engine, event, exc, make_url, text

from app.sql import views
from app.tables import metadata
from readie.errors import (
    BadQuery,
    BadSetting,
    DatabaseBehind,
    DatabaseInUse,
    DatabaseUnavailable,
    QueryBusy,
    QueryTimeout,
)

#: What an index entry of PostgreSQL holds at most is 2,704 bytes, with its header and a key beside the text.
MAX_TEXT_BYTES = 2_600

#: Of DuckDB: whose files a copy for people is like.
OLDEST_STORAGE = "v1.2.0"

#: Connections of a process at most.
POOL_SIZE = 20

#: Pages that are read at a time at most, how long one waits for its turn, and how long it may read then. Who waits has a
#: thread of the router's, so it is not for long.
MOST_BROWSING = 4
TURN_SECONDS = 1.0
BROWSING_SECONDS = 10.0

#: Bytes of the answer to a query of people's, more or less.
MOST_ANSWER = 64 * 10**6

#: How often DuckDB is interrupted that was between two statements.
INTERRUPT_S = 0.05

#: A transaction that does nothing for so long is ended by PostgreSQL, in seconds: what it has locked is free then. Its
#: router stalls, or is gone without a word.
IDLE_SECONDS = 20.0

#: How libpq finds out that a server is gone without a word, in seconds, and in milliseconds.
KEEPALIVE: dict[str, int] = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}

#: Texts that DuckDB keeps parsed.
MAX_PARSED = 500

#: On which routers tell each other what to look at, and how long they listen before they see to their connection.
CHANNEL = "readie"
LISTEN_SECONDS = 1.0

# DuckDB has no row locks, and two transactions that change the same row end in an error: they take turns instead.
# One lock for the process, because one process owns the file.
_duckdb_writes = threading.Lock()


_ENDED = "ended"


def tell(connection: Connection, ended: Sequence[Row[Any]]) -> None:
    """Has `Database.on_ended` told of these calls when the transaction of this connection is committed."""
    connection.info.setdefault(_ENDED, []).extend(ended)


class RowRefused(ValueError):
    """A bulk load was refused: the table, the row (from 0; None: not known), the column, and why."""

    def __init__(self, table: str, row: int | None, column: str | None, reason: str) -> None:
        place = "".join([f" row {row}" if row is not None else "", f", {column}" if column else ""])
        super().__init__(f"{table}{place}: {reason}")
        self.table, self.row, self.column, self.reason = table, row, column, reason


class ServerFacts(NamedTuple):
    """What `readie-router doctor` looks at of a PostgreSQL server."""

    version: int  # major
    version_text: str
    clock_s: float  # seconds since 1970 by its clock
    most_connections: int  # that others than superusers may have
    connections: int  # there are now
    missing: list[str]  # rights that this role lacks, such as "UPDATE of calls"
    may_create: bool  # tables, as migrations do


_SERVER_FACTS = """
SELECT
    CAST(current_setting('server_version_num') AS integer) / 10000 AS version,
    current_setting('server_version') AS version_text,
    CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS double precision) AS clock_s,
    CAST(current_setting('max_connections') AS integer)
        - CAST(current_setting('superuser_reserved_connections') AS integer) AS most_connections,
    (SELECT CAST(count(*) AS integer) FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
    ARRAY(
        SELECT needed.right || ' of ' || named.name
        FROM unnest(CAST(:tables AS text[])) AS named (name),
            unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS needed ("right")
        WHERE to_regclass(named.name) IS NOT NULL
            AND NOT has_table_privilege(to_regclass(named.name), needed.right)
        ORDER BY 1
    ) AS missing,
    has_schema_privilege(current_schema(), 'CREATE') AS may_create
"""


class Database:
    """An open database. All its methods are synchronous, and safe in any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._is_duckdb = engine.dialect.name == "duckdb"
        # DuckDB's transactions see one state anyway.
        snapshot = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        self._reader = engine if self._is_duckdb else engine.execution_options(**snapshot)
        self._glancer = engine if self._is_duckdb else engine.execution_options(isolation_level="AUTOCOMMIT")
        self._browsing = threading.BoundedSemaphore(MOST_BROWSING)
        self._committed = 0
        #: Told, after the commit, of the calls that a transaction has ended: rows of `finish_calls`.
        self.on_ended: Callable[[Sequence[Row[Any]]], None] = lambda _ended: None

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A connection to write with: committed at the end, rolled back on an exception. Not to be nested.

        Raises `DatabaseUnavailable` when the database cannot be reached or is lost on the way.
        """
        with _duckdb_writes if self._is_duckdb else nullcontext(), self._problems():
            with self.engine.begin() as connection:
                ended = connection.info[_ENDED] = []
                yield connection
            self._committed += 1
        self.on_ended(ended)

    @property
    def version(self) -> int | None:
        """What was read at a version still holds while that lasts; None: others may change the database at any time."""
        return self._committed if self._is_duckdb else None

    @contextmanager
    def glancing(self) -> Iterator[Connection]:
        """As `reading`, but every statement sees the state of its own time: for one, or for what cannot change.

        A transaction for a statement would be two messages more.
        """
        with self._problems(), self._glancer.connect() as connection:
            yield connection
            if self._is_duckdb:
                connection.commit()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection to read with: every statement sees the same state. Raises `DatabaseUnavailable`."""
        with self._problems(), self._reader.connect() as connection:
            yield connection
            # Not rolled back, as it would be otherwise: psycopg forgets all statements that it has prepared then.
            connection.commit()

    @contextmanager
    def browsing(self, within_s: float = BROWSING_SECONDS) -> Iterator[Connection]:
        """As `reading`, for what people look at: a few at a time, and not for long, so that it holds up no call.

        Raises `QueryTimeout` (on PostgreSQL each statement has `within_s`), and `QueryBusy` when it was not its turn
        within `TURN_SECONDS`.
        """
        if not self._browsing.acquire(timeout=TURN_SECONDS):
            raise QueryBusy(f"{MOST_BROWSING} pages are being read")
        try:
            with self.reading() as connection:
                if self._is_duckdb:
                    with _interrupted_after(within_s, connection.connection.driver_connection):
                        yield connection
                else:
                    connection.exec_driver_sql(f"SET LOCAL statement_timeout = {_milliseconds(within_s)}")
                    yield connection
        except exc.DBAPIError as error:
            if isinstance(error.orig, _INTERRUPTED):
                raise QueryTimeout(f"it ran for {within_s:g} seconds", "Ask for less.") from error
            raise
        except _INTERRUPTED as error:
            raise QueryTimeout(f"it ran for {within_s:g} seconds", "Ask for less.") from error
        finally:
            self._browsing.release()

    @property
    def is_shared(self) -> bool:
        """Whether other processes may use it at the same time."""
        return not self._is_duckdb

    def notify(self, notices: Sequence[str]) -> None:
        """Tells whoever listens, of all processes, in a transaction of its own. Raises `DatabaseUnavailable`."""
        if notices and not self._is_duckdb:
            tell = text("SELECT pg_notify(:channel, unnest(CAST(:notices AS text[])))")
            with self.transaction() as connection:
                connection.execute(tell, {"channel": CHANNEL, "notices": list(notices)})

    def notices(self) -> Iterator[str | None]:
        """What is told, as it comes, on a connection of its own: None when it listens, "" from time to time.

        Never ends by itself. Raises `DatabaseUnavailable` when the connection is lost.
        """
        with self._problems():
            _, arguments = self.engine.dialect.create_connect_args(self.engine.url)
            with psycopg.connect(**{"connect_timeout": 10, **KEEPALIVE, **arguments}, autocommit=True) as connection:
                connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(CHANNEL)))
                yield None
                while True:
                    for notice in connection.notifies(timeout=LISTEN_SECONDS):
                        yield notice.payload
                    connection.execute("SELECT 1")  # a connection that was cut says so
                    yield ""

    def server_facts(self) -> ServerFacts | None:
        """What the server is and lets this role do; None: there is no server. Raises `DatabaseUnavailable`."""
        if self._is_duckdb:
            return None
        with self.glancing() as connection:
            tables = {"tables": [*metadata.tables, "alembic_version"]}
            return ServerFacts(*connection.execute(text(_SERVER_FACTS), tables).one())

    def close(self) -> None:
        """Closes the idle connections; another process can then open a DuckDB file."""
        self.engine.dispose()

    @property
    def sql_dialect(self) -> Literal["duckdb", "postgres"]:
        """What a parser of SQL calls this database."""
        return "duckdb" if self._is_duckdb else "postgres"

    def query(self, query: str, time_limit_s: float) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Runs a query that `app.query` has checked, unable to change anything: names of its columns, rows.

        Raises `BadQuery` with the database's words or for an answer that is too large, `QueryTimeout` past
        `time_limit_s`, `DatabaseBehind` where there are no views, `DatabaseUnavailable`.
        """
        with self._problems(), self.engine.connect() as connection:
            missing = views().keys() - set(_list_views(connection))
            if missing:
                raise DatabaseBehind(f"it has no view {min(missing)}")
            connection.rollback()
            # On the driver itself: to SQLAlchemy `:word` would be a parameter.
            driver: Any = connection.connection.driver_connection
            try:
                return (_query_duckdb if self._is_duckdb else _query_postgresql)(driver, query, time_limit_s)
            except _INTERRUPTED as error:
                raise QueryTimeout(f"it ran for {time_limit_s:g} seconds") from error
            except (duckdb.Error, psycopg.Error) as error:
                if _is_gone(error):
                    raise
                raise BadQuery(str(error).partition("\n")[0]) from error
            except (OverflowError, ValueError) as error:  # of the driver
                raise BadQuery(f"a value has no place in an answer: {error}", "CAST it to text.") from error

    def reader_role(self) -> str | None:
        """The role of PostgreSQL that queries run as, which can read the views and nothing else; None: there is none.

        Then a query is held by what `app.query` lets through and by its read-only transaction alone.
        """
        if self._is_duckdb:
            return None
        with self.glancing() as connection:
            role: str | None = connection.exec_driver_sql(_READER).scalar()
            return role

    def let_pause(self, connection: Connection, seconds: float) -> None:
        """Lets the transaction of this connection do nothing for so long, instead of `IDLE_SECONDS`."""
        if not self._is_duckdb:
            connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {_milliseconds(seconds)}")

    def lock(self, connection: Connection, name: str) -> None:
        """Waits until no other transaction holds the lock called `name`, and holds it until this one ends."""
        if not self._is_duckdb:
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": name})

    def try_lock(self, connection: Connection, name: str) -> bool:
        """As `lock`, but instead of waiting says whether it holds it."""
        if self._is_duckdb:
            return True
        statement = text("SELECT pg_try_advisory_xact_lock(hashtextextended(:name, 0))")
        return bool(connection.execute(statement, {"name": name}).scalar_one())

    def load(self, connection: Connection, into: Table, columns: Mapping[str, Any]) -> None:
        """Adds rows in one statement, whatever their number; each column is a sequence or an array, all equally long.

        Bit strings come as bytes: position 0 is the first byte's highest bit. Raises `RowRefused`; the transaction is
        lost then.
        """
        from app import bulk

        rows = bulk.checked(into, columns)
        try:
            if self._is_duckdb:
                bulk.insert(connection, into, rows)
            else:
                bulk.copy(connection, into, rows)
        except (exc.IntegrityError, exc.DataError) as error:
            raise RowRefused(into.name, None, None, str(error.orig).partition("\n")[0]) from error
        except (psycopg.IntegrityError, psycopg.DataError) as error:
            reason = " ".join(filter(None, [error.diag.message_primary, error.diag.message_detail])) or str(error)
            raise RowRefused(into.name, None, None, reason) from error

    def analyze(self, connection: Connection, tables: Iterable[Table]) -> None:
        """Has PostgreSQL look at what was just loaded: it plans by what it knows, and plans badly until then."""
        if not self._is_duckdb:
            connection.execute(text(f"ANALYZE {', '.join(table.name for table in tables)}"))

    @contextmanager
    def _problems(self) -> Iterator[None]:
        """Turns the driver's word that the database is gone into the problem of that name."""
        try:
            yield
        except exc.TimeoutError as error:
            raise DatabaseUnavailable("no connection became free in time") from error
        except exc.DBAPIError as error:
            if error.connection_invalidated or _is_gone(error.orig):
                raise _gone(self.engine.url, error.orig) from error
            raise
        except (psycopg.Error, duckdb.Error) as error:
            if _is_gone(error):
                raise _gone(self.engine.url, error) from error
            raise


def open_database(
    url: str, *, pool_size: int = POOL_SIZE, pool_timeout_s: float = 30.0, idle_s: float = IDLE_SECONDS
) -> Database:
    """Opens the database at `url` and makes sure that it answers.

    Raises `BadSetting` for a URL that is not one of ours, `DatabaseInUse` when another process has the DuckDB file
    open, `DatabaseUnavailable` when the file or the server cannot be used.
    """
    parsed = _parse(url)
    options: dict[str, Any] = {"pool_size": pool_size, "max_overflow": 0, "pool_timeout": pool_timeout_s}
    options["hide_parameters"] = True  # errors are logged, and payloads are among the parameters
    if parsed.drivername == "duckdb":
        # The router reads no file by SQL, and fetches no extension. Its statements are short: handing parts of one to
        # other threads costs more than it gains, and requests have threads of their own.
        options["connect_args"] = {
            "config": {
                "threads": "1",
                "enable_external_access": "false",
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
            }
        }
    else:
        options |= {"connect_args": {"connect_timeout": 10, **KEEPALIVE}}
    engine = create_engine(parsed, **options)
    if parsed.drivername == "duckdb":
        _parse_once(engine)
        _open_again(engine)
    else:
        _ask_the_noisy(engine)
        _end_the_idle(engine, idle_s)
    database = Database(engine)
    with database.reading() as connection:
        connection.execute(text("SELECT 1"))
    return database


def _parse_once(engine: Engine) -> None:
    """Has DuckDB parse each text once; psycopg prepares by itself what is executed often."""
    parsed: dict[str, duckdb.Statement] = {}  # those of app/sql, and what SQLAlchemy makes of tables

    @event.listens_for(engine, "do_execute")
    def execute(cursor: Any, query: str, parameters: Any, _context: Any) -> bool:
        driver = cursor.connection
        if query not in parsed:
            statements = driver.extract_statements(query)
            if len(statements) != 1 or len(parsed) >= MAX_PARSED:
                return False
            parsed[query] = statements[0]
        driver.execute(parsed[query], parameters)
        return True


def _ask_the_noisy(engine: Engine) -> None:
    """Has a connection answer before it is used, if the server has said something on it unasked: that it was cut, say.

    To ask each time would be a message more for every transaction.
    """

    @event.listens_for(engine, "checkout")
    def ask(connection: Any, _record: Any, _proxy: Any) -> None:
        heard = poll()
        heard.register(connection.fileno(), POLLIN)
        if heard.poll(0):
            try:
                engine.dialect.do_ping(connection)
            except psycopg.OperationalError as error:
                raise exc.DisconnectionError from error  # SQLAlchemy takes another one


def _end_the_idle(engine: Engine, idle_s: float) -> None:
    """Has PostgreSQL end transactions that do nothing for so long."""

    @event.listens_for(engine, "connect")
    def limit(connection: Any, _record: Any) -> None:
        # Not among the options of the connection: those are the URL's, and a connection pooler lets none through.
        connection.execute(f"SET idle_in_transaction_session_timeout = {_milliseconds(idle_s)}")
        connection.commit()


def _open_again(engine: Engine) -> None:
    """Has the file opened anew after an error that DuckDB cannot go on from, such as a checkpoint on a full disk.

    Until all its connections are closed it answers everything with that error.
    """

    @event.listens_for(engine, "handle_error")
    def give_up(context: Any) -> None:
        if isinstance(context.original_exception, duckdb.FatalException):
            context.is_disconnect = True


def migrate(database: Database) -> None:
    """Brings the schema to this version's. Several processes may do so at once: one works, the others wait.

    Raises `DatabaseBehind` when it is that of a later version.
    """
    from alembic import command
    from alembic.config import Config

    read_revisions(database)
    config = Config(attributes={"database": database})
    config.set_main_option("script_location", str(_migrations()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    command.upgrade(config, "head")


def copy_duckdb(source: Path, target: Path) -> None:
    """Copies a DuckDB file that is open nowhere, tables and views, into a new one that older shells read as well."""
    source_name, target_name = (str(path).replace("'", "''") for path in (source, target))
    with duckdb.connect() as connection:
        connection.execute(f"ATTACH '{source_name}' AS source (READ_ONLY)")
        connection.execute(f"ATTACH '{target_name}' AS target (STORAGE_VERSION '{OLDEST_STORAGE}')")
        connection.execute("COPY FROM DATABASE source TO target")


def check_schema(database: Database) -> None:
    """Raises `DatabaseBehind`, which says which revision the database is at, unless it is at this version's."""
    revision, head = read_revisions(database)
    if revision != head:
        raise DatabaseBehind(f"its schema is at {revision or 'nothing'}, this version needs {head}")


#: What the drivers raise when a statement has run out of its time.
_INTERRUPTED = (duckdb.InterruptException, psycopg.errors.QueryCanceled)


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


@contextmanager
def _interrupted_after(seconds: float, driver: Any) -> Iterator[None]:
    """Ends what runs on a connection of DuckDB, which has no time limit of its own, when the time is over."""
    ended = threading.Event()

    def interrupt() -> None:
        if not ended.wait(seconds):
            driver.interrupt()
            while not ended.wait(INTERRUPT_S):  # one that came between two statements is forgotten by the next
                driver.interrupt()

    watch = threading.Thread(target=interrupt, name="time limit", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()  # so that no later query on this connection is interrupted


def _query_duckdb(driver: Any, query: str, time_limit_s: float) -> tuple[list[str], list[tuple[Any, ...]]]:
    driver.execute("BEGIN TRANSACTION READ ONLY")
    try:
        with _interrupted_after(time_limit_s, driver):
            driver.execute(query)
            return [each[0] for each in driver.description], _take(iter(driver.fetchone, None))
    finally:
        driver.execute("ROLLBACK")


def _query_postgresql(driver: Any, query: str, time_limit_s: float) -> tuple[list[str], list[tuple[Any, ...]]]:
    with driver.cursor() as cursor:
        try:
            cursor.execute("SET TRANSACTION READ ONLY")
            cursor.execute(f"SET LOCAL statement_timeout = {_milliseconds(time_limit_s)}")
            reader = cursor.execute(_READER).fetchone()
            if reader:
                cursor.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(reader[0])))
            with closing(cursor.stream(query)) as stream:  # a row at a time: what is too much is never here as a whole
                rows = _take(stream)
            if not rows:  # then its columns are not known yet
                cursor.execute(f"SELECT * FROM ({query}) AS nothing LIMIT 0")  # noqa: S608 - app.query has checked it
            return [each.name for each in cursor.description], rows
        finally:
            driver.rollback()


def _take(stream: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """All rows. Raises `BadQuery` for more than the router should hold."""
    rows: list[tuple[Any, ...]] = []
    left = MOST_ANSWER
    for row in stream:
        left -= _weigh(row)
        if left < 0:
            raise BadQuery(
                f"its answer has more than {MOST_ANSWER // 10**6} MB", "Ask for fewer rows, or for less of them."
            )
        rows.append(row)
    return rows


def _weigh(value: Any) -> int:
    """The bytes of a value, more or less: what is no text and no list is about as large as a number."""
    match value:
        case str() | bytes():
            return len(value)
        case list() | tuple():
            return sum(map(_weigh, value))
        case dict():
            return _weigh(list(value.items()))
    return 8


# The role of PostgreSQL that people's queries run as is called readie_views_ and the database's number. Views run with
# the rights of who made them, so it needs none on tables. One a database: roles are the whole server's, and who may
# become one may read whatever it may read, in any database. Here: its name, where this connection may become it, and it
# may read: it was granted the views, and they are still there.
_READER = """SELECT rolname FROM pg_roles
    JOIN pg_database ON datname = current_database() AND rolname = 'readie_views_' || pg_database.oid
    WHERE NOT rolsuper AND pg_has_role(current_user, pg_roles.oid, 'MEMBER')
        AND has_schema_privilege(pg_roles.oid, current_schema(), 'USAGE')
        AND has_table_privilege(pg_roles.oid, to_regclass('package_costs'), 'SELECT')"""

_FIND_READER = """SELECT quote_ident(rolname) FROM pg_roles
    JOIN pg_database ON datname = current_database() AND rolname = 'readie_views_' || pg_database.oid"""

# Who may not create roles goes without. It cannot log in.
_MAKE_READER = """DO $$
DECLARE reader text := (SELECT quote_ident('readie_views_' || oid) FROM pg_database WHERE datname = current_database());
BEGIN
    IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE quote_ident(rolname) = reader) THEN
        EXECUTE 'CREATE ROLE ' || reader || ' NOLOGIN';
    END IF;
    IF NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
        EXECUTE 'GRANT ' || reader || ' TO CURRENT_USER';
    END IF;
EXCEPTION WHEN insufficient_privilege THEN NULL;
END $$"""


def _grant_views(connection: Connection) -> None:
    """Has the reader's role read the views, where there is such a role or it can be made."""
    connection.exec_driver_sql(_MAKE_READER)
    reader = connection.exec_driver_sql(_FIND_READER).scalar()
    if reader is not None:
        schema = connection.exec_driver_sql("SELECT quote_ident(current_schema())").scalar_one()
        connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO {reader}")
        connection.exec_driver_sql(f"GRANT SELECT ON {', '.join(views())} TO {reader}")


# What our views have in their comments, so that others' views stay when ours are dropped.
_OUR_VIEW = "Readie: "


def _list_views(connection: Connection) -> list[str]:
    """The names of the views for people that the database has."""
    if connection.dialect.name == "duckdb":
        listed = "SELECT view_name FROM duckdb_views() WHERE starts_with(comment, :ours)"
    else:
        listed = """SELECT c.relname FROM pg_class c
            WHERE c.relkind = 'v' AND c.relnamespace = CAST(current_schema() AS regnamespace)
                AND starts_with(obj_description(c.oid, 'pg_class'), :ours)"""
    return list(connection.execute(text(listed), {"ours": _OUR_VIEW}).scalars())


def drop_views(connection: Connection) -> None:
    """Drops the views for people: a migration may then change what they read."""
    found = [f'"{name}"' for name in _list_views(connection)]
    # DuckDB drops one at a time and asks nothing; PostgreSQL drops those that read one another only together.
    for names in found if connection.dialect.name == "duckdb" else filter(None, [", ".join(found)]):
        connection.exec_driver_sql(f"DROP VIEW {names}")


def create_views(connection: Connection) -> None:
    """Creates the views for people, each with its comment; the schema has to be this version's."""
    for name, view in views().items():
        connection.exec_driver_sql(f"CREATE VIEW {name} AS\n{view.query}")
        comment = (_OUR_VIEW + view.about).replace("'", "''")
        connection.exec_driver_sql(f"COMMENT ON VIEW {name} IS '{comment}'")
    if connection.dialect.name != "duckdb":
        _grant_views(connection)


def read_revisions(database: Database) -> tuple[str | None, str]:
    """The revision of the database (None: it has none), and this version's, which is its last migration.

    Read without Alembic, which every start of a router would wait for. Raises `DatabaseBehind` for a later one.
    """
    known = sorted(path.name[:4] for path in (_migrations() / "versions").glob("[0-9]*.py"))
    with database.reading() as connection:
        has_one = _HAS_REVISION_DUCKDB if connection.dialect.name == "duckdb" else _HAS_REVISION
        try:
            revision = (
                connection.execute(text(_REVISION)).scalar() if connection.execute(text(has_one)).first() else None
            )
        except exc.ProgrammingError as error:
            reason = str(error.orig).partition("\n")[0]
            raise DatabaseUnavailable(f"alembic_version: {reason}", "Connect as the owner of the tables.") from error
    if revision is not None and revision not in known:
        way_out = "A later version has migrated it: use that one."
        raise DatabaseBehind(f"its schema is at {revision}, this version knows up to {known[-1]}", way_out)
    return revision, known[-1]


_REVISION = "SELECT version_num FROM alembic_version"
# Not of information_schema, which has what this role has rights on: without them it would seem that there is none.
_HAS_REVISION = "SELECT 1 FROM pg_class WHERE oid = to_regclass('alembic_version')"
_HAS_REVISION_DUCKDB = "SELECT 1 FROM duckdb_tables() WHERE table_name = 'alembic_version'"


def _migrations() -> Path:
    # Found as a package, so that it is the same from a checkout and from an installed wheel.
    package = find_spec("migrations")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("the package migrations is not installed")
    return Path(package.submodule_search_locations[0])


def _parse(url: str) -> URL:
    way_out = "Accepted: duckdb:///file.duckdb or postgresql+psycopg://user:password@host/name."
    try:
        parsed = make_url(url)
    except (exc.ArgumentError, ValueError):  # the text is not repeated: it may hold a password
        raise BadSetting("DATABASE_URL is not a URL", way_out) from None
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("duckdb", "postgresql+psycopg"):
        raise BadSetting(f"DATABASE_URL begins with {parsed.drivername!r}", way_out)
    if parsed.drivername == "duckdb" and (not parsed.database or parsed.database.startswith(":memory:")):
        raise BadSetting("DATABASE_URL names no file: a database in memory is not shared between threads", way_out)
    return parsed


def _is_gone(error: BaseException | None) -> bool:
    if isinstance(error, psycopg.errors.IdleInTransactionSessionTimeout):
        return True
    if isinstance(error, psycopg.OperationalError):
        # None: the client's own word that it cannot connect or lost the connection. Classes 08, 28 and 57P, too many
        # connections, no such database. Deadlocks and the like are operational errors too, but nothing is gone.
        state = error.sqlstate
        return state is None or state[:2] in ("08", "28") or state[:3] == "57P" or state in ("3D000", "53300")
    if isinstance(error, duckdb.TransactionException):
        return "Could not write file" in str(error)  # a full disk
    return isinstance(error, duckdb.IOException | duckdb.FatalException)


def shown(url: URL) -> str:
    """The URL without its passwords."""
    return url.difference_update_query(["password", "sslpassword"]).render_as_string(hide_password=True)


def _gone(url: URL, error: BaseException | None) -> DatabaseUnavailable | DatabaseInUse:
    where = shown(url)
    reason = str(error).partition("\n")[0]
    if "Could not set lock on file" in reason:
        return DatabaseInUse(f"{where}: {reason.partition('. See also')[0]}")
    return DatabaseUnavailable(f"{where}: {reason}")
