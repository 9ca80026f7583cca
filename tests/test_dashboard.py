"""The dashboard (DESIGN §7): what its pages say, who may see them, and that they are safe whatever is in the tables."""

import asyncio
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psycopg
import pytest
from litestar.testing import TestClient
from psycopg import sql
from sqlalchemy import event, make_url, text

from app.application import create_app
from app.catalogue import import_catalogue
from app.dashboard.catalogue import read_savings
from app.dashboard.charts import plot, slope_of, stack, ticks
from app.dashboard.cluster import ClusterWatch
from app.dashboard.explain import find_modules
from app.dashboard.render import HEADERS, STATIC, static_url
from app.dashboard.sign_in import COOKIE, LIFETIME, make_pass
from app.dashboard.sql import list_questions, write_csv
from app.database import Database, migrate, open_database
from app.liveness import report_status
from app.query import run_query
from app.settings import RouterSettings
from app.waiting import WakeUps
from readie.errors import BadQuery, BadRequest
from readie.wire import SqlAnswer, SqlRequest, WorkerStatus
from tests.catalogues import make_checkpoint, make_document, make_item, make_worked_example, read
from tests.conftest import Cluster

TOKEN = "the token of clients"
PAGES = ["/", "/calls", "/catalogue", "/explain", "/sql"]
HOSTILE = "<script>alert(1)</script>"
STATUS: dict[str, Any] = {
    "flavor": "cpu",
    "state": "ready",
    "python": "3.11.7",
    "runtime": "fork",
    "memory_total": 8 * 10**9,
}
CALL: dict[str, Any] = {"payload": "", "python": "3.11", "function": "train", "modules": ["pandas.DataFrame"]}
ENDED: dict[str, Any] = {
    "outcome": "returned",
    "payload": "dmFsdWU=",
    "started": {"how": "restored", "checkpoint_id": "B"},
    "phases": {"queue": 0.001, "restore": 0.31, "install": 0.0, "imports": 0.02, "ready": 0.34, "run": 1.5},
}


#: A worker with GPU memory, of which a sandbox that no call has any more uses some.
WITH_GPU = STATUS | {
    "flavor": "gpu",
    "memory_total": 16 * 10**9,
    "gpu_total": 40 * 10**9,
    "sandboxes": [{"sandbox_id": "s", "memory": 2 * 10**9, "gpu_memory": 10 * 10**9}],
}
ON_GPU = {"function": "tune", "gpu": True, "memory": 4 * 10**9, "gpu_memory": 20 * 10**9}


def place(client: httpx.Client, **changes: Any) -> tuple[str, str]:
    """A call that is placed: its id, and the path of its placement."""
    placed = client.post("/v1/calls", json=CALL | changes).json()
    return placed["call_id"], f"/v1/placements/{placed['placement']['placement_id']}"


def fill(client: httpx.Client, database: Database) -> str:
    """A catalogue, a worker that holds it, and a call that was restored and has ended: the call's id. And a worker with
    GPU memory, where a call was placed that nobody has accepted.
    """
    import_catalogue(database, read(make_worked_example(alpha=0.006)))
    generation = client.get("/v1/catalogues/cpu").json()["generation"]
    held = {"generation": generation, "checkpoint_ids": ["A", "B", "C"], "restore_fixed": 0.05, "cold_fixed": 0.2}
    assert client.put("/v1/workers/w", json=STATUS | {"generations": [held]}).status_code == 204
    call_id, placement = place(client)
    assert client.post(f"{placement}/accept", params={"worker_id": "w"}).status_code == 204
    assert client.put(f"{placement}/result", json=ENDED).status_code == 200
    assert client.put("/v1/workers/GPU-1", json=WITH_GPU).status_code == 204
    place(client, **ON_GPU)
    return call_id


