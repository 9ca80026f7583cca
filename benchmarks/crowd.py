"""Placements in a large cluster: `python benchmarks/crowd.py`, 2,000 workers, 100,000 sessions, 1,000,000 ended calls.

The rows are simulated: what workers report and calls leave behind is written straight into the tables, beside the
committed catalogue. Then calls are placed, each in a transaction of its own, as a router does for one that comes alone:
new ones, and such that go on in a session. Each is ended again. Beside them, in turns, the same in an empty cluster of
20 workers. The result is one JSON document; the exit status is 1 where the median of a placement is above 10 ms on
either database.
"""

import argparse
import gzip
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import structlog  # noqa: E402
from sqlalchemy import text  # noqa: E402

from app.catalogue import import_catalogue  # noqa: E402
from app.database import Database, open_database  # noqa: E402
from app.lease import end_placements, find_orders  # noqa: E402
from app.liveness import report_status, sweep  # noqa: E402
from app.placement import place_call  # noqa: E402
from app.settings import RouterSettings  # noqa: E402
from benchmarks.bench import KINDS, opened_bench  # noqa: E402
from readie.document import Catalogue  # noqa: E402
from readie.flavor import Flavor  # noqa: E402
from readie.projection import load_catalogue  # noqa: E402
from readie.wire import CallPlaced, CallRequest, HeldGeneration, Result, SandboxStatus, WorkerStatus  # noqa: E402

GIB = 2**30
LIMIT_MS = 10.0
SETS = 100  # sets of modules that calls come with: a cluster's functions are called again and again
SETTINGS = RouterSettings(worker_ttl=86_400.0)

#: Ended calls, each with two modules and a result that was dropped; sessions with their sandboxes, evenly over workers.
FILL = """
INSERT INTO calls (
    call_id, state, function, python, gpu, memory_bytes, max_memory_bytes, session_id, cold, retry, timeout_ms, attempts,
    placement_id, worker_id, worker_flavor, reason, outcome, started, measured_ready_ns, predicted_ready_ns,
    created_at, accepted_at, finished_at, read_at, continues
)
SELECT
    'call-' || n, 'finished', 'module.function', '3.11', false, 1073741824, 1073741824, NULL, false, false, 600000, 1,
    'call-' || n || '-1', 'worker-' || (n % {workers}), 'cpu', 'cheapest', 'returned', 'restored', 200000000, 250000000,
    now() - n * INTERVAL '1 second', now() - n * INTERVAL '1 second', now() - n * INTERVAL '1 second', now(), false
FROM generate_series(1, {calls}) AS numbers(n);
INSERT INTO call_modules (call_id, position, module, item)
SELECT 'call-' || n, place, 'numpy', 'numpy'
FROM generate_series(1, {calls}) AS numbers(n) CROSS JOIN generate_series(0, 1) AS places(place);
INSERT INTO sessions (session_id, worker_id, call_id, incarnation, created_at, used_at)
SELECT 'session-' || n, 'worker-' || (n % {workers}), 'call-' || n, 'i', now(), now()
FROM generate_series(1, {sessions}) AS numbers(n);
"""


def statuses(workers: int, sessions: int, catalogue: Catalogue) -> Iterator[tuple[str, WorkerStatus]]:
    """What each worker reports, with the sandboxes of its sessions."""
    held = HeldGeneration(
        generation=catalogue.generation,
        checkpoint_ids=[each.checkpoint_id for each in catalogue.checkpoints],
        restore_fixed=0.2,
        cold_fixed=1.2,
    )
    for number in range(workers):
        own = range(number or workers, sessions + 1, workers)
        boxes = [SandboxStatus(sandbox_id=f"box-{n}", session_id=f"session-{n}", memory=GIB) for n in own]
        yield (
            f"worker-{number}",
            WorkerStatus(
                flavor=Flavor.CPU,
                state="ready",
                python="3.11.7",
                runtime="fork",
                memory_total=256 * GIB,
                sandboxes=boxes,
                generations=[held],
                incarnation="i",
            ),
        )


