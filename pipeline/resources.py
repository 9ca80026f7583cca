"""Datasets, models and tokenizers among the measurements: each is loaded in fresh processes of its own, after what it
needs, as packages are imported. `readie/resources.py` reads where they are declared.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pipeline.measurement import ResourceType
from pipeline.processes import Mode
from readie.cost import match
from readie.resources import FILE, Resource, hash_resources, in_order, is_resource, read_resources

if TYPE_CHECKING:
    from pipeline.analyze import Run


@dataclass(frozen=True)
class Wanted:
    """One resource, and how it is measured."""

    resource: Resource
    roots: tuple[str, ...]  # what a process loads, one after the other: the resource comes last
    declaration: str  # SHA-256: runs of another one say nothing of this

    @property
    def key(self) -> str:
        return self.resource.key


def list_wanted(rootfs: Path) -> list[Wanted]:
    """What the root filesystem declares, by key. Raises `BadFile`."""
    declared = read_resources(rootfs / FILE)
    wanted = []
    for key in sorted(declared):
        chain = in_order(declared, [key])
        roots = dict.fromkeys(name for one in chain for name in [*declared[one].modules, one])
        wanted.append(Wanted(declared[key], tuple(roots), hash_resources(declared, [key])))
    return wanted


def select_runs(runs: Iterable["Run"], wanted: Iterable[Wanted]) -> list["Run"]:
    """The runs that say something: those of modules, and those of resources that are declared as they were then."""
    current = {one.declaration for one in wanted}
    return [run for run in runs if not run.declaration or run.declaration in current]


def choose_loads(
    wanted: Iterable[Wanted], runs: Iterable["Run"], repeats: Mapping[Mode, int]
) -> list[tuple[Mode, Wanted]]:
    """The processes that are left, so that each resource was loaded as often as `repeats` says. One that failed, once."""
    counts: Counter[tuple[Mode, str]] = Counter()
    failed = set()
    for run in runs:
        counts[run.mode, run.declaration] += 1
        if run.failure:
            failed.add(run.declaration)
    return [
        (mode, one)
        for mode, times in repeats.items()
        for one in wanted
        if one.declaration not in failed
        for _ in range(times - counts[mode, one.declaration])
    ]


def find_failed(wanted: Iterable[Wanted], runs: Iterable["Run"]) -> dict[str, "Run"]:
    """Key → the run in which it could not be loaded."""
    by_declaration = {run.declaration: run for run in runs if run.declaration and run.failure}
    return {one.key: by_declaration[one.declaration] for one in wanted if one.declaration in by_declaration}


def type_of(key: str) -> ResourceType:
    """What an item of this key is."""
    kind = key.partition(":")[0] if is_resource(key) else "package"
    return next(known for known in get_args(ResourceType) if known == kind)


def add_needs(dependencies: Mapping[str, set[str]], wanted: Iterable[Wanted], items: Mapping[str, object]) -> None:
    """What resources need by their declaration, whether their loaders asked for it or found it there."""
    for one in wanted:
        if one.key in dependencies:
            needed: Sequence[str | None] = [
                *(match(items, module) for module in one.resource.modules),
                *(key for key in one.resource.resources if key in items),
            ]
            dependencies[one.key].update(name for name in needed if name is not None)
