"""Makes a catalogue document with the shape of real ones: few packages that everyone needs, many that few need.

    python benchmarks/make_catalogue.py --packages 5000 --seed 1 big.json

5,000 packages give about 400 MB: 12.3 million transitive dependencies. The size grows with the square of the number:
250 packages give about 1 MB. The same arguments give the same bytes. It is streamed: memory stays near 100 MB.

What is real about it, and what is a guess: sizes of distributions follow a power law, modules import their parents,
parents import most of their children, distributions need a few more popular ones, and closures are therefore deep and
shared. How deep is tuned so that a closure is about half of everything, as in the catalogues that this stands for.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

WORDS = [
    "array",
    "base",
    "cache",
    "client",
    "codec",
    "config",
    "context",
    "core",
    "data",
    "decode",
    "driver",
    "encode",
    "engine",
    "event",
    "factory",
    "filter",
    "frame",
    "graph",
    "index",
    "kernel",
    "layout",
    "linear",
    "loader",
    "matrix",
    "merge",
    "model",
    "module",
    "network",
    "options",
    "parser",
    "plugin",
    "policy",
    "protocol",
    "query",
    "random",
    "reader",
    "record",
    "registry",
    "request",
    "runtime",
    "sample",
    "schema",
    "sequence",
    "session",
    "signal",
    "sparse",
    "stats",
    "storage",
    "stream",
    "support",
    "table",
    "tensor",
    "thread",
    "token",
    "transform",
    "transport",
    "types",
    "update",
    "utils",
    "vector",
    "view",
    "worker",
    "writer",
]


@dataclass(frozen=True)
class Shape:
    """A catalogue before it is written. `closure[i]` are the items that item i needs, itself among them."""

    names: list[str]
    distributions: list[str]  # of each item
    direct: list[NDArray[np.int64]]
    closure: NDArray[np.bool_]  # (items, items)
    checkpoints: list[tuple[NDArray[np.int64], NDArray[np.int64]]]  # items, canonical
    load_time: list[str]  # seconds, as written
    size_mb: list[str]


def make_shape(packages: int, seed: int, missing: float = 0.0, checkpoints: int = 100) -> Shape:
    """A catalogue of `packages` items. `missing`: the part of each checkpoint's items that is left out at random, so
    that checkpoints are not closed sets.
    """
    random = np.random.default_rng(seed)
    owners = max(5, packages // 20)
    weight = np.arange(1, owners + 1, dtype=float) ** -0.9
    owner = np.sort(random.choice(owners, packages, p=weight / weight.sum()))
    owner[:owners] = np.arange(owners)
    owner.sort()
    first = np.searchsorted(owner, np.arange(owners))

    parent = np.full(packages, -1)
    names: list[str] = []
    for item in range(packages):
        top = first[owner[item]]
        if item == top:
            names.append(f"{WORDS[owner[item] % len(WORDS)]}lib{owner[item]}")
            continue
        parent[item] = random.integers(max(top, item - 12), item) if random.random() < 0.6 else top
        names.append(f"{names[parent[item]][:40]}.{WORDS[random.integers(len(WORDS))]}_{item - top}")

    children = np.flatnonzero(parent >= 0)
    eager = children[random.random(len(children)) < 0.78]
    sideways = random.random(packages) < 0.3
    edges = [np.stack([children, parent[children]]), np.stack([parent[eager], eager])]
    inside = np.flatnonzero(sideways & (parent >= 0))
    edges.append(np.stack([inside, first[owner[inside]] + random.integers(0, inside - first[owner[inside]] + 1)]))
    # Modules need modules of other distributions: more popular ones, which have lower numbers, and now and then one
    # that is a little less popular and needs them too, which makes cycles.
    outside = np.flatnonzero(random.random(packages) < 0.9)
    owned_by = owner[outside]
    popular = (owned_by * random.random(len(outside)) ** 0.5).astype(int)
    less = np.minimum(owned_by + random.integers(1, 15, len(outside)), owners - 1)
    edges.append(np.stack([outside, first[np.where(random.random(len(outside)) < 0.012, less, popular)]]))
    pairs = np.unique(np.concatenate(edges, axis=1), axis=1)
    pairs = pairs[:, pairs[0] != pairs[1]]

    closure = _closure(packages, pairs)
    direct = np.split(pairs[1], np.searchsorted(pairs[0], np.arange(1, packages)))
    popularity = random.permutation(packages)
    sets: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = [(np.arange(0), np.arange(0))]
    while len(sets) < checkpoints:
        size = random.integers(1, 6)
        asked = popularity[(packages * random.random(size) ** 2).astype(int)]
        held = np.flatnonzero(closure[asked].any(axis=0))
        if missing:
            held = held[(random.random(len(held)) >= missing) | np.isin(held, asked)]
        sets.append((held, np.unique(asked)))
    load_time = [f"{seconds:.6f}" for seconds in np.minimum(random.lognormal(-7.5, 1.5, packages), 5)]
    size_mb = [f"{size:.3f}" for size in np.minimum(random.lognormal(-1.5, 1.3, packages), 500)]
    owned = [f"{WORDS[number % len(WORDS)]}lib{number}" for number in owner]
    return Shape(names, owned, direct, closure, sets, load_time, size_mb)


def _closure(count: int, pairs: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Reachability of every item from every item: (count, count)."""
    graph = csr_array((np.ones(pairs.shape[1]), (pairs[0], pairs[1])), shape=(count, count))
    groups, group = connected_components(graph, directed=True, connection="strong")
    reach = np.eye(groups, dtype=np.bool_)
    between = np.unique(np.stack([group[pairs[0]], group[pairs[1]]]), axis=1)
    for source, target in between.T[np.argsort(between[0], kind="stable")].tolist():
        reach[source] |= reach[target]  # what a group needs has a lower number
    return reach[group][:, group]


