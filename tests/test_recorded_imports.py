"""What calls were recorded to import, told by the router and taken for a corpus (DESIGN §9)."""

import json
import shlex
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar.testing import TestClient
from sqlalchemy import text
from typer.testing import CliRunner

from app.application import create_app
from app.database import Database
from app.settings import RouterSettings
from pipeline import recorded
from pipeline.cli import app as pipeline
from pipeline.corpus import ImportSet, read_corpus
from readie.errors import Unauthorized
from tests.pages import read_blocks
from tests.routers import serving

CALL: dict[str, Any] = {"payload": "", "python": "3.11"}
STATUS: dict[str, Any] = {"flavor": "cpu", "state": "ready", "python": "3.11.7", "runtime": "fork"}
ROUTE = "/v1/calls/imports"


@pytest.fixture
def client(database: Database) -> Iterator[httpx.Client]:
    """A client of the application, with a worker of each flavor."""
    with TestClient(create_app(RouterSettings(), database), raise_server_exceptions=False) as started:
        for flavor in ("cpu", "gpu"):
            assert started.put(f"/v1/workers/{flavor}", json=STATUS | {"flavor": flavor}).status_code == 204
        yield started


def place(client: httpx.Client, *modules: str, **changes: Any) -> None:
    answer = client.post("/v1/calls", json=CALL | {"modules": modules} | changes)
    assert answer.status_code == 201, answer.text


def sets(client: httpx.Client, **parameters: Any) -> list[tuple[list[str], int]]:
    answer = client.get(ROUTE, params=parameters)
    assert answer.status_code == 200, answer.text
    return [(one["modules"], one["calls"]) for one in answer.json()["sets"]]


def test_module_sets_are_counted(client: httpx.Client) -> None:
    """Whatever the order and repeats in a call, one set is one; calls without modules have none."""
    assert client.get(ROUTE).json() == {"until": None, "sets": []}
    for modules in (["b", "a.b", "B"], ["B", "b", "a.b", "b"], ["numpy"], ["numpy"], ["numpy"], ["größe", "a"], []):
        place(client, *modules)
    place(client, "zarr", cold=True)

    assert sets(client) == [(["numpy"], 3), (["B", "a.b", "b"], 2), (["a", "größe"], 1), (["zarr"], 1)]


def test_later_calls_of_a_session_are_not_counted(client: httpx.Client) -> None:
    """A checkpoint would be of no use to them."""
    for modules in ("numpy", "pandas"):
        answer = client.post("/v1/calls", json=CALL | {"modules": [modules], "session_id": "s"})
        placement_id = answer.json()["placement"]["placement_id"]
        assert client.put(f"/v1/placements/{placement_id}/result", json={"outcome": "returned"}).status_code == 200

    assert sets(client) == [(["numpy"], 1)]


def test_pages_of_one_moment_are_one_list(client: httpx.Client) -> None:
    """What is placed while somebody reads does not move the later pages."""
    for number in range(5):
        place(client, f"m{number}")
    first = client.get(ROUTE, params={"limit": 2}).json()
    for number in (4, 4, 9):
        place(client, f"m{number}")
    later = [sets(client, limit=2, offset=offset, until=first["until"]) for offset in (2, 4, 6)]

    assert [one["modules"] for one in first["sets"]] == [["m0"], ["m1"]]
    assert later == [[(["m2"], 1), (["m3"], 1)], [(["m4"], 1)], []]


def test_span_and_flavor_choose_calls(client: httpx.Client, database: Database) -> None:
    """`since` leaves out what was placed then or earlier, `until` what was placed later, `flavor` other workers'."""
    place(client, "old")
    with database.transaction() as connection:
        connection.execute(text("UPDATE calls SET created_at = created_at - INTERVAL '1 day'"))
        old = connection.execute(text("SELECT created_at FROM calls")).scalar_one()
    place(client, "new")
    place(client, "tensors", gpu=True)

    def at(moment: datetime) -> str:
        return moment.isoformat()

    assert sets(client, until=at(old)) == [(["old"], 1)]
    assert sets(client, since=at(old)) == [(["new"], 1), (["tensors"], 1)]
    assert sets(client, since=at(old - timedelta(seconds=1)), flavor="cpu") == [(["new"], 1), (["old"], 1)]
    assert sets(client, flavor="gpu") == [(["tensors"], 1)]


