"""The JSON Schema of the catalogue document says what the reader says, as far as a schema can."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings

from readie.document import read_document, write_document
from tests.catalogues import documents, write
from tests.pages import read_blocks
from tests.strategies import Content, contents
from tests.test_document import DOCUMENT, RULES, change

ROOT = Path(__file__).parent.parent
SCHEMA: dict[str, Any] = json.loads((ROOT / "docs" / "catalogue-2.schema.json").read_text(encoding="utf-8"))
SCHEMA_OF_DOCUMENTS = jsonschema_rs.Draft202012Validator(SCHEMA)

#: What a schema cannot say, by the end of the rule or what it is about.
BEYOND = [
    "the key is given twice",
    "must differ from the ids before it",
    "the key of an item",
    "one of the chec",
    "lone surrogate (there is",
    "not JSON",
]
STRUCTURAL = [
    (text, changed)
    for text, changed, place, value, rule in RULES
    if value != "2.0" and not any(beyond in f"{place} {rule}" for beyond in BEYOND)
]


def test_the_schema_is_one() -> None:
    """It keeps to the JSON Schema that it names."""
    assert jsonschema_rs.meta.is_valid(SCHEMA)


@pytest.mark.parametrize(("text", "changed"), STRUCTURAL, ids=lambda value: value[:40])
def test_what_breaks_a_rule_of_structure_is_refused(text: str, changed: str) -> None:
    """By the reader (tests/test_document.py has the same table) and by the schema."""
    assert SCHEMA_OF_DOCUMENTS.is_valid(DOCUMENT)
    assert not SCHEMA_OF_DOCUMENTS.is_valid(json.loads(change(text, changed)))


@settings(max_examples=15)  # each is a file that is written for good
@given(content=contents())
def test_what_is_written_is_accepted(content: Content) -> None:
    """Whatever the writer writes, any names and numbers."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "catalogue.json"
        write_document(path, **content.arguments())
        document = json.loads(path.read_bytes())

    assert SCHEMA_OF_DOCUMENTS.is_valid(document)


@given(document=documents())
def test_documents_of_the_tests_are_accepted(document: dict[str, Any]) -> None:
    """Those that are full of what is hard to price."""
    assert SCHEMA_OF_DOCUMENTS.is_valid(document)


def test_the_committed_catalogue_is_accepted() -> None:
    """28,261 items, and checkpoints of real packages."""
    SCHEMA_OF_DOCUMENTS.validate(json.loads((ROOT / "catalogues" / "cpu.json").read_bytes()))


def test_the_example_of_the_page_is_read(tmp_path: Path) -> None:
    """docs/catalogue-format.md shows a document without a fault."""
    (block,) = [each for each in read_blocks(ROOT / "docs" / "catalogue-format.md") if each.language == "json"]
    document = json.loads(block.text)

    SCHEMA_OF_DOCUMENTS.validate(document)
    assert read_document(write(tmp_path / "cpu.json", document)).warnings == ()
