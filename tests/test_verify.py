"""`verify`: predictions are held to fresh imports, and each outlier says why it is one."""

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.analyze import Figure, MeasurementInfo, Measurements, Node, Run
from pipeline.measurement import MeasuredItem
from pipeline.processes import Mode, ProbeFailure
from pipeline.verify import (
    FROM_S,
    OUTLIER_S,
    Errors,
    Level,
    Needed,
    Outlier,
    Sample,
    Verification,
    bring_to_pace,
    choose_panel,
    choose_samples,
    describe_difference,
    find_errors,
    is_outlier,
    list_needs,
    verify,
    write_verification,
)
from readie.errors import BadRequest
from readie.flavor import Flavor
from readie.manifest import Host
from tests.tiny import asks, make_rootfs, sandbox_of

PACKAGES = {
    "ground": {"ground/__init__.py": "blob = bytearray(30_000_000)\nimport time; time.sleep(0.03)\n"},
    "tower": {"tower/__init__.py": "import ground\nimport time; time.sleep(0.03)\n"},
    "steady": {"steady.py": "import time; time.sleep(0.05)\n"},
    "broken": {"broken.py": "raise RuntimeError('not today')\n"},
    # Each import takes 50 ms longer than the one before.
    "shaky": {
        "shaky.py": """
            import os, pathlib, time
            count = pathlib.Path(os.environ["XDG_CACHE_HOME"], "count")
            with count.open("ab") as file: file.write(b".")
            time.sleep(0.05 * count.stat().st_size)
        """
    },
}
HOST = Host("fork", "1", platform.python_version(), 1, "f" * 64, "d" * 64, "c" * 64)


def item(key: str, seconds: float, size_mb: float = 0.0, *needs: str) -> MeasuredItem:
    return MeasuredItem(
        key=key,
        seconds=seconds,
        size_mb=size_mb,
        resource_type="package",
        distribution=key.partition(".")[0],
        dependencies=frozenset(needs),
    )


def measurements_of(*items: MeasuredItem) -> Measurements:
    info = MeasurementInfo(
        flavor=Flavor.CPU, host=HOST, memory_source="RssAnon", rootfs="/rootfs", repeats=3, roots=len(items)
    )
    return Measurements(info, list(items), {one.key: Figure(0.0, 3, one.size_mb, 0.0, 1) for one in items})


def keys_and_needs(*items: MeasuredItem) -> tuple[list[str], Callable[[Sequence[str]], Needed]]:
    return sorted(one.key for one in items), list_needs(measurements_of(*items))


