"""The whole line with real processes: root filesystem → pipeline → catalogue → router → worker → calls."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from readie import remote
from readie.errors import CallTimeout, NoCapacity, NoWorkers, OutOfMemory, SandboxFailed, UnknownCheckpoint
from readie.wire import WorkerView
from tests.conftest import KINDS, Cluster

BIN = Path(sys.executable).parent
LOAD_S = 0.25

#: name → source. Packages that cost time to import, alone and together, and one that needs another.
PACKAGES = {
    "slowalpha": f"import time\ntime.sleep({LOAD_S})\nblob = bytearray(3_000_000)\nvalue = 1\n",
    "slowbeta": f"import slowalpha, time\ntime.sleep({LOAD_S})\nvalue = slowalpha.value + 1\n",
    "slowgamma": f"import time\ntime.sleep({LOAD_S})\nvalue = 5\n",
}
#: What fitting alpha would add is tested where it is.
SHORT = ("--repeats", "1", "--alpha", "0.0001")
CORPUS = {
    "one.py": "import slowalpha\n",
    "two.py": "import slowbeta\n",
    "three.py": "from slowbeta import value\n",
    "four.py": "import slowgamma\n",
}


def make_rootfs(folder: Path) -> Path:
    """A virtual environment with PACKAGES installed as three distributions."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    for name, source in PACKAGES.items():
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(source)
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n{name}-1.0.dist-info/METADATA,,\n")
    return folder


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `rootfs` and `out`: what the pipeline made of it by one command."""
    folder = tmp_path_factory.mktemp("line")
    rootfs = make_rootfs(folder / "rootfs")
    corpus = folder / "corpus"
    corpus.mkdir()
    for name, source in CORPUS.items():
        (corpus / name).write_text(source)
    command = [str(BIN / "readie-pipeline"), "generation", "--rootfs", str(rootfs), "--out", str(folder / "out")]
    done = subprocess.run(
        [*command, "--runtime", "fork", *SHORT, "--max-checkpoints", "4", str(corpus)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    catalogues = folder / "catalogues"
    catalogues.mkdir()
    shutil.copy(folder / "out" / "catalogue.json", catalogues / "cpu.json")
    shutil.copytree(folder / "out" / "catalogue.parquet", catalogues / "cpu.parquet")
    return folder


@contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of the project's own, with its output in `log`, ended at the end."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WORKER_", "ROUTER_"))}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**clean, **environment})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(is_so: object, log: Path, seconds: float = 30) -> None:
    assert callable(is_so)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if is_so():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds} s in vain; the log says:\n{log.read_text()}")


@contextmanager
def running_router(made: Path, database_url: str, folder: Path) -> Iterator[str]:
    """The URL of a real router process that has imported the catalogue."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = folder / "router.log"
    command = [str(BIN / "readie-router"), "serve", "--port", str(port)]
    with running(command, log, DATABASE_URL=database_url, CATALOGUE_DIR=str(made / "catalogues")):
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, log)
        yield url


def workers(url: str) -> list[WorkerView]:
    return msgspec.json.decode(httpx.get(f"{url}/v1/workers").content, type=list[WorkerView])


