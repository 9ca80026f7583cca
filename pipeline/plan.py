"""Which sets of items become checkpoints: planners, and the plan that they make.

A planner is a plain function `(problem, alpha, limits, sets) -> list[Chosen]`, found by its name in `PLANNERS`.
Costs are DESIGN's: integer nanoseconds, over all requests of the corpus, the cold start being an option.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from itertools import combinations
from operator import or_
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeline.corpus import ImportSet
from pipeline.measurement import MeasuredItem
from readie import cost
from readie.closure import compute_closures
from readie.document import Catalogue
from readie.errors import BadSetting, UsageError
from readie.files import read_json, write_json
from readie.flavor import Flavor
from readie.units import MB, mb_to_bytes, price_size, seconds_to_ns

Ns = NDArray[np.int64]

MAX_PAIRS = 20_000  # pairs whose union and intersection become candidates, the most asked for first
MAX_ASKERS = 200  # of one item, whose pairs count
MAX_CANDIDATES = 20_000  # the most asked for first
_CHUNK_REQUESTS = 500  # and
_CHUNK_CANDIDATES = 500  # priced at once


class Limits(msgspec.Struct, frozen=True):
    max_checkpoints: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 15  # the empty one included
    size_budget_mb: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 2048  # all together
    checkpoint_mb: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 700  # each


@dataclass(frozen=True, eq=False)
class Problem:
    """What a planner sees. Sets of *asked* items (what some request asks for itself) and of *blocks* of items.

    A block is the items that the closures of the asked items never tell apart; every set here is a union of blocks.
    """

    keys: list[str]
    asked: NDArray[np.int32]  # (asked,) item ids, ascending
    block_of: NDArray[np.int32]  # (items,) -1: needed by no request
    block_ns: Ns  # (blocks,) load time of all its items
    block_bytes: NDArray[np.int64]  # (blocks,)
    reach: NDArray[np.bool_]  # (asked, blocks) the closure of each asked item
    requests: list[tuple[int, ...]]  # ascending positions in `asked`; distinct
    weights: NDArray[np.int64]  # (requests,) how often each was asked for
    needs: NDArray[np.bool_]  # (requests, blocks)
    requests_in_all: int  # with those that need no item
    unmatched: dict[str, int]  # module that is no item → how often asked for


@dataclass(frozen=True)
class Chosen:
    """A checkpoint as planned: positions in `Problem.asked` of all that it holds and somebody asked for, ascending."""

    canonical: tuple[int, ...]
    size_bytes: int


class PlannedCheckpoint(msgspec.Struct, frozen=True):
    checkpoint_id: str
    items: list[str]
    canonical: list[str]
    size_mb: float
    requests: int  # how many it is the cheapest option for
    saved_s: float  # seconds that these save together against a cold start


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`plan.json`. Costs are over the whole corpus."""

    version: Literal[1] = 1
    inputs: str  # SHA-256 of everything that the plan depends on
    flavor: Flavor
    planner: str
    alpha: float  # seconds per MB
    limits: Limits
    requests: int
    candidates: int
    cost_without_ns: int  # with no checkpoints
    cost_ns: int
    checkpoints: list[PlannedCheckpoint]
    unmatched: dict[str, int]
    warnings: list[str] = []


Planner = Callable[[Problem, Decimal, Limits, Sequence[Sequence[str]]], tuple[list[Chosen], int]]


# ---- the problem ----


def catalogue_of(items: Sequence[MeasuredItem], flavor: Flavor = Flavor.CPU) -> Catalogue:
    """The items in columns, as a catalogue without checkpoints: what closures are computed from. Order is by key."""
    ordered = sorted(items, key=lambda item: item.key)
    ids = {item.key: number for number, item in enumerate(ordered)}
    lists = [sorted(ids[key] for key in item.dependencies if key in ids) for item in ordered]
    offsets = np.zeros(len(ordered) + 1, dtype=np.int64)
    np.cumsum([len(dependencies) for dependencies in lists], out=offsets[1:])
    return Catalogue(
        flavor=flavor,
        alpha=0.0,
        sha256="",
        generation="",
        distributions={},
        keys=[item.key for item in ordered],
        load_ns=np.array([load_ns(item) for item in ordered], dtype=np.int64),
        size_mb=np.array([item.size_mb for item in ordered], dtype=np.float64),
        resource_types=[item.resource_type for item in ordered],
        item_distributions=[item.distribution for item in ordered],
        offsets=offsets,
        dependencies=np.array([i for dependencies in lists for i in dependencies], dtype=np.int32),
        checkpoints=[],
    )


