"""The database (DESIGN §8): one file knows which it is; problems have names; a lost connection is replaced."""

import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import event, exc, insert, select, text

from app.database import Database, RowRefused, check_schema, migrate, open_database
from app.settings import RouterSettings
from app.tables import cancellations, distributions, worker_generations, workers
from readie.errors import BadSetting, DatabaseBehind, DatabaseInUse, DatabaseUnavailable, QueryBusy, QueryTimeout
from readie.settings import read_settings

NOW = "2030-01-01T00:00:00+00:00"


def count_rows(database: Database) -> int:
    """The number of cancellations: any table would do."""
    with database.reading() as connection:
        return int(connection.execute(text("SELECT count(*) FROM cancellations")).scalar_one())


def add_row(connection: Any, placement_id: str = "p") -> None:
    connection.execute(insert(cancellations).values(placement_id=placement_id, worker_id="w", created_at=NOW))


# ---- opening ----


@pytest.mark.parametrize(
    "url",
    ["", "readie.duckdb", "sqlite:///file", "mysql://host/name", "duckdb:///:memory:", "duckdb://", "http://["],
)
def test_a_url_of_no_database_of_ours_is_refused(url: str) -> None:
    """The message says what is accepted."""
    with pytest.raises(BadSetting, match=r"duckdb:///file\.duckdb or postgresql"):
        open_database(url)


