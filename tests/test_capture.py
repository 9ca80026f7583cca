"""DESIGN §9, capture: alpha's fit, checkpoints captured whole, manifest and catalogue."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.analyze import Measurements, analyze
from pipeline.capture import (
    ALPHA_FLOOR,
    BALLAST_MB,
    Carried,
    Fit,
    PlanOptions,
    capture,
    carry_over,
    choose_alpha,
    fit_line,
    last_alpha,
    plan_checkpoints,
)
from pipeline.plan import Plan
from pipeline.problem import Limits
from readie.closure import compute_closures
from readie.document import read_document
from readie.errors import BadRequest, CaptureFailed
from readie.flavor import Flavor
from readie.manifest import Description, Manifest, Point, read_manifest
from readie.projection import read_projection
from tests.tiny import asks, make_rootfs, sandbox_of, site_of

BUSY = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); time.sleep(0.3)"
PACKAGES = {
    "busy": {"busy.py": BUSY},
    "ground": {"ground/__init__.py": "blob = bytearray(10_000_000)\nimport time; time.sleep(0.03)\n"},
    "tower": {"tower/__init__.py": "import ground\nblob = bytearray(30_000_000)\nimport time; time.sleep(0.06)\n"},
    "apart": {"apart/__init__.py": "", "apart/part.py": "import time; time.sleep(0.04)\n"},
}
CORPUS = [
    asks("tower", "ground", count=2),
    asks("ground"),
    asks("apart.part.function"),
    asks("ground", "busy", count=9),
]


def points(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(f"p{number}", size, seconds) for number, (size, seconds) in enumerate(pairs)]


class TestAlpha:
    """Alpha is the slope of the line through (MB, median seconds of the restore), by least squares."""

    @pytest.mark.parametrize(
        ("pairs", "slope", "intercept", "explained"),
        [
            (((0, 0.25), (100, 0.75)), 0.005, 0.25, 1.0),
            (((0, 1.0), (1, 2.0), (2, 4.0)), 1.5, 5 / 6, 27 / 28),
            (((0, 1.0), (10, 1.0)), 0.0, 1.0, 1.0),
            (((0, 2.0), (10, 1.0)), -0.1, 2.0, 1.0),
        ],
    )
    def test_the_line_is_the_one_of_least_squares(
        self, pairs: Sequence[tuple[float, float]], slope: float, intercept: float, explained: float
    ) -> None:
        """With the share of the variation that it explains."""
        fit = fit_line(points(*pairs))

        assert fit is not None
        assert (fit.slope, fit.intercept, fit.explained) == pytest.approx((slope, intercept, explained))

    @pytest.mark.parametrize("pairs", [(), ((5, 1.0),), ((5, 1.0), (5, 2.0))])
    def test_one_size_gives_no_line(self, pairs: Sequence[tuple[float, float]]) -> None:
        """There is nothing to divide by."""
        assert fit_line(points(*pairs)) is None

    @settings(max_examples=25)
    @given(
        st.floats(1e-5, 0.1),
        st.floats(0, 1),
        st.lists(st.floats(0, 1000), min_size=2, unique_by=int),
    )
    def test_points_on_a_line_give_that_line(self, slope: float, fixed: float, sizes: list[float]) -> None:
        """Whatever the line is."""
        fit = fit_line(points(*((size, fixed + slope * size) for size in sizes)))

        assert fit is not None
        assert fit.slope == pytest.approx(slope, rel=1e-6, abs=1e-9)

    @pytest.mark.parametrize(
        ("fit", "planned", "written", "told"),
        [
            (Fit(0.00123456789, 0.1, 0.9), 0.5, 0.00123457, None),
            (Fit(2e-6, 0.1, 0.5), 0.5, 2e-6, None),
            (Fit(9e-7, 0.1, 1.0), 0.5, ALPHA_FLOOR, "floor"),
            (Fit(-0.5, 0.1, 1.0), 0.5, ALPHA_FLOOR, "floor"),
            (Fit(0.25, 0.1, 0.4), 0.5, 0.5, "do not lie on a line"),
            (Fit(0.25, 0.1, 0.4), None, 0.25, "do not lie on a line"),
            (None, 0.5, 0.5, "all sizes are the same"),
            (None, None, ALPHA_FLOOR, "all sizes are the same"),
        ],
    )
    def test_what_is_written_is_the_slope_the_floor_or_the_planned_one(
        self, fit: Fit | None, planned: float | None, written: float, told: str | None
    ) -> None:
        """Anything but the slope comes with a warning."""
        alpha, warnings = choose_alpha(fit, planned)

        assert alpha == written
        assert [told in warning for warning in warnings if told] == ([True] if told else [])
        assert bool(warnings) is bool(told)


# ---- a real generation ----


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rootfs(tmp_path_factory.mktemp("capture") / "rootfs", PACKAGES)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def measurements(rootfs: Path, out: Path) -> Measurements:
    return analyze(sandbox_of(rootfs), CORPUS, out, flavor=Flavor.CPU, repeats=1)


@pytest.fixture(scope="module")
def planned(rootfs: Path, out: Path, measurements: Measurements) -> tuple[Plan, Carried]:
    options = PlanOptions(limits=Limits(max_checkpoints=2))
    return plan_checkpoints(sandbox_of(rootfs), measurements, CORPUS, out, options, again=False)


@pytest.fixture(scope="module")
def captured(rootfs: Path, out: Path, measurements: Measurements, planned: tuple[Plan, Carried]) -> Manifest:
    return capture(sandbox_of(rootfs), measurements, *planned, out)


class TestGeneration:
    """What capture writes belongs together, and can be read by the others."""

    def test_the_plan_calibrates_alpha_where_nothing_is_known(self, planned: tuple[Plan, Carried]) -> None:
        """With ballast, before anything was captured."""
        assert planned[0].alpha >= ALPHA_FLOOR

    def test_the_catalogue_prices_the_generation_of_the_manifest(self, out: Path, captured: Manifest) -> None:
        """And carries the alpha that the manifest says was written."""
        catalogue = read_document(out / "catalogue.json")

        assert catalogue.generation == captured.generation
        assert catalogue.alpha == captured.alpha_written
        assert catalogue.warnings == ()
        assert catalogue.distributions == {"apart": "1.0", "busy": "1.0", "ground": "1.0", "tower": "1.0"}

    def test_what_leaves_threads_is_in_no_checkpoint(self, planned: tuple[Plan, Carried]) -> None:
        """`busy` is asked for most: its capture would fail. gVisor could save it."""
        plan, carried = planned

        assert plan.barred == {"busy": 9}
        assert carried.barred == {"busy"}
        assert not any("busy" in one.items for one in plan.checkpoints)

    def test_the_checkpoints_hold_what_their_canonical_items_load(self, out: Path, captured: Manifest) -> None:
        """Importing `tower` loads `ground` too, which somebody asks for."""
        catalogue = read_document(out / "catalogue.json")
        closures = compute_closures(catalogue)
        named = [
            ([catalogue.keys[i] for i in one.items], [catalogue.keys[i] for i in one.canonical])
            for one in catalogue.checkpoints
        ]

        assert named[0] == ([], [])
        assert (["ground", "tower"], ["ground", "tower"]) in named
        for one in catalogue.checkpoints[1:]:
            assert closures.items_of(one.canonical).tolist() == one.items.tolist()

    def test_the_projection_belongs_to_the_document(self, out: Path, captured: Manifest) -> None:
        """It is read under the document's hash."""
        catalogue = read_document(out / "catalogue.json")

        assert read_projection(out / "catalogue.parquet", catalogue.sha256).keys == catalogue.keys

    def test_the_manifest_lies_with_the_checkpoints_and_on_top(self, out: Path, captured: Manifest) -> None:
        """Each checkpoint has its folder beside it."""
        folder = out / "checkpoints" / captured.generation

        assert read_manifest(folder / "manifest.json") == read_manifest(out / "manifest.json") == captured
        assert {path.name for path in folder.iterdir()} == {
            "manifest.json",
            *(one.checkpoint_id for one in captured.checkpoints),
        }

    def test_alpha_is_fitted_over_checkpoints_and_ballast(self, captured: Manifest) -> None:
        """Five restores of each, their median in a point; no ballast is left."""
        names = {point.name for point in captured.points}

        assert names == {one.checkpoint_id for one in captured.checkpoints} | {f"ballast_{size}" for size in BALLAST_MB}
        assert all(len(one.restore_s) == 5 for one in captured.checkpoints)
        assert captured.cold_fixed_s > 0
        assert captured.restore_fixed_s > 0

    def test_what_was_measured_is_what_was_captured(self, captured: Manifest) -> None:
        """The captured process is as large as its items say."""
        largest = max(captured.checkpoints, key=lambda one: one.size_mb)

        assert largest.size_mb == pytest.approx(40, abs=2)
        assert largest.measured_mb == pytest.approx(largest.size_mb, abs=3)

    def test_captured_again_nothing_is_done_again(
        self, rootfs: Path, out: Path, measurements: Measurements, planned: tuple[Plan, Carried], captured: Manifest
    ) -> None:
        """The same manifest and catalogue, byte for byte; no line is added to the journal."""
        files = ["catalogue.json", "manifest.json", "captures.journal.jsonl"]
        before = [(out / name).read_bytes() for name in files]
        again = capture(sandbox_of(rootfs), measurements, *planned, out)

        assert again.generation == captured.generation
        assert [(out / name).read_bytes() for name in files] == before

    def test_a_checkpoint_that_is_gone_is_captured_again(
        self, rootfs: Path, out: Path, measurements: Measurements, planned: tuple[Plan, Carried], captured: Manifest
    ) -> None:
        """That one only."""
        folder = out / "checkpoints" / captured.generation / "checkpoint_1"
        shutil.rmtree(folder)
        lines = len((out / "captures.journal.jsonl").read_bytes().splitlines())
        capture(sandbox_of(rootfs), measurements, *planned, out)

        assert (folder / "checkpoint.json").exists()
        assert len((out / "captures.journal.jsonl").read_bytes().splitlines()) == lines + 1

    @pytest.mark.usefixtures("captured")
    def test_the_next_plan_takes_the_last_manifests_alpha(self, out: Path) -> None:
        """Of this flavor, runtime and CPU limit."""
        assert last_alpha(out, Flavor.CPU, "fork", 0.0) == read_manifest(out / "manifest.json").alpha_written
        assert last_alpha(out, Flavor.GPU, "fork", 0.0) is None
        assert last_alpha(out, Flavor.CPU, "runsc", 0.0) is None
        assert last_alpha(out, Flavor.CPU, "fork", 0.5) is None

    @pytest.mark.usefixtures("captured")
    def test_a_plan_of_the_same_input_is_taken(
        self, rootfs: Path, out: Path, measurements: Measurements, planned: tuple[Plan, Carried]
    ) -> None:
        """Although alpha has been measured since; another limit plans again."""
        sandbox, options = sandbox_of(rootfs), PlanOptions(limits=Limits(max_checkpoints=2))
        same, _ = plan_checkpoints(sandbox, measurements, CORPUS, out, options, again=False)
        other_folder = out.with_name("other")
        shutil.copytree(out, other_folder)
        options = PlanOptions(limits=Limits(max_checkpoints=1))
        other, _ = plan_checkpoints(sandbox, measurements, CORPUS, other_folder, options, again=False)

        assert same == planned[0]
        assert len(other.checkpoints) == 1
        assert other.alpha == read_manifest(out / "manifest.json").alpha_written


