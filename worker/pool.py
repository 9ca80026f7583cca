"""Restored sandboxes kept ready for the checkpoints that are asked for most, so that a call waits for no restore.

A pooled sandbox has said hello and imported nothing more. It serves one call, or one session, and is never put back.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable

import structlog

from readie.errors import ReadieError
from readie.manifest import CheckpointSpec
from worker.runtime import UNLIMITED, Call, Runtime, StartFailed, Talk, open_sandbox

RETRY_S = 1.0  # after a restore for the pool has failed, or there was no room for one
UNKNOWN = 256 * 1024 * 1024  # bytes of a sandbox that has not been restored yet
CLOSE_S = 10.0  # how long closing waits for a restore that is under way
HALF = 1_000  # so many calls later, what was asked counts half

log = structlog.get_logger("readie.worker")


def share_out(asked: dict[tuple[str, str], float], size: int) -> Counter[tuple[str, str]]:
    """How many of `size` sandboxes each checkpoint gets: in proportion to how often it is asked for (D'Hondt's method)."""
    shares: Counter[tuple[str, str]] = Counter()
    for _ in range(size if asked else 0):
        shares[min(asked, key=lambda key: (-asked[key] / (shares[key] + 1), key))] += 1
    return shares


class Pool:
    """`size` sandboxes, made by a thread of its own, as far as they fit into the bytes that calls leave: `room` says how many.

    Calls come first: whoever lets them use more calls `give_way` then.
    """

    def __init__(
        self,
        runtime: Runtime,
        size: int,
        start_timeout: float,
        *,
        room: Callable[[], int] = lambda: UNLIMITED,
    ) -> None:
        self.runtime = runtime
        self.room = room
        self.sizes: dict[tuple[str, str], int] = {}  # bytes that a sandbox of it had last
        self.size = size
        self.start_timeout = start_timeout
        self.specs: dict[tuple[str, str], CheckpointSpec] = {}
        self.asked: dict[tuple[str, str], float] = {}
        self.ready: dict[tuple[str, str], list[Talk]] = {}
        self.bytes: dict[Talk, int] = {}
        self.changed = threading.Condition()
        self.closing = False
        self.filler = threading.Thread(target=self.fill_forever, name="pool", daemon=True)
        if size:
            self.filler.start()

    def offer(self, spec: CheckpointSpec) -> None:
        """Has the pool hold sandboxes of a loaded checkpoint, if it is asked for."""
        with self.changed:
            self.specs[spec.key] = spec
            self.changed.notify_all()

    def withdraw(self, spec: CheckpointSpec) -> None:
        """Ends what the pool holds of a checkpoint."""
        with self.changed:
            self.specs.pop(spec.key, None)
            gone = self.ready.pop(spec.key, [])
            for talk in gone:
                del self.bytes[talk]
        for talk in gone:
            talk.close()

    def take(self, spec: CheckpointSpec) -> Talk | None:
        """A sandbox of the checkpoint that no call has had, if there is one; and notes that it was asked for."""
        if not self.size:
            return None
        dead = []
        try:
            with self.changed:
                for key in self.asked:
                    self.asked[key] *= 0.5 ** (1 / HALF)
                self.asked[spec.key] = self.asked.get(spec.key, 0.0) + 1.0
                self.changed.notify_all()
                while talks := self.ready.get(spec.key):
                    talk = talks.pop(0)
                    del self.bytes[talk]
                    if talk.idle:
                        return talk
                    dead.append(talk)
            return None
        finally:
            for talk in dead:
                talk.close()

    @property
    def memory(self) -> int:
        """Bytes that the pooled sandboxes used when they were ready."""
        with self.changed:
            return sum(self.bytes.values())

    def give_way(self) -> None:
        """Ends what does not fit into the bytes that calls leave; of what is asked for least, first."""
        if not self.size:
            return
        room = self.room()  # without the lock: who answers has one of his own
        gone = []
        with self.changed:
            while self.bytes and sum(self.bytes.values()) > room:
                held = (key for key, talks in self.ready.items() if talks)
                talk = self.ready[min(held, key=lambda key: self.asked.get(key, 0.0) / len(self.ready[key]))].pop()
                del self.bytes[talk]
                gone.append(talk)
            if gone:
                self.changed.notify_all()  # others are made once there is room again
        for talk in gone:
            talk.close()

    def lacking(self) -> CheckpointSpec | None:
        """The checkpoint that should have more sandboxes than it has."""
        asked = {key: count for key, count in self.asked.items() if key in self.specs}
        shares = share_out(asked, self.size)
        for key, share in shares.most_common():
            if len(self.ready.get(key, ())) < share:
                return self.specs[key]
        return None

    def surplus(self) -> list[Talk]:
        """Takes out what is more than its share, once another checkpoint lacks a sandbox."""
        asked = {key: count for key, count in self.asked.items() if key in self.specs}
        shares = share_out(asked, self.size)
        gone = []
        for key, talks in self.ready.items():
            while len(talks) > shares[key]:
                gone.append(talks.pop())
        for talk in gone:
            del self.bytes[talk]
        return gone

    def fill_forever(self) -> None:
        call = Call(
            payload=b"",
            python="",
            modules=[],
            memory=UNLIMITED,
            max_memory=UNLIMITED,
            timeout=self.start_timeout,
            start_timeout=self.start_timeout,
            max_payload=0,
        )
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closing or self.lacking())
                if self.closing:
                    return
                spec = self.lacking()
                gone = self.surplus()
            for talk in gone:
                talk.close()
            if spec is None:
                continue
            if self.memory + self.sizes.get(spec.key, UNKNOWN) > self.room():
                time.sleep(RETRY_S)
                continue
            try:
                talk = open_sandbox(self.runtime, spec, call)
            except (StartFailed, ReadieError, OSError) as error:
                log.warning("a sandbox for the pool could not be restored", checkpoint=spec.key[1], reason=str(error))
                time.sleep(RETRY_S)
                continue
            with self.changed:
                wanted = spec.key in self.specs and not self.closing
                if wanted:
                    self.ready.setdefault(spec.key, []).append(talk)
                    self.bytes[talk] = self.sizes[spec.key] = talk.sandbox.memory()
            if not wanted:
                talk.close()
            self.give_way()  # to a call that came meanwhile

    def close(self) -> None:
        """Ends all that it holds."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        if self.size:
            self.filler.join(CLOSE_S)
        for spec in list(self.specs.values()):
            self.withdraw(spec)
