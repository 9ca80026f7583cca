"""DESIGN §9: the report of a generation, as text and as a page that works offline."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from pipeline.analyze import Failure, MeasurementInfo, Measurements, write_measurements
from pipeline.analyze import Figure as Known
from pipeline.capture import Carried, write_catalogue
from pipeline.measurement import MeasuredItem, ResourceType
from pipeline.plan import Plan, make_plan, write_plan
from pipeline.problem import Limits
from pipeline.report import GenerationReport, read_report, report_generation, write_figure, write_text
from pipeline.report_page import save_page, write_page
from readie.errors import BadFile
from readie.flavor import Flavor
from readie.manifest import CapturedCheckpoint, Host, Manifest, Point, write_manifest
from tests.tiny import asks

MADE_AT = datetime(2030, 1, 2, 3, 4, tzinfo=UTC)
NASTY = "<script>alert(1)</script>"
HOST = Host("fork", "1", "3.11.7", 1, "f" * 64, "d" * 64, "c" * 64)


def item(
    key: str,
    seconds: float,
    size_mb: float,
    *needs: str,
    distribution: str | None = None,
    resource_type: ResourceType = "package",
) -> MeasuredItem:
    owner = key.partition(".")[0] if resource_type == "package" else ""
    return MeasuredItem(
        key=key,
        seconds=seconds,
        size_mb=size_mb,
        resource_type=resource_type,
        distribution=owner if distribution is None else distribution,
        dependencies=frozenset(needs),
    )


ITEMS = [
    item("ground", 0.2, 7.0),
    item("ground.deep", 0.05, 1.0),
    item("tower", 0.5, 73.0, "ground"),
    item("gone", 0.4, 2.0),  # the sandboxes' root filesystem lacks it
    item(NASTY, 0.1, 0.5, distribution="odd"),
    item("a$b$&co", 0.01, 0.1, distribution="money"),
    item("dataset:tiny/one", 0.03, 4.0, "ground", resource_type="dataset"),
]
#: What several processes measured, and is not known tightly: the others are.
KNOWN = {"tower": Known(0.1, 3, 73.0, None, 1, 0.15), "ground": Known(0.01, 4, 7.0, 1.0, 4, 0.009)}
CORPUS = [asks("tower", count=3), asks("ground.deep.f", count=2), asks(NASTY), asks("nowhere", "ground")]


@dataclass(frozen=True)
class Made:
    """A work folder as `capture` leaves it, and what is in it."""

    out: Path
    measurements: Measurements
    plan: Plan
    manifest: Manifest

    @property
    def report(self) -> GenerationReport:
        return report_generation(self.out, self.measurements, self.plan, self.manifest)


def make(out: Path, items: list[MeasuredItem], *, failures: list[Failure], checkpoints: int = 4) -> Made:
    """A generation that was written, and not captured: restores take 8 ms and 0.1 ms a MB."""
    info = MeasurementInfo(
        flavor=Flavor.CPU,
        host=HOST,
        memory_source="RssAnon",
        rootfs="/rootfs",
        repeats=3,
        roots=len(items),
        failures=failures,
        absent={"nope": 1, "often": 5} if failures else {},
    )
    known = {one.key: KNOWN.get(one.key, Known(0.0, 3, one.size_mb, None, 1, 0.0)) for one in items}
    measurements = write_measurements(out / "measurements.parquet", Measurements(info, items, known))
    carried = [one for one in items if one.distribution != "gone"]
    plan = make_plan(
        carried,
        CORPUS if items else [asks("nowhere")],
        planner="fixed" if items else "greedy",
        sets=[["tower"], ["ground.deep"], [NASTY]] if items else [],
        alpha=0.001,
        limits=Limits(max_checkpoints=checkpoints),
        flavor=Flavor.CPU,
        warnings=[f"{NASTY} is odd"] if failures else [],
    )
    write_plan(out / "plan.json", plan)
    distributions = {one.distribution: "1.0" for one in carried if one.distribution}
    catalogue = write_catalogue(out / "catalogue.json", plan, Carried(carried, distributions, []), 0.0001)
    sizes = [(one.checkpoint_id, one.size_mb) for one in plan.checkpoints]
    sizes += [("ballast_0", 0.0), ("ballast_100", 100.0), ("ballast_400", 400.0)]
    manifest = Manifest(
        generation=catalogue.generation,
        flavor=Flavor.CPU,
        host=HOST,
        memory_source="RssAnon",
        alpha_planned=0.001,
        alpha_measured=0.0001,
        alpha_written=0.0001,
        points=[Point(name, size, 0.008 + 0.0001 * size) for name, size in sizes],
        restore_fixed_s=0.008,
        cold_fixed_s=0.1,
        checkpoints=[
            CapturedCheckpoint(one.checkpoint_id, one.size_mb, one.size_mb + 0.5, [0.008 + 0.0001 * one.size_mb] * 5)
            for one in plan.checkpoints
        ],
        warnings=plan.warnings,
    )
    write_manifest(out / "manifest.json", manifest)
    return Made(out, measurements, plan, manifest)


FAILURES = [
    Failure("quiet", "exit", "import quiet: SystemExit(0)", "quiet", 0),
    Failure("broken", "raised", f"import broken: RuntimeError: {NASTY} \x1b[31m \ud800", "broken", 7),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("report"), ITEMS, failures=FAILURES[:1])


@pytest.fixture(scope="module")
def report(made: Made) -> GenerationReport:
    """With a failure whose text no file would carry."""
    return msgspec.structs.replace(made.report, failures=[FAILURES[1], FAILURES[0]])


@pytest.fixture(scope="module")
def page(report: GenerationReport) -> str:
    return write_page(report, MADE_AT)


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """The elements of a page in their order, each with the text directly in it."""

    elements: list[Element] = field(default_factory=list)
    open: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(element)
        if tag not in {"meta", "br"}:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.open[-1].text += data

    def find(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]


def parse(page: str) -> Page:
    parser = Page()
    parser.feed(page)
    parser.close()
    return parser


class TestFacts:
    """What the report says is what was measured, planned and captured."""

    def test_a_checkpoint_says_what_it_holds_and_saves_and_for_how_many(self, report: GenerationReport) -> None:
        """By distribution, the dearest first: `tower` of 0.5 s loads `ground` of 0.2 s, for three requests."""
        one = next(one for one in report.checkpoints if "tower" in one.canonical)

        assert [(dear.name, dear.items, dear.seconds) for dear in one.holds] == [("tower", 1, 0.5), ("ground", 1, 0.2)]
        assert (one.requests, one.size_mb, one.measured_mb) == (3, 80.0, 80.5)
        assert one.saved_s == pytest.approx(3 * (0.7 - 0.08))
        assert one.restore_ms == pytest.approx(16.0)

    def test_distributions_are_ordered_by_what_they_cost_themselves(self, report: GenerationReport) -> None:
        """In time and in memory, datasets not among them."""
        assert [one.name for one in report.dearest_in_time] == ["tower", "gone", "ground", "odd", "money"]
        assert [(one.name, one.size_mb) for one in report.dearest_in_memory[:2]] == [("tower", 73.0), ("ground", 8.0)]

    def test_an_import_is_told_with_all_that_it_pulls_in(self, report: GenerationReport) -> None:
        """Of each distribution the dearest one."""
        assert [(one.name, one.items, one.seconds) for one in report.dearest_imports[:3]] == [
            ("tower", 2, 0.7),
            ("gone", 1, 0.4),
            ("ground.deep", 2, 0.25),
        ]

    def test_datasets_models_and_tokenizers_are_told_by_key(self, report: GenerationReport) -> None:
        """They are not among the modules."""
        assert [(one.name, one.seconds, one.size_mb) for one in report.resources] == [("dataset:tiny/one", 0.03, 4.0)]
        assert report.modules == 6

    def test_what_the_sandboxes_lack_is_counted(self, report: GenerationReport) -> None:
        """By distribution, beside what was asked for in vain, most often first."""
        assert report.left_out == {"gone": 1}
        assert list(report.absent.items()) == [("often", 5), ("nope", 1)]

    def test_costs_are_those_of_the_plan(self, report: GenerationReport) -> None:
        """3 × 0.7 + 2 × 0.25 + 0.1 + 0.2 s without checkpoints."""
        assert report.cost_without_s == pytest.approx(2.9)
        assert report.cost_s < 0.5

    def test_how_far_the_plan_can_be_from_the_best_is_told(self, made: Made) -> None:
        """Greedy's plan, the bound and the gap, in text and page; a planner that proves nothing says so."""
        cost = made.plan.cost_ns
        plan = msgspec.structs.replace(
            made.plan, candidates=9, candidates_kept=5, greedy_ns=2 * cost, bound_ns=cost * 4 // 5
        )
        proven = report_generation(made.out, made.measurements, plan, made.manifest)
        text, page = write_text(proven), write_page(proven, MADE_AT)

        assert proven.proof.gap == pytest.approx(0.25)
        assert "5 of 9 candidates were left after pruning" in text
        assert "100.00 % more" in text
        assert "this one is within 25.00 %" in text
        assert "Of 9 candidates, 5 were left after pruning." in page
        assert "<dd>25.00 %</dd>" in page
        assert "This planner proves no bound." not in page
        assert "This planner proves no bound." in write_page(made.report, MADE_AT)

    def test_what_is_not_known_tightly_is_told(self, report: GenerationReport, page: str) -> None:
        """Items with half of their interval: 0.15 s of 0.5, 1.82 MB of 7; 0.009 s of 0.2 is tight. In text and page."""
        (slow,), (large,) = report.noise, report.memory_noise
        text = write_text(report)
        section = page.partition('<h2 id="noise">Noise</h2>')[2].partition("</section>")[0]
        cells = [cell.text for cell in parse(section).elements if cell.tag in {"code", "td"}]

        assert (slow.module, slow.seconds, slow.interval) == ("tower", 0.5, 0.15)
        assert (large.module, large.size_mb) == ("ground", 7.0)
        assert large.interval == pytest.approx(1.82, abs=0.01)
        assert "known to 0.1500 s only: tower, 0.5000 s" in text
        assert "MB only: ground, 7.000 MB" in text
        assert cells == ["tower", "0.500", "0.150", "ground", "7.00", "1.82"]

    def test_what_can_be_in_no_checkpoint_is_told(self, made: Made) -> None:
        """What leaves threads, with the requests that need it, and candidates that were not looked at: text and page."""
        plan = msgspec.structs.replace(
            made.plan, candidates_kept=5, candidates_left_out=7, barred={"ground.deep": 2, NASTY: 4}
        )
        told = report_generation(made.out, made.measurements, plan, made.manifest)
        text, page = write_text(told), write_page(told, MADE_AT)

        assert f"in no checkpoint, for importing them leaves threads: {NASTY}, ground.deep" in text
        assert "In no checkpoint, for importing them leaves threads (2)" in page
        assert '<code>ground.deep</code></th><td class="number">2</td>' in page
        assert "7 that pairs would give were not looked at" in text
        assert "left after pruning; 7 that pairs would give were not looked at." in page
        assert "In no checkpoint" not in write_page(made.report, MADE_AT)

    def test_the_fit_is_the_line_through_the_points(self, report: GenerationReport) -> None:
        """Its slope is the measured alpha; drift is against the planned one."""
        assert report.fit is not None
        assert (report.fit.slope, report.fit.intercept) == pytest.approx((0.0001, 0.008))
        assert report.drift == pytest.approx(-0.9)

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (0, "0"),
            (0.0000123, "0.000012"),
            (0.0736, "0.0736"),
            (1.5, "1.50"),
            (36.71, "36.7"),
            (12345.6, "12\u202f346"),
        ],
    )
    def test_figures_have_three_digits_that_say_something(self, value: float, text: str) -> None:
        """And no exponents."""
        assert write_figure(value) == text


