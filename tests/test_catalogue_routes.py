"""Catalogues over the API (DESIGN §7, §8): a document comes in whole or changes nothing; earlier ones come back."""

import hashlib
import json
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar.testing import TestClient

from app.application import create_app
from app.database import Database
from app.settings import RouterSettings
from readie.settings import Bytes
from tests.catalogues import make_checkpoint, make_document, make_item, make_worked_example
from tests.routers import ask, serving

LIMIT = 100_000
WORKER: dict[str, Any] = {"flavor": "cpu", "state": "ready", "python": "3.11.7", "runtime": "fork"}


@pytest.fixture
def waiting_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def client(database: Database, waiting_room: Path) -> Iterator[httpx.Client]:
    """A client of a router that takes small documents only, and keeps none of them."""
    settings = RouterSettings(max_catalogue=Bytes(LIMIT))
    with TestClient(create_app(settings, database), raise_server_exceptions=False) as started:
        yield started
    assert list(waiting_room.iterdir()) == []


def send(client: httpx.Client, document: Any, **options: Any) -> httpx.Response:
    """Posts a document: an object, or bytes as they are."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return client.post("/v1/catalogues", content=body, **options)


def imported(client: httpx.Client, document: Any) -> dict[str, Any]:
    answer = send(client, document)
    assert answer.status_code == 201, answer.text
    summary: dict[str, Any] = answer.json()
    return summary


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].removeprefix("urn:readie:problem:")


def summaries(client: httpx.Client) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = client.get("/v1/catalogues").json()
    return listed


class TestImport:
    """`POST /v1/catalogues`: the document is the body; it is active afterwards, or nothing has changed."""

    def test_the_answer_describes_the_active_catalogue(self, client: httpx.Client) -> None:
        """Its summary, as in the list, with what was ignored and dropped in the document."""
        document = make_worked_example() | {"extra": 1}
        answer = imported(client, document)
        warnings = answer.pop("warnings")

        assert summaries(client) == [answer]
        assert (answer["active"], answer["items"], answer["checkpoints"], answer["flavor"]) == (True, 3, 3, "cpu")
        assert answer["sha256"] == hashlib.sha256(json.dumps(document).encode()).hexdigest()
        assert warnings == ["the body: ignored unknown keys: extra (1×)"]

    def test_the_flavor_is_the_documents(self, client: httpx.Client) -> None:
        """Each flavor has its own active catalogue."""
        imported(client, make_worked_example())
        imported(client, make_worked_example(flavor="gpu"))

        assert [(each["flavor"], each["active"]) for each in summaries(client)] == [("cpu", True), ("gpu", True)]

    def test_one_that_is_there_is_only_activated(self, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is not read again."""
        first = imported(client, make_worked_example())
        imported(client, make_worked_example(alpha=0.02))
        monkeypatch.setattr("app.catalogue.read_document", None)
        again = imported(client, make_worked_example())

        assert again == first
        assert client.get("/v1/catalogues/cpu").json()["sha256"] == first["sha256"]

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (b"", "the body: the file is empty"),
            (b"{", "not JSON at byte 1"),
            (b"[]", "the body: the document is a list"),
            (b'{"version": 1}', "the body: version is 1: must be the integer 2"),
            (json.dumps(make_worked_example())[:-40].encode(), "the body: checkpoints"),
            (json.dumps(make_worked_example(alpha=-1)).encode(), "the body: alpha is -1: must be a number above 0"),
            (json.dumps(make_worked_example(flavor="tpu")).encode(), 'the body: flavor is "tpu": must be cpu or gpu'),
            (json.dumps(make_worked_example()).replace('"numpy"', '"\\ud800"').encode(), "lone surrogate"),
            (json.dumps(make_worked_example()).encode().replace(b"torch", b"\xff"), "invalid bytes in UTF8 string"),
        ],
    )
    def test_a_bad_document_changes_nothing(self, client: httpx.Client, body: bytes, message: str) -> None:
        """The problem names the place, the value and the rule; the earlier catalogue is still active."""
        imported(client, make_worked_example(alpha=0.02))
        before = summaries(client)
        answer = send(client, body)

        assert problem(answer) == (422, "bad-document")
        assert message in answer.json()["detail"]
        assert summaries(client) == before

    @pytest.mark.parametrize("chunked", [False, True])
    def test_a_document_above_the_limit_is_refused(self, client: httpx.Client, chunked: bool) -> None:
        """MAX_CATALOGUE is the limit, whether or not the length is said beforehand."""
        document = json.dumps(make_worked_example()).encode()
        fitting = document + b" " * (LIMIT - len(document))
        pieces = (b" " * 1000 for _ in range(LIMIT // 1000 + 1))
        answer = client.post("/v1/catalogues", content=pieces if chunked else fitting + b" ")

        assert problem(answer) == (413, "payload-too-large")
        assert "MAX_CATALOGUE" in answer.json()["detail"]
        assert summaries(client) == []
        imported(client, fitting)

    def test_one_that_is_not_what_was_to_be_sent_is_refused(self, client: httpx.Client) -> None:
        """The SHA-256 that a client may name is that of the body."""
        body = json.dumps(make_worked_example()).encode()
        refused = send(client, body, params={"sha256": "0" * 64})
        assert problem(refused) == (422, "bad-document")
        assert problem(send(client, body, params={"sha256": "short"})) == (400, "bad-request")
        assert summaries(client) == []
        assert send(client, body, params={"sha256": hashlib.sha256(body).hexdigest()}).status_code == 201

    def test_without_room_for_it_the_router_says_so(
        self, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A folder of temporary files that is gone is no fault of the document."""
        with monkeypatch.context() as patched:
            patched.setattr(tempfile, "tempdir", "/nowhere")
            answer = send(client, make_worked_example())

        assert problem(answer) == (503, "unavailable")
        assert "TMPDIR" in answer.json()["way_out"]

    def test_earlier_ones_are_dropped(self, client: httpx.Client) -> None:
        """The active one and the last two stay; one whose generation a worker holds, too."""
        documents = [make_document({}, [make_checkpoint(f"checkpoint_{number}")]) for number in range(6)]
        first = imported(client, documents[0])
        held = {"generation": first["generation"], "checkpoint_ids": ["checkpoint_0"]}
        assert client.put("/v1/workers/w", json=WORKER | {"generations": [held]}).status_code == 204
        kept = [imported(client, document)["sha256"] for document in documents[1:]][-3:]

        assert [each["sha256"] for each in summaries(client)] == [*reversed(kept), first["sha256"]]


class TestActivate:
    """`POST /v1/catalogues/{flavor}/activate`: any imported catalogue of that flavor, by its SHA-256."""

    def test_an_earlier_one_comes_back(self, client: httpx.Client) -> None:
        """And the later one after it: what explains prices changes with it."""
        cheap, dear = (imported(client, make_worked_example(alpha=alpha)) for alpha in (0.006, 0.02))
        for wanted, best in [(cheap, "B"), (dear, "A"), (cheap, "B")]:
            answer = client.post("/v1/catalogues/cpu/activate", json={"sha256": wanted["sha256"]})
            assert (answer.status_code, answer.json()["sha256"]) == (200, wanted["sha256"])
            assert answer.json() == client.get("/v1/catalogues/cpu").json()
            explained = client.post("/v1/explain", json={"modules": ["pandas"]}).json()
            assert (explained["catalogue"], explained["options"][0]["checkpoint_id"]) == (wanted["sha256"], best)

    @pytest.mark.parametrize(
        ("flavor", "body", "wanted", "message"),
        [
            ("cpu", {"sha256": "0" * 64}, (404, "unknown-catalogue"), f"no catalogue {'0' * 64} is imported"),
            ("gpu", {}, (404, "unknown-catalogue"), "is of flavor cpu, not gpu"),
            ("tpu", {}, (400, "bad-flavor"), "'tpu' is not a flavor"),
            ("cpu", {"sha256": "short"}, (400, "bad-request"), "sha256"),
            ("cpu", {"sha256": None}, (400, "bad-request"), "sha256"),
            ("cpu", {"generation": "0" * 64}, (400, "bad-request"), "generation"),
        ],
    )
    def test_others_are_refused(
        self, client: httpx.Client, flavor: str, body: dict[str, Any], wanted: tuple[int, str], message: str
    ) -> None:
        """Each with its reason; what was active stays so."""
        imported(client, make_worked_example(alpha=0.02))
        sha256 = imported(client, make_worked_example())["sha256"]
        before = summaries(client)
        answer = client.post(f"/v1/catalogues/{flavor}/activate", json={"sha256": sha256} | body)

        assert problem(answer) == wanted
        assert message in answer.json()["detail"]
        assert summaries(client) == before


class TestRepricing:
    """Another alpha, new measurements: a new catalogue of the same generation. The workers' checkpoints stay good."""

    def test_what_a_worker_holds_is_chosen_by_the_new_price(self, client: httpx.Client) -> None:
        """The worker reported its checkpoints once, before."""
        documents = [make_worked_example(alpha=0.006), make_worked_example(alpha=0.02)]
        documents.append({**documents[1], "items": documents[1]["items"] | {"pandas": make_item(5.0, ["numpy"])}})
        first = imported(client, documents[0])
        held = {"generation": first["generation"], "checkpoint_ids": ["A", "B", "C"]}
        assert client.put("/v1/workers/w", json=WORKER | {"generations": [held]}).status_code == 204
        chosen = []
        for document in documents:
            assert imported(client, document)["generation"] == first["generation"]
            call = {"payload": "", "python": "3.11", "modules": ["pandas"]}
            placement = client.post("/v1/calls", json=call).json()["placement"]
            assert placement["generation"] == first["generation"]
            chosen.append((placement["checkpoint_id"], placement["cost"]))

        assert chosen == [("B", 0.48), ("A", 0.64), ("B", 1.6)]
        assert len(summaries(client)) == 3

    def test_other_checkpoints_are_another_generation(self, client: httpx.Client) -> None:
        """A worker that holds the old ones only goes on with the catalogue that prices those."""
        first = imported(client, make_worked_example())
        held = {"generation": first["generation"], "checkpoint_ids": ["A", "B", "C"]}
        assert client.put("/v1/workers/w", json=WORKER | {"generations": [held]}).status_code == 204
        document = make_worked_example()
        document["checkpoints"].append(make_checkpoint("D", ["numpy"], 1))
        assert imported(client, document)["generation"] != first["generation"]
        call = {"payload": "", "python": "3.11", "modules": ["pandas"]}
        placement = client.post("/v1/calls", json=call).json()["placement"]

        assert (placement["generation"], placement["checkpoint_id"]) == (first["generation"], "B")


# ---- a real process ----


@pytest.fixture
def url(duckdb_template: Path, tmp_path: Path) -> str:
    """A DuckDB file with the schema in it."""
    return f"duckdb:///{shutil.copyfile(duckdb_template, tmp_path / 'readie.duckdb')}"


def most_memory(pid: int) -> int:
    """The most memory that a process has had, in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024 // 10**6


def test_a_body_is_not_held_in_memory(url: str) -> None:
    """200 MB of a document, most of it blanks: the process grows by far less."""
    document = json.dumps(make_worked_example()).encode()
    blanks = b" " * 10**6
    with serving(DATABASE_URL=url) as (process, router, _):
        # What reading documents needs is imported with the first one.
        assert ask("POST", f"{router}/v1/catalogues", content=document).status_code == 201
        before = most_memory(process.pid)
        pieces = iter([*[blanks] * 200, document])
        assert ask("POST", f"{router}/v1/catalogues", content=pieces).status_code == 201

        assert most_memory(process.pid) - before < 80


def test_a_client_that_hangs_up_leaves_nothing(url: str, tmp_path: Path) -> None:
    """Half a document, then the end: no catalogue, no file."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    document = json.dumps(make_worked_example()).encode()
    with serving(DATABASE_URL=url, TMPDIR=str(folder)) as (_, router, lines):
        with socket.create_connection(("127.0.0.1", int(router.rpartition(":")[2]))) as connection:
            head = f"POST /v1/catalogues HTTP/1.1\r\nHost: router\r\nContent-Length: {len(document)}\r\n\r\n"
            connection.sendall(head.encode() + document[:-1])
            wait_until(lambda: any(folder.iterdir()))
        wait_until(lambda: not any(folder.iterdir()))

        assert ask("GET", f"{router}/v1/catalogues").json() == []
        assert not any("Traceback" in line for line in lines)


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
