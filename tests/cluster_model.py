"""What a router has to do (DESIGN §6), in plain Python, and what an agent does: for tests/test_cluster_machine.py.

`Router` has the statements of lease.sql, session.sql and placement.sql as loops over dictionaries; `Agent` has what
worker/agent.py keeps of its runs and sessions. Bytes and seconds are small numbers, and time passes when it is told to.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from app.settings import RouterSettings
from readie.errors import PlacementError, SandboxFailed, SessionExpired
from readie.flavor import Flavor
from readie.settings import Bytes
from readie.wire import (
    Assignment,
    CallRequest,
    HeldGeneration,
    Result,
    SandboxStatus,
    Started,
    WorkerStatus,
    problem_of,
)

PPM = 1_000_000
START, SETTLES, MOST_PLACEMENTS, MOST_RUNS = 300, 10, 3, 5
#: No sum of the seconds that pass in a test is near one of these, nor what the test itself takes.
TTL, ACCEPT, TIMEOUT = 1005.5, 305.5, 205.5
SETTINGS = RouterSettings(
    default_memory=Bytes(700), memory_headroom=0.9, worker_ttl=TTL, accept_timeout=ACCEPT, call_timeout=TIMEOUT
)


@dataclass
class Call:
    request: CallRequest
    memory: int
    gpu: bool
    gpu_memory: int | None  # None on a GPU call: the whole
    continues: bool = False
    state: str = "placed"
    outcome: str | None = None
    attempts: int = 1
    worker_id: str = ""
    started: str | None = None


@dataclass
class Lease:
    call_id: str
    worker_id: str
    flavor: Flavor
    memory: int
    gpu_memory: int
    session_id: str | None
    continues: bool
    began: float  # when it was placed, or accepted
    deadline: float
    incarnation: str | None = None  # None: not accepted


@dataclass(frozen=True)
class Sandbox:
    sandbox_id: str
    placement_id: str | None
    session_id: str | None
    memory: int
    gpu_memory: int


@dataclass
class Session:
    worker_id: str
    call_id: str
    incarnation: str | None = None
    settles: float | None = None
    expired: bool = False


@dataclass
class Worker:
    status: WorkerStatus
    heard: float
    sandboxes: list[Sandbox] = field(default_factory=list)


@dataclass
class Router:
    """The state tables and what may be done to them."""

    now: float = 0.0
    workers: dict[str, Worker] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)  # in the order in which they were placed
    sessions: dict[str, Session] = field(default_factory=dict)
    cancellations: dict[str, tuple[str, str | None, float]] = field(default_factory=dict)  # worker, session, time

    # -- what is taken --

    def sandbox_of(self, placement_id: str, lease: Lease) -> Sandbox | None:
        """The reported sandbox in which a lease's call runs: it counts instead of the lease."""
        worker = self.workers.get(lease.worker_id)
        for sandbox in worker.sandboxes if worker else ():
            same = (sandbox.session_id or sandbox.placement_id) == (lease.session_id or placement_id)
            session = sandbox.session_id is not None and (lease.continues or lease.incarnation is not None)
            if same and (sandbox.placement_id == placement_id or session):
                return sandbox
        return None

    def taken(self, worker_id: str) -> tuple[int, int, int]:
        """Bytes of memory, of GPU memory, and sandboxes."""
        held: list[Sandbox | Lease] = [*self.workers[worker_id].sandboxes]
        for placement_id, lease in self.leases.items():
            if lease.worker_id == worker_id and self.sandbox_of(placement_id, lease) is None:
                held.append(lease)
        return sum(each.memory for each in held), sum(each.gpu_memory for each in held), len(held)

    def has_sandbox(self, worker_id: str, session_id: str) -> bool:
        worker = self.workers.get(worker_id)
        return worker is not None and any(sandbox.session_id == session_id for sandbox in worker.sandboxes)

    # -- placing --

    def choose(self, call: Call) -> str:
        """The worker that takes a call, or why there is none."""
        ready = {
            name: worker
            for name, worker in self.workers.items()
            if worker.status.state == "ready" and worker.heard > self.now - TTL
        }
        if not ready:
            return "no-workers"

        def fits(name: str) -> bool:
            status = ready[name].status
            memory, gpu_memory, sandboxes = self.taken(name)
            if call.gpu and status.flavor is not Flavor.GPU:
                return False
            if status.memory_total is not None and (memory + call.memory) * PPM > status.memory_total * 900_000:
                return False
            if call.gpu and status.gpu_total is not None:
                if call.gpu_memory is None and gpu_memory > 0:
                    return False
                if call.gpu_memory is not None and (gpu_memory + call.gpu_memory) * PPM > status.gpu_total * 900_000:
                    return False
            return status.max_sandboxes == 0 or sandboxes < status.max_sandboxes

        def rank(name: str) -> tuple[int, int, int, str]:
            status = ready[name].status
            memory, _, _ = self.taken(name)
            spills = int(status.flavor is Flavor.GPU and not call.gpu)
            in_flight = sum(lease.worker_id == name for lease in self.leases.values())
            return spills, 0 if status.memory_total is None else memory * PPM // status.memory_total, in_flight, name

        fitting = [name for name in ready if fits(name)]
        if not fitting:
            return "no-capacity"
        best = min(fitting, key=rank)
        if call.request.checkpoint_id is not None and not ready[best].status.generations:
            return "unknown-checkpoint"
        return best

    def state_of(self, session_id: str) -> str | None:
        """Of a session: None where a call would begin it."""
        session = self.sessions.get(session_id)
        if session is None:
            return None
        if session.expired:
            return "expired"
        ending = any(
            (worker_id, ended) == (session.worker_id, session_id) for worker_id, ended, _ in self.cancellations.values()
        )
        if ending or any(lease.session_id == session_id for lease in self.leases.values()):
            return "busy"
        return None if session.incarnation is None else "idle"

    def place(self, call_id: str, request: CallRequest) -> str:
        """The worker that a new call goes to, or the problem."""
        gpu_memory = request.gpu_memory
        gpu = request.gpu or gpu_memory is not None
        call = Call(request, request.memory or 700, gpu, gpu_memory)
        if request.session_id is not None:
            self.expire(session_id=request.session_id)
            state = self.state_of(request.session_id)
            if state in ("expired", "busy"):
                return f"session-{state}"
            if state == "idle":
                session = self.sessions[request.session_id]
                first = self.calls[session.call_id]
                if self.conflicts(call, first, session):
                    return "session-conflict"
                call.continues = True
                call.memory, call.gpu, call.gpu_memory = first.memory, first.gpu, first.gpu_memory
                self.calls[call_id] = call
                return self.lease(call_id, call, session.worker_id)
        worker_id = self.choose(call)
        if worker_id in self.workers:
            self.calls[call_id] = call
            self.lease(call_id, call, worker_id)
        return worker_id

    def conflicts(self, call: Call, first: Call, session: Session) -> bool:
        asked, started_from = call.request, first.request.checkpoint_id
        whole = self.workers[session.worker_id].status.gpu_total
        most = first.gpu_memory or whole
        return bool(
            (call.gpu and not first.gpu)
            or (asked.memory and asked.memory > first.memory)
            or (first.gpu and asked.gpu_memory and most and asked.gpu_memory > most)
            or (asked.checkpoint_id and asked.checkpoint_id != started_from)
            or (asked.cold and started_from and first.started != "cold")
        )

    def lease(self, call_id: str, call: Call, worker_id: str) -> str:
        status = self.workers[worker_id].status
        whole = status.gpu_total or 0
        session_id = call.request.session_id
        call.worker_id, call.state = worker_id, "placed"
        self.leases[f"{call_id}-{call.attempts}"] = Lease(
            call_id=call_id,
            worker_id=worker_id,
            flavor=status.flavor,
            memory=call.memory,
            gpu_memory=0 if not call.gpu else whole if call.gpu_memory is None else call.gpu_memory,
            session_id=session_id,
            continues=call.continues,
            began=self.now,
            deadline=self.now + ACCEPT,
        )
        if session_id is not None and not call.continues:
            self.sessions[session_id] = Session(worker_id, call_id)
        return worker_id

    # -- what agents say --

    def report(self, worker_id: str, status: WorkerStatus) -> None:
        worker = self.workers.setdefault(worker_id, Worker(status, self.now))
        worker.status, worker.heard = status, self.now
        placements = {sandbox.placement_id for sandbox in status.sandboxes}
        sessions = {sandbox.session_id for sandbox in status.sandboxes if sandbox.session_id is not None}
        for placement_id, (on, _, ordered) in list(self.cancellations.items()):
            if on == worker_id and ordered < self.now - SETTLES and placement_id not in placements:
                del self.cancellations[placement_id]
        kept = [
            sandbox
            for sandbox in worker.sandboxes
            if sandbox.session_id is not None
            and sandbox.session_id not in sessions
            and (session := self.sessions.get(sandbox.session_id))
            and session.worker_id == worker_id
            and not session.expired
            and session.settles is not None
            and session.settles > self.now
        ]
        worker.sandboxes = kept + [
            Sandbox(each.sandbox_id, each.placement_id, each.session_id, each.memory, each.gpu_memory)
            for each in status.sandboxes
        ]
        busy = {lease.session_id for lease in self.leases.values()}
        for session_id in sessions - busy:
            if (session := self.sessions.get(session_id)) and session.worker_id == worker_id:
                session.settles = None
        self.expire(worker_id=worker_id)

    def orders(self, worker_id: str) -> tuple[list[str], list[str], list[str]] | None:
        """Placements to run and to cancel, sessions to end; None: the worker is not known."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return None
        run = [
            placement_id
            for placement_id, lease in self.leases.items()
            if lease.worker_id == worker_id
            and lease.incarnation is None
            and lease.flavor is worker.status.flavor
            and worker.status.state == "ready"
        ]
        cancel = [placement_id for placement_id, (on, _, _) in self.cancellations.items() if on == worker_id]
        over = {
            sandbox.session_id
            for sandbox in worker.sandboxes
            if sandbox.session_id is not None
            and not (
                (session := self.sessions.get(sandbox.session_id))
                and session.worker_id == worker_id
                and not session.expired
            )
            and sandbox.placement_id not in self.leases
            and sandbox.placement_id not in self.cancellations
        }
        return run[:8], sorted(cancel), sorted(over)

    def accept(self, placement_id: str, worker_id: str) -> bool:
        lease = self.leases.get(placement_id)
        if lease is None or lease.worker_id != worker_id:
            return False
        if lease.incarnation is None:
            lease.incarnation = self.workers[worker_id].status.incarnation
            lease.began, lease.deadline = self.now, self.now + START + TIMEOUT
            self.calls[lease.call_id].state = "accepted"
            session = self.sessions.get(lease.session_id or "")
            if session and session.call_id == lease.call_id:
                session.incarnation = lease.incarnation
        return True

    def end(self, placement_id: str, result: Result) -> None:
        """A result: the first of a placement counts."""
        ordered = self.cancellations.pop(placement_id, None)
        lease = self.leases.pop(placement_id, None)
        if lease:
            self.leave(placement_id, lease, result)
        worker_id = lease.worker_id if lease else ordered[0] if ordered else ""
        if worker_id in self.workers:
            worker = self.workers[worker_id]
            worker.sandboxes = [
                each for each in worker.sandboxes if each.session_id is not None or each.placement_id != placement_id
            ]
        if lease:
            call = self.calls[lease.call_id]
            slug = "" if result.problem is None else result.problem.type.rpartition(":")[2]
            call.state = "failed" if result.outcome == "failed" else "finished"
            call.outcome = slug if result.outcome == "failed" else result.outcome
            call.started = None if result.started is None else result.started.how

    # -- ends --

    def cancel(self, placement_id: str) -> None:
        lease = self.leases.pop(placement_id)
        if lease.incarnation is not None:
            self.stop(placement_id, lease)
        call = self.calls[lease.call_id]
        call.state = call.outcome = "cancelled"
        self.leave(placement_id, lease, None)

    def stop(self, placement_id: str, lease: Lease) -> None:
        """The agent is to end it; what it has counts until it reports."""
        worker = self.workers[lease.worker_id]
        if not any(
            each.placement_id == placement_id or (lease.session_id and each.session_id == lease.session_id)
            for each in worker.sandboxes
        ):
            worker.sandboxes.append(
                Sandbox(placement_id, placement_id, lease.session_id, lease.memory, lease.gpu_memory)
            )
        self.cancellations.setdefault(placement_id, (lease.worker_id, lease.session_id, self.now))

    def leave(self, placement_id: str, lease: Lease, result: Result | None) -> None:
        """The call of a session has ended."""
        session = self.sessions.get(lease.session_id or "")
        if session is None or lease.session_id is None:
            return
        kept = result is not None and result.outcome in ("returned", "raised")
        ran = lease.incarnation is not None if result is None else kept or result.started is not None
        first = lease.call_id == session.call_id
        if not session.expired:
            if first:
                worker = self.workers.get(session.worker_id)
                there = worker.status.incarnation if worker else None
                session.incarnation = (session.incarnation or there) if ran else None
            if not kept:
                session.settles = session.settles if not first and not ran else None
            elif first and not self.has_sandbox(session.worker_id, lease.session_id):
                session.settles = self.now + SETTLES
            session.expired = bool(
                not kept and result and result.problem and result.problem.type == SessionExpired().type
            )
        if lease.continues:
            return
        alive = first and session.worker_id == lease.worker_id and session.incarnation and not session.expired
        if alive and not self.has_sandbox(lease.worker_id, lease.session_id):
            self.workers[lease.worker_id].sandboxes.append(
                Sandbox(placement_id, None, lease.session_id, lease.memory, lease.gpu_memory)
            )
        if session.incarnation is None and not session.expired:
            del self.sessions[lease.session_id]
            worker = self.workers[lease.worker_id]
            worker.sandboxes = [
                each
                for each in worker.sandboxes
                if each.placement_id != placement_id or each.session_id is None or each.session_id in self.sessions
            ]

    def end_session(self, session_id: str) -> None:
        session = self.sessions[session_id]
        busy = [placement_id for placement_id, lease in self.leases.items() if lease.session_id == session_id]
        session.expired = True
        for placement_id in busy:
            self.cancel(placement_id)

    def expire(self, *, session_id: str | None = None, worker_id: str | None = None, ttl: float | None = None) -> None:
        """Sessions whose sandbox is gone, or whose worker is, are over; not while a call has them."""
        busy = {lease.session_id for lease in self.leases.values()}
        for name, session in self.sessions.items():
            if session.incarnation is None or name in busy:
                continue
            if session_id not in (None, name) or worker_id not in (None, session.worker_id):
                continue
            worker = self.workers.get(session.worker_id)
            there = (
                worker is not None
                and worker.status.incarnation == session.incarnation
                and worker.status.state != "removed"
                and (ttl is None or worker.heard > self.now - ttl)
            )
            session.expired |= not there or not self.has_sandbox(session.worker_id, name)

    def sweep(self) -> None:
        for placement_id, lease, cause in list(self.due()):
            del self.leases[placement_id]
            accepted, call = lease.incarnation is not None, self.calls[lease.call_id]
            if accepted:
                self.stop(placement_id, lease)
            if not accepted:
                most = MOST_RUNS if call.request.retry else MOST_PLACEMENTS
                problem = "" if call.attempts < most else PlacementError.slug
            elif cause == "deadline":
                problem = "call-timeout"
            else:
                again = call.request.retry and not call.continues and call.attempts < MOST_RUNS
                problem = "" if again else "worker-lost"
            if not problem and (problem := self.place_again(lease.call_id, call)) and accepted:
                problem = "worker-lost"
            if problem:
                call.state, call.outcome = "failed", problem
                self.leave(placement_id, lease, None)
        for name, worker in list(self.workers.items()):
            leased = any(lease.worker_id == name for lease in self.leases.values())
            if worker.heard <= self.now - TTL and not leased:
                del self.workers[name]
                self.expire(worker_id=name)

    def set_back(self) -> None:
        """All that has happened lies in the future, by more than anything takes: it has happened now."""
        for worker in self.workers.values():
            worker.heard = self.now
        for lease in self.leases.values():
            lease.began, lease.deadline = self.now, self.now + lease.deadline - lease.began
        self.leases = dict(sorted(self.leases.items()))  # those of one time go by their ids
        for session in self.sessions.values():
            if session.settles is not None:
                session.settles = self.now + SETTLES
        self.cancellations = {
            name: (worker_id, session_id, self.now) for name, (worker_id, session_id, _) in self.cancellations.items()
        }

    def due(self) -> Iterator[tuple[str, Lease, str]]:
        for placement_id, lease in self.leases.items():
            worker = self.workers[lease.worker_id]
            if worker.heard <= self.now - TTL:
                yield placement_id, lease, "silent"
            elif lease.incarnation not in (None, worker.status.incarnation) or lease.flavor is not worker.status.flavor:
                yield placement_id, lease, "restarted"
            elif lease.incarnation is None and worker.status.state == "removed":
                yield placement_id, lease, "leaving"
            elif lease.deadline <= self.now:
                yield placement_id, lease, "deadline"

    def place_again(self, call_id: str, call: Call) -> str:
        """Why there is no other placement; empty: there is one."""
        session_id = call.request.session_id
        if call.continues and session_id is not None:
            self.expire(session_id=session_id, ttl=TTL)
            if self.state_of(session_id) != "idle":
                return "session-expired"
            worker_id = self.sessions[session_id].worker_id
        else:
            worker_id = self.choose(call)
            if worker_id not in self.workers:
                return worker_id
        call.attempts += 1
        self.lease(call_id, call, worker_id)
        return ""


# ---- agents ----


@dataclass
class Kept:
    """A sandbox that an agent keeps for a session."""

    sandbox_id: str
    memory: int
    gpu_memory: int
    first: str  # the call for which it was started
    run: str | None = None
    over: bool = False


@dataclass
class Run:
    assignment: Assignment
    accepted: bool = False
    kept: Kept | None = None  # whose sandbox it entered

    @property
    def sandbox_id(self) -> str:
        return self.kept.sandbox_id if self.kept else f"box-{self.assignment.placement_id}"


@dataclass
class Agent:
    """A process that speaks for a worker: what it has, and what it says of that."""

    status: WorkerStatus  # without sandboxes
    runs: dict[str, Run] = field(default_factory=dict)
    sessions: dict[str, Kept] = field(default_factory=dict)

    def report(self) -> WorkerStatus:
        found = {
            name: SandboxStatus(
                sandbox_id=kept.sandbox_id, session_id=name, memory=kept.memory, gpu_memory=kept.gpu_memory
            )
            for name, kept in self.sessions.items()
        }
        for placement_id, run in self.runs.items():
            if run.assignment.continues and run.kept is None:
                continue
            found[run.assignment.session_id or run.sandbox_id] = SandboxStatus(
                sandbox_id=run.sandbox_id,
                placement_id=placement_id,
                session_id=run.assignment.session_id,
                memory=run.assignment.memory,
                gpu_memory=run.assignment.gpu_memory,
            )
        return changed(self.status, sandboxes=list(found.values()))

    def enter(self, run: Run) -> None:
        """A call that continues a session takes its sandbox, if it is there."""
        kept = self.sessions.get(run.assignment.session_id or "")
        if run.assignment.continues and kept and not kept.over and kept.run is None:
            kept.run, run.kept = run.assignment.placement_id, kept

    def give_up(self) -> None:
        """What is not accepted yet is let go, as when the agent stops."""
        for placement_id in [name for name, run in self.runs.items() if not run.accepted]:
            self.drop(placement_id)

    def drop(self, placement_id: str) -> None:
        """A call that is not to be run, or that ended badly before it had a sandbox of its own to keep."""
        run = self.runs.pop(placement_id)
        if run.kept:
            run.kept.run = None

    def finish(self, placement_id: str, how: str) -> Result:
        """The call ends: how is returned, raised, failed, or never (no sandbox could be started)."""
        run = self.runs.pop(placement_id)
        session_id = run.assignment.session_id
        if run.assignment.continues and run.kept is None:
            return Result(outcome="failed", problem=problem_of(SessionExpired("it has ended")))
        started = Started(how="restored" if run.assignment.checkpoint_id else "cold")
        well = how in ("returned", "raised")
        if session_id is not None:
            leaving = self.status.state == "removed"
            if run.kept:
                run.kept.run = None
                if (not well or run.kept.over or leaving) and self.sessions.get(session_id) is run.kept:
                    del self.sessions[session_id]
            elif well and not leaving:
                own = run.assignment
                self.sessions[session_id] = Kept(run.sandbox_id, own.memory, own.gpu_memory, own.call_id)
        if well:
            return Result(outcome=how, started=started)  # type: ignore[arg-type]
        unstarted = how == "never" and run.kept is None
        return Result(outcome="failed", problem=problem_of(SandboxFailed("it")), started=None if unstarted else started)

    def end_sessions(self, names: list[str]) -> None:
        for name in names:
            kept = self.sessions.get(name)
            if kept and kept.run is not None:
                kept.over = True
            elif kept:
                del self.sessions[name]


def new_agent(incarnation: str, **offers: Any) -> Agent:
    held = offers.pop("held")
    generations = [HeldGeneration(generation=held, checkpoint_ids=["A", "B", "C"])] if held else []
    return Agent(
        WorkerStatus(
            state="ready", python="3.11.7", runtime="fork", incarnation=incarnation, generations=generations, **offers
        )
    )


def changed(status: WorkerStatus, **fields: Any) -> WorkerStatus:
    return WorkerStatus(**{name: getattr(status, name) for name in status.__struct_fields__} | fields)
