"""`readie-pipeline doctor`: looks at everything that a generation needs, and changes nothing."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pipeline.analyze import JournalHead, Measurements, read_measurements
from pipeline.corpus import read_corpus
from pipeline.processes import ProbeStream, Sandbox, describe, find_worker
from pipeline.rootfs import list_rootfs
from pipeline.rootfs_build import RECORD, check_rootfs
from readie.command_line import Check, Doubt, check
from readie.errors import BadFile, Unavailable
from readie.flavor import Flavor, check_gpu
from readie.machine import cores, gib, read_memory
from readie.manifest import Description
from readie.units import parse_size

ROOM_BYTES = 3 * 10**9  # free in the work folder: checkpoints of two gigabytes, and what there is besides
BUSY = 0.5  # processes that wait for a core, for each core: measuring then takes longer, and tells less
CPU = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Setup:
    """What is looked at."""

    sandbox: Sandbox
    rootfs_given: bool  # else it is the one that was measured
    out: Path
    corpus: Path


def examine(setup: Setup) -> Iterator[Check]:
    """Every check, as soon as it is made; what the next one needs, and is not there, is left out."""
    sandbox = setup.sandbox
    measured = _read(setup)
    if not setup.rootfs_given and measured is not None:
        sandbox = replace(sandbox, rootfs=Path(measured.info.rootfs))
    if sandbox.flavor is Flavor.GPU:
        yield check("GPU", lambda: _look_at_gpu(sandbox))
    described: list[Description] = []
    if setup.rootfs_given or measured is not None:
        listed = check("root filesystem", lambda: _look_at_rootfs(sandbox))
        yield listed
        if listed.state != "failed":
            yield check("runtime", lambda: _look_at_runtime(sandbox, described))
        if described:
            yield check("probe", lambda: _look_at_probe(sandbox))
    else:
        way_out = "Give one with --rootfs; readie-pipeline rootfs makes one."
        yield Check(
            name="root filesystem", state="failed", found="none is given, and none was measured", way_out=way_out
        )
    yield check("corpus", lambda: _look_at_corpus(setup))
    yield check("work folder", lambda: _look_at_folder(setup.out))
    if described:
        yield check("measurements", lambda: _look_at_journal(setup, described[0]))
    yield check("memory", lambda: _look_at_memory(sandbox))
    yield check("processors", _look_at_processors)


def _read(setup: Setup) -> Measurements | None:
    try:
        return read_measurements(setup.out / "measurements.parquet")
    except BadFile:
        return None


def _look_at_gpu(sandbox: Sandbox) -> str:
    check_gpu(sandbox.flavor)
    return "NVIDIA devices are there"


# ---- what is measured, and by what ----


def _look_at_rootfs(sandbox: Sandbox) -> str:
    listed = list_rootfs(sandbox.rootfs)
    told = f"{sandbox.rootfs}: {len(listed.distributions)} distributions"
    if (sandbox.rootfs / RECORD).exists():
        record, changes = check_rootfs(sandbox.rootfs)
        if changes:
            way_out = "Build it again; readie-pipeline rootfs --check lists all."
            raise Doubt(f"{told}, not as it was built: {changes[0]} (of {len(changes)})", way_out)
        told += f", as it was built: digest {record.digest[:12]}"
    if listed.warnings:
        raise Doubt(f"{told}; {'; '.join(listed.warnings)}")
    return told


def _look_at_runtime(sandbox: Sandbox, described: list[Description]) -> str:
    description = describe(sandbox)
    described.append(description)
    host = description.host
    command = " ".join(find_worker())
    return f"{host.runtime} {host.runtime_version}, Python {host.python}, as {command} says"


def _look_at_probe(sandbox: Sandbox) -> str:
    with ProbeStream(sandbox) as stream:
        answer = stream.ask(["json"], "time")
    if not answer.ok:
        failure = answer.failure.detail if answer.failure else "it says not why"
        raise Unavailable(f"importing json was not measured: {failure}", "readie-worker probe shows it.")
    if answer.network == "host":
        raise Doubt(
            "imports are measured with this machine's network and files",
            "Run as root, or allow user namespaces, so that they are isolated.",
        )
    return "an import is measured, isolated"


def _look_at_corpus(setup: Setup) -> str:
    if not setup.corpus.exists():
        raise Doubt(f"{setup.corpus}: no such file", "readie-pipeline corpus makes it, or generation with paths.")
    sets = read_corpus(setup.corpus)
    return f"{setup.corpus}: {len(sets)} import sets, asked for {sum(one.count for one in sets)} times"


# ---- the work folder ----


def _look_at_folder(out: Path) -> str:
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise BadFile(f"{there}: this user cannot write there", "Give another folder with --out.")
    if (out / ".lock").exists():
        with (out / ".lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Doubt(f"another readie-pipeline works in {out}", "Wait for it.") from None
    free = shutil.disk_usage(there).free
    if free < ROOM_BYTES:
        raise Doubt(f"{out}: {gib(free)} are free", "Make room, or give a folder on another disk with --out.")
    return f"{out}: {gib(free)} are free"


def _look_at_journal(setup: Setup, description: Description) -> str:
    """Whether what was measured goes on with this host and root filesystem, or will be put aside."""
    path = setup.out / "measurements.journal.jsonl"
    if not path.exists():
        return "none yet"
    with path.open("rb") as file:
        first = file.readline()
        count = sum(1 for _ in file)
    try:
        head = msgspec.json.decode(first, type=JournalHead)
    except msgspec.MsgspecError as error:
        raise Doubt(f"{path}: {error}", "analyze puts it aside and measures all again.") from error
    here = msgspec.structs.asdict(description.host)
    theirs = msgspec.structs.asdict(head.host)
    differ = [f"{name} was {theirs[name]}, is {here[name]}" for name in here if theirs[name] != here[name]]
    if differ:
        way_out = "analyze puts them aside and measures all again; give another --out to keep them."
        raise Doubt(f"{count} processes were measured elsewhere: {'; '.join(differ)}", way_out)
    return f"{count} processes were measured here, and count"


# ---- the machine ----


def _look_at_memory(sandbox: Sandbox) -> str:
    memory, each = read_memory(), parse_size(sandbox.memory)
    at_once = max(1, cores() - 1)
    told = f"{at_once} imports at once may use {gib(each)} each; {gib(memory.free)} of {gib(memory.total)} are free"
    if each > memory.free:
        raise Doubt(told, "Give --memory less, or end what uses the rest.")
    return told


def _look_at_processors() -> str:
    """Whether times will be steady."""
    count = cores()
    busy = os.getloadavg()[0]
    told = f"{count} here, {busy:.1f} processes run or wait for one"
    doubts = []
    if count < 2:
        doubts.append("the pipeline and what it measures share one")
    if busy > BUSY * count:
        doubts.append("others use them")
    governors = {path.read_text().strip() for path in CPU.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    if governors - {"performance"}:
        doubts.append(f"their frequency changes (governor {', '.join(sorted(governors))})")
    stolen = _stolen()
    if stolen > 0.02:
        doubts.append(f"the host takes {100 * stolen:.0f} % of them for others")
    if doubts:
        way_out = "Measure on a machine that is left alone; docs/measuring.md says how noise is taken out."
        raise Doubt("; ".join([told, *doubts]), way_out)
    return told


def _stolen(seconds: float = 0.2) -> float:
    """The part of the processors' time that the host of a virtual machine gave to others just now."""

    def read() -> tuple[int, int]:
        ticks = [int(each) for each in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
        return ticks[7], sum(ticks)

    stolen, total = read()
    time.sleep(seconds)
    later, after = read()
    return (later - stolen) / max(1, after - total)
