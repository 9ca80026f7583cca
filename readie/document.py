"""The catalogue document, version 2: read as a stream, held to every rule, written in one form."""

import hashlib
import itertools
import json
import os
import re
import secrets
import stat
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from io import BufferedReader
from pathlib import Path
from typing import Any

import ijson
import msgspec
import numpy as np
from numpy.typing import NDArray
from packaging.utils import canonicalize_name, is_normalized_name

from readie.errors import BadDocument, BadFile
from readie.files import replaced
from readie.flavor import Flavor
from readie.units import MAX_ALPHA, MAX_LOAD_SECONDS, MAX_SIZE_MB, mb_to_bytes, price_size, seconds_to_ns

VERSION = 2
RESOURCE_TYPES = ("package", "dataset", "model", "tokenizer")
MAX_NAME = 1024  # characters
MAX_NS = 2**62  # what all load times may come to, and what a checkpoint may cost: their sum fits 64 bits
MAX_DEPTH = 100  # of a value that is ignored
MAX_TEXT = 2**20  # bytes of any string, also one that is ignored
MAX_HELD = 400 * 10**6  # bytes that the names and numbers of a document take in memory, about

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


@dataclass(frozen=True)
class DocumentItem:
    """An item to write: exclusive seconds and MB, and the keys of other items that it pulls in."""

    load_time: float
    size_mb: float
    resource_type: str
    dependencies: Sequence[str] = ()
    distribution: str = ""


@dataclass(frozen=True)
class DocumentCheckpoint:
    """A checkpoint to write: keys of everything loaded, keys of what the executor was told to import, MB in all."""

    id: str
    items: Sequence[str]
    canonical: Sequence[str]
    size_mb: float


def compute_generation(
    flavor: Flavor,
    distributions: Mapping[str, str],
    checkpoints: Iterable[tuple[str, Iterable[str], Iterable[str]]],
) -> str:
    """The SHA-256 that names a set of checkpoints, each given as (id, item keys, canonical keys), in any order."""
    content = {
        "flavor": flavor.value,
        "distributions": dict(distributions),
        "checkpoints": [
            # Not a set: names that come in order are sorted at once.
            {"id": checkpoint_id, "items": sorted(dict.fromkeys(items)), "canonical": sorted(dict.fromkeys(canonical))}
            for checkpoint_id, items, canonical in sorted(checkpoints, key=lambda checkpoint: checkpoint[0])
        ],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def name_generation(
    flavor: Flavor, distributions: Mapping[str, str], keys: Sequence[str], checkpoints: Iterable[Checkpoint]
) -> str:
    """`compute_generation` of checkpoints whose ids are positions in `keys`."""
    order = sorted(range(len(keys)), key=keys.__getitem__)
    names = np.array(keys, object)[order]
    rank = np.empty(len(keys), np.int32)
    rank[order] = np.arange(len(keys))

    def name(ids: Ids) -> list[str]:
        named: list[str] = names[np.sort(rank[ids])].tolist()
        return named

    held = ((each.checkpoint_id, name(each.items), name(each.canonical)) for each in checkpoints)
    return compute_generation(flavor, distributions, held)


def hash_document(path: Path) -> str:
    """The SHA-256 that names the catalogue in the file `path`, without reading it as one. Raises `BadDocument`."""
    try:
        with _open(path, str(path)) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadDocument(f"{path}: {error.strerror or error}") from error


def peek_flavor(path: Path) -> Flavor | None:
    """What the document in the file `path` gives as its flavor, as far as it can be read; None: none that is known."""
    with suppress(BadDocument):
        _, value = _find_value(path, str(path), "flavor") or ("", None)
        return next((flavor for flavor in Flavor if flavor == value), None)
    return None


def read_document(path: Path, name: str | None = None) -> Catalogue:
    """The catalogue in the file `path`, in one pass, with everything that was ignored or dropped in `warnings`.

    Raises `BadDocument`, which names the file (as `name`, if given), the place in it, the value and the rule.
    """
    name = name or str(path)
    reader = _Reader(path, name, careful_from=None)
    try:
        return reader.read()
    except _NotJson as error:
        # The parser reports before it hands out what came earlier in the same chunk. Fed byte by byte from there
        # on, it says where it really is.
        try:
            return _Reader(path, name, careful_from=reader.source.chunk_start).read()
        except _NotJson as careful:
            raise BadDocument(careful.detail) from (error.__cause__ or error)
    except BadDocument:
        # Whatever else is wrong with a document of another version, its version is what to say.
        if not reader.version_seen:
            _check_version(path, name)
        raise


def write_document(
    path: Path,
    *,
    flavor: Flavor,
    alpha: float,
    distributions: Mapping[str, str],
    items: Iterable[tuple[str, DocumentItem]],
    checkpoints: Iterable[DocumentCheckpoint],
) -> Catalogue:
    """Writes a document and returns it as read back; `path` is replaced whole or not at all.

    The same content gives the same bytes: keys in a fixed order, names in lists sorted and distinct, an entry a
    line. Items and checkpoints keep their order. Raises `BadDocument` for content that breaks a rule, `BadFile`
    where the file cannot be written.
    """
    try:
        with replaced(path) as aside:
            with aside.open("w", encoding="ascii", newline="\n") as file:
                file.write(f'{{\n"version": {VERSION},\n"flavor": {json.dumps(flavor)},\n"alpha": {_number(alpha)},\n')
                file.write('"distributions": {')
                entries = (f"{json.dumps(key)}: {json.dumps(distributions[key])}" for key in sorted(distributions))
                _write_entries(file, entries)
                file.write('},\n"items": {')
                _write_entries(file, (f"{json.dumps(key)}: {_item_text(item)}" for key, item in items))
                file.write('},\n"checkpoints": [')
                _write_entries(file, map(_checkpoint_text, checkpoints))
                file.write("]\n}\n")
                file.flush()
                os.fsync(file.fileno())
            catalogue = read_document(aside, name=str(path))
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}", "Nothing was written; check the folder.") from error
    return catalogue


