"""Files that are there whole or not at all, and JSON files that hold one record."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from readie.errors import BadFile

Record = TypeVar("Record", bound=msgspec.Struct)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to: at the end it takes the place of `path`; after a failure it is removed."""
    aside = path.with_name(path.name + ".partial")
    try:
        yield aside
        aside.rename(path)
    finally:
        with suppress(OSError):
            aside.unlink()


def read_json(path: Path, kind: type[Record], way_out: str) -> Record:
    """The record in the file `path`. Raises `BadFile`, which names the file, the place in it, the rule and `way_out`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadFile(f"{path}: {reason}", way_out) from error


def write_json(path: Path, record: msgspec.Struct) -> None:
    """Writes `path`, for people to read too."""
    with replaced(path) as aside:
        aside.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
