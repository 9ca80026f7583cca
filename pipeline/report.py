"""The generation for people: what was measured, left out, planned and captured. The facts, and their text.

`report_page.py` makes a page of the same facts.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from pipeline.analyze import Failure, Measurements, Precision, read_measurements
from pipeline.capture import Fit, fit_line
from pipeline.measurement import MeasuredItem
from pipeline.pace import Figures
from pipeline.plan import Plan, read_plan
from pipeline.problem import catalogue_of
from readie.closure import compute_closures
from readie.document import Catalogue
from readie.errors import BadFile
from readie.flavor import Flavor
from readie.manifest import Manifest, read_manifest
from readie.projection import load_catalogue
from readie.units import NS_PER_SECOND

_SHOWN = 20  # failures, warnings and the like, in the text
_DEAREST = 15
_NOISIEST = 5  # in the text
_MEMORY_SHARE, _MEMORY_MB = 0.05, 0.5  # memory is known well enough if half of its interval is within either
_WAY_OUT = "Capture first with readie-pipeline capture."


class Dear(msgspec.Struct, frozen=True):
    """What a distribution, or a single item, costs."""

    name: str
    items: int
    seconds: float
    size_mb: float


class Noise(msgspec.Struct, frozen=True):
    """An item whose time is not known tightly. `interval` is half of its 95 % interval, in seconds."""

    module: str
    seconds: float
    interval: float

    def __str__(self) -> str:
        return f"known to {self.interval:.4f} s only: {self.module}, {self.seconds:.4f} s"


class MemoryNoise(msgspec.Struct, frozen=True):
    """An item whose memory is not known tightly. `interval` is half of the 95 % interval of its median, in MB."""

    module: str
    size_mb: float
    interval: float

    def __str__(self) -> str:
        return f"known to {self.interval:.3f} MB only: {self.module}, {self.size_mb:.3f} MB"


class Proof(msgspec.Struct, frozen=True):
    """How far the plan can be from the best, as its planner proved it. What it did not prove is None."""

    greedy_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None  # cost / bound − 1


class ReportedCheckpoint(msgspec.Struct, frozen=True):
    checkpoint_id: str
    canonical: list[str]
    items: int
    holds: list[Dear]  # its distributions, and its datasets, models and tokenizers, the dearest first
    size_mb: float  # as planned: the sum of its items
    measured_mb: float
    restore_s: list[float]
    requests: int  # how many it is the cheapest option for
    saved_s: float  # seconds that these save together against a cold start

    @property
    def restore_ms(self) -> float:
        return 1e3 * statistics.median(self.restore_s)


class GenerationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every fact of the report, for `--json`, the text and the page. Costs are seconds over the whole corpus."""

    rootfs: str
    generation: str
    flavor: Flavor
    modules: int
    distributions: int
    seconds: float  # of all modules together
    size_mb: float
    dearest_in_time: list[Dear]  # distributions; what they pull in of others is not counted
    dearest_in_memory: list[Dear]
    dearest_imports: list[Dear]  # items with their whole closure; of a distribution the dearest one only
    resources: list[Dear]  # datasets, models and tokenizers, by key
    noise: list[Noise]  # the noisiest first
    memory_noise: list[MemoryNoise]
    failures: list[Failure]
    unmeasured: int
    absent: dict[str, int]  # asked for, and not in the root filesystem → how often
    left_out: dict[str, int]  # distribution that the sandboxes' root filesystem lacks → measured items of it
    checkpoints: list[ReportedCheckpoint]
    cost_without_s: float
    cost_s: float
    proof: Proof
    fit: Fit | None
    drift: float  # measured alpha / planned alpha − 1
    files: dict[str, int]  # name → bytes
    warnings: list[str]
    plan: Plan
    manifest: Manifest


# ---- the facts ----


