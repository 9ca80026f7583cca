"""The catalogue document (DESIGN §3): what is read, what is refused and how it is said, what is written."""

import dataclasses
import hashlib
import itertools
import json
import os
import random
import re
import threading
from collections.abc import Mapping
from decimal import Decimal
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readie import document as document_module
from readie.document import (
    Catalogue,
    DocumentCheckpoint,
    DocumentItem,
    _Source,
    compute_generation,
    hash_document,
    peek_flavor,
    read_document,
    write_document,
)
from readie.errors import BadDocument, BadFile
from readie.flavor import Flavor
from readie.units import mb_to_bytes, price_size, seconds_to_ns
from tests.strategies import Content, contents

#: A document in which everything is there once; the tables below change one text of it.
DOCUMENT: dict[str, Any] = {
    "version": 2,
    "flavor": "cpu",
    "alpha": 0.006,
    "distributions": {"numpy": "2.0.2", "pandas": ""},
    "items": {
        "numpy": {"load_time": 0.2, "size_mb": 7.5, "resource_type": "package", "distribution": "numpy"},
        "pandas": {
            "load_time": 0.5,
            "size_mb": 72,
            "resource_type": "package",
            "dependencies": ["numpy", "pandas.core"],
            "distribution": "pandas",
        },
        "pandas.core": {"load_time": 0, "size_mb": 0, "resource_type": "package", "distribution": "pandas"},
        "model:m": {"load_time": 1, "size_mb": 99, "resource_type": "model", "distribution": ""},
    },
    "checkpoints": [
        {"id": "checkpoint_0", "items": [], "canonical": [], "size_mb": 0},
        {"id": "checkpoint_1", "items": ["numpy", "pandas"], "canonical": ["numpy"], "size_mb": 80},
    ],
}
TEXT = json.dumps(DOCUMENT)
NUMBER = "must be a number from 0 to"
BAD_NAME = "must not hold a NUL or a lone surrogate"
VERSION = "must be the integer 2, the only version that is read"