def fill(database: Database, catalogue: Catalogue, workers: int, sessions: int, calls: int) -> None:
    import_catalogue(database, catalogue)
    with database.transaction() as connection:
        for worker_id, status in statuses(workers, 0, catalogue):
            report_status(connection, worker_id, status)
    if calls:
        for statement in FILL.format(workers=workers, sessions=sessions, calls=calls).split(";")[:-1]:
            with database.transaction() as connection:
                connection.execute(text(statement))
    with database.transaction() as connection:
        for worker_id, status in statuses(workers, sessions, catalogue):
            report_status(connection, worker_id, status)
    if database.is_shared:
        with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ANALYZE"))


def timed(seconds: list[float], action: Any, *arguments: Any) -> Any:
    began = time.perf_counter()
    try:
        return action(*arguments)
    finally:
        seconds.append(time.perf_counter() - began)


def place(database: Database, request: CallRequest) -> CallPlaced:
    with database.transaction() as connection:
        return place_call(connection, database, SETTINGS, request)


def end(database: Database, placed: CallPlaced) -> None:
    with database.transaction() as connection:
        end_placements(connection, [(placed.placement.placement_id, Result(outcome="returned", payload=b"x"))])


def measure(database: Database, sets: list[list[str]], sessions: int, reported: WorkerStatus, rounds: int) -> Any:
    """Seconds of each action."""
    drawn = random.Random(1)
    found: dict[str, list[float]] = {name: [] for name in ("place", "end", "continue", "report", "orders", "sweep")}

    def report() -> None:
        with database.transaction() as connection:
            report_status(connection, "worker-1", reported)

    for number in range(rounds):
        request = CallRequest(payload=b"x" * 600, python="3.11", modules=drawn.choice(sets), memory=GIB)
        placed = timed(found["place"], place, database, request)
        timed(found["end"], end, database, placed)
        if sessions:
            name = f"session-{drawn.randrange(1, sessions + 1)}"
            further = CallRequest(payload=b"x" * 600, python="3.11", modules=drawn.choice(sets), session_id=name)
            end(database, timed(found["continue"], place, database, further))
        timed(found["report"], report)
        timed(found["orders"], find_orders, database, "worker-1")
        if number % 20 == 0:
            timed(found["sweep"], sweep, database, SETTINGS)
    return found


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1000 * each for each in seconds)
    return {"median": round(statistics.median(ordered), 2), "p99": round(ordered[int(0.99 * len(ordered))], 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2_000)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    catalogue = load_catalogue(ROOT / "catalogues" / "cpu.json")
    lines = gzip.decompress((ROOT / "corpora" / "cpu.jsonl.gz").read_bytes()).splitlines()
    sets = [json.loads(line)["modules"] for line in lines[:SETS]]  # the most frequent
    sizes = {"large": (options.workers, options.sessions, options.calls), "empty": (20, 0, 0)}
    result: dict[str, Any] = {"sizes": sizes, "milliseconds": {}}
    worst = 0.0
    with ExitStack() as stack:
        bench = stack.enter_context(opened_bench(0, KINDS, quick=False))
        for kind in KINDS:
            for name, size in sizes.items():
                url = stack.enter_context(bench.database(kind))
                with closing(open_database(url)) as database:
                    fill(database, catalogue, *size)
                    reported = dict(statuses(size[0], size[1], catalogue))["worker-1"]
                    measure(database, sets, size[1], reported, SETS)  # what is prepared and remembered once
                    found = measure(database, sets, size[1], reported, options.rounds)
                said = {action: summary(seconds) for action, seconds in found.items() if seconds}
                result["milliseconds"][f"{kind}, {name}"] = said
                worst = max(worst, said["place"]["median"])
                print(kind, name, said, file=sys.stderr)
    print(json.dumps(result, indent=1))
    return int(worst > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
