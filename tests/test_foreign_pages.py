"""Pages of other sites, in a browser of this machine: they neither act through it nor read here (docs/security.md)."""

import httpx
import pytest
from litestar.testing import TestClient

from app.application import create_app
from app.database import Database
from app.settings import RouterSettings
from tests.test_api import CALL, problem

pytestmark = pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
#: A program names no site; a page of ours is of the same origin.
OURS: list[dict[str, str]] = [
    {},
    {"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1:8700"},
    {"Origin": "http://127.0.0.1:8700"},
    {"Sec-Fetch-Site": "none"},
]
FOREIGN: list[dict[str, str]] = [
    {"Origin": "http://elsewhere.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:9999"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:9999"},
]


def ask(
    database: Database, method: str, path: str, headers: dict[str, str], token: str | None = None
) -> httpx.Response:
    settings = RouterSettings(auth_token=token, worker_token=token and "agents")
    headers = {"Host": "127.0.0.1:8700", "Authorization": f"Bearer {token}", **headers}
    with TestClient(create_app(settings, database)) as client:
        return client.request(method, path, headers=headers, json=CALL if method == "POST" else None)


@pytest.mark.parametrize("headers", OURS)
def test_programs_and_own_pages_are_served(database: Database, headers: dict[str, str]) -> None:
    """The call is refused for want of a worker, and for nothing else."""
    assert problem(ask(database, "POST", "/v1/calls", headers)) == "no-workers"


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_page_of_another_site_places_no_call(database: Database, headers: dict[str, str]) -> None:
    """Whatever type it gives the body, and although it may send without asking first."""
    answer = ask(database, "POST", "/v1/calls", headers)

    assert (answer.status_code, problem(answer)) == (403, "foreign-page")


def test_a_link_from_another_site_opens_a_page(database: Database) -> None:
    """Reading changes nothing, and the other site does not see the answer."""
    assert ask(database, "GET", "/", {"Sec-Fetch-Site": "cross-site"}).status_code == 200


@pytest.mark.parametrize("host", ["elsewhere.example", "elsewhere.example:8700", "127.0.0.1.elsewhere.example"])
def test_without_a_token_a_public_name_leads_nowhere(database: Database, host: str) -> None:
    """A site may have its own name lead to this machine, and is then of the same origin."""
    assert problem(ask(database, "GET", "/v1/calls", {"Host": host})) == "foreign-page"
    assert ask(database, "GET", "/v1/calls", {"Host": host}, token="clients").status_code == 200


@pytest.mark.parametrize("host", ["localhost:8700", "[::1]:8700", "router:8700", "router.local", "127.0.0.1"])
def test_local_names_and_addresses_are_its_own(database: Database, host: str) -> None:
    """What no public name server gives cannot be another site's."""
    assert ask(database, "GET", "/v1/calls", {"Host": host}).status_code == 200