def load_ns(item: MeasuredItem) -> int:
    """As the catalogue's reader computes it, from the decimal text."""
    return seconds_to_ns(Decimal(repr(item.seconds)))


def size_bytes(item: MeasuredItem) -> int:
    return mb_to_bytes(Decimal(repr(item.size_mb)))


def size_mb(size: int) -> float:
    """MB of a size in bytes, as the document carries it: its text gives the bytes back exactly."""
    return size / MB


def pose_problem(items: Sequence[MeasuredItem], corpus: Iterable[ImportSet]) -> Problem:
    """What the planners see of the measured items and the corpus. Modules that match no item are left out, counted."""
    catalogue = catalogue_of(items)
    ids = {key: number for number, key in enumerate(catalogue.keys)}
    weights: dict[tuple[int, ...], int] = {}
    unmatched: dict[str, int] = {}
    matches: dict[str, str | None] = {}
    in_all = 0
    for imports in corpus:
        in_all += imports.count
        needed = set()
        for module in imports.modules:
            if module not in matches:
                matches[module] = cost.match(ids, module)
            match = matches[module]
            if match is None:
                unmatched[module] = unmatched.get(module, 0) + imports.count
            else:
                needed.add(ids[match])
        if needed:
            request = tuple(sorted(needed))
            weights[request] = weights.get(request, 0) + imports.count

    asked = np.array(sorted({item for request in weights for item in request}), dtype=np.int32)
    position = {int(item): number for number, item in enumerate(asked)}
    closures = compute_closures(catalogue)
    reach = np.zeros((len(asked), len(catalogue.keys)), dtype=np.bool_)
    for number, item in enumerate(asked):
        reach[number, closures.items_of(np.array([item], dtype=np.int32))] = True
    block_of, blocks = _find_blocks(reach)
    by_id = {item.key: item for item in items}
    sizes = np.array([size_bytes(by_id[key]) for key in catalogue.keys], dtype=np.int64)
    used = block_of >= 0
    block_ns = np.zeros(blocks, dtype=np.int64)
    np.add.at(block_ns, block_of[used], catalogue.load_ns[used])
    block_bytes = np.zeros(blocks, dtype=np.int64)
    np.add.at(block_bytes, block_of[used], sizes[used])
    block_reach = np.zeros((len(asked), blocks), dtype=np.bool_)
    block_reach[:, block_of[used]] = reach[:, used]

    requests = sorted(tuple(position[item] for item in request) for request in weights)
    needs = np.zeros((len(requests), blocks), dtype=np.bool_)
    for row, request in enumerate(requests):
        needs[row] = block_reach[list(request)].any(axis=0)
    return Problem(
        keys=catalogue.keys,
        asked=asked,
        block_of=block_of,
        block_ns=block_ns,
        block_bytes=block_bytes,
        reach=block_reach,
        requests=requests,
        weights=np.array([weights[tuple(int(asked[p]) for p in request)] for request in requests], dtype=np.int64),
        needs=needs,
        requests_in_all=in_all,
        unmatched=dict(sorted(unmatched.items())),
    )


def _find_blocks(reach: NDArray[np.bool_]) -> tuple[NDArray[np.int32], int]:
    """The block of each item (columns of `reach`), numbered by first appearance, and how many blocks there are."""
    block_of = np.full(reach.shape[1], -1, dtype=np.int32)
    numbers: dict[bytes, int] = {}
    columns = np.packbits(reach, axis=0).T if reach.shape[0] else np.zeros((reach.shape[1], 0), dtype=np.uint8)
    for item in np.flatnonzero(reach.any(axis=0)):
        block_of[item] = numbers.setdefault(columns[item].tobytes(), len(numbers))
    return block_of, len(numbers)


