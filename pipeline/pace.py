"""Takes the pace of the machine out of measured times.

A processor whose caches others use as well works at another pace from one process to the next, by a half and more. Each
process tells its pace by a fixed piece of work, roughly; how it compares with others that loaded the same modules tells
it exactly.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_ROUNDS = 6  # they hardly change anything after the third
_TELLS_S = 0.005  # a process tells its pace by its modules from this much time in common with others,
_TELLS_FROM = 5.0  # and from this many modules: one alone would take its own noise for the pace
_SPOILED = 1.25  # times as slow as the reference: such a process does not count where there are enough others,
_ENOUGH = 3  # of each of its modules
_STRAY = 4 / 3  # a time that is so many times the median, or a part like that of it, counts as if it were just that
_INTERVAL = 1.96 * 1.2533 * 1.4826  # 95 % interval of a median, in median absolute deviations over √n

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

    @property
    def interval(self) -> float:
        """Half of the 95 % interval of the median; of a single value nothing is known."""
        return _INTERVAL * self.spread / self.count**0.5 if self.count > 1 else float("inf")


@dataclass(frozen=True, eq=False)
class Settled:
    figures: dict[str, Figures]
    paces: list[float]  # of each process: how many times as slow as the reference


def find_reference(told: Sequence[float | None]) -> float | None:
    """The pace (seconds of the fixed work) of the machine when it is left alone: the fastest twentieth. None: none told."""
    known = [pace for pace in told if pace]
    return float(np.percentile(known, 5)) if known else None


def settle(
    processes: Sequence[Mapping[str, float]], told: Sequence[float | None], stalled: Sequence[bool] = ()
) -> Settled:
    """What each module costs at the reference pace, and the pace of each process.

    `processes`: seconds by module; `told`: seconds of the fixed work; `stalled`: whether it waited for something, such
    as a disk; in the same order. Medians of modules and of processes in turn, then the level that processes tell. Processes that stalled or were slow do
    not count for modules that have been measured in enough others.
    """
    if not processes:
        return Settled({}, [])
    reference = find_reference(told)
    known = [pace / reference if pace and reference else None for pace in told]
    middle = statistics.median([pace for pace in known if pace] or [1.0])
    prior = np.array([pace or middle for pace in known])
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
    paces = _level(paces, prior, [frozenset(process) for process in processes])
    good = ((paces <= _SPOILED) & ~np.array(stalled or [False] * len(processes)))[rows]
    counts = np.bincount(columns[good], minlength=len(names))
    good |= counts[columns] < _ENOUGH  # better than nothing
    values, rows, columns = (values / paces[rows])[good], rows[good], columns[good]
    middles = _medians(values, columns, len(names))
    spreads = _medians(np.abs(values - middles[columns]), columns, len(names))
    counts = np.bincount(columns, minlength=len(names))
    strays = np.clip(values, middles[columns] / _STRAY, middles[columns] * _STRAY)
    means = np.bincount(columns, weights=strays, minlength=len(names)) / np.maximum(counts, 1)
    figures = {
        name: Figures(float(means[index]), float(spreads[index]), int(counts[index])) for name, index in number.items()
    }
    return Settled(figures, [float(pace) for pace in paces])


def _level(paces: Floats, prior: Floats, loaded: Sequence[frozenset[str]]) -> Floats:
    """The paces, so that those of the processes that loaded the same modules are in the middle what they told.

    Compared with one another, processes that share little with others say nothing of the level: it would drift.
    """
    alike: dict[frozenset[str], list[int]] = defaultdict(list)
    for process, modules in enumerate(loaded):
        alike[modules].append(process)
    levelled = paces.copy()
    for processes in alike.values():
        levelled[processes] /= np.median(paces[processes] / prior[processes])
    return levelled


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
