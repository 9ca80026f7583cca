"""Many calls through several routers over one PostgreSQL, and things killed meanwhile: `python -m benchmarks.soak`.

Routers and PostgreSQL are real processes. Agents are thin: a process each that speaks the agents' API, reports, polls,
accepts, and answers at once without a sandbox, so that what is measured is the cluster. Clients send each call under a
key, and again at the next router where one does not answer. With `--kill-every N` a router and an agent are killed by
turns (SIGKILL) every N seconds and started again.

The result is one JSON document on standard output. The exit status is 1 where a call has no outcome or one that cannot
be, ran twice, a worker was overcommitted when looked at, the routers' memory grew, or `readie-router check` finds something
at the end.
"""

import argparse
import asyncio
import gzip
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import psycopg
import structlog
import uvloop

from app.catalogue import import_catalogue
from app.database import migrate, open_database
from benchmarks.fresh import ROOT, cpu_seconds, memory_mb
from benchmarks.load import Connection, request
from readie.flavor import Flavor
from readie.projection import load_catalogue
from readie.wire import Assignment, CallPlaced, CallStatus, HeldGeneration, Orders, Result, SandboxStatus, WorkerStatus
from tests.postgres import end_with_parent, running_postgresql

CATALOGUE = ROOT / "catalogues" / "cpu.json"
CORPUS = ROOT / "corpora" / "cpu.jsonl.gz"
BUDGET = 256 * 2**20  # bytes, of each call
GIVE_UP_S = 60.0
TTL_S = 10.0
SAMPLE_S = 10.0
ENDS = {"finished"}
#: no-capacity: its worker was killed before it accepted the call, and no other had room for it then.
ENDS_OF_KILLED = {"finished", "worker-lost", "no-capacity"}
GROWTH = 1.25  # of the routers' memory, from the second quarter of a soak to the last, where none is killed
LEAST_SAMPLES = 20  # of memory, to judge that


class Ended(msgspec.Struct, frozen=True):
    """A call as its client saw it: seconds until it was placed and until its result was there."""

    call_id: str
    outcome: str
    placed_s: float
    whole_s: float


# ---- talking to whichever router answers ----


class Peer:
    """A connection to one of several routers: to the next where one does not answer."""

    def __init__(self, ports: list[int], first: int) -> None:
        self.ports = itertools.cycle(ports[first % len(ports) :] + ports[: first % len(ports)])
        self.connection: Connection | None = None
        self.failures = 0

    async def ask(self, message: bytes, within: float = 60.0) -> tuple[int, bytes]:
        """The answer to a request that may be sent again. Raises `TimeoutError`."""
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            try:
                if self.connection is None or self.connection.transport is None:
                    loop = asyncio.get_running_loop()
                    _, self.connection = await loop.create_connection(Connection, "127.0.0.1", next(self.ports))
                elif self.connection.transport.is_closing():
                    raise ConnectionError("it was closed")
                status, body = await asyncio.wait_for(self.connection.ask(message), within)
                if b"urn:readie:problem:database-unavailable" not in body:
                    return status, body
            except (OSError, TimeoutError) as error:
                if self.connection and self.connection.transport:
                    self.connection.transport.close()
                self.connection = None
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no router answered for {GIVE_UP_S:g} s") from error
            self.failures += 1
            await asyncio.sleep(0.05)


def keyed(path: str, body: Mapping[str, Any], key: str) -> bytes:
    return request("POST", path, body).replace(b"\r\n", f"\r\nIdempotency-Key: {key}\r\n".encode(), 1)


# ---- clients ----


async def run_clients(ports: list[int], clients: int, seconds: float, pause: float) -> list[Ended]:
    """All calls of so many clients, one at a time each, and `pause` seconds between them."""
    sets = [json.loads(line)["modules"] for line in gzip.decompress(CORPUS.read_bytes()).splitlines()]
    over = time.monotonic() + seconds
    ended: list[Ended] = []

    async def one(number: int) -> None:
        peer, drawn = Peer(ports, number), random.Random(number)
        while time.monotonic() < over:
            call: dict[str, Any] = {"payload": "eA==", "python": "3.11", "memory": BUDGET, "queue_timeout": 30}
            call["modules"] = drawn.choice(sets)
            ended.append(await run_one(peer, call))
            await asyncio.sleep(pause)

    await asyncio.gather(*(one(number) for number in range(clients)))
    return ended


