"""Memory of a router that serves: after its start, after a thousand different explains and some placements."""

import time
from collections.abc import Iterator

from benchmarks import baseline, load
from benchmarks.bench import Bench, Line, Target
from benchmarks.fresh import run_fresh
from benchmarks.imports import import_into
from benchmarks.router import running_router

#: MB, of the router's process.
MOST_MB = {"duckdb": 400.0, "postgresql": 200.0}


def run(bench: Bench) -> Iterator[Line]:
    """One router on each database, started on a catalogue that was imported before."""
    catalogue = bench.catalogue()
    base = run_fresh(baseline.load_only, document=str(catalogue.document))
    count = bench.repeats(1000, 50)
    log = bench.folder / "router.log"
    for kind in bench.kinds:
        with bench.database(kind) as url:
            run_fresh(import_into, url=url, document=str(catalogue.document))
            with running_router(url, log, catalogue.document.parent) as router:
                started_mb = router.resident_mb()
                run_fresh(
                    load.explain_and_place,
                    port=router.port,
                    module_sets=catalogue.module_sets(count, seed=20),
                    placements=count // 5,
                    generation=catalogue.generation,
                    checkpoint_ids=catalogue.checkpoint_ids,
                )
                time.sleep(1)
                yield bench.line(
                    "memory",
                    catalogue,
                    kind,
                    "MB",
                    router.resident_mb(),
                    baseline=base.resident_mb,
                    peak_mb=router.peak_mb(),
                    target=Target(MOST_MB[kind], "MB"),
                    started_mb=started_mb,
                    explains=count,
                    placements=count // 5,
                )
