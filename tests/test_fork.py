"""The fork runtime: zygotes and their clones, limits, and that nothing stays behind."""

import gc
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import packaging.markers
import pytest

from readie.errors import CallCancelled, RuntimeUnavailable
from readie.manifest import CheckpointSpec
from tests.sandboxes import Ran, alive, make_rootfs, run, site_packages, wait_for, write_package
from worker.bundle import fingerprint, make_bundle
from worker.fork import ForkRuntime
from worker.runtime import SaveFailed, StartFailed, Stop

PACKAGES = {
    "heavy": "import time; time.sleep(0.4)",
    "frozen": """
        import os, random, tempfile, time, uuid
        TOKEN = uuid.uuid4().hex
        START = time.time()
        TMP = tempfile.mkdtemp()
        GPU = os.path.exists("/dev/nvidia0")
        def draw(): return random.random(), os.urandom(4), uuid.uuid4().hex
    """,
    "pause": "import time; time.sleep(2.5)",
    "blob": "data = b'x' * 20_000_000",
    "broken": "1 / 0",
    "quitter": "import sys; sys.exit(0)",
    "ender": "import os; os._exit(7)",
    "crasher": "import ctypes; ctypes.string_at(0)",
    "sleeper": "import time; time.sleep(60)",
    "s_thread": "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "s_child": "import subprocess; p = subprocess.Popen(['sleep', '600'])",
    "s_timewait": """
        import socket
        s = socket.create_server(("127.0.0.1", 0)); c = socket.create_connection(s.getsockname())
        a, _ = s.accept(); a.close(); c.close(); s.close()
        value = 1
    """,
    "s_tmp": "import tempfile; f = tempfile.TemporaryFile(); f.write(b'x' * 4096); f.flush(); value = 1",
    "p_ok": "value = 1",
    "connected": """
        import socket
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = socket.create_connection(server.getsockname())
            other, _ = server.accept()
    """,
    "listening": "import socket; server = socket.create_server(('127.0.0.1', 0))",
    "connected_here": """
        import os, socket, tempfile
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.join(tempfile.mkdtemp(), "here.sock")); server.listen()
            client = socket.socket(socket.AF_UNIX); client.connect(server.getsockname())
            other, _ = server.accept()
    """,
    "listening_here": """
        import socket, os
        server = socket.socket(socket.AF_UNIX); server.bind(f"\\0readie-{os.getpid()}"); server.listen()
    """,
    "s_pair": "import socket; pair = socket.socketpair(); value = 1",
    "handler": "import signal; signal.signal(signal.SIGTERM, lambda *_: None)",
    "p_devnull": "import sys; sys.stdout = open('/dev/null', 'w')",
    "lazypk": """
        import importlib.util as u, sys
        s = u.find_spec("lazypk.heavy")
        s.loader = u.LazyLoader(s.loader)
        m = u.module_from_spec(s)
        sys.modules[s.name] = m
        s.loader.exec_module(m)
    """,
    "lazypk/heavy.py": "blob = bytearray(80_000_000)",
}


def spec_of(*canonical: str, **fields: Any) -> CheckpointSpec:
    name = "_".join(canonical).replace(".", "-") or "empty"
    return CheckpointSpec(checkpoint_id=name, generation="g", canonical=canonical, **fields)


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rootfs(tmp_path_factory.mktemp("rootfs"), PACKAGES)


@pytest.fixture(scope="module")
def runtime(rootfs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkRuntime]:
    running = ForkRuntime(rootfs, tmp_path_factory.mktemp("runtime"))
    yield running
    running.close()


def load(runtime: ForkRuntime, *canonical: str, **fields: Any) -> CheckpointSpec:
    spec = spec_of(*canonical, **fields)
    if not runtime.alive(spec):
        runtime.load(spec, runtime.folder, timeout=60)
    return spec


def call(runtime: ForkRuntime, function: Any, *args: Any, **options: Any) -> Ran:
    return run(runtime, function, *args, **options)


# ---- restoring ----


def where_is(_thing: object) -> int:
    return os.getpid()


