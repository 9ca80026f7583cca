"""A real router process, as `readie-router serve` starts it."""

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fresh import ROOT, memory_mb
from tests.routers import SETTINGS


@dataclass(frozen=True)
class Router:
    port: int
    process_id: int
    ready_s: float  # from the process's start to its first good answer on /ready

    def resident_mb(self) -> float:
        return memory_mb("VmRSS", self.process_id)

    def peak_mb(self) -> float:
        return memory_mb("VmHWM", self.process_id)


@contextmanager
def running_router(database_url: str, log: Path, catalogue_dir: Path | None = None) -> Iterator[Router]:
    """A router that is ready. What it logs goes to the file `log`."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    environ |= {"DATABASE_URL": database_url, "ROUTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    if catalogue_dir is not None:
        environ["CATALOGUE_DIR"] = str(catalogue_dir)
    with log.open("ab") as stream:
        begin = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "app", "serve"], env=environ, stdout=stream, stderr=stream)
    try:
        while not _is_ready(port):
            if process.poll() is not None or time.perf_counter() - begin > 120:
                raise RuntimeError(f"the router did not start:\n{log.read_text()}")
            time.sleep(0.005)
        yield Router(port, process.pid, time.perf_counter() - begin)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(port: int) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
