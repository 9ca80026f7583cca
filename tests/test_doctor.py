"""`doctor` of the three command lines: what it finds on set-ups that work, and on such that do not."""

import fcntl
import json
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import msgspec
import pytest
import trustme
from sqlalchemy import make_url, text

from app.catalogue import import_catalogue
from app.database import Database, migrate, open_database
from app.doctor import examine as examine_router
from app.liveness import report_status
from pipeline.doctor import Setup
from pipeline.doctor import examine as examine_pipeline
from pipeline.processes import Sandbox, describe
from readie.command_line import Check, Doubt, check, report_checks, seconds_ahead
from readie.errors import BadFile
from readie.flavor import Flavor
from readie.wire import HeldGeneration, WorkerStatus
from tests.catalogues import make_worked_example, read, write
from tests.lines import Line, write_generation
from tests.tiny import make_rootfs, package
from worker.doctor import examine as examine_worker

TOKENS = {"AUTH_TOKEN": "for clients", "WORKER_TOKEN": "secret"}


def states(checks: Iterable[Check]) -> dict[str, str]:
    return {each.name: each.state for each in checks}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---- what they have in common ----


def test_a_check_is_ok_doubtful_or_failed() -> None:
    """What it looks at says so: by its answer, by a doubt, by a problem, or by whatever else goes wrong."""

    def raising(error: Exception) -> str:
        raise error

    assert check("one", lambda: "found") == Check(name="one", state="ok", found="found")
    assert check("one", lambda: raising(Doubt("odd", "Look."))) == Check(
        name="one", state="warning", found="odd", way_out="Look."
    )
    assert check("one", lambda: raising(BadFile("bad", "Mend it."))) == Check(
        name="one", state="failed", found="bad", way_out="Mend it."
    )
    assert check("one", lambda: raising(FileNotFoundError(2, "No such file", "/f"))).found == "/f: No such file"
    assert check("one", lambda: raising(LookupError("a\nb"))).found == "LookupError: a"


