"""Long polls: they wait in the event loop, and what this process writes to the database wakes them.

What other routers write wakes them too (app/relay.py). Behind the wake-ups is a slow look into the database, for what was
lost.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import sha256
from typing import TypeVar

#: Seconds between two looks into the database where nothing wakes.
DATABASE_POLL = 2.0

#: What waits for room on a worker.
CAPACITY = "capacity"

Answer = TypeVar("Answer")


def worker_topic(worker_id: str) -> str:
    """What wakes the agent of a worker: a placement for it, or one to end."""
    return f"worker:{worker_id}"


def call_topic(call_id: str) -> str:
    """What wakes those who follow a call: output, another placement, its end."""
    return f"call:{call_id}"


def session_topic(session_id: str) -> str:
    """What wakes the calls that wait for their turn in a session: it has become free, or is over."""
    return f"session:{sha256(session_id.encode()).hexdigest()[:32]}"  # an id may be long, and any text


class WakeUps:
    """The long polls of this process, by topic."""

    def __init__(self) -> None:
        self.closed = False
        self.relay: Callable[[tuple[str, ...]], None] | None = None  # tells other routers
        self._lock = threading.RLock()  # a signal may ring while its own thread registers
        self._waiting: dict[str, dict[asyncio.Event, asyncio.AbstractEventLoop]] = {}

    def ring(self, *topics: str) -> None:
        """Wakes who waits for one of the topics, at any router. To be called after the transaction, from any thread."""
        if topics and self.relay is not None:
            self.relay(topics)
        self.hear(*topics)

    def ring_all(self) -> None:
        """Wakes all of this process."""
        with self._lock:
            topics = list(self._waiting)
        self.hear(*topics)

    def hear(self, *topics: str) -> None:
        """Wakes who waits in this process for one of the topics."""
        with self._lock:
            sleepers = [sleeper for topic in topics for sleeper in self._waiting.get(topic, {}).items()]
        for event, loop in sleepers:
            with suppress(RuntimeError):  # its loop is closed: nobody waits there
                loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        """Ends all waiting, now and later: the process is about to stop."""
        self.closed = True
        self.ring_all()

    async def wait(
        self, topic: str, seconds: float, read: Callable[[], Awaitable[Answer]], enough: Callable[[Answer], bool]
    ) -> Answer:
        """What `read` gives as soon as it is `enough`, or else when `seconds` are over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        woken = asyncio.Event()
        with self._lock:
            self._waiting.setdefault(topic, {})[woken] = loop
        try:
            while True:
                woken.clear()  # before reading: what is written from here on wakes
                answer = await read()
                left = deadline - loop.time()
                if enough(answer) or left <= 0 or self.closed:
                    return answer
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), min(left, DATABASE_POLL))
        finally:
            with self._lock:
                del self._waiting[topic][woken]
                if not self._waiting[topic]:
                    del self._waiting[topic]
