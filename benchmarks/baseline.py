"""The usual practice, written plainly: the document as a whole into dictionaries and frozensets, a loop for each call.

Its answers are exact, with the router's rules for names, ties and prices, so that they can be compared.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from benchmarks.fresh import memory_mb


@dataclass(frozen=True)
class Item:
    load_ns: int
    dependencies: frozenset[str]
    package: bool


@dataclass(frozen=True)
class Checkpoint:
    checkpoint_id: str
    items: frozenset[str]
    size_ns: int


@dataclass(frozen=True)
class Answer:
    """The cheapest option of a call. `checkpoint_id` None: the cold start."""

    checkpoint_id: str | None
    cost_ns: int
    cold_cost_ns: int


class Router:
    """A catalogue in memory."""

    def __init__(self, path: Path) -> None:
        with path.open(encoding="utf-8") as file:
            document = json.load(file, parse_float=Decimal)
        alpha = Decimal(document["alpha"])
        self.items = {
            key: Item(
                round(Decimal(item["load_time"]) * 10**9),
                frozenset(item.get("dependencies", ())),
                item["resource_type"] == "package",
            )
            for key, item in document["items"].items()
        }
        self.checkpoints = [
            Checkpoint(each["id"], frozenset(each["items"]), round(alpha * Decimal(each["size_mb"]) * 10**9))
            for each in document["checkpoints"]
        ]

    def match(self, module: str) -> str | None:
        """The item that a module stands for: itself, else its longest prefix that is one."""
        if ":" in module:
            return module if module in self.items else None
        while module not in self.items:
            module, dot, _ = module.rpartition(".")
            if not dot:
                return None
        return module

    def expand(self, modules: Iterable[str]) -> set[str]:
        """Everything that is needed, whether the document's lists are direct or transitive."""
        needed: set[str] = set()
        waiting = {key for module in modules if (key := self.match(module)) is not None}
        while waiting:
            needed |= waiting
            found: set[str] = set()
            for key in waiting:
                found |= self.items[key].dependencies
                if self.items[key].package:
                    found.update(self.parents(key))
            waiting = {key for key in found - needed if key in self.items}
        return needed

    def expand_transitive(self, modules: Iterable[str]) -> set[str]:
        """As `expand`, but believes that every list is transitive and names the parent packages too."""
        roots = [key for module in modules if (key := self.match(module)) is not None]
        needed = set(roots)
        for key in roots:
            needed |= self.items[key].dependencies
        return needed

    def parents(self, key: str) -> list[str]:
        names = key.split(".")
        return [".".join(names[:depth]) for depth in range(1, len(names))]

    def choose(self, needed: set[str]) -> Answer:
        """The cheapest option for what is needed; on a tie the later one, and the cold start before all."""
        cold_cost_ns = sum(self.items[key].load_ns for key in needed)
        best = Answer(None, cold_cost_ns, cold_cost_ns)
        for checkpoint in self.checkpoints:
            cost_ns = checkpoint.size_ns
            for key in needed:
                if key not in checkpoint.items:
                    cost_ns += self.items[key].load_ns
            if cost_ns <= best.cost_ns:
                best = Answer(checkpoint.checkpoint_id, cost_ns, cold_cost_ns)
        return best


def load(path: Path) -> tuple[Router, float]:
    """The router over a document, and the seconds that it took to get there."""
    begin = time.perf_counter()
    router = Router(path)
    return router, time.perf_counter() - begin


def load_only(document: str) -> float:
    """The seconds alone, for a process that is measured from outside."""
    return load(Path(document))[1]


def load_and_weigh(document: str) -> float:
    """MB of memory that the process has resident while the router is there."""
    router, _ = load(Path(document))
    resident_mb = memory_mb("VmRSS")
    del router
    return resident_mb