@contextmanager
def running_worker(made: Path, router: str, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A real worker process that holds every checkpoint."""
    log = folder / "worker.log"
    settings = {
        "ROUTER_URL": router,
        "WORKER_ID": "one",
        "WORKER_DIR": str(folder / "worker"),
        "WORKER_MEM_TOTAL": "4Gi",
        "CHECKPOINT_DIR": str(made / "out" / "checkpoints"),
        "ROOTFS": str(made / "rootfs"),
    }
    wanted = len(msgspec.json.decode((made / "out" / "manifest.json").read_bytes())["checkpoints"])
    with running([str(BIN / "readie-worker"), "serve"], log, **settings) as process:
        wait_until(
            lambda: any(
                each.state == "ready" and any(len(held.checkpoint_ids) == wanted for held in each.generations)
                for each in workers(router)
            ),
            log,
        )
        yield process


@pytest.fixture(scope="module", params=KINDS)
def line(
    request: pytest.FixtureRequest, made: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A router on a database of its own, and a worker: started once for each kind of database."""
    folder = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        if request.param == "duckdb":
            database_url = f"duckdb:///{folder / 'readie.duckdb'}"
            shutil.copyfile(request.getfixturevalue("duckdb_template"), folder / "readie.duckdb")
        else:
            cluster: Cluster = request.getfixturevalue("cluster")
            database_url = cluster.create(cluster.template)
            stack.callback(cluster.drop, database_url)
        url = stack.enter_context(running_router(made, database_url, folder))
        yield url, stack.enter_context(running_worker(made, url, folder))


@pytest.fixture
def router(line: tuple[str, "subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of the router; the client finds it too."""
    monkeypatch.setenv("ROUTER_URL", line[0])
    return line[0]


@pytest.fixture
def worker(router: str, line: tuple[str, "subprocess.Popen[bytes]"]) -> "subprocess.Popen[bytes]":
    """The worker's process."""
    assert router == line[0]
    assert line[1].poll() is None
    return line[1]


def test_a_call_runs_from_the_checkpoint_that_holds_what_it_imports(worker: object) -> None:
    """The router chooses the checkpoint by cost, and the sandbox is ready without importing."""

    def add() -> int:
        import slowbeta  # type: ignore[import-not-found]

        return int(slowbeta.value) + 40

    call = remote(add).submit()

    assert call.result() == 42
    assert call.status.result is not None
    assert call.status.result.started is not None
    assert call.status.result.started.how == "restored"
    assert call.status.result.started.checkpoint_id != "checkpoint_0"
    assert call.status.result.phases.imports < LOAD_S  # which a cold start takes for each


def test_a_cold_call_imports_everything_anew(worker: object) -> None:
    """`cold=True` asks for no checkpoint; the result says so, and the imports take their time."""

    def add() -> int:
        import slowbeta

        return int(slowbeta.value)

    call = remote(add, cold=True).submit()

    assert call.result() == 2
    assert call.status.result is not None
    assert call.status.result.started is not None
    assert call.status.result.started.how == "cold"
    assert call.status.result.phases.ready >= 2 * LOAD_S


def test_many_calls_come_back_in_order(worker: object) -> None:
    """`map` gives one result an argument, in the order of the arguments."""

    @remote
    def square(number: int) -> int:
        return number * number

    assert list(square.map(range(12))) == [number * number for number in range(12)]


def test_a_remote_exception_is_raised_here_with_its_traceback(worker: object) -> None:
    """The caller sees the exception's own type, and the remote lines."""

    @remote
    def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError) as raised:
        fail()

    assert "missing" in str(raised.value)
    assert any("in fail" in note for note in raised.value.__notes__)


def test_what_a_call_prints_is_printed_here(worker: object, capfd: pytest.CaptureFixture[str]) -> None:
    """Output of the remote process arrives on the caller's own stdout."""

    @remote
    def speak() -> None:
        print("heard from afar")

    speak()

    assert "heard from afar" in capfd.readouterr().out


def test_a_call_over_its_timeout_fails_and_the_worker_goes_on(worker: object) -> None:
    """A function that does not end is ended, and the next call is served."""

    @remote(timeout=0.5)
    def sleep() -> None:
        time.sleep(60)

    with pytest.raises(CallTimeout):
        sleep()

    assert remote(len)("abc") == 3


def test_a_call_over_its_memory_fails_and_the_worker_goes_on(worker: object) -> None:
    """Memory beyond the budget ends the call as out-of-memory, not as some death."""

    @remote(memory="100M")
    def grow() -> int:
        blocks = [bytearray(b"x" * 10_000_000) for _ in range(100)]
        time.sleep(5)
        return len(blocks)

    with pytest.raises(OutOfMemory):
        grow()

    assert remote(len)("abc") == 3


def test_a_function_that_ends_its_process_fails_as_such(worker: object) -> None:
    """A sandbox that dies names how it died."""

    @remote
    def leave() -> None:
        os._exit(7)

    with pytest.raises(SandboxFailed, match="7"):
        leave()


def test_a_gpu_call_is_refused_where_only_cpu_workers_are(worker: object) -> None:
    """The error names what is lacking; the call is not run somewhere without a GPU."""

    @remote(gpu=True)
    def compute() -> None: ...

    with pytest.raises(NoCapacity, match="gpu"):
        compute()


def test_a_pinned_checkpoint_that_is_not_listed_is_refused_with_those_that_are(worker: object) -> None:
    """The message helps: it names the ids that the catalogue has."""

    @remote(checkpoint_id="checkpoint_99")
    def pinned() -> None: ...

    with pytest.raises(UnknownCheckpoint, match="checkpoint_0"):
        pinned()


def test_a_worker_that_is_told_to_stop_finishes_its_call_and_takes_no_other(
    worker: "subprocess.Popen[bytes]", router: str
) -> None:
    """SIGTERM: what runs is finished and reported; then no worker at all is another problem than no room.

    The last test of the module, because it leaves the line without its worker.
    """

    def work() -> str:
        time.sleep(1.5)
        return "done"

    call = remote(work).submit()
    wait_until(lambda: call.status.state == "accepted", Path(os.devnull))
    worker.send_signal(signal.SIGTERM)

    assert call.result() == "done"
    assert worker.wait(60) == 0
    with pytest.raises(NoWorkers):
        remote(len)("abc")
