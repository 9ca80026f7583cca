"""RATE_LIMIT: each address has so many requests within ten seconds on clients' routes, and is told when to come again."""

from collections.abc import Iterator

import httpx
import pytest
from litestar.testing import TestClient

from app.application import create_app
from app.database import Database
from app.settings import RouterSettings
from readie import NoWorkers, RateLimited, client, remote
from tests.routers import serving


@remote
def nothing() -> None:
    pass


@pytest.fixture
def limited(database: Database) -> Iterator[httpx.Client]:
    """A client of an application that takes three requests within ten seconds, and wants a token."""
    settings = RouterSettings(rate_limit=0.3, auth_token="client")
    with TestClient(create_app(settings, database), raise_server_exceptions=False) as started:
        started.headers["Authorization"] = "Bearer client"
        yield started


@pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
def test_what_is_over_the_limit_is_told_when_to_come_again(limited: httpx.Client) -> None:
    """The burst of ten seconds is served; then the answer is a problem with Retry-After."""
    answers = [limited.get("/v1/workers") for _ in range(5)]

    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert answers[3].json()["type"] == "urn:readie:problem:rate-limited"
    assert 1 <= int(answers[3].headers["retry-after"]) <= 10


@pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
def test_requests_without_the_token_count(limited: httpx.Client) -> None:
    """Who guesses tokens is slowed down."""
    headers = {"Authorization": "Bearer guess"}

    assert [limited.get("/v1/workers", headers=headers).status_code for _ in range(4)] == [401, 401, 401, 429]


@pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
def test_agents_and_operators_have_no_limit(limited: httpx.Client) -> None:
    """Agents must report, whatever clients of the same address do."""
    status = {"flavor": "cpu", "state": "ready", "python": "3.11.7", "runtime": "fork"}
    for _ in range(4):
        limited.get("/v1/workers")

    assert [limited.put("/v1/workers/w", json=status).status_code for _ in range(5)] == [204] * 5
    assert [limited.get(path).status_code for path in ("/health", "/ready", "/metrics", "/schema") * 2] == [200] * 8


def test_without_the_setting_there_is_no_limit(database: Database) -> None:
    """As before."""
    with TestClient(create_app(RouterSettings(), database)) as started:
        assert {started.get("/v1/workers").status_code for _ in range(50)} == {200}


def test_each_address_has_its_own_limit() -> None:
    """What one uses up, another one keeps."""
    with serving(RATE_LIMIT="0.1") as (_, url, _):
        answers = []
        for address in ("127.0.0.1", "127.0.0.2"):
            with httpx.Client(transport=httpx.HTTPTransport(local_address=address), base_url=url) as http:
                answers.append([http.get("/v1/workers").status_code for _ in range(2)])

    assert answers == [[200, 429], [200, 429]]


def test_the_client_waits_until_it_may_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was put off was not placed: it is sent again. Out of patience, the client says what happened."""
    with serving(RATE_LIMIT="0.1") as (_, url, _):
        monkeypatch.setenv("ROUTER_URL", url)
        for _ in range(2):
            with pytest.raises(NoWorkers):
                nothing()
        monkeypatch.setattr(client, "RATE_SECONDS", 0.0)
        with pytest.raises(RateLimited, match="1 requests came within 10 seconds"):
            nothing()