def where() -> tuple[int, int, bool]:
    return os.getpid(), os.getppid(), "heavy" in sys.modules


def test_a_clone_has_what_its_zygote_imported(runtime: ForkRuntime) -> None:
    """Each call gets a process of its own, forked from the zygote, with the canonical modules in it."""
    spec = load(runtime, "heavy")

    first, second = call(runtime, where, spec=spec).value, call(runtime, where, spec=spec).value

    zygote = runtime.zygotes[spec.key].process.pid
    assert first[0] != second[0]
    assert (zygote, True) == first[1:] == second[1:]


def test_a_restore_is_ten_times_faster_than_a_cold_start(runtime: ForkRuntime) -> None:
    """The fewest seconds to ready of a call that imports for 0.4 s, restored, are below a tenth of the cold ones."""
    spec = load(runtime, "heavy")

    restored = [call(runtime, where, spec=spec, modules=["heavy"]).result.phases.ready for _ in range(5)]
    cold = [call(runtime, where, modules=["heavy"]).result.phases.ready for _ in range(3)]

    assert min(cold) > 10 * min(restored)


def draw() -> Any:
    import multiprocessing
    import tempfile
    import time

    import frozen  # type: ignore[import-not-found]

    key = bytes(multiprocessing.current_process().authkey)
    name = next(tempfile._get_candidate_names())  # type: ignore[attr-defined]
    there = Path(frozen.TMP).is_dir()
    return *frozen.draw(), key, name, frozen.TOKEN, frozen.START, there, frozen.GPU, time.time()


def test_clones_share_nothing_that_must_differ(runtime: ForkRuntime) -> None:
    """Two clones draw different random numbers, UUIDs, keys and file names; what was computed at import is shared."""
    spec = load(runtime, "frozen")

    started = time.time()
    first, second = call(runtime, draw, spec=spec).value, call(runtime, draw, spec=spec).value

    assert all(mine != yours for mine, yours in zip(first[:5], second[:5], strict=True))
    assert first[5:9] == second[5:9]
    assert first[7]
    assert started <= first[9] <= second[9] <= time.time()


def draw_numpy() -> tuple[float, int, bool]:
    import gc

    import numpy as np

    number = np.random.random()  # noqa: NPY002 - the generator that all share
    return number, gc.get_freeze_count(), gc.isenabled()


def test_clones_draw_different_numpy_numbers(tmp_path: Path) -> None:
    """Numpy's global generator is renewed; the zygote's objects are out of the collector's way, which runs again."""
    (tmp_path / "runtime").mkdir()
    runtime = ForkRuntime(make_rootfs(tmp_path / "rootfs", {}, with_project=True), tmp_path / "runtime")
    try:
        spec = load(runtime, "numpy")
        first, second = call(runtime, draw_numpy, spec=spec).value, call(runtime, draw_numpy, spec=spec).value
    finally:
        runtime.close()

    assert first[0] != second[0]
    assert first[1] > 10_000
    assert first[2]


def test_handlers_and_streams_of_imported_modules_do_not_reach_a_clone(runtime: ForkRuntime) -> None:
    """A clone's signal handlers are a fresh interpreter's."""
    spec = load(runtime, "handler")

    assert call(runtime, lambda: signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, spec=spec).value


def test_a_lazy_module_that_is_canonical_is_really_loaded(runtime: ForkRuntime) -> None:
    """A module behind a lazy loader is used once, so that clones have it."""
    spec = load(runtime, "lazypk.heavy")

    assert call(runtime, lambda: type(sys.modules["lazypk.heavy"]).__name__, spec=spec).value == "module"
    assert runtime.zygotes[spec.key].bytes - runtime.zygotes[spec.key].base_bytes > 75_000_000


