"""Captures the planned checkpoints, restores and times them, fits alpha, and writes manifest and catalogue."""

import hashlib
import os
import shutil
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from pipeline.analyze import MeasurementInfo, Measurements, check_same_runtime
from pipeline.corpus import ImportSet
from pipeline.measurement import MeasuredItem
from pipeline.plan import Plan, PlannedCheckpoint, make_plan, read_plan, write_plan
from pipeline.problem import Limits
from pipeline.processes import Restored, Sandbox, Saved, describe, run_worker
from pipeline.progress import Progress, stage
from pipeline.rootfs import RootFilesystem, filter_measured, list_rootfs
from readie.command_line import say
from readie.document import Catalogue, DocumentCheckpoint, DocumentItem, compute_generation, write_document
from readie.errors import BadFile, CaptureFailed, RootfsUnreadable
from readie.flavor import Flavor
from readie.manifest import (
    CapturedCheckpoint,
    CheckpointSpec,
    Host,
    Manifest,
    Point,
    read_manifest,
    read_spec,
    write_manifest,
)
from readie.projection import projection_path, write_projection
from readie.resources import FILE as RESOURCES
from readie.resources import hash_resources, read_resources

BALLAST_MB = (0, 100, 400)
RESTORES = 5
ALPHA_FLOOR = 1e-6  # seconds per MB
FITS_FROM = 0.5  # share of the variation in restore times that the line must explain


# ---- alpha ----


@dataclass(frozen=True)
class Fit:
    """The line through (MB, seconds): least squares. `explained` is R², 0 to 1."""

    slope: float
    intercept: float
    explained: float


def fit_line(points: Sequence[Point]) -> Fit | None:
    """None where the points do not have two different sizes."""
    sizes = np.array([point.size_mb for point in points], dtype=np.float64)
    seconds = np.array([point.restore_s for point in points], dtype=np.float64)
    if len(set(sizes.tolist())) < 2:
        return None
    away = sizes - sizes.mean()
    slope = float(away @ seconds / (away @ away))
    intercept = float(seconds.mean() - slope * sizes.mean())
    variation = float(((seconds - seconds.mean()) ** 2).sum())
    residual = float(((seconds - intercept - slope * sizes) ** 2).sum())
    return Fit(slope, intercept, 1.0 - residual / variation if variation > 0 else 1.0)


def choose_alpha(fit: Fit | None, planned: float | None) -> tuple[float, list[str]]:
    """The alpha to write, seconds per MB, and why it is not the measured slope, if it is not.

    A line that does not fit gives the planned alpha; where there is none yet, its slope must do.
    """
    if fit is None:
        alpha = ALPHA_FLOOR if planned is None else planned
        return alpha, [f"alpha could not be fitted, all sizes are the same: {alpha:g} s/MB is used"]
    if fit.slope < ALPHA_FLOOR:
        return ALPHA_FLOOR, [f"the measured alpha is {fit.slope:g} s/MB: the floor of {ALPHA_FLOOR:g} s/MB is used"]
    measured = float(f"{fit.slope:.6g}")
    if fit.explained < FITS_FROM:
        alpha = measured if planned is None else planned
        reason = f"the restore times do not lie on a line (R² {fit.explained:.2f}, measured alpha {measured:g} s/MB)"
        return alpha, [f"{reason}: {alpha:g} s/MB is used"]
    return measured, []


# ---- one checkpoint ----


class Timing(msgspec.Struct, frozen=True):
    """A line of the capture journal: one checkpoint (`spec`), or the cold start (None), captured and timed."""

    host: Host
    purpose: str  # the generation, or calibration
    spec: CheckpointSpec | None
    seconds: list[float]  # of each start, to ready
    measured_mb: float = 0.0


