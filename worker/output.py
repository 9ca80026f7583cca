"""What a call prints, on its way to the router."""

import threading
from collections import deque
from collections.abc import Callable

import structlog

from readie.errors import ReadieError
from readie.wire import Output, Stream

PIECE = 256 * 1024  # characters that travel together

log = structlog.get_logger("readie.worker")


class OutputSender:
    """Sends what a call prints, in order, in pieces, from a thread that starts with the first of it."""

    def __init__(self, send: Callable[[Output], None], limit: int) -> None:
        self.send = send
        self.room = limit
        self.limit = limit
        self.sequence = 0
        self.waiting: deque[tuple[Stream, str]] = deque()
        self.changed = threading.Condition()
        self.finished = False
        self.thread: threading.Thread | None = None

    def add(self, stream: Stream, text: str) -> None:
        """Takes a piece; beyond the limit it is dropped, and that is said once."""
        with self.changed:
            if self.room < 0:
                return
            self.room -= len(text)
            if self.room < 0:
                text = text[: self.room]
                self.waiting.append((stream, text))
                stream, text = "stderr", f"\n[readie: output beyond {self.limit} characters is dropped]\n"
            self.waiting.append((stream, text))
            if self.thread is None:
                self.thread = threading.Thread(target=self.run, name="output", daemon=True)
                self.thread.start()
            self.changed.notify()

    def run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.finished)
                if not self.waiting:
                    return
                stream, text = self.waiting.popleft()
                while self.waiting and self.waiting[0][0] == stream and len(text) < PIECE:
                    text += self.waiting.popleft()[1]
                if len(text) > PIECE:
                    self.waiting.appendleft((stream, text[PIECE:]))
                    text = text[:PIECE]
            if not text:
                continue
            try:
                self.send(Output(sequence=self.sequence, stream=stream, text=text))
            except ReadieError as error:
                log.warning("output not sent", reason=error.detail)
                with self.changed:
                    self.room = -1
                    self.waiting.clear()
            self.sequence += 1

    def finish(self) -> None:
        """Waits until everything is sent."""
        with self.changed:
            self.finished = True
            self.changed.notify()
        if self.thread:
            self.thread.join()
