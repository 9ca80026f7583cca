"""Closures of all items at once (DESIGN §4) are those of the cost model."""

import numpy as np
import pytest
from hypothesis import given, settings

from readie.closure import compute_closures
from readie.cost import PricedItem, closure
from readie.errors import BadDocument
from tests.strategies import make_catalogue, module_sets, priced_items


def needs(dependencies: dict[str, list[str]]) -> dict[str, set[str]]:
    """The closure of each item, by key."""
    catalogue = make_catalogue({key: PricedItem(1, names) for key, names in dependencies.items()})
    closures = compute_closures(catalogue)
    return {key: {catalogue.keys[n] for n in closures.items_of([item])} for item, key in enumerate(catalogue.keys)}


class TestClosures:
    """What every item needs: its dependencies, direct or transitive, and for packages the parents that are items."""

    def test_a_chain_is_followed_to_its_end(self) -> None:
        """Direct dependencies are enough."""
        assert needs({"a": ["b"], "b": ["c"], "c": []}) == {"a": {"a", "b", "c"}, "b": {"b", "c"}, "c": {"c"}}

    def test_transitive_lists_say_the_same(self) -> None:
        """A document that lists everything gives the closures of one that lists direct dependencies."""
        assert needs({"a": ["b", "c"], "b": ["c"], "c": []}) == needs({"a": ["b"], "b": ["c"], "c": []})

    def test_items_of_a_cycle_need_each_other(self) -> None:
        """Cycles and self-dependencies are legal."""
        assert needs({"a": ["b"], "b": ["a", "b"], "c": ["a"]}) == {
            "a": {"a", "b"},
            "b": {"a", "b"},
            "c": {"a", "b", "c"},
        }

    def test_parent_packages_are_needed_where_they_are_items(self) -> None:
        """a.b.c needs a, although a.b is no item; listing it as well changes nothing."""
        expected = {"a": {"a"}, "a.b.c": {"a", "a.b.c"}, "x": {"a", "a.b.c", "x"}}

        assert needs({"a": [], "a.b.c": [], "x": ["a.b.c"]}) == expected
        assert needs({"a": [], "a.b.c": ["a"], "x": ["a.b.c"]}) == expected

    def test_a_package_that_imports_its_submodules_is_one_component_with_them(self) -> None:
        """The parent needs the child, the child needs the parent."""
        assert needs({"a": ["a.b"], "a.b": []}) == {"a": {"a", "a.b"}, "a.b": {"a", "a.b"}}

    def test_a_catalogue_without_items_has_no_closures(self) -> None:
        """Nothing needs nothing."""
        closures = compute_closures(make_catalogue({}))

        assert closures.reach.shape == (0, 0)
        assert closures.items_of([]).tolist() == []

    def test_too_many_groups_are_refused_before_memory_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The rows of bits grow with the square of the number of components; what needs each other is one of them."""
        monkeypatch.setattr("readie.closure.MAX_COMPONENTS", 2)

        assert needs({"a": ["b"], "b": ["a"], "c": []})["c"] == {"c"}
        with pytest.raises(
            BadDocument, match="items are 3 that fall into 3 groups of different needs: must be at most 2"
        ):
            needs({"a": ["b"], "b": [], "c": []})

    @given(priced_items(), module_sets())
    def test_they_agree_with_the_cost_model(self, items: dict[str, PricedItem], modules: list[str]) -> None:
        """For any items and any set of them."""
        catalogue = make_catalogue(items)
        asked = [module for module in modules if module in items]

        found = compute_closures(catalogue).items_of([catalogue.keys.index(module) for module in asked])

        assert {catalogue.keys[n] for n in found} == closure(items, asked)
        assert found.tolist() == sorted(set(found.tolist()))

    @given(priced_items())
    @settings(max_examples=25)
    def test_components_are_numbered_in_the_order_of_need(self, items: dict[str, PricedItem]) -> None:
        """Whatever a component needs has a lower number; numbers are dense; each component needs itself."""
        closures = compute_closures(make_catalogue(items))

        count = len(closures.reach)
        reach = np.unpackbits(closures.reach, axis=1, count=count) if count else np.zeros((0, 0))
        assert set(closures.component.tolist()) == set(range(count))
        assert np.array_equal(reach, np.tril(reach))
        assert np.all(np.diag(reach))

    @pytest.mark.parametrize("degree", [1, 3, 200])
    def test_they_agree_with_the_cost_model_on_large_graphs(self, degree: int) -> None:
        """More than eight components to a row of bytes, and long lists that are mostly redundant."""
        generator = np.random.default_rng(degree)
        items = {}
        for n in range(400):
            drawn = generator.integers(0, max(n, 1), degree if n else 0)  # mostly towards lower numbers
            back = generator.integers(0, 400, int(generator.random() < 0.05))
            items[f"item{n}"] = PricedItem(1, [f"item{m}" for m in {*drawn.tolist(), *back.tolist()}])
        catalogue = make_catalogue(items)

        closures = compute_closures(catalogue)

        for n in generator.integers(0, 400, 30):
            found = {catalogue.keys[m] for m in closures.items_of([n])}
            assert found == closure(items, [catalogue.keys[n]])
