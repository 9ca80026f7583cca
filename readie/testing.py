"""A pytest plugin: the fixture `readie_local`, with which calls of `@remote` functions run without a cluster.

The first test that asks for it starts a router over a DuckDB file, and a worker with the `fork` runtime whose root
filesystem is the environment that the tests run in. Both are the real commands, as processes of their own, and end with
the test run; under pytest-xdist each of its processes has its own pair.
"""

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

START_S = 120.0  # that router and worker may take together
END_S = 15.0  # that each may take to end
POLL_S = 0.02
MOST_CALLS = 1000

#: What the processes get of the environment: their settings are this module's alone.
PASSED = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")

#: Runs a package as `python -m` does, in a process that ends when its parent (the first argument) does, even by a kill.
RUN = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv.pop(1)):
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class LocalReadie:
    """What `readie_local` gives: where the router answers, its token for clients, and what was called."""

    url: str
    token: str
    since: datetime | None = None  # when the test began

    @property
    def calls(self) -> list[Any]:
        """The calls that the test has made so far, in their order: `function`, `state`, `measured_ready` (seconds)...

        They are `readie.wire.CallView`. The state of one that raised is `finished`, too.
        """
        from readie.wire import CallView

        answer: list[CallView] = _ask(self, f"/v1/calls?limit={MOST_CALLS}", list[CallView])
        return [each for each in reversed(answer) if self.since is None or each.created_at >= self.since]


@pytest.fixture(scope="session")
def _readie_line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalReadie]:
    """A router and a worker, started once."""
    folder = tmp_path_factory.mktemp("readie")
    with ExitStack() as processes:
        yield _start(folder, processes)


@pytest.fixture
def readie_local(_readie_line: LocalReadie, monkeypatch: pytest.MonkeyPatch) -> LocalReadie:
    """Calls of @remote functions run on this machine, in forked processes: nothing isolates them.

    Has `url`, and `calls`: what the test has called so far.
    """
    for name, value in {"ROUTER_URL": _readie_line.url, "AUTH_TOKEN": _readie_line.token}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ROUTER_CA", raising=False)
    return replace(_readie_line, since=datetime.now(UTC))


def _start(folder: Path, processes: ExitStack) -> LocalReadie:
    """Starts router and worker with all they write in `folder`; they end with `processes`. Fails the test if they do not."""
    deadline = time.monotonic() + START_S
    tokens = {name: secrets.token_hex(16) for name in ("AUTH_TOKEN", "WORKER_TOKEN")}
    settings = tokens | {"DATABASE_URL": f"duckdb:///{folder / 'readie.duckdb'}", "ROUTER_PORT": "0"}
    running, log = processes.enter_context(_process("app", "readie-router", folder, settings))
    port = _wait_for(lambda: re.search(r"serving .*port=(\d+)", log.read_text("utf-8")), running, log, deadline)
    line = LocalReadie(f"http://127.0.0.1:{port[1]}", tokens["AUTH_TOKEN"])
    settings = {
        "ROUTER_URL": line.url,
        "WORKER_TOKEN": tokens["WORKER_TOKEN"],
        "WORKER_ID": "local",
        "WORKER_DIR": str(folder / "worker"),
        "ROOTFS": str(_environment(folder)),
        "RUNTIME": "fork",
    }
    running, log = processes.enter_context(_process("worker", "readie-worker", folder, settings))
    _wait_for(lambda: _is_ready(line), running, log, deadline)
    return line


@contextmanager
def _process(
    part: str, name: str, folder: Path, settings: dict[str, str]
) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """A command that serves, and the file of its log."""
    log = folder / f"{name}.log"
    environment = {each: os.environ[each] for each in PASSED if each in os.environ} | settings
    with log.open("wb") as output:
        # -P: folders of the project under test may be called as our packages are
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", RUN, str(os.getpid()), part, "serve"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
        )
    try:
        yield process, log
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(happened: Callable[[], Any], process: "subprocess.Popen[bytes]", log: Path, deadline: float) -> Any:
    """What `happened` gives once it gives something; the test fails with the process's log if that never is."""
    while time.monotonic() < deadline:
        found = happened()
        if found:
            return found
        if process.poll() is not None:
            break
        time.sleep(POLL_S)
    why = f"{log.stem} {'has ended' if process.poll() is not None else f'was not ready in {START_S:g} s'}"
    return pytest.fail(f"readie_local: {why}:\n{log.read_text('utf-8', 'replace')}", pytrace=False)


def _is_ready(line: LocalReadie) -> bool:
    from readie.wire import WorkerView

    return any(each.state == "ready" for each in _ask(line, "/v1/workers", list[WorkerView]))


def _ask(line: LocalReadie, path: str, kind: Any) -> Any:
    import httpx

    from readie.http import connection, read_answer

    with httpx.Client(**connection(line.url, line.token)) as http:
        return read_answer(http.get(path), kind)


def _environment(folder: Path) -> Path:
    """The environment of this interpreter as a root filesystem: a folder whose bin/python has the same packages."""
    here = Path(sys.prefix)
    if (here / "bin" / "python").exists() and (here / "pyvenv.cfg").exists():
        return here
    import venv  # which a Python may lack, and every pytest loads this file

    # An interpreter of the system may have other names there, and nothing else to tell it by.
    venv.create(folder / "rootfs", system_site_packages=True, symlinks=True)
    return folder / "rootfs"
