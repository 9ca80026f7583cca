"""Answers of routers may cross, and two agents may speak for one worker: what an agent makes of orders then.

The agent is a real process. Its router is a script, which gives the answers in the order that a test is about.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import cloudpickle
import msgspec
import pytest

from readie.client import PYTHON
from readie.errors import PlacementTaken
from readie.wire import Assignment, Orders, Result, problem_of
from tests.sandboxes import make_rootfs, wait_for


class Script:
    """A router with one placement, which it names in every answer to a fetch until the placement has ended."""

    def __init__(self, assignment: Assignment, *, taken: bool = False) -> None:
        self.assignment = assignment
        self.taken = taken  # by another agent
        self.fetches = 0
        self.accepts = 0
        self.results: list[Result] = []
        self.ended = threading.Event()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if path.endswith("/accept"):
            self.accepts += 1
            problem = problem_of(PlacementTaken("another agent speaks for worker w"))
            return (409, msgspec.msgpack.encode(problem)) if self.taken else (204, b"")
        if path.endswith("/result"):
            self.results.append(msgspec.msgpack.decode(body, type=Result))
            seen = self.fetches
            wait_for(lambda: self.fetches >= seen + 2)  # the agent hears of the placement again
            time.sleep(0.5)  # and would run it in this time
            self.ended.set()
            return 200, msgspec.msgpack.encode(Orders())
        if method == "GET":
            self.fetches += 1
            time.sleep(0.05)
            return 200, msgspec.msgpack.encode(Orders() if self.ended.is_set() else Orders(run=[self.assignment]))
        return 204, b""


@contextmanager
def agent_of(script: Script, rootfs: Path, folder: Path) -> Iterator[Path]:
    """An agent of worker w that talks to the script; gives the file of its log."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            status, content = script.answer(self.command, self.path.partition("?")[0], body)
            self.send_response(status)
            self.send_header("content-type", "application/vnd.msgpack")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_any  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = {
        "ROUTER_URL": f"http://127.0.0.1:{server.server_port}",
        "ROOTFS": str(rootfs),
        "WORKER_DIR": str(folder / "worker"),
        "WORKER_ID": "w",
    }
    log = folder / "agent.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "worker.cli", "serve"]
        process = subprocess.Popen(command, env=os.environ | settings, stdout=output, stderr=output)
    try:
        yield log
    finally:
        process.terminate()
        process.wait(30)
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rootfs(tmp_path_factory.mktemp("crossing") / "rootfs", {})


def assignment(path: Path, *, packages: list[str]) -> Assignment:
    """A call that writes a line to a file each time it runs."""

    def run() -> None:
        with path.open("a") as file:
            file.write("ran\n")

    return Assignment(
        placement_id="call-1",
        call_id="call",
        payload=cloudpickle.dumps((run, (), {})),
        function="run",
        python=PYTHON,
        modules=[],
        packages=packages,
        memory=2**30,
        max_memory=2**30,
        gpu=False,
        gpu_memory=0,
        timeout=60,
        queue=0.0,
    )


def test_a_placement_that_is_named_again_while_its_result_is_sent_runs_once(rootfs: Path, tmp_path: Path) -> None:
    """The router still has the lease, and would let it be accepted again."""
    ran = tmp_path / "ran"
    script = Script(assignment(ran, packages=[]))
    with agent_of(script, rootfs, tmp_path):
        assert script.ended.wait(60)

    assert ran.read_text() == "ran\n"
    assert [result.outcome for result in script.results] == ["returned"]


def test_a_placement_that_another_agent_has_is_not_ended_by_one_that_cannot_start_it(
    rootfs: Path, tmp_path: Path
) -> None:
    """What it may not install fails before it asks: that is no result of the call, which runs elsewhere."""
    script = Script(assignment(tmp_path / "ran", packages=["nothing"]), taken=True)
    with agent_of(script, rootfs, tmp_path) as log:
        wait_for(lambda: log.read_text().count("placement dropped") >= 2, 60)

    assert script.results == []
    assert not (tmp_path / "ran").exists()
