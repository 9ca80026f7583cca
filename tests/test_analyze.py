"""DESIGN §9, analyze: what imports cost, module by module, whatever the modules do."""

import hashlib
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from pipeline import analyze as analyzing
from pipeline import processes
from pipeline.analyze import (
    Journal,
    JournalHead,
    MeasurementInfo,
    Measurements,
    Node,
    Precision,
    Run,
    add_unseen,
    analyze,
    build_items,
    bundle,
    charge,
    choose_runs,
    compile_ahead,
    contract,
    find_loose,
    find_modules,
    find_roots,
    is_missing,
    measure,
    read_measurements,
)
from pipeline.measurement import MeasuredItem
from pipeline.pace import Figures
from pipeline.processes import NOT_ISOLATED, Mode, ProbeFailure, ProbeStream, find_worker
from pipeline.report import find_memory_noise, find_noise
from pipeline.rootfs import list_rootfs
from pipeline.verify import verify
from readie.cost import PricedItem, closure, match
from readie.errors import BadFile
from readie.flavor import Flavor
from readie.manifest import Host
from tests.tiny import asks, asks_each, install, make_rootfs, package, sandbox_of, site_of

HOST = Host("fork", "1", "3.11.7", 1, "f" * 64, "d" * 64, "c" * 64)
HEAD = JournalHead(HOST, "RssAnon")

#: What modules do to whoever imports them, with what the report must say; None: nothing, they are measured.
BEHAVIOURS: dict[str, tuple[str, str | None]] = {
    "p_print": ("import os; print('hi'); os.write(1, b'{\"seconds\": 0}\\n')", None),
    "p_exit0": ("import sys; sys.exit(0)", "SystemExit(0)"),
    "p_osexit": ("import os; os._exit(0)", "without a result"),
    "p_base": ("class X(BaseException): pass\nraise X", "X"),
    "p_kbd": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "p_segv": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "p_close": ("import os; os.close(1); os.close(2)", None),
    "p_devnull": ("import sys; sys.stdout = open('/dev/null', 'w')", None),
    "p_ok": ("x = bytearray(50_000_000)", None),
    "p_hang": ("import time; time.sleep(600)", "longer than 2 s"),
    "p_need": ("import p_ok, nowhere_to_be_found", "nowhere_to_be_found"),
    "p_crash": ("import p_behind, os; os.abort()", "SIGABRT"),
    "p_time": ("import time\ntime.perf_counter = lambda: 0.0\ntime.monotonic = lambda: 0.0", None),
    "p_trim": ("import ctypes, gc; gc.collect(); ctypes.CDLL(None).malloc_trim(0)", None),
    "p_free": ("import p_held; del p_held.blob", None),
    "p_empty": ("", None),
    "p_threads": ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", None),
    "p_behind_threads": ("import p_threads", None),
    "p_chdir": ("import os; os.chdir('/'); os.environ.clear()", None),
}
LAZY = """
    import importlib.util as u, sys
    s = u.find_spec("lazypk.heavy")
    s.loader = u.LazyLoader(s.loader)
    m = u.module_from_spec(s)
    sys.modules[s.name] = m
    s.loader.exec_module(m)
"""
PACKAGES = {
    **{name: {f"{name}/__init__.py": source} for name, (source, _) in BEHAVIOURS.items()},
    "lazypk": {"lazypk/__init__.py": LAZY, "lazypk/heavy.py": "blob = bytearray(80_000_000)\n"},
    "chain": {
        "chain/__init__.py": "import chain_base\n",
        "chain/sub/__init__.py": "blob = bytearray(8_000_000)\n",
        "chain/sub/deep.py": "from chain_base import part\nimport mailbox\n",
        "tests/__init__.py": "raise SystemError('test packages are left out')\n",
    },
    "chain-base": {"chain_base/__init__.py": "", "chain_base/part.py": "blob = bytearray(20_000_000)\n"},
    "held": {"p_held.py": "blob = bytearray(b'x') * 40_000_000\n"},
    # Not a root of its own: only p_crash imports it.
    "behind": {"ns/behind.py": "", "p_behind.py": "import ns.behind\n"},
    "dynamic": {
        "dynamic/__init__.py": """
            import sys, types
            made = types.ModuleType("dynamic.made")
            made.__path__ = []
            inner = types.ModuleType("dynamic.made.inner")
            sys.modules |= {"dynamic.made": made, "dynamic.made.inner": inner}
        """,
    },
}
#: Distributions that import one another, sleep, fail and crash: work for several streams.
SEVERAL = {
    **{f"s{number}": {f"s{number}.py": "import shared, time; time.sleep(0.1)"} for number in range(3)},
    "shared": {"shared.py": "blob = bytearray(b'x') * 5_000_000"},
    "fails": {"fails.py": "import shared\nraise RuntimeError('not today')"},
    "crashes": {"crashes.py": "import os; os.abort()"},
}
CORPUS = [
    asks("chain.sub.deep", "os.path", count=3),
    asks("chain.sub.deep.function"),
    asks("lazypk.heavy"),
    asks("dynamic.made.inner.thing"),
    asks("nowhere.at.all", count=2),
    asks("ns"),
]


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rootfs(tmp_path_factory.mktemp("analyze") / "rootfs", PACKAGES)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def measured(rootfs: Path, out: Path) -> Measurements:
    return analyze(sandbox_of(rootfs, timeout_s=2.0), CORPUS, out, flavor=Flavor.CPU, repeats=1)