def test_sandboxes_run_side_by_side(runtime: ForkRuntime) -> None:
    """Eight calls at once, from one zygote, each with its own answer."""
    spec = load(runtime, "heavy")
    values: list[Any] = []

    def one(number: int) -> None:
        def wait(number: int) -> int:
            time.sleep(0.3)
            return number

        values.append(call(runtime, wait, number, spec=spec).value)

    threads = [threading.Thread(target=one, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert list(range(8)) == sorted(values)


def test_a_zygote_that_died_fails_the_start_and_can_be_loaded_again(runtime: ForkRuntime) -> None:
    """The failure is known before anything of the call has run."""
    spec = load(runtime, "blob")
    assert runtime.alive(spec)

    os.kill(runtime.zygotes[spec.key].process.pid, signal.SIGKILL)
    wait_for(lambda: not runtime.alive(spec))

    with pytest.raises(StartFailed, match="zygote"):
        call(runtime, where, spec=spec)
    load(runtime, "blob")
    assert call(runtime, where, spec=spec).result.outcome == "returned"


def test_unloading_lets_running_calls_finish(runtime: ForkRuntime, tmp_path: Path) -> None:
    """A checkpoint that is given up ends once its clones have."""
    spec = load(runtime, "frozen")
    results: list[Ran] = []

    gate = tmp_path / "gate"

    def nap() -> str:
        while not gate.exists():
            time.sleep(0.01)
        return "rested"

    thread = threading.Thread(target=lambda: results.append(call(runtime, nap, spec=spec)))
    zygote = runtime.zygotes[spec.key]
    thread.start()
    wait_for(lambda: zygote.statuses)
    runtime.unload(spec)
    gate.touch()
    thread.join()

    assert results[0].value == "rested"
    wait_for(lambda: zygote.process.returncode is not None)


# ---- limits ----


def eat(megabytes: int, seconds: float = 0.0) -> int:
    eaten = [bytearray(b"x") * 1_000_000 for _ in range(megabytes)]
    time.sleep(seconds)
    return len(eaten)


@pytest.mark.parametrize("start", ["cold", "restored"])
def test_a_call_over_its_memory_is_ended(runtime: ForkRuntime, start: str) -> None:
    """It fails as out-of-memory, with both figures, and the next call is served."""
    spec = load(runtime, "heavy") if start == "restored" else None

    ran = call(runtime, eat, 300, 60, spec=spec, memory=150_000_000)

    assert ran.slug == "out-of-memory"
    assert "150000000" in ran.detail
    assert call(runtime, eat, 10, spec=spec, memory=150_000_000).value == 10


def test_a_sandbox_may_grow_to_its_maximum(runtime: ForkRuntime) -> None:
    """The limit grows in steps, each of which is asked for, and not beyond max_memory."""
    spec = load(runtime, "heavy")

    grown = call(runtime, eat, 200, 2, spec=spec, memory=80_000_000, max_memory=400_000_000)
    over = call(runtime, eat, 500, 60, spec=spec, memory=80_000_000, max_memory=250_000_000)

    assert grown.value == 200
    assert grown.grown
    assert max(grown.grown) <= 400_000_000
    assert over.slug == "out-of-memory"
    assert over.grown[-1] == 250_000_000


def eat_in_child(megabytes: int) -> int:
    pid = os.fork()
    if not pid:
        eat(megabytes, 60)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_memory_of_child_processes_counts(runtime: ForkRuntime) -> None:
    """What the whole tree uses is compared with the limit; what a child shares with its parent counts once."""
    spec = load(runtime, "blob")

    over = call(runtime, eat_in_child, 200, spec=spec, memory=150_000_000)

    def fork_many() -> int:
        pids = []
        for _ in range(6):
            pid = os.fork()
            if not pid:
                time.sleep(0.4)
                os._exit(0)
            pids.append(pid)
        return sum(os.waitpid(pid, 0)[1] for pid in pids)

    assert over.slug == "out-of-memory"
    assert call(runtime, fork_many, spec=spec, memory=100_000_000).value == 0


def test_a_call_over_its_time_is_ended(runtime: ForkRuntime) -> None:
    """It fails as call-timeout, soon after its time, also when it does not listen to signals."""

    def stubborn() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP})
        time.sleep(60)

    ran = call(runtime, stubborn, spec=load(runtime, "heavy"), timeout=0.5)

    assert ran.slug == "call-timeout"
    assert "0.5 s" in ran.detail
    assert 0.5 <= ran.result.phases.run < 60


