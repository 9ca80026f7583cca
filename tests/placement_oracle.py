"""Which worker takes a call, in plain Python: what `rank_workers` of app/sql/placement.sql has to agree with."""

from dataclasses import dataclass, field

from readie.wire import CallRequest, WorkerStatus

PPM = 1_000_000
WHOLE = -1  # of the GPU memory


@dataclass
class Lease:
    """What a placed call reserves."""

    memory: int
    gpu_memory: int


@dataclass
class Worker:
    """A worker as it reported, and the leases on it, by placement id."""

    status: WorkerStatus
    leases: dict[str, Lease] = field(default_factory=dict)

    def waiting(self) -> list[Lease]:
        """Leases that have no sandbox yet: a sandbox's report names its placement."""
        reported = {sandbox.placement_id for sandbox in self.status.sandboxes}
        return [lease for placement_id, lease in self.leases.items() if placement_id not in reported]

    @property
    def memory(self) -> int:
        return sum(s.memory for s in self.status.sandboxes) + sum(lease.memory for lease in self.waiting())

    @property
    def gpu_memory(self) -> int:
        return sum(s.gpu_memory for s in self.status.sandboxes) + sum(lease.gpu_memory for lease in self.waiting())

    @property
    def sandboxes(self) -> int:
        return len(self.status.sandboxes) + len(self.waiting())


def budgets(request: CallRequest, default_memory: int) -> tuple[int, bool, int]:
    """(memory, is it a GPU call, GPU memory): a maximum alone is also the start."""
    memory = request.memory or request.max_memory or default_memory
    gpu_memory = request.gpu_memory or request.max_gpu_memory
    is_gpu = request.gpu or gpu_memory is not None
    return memory, is_gpu, (gpu_memory or WHOLE) if is_gpu else 0


def choose_worker(workers: dict[str, Worker], request: CallRequest, default_memory: int, headroom_ppm: int) -> str:
    """The id of the worker that takes the call, or `no-workers` or `no-capacity`."""
    memory, is_gpu, gpu_memory = budgets(request, default_memory)
    ready = {name: worker for name, worker in workers.items() if worker.status.state == "ready"}
    if not ready:
        return "no-workers"

    def fits(worker: Worker) -> bool:
        status = worker.status
        if is_gpu and status.flavor != "gpu":
            return False
        if status.memory_total is not None and (worker.memory + memory) * PPM > status.memory_total * headroom_ppm:
            return False
        if is_gpu and status.gpu_total is not None:
            if gpu_memory == WHOLE:
                if worker.gpu_memory > 0:
                    return False
            elif (worker.gpu_memory + gpu_memory) * PPM > status.gpu_total * headroom_ppm:
                return False
        return status.max_sandboxes == 0 or worker.sandboxes < status.max_sandboxes

    def rank(name: str) -> tuple[int, int, int, str]:
        worker = ready[name]
        spills = int(worker.status.flavor == "gpu" and not is_gpu)
        total = worker.status.memory_total
        return spills, 0 if total is None else worker.memory * PPM // total, len(worker.leases), name

    fitting = [name for name, worker in ready.items() if fits(worker)]
    return min(fitting, key=rank) if fitting else "no-capacity"


def reserve(worker: Worker, placement_id: str, request: CallRequest, default_memory: int) -> None:
    """Puts the lease of a placed call on its worker."""
    memory, _, gpu_memory = budgets(request, default_memory)
    whole = worker.status.gpu_total or 0
    worker.leases[placement_id] = Lease(memory, whole if gpu_memory == WHOLE else gpu_memory)


@dataclass
class Session:
    """A session: where it is, and the bytes of its sandbox."""

    worker_id: str
    memory: int
    busy: bool = True  # a call has it
    lives: bool = True  # its sandbox does
    missed: bool = False  # a report came without its sandbox
    expired: bool = False


@dataclass
class Cluster:
    """Cpu workers with these bytes of memory, and what was placed on them; every call is accepted at once."""

    totals: dict[str, int]
    running: list[tuple[str, str | None, int]] = field(default_factory=list)  # worker, session, bytes
    sessions: dict[str, Session] = field(default_factory=dict)

    def memory(self, worker_id: str) -> int:
        """Bytes: of calls, each its own; of sessions, each once, until they have no call and the worker no sandbox."""
        mine = [session for session in self.sessions.values() if session.worker_id == worker_id]
        kept = [session for session in mine if session.busy or not session.missed]
        alone = [memory for on, session_id, memory in self.running if on == worker_id and session_id is None]
        return sum(session.memory for session in kept) + sum(alone)

    def place(self, request: CallRequest, default_memory: int, headroom_ppm: int) -> str:
        """The worker that a call goes to, or the name of the problem."""
        session = self.sessions.get(request.session_id or "")
        if session is None:
            return self._place_anew(request, default_memory, headroom_ppm)
        if session.expired:
            return "session-expired"
        if session.busy:
            return "session-busy"
        if (request.memory or 0) > session.memory:
            return "session-conflict"
        session.busy = True
        self.running.append((session.worker_id, request.session_id, session.memory))
        return session.worker_id

    def _place_anew(self, request: CallRequest, default_memory: int, headroom_ppm: int) -> str:
        memory, _, _ = budgets(request, default_memory)

        def rank(worker_id: str) -> tuple[int, int, str]:
            in_flight = sum(on == worker_id for on, _, _ in self.running)
            return self.memory(worker_id) * PPM // self.totals[worker_id], in_flight, worker_id

        fitting = [
            worker_id
            for worker_id, total in self.totals.items()
            if (self.memory(worker_id) + memory) * PPM <= total * headroom_ppm
        ]
        if not fitting:
            return "no-capacity"
        worker_id = min(fitting, key=rank)
        self.running.append((worker_id, request.session_id, memory))
        if request.session_id is not None:
            self.sessions[request.session_id] = Session(worker_id, memory)
        return worker_id

    def has_sandbox(self, place: int) -> bool:
        """Whether the call that was placed as the `place`th of those that run has a sandbox to run in."""
        session_id = self.running[place][1]
        return session_id is None or self.sessions[session_id].lives

    def end(self, place: int, *, lives: bool) -> None:
        """That call has ended; its sandbox `lives` on if a session keeps it. What had none says so: that session is over."""
        had_sandbox = self.has_sandbox(place)
        session_id = self.running.pop(place)[1]
        if session_id is not None:
            session = self.sessions[session_id]
            session.busy = False
            session.lives &= lives
            session.expired |= not had_sandbox

    def report(self, worker_id: str) -> list[tuple[str, int]]:
        """The sessions whose sandboxes the worker has, with their bytes. Of others it says that they have expired."""
        mine = {name: session for name, session in self.sessions.items() if session.worker_id == worker_id}
        for session in mine.values():
            session.missed = not session.lives
            session.expired |= session.missed and not session.busy
        return [(name, session.memory) for name, session in mine.items() if session.lives]
