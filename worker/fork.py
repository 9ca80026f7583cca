"""The `fork` runtime: a zygote for each checkpoint, which has imported it and forks for each call.

Milliseconds, and no isolation: sandboxes are ordinary processes of the worker's user, with its network and its files.
For development, and for code that is trusted.

Zygotes and cold starts get the same environment: numeric libraries use one thread, because a process that has threads
cannot be forked safely. Clones keep that environment; a function that wants more threads says so to its library
(`threadpoolctl`, `torch.set_num_threads`).
"""

import contextlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import msgspec

from readie.errors import RuntimeUnavailable
from readie.files import write_json
from readie.manifest import CheckpointSpec, Description, Host
from readie.resources import FILE as RESOURCES
from readie.units import MB
from worker import executor
from worker.bundle import (
    BOOT,
    ENVIRONMENT,
    check_resources,
    copy_pip,
    cpu_features,
    fingerprint,
    make_bundle,
)
from worker.executor import Header, anonymous_bytes, children_of, reap_group
from worker.runtime import Folder, Saved, SaveFailed, StartFailed, remove_tree

RUNTIME_VERSION = "1"  # of this file's way to fork
END_S = 5.0  # how long ending a process may take


class ForkRuntime:
    """Sandboxes as processes of the Python at `<rootfs>/bin/python`. `folder` is for what it needs while it runs."""

    def __init__(self, rootfs: Path, folder: Path) -> None:
        self.rootfs = rootfs.absolute()
        self.python = self.rootfs / "bin" / "python"
        if not os.access(self.python, os.X_OK):
            raise RuntimeUnavailable(
                f"{self.python} is not an executable",
                "ROOTFS (--rootfs) is a folder with its own Python at bin/python, such as a virtual environment.",
            )
        self.folder = folder
        self.sandboxes = folder / "sandboxes"
        self.sandboxes.mkdir(mode=0o700, exist_ok=True)
        self.bundle = make_bundle(folder / "bundle", self.python)
        self.cache = shared_cache(self.rootfs, folder)
        self.paths = {"resources": str(self.rootfs / RESOURCES)}
        self.zygotes: dict[tuple[str, str], Zygote] = {}
        self.retired: list[Zygote] = []
        # The kernel tells a process that its parent has ended when the *thread* that started it ends. A session's
        # sandbox outlives the thread of its first call.
        self.starter = ThreadPoolExecutor(1, thread_name_prefix="start")

    def environment(self, home: Path) -> dict[str, str]:
        """The environment of a process whose folder is `home`."""
        return ENVIRONMENT | {
            "PATH": f"{self.rootfs / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "TMPDIR": str(home),
            "XDG_CACHE_HOME": str(self.cache),
        }

    def command(self, mode: str, options: Header) -> list[str]:
        return [str(self.python), "-I", "-B", "-c", BOOT, str(self.bundle), mode, json.dumps(options | self.paths)]

    def popen(
        self,
        mode: str,
        options: Header,
        folder: Path,
        *,
        output: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | None = None,
        descriptors: Sequence[int] = (),
    ) -> "subprocess.Popen[bytes]":
        """Starts the executor in a process group of its own, with `folder` as its directory."""
        return subprocess.Popen(
            self.command(mode, options),
            stdin=subprocess.DEVNULL,
            stdout=output if stdout is None else stdout,
            stderr=output,
            cwd=folder,
            env=self.environment(folder),
            pass_fds=descriptors,
            start_new_session=True,
        )

    def describe(self) -> Description:
        process = self.popen("describe", {}, self.folder, stdout=subprocess.PIPE, output=subprocess.PIPE)
        try:
            output, errors = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
        if process.returncode:
            last = (errors.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise RuntimeUnavailable(
                f"{self.python} cannot run the executor: {last}",
                "ROOTFS (--rootfs) needs a working Python 3.11 or later at bin/python.",
            )
        try:
            found = msgspec.json.decode(output, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RuntimeUnavailable(
                f"{self.python} does not answer as a Python does: {output[:80]!r}",
                "ROOTFS (--rootfs) needs a working Python 3.11 or later at bin/python.",
            ) from error
        host = Host(
            runtime="fork",
            runtime_version=RUNTIME_VERSION,
            python=found["python"],
            protocol=executor.PROTOCOL,
            fingerprint=fingerprint(self.bundle, ENVIRONMENT),
            rootfs_digest=found["rootfs_digest"],
            cpu_features=cpu_features(),
        )
        return Description(
            host=host, markers=found["markers"], preload=found["preload"], memory_source=found["memory_source"]
        )

    def save(self, spec: CheckpointSpec, folder: Path, *, timeout: float) -> Saved:
        zygote = Zygote(self, spec, timeout=timeout)
        try:
            folder.mkdir(parents=True)
            write_json(folder / "checkpoint.json", spec)
            return Saved(
                measured_mb=round((zygote.bytes - zygote.base_bytes) / MB, 3), seconds=zygote.seconds, threads=1
            )
        finally:
            zygote.close()

    def load(self, spec: CheckpointSpec, folder: Path, *, timeout: float) -> int:  # noqa: ARG002 - the zygote is all
        self.unload(spec)
        try:
            zygote = Zygote(self, spec, timeout=timeout)
        except SaveFailed as error:
            raise StartFailed(f"its zygote could not be started: {error.detail}") from error
        self.zygotes[spec.key] = zygote
        return zygote.bytes

    def unload(self, spec: CheckpointSpec) -> None:
        zygote = self.zygotes.pop(spec.key, None)
        if zygote:
            self.retired.append(zygote)
            threading.Thread(target=zygote.retire, name="retire", daemon=True).start()

    def alive(self, spec: CheckpointSpec) -> bool:
        zygote = self.zygotes.get(spec.key)
        return zygote is not None and not zygote.dead

    def remove_orphans(self) -> int:
        zygotes = list(self.folder.glob("zygote-*"))
        left = list(self.sandboxes.iterdir())
        for folder in [*zygotes, *left]:
            end_orphan(folder)
            remove_tree(folder)
        return len(left)

    def start(self, spec: CheckpointSpec | None, *, memory: int) -> "ForkSandbox":  # noqa: ARG002
        zygote = self.zygotes.get(spec.key) if spec else None
        if spec and zygote is None:
            raise StartFailed("its zygote is not running")
        folder = make_folder(self.sandboxes)
        try:
            return zygote.fork(folder) if zygote else self.start_cold(folder)
        except BaseException:
            folder.close()
            raise

    def start_probe(self, options: Header, *, memory: int) -> "GuardedSandbox":  # noqa: ARG002
        folder = make_folder(self.sandboxes)
        try:
            real = Path(os.path.realpath(folder.path))
            (real / "result").touch(0o600)
            network = "none" if self.isolates else "host"
            command = self.command("probe", {**options, "folder": str(real), "network": network})
            process = self.popen_guard(real, command, isolated=self.isolates)
            return GuardedSandbox(folder, *self.watch(process, folder))
        except BaseException as error:
            folder.close()
            if isinstance(error, OSError):
                raise StartFailed(f"{sys.executable} could not be started: {error}") from error
            raise

    def outside(self, path: str) -> Path:
        return Path(path)

    def prepare(self) -> None:
        """Nothing is made ahead: a fork takes milliseconds."""

    @property
    def overhead(self) -> int:
        return 0

    def bring_pip(self) -> None:
        copy_pip(self.bundle)

    @cached_property
    def isolates(self) -> bool:
        """Whether this host lets the guard isolate what is measured."""
        with tempfile.TemporaryDirectory(prefix="guard-", dir=self.folder) as folder:
            for name in ("work", "tmp"):
                Path(folder, name).mkdir()
            return self.popen_guard(Path(os.path.realpath(folder)), [], isolated=True).wait() == 0

    def popen_guard(self, folder: Path, command: Sequence[str], *, isolated: bool) -> "subprocess.Popen[bytes]":
        """Starts `command` below a guard (worker/guard.py), in a process group of its own."""
        base = Path(os.path.realpath(self.python)).parents[1]
        kept = "\n".join(os.path.realpath(path) for path in (base, self.rootfs, self.cache)) if isolated else "-"
        guard = [sys.executable, "-I", "-S", "-B", str(Path(__file__).with_name("guard.py"))]
        return subprocess.Popen(
            [*guard, str(os.getpid()), str(folder), kept, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self.environment(folder / "work"),
            start_new_session=True,
        )

    def start_cold(self, folder: Folder) -> "ForkSandbox":
        options = {**where(folder), "parent": os.getpid()}
        try:
            process = self.starter.submit(self.popen, "cold", options, folder.path / "work").result()
            return ForkSandbox(folder, *self.watch(process, folder))
        except OSError as error:
            raise StartFailed(f"{self.python} could not be started: {error}") from error

    def watch(
        self, process: "subprocess.Popen[bytes]", folder: Folder
    ) -> tuple[int, int, "Future[int | None]", Callable[[], None]]:
        """What a sandbox that is this process's own child is made of. Raises `OSError`, and ends it then."""
        try:
            note_process(folder.path, process.pid)
            descriptor = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            reap_group(process.pid)
            process.wait()
            raise
        status: Future[int | None] = Future()

        def reap() -> None:
            status.set_result(reap_group(process.pid))
            process.wait()

        return process.pid, descriptor, status, reap

    def close(self) -> None:
        for zygote in [*self.zygotes.values(), *self.retired]:
            zygote.close()
        self.zygotes.clear()
        self.starter.shutdown()


def make_folder(place: Path) -> Folder:
    """A sandbox's folder below `place`, with room for its home and its temporary files."""
    folder = Folder(place / uuid4().hex[:16])
    for name in ("work", "tmp"):
        (folder.path / name).mkdir(mode=0o700)
    return folder


def where(folder: Folder) -> Header:
    """What an executor is told of its folder."""
    return {"folder": str(folder.path), "home": str(folder.path / "work"), "tmp": str(folder.path / "tmp")}


def shared_cache(rootfs: Path, folder: Path) -> Path:
    """Where libraries keep what they compute once, such as matplotlib its list of fonts: `<rootfs>/var/cache`.

    It belongs to the root filesystem, so that neither measurements nor cold starts compute it again and again. A root
    filesystem that cannot be written has a substitute in `folder`.
    """
    cache = rootfs / "var" / "cache"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass
    else:
        if os.access(cache, os.W_OK):
            return cache
    substitute = folder / "cache"
    substitute.mkdir(exist_ok=True)
    return substitute


# ---- processes ----


@dataclass
class ForkSandbox:
    """A sandbox that is a process with its descendants. `status` is its wait status (None: not to be had).

    `reap` waits for the process to end, for one that is this process's own child; a zygote reaps its own.
    """

    folder: Folder
    pid: int
    exit_descriptor: int
    status: "Future[int | None]"
    reap: Callable[[], None] | None = None
    ended: bool = False
    bell: int = -1

    def memory(self, *, exact: bool = False) -> int:
        used = 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            used = anonymous_bytes(self.pid)
            for pid in descendants(self.pid):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    used += private_bytes(pid) if exact else anonymous_bytes(pid)
        return used

    def limit_memory(self, limit: int) -> None:
        """Nothing but the agent's own look at `memory` holds a sandbox to its limit."""

    def starved(self) -> bool:
        return False

    def ending(self) -> str:
        if not self.wait_exit(2.0):
            return ""
        try:
            if self.reap and not self.status.done():
                self.reap()
            status = self.status.result(2.0)
        except FutureTimeoutError:
            status = None
        return describe_status(status)

    def wait_exit(self, timeout: float) -> bool:
        poll = select.poll()
        poll.register(self.exit_descriptor, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def end(self) -> None:
        if self.ended:
            return
        self.ended = True
        end_tree(self.pid, self.exit_descriptor)
        if self.wait_exit(END_S):
            if self.reap and not self.status.done():
                self.reap()
            with contextlib.suppress(FutureTimeoutError):
                self.status.result(END_S)
        os.close(self.exit_descriptor)
        self.folder.close()


class GuardedSandbox(ForkSandbox):
    """A sandbox below a guard, of which all that is left ends with the guard."""

    def memory(self, *, exact: bool = False) -> int:
        """Bytes of anonymous memory of everything below the guard, and of memory that it shares and no file keeps."""
        used = 0
        for pid in descendants(self.pid):
            with contextlib.suppress(OSError, ValueError, IndexError):
                used += shared_out_bytes(pid) if exact else unfiled_bytes(pid)
        return used

    def end(self) -> None:
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.exit_descriptor, signal.SIGTERM)
            self.wait_exit(END_S)
        super().end()


def note_process(folder: Path, pid: int) -> None:
    """Writes down whose folder this is, for a later run that finds it: its number and when it started."""
    (folder / "process").write_text(f"{pid} {process_start(pid)}")


def end_orphan(folder: Path) -> None:
    """Ends the process whose folder this is, with its group, if it still runs and is still the same."""
    try:
        pid, started = (folder / "process").read_text().split()
        descriptor = os.pidfd_open(int(pid))
    except (OSError, ValueError):
        return
    if str(process_start(int(pid))) == started:
        end_tree(int(pid), descriptor)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(pid), signal.SIGKILL)
    os.close(descriptor)


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def end_tree(pid: int, descriptor: int) -> None:
    """Ends a process, by its descriptor, and all of its descendants, whatever process group they moved to."""
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGSTOP)  # it starts no more while they are counted
        for child in reversed(descendants(pid)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended and was reaped, with its group


def descendants(pid: int) -> list[int]:
    """Process ids of everything below `pid`, parents first."""
    found = []
    waiting = [pid]
    while waiting:
        pids = children_of(waiting.pop())
        found += pids
        waiting += pids
    return found


def private_bytes(pid: int) -> int:
    """Memory that only this process has: what a forked child still shares with its parent is not counted again."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:")) * 1024


def unfiled_bytes(pid: int) -> int:
    """Resident memory of a process that no file keeps, its shared memory included."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) * 1024


def shared_out_bytes(pid: int) -> int:
    """The same, with what several processes share divided among them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) * 1024


def describe_status(status: int | None) -> str:
    """A wait status in words."""
    if status is None:
        return "an unknown exit code"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"signal {number}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


# ---- zygotes ----


class Zygote:
    """A process that has imported a checkpoint's canonical modules. Raises `SaveFailed` where that is not possible.

    `bytes` is its memory (RssAnon), `base_bytes` what it was before it imported anything, `seconds` the importing.
    """

    def __init__(self, runtime: ForkRuntime, spec: CheckpointSpec, *, timeout: float) -> None:
        check_resources(spec, runtime.rootfs / RESOURCES)
        self.folder = Path(tempfile.mkdtemp(prefix="zygote-", dir=runtime.folder))
        self.lock = threading.Lock()  # one fork at a time
        self.forked: queue.SimpleQueue[tuple[int, int, Future[int | None]] | None] = queue.SimpleQueue()
        self.statuses: dict[int, Future[int | None]] = {}
        self.dead = False
        self.reader: threading.Thread | None = None
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = {"control": theirs.fileno(), "canonical": spec.canonical, "ballast_mb": spec.ballast_mb}
        try:
            with theirs, (self.folder / "output").open("wb") as output:
                self.process = runtime.popen(
                    "zygote", options, self.folder, output=output, descriptors=[theirs.fileno()]
                )
            note_process(self.folder, self.process.pid)
        except OSError as error:
            self.control.close()
            remove_tree(self.folder)
            raise SaveFailed("raised", f"{runtime.python} could not be started: {error}") from error
        try:
            ready = self._await_ready(timeout)
        except BaseException:
            self.close()
            raise
        self.bytes: int = ready["bytes"]
        self.base_bytes: int = ready["base_bytes"]
        self.seconds: float = ready["seconds"]
        self.reader = threading.Thread(target=self._read, name=f"zygote {spec.checkpoint_id}", daemon=True)
        self.reader.start()

    def _await_ready(self, timeout: float) -> Header:
        self.control.settimeout(timeout)
        try:
            message = self.control.recv(1024 * 1024)
        except TimeoutError:
            raise SaveFailed("timeout", f"importing took longer than {timeout:g} s") from None
        self.control.settimeout(None)
        if not message:
            ending = describe_status(reap_group(self.process.pid))
            self.process.wait()
            kind = "signal" if ending.startswith("SIG") else "exit"
            raise SaveFailed(kind, f"importing ended the process with {ending}")
        answer: Header = json.loads(message)
        if answer["type"] == "failed":
            raise SaveFailed(answer["kind"], answer["detail"])
        return answer

    def fork(self, folder: Folder) -> ForkSandbox:
        """A clone that will connect to `folder`. Raises `StartFailed` if the zygote has ended."""
        with self.lock:
            try:
                self.control.send(json.dumps(where(folder)).encode())
                forked = self.forked.get(timeout=10)
            except (OSError, queue.Empty):
                forked = None
            if forked is None:
                self.dead = True
                raise StartFailed("its zygote has ended")
            sandbox = ForkSandbox(folder, *forked)
            note_process(folder.path, sandbox.pid)
            return sandbox

    def _read(self) -> None:
        """Hears of clones that started and ended, until the zygote ends."""
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self.control, 65536, 1)
            except OSError:
                message, descriptors = b"", []
            if not message:
                break
            event = json.loads(message)
            if event["type"] == "forked":
                pid = event["pid"]
                self.statuses[pid] = Future()
                self.forked.put((pid, descriptors[0], self.statuses[pid]))
            else:
                self.statuses.pop(event["pid"]).set_result(event["status"])
        self.dead = True
        self.forked.put(None)
        for status in tuple(self.statuses.values()):
            status.set_result(None)

    def retire(self) -> None:
        """Ends the zygote once the calls that run in its clones have ended."""
        for status in tuple(self.statuses.values()):
            status.result()
        self.close()

    def close(self) -> None:
        """Ends the zygote and its clones."""
        with self.lock:
            with contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_RDWR)
            if self.process.returncode is None:
                descriptor = os.pidfd_open(self.process.pid)
                end_tree(self.process.pid, descriptor)
                os.close(descriptor)
                reap_group(self.process.pid)
                self.process.wait()
            if self.reader:
                self.reader.join(END_S)
            self.control.close()
            remove_tree(self.folder)
