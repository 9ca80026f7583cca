"""The guard: the process above a measured one, which lets nothing of it get away. Standard library only.

`python -I -S -B guard.py PARENT FOLDER KEPT COMMAND...` runs COMMAND in `FOLDER/work`, waits for it, ends everything
that it started, and then ends as COMMAND did: with its exit code, or by its signal. The worker (process id PARENT) ends
the guard and all below it by SIGTERM, or by ending itself.

There are two processes: the outer one, which the worker knows, and the inner one, the command's parent. A command may
kill its parent; what it leaves behind then comes to the outer one.

KEPT says what the command may not change: folders, one a line; the last is the shared cache, the only one that it may
write to. "-" stands for no isolation at all. With isolation the command is in namespaces of its own. It sees no process
but its own: the inner guard is their init, which the kernel lets nobody inside kill, and all of them end with it. It has
a loopback device and no other network, no System V object of others, and what it writes to the user's home, to /tmp,
/var/tmp, /dev/shm or FOLDER is memory that ends with it. Everything can be read as it is, and what KEPT names is not even
covered, so that imports from there take their usual time: it can be read, and nothing else; what is mounted below it is
as it was. Against accidents, that is: root could undo all of it. Without a COMMAND the guard
only tries whether it could isolate one: exit code 0 says so.

This file imports little, for it starts before every measurement.
"""

import contextlib
import ctypes
import fcntl
import os
import pwd
import resource
import signal
import struct
import sys

PDEATHSIG, CHILD_SUBREAPER = 1, 36  # prctl
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18  # mount
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
ROOM = "size=1g"  # what a command may write to files
FAILED = 71 << 8  # EX_OSERR as a wait status: the guard itself failed

WATCHED = {signal.SIGTERM, signal.SIGCHLD}
C = ctypes.CDLL(None, use_errno=True)


def main(parent: int, folder: str, kept: str, command: list[str]) -> None:
    """The outer process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    call("prctl", PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)  # the worker ended first
    call("prctl", CHILD_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if kept != "-":
        enter_namespaces()
    reading, writing = os.pipe()
    inner = os.fork()
    if not inner:
        os.close(reading)
        run_inner(folder, kept, command, writing)
    os.close(writing)
    while signal.sigwait(WATCHED) == signal.SIGCHLD:
        if inner in reap():
            break
    end_children()
    end_as(os.read(reading, 16))


def run_inner(folder: str, kept: str, command: list[str], report: int) -> None:
    """The inner process: reports the command's wait status, as text."""
    status = FAILED
    try:
        call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        call("prctl", CHILD_SUBREAPER, 1, 0, 0, 0)
        os.setsid()
        if kept != "-":
            isolate(folder, list(filter(None, kept.split("\n"))))
        if not command:
            status = 0
            return
        measured = os.fork()
        if not measured:
            start(folder, command)
        pid, status = os.wait()
        while pid != measured:
            pid, status = os.wait()
    finally:
        os.write(report, str(status).encode())
        os._exit(0)


def start(folder: str, command: list[str]) -> None:
    """Becomes the command."""
    try:
        os.setsid()
        call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
            file.write("1000")  # if the machine runs out of memory, it goes before everything else
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        os.chdir(f"{folder}/work")
        os.execv(command[0], command)  # noqa: S606
    finally:
        os._exit(127)


def reap() -> set[int]:
    """Reaps what has ended; its process ids."""
    ended = set()
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.add(pid)
    return ended


def end_children() -> None:
    """Ends everything below this process: the children of what it ends become its own."""
    while True:
        reap()
        with open("/proc/thread-self/children") as file:  # noqa: PTH123
            children = file.read().split()
        if not children:
            return
        for pid in children:
            os.kill(int(pid), signal.SIGKILL)  # until it is reaped, no other process can have its number
        signal.sigtimedwait(WATCHED, 1)


def end_as(report: bytes) -> None:
    """Ends this process as the one with that wait status has ended; by SIGKILL where the inner guard was killed."""
    status = int(report or signal.SIGKILL)
    if not os.WIFSIGNALED(status):
        os._exit(os.waitstatus_to_exitcode(status))
    number = os.WTERMSIG(status)
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)


