"""Packages that misbehave while they are imported: each spoils only itself, and what happened to it is said.

Each is a distribution of its own, a wheel that pip has installed in one virtual environment. It first imports `tame`, and then does what it
is called after.
"""

import os
import pwd
import py_compile
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from pipeline.analyze import Measurements, read_measurements
from pipeline.processes import ProbeFailure, ProbeStream
from readie.errors import Unavailable
from tests.sandboxes import alive, wait_for
from tests.tiny import install_wheels, make_rootfs, sandbox_of
from worker.fork import ForkRuntime, descendants
from worker.measure import Mode, ProbeRequest, measure

MARK = f"readie-test-{uuid4().hex[:12]}"  # in the names of files that packages leave where they should not
NAP = f"{20000 + os.getpid() % 10000}.25"  # what processes sleep that packages start
HOME = pwd.getpwuid(os.geteuid()).pw_dir

#: Imported whole, whatever they do besides.
IMPORTED = {
    # streams and descriptors
    "binary": "import os, sys\nos.write(1, bytes(range(256)) * 9)\nos.write(2, b'\\n=\\t{}\\n\\0')",
    "flood": "import os\nfor _ in range(300): os.write(1, b'x' * 1_000_000)",
    "no_streams": "import sys\nsys.stdout = sys.stderr = sys.stdin = None",
    "closed_streams": "import sys\nfor stream in (sys.stdin, sys.stdout, sys.stderr): stream.close()",
    "reads_stdin": "import sys\nassert sys.stdin.read() == ''",
    "closes_1024": "import os\nos.closerange(3, 1024)",
    "closes_all": "import os\nos.closerange(0, 70_000)\nimport late",
    "opens_all": """
        import os, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        held = []
        try:
            while True: held.append(open(os.devnull))
        except OSError: pass
    """,
    "closes_and_opens_all": """
        import os
        os.closerange(0, 70_000)
        held = []
        while len(held) < 10_000:
            try: held.append(os.open('/proc/self/statm', os.O_RDONLY))
            except OSError: break
    """,
    # processes
    "forks": "import os\nif not os.fork(): import late\nelse: os.wait()\nimport late",
    "forks_and_leaves": f"import os, time\nif not os.fork(): time.sleep({NAP})",
    "daemon": f"""
        import os, time
        if not os.fork():
            os.setsid()
            if not os.fork():
                os.environ.clear()
                os.closerange(0, 1024)
                time.sleep({NAP})
            os._exit(0)
        os.wait()
    """,
    "detached": f"import subprocess\nsubprocess.Popen(['sleep', '{NAP}'], start_new_session=True, env={{}})",
    "twins": f"""
        import os, time
        for _ in range(20):
            if not os.fork():
                os.setsid()
                time.sleep({NAP})
    """,
    "threads": f"""
        import threading, time
        threading.Thread(target=time.sleep, args=({NAP},), daemon=True).start()
        threading.Thread(target=time.sleep, args=({NAP},)).start()
    """,
    "busy_thread": """
        import sys, threading
        def load():
            while True:
                sys.modules.pop('late', None)
                import late
        threading.Thread(target=load, daemon=True).start()
    """,
    # what belongs to the process
    "elsewhere": "import os\nos.chdir('/')\nos.environ.clear()\nos.umask(0o777)",
    "no_folder": "import os, shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)",
    "removes_all": "import os, shutil, late\nshutil.rmtree(os.path.dirname(late.__file__), ignore_errors=True)",
    "no_result": "import os\nos.unlink('../result')\nopen('../result', 'w').write('= {}')",
    "locks_out": "import os\nos.mkdir('x')\nopen('x/y', 'w')\nos.chmod('x', 0)\nos.chmod('.', 0)\nos.chmod('..', 0)",
    "no_file_size": "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    "no_files": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
    "no_room": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))",
    "handlers": """
        import signal
        for number in signal.valid_signals():
            try: signal.signal(number, lambda *_: 1 / 0)
            except (OSError, ValueError): pass
    """,
    "deaf": "import signal\nfor n in (1, 2, 3, 14, 15): signal.signal(n, signal.SIG_IGN)",
    # what belongs to the interpreter
    "own_import": "import builtins\noriginal = builtins.__import__\nbuiltins.__import__ = lambda *a, **k: original(*a, **k)",
    "no_import": "import builtins\nbuiltins.__import__ = None",
    "pure_import": "import builtins, importlib\nbuiltins.__import__ = importlib.__import__\nimport late",
    "no_importlib": """
        import importlib, importlib.util, importlib._bootstrap
        importlib.import_module = importlib.util.find_spec = lambda *_: 1 / 0
    """,
    "no_finders": "import sys\nsys.meta_path.clear()\nsys.path_hooks.clear()\nsys.path.clear()",
    "bad_finder": """
        import sys
        class Finder:
            def find_spec(self, *_): raise MemoryError
        sys.meta_path.insert(0, Finder())
    """,
    "few_modules": "import sys\nfor name in set(sys.modules) - {__name__, 'sys'}: del sys.modules[name]",
    "other_modules": "import sys\nsys.modules = dict(sys.modules)",
    "other_module": "import sys\nclass Odd:\n    __slots__ = ()\nsys.modules[__name__] = Odd()",
    "odd_module": """
        import sys
        class Odd:
            def __getattribute__(self, name): raise SystemExit(name)
        sys.modules[__name__] = Odd()
    """,
    "no_clocks": """
        import time
        for name in dir(time):
            if callable(getattr(time, name)): setattr(time, name, lambda *_: -1e9)
    """,
    "own_gc": "import gc\ngc.enable()\ngc.set_threshold(1)\ngc.disable = gc.collect = gc.isenabled = None",
    "shallow": "import sys\nsys.setrecursionlimit(60)",
    "audited": """
        import sys
        ready = False
        def audit(*_):
            if ready: raise PermissionError
        sys.addaudithook(audit)
        ready = True
    """,
    "no_os": "import os\nos._exit = os.write = os.open = os.close = os.getpid = os.listdir = os.pread = None",
    "no_builtins": "import builtins\nbuiltins.open = builtins.len = builtins.tuple = builtins.type = None",
    "no_json": "import json\njson.dumps = json.JSONEncoder.encode = json.JSONEncoder.iterencode = None",
    "twice": "import sys, slow\ndel sys.modules['slow']\nimport slow",
    "odd_names": """
        import importlib, sys
        class Loader:
            def find_spec(self, name, *_):
                import importlib.machinery
                return importlib.machinery.ModuleSpec(name, self) if name[:1] in '=\\t\\ud800' else None
            def create_module(self, spec): pass
            def exec_module(self, module): pass
        sys.meta_path.append(Loader())
        for name in ('=', '\\t1', '=\\n5\\tx', '=\\0', '\\ud800'): importlib.import_module(name)
    """,
    # others
    "kills_parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(os.getppid(), signal.SIGSTOP)",
    "kills_all": "import os\ntry: os.kill(-1, 9)\nexcept ProcessLookupError: pass",
    "writes": f"""
        import os, pwd, tempfile
        home, real = os.path.expanduser('~'), pwd.getpwuid(os.getuid()).pw_dir
        assert home != real
        for folder in (home, os.getcwd(), real, '/tmp', '/var/tmp', '/dev/shm', tempfile.gettempdir()):
            path = os.path.join(folder, '{MARK}')
            assert not os.path.exists(path), path
        for folder in {{home, real, '/tmp', '/var/tmp', '/dev/shm', tempfile.gettempdir()}}:
            open(os.path.join(folder, '{MARK}'), 'w').write('x')
        tempfile.mkdtemp()
    """,
}

