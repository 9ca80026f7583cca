"""The executor: what a call meets inside a sandbox, and what becomes of whatever it does there."""

import contextlib
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import pytest

import worker.runtime
from readie.manifest import CheckpointSpec
from tests.sandboxes import PYTHON, Ran, make_rootfs, make_sealed_rootfs, needs_runsc, run
from worker.fork import ForkRuntime
from worker.host import open_runtime
from worker.runsc import Options
from worker.runtime import Runtime, StartFailed

PACKAGES = {
    "printer": 'print("a banner")',
    "quitter": 'raise SystemExit("no")',
    "tree": "value = 1",
    "tree/branch.py": 'value = 2\nclass Leaf:\n    name = "leaf"',
    "tree/broken.py": "1 / 0",
    "cloudpickle": 'raise ImportError("not the one that the worker carries")',
}


class RunCall(Protocol):
    def __call__(self, function: Any, *args: Any, **options: Any) -> Ran: ...


@pytest.fixture(scope="module", params=["fork", "runsc"])
def runtime(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """Both runtimes, with an empty checkpoint loaded: what a call meets is the same in either."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "runtime").mkdir()
    if request.param == "runsc":
        needs_runsc()
    make = make_rootfs if request.param == "fork" else make_sealed_rootfs
    running = open_runtime(request.param, make(folder / "rootfs", PACKAGES), folder / "runtime", Options())
    spec = CheckpointSpec(checkpoint_id="checkpoint_0", generation="g")
    running.save(spec, folder / "checkpoint_0", timeout=60)
    running.load(spec, folder / "checkpoint_0", timeout=60)
    yield running
    running.close()


@pytest.fixture(params=["cold", "restored"])
def call(runtime: Runtime, request: pytest.FixtureRequest) -> RunCall:
    """Runs a function in a sandbox: a cold one, and one that was restored."""
    spec = CheckpointSpec(checkpoint_id="checkpoint_0", generation="g") if request.param == "restored" else None
    return partial(run, runtime, spec=spec)


@pytest.fixture
def restored(runtime: Runtime) -> RunCall:
    """Runs a function in a sandbox, where how it was started makes no difference."""
    spec = CheckpointSpec(checkpoint_id="checkpoint_0", generation="g")
    return partial(run, runtime, spec=spec)


# ---- values ----


def test_a_call_returns_what_the_function_returns(call: RunCall) -> None:
    """Arguments arrive, and the value comes back, with the seconds of each phase."""
    ran = call(lambda a, b: {"sum": a + b}, 2, 3)

    assert ran.value == {"sum": 5}
    assert ran.result.python == PYTHON
    phases = ran.result.phases
    assert 0 < phases.restore <= phases.ready
    assert phases.restore + phases.imports <= phases.ready
    assert 0 <= phases.run < phases.ready


def test_a_coroutine_function_is_run_to_its_end(restored: RunCall) -> None:
    """A function that gives a coroutine is awaited."""

    async def double(value: int) -> int:
        import asyncio

        await asyncio.sleep(0.01)
        return 2 * value

    assert restored(double, 7).value == 14


def test_functions_are_pickled_by_the_cloudpickle_that_the_worker_carries(call: RunCall) -> None:
    """A cloudpickle of the root filesystem's own, here a broken one, is never used."""

    def make() -> Any:
        import cloudpickle as theirs

        return theirs.__version__, lambda: 42

    version, function = call(make).value

    assert cloudpickle.__version__ == version
    assert function() == 42


# ---- what a function raises ----


def fail_deep() -> None:
    try:
        dict[str, int]()["key"]
    except KeyError as error:
        raise ValueError("no such thing") from error


def test_an_exception_comes_back_with_its_remote_traceback(call: RunCall) -> None:
    """The exception itself, and its type, text and traceback as text, with its cause and without the executor's frames."""
    ran = call(fail_deep)

    assert isinstance(ran.error, ValueError)
    assert ran.error.args == ("no such thing",)
    assert ran.result.problem
    assert (ran.result.problem.title, ran.detail) == ("ValueError", "no such thing")
    traceback = ran.result.problem.traceback or ""
    assert "fail_deep" in traceback
    assert "KeyError: 'key'" in traceback
    assert "readie_executor" not in traceback


class StubbornError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def test_an_exception_that_cannot_be_made_again_comes_back_as_text(restored: RunCall) -> None:
    """It pickles, but would fail to unpickle: then type, text and traceback are all there is."""

    def fail() -> None:
        raise StubbornError("very", "stubborn")

    ran = restored(fail)

    assert ran.result.outcome == "raised"
    assert ran.result.payload == b""
    assert ran.result.problem
    assert ran.result.problem.title.endswith("StubbornError")
    assert ran.detail == "very stubborn"


class BareError(BaseException):
    pass


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), BareError("x"), GeneratorExit()])
def test_even_a_base_exception_is_a_result(restored: RunCall, error: BaseException) -> None:
    """SystemExit, KeyboardInterrupt and the like end the function, not the sandbox."""

    def fail() -> None:
        raise error

    ran = restored(fail)

    assert ran.result.outcome == "raised"
    assert ran.result.problem
    assert ran.result.problem.title.endswith(type(error).__name__)


