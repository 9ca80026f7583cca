"""The cost model (DESIGN §4), in its plain form."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readie.cost import PricedCheckpoint, PricedItem, cheapest, closure, match, parents, price_catalogue, rank
from tests.catalogues import make_worked_example, read
from tests.strategies import MODULE_NAMES, module_sets, priced_items

NUMPY_PANDAS_TORCH = {
    "numpy": PricedItem(200_000_000),
    "pandas": PricedItem(500_000_000, ["numpy"]),
    "torch": PricedItem(2_000_000_000, ["numpy"]),
}


@st.composite
def checkpoint_lists(draw: st.DrawFn) -> list[PricedCheckpoint]:
    held = st.frozensets(st.sampled_from(MODULE_NAMES), max_size=6)
    sizes = st.integers(0, 6)
    return [PricedCheckpoint(f"checkpoint_{n}", draw(held), draw(sizes)) for n in range(draw(st.integers(0, 4)))]


class TestMatch:
    """A name that is not an item stands for its longest prefix, by dots, that is one. Prefixed keys match exactly."""

    @pytest.mark.parametrize(
        ("module", "item"),
        [
            ("a", "a"),
            ("a.b", "a.b"),
            ("a.b.c", "a.b"),  # LinearSVC of sklearn.svm
            ("a.b.c.d", "a.b"),
            ("a.c", "a"),
            ("a.bb", "a"),  # by dots, not by letters
            ("b.c", None),  # b.c.d is an item, but no prefix
            ("b.c.d.e", "b.c.d"),
            ("aa", None),
            ("", None),
            (".a", None),
            ("a.", "a"),
            ("a..b", "a"),
            ("model:m", "model:m"),
            ("model:m.x", None),
            ("model", None),
            ("A", None),
        ],
    )
    def test_a_module_stands_for_its_longest_known_prefix(self, module: str, item: str | None) -> None:
        """A module stands for itself or for its longest prefix that is an item."""
        assert match(dict.fromkeys(["a", "a.b", "b.c.d", "model:m"]), module) == item

    def test_parents_are_listed_from_the_innermost(self) -> None:
        """Importing a.b.c imports a.b and a."""
        assert parents("a.b.c") == ["a.b", "a"]
        assert parents("a") == []


class TestClosure:
    """Needed are the matched items and all that they need, each once."""

    def test_dependencies_are_followed_and_cycles_end(self) -> None:
        """A cycle brings in each of its items once."""
        items = {"a": PricedItem(1, ["b"]), "b": PricedItem(1, ["c"]), "c": PricedItem(1, ["a", "c"])}

        assert closure(items, ["b"]) == {"a", "b", "c"}

    def test_parents_of_dependencies_are_needed(self) -> None:
        """What a dependency's parent package needs is needed too, past parents that are no items."""
        items = {"x": PricedItem(1, ["a.b.c"]), "a": PricedItem(1, ["y"]), "a.b.c": PricedItem(1), "y": PricedItem(1)}

        assert closure(items, ["x"]) == {"x", "a.b.c", "a", "y"}

    def test_only_packages_have_parents(self) -> None:
        """A dot in the key of a model is only a dot."""
        items = {"model:a": PricedItem(1, package=False), "model:a.b": PricedItem(1, package=False)}

        assert closure(items, ["model:a.b"]) == {"model:a.b"}

    def test_unknown_names_are_ignored(self) -> None:
        """Modules and dependencies that are no items count nowhere."""
        assert closure({"a": PricedItem(1, ["unknown"])}, ["a", "b.c"]) == {"a"}

    @given(priced_items(), module_sets(), module_sets())
    @settings(max_examples=30)
    def test_it_is_monotone(self, items: dict[str, PricedItem], some: list[str], more: list[str]) -> None:
        """Asking for more never needs less; and what two sets need together is what each needs."""
        assert closure(items, some + more) == closure(items, some) | closure(items, more)

    @given(priced_items(), module_sets())
    def test_it_is_idempotent(self, items: dict[str, PricedItem], modules: list[str]) -> None:
        """The closure of a closure is itself."""
        needed = closure(items, modules)

        assert closure(items, needed) == needed


