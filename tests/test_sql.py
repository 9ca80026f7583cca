"""SQL for people (DESIGN §8): the views on both databases and over Parquet, what a query may be, how it is asked."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
from alembic import command
from alembic.config import Config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from litestar.testing import TestClient
from sqlalchemy import Connection, delete, insert, text
from sqlalchemy.exc import DBAPIError

from app.application import create_app
from app.catalogue import import_catalogue
from app.cli import main
from app.database import Database, migrate
from app.lease import Taker, accept_placements, end_placements
from app.liveness import report_status
from app.parsing import check_query
from app.placement import place_call
from app.query import list_views, run_query
from app.settings import RouterSettings
from app.sql import views
from app.tables import audit, call_modules, calls
from readie.cost import closure, match, price_catalogue, rank
from readie.errors import BadQuery, DatabaseBehind, QueryBusy, QueryTimeout, ReadieError
from readie.flavor import Flavor
from readie.projection import write_projection
from readie.wire import CallRequest, HeldGeneration, Phases, Result, SqlRequest, Started, WorkerStatus
from tests.catalogues import MODULES, documents, make_checkpoint, make_item, make_worked_example, read

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "sql.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
ABOUT_CATALOGUES = ["package_costs", "item_costs", "checkpoint_costs", "unheld_items"]
BENEATH = ["active_distributions", "active_items", "active_checkpoints", "checkpoint_contents", "closure_contents"]
BENEATH += ["closure_costs"]


def ask(database: Database, query: str, **limits: Any) -> list[tuple[Any, ...]]:
    """The rows of a query as people ask it."""
    return [tuple(row) for row in run_query(database, SqlRequest(query=query, **limits)).rows]


def columns_of(database: Database, view: str) -> list[str]:
    return run_query(database, SqlRequest(query=f"SELECT * FROM {view}", rows=1)).columns


def make_catalogue() -> dict[str, Any]:
    """The worked example, an empty checkpoint, and a package of two items that no checkpoint holds."""
    document = make_worked_example()
    document["items"] |= {"yaml": make_item(0.25, ["cyaml"], distribution="pyyaml", size_mb=2.5)}
    document["items"] |= {"cyaml": make_item(0.125, distribution="pyyaml", size_mb=0.0000015)}
    document["distributions"] |= {"pyyaml": "6.0"}
    document["checkpoints"].insert(0, make_checkpoint("checkpoint_0"))
    document["checkpoints"][2]["canonical"] = ["pandas"]
    return document


#: Function, modules, seconds to ready (None: it did not finish) and options of the calls that are recorded.
CALLS: list[tuple[str, list[str], float | None, dict[str, Any]]] = [
    ("train", ["pandas.DataFrame", "unknown.thing"], 0.6, {}),
    ("train", ["pandas"], 0.5, {}),
    ("parse", ["yaml", "numpy"], None, {}),
    ("parse", ["numpy", "cyaml"], None, {}),
    ("cold", ["numpy"], 0.75, {"cold": True}),
    ("pinned", ["numpy"], None, {"checkpoint_id": "C"}),
    ("nothing", ["unknown"], None, {}),
]


def fill(database: Database) -> None:
    """Imports the catalogue and places the calls on a worker that holds its generation; some of them finish."""
    catalogue = read(make_catalogue())
    import_catalogue(database, catalogue)
    ids = [each.checkpoint_id for each in catalogue.checkpoints]
    held = HeldGeneration(generation=catalogue.generation, checkpoint_ids=ids, restore_fixed=0.02, cold_fixed=0.3)
    status = WorkerStatus(flavor=Flavor.CPU, state="ready", python="3.11.7", runtime="fork", generations=[held])
    with database.transaction() as connection:
        report_status(connection, "w", status)
    for function, modules, ready, options in CALLS:
        request = CallRequest(payload=b"secret", python="3.11", function=function, modules=modules, **options)
        with database.transaction() as connection:
            placement = place_call(connection, database, RouterSettings(), request).placement
        if ready is not None:
            started = Started(how="cold" if options.get("cold") else "restored")
            result = Result(outcome="returned", started=started, phases=Phases(ready=ready))
            with database.transaction() as connection:
                assert accept_placements(connection, [Taker(placement.placement_id, "w")]) == [None]
                end_placements(connection, [(placement.placement_id, result)])
    row = {"request_id": "mine~1", "asked_at": "2030-01-01T00:00:00+00:00", "address": "127.0.0.1", "status": 201}
    row |= {"action": "activateCatalogue", "target": "/v1/catalogues/1/activate"}
    with database.transaction() as connection:
        connection.execute(insert(audit).values(**row))


@pytest.fixture
def filled(database: Database) -> Database:
    """A database with a catalogue and calls."""
    fill(database)
    return database


@pytest.fixture(scope="module")
def over_parquet(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], duckdb.DuckDBPyConnection]:
    """Plain DuckDB over the projection of a catalogue, as docs/sql.md starts it."""

    def start(catalogue: Any) -> duckdb.DuckDBPyConnection:
        folder = tmp_path_factory.mktemp("projection") / "cpu.parquet"
        write_projection(catalogue, folder)
        connection = duckdb.connect()
        connection.execute(f"SET file_search_path = '{folder}'")
        for name in ("parquet.sql", "views.sql"):
            connection.execute((ROOT / "app" / "sql" / name).read_text(encoding="utf-8"))
        return connection

    return start


#: Worked out by hand.
ANSWERS: list[tuple[str, list[tuple[Any, ...]]]] = [
    ("SELECT * FROM active_distributions ORDER BY 2", [("cpu", "dist", "1.0"), ("cpu", "pyyaml", "6.0")]),
    (
        "SELECT item, distribution, load_ns, size_bytes FROM active_items WHERE item_id >= 3 ORDER BY item_id",
        [("yaml", "pyyaml", 250_000_000, 2_500_000), ("cyaml", "pyyaml", 125_000_000, 2)],
    ),
    (
        "SELECT ordinal, checkpoint_id, size_bytes, size_ns FROM active_checkpoints ORDER BY ordinal LIMIT 2",
        [(0, "checkpoint_0", 0, 0), (1, "A", 7_000_000, 42_000_000)],
    ),
    (
        "SELECT item, canonical FROM checkpoint_contents WHERE checkpoint_id = 'B' ORDER BY item",
        [("numpy", False), ("pandas", True)],
    ),
    (
        "SELECT needed, load_ns FROM closure_contents WHERE item = 'pandas' ORDER BY needed",
        [("numpy", 200_000_000), ("pandas", 500_000_000)],
    ),
    ("SELECT items, load_ns, size_bytes FROM closure_costs WHERE item = 'yaml'", [(2, 375_000_000, 2_500_002)]),
    (
        (
            "SELECT distribution, version, items, load_ns, load_s, size_bytes, size_mb, checkpoints FROM package_costs"
            " ORDER BY load_ns"
        ),
        [
            ("pyyaml", "6.0", 2, 375_000_000, 0.375, 2_500_002, 2.500002, 0),
            ("dist", "1.0", 3, 2_700_000_000, 2.7, 3_000_000, 3.0, 3),
        ],
    ),
    (
        (
            "SELECT item, load_s, closure_items, closure_load_s, closure_size_mb, checkpoints FROM item_costs"
            " WHERE item IN ('pandas', 'cyaml') ORDER BY item"
        ),
        [("cyaml", 0.125, 1, 0.125, 0.000002, 0), ("pandas", 0.5, 2, 0.7, 2.0, 2)],
    ),
    (
        (
            "SELECT checkpoint_id, items, canonical_items, distributions, size_ns, load_ns, saves_at_most_ns"
            " FROM checkpoint_costs ORDER BY ordinal LIMIT 3"
        ),
        [
            ("checkpoint_0", 0, 0, 0, 0, 0, 0),
            ("A", 1, 1, 1, 42_000_000, 200_000_000, 158_000_000),
            ("B", 2, 1, 1, 480_000_000, 700_000_000, 220_000_000),
        ],
    ),
    ("SELECT item FROM unheld_items ORDER BY item", [("cyaml",), ("yaml",)]),
    (
        (
            "SELECT function, checkpoint_id, asked_cold, cost_ns, cold_cost_ns FROM recorded_calls"
            " WHERE function IN ('cold', 'train') AND measured_ready_s > 0.55 ORDER BY function"
        ),
        [("cold", None, True, 200_000_000, 200_000_000), ("train", "B", False, 480_000_000, 700_000_000)],
    ),
    (
        "SELECT module, item FROM recorded_modules WHERE function = 'train' ORDER BY module",
        [("pandas", "pandas"), ("pandas.DataFrame", "pandas"), ("unknown.thing", None)],
    ),
    (
        "SELECT function, import_set FROM call_import_sets WHERE function IN ('parse', 'nothing') ORDER BY 2",
        [("parse", ["cyaml", "numpy"]), ("parse", ["numpy", "yaml"])],
    ),
    ("SELECT calls FROM import_sets WHERE 'pandas' = ANY(import_set)", [(2,)]),
    (
        "SELECT item FROM import_set_contents WHERE import_set[2] = 'yaml' ORDER BY item",
        [("cyaml",), ("numpy",), ("yaml",)],
    ),
    (
        (
            "SELECT place, ordinal, checkpoint_id, size_ns, missing_ns, cost_ns FROM import_set_costs"
            " WHERE import_set[1] = 'pandas' ORDER BY place"
        ),
        [
            (1, 2, "B", 480_000_000, 0, 480_000_000),
            (2, 1, "A", 42_000_000, 500_000_000, 542_000_000),
            (3, 0, "checkpoint_0", 0, 700_000_000, 700_000_000),
            (4, -1, None, 0, 700_000_000, 700_000_000),
            (5, 3, "C", 1_200_000_000, 0, 1_200_000_000),
        ],
    ),
    (
        # With all: 2 × 480 for pandas, 42 + 375 and 42 + 125 for numpy with yaml and cyaml.
        (
            "SELECT checkpoint_id, calls, import_sets, saved_ns, with_all_ns, without_ns, with_none_ns"
            " FROM checkpoint_savings ORDER BY ordinal"
        ),
        [
            ("checkpoint_0", 0, 0, 0, 1_544_000_000, 1_544_000_000, 2_300_000_000),
            ("A", 2, 2, 316_000_000, 1_544_000_000, 1_860_000_000, 2_300_000_000),
            ("B", 2, 1, 124_000_000, 1_544_000_000, 1_668_000_000, 2_300_000_000),
            ("C", 0, 0, 0, 1_544_000_000, 1_544_000_000, 2_300_000_000),
        ],
    ),
    (
        (
            "SELECT checkpoint_id, function, calls, saved_ns FROM checkpoint_users"
            " WHERE function IN ('train', 'parse') ORDER BY function"
        ),
        [("A", "parse", 2, 316_000_000), ("B", "train", 2, 440_000_000)],
    ),
    (
        "SELECT item, asked_calls, needed_calls, load_ns, spent_ns FROM unheld_requests ORDER BY item",
        [("cyaml", 1, 2, 125_000_000, 250_000_000), ("yaml", 1, 1, 250_000_000, 250_000_000)],
    ),
    (
        (
            "SELECT checkpoint_id, started, calls, predicted_s, measured_s, drift_s, fastest_s, slowest_s"
            " FROM start_drift ORDER BY calls"
        ),
        [
            (None, "cold", 1, 0.5, 0.75, 0.25, 0.75, 0.75),
            ("B", "restored", 2, 0.5, 0.55, 0.05, 0.5, 0.6),
        ],
    ),
    (
        "SELECT request_id, address, action, target, status FROM audit_log",
        [("mine", "127.0.0.1", "activateCatalogue", "/v1/catalogues/1/activate", 201)],
    ),
]


# ---- the views ----


def test_every_view_has_the_right_values(filled: Database) -> None:
    """To the nanosecond, on both databases."""
    for query, rows in ANSWERS:
        assert (query, ask(filled, query)) == (query, rows)
    assert {view for query, _ in ANSWERS for view in re.findall(r" FROM (\w+)", query)} == set(views())


def test_later_calls_of_a_session_are_in_no_import_set(filled: Database) -> None:
    """They left nothing to the router: the first one's sandbox has them."""
    request = CallRequest(payload=b"", python="3.11", modules=["pandas"], session_id="s")
    for _ in range(2):
        with filled.transaction() as connection:
            placement = place_call(connection, filled, RouterSettings(), request).placement
            end_placements(connection, [(placement.placement_id, Result(outcome="returned"))])

    assert ask(filled, "SELECT count(*) AS n FROM recorded_calls WHERE reason = 'session'") == [(1,)]
    assert ask(filled, "SELECT calls FROM import_sets WHERE 'pandas' = ANY(import_set)") == [(3,)]


