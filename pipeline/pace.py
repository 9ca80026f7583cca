"""Takes the pace of the machine out of measured times, and says how well they are known then.

A processor whose caches others use as well works at another pace from one process to the next, by a half and more. Each
process tells its pace by a fixed piece of work, roughly: how much of that is to be believed is fitted to processes that
did the same. How it compares with others that loaded the same modules tells it exactly, but for the level that all of
them have in common.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_ROUNDS = 6  # they hardly change anything after the third
_TELLS_S = 0.005  # a process tells its pace by its modules from this much time in common with others,
_TELLS_FROM = 5.0  # and from this many modules: one alone would take its own noise for the pace
_ENOUGH = 3  # processes: where so many others did the same, one that stalled does not count
_STRAY = 4 / 3  # a time that is so many times the median, or a part like that of it, counts as if it were just that
_CERTAIN = 1.96  # standard errors to either side are a 95 % interval
_ERROR = 1.2533 * 1.4826  # standard error of a median, in median absolute deviations over √n; a mean's is smaller
_DOUBT = 0.04  # as if processes whose squared deviations add up to so much had told their paces exactly
_WILD = math.log(2)  # a time that is further from the middle of its group tells nothing of that
_BORROWED = 4  # the variance of a few values is mixed with that of all groups, as if that were so many values

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Figures:
    """One module's times, each at the reference pace: the mean without strays, and how well it is known.

    Times are skewed: medians of many modules add up to less than the median of their sum does.
    """

    middle: float
    spread: float  # median absolute deviation
    count: int  # processes
    level: float = 0.0  # standard error, as a share, of the level that its processes have in common

    @property
    def noise(self) -> float:
        """Standard error but for that of the level; of a single value nothing is known."""
        return _ERROR * self.spread / self.count**0.5 if self.count > 1 else math.inf

    @property
    def interval(self) -> float:
        """Half of the 95 % interval."""
        return _CERTAIN * math.hypot(self.noise, self.level * self.middle)


@dataclass(frozen=True, eq=False)
class Settled:
    figures: dict[str, Figures]
    paces: list[float]  # of each process: how many times as slow as the reference
    trust: float = 1.0  # how much of what processes tell was believed (`fit_trust`)


def find_reference(told: Sequence[float | None]) -> float | None:
    """The pace (seconds of the fixed work) of the machine when it is left alone: the fastest twentieth. None: none told."""
    known = [pace for pace in told if pace]
    return float(np.percentile(known, 5)) if known else None


def mean_without_strays(values: Sequence[float]) -> float:
    """The mean, where a value that is more than a third above or below the median counts as if it were just that."""
    middle = statistics.median(values)
    return statistics.fmean(min(max(value, middle / _STRAY), middle * _STRAY) for value in values)


def select_steady(stalled: Sequence[bool]) -> list[int]:
    """The numbers of the processes that count: those that stalled only where few did not; some do so every time."""
    steady = [number for number, one in enumerate(stalled) if not one]
    return steady if len(steady) >= _ENOUGH else list(range(len(stalled)))


def fit_trust(seconds: Sequence[float], told: Sequence[float | None], alike: Sequence[Hashable]) -> float:
    """By which power of the pace that it tells a process is slower than others that did the same (`alike`): 0 to 1.

    Below 1 where the fixed piece of work, which is short, has noise of its own: dividing by all of it would add that.
    It stays near 1 where few processes told another pace than their like.
    """
    groups: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    for time, pace, key in zip(seconds, told, alike, strict=True):
        if time >= _TELLS_S and pace:
            groups[key].append((math.log(pace), math.log(time)))
    across = square = _DOUBT
    for group in groups.values():
        deviations = np.array(group) - np.median(group, axis=0)
        deviations = deviations[(np.abs(deviations) <= _WILD).all(axis=1)]
        if len(deviations) > 1:
            deviations -= deviations.mean(axis=0)
            across += float(deviations[:, 0] @ deviations[:, 1])
            square += float(deviations[:, 0] @ deviations[:, 0])
    return min(max(across / square, 0.0), 1.0)


def believe(told: Sequence[float | None], trust: float) -> list[float]:
    """The pace of each process as far as it is believed, in the unit of `told`; in the middle it is believed in full."""
    known = [pace for pace in told if pace]
    middle = statistics.median(known) if known else 1.0
    return [middle * ((pace or middle) / middle) ** trust for pace in told]


def standard_errors(groups: Sequence[Sequence[float] | Floats]) -> list[float]:
    """Of the mean of each group of positive values, as a share of it. Infinite where no group has two values.

    A few values that are close together by chance do not make a small error: the spread of all groups counts too.
    """
    logs = [np.log(np.maximum(group, 1e-9)) for group in groups]
    logs = [np.clip(group, np.median(group) - _WILD, np.median(group) + _WILD) for group in logs]
    squares = [float(np.sum((group - group.mean()) ** 2)) for group in logs]
    free = sum(len(group) - 1 for group in logs)
    if not free:
        return [math.inf] * len(logs)
    of_all = sum(squares) / free
    return [
        math.sqrt((square + _BORROWED * of_all) / (len(group) - 1 + _BORROWED) / len(group))
        for square, group in zip(squares, logs, strict=True)
    ]


def settle(
    processes: Sequence[Mapping[str, float]], told: Sequence[float | None], stalled: Sequence[bool] = ()
) -> Settled:
    """What each module costs at the reference pace, and the pace of each process.

    `processes`: seconds by module; `told`: seconds of the fixed work; `stalled`: whether it waited for something, such
    as a disk; in the same order. Medians of modules and of processes in turn, then the level that processes tell.
    Processes that stalled do not count for modules that have been measured in enough others.
    """
    if not processes:
        return Settled({}, [])
    reference = find_reference(told) or 1.0
    alike = [frozenset(process) for process in processes]
    totals = [sum(process.values()) for process in processes]
    trust = fit_trust(totals, told, alike)
    prior = np.array(believe(told, trust)) / reference
    names = sorted({name for process in processes for name in process})
    number = {name: index for index, name in enumerate(names)}
    rows = np.repeat(np.arange(len(processes)), [len(process) for process in processes])
    columns = np.array([number[name] for process in processes for name in process], dtype=np.int64)
    values = np.array([value for process in processes for value in process.values()], dtype=np.float64)
    shared = np.bincount(columns, minlength=len(names)) > 1

    paces = prior
    for _ in range(_ROUNDS):
        middles = _medians(values / paces[rows], columns, len(names))
        paces = _compare(values, np.where(shared, middles, 0.0)[columns], rows, prior)
    groups = _group(alike)
    # The level of processes whose own noise is all that there is (they told no pace by their modules) is in their figures.
    telling = [group for group in groups if (paces[group] != prior[group]).any()]
    errors = np.zeros(len(processes))
    for group, error in zip(telling, standard_errors([paces[group] / prior[group] for group in telling]), strict=True):
        errors[group] = error
    paces = _level(paces, prior, groups)
    good = ~np.array(stalled or [False] * len(processes))[rows]
    counts = np.bincount(columns[good], minlength=len(names))
    good |= counts[columns] < _ENOUGH  # better than nothing
    values, rows, columns = (values / paces[rows])[good], rows[good], columns[good]
    middles = _medians(values, columns, len(names))
    spreads = _medians(np.abs(values - middles[columns]), columns, len(names))
    counts = np.bincount(columns, minlength=len(names))
    strays = np.clip(values, middles[columns] / _STRAY, middles[columns] * _STRAY)
    means = np.bincount(columns, weights=strays, minlength=len(names)) / np.maximum(counts, 1)
    levels = _level_errors(groups, errors, rows, columns, len(names))
    figures = {
        name: Figures(float(means[index]), float(spreads[index]), int(counts[index]), float(levels[index]))
        for name, index in number.items()
    }
    return Settled(figures, [float(pace) for pace in paces], trust)


def _group(alike: Sequence[Hashable]) -> list[list[int]]:
    """The numbers of the processes that did the same."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for process, key in enumerate(alike):
        groups[key].append(process)
    return list(groups.values())


