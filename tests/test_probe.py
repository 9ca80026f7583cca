"""The probe: what imports cost, module by module, and truthful answers about those that misbehave."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes import alive, make_rootfs, read_command_lines, wait_for
from worker.fork import ForkRuntime
from worker.measure import Mode, ProbeRequest, measure

#: Packages that print, exit, crash and close what they should not.
WILD = {
    "p_print": """import os; print("hi"); os.write(1, b'{"seconds": 0}\\n')""",
    "p_exit0": "import sys; sys.exit(0)",
    "p_osexit": "import os; os._exit(0)",
    "p_base": "class X(BaseException): pass\nraise X",
    "p_kbd": "raise KeyboardInterrupt",
    "p_segv": "import ctypes; ctypes.string_at(0)",
    "p_close": "import os; os.close(1); os.close(2)",
    "p_devnull": 'import sys; sys.stdout = open("/dev/null","w")',
    "p_ok": "x = bytearray(50_000_000)",
}
#: Packages with figures that mislead.
ODD = {
    "p_time": "import time\ntime.perf_counter = time.perf_counter_ns = lambda: 0.0\ntime.monotonic = lambda: 0.0",
    "p_trim": "import ctypes, gc\ngc.collect(); ctypes.CDLL(None).malloc_trim(0)",
    "p_held": "blob = bytearray(b'x') * 40_000_000",
    "p_free": "import p_held; del p_held.blob",
    "lazypk": """
        import importlib.util as u, sys
        s = u.find_spec("lazypk.heavy")
        s.loader = u.LazyLoader(s.loader)
        m = u.module_from_spec(s)
        sys.modules[s.name] = m
        s.loader.exec_module(m)
    """,
    "lazypk/heavy.py": "blob = bytearray(80_000_000)",
    "waker": "import sys, lazypk\nsys.modules['lazypk.heavy'].blob",
    "getter": "def __getattr__(name):\n    import getter.part\n    return getter.part",
    "getter/part.py": "blob = bytearray(10_000_000)",
    "p_empty": "",
}
#: Packages that ask for one another.
GRAPH = {
    "slow_root": "import time, slow_leaf\ntime.sleep(0.2)\nfrom slow_root import inner",
    "slow_root/inner.py": "import time; time.sleep(0.1)",
    "compiled": """
        import ctypes
        load = ctypes.pythonapi.PyImport_ImportModuleLevel
        load.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        load.restype = ctypes.py_object
        load(b"slow_leaf", None, None, None, 0)
    """,
    "slow_leaf": "import time; time.sleep(0.3)",
    "optional": "try:\n    import fails_late\nexcept ImportError:\n    pass\ntry:\n    import absent_one\nexcept ImportError: pass",
    "fails_late": "import time, slow_leaf\ntime.sleep(0.2)\nraise ImportError('not here')",
    "deep": "",
    "deep/middle": "",
    "deep/middle/end.py": "from . import sibling\nfrom ..other import thing as alias",
    "deep/middle/sibling.py": "",
    "deep/other": "thing = 1",
    "asker": """
        import deep.middle.end
        import slow_leaf
        from deep import middle, other
        import importlib
        importlib.import_module("p_empty")
        importlib.import_module(".other", "deep")
        __import__(name="getter", globals=globals(), locals=None, fromlist=(), level=0)
        try:
            import deep.absent
        except ImportError:
            pass
    """,
    "second_asker": "import asker, slow_leaf",
    "shelf": """
        def __getattr__(name):
            import importlib
            value = globals()[name] = getattr(importlib.import_module("shelf." + name.lower()), name)
            return value
    """,
    "shelf/book.py": "class Meta(type): pass\nclass Book(metaclass=Meta): pass",
    "shelf/lend.py": "def Lend(): pass",
    "first_reader": "from shelf import Book, Lend",
    "second_reader": "import first_reader\nfrom shelf import Book, Lend",
    "star": "from deep.middle import *\nfrom starred import *",
    "starred": "__all__ = ['one']",
    "starred/one.py": "",
    "threaded": """
        import threading
        def load():
            import slow_leaf
        thread = threading.Thread(target=load); thread.start(); thread.join()
        import p_empty
    """,
    "keeper": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
}
#: Packages that want more than they may have.
GREEDY = {
    "p_hang": "import p_empty\nimport time; time.sleep(600)",
    "p_eat": "import p_empty\nx = []\nwhile True: x.append(bytearray(b'x') * 1_000_000)",
    "p_late_crash": "import slow_leaf, p_empty, ctypes; ctypes.string_at(0)",
    "p_exit3": "import os; os._exit(3)",
    "p_chdir": "import os; os.chdir('/'); open('/dev/null')",
    "p_fork": "import os\nif os.fork() == 0:\n    pass\nelse:\n    os.wait()",
    "p_spawn": "import subprocess; subprocess.Popen(['sleep', '304'])",
    "p_net": "import socket\ns = socket.create_server(('127.0.0.1', 0))\nc = socket.create_connection(s.getsockname())",
    "p_out": "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=5)",
    "result": "",
}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkRuntime]:
    folder = tmp_path_factory.mktemp("probe")
    (folder / "runtime").mkdir()
    running = ForkRuntime(make_rootfs(folder / "rootfs", WILD | ODD | GRAPH | GREEDY), folder / "runtime")
    yield running
    running.close()


class Probe:
    """Measures packages of the root filesystem."""

    def __init__(self, runtime: ForkRuntime) -> None:
        self.runtime = runtime

    def __call__(self, *modules: str, mode: Mode = "time", timeout: float = 30, memory: int = 2**31) -> dict[str, Any]:
        request = ProbeRequest(id=7, modules=list(modules), mode=mode)
        answer = measure(self.runtime, request, timeout=timeout, memory=memory)
        check_figures(answer)
        return answer

    def figures(self, *modules: str, mode: Mode = "time") -> dict[str, Any]:
        """Seconds, kB or asked names of each module that is not the standard library's."""
        answer = self(*modules, mode=mode)
        assert answer["ok"], answer["failure"]
        field = {"time": "seconds", "memory": "kb", "edges": "asks"}[mode]
        return {module["name"]: module[field] for module in answer["modules"] if not module["stdlib"]}