# ---- namespaces ----


def enter_namespaces() -> None:
    """Has this process in new namespaces, and its children in new ones for processes. Raises `OSError`."""
    user, group = os.geteuid(), os.getegid()
    call("unshare", NEW_IPC | NEW_PIDS | NEW_NETWORK | (NEW_USER if user else 0))
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
                file.write(text)


def isolate(folder: str, kept: list[str]) -> None:
    """Gives the namespaces what belongs into them. Raises `OSError`.

    Mounts are the inner process's alone: the outer one needs to see itself in /proc.
    """
    call("unshare", NEW_MOUNTS)
    mount("none", "/", "", RECURSIVE | PRIVATE)
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    bring_up_loopback()
    if os.path.isdir("/dev/shm"):  # noqa: PTH112, S108
        mount("tmpfs", "/dev/shm", "tmpfs", NOSUID | NODEV, f"{ROOM},mode=1777")  # noqa: S108
    scratch = f"{folder}/scratch"
    os.mkdir(scratch, 0o700)  # noqa: PTH102
    mount("tmpfs", scratch, "tmpfs", NOSUID | NODEV, f"{ROOM},mode=700")
    # By descriptor: what is mounted later may cover the paths.
    room = f"/proc/self/fd/{os.open(scratch, os.O_PATH)}"
    held = {path: f"/proc/self/fd/{os.open(path, os.O_PATH)}" for path in [*kept, folder]}
    for number, place in enumerate(shared_places()):
        with contextlib.suppress(OSError):  # without overlays, HOME and TMPDIR lead elsewhere all the same
            cover(place, f"{room}/{number}")
    *fixed, cache = kept
    for path in sorted(set(fixed), key=len):  # those that hold others first: each lies above what was there
        fix(path, held[path])
    mount(held[cache], cache, "", BIND | RECURSIVE)
    mount(held[folder], folder, "", BIND)
    for name in ("work", "tmp"):
        os.mkdir(f"{room}/{name}", 0o700)  # noqa: PTH102
        mount(f"{room}/{name}", f"{folder}/{name}", "", BIND)


def bring_up_loopback() -> None:
    device = C.socket(2, 2, 0)  # AF_INET, SOCK_DGRAM
    fcntl.ioctl(device, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP | IFF_RUNNING))
    os.close(device)


def shared_places() -> list[str]:
    """Folders that programs write to and that are not one program's: none inside another."""
    places = ["/tmp", "/var/tmp"]  # noqa: S108
    with contextlib.suppress(KeyError):
        places.append(pwd.getpwuid(os.geteuid()).pw_dir)
    real = sorted({os.path.realpath(place) for place in places if os.path.isdir(place)} - {"/"})  # noqa: PTH112
    real = [place for place in real if not set(place) & set(",:\\")]  # what options of a mount cannot carry
    return [place for place in real if not any(is_below(place, other) for other in real if other != place)]


def is_below(path: str, place: str) -> bool:
    return f"{path}/".startswith(f"{place}/")


def cover(place: str, upper: str) -> None:
    """Shows the folder as it is, and takes what is written to it to `upper`."""
    status = os.stat(place)  # noqa: PTH116
    for path in (upper, f"{upper}-work"):
        os.mkdir(path, 0o700)  # noqa: PTH102
    with contextlib.suppress(OSError):  # a user's own namespace knows no other user
        os.chown(upper, status.st_uid, status.st_gid)
    os.chmod(upper, status.st_mode & 0o7777)  # noqa: PTH101
    mount("overlay", place, "overlay", NOSUID | NODEV, f"lowerdir={place},upperdir={upper},workdir={upper}-work")


def fix(path: str, real: str) -> None:
    """Shows the folder `real` at `path`, uncovered, and lets nobody change it."""
    if path != "/":
        mount(real, path, "", BIND | RECURSIVE)
    # What a user's own namespace has not set itself it may not take away either.
    flags = os.statvfs(path).f_flag & (NOSUID | NODEV | NOEXEC)
    mount("none", path, "", REMOUNT | BIND | READ_ONLY | flags)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())


def call(name: str, *arguments: object) -> None:
    """Calls a function of the C library. Raises `OSError` where it fails."""
    if C[name](*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
