"""The executor: what runs inside a sandbox. Standard library only, plus a pinned cloudpickle that lies beside it.

It runs in the root filesystem's own Python, isolated (`-I`), from a folder that holds this file, cloudpickle, and of
`readie` what functions use of it (`resource`, `after_restore`), and nothing else. Its baseline, part of every start, is
`PRELOAD` and cloudpickle. Modes:

    describe   prints what this root filesystem is, as JSON
    cold       a fresh interpreter that serves calls
    zygote     imports a checkpoint's modules once, then forks a process for each sandbox
    save       imports a checkpoint's modules once, says so, and waits to be saved; it serves calls once it is restored
    probe      measures imports (worker/probe.py)

A process that serves calls connects to `<folder>/host.sock`, in the folder that it shares with the host; its output goes
to the named pipes `<folder>/stdout` and `<folder>/stderr`, below the level of Python, so that what C code, child
processes and crashes print arrives too. Frames on the socket: length of header and of body (4 bytes each, big-endian),
the header as JSON, the body.

    executor → hello {protocol, python}
    host     → install {requirements}                  wheels in `<folder>/wheels`, put first on sys.path. May be left out
    executor → installed {ok, output}
    host     → prepare {modules}                       hints: imported by their longest importable prefix
    executor → prepared {imports_s}
    host     → call {python, max_payload} + payload    a cloudpickle of (function, args, kwargs)
    executor → ready {}                                just before the first line of the function
    executor → result {outcome, run_s, ...} + payload  then the next call's frames may come; it ends when the host hangs up

The host sends `call` once it may: nothing of the user's is unpickled or run before. A process in mode `save` connects
once before it is saved, for `ready` or `failed`, and hangs up: nothing of the host's may be open then. It knows by the
file `<folder>/go` that it has been restored; in it is the host name that it takes.
"""

import contextlib
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

PROTOCOL = 2

#: Standard-library modules of the baseline: those that two or more of the 600 distributions of the cpu root filesystem
#: (catalogues/requirements-cpu.lock) ask for under Python 3.11, themselves or through others of the standard library,
#: and that a bare interpreter has not. Private parts are left out where a listed name brings them. Names that a Python
#: lacks are skipped. What single distributions ask for besides is counted in them.
STANDARD_MODULES = """
    _strptime argparse array ast asyncio base64 cProfile calendar cmath colorsys concurrent concurrent.futures
    concurrent.futures.process concurrent.futures.thread configparser contextvars copy csv ctypes ctypes.util
    ctypes.wintypes dataclasses datetime decimal difflib dis email email.base64mime email.charset
    email.contentmanager email.encoders email.errors email.feedparser email.generator email.header
    email.headerregistry email.iterators email.message email.mime email.mime.base email.mime.multipart
    email.mime.nonmultipart email.parser email.policy email.quoprimime email.utils encodings.ascii
    encodings.cp1252 encodings.idna encodings.mac_roman encodings.unicode_escape encodings.utf_16_be
    faulthandler fcntl filecmp fileinput fractions ftplib gc getopt getpass gettext glob grp gzip hashlib heapq
    hmac html html.entities html.parser http http.client http.cookiejar http.cookies http.server importlib.abc
    importlib.machinery importlib.metadata importlib.readers importlib.resources importlib.resources.readers
    importlib.util inspect json linecache locale logging logging.config logging.handlers mimetypes mmap
    multiprocessing multiprocessing.connection multiprocessing.context multiprocessing.heap
    multiprocessing.managers multiprocessing.pool multiprocessing.process multiprocessing.queues
    multiprocessing.reduction multiprocessing.resource_tracker multiprocessing.shared_memory
    multiprocessing.sharedctypes multiprocessing.spawn multiprocessing.synchronize multiprocessing.util numbers
    opcode optparse pickle pickletools pkgutil platform pprint profile pty pwd pydoc pyexpat queue quopri runpy
    secrets select selectors shlex signal socket socketserver sqlite3 sqlite3.dbapi2 ssl statistics string
    stringprep subprocess sysconfig tarfile tempfile termios textwrap threading timeit token tokenize tomllib
    traceback tty typing unicodedata unittest unittest.mock urllib.error urllib.parse urllib.request
    urllib.response uuid weakref webbrowser wsgiref wsgiref.handlers wsgiref.headers wsgiref.simple_server
    wsgiref.util xml xml.dom xml.dom.NodeFilter xml.dom.domreg xml.dom.expatbuilder xml.dom.minicompat
    xml.dom.minidom xml.dom.xmlbuilder xml.etree xml.etree.ElementPath xml.etree.ElementTree xml.parsers
    xml.parsers.expat xml.sax xml.sax.handler xml.sax.saxutils xml.sax.xmlreader xmlrpc xmlrpc.client zipfile
    zoneinfo
"""
PRELOAD = tuple(STANDARD_MODULES.split())