class TestRank:
    """Lowest cost wins. On a tie the later checkpoint wins, and the cold start comes before all."""

    @pytest.mark.parametrize(
        ("alpha", "costs"),
        [
            (0.006, {"B": 480_000_000, "A": 542_000_000, None: 700_000_000, "C": 1_200_000_000}),
            (0.02, {"A": 640_000_000, None: 700_000_000, "B": 1_600_000_000, "C": 4_000_000_000}),
        ],
    )
    def test_the_worked_example_is_right_to_the_digit(self, alpha: float, costs: dict[str | None, int]) -> None:
        """With numpy 0.2 s, pandas 0.5 s; A, B and C of 7, 80 and 200 MB; asked for pandas."""
        items, checkpoints = price_catalogue(read(make_worked_example(alpha)))

        ranked = rank(items, checkpoints, ["pandas"])

        assert [(option.checkpoint_id, option.cost_ns) for option in ranked] == list(costs.items())

    def test_it_names_what_is_missing(self) -> None:
        """An option lacks the needed items that it does not hold, and pays for those."""
        held = [PricedCheckpoint("numpy", {"numpy"}, 5)]

        best = cheapest(NUMPY_PANDAS_TORCH, held, ["pandas.DataFrame"])

        assert (best.checkpoint_id, set(best.missing), best.missing_ns) == ("numpy", {"pandas"}, 500_000_000)

    def test_the_empty_checkpoint_beats_a_cold_start(self) -> None:
        """checkpoint_0 of size 0 costs what a cold start costs, and wins."""
        held = [PricedCheckpoint("checkpoint_0", frozenset(), 0)]

        assert cheapest(NUMPY_PANDAS_TORCH, held, ["numpy"]).checkpoint_id == "checkpoint_0"
        assert cheapest(NUMPY_PANDAS_TORCH, held, []).checkpoint_id == "checkpoint_0"

    def test_the_later_of_two_that_tie_wins(self) -> None:
        """Two checkpoints of one price: the order of the catalogue decides, not their names."""
        held = [PricedCheckpoint(name, {"numpy"}, 5) for name in ("z", "b", "c")]

        ranked = rank(NUMPY_PANDAS_TORCH, held, ["numpy"])

        assert [option.checkpoint_id for option in ranked] == ["c", "b", "z", None]

    def test_with_no_checkpoints_it_is_a_cold_start(self) -> None:
        """The cold start is always an option."""
        best = cheapest(NUMPY_PANDAS_TORCH, [], ["torch"])

        assert (best.checkpoint_id, best.ordinal, best.cost_ns) == (None, -1, 2_200_000_000)

    @given(priced_items(), checkpoint_lists(), module_sets())
    @settings(max_examples=30)
    def test_every_option_costs_its_size_and_what_it_lacks(
        self, items: dict[str, PricedItem], held: list[PricedCheckpoint], modules: list[str]
    ) -> None:
        """Each option is there once, priced by the formula, in the order of price and then of the rule for ties."""
        needed = closure(items, modules)

        ranked = rank(items, held, modules)

        keys = [(option.cost_ns, -option.ordinal) for option in ranked]
        assert keys == sorted(keys)
        assert sorted(option.ordinal for option in ranked) == list(range(-1, len(held)))
        for option in ranked:
            loaded = held[option.ordinal].items if option.ordinal >= 0 else frozenset()
            size_ns = held[option.ordinal].size_ns if option.ordinal >= 0 else 0
            assert option.cost_ns == size_ns + sum(items[key].load_ns for key in needed if key not in loaded)

    @given(priced_items(), checkpoint_lists(), module_sets(), st.sampled_from(MODULE_NAMES))
    @settings(max_examples=30)
    def test_an_unneeded_item_in_a_checkpoint_changes_nothing(
        self, items: dict[str, PricedItem], held: list[PricedCheckpoint], modules: list[str], extra: str
    ) -> None:
        """Adding an item that is not needed never changes what is missing."""
        if extra in closure(items, modules):
            return
        larger = [PricedCheckpoint(each.checkpoint_id, {*each.items, extra}, each.size_ns) for each in held]

        assert rank(items, larger, modules) == rank(items, held, modules)
