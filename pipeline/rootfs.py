"""A root filesystem: its distributions, what each brings to import, and which one a module belongs to."""

import json
import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

from pipeline.measurement import MeasuredItem
from pipeline.rootfs_listing import NOT_PACKAGES
from readie.cost import parents
from readie.errors import RootfsUnreadable

LISTING_TIMEOUT = 120.0  # seconds; a root filesystem of 32 distributions takes one

_LISTING = Path(__file__).with_name("rootfs_listing.py")
_SHOWN = 5  # names in a warning

_Value = TypeVar("_Value")


@dataclass(frozen=True, eq=False)
class RootFilesystem:
    """What a listed root filesystem holds. Distribution names are canonical (PEP 503)."""

    path: Path
    python: str  # version of its Python, such as 3.11.7
    distributions: dict[str, str]  # name → installed version, "" where it has none
    top_levels: dict[str, list[str]]  # name → what it brings to import, sorted; without test packages
    warnings: tuple[str, ...]
    stdlib: frozenset[str]  # top-level names of its Python's standard library
    modules: dict[str, str]  # dotted name → distribution, by RECORD
    namespaces: frozenset[str]  # packages that are only folders, shared by any number of distributions
    files: dict[str, str]  # absolute path of a module's file → distribution, by RECORD
    relative_paths: dict[str, str]  # dotted name → its file below the module path, by RECORD
    top_level_owners: dict[str, str]  # name → distribution, by top_level.txt
    other_owners: dict[str, str]  # dotted name → distribution, by path files of editable installs, or by its name
    suffixes: tuple[str, ...]  # endings of module files, as its Python tries them
    roots: dict[str, str | None]  # folder or file that code lies below → distribution; None: of the module path

    def distribution_of(self, module: str, file: str | None = None) -> str | None:
        """The distribution that a module belongs to; None: the standard library, a bare namespace, or not known.

        `file` is the module's `__file__`, which decides where it is known: several distributions can fill one
        namespace. A name that is no module, such as `sklearn.svm.LinearSVC`, belongs where its package does.
        """
        return self._owner_of_name(module) if file is None else self._owner_of_file(module, os.path.normpath(file))

    def is_namespace(self, module: str) -> bool:
        """Whether the name is a bare namespace, such as `google`: importing it alone asks for no distribution."""
        return module in self.namespaces

    def _owner_of_name(self, module: str) -> str | None:
        top = module.partition(".")[0]
        if top in self.stdlib or module in self.namespaces:
            return None
        owner = _longest(self.modules, module)
        if owner is None and top not in self.namespaces:
            owner = self.top_level_owners.get(top)
        return owner or _longest(self.other_owners, module)

    def _owner_of_file(self, module: str, file: str) -> str | None:
        for path in (Path(file), Path(os.path.realpath(Path(file).parent), Path(file).name)):
            if str(path) in self.files:
                return self.files[str(path)]
            # The longest root that the file lies below says how to read the rest of its path.
            root = next((str(above) for above in (path, *path.parents) if str(above) in self.roots), None)
            if root is not None:
                inside = _dotted(os.path.relpath(path, root), self.suffixes)
                return self.roots[root] or (self._owner_of_name(inside) if inside else None)
        # The same root filesystem at another place, as inside a sandbox.
        if file.endswith("/" + self.relative_paths.get(module, "\0")):
            return self.modules[module]
        return None


def _longest(owners: Mapping[str, _Value], module: str) -> _Value | None:
    """The value of the longest prefix of `module`, by dots, that has one."""
    while module not in owners:
        module, dot, _ = module.rpartition(".")
        if not dot:
            return None
    return owners[module]


def _dotted(relative: str, suffixes: Iterable[str]) -> str | None:
    """The module that a path below the module path holds; None where Python could not import it by name."""
    stem = next((relative.removesuffix(suffix) for suffix in suffixes if relative.endswith(suffix)), None)
    if stem is None:
        return None
    parts = stem.split("/")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts) if parts and all(map(str.isidentifier, parts)) else None


# Listing


class _Editable(msgspec.Struct):
    folders: list[str]
    mapping: dict[str, str]
    project: str


class _Record(msgspec.Struct):
    """One metadata folder, as rootfs_listing.py saw it."""

    folder: str
    place: str
    name: str | None
    version: str
    files: list[str] | None
    top_level: list[str]
    editable: _Editable


class _Names(msgspec.Struct):
    packages: list[str]
    modules: list[str]


