"""Selection by SQL (DESIGN §4): the statement agrees with the oracle to the last digit, ties included."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, event, insert

from app import scoring
from app.catalogue import activate_catalogue, find_catalogue, import_catalogue
from app.database import Database
from app.scoring import Answers, Choice, ScoreRequest, catalogue_for_worker, price_calls, score_calls
from app.tables import worker_checkpoints, worker_generations, workers
from readie.cost import COLD, PricedItem, closure, match, price_catalogue, rank
from readie.document import Catalogue
from tests.catalogues import MODULES, documents, make_checkpoint, make_document, make_item, make_worked_example, read

_numbers = count()


def add_worker(
    connection: Connection, generations: dict[str, list[str]], flavor: str = "cpu", markers: str = "{}"
) -> str:
    """A worker that holds these checkpoints of these generations."""
    worker_id = f"worker-{next(_numbers)}"
    row: dict[str, Any] = {"worker_id": worker_id, "flavor": flavor, "markers": markers}
    row |= {"state": "ready", "runtime": "fork", "python": "3.11.7", "incarnation": "", "max_sandboxes": 0}
    row |= {"base_bytes": 0, "heard_at": "2030-01-01T00:00:00+00:00"}
    connection.execute(insert(workers).values(**row))
    for generation, checkpoint_ids in generations.items():
        held = {"worker_id": worker_id, "generation": generation}
        connection.execute(insert(worker_generations).values(**held, restore_fixed_ns=1, cold_fixed_ns=2))
        for checkpoint_id in checkpoint_ids:
            connection.execute(insert(worker_checkpoints).values(**held, checkpoint_id=checkpoint_id))
    return worker_id


def choose(database: Database, catalogue: Catalogue, modules: list[str], **options: Any) -> Choice:
    """The choice for a call by an imported catalogue."""
    with database.reading() as connection:
        found = find_catalogue(connection, catalogue.sha256)
        assert found is not None
        request = ScoreRequest(catalogue_id=found.catalogue_id, sha256=found.sha256, modules=modules, **options)
        return score_calls(connection, [request])[0]


@pytest.fixture(autouse=True)
def own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered yet."""
    monkeypatch.setattr(scoring, "prices", Answers(10**6))
    monkeypatch.setattr(scoring, "checkpoints", Answers(10**6))


@contextmanager
def counted(database: Database) -> Iterator[list[str]]:
    """The statements that SQLAlchemy executes."""
    executed: list[str] = []

    def note(_connection: Any, _cursor: Any, text: str, *_rest: Any) -> None:
        executed.append(text)

    event.listen(database.engine, "before_cursor_execute", note)
    yield executed
    event.remove(database.engine, "before_cursor_execute", note)


# ---- agreement with the oracle ----

options_of_a_call: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "modules": st.lists(st.sampled_from(MODULES), max_size=4),
        "memory_bytes": st.sampled_from([None, None, 0, 10_000_000, 33_333_333, 10**9]),
        "base_bytes": st.sampled_from([0, 5_000_000]),
        "kept_distributions": st.sampled_from([[], [], ["one"], ["two", "other"], ["two", "one"]]),
    }
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_option_of_every_call_costs_what_the_oracle_says(database: Database, data: st.DataObject) -> None:
    """Order and costs of all options equal the plain-Python model, and so does the first that is one, for calls on two
    catalogues at once.
    """
    catalogues = [read(data.draw(documents(flavor), label=flavor)) for flavor in ("cpu", "gpu")]
    calls = data.draw(st.lists(st.tuples(st.integers(0, 1), options_of_a_call), min_size=1, max_size=5), label="calls")
    ids = [import_catalogue(database, catalogue) for catalogue in catalogues]
    requests = []
    for number, call in calls:
        listed = [checkpoint.checkpoint_id for checkpoint in catalogues[number].checkpoints]
        held = data.draw(st.none() | st.lists(st.sampled_from(listed), unique=True) if listed else st.none())
        requests.append(ScoreRequest(catalogue_id=ids[number], sha256=catalogues[number].sha256, held=held, **call))
    with database.reading() as connection:
        priced = price_calls(connection, requests)
        choices = score_calls(connection, requests)

    for (number, _), request, found, choice in zip(calls, requests, priced, choices, strict=True):
        catalogue = catalogues[number]
        items, checkpoints = price_catalogue(catalogue)
        ranking = rank(items, checkpoints, request.modules)
        matches = {module: key for module in request.modules if (key := match(items, module)) is not None}
        assert found.items == matches
        assert [
            (option.ordinal, option.checkpoint_id, option.size_ns, option.missing_ns, option.cost_ns)
            for option in found.options()
        ] == [
            (option.ordinal, option.checkpoint_id, option.size_ns, option.missing_ns, option.cost_ns)
            for option in ranking
        ]
        best = next(option for option in ranking if _is_option(catalogue, option.ordinal, request))
        assert choice == Choice(
            checkpoint_id=best.checkpoint_id,
            ordinal=best.ordinal,
            cost_ns=best.cost_ns,
            cold_cost_ns=next(option.cost_ns for option in ranking if option.ordinal == COLD),
            items=matches,
            unmatched=list(dict.fromkeys(module for module in request.modules if module not in matches)),
        )


