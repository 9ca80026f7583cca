"""The engine on the full-size catalogue, 400 MB: it agrees with the oracle, and generations switch under load.

The oracle is given the direct dependencies that the generator made the document's transitive lists from: with those it
takes 0.1 s a call instead of several. That they come to the same is checked for every module that is asked for.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import pytest

from app.catalogue import find_active_catalogue, import_catalogue
from app.database import Database, open_database
from app.explain import explain
from app.scoring import ScoreRequest, score_calls
from benchmarks.catalogues import find_catalogue, make
from benchmarks.make_catalogue import Shape, make_shape, write_catalogue
from readie.cost import COLD, PricedCheckpoint, PricedItem, Ranked, closure, match, rank
from readie.document import Catalogue, compute_generation
from readie.flavor import Flavor
from readie.projection import load_catalogue
from readie.units import ns_to_seconds
from readie.wire import ExplainRequest
from tests.routers import ask, serving

pytestmark = pytest.mark.scale

PACKAGES = 5000
CLIENTS = 16
ANY_CHECKPOINT = 16 * 2**30  # bytes: every checkpoint is an option


@dataclass(frozen=True)
class Model:
    """A catalogue as the oracle sees it."""

    items: dict[str, PricedItem]
    checkpoints: list[PricedCheckpoint]

    def rank(self, modules: list[str]) -> list[Ranked]:
        return rank(self.items, self.checkpoints, modules)


@pytest.fixture(scope="module")
def shape() -> Shape:
    """What the full-size document was written from."""
    return make_shape(PACKAGES, seed=1)


@pytest.fixture(scope="module")
def catalogue(shape: Shape) -> Catalogue:
    """The full-size catalogue."""
    if find_catalogue(PACKAGES) is None:
        make(PACKAGES)
    found = find_catalogue(PACKAGES)
    assert found is not None
    read = load_catalogue(found.document)
    assert (read.keys, len(read.dependencies)) == (shape.names, shape.closure.sum() - PACKAGES)
    return read


@pytest.fixture(scope="module")
def model(shape: Shape, catalogue: Catalogue) -> Model:
    keys = np.array(catalogue.keys, dtype=object)
    items = {
        key: PricedItem(int(load_ns), keys[needs].tolist())
        for key, load_ns, needs in zip(catalogue.keys, catalogue.load_ns, shape.direct, strict=True)
    }
    checkpoints = [
        PricedCheckpoint(each.checkpoint_id, frozenset(keys[each.items]), each.size_ns)
        for each in catalogue.checkpoints
    ]
    return Model(items, checkpoints)


# ---- agreement ----


def random_calls(keys: list[str], count: int) -> list[list[str]]:
    """Calls of up to eight modules: items, names inside items, and names that nobody knows."""
    drawn = random.Random(7)
    calls = []
    for _ in range(count):
        modules = drawn.sample(keys, drawn.choice([0, 1, 1, 2, 3, 3, 5, 8]))
        modules = [f"{key}.Name" if drawn.random() < 0.2 else key for key in modules]
        calls.append(modules + ["unknown.module"] * (drawn.random() < 0.2))
    return calls


@pytest.fixture(scope="module")
def ranked(model: Model, catalogue: Catalogue) -> list[tuple[list[str], list[Ranked]]]:
    """200 random calls and the oracle's ranking for each."""
    calls = random_calls(catalogue.keys, 200)
    number = {key: item for item, key in enumerate(catalogue.keys)}
    for key in {key for modules in calls for module in modules if (key := match(model.items, module))}:
        bounds = catalogue.offsets[number[key] : number[key] + 2]
        listed = {catalogue.keys[item] for item in catalogue.dependencies[slice(*bounds)]}
        assert closure(model.items, [key]) == listed | {key}
    return [(modules, model.rank(modules)) for modules in calls]


