"""Placement (DESIGN §6): which worker takes a call, from which checkpoint it starts, what it reserves."""

import threading
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.markers import default_environment
from sqlalchemy import exc, text

from app.api.calls import place_together
from app.catalogue import import_catalogue
from app.database import Database
from app.keys import Asked
from app.liveness import report_status
from app.placement import place_call, place_calls
from app.settings import RouterSettings
from readie.document import Catalogue
from readie.errors import (
    BadBudget,
    BadRequest,
    BadRequirement,
    CheckpointConflict,
    NoCapacity,
    NoWorkers,
    ReadieError,
    UnknownCheckpoint,
    problems,
)
from readie.flavor import Flavor
from readie.settings import Bytes
from readie.wire import CallPlaced, CallRequest, HeldGeneration, SandboxStatus, WorkerStatus
from tests import placement_oracle as oracle
from tests.catalogues import make_worked_example, read

GIB = 2**30
SETTINGS = RouterSettings()


def status(**changes: Any) -> WorkerStatus:
    defaults: dict[str, Any] = {"flavor": Flavor.CPU, "state": "ready", "python": "3.11.7", "runtime": "fork"}
    return WorkerStatus(**(defaults | changes))


def gpu_status(**changes: Any) -> WorkerStatus:
    return status(**({"flavor": Flavor.GPU, "gpu_total": 16 * GIB} | changes))


def call(**changes: Any) -> CallRequest:
    return CallRequest(payload=b"opaque", python="3.11", **changes)


def report(database: Database, worker_id: str, reported: WorkerStatus) -> None:
    with database.transaction() as connection:
        report_status(connection, worker_id, reported)


def place(database: Database, request: CallRequest, router: RouterSettings = SETTINGS) -> CallPlaced:
    with database.transaction() as connection:
        return place_call(connection, database, router, request)


def rows(database: Database, query: str) -> list[Any]:
    with database.reading() as connection:
        return list(connection.execute(text(query)).mappings())


def prepare(database: Database, document: dict[str, Any]) -> Catalogue:
    """Imports and activates a catalogue."""
    catalogue = read(document)
    import_catalogue(database, catalogue)
    return catalogue


def holding(catalogue: Catalogue, *checkpoint_ids: str) -> dict[str, Any]:
    """What a worker reports that holds these checkpoints of a catalogue (none named: all)."""
    ids = list(checkpoint_ids) or [checkpoint.checkpoint_id for checkpoint in catalogue.checkpoints]
    held = HeldGeneration(generation=catalogue.generation, checkpoint_ids=ids, restore_fixed=0.02, cold_fixed=0.1)
    return {"flavor": catalogue.flavor, "generations": [held]}


def forget_everything(database: Database) -> None:
    with database.transaction() as connection:
        for table in ("workers", "worker_generations", "worker_checkpoints", "sandboxes", "leases", "calls"):
            connection.execute(text(f"DELETE FROM {table}"))


# ---- the worker ----

