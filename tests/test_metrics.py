"""/metrics: counts of this router, the state of the cluster, and no id of anything."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar.testing import TestClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import create_engine, text

from app.application import create_app
from app.catalogue import import_catalogue
from app.database import Database, migrate, open_database
from app.liveness import sweep
from app.metrics import Metrics, render
from app.settings import RouterSettings
from tests.catalogues import make_worked_example, read
from tests.pages import free_port, read_blocks
from tests.routers import ROOT, ask, serving
from tests.sandboxes import wait_for

GIB = 2**30
CALL: dict[str, Any] = {"payload": "", "python": "3.11", "function": "confidential", "modules": ["numpy"]}
STATUS: dict[str, Any] = {
    "flavor": "cpu",
    "state": "ready",
    "python": "3.11.7",
    "runtime": "fork",
    "memory_total": 4 * GIB,
}
RESULT: dict[str, Any] = {"outcome": "returned", "payload": ""}


@pytest.fixture
def client(database: Database) -> Iterator[httpx.Client]:
    """A client of the application; one worker is ready, which holds the worked example's generation."""
    catalogue = read(make_worked_example())
    import_catalogue(database, catalogue)
    held = {"generation": catalogue.generation, "checkpoint_ids": ["A", "B"], "restore_fixed": 0.5}
    app = create_app(RouterSettings(sweep_interval=3600), database)
    with TestClient(app, raise_server_exceptions=False) as started:
        assert started.put("/v1/workers/w", json=STATUS | {"generations": [held]}).status_code == 204
        yield started


def scrape(client: httpx.Client) -> dict[str, float]:
    """Every sample that is not zero and no bucket, as Prometheus reads it: `name{label=value,…}` → value."""
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            if sample.value and not sample.name.endswith(("_bucket", "_created")):
                samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return samples


def place(client: httpx.Client, **changes: Any) -> str:
    """The path of a new placement."""
    answer = client.post("/v1/calls", json=CALL | changes)
    assert answer.status_code == 201, answer.text
    return f"/v1/placements/{answer.json()['placement']['placement_id']}"


def counted(samples: dict[str, float], name: str) -> dict[str, float]:
    """The samples of one metric, by their labels alone."""
    return {key.removeprefix(name): value for key, value in samples.items() if re.fullmatch(rf"{name}(\{{.*)?", key)}


def test_placements_are_counted_by_flavor_outcome_and_start(client: httpx.Client) -> None:
    """Those that were placed by what they start from, those that were refused by the problem."""
    first = place(client, session_id="s")
    client.post(f"{first}/accept", params={"worker_id": "w"})
    client.put(f"{first}/result", json=RESULT)
    place(client, session_id="s")
    place(client, cold=True)
    client.post("/v1/calls", json=CALL | {"gpu": True})
    client.post("/v1/calls", json=CALL | {"memory": 5 * GIB})
    samples = scrape(client)

    assert counted(samples, "readie_placements_total") == {
        "{checkpoint=checkpoint,flavor=cpu,outcome=placed}": 1,
        "{checkpoint=session,flavor=cpu,outcome=placed}": 1,
        "{checkpoint=cold,flavor=cpu,outcome=placed}": 1,
        "{checkpoint=,flavor=gpu,outcome=no-capacity}": 1,
        "{checkpoint=,flavor=cpu,outcome=no-capacity}": 1,
    }
    assert samples["readie_placement_seconds_count"] == 5
    assert samples["readie_selection_seconds_count"] == 3
    assert samples["readie_placement_seconds_sum"] > samples["readie_selection_seconds_sum"] > 0


def test_calls_that_wait_for_room_are_counted_while_they_do(client: httpx.Client) -> None:
    """Then no more, whether they were placed or not."""
    assert "readie_calls_placing" not in scrape(client)  # it is 0
    assert client.post("/v1/calls", json=CALL | {"memory": 5 * GIB, "queue_timeout": 0.1}).status_code == 503
    assert "readie_calls_placing" not in scrape(client)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, "/v1/calls", json=CALL | {"memory": 5 * GIB, "queue_timeout": 60})
        wait_for(lambda: scrape(client).get("readie_calls_placing") == 1)
        client.put("/v1/workers/w", json=STATUS | {"memory_total": 8 * GIB})
        assert waiting.result().status_code == 201

    assert "readie_calls_placing" not in scrape(client)