def test_both_databases_agree_with_the_oracle(
    database: Database, catalogue: Catalogue, ranked: list[tuple[list[str], list[Ranked]]]
) -> None:
    """200 random calls, in one batch and one by one: every option's cost and place, and what the winner lacks."""
    import_catalogue(database, catalogue)
    with database.reading() as connection:
        active = find_active_catalogue(connection, Flavor.CPU)
        assert active is not None
        requests = [ScoreRequest(catalogue_id=active.catalogue_id, sha256=active.sha256, modules=m) for m, _ in ranked]
        choices = score_calls(connection, requests)
        explanations = [explain(connection, ExplainRequest(modules=modules)) for modules, _ in ranked]

    for (modules, options), choice, explanation in zip(ranked, choices, explanations, strict=True):
        best, cold = options[0], next(option for option in options if option.ordinal == COLD)
        assert (choice.checkpoint_id, choice.cost_ns) == (best.checkpoint_id, best.cost_ns), modules
        assert choice.cold_cost_ns == cold.cost_ns, modules
        expected = [(option.checkpoint_id, option.cost_ns) for option in options]
        assert [(option.checkpoint_id, option.total_ns) for option in explanation.options] == expected, modules
        assert {item.item for item in explanation.options[0].items or ()} == best.missing, modules


# ---- a switch under load ----


@dataclass(frozen=True)
class Priced:
    """A document of a generation, and the only answers that are right by it, by the number of the module set."""

    path: Path
    generation: str
    checkpoint_ids: list[str]
    answers: list[tuple[str | None, float, float]]  # checkpoint, cost, cold cost


MODULE_SETS = 8


@pytest.fixture(scope="module")
def module_sets() -> list[list[str]]:
    found = find_catalogue(PACKAGES)
    assert found is not None
    return found.module_sets(MODULE_SETS, seed=3)


@pytest.fixture(scope="module")
def first(catalogue: Catalogue, model: Model, module_sets: list[list[str]]) -> Priced:
    """The full-size catalogue."""
    found = find_catalogue(PACKAGES)
    assert found is not None
    checkpoint_ids = [each.checkpoint_id for each in catalogue.checkpoints]
    return Priced(found.document, catalogue.generation, checkpoint_ids, right_answers(model, module_sets))