budgets = st.none() | st.integers(1, 1500) | st.just(2**62)
totals = st.none() | st.sampled_from([1, 1000, 2000, 4000, 4001, 2**62])
worker_ids = st.sampled_from(["a", "b", "B", "w10", "w9", "w.1"])
sandboxes = st.builds(
    SandboxStatus,
    sandbox_id=st.uuids().map(str),
    memory=st.integers(1, 900) | st.just(2**62),
    gpu_memory=st.sampled_from([0, 0, 300]),
)
statuses = st.builds(
    WorkerStatus,
    flavor=st.sampled_from(Flavor),
    state=st.sampled_from(["ready", "ready", "ready", "starting", "removed"]),
    python=st.just("3.11.7"),
    runtime=st.just("fork"),
    memory_total=totals,
    gpu_total=totals,
    max_sandboxes=st.integers(0, 4),
    sandboxes=st.lists(sandboxes, max_size=2),
).map(lambda status: status if status.flavor is Flavor.GPU else msgspec.structs.replace(status, gpu_total=None))
requests = st.builds(
    CallRequest,
    payload=st.just(b""),
    python=st.just("3.11"),
    gpu=st.booleans(),
    memory=budgets,
    gpu_memory=st.none() | st.none() | st.integers(1, 1500),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    workers=st.dictionaries(worker_ids, statuses, max_size=4),
    calls=st.lists(requests, min_size=1, max_size=6),
    reported=st.sets(st.integers(0, 5)),
)
def test_the_chosen_worker_is_the_one_of_the_rules(
    database: Database, workers: dict[str, WorkerStatus], calls: list[CallRequest], reported: set[int]
) -> None:
    """Whatever the workers, their sandboxes and the calls before: filters and ranking are those of the plain model."""
    router = RouterSettings(default_memory=Bytes(700))
    forget_everything(database)
    model = {worker_id: oracle.Worker(reported_status) for worker_id, reported_status in workers.items()}
    for worker_id, worker in model.items():
        report(database, worker_id, worker.status)
    for number, request in enumerate(calls):
        expected = oracle.choose_worker(model, request, 700, 900_000)
        if expected in ("no-workers", "no-capacity"):
            with pytest.raises(problems()[expected]):
                place(database, request, router)
            continue
        placement = place(database, request, router).placement
        assert placement.worker_id == expected
        worker = model[placement.worker_id]
        oracle.reserve(worker, placement.placement_id, request, 700)
        if number in reported:  # its sandbox was started: the same memory, counted once
            lease = worker.leases[placement.placement_id]
            sandbox = SandboxStatus(
                sandbox_id=placement.placement_id,
                placement_id=placement.placement_id,
                memory=lease.memory,
                gpu_memory=lease.gpu_memory,
            )
            worker.status = status(
                **{name: getattr(worker.status, name) for name in worker.status.__struct_fields__}
                | {"sandboxes": [*worker.status.sandboxes, sandbox]}
            )
            report(database, placement.worker_id, worker.status)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    workers=st.dictionaries(worker_ids, statuses, max_size=4),
    calls=st.lists(requests | st.just(call(packages=["="])), min_size=2, max_size=8),
)
def test_calls_in_one_transaction_are_placed_as_one_after_the_other(
    database: Database, workers: dict[str, WorkerStatus], calls: list[CallRequest]
) -> None:
    """Each sees what those before it reserved, and one that is refused takes nothing from those after it."""
    router = RouterSettings(default_memory=Bytes(700))
    forget_everything(database)
    model = {worker_id: oracle.Worker(reported_status) for worker_id, reported_status in workers.items()}
    for worker_id, worker in model.items():
        report(database, worker_id, worker.status)
    with database.transaction() as connection:
        answers = place_calls(connection, router, calls)

    for number, (request, answer) in enumerate(zip(calls, answers, strict=True)):
        expected = "bad-requirement" if request.packages else oracle.choose_worker(model, request, 700, 900_000)
        if isinstance(answer, ReadieError):
            assert answer.slug == expected
        else:
            assert answer.placement.worker_id == expected
            oracle.reserve(model[expected], str(number), request, 700)
    written = {row["call_id"] for row in rows(database, "SELECT call_id FROM calls")}
    assert written == {answer.call_id for answer in answers if isinstance(answer, CallPlaced)}
    assert written == {row["call_id"] for row in rows(database, "SELECT call_id FROM leases")}


def test_calls_in_one_transaction_keep_what_is_theirs(database: Database) -> None:
    """Payload, modules, requirements and choice of each are its own, whoever it was placed with."""
    prepare_packages(database)
    asked = [
        call(modules=["numpy"], packages=["pandas<2", "requests"], memory=1),
        call(modules=[], cold=True, memory=2),
        call(modules=["pandas", "nowhere"], checkpoint_id="A", memory=3),
        call(modules=["pandas"], memory=GIB),
    ]
    asked = [msgspec.structs.replace(each, payload=bytes([number])) for number, each in enumerate(asked)]
    with database.transaction() as connection:
        together = place_calls(connection, SETTINGS, asked)
    alone = [place(database, each) for each in asked]

    for first, second in zip(together, alone, strict=True):
        assert isinstance(first, CallPlaced)
        differ = {"call_id": "", "placement": msgspec.structs.replace(second.placement, placement_id="")}
        assert msgspec.structs.replace(
            first, call_id="", placement=msgspec.structs.replace(first.placement, placement_id="")
        ) == msgspec.structs.replace(second, **differ)
        for table in ("call_payloads", "call_modules", "call_packages"):
            columns = {"call_payloads": "payload", "call_modules": "position, module, item"}.get(table, "requirement")
            found = [
                rows(database, f"SELECT {columns} FROM {table} WHERE call_id = '{each.call_id}' ORDER BY {columns}")
                for each in (first, second)
            ]
            assert found[0] == found[1]


