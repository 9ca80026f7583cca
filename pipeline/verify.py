"""Holds predictions to reality: imports a sample whole, in fresh processes, and compares with the sum of its parts."""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from pipeline.analyze import Journal, JournalHead, Measurements, Run, check_same_runtime, measure
from pipeline.corpus import ImportSet
from pipeline.pace import believe, fit_trust, mean_without_strays, select_steady, standard_errors
from pipeline.problem import catalogue_of
from pipeline.processes import NOT_ISOLATED, Mode, ProbeStream, Sandbox, describe
from pipeline.progress import Progress
from readie.closure import compute_closures
from readie.command_line import say
from readie.cost import match
from readie.resources import is_resource
from readie.units import NS_PER_SECOND

FROM_S = 0.020  # below, and below FROM_MB, an error is told absolutely
FROM_MB = 20.0
OUTLIER_SHARE = 0.15  # of what was measured, where that is large; else
OUTLIER_S = 0.003
OUTLIER_MB = 2.0
TIGHT_SHARE = 0.03  # an import has been repeated often enough when the standard error of its time is within this share,
TIGHT_S = 0.0005  # or within this
PANEL = 24  # imports at most that tell today's pace, of which one is made
PANEL_EVERY = 4  # after each so many of the sample
PANEL_ENOUGH = 3  # fewer say nothing

LIMITED = {"timeout", "memory", "no-result"}  # failures that another time, or other limits, may not have

# An import's modules, with the seconds and MB that the measurements say of each.
Needed = Mapping[str, tuple[float, float]]


class Checked(msgspec.Struct, frozen=True):
    """One import: what the sum over its closure predicts, and the mean of what it took. `failure`: it failed."""

    modules: tuple[str, ...]
    predicted_s: float
    measured_s: float  # at the pace of the measurements
    predicted_mb: float
    measured_mb: float
    clock_s: float = 0.0  # as the clock said: at the pace of today
    interval_s: float | None = None  # half of the 95 % interval of `measured_s`; None: one process tells nothing
    repeats: int = 0  # processes
    tight: bool = True  # False: it was not repeated more often, though the interval is still wide
    failure: str = ""


class Outlier(msgspec.Struct, frozen=True):
    modules: tuple[str, ...]
    unit: str  # s or MB
    predicted: float
    measured: float
    reason: str


class Errors(msgspec.Struct, frozen=True):
    """Relative errors of what is large enough, absolute ones of the rest. None: there is nothing of that kind."""

    large: int
    median: float | None
    p90: float | None
    small: int
    small_worst: float | None  # in the unit
    small_p90: float | None = None
    bias: float | None = None  # the median with its sign: above 0 where predictions are too high


class Level(msgspec.Struct, frozen=True):
    """How a panel of other imports, measured in between, compares with what the measurements say of them."""

    imports: list[tuple[str, ...]]
    ratio: float  # of today's pace to that of the measurements, besides what processes tell
    error: float  # standard error of the ratio, as a share


class Verification(msgspec.Struct, frozen=True):
    seed: int
    checked: list[Checked]
    failed: list[Checked]
    seconds: Errors
    mb: Errors
    clock_seconds: Errors  # without bringing the machine of today to the pace of the measurements
    pace: float | None  # how many times as slow as when it was left alone while measuring, as processes tell, besides
    # `level`; None: not known
    waited: float  # share of the time in which others had the processor; it is taken out
    outliers: list[Outlier]
    warnings: list[str] = []
    level: Level | None = None  # None: too little is left for a panel
    trust: float = 1.0  # how much of what processes tell of their pace was believed


@dataclass(eq=False)
class Sample:
    """An import of the sample, or of the panel, and the processes in which it was made."""

    modules: tuple[str, ...]
    needed: Needed
    runs: list[Run] = field(default_factory=list)
    failed: list[Run] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)  # of each run, against that of the measurements
    error: float = math.inf  # standard error of the seconds, as a share

    def add(self, run: Run) -> None:
        (self.failed if run.failure else self.runs).append(run)

    @property
    def tried(self) -> int:
        return len(self.runs) + len(self.failed)

    @property
    def is_broken(self) -> bool:
        return any(map(still_holds, self.failed))

    @property
    def failure(self) -> str:
        """Why it cannot be imported. Where it could be once, a limit that a busy machine made it meet does not count."""
        counted = [run for run in self.failed if still_holds(run)] or ([] if self.runs else self.failed)
        return next((run.failure.detail for run in counted if run.failure), "")

    @property
    def steady(self) -> list[int]:
        return select_steady([run.stalled for run in self.runs])

    @property
    def clock(self) -> float:
        return mean_without_strays([alone(self.runs[number]) for number in self.steady])

    @property
    def times(self) -> list[float]:
        """At the pace of the measurements."""
        return [alone(self.runs[number]) / self.paces[number] for number in self.steady]

    def is_tight(self) -> bool:
        return bool(self.failure) or self.error <= max(TIGHT_SHARE, TIGHT_S / max(self.clock, 1e-9))


