"""The plots of the report, as SVG that takes its colours and its font from the page around it."""

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pipeline.report import Dear, GenerationReport, write_figure

WIDTH_IN = 5.2  # narrow, so that little is lost when a telephone shrinks it
_ROW_IN = 0.27
_LETTER_IN = 0.088  # of the average letter at the size of the labels
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"

#: Stand-ins that are drawn, and the page's own colours that replace them.
INK, FAINT, FIRST, SECOND = "#010101", "#020202", "#030303", "#040404"
_COLOURS = {INK: "var(--ink)", FAINT: "var(--line)", FIRST: "var(--first)", SECOND: "var(--second)"}

_STYLE: dict[Any, Any] = {  # keys are a Literal of several hundred in matplotlib
    "axes.edgecolor": FAINT,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 11,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",  # text stays text: small, and read by screen readers and searches
    "text.color": INK,
    "text.parse_math": False,  # a $ in a name is a $
    "xtick.color": INK,
    "ytick.color": INK,
}


def plot_all(report: GenerationReport) -> dict[str, str]:
    """Name → SVG, of what there is anything to plot."""
    with mpl.rc_context():
        mpl.rcdefaults()  # whatever the user's own style is
        mpl.rcParams.update(_STYLE)
        plots = {
            "costs": plot_costs(report),
            "savings": plot_savings(report),
            "alpha": plot_alpha(report),
            "time": _plot_dear(report.dearest_in_time, "seconds", "seconds, each module once"),
            "memory": _plot_dear(report.dearest_in_memory, "size_mb", "MB, each module once"),
            "imports": _plot_dear(report.dearest_imports, "seconds", "seconds, with all that it pulls in"),
        }
        return {name: _to_svg(name, *drawn) for name, drawn in plots.items() if drawn is not None}


Drawn = tuple[Figure, str, str]  # the figure, its title, and what it shows in a sentence


def _figure(height: float, left: float, bottom: float = 0.55, top: float = 0.1) -> tuple[Figure, Axes]:
    """Margins in inches. They are fixed: to find them, matplotlib's layouts draw everything twice."""
    figure = Figure(figsize=(WIDTH_IN, height))
    box = (left / WIDTH_IN, bottom / height, (WIDTH_IN - left - 0.15) / WIDTH_IN, (height - bottom - top) / height)
    return figure, figure.add_axes(box)


def _bars(names: Sequence[str], values: Sequence[float], label: str) -> tuple[Figure, Axes]:
    """Horizontal bars with their values, the first on top."""
    shown = [_cut(name) for name in names]
    figure, axes = _figure(0.7 + _ROW_IN * len(names), 0.15 + _LETTER_IN * max(map(len, shown)))
    places = range(len(names))
    bars = axes.barh(places, values, color=FIRST, height=0.7)
    axes.bar_label(bars, [write_figure(value) for value in values], padding=3, fontsize=10)
    axes.set_yticks(places, shown)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, (max(values) or 1) * 1.16)  # with room for the longest bar's value
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel(label)
    return figure, axes


def _cut(name: str, most: int = 26) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def plot_costs(report: GenerationReport) -> Drawn | None:
    """The corpus without checkpoints, with greedy's plan, with this one, and the proven bound."""
    proof = report.proof
    found = [
        ("no checkpoints", report.cost_without_s),
        ("greedy plan", proof.greedy_s),
        ("this plan", report.cost_s),
        ("bound: none is below", proof.bound_s),
    ]
    rows = [(name, seconds) for name, seconds in found if seconds is not None]
    figure, axes = _bars([name for name, _ in rows], [seconds for _, seconds in rows], "seconds, all requests together")
    for (name, _), bar in zip(rows, axes.patches, strict=True):
        if name != "this plan":
            bar.set_alpha(0.45)
    told = ", ".join(f"{name} {write_figure(seconds)} s" for name, seconds in rows)
    return figure, "What all requests cost together", told


