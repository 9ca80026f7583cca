"""The whole line on real packages, by one command: measure, plan, capture, import, place, run.

It works in `.demo/` and cleans up after itself; what took long (the root filesystem, the measurements, the
checkpoints) stays there for the next time. Exits 0 only if everything held that its last lines claim.
"""

import hashlib
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import httpx
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from readie import remote
from readie.command_line import plain
from readie.errors import ReadieError, Unavailable
from readie.wire import CallStatus, WorkerView

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from calls import CALLS, Call  # noqa: E402

WORK = HERE.parent / ".demo"
RUNTIME = os.environ.get("RUNTIME") or "fork"
OWN = "" if RUNTIME == "fork" else f"-{RUNTIME}"  # each runtime has its own root filesystem and checkpoints
ROOTFS = WORK / f"rootfs{OWN}"
GENERATION = WORK / f"generation{OWN}"
BIN = Path(sys.executable).parent
# gVisor counts the pages of libraries too, so the same checkpoint is larger there.
CHECKPOINT_MB = 150 if RUNTIME == "fork" else 400
REPEATS = 3
SEED = 20
NEEDED_SPEEDUP = 10.0 if RUNTIME == "fork" else 5.0  # a restore in gVisor has a fixed part of 0.15 s
NEEDED_CALLS = 8
NEEDED_CHECKPOINTS = 3

console = Console(width=None if sys.stdout.isatty() else 130)


@dataclass
class Measured:
    """What one call showed: predicted and measured seconds to ready, and the checkpoints that it really ran from."""

    call: Call
    modules: list[str] = field(default_factory=list)
    predicted: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"cold": [], "restored": []})
    checkpoints: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        return statistics.median(self.seconds["cold"]) / statistics.median(self.seconds["restored"])


def step(text: str) -> None:
    console.print(f"[bold]{text}[/bold]")


def hash_packages() -> str:
    """What a root filesystem was made from."""
    return hashlib.sha256((HERE / "requirements.lock").read_bytes() + sys.version.encode()).hexdigest()


def build_rootfs() -> None:
    """A root filesystem that stands alone, as gVisor needs, unless it is there already."""
    stamp = ROOTFS.with_suffix(".made-from")  # beside it: it is what its digest says, and nothing else
    if stamp.exists() and stamp.read_text() == hash_packages():
        step("1. Root filesystem: there already")
        return
    step(f"1. Root filesystem: one that stands alone (.demo/{ROOTFS.name})")
    shutil.rmtree(ROOTFS, ignore_errors=True)
    command = [str(BIN / "readie-pipeline"), "rootfs", "--out", str(ROOTFS), str(HERE / "requirements.lock")]
    if subprocess.run(command, check=False).returncode:
        raise Unavailable("readie-pipeline rootfs failed; its message is above", "Is an index reachable?")
    stamp.write_text(hash_packages())


