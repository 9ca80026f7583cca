"""The API (DESIGN §7): every route over the real application, and an answer of the table for whatever goes wrong."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from litestar.testing import TestClient
from sqlalchemy import create_engine, text
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from app import waiting
from app.application import create_app
from app.catalogue import import_catalogue
from app.database import Database, open_database
from app.settings import RouterSettings
from readie import wire
from readie.errors import BadSetting, problems
from readie.settings import Bytes
from tests.catalogues import make_worked_example, read
from tests.sandboxes import wait_for

GIB = 2**30
MSGPACK = "application/vnd.msgpack"
CALL: dict[str, Any] = {"payload": "ZnVuY3Rpb24=", "python": "3.11", "function": "train", "modules": ["numpy"]}
STATUS: dict[str, Any] = {
    "flavor": "cpu",
    "state": "ready",
    "python": "3.11.7",
    "runtime": "fork",
    "memory_total": 4 * GIB,
}
RESULT: dict[str, Any] = {"outcome": "returned", "payload": "dmFsdWU="}

Serve = Callable[..., AbstractContextManager[httpx.Client]]


@pytest.fixture
def serve(database: Database) -> Serve:
    """Starts the application with some settings changed."""

    @contextmanager
    def start(**changes: Any) -> Iterator[httpx.Client]:
        with TestClient(create_app(RouterSettings(**changes), database), raise_server_exceptions=False) as client:
            yield client

    return start


@pytest.fixture(scope="module")
def one_database(duckdb_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A database for all that never gets as far as one."""
    path = tmp_path_factory.mktemp("api") / "readie.duckdb"
    shutil.copyfile(duckdb_template, path)
    opened = open_database(f"duckdb:///{path}")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def refusing(one_database: Database) -> Iterator[httpx.Client]:
    """A client whose every request is refused; a cpu worker is ready."""
    app = create_app(RouterSettings(worker_ttl=3600), one_database)
    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.put("/v1/workers/w", json=STATUS).status_code == 204
        yield client
        assert client.get("/v1/calls").json() == []
        assert [view["worker_id"] for view in client.get("/v1/workers").json()] == ["w"]


@pytest.fixture
def client(serve: Serve) -> Iterator[httpx.Client]:
    """A client of an application with the default settings."""
    with serve() as started:
        yield started


@pytest.fixture
def worker(client: httpx.Client) -> str:
    """The id of a worker that is ready."""
    assert client.put("/v1/workers/w", json=STATUS).status_code == 204
    return "w"


def place(client: httpx.Client, **changes: Any) -> dict[str, Any]:
    answer = client.post("/v1/calls", json=CALL | changes)
    assert answer.status_code == 201, answer.text
    placed: dict[str, Any] = answer.json()
    return placed


def problem(answer: httpx.Response) -> str:
    """The slug of a problem document, which has all that one needs."""
    assert answer.headers["content-type"] == "application/problem+json"
    document = msgspec.json.decode(answer.content, type=wire.Problem, strict=True)
    assert document.status == answer.status_code
    slug = document.type.removeprefix("urn:readie:problem:")
    assert document.title == problems()[slug].title
    return slug


# ---- a call from its client to its agent and back ----


def test_a_call_goes_to_its_agent_and_its_result_back(client: httpx.Client, worker: str) -> None:
    """Placed, fetched, accepted, printing, ended, read: each step is seen by the other side."""
    placed = place(client, cold=True)
    call, placement = f"/v1/calls/{placed['call_id']}", f"/v1/placements/{placed['placement']['placement_id']}"

    assert placed["placement"]["worker_id"] == worker
    assert client.get(call).json()["state"] == "placed"
    (assignment,) = client.get(f"/v1/workers/{worker}/placements").json()["run"]
    assert (assignment["payload"], assignment["modules"]) == (CALL["payload"], ["numpy"])
    assert client.post(f"{placement}/accept", params={"worker_id": worker}).status_code == 204
    assert client.get(call).json()["state"] == "accepted"
    piece = {"sequence": 0, "stream": "stdout", "text": "hello"}
    assert client.post(f"{placement}/output", json=piece).status_code == 204
    assert client.put(f"{placement}/result", json=RESULT).status_code == 200
    status = client.get(call).json()
    assert (status["state"], status["result"]["payload"]) == ("finished", RESULT["payload"])
    assert status["output"] == [{"stream": "stdout", "text": "hello"}]
    assert [view["state"] for view in client.get("/v1/calls").json()] == ["finished"]


def test_the_answer_to_a_result_has_what_to_do_next(client: httpx.Client, worker: str) -> None:
    """For the agent that asks for it: it need not fetch."""
    first, second = (place(client, cold=True)["placement"]["placement_id"] for _ in range(2))
    client.post(f"/v1/placements/{first}/accept", params={"worker_id": worker})
    plain = client.put(f"/v1/placements/{first}/result", json=RESULT)
    asked = client.put(f"/v1/placements/{first}/result", json=RESULT, params={"worker_id": worker})
    stranger = client.put(f"/v1/placements/{first}/result", json=RESULT, params={"worker_id": "not-reported"})

    assert plain.json() == stranger.json() == {"run": [], "cancel": [], "end_sessions": []}
    assert [order["placement_id"] for order in asked.json()["run"]] == [second]


def test_messagepack_both_ways(client: httpx.Client, worker: str) -> None:
    """A body and an answer may each be MessagePack, in which a payload is plain bytes."""
    body = msgspec.msgpack.encode(wire.CallRequest(payload=b"\x00\xff", python="3.11"))
    answer = client.post("/v1/calls", content=body, headers={"Content-Type": MSGPACK, "Accept": MSGPACK})

    assert answer.headers["content-type"].startswith(MSGPACK)
    placed = msgspec.msgpack.decode(answer.content, type=wire.CallPlaced)
    assert placed.placement.worker_id == worker
    accepts = {"Accept": f"application/x-msgpack, {MSGPACK};q=0.5, application/problem+json"}
    fetched = client.get(f"/v1/workers/{worker}/placements", headers=accepts)
    assert fetched.headers["content-type"].startswith("application/x-msgpack")
    assert msgspec.msgpack.decode(fetched.content, type=wire.Orders).run[0].payload == b"\x00\xff"


