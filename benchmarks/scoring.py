"""Scoring: three modules with closures of about half of everything, on either database.

Each answer is compared with the baseline's: one difference, and the benchmark fails. The baseline expands closures for
every call, by lists that may be direct or transitive. One that believes that they are transitive is quicker; its
figure is beside it, and all answers are compared with it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from app.catalogue import find_active_catalogue
from app.database import open_database
from app.scoring import Choice, ScoreRequest, score_calls
from benchmarks import baseline, limit
from benchmarks.baseline import Answer
from benchmarks.bench import Bench, Kind, Line, Target, percentile, say
from benchmarks.catalogues import GeneratedCatalogue
from benchmarks.imports import import_into
from readie.flavor import Flavor

BATCH = 64
WARM_UP = 8

#: Milliseconds a call at most: one never seen before, in a batch, with checkpoints that are no closed sets, seen before.
SINGLE_MS = {"duckdb": 4.0, "postgresql": 2.0}
BATCH_MS = {"duckdb": 0.5, "postgresql": 1.5}
OPEN_MS = 8.0
SEEN_MS = 0.05

_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")


def requests(catalogue: GeneratedCatalogue, count: int) -> list[list[str]]:
    """The module sets that are asked for, each once: some to warm up, then `count`."""
    return catalogue.module_sets(WARM_UP + count, seed=1)


def run(bench: Bench) -> Iterator[Line]:
    """On the catalogue, and on one whose checkpoints lack 3 % of their items."""
    for missing, suffix in [(0.0, ""), (0.03, "-open")][: bench.repeats(2)]:
        catalogue = bench.catalogue(missing=missing)
        say(f"the baseline scores {catalogue.document}")
        singles, batches = bench.repeats(128, 8), bench.repeats(3)
        asked = requests(catalogue, singles + batches * BATCH)
        document = str(catalogue.document)
        plain = bench.fresh(time_baseline, document=document, module_sets=asked, expanded=bench.repeats(20, 3)).value
        bits = time_limit(bench.limit(catalogue), asked)
        _compare("the limit", bits["answers"], plain["answers"])
        for kind in bench.kinds:
            say(f"scoring{suffix} on {kind}")
            with bench.database(kind) as url:
                bench.fresh(import_into, url=url, document=document)
                ours = bench.fresh(time_ours, url=url, module_sets=asked, singles=singles)
            for way, target in _targets(kind, closed=not missing).items():
                seconds, answers = ours.value[way]["seconds"], ours.value[way]["answers"]
                first = singles if way == "batch" else 0
                _compare(f"{kind}, {way}", answers, plain["answers"][first : first + len(answers)])
                yield bench.line(
                    f"scoring-{way}{suffix}",
                    catalogue,
                    kind,
                    "ms a call",
                    _ms(seconds, 0.5),
                    baseline=_ms(plain["seconds"], 0.5),
                    limit=_ms(bits["seconds"], 0.5),
                    peak_mb=ours.peak_mb,
                    target=target,
                    p95_ms=_ms(seconds, 0.95),
                    measured=len(seconds),
                    **({"a_statement": BATCH} if way == "batch" else {}),
                    compared=len(answers),
                    baseline_p95_ms=_ms(plain["seconds"], 0.95),
                    baseline_transitive_ms=_ms(plain["transitive_seconds"], 0.5),
                )


def _targets(kind: Kind, *, closed: bool) -> dict[str, Target | None]:
    """The ways of asking that are measured, with what each may take."""
    return {
        "single": Target(SINGLE_MS[kind] if closed else OPEN_MS, "ms"),
        "batch": Target(BATCH_MS[kind], "ms") if closed else None,
        "seen": Target(SEEN_MS, "ms") if closed else None,
    }


def _ms(seconds: Sequence[float], part: float) -> float:
    return 1000 * percentile(seconds, part)


def _compare(who: str, answers: list[Any], right: list[Any]) -> None:
    wrong = [number for number, answer in enumerate(answers) if answer != right[number]]
    if wrong or len(answers) != len(right):
        number = wrong[0] if wrong else len(answers)
        raise RuntimeError(
            f"{who}: {len(wrong)} of {len(answers)} answers are not the baseline's ({len(right)}); the first: "
            f"{answers[number : number + 1]}, not {right[number]}"
        )


def time_limit(router: limit.Router, module_sets: list[list[str]]) -> dict[str, Any]:
    """Seconds a call of the same algebra in NumPy."""
    for modules in module_sets[:WARM_UP]:
        router.answer(modules)
    found = [_timed(router.answer, modules) for modules in module_sets[WARM_UP:]]
    return {"seconds": [seconds for seconds, _ in found], "answers": [_answer(answer) for _, answer in found]}


# ---- in processes of their own; answers are (checkpoint id, cost, cold cost) in nanoseconds ----


def time_ours(url: str, module_sets: list[list[str]], singles: int) -> dict[str, Any]:
    """Seconds a call: the first `singles` one in a statement, each again, the others many in a statement."""
    with closing(open_database(url)) as database:
        with database.reading() as connection:
            active = find_active_catalogue(connection, Flavor.CPU)
        if active is None:
            raise RuntimeError("the catalogue is not active")

        def score(module_sets: Sequence[list[str]]) -> tuple[float, list[Choice]]:
            requests = [
                ScoreRequest(catalogue_id=active.catalogue_id, sha256=active.sha256, modules=modules)
                for modules in module_sets
            ]
            with database.reading() as connection:
                return _timed(partial(score_calls, connection), requests)

        for modules in module_sets[:WARM_UP]:
            score([modules])
        asked, rest = module_sets[WARM_UP : WARM_UP + singles], module_sets[WARM_UP + singles :]
        single = [score([modules]) for modules in asked]
        seen = [score([modules]) for modules in asked]
        batches = [score(rest[start : start + BATCH]) for start in range(0, len(rest), BATCH)]
    return {
        way: {
            "seconds": [seconds / len(choices) for seconds, choices in scored],
            "answers": [_answer(choice) for _, choices in scored for choice in choices],
        }
        for way, scored in (("single", single), ("seen", seen), ("batch", batches))
    }


def time_baseline(document: str, module_sets: list[list[str]], expanded: int) -> dict[str, Any]:
    """Seconds a call of the baseline for the first `expanded` calls, and of the quicker one for all."""
    router, _ = baseline.load(Path(document))

    def choose(modules: list[str]) -> Answer:
        return router.choose(router.expand(modules))

    def choose_transitive(modules: list[str]) -> Answer:
        return router.choose(router.expand_transitive(modules))

    asked = module_sets[WARM_UP:]
    plain = [_timed(choose, modules) for modules in asked[:expanded]]
    quicker = [_timed(choose_transitive, modules) for modules in asked]
    if [answer for _, answer in plain] != [answer for _, answer in quicker[:expanded]]:
        raise RuntimeError("the lists are not transitive")
    return {
        "seconds": [seconds for seconds, _ in plain],
        "transitive_seconds": [seconds for seconds, _ in quicker],
        "answers": [_answer(answer) for _, answer in quicker],
    }


def _timed(work: Callable[[_Asked], _Found], asked: _Asked) -> tuple[float, _Found]:
    begin = time.perf_counter()
    found = work(asked)
    return time.perf_counter() - begin, found


def _answer(found: Answer | Choice) -> list[Any]:
    return [found.checkpoint_id, found.cost_ns, found.cold_cost_ns]
