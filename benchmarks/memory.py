"""Memory of a router that serves: after its start, after a thousand different explains and some placements."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks import baseline, load
from benchmarks.bench import Bench, Line, Target
from benchmarks.fresh import run_fresh
from benchmarks.imports import import_into
from benchmarks.router import Router, running_router

#: MB, of the router's process.
MOST_MB = {"duckdb": 400.0, "postgresql": 200.0}


def run(bench: Bench) -> Iterator[Line]:
    """One router on each database, started on a catalogue that was imported before."""
    catalogue = bench.catalogue()
    base = run_fresh(baseline.load_and_weigh, document=str(catalogue.document))
    count = bench.repeats(1000, 50)
    log = bench.folder / "router.log"
    for kind in bench.kinds:
        with bench.database(kind) as url:
            bench.fresh(import_into, url=url, document=str(catalogue.document))
            with running_router(url, log, catalogue.document.parent) as router:
                started_mb = router.resident_mb()
                bench.fresh(
                    load.explain_and_place,
                    port=router.port,
                    module_sets=catalogue.module_sets(count, seed=20),
                    placements=count // 5,
                    generation=catalogue.generation,
                    checkpoint_ids=catalogue.checkpoint_ids,
                )
                time.sleep(1)
                served_mb, peak_mb = router.resident_mb(), router.peak_mb()
                if not bench.quick:
                    _send(router, bench.catalogue(missing=0.03).document)
                yield bench.line(
                    "memory",
                    catalogue,
                    kind,
                    "MB",
                    served_mb,
                    baseline=base.value,
                    peak_mb=peak_mb,
                    target=Target(MOST_MB[kind], "MB"),
                    started_mb=started_mb,
                    explains=count,
                    placements=count // 5,
                    **({} if bench.quick else {"after_import_mb": router.resident_mb()}),
                )


def _send(router: Router, document: Path) -> None:
    """Has the router import another catalogue of the same size, as POST /v1/catalogues."""
    with document.open("rb") as content:
        answer = httpx.post(
            f"http://127.0.0.1:{router.port}/v1/catalogues",
            content=content,
            headers={"Content-Type": "application/json"},
            timeout=300,
            trust_env=False,
        )
    answer.raise_for_status()