def test_checks_are_printed_with_their_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A line each, the way out below it, and a count; one that failed ends the command with 1, a warning does not."""
    good = Check(name="disk", state="ok", found="[bold]much")
    odd = Check(name="clock", state="warning", found="late", way_out="Set it.")
    report_checks([good, odd], as_json=False)

    assert capsys.readouterr().out == (
        "ok      disk: [bold]much\nwarning clock: late\n        Set it.\n2 checks: 0 failed, 1 with a warning\n"
    )
    with pytest.raises(Exception) as ended:
        report_checks([odd, Check(name="port", state="failed", found="taken")], as_json=True)
    assert getattr(ended.value, "exit_code", None) == 1
    assert [each["state"] for each in json.loads(capsys.readouterr().out)] == ["warning", "failed"]


# ---- the router ----


@pytest.fixture
def set_up(database: Database, database_url: str, tmp_path: Path) -> dict[str, str]:
    """Settings of a router whose database has a catalogue and a worker, open nowhere."""
    folder = tmp_path / "catalogues"
    folder.mkdir()
    write(folder / "cpu.json", make_worked_example())
    catalogue = read(make_worked_example())
    migrate(database)  # a copy of a database has none of its roles
    import_catalogue(database, catalogue)
    held = HeldGeneration(generation=catalogue.generation, checkpoint_ids=["A"])
    status = WorkerStatus(flavor=Flavor.CPU, state="ready", python="3.11.7", runtime="fork", generations=[held])
    with database.transaction() as connection:
        report_status(connection, "w", status)
    database.close()
    return TOKENS | {
        "DATABASE_URL": database_url,
        "CATALOGUE_DIR": str(folder),
        "ROUTER_PORT": str(free_port()),
    }


def test_a_router_that_is_well(set_up: Mapping[str, str], kind: str) -> None:
    """Everything is looked at, and nothing fails; of PostgreSQL there is more to see."""
    found = list(examine_router(set_up))
    common = {"settings", "patience", "tokens", "TLS", "address", "database", "schema", "catalogues", "workers", "rows"}
    of_server = {"server", "clock", "rights", "queries", "connections", "notices"} if kind == "postgresql" else set()
    odd = {each.name: each.found for each in found if each.state != "ok"}

    # The documents of the tests have no projection; other tests have connections of their own.
    assert odd.keys() <= {"catalogue files", "connections"}, odd
    assert states(found).keys() == common | of_server | {"catalogue files"}
    assert "failed" not in states(found).values()


def test_a_router_whose_database_is_not_well(set_up: Mapping[str, str], database: Database) -> None:
    """Workers that lack the active generation, flavors without a catalogue, and rows that break a rule, are told apart."""
    with database.transaction() as connection:
        connection.execute(text("UPDATE workers SET heard_at = heard_at + INTERVAL '1 day'"))
        status = WorkerStatus(flavor=Flavor.CPU, state="ready", python="3.11.7", runtime="fork")
        report_status(connection, "without", status)
    database.close()
    found = {each.name: each for each in examine_router(set_up)}

    assert (found["rows"].state, "times_to_come" in found["rows"].found) == ("failed", True)
    assert (found["workers"].state, found["workers"].found) == (
        "warning",
        "without the active generation of their flavor: without",
    )
    assert found["catalogues"].state == "ok"


def test_a_database_that_is_behind(empty_database_url: str) -> None:
    """The way out is said; what needs the tables is not looked at."""
    if empty_database_url.startswith("duckdb"):
        open_database(empty_database_url).close()
    found = {each.name: each for each in examine_router({"DATABASE_URL": empty_database_url, "ROUTER_PORT": "0"})}

    assert found["schema"].state == "failed"
    assert "readie-router upgrade" in found["schema"].way_out
    assert "workers" not in found


def run_statements(database: Database, statements: Iterable[str]) -> None:
    with database.transaction() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    database.close()


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_a_role_without_rights(set_up: Mapping[str, str], database: Database, kind: str) -> None:
    """What it lacks is named, right by right."""
    role = f"weak_{free_port()}"
    granted = [f"CREATE ROLE {role}", f"GRANT {role} TO CURRENT_USER"]
    granted += [f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}"]
    url = make_url(set_up["DATABASE_URL"]).update_query_dict({"options": f"-c role={role}"})
    run_statements(database, granted)
    try:
        settings = {**set_up, "DATABASE_URL": url.render_as_string(hide_password=False)}
        found = {each.name: each for each in examine_router(settings)}
    finally:
        run_statements(database, [f"DROP OWNED BY {role}", f"DROP ROLE {role}"])

    assert found["rights"].state == "failed"
    assert "INSERT of calls" in found["rights"].found
    assert "SELECT of calls" not in found["rights"].found


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """TLS_CERT and TLS_KEY of a certificate that has expired."""
    folder = tmp_path_factory.mktemp("certificate")
    yesterday = datetime.now(UTC) - timedelta(days=1)
    expired = trustme.CA().issue_cert("router.example", not_before=yesterday - timedelta(days=9), not_after=yesterday)
    expired.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    expired.private_key_pem.write_to_path(str(folder / "key.pem"))
    return {"TLS_CERT": str(folder / "cert.pem"), "TLS_KEY": str(folder / "key.pem")}


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        ({"ROUTER_PORT": "x"}, ("settings", "failed", "ROUTER_PORT='x'")),
        ({"ROUTER_PROT": "1"}, ("settings", "warning", "ROUTER_PROT (is ROUTER_PORT meant?)")),
        ({"WORKER_TTL": "10"}, ("patience", "warning", "agents report every 10 seconds")),
        ({}, ("tokens", "warning", "AUTH_TOKEN and WORKER_TOKEN not set")),
        ({"ROUTER_HOST": "0.0.0.0"}, ("tokens", "failed", "others than this machine")),
        ({**TOKENS, "ROUTER_HOST": "0.0.0.0"}, ("TLS", "warning", "can be read on the way")),
        ({"TLS_CERT": "/no/such.pem"}, ("TLS", "failed", "TLS_KEY is not set")),
        ({"CATALOGUE_DIR": "/no/such"}, ("catalogue files", "failed", "/no/such: No such file or directory")),
        ({"CATALOGUE_DIR": "."}, ("catalogue files", "failed", "bad.json")),
        ({"DATABASE_URL": "duckdb:///absent.duckdb"}, ("database", "warning", "absent.duckdb: no such file")),
        ({"DATABASE_URL": "duckdb:////no/such/file"}, ("database", "failed", "/no/such: no folder")),
        ({"DATABASE_URL": "postgresql+psycopg://127.0.0.1:1/x"}, ("database", "failed", "127.0.0.1")),
    ],
)
def test_a_router_that_is_not_well(
    environ: Mapping[str, str], fault: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault is told by its name, and as what it is; nothing else is made."""
    name, state, said = fault
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    found = {each.name: each for each in examine_router({"ROUTER_PORT": "0"} | dict(environ))}

    assert found[name].state == state
    assert said in found[name].found
    assert found[name].way_out or "No such file" in said
    assert [path.name for path in tmp_path.iterdir()] == ["bad.json"]


