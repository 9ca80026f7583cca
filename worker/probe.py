"""The probe: runs inside a measured process, beside the executor, and writes what imports cost. Standard library only.

The process has the executor's baseline and nothing else, so that what is measured is what a sandbox pays. One hook
around the import system's find-and-load sees every module that is really loaded, and subtracts what happened in the
loads within it, and its own cost. Modes:

    time     exclusive seconds of each module, without those in which it was ready to run and others had the processor
    memory   exclusive growth of anonymous memory of each module
    edges    which modules each module's body asked for, and how many threads it left
    plain    no hook: what the whole costs

Collections are off in every mode, as they are when an executor imports. A processor that others use as well is slower
in ways that no clock takes out (its caches): in `time` and `plain`, a fixed piece of work tells the pace.

Results go to a file of their own, which is mapped into memory: no descriptor is needed that a module could close, and
no limit that it sets on files counts. Lines of the file, up to the first zero byte (`worker/measure.py` reads them):

    start                                       imports begin
    <ns, kB or threads> TAB <module> [TAB <what else>]   as soon as it is loaded, so that a crash keeps what was measured before
    = TAB <the whole>                           the end; JSON as `<what else>` is
"""

import builtins
import contextlib
import fcntl
import gc
import importlib
import json
import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, NoReturn

ROOM = 64 * 1024 * 1024  # of the result file; only what is written takes any

# Bound before anything measured is imported: modules replace what others look up.
clock = time.perf_counter_ns
cpu_clock = time.process_time_ns
open_file, close_file, pread = os.open, os.close, os.pread
duplicate = fcntl.fcntl
list_folder = os.listdir
getpid = os.getpid
end_process = os._exit
block_signals, set_timer = signal.pthread_sigmask, signal.setitimer
get_limit, set_limit = resource.getrlimit, resource.setrlimit
get_usage, OF_ITSELF = resource.getrusage, resource.RUSAGE_SELF
set_trace, set_profile, set_depth = sys.settrace, sys.setprofile, sys.setrecursionlimit
import_module = importlib.import_module
thread_id = __import__("_thread").get_ident
SIGNALS = signal.valid_signals()
STDLIB = sys.stdlib_module_names
DEPTH = sys.getrecursionlimit()
LIMITS = {number: get_limit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_DATA)}
PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024
BLOCK = 512  # bytes that getrusage counts as one block; under gVisor it counts none
MAX_TEXT = 64 * 1024  # characters of what an import raised

#: Modules of the baseline whose code is read and executed once more, into nothing, to tell the pace: plain definitions.
PACE_MODULES = ("argparse", "ast", "difflib", "inspect", "pydoc", "tarfile", "textwrap", "zipfile")
PACED = {"time", "plain"}


# What the functions below look up stays as it is now.
globals()["__builtins__"] = dict(vars(builtins))


class Encoder(json.JSONEncoder):
    """JSON by functions that nobody else's names lead to."""

    default, encode, iterencode = json.JSONEncoder.default, json.JSONEncoder.encode, json.JSONEncoder.iterencode


encode = Encoder(ensure_ascii=False).encode


def run(options: Mapping[str, Any], executor: Any) -> NoReturn:
    """Measures `options["modules"]` in `options["mode"]`, writes the result to `<folder>/result`, ends the process."""
    pid = getpid()
    write = map_result(f"{options['folder']}/result")
    memory = AnonymousMemory()
    waited = make_waited()
    mode = options["mode"]
    gc.disable()
    paces = [measure_pace(waited)] if mode in PACED else []
    with contextlib.suppress(Exception):  # what is wrong with it, loading will say
        if any(map(executor.is_resource, options["modules"])):
            executor.open_store()  # reading the declarations is no part of loading what they declare
    memory_kb = memory.kb()
    hook = Hook(write, memory, waited, mode, executor.loaded_from)
    if mode != "plain":
        hook.install()
    loading = Loading(options["modules"], executor, None if mode == "plain" else hook)
    write(b"start\n")
    blocks = get_usage(OF_ITSELF).ru_inblock
    wall, cpu, ready = clock(), cpu_clock(), waited()
    for _ in range(100):
        try:
            loading.go_on()
            calm()
            break
        except BaseException as error:  # noqa: BLE001 - the handler of a signal may raise at any moment
            loading.error = loading.error or error
    wall, cpu, ready = clock() - wall, cpu_clock() - cpu, waited() - ready
    blocks = get_usage(OF_ITSELF).ru_inblock - blocks
    grown_kb = memory.kb() - memory_kb
    hook.active = False
    if getpid() != pid:
        end_process(0)  # a module forked, and the copy came back too: only the original answers
    whole = {
        "wall_s": wall / 1e9,
        "cpu_s": cpu / 1e9,
        "waited_s": ready / 1e9,
        "disk_mb": blocks * BLOCK / 1e6,
        "rss_mb": max(grown_kb, 0) * 1024 / 1e6,
        "network": options.get("network", "none"),
        "failure": loading.describe_failure(),
    }
    if grown_kb < 0:
        whole["raw_rss_mb"] = grown_kb * 1024 / 1e6
    try:
        if mode in ("time", "plain"):
            paces.append(measure_pace(waited))
        whole["pace_s"] = [pace / 1e9 for pace in paces if pace is not None]
        whole["modules"] = hook.describe()
        with contextlib.suppress(Exception):  # no descriptors are left to look with, say
            whole["threads"] = len(executor.threads())
    except BaseException as problem:  # noqa: BLE001 - a module may have changed whatever this needs
        detail = f"its process cannot be described: {name_type(problem)}"
        whole["failure"] = whole["failure"] or {"kind": "no-result", "detail": detail}
    try:
        write(b"=\t%s\n" % as_bytes(whole))
    finally:
        end_process(0)


