"""The runsc runtime: real sandboxes of gVisor, captured, restored, limited, and locked in."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cli import main
from readie.document import read_document
from readie.errors import NeedsGpu, RuntimeUnavailable
from readie.flavor import Flavor
from readie.manifest import CheckpointSpec, read_spec
from readie.resources import FILE as RESOURCES
from readie.resources import hash_resources, read_resources
from tests.sandboxes import (
    Ran,
    add_numpy,
    control_groups,
    make_rootfs,
    make_sealed_rootfs,
    needs_runsc,
    read_command_lines,
    run,
    site_packages,
    wait_for,
)
from tests.tiny import install
from worker import cgroups
from worker.bundle import fingerprint
from worker.executor import children_of
from worker.probe import ROOM
from worker.runsc import AWAITED, Options, RunscRuntime, end_orphans, find_runsc, read_pid
from worker.runtime import SaveFailed, StartFailed
from worker.specification import (
    UID,
    Gpu,
    Limits,
    find_driver,
    make_arguments,
    make_configuration,
    make_flags,
    sensitive,
)

needs_runsc()

PACKAGES = {
    "heavy": "import time; time.sleep(1.5)",
    "frozen": """
        import platform, random, readie, ssl, tempfile, time, uuid
        platform.node()
        OWN = random.Random()
        SEEDED = random.Random(42)
        TOKEN = uuid.uuid4().hex
        RENEWED = []
        TMP = tempfile.mkdtemp()
        ssl.RAND_bytes(1)
        readie.after_restore(lambda: RENEWED.append(uuid.uuid4().hex))
    """,
    "s_open": """
        import socket
        srv = socket.create_server(("127.0.0.1", 0))
        cli = socket.create_connection(srv.getsockname()); acc, _ = srv.accept()
        def talk(): cli.sendall(b"1"); return acc.recv(1)
    """,
    "s_timewait": """
        import socket
        s = socket.create_server(("127.0.0.1", 0)); c = socket.create_connection(s.getsockname())
        a, _ = s.accept(); a.close(); c.close(); s.close()
        value = 1
    """,
    "s_child": """
        import subprocess
        p = subprocess.Popen(["/usr/bin/python3", "-c", "import time; time.sleep(600)"])
        value = 1
    """,
    "s_thread": """
        import threading, time
        t = threading.Thread(target=time.sleep, args=(600,), daemon=True); t.start()
        value = 1
    """,
    "s_tmp": "import tempfile; f = tempfile.TemporaryFile(); f.write(b'x' * 4096); f.flush(); value = 1",
    "s_home": "import os; open(os.path.expanduser('~/.config'), 'w').write('x'); value = 1",
    "p_ok": "value = 1",
    "dice": """
        import numpy
        OWN = numpy.random.default_rng()
        OLD = numpy.random.RandomState()
        SEEDED = numpy.random.default_rng(42)
    """,
    "worried": "import readie\n@readie.after_restore\ndef refuse(): raise RuntimeError('not this one')",
    "late": """
        import os, time
        def monotonic(tell=time.monotonic, calls=[]):
            calls.append(1)
            while len(calls) == 2 and not os.path.exists("/call/go"): time.sleep(0.01)
            return tell() + 1_000_000 * (len(calls) > 1)
        time.monotonic = monotonic
    """,
    "counting": """
        import os
        COUNT = 0
        def load():
            global COUNT
            COUNT += 1
            return {"token": os.urandom(8).hex()}
    """,
    "blob": "data = bytearray(b'x') * 60_000_000",
    "threaded": """
        import threading, time
        def tick():
            global count
            while True: count += 1; time.sleep(0.01)
        count = 0
        threading.Thread(target=tick, daemon=True).start()
    """,
    "broken": "1 / 0",
    "ender": "import os; os._exit(7)",
    "crasher": "import ctypes; ctypes.string_at(0)",
    "sleeper": "import time; time.sleep(60)",
    "scribbler": """
        import time
        with open("/call/result", "ab") as file: file.write(bytes(2_000_000))
        time.sleep(60)
    """,
    "forker": "import os, time\nif not os.fork(): time.sleep(600)",
    "closer": "import os; os.closerange(0, 70_000)",
}
CAPTURED = ("heavy", "frozen", "dice", "worried", "blob", "threaded")
MB = 1_000_000
MIB = 2**20


def spec_of(name: str, **fields: Any) -> CheckpointSpec:
    canonical = () if name == "empty" else (name,)
    return CheckpointSpec(checkpoint_id=name, generation="g", canonical=canonical, **fields)


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_sealed_rootfs(tmp_path_factory.mktemp("sealed") / "rootfs", PACKAGES)
    add_numpy(made)
    install(made, "ground", {"ground.py": "blob = bytearray(10_000_000)\nimport time; time.sleep(0.1)\n"})
    install(made, "tower", {"tower.py": "import ground\n"})
    return made


@pytest.fixture(scope="module")
def large(rootfs: Path) -> Path:
    """A file of the root filesystem that is larger than the sandboxes that read it, and takes no room on the disk."""
    path = rootfs / "usr" / "lib" / "large"
    path.touch()
    os.truncate(path, 400 * MIB)
    return path


@pytest.fixture(scope="module")
def runtime(rootfs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunscRuntime]:
    """With the empty checkpoint and those of CAPTURED, for real."""
    folder = tmp_path_factory.mktemp("runsc")
    running = RunscRuntime(rootfs, folder, Options(limits=Limits(processes=256)))
    for name in ("empty", *CAPTURED):
        running.save(spec_of(name), folder / "checkpoints" / name, timeout=60)
        running.load(spec_of(name), folder / "checkpoints" / name, timeout=60)
    yield running
    running.close()


def call(runtime: RunscRuntime, function: Any, *args: Any, name: str | None = "empty", **options: Any) -> Ran:
    return run(runtime, function, *args, spec=spec_of(name) if name else None, **options)


def count_all(runtime: RunscRuntime) -> dict[str, int]:
    """What a sandbox is made of, on this host: processes, control groups, mounts, files."""
    runtime.prepare()
    commands = read_command_lines(Path("/proc").glob("[0-9]*"))
    return {
        "processes": sum(runtime.prefix.encode() in command for command in commands),
        "children": len(children_of("self")),  # also those that nobody has reaped
        "groups": len(control_groups(runtime.prefix)),
        "mounts": sum(  # other tests mount, too
            runtime.prefix in line or str(runtime.folder) in line
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ),
        "sandboxes": len(list(runtime.sandboxes.iterdir())),
        "bundles": len(list(runtime.bundles.iterdir())),
        "states": len(list(runtime.state.iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def count_idle(runtime: RunscRuntime) -> dict[str, int]:
    """The same, once only what was made ahead is left."""
    ahead = runtime.options.ahead

    def idle() -> bool:
        now = count_all(runtime)
        return (now["sandboxes"], now["bundles"], now["processes"]) == (ahead, ahead, 2 * ahead)

    wait_for(idle)
    return count_all(runtime)


def same(runtime: RunscRuntime, before: dict[str, int]) -> bool:
    """Whether there is as much as before; what differs is printed."""
    now = count_all(runtime)
    print({name: (before[name], now[name]) for name in now if now[name] != before[name]})
    return now == before


# ---- capture and restore ----


def test_a_restored_sandbox_has_what_was_imported_before_it_was_saved(runtime: RunscRuntime) -> None:
    """The module is there at the first line, and its import is not repeated."""
    ran = call(runtime, lambda: "heavy" in sys.modules, name="heavy", modules=["heavy"])

    assert ran.value
    assert ran.result.phases.imports < 1.5  # which its import takes


def test_a_restore_is_faster_than_a_cold_start(runtime: RunscRuntime) -> None:
    """Of a call that imports for 1.5 s, by the fewest seconds to ready."""
    restored = [call(runtime, len, (), name="heavy", modules=["heavy"]).result.phases.ready for _ in range(3)]
    cold = [call(runtime, len, (), name=None, modules=["heavy"]).result.phases.ready for _ in range(3)]

    assert min(cold) > 2 * min(restored)


def test_a_payload_larger_than_the_memory_at_first_lets_it_grow(runtime: RunscRuntime) -> None:
    """Memory is looked after while the sandbox is being sent what to do."""
    ran = call(runtime, len, bytes(60 * MB), memory=64 * MIB, max_memory=512 * MIB, max_payload=100 * MB)

    assert ran.value == 60 * MB
    assert ran.grown


def draw() -> Any:
    import platform
    import random
    import ssl
    import tempfile
    import uuid

    import frozen  # type: ignore[import-not-found]

    differ = (
        random.random(),
        frozen.OWN.random(),
        ssl.RAND_bytes(8),
        uuid.uuid4(),
        uuid.uuid1(),
        next(tempfile._get_candidate_names()),  # type: ignore[attr-defined]
        frozen.RENEWED,
        socket.gethostname(),
        platform.node(),
    )
    same = (frozen.SEEDED.random(), frozen.TOKEN, len(frozen.RENEWED), Path(frozen.TMP).is_dir())
    return differ, same, time.time()


def test_clones_share_nothing_that_must_differ(runtime: RunscRuntime) -> None:
    """Random numbers, also OpenSSL's and those of a library's own generator, UUIDs, names of files and of the host; not
    what was seeded.
    """
    before = time.time()
    first, second = call(runtime, draw, name="frozen").value, call(runtime, draw, name="frozen").value

    assert [mine == yours for mine, yours in zip(first[0], second[0], strict=True)] == [False] * 9
    assert first[1] == second[1]
    assert first[1][2:] == (1, True)
    assert before < first[2] < second[2] < time.time()


def roll() -> Any:
    import dice  # type: ignore[import-not-found]

    differ = np.random.random(), dice.OWN.random(), dice.OLD.random_sample()  # noqa: NPY002 - what all share
    return differ, dice.SEEDED.random()


def test_clones_draw_different_numbers_of_numpy(runtime: RunscRuntime) -> None:
    """Also from generators that an import has made without a seed; one with a seed goes on alike in all."""
    first, second = call(runtime, roll, name="dice").value, call(runtime, roll, name="dice").value

    assert [mine == yours for mine, yours in zip(first[0], second[0], strict=True)] == [False] * 3
    assert first[1] == second[1]


def test_a_process_that_was_saved_while_it_read_the_clock_can_be_restored(
    runtime: RunscRuntime, tmp_path: Path
) -> None:
    """Between its looks for the restore and at the clock, which says afterwards that the time to be saved is over."""
    runtime.save(spec_of("late"), tmp_path / "late", timeout=60)
    runtime.load(spec_of("late"), tmp_path / "late", timeout=60)

    assert call(runtime, lambda: time.monotonic() > 1_000_000, name="late").value
    runtime.unload(spec_of("late"))


def take_counted() -> Any:
    import counting  # type: ignore[import-not-found]

    from readie import resource

    before = counting.COUNT
    return before, resource("dataset:counted")["token"], counting.COUNT


@pytest.fixture
def declared(rootfs: Path) -> Iterator[Path]:
    """The root filesystem's file of datasets, with one; other tests would measure it as well."""
    path = rootfs / RESOURCES
    path.write_text('["dataset:counted"]\nloader = "counting:load"\n')
    yield path
    path.unlink()