def test_an_agent_that_waits_is_woken_by_a_call(
    client: httpx.Client, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long poll answers as soon as there is something to do."""
    monkeypatch.setattr(waiting, "DATABASE_POLL", 600.0)  # it is woken, and does not look again
    answers: list[httpx.Response] = []

    def fetch() -> None:
        answers.append(client.get(f"/v1/workers/{worker}/placements", params={"wait": 50}))

    agent = threading.Thread(target=fetch)
    agent.start()
    time.sleep(0.3)
    assert not answers
    place(client)
    agent.join(40)

    assert len(answers[0].json()["run"]) == 1


def test_a_client_that_waits_is_woken_by_output_and_by_the_end(client: httpx.Client, worker: str) -> None:
    """With `seen` the poll answers at the next piece of output; without, at the end of the call."""
    placed = place(client)
    call, placement = f"/v1/calls/{placed['call_id']}", f"/v1/placements/{placed['placement']['placement_id']}"
    client.post(f"{placement}/accept", params={"worker_id": worker})
    client.post(f"{placement}/output", json={"sequence": 0, "stream": "stdout", "text": "a"})
    answers: dict[str, Any] = {}

    def follow(name: str, **parameters: Any) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: answers.update({name: client.get(call, params={"wait": 30, **parameters}).json()})
        )
        thread.start()
        return thread

    output, end = follow("output", seen=1), follow("end")
    time.sleep(0.3)
    assert not answers
    client.post(f"{placement}/output", json={"sequence": 1, "stream": "stderr", "text": "b"})
    output.join(10)
    assert (answers["output"]["output"], answers["output"]["output_from"]) == ([{"stream": "stderr", "text": "b"}], 1)
    assert "end" not in answers
    client.put(f"{placement}/result", json=RESULT)
    end.join(10)
    assert (answers["end"]["state"], len(answers["end"]["output"])) == ("finished", 2)


def test_waiting_ends_in_time(client: httpx.Client, worker: str) -> None:
    """A long poll to which nothing happens answers what there is when its time is over."""
    started_at = time.monotonic()
    answer = client.get(f"/v1/workers/{worker}/placements", params={"wait": 0.3})

    assert answer.json() == {"run": [], "cancel": [], "end_sessions": []}
    assert time.monotonic() - started_at >= 0.3


def test_a_call_waits_for_room_as_long_as_its_queue_timeout(client: httpx.Client, worker: str) -> None:
    """A call with queue_timeout is placed when another one ends; without one it is refused at once."""
    first = place(client, memory=3 * GIB)
    refused = client.post("/v1/calls", json=CALL | {"memory": GIB})
    assert problem(refused) == "no-capacity"
    assert refused.headers["retry-after"] == "1"
    answers: list[httpx.Response] = []
    queued = threading.Thread(
        target=lambda: answers.append(client.post("/v1/calls", json=CALL | {"memory": GIB, "queue_timeout": 30}))
    )
    queued.start()
    time.sleep(0.3)
    assert not answers
    client.put(f"/v1/placements/{first['placement']['placement_id']}/result", json=RESULT)
    queued.join(10)

    assert [answer.status_code for answer in answers] == [201]


def test_a_queue_timeout_ends(client: httpx.Client) -> None:
    """A call for which no worker comes in time is refused as no-workers."""
    started_at = time.monotonic()

    assert problem(client.post("/v1/calls", json=CALL | {"queue_timeout": 0.3})) == "no-workers"
    assert time.monotonic() - started_at >= 0.3


def test_cancelling(client: httpx.Client, worker: str) -> None:
    """A cancelled call is cancelled at once; to cancel it again is fine."""
    call = f"/v1/calls/{place(client)['call_id']}"

    assert [client.delete(call).status_code for _ in range(2)] == [204, 204]
    status = client.get(call).json()
    assert (status["state"], status["result"]["problem"]["type"]) == ("cancelled", "urn:readie:problem:call-cancelled")
    assert client.get(f"/v1/workers/{worker}/placements").json()["run"] == []


def test_a_result_that_was_read_is_marked(client: httpx.Client, worker: str, database: Database) -> None:
    """Its hour begins with the first reading."""
    placed = place(client)
    client.put(f"/v1/placements/{placed['placement']['placement_id']}/result", json=RESULT)
    call = f"/v1/calls/{placed['call_id']}"

    def read_at() -> Any:
        with database.reading() as connection:
            return connection.execute(text("SELECT read_at FROM calls")).scalar_one()

    assert read_at() is None
    client.get(call)
    wait_for(lambda: read_at() is not None)  # written down at the next sweep
    first = read_at()
    client.get(call)
    assert read_at() == first


def test_a_result_that_was_dropped_is_gone(client: httpx.Client, worker: str, database: Database) -> None:
    """After its time a call's result is an unknown call, not an empty one."""
    placed = place(client)
    client.put(f"/v1/placements/{placed['placement']['placement_id']}/result", json=RESULT)
    with database.transaction() as connection:
        connection.execute(text("DELETE FROM call_results"))

    assert problem(client.get(f"/v1/calls/{placed['call_id']}")) == "unknown-call"


def test_a_sweep_runs_beside_the_requests(serve: Serve, database: Database) -> None:
    """The application evicts silent workers by itself."""
    with serve(sweep_interval=0.1, worker_ttl=2.0) as client:
        client.put("/v1/workers/w", json=STATUS)
        assert len(client.get("/v1/workers").json()) == 1
        deadline = time.monotonic() + 20
        while client.get("/v1/workers").json() and time.monotonic() < deadline:
            time.sleep(0.05)

        assert client.get("/v1/workers").json() == []


@pytest.mark.parametrize("accept", ["application/json", MSGPACK, "*/*", "text/html;q=nonsense", ""])
def test_an_answer_that_says_nothing_is_empty(client: httpx.Client, accept: str) -> None:
    """204 has no body, whatever was asked for."""
    answer = client.put("/v1/workers/w", json=STATUS, headers={"Accept": accept})

    assert (answer.status_code, answer.content) == (204, b"")


# ---- sessions ----


def end_call(client: httpx.Client, placed: dict[str, Any], **result: Any) -> None:
    path = f"/v1/placements/{placed['placement']['placement_id']}/result"
    assert client.put(path, json=RESULT | result).status_code == 200


def in_threads(client: httpx.Client, *tasks: Callable[[], Any], begun: bool = True) -> list[threading.Thread]:
    """Starts each in its own thread, when the one before it waits in the only session: `begun`, if that has a call."""
    threads = [threading.Thread(target=task) for task in tasks]
    for number, thread in enumerate(threads, 1):
        thread.start()
        if begun:
            wait_for(lambda: sessions(client)[0]["waiting"] == number)  # noqa: B023 - it is waited for here
        else:
            wait_for(lambda: f"readie_calls_waiting {number}.0" in client.get("/metrics").text)  # noqa: B023
    return threads


def sessions(client: httpx.Client, **parameters: Any) -> list[dict[str, Any]]:
    answer = client.get("/v1/sessions", params=parameters)
    assert answer.status_code == 200, answer.text
    listed: list[dict[str, Any]] = answer.json()
    return listed


def test_a_session_from_its_first_call_to_its_end(client: httpx.Client, worker: str) -> None:
    """The second call is told to be in the sandbox that the first one left; the end is ordered until it is reported."""
    first = place(client, session_id="s")
    client.post(f"/v1/placements/{first['placement']['placement_id']}/accept", params={"worker_id": worker})
    end_call(client, first)
    client.put("/v1/workers/w", json=STATUS | {"sandboxes": [{"sandbox_id": "x", "session_id": "s", "memory": GIB}]})
    second = place(client, session_id="s")

    assert (second["placement"]["reason"], second["placement"]["checkpoint_id"]) == ("session", None)
    (assignment,) = client.get(f"/v1/workers/{worker}/placements").json()["run"]
    assert (assignment["session_id"], assignment["continues"]) == ("s", True)
    end_call(client, second)
    assert client.delete("/v1/sessions/s").status_code == 204
    assert client.get(f"/v1/workers/{worker}/placements").json()["end_sessions"] == ["s"]
    client.put("/v1/workers/w", json=STATUS)
    assert client.get(f"/v1/workers/{worker}/placements").json()["end_sessions"] == []
    refused = client.post("/v1/calls", json=CALL | {"session_id": "s"})
    assert (refused.status_code, problem(refused)) == (410, "session-expired")


def test_calls_of_a_session_wait_for_their_turn(
    client: httpx.Client, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is placed as soon as the one before it has ended, in the order of arrival."""
    monkeypatch.setattr(waiting, "DATABASE_POLL", 600.0)  # they are woken, not found at the next look
    running = place(client, session_id="s")
    placed: list[tuple[str, dict[str, Any]]] = []
    threads = in_threads(
        client, *(lambda name=name: placed.append((name, place(client, session_id="s"))) for name in "abc")
    )
    assert placed == []
    (view,) = sessions(client)
    assert (view["state"], view["call_id"], view["waiting"]) == ("busy", running["call_id"], 3)
    for turns in ("a", "ab", "abc"):
        ended_at = time.monotonic()
        end_call(client, placed[-1][1] if placed else running)
        while len(placed) < len(turns) and time.monotonic() - ended_at < 20:
            time.sleep(0.01)
        assert "".join(name for name, _ in placed) == turns
    for thread in threads:
        thread.join(10)


def test_waiting_for_a_turn_ends(serve: Serve) -> None:
    """After SESSION_WAIT_TIMEOUT the call is refused as session-busy, and nobody waits behind it."""
    with serve(session_wait_timeout=0.5) as client:
        client.put("/v1/workers/w", json=STATUS)
        running = place(client, session_id="s")
        started_at = time.monotonic()
        refused = client.post("/v1/calls", json=CALL | {"session_id": "s"})

        assert time.monotonic() - started_at >= 0.5
        assert (refused.status_code, problem(refused)) == (503, "session-busy")
        assert refused.headers["retry-after"] == "1"
        assert sessions(client)[0]["waiting"] == 0
        end_call(client, running)
        assert place(client, session_id="s")["placement"]["reason"] == "session"


def test_a_call_that_begins_a_session_waits_for_room(client: httpx.Client, worker: str) -> None:
    """As long as its queue_timeout; one of the same session that comes later waits behind it."""
    full = place(client, memory=3 * GIB)
    assert problem(client.post("/v1/calls", json=CALL | {"session_id": "s"})) == "no-capacity"
    placed: list[str] = []
    threads = in_threads(
        client,
        lambda: placed.append(place(client, session_id="s", function="first", queue_timeout=30)["call_id"]),
        lambda: placed.append(place(client, session_id="s", function="second")["call_id"]),
        begun=False,
    )
    assert placed == []
    end_call(client, full)
    threads[0].join(10)
    client.delete(f"/v1/calls/{placed[0]}")
    threads[1].join(10)

    assert [view["function"] for view in client.get("/v1/calls").json()[:2]] == ["second", "first"]


def test_who_waits_for_a_session_that_ends_is_told(client: httpx.Client, worker: str) -> None:
    """Its call is cancelled, and those that wait for their turn are refused as session-expired."""
    running = place(client, session_id="s")
    refused: list[str] = []
    (thread,) = in_threads(
        client, lambda: refused.append(problem(client.post("/v1/calls", json=CALL | {"session_id": "s"})))
    )
    assert client.delete("/v1/sessions/s").status_code == 204
    thread.join(10)

    assert refused == ["session-expired"]
    assert client.get(f"/v1/calls/{running['call_id']}").json()["state"] == "cancelled"
    assert client.delete("/v1/sessions/s").status_code == 204


def test_a_demand_that_a_session_cannot_meet(client: httpx.Client, worker: str) -> None:
    """It is refused, with what is in the way."""
    end_call(client, place(client, session_id="s"))
    refused = client.post("/v1/calls", json=CALL | {"session_id": "s", "gpu": True})

    assert (refused.status_code, problem(refused)) == (409, "session-conflict")
    assert refused.json()["detail"] == "session s: it has no GPU"


def test_the_list_of_sessions(client: httpx.Client, worker: str) -> None:
    """The latest first, by worker and state, some at a time."""
    client.put("/v1/workers/x", json=STATUS | {"memory_total": 2 * GIB})
    for session_id in ("a", "b", "c"):
        placed = place(client, session_id=session_id, memory=1 if session_id == "c" else GIB)
        if session_id != "c":
            end_call(client, placed)
    client.delete("/v1/sessions/a")

    def listed(**parameters: Any) -> list[str]:
        return [view["session_id"] for view in sessions(client, **parameters)]

    assert listed() == ["c", "b", "a"]
    assert [listed(state=state) for state in ("busy", "idle", "expired")] == [["c"], ["b"], ["a"]]
    assert {view["worker_id"] for view in sessions(client)} == {"w", "x"}
    assert listed(worker_id="w") + listed(worker_id="x") in (["c", "a", "b"], ["a", "c", "b"], ["b", "c", "a"])
    assert listed(limit=1, offset=1) == ["b"]
    (idle,) = sessions(client, state="idle")
    assert (idle["memory"], idle["call_id"], idle["waiting"], idle["expired_at"]) == (GIB, None, 0, None)


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_two_routers_share_the_turns_of_a_session(database_url: str, database: Database, kind: str) -> None:
    """Whoever asks which router: calls of one session go to one worker, one at a time, in the order of arrival."""
    other = open_database(database_url)
    apps = [create_app(RouterSettings(), each) for each in (database, other)]
    with TestClient(apps[0]) as first, TestClient(apps[1]) as second:
        for worker_id in ("w", "x"):
            first.put(f"/v1/workers/{worker_id}", json=STATUS)
        running = place(first, session_id="s")
        placed: list[tuple[str, dict[str, Any]]] = []
        threads = in_threads(
            first,
            lambda: placed.append(("a", place(second, session_id="s"))),
            lambda: placed.append(("b", place(first, session_id="s"))),
        )
        assert placed == []
        end_call(first, running)  # the first router wakes b, whose turn it is not
        threads[0].join(10)
        assert [name for name, _ in placed] == ["a"]
        end_call(second, placed[0][1])
        threads[1].join(10)
        assert {each["placement"]["worker_id"] for _, each in placed} == {running["placement"]["worker_id"]}
    other.close()


# ---- lists ----


def test_the_list_of_workers(client: httpx.Client, worker: str) -> None:
    """A worker is listed with what it reported and what is taken of it."""
    held = {"generation": "a" * 64, "checkpoint_ids": ["checkpoint_1"], "restore_fixed": 0.02, "cold_fixed": 0.1}
    client.put(
        "/v1/workers/gpu",
        json=STATUS
        | {
            "flavor": "gpu",
            "gpu_total": 16 * GIB,
            "generations": [held],
            "sandboxes": [{"sandbox_id": "s", "memory": GIB, "gpu_memory": 3 * GIB}],
        },
    )
    place(client, memory=2 * GIB)

    gpu, cpu = client.get("/v1/workers").json()
    assert (gpu["worker_id"], gpu["memory_used"], gpu["gpu_used"], gpu["sandboxes"]) == ("gpu", GIB, 3 * GIB, 1)
    assert gpu["generations"] == [held]
    assert (cpu["worker_id"], cpu["memory_reserved"], cpu["in_flight"]) == ("w", 2 * GIB, 1)


def test_lists_of_calls_are_filtered_and_paged(client: httpx.Client, worker: str) -> None:
    """By state, the latest first, some at a time."""
    ids = [place(client, memory=1)["call_id"] for _ in range(3)]
    client.delete(f"/v1/calls/{ids[1]}")

    def listed(**parameters: Any) -> list[str]:
        return [view["call_id"] for view in client.get("/v1/calls", params=parameters).json()]

    assert listed() == ids[::-1]
    assert listed(state="cancelled") == [ids[1]]
    assert listed(limit=1, offset=1) == [ids[1]]


def test_catalogues_items_and_checkpoints(client: httpx.Client, database: Database) -> None:
    """The active catalogue of a flavor can be looked into."""
    catalogue = read(make_worked_example())
    import_catalogue(database, catalogue)

    (summary,) = client.get("/v1/catalogues").json()
    assert summary == client.get("/v1/catalogues/cpu").json()
    assert (summary["sha256"], summary["active"], summary["items"]) == (catalogue.sha256, True, 3)
    item = client.get("/v1/catalogues/cpu/items/pandas").json()
    assert (item["load_time"], item["closure"], item["closure_load_time"]) == (0.5, ["numpy", "pandas"], 0.7)
    checkpoint = client.get("/v1/catalogues/cpu/checkpoints/B").json()
    assert (checkpoint["size_mb"], checkpoint["items"]) == (80, ["numpy", "pandas"])
    assert problem(client.get("/v1/catalogues/cpu/items/a/b")) == "unknown-item"
    assert problem(client.get("/v1/catalogues/cpu/items/%00")) == "bad-request"
    unknown = client.get("/v1/catalogues/cpu/checkpoints/D")
    assert problem(unknown) == "unknown-checkpoint"
    assert "A, B, C" in unknown.json()["detail"]


def test_explain(client: httpx.Client, database: Database) -> None:
    """The ranking, with what the winner lacks; an unknown catalogue or checkpoint is an error."""
    import_catalogue(database, read(make_worked_example()))
    answer = client.post("/v1/explain", json={"modules": ["pandas"]}).json()

    assert [(option["checkpoint_id"], option["total"]) for option in answer["options"]] == [
        ("B", 0.48),
        ("A", 0.542),
        (None, 0.7),
        ("C", 1.2),
    ]
    assert answer["options"][0]["items"] == []
    assert client.post("/v1/explain", json={"modules": ["pandas"]}).json() == answer
    for changes, slug in [({"catalogue": "0" * 64}, "unknown-catalogue"), ({"items_of": "D"}, "unknown-checkpoint")]:
        assert problem(client.post("/v1/explain", json={"modules": []} | changes)) == slug


def test_an_explanation_that_is_remembered_is_not_worked_out_again(
    client: httpx.Client, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again, in either format, only the active catalogue is looked up; another one has another answer."""
    import_catalogue(database, read(make_worked_example()))
    first = client.post("/v1/explain", json={"modules": ["pandas"]})
    with monkeypatch.context() as patched:
        patched.setattr("app.api.calls.explain_calls", lambda *_: pytest.fail("worked out again"))
        again = client.post("/v1/explain", json={"modules": ["pandas"]})
        packed = client.post("/v1/explain", json={"modules": ["pandas"]}, headers={"Accept": MSGPACK})

    assert again.content == first.content
    assert msgspec.msgpack.decode(packed.content) == first.json()
    import_catalogue(database, read(make_worked_example() | {"alpha": 0.02}))
    assert client.post("/v1/explain", json={"modules": ["pandas"]}).json()["options"][0]["checkpoint_id"] == "A"


def test_health_and_readiness(client: httpx.Client) -> None:
    """The process says that it lives, and that its database can be used."""
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ok"}


def test_not_ready_when_the_schema_is_behind(client: httpx.Client, database: Database) -> None:
    """A database that another version has left behind is named, and nothing else is answered as if it were fine."""
    with database.transaction() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))

    answer = client.get("/ready")
    assert (answer.status_code, problem(answer)) == (503, "database-behind")


