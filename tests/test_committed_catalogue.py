"""The catalogue that the repository carries: a real one, made by `make generation` (catalogues/README.md)."""

from pathlib import Path

import pytest

from app.catalogue import import_catalogue
from app.database import Database
from app.explain import explain
from pipeline.analyze import read_measurements
from pipeline.corpus import read_corpus
from readie.cost import match
from readie.document import Catalogue, read_document
from readie.projection import load_catalogue
from readie.wire import ExplainRequest

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "catalogues" / "cpu.json"


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    """From the Parquet projection, as the router takes it."""
    return load_catalogue(DOCUMENT)


def test_it_is_whole_and_its_projection_belongs_to_it(catalogue: Catalogue) -> None:
    """No warning says that it was read from JSON instead."""
    assert catalogue.warnings == ()
    assert read_document(DOCUMENT).generation == catalogue.generation


def test_its_measurements_are_beside_it(catalogue: Catalogue) -> None:
    """The same items, which cost the same; who wants to plan anew or to verify has what it takes."""
    measured = {item.key: item for item in read_measurements(ROOT / "catalogues" / "cpu.measurements.parquet").items}

    assert measured.keys() == {*catalogue.keys}
    assert [round(measured[key].seconds * 1e9) for key in catalogue.keys] == catalogue.load_ns.tolist()


def test_it_is_as_rich_as_what_people_use(catalogue: Catalogue) -> None:
    """At least 250 distributions; items of most of them; datasets."""
    assert len(catalogue.distributions) >= 250
    assert len({*catalogue.item_distributions} - {""}) >= 250
    assert {*catalogue.resource_types} == {"package", "dataset"}


@pytest.mark.parametrize(
    ("module", "distribution"),
    [
        ("attr", "attrs"),
        ("attrs", "attrs"),
        ("sklearn", "scikit-learn"),
        ("cv2", "opencv-python-headless"),
        ("PIL", "pillow"),
        ("yaml", "pyyaml"),
    ],
)
def test_names_of_imports_lead_to_distributions(catalogue: Catalogue, module: str, distribution: str) -> None:
    """Also where they are not alike, with the version that the list of requirements pins."""
    found = catalogue.item_distributions[catalogue.keys.index(module)]
    locked = (ROOT / "catalogues" / "requirements-cpu.lock").read_text(encoding="utf-8")

    assert found == distribution
    assert f"\n{distribution}=={catalogue.distributions[found]} " in locked


def test_its_lists_are_direct_dependencies(catalogue: Catalogue) -> None:
    """So the file is small: closures have a hundred times as many."""
    assert len(catalogue.dependencies) < 10 * len(catalogue.keys)
    assert DOCUMENT.stat().st_size < 20 * 10**6


def test_it_knows_what_the_corpus_asks_for(catalogue: Catalogue) -> None:
    """Nearly every import set of the committed corpus has a measured module."""
    corpus = read_corpus(ROOT / "corpora" / "cpu.jsonl.gz")
    keys = {key: number for number, key in enumerate(catalogue.keys)}
    known = sum(any(match(keys, module) for module in one.modules) for one in corpus)

    assert known >= 0.98 * len(corpus)


def test_a_router_explains_with_it(database: Database, catalogue: Catalogue) -> None:
    """What pandas and scikit-learn cost, and that a checkpoint would be worth restoring."""
    import_catalogue(database, catalogue)
    with database.reading() as connection:
        explained = explain(connection, ExplainRequest(modules=["pandas", "sklearn.linear_model.Ridge"]))

    assert [found.item for found in explained.matches] == ["pandas", "sklearn.linear_model"]
    cold = next(option for option in explained.options if option.checkpoint_id is None)
    assert 0.3 < cold.total < 10
    assert explained.options[0].total < cold.total / 5
