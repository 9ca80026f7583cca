"""Progress of long work on stderr: a bar or a spinner on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.status import Status
from rich.text import Text

from readie.command_line import plain, say

_EVERY_S = 5.0
_spinners: list[Status] = []  # of the stages that are running: at most one of them turns, and none while a bar grows


class Progress:
    """Counts steps of one stage. `total` may be corrected while it runs."""

    def __init__(self, title: str, total: int) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self._said = time.monotonic()
        self._bar: Bar | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            now = TextColumn("{task.fields[now]}", markup=False)
            self._bar = Bar(*columns, now, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(title, total=total, now="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            _stop_spinners()
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, now: str) -> None:
        """One step is done: `now` says which."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, total=self.total, now=plain(now))
        elif time.monotonic() - self._said >= _EVERY_S:
            self._said = time.monotonic()
            say(f"  {self.title}: {self.done} of {self.total} ({now})")


@contextmanager
def stage(title: str) -> Iterator[None]:
    """Says what begins, and how long it took. Meanwhile a terminal shows a spinner, until there is a bar."""
    begun = time.monotonic()
    say(f"{title} …")
    with _spinning(title):
        yield
    say(f"{title}: {time.monotonic() - begun:.1f} s")


@contextmanager
def _spinning(title: str) -> Iterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    _stop_spinners()
    spinner = Status(Text(plain(title)), console=Console(stderr=True))
    spinner.start()
    _spinners.append(spinner)
    try:
        yield
    finally:
        _spinners.remove(spinner)
        spinner.stop()


def _stop_spinners() -> None:
    for spinner in _spinners:
        spinner.stop()
