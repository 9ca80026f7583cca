"""Faults (DESIGN §6, §8): real routers, agents and databases that are killed, stopped, filled and cut off.

Each test says what becomes of each call, and ends with `readie-router check`, which finds nothing.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from app.check import Finding, check_rows
from app.database import open_database
from app.settings import RouterSettings
from readie import remote
from readie.client import Call
from readie.errors import PlacementError, ReadieError, SessionExpired, WorkerLost
from tests.conftest import Cluster as Databases
from tests.postgres import Server, own_postgresql
from tests.sandboxes import make_rootfs, wait_for

ROOT = Path(__file__).parent.parent
#: The agent as it is, but that it reports more often: so that it is missed sooner.
AGENT = (
    "import worker.agent as agent; agent.REPORT_SECONDS; agent.REPORT_SECONDS = 0.5; "  # fails if it has another name
    "from worker.cli import main; main()"
)
ROUTER = "from app.cli import main; main()"
SETTINGS = {"SWEEP_INTERVAL": "0.3", "ACCEPT_TIMEOUT": "60"}
#: Moves the clock of one process.
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)

Process = subprocess.Popen[bytes]


class Faults:
    """Routers and agents over one database, each to be killed by its own process. Routers stay for the next test."""

    def __init__(self, folder: Path, database_url: str, rootfs: Path, **settings: str) -> None:
        self.folder, self.database_url, self.rootfs, self.settings = folder, database_url, rootfs, settings
        self.routers, self.workers = ExitStack(), ExitStack()
        self.tests = 0
        self.first: tuple[Process, str]

    @contextmanager
    def test(self) -> Iterator["Faults"]:
        """What a test starts of workers ends with it; no other test knows them."""
        self.tests += 1
        self.starts = self.folder / f"starts-{self.tests}"  # a line for each start of a function
        self.starts.touch()
        with self.workers:
            yield self

    def named(self, worker_id: str) -> str:
        return f"{worker_id}-{self.tests}"

    @contextmanager
    def run(self, code: str, name: str, environ: dict[str, str]) -> Iterator[Process]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("WORKER_", "ROUTER_"))}
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-c", code, "serve"]
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env={**clean, **SETTINGS, **self.settings, **environ}
            )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def router(self, port: int | None = None) -> tuple[Process, str]:
        """A router, and its URL."""
        if port is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        environ = {"DATABASE_URL": self.database_url, "ROUTER_PORT": str(port)}
        process = self.routers.enter_context(self.run(ROUTER, "router", environ))
        wait_for(lambda: is_ready(url), 60)
        return process, url

    def again(self, router: tuple[Process, str]) -> tuple[Process, str]:
        """The same router once more, after it was killed."""
        return self.router(int(router[1].rpartition(":")[2]))

    def worker(self, url: str, worker_id: str, folder: str = "") -> Process:
        """An agent that is ready."""
        worker_id, folder = self.named(worker_id), self.named(folder or worker_id)
        settings = {
            "ROUTER_URL": url,
            "WORKER_ID": worker_id,
            "WORKER_DIR": str(self.folder / folder),
            "WORKER_MEM_TOTAL": "8Gi",
            "ROOTFS": str(self.rootfs),
        }
        process = self.workers.enter_context(self.run(AGENT, folder, settings))
        log = self.folder / f"{folder}.log"
        wait_for(lambda: "] ready " in log.read_text(), 60)
        wait_for(lambda: self.view(url, worker_id).get("state") == "ready", 60)
        return process

    def view(self, url: str, worker_id: str) -> dict[str, Any]:
        """A worker, as the router tells of it; empty: it does not know it."""
        listed = ask(url, "/v1/workers") or []
        return next((one for one in listed if one["worker_id"] == worker_id), {})

    def started(self) -> list[str]:
        return self.starts.read_text().split()

    def submit(self, url: str, name: str, seconds: float = 0.0, size: int = 0, **options: Any) -> "Call[Any]":
        """A call that notes its start, takes some seconds, and returns its name (or some bytes)."""
        starts = str(self.starts)

        def work() -> Any:
            import time

            with open(starts, "a") as file:  # noqa: PTH123
                file.write(name + "\n")
            time.sleep(seconds)
            open(starts + ".ended", "a").close()  # noqa: PTH123
            return bytes(size) if size else name

        with at(url):
            return remote(work, **options).submit()

    def running(self, url: str, name: str, seconds: float = 0.0, **options: Any) -> "Call[Any]":
        """As `submit`, when the function has started."""
        before = self.started().count(name)
        call = self.submit(url, name, seconds, **options)
        wait_for(lambda: self.started().count(name) > before, 30)
        return call

    def findings(self) -> list[Finding]:
        with closing(open_database(self.database_url)) as database, database.reading() as connection:
            return [each for each in check_rows(connection, RouterSettings()) if each.wrong]

    def check(self) -> None:
        """Nothing is wrong in the database."""
        assert self.findings() == []


def ask(url: str, path: str) -> Any:
    try:
        answer = httpx.get(url + path, timeout=10)
    except httpx.TransportError:
        return None
    return answer.json() if answer.is_success else None


def is_ready(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/ready", timeout=5).is_success
    return False


@contextmanager
def at(url: str) -> Iterator[None]:
    """The client's router."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROUTER_URL", url)
        yield