def check_figures(answer: dict[str, Any]) -> None:
    """No figure of any answer is negative, not a number or minus zero."""
    figures = [answer[name] for name in ("wall_s", "cpu_s", "rss_mb")]
    figures += [module[name] for module in answer["modules"] for name in ("seconds", "kb")]
    for figure in figures:
        assert figure is None or (figure >= 0 and math.copysign(1, figure) > 0 and math.isfinite(figure))


@pytest.fixture
def probe(runtime: ForkRuntime) -> Probe:
    return Probe(runtime)


# ---- packages that print, exit or crash ----


@pytest.mark.parametrize("package", ["p_print", "p_close", "p_devnull"])
def test_what_a_package_does_to_its_streams_does_not_reach_the_result(probe: Probe, package: str) -> None:
    """It is measured: results have a way of their own."""
    answer = probe(package)

    assert answer["ok"]
    assert package in [module["name"] for module in answer["modules"]]
    assert 0 < answer["modules"][-1]["seconds"] < 5


@pytest.mark.parametrize(
    ("package", "kind", "detail"),
    [
        ("p_exit0", "exit", "SystemExit(0)"),
        ("p_osexit", "no-result", "exit code 0, without a result"),
        ("p_exit3", "no-result", "exit code 3, without a result"),
        ("p_base", "raised", "X"),
        ("p_kbd", "raised", "KeyboardInterrupt"),
        ("p_segv", "signal", "SIGSEGV"),
        ("absent", "raised", "No module named 'absent'"),
    ],
)
def test_a_package_that_fails_says_how(probe: Probe, package: str, kind: str, detail: str) -> None:
    """Exits, crashes and exceptions of every sort are told apart, and only that package fails."""
    answer = probe(package)

    assert not answer["ok"]
    assert answer["failure"]["kind"] == kind
    assert detail in answer["failure"]["detail"]