async def run_one(peer: Peer, call: Mapping[str, Any]) -> Ended:
    began = time.perf_counter()
    call_id, placed_s = "", 0.0
    try:
        status, body = await peer.ask(keyed("/v1/calls", call, uuid4().hex), within=90)
        placed_s = time.perf_counter() - began
        if status != 201:
            return Ended("", slug(body), placed_s, placed_s)
        call_id = msgspec.json.decode(body, type=CallPlaced).call_id
        while True:
            status, body = await peer.ask(request("GET", f"/v1/calls/{call_id}?wait=30"))
            if status != 200:
                return Ended(call_id, slug(body), placed_s, time.perf_counter() - began)
            told = msgspec.json.decode(body, type=CallStatus)
            if told.result is not None:
                problem = told.result.problem
                outcome = told.state if problem is None else problem.type.rpartition(":")[2]
                return Ended(call_id, outcome, placed_s, time.perf_counter() - began)
    except TimeoutError:
        return Ended(call_id, "client gave up", placed_s, time.perf_counter() - began)


def slug(body: bytes) -> str:
    return str(json.loads(body)["type"]).rpartition(":")[2]


# ---- agents ----


async def run_agent(ports: list[int], number: int, ran: Path, held: HeldGeneration, room: int) -> None:
    """A worker without sandboxes; writes which calls it has run, before it does."""
    worker_id, incarnation = f"worker-{number}", uuid4().hex
    running: dict[str, Assignment] = {}
    reports = itertools.count(1)
    telling, polling, ending = (Peer(ports, number + each) for each in range(3))  # a request at a time each
    forgotten = asyncio.Event()
    log = ran.open("a")

    def report() -> bytes:
        boxes = [SandboxStatus(sandbox_id=each, placement_id=each, memory=BUDGET) for each in running]
        status = WorkerStatus(
            flavor=Flavor.CPU,
            state="ready",
            python="3.11.7",
            runtime="fork",
            memory_total=int(room * BUDGET / 0.9) + 1,
            sandboxes=boxes,
            generations=[held],
            incarnation=incarnation,
            report=next(reports),
        )
        return request("PUT", f"/v1/workers/{worker_id}", status)

    async def report_forever() -> None:
        while True:
            forgotten.clear()
            await telling.ask(report())
            with suppress(TimeoutError):
                await asyncio.wait_for(forgotten.wait(), TTL_S / 4)

    async def run(each: Assignment, settled: asyncio.Event) -> None:
        peer = Peer(ports, random.randrange(len(ports)))
        path = f"/v1/placements/{each.placement_id}"
        accept = request("POST", f"{path}/accept?worker_id={worker_id}&incarnation={incarnation}")
        status, _ = await peer.ask(accept)
        settled.set()
        if status == 204:
            log.write(f"{each.call_id}\n")
            log.flush()
            result = Result(outcome="returned", payload=each.payload, python="3.11")
            await peer.ask(request("PUT", f"{path}/result", result))
        del running[each.placement_id]

    reporting = asyncio.create_task(report_forever())
    tasks: set[asyncio.Task[None]] = set()
    while not reporting.done():
        status, body = await polling.ask(request("GET", f"/v1/workers/{worker_id}/placements?wait=20"))
        if status != 200:  # no router knows this worker (any more)
            forgotten.set()
            await asyncio.sleep(0.2)
            continue
        orders = msgspec.json.decode(body, type=Orders)
        fresh = [each for each in orders.run if each.placement_id not in running]
        accepted = [asyncio.Event() for _ in fresh]
        for each, settled in zip(fresh, accepted, strict=True):
            running[each.placement_id] = each
            task = asyncio.create_task(run(each, settled))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        for placement_id in orders.cancel:
            result = Result(outcome="cancelled", python="3.11")
            await ending.ask(request("PUT", f"/v1/placements/{placement_id}/result", result))
        for settled in accepted:  # orders are repeated until they are carried out
            await settled.wait()
    reporting.result()


# ---- the cluster ----


