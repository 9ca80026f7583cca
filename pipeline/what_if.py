"""What other limits would cost, and what a plan is worth to requests that it was not made for."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from decimal import Decimal
from pathlib import Path

import msgspec
import numpy as np

from pipeline.corpus import ImportSet
from pipeline.measurement import MeasuredItem
from pipeline.plan import Plan, make_plan, optimize, survey_candidates
from pipeline.problem import Limits, cold_costs, pose_problem
from pipeline.progress import Progress
from pipeline.report import table
from readie import cost
from readie.flavor import Flavor
from readie.units import MB, NS_PER_SECOND

COUNTS = (1, 2, 3, 4, 6, 8, 11, 15, 22, 32)  # checkpoints, the empty one included
SHARES = (0.125, 0.25, 0.5, 1.0, 2.0)  # of the budget
ROUNDS = 8  # linear programs for each: the bound is a little looser than a plan's
_NO_LIMITS = Limits(max_checkpoints=10_000, size_budget_mb=1e9, checkpoint_mb=1e9)


# ---- other limits ----


class WhatIfPoint(msgspec.Struct, frozen=True):
    """Plans under one pair of limits. Costs are over all requests."""

    max_checkpoints: int
    size_budget_mb: float
    checkpoints: int  # that the plan has, the empty one included
    size_mb: float  # of them together
    greedy_ns: int
    cost_ns: int
    bound_ns: int  # no plan over the candidates costs less


class WhatIf(msgspec.Struct, frozen=True):
    alpha: float
    limits: Limits
    cost_without_ns: int
    by_count: list[WhatIfPoint]
    by_budget: list[WhatIfPoint]


def explore_limits(
    items: Sequence[MeasuredItem],
    corpus: Iterable[ImportSet],
    *,
    alpha: float,
    limits: Limits,
    barred: Collection[str] = (),
) -> WhatIf:
    """Optimal plans for other numbers of checkpoints, and for other budgets; the other limits as given."""
    survey = survey_candidates(pose_problem(items, corpus, barred), Decimal(repr(alpha)), limits)
    without = int(cold_costs(survey.problem) @ survey.problem.weights)
    counts = [
        msgspec.structs.replace(limits, max_checkpoints=count) for count in sorted({*COUNTS, limits.max_checkpoints})
    ]
    budgets = [msgspec.structs.replace(limits, size_budget_mb=limits.size_budget_mb * share) for share in SHARES]
    points: list[list[WhatIfPoint]] = []
    with Progress("planning", len(counts) + len(budgets)) as progress:
        for row in (counts, budgets):
            points.append([])
            start: tuple[int, ...] = ()
            for each in row:
                choice = optimize(survey, each, start=start, rounds=ROUNDS)
                start = choice.numbers
                points[-1].append(
                    WhatIfPoint(
                        max_checkpoints=each.max_checkpoints,
                        size_budget_mb=each.size_budget_mb,
                        checkpoints=len(choice.chosen) + 1,
                        size_mb=sum(one.size_bytes for one in choice.chosen) / MB,
                        greedy_ns=choice.greedy_ns if choice.greedy_ns is not None else without,
                        cost_ns=choice.cost_ns if choice.cost_ns is not None else without,
                        bound_ns=choice.bound_ns if choice.bound_ns is not None else 0,
                    )
                )
                progress.advance(f"{each.max_checkpoints} checkpoints in {each.size_budget_mb:g} MB")
    return WhatIf(alpha, limits, without, *points)


def write_what_if(found: WhatIf) -> list[str]:
    """Both tables."""
    lines = [f"All requests together without checkpoints: {found.cost_without_ns / NS_PER_SECOND:.2f} s"]
    for title, points in (
        (f"By the number of checkpoints, in {found.limits.size_budget_mb:g} MB", found.by_count),
        (f"By the budget, of {found.limits.max_checkpoints} checkpoints", found.by_budget),
    ):
        rows = [["  at most", "budget MB", "has", "MB", "cost s", "greedy s", "bound s", "gap %", "saves %"]]
        for one in points:
            saves = 100 * (1 - one.cost_ns / found.cost_without_ns) if found.cost_without_ns else 0.0
            gap = 100 * (one.cost_ns / one.bound_ns - 1) if one.bound_ns else 0.0
            seconds = [f"{ns / NS_PER_SECOND:.2f}" for ns in (one.cost_ns, one.greedy_ns, one.bound_ns)]
            limits = [str(one.max_checkpoints), f"{one.size_budget_mb:g}", str(one.checkpoints), f"{one.size_mb:.0f}"]
            rows.append([*limits, *seconds, f"{gap:.2f}", f"{saves:.1f}"])
        lines += [title, *table(rows, right=range(9))]
    return lines


def plot_what_if(found: WhatIf, path: Path) -> None:
    """Both curves, with greedy's and the bound, as SVG; the same figures give the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update({"svg.hashsalt": "readie", "svg.fonttype": "none"})
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, points, label in (
            (left, found.by_count, "checkpoints, the empty one included"),
            (right, found.by_budget, "budget, MB"),
        ):
            along = [p.max_checkpoints if axes is left else p.size_budget_mb for p in points]
            for name, style, costs in (
                ("greedy", "--", [p.greedy_ns for p in points]),
                ("optimal", "-", [p.cost_ns for p in points]),
                ("bound", ":", [p.bound_ns for p in points]),
            ):
                axes.plot(along, [one / NS_PER_SECOND for one in costs], style, marker=".", label=name)
            axes.set_xscale("log", base=2)
            if all(min(one.bound_ns, one.cost_ns) > 0 for one in (*found.by_count, *found.by_budget)):
                axes.set_yscale("log")
            axes.set_xticks(along, [f"{one:g}" for one in along])
            axes.minorticks_off()
            axes.set_xlabel(label)
            axes.grid(visible=True, linewidth=0.4)
        left.set_ylabel("all requests together, s")
        left.legend()
        figure.savefig(path, format="svg", metadata={"Date": None})


