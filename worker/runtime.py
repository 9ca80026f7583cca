"""What both runtimes have in common: the protocol that they fulfil, a sandbox's folder, and the talk of one call."""

import codecs
import contextlib
import os
import pickle
import selectors
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self
from uuid import uuid4

import msgspec

from readie.errors import CallTimeout, OutOfMemory, ReadieError, RemoteError, SandboxFailed, problems
from readie.manifest import CheckpointSpec, Description
from readie.wire import Answer, Phases, Problem, Result, Stream, problem_of
from worker.executor import LENGTHS, MAX_HEADER, PROTOCOL, Header, send_frame

WATCH_S = 0.05  # how often a sandbox's memory is looked at
GROWTH = 0.9  # of its limit: a sandbox that uses more is allowed the next step, up to max_memory
CHUNK = 1024 * 1024


# ---- what a runtime is ----


class Saved(Answer, frozen=True, kw_only=True):
    """A capture: the process's memory above an empty one's, what it took, and its threads."""

    measured_mb: float
    seconds: float
    threads: int


class StartFailed(Exception):
    """A sandbox could not be started from its checkpoint (or cold). Nothing of a call has run."""


class SaveFailed(Exception):
    """A checkpoint could not be captured. `kind`: raised, exit, signal, threads, processes, timeout."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class Sandbox(Protocol):
    """A started process tree with an executor in it."""

    @property
    def exit_descriptor(self) -> int:
        """Readable once the sandbox's first process has ended."""

    def memory(self, *, exact: bool = False) -> int:
        """Bytes of anonymous memory of the whole tree; `exact` counts what processes share once, and takes longer."""

    def ending(self) -> str:
        """How the first process ended: `exit code 3` or `SIGSEGV`. Waits for that at most two seconds."""

    def end(self) -> None:
        """Ends the whole tree and waits until nothing of it is left. May be repeated."""


class Runtime(Protocol):
    """How sandboxes are started. `fork` (worker/fork.py) is one; gVisor's `runsc` is to be the other."""

    def describe(self) -> Description:
        """What this host and root filesystem are."""

    def save(self, spec: CheckpointSpec, folder: Path, *, timeout: float) -> Saved:
        """Imports `spec.canonical`, and saves the process to `folder`. Raises `SaveFailed`."""

    def load(self, spec: CheckpointSpec, folder: Path, *, timeout: float) -> int:
        """Makes ready to restore from `folder`; bytes of host memory that this takes. Raises `StartFailed`."""

    def unload(self, spec: CheckpointSpec) -> None:
        """Undoes `load`."""

    def alive(self, spec: CheckpointSpec) -> bool:
        """Whether a loaded checkpoint can still be restored, as far as can be seen without trying."""

    def start(self, spec: CheckpointSpec | None, folder: "Folder") -> Sandbox:
        """A sandbox from a loaded checkpoint, or cold, that will connect to `folder`. Raises `StartFailed`."""

    def start_probe(self, options: Header, folder: "Folder") -> Sandbox:
        """A cold sandbox that measures imports (worker/probe.py)."""

    def remove_orphans(self, sandboxes: Path) -> int:
        """Ends and removes what an earlier run left in its folder and in `sandboxes`; how many sandboxes that were."""

    def close(self) -> None:
        """Ends everything that this runtime has started."""


# ---- a sandbox's folder ----


class Folder:
    """The folder that host and sandbox share: socket, output pipes, `work` (its directory) and `tmp`.

    Only the owner can look in. Leaving the `with` block removes it, whatever was put into it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        for part in (path, path / "work", path / "tmp"):
            part.mkdir(mode=0o700)
        self.pipes: dict[Stream, int] = {}
        for name in ("stdout", "stderr"):
            os.mkfifo(path / name, 0o600)
            self.pipes[name] = os.open(path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # through the descriptor: a socket's address has room for 107 bytes only
            self.listener.bind(f"/proc/self/fd/{descriptor}/host.sock")
        finally:
            os.close(descriptor)
        self.listener.listen(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        for pipe in self.pipes.values():
            os.close(pipe)
        remove_tree(self.path)


def remove_tree(path: Path) -> None:
    """Removes a folder with everything in it, also what its owner had locked itself out of."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        for folder, _, _ in os.walk(path):
            with contextlib.suppress(OSError):
                Path(folder).chmod(stat.S_IRWXU)
        shutil.rmtree(path, ignore_errors=True)


