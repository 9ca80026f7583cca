"""Bad documents at full size, 400 MB: little memory, no crash, one warning; what was active stays so (DESIGN §3).

One copy of the generated document is spoilt in place and mended again, a test at a time. What happens to it happens in
a fresh process, whose peak memory is looked at.
"""

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from app.catalogue import find_active_catalogue, load_catalogue_dir, read_item
from app.database import open_database
from benchmarks.catalogues import find_catalogue, make
from benchmarks.fresh import run_fresh
from readie.document import Catalogue, read_document
from readie.flavor import Flavor
from readie.projection import load_catalogue, projection_path, write_projection
from tests.catalogues import make_worked_example, write

pytestmark = pytest.mark.scale

PACKAGES = 5000
MOST_MB = 800
MOST_ADDRESSES = 16 * 10**9  # bytes: what takes all memory fails the test, not the machine
MIDDLE, FAR = 2500, 4990  # items
ITEM = '{"load_time": 0, "size_mb": 0, "resource_type": "package", "distribution": ""'

NO_PROJECTION = "read from JSON, without the projection cpu.parquet: there is none"

#: What is written over a part of the document, blanks behind it: from byte, to byte, text.
Change = tuple[int, int, bytes]


class Document:
    """A file of 400 MB that can be spoilt. `lines[i]` is where the line of item i begins; `keys[i]` is its key."""

    def __init__(self, path: Path, catalogue: Catalogue) -> None:
        self.path = path
        self.keys = catalogue.keys
        self.catalogue = catalogue
        ends = np.flatnonzero(np.memmap(path, np.uint8, "r") == ord("\n"))
        self.lines: list[int] = (ends[1 : len(self.keys) + 2] + 1).tolist()
        self.checkpoints = int(ends[len(self.keys) + 1])  # the text that begins the checkpoints, and its end
        self.end = int(ends[-1])

    def item(self, first: int, last: int, text: str) -> Change:
        """Puts an item in the place of items `first` to `last`."""
        return self.lines[first], self.lines[last + 1] - 1, text.encode() + b","

    def rename(self, item: int, key: str) -> Change:
        start = self.lines[item]
        return start, start + len(self.keys[item]) + 2, f'"{key}"'.encode()

    def number(self, item: int, text: str) -> Change:
        """Puts another load time into an item."""
        start = self.lines[item] + len(f'"{self.keys[item]}": {{"load_time": ')
        return start, start + len("0.000000"), text.encode()

    @contextmanager
    def changed(self, *changes: Change) -> Iterator[None]:
        """Writes the changes into the file, and at the end what was there before."""
        were: list[tuple[int, bytes]] = []
        with self.path.open("r+b") as file:
            for start, end, text in changes:
                assert len(text) <= end - start
                file.seek(start)
                were.append((start, file.read(end - start)))
                file.seek(start)
                file.write(text.ljust(end - start))
            file.flush()
            try:
                yield
            finally:
                for start, was in reversed(were):
                    file.seek(start)
                    file.write(was)

    @contextmanager
    def cut(self, size: int) -> Iterator[None]:
        """Ends the file after `size` bytes."""
        with self.path.open("r+b") as file:
            file.seek(size)
            was = file.read()
            file.truncate(size)
            try:
                yield
            finally:
                file.seek(size)
                file.write(was)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """A copy of the full-size document; the tests leave it as it was."""
    if find_catalogue(PACKAGES) is None:
        make(PACKAGES)
    found = find_catalogue(PACKAGES)
    assert found is not None
    path = tmp_path_factory.mktemp("documents") / "document.json"
    shutil.copyfile(found.document, path)
    shutil.copytree(projection_path(found.document), projection_path(path))
    return Document(path, load_catalogue(path))


