"""`readie-router check` (DESIGN §6, §8): what must never be in the database is found, and nothing else is."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from app.catalogue import import_catalogue
from app.check import RULES, WARNINGS, check_rows
from app.cli import main
from app.database import Database, open_database
from app.lease import Taker, accept_placements, cancel_call, end_placements
from app.liveness import report_status, sweep
from app.placement import place_calls
from app.settings import RouterSettings
from app.sql import texts
from readie.errors import SandboxFailed
from readie.flavor import Flavor
from readie.wire import (
    CallPlaced,
    CallRequest,
    HeldGeneration,
    Result,
    SandboxStatus,
    Started,
    WorkerStatus,
    problem_of,
)
from tests.catalogues import make_worked_example, read
from tests.conftest import KINDS, Cluster
from tests.routers import SETTINGS as VARIABLES
from tests.routers import serving

GIB = 2**30
ROOT = Path(__file__).parent.parent
SETTINGS = RouterSettings()
RETURNED = Result(outcome="returned", started=Started(how="cold"))
FAILED = Result(outcome="failed", problem=problem_of(SandboxFailed("it died")), started=Started(how="cold"))


def report(database: Database, worker_id: str, *sandboxes: SandboxStatus, **changes: Any) -> None:
    defaults: dict[str, Any] = {
        "flavor": Flavor.CPU,
        "state": "ready",
        "python": "3.11.7",
        "runtime": "fork",
        "memory_total": 10 * GIB,
        "max_sandboxes": 8,
        "incarnation": f"agent {worker_id}",
        "sandboxes": list(sandboxes),
    }
    with database.transaction() as connection:
        report_status(connection, worker_id, WorkerStatus(**(defaults | changes)))


def place(database: Database, call_id: str, **asked: Any) -> CallPlaced:
    request = CallRequest(payload=b"", python="3.11", **asked)
    with database.transaction() as connection:
        (placed,) = place_calls(connection, SETTINGS, [request], [call_id])
    assert isinstance(placed, CallPlaced)
    return placed


def accept(database: Database, placed: CallPlaced) -> None:
    taker = Taker(placed.placement.placement_id, placed.placement.worker_id)
    with database.transaction() as connection:
        assert accept_placements(connection, [taker]) == [None]


def end(database: Database, placed: CallPlaced, result: Result) -> None:
    with database.transaction() as connection:
        end_placements(connection, [(placed.placement.placement_id, result)])


def change(database: Database, *statements: str) -> None:
    with database.transaction() as connection:
        for statement in statements:
            connection.execute(text(statement))


def broken(database: Database, *statements: str) -> dict[str, list[str]]:
    """The rules that are broken, and by what, once these statements have run; they are undone."""
    found: dict[str, list[str]] = {}
    with database.transaction() as connection:
        for statement in statements:
            connection.execute(text(statement))
        for finding in check_rows(connection, SETTINGS):
            found.setdefault(finding.rule, []).append(finding.about)
        connection.rollback()
    return found


@pytest.fixture(scope="module", params=KINDS)
def busy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """What `fill` makes, for tests that leave it as it is."""
    with ExitStack() as stack:
        if request.param == "duckdb":
            path = tmp_path_factory.mktemp("busy") / "readie.duckdb"
            shutil.copyfile(request.getfixturevalue("duckdb_template"), path)
            url = f"duckdb:///{path}"
        else:
            cluster: Cluster = request.getfixturevalue("cluster")
            url = cluster.create(cluster.template)
            stack.callback(cluster.drop, url)
        yield fill(stack.enter_context(closing(open_database(url))))


def fill(database: Database) -> Database:
    """Worker w with calls in all their states, the session s with its second call, and worker g with a GPU call."""
    cpu, gpu = read(make_worked_example()), read(make_worked_example(flavor="gpu"))
    for catalogue in (cpu, gpu):
        import_catalogue(database, catalogue)
    held = [HeldGeneration(generation=cpu.generation, checkpoint_ids=["A", "B", "C"])]
    report(database, "w", generations=held)
    report(
        database,
        "g",
        flavor=Flavor.GPU,
        gpu_total=GIB,
        generations=[HeldGeneration(generation=gpu.generation, checkpoint_ids=["A"])],
    )
    asked: dict[str, dict[str, Any]] = {
        "first": {"session_id": "s"},
        "done": {"modules": ["pandas"]},
        "failed": {"packages": ["missing"]},
        "ended": {},
        "runs": {},
        "gpu": {"gpu": True},
    }
    ran = {call_id: place(database, call_id, **options) for call_id, options in asked.items()}
    for placed in ran.values():
        accept(database, placed)
    for call_id, result in {"first": RETURNED, "done": RETURNED, "failed": FAILED}.items():
        end(database, ran[call_id], result)
    with database.transaction() as connection:
        cancel_call(connection, "ended")
    kept = SandboxStatus(sandbox_id="kept", session_id="s", memory=GIB)
    report(database, "w", kept, SandboxStatus(sandbox_id="b", placement_id="runs-1", memory=GIB), generations=held)
    place(database, "waits")
    place(database, "next", session_id="s")
    return database


def test_what_routers_write_is_right(database: Database) -> None:
    """Calls in every state, a session, both flavors: there is nothing to find, before a sweep and after it."""
    assert broken(fill(database)) == {}
    change(database, "UPDATE workers SET heard_at = heard_at - INTERVAL '31 seconds'")
    assert broken(database) == {}
    sweep(database, SETTINGS)

    assert broken(database) == {}


GPU_CATALOGUE = "(SELECT catalogue_id FROM catalogues WHERE flavor = 'gpu')"


@pytest.mark.parametrize(
    ("rule", "about", "statements"),
    [
        ("calls_without_lease", "waits", ["DELETE FROM leases WHERE call_id = 'waits'"]),
        (
            "leases_without_call",
            "waits-1",
            [
                "UPDATE calls SET state = 'finished', outcome = 'returned', finished_at = now() WHERE call_id = 'waits'",
                "INSERT INTO call_results SELECT 'waits', result FROM call_results WHERE call_id = 'done'",
            ],
        ),
        ("leases_unlike_calls", "waits-2", ["UPDATE leases SET placement_id = 'waits-2' WHERE call_id = 'waits'"]),
        ("leases_unlike_calls", "waits-1", ["UPDATE leases SET worker_id = 'g' WHERE call_id = 'waits'"]),
        ("leases_unlike_calls", "waits-1", ["UPDATE leases SET memory_bytes = 5 WHERE call_id = 'waits'"]),
        ("leases_unlike_calls", "waits-1", ["UPDATE calls SET state = 'accepted' WHERE call_id = 'waits'"]),
        (
            "leases_of_unknown_workers",
            "runs-1",
            [f"UPDATE {table} SET worker_id = 'x' WHERE call_id = 'runs'" for table in ("leases", "calls")],
        ),
        ("leases_of_another_flavor", "runs-1", ["UPDATE workers SET flavor = 'gpu' WHERE worker_id = 'w'"]),
        ("leases_unlike_sessions", "next-1", ["UPDATE sessions SET expired_at = now()"]),
        ("leases_unlike_sessions", "next-1", ["UPDATE sessions SET worker_id = 'g'", "DELETE FROM sandboxes"]),
        ("leases_unlike_sessions", "next-1", ["UPDATE sessions SET incarnation = NULL"]),
        ("leases_unlike_sessions", "next-1", ["DELETE FROM sessions"]),
        ("leases_unlike_sessions", "next-1", ["UPDATE sessions SET call_id = 'next'"]),
        ("calls_without_payload", "runs", ["DELETE FROM call_payloads WHERE call_id = 'runs'"]),
        ("calls_with_an_early_end", "runs", ["UPDATE calls SET outcome = 'returned' WHERE call_id = 'runs'"]),
        ("calls_without_end", "done", ["UPDATE calls SET finished_at = NULL WHERE call_id = 'done'"]),
        ("calls_without_end", "failed", ["UPDATE calls SET outcome = NULL WHERE call_id = 'failed'"]),
        ("calls_without_end", "ended", ["UPDATE calls SET outcome = 'returned' WHERE call_id = 'ended'"]),
        ("calls_without_result", "done", ["DELETE FROM call_results WHERE call_id = 'done'"]),
        ("calls_miscounted", "done", ["UPDATE calls SET attempts = 3 WHERE call_id = 'done'"]),
        (
            "calls_of_another_flavor",
            "done",
            [f"UPDATE calls SET catalogue_id = {GPU_CATALOGUE} WHERE call_id = 'done'"],
        ),
        ("sessions_without_call", "s", ["UPDATE sessions SET call_id = 'x'"]),
        ("sessions_with_two_sandboxes", "s", ["INSERT INTO sandboxes VALUES ('w', 'x', NULL, 's', 1, 0, false)"]),
        (
            "cancellations_with_lease",
            "runs-1",
            ["INSERT INTO cancellations (placement_id, worker_id, created_at) VALUES ('runs-1', 'w', now())"],
        ),
        ("rows_without_call", "x", ["INSERT INTO call_modules VALUES ('x', 0, 'numpy', NULL)"]),
        (
            "rows_without_call",
            "failed",
            [f"DELETE FROM {table} WHERE call_id = 'failed'" for table in ("calls", "call_payloads", "call_packages")],
        ),
        ("rows_without_worker", "x", ["INSERT INTO worker_checkpoints VALUES ('x', 'generation', 'A')"]),
        ("catalogues_not_whole", "gpu", [f"DELETE FROM distributions WHERE catalogue_id = {GPU_CATALOGUE}"]),
        ("catalogues_not_whole", "gpu", [f"DELETE FROM contents WHERE catalogue_id = {GPU_CATALOGUE} AND ordinal = 0"]),
        ("catalogues_not_whole", "gpu", [f"DELETE FROM closures WHERE catalogue_id = {GPU_CATALOGUE}"]),
        ("workers_too_full", "w", ["UPDATE sandboxes SET memory_bytes = 9000000000 WHERE session_id = 's'"]),
        (
            "leases_overdue",
            "waits-1",
            ["UPDATE leases SET deadline_at = now() - INTERVAL '1 minute' WHERE call_id = 'waits'"],
        ),
        (
            "leases_overdue",
            "gpu-1",
            ["UPDATE workers SET heard_at = now() - INTERVAL '2 minutes' WHERE worker_id = 'g'"],
        ),
        ("sessions_elsewhere", "s", ["INSERT INTO sandboxes VALUES ('g', 'x', NULL, 's', 1, 0, false)"]),
    ],
)
def test_a_rule_finds_what_breaks_it(busy: Database, rule: str, about: str, statements: list[str]) -> None:
    """It names the row, and no other rule says anything."""
    assert broken(busy, *statements) == {rule: [about]}


@pytest.mark.parametrize(("column", "value"), [("memory_total_bytes", 3 * GIB), ("max_sandboxes", 2)])
def test_more_given_than_there_is(busy: Database, column: str, value: int) -> None:
    """Two leases and a session's sandbox, in which the third lease is, count as three: of memory and of sandboxes."""
    fits = value if column == "memory_total_bytes" else 3
    change_to = "UPDATE workers SET {} = {} WHERE worker_id = 'w'"
    assert "workers_overcommitted" not in broken(busy, change_to.format(column, fits))

    assert broken(busy, change_to.format(column, fits - 1)) == {
        "workers_overcommitted": ["w"],
        "workers_too_full": ["w"],
    }