def _is_option(catalogue: Catalogue, ordinal: int, request: ScoreRequest) -> bool:
    """DESIGN §4, Selection: held, within the budget, without a module of what is installed anew."""
    if ordinal == COLD:
        return True
    checkpoint = catalogue.checkpoints[ordinal]
    fits = request.memory_bytes is None or checkpoint.size_bytes + request.base_bytes <= request.memory_bytes
    held = request.held is None or checkpoint.checkpoint_id in request.held
    of_items = {catalogue.item_distributions[item] for item in checkpoint.items}
    return fits and held and not of_items & set(request.kept_distributions)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(200, 2000), density=st.floats(0.2, 3.0), seed=st.integers(0, 2**32 - 1))
def test_catalogues_of_many_items_agree_too(database: Database, size: int, density: float, seed: int) -> None:
    """Up to 2,000 items in long cycles and deep closures, checkpoints that are closed sets and that are not, prices of
    all lengths: every option of twenty calls costs what the oracle says, in its order.
    """
    random = np.random.default_rng(seed)
    keys = [f"package{n // 7}" + f".module{n}" * (n % 7 > 0) for n in range(size)]
    edges = random.integers(0, size, (round(size * density), 2)).tolist()
    needed: dict[str, list[str]] = {key: [] for key in keys}
    for by, of in edges:
        needed[keys[by]].append(keys[of])
    loads = (10 ** random.uniform(-9, 2, size)).round(9).tolist()
    items = {key: make_item(load, needed[key]) for key, load in zip(keys, loads, strict=True)}
    priced = {key: PricedItem(0, item["dependencies"]) for key, item in items.items()}
    checkpoints = []
    for number in range(12):
        held = sorted(closure(priced, random.choice(keys, 3)))
        kept = random.random(len(held)) >= (0.0, 0.03, 0.5)[number % 3]
        chosen = [key for key, is_kept in zip(held, kept, strict=True) if is_kept]
        checkpoints.append(make_checkpoint(f"checkpoint_{number}", chosen, float(random.integers(0, 5000))))
    catalogue = read(make_document(items, checkpoints, alpha=0.006))
    catalogue_id = import_catalogue(database, catalogue)
    calls = [[f"{key}.Name" for key in random.choice(keys, 3)] for _ in range(20)]
    with database.reading() as connection:
        requests = [ScoreRequest(catalogue_id=catalogue_id, sha256=catalogue.sha256, modules=each) for each in calls]
        priced_calls = price_calls(connection, requests)

    all_items, all_checkpoints = price_catalogue(catalogue)
    for modules, found in zip(calls, priced_calls, strict=True):
        expected = [(option.ordinal, option.cost_ns) for option in rank(all_items, all_checkpoints, modules)]
        assert list(zip(found.ordinals, found.costs_ns, strict=True)) == expected


