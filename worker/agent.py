"""The agent: speaks for this worker to the router. Reports, fetches placements, runs them, sends what came of them.

It dials in; nothing ever connects to it. One thread reports, one polls, and each call has a thread of its own.
"""

import fcntl
import logging
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from uuid import uuid4

import msgspec
import structlog

from readie.errors import (
    BadResult,
    BadSetting,
    CallCancelled,
    DatabaseUnavailable,
    InstallFailed,
    NeedsGpu,
    PayloadTooLarge,
    PythonMismatch,
    ReadieError,
    ResultTooLarge,
    RouterUnreachable,
    SandboxFailed,
    SessionExpired,
    UnknownPlacement,
    UnknownWorker,
    WorkerLost,
)
from readie.flavor import Flavor, check_gpu
from readie.logs import log_to_stderr
from readie.manifest import Description
from readie.wire import (
    MAX_SECONDS,
    REPORT_SECONDS,
    Assignment,
    HeldGeneration,
    Orders,
    Result,
    SandboxStatus,
    Started,
    WorkerState,
    WorkerStatus,
    problem_of,
)
from worker.checkpoints import Held, find_checkpoints
from worker.host import open_runtime
from worker.output import OutputSender
from worker.pool import Pool
from worker.router import Router, persist
from worker.runsc import Options, end_orphans
from worker.runtime import (
    UNLIMITED,
    Call,
    Dropped,
    Folder,
    Runtime,
    StartFailed,
    Stop,
    Talk,
    Ties,
    Trial,
    ended_result,
    open_sandbox,
    run_in,
    try_start,
)
from worker.settings import WorkerSettings, read_worker_settings
from worker.specification import Limits
from worker.wheels import Sources, fetch_wheels

SETTLE_S = 0.05  # changes that come together are reported together
LATER_S = 1.0  # for the beginning and end of a call: its placement and result have told of them
POLL_S = 20.0
MAX_FAILURES = 3  # of a checkpoint; then it is no longer offered
LEAVE_S = 2.0  # how long a worker that leaves tries to say so
FAREWELL_S = 10.0  # how long a worker that stops tries to reach a router that is away
REAP_S = 1.0  # how often sessions are looked at

log = structlog.get_logger("readie.worker")


@dataclass(eq=False)
class Run:
    """A placement that this worker has, and its sandbox."""

    assignment: Assignment
    arrived: float  # time.monotonic()
    limit: int  # bytes that its sandbox may use now
    stop: Stop
    sandbox_id: str = field(default_factory=lambda: uuid4().hex[:16])
    settled: threading.Event = field(default_factory=threading.Event)  # accepted, or not to be run
    session: "Session | None" = None  # whose sandbox it runs in

    @property
    def placement_id(self) -> str:
        return self.assignment.placement_id


@dataclass(eq=False)
class Session:
    """A sandbox that is kept for the calls of a session, one at a time."""

    session_id: str
    sandbox_id: str
    talk: Talk
    started: Started  # what it started from
    limit: int  # bytes that it may use now
    max_memory: int  # what that may grow to
    gpu_memory: int  # bytes
    idle_since: float = 0.0  # time.monotonic()
    run: Run | None = None  # the call that it runs now
    over: bool = False  # it ends with the call that it runs


