"""Holds predictions to reality: imports a sample whole, in fresh processes, and compares with the sum of its parts."""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pipeline.analyze import Measurements, waits_elsewhere
from pipeline.corpus import ImportSet
from pipeline.problem import catalogue_of
from pipeline.processes import NOT_ISOLATED, Mode, ProbeAnswer, ProbeStream, Sandbox
from pipeline.progress import Progress
from readie.closure import compute_closures
from readie.cost import match
from readie.units import NS_PER_SECOND

FROM_S = 0.020  # below, and below FROM_MB, an error is told absolutely
FROM_MB = 20.0
OUTLIER_SHARE = 0.15  # of what was measured, where that is large; else
OUTLIER_S = 0.003
OUTLIER_MB = 2.0
NOISY = 0.10  # repeats that differ by more are made again, at most twice as often
PACE_WINDOW = 11  # processes, one after the other, whose paces are put together: a single one is told roughly


class Checked(msgspec.Struct, frozen=True):
    """One import: what the sum over its closure predicts, and the median of what it took. `failure`: it failed."""

    modules: tuple[str, ...]
    predicted_s: float
    measured_s: float  # at the pace of the measurements
    predicted_mb: float
    measured_mb: float
    clock_s: float = 0.0  # as the clock said: at the pace of today
    spread: float = 0.0  # of the repeats: the largest less the smallest, of the median
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


class Verification(msgspec.Struct, frozen=True):
    seed: int
    checked: list[Checked]
    failed: list[Checked]
    seconds: Errors
    mb: Errors
    clock_seconds: Errors  # without bringing the machine of today to the pace of the measurements
    pace: float | None  # how many times as slow as when it was left alone while measuring; None: not known
    waited: float  # share of the time in which others had the processor; it is taken out
    outliers: list[Outlier]
    warnings: list[str] = []


@dataclass(eq=False)
class _Sample:
    modules: tuple[str, ...]
    needed: dict[str, tuple[float, float]]  # its closure, with seconds and MB
    answers: list[ProbeAnswer] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)  # of each answer, against that of the measurements

    @property
    def failure(self) -> str:
        return next((answer.failure.detail for answer in self.answers if answer.failure), "")

    @property
    def good(self) -> list[int]:
        """The answers that count: those that waited for something else than the processor only if most did."""
        steady = [number for number, answer in enumerate(self.answers) if not is_stalled(answer)]
        return steady if 2 * len(steady) >= len(self.answers) else list(range(len(self.answers)))

    @property
    def clock(self) -> list[float]:
        return [alone(self.answers[number]) for number in self.good]

    @property
    def seconds(self) -> list[float]:
        """At the pace of the measurements."""
        return [alone(self.answers[number]) / self.paces[number] for number in self.good]

    def is_noisy(self) -> bool:
        clock = self.clock
        wide = max(clock) - min(clock)
        few = len(clock) < len(self.answers)
        return not self.failure and (few or wide > max(NOISY * statistics.median(clock), OUTLIER_S))


def alone(answer: ProbeAnswer) -> float:
    """Seconds of an import without those in which others had the processor."""
    return (answer.wall_s or 0.0) - (answer.waited_s or 0.0)


def is_stalled(answer: ProbeAnswer) -> bool:
    """Whether it waited for something else than the processor, as for a disk; some modules do so every time."""
    return waits_elsewhere(answer.wall_s or 0.0, answer.waited_s or 0.0, answer.cpu_s or 0.0)


def verify(
    sandbox: Sandbox,
    measurements: Measurements,
    corpus: Sequence[ImportSet],
    count: int,
    seed: int,
    *,
    repeats: int = 3,
) -> Verification:
    """Checks up to `count` random modules and `count` random import sets, in `repeats` processes each.

    Time in which others had the processor is taken out, and the machine's pace of now is brought to that of the
    measurements; what the clock said is told as well.
    """
    samples = choose_samples(measurements, corpus, count, seed)
    order: list[tuple[_Sample, ProbeAnswer]] = []
    with ProbeStream(sandbox) as stream, Progress("verifying", repeats * len(samples)) as progress:

        def ask(sample: _Sample) -> None:
            answer = stream.ask(sample.modules, "plain")
            sample.answers.append(answer)
            order.append((sample, answer))
            progress.advance(", ".join(sample.modules))

        # In rounds: a neighbour that comes and goes spoils one repeat of many, not all of one.
        for _ in range(repeats):
            for sample in samples:
                if not sample.failure:
                    ask(sample)
        for _ in range(repeats):
            noisy = [sample for sample in samples if sample.is_noisy()]
            progress.total += len(noisy)
            for sample in noisy:
                ask(sample)
        pace = _bring_to_pace(order, measurements.info.pace_s)
        checked = [(sample, _check(sample)) for sample in samples]
        outliers = [
            outlier
            for sample, one in checked
            if not one.failure
            for outlier in _explain(stream, sample, one, pace or 1.0)
        ]
    good = [one for _, one in checked if not one.failure]
    clock = sum(sum(sample.clock) for sample in samples)
    waited = sum(answer.waited_s or 0.0 for _, answer in order)
    return Verification(
        seed,
        good,
        [one for _, one in checked if one.failure],
        find_errors([(one.predicted_s, one.measured_s) for one in good], FROM_S),
        find_errors([(one.predicted_mb, one.measured_mb) for one in good], FROM_MB),
        find_errors([(one.predicted_s, one.clock_s) for one in good], FROM_S),
        round(pace, 3) if pace else None,
        round(waited / (clock + waited), 3) if clock else 0.0,
        sorted(outliers, key=lambda one: -abs(one.predicted - one.measured) / max(one.measured, 1e-9)),
        [NOT_ISOLATED] if any(answer.network == "host" for _, answer in order) else [],
    )