# ---- the rules, one by one ----


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (0.006, [("B", 480_000_000), ("A", 542_000_000), (None, 700_000_000), ("C", 1_200_000_000)]),
        (0.02, [("A", 640_000_000), (None, 700_000_000), ("B", 1_600_000_000), ("C", 4_000_000_000)]),
    ],
)
def test_the_worked_example_is_right_to_the_digit(
    database: Database, alpha: float, expected: list[tuple[str | None, int]]
) -> None:
    """DESIGN's example: at 0.006 s per MB B is the cheapest, at 0.02 it is A."""
    catalogue = read(make_worked_example(alpha))
    catalogue_id = import_catalogue(database, catalogue)
    with database.reading() as connection:
        request = ScoreRequest(catalogue_id=catalogue_id, sha256=catalogue.sha256, modules=["pandas"])
        [prices] = price_calls(connection, [request])

    assert expected == [(option.checkpoint_id, option.cost_ns) for option in prices.options()]


def test_a_tie_goes_to_the_later_option(database: Database) -> None:
    """Among equal costs the last in the catalogue wins; the cold start is before all."""
    items = {"numpy": make_item(0.6)}
    checkpoints = [make_checkpoint(f"checkpoint_{number}", ["numpy"] if number else [], 100 if number else 0)
                   for number in range(4)]  # fmt: skip
    catalogue = read(make_document(items, checkpoints))
    import_catalogue(database, catalogue)

    choice = choose(database, catalogue, ["numpy"])

    assert (choice.checkpoint_id, choice.cost_ns, choice.cold_cost_ns) == ("checkpoint_3", 600_000_000, 600_000_000)


def test_the_empty_checkpoint_beats_a_cold_start(database: Database) -> None:
    """`checkpoint_0` of size 0 costs what a cold start costs, and wins the tie."""
    catalogue = read(make_document({"numpy": make_item(0.6)}, [make_checkpoint("checkpoint_0")]))
    import_catalogue(database, catalogue)

    assert choose(database, catalogue, ["numpy"]).checkpoint_id == "checkpoint_0"


@pytest.mark.parametrize("modules", [[], ["unknown"], ["a\0b"], ["\ud800"], [""]])
def test_a_call_of_which_nothing_is_known_has_a_choice_too(database: Database, modules: list[str]) -> None:
    """No module, unknown ones and those that can be no name cost nothing and are reported."""
    catalogue = read(make_document({"numpy": make_item(0.6)}, [make_checkpoint("checkpoint_0")]))
    import_catalogue(database, catalogue)

    choice = choose(database, catalogue, modules)

    assert (
        Choice(checkpoint_id="checkpoint_0", ordinal=0, cost_ns=0, cold_cost_ns=0, items={}, unmatched=modules)
        == choice
    )


def test_a_module_stands_for_its_longest_prefix_that_is_an_item(database: Database) -> None:
    """`sklearn.svm.LinearSVC` stands for `sklearn.svm`, which also needs `sklearn`; names with a colon have no prefix."""
    items = {
        "sklearn": make_item(0.1),
        "sklearn.svm": make_item(0.2),
        "model:gpt2": make_item(5.0, resource_type="model", distribution=""),
    }
    catalogue = read(make_document(items))
    import_catalogue(database, catalogue)

    choice = choose(database, catalogue, ["sklearn.svm.LinearSVC", "model:gpt2.large", "sklearn_extra"])

    assert choice.items == {"sklearn.svm.LinearSVC": "sklearn.svm"}
    assert choice.unmatched == ["model:gpt2.large", "sklearn_extra"]
    assert choice.cold_cost_ns == 300_000_000


def test_a_name_of_very_many_dots_is_matched_like_any_other(database: Database) -> None:
    """A module of 512 names stands for the item at its beginning."""
    catalogue = read(make_document({"a": make_item(0.1), "a.a": make_item(0.1)}))
    import_catalogue(database, catalogue)
    module = ".".join("a" * 512)

    assert choose(database, catalogue, [module]).items == {module: "a.a"}


