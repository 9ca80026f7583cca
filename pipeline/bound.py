"""A lower bound for the best plan over all candidates, and better plans on the way to it. See docs/planning.md.

The linear relaxation is solved by HiGHS over a pool of candidates and a set of cuts. Its duals are prices; whatever
they are, they give a bound that holds for all candidates, and that bound is computed here in integers.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, hstack, vstack

from pipeline.candidates import Gains, Numbers
from pipeline.problem import Integers, Limits
from pipeline.search import First, Pool, drop_idle, exchange, fill, improve_by_swaps, order_by_gain, search_around

MAX_ROUNDS = 30  # linear programs
MAX_GROUPS = 1500  # of requests that a program tells apart
MAX_IDLE = 3  # rounds that a cut is kept without being tight
POOL_AT_FIRST = 800
POOL_GROWS = 250  # in each round that looks at all candidates
NEAREST = 500  # candidates that searches from elsewhere are among
LOOK_AFTER = 6  # rounds without having looked at all candidates
HASTE = 0.05  # share of the gap: a program is near enough for a look at all candidates
CLOSE = 1e-4  # share of the cost: nearer than this, a bound or a program is as good as solved
_SHIFT = 20  # the price of a byte is in 2**-20 ns

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Bounded:
    """A plan, and how far it can be from the best: ns over all requests, saved against no checkpoints."""

    chosen: list[int]  # candidates, the one that saves most first
    saved: int  # by this plan
    most: int  # that any plan over the candidates can save
    kept: int  # candidates left after pruning: those that a plan better than this one could hold, and its own


def improve_and_bound(
    gains: Gains, first: First, start: Sequence[int], limits: Limits, cold: Integers, *, rounds: int = MAX_ROUNDS
) -> Bounded:
    """Improves the plan `start` by swaps and by what the linear program finds, and bounds the best plan.

    `cold`: what each request costs without checkpoints, weighted ns. Stops after `rounds` programs, never by the clock.
    """
    if not start:  # no candidate that fits gains anything, so no plan saves anything
        return Bounded([], 0, 0, 0)
    sizes = gains.candidates.sizes
    proof = Proof(gains, first.useful[sizes[first.useful] <= limits.budget_bytes], limits, int(cold.sum()))
    plan = list(start)
    levels = _levels(gains.of(np.array(plan)))
    saved = int(levels[0].sum())
    # What is worth most beside the plan, and in the place of one that it holds.
    near = [proof.tighten(level, saved, np.array(plan), POOL_AT_FIRST // 2).tolist() for level in levels]
    pool = Pool(gains, [*plan, *near[0], *near[1]])
    best = improve_by_swaps(pool, pool.places_of(plan), limits)
    saved = pool.saved(best)
    plan = pool.numbers[best].tolist()

    program = _Program(pool, limits, cold)
    program.cut(*_levels(pool.rows[best]))
    starts = {frozenset(plan)}
    looked = 0
    likely: dict[int, float] = {}
    prices = levels[0]
    for number in range(rounds):
        solved = program.solve()
        if solved is None:
            break
        likely = dict(zip(pool.numbers.tolist(), solved.parts.tolist(), strict=True))
        prices = solved.prices
        # What the program would hold in part, the most first, is a plan to search from.
        first_held = fill(
            pool, np.argsort(-solved.parts, kind="stable")[: np.count_nonzero(solved.parts > 1e-6)], limits
        )
        if (key := frozenset(pool.numbers[first_held].tolist())) not in starts:
            starts.add(key)
            better = exchange(pool, first_held, limits)
            if pool.saved(better) > saved:
                better = improve_by_swaps(pool, better, limits)
                saved = pool.saved(better)
                plan = pool.numbers[better].tolist()
        cost = int(cold.sum()) - saved
        short = program.refine(solved)
        near_enough = max(CLOSE * cost, HASTE * (proof.most - saved))
        if short <= near_enough or number - looked >= LOOK_AFTER or number == rounds - 1:
            looked = number
            new = proof.tighten(solved.prices, saved, pool.numbers, POOL_GROWS)
            if proof.most - saved <= CLOSE * cost or (not len(new) and short <= CLOSE * cost):
                break
            pool.replace([*pool.numbers[np.isin(pool.numbers, proof.alive)], *plan, *new])
    if proof.most - saved > CLOSE * (int(cold.sum()) - saved):
        nearest = proof.alive[np.argsort(-proof.ahead, kind="stable")[:NEAREST]]
        pool.replace([*nearest, *(one for one, part in likely.items() if part > 0), *plan])
        parts = np.array([likely.get(one, 0.0) for one in pool.numbers.tolist()])
        best = search_around(pool, pool.places_of(plan), parts, limits)
        if pool.saved(best) > saved:
            saved = pool.saved(best)
            plan = pool.numbers[best].tolist()
            proof.tighten(prices, saved, pool.numbers, 0)
    order = order_by_gain(pool, drop_idle(pool, pool.places_of(plan)))
    chosen = pool.numbers[order].tolist()
    return Bounded(chosen, saved, proof.most, len({*proof.alive.tolist(), *chosen}))


def _levels(held: Integers) -> tuple[Integers, ...]:
    """What requests save by the best of these rows, and by the second best."""
    ranked = np.sort(held, axis=0)
    return (ranked[-1], ranked[-2]) if len(held) > 1 else (ranked[-1], np.zeros_like(ranked[-1]))


# ---- the bound ----


class Proof:
    """The bound that prices give, over all candidates, and which of these a better plan could still hold."""

    def __init__(self, gains: Gains, useful: Numbers, limits: Limits, most: int) -> None:
        self._gains = gains
        self._limits = limits
        self.alive = useful
        self.ahead: Floats = np.zeros(len(useful))  # (alive,) the net worth of each
        self.most = most

    def tighten(self, prices: Integers, saved: int, known: Numbers, most: int) -> Numbers:
        """Bounds the best plan by `prices`, ns of each request from 0, and drops the candidates that are in no plan
        that saves more than `saved`. Returns up to `most` beyond the `known`, if one of them is worth more than these.

        For any prices of requests, and any price of a byte, no plan saves more than

            Σ prices + budget × byte + Σ of the `places` largest max(0, worth − size × byte)

        where a candidate's worth is Σ max(0, gain − price) over the requests.
        """
        gains, limits = self._gains, self._limits
        worth = np.zeros(len(self.alive), dtype=np.int64)
        for part, rows in gains.sweep(self.alive):
            worth[part] = np.maximum(rows - prices, 0).sum(axis=1)
        sizes = gains.candidates.sizes[self.alive]
        byte = _price_byte(worth, sizes, limits)
        # Python's integers: these products are beyond 64 bits.
        net = [(one << _SHIFT) - size * byte for one, size in zip(worth.tolist(), sizes.tolist(), strict=True)]
        best = [one for one in heapq.nlargest(limits.places, net) if one > 0]
        bound = (int(prices.sum()) << _SHIFT) + limits.budget_bytes * byte + sum(best)
        # Plans with candidates that died before are no better than the one known.
        self.most = max(saved, min(self.most, bound >> _SHIFT))
        # A plan with one that is not among the best: it takes the place of the last of them, if there is no other.
        last = best[-1] if best and len(best) == limits.places else 0
        needed = (saved << _SHIFT) - bound
        alive = np.array([min(0, one - last) > needed for one in net], dtype=np.bool_)
        ahead = np.array([float(one) for one in net])
        here = np.isin(self.alive, known)
        least = np.sort(ahead[here])[::-1][: limits.places].min(initial=np.inf)
        new = np.flatnonzero(alive & ~here & (ahead > 0))
        new = new[np.argsort(-ahead[new], kind="stable")[:most]]
        attractive = self.alive[new] if len(new) and ahead[new[0]] > max(0.0, least) else self.alive[:0]
        self.alive, self.ahead = self.alive[alive], ahead[alive]
        return attractive


def _price_byte(worth: Integers, sizes: Integers, limits: Limits) -> int:
    """The price of a byte, in 2**-20 ns, at which the bound is nearly least. Any other gives a bound that holds too."""

    def size_chosen(price: float) -> int:
        net = worth - sizes * price
        best = np.argsort(-net, kind="stable")[: limits.places]
        return int(sizes[best[net[best] > 0]].sum())

    if size_chosen(0.0) <= limits.budget_bytes:
        return 0
    low, high = 0.0, float((worth / np.maximum(sizes, 1)).max(initial=0.0))
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if size_chosen(middle) > limits.budget_bytes else (low, middle)
    return int(high * 2**_SHIFT)


# ---- the linear program ----


@dataclass(frozen=True, eq=False)
class _Solved:
    parts: Floats  # (pool,) 0 to 1: how much of each candidate the program holds
    costs: Floats  # (groups,) what it believes that requests cost, in units
    prices: Integers  # (requests,) from its duals


@dataclass(eq=False)
class _Cut:
    """Σ costs of a group ≥ Σ (cold − level) − Σ over the pool of part × Σ max(0, gain − level), for some groups."""

    levels: Floats  # (requests,)
    groups: Numbers
    idle: NDArray[np.int64]  # (groups of the cut,) rounds without being tight
    pool: Numbers | None = None  # for which candidates the matrix is
    matrix: csr_array | None = None  # (groups of the cut, pool)


class _Program:
    """The linear relaxation: parts of candidates and costs of groups of requests, and cuts that hold the costs up.

    Every plan satisfies every cut, so the program's value is a bound over the pool at any time.
    """

    def __init__(self, pool: Pool, limits: Limits, cold: Integers) -> None:
        self._pool = pool
        self._limits = limits
        self._cold = cold
        self._groups = _group(cold)
        self._count = int(self._groups.max(initial=-1)) + 1
        self._of = csr_array((np.ones(len(cold)), (np.arange(len(cold)), self._groups)), shape=(len(cold), self._count))
        self._cuts: list[_Cut] = []
        self._unit = 1.0

    def cut(self, *levels: Integers) -> None:
        """Adds the cuts at these levels of saving, for all groups."""
        self._unit = max(1.0, float((self._cold - levels[0]).sum()) / self._count)
        for each in levels:
            self._add(each.astype(np.float64), np.arange(self._count))

    def _add(self, levels: Floats, groups: Numbers) -> None:
        self._cuts.append(_Cut(levels, groups, np.zeros(len(groups), dtype=np.int64)))

    def _sums(self, of_requests: Floats) -> Floats:
        sums: Floats = np.bincount(self._groups, of_requests, self._count).astype(np.float64)
        return sums

    def _matrix(self, cut: _Cut) -> csr_array:
        if cut.matrix is None or cut.pool is not self._pool.numbers:
            parts = []
            chosen = self._of[:, cut.groups]
            for start in range(0, len(self._pool.rows), 64):
                above = np.maximum(self._pool.rows[start : start + 64] - cut.levels, 0) / self._unit
                parts.append(csr_array(above) @ chosen)
            cut.matrix = csr_array(csr_array(vstack(parts)).T)
            cut.pool = self._pool.numbers
        return cut.matrix

    def solve(self) -> _Solved | None:
        """None where HiGHS finds no optimum within its limits: the bound so far stands."""
        limits, pool, count = self._limits, len(self._pool.numbers), self._count
        rows, sides = [], []
        for cut in self._cuts:
            ones = csr_array(
                (np.ones(len(cut.groups)), (np.arange(len(cut.groups)), cut.groups)), shape=(len(cut.groups), count)
            )
            rows.append(hstack([-self._matrix(cut), -ones]))
            sides.append(-self._sums(self._cold - cut.levels)[cut.groups] / self._unit)
        budget = max(1, limits.budget_bytes)
        limit = np.zeros((2, pool + count))
        limit[0, :pool] = 1.0
        limit[1, :pool] = self._pool.sizes / budget
        from scipy.optimize import linprog  # half a second, which every command line would wait for

        result = linprog(  # type: ignore[call-overload] # its stubs know no sparse matrices, it does
            np.concatenate([np.zeros(pool), np.ones(count)]),
            A_ub=csr_array(vstack([*rows, csr_array(limit)])),
            b_ub=np.concatenate([*sides, [float(limits.places), 1.0]]),
            bounds=[*([(0.0, 1.0)] * pool), *([(None, None)] * count)],
            method="highs-ds",
            options={"maxiter": 200_000},
        )
        if result.status != 0:
            return None
        duals = -result.ineqlin.marginals
        weights = np.zeros(len(self._cold))
        levels = np.zeros(len(self._cold))
        at = 0
        for cut in self._cuts:
            dual = np.zeros(count)
            dual[cut.groups] = duals[at : at + len(cut.groups)]
            at += len(cut.groups)
            cut.idle = np.where(dual[cut.groups] > 1e-9, 0, cut.idle + 1)
            weights += dual[self._groups]
            levels += dual[self._groups] * cut.levels
        prices = np.clip(np.rint(levels / np.maximum(weights, 1e-12)), 0, self._cold).astype(np.int64)
        return _Solved(result.x[:pool], result.x[pool:], prices)

    def refine(self, solved: _Solved) -> float:
        """Adds the cuts that the solution breaks, drops those long idle. Returns by how much it was short, ns."""
        held = np.flatnonzero(solved.parts > 1e-9)
        held = held[np.argsort(-solved.parts[held], kind="stable")]
        gains = self._pool.rows[held].astype(np.float64)
        order = np.argsort(-gains, axis=0, kind="stable")
        ranked = np.take_along_axis(gains, order, axis=0)
        covered = np.cumsum(solved.parts[held][order], axis=0) >= 1 - 1e-9
        # The level up to which the parts held cover the request: there the cut is highest.
        levels = np.where(covered.any(axis=0), ranked[covered.argmax(axis=0), np.arange(ranked.shape[1])], 0.0)
        costs = self._cold - levels - solved.parts[held] @ np.maximum(gains - levels, 0)
        short = self._sums(costs) - solved.costs * self._unit
        broken = np.flatnonzero(short > 1e-7 * self._unit)
        for cut in self._cuts:
            keep = cut.idle < MAX_IDLE
            if not keep.all():
                cut.groups, cut.idle = cut.groups[keep], cut.idle[keep]
                cut.matrix = cut.matrix[keep] if cut.matrix is not None else None
        self._cuts = [cut for cut in self._cuts if len(cut.groups)]
        if len(broken):
            self._add(levels, broken)
        return float(short[broken].sum())


def _group(cold: Integers) -> Numbers:
    """The group of each request: the dearest have one of their own, the others share with their neighbours."""
    count = len(cold)
    if count <= MAX_GROUPS:
        return np.arange(count)
    alone = np.sort(np.argsort(-cold, kind="stable")[: MAX_GROUPS // 2])
    shared = np.setdiff1d(np.arange(count), alone)
    groups = np.empty(count, dtype=np.intp)
    groups[alone] = np.arange(len(alone))
    groups[shared] = len(alone) + np.arange(len(shared)) * (MAX_GROUPS - len(alone)) // len(shared)
    return groups
