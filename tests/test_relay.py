"""Wake-ups across routers: what is written by one wakes the long polls of another."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest
from litestar.testing import TestClient
from sqlalchemy import text

import app.database
from app import relay, waiting
from app.application import create_app
from app.database import Database, open_database
from app.settings import RouterSettings
from tests.test_api import CALL, RESULT, STATUS

pytestmark = pytest.mark.parametrize("kind", ["postgresql"], indirect=True)


@pytest.fixture
def routers(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[httpx.Client]]:
    """Two routers over one database, which look into it only when they are woken."""
    monkeypatch.setattr(waiting, "DATABASE_POLL", 600.0)
    with ExitStack() as stack:
        databases = [open_database(database_url) for _ in range(2)]
        for each in databases:
            stack.callback(each.close)
        yield [stack.enter_context(TestClient(create_app(RouterSettings(), each))) for each in databases]


@pytest.fixture
def later() -> Iterator[Callable[..., "Future[Any]"]]:
    """Runs something in a thread."""
    with ThreadPoolExecutor() as threads:

        def start(action: Callable[[], Any]) -> "Future[Any]":
            future = threads.submit(action)
            time.sleep(0.5)  # until it waits, or nearly: what it would find at once proves less, and nothing wrong
            return future

        yield start


def test_a_placement_by_one_router_wakes_the_agent_that_polls_another(
    routers: list[httpx.Client], later: Callable[..., "Future[Any]"]
) -> None:
    """And the result that is sent to that one wakes the client of the first."""
    here, there = routers
    there.put("/v1/workers/w", json=STATUS)
    polling = later(lambda: there.get("/v1/workers/w/placements", params={"wait": 30}).json())
    placed = here.post("/v1/calls", json=CALL).json()
    (order,) = polling.result(20)["run"]
    assert order["call_id"] == placed["call_id"]

    reading = later(lambda: here.get(f"/v1/calls/{placed['call_id']}", params={"wait": 30}).json())
    there.post(f"/v1/placements/{order['placement_id']}/accept", params={"worker_id": "w"})
    there.put(f"/v1/placements/{order['placement_id']}/result", json=RESULT)

    assert reading.result(20)["state"] == "finished"


def test_a_worker_that_reports_to_one_router_has_room_for_a_call_that_waits_at_another(
    routers: list[httpx.Client], later: Callable[..., "Future[Any]"]
) -> None:
    """Who waits for room is woken wherever room is told of."""
    here, there = routers
    waiting_call = later(lambda: here.post("/v1/calls", json=CALL | {"queue_timeout": 30}))
    there.put("/v1/workers/w", json=STATUS)

    assert waiting_call.result(20).status_code == 201


def test_a_router_whose_connection_is_cut_hears_again(
    routers: list[httpx.Client], later: Callable[..., "Future[Any]"], database: Database
) -> None:
    """What was told meanwhile it looks up when it is back."""
    here, there = routers
    there.put("/v1/workers/w", json=STATUS)
    polling = later(lambda: there.get("/v1/workers/w/placements", params={"wait": 50}).json())
    with database.transaction() as connection:
        query = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        cut = connection.execute(text(f"{query} AND datname = current_database()")).all()
    assert len(cut) >= 2
    placed = here.post("/v1/calls", json=CALL).json()

    assert [order["call_id"] for order in polling.result(40)["run"]] == [placed["call_id"]]


def test_the_url_may_have_options_of_its_own(database_url: str) -> None:
    """Such as how long a connection may take."""
    database = open_database(f"{database_url}&connect_timeout=5")
    notices = database.notices()
    heard = [next(notices)]
    database.notify(["told"])
    heard.append(next(notice for notice in notices if notice))
    notices.close()  # type: ignore[attr-defined]
    database.close()

    assert heard == [None, "told"]


def test_notices_fit(kind: str) -> None:
    """PostgreSQL carries less than 8,000 bytes; every topic is told, with who tells it."""
    topics = dict.fromkeys(f"worker:{'w' * 100}{number}" for number in range(200))
    notices = list(relay._notices("me", topics))

    assert max(map(len, notices)) < relay.MOST_BYTES + 130
    assert [notice.split("\n")[0] for notice in notices] == ["me"] * len(notices)
    assert [topic for notice in notices for topic in notice.split("\n")[1:]] == list(topics)


def test_it_ends_without_waiting_to_hear_of_another(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that stops tells itself, and waits for nothing else."""
    monkeypatch.setattr(app.database, "LISTEN_SECONDS", 600.0)
    monkeypatch.setattr(relay, "STOP_SECONDS", 30.0)
    with closing(open_database(database_url)) as database, relay.relaying(database, waiting.WakeUps()):
        listening = [thread for thread in threading.enumerate() if thread.name in ("hear", "tell")]
        time.sleep(0.3)  # until it listens

    assert len(listening) == 2
    assert not any(thread.is_alive() for thread in listening)
