"""The Parquet projection (DESIGN §3): the same catalogue as the document's, or a reason to read the document."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from readie.document import Catalogue, read_document, write_document
from readie.errors import BadDocument, BadFile, BadProjection
from readie.projection import load_catalogue, projection_path, read_projection, write_projection
from tests.catalogues import make_checkpoint, make_document, make_item, write
from tests.strategies import Content, contents
from tests.test_document import contents_of

FILES = ["catalogue", "checkpoint_items", "checkpoints", "dependencies", "distributions", "items"]

DOCUMENT = make_document(
    {
        "numpy": make_item(0.2, distribution="numpy"),
        "pandas": make_item(0.5, ["numpy", "pandas.core"], distribution="pandas"),
        "pandas.core": make_item(0.1, ["pandas"], distribution="pandas"),
        "model:m": make_item(1, resource_type="model", distribution=""),
    },
    [
        make_checkpoint("checkpoint_0"),
        {"id": "checkpoint_1", "items": ["pandas", "pandas.core", "numpy"], "canonical": ["pandas"], "size_mb": 80.1},
    ],
    distributions={"numpy": "2.0", "pandas": ""},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A document with its projection beside it."""
    path = write(tmp_path / "cpu.json", DOCUMENT)
    write_projection(read_document(path), projection_path(path))
    return path


def rewrite(path: Path, name: str, change: Callable[[dict[str, list[Any]]], None]) -> None:
    """Changes one file of a projection, and what the row says of it: nobody but the contents can tell."""
    folder = projection_path(path)
    columns = pq.read_table(folder / f"{name}.parquet").to_pydict()
    schema = pq.read_schema(folder / f"{name}.parquet")
    change(columns)
    pq.write_table(pa.table(columns, schema=schema), folder / f"{name}.parquet")
    if name != "catalogue":
        digest = hashlib.sha256((folder / f"{name}.parquet").read_bytes()).hexdigest()
        rewrite(path, "catalogue", lambda row: row.update({f"{name}_sha256": [digest]}))


def why_not(path: Path) -> str:
    """Why the projection of a good document was not used; the catalogue is that of the document."""
    catalogue = load_catalogue(path)
    (warning,) = catalogue.warnings
    assert {**contents_of(catalogue), "warnings": ()} == contents_of(read_document(path))
    beginning = f"{path}: read from JSON, without the projection {projection_path(path).name}: "
    assert warning.startswith(beginning)
    return warning.removeprefix(beginning)


class TestWhole:
    """A projection that is whole and belongs to the document beside it gives the same catalogue as the document."""

    def test_it_gives_the_catalogue_of_the_document(self, path: Path) -> None:
        """All fields, types included, and no warning."""
        document, projection = read_document(path), load_catalogue(path)

        assert contents_of(projection) == contents_of(document)
        for name in ("load_ns", "size_mb", "offsets", "dependencies"):
            assert getattr(projection, name).dtype == getattr(document, name).dtype

    @given(content=contents())
    @settings(max_examples=25)
    def test_it_gives_the_catalogue_of_any_document(
        self, tmp_path_factory: pytest.TempPathFactory, content: Content
    ) -> None:
        """Whatever the names and numbers; warnings are the document's own affair."""
        path = tmp_path_factory.getbasetemp() / "any.json"
        document = write_document(path, **content.arguments())
        write_projection(document, projection_path(path))

        projection = read_projection(projection_path(path), document.sha256)

        assert contents_of(projection) == {**contents_of(document), "warnings": ()}

    def test_the_document_is_not_parsed(self, path: Path) -> None:
        """Only its hash is taken: a projection that names the hash of other bytes is believed."""
        path.write_text("not a document")
        digest = hashlib.sha256(b"not a document").hexdigest()
        rewrite(path, "catalogue", lambda row: row.update(sha256=[digest]))

        assert load_catalogue(path).keys == list(DOCUMENT["items"])

    def test_it_lies_beside_the_document(self) -> None:
        """cpu.json has cpu.parquet."""
        assert projection_path(Path("catalogues/cpu.json")) == Path("catalogues/cpu.parquet")

    def test_it_has_the_files_of_the_specification(self, path: Path) -> None:
        """And the same catalogue gives the same bytes."""
        folder = projection_path(path)
        before = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
        assert sorted(before) == [f"{name}.parquet" for name in FILES]

        write_projection(read_document(path), folder)

        assert {entry.name: entry.read_bytes() for entry in folder.iterdir()} == before
        assert sorted(entry.name for entry in path.parent.iterdir()) == ["cpu.json", "cpu.parquet"]

    def test_duckdb_reads_it(self, path: Path) -> None:
        """People ask it by SQL, with names and ids as in the router's tables."""
        folder = projection_path(path)
        rows = (
            duckdb.connect()
            .execute(
                f"""
            SELECT checkpoint_id, key, load_ns, canonical
            FROM '{folder}/checkpoint_items.parquet'
            JOIN '{folder}/checkpoints.parquet' USING (ordinal) JOIN '{folder}/items.parquet' USING (item_id)
            ORDER BY item_id
            """
            )
            .fetchall()
        )

        assert rows == [
            ("checkpoint_1", "numpy", 200_000_000, False),
            ("checkpoint_1", "pandas", 500_000_000, True),
            ("checkpoint_1", "pandas.core", 100_000_000, False),
        ]

    def test_what_was_left_of_a_stopped_write_does_not_matter(self, path: Path) -> None:
        """Neither to a reader nor to the next writer."""
        folder = projection_path(path)
        aside = folder.with_name("cpu.parquet.partial")
        aside.mkdir()
        (aside / "items.parquet").write_bytes(b"half")

        assert load_catalogue(path).warnings == ()
        write_projection(read_document(path), folder)
        assert not aside.exists()

    def test_a_folder_that_cannot_be_written_is_named(self, path: Path) -> None:
        """One message."""
        folder = path / "cpu.parquet"

        with pytest.raises(BadFile) as caught:
            write_projection(read_document(path), folder)

        assert caught.value.detail.startswith(f"{folder}: ")


