"""The documentation says what is there: settings, problems, commands, links, examples, the cluster's mounts."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.settings import RouterSettings
from readie.client import ClientSettings
from readie.errors import ReadieError, problems
from tests.commands import COMMANDS
from worker.settings import WorkerSettings

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference.md"
PAGES = [ROOT / "README.md", ROOT / "catalogues" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SETTINGS: list[type[msgspec.Struct]] = [RouterSettings, WorkerSettings, ClientSettings]


@pytest.fixture(scope="module")
def reference() -> str:
    return REFERENCE.read_text(encoding="utf-8")


def rows_of(text: str, first: str) -> list[list[str]]:
    """The cells of each table row whose first cell is `first`."""
    rows = [re.split(r" *(?<!\\)\| *", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0] == first]


def test_the_reference_is_what_the_program_says_now() -> None:
    """`make docs` would write the same file."""
    script = str(ROOT / "docs" / "make_reference.py")
    checked = subprocess.run([sys.executable, script, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_problem_is_one_row_whatever_a_part_derives_from_it() -> None:
    """The table gives the public class of each slug, which is what clients catch."""
    assert {problem.__module__ for problem in problems().values()} == {"readie.errors"}


@pytest.mark.parametrize("problem", problems().values(), ids=lambda problem: problem.slug)
def test_every_problem_is_in_the_reference(reference: str, problem: type[ReadieError]) -> None:
    """Its row has the status, the exception and the way out."""
    (row,) = rows_of(reference, f"`{problem.slug}`")

    assert row[1:] == [str(problem.status), problem.title, f"`{problem.__name__}`", problem.way_out]


@pytest.mark.parametrize(
    ("kind", "field"),
    [(kind, field) for kind in SETTINGS for field in msgspec.structs.fields(kind)],
    ids=lambda value: getattr(value, "__name__", None) or value.encode_name,
)
def test_every_setting_is_in_the_reference_with_its_meaning(
    reference: str, kind: type[msgspec.Struct], field: Any
) -> None:
    """What it accepts and what it is for are both said, in its own part's table."""
    title = {RouterSettings: "The router", WorkerSettings: "The worker", ClientSettings: "The client"}[kind]
    section = reference.partition(f"### {title}\n")[2].partition("\n#")[0]
    (row,) = rows_of(section, f"`{field.encode_name.upper()}`")

    assert all(row[2:])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_reference_with_its_options(reference: str, name: str) -> None:
    """It has one sentence, an example, and a meaning for each option."""
    section = reference.partition(f"#### {name}\n")[2].partition("\n#")[0]
    options = [parameter.opts[0] for parameter in COMMANDS[name].params if parameter.param_type_name == "option"]

    assert re.search(r"\w\.\n", section)
    assert re.search(rf"```sh\n.*{name} ?.*\n```", section)
    assert [option for option in options if not re.search(rf"^\| `{option}`.*\S \|$", section, re.MULTILINE)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    """Files and pictures that a page links to are in the repository."""
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]

    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_compile(page: Path) -> None:
    """Every Python block of a page is Python, with `await` where a notebook would take it."""
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_readme_shows_an_example_of_the_client() -> None:
    """There is a Python block, and it imports `remote`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert re.search(r"```python\nfrom readie import remote\n", text)


def test_commands_that_the_pages_name_exist() -> None:
    """Whoever copies a command from README or docs finds it."""
    said = {
        match
        for page in PAGES
        for match in re.findall(r"readie-(?:pipeline|router|worker) [a-z]+\b", page.read_text(encoding="utf-8"))
        if match.split()[1] not in {"in", "of", "that", "is", "and"}
    }

    assert set() == said - set(COMMANDS)


def test_promises_of_security_name_tests_that_exist() -> None:
    """Each row of the first table names the tests that hold it."""
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    promises = page.partition("## What is promised\n")[2].partition("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ")][1:]
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", page)

    assert rows
    assert [row for row in rows if "`tests/" not in row] == []
    assert [
        f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")
    ] == []


def test_the_containers_read_the_catalogues_of_the_checkout() -> None:
    """compose.yaml mounts ./catalogues read-only where CATALOGUE_DIR of the router points."""
    router = (
        (ROOT / "compose.yaml").read_text(encoding="utf-8").partition("\n  router:\n")[2].partition("\n  worker:\n")[0]
    )

    assert (ROOT / "catalogues" / "README.md").is_file()  # what no file is in, no checkout has
    assert "\n      - ./catalogues:/var/lib/readie/catalogues:ro\n" in router
    assert "\n      CATALOGUE_DIR: /var/lib/readie/catalogues\n" in router