def test_the_openapi_document(refusing: httpx.Client) -> None:
    """/schema describes every route by an id of its own, and the types of the bodies."""
    document = refusing.get("/schema").json()
    operations = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]

    assert len(set(operations)) == len(operations) >= 17
    body = document["paths"]["/v1/calls"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert set(CALL) < set(document["components"]["schemas"][body.rpartition("/")[2]]["properties"])


def test_the_openapi_document_says_what_needs_a_token(refusing: httpx.Client) -> None:
    """All but what operators ask."""
    paths = refusing.get("/schema").json()["paths"]
    open_to_all = [path for path, methods in paths.items() for each in methods.values() if each.get("security") == [{}]]

    assert open_to_all == ["/health", "/ready", "/metrics"]


def test_the_openapi_document_says_what_is_refused(refusing: httpx.Client) -> None:
    """Fields that a request does not have, where the router does not take them, and what is no flavor."""
    document = refusing.get("/schema").json()
    schemas = {name.rpartition("_")[2]: schema for name, schema in document["components"]["schemas"].items()}
    parameters = [
        parameter
        for path in document["paths"].values()
        for operation in path.values()
        for parameter in operation.get("parameters", ())
        if parameter["name"] == "flavor"
    ]

    assert schemas["CallRequest"]["additionalProperties"] is False
    assert "additionalProperties" not in schemas["CallPlaced"]
    assert len(parameters) == 7
    assert [parameter["schema"]["enum"] for parameter in parameters] == [["cpu", "gpu"]] * 7


# ---- whatever goes wrong ----


@pytest.mark.parametrize(
    ("changes", "slug"),
    [
        ({"gpu": True}, "no-capacity"),
        ({"memory": 5 * GIB}, "no-capacity"),
        ({"memory": 2, "max_memory": 1}, "bad-budget"),
        ({"packages": ["numpy=="]}, "bad-requirement"),
        ({"checkpoint_id": "checkpoint_9"}, "unknown-checkpoint"),
        ({"session_id": "a b"}, "bad-request"),
        ({"memory": "1Gi"}, "bad-request"),
        ({"memory": 0}, "bad-request"),
        ({"memory": 2**63}, "bad-request"),
        ({"memory": 1.5}, "bad-request"),
        ({"memory": True}, "bad-request"),
        ({"timeout": 0}, "bad-request"),
        ({"timeout": 1e10}, "bad-request"),
        ({"queue_timeout": -1}, "bad-request"),
        ({"modules": ["a\0b"]}, "bad-request"),
        ({"modules": ["x" * 1025]}, "bad-request"),
        ({"modules": ["x"] * 10_001}, "bad-request"),
        ({"modules": "numpy"}, "bad-request"),
        ({"function": "\0"}, "bad-request"),
        ({"python": "2.7"}, "bad-request"),
        ({"python": None}, "bad-request"),
        ({"python": "3.11\n"}, "bad-request"),
        ({"packages": ["numpy; 'a' in extras"]}, "bad-requirement"),
        ({"payload": "not base64!"}, "bad-request"),
        ({"misspelt": 1}, "bad-request"),
    ],
)
def test_calls_that_are_refused(refusing: httpx.Client, changes: dict[str, Any], slug: str) -> None:
    """A call that cannot be placed is a problem document of the table."""
    assert problem(refusing.post("/v1/calls", json=CALL | changes)) == slug


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"payload":"","python":"3.11","modules":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"payload":"","python":"3.11","unknown":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b'{"payload":"","python":"3.11","function":"\\ud800"}',
        b'{"payload":"","python":"3.11","timeout":NaN}',
        b'{"payload":"","python":"3.11","timeout":1e999}',
        b'{"payload":"","python":"3.11","memory":' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: f"{len(body)} bytes {body[:20]!r}",
)
def test_bodies_that_are_no_call(refusing: httpx.Client, body: bytes) -> None:
    """Whatever the bytes, the answer is a problem document, and the application goes on."""
    headers = {"Content-Type": "application/json"}

    assert problem(refusing.post("/v1/calls", content=body, headers=headers)) == "bad-request"
    assert refusing.get("/health").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000 + b"\xc0",
        b"\x81\xa1x" * 50_000 + b"\xc0",
        b"\x81\xa8function\xa3\xed\xa0\x80",
        msgspec.msgpack.encode({"payload": b"", "python": "3.11", "timeout": float("nan")}),
    ],
    ids=lambda body: f"{len(body)} bytes {body[:12]!r}",
)
def test_messagepack_that_is_no_call(refusing: httpx.Client, body: bytes) -> None:
    """The same for MessagePack."""
    assert problem(refusing.post("/v1/calls", content=body, headers={"Content-Type": MSGPACK})) == "bad-request"


