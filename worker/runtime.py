"""What both runtimes have in common: the protocol that they fulfil, a sandbox's folder, and the talk of one call."""

import codecs
import contextlib
import os
import pickle
import select
import selectors
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import msgspec

from readie.errors import (
    CallCancelled,
    CallTimeout,
    InstallFailed,
    OutOfMemory,
    ReadieError,
    RemoteError,
    SandboxFailed,
    problems,
)
from readie.manifest import CheckpointSpec, Description
from readie.wire import Answer, Phases, Problem, Result, Stream, problem_of
from worker.executor import LENGTHS, MAX_HEADER, PROTOCOL, Header, encode_header

RING_S = 0.005  # between two looks because its bell rings
WATCH_S = 0.05  # how often a sandbox's memory is looked at
GROWTH = 0.9  # of its limit: a sandbox that uses more is allowed the next step, up to max_memory
CHUNK = 1024 * 1024
UNLIMITED = 2**62  # bytes
SEND_S = 60.0  # how long a sandbox may leave unread what it is sent
DRAIN = 32  # pieces of 64 kB: a pipe holds one, and what is printed after a call is nobody's


# ---- what a runtime is ----


class Saved(Answer, frozen=True, kw_only=True):
    """A capture: the process's memory above an empty one's, what it took, and its threads."""

    measured_mb: float
    seconds: float
    threads: int


class StartFailed(Exception):
    """A sandbox could not be started from its checkpoint (or cold). Nothing of a call has run.

    `blame` says whether the checkpoint is at fault, rather than the call's limits.
    """

    def __init__(self, detail: str, *, blame: bool = True) -> None:
        super().__init__(detail)
        self.blame = blame


class SaveFailed(Exception):
    """A checkpoint could not be captured. `kind`: raised, exit, signal, threads, processes, sockets, timeout, memory."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class Sandbox(Protocol):
    """A started process tree with an executor in it, and the folder that it shares with the host."""

    @property
    def folder(self) -> "Folder":
        """What the executor connects to."""

    @property
    def exit_descriptor(self) -> int:
        """Readable once the sandbox's first process has ended."""

    @property
    def bell(self) -> int:
        """Readable when its memory is nearly at its limit; -1 where nothing but a look at `memory` tells."""

    def memory(self, *, exact: bool = False) -> int:
        """Bytes of anonymous memory of the whole tree; `exact` counts what processes share once, and takes longer."""

    def limit_memory(self, limit: int) -> None:
        """Sets what the whole tree may use, in bytes, where the runtime itself enforces a limit."""

    def starved(self) -> bool:
        """Whether it wanted more memory than its limit, where the runtime itself enforces one."""

    def ending(self) -> str:
        """How the first process ended: `exit code 3` or `SIGSEGV`. Waits for that at most two seconds."""

    def end(self) -> None:
        """Ends the whole tree, waits until nothing of it is left, and removes its folder. May be repeated."""