class Loading:
    """The roots, loaded one after the other up to the first that fails."""

    def __init__(self, roots: Sequence[str], executor: Any, hook: "Hook | None") -> None:
        self.waiting = list(reversed(roots))
        self.executor = executor
        self.hook = hook
        self.root = ""
        self.error: BaseException | None = None

    def go_on(self) -> None:
        """Loads what is left. Whatever a root raises is a result."""
        try:
            while self.waiting and self.error is None:
                self.root = self.waiting.pop()
                self.load(self.root)
        except BaseException as error:  # noqa: BLE001
            self.error = error

    def load(self, root: str) -> None:
        """Loads a root as the executor does, whatever was put in the place of importlib's functions meanwhile."""
        if not self.executor.is_resource(root):
            module = import_module(root)
            if type(module).__name__ == "_LazyModule":
                _ = module.__doc__
        elif self.hook is not None:
            self.hook.measure(root, self.executor.load, root)
        else:
            self.executor.load(root)

    def describe_failure(self) -> dict[str, str] | None:
        """What a root raised, whatever the exception's own methods do; None if all were loaded."""
        error = self.error
        if error is None:
            return None
        try:
            if isinstance(error, SystemExit):
                detail = f"SystemExit({error.code!r})"
            else:
                detail = self.executor.describe_failure(error)
        except BaseException:  # noqa: BLE001
            detail = name_type(error)
        verb = "load" if self.executor.is_resource(self.root) else "import"
        kind = "exit" if isinstance(error, SystemExit) else "raised"
        return {"kind": kind, "detail": f"{verb} {self.root}: {detail}"[:MAX_TEXT]}


def calm() -> None:
    """Takes away what could disturb the rest: signals, timers, tracing, low limits."""
    steps: list[Callable[[], object]] = [
        lambda: block_signals(signal.SIG_BLOCK, SIGNALS),
        lambda: set_timer(signal.ITIMER_REAL, 0),
        lambda: set_trace(None),
        lambda: set_profile(None),
        lambda: set_depth(DEPTH),
        *(lambda number=number: set_limit(number, LIMITS[number]) for number in LIMITS),  # where that is allowed
    ]
    for step in steps:
        for _ in range(3):  # the handler of a signal that came before they were blocked may still raise
            try:
                step()
            except BaseException:  # noqa: BLE001, S112
                continue
            break