def record_call(connection: Connection, call_id: str, modules: list[str]) -> None:
    """A call as the router records it."""
    row: dict[str, Any] = {"call_id": call_id, "state": "placed", "function": "f", "python": "3.11", "reason": ""}
    row |= {"gpu": False, "memory_bytes": 1, "max_memory_bytes": 1, "cold": False, "retry": False, "timeout_ms": 1}
    row |= {"attempts": 1, "worker_flavor": "cpu", "created_at": "2030-01-01T00:00:00+00:00"}
    connection.execute(insert(calls).values(**row))
    for position, module in enumerate(modules):
        connection.execute(insert(call_modules).values(call_id=call_id, position=position, module=module))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=documents(), asked=st.lists(st.lists(st.sampled_from(MODULES), min_size=1, max_size=3), max_size=3))
def test_costs_of_recorded_calls_are_those_of_the_oracle(
    database: Database, document: dict[str, Any], asked: list[list[str]]
) -> None:
    """What an import set would cost on each option, and their order, equal the plain-Python model."""
    catalogue = read(document)
    import_catalogue(database, catalogue)
    items, checkpoints = price_catalogue(catalogue)
    with database.transaction() as connection:
        for table in (calls, call_modules):
            connection.execute(delete(table))
        for number, modules in enumerate(asked):
            record_call(connection, str(number), modules)
    expected: set[tuple[Any, ...]] = set()
    for modules in asked:
        matched = {item for module in modules if (item := match(items, module)) is not None}
        ranked = rank(items, checkpoints, modules)
        options = [(place, each.ordinal, each.size_ns, each.missing_ns) for place, each in enumerate(ranked, 1)]
        expected |= {(tuple(sorted(matched)), *option) for option in options if matched}

    query = "SELECT import_set, place, ordinal, size_ns, missing_ns FROM import_set_costs"
    assert {(tuple(row[0]), *row[1:]) for row in ask(database, query)} == expected
    query = "SELECT item, needed FROM closure_contents"
    assert set(ask(database, query)) == {(item, needed) for item in items for needed in closure(items, [item])}


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=documents())
def test_views_about_a_catalogue_answer_the_same_over_parquet(
    database: Database, document: dict[str, Any], over_parquet: Callable[[Any], duckdb.DuckDBPyConnection]
) -> None:
    """Plain DuckDB over the files of the projection gives the rows that the router's tables give."""
    catalogue = read(document)
    import_catalogue(database, catalogue)
    with over_parquet(catalogue) as files:
        for view in [*BENEATH, *ABOUT_CATALOGUES]:
            rows = files.execute(f"SELECT * FROM {view}")
            columns = [each[0] for each in rows.description]
            answer = run_query(database, SqlRequest(query=f"SELECT * FROM {view}"))

            assert (view, answer.columns) == (view, columns)
            assert sorted(map(str, map(tuple, answer.rows))) == sorted(map(str, rows.fetchall()))