def test_runaway_recursion_is_a_result(restored: RunCall) -> None:
    """RecursionError comes back, with a traceback of bounded length."""

    def recurse(depth: int) -> Any:
        return recurse(depth + 1)

    ran = restored(recurse, 0)

    assert ran.result.problem
    assert ran.result.problem.title == "RecursionError"
    assert len(ran.result.problem.traceback or "") < 100_000


def test_an_exception_with_a_lone_surrogate_is_a_result(restored: RunCall) -> None:
    """Its text is any text: what UTF-8 does not have is a question mark, in the exception itself nothing changes."""

    def fail() -> None:
        raise ValueError("\ud800\0ü")

    ran = restored(fail)

    assert isinstance(ran.error, ValueError)
    assert ran.error.args == ("\ud800\0ü",)
    assert ran.detail == "?\0ü"


def test_an_exception_whose_text_cannot_be_had_is_a_result(restored: RunCall) -> None:
    """An exception with a broken __str__ is still described."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def fail() -> None:
        raise Mute

    ran = restored(fail)

    assert ran.result.outcome == "raised"
    assert "RuntimeError" in ran.detail


def test_a_payload_that_needs_an_absent_module_raises(restored: RunCall) -> None:
    """What unpickling raises is the call's result."""
    ran = restored(len, payload=b"cabsent_module\nthing\n.")

    assert isinstance(ran.error, ModuleNotFoundError)
    assert "absent_module" in ran.detail


# ---- what has no result ----


def close_and_wait() -> None:
    os.closerange(3, 200)
    time.sleep(60)


@pytest.mark.parametrize(
    ("end", "named"),
    [
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os._exit(0), "exit code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: __import__("ctypes").string_at(0), "SIGSEGV"),
        (close_and_wait, "closed its connection"),
    ],
)
def test_a_sandbox_that_ends_says_how(call: RunCall, end: Any, named: str) -> None:
    """Exit code or signal of a process that ended before its call did are named."""
    ran = call(end)

    assert ran.slug == "sandbox-failed"
    assert named in ran.detail


def scribble(data: bytes) -> None:
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            channel = socket.socket(fileno=os.dup(descriptor))
            channel.getpeername()
            channel.sendall(data)
    time.sleep(60)


@pytest.mark.parametrize("data", [b"\xff" * 64, (2).to_bytes(4, "big") + bytes(4) + b"no"], ids=["lengths", "header"])
def test_a_function_that_writes_to_the_executor_s_socket_ends_its_own_call(restored: RunCall, data: bytes) -> None:
    """What is not of the protocol is no answer; the next call is served."""
    ran = restored(scribble, data)

    assert ran.slug == "sandbox-failed"
    assert "not of the executor's protocol" in ran.detail
    assert restored(lambda: 1).value == 1