def name_type(value: object) -> str:
    """The name of its type, past whatever the type does."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return name


def find_home(module: ModuleType, name: str) -> str:
    """The module that defines the class or function of that name in `module`; "" for anything else."""
    try:
        value = object.__getattribute__(module, "__dict__").get(name)
        if issubclass(type(value), type):
            home = type.__getattribute__(value, "__module__")  # past what its metaclass does
        else:
            home = value.__module__ if type(value) is FunctionType else ""
    except AttributeError:
        return ""
    return home if type(home) is str else ""


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

    def __init__(
        self,
        write: Callable[[bytes], object],
        memory: "AnonymousMemory",
        waited: Callable[[], int],
        mode: str,
        loaded_from: Callable[[ModuleType], str | None],
    ) -> None:
        self.write = write
        self.pid = getpid()
        self.mode = mode
        self.loaded_from = loaded_from
        self.modules = sys.modules
        self.active = True
        self.stacks: dict[int, list[Frame]] = {}
        self.asks: dict[str, dict[str, None]] = {}  # dicts as ordered sets
        self.baseline = set(sys.modules)
        self.figures: dict[str, None] = {}  # in the order in which loading ended
        # In nanoseconds, kB or threads.
        self.gauge: Callable[[], int] = lambda: clock() - waited()
        if mode == "memory":
            self.gauge = memory.kb
        elif mode == "edges":
            self.gauge = count_threads

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
        depth = len(stack)
        frame = Frame(name)
        own: int | None = None
        try:
            stack.append(frame)
            started = self.gauge()
            value = function(*args)
            own = self.gauge() - started - frame.within
            return value
        finally:
            # Where greenlets take turns, or a signal's handler raised, others may be on top.
            del stack[depth:]
            if own is None:
                stack[-1].within += frame.within
                for asked in self.asks.pop(name, ()):
                    self.ask(asked)
            else:
                self.record(name, own)
                stack[-1].within += self.gauge() - entered

    def record(self, name: str, own: int) -> None:
        if getpid() != self.pid:
            return  # a copy that a module forked measures nothing
        if self.mode == "edges":
            self.write(b"%d\t%s\t%s\n" % (own, as_name(name).encode(), as_bytes(self.describe_module(name))))
        else:
            self.write(b"%d\t%s\n" % (own, as_name(name).encode()))
        self.figures[name] = None

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
            if not isinstance(part, str):
                continue
            if f"{name}.{part}" in modules:
                self.ask(f"{name}.{part}")
            elif (home := find_home(modules[name], part)).startswith(f"{name}.") and home in modules:
                self.ask(home)  # a package that loads its parts when they are asked for may have loaded it before

    # -- the end --

    def describe(self) -> dict[str, dict[str, Any]]:
        """What is known of each module that was loaded, by name. Lazy modules stay asleep."""
        return {as_name(name): self.describe_module(name) for name in tuple(self.figures)}

    def describe_module(self, name: str) -> dict[str, Any]:
        try:
            file = self.loaded_from(self.modules[name])
        except BaseException:  # noqa: BLE001 - it may be gone, and anything may have taken its place
            file = None
        asks = [as_name(asked) for asked in self.asks.get(name, ())]
        return {"file": file, "stdlib": name.partition(".")[0] in STDLIB, "asks": asks}


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


class AnonymousMemory:
    """Anonymous resident memory of this process, in 2 µs: resident minus shared pages equals RssAnon."""

    def __init__(self) -> None:
        self.statm = open_high("/proc/self/statm")
        self.last = 0

    def kb(self) -> int:
        """Opens the file again where a module has closed it; the last figure where that cannot be done."""
        try:
            self.last = self.read()
        except (OSError, ValueError, IndexError):
            with contextlib.suppress(OSError, ValueError, IndexError):
                self.statm = open_high("/proc/self/statm")
                self.last = self.read()
        return self.last

    def read(self) -> int:
        fields = pread(self.statm, 128, 0).split()
        return (int(fields[1]) - int(fields[2])) * PAGE_KB


def count_threads() -> int:
    """How many threads this process has, those of C libraries too; one where that cannot be seen."""
    try:
        return len(list_folder("/proc/self/task"))
    except OSError:
        return 1


def make_waited() -> Callable[[], int]:
    """A function for the nanoseconds in which this thread was ready to run and others had the processor.

    Always 0 where the kernel does not say; no more than before once a module has closed the descriptor.
    """
    last = 0

    def waited() -> int:
        nonlocal last
        try:  # noqa: SIM105 - contextlib takes longer, twice for each figure
            last = int(pread(schedstat, 128, 0).split()[1])
        except (OSError, ValueError, IndexError):
            pass
        return last

    try:
        schedstat = open_high("/proc/thread-self/schedstat")
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


def open_high(path: str) -> int:
    """Opens a file for reading, on a descriptor that nothing comes upon by counting from 0."""
    low = open_file(path, os.O_RDONLY | os.O_CLOEXEC)
    limit, _ = get_limit(resource.RLIMIT_NOFILE)
    try:
        return duplicate(low, fcntl.F_DUPFD_CLOEXEC, max(3, min(limit, 65536) - 64))
    finally:
        close_file(low)


def map_result(path: str) -> Callable[[bytes], None]:
    """A function that adds to the result file. Each piece is there at once, however the process ends afterwards."""
    descriptor = open_file(path, os.O_RDWR | os.O_CLOEXEC)
    os.ftruncate(descriptor, ROOM)
    # Its own position makes each addition one step of the interpreter's: threads and signal handlers cannot mix theirs.
    area = mmap.mmap(descriptor, ROOM)
    area[0] = (
        0  # gVisor counts the whole of it as resident once it is written to: that is to be before measuring begins
    )
    add = area.write
    close_file(descriptor)

    def write(data: bytes) -> None:
        with contextlib.suppress(ValueError):  # full: the host sees that the end is missing
            add(data)

    return write


def as_bytes(value: object) -> bytes:
    """JSON on one line; a lone surrogate, which may be in any text, is a question mark."""
    return encode(value).encode("utf-8", "replace")


def as_name(name: str) -> str:
    """A module's name, on one line: what cannot be printed is escaped."""
    return name if name.isprintable() else ascii(name)[1:-1]