def test_no_view_shows_what_was_sent(filled: Database) -> None:
    """Payloads, results and output are in none."""
    columns = {column for view in views() for column in columns_of(filled, view)}

    assert columns & {"payload", "result", "text", "markers"} == set()


# ---- migrations ----


def test_migrating_rebuilds_the_views_and_leaves_others_alone(database: Database, kind: str) -> None:
    """One of ours that is no longer wanted goes, one of the operator's stays; below the head there are none of ours."""
    with database.transaction() as connection:
        connection.execute(text("CREATE VIEW former AS SELECT 1 AS a"))
        connection.execute(text("COMMENT ON VIEW former IS 'Readie: of an earlier version'"))
        connection.execute(text("CREATE VIEW own AS SELECT 2 AS a"))
    migrate(database)
    with database.reading() as connection:
        assert connection.execute(text("SELECT a FROM own")).scalar_one() == 2
    with database.transaction() as connection, pytest.raises(DBAPIError):
        connection.execute(text("SELECT a FROM former"))
    config = Config(ROOT / "alembic.ini", attributes={"database": database})
    command.downgrade(config, "-1")
    with pytest.raises(DatabaseBehind, match="no view"):
        ask(database, "SELECT 1 AS a")
    migrate(database)

    assert ask(database, "SELECT * FROM package_costs") == []