def test_threads_never_overcommit_a_worker(database: Database) -> None:
    """Twelve threads place forty calls on two workers that hold nine each: eighteen are placed, whatever the order."""
    for worker_id in ("a", "b"):
        report(database, worker_id, status(memory_total=10 * GIB, max_sandboxes=20))
    asked = iter(range(40))
    outcomes: list[str] = []

    def place_some() -> None:
        for number in asked:
            (placed,) = place_together(database, SETTINGS, [Asked(call_id=f"call{number}", request=call())])
            outcomes.append(placed.placement.worker_id if isinstance(placed, CallPlaced) else str(placed.slug))

    threads = [threading.Thread(target=place_some) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {name: outcomes.count(name) for name in set(outcomes)} == {"a": 9, "b": 9, "no-capacity": 22}
    taken = rows(database, "SELECT worker_id, count(*) AS n FROM leases GROUP BY worker_id")
    assert {row["worker_id"]: row["n"] for row in taken} == {"a": 9, "b": 9}


def test_the_room_that_another_transaction_took_is_seen(database: Database) -> None:
    """A placement that waited for another transaction sees what that one placed, and is not made."""
    report(database, "a", status(memory_total=2 * GIB))
    refused: list[Exception] = []

    def place_second() -> None:
        try:
            place(database, call())
        except NoCapacity as error:
            refused.append(error)

    with database.transaction() as connection:
        place_call(connection, database, SETTINGS, call())
        second = threading.Thread(target=place_second)
        second.start()
        second.join(0.5)
        assert second.is_alive()
    second.join()

    assert len(refused) == 1
    assert len(rows(database, "SELECT * FROM leases")) == 1


def test_no_worker_is_ready(database: Database) -> None:
    """Without a ready worker a call is refused as no-workers, and nothing is kept of it."""
    report(database, "a", status(state="starting"))
    report(database, "b", status(state="removed"))

    with pytest.raises(NoWorkers):
        place(database, call())
    assert rows(database, "SELECT * FROM calls") == []


def test_a_silent_worker_is_no_candidate(database: Database) -> None:
    """A worker that was not heard from for WORKER_TTL gets nothing, even before a sweep evicts it."""
    report(database, "a", status())
    with database.transaction() as connection:
        connection.execute(text("UPDATE workers SET heard_at = now() - INTERVAL '31 seconds'"))

    with pytest.raises(NoWorkers):
        place(database, call())


def test_a_gpu_call_is_refused_where_all_workers_are_cpu(database: Database) -> None:
    """A GPU call with only cpu workers is an error that says so, with the way out."""
    report(database, "a", status())

    with pytest.raises(NoCapacity, match="needs a gpu worker, and all 1 ready workers are cpu workers") as refused:
        place(database, call(gpu=True))
    assert "WORKER_FLAVOR=gpu" in refused.value.hint


def test_what_is_short_is_said(database: Database) -> None:
    """A call for which there is no room is told how many workers lack what."""
    report(database, "a", status(memory_total=GIB))
    report(database, "b", status(max_sandboxes=1, sandboxes=[SandboxStatus(sandbox_id="s", memory=1)]))

    with pytest.raises(NoCapacity) as refused:
        place(database, call(memory=2 * GIB))
    assert (
        f"of 2 ready workers, 1 have no {2 * GIB} bytes of memory left, 1 have all their sandboxes in use"
        == refused.value.detail
    )


def test_cpu_call_spills_only_when_no_cpu_worker_can_take_it(database: Database) -> None:
    """A cpu call goes to the fullest cpu worker rather than to an empty gpu worker, and to that one when none is left."""
    report(database, "cpu", status(memory_total=3 * GIB))
    report(database, "gpu", gpu_status(memory_total=64 * GIB))

    assert [place(database, call()).placement.worker_id for _ in range(3)] == ["cpu", "cpu", "gpu"]


def test_gpu_true_reserves_the_whole_gpu_memory(database: Database) -> None:
    """A GPU call without a budget takes all of a worker's GPU memory, and needs all of it free."""
    report(database, "gpu", gpu_status())
    place(database, call(gpu=True))

    assert [row["gpu_memory_bytes"] for row in rows(database, "SELECT gpu_memory_bytes FROM leases")] == [16 * GIB]
    for another in (call(gpu=True), call(gpu_memory=1)):
        with pytest.raises(NoCapacity):
            place(database, another)


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        ({}, (GIB, GIB, None, None, False)),
        ({"memory": 5}, (5, 5, None, None, False)),
        ({"max_memory": 7}, (7, 7, None, None, False)),
        ({"memory": 5, "max_memory": 7}, (5, 7, None, None, False)),
        ({"gpu": True}, (GIB, GIB, None, None, True)),
        ({"gpu_memory": 3}, (GIB, GIB, 3, 3, True)),
        ({"max_gpu_memory": 4}, (GIB, GIB, 4, 4, True)),
        ({"gpu": True, "gpu_memory": 3, "max_gpu_memory": 4}, (GIB, GIB, 3, 4, True)),
    ],
)
def test_budgets(database: Database, asked: dict[str, int], stored: tuple[object, ...]) -> None:
    """A maximum alone is also the start, a start alone its own maximum; any GPU budget makes a GPU call."""
    report(database, "gpu", gpu_status())
    place(database, call(**asked))

    columns = "memory_bytes, max_memory_bytes, gpu_memory_bytes, max_gpu_memory_bytes, gpu"
    (row,) = rows(database, f"SELECT {columns} FROM calls")
    assert tuple(row.values()) == stored


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"memory": 2, "max_memory": 1}, BadBudget),
        ({"gpu_memory": 2, "max_gpu_memory": 1}, BadBudget),
        ({"cold": True, "checkpoint_id": "checkpoint_1"}, BadRequest),
        ({"packages": ["numpy=="]}, BadRequirement),
    ],
)
def test_demands_that_contradict_themselves_are_refused(
    database: Database, asked: dict[str, Any], problem: type[ReadieError]
) -> None:
    """A call that nothing could serve is refused before a worker is looked for."""
    with pytest.raises(problem):
        place(database, call(**asked))