def test_imports_that_do_not_end_are_ended(runtime: ForkRuntime) -> None:
    """The function's timeout does not count for its imports: they have one of their own."""
    ran = call(runtime, where, modules=["sleeper"], start_timeout=2.0, timeout=0.2)

    assert ran.slug == "sandbox-failed"
    assert "did not start within 2 s" in ran.detail


def test_all_that_comes_before_the_function_has_one_time(runtime: ForkRuntime) -> None:
    """Imports, and then arguments that take long to load: neither is too long alone."""

    class Late:
        def __reduce__(self) -> Any:
            return time.sleep, (5.5,)

    ran = call(runtime, where_is, Late(), modules=["pause"], start_timeout=7.0)

    assert ran.slug == "sandbox-failed"
    assert "did not start within 7 s" in ran.detail
    assert ran.result.phases.imports >= 2.5


def test_a_call_can_be_cancelled(runtime: ForkRuntime) -> None:
    """From another thread, at any time: the sandbox is ended."""
    with Stop() as stop:
        threading.Timer(0.5, stop.set, [CallCancelled("enough")]).start()
        ran = call(runtime, lambda: time.sleep(60), spec=load(runtime, "heavy"), stop=stop)

    assert ran.result.outcome == "cancelled"
    assert ran.slug == "call-cancelled"


# ---- nothing stays behind ----


def detach() -> list[int]:
    """Starts a child, one that leaves the process group, and one whose parent has ended."""
    import subprocess
    import time

    children = [subprocess.Popen(["sleep", "300"]), subprocess.Popen(["sleep", "301"], start_new_session=True)]
    pid = os.fork()
    if not pid:
        orphan = subprocess.Popen(["sleep", "302"], start_new_session=True)
        Path("orphan").write_text(str(orphan.pid))
        os._exit(0)
    os.waitpid(pid, 0)
    time.sleep(0.05)
    return [*(child.pid for child in children), int(Path("orphan").read_text())]


@pytest.mark.parametrize("start", ["cold", "restored"])
def test_a_sandbox_ends_with_everything_that_it_started(runtime: ForkRuntime, start: str) -> None:
    """Children, also those that left the process group or lost their parent, end with the call. So does its folder."""
    spec = load(runtime, "heavy") if start == "restored" else None

    pids = call(runtime, detach, spec=spec).value

    assert len(pids) == 3
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert list((runtime.folder / "sandboxes").iterdir()) == []


def zombies_of(pid: int) -> list[str]:
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid=,stat="], capture_output=True, text=True, check=False)
    return [line for line in found.stdout.splitlines() if line.split()[1].startswith("Z")]


def test_no_zombie_and_no_descriptor_is_left(runtime: ForkRuntime) -> None:
    """After calls that returned, crashed and were ended, neither this process nor the zygote has anything left of them."""
    spec = load(runtime, "heavy")
    call(runtime, where, spec=spec)
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    zombies = zombies_of(os.getpid())  # of other tests' sandboxes of gVisor, whose subreaper this process may be

    for each in (spec, None):
        call(runtime, where, spec=each)
        call(runtime, lambda: os._exit(1), spec=each)
        call(runtime, lambda: time.sleep(60), spec=each, timeout=0.1)

    zygote = runtime.zygotes[spec.key]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert set(zombies_of(os.getpid())) <= set(zombies)
    assert zombies_of(zygote.process.pid) == []
    wait_for(lambda: not zygote.statuses)


def test_a_folder_may_have_a_long_path(rootfs: Path, tmp_path: Path) -> None:
    """Paths longer than a socket's address has room for work."""
    deep = tmp_path / ("long" * 30)
    deep.mkdir()
    runtime = ForkRuntime(rootfs, deep)

    assert run(runtime, where, spec=load(runtime, "heavy")).result.outcome == "returned"
    assert run(runtime, where).result.outcome == "returned"
    runtime.close()


