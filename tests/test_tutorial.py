"""A newcomer who follows the tutorial word for word reaches its end, and the how-to guides go on from there.

All of it is `make guides`: installing, measuring and capturing take two minutes more than `make test` has.

The tutorial begins in a clean clone of this repository. `make setup` there is run as it stands, and finds the virtual
environment of these tests, linked in and up to date. With TUTORIAL_WHOLE=1 it finds none, and makes one.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from tests.conftest import Cluster
from tests.pages import Terminal, read_blocks

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


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What differs from a newcomer's terminal: the port, for 8700 may be taken, and where temporary files are."""
    port = free_port()
    return {
        "ROUTER_PORT": port,
        "ROUTER_URL": f"http://127.0.0.1:{port}",
        "TMPDIR": str(tmp_path_factory.mktemp("temporary")),
    }


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean clone, whose virtual environment is the one that runs this."""
    folder = tmp_path_factory.mktemp("newcomer") / "readie"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)], check=True)
    if os.environ.get("TUTORIAL_WHOLE") != "1":
        (folder / ".venv").mkdir()
        for name in ("bin", "include", "lib", "lib64", "pyvenv.cfg"):
            (folder / ".venv" / name).symlink_to(Path(sys.prefix) / name)
        (folder / ".venv" / "ready").touch()  # newer than what it is made from: make has nothing to do
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
    exported = {"ROOTFS": "rootfs", "CHECKPOINT_DIR": "generation/checkpoints", "WORKER_MEM_TOTAL": "4Gi"}
    return environment | exported | {"PATH": f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"}


@pytest.mark.guides
@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_goes_on_where_the_tutorial_ends(newcomer: Terminal, settings: dict[str, str], guide: str) -> None:
    """Every command of the guide is run, and prints what it says."""
    with closing(Terminal(newcomer.folder, settings, {"8700": settings["ROUTER_PORT"]})) as terminal:
        terminal.follow(read_blocks(ROOT / "docs" / "how-to" / f"{guide}.md"))


@pytest.mark.guides
def test_three_routers_serve_one_cluster(newcomer: Terminal, settings: dict[str, str], cluster: Cluster) -> None:
    """Every command of the guide is run over a PostgreSQL of these tests, and prints what it says."""
    database_url = cluster.create()
    ports: Mapping[str, str] = {port: free_port() for port in ("8701", "8702", "8703")}
    try:
        with closing(Terminal(newcomer.folder, settings | {"DATABASE_URL": database_url}, ports)) as terminal:
            terminal.follow(read_blocks(ROOT / "docs" / "how-to" / "three-routers.md"))
    finally:
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