def head_of(out: Path) -> JournalHead:
    """The first line of the journal in the work folder."""
    return msgspec.json.decode((out / "measurements.journal.jsonl").read_bytes().splitlines()[0], type=JournalHead)


@pytest.fixture(scope="module")
def items(measured: Measurements) -> dict[str, MeasuredItem]:
    return {item.key: item for item in measured.items}


class TestModulesThatMisbehave:
    """K09, K12: a module that prints, exits, hangs or crashes spoils only itself, and the report says what happened."""

    @pytest.mark.parametrize("name", [name for name, (_, told) in BEHAVIOURS.items() if told is None])
    def test_one_that_can_be_imported_is_measured(self, items: dict[str, MeasuredItem], name: str) -> None:
        """Its own output and what it does to its process do not matter."""
        assert items[name].distribution == name.replace("_", "-")

    @pytest.mark.parametrize(("name", "told"), [(name, told) for name, (_, told) in BEHAVIOURS.items() if told])
    def test_one_that_cannot_is_a_failure_that_says_why(
        self, measured: Measurements, items: dict[str, MeasuredItem], name: str, told: str
    ) -> None:
        """Each failure names the module, its distribution and what happened."""
        failures = {failure.module: failure for failure in measured.info.failures}

        assert told in failures[name].detail
        assert failures[name].distribution == name.replace("_", "-")
        assert name not in items

    def test_nothing_else_is_listed(self, measured: Measurements) -> None:
        """Names tried in case they exist, and modules that were imported, are no failures."""
        assert {failure.module for failure in measured.info.failures} == {
            name for name, (_, told) in BEHAVIOURS.items() if told
        }

    def test_what_was_loaded_before_a_crash_is_measured(self, items: dict[str, MeasuredItem]) -> None:
        """A module that only a crashing one imports gets a process of its own."""
        assert items["ns.behind"].distribution == "behind"

    def test_memory_is_what_the_module_holds(self, items: dict[str, MeasuredItem]) -> None:
        """p_ok holds 50 MB."""
        assert items["p_ok"].size_mb == pytest.approx(50, abs=0.5)

    def test_threads_belong_to_the_module_that_leaves_them(self, items: dict[str, MeasuredItem]) -> None:
        """Not to those that import it."""
        assert {key: item.threads for key, item in items.items() if item.threads} == {"p_threads": 1}

    def test_a_replaced_clock_deceives_nobody(self, items: dict[str, MeasuredItem]) -> None:
        """p_time still takes a small true time."""
        assert 0 < items["p_time"].seconds < 1

    def test_a_lazy_module_costs_where_it_is_asked_for(self, items: dict[str, MeasuredItem]) -> None:
        """The lazy package alone is small; its heavy part is an item of its own."""
        assert items["lazypk"].size_mb < 1.1
        assert items["lazypk.heavy"].size_mb == pytest.approx(80, abs=0.5)

    def test_no_figure_is_negative_or_not_a_number(self, measured: Measurements) -> None:
        """Also where memory fell."""
        for item in measured.items:
            for figure in (item.seconds, item.size_mb):
                assert math.isfinite(figure)
                assert math.copysign(1.0, figure) == 1.0

    def test_memory_that_fell_is_kept_beside_as_it_was_measured(
        self, measured: Measurements, items: dict[str, MeasuredItem]
    ) -> None:
        """p_free gives back the 40 MB of p_held: it costs nothing, and 40 less than that was seen."""
        assert (items["p_held"].size_mb, measured.figures["p_held"].raw_size_mb) == pytest.approx((40, 40), abs=0.5)
        assert items["p_free"].size_mb == 0
        assert measured.figures["p_free"].raw_size_mb == pytest.approx(-40, abs=0.5)

    def test_of_one_process_no_spread_is_known(self, measured: Measurements) -> None:
        """Neither of time nor of memory."""
        figure = measured.figures["p_ok"]

        assert (figure.seconds_count, figure.seconds_interval) == (1, None)
        assert (figure.size_mb_count, figure.size_mb_spread) == (1, None)