def test_a_body_of_another_type(refusing: httpx.Client) -> None:
    """What is neither JSON nor MessagePack is refused, with what is served."""
    answer = refusing.post("/v1/calls", content=b"a=b", headers={"Content-Type": "text/plain"})

    assert problem(answer) == "bad-request"
    assert "application/json" in answer.json()["way_out"]


def test_payloads_that_are_too_large(serve: Serve) -> None:
    """MAX_PAYLOAD is the limit for what calls send, and for what comes back."""
    with serve(max_payload=Bytes(1000)) as client:
        client.put("/v1/workers/w", json=STATUS)
        body = wire.CallRequest(payload=b"x" * 1001, python="3.11")

        assert problem(client.post("/v1/calls", content=msgspec.json.encode(body))) == "payload-too-large"
        placed = place(client)
        big = wire.Result(outcome="returned", payload=b"x" * 1001)
        answer = client.put(
            f"/v1/placements/{placed['placement']['placement_id']}/result", content=msgspec.json.encode(big)
        )
        assert answer.status_code == 200
        result = client.get(f"/v1/calls/{placed['call_id']}").json()["result"]
        assert (result["outcome"], result["problem"]["type"]) == ("failed", "urn:readie:problem:result-too-large")


def test_bodies_that_are_too_large(serve: Serve) -> None:
    """A body that no call can have is refused before it is read to its end."""
    with serve(max_payload=Bytes(1000)) as client:
        answer = client.post("/v1/calls", content=b"x" * (17 * 1024 * 1024))

        assert (answer.status_code, problem(answer)) == (413, "payload-too-large")