KEEPER = """
import sys, threading, time
from pathlib import Path
from worker.fork import ForkRuntime
from readie.manifest import CheckpointSpec
folder = Path(sys.argv[2])
runtime = ForkRuntime(Path(sys.argv[1]), folder)
spec = CheckpointSpec(checkpoint_id="c", generation="g")
runtime.load(spec, folder, timeout=60)
sandboxes = [runtime.start(one, memory=2**30) for one in (spec, None)]
channels = []
for sandbox in sandboxes:
    channels.append(sandbox.folder.listener.accept())
print(runtime.zygotes[spec.key].process.pid, *(sandbox.pid for sandbox in sandboxes), flush=True)
time.sleep(60)
"""


def test_sandboxes_end_with_the_process_that_runs_them(rootfs: Path, tmp_path: Path) -> None:
    """A worker that is killed takes its zygotes and sandboxes along."""
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER, rootfs, tmp_path], stdout=subprocess.PIPE, text=True
    ) as keeper:
        assert keeper.stdout
        pids = [int(pid) for pid in keeper.stdout.readline().split()]
        running = [alive(pid) for pid in pids]
        keeper.kill()

    assert running == [True, True, True]

    wait_for(lambda: not any(alive(pid) for pid in pids))


def test_orphans_of_an_earlier_run_are_removed(rootfs: Path, tmp_path: Path) -> None:
    """Folders are removed, and their processes ended if they are still the same ones; others are left alone."""
    from worker.fork import note_process

    runtime = ForkRuntime(rootfs, tmp_path)
    sandboxes = runtime.sandboxes
    processes = [subprocess.Popen(["sleep", "300"], start_new_session=True) for _ in range(2)]
    for name, process in zip(("orphan", "other"), processes, strict=True):
        (sandboxes / name).mkdir(parents=True)
        note_process(sandboxes / name, process.pid)
    (sandboxes / "other" / "process").write_text(f"{processes[1].pid} 12345")  # its number was given away since
    (sandboxes / "empty").mkdir()

    assert runtime.remove_orphans() == 3

    assert processes[0].wait(10) == -signal.SIGKILL
    assert processes[1].poll() is None
    assert list(sandboxes.iterdir()) == []
    processes[1].kill()
    processes[1].wait()


# ---- saving ----


def test_saving_measures_the_memory_above_an_empty_process(runtime: ForkRuntime, tmp_path: Path) -> None:
    """A checkpoint with 20 MB in it is 20 MB; ballast is added to it."""
    plain = runtime.save(spec_of("blob"), tmp_path / "plain", timeout=60)
    ballast = runtime.save(spec_of("blob", ballast_mb=30), tmp_path / "ballast", timeout=60)

    assert 20 <= plain.measured_mb < 22
    assert 50 <= ballast.measured_mb < 52
    assert plain.threads == 1
    assert (tmp_path / "plain" / "checkpoint.json").exists()


@pytest.mark.parametrize(
    ("package", "kind", "detail"),
    [
        ("broken", "raised", "import broken: ZeroDivisionError: division by zero"),
        ("quitter", "raised", "import quitter: SystemExit: 0"),
        ("absent", "raised", "No module named 'absent'"),
        ("ender", "exit", "exit code 7"),
        ("crasher", "signal", "SIGSEGV"),
        ("s_thread", "threads", "2 threads"),
        ("s_child", "processes", "1 process"),
        ("connected", "sockets", "a connection to 127.0.0.1:"),
        ("listening", "sockets", "a socket that listens on 127.0.0.1:"),
        ("connected_here", "sockets", "a connection to /"),
        ("listening_here", "sockets", "a socket that listens on @readie-"),
        ("sleeper", "timeout", "2 s"),
    ],
)
def test_what_cannot_be_captured_says_why(
    runtime: ForkRuntime, tmp_path: Path, package: str, kind: str, detail: str
) -> None:
    """A failing canonical import is a failed capture, not a smaller checkpoint; nothing is written."""
    with pytest.raises(SaveFailed) as caught:
        runtime.save(spec_of(package), tmp_path / "checkpoint", timeout=2 if package == "sleeper" else 60)

    assert kind == caught.value.kind
    assert detail in caught.value.detail
    assert not (tmp_path / "checkpoint").exists()


def read(module: str) -> int:
    return int(__import__(module).value)