def test_an_executor_of_another_protocol_is_no_sandbox(restored: RunCall, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said which one speaks what, before anything runs."""
    monkeypatch.setattr(worker.runtime, "PROTOCOL", 99)

    with pytest.raises(StartFailed, match="the executor speaks protocol 2, the worker 99"):
        restored(lambda: 1)


def test_a_result_that_cannot_be_pickled_names_its_type(restored: RunCall) -> None:
    """A generator, a lock: bad-result, with the type and the reason."""
    generator = restored(lambda: (i for i in range(3)))
    lock = restored(lambda: __import__("threading").Lock())

    assert (generator.slug, lock.slug) == ("bad-result", "bad-result")
    assert "type generator" in generator.detail
    assert "_thread.lock" in lock.detail


def test_a_result_over_the_limit_names_both_sizes(restored: RunCall) -> None:
    """A result larger than MAX_PAYLOAD stays behind; one just as large comes back."""
    size = 16 * 2**20
    ran = restored(bytes, size, max_payload=size)  # the pickle is a little larger than what is in it
    fitting = restored(bytes, size, max_payload=size + 100)

    assert ran.slug == "result-too-large"
    assert f"MAX_PAYLOAD is {size}" in ran.detail
    assert fitting.value == bytes(size)


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_another_python_version_is_refused_before_anything_is_unpickled(restored: RunCall, tmp_path: Path) -> None:
    """The caller's minor version is compared first, and both are named."""
    payload = pickle.dumps((len, (Trap(tmp_path / "unpickled"),), {}))

    ran = restored(len, payload=payload, python="3.1")

    assert ran.slug == "python-mismatch"
    assert "3.1" in ran.detail
    assert PYTHON in ran.detail
    assert not (tmp_path / "unpickled").exists()


def test_a_call_that_is_not_permitted_does_not_run(restored: RunCall, tmp_path: Path) -> None:
    """Nothing of the caller's is unpickled or run before the router has agreed."""
    from worker.runtime import Dropped

    payload = pickle.dumps((len, (Trap(tmp_path / "unpickled"),), {}))

    with pytest.raises(Dropped):
        restored(len, payload=payload, permit=lambda: False)

    assert not (tmp_path / "unpickled").exists()


def test_a_function_that_forks_answers_once(restored: RunCall) -> None:
    """The copy of the process returns from the function too, and is ended without a word."""

    def fork() -> int:
        pid = os.fork()
        return 1 if pid else 2

    assert restored(fork).value == 1


# ---- output ----


def print_everything() -> None:
    import ctypes
    import subprocess

    print("from print")
    os.write(1, b"from write\n")
    subprocess.run(["sh", "-c", "echo from child; echo to device > /dev/stderr"], check=True)
    ctypes.CDLL(None).puts(b"from C")
    print("unfinished", end="")
    sys.stderr.write("ärger")


def test_everything_that_is_printed_arrives(call: RunCall) -> None:
    """Python, file descriptors, child processes and C libraries, each on its stream, in order."""
    ran = call(print_everything)

    assert ran.result.outcome == "returned"
    assert ran.printed["stdout"].splitlines()[:3] == ["from print", "from write", "from child"]
    assert {"from C", "unfinished"} == set(ran.printed["stdout"].splitlines()[3:]) or (
        ran.printed["stdout"].partition("from child\n")[2] == "unfinishedfrom C\n"
    )
    assert ran.printed["stderr"] == "to device\närger"


def test_what_a_crash_printed_arrives(restored: RunCall) -> None:
    """Output that was written before the process died is not lost."""

    def crash() -> None:
        os.write(2, b"about to crash\n")
        os.abort()

    ran = restored(crash)

    assert ran.printed["stderr"] == "about to crash\n"
    assert "SIGABRT" in ran.detail


def test_a_lot_of_output_does_not_block_the_call(restored: RunCall) -> None:
    """More than any pipe holds; characters that are cut between two reads arrive whole."""

    def chatter() -> None:
        for _ in range(20_000):
            print("äöü" * 5)

    ran = restored(chatter)

    assert ran.result.outcome == "returned"
    assert ran.printed["stdout"] == ("äöü" * 5 + "\n") * 20_000


def test_closing_the_streams_costs_only_the_output(restored: RunCall) -> None:
    """A function that closes its descriptors still returns."""

    def close() -> int:
        os.close(1)
        os.close(2)
        return 5

    assert restored(close).value == 5


# ---- hints ----


def loaded() -> list[str]:
    return sorted(name for name in sys.modules if name.startswith(("tree", "printer")))


def test_hints_are_imported_by_their_longest_prefix(call: RunCall) -> None:
    """`tree.branch.Leaf.name` loads tree.branch, names of nothing load nothing, before the function's first line."""
    ran = call(loaded, modules=["tree.branch.Leaf.name", "absent.thing", "not a name", "", "model:tree"])

    assert ran.value == ["tree", "tree.branch"]
    assert ran.result.phases.imports > 0


def test_hints_that_fail_or_print_do_no_harm(call: RunCall) -> None:
    """A hint may raise, exit or print: the call runs, and what was printed is output like any other."""
    ran = call(loaded, modules=["tree.broken", "quitter", "printer"])

    assert ran.value == ["printer", "tree"]
    assert ran.printed["stdout"] == "a banner\n"


# ---- the sandbox ----


def look_around() -> dict[str, Any]:
    import gc
    import tempfile

    return {
        "cwd": str(Path.cwd()),
        "temporary": tempfile.gettempdir(),
        "home": str(Path.home()),
        "environment": dict(os.environ),
        "stdin": sys.stdin.read(),
        "path": sys.path,
        "leader": os.getpid() == os.getpgid(0) == os.getsid(0),
        "collecting": gc.isenabled(),
        "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "argv": sys.argv,
    }


def test_a_sandbox_has_a_folder_and_an_environment_of_its_own(
    call: RunCall, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directory, home and temporary files are in its folder; nothing of the worker's environment is visible."""
    monkeypatch.setenv("WORKER_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")

    found = call(look_around).value

    below, bundle, cache = "/tmp/", "/readie", "/var/cache"
    if isinstance(runtime, ForkRuntime):
        below, bundle, cache = str(runtime.sandboxes), str(runtime.bundle), str(runtime.rootfs / "var" / "cache")
    assert found["cwd"].startswith(below)
    assert found["home"] == found["cwd"]
    assert found["temporary"].startswith(below)
    assert not Path(found["cwd"]).exists()
    assert "secret" not in str(found["environment"])
    assert "/nowhere" not in found["path"]
    assert found["path"][-1] == bundle
    assert found["stdin"] == ""
    assert found["argv"] == [""]
    assert found["leader"]
    assert found["collecting"]
    assert found["sigterm"]
    assert found["sigint"]
    assert found["environment"]["OPENBLAS_NUM_THREADS"] == "1"
    assert found["environment"]["XDG_CACHE_HOME"] == cache


def test_the_baseline_is_loaded_in_every_start(call: RunCall, runtime: Runtime) -> None:
    """Every module of the preload list is there before the function's first line, and no other that the host has."""
    modules = call(lambda: list(sys.modules)).value

    assert set(runtime.describe().preload) <= set(modules)
    assert "cloudpickle" in modules
    assert not {"msgspec", "httpx", "worker", "readie"} & set(modules)