def test_a_certificate_that_has_expired(certificate: dict[str, str]) -> None:
    """It is read as a client would."""
    found = {each.name: each for each in examine_router({"ROUTER_PORT": "0"} | certificate)}

    assert (found["TLS"].state, "has expired" in found["TLS"].found) == ("failed", True)


def test_a_port_that_another_program_has() -> None:
    """It is told from a router's."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken.settimeout(20)
        port = str(taken.getsockname()[1])
        looking = examine_router({"ROUTER_PORT": port})

        def refuse() -> None:
            with taken.accept()[0] as caller:
                caller.recv(1000)
                caller.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno")

        answering = threading.Thread(target=refuse)
        answering.start()
        found = {each.name: each for each in looking}
        answering.join()

    assert (found["address"].state, "no router answers" in found["address"].found) == ("failed", True)


# ---- the worker, at a real router ----


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """A router that serves, with the checkpoints that its catalogue lists; no worker."""
    made = Line(tmp_path_factory.mktemp("line"), {}, {"checkpoint_0": []})
    with made.processes:
        yield made


@pytest.fixture
def worker_settings(line: Line, tmp_path: Path) -> dict[str, str]:
    return {
        "ROUTER_URL": line.url,
        "WORKER_TOKEN": "secret",
        "WORKER_ID": "doctor",
        "WORKER_DIR": str(tmp_path / "worker"),
        "WORKER_MEM_TOTAL": "1Mi",
        "CHECKPOINT_DIR": str(line.folder / "checkpoints"),
        "ROOTFS": str(line.rootfs),
    }


def test_a_worker_that_is_well(worker_settings: dict[str, str], tmp_path: Path) -> None:
    """A sandbox starts, the checkpoints are this host's, and the router takes the token and waits for the generation."""
    found = list(examine_worker(worker_settings))
    expected = {"settings", "memory", "folder", "descriptors", "root filesystem", "sandbox", "checkpoints"}
    expected |= {"router", "clock", "token", "worker id", "generation"}

    assert {each.name: each.found for each in found if each.state != "ok"} == {}
    assert states(found).keys() == expected
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_is_not_well(worker_settings: dict[str, str], line: Line, tmp_path: Path) -> None:
    """All that is wrong is said in one go: the first fault hides no other."""
    write_generation(tmp_path / "checkpoints", {"checkpoint_1": []})
    (tmp_path / "file").touch()
    status = WorkerStatus(flavor=Flavor.CPU, state="ready", python="3.11.7", runtime="fork")
    sent = httpx.put(
        f"{line.url}/v1/workers/taken", content=msgspec.json.encode(status), headers={"Authorization": "Bearer secret"}
    )
    wrong = {
        "WORKER_ID": "taken",
        "WORKER_TOKEN": "wrong",
        "WORKER_TOKENS": "1",
        "WORKER_MEM_TOTAL": "900Ti",
        "WORKER_DIR": str(tmp_path / "file"),
        "CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
    }
    found = {each.name: each for each in examine_worker(worker_settings | wrong)}

    assert sent.status_code == 204
    assert {name: each.state for name, each in found.items() if each.state != "ok"} == {
        "settings": "warning",
        "memory": "failed",
        "folder": "failed",
        "checkpoints": "warning",
        "token": "failed",
        "worker id": "failed",
        "generation": "warning",
    }
    assert "rootfs_digest is " in found["checkpoints"].found
    assert "another worker reports" in found["worker id"].found
    assert all(each.way_out for each in found.values() if each.state != "ok")


