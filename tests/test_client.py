"""The client, against a server that speaks the API and runs each call in a process of its own.

That process is isolated: it has the standard library, cloudpickle and the executor's own code, and nothing of the
test's. So what works here arrived by value.
"""

import asyncio
import contextlib
import functools
import http.server
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from cloudpickle.cloudpickle import list_registry_pickle_by_value

from readie import client, remote, wire
from readie.client import Call, Remote
from readie.errors import (
    BadBudget,
    BadFunction,
    BadRequest,
    BadRequirement,
    BadResult,
    BadSetting,
    BadSize,
    CallCancelled,
    NoCapacity,
    NoWorkers,
    OutOfMemory,
    PayloadTooLarge,
    PythonMismatch,
    ReadieError,
    RemoteError,
    RouterUnreachable,
    SessionBusy,
    SessionConflict,
    SessionExpired,
    Unauthorized,
    UnknownCall,
)
from readie.flavor import Flavor

EXECUTOR = Path(__file__).parent.parent / "worker" / "executor.py"
SERVED = """
import asyncio, importlib.util, inspect, json, sys
bundle, executor, answer = sys.argv[1:]
sys.path.append(bundle)
import cloudpickle
spec = importlib.util.spec_from_file_location("executor", executor)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
header, payload = module.run_payload(sys.stdin.buffer.read(), 1 << 20, lambda: None)
with open(answer, "wb") as file:
    file.write(json.dumps(header).encode() + b"\\n" + payload)
"""
PROBLEM = wire.Problem(type="", title="")


@dataclass
class Served:
    """A call on the server."""

    request: wire.CallRequest
    placement_id: str
    process: subprocess.Popen[bytes] | None = None
    thread: threading.Thread | None = None  # that looks after the process
    output: list[wire.OutputPiece] = field(default_factory=list)
    result: wire.Result | None = None

    def end(self) -> None:
        if self.process:
            self.process.kill()


