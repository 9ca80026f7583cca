"""The `runsc` runtime: sandboxes of gVisor, restored from what `runsc checkpoint` has saved.

A sandbox is created first (`runsc create`), and then either restored or started cold: so some can be created ahead, and
a start takes only the second half. What it shares with the host is one folder, where its executor connects to sockets.

`runsc` leaves two processes behind for each sandbox, the sandbox itself and its gofer, which serves files. This process
is their subreaper: it reaps them, so that ending one takes milliseconds. A pid of runsc's is trusted once, right after
`create`, and only above 1: `runsc state` names -1 for what has stopped, and a signal to that goes to every process of the
machine. From then on sandboxes are known by descriptors of their processes.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from readie.errors import CallTimeout, OutOfMemory, RuntimeUnavailable, SandboxFailed
from readie.files import write_json
from readie.flavor import Flavor
from readie.manifest import CheckpointSpec, Description, Host
from readie.resources import FILE as RESOURCES
from readie.units import MB
from worker import cgroups, executor
from worker.bundle import check_resources, copy_pip, cpu_features, fingerprint, make_bundle, make_python
from worker.executor import Header, children_of
from worker.runtime import GROWTH, UNLIMITED, Folder, Saved, SaveFailed, StartFailed, Talk, remove_tree
from worker.specification import (
    BUNDLE,
    CALL,
    PYTHON,
    UID,
    Limits,
    Network,
    find_gpu,
    make_arguments,
    make_configuration,
    make_flags,
    sensitive,
)

COMMAND_S = 30.0  # what one command of runsc may take
SAVE_S = 300.0  # what writing a checkpoint may take
END_S = 5.0  # how long ending a process may take
RETRY_S = 1.0  # after creating ahead has failed
RECORD = "etc/readie/rootfs.json"  # of a root filesystem
NAMED = re.compile(r"readie-[0-9a-f]{6}-[0-9a-f]{8}")  # sandboxes
AHEAD_BYTES = 40_000_000  # a sandbox that was created, and its gofer
OLDEST = 20240101  # of runsc's releases: older ones save otherwise
SUBREAPER = 36  # prctl


@dataclass(frozen=True)
class Options:
    """How a worker runs its sandboxes."""

    flavor: Flavor = Flavor.CPU
    network: Network = "none"  # host: sandboxes have the host's network, and none can be restored
    limits: Limits = Limits()  # noqa: RUF009 - frozen
    ahead: int = 1  # sandboxes that are created before they are asked for, each about 15 MB


class RunscRuntime:
    """Sandboxes of gVisor over the root filesystem `rootfs`. `folder` is for what it needs while it runs.

    Raises `RuntimeUnavailable`, `NeedsGpu`.
    """

    def __init__(self, rootfs: Path, folder: Path, options: Options = Options()) -> None:
        self.program, self.version = find_runsc()
        self.rootfs = check_rootfs(rootfs)
        self.options = options
        self.folder = folder
        self.gpu = find_gpu(options.flavor, folder / "nvidia")
        self.sandboxes, self.bundles, self.state = (folder / name for name in ("sandboxes", "bundles", "state"))
        for path in (self.sandboxes, self.bundles, self.state):
            path.mkdir(mode=0o700, exist_ok=True)
        self.python = make_python(folder / "python", self.rootfs)
        self.bundle = make_bundle(folder / "bundle", self.python)
        self.flags = ["--root", str(self.state), *make_flags(options.network, self.gpu)]
        self.compression = "none"  # makes files a quarter of the size, and restores slower (docs/gvisor.md)
        self.prefix = f"readie-{uuid4().hex[:6]}-"
        self.loaded: dict[tuple[str, str], Path] = {}
        self.made: deque[RunscSandbox] = deque()  # created ahead
        self.changed = threading.Condition()
        self.maker: threading.Thread | None = None
        self.closing = False
        self.cleaner = ThreadPoolExecutor(2, thread_name_prefix="delete")
        self.left: set[str] = set()  # sandboxes of which something could not be removed yet
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)

    # -- what this host is --

    def describe(self) -> Description:
        bundle = self.write_bundle(name := self.new_name(), self.sandboxes, "describe", {}, memory=UNLIMITED)
        try:
            output = self.run(["run", "--bundle", str(bundle), name], bundle)
            found = msgspec.json.decode(output, type=dict[str, Any])
        except (StartFailed, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RuntimeUnavailable(
                f"{self.rootfs} cannot run the executor under runsc: {error}",
                "ROOTFS (--rootfs) is a folder that readie-pipeline rootfs has made.",
            ) from error
        finally:
            self.delete(name)
        # Of all files, as they were when it was made, and of the distributions as they are now.
        digest = hashlib.sha256((self.rootfs / RECORD).read_bytes() + found["rootfs_digest"].encode())
        host = Host(
            runtime="runsc",
            runtime_version=self.version,
            python=found["python"],
            protocol=executor.PROTOCOL,
            fingerprint=fingerprint(self.bundle, sensitive(self.options.network, self.gpu)),
            rootfs_digest=digest.hexdigest(),
            cpu_features=cpu_features(),
            cpus=self.options.limits.cpus,
        )
        return Description(
            host=host, markers=found["markers"], preload=found["preload"], memory_source=found["memory_source"]
        )

    def outside(self, path: str) -> Path:
        if path.startswith(f"{BUNDLE}/"):
            return self.bundle / path.removeprefix(f"{BUNDLE}/")
        return self.rootfs / path.lstrip("/")

    @property
    def overhead(self) -> int:
        return self.options.ahead * AHEAD_BYTES

    def bring_pip(self) -> None:
        copy_pip(self.bundle)

    # -- checkpoints --

    def save(self, spec: CheckpointSpec, folder: Path, *, timeout: float) -> Saved:
        check_resources(spec, self.rootfs / RESOURCES)
        options = {"canonical": spec.canonical, "ballast_mb": spec.ballast_mb, "patience_s": timeout + SAVE_S}
        try:
            sandbox = self.launch("save", options, memory=UNLIMITED)
        except StartFailed as error:
            raise SaveFailed("no-result", str(error)) from error
        try:
            ready = await_ready(sandbox, timeout)
            folder.mkdir(parents=True)
            image = [f"--compression={self.compression}", f"--image-path={folder / 'image'}"]
            self.run(["checkpoint", *image, sandbox.name], sandbox.bundle, timeout=SAVE_S)
            write_json(folder / "checkpoint.json", spec)
        except (StartFailed, OSError) as error:
            remove_tree(folder)
            raise SaveFailed("no-result", str(error)) from error
        finally:
            sandbox.end()
        measured_mb = round((ready["bytes"] - ready["base_bytes"]) / MB, 3)
        return Saved(measured_mb=measured_mb, seconds=ready["seconds"], threads=len(ready["threads"]))

    def load(self, spec: CheckpointSpec, folder: Path, *, timeout: float) -> int:  # noqa: ARG002 - runsc reads it
        if spec.flavor is not self.options.flavor:
            raise StartFailed(f"it is of flavor {spec.flavor.value}, this worker of {self.options.flavor.value}")
        if self.options.network != "none":
            raise StartFailed("it was captured without a network, and SANDBOX_NETWORK grants one: calls start cold")
        try:
            check_resources(spec, self.rootfs / RESOURCES)
        except SaveFailed as error:
            raise StartFailed(error.detail) from error
        image = folder / "image"
        try:
            for path in (image / "checkpoint.img", *image.glob("pages*.img")):  # compressed, it is one file
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            raise StartFailed(f"{error.filename}: {error.strerror}") from error
        self.loaded[spec.key] = image
        return 0  # only the page cache, which gives way

    def unload(self, spec: CheckpointSpec) -> None:
        self.loaded.pop(spec.key, None)

    def alive(self, spec: CheckpointSpec) -> bool:
        return spec.key in self.loaded

    # -- sandboxes --

    def start(self, spec: CheckpointSpec | None, *, memory: int) -> "RunscSandbox":
        image = None
        if spec is not None:
            image = self.loaded.get(spec.key)
            if image is None:
                raise StartFailed("it is not loaded")
        try:
            sandbox = self.take()
        except StartFailed as error:
            raise StartFailed(str(error), blame=False) from error  # no checkpoint has to do with it
        try:
            sandbox.limit_memory(memory)
            if image is None:
                self.run(["start", sandbox.name], sandbox.bundle)
            else:
                self.restore(sandbox, image)
        except BaseException:
            sandbox.end()
            raise
        return sandbox

    def restore(self, sandbox: "RunscSandbox", image: Path) -> None:
        """Restores into a created sandbox; returns once its executor connects, or soon after. Raises `StartFailed`."""
        go = sandbox.folder.path / "go"  # this process's: the sandbox reads it, and cannot write
        go.with_suffix(".new").write_text(sandbox.name)
        go.with_suffix(".new").chmod(0o644)
        go.with_suffix(".new").rename(go)
        command = ["restore", "--detach", "--bundle", str(sandbox.bundle), "--image-path", str(image), sandbox.name]
        log = (sandbox.bundle / "log").open("ab")
        with log:
            process = subprocess.Popen(
                [self.program, *self.flags, *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
            )
        sandbox.command = process
        poll = select.poll()
        descriptor = os.pidfd_open(process.pid)
        poll.register(descriptor, select.POLLIN)
        poll.register(sandbox.folder.listener, select.POLLIN)
        deadline = time.monotonic() + COMMAND_S
        try:
            while not poll.poll(20):
                if sandbox.starved():
                    raise StartFailed("it does not fit into the call's memory", blame=False)
                if time.monotonic() > deadline:
                    raise StartFailed(f"runsc restore took longer than {COMMAND_S:g} s")
        finally:
            os.close(descriptor)
        if process.poll():
            fits = not cgroups.was_full(sandbox.name) and not cgroups.ran_out(sandbox.name, sandbox.limit)
            reason = last_line(sandbox.bundle) if fits else "it does not fit into the call's memory"
            raise StartFailed(f"runsc restore: {reason}", blame=fits)

    def start_probe(self, options: Header, *, memory: int) -> "RunscSandbox":
        given = {**options, "network": self.options.network}
        return self.launch("probe", given, memory=memory, probe=True)

    def launch(self, mode: str, options: Header, *, memory: int, probe: bool = False) -> "RunscSandbox":
        """A sandbox of its own whose executor starts in `mode` at once. Raises `StartFailed`."""
        sandbox = self.create(mode, options, memory=memory, probe=probe)
        try:
            self.run(["start", sandbox.name], sandbox.bundle)
        except BaseException:
            sandbox.end()
            raise
        return sandbox

    def create(self, mode: str, options: Header, *, memory: int, probe: bool = False) -> "RunscSandbox":
        """A sandbox that was created, and not started. Raises `StartFailed`."""
        name = self.new_name()
        folder = Folder(self.sandboxes / name, UID)
        sandbox = RunscSandbox(self, name, folder, self.bundles / name)
        try:
            if probe:
                (folder.path / "result").touch(0o600)
                folder.own(folder.path / "result")
            self.write_bundle(name, folder.path, mode, options, memory=memory)
            pid_file = sandbox.bundle / "pid"
            self.run(["create", "--bundle", str(sandbox.bundle), "--pid-file", str(pid_file), name], sandbox.bundle)
            sandbox.attach(read_pid(pid_file))
        except BaseException as error:
            sandbox.end()
            if isinstance(error, OSError):
                raise StartFailed(f"it ended as soon as it was created: {error}") from error
            raise
        return sandbox

    def write_bundle(self, name: str, folder: Path, mode: str, options: Header, *, memory: int) -> Path:
        """The folder with a sandbox's configuration, runsc's log and its pid."""
        bundle = self.bundles / name
        bundle.mkdir(mode=0o700)
        configuration = make_configuration(
            name=name,
            rootfs=self.rootfs,
            bundle=self.bundle,
            folder=folder,
            arguments=make_arguments(mode, options),
            memory=memory,
            limits=self.options.limits,
            network=self.options.network,
            gpu=self.gpu,
        )
        (bundle / "config.json").write_text(json.dumps(configuration))
        return bundle

    def new_name(self) -> str:
        """A name that no other sandbox of this machine has; those of one runtime begin alike."""
        return f"{self.prefix}{uuid4().hex[:8]}"

    # -- ahead --

    def take(self) -> "RunscSandbox":
        """A created sandbox, ahead of its time or now. Raises `StartFailed`."""
        with self.changed:
            if self.options.ahead and self.maker is None and not self.closing:
                self.maker = threading.Thread(target=self.make_ahead, name="ahead", daemon=True)
                self.maker.start()
            while self.made:
                sandbox = self.made.popleft()
                self.changed.notify_all()
                if not sandbox.wait_exit(0):
                    return sandbox
                self.cleaner.submit(sandbox.end)
        return self.create("cold", {"parent": None}, memory=UNLIMITED)

    def make_ahead(self) -> None:
        """Keeps as many sandboxes created as `options.ahead` says."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closing or len(self.made) < self.options.ahead)
                if self.closing:
                    return
            try:
                sandbox = self.create("cold", {"parent": None}, memory=UNLIMITED)
            except (StartFailed, OSError):  # the start that needs one will say why
                time.sleep(RETRY_S)
                continue
            with self.changed:
                self.made.append(sandbox)
                self.changed.notify_all()

    def prepare(self) -> None:
        with self.changed:
            if self.maker is not None:
                self.changed.wait_for(lambda: len(self.made) >= self.options.ahead, COMMAND_S)

    # -- commands --

    def run(self, command: Sequence[str], bundle: Path, *, timeout: float | None = None) -> bytes:
        """Runs one command of runsc; what it printed. Raises `StartFailed` with the last line of its log."""
        timeout = timeout or COMMAND_S
        with (bundle / "log").open("ab") as log, tempfile.TemporaryFile() as output:
            # Files, not pipes: the sandbox inherits them, and a pipe would end only with it.
            process = subprocess.Popen(
                [self.program, *self.flags, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=log
            )
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise StartFailed(f"runsc {command[0]} took longer than {timeout:g} s") from None
            if status:
                raise StartFailed(f"runsc {command[0]}: {last_line(bundle)}")
            output.seek(0)
            return output.read()

    def delete(self, name: str) -> None:
        """Removes what runsc, the kernel and this runtime keep of a sandbox whose processes have ended."""
        end_strays(name)  # runsc would wait for what is left of it, and give up
        with contextlib.suppress(StartFailed, OSError):
            self.run(["delete", "--force", name], self.bundles / name)
        end_strays(name)
        reap_stubs()
        self.left.add(name)
        for other in sorted(self.left):  # those of which a process took long to end come with a later one
            if remove_rest(self.folder, other, wait_s=cgroups.EMPTY_S if other == name else 0):
                self.left.discard(other)

    def remove_orphans(self) -> int:
        return end_orphans(self.folder)

    def close(self) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        if self.maker:
            self.maker.join(COMMAND_S)
        for sandbox in self.made:
            sandbox.end()
        self.cleaner.shutdown()
        end_orphans(self.folder)  # what was being started, and what could not be deleted


class RunscSandbox:
    """A sandbox of gVisor, created and perhaps started. `name` is runsc's id for it, and its control group's."""

    def __init__(self, runtime: RunscRuntime, name: str, folder: Folder, bundle: Path) -> None:
        self.runtime = runtime
        self.name = name
        self.folder = folder
        self.bundle = bundle
        self.exit_descriptor = -1
        self.bell = -1
        self.rung = UNLIMITED  # the limit that the kernel rings it for
        self.helpers: list[int] = []  # descriptors of the processes besides it: its gofer
        self.pids: list[int] = []  # of all of them
        self.limit = UNLIMITED  # bytes
        self.command: subprocess.Popen[bytes] | None = None  # runsc restore, which may end after the executor answers
        self.status: int | None = None
        self.ended = False
        self.lock = threading.Lock()

    def attach(self, pid: int) -> None:
        """Knows its processes from now on, right after they were created."""
        self.exit_descriptor = self.watch(pid)
        deadline = time.monotonic() + 1.0
        while not self.helpers and time.monotonic() < deadline:  # /proc may leave out a child while another one ends
            for other in find_strays(self.name):
                if other != pid:
                    self.helpers.append(self.watch(other))
        cgroups.pause_when_full(self.name)
        cgroups.forbid_swap(self.name)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def watch(self, pid: int) -> int:
        """A descriptor of one of its processes, which only `end` reaps from now on. Raises `OSError`, and ends it then."""
        AWAITED.add(pid)
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            end_child(pid)
            AWAITED.discard(pid)
            raise
        self.pids.append(pid)
        return descriptor

    def memory(self, *, exact: bool = False) -> int:  # noqa: ARG002 - the kernel counts exactly
        try:
            return cgroups.used_memory(self.name)
        except OSError:
            return 0

    def limit_memory(self, limit: int) -> None:
        self.limit = limit
        with contextlib.suppress(OSError):  # more is in use: it stays as it was, and `memory` says how much
            cgroups.limit_memory(self.name, limit)
        if limit != self.rung:  # each time is one more that the kernel remembers
            self.rung = limit
            cgroups.ring(self.name, self.bell, int(limit * GROWTH))

    def starved(self) -> bool:
        if cgroups.was_full(self.name):
            return True
        # Where it was the kernel that wanted memory for it, a call of gVisor's fails, and it ends by itself.
        return self.wait_exit(0) and cgroups.ran_out(self.name, self.limit)

    def wait_exit(self, timeout: float) -> bool:
        poll = select.poll()
        poll.register(self.exit_descriptor, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def ending(self) -> str:
        if self.exit_descriptor < 0 or not self.wait_exit(2.0):
            return ""
        self.reap()
        if self.status is None:
            return "an unknown exit code"
        # The sandbox ends as the first process in it: with its exit code, or 128 and the number of its signal.
        if self.status > 128 and self.status - 128 in signal.valid_signals():
            return signal.Signals(self.status - 128).name
        if cgroups.was_crowded(self.name):  # gVisor itself cannot go on then
            return f"exit code {self.status}: it wanted more processes than SANDBOX_PROCESSES allows"
        return f"exit code {self.status}"

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_PIDFD, self.exit_descriptor, os.WEXITED)
            if found:
                self.status = found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status

    def end(self) -> None:
        with self.lock:
            if self.ended:
                return
            self.ended = True
        try:
            if self.exit_descriptor >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.exit_descriptor, signal.SIGKILL)
                if self.wait_exit(END_S):
                    self.reap()
                for helper in self.helpers:
                    end_process(helper)
                os.close(self.exit_descriptor)
                AWAITED.difference_update(self.pids)
            if self.command:
                self.command.kill()
                self.command.wait()
            if self.bell >= 0:
                os.close(self.bell)
            self.folder.close()
        finally:
            try:
                self.runtime.cleaner.submit(self.runtime.delete, self.name)
            except RuntimeError:  # the runtime has closed
                self.runtime.delete(self.name)


