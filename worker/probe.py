"""The probe: runs inside a measured process, beside the executor, and writes what imports cost. Standard library only.

The process has the executor's baseline and nothing else, so that what is measured is what a sandbox pays. One hook
around the import system's find-and-load sees every module that is really loaded, and subtracts what happened in the
loads within it, and its own cost. Modes:

    time     exclusive seconds of each module, without those in which it was ready to run and others had the processor
    memory   exclusive growth of anonymous memory of each module
    edges    which modules each module's body asked for
    plain    no hook: what the whole costs

Collections are off in every mode, as they are when an executor imports. A processor that others use as well is slower
in ways that no clock takes out (its caches): in `time` and `plain`, a fixed piece of work tells the pace.

Results go to a file of their own, through a descriptor out of the way of whatever a module does to its streams: a line
for each module as soon as it is loaded (so that a crash keeps what was measured before it), and one line at the end.
"""

import builtins
import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NoReturn

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40

# Bound before anything measured is imported: modules replace what others look up.
clock = time.perf_counter_ns
cpu_clock = time.process_time_ns
write = os.write
pread = os.pread
getpid = os.getpid
thread_id = __import__("_thread").get_ident
PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024

#: Modules of the baseline whose code is read and executed once more, into nothing, to tell the pace: plain definitions.
PACE_MODULES = ("argparse", "ast", "difflib", "inspect", "pydoc", "tarfile", "textwrap", "zipfile")


def run(options: Mapping[str, Any], executor: Any) -> NoReturn:
    """Measures `options["modules"]` in `options["mode"]`, writes the result to `<folder>/result`, ends the process."""
    pid = getpid()
    executor.end_with(options["parent"])
    network = leave_network()
    result = open_high(f"{options['folder']}/result", os.O_WRONLY | os.O_APPEND)
    statm = open_high("/proc/self/statm", os.O_RDONLY)
    waited = make_waited()
    mode = options["mode"]
    is_resource = executor.is_resource
    gc.disable()
    # Before a plain import as well, it would leave room in the heap that the import then need not ask for.
    paces = [measure_pace(waited)] if mode == "time" else []
    with contextlib.suppress(Exception):  # what is wrong with it, loading will say
        if any(map(is_resource, options["modules"])):
            executor.open_store()  # reading the declarations is no part of loading what they declare
    statm_kb = anonymous_kb(statm)
    hook = Hook(result, statm, waited, mode)
    if mode != "plain":
        hook.install()
    failure: dict[str, str] | None = None
    wall, cpu, ready = clock(), cpu_clock(), waited()
    for name in options["modules"]:
        try:
            if mode != "plain" and is_resource(name):
                hook.measure(name, executor.load, name)
            else:
                executor.load(name)
        except SystemExit as error:
            failure = {"kind": "exit", "detail": f"SystemExit({error.code!r})"}
        except BaseException as error:  # noqa: BLE001 - whatever a module does is its result
            failure = {"kind": "raised", "detail": executor.describe_failure(error)}
        if failure:
            failure["detail"] = f"{'load' if is_resource(name) else 'import'} {name}: {failure['detail']}"
            break
    wall, cpu, ready = clock() - wall, cpu_clock() - cpu, waited() - ready
    grown_kb = anonymous_kb(statm) - statm_kb
    hook.active = False
    if getpid() != pid:
        os._exit(0)  # a module forked, and the copy came back too: only the original answers
    if mode in ("time", "plain"):
        paces.append(measure_pace(waited))
    final = {
        "wall_s": wall / 1e9,
        "cpu_s": cpu / 1e9,
        "waited_s": ready / 1e9,
        "pace_s": [pace / 1e9 for pace in paces if pace is not None],
        "rss_mb": max(grown_kb, 0) * 1024 / 1e6,
        "threads": len(executor.threads()),
        "network": network,
        "modules": hook.describe(executor.loaded_from),
        "failure": failure,
    }
    if grown_kb < 0:
        final["raw_rss_mb"] = grown_kb * 1024 / 1e6
    data = b"\n=\t" + json.dumps(final).encode() + b"\n"
    while data:
        data = data[write(result, data) :]
    os._exit(0)