class TestReading:
    """`readie-pipeline report` makes both again from the work folder."""

    def test_from_the_folder_comes_the_same_report(self, made: Made) -> None:
        """Nothing but files is needed."""
        assert read_report(made.out, Flavor.CPU) == made.report

    @pytest.mark.parametrize("name", ["measurements.parquet", "plan.json", "manifest.json", "catalogue.json"])
    def test_a_missing_file_is_named(self, made: Made, tmp_path: Path, name: str) -> None:
        """With the command that writes it."""
        for path in made.out.iterdir():
            if path.is_file() and path.name != name:
                (tmp_path / path.name).write_bytes(path.read_bytes())
        with pytest.raises(BadFile, match=f"{name}: no such file") as raised:
            read_report(tmp_path, Flavor.CPU)

        assert "readie-pipeline capture" in raised.value.hint

    def test_another_flavor_is_refused(self, made: Made) -> None:
        """It names the flavor that is there."""
        with pytest.raises(BadFile, match="is of flavor cpu"):
            read_report(made.out, Flavor.GPU)

    def test_a_plan_made_since_the_capture_is_refused(self, made: Made) -> None:
        """What it would say of the checkpoints was never captured."""
        plan = msgspec.structs.replace(made.plan, checkpoints=made.plan.checkpoints[:-1])
        with pytest.raises(BadFile, match="planned again since the capture"):
            report_generation(made.out, made.measurements, plan, made.manifest)

    def test_measurements_made_since_the_capture_give_a_warning(self, made: Made) -> None:
        """The catalogue has other figures than they."""
        items = [item("ground", 0.3, 7.0), *(one for one in ITEMS if one.key != "ground")]
        changed = Measurements(made.measurements.info, items, made.measurements.figures)
        warnings = report_generation(made.out, changed, made.plan, made.manifest).warnings

        assert any("changed since the catalogue was written" in warning for warning in warnings)
        assert not any("changed since" in warning for warning in made.report.warnings)