# ---- one call ----


@dataclass(frozen=True)
class Call:
    """What a sandbox is asked to run, and within what limits. Bytes and seconds."""

    payload: bytes
    python: str  # the caller's minor version
    modules: list[str]
    memory: int  # the limit at the start
    max_memory: int  # what the limit may grow to
    timeout: float  # of the function
    start_timeout: float  # until the function starts, once there is a sandbox
    max_payload: int


def _nothing(*_: Any) -> None:
    pass


def _granted(_: int) -> bool:
    return True


class Stop:
    """A way to end a call from another thread. After `close`, which may come at any time, `set` does nothing."""

    def __init__(self) -> None:
        self.problem: ReadieError | None = None
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.closed = False
        self.lock = threading.Lock()

    def set(self, problem: ReadieError) -> None:
        """Ends the call with `problem`; the first one counts."""
        with self.lock:
            if self.problem is None and not self.closed:
                self.problem = problem
                os.eventfd_write(self.event, 1)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            os.close(self.event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(kw_only=True)
class Ties:
    """What connects a call to whoever wants it."""

    stop: Stop
    on_output: Callable[[Stream, str], None] = _nothing
    on_start: Callable[[int], None] = _nothing  # the sandbox answers: bytes of memory that it uses
    grow: Callable[[int], bool] = _granted  # may the limit become so many bytes?
    permit: Callable[[], bool] = lambda: True  # asked once, when all but the call is done; False drops the call


class Dropped(Exception):
    """The call was not permitted to run after all: somebody else has it, or nobody wants it any more."""


class Talk:
    """The host's side of one call: frames, output, memory, time, and the sandbox's end, in one loop."""

    def __init__(self, sandbox: Sandbox, folder: Folder, call: Call, ties: Ties) -> None:
        self.sandbox = sandbox
        self.call = call
        self.ties = ties
        self.limit = call.memory
        self.channel: socket.socket | None = None
        self.buffer = bytearray()
        self.watched = time.monotonic()
        self.pipes = dict(folder.pipes)
        self.decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self.pipes}
        self.listener = folder.listener
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, "listener")
        self.selector.register(sandbox.exit_descriptor, selectors.EVENT_READ, "exit")
        self.selector.register(ties.stop.event, selectors.EVENT_READ, "stop")
        for name, pipe in self.pipes.items():
            self.selector.register(pipe, selectors.EVENT_READ, name)

    def close(self) -> None:
        if self.channel:
            self.channel.close()
        self.selector.close()

    def send(self, header: Header, body: bytes = b"") -> None:
        assert self.channel is not None, "the executor connects before anything is said"
        try:
            send_frame(self.channel, header, body)
        except OSError:
            raise self.ended() from None

    def next_frame(self, within: float, late: ReadieError) -> tuple[Header, bytes]:
        """The sandbox's next frame. Raises `late` after `within` seconds, or whatever else ends the call."""
        deadline = time.monotonic() + within
        while True:
            frame = self.parse()
            if frame is not None:
                return frame
            now = time.monotonic()
            if now >= deadline:
                raise late
            if now >= self.watched + WATCH_S:
                self.watched = now
                self.watch_memory()
            timeout = max(0.0, min(deadline, self.watched + WATCH_S) - now)
            events = {key.data for key, _ in self.selector.select(timeout)}
            for name in self.pipes.keys() & events:
                self.read_output(name)
            if "stop" in events and self.ties.stop.problem:
                raise self.ties.stop.problem
            if "listener" in events:
                self.accept()
            if "channel" in events and not self.receive():
                raise self.ended()
            if "exit" in events:
                # What it sent before it ended still counts.
                while self.channel and self.receive():
                    pass
                frame = self.parse()
                if frame is None:
                    raise self.ended()
                return frame

    def accept(self) -> None:
        self.channel, _ = self.listener.accept()
        self.channel.settimeout(60)
        self.selector.unregister(self.listener)
        self.selector.register(self.channel, selectors.EVENT_READ, "channel")

    def receive(self) -> bool:
        """Reads what there is; False if the other side has hung up or there is nothing."""
        assert self.channel is not None
        try:
            data = self.channel.recv(CHUNK, socket.MSG_DONTWAIT)
        except OSError:
            return False
        self.buffer += data
        return bool(data)

    def parse(self) -> tuple[Header, bytes] | None:
        """The next whole frame of what was read."""
        if len(self.buffer) < LENGTHS.size:
            return None
        header_length, body_length = LENGTHS.unpack_from(self.buffer)
        if header_length > MAX_HEADER or body_length > self.call.max_payload:
            raise SandboxFailed("it sent something that is not of the executor's protocol")
        end = LENGTHS.size + header_length + body_length
        if len(self.buffer) < end:
            return None
        try:
            header = msgspec.json.decode(self.buffer[LENGTHS.size : LENGTHS.size + header_length], type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SandboxFailed("it sent something that is not of the executor's protocol") from error
        body = bytes(self.buffer[LENGTHS.size + header_length : end])
        del self.buffer[:end]
        return header, body

    def read_output(self, name: Stream) -> bool:
        """Passes on what the sandbox has printed; False if there was nothing."""
        try:
            data = os.read(self.pipes[name], 65536)
        except BlockingIOError:
            return False
        if not data:  # every writer has closed it
            self.selector.unregister(self.pipes.pop(name))
        text = self.decoders[name].decode(data, final=not data)
        if text:
            self.ties.on_output(name, text)
        return bool(data)

    def drain_output(self) -> None:
        """Passes on everything that is printed by now."""
        for name in tuple(self.pipes):
            while self.read_output(name) and name in self.pipes:
                pass
        for name in self.pipes:
            text = self.decoders[name].decode(b"", final=True)
            if text:
                self.ties.on_output(name, text)

    def watch_memory(self) -> None:
        """Lets the limit grow in steps to max_memory; raises `OutOfMemory` beyond it."""
        used = self.sandbox.memory()
        if used <= self.limit * GROWTH:
            return
        if self.limit < self.call.max_memory:
            wanted = min(self.call.max_memory, max(2 * self.limit, 2 * used))
            if self.ties.grow(wanted):
                self.limit = wanted
        if used > self.limit:
            used = self.sandbox.memory(exact=True)
        if used > self.limit:
            raise OutOfMemory(f"the sandbox used {used} bytes, its limit is {self.limit}")

    def ended(self) -> ReadieError:
        """Why there is no more to come."""
        ending = self.sandbox.ending()
        if self.ties.stop.problem:
            return self.ties.stop.problem
        return SandboxFailed(f"it ended with {ending}" if ending else "it closed its connection to the worker")


def run_call(
    runtime: Runtime, spec: CheckpointSpec | None, folder: Folder, call: Call, ties: Ties, *, arrived: float
) -> Result:
    """Runs one call in a sandbox of its own, from `spec` or cold, and ends the sandbox.

    `arrived` is the placement's arrival by `time.monotonic()`. What a call can suffer is in the result. Raises
    `StartFailed` if there was no sandbox, `Dropped` if the call was not permitted; nothing has run then.
    """
    started = time.monotonic()
    sandbox = runtime.start(spec, folder)
    talk = Talk(sandbox, folder, call, ties)
    python, restore, imports, ready, run = "", 0.0, 0.0, 0.0, 0.0
    payload = b""
    problem: Problem | None = None
    outcome: Literal["returned", "raised", "failed", "cancelled"] = "failed"
    try:
        try:
            hello, _ = talk.next_frame(call.start_timeout, SandboxFailed(f"no answer within {call.start_timeout:g} s"))
        except SandboxFailed as error:
            raise StartFailed(f"the sandbox did not answer: {error.detail}") from error
        if hello.get("protocol") != PROTOCOL:
            raise StartFailed(f"the executor speaks protocol {hello.get('protocol')}, the worker {PROTOCOL}")
        restore, python = time.monotonic() - started, str(hello["python"])
        ties.on_start(int(hello["rss_bytes"]))
        late = SandboxFailed(f"the function did not start within {call.start_timeout:g} s: its imports take longer")
        talk.send({"type": "prepare", "modules": call.modules})
        prepared, _ = talk.next_frame(call.start_timeout, late)
        imports = float(prepared["imports_s"])
        if not ties.permit():
            raise Dropped
        talk.send({"type": "call", "python": call.python, "max_payload": call.max_payload}, call.payload)
        header, payload = talk.next_frame(call.start_timeout, late)
        ready = time.monotonic() - arrived
        if header["type"] == "ready":
            header, payload = talk.next_frame(call.timeout, CallTimeout(f"it ran longer than {call.timeout:g} s"))
        run = float(header.get("run_s", 0.0))
        outcome, problem = _read_result(header)
    except ReadieError as error:
        outcome, payload, problem = "failed", b"", problem_of(error)
        if error.slug == "call-cancelled":
            outcome = "cancelled"
        if ready and not run:
            run = time.monotonic() - arrived - ready
    except (KeyError, ValueError, TypeError) as error:
        outcome, payload = "failed", b""
        problem = problem_of(SandboxFailed(f"its answer makes no sense: {error!r}"))
    finally:
        with contextlib.suppress(OSError):
            talk.drain_output()
        # In this order: hung up on, the executor would end, and what it started could no longer be found below it.
        sandbox.end()
        talk.close()
    phases = Phases(restore=restore, imports=imports, ready=ready, run=run)
    return Result(outcome=outcome, payload=payload, problem=problem, python=python, phases=phases)


@dataclass(frozen=True)
class Trial:
    """A start that was tried: seconds to ready, and the memory of the started sandbox."""

    ready_s: float
    bytes: int


def try_start(runtime: Runtime, spec: CheckpointSpec | None, folder: Path, *, python: str, timeout: float) -> Trial:
    """Starts a sandbox in `folder` with a call that does nothing. Raises `StartFailed` if that does not work."""
    call = Call(
        payload=pickle.dumps((len, ((),), {})),
        python=python,
        modules=[],
        memory=2**62,
        max_memory=2**62,
        timeout=timeout,
        start_timeout=timeout,
        max_payload=CHUNK,
    )
    used: list[int] = []
    started = time.monotonic()
    with Stop() as stop, Folder(folder / f"try-{uuid4().hex[:12]}") as place:
        result = run_call(runtime, spec, place, call, Ties(stop=stop, on_start=used.append), arrived=started)
    if result.outcome != "returned":
        raise StartFailed(result.problem.detail if result.problem else result.outcome)
    return Trial(result.phases.ready, used[0])


def _read_result(
    header: Header,
) -> tuple[Literal["returned", "raised", "failed"], Problem | None]:
    match header["outcome"]:
        case "returned":
            return "returned", None
        case "raised":
            text = printable(str(header["traceback"]))
            problem = Problem(
                type=RemoteError().type,
                title=printable(str(header["kind"])),
                detail=printable(str(header["detail"])),
                traceback=text,
            )
            return "raised", problem
        case "failed":
            return "failed", problem_of(problems()[header["slug"]](printable(str(header["detail"]))))
    raise ValueError(header["outcome"])


def printable(text: str) -> str:
    """`text` without lone surrogates, which no encoding can carry."""
    return text.encode("utf-8", "replace").decode()
