"""The limit: the same set algebra in NumPy, in the process, on the fewest bits that hold it.

Closures are rows of bits over atoms (items that all closures and checkpoints treat alike), atoms have a price and a
class (those that are in the same checkpoints), and a matrix says which class is in which checkpoint. No database, no
budgets, no workers: nothing that answers the same question on this machine should be expected to be faster.
"""

from collections.abc import Iterable

import numpy as np

from benchmarks.baseline import Answer
from readie.closure import compute_closures
from readie.cost import match
from readie.document import Catalogue


class Router:
    """A catalogue in bits."""

    def __init__(self, catalogue: Catalogue) -> None:
        reached = compute_closures(catalogue)
        held = np.zeros((len(catalogue.keys), len(catalogue.checkpoints)), np.int64)
        for ordinal, checkpoint in enumerate(catalogue.checkpoints):
            held[checkpoint.items, ordinal] = 1
        patterns, item_class = np.unique(held, axis=0, return_inverse=True)
        pairs = np.stack([item_class.ravel(), reached.component], axis=1)
        atoms, atom = np.unique(pairs, axis=0, return_inverse=True)
        load_ns = np.zeros(len(atoms), np.int64)
        np.add.at(load_ns, atom.ravel(), catalogue.load_ns)
        components = np.unpackbits(reached.reach, axis=1, count=len(reached.reach))
        self.closures = np.packbits(components[:, atoms[:, 1]], axis=1)
        self.load_ns = load_ns
        # Atoms are sorted by class: a class is where one begins.
        self.class_starts = np.searchsorted(atoms[:, 0], np.arange(len(patterns)))
        self.saves = np.ascontiguousarray(patterns.T)  # (checkpoints, classes)
        self.size_ns = np.array([checkpoint.size_ns for checkpoint in catalogue.checkpoints], np.int64)
        self.checkpoint_ids = [checkpoint.checkpoint_id for checkpoint in catalogue.checkpoints]
        self.closure_of = dict(zip(catalogue.keys, reached.component.tolist(), strict=True))

    def answer(self, modules: Iterable[str]) -> Answer:
        """The cheapest option, by the same rules as everywhere."""
        rows = [self.closure_of[key] for module in modules if (key := match(self.closure_of, module)) is not None]
        if not rows or not self.checkpoint_ids:
            raise ValueError("the limit is measured on calls that need something, with checkpoints to choose from")
        needed = np.unpackbits(np.bitwise_or.reduce(self.closures[rows], axis=0), count=len(self.load_ns))
        by_class = np.add.reduceat(self.load_ns * needed, self.class_starts)
        cold_cost_ns = int(by_class.sum())
        costs = self.size_ns + cold_cost_ns - self.saves @ by_class
        ordinal = len(costs) - 1 - int(np.argmin(costs[::-1]))  # of equal ones the last
        cost_ns = int(costs[ordinal])
        if cost_ns > cold_cost_ns:
            return Answer(None, cold_cost_ns, cold_cost_ns)
        return Answer(self.checkpoint_ids[ordinal], cost_ns, cold_cost_ns)