def test_one_statement_prices_any_number_of_calls(database: Database) -> None:
    """A batch is one statement that matches names and one that prices, and each call gets its own answer in its order."""
    catalogue = read(make_worked_example())
    catalogue_id = import_catalogue(database, catalogue)
    modules = [["pandas"], [], ["torch"], ["numpy"]] * 25
    requests = [ScoreRequest(catalogue_id=catalogue_id, sha256=catalogue.sha256, modules=each) for each in modules]
    with database.reading() as connection, counted(database) as executed:
        choices = score_calls(connection, requests)

    assert len([text for text in executed if "planes" in text]) == 1
    assert len(executed) == 3  # names matched, options priced, checkpoints listed
    assert [choice.checkpoint_id for choice in choices] == ["B", None, "C", "A"] * 25


def test_a_module_set_that_was_priced_before_needs_no_statement(database: Database) -> None:
    """On whatever worker and with whatever budget: what each option costs is the same."""
    catalogue = read(make_worked_example())
    import_catalogue(database, catalogue)
    first = choose(database, catalogue, ["pandas"])
    with counted(database) as executed:
        second = choose(database, catalogue, ["pandas"], held=["A", "C"], memory_bytes=50_000_000)

    assert [text for text in executed if "planes" in text] == []
    assert (first.checkpoint_id, second.checkpoint_id) == ("B", "A")


def test_no_request_gives_no_choice(database: Database) -> None:
    """An empty batch is answered by an empty list."""
    with database.reading() as connection:
        assert score_calls(connection, []) == []


class TestCatalogueForWorker:
    """The active one if the worker holds its generation, else the newest imported one whose generation it holds."""

    @pytest.fixture
    def imported(self, database: Database) -> list[Catalogue]:
        """Three generations of flavor cpu; the last one is active."""
        documents_ = [make_worked_example() for _ in range(3)]
        for number, document in enumerate(documents_):
            document["checkpoints"][0]["id"] = f"checkpoint_{number}"
        found = [read(document) for document in documents_]
        for catalogue in found:
            import_catalogue(database, catalogue)
        return found

    def test_active_one_is_taken_where_its_generation_is_held(
        self, database: Database, imported: list[Catalogue]
    ) -> None:
        """A worker that holds all of them is priced by the active one, though it is not the newest."""
        activate_catalogue(database, imported[1].sha256)
        found = self._find(database, [catalogue.generation for catalogue in imported])
        assert found == imported[1].sha256

    def test_newest_held_one_is_taken_where_the_active_one_is_not_held(
        self, database: Database, imported: list[Catalogue]
    ) -> None:
        """A worker that is behind goes on with what it holds."""
        assert self._find(database, [imported[0].generation, imported[1].generation]) == imported[1].sha256

    def test_there_is_none_where_nothing_known_is_held(self, database: Database, imported: list[Catalogue]) -> None:
        """A worker with checkpoints of nobody's catalogue starts cold."""
        assert self._find(database, ["0" * 64]) is None

    def test_the_flavor_is_the_workers(self, database: Database, imported: list[Catalogue]) -> None:
        """A gpu worker that claims a cpu generation is not priced by a cpu catalogue."""
        assert self._find(database, [imported[2].generation], "gpu") is None

    def _find(self, database: Database, generations: list[str], flavor: str = "cpu") -> str | None:
        with database.transaction() as connection:
            worker_id = add_worker(connection, {generation: [] for generation in generations}, flavor)
            found = catalogue_for_worker(connection, worker_id)
        if found is None:
            return None
        assert (found["restore_fixed_ns"], found["cold_fixed_ns"]) == (1, 2)
        return str(found["sha256"])


class TestRemembered:
    """What was priced is kept, within limits."""

    def test_what_was_not_asked_for_longest_goes_first(self) -> None:
        """The size stays within its limit; an answer that is more than an eighth of it is not kept at all."""
        kept: Answers[str] = Answers(1600)
        for number in range(16):
            kept.keep(number, str(number), 100)
        assert kept.find(0) == "0"
        kept.keep(16, "16", 100)
        kept.keep(17, "17", 201)

        assert [number for number in range(18) if kept.find(number)] == [0, *range(2, 17)]
        assert kept.size_bytes == kept.most_bytes