# ---- what a query may be ----

ALLOWED = [
    "SELECT 1 AS a;",
    "select DISTRIBUTION from PACKAGE_COSTS -- a comment",
    "WITH a AS (SELECT item FROM unheld_items), b AS (SELECT * FROM a) SELECT count(*) FROM a JOIN b USING (item)",
    "WITH RECURSIVE n AS (SELECT 1 AS x UNION ALL SELECT x + 1 FROM n WHERE x < 5) SELECT sum(x) FROM n",
    "SELECT item FROM unheld_items UNION SELECT item FROM active_items ORDER BY item LIMIT 5 OFFSET 1",
    "SELECT function, count(*) FILTER (WHERE asked_cold) AS n FROM recorded_calls GROUP BY 1 HAVING count(*) > 0",
    "SELECT row_number() OVER (PARTITION BY state ORDER BY created_at NULLS LAST) AS n FROM recorded_calls",
    (
        "SELECT date_trunc('hour', created_at) AS h, extract(year FROM created_at) AS y FROM recorded_calls"
        " WHERE created_at > now() - INTERVAL '1 day' AND function LIKE 't%'"
    ),
    "SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY cost_s) AS median FROM recorded_calls",
    "SELECT array_to_string(import_set, ', ') AS s, import_set[1] AS f FROM import_sets WHERE 'yaml' = ANY(import_set)",
    "SELECT unnest(import_set) AS item FROM import_sets",
    (
        "SELECT CASE WHEN load_s > 1 THEN 'slow' ELSE lower('FAST') || '!' END AS s, round(load_ns / 1e9, 2) AS r"
        " FROM package_costs p WHERE EXISTS (SELECT 1 FROM active_items i WHERE i.distribution = p.distribution)"
    ),
    "SELECT CAST(cost_ns AS double precision) / 1000 AS us, cost_ns % 7 AS m, cost_ns::text AS t FROM recorded_calls",
]
REFUSED = {
    "SELECT * FROM calls": "calls is no view",
    "SELECT * FROM package_costs, calls": "calls is no view",
    "SELECT (SELECT count(*) FROM calls) AS n": "calls is no view",
    "SELECT * FROM package_costs UNION SELECT * FROM calls": "calls is no view",
    "TABLE calls": "calls is no view",
    "WITH calls AS (SELECT * FROM calls) SELECT * FROM calls": "calls is no view",
    "WITH RECURSIVE calls AS (SELECT * FROM calls UNION ALL SELECT * FROM calls) SELECT 1": "calls is no view",
    "WITH a AS (SELECT * FROM b), b AS (SELECT 1) SELECT 1": "b is no view",
    "SELECT * FROM (WITH calls AS (SELECT 1) SELECT 1) x, calls": "calls is no view",
    "SELECT * FROM public.package_costs": "is no view",
    "SELECT * FROM pg_catalog.pg_authid": "is no view",
    "SELECT * FROM information_schema.tables": "is no view",
    "SELECT * FROM 'items.parquet'": " ",
    "SELECT * FROM read_csv('/etc/passwd')": "table function",
    "SELECT * FROM duckdb_settings()": "table function duckdb_settings",
    "SELECT * FROM generate_series(1, 10)": "table function",
    "SELECT * FROM package_costs, LATERAL (SELECT 1) x": "LATERAL",
    "SELECT getenv('HOME')": "function getenv",
    "SELECT pg_read_file('/etc/passwd')": "function pg_read_file",
    "SELECT pg_catalog.pg_sleep(1)": "DOT",
    "SELECT query_to_xml('SELECT 1', true, true, '')": "function query_to_xml",
    "SELECT set_config('a', 'b', false)": "function set_config",
    "SELECT nextval('a')": "not allowed",
    "SELECT 'calls'::regclass": " ",
    "SELECT repeat('x', 1000000000)": "REPEAT",
    "SELECT * INTO copied FROM package_costs": "INTO",
    "SELECT * FROM package_costs FOR UPDATE": "LOCK",
    "SELECT * FROM package_costs LIMIT (SELECT 1)": "LIMIT",
    "WITH x AS (DELETE FROM calls RETURNING *) SELECT * FROM x": "DELETE",
    "SELECT 1; SELECT 2": "2 statements",
    "SELECT 1; DROP TABLE calls": "2 statements",
    "": "empty",
    "-- nothing": "empty",
    "INSERT INTO calls VALUES (1)": "INSERT",
    "DELETE FROM calls": "DELETE",
    "DROP VIEW package_costs": "DROP",
    "COPY calls TO 'file'": "COPY",
    "ATTACH 'file'": " ",
    "SET threads = 1": "SET",
    "EXPLAIN ANALYZE SELECT 1": " ",
    "CALL something()": " ",
    "SELECT $1": "not allowed",
    "SELECT * FROM package_costs WHERE (": " ",
    "SELEKT 1": " ",
    "SELECT " + "(" * 5000 + "1" + ")" * 5000: "nested too deeply",
    "SELECT 'unclosed": " ",
}