#: Not imported → of what kind the failure is, and what its text has; the code.
FAILED = {
    "exits": ("exit", "SystemExit(0)", "import sys\nsys.exit(0)"),
    "exits_with_words": ("exit", "needs a licence", "import sys\nsys.exit('needs a licence')"),
    "exits_oddly": (
        "exit",
        "SystemExit",
        "class Code:\n    def __repr__(self): raise KeyboardInterrupt\nraise SystemExit(Code())",
    ),
    "ends": ("no-result", "exit code 0, without a result", "import os\nos._exit(0)"),
    "ends_with_3": ("no-result", "exit code 3, without a result", "import os\nos._exit(3)"),
    "another_program": ("no-result", "exit code 0, without a result", "import os\nos.execv('/bin/true', ['true'])"),
    "goes_to_background": (
        "no-result",
        "exit code 0, without a result",
        f"import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nimport late\ntime.sleep({NAP})",
    ),
    "crashes": ("signal", "SIGSEGV", "import ctypes\nctypes.string_at(0)"),
    "aborts": ("signal", "SIGABRT", "import os\nos.abort()"),
    "kills_group": ("signal", "SIGKILL", "import os, signal\nos.killpg(0, signal.SIGKILL)"),
    "alarm": ("signal", "SIGALRM", "import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\ntime.sleep(60)"),
    "cpu_limit": (
        "signal",
        "SIGXCPU",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass",
    ),
    "leads_already": ("raised", "PermissionError: [Errno 1] Operation not permitted", "import os\nos.setsid()"),
    "interrupts": ("raised", "KeyboardInterrupt", "raise KeyboardInterrupt"),
    "base": ("raised", "Base: text", "class Base(BaseException): pass\nraise Base('text')"),
    "mute": (
        "raised",
        "Mute: its text cannot be had: SystemExit",
        "class Mute(Exception):\n    def __str__(self): raise SystemExit\nraise Mute",
    ),
    "nameless": (
        "raised",
        "Plain",
        """
        class Meta(type):
            def __getattribute__(self, name): raise KeyboardInterrupt
        class Plain(Exception, metaclass=Meta): pass
        raise Plain
        """,
    ),
    "odd_text": ("raised", "ImportError: a?b c", "raise ImportError('a\\udc80b\\nc')"),
    "wordy": ("raised", "ValueError: xxxxxxxx", "raise ValueError('x' * 1_000_000)"),
    "deep": ("raised", "RecursionError", "def deep(): deep()\ndeep()"),
    "no_display": (
        "raised",
        "ImportError: this platform is not supported: no display name and no $DISPLAY",
        "raise ImportError('this platform is not supported: no display name and no $DISPLAY')",
    ),
    "no_gpu": (
        "raised",
        "OSError: libcuda-of-none.so.1: cannot open shared object file: No such file or directory",
        "import ctypes\nctypes.CDLL('libcuda-of-none.so.1')",
    ),
    "asks_a_person": ("raised", "EOFError: EOF when reading a line", "input('Accept the licence? ')"),
    "traced": (
        "raised",
        "KeyboardInterrupt",
        """
        import sys
        def trace(frame, *_):
            if 'importlib' not in frame.f_code.co_filename: raise KeyboardInterrupt
        sys.settrace(trace)
        import late
        """,
    ),
    "no_modules": ("raised", "KeyError: 'h_no_modules'", "import sys\nsys.modules.clear()"),
    "breaks_import": (
        "raised",
        "ZeroDivisionError",
        "import builtins\nbuiltins.__import__ = lambda *_, **__: 1 / 0\nimport late",
    ),
    "writes_beside": ("raised", "OSError: [Errno 30] Read-only file system", "open(__file__ + '.cache', 'w')"),
    "removes_another": (
        "raised",
        "OSError: [Errno 30] Read-only file system",
        "import late, os\nos.unlink(late.__file__)",
    ),
    "changes_python": (
        "raised",
        "OSError: [Errno 30] Read-only file system",
        f"import os\nopen(os.path.join(os.path.dirname(os.__file__), '{MARK}'), 'x')",
    ),
    "wants_too_much": ("raised", "MemoryError", "blob = bytearray(10**15)"),
    "handler_raises": (
        "raised",
        "InterruptedError: now",
        """
        import signal, time
        def now(*_): raise InterruptedError('now')
        signal.signal(signal.SIGALRM, now)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.001)
        time.sleep(60)
        """,
    ),
}

