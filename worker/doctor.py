"""`readie-worker doctor`: looks at everything that `serve` needs, and changes nothing of it."""

import fcntl
import os
import resource
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import httpx

from readie.client import ClientSettings
from readie.command_line import Check, Doubt, check, seconds_ahead
from readie.errors import BadSetting, ReadieError, RuntimeUnavailable, Unauthorized, UnknownWorker
from readie.flavor import Flavor, check_gpu
from readie.http import connection, read_answer, unreachable
from readie.machine import gib, read_memory
from readie.manifest import Description
from readie.settings import misspelt, read_settings
from readie.wire import CatalogueSummary, WorkerView
from worker import cgroups
from worker.agent import start_one
from worker.checkpoints import find_checkpoints
from worker.host import opened
from worker.router import Router
from worker.runsc import Options, find_runsc
from worker.runtime import Runtime
from worker.settings import WorkerSettings, read_worker_settings
from worker.specification import Gpu, Limits, make_flags

SKEW_S = 2.0  # between the router's clock and ours: it tells whole seconds
ROOM_BYTES = 10**9  # free where sandboxes have their folders
DESCRIPTORS = 1024  # files that may be open: a sandbox takes about ten
HEARD = timedelta(seconds=30)  # a worker that was heard later than this ago lives

Answered = TypeVar("Answered")


def examine(environ: Mapping[str, str]) -> Iterator[Check]:
    """Every check, as soon as it is made; what the next one needs, and is not there, is left out."""
    read: list[WorkerSettings] = []
    yield check("settings", lambda: _look_at_settings(environ, read))
    if not read:
        return
    settings = read[0]
    if settings.worker_flavor is Flavor.GPU:
        yield check("GPU", lambda: _look_at_gpu(settings))
    yield check("memory", lambda: _look_at_memory(settings))
    yield check("folder", lambda: _look_at_folder(settings))
    yield check("descriptors", _look_at_descriptors)
    if settings.runtime == "runsc":
        yield check("runsc", lambda: _look_at_runsc(settings))
        yield check("control groups", _look_at_groups)
    generations: set[str] = set()
    yield from _look_at_sandboxes(settings, generations)
    yield from _look_at_router(settings, environ, generations)


def _look_at_settings(environ: Mapping[str, str], read: list[WorkerSettings]) -> str:
    settings = read_worker_settings(environ)
    read.append(settings)
    wrong = misspelt(environ, WorkerSettings, ClientSettings)
    if wrong:
        names = ", ".join(f"{name} (is {meant} meant?)" for name, meant in wrong.items())
        raise Doubt(f"nothing reads {names}", "docs/reference.md lists the settings.")
    return f"worker {settings.worker_id}, flavor {settings.worker_flavor.value}, runtime {settings.runtime}"


# ---- the machine ----


def _look_at_gpu(settings: WorkerSettings) -> str:
    check_gpu(settings.worker_flavor)
    return f"NVIDIA devices are there; WORKER_GPU_TOTAL is {gib(settings.worker_gpu_total or 0)}"


def _look_at_memory(settings: WorkerSettings) -> str:
    memory, total = read_memory(), settings.worker_mem_total
    here = f"{gib(memory.total)} are here, {gib(memory.free)} of them free"
    if total is None:
        way_out = "Set it, such as WORKER_MEM_TOTAL=12Gi, and leave some for the system."
        raise Doubt(f"WORKER_MEM_TOTAL is not set: calls may ask for more than there is; {here}", way_out)
    if total > memory.total:
        raise BadSetting(f"WORKER_MEM_TOTAL is {gib(total)}, and {here}", "Set it to what this machine can give.")
    if total > memory.free:
        raise Doubt(f"WORKER_MEM_TOTAL is {gib(total)}, and {here}", "End what uses the rest, or set it to less.")
    return f"WORKER_MEM_TOTAL is {gib(total)}; {here}"