@pytest.mark.parametrize("path", ["missing/readie.duckdb", "folder", "text"])
def test_a_duckdb_file_that_cannot_be_used_is_named(tmp_path: Path, path: str) -> None:
    """In a folder that is not there, a folder itself, a file that is no database."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no database" * 1_000)
    with pytest.raises(DatabaseUnavailable, match=path):
        open_database(f"duckdb:///{tmp_path / path}")


def test_a_duckdb_file_that_another_process_has_open_is_in_use(tmp_path: Path) -> None:
    """And can be opened when that process is gone."""
    url = f"duckdb:///{tmp_path / 'readie.duckdb'}"
    program = "import sys, app.database as d; d.open_database(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(DatabaseInUse, match=r"readie\.duckdb"):
            open_database(url)
        process.communicate()
    open_database(url).close()


def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    """Nobody listens on port 1."""
    with pytest.raises(DatabaseUnavailable, match=r"127\.0\.0\.1.*refused") as raised:
        open_database("postgresql://user:very-secret@127.0.0.1:1/readie")

    assert "very-secret" not in str(raised.value)


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_a_database_that_is_not_there_is_named(database_url: str, kind: str) -> None:
    """The server is, the database is not."""
    with pytest.raises(DatabaseUnavailable, match="does not exist"):
        open_database(database_url.replace("/readie_", "/nothing_"))


def test_sql_cannot_reach_files(database: Database, tmp_path: Path) -> None:
    """DuckDB would read any file of the host by SQL: not through this connection."""
    file = tmp_path / "secret.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(Exception, match=r"(Permission|does not exist)"), database.reading() as connection:
        connection.execute(text(f"SELECT * FROM read_csv('{file}')"))


# ---- transactions ----


def test_a_transaction_is_kept_at_its_end(database: Database) -> None:
    """What was written is there for the next."""
    with database.transaction() as connection:
        add_row(connection)

    assert count_rows(database) == 1


def test_a_transaction_that_fails_leaves_nothing(database: Database) -> None:
    """Neither before nor after the exception."""
    failed = ValueError("the caller's own")

    def fail() -> None:
        with database.transaction() as connection:
            add_row(connection)
            raise failed

    with pytest.raises(ValueError, match="own"):
        fail()

    assert count_rows(database) == 0


def test_a_reader_sees_one_state(database: Database) -> None:
    """What is committed while it reads shows up in the next reading only."""
    with database.reading() as connection:
        counts = [connection.execute(text("SELECT count(*) FROM cancellations")).scalar_one()]
        with database.transaction() as other:
            add_row(other)
        counts.append(connection.execute(text("SELECT count(*) FROM cancellations")).scalar_one())

    assert counts == [0, 0]
    assert count_rows(database) == 1


def test_a_version_lasts_until_something_is_committed(database: Database, kind: str) -> None:
    """Nothing that is undone counts. On PostgreSQL there are none: other routers write without a word."""
    before = database.version
    assert count_rows(database) == 0
    with database.transaction() as connection:
        add_row(connection)
    after = database.version
    with pytest.raises(exc.IntegrityError), database.transaction() as connection:
        add_row(connection)  # the same key again

    assert database.version == after
    assert (after == before) is (kind == "postgresql")
    assert (before is None) is (kind == "postgresql")


def test_writers_at_once_lose_nothing(database: Database) -> None:
    """Eight threads count one row up twenty-five times each, under one lock."""
    row: dict[str, Any] = {"worker_id": "w", "flavor": "cpu", "state": "ready", "runtime": "fork", "markers": "{}"}
    row |= {"python": "3.11.7", "incarnation": "", "max_sandboxes": 0, "base_bytes": 0, "heard_at": NOW}
    with database.transaction() as connection:
        connection.execute(insert(workers).values(**row))
    failures: list[Exception] = []

    def count_up() -> None:
        try:
            for _ in range(25):
                with database.transaction() as connection:
                    database.lock(connection, "counting")
                    known = connection.execute(select(workers.c.base_bytes)).scalar_one()
                    connection.execute(workers.update().values(base_bytes=known + 1))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=count_up) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    with database.reading() as connection:
        assert connection.execute(select(workers.c.base_bytes)).scalar_one() == 200


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_one_of_several_routers_gets_a_lock(database: Database, kind: str) -> None:
    """It is free again when the transaction ends; another name is another lock."""
    with database.transaction() as first, database.transaction() as second:
        assert database.try_lock(first, "sweep")
        assert not database.try_lock(second, "sweep")
        assert database.try_lock(second, "other")
    with database.transaction() as connection:
        assert database.try_lock(connection, "sweep")


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_a_transaction_that_stalls_holds_up_nobody_for_long(database_url: str) -> None:
    """PostgreSQL ends it, so that its locks are free; when it wakes, its database is unavailable."""
    stalled, other = open_database(database_url, idle_s=1.0), open_database(database_url)

    def stall() -> None:
        with stalled.transaction() as connection:
            stalled.lock(connection, "placements")
            with other.transaction() as second:
                other.lock(second, "placements")  # waits, and gets it
            connection.execute(text("SELECT 1"))

    with closing(stalled), closing(other):
        with pytest.raises(DatabaseUnavailable, match="idle-in-transaction"):
            stall()
        assert count_rows(other) == 0


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_a_transaction_that_may_pause_is_not_ended(database_url: str) -> None:
    """An import computes in the middle of its own."""
    with closing(open_database(database_url, idle_s=4.0)) as database, closing(open_database(database_url)) as other:
        with database.transaction() as connection:
            database.let_pause(connection, 60)
            time.sleep(4.5)
            add_row(connection)
        assert count_rows(other) == 1


# ---- what people look at ----

#: Rows that no machine counts in a second, and that no optimizer sees to be few.
ENDLESS = text(
    "SELECT count(*) FROM generate_series(1, 100000) a(x), generate_series(1, 100000) b(y) WHERE x <> y + 200000"
)


@pytest.mark.parametrize("before_s", [0.0, 0.4])
def test_a_page_that_takes_too_long_is_ended(database: Database, before_s: float) -> None:
    """After its time, also if that was over before the statement began; and the connection goes on."""

    def look() -> None:
        with database.browsing(0.3) as connection:
            time.sleep(before_s)
            connection.execute(ENDLESS)

    with pytest.raises(QueryTimeout, match=r"ran for 0\.3 seconds"):
        look()

    assert count_rows(database) == 0


def test_only_so_many_pages_are_read_at_a_time(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more waits for its turn, and is told to come again when that does not come."""
    monkeypatch.setattr(database, "_browsing", threading.BoundedSemaphore(1))
    with database.browsing(), pytest.raises(QueryBusy), database.browsing(0.1):
        pass

    with database.browsing(30) as connection:
        assert connection.execute(text("SELECT 1")).scalar_one() == 1