@pytest.mark.parametrize(
    "canonical",
    [("s_timewait",), ("s_tmp",), ("s_tmp", "p_ok"), ("s_pair",)],
    ids="+".join,
)
def test_open_files_and_sockets_that_were_closed_are_no_obstacle(
    runtime: ForkRuntime, tmp_path: Path, canonical: tuple[str, ...]
) -> None:
    """K14: a zygote keeps its descriptors, and a clone can use each module; the next one is loaded after it."""
    spec = spec_of(*canonical)
    runtime.save(spec, tmp_path / "checkpoint", timeout=60)
    runtime.load(spec, tmp_path / "checkpoint", timeout=60)

    assert [call(runtime, read, module, spec=spec).value for module in canonical] == [1] * len(canonical)
    runtime.unload(spec)
    assert call(runtime, len, (), spec=load(runtime, "p_ok")).value == 0


# ---- what a root filesystem is ----


def test_the_description_is_the_root_filesystems_own(runtime: ForkRuntime) -> None:
    """Version, marker environment and memory source are those of its Python."""
    description = runtime.describe()

    assert ".".join(str(part) for part in sys.version_info[:3]) == description.host.python
    assert {**packaging.markers.default_environment()} == description.markers
    assert description.host.runtime == "fork"
    assert description.memory_source == "RssAnon"
    assert {"json", "asyncio", "ctypes"} <= set(description.preload)


def test_the_digest_follows_the_installed_distributions(tmp_path: Path) -> None:
    """It changes with a version or a file of any distribution, and with nothing else; eighty of them take no time."""
    (tmp_path / "runtime").mkdir()
    rootfs = make_rootfs(
        tmp_path / "rootfs", {f"d{number}-1.0.dist-info/RECORD": f"d{number}/x.py,," for number in range(80)}
    )
    runtime = ForkRuntime(rootfs, tmp_path / "runtime")

    def digest() -> str:
        return runtime.describe().host.rootfs_digest

    first = digest()
    write_package(rootfs, "notes.txt", "not a distribution")
    same = digest()
    write_package(rootfs, "d7-1.0.dist-info/RECORD", "d7/y.py,,")
    other_file = digest()
    (site_packages(rootfs) / "d8-1.0.dist-info").rename(site_packages(rootfs) / "d8-1.1.dist-info")
    other_version = digest()

    assert first == same
    assert len({first, other_file, other_version}) == 3


def test_the_fingerprint_follows_what_a_sandbox_is_made_of(tmp_path: Path) -> None:
    """The same wherever the worker keeps its files; another with another executor, cloudpickle or environment."""
    python = Path(sys.executable)
    bundle, again = make_bundle(tmp_path / "a", python), make_bundle(tmp_path / "b", python)
    first = fingerprint(bundle, {"LANG": "C.UTF-8"})
    assert first == fingerprint(again, {"LANG": "C.UTF-8"})
    assert len(hashlib.sha256(bytes.fromhex(first)).digest()) == 32

    (again / "readie_probe.py").write_text("# no sandbox that runs calls has the probe\n")
    assert first == fingerprint(again, {"LANG": "C.UTF-8"})
    (again / "cloudpickle" / "__init__.py").write_text("# another\n")
    assert first != fingerprint(again, {"LANG": "C.UTF-8"})
    assert first != fingerprint(bundle, {"LANG": "C"})


def test_a_folder_without_a_python_is_refused(tmp_path: Path) -> None:
    """The message names the file that is missing, and what a root filesystem is."""
    with pytest.raises(RuntimeUnavailable, match="bin/python is not an executable") as caught:
        ForkRuntime(tmp_path, tmp_path)

    assert "virtual environment" in str(caught.value)


def test_a_python_that_cannot_run_the_executor_is_one_clear_error(tmp_path: Path) -> None:
    """What it said last is in the message."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "runtime").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\necho too old >&2\nexit 1\n")
    python.chmod(0o755)

    with pytest.raises(RuntimeUnavailable, match="cannot run the executor: too old"):
        ForkRuntime(tmp_path, tmp_path / "runtime").describe()
