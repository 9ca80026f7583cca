"""How import, memory and scoring grow with the size of the catalogue: from 1 MB to 400 MB."""

import statistics
from collections.abc import Iterator

from benchmarks import baseline, scoring
from benchmarks.bench import Bench, Line, say
from benchmarks.fresh import run_fresh
from benchmarks.imports import import_into

#: Items; about 1, 11, 51, 100 and 400 MB.
PACKAGES = [250, 800, 1600, 2500, 5000]


def run(bench: Bench) -> Iterator[Line]:
    """All sizes up to the one that was asked for."""
    for packages in [each for each in PACKAGES if each <= bench.packages]:
        catalogue = bench.catalogue(packages)
        rounds, singles = bench.repeats(scoring.ROUNDS, 2), bench.repeats(20, 3)
        asked = scoring.requests(catalogue, rounds * singles)
        repeats = bench.repeats(3 if catalogue.size.megabytes < 60 else 1)
        document = str(catalogue.document)
        parses = [run_fresh(baseline.load_only, document=document) for _ in range(repeats)]
        plain = bench.fresh(
            scoring.time_baseline, document=document, module_sets=asked, expanded=bench.repeats(3), rounds=rounds
        )
        bits = scoring.time_limit(bench.limit(catalogue), asked)
        for kind in bench.kinds:
            say(f"{catalogue.size.megabytes} MB on {kind}")
            imports = []
            for number in range(repeats):
                with bench.database(kind) as url:
                    imports.append(bench.fresh(import_into, url=url, document=str(catalogue.document_alone)))
                    if number == 0:
                        scored = bench.fresh(
                            scoring.time_ours,
                            url=url,
                            module_sets=asked,
                            rounds=rounds,
                            singles=singles,
                            pause_s=bench.pause_s,
                        ).value["single"]
            yield bench.line(
                "growth-import",
                catalogue,
                kind,
                "s",
                statistics.median(each.value for each in imports),
                baseline=statistics.median(each.value for each in parses),
                peak_mb=max(each.peak_mb for each in imports),
                baseline_peak_mb=max(each.peak_mb for each in parses),
            )
            yield bench.line(
                "growth-scoring",
                catalogue,
                kind,
                "ms a call",
                scoring.quickest_ms(scored["seconds"]),
                baseline=scoring.quickest_ms(plain.value["seconds"]),
                limit=scoring.quickest_ms([bits["seconds"]]),
            )