class Router:
    """A database with a small catalogue that is active, and the folder that it came from."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.path = folder / "cpu.json"
        folder.mkdir()
        write(self.path, make_worked_example())
        with closing(open_database(url)) as database:
            load_catalogue_dir(database, folder)
        self.generation = read_document(self.path).generation

    def start(self, path: Path) -> tuple[list[str], str]:
        """Starts anew with another file: its warnings, without the file's name in front, and the active generation."""
        self.path.unlink()
        self.path.symlink_to(path)
        outcome = run_fresh(load_folder, url=self.url, folder=str(self.folder))
        assert outcome.peak_mb < MOST_MB
        warnings, generation = outcome.value
        assert all(warning.startswith(f"{self.path}: ") for warning in warnings)
        return [warning.removeprefix(f"{self.path}: ") for warning in warnings], generation


def load_folder(url: str, folder: str) -> tuple[list[str], str]:
    """What a router does at its start: the warnings, and the active generation."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESSES, MOST_ADDRESSES))
    with closing(open_database(url)) as database:
        warnings = load_catalogue_dir(database, Path(folder))
        with database.reading() as connection:
            active = find_active_catalogue(connection, Flavor.CPU)
    assert active is not None
    return warnings, active.generation


def count_needed(url: str, key: str) -> int:
    """How many items the closure of one has in the active catalogue."""
    with closing(open_database(url)) as database, database.reading() as connection:
        active = find_active_catalogue(connection, Flavor.CPU)
        found = active and read_item(connection, active.catalogue_id, key)
    assert found
    return len(found.closure)


@pytest.fixture
def router(database_url: str, tmp_path: Path) -> Router:
    """One that has a good catalogue."""
    return Router(database_url, tmp_path / "catalogues")


def spoil_list(document: Document, text: bytes) -> Change:
    """Writes over names in the middle of the list of an item in the middle."""
    start = (document.lines[MIDDLE] + document.lines[MIDDLE + 1]) // 2
    return start, start + len(text), text


def name_numbers(count: int) -> str:
    """So many different names, as JSON writes them in a list."""
    return '"' + '","'.join(map(str, range(count))) + '"'


#: How the document is spoilt, and what the warning begins and ends with; {key} is the spoilt item's, {byte} the place.
SPOILT: dict[str, tuple[Callable[[Document], Change], str, str]] = {
    "invalid UTF-8 in the middle": (
        lambda document: spoil_list(document, b"\xff"),
        'items["{middle}"].dependencies: not JSON at byte {byte} (',
        "invalid bytes in UTF8 string",
    ),
    "a duplicate key far into it": (
        lambda document: document.rename(FAR, document.keys[0]),
        'items["{first}"]: ',
        "the key is given twice",
    ),
    "NaN": (
        lambda document: document.number(FAR, "NaN"),
        'items["{far}"].load_time: not JSON at byte {byte} (',
        "invalid char in json text",
    ),
    "a number out of range": (
        lambda document: document.number(FAR, "1e99"),
        'items["{far}"].load_time is 1E+99: ',
        "must be a number from 0 to 3600 (seconds)",
    ),
    "a name of a million characters": (
        lambda document: document.item(MIDDLE, MIDDLE + 40, f'"{"x" * 10**6}": {ITEM}}}'),
        'items["xxxxx',
        "(1000002 characters)]: must have at most 1024 characters",
    ),
    "a dependency of a million characters": (
        lambda document: document.item(MIDDLE, MIDDLE + 40, f'"x": {ITEM}, "dependencies": ["{"x" * 10**6}"]}}'),
        'items["x"].dependencies[0] is "xxxxx',
        "(1000002 characters): must have at most 1024 characters",
    ),
    "a name of a hundred million characters": (
        lambda document: document.item(MIDDLE, FAR, f'"{"x" * 10**8}": {ITEM}}}'),
        'items["{before}"].',
        "a string of more than 1048576 bytes",
    ),
    "lists that nest 100,000 deep": (
        lambda document: document.item(
            MIDDLE, MIDDLE + 40, f'"x": {ITEM}, "dependencies": {"[" * 10**5}{"]" * 10**5}}}'
        ),
        'items["x"].dependencies[0] is a list: ',
        "must be the name of an item",
    ),
    "lists that nest 10 million deep": (
        lambda document: document.item(MIDDLE, FAR, f'"x": {ITEM}, "note": {"[" * 10**7}{"]" * 10**7}}}'),
        'items["x"].note: ',
        "must not nest more than 100 deep",
    ),
    "objects that nest 10 million deep": (
        lambda document: document.item(
            MIDDLE, FAR, f'"x": {ITEM}, "note": ' + '{"":' * 10**7 + "0" + "}" * (10**7 + 1)
        ),
        'items["x"].note: ',
        "must not nest more than 100 deep",
    ),
    "3 million different names": (
        lambda document: document.item(MIDDLE, FAR, f'"x": {ITEM}, "dependencies": [{name_numbers(3 * 10**6)}]}}'),
        'items["x"].dependencies[',
        "the document must not take more than 400000000 bytes of memory",
    ),
}


@pytest.mark.parametrize("kind", ["duckdb"])
class TestBadDocuments:
    """A file that breaks a rule is skipped whole, with one warning that names file, place and rule."""

    @pytest.mark.parametrize("how", SPOILT)
    def test_one_that_is_spoilt_changes_nothing(self, document: Document, router: Router, how: str) -> None:
        """The earlier generation is still active."""
        spoil, begins, ends = SPOILT[how]
        change = spoil(document)
        places = {"first": 0, "before": MIDDLE - 1, "middle": MIDDLE, "far": FAR}
        shown = {name: document.keys[item] for name, item in places.items()}
        with document.changed(change):
            [warning], generation = router.start(document.path)

        assert warning.startswith(begins.format(byte=change[0], **shown))
        assert ends in warning
        assert len(warning) < 400
        assert generation == router.generation

    def test_one_that_is_cut_after_399_mb_changes_nothing(self, document: Document, router: Router) -> None:
        """As when it is half written."""
        with document.cut(399_000_000):
            [warning], generation = router.start(document.path)

        assert warning.startswith("checkpoints[")
        assert "not JSON at byte 399000000 (" in warning
        assert warning.endswith("premature EOF")
        assert generation == router.generation

    @pytest.mark.parametrize("flavor", ["", ', "flavor": "cpu"'])
    def test_a_bomb_before_the_flavor_changes_nothing(self, router: Router, tmp_path: Path, flavor: str) -> None:
        """Whose file it is is looked for before anything else."""
        bomb = tmp_path / "bomb.json"
        bomb.write_text(f'{{"x": {"[" * 10**7}{"]" * 10**7}{flavor}}}')

        warnings, generation = router.start(bomb)

        assert warnings == ["x: must not nest more than 100 deep"]
        assert generation == router.generation

    def test_the_command_refuses_a_cut_one(self, document: Document, router: Router) -> None:
        """One message, nothing else, and the exit code of a bad argument."""
        with document.cut(399_000_000):
            command = [sys.executable, "-m", "app", "import", str(document.path), "--database", router.url]
            run = subprocess.run(command, capture_output=True, text=True, check=False)

        assert run.returncode == 2
        assert run.stdout == ""
        assert run.stderr.count(str(document.path)) == 1
        assert "premature EOF" in run.stderr
        assert "Traceback" not in run.stderr


@pytest.mark.parametrize("kind", ["duckdb"])
class TestLegalDocuments:
    """What is odd, but breaks no rule, is taken up."""

    def test_a_cycle_through_every_item(self, document: Document, router: Router, tmp_path: Path) -> None:
        """Every item needs every other."""
        path = tmp_path / "cycle.json"
        following = dict(zip(document.keys, [*document.keys[1:], document.keys[0]], strict=True))
        with document.path.open("rb") as lines, path.open("wb") as file:
            for line in lines:
                name = following.get(line[1 : line.find(b'"', 1)].decode())
                begin = line.find(b'"dependencies": [') + 17
                if name and begin > 17:
                    comma = b"" if line[begin : begin + 1] == b"]" else b", "
                    file.write(line[:begin] + f'"{name}"'.encode() + comma + line[begin:])
                else:
                    file.write(line)

        warnings, generation = router.start(path)

        assert warnings == [NO_PROJECTION]
        assert generation == document.catalogue.generation
        assert run_fresh(count_needed, url=router.url, key=document.keys[FAR]).value == PACKAGES

    def test_unknown_dependencies_by_the_million(self, document: Document, router: Router) -> None:
        """They are dropped and counted in one warning: a few names millions of times, and a million names."""
        renamed = range(1000)
        many = 10**6
        catalogue = document.catalogue
        kept = slice(catalogue.offsets[0], catalogue.offsets[MIDDLE])  # the lists before the million names
        rest = slice(catalogue.offsets[FAR + 1], None)
        gone = np.isin(catalogue.dependencies, [*renamed, *range(MIDDLE, FAR + 1)])
        expected = int(gone[kept].sum() + gone[rest].sum())
        changes = [document.rename(item, "Z" + document.keys[item][1:]) for item in renamed]
        changes.append(document.item(MIDDLE, FAR, f'"x": {ITEM}, "dependencies": [{name_numbers(many)}]}}'))
        start = document.lines[len(document.keys)]
        changes.append((start, document.end, b'},"checkpoints": []}'))
        with document.changed(*changes):
            [without, warning], generation = router.start(document.path)

        assert without == NO_PROJECTION
        assert expected > 1_000_000
        assert warning.startswith(f"dropped {expected + many} dependencies on items that are not in the document: ")
        assert len(warning) < 400
        assert generation != router.generation


class TestProjections:
    """A projection that is not whole, or not of this document, is not used: the document is, with a warning."""

    @pytest.fixture
    def path(self, document: Document, tmp_path: Path) -> Path:
        """The document with a projection of its own, by links."""
        path = tmp_path / "both" / "cpu.json"
        path.parent.mkdir()
        path.symlink_to(document.path)
        shutil.copytree(projection_path(document.path), projection_path(path))
        return path

    def start(self, router: Router, path: Path) -> tuple[list[str], str]:
        """Starts the router with a projection beside its document."""
        shutil.copytree(projection_path(path), projection_path(router.path))
        return router.start(path)

    def test_a_whole_one_is_used(self, document: Document, router: Router, path: Path) -> None:
        """Without a word."""
        assert self.start(router, path) == ([], document.catalogue.generation)

    @pytest.mark.parametrize("kind", ["duckdb"])
    @pytest.mark.parametrize(
        ("name", "damage", "reason"),
        [
            ("dependencies", "flip", "dependencies.parquet is not the file that was written"),
            ("catalogue", "cut", "catalogue.parquet cannot be read"),
            ("checkpoint_items", "remove", "checkpoint_items.parquet is missing"),
        ],
    )
    def test_a_damaged_one_is_not_used(
        self, document: Document, router: Router, path: Path, *, name: str, damage: str, reason: str
    ) -> None:
        """The document gives the same catalogue."""
        file = projection_path(path) / f"{name}.parquet"
        data = file.read_bytes()
        if damage == "remove":
            file.unlink()
        else:
            file.write_bytes(data[:-100] if damage == "cut" else data[:-12] + bytes([data[-12] ^ 0xFF]) + data[-11:])

        [warning], generation = self.start(router, path)

        assert warning.startswith(f"read from JSON, without the projection cpu.parquet: {reason}")
        assert generation == document.catalogue.generation

    def test_one_of_another_generation_is_not_used(self, document: Document, router: Router, path: Path) -> None:
        """It belongs to another document."""
        shutil.rmtree(projection_path(path))
        write_projection(read_document(router.path), projection_path(path))

        [warning], generation = self.start(router, path)

        assert warning == "read from JSON, without the projection cpu.parquet: it belongs to another document"
        assert generation == document.catalogue.generation

    @pytest.mark.parametrize("kind", ["duckdb"])
    def test_it_does_not_stand_in_for_a_bad_document(self, document: Document, router: Router, path: Path) -> None:
        """What was active stays so, although the projection is whole."""
        with document.cut(399_000_000):
            [warning], generation = self.start(router, path)

        assert "premature EOF" in warning
        assert generation == router.generation