def still_holds(run: Run) -> bool:
    """Whether the next process would end like this one. Limits may be others then, and the machine less busy."""
    return run.failure is None or run.failure.kind not in LIMITED


def alone(run: Run) -> float:
    """Seconds of an import without those in which others had the processor."""
    return max(run.wall_s - run.waited_s, 1e-9)


def verify(
    sandbox: Sandbox,
    measurements: Measurements,
    corpus: Sequence[ImportSet],
    out: Path,
    *,
    count: int,
    seed: int,
    repeats: int = 3,
    most_repeats: int = 25,
) -> Verification:
    """Checks up to `count` random modules and `count` random import sets.

    Each is imported in at least `repeats` processes, and in more, up to `most_repeats`, until the standard error of its
    time is within 3 % or 0.5 ms. Time in which others had the processor is taken out, and the machine's pace of now is
    brought to that of the measurements by what processes tell, and by a panel of other imports; what the clock said is
    told as well. Completed processes are in a journal in the folder `out`, one for each seed: started again with the
    same seed, it goes on. Raises `Unavailable`, and `BadRequest` where the sandbox is none in which these were made.
    """
    needs, keys = list_needs(measurements), sorted(item.key for item in measurements.items)
    samples = choose_samples(keys, needs, corpus, count, seed)
    panel = choose_panel(keys, needs, corpus, samples, seed)
    description = describe(sandbox)
    check_same_runtime(measurements, description)
    head = JournalHead(description.host, description.memory_source, measurements.sha256)
    with Journal(out / f"verify-{seed}.journal.jsonl", head) as journal, ProbeStream(sandbox) as stream:
        if journal.runs:
            say(
                f"  {len(journal.runs)} processes were measured before with this seed: {journal.path} has them."
                " Another --seed, or removing that file, begins anew"
            )
        planned = {("plain", one.modules): one for one in samples} | {("time", one.modules): one for one in panel}
        for run in journal.runs:
            if (one := planned.get((run.mode, run.roots))) and still_holds(run):
                one.add(run)
        wanted = (repeats, max(repeats, most_repeats))
        _repeat(stream, journal, samples, panel, repeats=wanted, reference=measurements.info.pace_s)
        trust, level = bring_to_pace(samples, panel, measurements.info.pace_s)
        checked = [(sample, _check(sample, level)) for sample in samples]
        outliers = [
            outlier
            for sample, one in checked
            if not one.failure
            for outlier in _explain(stream, journal, sample, one, trust)
        ]
    runs = [run for one in [*samples, *panel] for run in [*one.runs, *one.failed]]
    good = [one for _, one in checked if not one.failure]
    waited, clock = sum(run.waited_s for run in runs), sum(run.wall_s for run in runs)
    told = [pace / (level.ratio if level else 1.0) for sample in samples for pace in sample.paces]
    return Verification(
        seed,
        good,
        [one for _, one in checked if one.failure],
        find_errors([(one.predicted_s, one.measured_s) for one in good], FROM_S),
        find_errors([(one.predicted_mb, one.measured_mb) for one in good], FROM_MB),
        find_errors([(one.predicted_s, one.clock_s) for one in good], FROM_S),
        round(statistics.median(told), 3) if told and measurements.info.pace_s else None,
        round(waited / clock, 3) if clock else 0.0,
        sorted(outliers, key=lambda one: -abs(one.predicted - one.measured) / max(one.measured, 1e-9)),
        [NOT_ISOLATED] if any(run.network == "host" for run in runs) else [],
        level,
        round(trust, 3),
    )


