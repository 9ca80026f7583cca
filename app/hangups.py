"""SIGHUP: do something again, in a thread of its own, once for all signals that come while it is being done."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

#: Seconds that the end of the process waits for an action that runs.
LAST_WAIT = 10.0


class Hangups:
    """The SIGHUPs of this process, from the first moment on: those that come before anybody answers are kept."""

    def __init__(self) -> None:
        # A signal handler may interrupt itself: of all queues and events this one's `put` bears that.
        self._asked: SimpleQueue[bool] = SimpleQueue()

    @contextmanager
    def received(self) -> Iterator[None]:
        """Takes the signal, which would end the process otherwise. In the main thread only."""
        before = signal.signal(signal.SIGHUP, lambda *_: self.ask())
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, before)

    def ask(self) -> None:
        """What the signal does."""
        self._asked.put(True)

    @contextmanager
    def answered(self, action: Callable[[], object]) -> Iterator[None]:
        """Runs `action`, which must not raise, whenever it was asked for since it last began."""
        thread = threading.Thread(target=self._answer, args=(action,), name="hangups", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._asked.put(False)
            thread.join(LAST_WAIT)

    def _answer(self, action: Callable[[], object]) -> None:
        while self._wait():
            action()

    def _wait(self) -> bool:
        """Waits to be asked; False: this is the end. The queue is empty then, so what comes later asks anew."""
        going = self._asked.get()
        while going and not self._asked.empty():
            going = self._asked.get()
        return going
