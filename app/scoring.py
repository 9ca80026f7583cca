"""What each option costs a call: `app/sql/scoring.sql` chooses, this file hands in requests and reads the answers."""

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from packaging.markers import default_environment
from packaging.utils import canonicalize_name
from sqlalchemy import Connection, Row, RowMapping

from app.catalogue import find_active_catalogue, find_catalogue, read_distributions
from app.sql import statement
from readie.cost import parents
from readie.errors import UnknownCatalogue, UnknownCheckpoint
from readie.flavor import Flavor
from readie.requirements import parse_requirement, split_requirements
from readie.units import ns_to_seconds
from readie.wire import ExplainRequest, Explanation, KeptPackage, Match, MissingItem, Option

#: No item lies in more packages than this, and a name of 1,024 characters must not become 512 prefixes of them.
MAX_PREFIXES = 64


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """What is to be priced: modules, by one catalogue, on one worker."""

    catalogue_id: int
    generation: str  # of that catalogue
    modules: Sequence[str]
    worker_id: str | None = None  # whose checkpoints are options; None: all are
    kept_distributions: Collection[str] = ()  # canonical names of what is installed although the root filesystem has it
    memory_bytes: int | None = None  # the call's budget; None: no limit
    base_bytes: int = 0  # of it, what a sandbox uses before any checkpoint


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
    """The cheapest option of each request, in their order, by one statement."""
    return [_choice(request, row) for request, row in zip(requests, _score(connection, requests), strict=True)]


def catalogue_for_worker(connection: Connection, worker_id: str) -> RowMapping | None:
    """(catalogue_id, sha256, generation, flavor, alpha, restore_fixed_ns, cold_fixed_ns) of the catalogue that prices
    calls on this worker: its flavor's active one if it holds that generation, else the newest of which it does.

    None: it holds the generation of no catalogue, so calls on it start cold.
    """
    rows = connection.execute(statement("find_catalogue_for_worker"), {"worker_id": worker_id})
    return rows.mappings().one_or_none()


def explain(
    connection: Connection, request: ExplainRequest, packages_policy: Literal["version", "names"] = "version"
) -> Explanation:
    """The whole ranking for a set of modules, with what matched, what is missing, and what is no option and why.

    Raises `UnknownCatalogue` for a SHA-256 that was not imported, `UnknownCheckpoint` for an `items_of` that is not
    listed, `BadRequirement` for a malformed package.
    """
    if request.catalogue is None:
        catalogue = find_active_catalogue(connection, request.flavor)
    elif (catalogue := find_catalogue(connection, request.catalogue)) is None:
        raise UnknownCatalogue(f"no catalogue {request.catalogue}")
    # What becomes of packages depends on workers; all else on the catalogue, which never changes.
    key = None
    if catalogue is not None and not request.packages:
        key = (catalogue.sha256, tuple(request.modules), request.memory, request.items_of)
        if (remembered := answers.find(key)) is not None:
            return remembered
    names = {parse_requirement(package).name for package in request.packages}
    distributions = read_distributions(connection, catalogue.catalogue_id, names) if catalogue else {}
    flavor = Flavor(catalogue.flavor) if catalogue else request.flavor
    skipped, kept = split_requirements(request.packages, distributions, _markers(connection, flavor), packages_policy)
    if catalogue is None:
        return Explanation(
            flavor=flavor,
            catalogue=None,
            generation=None,
            alpha=None,
            matches=[Match(module=module, item=None) for module in request.modules],
            options=[Option(checkpoint_id=None, size=0.0, missing=0.0, total=0.0, total_ns=0, items=[])],
            skipped=skipped,
            kept=kept,
        )
    score = ScoreRequest(
        catalogue_id=catalogue.catalogue_id,
        generation=catalogue.generation,
        modules=request.modules,
        memory_bytes=request.memory,
        kept_distributions=conflicting_distributions(kept),
    )
    rows = _score(connection, [score], every=True)
    choice = _choice(score, rows[0])
    itemised = {choice.ordinal} | _ordinals_of(rows, request.items_of)
    missing = _missing_items(connection, score.catalogue_id, choice.items.values(), itemised)
    explanation = Explanation(
        flavor=flavor,
        catalogue=catalogue.sha256,
        generation=catalogue.generation,
        alpha=catalogue.alpha,
        matches=[Match(module=module, item=choice.items.get(module)) for module in request.modules],
        options=[
            Option(
                checkpoint_id=row.checkpoint_id,
                size=ns_to_seconds(row.size_ns),
                missing=ns_to_seconds(row.missing_ns),
                total=ns_to_seconds(row.cost_ns),
                total_ns=row.cost_ns,
                excluded=_why_excluded(row, score),
                items=missing.get(row.ordinal),
            )
            for row in rows
        ],
        skipped=skipped,
        kept=kept,
    )
    if key is not None:
        answers.keep(key, explanation)
    return explanation