def await_ready(sandbox: RunscSandbox, timeout: float) -> Header:
    """What the executor says once it has imported everything, when it holds no connection. Raises `SaveFailed`."""
    talk = Talk(sandbox)
    try:
        answer, _ = talk.next_frame(timeout, CallTimeout("it imports too long"))
        if answer["type"] == "failed":
            raise SaveFailed(answer["kind"], answer["detail"])
        assert talk.channel is not None
        talk.channel.settimeout(END_S)
        if talk.channel.recv(1):
            raise SaveFailed("no-result", "it said more than it should")
    except CallTimeout:
        raise SaveFailed("timeout", f"importing took longer than {timeout:g} s") from None
    except SandboxFailed:
        ending = sandbox.ending() or "an unknown exit code"
        kind = "signal" if ending.startswith("SIG") else "exit"
        raise SaveFailed(kind, f"importing ended the process with {ending}") from None
    except OutOfMemory as error:
        raise SaveFailed("memory", error.detail) from error
    finally:
        talk.hang_up()
    return answer


# ---- processes ----

#: Process ids that sandboxes wait for themselves.
AWAITED: set[int] = set()


def read_pid(path: Path) -> int:
    """The pid that runsc wrote. Raises `StartFailed` for one that no signal may ever go to."""
    text = path.read_text().strip()
    if not text.isdecimal() or int(text) <= 1:
        raise StartFailed(f"runsc named {text!r} as the sandbox's pid")
    return int(text)