class Captures:
    """What has been captured and timed, a JSON line each as soon as it is done; nothing is done twice."""

    def __init__(self, path: Path, sandbox: Sandbox, host: Host, checkpoint_dir: Path) -> None:
        self.path = path
        self.sandbox = sandbox
        self.host = host
        self.checkpoint_dir = checkpoint_dir
        self.known: dict[tuple[str, CheckpointSpec | None], Timing] = {}
        whole = b""
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            try:
                timing = msgspec.json.decode(line, type=Timing)
            except msgspec.MsgspecError:
                break  # cut short by a kill
            whole += line
            if timing.host == host:
                self.known[timing.purpose, timing.spec] = timing
        if path.exists():
            os.truncate(path, len(whole))  # what a kill cut short; never a moment without what is good

    def _note(self, timing: Timing) -> Timing:
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(timing) + b"\n")
        self.known[timing.purpose, timing.spec] = timing
        return timing

    def time_cold(self, purpose: str) -> Timing:
        """A cold start that imports nothing, five times."""
        known = self.known.get((purpose, None))
        return known or self._note(Timing(self.host, purpose, None, self._restore(["--cold"], "a cold start")))

    def time_ballast(self, purpose: str, size_mb: int, flavor: Flavor) -> Timing:
        """An executor with ballast instead of imports. It is removed once it is timed."""
        spec = CheckpointSpec(
            checkpoint_id=f"ballast_{size_mb}", generation=purpose, flavor=flavor, ballast_mb=float(size_mb)
        )
        known = self.known.get((purpose, spec))
        if known:
            return known
        folder = self.checkpoint_dir / "ballast"
        try:
            return self._note(self._capture(purpose, spec, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def time_checkpoint(self, spec: CheckpointSpec) -> Timing:
        """Captures a checkpoint, unless it is there, and restores it five times. Raises `CaptureFailed`."""
        known = self.known.get((spec.generation, spec))
        if known and self._is_there(spec):
            return known
        return self._note(self._capture(spec.generation, spec, self.checkpoint_dir))

    def _is_there(self, spec: CheckpointSpec) -> bool:
        path = self.checkpoint_dir / spec.generation / spec.checkpoint_id / "checkpoint.json"
        try:
            return read_spec(path) == spec
        except BadFile:
            return False

    def _capture(self, purpose: str, spec: CheckpointSpec, folder: Path) -> Timing:
        what = spec.checkpoint_id + (f" ({', '.join(spec.canonical)})" if spec.canonical else "")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f".{spec.checkpoint_id}.json"
        path.write_bytes(msgspec.json.encode(spec))
        try:
            saved = run_worker(
                [
                    "save",
                    *self.sandbox.arguments(),
                    *("--checkpoint-dir", str(folder), "--spec", str(path), "--json"),
                ],
                Saved,
            )
        finally:
            path.unlink(missing_ok=True)
        if not saved.ok:
            raise CaptureFailed(f"{what}: {saved.failure.detail if saved.failure else 'it was not saved'}")
        arguments = ["--checkpoint-dir", str(folder), "--generation", spec.generation]
        seconds = self._restore([*arguments, "--checkpoint", spec.checkpoint_id], what)
        return Timing(self.host, purpose, spec, seconds, saved.measured_mb)

    def _restore(self, arguments: Sequence[str], what: str) -> list[float]:
        command = ["restore", *self.sandbox.arguments(), *arguments, "--times", str(RESTORES), "--json"]
        restored = run_worker(command, Restored)
        if not restored.ok or not restored.seconds:
            detail = restored.failure.detail if restored.failure else "no answer"
            raise CaptureFailed(f"{what} could not be started: {detail}")
        return restored.seconds


def _point(timing: Timing, name: str, size_mb: float) -> Point:
    return Point(name, size_mb, statistics.median(timing.seconds))


def calibrate(captures: Captures, flavor: Flavor) -> tuple[float, list[str]]:
    """The alpha of three ballast checkpoints, for a first plan."""
    with stage("Calibrating alpha with ballast"):
        sizes = BALLAST_MB
        timings = [captures.time_ballast("calibration", size, flavor) for size in sizes]
    points = [_point(timing, f"ballast_{size}", size) for timing, size in zip(timings, sizes, strict=True)]
    return choose_alpha(fit_line(points), None)


# ---- the plan that is captured ----


@dataclass(frozen=True)
class PlanOptions:
    """What a user asks of a plan. `alpha` None: the last manifest's, else a calibration."""

    planner: str = "optimal"
    limits: Limits = Limits()  # noqa: RUF009 - frozen
    alpha: float | None = None
    sets: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Carried:
    """What of the measurements the root filesystem has."""

    items: list[MeasuredItem]
    distributions: dict[str, str]  # canonical name → version
    warnings: list[str]
    barred: frozenset[str] = frozenset()  # items that no checkpoint can hold


def carry_over(measurements: Measurements, rootfs: Path) -> Carried:
    """The measured items whose distribution the root filesystem has. One that cannot be listed filters nothing."""
    by_key = {item.key: item for item in measurements.items}
    listed: RootFilesystem | None = None
    why_not = ""
    try:
        listed = list_rootfs(rootfs)
    except RootfsUnreadable as error:
        why_not = error.detail
    filtered = filter_measured(by_key, listed, why_not)
    distributions = {item.distribution: "" for item in measurements.items if item.distribution}
    warnings = [*(listed.warnings if listed else ()), *filtered.warnings]
    items = sorted(filtered.items.values(), key=lambda item: item.key)
    # A process with threads cannot be forked; gVisor saves threads as they are.
    barred = frozenset(item.key for item in items if item.threads and measurements.info.host.runtime == "fork")
    return Carried(items, listed.distributions if listed else dict(sorted(distributions.items())), warnings, barred)


def last_alpha(out: Path, flavor: Flavor, runtime: str, cpus: float) -> float | None:
    """The alpha of the last manifest in the folder, if it was measured with this runtime and CPU limit."""
    path = out / "manifest.json"
    if not path.exists():
        return None
    try:
        manifest = read_manifest(path)
    except BadFile as error:
        say(f"  the last alpha is lost: {error.detail}")
        return None
    measured = manifest.flavor, manifest.host.runtime, manifest.host.cpus
    return manifest.alpha_written if measured == (flavor, runtime, cpus) else None


def hash_inputs(measurements: Measurements, corpus: Iterable[ImportSet], carried: Carried, options: PlanOptions) -> str:
    """SHA-256 of everything that a plan depends on, but for an alpha that is not given."""
    content = [
        measurements.sha256,
        sorted([list(one.modules), one.count] for one in corpus),
        carried.distributions,
        options.planner,
        options.limits,
        options.alpha,
        options.sets,
    ]
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()


def alpha_to_plan_with(
    sandbox: Sandbox, info: MeasurementInfo, out: Path, given: float | None
) -> tuple[float, list[str]]:
    """Seconds per MB, and warnings: as given, else of the last manifest in the folder, else of a calibration."""
    alpha = given if given is not None else last_alpha(out, info.flavor, sandbox.runtime, info.host.cpus)
    if alpha is not None:
        return alpha, []
    host = describe(sandbox).host
    captures = Captures(out / "captures.journal.jsonl", sandbox, host, out / "checkpoints")
    return calibrate(captures, info.flavor)


def plan_checkpoints(
    sandbox: Sandbox,
    measurements: Measurements,
    corpus: Sequence[ImportSet],
    out: Path,
    options: PlanOptions,
    *,
    again: bool,
) -> tuple[Plan, Carried]:
    """Plans, and writes `plan.json`. A plan from the same input that is there is taken, unless `again`."""
    carried = carry_over(measurements, sandbox.rootfs)
    inputs = hash_inputs(measurements, corpus, carried, options)
    path = out / "plan.json"
    if not again and path.exists():
        try:
            plan = read_plan(path)
        except BadFile as error:
            say(f"  planned again: {error.detail}")
        else:
            if plan.inputs == inputs:
                return plan, carried
    alpha, more = alpha_to_plan_with(sandbox, measurements.info, out, options.alpha)
    warnings = [*carried.warnings, *more]
    with stage(f"Planning with {options.planner}, alpha {alpha:g} s/MB"):
        plan = make_plan(
            carried.items,
            corpus,
            planner=options.planner,
            alpha=alpha,
            limits=options.limits,
            flavor=measurements.info.flavor,
            sets=options.sets,
            inputs=inputs,
            warnings=warnings,
            barred=carried.barred,
        )
    write_plan(path, plan)
    return plan, carried


# ---- the stage ----


def capture(sandbox: Sandbox, measurements: Measurements, plan: Plan, carried: Carried, out: Path) -> Manifest:
    """Captures and times what is not yet; writes the manifest, `catalogue.json` and `catalogue.parquet/`.

    Raises `CaptureFailed` if a checkpoint cannot be captured as planned: a smaller one is none.
    """
    description = describe(sandbox)
    check_same_runtime(measurements, description)
    generation = compute_generation(
        plan.flavor,
        carried.distributions,
        [(one.checkpoint_id, one.items, one.canonical) for one in plan.checkpoints],
    )
    declared = read_resources(sandbox.rootfs / RESOURCES)
    captures = Captures(out / "captures.journal.jsonl", sandbox, description.host, out / "checkpoints")
    points: list[Point] = []
    captured: list[CapturedCheckpoint] = []
    fixed_s = 0.0
    # The ballast is timed between the checkpoints, so that a machine that slows down bends no line.
    steps: list[tuple[int, PlannedCheckpoint | int]] = [(1000 * n, one) for n, one in enumerate(plan.checkpoints)]
    last = 1000 * len(plan.checkpoints)
    steps += [(last * n // (len(BALLAST_MB) - 1) - 1, size) for n, size in enumerate(BALLAST_MB)]
    with (
        stage(f"Capturing {len(plan.checkpoints)} checkpoints of generation {generation[:12]}"),
        Progress("capturing", len(steps) + 1) as progress,
    ):
        cold = captures.time_cold(generation)
        progress.advance("cold start")
        for _, step in sorted(steps, key=lambda step: step[0]):
            if isinstance(step, int):
                points.append(_point(captures.time_ballast(generation, step, plan.flavor), f"ballast_{step}", step))
                progress.advance(f"ballast of {step} MB")
                continue
            spec = CheckpointSpec(
                checkpoint_id=step.checkpoint_id,
                generation=generation,
                flavor=plan.flavor,
                canonical=tuple(step.canonical),
                resources=hash_resources(declared, step.canonical),
            )
            timing = captures.time_checkpoint(spec)
            points.append(_point(timing, step.checkpoint_id, step.size_mb))
            captured.append(CapturedCheckpoint(step.checkpoint_id, step.size_mb, timing.measured_mb, timing.seconds))
            if not step.items:
                fixed_s = points[-1].restore_s
            progress.advance(step.checkpoint_id)

    fit = fit_line(points)
    alpha, warnings = choose_alpha(fit, plan.alpha)
    manifest = Manifest(
        generation=generation,
        flavor=plan.flavor,
        host=description.host,
        memory_source=description.memory_source,
        alpha_planned=plan.alpha,
        alpha_measured=fit.slope if fit else 0.0,
        alpha_written=alpha,
        points=points,
        restore_fixed_s=fixed_s,
        cold_fixed_s=statistics.median(cold.seconds),
        checkpoints=captured,
        warnings=[*plan.warnings, *warnings],
    )
    write_manifest(out / "checkpoints" / generation / "manifest.json", manifest)
    with stage("Writing the catalogue"):
        catalogue = write_catalogue(out / "catalogue.json", plan, carried, alpha)
    if catalogue.generation != generation:
        raise AssertionError("the catalogue prices another generation than the one captured")
    write_manifest(out / "manifest.json", manifest)
    return manifest


def write_catalogue(path: Path, plan: Plan, carried: Carried, alpha: float) -> Catalogue:
    """The document, and its Parquet projection beside it."""
    catalogue = write_document(
        path,
        flavor=plan.flavor,
        alpha=alpha,
        distributions=carried.distributions,
        items=(
            (
                item.key,
                DocumentItem(
                    load_time=item.seconds,
                    size_mb=item.size_mb,
                    resource_type=item.resource_type,
                    dependencies=sorted(item.dependencies),
                    distribution=item.distribution,
                ),
            )
            for item in carried.items
        ),
        checkpoints=[
            DocumentCheckpoint(one.checkpoint_id, one.items, one.canonical, one.size_mb) for one in plan.checkpoints
        ],
    )
    write_projection(catalogue, projection_path(path))
    return catalogue