#: Where the root filesystem declares its datasets, models and tokenizers (readie/resources.py).
RESOURCES = ""
#: The folder of this file, cloudpickle and, where packages may be installed, pip.
BUNDLE = ""
RESTORED_S = 0.002  # how often a saved process looks whether it has been restored

MAX_HEADER = 4 * 1024 * 1024
MAX_TEXT = 64 * 1024  # characters of a traceback or a message
LENGTHS = struct.Struct(">II")
PAGE = os.sysconf("SC_PAGE_SIZE")
PDEATHSIG, CHILD_SUBREAPER = 1, 36  # prctl
NEW_USER, NEW_UTS = 0x1000_0000, 0x0400_0000  # unshare
CAPABILITY_VERSION = 0x2008_0522  # of capset's structures, since Linux 2.6.26

# Bound here, before any user's module is imported: modules may replace what others look up.
clock = time.perf_counter
Socket = socket.socket
set_host_name = socket.sethostname

Header = dict[str, Any]


# ---- frames ----


def _json(header: Header) -> bytes:
    """UTF-8: a lone surrogate, which may be in any text of a function's, is a question mark."""
    return json.dumps(header, ensure_ascii=False).encode(errors="replace")


def encode_header(header: Header, body_length: int) -> bytes:
    """What comes before a frame's body."""
    text = _json(header)
    return LENGTHS.pack(len(text), body_length) + text


def send_frame(channel: socket.socket, header: Header, body: bytes = b"") -> None:
    channel.sendall(encode_header(header, len(body)))
    if body:
        channel.sendall(body)


def receive_frame(channel: socket.socket) -> tuple[Header, bytes]:
    """The next frame. Raises `EOFError` if the other side has hung up."""
    header_length, body_length = LENGTHS.unpack(_receive(channel, LENGTHS.size))
    header = json.loads(_receive(channel, header_length))
    return header, _receive(channel, body_length)