class TestRefusals:
    """What cannot be captured as planned is not captured at all."""

    @pytest.mark.usefixtures("captured")
    def test_a_canonical_import_that_fails_is_a_failed_capture(
        self, tmp_path: Path, out: Path, measurements: Measurements, planned: tuple[Plan, Carried]
    ) -> None:
        """The error names the checkpoint and the module; no catalogue is written."""
        rootfs = make_rootfs(tmp_path / "rootfs", PACKAGES)
        (site_of(rootfs) / "tower" / "__init__.py").write_text("raise RuntimeError('not today')\n")
        # All but that checkpoint is there already, which keeps the test short.
        shutil.copy(out / "captures.journal.jsonl", tmp_path)
        shutil.copytree(out / "checkpoints", tmp_path / "checkpoints", ignore=lambda _, __: {"checkpoint_1"})
        with pytest.raises(CaptureFailed, match=r"tower.*not today") as raised:
            capture(sandbox_of(rootfs), measurements, *planned, tmp_path)

        assert "checkpoint_" in raised.value.detail
        assert not (tmp_path / "catalogue.json").exists()
        assert not (tmp_path / "manifest.json").exists()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"runtime": "runsc"}, "with runtime runsc"),
            ({"python": "3.4.1"}, r"with Python 3\.4"),
            ({"cpus": 0.5}, r"with SANDBOX_CPUS 0\.5"),
        ],
    )
    def test_measurements_of_another_runtime_are_refused(
        self,
        rootfs: Path,
        tmp_path: Path,
        measurements: Measurements,
        planned: tuple[Plan, Carried],
        *,
        change: dict[str, Any],
        message: str,
    ) -> None:
        """Load times and alpha are added up, so both come from one runtime, with one limit."""
        host = msgspec.structs.replace(measurements.info.host, **change)
        info = msgspec.structs.replace(measurements.info, host=host)
        with pytest.raises(BadRequest, match=message):
            capture(sandbox_of(rootfs), Measurements(info, measurements.items, {}), *planned, tmp_path)


