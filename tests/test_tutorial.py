"""A newcomer who follows the tutorial word for word reaches its end, and the how-to guides go on from there.

All of it is `make guides`: installing, measuring and capturing take two minutes more than `make test` has.

The tutorial begins in a clean clone of this repository. `make setup` there is run as it stands, and finds the virtual
environment of these tests, linked in and up to date. With TUTORIAL_WHOLE=1 it finds none, and makes one.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.conftest import Cluster
from tests.pages import Terminal, clone_project, free_port, read_blocks

pytestmark = pytest.mark.timeout(900)  # of the first test: it follows the whole tutorial, from make setup on

ROOT = Path(__file__).parent.parent
TUTORIAL = read_blocks(ROOT / "docs" / "tutorial.md")
GUIDES = ["debug-a-cold-start", "plan-from-production", "roll-out", "add-a-package"]
#: A page's `await` is that of a notebook.
NOTEBOOK = """
import ast, asyncio, sys
waiting = eval(compile(sys.stdin.read(), "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
waiting and asyncio.run(waiting)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What differs from a newcomer's terminal: the port, for 8700 may be taken, and where temporary files are."""
    port = free_port()
    return {
        "ROUTER_PORT": port,
        "TMPDIR": str(tmp_path_factory.mktemp("temporary")),
    }


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean clone, whose virtual environment is the one that runs this."""
    folder = tmp_path_factory.mktemp("newcomer") / "readie"
    clone_project(folder)
    if os.environ.get("TUTORIAL_WHOLE") == "1":
        shutil.rmtree(folder / ".venv")
    return folder


@pytest.fixture(scope="module")
def newcomer(clone: Path, environment: dict[str, str]) -> Iterator[Terminal]:
    """A terminal in which the tutorial has been followed up to its end: its router and its worker run."""
    with closing(Terminal(clone, environment, {"8700": environment["ROUTER_PORT"]})) as terminal:
        terminal.follow(block for block in TUTORIAL if block.section != "The end")
        yield terminal


@pytest.fixture(scope="module")
def settings(newcomer: Terminal, clone: Path, environment: dict[str, str]) -> dict[str, str]:
    """What the tutorial leaves in its terminal, for another one."""
    exported = {"ROUTER_URL": f"http://127.0.0.1:{environment['ROUTER_PORT']}", "WORKER_MEM_TOTAL": "4Gi"}
    return environment | exported | {"PATH": f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"}


@pytest.mark.guides
@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_goes_on_where_the_tutorial_ends(newcomer: Terminal, guide: str) -> None:
    """Every command of the guide is run in the tutorial's own terminal, and prints what it says."""
    newcomer.follow(read_blocks(ROOT / "docs" / "how-to" / f"{guide}.md"))


@pytest.mark.guides
def test_three_routers_serve_one_cluster(newcomer: Terminal, cluster: Cluster) -> None:
    """Every command of the guide is run there over a PostgreSQL of these tests, and prints what it says."""
    database_url = cluster.create()
    typed = newcomer.instead
    address = "postgresql+psycopg://readie:secret@db.example.org/readie"
    ports = {port: free_port() for port in ("8701", "8702", "8703")}
    newcomer.instead = {**typed, **ports, address: shlex.quote(database_url)}
    try:
        newcomer.follow(read_blocks(ROOT / "docs" / "how-to" / "three-routers.md"))
    finally:
        newcomer.instead = typed
        cluster.drop(database_url)


def test_every_guide_is_followed() -> None:
    """No page of docs/how-to is left out here."""
    pages = {page.stem for page in (ROOT / "docs" / "how-to").glob("*.md")}

    assert pages == {*GUIDES, "three-routers"}


@pytest.mark.guides
@pytest.mark.usefixtures("newcomer")
def test_the_examples_of_the_readme_run(settings: dict[str, str]) -> None:
    """One after the other, with the tutorial's router and worker."""
    examples = "\n".join(block.text for block in read_blocks(ROOT / "README.md") if block.language == "python")
    run = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        input=examples + '\nprint(remember("here", 1))\n',
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (run.returncode, run.stdout) == (0, "['here']\n"), run.stderr


@pytest.mark.guides
def test_a_newcomer_reaches_the_end_of_the_tutorial(newcomer: Terminal) -> None:
    """Every command and file of it was run and written, and what it says is printed was."""
    newcomer.follow(block for block in TUTORIAL if block.section == "The end")

    assert newcomer.run("jobs") == ""