#: text, what it is changed to, the place that the message names, the value, the rule
RULES = [
    # version
    ('"version": 2', '"version": 1', "version", "1", VERSION),
    ('"version": 2', '"version": 3', "version", "3", VERSION),
    ('"version": 2', '"version": "2"', "version", '"2"', VERSION),
    ('"version": 2', '"version": 2.0', "version", "2.0", VERSION),
    ('"version": 2', '"version": true', "version", "true", VERSION),
    ('"version": 2', '"version": null', "version", "null", VERSION),
    ('"version": 2', '"version": [2]', "version", "a list", VERSION),
    # flavor
    ('"cpu"', '"tpu"', "flavor", '"tpu"', "must be cpu or gpu"),
    ('"cpu"', '"CPU"', "flavor", '"CPU"', "must be cpu or gpu"),
    ('"cpu"', '""', "flavor", '""', "must not be empty"),
    ('"cpu"', "null", "flavor", "null", "must be cpu or gpu"),
    # alpha
    ("0.006", "0", "alpha", "0", "must be a number above 0, up to 1000 (seconds per MB)"),
    ("0.006", "-0.006", "alpha", "-0.006", "must be a number above 0, up to 1000 (seconds per MB)"),
    ("0.006", "1000.1", "alpha", "1000.1", "must be a number above 0"),
    ("0.006", "1e-400", "alpha", "1E-400", "must be a number above 0"),  # 0.0 as a float
    ("0.006", '"0.006"', "alpha", '"0.006"', "must be a number above 0"),
    ("0.006", "true", "alpha", "true", "must be a number above 0"),
    # distributions
    ('"numpy": "2.0.2"', '"Num.Py": "2.0.2"', 'distributions["Num.Py"]', "", 'a canonical name, such as "num-py"'),
    ('"numpy": "2.0.2"', '"a__b": "2.0.2"', 'distributions["a__b"]', "", 'a canonical name, such as "a-b"'),
    ('"numpy": "2.0.2"', '"num py": "2.0.2"', 'distributions["num py"]', "", "a canonical name"),
    ('"numpy": "2.0.2"', '"": "2.0.2"', 'distributions[""]', "", "must not be empty"),
    ('"2.0.2"', "2", 'distributions["numpy"]', "2", "must be a version, or empty"),
    ('"2.0.2"', "null", 'distributions["numpy"]', "null", "must be a version, or empty"),
    ('"2.0.2"', '"2\\u0000"', 'distributions["numpy"]', '"2\\u0000"', BAD_NAME),
    ('{"numpy": "2.0.2", "pandas": ""}', '["numpy"]', "distributions", "a list", "must be an object"),
    # items
    ('"load_time": 0.2', '"load_time": -1e-9', 'items["numpy"].load_time', "-1E-9", NUMBER),
    ('"load_time": 0.2', '"load_time": 3600.5', 'items["numpy"].load_time', "3600.5", f"{NUMBER} 3600 (seconds)"),
    ('"load_time": 0.2', '"load_time": false', 'items["numpy"].load_time', "false", NUMBER),
    ('"load_time": 0.2', '"load_time": "0.2"', 'items["numpy"].load_time', '"0.2"', NUMBER),
    ('"load_time": 0.2', '"load_time": null', 'items["numpy"].load_time', "null", NUMBER),
    ('"load_time": 0.2', '"load_time": {}', 'items["numpy"].load_time', "an object", NUMBER),
    ('"size_mb": 7.5', '"size_mb": -7', 'items["numpy"].size_mb', "-7", NUMBER),
    ('"size_mb": 7.5', '"size_mb": 1000000001', 'items["numpy"].size_mb', "1000000001", f"{NUMBER} 1000000000 (MB)"),
    ('"model"', '"modell"', 'items["model:m"].resource_type', '"modell"', "one of package, dataset, model, tokenizer"),
    ('"model"', "4", 'items["model:m"].resource_type', "4", "one of package, dataset, model, tokenizer"),
    ('"distribution": "numpy"', '"distribution": "NumPy"', 'items["numpy"].distribution', '"NumPy"', "canonical"),
    ('"distribution": "numpy"', '"distribution": null', 'items["numpy"].distribution', "null", "a distribution, or em"),
    ('["numpy", "pandas.core"]', '"numpy"', 'items["pandas"].dependencies', '"numpy"', "must be a list of item names"),
    ('["numpy", "pandas.core"]', "null", 'items["pandas"].dependencies', "null", "must be a list of item names"),
    ('["numpy", "pandas.core"]', '["numpy", 3]', 'items["pandas"].dependencies[1]', "3", "must be the name of an item"),
    ('["numpy", "pandas.core"]', "[[]]", 'items["pandas"].dependencies[0]', "a list", "must be the name of an item"),
    ('["numpy", "pandas.core"]', '["numpy", ""]', 'items["pandas"].dependencies[1]', '""', "must not be empty"),
    ('["numpy", "pandas.core"]', '["\\u0000"]', 'items["pandas"].dependencies[0]', '"\\u0000"', BAD_NAME),
    (
        '["numpy", "pandas.core"]',
        '["\\udfff"]',
        'items["pandas"].dependencies[0]',
        "",
        f"{BAD_NAME} (there is \\udfff)",
    ),
    ('"model:m": ', '"a\\u0000b": ', 'items["a\\u0000b"]', "", BAD_NAME),
    ('"model:m": ', '"a\\ud800b": ', "items[", "", f"{BAD_NAME} (there is \\ud800)"),
    ('"model:m": ', '"": ', 'items[""]', "", "must not be empty"),
    ('"model:m": ', f'"{"x" * 1025}": ', 'items["xxx', "", "must have at most 1024 characters"),
    ('"model:m": {"load_time"', '"model:m": 5, "x": {"load_time"', 'items["model:m"]', "5", "must be an object"),
    # checkpoints
    ('"checkpoint_1"', '"checkpoint_0"', "checkpoints[1].id", '"checkpoint_0"', "must differ from the ids before it"),
    ('"checkpoint_1"', '""', "checkpoints[1].id", '""', "must not be empty"),
    ('"checkpoint_1"', "1", "checkpoints[1].id", "1", "must be a name"),
    ('"checkpoint_1"', '"\\ud83d\\u0041"', "checkpoints[1].id", "", f"{BAD_NAME} (there is \\ud83d)"),
    ('["numpy", "pandas"]', '["numpy", "scipy"]', "checkpoints[1].items[1]", '"scipy"', "the key of an item of this"),
    ('["numpy", "pandas"]', '{"numpy": 1}', "checkpoints[1].items", "an object", "must be a list of item names"),
    (
        '"canonical": ["numpy"]',
        '"canonical": ["scipy"]',
        "checkpoints[1].canonical[0]",
        '"scipy"',
        "the key of an item",
    ),
    (
        '"canonical": ["numpy"]',
        '"canonical": ["model:m"]',
        "checkpoints[1].canonical[0]",
        '"model:m"',
        "one of the chec",
    ),
    ('"size_mb": 80', '"size_mb": -1', "checkpoints[1].size_mb", "-1", NUMBER),
    ('[{"id"', '[7, {"id"', "checkpoints[0]", "7", "must be an object"),
    # keys
    *(
        (f'"{key}": ', f'"x{key}": ', place, "", "the key is missing")
        for key, place in [
            ("version", "version"),
            ("flavor", "flavor"),
            ("alpha", "alpha"),
            ("distributions", "distributions"),
            ("checkpoints", "checkpoints"),
            ("load_time", 'items["numpy"].load_time'),
            ("resource_type", 'items["numpy"].resource_type'),
            ("distribution", 'items["numpy"].distribution'),
            ("id", "checkpoints[0].id"),
            ("canonical", "checkpoints[0].canonical"),
        ]
    ),
    ('"size_mb": 7.5, ', "", 'items["numpy"].size_mb', "", "the key is missing"),
    ('"size_mb": 80', '"sizemb": 80', "checkpoints[1].size_mb", "", "the key is missing"),
    ('"items": {', '"itemz": {', "items", "", "the key is missing"),
    ('"alpha": 0.006', '"alpha": 0.006, "alpha": 0.006', "alpha", "", "the key is given twice"),
    ('"alpha": 0.006', '"note": 1, "alpha": 0.006, "note": 1', "note", "", "the key is given twice"),
    ('"pandas": ""', '"numpy": ""', 'distributions["numpy"]', "", "the key is given twice"),
    ('"model:m": ', '"numpy": ', 'items["numpy"]', "", "the key is given twice"),
    ('"size_mb": 7.5', '"size_mb": 7.5, "size_mb": 7.5', 'items["numpy"].size_mb', "", "the key is given twice"),
    ('"size_mb": 80', '"size_mb": 80, "id": "x"', "checkpoints[1].id", "", "the key is given twice"),
    # not JSON at all
    ('["numpy", "pandas"]', '["numpy" "pandas"]', "checkpoints[1].items: not JSON at byte", "", "I expect ',' or ']'"),
    ('["numpy", "pandas"]', '["numpy", "pandas",]', "checkpoints[1].items: not JSON at byte", "", "unallowed token"),
    ('"alpha"', '/* price */ "alpha"', "flavor: not JSON at byte", "", "comments are not enabled"),
    ('"size_mb": 80}]}', '"size_mb": 80}]', "checkpoints[1].size_mb: not JSON at byte", "", "premature EOF"),
    ('"size_mb": 80}]}', '"size_mb": 80}]} {}', "not JSON at byte", "", "trailing garbage"),
    ('"checkpoint_1"', '"a\tb"', "checkpoints[1].id: not JSON at byte", "", "invalid character inside string"),
]