@pytest.fixture(scope="module")
def second(
    shape: Shape, model: Model, module_sets: list[list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Priced:
    """Another of the same size: other checkpoints of the same names, other prices of the same items."""
    other = replace(shape, checkpoints=shape.checkpoints[::-1], load_time=shape.load_time[::-1])
    path = tmp_path_factory.mktemp("second") / "cpu.json"
    with path.open("w", encoding="utf-8") as file:
        write_catalogue(other, file)
    keys = np.array(shape.names, dtype=object)
    prices = [item.load_ns for item in model.items.values()][::-1]
    turned = Model(
        {key: replace(item, load_ns=price) for (key, item), price in zip(model.items.items(), prices, strict=True)},
        [replace(each, checkpoint_id=f"checkpoint_{n}") for n, each in enumerate(model.checkpoints[::-1])],
    )
    named = [
        (f"checkpoint_{number}", keys[items].tolist(), keys[canonical].tolist())
        for number, (items, canonical) in enumerate(other.checkpoints)
    ]
    generation = compute_generation(Flavor.CPU, dict.fromkeys(shape.distributions, "1.0"), named)
    return Priced(path, generation, [name for name, _, _ in named], right_answers(turned, module_sets))


def right_answers(model: Model, module_sets: list[list[str]]) -> list[tuple[str | None, float, float]]:
    answers = []
    for modules in module_sets:
        options = model.rank(modules)
        cold = next(option for option in options if option.ordinal == COLD)
        answers.append((options[0].checkpoint_id, ns_to_seconds(options[0].cost_ns), ns_to_seconds(cold.cost_ns)))
    return answers


class Clients:
    """So many clients that ask for placements and explanations until told to stop, and what was wrong with them."""

    def __init__(self, url: str, by_generation: dict[str, Priced], module_sets: list[list[str]]) -> None:
        self.url, self.by_generation, self.module_sets = url, by_generation, module_sets
        self.numbers = itertools.count()
        self.seen: list[tuple[str, str]] = []  # what was asked for, the generation that answered
        self.wrong: list[Any] = []
        self.stopped = threading.Event()
        actions = [self.place, self.place, self.place, self.explain] * (CLIENTS // 4)
        self.threads = [threading.Thread(target=self.work, args=(action,)) for action in actions]

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join()

    def work(self, action: Callable[[httpx.Client], None]) -> None:
        with httpx.Client(base_url=self.url, trust_env=False, timeout=60) as client:
            while not self.stopped.is_set():
                try:
                    action(client)
                except Exception as error:
                    self.wrong.append(error)

    def place(self, client: httpx.Client) -> None:
        """Places a call, ends it, and compares what it was told with the right answer of that generation."""
        number = next(self.numbers) % MODULE_SETS
        body = {"payload": "", "python": "3.11", "modules": self.module_sets[number], "memory": ANY_CHECKPOINT}
        answer = client.post("/v1/calls", json=body)
        if answer.status_code != 201:
            self.wrong.append(answer.text)
            return
        placed = answer.json()["placement"]
        told = (placed["checkpoint_id"], placed["cost"], placed["cold_cost"])
        self.check("place", placed["generation"], number, told)
        result = {"outcome": "returned", "python": "3.11"}
        client.put(f"/v1/placements/{placed['placement_id']}/result", json=result).raise_for_status()

    def explain(self, client: httpx.Client) -> None:
        """The same for an explanation, with a module that nobody knows: nothing that is remembered answers."""
        count = next(self.numbers)
        number = count % MODULE_SETS
        answer = client.post("/v1/explain", json={"modules": [*self.module_sets[number], f"unknown{count}"]})
        explained = answer.json()
        best, cold = explained["options"][0], next(x for x in explained["options"] if x["checkpoint_id"] is None)
        self.check("explain", explained["generation"], number, (best["checkpoint_id"], best["total"], cold["total"]))

    def check(self, what: str, generation: str, number: int, told: tuple[str | None, float, float]) -> None:
        if generation not in self.by_generation or told != self.by_generation[generation].answers[number]:
            self.wrong.append((what, generation, number, told))
        else:
            self.seen.append((what, generation))

    def await_all(self, generations: set[str]) -> None:
        """Waits until both kinds of requests were answered by each of these, from now on."""
        start, deadline = len(self.seen), time.monotonic() + 30
        wanted = {(what, generation) for what in ("place", "explain") for generation in generations}
        while not self.wrong and not wanted <= set(self.seen[start:]):
            assert time.monotonic() < deadline, f"not all of {wanted} in {set(self.seen[start:])}"
            time.sleep(0.05)


def test_generations_switch_while_sixteen_clients_place_calls(
    database_url: str, catalogue: Catalogue, first: Priced, second: Priced, module_sets: list[list[str]]
) -> None:
    """400 MB are sent, imported and activated meanwhile, then activated back and forth: no call fails, and each is
    priced by one generation as a whole.
    """
    assert set(first.answers).isdisjoint(second.answers)
    with closing(open_database(database_url)) as database:
        import_catalogue(database, catalogue)
    by_generation = {each.generation: each for each in (first, second)}
    held = [{"generation": each.generation, "checkpoint_ids": each.checkpoint_ids} for each in (first, second)]
    worker = {"flavor": "cpu", "state": "ready", "python": "3.11.7", "runtime": "fork", "generations": held}
    with serving(DATABASE_URL=database_url, WORKER_TTL="600") as (_, url, lines):
        assert ask("PUT", f"{url}/v1/workers/w", json=worker).status_code == 204
        with Clients(url, by_generation, module_sets) as clients:
            clients.await_all({first.generation})
            with second.path.open("rb") as document:
                headers = {"Content-Type": "application/json"}
                sent = httpx.post(
                    f"{url}/v1/catalogues", content=document, headers=headers, trust_env=False, timeout=150
                )
            assert sent.status_code == 201, sent.text
            clients.await_all({second.generation})
            sha256 = {first.generation: catalogue.sha256, second.generation: sent.json()["sha256"]}
            for generation in [first.generation, second.generation] * 3:
                ask("POST", f"{url}/v1/catalogues/cpu/activate", json={"sha256": sha256[generation]}).raise_for_status()
                clients.await_all({generation})

        assert clients.wrong == [], "".join(lines)[-20_000:]
        assert not any("Traceback" in line for line in lines)