class Runtime(Protocol):
    """How sandboxes are started: `fork` (worker/fork.py), and gVisor's `runsc` (worker/runsc.py).

    Sandboxes' folders lie in the runtime's own. `memory` is a sandbox's limit in bytes.
    """

    @property
    def python(self) -> Path:
        """What starts the root filesystem's Python on the host."""

    def describe(self) -> Description:
        """What this host and root filesystem are."""

    def save(self, spec: CheckpointSpec, folder: Path, *, timeout: float) -> Saved:
        """Imports `spec.canonical`, and saves the process to the new folder `folder`. Raises `SaveFailed`."""

    def load(self, spec: CheckpointSpec, folder: Path, *, timeout: float) -> int:
        """Makes ready to restore from `folder`; bytes of host memory that this takes. Raises `StartFailed`."""

    def unload(self, spec: CheckpointSpec) -> None:
        """Undoes `load`."""

    def alive(self, spec: CheckpointSpec) -> bool:
        """Whether a loaded checkpoint can still be restored, as far as can be seen without trying."""

    def start(self, spec: CheckpointSpec | None, *, memory: int) -> Sandbox:
        """A sandbox from a loaded checkpoint, or cold, that will connect to its folder. Raises `StartFailed`."""

    def start_probe(self, options: Header, *, memory: int) -> Sandbox:
        """A cold sandbox that measures imports (worker/probe.py), into the file `result` in its folder."""

    def outside(self, path: str) -> Path:
        """Where the host has a file that sandboxes call `path`."""

    def prepare(self) -> None:
        """Waits until what is made ahead of the next start is there."""

    @property
    def overhead(self) -> int:
        """Bytes of memory that what is made ahead may take."""

    def bring_pip(self) -> None:
        """Has sandboxes that start from now on find the worker's pip, to install packages with."""

    def remove_orphans(self) -> int:
        """Ends and removes what an earlier run left in the runtime's folder; how many sandboxes that were."""

    def close(self) -> None:
        """Ends everything that this runtime has started."""


# ---- a sandbox's folder ----