#: K17: what decoders let through: text, changed to, place, value or what is said of it
LET_THROUGH = [
    ("0.006", "NaN", "alpha: not JSON at byte", "invalid char"),
    ("0.006", "Infinity", "alpha: not JSON at byte", "invalid char"),
    ("0.006", "-Infinity", "alpha: not JSON at byte", "malformed number"),
    ("0.006", "1e999", "alpha is 1E+999: ", "up to 1000"),
    ("0.006", "1e99999999999999999999999", "alpha: not JSON at byte", "too many digits"),
    (
        '"size_mb": 80',
        '"size_mb": 9223372036854775808',
        "checkpoints[1].size_mb is 9223372036854775808: ",
        "to 10000000",
    ),
    ('"size_mb": 80', f'"size_mb": {"9" * 26}', f"checkpoints[1].size_mb is {'9' * 26}: ", "to 1000000000"),
    ('"size_mb": 80', f'"size_mb": {"9" * 4300}', "checkpoints[1].size_mb is 999", "(4300 characters): must be"),
    ('"size_mb": 80', f'"size_mb": {"9" * 5000}', "checkpoints[1].size_mb: not JSON at byte", "too many digits"),
    ('"size_mb": 80', f'"size_mb": -{"9" * 200_000}', "checkpoints[1].size_mb: not JSON at byte", "too many digits"),
    ('"checkpoint_1"', '"\\ud800"', "checkpoints[1].id is ", "a lone surrogate (there is \\ud800)"),
    ('"checkpoint_1"', '"a\\u0000b"', 'checkpoints[1].id is "a\\u0000b": ', "NUL"),
    ('["numpy", "pandas.core"]', "[" * 100_000 + "]" * 100_000, 'items["pandas"].dependencies[0] is a list', ""),
    ('"alpha"', f'"x": {"[" * 100_000 + "]" * 100_000}, "alpha"', "x: ", "must not nest more than 100 deep"),
    ('"alpha"', '"x": ' + '{"a":' * 200 + "1" + "}" * 200 + ', "alpha"', "x: ", "100 deep"),
    ('"alpha"', f'"x": {"[" * 100_000}', "x: ", "must not nest more than 100 deep"),
]