def _receive(channel: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = channel.recv_into(view)
        if not count:
            raise EOFError("the other side has hung up")
        view = view[count:]
    return bytes(data)


def connect(folder: str) -> socket.socket:
    """A connection to `<folder>/host.sock`, however long the path is (a socket's address has room for 107 bytes)."""
    channel = Socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel.settimeout(None)  # a module may have set another default
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        channel.connect(f"/proc/self/fd/{descriptor}/host.sock")
    finally:
        os.close(descriptor)
    return channel


# ---- the baseline ----


def preload() -> list[str]:
    """Imports the baseline; returns the names of PRELOAD that this Python has."""
    loaded = []
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
            loaded.append(name)
    return loaded


def anonymous_bytes(pid: int | str = "self") -> int:
    """Anonymous resident memory of a process: resident minus shared pages, which equals RssAnon."""
    with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123 - pathlib is three times slower
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * PAGE


def threads() -> list[str]:
    """Names of this process's threads, those of C libraries too."""
    names = []
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:  # noqa: PTH123
            names.append(file.read().strip())
    return names


def shared_sockets() -> list[str]:
    """This process's sockets that are connected, or listen: forks of it would all have the same ones.

    Those of the internet, and those of this host that have a name. Pairs, as event loops have them, lead nowhere else.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # no socket, or neither of the two
            one = Socket(fileno=int(name))
            try:
                if one.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
                    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.append(f"a socket that listens on {address_text(one.getsockname())}")
                    elif peer := one.getpeername():
                        found.append(f"a connection to {address_text(peer)}")
            finally:
                one.detach()
    return found


def address_text(address: Any) -> str:
    """A socket's address: host and port, or a path, where an abstract one begins with an @."""
    if isinstance(address, tuple):
        return "{}:{}".format(*address)
    text = os.fsdecode(address)
    return f"@{text[1:]}" if text.startswith("\0") else text


def children_of(pid: int | str) -> list[int]:
    """Process ids of a process's children; none if it has ended."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - the host does this twenty times a second
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:  # noqa: PTH123
                pids += [int(child) for child in file.read().split()]
    return pids


def load(name: str) -> None:
    """Imports `name`, and really: a module that loads at first use (importlib.util.LazyLoader) is used once.

    A key such as `model:gpt2` is loaded as the root filesystem declares it.
    """
    if is_resource(name):
        open_store().get(name)
        return
    module = importlib.import_module(name)
    if type(module).__name__ == "_LazyModule":
        _ = module.__doc__


def is_resource(name: str) -> bool:
    """Whether `name` is the key of a dataset, model or tokenizer, as only they have a colon."""
    return name.startswith(("dataset:", "model:", "tokenizer:"))


def open_store() -> Any:
    """What this process has loaded of the declared datasets, models and tokenizers. Raises what reading them raises."""
    return importlib.import_module("readie.resources").open_store(RESOURCES)


def load_longest(name: str) -> str:
    """Imports `name`, or else the longest prefix of it that can be imported; returns that ("": none)."""
    parts = name.split(".")
    reached = ""
    if is_resource(name):
        with contextlib.suppress(BaseException):  # the function that asks for it will hear why
            load(name)
            reached = name
    if all(part.isidentifier() for part in parts):
        for length in range(1, len(parts) + 1):
            prefix = ".".join(parts[:length])
            if prefix not in sys.modules:
                try:
                    importlib.import_module(prefix)
                except BaseException:  # a hint is only a hint, and SystemExit is a way for an import to fail
                    break
            reached = prefix
    return reached


def describe_failure(error: BaseException) -> str:
    """`X: text` on one line, whatever the exception's own methods do."""
    name = type_name(error)
    try:
        text = " ".join(str(error).split())
    except BaseException as second:
        text = f"its text cannot be had: {type(second).__name__}"
    return (f"{name}: {text}" if text else name)[:MAX_TEXT]


def type_name(value: object) -> str:
    kind = type(value)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


# ---- a process that serves calls ----


class _C:
    """The few functions of the C library that Python lacks; without ctypes they do nothing."""

    library: Any = None

    @classmethod
    def load(cls) -> None:
        with contextlib.suppress(ImportError, OSError):
            import ctypes

            cls.library = ctypes.CDLL(None)

    @classmethod
    def prctl(cls, option: int, value: int) -> None:
        if cls.library is not None:
            cls.library.prctl(option, value, 0, 0, 0)

    @classmethod
    def own_host_name(cls) -> None:
        """Gives this process a host name of its own, which it may change until `drop_capabilities`.

        Without rights outside: a user namespace has them all over what was made in it, and here that is the name.
        """
        if cls.library is None or cls.library.unshare(NEW_USER | NEW_UTS):
            return
        for kind, number in (("uid", os.getuid()), ("gid", os.getgid())):
            with contextlib.suppress(OSError), open(f"/proc/self/{kind}_map", "w") as file:  # noqa: PTH123
                file.write(f"{number} {number} 1")

    @classmethod
    def drop_capabilities(cls) -> None:
        """Of this thread and what it starts. Threads of C libraries keep theirs: over the host name, and nothing else."""
        if cls.library is not None:
            cls.library.capset(struct.pack("=Ii", CAPABILITY_VERSION, 0), bytes(24))

    @classmethod
    def flush(cls) -> None:
        if cls.library is not None:
            cls.library.fflush(None)


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _C.flush()


def serve_calls(place: "Place", parent: int | None, *, restored: bool) -> NoReturn:
    """Serves calls over `<folder>/host.sock` until the host hangs up, and ends the process.

    `parent` is the process that started this one, with which it ends; None: whatever started it looks after that.
    A process that was restored renews first what clones must not share.
    """
    code = 70  # EX_SOFTWARE: what the host sees if even this function fails
    try:
        end_with(parent)
        enter_sandbox(place)
        if restored:
            renew_state()
        with connect(place.folder) as channel:
            talk(channel, place)
        code = 0
    except EOFError:
        code = 0  # the host hung up: it wants no answer any more
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            flush_output()
        os._exit(code)


def end_with(parent: int | None) -> None:
    """Has the kernel end this process when its parent ends. Raises `EOFError` if that has happened already."""
    if parent is not None:
        _C.prctl(PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise EOFError("the parent ended first")


class Place:
    """Where a sandbox finds what is its own: the folder shared with the host, its home, its temporary files."""

    __slots__ = ("folder", "home", "tmp")

    def __init__(self, folder: str, home: str, tmp: str) -> None:
        self.folder = folder
        self.home = home
        self.tmp = tmp


def enter_sandbox(place: Place) -> None:
    """Makes this process the sandbox: its own output, folder, temporary files."""
    # Processes that detach from their parent stay below this one, where the host finds and ends them.
    _C.prctl(CHILD_SUBREAPER, 1)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")  # if the machine runs out of memory, a sandbox goes before the agent
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for target, name in ((1, "stdout"), (2, "stderr")):
        pipe = os.open(f"{place.folder}/{name}", os.O_WRONLY | os.O_NONBLOCK)  # fails at once if nobody listens
        os.set_blocking(pipe, True)
        os.dup2(pipe, target)
        os.close(pipe)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(place.home)
    os.environ["HOME"] = place.home
    os.environ["TMPDIR"] = place.tmp
    with contextlib.suppress(KeyError):
        sys.modules["tempfile"].tempdir = None  # type: ignore[attr-defined]


def talk(channel: socket.socket, place: Place) -> NoReturn:
    """The sandbox's side of the protocol. Raises `EOFError` when the host hangs up."""
    pid = os.getpid()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    send_frame(channel, {"type": "hello", "protocol": PROTOCOL, "python": version})
    while True:
        header, body = receive_frame(channel)
        if header["type"] == "install":
            send_frame(channel, {"type": "installed", **install(header["requirements"], place)})
            continue
        if header["type"] == "prepare":
            started = clock()
            gc.disable()
            for name in header["modules"]:
                load_longest(name)
            gc.enable()
            send_frame(channel, {"type": "prepared", "imports_s": clock() - started})
            continue
        if header["python"] != version:
            # Pickled code objects of another version would not fail, but misbehave.
            answer: Header = {"outcome": "failed", "slug": "python-mismatch"}
            answer["detail"] = f"the caller runs Python {header['python']}, the root filesystem has {version}"
            payload = b""
        else:
            answer, payload = run_payload(body, header["max_payload"], lambda: send_frame(channel, {"type": "ready"}))
        if os.getpid() != pid:
            os._exit(0)  # the function forked and the copy returned too: only the original answers
        del body
        flush_output()
        send_frame(channel, {"type": "result", **answer}, payload)
        del payload  # a session's next call may need the room


def install(requirements: list[str], place: Place) -> Header:
    """Installs wheels that the host has put into the folder, without network, where imports look first."""
    import subprocess

    target = f"{place.tmp}/packages"
    options = ["--no-index", "--no-deps", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--upgrade"]
    links = ["--find-links", f"{place.folder}/wheels", "--target", target]
    done = subprocess.run(
        [sys.executable, "-I", "-B", f"{BUNDLE}/pip", "install", *options, *links, *requirements],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if target not in sys.path:
        sys.path.insert(0, target)
    importlib.invalidate_caches()
    output = done.stdout.decode(errors="replace")[-MAX_TEXT:]
    return {"ok": not done.returncode, "output": output}


def run_payload(payload: bytes, limit: int, ready: Callable[[], None]) -> tuple[Header, bytes]:
    """Unpickles and runs a call; the result's header and payload. Whatever the function raises is a result."""
    started = clock()
    try:
        function, args, kwargs = pickle.loads(payload)
        del payload
        ready()
        started = clock()
        value = function(*args, **kwargs)
        if sys.modules["inspect"].iscoroutine(value):
            value = sys.modules["asyncio"].run(value)
        run_s = clock() - started
    except BaseException as error:
        run_s = clock() - started
        answer, body = pickle_exception(error, limit)
        return {**answer, "run_s": run_s}, body
    answer = {"outcome": "returned", "run_s": run_s}
    try:
        body = dump(value)
    except BaseException as error:
        detail = f"a value of type {type_name(value)} cannot be pickled: {describe_failure(error)}"
        return {"outcome": "failed", "slug": "bad-result", "detail": detail, "run_s": run_s}, b""
    if len(body) > limit:
        detail = f"a value of type {type_name(value)} takes {len(body)} bytes, MAX_PAYLOAD is {limit}"
        return {"outcome": "failed", "slug": "result-too-large", "detail": detail, "run_s": run_s}, b""
    return answer, body


def pickle_exception(error: BaseException, limit: int) -> tuple[Header, bytes]:
    """An exception as a result: its type, text and traceback always; its pickle if the other side can load it."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # the first frame is the executor's
    try:
        lines = traceback.format_exception(type(error), error.with_traceback(frames), frames)
        text = "".join(lines)
    except BaseException:
        text = describe_failure(error)
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT // 2] + "\n  ...\n" + text[-MAX_TEXT // 2 :]
    detail = describe_failure(error)
    answer = {"outcome": "raised", "kind": type_name(error), "traceback": text}
    answer["detail"] = detail.removeprefix(answer["kind"]).removeprefix(": ")
    try:
        body = dump(error)
        pickle.loads(body)  # some exceptions pickle, and then cannot be made again from their arguments
    except BaseException:
        body = b""
    return answer, body if len(body) <= limit else b""


def dump(value: object) -> bytes:
    dumped: bytes = sys.modules["cloudpickle"].dumps(value)
    return dumped


#: Random number generators that imports made without a seed.
UNSEEDED: "weakref.WeakSet[Any]" = weakref.WeakSet()
#: NumPy's, likewise.
BIT_GENERATORS: list[Any] = []
ENTROPY_BITS = 96  # NumPy draws 128 bits of entropy where it is given no seed; nobody types a seed of that length


@contextlib.contextmanager
def noting_generators() -> Iterator[None]:
    """Notes which `random.Random` objects are made without a seed: one that has a seed shall draw the same everywhere."""
    kind: Any = sys.modules["random"].Random
    original = kind.seed

    def seed(self: Any, a: Any = None, version: int = 2) -> None:
        if a is None:
            UNSEEDED.add(self)
        else:
            UNSEEDED.discard(self)
        original(self, a, version)

    kind.seed = seed
    try:
        yield
    finally:
        kind.seed = original


def note_bit_generators() -> None:
    """Notes NumPy's generators that were made without a seed, also those within `Generator` and `RandomState`."""
    kind: Any = getattr(sys.modules.get("numpy.random"), "BitGenerator", None)
    for generator in gc.get_objects() if kind else ():
        with contextlib.suppress(Exception):  # whatever its class answers
            if isinstance(generator, kind):
                seed = generator.seed_seq if hasattr(generator, "seed_seq") else generator._seed_seq  # noqa: SLF001 - before 1.25
                if seed.entropy.bit_length() > ENTROPY_BITS:
                    BIT_GENERATORS.append(generator)


def renew_bit_generators() -> None:
    for generator in BIT_GENERATORS:
        generator.state = type(generator)().state


def renew_state() -> None:
    """Gives a clone what clones must not share: random numbers, keys, names of temporary files, clocks.

    Then what `readie.after_restore` was given: of these, one that raises ends the sandbox before it serves anything.
    """
    modules = sys.modules
    renewals: list[Callable[[], object]] = []
    if "random" in modules:
        renewals.append(modules["random"].seed)
    if "numpy.random" in modules:
        renewals += [modules["numpy.random"].seed, renew_bit_generators]
    if "multiprocessing.process" in modules:
        process = modules["multiprocessing.process"].current_process()
        renewals.append(lambda: setattr(process, "authkey", os.urandom(32)))
    if "tempfile" in modules:
        renewals.append(lambda: setattr(modules["tempfile"], "_name_sequence", None))
    if "uuid" in modules:
        renewals.append(lambda: setattr(modules["uuid"], "_last_timestamp", None))
    if "platform" in modules:  # what `platform.node` says; pandas and numpy have it filled when they are imported
        renewals.append(lambda: setattr(modules["platform"], "_uname_cache", None))
    if "ssl" in modules:  # OpenSSL notices that it was forked, and not that it was restored
        renewals.append(lambda: modules["ssl"].RAND_add(os.urandom(48), 48.0))
    if "logging" in modules:  # "relative" times of log records count from here
        now = time.time_ns() if isinstance(getattr(modules["logging"], "_startTime", None), int) else time.time()
        renewals.append(lambda: setattr(modules["logging"], "_startTime", now))
    renewals.append(time.tzset)
    renewals += [generator.seed for generator in tuple(UNSEEDED)]
    for renew in renewals:
        with contextlib.suppress(Exception):  # a module may have replaced any of this
            renew()
    if "readie.restore" in modules:
        for hook in tuple(modules["readie.restore"].HOOKS):
            hook()


# ---- the zygote ----


def run_zygote(control: socket.socket, canonical: Sequence[str], ballast_mb: float) -> NoReturn:
    """Imports `canonical`, says what came of it, then forks a sandbox for each request until the host hangs up.

    Messages on `control` (SOCK_SEQPACKET, one JSON object each): what `load_canonical` says;
    fork {folder, home, tmp} → forked {pid} with a descriptor of the process, and exited {pid, status} once it and all
    of its process group have ended.
    """
    signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
    answer, _ballast = load_canonical(canonical, ballast_mb)  # which lives as long as this function
    if answer["type"] == "ready" and len(answer["threads"]) > 1:
        detail = f"{len(answer['threads'])} threads after importing: {', '.join(sorted(answer['threads']))}"
        answer = {"type": "failed", "kind": "threads", "detail": detail}
    elif answer["type"] == "ready" and (sockets := shared_sockets()):
        detail = f"importing left {', '.join(sockets)}, which all clones would share"
        answer = {"type": "failed", "kind": "sockets", "detail": detail}
    _send(control, answer)
    if answer["type"] == "failed":
        os._exit(1)
    serve_forks(control, signals)


def load_canonical(canonical: Sequence[str], ballast_mb: float) -> tuple[Header, bytearray]:
    """Imports `canonical`; ready {base_bytes, bytes, threads, seconds} or failed {kind, detail}, and the ballast.

    Bytes of memory before and after; `threads` are the names of those that there are then.
    """
    ballast = bytearray()
    started = clock()
    base_bytes = anonymous_bytes()
    with noting_generators():
        for name in canonical:
            try:
                load(name)
            except BaseException as error:
                detail = f"{'load' if is_resource(name) else 'import'} {name}: {describe_failure(error)}"
                return {"type": "failed", "kind": "raised", "detail": detail}, ballast
    # Written, not only reserved: untouched pages would cost a fork nothing.
    ballast += bytearray(b"\x01") * int(ballast_mb * 1_000_000)
    seconds = clock() - started
    pids = children_of("self")
    if pids:
        detail = f"importing started {len(pids)} process(es)"
        return {"type": "failed", "kind": "processes", "detail": detail}, ballast
    flush_output()
    note_bit_generators()
    gc.freeze()  # a collection in a clone would else write to, and so copy, every page with objects on it
    facts = {"base_bytes": base_bytes, "bytes": anonymous_bytes(), "threads": threads(), "seconds": seconds}
    return {"type": "ready", **facts}, ballast


def run_saved(place: Place, canonical: Sequence[str], ballast_mb: float, patience_s: float) -> NoReturn:
    """Imports `canonical`, says what came of it, and waits to be saved; once restored, it serves calls.

    A process that nobody saves within `patience_s` ends: its worker may have ended before.
    """
    answer, _ballast = load_canonical(canonical, ballast_mb)  # which lives as long as this function
    with connect(place.folder) as channel:
        send_frame(channel, answer)
    if answer["type"] == "failed":
        os._exit(1)
    wait_to_be_restored(f"{place.folder}/go", patience_s)
    with contextlib.suppress(OSError), open(f"{place.folder}/go") as file:  # noqa: PTH123
        set_host_name(file.read())
    _C.drop_capabilities()
    gc.enable()
    serve_calls(place, None, restored=True)


def wait_to_be_restored(go: str, patience_s: float) -> None:
    """Returns once the file `go` is there; ends the process if it is not within `patience_s`.

    The clock goes on while the process lies saved. It may have been stopped between any two steps, so that the file is
    looked for once more after the clock was read: else a restore could find the time up, and so each of that image.
    """
    deadline = time.monotonic() + patience_s
    while not os.path.exists(go):  # noqa: PTH110
        if time.monotonic() > deadline and not os.path.exists(go):  # noqa: PTH110
            os._exit(1)
        time.sleep(RESTORED_S)


def silence() -> None:
    """Takes what this process was started with from it: it prints nowhere until it serves calls."""
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)


def _send(control: socket.socket, message: Header, descriptors: Sequence[int] = ()) -> None:
    socket.send_fds(control, [_json(message)], list(descriptors))


def serve_forks(control: socket.socket, signals: dict[Any, Any]) -> NoReturn:
    """The zygote's loop. A sandbox's process group ends with its first process: nothing of it stays behind."""
    import select

    poll = select.poll()
    poll.register(control, select.POLLIN)
    pids: dict[int, int] = {}  # descriptor → process id
    zygote = os.getpid()
    try:
        while True:
            for ready, _ in poll.poll():
                if ready in pids:
                    poll.unregister(ready)
                    os.close(ready)
                    pid = pids.pop(ready)
                    _send(control, {"type": "exited", "pid": pid, "status": reap_group(pid)})
                    continue
                message = control.recv(65536)
                if not message:
                    os._exit(0)  # the host has ended or wants no more: so do the sandboxes (PDEATHSIG)
                request = json.loads(message)
                place = Place(request["folder"], request["home"], request["tmp"])
                pid = os.fork()
                if pid == 0:
                    control.close()
                    for other in pids:
                        os.close(other)
                    start_clone(place, zygote, signals)
                descriptor = os.pidfd_open(pid)
                pids[descriptor] = pid
                poll.register(descriptor, select.POLLIN)
                _send(control, {"type": "forked", "pid": pid}, [descriptor])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def start_clone(place: Place, parent: int, signals: dict[Any, Any]) -> NoReturn:
    """What a fresh fork does first: it leaves the zygote's session and handlers."""
    try:
        os.setsid()
        for number, handler in signals.items():
            if signal.getsignal(number) is not handler:
                with contextlib.suppress(OSError, ValueError, TypeError):
                    signal.signal(number, handler)
        gc.enable()
        serve_calls(place, parent, restored=True)
    finally:
        os._exit(70)


def reap_group(pid: int) -> int:
    """Ends what is left of an ended process's group, then reaps the process itself; its wait status.

    In this order: as long as the process is not reaped, no other can have its number.
    """
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


# ---- what this root filesystem is ----


def describe() -> Header:
    """Python version, PEP 508 marker environment, digest of the installed distributions, and what was preloaded."""
    import hashlib
    import platform

    version = platform.python_version()
    implementation = sys.implementation
    number = implementation.version
    release = f"{number.major}.{number.minor}.{number.micro}"
    if number.releaselevel != "final":
        release += number.releaselevel[0] + str(number.serial)
    markers = {
        "implementation_name": implementation.name,
        "implementation_version": release,
        "os_name": os.name,
        "platform_machine": platform.machine(),
        "platform_release": platform.release(),
        "platform_system": platform.system(),
        "platform_version": platform.version(),
        "platform_python_implementation": platform.python_implementation(),
        "python_full_version": version,
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "sys_platform": sys.platform,
    }
    digest = hashlib.sha256(f"{sys.version}\n".encode())
    for entry in sorted(set(installed())):
        digest.update("\t".join(entry).encode("utf-8", "surrogateescape") + b"\n")
    with open("/proc/self/status") as file:  # noqa: PTH123
        source = "RssAnon" if "\nRssAnon:" in file.read() else "VmRSS"
    return {
        "python": version,
        "markers": markers,
        "rootfs_digest": digest.hexdigest(),
        "preload": [name for name in PRELOAD if name in sys.modules],
        "memory_source": source,
    }


def installed() -> list[tuple[str, str]]:
    """(folder name, SHA-256 of its RECORD) of every distribution on the path, and path files with their content.

    The folder's name is the distribution's name and version. Reading no metadata keeps this to milliseconds.
    """
    import hashlib

    found = []
    for path in sys.path:
        if not os.path.isdir(path):  # noqa: PTH112
            continue
        with os.scandir(path) as entries:
            for entry in entries:
                if not entry.name.endswith((".dist-info", ".egg-info", ".pth", ".egg-link")):
                    continue
                digest = ""
                for name in ("/RECORD", "/METADATA", "/PKG-INFO", ""):
                    with contextlib.suppress(OSError), open(entry.path + name, "rb") as file:  # noqa: PTH123
                        digest = hashlib.sha256(file.read()).hexdigest()
                        break
                found.append((entry.name, digest))
    return found


# ---- start ----


def start(bundle: str) -> None:
    """Loads the baseline. cloudpickle comes from `bundle` whatever the root filesystem has; later imports find it last."""
    gc.disable()  # collections in the middle of imports cost a tenth of their time, and land anywhere
    if bundle not in sys.path:
        sys.path.insert(0, bundle)
    importlib.import_module("cloudpickle")
    sys.path.remove(bundle)
    sys.path.append(bundle)
    preload()
    _C.load()


def main() -> None:
    """Entry: `python -I -c "…" <bundle> <mode> <options as JSON>`."""
    global BUNDLE, RESOURCES  # noqa: PLW0603 - of the process, as its arguments are
    BUNDLE, mode, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    sys.argv = [""]
    RESOURCES = options.get("resources", "")
    for name in ("home", "tmp"):  # imports may look for them
        if name in options:
            os.makedirs(options[name], mode=0o700, exist_ok=True)  # noqa: PTH103
    start(BUNDLE)
    if options.get("own_host_name"):
        _C.own_host_name()
        if mode != "save":
            _C.drop_capabilities()
    if mode == "describe":
        print(json.dumps(describe()))
    elif mode == "cold":
        gc.enable()
        serve_calls(Place(options["folder"], options["home"], options["tmp"]), options["parent"], restored=False)
    elif mode == "save":
        silence()
        place = Place(options["folder"], options["home"], options["tmp"])
        run_saved(place, options["canonical"], options["ballast_mb"], options["patience_s"])
    elif mode == "zygote":
        control = Socket(fileno=options["control"])
        run_zygote(control, options["canonical"], options["ballast_mb"])
    elif mode == "probe":
        silence()
        importlib.import_module("readie_probe").run(options, sys.modules[__name__])
    else:
        raise SystemExit(f"no mode {mode!r}")


def loaded_from(module: ModuleType) -> str | None:
    """The file of a module, read without waking one that loads at first use."""
    spec = object.__getattribute__(module, "__dict__").get("__spec__")
    origin = getattr(spec, "origin", None)
    return origin if isinstance(origin, str) and getattr(spec, "has_location", False) else None
