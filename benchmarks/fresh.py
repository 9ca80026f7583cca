"""A function in a fresh process: what it returns, how long the process lived, how much memory it took.

The result comes back on a pipe of its own, so that nothing that is printed can spoil it. Peak memory is the kernel's
`VmHWM` of the new interpreter, libraries included.
"""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).parent.parent


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds` are the process's, from start to end."""

    value: Any
    peak_mb: float
    seconds: float = 0.0


def run_fresh(function: Callable[..., Any], **arguments: Any) -> Outcome:
    """Calls a function of a module, with arguments and a result that JSON can carry, in a process of its own."""
    name = f"{function.__module__}:{function.__qualname__}"
    reading, writing = os.pipe()
    begin = time.perf_counter()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fresh", name, str(writing)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            pass_fds=[writing],
        )
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(arguments))
        process.stdin.close()
        answer = pipe.read()
        code = process.wait()
    seconds = time.perf_counter() - begin
    if code != 0 or not answer:
        raise RuntimeError(f"{name} ended with {code}; what it said is above")
    return msgspec.structs.replace(msgspec.json.decode(answer, type=Outcome), seconds=seconds)


def memory_mb(field: str, process_id: int | str = "self") -> float:
    """A process's `VmRSS` (memory now) or `VmHWM` (most so far), in MB."""
    status = Path(f"/proc/{process_id}/status").read_text(encoding="ascii", errors="replace")
    [line] = [line for line in status.splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024 / 1e6


def cpu_seconds(process_id: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{process_id}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _child() -> None:
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    value = function(**msgspec.json.decode(sys.stdin.buffer.read()))
    outcome = Outcome(value=value, peak_mb=memory_mb("VmHWM"))
    with os.fdopen(int(sys.argv[2]), "wb") as pipe:
        pipe.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    _child()