def test_the_same_state_gives_the_same_placement(database: Database) -> None:
    """Of workers that are alike the first by code points is chosen, whatever the order of their reports."""
    for worker_id in ("b", "a", "B"):
        report(database, worker_id, status(memory_total=4 * GIB))

    assert [place(database, call()).placement.worker_id for _ in range(4)] == ["B", "a", "b", "B"]


# ---- the checkpoint ----


def test_the_cheapest_checkpoint_is_chosen_and_the_start_predicted(database: Database) -> None:
    """The worked example: B costs 0.48 s, a cold start 0.70 s; predicted is the cost and the worker's fixed part."""
    catalogue = prepare(database, make_worked_example())
    report(database, "w", status(**holding(catalogue)))
    placed = place(database, call(modules=["pandas.DataFrame", "nowhere"]))

    placement = placed.placement
    assert (placement.checkpoint_id, placement.generation) == ("B", catalogue.generation)
    assert (placement.cost, placement.cold_cost, placement.predicted_ready) == (0.48, 0.7, 0.5)
    assert placed.unmatched == ["nowhere"]
    modules = rows(database, "SELECT module, item FROM call_modules ORDER BY position")
    assert [tuple(row.values()) for row in modules] == [("pandas.DataFrame", "pandas"), ("nowhere", None)]


def test_a_cold_start_that_is_asked_for(database: Database) -> None:
    """cold=True asks for no checkpoint; what the start takes is predicted all the same."""
    catalogue = prepare(database, make_worked_example())
    report(database, "w", status(**holding(catalogue)))
    placement = place(database, call(modules=["pandas"], cold=True)).placement

    assert (placement.checkpoint_id, placement.cost, placement.predicted_ready) == (None, 0.7, 0.8)


