"""Scoring: three modules with closures of about half of everything, on either database.

The machine's speed changes from second to second, so there are rounds, some seconds apart; a figure is the median of the
quickest round, ours as the baseline's, and the median of all rounds is beside it.
Each answer is compared with the baseline's: one difference, and the benchmark fails. The baseline expands closures for
every call, by lists that may be direct or transitive. One that believes that they are transitive is quicker; its
figure is beside it, and all answers are compared with it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from app.catalogue import find_active_catalogue
from app.database import open_database
from app.scoring import Choice, ScoreRequest, score_calls
from benchmarks import baseline, limit
from benchmarks.baseline import Answer
from benchmarks.bench import Bench, Kind, Line, Target, percentile, say
from benchmarks.catalogues import BenchCatalogue, read_real
from benchmarks.imports import import_into
from readie.flavor import Flavor

BATCH = 64
WARM_UP = 8
ROUNDS = 6

#: Milliseconds a call at most: one never seen before, in a batch, with checkpoints that are no closed sets, seen before.
SINGLE_MS = {"duckdb": 4.0, "postgresql": 2.0}
BATCH_MS = {"duckdb": 0.5, "postgresql": 1.5}
OPEN_MS = 8.0
SEEN_MS = 0.05

_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")


def requests(catalogue: BenchCatalogue, count: int) -> list[list[str]]:
    """The module sets that are asked for, each once: some to warm up, then `count`."""
    return catalogue.module_sets(WARM_UP + count, seed=1)


def run(bench: Bench) -> Iterator[Line]:
    """On the catalogue, on one whose checkpoints lack 3 % of their items, and on the real one that is committed."""
    for suffix in ["", "-open", "-real"][: bench.repeats(3)]:
        catalogue = read_real() if suffix == "-real" else bench.catalogue(missing=0.03 if suffix else 0.0)
        say(f"the baseline scores {catalogue.document}")
        rounds, singles, batches = bench.repeats(ROUNDS, 2), bench.repeats(32, 4), 1
        asked = requests(catalogue, rounds * (singles + batches * BATCH))
        document = str(catalogue.document)
        plain = bench.fresh(
            time_baseline,
            document=document,
            module_sets=asked,
            expanded=bench.repeats(5, 2),
            rounds=rounds,
            transitive=suffix != "-real",
        ).value
        bits = time_limit(bench.limit(catalogue), asked)
        _compare("the limit", bits["answers"], plain["answers"])
        for kind in bench.kinds:
            say(f"scoring{suffix} on {kind}")
            with bench.database(kind) as url:
                bench.fresh(import_into, url=url, document=document)
                ours = bench.fresh(
                    time_ours, url=url, module_sets=asked, rounds=rounds, singles=singles, pause_s=bench.pause_s
                )
            for way, target in _targets(kind, suffix).items():
                seconds, numbers, answers = (ours.value[way][name] for name in ("seconds", "numbers", "answers"))
                every = list(chain(*seconds))
                _compare(f"{kind}, {way}", answers, [plain["answers"][number] for number in numbers])
                yield bench.line(
                    f"scoring-{way}{suffix}",
                    catalogue,
                    kind,
                    "ms a call",
                    quickest_ms(seconds),
                    baseline=quickest_ms(plain["seconds"]),
                    limit=quickest_ms([bits["seconds"]]),
                    peak_mb=ours.peak_mb,
                    target=target,
                    all_rounds_ms=_ms(every, 0.5),
                    all_rounds_p95_ms=_ms(every, 0.95),
                    rounds=rounds,
                    measured=len(every),
                    **({"a_statement": BATCH} if way == "batch" else {}),
                    compared=len(answers),
                    baseline_all_rounds_ms=_ms(list(chain(*plain["seconds"])), 0.5),
                    baseline_transitive_ms=quickest_ms(plain["transitive_seconds"]),
                )


def _targets(kind: Kind, suffix: str) -> dict[str, Target | None]:
    """The ways of asking that are measured, with what each may take."""
    if suffix:
        return {"single": Target(OPEN_MS, "ms") if suffix == "-open" else None, "batch": None, "seen": None}
    return {
        "single": Target(SINGLE_MS[kind], "ms"),
        "batch": Target(BATCH_MS[kind], "ms"),
        "seen": Target(SEEN_MS, "ms"),
    }


def quickest_ms(rounds: Sequence[Sequence[float]]) -> float:
    """The median of the quickest round, in milliseconds."""
    return min(_ms(seconds, 0.5) for seconds in rounds)


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


def time_ours(
    url: str, module_sets: list[list[str]], rounds: int, singles: int, pause_s: float = 0.0
) -> dict[str, Any]:
    """By way of asking: seconds a call, a list a round, and the answers, with the numbers of their module sets.

    In each round `singles` sets are asked for one in a statement, then each again, then the others many in a statement.
    """
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
        asked = module_sets[WARM_UP:]
        a_round = len(asked) // rounds
        found: dict[str, dict[str, list[Any]]] = {
            way: {"seconds": [], "numbers": [], "answers": []} for way in ("single", "seen", "batch")
        }
        for start in range(0, rounds * a_round, a_round):
            time.sleep(pause_s if start else 0)
            alone = [range(number, number + 1) for number in range(start, start + singles)]
            together = [
                range(number, min(number + BATCH, start + a_round))
                for number in range(start + singles, start + a_round, BATCH)
            ]
            for way, statements in (("single", alone), ("seen", alone), ("batch", together)):
                scored = [score(asked[numbers.start : numbers.stop]) for numbers in statements]
                found[way]["seconds"].append([seconds / len(choices) for seconds, choices in scored])
                found[way]["numbers"] += [number for numbers in statements for number in numbers]
                found[way]["answers"] += [_answer(choice) for _, choices in scored for choice in choices]
    return found


def time_baseline(
    document: str, module_sets: list[list[str]], expanded: int, rounds: int = 1, *, transitive: bool = True
) -> dict[str, Any]:
    """Seconds a call, a list a round: of the baseline for `expanded` calls, and of the quicker one for all.

    Where lists are not transitive the quicker one would be wrong: it is the baseline too.
    """
    router, _ = baseline.load(Path(document))

    def choose(modules: list[str]) -> Answer:
        return router.choose(router.expand(modules))

    def choose_transitive(modules: list[str]) -> Answer:
        return router.choose(router.expand_transitive(modules))

    choose_quickly = choose_transitive if transitive else choose
    asked = module_sets[WARM_UP:]
    a_round = len(asked) // rounds
    plain, quicker = [], []
    for start in range(0, rounds * a_round, a_round):
        plain.append([_timed(choose, modules) for modules in asked[start : start + expanded]])
        quicker.append([_timed(choose_quickly, modules) for modules in asked[start : start + a_round]])
        if [answer for _, answer in plain[-1]] != [answer for _, answer in quicker[-1][: len(plain[-1])]]:
            raise RuntimeError("the lists are not transitive")
    return {
        "seconds": [[seconds for seconds, _ in each] for each in plain],
        "transitive_seconds": [[seconds for seconds, _ in each] for each in quicker],
        "answers": [_answer(answer) for each in quicker for _, answer in each],
    }


def _timed(work: Callable[[_Asked], _Found], asked: _Asked) -> tuple[float, _Found]:
    begin = time.perf_counter()
    found = work(asked)
    return time.perf_counter() - begin, found


def _answer(found: Answer | Choice) -> list[Any]:
    return [found.checkpoint_id, found.cost_ns, found.cold_cost_ns]
