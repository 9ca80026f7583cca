"""Planning: which checkpoints are chosen, under which limits, and what the plan says that it costs."""

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.corpus import ImportSet
from pipeline.measurement import MeasuredItem
from pipeline.plan import (
    PLANNERS,
    Limits,
    Plan,
    find_candidates,
    find_planner,
    load_ns,
    make_plan,
    pose_problem,
    read_plan,
    size_bytes,
    size_mb,
    write_plan,
)
from readie.cost import PricedCheckpoint, PricedItem, cheapest, closure
from readie.errors import BadFile, BadSetting, UsageError
from readie.flavor import Flavor
from readie.units import price_size


def item(key: str, seconds: float, size: float, *dependencies: str) -> MeasuredItem:
    return MeasuredItem(
        key=key,
        seconds=seconds,
        size_mb=size,
        resource_type="package",
        distribution=key.partition(".")[0],
        dependencies=frozenset(dependencies),
    )


def asks(*modules: str, count: int = 1) -> ImportSet:
    return ImportSet(modules=tuple(sorted(modules)), count=count)


def greedy(
    items: Sequence[MeasuredItem], corpus: Sequence[ImportSet], alpha: float, limits: Limits | None = None
) -> Plan:
    return make_plan(items, corpus, planner="greedy", alpha=alpha, limits=limits or Limits(), flavor=Flavor.CPU)


NUMPY = item("numpy", 0.2, 7.0)
PANDAS = item("pandas", 0.5, 73.0, "numpy")
TORCH = item("torch", 2.0, 120.0, "numpy")
WORLD = [NUMPY, PANDAS, TORCH]

NAMES = ["a", "a.b", "a.b.c", "d", "e", "f.g", "h", "i"]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[MeasuredItem], list[ImportSet]]:
    """Measured items with any dependencies (cycles too), and a corpus that also asks for what was not measured."""
    keys = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    items = [
        MeasuredItem(
            key=key,
            seconds=draw(st.integers(0, 2_000_000)) / 1e6,
            size_mb=draw(st.integers(0, 300_000)) / 1e3,
            resource_type="package",
            distribution="d",
            dependencies=frozenset(draw(st.sets(st.sampled_from(keys), max_size=3))),
        )
        for key in keys
    ]
    module = st.sampled_from([*NAMES, "a.b.function", "unknown", "d.x.y"])
    sets = st.builds(
        lambda modules, count: ImportSet(modules=tuple(sorted(modules)), count=count),
        st.sets(module, min_size=1, max_size=4),
        st.integers(1, 9),
    )
    return items, draw(st.lists(sets, max_size=8))


alphas = st.sampled_from([0.000001, 0.0001, 0.002, 0.01, 0.1])
limit_sets = st.builds(
    Limits,
    max_checkpoints=st.integers(1, 6),
    size_budget_mb=st.sampled_from([0, 10.5, 200, 2048]),
    checkpoint_mb=st.sampled_from([0, 5, 100.25, 700]),
)


def oracle(items: Sequence[MeasuredItem]) -> dict[str, PricedItem]:
    return {one.key: PricedItem(load_ns(one), sorted(one.dependencies)) for one in items}


def oracle_checkpoints(plan: Plan) -> list[PricedCheckpoint]:
    alpha = Decimal(repr(plan.alpha))
    return [
        PricedCheckpoint(one.checkpoint_id, frozenset(one.items), price_size(alpha, Decimal(repr(one.size_mb))))
        for one in plan.checkpoints
    ]