def read_report(out: Path, flavor: Flavor) -> GenerationReport:
    """The report of what lies in the work folder. Raises `BadFile` where something is missing or does not belong."""
    for name in ("measurements.parquet", "plan.json", "manifest.json", "catalogue.json"):
        if not (out / name).exists():
            raise BadFile(f"{out / name}: no such file", _WAY_OUT)
    measurements = read_measurements(out / "measurements.parquet")
    plan, manifest = read_plan(out / "plan.json"), read_manifest(out / "manifest.json")
    for name, found in (("measurements.parquet", measurements.info.flavor), ("manifest.json", manifest.flavor)):
        if found is not flavor:
            raise BadFile(f"{out / name} is of flavor {found}", f"Use --flavor {found}, or another --out.")
    return report_generation(out, measurements, plan, manifest)


def report_generation(out: Path, measurements: Measurements, plan: Plan, manifest: Manifest) -> GenerationReport:
    """Raises `BadFile` if the plan is not what was captured, or the catalogue not of the manifest's generation."""
    catalogue = load_catalogue(out / "catalogue.json")
    if catalogue.generation != manifest.generation:
        raise BadFile(f"{out}: catalogue.json and manifest.json are of different generations", _WAY_OUT)
    planned = [(one.checkpoint_id, sorted(one.canonical)) for one in plan.checkpoints]
    captured = [(one.checkpoint_id, sorted(catalogue.keys[i] for i in one.canonical)) for one in catalogue.checkpoints]
    if planned != captured:
        raise BadFile(f"{out / 'plan.json'} has been planned again since the capture", _WAY_OUT)

    info = measurements.info
    items = {item.key: item for item in measurements.items}
    packages = [item for item in measurements.items if item.resource_type == "package"]
    by_distribution = _sum_up((item.distribution, item) for item in packages)
    carried = set(catalogue.keys)
    by_id = {one.checkpoint_id: one for one in manifest.checkpoints}
    return GenerationReport(
        rootfs=info.rootfs,
        generation=manifest.generation,
        flavor=manifest.flavor,
        modules=len(packages),
        distributions=len(by_distribution),
        seconds=round(sum(item.seconds for item in packages), 6),
        size_mb=round(sum(item.size_mb for item in packages), 3),
        dearest_in_time=sorted(by_distribution, key=lambda one: (-one.seconds, one.name))[:_DEAREST],
        dearest_in_memory=sorted(by_distribution, key=lambda one: (-one.size_mb, one.name))[:_DEAREST],
        dearest_imports=_dearest_imports(packages),
        resources=_sum_up((item.key, item) for item in measurements.items if item.resource_type != "package"),
        noise=find_noise(measurements),
        memory_noise=find_memory_noise(measurements),
        failures=sorted(info.failures, key=lambda failure: (-failure.asked, failure.module)),
        unmeasured=info.unmeasured,
        absent=_most_first(info.absent),
        left_out=_most_first(Counter(item.distribution for item in packages if item.key not in carried)),
        checkpoints=[
            ReportedCheckpoint(
                checkpoint_id=one.checkpoint_id,
                canonical=sorted(one.canonical),
                items=len(one.items),
                holds=sorted(
                    _sum_up((items[key].distribution or key, items[key]) for key in one.items if key in items),
                    key=lambda dear: (-dear.seconds, dear.name),
                ),
                size_mb=one.size_mb,
                measured_mb=by_id[one.checkpoint_id].measured_mb,
                restore_s=by_id[one.checkpoint_id].restore_s,
                requests=one.requests,
                saved_s=one.saved_s,
            )
            for one in plan.checkpoints
        ],
        cost_without_s=plan.cost_without_ns / NS_PER_SECOND,
        cost_s=plan.cost_ns / NS_PER_SECOND,
        proof=_find_proof(plan),
        fit=fit_line(manifest.points),
        drift=manifest.alpha_measured / manifest.alpha_planned - 1,
        files=_list_files(out),
        warnings=list(dict.fromkeys([*info.warnings, *manifest.warnings, *_compare(measurements, catalogue)])),
        plan=plan,
        manifest=manifest,
    )


def _sum_up(named: Iterable[tuple[str, MeasuredItem]]) -> list[Dear]:
    """One entry for each name, in their order, over its items."""
    groups: dict[str, list[MeasuredItem]] = defaultdict(list)
    for name, item in named:
        groups[name].append(item)
    return [
        Dear(
            name,
            len(groups[name]),
            round(sum(item.seconds for item in groups[name]), 9),
            round(sum(item.size_mb for item in groups[name]), 6),
        )
        for name in sorted(groups)
    ]


