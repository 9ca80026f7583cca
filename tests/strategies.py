"""Hypothesis strategies, named by the domain and small by default. Documents for the database: tests/catalogues.py."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from readie.cost import PricedItem
from readie.document import RESOURCE_TYPES, Catalogue, DocumentCheckpoint, DocumentItem
from readie.flavor import Flavor

#: Dotted names over few words, so that parents and their submodules meet.
MODULE_NAMES = [".".join(words) for n in (1, 2, 3) for words in itertools.product("ab", repeat=n)]

flavors = st.sampled_from(Flavor)
seconds = st.floats(0, 3600)
megabytes = st.floats(0, 1e9)
alphas = st.floats(1e-9, 1)
#: Whatever a document accepts as a name: any text without NUL and surrogates, of 1 to 1,024 characters.
names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
distribution_names = st.from_regex(r"[a-z0-9]+(-[a-z0-9]+){0,2}", fullmatch=True)
versions = st.sampled_from(["", "1.0", "2.1.0rc1", "2.1.0+cu118", "2004d-unknown"])


def module_sets() -> st.SearchStrategy[list[str]]:
    """What a call asks for: items, submodules and attributes of items, names that match nothing."""
    asked = [*MODULE_NAMES, "a.b.X", "b.a.b.a.X", "c", "model:m", "model:m.x", "a.", ".a", "a..b"]
    return st.lists(st.sampled_from(asked), max_size=5)


@st.composite
def priced_items(draw: st.DrawFn) -> dict[str, PricedItem]:
    """Items of the cost model: cycles, self-dependencies, unknown dependencies, submodules without their parents."""
    keys = draw(st.lists(st.sampled_from([*MODULE_NAMES, "model:m"]), unique=True, max_size=10))
    return {
        key: PricedItem(
            load_ns=draw(st.integers(0, 4)),  # small, so that sums tie
            dependencies=tuple(draw(st.lists(st.sampled_from([*keys, "unknown"]), max_size=3))),
            package=":" not in key,
        )
        for key in keys
    }


@dataclass(frozen=True)
class Content:
    """What `write_document` takes."""

    flavor: Flavor
    alpha: float
    distributions: dict[str, str]
    items: list[tuple[str, DocumentItem]]
    checkpoints: list[DocumentCheckpoint]

    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@st.composite
def contents(draw: st.DrawFn) -> Content:
    """Valid documents with names and numbers of all kinds; some dependencies are on unknown items."""
    keys = draw(st.lists(names, unique=True, max_size=6))
    some_keys = st.lists(st.sampled_from(keys), max_size=4) if keys else st.just([])
    dependencies = st.lists(st.sampled_from([*keys, "an unknown item"]), max_size=4)
    items = [
        (
            key,
            DocumentItem(
                load_time=draw(seconds),
                size_mb=draw(megabytes),
                resource_type=draw(st.sampled_from(RESOURCE_TYPES)),
                dependencies=draw(dependencies),
                distribution=draw(st.just("") | distribution_names),
            ),
        )
        for key in keys
    ]
    checkpoints = []
    for checkpoint_id in draw(st.lists(names, unique=True, max_size=3)):
        held = draw(some_keys)
        canonical = draw(st.lists(st.sampled_from(held), max_size=3)) if held else []
        checkpoints.append(DocumentCheckpoint(checkpoint_id, held, canonical, draw(megabytes)))
    distributions = draw(st.dictionaries(distribution_names, versions, max_size=3))
    return Content(draw(flavors), draw(alphas), distributions, items, checkpoints)


def make_catalogue(items: dict[str, PricedItem]) -> Catalogue:
    """A catalogue of these items, for what works on columns alone."""
    keys = list(items)
    needed = [sorted({keys.index(name) for name in item.dependencies if name in items}) for item in items.values()]
    return Catalogue(
        flavor=Flavor.CPU,
        alpha=0.006,
        sha256="",
        generation="",
        distributions={},
        keys=keys,
        load_ns=np.array([item.load_ns for item in items.values()], np.int64),
        size_mb=np.zeros(len(keys)),
        resource_types=["package" if item.package else "model" for item in items.values()],
        item_distributions=[""] * len(keys),
        offsets=np.cumsum([0, *map(len, needed)], dtype=np.int64),
        dependencies=np.array([item for row in needed for item in row], np.int32),
        checkpoints=[],
    )