def _look_at_folder(settings: WorkerSettings) -> str:
    """WORKER_DIR, as `serve` will make it, and the room that is there."""
    folder = settings.folder
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK) or (there == folder and there.stat().st_uid != os.geteuid()):
        raise BadSetting(f"WORKER_DIR={folder}: this user cannot write there", "Set it to a folder of this user's.")
    free = shutil.disk_usage(there).free
    if free < ROOM_BYTES:
        raise Doubt(f"{folder}: {gib(free)} are free", "Make room, or set WORKER_DIR to another disk.")
    return f"{folder}: {gib(free)} are free" + (", and a worker that runs has it" if _runs_here(settings) else "")


def _runs_here(settings: WorkerSettings) -> bool:
    """Whether a worker with these settings runs on this machine: it holds the lock of its folder."""
    try:
        lock = os.open(settings.folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _look_at_descriptors() -> str:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < DESCRIPTORS:
        raise Doubt(f"{most} files may be open at once", "Raise the limit (ulimit -Hn): a sandbox takes about ten.")
    return f"{most} files may be open at once"


def _look_at_runsc(settings: WorkerSettings) -> str:
    program, version = find_runsc()
    flags = " ".join(make_flags(settings.sandbox_network, Gpu()))
    return f"{program}, release {version}, as root, with {flags}"


def _look_at_groups() -> str:
    group = cgroups.memory_group("")
    if not os.access(group, os.W_OK):
        raise RuntimeUnavailable(
            f"{group} cannot be written: sandboxes would have no limits",
            "Give this machine or container a writable /sys/fs/cgroup with the memory controller.",
        )
    return f"version {2 if cgroups.is_unified() else 1}, which can be written"


# ---- sandboxes ----


def _look_at_sandboxes(settings: WorkerSettings, generations: set[str]) -> Iterator[Check]:
    options = Options(
        flavor=settings.worker_flavor,
        network=settings.sandbox_network,
        limits=Limits(settings.sandbox_cpus, settings.sandbox_processes),
        ahead=0,
    )
    described: list[tuple[Runtime, Description]] = []
    with ExitStack() as stack:

        def look_at_rootfs() -> str:
            runtime = stack.enter_context(opened(settings.runtime, Path(settings.rootfs), options))
            description = runtime.describe()
            described.append((runtime, description))
            host = description.host
            return f"{settings.rootfs}: Python {host.python} runs, digest {host.rootfs_digest[:12]}"

        yield check("root filesystem", look_at_rootfs)
        if not described:
            return
        runtime, description = described[0]

        def start() -> str:
            trial = start_one(runtime, description.host.python_minor, settings.start_timeout)
            return f"one started cold in {1000 * trial.ready_s:.0f} ms, with {trial.bytes / 10**6:.0f} MB"

        yield check("sandbox", start)
        yield check("checkpoints", lambda: _look_at_checkpoints(settings, description, generations))


def _look_at_checkpoints(settings: WorkerSettings, description: Description, generations: set[str]) -> str:
    if settings.checkpoint_dir is None:
        raise Doubt("CHECKPOINT_DIR is not set: every call starts cold", "Set it to what readie-pipeline has captured.")
    held, warnings = find_checkpoints(Path(settings.checkpoint_dir), description.host, settings.worker_flavor)
    generations.update(each.spec.generation for each in held)
    told = f"{len(held)} of {len(generations)} generations can be restored here"
    if warnings or not held:
        way_out = "Capture them on such a host with this root filesystem and runtime: readie-pipeline capture."
        raise Doubt("; ".join([told, *warnings]), way_out)
    return told


# ---- the router ----


def _look_at_router(settings: WorkerSettings, environ: Mapping[str, str], generations: set[str]) -> Iterator[Check]:
    ahead: list[float] = []
    answers = check("router", lambda: _reach(settings, ahead))
    yield answers
    if answers.state == "failed":
        return
    if ahead:
        yield check("clock", lambda: _look_at_clock(ahead[0]))
    yield check("token", lambda: _look_at_token(settings))
    client = read_settings(ClientSettings, {"AUTH_TOKEN": environ.get("AUTH_TOKEN", "")})
    try:
        views: list[WorkerView] = _ask(settings, client.auth_token, "/v1/workers?limit=10000", list[WorkerView])
        summaries: list[CatalogueSummary] = _ask(settings, client.auth_token, "/v1/catalogues", list[CatalogueSummary])
    except Unauthorized:
        way_out = "Set AUTH_TOKEN for this command to have them looked at."
        yield Check(
            name="cluster", state="warning", found="its workers and catalogues are for clients", way_out=way_out
        )
        return
    except ReadieError as error:
        yield Check(name="cluster", state="failed", found=error.detail or error.title, way_out=error.hint)
        return
    yield check("worker id", lambda: _look_at_id(settings, views))
    yield check("generation", lambda: _look_at_generation(settings, summaries, generations))


def _reach(settings: WorkerSettings, ahead: list[float]) -> str:
    began = time.time()
    router = Router(settings)
    with closing(router.http):
        answer = router.ask("GET", "/health")
    if "date" in answer.headers:
        ahead.append(seconds_ahead(parsedate_to_datetime(answer.headers["date"]).timestamp() + 0.5, began, time.time()))
    return f"{settings.router_url} answers in {1000 * (time.time() - began):.0f} ms"


def _look_at_clock(ahead_s: float) -> str:
    if abs(ahead_s) > SKEW_S:
        raise Doubt(
            f"the router's is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's",
            "Have both set by NTP.",
        )
    return "the router's is this machine's, within two seconds"


def _look_at_token(settings: WorkerSettings) -> str:
    """A request that only an agent may make, for a worker that there is not."""
    router = Router(settings)
    try:
        with closing(router.http):
            router.ask("GET", f"/v1/workers/doctor-{uuid4().hex}/placements?wait=0")
    except UnknownWorker:
        return "the router takes WORKER_TOKEN"
    except Unauthorized as error:
        raise Unauthorized(error.detail, "Set WORKER_TOKEN to the router's WORKER_TOKEN.") from error
    raise ReadieError("the router gave placements to a worker that it does not know", "")


def _ask(settings: WorkerSettings, token: str, path: str, kind: type[Answered]) -> Answered:
    try:
        with httpx.Client(**connection(settings.router_url, token, settings.router_ca)) as http:
            return read_answer(http.get(path), kind)
    except httpx.HTTPError as error:
        raise unreachable(settings.router_url, error) from error


def _look_at_id(settings: WorkerSettings, views: list[WorkerView]) -> str:
    mine = next((each for each in views if each.worker_id == settings.worker_id and each.state != "removed"), None)
    if mine is None or datetime.now(UTC) - mine.heard_at > HEARD:
        return f"nobody reports as {settings.worker_id}"
    if _runs_here(settings):
        return f"{settings.worker_id} is the worker that runs here"
    way_out = "Give each worker a WORKER_ID of its own."
    raise BadSetting(f"WORKER_ID={settings.worker_id}: another worker reports under this name", way_out)


def _look_at_generation(settings: WorkerSettings, summaries: list[CatalogueSummary], generations: set[str]) -> str:
    flavor = settings.worker_flavor
    active = next((each for each in summaries if each.active and each.flavor is flavor), None)
    if active is None:
        raise Doubt(f"the router has no active catalogue of flavor {flavor.value}", "Run readie-router import.")
    if active.generation not in generations:
        raise Doubt(
            f"the router's active generation {active.generation[:12]} is not in CHECKPOINT_DIR: calls start cold",
            "Copy its folder there, or activate a catalogue of a generation that is there.",
        )
    return f"the router's active generation {active.generation[:12]} is in CHECKPOINT_DIR"