@pytest.mark.parametrize(
    ("method", "path", "slug"),
    [
        ("GET", "/nowhere", "not-found"),
        ("GET", "/schema/nope", "not-found"),
        ("GET", "/schema/nope.json", "not-found"),
        ("GET", "/v1/calls/nonsense", "unknown-call"),
        ("DELETE", "/v1/calls/nonsense", "unknown-call"),
        ("DELETE", "/v1/sessions/nonsense", "unknown-session"),
        ("DELETE", "/v1/sessions/%00", "bad-request"),
        ("GET", "/v1/sessions?state=lost", "bad-request"),
        ("GET", "/v1/sessions?worker_id=a%00b", "bad-request"),
        ("GET", "/v1/calls/%00", "bad-request"),
        ("GET", "/v1/calls/" + "x" * 1025, "bad-request"),
        ("GET", "/v1/catalogues/cpu/items/" + "x/" * 1024, "bad-request"),
        ("GET", "/v1/calls/nonsense?wait=61", "bad-request"),
        ("GET", "/v1/calls/nonsense?wait=nan", "bad-request"),
        ("GET", "/v1/calls/nonsense?seen=-1", "bad-request"),
        ("GET", "/v1/calls?state=lost", "bad-request"),
        ("GET", "/v1/calls?limit=0", "bad-request"),
        ("GET", "/v1/calls?offset=99999999999999999999", "bad-request"),
        ("PATCH", "/v1/calls", "method-not-allowed"),
        ("GET", "/v1/workers/stranger/placements", "unknown-worker"),
        ("POST", "/v1/placements/nonsense-1/accept?worker_id=w", "unknown-placement"),
        ("POST", "/v1/placements/nonsense-1/accept", "bad-request"),
        ("POST", "/v1/placements/nonsense-1/accept?worker_id=%00", "bad-request"),
        ("GET", "/v1/catalogues/tpu", "bad-flavor"),
        ("GET", "/v1/catalogues/cpu", "unknown-catalogue"),
        ("GET", "/v1/catalogues/cpu/items/numpy", "unknown-catalogue"),
        ("GET", "/v1/catalogues/cpu/checkpoints/checkpoint_1", "unknown-catalogue"),
    ],
)
def test_paths_that_lead_nowhere(refusing: httpx.Client, method: str, path: str, slug: str) -> None:
    """Unknown routes, methods and ids, and parameters that are out of range, are problem documents too."""
    assert problem(refusing.request(method, path)) == slug


