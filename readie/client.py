"""The client: functions marked with `@remote`, their calls, and what comes back.

    Remote   a function that runs elsewhere: call it, await `.aio`, `.map` it, or `.submit` it for its
    Call     one call that was placed: its status, and its result

What the client says to the router is written once, as generators (`_place`, `_follow`, `_end`) that yield requests and
are sent the answers; `_drive` and `_drive_aio` carry them out, blocking or not.
"""

import asyncio
import contextlib
import functools
import io
import math
import operator
import os
import pickle
import sys
import threading
import time
import types
from collections import ChainMap
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sized
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload
from uuid import uuid4

import cloudpickle
import httpx
import msgspec
from cloudpickle.cloudpickle import list_registry_pickle_by_value

from readie import wire
from readie.errors import (
    BadBudget,
    BadFunction,
    BadRequest,
    BadRequirement,
    BadResult,
    BadSize,
    CallCancelled,
    CallError,
    DatabaseUnavailable,
    NoCapacity,
    PythonMismatch,
    RateLimited,
    ReadieError,
    RemoteError,
    RouterStopping,
    RouterUnreachable,
    problem_from,
)
from readie.http import MESSAGEPACK, connection, read_answer, retry_after, unreachable
from readie.imports import Reached, is_local, reach
from readie.requirements import parse_requirement
from readie.settings import DEFAULT_ROUTER_URL, RouterUrl, check_token, read_settings
from readie.units import parse_size

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
POLL_SECONDS = 30.0  # of one long poll
ANSWER_SECONDS = 60.0  # that the router may take beyond what it was asked to wait
TURN_SECONDS = 600.0  # that a call may wait for its turn in a session; a router's SESSION_WAIT_TIMEOUT is far less
RATE_SECONDS = 30.0  # that a request waits while the router takes no more of this address
RECONNECT_SECONDS = 30.0  # that a placed call outlives a router that does not answer
SETTLE_SECONDS = 15.0  # after a call of a map has ended, until its worker has surely reported the room
IN_FLIGHT = 16  # calls of one map at a time

_ENDED: frozenset[wire.CallState] = frozenset({"finished", "failed", "cancelled"})


class ClientSettings(msgspec.Struct, frozen=True):
    """Environment variables of the client, read at each call."""

    router_url: RouterUrl = DEFAULT_ROUTER_URL  # the router that places the calls
    auth_token: str = ""  # what the router's AUTH_TOKEN is
    router_ca: str | None = None  # for an https router: a file of certificates (PEM) to trust alone
    resources: str = "resources.toml"  # what `resource` goes by outside of a sandbox


class Options(TypedDict, total=False):
    """Keywords of `remote`. Sizes are bytes or text such as `512Mi`; times are seconds."""

    gpu: bool
    memory: int | str | None
    max_memory: int | str | None
    gpu_memory: int | str | None
    max_gpu_memory: int | str | None
    packages: list[str] | tuple[str, ...]
    session_id: str | None
    checkpoint_id: str | None
    cold: bool
    retry: bool
    timeout: float | None
    queue_timeout: float


_SIZES = ("memory", "max_memory", "gpu_memory", "max_gpu_memory")


