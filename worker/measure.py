"""Measuring imports: a fresh process for each request, with limits, of which every ending is a truthful answer."""

import contextlib
import os
import select
import sys
import time
from typing import IO, Annotated, Any, Literal

import msgspec

from readie.wire import Modules, Record
from worker.probe import ROOM
from worker.runtime import Runtime, Sandbox, StartFailed, printable

START_S = 60.0  # what a process may take until it begins to import

Mode = Literal["time", "memory", "edges", "plain"]


class ProbeRequest(Record, frozen=True, kw_only=True):
    """One measurement: import `modules`, in order, in a fresh process."""

    id: int
    modules: Annotated[Modules, msgspec.Meta(min_length=1)]
    mode: Mode = "time"


class Known(msgspec.Struct):
    """What the probe knows of a module besides its figure."""

    file: str | None = None
    stdlib: bool | None = None
    asks: list[str] = []


class Whole(msgspec.Struct):
    """The last line of a result: what importing took in all, and how it ended."""

    wall_s: float
    cpu_s: float
    waited_s: float
    disk_mb: float
    rss_mb: float
    network: str
    failure: dict[str, str] | None
    raw_rss_mb: float | msgspec.UnsetType = msgspec.UNSET
    pace_s: list[float] | None = None
    threads: int | None = None
    modules: dict[str, Known] = {}


def measure(runtime: Runtime, request: ProbeRequest, *, timeout: float, memory: int) -> dict[str, Any]:
    """The answer to `request`: what each module cost, and how the process ended if it did not end well.

    `timeout` is for the imports, in seconds, `memory` for the whole process with all that it started, in bytes.
    """
    answer: dict[str, Any] = {"id": request.id, "ok": False, "mode": request.mode}
    options = {"modules": request.modules, "mode": request.mode}
    try:
        sandbox = runtime.start_probe(options, memory=memory)
    except StartFailed as error:
        return answer | _nothing() | {"failure": {"kind": "no-result", "detail": str(error)}}
    with contextlib.ExitStack() as stack:
        stack.callback(sandbox.end)
        file = stack.enter_context((sandbox.folder.path / "result").open("r+b", 0))
        failure = wait(sandbox, file.fileno(), timeout=timeout, memory=memory)
        sandbox.end()
        result = read_result(file)  # by its descriptor, for what was measured may have removed the file
    for known in result.known.values():
        known.file = known.file and str(runtime.outside(known.file))
    modules = [describe(name, figure, request.mode, result.known[name]) for name, figure in result.figures.items()]
    if result.whole is None:
        return answer | _nothing() | {"modules": modules, "failure": failure}
    whole: dict[str, Any] = msgspec.to_builtins(result.whole)
    return answer | whole | {"ok": result.whole.failure is None, "modules": modules}


def _nothing() -> dict[str, Any]:
    unknown = ("wall_s", "cpu_s", "waited_s", "disk_mb", "pace_s", "rss_mb", "threads", "network")
    return {**dict.fromkeys(unknown), "modules": []}


def wait(sandbox: Sandbox, result: int, *, timeout: float, memory: int) -> dict[str, str]:
    """Waits for the process to end within its limits; how it ended, should there be no result.

    `result` is a descriptor of the result file: time counts from when there is something in it. What is measured can
    write to it, and it lies on the host's disk: whatever makes it larger than it was made is ended.
    """
    poll = select.poll()
    poll.register(sandbox.exit_descriptor, select.POLLIN)
    began = time.monotonic()
    deadline, started = began + START_S, False
    while not poll.poll(20):
        now = time.monotonic()
        if not started and os.pread(result, 1, 0).strip(b"\0"):
            started, deadline = True, now + timeout
        used = sandbox.memory()
        if used > memory:
            used = sandbox.memory(exact=True)
        if used > memory or sandbox.starved():
            return {"kind": "memory", "detail": f"it used {used} bytes, the limit is {memory}"}
        if os.fstat(result).st_size > ROOM:
            return {"kind": "no-result", "detail": f"it made the file for its result larger than {ROOM} bytes"}
        if now > deadline:
            took = f"longer than {timeout:g} s" if started else f"{now - began:.0f} s to start"
            return {"kind": "timeout", "detail": f"it took {took}"}
    ending = sandbox.ending()
    if sandbox.starved():
        return {"kind": "memory", "detail": f"it wanted more than the limit of {memory} bytes"}
    if ending.startswith(("SIG", "signal")):
        return {"kind": "signal", "detail": ending}
    return {
        "kind": "no-result",
        "detail": f"the process ended with {ending or 'an unknown exit code'}, without a result",
    }


class ReadResult(msgspec.Struct):
    """What the probe wrote: of each module that was loaded its figure (ns, kB or threads), and the end if it got that far."""

    figures: dict[str, int] = {}
    known: dict[str, Known] = {}
    whole: Whole | None = None


def read_result(file: IO[bytes]) -> ReadResult:
    """The result in `file`, as far as it makes sense: whatever was measured had a hand on it. At most `ROOM` bytes."""
    data = bytearray()
    file.seek(0)
    while len(data) < ROOM and (chunk := file.read(65536)) and not data.endswith(b"\0"):
        data += chunk
    result = ReadResult()
    lines = bytes(data).partition(b"\0")[0].split(b"\n")
    for line in lines[:-1]:  # the last one has no end
        first, _, rest = line.partition(b"\t")
        name, _, known = rest.partition(b"\t")
        try:
            if first == b"=":
                result.whole = msgspec.json.decode(rest, type=Whole)
            elif name and len(first) < 20:
                text = name.decode()
                result.figures[text] = result.figures.get(text, 0) + int(first)
                result.known[text] = msgspec.json.decode(known, type=Known) if known else Known()
        except ValueError:  # of every kind: no number, no text, no JSON, not what is expected
            continue
    if result.whole is not None:
        for text, described in result.whole.modules.items():
            if text in result.known:
                result.known[text] = described
        result.whole.modules = {}
    return result


def describe(name: str, figure: int, mode: Mode, known: Known) -> dict[str, Any]:
    """A module of an answer. A figure below zero (memory may fall) becomes 0, with the raw one beside it."""
    stdlib = name.partition(".")[0] in sys.stdlib_module_names if known.stdlib is None else known.stdlib
    entry: dict[str, Any] = {
        "name": printable(name),
        "seconds": max(figure, 0) / 1e9 if mode == "time" else None,
        "kb": max(figure, 0) if mode == "memory" else None,
        "threads": max(figure, 0) if mode == "edges" else None,
        "asks": [printable(asked) for asked in known.asks] if mode == "edges" else None,
        "stdlib": stdlib,
        "file": known.file,
    }
    if figure < 0 and mode == "time":
        entry["raw_seconds"] = figure / 1e9
    if figure < 0 and mode == "memory":
        entry["raw_kb"] = figure
    return entry