def test_what_is_one_select_over_the_views_runs(filled: Database) -> None:
    """CTEs, joins, windows, aggregates, subqueries, casts: on both databases."""
    for query in ALLOWED:
        ask(filled, query)


@pytest.mark.parametrize("dialect", ["duckdb", "postgres"])
@pytest.mark.parametrize("query", REFUSED, ids=lambda query: query[:40])
def test_anything_else_is_refused_before_the_database_sees_it(query: str, dialect: str) -> None:
    """The message names what was not understood as part of one SELECT over the views."""
    with pytest.raises(BadQuery, match=re.escape(REFUSED[query])):
        check_query(query, dialect, 10)


def test_names_are_those_that_the_database_sees() -> None:
    """PostgreSQL tells "CALLS" from calls, so that a CTE of the one name does not give away the table of the other."""
    query = 'WITH "CALLS" AS (SELECT 1 AS a) SELECT * FROM calls'

    assert check_query(query, "duckdb", 10)
    with pytest.raises(BadQuery, match="calls is no view"):
        check_query(query, "postgres", 10)


def test_nothing_can_be_written_whatever_the_check_lets_through(filled: Database) -> None:
    """The transaction is read-only by itself, and the next one is not."""
    for statement in ("DELETE FROM calls", "CREATE TABLE t (a integer)", "DROP VIEW package_costs"):
        with pytest.raises(BadQuery, match="read-only"):
            filled.query(statement, 5)
    with filled.transaction() as connection:
        connection.execute(text("DELETE FROM call_modules"))

    assert ask(filled, "SELECT count(*) AS n FROM recorded_calls") == [(len(CALLS),)]


