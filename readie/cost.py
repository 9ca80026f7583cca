"""The cost model in plain Python: the oracle that tests hold `app/sql/scoring.sql` and the planner to.

    cost(checkpoint) = size_ns(checkpoint) + Σ load_ns(needed items that the checkpoint lacks)
    cost(cold start) =                       Σ load_ns(needed items)

All costs are integer nanoseconds, so sums are exact and ties are real.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this module works without numpy
    from readie.document import Catalogue

COLD = -1  #: the ordinal of the cold start: before all checkpoints


@dataclass(frozen=True)
class PricedItem:
    """An item as the cost model sees it. `package` items also need their parent packages."""

    load_ns: int
    dependencies: Iterable[str] = ()  # direct or transitive; names that are no items count nowhere
    package: bool = True


@dataclass(frozen=True)
class PricedCheckpoint:
    """A checkpoint as the cost model sees it: `items` are everything loaded."""

    checkpoint_id: str
    items: AbstractSet[str]
    size_ns: int


@dataclass(frozen=True)
class Ranked:
    """One option. `checkpoint_id` None is the cold start, with ordinal -1; `missing` are the needed items it lacks."""

    checkpoint_id: str | None
    ordinal: int
    size_ns: int
    missing_ns: int
    missing: frozenset[str]

    @property
    def cost_ns(self) -> int:
        return self.size_ns + self.missing_ns


def match(items: Mapping[str, object], module: str) -> str | None:
    """The item that `module` stands for: itself, else its longest prefix, by dots, that is an item; else None.

    Names with a colon (`model:gpt2`) stand only for themselves.
    """
    if module in items:
        return module
    if ":" in module:
        return None
    return next((prefix for prefix in parents(module) if prefix in items), None)


def parents(module: str) -> list[str]:
    """The packages around `module`, innermost first: `a.b.c` → `a.b`, `a`."""
    return [module[:dot] for dot in range(len(module) - 1, 0, -1) if module[dot] == "."]


def closure(items: Mapping[str, PricedItem], modules: Iterable[str]) -> frozenset[str]:
    """Items needed to import `modules`, each once; cycles allowed. Names that match nothing are ignored."""
    waiting = [key for module in modules if (key := match(items, module)) is not None]
    needed = set(waiting)
    while waiting:
        key = waiting.pop()
        item = items[key]
        for name in [*item.dependencies, *(parents(key) if item.package else [])]:
            if name in items and name not in needed:
                needed.add(name)
                waiting.append(name)
    return frozenset(needed)


def rank(
    items: Mapping[str, PricedItem], checkpoints: Sequence[PricedCheckpoint], modules: Iterable[str]
) -> list[Ranked]:
    """Every option, best first, the cold start included. On an exact tie the later checkpoint comes first, and the
    cold start last.
    """
    needed = closure(items, modules)
    options: list[tuple[str | None, int, int, AbstractSet[str]]] = [(None, COLD, 0, frozenset())]
    options += [(each.checkpoint_id, n, each.size_ns, each.items) for n, each in enumerate(checkpoints)]
    ranked = []
    for checkpoint_id, ordinal, size_ns, held in options:
        missing = needed - held
        missing_ns = sum(items[key].load_ns for key in missing)
        ranked.append(Ranked(checkpoint_id, ordinal, size_ns, missing_ns, missing))
    return sorted(ranked, key=lambda option: (option.cost_ns, -option.ordinal))


def cheapest(
    items: Mapping[str, PricedItem], checkpoints: Sequence[PricedCheckpoint], modules: Iterable[str]
) -> Ranked:
    """The option with the lowest cost."""
    return rank(items, checkpoints, modules)[0]


def price_catalogue(catalogue: "Catalogue") -> tuple[dict[str, PricedItem], list[PricedCheckpoint]]:
    """A whole catalogue as the cost model sees it: items by key, checkpoints in order. For catalogues of test size."""
    keys = catalogue.keys
    items = {}
    for n, key in enumerate(keys):
        ids = catalogue.dependencies[catalogue.offsets[n] : catalogue.offsets[n + 1]]
        dependencies = tuple(keys[i] for i in ids.tolist())
        items[key] = PricedItem(int(catalogue.load_ns[n]), dependencies, catalogue.resource_types[n] == "package")
    checkpoints = [
        PricedCheckpoint(each.checkpoint_id, frozenset(keys[i] for i in each.items.tolist()), each.size_ns)
        for each in catalogue.checkpoints
    ]
    return items, checkpoints