def test_all_wild_packages_in_a_row_give_one_record_each(probe: Probe) -> None:
    """Nine packages, nine answers; the well-behaved one has the 50 MB that it takes."""
    answers = {package: probe(package, mode="memory") for package in WILD}

    assert len(answers) == 9
    assert {package for package, answer in answers.items() if answer["ok"]} == {
        "p_print",
        "p_close",
        "p_devnull",
        "p_ok",
    }
    assert answers["p_ok"]["modules"][-1]["kb"] == pytest.approx(48_828, abs=200)
    assert answers["p_ok"]["rss_mb"] == pytest.approx(50, abs=0.5)


def test_what_was_measured_before_a_crash_is_kept(probe: Probe) -> None:
    """The modules that were loaded whole before the process died are in the answer."""
    answer = probe("p_late_crash")

    assert answer["failure"] == {"kind": "signal", "detail": "SIGSEGV"}
    seconds = {module["name"]: module["seconds"] for module in answer["modules"]}
    assert list(seconds) == ["slow_leaf", "p_empty"]
    assert seconds["slow_leaf"] >= 0.29


def test_a_package_that_hangs_is_ended(probe: Probe) -> None:
    """After its time, with what was measured before."""
    answer = probe("p_hang", timeout=1.5)

    assert answer["failure"]["kind"] == "timeout"
    assert [module["name"] for module in answer["modules"]] == ["p_empty"]


def test_a_package_that_takes_too_much_memory_is_ended(probe: Probe) -> None:
    """Soon after it is over its limit, with what was measured before."""
    answer = probe("p_eat", memory=200_000_000)

    assert answer["failure"]["kind"] == "memory"
    assert [module["name"] for module in answer["modules"]] == ["p_empty"]


def test_a_package_that_forks_changes_directory_or_starts_processes_spoils_nothing(probe: Probe) -> None:
    """One answer each; what it started is ended with it."""
    assert probe("p_fork")["ok"]
    assert probe("p_chdir")["ok"]
    assert probe("p_spawn")["ok"]
    assert probe("p_ok")["ok"]
    assert b"sleep\x00304\x00" not in read_command_lines(Path("/proc").glob("[0-9]*"))
    assert list(probe.runtime.folder.glob("probe-*")) == []


def test_a_failure_among_several_names_its_module(probe: Probe) -> None:
    """Modules are imported in order, up to the first that fails."""
    answer = probe("p_empty", "p_base", "p_ok")

    assert answer["failure"] == {"kind": "raised", "detail": "import p_base: p_base.X"}
    assert [module["name"] for module in answer["modules"]] == ["p_empty"]


# ---- misleading figures ----


def test_a_package_that_replaces_the_clocks_is_timed_truly(probe: Probe) -> None:
    """The probe's clocks are its own since before anything was imported."""
    answer = probe("p_time")

    assert 0 < answer["modules"][-1]["seconds"] < 1
    assert 0 < answer["wall_s"] < 1


def test_memory_that_fell_is_zero_with_the_raw_value_beside_it(probe: Probe) -> None:
    """A package that gives back what another holds costs none; what was seen is kept. The other costs what it held."""
    held, free = probe("p_free", mode="memory")["modules"]

    assert (held["name"], free["name"]) == ("p_held", "p_free")
    assert held["kb"] == pytest.approx(40_000_000 / 1024, abs=200)
    assert "raw_kb" not in held
    assert free["kb"] == 0
    assert free["raw_kb"] == pytest.approx(-40_000_000 / 1024, abs=200)


def test_a_package_that_trims_the_heap_has_no_figure_below_zero(probe: Probe) -> None:
    """Whatever it gave back: a figure is the raw one, or zero with the raw one beside it."""
    module = probe("p_trim", mode="memory")["modules"][-1]

    assert module["kb"] == max(0, module.get("raw_kb", module["kb"]))