#: Files that hold no document: bytes, what is said
NO_DOCUMENTS = [
    (b"", "the file is empty"),
    (b" \n", "not JSON at byte 2"),
    (b"[]", "the document is a list: must be an object"),
    (b'"cpu"', 'the document is "cpu": must be an object'),
    (b"2", "the document is 2: must be an object"),
    (b"null", "the document is null: must be an object"),
    (b"PAR1\0\0", "not JSON at byte 0"),
    (b"\xef\xbb\xbf" + TEXT.encode(), "the file begins with a byte order mark"),
    (TEXT.encode("utf-16"), "not JSON at byte 0"),
    (TEXT.encode("utf-16-le"), "not JSON at byte 1"),
    (TEXT.replace("checkpoint_1", "\xe9").encode("latin-1"), "checkpoints[1].id: not JSON at byte"),
    (TEXT.replace("checkpoint_1", "\ud800").encode("utf-8", "surrogatepass"), "a string is not UTF-8"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cpu.json"


def refuse(path: Path, document: bytes | str | Mapping[str, Any]) -> str:
    """What is said of a bad document, without the file's name, with which it begins."""
    if isinstance(document, Mapping):
        document = json.dumps(document)
    path.write_bytes(document if isinstance(document, bytes) else document.encode())
    with pytest.raises(BadDocument) as caught:
        read_document(path)
    assert caught.value.detail.startswith(f"{path}: ")
    return caught.value.detail.removeprefix(f"{path}: ")


def read(path: Path, document: Mapping[str, Any] | str) -> Catalogue:
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return read_document(path)


def change(text: str, changed: str) -> str:
    assert text in TEXT
    return TEXT.replace(text, changed)


def contents_of(catalogue: Catalogue) -> dict[str, Any]:
    """All fields of a catalogue as plain values, for comparing."""
    fields = {field.name: getattr(catalogue, field.name) for field in dataclasses.fields(catalogue)}
    fields["checkpoints"] = [
        {**dataclasses.asdict(each), "items": each.items.tolist(), "canonical": each.canonical.tolist()}
        for each in catalogue.checkpoints
    ]
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


class TestBadDocuments:
    """A document that breaks a rule is refused whole, with one message: file, place, value and rule."""

    @pytest.mark.parametrize("case", RULES, ids=range(len(RULES)))
    def test_each_rule_names_place_value_and_itself(self, path: Path, case: tuple[str, ...]) -> None:
        """The message begins with the file and the place, shows the value, and ends with the rule."""
        text, changed, place, value, rule = case

        said = refuse(path, change(text, changed))

        assert said.startswith(place + (f" is {value}: " if value else ""))
        assert rule in said
        assert len(said) < 400

    @pytest.mark.parametrize(("text", "changed", "place", "rule"), LET_THROUGH, ids=range(len(LET_THROUGH)))
    def test_what_decoders_let_through_is_refused(
        self, path: Path, text: str, changed: str, place: str, rule: str
    ) -> None:
        """NaN, huge numbers, lone surrogates, NUL and deep nesting are refused by name, and the process lives."""
        said = refuse(path, change(text, changed))

        assert said.startswith(place)
        assert rule in said
        assert len(said) < 400

    @pytest.mark.parametrize(("data", "rule"), NO_DOCUMENTS, ids=range(len(NO_DOCUMENTS)))
    def test_a_file_that_is_no_document_is_refused(self, path: Path, data: bytes, rule: str) -> None:
        """Empty files, other formats, other encodings, broken text."""
        assert rule in refuse(path, data)

    @pytest.mark.parametrize(("name", "reason"), [("gone.json", "No such file"), (".", "not a file"), ("a\0", "null")])
    def test_a_path_that_cannot_be_read_is_refused(self, tmp_path: Path, name: str, reason: str) -> None:
        """A missing file, a folder, an impossible name: the message has the path and the reason."""
        with pytest.raises(BadDocument, match=reason):
            read_document(tmp_path / name)

    def test_a_pipe_is_refused_at_once(self, path: Path) -> None:
        """Nobody may write into it: reading does not wait."""
        os.mkfifo(path)
        with pytest.raises(BadDocument, match="not a file"):
            read_document(path)

    def test_an_unreadable_file_is_refused(self, path: Path) -> None:
        """The reason is the operating system's."""
        path.symlink_to(path)
        with pytest.raises(BadDocument, match="symbolic links"):
            read_document(path)

    def test_another_version_is_named_before_anything_else(self, path: Path) -> None:
        """The version may come last, after much that version 2 would not accept."""
        old = {"packages": [{"name": "numpy"}], "flavor": "tpu", "alpha": None, "items": [], "version": 1}

        assert refuse(path, old) == f"version is 1: {VERSION}"

    def test_version_2_that_comes_last_hides_no_rule(self, path: Path) -> None:
        """Without another version, the first broken rule is named."""
        assert refuse(path, {"flavor": "tpu", "version": 2}).startswith('flavor is "tpu"')
        assert refuse(path, {"flavor": "tpu"}).startswith('flavor is "tpu"')

    def test_load_times_that_overflow_together_are_refused(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The sum of all load times has a bound, so that no cost leaves 64 bits."""
        monkeypatch.setattr(document_module, "MAX_NS", 1_700_000_000)

        assert refuse(path, DOCUMENT).startswith("items is 1700000000 ns: all load times together must stay below")

    def test_a_price_that_overflows_is_refused(self, path: Path) -> None:
        """Alpha and size are in range, their product is not; wherever alpha stands."""
        checkpoint = {"id": "big", "items": [], "canonical": [], "size_mb": 1e9}
        reordered = {"checkpoints": [checkpoint], **{key: DOCUMENT[key] for key in DOCUMENT if key != "checkpoints"}}

        said = refuse(path, reordered | {"alpha": 1000})

        assert said.startswith("checkpoints[0].size_mb is 1000000000.0: alpha × size_mb must stay below")

    @pytest.mark.parametrize("digits", [4301, 140_000])
    @pytest.mark.parametrize("at", [65_536 - 4300, 65_535])
    def test_too_many_digits_are_found_wherever_they_are(self, path: Path, at: int, digits: int) -> None:
        """The parser would crash the process on them; reads of the file end after every 65,536 bytes."""
        padding = " " * (at - TEXT.index("80}]"))

        said = refuse(path, padding + change("80}]", "8" * digits + "}]"))

        assert said.startswith("checkpoints[1].size_mb: not JSON at byte")

    def test_a_rule_is_named_where_it_is_broken_beyond_the_first_read(self, path: Path) -> None:
        """Place and byte are right in a file of many reads."""
        items = {f"item{n}": DOCUMENT["items"]["numpy"] for n in range(5000)}
        text = json.dumps(DOCUMENT | {"items": items | DOCUMENT["items"]})
        broken = text.replace('"pandas.core"]', '"pandas.core",]')

        said = refuse(path, broken)

        assert said.startswith(f'items["pandas"].dependencies: not JSON at byte {broken.index(",]") + 1} (')

    def test_a_number_that_is_not_exact_among_many_is_refused(self, path: Path) -> None:
        """K17: of 200 keys with 2**53 + 1 and one with 1.5, the first is named as it was written."""
        item = '{"load_time": 0, "size_mb": %s, "resource_type": "package", "distribution": "numpy"}'
        values = {**{f"m{number}": "9007199254740993" for number in range(200)}, "other": "1.5"}
        items = ", ".join(f'"{key}": {item % value}' for key, value in values.items())
        empty = json.dumps(DOCUMENT | {"items": {}, "checkpoints": []})

        said = refuse(path, empty.replace('"items": {}', f'"items": {{{items}}}'))

        assert said.startswith('items["m0"].size_mb is 9007199254740993: must be a number')


class TestReading:
    """One pass, whatever the order of keys; every number exact from its decimal text."""

    def test_a_document_is_read_into_columns(self, path: Path) -> None:
        """Ids are positions in the document's order; lists of ids are sorted."""
        catalogue = read(path, DOCUMENT)

        assert contents_of(catalogue) == {
            "flavor": Flavor.CPU,
            "alpha": 0.006,
            "sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
            "generation": catalogue.generation,
            "distributions": {"numpy": "2.0.2", "pandas": ""},
            "keys": ["numpy", "pandas", "pandas.core", "model:m"],
            "load_ns": [200_000_000, 500_000_000, 0, 1_000_000_000],
            "size_mb": [7.5, 72.0, 0.0, 99.0],
            "resource_types": ["package", "package", "package", "model"],
            "item_distributions": ["numpy", "pandas", "pandas", ""],
            "offsets": [0, 0, 2, 2, 2],
            "dependencies": [0, 2],
            "checkpoints": [
                {
                    "checkpoint_id": "checkpoint_0",
                    "items": [],
                    "canonical": [],
                    "size_mb": 0.0,
                    "size_bytes": 0,
                    "size_ns": 0,
                },
                {
                    "checkpoint_id": "checkpoint_1",
                    "items": [0, 1],
                    "canonical": [0],
                    "size_mb": 80.0,
                    "size_bytes": 80_000_000,
                    "size_ns": 480_000_000,
                },
            ],
            "warnings": (),
        }

    def test_an_empty_catalogue_is_one(self, path: Path) -> None:
        """No items, no checkpoints, no distributions: nothing forbids it."""
        catalogue = read(path, DOCUMENT | {"items": {}, "checkpoints": [], "distributions": {}})

        assert (catalogue.keys, catalogue.checkpoints, catalogue.offsets.tolist()) == ([], [], [0])

    @pytest.mark.parametrize("order", list(itertools.permutations(DOCUMENT))[::37])
    def test_the_order_of_keys_is_free(self, path: Path, order: tuple[str, ...]) -> None:
        """Checkpoints and items may refer to what comes later."""
        expected = contents_of(read(path, DOCUMENT))

        reordered = contents_of(read(path, {key: DOCUMENT[key] for key in order}))

        assert reordered | {"sha256": ""} == expected | {"sha256": ""}

    def test_cycles_and_self_dependencies_are_legal(self, path: Path) -> None:
        """They are kept as they are."""
        item = DOCUMENT["items"]["numpy"]
        items = {"a": item | {"dependencies": ["b", "a"]}, "b": item | {"dependencies": ["a"]}}

        catalogue = read(path, DOCUMENT | {"items": items, "checkpoints": []})

        assert catalogue.dependencies.tolist() == [0, 1, 0]

    def test_names_in_a_list_count_once(self, path: Path) -> None:
        """A dependency, an item or a canonical item that is listed twice is there once."""
        twice = change('["numpy", "pandas.core"]', '["pandas.core", "numpy", "pandas.core"]')
        catalogue = read(path, twice.replace('["numpy", "pandas"]', '["pandas", "numpy", "pandas"]'))

        assert catalogue.dependencies.tolist() == [0, 2]
        assert catalogue.checkpoints[1].items.tolist() == [0, 1]

    def test_a_dependency_on_an_unknown_item_is_dropped_and_counted(self, path: Path) -> None:
        """One warning says how many, and which."""
        catalogue = read(path, change('["numpy", "pandas.core"]', '["x", "numpy", "x", "y"]'))

        assert catalogue.dependencies.tolist() == [0]
        assert catalogue.warnings == (
            f'{path}: dropped 3 dependencies on items that are not in the document: "x" (2×), "y" (1×)',
        )

    def test_unknown_keys_are_ignored_and_counted(self, path: Path) -> None:
        """One warning says which and how often; what they hold is not looked at."""
        text = change('"version"', '"note": {"a": [1, {"a": "\\u0000", "a": "\\ud800"}]}, "version"')
        catalogue = read(path, text.replace('"load_time"', '"color": null, "load_time"'))

        assert len(catalogue.keys) == 4
        assert catalogue.warnings == (f"{path}: ignored unknown keys: items[…].color (4×), note (1×)",)

    def test_many_unknown_keys_are_one_short_warning(self, path: Path) -> None:
        """The first few are listed, the rest counted."""
        (warning,) = read(path, DOCUMENT | {f"key{n}": n for n in range(100)}).warnings

        assert warning.endswith("and 95 more")

    def test_minus_zero_is_zero(self, path: Path) -> None:
        """No sign reaches the tables."""
        catalogue = read(path, change("7.5", "-0.0").replace('"size_mb": 0}', '"size_mb": -0.0}'))

        assert str(catalogue.size_mb[0]) == "0.0"
        assert str(catalogue.checkpoints[0].size_mb) == "0.0"

    @pytest.mark.parametrize(
        ("load_time", "load_ns"),
        [
            ("0.1", 100_000_000),
            ("1e-9", 1),
            ("5e-10", 0),  # half to even
            ("1.5e-9", 2),
            ("2.5e-9", 2),
            ("2.500000000000000000001e-9", 3),
            ("0.30000000000000004", 300_000_000),
            ("1234.567890123", 1_234_567_890_123),
            ("3600", 3_600_000_000_000),
        ],
    )
    def test_nanoseconds_are_exact_from_the_text(self, path: Path, load_time: str, load_ns: int) -> None:
        """Seconds never pass through a float."""
        assert read(path, change("0.2, ", f"{load_time}, ")).load_ns[0] == load_ns

    def test_a_name_may_have_any_letters(self, path: Path) -> None:
        """Up to 1,024 characters: beyond the basic plane, escaped or not; backslashes and quotes."""
        names = ["😀" * 1024, 'a"b\\ud800\\', "\u202eabc", "ｎｕｍｐｙ", " ", "\x7f"]
        items = dict.fromkeys(names, DOCUMENT["items"]["numpy"])

        for ascii_only in (True, False):
            text = json.dumps(DOCUMENT | {"items": items, "checkpoints": []}, ensure_ascii=ascii_only)
            assert read(path, text).keys == names

    def test_a_long_run_of_digits_in_a_name_is_a_name(self, path: Path) -> None:
        """Only numbers are held to the number of digits."""
        assert read(path, change("checkpoint_1", "7" * 1024)).checkpoints[1].checkpoint_id == "7" * 1024

    def test_the_hash_is_that_of_the_bytes(self, path: Path) -> None:
        """Surrogate pairs and trailing blanks included; hash_document gives the same without reading."""
        data = change("checkpoint_1", "\\ud83d\\ude00").encode() + b" \n\n"
        path.write_bytes(data)

        assert read_document(path).sha256 == hash_document(path) == hashlib.sha256(data).hexdigest()

    def test_hashing_what_is_no_file_is_refused(self, tmp_path: Path) -> None:
        """As reading it is."""
        with pytest.raises(BadDocument, match="not a file"):
            hash_document(tmp_path)


class TestSurrogates:
    """The parser turns lone surrogate escapes into question marks; they are found in the bytes before."""

    @given(
        pieces=st.lists(
            st.sampled_from(["\\ud83d", "\\ude00", "\\uDBFF\\uDFFF", "\\\\", "\\n", "\\u0041", "a", "ud800", "é", "9"])
        ),
        size=st.integers(1, 40),
    )
    def test_they_are_found_wherever_reads_end(self, pieces: list[str], size: int) -> None:
        """Read in pieces of any size, the text differs only in its lone surrogates; the hash is the original's."""
        data = f'"{"".join(pieces)}"'.encode()
        source = _Source(BufferedReader(BytesIO(data)), None)

        read = b"".join(iter(lambda: source.read(size), b""))

        expected = "".join("\0" if 0xD800 <= ord(letter) < 0xE000 else letter for letter in json.loads(data))
        assert json.loads(read) == expected
        assert bool(source.lone) == (read != data)
        assert source.hash.digest() == hashlib.sha256(data).digest()

    @pytest.mark.parametrize("offset", range(65_536 - 16, 65_536 + 4))
    def test_pairs_pass_and_halves_do_not_at_a_border_of_reads(self, path: Path, offset: int) -> None:
        """The file is read in pieces of 65,536 bytes."""
        padding = " " * (offset - TEXT.index("checkpoint_1"))

        pair = read(path, padding + change("checkpoint_1", "\\ud83d\\ude00"))
        assert pair.checkpoints[1].checkpoint_id == "😀"

        escaped = read(path, padding + change("checkpoint_1", "\\\\ud83d"))
        assert escaped.checkpoints[1].checkpoint_id == "\\ud83d"

        said = refuse(path, padding + change("checkpoint_1", "\\ud83d"))
        assert said == f'checkpoints[1].id is "\\u0000": {BAD_NAME} (there is \\ud83d)'


#: What is put into a document to spoil it, or not: bytes that begin, end or break a list, a string, a letter.
SPOILS = [
    b'"',
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"{",
    b"}",
    b" ",
    b"\n",
    b"\0",
    b"\x1f",
    b"7",
    b"\xff",
    b"\xc3\xa9",
    b'""',
    b"[]",
]
SPOILS += [
    b"\\u0000",
    b"\\ud800",
    b"\\ud83d\\ude00",
    b'\\"',
    b'"items":[',
    b'"dependencies": ["',
    b', "numpy"',
    b"x" * 1025,
]


class TestLifting:
    """Lists of good names are decoded beside the parser, for speed: nothing else about reading shows it."""

    def outcome(self, path: Path, *, lifting: bool, size: int) -> str | dict[str, Any]:
        """The catalogue or the message, of a reader that reads `size` bytes at once."""
        read_piece = _Source.read
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_Source, "read", lambda source, most: read_piece(source, min(size, most)))
            if not lifting:
                patched.setattr(document_module, "_LIST", re.compile(rb"(?!)"))
            try:
                return contents_of(read_document(path))
            except BadDocument as error:
                return error.detail.partition(" (there is")[0]  # which surrogate is known may depend on reads

    @given(
        content=contents(),
        spoils=st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0, 0, 1, 5]), st.sampled_from(SPOILS)), max_size=2),
        layout=st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}]),
        size=st.sampled_from([1, 7, 100, 65_536]),
        longest=st.sampled_from([30, 2**22]),
    )
    def test_the_outcome_is_that_of_the_parser_alone(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        *,
        content: Content,
        spoils: list[tuple[float, int, bytes]],
        layout: dict[str, Any],
        size: int,
        longest: int,
    ) -> None:
        """The same catalogue, or the same message to the letter, wherever a document is spoilt and reads end."""
        path = tmp_path_factory.getbasetemp() / "lifting.json"
        write_document(path, **content.arguments())
        data = json.dumps(json.loads(path.read_text()), **layout).encode()
        for where, dropped, spoil in spoils:
            at = int(where * len(data))
            data = data[:at] + spoil + data[at + dropped :]
        path.write_bytes(data)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(document_module, "_MAX_LIST", longest)
            lifted = self.outcome(path, lifting=True, size=size)

        assert lifted == self.outcome(path, lifting=False, size=65_536)

    @pytest.mark.parametrize("size", [1000, 65_536])
    def test_the_parser_gets_no_good_list(self, path: Path, size: int) -> None:
        """Of a list that is longer than a read, too: what is left of a big document is little."""
        names = [f"item{n}.é" for n in range(5000)]
        path.write_text(json.dumps(DOCUMENT | {"checkpoints": [{"items": names}, {"items": [*names, 5]}]}))
        ids = document_module._Ids()
        with path.open("rb") as file:
            source = _Source(file, ids=ids)
            text = b"".join(iter(lambda: source.read(size), b""))

        assert len(text) < path.stat().st_size * 0.6
        assert text.count(b"item7.") == 1
        numbers = list(source.lifted.values())
        assert [[*ids][number] for row in numbers for number in row] == ["numpy", "pandas.core", *names]

    def test_a_name_that_looks_like_a_list_is_a_name(self, path: Path) -> None:
        """Quotes in a name are escaped: no list begins there."""
        key = 'x"items": ["numpy"]'
        items = DOCUMENT["items"] | {key: DOCUMENT["items"]["numpy"] | {"dependencies": [key, "numpy"]}}

        catalogue = read(path, DOCUMENT | {"items": items})

        assert catalogue.keys[-1] == key
        assert catalogue.dependencies.tolist() == [0, 2, 0, 4]