# ---- candidates and costs ----


@dataclass(frozen=True, eq=False)
class Candidates:
    canonical: list[tuple[int, ...]]
    holds: NDArray[np.bool_]  # (candidates, blocks)
    sizes: NDArray[np.int64]  # (candidates,) bytes
    size_ns: Ns  # (candidates,)


def _price_sizes(sizes: Iterable[int], alpha: Decimal) -> Ns:
    return np.array([price_size(alpha, Decimal(repr(size_mb(int(size))))) for size in sizes], dtype=np.int64)


def _held(problem: Problem, canonical: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
    """The blocks that importing each of these sets of asked items loads: (sets, blocks)."""
    holds = np.zeros((len(canonical), len(problem.block_ns)), dtype=np.bool_)
    for row, positions in enumerate(canonical):
        holds[row] = np.logical_or.reduce(problem.reach[list(positions)], axis=0)
    return holds


def _asked_within(problem: Problem) -> list[int]:
    """Of each asked item, the asked items in its closure, as the bits of a number.

    Closures are closed, so unions and intersections of them are known by the asked items in them: these numbers are
    all that is needed to make candidates.
    """
    within = problem.reach[:, problem.block_of[problem.asked]]
    return [sum(1 << int(position) for position in np.flatnonzero(row)) for row in within]


def _positions(bits: int) -> tuple[int, ...]:
    return tuple(position for position, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")


def find_candidates(problem: Problem, alpha: Decimal, limits: Limits) -> Candidates:
    """All distinct closures of import sets and of single asked items, and the unions and intersections of pairs asked
    for together: two items that one request asks for, or two requests that ask for an item in common.

    At most `MAX_PAIRS` pairs and `MAX_CANDIDATES` candidates, the most asked for first. What is larger than
    `limits.checkpoint_mb` is left out. An intersection is cut down to what importing its asked items loads.
    """
    weights = problem.weights.tolist()
    items = _asked_within(problem)
    weight_of_item = [0] * len(items)
    sets = []
    for request, weight in zip(problem.requests, weights, strict=True):
        sets.append(reduce(or_, (items[position] for position in request)))
        for position in request:
            weight_of_item[position] += weight

    pairs: Counter[tuple[int, int]] = Counter()  # two sets, as bits → how often asked for
    for request, weight in zip(problem.requests, weights, strict=True):
        for left, right in combinations(request, 2):
            pairs[items[left], items[right]] += weight
    askers: dict[int, list[int]] = {}
    for row, request in enumerate(problem.requests):
        for position in request:
            askers.setdefault(position, []).append(row)
    together: dict[tuple[int, int], int] = {}
    for rows in askers.values():
        # Of an item that everybody asks for, the heaviest askers: pairs grow with the square.
        heaviest = sorted(rows, key=lambda row: (-weights[row], row))[:MAX_ASKERS]
        for left, right in combinations(sorted(heaviest), 2):
            together[left, right] = weights[left] + weights[right]
    for (left, right), weight in together.items():
        pairs[sets[left], sets[right]] += weight

    found: Counter[int] = Counter()
    for weight, bits in [*zip(weights, sets, strict=True), *zip(weight_of_item, items, strict=True)]:
        found[bits] += weight
    for (left, right), weight in sorted(pairs.items(), key=lambda pair: (-pair[1], pair[0]))[:MAX_PAIRS]:
        for bits in {left | right, left & right} - {0}:
            found[bits] += weight

    largest = mb_to_bytes(Decimal(repr(limits.checkpoint_mb)))
    by_weight = sorted((-weight, _positions(bits)) for bits, weight in found.items())
    canonical: list[tuple[int, ...]] = []
    for start in range(0, len(by_weight), _CHUNK_CANDIDATES):
        part = [positions for _, positions in by_weight[start : start + _CHUNK_CANDIDATES]]
        sizes = _held(problem, part) @ problem.block_bytes
        canonical += [positions for positions, size in zip(part, sizes.tolist(), strict=True) if size <= largest]
    canonical = sorted(canonical[:MAX_CANDIDATES])
    holds = _held(problem, canonical)
    sizes = holds @ problem.block_bytes
    return Candidates(canonical, holds, sizes, _price_sizes(sizes.tolist(), alpha))


def cold_costs(problem: Problem) -> Ns:
    """What each request costs without any checkpoint, ns."""
    return problem.needs @ problem.block_ns


def price(problem: Problem, holds: NDArray[np.bool_], size_ns: Ns) -> Ns:
    """The cost of each request (columns) from each set of blocks (rows), ns."""
    cold = cold_costs(problem)
    prices = np.empty((len(holds), len(cold)), dtype=np.int64)
    held = holds.astype(np.float64)
    for start in range(0, len(cold), _CHUNK_REQUESTS):
        part = slice(start, start + _CHUNK_REQUESTS)
        # Products of 0, 1 and whole ns below 2**53 in floating point: exact in any order, and BLAS does them.
        saved = held @ (problem.needs[part] * problem.block_ns).astype(np.float64).T
        prices[:, part] = size_ns[:, None] + cold[None, part] - saved.astype(np.int64)
    return prices


# ---- planners ----


def plan_greedy(
    problem: Problem, alpha: Decimal, limits: Limits, sets: Sequence[Sequence[str]] = ()
) -> tuple[list[Chosen], int]:
    """Adds the candidate that lowers the total most, until none does or a limit is reached.

    On a tie the smaller one, then the first by its items. Returns what was chosen, and the number of candidates.
    """
    del sets
    candidates = find_candidates(problem, alpha, limits)
    current = cold_costs(problem)
    count = len(candidates.canonical)
    gains = np.zeros(count, dtype=np.int64)
    for start in range(0, count, _CHUNK_CANDIDATES):
        rows = slice(start, start + _CHUNK_CANDIDATES)
        prices = price(problem, candidates.holds[rows], candidates.size_ns[rows])
        gains[rows] = np.maximum(current - prices, 0) @ problem.weights

    # A gain never grows as the plan does: the best by old gains that stays the best by its new one is the best.
    waiting = [(-int(gains[c]), int(candidates.sizes[c]), c) for c in range(count) if gains[c] > 0]
    heapq.heapify(waiting)
    left = mb_to_bytes(Decimal(repr(limits.size_budget_mb)))
    chosen: list[Chosen] = []
    while waiting and len(chosen) < limits.max_checkpoints - 1:
        old, size, c = heapq.heappop(waiting)
        if size > left:
            continue
        prices = price(problem, candidates.holds[c : c + 1], candidates.size_ns[c : c + 1])[0]
        gain = int(np.maximum(current - prices, 0) @ problem.weights)
        if gain <= 0:
            continue
        if -gain != old:
            heapq.heappush(waiting, (-gain, size, c))
            continue
        chosen.append(Chosen(candidates.canonical[c], size))
        current = np.minimum(current, prices)
        left -= size
    return chosen, count


def plan_fixed(
    problem: Problem, alpha: Decimal, limits: Limits, sets: Sequence[Sequence[str]] = ()
) -> tuple[list[Chosen], int]:
    """One checkpoint for each of the given sets of modules, in their order. Raises `UsageError` for a limit exceeded,
    and for a module that was not measured.
    """
    del alpha
    if not sets:
        raise UsageError("the fixed planner was given no sets", "Give it some with --sets.")
    ids = {key: number for number, key in enumerate(problem.keys)}
    position = {int(item): number for number, item in enumerate(problem.asked)}
    within = _asked_within(problem)
    chosen: list[Chosen] = []
    for number, modules in enumerate(sets, start=1):
        positions = []
        for module in modules:
            match = cost.match(ids, module)
            if match is None:
                raise UsageError(
                    f"set {number}: {module} was not measured",
                    "Leave it out, or install it in the root filesystem and run readie-pipeline analyze again.",
                )
            positions.append(position[ids[match]])
        blocks = _held(problem, [positions])[0]
        size = int(problem.block_bytes[blocks].sum())
        if size > limits.checkpoint_mb * MB:
            raise UsageError(
                f"set {number} ({', '.join(modules)}) is {size_mb(size):.1f} MB, more than a checkpoint may have",
                "Raise --checkpoint-mb, or give a smaller set.",
            )
        one = Chosen(_positions(reduce(or_, (within[position] for position in positions))), size)
        if one not in chosen:
            chosen.append(one)
    if len(chosen) > limits.max_checkpoints - 1:
        raise UsageError(
            f"{len(chosen)} sets and the empty checkpoint are more than {limits.max_checkpoints} checkpoints",
            "Raise --max-checkpoints, or give fewer sets.",
        )
    together = sum(one.size_bytes for one in chosen)
    if together > limits.size_budget_mb * MB:
        raise UsageError(
            f"the sets are {size_mb(together):.1f} MB together, more than the budget of {limits.size_budget_mb} MB",
            "Raise --size-budget-mb, or give fewer sets.",
        )
    return chosen, len(chosen)


PLANNERS: dict[str, Planner] = {"greedy": plan_greedy, "fixed": plan_fixed}


def find_planner(name: str) -> Planner:
    """Raises `BadSetting`, which lists the known ones."""
    if name not in PLANNERS:
        raise BadSetting(f"{name!r} is not a planner", f"Use {' or '.join(PLANNERS)}.")
    return PLANNERS[name]


# ---- the plan ----


def make_plan(
    items: Sequence[MeasuredItem],
    corpus: Iterable[ImportSet],
    *,
    planner: str,
    alpha: float,
    limits: Limits,
    flavor: Flavor,
    sets: Sequence[Sequence[str]] = (),
    inputs: str = "",
    warnings: Iterable[str] = (),
) -> Plan:
    """Chooses the checkpoints; the same input gives the same plan, byte for byte. `checkpoint_0`, empty, is first."""
    plan = find_planner(planner)
    # Given sets count as asked for, by nobody: what they name is canonical, and weighs nothing.
    problem = pose_problem(items, [*corpus, *(ImportSet(modules=tuple(modules), count=0) for modules in sets)])
    exact = Decimal(repr(alpha))
    chosen, candidates = plan(problem, exact, limits, sets)
    chosen = [Chosen((), 0), *chosen]
    holds = _held(problem, [one.canonical for one in chosen])
    size_ns = _price_sizes([one.size_bytes for one in chosen], exact)
    prices = price(problem, holds, size_ns)
    cold = cold_costs(problem)
    # The later option wins a tie, as in the router's ranking; also for the requests that need no item.
    best = len(chosen) - 1 - np.argmin(prices[::-1], axis=0)
    best_of_nothing = len(chosen) - 1 - int(np.argmin(size_ns[::-1]))
    cheapest = prices.min(axis=0)
    checkpoints = []
    for number, one in enumerate(chosen):
        served = best == number
        blocks = np.flatnonzero(holds[number])
        checkpoints.append(
            PlannedCheckpoint(
                checkpoint_id=f"checkpoint_{number}",
                items=[problem.keys[i] for i in np.flatnonzero(np.isin(problem.block_of, blocks))],
                canonical=[problem.keys[problem.asked[position]] for position in one.canonical],
                size_mb=size_mb(one.size_bytes),
                requests=int(problem.weights[served].sum())
                + (problem.requests_in_all - int(problem.weights.sum()) if number == best_of_nothing else 0),
                saved_s=int((cold - cheapest)[served] @ problem.weights[served]) / 1e9,
            )
        )
    return Plan(
        inputs=inputs,
        flavor=flavor,
        planner=planner,
        alpha=alpha,
        limits=limits,
        requests=problem.requests_in_all,
        candidates=candidates,
        cost_without_ns=int(cold @ problem.weights),
        cost_ns=int(cheapest @ problem.weights),
        checkpoints=checkpoints,
        unmatched=problem.unmatched,
        warnings=list(warnings),
    )


def read_plan(path: Path) -> Plan:
    """The plan at `path`. Raises `BadFile`, which names the file, the place and the rule."""
    return read_json(path, Plan, "Plan again with readie-pipeline plan.")


def write_plan(path: Path, plan: Plan) -> None:
    """Writes `path` whole or not at all."""
    write_json(path, plan)