def test_calls_are_counted_as_they_end(client: httpx.Client, database: Database) -> None:
    """Once each, whoever ends them: a result, a failure, a cancellation, the end of a session, a sweep."""
    for result in (RESULT, {"outcome": "raised"}):
        path = place(client, memory=1)
        for _ in range(2):
            client.put(f"{path}/result", json=result)
    problem = {"type": "urn:readie:problem:out-of-memory", "title": "", "detail": ""}
    client.put(f"{place(client, memory=1)}/result", json={"outcome": "failed", "problem": problem})
    odd = problem | {"type": "made up"}
    client.put(f"{place(client, memory=1)}/result", json={"outcome": "failed", "problem": odd})
    cancelled = place(client, memory=1).removeprefix("/v1/placements/").partition("-")[0]
    for _ in range(2):
        client.delete(f"/v1/calls/{cancelled}")
    place(client, memory=1, session_id="s")
    client.delete("/v1/sessions/s")
    client.post(f"{place(client, memory=1)}/accept", params={"worker_id": "w"})
    with database.transaction() as connection:
        connection.execute(text("UPDATE leases SET deadline_at = now() - INTERVAL '1 second'"))
    sweep(database, RouterSettings())

    assert counted(scrape(client), "readie_calls_ended_total") == {
        "{outcome=returned}": 1,
        "{outcome=raised}": 1,
        "{outcome=out-of-memory}": 1,
        "{outcome=call-failed}": 1,
        "{outcome=cancelled}": 2,
        "{outcome=call-timeout}": 1,
    }


def test_predictions_are_held_against_what_was_measured(client: httpx.Client) -> None:
    """The seconds to ready of calls that have both, and their ratio."""
    started = {"how": "restored", "generation": None, "checkpoint_id": None}
    answer = client.post("/v1/calls", json=CALL).json()["placement"]
    predicted = answer["predicted_ready"]
    result = RESULT | {"started": started, "phases": {"ready": 2 * predicted}}
    client.put(f"/v1/placements/{answer['placement_id']}/result", json=result)
    client.put(f"{place(client)}/result", json=RESULT)
    samples = scrape(client)

    assert predicted > 0.5
    assert counted(samples, "readie_ready_seconds_count") == {"{which=measured}": 1, "{which=predicted}": 1}
    assert samples["readie_ready_seconds_sum{which=predicted}"] == pytest.approx(predicted)
    assert samples["readie_ready_seconds_sum{which=measured}"] == pytest.approx(2 * predicted)
    assert samples["readie_ready_ratio_sum"] == pytest.approx(2)


@pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
def test_requests_are_counted_by_route_and_status(client: httpx.Client) -> None:
    """Those without a route, too; a path or a method that nobody knows is no label."""
    for method, path in [("GET", "/v1/calls/a"), ("GET", "/v1/calls/b"), ("GET", "/nowhere/secret"), ("ODD", "/ready")]:
        client.request(method, path)
    client.get("/schema")
    samples = scrape(client)

    assert counted(samples, "readie_requests_total") == {
        "{route=reportWorker,status=204}": 1,
        "{route=readCall,status=404}": 2,
        "{route=none,status=404}": 1,
        "{route=none,status=405}": 1,
        "{route=schema,status=200}": 1,
    }


def test_gauges_are_what_the_database_has(client: httpx.Client) -> None:
    """Workers, leases, sandboxes, sessions, calls that wait, and the generation in use."""
    client.put("/v1/workers/x", json=STATUS | {"state": "starting"})
    client.post(f"{place(client, memory=1)}/accept", params={"worker_id": "w"})
    place(client, memory=1, session_id="busy")
    client.put(f"{place(client, memory=1, session_id='idle')}/result", json=RESULT)
    client.delete("/v1/sessions/idle")
    client.put("/v1/workers/w", json=STATUS | {"sandboxes": [{"sandbox_id": "b", "memory": 1}]})
    generation = read(make_worked_example()).generation
    samples = scrape(client)

    gauges = {name: counted(samples, f"readie_{name}") for name in ("workers", "leases", "sandboxes", "sessions")}
    assert gauges == {
        "workers": {"{flavor=cpu,state=ready}": 1, "{flavor=cpu,state=starting}": 1},
        "leases": {"{accepted=yes,flavor=cpu}": 1, "{accepted=no,flavor=cpu}": 1},
        "sandboxes": {"{flavor=cpu}": 1},
        "sessions": {"{state=busy}": 1, "{state=expired}": 1},
    }
    assert samples[f"readie_catalogue_info{{flavor=cpu,generation={generation}}}"] == 1
    assert "readie_calls_waiting" not in samples
    assert samples["readie_database_up"] == 1


def test_what_there_is_none_of_is_zero(client: httpx.Client) -> None:
    """A gauge is there from the first scrape on."""
    said = client.get("/metrics").text

    for line in (
        'readie_workers{flavor="gpu",state="ready"} 0.0',
        'readie_leases{accepted="yes",flavor="cpu"} 0.0',
        'readie_sandboxes{flavor="cpu"} 0.0',
        'readie_sessions{state="busy"} 0.0',
        "readie_calls_waiting 0.0",
    ):
        assert f"\n{line}\n" in said


def test_no_id_or_name_is_a_label(client: httpx.Client) -> None:
    """Neither of calls, functions, workers and sessions, nor addresses."""
    placed = place(client, session_id="my-session")
    said = client.get("/metrics").text

    call_id = placed.removeprefix("/v1/placements/").partition("-")[0]
    assert [word for word in (call_id, "confidential", "my-session", '"w"', "testclient") if word in said] == []


@pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
def test_two_routers_in_one_process_count_apart(client: httpx.Client, database: Database) -> None:
    """There is no global state."""
    with TestClient(create_app(RouterSettings(), database)) as other:
        assert "readie_requests_total{route=reportWorker,status=204}" not in scrape(other)


def test_a_database_that_is_away_leaves_the_counts() -> None:
    """Its gauges are left out, and one says so."""
    away = Database(create_engine("postgresql+psycopg://user@127.0.0.1:1/readie"))
    with TestClient(create_app(RouterSettings(), away)) as client:
        client.get("/health")
        said = client.get("/metrics").text

    assert 'readie_requests_total{route="health",status="200"} 1.0' in said
    assert "readie_database_up 0.0" in said
    assert "readie_workers" not in said


def test_every_metric_is_documented() -> None:
    """docs/metrics.md has a row for each, and no other; it names each label."""
    page = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(readie_\w+)` \|[^|]*\|([^|]*)\|", page, re.MULTILINE))
    families = list(text_string_to_metric_families(render(Metrics(), []).decode()))

    described = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in families
        if not family.name.endswith("_created")  # the library's own
    }
    assert described == set(documented)
    labels = {label for family in families for sample in family.samples for label in sample.labels} - {"le"}
    assert [label for label in labels if not any(f"`{label}`" in cell for cell in documented.values())] == []


def test_prometheus_answers_the_questions_of_the_page(tmp_path: Path) -> None:
    """A real Prometheus takes the page's configuration, reads a router's metrics, and answers each question."""
    if missing := [name for name in ("prometheus", "promtool") if shutil.which(name) is None]:
        if os.environ.get("ALLOW_NO_PROMETHEUS") == "1":
            pytest.skip(f"ALLOW_NO_PROMETHEUS=1, and there is no {missing[0]}")
        pytest.fail(f"There is no {missing[0]}. Install Debian's package prometheus, or set ALLOW_NO_PROMETHEUS=1.")
    scrapes, questions = (
        block.text for block in read_blocks(ROOT / "docs" / "metrics.md") if block.language in {"yaml", "promql"}
    )
    database_url = f"duckdb:///{tmp_path / 'readie.duckdb'}"
    catalogue = read(make_worked_example())
    with closing(open_database(database_url)) as database:
        migrate(database)
        import_catalogue(database, catalogue)
    held = {"generation": catalogue.generation, "checkpoint_ids": ["A", "B"], "restore_fixed": 0.5}
    with serving(DATABASE_URL=database_url, WORKER_TTL="600") as (_, url, _):
        assert ask("PUT", f"{url}/v1/workers/w", json=STATUS | {"generations": [held]}).status_code == 204
        call_once(url)
        address, port = url.partition("//")[2], free_port()
        config = tmp_path / "prometheus.yml"
        config.write_text("global: {scrape_interval: 1s}\n" + scrapes.replace("127.0.0.1:8700", address))
        checked = subprocess.run(["promtool", "check", "config", config], capture_output=True, text=True, check=False)
        linted = subprocess.run(
            ["promtool", "check", "metrics"],
            input=ask("GET", f"{url}/metrics").text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (checked.returncode, linted.returncode) == (0, 0), checked.stderr + linted.stderr
        options = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
        with (tmp_path / "prometheus.log").open("w") as log:
            process = subprocess.Popen(
                ["prometheus", *options, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
            )
        try:
            for question in re.findall(r"^[^#\n].*$", questions, re.MULTILINE):
                wait_for(partial(ask_prometheus, f"http://127.0.0.1:{port}", question, url), 60)
        finally:
            process.kill()
            process.wait()


def call_once(url: str) -> None:
    """A call that is placed and returns, and one that is refused."""
    placement = ask("POST", f"{url}/v1/calls", json=CALL).json()["placement"]
    started = {"how": "restored", "generation": None, "checkpoint_id": None}
    result = RESULT | {"started": started, "phases": {"ready": placement["predicted_ready"]}}
    path = f"{url}/v1/placements/{placement['placement_id']}"
    ask("POST", f"{path}/accept", params={"worker_id": "w"}).raise_for_status()
    ask("PUT", f"{path}/result", json=result).raise_for_status()
    assert ask("POST", f"{url}/v1/calls", json=CALL | {"gpu": True}).status_code == 503


def ask_prometheus(prometheus: str, question: str, router: str) -> list[Any]:
    """The samples that answer a question; none while Prometheus starts. One that is not a number is none.

    A rate is that of what happens between two scrapes, so a call comes first.
    """
    call_once(router)
    try:
        answer = ask("GET", f"{prometheus}/api/v1/query", params={"query": question})
    except httpx.TransportError:
        return []
    if answer.status_code == 503:
        return []
    assert answer.status_code == 200, answer.text
    return [one for one in answer.json()["data"]["result"] if one["value"][1] != "NaN"]