class TestFallback:
    """Otherwise the document is read, with a warning that says why."""

    def test_without_a_projection(self, path: Path) -> None:
        """There is none."""
        shutil.rmtree(projection_path(path))

        assert why_not(path) == "there is none"

    def test_a_file_in_its_place(self, path: Path) -> None:
        """A projection is a folder."""
        shutil.rmtree(projection_path(path))
        projection_path(path).write_bytes(b"PAR1")

        assert why_not(path) == "there is none"

    def test_with_the_projection_of_another_document(self, path: Path) -> None:
        """A byte more in the document, and the projection is foreign."""
        path.write_text(path.read_text() + "\n")

        assert why_not(path) == "it belongs to another document"

    @pytest.mark.parametrize("name", FILES)
    def test_with_a_missing_file(self, path: Path, name: str) -> None:
        """Each file is needed."""
        (projection_path(path) / f"{name}.parquet").unlink()

        assert why_not(path) == f"{name}.parquet is missing"

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "replaced"])
    def test_with_a_damaged_file(self, path: Path, name: str, damage: str) -> None:
        """Whatever happened to whichever file."""
        file = projection_path(path) / f"{name}.parquet"
        data = file.read_bytes()
        flipped = data[:-20] + bytes([data[-20] ^ 0xFF]) + data[-19:]
        other = projection_path(path) / ("items.parquet" if name != "items" else "checkpoints.parquet")
        file.write_bytes({"cut": data[:-9], "flipped": flipped, "emptied": b"", "replaced": other.read_bytes()}[damage])

        assert why_not(path).startswith(f"{name}.parquet ")

    def test_with_other_columns(self, path: Path) -> None:
        """A projection of another version of Readie."""
        file = projection_path(path) / "catalogue.parquet"
        pq.write_table(pq.read_table(file).drop_columns(["alpha"]), file)

        assert why_not(path) == "catalogue.parquet has other columns"

    @pytest.mark.parametrize(
        ("name", "changed", "reason"),
        [
            ("catalogue", {"version": [3]}, "version 3"),
            ("catalogue", {"flavor": ["tpu"]}, "not valid"),
            ("catalogue", {"alpha": [float("nan")]}, "not valid"),
            ("catalogue", {"generation": ["0" * 64]}, "not of the generation"),
            ("distributions", {"version": ["2.0", "1"]}, "not of the generation"),
            ("items", {"item_id": [0, 1, 3, 2]}, "not dense"),
            ("items", {"key": ["numpy", "pandas", "numpy", "model:m"]}, "twice"),
            ("items", {"load_ns": [1, 1, 1, -1]}, "load times"),
            ("items", {"load_ns": [2**62, 2**62, 2**62, 2**62]}, "load times"),
            ("items", {"size_mb": [1.0, float("nan"), 1.0, 1.0]}, "sizes"),
            ("items", {"resource_type": ["package", "package", "package", "modell"]}, "resource type"),
            ("dependencies", {"dependency_id": [0, 2, 4]}, "not in order"),
            ("dependencies", {"dependency_id": [0, 2, -1]}, "not in order"),
            ("dependencies", {"dependency_id": [2, 0, 1]}, "not in order"),
            ("dependencies", {"dependency_id": [2, 2, 1]}, "not in order"),
            ("dependencies", {"item_id": [1, 2, 1]}, "not in order"),
            ("checkpoints", {"ordinal": [1, 0]}, "not in order"),
            ("checkpoints", {"checkpoint_id": ["x", "x"]}, "twice"),
            ("checkpoints", {"size_ns": [0, 2**62]}, "prices"),
            ("checkpoints", {"size_mb": [0.0, -1.0]}, "sizes"),
            ("checkpoint_items", {"ordinal": [1, 1, 2]}, "not in order"),
            ("checkpoint_items", {"item_id": [0, 1, 3]}, "not of the generation"),
            ("checkpoint_items", {"canonical": [True, True, True]}, "not of the generation"),
        ],
    )
    def test_with_contents_that_no_document_has(
        self, path: Path, name: str, changed: dict[str, list[Any]], reason: str
    ) -> None:
        """Hashes that fit are not enough: ids, ranges and the generation are looked at."""
        rewrite(path, name, lambda columns: columns.update(changed))

        assert reason in why_not(path)

    def test_the_reason_comes_before_the_documents_own_warnings(self, path: Path) -> None:
        """Both are told."""
        write(path, {**DOCUMENT, "note": 1})

        first, second = load_catalogue(path).warnings

        assert "it belongs to another document" in first
        assert "ignored unknown keys" in second

    def test_a_bad_document_stays_bad(self, path: Path) -> None:
        """The projection of an earlier one does not stand in for it."""
        path.write_text(json.dumps(DOCUMENT).replace('"cpu"', '"tpu"'))

        with pytest.raises(BadDocument, match="flavor is"):
            load_catalogue(path)

    def test_asked_alone_it_says_why(self, path: Path) -> None:
        """As an exception."""
        with pytest.raises(BadProjection, match="it belongs to another document"):
            read_projection(projection_path(path), "0" * 64)


def test_a_catalogue_without_anything_has_a_projection(tmp_path: Path) -> None:
    """No items, no checkpoints."""
    path = write(tmp_path / "cpu.json", make_document({}))
    write_projection(read_document(path), projection_path(path))

    catalogue: Catalogue = load_catalogue(path)

    assert contents_of(catalogue) == contents_of(read_document(path))
