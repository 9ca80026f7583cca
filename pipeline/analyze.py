"""Imports in fresh processes, measured: what each module costs by itself, and what it asks for.

Three kinds of process, because recording one thing disturbs another: `edges` (what each module's body asks for),
`time` and `memory`. One process measures all that its root pulls in, so a few large roots measure most modules many
times. What was measured is in a journal at once; `measurements.parquet` is computed from the journal.
"""

import hashlib
import itertools
import math
import os
import statistics
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.corpus import ImportSet
from pipeline.measurement import MeasuredItem
from pipeline.pace import Figures, Settled, find_reference, settle
from pipeline.processes import NOT_ISOLATED, Mode, ProbeAnswer, ProbeFailure, ProbeStream, Sandbox, describe
from pipeline.progress import Progress, stage
from pipeline.resources import Wanted, add_needs, choose_loads, find_failed, list_wanted, select_runs, type_of
from pipeline.rootfs import RootFilesystem, list_rootfs
from readie.command_line import say
from readie.cost import parents
from readie.errors import BadFile, BadRequest, Unavailable
from readie.files import replaced
from readie.flavor import Flavor
from readie.manifest import Description, Host
from readie.resources import is_resource

_MEASURED: tuple[Mode, Mode] = ("time", "memory")
_KIB_MB = 1024 / 1e6

# ---- records ----


class Node(msgspec.Struct, frozen=True, array_like=True):
    """A module in one process. `value`: exclusive seconds, KiB or (edges) threads, by the process' mode."""

    name: str
    stdlib: bool
    value: float = 0.0
    file: str | None = None
    asks: list[str] = []


class Run(msgspec.Struct, frozen=True):
    """One process: a line of the journal."""

    mode: Mode
    roots: tuple[str, ...]  # imported one after the other
    wall_s: float
    cpu_s: float
    nodes: list[Node]
    whole: bool = True  # False: the process ended without a word; what its modules asked for is not known
    failure: ProbeFailure | None = None
    waited_s: float = 0.0  # of wall_s: it was ready to run, and others had the processor
    disk_mb: float = 0.0  # that it had to read from the disk
    pace_s: list[float] = []  # seconds of a fixed piece of work, before and after
    threads: int = 1  # that were left at the end
    declaration: str = ""  # of the resource that was loaded last (pipeline/resources.py)
    network: str | None = None  # host: it was not isolated; None: not known
    rss_mb: float | None = None  # by which the whole process grew; None: not known

    @property
    def pace(self) -> float | None:
        return statistics.fmean(self.pace_s) if self.pace_s else None

    @property
    def stalled(self) -> bool:
        return waits_elsewhere(self.wall_s, self.waited_s, self.cpu_s)

    @property
    def cold(self) -> bool:
        """Whether it read so much from the disk that its time says more of that than of the import.

        A MB in small files cost 2 to 25 ms here, a core's work included: this is about half a percent at most.
        """
        return self.disk_mb > 0.02 + 0.2 * self.wall_s


def waits_elsewhere(wall_s: float, waited_s: float, cpu_s: float) -> bool:
    """Whether a process waited for something else than the processor, as for a disk; some modules do so every time."""
    alone = wall_s - waited_s
    return alone - cpu_s > 0.01 + 0.05 * alone


class JournalHead(msgspec.Struct, frozen=True):
    """What the lines that follow were measured on: they are good for nothing else."""

    host: Host
    memory_source: Literal["RssAnon", "VmRSS"]
    measurements: str = ""  # SHA-256 of what is verified
    version: Literal[1] = 1


class Failure(msgspec.Struct, frozen=True):
    module: str
    kind: str
    detail: str
    distribution: str = ""
    asked: int = 0  # how often the corpus asks for it


class Figure(msgspec.Struct, frozen=True):
    """How well an item is known. Spreads are median absolute deviations; counts are processes it appeared in."""

    seconds_spread: float
    seconds_count: int
    raw_size_mb: float  # as measured: below 0 where memory fell
    size_mb_spread: float | None  # None: one process tells nothing
    size_mb_count: int
    seconds_interval: float | None = None  # half of the 95 % interval; None: too few processes tell one


class MeasurementInfo(msgspec.Struct, frozen=True, kw_only=True):
    version: Literal[1] = 1
    flavor: Flavor
    host: Host
    memory_source: Literal["RssAnon", "VmRSS"]
    rootfs: str
    repeats: int
    roots: int
    failures: list[Failure] = []
    absent: dict[str, int] = {}  # asked for, and not in the root filesystem → how often
    unmeasured: int = 0  # modules seen, and not measured in the time that was given
    warnings: list[str] = []
    most_repeats: int = 1
    processes: int = 0  # that measured time
    pace_s: float | None = None  # seconds of the probe's fixed piece of work at the pace to which times are brought
    pace_median: float | None = None  # how many times as slow the machine was, in the middle, while it measured


@dataclass(frozen=True, eq=False)
class Measurements:
    info: MeasurementInfo
    items: list[MeasuredItem]  # by key
    figures: dict[str, Figure]
    sha256: str = ""  # of the file