class TestSize:
    """A document may be big, but not take more memory than the router has for it."""

    @pytest.mark.parametrize(
        ("text", "changed", "place"),
        [
            ('"pandas.core"]', f'"{"x" * 2**23}"]', 'items["pandas"].dependencies: not JSON at byte'),
            ('"model:m"', f'"{"x" * 2**21}"', 'items["pandas.core"].distribution: not JSON at byte'),
            ('"flavor"', f'"note": ["\\"{"x" * 2**21}"], "flavor"', "note: not JSON at byte"),
            ("80}]}", f'80, "note": "{"x" * 2**21}', "checkpoints[1].note: not JSON at byte"),
        ],
        ids=range(4),
    )
    def test_no_string_is_longer_than_1_mib(self, path: Path, text: str, changed: str, place: str) -> None:
        """The parser would hold it whole, however long it is; one that is ignored, too."""
        said = refuse(path, change(text, changed))

        assert said.startswith(place)
        assert said.endswith("xxx): a string of more than 1048576 bytes")

    def test_many_strings_and_long_blanks_are_no_long_string(self, path: Path) -> None:
        """A quote ends a string, blanks and numbers between strings are none."""
        numbers = "7, " * 2**19 + "7"
        text = change('"flavor"', f'"note": [{numbers}{" " * 2**21}], "\\"more\\\\": ["{"x" * 2**19}"], "flavor"')

        assert len(read(path, text).keys) == 4

    @pytest.mark.parametrize(
        ("most", "many", "place"),
        [
            (20_000, {"items": {f"x{n}": DOCUMENT["items"]["numpy"] for n in range(100)}}, 'items["x'),
            (20_000, {"distributions": {f"x{n}": "1" for n in range(100)}}, 'distributions["x'),
            (20_000, {f"x{n}": 1 for n in range(100)}, "x"),
            (20_000, {"checkpoints": [DOCUMENT["checkpoints"][0] | {"id": f"x{n}"} for n in range(100)]}, "checkpoin"),
            (10_000, {"checkpoints": [{"items": [f"x{n}" for n in range(100)]}]}, "checkpoints[0].items["),
            (10_000, {"checkpoints": [{"items": ["x"] * 2000}]}, "checkpoints[0].items: "),
            (10_000, {"checkpoints": [{"items": ["x\0", *["x"] * 2000]}]}, "checkpoints[0].items[0]"),
        ],
        ids=range(7),
    )
    def test_what_takes_too_much_memory_is_refused(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, most: int, many: dict[str, Any], place: str
    ) -> None:
        """Names, numbers, checkpoints by the million: the message says where it became too much."""
        monkeypatch.setattr(document_module, "MAX_HELD", most)

        said = refuse(path, {key: DOCUMENT[key] for key in DOCUMENT if key != "checkpoints"} | many)

        assert said.startswith(place)
        assert f"the document must not take more than {most} bytes of memory" in said or "NUL" in said