class _Listing(msgspec.Struct):
    python: str
    suffixes: list[str]
    path: list[str]
    sites: list[str]
    stdlib: list[str]
    stdlib_folders: list[str]
    distributions: list[_Record]
    namespace_inits: list[str]
    names: dict[str, _Names]


def list_rootfs(rootfs: Path, timeout: float = LISTING_TIMEOUT) -> RootFilesystem:
    """Asks the root filesystem's own Python what it has. Raises `RootfsUnreadable`, which says why it cannot."""
    return _resolve(rootfs, _run_listing(rootfs, timeout))


def _run_listing(rootfs: Path, timeout: float) -> _Listing:
    python = rootfs / "bin" / "python"
    if not python.exists():
        missing = "it has no bin/python" if rootfs.is_dir() else "no such folder"
        raise RootfsUnreadable(f"{rootfs}: {missing}")
    # The result goes to a file of its own: path files run code at start, and that may print.
    with tempfile.TemporaryDirectory(prefix="readie-listing-") as folder, Path(folder, "talk").open("w+b") as talk:
        result = Path(folder, "result")
        try:
            process = subprocess.Popen(
                [python.absolute(), "-I", "-B", str(_LISTING), str(result)],
                stdin=subprocess.DEVNULL,
                stdout=talk,
                stderr=talk,
                cwd=folder,
                start_new_session=True,  # so that what it started ends with it
            )
        except OSError as error:
            raise RootfsUnreadable(f"{python} cannot run: {error.strerror}") from error
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise RootfsUnreadable(f"{rootfs}: listing it took more than {timeout:g} s") from error
        try:
            if code:
                talk.seek(0)
                lines = talk.read().decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
                raise RootfsUnreadable(f"{rootfs}: its Python ended with {code}: {lines[-1]}")
            return msgspec.convert(json.loads(result.read_bytes()), _Listing)
        except (OSError, ValueError, msgspec.ValidationError) as error:
            raise RootfsUnreadable(f"{rootfs}: its Python wrote no listing: {error}") from error


def _resolve(rootfs: Path, listing: _Listing) -> RootFilesystem:
    warnings: list[str] = []
    records, versions = _name_distributions(listing.distributions, warnings)
    files = _own_files(records, frozenset(listing.namespace_inits), warnings)
    modules, relative_paths = _own_modules(files, listing, records)
    for path in listing.namespace_inits:
        files.pop(path, None)
    roots: dict[str, str | None] = dict.fromkeys([*listing.path, *listing.stdlib_folders], None)
    owners: dict[str, str] = {}  # of what no RECORD lists
    top_levels: dict[str, set[str]] = {name: set() for name in versions}
    for name, record, folders in _development_installs(records, listing):
        mapping = record.editable.mapping
        for module, path in mapping.items():
            owners.setdefault(module, name)
            roots[path] = name
        top_levels[name].update(module for module in mapping if not any(above in mapping for above in parents(module)))
        for folder in folders:
            offered = listing.names.get(folder, _Names([], []))
            for module in [*offered.packages, *offered.modules]:
                owners.setdefault(module, name)
            roots[folder] = name
            # Beside a project's packages lie scripts that do things when imported: setup.py, noxfile.py, ...
            own = [module for module in offered.modules if _canonical(module) == name or module in record.top_level]
            top_levels[name].update(offered.packages, own)
        if record.editable.project:
            roots.setdefault(record.editable.project, name)
    for module, owner in modules.items():
        if not any(parent in modules for parent in parents(module)):
            top_levels[owner].add(module)
    for name, record in records:
        if not top_levels[name] or record.editable.project:
            unlisted = _unrecorded(name, record, listing, [*modules, *owners], records)
            top_levels[name].update(unlisted)
            for module in sorted(unlisted):
                owners.setdefault(module, name)
    top_level_owners: dict[str, str] = {}
    # A RECORD that does not have a name says more than a top_level.txt that does.
    for name, record in sorted(records, key=lambda named: named[1].files is not None):
        for top in record.top_level:
            top_level_owners.setdefault(top, name)
    packages = {package for module in chain(modules, owners) for package in parents(module)}
    # A folder without __init__.py inside a package belongs to the package.
    namespaces = {name for name in packages if not _longest(modules, name) and not _longest(owners, name)}
    lost = {name for name, record in records if record.files is None and not top_levels[name]}
    if lost:
        warnings.append(f"{_count(lost, 'distribution')} with no list of files, and nothing to import: {_some(lost)}")
    return RootFilesystem(
        path=rootfs,
        python=listing.python,
        distributions=dict(sorted(versions.items())),
        top_levels={name: _choose_roots(top_levels[name]) for name in sorted(versions)},
        warnings=tuple(warning.encode("utf-8", "replace").decode() for warning in warnings),
        stdlib=frozenset(listing.stdlib),
        modules=modules,
        namespaces=frozenset(namespaces),
        files=files,
        relative_paths=relative_paths,
        top_level_owners=top_level_owners,
        other_owners=owners,
        suffixes=tuple(listing.suffixes),
        roots=roots,
    )


