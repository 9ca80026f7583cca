"""The candidates that a plan is chosen from, and what each of them saves.

Candidates are: the closure of each import set; the closure of each asked item; the unions and intersections of the
closures of two items that one import set asks for; and those of two import sets that have much in common. Where an
item is barred from checkpoints, only what can be imported without it counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from pipeline.problem import (
    Bits,
    Integers,
    Limits,
    Packed,
    Problem,
    cold_costs,
    distinct_packed,
    price_sizes,
)

MAX_TOGETHER = 64  # items of one import set whose pairs count: those that load longest
MAX_PARTNERS = 32  # requests that one is paired with: those with most in common
MAX_PAIRED = 40_000  # pairs of requests, and candidates from pairs of any kind. Closures are never left out
MAX_KEPT = 150_000_000  # gains, eight bytes each
_ROWS = 256  # computed at once

Numbers = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Candidates:
    """Sets of blocks, each once, in the order of their bits. None is larger than a checkpoint may be."""

    held: Packed  # (candidates, ceil(blocks / 8))
    sizes: Integers  # (candidates,) bytes
    size_ns: Integers  # (candidates,)
    found: int  # with those that are too large
    left_out: int  # that pairs would give beyond `MAX_PAIRED`

    def __len__(self) -> int:
        return len(self.held)


class Savings:
    """What holding blocks saves each request, ns, before the price of size: a product of matrices.

    Blocks that few requests need are kept sparse, the others dense. Both products are exact, the dense one because
    floating point adds whole numbers below 2**53 exactly, in any order.
    """

    def __init__(self, problem: Problem) -> None:
        rare = np.count_nonzero(problem.needs, axis=0) * 40 < len(problem.needs)
        self._common = np.flatnonzero(~rare)
        self._rare = np.flatnonzero(rare)
        self._common_ns = problem.needs.T[self._common] * problem.block_ns[self._common, None].astype(np.float64)
        self._rare_ns = csr_array(problem.needs.T[self._rare] * problem.block_ns[self._rare, None])

    def of(self, holds: Bits) -> Integers:
        """Ns for each of the sets of blocks (rows) and each request (columns)."""
        saved: Integers = (holds[:, self._common].astype(np.float64) @ self._common_ns).astype(np.int64)
        if len(self._rare):
            rare = (csr_array(holds[:, self._rare].astype(np.int64)) @ self._rare_ns).tocoo()
            saved[rare.row, rare.col] += rare.data
        return saved


def find_candidates(problem: Problem, savings: Savings, alpha: Decimal, limits: Limits) -> Candidates:
    """All of them, but for those larger than `limits.checkpoint_mb`.

    An intersection is cut down to what importing its asked items loads. Pairs give at most `MAX_PAIRED` candidates
    beyond the closures, those most asked for; how many were left out is counted.
    """
    blocks = len(problem.block_ns)
    of_items, closure_of = distinct_packed(np.packbits(problem.reach[problem.importable], axis=1))
    of_requests = np.packbits(problem.needs, axis=1)
    if not problem.importable.all():
        of_requests = _cut_down(problem, of_requests)
    closures, _ = distinct_packed(np.concatenate([of_requests, of_items]))

    item_pairs = _pair_items(problem, closure_of)
    request_pairs = _pair_requests(problem, savings)
    paired: list[Packed] = []
    weights: list[Integers] = []
    for rows, (left, right, weight) in ((of_items, item_pairs), (of_requests, request_pairs)):
        shared, number_of = distinct_packed(rows[left] & rows[right])
        paired += [rows[left] | rows[right], _cut_down(problem, shared)[number_of]]
        weights += [weight, weight]
    found, number_of = distinct_packed(np.concatenate([closures, *paired]))
    known = np.zeros(len(found), dtype=np.bool_)
    known[number_of[: len(closures)]] = True
    known[~found.any(axis=1)] = True  # what two closures share can be nothing
    asked_for = np.zeros(len(found), dtype=np.int64)
    np.add.at(asked_for, number_of[len(closures) :], np.concatenate(weights))
    new = np.flatnonzero(~known)
    new = new[np.argsort(-asked_for[new], kind="stable")]
    chosen = np.sort(np.concatenate([np.unique(number_of[: len(closures)]), new[:MAX_PAIRED]]))

    held = found[chosen]
    sizes = np.concatenate([unpack(part, blocks) @ problem.block_bytes for part in _parts(held)] or [_NONE])
    fits = sizes <= limits.checkpoint_bytes
    sizes = sizes[fits]
    return Candidates(
        held=held[fits],
        sizes=sizes,
        size_ns=price_sizes(sizes.tolist(), alpha),
        found=len(chosen),
        left_out=max(0, len(new) - MAX_PAIRED),
    )


_NONE = np.zeros(0, dtype=np.int64)


def unpack(packed: Packed, blocks: int) -> Bits:
    return np.unpackbits(packed, axis=1, count=blocks).view(np.bool_)


def _parts(rows: Packed) -> Iterator[Packed]:
    for start in range(0, len(rows), _ROWS):
        yield rows[start : start + _ROWS]


def _cut_down(problem: Problem, sets: Packed) -> Packed:
    """What importing the asked items in each of these sets of blocks loads, as far as they can be in a checkpoint."""
    importable = np.flatnonzero(problem.importable)
    asked_blocks, first = np.unique(problem.block_of[problem.asked[importable]], return_index=True)
    reach = problem.reach[importable[first]].astype(np.float32)
    cut = [sets[:0]]
    for part in _parts(sets):
        inside = unpack(part, len(problem.block_ns))[:, asked_blocks]
        cut.append(np.packbits(inside.astype(np.float32) @ reach > 0, axis=1))
    return np.concatenate(cut)


Pairs = tuple[Numbers, Numbers, Integers]  # the two, and how often both are asked for


def _pair_items(problem: Problem, closure_of: Numbers) -> Pairs:
    """Of closures of items that one import set asks for; `closure_of`: the number of each importable one's."""
    place = np.cumsum(problem.importable) - 1  # of an asked item among the importable ones
    count = int(closure_of.max(initial=0)) + 1
    alone = problem.reach @ problem.block_ns
    codes: list[Numbers] = [np.zeros(0, dtype=np.intp)]
    repeats: list[int] = []
    for asks in problem.imports:
        able = [one for one in asks if problem.importable[one]]
        longest = sorted(able, key=lambda one: (-int(alone[one]), one))[:MAX_TOGETHER] if len(able) > 1 else ()
        distinct = np.unique(closure_of[place[list(longest)]])
        left, right = np.triu_indices(len(distinct), 1)
        codes.append(distinct[left] * count + distinct[right])
        repeats.append(len(left))
    pairs, number_of = np.unique(np.concatenate(codes), return_inverse=True)
    weights = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(weights, number_of, np.repeat(np.array(problem.import_weights, dtype=np.int64), repeats))
    return pairs // count, pairs % count, weights