def test_files_are_out_of_reach_whatever_the_check_lets_through(database: Database, kind: str) -> None:
    """DuckDB itself refuses to read one."""
    if kind == "duckdb":
        with pytest.raises(BadQuery, match="disabled"):
            database.query("SELECT * FROM read_text('/etc/hostname')", 5)


def test_a_query_that_takes_too_long_is_ended(filled: Database) -> None:
    """After its time, and the connection goes on."""
    item = "(SELECT 1 AS x UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4)"
    product = f"SELECT count(*) AS n FROM {', '.join(f'{item} a{n}' for n in range(24))}"
    with pytest.raises(QueryTimeout, match="ran for"):
        ask(filled, product, seconds=0.3)

    assert ask(filled, "SELECT 1 AS a") == [(1,)]


def test_rows_are_limited_and_the_answer_says_so(filled: Database) -> None:
    """With and without a LIMIT of the query's own."""
    for query in ("SELECT item FROM active_items", "SELECT item FROM active_items LIMIT 4"):
        answer = run_query(filled, SqlRequest(query=query, rows=2))
        assert (len(answer.rows), answer.more) == (2, True)
    answer = run_query(filled, SqlRequest(query="SELECT item FROM active_items LIMIT 2", rows=2))

    assert (len(answer.rows), answer.more) == (2, False)