def test_without_a_catalogue_a_call_starts_cold(database: Database) -> None:
    """A worker that holds the generation of no catalogue starts everything cold, and the answer says why."""
    prepare(database, make_worked_example())
    report(database, "w", status())
    placement = place(database, call(modules=["pandas"])).placement

    assert (placement.checkpoint_id, placement.cost) == (None, None)
    assert placement.reason == "cold: worker w holds no generation of a cpu catalogue"


def test_checkpoints_that_the_worker_does_not_hold_are_no_options(database: Database) -> None:
    """The cheapest of those that it holds."""
    catalogue = prepare(database, make_worked_example())
    report(database, "w", status(**holding(catalogue, "A")))

    assert place(database, call(modules=["pandas"])).placement.checkpoint_id == "A"


def test_checkpoints_that_exceed_the_budget_are_no_options(database: Database) -> None:
    """A checkpoint and the runtime's base have to fit into the call's memory."""
    catalogue = prepare(database, make_worked_example())
    report(database, "w", status(base_memory=10_000_000, **holding(catalogue)))

    assert place(database, call(modules=["pandas"], memory=90_000_000)).placement.checkpoint_id == "B"
    assert place(database, call(modules=["pandas"], memory=89_999_999)).placement.checkpoint_id == "A"


def test_a_gpu_worker_gets_checkpoints_of_its_own_catalogue_only(database: Database) -> None:
    """A cpu call that spills to a gpu worker starts from a gpu checkpoint; so does a GPU call."""
    prepare(database, make_worked_example())
    gpu = prepare(database, make_worked_example(flavor="gpu"))
    report(database, "gpu", gpu_status(**holding(gpu)))

    for asked in ({}, {"gpu_memory": 1}):
        placement = place(database, call(modules=["pandas"], **asked)).placement
        assert (placement.flavor, placement.generation, placement.checkpoint_id) == ("gpu", gpu.generation, "B")
    flavors = rows(database, "SELECT checkpoint_flavor FROM leases")
    assert [row["checkpoint_flavor"] for row in flavors] == ["gpu", "gpu"]


def test_a_gpu_worker_that_holds_cpu_checkpoints_starts_cold(database: Database) -> None:
    """A generation of the other flavor is none, even if a worker claims to hold it."""
    cpu = prepare(database, make_worked_example())
    report(database, "gpu", gpu_status(**holding(cpu) | {"flavor": Flavor.GPU}))

    assert place(database, call(modules=["pandas"])).placement.checkpoint_id is None


def test_the_tables_refuse_a_checkpoint_of_another_flavor(database: Database) -> None:
    """Whatever the code does: no lease and no call joins a cpu checkpoint and a gpu worker."""
    catalogue = prepare(database, make_worked_example())
    report(database, "w", status(**holding(catalogue)))
    place(database, call(modules=["pandas"]))

    for table in ("leases", "calls"):
        with pytest.raises(exc.SQLAlchemyError, match="checkpoint_flavor"), database.transaction() as connection:
            connection.execute(text(f"UPDATE {table} SET worker_flavor = 'gpu'"))