def test_a_dataset_that_was_loaded_before_the_capture_is_there(
    runtime: RunscRuntime, declared: Path, tmp_path: Path
) -> None:
    """Every clone has the very same, and calls no loader; one whose declaration has changed since is not restored."""
    key = "dataset:counted"
    resources = hash_resources(read_resources(declared), [key])
    spec = CheckpointSpec(checkpoint_id="data", generation="g", canonical=(key,), resources=resources)
    runtime.save(spec, tmp_path / "data", timeout=60)
    runtime.load(spec, tmp_path / "data", timeout=60)
    first, second = (run(runtime, take_counted, spec=spec).value for _ in range(2))
    cold = call(runtime, take_counted, name=None).value
    runtime.unload(spec)

    assert (first[0], first[2]) == (1, 1)
    assert first == second
    assert (cold[0], cold[2]) == (0, 1)
    assert cold[1] != first[1]

    declared.write_text(declared.read_text() + "keywords = { other = 1 }\n")
    with pytest.raises(StartFailed, match="otherwise than at the capture"):
        runtime.load(spec, tmp_path / "data", timeout=60)


def test_a_hook_that_fails_ends_the_sandbox_before_the_call(runtime: RunscRuntime) -> None:
    """What could not be renewed serves no call: the start fails, and the agent starts the call cold."""
    with pytest.raises(StartFailed, match="did not answer"):
        call(runtime, len, (), name="worried")


def test_threads_are_saved_as_they_run(runtime: RunscRuntime) -> None:
    """A module that started a thread can be captured; the thread goes on in every clone."""

    def ticking() -> bool:
        import threaded  # type: ignore[import-not-found]

        before = threaded.count
        time.sleep(0.5)
        return bool(threaded.count > before)

    assert call(runtime, ticking, name="threaded").value


@pytest.mark.parametrize(
    ("module", "kind", "detail"),
    [
        ("broken", "raised", "ZeroDivisionError"),
        ("ender", "exit", "exit code 7"),
        ("crasher", "signal", "SIGSEGV"),
        ("sleeper", "timeout", "3 s"),
        ("nowhere", "raised", "No module named 'nowhere'"),
    ],
)
def test_what_cannot_be_imported_is_no_checkpoint(
    runtime: RunscRuntime, tmp_path: Path, module: str, kind: str, detail: str
) -> None:
    """The capture fails, says how, and leaves no folder."""
    with pytest.raises(SaveFailed, match=detail) as caught:
        runtime.save(spec_of(module), tmp_path / "checkpoint", timeout=3 if module == "sleeper" else 60)

    assert caught.value.kind == kind
    assert not (tmp_path / "checkpoint").exists()


def read(module: str) -> int:
    imported = __import__(module)
    return int(imported.talk() if hasattr(imported, "talk") else imported.value)


