"""What other limits would cost, and what plans are worth to requests that they were not made for."""

from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.corpus import ImportSet
from pipeline.measurement import MeasuredItem
from pipeline.plan import make_plan
from pipeline.problem import Limits
from pipeline.what_if import choose_by_hand, explore_limits, hold_out, plot_what_if, write_held_out, write_what_if
from readie.cost import cheapest
from readie.flavor import Flavor
from tests.test_plan import (
    MISSED,
    NUMPY,
    PANDAS,
    WORLD,
    Missed,
    alphas,
    asks,
    item,
    oracle,
    oracle_checkpoints,
    worlds,
)

World = tuple[list[MeasuredItem], list[ImportSet]]

CORPUS = [asks("numpy", count=9), asks("pandas", count=5), asks("torch", count=2), asks("pandas", "torch")]


class TestWhatIf:
    """`plan --what-if` shows the cost against the number of checkpoints and against the budget."""

    @settings(max_examples=6)
    @given(worlds(), alphas)
    def test_more_room_never_costs_more(self, world: World, alpha: float) -> None:
        """Along both curves costs fall or stay, between the bound and greedy's."""
        found = explore_limits(*world, alpha=alpha, limits=Limits(max_checkpoints=4, size_budget_mb=300))

        for points in (found.by_count, found.by_budget):
            costs = [one.cost_ns for one in points]
            assert costs == sorted(costs, reverse=True)
            assert all(one.bound_ns <= one.cost_ns <= one.greedy_ns <= found.cost_without_ns for one in points)

    @pytest.mark.parametrize("missed", MISSED, ids=lambda missed: missed.name)
    def test_a_point_is_better_than_greedy_where_a_plan_is(self, missed: Missed) -> None:
        """The point of the limits asked for costs what the best plan costs, and its bound is near."""
        found = explore_limits(missed.items, missed.corpus, alpha=0.001, limits=missed.limits)
        point = next(one for one in found.by_count if one.max_checkpoints == missed.limits.max_checkpoints)
        same = next(one for one in found.by_budget if one.size_budget_mb == missed.limits.size_budget_mb)

        for one in (point, same):
            assert (one.cost_ns, one.greedy_ns) == (missed.best_ns, missed.greedy_ns)
            assert 0.98 * one.cost_ns <= one.bound_ns <= one.cost_ns

    def test_one_checkpoint_is_the_empty_one(self) -> None:
        """With no place beside it, all requests cost what they cost cold."""
        found = explore_limits(WORLD, CORPUS, alpha=0.001, limits=Limits())

        assert found.by_count[0].max_checkpoints == found.by_count[0].checkpoints == 1
        assert found.by_count[0].cost_ns == found.cost_without_ns == found.by_count[0].bound_ns

    def test_the_limits_asked_for_are_among_the_points(self) -> None:
        """Their point has the cost of the plan itself."""
        limits = Limits(max_checkpoints=5, size_budget_mb=250)
        found = explore_limits(WORLD, CORPUS, alpha=0.001, limits=limits)
        plan = make_plan(WORLD, CORPUS, planner="optimal", alpha=0.001, limits=limits, flavor=Flavor.CPU)

        assert {one.max_checkpoints: one.cost_ns for one in found.by_count}[5] == plan.cost_ns
        assert {one.size_budget_mb: one.cost_ns for one in found.by_budget}[250] == plan.cost_ns

    def test_the_plot_is_the_same_bytes_again(self, tmp_path: Path) -> None:
        """An SVG without a date and without random names."""
        found = explore_limits(WORLD, CORPUS, alpha=0.001, limits=Limits(max_checkpoints=3))
        for name in ("a.svg", "b.svg"):
            plot_what_if(found, tmp_path / name)

        assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
        assert "bound" in (tmp_path / "a.svg").read_text()

    def test_an_empty_corpus_has_tables_and_a_plot(self, tmp_path: Path) -> None:
        """Nothing asked for costs nothing under any limits."""
        found = explore_limits(WORLD, [], alpha=0.001, limits=Limits())
        plot_what_if(found, tmp_path / "what-if.svg")

        assert {one.cost_ns for one in [*found.by_count, *found.by_budget]} == {0}
        assert write_what_if(found)[0].endswith("0.00 s")


