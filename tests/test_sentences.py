"""Commands within sentences of the documentation: each is one that the program takes, and each is run by a test."""

import ast
import re
import shlex
from contextlib import closing
from pathlib import Path

import click
import pytest

from benchmarks.bench import KINDS
from benchmarks.run import BENCHMARKS
from tests.commands import COMMANDS
from tests.pages import ROOT, Terminal, clone_project
from tests.test_docs import PAGES

#: What begins a command, as opposed to a name that stands alone.
PROGRAM = re.compile(
    r"(?:readie-(?:pipeline|router|worker)|make|python3?|pytest|pip|uv|alembic|runsc|git|apt-get|duckdb|curl|docker|openssl|chmod|rsync) "
)
#: The gate, or a test that runs it, or the same command with other arguments.
RUN_BY = {
    "alembic upgrade head": "test_migrations.py::test_alembic_upgrades_from_a_checkout",
    "apt-get install -t bookworm-backports runsc": ".ci/run",
    "git tag --annotate v1.2.0 --message 'Readie 1.2.0'": "test_packaging.py::test_the_version_is_the_last_tag_s",
    "make bench": "test_sentences.py::test_targets_that_take_long_do_what_they_say_on_little",
    "make build": "test_sentences.py::test_targets_of_make_do_what_they_say",
    "make capture": "test_made_again.py::test_a_catalogue_is_made_as_its_page_says",
    "make capture FLAVOR=cpu": "test_made_again.py::test_a_catalogue_is_made_as_its_page_says",
    "make capture RUNTIME=runsc ROOTFS=generation/cpu/rootfs": (
        "test_examples.py::test_a_generation_in_gvisor_is_made_and_served_as_its_page_says"
    ),
    "make check": ".ci/run",
    "make demo": ".ci/run",
    "make demo RUNTIME=runsc": "test_scale_sandboxes.py::test_the_demo_runs_in_gvisor",
    "make docs": "test_sentences.py::test_targets_of_make_do_what_they_say",
    "make guides": "test_sentences.py::test_targets_that_take_long_do_what_they_say_on_little",
    "make help": "test_sentences.py::test_targets_of_make_do_what_they_say",
    "make resources": ".ci/run",
    "make scale": "test_sentences.py::test_targets_that_take_long_do_what_they_say_on_little",
    "make scale T=tests/test_scale_planner.py": "test_sentences.py::test_targets_that_take_long_do_what_they_say_on_little",
    "make screenshots": "test_sentences.py::test_targets_that_take_long_do_what_they_say_on_little",
    "make site": "test_sentences.py::test_targets_of_make_do_what_they_say",
    "make soak": "test_sentences.py::test_targets_that_take_long_do_what_they_say_on_little",
    "make test": ".ci/run",
    "openssl rand -hex 32": "test_tutorial.py::test_three_routers_serve_one_cluster",
    "pip install readie": "test_packaging.py::test_pip_installs_what_the_extras_ask_for",
    "python -m benchmarks.pages": "test_scale_pages.py::test_pages_and_searches_keep_to_their_times",
    "python benchmarks/crowd.py": "test_benchmarks.py::test_what_a_call_and_a_crowd_cost_is_measured",
    "python benchmarks/overhead.py": "test_benchmarks.py::test_what_a_call_and_a_crowd_cost_is_measured",
    "readie-pipeline plan --out generation/cpu --holdout 0.2 --seed 1 --alpha 2.73415e-05": (
        "test_pipeline_cli.py::test_holdout_prices_what_was_not_planned_for"
    ),
    "readie-router activate SHA256 --flavor cpu": "test_router_cli.py::test_activate_goes_back_to_an_earlier_catalogue",
    "readie-router catalogues --json": "test_router_cli.py::test_json_is_the_answer_of_the_api",
    "readie-router import FILE": "test_router_cli.py::test_import_makes_a_catalogue_active",
    "readie-router workers --json": "test_router_cli.py::test_json_is_the_answer_of_the_api",
}
#: What the worker runs, and Readie's users do not; tests/test_runsc.py has it do so.
RUN_BY_THE_WORKER = {"runsc checkpoint", "runsc create", "runsc restore"}
#: The program's own are run as the examples of their --help.
SAID = {
    span
    for page in PAGES
    for span in re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    )
    if PROGRAM.match(span) and span not in COMMANDS
}


