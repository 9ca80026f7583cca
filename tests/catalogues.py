"""Catalogue documents for the tests of the database: written as JSON and read by the real reader."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st

from readie.cost import PricedItem, closure
from readie.document import Catalogue, read_document


def make_item(load_time: float = 0.1, dependencies: Iterable[str] = (), **fields: Any) -> dict[str, Any]:
    """An item of a document; `fields` replace the others."""
    item = {"load_time": load_time, "size_mb": 1.0, "resource_type": "package", "distribution": "dist"}
    return {**item, "dependencies": list(dependencies), **fields}


def make_checkpoint(checkpoint_id: str, items: Iterable[str] = (), size_mb: float = 0.0) -> dict[str, Any]:
    """A checkpoint of a document: all its items are canonical too."""
    return {"id": checkpoint_id, "items": sorted(items), "canonical": sorted(items), "size_mb": size_mb}


def make_document(
    items: Mapping[str, dict[str, Any]], checkpoints: Iterable[dict[str, Any]] = (), **fields: Any
) -> dict[str, Any]:
    """A whole document; `fields` replace flavor, alpha and distributions."""
    document: dict[str, Any] = {"version": 2, "flavor": "cpu", "alpha": 0.006, "distributions": {"dist": "1.0"}}
    return {**document, "items": dict(items), "checkpoints": list(checkpoints), **fields}


def write(path: Path, document: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def read(document: Mapping[str, Any]) -> Catalogue:
    """The catalogue of a document."""
    with TemporaryDirectory() as folder:
        return read_document(write(Path(folder) / "catalogue.json", document))


def make_worked_example(alpha: float = 0.006, flavor: str = "cpu") -> dict[str, Any]:
    """DESIGN's example: numpy 0.2 s, pandas 0.5 s (needs numpy); A, B and C of 7, 80 and 200 MB."""
    items = {"numpy": make_item(0.2), "pandas": make_item(0.5, ["numpy"]), "torch": make_item(2.0, ["numpy"])}
    checkpoints = [
        make_checkpoint("A", ["numpy"], 7),
        make_checkpoint("B", ["numpy", "pandas"], 80),
        make_checkpoint("C", ["numpy", "pandas", "torch"], 200),
    ]
    return make_document(items, checkpoints, alpha=alpha, flavor=flavor)


KEYS = ["a", "a.b", "a.b.c", "a.b.c.d", "a.c", "b", "b.c.d", "c", "c.a", "model:m", "dataset:a.b"]
MODULES = [*KEYS, "a.b.X", "a.b.c.d.e.f", "b.c", "b.x.y", "model:m.x", "model:n", "a..b", ".a", "a.", "unknown", "ä.b"]


@st.composite
def documents(draw: st.DrawFn, flavor: str = "cpu") -> dict[str, Any]:
    """Small documents full of what is hard: cycles, unknown dependencies, prices that tie, checkpoints that are no
    closed sets, an empty one, items of several distributions.
    """
    keys = draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=len(KEYS)))
    items = {}
    for key in keys:
        items[key] = make_item(
            draw(st.sampled_from([0.0, 0.1, 0.2, 0.3, 1e-9, 2.5])),
            draw(st.lists(st.sampled_from([*KEYS, "unknown"]), max_size=3)),
            resource_type=key.partition(":")[0] if ":" in key else "package",
            distribution="" if ":" in key else draw(st.sampled_from(["one", "two"])),
        )
    priced = {key: PricedItem(0, item["dependencies"], ":" not in key) for key, item in items.items()}
    checkpoints = []
    for number in range(draw(st.integers(0, 5))):
        chosen = set(draw(st.lists(st.sampled_from(keys), max_size=4))) if keys else set()
        held = closure(priced, chosen) if draw(st.booleans()) else chosen
        checkpoint = make_checkpoint(f"checkpoint_{number}", held, draw(st.sampled_from([0, 10, 20, 33.333333, 1e-7])))
        checkpoints.append({**checkpoint, "canonical": sorted(chosen)})
    alpha = draw(st.sampled_from([0.01, 0.006, 1e-6]))
    return make_document(items, checkpoints, flavor=flavor, alpha=alpha, distributions={"one": "1", "two": "2"})