def check_same_runtime(measurements: Measurements, description: Description) -> None:
    """Load times and alpha are added up: both must come from one runtime and CPU limit. Raises `BadRequest`."""
    measured, here = measurements.info.host, description.host
    for name, left, right in (
        ("runtime", measured.runtime, here.runtime),
        ("Python", measured.python.rpartition(".")[0], here.python.rpartition(".")[0]),
        ("SANDBOX_CPUS", measured.cpus, here.cpus),
    ):
        if left != right:
            raise BadRequest(
                f"the measurements were made with {name} {left}, and this would be with {right}",
                "Measure again with readie-pipeline analyze, or go on with what was measured.",
            )


# ---- inside the root filesystem, by its own Python ----


class _Compiled(msgspec.Struct):
    compiled: int
    failed: int


def _run_inside(python: Path, script: str, text: bytes = b"") -> bytes:
    path = Path(__file__).with_name(script)
    done = subprocess.run([python, "-I", "-B", path], input=text, capture_output=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise Unavailable(f"{python} ended with {done.returncode}: {''.join(reason)}", "")
    return lines[-1]  # path files run code at start, and that may print


def compile_ahead(python: Path, files: Iterable[str] | None = None) -> int:
    """Compiles what has no current byte code, of these files or (None) of all: in site-packages with unchecked hashes.

    Returns how many files were compiled.
    """
    text = msgspec.json.encode(None if files is None else sorted(files))
    return msgspec.json.decode(_run_inside(python, "rootfs_compile.py", text), type=_Compiled).compiled


def find_modules(python: Path, names: Iterable[str]) -> dict[str, str | None]:
    """For each name its longest prefix that is a module, found without importing anything; None: there is none."""
    answer = _run_inside(python, "rootfs_modules.py", msgspec.json.encode(sorted(set(names))))
    return msgspec.json.decode(answer, type=dict[str, str | None])


# ---- roots ----


@dataclass(frozen=True)
class Root:
    """What a process imports: the first of `names` that exists."""

    names: tuple[str, ...]
    weight: int  # how often the corpus asks for it


def find_roots(corpus: Iterable[ImportSet], rootfs: RootFilesystem, python: Path) -> tuple[list[Root], dict[str, int]]:
    """The roots, most asked for first; and the names asked for that are not in the root filesystem, with counts.

    Roots are what the corpus asks for and every distribution's own top-level names.
    """
    asked: Counter[str] = Counter()
    for imports in corpus:
        for module in imports.modules:
            asked[module] += imports.count
    tops = {name for names in rootfs.top_levels.values() for name in names}
    found = find_modules(python, [*asked, *tops])
    weights: Counter[tuple[str, ...]] = Counter()
    absent: dict[str, int] = {}
    for name, count in sorted(asked.items()):
        if name.partition(".")[0] in rootfs.stdlib or ":" in name:
            continue
        deepest = found[name]
        if deepest is None:
            absent[name] = count
        elif name.count(".") - deepest.count(".") > 1:
            # One name too many is an attribute. Two are a module that exists only once its package ran.
            weights[name, *(prefix for prefix in parents(name) if len(prefix) >= len(deepest))] += count
        else:
            weights[deepest,] += count
    for top in sorted(tops):
        if top not in rootfs.stdlib and found[top] == top:
            weights[top,] += 0
    roots = [Root(names, weight) for names, weight in weights.items()]
    return sorted(roots, key=lambda root: (-root.weight, root.names)), absent


# ---- the journal ----


class Journal:
    """Completed processes, a JSON line each, as soon as they end. Lines of another host are put aside, numbered."""

    def __init__(self, path: Path, head: JournalHead) -> None:
        self.path = path
        self.runs: list[Run] = []
        whole = 0
        if path.exists():
            lines = path.read_bytes().splitlines(keepends=True)
            if lines and self._is_head(lines[0], head):
                whole = len(lines[0])
                for line in lines[1:]:
                    try:
                        self.runs.append(msgspec.json.decode(line, type=Run))
                    except msgspec.MsgspecError:
                        break  # the line that a kill cut short, and nothing after it
                    whole += len(line)
            elif lines:
                numbered = (path.with_suffix(f".{number}.old") for number in itertools.count(1))
                aside = next(one for one in numbered if not one.exists())
                path.rename(aside)
                say(
                    f"  the measurements in {path} are of another host, root filesystem or prediction: they are now {aside.name}"
                )
        self._file = path.open("ab")
        self._file.truncate(whole)
        self._lock = threading.Lock()
        if not whole:
            self._write(head)

    @staticmethod
    def _is_head(line: bytes, head: JournalHead) -> bool:
        try:
            return msgspec.json.decode(line, type=JournalHead) == head
        except msgspec.MsgspecError:
            return False

    def _write(self, record: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def add(self, run: Run) -> None:
        with self._lock:
            self._write(run)
            self.runs.append(run)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._file.close()


# ---- measuring ----


def _keep(answer: ProbeAnswer, roots: tuple[str, ...]) -> Run:
    nodes = []
    for module in answer.modules:
        if answer.mode == "edges":
            nodes.append(Node(module.name, module.stdlib, module.threads or 0, module.file, module.asks or []))
        else:
            value = module.seconds if answer.mode == "time" else module.kb if module.raw_kb is None else module.raw_kb
            nodes.append(Node(module.name, module.stdlib, value or 0.0))
    return Run(
        answer.mode,
        roots,
        answer.wall_s or 0.0,
        answer.cpu_s or 0.0,
        nodes,
        whole=answer.wall_s is not None,
        failure=answer.failure,
        waited_s=answer.waited_s or 0.0,
        disk_mb=answer.disk_mb or 0.0,
        pace_s=answer.pace_s or [],
        threads=answer.threads or 1,
        network=answer.network,
        rss_mb=answer.rss_mb,
    )


def measure(stream: ProbeStream, roots: tuple[str, ...], mode: Mode) -> Run:
    """One process. Where time counts and files had to be read from the disk, another one right after it.

    A worker whose sandboxes import a package all day has its files in memory. Here minutes pass before it is imported
    again, and a kernel may have given them up by then.
    """
    run = _keep(stream.ask(roots, mode), roots)
    if run.cold and mode in ("time", "plain") and run.failure is None:
        run = _keep(stream.ask(roots, mode), roots)
    return run


def measure_resource(stream: ProbeStream, wanted: Wanted, mode: Mode) -> Run:
    """One process that loads a dataset, model or tokenizer. One that leaves threads could not be captured: it fails."""
    run = msgspec.structs.replace(measure(stream, wanted.roots, mode), declaration=wanted.declaration)
    if run.failure is None and run.threads > 1:
        detail = f"load {wanted.key}: {run.threads} threads are left: such a process cannot be captured"
        run = msgspec.structs.replace(run, failure=ProbeFailure("threads", detail))
    return run


@dataclass(frozen=True)
class Budget:
    """Until when measuring may go on, by the monotonic clock."""

    ends: float | None

    def is_left(self) -> bool:
        return self.ends is None or time.monotonic() < self.ends


Step = Callable[[ProbeStream], str]  # one process or more; says what it did


def shorten(names: Sequence[str]) -> str:
    """The first few of the names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def is_missing(failure: ProbeFailure | None, name: str) -> bool:
    """Whether the import of `name` failed because it, or a package around it, does not exist."""
    if failure is None or "ModuleNotFoundError" not in failure.detail:
        return False
    return any(f"'{module}'" in failure.detail for module in [name, *parents(name)])


class _Edges:
    """The first pass: every root that no earlier process has already imported on its way."""

    def __init__(self, roots: Sequence[Root], journal: Journal, distribution_of: Callable[[str], str | None]) -> None:
        self.journal = journal
        self.distribution_of = distribution_of
        edges = [run for run in journal.runs if run.mode == "edges"]
        self.alone = {run.roots[0]: run for run in edges if len(run.roots) == 1}
        self.seen = {node.name for run in edges if run.whole for node in run.nodes}
        self.waiting = [root for root in roots if not self._is_settled(root)] or self.find_lost()

    def find_lost(self) -> list[Root]:
        """Modules that were loaded by a process that then crashed, and by no other: they get one of their own.

        The last one loaded first, for it is likely to need the others.
        """
        crashed = [run for run in self.journal.runs if run.mode == "edges" and not run.whole and not run.declaration]
        names = [node.name for run in crashed for node in run.nodes if not node.stdlib]
        roots = [Root((name,), 0) for name in dict.fromkeys(reversed(names))]
        return [root for root in roots if not self._is_settled(root)]

    def _is_settled(self, root: Root) -> bool:
        for name in root.names:
            if name in self.seen:
                return True
            if name not in self.alone:
                return False
            if not is_missing(self.alone[name].failure, name):
                return True
        return True

    def _measure(self, stream: ProbeStream, roots: tuple[str, ...]) -> Run:
        run = measure(stream, roots, "edges")
        self.journal.add(run)
        if run.whole:
            self.seen.update(node.name for node in run.nodes)
        if len(roots) == 1:
            self.alone[roots[0]] = run
        return run

    def measure(self, stream: ProbeStream, roots: Sequence[Root]) -> str:
        """The roots in one process; should one fail, it alone, and in another process those that come after it."""
        # Another stream may have come upon some in the meantime.
        open_roots = [root for root in roots if not self._is_settled(root)]
        waiting = open_roots
        while len(waiting) > 1:
            run = self._measure(stream, tuple(root.names[0] for root in waiting))
            if not run.whole or run.failure is None:
                break  # it crashed, and nobody knows at which: each has its own
            waiting = [root for root in waiting if root.names[0] not in self.seen][1:]
        for root in open_roots:
            for name in root.names:
                if not self._is_settled(Root((name,), 0)):
                    self._measure(stream, (name,))
                if name in self.seen or not is_missing(self.alone[name].failure, name):
                    break
        return f"edges of {shorten([root.names[0] for root in roots])}"

    def groups(self) -> list[list[Root]]:
        """The waiting roots, those of one distribution together."""
        groups: dict[tuple[str, str | None], list[Root]] = defaultdict(list)
        for root in self.waiting:
            distribution = self.distribution_of(root.names[0])
            alone = len(root.names) > 1 or distribution is None or root.names[0] in self.alone
            groups[root.names[0] if alone else "", distribution].append(root)
        return list(groups.values())

    def steps(self, groups: Iterable[list[Root]]) -> Iterator[Step]:
        for group in groups:

            def step(stream: ProbeStream, group: list[Root] = group) -> str:
                return self.measure(stream, group)

            yield step


def bundle(runs: Iterable[Run], distribution_of: Callable[[str], str | None]) -> dict[tuple[str, ...], frozenset[str]]:
    """What the measuring processes import, and the modules that each will see: all that `runs` (of edges) saw.

    Large roots first: their processes measure what the small ones pull in as well. Roots of one distribution share a
    process, as they would in a program; one that failed has its own.
    """
    seen: set[str] = set()
    bundles: dict[tuple[str, str | None], list[tuple[str, ...]]] = defaultdict(list)
    modules: dict[tuple[str, ...], set[str]] = {}
    for run in sorted(runs, key=lambda run: (-len(run.nodes), run.roots)):
        names = {node.name for node in run.nodes}
        # Of roots that were tried together, the ones before the one that failed are good.
        roots = run.roots if len(run.roots) == 1 else tuple(root for root in run.roots if root in names)
        if roots and not names <= seen:
            seen |= names
            distribution = distribution_of(roots[0])
            alone = distribution is None or roots[0] not in names
            bundles[roots[0] if alone else "", distribution].append(roots)
            modules[roots] = names
    return {
        tuple(dict.fromkeys(root for roots in together for root in roots)): frozenset().union(
            *(modules[roots] for roots in together)
        )
        for together in bundles.values()
    }


def choose_runs(
    bundles: Mapping[tuple[str, ...], frozenset[str]],
    weights: Mapping[str, int],
    done: Iterable[Run],
    repeats: Mapping[Mode, int],
) -> list[tuple[Mode, tuple[str, ...]]]:
    """The processes that are left, so that every module appears as often as `repeats` says.

    In the order of need: all modules once before any is measured twice, the most asked for first; modes take turns.
    """
    counts: dict[Mode, Counter[str]] = {mode: Counter() for mode in repeats}
    runs = list(done)
    saw = {run.roots: frozenset(node.name for node in run.nodes) for run in runs if run.mode == "edges"}
    for run in runs:
        if run.mode in counts:
            names = {node.name for node in run.nodes}
            if run.failure is None or len(run.roots) == 1:
                # It counts for what it should have seen as well: it would miss that again.
                names |= bundles.get(run.roots) or saw.get(run.roots) or frozenset()
            counts[run.mode].update(names)
    chosen: list[tuple[int, int, tuple[str, ...], int, Mode]] = []
    for order, (mode, times) in enumerate(repeats.items()):
        for level in range(1, times + 1):
            for roots, modules in bundles.items():
                if any(counts[mode][module] < level for module in modules):
                    counts[mode].update(modules)
                    need = max(weights.get(module, 0) for module in modules)
                    chosen.append((level, -need, roots, order, mode))
    return [(mode, roots) for _, _, roots, _, mode in sorted(chosen)]


@dataclass(frozen=True)
class Precision:
    """When times are known well enough: a module's if half of its interval is within `share`, or within `seconds`;
    the sum of all that a process loads if its standard error is within `total`, or within `seconds`.
    """

    share: float = 0.05
    seconds: float = 0.0005
    most: int = 9  # processes of one bundle, however noisy
    total: float = 0.03

    def holds(self, seconds: float, interval: float) -> bool:
        return interval <= max(self.share * seconds, self.seconds)

    def holds_together(self, figures: Sequence[Figures]) -> bool:
        """Modules of one process have the error of its pace in common, which therefore adds up in full; noise does not."""
        together = sum(figure.level * figure.middle for figure in figures)
        noise = math.hypot(*(figure.noise for figure in figures))
        return math.hypot(together, noise) <= max(self.total * sum(figure.middle for figure in figures), self.seconds)


def settle_runs(timed: Sequence[Run], values: Sequence[Mapping[str, float]]) -> Settled:
    """`values` of these processes, in seconds, brought to one pace."""
    return settle(values, [run.pace for run in timed], [run.stalled for run in timed])


def find_loose(
    bundles: Mapping[tuple[str, ...], frozenset[str]],
    weights: Mapping[str, int],
    runs: Iterable[Run],
    precision: Precision,
) -> list[tuple[Mode, tuple[str, ...]]]:
    """The processes that make tighter what is not known well enough: bundles, and for each module the cheapest one."""
    timed = [run for run in runs if run.mode == "time"]
    settled = settle_runs(timed, [{node.name: node.value for node in run.nodes} for run in timed])
    times = Counter(run.roots for run in timed)
    costs = {
        roots: sum(settled.figures[module].middle for module in modules if module in settled.figures)
        for roots, modules in bundles.items()
        if times[roots] < precision.most
    }
    figures = settled.figures.items()
    loose = {module for module, figure in figures if not precision.holds(figure.middle, figure.interval)}
    wide = {
        roots
        for roots in costs
        if not precision.holds_together(
            [settled.figures[module] for module in bundles[roots] if module in settled.figures]
        )
    }
    chosen: dict[tuple[str, ...], int] = {}
    for roots in sorted(costs, key=lambda roots: (roots not in wide, costs[roots], roots)):
        found = loose & bundles[roots]
        if found or roots in wide:
            loose -= found
            chosen[roots] = max(weights.get(module, 0) for module in bundles[roots])
    return [("time", roots) for roots in sorted(chosen, key=lambda roots: (-chosen[roots], roots))]


def _work(
    steps: Iterator[Step],
    total: int,
    title: str,
    streams: Sequence[ProbeStream],
    budget: Budget,
) -> int:
    """Takes the steps, each by the next free stream, while the budget lasts. Returns how many were not taken."""
    lock = threading.Lock()
    stop = threading.Event()
    with Progress(title, total) as progress, ThreadPoolExecutor(len(streams)) as pool:

        def drain(stream: ProbeStream) -> None:
            while budget.is_left() and not stop.is_set():
                with lock:
                    step = next(steps, None)
                if step is None:
                    return
                now = step(stream)
                with lock:
                    progress.advance(now)

        futures = [pool.submit(drain, stream) for stream in streams]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
        for future in futures:
            future.result()
        return total - progress.done


# ---- from processes to items ----


@dataclass(frozen=True, eq=False)
class Graph:
    """What the edges passes saw, in processes that ended with a word."""

    asks: dict[str, list[str]]  # module → what its body asked for, in order
    stdlib: frozenset[str]
    files: dict[str, str | None]
    seen: list[tuple[tuple[str, ...], list[str]]]  # of each process its roots, and its modules as they were loaded


def build_graph(runs: Iterable[Run]) -> Graph:
    asks: dict[str, dict[str, None]] = defaultdict(dict)
    stdlib: set[str] = set()
    files: dict[str, str | None] = {}
    seen: list[tuple[tuple[str, ...], list[str]]] = []
    for run in runs:
        if run.mode == "edges" and run.whole:
            seen.append((run.roots, [node.name for node in run.nodes]))
            for node in run.nodes:
                asks[node.name] |= dict.fromkeys(node.asks)
                files.setdefault(node.name, node.file)
                if node.stdlib:
                    stdlib.add(node.name)
    return Graph({name: list(names) for name, names in asks.items()}, frozenset(stdlib), files, seen)


def charge(
    roots: Sequence[str], values: Mapping[str, float], asks: Mapping[str, Sequence[str]], items: Mapping[str, str]
) -> dict[str, float]:
    """What one process costs, item by item: what a module that is no item costs goes to the item that imported it.

    The order of imports is followed from the roots as the interpreter took it: packages around a module first, then
    it, then what it asks for. What that does not reach goes to the first root.
    """
    charged: dict[str, float] = {}
    seen: set[str] = set()
    homes = [root for root in roots if root in items]
    home = homes[0] if homes else next((name for name in values if name in items), None)

    def enter(name: str, owner: str | None) -> tuple[str | None, Iterator[str]] | None:
        if name in seen or name not in values:
            return None
        seen.add(name)
        owner = name if name in items else owner
        if owner is not None:
            charged[owner] = charged.get(owner, 0.0) + values[name]
        wanted = (part for ask in asks.get(name, ()) for part in [*reversed(parents(ask)), ask])
        return owner, wanted

    stack: list[tuple[str | None, Iterator[str]]] = [
        (root if root in items else home, iter([*reversed(parents(root)), root])) for root in reversed(roots)
    ]
    while stack:
        owner, wanted = stack[-1]
        for name in wanted:
            entered = enter(name, owner)
            if entered is not None:
                stack.append(entered)
                break
        else:
            stack.pop()
    for name in values:
        if name not in seen:
            owner = name if name in items else home
            if owner is not None:
                charged[owner] = charged.get(owner, 0.0) + values[name]
    return charged


def contract(asks: Mapping[str, Sequence[str]], items: Mapping[str, str]) -> dict[str, set[str]]:
    """Direct dependencies among items: through modules that are no items to what these ask for."""

    def ahead(name: str) -> set[str]:
        found: set[str] = set()
        seen = {name, *(package for package in parents(name) if package in items)}
        waiting = [*parents(name), *(part for ask in asks.get(name, ()) for part in [ask, *parents(ask)])]
        while waiting:
            module = waiting.pop()
            if module in seen:
                continue
            seen.add(module)
            if module in items:
                found.add(module)
            else:
                waiting += [part for ask in asks.get(module, ()) for part in [ask, *parents(ask)]]
        return found

    # Packages around a module are implied, and need not be written.
    return {item: ahead(item) for item in items}


def add_unseen(dependencies: dict[str, set[str]], seen: Iterable[tuple[Sequence[str], Sequence[str]]]) -> None:
    """What a process loaded although no edge leads there, as compiled code can, its root depends on.

    `seen`: roots in the order of their import, and modules in the order in which their loading ended.
    """
    for roots, modules in seen:
        closure: set[str] = set()
        waiting = list(roots)
        while waiting:
            module = waiting.pop()
            if module not in closure:
                closure.add(module)
                waiting += [*dependencies.get(module, ()), *parents(module)]
        order = {module: number for number, module in enumerate(modules)}
        for module in modules:
            if module in dependencies and module not in closure:
                # Its root is the first that was not done yet.
                root = next((root for root in roots if order.get(root, -1) > order[module]), None)
                if root in dependencies:
                    dependencies[root].add(module)


@dataclass(frozen=True, eq=False)
class Built:
    items: list[MeasuredItem]  # by key
    figures: dict[str, Figure]
    unmeasured: int  # modules that were seen and not measured
    paces: list[float]  # of the processes that measured time


def build_items(
    runs: Sequence[Run],
    distribution_of: Callable[[str, str | None], str | None],
    resources: Sequence[Wanted] = (),
) -> Built:
    """What the processes say of each item; `resources` are those that can be loaded."""
    keys = {one.key for one in resources}
    graph = build_graph(runs)
    measured = {mode: {node.name for run in runs if run.mode == mode for node in run.nodes} for mode in _MEASURED}
    everywhere = measured["time"] & measured["memory"]
    items: dict[str, str] = {}
    unmeasured = 0
    for name in sorted(graph.asks):
        if name in graph.stdlib:
            continue
        distribution = "" if name in keys else distribution_of(name, graph.files[name])
        if distribution is None or (is_resource(name) and name not in keys):
            continue
        if name in everywhere:
            items[name] = distribution
        else:
            unmeasured += 1
    charged: dict[Mode, list[dict[str, float]]] = {mode: [] for mode in _MEASURED}
    for run in runs:
        if run.mode in charged:
            once = {node.name: node.value for node in run.nodes}
            charged[run.mode].append(charge(run.roots, once, graph.asks, items))
    settled = settle_runs([run for run in runs if run.mode == "time"], charged["time"])
    memory: dict[str, list[float]] = defaultdict(list)
    for process in charged["memory"]:
        for item, kib in process.items():
            memory[item].append(kib)
    dependencies = contract(graph.asks, items)
    add_needs(dependencies, resources, items)
    add_unseen(dependencies, graph.seen)
    threads = count_threads(runs, graph.asks, items)

    built, figures = [], {}
    for key, distribution in items.items():
        seconds, kib = settled.figures[key], statistics.median(memory[key])
        built.append(
            MeasuredItem(
                key=key,
                seconds=round(max(seconds.middle, 0.0), 9) + 0.0,
                size_mb=round(max(kib, 0.0) * _KIB_MB, 6) + 0.0,
                resource_type=type_of(key),
                distribution=distribution,
                threads=threads.get(key, 0),
                dependencies=frozenset(dependencies[key] - {key}),
            )
        )
        figures[key] = Figure(
            seconds_spread=round(seconds.spread, 9),
            # Where no two processes did the same, nothing is known of their level, and so of what they share.
            seconds_interval=round(seconds.interval, 9) if math.isfinite(seconds.interval) else None,
            seconds_count=seconds.count,
            raw_size_mb=round(kib * _KIB_MB, 6),
            size_mb_spread=_spread_mb(memory[key]),
            size_mb_count=len(memory[key]),
        )
    return Built(built, figures, unmeasured, settled.paces)


def _spread_mb(kib: Sequence[float]) -> float | None:
    """The median absolute deviation, in MB; None of a single figure, which tells nothing of others."""
    if len(kib) < 2:
        return None
    middle = statistics.median(kib)
    return round(statistics.median(abs(one - middle) for one in kib) * _KIB_MB, 6)


def count_threads(runs: Iterable[Run], asks: Mapping[str, Sequence[str]], items: Mapping[str, str]) -> dict[str, int]:
    """The most threads that an item's body was seen to leave, of processes that had some at the end."""
    most: dict[str, int] = {}
    for run in runs:
        if run.mode == "edges" and run.whole and run.threads > 1:
            # A resource that leaves threads has failed: it is no item, and what it left is nobody's.
            values = {node.name: node.value for node in run.nodes if node.name in items or not is_resource(node.name)}
            left = charge(run.roots, values, asks, items)
            most |= {key: max(most.get(key, 0), round(count)) for key, count in left.items() if count > 0}
    return most


def list_failures(
    runs: Iterable[Run], roots: Sequence[Root], distribution_of: Callable[[str, str | None], str | None]
) -> list[Failure]:
    """One for each root that could not be imported, with what happened."""
    asked = {name: root.weight for root in roots for name in root.names}
    trial = {name for root in roots for name in root.names[:-1]}  # only tried, in case it exists
    failures: dict[str, Failure] = {}
    for run in runs:
        if run.failure is None or run.declaration or len(run.roots) > 1:
            continue  # roots that fail together are tried alone
        name = run.roots[0]
        if name not in failures and not (name in trial and is_missing(run.failure, name)):
            distribution = distribution_of(name, None) or ""
            failures[name] = Failure(name, run.failure.kind, run.failure.detail, distribution, asked.get(name, 0))
    return [failures[name] for name in sorted(failures)]


# ---- the stage ----


def analyze(
    sandbox: Sandbox,
    corpus: Sequence[ImportSet],
    out: Path,
    *,
    flavor: Flavor,
    repeats: int = 3,
    most_repeats: int | None = None,
    minutes: float | None = None,
) -> Measurements:
    """Measures what is not in the journal yet, and writes `measurements.parquet` into the folder `out`.

    Each module is timed in at least `repeats` processes, and in more, up to `most_repeats` (three times `repeats`),
    until it and all that a process loads are known well enough (`Precision`). One process tells no interval: with one repeat, none is tightened.
    """
    budget = Budget(None if minutes is None else time.monotonic() + 60 * minutes)
    wanted = list_wanted(sandbox.rootfs)
    with stage("Listing the root filesystem"):
        rootfs = list_rootfs(sandbox.rootfs)
        description = describe(sandbox)
        roots, absent = find_roots(corpus, rootfs, sandbox.python)
    head = JournalHead(description.host, description.memory_source)
    with Journal(out / "measurements.journal.jsonl", head) as journal:
        if not journal.runs:
            with stage("Compiling byte code"):
                say(f"  compiled {compile_ahead(sandbox.python)} files")
        most = max(repeats, 3 * repeats if most_repeats is None else most_repeats) if repeats > 1 else 1
        left = _measure_all(sandbox, rootfs, roots, journal, repeats=repeats, budget=budget)
        if wanted:
            left += _measure_resources(sandbox, wanted, journal, repeats=(repeats, most), budget=budget)
        loose = 0 if left or most == repeats else _tighten(sandbox, rootfs, roots, journal, most=most, budget=budget)
    warnings = list(rootfs.warnings)
    bare = sorted({name for one in corpus for name in one.modules if rootfs.is_namespace(name)})
    if bare:
        warnings.append(f"asked for, and bare namespaces, which belong to no distribution: {shorten(bare)}")
    if left:
        warnings.append(f"the time was up with {left} measurements left: run analyze again to go on")
    elif loose:
        warnings.append(
            f"the time was up with {loose} measurements left that make intervals tighter: run analyze again"
        )
    runs = select_runs(journal.runs, wanted)
    if any(run.network == "host" for run in runs):
        warnings.append(NOT_ISOLATED)
    failed = find_failed(wanted, runs)
    built = build_items(runs, rootfs.distribution_of, [one for one in wanted if one.key not in failed])
    asked = Counter({key: sum(one.count for one in corpus if key in one.modules) for key in failed})
    failures = [
        Failure(key, run.failure.kind, run.failure.detail, "", asked[key]) for key, run in failed.items() if run.failure
    ]
    reference = find_reference([run.pace for run in runs if run.mode == "time"])
    info = MeasurementInfo(
        flavor=flavor,
        host=description.host,
        memory_source=description.memory_source,
        rootfs=str(sandbox.rootfs.absolute()),
        repeats=repeats,
        most_repeats=most,
        processes=len(built.paces),
        pace_s=reference,
        pace_median=round(statistics.median(built.paces), 3) if built.paces and reference else None,
        roots=len(roots),
        failures=[*list_failures(runs, roots, rootfs.distribution_of), *failures],
        absent=absent,
        unmeasured=built.unmeasured,
        warnings=warnings,
    )
    return write_measurements(out / "measurements.parquet", Measurements(info, built.items, built.figures))


def _measure_all(
    sandbox: Sandbox,
    rootfs: RootFilesystem,
    roots: Sequence[Root],
    journal: Journal,
    *,
    repeats: int,
    budget: Budget,
) -> int:
    """Runs the processes without which a module is measured too rarely. Returns how many were left."""
    with _open_streams(sandbox) as streams:
        edges = _Edges(roots, journal, lambda root: rootfs.distribution_of(root, None))
        left = 0
        while edges.waiting and budget.is_left():
            groups = edges.groups()
            with stage(f"Finding what {len(edges.waiting)} of {len(roots)} roots ask for"):
                left += _work(edges.steps(groups), len(groups), "edges", streams, budget)
            edges.waiting = edges.find_lost()
        left += len(edges.waiting) if not left else 0
        whole = _whole_edges(journal)
        weights = {name: root.weight for root in roots for name in root.names}
        bundles = bundle(whole, edges.distribution_of)
        # Memory hardly differs from one process to the next (4 kB a module), time does.
        wanted: dict[Mode, int] = {"time": repeats, "memory": max(1, repeats // 2)}
        chosen = choose_runs(bundles, weights, journal.runs, wanted)
        if chosen and budget.is_left():
            # Byte code that is not there by now would be written, or be compiled, while the clock runs.
            files = {node.file or "" for run in whole for node in run.nodes}
            compile_ahead(sandbox.python, {file for file in files if file.endswith(".py")})
            with stage(f"Measuring time and memory in {len(chosen)} processes"):
                left += _work(_steps(chosen, journal), len(chosen), "measuring", streams, budget)
        elif chosen:
            left += len(chosen)
    return left


def _tighten(
    sandbox: Sandbox,
    rootfs: RootFilesystem,
    roots: Sequence[Root],
    journal: Journal,
    *,
    most: int,
    budget: Budget,
) -> int:
    """Runs the processes that make intervals tighter. Returns how many were left of those that were last chosen."""
    weights = {name: root.weight for root in roots for name in root.names}
    bundles = bundle(_whole_edges(journal), lambda root: rootfs.distribution_of(root, None))
    loose = 0
    with _open_streams(sandbox) as streams:
        while not loose:
            chosen = find_loose(bundles, weights, journal.runs, Precision(most=most))
            if not chosen:
                break
            loose = len(chosen)
            if budget.is_left():
                with stage(f"Making intervals tighter in {len(chosen)} processes"):
                    loose = _work(_steps(chosen, journal), len(chosen), "measuring", streams, budget)
    return loose


def _whole_edges(journal: Journal) -> list[Run]:
    return [run for run in journal.runs if run.mode == "edges" and run.whole and run.nodes and not run.declaration]


@contextmanager
def _open_streams(sandbox: Sandbox) -> Iterator[list[ProbeStream]]:
    """One for each core but one, which is the pipeline's own."""
    with ExitStack() as stack:
        yield [stack.enter_context(ProbeStream(sandbox)) for _ in range(max(1, len(os.sched_getaffinity(0)) - 1))]


def _measure_resources(
    sandbox: Sandbox, wanted: Sequence[Wanted], journal: Journal, *, repeats: tuple[int, int], budget: Budget
) -> int:
    """Loads datasets, models and tokenizers as often as is needed. Returns how many times were left.

    All of them once for what they ask for, which tells the ones that fail; then for time and memory.
    """
    least, most = repeats
    left = 0
    with _open_streams(sandbox) as streams:

        def work(chosen: Sequence[tuple[Mode, Wanted]]) -> int:
            def steps() -> Iterator[Step]:
                for mode, one in chosen:

                    def step(stream: ProbeStream, mode: Mode = mode, one: Wanted = one) -> str:
                        journal.add(measure_resource(stream, one, mode))
                        return f"{mode} of {one.key}"

                    yield step

            if not chosen or not budget.is_left():
                return len(chosen)
            with stage(f"Loading datasets, models and tokenizers in {len(chosen)} processes"):
                return _work(steps(), len(chosen), "loading", streams, budget)

        wants: list[dict[Mode, int]] = [{"edges": 1}, {"time": least, "memory": max(1, least // 2)}]
        for want in wants:
            left += work(choose_loads(wanted, journal.runs, want))
        for times in range(least + 1, most + 1):
            loose = find_loose_keys(wanted, journal.runs, Precision(most=most))
            if left or not loose:
                break
            left += work(choose_loads(loose, journal.runs, {"time": times}))
    return left


def find_loose_keys(wanted: Iterable[Wanted], runs: Iterable[Run], precision: Precision) -> list[Wanted]:
    """The resources whose time is not known well enough yet."""
    timed = [run for run in runs if run.mode == "time"]
    settled = settle_runs(timed, [{node.name: node.value for node in run.nodes} for run in timed])
    figures = settled.figures
    return [
        one
        for one in wanted
        if one.key in figures and not precision.holds(figures[one.key].middle, figures[one.key].interval)
    ]


def _steps(chosen: Iterable[tuple[Mode, tuple[str, ...]]], journal: Journal) -> Iterator[Step]:
    for mode, together in chosen:

        def step(stream: ProbeStream, mode: Mode = mode, together: tuple[str, ...] = together) -> str:
            run = measure(stream, together, mode)
            journal.add(run)
            if run.failure and len(together) > 1:
                for root in together:
                    journal.add(measure(stream, (root,), mode))
            return f"{mode} of {shorten(together)}"

        yield step


_COLUMNS = pa.schema(
    [
        ("key", pa.string()),
        ("seconds", pa.float64()),
        ("size_mb", pa.float64()),
        ("resource_type", pa.string()),
        ("distribution", pa.string()),
        ("threads", pa.int64()),
        ("dependencies", pa.list_(pa.string())),
        *((field.name, pa.int64() if field.type is int else pa.float64()) for field in msgspec.structs.fields(Figure)),
    ]
)


def write_measurements(path: Path, measurements: Measurements) -> Measurements:
    """Writes `path` whole or not at all; the facts about the run are in the schema's metadata."""
    rows = [
        {
            "key": item.key,
            "seconds": item.seconds,
            "size_mb": item.size_mb,
            "resource_type": item.resource_type,
            "distribution": item.distribution,
            "threads": item.threads,
            "dependencies": sorted(item.dependencies),
            **msgspec.structs.asdict(measurements.figures[item.key]),
        }
        for item in measurements.items
    ]
    schema = _COLUMNS.with_metadata({"readie": msgspec.json.encode(measurements.info)})
    with replaced(path) as aside:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), aside)
    return read_measurements(path)


def read_measurements(path: Path) -> Measurements:
    """The measurements at `path`. Raises `BadFile`."""
    try:
        content = path.read_bytes()
        table = pq.read_table(pa.BufferReader(content))
        info = msgspec.json.decode(table.schema.metadata[b"readie"], type=MeasurementInfo)
        rows = table.cast(_COLUMNS).to_pylist()
    except (OSError, pa.ArrowException, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise BadFile(f"{path}: {error}", "Measure again with readie-pipeline analyze.") from error
    figures = {
        row["key"]: msgspec.convert({name: row[name] for name in Figure.__struct_fields__}, Figure) for row in rows
    }
    items = [
        MeasuredItem(
            key=row["key"],
            seconds=row["seconds"],
            size_mb=row["size_mb"],
            resource_type=row["resource_type"],
            distribution=row["distribution"],
            threads=row["threads"],
            dependencies=frozenset(row["dependencies"]),
        )
        for row in rows
    ]
    return Measurements(info, items, figures, hashlib.sha256(content).hexdigest())