def test_a_gpu_given_twice(busy: Database) -> None:
    """A call that took the whole GPU memory counts what its worker had then."""
    half = f"UPDATE workers SET gpu_total_bytes = {GIB // 2} WHERE worker_id = 'g'"

    assert broken(busy, half) == {"workers_overcommitted": ["g"], "workers_too_full": ["g"]}


def test_a_call_that_waits_for_room_is_not_overdue(busy: Database) -> None:
    """Its lease stays until it is placed elsewhere, or has waited for as long as it may."""
    late = "UPDATE leases SET deadline_at = now() - INTERVAL '3 minutes' WHERE call_id = 'waits'"
    for seconds, found in [(600, {}), (60, {"leases_overdue": ["waits-1"]})]:
        waits = f"UPDATE calls SET queue_ms = {seconds}000 WHERE call_id = 'waits'"
        assert broken(busy, late, waits) == found


@pytest.mark.parametrize(
    ("table", "column", "about"),
    [
        ("workers", "heard_at", "worker w"),
        ("calls", "created_at", "call done"),
        ("calls", "finished_at", "call done"),
        ("calls", "read_at", "call done"),
        ("leases", "placed_at", "placement waits-1"),
        ("leases", "deadline_at", "placement waits-1"),
        ("sessions", "used_at", "session s"),
        ("sessions", "settles_at", "session s"),
        ("cancellations", "created_at", "placement ended-1"),
    ],
)
def test_a_time_that_is_still_to_come(busy: Database, table: str, column: str, about: str) -> None:
    """The clock that wrote it was ahead; seconds of that are none."""
    key = {"workers": "worker_id = 'w'", "calls": "call_id = 'done'", "leases": "call_id = 'waits'"}.get(table, "TRUE")
    assert broken(busy, f"UPDATE {table} SET {column} = now() + INTERVAL '10 seconds' WHERE {key}") == {}

    assert broken(busy, f"UPDATE {table} SET {column} = now() + INTERVAL '1 hour' WHERE {key}") == {
        "times_to_come": [about]
    }