class TestEveryPlan:
    """A plan is feasible, priced as the router prices it, and the same for the same input."""

    @settings(max_examples=25)
    @given(worlds(), alphas, limit_sets)
    def test_its_cost_is_what_the_oracle_adds_up(
        self, world: tuple[list[MeasuredItem], list[ImportSet]], alpha: float, limits: Limits
    ) -> None:
        """The plan's cost is the sum, over all requests, of the cheapest option's cost in the oracle."""
        items, corpus = world
        plan = greedy(items, corpus, alpha, limits)
        priced, checkpoints = oracle(items), oracle_checkpoints(plan)
        best = [(request.count, cheapest(priced, checkpoints, request.modules)) for request in corpus]

        assert sum(count * one.cost_ns for count, one in best) == plan.cost_ns
        assert plan.cost_without_ns == sum(
            request.count * cheapest(priced, [], request.modules).cost_ns for request in corpus
        )

    @settings(max_examples=25)
    @given(worlds(), alphas, limit_sets)
    def test_it_says_for_how_many_requests_each_checkpoint_is_chosen(
        self, world: tuple[list[MeasuredItem], list[ImportSet]], alpha: float, limits: Limits
    ) -> None:
        """`requests` of a checkpoint counts the requests for which the router would take it."""
        items, corpus = world
        plan = greedy(items, corpus, alpha, limits)
        priced, checkpoints = oracle(items), oracle_checkpoints(plan)
        counts = dict.fromkeys((one.checkpoint_id for one in plan.checkpoints), 0)
        for request in corpus:
            chosen = cheapest(priced, checkpoints, request.modules).checkpoint_id
            assert chosen is not None
            counts[chosen] += request.count

        assert counts == {one.checkpoint_id: one.requests for one in plan.checkpoints}
        assert sum(counts.values()) == plan.requests

    @settings(max_examples=25)
    @given(worlds(), alphas, limit_sets)
    def test_it_is_never_worse_than_no_checkpoints(
        self, world: tuple[list[MeasuredItem], list[ImportSet]], alpha: float, limits: Limits
    ) -> None:
        """Checkpoints are only added where they lower the total."""
        plan = greedy(*world, alpha, limits)

        assert plan.cost_ns <= plan.cost_without_ns

    @settings(max_examples=25)
    @given(worlds(), alphas, limit_sets)
    def test_it_keeps_the_limits(
        self, world: tuple[list[MeasuredItem], list[ImportSet]], alpha: float, limits: Limits
    ) -> None:
        """Number, size of each and size of all together stay within what is allowed."""
        plan = greedy(*world, alpha, limits)
        sizes = {one.key: size_bytes(one) for one in world[0]}

        assert len(plan.checkpoints) <= limits.max_checkpoints
        assert all(one.size_mb <= limits.checkpoint_mb for one in plan.checkpoints)
        assert sum(one.size_mb for one in plan.checkpoints) <= limits.size_budget_mb + 1e-9
        assert [size_mb(sum(sizes[key] for key in one.items)) for one in plan.checkpoints] == [
            one.size_mb for one in plan.checkpoints
        ]

    @settings(max_examples=25)
    @given(worlds(), alphas, limit_sets)
    def test_importing_what_is_canonical_loads_exactly_its_items(
        self, world: tuple[list[MeasuredItem], list[ImportSet]], alpha: float, limits: Limits
    ) -> None:
        """A checkpoint's items are the closure of its canonical ones, and these are all of its items asked for."""
        items, corpus = world
        plan = greedy(items, corpus, alpha, limits)
        priced = oracle(items)
        asked = {
            match for request in corpus for module in request.modules if (match := _match(priced, module)) is not None
        }
        for one in plan.checkpoints:
            assert closure(priced, one.canonical) == frozenset(one.items)
            assert set(one.canonical) == asked & set(one.items)

    @settings(max_examples=25)
    @given(worlds(), alphas, limit_sets)
    def test_its_first_checkpoint_is_the_empty_one(
        self, world: tuple[list[MeasuredItem], list[ImportSet]], alpha: float, limits: Limits
    ) -> None:
        """checkpoint_0 holds nothing, and ids count up from it."""
        plan = greedy(*world, alpha, limits)

        assert plan.checkpoints[0].items == plan.checkpoints[0].canonical == []
        assert [one.checkpoint_id for one in plan.checkpoints] == [
            f"checkpoint_{number}" for number in range(len(plan.checkpoints))
        ]

    @settings(max_examples=25)
    @given(worlds(), alphas, st.randoms(use_true_random=False))
    def test_the_order_of_its_input_does_not_matter(
        self, world: tuple[list[MeasuredItem], list[ImportSet]], alpha: float, random: st.DataObject
    ) -> None:
        """The same items and requests in any order give the same bytes."""
        items, corpus = world
        first = msgspec.json.encode(greedy(items, corpus, alpha))
        items, corpus = list(items), list(corpus)
        random.shuffle(items)  # type: ignore[attr-defined]
        random.shuffle(corpus)  # type: ignore[attr-defined]

        assert msgspec.json.encode(greedy(items, corpus, alpha)) == first


def _match(priced: dict[str, PricedItem], module: str) -> str | None:
    return next((name for name in _prefixes(module) if name in priced), None)