class Cluster:
    """The processes that are measured, and killed."""

    def __init__(
        self, url: str, folder: Path, generation: HeldGeneration, *, routers: int, agents: int, room: int
    ) -> None:
        self.url, self.folder, self.generation, self.room = url, folder, generation, room
        self.ports = [free_port() for _ in range(routers)]
        self.spent_cpu_s = 0.0  # of routers that were killed
        self.routers = [self.start_router(number) for number in range(routers)]
        self.agents = [self.start_agent(number) for number in range(agents)]
        self.kills: Counter[str] = Counter()

    def start_router(self, number: int) -> "subprocess.Popen[bytes]":
        settings = {"WORKER_TTL": str(TTL_S), "ACCEPT_TIMEOUT": "10", "SWEEP_INTERVAL": "2"}
        command = [sys.executable, "-m", "app.cli", "serve", "--port", str(self.ports[number])]
        return self.start(command, f"router-{number}", DATABASE_URL=self.url, **settings)

    def start_agent(self, number: int) -> "subprocess.Popen[bytes]":
        held = msgspec.json.encode(self.generation).decode()
        command = [sys.executable, "-m", "benchmarks.soak", "--agent", str(number), "--held", held]
        command += ["--ran", str(self.folder / f"ran-{number}"), "--room", str(self.room)]
        command += ["--ports", *map(str, self.ports)]
        return self.start(command, f"agent-{number}")

    def start(self, command: list[str], name: str, **environment: str) -> "subprocess.Popen[bytes]":
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=end_with_parent,  # noqa: PLW1509 # one system call
            )

    def kill(self, drawn: random.Random) -> None:
        """Kills a router or an agent, by turns, and starts it again."""
        group, kind = (self.routers, "router") if self.kills.total() % 2 == 0 else (self.agents, "agent")
        number = drawn.randrange(len(group))
        if group is self.routers:
            self.spent_cpu_s += cpu_seconds(group[number].pid)
        group[number].kill()
        group[number].wait()
        group[number] = (self.start_router if group is self.routers else self.start_agent)(number)
        self.kills[kind] += 1

    def router_cpu_s(self) -> float:
        return self.spent_cpu_s + sum(cpu_seconds(router.pid) for router in self.routers)

    def dead(self) -> list[str]:
        """What has ended without having been killed."""
        named = {f"router {number}": each for number, each in enumerate(self.routers)}
        named |= {f"agent {number}": each for number, each in enumerate(self.agents)}
        return [f"{name}: exit code {each.returncode}" for name, each in named.items() if each.poll() is not None]

    def end(self) -> None:
        for process in [*self.agents, *self.routers]:
            process.send_signal(signal.SIGKILL)
            process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def database(server: str) -> Iterator[tuple[str, HeldGeneration]]:
    """A new database with the committed catalogue; its URL, and what a worker holds of it."""
    name = f"soak_{uuid4().hex}"
    with psycopg.connect(server.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    url = server.replace("/postgres?", f"/{name}?")
    catalogue = load_catalogue(CATALOGUE)
    with closing(open_database(url)) as opened:
        migrate(opened)
        import_catalogue(opened, catalogue)
    ids = [checkpoint.checkpoint_id for checkpoint in catalogue.checkpoints]
    yield url, HeldGeneration(generation=catalogue.generation, checkpoint_ids=ids, restore_fixed=0.2, cold_fixed=1.2)


def postgresql_cpu_s(server: str) -> float:
    """Of all its processes, also those that have ended."""
    with psycopg.connect(server.replace("+psycopg", "")) as connection:
        row = connection.execute("SHOW data_directory").fetchone()
    assert row is not None
    pid = int(Path(row[0], "postmaster.pid").read_text().split()[0])
    ended = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[13:15]))
    seconds = ended / os.sysconf("SC_CLK_TCK") + cpu_seconds(pid)
    for living in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):  # it has just ended
            seconds += cpu_seconds(int(living))
    return seconds


#: Calls without sessions: what a worker has taken is its leases.
OVERCOMMITTED = "SELECT worker_id, count(*) FROM leases GROUP BY worker_id HAVING count(*) > %s"