class Agent:
    """One worker. `serve` runs it until `stop` is called."""

    def __init__(self, settings: WorkerSettings, runtime: Runtime, router: Router) -> None:
        self.settings = settings
        self.runtime = runtime
        self.router = router
        self.sources = Sources(
            settings.packages_index, Path(settings.packages_wheels) if settings.packages_wheels else None
        )
        self.description: Description = runtime.describe()
        self.incarnation = uuid4().hex
        self.lock = threading.RLock()
        self.state: WorkerState = "starting"
        self.base_memory = 0
        self.offered: dict[tuple[str, str], Held] = {}
        self.loaded_bytes: dict[tuple[str, str], int] = {}
        self.absent: dict[tuple[str, str], str] = {}  # held, but not to be restored now: why
        self.failures: Counter[tuple[str, str]] = Counter()
        self.runs: dict[str, Run] = {}
        self.telling: set[str] = set()  # placements that have ended, and whose results are on their way
        self.sessions: dict[str, Session] = {}
        self.changed = threading.Event()  # something to report
        self.passed = False  # something to report that can wait a little
        self.reported = threading.Event()  # the router knows this worker
        self.idle = threading.Condition(self.lock)
        self.stopping = threading.Event()
        self.closing = False
        self.hurried = False  # stopped twice
        self.reporting = threading.Lock()  # reports are sent one after the other
        self.reports = 0  # made so far
        self.away = ""  # why the router was not reached last
        self.accepting = ThreadPoolExecutor(16, thread_name_prefix="accept")
        self.pool = Pool(
            runtime,
            settings.pool_size,
            settings.start_timeout,
            room=self.room,
        )

    # -- start and stop --

    def serve(self) -> None:
        """Runs until `stop`; then finishes what runs. Returns when nothing does."""
        self.check_sandboxes()
        threading.Thread(target=self.report_forever, name="report", daemon=True).start()
        self.load_checkpoints()
        with self.lock:
            if not self.stopping.is_set():
                self.state = "ready"
        self.changed.set()
        log.info(
            "ready",
            worker_id=self.settings.worker_id,
            flavor=self.settings.worker_flavor.value,
            python=self.description.host.python,
            checkpoints=len(self.offered),
            router=self.settings.router_url,
        )
        threading.Thread(target=self.poll_forever, name="poll", daemon=True).start()
        while not self.stopping.wait(REAP_S):
            self.end_sessions(self.is_to_end)
        with self.lock:
            running = len(self.runs)
        log.info("stopping", running=running)
        self.say_removed()
        with self.idle:
            self.idle.wait_for(lambda: not self.runs and not self.telling)
        self.end_sessions(lambda _: True)
        self.pool.close()
        self.say_removed()
        self.closing = True
        self.changed.set()
        self.accepting.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Stops taking calls; called again, ends what still runs."""
        with self.lock:
            again = self.stopping.is_set()
            self.state = "removed"
            self.stopping.set()
            if again:
                self.hurried = True
                for run in self.runs.values():
                    run.stop.set(WorkerLost("the worker was stopped while it ran the call"))

    def say_removed(self) -> None:
        deadline = time.monotonic() + LEAVE_S
        try:
            persist(self.report, lambda: self.hurried or time.monotonic() > deadline)
        except ReadieError as error:
            log.warning("the router was not told that this worker leaves", reason=error.detail)

    def patience(self) -> Callable[[], bool]:
        """Whether to stop waiting for a router that is away: never, but not for long once this worker leaves."""
        leaving_since = 0.0

        def over() -> bool:
            nonlocal leaving_since
            if self.stopping.is_set() and not leaving_since:
                leaving_since = time.monotonic()
            return self.hurried or (leaving_since > 0 and time.monotonic() > leaving_since + FAREWELL_S)

        return over

    def check_sandboxes(self) -> None:
        """Starts one sandbox, cold: a root filesystem that cannot do that ends the agent here. Raises `SandboxFailed`."""
        self.base_memory = start_one(self.runtime, self.python_minor, self.settings.start_timeout).bytes

    def load_checkpoints(self) -> None:
        """Makes every checkpoint that is this worker's ready to restore, a few at a time."""
        if self.settings.checkpoint_dir is None:
            log.warning("CHECKPOINT_DIR is not set: every call starts cold")
            return
        folder = Path(self.settings.checkpoint_dir)
        held, warnings = find_checkpoints(folder, self.description.host, self.settings.worker_flavor)
        for warning in warnings:
            log.warning(warning)
        with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1)), thread_name_prefix="load") as pool:
            list(pool.map(self.load, held))
        with self.lock:
            taken = sum(self.loaded_bytes.values())
        total = self.settings.worker_mem_total
        if total is not None and taken >= total:
            raise BadSetting(
                f"WORKER_MEM_TOTAL={total}: the checkpoints alone take {taken} bytes",
                "Raise it, or offer fewer checkpoints.",
            )

    def load(self, held: Held) -> None:
        """Makes one checkpoint ready, and offers it."""
        if self.stopping.is_set():
            return
        key = held.spec.key
        try:
            taken = self.runtime.load(held.spec, held.folder, timeout=self.settings.load_timeout)
        except (StartFailed, OSError) as error:
            self.note_failure(held, str(error), loading=True)
            return
        with self.lock:
            self.offered[key] = held
            self.loaded_bytes[key] = taken
            self.absent.pop(key, None)
        self.pool.offer(held.spec)
        self.changed.set()

    def note_failure(self, held: Held, reason: str, *, loading: bool = False) -> None:
        """A checkpoint that fails is made ready again, and given up after some failures."""
        key = held.spec.key
        with self.lock:
            if self.offered.pop(key, None) is None and not loading:
                return  # another call has seen to it
            self.loaded_bytes.pop(key, None)
            self.failures[key] += 1
            last = self.failures[key] >= MAX_FAILURES
            self.absent[key] = f"it failed {MAX_FAILURES} times, at last: {reason}" if last else f"it failed: {reason}"
        self.pool.withdraw(held.spec)
        self.changed.set()
        if last:
            log.warning("checkpoint no longer offered", checkpoint=held.name, failures=MAX_FAILURES, reason=reason)
            self.runtime.unload(held.spec)
        else:
            log.warning("checkpoint failed", checkpoint=held.name, reason=reason)
            threading.Thread(target=self.load, args=[held], name=f"load {held.spec.checkpoint_id}", daemon=True).start()

    # -- reporting --

    @property
    def python_minor(self) -> str:
        return self.description.host.python_minor

    @property
    def memory_total(self) -> int | None:
        """What sandboxes may use together: the worker's total less what zygotes hold. The pool gives way, and counts not."""
        total = self.settings.worker_mem_total
        taken = sum(self.loaded_bytes.values()) + self.runtime.overhead
        return None if total is None else max(1, total - taken)

    def room(self, but: Run | None = None) -> int:
        """Bytes that sandboxes may use besides what the limits of all, `but` one, allow together."""
        with self.lock:
            total = self.memory_total
            used = sum(one.memory for one in self.living() if but is None or one.sandbox_id != but.sandbox_id)
        return UNLIMITED if total is None else total - used

    def status(self) -> WorkerStatus:
        """This worker as it is now."""
        with self.lock:
            generations: dict[str, list[Held]] = {}
            for held in self.offered.values():
                generations.setdefault(held.spec.generation, []).append(held)
            return WorkerStatus(
                flavor=self.settings.worker_flavor,
                state=self.state,
                python=self.description.host.python,
                markers=self.description.markers,
                runtime=self.settings.runtime,
                memory_total=self.memory_total,
                gpu_total=self.settings.worker_gpu_total,
                max_sandboxes=self.settings.worker_max_sandboxes,
                base_memory=self.base_memory,
                sandboxes=self.living(),
                generations=[
                    HeldGeneration(
                        generation=generation,
                        checkpoint_ids=[held.spec.checkpoint_id for held in group],
                        restore_fixed=group[0].manifest.restore_fixed_s,
                        cold_fixed=group[0].manifest.cold_fixed_s,
                    )
                    for generation, group in generations.items()
                ],
                incarnation=self.incarnation,
                report=self.reports,
            )

    def living(self) -> list[SandboxStatus]:
        """Every sandbox that this worker has, or starts for a call, once: a session is its call's while that runs."""
        found: dict[str, SandboxStatus] = {}
        with self.lock:
            for session in self.sessions.values():
                found[session.session_id] = SandboxStatus(
                    sandbox_id=session.sandbox_id,
                    session_id=session.session_id,
                    memory=session.limit,
                    gpu_memory=session.gpu_memory,
                )
            for run in self.runs.values():
                if run.assignment.continues and run.session is None:
                    continue  # it waits for the session's sandbox, which is counted already
                found[run.assignment.session_id or run.sandbox_id] = SandboxStatus(
                    sandbox_id=run.sandbox_id,
                    placement_id=run.placement_id,
                    session_id=run.assignment.session_id,
                    memory=run.limit,
                    gpu_memory=run.assignment.gpu_memory,
                )
        return list(found.values())

    def report(self) -> None:
        with self.reporting:
            self.reports += 1
            self.router.report(self.status())
        (self.settings.folder / "reported").touch()  # a sign of life, for whoever watches this worker from outside

    def report_forever(self) -> None:
        """Reports every 10 seconds and at each change."""
        due = 0.0
        while not self.closing:
            if not self.changed.wait(LATER_S) and not self.passed and time.monotonic() < due:
                continue
            time.sleep(SETTLE_S)
            self.changed.clear()
            self.passed = False
            if self.closing:
                return
            try:
                for held in list(self.offered.values()):
                    if not self.runtime.alive(held.spec):
                        self.note_failure(held, "its zygote has ended")
                self.report()
            except ReadieError as error:
                self.note_away(error)
                due = 0.0
            except Exception:  # such as no descriptors left: a worker that reports no more would be lost
                log.exception("report failed")
                due = 0.0
            else:
                self.note_back()
                self.reported.set()
                due = time.monotonic() + REPORT_SECONDS

    def note_away(self, error: ReadieError) -> None:
        if self.away != error.slug and not self.closing:
            event = "router not reached" if isinstance(error, RouterUnreachable) else "router refused"
            log.warning(event, reason=error.detail or error.title, way_out=error.hint)
        self.away = error.slug

    def note_back(self) -> None:
        if self.away:
            log.info("router reached again")
        self.away = ""

    # -- placements --

    def poll_forever(self) -> None:
        """Fetches what there is to do, and does it."""
        while not self.closing:
            if not self.reported.wait(1.0):
                continue
            try:
                orders = self.router.fetch(POLL_S)
                self.note_back()
                if not self.follow(orders, time.monotonic()):
                    time.sleep(0.05)  # all of it is under way: the router repeats orders until they are carried out
            except UnknownWorker:
                self.reported.clear()  # the router has forgotten this worker
                self.changed.set()
            except ReadieError as error:
                self.note_away(error)
                time.sleep(1.0)
            except Exception:
                log.exception("polling failed")
                time.sleep(1.0)

    def follow(self, orders: Orders, arrived: float) -> bool:
        """Starts what is to run, ends what is to end; False if nothing of it was new."""
        started = []
        news = not (orders.run or orders.cancel or orders.end_sessions)
        if orders.end_sessions:
            named = set(orders.end_sessions)
            news |= self.end_sessions(lambda session: session.session_id in named, with_calls=True)
            self.changed.set()  # of one that this worker does not have, its report says so
        for assignment in orders.run:
            with self.lock:
                # Answers may cross: one that still names a placement can come when that has ended here.
                known = assignment.placement_id in self.runs or assignment.placement_id in self.telling
                if known or self.stopping.is_set():
                    continue
                run = Run(assignment, arrived, assignment.memory, Stop())
                self.runs[run.placement_id] = run
            try:
                threading.Thread(target=self.run, args=[run], name=f"call {assignment.call_id}").start()
            except RuntimeError as error:  # no thread is to be had: the router places the call again
                log.warning("placement dropped", placement_id=run.placement_id, reason=str(error))
                with self.idle:
                    del self.runs[run.placement_id]
                    self.idle.notify_all()
                run.stop.close()
                continue
            started.append(run)
        for placement_id in orders.cancel:
            with self.lock:
                running = self.runs.get(placement_id)
            news |= running is None or running.stop.problem is None
            if running:
                running.stop.set(CallCancelled(f"{running.assignment.call_id} was cancelled"))
            else:
                self.send_result(
                    placement_id,
                    ended_result(CallCancelled("the worker does not know the placement (any more)")),
                    go_on=False,  # with these orders, first
                )
        for run in started:
            run.settled.wait(5.0)
        return news or bool(started)

    def run(self, run: Run) -> None:
        """Runs one placement from its arrival to its result, in a thread of its own."""
        assignment = run.assignment
        sender = OutputSender(
            lambda output: persist(lambda: self.router.output(run.placement_id, output), self.patience()),
            self.settings.max_output,
        )
        result: Result | None
        accepted = self.start_accepting(run)
        try:
            result = self.execute(run, sender, accepted)
        except Dropped:
            result = None
        except Exception as error:  # a fault of the worker's own must not leave the caller waiting
            log.exception("call failed in the worker", call_id=assignment.call_id)
            result = ended_result(SandboxFailed(f"the worker failed: {type(error).__name__}: {error}"))
        if not accepted():  # also where it failed before that was asked: it is somebody else's to end
            result = None
        sender.finish()
        with self.lock:
            self.telling.add(run.placement_id)
        try:
            self.leave(run)  # told together with the result, or before: the router counts no memory twice
            if result is not None:
                self.tell(run, result)
        finally:
            with self.lock:
                self.telling.discard(run.placement_id)
        self.note_call(run)
        run.stop.close()
        with self.idle:
            self.idle.notify_all()

    def tell(self, run: Run, result: Result) -> None:
        """Sends a call's result, and logs it."""
        queued = msgspec.structs.replace(result.phases, queue=run.assignment.queue)
        result = msgspec.structs.replace(result, phases=queued, python=result.python or self.python_minor)
        self.send_result(run.placement_id, result)
        log.info(
            "call ended",
            call_id=run.assignment.call_id,
            function=run.assignment.function,
            outcome=result.outcome,
            started=result.started.how if result.started else None,
            checkpoint=result.started.checkpoint_id if result.started else None,
            ready_s=round(result.phases.ready, 4),
            run_s=round(result.phases.run, 4),
        )

    def start_accepting(self, run: Run) -> Callable[[], bool]:
        """Accepts a placement meanwhile; what is given waits for that, and says whether it is to be run."""
        try:
            return self.accepting.submit(self.accept, run).result
        except RuntimeError:  # no thread is to be had
            granted = self.accept(run)
            return lambda: granted

    def accept(self, run: Run) -> bool:
        """Tells the router that this worker runs the placement; False if it is not to.

        However long the router is away: it may have accepted, and its answer got lost. Then nobody else runs the call.
        """
        # One for a restore that fails, one until a cold sandbox answers, or a session's is free, one for all the rest.
        start_s = min(3 * self.settings.start_timeout, MAX_SECONDS)
        try:
            persist(
                lambda: self.router.accept(run.placement_id, self.incarnation, start_s),
                lambda: bool(run.stop.problem) or self.stopping.is_set(),
            )
        except ReadieError as error:
            log.info("placement dropped", placement_id=run.placement_id, reason=error.detail)
            return False
        finally:
            run.settled.set()
        self.note_call(run)
        return True

    def note_call(self, run: Run) -> None:
        """A call has begun or ended: of a session's sandbox the router knows by reports alone."""
        self.passed = True
        if run.assignment.session_id is not None:
            self.changed.set()

    def execute(self, run: Run, sender: OutputSender, accepted: Callable[[], bool]) -> Result:
        """The result of a placement. Raises `Dropped` if it is not to be run."""
        assignment = run.assignment
        refusal = self.refuse(assignment)
        if refusal is None and assignment.continues:
            session = self.enter_session(run)
            if session:
                return self.go_on(run, session, sender, accepted)
            refusal = SessionExpired(f"the sandbox of session {assignment.session_id} has ended")
        if refusal is None:
            held, fallback = self.choose(assignment)
            if held:
                try:
                    return self.attempt(run, held, None, sender, accepted)
                except StartFailed as error:
                    if error.blame:
                        self.note_failure(held, str(error))
                    fallback = f"{held.name} could not be restored: {error}"
            try:
                return self.attempt(run, None, fallback, sender, accepted)
            except StartFailed as error:
                refusal = SandboxFailed(f"no sandbox could be started: {error}")
        if not accepted():
            raise Dropped
        return ended_result(refusal)

    def refuse(self, assignment: Assignment) -> ReadieError | None:
        """Why this worker cannot run a call, before anything is started for it."""
        if assignment.gpu and self.settings.worker_flavor is not Flavor.GPU:
            return NeedsGpu("a GPU call came to a cpu worker")
        if assignment.python != self.python_minor:
            return PythonMismatch(f"the caller runs Python {assignment.python}, the worker {self.python_minor}")
        if len(assignment.payload) > self.settings.max_payload:
            return PayloadTooLarge(
                f"the payload has {len(assignment.payload)} bytes, MAX_PAYLOAD is {self.settings.max_payload}"
            )
        return None

    def choose(self, assignment: Assignment) -> tuple[Held | None, str | None]:
        """The checkpoint to restore; or none, and why that is not as ordered."""
        if assignment.checkpoint_id is None:
            return None, None
        key = (assignment.generation or "", assignment.checkpoint_id)
        with self.lock:
            held = self.offered.get(key)
            reason = self.absent.get(key, "this worker does not hold it")
        if held:
            return held, None
        return None, f"{assignment.checkpoint_id} of generation {key[0][:12]}: {reason}"

    def attempt(
        self, run: Run, held: Held | None, fallback: str | None, sender: OutputSender, accepted: Callable[[], bool]
    ) -> Result:
        """Runs the call in a sandbox of its own, restored or cold; a session keeps that, if the call ends well."""
        assignment = run.assignment
        call = self.call_of(assignment, assignment.memory, max(assignment.memory, assignment.max_memory))
        ties = self.tie(run, sender, accepted)
        started = Started(
            how="restored" if held else "cold",
            generation=held.spec.generation if held else None,
            checkpoint_id=held.spec.checkpoint_id if held else None,
            fallback=fallback,
        )
        talk = self.pool.take(held.spec) if held else None
        self.pool.give_way()  # the call's memory is taken by now
        if talk and talk.sandbox.memory() > call.memory:
            talk.close()
            talk = None
        waited = 0.0
        if talk is None:
            try:
                talk = open_sandbox(self.runtime, held.spec if held else None, call, ties)
            except ReadieError as error:
                return ended_result(error, started=started)
            waited = talk.started_s
        kept = False
        try:
            result = run_in(talk, call, ties, arrived=run.arrived, restore=waited)
            if assignment.session_id and lives_on(result):
                kept = self.keep(run, talk, call, started)
        finally:
            if not kept:
                talk.close()
        return msgspec.structs.replace(result, started=started, lives=kept if assignment.session_id else None)

    def call_of(self, assignment: Assignment, memory: int, max_memory: int) -> Call:
        """What a sandbox is asked to run, within limits in bytes."""
        return Call(
            payload=assignment.payload,
            python=assignment.python,
            modules=assignment.modules,
            memory=memory,
            max_memory=max_memory,
            timeout=assignment.timeout,
            start_timeout=self.settings.start_timeout,
            max_payload=self.settings.max_payload,
        )

    def tie(self, run: Run, sender: OutputSender, accepted: Callable[[], bool]) -> Ties:
        """What connects a placement's sandbox with this agent."""
        packages = run.assignment.packages
        deadline = time.monotonic() + self.settings.start_timeout

        def give_up() -> None:
            if run.stop.problem:
                raise run.stop.problem
            if time.monotonic() > deadline:
                raise InstallFailed(f"fetching wheels took longer than {self.settings.start_timeout:g} s")

        def fetch(folder: Folder) -> list[str]:
            return fetch_wheels(self.runtime.python, packages, folder.path / "wheels", self.sources, give_up)

        return Ties(
            stop=run.stop,
            on_output=sender.add,
            grow=lambda limit: self.grow(run, limit),
            permit=accepted,
            fetch=fetch if packages else None,
        )

    # -- sessions --

    def keep(self, run: Run, talk: Talk, call: Call, started: Started) -> bool:
        """Keeps the sandbox of a session's first call; False if this worker leaves.

        One that it still has of that id is none that the router knows: it ends, now or with its call.
        """
        assignment = run.assignment
        assert assignment.session_id is not None, "only a session's sandbox is kept"
        session = Session(
            session_id=assignment.session_id,
            sandbox_id=run.sandbox_id,
            talk=talk,
            started=started,
            limit=run.limit,
            max_memory=call.max_memory,
            gpu_memory=assignment.gpu_memory,
            idle_since=time.monotonic(),
            run=run,
        )
        with self.lock:
            if self.stopping.is_set():
                return False
            older = self.sessions.get(assignment.session_id)
            self.sessions[assignment.session_id] = session
            run.session = session
            if older:
                older.over = True
        if older and older.run is None:
            older.talk.close()
        return True

    def enter_session(self, run: Run) -> Session | None:
        """Takes the session's sandbox for a call; None if it has ended.

        A call that the router has given up may still be there, importing: it is dropped soon, and waited for.
        """
        deadline = time.monotonic() + self.settings.start_timeout
        with self.idle:
            while True:
                session = self.sessions.get(run.assignment.session_id or "")
                if session is None or session.over or time.monotonic() > deadline or run.stop.problem:
                    return None
                if session.run is None:
                    break
                self.idle.wait(0.1)
            if not session.talk.idle:
                return None
            session.run = run
            run.session, run.sandbox_id, run.limit = session, session.sandbox_id, session.limit
            return session

    def go_on(self, run: Run, session: Session, sender: OutputSender, accepted: Callable[[], bool]) -> Result:
        """Runs another call in a session's sandbox. One that does not end well ends the session."""
        call = self.call_of(run.assignment, session.limit, session.max_memory)
        ties = self.tie(run, sender, accepted)
        well = False
        try:
            result = run_in(session.talk, call, ties, arrived=run.arrived, restore=0.0)
            well = lives_on(result)
        except Dropped:
            well = True
            raise
        finally:
            session.over = session.over or not well
        return msgspec.structs.replace(result, started=session.started, lives=not session.over)

    def leave(self, run: Run) -> None:
        """Forgets a call that has ended, gives its session's sandbox back, or ends that."""
        over = None
        with self.lock:
            session = run.session
            if session and (session.over or self.stopping.is_set()):
                over = session
                over.over = True
        if over:
            over.talk.close()
        with self.idle:
            if over and self.sessions.get(over.session_id) is over:
                del self.sessions[over.session_id]
            if session and not over:
                session.run, session.limit, session.idle_since = None, run.limit, time.monotonic()
            del self.runs[run.placement_id]
            self.idle.notify_all()

    def is_to_end(self, session: Session) -> bool:
        """Whether an idle session's sandbox died, was idle for too long, or uses more than its calls were allowed."""
        if not session.talk.idle or session.talk.sandbox.starved():
            return True
        too_long = time.monotonic() > session.idle_since + self.settings.sandbox_idle_ttl
        return too_long or session.talk.sandbox.memory() > session.limit

    def end_sessions(self, which: Callable[[Session], bool], *, with_calls: bool = False) -> bool:
        """Ends the idle sessions that `which` names; whether there were any. `with_calls`: busy ones end with their call."""
        ended = []
        with self.lock:
            for session in list(self.sessions.values()):
                if session.run is not None:
                    session.over |= with_calls and which(session)
                elif not session.over and which(session):
                    session.over = True
                    ended.append(session)
        for session in ended:  # told of until they are gone: their memory is in use
            try:
                session.talk.close()
            except Exception:
                log.exception("a session's sandbox could not be ended", session_id=session.session_id)
            with self.lock:
                if self.sessions.get(session.session_id) is session:
                    del self.sessions[session.session_id]
        if ended:
            self.changed.set()
        return bool(ended)

    def grow(self, run: Run, limit: int) -> bool:
        """Whether a sandbox's limit may become `limit`: if this worker's memory allows it."""
        with self.lock:
            if limit > self.room(but=run):
                return False
            run.limit = limit
        self.pool.give_way()
        self.changed.set()
        return True

    def send_result(self, placement_id: str, result: Result, *, go_on: bool = True) -> None:
        """Sends how a placement ended, however long the router is away, and goes on with what there is to do next."""
        orders = Orders()
        try:
            orders = persist(lambda: self.router.result(placement_id, result), self.patience())
        except UnknownPlacement:
            log.info("result not wanted any more", placement_id=placement_id)
        except (RouterUnreachable, DatabaseUnavailable) as error:  # this worker leaves, and waits no longer
            log.warning("result not sent", placement_id=placement_id, reason=error.detail)
        except ReadieError as error:
            log.warning("result refused", placement_id=placement_id, reason=error.detail)
            if result.payload:
                refused = ResultTooLarge if isinstance(error, PayloadTooLarge) else BadResult
                problem = problem_of(refused(f"the router refused it: {error.detail}"))
                self.send_result(
                    placement_id, msgspec.structs.replace(result, outcome="failed", payload=b"", problem=problem)
                )
        if go_on:
            try:
                self.follow(orders, time.monotonic())
            except Exception:
                log.exception("orders not followed")


