"""The planner on the committed corpus and catalogue: some 10,000 import sets over more than 20,000 items.

What takes minutes is marked `scale`; the rest is one process of some 10 s.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1200)
scale = pytest.mark.scale

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "planning.md"

#: What the plan of the committed catalogue was made from: the measurements beside it, which also say what leaves threads.
KNOWN = """
import json, resource, sys, time
begun = time.monotonic()
from pathlib import Path
from pipeline.analyze import read_measurements
from pipeline.capture import carry_over
from pipeline.corpus import read_corpus
from pipeline.plan import make_plan, write_plan
from pipeline.problem import Limits
from pipeline.what_if import hold_out
from readie.flavor import Flavor

alpha = float(sys.argv[1])
measured = carry_over(read_measurements(Path("catalogues/cpu.measurements.parquet")), Path("no-root-filesystem"))
items, barred = measured.items, measured.barred
corpus = read_corpus(Path("corpora/cpu.jsonl.gz"))
"""
#: Plans, and prints what came out, with what it took.
PLAN = (
    KNOWN
    + """
plan = make_plan(
    items, corpus, planner="optimal", alpha=alpha, limits=Limits(), flavor=Flavor.CPU, barred=barred
)
write_plan(Path(sys.argv[2]), plan)
peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
said = {"gap": plan.gap, "sets": len(corpus), "items": len(items), "peak_mb": peak_kb * 1024 / 1e6}
print(json.dumps(said | {"seconds": time.process_time(), "elapsed": time.monotonic() - begun}))
"""
)
#: Prices the checkpoints that the catalogue has, and plans for some 100 of the import sets, often and seldom asked for.
CHEAP = (
    KNOWN
    + """
document = json.loads(Path("catalogues/cpu.json").read_bytes())
sets = [one["canonical"] for one in document["checkpoints"] if one["canonical"]]
plan = make_plan(
    items, corpus, planner="fixed", alpha=alpha, limits=Limits(), flavor=Flavor.CPU, sets=sets, barred=barred
)
some = sorted(corpus, key=lambda one: (-one.count, one.modules))[:: len(corpus) // 100]
small = make_plan(
    items, some, planner="optimal", alpha=alpha, limits=Limits(), flavor=Flavor.CPU, barred=barred
)
print(json.dumps({
    "cost_s": plan.cost_ns / 1e9,
    "items": [one.items for one in plan.checkpoints],
    "small": {name: getattr(small, name) for name in ("gap", "cost_ns", "greedy_ns", "cost_without_ns")},
}))
"""
)
#: Plans without a fifth of the import sets, by every planner, and prints what they then cost.
HOLD_OUT = (
    KNOWN
    + """
found = hold_out(items, corpus, share=0.2, seed=1, alpha=alpha, limits=Limits(), barred=barred)
rows = [[row.checkpoints, row.size_mb, row.planned_ns / 1e9, row.held_out_ns / 1e9] for row in found.rows]
print(json.dumps(dict(zip([row.planner for row in found.rows], rows, strict=True))))
"""
)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The plan, and what its process said."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    return path, plan_into(path)


@pytest.fixture(scope="module")
def cheap() -> dict[str, Any]:
    """What the cheap program said."""
    return run(CHEAP)


def plan_into(path: Path) -> dict[str, Any]:
    return run(PLAN, str(path))


def run(program: str, *arguments: str) -> dict[str, Any]:
    """What a program prints in its last line. It is given the alpha of docs/planning.md, which was planned with."""
    (alpha,) = re.findall(r"--alpha (\S+?)`", PAGE.read_text(encoding="utf-8"))
    command = [sys.executable, "-c", program, alpha, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@scale
def test_it_fits_into_the_machine(planned: tuple[Path, dict[str, Any]]) -> None:
    """10,000 distinct import sets over 20,000 items within 4 GB and five minutes, also by the clock.

    It works on one processor: beside others it can take longer by the clock, so this is for a machine left alone.
    """
    _, said = planned

    assert said["sets"] >= 10_000
    assert said["items"] >= 20_000
    assert said["peak_mb"] <= 4_000
    assert max(said["seconds"], said["elapsed"]) <= 300


@scale
def test_the_plan_is_close_to_the_bound(planned: tuple[Path, dict[str, Any]]) -> None:
    """Within 2 % of what no plan over the candidates can be below, and no worse than greedy's."""
    path, said = planned
    plan = json.loads(path.read_bytes())

    assert 0 <= said["gap"] <= 0.02
    assert plan["cost_ns"] <= plan["greedy_ns"]


@scale
def test_the_plan_costs_what_the_page_says(planned: tuple[Path, dict[str, Any]]) -> None:
    """The first table of docs/planning.md, each figure within 1 %."""
    path, _ = planned
    plan = json.loads(path.read_bytes())
    found = [plan[name] / 1e9 for name in ("cost_without_ns", "greedy_ns", "cost_ns", "bound_ns")]

    said = [float(cells[1].replace(",", "")) for cells in read_table("| | requests together, s |")]

    assert found == pytest.approx(said, rel=0.01)


def read_table(head: str) -> list[list[str]]:
    """The cells of the rows below the line that begins so, in docs/planning.md."""
    page = PAGE.read_text(encoding="utf-8")
    lines = page.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_committed_catalogue_has_the_plan_of_the_page(cheap: dict[str, Any]) -> None:
    """Its checkpoints, priced for the corpus, cost what the page says of `optimal`; what leaves threads is in none."""
    document = json.loads((ROOT / "catalogues" / "cpu.json").read_bytes())

    assert cheap["items"] == [one["items"] for one in document["checkpoints"]]
    assert round(cheap["cost_s"], 2) == float(read_table("| | requests together, s |")[2][1])


def test_a_plan_for_a_small_part_is_close_to_the_bound(cheap: dict[str, Any]) -> None:
    """Within 2 % of what no plan over the candidates can be below, no worse than greedy's, and worth having."""
    found = cheap["small"]

    assert 0 <= found["gap"] <= 0.02
    assert found["cost_ns"] <= found["greedy_ns"] < found["cost_without_ns"] / 2


@scale
def test_requests_that_were_held_out_cost_what_the_page_says() -> None:
    """The table of docs/planning.md, each figure within 1 %; of what they were planned for, in the order of planners."""
    table = {
        re.sub("[`,].*", "", cells[0].lstrip("`")): [float(cells[at].replace(",", "")) for at in (1, 2, 3, 5)]
        for cells in read_table("| planner | checkpoints |")
    }

    found = run(HOLD_OUT)

    assert list(table) == ["none", "fixed", "greedy", "optimal"]
    assert found == {name: pytest.approx(figures, rel=0.01) for name, figures in table.items()}
    planned_for = [row[2] for row in found.values()]
    assert planned_for == sorted(planned_for, reverse=True)


@scale
def test_a_second_run_gives_the_same_bytes(planned: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """It stops by iterations, not by the clock."""
    path, _ = planned
    plan_into(tmp_path / "plan.json")

    assert (tmp_path / "plan.json").read_bytes() == path.read_bytes()