def test_a_parameter_that_is_refused_is_called_as_it_was_sent(refusing: httpx.Client) -> None:
    """The query has `state`, whatever it is called inside."""
    answer = refusing.get("/v1/calls", params={"state": "lost"})

    assert answer.json()["detail"].startswith("state: Invalid enum value 'lost'")


@pytest.mark.parametrize(
    ("changes", "slug"),
    [
        ({"flavor": "tpu"}, "bad-flavor"),
        ({"state": "busy"}, "bad-request"),
        ({"memory_total": -1}, "bad-request"),
        ({"python": "\0"}, "bad-request"),
        ({"markers": {"a": "\0"}}, "bad-request"),
        ({"markers": {"a": "x" * 1025}}, "bad-request"),
        ({"markers": {str(number): "" for number in range(101)}}, "bad-request"),
        ({"python": "x" * 1025}, "bad-request"),
        ({"incarnation": "x" * 1025}, "bad-request"),
        ({"gpu_total": GIB}, "bad-request"),
        ({"generations": [{"generation": "short", "checkpoint_ids": []}]}, "bad-request"),
        ({"generations": [{"generation": "0" * 64 + "\n", "checkpoint_ids": []}]}, "bad-request"),
        ({"sandboxes": [{"sandbox_id": "s", "memory": 1}] * 2}, "bad-request"),
    ],
)
def test_reports_that_are_refused(refusing: httpx.Client, changes: dict[str, Any], slug: str) -> None:
    """A report with something wrong in it changes nothing."""
    assert problem(refusing.put("/v1/workers/other", json=STATUS | changes)) == slug