def lives_on(result: Result) -> bool:
    """Whether a sandbox can serve another call after this result: its executor has answered, and waits."""
    refused = {error("").type for error in (BadResult, ResultTooLarge, PythonMismatch)}
    return result.outcome in {"returned", "raised"} or (result.problem is not None and result.problem.type in refused)


def start_one(runtime: Runtime, python: str, timeout: float) -> Trial:
    """One cold start, as a trial. Raises `SandboxFailed`."""
    try:
        return try_start(runtime, None, python=python, timeout=timeout)
    except StartFailed as error:
        raise SandboxFailed(f"no sandbox can be started: {error}", "Check ROOTFS.") from error


# ---- the process ----


@contextmanager
def owned_folder(path: Path) -> Iterator[Path]:
    """WORKER_DIR, for this process alone. Raises `BadSetting` if it cannot be had."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != os.geteuid():
            raise BadSetting(f"WORKER_DIR={path} belongs to another user", "Set WORKER_DIR to a folder of your own.")
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadSetting(f"WORKER_DIR={path}: {error.strerror}", "Set it to a folder that can be written.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise BadSetting(
            f"WORKER_DIR={path} is in use by another worker", "Give each worker its own WORKER_ID or WORKER_DIR."
        ) from None
    else:
        yield path
    finally:
        os.close(lock)


def serve(environ: Mapping[str, str]) -> None:
    """`readie-worker serve`: runs until SIGTERM or Ctrl-C; a second one ends what still runs."""
    settings = read_worker_settings(environ)
    check_gpu(settings.worker_flavor)
    log_to_stderr(logging.INFO, settings.log_format)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # a sandbox takes about ten descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with owned_folder(settings.folder) as folder:
        (folder / "runtime").mkdir(mode=0o700, exist_ok=True)
        options = Options(
            flavor=settings.worker_flavor,
            network=settings.sandbox_network,
            limits=Limits(settings.sandbox_cpus, settings.sandbox_processes),
            ahead=settings.sandboxes_ahead,
        )
        runtime = open_runtime(settings.runtime, Path(settings.rootfs), folder / "runtime", options)
        if settings.packages_index or settings.packages_wheels:
            runtime.bring_pip()
        router = Router(settings)  # never closed: the last poll still waits when the process ends
        try:
            orphans = end_orphans(folder / "runtime") + runtime.remove_orphans()  # also of another runtime than now
            if orphans:
                log.warning("removed what an earlier run left", sandboxes=orphans)
            if settings.runtime == "fork":
                log.warning("fork isolates nothing: calls run as this user, with its files and network")
            run_until_signal(Agent(settings, runtime, router))
        finally:
            runtime.close()


def run_until_signal(agent: Agent) -> None:
    """Runs the agent in a thread; the main thread only waits for signals, which may come at any moment.

    Afterwards signals are ignored: the process only cleans up and ends, and whoever asks again must not cut that short.
    """
    ears, mouth = os.pipe()
    failures: list[BaseException] = []

    def body() -> None:
        try:
            agent.serve()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            failures.append(error)
        finally:
            os.write(mouth, b"e")

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        os.write(mouth, b"s")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    thread = threading.Thread(target=body, name="agent")
    thread.start()
    try:
        while os.read(ears, 1) == b"s":
            agent.stop()
        thread.join()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        os.close(ears)
        os.close(mouth)
    if failures:
        raise failures[0]
