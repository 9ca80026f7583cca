"""The generation for people, as text: what was measured, what was planned, what was captured."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from pipeline.analyze import Measurements
from pipeline.plan import Plan
from readie.manifest import Manifest

_SHOWN = 20  # failures, warnings and the like


class GenerationReport(msgspec.Struct, frozen=True):
    """Everything that the text says, for `--json`."""

    rootfs: str
    generation: str
    flavor: str
    modules: int
    distributions: int
    seconds: float  # of all modules together
    size_mb: float
    failures: list[dict[str, object]]
    absent: dict[str, int]
    plan: Plan
    manifest: Manifest
    drift: float  # measured alpha / planned alpha − 1
    files: dict[str, int]  # name → bytes
    warnings: list[str]


def report_generation(out: Path, measurements: Measurements, plan: Plan, manifest: Manifest) -> GenerationReport:
    files = {
        path.name: sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
        for path in (out / "catalogue.json", out / "catalogue.parquet", out / "manifest.json")
    }
    info = measurements.info
    return GenerationReport(
        rootfs=info.rootfs,
        generation=manifest.generation,
        flavor=manifest.flavor.value,
        modules=len(measurements.items),
        distributions=len({item.distribution for item in measurements.items}),
        seconds=round(sum(item.seconds for item in measurements.items), 6),
        size_mb=round(sum(item.size_mb for item in measurements.items), 3),
        failures=[msgspec.to_builtins(failure) for failure in info.failures],
        absent=info.absent,
        plan=plan,
        manifest=manifest,
        drift=manifest.alpha_measured / manifest.alpha_planned - 1,
        files=files,
        warnings=list(dict.fromkeys([*info.warnings, *manifest.warnings])),
    )


def write_text(report: GenerationReport, measurements: Measurements) -> str:
    """The report as text, 120 columns at most where names allow."""
    parts = [
        _measured(report, measurements),
        write_plan_text(report.plan, report.manifest),
        _alpha(report),
        _warned(report.warnings),
    ]
    return "\n".join(line for part in parts for line in [*part, ""]).rstrip()


def table(rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Rows in columns, two blanks apart; the columns numbered `right` are aligned to the right."""
    rows = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    flush = set(right)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if n in flush else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _names(names: Sequence[str], width: int = 60) -> str:
    shown: list[str] = []
    for name in names:
        if shown and len(", ".join([*shown, name])) > width:
            return f"{', '.join(shown)} and {len(names) - len(shown)} more"
        shown.append(name)
    return ", ".join(shown) or "nothing"


def _measured(report: GenerationReport, measurements: Measurements) -> list[str]:
    seconds: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for item in measurements.items:
        seconds[item.distribution] += round(item.seconds * 1e9)
        size[item.distribution] += round(item.size_mb * 1e6)
    lines = [
        f"Root filesystem {report.rootfs}",
        (
            f"  {report.modules} modules of {report.distributions} distributions were measured:"
            f" {report.seconds:.2f} s and {report.size_mb:.0f} MB, each module once"
        ),
    ]
    dearest = sorted(seconds, key=lambda name: (-seconds[name], name))[:5]
    shown = [f"{name} {seconds[name] / 1e9:.2f} s, {size[name] / 1e6:.0f} MB" for name in dearest]
    lines.append(f"  most expensive: {'; '.join(shown)}")
    if report.failures:
        lines.append(f"  {len(report.failures)} could not be imported:")
        lines += [f"    {failure['module']}: {failure['detail']}" for failure in report.failures[:_SHOWN]]
        if len(report.failures) > _SHOWN:
            lines.append(f"    and {len(report.failures) - _SHOWN} more")
    if report.absent:
        names = sorted(report.absent, key=lambda name: (-report.absent[name], name))
        lines.append(f"  asked for, and not there: {_names(names)}")
    return lines


def write_plan_text(plan: Plan, manifest: Manifest | None = None) -> list[str]:
    """The checkpoints in a table, and what the plan costs."""
    captured = {one.checkpoint_id: one for one in manifest.checkpoints} if manifest else {}
    limits = plan.limits
    lines = [
        (
            f"Plan by {plan.planner}: {len(plan.checkpoints)} checkpoints from {plan.candidates} candidates, for"
            f" {plan.requests} requests"
        ),
        (
            f"  at most {limits.max_checkpoints} checkpoints, {limits.checkpoint_mb:g} MB each and"
            f" {limits.size_budget_mb:g} MB together; alpha {plan.alpha:g} s/MB"
        ),
    ]
    header = ["  checkpoint", "MB", "items", "requests", "saves s"]
    rows = [[*header, *(["measured MB", "restore ms"] if captured else []), "holds"]]
    for one in plan.checkpoints:
        row = [
            f"  {one.checkpoint_id}",
            f"{one.size_mb:.1f}",
            str(len(one.items)),
            str(one.requests),
            f"{one.saved_s:.2f}",
        ]
        if captured:
            found = captured[one.checkpoint_id]
            row += [f"{found.measured_mb:.1f}", f"{1e3 * statistics.median(found.restore_s):.2f}"]
        rows.append([*row, _names(one.canonical)])
    lines += table(rows, right=range(1, 7 if captured else 5))
    without, cost = plan.cost_without_ns / 1e9, plan.cost_ns / 1e9
    less = f", {100 * (1 - cost / without):.1f} % less" if without else ""
    lines.append(f"  all requests together: {without:.2f} s without checkpoints, {cost:.2f} s with them{less}")
    if plan.unmatched:
        names = sorted(plan.unmatched, key=lambda name: (-plan.unmatched[name], name))
        lines.append(f"  asked for, and not measured: {_names(names)}")
    return lines


def _alpha(report: GenerationReport) -> list[str]:
    manifest = report.manifest
    sizes = [point.size_mb for point in manifest.points]
    lines = [
        (
            f"alpha: planned {manifest.alpha_planned:g}, measured {manifest.alpha_measured:g}, written"
            f" {manifest.alpha_written:g} s/MB; drift {100 * report.drift:+.0f} %"
        ),
        (
            f"  from {len(manifest.points)} points between {min(sizes):.0f} and {max(sizes):.0f} MB; before size and imports,"
            f" a restore takes {1e3 * manifest.restore_fixed_s:.1f} ms and a cold start {1e3 * manifest.cold_fixed_s:.1f} ms"
        ),
    ]
    points = sorted(manifest.points, key=lambda point: (point.size_mb, point.name))
    rows = [[f"    {point.name}", f"{point.size_mb:.1f} MB", f"{1e3 * point.restore_s:.2f} ms"] for point in points]
    return [*lines, *table(rows, right=(1, 2))]


def _warned(warnings: Sequence[str]) -> list[str]:
    if not warnings:
        return ["No warnings."]
    lines = [f"{len(warnings)} warning{'' if len(warnings) == 1 else 's'}:"]
    lines += [f"  {warning}" for warning in warnings[:_SHOWN]]
    if len(warnings) > _SHOWN:
        lines.append(f"  and {len(warnings) - _SHOWN} more")
    return lines