def _level(paces: Floats, prior: Floats, groups: Sequence[list[int]]) -> Floats:
    """The paces, so that those of the processes that loaded the same modules are in the mean what they told.

    Compared with one another, processes that share little with others say nothing of the level: it would drift.
    """
    levelled = paces.copy()
    for group in groups:
        levelled[group] /= mean_without_strays((paces[group] / prior[group]).tolist())
    return levelled


def _level_errors(groups: Sequence[list[int]], errors: Floats, rows: Ids, columns: Ids, count: int) -> Floats:
    """The standard error of each column's level, as a share: the processes of one group have theirs in common."""
    group_of, error_of = np.zeros(len(errors), np.int64), np.zeros(len(groups))
    for number, group in enumerate(groups):
        group_of[group], error_of[number] = number, errors[group[0]]
    pairs, times = np.unique(group_of[rows] * count + columns, return_counts=True)
    variances = np.bincount(pairs % count, (times * error_of[pairs // count]) ** 2, count)
    levels: Floats = np.sqrt(variances) / np.maximum(np.bincount(columns, minlength=count), 1)
    return levels


def _medians(values: Floats, groups: Ids, count: int) -> Floats:
    """The median of the values of each group; 0 where it has none."""
    order = np.lexsort((values, groups))
    values, sizes = values[order], np.bincount(groups, minlength=count)
    starts = np.cumsum(sizes) - sizes
    if not len(values):
        return np.zeros(count)
    low = np.minimum(starts + np.maximum(sizes - 1, 0) // 2, len(values) - 1)
    high = np.minimum(starts + sizes // 2, len(values) - 1)
    return np.where(sizes > 0, (values[low] + values[high]) / 2, 0.0)


def _compare(values: Floats, expected: Floats, rows: Ids, prior: Floats) -> Floats:
    """The pace of each process: the weighted median of how its values compare with what is expected (0: nothing is)."""
    use = (expected > 0) & (values > 0)
    rows, weights, ratios = rows[use], expected[use], values[use] / expected[use]
    order = np.lexsort((ratios, rows))
    rows, ratios, weights = rows[order], ratios[order], weights[order]
    totals = np.bincount(rows, weights=weights, minlength=len(prior))
    squares = np.bincount(rows, weights=weights**2, minlength=len(prior))
    tells = (totals >= _TELLS_S) & (totals**2 >= _TELLS_FROM * squares)
    at = np.searchsorted(np.cumsum(weights), (np.cumsum(totals) - totals / 2)[tells])
    paces = prior.copy()
    paces[tells] = ratios[np.minimum(at, len(ratios) - 1)]
    return paces
