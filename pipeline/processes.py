"""The `readie-worker` processes that measure and capture: what is measured is what production runs."""

import contextlib
import os
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

import msgspec

import readie
from readie.command_line import say
from readie.errors import RuntimeUnavailable, Unavailable
from readie.flavor import Flavor
from readie.manifest import Description

Mode = Literal["edges", "time", "memory", "plain"]
Record = TypeVar("Record")

# To start a worker and what it measures, and to end that, besides the time that it has itself: longer than the worker's
# own limits for these come to.
PATIENCE_S = 300.0
NOT_ISOLATED = "imports had this host's network and files: isolating them needs root or namespaces"


@dataclass(frozen=True)
class Sandbox:
    """Where processes run: a root filesystem, and the runtime that starts them."""

    rootfs: Path
    runtime: Literal["fork", "runsc"]
    timeout_s: float = 60.0  # for each import
    memory: str = "4Gi"  # for each import
    flavor: Flavor = Flavor.CPU

    @property
    def python(self) -> Path:
        return self.rootfs / "bin" / "python"

    def arguments(self) -> list[str]:
        """The options of `readie-worker` that say so."""
        return ["--rootfs", str(self.rootfs), "--runtime", self.runtime, "--flavor", self.flavor.value]


class ProbeFailure(msgspec.Struct, frozen=True):
    kind: str  # raised, exit, signal, timeout, memory, no-result; threads for a capture
    detail: str = ""


class ProbedModule(msgspec.Struct, frozen=True):
    """A module whose body ran to its end in a probe; figures are exclusive. What a mode does not measure is None."""

    name: str
    seconds: float | None = None
    kb: float | None = None  # KiB; 0 where memory fell, with what it fell by in `raw_kb`
    raw_kb: float | None = None
    threads: int | None = None  # that its body started, and that were there when it ended
    asks: list[str] | None = None
    stdlib: bool = False
    file: str | None = None


class ProbeAnswer(msgspec.Struct, frozen=True):
    id: int
    ok: bool
    mode: Mode = "plain"
    wall_s: float | None = None  # None where the process ended without a word
    cpu_s: float | None = None
    waited_s: float | None = None  # of wall_s: it was ready to run, and others had the processor
    disk_mb: float | None = (
        None  # that it had to read from the disk, for no memory held it; 0 under gVisor, which does not tell
    )
    pace_s: list[float] | None = None  # seconds of a fixed piece of work, before and after
    rss_mb: float | None = None
    network: str | None = None  # host: it was not isolated
    threads: int | None = None  # that are left at the end
    modules: list[ProbedModule] = []
    failure: ProbeFailure | None = None


class Saved(msgspec.Struct, frozen=True):
    """`readie-worker save`."""

    ok: bool
    checkpoint_id: str = ""
    measured_mb: float = 0.0
    seconds: float = 0.0
    threads: int = 1
    failure: ProbeFailure | None = None


class Restored(msgspec.Struct, frozen=True):
    """`readie-worker restore`: seconds of each restore, to the first answer."""

    ok: bool
    seconds: list[float] = []
    failure: ProbeFailure | None = None


def find_worker() -> list[str]:
    """The command line that runs `readie-worker` of this installation."""
    beside = Path(sys.executable).with_name("readie-worker")
    if beside.exists():
        return [str(beside)]
    found = shutil.which("readie-worker")
    return [found] if found else [sys.executable, "-m", "worker.cli"]


def _environment() -> dict[str, str]:
    """With the folder of this code on the path, for where the project runs without being installed."""
    here = str(Path(readie.__file__).resolve().parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))}


def run_worker(arguments: Sequence[str], kind: type[Record]) -> Record:
    """Runs one command of `readie-worker` to its end and reads its answer. Raises `Unavailable` when it has none."""
    command = [*find_worker(), *arguments]
    done = subprocess.run(command, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False)
    try:
        return msgspec.json.decode(done.stdout, type=kind)
    except msgspec.MsgspecError as error:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
        reason = " ".join(last) or f"it ended with {done.returncode} and said nothing"
        raise Unavailable(f"readie-worker {arguments[0]}: {reason}", "") from error


@cache
def describe(sandbox: Sandbox) -> Description:
    """What the sandboxes of this host are; asked once. Raises `RuntimeUnavailable`."""
    try:
        return run_worker(["describe", *sandbox.arguments(), "--json"], Description)
    except Unavailable as error:
        raise RuntimeUnavailable(error.detail, "") from error


class ProbeStream:
    """One `readie-worker probe` that answers requests in order. A stream that dies is started again."""

    def __init__(self, sandbox: Sandbox) -> None:
        limits = ["--timeout", f"{sandbox.timeout_s:g}", "--memory", sandbox.memory]
        self._command = [*find_worker(), "probe", *sandbox.arguments(), *limits]
        self._process: subprocess.Popen[bytes] | None = None
        self._talk: list[str] = []
        self._listener: threading.Thread | None = None
        self._count = 0
        # The worker holds what it measures to its time; this is for a worker that says nothing at all.
        self._patience_s = sandbox.timeout_s + PATIENCE_S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._command,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        # What it says must be read, or it would wait; only the end is of interest, and only if it dies.
        self._talk = []
        self._listener = threading.Thread(target=self._listen, args=(process, self._talk), daemon=True)
        self._listener.start()
        return process

    @staticmethod
    def _listen(process: subprocess.Popen[bytes], talk: list[str]) -> None:
        assert process.stderr is not None
        with process.stderr as stderr:
            for line in stderr:
                talk.append(line.decode(errors="replace").rstrip())
                del talk[:-5]

    def ask(self, modules: Sequence[str], mode: Mode) -> ProbeAnswer:
        """Imports `modules` in a fresh process. Raises `Unavailable` when the worker itself cannot be run.

        A worker that ends meanwhile may have been ended by what it measured: it gets another try, and so does one that
        says nothing for five minutes longer than an import may take.
        """
        for _ in range(2):
            answer = self._ask(modules, mode)
            if answer is not None:
                return answer
        if self._ask(["sys"], "plain") is None:
            said = " ".join(self._talk) or "it ended and said nothing"
            raise Unavailable(f"readie-worker probe: {said}", "")
        failure = ProbeFailure("no-result", "the worker that measured it ended, twice")
        return ProbeAnswer(self._count, ok=False, mode=mode, failure=failure)

    def _ask(self, modules: Sequence[str], mode: Mode) -> ProbeAnswer | None:
        """The answer of the worker; None if it ended without one."""
        self._count += 1
        line = msgspec.json.encode({"id": self._count, "modules": list(modules), "mode": mode}) + b"\n"
        self._process = self._process or self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            ready = select.select([self._process.stdout], [], [], self._patience_s)[0]
            if not ready:
                say(f"  a worker said nothing for {self._patience_s:.0f} s, and is started again")
                self._process.kill()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if answer.endswith(b"\n"):
            return msgspec.json.decode(answer, type=ProbeAnswer)
        self.close()
        return None

    def close(self) -> None:
        """Ends the worker, and with it what it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._listener is not None:
            self._listener.join(1)