def plot_savings(report: GenerationReport) -> Drawn | None:
    """What each checkpoint saves."""
    rows = [one for one in report.checkpoints if one.items]
    if not rows:
        return None
    figure, _ = _bars([one.checkpoint_id for one in rows], [one.saved_s for one in rows], "seconds saved")
    best = max(rows, key=lambda one: one.saved_s)
    return figure, "What each checkpoint saves", f"{best.checkpoint_id} saves most, {write_figure(best.saved_s)} s"


def plot_alpha(report: GenerationReport) -> Drawn | None:
    """The points of alpha's fit, the line through them, and the line that was planned with."""
    points, fit = report.manifest.points, report.fit
    if not points:
        return None
    figure, axes = _figure(3.4, 0.65)
    ballast = [point for point in points if point.name.startswith("ballast_")]
    real = [point for point in points if not point.name.startswith("ballast_")]
    for shown, label, marker, fill in ((real, "checkpoints", "o", FIRST), (ballast, "ballast", "s", "none")):
        sizes, millis = [point.size_mb for point in shown], [1e3 * point.restore_s for point in shown]
        axes.scatter(sizes, millis, label=label, marker=marker, facecolor=fill, edgecolor=FIRST, zorder=3)
    told = "the points do not have two different sizes, so there is no line"
    if fit:
        right = max(point.size_mb for point in points)
        planned = report.manifest.alpha_planned
        for slope, label, style in ((fit.slope, "measured alpha", "-"), (planned, "planned alpha", "--")):
            heights = [1e3 * (fit.intercept + slope * size) for size in (0.0, right)]
            axes.plot([0.0, right], heights, style, color=SECOND, label=label)
        told = f"measured slope {fit.slope:g} s/MB, planned {planned:g} s/MB, R² {fit.explained:.2f}"
    axes.set_xlabel("MB")
    axes.set_ylabel("ms to the first answer")
    axes.set_ylim(bottom=min(0.0, *axes.get_ylim()))
    axes.legend(loc="upper left", fontsize=10)
    return figure, "Restore time against size", told


def _plot_dear(dearest: Sequence[Dear], field: str, label: str) -> Drawn | None:
    values: list[float] = [getattr(one, field) for one in dearest]
    if not any(values):
        return None
    figure, _ = _bars([one.name for one in dearest], values, label)
    title = f"Most expensive: {label}"
    return (
        figure,
        title,
        ", ".join(f"{one.name} {write_figure(value)}" for one, value in zip(dearest[:3], values, strict=False)),
    )


# ---- SVG for a page ----


def _to_svg(name: str, figure: Figure, title: str, told: str) -> str:
    """The figure as an `svg` element that stands in a page beside others: the same bytes for the same figure."""
    with mpl.rc_context({"svg.hashsalt": name}):
        file = io.BytesIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    root = ET.fromstring(file.getvalue())  # noqa: S314 - our own
    for element in list(root):
        if element.tag == f"{{{_SVG}}}metadata":
            root.remove(element)
    for element in root.iter():
        _adapt(element, name)
    for size in ("width", "height"):
        del root.attrib[size]
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-desc")
    for place, (tag, text) in enumerate((("title", title), ("desc", told))):
        element = ET.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(place, element)
    return ET.tostring(root, encoding="unicode")


def _adapt(element: ET.Element, name: str) -> None:
    """Ids of their own to each plot, and the page's colours and font."""
    for key, value in element.attrib.items():
        adapted = value
        if key == "id":
            adapted = f"{name}-{value}"
        elif key == f"{{{_XLINK}}}href":
            adapted = value.replace("#", f"#{name}-", 1)
        elif key in {"style", "clip-path", "fill", "stroke"}:
            adapted = value.replace("url(#", f"url(#{name}-")
            for colour, variable in _COLOURS.items():
                adapted = adapted.replace(colour, variable)
            adapted = re.sub(r"font: ([\d.]+)px [^;]*", r"font-size: \1px", adapted)
        element.set(key, adapted)
