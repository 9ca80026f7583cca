"""A sandbox's memory, as the kernel's control groups count and limit it; version 1 and version 2 of their files.

`name` is the group's, at the top of the hierarchy.
"""

import contextlib
import errno
import time
from functools import cache
from pathlib import Path

TOP = Path("/sys/fs/cgroup")
EMPTY_S = 2.0  # how long a group may take to become empty, once its processes were told to end


@cache
def is_unified() -> bool:
    """Whether this host has version 2 alone."""
    return (TOP / "cgroup.controllers").exists()


def memory_group(name: str) -> Path:
    return TOP / name if is_unified() else TOP / "memory" / name


def read_fields(path: Path) -> dict[str, int]:
    """The lines `name value` of a file. Raises `OSError`."""
    pairs = (line.split() for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def used_memory(name: str) -> int:
    """Bytes that cannot be taken back: all but what files keep. Raises `OSError` once the group is gone."""
    group = memory_group(name)
    fields = read_fields(group / "memory.stat")
    if is_unified():
        total, prefix = int((group / "memory.current").read_text()), ""
    else:
        total, prefix = int((group / "memory.usage_in_bytes").read_text()), "total_"
    return max(0, total - fields.get(f"{prefix}inactive_file", 0) - fields.get(f"{prefix}active_file", 0))


def limit_memory(name: str, limit: int) -> None:
    """Sets the limit, in bytes. Raises `OSError`, also where more is in use already."""
    file = "memory.max" if is_unified() else "memory.limit_in_bytes"
    (memory_group(name) / file).write_text(str(limit))


def pause_when_full(name: str) -> None:
    """Has what wants more memory than the limit wait, rather than be killed at once: then the limit may still grow.

    Version 2 knows no such thing; there the kernel kills, and `was_full` says so.
    """
    with contextlib.suppress(OSError):
        (memory_group(name) / "memory.oom_control").write_text("1")


def was_full(name: str) -> bool:
    """Whether something waits for memory beyond the limit, or was killed for it."""
    file = "memory.events" if is_unified() else "memory.oom_control"
    try:
        fields = read_fields(memory_group(name) / file)
    except OSError:
        return False
    return bool(fields.get("under_oom") or fields.get("oom_kill"))


def most_memory(name: str) -> int:
    """The most bytes that were ever in use, what files keep included; 0 where the kernel does not say."""
    try:
        return int((memory_group(name) / ("memory.peak" if is_unified() else "memory.max_usage_in_bytes")).read_text())
    except OSError:
        return 0


def remove_groups(name: str) -> None:
    """Removes what is left of a group, in every hierarchy, once its processes have ended."""
    tops = [TOP] if is_unified() else [path for path in TOP.iterdir() if path.is_dir() and not path.is_symlink()]
    deadline = time.monotonic() + EMPTY_S
    for top in tops:
        while True:
            try:
                (top / name).rmdir()
            except OSError as error:
                if error.errno == errno.EBUSY and time.monotonic() < deadline:  # its last process still ends
                    time.sleep(0.01)
                    continue
            break
