"""Which sets of items become checkpoints: planners, and the plan that they make.

A planner is a plain function `(problem, alpha, limits, sets) -> Choice`, found by its name in `PLANNERS`.
Costs are DESIGN's: integer nanoseconds, over all requests of the corpus, the cold start being an option.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from pipeline.bound import MAX_ROUNDS, improve_and_bound
from pipeline.candidates import Gains, Savings, find_candidates, unpack
from pipeline.corpus import ImportSet
from pipeline.measurement import MeasuredItem
from pipeline.problem import (
    Limits,
    Problem,
    cold_costs,
    hold,
    pose_problem,
    price_sizes,
    size_mb,
)
from pipeline.search import First, choose_greedily, gain_alone
from readie import cost
from readie.errors import BadSetting, UsageError
from readie.files import read_json, write_json
from readie.flavor import Flavor


@dataclass(frozen=True)
class Chosen:
    """A checkpoint as planned: positions in `Problem.asked` of all that it holds and somebody asked for, ascending."""

    canonical: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class Choice:
    """What a planner chose, the empty checkpoint not counted, and what it knows of the best plan. Costs are ns."""

    chosen: list[Chosen]
    candidates: int  # distinct ones, with those that are too large
    kept: int | None = None  # of these, after pruning
    left_out: int = 0  # that pairs would give beyond the number that is looked at
    greedy_ns: int | None = None
    cost_ns: int | None = None
    bound_ns: int | None = None  # no plan over the candidates costs less
    numbers: tuple[int, ...] = ()  # of the chosen ones among the candidates


class PlannedCheckpoint(msgspec.Struct, frozen=True):
    checkpoint_id: str
    items: list[str]
    canonical: list[str]
    size_mb: float
    requests: int  # how many it is the cheapest option for
    saved_s: float  # seconds that these save together against a cold start


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`plan.json`. Costs are over the whole corpus."""

    version: Literal[1] = 1
    inputs: str  # SHA-256 of everything that the plan depends on
    flavor: Flavor
    planner: str
    alpha: float  # seconds per MB
    limits: Limits
    requests: int
    candidates: int  # distinct ones
    candidates_kept: int | None = None  # after pruning; None where the planner prunes nothing
    candidates_left_out: int = 0  # that pairs would give beyond the number that is looked at
    cost_without_ns: int  # with no checkpoints
    cost_ns: int
    greedy_ns: int | None = None  # what greedy's plan costs, where it is not this one
    bound_ns: int | None = None  # no plan over the candidates costs less; None where it is not known
    checkpoints: list[PlannedCheckpoint]
    unmatched: dict[str, int]
    barred: dict[str, int] = {}  # item that cannot be captured → requests that need it
    warnings: list[str] = []

    @property
    def gap(self) -> float | None:
        """By which share of the bound the plan may cost more than the best one."""
        if self.bound_ns is None:
            return None
        return (self.cost_ns - self.bound_ns) / self.bound_ns if self.bound_ns else float(self.cost_ns > 0)


Planner = Callable[[Problem, Decimal, Limits, Sequence[Sequence[str]]], Choice]


# ---- planners ----


@dataclass(frozen=True, eq=False)
class Survey:
    """The candidates of a problem with what they gain, from which plans under several limits can be made.

    The limits may differ in the number of checkpoints and in their budget, not in the size of one.
    """

    problem: Problem
    gains: Gains
    first: First

    def choice(self, numbers: Sequence[int]) -> list[Chosen]:
        """The candidates with these numbers as checkpoints."""
        holds = unpack(self.gains.candidates.held[list(numbers)], self.gains.blocks)
        asked = holds[:, self.problem.block_of[self.problem.asked]]
        sizes = self.gains.candidates.sizes[list(numbers)].tolist()
        return [Chosen(tuple(np.flatnonzero(row).tolist()), size) for row, size in zip(asked, sizes, strict=True)]