def test_each_is_known_to_be_run() -> None:
    """And the list has no command that no sentence says."""
    source = (ROOT / "worker" / "runsc.py").read_text()

    assert set(RUN_BY) | RUN_BY_THE_WORKER == SAID
    assert [command for command in RUN_BY_THE_WORKER if f'["{command.split()[1]}"' not in source] == []


@pytest.mark.parametrize("command", RUN_BY)
def test_what_runs_it_is_there(command: str) -> None:
    """The gate has the line. The test is there; where the command is the program's own, its name and options are in it."""
    place, _, name = RUN_BY[command].partition("::")
    program, first, *others = shlex.split(command)
    if place == ".ci/run":
        line = r"\s*".join(re.escape(word) for word in shlex.split(command)).replace(r"install\s*", r"install.*")
        assert re.search(rf"^\s*(?:\w+=\w+ )*{line}\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
        return
    source = (ROOT / "tests" / place).read_text()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    tests = [ast.get_source_segment(source, node) or "" for node in functions if node.name == name]

    assert tests
    if program.startswith("readie-"):
        options = [word for word in others if word.startswith("--") and word != "--flavor"]
        assert all(f'"{word}"' in tests[0] for word in [first, *options])


@pytest.mark.parametrize("command", sorted(command for command in SAID if command.startswith("readie-")))
def test_its_options_are_the_program_s(command: str) -> None:
    """Whoever copies one from a sentence is not refused for how it is written."""
    program, name, *arguments = shlex.split(command)
    definition = COMMANDS[f"{program} {name}"]

    definition.make_parser(click.Context(definition)).parse_args(arguments)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean clone of the project."""
    folder = tmp_path_factory.mktemp("targets") / "readie"
    clone_project(folder)
    return folder


@pytest.mark.guides
@pytest.mark.timeout(900)
def test_targets_of_make_do_what_they_say(clone: Path) -> None:
    """The list, the reference as it was, the site, and the two distributions."""
    with closing(Terminal(clone, {}, {})) as terminal:
        listed = terminal.run("make help")
        terminal.run("make docs\nmake site\nmake build")
        changed = terminal.run("git status --porcelain --untracked-files=no")

    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [line.split()[0] for line in listed.splitlines()] == targets
    assert changed == ""
    assert (clone / "build" / "site" / "index.html").is_file()
    assert sorted(path.suffix for path in (clone / "dist").iterdir()) == [".gz", ".whl"]


@pytest.mark.guides
@pytest.mark.timeout(1800)
def test_targets_that_take_long_do_what_they_say_on_little(clone: Path) -> None:
    """Seconds of calls, a catalogue of 1 MB, a part of the tests; the pictures are drawn whole, after the demo."""
    drawn = sorted((clone / "docs" / "images").iterdir())
    before = [picture.stat().st_mtime_ns for picture in drawn]
    part = "PYTEST_ADDOPTS='-k {}' make {}"
    with closing(Terminal(clone, {}, {})) as terminal:
        soaked = terminal.run("make soak SECONDS=20")
        measured = terminal.run("make bench PACKAGES=250 || test $? = 2")  # a target may be missed, and is said to be
        scaled = terminal.run(part.format("crowd.py", "scale T=tests/test_benchmarks.py"))
        guided = terminal.run(part.format("README", "guides"))
        terminal.run("make screenshots", seconds=1500)

    assert soaked.count('"wrong": []') == 2
    assert set(BENCHMARKS) <= set(re.findall(r"^--- (\w+)$", measured, re.MULTILINE))
    assert all(f"| {kind} |" in measured for kind in KINDS)
    assert (" 1 passed" in scaled, " 1 passed" in guided) == (True, True)
    assert sorted((clone / "docs" / "images").iterdir()) == drawn
    assert all(picture.stat().st_mtime_ns > old for picture, old in zip(drawn, before, strict=True))