class TestItems:
    """Items are modules outside the standard library, with what they ask for and the distribution that owns them."""

    def test_figures_are_exclusive(self, items: dict[str, MeasuredItem]) -> None:
        """A package that imports 20 MB holds only its own."""
        assert items["chain_base.part"].size_mb == pytest.approx(20, abs=0.5)
        assert items["chain.sub"].size_mb == pytest.approx(8, abs=0.5)
        assert items["chain.sub.deep"].size_mb < 4

    def test_dependencies_are_what_the_body_asked_for(self, items: dict[str, MeasuredItem]) -> None:
        """Direct ones; packages around the module itself are implied."""
        assert items["chain"].dependencies == {"chain_base"}
        assert items["chain.sub.deep"].dependencies >= {"chain_base.part"}
        assert items["chain.sub"].dependencies == set()

    def test_the_closure_of_a_module_is_all_that_its_import_loads(self, items: dict[str, MeasuredItem]) -> None:
        """By the rule of the cost model, packages around it included."""
        priced = {key: PricedItem(0, sorted(item.dependencies)) for key, item in items.items()}

        assert closure(priced, ["chain.sub.deep"]) == {
            "chain",
            "chain.sub",
            "chain.sub.deep",
            "chain_base",
            "chain_base.part",
        }

    def test_the_standard_library_is_no_item(self, items: dict[str, MeasuredItem]) -> None:
        """What a module pulls in of it counts as the module's own."""
        assert not {key for key in items if key.partition(".")[0] in sys.stdlib_module_names}

    def test_test_packages_are_left_out(self, items: dict[str, MeasuredItem]) -> None:
        """A top-level `tests` is not imported."""
        assert "tests" not in items

    def test_a_name_of_a_module_that_is_made_at_run_time_is_found(
        self, measured: Measurements, items: dict[str, MeasuredItem]
    ) -> None:
        """`dynamic.made.inner.thing` is tried, and asks for what is around it, which is there once its package ran."""
        priced = {key: PricedItem(0, sorted(item.dependencies)) for key, item in items.items()}
        made = {"dynamic", "dynamic.made", "dynamic.made.inner"}

        assert match(items, "dynamic.made.inner.thing") == "dynamic.made.inner"
        assert closure(priced, ["dynamic.made.inner"]) == made
        assert {items[key].distribution for key in made} == {"dynamic"}
        assert "dynamic.made.inner.thing" not in measured.info.absent

    def test_a_bare_namespace_is_reported(self, measured: Measurements, items: dict[str, MeasuredItem]) -> None:
        """K05: it belongs to no distribution, and is no item."""
        assert "asked for, and bare namespaces, which belong to no distribution: ns" in measured.info.warnings
        assert "ns" not in items

    def test_names_that_are_not_there_are_told_with_their_count(self, measured: Measurements) -> None:
        """They are neither roots nor failures."""
        assert measured.info.absent == {"nowhere.at.all": 2}


class TestResuming:
    """Completed measurements are in a journal, and are never made again."""

    def test_a_second_run_measures_nothing(self, rootfs: Path, out: Path, measured: Measurements) -> None:
        """The journal stays as it is, and so does every byte of the result."""
        before = (out / "measurements.journal.jsonl").read_bytes()
        again = analyze(sandbox_of(rootfs, timeout_s=2.0), CORPUS, out, flavor=Flavor.CPU, repeats=1)

        assert (out / "measurements.journal.jsonl").read_bytes() == before
        assert again.sha256 == measured.sha256
        assert again.items == measured.items

    def test_a_run_that_was_killed_goes_on(
        self, rootfs: Path, out: Path, measured: Measurements, tmp_path: Path
    ) -> None:
        """What was cut off is measured, and the rest is taken from the journal."""
        lines = (out / "measurements.journal.jsonl").read_bytes().splitlines(keepends=True)
        path = tmp_path / "measurements.journal.jsonl"
        path.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
        again = analyze(sandbox_of(rootfs, timeout_s=2.0), CORPUS, tmp_path, flavor=Flavor.CPU, repeats=1)

        assert path.read_bytes().splitlines(keepends=True)[:-1] == lines[:-1]
        assert len(path.read_bytes().splitlines()) == len(lines)
        assert [item.key for item in again.items] == [item.key for item in measured.items]

    def test_a_line_cut_short_is_dropped(self, tmp_path: Path) -> None:
        """And the next one is written in its place."""
        path = tmp_path / "journal"
        with Journal(path, HEAD) as journal:
            journal.add(run_of("time", "a", a=0.5))
        path.write_bytes(path.read_bytes() + b'{"mode": "ti')
        with Journal(path, HEAD) as journal:
            journal.add(run_of("time", "b", b=0.5))
        with Journal(path, HEAD) as journal:
            assert [run.roots for run in journal.runs] == [("a",), ("b",)]

    def test_measurements_of_another_host_are_put_aside(self, tmp_path: Path) -> None:
        """They are kept, and not used; those of a second change beside those of the first."""
        path = tmp_path / "journal.jsonl"
        with Journal(path, HEAD) as journal:
            journal.add(run_of("time", "a", a=0.5))
        for python, root in (("3.12.1", "b"), ("3.13.0", "c")):
            other = msgspec.structs.replace(HEAD, host=msgspec.structs.replace(HOST, python=python))
            with Journal(path, other) as journal:
                assert journal.runs == []
                journal.add(Run("time", (root,), 0.5, 0.5, [Node(root, stdlib=False, value=0.5)]))

        kept = sorted(tmp_path.glob("journal.*.old"))
        assert [one.name for one in kept] == ["journal.1.old", "journal.2.old"]
        lines = [one.read_bytes().splitlines() for one in kept]
        assert [msgspec.json.decode(head, type=JournalHead).host.python for head, _ in lines] == ["3.11.7", "3.12.1"]
        assert [msgspec.json.decode(line, type=Run).roots for _, line in lines] == [("a",), ("b",)]

    def test_answers_that_were_held_to_other_measurements_are_put_aside(self, tmp_path: Path) -> None:
        """Of `verify`: its journal says what it was held to."""
        path = tmp_path / "journal.jsonl"
        with Journal(path, msgspec.structs.replace(HEAD, measurements="1" * 64)) as journal:
            journal.add(run_of("plain", "a"))
        with Journal(path, msgspec.structs.replace(HEAD, measurements="2" * 64)) as journal:
            assert journal.runs == []

    def test_no_minutes_measure_nothing_and_say_so(self, tmp_path: Path) -> None:
        """What is left is a warning; run again, it goes on."""
        rootfs = make_rootfs(tmp_path / "rootfs", package("first", ""))
        none = analyze(sandbox_of(rootfs), [asks("first")], tmp_path, flavor=Flavor.CPU, repeats=1, minutes=0)
        rest = analyze(sandbox_of(rootfs), [asks("first")], tmp_path, flavor=Flavor.CPU, repeats=1)

        assert none.items == []
        assert any("run analyze again" in warning for warning in none.info.warnings)
        assert [item.key for item in rest.items] == ["first"]
        assert not any("run analyze again" in warning for warning in rest.info.warnings)