@pytest.mark.parametrize(
    "parameters",
    [
        {"since": "yesterday"},
        {"until": "2026-11-30T12:00:00"},
        {"flavor": "tpu"},
        {"limit": "0"},
        {"limit": "10001"},
        {"offset": "-1"},
    ],
)
def test_bad_parameters_are_refused(client: httpx.Client, parameters: dict[str, str]) -> None:
    """Each with a problem document that names it."""
    answer = client.get(ROUTE, params=parameters)

    assert answer.status_code in {400, 422}
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real router that has recorded four calls, three of them for modules to plan for."""
    file = tmp_path_factory.mktemp("router") / "readie.duckdb"
    with serving(DATABASE_URL=f"duckdb:///{file}", AUTH_TOKEN="secret", WORKER_TOKEN="other") as (_, url, _):
        with httpx.Client(base_url=url, trust_env=False, headers={"Authorization": "Bearer secret"}) as client:
            headers = {"Authorization": "Bearer other"}
            assert client.put("/v1/workers/w", json=STATUS, headers=headers).status_code == 204
            for modules in (
                ["zarr", "numpy.linalg"],
                ["zarr", "numpy.linalg"],
                ["torch", "json", "not a name"],
                ["os"],
            ):
                place(client, *modules)
        yield url


def test_a_corpus_is_taken_from_a_router_that_serves(
    router: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its token: recorded sets and example code are one corpus; a wrong token is named."""
    monkeypatch.delenv("AUTH_TOKEN", raising=False)
    example = tmp_path / "example.py"
    example.write_text("import zarr\nimport numpy.linalg\n")
    arguments = ["corpus", "--from-router", router, "--out", str(tmp_path / "out"), str(example), "--json"]
    refused = CliRunner().invoke(pipeline, arguments)
    monkeypatch.setenv("AUTH_TOKEN", "secret")
    taken = CliRunner().invoke(pipeline, arguments)

    assert httpx.get(router + ROUTE, trust_env=False).status_code == 401
    assert isinstance(refused.exception, Unauthorized)
    assert taken.exit_code == 0, taken.output
    assert json.loads(taken.stdout)["recorded_calls"] == 3
    expected = [ImportSet(("numpy.linalg", "zarr"), 3, (str(example),)), ImportSet(("torch",), 1)]
    assert read_corpus(tmp_path / "out" / "corpus.jsonl") == expected


@pytest.mark.parametrize("size", [1, 2])
def test_a_corpus_of_several_pages_has_all_of_them(router: str, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Of a router that sends one or two sets at a time, each is taken once."""
    monkeypatch.setenv("AUTH_TOKEN", "secret")
    monkeypatch.setattr(recorded, "PAGE", size)

    assert recorded.fetch_recorded(router) == [ImportSet(("numpy.linalg", "zarr"), 2), ImportSet(("torch",), 1)]


def test_each_command_of_the_page_collects_a_corpus(
    router: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block of docs/corpus.md, line by line; its routers are the one that serves here, its date is past."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIPELINE_OUT", raising=False)
    monkeypatch.setenv("AUTH_TOKEN", "secret")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "one.py").write_text("import h5py\n")
    (tmp_path / "notebooks").mkdir()
    cell: dict[str, Any] = {
        "cell_type": "code",
        "source": "import polars",
        "metadata": {},
        "outputs": [],
        "execution_count": None,
    }
    notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    (tmp_path / "notebooks" / "first.ipynb").write_text(json.dumps(notebook))
    block = read_blocks(Path(__file__).parents[1] / "docs" / "corpus.md")[0].text
    found = []
    for line in block.splitlines():
        program, *words = shlex.split(line, comments=True)
        instead = {"https://router.example.org": router, "http://127.0.0.1:8700": router, "2026-11-01": "2000-01-01"}
        done = CliRunner().invoke(pipeline, [instead.get(word, word) for word in words])
        assert (program, done.exit_code) == ("readie-pipeline", 0), done.output
        found.append({one.modules for one in read_corpus(tmp_path / "generation" / "corpus.jsonl")})

    calls = {("numpy.linalg", "zarr"), ("torch",)}
    assert found == [{("h5py",), ("polars",)}, calls, {("h5py",)} | calls]
