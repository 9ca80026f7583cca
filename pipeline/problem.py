"""What a planner sees: which blocks of items each request of the corpus needs, and what they cost."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeline.corpus import ImportSet
from pipeline.measurement import MeasuredItem
from readie import cost
from readie.closure import compute_closures
from readie.document import Catalogue
from readie.flavor import Flavor
from readie.units import MB, mb_to_bytes, price_size, seconds_to_ns

Integers = NDArray[np.int64]
Bits = NDArray[np.bool_]
Packed = NDArray[np.uint8]  # eight bits to a byte, number 0 leftmost


class Limits(msgspec.Struct, frozen=True):
    max_checkpoints: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 15  # the empty one included
    size_budget_mb: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 2048  # all together
    checkpoint_mb: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 700  # each

    @property
    def places(self) -> int:
        """How many checkpoints there may be beside the empty one."""
        return self.max_checkpoints - 1

    @property
    def budget_bytes(self) -> int:
        return mb_to_bytes(Decimal(repr(self.size_budget_mb)))

    @property
    def checkpoint_bytes(self) -> int:
        return mb_to_bytes(Decimal(repr(self.checkpoint_mb)))


@dataclass(frozen=True, eq=False)
class Problem:
    """The corpus over *asked* items (what some import set asks for itself) and *blocks* of items.

    A block is the items that the closures of the asked items never tell apart: every closure is a union of blocks.
    A request is a distinct closure of import sets: those that need the same cost the same from every checkpoint.
    """

    keys: list[str]
    asked: NDArray[np.int32]  # (asked,) item ids, ascending
    block_of: NDArray[np.int32]  # (items,) -1: needed by no asked item
    block_ns: Integers  # (blocks,) load time of all its items
    block_bytes: Integers  # (blocks,)
    reach: Bits  # (asked, blocks) the closure of each asked item
    barred: dict[str, int]  # item that no checkpoint can hold → requests that need it
    importable: Bits  # (asked,) its closure holds no barred item
    imports: list[tuple[int, ...]]  # what distinct import sets ask for: ascending positions in `asked`
    import_weights: list[int]  # how often each was met
    weights: Integers  # (requests,) how often each is needed
    needs: Bits  # (requests, blocks)
    requests_in_all: int  # with those that need no item
    unmatched: dict[str, int]  # module that is no item → how often asked for


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


def price_sizes(sizes: Iterable[int], alpha: Decimal) -> Integers:
    """What checkpoints of these sizes (bytes) cost at `alpha` seconds per MB, ns."""
    return np.array([price_size(alpha, Decimal(repr(size_mb(int(size))))) for size in sizes], dtype=np.int64)


def pose_problem(items: Sequence[MeasuredItem], corpus: Iterable[ImportSet], barred: Collection[str] = ()) -> Problem:
    """What the planners see of the measured items and the corpus. Modules that match no item are left out, counted.

    An import set with count 0 is known (its items are among the asked ones), and weighs nothing. `barred` are items
    that can be in no checkpoint, nor what pulls them in: requests that need them pay for them.
    """
    catalogue = catalogue_of(items)
    ids = {key: number for number, key in enumerate(catalogue.keys)}
    met: dict[tuple[int, ...], int] = {}
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
            asks = tuple(sorted(needed))
            met[asks] = met.get(asks, 0) + imports.count

    asked = np.array(sorted({item for asks in met for item in asks}), dtype=np.int32)
    position = {int(item): number for number, item in enumerate(asked)}
    closures = compute_closures(catalogue)
    reach = np.zeros((len(asked), len(catalogue.keys)), dtype=np.bool_)
    for number, item in enumerate(asked):
        reach[number, closures.items_of(np.array([item], dtype=np.int32))] = True
    block_of, blocks = _find_blocks(reach)
    by_key = {item.key: item for item in items}
    sizes = np.array([size_bytes(by_key[key]) for key in catalogue.keys], dtype=np.int64)
    used = block_of >= 0
    block_ns = np.zeros(blocks, dtype=np.int64)
    np.add.at(block_ns, block_of[used], catalogue.load_ns[used])
    block_bytes = np.zeros(blocks, dtype=np.int64)
    np.add.at(block_bytes, block_of[used], sizes[used])
    block_reach = np.zeros((len(asked), blocks), dtype=np.bool_)
    block_reach[:, block_of[used]] = reach[:, used]
    imports_met = sorted((tuple(position[item] for item in asks), count) for asks, count in met.items() if count)
    needed_by = np.zeros((len(imports_met), blocks), dtype=np.bool_)
    for row, (asks, _) in enumerate(imports_met):
        needed_by[row] = block_reach[list(asks)].any(axis=0)
    needs, request_of = distinct_rows(needed_by)
    weights = np.zeros(len(needs), dtype=np.int64)
    np.add.at(weights, request_of, np.array([count for _, count in imports_met], dtype=np.int64))
    bars = np.array([key in barred for key in catalogue.keys], dtype=np.bool_) & used
    pulled = {int(item): needs[:, block_of[item]] @ weights for item in np.flatnonzero(bars)}
    return Problem(
        keys=catalogue.keys,
        asked=asked,
        block_of=block_of,
        block_ns=block_ns,
        block_bytes=block_bytes,
        reach=block_reach,
        barred={catalogue.keys[item]: int(count) for item, count in pulled.items()},
        importable=np.logical_not(reach[:, bars].any(axis=1)),
        imports=[asks for asks, _ in imports_met],
        import_weights=[count for _, count in imports_met],
        weights=weights,
        needs=needs,
        requests_in_all=in_all,
        unmatched=dict(sorted(unmatched.items())),
    )


def _find_blocks(reach: Bits) -> tuple[NDArray[np.int32], int]:
    """The block of each item (columns of `reach`), numbered by first appearance, and how many blocks there are."""
    block_of = np.full(reach.shape[1], -1, dtype=np.int32)
    numbers: dict[bytes, int] = {}
    columns = np.packbits(reach, axis=0).T if reach.shape[0] else np.zeros((reach.shape[1], 0), dtype=np.uint8)
    for item in np.flatnonzero(reach.any(axis=0)):
        block_of[item] = numbers.setdefault(columns[item].tobytes(), len(numbers))
    return block_of, len(numbers)


def distinct_rows(rows: Bits) -> tuple[Bits, NDArray[np.intp]]:
    """The rows that differ, in the order of their bits, and for each row its number among them."""
    packed = np.packbits(rows, axis=1)
    distinct, number_of = distinct_packed(packed)
    return np.unpackbits(distinct, axis=1, count=rows.shape[1]).view(np.bool_), number_of


def distinct_packed(packed: Packed) -> tuple[Packed, NDArray[np.intp]]:
    """As `distinct_rows`, of rows packed eight bits to a byte."""
    count, width = packed.shape
    if not count or not width:
        return packed[: min(count, 1)], np.zeros(count, dtype=np.intp)
    whole = np.ascontiguousarray(packed).view(np.dtype((np.void, width))).ravel()
    _, first, number_of = np.unique(whole, return_index=True, return_inverse=True)
    return packed[first], number_of.astype(np.intp)


def hold(problem: Problem, canonical: Sequence[Sequence[int]]) -> Bits:
    """The blocks that importing each of these sets of asked items loads: (sets, blocks)."""
    holds = np.zeros((len(canonical), len(problem.block_ns)), dtype=np.bool_)
    for row, positions in enumerate(canonical):
        holds[row] = np.logical_or.reduce(problem.reach[list(positions)], axis=0)
    return holds


def cold_costs(problem: Problem) -> Integers:
    """What each request costs without any checkpoint, ns."""
    return problem.needs @ problem.block_ns