@pytest.mark.parametrize(
    "markers",
    [
        b'{"a": "b\\u0000c"}',
        b'{"b\\u0000c": "a"}',
        b'{"a": "\\ud800"}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": "\xff"}',
    ],
)
def test_markers_that_no_database_could_keep_are_refused(refusing: httpx.Client, markers: bytes) -> None:
    """K20: NUL, lone surrogates, numbers that are none and other encodings never get as far as SQL."""
    content = msgspec.json.encode(STATUS)[:-1] + b', "markers": ' + markers + b"}"
    answer = refusing.put("/v1/workers/other", content=content, headers={"Content-Type": "application/json"})

    assert problem(answer) == "bad-request"


@pytest.mark.parametrize("worker_id", ["a b", "-a", "x" * 129, "ü", "a%0A"])
def test_worker_ids_that_are_refused(refusing: httpx.Client, worker_id: str) -> None:
    """A worker's id is letters, digits and . _ : - of ASCII."""
    assert problem(refusing.put(f"/v1/workers/{worker_id}", json=STATUS)) == "bad-request"


def test_results_with_numbers_that_are_none(client: httpx.Client, worker: str) -> None:
    """What an agent measured is finite."""
    placed = place(client)
    result = {"outcome": "returned", "payload": b"", "phases": {"ready": float("inf")}}
    answer = client.put(
        f"/v1/placements/{placed['placement']['placement_id']}/result",
        content=msgspec.msgpack.encode(result),
        headers={"Content-Type": MSGPACK},
    )

    assert problem(answer) == "bad-request"


@pytest.mark.parametrize("type_", ["urn:readie:problem:made-up", "\0", "", "x" * 5000])
def test_a_problem_that_is_not_in_the_table(client: httpx.Client, worker: str, type_: str) -> None:
    """An agent's own kind of failure is one, and reaches the client as it was sent."""
    placed = place(client)
    odd = {"type": type_, "title": "odd\0", "detail": "\0"}
    path = f"/v1/placements/{placed['placement']['placement_id']}/result"

    huge = odd | {"status": 2**64}
    assert problem(client.put(path, json={"outcome": "failed", "problem": huge})) == "bad-request"
    assert client.put(path, json={"outcome": "failed", "problem": odd}).status_code == 200
    status = client.get(f"/v1/calls/{placed['call_id']}").json()
    assert (status["state"], status["result"]["problem"]["type"]) == ("failed", type_)


def test_a_request_without_a_body_is_told_so(refusing: httpx.Client) -> None:
    """Neither as JSON nor as MessagePack is nothing a call."""
    for headers in ({}, {"Content-Type": MSGPACK}):
        assert refusing.post("/v1/calls", headers=headers).json()["detail"] == "the request has no body"


def test_faults_of_the_application_say_nothing_of_its_inside(serve: Serve, database: Database) -> None:
    """An unexpected fault is answered without internals; the log has it, under the id in the answer."""
    with serve(sweep_interval=3600) as client, capture_logs([merge_contextvars]) as logged:
        time.sleep(0.2)  # the first sweep is over
        with database.transaction() as connection:
            connection.execute(text("ALTER TABLE workers RENAME TO elsewhere"))
        answer = client.get("/v1/workers")

    assert (answer.status_code, problem(answer)) == (500, "internal")
    assert answer.json()["detail"] == ""
    (entry,) = (entry for entry in logged if entry["event"] == "request failed")
    assert answer.json()["instance"] == f"urn:readie:request:{entry['request_id']}"
    assert "workers" in str(entry["exc_info"])


def test_a_database_that_is_away_is_said_without_where_it_is() -> None:
    """While the database is away the answer is 503, and the log alone says where it was looked for."""
    away = Database(create_engine("postgresql+psycopg://user:secret@127.0.0.1:1/readie"))
    with TestClient(create_app(RouterSettings(), away)) as client, capture_logs() as logged:
        answer = client.get("/v1/workers")

    assert (answer.status_code, problem(answer)) == (503, "database-unavailable")
    assert not {"127.0.0.1", "secret"} & set(answer.text.replace(":", " ").replace("@", " ").split())
    assert "127.0.0.1" in str(logged)
    assert "secret" not in str(logged)


# ---- lists ----


def names(client: httpx.Client, path: str, key: str, **parameters: Any) -> list[str]:
    """One field of each entry of a list."""
    answer = client.get(path, params=parameters)
    assert answer.status_code == 200, answer.text
    return [view[key] for view in answer.json()]