def test_an_empty_package_costs_next_to_nothing(probe: Probe) -> None:
    """Zero or more seconds, and no memory to speak of."""
    assert probe.figures("p_empty")["p_empty"] >= 0
    assert probe.figures("p_empty", mode="memory")["p_empty"] < 200


def test_a_lazy_module_stays_asleep_until_it_is_asked_for(probe: Probe) -> None:
    """A package that loads its heavy part lazily is light; the part itself, by its own name, is not."""
    assert probe.figures("lazypk", mode="memory")["lazypk"] < 1000
    assert probe("lazypk", mode="plain")["rss_mb"] < 1
    assert probe.figures("lazypk.heavy", mode="memory")["lazypk.heavy"] == pytest.approx(78_125, abs=200)
    assert probe("lazypk.heavy", mode="plain")["rss_mb"] == pytest.approx(80, abs=1)
    assert "getter.part" not in probe.figures("getter")


def test_a_lazy_module_that_an_import_wakes_is_that_modules_own_cost(probe: Probe) -> None:
    """It is charged to itself; who woke it has asked for it."""
    memory = probe.figures("waker", mode="memory")
    asks = probe.figures("waker", mode="edges")

    assert memory["waker"] < 1000
    assert memory["lazypk.heavy"] == pytest.approx(78_125, abs=200)
    assert "lazypk.heavy" in asks["waker"]


# ---- exclusive figures and edges ----


def test_seconds_are_exclusive(probe: Probe) -> None:
    """Each module has what its own body took, not what it imported: the sum is no more than the whole."""
    answer = probe("slow_root")
    seconds = {module["name"]: module["seconds"] for module in answer["modules"]}

    assert seconds["slow_root"] >= 0.19
    assert seconds["slow_root.inner"] >= 0.09
    assert seconds["slow_leaf"] >= 0.29
    assert sum(seconds.values()) <= answer["wall_s"] - answer["waited_s"] + 0.002


def test_a_failed_optional_imports_time_stays_with_its_importer(probe: Probe) -> None:
    """What it loaded successfully is its own; what it wasted is the importer's; it is no module itself."""
    answer = probe("optional")
    seconds = {module["name"]: module["seconds"] for module in answer["modules"] if not module["stdlib"]}

    assert set(seconds) == {"optional", "slow_leaf"}
    assert seconds["optional"] >= 0.19
    assert seconds["slow_leaf"] >= 0.29
    assert sum(seconds.values()) <= answer["wall_s"] - answer["waited_s"] + 0.002


def test_parents_of_a_module_are_modules_of_their_own(probe: Probe) -> None:
    """Importing a.b.c loads a and a.b, each with its own figure and file."""
    answer = probe("deep.middle.end")
    files = {module["name"]: Path(module["file"]).name for module in answer["modules"]}

    assert files == {
        "deep": "__init__.py",
        "deep.middle": "__init__.py",
        "deep.middle.sibling": "sibling.py",
        "deep.other": "__init__.py",
        "deep.middle.end": "end.py",
    }


def test_the_baseline_is_not_measured(probe: Probe) -> None:
    """What every executor has loaded is in no answer; other modules of the standard library are marked."""
    assert probe("json")["modules"] == []
    answer = probe("wave")
    assert answer["modules"][-1] == answer["modules"][-1] | {"name": "wave", "stdlib": True}


def test_edges_are_what_a_body_asked_for(probe: Probe) -> None:
    """Import statements of every form, also of what was loaded already, relative and dynamic ones, and no failed ones."""
    asks = probe.figures("second_asker", mode="edges")

    assert set(asks["deep.middle.end"]) == {"deep.middle", "deep.middle.sibling", "deep.other"}
    assert set(asks["asker"]) >= {"deep.middle.end", "slow_leaf", "deep.middle", "deep.other", "p_empty", "getter"}
    assert not {"deep.absent", "asker"} & set(asks["asker"])
    assert {"asker", "slow_leaf"} <= set(asks["second_asker"])
    assert probe.figures("optional", mode="edges")["optional"] == ["slow_leaf"]