def _development_installs(
    records: list[tuple[str, _Record]], listing: _Listing
) -> Iterator[tuple[str, _Record, list[str]]]:
    """Distributions whose code lies in folders of their own, with those: editable installs of every kind, and eggs."""
    crowd = Counter(record.place for record in listing.distributions)
    for name, record in records:
        # A path file may name the folder that it lies in.
        folders = [folder for folder in record.editable.folders if folder not in crowd]
        if record.files is None and crowd[record.place] == 1 and record.place not in listing.sites:
            folders.append(record.place)  # its metadata lies beside its code: setup.py develop, or an egg
        yield name, record, folders


def _canonical(name: str | None) -> str:
    """The canonical name; "" where there is none that is valid."""
    try:
        return canonicalize_name((name or "").strip(), validate=True)
    except InvalidName:
        return ""


def _name_distributions(found: list[_Record], warnings: list[str]) -> tuple[list[tuple[str, _Record]], dict[str, str]]:
    """The records that have a name, with it; and each name's version, a fixed one where metadata is there twice."""
    records = [(_canonical(record.name), record) for record in found]
    unnamed = [record.folder for name, record in records if not name]
    if unnamed:
        warnings.append(f"{_count(unnamed, 'metadata folder')} left out, without a name or left over: {_some(unnamed)}")
    records = [(name, record) for name, record in records if name]
    by_name: dict[str, list[_Record]] = {}
    for name, record in records:
        by_name.setdefault(name, []).append(record)
    versions: dict[str, str] = {}
    for name, group in sorted(by_name.items()):
        # The first place on the module path hides the others; within one, what has files, then the highest version.
        twins = [record for record in group if record.place == group[0].place]
        chosen = max(twins, key=lambda record: (bool(record.files), _version_key(record.version), record.folder))
        versions[name] = chosen.version if chosen.version.isprintable() else ""
        if len(twins) > 1:
            folders = ", ".join(sorted(record.folder for record in twins))
            warnings.append(
                f"{name} is there {len(twins)} times ({folders}): taken as {chosen.version or 'unversioned'}"
            )
    unversioned = [name for name, version in versions.items() if not version]
    if unversioned:
        warnings.append(f"{_count(unversioned, 'distribution')} without a version: {_some(unversioned)}")
    return records, versions


def _version_key(text: str) -> tuple[int, Version]:
    try:
        return 1, Version(text)
    except InvalidVersion:
        return 0, Version("0")


def _own_files(
    records: list[tuple[str, _Record]], namespace_inits: frozenset[str], warnings: list[str]
) -> dict[str, str]:
    """File → distribution. Where several own a file, the first by name: the same whatever the order of folders."""
    owners: dict[str, set[str]] = {}
    for name, record in records:
        for path in record.files or []:
            owners.setdefault(path, set()).add(name)
    shared: dict[tuple[str, ...], list[str]] = {}
    for path, names in sorted(owners.items()):
        if len(names) > 1 and path not in namespace_inits:
            shared.setdefault(tuple(sorted(names)), []).append(path)
    for names_, paths in sorted(shared.items()):
        example = f"such as {paths[0]}" if len(paths) > 1 else paths[0]
        count = _count(paths, "module file")
        warnings.append(f"{' and '.join(names_)} own {count}, {example}: taken as {names_[0]}'s")
    return {path: min(names) for path, names in sorted(owners.items())}


def _own_modules(
    files: Mapping[str, str], listing: _Listing, records: list[tuple[str, _Record]]
) -> tuple[dict[str, str], dict[str, str]]:
    """Dotted name → distribution, and → path below the module path, of the file that Python would import."""
    folders = [folder for folder in listing.path if folder not in listing.stdlib_folders]
    places = list(dict.fromkeys([*folders, *(record.place for _, record in records)]))
    best: dict[str, tuple[tuple[int, bool, int], str, str]] = {}
    for path, owner in files.items():
        if path in listing.namespace_inits:
            continue
        for order, place in enumerate(places):
            if not path.startswith(place + "/"):
                continue
            relative = path[len(place) + 1 :]
            module = _dotted(relative, listing.suffixes)
            if module is None:
                continue
            suffix = next(i for i, suffix in enumerate(listing.suffixes) if relative.endswith(suffix))
            rank = (order, "/__init__." not in relative, suffix)  # as the import system: packages, then by ending
            if module not in best or rank < best[module][0]:
                best[module] = rank, owner, relative
    return {name: best[name][1] for name in sorted(best)}, {name: best[name][2] for name in sorted(best)}