def choose_samples(measurements: Measurements, corpus: Sequence[ImportSet], count: int, seed: int) -> list[_Sample]:
    """Random modules, then random import sets, with what the measurements say of their closures."""
    catalogue = catalogue_of(measurements.items)
    ids = {key: number for number, key in enumerate(catalogue.keys)}
    closures = compute_closures(catalogue)
    draw = random.Random(seed)
    sets = {tuple(sorted({item for name in one.modules if (item := match(ids, name))})) for one in corpus} - {()}
    singles = [(key,) for key in draw.sample(catalogue.keys, min(count, len(catalogue.keys)))]
    chosen = [*singles, *draw.sample(sorted(sets), min(count, len(sets)))]
    samples = []
    for modules in chosen:
        needed = closures.items_of([ids[name] for name in modules])
        costs = {
            catalogue.keys[number]: (int(catalogue.load_ns[number]) / NS_PER_SECOND, float(catalogue.size_mb[number]))
            for number in needed
        }
        samples.append(_Sample(modules, costs))
    return samples


def _bring_to_pace(order: Sequence[tuple[_Sample, ProbeAnswer]], reference: float | None) -> float | None:
    """Fills in the pace of each answer, against that of the measurements; returns the one in the middle."""
    told = [statistics.fmean(answer.pace_s) if answer.pace_s else None for _, answer in order]
    known = [pace for pace in told if pace]
    for number, (sample, _) in enumerate(order):
        half = PACE_WINDOW // 2
        around = [pace for pace in told[max(0, number - half) : number + half + 1] if pace]
        pace = statistics.median(around) / reference if around and reference else 1.0
        sample.paces.append(pace)
    return statistics.median(known) / reference if known and reference else None


def _check(sample: _Sample) -> Checked:
    clock = statistics.median(sample.clock)
    return Checked(
        sample.modules,
        predicted_s=round(sum(seconds for seconds, _ in sample.needed.values()), 9),
        measured_s=round(statistics.median(sample.seconds), 9),
        predicted_mb=round(sum(size for _, size in sample.needed.values()), 6),
        measured_mb=round(statistics.median(answer.rss_mb or 0.0 for answer in sample.answers), 6),
        clock_s=round(clock, 9),
        spread=round((max(sample.clock) - min(sample.clock)) / clock, 3) if clock > 0 else 0.0,
        failure=sample.failure,
    )


def find_errors(pairs: Sequence[tuple[float, float]], large_from: float) -> Errors:
    """The errors of (predicted, measured): relative where the measured is at least `large_from`."""
    relative = [abs(predicted - measured) / measured for predicted, measured in pairs if measured >= large_from]
    absolute = [abs(predicted - measured) for predicted, measured in pairs if measured < large_from]
    return Errors(
        len(relative),
        statistics.median(relative) if relative else None,
        float(np.percentile(relative, 90)) if relative else None,
        len(absolute),
        max(absolute, default=None),
        float(np.percentile(absolute, 90)) if absolute else None,
    )


# ---- why ----


def is_outlier(predicted: float, measured: float, large_from: float, small: float) -> bool:
    """Whether a prediction is further off than predictions should be."""
    return abs(predicted - measured) > (OUTLIER_SHARE * measured if measured >= large_from else small)


def _explain(stream: ProbeStream, sample: _Sample, one: Checked, pace: float) -> list[Outlier]:
    """Whether it is an outlier, in time and in memory; imported once more then, with every module measured."""
    found = []
    if is_outlier(one.predicted_s, one.measured_s, FROM_S, OUTLIER_S):
        reason = _find_reason(stream, sample, "time", pace)
        if one.spread > OUTLIER_SHARE:
            reason = f"its repeats differ by {100 * one.spread:.0f} %; {reason}"
        found.append(Outlier(one.modules, "s", one.predicted_s, one.measured_s, reason))
    if is_outlier(one.predicted_mb, one.measured_mb, FROM_MB, OUTLIER_MB):
        reason = _find_reason(stream, sample, "memory", 1.0)
        found.append(Outlier(one.modules, "MB", one.predicted_mb, one.measured_mb, reason))
    return found


def _find_reason(stream: ProbeStream, sample: _Sample, mode: Mode, pace: float) -> str:
    answer = stream.ask(sample.modules, mode)
    if answer.failure:
        return f"it could not be measured again: {answer.failure.detail}"
    # What single items ask for of the standard library is counted in them.
    modules = [module for module in answer.modules if not module.stdlib]
    if mode == "time":
        took = {module.name: (module.seconds or 0.0) / pace for module in modules}
        return describe_difference(took, {name: seconds for name, (seconds, _) in sample.needed.items()}, "s", 0.001)
    took = {module.name: (module.raw_kb or module.kb or 0.0) * 1024 / 1e6 for module in modules}
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
    for name, unit, errors, large in (
        ("time", "s", result.seconds, FROM_S),
        ("time by the clock of now", "s", result.clock_seconds, FROM_S),
        ("memory", "MB", result.mb, FROM_MB),
    ):
        if errors.median is not None and errors.p90 is not None:
            lines.append(
                f"  {name}: {errors.large} of at least {large:g} {unit}: error {100 * errors.median:.1f} % in the median,"
                f" {100 * errors.p90:.1f} % at the 90th percentile"
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
