"""Times are brought to one pace: a machine that others use as well works at another from process to process."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.pace import find_reference, settle

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
        others = {name.replace("m", "n"): cost for name, cost in slowed(1.6).items()}
        settled = settle([slowed(1.0)] * 20 + [others] * 3, [0.010] * 20 + [0.015, 0.016, 0.017])

        assert settled.paces[-3:] == pytest.approx([1.6] * 3)
        assert settled.figures["n3"].middle == pytest.approx(COSTS["m3"])

    def test_a_module_alone_keeps_its_noise(self) -> None:
        """Compared with itself only, it would look perfectly steady."""
        settled = settle([{"a": 0.05}, {"a": 0.06}, {"a": 0.07}], [0.010] * 3)

        assert settled.figures["a"].middle == pytest.approx(0.06)
        assert settled.figures["a"].spread == pytest.approx(0.01)

    def test_a_process_that_was_spoiled_does_not_count(self) -> None:
        """One that was twice as slow as the others."""
        settled = settle([slowed(1.0), slowed(1.02), slowed(1.01), slowed(2.0)], [0.010, 0.0102, 0.0101, 0.020])

        assert settled.figures["m0"].count == 3

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