class TestFlavor:
    """Whose file a document is can be told before it is read, and of one that is bad."""

    @pytest.mark.parametrize(
        ("document", "flavor"),
        [
            (TEXT, Flavor.CPU),
            (TEXT.replace('"cpu"', '"gpu"'), Flavor.GPU),
            (json.dumps({key: DOCUMENT[key] for key in reversed(DOCUMENT)}), Flavor.CPU),
            (TEXT[:-9], Flavor.CPU),
            (TEXT.replace('"cpu"', '"tpu"'), None),
            (TEXT.replace('"cpu"', '["cpu"]'), None),
            (TEXT.replace('"cpu"', "true"), None),
            (TEXT.replace('"flavor"', '"flavour"').replace('"load_time"', '"flavor"'), None),
            ('{"a": ' + "[" * 100_000, None),
            ('{"a": ' + "[" * 100_000 + "]" * 100_000 + ', "flavor": "gpu"', Flavor.GPU),
            ("", None),
        ],
        ids=range(11),
    )
    def test_it_is_that_of_the_document(self, path: Path, document: str, flavor: Flavor | None) -> None:
        """As far as the document can be read; None where it gives none that is known."""
        path.write_text(document)

        assert peek_flavor(path) is flavor

    def test_a_file_that_is_missing_has_none(self, path: Path) -> None:
        """The reader says what is wrong with it."""
        assert peek_flavor(path) is None


