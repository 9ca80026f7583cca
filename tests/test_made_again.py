"""The committed catalogue and its corpus are made again as their pages say, here from small lists: `make guides`."""

import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from pipeline.analyze import read_measurements
from readie.projection import load_catalogue
from tests.pages import ROOT, Terminal, clone_project, read_blocks

pytestmark = [pytest.mark.guides, pytest.mark.timeout(900)]

CATALOGUES, CORPORA = (
    [block.text for block in read_blocks(ROOT / folder / "README.md") if block.language == "sh"]
    for folder in ("catalogues", "corpora")
)


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """In a clone that wants two packages instead of hundreds, with its virtual environment active."""
    folder = tmp_path_factory.mktemp("made-again") / "readie"
    clone_project(folder)
    (folder / "catalogues" / "requirements-cpu.txt").write_text("idna==3.20\nnetworkx==3.6.1\n")
    (folder / "catalogues" / "resources-cpu.toml").write_text("")
    (folder / "corpora" / "sources.txt").write_text("networkx==3.6.1\n")
    with gzip.open(folder / "corpora" / "cpu.jsonl.gz", "wt") as corpus:
        json.dump({"modules": ["idna"], "count": 1, "sources": ["example.py"]}, corpus)
    with closing(Terminal(folder, {}, {})) as made:
        made.run(". .venv/bin/activate")
        yield made


def test_a_catalogue_is_made_as_its_page_says(terminal: Terminal) -> None:
    """The list is made exact, installed, measured and captured, and the result is in catalogues/."""
    install, lock = CATALOGUES

    terminal.run(lock)
    # python3.11 is what the catalogue was measured with; any that runs these tests will do here.
    terminal.run(install.replace("python3.11", sys.executable))

    pins = (terminal.folder / "catalogues" / "requirements-cpu.lock").read_text()
    assert "idna==3.20" in pins
    assert "://" not in pins
    catalogue = json.loads((terminal.folder / "catalogues" / "cpu.json").read_bytes())
    assert {"idna", "idna.core", "networkx"} <= catalogue["items"].keys()
    assert [one["canonical"] for one in catalogue["checkpoints"]] == [[], ["idna"]]
    planned = read_measurements(terminal.folder / "catalogues" / "cpu.measurements.parquet")
    assert catalogue["items"].keys() <= {item.key for item in planned.items}
    assert not load_catalogue(
        terminal.folder / "catalogues" / "cpu.json"
    ).warnings  # the Parquet beside it belongs to it


def test_a_corpus_is_made_as_its_page_says(terminal: Terminal) -> None:
    """Of the examples of what is installed, and of the sources that are fetched."""
    terminal.run("\n".join(CORPORA))

    with gzip.open(terminal.folder / "corpora" / "cpu.jsonl.gz", "rt") as lines:
        sets = [json.loads(line) for line in lines]
    assert ["networkx"] in [one["modules"] for one in sets]
    assert any(source.startswith("networkx/examples/") for one in sets for source in one["sources"])
    assert f"{len(sets):,} distinct sets" in (terminal.folder / "corpora" / "README.md").read_text()