def make_rootfs() -> None:
    """A virtual environment of its own with the demo's packages, unless it is there already."""
    lock = HERE / "requirements.lock"
    stamp = ROOTFS / "readie-demo"
    if stamp.exists() and stamp.read_text() == hash_packages():
        step("1. Root filesystem: there already")
        return
    step("1. Root filesystem: a virtual environment with its own packages (.demo/rootfs)")
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(ROOTFS)], check=True)
    count = sum("==" in line and not line.startswith(" ") for line in lock.read_text().splitlines())
    # The project's own pip installs into it, so that the root filesystem holds nothing but the packages.
    # The pipeline compiles byte code itself, for all of it and in its own way.
    pip = [sys.executable, "-m", "pip", "--python", str(ROOTFS / "bin/python"), "install"]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    lines: list[str] = []
    with (
        Progress(*columns, console=console, transient=True) as progress,
        subprocess.Popen(
            [*pip, "--progress-bar=off", "--no-compile", "--require-hashes", "--requirement", str(lock)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        task = progress.add_task("   downloading", total=count)
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("Collecting"):
                progress.advance(task)
            elif line.startswith("Installing"):
                progress.update(task, description="   installing (half a minute)", completed=count)
    if process.returncode:
        raise Unavailable(
            "pip could not install the demo's packages:\n" + "".join(lines[-5:]), "Is an index reachable?"
        )
    stamp.write_text(hash_packages())
    console.print(f"   {count} distributions")


def run_pipeline() -> None:
    step(f"2. Pipeline: corpus, measurements, plan, checkpoints, catalogue (.demo/{GENERATION.name})")
    command = [str(BIN / "readie-pipeline"), "generation", "--rootfs", str(ROOTFS), "--runtime", RUNTIME]
    command += ["--max-repeats", "3"]  # as often as the others: a demo can do with wider intervals
    command += ["--checkpoint-mb", str(CHECKPOINT_MB), "--out", str(GENERATION), str(HERE / "corpus")]
    if subprocess.run(command, check=False).returncode:
        raise Unavailable("readie-pipeline generation failed; its message is above", "Start again: it resumes.")
    catalogues = WORK / "catalogues"
    shutil.rmtree(catalogues, ignore_errors=True)
    catalogues.mkdir()
    shutil.copy(GENERATION / "catalogue.json", catalogues / "cpu.json")
    shutil.copytree(GENERATION / "catalogue.parquet", catalogues / "cpu.parquet")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(name: str, command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its log in `.demo/<name>.log`, ended on the way out, whatever happens."""
    log = WORK / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **environment}, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for(
    log: str, process: subprocess.Popen[bytes], url: str, is_there: Callable[[httpx.Response], bool], *, seconds: float
) -> None:
    """Waits until `url` answers 200 and `is_there` says so of the answer; raises when the process ends before."""
    what = f"the {log}"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = (WORK / f"{log}.log").read_text(errors="replace").strip().splitlines()[-5:]
            raise Unavailable(f"{what} ended:\n" + "\n".join(tail), f"Its whole log is .demo/{log}.log.")
        try:
            answer = httpx.get(url, timeout=2)
            if answer.status_code == 200 and is_there(answer):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise Unavailable(f"{what} was not ready after {seconds:.0f} s", f"Its log is .demo/{log}.log.")


def holds_all(answer: httpx.Response) -> bool:
    """Whether the worker is ready with every captured checkpoint."""
    wanted = len(msgspec.json.decode((GENERATION / "manifest.json").read_bytes())["checkpoints"])
    workers = msgspec.json.decode(answer.content, type=list[WorkerView])
    return any(
        worker.state == "ready" and any(len(held.checkpoint_ids) >= wanted for held in worker.generations)
        for worker in workers
    )


def start_cluster(stack: ExitStack) -> str:
    step(f"3. Cluster: a router on DuckDB and a worker with the {RUNTIME} runtime")
    url = f"http://127.0.0.1:{free_port()}"
    for leftover in WORK.glob("readie.duckdb*"):
        leftover.unlink()
    router = stack.enter_context(
        running(
            "router",
            [str(BIN / "readie-router"), "serve", "--port", url.rsplit(":", 1)[1]],
            {"DATABASE_URL": f"duckdb:///{WORK / 'readie.duckdb'}", "CATALOGUE_DIR": str(WORK / "catalogues")},
        )
    )
    wait_for("router", router, f"{url}/ready", lambda _: True, seconds=30)
    worker = stack.enter_context(
        running(
            "worker",
            [str(BIN / "readie-worker"), "serve"],
            {
                "ROUTER_URL": url,
                "WORKER_ID": "demo",
                "WORKER_FLAVOR": "cpu",
                "WORKER_MEM_TOTAL": "4Gi",
                "WORKER_DIR": str(WORK / "worker"),
                "CHECKPOINT_DIR": str(GENERATION / "checkpoints"),
                "ROOTFS": str(ROOTFS),
                "RUNTIME": RUNTIME,
            },
        )
    )
    wait_for("worker", worker, f"{url}/v1/workers", holds_all, seconds=60)
    console.print(f"   {url}, logs in .demo/router.log and .demo/worker.log")
    return url


def run_call(measured: Measured, how: str) -> None:
    """Runs the call once, cold or from the checkpoint that the router chooses, and notes what it showed."""
    function = remote(measured.call.function, cold=how == "cold", memory="1Gi", queue_timeout=10)
    call = function.submit()
    try:
        value = call.result()
    except ReadieError as error:
        measured.faults.append(f"{measured.call.title}, {how}: {error}")
        return
    if not measured.call.is_right(value):
        measured.faults.append(f"{measured.call.title}, {how}: answered {value!r} instead of {measured.call.answer!r}")
    status: CallStatus = call.status
    assert status.result is not None
    assert status.result.started is not None
    assert status.placement is not None
    started = status.result.started
    measured.seconds[how].append(status.result.phases.ready)
    measured.modules = function.request().modules
    if status.placement.predicted_ready is not None:
        measured.predicted[how] = status.placement.predicted_ready
    if how == "restored":
        measured.checkpoints.append(started.checkpoint_id or "cold")
    elif started.how != "cold":
        measured.faults.append(f"{measured.call.title}: asked for a cold start, got {started.checkpoint_id}")


def run_calls() -> list[Measured]:
    step(f"4. Calls: {len(CALLS)}, cold and from a checkpoint, {REPEATS} times each, in random order")
    results = [Measured(call) for call in CALLS]
    order = [(measured, how) for measured in results for how in ("cold", "restored") for _ in range(REPEATS)]
    random.Random(SEED).shuffle(order)
    columns = (TextColumn("   {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(order))
        for measured, how in order:
            progress.update(task, description=f"{measured.call.title} ({how})")
            run_call(measured, how)
            progress.advance(task)
    return results


def milliseconds(seconds: list[float]) -> str:
    """Median and spread."""
    if not seconds:
        return "none"
    return f"{statistics.median(seconds) * 1000:.0f} ({min(seconds) * 1000:.0f}-{max(seconds) * 1000:.0f})"


def show(results: list[Measured]) -> None:
    table = Table(title="Milliseconds to ready: predicted, and measured median (lowest-highest)", title_justify="left")
    for heading in ("call", "modules", "checkpoint"):
        table.add_column(heading)
    for heading in ("cold\npredicted", "cold\nmeasured", "restored\npredicted", "restored\nmeasured", "speed-up"):
        table.add_column(heading, justify="right")
    for measured in results:
        predicted = {
            how: f"{measured.predicted[how] * 1000:.0f}" if how in measured.predicted else "?"
            for how in ("cold", "restored")
        }
        table.add_row(
            measured.call.title,
            "\n".join(measured.modules),
            ", ".join(sorted(set(measured.checkpoints))),
            predicted["cold"],
            milliseconds(measured.seconds["cold"]),
            predicted["restored"],
            milliseconds(measured.seconds["restored"]),
            f"{measured.speedup:.0f}×" if all(measured.seconds.values()) else "",
        )
    console.print(table)


def judge(results: list[Measured], seconds: float) -> bool:
    """Prints what did not hold, where to look next, and the last line; True if all held."""
    faults = [fault for measured in results for fault in measured.faults]
    chosen = [
        set(measured.checkpoints)
        for measured in results
        if measured.checkpoints and not set(measured.checkpoints) & {"cold", "checkpoint_0"}
    ]
    speedups = [measured.speedup for measured in results if all(measured.seconds.values())]
    speedup = statistics.median(speedups) if speedups else 0.0
    if len(chosen) < NEEDED_CALLS:
        faults.append(f"{len(chosen)} calls ran from a checkpoint with packages; {NEEDED_CALLS} were needed")
    if len(set().union(*chosen)) < NEEDED_CHECKPOINTS:
        faults.append(f"{len(set().union(*chosen))} checkpoints were used; {NEEDED_CHECKPOINTS} were needed")
    if speedup < NEEDED_SPEEDUP:
        faults.append(f"the median speed-up is {speedup:.1f}×; {NEEDED_SPEEDUP:.0f}× was needed")
    for fault in faults:
        console.print(Text.assemble(("did not hold:", "red"), f" {plain(fault)}"))
    console.print(
        "Where to look next:\n"
        f"  .demo/{GENERATION.name}/catalogue.json        what everything costs, and what each checkpoint holds\n"
        "  DATABASE_URL=duckdb:///.demo/readie.duckdb .venv/bin/readie-router explain pandas sklearn.svm\n"
        "                                         why a call gets the checkpoint that it gets\n"
        "  demo/calls.py, demo/corpus/            the calls, and the code that the plan was made from",
        highlight=False,
    )
    console.print(f"It took {seconds:.0f} s.", highlight=False)
    console.print(
        f"demo: {len(results)} calls, {len(chosen)} from a checkpoint, median speed-up {speedup:.0f}×",
        highlight=False,
    )
    return not faults


def interrupt(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise KeyboardInterrupt


def main() -> int:
    signal.signal(signal.SIGTERM, interrupt)
    WORK.mkdir(exist_ok=True)
    began = time.monotonic()
    try:
        make_rootfs() if RUNTIME == "fork" else build_rootfs()
        run_pipeline()
        with ExitStack() as stack:
            os.environ["ROUTER_URL"] = start_cluster(stack)
            results = run_calls()
        show(results)
        held = judge(results, time.monotonic() - began)
    except KeyboardInterrupt:
        console.print("demo: stopped; what was measured stays in .demo/ and is used again")
        return 130
    except ReadieError as error:
        Console(stderr=True).print(Text(plain(f"demo: {error}"), style="red"))
        return 1
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
