"""Root filesystems for tests, and calls run in real sandboxes."""

import atexit
import os
import pickle
import shutil
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import cloudpickle
import numpy as np
import pytest

from pipeline.rootfs_build import build_rootfs, copy_libraries, find_objects, find_python
from readie.errors import RuntimeUnavailable
from readie.manifest import CheckpointSpec
from readie.wire import Result, Stream
from worker import cgroups
from worker.runsc import find_runsc
from worker.runtime import Call, Runtime, Stop, Ties, run_call

PICKLING = threading.Lock()
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def make_rootfs(folder: Path, packages: Mapping[str, str], *, with_project: bool = False) -> Path:
    """A virtual environment with `packages`: file below its site-packages → content.

    `with_project` adds what is installed where the tests run (numpy, say), by a path file.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    for file, content in packages.items():
        write_package(folder, file, content)
    if with_project:
        write_package(folder, "project.pth", "\n".join(site.getsitepackages()) + "\n")
    return folder


@cache
def bare_rootfs() -> Path:
    """A root filesystem that stands alone, with nothing but Python; made once."""
    folder = Path(tempfile.mkdtemp(prefix="readie-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build_rootfs(folder / "rootfs", [])
    return folder / "rootfs"


def make_sealed_rootfs(folder: Path, packages: Mapping[str, str]) -> Path:
    """A root filesystem that can be the `/` of a sandbox of gVisor, with `packages` as `make_rootfs` takes them."""
    subprocess.run(["cp", "--archive", "--link", bare_rootfs(), folder], check=True)
    for file, content in packages.items():
        write_package(folder, file, content)
    return folder


def add_numpy(rootfs: Path) -> None:
    """Gives a root filesystem that stands alone the NumPy that is installed where the tests run."""
    source = Path(np.__file__).parent
    there = site_packages(rootfs)
    for folder in (source, *source.parent.glob("numpy.libs")):
        subprocess.run(["cp", "--archive", folder, there / folder.name], check=True)
    copy_libraries(rootfs, find_python(None), {path: path for path in find_objects([there / source.name])})


def site_packages(rootfs: Path) -> Path:
    below = rootfs / "usr" if (rootfs / "usr").exists() else rootfs
    return below / "lib" / f"python{PYTHON}" / "site-packages"


def control_groups(prefix: str) -> list[Path]:
    """Control groups whose name begins so: version 1 has them below each hierarchy, version 2 at the top."""
    return [*cgroups.TOP.glob(f"{prefix}*"), *cgroups.TOP.glob(f"*/{prefix}*")]


def needs_runsc() -> None:
    """Skips the tests that need gVisor where it was said that they cannot run; elsewhere they fail without it."""
    if os.environ.get("ALLOW_NO_RUNSC") == "1":
        try:
            find_runsc()
        except RuntimeUnavailable as error:
            pytest.skip(f"ALLOW_NO_RUNSC=1, and {error.detail}", allow_module_level=True)


def write_package(rootfs: Path, file: str, content: str) -> None:
    """A file below the root filesystem's site-packages; a name without any dot is a package's `__init__.py`."""
    path = site_packages(rootfs) / (file if "." in file else f"{file}/__init__.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(content))


@dataclass
class Ran:
    """A call that was run: its result, what it printed, and how many sandboxes' limits grew."""

    result: Result
    printed: dict[Stream, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})
    grown: list[int] = field(default_factory=list)

    @property
    def value(self) -> Any:
        """What the function returned."""
        assert self.result.outcome == "returned", self.result.problem
        return pickle.loads(self.result.payload)

    @property
    def error(self) -> Any:
        """What the function raised, unpickled."""
        assert self.result.outcome == "raised", self.result
        return pickle.loads(self.result.payload)

    @property
    def slug(self) -> str:
        """Which problem kept the call from having a result."""
        assert self.result.outcome in {"failed", "cancelled"}, self.result
        assert self.result.problem
        return self.result.problem.type.rpartition(":")[2]

    @property
    def detail(self) -> str:
        assert self.result.problem
        return self.result.problem.detail


def dump_call(function: Callable[..., Any], *args: Any) -> bytes:
    """A payload: functions of test modules go by value, because no root filesystem has them."""
    module = sys.modules[function.__module__]
    by_value = module.__name__.startswith("test")
    with PICKLING:  # which modules go by value is of the process
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        try:
            payload: bytes = cloudpickle.dumps((function, args, {}))
            return payload
        finally:
            if by_value:
                cloudpickle.unregister_pickle_by_value(module)


def run(
    runtime: Runtime,
    function: Callable[..., Any],
    *args: Any,
    spec: CheckpointSpec | None = None,
    payload: bytes | None = None,
    python: str = PYTHON,
    modules: Sequence[str] = (),
    memory: int = 2**30,
    max_memory: int | None = None,
    timeout: float = 30.0,
    start_timeout: float = 30.0,
    max_payload: int = 2**20,
    stop: Stop | None = None,
    permit: Callable[[], bool] = lambda: True,
) -> Ran:
    """Runs one call in a sandbox."""
    ran = Ran(Result(outcome="failed"))

    def note(stream: Stream, text: str) -> None:
        ran.printed[stream] += text

    def grow(limit: int) -> bool:
        ran.grown.append(limit)
        return True

    call = Call(
        payload=payload if payload is not None else dump_call(function, *args),
        python=python,
        modules=list(modules),
        memory=memory,
        max_memory=max_memory or memory,
        timeout=timeout,
        start_timeout=start_timeout,
        max_payload=max_payload,
    )
    with Stop() as own_stop:
        ties = Ties(stop=stop or own_stop, on_output=note, grow=grow, permit=permit)
        ran.result = run_call(runtime, spec, call, ties, arrived=time.monotonic())
    return ran


def read_command_lines(folders: Iterable[Path]) -> list[bytes]:
    """Of these processes' folders in /proc, as far as they have not ended meanwhile."""
    lines = []
    for folder in folders:
        with suppress(OSError):
            lines.append((folder / "cmdline").read_bytes())
    return lines


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Waits until the condition holds, and gives what it gave; fails the test if it does not."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value
