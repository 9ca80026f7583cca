"""The report as a page: one HTML file that loads nothing, light or dark as the reader has it."""

from datetime import datetime
from pathlib import Path

import jinja2
from markupsafe import Markup

from pipeline.report import GenerationReport, write_figure
from pipeline.report_plots import plot_all
from readie.files import replaced

TEMPLATE = Path(__file__).with_name("report.html")


def _printable(value: object) -> str:
    """Text without what a page cannot show: control characters, lone surrogates."""
    return "".join(c if c.isprintable() or c in "\n\u202f" else "\ufffd" for c in str(value))


def write_page(report: GenerationReport, made_at: datetime) -> str:
    """The page. All but the line with `made_at` is the same for the same report, byte for byte."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else _printable(value),
    )
    environment.filters["figure"] = write_figure
    plots = {name: Markup(svg) for name, svg in plot_all(report).items()}  # noqa: S704 - made by matplotlib
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(report=report, plots=plots, made_at=f"{made_at:%Y-%m-%d %H:%M %Z}")


def save_page(path: Path, report: GenerationReport, made_at: datetime) -> None:
    """Writes `path` whole or not at all."""
    page = write_page(report, made_at)
    with replaced(path) as aside:
        aside.write_text(page, encoding="utf-8")