# ---- what is lost ----


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_an_idle_connection_that_was_cut_is_replaced(database: Database, kind: str) -> None:
    """The next request reconnects and is answered."""
    assert count_rows(database) == 0
    with open_other(database).transaction() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )

    assert count_rows(database) == 0


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_a_connection_that_is_cut_in_use_is_a_problem_with_a_name(database: Database, kind: str) -> None:
    """`DatabaseUnavailable`, and the next request is answered."""

    def lose() -> None:
        with database.transaction() as connection:
            add_row(connection)
            pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
            with open_other(database).transaction() as other:
                other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
            add_row(connection, "q")

    with pytest.raises(DatabaseUnavailable):
        lose()

    assert count_rows(database) == 0


def test_no_free_connection_is_a_problem_with_a_name(database_url: str) -> None:
    """A pool of one whose only connection is in use."""
    database = open_database(database_url, pool_size=1, pool_timeout_s=0.1)
    with database.reading(), pytest.raises(DatabaseUnavailable, match="free"), database.reading():
        pass
    database.close()


def open_other(database: Database) -> Database:
    """A second router on the same database, which keeps no connection."""
    other = open_database(database.engine.url.render_as_string(hide_password=False), pool_size=1)
    event.listen(other.engine, "checkin", lambda _connection, record: record.invalidate())
    return other


# ---- bulk loads ----


def test_whole_numbers_are_exact_however_many_there_are(database: Database) -> None:
    """K17: 200 times 2**53 + 1, which no floating-point number is; one that is not whole is refused, with its row."""

    def load(values: list[float]) -> None:
        columns = {
            "worker_id": [str(number) for number in range(len(values))],
            "generation": ["g"] * len(values),
            "restore_fixed_ns": values,
            "cold_fixed_ns": [0] * len(values),
        }
        with database.transaction() as connection:
            database.load(connection, worker_generations, columns)

    exact: list[float] = [9007199254740993] * 200
    with pytest.raises(RowRefused, match=r"worker_generations row 200, restore_fixed_ns: 1\.5 is no BIGINT"):
        load([*exact, 1.5])
    load(exact)

    with database.reading() as connection:
        assert connection.execute(select(worker_generations.c.restore_fixed_ns)).scalars().all() == exact


def test_a_bulk_load_that_fails_leaves_the_pool_in_order(database_url: str) -> None:
    """10,000 rows of which number 5,000 is wrong, fifty times on a pool of five: named, nothing visible, no waiting."""
    database = open_database(database_url, pool_size=5, pool_timeout_s=1)
    names = [f"name{number}" for number in range(10_000)]
    good: dict[str, list[Any]] = {"catalogue_id": [1] * 10_000, "name": names, "version": ["1.0"] * 10_000}
    wrong = [
        {**good, "catalogue_id": [*good["catalogue_id"][:5_000], 2**63, *good["catalogue_id"][5_001:]]},
        {**good, "name": [*names[:5_000], "name4999", *names[5_001:]]},  # found by the database only
    ]
    for attempt in range(50):
        with (
            pytest.raises(RowRefused, match=r"(row 5000, catalogue_id: 9223372036854775808|name4999)"),
            database.transaction() as connection,
        ):
            database.load(connection, distributions, wrong[attempt % 2])
        with database.reading() as connection:
            assert connection.execute(text("SELECT count(*) FROM distributions")).scalar_one() == 0
    database.close()


# ---- the schema ----