@pytest.mark.parametrize(
    "canonical",
    [("s_open",), ("s_timewait",), ("s_child",), ("s_thread",), ("s_tmp",), ("s_home",), ("s_open", "p_ok")],
    ids="+".join,
)
def test_what_gvisor_may_refuse_to_save_is_captured_whole_or_not_at_all(
    runtime: RunscRuntime, tmp_path: Path, canonical: tuple[str, ...]
) -> None:
    """Sockets, children, threads, open files: a restore that works, or a capture that fails with a reason and no folder."""
    spec = CheckpointSpec(checkpoint_id="-".join(canonical), generation="g", canonical=canonical)
    try:
        runtime.save(spec, tmp_path / "checkpoint", timeout=60)
    except SaveFailed as error:
        refused = error.detail
    else:
        refused = ""
    if refused:
        assert not (tmp_path / "checkpoint").exists()
    else:
        runtime.load(spec, tmp_path / "checkpoint", timeout=60)
        assert [run(runtime, read, module, spec=spec).value for module in canonical] == [1] * len(canonical)
        runtime.unload(spec)
    assert call(runtime, len, ()).value == 0


def test_eight_can_be_restored_at_once(runtime: RunscRuntime) -> None:
    """Each from the same files, and each a sandbox of its own."""

    def mark(number: int) -> tuple[int, str]:
        Path("mark").write_text(str(number))
        time.sleep(1)
        return number, Path("mark").read_text()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: call(runtime, mark, number).value, range(8)))

    assert found == [(number, str(number)) for number in range(8)]


@pytest.mark.parametrize("broken", ["truncated", "gone"])
def test_a_checkpoint_that_cannot_be_restored_is_a_failed_start(
    runtime: RunscRuntime, tmp_path: Path, broken: str
) -> None:
    """The partial sandbox is removed, and the agent is told why."""
    shutil.copytree(runtime.folder / "checkpoints" / "empty", tmp_path / "copy")
    spec = spec_of("copy")
    runtime.load(spec, tmp_path / "copy", timeout=60)
    image = tmp_path / "copy" / "image" / "checkpoint.img"
    if broken == "gone":
        image.unlink()
    else:
        os.truncate(image, 1000)
    before = count_idle(runtime)

    with pytest.raises(StartFailed, match="runsc restore"):
        run(runtime, len, (), spec=spec)

    wait_for(lambda: same(runtime, before))
    runtime.unload(spec)


def test_a_checkpoint_of_another_flavor_is_not_loaded(runtime: RunscRuntime) -> None:
    """A gpu checkpoint never comes into a cpu sandbox, whatever the manifest says."""
    with pytest.raises(StartFailed, match="of flavor gpu, this worker of cpu"):
        runtime.load(spec_of("empty", flavor=Flavor.GPU), runtime.folder / "checkpoints" / "empty", timeout=60)


def read_resolver() -> str:
    return Path("/etc/resolv.conf").read_text()


def test_with_a_network_every_call_starts_cold(rootfs: Path, runtime: RunscRuntime, tmp_path: Path) -> None:
    """Checkpoints were captured without one; and then the host's loopback can be reached."""
    networked = RunscRuntime(rootfs, tmp_path, Options(network="host", ahead=0))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def connect() -> str:
            with socket.create_connection(("127.0.0.1", port), 5):
                return "reached"

        with pytest.raises(StartFailed, match="SANDBOX_NETWORK"):
            networked.load(spec_of("empty"), runtime.folder / "checkpoints" / "empty", timeout=60)
        assert run(networked, connect).value == "reached"
        assert run(networked, read_resolver).value == read_resolver()  # else no name would be found
    networked.close()


# ---- limits ----