def test_the_closure_over_edges_is_what_was_loaded(probe: Probe) -> None:
    """Following the edges and parents from a root gives exactly the modules of its process."""
    for root in ("second_asker", "star", "optional", "deep.middle.end", "waker", "slow_root"):
        asks = probe.figures(root, mode="edges")
        reached, waiting = set[str](), {root}
        while waiting:
            name = waiting.pop()
            if name in asks and name not in reached:
                reached.add(name)
                waiting |= set(asks[name]) | {name.rpartition(".")[0]}

        assert reached == set(asks)


def test_compiled_code_asks_too(probe: Probe) -> None:
    """It loads modules past the function of the import statement."""
    assert probe.figures("compiled", mode="edges")["compiled"] == ["slow_leaf"]


def test_a_star_import_asks_for_the_modules_that_it_takes(probe: Probe) -> None:
    """Submodules that `__all__` names are loaded, and asked for."""
    assert {"starred", "starred.one", "deep.middle"} <= set(probe.figures("star", mode="edges")["star"])


def test_what_a_package_loads_when_it_is_asked_for_is_asked_for_by_each_who_takes_it(probe: Probe) -> None:
    """Also by the second: a class or function comes from the module that defines it, whoever had that loaded."""
    asks = probe.figures("second_reader", mode="edges")

    assert {"shelf", "shelf.book", "shelf.lend"} <= set(asks["first_reader"])
    assert asks["second_reader"] == ["first_reader", "shelf", "shelf.book", "shelf.lend"]


def test_imports_in_other_threads_are_seen(probe: Probe) -> None:
    """A module that is loaded by a thread has its own figure."""
    seconds = probe.figures("threaded")

    assert seconds["slow_leaf"] >= 0.29
    assert {"threaded", "slow_leaf", "p_empty"} == set(seconds)


def test_threads_that_stay_are_counted(probe: Probe) -> None:
    """A process with more than one thread cannot be forked: the answer says how many there are."""
    assert probe("keeper")["threads"] == 2
    assert probe("p_empty")["threads"] == 1


def test_plain_measures_the_whole_without_a_hook(probe: Probe) -> None:
    """No modules, only what all of it took."""
    answer = probe("slow_root", mode="plain")

    assert answer["modules"] == []
    assert answer["wall_s"] >= 0.59


def test_a_module_may_have_any_name(probe: Probe) -> None:
    """What the probe writes cannot be mistaken for a module."""
    assert set(probe.figures("result")) == {"result"}


# ---- isolation ----


@pytest.mark.skipif(os.geteuid() != 0, reason="leaving the network needs root")
def test_a_measured_process_has_a_loopback_device_and_no_other_network(probe: Probe) -> None:
    """It can talk to itself, and to nothing else."""
    alone, outside = probe("p_net"), probe("p_out")

    assert (alone["ok"], alone["network"]) == (True, "none")
    assert "unreachable" in outside["failure"]["detail"]


def test_a_measured_process_ends_with_who_measures(probe: Probe, tmp_path: Path) -> None:
    """Ended in the middle of a measurement, the command takes the measured process along."""
    command = [sys.executable, "-m", "worker.cli", "probe", "--rootfs", str(probe.runtime.rootfs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin
        running.stdin.write('{"id": 1, "modules": ["p_hang"]}\n')
        running.stdin.flush()

        def measured() -> list[int]:
            children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
            return [
                int(pid)
                for pid in children
                if any(b"p_hang" in line for line in read_command_lines([Path("/proc", pid)]))
            ]

        pid = wait_for(measured)[0]
        time.sleep(0.3)
        running.kill()

    wait_for(lambda: not alive(pid))
