"""The router, as an agent sees it."""

import time
from collections.abc import Callable
from typing import TypeVar

import httpx
import msgspec

from readie.errors import DatabaseUnavailable, RateLimited, ReadieError, RouterUnreachable
from readie.http import MESSAGEPACK, connection, problem_in, read_answer, unreachable
from readie.wire import Orders, Output, Result, WorkerStatus
from worker.settings import WorkerSettings

ANSWERED_TRIES = 20  # of a router that answers, and cannot

T = TypeVar("T")


class Router:
    """The router's routes for agents. Every method raises `RouterUnreachable`, or the problem that it answers."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.worker_id = settings.worker_id
        options = connection(settings.router_url, settings.worker_token, settings.router_ca)
        options["headers"]["Content-Type"] = MESSAGEPACK
        self.http = httpx.Client(
            **options,
            timeout=httpx.Timeout(30.0, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
        )

    def ask(self, method: str, path: str, body: object = None, *, read_s: float = 30.0) -> httpx.Response:
        content = b"" if body is None else msgspec.msgpack.encode(body)
        timeout = httpx.Timeout(read_s, connect=5.0)
        accept = {"Accept": f"{MESSAGEPACK}, application/problem+json"}
        try:
            answer = self.http.request(method, path, content=content, headers=accept, timeout=timeout)
        except httpx.RequestError as error:
            raise unreachable(self.http.base_url, error) from error
        if answer.is_success:
            return answer
        raise problem_in(answer)

    def report(self, status: WorkerStatus) -> None:
        self.ask("PUT", f"/v1/workers/{self.worker_id}", status)

    def fetch(self, wait: float) -> Orders:
        answer = self.ask("GET", f"/v1/workers/{self.worker_id}/placements?wait={wait:g}", read_s=wait + 30.0)
        return read_answer(answer, Orders)

    def accept(self, placement_id: str, incarnation: str, start_s: float) -> None:
        """`start_s`: seconds that it may take until the function runs."""
        who = f"worker_id={self.worker_id}&incarnation={incarnation}"
        self.ask("POST", f"/v1/placements/{placement_id}/accept?{who}&start={start_s:g}")

    def output(self, placement_id: str, output: Output) -> None:
        self.ask("POST", f"/v1/placements/{placement_id}/output", output)

    def result(self, placement_id: str, result: Result) -> Orders:
        """Sends how a placement ended; what there is to do next."""
        path = f"/v1/placements/{placement_id}/result?worker_id={self.worker_id}"
        return read_answer(self.ask("PUT", path, result, read_s=60.0), Orders)


def persist(action: Callable[[], T], give_up: Callable[[], bool]) -> T:
    """Repeats `action` while the router is away, less and less often. Raises what it answers once it answers."""
    pause = 0.1
    answered = 0
    while True:
        try:
            return action()
        except ReadieError as error:
            away = isinstance(error, RouterUnreachable | DatabaseUnavailable | RateLimited)
            answered += not away
            if give_up() or (not away and (error.status < 500 or answered >= ANSWERED_TRIES)):
                raise
        time.sleep(pause)
        pause = min(2 * pause, 2.0)