@pytest.mark.parametrize("old", ["read_at = now() - INTERVAL '1 hour'", "finished_at = now() - INTERVAL '1 day'"])
def test_a_result_that_was_dropped_in_time_is_not_missed(busy: Database, old: str) -> None:
    """It is kept until an hour after it was read, and a day at most."""
    dropped = "DELETE FROM call_results WHERE call_id = 'done'"

    assert broken(busy, f"UPDATE calls SET {old} WHERE call_id = 'done'", dropped) == {}


def test_every_statement_is_a_rule() -> None:
    """None of check.sql is forgotten."""
    file = ROOT / "app" / "sql" / "check.sql"
    named = [name for name in texts() if f"-- name: {name}\n" in file.read_text()]

    assert sorted(named) == sorted([*RULES, *WARNINGS])


@pytest.mark.parametrize("rule", [*RULES, *WARNINGS])
def test_the_page_lists_every_rule_in_the_words_of_its_statement(rule: str) -> None:
    """docs/checking.md says what check.sql says."""
    page = (ROOT / "docs" / "checking.md").read_text()
    said = re.findall(r"^-- (.+)$", texts()[rule].partition("\n-- parameters")[0], re.MULTILINE)

    assert f"| `{rule}` | {' '.join(said)} |\n" in page


# ---- the command ----


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on a database: its exit code, what it printed, what it said."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(url: str, *arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["readie-router", "check", "--database", url, *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code, *capfd.readouterr())

    return run