class _Mark(Protocol):
    """What `remote(memory="2Gi")` gives: a decorator."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> "Remote[P, R]": ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> "Remote[P, R]": ...


@overload
def remote(function: Callable[P, Coroutine[Any, Any, R]], /, **options: Unpack[Options]) -> "Remote[P, R]": ...
@overload
def remote(function: Callable[P, R], /, **options: Unpack[Options]) -> "Remote[P, R]": ...
@overload
def remote(**options: Unpack[Options]) -> _Mark: ...
def remote(function: Any = None, /, **options: Any) -> Any:
    """Marks a function to run on a worker: `@remote`, or `@remote(memory="2Gi", packages=["requests"])`.

    Raises, at once and for whatever is wrong with the options, `BadSize`, `BadBudget`, `BadRequirement`, `BadRequest`
    or TypeError; nothing is sent before the function is called.
    """
    template = _template(options)
    if function is None:
        return lambda marked: Remote(marked, template)
    return Remote(function, template)


def _template(options: Mapping[str, Any]) -> wire.CallRequest:
    """The request of every call with these options, without function and payload."""
    accepted = Options.__annotations__
    for keyword in options:
        if keyword not in accepted:
            raise TypeError(f"remote() takes no keyword {keyword!r}. It takes {', '.join(accepted)}.")
    fields: dict[str, Any] = dict(options)
    for keyword in _SIZES:
        if fields.get(keyword) is not None:
            try:
                fields[keyword] = parse_size(fields[keyword])
            except BadSize as error:
                raise BadSize(f"{keyword}: {error.detail}") from None
    for start in ("memory", "gpu_memory"):
        budget, most = fields.get(start), fields.get(f"max_{start}")
        if budget is not None and most is not None and most < budget:
            message = f"max_{start}={options[f'max_{start}']!r} is below {start}={options[start]!r}"
            raise BadBudget(message)
    packages = fields.get("packages", ())
    if not isinstance(packages, list | tuple):
        raise BadRequirement(f"packages={packages!r} is not a list", 'Write packages=["numpy>=1.26"].')
    fields["packages"] = [str(parse_requirement(package)) for package in packages]
    if fields.get("cold") and fields.get("checkpoint_id") is not None:
        raise BadRequest("checkpoint_id and cold=True exclude each other", "Give one of the two.")
    pinned = fields.get("checkpoint_id")
    if isinstance(pinned, str) and ("\0" in pinned or pinned.encode(errors="replace").decode() != pinned):
        raise BadRequest(f"checkpoint_id={pinned!r}: it has characters that no id has", "Pin an id of the catalogue.")
    try:
        return msgspec.convert({"payload": b"", "python": PYTHON, **fields}, wire.CallRequest)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        keyword = place.rstrip("`").partition("[")[0]
        message = f"{keyword}={options[keyword]!r}: {reason[:1].lower()}{reason[1:]}" if keyword in options else reason
        raise BadRequest(message, "help(readie.client.Options) lists what remote() takes.") from None


class Remote(Generic[P, R]):
    """A function that runs on a worker. `__wrapped__` is the function itself."""

    __wrapped__: Callable[P, Any]

    def __init__(self, function: Callable[P, Any], template: wire.CallRequest) -> None:
        if isinstance(function, Remote):  # marked again, with other options
            function = function.__wrapped__
        if not callable(function) and not isinstance(function, classmethod):  # which __get__ will bind
            raise TypeError(f"remote() marks functions, and {function!r} is not callable")
        functools.update_wrapper(self, function)
        self.template = msgspec.structs.replace(template, function=_name(function))

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the function on a worker and waits for its result."""
        return self.submit(*args, **kwargs).result()

    async def aio(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the function on a worker; cancelling the awaiting task cancels the call."""
        call: Call[R] = Call(await _drive_aio(_place(self.request(*args, **kwargs))), self.template.function)
        try:
            await _drive_aio(call.follow())
        except asyncio.CancelledError:
            with contextlib.suppress(ReadieError):
                await _drive_aio(_end(call.call_id))
            raise
        return call.answer()

    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> "Call[R]":
        """Places a call and returns at once: its `.result()` waits, its `.status` tells how it goes."""
        return Call(_drive(_place(self.request(*args, **kwargs))), self.template.function)

    def map(self, /, *iterables: Iterable[Any], in_flight: int = IN_FLIGHT) -> list[R]:
        """Calls the function on each element (on tuples, given several iterables); results in the same order.

        At most `in_flight` calls run at a time; one for which there is no room waits for the others. Those of a session
        run one after the other. The first failure cancels the rest and is raised. Progress is shown where stderr is a
        terminal.
        """
        if not iterables or in_flight < 1:
            raise TypeError(f"map() takes at least one iterable, and in_flight of 1 or more, not {in_flight}")
        sizes = [len(iterable) for iterable in iterables if isinstance(iterable, Sized)]
        total = min(sizes) if len(sizes) == len(iterables) else None
        requests = (self.request(*arguments) for arguments in zip(*iterables, strict=False))
        with _progress(self.template.function, total) as advance:
            return _Batch[R](in_flight if self.template.session_id is None else 1, advance).run(requests)

    def request(self, /, *args: Any, **kwargs: Any) -> wire.CallRequest:
        """What is sent for a call: function and arguments as a pickle, and the modules they ask for.

        Raises `BadFunction`, which names what cannot be sent.
        """
        # Looked at for each call: what a name of the module stands for may have changed since.
        reached = reach(functools.partial(self.__wrapped__, *args, **kwargs))
        if reached.absent:
            way_out = "Import it outside of the function: then what the function uses of it is sent along."
            raise BadFunction(
                f"{self.template.function} imports {', '.join(reached.absent)}, which only this machine has", way_out
            )
        payload = _pickle_call(self.template.function, (self.__wrapped__, args, kwargs), reached)
        return msgspec.structs.replace(self.template, payload=payload, modules=reached.modules[: wire.MAX_MODULES])

    def __get__(self, instance: object, owner: type | None = None) -> "Remote[..., R]":
        """As a method: bound to the instance (a class method to the class), which is sent along."""
        bind = getattr(type(self.__wrapped__), "__get__", None)
        bound = bind(self.__wrapped__, instance, owner) if bind else self.__wrapped__
        return self if bound is self.__wrapped__ else Remote(bound, self.template)

    def __reduce__(self) -> Any:
        # On a worker it is the function itself: calls from within a call run in place, and need no router.
        return operator.itemgetter(0), ((self.__wrapped__,),)

    def __repr__(self) -> str:
        return f"<remote {self.template.function}>"


def _name(function: Any) -> str:
    """What people know a function by."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name)[: wire.MAX_NAME]


# ---- the payload ----

_PICKLING = threading.RLock()  # which modules go by value is known to the whole process


def _reduce_code(code: types.CodeType) -> Any:
    """A code object with its file's name, which cloudpickle leaves out and a remote traceback needs."""
    kind, parts = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return kind, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, which also sends functions and classes of local modules by value, wherever it meets them."""

    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: io.BytesIO, members: Mapping[str, set[str] | None]) -> None:
        super().__init__(file)
        self.members = members
        self.registered: list[types.ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if issubclass(kind, types.ModuleType):
            if is_local(obj.__name__):
                return self.reduce_module(obj)
        elif kind is types.FunctionType and obj.__module__ is None:
            # Made by exec. cloudpickle would look for it in every module, and so load those that load at first use.
            return self._dynamic_function_reduce(obj)
        elif kind is types.FunctionType or issubclass(kind, type):
            module = sys.modules.get(str(obj.__module__))
            if module is not None and is_local(module.__name__) and module.__name__ != "__main__":
                self.register(module)
        return super().reducer_override(obj)

    def reduce_module(self, module: types.ModuleType) -> Any:
        """A local module by value: only what the function uses of it, where that is known."""
        used = self.members.get(module.__name__)
        content = {
            name: value
            for name, value in vars(module).items()
            if (name in used if used is not None else not name.startswith("__"))
        }
        return types.ModuleType, (module.__name__,), content

    def register(self, module: types.ModuleType) -> None:
        if module.__name__ not in list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self.registered.append(module)


def _dump(value: object, members: Mapping[str, set[str] | None]) -> bytes:
    with _PICKLING, io.BytesIO() as file:
        pickler = _Pickler(file, members)
        try:
            pickler.dump(value)
        finally:
            for module in pickler.registered:
                cloudpickle.unregister_pickle_by_value(module)
        return file.getvalue()


def _pickle_call(name: str, call: tuple[Any, tuple[Any, ...], dict[str, Any]], reached: Reached) -> bytes:
    try:
        return _dump(call, reached.members)
    except Exception as error:  # an object's own way of being pickled may raise anything
        culprit = _culprit(call, reached)
        message = f"{name} cannot be sent: " + (f"{culprit}: " if culprit else "") + _text(error)
        raise BadFunction(message) from error


def _culprit(call: tuple[Any, tuple[Any, ...], dict[str, Any]], reached: Reached) -> str:
    """Which of the things that a call takes along cannot be pickled; functions and classes are seen by their parts."""
    _, args, kwargs = call
    uses = [use for use in reached.uses if not isinstance(use[1], types.FunctionType | types.ModuleType | type)]
    uses += [(f"argument {place}", value) for place, value in enumerate(args, start=1)]
    uses += [(f"argument {keyword}", value) for keyword, value in kwargs.items()]
    for use, value in uses:
        try:
            _dump(value, reached.members)
        except Exception:  # noqa: BLE001 - as above
            return use
    return ""


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# ---- talking to the router ----


@dataclass(frozen=True)
class _Ask:
    """One request to the router."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    read_seconds: float  # until the answer must be there
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


#: A float is a pause in seconds. A request is answered, or a `httpx.RequestError` is thrown in.
_Steps = Generator[_Ask | float, httpx.Response, R]


def _place(request: wire.CallRequest) -> _Steps[wire.CallPlaced]:
    """Has the router place a call. A lost answer does not say whether it was placed: it is sent again under its key."""
    body = msgspec.msgpack.encode(request)
    waits = request.queue_timeout + (0.0 if request.session_id is None else TURN_SECONDS)
    ask = _Ask("POST", "/v1/calls", waits + ANSWER_SECONDS, body, {"Idempotency-Key": uuid4().hex})
    return (yield from _persist(ask, wire.CallPlaced, to_begin=True))


def _look(call_id: str, seconds: float, seen: int, *, given_up: Callable[[], bool]) -> _Steps[wire.CallStatus]:
    """Waits up to `seconds` for news of a call, also across a restart of the router."""
    ask = _Ask("GET", f"/v1/calls/{call_id}?wait={seconds:g}&seen={seen}", seconds + ANSWER_SECONDS)
    return (yield from _persist(ask, wire.CallStatus, given_up=given_up))


def _persist(
    ask: _Ask, kind: type[T], *, given_up: Callable[[], bool] = lambda: False, to_begin: bool = False
) -> _Steps[T]:
    """The answer to a request that may be sent again while the router or its database is away for a short time.

    `to_begin`: where not even a connection is had at first, there is no router, and the caller hears it at once.
    """
    deadline = None
    while True:
        try:
            return read_answer((yield from _ask(ask)), kind)
        except RouterStopping:  # another may take its place: each has its time
            deadline = time.monotonic() + RECONNECT_SECONDS
        except (RouterUnreachable, DatabaseUnavailable) as error:
            none = to_begin and deadline is None and isinstance(error.__cause__, httpx.ConnectError)
            other = isinstance(error, RouterUnreachable) and error.__cause__ is None  # something else answers there
            if none or other or given_up() or (deadline is not None and time.monotonic() > deadline):
                raise
            deadline = deadline or time.monotonic() + RECONNECT_SECONDS
        yield 0.5


def _end(call_id: str) -> _Steps[None]:
    """Cancels a call; one that has ended stays as it is."""
    answer = yield from _ask(_Ask("DELETE", f"/v1/calls/{call_id}", 5.0))
    if answer.is_error:
        read_answer(answer, wire.CallStatus)


def _ask(ask: _Ask) -> _Steps[httpx.Response]:
    """The answer to a request. One that the router put off it did nothing of: it is sent again, for some time."""
    deadline = time.monotonic() + RATE_SECONDS
    while True:
        try:
            answer = yield ask
        except httpx.RequestError as error:
            raise unreachable(read_client_settings().router_url, error) from error
        pause = retry_after(answer)
        if answer.status_code != RateLimited.status or time.monotonic() + pause > deadline:
            return answer
        yield pause


def read_client_settings() -> ClientSettings:
    return read_settings(ClientSettings, os.environ)


def _connection() -> dict[str, Any]:
    """What a HTTP client is made of, for the router that the environment names now."""
    settings = read_client_settings()
    check_token("AUTH_TOKEN", settings.auth_token)
    options = connection(settings.router_url, settings.auth_token, settings.router_ca)
    options["headers"] |= {"Accept": f"{MESSAGEPACK}, application/problem+json", "Content-Type": MESSAGEPACK}
    return options


def _timeout(ask: _Ask) -> httpx.Timeout:
    return httpx.Timeout(ANSWER_SECONDS, connect=10.0, read=ask.read_seconds)


def _drive(steps: _Steps[T]) -> T:
    with httpx.Client(**_connection()) as http:
        try:
            step = next(steps)
            while True:
                if isinstance(step, float):
                    time.sleep(step)
                    step = next(steps)
                    continue
                try:
                    answer = http.request(
                        step.method, step.path, content=step.body, headers=step.headers, timeout=_timeout(step)
                    )
                except httpx.RequestError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


async def _drive_aio(steps: _Steps[T]) -> T:
    async with httpx.AsyncClient(**_connection()) as http:
        try:
            step = next(steps)
            while True:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    step = next(steps)
                    continue
                try:
                    answer = await http.request(
                        step.method, step.path, content=step.body, headers=step.headers, timeout=_timeout(step)
                    )
                except httpx.RequestError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


# ---- a call ----


class Call(Generic[R]):
    """One call that was placed. `placed` says where, and which packages its root filesystem has."""

    def __init__(self, placed: wire.CallPlaced, function: str) -> None:
        self.placed = placed
        self.function = function
        self.given_up = False
        self._status: wire.CallStatus | None = None
        self._placement_id = placed.placement.placement_id
        self._printed = 0  # pieces of its output

    @property
    def call_id(self) -> str:
        return self.placed.call_id

    @property
    def status(self) -> wire.CallStatus:
        """How the call stands now: state, placement, and once it has ended its result with the seconds of each phase."""
        return self._status if self._status and self._status.state in _ENDED else _drive(self.look(0.0))

    def result(self) -> R:
        """Waits for the value that the function returns.

        Raises what the function raised, with the remote traceback as a note, or the `ReadieError` that says why there
        is no result. Interrupted, it cancels the call.
        """
        try:
            _drive(self.follow())
        except (KeyboardInterrupt, SystemExit):
            with contextlib.suppress(ReadieError):
                self.cancel()
            raise
        return self.answer()

    def cancel(self) -> None:
        """Ends the call, if it has not ended; `result` then raises `CallCancelled`."""
        self.given_up = True
        _drive(_end(self.call_id))

    def follow(self) -> _Steps[wire.CallStatus]:
        """Until the call has ended, and prints its output meanwhile."""
        status = self._status
        while status is None or status.state not in _ENDED:
            status = yield from self.look(POLL_SECONDS)
        return status

    def look(self, seconds: float) -> _Steps[wire.CallStatus]:
        status = yield from _look(self.call_id, seconds, self._printed, given_up=lambda: self.given_up)
        if status.placement and status.placement.placement_id != self._placement_id:  # placed again: it begins anew
            self._placement_id, self._printed = status.placement.placement_id, 0
            if status.output_from:
                status = yield from _look(self.call_id, 0.0, 0, given_up=lambda: self.given_up)
        news = status.output[max(0, self._printed - status.output_from) :]
        self._printed += len(news)
        self._status = status
        for piece in news:
            _show(piece)
        return status

    def answer(self) -> R:
        """The value of a call that has ended, or what it raised."""
        assert self._status is not None
        result = self._status.result or wire.Result(outcome="failed")
        problem = result.problem or wire.Problem(type="", title="")
        said = problem.detail or problem.title
        if result.outcome == "cancelled" or (self._status.state == "cancelled" and result.outcome == "failed"):
            raise CallCancelled(said or f"{self.function} was cancelled")
        if result.outcome == "failed":
            known = problem_from(problem.type, said, problem.way_out)
            raise known if problem.type else CallError(said or f"{self.function} ended without a result")
        if result.python != PYTHON:
            there = f"Python {result.python}" if result.python else "an unnamed Python version"
            raise PythonMismatch(f"{self.function} ran on {there}, and this is Python {PYTHON}")
        if result.outcome == "raised":
            raise self.remote_exception(result, problem)
        try:
            value: R = pickle.loads(result.payload)  # noqa: S301 - from the worker that ran the caller's function
        except Exception as error:
            way_out = "Return values whose modules are installed here, too."
            message = f"the result of {self.function} cannot be unpickled here: {_text(error)}"
            raise BadResult(message, way_out) from error
        return value

    def remote_exception(self, result: wire.Result, problem: wire.Problem) -> BaseException:
        """What the function raised, or a `RemoteError` that describes it where that cannot be raised here."""
        error: BaseException | None = None
        if result.payload:
            with contextlib.suppress(Exception):
                error = pickle.loads(result.payload)  # noqa: S301 - as above
        if not isinstance(error, Exception):  # SystemExit, too, ends the remote process and not this one
            error = RemoteError(": ".join(filter(None, [problem.title, problem.detail])))
        if problem.traceback:
            where = f" on {self._status.placement.worker_id}" if self._status and self._status.placement else ""
            error.add_note(f"\nRemote traceback of {self.function}{where}:\n{problem.traceback.rstrip()}")
        return error


def _show(piece: wire.OutputPiece) -> None:
    stream = sys.stdout if piece.stream == "stdout" else sys.stderr
    try:
        stream.write(piece.text)
    except UnicodeEncodeError:  # this terminal has fewer characters than the worker
        stream.write(piece.text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
    stream.flush()


# ---- many calls ----


class _Batch(Generic[R]):
    """Calls of one `map`: a thread for each that is in flight."""

    def __init__(self, in_flight: int, advance: Callable[[], None]) -> None:
        self.in_flight = in_flight
        self.advance = advance
        self.room = threading.Semaphore(in_flight)
        self.changed = threading.Condition()
        self.running: set[Call[R]] = set()
        self.busy = 0  # calls that run, or are being placed
        self.ended_at = -math.inf
        self.stopped = False

    def run(self, requests: Iterable[wire.CallRequest]) -> list[R]:
        futures: list[Future[R]] = []
        with ThreadPoolExecutor(self.in_flight, thread_name_prefix="readie-map") as pool:
            try:
                for request in requests:
                    # In short waits: an interrupt that comes just before a long one would be seen only after it.
                    while not self.room.acquire(timeout=0.2):
                        pass
                    if self.stopped:
                        break
                    futures.append(pool.submit(self.call, request))
                while not self.stopped and wait(futures, 0.2, FIRST_EXCEPTION).not_done:
                    pass
            finally:
                self.stop()
        failures = [failure for future in futures if (failure := future.exception())]
        if failures:
            raise next((failure for failure in failures if not isinstance(failure, CallCancelled)), failures[0])
        return [future.result() for future in futures]

    def call(self, request: wire.CallRequest) -> R:
        """Places one call and waits for its result, in a thread of the pool."""
        call: Call[R] | None = None
        try:
            call = self.place(request)
            value = call.result()
        except BaseException:
            self.stopped = True
            raise
        finally:
            with self.changed:
                if call is not None:
                    self.running.discard(call)
                    self.busy -= 1
                    self.ended_at = time.monotonic()
                self.changed.notify_all()
            self.room.release()
        self.advance()
        return value

    def place(self, request: wire.CallRequest) -> Call[R]:
        while not self.stopped:
            with self.changed:
                self.busy += 1
            try:
                call: Call[R] = Call(_drive(_place(request)), request.function)
            except ReadieError as error:
                with self.changed:
                    self.busy -= 1
                    own = self.busy or time.monotonic() - self.ended_at < SETTLE_SECONDS
                    if not (isinstance(error, NoCapacity) and own):
                        raise  # it is not this map's own calls that take the room
                    self.changed.wait(1.0)
                continue
            with self.changed:
                self.running.add(call)
            if self.stopped:  # in the meantime
                call.cancel()
            return call
        raise CallCancelled("another call of the same map failed")

    def stop(self) -> None:
        """Cancels what still runs."""
        with self.changed:
            self.stopped = True
            running = list(self.running)
            self.changed.notify_all()
        for call in running:
            with contextlib.suppress(ReadieError):
                call.cancel()


@contextlib.contextmanager
def _progress(name: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A progress bar where stderr is a terminal; gives what is to be called for each call that is done."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # What calls print goes above the bar, unless it goes elsewhere.
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty()) as progress:
        task = progress.add_task(name, total=total)
        yield lambda: progress.advance(task)