def _dearest_imports(packages: Sequence[MeasuredItem]) -> list[Dear]:
    """What importing an item costs with all that it pulls in: the dearest of each distribution, the dearest first."""
    catalogue = catalogue_of(packages)
    closures = compute_closures(catalogue)
    dearest: dict[str, Dear] = {}
    # Items of one component cost the same, so one of each is looked at: the shortest name of those that come first.
    seen: set[tuple[int, str]] = set()
    for item in sorted(range(len(catalogue.keys)), key=lambda i: (catalogue.keys[i].count("."), catalogue.keys[i])):
        name = catalogue.item_distributions[item]
        component = (int(closures.component[item]), name)
        if component in seen:
            continue
        seen.add(component)
        needed = closures.items_of([item])
        seconds = int(catalogue.load_ns[needed].sum()) / NS_PER_SECOND
        if name not in dearest or seconds > dearest[name].seconds:
            size_mb = round(float(catalogue.size_mb[needed].sum()), 6)
            dearest[name] = Dear(catalogue.keys[item], len(needed), seconds, size_mb)
    return sorted(dearest.values(), key=lambda one: (-one.seconds, one.name))[:_DEAREST]


def find_noise(measurements: Measurements) -> list[Noise]:
    """Items whose seconds are not known tightly, the noisiest first. What one process measured tells no interval."""
    tight = Precision()
    halves = [(one, measurements.figures[one.key].seconds_interval) for one in measurements.items]
    noise = [Noise(one.key, one.seconds, half) for one, half in halves if half and not tight.holds(one.seconds, half)]
    return sorted(noise, key=lambda one: (-one.interval, one.module))


def find_memory_noise(measurements: Measurements) -> list[MemoryNoise]:
    """Items whose MB are not known tightly, the noisiest first. What one process measured tells no interval."""
    noise = []
    for one in measurements.items:
        figure = measurements.figures[one.key]
        if figure.size_mb_spread is not None:
            half = Figures(figure.raw_size_mb, figure.size_mb_spread, figure.size_mb_count).interval
            if half > max(_MEMORY_SHARE * one.size_mb, _MEMORY_MB):
                noise.append(MemoryNoise(one.key, one.size_mb, round(half, 6)))
    return sorted(noise, key=lambda one: (-one.interval, one.module))