class Folder:
    """The folder that host and sandbox share: the socket that the executor connects to, and pipes for its output.

    Only this process's user can look in. Where the sandbox runs as another, `owner`, it may look in (who else may, the
    folders above decide) and use socket and pipes; it can add nothing, for what it added would lie on the host's disk.
    `close` removes the folder, whatever was put into it.
    """

    def __init__(self, path: Path, owner: int | None = None) -> None:
        self.path = path
        self.owner = owner
        self.pipes: dict[Stream, int] = {}
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.fill()
        except BaseException:
            self.close()
            raise

    def fill(self) -> None:
        path = self.path
        path.mkdir(mode=0o700)
        if self.owner is not None:
            path.chmod(0o755)
        for name in ("stdout", "stderr"):
            os.mkfifo(path / name, 0o600)
            self.own(path / name)
            self.pipes[name] = os.open(path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # through the descriptor: a socket's address has room for 107 bytes only
            self.listener.bind(f"/proc/self/fd/{descriptor}/host.sock")
        finally:
            os.close(descriptor)
        self.own(path / "host.sock")
        self.listener.listen(1)

    def own(self, path: Path) -> None:
        """Gives a file to whom the sandbox runs as."""
        if self.owner is not None:
            os.chown(path, self.owner, self.owner)

    def close(self) -> None:
        self.listener.close()
        for pipe in self.pipes.values():
            os.close(pipe)
        remove_tree(self.path)


def remove_tree(path: Path) -> None:
    """Removes a folder with everything in it, also what its owner had locked itself out of, however deep it is."""
    if path.is_symlink():
        return  # whoever made it, it is none of ours
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if path.exists():  # these walk without recursion, and follow no link
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run(
                [*command, "--", str(path)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
            )


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
    fetch: Callable[[Folder], list[str]] | None = None  # brings wheels; what pip is to install. Raises `InstallFailed`


class Dropped(Exception):
    """The call was not permitted to run after all: somebody else has it, or nobody wants it any more."""


class Talk:
    """The host's side of a sandbox's protocol: frames, output, memory, time, and the sandbox's end, in one loop.

    Between calls nobody listens: `begin` ties it to a call, `finish` unties it. `close` ends the sandbox.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.python = ""  # its minor version, once it has said hello
        self.started_s = 0.0  # from the order to its hello
        self.limit = UNLIMITED
        self.max_payload = CHUNK
        self.call: Call | None = None
        self.ties: Ties | None = None
        self.channel: socket.socket | None = None
        self.pipes = dict(sandbox.folder.pipes)
        self.buffer = bytearray()
        self.watched = self.rung = time.monotonic()
        self.decoders: dict[Stream, codecs.IncrementalDecoder] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(sandbox.exit_descriptor, selectors.EVENT_READ, "exit")
        self.selector.register(sandbox.folder.listener, selectors.EVENT_READ, "listener")
        if sandbox.bell >= 0:
            self.selector.register(sandbox.bell, selectors.EVENT_READ, "memory")
        for name, pipe in self.pipes.items():
            self.selector.register(pipe, selectors.EVENT_READ, name)

    def begin(self, call: Call, ties: Ties) -> None:
        """Ties the sandbox to a call: its limits hold from now on, and its output goes to the call."""
        if self.channel:  # what it printed when no call ran is nobody's
            self.empty_pipes()
        self.call, self.ties = call, ties
        self.limit, self.max_payload = call.memory, call.max_payload
        self.decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self.pipes}
        self.selector.register(ties.stop.event, selectors.EVENT_READ, "stop")
        self.sandbox.limit_memory(self.limit)

    def finish(self) -> None:
        """Unties it from its call, with the last of what that printed."""
        if self.ties is None:
            return
        with contextlib.suppress(OSError):
            self.drain_output()
        self.selector.unregister(self.ties.stop.event)
        self.call = self.ties = None

    def close(self) -> None:
        """Ends the sandbox and the connection. May be repeated."""
        # In this order: hung up on, the executor would end, and what it started could no longer be found below it.
        self.sandbox.end()
        self.hang_up()

    def hang_up(self) -> None:
        """Ends the connection alone."""
        if self.channel:
            self.channel.close()
        self.selector.close()

    @property
    def idle(self) -> bool:
        """Whether it could serve a call: it lives, and has said nothing but output since its last one."""
        events = {key.data for key, _ in self.selector.select(0)}
        return self.call is None and not self.buffer and not events & {"exit", "channel"}

    def send(self, header: Header, body: bytes = b"") -> None:
        """Sends a frame. Raises what ends the call meanwhile, as `next_frame` does."""
        assert self.channel is not None, "the executor connects before anything is said"
        deadline = time.monotonic() + SEND_S
        for part in (encode_header(header, len(body)), body):
            view = memoryview(part)
            while view:
                try:
                    view = view[self.channel.send(view, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    self.wait_writable(deadline)
                except OSError:
                    raise self.ended() from None

    def wait_writable(self, deadline: float) -> None:
        """Waits until the sandbox has read something, and looks after it meanwhile."""
        assert self.channel is not None
        poll = select.poll()
        poll.register(self.channel, select.POLLOUT)
        poll.register(self.sandbox.exit_descriptor, select.POLLIN)
        events = poll.poll(WATCH_S * 1000)
        if self.ties and self.ties.stop.problem:
            raise self.ties.stop.problem
        if any(descriptor == self.sandbox.exit_descriptor for descriptor, _ in events):
            raise self.ended()
        self.watch_memory()
        if time.monotonic() > deadline:
            raise SandboxFailed(f"it did not read what it was sent within {SEND_S:g} s")

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
            if "stop" in events and self.ties and self.ties.stop.problem:
                raise self.ties.stop.problem
            if "memory" in events:  # a look now and then would come too late for what takes memory fast
                os.eventfd_read(self.sandbox.bell)
                time.sleep(max(0.0, self.rung + RING_S - time.monotonic()))  # it rings at each crossing, also downwards
                self.rung = time.monotonic()
                self.watch_memory()
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
        """Takes the executor's connection; there is no second one."""
        listener = self.sandbox.folder.listener
        self.channel, _ = listener.accept()
        self.selector.unregister(listener)
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
        if header_length > MAX_HEADER or body_length > self.max_payload:
            raise SandboxFailed("it sent something that is not of the executor's protocol")
        end = LENGTHS.size + header_length + body_length
        if len(self.buffer) < end:
            return None
        try:
            header = msgspec.json.decode(self.buffer[LENGTHS.size : LENGTHS.size + header_length], type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
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
        if self.ties:
            text = self.decoders[name].decode(data, final=not data)
            if text:
                self.ties.on_output(name, text)
        return bool(data)

    def empty_pipes(self) -> None:
        """Reads what the pipes hold, though somebody may go on filling them."""
        for name in tuple(self.pipes):
            for _ in range(DRAIN):
                if name not in self.pipes or not self.read_output(name):
                    break

    def drain_output(self) -> None:
        """Passes on everything that is printed by now."""
        self.empty_pipes()
        for name in self.pipes:
            text = self.decoders[name].decode(b"", final=True)
            if text and self.ties:
                self.ties.on_output(name, text)

    def watch_memory(self) -> None:
        """Lets the limit grow in steps to max_memory; raises `OutOfMemory` beyond it."""
        if self.call is None or self.ties is None:
            return
        used = self.sandbox.memory()
        starved = self.sandbox.starved()
        if used <= self.limit * GROWTH and not starved:
            return
        if self.limit < self.call.max_memory:
            wanted = min(self.call.max_memory, max(2 * self.limit, 2 * used))
            if self.ties.grow(wanted):
                self.limit = wanted
                self.sandbox.limit_memory(wanted)
                starved = False
        if used > self.limit:
            used = self.sandbox.memory(exact=True)
        if starved or used > self.limit:
            raise self.out_of_memory(used)

    def out_of_memory(self, used: int) -> OutOfMemory:
        return OutOfMemory(f"the sandbox used {used} bytes, its limit is {self.limit}")

    def ended(self) -> ReadieError:
        """Why there is no more to come."""
        ending = self.sandbox.ending()
        if self.ties and self.ties.stop.problem:
            return self.ties.stop.problem
        if self.sandbox.starved():
            return OutOfMemory(f"the sandbox wanted more than its limit of {self.limit} bytes")
        return SandboxFailed(f"it ended with {ending}" if ending else "it closed its connection to the worker")


def open_sandbox(runtime: Runtime, spec: CheckpointSpec | None, call: Call, ties: Ties | None = None) -> Talk:
    """A sandbox from `spec` or cold, that has said hello; tied to `call` if there are `ties`.

    Raises `StartFailed` if there is none, or what else ended the call.
    """
    started = time.monotonic()
    sandbox = runtime.start(spec, memory=call.memory)
    try:
        talk = Talk(sandbox)
    except BaseException:
        sandbox.end()
        raise
    try:
        if ties:
            talk.begin(call, ties)
        try:
            hello, _ = talk.next_frame(call.start_timeout, SandboxFailed(f"no answer within {call.start_timeout:g} s"))
        except SandboxFailed as error:
            raise StartFailed(f"the sandbox did not answer: {error.detail}") from error
        if hello.get("protocol") != PROTOCOL:
            spoken = hello.get("protocol")
            raise StartFailed(f"the executor speaks protocol {spoken}, the worker {PROTOCOL}")  # noqa: TRY301
        talk.python = str(hello.get("python"))
        talk.started_s = time.monotonic() - started
    except BaseException:
        talk.finish()
        talk.close()
        raise
    return talk


def run_call(runtime: Runtime, spec: CheckpointSpec | None, call: Call, ties: Ties, *, arrived: float) -> Result:
    """Runs one call in a sandbox of its own, from `spec` or cold, and ends the sandbox.

    `arrived` is the placement's arrival by `time.monotonic()`. What a call can suffer is in the result. Raises
    `StartFailed` if there was no sandbox, `Dropped` if the call was not permitted; nothing has run then.
    """
    try:
        talk = open_sandbox(runtime, spec, call, ties)
    except ReadieError as error:
        return ended_result(error)
    try:
        return run_in(talk, call, ties, arrived=arrived, restore=talk.started_s)
    finally:
        talk.close()


def ended_result(error: ReadieError, **fields: Any) -> Result:
    """The result of a call that `error` has ended."""
    outcome: Literal["failed", "cancelled"] = "cancelled" if isinstance(error, CallCancelled) else "failed"
    return Result(outcome=outcome, problem=problem_of(error), **fields)


def run_in(talk: Talk, call: Call, ties: Ties, *, arrived: float, restore: float) -> Result:
    """Runs one call in a sandbox that has said hello, and may be tied to the call already.

    `restore` is what its start took of this call's time, in seconds. The sandbox lives on, whatever the result is: but
    only after `returned` and `raised` can it serve another call. Raises `Dropped` if the call was not permitted.
    """
    installed, imports, ready, run = 0.0, 0.0, 0.0, 0.0
    try:
        if talk.ties is None:
            talk.begin(call, ties)
        ties.on_start(talk.sandbox.memory())
        late = SandboxFailed(
            f"the function did not start within {call.start_timeout:g} s: what it installs or imports takes longer"
        )
        start_by = time.monotonic() + call.start_timeout
        if ties.fetch:
            installed = install(talk, ties.fetch, start_by, call.start_timeout)
        talk.send({"type": "prepare", "modules": call.modules})
        prepared, _ = talk.next_frame(start_by - time.monotonic(), late)
        imports = float(prepared["imports_s"])
        asked = time.monotonic()
        if not ties.permit():
            raise Dropped
        start_by += time.monotonic() - asked  # that the router was away is not the sandbox's
        talk.send({"type": "call", "python": call.python, "max_payload": call.max_payload}, call.payload)
        header, payload = talk.next_frame(start_by - time.monotonic(), late)
        ready = time.monotonic() - arrived
        if header["type"] == "ready":
            header, payload = talk.next_frame(call.timeout, CallTimeout(f"it ran longer than {call.timeout:g} s"))
        run = float(header.get("run_s", 0.0))
        outcome, problem = _read_result(header)
        result = Result(outcome=outcome, payload=payload, problem=problem)
    except ReadieError as error:
        result = ended_result(error)
        if ready and not run:
            run = time.monotonic() - arrived - ready
    except (KeyError, ValueError, TypeError) as error:
        result = ended_result(SandboxFailed(f"its answer makes no sense: {error!r}"))
    finally:
        talk.finish()
    phases = Phases(restore=restore, install=installed, imports=imports, ready=ready, run=run)
    return msgspec.structs.replace(result, python=talk.python, phases=phases)


def install(talk: Talk, fetch: Callable[[Folder], list[str]], start_by: float, within: float) -> float:
    """Fetches wheels and has the executor install them; seconds. Raises `InstallFailed` with the installer's output.

    It has to be done by `start_by`, by time.monotonic(), and there were `within` seconds for that.
    """
    started = time.monotonic()
    requirements = fetch(talk.sandbox.folder)
    if not requirements:  # all of it is there, with what it needs
        return time.monotonic() - started
    talk.send({"type": "install", "requirements": requirements})
    late = InstallFailed(f"installing took longer than {within:g} s")
    answer, _ = talk.next_frame(start_by - time.monotonic(), late)
    if not answer["ok"]:
        raise InstallFailed(printable(str(answer["output"])), "The output of pip above says why.")
    return time.monotonic() - started


@dataclass(frozen=True)
class Trial:
    """A start that was tried: seconds to ready, and the memory of the started sandbox."""

    ready_s: float
    bytes: int


def try_start(runtime: Runtime, spec: CheckpointSpec | None, *, python: str, timeout: float) -> Trial:
    """Starts a sandbox with a call that does nothing. Raises `StartFailed` if that does not work."""
    call = Call(
        payload=pickle.dumps((len, ((),), {})),
        python=python,
        modules=[],
        memory=UNLIMITED,
        max_memory=UNLIMITED,
        timeout=timeout,
        start_timeout=timeout,
        max_payload=CHUNK,
    )
    used: list[int] = []
    started = time.monotonic()
    with Stop() as stop:
        result = run_call(runtime, spec, call, Ties(stop=stop, on_start=used.append), arrived=started)
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