def _prefixes(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


class TestGreedy:
    """Greedy adds the candidate that lowers the total most."""

    def test_cheap_memory_gives_each_request_a_checkpoint_of_its_own(self) -> None:
        """Where size costs almost nothing, both import sets are held whole."""
        plan = greedy(WORLD, [asks("pandas", count=3), asks("torch")], 0.00001)

        assert {tuple(one.canonical) for one in plan.checkpoints} >= {("pandas",), ("torch",)}
        assert plan.cost_ns == 3 * 800_000 + 1_270_000

    def test_dear_memory_leaves_only_the_empty_checkpoint(self) -> None:
        """Where restoring costs more than importing, nothing is captured."""
        plan = greedy(WORLD, [asks("pandas"), asks("torch")], 0.1)

        assert [one.checkpoint_id for one in plan.checkpoints] == ["checkpoint_0"]
        assert plan.cost_ns == plan.cost_without_ns == 2_900_000_000

    def test_a_request_too_large_for_a_checkpoint_gets_the_part_that_fits(self) -> None:
        """A pair asked for together is over the limit; its parts are candidates of their own."""
        plan = greedy(WORLD, [asks("pandas", "torch")], 0.001, Limits(checkpoint_mb=150))

        assert plan.checkpoints[1].canonical == ["torch"]
        assert plan.checkpoints[1].size_mb == 127.0

    def test_what_two_requests_share_is_a_candidate(self) -> None:
        """The items that two requests for one module have in common are held, if nothing more fits."""
        items = [item("base", 1.0, 10.0), item("left", 0.1, 300.0, "base"), item("right", 0.1, 300.0, "base")]
        plan = greedy(items, [asks("base", "left"), asks("base", "right")], 0.001, Limits(checkpoint_mb=100))

        assert [one.canonical for one in plan.checkpoints] == [[], ["base"]]
        assert plan.checkpoints[1].requests == 2
        assert plan.checkpoints[1].saved_s == pytest.approx(2 * (1.0 - 0.01))

    def test_a_name_stands_for_its_longest_measured_prefix(self) -> None:
        """`numpy.linalg.norm` asks for numpy where only numpy was measured."""
        plan = greedy(WORLD, [asks("numpy.linalg.norm")], 0.001)

        assert plan.checkpoints[1].canonical == ["numpy"]

    def test_names_that_match_nothing_are_reported_with_their_count(self) -> None:
        """They cost nothing, and are no reason for a checkpoint."""
        plan = greedy(WORLD, [asks("nope.x", "numpy", count=2), asks("nope.x")], 0.001)

        assert plan.unmatched == {"nope.x": 3}
        assert plan.requests == 3

    def test_no_corpus_gives_the_empty_checkpoint(self) -> None:
        """An empty corpus is planned for as well."""
        plan = greedy(WORLD, [], 0.001)

        assert len(plan.checkpoints) == 1
        assert plan.cost_ns == plan.cost_without_ns == 0

    def test_candidates_are_closures_and_pairs_asked_for_together(self) -> None:
        """Closures of import sets and of single modules, unions and intersections of pairs, each once."""
        problem = pose_problem(WORLD, [asks("pandas", "torch"), asks("numpy")])
        found = find_candidates(problem, Decimal("0.001"), Limits())
        names = {tuple(problem.keys[problem.asked[p]] for p in one) for one in found.canonical}

        assert names == {("numpy",), ("numpy", "pandas"), ("numpy", "torch"), ("numpy", "pandas", "torch")}


class TestFixed:
    """`fixed` takes the sets that it is given."""

    def plan(self, sets: Sequence[Sequence[str]], limits: Limits | None = None) -> Plan:
        return make_plan(
            WORLD,
            [asks("pandas")],
            planner="fixed",
            alpha=0.001,
            limits=limits or Limits(),
            flavor=Flavor.CPU,
            sets=sets,
        )

    def test_each_set_becomes_a_checkpoint_in_order(self) -> None:
        """Also one that no request asks for."""
        plan = self.plan([["torch"], ["pandas.DataFrame"]])

        assert [one.items for one in plan.checkpoints] == [[], ["numpy", "torch"], ["numpy", "pandas"]]
        assert [one.canonical for one in plan.checkpoints] == [[], ["torch"], ["pandas"]]
        assert [one.requests for one in plan.checkpoints] == [0, 0, 1]

    @pytest.mark.parametrize(
        ("sets", "limits", "message"),
        [
            ([["nope"]], Limits(), "set 1: nope was not measured"),
            ([], Limits(), "no sets"),
            ([["torch"]], Limits(checkpoint_mb=100), "127.0 MB"),
            ([["torch"], ["pandas"]], Limits(max_checkpoints=2), "more than 2 checkpoints"),
            ([["torch"], ["pandas"]], Limits(size_budget_mb=200), "207.0 MB together"),
        ],
    )
    def test_a_set_that_cannot_be_had_is_an_error(
        self, sets: Sequence[Sequence[str]], limits: Limits, message: str
    ) -> None:
        """The message names the set and the limit."""
        with pytest.raises(UsageError, match=message):
            self.plan(sets, limits)


class TestPlanners:
    """Planners are found by name."""

    def test_an_unknown_planner_lists_the_known_ones(self) -> None:
        """The way out names every planner there is."""
        with pytest.raises(BadSetting) as raised:
            find_planner("best")
        for name in PLANNERS:
            assert name in raised.value.hint


class TestPlanFile:
    """plan.json is written whole, and read with a clear error."""

    def test_it_reads_back(self, tmp_path: Path) -> None:
        """What is written is what is read."""
        plan = greedy(WORLD, [asks("pandas")], 0.001)
        write_plan(tmp_path / "plan.json", plan)

        assert read_plan(tmp_path / "plan.json") == plan
        assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]

    def test_a_damaged_file_is_named(self, tmp_path: Path) -> None:
        """The error names the file."""
        (tmp_path / "plan.json").write_text('{"version": 1}')
        with pytest.raises(BadFile, match=r"plan\.json"):
            read_plan(tmp_path / "plan.json")