def test_the_tables_stop_a_selection_that_went_wrong(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cpu worker for which a gpu catalogue was taken gets nothing: the flavor written is the catalogue's own."""
    catalogue = prepare(database, make_worked_example() | {"flavor": "gpu"})
    report(database, "w", status(**holding(catalogue) | {"flavor": Flavor.CPU}))
    (wrong,) = rows(
        database,
        "SELECT catalogue_id, sha256, generation, flavor, 0 AS restore_fixed_ns, 0 AS cold_fixed_ns FROM catalogues",
    )
    monkeypatch.setattr("app.placement.catalogue_for_worker", lambda _connection, _worker_id: wrong)

    with pytest.raises(exc.SQLAlchemyError, match="checkpoint_flavor"):
        place(database, call(modules=["pandas"]))


def test_a_pinned_checkpoint_is_not_scored(database: Database) -> None:
    """A listed checkpoint is sent as asked for, held or not; no cost is worked out."""
    catalogue = prepare(database, make_worked_example())
    report(database, "w", status(**holding(catalogue, "A")))
    placement = place(database, call(modules=["pandas"], checkpoint_id="C")).placement

    assert (placement.checkpoint_id, placement.cost, placement.reason) == ("C", None, "pinned")


def test_a_pinned_checkpoint_that_is_not_listed(database: Database) -> None:
    """The error says which ids there are, and nothing is kept of the call."""
    catalogue = prepare(database, make_worked_example())
    report(database, "w", status(**holding(catalogue)))

    with pytest.raises(UnknownCheckpoint, match="checkpoint_9: the cpu catalogue lists A, B, C"):
        place(database, call(checkpoint_id="checkpoint_9"))
    assert rows(database, "SELECT * FROM calls") == []


def test_a_pinned_checkpoint_that_has_loaded_what_is_to_be_installed(database: Database) -> None:
    """It is refused: the loaded module would win over the installed one. One without it is not."""
    prepare_packages(database)

    with pytest.raises(CheckpointConflict, match="B has loaded modules of pandas, and pandas<2 is to be installed"):
        place(database, call(checkpoint_id="B", packages=["requests", "pandas<2"]))
    placed = place(database, call(checkpoint_id="A", packages=["requests", "pandas<2"]))
    assert placed.placement.checkpoint_id == "A"


# ---- packages ----

INSTALLED = {"numpy": "2.0.2", "pandas": "2.2.0"}


def prepare_packages(database: Database) -> None:
    """The worked example, its items owned by distributions of their names; a worker with Python 3.11."""
    document = make_worked_example() | {"distributions": INSTALLED}
    for key, item in document["items"].items():
        item["distribution"] = key
    catalogue = prepare(database, document)
    markers = {name: str(value) for name, value in default_environment().items()} | {"python_version": "3.11"}
    report(database, "w", status(markers=markers, **holding(catalogue)))


def test_packages_are_split_by_the_worker_s_root_filesystem(database: Database) -> None:
    """What it has is skipped with its version, markers are the worker's, the rest is for the agent to install."""
    prepare_packages(database)
    placed = place(database, call(packages=["NumPy>=2", "requests", "tomli; python_version < '3.11'"]))

    assert (placed.skipped[0].requirement, placed.skipped[0].installed) == ("numpy>=2", "2.0.2")
    assert [each.requirement for each in placed.kept] == ["requests"]
    stored = rows(database, "SELECT requirement, skipped FROM call_packages ORDER BY requirement")
    assert [tuple(row.values()) for row in stored] == [
        ("numpy>=2", True),
        ("requests", False),
        ('tomli; python_version < "3.11"', True),
    ]


def test_a_kept_package_excludes_the_checkpoints_that_hold_it(database: Database) -> None:
    """Pandas is to be installed in another version: no checkpoint that has loaded it is an option."""
    prepare_packages(database)
    placed = place(database, call(modules=["pandas"], packages=["pandas<2"]))

    assert placed.placement.checkpoint_id == "A"
    assert [(each.requirement, each.installed) for each in placed.kept] == [("pandas<2", "2.2.0")]


def test_the_policy_names_skips_by_name_alone(database: Database) -> None:
    """PACKAGES_POLICY=names: whatever the version."""
    prepare_packages(database)
    placed = place(database, call(packages=["pandas<2"]), RouterSettings(packages_policy="names"))

    assert [(each.requirement, each.installed) for each in placed.skipped] == [("pandas<2", "2.2.0")]


def test_a_worker_without_checkpoints_has_the_packages_of_its_flavor(database: Database) -> None:
    """It holds no generation, so calls start cold; what the active catalogue says is installed is not installed anew."""
    prepare_packages(database)
    report(database, "w", status())
    placed = place(database, call(packages=["numpy>=2"]))

    assert placed.placement.checkpoint_id is None
    assert [(each.requirement, each.installed) for each in placed.skipped] == [("numpy>=2", "2.0.2")]
    assert placed.kept == []