def _most_first(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def _find_proof(plan: Plan) -> Proof:
    return Proof(
        greedy_s=None if plan.greedy_ns is None else plan.greedy_ns / NS_PER_SECOND,
        bound_s=None if plan.bound_ns is None else plan.bound_ns / NS_PER_SECOND,
        gap=plan.gap,
    )


def _list_files(out: Path) -> dict[str, int]:
    """What the generation consists of, and how many bytes each has."""
    return {
        path.name: sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
        for path in (out / "catalogue.json", out / "catalogue.parquet", out / "manifest.json")
    }


def _compare(measurements: Measurements, catalogue: Catalogue) -> list[str]:
    """A warning if the measurements are not those that the catalogue was written from."""
    written = {key: int(ns) for key, ns in zip(catalogue.keys, catalogue.load_ns, strict=True)}
    measured = catalogue_of(measurements.items)
    ours = {key: int(ns) for key, ns in zip(measured.keys, measured.load_ns, strict=True) if key in written}
    if ours == written:
        return []
    return ["measurements.parquet has changed since the catalogue was written: capture again for one that agrees"]


# ---- text ----


def write_figure(value: float) -> str:
    """A number with the three digits that say something, and a narrow space between thousands."""
    if not value:
        return "0"
    places = min(6, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{places}f}".replace(",", "\u202f")


def write_text(report: GenerationReport) -> str:
    """The report as text, 120 columns at most where names allow."""
    parts = [
        _measured(report),
        _noise(report),
        _left_out(report),
        write_plan_text(report.plan, report.manifest),
        _alpha(report),
        _warned(report.warnings),
    ]
    return "\n".join(line for part in parts if part for line in [*part, ""]).rstrip()


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


def _measured(report: GenerationReport) -> list[str]:
    lines = [
        f"Root filesystem {report.rootfs}",
        (
            f"  {report.modules} modules of {report.distributions} distributions were measured:"
            f" {report.seconds:.2f} s and {report.size_mb:.0f} MB, each module once"
        ),
    ]
    for what, dearest in (("time", report.dearest_in_time), ("memory", report.dearest_in_memory)):
        shown = [f"{one.name} {one.seconds:.2f} s, {one.size_mb:.0f} MB" for one in dearest[:5]]
        lines.append(f"  most expensive in {what}: {'; '.join(shown)}")
    shown = [f"{one.name} {one.seconds:.2f} s, {one.size_mb:.0f} MB" for one in report.dearest_imports[:5]]
    lines.append(f"  dearest imports, with all they pull in: {'; '.join(shown)}")
    if report.resources:
        lines.append(f"  {len(report.resources)} datasets, models and tokenizers:")
        rows = [[f"    {one.name}", f"{one.seconds:.3f} s", f"{one.size_mb:.1f} MB"] for one in report.resources]
        lines += table(rows, right=(1, 2))
    return lines


def _noise(report: GenerationReport) -> list[str]:
    lines = []
    for what, noise in (("time", report.noise), ("memory", report.memory_noise)):
        if noise:
            lines.append(f"  the {what} of {len(noise)} items:")
            lines += [f"    {one}" for one in noise[:_NOISIEST]]
            if len(noise) > _NOISIEST:
                lines.append(f"    and {len(noise) - _NOISIEST} more")
    return ["Not known tightly", *lines] if lines else []


def _left_out(report: GenerationReport) -> list[str]:
    lines = []
    if report.failures:
        lines.append(f"  {len(report.failures)} could not be imported:")
        lines += [f"    {failure.module}: {failure.detail}" for failure in report.failures[:_SHOWN]]
        if len(report.failures) > _SHOWN:
            lines.append(f"    and {len(report.failures) - _SHOWN} more")
    if report.unmeasured:
        lines.append(f"  {report.unmeasured} modules were seen, and not measured in the time that was given")
    if report.left_out:
        names = [f"{name} ({number} items)" for name, number in report.left_out.items()]
        lines.append(f"  measured, and not in the root filesystem of the sandboxes: {_names(names)}")
    if report.absent:
        lines.append(f"  asked for, and not there: {_names(list(report.absent))}")
    return ["Left out", *lines] if lines else []


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
    proof = _find_proof(plan)
    if plan.candidates_kept is not None:
        beyond = (
            f"; {plan.candidates_left_out} that pairs would give were not looked at" if plan.candidates_left_out else ""
        )
        lines.append(f"  {plan.candidates_kept} of {plan.candidates} candidates were left after pruning{beyond}")
    if proof.greedy_s is not None:
        lines.append(
            f"  the greedy plan: {proof.greedy_s:.4f} s, {100 * (proof.greedy_s / cost - 1) if cost else 0:.2f} % more"
        )
    if proof.bound_s is not None and proof.gap is not None:
        lines.append(
            f"  no plan over the candidates is below {proof.bound_s:.4f} s: this one is within {100 * proof.gap:.2f} %"
        )
    if plan.barred:
        names = sorted(plan.barred, key=lambda name: (-plan.barred[name], name))
        lines.append(f"  in no checkpoint, for importing them leaves threads: {_names(names)}")
    if plan.unmatched:
        names = sorted(plan.unmatched, key=lambda name: (-plan.unmatched[name], name))
        lines.append(f"  asked for, and not measured: {_names(names)}")
    return lines


def _alpha(report: GenerationReport) -> list[str]:
    manifest, fit = report.manifest, report.fit
    sizes = [point.size_mb for point in manifest.points]
    lines = [
        (
            f"alpha: planned {manifest.alpha_planned:g}, measured {manifest.alpha_measured:g}, written"
            f" {manifest.alpha_written:g} s/MB; drift {100 * report.drift:+.0f} %"
        ),
        (
            f"  from {len(manifest.points)} points between {min(sizes):.0f} and {max(sizes):.0f} MB"
            f"{f', R² {fit.explained:.2f}' if fit else ''}; before size and imports,"
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
