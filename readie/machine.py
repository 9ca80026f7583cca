"""What this machine has, as the kernel says it: for the checks of `doctor`."""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Memory(NamedTuple):
    """Bytes that this process may use at most, and how many of them are free."""

    total: int
    free: int


def read_memory() -> Memory:
    """The machine's memory, or less where control groups allow this process less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (1024 * int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    for group in _groups():
        for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(OSError, ValueError):  # `max`, and other controllers: no limit
                limit = int((group / most).read_text())
                if limit < total:
                    taken = int((group / used).read_text()) - _reclaimable(group)
                    total, free = limit, min(free, limit - taken)
    return Memory(total, max(0, free))


def _reclaimable(group: Path) -> int:
    """Bytes of files that a control group has read and that count as its memory until somebody else needs the room."""
    with suppress(OSError):
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    return 0


def _groups() -> list[Path]:
    """The folders of the memory control groups that this process is in, version 1 and 2."""
    top = Path("/sys/fs/cgroup")
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in {"", "memory"}:
            here = top / "memory" if controllers else top
            inner = here / path.lstrip("/")
            found += [inner, *(parent for parent in inner.parents if parent.is_relative_to(here))]
    return found


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def gib(amount: float) -> str:
    """Bytes for people."""
    return f"{amount / 2**30:.1f} GiB"