def survey_candidates(problem: Problem, alpha: Decimal, limits: Limits) -> Survey:
    savings = Savings(problem)
    candidates = find_candidates(problem, savings, alpha, limits)
    gains = Gains(problem, candidates, savings)
    return Survey(problem, gains, gain_alone(gains))


def plan_greedy(problem: Problem, alpha: Decimal, limits: Limits, sets: Sequence[Sequence[str]] = ()) -> Choice:
    """Adds the candidate that lowers the total most, until none does or a limit is reached."""
    del sets
    survey = survey_candidates(problem, alpha, limits)
    candidates = survey.gains.candidates
    chosen = survey.choice(choose_greedily(survey.gains, survey.first, limits))
    return Choice(chosen, candidates.found, left_out=candidates.left_out)


def plan_optimal(problem: Problem, alpha: Decimal, limits: Limits, sets: Sequence[Sequence[str]] = ()) -> Choice:
    """Improves on greedy by swaps and linear programs, and bounds what the best plan over the candidates costs."""
    del sets
    return optimize(survey_candidates(problem, alpha, limits), limits)


def optimize(survey: Survey, limits: Limits, *, start: Sequence[int] = (), rounds: int = MAX_ROUNDS) -> Choice:
    """As `plan_optimal`, with at most `rounds` linear programs, and from the candidates `start` where these, within
    the limits, save more than greedy's.
    """
    gains = survey.gains
    cold = cold_costs(survey.problem) * survey.problem.weights
    without = int(cold.sum())

    def saved(numbers: Sequence[int]) -> int:
        return int(gains.of(np.array(numbers, dtype=np.intp)).max(axis=0, initial=0).sum())

    greedy = choose_greedily(gains, survey.first, limits)
    within = len(start) <= limits.places and int(gains.candidates.sizes[list(start)].sum()) <= limits.budget_bytes
    best = list(start) if within and saved(start) > saved(greedy) else greedy
    found = improve_and_bound(gains, survey.first, best, limits, cold, rounds=rounds)
    return Choice(
        chosen=survey.choice(found.chosen),
        candidates=gains.candidates.found,
        kept=found.kept,
        left_out=gains.candidates.left_out,
        greedy_ns=without - saved(greedy),
        cost_ns=without - found.saved,
        bound_ns=without - found.most,
        numbers=tuple(found.chosen),
    )


def plan_fixed(problem: Problem, alpha: Decimal, limits: Limits, sets: Sequence[Sequence[str]] = ()) -> Choice:
    """One checkpoint for each of the given sets of modules, in their order. Raises `UsageError` for a limit exceeded,
    and for a module that was not measured.
    """
    del alpha
    if not sets:
        raise UsageError("the fixed planner was given no sets", "Give it some with --sets.")
    ids = {key: number for number, key in enumerate(problem.keys)}
    position = {int(item): number for number, item in enumerate(problem.asked)}
    chosen: list[Chosen] = []
    for number, modules in enumerate(sets, start=1):
        positions = []
        for module in modules:
            match = cost.match(ids, module)
            if match is None:
                raise UsageError(
                    f"set {number}: {module} was not measured",
                    "Leave it out, or install it in the root filesystem and run readie-pipeline analyze again.",
                )
            positions.append(position[ids[match]])
            if not problem.importable[positions[-1]]:
                raise UsageError(
                    f"set {number}: importing {module} leaves threads, and such a process cannot be captured",
                    "Leave it out.",
                )
        blocks = hold(problem, [positions])[0]
        size = int(problem.block_bytes[blocks].sum())
        if size > limits.checkpoint_bytes:
            raise UsageError(
                f"set {number} ({', '.join(modules)}) is {size_mb(size):.1f} MB, more than a checkpoint may have",
                "Raise --checkpoint-mb, or give a smaller set.",
            )
        one = Chosen(tuple(np.flatnonzero(blocks[problem.block_of[problem.asked]]).tolist()), size)
        if one not in chosen:
            chosen.append(one)
    if len(chosen) > limits.places:
        raise UsageError(
            f"{len(chosen)} sets and the empty checkpoint are more than {limits.max_checkpoints} checkpoints",
            "Raise --max-checkpoints, or give fewer sets.",
        )
    together = sum(one.size_bytes for one in chosen)
    if together > limits.budget_bytes:
        raise UsageError(
            f"the sets are {size_mb(together):.1f} MB together, more than the budget of {limits.size_budget_mb} MB",
            "Raise --size-budget-mb, or give fewer sets.",
        )
    return Choice(chosen, len(chosen))