# ---- requests that the plan was not made for ----


class HeldOutRow(msgspec.Struct, frozen=True):
    """What one planner's checkpoints cost. Costs are over all requests of each part of the corpus."""

    planner: str
    checkpoints: int  # the empty one included
    size_mb: float
    planned_ns: int  # the part that the plan was made for
    held_out_ns: int  # the other


class HeldOut(msgspec.Struct, frozen=True):
    share: float
    seed: int
    alpha: float
    limits: Limits
    import_sets: int  # that the plans were made for
    held_out: int  # import sets
    rows: list[HeldOutRow]


def hold_out(
    items: Sequence[MeasuredItem],
    corpus: Sequence[ImportSet],
    *,
    share: float,
    seed: int,
    alpha: float,
    limits: Limits,
    sets: Sequence[Sequence[str]] = (),
    barred: Collection[str] = (),
) -> HeldOut:
    """Plans for a random part of the import sets, and prices the rest, `share` of them, with these checkpoints.

    `fixed` takes the given sets, else what one would take by hand: the modules most asked for, as long as they fit.
    """
    ordered = sorted(corpus, key=lambda one: (one.modules, one.count))
    shuffled = np.random.default_rng(seed).permutation(len(ordered)).tolist()
    count = round(share * len(ordered))
    rest = [ordered[number] for number in sorted(shuffled[:count])]
    known = [ordered[number] for number in sorted(shuffled[count:])]
    flavor = Flavor.CPU  # figures only: nothing here depends on it

    def plan(planner: str, corpus: Sequence[ImportSet], limits: Limits, sets: Sequence[Sequence[str]] = ()) -> Plan:
        return make_plan(
            items, corpus, planner=planner, alpha=alpha, limits=limits, flavor=flavor, sets=sets, barred=barred
        )

    by_hand = sets or choose_by_hand(items, known, limits, barred)
    planners = {
        "fixed": ("fixed", limits, by_hand) if by_hand else ("greedy", Limits(max_checkpoints=1), ()),
        "greedy": ("greedy", limits, ()),
        "optimal": ("optimal", limits, ()),
    }
    rows: list[HeldOutRow] = []
    with Progress("planning", 2 * len(planners)) as progress:
        for name, (planner, within, given) in planners.items():
            made = plan(planner, known, within, given)
            progress.advance(f"planned by {name}")
            held = [one.canonical for one in made.checkpoints if one.canonical]
            there = plan("fixed", rest, _NO_LIMITS, held) if held else plan("greedy", rest, Limits(max_checkpoints=1))
            if not rows:
                without = plan("greedy", known, Limits(max_checkpoints=1)).cost_without_ns
                rows.append(HeldOutRow("none", 0, 0.0, without, there.cost_without_ns))
            here = plan("fixed", known, _NO_LIMITS, held).cost_ns if held else without
            size = sum(one.size_mb for one in made.checkpoints)
            rows.append(HeldOutRow(name, len(made.checkpoints), size, here, there.cost_ns))
            progress.advance(f"priced {name}")
    return HeldOut(share, seed, alpha, limits, len(known), len(rest), rows)


def choose_by_hand(
    items: Sequence[MeasuredItem], corpus: Iterable[ImportSet], limits: Limits, barred: Collection[str] = ()
) -> list[tuple[str, ...]]:
    """The modules most asked for that can be captured, one set each, as long as they fit within the limits."""
    keys = {item.key: item for item in items}
    asked: Counter[str] = Counter()
    for imports in corpus:
        for match in {cost.match(keys, module) for module in imports.modules} - {None}:
            asked[str(match)] += imports.count
    problem = pose_problem(items, [ImportSet((key,), 1) for key in asked], barred)
    able = problem.importable
    names = [problem.keys[item] for item in problem.asked[able]]
    sizes = dict(zip(names, (problem.reach[able] @ problem.block_bytes).tolist(), strict=True))
    chosen: list[tuple[str, ...]] = []
    left = limits.budget_bytes
    for key in sorted(asked, key=lambda key: (-asked[key], key)):
        if len(chosen) < limits.places and sizes.get(key, limits.checkpoint_bytes + 1) <= min(
            left, limits.checkpoint_bytes
        ):
            chosen.append((key,))
            left -= sizes[key]
    return chosen


def write_held_out(found: HeldOut) -> list[str]:
    """The table."""
    title = f"Planned for {found.import_sets} import sets, and priced {found.held_out} others"
    rows = [["  planner", "checkpoints", "MB", "planned for s", "less %", "held out s", "less %"]]
    none = found.rows[0]
    for one in found.rows:
        row = [f"  {one.planner}", str(one.checkpoints), f"{one.size_mb:.0f}"]
        for ns, before in ((one.planned_ns, none.planned_ns), (one.held_out_ns, none.held_out_ns)):
            row += [f"{ns / NS_PER_SECOND:.2f}", f"{100 * (1 - ns / before) if before else 0.0:.1f}"]
        rows.append(row)
    return [f"{title}; seed {found.seed}, alpha {found.alpha:g} s/MB", *table(rows, right=range(1, 7))]