def soak(options: argparse.Namespace) -> dict[str, Any]:
    drawn = random.Random(options.seed)
    wrong: list[str] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="readie-soak-")))
        server = stack.enter_context(running_postgresql(durable=True))
        url, held = stack.enter_context(database(server))
        sizes = {"routers": options.routers, "agents": options.agents, "room": options.room}
        cluster = Cluster(url, folder, held, **sizes)
        stack.callback(cluster.end)
        wait_until_ready(cluster)
        router_cpu_s, database_cpu_s = cluster.router_cpu_s(), postgresql_cpu_s(server)
        began = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.soak", "--clients", str(options.clients)]
        command += ["--seconds", str(options.seconds), "--pause", str(options.pause)]
        command += ["--ports", *map(str, cluster.ports)]
        clients = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, preexec_fn=end_with_parent)  # noqa: PLW1509
        stack.callback(clients.kill)
        memory: list[float] = []
        killed_at = sampled_at = began
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as looking:
            while time.monotonic() < began + options.seconds:
                time.sleep(0.5)
                now = time.monotonic()
                if options.kill_every and now >= killed_at + options.kill_every:
                    cluster.kill(drawn)
                    killed_at = now
                if now >= sampled_at + SAMPLE_S:
                    memory.append(sum(memory_mb("VmRSS", router.pid) for router in cluster.routers))
                    sampled_at = now
                over = looking.execute(OVERCOMMITTED, [options.room]).fetchall()
                wrong += [f"{worker_id} had {taken} calls, and room for {options.room}" for worker_id, taken in over]
        said, _ = clients.communicate(timeout=300)
        seconds = time.monotonic() - began
        router_cpu_s = cluster.router_cpu_s() - router_cpu_s
        database_cpu_s = postgresql_cpu_s(server) - database_cpu_s
        wrong += cluster.dead()
        if not options.kill_every:
            wrong += find_growth(memory)
        calls = msgspec.json.decode(said, type=list[Ended])
        wrong += find_wrong(calls, folder, killed=bool(options.kill_every))
        environment = {**os.environ, "DATABASE_URL": url, "PYTHONPATH": str(ROOT)}
        check = subprocess.run(
            [sys.executable, "-m", "app.cli", "check"], env=environment, capture_output=True, text=True, check=False
        )
        if check.returncode:
            wrong.append(f"readie-router check: {check.stdout} {check.stderr}")
        with psycopg.connect(url.replace("+psycopg", "")) as looking:
            states: dict[str, int] = dict(
                looking.execute("SELECT state, count(*) FROM calls GROUP BY state").fetchall()
            )
    placed = sorted(each.placed_s for each in calls)
    return {
        "seconds": round(seconds, 1),
        "routers": options.routers,
        "agents": options.agents,
        "clients": options.clients,
        "room": options.room,
        "kills": dict(cluster.kills),
        "calls": len(calls),
        "calls_per_s": round(len(calls) / seconds, 1),
        "outcomes": dict(Counter(each.outcome for each in calls)),
        "states": states,
        "placed_ms": {name: round(1000 * quantile(placed, part), 1) for name, part in QUANTILES.items()},
        "whole_ms": round(1000 * statistics.median(each.whole_s for each in calls), 1),
        "router_cpu_ms_per_call": round(1000 * router_cpu_s / len(calls), 2),
        "database_cpu_ms_per_call": round(1000 * database_cpu_s / len(calls), 2),
        "calls_per_cpu_s_of_router_and_database": round(len(calls) / (router_cpu_s + database_cpu_s), 1),
        "routers_mb": [round(each) for each in memory],
        "wrong": wrong[:50],
    }


QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}


def quantile(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))]


def wait_until_ready(cluster: Cluster) -> None:
    """Until every router answers and every worker has reported."""

    async def wait() -> None:
        for number in range(len(cluster.ports)):
            while True:
                _, body = await Peer(cluster.ports, number).ask(request("GET", "/v1/workers"))
                if len(json.loads(body)) == len(cluster.agents):
                    break
                await asyncio.sleep(0.2)

    asyncio.run(wait())


def find_wrong(calls: list[Ended], folder: Path, *, killed: bool) -> list[str]:
    """Calls with an outcome that cannot be, and calls that ran twice."""
    may_be = ENDS_OF_KILLED if killed else ENDS
    wrong = [f"{each.call_id}: {each.outcome}" for each in calls if each.outcome not in may_be]
    ran = Counter(line for file in folder.glob("ran-*") for line in file.read_text().splitlines())
    wrong += [f"{call_id} ran {times} times" for call_id, times in ran.items() if times > 1]
    wrong += [f"{each.call_id} never ran" for each in calls if each.outcome == "finished" and each.call_id not in ran]
    return wrong


def find_growth(memory: list[float]) -> list[str]:
    """Whether the routers' memory (MB, sampled at equal times) is more in the last quarter than in the second."""
    if len(memory) < LEAST_SAMPLES:
        return []
    quarter = len(memory) // 4
    before, after = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    return [f"the routers' memory grew from {before:.0f} to {after:.0f} MB"] if after > GROWTH * before else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds; 0: nothing is killed")
    parser.add_argument("--routers", type=int, default=3)
    parser.add_argument("--agents", type=int, default=20)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--room", type=int, default=5, help="calls that a worker has room for")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of each client between two calls")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ports", type=int, nargs="+", help=argparse.SUPPRESS)  # of a process of its own
    parser.add_argument("--agent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--held", help=argparse.SUPPRESS)
    parser.add_argument("--ran", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.agent is not None:
        held = msgspec.json.decode(options.held, type=HeldGeneration)
        uvloop.run(run_agent(options.ports, options.agent, options.ran, held, options.room))
    elif options.ports:
        ended = uvloop.run(run_clients(options.ports, options.clients, options.seconds, options.pause))
        sys.stdout.buffer.write(msgspec.json.encode(ended))
    else:
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
        found = soak(options)
        print(json.dumps(found, indent=1))
        sys.exit(int(bool(found["wrong"])))


if __name__ == "__main__":
    main()