class TestGeneration:
    """The SHA-256 of compact JSON with sorted keys of flavor, distributions and checkpoints without their prices."""

    def test_it_is_the_hash_of_that_text(self, path: Path) -> None:
        """Written out by hand."""
        text = (
            '{"checkpoints":[{"canonical":[],"id":"checkpoint_0","items":[]},'
            '{"canonical":["numpy"],"id":"checkpoint_1","items":["numpy","pandas"]}],'
            '"distributions":{"numpy":"2.0.2","pandas":""},"flavor":"cpu"}'
        )

        assert read(path, DOCUMENT).generation == hashlib.sha256(text.encode()).hexdigest()

    def test_pricing_does_not_change_it(self, path: Path) -> None:
        """Another alpha, other measurements, other items, another order: the same checkpoints."""
        expected = read(path, DOCUMENT).generation
        text = change("0.006", "0.5").replace('"load_time": 0.2', '"load_time": 0.3').replace("80}]", "81}]")
        text = text.replace('["numpy", "pandas"]', '["pandas", "numpy"]').replace('"pandas.core": {', '"other": {')

        assert read(path, text).generation == expected
        assert read(path, DOCUMENT | {"checkpoints": DOCUMENT["checkpoints"][::-1]}).generation == expected

    @pytest.mark.parametrize(
        ("text", "changed"),
        [
            ('"cpu"', '"gpu"'),
            ('"2.0.2"', '"2.0.3"'),
            ('"pandas": ""', '"pandas": "1"'),
            ('"checkpoint_1"', '"checkpoint_2"'),
            ('["numpy", "pandas"]', '["numpy"]'),
            ('"canonical": ["numpy"]', '"canonical": ["numpy", "pandas"]'),
        ],
    )
    def test_what_a_checkpoint_is_changes_it(self, path: Path, text: str, changed: str) -> None:
        """Flavor, root filesystem, ids, contents."""
        assert read(path, TEXT).generation != read(path, change(text, changed)).generation

    def test_order_and_repetition_do_not_matter(self) -> None:
        """Neither of checkpoints nor of names."""
        some = [("b", ["y", "x", "x"], ["x"]), ("a", [], [])]

        assert compute_generation(Flavor.GPU, {"p": "1", "q": "2"}, some) == compute_generation(
            Flavor.GPU, {"q": "2", "p": "1"}, iter([("a", [], []), ("b", ["x", "y"], ["x"])])
        )


def expected_of(content: Content) -> dict[str, Any]:
    """What a catalogue of `content` holds, worked out the plain way."""
    keys = [key for key, _ in content.items]
    needed = [sorted({keys.index(name) for name in item.dependencies if name in keys}) for _, item in content.items]
    alpha = Decimal(repr(content.alpha))
    return {
        "flavor": content.flavor,
        "alpha": content.alpha,
        "distributions": content.distributions,
        "keys": keys,
        "load_ns": [seconds_to_ns(Decimal(repr(item.load_time))) for _, item in content.items],
        "size_mb": [item.size_mb for _, item in content.items],
        "resource_types": [item.resource_type for _, item in content.items],
        "item_distributions": [item.distribution for _, item in content.items],
        "offsets": np.cumsum([0, *map(len, needed)]).tolist(),
        "dependencies": [item for row in needed for item in row],
        "checkpoints": [
            {
                "checkpoint_id": each.id,
                "items": sorted({keys.index(name) for name in each.items}),
                "canonical": sorted({keys.index(name) for name in each.canonical}),
                "size_mb": each.size_mb,
                "size_bytes": mb_to_bytes(Decimal(repr(each.size_mb))),
                "size_ns": price_size(alpha, Decimal(repr(each.size_mb))),
            }
            for each in content.checkpoints
        ],
        "generation": compute_generation(
            content.flavor,
            content.distributions,
            [(each.id, each.items, each.canonical) for each in content.checkpoints],
        ),
    }


