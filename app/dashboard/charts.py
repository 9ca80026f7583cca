"""Charts: where points, bars and axes are. The templates draw them as SVG, and each has a table beside it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, floor, log10

#: Of a plot with its axes, in its own units.
WIDTH, HEIGHT = 640.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 20.0, 15.0, 45.0
#: Of a name beside a point: how wide a letter is, and how high a line.
LETTER, LINE = 6.5, 13.0


@dataclass(frozen=True)
class Bar:
    """A part of a stacked bar: what it is, the class of its colour, how long it is, and where in 1,000 it lies."""

    name: str
    kind: str
    value: float
    start: float
    width: float


def stack(parts: Iterable[tuple[str, str, float]], whole: float) -> list[Bar]:
    """Parts (name, kind, value) one after another, on a bar on which `whole` is 1,000 wide; those below 0 are none."""
    kept = [(name, kind, max(value, 0.0)) for name, kind, value in parts]
    ends = list(accumulate((value for _, _, value in kept), initial=0.0))
    scale = 1000 / whole if whole > 0 else 0.0
    return [
        Bar(name, kind, value, start * scale, value * scale)
        for (name, kind, value), start in zip(kept, ends, strict=False)
    ]


@dataclass(frozen=True)
class Plot:
    """Points over two axes, in the units of the drawing; `line` is from its left end to its right one."""

    points: list[tuple[float, float, str]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    line: tuple[float, float, float, float] | None

    width, height, left, right, bottom = WIDTH, HEIGHT, LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM


def plot(points: Sequence[tuple[float, float, str]], line: tuple[float, float] | None = None) -> Plot:
    """Points (x, y, name), and a line given by its value at 0 and its slope."""
    xs = [0.0, *(x for x, _, _ in points)]
    ys = [0.0, *(y for _, y, _ in points)]
    x_ticks = ticks(0.0, max(xs))
    ends = [] if line is None else [line[0], line[0] + line[1] * x_ticks[-1]]
    y_ticks = ticks(min(ys + ends), max(ys + ends))

    def across(x: float) -> float:
        return round(LEFT + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT), 1)

    def down(y: float) -> float:
        return round(HEIGHT - BOTTOM - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM), 1)

    return Plot(
        points=_name_apart([(across(x), down(y), name) for x, y, name in points]),
        x_ticks=[(across(x), f"{x:g}") for x in x_ticks],
        y_ticks=[(down(y), f"{y:g}") for y in y_ticks],
        line=(across(x_ticks[0]), down(ends[0]), across(x_ticks[-1]), down(ends[1])) if ends else None,
    )


def _name_apart(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """The points, those that are far up first, without the names for which others have left no room."""
    taken: list[tuple[float, float]] = []
    found = []
    for x, y, name in sorted(points, key=lambda point: point[1]):
        has_room = all(abs(y - other_y) >= LINE or abs(x - other_x) >= LETTER * len(name) for other_x, other_y in taken)
        if has_room:
            taken.append((x, y))
        found.append((x, y, name if has_room else ""))
    return found


def ticks(least: float, most: float, wanted: int = 5) -> list[float]:
    """Round values from `least` or a little less to `most` or a little more: two at least."""
    if most <= least:
        most = least + 1
    rough = (most - least) / wanted
    power = 10.0 ** floor(log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough * (1 - 1e-9))
    first, last = floor(least / step + 1e-9), ceil(most / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def slope_of(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The line of least squares, as its value at 0 and its slope; None: the points do not have two places."""
    count = len(points)
    mean_x, mean_y = (sum(each) / count for each in zip(*points, strict=True)) if count else (0.0, 0.0)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return mean_y - slope * mean_x, slope
