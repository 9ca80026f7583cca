"""What each option costs a call: `app/sql/scoring.sql` prices and ranks all of them, this file hands in requests, remembers
the answers, and takes the first that is an option for this call on this worker.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from packaging.utils import canonicalize_name
from sqlalchemy import Connection, Row, RowMapping

from app.catalogue import list_checkpoints
from app.sql import statement
from readie.cost import COLD, parents
from readie.requirements import parse_requirement
from readie.wire import KeptPackage

#: No item lies in more packages than this, and a name of 1,024 characters must not become 512 prefixes of them.
MAX_PREFIXES = 64


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """What is to be priced: modules, by one catalogue, and what is an option."""

    catalogue_id: int
    sha256: str  # of that catalogue
    modules: Sequence[str]
    held: Collection[str] | None = None  # checkpoints that the worker offers; None: all are options
    kept_distributions: Collection[str] = ()  # canonical names of what is installed although the root filesystem has it
    memory_bytes: int | None = None  # the call's budget; None: no limit
    base_bytes: int = 0  # of it, what a sandbox uses before any checkpoint


@dataclass(frozen=True, slots=True)
class PricedOption:
    """A checkpoint and what it costs a call; `checkpoint_id` None, `ordinal` -1: the cold start."""

    ordinal: int
    checkpoint_id: str | None
    size_bytes: int
    size_ns: int
    missing_ns: int

    @property
    def cost_ns(self) -> int:
        """What it costs in all."""
        return self.size_ns + self.missing_ns


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What modules stand for by one catalogue, and what each of its options costs, the best first."""

    items: Mapping[str, str]  # module → the item that it stands for
    closure_ids: list[int]  # what is needed
    checkpoints: Sequence[Row[Any]]  # the catalogue's, by ordinal
    ordinals: list[int]  # ranked
    costs_ns: list[int]  # of these

    def options(self) -> Iterator[PricedOption]:
        """All of them, the best first."""
        for ordinal, cost_ns in zip(self.ordinals, self.costs_ns, strict=True):
            if ordinal == COLD:
                yield PricedOption(COLD, None, 0, 0, cost_ns)
            else:
                listed = self.checkpoints[ordinal]
                missing_ns = cost_ns - listed.size_ns
                yield PricedOption(ordinal, listed.checkpoint_id, listed.size_bytes, listed.size_ns, missing_ns)

    @property
    def cold_cost_ns(self) -> int:
        """What the cold start costs."""
        return self.costs_ns[self.ordinals.index(COLD)]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The cheapest option of a request. `checkpoint_id` None, `ordinal` -1: the cold start."""

    checkpoint_id: str | None
    ordinal: int
    cost_ns: int
    cold_cost_ns: int
    items: Mapping[str, str] = field(default_factory=dict)  # module → the item that it stands for
    unmatched: list[str] = field(default_factory=list)  # modules that stand for no item and count nowhere


def score_calls(connection: Connection, requests: Sequence[ScoreRequest]) -> list[Choice]:
    """The cheapest option of each request, in their order."""
    spoiled = find_spoiled(connection, requests)
    return [
        _choose(request, prices, spoiled.get(number, {}))
        for number, (request, prices) in enumerate(zip(requests, price_calls(connection, requests), strict=True))
    ]


def price_calls(connection: Connection, requests: Sequence[ScoreRequest]) -> list[Prices]:
    """What each request's options cost, in their order: from memory, else by one statement for all the others.

    A catalogue never changes, so what it says of the same modules does not either.
    """
    keys = [(request.sha256, tuple(request.modules)) for request in requests]
    found = {key: remembered for key in keys if (remembered := prices.find(key)) is not None}
    anew = {key: request for key, request in zip(keys, requests, strict=True) if key not in found}
    for key, priced in zip(anew, _price(connection, list(anew.values())), strict=True):
        found[key] = priced
        prices.keep(key, priced, 50 * len(priced.ordinals) + sum(200 + 4 * len(module) for module in key[1]))
    return [found[key] for key in keys]


def _price(connection: Connection, requests: Sequence[ScoreRequest]) -> list[Prices]:
    if not requests:
        return []
    asked = list(
        dict.fromkeys(
            (request.catalogue_id, prefix)
            for request in requests
            for module in request.modules
            for prefix in _prefixes(module)
        )
    )
    parameters = {"catalogue_ids": [number for number, _ in asked], "keys": [key for _, key in asked]}
    rows = connection.execute(statement("match_items"), parameters).all() if asked else []
    closures = {(row.catalogue_id, row.key): row.closure_id for row in rows}
    matched: list[dict[str, str]] = []
    needed: list[list[int]] = []
    for request in requests:
        of = request.catalogue_id
        stands_for = {
            module: next((prefix for prefix in _prefixes(module) if (of, prefix) in closures), None)
            for module in request.modules
        }
        matched.append({module: key for module, key in stands_for.items() if key is not None})
        needed.append(sorted({-1, *(closures[of, key] for key in matched[-1].values())}))
    parameters = {
        "requests": [number for number, ids in enumerate(needed) for _ in ids],
        "catalogue_ids": [requests[number].catalogue_id for number, ids in enumerate(needed) for _ in ids],
        "closure_ids": [closure_id for ids in needed for closure_id in ids],
    }
    ranked = {row.request: row for row in connection.execute(statement("price_options"), parameters)}
    return [
        Prices(
            items=items,
            closure_ids=ids,
            checkpoints=_list_checkpoints(connection, request),
            ordinals=ranked[number].ordinals,
            costs_ns=ranked[number].costs_ns,
        )
        for number, (request, items, ids) in enumerate(zip(requests, matched, needed, strict=True))
    ]


def _list_checkpoints(connection: Connection, request: ScoreRequest) -> Sequence[Row[Any]]:
    listed = checkpoints.find(request.sha256)
    if listed is None:
        listed = list_checkpoints(connection, request.catalogue_id)
        checkpoints.keep(request.sha256, listed, 500 * len(listed))
    return listed


def find_spoiled(connection: Connection, requests: Sequence[ScoreRequest]) -> dict[int, dict[int, str]]:
    """Request → ordinals of checkpoints that are no option → the distribution that is installed anew."""
    kept = [
        (number, request.catalogue_id, name)
        for number, request in enumerate(requests)
        for name in request.kept_distributions
    ]
    spoiled: dict[int, dict[int, str]] = {}
    if kept:
        numbers, ids, names = map(list, zip(*kept, strict=True))
        parameters = {"requests": numbers, "catalogue_ids": ids, "distributions": names}
        for row in connection.execute(statement("list_spoiled"), parameters):
            spoiled.setdefault(row.request, {})[row.ordinal] = row.distribution
    return spoiled


def _choose(request: ScoreRequest, found: Prices, spoiled: Mapping[int, str]) -> Choice:
    """The first of the ranked options that is one: the cold start always is."""
    best = next(option for option in found.options() if why_excluded(option, request, spoiled) is None)
    return Choice(
        checkpoint_id=best.checkpoint_id,
        ordinal=best.ordinal,
        cost_ns=best.cost_ns,
        cold_cost_ns=found.cold_cost_ns,
        items=found.items,
        unmatched=[module for module in dict.fromkeys(request.modules) if module not in found.items],
    )


def catalogue_for_worker(connection: Connection, worker_id: str) -> RowMapping | None:
    """(catalogue_id, sha256, generation, flavor, alpha, restore_fixed_ns, cold_fixed_ns) of the catalogue that prices
    calls on this worker: its flavor's active one if it holds that generation, else the newest of which it does.

    None: it holds the generation of no catalogue, so calls on it start cold.
    """
    rows = connection.execute(statement("find_catalogue_for_worker"), {"worker_id": worker_id})
    return rows.mappings().one_or_none()


def held_checkpoints(connection: Connection, worker_id: str, generation: str) -> frozenset[str]:
    """The checkpoints of a generation that a worker offers."""
    asked = {"worker_id": worker_id, "generation": generation}
    return frozenset(connection.execute(statement("held_checkpoints"), asked).scalars())


Answer = TypeVar("Answer")


class Answers(Generic[Answer]):
    """Answers by what they depend on, those asked for last, up to about `most_bytes` of them."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.size_bytes = 0
        self._kept: OrderedDict[Hashable, tuple[Answer, int]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> Answer | None:
        """The answer that was kept, if it still is."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def keep(self, key: Hashable, answer: Answer, size_bytes: int) -> None:
        """Keeps an answer, and drops what was not asked for longest; one that would drop very many is not kept."""
        with self._lock:
            if key in self._kept or size_bytes > self.most_bytes // 8:
                return
            self._kept[key] = answer, size_bytes
            self.size_bytes += size_bytes
            while self.size_bytes > self.most_bytes:
                _, (_, dropped_bytes) = self._kept.popitem(last=False)
                self.size_bytes -= dropped_bytes


#: Of this process. 8 MB are 1,500 priced module sets of 100 options.
prices: Answers[Prices] = Answers(8 * 10**6)
checkpoints: Answers[Sequence[Row[Any]]] = Answers(8 * 10**6)  # of catalogues


def conflicting_distributions(kept: Iterable[KeptPackage]) -> list[str]:
    """Canonical names of what is installed although the root filesystem has it: checkpoints that hold it are out."""
    found = {canonicalize_name(parse_requirement(each.requirement).name) for each in kept if each.installed is not None}
    return sorted(found)


def _prefixes(module: str) -> Iterator[str]:
    """What a module may stand for, the longest name first, itself included; nothing if it can be no key."""
    if "\0" in module or any("\ud800" <= character <= "\udfff" for character in module):
        return
    yield module
    if ":" not in module:
        yield from parents(module)[-MAX_PREFIXES:]


def why_excluded(option: PricedOption, request: ScoreRequest, spoiled: Mapping[int, str]) -> str | None:
    """Why a priced option is none for this call on this worker; None: it is one. `spoiled` is from `find_spoiled`."""
    if option.ordinal == COLD:
        return None
    if option.ordinal in spoiled:
        return f"holds modules of {spoiled[option.ordinal]}, which is installed anew: the loaded ones would win"
    if request.held is not None and option.checkpoint_id not in request.held:
        return "the worker does not hold it"
    if request.memory_bytes is not None and option.size_bytes + request.base_bytes > request.memory_bytes:
        base = f" and {request.base_bytes} for the sandbox" if request.base_bytes else ""
        return f"needs {option.size_bytes} bytes{base}, more than the budget of {request.memory_bytes}"
    return None