class Router:
    """The API for clients, and what a test can have it do."""

    def __init__(self, folder: Path) -> None:
        self.bundle = folder / "bundle"
        self.bundle.mkdir()
        cloudpickle = importlib.util.find_spec("cloudpickle")
        assert cloudpickle is not None
        assert cloudpickle.origin is not None
        (self.bundle / "cloudpickle").symlink_to(Path(cloudpickle.origin).parent)
        self.folder = folder
        self.changed = threading.Condition()
        self.calls: dict[str, Served] = {}
        self.refuse: list[ReadieError] = []  # the next placements, each with this
        self.ended: dict[str, wire.Result] = {}  # function → how its calls end, without being run
        self.capacity = 100
        self.most_at_once = 0
        self.cancelled: list[str] = []
        self.drop = 0  # the next reads are cut off
        self.lose = 0  # answers to the next placements are lost
        self.keys: list[str | None] = []  # that placements came with
        self.answered: dict[str | None, wire.CallPlaced] = {}  # by key
        self.asked: list[tuple[str, str, str | None]] = []  # (method, path, Authorization)
        router = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_all(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                url = urlsplit(self.path)
                router.asked.append((self.command, url.path, self.headers["Authorization"]))
                if self.command == "POST":
                    router.keys.append(self.headers["Idempotency-Key"])
                try:
                    answer = router.answer(self.command, url.path, parse_qs(url.query), body)
                    status, kind = 200, "application/x-msgpack"
                    content = b"" if answer is None else msgspec.msgpack.encode(answer)
                except ReadieError as error:
                    status, kind = error.status, "application/problem+json"
                    content = msgspec.json.encode(problem(error))
                except ConnectionAbortedError:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = handle_all  # noqa: N815 - the names are the library's

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                """Clients that hang up are part of the tests."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> msgspec.Struct | None:
        if method == "POST":
            return self.place_once(self.keys[-1], msgspec.msgpack.decode(body, type=wire.CallRequest))
        call_id = path.rpartition("/")[2]
        if call_id not in self.calls:
            raise UnknownCall(f"{call_id} was never placed")
        call = self.calls[call_id]
        if method == "DELETE":
            self.cancelled.append(call_id)
            self.finish(call, wire.Result(outcome="cancelled"))
            call.end()
            return None
        if self.drop:
            self.drop -= 1
            raise ConnectionAbortedError
        return self.read(call_id, call, float(query["wait"][0]), int(query["seen"][0]))

    def place_once(self, key: str | None, request: wire.CallRequest) -> wire.CallPlaced:
        if key is None or key not in self.answered:
            self.answered[key] = self.place(request)
        if self.lose:
            self.lose -= 1
            raise ConnectionAbortedError
        return self.answered[key]

    def place(self, request: wire.CallRequest) -> wire.CallPlaced:
        if self.refuse:
            raise self.refuse.pop(0)
        with self.changed:
            running = sum(call.result is None for call in self.calls.values())
            if running >= self.capacity:
                raise NoCapacity("every worker is full")
            self.most_at_once = max(self.most_at_once, running + 1)
            call_id = f"c{len(self.calls)}"
            ended = self.ended.get(request.function)
            call = self.calls[call_id] = Served(request, f"{call_id}-0", result=ended)
            if ended is None:
                answer = self.folder / call_id
                command = [sys.executable, "-I", "-S", "-c", SERVED, str(self.bundle), str(EXECUTOR), str(answer)]
                pipe = subprocess.PIPE
                call.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
                call.thread = threading.Thread(target=self.run, args=(call, call.process, answer))
                call.thread.start()
        return wire.CallPlaced(call_id=call_id, placement=placement(call))

    def run(self, call: Served, process: subprocess.Popen[bytes], answer: Path) -> None:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        with contextlib.suppress(BrokenPipeError), process:  # cancelled
            readers = [
                threading.Thread(target=self.listen, args=(call, "stdout", process.stdout.fileno())),
                threading.Thread(target=self.listen, args=(call, "stderr", process.stderr.fileno())),
            ]
            for reader in readers:
                reader.start()
            with contextlib.suppress(BrokenPipeError):  # else the pipes would be closed while they are read
                process.stdin.write(call.request.payload)
                process.stdin.close()
            for reader in readers:
                reader.join()
        if not answer.exists():
            self.finish(call, wire.Result(outcome="failed", problem=problem(ReadieError("the process ended"))))
            return
        header, _, payload = answer.read_bytes().partition(b"\n")
        said = msgspec.json.decode(header, type=dict[str, object])
        told = wire.Problem(
            type=f"urn:readie:problem:{said.get('slug', 'call-failed')}",
            title=str(said.get("kind", "")),
            detail=str(said.get("detail", "")),
            traceback=str(said["traceback"]) if "traceback" in said else None,
        )
        fields = {"outcome": said["outcome"], "payload": payload, "python": call.request.python}
        result = msgspec.convert(fields, wire.Result)
        self.finish(call, msgspec.structs.replace(result, problem=None if result.outcome == "returned" else told))

    def listen(self, call: Served, stream: wire.Stream, pipe: int) -> None:
        while text := os.read(pipe, 65536):
            with self.changed:
                call.output.append(wire.OutputPiece(stream=stream, text=text.decode()))
                self.changed.notify_all()

    def finish(self, call: Served, result: wire.Result) -> None:
        with self.changed:
            call.result = call.result or result
            self.changed.notify_all()

    def read(self, call_id: str, call: Served, seconds: float, seen: int) -> wire.CallStatus:
        with self.changed:
            self.changed.wait_for(lambda: call.result or len(call.output) > seen, seconds)
            first = min(seen, len(call.output))
            states: dict[str, wire.CallState] = {"failed": "failed", "cancelled": "cancelled"}
            return wire.CallStatus(
                call_id=call_id,
                state=states.get(call.result.outcome, "finished") if call.result else "accepted",
                function=call.request.function,
                created_at=datetime.now(UTC),
                placement=placement(call),
                output=call.output[first:],
                output_from=first,
                result=call.result,
            )


def placement(call: Served) -> wire.Placement:
    return wire.Placement(
        placement_id=call.placement_id, worker_id="w1", flavor=Flavor.CPU, checkpoint_id="checkpoint_3"
    )


def problem(error: ReadieError) -> wire.Problem:
    return wire.Problem(
        type=error.type, title=error.title, status=error.status, detail=error.detail, way_out=error.hint
    )


@pytest.fixture
def router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Router]:
    """A running server, to which the environment points."""
    running = Router(tmp_path)
    thread = threading.Thread(target=running.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("ROUTER_URL", running.url)
    monkeypatch.delenv("AUTH_TOKEN", raising=False)
    yield running
    running.server.shutdown()
    thread.join()
    running.server.server_close()
    for call in running.calls.values():
        call.end()
        if call.thread:
            call.thread.join()


# ---- marking a function ----


class TestOptions:
    """What is wrong with the keywords is said when the function is marked, before anything is sent."""

    def test_sizes_become_bytes(self) -> None:
        """Sizes are bytes or text with a unit."""
        template = remote(len, memory="512Mi", max_memory="2G", gpu_memory=1, max_gpu_memory=1).template

        assert (template.memory, template.max_memory) == (512 * 1024**2, 2 * 10**9)
        assert (template.gpu_memory, template.max_gpu_memory) == (1, 1)

    def test_everything_else_travels_as_given(self) -> None:
        """Each keyword is a field of the request."""
        template = remote(
            len, gpu=True, session_id="s-1", checkpoint_id="c", retry=True, timeout=5, queue_timeout=2.5
        ).template

        assert template == wire.CallRequest(
            payload=b"",
            function="len",
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            gpu=True,
            session_id="s-1",
            checkpoint_id="c",
            retry=True,
            timeout=5.0,
            queue_timeout=2.5,
        )

        assert remote(len, cold=True).template.cold

    def test_packages_are_parsed(self) -> None:
        """Requirements are validated and normalized."""
        assert remote(len, packages=["  numpy>=1.0,", "requests[security] >= 2"]).template.packages == [
            "numpy>=1.0",
            "requests[security]>=2",
        ]

    @pytest.mark.parametrize(
        ("options", "kind", "says"),
        [
            ({"memory": "2X"}, BadSize, "memory: '2X' is not a size"),
            ({"max_gpu_memory": 0}, BadSize, "max_gpu_memory: 0 is out of range"),
            ({"memory": 1.5}, BadSize, "memory: 1.5 is not a size"),
            ({"memory": "2Gi", "max_memory": "1Gi"}, BadBudget, "max_memory='1Gi' is below memory='2Gi'"),
            ({"gpu_memory": 2, "max_gpu_memory": 1}, BadBudget, "max_gpu_memory=1 is below gpu_memory=2"),
            ({"packages": ["num py"]}, BadRequirement, "num py"),
            ({"packages": "numpy"}, BadRequirement, "packages='numpy' is not a list"),
            ({"timeout": -1}, BadRequest, "timeout=-1: expected `float` > 0.0"),
            ({"timeout": float("nan")}, BadRequest, "timeout=nan"),
            ({"queue_timeout": "soon"}, BadRequest, "queue_timeout='soon'"),
            ({"queue_timeout": None}, BadRequest, "queue_timeout=None"),
            ({"gpu": 1}, BadRequest, "gpu=1: expected `bool`, got `int`"),
            ({"session_id": "a b"}, BadRequest, "session_id='a b'"),
            ({"checkpoint_id": ""}, BadRequest, "checkpoint_id=''"),
            ({"checkpoint_id": "a\0"}, BadRequest, "characters that no id has"),
            ({"checkpoint_id": "\ud800"}, BadRequest, "characters that no id has"),
            ({"checkpoint_id": "a", "cold": True}, BadRequest, "checkpoint_id and cold=True exclude each other"),
        ],
    )
    def test_bad_value_is_refused_by_name(self, options: dict[str, object], kind: type[Exception], says: str) -> None:
        """The error names the keyword, the value and the rule."""
        with pytest.raises(kind) as error:
            remote(**options)  # type: ignore[call-overload]

        assert says in str(error.value)

    def test_unknown_keyword_is_refused_with_those_that_there_are(self) -> None:
        """A misspelt option is not silently ignored."""
        with pytest.raises(TypeError, match=r"no keyword 'memroy'.*gpu, memory, max_memory.*queue_timeout"):
            remote(memroy=1)  # type: ignore[call-overload]

    def test_only_what_can_be_called_is_marked(self) -> None:
        """A value in the place of the function is a mistake, such as @remote("2Gi")."""
        with pytest.raises(TypeError, match="'2Gi' is not callable"):
            remote("2Gi")  # type: ignore[call-overload]

    def test_marked_function_keeps_its_looks(self) -> None:
        """Name, documentation and signature are the function's."""

        @remote(memory="1Gi")
        def train(rows: int) -> int:
            """Trains."""
            return rows

        assert (train.__name__, train.__doc__, train.__module__) == ("train", "Trains.", __name__)  # type: ignore[attr-defined]
        assert train.__wrapped__(3) == 3
        assert repr(train).endswith("test_marked_function_keeps_its_looks.<locals>.train>")

    def test_function_can_be_marked_again_with_other_options(self) -> None:
        """The second mark holds."""
        again = remote(remote(len, memory=5), cold=True)

        assert again.__wrapped__ is len
        assert (again.template.memory, again.template.cold) == (None, True)


# ---- the payload ----

STATE: dict[str, int] = {}
LOCK = threading.Lock()


@remote
def count(n: int) -> int:
    """Calls itself through the marked name."""
    return n and 1 + count(n - 1)


class Shop:
    """A class with a marked method."""

    def __init__(self, price: int) -> None:
        self.price = price

    @remote
    def total(self, amount: int) -> int:
        return self.price * amount + self.extra()

    def extra(self) -> int:
        return 1

    @remote
    @classmethod
    def name(cls) -> str:
        return cls.__name__

    @staticmethod
    @remote
    def double(x: int) -> int:
        return 2 * x


class Oddity(Exception):
    """An exception of the test's own."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)
        self.code = code


def helper() -> object:
    return LOCK


def closure(k: object) -> Callable[[], object]:
    return lambda: k


class TestPayload:
    """What a function needs is sent along: it runs where nothing of the caller's is."""

    def test_value_comes_back(self, router: Router) -> None:
        """Arguments go there, the result comes back."""

        @remote
        def scale(x: int, *, by: int = 2) -> list[int]:
            return [x * by]

        assert scale(4, by=3) == [12]

    def test_marked_function_calls_itself_in_place(self, router: Router) -> None:
        """On the worker a marked function is the function itself."""
        assert count(5) == 5
        assert len(router.calls) == 1

    def test_global_is_copied(self, router: Router) -> None:
        """What the function changes there stays as it is here."""

        @remote
        def note() -> int:
            STATE["x"] = 1
            return len(STATE)

        assert note() == 1
        assert STATE == {}

    def test_closure_and_partial_are_sent(self, router: Router) -> None:
        """Cells and bound arguments come along."""

        def adder(k: int) -> Callable[[int], int]:
            return lambda x: x + k

        assert remote(functools.partial(adder(3), 4))() == 7

    def test_coroutine_function_is_run(self, router: Router) -> None:
        """An async function runs in an event loop there."""

        @remote
        async def wait(x: int) -> int:
            await asyncio.sleep(0)
            return x

        assert wait(3) == 3

    def test_builtin_is_sent_by_name(self, router: Router) -> None:
        """A function of the standard library needs no imports."""
        assert remote(len)([1, 2]) == 2
        assert router.calls["c0"].request.modules == []

    def test_function_without_source_is_sent(self, router: Router) -> None:
        """A function made by exec, whose globals name no module."""
        space: dict[str, Remote[[], list[int]]] = {"remote": remote}  # type: ignore[dict-item]
        exec("@remote\ndef f():\n    import json\n    return json.loads('[1]')", space)

        assert space["f"]() == [1]

    def test_lazy_modules_are_not_loaded_by_sending(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A function that names no module is not looked for in all of them."""
        lazy = ModuleType("lazy")
        exec("def __getattr__(name): raise SystemExit('loaded')", vars(lazy))
        monkeypatch.setitem(sys.modules, "lazy", lazy)
        space: dict[str, Callable[[], int]] = {}
        exec("def f(): return 1", space)

        assert remote(space["f"]).request().modules == []

    def test_method_takes_its_instance_along(self, router: Router) -> None:
        """Marked methods are bound as methods are."""
        assert Shop(5).total(2) == 11
        assert Shop.total(Shop(1), 2) == 3
        assert Shop.name() == "Shop"
        assert Shop(0).double(4) == 8

    def test_class_of_the_result_is_the_callers(self, router: Router) -> None:
        """An instance that went there and back is of the same class."""
        shop = remote(lambda shop: [shop])(Shop(3))[0]

        assert type(shop) is Shop
        assert shop.price == 3

    def test_local_modules_go_by_value(self, router: Router, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Functions, classes and modules of the caller's project work where it is not installed."""
        project = tmp_path / "project"
        (project / "mine").mkdir(parents=True)
        (project / "mine" / "__init__.py").write_text("")
        (project / "mine" / "tools.py").write_text(
            "import threading\nfrom mine import table\nLOCK = threading.Lock()\n"
            "class Pair:\n    def __init__(self, x): self.x = x\n    def both(self): return self.x, table.BASE\n"
            "def g(x): return Pair(table.add(x)).both()\n"
        )
        (project / "mine" / "table.py").write_text("BASE = 10\ndef add(x): return x + BASE\n")
        monkeypatch.syspath_prepend(project)
        tools = importlib.import_module("mine.tools")
        try:
            assert remote(tools.g)(1) == (11, 10)  # a function of the module, which has a lock beside it
            assert remote(lambda: tools.g(2))() == (12, 10)  # through the module
            assert remote(lambda pairs: pairs[0].both())([tools.Pair(4)]) == (4, 10)  # an instance in an argument
            assert type(remote(lambda x: x)(tools.Pair(4))) is tools.Pair
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
                del sys.modules[name]
        assert list_registry_pickle_by_value() == set()

    def test_local_module_imported_in_the_body_is_refused(self, router: Router) -> None:
        """It would not be there."""

        @remote
        def f() -> None:
            import tests.test_imports  # noqa: F401

        with pytest.raises(BadFunction, match=r"imports tests.test_imports, which only this machine has"):
            f()
        assert router.asked == []

    def test_modules_of_function_and_arguments_are_sent_as_hints(self, router: Router) -> None:
        """What will be imported there decides the checkpoint."""
        import numpy as np

        def f(x: object) -> None:
            import einops  # type: ignore[import-not-found]  # noqa: F401

        assert remote(f).request(np.zeros(1)).modules == ["einops", "numpy"]

    @pytest.mark.parametrize(
        ("function", "arguments", "says"),
        [
            (lambda: LOCK, (), "global LOCK of TestPayload.<lambda>: TypeError: cannot pickle '_thread.lock' object"),
            (lambda lock=LOCK: lock, (), "a default of TestPayload.<lambda>: TypeError"),
            (closure(LOCK), (), "closure variable k of closure.<locals>.<lambda>: TypeError"),
            (lambda x: x, (1, [LOCK]), "argument 2: TypeError: cannot pickle"),
            (lambda: helper() or 1, (), "global LOCK of helper: TypeError"),
        ],
    )
    def test_what_cannot_be_sent_is_named(
        self, function: Callable[..., object], arguments: tuple[object, ...], says: str
    ) -> None:
        """The error says which global, cell, default or argument is at fault."""
        with pytest.raises(BadFunction) as error:
            remote(function)(*arguments)

        assert says in str(error.value)


# ---- results ----


class TestResults:
    """What a call gives here is what it gave there."""

    def test_exception_is_raised_with_the_remote_traceback(self, router: Router) -> None:
        """Its type and its attributes are the original ones."""

        @remote
        def fail() -> None:
            raise Oddity("no", 7)

        with pytest.raises(Oddity) as error:
            fail()

        assert error.value.code == 7
        note = error.value.__notes__[0]
        assert note.startswith("\nRemote traceback of TestResults.")
        assert "on w1:" in note
        assert f'{__file__}", line ' in note
        assert "in fail" in note
        assert note.endswith("Oddity: ('no', 7)")

    @pytest.mark.parametrize(
        ("source", "says"),
        [
            ("class Two(Exception):\n    def __init__(self, a, b): super().__init__(a)\n  raise Two(1, 2)", "Two: 1"),
            ("error = OSError('x')\n  error.lock = __import__('threading').Lock()\n  raise error", "OSError: x"),
            ("raise SystemExit(3)", "SystemExit: 3"),
            ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ],
    )
    def test_exception_that_cannot_be_raised_here_is_described(self, router: Router, source: str, says: str) -> None:
        """It cannot be pickled, cannot be made again, or would end this process."""
        space: dict[str, Callable[[], None]] = {"__name__": "__main__"}  # type: ignore[dict-item]
        exec(f"def f():\n  {source}".replace("\n    ", "\n      "), space)

        with pytest.raises(RemoteError) as error:
            remote(space["f"])()

        assert error.value.detail.removeprefix("f.<locals>.") == says
        assert "in f" in error.value.__notes__[0]

    def test_value_that_cannot_be_sent_back_is_refused_there(self, router: Router) -> None:
        """The error names its type."""
        with pytest.raises(BadResult, match=r"a value of type _thread.lock cannot be pickled"):
            remote(lambda: __import__("threading").Lock())()

    def test_value_that_cannot_be_loaded_here_is_refused(self, router: Router) -> None:
        """What it needs is not installed at the caller's."""
        payload = b"cnowhere_at_all\nf\n."
        router.ended["len"] = wire.Result(outcome="returned", payload=payload, python=client.PYTHON)

        with pytest.raises(BadResult, match=r"len cannot be unpickled here: ModuleNotFoundError.*nowhere_at_all"):
            remote(len)([])

    @pytest.mark.parametrize("outcome", ["returned", "raised"])
    def test_result_of_another_python_is_not_unpickled(self, router: Router, outcome: str) -> None:
        """The version is compared first: the payload would end the process."""
        payload = b"cos\n_exit\n(I9\ntR."
        fields = {"outcome": outcome, "payload": payload, "python": "3.99"}
        router.ended["len"] = msgspec.convert(fields, wire.Result)

        with pytest.raises(PythonMismatch, match=f"ran on Python 3.99, and this is Python {client.PYTHON}"):
            remote(len)([])

    def test_result_that_names_no_python_is_not_unpickled(self, router: Router) -> None:
        """Not knowing is not matching."""
        router.ended["len"] = wire.Result(outcome="returned", payload=b"cos\n_exit\n(I9\ntR.")

        with pytest.raises(PythonMismatch, match="an unnamed Python version"):
            remote(len)([])

    def test_failure_is_raised_as_its_type(self, router: Router) -> None:
        """A problem of the table becomes its exception, with its way out."""
        router.ended["len"] = wire.Result(outcome="failed", problem=problem(OutOfMemory("it used 2 GB", "Buy more.")))

        with pytest.raises(OutOfMemory, match=r"it used 2 GB\. Buy more\."):
            remote(len)([])

    def test_output_appears_here_as_it_is_printed(self, router: Router, capsys: pytest.CaptureFixture[str]) -> None:
        """Each stream on its own, once, before the call has ended."""

        @remote
        def talk() -> None:
            import pathlib
            import sys
            import time

            print("one", flush=True)
            while not pathlib.Path(gate).exists():
                time.sleep(0.02)
            print("two", file=sys.stderr)
            print("thrëe")

        gate = str(router.folder / "gate")
        call = talk.submit()
        waiting = threading.Thread(target=call.result)
        waiting.start()
        printed = ""
        deadline = time.monotonic() + 20
        while not printed and time.monotonic() < deadline:
            printed += capsys.readouterr().out
            time.sleep(0.01)
        Path(gate).touch()
        waiting.join()

        assert printed == "one\n"
        assert capsys.readouterr() == ("thrëe\n", "two\n")

    def test_output_of_a_second_placement_is_shown_from_its_start(
        self, router: Router, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A call that is placed again begins anew, whatever was printed before."""
        router.ended["len"] = wire.Result(outcome="returned", payload=b"N.", python=client.PYTHON)
        call: Call[None] = remote(len).submit([])  # type: ignore[assignment]
        served = router.calls[call.call_id]
        served.output = [wire.OutputPiece(stream="stdout", text=text) for text in "ab"]
        served.result = None
        assert call.status.state == "accepted"
        served.placement_id = "second"
        served.output = [wire.OutputPiece(stream="stdout", text=text) for text in "abc"]
        served.result = router.ended["len"]
        call.result()

        assert capsys.readouterr().out == "ababc"

    def test_status_tells_how_a_call_goes(self, router: Router) -> None:
        """Placement, state and result are there while and after it runs."""
        call = remote(len).submit([1])
        value = call.result()
        asked = len(router.asked)

        assert value == 1
        assert call.placed.placement.checkpoint_id == "checkpoint_3"
        assert call.status.state == "finished"
        assert call.status.result is not None
        assert call.status.result.phases == wire.Phases()
        assert call.result() == 1
        assert len(router.asked) == asked  # what has ended is not asked for again

    def test_aio_gives_the_value_or_raises(self, router: Router) -> None:
        """The same as blocking, in an event loop, and many at a time."""

        async def main() -> list[int]:
            return await asyncio.gather(*(remote(len).aio([0] * n) for n in range(3)))

        assert asyncio.run(main()) == [0, 1, 2]
        with pytest.raises(ZeroDivisionError) as error:
            asyncio.run(remote(lambda: 1 // 0).aio())
        assert "Remote traceback" in error.value.__notes__[0]


# ---- refusals and accidents ----


def sleep() -> None:
    import time

    time.sleep(60)


class TestAccidents:
    """Each way in which a call can fail is one typed error."""

    @pytest.mark.parametrize(
        "refusal",
        [
            NoWorkers("none is ready"),
            Unauthorized("no"),
            PayloadTooLarge("1 > 0"),
            SessionBusy("s"),
            SessionConflict("s"),
            SessionExpired("s"),
        ],
    )
    def test_refusal_is_raised_as_its_type(self, router: Router, refusal: ReadieError) -> None:
        """A problem document becomes the exception of its type."""
        router.refuse = [refusal]

        with pytest.raises(type(refusal)) as error:
            remote(len)([])
        assert str(error.value) == str(refusal)

    def test_a_call_of_a_session_waits_longer_for_its_placement(self) -> None:
        """The router may keep it for its turn, longer than for any other."""
        asked = [next(client._place(remote(len, session_id=each).request([]))) for each in (None, "s")]

        assert [ask.read_seconds for ask in asked if not isinstance(ask, float)] == [60, 660]

    def test_missing_router_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error has the URL and the way out."""
        monkeypatch.setenv("ROUTER_URL", "http://127.0.0.1:9")

        with pytest.raises(
            RouterUnreachable, match=r"http://127.0.0.1:9: ConnectError.*readie-router serve.*ROUTER_URL"
        ):
            remote(len)([])
        with pytest.raises(RouterUnreachable, match=r"http://127.0.0.1:9: ConnectError"):
            asyncio.run(remote(len).aio([]))

    @pytest.mark.parametrize(
        ("variable", "value"),
        [("ROUTER_URL", "127.0.0.1:8700"), ("ROUTER_URL", "http://a:b"), ("AUTH_TOKEN", "a\nb"), ("AUTH_TOKEN", "é")],
    )
    def test_bad_setting_is_named(self, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
        """The variable, and its value unless it is a secret."""
        monkeypatch.setenv(variable, value)

        with pytest.raises(BadSetting) as error:
            remote(len)([])
        assert variable in str(error.value)
        assert (value in str(error.value)) is (variable == "ROUTER_URL")

    def test_something_else_than_a_router_is_recognized(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A web server that knows nothing of Readie is no router."""
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
        with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.handle_request)
            thread.start()
            monkeypatch.setenv("ROUTER_URL", f"http://127.0.0.1:{server.server_port}")
            with pytest.raises(RouterUnreachable, match="/v1/calls answered 501, and not as a router does"):
                remote(len)([])
            thread.join()

    def test_token_is_sent(self, router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
        """AUTH_TOKEN is read at each call."""
        remote(len)([])
        monkeypatch.setenv("AUTH_TOKEN", "secret")
        remote(len)([])

        assert [token for method, _, token in router.asked if method == "POST"] == [None, "Bearer secret"]

    def test_placed_call_outlives_lost_connections(self, router: Router) -> None:
        """Reading is tried again."""
        router.drop = 2

        assert remote(len)([1]) == 1
        assert [method for method, _, _ in router.asked][:4] == ["POST", "GET", "GET", "GET"]

    def test_lost_answer_to_a_placement_places_the_call_once(self, router: Router) -> None:
        """It is sent again with the same key, by which a router knows it; another call has another key."""
        router.lose = 2

        assert remote(len)([1]) == 1
        assert remote(len)([1, 2]) == 2
        first, again, once_more, other = router.keys
        assert first == again == once_more
        assert other not in {first, None}
        assert len(router.calls) == 2

    def test_router_that_stays_away_is_named_after_a_while(
        self, router: Router, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A call is not waited for without end."""
        monkeypatch.setattr(client, "RECONNECT_SECONDS", 0.1)
        router.drop = 100

        with pytest.raises(RouterUnreachable):
            remote(len)([1])

    def test_interrupt_cancels_the_call(self, router: Router) -> None:
        """Ctrl-C ends the call there, too."""
        call = remote(sleep).submit()
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()

        with pytest.raises(KeyboardInterrupt):
            call.result()
        timer.join()
        assert router.cancelled == [call.call_id]

    def test_cancelled_task_cancels_the_call(self, router: Router) -> None:
        """So does a timeout in an event loop."""

        async def main() -> None:
            async with asyncio.timeout(3):
                await remote(sleep).aio()

        with pytest.raises(TimeoutError):
            asyncio.run(main())
        assert router.cancelled == ["c0"]

    def test_cancelled_call_says_so(self, router: Router) -> None:
        """Its result is the error."""
        call = remote(sleep).submit()
        call.cancel()

        with pytest.raises(CallCancelled, match="sleep was cancelled"):
            call.result()


# ---- many calls ----


class TestMap:
    """Many calls, in order."""

    def test_results_are_in_order(self, router: Router) -> None:
        """Whichever ends first."""

        @remote
        def late(x: int, y: str) -> tuple[int, str]:
            import time

            time.sleep(0.2 * (x == 0))
            return x, y

        assert late.map(range(4), "abcdef", in_flight=4) == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
        assert router.most_at_once <= 4

    def test_nothing_gives_nothing(self, router: Router) -> None:
        """An empty iterable makes no call."""
        assert remote(len).map(iter([])) == []
        assert router.asked == []

    def test_calls_in_flight_are_bounded(self, router: Router) -> None:
        """The rest waits here."""
        assert remote(len).map([[0]] * 5, in_flight=2) == [1] * 5
        assert router.most_at_once <= 2

    def test_calls_of_a_session_run_one_after_the_other(self, router: Router) -> None:
        """In the order of the elements, whatever in_flight allows."""
        assert remote(len, session_id="s").map([[0]] * 4, in_flight=4) == [1] * 4
        assert router.most_at_once == 1

    def test_call_without_room_waits_for_the_others(self, router: Router) -> None:
        """A map larger than the cluster succeeds."""
        router.capacity = 1

        assert remote(len).map([[0]] * 4, in_flight=4) == [1] * 4
        assert router.most_at_once == 1

    def test_no_room_at_all_is_an_error(self, router: Router) -> None:
        """Nobody's end could help."""
        router.capacity = 0

        with pytest.raises(NoCapacity):
            remote(len).map([[0]] * 3)

    def test_first_failure_cancels_the_rest(self, router: Router) -> None:
        """It is raised at once."""

        @remote
        def f(x: int) -> None:
            if x == 1:
                raise ValueError(x)
            sleep()

        with pytest.raises(ValueError, match="1"):
            f.map(range(20), in_flight=3)

        assert len(router.calls) <= 4
        assert sorted(call.result.outcome for call in router.calls.values() if call.result) == [
            *["cancelled"] * (len(router.calls) - 1),
            "raised",
        ]

    def test_interrupt_cancels_all_that_run(self, router: Router) -> None:
        """Ctrl-C leaves nothing behind."""

        def interrupt() -> None:
            while len(router.calls) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            remote(lambda _: sleep()).map(range(9), in_flight=2)

        thread.join()
        assert len(router.calls) == 2
        assert all(call.result and call.result.outcome == "cancelled" for call in router.calls.values())

    def test_bad_element_is_named_and_ends_the_map(self, router: Router) -> None:
        """What cannot be sent fails here."""
        with pytest.raises(BadFunction, match="argument 1: TypeError"):
            remote(type).map([1, LOCK])

    def test_progress_is_shown_on_a_terminal_only(self, router: Router, capfd: pytest.CaptureFixture[str]) -> None:
        """A bar on a terminal's stderr; nothing in a pipe."""
        assert remote(len).map([[0]]) == [1]
        assert capfd.readouterr() == ("", "")

        import pty

        host, terminal = pty.openpty()
        program = "from readie import remote; print(remote(len).map([[0], [1, 2]]))"
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=terminal, env=environ, check=True
        )
        os.close(terminal)
        shown = b""
        while piece := read_terminal(host):
            shown += piece
        os.close(host)

        assert done.stdout == b"[1, 2]\n"
        assert b"len" in shown
        assert b"2/2" in shown

    @pytest.mark.parametrize(("iterables", "in_flight"), [([], 1), ([[1]], 0)])
    def test_nonsense_is_refused(self, iterables: list[list[int]], in_flight: int) -> None:
        """Without an iterable or without room there is nothing to do."""
        with pytest.raises(TypeError, match="at least one iterable"):
            remote(abs).map(*iterables, in_flight=in_flight)


def read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # its other side is closed
        return b""
