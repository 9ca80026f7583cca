"""Keys of calls: a call that is sent again under its key is placed once."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from litestar.testing import TestClient
from sqlalchemy import text

from app.api.calls import place_together
from app.application import create_app
from app.database import Database
from app.keys import Asked
from app.liveness import prune
from app.settings import RouterSettings
from readie.errors import KeyReused, NoWorkers
from readie.wire import CallPlaced, CallRequest
from tests.test_api import CALL, STATUS, problem
from tests.test_lease import report

SETTINGS = RouterSettings()


@pytest.fixture
def client(database: Database) -> Iterator[httpx.Client]:
    with TestClient(create_app(SETTINGS, database), raise_server_exceptions=False) as started:
        yield started


def asked(call_id: str, key: str | None = "k", **changes: Any) -> Asked:
    return Asked(call_id=call_id, request=CallRequest(payload=b"function", python="3.11", **changes), key=key)


def place(database: Database, *calls: Asked) -> list[Any]:
    """The ids of the calls that were placed, or why one was not."""
    answers = place_together(database, SETTINGS, calls)
    return [each.call_id if isinstance(each, CallPlaced) else type(each) for each in answers]


def count(database: Database, table: str) -> int:
    with database.reading() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())


def test_the_answer_is_that_of_the_first_time(client: httpx.Client, database: Database) -> None:
    """Skipped and unmatched packages and modules too, whichever way the request is encoded."""
    assert client.put("/v1/workers/w", json=STATUS).status_code == 204
    call = CALL | {"modules": ["no.such.module"], "packages": ["numpy"]}
    first = client.post("/v1/calls", json=call, headers={"Idempotency-Key": "k"})
    again = client.post("/v1/calls", json=dict(reversed(call.items())), headers={"Idempotency-Key": "k"})

    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    assert count(database, "leases") == 1


def test_another_call_with_the_same_key_is_refused(client: httpx.Client, database: Database) -> None:
    """It says that the key is in use, and places nothing."""
    assert client.put("/v1/workers/w", json=STATUS).status_code == 204
    client.post("/v1/calls", json=CALL, headers={"Idempotency-Key": "k"})
    refused = client.post("/v1/calls", json=CALL | {"function": "other"}, headers={"Idempotency-Key": "k"})

    assert problem(refused) == "key-reused"
    assert count(database, "calls") == 1


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "ä"], ids=["empty", "a space", "long", "not ASCII"])
def test_a_key_is_up_to_255_visible_characters(client: httpx.Client, key: str) -> None:
    """Anything else is refused before a call is placed."""
    assert problem(client.post("/v1/calls", json=CALL, headers={b"Idempotency-Key": key.encode()})) == "bad-request"


def test_calls_without_a_key_are_different_calls(database: Database) -> None:
    """However much they are alike."""
    report(database)

    assert place(database, asked("a", None), asked("b", None)) == ["a", "b"]


def test_of_calls_that_arrive_together_with_one_key_the_first_is_placed(database: Database) -> None:
    """Those that follow are answered as it was; one that is another call is refused."""
    report(database)

    assert place(database, asked("a"), asked("b"), asked("c", function="f")) == ["a", "a", KeyReused]
    assert count(database, "leases") == 1


def test_a_refusal_is_not_remembered(database: Database) -> None:
    """Nothing was placed: the call may be sent again, and is placed then."""
    assert place(database, asked("a"), asked("b")) == [NoWorkers, NoWorkers]
    report(database)

    assert place(database, asked("c")) == ["c"]


def test_routers_that_get_the_same_call_at_once_place_it_once(database: Database) -> None:
    """Whoever is first has the lock until its key is written."""
    report(database)
    together = threading.Barrier(4)

    def send(number: int) -> Any:
        together.wait()
        return place(database, asked(str(number)))

    with ThreadPoolExecutor(4) as threads:
        answers = [each for (each,) in threads.map(send, range(4))]

    assert len(set(answers)) == 1
    assert count(database, "calls") == 1


@pytest.mark.parametrize(("ago", "kept"), [("23 hours", 1), ("25 hours", 0)])
def test_a_key_is_remembered_for_a_day(database: Database, ago: str, kept: int) -> None:
    """After that its call is a new one."""
    report(database)
    place(database, asked("a"))
    with database.transaction() as connection:
        connection.execute(text(f"UPDATE call_keys SET created_at = now() - INTERVAL '{ago}'"))
    prune(database, SETTINGS)

    assert count(database, "call_keys") == kept


def test_a_call_that_waits_for_its_turn_waits_no_more_when_its_key_is_answered(
    client: httpx.Client, database: Database
) -> None:
    """Its place in the session's line is free at once."""
    assert client.put("/v1/workers/w", json=STATUS).status_code == 204
    for _ in range(2):
        answer = client.post("/v1/calls", json=CALL | {"session_id": "s"}, headers={"Idempotency-Key": "k"})
        assert answer.status_code == 201

    assert count(database, "session_waits") == 0
