"""Times are brought to one pace: a machine that others use as well works at another from process to process."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.pace import (
    believe,
    find_reference,
    fit_trust,
    mean_without_strays,
    select_steady,
    settle,
    standard_errors,
)

COSTS = {f"m{number}": 0.004 + 0.001 * number for number in range(20)}


def slowed(factor: float) -> dict[str, float]:
    return {name: cost * factor for name, cost in COSTS.items()}


class TestSettling:
    """Medians of modules and of processes, in turn."""

    @given(factors=st.lists(st.floats(1.0, 1.5), min_size=3, max_size=12))
    def test_what_slows_a_whole_process_is_taken_out(self, factors: list[float]) -> None:
        """Whatever the paces, the proportions of the modules stay, and no spread is left."""
        settled = settle([slowed(factor) for factor in factors], [None] * len(factors))
        level = settled.figures["m0"].middle / COSTS["m0"]

        assert {name: figure.middle for name, figure in settled.figures.items()} == pytest.approx(slowed(level))
        assert max(figure.spread for figure in settled.figures.values()) < 1e-9
        assert [pace / settled.paces[0] for pace in settled.paces] == pytest.approx(
            [factor / factors[0] for factor in factors]
        )

    def test_the_fixed_work_says_what_the_level_is(self) -> None:
        """Half of the processes ran on a machine that was busy, and said so."""
        settled = settle([slowed(1.0)] * 5 + [slowed(1.4)] * 5, [0.010] * 5 + [0.014] * 5)

        assert settled.figures["m3"].middle == pytest.approx(COSTS["m3"])
        assert settled.paces == pytest.approx([1.0] * 5 + [1.4] * 5)

    def test_one_slow_module_is_not_taken_for_the_pace(self) -> None:
        """The others are as fast as ever, and its own stray time counts as a third more than the median."""
        spoiled = slowed(1.0) | {"m0": 0.5}
        settled = settle([slowed(1.0), slowed(1.0), spoiled], [0.010] * 3)

        assert settled.paces == pytest.approx([1.0] * 3)
        assert settled.figures["m1"].middle == pytest.approx(COSTS["m1"])
        assert settled.figures["m0"].middle == pytest.approx(COSTS["m0"] * (1 + 1 + 4 / 3) / 3)

    def test_a_group_that_shares_nothing_keeps_the_level_that_it_tells(self) -> None:
        """Three processes on a busy machine are slow together: no comparison shows it, the fixed work does."""
        others = [{name.replace("m", "n"): cost for name, cost in slowed(factor).items()} for factor in (1.5, 1.6, 1.7)]
        settled = settle([slowed(1.0)] * 20 + others, [0.010] * 20 + [0.015, 0.016, 0.017])

        assert settled.paces[-3:] == pytest.approx([1.5, 1.6, 1.7])
        assert settled.figures["n3"].middle == pytest.approx(COSTS["m3"])

    def test_a_module_alone_keeps_its_noise(self) -> None:
        """Compared with itself only, it would look perfectly steady."""
        settled = settle([{"a": 0.05}, {"a": 0.06}, {"a": 0.07}], [0.010] * 3)

        assert settled.figures["a"].middle == pytest.approx(0.06)
        assert settled.figures["a"].spread == pytest.approx(0.01)

    def test_the_level_of_few_processes_is_not_known_better_than_what_they_tell(self) -> None:
        """Modules that look perfectly steady beside one another may all be off by what their processes told wrongly."""
        others = {name.replace("m", "n"): cost for name, cost in COSTS.items()}
        told = [0.010, 0.012, 0.011, 0.009, 0.013, 0.010]
        settled = settle([slowed(1.0)] * 6 + [others] * 3, [*told, 0.012, 0.009, 0.010])
        many, few = settled.figures["m3"], settled.figures["n3"]

        assert 0.005 < many.level < few.level < 0.1
        assert few.interval >= 1.96 * few.level * few.middle

    def test_a_process_that_stalled_does_not_count(self) -> None:
        """One that waited for a disk, within a single module."""
        stalled = slowed(1.0) | {"m0": 0.5}
        settled = settle([slowed(1.0)] * 3 + [stalled] * 4, [0.010] * 7, [False] * 3 + [True] * 4)

        assert settled.figures["m0"].middle == pytest.approx(COSTS["m0"])
        assert settled.figures["m0"].count == 3

    def test_it_counts_where_there_are_not_enough_others(self) -> None:
        """Better than nothing."""
        lone = slowed(2.0) | {"lone": 0.2}
        settled = settle([slowed(1.0), slowed(1.0), slowed(1.0), lone], [0.010] * 3 + [0.020])

        assert settled.figures["lone"].middle == pytest.approx(0.1)
        assert settled.figures["lone"].count == 1
        assert math.isinf(settled.figures["lone"].interval)

    def test_nothing_measured_is_nothing_known(self) -> None:
        """No process, no figures."""
        assert settle([], []).figures == {}
        assert settle([{}], [None]).figures == {}


def test_the_reference_is_the_pace_of_a_machine_left_alone() -> None:
    """The fastest twentieth; processes that told none do not count."""
    assert find_reference([None, *(0.010 + 0.001 * number for number in range(21))]) == pytest.approx(0.011)
    assert find_reference([None]) is None


class TestTrust:
    """How much of the pace that a process tells is to be believed is fitted to processes that did the same."""

    NOISE = (0.9, 1.15, 1.0, 1.1, 0.85, 1.05, 0.95, 1.2) * 5

    def test_a_pace_that_explains_the_times_is_believed(self) -> None:
        """In full: the times go up and down with it."""
        assert fit_trust([0.1 * pace for pace in self.NOISE], self.NOISE, [0] * 40) == pytest.approx(1.0)

    def test_a_pace_that_has_half_of_the_noise_of_the_times_is_believed_by_half(self) -> None:
        """A square root, here: what is told varies twice as much as what happens."""
        assert fit_trust([0.1 * pace**0.5 for pace in self.NOISE], self.NOISE, [0] * 40) == pytest.approx(0.5, abs=0.05)

    def test_a_pace_that_says_nothing_is_not_believed(self) -> None:
        """Half of the processes told another pace, and took as long."""
        assert fit_trust([0.1] * 40, self.NOISE, [0] * 40) < 0.1

    def test_groups_are_compared_with_themselves_only(self) -> None:
        """One that is slower by nature says nothing of paces."""
        seconds = [0.1 * pace for pace in self.NOISE[:20]] + [3.0 * pace for pace in self.NOISE[20:]]
        told = [*self.NOISE[:20], *(1.5 * pace for pace in self.NOISE[20:])]

        assert fit_trust(seconds, told, [0] * 20 + [1] * 20) == pytest.approx(1.0)

    def test_nothing_told_is_believed(self) -> None:
        """And where nobody told anything, there is nothing to believe."""
        assert fit_trust([0.1], [None], [0]) == 1.0
        assert believe([None, None], 0.5) == [1.0, 1.0]

    def test_what_is_believed_is_nearer_to_the_middle(self) -> None:
        """By the power, and a process that told nothing is taken to be there."""
        assert believe([0.010, 0.040, None, 0.020], 0.5) == pytest.approx([0.01414, 0.02828, 0.020, 0.020], rel=1e-3)


class TestErrors:
    """How well a mean of a few is known."""

    def test_the_error_goes_down_with_the_root_of_the_count(self) -> None:
        """Four times as many, half of the error; both have the same spread."""
        few, many = standard_errors([[1.0, 1.1, 0.9, 1.0], [1.0, 1.1, 0.9, 1.0] * 4])

        assert few / many == pytest.approx(2.0, rel=0.1)

    def test_values_that_agree_by_chance_are_not_exact(self) -> None:
        """All others differ by a fifth: so would they."""
        lucky = standard_errors([[1.0, 1.0, 1.0], *([[0.8, 1.0, 1.2]] * 9)])[0]

        assert 0.05 < lucky < 0.12

    def test_single_values_tell_no_error(self) -> None:
        """Nothing is known of what another would be."""
        assert standard_errors([[1.0], [2.0]]) == [math.inf, math.inf]
        assert standard_errors([]) == []

    def test_a_stray_counts_as_a_third_more_than_the_median(self) -> None:
        """So that one does not make the mean."""
        assert mean_without_strays([1.0, 1.0, 9.0]) == pytest.approx((1 + 1 + 4 / 3) / 3)

    def test_what_stalled_counts_only_where_few_did_not(self) -> None:
        """Three others are enough."""
        assert select_steady([False, True, False, False]) == [0, 2, 3]
        assert select_steady([False, True, False]) == [0, 1, 2]
