"""The example of each command's --help, as it stands there, and a generation in gVisor as its page makes one.

`make guides` runs it: root filesystems, measurements and captures are real ones.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from readie.document import read_document
from tests.conftest import Cluster
from tests.pages import ROOT, Terminal, clone_project, free_port, read_blocks
from tests.sandboxes import needs_runsc

pytestmark = [pytest.mark.guides, pytest.mark.timeout(900)]

EXAMPLES = {block.text.strip() for block in read_blocks(ROOT / "docs" / "reference.md") if block.language == "sh"}
#: In the order in which a set-up of one's own comes to be. What serves, goes on in the background.
PIPELINE = ["rootfs", "corpus", "analyze", "plan", "capture", "generation", "report", "verify", "doctor"]
WORKER = ["describe", "probe", "save", "restore", "doctor"]
ROUTER = ["import", "catalogues", "activate", "export", "explain", "workers", "calls", "sessions", "sql", "doctor"]
OFFLINE = ["check", "upgrade"]  # while no router has the database


def example_of(command: str) -> str:
    """The one example of a command such as `readie-router serve`."""
    (found,) = [example for example in EXAMPLES if f"{command} " in f"{example} "]
    return found


@pytest.fixture
def settings() -> dict[str, str]:
    """A terminal's: the commands are found, the router has a port of its own, and the worker little memory."""
    port = free_port()
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ROUTER_PORT": port,
        "ROUTER_URL": f"http://127.0.0.1:{port}",
        "WORKER_MEM_TOTAL": "4Gi",
    }


@pytest.fixture
def terminal(settings: dict[str, str], tmp_path: Path) -> Iterator[Terminal]:
    """In a folder with example code and a list of one package."""
    (tmp_path / "requirements.lock").write_text("numpy==2.4.6\n")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "first.py").write_text("import numpy\n")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "first.ipynb").write_text(
        '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "code", "metadata": {}, '
        '"outputs": [], "execution_count": null, "source": ["import numpy.fft"]}]}'
    )
    with closing(Terminal(tmp_path, settings, {"8700": settings["ROUTER_PORT"]})) as made:
        yield made


def test_the_example_of_each_command_runs(terminal: Terminal, tmp_path: Path, cluster: Cluster) -> None:
    """All of them, one after the other over one generation; each ends with 0."""
    left = set(EXAMPLES)

    def run(program: str, command: str, then: str = "") -> None:
        example = example_of(f"{program} {command}")
        script = example
        for text, typed in terminal.instead.items():
            script = script.replace(text, typed)
        terminal.run(script + then)
        left.discard(example)

    run("readie-router", "serve", " > router.log 2>&1 &\nuntil grep -s serving router.log; do sleep 1; done")
    for command in PIPELINE:
        run("readie-pipeline", command)
    digest = json.loads((tmp_path / "generation" / "manifest.json").read_bytes())["generation"]
    shutil.copy(tmp_path / "generation" / "checkpoints" / digest / "checkpoint_1" / "checkpoint.json", tmp_path)
    terminal.instead = {**terminal.instead, "…": digest}
    for command in WORKER:
        run("readie-worker", command)
    run("readie-worker", "serve", " > worker.log 2>&1 &\nuntil grep -s ready worker.log; do sleep 1; done")
    for folder in ("catalogues", "generation/cpu"):
        (tmp_path / folder).mkdir()
    shutil.copy(tmp_path / "generation" / "catalogue.json", tmp_path / "catalogues" / "cpu.json")
    shutil.copy(tmp_path / "generation" / "catalogue.json", tmp_path / "generation" / "cpu" / "catalogue.json")
    for command in ROUTER:
        run("readie-router", command)
        if command == "import":
            (imported,) = json.loads(terminal.run("readie-router catalogues --json"))
            terminal.instead = {**terminal.instead, "0123abcd4567": imported["sha256"][:12]}
    terminal.run("kill %1 %2\nwait")
    database_url = cluster.create()
    terminal.instead = {**terminal.instead, "postgresql+psycopg://readie@db/readie": f"'{database_url}'"}
    for command in OFFLINE:
        run("readie-router", command)
    cluster.drop(database_url)

    assert left == set()


def test_a_generation_in_gvisor_is_made_and_served_as_its_page_says(terminal: Terminal, tmp_path: Path) -> None:
    """Root filesystem, measurements, plan, captures and catalogue; then a call is restored in a sandbox."""
    needs_runsc()
    (block,) = [block for block in read_blocks(ROOT / "docs" / "gvisor.md") if "readie-worker serve" in block.text]
    make, runtime, serve = block.text.partition("RUNTIME=runsc ")
    (tmp_path / "call.py").write_text(
        "from readie import remote\n\n\n"
        "@remote(memory='512Mi', queue_timeout=60)\n"
        "def total():\n    import numpy\n\n    return int(numpy.arange(5).sum())\n\n\n"
        "call = total.submit()\nprint(call.result(), call.status.result.started.how)\n"
    )

    terminal.run("readie-router serve > router.log 2>&1 &\nuntil grep -s serving router.log; do sleep 1; done")
    terminal.run(make)
    terminal.run(f"{runtime}{serve.strip()} > worker.log 2>&1 &\nuntil grep -s ready worker.log; do sleep 1; done")
    answered = terminal.run("python call.py")
    terminal.run("kill %1 %2\nwait")
    clone_project(tmp_path / "readie")
    (tmp_path / "readie" / "generation").symlink_to(tmp_path / "generation")
    terminal.run("cd readie\nmake capture RUNTIME=runsc ROOTFS=generation/cpu/rootfs\ncd ..")

    manifest = json.loads(next((tmp_path / "generation/cpu/checkpoints").glob("*/manifest.json")).read_bytes())
    assert (manifest["host"]["runtime"], manifest["memory_source"]) == ("runsc", "VmRSS")
    assert len(read_document(tmp_path / "generation/cpu/catalogue.json").checkpoints) == 2
    assert answered == "10 restored\n"
    captured = json.loads((tmp_path / "readie" / "catalogues" / "cpu.json").read_bytes())
    assert [one["canonical"] for one in captured["checkpoints"]] == [[], ["numpy"]]