class TestWriting:
    """A stream in one form, checked by the reader, put in place whole or not at all."""

    @given(content=contents())
    @settings(max_examples=30)
    def test_what_is_written_is_read(self, tmp_path_factory: pytest.TempPathFactory, content: Content) -> None:
        """All names and numbers come back; reading the file again gives the same catalogue."""
        path = tmp_path_factory.getbasetemp() / "round-trip.json"

        written = contents_of(write_document(path, **content.arguments()))

        assert {name: written[name] for name in written if name not in ("sha256", "warnings")} == expected_of(content)
        assert contents_of(read_document(path)) == written

    @given(content=contents(), seed=st.randoms(use_true_random=False))
    @settings(max_examples=25)
    def test_the_same_content_gives_the_same_bytes(
        self, tmp_path_factory: pytest.TempPathFactory, content: Content, seed: random.Random
    ) -> None:
        """The order of names in lists and of distributions is not content."""

        def shuffled(names: Any) -> list[Any]:
            return seed.sample([*names], len(names))

        again = {
            **content.arguments(),
            "distributions": dict(shuffled(content.distributions.items())),
            "items": [
                (key, dataclasses.replace(item, dependencies=shuffled(item.dependencies)))
                for key, item in content.items
            ],
            "checkpoints": [
                dataclasses.replace(each, items=shuffled(each.items), canonical=shuffled(each.canonical))
                for each in content.checkpoints
            ],
        }
        path = tmp_path_factory.getbasetemp() / "same-bytes.json"

        first = write_document(path, **content.arguments())

        assert write_document(path, **again).sha256 == first.sha256

    def test_it_is_plain_json_with_an_entry_a_line(self, path: Path) -> None:
        """People read it, and differences show line by line."""
        write_document(
            path,
            flavor=Flavor.GPU,
            alpha=0.01,
            distributions={"numpy": "2"},
            items=[("numpy", DocumentItem(0.25, 7, "package", ["numpy.linalg"], "numpy"))],
            checkpoints=[DocumentCheckpoint("checkpoint_0", [], [], 0)],
        )

        assert path.read_text() == (
            '{\n"version": 2,\n"flavor": "gpu",\n"alpha": 0.01,\n"distributions": {\n "numpy": "2"\n},\n"items": {\n'
            ' "numpy": {"load_time": 0.25, "size_mb": 7.0, "resource_type": "package", '
            '"dependencies": ["numpy.linalg"], "distribution": "numpy"}\n},\n"checkpoints": [\n'
            ' {"id": "checkpoint_0", "items": [], "canonical": [], "size_mb": 0.0}\n]\n}\n'
        )

    @pytest.mark.parametrize("alpha", [float("nan"), float("inf"), 0.0, -1.0])
    def test_a_bad_value_leaves_what_was_there(self, path: Path, alpha: float) -> None:
        """The writer's document is refused by the reader, in the name of the file that it was to become."""
        path.write_text("what was there")

        with pytest.raises(BadDocument) as caught:
            write_document(path, flavor=Flavor.CPU, alpha=alpha, distributions={}, items=[], checkpoints=[])

        assert caught.value.detail.startswith(f"{path}: alpha")
        assert [entry.name for entry in path.parent.iterdir()] == ["cpu.json"]
        assert path.read_text() == "what was there"

    @pytest.mark.parametrize("name", ["a\0", "\ud800", "", "x" * 1025])
    def test_a_bad_name_is_refused(self, path: Path, name: str) -> None:
        """Whatever the reader refuses."""
        checkpoint = DocumentCheckpoint(name, [], [], 0)

        with pytest.raises(BadDocument, match=r"checkpoints\[0\]\.id"):
            write_document(path, flavor=Flavor.CPU, alpha=1, distributions={}, items=[], checkpoints=[checkpoint])

    def test_a_source_that_fails_leaves_nothing(self, path: Path) -> None:
        """The error is the source's own."""

        def items() -> Any:
            yield "numpy", DocumentItem(0.2, 7, "package")
            raise RuntimeError("stopped")

        with pytest.raises(RuntimeError, match="stopped"):
            write_document(path, flavor=Flavor.CPU, alpha=1, distributions={}, items=items(), checkpoints=[])

        assert list(path.parent.iterdir()) == []

    def test_a_folder_that_is_missing_is_named(self, tmp_path: Path) -> None:
        """One message, with the path and the reason."""
        path = tmp_path / "gone" / "cpu.json"

        with pytest.raises(BadFile, match="No such file") as caught:
            write_document(path, flavor=Flavor.CPU, alpha=1, distributions={}, items=[], checkpoints=[])

        assert str(path) in caught.value.detail

    def test_a_reader_never_sees_half_of_it(self, path: Path) -> None:
        """While it is written again and again, it reads whole."""
        content: dict[str, Any] = {"flavor": Flavor.CPU, "alpha": 1, "distributions": {}, "checkpoints": []}
        items = [(f"item{n}", DocumentItem(0.2, 7, "package")) for n in range(200)]
        write_document(path, items=items, **content)
        writer = threading.Thread(
            target=lambda: [write_document(path, items=items[:n], **content) for n in range(200, 180, -1)]
        )
        writer.start()

        counts = [len(read_document(path).keys) for _ in range(20)]

        writer.join()
        assert min(counts) > 180
