"""Import: a catalogue from its document, and from its Parquet projection, into an empty database.

Seconds are from the function's call to the end of its transaction, in a fresh process that has loaded its libraries,
as a router has; beside them those of the whole process. The baseline's are those of its load.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from app.catalogue import import_catalogue
from app.database import open_database
from benchmarks import baseline
from benchmarks.bench import Bench, Kind, Line, Target
from benchmarks.fresh import Outcome, run_fresh
from readie.projection import load_catalogue

#: Of the peak memory of the importing process, in MB.
MOST_MEMORY_MB = 800.0


def run(bench: Bench) -> Iterator[Line]:
    """Ours and the baseline's in turns."""
    catalogue = bench.catalogue()
    parses: list[Outcome] = []
    json: dict[Kind, list[Outcome]] = {kind: [] for kind in bench.kinds}
    parquet: dict[Kind, list[Outcome]] = {kind: [] for kind in bench.kinds}
    for _ in range(bench.repeats(3)):
        parses.append(run_fresh(baseline.load_only, document=str(catalogue.document)))
        for kind in bench.kinds:
            for path, outcomes in ((catalogue.document_alone, json), (catalogue.document, parquet)):
                with bench.database(kind) as url:
                    outcomes[kind].append(bench.fresh(import_into, url=url, document=str(path)))
    parse_s = statistics.median(each.value for each in parses)
    for name, outcomes, bound in (("import-json", json, 1.5), ("import-parquet", parquet, 0.25)):
        for kind, ours in outcomes.items():
            peak_mb = max(each.peak_mb for each in ours)
            yield bench.line(
                name,
                catalogue,
                kind,
                "s",
                statistics.median(each.value for each in ours),
                baseline=parse_s,
                peak_mb=peak_mb,
                target=Target(bound, "s", base=parse_s, of="baseline"),
                runs=len(ours),
                slowest_s=max(each.value for each in ours),
                whole_process_s=statistics.median(each.seconds for each in ours),
                baseline_whole_process_s=statistics.median(each.seconds for each in parses),
            )
            yield bench.line(
                f"{name}-memory",
                catalogue,
                kind,
                "MB",
                peak_mb,
                baseline=max(each.peak_mb for each in parses),
                peak_mb=peak_mb,
                target=Target(MOST_MEMORY_MB, "MB"),
            )


def import_into(url: str, document: str) -> float:
    """Seconds in which the catalogue of a document is in the database, and active."""
    with closing(open_database(url)) as database:
        begin = time.perf_counter()
        catalogue = load_catalogue(Path(document))
        import_catalogue(database, catalogue)
        seconds = time.perf_counter() - begin
    if Path(document).with_suffix(".parquet").exists() and catalogue.warnings:
        raise RuntimeError(f"the projection was not used: {catalogue.warnings}")
    return seconds