#: Ended by a limit of a second.
LATE = {
    "hangs": f"import time\ntime.sleep({NAP})",
    "stops": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "deaf_and_hangs": """
        import signal
        for number in signal.valid_signals():
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: pass
    """,
    "deadlock": """
        import threading
        def load():
            import h_deadlock.part
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    """,
    "becomes_sleep": f"import os\nos.execv('/bin/sleep', ['sleep', '{NAP}'])",
    "hangs_with_children": f"import os, time\nfor _ in range(3): os.fork()\ntime.sleep({NAP})",
}

#: Ended by a limit of 150 MB.
GREEDY = {
    "eats": "held = []\nwhile True: held.append(bytearray(b'x') * 1_000_000)",
    "maps": """
        import mmap, time
        held = []
        while True:
            held.append(mmap.mmap(-1, 4_000_000))
            held[-1].write(b'x' * 4_000_000)
    """,
    "children_eat": """
        import os, time
        for _ in range(4):
            if not os.fork():
                os.setsid()
                blob = b'x' * 60_000_000
                time.sleep(60)
        time.sleep(60)
    """,
}

EXTRA = {
    "tame": {"tame.py": "import time\ntime.sleep(0.02)"},  # on a busy machine up to 2 ms less were measured
    "late": {"late.py": ""},
    "slow": {"slow.py": "import time\ntime.sleep(0.1)"},
    "h_deadlock_part": {"h_deadlock/part.py": ""},
    "h_shares": {"h_shares.py": "held = bytearray(b'x') * 60_000_000\nimport os, time\nfor _ in range(3):\n    if not os.fork(): time.sleep(0.5); os._exit(0)\ntime.sleep(0.2)"},
    "h_caches": {"h_caches.py": "import os, pathlib\nfile = pathlib.Path(os.environ['XDG_CACHE_HOME'], 'fonts')\nif not file.exists():\n    file.write_text('x')\n    raise RuntimeError('computed')"},
    "h_fills": {"h_fills.py": "import os\nwith open('file', 'wb') as file:\n    for _ in range(2000): file.write(b'x' * 1_000_000)"},
}  # fmt: skip