def test_nothing_wrong_is_exit_code_0(check: Any, database: Database, database_url: str) -> None:
    """It says so; as JSON it is an empty list."""
    fill(database).close()

    assert check(database_url)[:2] == (0, "Nothing is wrong.\n")
    assert check(database_url, "--json")[:2] == (0, "[]\n")


def test_what_is_wrong_is_exit_code_1(check: Any, database: Database, database_url: str) -> None:
    """A line each, with the rule, whose row it is, and what is wrong with it."""
    change(fill(database), "DELETE FROM leases WHERE call_id = 'waits'")
    database.close()

    assert check(database_url)[:2] == (1, "calls_without_lease: waits: it is placed and has no lease\n")
    code, out, _ = check(database_url, "--json")
    assert (code, json.loads(out)) == (
        1,
        [
            {
                "rule": "calls_without_lease",
                "wrong": True,
                "about": "waits",
                "found": "it is placed and has no lease",
            }
        ],
    )


def test_a_warning_is_printed_and_counts_for_nothing(check: Any, database: Database, database_url: str) -> None:
    """What may be for a while is no fault."""
    change(fill(database), "INSERT INTO sandboxes VALUES ('g', 'x', NULL, 's', 1, 0, false)")
    database.close()
    code, out, _ = check(database_url)

    assert code == 0
    assert out.startswith("warning: sessions_elsewhere: s: it is on worker w, and g has a sandbox of it too\n")


def test_a_router_may_run_meanwhile_on_postgresql_alone(check: Any, kind: str, database_url: str) -> None:
    """A DuckDB file is its router's: the command says that it is to be stopped first."""
    with serving(DATABASE_URL=database_url):
        code, out, err = check(database_url)

    assert code == (0 if kind == "postgresql" else 1)
    assert ("stop it first" in err) == (kind == "duckdb")
    assert out == ("Nothing is wrong.\n" if kind == "postgresql" else "")


def test_a_file_that_is_not_there_is_not_made(check: Any, tmp_path: Path) -> None:
    """A database that was never served is named."""
    code, _, err = check(f"duckdb:///{tmp_path / 'none.duckdb'}")

    assert (code, "no such file" in err) == (1, True)
    assert not list(tmp_path.iterdir())