def _repeat(
    stream: ProbeStream,
    journal: Journal,
    samples: Sequence[Sample],
    panel: Sequence[Sample],
    *,
    repeats: tuple[int, int],
    reference: float | None,
) -> None:
    """Measures the samples, at least and at most so many times, until each is tight, with the panel in between.

    In rounds: a neighbour that comes and goes spoils one repeat of many, not all of one.
    """
    least, most = repeats
    asked = 0
    with Progress("verifying", least * len(samples)) as progress:
        progress.done = sum(min(sample.tried, least) for sample in samples)
        for number in range(1, most + 1):
            todo = [sample for sample in samples if sample.tried < number and not sample.is_broken]
            if number > least:
                bring_to_pace(samples, panel, reference)
                todo = [sample for sample in todo if not sample.is_tight()]
                progress.total += len(todo)
            for sample in todo:
                run = measure(stream, sample.modules, "plain")
                journal.add(run)
                sample.add(run)
                asked += 1
                progress.advance(", ".join(sample.modules))
                good = [one for one in panel if not one.failure]
                if good and asked % PANEL_EVERY == 0:
                    # The one that has been asked least often, so that a run that was stopped goes on evenly.
                    one = min(good, key=lambda one: one.tried)
                    run = measure(stream, one.modules, "time")
                    journal.add(run)
                    one.add(run)


def list_needs(measurements: Measurements) -> Callable[[Sequence[str]], Needed]:
    """A function for the closure of some items, with what the measurements say of each of it."""
    catalogue = catalogue_of(measurements.items)
    ids = {key: number for number, key in enumerate(catalogue.keys)}
    closures = compute_closures(catalogue)

    def needs(modules: Sequence[str]) -> Needed:
        return {
            catalogue.keys[number]: (int(catalogue.load_ns[number]) / NS_PER_SECOND, float(catalogue.size_mb[number]))
            for number in closures.items_of([ids[name] for name in modules])
        }

    return needs


def choose_samples(
    keys: Sequence[str], needs: Callable[[Sequence[str]], Needed], corpus: Sequence[ImportSet], count: int, seed: int
) -> list[Sample]:
    """Random items of `keys`, which are sorted, then random import sets, with what the measurements say of them.

    A set that is one of the items is not there twice.
    """
    ids = {key: number for number, key in enumerate(keys)}
    draw = random.Random(seed)
    sets = {tuple(sorted({item for name in one.modules if (item := match(ids, name))})) for one in corpus} - {()}
    singles = [(key,) for key in draw.sample(keys, min(count, len(keys)))]
    chosen = [*singles, *draw.sample(sorted(sets), min(count, len(sets)))]
    return [Sample(modules, needs(modules)) for modules in dict.fromkeys(chosen)]


def choose_panel(
    keys: Sequence[str],
    needs: Callable[[Sequence[str]], Needed],
    corpus: Sequence[ImportSet],
    samples: Sequence[Sample],
    seed: int,
) -> list[Sample]:
    """Imports that tell today's pace: another sample, drawn as `samples` was, without what that has, and what is short.

    What they need themselves may be needed there too. Modules are slowed down by different factors, those with compiled
    code by smaller ones: a panel of others than the sample consists of would tell another pace.
    """
    chosen = {sample.modules for sample in samples}
    others = [
        one
        for one in choose_samples(keys, needs, corpus, PANEL + len(samples), seed + 1)
        if one.modules not in chosen and sum_seconds(one.needed) >= FROM_S and not any(map(is_resource, one.modules))
    ]
    random.Random(seed).shuffle(others)
    return others[:PANEL] if len(others) >= PANEL_ENOUGH else []


def sum_seconds(needed: Needed) -> float:
    return sum(seconds for seconds, _ in needed.values())


def bring_to_pace(
    samples: Sequence[Sample], panel: Sequence[Sample], reference: float | None
) -> tuple[float, Level | None]:
    """Fills in the paces of all runs, against that of the measurements, and the errors.

    What processes tell is believed as far as it explains their times (`fit_trust`). How the panel compares with the
    measurements tells the rest, which all have in common. Returns the trust and the level.
    """
    both = [*samples, *panel]
    runs = [(number, run) for number, one in enumerate(both) for run in one.runs]
    told = [run.pace if reference else None for _, run in runs]
    trust = fit_trust([alone(run) for _, run in runs], told, [number for number, _ in runs])
    for one in both:
        one.paces = []
    for (number, _), pace in zip(runs, believe(told, trust), strict=True):
        both[number].paces.append(pace / (reference or 1.0))
    level = find_level(panel)
    for one in both:
        one.paces = [pace * (level.ratio if level else 1.0) for pace in one.paces]
    measured = [one for one in both if one.runs and not one.failure]
    for one, error in zip(measured, standard_errors([one.times for one in measured]), strict=True):
        one.error = error
    return trust, level