@pytest.mark.parametrize(
    ("environ", "name", "said"),
    [
        ({"ROOTFS": "/no/such"}, "root filesystem", "/no/such/bin/python is not an executable"),
        ({"RUNTIME": "runsc", "PATH": "/no/such"}, "runsc", "runsc is not installed"),
        ({"ROUTER_URL": "http://127.0.0.1:1"}, "router", "127.0.0.1:1"),
        ({"WORKER_FLAVOR": "cpux"}, "settings", "WORKER_FLAVOR"),
        ({"WORKER_FLAVOR": "gpu", "WORKER_GPU_TOTAL": "1Gi"}, "GPU", "no /dev/nvidiactl"),
    ],
)
def test_a_worker_without_what_it_needs(
    environ: Mapping[str, str],
    name: str,
    said: str,
    worker_settings: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each fault is told by its name, and what cannot be looked at then is left out."""
    if name == "GPU" and Path("/dev/nvidiactl").exists():
        pytest.skip("this host has a GPU")
    if "PATH" in environ:
        monkeypatch.setenv("PATH", environ["PATH"])
    settings = worker_settings | {"ROOTFS": "/no/such"} | dict(environ)  # so that no sandbox takes its time
    found = {each.name: each for each in examine_worker(settings)}

    assert (found[name].state, said in found[name].found) == ("failed", True)
    assert found[name].way_out
    assert "sandbox" not in found


def test_a_router_that_serves_is_found_by_its_doctor(line: Line) -> None:
    """It has the DuckDB file open: what is in there is asked of it."""
    settings = TOKENS | {"DATABASE_URL": line.database_url, "ROUTER_PORT": str(line.port)}
    found = {each.name: each for each in examine_router(settings)}

    assert "a router of this version" in found["address"].found
    assert (found["database"].state, "open in the router" in found["database"].found) == ("ok", True)
    assert "cpu: " in found["catalogues"].found


# ---- the pipeline ----


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rootfs(tmp_path_factory.mktemp("pipeline") / "rootfs", package("light", "value = 1"))


def test_a_pipeline_that_is_well(rootfs: Path, tmp_path: Path) -> None:
    """The root filesystem can be listed, readie-worker measures with it, and there is something to measure for."""
    (tmp_path / "corpus.jsonl").write_text('{"modules": ["light"], "count": 2}\n')
    setup = Setup(Sandbox(rootfs, "fork", 30.0, "1Gi"), True, tmp_path, tmp_path / "corpus.jsonl")
    found = {each.name: each for each in examine_pipeline(setup)}
    expected = ["root filesystem", "runtime", "probe", "corpus", "work folder", "measurements", "memory", "processors"]

    assert list(found) == expected
    assert {each.state for each in found.values()} <= {"ok", "warning"}
    # Whether measuring can be isolated, and how busy the machine is, is up to the machine.
    assert {name for name, each in found.items() if each.state == "warning"} <= {"probe", "processors", "work folder"}
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_a_pipeline_that_is_not_well(rootfs: Path, tmp_path: Path) -> None:
    """A work folder that is in use and was measured elsewhere, a corpus that is none, and too little memory."""
    (tmp_path / "corpus.jsonl").write_text("{}\n")
    sandbox = Sandbox(rootfs, "fork", 30.0, "900Ti")
    host = msgspec.to_builtins(describe(sandbox).host) | {"python": "3.1.0"}
    head = {"host": host, "memory_source": "RssAnon", "version": 1}
    (tmp_path / "measurements.journal.jsonl").write_text(json.dumps(head) + "\n{}\n")
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        setup = Setup(sandbox, True, tmp_path, tmp_path / "corpus.jsonl")
        found = {each.name: each for each in examine_pipeline(setup)}

    assert (found["corpus"].state, "line 1" in found["corpus"].found) == ("failed", True)
    assert (found["work folder"].state, "another readie-pipeline" in found["work folder"].found) == ("warning", True)
    assert (found["measurements"].state, "python was 3.1.0" in found["measurements"].found) == ("warning", True)
    assert found["memory"].state == "warning"


def test_a_pipeline_without_a_root_filesystem(tmp_path: Path) -> None:
    """What needs one is left out, and the way to one is said."""
    setup = Setup(Sandbox(tmp_path / "absent", "fork"), True, tmp_path, tmp_path / "corpus.jsonl")
    found = {each.name: each for each in examine_pipeline(setup)}

    assert found["root filesystem"].state == "failed"
    assert "no such folder" in found["root filesystem"].found
    assert found["root filesystem"].way_out
    assert "probe" not in found


@pytest.mark.parametrize(("clock", "ahead"), [(10.0, 0.0), (10.4, 0.0), (11.0, 0.0), (9.5, -0.5), (12.5, 1.5)])
def test_a_clock_differs_by_what_is_certain(clock: float, ahead: float) -> None:
    """Asked between two moments, it may have been read at any of these: a slow answer is no wrong clock."""
    assert seconds_ahead(clock, 10.0, 11.0) == pytest.approx(ahead)