def _write_entries(file: Any, entries: Iterable[str]) -> None:
    empty = True
    for entry in entries:
        file.write("\n " if empty else ",\n ")
        file.write(entry)
        empty = False
    if not empty:
        file.write("\n")


def _number(number: float) -> str:
    return json.dumps(float(number))  # the shortest text that gives this number again


def _names(names: Iterable[str]) -> str:
    return json.dumps(sorted(set(names)))


def _item_text(item: DocumentItem) -> str:
    dependencies = f'"dependencies": {_names(item.dependencies)}, ' if item.dependencies else ""
    return (
        f'{{"load_time": {_number(item.load_time)}, "size_mb": {_number(item.size_mb)}, '
        f'"resource_type": {json.dumps(item.resource_type)}, {dependencies}'
        f'"distribution": {json.dumps(item.distribution)}}}'
    )


def _checkpoint_text(checkpoint: DocumentCheckpoint) -> str:
    return (
        f'{{"id": {json.dumps(checkpoint.id)}, "items": {_names(checkpoint.items)}, '
        f'"canonical": {_names(checkpoint.canonical)}, "size_mb": {_number(checkpoint.size_mb)}}}'
    )


def _open(path: Path, name: str) -> BufferedReader:
    """The file, open; a folder, a pipe or whatever else cannot be read is a `BadDocument`."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # asked first: opening a pipe would wait for its other end
            raise BadDocument(f"{name}: it is not a file")
        return path.open("rb")
    except OSError as error:
        raise BadDocument(f"{name}: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the path
        raise BadDocument(f"{name!r}: {error}") from error


# ---- the bytes ----

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_HIGH = re.compile(rb"\\u[dD][89abAB]")
_UNIT = re.compile(_ESCAPE.pattern + b"|.", re.DOTALL)
_DIGITS = b"0123456789"
_BLOCK = 256  # bytes: a run of twice as many digits fills one that begins at a multiple of it
_LIST = re.compile(rb'(?<![\\])"(?:dependencies|items|canonical)"[ \t\r\n]*:[ \t\r\n]*\[')
_MIN_PIECE = 64  # bytes: more than any escape
_LONG_TEXT = 2**12  # bytes
_MAX_LIST = 2**22  # bytes that are looked through for the end of a list
_NAMES = msgspec.json.Decoder(list[str])


class _TooLong(ValueError):
    """What the message names is longer than the parser can bear."""


class _Source:
    """The file as the parser reads it: hashed, kept clear of three faults of the parser, and without its long lists.

    The parser turns lone surrogate escapes into question marks: here they become the escape of NUL, which no name may
    hold either. An integer with more digits than Python converts crashes the process, and a string is held whole
    however long it is: here reading ends before that.

    Nearly all of a big document is lists of names. A list of good names is *lifted*: it is decoded here, at once, and
    the parser gets a list of one mark instead; `lifted[mark]` are the names as numbers. Every other list stays where
    it is, so that what is wrong with it is found, and said, in one place.
    """

    def __init__(self, file: BufferedReader, careful_from: int | None = None, ids: "_Ids | None" = None) -> None:
        self.hash = hashlib.sha256()
        self.lone = ""  # the first lone surrogate, for the message
        self.chunk_start = 0  # offset of the piece handed out last
        self.next_start = 0
        self.lifted: dict[str, Ids] = {}
        self._file = file
        self._careful_from = careful_from  # from here on byte by byte, and nothing is lifted
        self._ids = ids  # None: nothing is lifted
        self._size = 0  # of a piece, about
        self._data = b""  # read so far; from _at on it is to be handed out
        self._at = 0
        self._whole = False  # nothing is left to read
        self._quoted = False  # whether the pieces so far end inside a string
        self._text = 0  # bytes of whole pieces inside it
        self._digits = 0  # how many the pieces so far end with
        self._most_digits = sys.get_int_max_str_digits() or 4300
        self._marks = map(f"{secrets.token_hex(8)}-{{}}".format, itertools.count())  # none is in any document
        self._pieces = self._cut_pieces()

    def read(self, size: int) -> bytes:
        """The next piece, of `size` bytes or so; none at the end of the file."""
        piece, length = b"", 0
        if size:
            self._size = max(size, _MIN_PIECE)
            piece, length = next(self._pieces, (b"", 0))
        self._count_digits(piece)
        self._measure_text(piece)
        if b"\\u" in piece and _SURROGATE.search(piece):
            piece = _ESCAPE.sub(self._replace, piece)
        self.chunk_start, self.next_start = self.next_start, self.next_start + length
        return piece

    @property
    def _careful(self) -> bool:
        return self._careful_from is not None and self.next_start >= self._careful_from

    def _cut_pieces(self) -> Iterator[tuple[bytes, int]]:
        """What the parser gets, and of how many bytes of the file each piece is made."""
        while True:
            self._fill(self._size)
            if self._at == len(self._data):
                return
            lifting = self._ids is not None and not self._careful
            begin = _LIST.search(self._data, self._at) if lifting else None
            if begin is None:
                yield from self._hand_out(self._find_cut())
                continue
            yield from self._hand_out(begin.end() - 1)
            end = self._find_list_end()
            mark = self._lift(self._data[self._at : end]) if end and not self._careful else b""
            if mark:
                length, self._at = end - self._at, end
                yield mark, length
            else:
                yield from self._hand_out(end or self._find_cut())

    def _fill(self, size: int) -> None:
        """Reads on until there are `size` bytes to hand out, or no more."""
        while not self._whole and len(self._data) - self._at < size:
            read = self._file.read(size)
            self.hash.update(read)
            kept = max(self._at - 1, 0)  # one byte before: is it a backslash?
            self._data, self._at = self._data[kept:] + read, self._at - kept
            self._whole = not read

    def _find_cut(self) -> int:
        return len(self._data) if self._whole else self._at + _find_cut(self._data[self._at :])

    def _find_list_end(self) -> int:
        """Behind the first closing bracket, if that is not too far away; 0: it is."""
        looked = 0
        while (end := self._data.find(b"]", self._at + looked) + 1) == 0:
            looked = len(self._data) - self._at
            if self._whole or looked >= _MAX_LIST:
                break
            self._fill(2 * looked)
        return end

    def _hand_out(self, end: int) -> Iterator[tuple[bytes, int]]:
        """The data up to `end`, in pieces that split no escape."""
        while self._at < end:
            start = self._at
            if self._careful:
                # The parser looks at all of a string again with each piece of it: so not byte by byte in a long one.
                least = start + (1 if self._text < _LONG_TEXT else _LONG_TEXT)
                while self._at < min(least, end) and (unit := _UNIT.match(self._data, self._at, end)):
                    self._at = unit.end()
            elif end - start > self._size:
                self._at = start + _find_cut(self._data[start : start + self._size])
            else:
                self._at = end
            yield self._data[start : self._at], self._at - start

    def _lift(self, text: bytes) -> bytes:
        """What stands for this list of names: a list of one mark; nothing if it is none, or a name breaks a rule."""
        assert self._ids is not None
        try:
            names = _NAMES.decode(text)
            numbers = np.fromiter(map(self._ids.__getitem__, names), np.int32, len(names))
            self._ids.hold(_HELD_FOR_NUMBER * len(names))
        except (msgspec.DecodeError, UnicodeDecodeError, _BadName):
            return b""
        mark = next(self._marks)
        self.lifted["\0" + mark] = numbers
        return f'["\\u0000{mark}"]'.encode()

    def _count_digits(self, piece: bytes) -> None:
        """Raises `_TooLong` at a run of too many digits; in a string too, which only a value that is ignored has."""
        rest = piece.lstrip(_DIGITS)
        longest = self._digits + len(piece) - len(rest)
        self._digits = len(rest) - len(rest.rstrip(_DIGITS)) if rest else longest
        if any(piece[start : start + _BLOCK].isdigit() for start in range(0, len(piece), _BLOCK)):
            longest = max(longest, *map(len, re.findall(rb"[0-9]+", piece)))
        if longest > self._most_digits:
            raise _TooLong("a number with too many digits")

    def _measure_text(self, piece: bytes) -> None:
        """Raises `_TooLong` in a string that is."""
        quotes = (_ESCAPED.sub(b"", piece) if b"\\" in piece else piece).count(b'"')
        self._text = self._text + len(piece) if self._quoted and not quotes else 0
        self._quoted ^= quotes % 2 == 1
        if self._text > MAX_TEXT:
            raise _TooLong(f"a string of more than {MAX_TEXT} bytes")

    def _replace(self, match: re.Match[bytes]) -> bytes:
        if match[1] is None:
            return match[0]
        self.lone = self.lone or match[0].decode("ascii")
        return b"\\u0000"


def _find_cut(data: bytes) -> int:
    """Where `data` can be cut so that neither an escape nor a pair of surrogates is split; near its end."""
    cut = data.find(b"\\", max(0, len(data) - 11))
    if cut < 0:
        return len(data)
    cut -= _backslashes_before(data, cut) % 2
    before = cut - 6
    if before >= 0 and _HIGH.match(data, before) and not _backslashes_before(data, before) % 2:
        return before
    return cut


def _backslashes_before(data: bytes, position: int) -> int:
    return position - len(data[:position].rstrip(b"\\"))


# ---- the rules ----


class _NotJson(BadDocument):
    """The parser gave up, somewhere in the chunk that it read last."""


class _BadName(Exception):
    """A name breaks the rule in the message."""


#: What a name takes besides its characters, in all that holds it; a number of a list; a checkpoint.
_HELD_FOR_TEXT, _HELD_FOR_NUMBER, _HELD_FOR_CHECKPOINT = 200, 8, 1000


class _Ids(dict[str, int]):
    """Names to numbers, in the order in which they are first seen; and how much memory the document takes."""

    held = 0  # bytes, about

    def __missing__(self, name: str) -> int:
        _check_name(name)
        self.hold(_held_for(name))
        self[name] = number = len(self)
        return number

    def hold(self, size: int) -> None:
        """Counts memory; raises `_BadName` where a document takes too much."""
        self.held += size
        if self.held > MAX_HELD:
            raise _BadName(f"the document must not take more than {MAX_HELD} bytes of memory")


def _held_for(text: str) -> int:
    return _HELD_FOR_TEXT + sys.getsizeof(text)


def _check_name(name: str, *, empty: bool = False) -> None:
    if "\0" in name:
        raise _BadName("must not hold a NUL or a lone surrogate")
    if len(name) > MAX_NAME:
        raise _BadName(f"must have at most {MAX_NAME} characters")
    if not name and not empty:
        raise _BadName("must not be empty")


def _show(value: object) -> str:
    """A JSON value for a message, at most some 80 characters long."""
    text = str(value) if isinstance(value, (int, Decimal)) and not isinstance(value, bool) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def _show_event(event: str, value: object) -> str:
    return {"start_map": "an object", "start_array": "a list"}.get(event) or _show(value)


def _inside(place: str, key: str) -> str:
    if not key.isidentifier() or len(key) > 80:
        return f"{place}[{_show(key)}]"
    return f"{place}.{key}" if place else key


class _Reader:
    """Reads one document. `place` is where it is, for messages."""

    def __init__(self, path: Path, name: str, *, careful_from: int | None) -> None:
        self.path = path
        self.name = name
        self.careful_from = careful_from
        self.version_seen = False
        self.place = ""
        self.ids = _Ids()
        self.ignored: Counter[str] = Counter()
        # distributions
        self.distributions: dict[str, str] = {}
        # items, in the document's order; numbers are those of self.ids
        self.numbers = array("i")
        self.load_ns = array("q")
        self.size_mb = array("d")
        self.resource_types: list[str] = []
        self.item_distributions: list[str] = []
        self.offsets = array("q", [0])
        self.dependencies = array("i")
        # checkpoints: id, numbers of items, of canonical items, MB
        self.checkpoints: list[tuple[str, array[int], array[int], Decimal]] = []

    def read(self) -> Catalogue:
        with _open(self.path, self.name) as file:
            if not os.fstat(file.fileno()).st_size:
                raise BadDocument(f"{self.name}: the file is empty")
            if file.peek(3).startswith(b"\xef\xbb\xbf"):
                raise BadDocument(f"{self.name}: the file begins with a byte order mark: JSON has none")
            self.source = _Source(file, self.careful_from, self.ids)
            self.events = ijson.get_backend("yajl2_c").basic_parse(self.source)
            try:
                alpha, flavor = self._read_document()
                self.place = ""
                for _ in self.events:  # nothing: but what follows is looked at, and hashed
                    pass
            # ArithmeticError: a huge exponent; ValueError: too many digits, or bytes that are no UTF-8.
            except (ijson.JSONError, ArithmeticError, ValueError) as error:
                raise self._not_json(error) from error
            except OSError as error:
                raise BadDocument(f"{self.name}: {error.strerror or error}") from error
        return self._assemble(flavor, alpha)

    def _not_json(self, error: Exception) -> _NotJson:
        if isinstance(error, ijson.JSONError):
            reason = str(error).removeprefix("b'").removeprefix('b"').partition("\n")[0].partition("\\n")[0].rstrip(".")
        elif isinstance(error, UnicodeDecodeError):
            reason = "a string is not UTF-8"
        else:
            reason = str(error) if isinstance(error, _TooLong) else "a number with too many digits"
        place = f"{self.place}: " if self.place else ""
        return _NotJson(f"{self.name}: {place}not JSON at byte {self.source.chunk_start} ({self._excerpt()}): {reason}")

    def _excerpt(self) -> str:
        """The text around the byte at which a careful reader stopped."""
        with _open(self.path, self.name) as file:
            file.seek(max(0, self.source.chunk_start - 12))
            text = file.read(24).decode("utf-8", "replace")
        return "".join(letter if letter.isprintable() else "·" for letter in text)

    # -- what a rule says when it is broken --

    def _bad(self, place: str, rule: str, shown: str | None = None) -> BadDocument:
        surrogate = f" (there is {self.source.lone})" if "surrogate" in rule and self.source.lone else ""
        return BadDocument(
            f"{self.name}: {place or 'the document'}{'' if shown is None else ' is ' + shown}: {rule}{surrogate}"
        )

    def _unlike(self, place: str, event: str, value: object, rule: str) -> BadDocument:
        return self._bad(place, rule, _show_event(event, value))

    # -- values --

    def _take(self, place: str, wanted: str, rule: str) -> Any:
        """The next value, which must be of the event `wanted`."""
        self.place = place
        event, value = next(self.events)
        if event != wanted:
            raise self._unlike(place, event, value, rule)
        return value

    def _take_text(self, place: str, rule: str, *, empty: bool = False) -> str:
        text: str = self._take(place, "string", rule)
        try:
            _check_name(text, empty=empty)
        except _BadName as error:
            raise self._bad(place, str(error), _show(text)) from None
        return text

    def _take_number(self, place: str, most: Decimal, unit: str, *, zero: bool) -> Decimal:
        rule = f"must be a number {'from 0' if zero else 'above 0, up'} to {most} ({unit})"
        number = self._take(place, "number", rule)
        decimal = Decimal(number)
        # As a float too: 1e-400 is above 0, and 0.0.
        if not 0 <= decimal <= most or not (zero or float(decimal) > 0):
            raise self._bad(place, rule, _show(number))
        return decimal

    def _take_names(self, place: str, into: "array[int]") -> None:
        """A list of item names, as numbers. The loop that 12.5 million dependencies go through."""
        self._take(place, "start_array", "must be a list of item names")
        append, ids, start = into.append, self.ids, len(into)
        event, value = first = next(self.events)
        if event == "string" and value in self.source.lifted:
            into.frombytes(self.source.lifted.pop(value).tobytes())
            next(self.events)  # the end of the list
            return
        try:
            for event, value in itertools.chain([first], self.events):
                if event == "string":
                    append(ids[value])
                elif event == "end_array":
                    break
                else:
                    raise self._unlike(f"{place}[{len(into) - start}]", event, value, "must be the name of an item")
        except _BadName as error:
            raise self._bad(f"{place}[{len(into) - start}]", str(error), _show(value)) from None
        self._hold(place, _HELD_FOR_NUMBER * (len(into) - start))

    def _hold(self, place: str, size: int) -> None:
        try:
            self.ids.hold(size)
        except _BadName as error:
            raise self._bad(place, str(error)) from None

    def _take_keys(
        self, place: str, known: Sequence[str] = (), *, optional: Sequence[str] = (), begun: bool = False
    ) -> Iterator[str]:
        """The keys of an object, whose values the caller takes. With `known`: others are ignored, none may miss."""
        if not begun:
            self._take(place, "start_map", "must be an object")
        seen: set[str] = set()
        for event, key in self.events:
            if event == "end_map":
                break
            inside = _inside(place, key) if known else f"{place}[{_show(key)}]"
            if key in seen:
                raise self._bad(inside, "the key is given twice")
            seen.add(key)
            try:
                _check_name(key)
            except _BadName as error:
                raise self._bad(inside, str(error)) from None
            if known and key not in known and key not in optional:
                self._ignore(place, key)
            else:
                yield key
        for key in known:
            if key not in seen:
                raise self._bad(_inside(place, key), "the key is missing")

    def _ignore(self, place: str, key: str) -> None:
        """Takes the value of an unknown key without building it."""
        self.place = _inside(place, key)
        shown = _inside(place.partition("[")[0] + "[…]" if place else "", key)
        if shown not in self.ignored:
            self._hold(self.place, _held_for(shown) + _held_for(key))
        self.ignored[shown] += 1
        depth = 0
        for event, _ in self.events:
            if event in ("start_map", "start_array"):
                depth += 1
                if depth > MAX_DEPTH:
                    raise self._bad(self.place, f"must not nest more than {MAX_DEPTH} deep")
            elif event in ("end_map", "end_array"):
                depth -= 1
            if not depth:
                return

    # -- the document --

    def _read_document(self) -> tuple[Decimal, Flavor]:
        alpha, flavor = Decimal(0), Flavor.CPU
        for key in self._take_keys("", ("version", "flavor", "alpha", "distributions", "items", "checkpoints")):
            if key == "version":
                self._read_version()
            elif key == "flavor":
                rule = "must be cpu or gpu"
                text = self._take_text(key, rule)
                if text not in ("cpu", "gpu"):
                    raise self._bad(key, rule, _show(text))
                flavor = Flavor(text)
            elif key == "alpha":
                alpha = self._take_number(key, MAX_ALPHA, "seconds per MB", zero=False)
            elif key == "distributions":
                self._read_distributions()
            elif key == "items":
                self._read_items()
            elif key == "checkpoints":
                self._read_checkpoints()
        return alpha, flavor

    def _read_version(self) -> None:
        self.place = "version"
        event, value = next(self.events)
        self.version_seen = True
        _hold_version(self.name, event, value)

    def _read_distributions(self) -> None:
        for name in self._take_keys("distributions"):
            place = f"distributions[{_show(name)}]"
            if not is_normalized_name(name):
                raise self._bad(place, f"must be a canonical name, such as {_show(canonicalize_name(name))}")
            self.distributions[name] = version = self._take_text(place, "must be a version, or empty", empty=True)
            self._hold(place, _held_for(name) + _held_for(version))

    def _read_items(self) -> None:
        canonical = {"": ""}  # distribution names that were looked at, and one string for each
        for key in self._take_keys("items"):
            place = f"items[{_show(key)}]"
            try:
                self.numbers.append(self.ids[key])
            except _BadName as error:
                raise self._bad(place, str(error)) from None
            load_time = size_mb = Decimal(0)
            resource_type = distribution = ""
            for field in self._take_keys(
                place, ("load_time", "size_mb", "resource_type", "distribution"), optional=("dependencies",)
            ):
                inside = f"{place}.{field}"
                if field == "load_time":
                    load_time = self._take_number(inside, MAX_LOAD_SECONDS, "seconds", zero=True)
                elif field == "size_mb":
                    size_mb = self._take_number(inside, MAX_SIZE_MB, "MB", zero=True)
                elif field == "resource_type":
                    rule = "must be one of " + ", ".join(RESOURCE_TYPES)
                    text = self._take_text(inside, rule)
                    if text not in RESOURCE_TYPES:
                        raise self._bad(inside, rule, _show(text))
                    resource_type = RESOURCE_TYPES[RESOURCE_TYPES.index(text)]
                elif field == "distribution":
                    text = self._take_text(inside, "must be the name of a distribution, or empty", empty=True)
                    if text not in canonical:
                        if not is_normalized_name(text):
                            rule = f"must be a canonical name, such as {_show(canonicalize_name(text))}"
                            raise self._bad(inside, rule, _show(text))
                        canonical[text] = text
                    distribution = canonical[text]
                elif field == "dependencies":
                    self._take_names(inside, self.dependencies)
            self.load_ns.append(seconds_to_ns(load_time))
            self.size_mb.append(float(size_mb) + 0.0)  # -0.0 + 0.0 is 0.0
            self.resource_types.append(resource_type)
            self.item_distributions.append(distribution)
            self.offsets.append(len(self.dependencies))

    def _read_checkpoints(self) -> None:
        self._take("checkpoints", "start_array", "must be a list")
        ids: set[str] = set()
        for event, value in self.events:
            if event == "end_array":
                return
            place = f"checkpoints[{len(self.checkpoints)}]"
            if event != "start_map":
                raise self._unlike(place, event, value, "must be an object")
            self._hold(place, _HELD_FOR_CHECKPOINT)
            checkpoint_id, size_mb = "", Decimal(0)
            items, canonical = array("i"), array("i")
            for field in self._take_keys(place, ("id", "items", "canonical", "size_mb"), begun=True):
                inside = f"{place}.{field}"
                if field == "id":
                    checkpoint_id = self._take_text(inside, "must be a name")
                    if checkpoint_id in ids:
                        raise self._bad(inside, "must differ from the ids before it", _show(checkpoint_id))
                    ids.add(checkpoint_id)
                elif field == "items":
                    self._take_names(inside, items)
                elif field == "canonical":
                    self._take_names(inside, canonical)
                elif field == "size_mb":
                    size_mb = self._take_number(inside, MAX_SIZE_MB, "MB", zero=True)
            self.checkpoints.append((checkpoint_id, items, canonical, size_mb))

    # -- the whole --

    def _assemble(self, flavor: Flavor, alpha: Decimal) -> Catalogue:
        """The catalogue, with the rules that take the whole document to check."""
        total_ns = sum(self.load_ns)
        if total_ns >= MAX_NS:
            raise self._bad("items", f"all load times together must stay below {MAX_NS} ns", f"{total_ns} ns")
        names = list(self.ids)
        keys = [names[number] for number in self.numbers]
        ids = np.full(len(names), -1, np.int32)  # number → item id; -1: no item
        ids[np.frombuffer(self.numbers, np.int32)] = np.arange(len(keys), dtype=np.int32)
        offsets, dependencies, dropped = self._resolve_dependencies(ids)
        checkpoints = [
            self._resolve_checkpoint(n, ids, names, alpha, checkpoint) for n, checkpoint in enumerate(self.checkpoints)
        ]
        return Catalogue(
            flavor=flavor,
            alpha=float(alpha),
            sha256=self.source.hash.hexdigest(),
            generation=name_generation(flavor, self.distributions, keys, checkpoints),
            distributions=self.distributions,
            keys=keys,
            load_ns=np.array(self.load_ns, np.int64),
            size_mb=np.array(self.size_mb, np.float64),
            resource_types=self.resource_types,
            item_distributions=self.item_distributions,
            offsets=offsets,
            dependencies=dependencies,
            checkpoints=checkpoints,
            warnings=self._warnings(Counter({names[number]: count for number, count in dropped.items()})),
        )

    def _resolve_dependencies(self, ids: Ids) -> tuple[NDArray[np.int64], Ids, Counter[int]]:
        """Numbers to item ids, sorted and distinct for each item; and how often which number was no item."""
        resolved = np.frombuffer(self.dependencies, np.int32)  # in place: a row never grows
        offsets = np.zeros(len(self.offsets), np.int64)
        dropped: Counter[int] = Counter()
        end = 0
        for item, (start, stop) in enumerate(zip(self.offsets, self.offsets[1:], strict=False)):
            if start < stop:
                named = resolved[start:stop]
                row = ids[named]
                if row.min() < 0:
                    dropped.update(named[row < 0].tolist())
                    row = row[row >= 0]
                row = _sort_distinct(row)
                resolved[end : end + len(row)] = row
                end += len(row)
            offsets[item + 1] = end
        return offsets, resolved[:end], dropped

    def _resolve_checkpoint(
        self,
        position: int,
        ids: Ids,
        names: list[str],
        alpha: Decimal,
        checkpoint: tuple[str, "array[int]", "array[int]", Decimal],
    ) -> Checkpoint:
        checkpoint_id, items, canonical, size_mb = checkpoint
        place = f"checkpoints[{position}]"
        resolved = []
        for field, numbers in (("items", items), ("canonical", canonical)):
            row = ids[np.frombuffer(numbers, np.int32)]
            if (unknown := np.flatnonzero(row < 0)).size:
                shown = _show(names[numbers[unknown[0]]])
                raise self._bad(f"{place}.{field}[{unknown[0]}]", "must be the key of an item of this document", shown)
            resolved.append(row)
        if (outside := np.flatnonzero(~np.isin(resolved[1], resolved[0]))).size:
            shown = _show(names[canonical[outside[0]]])
            raise self._bad(f"{place}.canonical[{outside[0]}]", "must be one of the checkpoint's items", shown)
        size_ns = price_size(alpha, size_mb)
        if size_ns >= MAX_NS:
            raise self._bad(f"{place}.size_mb", f"alpha × size_mb must stay below {MAX_NS} ns", _show(size_mb))
        return Checkpoint(
            checkpoint_id=checkpoint_id,
            items=_sort_distinct(resolved[0]),
            canonical=_sort_distinct(resolved[1]),
            size_mb=float(size_mb) + 0.0,
            size_bytes=mb_to_bytes(size_mb),
            size_ns=size_ns,
        )

    def _warnings(self, dropped: Counter[str]) -> tuple[str, ...]:
        warnings = []
        if self.ignored:
            warnings.append(f"{self.name}: ignored unknown keys: {_list_counts(self.ignored)}")
        if dropped:
            shown = Counter({_show(name): count for name, count in dropped.items()})
            warnings.append(
                f"{self.name}: dropped {dropped.total()} dependencies on items that are not in the document: "
                + _list_counts(shown)
            )
        return tuple(warnings)


def _sort_distinct(ids: Ids) -> Ids:
    ids = np.sort(ids)  # five times as fast here as np.unique
    rises = ids[1:] > ids[:-1]
    return ids if rises.all() else ids[np.concatenate(([True], rises))]


def _list_counts(counts: Counter[str]) -> str:
    listed = ", ".join(f"{name} ({count}×)" for name, count in counts.most_common(5))
    return listed if len(counts) <= 5 else f"{listed}, and {len(counts) - 5} more"


def _check_version(path: Path, name: str) -> None:
    """Raises `BadDocument` if the document says that its version is another one."""
    found = _find_value(path, name, "version")
    if found:
        _hold_version(name, *found)


def _find_value(path: Path, name: str, key: str) -> tuple[str, object] | None:
    """The event with which the value of the document's `key` begins; None: there is none as far as it can be read."""
    depth = 0
    with suppress(ijson.JSONError, ArithmeticError, ValueError, OSError), _open(path, name) as file:
        events = ijson.get_backend("yajl2_c").basic_parse(_Source(file, ids=_Ids()))
        for event, value in events:
            if event in ("start_map", "start_array"):
                depth += 1
            elif event in ("end_map", "end_array"):
                depth -= 1
            elif depth == 1 and event == "map_key" and value == key:
                found: tuple[str, object] = next(events)
                return found
    return None


def _hold_version(name: str, event: str, value: object) -> None:
    if event != "number" or not isinstance(value, int) or value != VERSION:
        raise BadDocument(
            f"{name}: version is {_show_event(event, value)}: must be the integer {VERSION}, the only version that is read"
        )