def test_a_page_of_workers(client: httpx.Client) -> None:
    """By id; of one flavor, in one state, some at a time, each with what it holds."""
    held = {"generations": [{"generation": "0" * 64, "checkpoint_ids": ["a"]}]}
    client.put("/v1/workers/c", json=STATUS)
    client.put("/v1/workers/a", json=STATUS | {"state": "starting"} | held)
    client.put("/v1/workers/b", json=STATUS | {"flavor": "gpu", "gpu_total": GIB})

    assert names(client, "/v1/workers", "worker_id") == ["a", "b", "c"]
    assert names(client, "/v1/workers", "worker_id", flavor="cpu") == ["a", "c"]
    assert names(client, "/v1/workers", "worker_id", flavor="cpu", state="ready") == ["c"]
    assert names(client, "/v1/workers", "worker_id", limit=1, offset=1) == ["b"]
    (first,) = client.get("/v1/workers", params={"limit": 1}).json()
    assert [each["checkpoint_ids"] for each in first["generations"]] == [["a"]]


def test_the_list_of_calls(client: httpx.Client, worker: str) -> None:
    """The latest first; by state, function, worker and time of placement, some at a time."""
    for function in ("first", "second", "first"):
        placed = place(client, function=function, memory=1)
    client.put(f"/v1/placements/{placed['placement']['placement_id']}/result", json=RESULT)
    third, second, _ = client.get("/v1/calls").json()

    assert names(client, "/v1/calls", "function") == ["first", "second", "first"]
    assert names(client, "/v1/calls", "call_id", function="first", state="finished") == [third["call_id"]]
    assert names(client, "/v1/calls", "call_id", function="nowhere") == []
    assert len(names(client, "/v1/calls", "call_id", worker_id=worker)) == 3
    assert names(client, "/v1/calls", "call_id", worker_id="other") == []
    since = second["created_at"]
    assert names(client, "/v1/calls", "call_id", since=since) == [third["call_id"], second["call_id"]]
    assert names(client, "/v1/calls", "function", limit=1, offset=1) == ["second"]


def test_the_list_of_catalogues_of_a_flavor(client: httpx.Client, database: Database) -> None:
    """Those of the other one are left out."""
    for flavor in ("cpu", "gpu"):
        import_catalogue(database, read(make_worked_example() | {"flavor": flavor}))

    assert names(client, "/v1/catalogues", "flavor") == ["cpu", "gpu"]
    assert names(client, "/v1/catalogues", "flavor", flavor="gpu") == ["gpu"]


@pytest.mark.parametrize(
    ("path", "slug"),
    [
        ("/v1/workers?flavor=tpu", "bad-flavor"),
        ("/v1/workers?state=lost", "bad-request"),
        ("/v1/workers?limit=10001", "bad-request"),
        ("/v1/catalogues?flavor=tpu", "bad-flavor"),
        ("/v1/calls?function=a%00b", "bad-request"),
        ("/v1/calls?function=" + "x" * 1025, "bad-request"),
        ("/v1/calls?worker_id=a%20b", "bad-request"),
        ("/v1/calls?since=2026-11-30T12:00:00", "bad-request"),
        ("/v1/calls?since=yesterday", "bad-request"),
        ("/v1/calls?since=0.0", "bad-request"),
        ("/v1/calls/imports?until=1796040000", "bad-request"),
    ],
)
def test_filters_that_are_refused(refusing: httpx.Client, path: str, slug: str) -> None:
    """What no entry can be is a mistake, and no empty list."""
    assert problem(refusing.get(path)) == slug


# ---- tokens ----

EACH_MISSING: list[dict[str, Any]] = [{}, {"auth_token": "a"}, {"worker_token": "w"}]
CLIENT_ROUTES = [("POST", "/v1/calls"), ("GET", "/v1/calls/x"), ("GET", "/v1/workers"), ("POST", "/v1/explain")]
CLIENT_ROUTES += [
    ("GET", "/v1/sessions"),
    ("DELETE", "/v1/sessions/s"),
    ("POST", "/v1/catalogues"),
    ("POST", "/v1/catalogues/cpu/activate"),
]
AGENT_ROUTES = [("PUT", "/v1/workers/w"), ("GET", "/v1/workers/w/placements"), ("PUT", "/v1/placements/p/result")]


@pytest.mark.parametrize(("method", "path"), CLIENT_ROUTES + AGENT_ROUTES)
def test_routes_ask_for_their_token(one_database: Database, method: str, path: str) -> None:
    """Clients come in with AUTH_TOKEN, agents with WORKER_TOKEN, and neither with the other's."""
    with TestClient(create_app(RouterSettings(auth_token="client", worker_token="agent"), one_database)) as client:
        right = "client" if (method, path) in CLIENT_ROUTES else "agent"
        wrong = {"client": "agent", "agent": "client"}[right]
        for headers in (
            {},
            {"Authorization": f"Bearer {wrong}"},
            {"Authorization": right},
            {"Authorization": "Bearer ü"},
        ):
            answer = client.request(method, path, headers={k.encode(): v.encode() for k, v in headers.items()})
            assert (answer.status_code, problem(answer)) == (401, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.request(method, path, headers={"Authorization": f"Bearer {right}"}).status_code != 401


def test_operators_need_no_token(one_database: Database) -> None:
    """Health, readiness and the description of the API are open."""
    with TestClient(create_app(RouterSettings(auth_token="client", worker_token="agent"), one_database)) as client:
        assert [client.get(path).status_code for path in ("/health", "/ready", "/schema")] == [200, 200, 200]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_address_that_others_reach_needs_tokens(one_database: Database, host: str) -> None:
    """Without both tokens a router serves on a loopback address only, and says so."""
    for changes in EACH_MISSING:
        with pytest.raises(BadSetting, match="not set, and others than this machine reach that address"):
            create_app(RouterSettings(host=host, **changes), one_database)
    create_app(RouterSettings(host=host, auth_token="a", worker_token="w"), one_database)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_without_tokens_the_router_warns_loudly(one_database: Database, host: str) -> None:
    """On a loopback address an unset token is a warning that names it."""
    with capture_logs() as logged:
        create_app(RouterSettings(host=host), one_database)

    assert [(entry["log_level"], entry["unset"]) for entry in logged] == [("warning", "AUTH_TOKEN and WORKER_TOKEN")]