class TestAnotherRootFilesystem:
    """Only what the root filesystem of the sandboxes has is carried over."""

    def test_a_distribution_that_it_lacks_is_left_out_with_a_warning(
        self, tmp_path: Path, measurements: Measurements
    ) -> None:
        """With its items; the others stay."""
        rootfs = make_rootfs(tmp_path / "rootfs", {name: PACKAGES[name] for name in ("ground", "tower")})
        carried = carry_over(measurements, rootfs)

        assert [item.key for item in carried.items] == ["ground", "tower"]
        assert carried.distributions == {"ground": "1.0", "tower": "1.0"}
        assert any("apart" in warning for warning in carried.warnings)
        assert carried.barred == frozenset()

    def test_only_fork_cannot_capture_threads(self, rootfs: Path, measurements: Measurements) -> None:
        """The same measurements, had they been made in gVisor."""
        host = msgspec.structs.replace(measurements.info.host, runtime="runsc")
        info = msgspec.structs.replace(measurements.info, host=host)

        assert carry_over(measurements, rootfs).barred == {"busy"}
        assert carry_over(replace(measurements, info=info), rootfs).barred == frozenset()

    def test_one_that_cannot_be_listed_filters_nothing(self, tmp_path: Path, measurements: Measurements) -> None:
        """And a warning says so."""
        carried = carry_over(measurements, tmp_path)

        assert carried.items == measurements.items
        assert any("nothing was filtered" in warning for warning in carried.warnings)


def test_a_description_reads_a_workers_answer() -> None:
    """What `readie-worker describe` prints is what the pipeline reads; more keys do no harm."""
    text = (
        '{"host": {"runtime": "fork", "runtime_version": "1", "python": "3.11.7", "protocol": 1, "fingerprint": "f",'
        ' "rootfs_digest": "d", "cpu_features": "c"}, "markers": {}, "preload": ["json"], "memory_source": "RssAnon",'
        ' "new": 1}'
    )

    assert msgspec.json.decode(text, type=Description).preload == ["json"]