def distributions() -> dict[str, dict[str, str]]:
    codes = IMPORTED | {name: code for name, (_, _, code) in FAILED.items()} | LATE | GREEDY
    made = {}
    for name, code in codes.items():
        lines = code.split("\n")
        margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        body = "\n".join(line[margin:] if not line[:margin].strip() else line for line in lines)
        made[f"h_{name}"] = {f"h_{name}/__init__.py": f"import tame\n{body}\n"}
    return made | EXTRA


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_rootfs(tmp_path_factory.mktemp("hostile") / "rootfs", {})
    install_wheels(made, distributions())
    return made


@pytest.fixture(scope="module")
def runtime(rootfs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkRuntime]:
    running = lighten(ForkRuntime(rootfs, tmp_path_factory.mktemp("runtime")))
    yield running
    running.close()


@pytest.fixture(scope="module")
def exposed(rootfs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkRuntime]:
    """A runtime on a host that lets nobody make namespaces."""
    running = lighten(ForkRuntime(rootfs, tmp_path_factory.mktemp("exposed")))
    running.__dict__["isolates"] = False
    yield running
    running.close()


def lighten(runtime: ForkRuntime) -> ForkRuntime:
    """Leaves of the executor's baseline what the probe needs: each of the many starts here is four times as fast."""
    path = runtime.bundle / "readie_executor.py"
    few = 'STANDARD_MODULES = """ctypes importlib.util inspect json mmap"""'
    text = re.sub(r'^STANDARD_MODULES = """.*?"""', few, path.read_text(), flags=re.DOTALL | re.MULTILINE)
    path.write_text(text)
    py_compile.compile(str(path), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    return runtime


def probe(
    runtime: ForkRuntime, *modules: str, mode: Mode = "time", timeout: float = 20, memory: int = 10**9
) -> dict[str, Any]:
    """One measurement, after which nothing of it is left."""
    request = ProbeRequest(id=1, modules=list(modules), mode=mode)
    answer = measure(runtime, request, timeout=timeout, memory=memory)
    wait_for(lambda: leftovers(runtime) == [])  # without namespaces the kernel ends orphans a little later
    return answer


def leftovers(runtime: ForkRuntime) -> list[str]:
    """Processes that carry the mark of this module's measurements, and folders of measurements."""
    found = [str(path) for path in runtime.folder.glob("probe-*")]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if str(runtime.bundle).encode() in line or NAP.encode() in line:
            found.append(f"{path}: {line!r}")
    return found


def figures(answer: dict[str, Any]) -> dict[str, float]:
    """Seconds of each module that is not the standard library's."""
    return {module["name"]: module["seconds"] for module in answer["modules"] if not module["stdlib"]}


# ---- each spoils only itself ----


@pytest.mark.parametrize("name", IMPORTED)
def test_one_that_can_be_imported_is_measured(runtime: ForkRuntime, name: str) -> None:
    """Whatever it does to its process, it has true figures, and nothing of it is left."""
    answer = probe(runtime, f"h_{name}")

    assert answer["failure"] is None
    assert answer["ok"]
    measured = figures(answer)
    assert {"tame", f"h_{name}"} <= set(measured)
    assert 0.01 <= measured["tame"] < 2
    assert 0 <= measured[f"h_{name}"] < 5
    assert sum(measured.values()) < answer["wall_s"] * 1.05 + 0.01


@pytest.mark.parametrize("name", FAILED)
def test_one_that_fails_says_how(runtime: ForkRuntime, name: str) -> None:
    """The kind and the text of what happened are kept, and what was measured before stays."""
    kind, text, _ = FAILED[name]
    answer = probe(runtime, f"h_{name}")

    assert (answer["ok"], answer["failure"]["kind"]) == (False, kind)
    assert text in answer["failure"]["detail"]
    assert len(answer["failure"]["detail"]) <= 65536
    assert 0.01 <= figures(answer)["tame"] < 2
    assert f"h_{name}" not in figures(answer)


@pytest.mark.parametrize("name", LATE)
def test_one_that_never_ends_is_ended(runtime: ForkRuntime, name: str) -> None:
    """After its time, with all that it started; what was measured before stays."""
    answer = probe(runtime, f"h_{name}", timeout=1)

    assert answer["failure"] == {"kind": "timeout", "detail": "it took longer than 1 s"}
    assert list(figures(answer)) == (["tame", "h_deadlock.part"] if name == "deadlock" else ["tame"])


@pytest.mark.parametrize("name", GREEDY)
def test_one_that_takes_memory_without_end_is_ended(runtime: ForkRuntime, name: str) -> None:
    """Memory counts that it shares, and that its children have; what was measured before stays."""
    answer = probe(runtime, f"h_{name}", memory=150_000_000)

    assert answer["failure"]["kind"] == "memory"
    assert list(figures(answer)) == ["tame"]


def test_the_next_measurement_is_as_if_nothing_had_been(runtime: ForkRuntime) -> None:
    """After all of them, a tame package costs what it did, and finds the same process, folder and signals."""
    answer = probe(runtime, "tame", "late", mode="plain")

    assert answer["ok"]
    assert answer["threads"] == 1
    assert 0.01 <= answer["wall_s"] < 2


# ---- what exactly is measured ----


def test_a_copy_that_goes_on_importing_counts_nothing(runtime: ForkRuntime) -> None:
    """Of a process that forks, only the original measures."""
    answer = probe(runtime, "h_forks")

    assert sorted(figures(answer)) == ["h_forks", "late", "tame"]


def test_a_module_that_is_loaded_twice_costs_both(runtime: ForkRuntime) -> None:
    """Its time is the sum, for that is what its importer's users wait."""
    assert figures(probe(runtime, "h_twice"))["slow"] >= 0.19


def test_edges_are_seen_past_other_import_functions(runtime: ForkRuntime) -> None:
    """What is loaded past the patched `__import__` has an importer all the same."""
    answer = probe(runtime, "h_pure_import", mode="edges")
    asks = {module["name"]: module["asks"] for module in answer["modules"]}

    assert {"tame", "late"} <= set(asks["h_pure_import"])


def test_edges_of_what_was_loaded_before_a_crash_are_kept(runtime: ForkRuntime) -> None:
    """Files and edges are known of each module as soon as it is loaded."""
    answer = probe(runtime, "h_own_import", "h_crashes", mode="edges")
    known = {module["name"]: module for module in answer["modules"]}

    assert answer["failure"] == {"kind": "signal", "detail": "SIGSEGV"}
    assert known["h_own_import"]["asks"] == ["tame"]
    assert known["h_own_import"]["file"].endswith("/h_own_import/__init__.py")


def test_memory_is_measured_after_all_descriptors_were_closed(runtime: ForkRuntime) -> None:
    """The probe opens again what it needs."""
    answer = probe(runtime, "h_closes_all", mode="memory")

    assert answer["ok"]
    assert {module["name"] for module in answer["modules"]} >= {"tame", "late", "h_closes_all"}
    assert 0 < answer["rss_mb"] < 5


def test_threads_that_stay_are_counted(runtime: ForkRuntime) -> None:
    """Daemons and others: neither keeps the measurement from ending."""
    assert probe(runtime, "h_threads")["threads"] == 3


def test_odd_names_are_escaped(runtime: ForkRuntime) -> None:
    """A module may be called like the probe's own words, or what no line can carry."""
    names = {module["name"] for module in probe(runtime, "h_odd_names")["modules"]}

    assert {"=", "\\t1", "=\\n5\\tx", "=\\x00", "\\ud800", "h_odd_names"} <= names


def test_memory_that_children_share_counts_once(runtime: ForkRuntime) -> None:
    """Three copies of a process with 60 MB are within 150 MB."""
    assert probe(runtime, "h_shares", memory=150_000_000)["ok"]


def test_the_last_of_several_roots_may_fail(runtime: ForkRuntime) -> None:
    """Those before it are measured, those after it are not tried."""
    answer = probe(runtime, "late", "h_base", "slow")

    assert answer["failure"]["detail"] == "import h_base: h_base.Base: text"
    assert list(figures(answer)) == ["late", "tame"]


# ---- nothing is left ----


def test_what_is_written_outside_is_forgotten(runtime: ForkRuntime) -> None:
    """Neither the home, nor shared folders, nor the next measurement see it."""
    for _ in range(2):
        assert probe(runtime, "h_writes")["failure"] is None
    assert not any(Path(folder, MARK).exists() for folder in (HOME, "/tmp", "/var/tmp", "/dev/shm"))


def test_what_is_installed_stays_as_it_was(runtime: ForkRuntime, rootfs: Path) -> None:
    """No package changes the root filesystem for those after it, also where it is silent about having tried."""

    def installed() -> dict[Path, tuple[int, int]]:
        states = {path: path.lstat() for path in rootfs.rglob("*")}
        return {path: (state.st_size, state.st_mtime_ns) for path, state in states.items()}

    before = installed()
    for name in ("writes_beside", "removes_another", "changes_python", "removes_all"):
        assert probe(runtime, f"h_{name}")["ok"] == (name == "removes_all")

    assert installed() == before
    assert figures(probe(runtime, "late")) == {"late": pytest.approx(0, abs=1)}


def test_what_libraries_compute_once_is_kept(runtime: ForkRuntime) -> None:
    """The shared cache alone can be written: what one measurement left there, the next one finds."""
    assert [probe(runtime, "h_caches")["failure"] is None for _ in range(2)] == [False, True]


def test_what_may_be_written_is_limited(runtime: ForkRuntime) -> None:
    """A package cannot fill the disk."""
    failure = probe(runtime, "h_fills")["failure"]

    assert failure["detail"] == "import h_fills: OSError: [Errno 28] No space left on device"


def test_the_real_process_ids_are_out_of_reach(runtime: ForkRuntime) -> None:
    """A package that ends everything that it can see ends nothing."""
    with subprocess.Popen(["sleep", "60"]) as bystander:
        assert probe(runtime, "h_kills_all")["ok"]
        assert probe(runtime, "h_kills_parent")["ok"]
        assert alive(bystander.pid)
        bystander.kill()


@pytest.mark.parametrize(
    "name",
    ["forks_and_leaves", "daemon", "detached", "twins", "goes_to_background", "kills_parent", "hangs_with_children"],
)
def test_without_namespaces_processes_end_as_well(exposed: ForkRuntime, name: str) -> None:
    """A guard that may not isolate still ends everything, also where a package has killed its parent."""
    answer = probe(exposed, f"h_{name}", timeout=1)

    assert next(iter(figures(answer))) == "tame"
    # The kernel ends what lost its parent, at once or a little later.
    assert name != "kills_parent" or answer["failure"] in (None, {"kind": "signal", "detail": "SIGKILL"})
    assert probe(exposed, "tame")["network"] == "host"


def test_everything_ends_with_the_worker(rootfs: Path) -> None:
    """A worker that is killed while it measures takes along what was measured, daemons too."""
    command = [sys.executable, "-m", "worker.cli", "probe", "--rootfs", str(rootfs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin
        running.stdin.write('{"id": 1, "modules": ["h_daemon", "h_hangs"]}\n')
        running.stdin.flush()

        def measured() -> list[int]:
            below = descendants(running.pid)
            return below if len(below) >= 4 else []  # two of the guard, the measured one, and the daemon

        pids = wait_for(measured)
        running.kill()
    wait_for(lambda: not any(map(alive, pids)))


# ---- the stream of measurements ----


class TestStream:
    """`readie-worker probe`, as the pipeline runs it."""

    def test_a_worker_that_was_killed_is_started_again(self, rootfs: Path) -> None:
        """The request that it had is asked once more."""
        with ProbeStream(sandbox_of(rootfs)) as stream:
            assert stream.ask(["tame"], "time").ok
            assert stream._process
            stream._process.send_signal(signal.SIGKILL)
            stream._process.wait()

            assert stream.ask(["tame"], "time").ok

    def test_a_worker_that_says_nothing_is_started_again(self, rootfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Here one that is stopped; nobody waits for it for ever."""
        with ProbeStream(sandbox_of(rootfs)) as stream:
            patience_s, start = stream._patience_s, stream._start

            def start_patiently() -> "subprocess.Popen[bytes]":
                stream._patience_s = patience_s  # the next one has its time to start
                return start()

            monkeypatch.setattr(stream, "_start", start_patiently)
            assert stream.ask(["tame"], "time").ok
            assert stream._process
            stopped, stream._patience_s = stream._process, 5.0
            stopped.send_signal(signal.SIGSTOP)

            assert stream.ask(["tame"], "time").ok
            assert stopped.returncode == -signal.SIGKILL

    def test_a_request_that_ends_its_worker_twice_has_failed(self, rootfs: Path) -> None:
        """The analysis goes on: the worker itself can run."""
        with ProbeStream(sandbox_of(rootfs)) as stream:
            real = stream._command
            code = "import sys; line = sys.stdin.readline(); sys.exit(3) if 'h_ends' in line else None; "
            code += "import subprocess; subprocess.run(sys.argv[1:], input=line.encode())"
            stream._command = [sys.executable, "-c", code, *real]

            answer = stream.ask(["h_ends"], "time")

            assert answer.failure == ProbeFailure("no-result", "the worker that measured it ended, twice")
            assert stream.ask(["tame"], "time").ok

    def test_a_worker_that_cannot_run_is_named(self, tmp_path: Path) -> None:
        """A root filesystem that has no Python is one error, not one for each module."""
        (tmp_path / "bin").mkdir()
        with ProbeStream(sandbox_of(tmp_path)) as stream, pytest.raises(Unavailable, match="not an executable"):
            stream.ask(["tame"], "time")


# ---- the analysis of a root filesystem ----

ANALYSED = {
    "killer": {"killer.py": "import tame, os\nos.kill(os.getppid(), 9)\nos.closerange(0, 70_000)"},
    "daemon": {"daemon.py": f"import os, time\nif not os.fork(): os.setsid(); time.sleep({NAP})"},
    "eater": {"eater.py": "import only_eaten\nheld = []\nwhile True: held.append(bytearray(b'x') * 1_000_000)"},
    "only-eaten": {"test_eaten.py": "", "only_eaten.py": "import test_eaten"},
    # Three top-level names, which share a process: the first spoils the import functions, the last never ends.
    "spoiler": {
        "sp_a.py": "import importlib\nimportlib.import_module = lambda *_: None",
        "sp_b.py": "held = bytearray(b'x') * 20_000_000",
        "sp_c.py": f"import time\ntime.sleep({NAP})",
    },
    # The first ends the process of both.
    "ender": {"en_a.py": "import os\nos._exit(0)", "en_b.py": "held = bytearray(b'x') * 10_000_000"},
    "writer": {"writer.py": f"import os\npath = os.path.expanduser('~/{MARK}')\nopen(path, 'x')"},
    "tame": {"tame.py": "import time\ntime.sleep(0.02)"},
}


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> Measurements:
    """What the command line measures of them, with its temporary files in a folder of its own, which stays empty."""
    folder = tmp_path_factory.mktemp("analysed")
    rootfs = make_rootfs(folder / "rootfs", {})
    install_wheels(rootfs, ANALYSED)
    for name in ("out", "tmp"):
        (folder / name).mkdir()
    (folder / "out" / "corpus.jsonl").touch()
    places = ["--rootfs", str(rootfs), "--out", str(folder / "out")]
    limits = ["--timeout", "5", "--memory", "200Mi", "--repeats", "1"]
    command = [sys.executable, "-m", "pipeline", "analyze"]
    subprocess.run(
        [*command, *places, *limits],
        check=True,
        env=os.environ | {"TMPDIR": str(folder / "tmp")},
        stderr=subprocess.PIPE,
    )
    assert list((folder / "tmp").iterdir()) == []
    return read_measurements(folder / "out" / "measurements.parquet")


class TestAnalysis:
    """`readie-pipeline analyze` measures everything that can be, and lists what happened to the rest."""

    def test_what_failed_is_listed_with_what_happened(self, analysed: Measurements) -> None:
        """Module, kind, detail and distribution, of exactly those that cannot be imported."""
        listed = {failure.module: failure for failure in analysed.info.failures}

        assert {name: (failure.kind, failure.distribution) for name, failure in listed.items()} == {
            "eater": ("memory", "eater"),
            "sp_c": ("timeout", "spoiler"),
            "en_a": ("no-result", "ender"),
        }
        assert listed["sp_c"].detail == "it took longer than 5 s"

    def test_everything_else_is_measured(self, analysed: Measurements) -> None:
        """Also what shares a process with a spoiler, and what only a failed one imports."""
        items = {item.key: item for item in analysed.items}

        assert set(items) == {
            *("daemon", "en_b", "killer", "only_eaten", "sp_a", "sp_b", "tame", "test_eaten", "writer"),
        }
        assert items["sp_b"].size_mb == pytest.approx(20, abs=0.5)
        assert items["en_b"].size_mb == pytest.approx(10, abs=0.5)
        assert items["killer"].dependencies == {"tame"}