class Frame:
    """A module that is being loaded, and what the loads within it took."""

    __slots__ = ("name", "within")

    def __init__(self, name: str) -> None:
        self.name = name
        self.within = 0


class Hook:
    """Attributes to each module what happened while it, and nothing within it, was being loaded.

    Frames are per thread; the outermost one of a thread is nobody's.
    """

    def __init__(self, result: int, statm: int, waited: Callable[[], int], mode: str) -> None:
        self.result = result
        self.mode = mode
        self.active = True
        self.stacks: dict[int, list[Frame]] = {}
        self.asks: dict[str, dict[str, None]] = {}  # dicts as ordered sets
        self.baseline = set(sys.modules)
        self.figures: dict[str, int] = {}
        # In nanoseconds or kB; edges need neither.
        self.gauge: Callable[[], int] = lambda: clock() - waited()
        if mode == "memory":
            self.gauge = lambda: anonymous_kb(statm)

    def stack(self) -> list["Frame"]:
        stack = self.stacks.get(thread_id())
        if stack is None:
            stack = self.stacks[thread_id()] = [Frame("")]
        return stack

    def install(self) -> None:
        bootstrap: Any = sys.modules["_frozen_importlib"]
        original = bootstrap._find_and_load  # noqa: SLF001
        modules = sys.modules

        def find_and_load(name: str, import_: Any) -> Any:
            if name in modules or not self.active:
                return original(name, import_)
            module = self.measure(name, original, name, import_)
            if self.mode == "edges":
                self.ask(name)  # compiled code asks for modules past the import statement's function
            return module

        bootstrap._find_and_load = find_and_load  # noqa: SLF001
        self.hook_lazy()
        if self.mode == "edges":
            self.hook_asking()

    def measure(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function` as the loading of `name`. One that fails is no module: what is its own stays with its importer."""
        entered = self.gauge()
        stack = self.stack()
        frame = Frame(name)
        stack.append(frame)
        started = self.gauge()
        try:
            value = function(*args)
        except BaseException:
            stack.pop()
            stack[-1].within += frame.within
            for asked in self.asks.pop(name, ()):
                self.ask(asked)
            raise
        own = self.gauge() - started - frame.within
        stack.pop()
        self.record(name, own)
        stack[-1].within += self.gauge() - entered
        return value

    def record(self, name: str, own: int) -> None:
        self.figures[name] = self.figures.get(name, 0) + own
        write(self.result, b"\n%s\t%d" % (name.encode("utf-8", "replace"), own))

    def hook_lazy(self) -> None:
        """Modules behind importlib.util.LazyLoader are loaded at first use, past the import system."""
        util: Any = sys.modules["importlib.util"]
        lazy = util._LazyModule  # noqa: SLF001
        original = lazy.__getattribute__
        loading: set[str] = set()

        def getattribute(module: ModuleType, attribute: str) -> Any:
            name = object.__getattribute__(module, "__dict__").get("__name__")
            if not self.active or name in loading or not isinstance(name, str):
                return original(module, attribute)
            loading.add(name)
            try:
                self.ask(name)
                return self.measure(name, original, module, attribute)
            finally:
                loading.discard(name)

        lazy.__getattribute__ = getattribute

    # -- edges --

    def ask(self, name: str) -> None:
        """Notes that the body being executed asked for `name`, if that is not there in every start."""
        importer = self.stack()[-1].name
        if importer and importer != name and name not in self.baseline:
            self.asks.setdefault(importer, {})[name] = None

    def hook_asking(self) -> None:
        """Sees every import statement, also of what is loaded already, and importlib.import_module."""
        import_statement, import_module = builtins.__import__, importlib.import_module

        def ask_import(  # the names are the builtin's: some pass them by keyword
            name: str,
            globals: Any = None,  # noqa: A002
            locals: Any = None,  # noqa: A002
            fromlist: Any = (),
            level: int = 0,
        ) -> Any:
            if not self.active:
                return import_statement(name, globals, locals, fromlist, level)
            try:
                return import_statement(name, globals, locals, fromlist, level)
            finally:  # of an import that failed, its parents may be there
                self.ask_loaded(resolve(name, globals or {}, level), fromlist)

        def ask_import_module(name: str, package: str | None = None) -> ModuleType:
            try:
                return import_module(name, package)
            finally:
                if self.active and isinstance(name, str):
                    dots = len(name) - len(name.lstrip("."))
                    self.ask_loaded(resolve(name[dots:], {"__package__": package}, dots), ())

        builtins.__import__ = ask_import
        importlib.import_module = ask_import_module

    def ask_loaded(self, name: str, fromlist: Any) -> None:
        """Asks for `name`, or its longest prefix that is loaded, and for what `from name import …` took of its modules."""
        modules = sys.modules
        while name and name not in modules:
            name, fromlist = name.rpartition(".")[0], ()
        if not name:
            return
        self.ask(name)
        taken = fromlist or ()
        if "*" in taken:
            try:
                taken = object.__getattribute__(modules[name], "__dict__").get("__all__", ())
            except AttributeError:
                taken = ()
        for part in taken:
            if isinstance(part, str) and f"{name}.{part}" in modules:
                self.ask(f"{name}.{part}")

    # -- the end --

    def describe(self, loaded_from: Callable[[ModuleType], str | None]) -> list[dict[str, Any]]:
        """What is known of each module that was loaded. Lazy modules stay asleep."""
        described = []
        for name in self.figures:
            module = sys.modules.get(name)
            try:
                file = loaded_from(module) if module is not None else None
            except AttributeError:  # something that is no module took its place
                file = None
            entry: dict[str, Any] = {"name": name, "file": file}
            entry["stdlib"] = name.partition(".")[0] in sys.stdlib_module_names
            if self.mode == "edges":
                entry["asks"] = list(self.asks.get(name, ()))
            described.append(entry)
        return described


def resolve(name: str, scope: Mapping[str, Any], level: int) -> str:
    """The absolute name of an import from a module whose globals are `scope`; "" if it has none."""
    if level <= 0:
        return name
    package = scope.get("__package__")
    if not isinstance(package, str):
        own = str(scope.get("__name__", ""))
        package = own if "__path__" in scope else own.rpartition(".")[0]
    for _ in range(level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{name}" if name and package else package


def anonymous_kb(statm: int) -> int:
    """Anonymous resident memory, in 2 µs: resident minus shared pages equals RssAnon."""
    fields = pread(statm, 128, 0).split()
    return (int(fields[1]) - int(fields[2])) * PAGE_KB


def make_waited() -> Callable[[], int]:
    """A function for the nanoseconds in which this thread was ready to run and others had the processor.

    Always 0 where the kernel does not say; no more than before once a module has closed the descriptor.
    """
    last = 0

    def waited() -> int:
        nonlocal last
        with contextlib.suppress(OSError, ValueError, IndexError):
            last = int(pread(schedstat, 128, 0).split()[1])
        return last

    try:
        schedstat = open_high("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return lambda: 0
    return waited


def measure_pace(waited: Callable[[], int]) -> int | None:
    """Nanoseconds of a fixed piece of work, much like an import; None if a module has changed what it uses."""
    started = clock() - waited()
    try:
        for name in PACE_MODULES:
            spec: Any = sys.modules[name].__spec__
            exec(spec.loader.get_code(name), {"__name__": name})  # noqa: S102 - the standard library's own
    except BaseException:  # noqa: BLE001 - whatever was put in its place
        return None
    return clock() - waited() - started


def open_high(path: str, flags: int) -> int:
    """Opens a file on a descriptor that nothing comes upon by counting from 0."""
    low = os.open(path, flags | os.O_CLOEXEC)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, max(3, min(limit, 65536) - 64))
    os.close(low)
    return high


def leave_network() -> str:
    """`none`: this process now has a loopback device and nothing else. `host`: it may not give its network up."""
    try:
        import ctypes

        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            return "host"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
            fcntl.ioctl(device, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP | IFF_RUNNING))
    except (ImportError, OSError, AttributeError):
        return "host"
    return "none"
