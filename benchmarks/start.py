"""Router start: to its first answer on /ready, with the catalogue imported before, against without any."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks import baseline
from benchmarks.bench import Bench, Line, Target
from benchmarks.fresh import run_fresh
from benchmarks.imports import import_into
from benchmarks.router import running_router


def run(bench: Bench) -> Iterator[Line]:
    """Starts in turns with and without: what disturbs the machine disturbs both."""
    catalogue = bench.catalogue()
    parse = run_fresh(baseline.load_only, document=str(catalogue.document))
    log = bench.folder / "router.log"
    nothing = bench.folder / "nothing"
    nothing.mkdir(exist_ok=True)
    for kind in bench.kinds:
        seconds: dict[Path, list[float]] = {catalogue.document.parent: [], nothing: []}
        with bench.database(kind) as holding, bench.database(kind) as empty:
            urls = dict(zip(seconds, (holding, empty), strict=True))
            bench.fresh(import_into, url=holding, document=str(catalogue.document))
            peaks_mb: list[float] = []
            for _ in range(bench.repeats(7)):
                for folder, url in urls.items():
                    with running_router(url, log, folder) as router:
                        seconds[folder].append(router.ready_s)
                        peaks_mb.append(router.peak_mb())
        with_it, without = (statistics.median(each) for each in seconds.values())
        yield bench.line(
            "start",
            catalogue,
            kind,
            "s more",
            with_it - without,
            baseline=parse.value,
            peak_mb=max(peaks_mb),
            target=Target(1, "s"),
            with_s=with_it,
            without_s=without,
            slowest_with_s=max(seconds[catalogue.document.parent]),
            starts=len(seconds[nothing]),
        )