class TestText:
    """The text names what matters, a line each."""

    def test_it_says_all_of_it(self, report: GenerationReport) -> None:
        """Costs, failures, what is left out, alpha, datasets, warnings."""
        text = write_text(report)
        for told in (
            "6 modules of 5 distributions",
            "most expensive in time: tower 0.50 s, 73 MB",
            "most expensive in memory: tower",
            "dearest imports, with all they pull in: tower 0.70 s, 80 MB",
            "dataset:tiny/one",
            "broken: import broken: RuntimeError",
            "not in the root filesystem of the sandboxes: gone (1 items)",
            "asked for, and not there: often, nope",
            "2.90 s without checkpoints",
            "alpha: planned 0.001, measured 0.0001",
            "R² 1.00",
            "is odd",
        ):
            assert told in text


class TestPage:
    """One file that loads nothing, read by everybody."""

    def test_the_same_report_gives_the_same_bytes_but_for_the_date(self, report: GenerationReport, page: str) -> None:
        """One line differs."""
        later = write_page(report, MADE_AT.replace(year=2031))
        differing = [a for a, b in zip(page.splitlines(), later.splitlines(), strict=True) if a != b]

        assert differing == ["Page made <time>2030-01-02 03:04 UTC</time>.</p>"]

    def test_names_are_text_whatever_they_hold(self, page: str) -> None:
        """No script, no style of theirs, no control character."""
        parsed = parse(page)

        assert parsed.find("script") == []
        assert any(NASTY in element.text for element in parsed.find("code"))
        assert any(NASTY in element.text for element in parsed.find("td"))
        assert not any(ord(c) < 32 and c != "\n" for c in page)
        assert "\ud800" not in page

    def test_names_in_plots_are_text_too(self, page: str) -> None:
        """Dollars make no formula there."""
        texts = [element.text for element in parse(page).find("text")]

        assert "a$b$&co" in texts
        assert any(text.startswith("<script>") for text in texts)

    def test_nothing_is_loaded(self, page: str) -> None:
        """No link leads out of the page, and its policy forbids it to load anything."""
        parsed = parse(page)
        outside = [
            value
            for element in parsed.elements
            for name, value in element.attributes.items()
            if name in {"src", "href", "xlink:href", "data", "action"} and not value.startswith("#")
        ]
        policy = [
            meta for meta in parsed.find("meta") if meta.attributes.get("http-equiv") == "Content-Security-Policy"
        ]

        assert outside == []
        assert "default-src 'none'" in policy[0].attributes["content"]
        assert not any(tag in page for tag in ("@import", "<link", "<img", "<iframe"))

    def test_ids_are_distinct_and_references_lead_to_them(self, page: str) -> None:
        """Plots do not share theirs."""
        parsed = parse(page)
        ids = [element.attributes["id"] for element in parsed.elements if "id" in element.attributes]
        named = [
            reference
            for element in parsed.elements
            for name, value in element.attributes.items()
            for reference in (
                value.split() if name == "aria-labelledby" else [value[1:]] if name in {"href", "xlink:href"} else []
            )
        ]
        used = [
            part.partition(")")[0]
            for element in parsed.elements
            for value in element.attributes.values()
            for part in value.split("url(#")[1:]
        ]

        assert [name for name, count in Counter(ids).items() if count > 1] == []
        assert set(named) | set(used) <= set(ids)
        assert len(used) > 10

    def test_it_can_be_read_without_eyes(self, page: str) -> None:
        """Language, title, one first heading, levels without gaps, header cells, plots with title and description."""
        parsed = parse(page)
        levels = [int(element.tag[1]) for element in parsed.elements if element.tag in {"h1", "h2", "h3"}]

        assert parsed.find("html")[0].attributes["lang"] == "en"
        assert levels == [1] + [2] * (len(levels) - 1)
        assert all("scope" in cell.attributes for cell in parsed.find("th"))
        assert {plot.attributes["role"] for plot in parsed.find("svg")} == {"img"}
        assert len(parsed.find("svg")) == len(parsed.find("desc")) == len(parsed.find("figcaption")) == 6
        assert all(element.text for element in [*parsed.find("desc"), *parsed.find("title")])

    def test_its_colours_are_the_readers(self, page: str) -> None:
        """Light or dark; the plots name no colour of their own."""
        drawn = page[page.index("<body>") :]

        assert "prefers-color-scheme: dark" in page
        assert "var(--first)" in drawn
        assert not any(f"#{digit}{digit}" in drawn for digit in ("01", "02", "03", "04", "00", "ff"))

    def test_a_generation_of_nothing_has_a_page(self, tmp_path: Path) -> None:
        """No items, no checkpoint but the empty one, no cost."""
        made = make(tmp_path, [], failures=[], checkpoints=1)
        report = made.report
        save_page(tmp_path / "report.html", report, MADE_AT)
        parsed = parse((tmp_path / "report.html").read_text(encoding="utf-8"))

        assert sum(one.saved_s for one in report.checkpoints) == 0
        assert "Everything could be imported." in [element.text for element in parsed.find("p")]
        assert write_text(report)