PLANNERS: dict[str, Planner] = {"optimal": plan_optimal, "greedy": plan_greedy, "fixed": plan_fixed}


def find_planner(name: str) -> Planner:
    """Raises `BadSetting`, which lists the known ones."""
    if name not in PLANNERS:
        raise BadSetting(f"{name!r} is not a planner", f"Use {' or '.join(PLANNERS)}.")
    return PLANNERS[name]


# ---- the plan ----


def make_plan(
    items: Sequence[MeasuredItem],
    corpus: Iterable[ImportSet],
    *,
    planner: str,
    alpha: float,
    limits: Limits,
    flavor: Flavor,
    sets: Sequence[Sequence[str]] = (),
    inputs: str = "",
    warnings: Iterable[str] = (),
    barred: Collection[str] = (),
) -> Plan:
    """Chooses the checkpoints; the same input gives the same plan, byte for byte. `checkpoint_0`, empty, is first.

    No checkpoint holds an item of `barred`, nor what pulls one in.
    """
    plan = find_planner(planner)
    # Given sets count as asked for, by nobody: what they name is canonical, and weighs nothing.
    problem = pose_problem(items, [*corpus, *(ImportSet(modules=tuple(modules), count=0) for modules in sets)], barred)
    exact = Decimal(repr(alpha))
    choice = plan(problem, exact, limits, sets)
    chosen = [Chosen((), 0), *choice.chosen]
    holds = hold(problem, [one.canonical for one in chosen])
    size_ns = price_sizes([one.size_bytes for one in chosen], exact)
    cold = cold_costs(problem)
    prices = size_ns[:, None] + cold - Savings(problem).of(holds)
    # The later option wins a tie, as in the router's ranking; also for the requests that need no item.
    best = len(chosen) - 1 - np.argmin(prices[::-1], axis=0)
    best_of_nothing = len(chosen) - 1 - int(np.argmin(size_ns[::-1]))
    cheapest = prices.min(axis=0)
    checkpoints = []
    for number, one in enumerate(chosen):
        served = best == number
        blocks = np.flatnonzero(holds[number])
        checkpoints.append(
            PlannedCheckpoint(
                checkpoint_id=f"checkpoint_{number}",
                items=[problem.keys[i] for i in np.flatnonzero(np.isin(problem.block_of, blocks))],
                canonical=[problem.keys[problem.asked[position]] for position in one.canonical],
                size_mb=size_mb(one.size_bytes),
                requests=int(problem.weights[served].sum())
                + (problem.requests_in_all - int(problem.weights.sum()) if number == best_of_nothing else 0),
                saved_s=int((cold - cheapest)[served] @ problem.weights[served]) / 1e9,
            )
        )
    return Plan(
        inputs=inputs,
        flavor=flavor,
        planner=planner,
        alpha=alpha,
        limits=limits,
        requests=problem.requests_in_all,
        candidates=choice.candidates,
        candidates_kept=choice.kept,
        candidates_left_out=choice.left_out,
        cost_without_ns=int(cold @ problem.weights),
        cost_ns=int(cheapest @ problem.weights),
        greedy_ns=choice.greedy_ns,
        bound_ns=choice.bound_ns,
        checkpoints=checkpoints,
        unmatched=problem.unmatched,
        barred=problem.barred,
        warnings=list(warnings),
    )


def read_plan(path: Path) -> Plan:
    """The plan at `path`. Raises `BadFile`, which names the file, the place and the rule."""
    return read_json(path, Plan, "Plan again with readie-pipeline plan.")


def write_plan(path: Path, plan: Plan) -> None:
    """Writes `path` whole or not at all."""
    write_json(path, plan)
