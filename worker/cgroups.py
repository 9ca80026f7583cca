"""A sandbox's memory, as the kernel's control groups count and limit it; version 1 and version 2 of their files.

`name` is the group's, at the top of the hierarchy.
"""

import contextlib
import errno
import time
from functools import cache
from pathlib import Path

TOP = Path("/sys/fs/cgroup")
NEARLY = 0.97  # of a limit: when memory was refused here, files kept less than 0.3 % of it
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
    total = (memory_group(name) / ("memory.current" if is_unified() else "memory.usage_in_bytes")).read_text()
    return max(0, int(total) - file_memory(name))


def file_memory(name: str) -> int:
    """Bytes of files that were read, which the kernel takes back where memory is wanted. Raises `OSError`."""
    fields = read_fields(memory_group(name) / "memory.stat")
    prefix = "" if is_unified() else "total_"
    return fields.get(f"{prefix}inactive_file", 0) + fields.get(f"{prefix}active_file", 0)


def limit_memory(name: str, limit: int) -> None:
    """Sets the limit, in bytes; `ran_out` is about this one. Raises `OSError`, also where more is in use already."""
    group = memory_group(name)
    (group / ("memory.max" if is_unified() else "memory.limit_in_bytes")).write_text(str(limit))
    if not is_unified():
        for counter in ("memory.failcnt", "memory.max_usage_in_bytes"):
            (group / counter).write_text("0")


def pause_when_full(name: str) -> None:
    """Has what wants more memory than the limit wait, rather than be killed at once: then the limit may still grow.

    Version 2 knows no such thing; there the kernel kills, and `was_full` says so.
    """
    with contextlib.suppress(OSError):
        (memory_group(name) / "memory.oom_control").write_text("1")


def forbid_swap(name: str) -> None:
    """Has the kernel swap nothing of it: what is swapped out is not in use, and no limit would hold it."""
    with contextlib.suppress(OSError):
        (memory_group(name) / ("memory.swap.max" if is_unified() else "memory.swappiness")).write_text("0")


def ring(name: str, bell: int, used: int) -> None:
    """Has the kernel write to the eventfd `bell` when more than `used` bytes are in use, and when something has to wait.

    Version 1 alone. What files keep counts as used.
    """
    group = memory_group(name)
    with contextlib.suppress(OSError):
        for file, argument in (("memory.usage_in_bytes", f" {used}"), ("memory.oom_control", "")):
            with (group / file).open("rb") as watched:
                (group / "cgroup.event_control").write_text(f"{bell} {watched.fileno()}{argument}")


def was_full(name: str) -> bool:
    """Whether something waits for memory beyond the limit, or was killed for it."""
    file = "memory.events" if is_unified() else "memory.oom_control"
    try:
        fields = read_fields(memory_group(name) / file)
    except OSError:
        return False
    return bool(fields.get("under_oom") or fields.get("oom_kill") or fields.get("oom"))


def was_crowded(name: str) -> bool:
    """Whether it was refused a process or thread, for it had as many as it may have."""
    try:
        return bool(read_fields((TOP if is_unified() else TOP / "pids") / name / "pids.events").get("max"))
    except OSError:
        return False


def ran_out(name: str, limit: int) -> bool:
    """Whether a process of the group that has ended, or failed, may have done so because it reached `limit`, in bytes.

    With `pause_when_full`, what the kernel itself wants for a process cannot wait: a call fails, as one that makes
    gVisor's memory larger, and no counter says so. But the kernel has taken back then what files kept. So what is still
    kept for them tells how much else there was, at most, when the limit was reached: files alone reach it too, and harm
    nobody. Version 2 does count it, see `was_full`.
    """
    if is_unified():
        return False
    group = memory_group(name)
    try:
        if not int((group / "memory.failcnt").read_text()):
            return False
        most = int((group / "memory.max_usage_in_bytes").read_text())
        return most - file_memory(name) > limit * NEARLY
    except OSError:
        return False


def remove_groups(name: str, *, wait_s: float = EMPTY_S) -> bool:
    """Removes what is left of a group, in every hierarchy, once its processes have ended; False if one stays."""
    tops = [TOP] if is_unified() else [path for path in TOP.iterdir() if path.is_dir() and not path.is_symlink()]
    deadline = time.monotonic() + wait_s
    gone = True
    for top in tops:
        while True:
            try:
                (top / name).rmdir()
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno == errno.EBUSY and time.monotonic() < deadline:  # its last process still ends
                    time.sleep(0.01)
                    continue
                gone = gone and not (top / name).exists()  # where nothing is there, a hierarchy may still refuse
            break
    return gone
