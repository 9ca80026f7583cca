"""Choosing among the candidates: greedily, and better by swaps. Costs are integers, so ties are real."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.candidates import Gains, Numbers
from pipeline.problem import Integers, Limits

_BATCH = 64  # stale gains renewed at once
MAX_SWAPS = 200  # of one search; each lowers the cost
MAX_KICKS = 400  # searches from elsewhere
KICK_WORK = 500_000_000  # gains that these searches begin with, together


@dataclass(frozen=True, eq=False)
class First:
    """What every candidate gains alone, against no checkpoints at all, ns over all requests."""

    gains: Integers  # (candidates,)

    @property
    def useful(self) -> Numbers:
        """The candidates that are cheaper than a cold start for some request. No other ever lowers a cost."""
        return np.flatnonzero(self.gains > 0)


def gain_alone(gains: Gains) -> First:
    found = np.zeros(len(gains.candidates), dtype=np.int64)
    for part, rows in gains.sweep(np.arange(len(found))):
        found[part] = rows.sum(axis=1)
    return First(found)


def choose_greedily(gains: Gains, first: First, limits: Limits) -> list[int]:
    """Adds the candidate that lowers the total most, until none does or a limit is reached.

    On a tie the smaller one, then the first by number.
    """
    sizes = gains.candidates.sizes
    # A gain never grows as the plan does: the best by old gains that stays the best by its new one is the best.
    waiting = [(-int(first.gains[c]), int(sizes[c]), int(c), 0) for c in first.useful]
    heapq.heapify(waiting)
    saved = np.zeros(len(gains.weights), dtype=np.int64)
    left = limits.budget_bytes
    chosen: list[int] = []
    while waiting and len(chosen) < limits.places:
        gain, size, number, at = waiting[0]
        if size > left:
            heapq.heappop(waiting)
        elif at == len(chosen):
            heapq.heappop(waiting)
            chosen.append(number)
            saved = np.maximum(saved, gains.of(np.array([number]))[0])
            left -= size
        else:
            stale: list[int] = []
            while waiting and len(stale) < _BATCH and waiting[0][3] < len(chosen):
                stale.append(heapq.heappop(waiting)[2])
            renewed = np.maximum(gains.of(np.array(stale)) - saved, 0).sum(axis=1)
            for number, gain in zip(stale, renewed.tolist(), strict=True):
                if gain > 0:
                    heapq.heappush(waiting, (-gain, int(sizes[number]), number, len(chosen)))
    return chosen


class Pool:
    """Candidates whose gains are at hand: those that a plan near the best could hold."""

    def __init__(self, gains: Gains, numbers: Iterable[int]) -> None:
        self._gains = gains
        self.numbers: Numbers = np.array(sorted(set(numbers)), dtype=np.intp)  # ascending
        self.rows: Integers = gains.of(self.numbers)  # (pool, requests)
        self.columns: Integers = np.ascontiguousarray(self.rows.T)
        self.sizes: Integers = gains.candidates.sizes[self.numbers]

    def replace(self, numbers: Iterable[int]) -> None:
        """Holds these candidates from now on."""
        wanted: Numbers = np.array(sorted(set(numbers)), dtype=np.intp)
        here = np.isin(wanted, self.numbers)
        rows = np.empty((len(wanted), self.rows.shape[1]), dtype=np.int64)
        rows[here] = self.rows[np.searchsorted(self.numbers, wanted[here])]
        rows[~here] = self._gains.of(wanted[~here])
        self.numbers, self.rows, self.sizes = wanted, rows, self._gains.candidates.sizes[wanted]
        self.columns = np.ascontiguousarray(rows.T)

    def places_of(self, numbers: Sequence[int]) -> list[int]:
        """Where these candidates are among the rows."""
        found: list[int] = np.searchsorted(self.numbers, np.array(numbers, dtype=np.intp)).tolist()
        return found

    def saved(self, places: Sequence[int]) -> int:
        """What these rows save together, ns over all requests."""
        return int(self.rows[list(places)].max(axis=0).sum()) if len(places) else 0


def fill(pool: Pool, order: Iterable[int], limits: Limits) -> list[int]:
    """The rows in this order, as long as the limits leave place for them."""
    chosen: list[int] = []
    left = limits.budget_bytes
    for place in order:
        if len(chosen) < limits.places and pool.sizes[place] <= left:
            chosen.append(int(place))
            left -= int(pool.sizes[place])
    return chosen


def improve_by_swaps(pool: Pool, chosen: Sequence[int], limits: Limits) -> list[int]:
    """Drops each row in turn, and fills the place that it leaves by `exchange`, as long as this lowers the total."""
    best = exchange(pool, chosen, limits)
    saved = pool.saved(best)
    for _ in range(MAX_SWAPS):
        for out in sorted(best):
            tried = exchange(pool, [one for one in best if one != out], limits, never=out)
            if (found := pool.saved(tried)) > saved:
                best, saved = tried, found
                break
        else:
            break
    return drop_idle(pool, best)


def exchange(pool: Pool, chosen: Sequence[int], limits: Limits, never: int = -1) -> list[int]:
    """Adds a row of the pool, or exchanges one for another, whichever lowers the total most, as long as one does.

    The row `never` does not come back.
    """
    chosen = list(chosen)
    saved = pool.saved(chosen)
    for _ in range(MAX_SWAPS):
        held = pool.rows[chosen] if chosen else np.zeros((1, pool.rows.shape[1]), dtype=np.int64)
        owner = held.argmax(axis=0)
        best = held.max(axis=0)
        second = np.partition(held, -2, axis=0)[-2] if len(held) > 1 else np.zeros_like(best)
        # Where its owner goes, a request falls back to the second best, or to what comes in.
        stays, falls = _sums_by_owner(pool.columns, best, second, owner, max(1, len(chosen)))
        added = stays.sum(axis=0)
        allowed = np.ones(len(pool.sizes), dtype=np.bool_)
        if never >= 0:
            allowed[never] = False
        left = limits.budget_bytes - int(pool.sizes[chosen].sum())
        moves = []
        if len(chosen) < limits.places:
            moves.append((-1, np.where(allowed & (pool.sizes <= left), added, -1)))
        for place, out in enumerate(chosen):
            fits = allowed & (pool.sizes <= left + pool.sizes[out])
            moves.append((place, np.where(fits, added - stays[place] + falls[place], -1)))
        place, sums = max(moves, key=lambda move: int(move[1].max(initial=-1)), default=(-1, np.zeros(0, np.int64)))
        if int(sums.max(initial=-1)) <= saved:
            return chosen
        new = int(sums.argmax())
        saved = int(sums[new])
        chosen = [*chosen, new] if place < 0 else [*chosen[:place], new, *chosen[place + 1 :]]
    return chosen


def search_around(pool: Pool, chosen: Sequence[int], likely: NDArray[np.float64], limits: Limits) -> list[int]:
    """The best of many searches, each from a plan that lost some of its rows to others, or from other rows altogether.

    `likely`: (pool,) 0 to 1, how likely each row is to be among the replacements. Random numbers come from a fixed
    seed, and the number of searches from the size of the pool: the same input gives the same plan.
    """
    best, saved = list(chosen), pool.saved(chosen)
    random = np.random.default_rng(0)
    chances = np.log(np.maximum(likely, 1e-12))
    for number in range(min(MAX_KICKS, KICK_WORK // max(1, pool.rows.size))):
        ranked = np.argsort(-(chances + random.gumbel(size=len(chances))), kind="stable").tolist()
        if number % 2:
            start = ranked[: 2 * limits.places]
        else:
            lost = random.permutation(len(best))[: 2 + number % 5]
            start = [one for place, one in enumerate(best) if place not in lost]
            start += [one for one in ranked[:2] if one not in start]
        tried = exchange(pool, fill(pool, start, limits), limits)
        if (found := pool.saved(tried)) > saved:
            best, saved = tried, found
    return improve_by_swaps(pool, best, limits)


def _sums_by_owner(
    columns: Integers, best: Integers, second: Integers, owner: Numbers, owners: int
) -> tuple[Integers, Integers]:
    """What the requests of each owner (rows) save with one more row of the pool (columns): beside it, and without it."""
    stays = np.zeros((owners, columns.shape[1]), dtype=np.int64)
    falls = np.zeros((owners, columns.shape[1]), dtype=np.int64)
    for place in range(owners):
        mine = columns[owner == place]
        stays[place] = np.maximum(mine, best[owner == place, None]).sum(axis=0)
        falls[place] = np.maximum(mine, second[owner == place, None]).sum(axis=0)
    return stays, falls


def _sum_of_larger(rows: Integers, floor: Integers) -> Integers:
    """Of each row, the sum of the larger of it and `floor`; a part at a time, for the processor's cache."""
    sums = np.empty(len(rows), dtype=np.int64)
    for start in range(0, len(rows), 32):
        sums[start : start + 32] = np.maximum(rows[start : start + 32], floor).sum(axis=1)
    return sums


def drop_idle(pool: Pool, chosen: Sequence[int]) -> list[int]:
    """Without the rows that lower no cost beside the others, the larger ones first out."""
    kept = list(chosen)
    saved = pool.saved(kept)
    for one in sorted(chosen, key=lambda place: (-int(pool.sizes[place]), place)):
        rest = [other for other in kept if other != one]
        if pool.saved(rest) == saved:
            kept = rest
    return kept


def order_by_gain(pool: Pool, chosen: Sequence[int]) -> list[int]:
    """The one that saves most first, then the one that adds most to it, and so on."""
    left = sorted(chosen)
    ordered: list[int] = []
    saved = np.zeros(pool.rows.shape[1], dtype=np.int64)
    while left:
        sums = _sum_of_larger(pool.rows[left], saved)
        one = left.pop(int(sums.argmax()))
        ordered.append(one)
        saved = np.maximum(saved, pool.rows[one])
    return ordered