def result(call: "Call[Any]", url: str) -> Any:
    with at(url):
        return call.result()


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rootfs(tmp_path_factory.mktemp("faults") / "rootfs", {})


@pytest.fixture(scope="module")
def postgresql() -> Iterator[Server]:
    """A server of this file's own, which may be killed."""
    with own_postgresql() as server:
        yield server


@pytest.fixture(scope="module")
def template(postgresql: Server) -> Databases:
    return Databases(postgresql.url)


@pytest.fixture(scope="module")
def patient_line(template: Databases, rootfs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    """Routers on PostgreSQL that miss no worker while they start, or while their database is away."""
    folder = tmp_path_factory.mktemp("patient")
    made = Faults(folder, template.create(template.template), rootfs, WORKER_TTL="60")
    with made.routers:
        made.first = made.router()
        yield made


@pytest.fixture
def patient(patient_line: Faults) -> Iterator[Faults]:
    """Its `first` router runs."""
    with patient_line.test() as faults:
        yield faults


@pytest.fixture(scope="module")
def quick_line(template: Databases, rootfs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    """A router on PostgreSQL that misses a worker soon."""
    made = Faults(tmp_path_factory.mktemp("quick"), template.create(template.template), rootfs, WORKER_TTL="8")
    with made.routers:
        made.first = made.router()
        yield made


@pytest.fixture
def quick(quick_line: Faults) -> Iterator[Faults]:
    """Its `first` router runs, and knows no worker that is ready."""
    url = quick_line.first[1]
    wait_for(lambda: "ready" not in [one["state"] for one in ask(url, "/v1/workers")], 30)
    with quick_line.test() as faults:
        yield faults


@pytest.fixture
def embedded(rootfs: Path, tmp_path: Path) -> Iterator[Faults]:
    """Nothing runs yet; the database will be a DuckDB file."""
    made = Faults(tmp_path, f"duckdb:///{tmp_path / 'readie.duckdb'}", rootfs, WORKER_TTL="60")
    with made.routers, made.test():
        yield made


# ---- routers ----


def count() -> int:
    """How many calls this process has served."""
    import sys

    sys.calls = getattr(sys, "calls", 0) + 1  # type: ignore[attr-defined]
    return int(sys.calls)  # type: ignore[attr-defined]


def test_a_router_is_killed_while_calls_run(patient: Faults) -> None:
    """Others of the cluster tell how a call goes meanwhile; its result comes when its agent's router is back."""
    faults, first, second = patient, patient.first, patient.router()
    faults.worker(first[1], "one")
    with at(first[1]):
        assert remote(count, session_id="s")() == 1
    call = faults.running(first[1], "a", 3.0)
    first[0].kill()
    first[0].wait()
    with at(second[1]):
        assert call.status.state == "accepted"
    faults.first = faults.again(first)

    assert result(call, second[1]) == "a"
    with at(second[1]):
        assert remote(count, session_id="s")() == 2
    assert faults.started() == ["a"]
    faults.check()


def test_the_router_of_an_embedded_database_is_killed(embedded: Faults) -> None:
    """Started again, it has the worker, the running call and the idle session that were there before."""
    faults, router = embedded, embedded.router()
    faults.worker(router[1], "one")
    with at(router[1]):
        assert remote(count, session_id="s")() == 1
        call = faults.running(router[1], "a", 3.0)
        router[0].kill()
        router[0].wait()
        router = faults.again(router)

        assert call.result() == "a"
        assert remote(count, session_id="s")() == 2
    assert faults.started() == ["a"]
    router[0].terminate()
    router[0].wait()
    faults.check()


def test_a_router_stops_while_a_call_waits_for_a_worker(embedded: Faults) -> None:
    """The client sends the call again, and the router that comes next places it."""
    faults, router = embedded, embedded.router()
    with at(router[1]), ThreadPoolExecutor(1) as waiting:
        answer = waiting.submit(remote(count, queue_timeout=60))
        wait_for(lambda: "readie_calls_placing 1.0" in httpx.get(f"{router[1]}/metrics", timeout=30).text, 30)
        router[0].terminate()
        router[0].wait()
        router = faults.again(router)
        faults.worker(router[1], "one")

        assert answer.result(60) == 1
    router[0].terminate()
    router[0].wait()
    faults.check()


# ---- workers ----


def test_a_worker_is_killed_before_it_accepts(quick: Faults) -> None:
    """The call is placed again, and runs once."""
    faults, url = quick, quick.first[1]
    worker = faults.worker(url, "one")
    worker.send_signal(signal.SIGSTOP)
    call = faults.submit(url, "a", queue_timeout=120)  # whatever the second worker takes to start
    faults.worker(url, "two")
    worker.kill()

    assert result(call, url) == "a"
    with at(url):
        placement = call.status.placement
    assert placement
    assert (placement.placement_id[-2:], placement.worker_id) == ("-2", faults.named("two"))
    assert faults.started() == ["a"]
    faults.check()


def test_a_worker_is_killed_after_it_accepted(quick: Faults) -> None:
    """The call is lost, because its function may have had effects; with retry=True it runs elsewhere."""
    faults, url = quick, quick.first[1]
    worker = faults.worker(url, "one")
    once = faults.running(url, "a", 60)
    twice = faults.running(url, "b", 1.0, retry=True, queue_timeout=120)
    worker.kill()
    faults.worker(url, "two")

    with pytest.raises(WorkerLost, match="was not heard from"):
        result(once, url)
    assert result(twice, url) == "b"
    assert faults.started() == ["a", "b", "b"]
    faults.check()


@pytest.mark.parametrize("size", [0, 15_000_000])
def test_a_worker_is_killed_while_it_sends_a_result(quick: Faults, size: int) -> None:
    """A result that has left it counts; of half a result nothing does, and the call is lost."""
    faults, (router, url) = quick, quick.first
    worker = faults.worker(url, "one")
    call = faults.running(url, "a", 1.0, size=size)
    router.send_signal(signal.SIGSTOP)
    wait_for(faults.starts.with_suffix(".ended").exists)
    time.sleep(2.0)  # what fits into the socket is sent
    worker.kill()
    worker.wait()
    router.send_signal(signal.SIGCONT)

    if size:
        with pytest.raises(WorkerLost):
            result(call, url)
    else:
        assert result(call, url) == "a"
    faults.check()


def test_a_worker_stalls_for_longer_than_its_ttl(quick: Faults) -> None:
    """It is given up with what it ran and kept. When it comes back, it ends that, and serves again."""
    faults, url = quick, quick.first[1]
    worker = faults.worker(url, "one")
    with at(url):
        remote(len, session_id="s")("abc")
    call = faults.running(url, "a", 3.0)
    worker.send_signal(signal.SIGSTOP)
    with pytest.raises(WorkerLost):
        result(call, url)
    wait_for(lambda: faults.view(url, faults.named("one")) == {}, 30)
    worker.send_signal(signal.SIGCONT)
    wait_for(lambda: faults.view(url, faults.named("one")).get("state") == "ready", 30)

    assert result(faults.submit(url, "b"), url) == "b"
    with at(url), pytest.raises(SessionExpired):
        remote(len, session_id="s")("abc")
    wait_for(lambda: faults.view(url, faults.named("one"))["sandboxes"] == 0, 30)
    assert faults.started() == ["a", "b"]
    faults.check()


def test_two_agents_with_one_worker_id(quick: Faults) -> None:
    """Each call runs at most once, whichever of them takes it; it returns, or is lost when the other one reports."""
    faults, url = quick, quick.first[1]
    for folder in ("one", "other"):
        faults.worker(url, "one", folder)
    calls = {name: faults.submit(url, name, memory="200M") for name in map(str, range(12))}
    outcomes = []
    for name, call in calls.items():
        try:
            outcomes.append(result(call, url) == name)
        except (PlacementError, WorkerLost) as error:
            outcomes.append(isinstance(error, WorkerLost) or name not in faults.started())

    assert outcomes == [True] * 12
    assert len(set(faults.started())) == len(faults.started())
    faults.check()


# ---- the database ----


def test_postgresql_is_killed_while_calls_run(patient: Faults, postgresql: Server) -> None:
    """What was committed is there again; a client that waits goes on waiting, and gets its result."""
    faults, url = patient, patient.first[1]
    faults.worker(url, "one")
    call = faults.running(url, "a", 1.0)
    results: list[Any] = []
    with at(url):
        waiting = threading.Thread(target=lambda: results.append(call.result()))
        waiting.start()
        time.sleep(0.2)
        postgresql.kill()
        time.sleep(1.5)
        postgresql.start()
        waiting.join(60)

    assert results == ["a"]
    assert result(faults.submit(url, "b"), url) == "b"
    assert faults.started() == ["a", "b"]
    faults.check()


def test_connections_are_cut_in_the_middle_of_transactions(patient: Faults, postgresql: Server) -> None:
    """Every call that was placed ends as its function does; one whose placing failed says so."""
    faults, url = patient, patient.first[1]
    faults.worker(url, "one")
    over = threading.Event()

    def cut() -> None:
        with psycopg.connect(faults.database_url.replace("+psycopg", ""), autocommit=True) as connection:
            while not over.wait(0.15):
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )

    cutter = threading.Thread(target=cut)
    cutter.start()
    placed: dict[str, Call[Any]] = {}
    try:
        for number in range(30):
            with suppress(ReadieError):
                placed[f"call{number}"] = faults.submit(url, f"call{number}")
        time.sleep(1.0)
    finally:
        over.set()
        cutter.join()

    assert placed
    assert {name: result(call, url) for name, call in placed.items()} == {name: name for name in placed}
    assert len(set(faults.started())) == len(faults.started())
    wait_for(lambda: not ask(url, "/v1/calls?state=accepted") and not ask(url, "/v1/calls?state=placed"), 60)
    faults.check()


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed: tests/test_clock.py moves stored times")
def test_the_clock_of_postgresql_is_set_back_by_an_hour(patient: Faults, postgresql: Server) -> None:
    """What runs goes on, times are put right by a sweep, and what is placed then runs."""
    faults, url = patient, patient.first[1]
    faults.worker(url, "one")
    call = faults.running(url, "a", 3.0)
    postgresql.kill()
    postgresql.start(LD_PRELOAD=str(FAKETIME), FAKETIME="-3600", FAKETIME_DONT_FAKE_MONOTONIC="1")
    try:
        assert result(call, url) == "a"
        assert result(faults.submit(url, "b"), url) == "b"
        wait_for(lambda: not faults.findings(), 30)
        assert "clock was set back" in (faults.folder / "router.log").read_text()
        faults.check()
    finally:
        postgresql.kill()
        postgresql.start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_the_disk_of_the_embedded_database_is_full(embedded: Faults, tmp_path: Path) -> None:
    """Clients are told so. What was placed before is there, and with room again the router goes on."""
    faults, disk = embedded, tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=26m", "tmpfs", disk], check=True)
    try:
        faults.database_url = f"duckdb:///{disk / 'readie.duckdb'}"
        process, url = faults.router()
        worker = {"flavor": "cpu", "state": "ready", "python": "3.11.7", "runtime": "fork"}
        assert httpx.put(f"{url}/v1/workers/w", json=worker).is_success
        filler = disk / "filler"
        filler.write_bytes(bytes(4_000_000))

        def place() -> httpx.Response:
            call = {"payload": b64encode(os.urandom(1_000_000)).decode(), "python": "3.11"}
            return httpx.post(f"{url}/v1/calls", json=call, timeout=30)

        placed: list[dict[str, Any]] = []
        refused: list[dict[str, Any]] = []
        while len(refused) < 5:
            answer = place()
            (placed if answer.is_success else refused).append(answer.json())
        assert placed
        assert {each["type"] for each in refused} == {"urn:readie:problem:database-unavailable"}
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)

        placed.append(wait_for(lambda: (answer := place()).is_success and answer.json(), 30))
        assert httpx.put(f"{url}/v1/workers/w", json=worker).is_success
        for call in placed:
            assert ask(url, f"/v1/calls/{call['call_id']}")["state"] in {"placed", "failed"}
        process.terminate()
        process.wait()
        faults.check()
    finally:
        faults.routers.close()
        subprocess.run(["umount", disk], check=True)
