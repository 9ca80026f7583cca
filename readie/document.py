"""The catalogue document, version 2."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from readie.flavor import Flavor

Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint of a catalogue. `items` (everything loaded) and `canonical` are sorted, distinct item ids."""

    checkpoint_id: str
    items: Ids
    canonical: Ids
    size_mb: float
    size_bytes: int
    size_ns: int  # alpha × size_mb, from the decimal texts


@dataclass(frozen=True, eq=False)
class Catalogue:
    """A whole document in columns; item ids are positions in `keys`, dense, in the document's order.

    `dependencies[offsets[i]:offsets[i + 1]]` are the sorted, distinct ids that item `i` names (direct or transitive).
    """

    flavor: Flavor
    alpha: float  # seconds per MB, for people: prices are the checkpoints' size_ns
    sha256: str  # of the document's bytes
    generation: str
    distributions: dict[str, str]  # canonical name → version
    keys: list[str]
    load_ns: NDArray[np.int64]
    size_mb: NDArray[np.float64]
    resource_types: list[str]
    item_distributions: list[str]  # canonical; "" for a dataset, model or tokenizer
    offsets: NDArray[np.int64]  # (items + 1,)
    dependencies: Ids
    checkpoints: list[Checkpoint]
    warnings: tuple[str, ...] = ()