def put_out_of_memory(file: Path) -> None:
    """Has the kernel forget what the file holds, as it does by itself with what nobody reads."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class TestColdFiles:
    """What is timed are imports of files that are in memory."""

    @pytest.mark.parametrize(("mode", "processes"), [("time", 2), ("plain", 2), ("memory", 1), ("edges", 1)])
    def test_one_that_read_from_the_disk_is_made_again(self, tmp_path: Path, mode: Mode, processes: int) -> None:
        """Where time counts: of the two processes the second, which reads nothing, is measured."""
        source = """
            import os, pathlib
            pathlib.Path(__file__).with_name("data").read_bytes()
            with pathlib.Path(os.environ["XDG_CACHE_HOME"], "count").open("ab") as file: file.write(b".")
        """
        rootfs = make_rootfs(tmp_path / "rootfs", package("reader", source))
        data = site_of(rootfs) / "reader" / "data"
        data.write_bytes(b"x" * 2_000_000)
        put_out_of_memory(data)
        with ProbeStream(sandbox_of(rootfs)) as stream:
            first = stream.ask(["reader"], "plain")
            assert first.ok
            if first.disk_mb == 0:
                pytest.skip("the files lie in memory only, as on a tmpfs")
            put_out_of_memory(data)
            run = measure(stream, ("reader",), mode)

        assert run.failure is None
        assert (rootfs / "var" / "cache" / "count").stat().st_size == 1 + processes
        assert run.cold == (processes == 1)


class TestStreams:
    """Each core but one has a stream of processes; what is measured does not depend on how many there are."""

    def test_three_measure_what_one_does(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same items, failures and processes in the journal, each once; and they really ran at the same time."""
        rootfs = make_rootfs(tmp_path / "rootfs", SEVERAL)
        running: list[str] = []
        most: list[int] = []

        def count_running(stream: ProbeStream, roots: tuple[str, ...], mode: Mode) -> Run:
            running.append(roots[0])
            most[-1] = max(most[-1], len(running))
            try:
                return measure(stream, roots, mode)
            finally:
                running.remove(roots[0])

        monkeypatch.setattr(analyzing, "measure", count_running)
        found: list[tuple[Measurements, list[Run]]] = []
        for cores in (2, 4):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
            most.append(0)
            out = tmp_path / f"on-{cores}"
            out.mkdir()
            measured = analyze(sandbox_of(rootfs), asks_each(SEVERAL), out, flavor=Flavor.CPU, repeats=1)
            with Journal(out / "measurements.journal.jsonl", head_of(out)) as journal:
                found.append((measured, journal.runs))
        (one, alone), (three, together) = found

        assert most[0] == 1 < most[1] <= 3
        assert [describe_item(item) for item in three.items] == [describe_item(item) for item in one.items]
        assert three.info.failures == one.info.failures
        assert [failure.module for failure in one.info.failures] == ["crashes", "fails"]
        for runs in (alone, together):
            edges = [run.roots for run in runs if run.mode == "edges"]
            assert len(set(edges)) == len(edges)
        assert count_measured(together) == count_measured(alone)
        assert {mode for mode, _ in count_measured(alone)} == {"time", "memory"}


def describe_item(item: MeasuredItem) -> tuple[str, str, int, frozenset[str], int]:
    """What does not differ from one run to another: all but seconds, and memory to the MB."""
    return item.key, item.distribution, item.threads, item.dependencies, round(item.size_mb)