def _unrecorded(
    name: str, record: _Record, listing: _Listing, owned: Iterable[str], records: list[tuple[str, _Record]]
) -> set[str]:
    """Import names of a distribution that lists none: those called as it is, else those of its top_level.txt.

    A namespace in top_level.txt that others of its kind name as well says nothing.
    """
    project = record.editable.project
    places = [f"{project}/src", project] if project else []
    offered = [listing.names[place] for place in [record.place, *places] if place in listing.names]
    known = set(owned)
    there = {module for names in offered for module in [*names.packages, *names.modules]} - known
    own = {module for module in there if _canonical(module) == name}
    if record.files is None or project:
        tops = Counter(top for _, other in records if other.files is None for top in set(other.top_level))
        own |= there & set(record.top_level)
        own |= {module for module in there if (top := module.partition(".")[0]) in record.top_level and tops[top] == 1}
    return own


def is_test_name(module: str) -> bool:
    """Whether a part of the name says that it holds tests, not what a distribution is for."""
    return any(
        part in {"conftest", "test", "tests"} or part.startswith("test_") or part.endswith(("_test", "_tests"))
        for part in module.split(".")
    )


def _choose_roots(modules: Iterable[str]) -> list[str]:
    """Of what a distribution brings to import, what it is for."""
    own = [module for module in sorted(modules) if not (module.startswith("_") and "editable" in module)]
    own = [module for module in own if "." not in module or module.partition(".")[0] not in NOT_PACKAGES]
    return [module for module in own if not is_test_name(module)]


def _count(things: Iterable[object], word: str) -> str:
    number = len(list(things))
    return f"{number} {word}{'' if number == 1 else 's'}"


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


# The image measured can differ from the root filesystem that sandboxes run


@dataclass(frozen=True)
class Filtered:
    items: dict[str, MeasuredItem]
    warnings: tuple[str, ...]


def filter_measured(items: Mapping[str, MeasuredItem], rootfs: RootFilesystem | None, why_not: str = "") -> Filtered:
    """The items whose distribution the root filesystem has; datasets, models and tokenizers are always carried over.

    What a dropped item pulls in, its dependents keep: edges are contracted. `rootfs` is None where it cannot be
    listed (`why_not` says why): one warning, and nothing is filtered.
    """
    if rootfs is None:
        reason = f" ({why_not})" if why_not else ""
        return Filtered(dict(items), (f"the root filesystem cannot be listed{reason}: nothing was filtered",))
    packages = {key: item for key, item in items.items() if item.resource_type == "package"}
    dropped = {key for key, item in packages.items() if item.distribution not in rootfs.distributions}
    warnings = []
    by_distribution = Counter(packages[key].distribution for key in dropped)
    unowned = by_distribution.pop("", 0)
    if by_distribution:
        names = _some(f"{name} ({number})" for name, number in by_distribution.items())
        number = by_distribution.total()
        warnings.append(
            f"{number} measured item{'' if number == 1 else 's'} left out, of distributions that the root filesystem"
            f" does not have: {names}"
        )
    if unowned:
        names = _some(key for key in dropped if not packages[key].distribution)
        warnings.append(f"{unowned} measured item{'' if unowned == 1 else 's'} of no distribution left out: {names}")
    return Filtered(contract_items(items, dropped), tuple(warnings))


def contract_items(items: Mapping[str, MeasuredItem], dropped: set[str]) -> dict[str, MeasuredItem]:
    """`items` without the dropped ones; each keeps what it reached through them. Edges to unknown keys are dropped."""

    def asks(key: str) -> list[str]:
        item = items[key]
        implied = parents(key) if item.resource_type == "package" else []  # importing a.b imports a
        return [name for name in chain(item.dependencies, implied) if name in items]

    kept: dict[str, MeasuredItem] = {}
    for key, item in items.items():
        if key in dropped:
            continue
        direct = {name for name in item.dependencies if name in items and name not in dropped}
        waiting = [name for name in asks(key) if name in dropped]
        seen = set(waiting)
        while waiting:
            for name in asks(waiting.pop()):
                if name not in dropped:
                    direct.add(name)
                elif name not in seen:
                    seen.add(name)
                    waiting.append(name)
        kept[key] = replace(item, dependencies=frozenset(direct - {key}))
    return kept