def eat(amount: int) -> int:
    eaten = [bytearray(b"x") * MB for _ in range(amount // MB)]
    return len(eaten)


def test_a_sandbox_over_its_memory_limit_fails_as_out_of_memory(runtime: RunscRuntime) -> None:
    """The call fails by name; another with room enough is served, and so is the next one."""
    starved = call(runtime, eat, 400 * MB, memory=200 * MIB)
    fed = call(runtime, eat, 400 * MB, memory=800 * MIB)

    assert starved.slug == "out-of-memory"
    assert fed.value == 400


def test_a_limit_may_grow_to_max_memory(runtime: RunscRuntime) -> None:
    """However fast the function takes it; and not beyond."""
    grown = call(runtime, eat, 400 * MB, memory=128 * MIB, max_memory=800 * MIB)
    beyond = call(runtime, eat, 400 * MB, memory=128 * MIB, max_memory=256 * MIB)

    assert grown.value == 400
    assert grown.grown[-1] <= 800 * MIB
    assert beyond.slug == "out-of-memory"


def test_the_kernel_tells_when_a_limit_has_to_grow(runtime: RunscRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the agent would look: what takes memory fast does not wait, or fail, at a limit that may grow."""
    monkeypatch.setattr("worker.runtime.WATCH_S", 3600.0)
    ran = call(runtime, eat, 400 * MB, memory=128 * MIB, max_memory=800 * MIB)

    assert ran.value == 400
    assert ran.grown


def test_a_death_that_is_not_for_memory_is_told_apart(runtime: RunscRuntime) -> None:
    """A process that is killed by the same signal as the kernel's is a failed sandbox, not out of memory."""
    ran = call(runtime, lambda: os.kill(os.getpid(), signal.SIGKILL), memory=200 * MIB)

    assert ran.slug == "sandbox-failed"
    assert "SIGKILL" in ran.detail


def read_and_crash(file: str) -> None:
    import ctypes

    with open(file, "rb", buffering=0) as large:  # noqa: PTH123
        while large.read(MIB):
            pass
    ctypes.string_at(0)


def test_files_that_were_read_are_no_reason_for_a_death(runtime: RunscRuntime, large: Path) -> None:
    """They fill the sandbox's memory to its limit, and give way: what crashes afterwards has crashed."""
    ran = call(runtime, read_and_crash, f"/{large.relative_to(runtime.rootfs)}", memory=200 * MIB)

    assert ran.slug == "sandbox-failed"
    assert "SIGSEGV" in ran.detail


def test_a_checkpoint_that_does_not_fit_is_not_to_blame(runtime: RunscRuntime) -> None:
    """It stays on offer: the call's memory was too small for it."""
    with pytest.raises(StartFailed, match="memory") as caught:
        call(runtime, len, (), name="blob", memory=50 * MIB)

    assert not caught.value.blame


def test_a_checkpoint_that_is_broken_is_to_blame_however_little_memory_there_is(
    runtime: RunscRuntime, tmp_path: Path
) -> None:
    """Reading its files fills the memory that the call has, and they give way: it is taken off the offer."""
    shutil.copytree(runtime.folder / "checkpoints" / "blob", tmp_path / "copy")
    [pages] = (tmp_path / "copy" / "image").glob("pages.img")
    os.truncate(pages, pages.stat().st_size - MB)
    spec = spec_of("copy")
    runtime.load(spec, tmp_path / "copy", timeout=60)
    with pages.open("r+b") as file:  # so that the sandbox reads it from the disk, to its own account
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    with pytest.raises(StartFailed) as caught:
        run(runtime, len, (), spec=spec, memory=128 * MIB)

    runtime.unload(spec)
    assert caught.value.blame, str(caught.value)


def test_sandboxes_die_before_the_agent_where_the_machine_runs_out_of_memory(runtime: RunscRuntime) -> None:
    """All processes of a sandbox are the kernel's first choice."""
    sandbox = runtime.start(None, memory=2**30)
    try:
        names = [Path(f"/proc/{pid}/oom_score_adj") for pid in sandbox.pids]
        assert [name.read_text().strip() for name in names] == ["1000", "1000"]
    finally:
        sandbox.end()


def breed() -> None:
    for number in range(30):
        print(number, flush=True)
        if os.fork() == 0:
            time.sleep(60)


def test_a_sandbox_that_breeds_ends_alone(rootfs: Path, runtime: RunscRuntime, tmp_path: Path) -> None:
    """Its processes are limited, and the problem says so; with a higher limit it goes on, and so does the worker."""
    limited = RunscRuntime(rootfs, tmp_path, Options(limits=Limits(processes=60), ahead=0))
    limited.load(spec_of("empty"), runtime.folder / "checkpoints" / "empty", timeout=60)
    few, many = call(limited, breed), call(runtime, breed)
    served = call(limited, len, ()).value
    limited.close()

    assert few.slug == "sandbox-failed"
    assert "SANDBOX_PROCESSES" in few.detail
    assert 2 < len(few.printed["stdout"].split()) < 29
    assert (many.value, len(many.printed["stdout"].split())) == (None, 30)
    assert served == 0


def spin() -> None:
    end = time.monotonic() + 2.5
    child = os.fork()
    while time.monotonic() < end:
        pass
    if child == 0:
        os._exit(0)


def processors_used(runtime: RunscRuntime) -> float:
    """How many processors a call that spins keeps busy, in the second in which it has most, by the kernel's count."""
    others = {path.name for path in runtime.bundles.iterdir()}
    points = []
    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(call, runtime, spin)
        while not ran.done():
            for name in {path.name for path in runtime.bundles.iterdir()} - others:
                with contextlib.suppress(OSError):
                    points.append((time.monotonic(), processor_seconds(name)))
            time.sleep(0.05)
    assert ran.result().value is None
    return max(
        (used - used_before) / (now - before)
        for before, used_before in points
        for now, used in points
        if 1 <= now - before < 1.5
    )


def processor_seconds(name: str) -> float:
    if cgroups.is_unified():
        return cgroups.read_fields(cgroups.TOP / name / "cpu.stat")["usage_usec"] / 1e6
    return int((cgroups.TOP / "cpuacct" / name / "cpuacct.usage").read_text()) / 1e9


def test_processors_are_limited(rootfs: Path, runtime: RunscRuntime, tmp_path: Path) -> None:
    """Two processes that spin get what a sandbox may have of the processors; without a limit they take far more."""
    used = []
    for cpus in (0.15, 0.0):
        (tmp_path / str(cpus)).mkdir()
        one = RunscRuntime(rootfs, tmp_path / str(cpus), Options(limits=Limits(cpus=cpus), ahead=0))
        one.load(spec_of("empty"), runtime.folder / "checkpoints" / "empty", timeout=60)
        used.append(processors_used(one))
        assert one.describe().host.cpus == cpus
        one.close()

    assert used[0] < 0.25
    assert used[1] > 2 * used[0]


# ---- nothing gets out ----


@dataclass(frozen=True)
class Reach:
    """Something that a call must not reach, and what it meets instead: the exception's type, or its errno, as a pattern."""

    step: str
    meets: str
    by_user: bool = False  # whether the user that sandboxes run as could do it, were it not for the sandbox


#: Names in capitals stand for what the fixture `tried` has made.
REACHES = {
    "the network": Reach("connect('OUTER', OUTER_PORT)", "OSError E(HOST|NET)UNREACH", by_user=True),
    "a server of the host": Reach("connect('127.0.0.1', PORT)", "ConnectionRefusedError", by_user=True),
    "names": Reach("socket.getaddrinfo('HOST_NAME', 80)", "gaierror", by_user=True),
    "raw packets": Reach("socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)", "PermissionError"),
    "a file of the host": Reach("open('PLACE/secret').read()", "FileNotFoundError", by_user=True),
    "passwords": Reach("open('/etc/shadow').read()", "FileNotFoundError"),
    "the host's root by proc": Reach("open('/proc/1/rootPLACE/secret').read()", "FileNotFoundError"),
    "other sandboxes' folders": Reach("os.listdir('SANDBOXES')", "FileNotFoundError", by_user=True),
    "another sandbox's folder": Reach("open('SANDBOXES/OTHER/marker').read()", "FileNotFoundError", by_user=True),
    "the folder beside its own": Reach("open('/call/../OTHER/marker').read()", "FileNotFoundError"),
    "beside its folder": Reach("open('/call/../x', 'w')", "PermissionError"),
    "a file in its folder": Reach("open('/call/left', 'w')", "PermissionError"),
    "the file that says that it was restored": Reach("open('/call/go', 'a')", "PermissionError"),
    "the socket in its folder": Reach("os.unlink('/call/host.sock')", "PermissionError"),
    "the rights of its folder": Reach("os.chmod('/call', 0o777)", "PermissionError"),
    "the executor": Reach("open('/readie/readie_executor.py', 'a')", "PermissionError"),
    "the root filesystem": Reach("open('/usr/lib/os-release', 'w')", "PermissionError"),
    "folders of the root filesystem": Reach("os.rename('/usr/bin', '/usr/gone')", "PermissionError"),
    "another user": Reach("os.setuid(0)", "OSError EINVAL"),
    "a process of the host": Reach("os.kill(HOST_PID, 0)", "ProcessLookupError", by_user=True),
    "a disk": Reach("os.mknod('/tmp/disk', 0o60600, os.makedev(254, 0)); open('/tmp/disk', 'rb')", "OSError ENXIO"),
    "mounts": Reach("call_c('mount', b'x', b'/tmp', b'tmpfs', 0, None)", "PermissionError"),
    "its host name": Reach("call_c('sethostname', b'x', 1)", "PermissionError"),
}


def attempt(steps: dict[str, str]) -> dict[str, str]:
    """What each step met, by its name; "" for one that worked."""
    import ctypes

    def connect(host: str, port: int) -> None:
        socket.create_connection((host, port), 3).close()

    def call_c(name: str, *args: Any) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        if getattr(library, name)(*args):
            raise OSError(ctypes.get_errno(), name)

    met = {}
    for name, step in steps.items():
        met[name] = ""
        try:
            exec(step, {"os": os, "socket": socket, "connect": connect, "call_c": call_c})
        except OSError as error:
            kind = type(error).__name__
            met[name] = f"OSError {errno.errorcode[error.errno or 0]}" if kind == "OSError" else kind
    return met


def attempt_as_nobody(steps: dict[str, str]) -> dict[str, str]:
    """The same outside of any sandbox, by the user that sandboxes run as: in a copy of this process."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():  # Python 3.12 and later: other threads do not go on in the copy
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(UID)
            os.setuid(UID)
            os.write(writing, json.dumps(attempt(steps)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:  # noqa: PTH123 - a descriptor
        said = file.read()
    os.waitpid(pid, 0)
    return dict(json.loads(said))


def outer_address() -> str | None:
    """An address of this host that is not loopback; None where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one, contextlib.suppress(OSError):
        one.connect(("192.0.2.1", 9))  # sends nothing
        return str(one.getsockname()[0])
    return None


def host_name() -> str | None:
    """A name other than localhost that this host can look up; None where there is none."""
    with contextlib.suppress(OSError):
        socket.getaddrinfo(socket.gethostname(), 80)
        return socket.gethostname()
    return None


@dataclass(frozen=True)
class Tried:
    """What steps met inside of a sandbox and outside, and what the host looked like afterwards."""

    inside: dict[str, str]
    outside: dict[str, str]
    unchanged: bool
    served: bool


@pytest.fixture(scope="module")
def tried(rootfs: Path, runtime: RunscRuntime) -> Iterator[Tried]:
    """All steps of REACHES in one sandbox, while there is another; in folders where everybody may look, and write."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="readie-", dir="/var/tmp")))
        place.chmod(0o755)
        (place / "secret").write_text("secret")
        one = RunscRuntime(rootfs, place, Options(ahead=0))
        stack.callback(one.close)
        one.sandboxes.chmod(0o755)
        one.load(spec_of("empty"), runtime.folder / "checkpoints" / "empty", timeout=60)
        other = one.start(spec_of("empty"), memory=2**30)
        stack.callback(other.end)
        (other.folder.path / "marker").write_text("marker")
        sleeper = stack.enter_context(subprocess.Popen(["sleep", "600"], user=UID, group=UID, extra_groups=[]))
        stack.callback(sleeper.kill)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        names = {
            "OUTER_PORT": "0",
            "OUTER": outer_address() or "",
            "HOST_NAME": host_name() or "",
            "HOST_PID": str(sleeper.pid),
            "PORT": str(server.getsockname()[1]),
            "SANDBOXES": str(one.sandboxes),
            "OTHER": other.name,
            "PLACE": str(place),
        }
        if names["OUTER"]:
            outer = stack.enter_context(socket.create_server((names["OUTER"], 0)))
            names["OUTER_PORT"] = str(outer.getsockname()[1])
        steps = {}
        for name, reach in REACHES.items():
            steps[name] = re.sub("|".join(names), lambda found: names[found[0]], reach.step)
        inside = call(one, attempt, steps).value
        outside = attempt_as_nobody({name: step for name, step in steps.items() if REACHES[name].by_user})
        unchanged = (place / "secret").read_text() == "secret" and sleeper.poll() is None and not other.wait_exit(0)
        yield Tried(inside, outside, unchanged, served=call(one, len, ()).value == 0)


@pytest.mark.parametrize("name", REACHES)
def test_a_call_cannot_reach(tried: Tried, name: str) -> None:
    """It meets the error of what is not there, or not its own, where the same user could do it outside of the sandbox."""
    if name == "the network" and not outer_address():
        pytest.skip("this host has no address but loopback")
    if name == "names" and not host_name():
        pytest.skip("this host cannot look up its own name")

    assert re.fullmatch(REACHES[name].meets, tried.inside[name])
    assert tried.outside.get(name, "") == ""


def test_a_call_that_tried_to_reach_out_has_changed_nothing(tried: Tried) -> None:
    """Files and processes of the host and other sandboxes are as before, and the worker goes on."""
    assert tried.unchanged
    assert tried.served


def test_what_a_call_writes_ends_with_it(runtime: RunscRuntime, rootfs: Path) -> None:
    """Its directory, /tmp and /var/cache are memory of its own: nothing of them is on the host, or in the next sandbox."""

    def write() -> list[str]:
        found = []
        for place in (".", "/tmp", "/var/cache", "/dev/shm"):
            found += [str(path) for path in Path(place).glob("left-*")]
            Path(place, f"left-{os.urandom(4).hex()}").write_text("x")
        return found

    assert call(runtime, write).value == []
    assert call(runtime, write).value == []
    assert list(rootfs.rglob("left-*")) == []
    assert list((rootfs / "var" / "cache").iterdir()) == []


@pytest.mark.parametrize("name", [None, "frozen"], ids=["cold", "restored"])
def test_nothing_of_the_worker_is_visible(
    runtime: RunscRuntime, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    """Neither its environment, nor its name, nor its processes; and the user has no capability."""
    monkeypatch.setenv("WORKER_TOKEN", "secret-token")

    def look() -> Any:
        processes = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
        status = Path("/proc/self/status").read_text().splitlines()
        rights = [line.split()[1] for line in status if line.startswith(("CapPrm", "CapEff", "CapInh"))]
        user = os.getuid(), os.getgid(), Path().stat().st_uid, rights
        return dict(os.environ), socket.gethostname(), user, processes

    environment, host, user, processes = call(runtime, look, name=name).value

    assert "secret-token" not in str(environment)
    assert host.startswith(runtime.prefix)
    assert user == (65534, 65534, 65534, ["0" * 16] * 3)
    assert len(processes) == 1
    assert b"readie_executor" in processes[0]


# ---- nothing stays behind ----


def test_calls_of_every_ending_leave_nothing(runtime: RunscRuntime) -> None:
    """Processes, control groups, mounts, files and descriptors are as many as before."""
    call(runtime, len, ())
    before = count_idle(runtime)

    call(runtime, len, ())
    call(runtime, len, (), name=None)
    call(runtime, lambda: 1 / 0)
    call(runtime, lambda: os._exit(3))
    call(runtime, time.sleep, 60, timeout=0.3)
    call(runtime, eat, 400 * MB, memory=100 * MIB)
    call(runtime, lambda: subprocess.Popen(["/usr/bin/python3", "-c", "import time; time.sleep(600)"]).pid)

    wait_for(lambda: same(runtime, before))


def square(number: int) -> int:
    return number * number


def check_nothing_stays(runtime: RunscRuntime, calls: int, at_once: int) -> None:
    """Runs so many restored calls, and compares what there is of all that a sandbox is made of before and after."""
    assert call(runtime, square, 7).value == 49
    before, threads = count_idle(runtime), threading.active_count()

    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda number: call(runtime, square, number).value, range(calls)))

    assert found == [number * number for number in range(calls)]
    wait_for(lambda: same(runtime, before), 60)
    assert threading.active_count() <= threads + 1


@pytest.mark.parametrize(("calls", "at_once"), [(20, 1), (40, 8)])
def test_calls_by_the_dozen_leave_nothing(runtime: RunscRuntime, calls: int, at_once: int) -> None:
    """In a row, and eight at a time; `make scale` does it with 500."""
    check_nothing_stays(runtime, calls, at_once)


ORPHANS = """
import sys, time
from pathlib import Path
from worker.runsc import Options, RunscRuntime
runtime = RunscRuntime(Path(sys.argv[1]), Path(sys.argv[2]), Options(ahead=1))
sandbox = runtime.start(None, memory=2**30)
runtime.prepare()
print(sandbox.name, flush=True)
time.sleep(60)
"""


def test_orphans_of_a_killed_worker_are_removed(rootfs: Path, tmp_path: Path) -> None:
    """The next run in its folder ends them: those that ran, and those that were only created."""
    command = [sys.executable, "-c", ORPHANS, str(rootfs), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout
        name = worker.stdout.readline().strip()
        worker.kill()
    assert control_groups(name)

    runtime = RunscRuntime(rootfs, tmp_path, Options(ahead=0))
    removed = runtime.remove_orphans()

    assert removed == 2
    assert list(runtime.sandboxes.iterdir()) == list(runtime.bundles.iterdir()) == []
    assert control_groups(name) == []
    assert not [command for command in read_command_lines(Path("/proc").glob("[0-9]*")) if name.encode() in command]
    runtime.close()


def test_what_runsc_could_not_delete_is_removed_all_the_same(
    rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state, the control groups and the files: as if `runsc delete` had done its part."""
    running = RunscRuntime(rootfs, tmp_path, Options(ahead=0))
    sandbox = running.start(None, memory=2**30)
    monkeypatch.setattr(running, "program", "/bin/false")

    sandbox.end()
    running.close()

    left = {name: count for name, count in count_all(running).items() if name in {"groups", "states", "bundles"}}
    assert left == {"groups": 0, "states": 0, "bundles": 0}


@pytest.fixture
def busy(rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunscRuntime, str]]:
    """A runtime, and the name of a sandbox that has ended, in whose control group a process lives on."""
    monkeypatch.setattr(cgroups, "EMPTY_S", 0.1)
    running = RunscRuntime(rootfs, tmp_path, Options(ahead=0))
    sandbox = running.start(None, memory=2**30)
    monkeypatch.setattr(running, "program", "/bin/false")  # runsc would wait for it
    with subprocess.Popen(["sleep", "60"]) as process:
        (cgroups.memory_group(sandbox.name) / "cgroup.procs").write_text(str(process.pid))
        running.cleaner.shutdown()  # so that it is deleted when `end` returns
        sandbox.end()
        process.kill()
    yield running, sandbox.name
    running.close()


def test_a_control_group_that_was_busy_is_removed_with_a_later_sandbox(busy: tuple[RunscRuntime, str]) -> None:
    """What takes long to end costs a worker no group for ever."""
    running, name = busy
    assert control_groups(name)

    running.delete("readie-ffffff-ffffffff")

    assert control_groups(name) == []
    assert list(running.bundles.iterdir()) == []


def test_a_control_group_that_was_busy_is_found_by_the_next_run(busy: tuple[RunscRuntime, str]) -> None:
    """The sandbox's bundle stays as long as anything else of it does, and says its name."""
    running, name = busy

    assert end_orphans(running.folder) == 1
    assert control_groups(name) == []
    assert end_orphans(running.folder) == 0


@pytest.mark.parametrize("number", [1, 2], ids=["the sandbox", "its gofer"])
def test_a_sandbox_that_cannot_be_watched_is_ended(
    rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """No descriptor is left for one of its processes: the start fails, all of them end and are reaped."""
    running = RunscRuntime(rootfs, tmp_path, Options(ahead=0))
    opened: list[int] = []
    pidfd_open = os.pidfd_open

    def refuse_one(pid: int) -> int:
        opened.append(pid)
        if len(opened) == number:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pidfd_open(pid)

    monkeypatch.setattr(os, "pidfd_open", refuse_one)
    with pytest.raises(StartFailed, match="Too many open files"):
        running.start(None, memory=2**30)
    running.close()

    assert not AWAITED & set(opened)
    assert not [pid for pid in opened[:number] if Path(f"/proc/{pid}").exists()]
    assert count_all(running)["states"] == count_all(running)["groups"] == 0


def test_a_sandbox_that_nobody_can_listen_to_is_ended(runtime: RunscRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong between its start and its first call."""
    call(runtime, len, ())
    before = count_idle(runtime)

    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr("worker.runtime.selectors.DefaultSelector", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            call(runtime, len, ())

    wait_for(lambda: same(runtime, before))


def time_end(runtime: RunscRuntime) -> float:
    """Seconds until nothing is left of a sandbox that is told to end."""
    sandbox = runtime.start(spec_of("empty"), memory=2**30)
    started = time.monotonic()
    sandbox.end()
    wait_for(lambda: not sandbox.bundle.exists())
    return time.monotonic() - started


def test_ending_a_sandbox_takes_milliseconds(runtime: RunscRuntime) -> None:
    """The agent reaps its processes: without that runsc waits for them, for more than a second."""
    assert min(time_end(runtime) for _ in range(5)) < 1


@pytest.mark.parametrize("text", ["-1", "0", "1", "", "x", "12 34", "-1234"])
def test_no_signal_goes_to_a_pid_that_is_not_above_1(tmp_path: Path, text: str) -> None:
    """-1 would be every process of the machine; such a pid is refused before anything is done with it."""
    (tmp_path / "pid").write_text(text)

    with pytest.raises(StartFailed, match="pid"):
        read_pid(tmp_path / "pid")


# ---- ahead ----


def test_a_sandbox_that_was_created_ahead_serves_one_call(runtime: RunscRuntime) -> None:
    """Two calls never have the same one."""

    def count() -> int:
        path = Path("/tmp/calls")
        path.write_text(path.read_text() + "x" if path.exists() else "x")
        return len(path.read_text())

    runtime.prepare()
    assert [call(runtime, count).value for _ in range(3)] == [1, 1, 1]


def test_one_that_died_before_it_was_asked_for_is_passed_over(runtime: RunscRuntime) -> None:
    """The call gets another, and nothing is left of the dead one."""
    runtime.prepare()
    [made] = runtime.made
    signal.pidfd_send_signal(made.exit_descriptor, signal.SIGKILL)
    made.wait_exit(5)

    assert call(runtime, len, ()).value == 0
    wait_for(lambda: made.ended)


# ---- the specification ----


def configure(**fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "rootfs": Path("/rootfs"),
        "bundle": Path("/bundle"),
        "folder": Path("/folder"),
        "arguments": ["python"],
        "name": "x",
        "memory": 1,
        "limits": Limits(),
        "network": "none",
        "gpu": Gpu(),
    }
    return make_configuration(**(given | fields))


def test_the_fingerprint_follows_what_a_restore_is_sensitive_to() -> None:
    """Network and devices, not limits or where mounts come from."""
    device = Gpu((Path("/dev/null"),), Path("/somewhere"))

    assert sensitive("none", Gpu()) == sensitive("none", Gpu())
    assert sensitive("none", Gpu()) != sensitive("host", Gpu())
    assert sensitive("none", Gpu()) != sensitive("none", device)


def altered(part: Any) -> Iterator[tuple[str, Any]]:
    """What a part of a configuration is with one thing in it altered, and what that was."""
    match part:
        case dict():
            for name, value in part.items():
                yield from ((f".{name}{where}", {**part, name: other}) for where, other in altered(value))
        case list() if part:
            yield "[less]", part[:-1]
            if len(part) > 1:
                yield "[order]", [*part[1:], part[0]]
            for number, value in enumerate(part):
                others = altered(value)
                yield from ((f"[]{where}", [*part[:number], other, *part[number + 1 :]]) for where, other in others)
        case list():
            yield "[more]", ["x"]
        case bool():
            yield "", not part
        case str():
            yield "", f"{part}x"
        case int():
            yield "", part + 1
        case _:
            raise AssertionError(part)


def test_every_part_of_the_configuration_is_in_the_fingerprint_or_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever is altered: flags, mounts and their order, namespaces, user, environment. Limits and sources change nothing."""
    (tmp_path / "readie_executor.py").write_text("1")

    def digest() -> str:
        return fingerprint(tmp_path, sensitive("none", Gpu()))

    def alter(function: str, value: Any) -> str:
        with monkeypatch.context() as patched:
            patched.setattr(f"worker.specification.{function}", lambda *_, **__: deepcopy(value))
            return digest()

    first = digest()
    flags = make_flags("none", Gpu())
    configuration = configure(
        name="", rootfs=Path("/"), bundle=Path("/"), folder=Path("/"), arguments=make_arguments("", {})
    )
    assert alter("make_configuration", configuration) == first
    changes = [(f"flags{where}", alter("make_flags", other)) for where, other in altered(flags)]
    changes += [(where, alter("make_configuration", other)) for where, other in altered(configuration)]
    (tmp_path / "readie_executor.py").write_text("2")

    assert alter("make_configuration", configuration) != first  # the executor's own files
    assert len(changes) > 80
    assert {where for where, found in changes if found == first} == {
        ".mounts[].source",
        ".linux.resources.memory.limit",
        ".linux.resources.pids.limit",
    }


def test_a_gpu_sandbox_has_devices_libraries_and_nvproxy() -> None:
    """Written by gVisor's and NVIDIA's documentation; no host with a GPU has run it."""
    gpu = Gpu((Path("/dev/null"),), Path("/libraries"))
    configuration = configure(gpu=gpu)

    assert "--nvproxy=true" in make_flags("none", gpu)
    assert "--nvproxy=true" not in make_flags("none", Gpu())
    assert [one["path"] for one in configuration["linux"]["devices"]] == ["/dev/null"]
    assert configuration["linux"]["resources"]["devices"][0]["access"] == "rwm"
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in configuration["process"]["env"]
    assert "LD_LIBRARY_PATH=/run" in configuration["process"]["env"]
    assert (configuration["mounts"][-1]["source"], configuration["mounts"][-1]["destination"]) == ("/libraries", "/run")


LISTED = """2 libs found in cache `/etc/ld.so.cache'
\tlibcuda.so.1 (libc6) => /lib/i386-linux-gnu/libcuda.so.1
\tlibcuda.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so.1
\tlibcuda.so.1 (libc6,x86-64) => /opt/older/libcuda.so.1
\tlibcuda.so.1 (libc6,AArch64) => /lib/aarch64-linux-gnu/libcuda.so.1
\tlibnvidia-ml.so.1 (libc6,x86-64, OS ABI: Linux 2.3.99) => /lib/x86_64-linux-gnu/libnvidia-ml.so.1
\tlibc.so.6 (libc6,x86-64) => /lib/x86_64-linux-gnu/libc.so.6
Cache generated by: ldconfig (Debian GLIBC 2.36-9) stable release version 2.36
"""


@pytest.mark.parametrize(
    ("machine", "found"),
    [
        ("x86_64", ["/lib/x86_64-linux-gnu/libcuda.so.1", "/lib/x86_64-linux-gnu/libnvidia-ml.so.1"]),
        ("aarch64", ["/lib/aarch64-linux-gnu/libcuda.so.1"]),
        ("riscv64", []),
    ],
)
def test_a_driver_is_that_of_the_machines_architecture(machine: str, found: list[str]) -> None:
    """Those of others have the same names; of two of one architecture it is the one that the loader takes."""
    assert [str(path) for path in find_driver(LISTED, machine)] == found


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this host has a GPU")
def test_a_gpu_runtime_refuses_a_host_without_one(rootfs: Path, tmp_path: Path) -> None:
    """Before anything is started, and it says what is missing."""
    with pytest.raises(NeedsGpu, match="NVIDIA"):
        RunscRuntime(rootfs, tmp_path, Options(flavor=Flavor.GPU))


# ---- what it needs ----


def test_a_virtual_environment_is_no_root_filesystem(tmp_path: Path) -> None:
    """Its Python lies outside; the message names the command that makes one."""
    rootfs = make_rootfs(tmp_path / "rootfs", {})

    with pytest.raises(RuntimeUnavailable, match="no Python of its own") as caught:
        RunscRuntime(rootfs, tmp_path)

    assert "readie-pipeline rootfs" in caught.value.hint


def test_its_python_runs_on_the_host_by_its_own_libraries(runtime: RunscRuntime) -> None:
    """Whatever C library the host has, a container for example: wheels are chosen by it, and the executor compiled."""
    code = "import json, ssl, sys; print(json.dumps([sys.path, sys.executable, open('/proc/self/maps').read()]))"
    done = subprocess.run([runtime.python, "-I", "-c", code], capture_output=True, text=True, check=True)
    path, executable, maps = json.loads(done.stdout)
    mapped = {line.split()[-1] for line in maps.splitlines() if ".so" in line}

    assert str(site_packages(runtime.rootfs)) in path
    assert executable == str(runtime.rootfs / "usr" / "bin" / "python3")
    assert any("libc." in name for name in mapped)
    assert [name for name in mapped if not name.startswith(str(runtime.rootfs))] == []


def test_folders_to_mount_are_not_created_in_a_root_filesystem(tmp_path: Path) -> None:
    """One that lacks them is refused: it is not to change."""
    rootfs = make_sealed_rootfs(tmp_path / "rootfs", {})
    (rootfs / "call").rmdir()

    with pytest.raises(RuntimeUnavailable, match="no folder call"):
        RunscRuntime(rootfs, tmp_path)

    assert not (rootfs / "call").exists()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("runsc version 0.0~20221219.0", "too old"),
        ("runsc version VERSION_MISSING", "no release"),
        (None, "not installed"),
    ],
)
def test_a_runsc_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None, reason: str
) -> None:
    """The release that Debian installs by default cannot save as is needed; the message names another."""
    monkeypatch.setenv("PATH", str(tmp_path))
    if answer:
        (tmp_path / "runsc").write_text(f"#!/bin/sh\necho '{answer}'\n")
        (tmp_path / "runsc").chmod(0o755)

    with pytest.raises(RuntimeUnavailable, match=reason) as caught:
        find_runsc()

    assert "bookworm-backports" in caught.value.hint


def test_a_measured_process_is_a_sandbox_too(runtime: RunscRuntime) -> None:
    """Files are named as the host has them; memory counts by VmRSS, for gVisor tells no other."""
    from worker.measure import ProbeRequest, measure

    answer = measure(runtime, ProbeRequest(id=1, modules=["blob"], mode="memory"), timeout=30, memory=2**30)

    assert answer["ok"]
    [blob] = [module for module in answer["modules"] if module["name"] == "blob"]
    assert blob["file"] == str(site_packages(runtime.rootfs) / "blob" / "__init__.py")
    assert 58_000 < blob["kb"] < 64_000
    assert 59 < answer["rss_mb"] < 66
    assert answer["network"] == "none"
    assert runtime.describe().memory_source == "VmRSS"


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("crasher", ("signal", "SIGSEGV")),
        ("ender", ("no-result", "the process ended with exit code 7, without a result")),
        ("sleeper", ("timeout", "it took longer than 1 s")),
        ("forker", None),
        ("closer", None),
    ],
)
def test_a_hostile_package_spoils_only_itself(
    runtime: RunscRuntime, name: str, failure: tuple[str, str] | None
) -> None:
    """As under the fork runtime: it is measured or says what happened, and what was measured before stays."""
    from worker.measure import ProbeRequest, measure

    request = ProbeRequest(id=1, modules=["p_ok", name], mode="time")
    answer = measure(runtime, request, timeout=1 if name == "sleeper" else 30, memory=2**30)

    assert answer["failure"] == (failure and dict(zip(("kind", "detail"), failure, strict=True)))
    found = {module["name"] for module in answer["modules"] if not module["stdlib"]}
    assert found == ({"p_ok"} if failure else {"p_ok", name})


