"""What all benchmarks share: what is measured with, and the line that each prints."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import msgspec
import psycopg
from psycopg import sql
from sqlalchemy import make_url

from app.database import migrate, open_database
from benchmarks import limit
from benchmarks.catalogues import BenchCatalogue, Size, find_catalogue, make
from benchmarks.fresh import ROOT, Outcome, memory_mb, run_fresh
from readie.projection import load_catalogue
from tests.postgres import running_postgresql

Kind = Literal["duckdb", "postgresql"]
KINDS: tuple[Kind, ...] = ("duckdb", "postgresql")

#: Items of the catalogue that the targets are for: about 400 MB.
FULL_SIZE = 5000

_LIBRARIES = ["duckdb", "psycopg", "sqlalchemy", "litestar", "uvicorn", "numpy", "pyarrow", "msgspec"]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `ours`, `baseline` and `limit` are in `unit`; None: there is none to compare with."""

    name: str
    database: Kind | None
    size: Size
    unit: str
    ours: float
    baseline: float | None = None
    limit: float | None = None
    ratio: float | None = None  # ours / baseline
    peak_mb: float | None = None  # of the process that did the work
    target: str | None = None
    met: bool | None = None
    detail: dict[str, Any] = {}  # further figures, units in their names
    quick: bool = False  # a trial run: too short to believe
    machine: dict[str, Any] = {}
    measured_at: str = ""
    commit: str = ""

    @property
    def key(self) -> tuple[str, str | None, int]:
        """What a later line replaces."""
        return self.name, self.database, self.size.items


@dataclass(frozen=True)
class Target:
    """What a figure must not exceed, or reach. `base`: the bound is so many times this, called `of`."""

    bound: float
    unit: str
    least: bool = False
    base: float = 1.0
    of: str = ""

    def text(self) -> str:
        return f"{'≥' if self.least else '≤'} {self.bound:g} {f'× {self.of}' if self.of else self.unit}"

    def met(self, ours: float) -> bool:
        bound = self.bound * self.base
        return ours >= bound if self.least else ours <= bound


@dataclass
class Bench:
    """What a benchmark is given: how big, on which databases, and how to get these."""

    packages: int
    kinds: Sequence[Kind]
    quick: bool
    folder: Path  # for files that are deleted at the end
    stack: ExitStack = field(default_factory=ExitStack)
    _limits: dict[Path, limit.Router] = field(default_factory=dict)

    def repeats(self, count: int, quick: int = 1) -> int:
        """How often to do something: `count` times, or `quick` in a trial run."""
        return quick if self.quick else count

    @property
    def pause_s(self) -> float:
        """Between two rounds, so that these are not all in one slow spell of the machine."""
        return 0.0 if self.quick else 1.5

    def fresh(self, function: Callable[..., Any], **arguments: Any) -> Outcome:
        """Calls a function in a process of its own; in a trial run here, for starting processes takes longest there."""
        if not self.quick:
            return run_fresh(function, **arguments)
        value = function(**msgspec.json.decode(msgspec.json.encode(arguments)))
        return Outcome(value=msgspec.json.decode(msgspec.json.encode(value)), peak_mb=memory_mb("VmHWM"))

    def catalogue(self, packages: int | None = None, missing: float = 0.0) -> BenchCatalogue:
        """A generated catalogue; it is made, in a process of its own, if it is not there yet."""
        packages = packages or self.packages
        found = find_catalogue(packages, missing=missing)
        if found is None:
            say(f"making a catalogue of {packages} items")
            run_fresh(make, packages=packages, missing=missing)
            found = find_catalogue(packages, missing=missing)
        if found is None:
            raise RuntimeError(f"the catalogue of {packages} items was made, and is not there")
        return found

    def limit(self, catalogue: BenchCatalogue) -> limit.Router:
        """The limit over a catalogue; it is kept, for it is in no process that is measured."""
        if catalogue.document not in self._limits:
            self._limits[catalogue.document] = limit.Router(load_catalogue(catalogue.document))
        return self._limits[catalogue.document]

    @cached_property
    def postgresql(self) -> str:
        """The URL of a PostgreSQL that keeps what it is told, started when it is first needed."""
        return self.stack.enter_context(running_postgresql(durable=True))

    @contextmanager
    def database(self, kind: Kind) -> Iterator[str]:
        """The URL of a new database at the current schema, open nowhere; it is deleted at the end."""
        name = f"bench_{uuid4().hex}"
        if kind == "duckdb":
            url = f"duckdb:///{self.folder / name}.duckdb"
        else:
            url = make_url(self.postgresql).set(database=name).render_as_string(hide_password=False)
            self._on_server(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            with closing(open_database(url)) as opened:
                migrate(opened)
            yield url
        finally:
            if kind == "postgresql":
                self._on_server(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
            for file in self.folder.glob(f"{name}.duckdb*"):
                file.unlink()

    def _on_server(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.postgresql.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(statement)

    def machine(self) -> dict[str, Any]:
        """Where this was measured."""
        model = next(
            (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
        )
        found: dict[str, Any] = {
            "cpu": model or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "kernel": platform.release(),
            "python": platform.python_version(),
            **{name: version(name) for name in _LIBRARIES},
        }
        if "postgresql" in self.__dict__:  # it was started
            with psycopg.connect(self.postgresql.replace("+psycopg", "")) as connection:
                for name in ("server_version", "fsync", "synchronous_commit", "shared_buffers"):
                    row = connection.execute(f"SHOW {name}").fetchone()
                    found[f"postgresql_{name}"] = row and row[0]
        return found

    def line(
        self,
        name: str,
        catalogue: BenchCatalogue,
        kind: Kind | None,
        unit: str,
        ours: float,
        *,
        baseline: float | None = None,
        limit: float | None = None,
        peak_mb: float | None = None,
        target: Target | None = None,
        **detail: Any,
    ) -> Line:
        """A figure as it is printed, with where and when it was measured. Targets are for the full size."""
        if self.quick or catalogue.size.items < FULL_SIZE:
            target = None
        return Line(
            name=name,
            database=kind,
            size=catalogue.size,
            unit=unit,
            ours=_short(ours),
            baseline=_short(baseline),
            limit=_short(limit),
            ratio=None if baseline is None else _short(ours / baseline),
            peak_mb=None if peak_mb is None else round(peak_mb),
            target=None if target is None else target.text(),
            met=None if target is None else target.met(ours),
            detail={name: _short(value) if isinstance(value, float) else value for name, value in detail.items()},
            quick=self.quick,
            machine=self.machine(),
            measured_at=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            commit=_commit(),
        )


@contextmanager
def opened_bench(packages: int, kinds: Sequence[Kind], *, quick: bool) -> Iterator[Bench]:
    """A bench; what it started and wrote is gone at the end."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="readie-bench-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield Bench(packages, kinds, quick, folder, stack)


def say(words: str) -> None:
    """Talk, beside the results."""
    print(words, file=sys.stderr, flush=True)


def percentile(values: Sequence[float], part: float) -> float:
    """The value that `part` of them do not exceed; 0.5 is the median. Raises `ValueError` if there are none."""
    if not values:
        raise ValueError("nothing was measured")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))]


def _short(value: Any) -> Any:
    """Four digits are more than any measurement is worth."""
    return None if value is None else float(f"{value:.4g}")


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")