class TestHeldOut:
    """`plan --holdout` prices requests with checkpoints that were planned for others."""

    @settings(max_examples=8)
    @given(worlds(), alphas, st.integers(0, 9))
    def test_costs_are_those_of_the_oracle(self, world: World, alpha: float, seed: int) -> None:
        """Both parts of the corpus, for every planner, add up to the oracle's costs with that planner's checkpoints."""
        items, corpus = world
        limits = Limits(max_checkpoints=3)
        found = hold_out(items, corpus, share=0.5, seed=seed, alpha=alpha, limits=limits)
        priced = oracle(items)
        everything = sum(one.count * cheapest(priced, [], one.modules).cost_ns for one in corpus)

        assert found.import_sets + found.held_out == len(corpus)
        assert [one.planner for one in found.rows] == ["none", "fixed", "greedy", "optimal"]
        assert found.rows[0].planned_ns + found.rows[0].held_out_ns == everything
        assert found.rows[3].planned_ns <= found.rows[2].planned_ns <= found.rows[0].planned_ns

    def test_the_held_out_part_is_priced_with_the_checkpoints_of_the_other(self) -> None:
        """Each import set costs its cheapest option among checkpoints that were planned without it."""
        items = [NUMPY, PANDAS, item("lone", 1.0, 5.0, "numpy")]
        corpus = [asks("pandas", count=4), asks("numpy", "pandas"), asks("lone", count=3), asks("lone", "pandas")]
        found = hold_out(items, corpus, share=0.25, seed=3, alpha=0.001, limits=Limits(max_checkpoints=2))
        rows = {one.planner: one for one in found.rows}
        costs = set()
        for left_out in corpus:
            rest = [one for one in corpus if one is not left_out]
            limits = Limits(max_checkpoints=2)
            plan = make_plan(items, rest, planner="optimal", alpha=0.001, limits=limits, flavor=Flavor.CPU)
            best = cheapest(oracle(items), oracle_checkpoints(plan), left_out.modules)
            costs.add((plan.cost_ns, left_out.count * best.cost_ns))

        assert (rows["optimal"].planned_ns, rows["optimal"].held_out_ns) in costs

    def test_each_planner_is_told_as_it_is_done(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """On the committed corpus it takes minutes."""
        monkeypatch.setattr("pipeline.progress._EVERY_S", 0.0)
        hold_out(WORLD, CORPUS, share=0.5, seed=1, alpha=0.001, limits=Limits())

        assert capsys.readouterr().err.splitlines() == [
            "  planning: 1 of 6 (planned by fixed)",
            "  planning: 2 of 6 (priced fixed)",
            "  planning: 3 of 6 (planned by greedy)",
            "  planning: 4 of 6 (priced greedy)",
            "  planning: 5 of 6 (planned by optimal)",
            "  planning: 6 of 6 (priced optimal)",
        ]

    def test_the_same_seed_holds_the_same_out(self) -> None:
        """Also where the corpus comes in another order."""
        first = hold_out(WORLD, CORPUS, share=0.5, seed=1, alpha=0.001, limits=Limits())
        again = hold_out(WORLD, CORPUS[::-1], share=0.5, seed=1, alpha=0.001, limits=Limits())

        assert msgspec.json.encode(first) == msgspec.json.encode(again)
        assert write_held_out(first)[0].startswith("Planned for 2 import sets, and priced 2 others; seed 1")

    def test_by_hand_one_takes_what_is_most_asked_for_and_fits(self) -> None:
        """Modules by how often they are asked for, each a checkpoint, the too large ones left out."""
        assert choose_by_hand(WORLD, CORPUS, Limits()) == [("numpy",), ("pandas",), ("torch",)]
        assert choose_by_hand(WORLD, CORPUS, Limits(max_checkpoints=3)) == [("numpy",), ("pandas",)]
        assert choose_by_hand(WORLD, CORPUS, Limits(checkpoint_mb=100)) == [("numpy",), ("pandas",)]
        assert choose_by_hand(WORLD, CORPUS, Limits(size_budget_mb=float(Decimal("134.0")))) == [
            ("numpy",),
            ("pandas",),
        ]