def find_level(panel: Sequence[Sample]) -> Level | None:
    """How the panel's modules compare with what the measurements say of them; None where too few were measured."""
    measured = [one for one in panel if one.runs and not one.failure]
    ratios = []
    for one in measured:
        times = []
        for number in one.steady:
            took = {node.name: node.value for node in one.runs[number].nodes if node.name in one.needed}
            predicted = sum(one.needed[name][0] for name in took)
            times.append(max(sum(took.values()), 1e-9) / max(predicted, 1e-9) / one.paces[number])
        ratios.append(mean_without_strays(times))
    if len(ratios) < PANEL_ENOUGH:
        return None
    imports = [one.modules for one in measured]
    return Level(imports, round(mean_without_strays(ratios), 4), round(standard_errors([ratios])[0], 4))


def _check(sample: Sample, level: Level | None) -> Checked:
    if sample.failure:
        return Checked(sample.modules, sum_seconds(sample.needed), 0.0, 0.0, 0.0, failure=sample.failure)
    measured = mean_without_strays(sample.times)
    error = math.hypot(sample.error, level.error if level else 0.0)
    return Checked(
        sample.modules,
        predicted_s=round(sum_seconds(sample.needed), 9),
        measured_s=round(measured, 9),
        predicted_mb=round(sum(size for _, size in sample.needed.values()), 6),
        measured_mb=round(statistics.median(run.rss_mb or 0.0 for run in sample.runs), 6),
        clock_s=round(sample.clock, 9),
        interval_s=round(1.96 * error * measured, 9) if math.isfinite(error) else None,
        repeats=len(sample.runs),
        tight=sample.is_tight(),
    )


def find_errors(pairs: Sequence[tuple[float, float]], large_from: float) -> Errors:
    """The errors of (predicted, measured): relative where the measured is at least `large_from`."""
    signed = [(predicted - measured) / measured for predicted, measured in pairs if measured >= large_from]
    relative = [abs(error) for error in signed]
    absolute = [abs(predicted - measured) for predicted, measured in pairs if measured < large_from]
    return Errors(
        len(relative),
        statistics.median(relative) if relative else None,
        float(np.percentile(relative, 90)) if relative else None,
        len(absolute),
        max(absolute, default=None),
        float(np.percentile(absolute, 90)) if absolute else None,
        statistics.median(signed) if signed else None,
    )


# ---- why ----


def is_outlier(predicted: float, measured: float, large_from: float, small: float) -> bool:
    """Whether a prediction is further off than predictions should be."""
    return abs(predicted - measured) > (OUTLIER_SHARE * measured if measured >= large_from else small)


def _explain(stream: ProbeStream, journal: Journal, sample: Sample, one: Checked, trust: float) -> list[Outlier]:
    """Whether it is an outlier, in time and in memory; imported once more then, with every module measured."""
    found = []
    if is_outlier(one.predicted_s, one.measured_s, FROM_S, OUTLIER_S):
        reason = _find_reason(stream, journal, sample, "time", trust)
        if not one.tight and one.interval_s:
            reason = f"it is known to {one.interval_s:.3f} s only; {reason}"
        found.append(Outlier(one.modules, "s", one.predicted_s, one.measured_s, reason))
    if is_outlier(one.predicted_mb, one.measured_mb, FROM_MB, OUTLIER_MB):
        reason = _find_reason(stream, journal, sample, "memory", trust)
        found.append(Outlier(one.modules, "MB", one.predicted_mb, one.measured_mb, reason))
    return found