def _pair_requests(problem: Problem, savings: Savings) -> Pairs:
    """Of each request, those with which it has most seconds in common, weighted."""
    cold = cold_costs(problem)
    count = len(cold)
    partners = min(MAX_PARTNERS, max(1, MAX_PAIRED // max(1, count)))
    codes: list[Numbers] = [np.zeros(0, dtype=np.intp)]
    for start in range(0, count, _ROWS):
        rows = np.arange(start, min(start + _ROWS, count))
        common = savings.of(problem.needs[rows])
        # Where one contains the other, union and intersection are these two.
        common[(common == cold) | (common == cold[rows, None])] = 0
        asked_for = common * (problem.weights[rows, None] + problem.weights).astype(np.float64)
        best = np.argsort(-asked_for, axis=1, kind="stable")[:, :partners]
        row, column = np.nonzero(np.take_along_axis(asked_for, best, axis=1))
        one, other = rows[row], best[row, column]
        codes.append(np.minimum(one, other) * count + np.maximum(one, other))
    pairs = np.unique(np.concatenate(codes))
    left, right = pairs // max(1, count), pairs % max(1, count)
    return left, right, problem.weights[left] + problem.weights[right]


class Gains:
    """What each candidate lowers the cost of each request by, against a cold start, times how often it is needed.

    Never below 0, for the cold start stays an option. All rows are kept where `MAX_KEPT` allows it, and computed again
    each time where it does not.
    """

    def __init__(self, problem: Problem, candidates: Candidates, savings: Savings) -> None:
        self.candidates = candidates
        self.blocks = len(problem.block_ns)
        self.weights = problem.weights
        self._savings = savings
        self._kept: Integers | None = None
        if len(candidates) * len(problem.weights) <= MAX_KEPT:
            kept = np.empty((len(candidates), len(problem.weights)), dtype=np.int64)
            for part, rows in self.sweep(np.arange(len(candidates))):
                kept[part] = rows
            self._kept = kept

    def of(self, numbers: Numbers) -> Integers:
        """The rows of these candidates, ns: (numbers, requests)."""
        if self._kept is not None:
            return self._kept[numbers]
        gains = self._savings.of(unpack(self.candidates.held[numbers], self.blocks))
        gains -= self.candidates.size_ns[numbers, None]
        np.maximum(gains, 0, out=gains)
        gains *= self.weights
        return gains

    def sweep(self, numbers: Numbers) -> Iterator[tuple[slice, Integers]]:
        """The rows of `numbers`, a part at a time."""
        for start in range(0, len(numbers), _ROWS):
            part = slice(start, start + _ROWS)
            yield part, self.of(numbers[part])
