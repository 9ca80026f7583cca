"""Requests that arrive together are served together: one transaction, and one commit, for all of them.

While a group is served in a thread, the next one gathers. Who comes alone is served at once.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from readie.errors import DatabaseUnavailable

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

#: Requests in one group at most: the first waits as long as all of them take.
MOST = 64


class Groups(Generic[Asked, Answer]):
    """Requests of one kind, which `serve` answers in a thread: for each of a group, in its order, an answer or an error.

    What `serve` raises undoes the group; then each of it is served alone, so that none fails because of another.
    A group has at most `most` requests, and `at_once` groups are served at the same time.
    """

    def __init__(
        self,
        name: str,
        serve: Callable[[Sequence[Asked]], Sequence[Answer | Exception]],
        *,
        most: int = MOST,
        at_once: int = 1,
    ) -> None:
        self._name = name
        self._serve = serve
        self._most = most
        self._at_once = at_once
        self._gathered: deque[tuple[Asked, asyncio.Future[Answer]]] = deque()
        self._serving: list[asyncio.Task[None]] = []
        # Of its own: a group must not wait behind requests that take long.
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix=name)

    async def ask(self, asked: Asked) -> Answer:
        """The answer to one request. Raises the error that it was answered with."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Answer] = loop.create_future()
        self._gathered.append((asked, answered))
        self._serving = [task for task in self._serving if not task.done() and task.get_loop() is loop]
        if len(self._serving) < self._at_once:
            self._serving.append(loop.create_task(self._serve_all(), name=self._name))
        return await answered

    async def _serve_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._gathered:
            group = [self._gathered.popleft() for _ in range(min(self._most, len(self._gathered)))]
            answers = await loop.run_in_executor(self._threads, self._answer, [asked for asked, _ in group])
            for (_, answered), answer in zip(group, answers, strict=True):
                if answered.done():  # cancelled: who asked has gone
                    continue
                if isinstance(answer, Exception):
                    answered.set_exception(answer)
                else:
                    answered.set_result(answer)

    def _answer(self, group: Sequence[Asked]) -> Sequence[Answer | Exception]:
        try:
            return self._serve(group)
        except Exception as error:  # noqa: BLE001 # it is answered with
            if len(group) == 1 or isinstance(error, DatabaseUnavailable):
                return [error] * len(group)
        return [answer for asked in group for answer in self._answer([asked])]