def count_measured(runs: Iterable[Run]) -> Counter[tuple[str, tuple[str, ...]]]:
    return Counter((run.mode, run.roots) for run in runs if run.mode != "edges")


class TestIsolation:
    """Imports have no network and no files of this host where the host lets them be isolated."""

    def test_what_is_not_isolated_is_a_warning(
        self, measured: Measurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of `analyze`, also when all was measured before, and of `verify`; here, where they are, there is none."""
        start = "import worker.fork; worker.fork.ForkRuntime.isolates = False; from worker.cli import main; main()"
        monkeypatch.setattr(processes, "find_worker", lambda: [sys.executable, "-c", start])
        rootfs = make_rootfs(tmp_path / "rootfs", package("first", ""))
        made = [analyze(sandbox_of(rootfs), [asks("first")], tmp_path, flavor=Flavor.CPU, repeats=1) for _ in range(2)]
        verified = verify(sandbox_of(rootfs), made[0], [], tmp_path, count=1, seed=1, repeats=1, most_repeats=1)

        assert [NOT_ISOLATED in one.info.warnings for one in made] == [True, True]
        assert verified.warnings == [NOT_ISOLATED]
        assert NOT_ISOLATED not in measured.info.warnings


class TestFile:
    """measurements.parquet is whole or not there, and damage is named."""

    def test_it_reads_back(self, out: Path, measured: Measurements) -> None:
        """Items, figures and facts are what was written."""
        again = read_measurements(out / "measurements.parquet")

        assert (again.items, again.figures, again.info) == (measured.items, measured.figures, measured.info)
        assert again.sha256 == hashlib.sha256((out / "measurements.parquet").read_bytes()).hexdigest()

    @pytest.mark.parametrize("content", [b"", b"no parquet", b"PAR1PAR1"])
    def test_a_damaged_file_is_named(self, tmp_path: Path, content: bytes) -> None:
        """The error names the file, and the way out."""
        (tmp_path / "measurements.parquet").write_bytes(content)
        with pytest.raises(BadFile, match=r"measurements\.parquet"):
            read_measurements(tmp_path / "measurements.parquet")


# ---- from processes to items ----


def run_of(mode: Mode, *roots: str, failure: str | None = None, **values: float) -> Run:
    """A process that loaded the modules named (`_` for a dot), in this order."""
    nodes = [
        Node(name.replace("__", "."), stdlib=name.startswith("std"), value=value) for name, value in values.items()
    ]
    return Run(mode, roots, 1.0, 1.0, nodes, failure=ProbeFailure("raised", failure) if failure else None)


def edges_of(*roots: str, failure: str | None = None, **asked: list[str]) -> Run:
    """A process that saw what the modules named ask for."""
    nodes = [
        Node(name.replace("__", "."), stdlib=name.startswith("std"), asks=wanted) for name, wanted in asked.items()
    ]
    return Run("edges", roots, 1.0, 1.0, nodes, failure=ProbeFailure("raised", failure) if failure else None)


class TestCharging:
    """What a module of the standard library costs goes to the item that imported it first."""

    def test_a_chain_of_them_goes_to_the_item_behind(self) -> None:
        """std1 imports std2: both are the item's."""
        asked = {"a": ["std1"], "std1": ["std2"]}

        assert charge(["a"], {"std2": 0.25, "std1": 0.5, "a": 1.0}, asked, {"a": "d"}) == {"a": 1.75}

    def test_the_first_importer_pays(self) -> None:
        """Which is b: a asks for it later."""
        asked = {"a": ["b", "std1"], "b": ["std1"]}
        values = {"std1": 0.5, "b": 0.25, "a": 1.0}

        assert charge(["a"], values, asked, {"a": "d", "b": "d"}) == {"a": 1.0, "b": 0.75}

    def test_packages_around_a_module_come_first(self) -> None:
        """Importing p.m runs p, which asks for it before p.m does."""
        asked = {"p": ["std1"], "p.m": ["std1"]}
        values = {"std1": 0.5, "p": 0.25, "p.m": 1.0}

        assert charge(["p.m"], values, asked, {"p": "d", "p.m": "d"}) == {"p": 0.75, "p.m": 1.0}

    def test_what_no_edge_reaches_goes_to_the_root(self) -> None:
        """The sum is always what the process took."""
        assert charge(["a"], {"std9": 0.5, "a": 1.0}, {}, {"a": "d"}) == {"a": 1.5}

    def test_roots_that_share_a_process_pay_for_themselves(self) -> None:
        """The first one to import it pays, in the order of the roots."""
        asked = {"a": ["std1"], "b": ["std1", "std2"]}
        values = {"std1": 0.5, "a": 1.0, "std2": 0.25, "b": 2.0}

        assert charge(["a", "b"], values, asked, {"a": "d", "b": "d"}) == {"a": 1.5, "b": 2.25}


class TestDependencies:
    """Direct dependencies among items."""

    def test_edges_go_through_what_is_no_item(self) -> None:
        """If a asks for std1, which asks for b, then a needs b."""
        asked = {"a": ["std1"], "std1": ["std2", "b"], "std2": ["std1"]}

        assert contract(asked, {"a": "d", "b": "d"}) == {"a": {"b"}, "b": set()}

    def test_cycles_are_kept(self) -> None:
        """Each needs the other, and none itself."""
        assert contract({"a": ["b"], "b": ["a", "b"]}, {"a": "d", "b": "d"}) == {"a": {"b"}, "b": {"a"}}

    def test_what_was_loaded_without_an_edge_becomes_the_roots(self) -> None:
        """Compiled code can import past every hook."""
        dependencies: dict[str, set[str]] = {"a": {"b"}, "b": set(), "c": set()}
        add_unseen(dependencies, [(("a",), ["b", "c", "a"])])

        assert dependencies == {"a": {"b", "c"}, "b": set(), "c": set()}

    def test_of_several_roots_the_one_that_was_being_loaded_gets_it(self) -> None:
        """Here c was loaded after the first root was done."""
        dependencies: dict[str, set[str]] = {"a": set(), "b": set(), "c": set()}
        add_unseen(dependencies, [(("a", "b"), ["a", "c", "b"])])

        assert dependencies == {"a": set(), "b": {"c"}, "c": set()}


class TestBuilding:
    """An item's figures are over all processes that it appeared in: means of times, strays cut, and medians of memory."""

    def test_the_mean_over_all_processes_is_taken_strays_cut(self) -> None:
        """At a third from the median. With its spread, the median absolute deviation, and the count."""
        runs = [edges_of("a", b=[], a=["b"])]
        runs += [run_of("time", "a", b=0.25, a=value) for value in (1.0, 2.0, 9.0)]
        runs += [run_of("memory", "a", b=-500.0, a=1000.0)]
        built = build_items(runs, lambda name, _: f"dist-{name}")
        first, second = built.items

        assert [(item.key, item.seconds, item.size_mb) for item in built.items] == [
            ("a", 2.055555556, 1.024),
            ("b", 0.25, 0.0),
        ]
        assert first.dependencies == {"b"}
        assert first.distribution == "dist-a"
        assert (built.figures["a"].seconds_spread, built.figures["a"].seconds_count) == (1.0, 3)
        assert built.figures["a"].seconds_interval == pytest.approx(1.96 * 1.2533 * 1.4826 / math.sqrt(3))
        assert (built.figures["b"].raw_size_mb, built.figures["b"].size_mb_count) == (-0.512, 1)
        assert built.figures["b"].size_mb_spread is None
        assert second.dependencies == set()
        assert built.unmeasured == 0

    def test_noise_is_listed_where_several_processes_tell_it(self) -> None:
        """Of time and of memory: half of the 95 % interval of the median; of what was measured once nothing is known."""
        noisy = (1000.0, 2000.0, 4000.0)  # KiB: 1000 is the median of how far they are from theirs
        runs = [edges_of("a", a=[]), edges_of("b", b=[]), edges_of("c", c=[])]
        runs += [run_of("time", "a", a=1.0), run_of("time", "a", a=1.0)]
        runs += [run_of("time", "b", b=1.0), run_of("time", "c", c=1.0)]
        runs += [run_of("memory", "a", a=value) for value in noisy]
        runs += [run_of("memory", "b", b=value) for value in (2000.0, 2004.0)] + [run_of("memory", "c", c=4000.0)]
        built = build_items(runs, lambda name, _: name)
        info = MeasurementInfo(
            flavor=Flavor.CPU, host=HOST, memory_source="RssAnon", rootfs="/rootfs", repeats=3, roots=3
        )
        measurements = Measurements(info, built.items, built.figures)
        half = 1.96 * 1.2533 * 1.4826 / math.sqrt(3) * 1.024

        assert [built.figures[key].size_mb_spread for key in "abc"] == [1.024, pytest.approx(0.002048), None]
        (found,) = find_memory_noise(measurements)
        assert (found.module, found.size_mb) == ("a", 2.048)
        assert found.interval == pytest.approx(half)
        assert find_noise(measurements) == []

    def test_nothing_is_known_of_a_level_that_no_two_processes_had_in_common(self) -> None:
        """Each root was measured once: what both load has two values, and no interval."""
        shared = [f"m{number}" for number in range(10)]
        runs = []
        for root, seconds in (("a", 0.01), ("b", 0.02)):
            runs += [
                edges_of(root, failure=None, **{name: [] for name in shared}, **{root: shared}),
                run_of("time", root, failure=None, **dict.fromkeys([*shared, root], seconds)),
                run_of("memory", root, failure=None, **dict.fromkeys([*shared, root], 0.0)),
            ]
        built = build_items(runs, lambda name, _: name)
        info = MeasurementInfo(
            flavor=Flavor.CPU, host=HOST, memory_source="RssAnon", rootfs="/rootfs", repeats=1, roots=2
        )

        assert (built.figures["m0"].seconds_count, built.figures["m0"].seconds_interval) == (2, None)
        assert find_noise(Measurements(info, built.items, built.figures)) == []

    def test_a_module_of_no_distribution_is_counted_in_its_importer(self) -> None:
        """A bare namespace, say, is no item."""
        runs = [edges_of("a", loose=[], a=["loose"])]
        runs += [run_of("time", "a", loose=0.5, a=1.0), run_of("memory", "a", loose=0.0, a=0.0)]
        built = build_items(runs, lambda name, _: None if name == "loose" else "d")

        assert [(item.key, item.seconds) for item in built.items] == [("a", 1.5)]
        assert built.figures["a"].seconds_interval is None

    def test_a_module_that_was_seen_and_not_measured_is_counted(self) -> None:
        """As when the time was up."""
        runs = [edges_of("a", b=[], a=["b"]), run_of("time", "a", b=0.5, a=1.0)]

        assert build_items(runs, lambda name, _: "d").unmeasured == 2


class TestChoosing:
    """As few processes as it takes for every module to appear often enough."""

    def test_large_roots_measure_small_ones(self) -> None:
        """Here b is seen by a's process, and needs none of its own."""
        runs = [edges_of("b", b=[]), edges_of("a", b=[], a=["b"])]

        assert list(bundle(runs, lambda name: name)) == [("a",)]

    def test_roots_of_one_distribution_share_a_process(self) -> None:
        """As they would in a program; failing ones are alone."""
        runs = [edges_of("p.x", p=[], p__x=[]), edges_of("p.y", p=[], p__y=[]), edges_of("p.z", failure="no", p__w=[])]

        assert list(bundle(runs, lambda name: "p")) == [("p.x", "p.y"), ("p.z",)]

    def test_all_modules_are_measured_once_before_any_is_twice(self) -> None:
        """The most asked for first, and the modes take turns."""
        bundles: dict[tuple[str, ...], frozenset[str]] = {("a",): frozenset({"a"}), ("b",): frozenset({"b"})}

        assert choose_runs(bundles, {"b": 3}, [], {"time": 2, "memory": 1}) == [
            ("time", ("b",)),
            ("memory", ("b",)),
            ("time", ("a",)),
            ("memory", ("a",)),
            ("time", ("b",)),
            ("time", ("a",)),
        ]

    def test_what_was_done_is_not_done_again(self) -> None:
        """Appearances in any process count; a failure counts, for it would fail again."""
        bundles: dict[tuple[str, ...], frozenset[str]] = {("a",): frozenset({"a", "b"}), ("c",): frozenset({"c"})}
        done = [
            run_of("time", "other", a=1.0, b=1.0),
            edges_of("c", failure="no", c=[]),
            run_of("time", "c", failure="no"),
        ]

        assert choose_runs(bundles, {}, done, {"time": 1}) == []

    def test_what_is_not_tight_is_measured_again_by_the_cheapest_process(self) -> None:
        """Until its interval is, or the cap is reached; what is tight is left alone."""
        bundles: dict[tuple[str, ...], frozenset[str]] = {
            ("a",): frozenset({"a", "loose"}),
            ("b",): frozenset({"b", "loose"}),
            ("c",): frozenset({"c"}),
        }
        runs = [run_of("time", "a", a=1.0, loose=value) for value in (0.010, 0.020, 0.030)]
        runs += [run_of("time", "b", b=0.1, loose=value) for value in (0.011, 0.021, 0.031)]
        runs += [run_of("time", "c", c=value) for value in (0.010, 0.0100001, 0.010)]

        assert find_loose(bundles, {}, runs, Precision(most=9)) == [("time", ("b",))]
        assert find_loose(bundles, {}, runs, Precision(most=3)) == []
        assert find_loose(bundles, {}, runs, Precision(seconds=0.1)) == []

    def test_what_a_process_loads_is_measured_again_until_the_sum_is_tight(self) -> None:
        """Forty modules, none off by half a millisecond, whose processes told paces that nothing of them shows."""
        nodes = [Node(f"m{number}", stdlib=False, value=0.002) for number in range(40)]
        bundles: dict[tuple[str, ...], frozenset[str]] = {("a",): frozenset(node.name for node in nodes)}
        runs = [Run("time", ("a",), 0.08, 0.08, nodes, pace_s=[pace]) for pace in (0.008, 0.010, 0.012)]

        assert find_loose(bundles, {}, runs, Precision(share=1.0)) == [("time", ("a",))]
        assert find_loose(bundles, {}, runs, Precision(share=1.0, total=0.2)) == []
        assert find_loose(bundles, {}, runs, Precision(share=1.0, most=3)) == []

    def test_errors_of_the_pace_add_up_and_noise_does_not(self) -> None:
        """A hundred modules of 10 ms that are off together by 2 % are within 3 %, with 4 % they are not."""
        precision = Precision()

        assert precision.holds_together([Figures(0.01, 0.0, 9, level=0.02)] * 100)
        assert not precision.holds_together([Figures(0.01, 0.0, 9, level=0.04)] * 100)
        assert precision.holds_together([Figures(0.01, 0.003, 9)] * 100)
        assert not precision.holds_together([Figures(0.01, 0.0, 1)])

    @pytest.mark.parametrize(
        ("detail", "name", "missing"),
        [
            ("import a.b: ModuleNotFoundError: No module named 'a.b'", "a.b", True),
            ("import a.b: ModuleNotFoundError: No module named 'a'", "a.b", True),
            ("import a.b: ModuleNotFoundError: No module named 'c'", "a.b", False),
            ("import a.b: ImportError: cannot import name 'a.b'", "a.b", False),
        ],
    )
    def test_a_module_that_is_not_there_is_told_from_one_that_lacks_another(
        self, detail: str, name: str, missing: bool
    ) -> None:
        """Only the first may be given up for what is around it."""
        assert is_missing(ProbeFailure("raised", detail), name) is missing


# ---- inside the root filesystem ----


class TestInsideTheRootFilesystem:
    """The root filesystem's own Python finds modules and compiles them."""

    def test_modules_are_found_without_importing_any(self, tmp_path: Path) -> None:
        """Packages, namespaces, single files; the longest prefix that is a module."""
        rootfs = make_rootfs(
            tmp_path / "rootfs",
            {
                "one": {"one/__init__.py": "raise SystemError", "one/two/__init__.py": "", "one/two/three.py": ""},
                "space": {"space/part/__init__.py": "", "single.py": ""},
            },
        )
        names = ["one.two.three.f", "one.nope", "space.part.f", "space", "single.f", "nope.x", "one.two.three.x.y"]

        assert find_modules(rootfs / "bin" / "python", names) == {
            "one.two.three.f": "one.two.three",
            "one.nope": "one",
            "space.part.f": "space.part",
            "space": "space",
            "single.f": "single",
            "nope.x": None,
            "one.two.three.x.y": "one.two.three",
        }

    def test_what_path_files_print_does_no_harm(self, tmp_path: Path) -> None:
        """They run before anything else, and say what they like."""
        rootfs = make_rootfs(tmp_path / "rootfs", package("one", ""))
        (site_of(rootfs) / "loud.pth").write_text("import sys; print('loud')\n")

        assert find_modules(rootfs / "bin" / "python", ["one.f"]) == {"one.f": "one"}

    def test_a_name_with_one_part_too_many_asks_for_its_module(self, tmp_path: Path) -> None:
        """With two too many, the module may exist once its package ran: the names are tried in turn."""
        rootfs = make_rootfs(tmp_path / "rootfs", {"one": {"one/__init__.py": "", "one/two.py": ""}})
        corpus = [asks("one.two.f", count=2), asks("one.made.inner.f"), asks("json.loads"), asks("nope")]
        roots, absent = find_roots(corpus, list_rootfs(rootfs), rootfs / "bin" / "python")

        assert [(root.names, root.weight) for root in roots] == [
            (("one.two",), 2),
            (("one.made.inner.f", "one.made.inner", "one.made", "one"), 1),
            (("one",), 0),
        ]
        assert absent == {"nope": 1}

    def test_byte_code_is_compiled_ahead_with_unchecked_hashes(self, tmp_path: Path) -> None:
        """Once; a source that changes is compiled again, and one that cannot be is left."""
        rootfs = make_rootfs(tmp_path / "rootfs", {"one": {"one/__init__.py": "x = 1\n", "one/bad.py": "x = (\n"}})
        python = rootfs / "bin" / "python"
        source = site_of(rootfs) / "one" / "__init__.py"
        compiled = source.parent / "__pycache__" / f"__init__.cpython-{sys.version_info[0]}{sys.version_info[1]}.pyc"
        first = compile_ahead(python)

        assert compiled.read_bytes()[4:8] == (1).to_bytes(4, "little")
        assert first >= 1
        assert compile_ahead(python) == 0
        source.write_text("x = 2\n")
        assert compile_ahead(python) == 1
        assert compile_ahead(python, [str(source)]) == 0

    def test_the_probe_that_measures_is_the_workers(self) -> None:
        """The command is of this installation, and answers to its name."""
        done = subprocess.run([*find_worker(), "--help"], capture_output=True, text=True, check=True)

        assert "probe" in done.stdout


class TestSeveralRootsTogether:
    """Roots of one distribution are tried together; one that fails does not spoil the others."""

    def test_the_others_are_measured(self, tmp_path: Path) -> None:
        """Here bad fails in the middle, with what it loaded before; all others are items."""
        rootfs = make_rootfs(tmp_path / "rootfs", {})
        files = {"good.py": "", "bad.py": "import inside, missing_one\n", "inside.py": "", "more.py": ""}
        install(rootfs, "mixed", files)
        measured = analyze(
            sandbox_of(rootfs), asks_each(["bad", "good", "more"]), tmp_path, flavor=Flavor.CPU, repeats=1
        )

        assert [item.key for item in measured.items] == ["good", "inside", "more"]
        assert [failure.module for failure in measured.info.failures] == ["bad"]