def write_lines(shape: Shape, *, direct: bool) -> Iterator[str]:
    """The document, piece by piece. `direct`: only direct dependencies, as the pipeline writes them."""
    quoted = np.array([json.dumps(name) for name in shape.names], dtype=object)
    versions = dict.fromkeys(sorted(set(shape.distributions)), "1.0")
    yield f'{{"version": 2, "flavor": "cpu", "alpha": 0.0007, "distributions": {json.dumps(versions)},\n"items": {{\n'
    for item in range(len(quoted)):
        needs = shape.direct[item] if direct else np.flatnonzero(shape.closure[item])
        yield (
            f'{quoted[item]}: {{"load_time": {shape.load_time[item]}, "size_mb": {shape.size_mb[item]}, '
            f'"resource_type": "package", "dependencies": [{", ".join(quoted[needs[needs != item]])}], '
            f'"distribution": "{shape.distributions[item]}"}}{"," if item + 1 < len(quoted) else ""}\n'
        )
    yield '},\n"checkpoints": [\n'
    sizes = np.array([float(size) for size in shape.size_mb])
    for number, (items, canonical) in enumerate(shape.checkpoints):
        yield (
            f'{{"id": "checkpoint_{number}", "items": [{", ".join(quoted[items])}], '
            f'"canonical": [{", ".join(quoted[canonical])}], "size_mb": {sizes[items].sum():.3f}}}'
            f"{',' if number + 1 < len(shape.checkpoints) else ''}\n"
        )
    yield "]}\n"


def write_catalogue(shape: Shape, file: TextIO, *, direct: bool = False) -> str:
    """Writes the document and returns the SHA-256 of its bytes."""
    digest = hashlib.sha256()
    for piece in write_lines(shape, direct=direct):
        file.write(piece)
        digest.update(piece.encode())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=Path("cpu.json"), help="where to write it: cpu.json")
    parser.add_argument("--packages", type=int, default=5000, help="items; 250 give about 1 MB, 5000 about 400 MB")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--missing", type=float, default=0.0, help="part of each checkpoint's items left out at random")
    parser.add_argument("--direct", action="store_true", help="write direct dependencies only")
    options = parser.parse_args()
    shape = make_shape(options.packages, options.seed, options.missing)
    aside = options.file.with_name(options.file.name + ".partial")
    with aside.open("w", encoding="utf-8") as file:
        digest = write_catalogue(shape, file, direct=options.direct)
    aside.rename(options.file)
    edges = int(shape.closure.sum()) - len(shape.names)
    megabytes = options.file.stat().st_size / 1e6
    print(f"{options.file}: {megabytes:.0f} MB, {len(shape.names)} items, {edges} transitive dependencies, {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
