"""Measuring imports: a fresh process for each request, with limits, of which every ending is a truthful answer."""

import select
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

import msgspec

from readie.wire import Modules, Record
from worker.runtime import Folder, Runtime, Sandbox, StartFailed, printable

Mode = Literal["time", "memory", "edges", "plain"]


class ProbeRequest(Record, frozen=True, kw_only=True):
    """One measurement: import `modules`, in order, in a fresh process."""

    id: int
    modules: Annotated[Modules, msgspec.Meta(min_length=1)]
    mode: Mode = "time"


def measure(runtime: Runtime, request: ProbeRequest, folder: Path, *, timeout: float, memory: int) -> dict[str, Any]:
    """The answer to `request`: what each module cost, and how the process ended if it did not end well."""
    answer: dict[str, Any] = {"id": request.id, "ok": False, "mode": request.mode}
    with Folder(folder / f"probe-{uuid4().hex[:12]}") as place:
        result = place.path / "result"
        result.touch(0o600)
        options = {"modules": request.modules, "mode": request.mode}
        try:
            sandbox = runtime.start_probe(options, place)
        except StartFailed as error:
            return answer | _nothing() | {"failure": {"kind": "no-result", "detail": str(error)}}
        try:
            failure = wait(sandbox, timeout=timeout, memory=memory)
        finally:
            sandbox.end()
        partial, final = read_result(result)
    if final is None:
        modules = [describe(name, figure, request.mode, {}) for name, figure in partial.items()]
        return answer | _nothing() | {"modules": modules, "failure": failure}
    known = {entry["name"]: entry for entry in final.pop("modules")}
    modules = [describe(name, figure, request.mode, known.get(name, {})) for name, figure in partial.items()]
    return answer | final | {"ok": final["failure"] is None, "modules": modules}


def _nothing() -> dict[str, Any]:
    unknown = ("wall_s", "cpu_s", "waited_s", "pace_s", "rss_mb", "threads", "network")
    return {**dict.fromkeys(unknown), "modules": []}


def wait(sandbox: Sandbox, *, timeout: float, memory: int) -> dict[str, str]:
    """Waits for the process to end within its limits; how it ended, should there be no result."""
    poll = select.poll()
    poll.register(sandbox.exit_descriptor, select.POLLIN)
    deadline = time.monotonic() + timeout
    while not poll.poll(20):
        used = sandbox.memory()
        if used > memory:
            used = sandbox.memory(exact=True)
        if used > memory:
            return {"kind": "memory", "detail": f"it used {used} bytes, the limit is {memory}"}
        if time.monotonic() > deadline:
            return {"kind": "timeout", "detail": f"it took longer than {timeout:g} s"}
    ending = sandbox.ending()
    if ending.startswith(("SIG", "signal")):
        return {"kind": "signal", "detail": ending}
    return {
        "kind": "no-result",
        "detail": f"the process ended with {ending or 'an unknown exit code'}, without a result",
    }


def read_result(path: Path) -> tuple[dict[str, int], dict[str, Any] | None]:
    """What the probe wrote: the figure of each module that was loaded, and its last line if it got that far."""
    figures: dict[str, int] = {}
    final: dict[str, Any] | None = None
    for line in path.read_bytes().split(b"\n"):
        name, _, rest = line.partition(b"\t")
        if name == b"=":
            try:
                final = msgspec.json.decode(rest, type=dict[str, Any])
            except msgspec.MsgspecError:
                final = None  # cut short
        elif rest:
            try:
                own = int(rest)
            except ValueError:
                continue
            text = name.decode("utf-8", "replace")
            figures[text] = figures.get(text, 0) + own
    return figures, final


def describe(name: str, figure: int, mode: Mode, known: dict[str, Any]) -> dict[str, Any]:
    """A module of an answer. A figure below zero (memory may fall) becomes 0, with the raw one beside it."""
    entry: dict[str, Any] = {
        "name": printable(name),
        "seconds": max(figure, 0) / 1e9 if mode == "time" else None,
        "kb": max(figure, 0) if mode == "memory" else None,
        "asks": [printable(asked) for asked in known.get("asks", ())] if mode == "edges" else None,
        "stdlib": known.get("stdlib", name.partition(".")[0] in sys.stdlib_module_names),
        "file": known.get("file"),
    }
    if figure < 0 and mode == "time":
        entry["raw_seconds"] = figure / 1e9
    if figure < 0 and mode == "memory":
        entry["raw_kb"] = figure
    return entry
