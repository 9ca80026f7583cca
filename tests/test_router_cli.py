"""`readie-router`: every command, every error that a user can cause, and a real process that serves."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import structlog
from sqlalchemy import make_url

from app.catalogue import import_catalogue
from app.cli import main
from app.database import Database, open_database
from app.lease import Taker, accept_placements, end_placements
from app.liveness import report_status
from app.placement import place_call
from app.settings import RouterSettings
from readie.flavor import Flavor
from readie.wire import CallRequest, Phases, Result, Started, WorkerStatus
from tests.catalogues import make_checkpoint, make_document, make_item, make_worked_example, read, write
from tests.routers import SETTINGS, ask, serving

ROOT = Path(__file__).parent.parent
#: A name as markup and as what a terminal obeys.
PARSE = "parse [red]\x1b[0m"
STATUS = WorkerStatus(flavor=Flavor.CPU, state="ready", python="3.11.7", runtime="fork", memory_total=4 * 2**30)


class Run:
    """What a command line did: its exit code, its results, its talk."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        assert "Traceback" not in err


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No settings of the machine, a folder of its own, and the logs as they were afterwards."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    structlog.reset_defaults()


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs `readie-router` with these arguments in this process."""

    def run(*arguments: str, **environ: str) -> Run:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["readie-router", *arguments])
        capfd.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capfd.readouterr()
        return Run(code, out, err)

    return run


@pytest.fixture
def filled(database: Database, database_url: str) -> str:
    """The URL of a database with the worked example and a worker, open nowhere."""
    import_catalogue(database, read(make_worked_example()))
    with database.transaction() as connection:
        report_status(connection, "w", STATUS)
    database.close()
    return database_url


@pytest.fixture
def called(database: Database, database_url: str) -> str:
    """The URL of a database with a call that has ended on worker w, and one of a session on v that has not."""

    def place(worker_id: str, **asked: Any) -> str:
        request = CallRequest(payload=b"secret", python="3.11", **asked)
        with database.transaction() as connection:
            report_status(connection, worker_id, STATUS)
            return place_call(connection, database, RouterSettings(), request).placement.placement_id

    ended = place("w", function="train", cold=True)
    result = Result(outcome="returned", started=Started(how="cold"), phases=Phases(ready=0.5))
    with database.transaction() as connection:
        assert accept_placements(connection, [Taker(ended, "w")]) == [None]
        end_placements(connection, [(ended, result)])
        report_status(connection, "w", msgspec.structs.replace(STATUS, state="removed"))
    place("v", function=PARSE, session_id="notebook-7", memory=2**30)
    database.close()
    return database_url


# ---- what commands print ----


@pytest.mark.parametrize(
    "command",
    ["serve", "upgrade", "import", "activate", "explain", "catalogues", "workers", "calls", "sessions", "doctor"],
)
def test_every_command_has_help_with_an_example(cli: Any, command: str) -> None:
    """A sentence, the options with their environment variables, an example."""
    run = cli(command, "--help", COLUMNS="200")

    assert run.code == 0
    assert "Example: readie-router" in run.out
    assert "DATABASE_URL" in run.out


def test_explain_shows_the_ranking(cli: Any, filled: str) -> None:
    """Every option with its size term, missing seconds and total, cheapest first; what matched; what is missing."""
    run = cli("explain", "pandas.DataFrame", "nowhere", "torch", "--memory", "100M", DATABASE_URL=filled)

    assert run.code == 0
    lines = [re.sub(r"[│┃|]", " ", line).split() for line in run.out.splitlines()]
    rows = [line for line in lines if line[:1] in (["A"], ["B"], ["C"], ["cold"])]
    assert [row[0] for row in rows[:4]] == ["B", "A", "cold", "C"]
    assert rows[0] == ["B", "0.480000", "2.000000", "2.480000", "chosen"]
    assert "no option" in " ".join(rows[3])
    assert "pandas.DataFrame: stands for pandas" in run.out
    assert "nowhere: matches no item" in run.out
    assert ["2.000000", "torch"] in lines


def test_explain_says_what_becomes_of_packages(cli: Any, filled: str) -> None:
    """Skipped ones with the installed version, kept ones with the reason."""
    run = cli("explain", "numpy", "--package", "dist", "--package", "requests", DATABASE_URL=filled)

    assert "dist: skipped, 1.0 is there" in run.out
    assert "requests: installed for the call, the root filesystem does not have it" in run.out


@pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
def test_names_are_shown_as_they_are(cli: Any, database: Database, database_url: str) -> None:
    """Keys, ids of checkpoints, workers and sessions, whatever is in them: no markup, no command to a terminal."""
    keys = ["numpy", "dataset:x[/y]", "model:[bold]z"]
    checkpoints = [make_checkpoint("[red]held", ["numpy"])]
    import_catalogue(database, read(make_document({key: make_item() for key in keys}, checkpoints)))
    with database.transaction() as connection:
        report_status(connection, "[/w]", STATUS)
        request = CallRequest(payload=b"", python="3.11", session_id="[link]s")
        place_call(connection, database, RouterSettings(), request)
    database.close()
    explained = cli("explain", *keys, "[/n]\x1b[2J", DATABASE_URL=database_url)
    listed = cli("workers").out + cli("sessions").out

    assert explained.code == 0
    for name in ["dataset:x[/y]", "model:[bold]z", "[red]held lacks", "[/n]\ufffd[2J: matches no item"]:
        assert name in explained.out
    for name in ["[/w]", "[link]s"]:
        assert name in listed


def test_json_is_the_answer_of_the_api(cli: Any, filled: str) -> None:
    """--json prints what a program reads, and nothing else."""
    explained = json.loads(cli("explain", "pandas", "--json", DATABASE_URL=filled).out)
    assert explained["options"][0] | {"items": []} == {
        "checkpoint_id": "B",
        "size": 0.48,
        "missing": 0.0,
        "total": 0.48,
        "total_ns": 480000000,
        "excluded": None,
        "items": [],
    }
    assert [each["flavor"] for each in json.loads(cli("catalogues", "--json").out)] == ["cpu"]
    assert [each["worker_id"] for each in json.loads(cli("workers", "--json").out)] == ["w"]


def test_what_was_changed_is_told_as_json(cli: Any, database: Database, database_url: str, tmp_path: Path) -> None:
    """The answers are those of the API, with warnings in them; stderr stays empty."""
    database.close()
    upgraded = cli("upgrade", "--json", DATABASE_URL=database_url)
    imported = cli("import", "--json", str(write(tmp_path / "cpu.json", make_worked_example())))
    sha256 = json.loads(imported.out)["sha256"]
    activated = cli("activate", "--json", sha256)

    assert json.loads(upgraded.out)["before"] == json.loads(upgraded.out)["revision"]
    assert len(json.loads(imported.out)["warnings"]) == 1
    assert json.loads(activated.out)["active"] is True
    assert json.loads(activated.out)["checkpoints"] == 3


def test_doctor_answers_for_scripts(cli: Any, filled: str) -> None:
    """Warnings end with 0, failures with 1; both as JSON."""
    well = cli("doctor", "--json", ROUTER_PORT="0", DATABASE_URL=filled)
    ill = cli("doctor", "--json", ROUTER_PORT="0", DATABASE_URL=filled, CATALOGUE_DIR="/no/such")

    assert (well.code, ill.code) == (0, 1)
    assert {each["name"]: each["state"] for each in json.loads(well.out)}["schema"] == "ok"
    assert {each["name"]: each["state"] for each in json.loads(ill.out)}["catalogue files"] == "failed"


def test_lists_are_tables(cli: Any, filled: str) -> None:
    """Catalogues and workers, a line each."""
    assert re.search(r"cpu.*yes.*0\.006.*3", cli("catalogues", DATABASE_URL=filled).out)
    assert re.search(r"w.*cpu.*ready.*fork.*3\.11\.7.*0\.0 of 4\.0 GiB", cli("workers").out)


@pytest.mark.parametrize(
    ("arguments", "functions"),
    [
        ([], [PARSE, "train"]),
        (["--state", "finished"], ["train"]),
        (["--function", PARSE], [PARSE]),
        (["--worker", "w"], ["train"]),
        (["--worker", "nobody"], []),
        (["--since", "2000-01-01", "--limit", "1"], [PARSE]),
        (["--limit", "1", "--offset", "1"], ["train"]),
        (["--since", "2126-01-01T00:00:00Z"], []),
    ],
)
@pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
def test_calls_are_chosen_as_in_the_api(cli: Any, called: str, arguments: list[str], functions: list[str]) -> None:
    """By state, function, worker and time, the latest first, a page of them."""
    run = cli("calls", "--json", *arguments, DATABASE_URL=called)

    assert [each["function"] for each in json.loads(run.out)] == functions


def test_calls_are_a_table(cli: Any, called: str) -> None:
    """A line each, with the seconds to ready; what a client named is no markup and no command to a terminal."""
    run = cli("calls", "--limit", "2", DATABASE_URL=called)
    later, earlier = [line for line in run.out.splitlines() if re.search("[0-9a-f]{32}", line)]

    assert re.search("parse \\[red\\]\ufffd\\[0m .* placed .* v ", later)
    assert re.search(r"train .* finished .* w .* 0\.500 ", earlier)
    assert "These are 2, and there may be more: --limit" in run.err  # the page is full
    assert cli("calls").err == ""


def test_sessions_are_listed_by_state_and_worker(cli: Any, called: str) -> None:
    """As a table and as JSON."""
    table = cli("sessions", "--worker", "v", DATABASE_URL=called)
    (busy,) = json.loads(cli("sessions", "--state", "busy", "--json").out)

    assert re.search(r"notebook-7 .* v .* busy .*[0-9a-f]{32} .* 0 ", table.out)
    assert (busy["session_id"], busy["worker_id"]) == ("notebook-7", "v")
    assert json.loads(cli("sessions", "--state", "idle", "--json").out) == []
    assert json.loads(cli("sessions", "--worker", "w", "--json").out) == []


def test_lists_of_a_router_are_those_of_its_database(cli: Any) -> None:
    """Calls and sessions are asked of it with the same options, whatever is in them."""
    body = {"flavor": "cpu", "state": "ready", "python": "3.11.7", "runtime": "fork"}
    call = {"payload": "", "python": "3.11", "function": "a b&c", "session_id": "s"}
    with serving() as (_, url, _):
        ask("PUT", f"{url}/v1/workers/w", json=body)
        placed = ask("POST", f"{url}/v1/calls", json=call).json()
        chosen = ["--worker", "w", "--since", "2000-01-01", "--function", "a b&c", "--state", "placed"]
        (found,) = json.loads(cli("calls", "--json", "--router", url, *chosen).out)
        none = cli("calls", "--json", "--router", url, "--function", "a b")
        (session,) = json.loads(cli("sessions", "--json", "--router", url, "--worker", "w", "--state", "busy").out)

    assert (found["call_id"], none.out.strip()) == (placed["call_id"], "[]")
    assert (session["session_id"], session["call_id"]) == ("s", placed["call_id"])


def test_without_a_catalogue_explain_says_so(cli: Any, database: Database, database_url: str) -> None:
    """A flavor without an active catalogue starts everything cold."""
    database.close()

    assert "no active catalogue" in cli("explain", "numpy", DATABASE_URL=database_url).out


def test_import_makes_a_catalogue_active(cli: Any, database: Database, database_url: str, tmp_path: Path) -> None:
    """The file is imported, and the same again only activated."""
    database.close()
    document = write(tmp_path / "catalogue.json", make_worked_example() | {"extra": 1})
    for _ in range(2):
        run = cli("import", str(document), DATABASE_URL=database_url)
        assert (run.code, run.out.startswith("cpu: active is ")) == (0, True)
        assert "extra" in run.err

    assert [each["active"] for each in json.loads(cli("catalogues", "--json").out)] == [True]


def test_activate_goes_back_to_an_earlier_catalogue(cli: Any, filled: str, tmp_path: Path) -> None:
    """By how its SHA-256 begins, for the flavor that it has; one that is not there is an error with the way out."""
    earlier = json.loads(cli("catalogues", "--json", DATABASE_URL=filled).out)[0]["sha256"]
    cli("import", str(write(tmp_path / "later.json", make_worked_example(alpha=0.02))))
    run = cli("activate", earlier[:12])

    assert (run.code, run.out.startswith(f"cpu: active is {earlier[:12]}, generation ")) == (0, True)
    assert [each["sha256"] == earlier for each in json.loads(cli("catalogues", "--json").out)] == [True, False]
    wrong = cli("activate", earlier, "--flavor", "gpu")
    assert (wrong.code, "is of flavor cpu, not gpu" in wrong.err) == (2, True)
    assert "none begins with 000000" in cli("activate", "000000").err
    unknown = cli("activate", "0" * 64)
    assert (unknown.code, "is imported" in unknown.err, "catalogues --json" in unknown.err) == (2, True, True)


def test_upgrade_brings_the_schema(cli: Any, empty_database_url: str) -> None:
    """An empty database is behind until it is upgraded."""
    open_database(empty_database_url).close()
    behind = cli("workers", DATABASE_URL=empty_database_url)
    assert behind.code == 1
    assert f"{make_url(empty_database_url)}: its schema is at nothing" in behind.err
    assert "readie-router upgrade" in behind.err
    assert cli("upgrade").code == 0
    assert cli("workers").code == 0


# ---- what users get wrong ----


@pytest.mark.parametrize(
    ("arguments", "environ", "code", "message"),
    [
        (["nonsense"], {}, 2, "No such command"),
        (["explain"], {}, 2, "Missing argument"),
        (["explain", "a", "--flavor", "tpu"], {}, 2, "'tpu' is not a flavor. Use cpu or gpu."),
        (["explain", "a", "--memory", "1.5Gi"], {}, 2, "'1.5Gi' is not a size. Give whole bytes"),
        (["explain", "x" * 1025], {}, 2, "MODULE: Expected `str` of length <= 1024"),
        (["explain", "a\udcff"], {}, 2, "is not text"),
        (["explain", "a", "--items-of", "\udcff"], {}, 2, "is not text"),
        (["explain", "a", "--catalogue", "short"], {}, 2, "'short' is not a SHA-256"),
        (["explain", "a"], {"DATABASE_URL": "mysql://h/d"}, 2, "Accepted: duckdb:///file.duckdb"),
        (["explain", "a"], {"DATABASE_URL": "nonsense"}, 2, "Accepted: duckdb:///file.duckdb"),
        (["workers"], {"DATABASE_URL": "duckdb:///nowhere.duckdb"}, 1, "nowhere.duckdb: no such file"),
        (["workers"], {"DATABASE_URL": "postgresql://u:secret@127.0.0.1:1/d"}, 1, "Check DATABASE_URL"),
        (["workers", "--router", "http://127.0.0.1:1"], {}, 1, "127.0.0.1:1"),
        (["workers", "--router", "nonsense"], {}, 2, "--router 'nonsense' is no URL of a router"),
        (["workers", "--router", ""], {}, 2, "--router '' is no URL of a router"),
        (["workers", "--router", "ftp://h"], {}, 2, "--router 'ftp://h' is no URL of a router"),
        (["workers", "--router", "http://h:99999"], {}, 2, "--router 'http://h:99999' is no URL of a router"),
        (["workers", "--router", "http://h:port"], {}, 2, "--router 'http://h:port': "),
        (["workers", "--router", "http://127.0.0.1:1"], {"AUTH_TOKEN": "secret\u00fc"}, 2, "AUTH_TOKEN has characters"),
        (["serve", "--port", "0"], {"WORKER_TOKEN": "secret\u00fc"}, 2, "WORKER_TOKEN has characters"),
        (["import", "nowhere.json"], {}, 2, "nowhere.json"),
        (["import", "."], {}, 2, ".: it is not a file"),
        (["import", "pyproject.toml", "--router", "nonsense"], {}, 2, "no such file"),
        (["export", "nowhere.json", "x.duckdb"], {}, 2, "nowhere.json: no such file"),
        (["export", "nowhere.json", "."], {}, 2, ". is there already"),
        (["export", "nowhere.json", "no/such.duckdb"], {}, 2, "there is no folder no"),
        (["activate"], {}, 2, "Missing argument"),
        (["activate", "short"], {}, 2, "'short' is not a SHA-256"),
        (["activate", "0" * 64, "--flavor", "tpu"], {}, 2, "'tpu' is not a flavor"),
        (["activate", "0" * 64], {"DATABASE_URL": "duckdb:///nowhere.duckdb"}, 1, "nowhere.duckdb: no such file"),
        (["activate", "0" * 64, "--router", "http://127.0.0.1:1"], {}, 1, "127.0.0.1:1"),
        (["calls", "--state", "odd"], {}, 2, "'odd' is not one of 'placed'"),
        (["calls", "--since", "yesterday"], {}, 2, "'yesterday' does not match"),
        (["calls", "--limit", "0"], {}, 2, "--limit"),
        (["calls", "--function", "\udcff"], {}, 2, "is not text"),
        (["sessions", "--state", "ready"], {}, 2, "'ready' is not one of 'busy'"),
        (["sessions"], {"DATABASE_URL": "duckdb:///nowhere.duckdb"}, 1, "nowhere.duckdb: no such file"),
        (["serve"], {"ROUTER_PORT": "seventy"}, 2, "ROUTER_PORT='seventy'"),
        (["serve", "--port", "70000"], {}, 2, "ROUTER_PORT='70000'"),
        (["serve"], {"WORKER_TTL": "-1"}, 2, "WORKER_TTL='-1'"),
        (["serve"], {"MAX_PAYLOAD": "big"}, 2, "MAX_PAYLOAD='big'"),
        (["serve", "--host", "0.0.0.0", "--port", "0"], {}, 2, "AUTH_TOKEN and WORKER_TOKEN not set"),
        (
            ["serve", "--host", "203.0.113.7"],
            {"AUTH_TOKEN": "a", "WORKER_TOKEN": "w"},
            2,
            "cannot listen on 203.0.113.7",
        ),
    ],
)
def test_usage_errors(cli: Any, arguments: list[str], environ: Mapping[str, str], code: int, message: str) -> None:
    """One message on stderr with the way out, the exit code of the kind of error, no traceback, no secret."""
    run = cli(*arguments, **environ)

    assert (run.code, run.out) == (code, "")
    assert message in run.err
    assert "secret" not in run.err
    assert not list(Path.cwd().glob("nowhere*"))


def test_a_bad_document_is_named_with_its_place(cli: Any, tmp_path: Path) -> None:
    """Nothing of it is imported."""
    document = make_worked_example()
    document["items"]["numpy"]["load_time"] = -1
    run = cli("import", str(write(tmp_path / "catalogue.json", document)))

    assert run.code == 2
    assert 'items["numpy"].load_time' in run.err


def test_an_unknown_checkpoint_is_answered_with_those_there_are(cli: Any, filled: str) -> None:
    """The message names them."""
    run = cli("explain", "numpy", "--items-of", "Z", DATABASE_URL=filled)

    assert run.code == 2
    assert "Z: the catalogue lists A, B, C, cold" in run.err


def test_a_port_that_is_taken(cli: Any) -> None:
    """The router says so before it touches the database."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        run = cli("serve", "--port", str(listener.getsockname()[1]))

    assert run.code == 1
    assert "--port" in run.err
    assert not list(Path.cwd().glob("*.duckdb"))