def test_what_the_database_says_is_passed_on(database: Database) -> None:
    """A column that is not there, by name."""
    with pytest.raises(BadQuery, match="nope"):
        ask(database, "SELECT nope FROM package_costs")


def test_numbers_that_json_does_not_have_are_text(database: Database, kind: str) -> None:
    """What is no number, what has no end, and whole numbers that are too long for most readers; to the last digit."""
    query = "SELECT CAST('Infinity' AS double precision) AS a, CAST('NaN' AS double precision) AS b, "
    answer = ask(database, query + f"{'9' * 30} AS c, 2.50 AS d")

    assert answer == [("Infinity", "NaN", "9" * 30, 2.5)]
    if kind == "postgresql":
        query = "SELECT CAST('-Infinity' AS numeric) AS a, CAST('NaN' AS numeric) AS b, CAST('1e5000' AS numeric) AS c"
        assert ask(database, query) == [("-Infinity", "NaN", "1" + "0" * 5000)]


def test_values_that_python_does_not_have_are_refused(database: Database) -> None:
    """By name, and not as a fault of the router."""
    with pytest.raises(BadQuery, match=r"(?i)overflow|magnitude"):
        ask(database, "SELECT CAST('5000000 years' AS interval) AS a")


def test_an_answer_has_a_limit_of_bytes(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows it has: short text doubles to much. The next answer is not held up by it."""
    monkeypatch.setattr("app.database.MOST_ANSWER", 1_000_000)

    def double(times: int) -> str:
        steps = [f"c0 AS (SELECT CAST('{'x' * 1000}' AS text) AS a)"]
        steps += [f"c{n + 1} AS (SELECT a || a AS a FROM c{n})" for n in range(times)]
        return f"WITH {', '.join(steps)} SELECT a FROM c{times}"

    assert len(ask(database, double(9))[0][0]) == 512_000
    with pytest.raises(BadQuery, match="its answer has more than 1 MB"):
        ask(database, double(10))
    with pytest.raises(BadQuery, match="its answer has more than 1 MB"):
        ask(database, f"SELECT a.a FROM ({double(9)}) AS a CROSS JOIN (SELECT 1 AS b UNION ALL SELECT 2) AS b")
    assert run_query(database, SqlRequest(query="SELECT 1 AS a, 2 AS a LIMIT 0")).columns == ["a", "a"]


# ---- how it is asked ----


def test_the_route_answers_with_rows_or_a_problem(filled: Database) -> None:
    """With the clients' token alone; limits of the request are held to."""
    router = create_app(RouterSettings(auth_token="client", worker_token="agent"), filled)
    with TestClient(router) as client:
        client.headers["Authorization"] = "Bearer client"
        body = {"query": "SELECT function, count(*) AS n FROM recorded_calls GROUP BY 1 ORDER BY 1", "rows": 1}
        answer = client.post("/v1/sql", json=body)
        assert answer.json() == {"columns": ["function", "n"], "rows": [["cold", 1]], "more": True}
        refused = client.post("/v1/sql", json={"query": "SELECT * FROM calls"})
        assert (refused.status_code, refused.json()["type"]) == (400, "urn:readie:problem:bad-query")
        assert client.post("/v1/sql", json={"query": "SELECT 1", "seconds": 1e9}).status_code == 400
        assert client.post("/v1/sql", json=body, headers={"Authorization": "Bearer agent"}).status_code == 401


def test_only_so_many_queries_run_at_a_time(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is told to come again."""
    monkeypatch.setattr("app.query._running", threading.BoundedSemaphore(1))
    seen: list[ReadieError] = []

    def ask_once_more(*_arguments: Any) -> tuple[list[str], list[tuple[Any, ...]]]:
        with pytest.raises(QueryBusy) as refused:
            ask(database, "SELECT 1 AS a")
        seen.append(refused.value)
        return [], []

    with monkeypatch.context() as inside:
        inside.setattr(Database, "query", ask_once_more)
        run_query(database, SqlRequest(query="SELECT 1 AS a"))

    assert [error.status for error in seen] == [503]
    assert ask(database, "SELECT 1 AS a") == [(1,)]


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """Runs `readie-router sql` with these arguments in this process: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    for name in ("ROUTER_URL", "AUTH_TOKEN", "ROUTER_PORT", "ROUTER_HOST"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, **environ: str) -> tuple[int, str, str]:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["readie-router", "sql", *arguments])
        capfd.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_the_command_prints_a_table_json_or_csv(cli: Cli, filled: Database, database_url: str, tmp_path: Path) -> None:
    """Of a query, or of a file with one; what was left out is said on stderr."""
    filled.close()
    query = "SELECT import_set, calls, NULL AS nothing FROM import_sets ORDER BY calls DESC LIMIT 1"
    code, out, _ = cli(query, DATABASE_URL=database_url)
    assert (code, "│ pandas     │     2 │" in out) == (0, True)
    assert json.loads(cli(query, "--json")[1]) == {
        "columns": ["import_set", "calls", "nothing"],
        "rows": [[["pandas"], 2, None]],
        "more": False,
    }
    (tmp_path / "query.sql").write_text(
        "SELECT item, load_s FROM active_items JOIN item_costs USING (item)\nORDER BY 2"
    )
    code, out, err = cli("query.sql", "--csv", "--rows", "1")
    assert (code, out) == (0, "item,load_s\ncyaml,0.125\n")
    assert "first 1 rows" in err


def test_without_a_query_the_command_lists_the_views(cli: Cli) -> None:
    """With what each tells, and without a database."""
    code, out, _ = cli("--json")

    assert (code, json.loads(out)["rows"]) == (0, [list(each) for each in list_views()])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["SELECT * FROM calls"], 2, "calls is no view"),
        (["nowhere.sql"], 2, "nowhere.sql: No such file"),
        (["SELECT 1", "--json", "--csv"], 2, "--json and --csv"),
        (["SELECT 1", "--rows", "0"], 2, "rows"),
        (["SELECT 1", "--seconds", "nan"], 2, "seconds"),
    ],
)
def test_what_the_command_refuses(
    cli: Cli, duckdb_template: Path, arguments: list[str], code: int, message: str
) -> None:
    """One message, nothing on stdout."""
    ended, out, err = cli(*arguments, DATABASE_URL=f"duckdb:///{duckdb_template}")

    assert (ended, out) == (code, "")
    assert message in err