def find_strays(name: str) -> list[int]:
    """This process's children that belong to a sandbox: runsc's processes carry its name in their arguments."""
    found = []
    for pid in children_of("self"):
        with contextlib.suppress(OSError):
            if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def reap_stubs() -> None:
    """Reaps what has ended of what sandboxes have started on the host: processes that gVisor runs their threads in.

    They come to this process, the subreaper, when their sandbox has ended; `runsc` starts all its own as "exe".
    """
    for pid in children_of("self"):
        with contextlib.suppress(OSError):  # another thread has reaped it
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(" (")[2].rpartition(") ")
            if name == "exe" and rest.startswith("Z") and pid not in AWAITED:
                os.waitpid(pid, os.WNOHANG)


def end_process(descriptor: int, wait_s: float = 1.0) -> None:
    """Waits for a process that may be ending, ends it otherwise, reaps it, and closes its descriptor."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(wait_s * 1000):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll.poll(END_S * 1000)
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG)
    os.close(descriptor)


def end_child(pid: int) -> None:
    """Ends and reaps a child of this process for which there is no descriptor: until it is reaped, its number is its own."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + END_S
        while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
            time.sleep(0.01)


def end_strays(name: str) -> None:
    """Ends what a failed command of runsc may have left of a sandbox."""
    for pid in find_strays(name):
        with contextlib.suppress(OSError):
            end_process(os.pidfd_open(pid))