def test_a_database_that_is_behind_is_not_served(cli: Any, empty_database_url: str) -> None:
    """Without --migrate a router refuses a schema that is not its own."""
    run = cli("serve", "--port", "0", "--no-migrate", DATABASE_URL=empty_database_url)

    assert run.code == 1
    assert "serve --migrate" in run.err


@pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
@pytest.mark.parametrize(
    ("redirection", "message"),
    [(">&-", ""), ("> /dev/full", "readie-router: No space left on device\n"), ("| head -c 1 > /dev/null", "")],
)
@pytest.mark.parametrize("command", ["explain numpy", "--help"])
def test_output_that_nobody_can_write(command: str, redirection: str, message: str, filled: str) -> None:
    """Closed, full or hung up: at most one line says so."""
    line = f"'{sys.executable}' -m app.cli {command} {redirection}"
    environ = os.environ | {"DATABASE_URL": filled, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(["sh", "-c", line], env=environ, stderr=subprocess.PIPE, text=True, check=False)

    assert run.stderr == message


@pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
def test_a_terminal_of_fewer_characters(filled: str) -> None:
    """What it does not have is shown by its number."""
    command = [sys.executable, "-m", "app.cli", "explain", "ü"]
    environ = os.environ | {"DATABASE_URL": filled, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)

    assert "\\xfc: matches no item" in run.stdout


# ---- a real process ----


def test_a_router_serves_until_it_is_told_to_stop(cli: Any, kind: str, database_url: str, tmp_path: Path) -> None:
    """It imports the catalogue files, warns of bad ones, answers, and ends its long polls when it is stopped."""
    folder = tmp_path / "catalogues"
    folder.mkdir()
    write(folder / "cpu.json", make_worked_example())
    (folder / "gpu.json").write_text("{")
    with serving(DATABASE_URL=database_url, CATALOGUE_DIR=str(folder)) as (process, url, lines):
        assert ask("GET", f"{url}/ready").status_code == 200
        assert [each["flavor"] for each in ask("GET", f"{url}/v1/catalogues").json()] == ["cpu"]
        assert any("gpu.json" in line for line in lines)
        assert any("NO TOKEN IS SET" in line for line in lines)
        body = {"flavor": "cpu", "state": "ready", "python": "3.11.7", "runtime": "fork"}
        assert ask("PUT", f"{url}/v1/workers/w", json=body).status_code == 204
        if kind == "duckdb":
            run = cli("workers", "--json", DATABASE_URL=database_url, ROUTER_PORT=url.rpartition(":")[2])
            assert "is open in another process: asking the router at" in run.err
            assert [each["worker_id"] for each in json.loads(run.out)] == ["w"]
        else:
            assert [
                each["worker_id"] for each in json.loads(cli("workers", "--json", DATABASE_URL=database_url).out)
            ] == ["w"]
        explained = cli("explain", "pandas", "--json", "--router", url)
        assert json.loads(explained.out)["options"][0]["checkpoint_id"] == "B"
        unknown = cli("explain", "pandas", "--items-of", "Z", "--router", url)
        assert (unknown.code, "Z: the catalogue lists" in unknown.err) == (2, True)
        polls: list[httpx.Response] = []
        agent = threading.Thread(target=lambda: polls.append(ask("GET", f"{url}/v1/workers/w/placements?wait=60")))
        agent.start()
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0  # not after the 60 seconds that the poll may take
        agent.join(20)

        assert [poll.json()["run"] for poll in polls] == [[]]
        assert not any("Traceback" in line for line in lines)


def test_catalogues_come_in_through_the_router_that_has_the_file_open(
    cli: Any, duckdb_template: Path, tmp_path: Path
) -> None:
    """Import and activate ask it, and say so; a bad file is named with its place and changes nothing."""
    url = f"duckdb:///{shutil.copyfile(duckdb_template, tmp_path / 'readie.duckdb')}"
    first = write(tmp_path / "first.json", make_worked_example() | {"extra": 1})
    second = write(tmp_path / "second.json", make_worked_example(alpha=0.02))
    bad = make_worked_example()
    bad["items"]["numpy"]["load_time"] = -1
    with serving(DATABASE_URL=url, AUTH_TOKEN="client", WORKER_TOKEN="agent") as (_, router, _):
        environ = {"DATABASE_URL": url, "ROUTER_PORT": router.rpartition(":")[2], "AUTH_TOKEN": "client"}
        run = cli("import", str(first), **environ)
        assert (run.code, run.out[:15]) == (0, "cpu: active is ")
        assert "is open in another process: asking the router at" in run.err
        assert "ignored unknown keys: extra" in run.err
        sha256 = json.loads(cli("catalogues", "--json").out)[0]["sha256"]
        assert cli("import", str(second), "--router", router).code == 0
        refused = cli("import", str(write(tmp_path / "bad.json", bad)))
        assert refused.code == 2
        assert f'{tmp_path / "bad.json"}: items["numpy"].load_time is -1: must be a number from 0' in refused.err
        assert [each["sha256"] == sha256 for each in json.loads(cli("catalogues", "--json").out)] == [False, True]
        run = cli("activate", sha256)
        assert (run.code, "asking the router at" in run.err) == (0, True)
        assert json.loads(cli("catalogues", "--json").out)[0]["sha256"] == sha256


def test_a_restart_loses_nothing(database_url: str) -> None:
    """A router that was killed comes back to the same workers and calls."""
    call = {"payload": "", "python": "3.11"}
    body = {"flavor": "cpu", "state": "ready", "python": "3.11.7", "runtime": "fork"}
    with serving(DATABASE_URL=database_url) as (_, url, _):
        ask("PUT", f"{url}/v1/workers/w", json=body)
        placed = ask("POST", f"{url}/v1/calls", json=call).json()
    with serving(DATABASE_URL=database_url) as (_, url, _):
        (assignment,) = ask("GET", f"{url}/v1/workers/w/placements").json()["run"]

        assert assignment["call_id"] == placed["call_id"]


def test_tokens_reach_the_router_from_the_command_line(cli: Any) -> None:
    """With AUTH_TOKEN set the commands come in; without they are told what to send."""
    with serving(AUTH_TOKEN="client", WORKER_TOKEN="agent") as (_, url, lines):
        refused = cli("workers", "--router", url)
        assert (refused.code, "AUTH_TOKEN" in refused.err) == (2, True)
        assert cli("workers", "--router", url, "--json", AUTH_TOKEN="client").out.strip() == "[]"
        assert not any("NO TOKEN" in line for line in lines)
