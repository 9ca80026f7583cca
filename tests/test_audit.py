"""The audit log: administrative requests, those that were refused too, in the database and in the log."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from litestar.testing import TestClient
from sqlalchemy import create_engine, text
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from app.application import create_app
from app.database import Database
from app.liveness import prune
from app.query import run_query
from app.requests import MOST_REFUSED
from app.settings import RouterSettings
from readie.wire import SqlRequest
from tests.catalogues import make_worked_example

Asked = tuple[str, str, dict[str, Any], str, int]  # method, path, body, action, status

ADMINISTRATIVE: list[Asked] = [
    ("POST", "/v1/catalogues", make_worked_example(), "importCatalogue", 201),
    ("POST", "/v1/catalogues", {}, "importCatalogue", 422),
    ("POST", "/v1/catalogues/cpu/activate", {"sha256": "0" * 64}, "activateCatalogue", 404),
    ("DELETE", "/v1/calls/nonsense", {}, "cancelCall", 404),
    ("DELETE", "/v1/sessions/s", {}, "endSession", 404),
    ("POST", "/v1/sql", {"query": "SELECT * FROM audit_log"}, "runSql", 200),
]


@pytest.fixture
def client(database: Database) -> Iterator[httpx.Client]:
    """A client of the application, which has the token."""
    settings = RouterSettings(auth_token="client", worker_token="agent", sweep_interval=3600)
    with TestClient(create_app(settings, database), raise_server_exceptions=False) as started:
        started.headers["Authorization"] = "Bearer client"
        yield started


def audit_log(database: Database) -> list[tuple[Any, ...]]:
    """The audit log as people ask for it, the oldest first; without the times."""
    query = "SELECT request_id, address, action, target, status FROM audit_log ORDER BY asked_at"
    return [tuple(row) for row in run_query(database, SqlRequest(query=query)).rows]


@pytest.mark.parametrize("asked", ADMINISTRATIVE)
def test_an_administrative_request_is_written_down(client: httpx.Client, database: Database, asked: Asked) -> None:
    """Who asked for what, and how it was answered; the log has the same."""
    method, path, body, action, status = asked
    with capture_logs([merge_contextvars]) as logged:
        answer = client.request(method, path, json=body, headers={"X-Request-Id": "mine"})

    assert answer.status_code == status, answer.text
    assert audit_log(database) == [("mine", "testclient", action, path, status)]
    (line,) = [each for each in logged if each["event"] == "administrative request"]
    assert (line["request_id"], line["address"], line["action"], line["target"], line["status"]) == (
        ("mine", "testclient", action, path, status)
    )


@pytest.mark.parametrize("asked", ADMINISTRATIVE)
def test_a_request_without_the_token_is_written_down(client: httpx.Client, database: Database, asked: Asked) -> None:
    """It was refused, and that is what the row says."""
    method, path, body, action, _ = asked
    answer = client.request(method, path, json=body, headers={"Authorization": "Bearer secret"})

    assert answer.status_code == 401
    (row,) = audit_log(database)
    assert row[2:] == (action, path, 401)


def test_a_flood_of_requests_without_the_token_does_not_fill_the_database(
    client: httpx.Client, database: Database
) -> None:
    """Sixty a minute are rows, all are in the log; who has the token is written down all the same."""
    with capture_logs() as logged:
        for _ in range(MOST_REFUSED + 5):
            client.delete("/v1/sessions/s", headers={"Authorization": "Bearer secret"})
    client.delete("/v1/sessions/mine")

    assert len([each for each in logged if each["event"] == "administrative request"]) == MOST_REFUSED + 5
    rows = audit_log(database)
    assert [row[4] for row in rows] == [401] * MOST_REFUSED + [404]
    assert rows[-1][3] == "/v1/sessions/mine"


def test_what_administers_nothing_is_not_written_down(client: httpx.Client, database: Database) -> None:
    """Calls and lists leave no row, whatever becomes of them."""
    for method, path in [("POST", "/v1/calls"), ("GET", "/v1/calls"), ("GET", "/v1/catalogues"), ("GET", "/nowhere")]:
        client.request(method, path)

    assert audit_log(database) == []


def test_an_id_that_was_used_before_keeps_no_row_out(client: httpx.Client, database: Database) -> None:
    """A client may send what it likes as the id of its request."""
    for session_id in ("a", "b"):
        client.delete(f"/v1/sessions/{session_id}", headers={"X-Request-Id": "same"})

    assert [(row[0], row[3]) for row in audit_log(database)] == [
        ("same", "/v1/sessions/a"),
        ("same", "/v1/sessions/b"),
    ]


def test_a_target_is_kept_as_it_was_sent_and_no_longer_than_need_be(client: httpx.Client, database: Database) -> None:
    """Percent-encoded, without the query, its first 1,024 characters."""
    client.delete("/v1/sessions/a%20b%C3?secret=1")
    client.delete("/v1/sessions/" + "x" * 3000)

    targets = [row[3] for row in audit_log(database)]
    assert targets == ["/v1/sessions/a%20b%C3", f"/v1/sessions/{'x' * 1011}"]


def test_rows_are_kept_for_ninety_days(client: httpx.Client, database: Database) -> None:
    """Then they are dropped."""
    for days in (89, 91):
        client.delete(f"/v1/sessions/{days}")
        with database.transaction() as connection:
            age = text(f"UPDATE audit SET asked_at = now() - INTERVAL '{days} days' WHERE target LIKE '%{days}'")
            connection.execute(age)
    prune(database, RouterSettings())

    assert [row[3] for row in audit_log(database)] == ["/v1/sessions/89"]


def test_while_the_database_is_away_the_log_has_it() -> None:
    """The request is answered as it would be, and a line says that the row is missing."""
    away = Database(create_engine("postgresql+psycopg://user:secret@127.0.0.1:1/readie"))
    with TestClient(create_app(RouterSettings(), away)) as client, capture_logs() as logged:
        answer = client.delete("/v1/sessions/s")

    assert answer.status_code == 503
    told = ["request failed", "administrative request", "the audit log was not written"]
    # Sweeps and routers that listen find the database away, too, sooner or later.
    assert [each["event"] for each in logged if each["event"] in told] == told
    assert "secret" not in json.dumps(logged, default=str)