def end_orphans(folder: Path) -> int:
    """Ends and removes the sandboxes that an earlier run of a runtime in `folder` has left; how many there were."""
    places = [folder / place for place in ("bundles", "sandboxes", "state")]
    found = [path.name for place in places if place.is_dir() for path in place.iterdir()]
    left = sorted({match.group() for name in found if (match := NAMED.search(name))})
    for name in left:
        end_orphan(name)
        remove_rest(folder, name)
    return len(left)


def remove_rest(folder: Path, name: str, *, wait_s: float = cgroups.EMPTY_S) -> bool:
    """Removes what is left of a sandbox whose processes have ended, of a runtime in `folder`; False if something stays.

    Its bundle was there before runsc was asked for anything, and goes last: by it, a later run finds what stays.
    """
    for state in (folder / "state").glob(f"*{name}*"):  # what runsc itself would remove
        state.unlink(missing_ok=True)
    remove_tree(folder / "sandboxes" / name)
    if not cgroups.remove_groups(name, wait_s=wait_s):
        return False
    remove_tree(folder / "bundles" / name)
    return True


def remove_leftovers(folder: Path) -> None:
    """Ends and removes what a command of `readie-worker` that was killed has left in its folder."""
    end_orphans(folder)
    remove_tree(folder)


def end_orphan(name: str) -> None:
    """Ends what still runs of a sandbox of an earlier run: runsc's processes carry its name in their arguments."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(int(folder.name))
            try:
                command = (folder / "cmdline").read_bytes()
                if command.partition(b"\0")[0].startswith(b"runsc") and name.encode() in command:
                    end_process(os.dup(descriptor), wait_s=0)
            finally:
                os.close(descriptor)


def last_line(bundle: Path) -> str:
    """What runsc said last."""
    try:
        lines = (bundle / "log").read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1][-500:] if lines else "it said nothing"


# ---- what it needs ----


def find_runsc() -> tuple[str, str]:
    """The program and its release. Raises `RuntimeUnavailable` where it is missing, too old, or not to be used."""
    program = shutil.which("runsc")
    way_out = "Install gVisor's runsc (Debian has it in bookworm-backports), or use RUNTIME=fork (--runtime fork)."
    if program is None:
        raise RuntimeUnavailable("runsc is not installed", way_out)
    if os.geteuid() != 0:
        raise RuntimeUnavailable(
            "runsc saves and restores only as root", "Run as root, or use RUNTIME=fork (--runtime fork)."
        )
    try:
        said = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_S,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeUnavailable(f"{program} --version: {error}", way_out) from error
    match = re.search(r"runsc version (\S*?(\d{8})\S*)", said)
    if match is None:
        raise RuntimeUnavailable(f"{program} --version says {said.strip()[:80]!r}, and no release", way_out)
    if int(match[2]) < OLDEST:
        raise RuntimeUnavailable(f"{program} is of release {match[1]}: too old to save and restore as needed", way_out)
    return program, match[1]


def check_rootfs(rootfs: Path) -> Path:
    """The root filesystem's real path. Raises `RuntimeUnavailable` for one that does not stand alone."""
    real = Path(os.path.realpath(rootfs))
    way_out = "ROOTFS (--rootfs) under runsc is a folder that readie-pipeline rootfs has made."
    python = Path(os.path.realpath(real / PYTHON.lstrip("/")))
    if not python.is_relative_to(real) or not os.access(python, os.X_OK):
        raise RuntimeUnavailable(f"{rootfs} has no Python of its own at {PYTHON.lstrip('/')}", way_out)
    missing = [name for name in ("proc", "tmp", CALL[1:], BUNDLE[1:]) if not (real / name).is_dir()]
    if not (real / RECORD).is_file():
        raise RuntimeUnavailable(f"{rootfs} has no {RECORD}, which says what is in it", way_out)
    if missing:  # runsc would create them, in a root filesystem that is not to change
        raise RuntimeUnavailable(f"{rootfs} has no folder {', '.join(missing)} to mount", way_out)
    return real