def test_a_database_without_tables_is_behind(empty_database_url: str) -> None:
    """And in order when it has been migrated; migrating again changes nothing."""
    database = open_database(empty_database_url)
    with pytest.raises(DatabaseBehind, match="at nothing"):
        check_schema(database)
    for _ in range(2):
        migrate(database)
        check_schema(database)
    database.close()


def test_a_database_at_an_older_revision_is_behind(database: Database) -> None:
    """The message says at which it is and which is needed."""
    config = Config(Path(__file__).parents[1] / "alembic.ini", attributes={"database": database})
    command.downgrade(config, "0001")
    with pytest.raises(DatabaseBehind, match=r"is at 0001, this version needs 0\d{3}"):
        check_schema(database)


def test_a_database_of_a_later_version_is_left_alone(database: Database) -> None:
    """Neither used nor migrated; the message says what to do."""
    with database.transaction() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for use in (check_schema, migrate):
        with pytest.raises(DatabaseBehind, match=r"at 9999.* later version"):
            use(database)


def test_the_schema_is_checked_in_a_fresh_process(database_url: str) -> None:
    """Nothing has to be migrated first for the check to know its database."""
    program = "import sys, app.database as d; d.check_schema(d.open_database(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, database_url],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )

    assert done.returncode == 0, done.stderr


# ---- settings ----


def test_settings_have_defaults_and_read_the_environment() -> None:
    """Without any variable the embedded file and a loopback address; sizes as people write them."""
    assert read_settings(RouterSettings, {}) == RouterSettings()
    settings = read_settings(RouterSettings, {"DEFAULT_MEMORY": "2Gi", "ROUTER_PORT": "0", "WORKER_TTL": "2.5"})

    assert (settings.default_memory, settings.port, settings.worker_ttl) == (2 * 2**30, 0, 2.5)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ROUTER_PORT", "65536"),
        ("ROUTER_PORT", "http"),
        ("MEMORY_HEADROOM", "1.5"),
        ("MEMORY_HEADROOM", "0"),
        ("DEFAULT_MEMORY", "1.5Gi"),
        ("WORKER_TTL", "-1"),
        ("CALL_TIMEOUT", "nan"),
        ("PACKAGES_POLICY", "all"),
    ],
)
def test_a_setting_that_is_not_valid_is_named_with_its_value(variable: str, value: str) -> None:
    """And with what is accepted."""
    with pytest.raises(BadSetting, match=f"{variable}='{value}'.*Accepted: "):
        read_settings(RouterSettings, {variable: value})


def test_the_client_side_does_not_need_a_database() -> None:
    """Importing the settings loads neither SQLAlchemy nor a driver."""
    program = "import sys, app.settings; print({'sqlalchemy', 'duckdb', 'psycopg'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ,
    )

    assert done.stdout.strip() == "set()"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
@pytest.mark.parametrize("other", [9_000_000, 4_000_000], ids=["for its log", "for its file"])
def test_a_full_disk_is_unavailable_until_there_is_room(tmp_path: Path, other: int) -> None:
    """What was written before stays, and what comes after is written, by the same open database."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=26m", "tmpfs", disk], check=True)
    try:
        with closing(open_database(f"duckdb:///{disk / 'readie.duckdb'}")) as database:
            migrate(database)
            (disk / "other").write_bytes(bytes(other))
            adding = text("INSERT INTO call_payloads VALUES (:call_id, :payload)")

            def write(call_id: str) -> None:
                with database.transaction() as connection:
                    connection.execute(adding, {"call_id": call_id, "payload": os.urandom(1_000_000)})

            written: list[str] = []

            def fill() -> None:
                while len(written) < 40:
                    write(f"before {len(written)}")
                    written.append(f"before {len(written)}")

            with pytest.raises(DatabaseUnavailable, match="No space left"):
                fill()
            subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
            write("after")

            with database.reading() as connection:
                there = connection.execute(text("SELECT call_id FROM call_payloads")).scalars().all()
        assert {*written, "after"} <= set(there)
    finally:
        subprocess.run(["umount", disk], check=True)