#: All but those of `steady` are wrong.
WRONG = measurements_of(item("ground", 0.3, 30.0), item("tower", 0.030), item("steady", 0.050), item("broken", 0.01))


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rootfs(tmp_path_factory.mktemp("verify") / "rootfs", PACKAGES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verified")


@pytest.fixture(scope="module")
def verified(rootfs: Path, folder: Path) -> Verification:
    """Wrong measurements, held to what imports take."""
    return verify(sandbox_of(rootfs), WRONG, [], folder, count=4, seed=5, repeats=1, most_repeats=1)


class TestReality:
    """What is imported for real, against made-up measurements."""

    def test_a_prediction_that_holds_is_no_outlier(self, verified: Verification) -> None:
        """A sleep of 50 ms takes that, whatever else the machine does."""
        steady = next(one for one in verified.checked if one.modules == ("steady",))

        assert steady.predicted_s == 0.05
        assert steady.clock_s >= 0.05
        assert ("steady",) not in {one.modules for one in verified.outliers if one.unit == "MB"}

    def test_a_figure_that_is_wrong_is_named(self, verified: Verification) -> None:
        """With what it is and what it was said to be."""
        reason = next(one.reason for one in verified.outliers if one.modules == ("ground",) and one.unit == "s")

        assert "ground itself took" in reason
        assert "instead of 0.3" in reason

    def test_a_module_that_was_not_predicted_is_named(self, verified: Verification) -> None:
        """In time and in memory."""
        reasons = {one.unit: one.reason for one in verified.outliers if one.modules == ("tower",)}

        assert set(reasons) == {"s", "MB"}
        assert all("it loads ground (" in reason for reason in reasons.values())
        assert all("which was not predicted" in reason for reason in reasons.values())

    def test_an_import_that_fails_is_told_apart(self, verified: Verification) -> None:
        """It says how, and is in no figure."""
        assert [one.modules for one in verified.failed] == [("broken",)]
        assert "not today" in verified.failed[0].failure
        assert ("broken",) not in {one.modules for one in verified.checked}

    def test_memory_is_compared_in_mb(self, verified: Verification) -> None:
        """30 MB were predicted for ground, and it takes them."""
        ground = next(one for one in verified.checked if one.modules == ("ground",))

        assert ground.measured_mb == pytest.approx(30.0, abs=0.5)

    def test_the_text_has_a_line_for_each_outlier_and_failure(self, verified: Verification) -> None:
        """For people, who have no use for the rest."""
        lines = write_verification(verified)

        assert sum(line.startswith("  outlier: ") for line in lines) == len(verified.outliers) >= 3
        assert lines[-1].startswith("  failed: broken: import broken: RuntimeError: not today")


def test_measurements_of_another_cpu_limit_are_refused(rootfs: Path, tmp_path: Path) -> None:
    """Nothing is imported: what a process may use would be taken for an error of the prediction."""
    info = msgspec.structs.replace(WRONG.info, host=msgspec.structs.replace(HOST, cpus=0.5))
    with pytest.raises(BadRequest, match=r"with SANDBOX_CPUS 0\.5"):
        verify(sandbox_of(rootfs), Measurements(info, WRONG.items, WRONG.figures), [], tmp_path, count=1, seed=1)

    assert list(tmp_path.iterdir()) == []


class TestFailures:
    """An import that sometimes fails is told apart from one that met a limit."""

    GOOD = Run("plain", ("m",), 0.1, 0.1, [])

    @staticmethod
    def ended(kind: str) -> Run:
        return Run("plain", ("m",), 0.1, 0.1, [], failure=ProbeFailure(kind, f"it was {kind}"))

    @pytest.mark.parametrize("kind", ["raised", "signal", "exit"])
    def test_one_that_failed_once_has_failed(self, kind: str) -> None:
        """Successes of other processes do not hide it, and it is tried no more."""
        sample = Sample(("m",), {}, [self.GOOD], [self.ended("timeout"), self.ended(kind)])

        assert (sample.is_broken, sample.failure) == (True, f"it was {kind}")

    @pytest.mark.parametrize("kind", ["timeout", "memory", "no-result"])
    def test_a_limit_counts_only_where_it_is_met_every_time(self, kind: str) -> None:
        """It is tried again until then."""
        always = Sample(("m",), {}, [], [self.ended(kind)])
        once = Sample(("m",), {}, [self.GOOD], [self.ended(kind)])

        assert (always.is_broken, always.failure) == (False, f"it was {kind}")
        assert (once.is_broken, once.failure) == (False, "")


class TestChoosing:
    """Random modules and random import sets; the seed is the caller's."""

    ITEMS = tuple(item(f"m{number}", 0.001 * number) for number in range(30))

    def test_the_same_seed_chooses_the_same(self) -> None:
        """And another seed another sample."""
        keys, needs = keys_and_needs(*self.ITEMS)
        corpus = [asks(f"m{number}", f"m{number + 1}") for number in range(20)]
        samples = {
            seed: [sample.modules for sample in choose_samples(keys, needs, corpus, 5, seed % 10)]
            for seed in (1, 11, 2)
        }

        assert samples[1] == samples[11]
        assert samples[1] != samples[2]
        assert [len(modules) for modules in samples[1]] == [1] * 5 + [2] * 5

    def test_names_stand_for_their_longest_measured_prefix(self) -> None:
        """A set of which nothing is measured is none; two that mean the same are one."""
        keys, needs = keys_and_needs(item("a", 0.5, 1.0), item("a.b", 0.25, 2.0, "c"), item("c", 0.125, 4.0))
        corpus = [asks("a.b.Class", "c"), asks("a.b.function", "nowhere", "c"), asks("elsewhere")]
        sets = choose_samples(keys, needs, corpus, 9, 0)[3:]

        assert [sample.modules for sample in sets] == [("a.b", "c")]
        assert sets[0].needed == {"a": (0.5, 1.0), "a.b": (0.25, 2.0), "c": (0.125, 4.0)}

    def test_a_set_that_is_one_of_the_items_is_not_there_twice(self) -> None:
        """Its processes are in the journal by what they import."""
        keys, needs = keys_and_needs(item("a", 0.5), item("b", 0.5))

        chosen = [sample.modules for sample in choose_samples(keys, needs, [asks("a"), asks("a", "b")], 9, 0)]
        assert sorted(chosen) == [("a",), ("a", "b"), ("b",)]


class TestPanel:
    """Other imports, made in between, tell today's pace."""

    def test_it_has_no_import_of_the_sample(self) -> None:
        """Items and import sets as there, but others; short ones tell little, and are left out."""
        items = [item(f"m{number}", 0.03) for number in range(8)] + [
            item(f"short{number}", 0.01) for number in range(8)
        ]
        keys, needs = keys_and_needs(*items)
        corpus = [asks("m0", "m1"), asks("m2", "short1"), asks("short1", "short2", "short3"), asks("short1")]
        samples = [Sample((name,), needs([name])) for name in ("m0", "m1", "m2")]
        panel = choose_panel(keys, needs, corpus, samples, seed=1)

        singles = {("m3",), ("m4",), ("m5",), ("m6",), ("m7",)}
        sets = {("m0", "m1"), ("m2", "short1"), ("short1", "short2", "short3")}
        assert {one.modules for one in panel} == singles | sets

    def test_two_imports_are_none(self) -> None:
        """They say too little."""
        keys, needs = keys_and_needs(item("m1", 0.03), item("m2", 0.03), item("m3", 0.03))

        assert len(choose_panel(keys, needs, [], [], seed=1)) == 3
        assert choose_panel(keys, needs, [], [Sample(("m1",), {})], seed=1) == []


def measured(
    name: str, predicted: float, times: Sequence[float], told: Sequence[float], mode: Mode = "plain"
) -> Sample:
    """An import of one module that took `times`, by processes that told the paces `told`."""
    runs = [
        Run(mode, (name,), time, time, [Node(name, stdlib=False, value=time)], pace_s=[pace])
        for time, pace in zip(times, told, strict=True)
    ]
    return Sample((name,), {name: (predicted, 0.0)}, runs)


class TestPace:
    """Times of now are brought to the pace of the measurements."""

    TOLD = (0.012, 0.014, 0.010)

    def test_what_processes_tell_and_what_the_panel_shows_is_taken_out(self) -> None:
        """Here a process that tells 12 ms is 1.2 times as slow, and everything takes a half more than that besides."""
        times = [0.1 * 1.5 * told / 0.010 for told in self.TOLD]
        panel = [measured(f"p{number}", 0.1, times, self.TOLD, "time") for number in range(3)]
        sample = measured("a", 0.1, times, self.TOLD)
        trust, level = bring_to_pace([sample], panel, 0.010)

        assert trust == pytest.approx(1.0)
        assert level is not None
        assert (level.imports, level.ratio) == ([("p0",), ("p1",), ("p2",)], 1.5)
        assert sample.times == pytest.approx([0.1] * 3)

    def test_a_panel_that_is_no_slower_changes_nothing(self) -> None:
        """A sample that takes twice what was predicted is wrong, whatever the panel."""
        panel = [measured(f"p{number}", 0.1, [0.1] * 3, [0.010] * 3, "time") for number in range(3)]
        sample = measured("a", 0.1, [0.2] * 3, [0.010] * 3)
        bring_to_pace([sample], panel, 0.010)

        assert sample.times == pytest.approx([0.2] * 3)

    def test_without_a_panel_it_is_what_processes_tell(self) -> None:
        """And without a pace of the measurements, the clock."""
        sample = measured("a", 0.1, [0.2] * 3, [0.020] * 3)

        assert bring_to_pace([sample], [], 0.010) == (1.0, None)
        assert sample.times == pytest.approx([0.1] * 3)
        assert bring_to_pace([sample], [], None) == (1.0, None)
        assert sample.times == pytest.approx([0.2] * 3)

    @pytest.mark.parametrize(
        ("times", "tight"),
        [((0.100, 0.101, 0.102), True), ((0.100, 0.120, 0.140), False), ((0.001, 0.0012, 0.0014), True)],
    )
    def test_an_import_is_tight_within_three_per_cent_or_half_a_millisecond(
        self, times: tuple[float, ...], tight: bool
    ) -> None:
        """Of its mean's standard error."""
        sample = measured("a", 0.1, times, [0.010] * 3)
        bring_to_pace([sample], [], 0.010)

        assert sample.is_tight() is tight


class TestRepeating:
    """Each import is made until it is known well enough; what was made is in a journal, one for each seed."""

    def test_what_is_not_tight_is_repeated_up_to_the_cap(self, rootfs: Path, tmp_path: Path) -> None:
        """A module that takes longer each time never is."""
        shaky = measurements_of(item("shaky", 0.13))
        result = verify(sandbox_of(rootfs), shaky, [], tmp_path, count=1, seed=5, repeats=2, most_repeats=4)
        (one,) = result.checked

        assert (one.repeats, one.tight) == (4, False)
        assert one.interval_s is not None
        assert one.interval_s > 2 * 0.03 * one.measured_s
        assert "  1 are not known to 3 %: --max-repeats allows more processes for each" in write_verification(result)

    def test_what_was_measured_is_not_measured_again(self, rootfs: Path, folder: Path, verified: Verification) -> None:
        """With the same seed; but for the process whose line a kill cut short."""
        journal = folder / "verify-5.journal.jsonl"
        before = journal.read_bytes()
        again = verify(sandbox_of(rootfs), WRONG, [], folder, count=4, seed=5, repeats=1, most_repeats=1)

        assert (again, journal.read_bytes()) == (verified, before)
        journal.write_bytes(before[:-10])
        verify(sandbox_of(rootfs), WRONG, [], folder, count=4, seed=5, repeats=1, most_repeats=1)
        after = journal.read_bytes()
        assert after.splitlines()[:-1] == before.splitlines()[:-1]
        assert len(after.splitlines()) == len(before.splitlines())


class TestErrors:
    """Relative where it is large, absolute below."""

    def test_the_right_values(self) -> None:
        """Ten large ones off by 1 to 10 %, two small ones off by 1 and 2 ms."""
        pairs = [(0.1 * (1 + percent / 100), 0.1) for percent in range(1, 11)] + [(0.011, 0.010), (0.008, 0.010)]
        errors = find_errors(pairs, FROM_S)

        assert (errors.large, errors.small) == (10, 2)
        assert errors.median == pytest.approx(0.055)
        assert errors.p90 == pytest.approx(0.091)
        assert errors.small_worst == pytest.approx(0.002)
        assert errors.bias == pytest.approx(0.055)

    def test_the_bias_has_a_sign(self) -> None:
        """Errors to both sides are none together."""
        assert find_errors([(0.9, 1.0), (1.0, 1.0), (1.2, 1.0)], FROM_S).bias == 0.0
        assert find_errors([(0.9, 1.0)], FROM_S).bias == pytest.approx(-0.1)

    def test_nothing_gives_no_figure(self) -> None:
        """Neither large nor small ones."""
        assert find_errors([], FROM_S) == Errors(0, None, None, 0, None, None)

    @given(measured=st.floats(0.0, 10.0), share=st.floats(-0.9, 0.9))
    def test_an_outlier_is_what_is_off_by_more_than_its_bound(self, measured: float, share: float) -> None:
        """15 % of a large one, 3 ms of a small one."""
        predicted = measured * (1 + share)
        bound = 0.15 * measured if measured >= FROM_S else OUTLIER_S

        assert is_outlier(predicted, measured, FROM_S, OUTLIER_S) == (abs(predicted - measured) > bound)


class TestReasons:
    """In what an import differs most from its prediction."""

    @pytest.mark.parametrize(
        ("took", "predicted", "reason"),
        [
            ({"a": 1.0}, {"a": 1.0}, "no single module differs by 0.1 s"),
            ({"a": 1.0, "b": 0.5}, {"a": 1.0}, "it loads b (0.5 s), which was not predicted"),
            ({"a": 1.0}, {"a": 1.0, "b": 0.5}, "it does not load b (0.5 s), which was predicted"),
            ({"a": 1.0}, {"a": 0.25}, "a itself took 1 s instead of 0.25"),
            (
                {"a": 1.0, "b": 0.5, "c": 2.0, "d": 0.25},
                {"a": 0.5},
                "it loads c, b and 1 more (2.75 s), which was not predicted; a itself took 1 s instead of 0.5",
            ),
            ({"a": 1.0, "b": 0.05}, {"a": 1.04}, "no single module differs by 0.1 s"),
        ],
    )
    def test_the_largest_difference_comes_first(
        self, took: dict[str, float], predicted: dict[str, float], reason: str
    ) -> None:
        """Modules that came as a surprise, that stayed away, and that cost something else."""
        assert describe_difference(took, predicted, "s", 0.1) == reason


def test_the_pace_of_the_machine_is_told() -> None:
    """Against that of the measurements, if these have one: by what processes told, and by the panel besides."""
    none = Errors(0, None, None, 0, None)
    told = Verification(
        3,
        [],
        [],
        none,
        none,
        none,
        1.25,
        0.5,
        [Outlier(("a",), "s", 1.0, 2.0, "so it is")],
        level=Level([("b",), ("c",), ("d", "e")], 1.0625, 0.025),
    )

    pace = "  the machine is 1.25 times as slow as when it was left alone while measuring, and others had the processor"
    panel = "  3 other imports in between took 1.062 times what was measured"
    assert write_verification(told) == [
        "0 imports checked, seed 3",
        f"{pace} for 50 % of the time: both are taken out",
        f"{panel}, at the pace that they told, known to 2.5 %: that is taken out too",
        "  outlier: a: predicted 1.000 s, measured 2.000 s: so it is",
    ]
