"""The benchmarks run, what they compare with is right, and the page says what was measured."""

import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks import baseline, limit, sandboxes, tables
from benchmarks.bench import Line, Target, percentile
from benchmarks.catalogues import Size
from benchmarks.run import BENCHMARKS, PAGE, RESULTS, keep_line, read_lines
from readie.cost import cheapest, price_catalogue
from readie.document import read_document
from tests.catalogues import MODULES, documents, write

ROOT = Path(__file__).parent.parent
NAMES = {
    "start": ["start"],
    "imports": ["import-json", "import-json-memory", "import-parquet", "import-parquet-memory"],
    "memory": ["memory"],
    "scoring": ["scoring-single", "scoring-batch", "scoring-seen"],
    "api": ["api-explain-new", "api-explain-repeated", "api-place", "api-live"],
    "growth": ["growth-import", "growth-scoring"],
}


def make_line(name: str = "start", ours: float = 0.4, items: int = 5000, **fields: Any) -> Line:
    size = Size(megabytes=400.0, items=items, edges=12_500_000, checkpoints=100)
    return Line(name=name, database="duckdb", size=size, unit="s", ours=ours, **fields)


@pytest.mark.scale
def test_every_benchmark_runs_and_prints_its_lines(tmp_path: Path) -> None:
    """On 1 MB, briefly: each prints its figures beside the baseline's, and the file has the same lines."""
    out = tmp_path / "results.jsonl"
    command = [sys.executable, "benchmarks/run.py", "--packages", "250", "--quick", "--database", "duckdb"]
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [msgspec.json.decode(line, type=Line) for line in done.stdout.splitlines()]

    assert [name for benchmark in BENCHMARKS for name in NAMES[benchmark]] == [line.name for line in lines]
    assert lines == read_lines(out)
    for line in lines:
        assert (line.size.items, line.size.checkpoints, line.database, line.quick) == (250, 100, "duckdb", True)
        assert line.baseline is not None
        assert line.detail.get("errors", 0) == 0
        assert line.detail.get("compared", 1) > 0
        assert line.machine["cores"] > 0


@pytest.mark.scale
@pytest.mark.parametrize(
    ("script", "options", "measured"),
    [
        ("overhead.py", ["--rounds", "3"], {"duckdb", "postgresql"}),
        (
            "crowd.py",
            ["--workers", "20", "--sessions", "50", "--calls", "200", "--rounds", "2"],
            {"sizes", "milliseconds"},
        ),
    ],
)
def test_what_a_call_and_a_crowd_cost_is_measured(script: str, options: list[str], measured: set[str]) -> None:
    """Briefly: one JSON document, whether the limits are kept (exit 0) or not (1)."""
    command = [sys.executable, f"benchmarks/{script}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode in {0, 1}, done.stderr
    assert msgspec.json.decode(done.stdout).keys() == measured


@given(document=documents(), modules=st.lists(st.sampled_from(MODULES), max_size=4))
def test_baseline_and_limit_answer_as_the_oracle_does(document: dict[str, Any], modules: list[str]) -> None:
    """The checkpoint and both costs, to the nanosecond, ties and cycles included."""
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "cpu.json", document)
        catalogue, plain = read_document(path), baseline.Router(path)
    items, checkpoints = price_catalogue(catalogue)
    best = cheapest(items, checkpoints, modules)
    cold = cheapest(items, [], modules)
    right = baseline.Answer(best.checkpoint_id, best.cost_ns, cold.cost_ns)

    assert right == plain.choose(plain.expand(modules))
    assume(catalogue.checkpoints and cold.missing)
    assert right == limit.Router(catalogue).answer(modules)


def test_a_line_takes_the_place_of_the_one_of_its_name_database_and_size(tmp_path: Path) -> None:
    """The file keeps the newest of each, and its order."""
    path = tmp_path / "results.jsonl"
    lines = [make_line("a", 1), make_line("b", 2), make_line("a", 3, items=250), make_line("a", 4)]
    for line in lines:
        keep_line(path, line)

    assert [lines[3], lines[1], lines[2]] == read_lines(path)


def test_a_target_is_a_bound_above_or_below_and_may_be_relative() -> None:
    """4 ms at most, 250 a second at least, 1.5 times the baseline at most."""
    relative = Target(1.5, "s", base=4.0, of="baseline")

    assert [Target(4, "ms").met(each) for each in (4.0, 4.1)] == [True, False]
    assert [Target(250, "a second", least=True).met(each) for each in (250, 249)] == [True, False]
    assert [relative.met(each) for each in (6.0, 6.1)] == [True, False]
    assert relative.text() == "≤ 1.5 × baseline"


def test_percentiles_are_values_that_were_measured() -> None:
    """The median of five is the third, the 99th percentile of a few is the highest."""
    assert (percentile([5, 1, 4, 2, 3], 0.5), percentile([5, 1, 4, 2, 3], 0.99)) == (3, 5)


def test_the_page_shows_the_results_that_are_in_the_file() -> None:
    """docs/benchmarks.md is what `benchmarks/run.py --table` would write."""
    page = PAGE.read_text(encoding="utf-8")

    assert page == tables.fill(page, read_lines(RESULTS))


def test_a_missed_target_is_said_in_the_table() -> None:
    """Beside the figure, the bound and what it is compared with."""
    table = tables.results([make_line(ours=1.5, baseline=3.0, ratio=0.5, target="≤ 1 s", met=False)])

    assert "| start | DuckDB | **1.5** s | 3 |  | 0.5 | ≤ 1 s | **no** |" in table


@pytest.fixture(scope="module")
def measured() -> Any:
    """The committed benchmarks/sandboxes.json."""
    return msgspec.json.decode((ROOT / "benchmarks" / "sandboxes.json").read_bytes())


def test_the_page_of_gvisor_shows_the_result_that_is_in_the_file(measured: Any) -> None:
    """docs/gvisor.md is what `benchmarks/sandboxes.py --table` would write."""
    page = sandboxes.PAGE.read_text(encoding="utf-8")

    assert page.partition("<!-- measured -->\n")[2].partition("\n<!-- end -->")[0] == sandboxes.write_tables(measured)


def test_restores_keep_what_was_promised_of_them(measured: Any) -> None:
    """Pandas and scikit-learn are restored ten times faster than started cold; sizes predict restores within a fifth."""
    [pair] = [case for case in measured["cases"] if case["modules"] == list(sandboxes.HEAVY)]
    cold, restored = (median(pair["seconds"][way]) for way in sandboxes.WAYS[:2])

    assert len(measured["cases"]) >= 10
    assert {len(seconds) for case in measured["cases"] for seconds in case["seconds"].values()} == {measured["rounds"]}
    assert cold >= 10 * restored
    assert median(sandboxes.fit(measured)[2]) <= 0.2
