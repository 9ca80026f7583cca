"""The runtimes, by name."""

import fcntl
import os
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from readie.errors import BadRequest
from readie.flavor import check_gpu
from worker.fork import ForkRuntime
from worker.runsc import Options, RunscRuntime, remove_leftovers
from worker.runtime import Runtime

PREFIX = "readie-worker-"  # of the folders of commands
YOUNG_S = 10.0  # a folder that new may not be locked yet


def open_runtime(name: str, rootfs: Path, folder: Path, options: Options) -> Runtime:
    """The runtime called `name`, which keeps what it needs in `folder`; `options` are of runsc alone.

    Raises `RuntimeUnavailable`, `NeedsGpu`, `BadRequest`.
    """
    if name == "fork":
        return ForkRuntime(rootfs, folder)
    if name == "runsc":
        return RunscRuntime(rootfs, folder, options)
    raise BadRequest(f"{name!r} is not a runtime", "Use fork or runsc.")


@contextmanager
def opened(name: str, rootfs: Path, options: Options) -> Iterator[Runtime]:
    """A runtime with a folder of its own, for one command. Raises `NeedsGpu` where there is no GPU for flavor gpu."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    check_gpu(options.flavor)
    sweep()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder, held(Path(folder)):
        runtime = open_runtime(name, rootfs, Path(folder), options)
        try:
            yield runtime
        finally:
            runtime.close()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Locks a command's folder as long as the command runs."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def sweep() -> None:
    """Ends and removes what commands of this user left behind that were killed: sandboxes of gVisor outlive them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            status = folder.lstat()
            young = time.time() - status.st_mtime < YOUNG_S
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or young:
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_leftovers(folder)
        except OSError:
            pass  # its command still runs
        finally:
            os.close(lock)