def test_while_a_router_serves_the_file_the_command_asks_it(cli: Cli, duckdb_template: Path, tmp_path: Path) -> None:
    """It says so on stderr; problems come through too."""
    file = tmp_path / "served.duckdb"
    file.write_bytes(duckdb_template.read_bytes())
    environ = {"DATABASE_URL": f"duckdb:///{file}", "ROUTER_PORT": str(free_port())}
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "serve"],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert any("serving" in line for line in process.stderr)
        code, out, err = cli("SELECT count(*) AS n FROM recorded_calls", "--csv", **environ)
        assert (code, out) == (0, "n\n0\n")
        assert "is open in another process: asking the router at" in err
        code, _, err = cli("SELECT * FROM calls")
        assert (code, "calls is no view" in err) == (2, True)
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


# ---- docs/sql.md ----


def test_every_query_of_the_documentation_runs(filled: Database) -> None:
    """On both databases, with the columns that its output shows."""
    shown = re.findall(r"```sql\n(.*?)```\n\n```text\n.*?\n┃(.*?)\n", PAGE, re.DOTALL)
    assert len(EXAMPLES) == len(shown) > 10
    for query, header in shown:
        answer = run_query(filled, SqlRequest(query=query))
        assert (query, answer.columns) == (query, [name.strip() for name in header.strip("┃").split("┃")])


def test_every_view_is_in_the_documentation_with_its_columns(database: Database) -> None:
    """One row of the table a view: name, columns in order, what it tells."""
    for name, about in list_views():
        columns = columns_of(database, name)
        assert f"| `{name}` | {', '.join(f'`{column}`' for column in columns)} | {about} |" in PAGE