def test_a_measured_process_over_its_memory_says_so(runtime: RunscRuntime) -> None:
    """The limit is the kernel's; the answer is the same as under the fork runtime."""
    from worker.measure import ProbeRequest, measure

    answer = measure(runtime, ProbeRequest(id=1, modules=["blob"], mode="time"), timeout=30, memory=80 * MIB)

    assert answer["failure"]["kind"] == "memory"


def test_a_measured_process_cannot_fill_the_hosts_disk(runtime: RunscRuntime) -> None:
    """The file for its result is the one thing outside that it can write to: one that makes it larger is ended."""
    from worker.measure import ProbeRequest, measure

    answer = measure(runtime, ProbeRequest(id=1, modules=["scribbler"], mode="time"), timeout=60, memory=2**30)

    assert (answer["ok"], answer["failure"]["kind"]) == (False, "no-result")
    assert f"larger than {ROOM} bytes" in answer["failure"]["detail"]


def test_the_pipeline_makes_a_generation_of_sandboxes(
    rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`generation --runtime runsc` measures, plans, captures and restores in gVisor; `verify` holds it to fresh imports."""
    monkeypatch.setattr("pipeline.capture.RESTORES", 1)
    monkeypatch.setattr("pipeline.capture.BALLAST_MB", ())
    (tmp_path / "example.py").write_text("import tower\n")

    def pipeline(*arguments: object) -> Any:
        options = ["--rootfs", rootfs, "--runtime", "runsc", "--out", tmp_path / "out", "--json"]
        monkeypatch.setattr(sys, "argv", ["readie-pipeline", *map(str, arguments), *map(str, options)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert not ended.value.code, printed.err
        return json.loads(printed.out)

    report = pipeline(
        *("generation", tmp_path / "example.py", "--repeats", 1, "--max-repeats", 1),
        *("--alpha", 0.0001, "--max-checkpoints", 2),
    )
    verified = pipeline("verify", "--sample", 1, "--repeats", 1, "--max-repeats", 1)

    manifest = report["manifest"]
    assert (manifest["host"]["runtime"], manifest["memory_source"]) == ("runsc", "VmRSS")
    assert [one["checkpoint_id"] for one in manifest["checkpoints"]] == ["checkpoint_0", "checkpoint_1"]
    assert 9 < manifest["checkpoints"][1]["measured_mb"] < 14
    place = tmp_path / "out" / "checkpoints" / report["generation"]
    assert {path.parent.parent.name for path in place.glob("*/image/checkpoint.img")} == {
        "checkpoint_0",
        "checkpoint_1",
    }
    assert read_spec(place / "checkpoint_1" / "checkpoint.json").canonical == ("tower",)
    assert len(read_document(tmp_path / "out" / "catalogue.json").checkpoints) == 2
    assert verified["checked"]
    assert verified["failed"] == []
    assert all(one["clock_s"] >= 0.1 for one in verified["checked"])  # what `tower` sleeps


@pytest.mark.parametrize("command", ["create", "start", "restore", "checkpoint"])
def test_a_command_that_hangs_is_given_up(
    runtime: RunscRuntime, rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A runsc that does not answer makes a failed start or capture, not a worker that waits for ever."""
    stuck = RunscRuntime(rootfs, tmp_path, Options(ahead=0))
    stuck.load(spec_of("empty"), runtime.folder / "checkpoints" / "empty", timeout=60)
    slow = tmp_path / "slow"
    hang = f'case " $* " in *" {command} "*) exec /bin/sleep 30;; esac'
    slow.write_text(f'#!/bin/sh\n{hang}\nexec {stuck.program} "$@"\n')
    slow.chmod(0o755)
    stuck.program = str(slow)
    for name in ("COMMAND_S", "SAVE_S"):
        monkeypatch.setattr(f"worker.runsc.{name}", 5.0)

    actions: dict[str, Callable[[], object]] = {
        "create": lambda: stuck.start(None, memory=2**30),
        "start": lambda: stuck.start(None, memory=2**30),
        "restore": lambda: stuck.start(spec_of("empty"), memory=2**30),
        "checkpoint": lambda: stuck.save(spec_of("empty"), tmp_path / "checkpoint", timeout=60),
    }
    with pytest.raises((StartFailed, SaveFailed), match=f"runsc {command} took longer than 5 s"):
        actions[command]()

    stuck.close()
    assert count_all(stuck)["processes"] == count_all(stuck)["groups"] == 0
    assert list(stuck.sandboxes.iterdir()) == list(stuck.bundles.iterdir()) == []


def test_a_command_that_is_told_to_end_leaves_no_sandbox(rootfs: Path, tmp_path: Path) -> None:
    """SIGTERM in the middle of a measurement: the measured process ends with its command."""
    command = [sys.executable, "-m", "worker.cli", "probe", "--rootfs", str(rootfs), "--runtime", "runsc"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdin
        process.stdin.write(b'{"id": 1, "modules": ["sleeper"], "mode": "plain"}\n')
        process.stdin.flush()
        wait_for(lambda: list(tmp_path.glob("readie-worker-*/sandboxes/*/result")), 30)
        [name] = [path.parent.name for path in tmp_path.glob("readie-worker-*/sandboxes/*/result")]
        time.sleep(1)
        process.terminate()
        process.wait(30)

    assert list(tmp_path.glob("readie-worker-*")) == []
    assert control_groups(name) == []


def test_checkpoints_are_bound_to_the_root_filesystems_files(rootfs: Path, tmp_path: Path) -> None:
    """Another digest in what the root filesystem says of itself is another host: its old checkpoints are not offered."""
    copy = tmp_path / "rootfs"
    subprocess.run(["cp", "--archive", rootfs, copy], check=True)
    (tmp_path / "runtime").mkdir()
    runtime = RunscRuntime(copy, tmp_path / "runtime", Options(ahead=0))
    before = runtime.describe().host
    record = copy / "etc" / "readie" / "rootfs.json"
    record.write_text(record.read_text() + " ")
    after = runtime.describe().host
    runtime.close()

    assert before.rootfs_digest != after.rootfs_digest