class Answers:
    """Explanations by what they depend on, those asked for last, up to about `most_bytes` of them."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.size_bytes = 0
        self._kept: OrderedDict[Hashable, tuple[Explanation, int]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> Explanation | None:
        """The answer that was kept, if it still is."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def keep(self, key: Hashable, answer: Explanation) -> None:
        """Keeps an answer, and drops what was not asked for longest; one that would drop very many is not kept."""
        entries = len(answer.options) + sum(len(option.items or ()) for option in answer.options)
        size_bytes = 250 * entries + 4 * sum(len(match.module) + 50 for match in answer.matches)
        with self._lock:
            if key in self._kept or size_bytes > self.most_bytes // 8:
                return
            self._kept[key] = answer, size_bytes
            self.size_bytes += size_bytes
            while self.size_bytes > self.most_bytes:
                _, (_, dropped_bytes) = self._kept.popitem(last=False)
                self.size_bytes -= dropped_bytes


#: Of this process. 32 MB are a thousand answers of 100 options.
answers = Answers(32 * 10**6)


def conflicting_distributions(kept: Iterable[KeptPackage]) -> list[str]:
    """Canonical names of what is installed although the root filesystem has it: checkpoints that hold it are out."""
    found = {canonicalize_name(parse_requirement(each.requirement).name) for each in kept if each.installed is not None}
    return sorted(found)


def _markers(connection: Connection, flavor: Flavor) -> dict[str, str]:
    """No worker is chosen yet: the markers are those of any of the flavor, else the router's own."""
    reported = connection.execute(statement("find_markers"), {"flavor": str(flavor)}).scalar_one_or_none()
    return (
        dict(json.loads(reported)) if reported else {name: str(value) for name, value in default_environment().items()}
    )


def _score(connection: Connection, requests: Sequence[ScoreRequest], *, every: bool = False) -> Sequence[Row[Any]]:
    prefixes = [
        (number, position, depth, prefix)
        for number, request in enumerate(requests)
        for position, module in enumerate(request.modules)
        for depth, prefix in _prefixes(module)
    ]
    kept = [(number, name) for number, request in enumerate(requests) for name in request.kept_distributions]
    parameters = {
        "requests": list(range(len(requests))),
        "catalogue_ids": [request.catalogue_id for request in requests],
        "generations": [request.generation for request in requests],
        "worker_ids": [request.worker_id for request in requests],
        "budgets_bytes": [
            None if request.memory_bytes is None else request.memory_bytes - request.base_bytes for request in requests
        ],
        "prefix_requests": [number for number, _, _, _ in prefixes],
        "prefix_modules": [position for _, position, _, _ in prefixes],
        "prefix_depths": [depth for _, _, depth, _ in prefixes],
        "prefixes": [prefix for _, _, _, prefix in prefixes],
        "kept_requests": [number for number, _ in kept],
        "kept_distributions": [name for _, name in kept],
        "every": every,
    }
    return connection.execute(statement("score_calls"), parameters).all()


def _prefixes(module: str) -> Iterator[tuple[int, str]]:
    """(number of dots, name) of what a module may stand for, itself included; nothing if it can be no key."""
    if "\0" in module or any("\ud800" <= character <= "\udfff" for character in module):
        return
    yield module.count("."), module
    if ":" not in module:
        yield from islice(enumerate(reversed(parents(module))), MAX_PREFIXES)


def _choice(request: ScoreRequest, row: Row[Any]) -> Choice:
    items = {request.modules[number]: key for number, key in zip(row.modules or [], row.keys or [], strict=True)}
    return Choice(
        checkpoint_id=row.checkpoint_id,
        ordinal=row.ordinal,
        cost_ns=row.cost_ns,
        cold_cost_ns=row.cold_cost_ns,
        items=items,
        unmatched=[module for module in dict.fromkeys(request.modules) if module not in items],
    )


def _ordinals_of(rows: Iterable[Row[Any]], items_of: str | None) -> set[int]:
    """The option that `items_of` names: a checkpoint's id, or `cold`."""
    if items_of is None:
        return set()
    ordinals = {row.checkpoint_id or "cold": row.ordinal for row in rows}
    if items_of not in ordinals:
        listed = ", ".join(sorted(ordinals))
        raise UnknownCheckpoint(f"{items_of}: the catalogue lists {listed}", "Name one of these, or cold.")
    return {ordinals[items_of]}


def _missing_items(
    connection: Connection, catalogue_id: int, keys: Iterable[str], ordinals: Iterable[int]
) -> dict[int, list[MissingItem]]:
    missing: dict[int, list[MissingItem]] = {ordinal: [] for ordinal in ordinals}
    parameters = {"catalogue_id": catalogue_id, "keys": sorted(set(keys)), "ordinals": sorted(missing)}
    for row in connection.execute(statement("list_missing_items"), parameters):
        missing[row.ordinal].append(MissingItem(item=row.key, seconds=ns_to_seconds(row.load_ns)))
    return missing


def _why_excluded(row: Row[Any], request: ScoreRequest) -> str | None:
    if row.kept_distribution is not None:
        return f"holds modules of {row.kept_distribution}, which is installed anew: the loaded ones would win"
    if not row.held:
        return f"worker {request.worker_id} does not hold it"
    if not row.fits:
        base = f" and {request.base_bytes} for the sandbox" if request.base_bytes else ""
        return f"needs {row.size_bytes} bytes{base}, more than the budget of {request.memory_bytes}"
    return None
