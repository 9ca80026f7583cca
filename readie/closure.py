"""Closures of all items at once: strongly connected components, and one row of bits for each over the others."""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from readie.cost import parents
from readie.document import Catalogue, Ids
from readie.errors import BadDocument

MAX_COMPONENTS = 40_000  # 200 MB


@dataclass(frozen=True, eq=False)
class Closures:
    """What every item needs. Items of one component need each other, so they need the same.

    `component[item]` is dense, from 0; whatever a component needs has a lower number, or is itself.
    `reach[c]` are the components that `c` needs, itself among them, packed eight to a byte, number 0 leftmost.
    """

    component: Ids  # (items,)
    reach: NDArray[np.uint8]  # (components, ceil(components / 8))

    def components_of(self, ids: ArrayLike) -> NDArray[np.bool_]:
        """Which components the items `ids` need together: (components,)."""
        rows = self.reach[np.unique(self.component[np.asarray(ids, np.int32)])]
        united = np.bitwise_or.reduce(rows, axis=0)
        return np.unpackbits(united, count=len(self.reach)).astype(np.bool_)

    def items_of(self, ids: ArrayLike) -> Ids:
        """The closure of the items `ids`: sorted, each once."""
        return np.flatnonzero(self.components_of(ids)[self.component]).astype(np.int32)


def compute_closures(catalogue: Catalogue) -> Closures:
    """The closures of `catalogue`: dependencies, and for packages the parent packages that are items.

    Memory is components² / 8 bytes for the result and about 4 bytes an edge on the way. Raises `BadDocument` where
    that would be too much.
    """
    # Here, because it takes 25 MB of memory, which a router that only serves has no use for.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    count = len(catalogue.keys)
    if not count:  # on which SciPy's search never ends
        return Closures(np.zeros(0, np.int32), np.zeros((0, 0), np.uint8))
    starts, needs = _add_parents(catalogue)
    weights = np.broadcast_to(1.0, len(needs))  # which the search does not look at: one number for all
    edges = csr_array((weights, needs, starts), shape=(count, count))
    components, component = connected_components(edges, directed=True, connection="strong")
    component = component.astype(np.int32)
    if components > MAX_COMPONENTS:
        raise BadDocument(
            f"items are {count} that fall into {components} groups of different needs: "
            f"must be at most {MAX_COMPONENTS} groups"
        )

    members = np.argsort(component, kind="stable")
    bounds = np.searchsorted(component[members], np.arange(components + 1))
    reach = np.zeros((components, (components + 7) // 8), np.uint8)
    named = np.zeros(count, np.bool_)
    seen = np.zeros(components, np.bool_)
    for number in range(components):
        for item in members[bounds[number] : bounds[number + 1]]:
            named[needs[starts[item] : starts[item + 1]]] = True
        seen[component[named]] = True
        seen[number] = False
        ahead = np.flatnonzero(seen)
        named[:] = seen[:] = False
        row = reach[number]
        row[number >> 3] |= 128 >> (number & 7)
        # The search numbers a component when it has finished all that this one needs. Not promised, hence checked.
        if ahead.size and ahead[-1] > number:
            raise AssertionError("components are not numbered in the order of need")
        # Nearest first: most of a transitive list is then already there, and drops out.
        while ahead.size:
            row |= reach[ahead[-1]]
            ahead = ahead[row[ahead >> 3] & (128 >> (ahead & 7)) == 0]
    return Closures(component, reach)


def _add_parents(catalogue: Catalogue) -> tuple[NDArray[np.int32], Ids]:
    """The dependencies and the implied edges to parent packages, as (starts, needs)."""
    ids = {key: item for item, key in enumerate(catalogue.keys)}
    listed, offsets = memoryview(catalogue.dependencies.data), catalogue.offsets.tolist()
    sources: list[int] = []
    targets: list[int] = []
    for item, key in enumerate(catalogue.keys):
        if catalogue.resource_types[item] == "package":
            start, end = offsets[item], offsets[item + 1]
            for parent in (ids[name] for name in parents(key) if name in ids):
                # Each edge once: on a repeated edge SciPy's search never ends.
                at = bisect_left(listed, parent, start, end)
                if at == end or listed[at] != parent:
                    sources.append(item)
                    targets.append(parent)
    starts, needs = catalogue.offsets, catalogue.dependencies
    if targets:  # at the end of their item's own
        needs = np.insert(needs, starts[np.asarray(sources, np.int64) + 1], targets)
        added = np.bincount(np.asarray(sources, np.int64), minlength=len(catalogue.keys))
        starts = starts + np.concatenate(([0], np.cumsum(added)))
    return starts.astype(np.int32), needs
