"""Payloads and results are bytes to the router: it never unpickles one."""

import base64
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar.testing import TestClient

from app.application import create_app
from app.database import Database
from app.settings import RouterSettings
from tests.routers import ROOT, ask, serving

STATUS = {"flavor": "cpu", "state": "ready", "python": "3.11.7", "runtime": "fork"}


class Trap:
    """Whoever unpickles it creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.fixture
def trap(tmp_path: Path) -> tuple[str, Path]:
    """A pickle in base64, and the file that is there once it was unpickled."""
    file = tmp_path / "unpickled"
    return base64.b64encode(pickle.dumps(Trap(file))).decode(), file


def serve_a_call(http: Any, payload: str) -> list[int]:
    """A whole placement, from the worker's report to the client's reading, with everything that a router is asked
    meanwhile; the status of each answer.
    """
    answers: list[httpx.Response] = [http("PUT", "/v1/workers/w", json=STATUS)]
    call = {"payload": payload, "python": "3.11", "function": "f", "modules": ["numpy"], "session_id": "s"}
    answers.append(http("POST", "/v1/calls", json=call))
    placed = answers[-1].json()
    placement = f"/v1/placements/{placed['placement']['placement_id']}"
    answers.append(http("GET", "/v1/workers/w/placements"))
    assert answers[-1].json()["run"][0]["payload"] == payload
    answers.append(http("POST", f"{placement}/accept?worker_id=w"))
    answers.append(http("POST", f"{placement}/output", json={"sequence": 0, "stream": "stdout", "text": payload}))
    result = {"outcome": "raised", "payload": payload, "problem": {"type": payload, "title": payload}}
    answers.append(http("PUT", f"{placement}/result", json=result))
    answers.append(http("GET", f"/v1/calls/{placed['call_id']}"))
    assert answers[-1].json()["result"]["payload"] == payload
    lists = ("/v1/calls", "/v1/calls/imports", "/v1/sessions", "/v1/workers", "/metrics")
    answers += [http("GET", path) for path in lists]
    answers.append(http("POST", "/v1/sql", json={"query": "SELECT * FROM recorded_calls"}))
    answers.append(http("DELETE", f"/v1/calls/{placed['call_id']}"))
    answers.append(http("DELETE", "/v1/sessions/s"))
    return [answer.status_code for answer in answers]


def test_the_trap_works(trap: tuple[str, Path]) -> None:
    """Unpickled, it creates the file: the tests below would see it."""
    payload, file = trap
    pickle.loads(base64.b64decode(payload))

    assert file.exists()


def test_a_router_never_unpickles(database_url: str, trap: tuple[str, Path]) -> None:
    """A real process: neither a payload nor a result nor what else a worker reports."""
    payload, file = trap
    with serving(DATABASE_URL=database_url) as (_, url, lines):
        statuses = serve_a_call(lambda method, path, **body: ask(method, url + path, **body), payload)

    assert {status // 100 for status in statuses} == {2}
    assert not file.exists()
    assert not any("Traceback" in line for line in lines)


#: What the interpreter's hook was told of since the test began to listen; a hook cannot be taken away again.
FOUND: list[str] = []
LISTENING: list[bool] = []


def listen(event: str, arguments: tuple[Any, ...]) -> None:
    if LISTENING and event == "pickle.find_class":
        FOUND.append(".".join(map(str, arguments)))


@pytest.fixture(scope="module")
def hooked() -> None:
    sys.addaudithook(listen)


@pytest.fixture
def found(hooked: None) -> Iterator[list[str]]:
    """The classes and functions that this process looks up for a pickle during the test."""
    FOUND.clear()
    LISTENING.append(True)
    yield FOUND
    LISTENING.clear()


def test_no_class_is_looked_up_for_a_pickle(database: Database, found: list[str], trap: tuple[str, Path]) -> None:
    """The interpreter's own word: serving a call, the application does not ask for one."""
    payload, file = trap
    with TestClient(create_app(RouterSettings(), database)) as client:
        statuses = serve_a_call(client.request, payload)

    assert {status // 100 for status in statuses} == {2}
    assert found == []
    assert not file.exists()
    pickle.loads(pickle.dumps(Path))
    assert found == [f"pathlib.{Path.__qualname__}"]  # it was listening


def test_the_router_imports_no_pickle_of_its_own() -> None:
    """No file of the router imports it, or what is built on it."""
    files = [file for part in ("app", "migrations") for file in (ROOT / part).rglob("*.py")]

    assert files
    imports = re.compile(r"^\s*(import|from) (cloudpickle|marshal|pickle|shelve)\b", re.MULTILINE)
    assert [str(file) for file in files if imports.search(file.read_text(encoding="utf-8"))] == []