def words(page: str) -> str:
    """What a page says, without its markup."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def rows_below(page: str, heading: str) -> list[list[str]]:
    """What the cells say of the table below the heading with that id, row by row."""
    section = page.partition(f'<h2 id="{heading}">')[2].partition("</section>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", section, re.DOTALL)
    return [[words(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)] for row in rows]


@pytest.fixture(scope="module")
def filled_database(duckdb_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """The database of the router of `filled`."""
    path = tmp_path_factory.mktemp("dashboard") / "readie.duckdb"
    shutil.copyfile(duckdb_template, path)
    with closing(open_database(f"duckdb:///{path}")) as database:
        yield database


@pytest.fixture(scope="module")
def filled(filled_database: Database) -> Iterator[tuple[httpx.Client, str]]:
    """A client of a router without tokens, and the id of the call that it has had."""
    app = create_app(RouterSettings(worker_ttl=3600), filled_database)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client, fill(client, filled_database)


@pytest.fixture(scope="module")
def client(filled: tuple[httpx.Client, str]) -> httpx.Client:
    return filled[0]


@pytest.fixture(scope="module")
def start_locked(
    duckdb_template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., TestClient[Any]]]:
    """Starts routers that want a token, over one database."""
    path = tmp_path_factory.mktemp("locked") / "readie.duckdb"
    shutil.copyfile(duckdb_template, path)
    with closing(open_database(f"duckdb:///{path}")) as database:

        def start(**changes: Any) -> TestClient[Any]:
            settings = RouterSettings(auth_token=TOKEN, worker_token="agents", **changes)
            return TestClient(create_app(settings, database), raise_server_exceptions=False)

        yield start


@pytest.fixture(scope="module")
def one_locked(start_locked: Callable[..., TestClient[Any]]) -> Iterator[TestClient[Any]]:
    with start_locked() as client:
        yield client


@pytest.fixture
def locked(one_locked: TestClient[Any]) -> TestClient[Any]:
    """A browser without cookies at a router that wants a token."""
    one_locked.cookies.clear()
    return one_locked


class TestPages:
    """Each page answers what docs/dashboard.md says of it, on both databases."""

    def test_pages_say_what_the_tables_have(self, database: Database) -> None:
        """A worker, a call with its phases and its reason, the catalogue with its fit, a ranking."""
        with TestClient(create_app(RouterSettings(), database), raise_server_exceptions=False) as client:
            call_id = fill(client, database)
            catalogue = client.get("/v1/catalogues/cpu").json()["sha256"]
            cluster = client.get("/").text
            said = {
                path: words(answer.text)
                for path in [
                    *PAGES,
                    f"/calls/{call_id}",
                    f"/catalogue/items?catalogue={catalogue}&wanted=p",
                    "/explain?asked=pandas+unknown",
                ]
                if (answer := client.get(path)).status_code == 200
            }

        assert "1 ready" in said["/"]
        assert "0 B of 8 GB" in said["/"]
        # of the worker with GPU memory: used, then striped what the call reserves that was placed there
        assert (
            "2 GB + 4 GB reserved of 16 GB GPU memory 10 GB + 20 GB reserved of 40 GB Sandboxes 1 Calls 1" in said["/"]
        )
        for what, used in [("Memory", 125.0), ("GPU memory", 250.0)]:
            for whose in ("gpu workers", "GPU-1"):
                bar = cluster.partition(f'aria-label="{what} of {whose}: ')[2].partition("</svg>")[0]
                assert f'class="s1" width="{used}"' in bar
                assert f'fill="url(#stripes)" x="{used}" width="{2 * used}"' in bar
        assert "train finished w B restored 0.53 s 0.34 s" in said["/calls"]
        call = said[f"/calls/{call_id}"]
        assert "It was to start from B (80 MB): the cheapest start" in call
        assert "it costs 0.48 s, a cold start 0.70 s: 0.22 s less" in call
        assert "fixed part: 50.0 ms size of the checkpoint: 0.48 s imports that it lacks: 0 s" in call
        assert "restore: 0.31 s installing packages: 0 s imports: 20.0 ms rest: 10.0 ms" in call
        assert "function 0.34 s 1.50 s" in call
        assert "pandas.DataFrame pandas" in call
        assert "3 items, 1 distributions, 3 checkpoints" in said["/catalogue"]
        # measured 0.34 s less what the checkpoint lacked; predicted 0.05 s and 0.006 s for each of 80 MB
        assert "B 80 MB 1 0.53 s 0.34 s" in said["/catalogue"]
        assert "2 items match" in said[f"/catalogue/items?catalogue={catalogue}&wanted=p"]
        assert "pandas dist 0.50 s 0.70 s 1 MB 2" in said[f"/catalogue/items?catalogue={catalogue}&wanted=p"]
        explained = said["/explain?asked=pandas+unknown"]
        assert "B wins It costs 0.48 s: 0.48 s for its size and 0 s for what it lacks" in explained
        assert "unknown none: it counts nowhere" in explained
        assert "2 items are needed, each once" in explained
        assert "Which packages cost most?" in said["/sql"]
        assert "package_costs" in said["/sql"]

    @pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
    def test_pages_of_an_empty_router_say_how_to_begin(self, database: Database) -> None:
        """Nothing is there: every page answers, and says so."""
        with TestClient(create_app(RouterSettings(), database)) as client:
            said = {path: words(client.get(path).text) for path in [*PAGES, "/explain?asked=numpy"]}

        assert "No worker has reported" in said["/"]
        assert "No call matches" in said["/calls"]
        assert "No catalogue is imported" in said["/catalogue"]
        assert "No catalogue: cold" in said["/explain?asked=numpy"]

    @pytest.mark.parametrize(
        ("asked", "is_found"),
        [
            ("wanted=TRAI", True),
            ("wanted={call_id}", True),
            ("wanted=w", True),
            ("wanted=B", True),
            ("wanted=tra_n", False),
            ("wanted=tra%25", False),
            ("module=pandas", True),
            ("module=pandas.DataFrame", True),
            ("module=pand", False),
            ("state=finished&flavor=cpu&started=restored", True),
            ("state=failed", False),
            ("flavor=gpu", False),
            ("started=cold", False),
            ("state=&flavor=&started=&wanted=", True),
            ("wanted={call_id}&skip=1", False),
        ],
    )
    def test_calls_are_found(self, filled: tuple[httpx.Client, str], asked: str, is_found: bool) -> None:
        """By a part of the name, by whole ids, by module or item, by state, flavor and start; nothing is a pattern."""
        client, call_id = filled
        answer = client.get("/calls?" + asked.format(call_id=call_id))

        assert answer.status_code == 200
        assert (f"/calls/{call_id}" in answer.text) is is_found

    @pytest.mark.parametrize(
        ("asked", "why", "predicted"),
        [
            (
                {"memory": 6_000_000},
                "Cold: the cheapest start. By the catalogue of that time it costs 0.70 s, and no checkpoint that was an",
                "Predicted: 0.90 s",
            ),
            (
                {"cold": True},
                "Cold: asked for. By the catalogue of that time it costs 0.70 s. Every option",
                "Predicted: 0.90 s",
            ),
            (
                ON_GPU | {"gpu_memory": 10**9},
                "Cold: worker GPU-1 holds no generation of a gpu catalogue.",
                "Nothing was predicted: no catalogue priced this start.",
            ),
        ],
        ids=["by choice", "asked for", "without a catalogue"],
    )
    def test_a_call_says_why_it_is_cold(
        self, client: httpx.Client, asked: dict[str, Any], why: str, predicted: str
    ) -> None:
        """No checkpoint that fits is cheaper, it was asked for, or the worker's flavor has no catalogue."""
        call_id, _ = place(client, **asked)
        said = words(client.get(f"/calls/{call_id}").text)

        assert f"Why cold {why}" in said
        assert predicted in said
        assert "Nothing was measured yet" in said

    def test_a_call_says_why_its_checkpoint_was_not_used(self, client: httpx.Client, filled_database: Database) -> None:
        """The worker's reason, for as long as the result is kept; then that it started cold."""
        call_id, placement = place(client)
        client.post(f"{placement}/accept", params={"worker_id": "w"})
        client.put(f"{placement}/result", json=ENDED | {"started": {"how": "cold", "fallback": "the image is damaged"}})
        said = words(client.get(f"/calls/{call_id}").text)
        with filled_database.transaction() as connection:
            connection.execute(text("DELETE FROM call_results WHERE call_id = :call_id"), {"call_id": call_id})
        later = words(client.get(f"/calls/{call_id}").text)

        assert "It was to start from B" in said
        assert "It started cold all the same: the image is damaged" in said
        assert "cold start: 0.31 s" in said
        assert "It started cold all the same. The worker's reason is forgotten with the result." in later
        assert "until ready: 0.34 s" in later

    @pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
    def test_a_call_whose_catalogue_is_forgotten_has_its_cost_undivided(self, database: Database) -> None:
        """What the checkpoint's size was priced at is not known any more: the whole is not called imports."""
        with TestClient(create_app(RouterSettings(), database)) as client:
            call_id = fill(client, database)
            client.put("/v1/workers/w", json=STATUS | {"state": "removed"})
            for load_time in (1.0, 2.0, 3.0):
                items = {"numpy": make_item(load_time)}
                import_catalogue(database, read(make_document(items, [make_checkpoint(f"of {load_time}", items, 1)])))
            catalogues = client.get("/v1/catalogues").json()
            said = words(client.get(f"/calls/{call_id}").text)

        assert [each["items"] for each in catalogues] == [1, 1, 1]
        assert "fixed part: 50.0 ms size of the checkpoint and imports that it lacks: 0.48 s" in said
        assert "lacks: 0 s" not in said

    @pytest.mark.parametrize("modules", [["numpy", "tokenizer:a/b c"], ['a"b, c\n', "foo-bar", "import", "größe.π"]])
    def test_a_call_s_modules_are_explained_whatever_they_are_called(
        self, client: httpx.Client, modules: list[str]
    ) -> None:
        """The link of its page names each of them, and so does the form there, which can be sent again."""
        call_id, _ = place(client, modules=modules)
        (link,) = re.findall(r'href="(/explain\?[^"]*)"', client.get(f"/calls/{call_id}").text)
        page = client.get(unescape(link))
        typed = unescape(re.findall(r"<textarea[^>]*>(.*?)</textarea>", page.text, re.DOTALL)[0])
        again = client.post("/explain", data={"asked": typed})

        assert find_modules(typed) == (sorted(modules), False)
        for answer in (page, again):
            assert [name for name, _ in rows_below(answer.text, "imports")[1:]] == [
                " ".join(name.split()) for name in sorted(modules)
            ]

    def test_modules_that_are_left_out_are_counted(self, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """Code that asks for more than are explained says how many there are."""
        monkeypatch.setattr("app.dashboard.explain.MAX_MODULES", 2)
        page = client.post("/explain", data={"asked": "import c, a, d, b"}).text

        assert "The code asks for 4 modules: the first 2 are explained, the other 2 are left out." in words(page)
        assert [name for name, _ in rows_below(page, "imports")[1:]] == ["a", "b"]

    def test_what_was_pasted_is_explained(self, client: httpx.Client) -> None:
        """Code is looked at for its imports, and the page that asks again gets the explanation alone."""
        code = "import pandas as pd\nimport json\n\ndef f():\n    import torch\n"
        part = client.post("/explain", data={"asked": code}, headers={"HX-Request": "true"})
        whole = client.post("/explain", data={"asked": code})

        assert "Imports found" in part.text
        # announced by the line that the page has for it, which the part fills
        assert 'id="said" class="heard" role="status"></p>' in whole.text
        assert words(part.text).startswith("C wins: it costs 1.20 s C wins")
        assert '<div hx-swap-oob="innerHTML:#said">' in part.text
        assert "hx-swap-oob" not in whole.text
        assert "pandas pandas torch torch" in words(part.text)
        assert "<html" not in part.text
        assert "<html" in whole.text
        assert "import pandas as pd" in whole.text

    @pytest.mark.parametrize(
        ("form", "said"),
        [
            ({"asked": "import numpy("}, "neither a list of modules nor Python"),
            ({"asked": "numpy", "memory": "much"}, "Not a size"),
            ({"asked": "numpy", "flavor": "tpu"}, "Unknown flavor"),
        ],
    )
    def test_what_cannot_be_explained_is_said_on_the_page(
        self, client: httpx.Client, form: dict[str, str], said: str
    ) -> None:
        """With what was typed still in the form."""
        answer = client.post("/explain", data=form)

        assert answer.status_code == 400
        assert said in words(answer.text)
        assert form["asked"] in unescape(answer.text)

    @pytest.mark.parametrize(
        "path", ["/calls/none", "/catalogue?catalogue=" + "0" * 64, "/calls?state=lost", "/calls?skip=-1"]
    )
    def test_what_is_wrong_is_a_page(self, client: httpx.Client, path: str) -> None:
        """A browser gets a page that says what and what to do, with the status of the problem."""
        answer = client.get(path)

        assert answer.status_code in {400, 404}
        assert answer.headers["content-type"].startswith("text/html")
        assert 'role="alert"' in answer.text

    def test_the_api_stays_as_it_was(self, client: httpx.Client) -> None:
        """Unknown paths and faults of the API are problem documents, and the description has no page."""
        unknown, fault = client.get("/nothing/here"), client.get("/v1/calls/none")
        described = client.get("/schema/openapi.json").json()["paths"]

        assert unknown.headers["content-type"] == fault.headers["content-type"] == "application/problem+json"
        assert [path for path in described if not path.startswith(("/v1/", "/health", "/ready", "/metrics"))] == []


class TestItems:
    """Items are found at typing speed, the likeliest first."""

    def test_the_likeliest_come_first(self, database: Database) -> None:
        """The one of that name, then those that begin so, then short before long; an underscore is an underscore."""
        keys = ["numpy", "numpy.linalg", "my_numpy", "numpy_lab", "other", "n.umpy", "model:numpy"]
        import_catalogue(database, read(make_document({key: make_item() for key in keys})))
        with TestClient(create_app(RouterSettings(), database)) as client:
            sha256 = client.get("/v1/catalogues/cpu").json()["sha256"]

            def find(wanted: str) -> list[str]:
                found = client.get("/catalogue/items", params={"catalogue": sha256, "wanted": wanted})
                return re.findall(r'<a href="/explain[^>]*>([^<]*)</a>', found.text)

            assert find("NumPy") == ["numpy", "numpy_lab", "numpy.linalg", "my_numpy", "model:numpy"]
            assert find("y_") == ["my_numpy", "numpy_lab"]
            assert find("%") == []
            assert find(" ") == []

    def test_the_count_is_announced(self, client: httpx.Client) -> None:
        """By a line of the page, which each answer fills: the table itself is not read out for every letter."""
        sha256 = client.get("/v1/catalogues/cpu").json()["sha256"]
        page = client.get("/catalogue").text
        told = {}
        for wanted in ["p", "torch", "none", ""]:
            part = client.get("/catalogue/items", params={"catalogue": sha256, "wanted": wanted}).text
            told[wanted] = words(
                re.findall(r'<div hx-swap-oob="innerHTML:#found-count">(.*?)</div>', part, re.DOTALL)[0]
            )

        assert '<p id="found-count" class="heard" role="status"></p>' in page
        assert told == {"p": "2 items match", "torch": "1 item matches", "none": "No item matches", "": ""}

    def test_savings_are_those_of_the_items(self, database: Database) -> None:
        """What a checkpoint holds is the sum over its items, of an earlier catalogue too."""
        loads = {"a": 0.1, "b": 0.25, "c": 1.5, "d": 0.0}
        held: dict[str, list[str]] = {"none": [], "some": ["a", "c"], "all": list(loads), "alike": ["a", "c"]}
        items = {key: make_item(load, size_mb=2.0) for key, load in loads.items()}
        checkpoints = [make_checkpoint(name, keys, 10 * len(keys)) for name, keys in held.items()]
        import_catalogue(database, read(make_document(items, checkpoints, alpha=0.001)))
        import_catalogue(database, read(make_document({"z": make_item()})))
        with database.reading() as connection:
            found = read_savings(connection, 1)

        assert {each.checkpoint_id: each.held_ns for each in found} == {
            name: sum(round(loads[key] * 1e9) for key in keys) for name, keys in held.items()
        }
        assert [each.size_ns for each in found] == [0, 20_000_000, 40_000_000, 20_000_000]


class TestCatalogue:
    """What packages cost, what checkpoints hold, and what their size is worth."""

    def test_figures_are_those_of_the_items(self, database: Database) -> None:
        """Of packages by cost, of each the share that a checkpoint holds, and of checkpoints what they save at most."""
        items = {"big": make_item(3.0, distribution="big"), "big.sub": make_item(1.0, distribution="big")}
        items |= {f"p{n:02}": make_item((16 - n) / 100, distribution=f"p{n:02}") for n in range(16)}
        checkpoints = [
            make_checkpoint("checkpoint_0", ["big"], 10),
            make_checkpoint("checkpoint_1", ["big", "big.sub", "p00"], 100),
        ]
        distributions = {each["distribution"]: "2.0" for each in items.values()}
        import_catalogue(database, read(make_document(items, checkpoints, distributions=distributions)))
        with TestClient(create_app(RouterSettings(), database)) as client:
            page = client.get("/catalogue").text

        costs, matrix = rows_below(page, "costs"), rows_below(page, "matrix")
        assert "All 17: the load time of all their items together; all packages have 5.36 s" in words(page)
        assert costs[1:3] == [["big", "2.0", "2", "", "4.00 s", "2 MB"], ["p00", "2.0", "1", "", "0.16 s", "1 MB"]]
        assert len(costs) == 1 + 17
        assert "The 15 that cost most of 17 packages: of each package's load time, the percentage" in words(page)
        assert matrix[:3] == [["Package", "0", "1"], ["big", "75", "100"], ["p00", "", "100"]]
        assert matrix[3:] == [[f"p{n:02}", "", ""] for n in range(1, 14)]
        assert rows_below(page, "savings")[1:] == [
            ["checkpoint_0", "10 MB", "60.0 ms", "3.00 s", "2.94 s"],
            ["checkpoint_1", "100 MB", "0.60 s", "4.16 s", "3.56 s"],
        ]

    def test_another_catalogue_can_be_chosen(self, database: Database) -> None:
        """The active one is shown at first; an earlier generation, and another flavor, where they are asked for."""
        earlier, active, gpu = (
            read(document)
            for document in (
                make_document({"old": make_item()}, alpha=0.001),
                make_worked_example(alpha=0.002),
                make_worked_example(alpha=0.003, flavor="gpu"),
            )
        )
        for each in (earlier, active, gpu):
            import_catalogue(database, each)
        with TestClient(create_app(RouterSettings(), database)) as client:
            for asked, chosen, holds in [
                ("", active, "3 items, 1 distributions, 3 checkpoints alpha 0.002 seconds per MB"),
                (
                    f"?catalogue={earlier.sha256}",
                    earlier,
                    "1 items, 1 distributions, 0 checkpoints alpha 0.001 seconds",
                ),
                ("?flavor=gpu", gpu, "3 items, 1 distributions, 3 checkpoints alpha 0.003 seconds per MB"),
            ]:
                page = client.get(f"/catalogue{asked}").text
                links = re.findall(r'<a href="/catalogue\?catalogue=(\w+)"( aria-current="true")?>([^<]*)</a>', page)

                assert [sha256 for sha256, *_ in links] == [each.sha256 for each in (active, earlier, gpu)]
                assert [sha256 for sha256, is_current, _ in links if is_current] == [chosen.sha256]
                assert links[0][2] == f"cpu, generation {active.generation[:12]}, active"
                assert links[1][2].startswith(f"cpu, generation {earlier.generation[:12]}, of 20")
                assert holds in words(page)


class TestSql:
    """The console reads the views and nothing else, within its limits."""

    def test_ready_questions_can_be_asked(self, database: Database) -> None:
        """Each is a question in words, and a query that is let through and runs."""
        for words_of, query in list_questions().values():
            assert words_of.endswith("?")
            assert run_query(database, SqlRequest(query=query)).columns

    def test_an_answer_is_a_table_or_a_file(self, client: httpx.Client) -> None:
        """The same rows on the page and as CSV."""
        query = "SELECT item, load_ns FROM active_items ORDER BY item"
        page = client.post("/sql", data={"query": query}, headers={"HX-Request": "true"})
        file = client.post("/sql", data={"query": query, "as": "csv"})

        assert "item load_ns numpy 200000000 pandas 500000000 torch 2000000000" in words(page.text)
        assert '<div hx-swap-oob="innerHTML:#answered">3 rows</div>' in page.text  # what is announced, and no row
        assert '<p id="answered" class="heard" role="status"></p>' in client.get("/sql").text
        assert file.text == "item,load_ns\r\nnumpy,200000000\r\npandas,500000000\r\ntorch,2000000000\r\n"
        assert file.headers["content-type"] == "text/csv; charset=utf-8"
        assert file.headers["content-disposition"] == 'attachment; filename="readie.csv"'

    def test_an_answer_that_is_too_long_says_so(self, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """The page shows 500 rows and says what a file has at most; a file that was cut says so in its name."""
        query = "SELECT a.item FROM active_items a" + "".join(f" CROSS JOIN active_items b{n}" for n in range(5))

        def ask(most: int, **form: str) -> httpx.Response:
            return client.post("/sql", data={"query": f"{query} LIMIT {most}", **form}, headers={"HX-Request": "true"})

        whole, cut = ask(500), ask(501)
        file = ask(501, **{"as": "csv"})
        monkeypatch.setattr("app.dashboard.sql.MOST_ROWS", 500)
        cut_file = ask(501, **{"as": "csv"})

        assert "500 rows item" in words(whole.text)
        assert "500 rows; there are more: a file has 100,000 at most item" in words(cut.text)
        assert (cut.text.count("<tr>"), len(file.text.splitlines()), len(cut_file.text.splitlines())) == (501, 502, 501)
        assert file.headers["content-disposition"] == 'attachment; filename="readie.csv"'
        assert cut_file.headers["content-disposition"] == 'attachment; filename="readie-first-500-rows.csv"'

    def test_a_question_is_put_into_the_console(self, client: httpx.Client) -> None:
        """A link fills the form; nothing runs before somebody asks."""
        page = client.get("/sql?question=drift").text

        assert "FROM start_drift" in page
        assert "Nothing was asked yet" in page

    @pytest.mark.parametrize("query", ["DROP TABLE calls", "SELECT * FROM calls", "SELECT 1; SELECT 2", "", "SELECT"])
    def test_anything_else_is_refused(self, client: httpx.Client, query: str) -> None:
        """The page says why, and keeps what was typed."""
        answer = client.post("/sql", data={"query": query})

        assert answer.status_code == 400
        assert "The query cannot be run" in answer.text
        assert f'spellcheck="false" data-submits aria-describedby="limits">{query}</textarea>' in answer.text

    def test_spreadsheets_run_nothing(self) -> None:
        """Text that would be a formula gets an apostrophe; numbers below zero stay numbers."""
        rows = [["=1+1", -1, None], ["@x", 2.5, 'a "quoted", text'], ["fine", True, ["a", 2]]]
        file = write_csv(SqlAnswer(columns=["a", "b", "c"], rows=rows, more=False)).decode()

        assert file.splitlines()[1:] == ["'=1+1,-1,", '\'@x,2.5,"a ""quoted"", text"', 'fine,true,"[""a"",2]"']

    @pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
    def test_on_postgresql_a_role_can_read_the_views_alone(self, database: Database) -> None:
        """Whatever a check would let through: the tables are not its own, and it stays that role."""
        migrate(database)
        role = database.reader_role()

        assert re.fullmatch("readie_views_[0-9]+", role or "")
        assert database.query("SELECT current_user", 5)[1] == [(role,)]
        assert database.query("SELECT count(*) FROM recorded_calls", 5)[1] == [(0,)]
        for query in ["SELECT * FROM calls", "SELECT * FROM pg_authid", "SELECT pg_read_file('/etc/passwd')"]:
            with pytest.raises(BadQuery, match="permission denied"):
                database.query(query, 5)

    @pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
    def test_the_role_of_one_database_reads_no_other(self, database: Database, cluster: Cluster) -> None:
        """Roles are the server's: who may become that of one database must not read another's views by it."""
        with closing(open_database(cluster.create())) as other:
            migrate(other)
            migrate(database)
            role = database.reader_role()
            with other.reading() as connection:
                reads = "SELECT has_table_privilege(:role, 'recorded_calls', 'SELECT')"
                found = [
                    connection.execute(text(reads), {"role": each}).scalar() for each in (role, other.reader_role())
                ]
        cluster.drop(other.engine.url.render_as_string(hide_password=False))

        assert found == [False, True]

    def test_who_may_create_no_role_goes_without(self, cluster: Cluster) -> None:
        """The database works, queries too; the console does not claim what is not so. An administrator can make the role,
        as docs/dashboard.md says, and the migrations then use it.
        """
        page = (Path(__file__).parents[1] / "docs" / "dashboard.md").read_text(encoding="utf-8")
        ((ask, make),) = re.findall(r"`(SELECT oid [^`]*)` gives: `(CREATE ROLE [^`]*)`", page)
        url = cluster.create()
        name = make_url(url).database or ""
        with psycopg.connect(cluster.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(sql.Identifier(name)))
            owned = sql.SQL("ALTER DATABASE {} OWNER TO {}")
            connection.execute(owned.format(sql.Identifier(name), sql.Identifier(name)))
        try:
            with closing(open_database(make_url(url).set(username=name, password="x").render_as_string(False))) as own:
                migrate(own)

                assert own.reader_role() is None
                assert own.query("SELECT count(*) FROM recorded_calls", 5)[1] == [(0,)]

                with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as administrator:
                    ((number,),) = administrator.execute(ask).fetchall()
                    administrator.execute(
                        make.replace("<number>", str(number)).replace("<the router's user>", f'"{name}"')
                    )
                migrate(own)

                assert own.reader_role() == f"readie_views_{number}"
                assert own.query("SELECT count(*) FROM recorded_calls", 5)[1] == [(0,)]
        finally:
            cluster.drop(url)
            with psycopg.connect(cluster.url.replace("+psycopg", ""), autocommit=True) as connection:
                connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


class TestSignIn:
    """Where a token is set for clients, the pages are for who has shown it."""

    def test_pages_send_to_the_form(self, locked: TestClient[Any]) -> None:
        """A page leads to the form and from there back; a part of one tells the page around it; the stream is refused."""
        page = locked.get("/calls", follow_redirects=False)
        part = locked.get("/calls", headers={"HX-Request": "true"})
        stream = locked.get("/events")
        form = locked.get("/sign-in")

        assert (page.status_code, page.headers["location"]) == (303, "/sign-in?next=/calls")
        assert (part.status_code, part.headers["hx-redirect"]) == (401, "/sign-in")
        assert stream.status_code == 401
        assert "Token for clients" in form.text

    def test_the_token_opens_the_pages_and_nothing_else(self, locked: TestClient[Any]) -> None:
        """The cookie is no token, no script sees it, no other site sends it; the API does not know it."""
        wrong = locked.post("/sign-in", data={"token": "guess"})
        right = locked.post("/sign-in", data={"token": TOKEN, "next": "/sql"}, follow_redirects=False)
        cookie = right.headers["set-cookie"]
        pages = [locked.get(page).status_code for page in PAGES]
        api = locked.get("/v1/calls")
        locked.post("/sign-out")
        after = locked.get("/", follow_redirects=False)

        assert wrong.status_code == 401
        assert "set-cookie" not in wrong.headers
        assert (right.status_code, right.headers["location"]) == (303, "/sql")
        assert {"HttpOnly", "SameSite=strict", "Path=/", f"Max-Age={LIFETIME}"} <= set(cookie.split("; "))
        assert "Secure" not in cookie
        assert TOKEN not in cookie
        assert pages == [200] * len(PAGES)
        assert api.status_code == 401
        assert after.status_code == 303

    @pytest.mark.parametrize(
        ("asked", "led_to"),
        [
            ("/explain?asked=a%20b%2C%22c%22,d;e&flavor=cpu", "/explain?asked=a%20b%2C%22c%22,d;e&flavor=cpu"),
            ("/explain?asked=\u00e9", "/explain?asked=%C3%A9"),
            ("/calls/%C3%A9?", "/calls/%C3%A9"),
            ("/calls?wanted=//example.org/%5c", "/calls?wanted=//example.org/%5c"),
            ("/explain?asked=" + "x" * 16_000, "/explain"),
        ],
        ids=["a query", "not ASCII", "a path", "another host", "long"],
    )
    def test_signing_in_leads_back(self, locked: TestClient[Any], asked: str, led_to: str) -> None:
        """To the page that was asked for, with its query, unless that is too long for an address within an address."""
        sent_to = locked.get(asked, follow_redirects=False).headers["location"]
        form = locked.get(sent_to).text
        kept = unescape(re.findall('name="next" value="([^"]*)"', form)[0])
        answer = locked.post("/sign-in", data={"token": TOKEN, "next": kept}, follow_redirects=False)

        assert (answer.status_code, answer.headers["location"]) == (303, led_to)

    def test_a_cookie_ends_and_cannot_be_made(self, locked: TestClient[Any]) -> None:
        """One that is over, that another token made, that was changed, or that is no such thing."""
        soon = int(time.time()) + 60
        good = make_pass(TOKEN, soon)
        changed = f"{soon + 1}{good[len(str(soon)) :]}"
        bad = [make_pass(TOKEN, soon - 61), make_pass("another", soon), changed, "x", f"{soon}."]
        answers = []
        for value in [good, *bad]:
            said = {"Cookie": f"{COOKIE}={value}"}
            answers.append(locked.get("/", headers=said, follow_redirects=False).status_code)

        assert answers == [200] + [303] * len(bad)

    @pytest.mark.timeout(60)
    def test_a_stream_ends_with_its_cookie(self, locked: TestClient[Any]) -> None:
        """What follows the cluster is told of it until then, and then has to sign in."""
        until = int(time.time()) + 4
        said = {"Cookie": f"{COOKIE}={make_pass(TOKEN, until)}"}
        stream = locked.get("/events", headers=said)
        ended = time.time()  # that it does end is said by the limit of the test
        again = locked.get("/events", headers=said)

        assert (stream.status_code, again.status_code) == (200, 401)
        assert "event: workers" in stream.text
        assert until <= ended

    @pytest.mark.parametrize(
        "elsewhere",
        [
            "https://example.org/",
            "//example.org",
            "/\\example.org",
            "/\t/example.org",
            "javascript:alert(1)",
            "/a\r\nb: c",
        ],
    )
    def test_signing_in_leads_to_no_other_host(self, locked: TestClient[Any], elsewhere: str) -> None:
        """Whatever the address of the form said."""
        answer = locked.post("/sign-in", data={"token": TOKEN, "next": elsewhere}, follow_redirects=False)

        assert answer.headers["location"] == "/"

    def test_guesses_count_as_requests(self, start_locked: Callable[..., TestClient[Any]]) -> None:
        """RATE_LIMIT holds for the form as for the API, together: then a page says when to come again."""
        with start_locked(rate_limit=0.3) as client:
            client.get("/v1/calls")
            answers = [client.post("/sign-in", data={"token": "guess"}) for _ in range(3)]

        assert [answer.status_code for answer in answers] == [401, 401, 429]
        assert int(answers[2].headers["retry-after"]) >= 1
        assert "requests came within 10 seconds" in words(answers[2].text)

    def test_under_tls_the_cookie_is_for_tls_alone(self, start_locked: Callable[..., TestClient[Any]]) -> None:
        """A browser never sends it in clear."""
        with start_locked(tls_cert="router.pem", tls_key="router.key") as client:
            answer = client.post("/sign-in", data={"token": TOKEN}, follow_redirects=False)

        assert "Secure" in answer.headers["set-cookie"].split("; ")

    def test_without_a_token_there_is_nothing_to_sign_in_to(self, client: httpx.Client) -> None:
        """The form leads to the pages, which do not offer to sign out."""
        assert client.get("/sign-in", follow_redirects=False).headers["location"] == "/"
        assert "Sign out" not in client.get("/").text


class TestSafety:
    """Names are text, and a page loads nothing from elsewhere."""

    @pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
    def test_hostile_names_stay_text(self, database: Database) -> None:
        """A function, a module, a package and a printed problem, on every page that shows them."""
        with TestClient(create_app(RouterSettings(), database)) as client:
            client.put("/v1/workers/w", json=STATUS)
            import_catalogue(database, read(make_document({HOSTILE: make_item(), "a": make_item()})))
            asked = {"function": HOSTILE, "modules": [HOSTILE, '"><img src=x onerror=alert(1)>']}
            placed = client.post("/v1/calls", json=CALL | asked).json()
            sha256 = client.get("/v1/catalogues/cpu").json()["sha256"]
            live = client.get("/").text
            placement = f"/v1/placements/{placed['placement']['placement_id']}"
            client.post(f"{placement}/accept", params={"worker_id": "w"})
            problem = {"type": "t", "title": HOSTILE, "detail": HOSTILE, "way_out": HOSTILE}
            client.put(f"{placement}/result", json={"outcome": "failed", "problem": problem})
            pages = [
                live,
                client.get("/calls").text,
                client.get(f"/calls/{placed['call_id']}").text,
                client.get("/calls", params={"wanted": HOSTILE}).text,
                client.get("/catalogue/items", params={"catalogue": sha256, "wanted": "script"}).text,
                client.get("/explain", params={"asked": HOSTILE}).text,
                client.post("/sql", data={"query": f"SELECT '{HOSTILE}' AS x FROM active_items"}).text,
            ]

        assert [number for number, page in enumerate(pages) if "&lt;script&gt;" not in page] == []
        assert [page for page in pages if HOSTILE in page or "<img" in page] == []

    @pytest.mark.parametrize("path", [*PAGES, "/sign-in", "/calls/none", static_url("theme.js")])
    def test_every_answer_has_the_headers(self, client: httpx.Client, path: str) -> None:
        """Pages, refusals, redirects and files: nothing inline, nothing framed, nothing guessed."""
        answer = client.get(path, follow_redirects=False)

        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS

    def test_pages_name_no_other_host(self, client: httpx.Client) -> None:
        """Each file that a page loads is served here under its hash, for good; nothing is inline."""
        for path in PAGES:
            page = client.get(path).text
            for address in re.findall(r'(?:src|href)="([^"]*)"', page):
                assert address.startswith(("/", "#")), address
            assert not re.search(r"<style|<script(?![^>]* src=)| style=| on[a-z]+=", page)
            loaded = re.findall(r'"(/static/[^"]*)"', page)
            assert len(loaded) == len(STATIC)
            for address in loaded:
                file = client.get(address)
                assert (file.status_code, "immutable" in file.headers["cache-control"]) == (200, True)

    def test_nothing_else_of_the_package_is_served(self, client: httpx.Client) -> None:
        """A file that pages do not load, or a way out of the folder."""
        for name in ["LICENSE-htmx.txt", "..%2Fsign_in.py", "%2e%2e/templates/base.html", ""]:
            assert client.get(f"/static/{name}").status_code == 404

    def test_forms_are_held_to_their_size_and_to_text(self, client: httpx.Client) -> None:
        """What no database holds, and what is far too long, is refused before it is looked at."""
        assert client.post("/sql", data={"query": "SELECT '\0'"}).status_code == 400
        assert client.get("/explain", params={"module": "\0"}).status_code == 400
        assert client.post("/explain", data={"asked": '"\\ud800"'}).status_code == 400
        assert client.post("/explain", data={"asked": "x" * 300_000}).status_code == 400
        assert client.post("/explain", data={"asked": "x" * 3_000_000}).status_code == 413


class TestEvents:
    """The cluster's state is read once for all who look, and only while somebody does."""

    @pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
    def test_one_look_serves_all(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        """Five browsers are told of a worker at once; nobody left, nothing is read; the end of the router ends all."""
        monkeypatch.setattr("app.dashboard.cluster.INTERVAL", 0.2)
        looks: list[float] = []

        def count(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if "worker_rows" in statement:
                looks.append(time.monotonic())

        event.listen(database.engine, "before_cursor_execute", count)
        wake_ups = WakeUps()

        async def watch_together() -> tuple[list[set[str]], int, int, list[str]]:
            watch = ClusterWatch(database, wake_ups)

            async def first_parts() -> set[str]:
                names: set[str] = set()
                stream = watch.follow()
                async for message in stream:
                    names.add(str(message.event))
                    if len(names) == 4:
                        break
                await stream.aclose()
                return names

            told = await asyncio.gather(*(first_parts() for _ in range(5)))
            seen = len(looks)
            await asyncio.sleep(0.5)
            idle = len(looks) - seen
            ends: list[str] = []

            async def follow_to_the_end() -> None:
                async for message in watch.follow():
                    ends.append(str(message.event))  # noqa: PERF401 - it is looked at meanwhile
                ends.append("end")

            following = asyncio.create_task(follow_to_the_end())
            async with asyncio.timeout(20):
                while len(ends) < 4:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            wake_ups.close()
            await asyncio.wait_for(following, 20)
            return told, seen, idle, ends

        told, seen, idle, ends = asyncio.run(watch_together())

        assert told == [{"state", "totals", "workers", "calls"}] * 5
        assert seen <= 2
        assert idle == 0
        assert ends == ["state", "totals", "workers", "calls", "end"]

    @pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
    def test_a_page_is_told_of_nothing_old(
        self, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What changed while nobody looked is in the first that the next page hears; while the database cannot be read, it
        hears that, and nothing else.
        """
        monkeypatch.setattr("app.dashboard.cluster.INTERVAL", 0.05)
        empty = open_database(f"duckdb:///{tmp_path / 'empty.duckdb'}")

        async def look_until(watch: ClusterWatch, words: str) -> list[str]:
            told = []
            async with asyncio.timeout(20), aclosing(watch.follow()) as stream:
                async for message in stream:
                    told.append(f"{message.event} {message.data!s}")
                    if words in told[-1]:
                        break
            return told

        async def look_again() -> list[list[str]]:
            watch = ClusterWatch(database, WakeUps())
            looks = [await look_until(watch, "No worker has reported")]
            with database.transaction() as connection:
                report_status(connection, "late", msgspec.convert(STATUS, WorkerStatus))
            looks.append(await look_until(watch, "late"))
            watch.database = empty
            looks.append(await look_until(watch, "Out of date"))
            watched = asyncio.create_task(look_until(watch, "late"))
            await look_until(watch, "Out of date")
            watch.database = database
            return [*looks, await watched]

        first, changed, failing, mended = asyncio.run(look_again())
        empty.close()

        assert first[0] == "state Live"
        assert [part for part in changed if "No worker has reported" in part] == []
        assert failing == ["state Out of date: the database is not read"]
        assert mended[:2] == [*failing, "state Live"]


class TestCharts:
    """Bars and points lie where their values are."""

    def test_a_stack_is_as_long_as_its_parts(self) -> None:
        """One after another, in thousandths of the whole; what is below zero is nothing."""
        bars = stack([("a", "s1", 2.0), ("b", "s2", -1.0), ("c", "s3", 3.0)], 10.0)

        assert [(bar.start, bar.width) for bar in bars] == [(0, 200), (200, 0), (200, 300)]
        assert stack([("a", "s1", 0.0)], 0.0)[0].width == 0

    @pytest.mark.parametrize(("least", "most"), [(0, 0), (0, 7.3), (-0.4, 1.2), (0, 1e-7), (0, 123456.0)])
    def test_ticks_are_round_and_enclose(self, least: float, most: float) -> None:
        """A few of them, evenly apart, from the least value or below to the most or above."""
        found = ticks(least, most)

        assert 2 <= len(found) <= 9
        assert found[0] <= least
        assert found[-1] >= most
        assert {f"{b - a:.6g}" for a, b in pairwise(found)} == {f"{found[1] - found[0]:.6g}"}

    def test_a_line_is_drawn_and_found_again(self) -> None:
        """Points on a line lie on the drawn one, and least squares give it back."""
        drawn = plot([(x, 1 + 0.5 * x, f"p{x}") for x in (0.0, 10.0, 40.0)], (1.0, 0.5))
        assert drawn.line is not None
        x1, y1, x2, y2 = drawn.line

        for x, y, _ in drawn.points:
            assert y == pytest.approx(y1 + (x - x1) / (x2 - x1) * (y2 - y1), abs=0.2)
        assert slope_of([(0, 1.0), (10, 6.0), (40, 21.0)]) == pytest.approx((1.0, 0.5))
        assert slope_of([(3.0, 1.0), (3.0, 2.0)]) is None

    def test_names_do_not_lie_on_one_another(self) -> None:
        """Of points that are close together, the uppermost has its name; all are drawn."""
        drawn = plot([(1.0, 1.0, "checkpoint_1"), (1.1, 1.01, "checkpoint_2"), (50.0, 9.0, "checkpoint_3")])

        assert [name for _, _, name in drawn.points] == ["checkpoint_3", "checkpoint_2", ""]


@pytest.mark.parametrize(
    ("text", "modules", "is_code"),
    [
        ("", [], False),
        ("pandas sklearn.svm, numpy\n", ["numpy", "pandas", "sklearn.svm"], False),
        ("model:gpt2", ["model:gpt2"], False),
        ('numpy "tokenizer:a/b c", "é"', ["numpy", "tokenizer:a/b c", "é"], False),
        ('"".join(x)', [], True),
        ("import numpy", ["numpy"], True),
        ("from a import b\nimport os", ["a.b"], True),
        ("x = 1", [], True),
    ],
)
def test_names_and_code_are_told_apart(text: str, modules: list[str], is_code: bool) -> None:
    """A list of names is one; anything else is Python."""
    assert find_modules(text) == (modules, is_code)


def test_text_that_is_neither_is_refused() -> None:
    """With what Python says of it."""
    with pytest.raises(BadRequest, match="neither a list of modules nor Python"):
        find_modules("import numpy(")
