"""The API: explains and placements a second, one router process, 32 connections, generator on the same cores.

The machine's speed changes from second to second: each kind of request has some rounds, and its figure is the quickest's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from benchmarks import limit, load, scoring
from benchmarks.bench import Bench, Line, Target, percentile, say
from benchmarks.load import Load
from benchmarks.router import running_router
from readie.units import ns_to_seconds

CONNECTIONS = 32
ROUNDS = 3
WORKERS = 8

#: Explains a second that module sets must suffice for; a router that is faster is a failure to be glad of.
MOST_EXPLAINS = 2000


def run(bench: Bench) -> Iterator[Line]:
    """Each kind of request for some seconds, on a router of its own for each database."""
    catalogue = bench.catalogue()
    asked = scoring.requests(catalogue, 5)
    plain = bench.fresh(scoring.time_baseline, document=str(catalogue.document), module_sets=asked, expanded=5).value
    seconds, rounds = (6.0, ROUNDS) if not bench.quick else (0.5, 1)
    connections = bench.repeats(CONNECTIONS, 2)
    fresh = catalogue.module_sets(int(rounds * seconds * 1.5 * MOST_EXPLAINS), seed=10)
    again = catalogue.module_sets(200, seed=11)
    held = {"generation": catalogue.generation, "checkpoint_ids": catalogue.checkpoint_ids, "workers": WORKERS}
    loads: dict[str, tuple[Callable[..., Load], dict[str, Any], float | None]] = {
        "api-explain-new": (load.explain, {"module_sets": fresh}, 200),
        "api-explain-repeated": (load.explain_repeatedly, {"module_sets": again}, 1500),
        "api-place": (load.place, {"module_sets": again, **held}, 250),
        "api-live": (load.live, {"module_sets": again, **held}, None),
    }
    for kind in bench.kinds:
        log = bench.folder / "router.log"
        with bench.database(kind) as url, running_router(url, log, catalogue.document.parent) as router:
            for name, (generate, arguments, least) in loads.items():
                say(f"{name} on {kind}")
                timing = {"seconds": seconds, "warm_up_s": seconds / 5, "connections": connections}
                found = []
                for number in range(rounds):
                    asked_now = {"module_sets": fresh[number::rounds]} if name == "api-explain-new" else {}
                    to = {"port": router.port, "process_id": router.process_id}
                    ours = bench.fresh(generate, **to, **timing, **arguments | asked_now).value
                    found.append(msgspec.convert(ours, Load))
                errors = [error for each in found for error in each.errors]
                samples = [sample for each in found for sample in each.samples]
                if errors:
                    say(f"{len(errors)} errors, such as {errors[0]}")
                if wrong := count_wrong(bench.limit(catalogue), samples):
                    raise RuntimeError(f"{name}: {wrong} of {len(samples)} answers are not the limit's")
                rates = [len(each.latencies) / each.seconds for each in found]
                best = found[rates.index(max(rates))]
                wanted = None if name == "api-place" and kind == "duckdb" else least  # a cluster is on PostgreSQL
                line = bench.line(
                    name,
                    catalogue,
                    kind,
                    "a second",
                    max(rates),
                    baseline=1 / percentile(plain["seconds"][0], 0.5),
                    peak_mb=router.peak_mb(),
                    target=None if wanted is None else Target(wanted, "a second", least=True),
                    p50_ms=1000 * percentile(best.latencies, 0.5),
                    p99_ms=1000 * percentile(best.latencies, 0.99),
                    slowest_round=min(rates),
                    errors=len(errors),
                    connections=connections,
                    generator_cores=best.generator_cpu_s / best.seconds,
                    router_cores=best.router_cpu_s / best.seconds,
                    compared=len(samples),
                )
                yield msgspec.structs.replace(line, met=False) if errors and line.met else line


def count_wrong(right: limit.Router, samples: list[tuple[list[str], str | None, float, float]]) -> int:
    """How many answers differ from the limit's."""
    wrong = 0
    for modules, checkpoint_id, cost, cold_cost in samples:
        best = right.answer(modules)
        expected = (best.checkpoint_id, ns_to_seconds(best.cost_ns), ns_to_seconds(best.cold_cost_ns))
        wrong += expected != (checkpoint_id, cost, cold_cost)
    return wrong
