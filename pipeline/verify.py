"""Holds predictions to reality: imports a sample whole, in fresh processes, and compares with the sum of its parts."""

import random
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np

from pipeline.analyze import Measurements
from pipeline.corpus import ImportSet
from pipeline.plan import catalogue_of
from pipeline.processes import ProbeStream, Sandbox
from pipeline.progress import Progress
from readie.closure import compute_closures
from readie.cost import match
from readie.units import NS_PER_SECOND

FROM_S = 0.020  # below, and below FROM_MB, an error is told absolutely
FROM_MB = 20.0
REPEATS = 3


class Checked(msgspec.Struct, frozen=True):
    """One import: what the sum over its closure predicts, and the median of what it took. `failure`: it failed."""

    modules: tuple[str, ...]
    predicted_s: float
    measured_s: float
    predicted_mb: float
    measured_mb: float
    failure: str = ""


class Errors(msgspec.Struct, frozen=True):
    """Relative errors of what is large enough, absolute ones of the rest. None: there is nothing of that kind."""

    large: int
    median: float | None
    p90: float | None
    small: int
    small_worst: float | None  # in the unit


class Verification(msgspec.Struct, frozen=True):
    seed: int
    checked: list[Checked]
    failed: list[Checked]
    seconds: Errors
    mb: Errors


def verify(
    sandbox: Sandbox, measurements: Measurements, corpus: Sequence[ImportSet], count: int, seed: int
) -> Verification:
    """Checks up to `count` random modules and `count` random import sets, three imports each."""
    catalogue = catalogue_of(measurements.items)
    ids = {key: number for number, key in enumerate(catalogue.keys)}
    closures = compute_closures(catalogue)
    draw = random.Random(seed)
    sets = {tuple(sorted({item for name in one.modules if (item := match(ids, name))})) for one in corpus} - {()}
    singles = [(key,) for key in draw.sample(catalogue.keys, min(count, len(catalogue.keys)))]
    sample = [*singles, *draw.sample(sorted(sets), min(count, len(sets)))]
    checked: list[Checked] = []
    failed: list[Checked] = []
    with ProbeStream(sandbox) as stream, Progress("verifying", len(sample)) as progress:
        for modules in sample:
            needed = closures.items_of([ids[name] for name in modules])
            answers = [stream.ask(modules, "plain") for _ in range(REPEATS)]
            failure = next((answer.failure for answer in answers if answer.failure), None)
            one = Checked(
                modules,
                int(catalogue.load_ns[needed].sum()) / NS_PER_SECOND,
                statistics.median(answer.wall_s or 0.0 for answer in answers),
                round(float(catalogue.size_mb[needed].sum()), 6),
                statistics.median(answer.rss_mb or 0.0 for answer in answers),
                failure.detail if failure else "",
            )
            (failed if failure else checked).append(one)
            progress.advance(", ".join(modules))
    return Verification(
        seed,
        checked,
        failed,
        find_errors([(one.predicted_s, one.measured_s) for one in checked], FROM_S),
        find_errors([(one.predicted_mb, one.measured_mb) for one in checked], FROM_MB),
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
    )


def write_verification(result: Verification) -> list[str]:
    """The result for people."""
    lines = [f"{len(result.checked)} imports checked, seed {result.seed}"]
    for name, unit, errors, large in (("time", "s", result.seconds, FROM_S), ("memory", "MB", result.mb, FROM_MB)):
        if errors.median is not None and errors.p90 is not None:
            lines.append(
                f"  {name}: {errors.large} of at least {large:g} {unit}: error {100 * errors.median:.1f} % in the median,"
                f" {100 * errors.p90:.1f} % at the 90th percentile"
            )
        if errors.small_worst is not None:
            lines.append(
                f"  {name}: {errors.small} below {large:g} {unit}: at most {errors.small_worst:.4f} {unit} off"
            )
    worst = sorted(result.checked, key=lambda one: -abs(one.predicted_s - one.measured_s))[:5]
    lines += [
        f"  furthest off: {', '.join(one.modules)}: predicted {one.predicted_s:.3f} s, measured {one.measured_s:.3f} s"
        for one in worst
    ]
    lines += [f"  failed: {', '.join(one.modules)}: {one.failure}" for one in result.failed]
    return lines