def _find_reason(stream: ProbeStream, journal: Journal, sample: Sample, mode: Mode, trust: float) -> str:
    matching = (run for run in journal.runs if (run.mode, run.roots) == (mode, sample.modules))
    done = next(filter(still_holds, matching), None)
    run = done or measure(stream, sample.modules, mode)
    if done is None:
        journal.add(run)
    if run.failure:
        return f"it could not be measured again: {run.failure.detail}"
    # What single items ask for of the standard library is counted in them.
    nodes = [node for node in run.nodes if not node.stdlib]
    if mode == "time":
        pace = statistics.median(sample.paces)
        told = [one.pace for one in sample.runs if one.pace]
        if run.pace and told:  # it ran at another time
            pace *= (run.pace / statistics.median(told)) ** trust
        took = {node.name: node.value / pace for node in nodes}
        return describe_difference(took, {name: seconds for name, (seconds, _) in sample.needed.items()}, "s", 0.001)
    took = {node.name: node.value * 1024 / 1e6 for node in nodes}
    return describe_difference(took, {name: size for name, (_, size) in sample.needed.items()}, "MB", 0.5)


def describe_difference(took: Mapping[str, float], predicted: Mapping[str, float], unit: str, least: float) -> str:
    """In what an import, module by module, differs most from its prediction. Differences below `least` are not told."""
    more = {name: value for name, value in took.items() if name not in predicted}
    absent = {name: value for name, value in predicted.items() if name not in took}
    reasons: list[tuple[float, str]] = []
    for what, values in (("it loads", more), ("it does not load", absent)):
        total = sum(values.values())
        if values and abs(total) >= least:
            worst = sorted(values, key=lambda name: (-abs(values[name]), name))
            rest = f" and {len(worst) - 2} more" if len(worst) > 2 else ""
            expected = "which was not predicted" if values is more else "which was predicted"
            reasons.append((abs(total), f"{what} {', '.join(worst[:2])}{rest} ({total:.4g} {unit}), {expected}"))
    both = sorted(set(took) & set(predicted), key=lambda name: -abs(took[name] - predicted[name]))
    for name in both[:1]:
        if abs(took[name] - predicted[name]) >= least:
            text = f"{name} itself took {took[name]:.4g} {unit} instead of {predicted[name]:.4g}"
            reasons.append((abs(took[name] - predicted[name]), text))
    if not reasons:
        return f"no single module differs by {least:g} {unit}"
    return "; ".join(text for _, text in sorted(reasons, key=lambda entry: -entry[0])[:2])


# ---- for people ----


def write_verification(result: Verification) -> list[str]:
    """The result for people."""
    lines = [f"{len(result.checked)} imports checked, seed {result.seed}"]
    if result.pace:
        lines.append(
            f"  the machine is {result.pace:.2f} times as slow as when it was left alone while measuring, and others had"
            f" the processor for {100 * result.waited:.0f} % of the time: both are taken out"
        )
    if result.level:
        lines.append(
            f"  {len(result.level.imports)} other imports in between took {result.level.ratio:.3f} times what was measured,"
            f" at the pace that they told, known to {100 * result.level.error:.1f} %: that is taken out too"
        )
    wide = sum(not one.tight for one in result.checked)
    if wide:
        lines.append(f"  {wide} are not known to {100 * TIGHT_SHARE:g} %: --max-repeats allows more processes for each")
    for name, unit, errors, large in (
        ("time", "s", result.seconds, FROM_S),
        ("time by the clock of now", "s", result.clock_seconds, FROM_S),
        ("memory", "MB", result.mb, FROM_MB),
    ):
        if errors.median is not None and errors.p90 is not None and errors.bias is not None:
            lines.append(
                f"  {name}: {errors.large} of at least {large:g} {unit}: error {100 * errors.median:.1f} % in the median,"
                f" {100 * errors.p90:.1f} % at the 90th percentile; with its sign {100 * errors.bias:+.1f} % in the median"
            )
        if errors.small_worst is not None and errors.small_p90 is not None:
            lines.append(
                f"  {name}: {errors.small} below {large:g} {unit}: {errors.small_p90:.4f} {unit} off at the 90th percentile,"
                f" {errors.small_worst:.4f} {unit} at most"
            )
    lines += [
        f"  outlier: {', '.join(one.modules)}: predicted {one.predicted:.3f} {one.unit}, measured {one.measured:.3f}"
        f" {one.unit}: {one.reason}"
        for one in result.outliers
    ]
    lines += [f"  failed: {', '.join(one.modules)}: {one.failure}" for one in result.failed]
    return lines
