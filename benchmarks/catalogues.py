"""The catalogues that the benchmarks use: generated ones, each made once and kept in `benchmarks/data/`, and the real one
that the repository carries.

    python -m benchmarks.catalogues --packages 5000

Each is a folder such as CATALOGUE_DIR names, with the document and its Parquet projection, and one with the document
alone.
"""

import argparse
import hashlib
import os
import random
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from benchmarks import make_catalogue
from pipeline.corpus import read_corpus
from readie.closure import compute_closures
from readie.document import Catalogue, read_document
from readie.projection import load_catalogue, projection_path, write_projection

ROOT = Path(__file__).parent.parent
DATA = ROOT / "benchmarks" / "data"


class Size(msgspec.Struct, frozen=True):
    """What a catalogue comes to. `edges` are the dependencies that its document lists."""

    megabytes: float
    items: int
    edges: int
    checkpoints: int


@dataclass(frozen=True)
class BenchCatalogue:
    """What is asked for: of a generated one three modules of `middle`, of the real one sets of the corpus."""

    document: Path  # with its projection beside it
    size: Size
    sha256: str
    generation: str
    checkpoint_ids: list[str]
    middle: list[str] = field(default_factory=list)  # items whose closures are about half of everything: 2,500 of 5,000
    corpus: list[list[str]] = field(default_factory=list)

    @property
    def document_alone(self) -> Path:
        """The same file, without its projection. Generated ones have it."""
        return self.document.parent.parent / "json" / "cpu.json"

    def module_sets(self, count: int, seed: int) -> list[list[str]]:
        """So many sets of modules, all different."""
        chosen = random.Random(seed)
        if self.corpus:
            return chosen.sample(self.corpus, count)
        sets: dict[frozenset[str], list[str]] = {}
        while len(sets) < count:
            modules = chosen.sample(self.middle, 3)
            sets.setdefault(frozenset(modules), modules)
        return list(sets.values())


class _Facts(msgspec.Struct, frozen=True):
    size: Size
    middle: list[str]
    sha256: str
    generation: str
    checkpoint_ids: list[str]


def find_catalogue(packages: int, *, seed: int = 1, missing: float = 0.0) -> BenchCatalogue | None:
    """The catalogue of so many items, if it was made by this version of the generator."""
    folder = _folder(packages, seed, missing)
    try:
        facts = msgspec.json.decode((folder / "facts.json").read_bytes(), type=_Facts)
    except FileNotFoundError:
        return None
    return BenchCatalogue(
        document=folder / "both" / "cpu.json",
        size=facts.size,
        sha256=facts.sha256,
        generation=facts.generation,
        checkpoint_ids=facts.checkpoint_ids,
        middle=facts.middle,
    )


def read_real() -> BenchCatalogue:
    """The committed catalogue, and the import sets of the committed corpus."""
    document = ROOT / "catalogues" / "cpu.json"
    catalogue = load_catalogue(document)
    return BenchCatalogue(
        document=document,
        size=size_of(document, catalogue),
        sha256=catalogue.sha256,
        generation=catalogue.generation,
        checkpoint_ids=[checkpoint.checkpoint_id for checkpoint in catalogue.checkpoints],
        corpus=[list(one.modules) for one in read_corpus(ROOT / "corpora" / "cpu.jsonl.gz")],
    )


def size_of(document: Path, catalogue: Catalogue) -> Size:
    return Size(
        megabytes=round(document.stat().st_size / 1e6, 1),
        items=len(catalogue.keys),
        edges=len(catalogue.dependencies),
        checkpoints=len(catalogue.checkpoints),
    )


def make(packages: int, seed: int = 1, missing: float = 0.0) -> None:
    """Makes a catalogue, its projection and what is to be known of both; needs up to 700 MB of memory meanwhile."""
    folder = _folder(packages, seed, missing)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "both").mkdir(parents=True)
    (folder / "json").mkdir()
    document = folder / "both" / "cpu.json"
    with document.open("w", encoding="utf-8") as file:
        make_catalogue.write_catalogue(make_catalogue.make_shape(packages, seed, missing), file)
    os.link(document, folder / "json" / "cpu.json")
    catalogue = read_document(document)
    write_projection(catalogue, projection_path(document))
    reached = compute_closures(catalogue)
    held = np.bincount(reached.component, minlength=len(reached.reach))
    needs = np.unpackbits(reached.reach, axis=1, count=len(held)) @ held
    share = needs[reached.component] / max(packages, 1)
    facts = _Facts(
        size=size_of(document, catalogue),
        middle=[catalogue.keys[item] for item in np.flatnonzero((share > 0.4) & (share < 0.6)).tolist()],
        sha256=catalogue.sha256,
        generation=catalogue.generation,
        checkpoint_ids=[checkpoint.checkpoint_id for checkpoint in catalogue.checkpoints],
    )
    (folder / "facts.json").write_bytes(msgspec.json.encode(facts))  # last: without it the rest does not count


def _folder(packages: int, seed: int, missing: float) -> Path:
    made_by = hashlib.sha256(Path(make_catalogue.__file__).read_bytes()).hexdigest()[:8]
    return DATA / f"{packages}-{seed}-{missing:g}-{made_by}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--missing", type=float, default=0.0)
    options = parser.parse_args()
    if find_catalogue(options.packages, seed=options.seed, missing=options.missing) is None:
        make(options.packages, options.seed, options.missing)
    found = find_catalogue(options.packages, seed=options.seed, missing=options.missing)
    print(found and f"{found.document}: {found.size}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
