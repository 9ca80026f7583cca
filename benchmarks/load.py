"""The load generator: one process, so many connections, HTTP/1.1 kept alive, written on bare sockets.

It must not be what is measured. So requests are bytes before they are due, answers are looked at and not decoded but
for a sample, and it says what share of a core it used itself.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, cast

import msgspec
import uvloop

from benchmarks.fresh import cpu_seconds
from readie.flavor import Flavor
from readie.wire import CallPlaced, CallStatus, Explanation, HeldGeneration, Orders, Result, WorkerStatus

#: One answer in so many is decoded and handed back, to be compared with the limit's.
SAMPLED = 20

#: Bytes: with this budget every checkpoint is an option, and a worker has room for more calls than there are.
BUDGET = 16 * 2**30
MEMORY = 1024 * BUDGET


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for, and what came of it. Latencies in seconds, in order of completion."""

    seconds: float
    latencies: list[float]
    errors: list[str]
    generator_cpu_s: float
    router_cpu_s: float
    samples: list[tuple[list[str], str | None, float, float]]  # modules, checkpoint, cost, cold cost


class Connection(asyncio.Protocol):
    """One kept-alive connection, one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.received = bytearray()
        self.answered: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        received = self.received
        received += data
        end = received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(received[:end]).lower()
        mark = head.find(b"content-length:")
        length = 0 if mark < 0 else int(head[mark + 15 :].split(b"\r\n", 1)[0])
        if len(received) < end + 4 + length:
            return
        body = bytes(received[end + 4 : end + 4 + length])
        del received[: end + 4 + length]
        if self.answered is not None and not self.answered.done():
            self.answered.set_result((int(head[9:12]), body))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answered is not None and not self.answered.done():
            self.answered.set_exception(ConnectionError(f"the router closed the connection: {exc}"))

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """(status, body) of the answer."""
        assert self.transport is not None
        self.answered = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.answered


def request(method: str, path: str, body: Any = None) -> bytes:
    """A request as it goes over the wire; a body as JSON."""
    content = b"" if body is None else msgspec.json.encode(body)
    head = f"{method} {path} HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\nContent-Length: "
    return head.encode() + str(len(content)).encode() + b"\r\n\r\n" + content


class Generator:
    """The connections, the clock, and what was seen."""

    def __init__(self, port: int, process_id: int, seconds: float, warm_up_s: float) -> None:
        self.port, self.process_id, self.seconds, self.warm_up_s = port, process_id, seconds, warm_up_s
        self.latencies: list[float] = []
        self.errors: list[str] = []
        self.samples: list[tuple[list[str], str | None, float, float]] = []
        self.stop = False
        self.counting = False
        self.something = asyncio.Event()  # was counted, or went wrong

    async def connect(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self.port)
        return connection

    async def ask_once(self, request: bytes) -> None:
        """Asks over a connection of its own: the router closes those that are idle for some seconds."""
        connection = await self.connect()
        self.good(*await connection.ask(request))
        if connection.transport is not None:
            connection.transport.close()

    async def run(self, users: list[Callable[[Connection], Awaitable[None]]], agents: list[Awaitable[None]]) -> Load:
        """Lets all users work, each on a connection of its own, until the time is over; agents end with them."""
        behind = [asyncio.ensure_future(agent) for agent in agents]
        connections = [await self.connect() for _ in users]
        working = [asyncio.ensure_future(user(each)) for user, each in zip(users, connections, strict=True)]
        await asyncio.sleep(self.warm_up_s)
        self.latencies.clear()
        self.samples.clear()
        begin, cpu_s, router_cpu_s = time.perf_counter(), time.process_time(), cpu_seconds(self.process_id)
        self.counting = True
        await asyncio.sleep(self.seconds)
        await self.something.wait()  # however slow: at least one
        self.counting = False
        seconds = time.perf_counter() - begin
        cpu_s, router_cpu_s = time.process_time() - cpu_s, cpu_seconds(self.process_id) - router_cpu_s
        self.stop = True
        await asyncio.gather(*working)
        for task in behind:
            task.cancel()
        for ended in await asyncio.gather(*behind, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        return Load(
            seconds=seconds,
            latencies=self.latencies,
            errors=self.errors,
            generator_cpu_s=cpu_s,
            router_cpu_s=router_cpu_s,
            samples=self.samples,
        )

    def count(self, latency_s: float) -> bool:
        """Counts something that has ended, if its time counts; says whether it is to be a sample."""
        if not self.counting:
            return False
        self.latencies.append(latency_s)
        self.something.set()
        return len(self.latencies) % SAMPLED == 1

    def good(self, status: int, body: bytes) -> bool:
        """Whether an answer is what was hoped for; if not, it is remembered."""
        if 200 <= status < 300:
            return True
        self.errors.append(f"{status}: {body[:300]!r}")
        self.something.set()
        return False


def explain(
    *, port: int, process_id: int, seconds: float, warm_up_s: float, connections: int, module_sets: list[list[str]]
) -> Load:
    """Explains module sets, in their order: with enough of them, none is ever asked for twice.

    Raises `IndexError` when they run out.
    """
    generator = Generator(port, process_id, seconds, warm_up_s)
    bodies = [request("POST", "/v1/explain", {"modules": modules}) for modules in module_sets]
    numbers = iter(range(len(bodies)))
    return uvloop.run(generator.run([_explainer(generator, bodies, module_sets, numbers)] * connections, []))


def explain_repeatedly(
    *, port: int, process_id: int, seconds: float, warm_up_s: float, connections: int, module_sets: list[list[str]]
) -> Load:
    """Explains module sets over and over, each for the first time before the clock runs."""
    generator = Generator(port, process_id, seconds, warm_up_s)
    bodies = [request("POST", "/v1/explain", {"modules": modules}) for modules in module_sets]

    async def work() -> Load:
        first = await generator.connect()
        for body in bodies:
            generator.good(*await first.ask(body))
        numbers = itertools.cycle(range(len(bodies)))
        return await generator.run([_explainer(generator, bodies, module_sets, numbers)] * connections, [])

    return uvloop.run(work())


def _explainer(
    generator: Generator, bodies: list[bytes], module_sets: list[list[str]], numbers: Iterator[int]
) -> Callable[[Connection], Awaitable[None]]:
    async def work(connection: Connection) -> None:
        while not generator.stop:
            number = next(numbers, None)
            if number is None:
                raise IndexError("more module sets are needed")
            begin = time.perf_counter()
            status, body = await connection.ask(bodies[number])
            latency_s = time.perf_counter() - begin
            if generator.good(status, body) and generator.count(latency_s):
                answer = msgspec.json.decode(body, type=Explanation)
                cold = next(option for option in answer.options if option.checkpoint_id is None)
                best = answer.options[0]
                if best.items is None:
                    raise ValueError("the winner's items are not listed")
                generator.samples.append((module_sets[number], best.checkpoint_id, best.total, cold.total))

    return work


def place(
    *,
    port: int,
    process_id: int,
    seconds: float,
    warm_up_s: float,
    connections: int,
    module_sets: list[list[str]],
    generation: str,
    checkpoint_ids: list[str],
    workers: int,
) -> Load:
    """Places calls and ends each by its result, at once. What counts is a placement that was scored, reserved and
    released; its latency is the placing's.
    """
    generator = Generator(port, process_id, seconds, warm_up_s)

    async def user(number: int, connection: Connection) -> None:
        drawn = random.Random(number)
        ending = msgspec.json.encode(Result(outcome="returned", payload=b"result", python="3.11"))
        while not generator.stop:
            modules = drawn.choice(module_sets)
            begin = time.perf_counter()
            status, body = await connection.ask(_call(modules))
            latency_s = time.perf_counter() - begin
            if not generator.good(status, body):
                continue
            placed = msgspec.json.decode(body, type=CallPlaced)
            path = f"/v1/placements/{placed.placement.placement_id}/result"
            if generator.good(*await connection.ask(request("PUT", path, msgspec.Raw(ending)))):
                _count_placed(generator, latency_s, modules, placed)

    async def work() -> Load:
        agents = [await _report(generator, number, generation, checkpoint_ids) for number in range(workers)]
        return await generator.run([partial(user, number) for number in range(connections)], agents)

    return uvloop.run(work())


def live(
    *,
    port: int,
    process_id: int,
    seconds: float,
    warm_up_s: float,
    connections: int,
    module_sets: list[list[str]],
    generation: str,
    checkpoint_ids: list[str],
    workers: int,
) -> Load:
    """Whole lives of calls: clients place and wait for the result; agents fetch, accept and end them, by long polls.
    The latency is the life's.
    """
    generator = Generator(port, process_id, seconds, warm_up_s)

    async def user(number: int, connection: Connection) -> None:
        drawn = random.Random(number)
        while not generator.stop:
            modules = drawn.choice(module_sets)
            begin = time.perf_counter()
            status, body = await connection.ask(_call(modules))
            if not generator.good(status, body):
                continue
            placed = msgspec.json.decode(body, type=CallPlaced)
            while True:
                status, body = await connection.ask(request("GET", f"/v1/calls/{placed.call_id}?wait=30"))
                if not generator.good(status, body) or b'"result":null' not in body:
                    break
            if msgspec.json.decode(body, type=CallStatus).state != "finished":
                generator.errors.append(f"not finished: {body[:300]!r}")
            _count_placed(generator, time.perf_counter() - begin, modules, placed)

    async def agent(number: int) -> None:
        polling = await generator.connect()
        telling = await generator.connect()
        ending = msgspec.json.encode(Result(outcome="returned", payload=b"result", python="3.11"))
        while True:
            status, body = await polling.ask(request("GET", f"/v1/workers/worker-{number}/placements?wait=30"))
            if not generator.good(status, body):
                return
            for each in msgspec.json.decode(body, type=Orders).run:
                if telling.transport is None or telling.transport.is_closing():  # it was idle
                    telling = await generator.connect()
                path = f"/v1/placements/{each.placement_id}"
                accept = request("POST", f"{path}/accept?worker_id=worker-{number}")
                generator.good(*await telling.ask(accept))
                generator.good(*await telling.ask(request("PUT", f"{path}/result", msgspec.Raw(ending))))

    async def work() -> Load:
        agents = [await _report(generator, number, generation, checkpoint_ids) for number in range(workers)]
        agents += [agent(number) for number in range(workers)]
        return await generator.run([partial(user, number) for number in range(connections)], agents)

    return uvloop.run(work())


def explain_and_place(
    *, port: int, module_sets: list[list[str]], placements: int, generation: str, checkpoint_ids: list[str]
) -> None:
    """Explains each module set once and places calls for the first of them, eight at a time; raises for an error."""
    generator = Generator(port, 0, 0, 0)

    async def user(numbers: Iterator[int]) -> None:
        connection = await generator.connect()
        ending = Result(outcome="returned", payload=b"result", python="3.11")
        for number in numbers:
            modules = module_sets[number]
            generator.good(*await connection.ask(request("POST", "/v1/explain", {"modules": modules})))
            if number < placements:
                status, body = await connection.ask(_call(modules))
                if generator.good(status, body):
                    placed = msgspec.json.decode(body, type=CallPlaced).placement
                    path = f"/v1/placements/{placed.placement_id}/result"
                    generator.good(*await connection.ask(request("PUT", path, ending)))

    async def work() -> None:
        reporting = asyncio.ensure_future(await _report(generator, 0, generation, checkpoint_ids))
        numbers = iter(range(len(module_sets)))
        await asyncio.gather(*(user(numbers) for _ in range(8)))
        reporting.cancel()

    uvloop.run(work())
    if generator.errors:
        raise RuntimeError(f"{len(generator.errors)} errors, such as {generator.errors[0]}")


def _call(modules: list[str]) -> bytes:
    payload = bytes(600)  # of a small function
    body = {"payload": payload, "python": "3.11", "modules": modules, "memory": BUDGET}
    return request("POST", "/v1/calls", body)


def _count_placed(generator: Generator, latency_s: float, modules: list[str], placed: CallPlaced) -> None:
    placement = placed.placement
    if generator.count(latency_s):
        cost, cold_cost = placement.cost, placement.cold_cost
        if cost is None or cold_cost is None:
            raise ValueError(f"not scored: {placement.reason}")
        generator.samples.append((modules, placement.checkpoint_id, cost, cold_cost))


async def _report(generator: Generator, number: int, generation: str, checkpoint_ids: list[str]) -> Awaitable[None]:
    """Reports a worker that is ready and holds the generation, and goes on to do so every ten seconds."""
    status = WorkerStatus(
        flavor=Flavor.CPU,
        state="ready",
        python="3.11.7",
        runtime="fork",
        memory_total=MEMORY,
        generations=[HeldGeneration(generation=generation, checkpoint_ids=checkpoint_ids)],
        incarnation=f"benchmark-{number}",
    )
    report = request("PUT", f"/v1/workers/worker-{number}", status)
    await generator.ask_once(report)

    async def go_on() -> None:
        while True:
            await asyncio.sleep(10)
            await generator.ask_once(report)

    return go_on()
