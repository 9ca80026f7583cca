"""Request ids, and what a real router logs: what was asked by which request, and no secret."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from litestar.testing import TestClient
from sqlalchemy import make_url

from app.application import create_app
from app.database import Database
from app.settings import RouterSettings
from readie.errors import ReadieError
from readie.http import read_answer
from tests.conftest import Cluster
from tests.routers import ask, serving

CALL: dict[str, Any] = {"payload": "czNjcmV0LXBheWxvYWQ=", "python": "3.11"}


@pytest.fixture
def client(database: Database) -> Iterator[httpx.Client]:
    """A client of the application."""
    with TestClient(create_app(RouterSettings(), database), raise_server_exceptions=False) as started:
        yield started


@pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
@pytest.mark.parametrize("path", ["/health", "/v1/workers", "/nowhere", "/v1/calls/nonsense"])
def test_the_id_of_a_request_is_in_its_answer(client: httpx.Client, path: str) -> None:
    """Whatever is answered: the id that the client sent."""
    sent = "Ab-1._" + "x" * 122

    assert client.get(path, headers={"X-Request-Id": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
@pytest.mark.parametrize("sent", [None, "", "x" * 129, "a b", "a/b", "ü", "a\tb"])
def test_a_request_without_a_proper_id_gets_one(client: httpx.Client, sent: str | None) -> None:
    """A new one for each request."""
    headers = {} if sent is None else {b"X-Request-Id": sent.encode()}
    given = [client.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)]

    assert [re.fullmatch("[0-9a-f]{32}", each) is not None for each in given] == [True, True]
    assert given[0] != given[1]


def test_a_problem_of_the_router_names_the_request_to_look_for(database: Database) -> None:
    """What the client raises has the id under which the log has the reason."""
    database.close()
    answer = httpx.Response(
        500,
        json={"type": "urn:readie:problem:internal", "title": "Internal error", "instance": "urn:readie:request:abc"},
    )
    with pytest.raises(ReadieError, match=r"Internal error \(urn:readie:request:abc\)"):
        read_answer(answer, dict)


def break_it(database_url: str) -> None:
    """Makes lists of workers and new calls fail inside of the router."""
    with psycopg.connect(database_url.replace("+psycopg", "")) as connection:
        connection.execute("ALTER TABLE call_payloads ADD CONSTRAINT broken CHECK (payload IS NULL) NOT VALID")
        connection.execute("ALTER TABLE sessions RENAME TO elsewhere")


def cut(cluster: Cluster, database_url: str) -> None:
    """Takes a database away from those who use it."""
    name = make_url(database_url).database
    with psycopg.connect(cluster.url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        connection.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", [name])


@pytest.fixture
def with_password(cluster: Cluster) -> Iterator[str]:
    """The URL of a fresh PostgreSQL database, with a password in it."""
    url = cluster.create(cluster.template)
    yield make_url(url).set(password="s3cret-password").render_as_string(hide_password=False)
    cluster.drop(url)


def test_a_log_in_json_is_an_object_a_line_with_the_request(with_password: str) -> None:
    """From the first line to the last, tracebacks too; a line of a request has its id."""
    with serving(DATABASE_URL=with_password, LOG_FORMAT="json") as (process, url, lines):
        break_it(with_password)
        answer = ask("GET", f"{url}/v1/sessions", headers={"X-Request-Id": "find-me"})
        process.terminate()
        process.wait(20)

    logged = [json.loads(line) for line in lines]
    assert {"event", "level", "timestamp"} <= set.intersection(*map(set, logged))
    (entry,) = [each for each in logged if each.get("request_id") == "find-me"]
    assert (answer.status_code, answer.json()["instance"]) == (500, "urn:readie:request:find-me")
    assert (entry["level"], entry["method"], entry["path"]) == ("error", "GET", "/v1/sessions")
    assert "Traceback" in entry["exception"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_nothing_secret_is_logged(with_password: str, cluster: Cluster, log_format: str, tmp_path: Path) -> None:
    """Neither tokens nor payloads nor the database's password, whatever goes wrong, nor are they answered."""
    tokens = {"AUTH_TOKEN": "s3cret-client", "WORKER_TOKEN": "s3cret-agent"}
    as_client = {"Authorization": "Bearer s3cret-client"}
    as_agent = {"Authorization": "Bearer s3cret-agent"}
    status = {"flavor": "cpu", "state": "ready", "python": "3.11.7", "runtime": "fork"}
    (tmp_path / "cpu.json").write_text("{")
    environ = {**tokens, "DATABASE_URL": with_password, "LOG_FORMAT": log_format, "CATALOGUE_DIR": str(tmp_path)}
    with serving(**environ) as (process, url, lines):
        ask("PUT", f"{url}/v1/workers/w", json=status, headers=as_agent)
        break_it(with_password)
        answers = [
            ask("POST", f"{url}/v1/calls", json=CALL, headers=as_client),
            ask("GET", f"{url}/v1/sessions", headers=as_client),
            ask("GET", f"{url}/v1/sessions", headers={"Authorization": "Bearer s3cret-other"}),
            ask("POST", f"{url}/v1/calls", json=CALL | {"payload": "s3cret?"}, headers=as_client),
            ask("POST", f"{url}/v1/sql", json={"query": "SELECT 's3cret-sql' FROM nowhere"}, headers=as_client),
        ]
        cut(cluster, with_password)
        answers.append(ask("GET", f"{url}/v1/workers", headers=as_client))
        process.terminate()
        process.wait(20)

    assert [answer.status_code for answer in answers] == [500, 500, 401, 400, 400, 503]
    said = "".join(lines)
    assert said.count("request failed") == 3
    assert "s3cret" not in said
    assert "czNjcmV0" not in said
    assert b"s3cret-payload".hex() not in said
    assert not any("s3cret-p" in answer.text for answer in answers)
