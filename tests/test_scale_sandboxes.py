"""Many calls in sandboxes of gVisor, of which nothing stays behind, and how fast they start. `make scale` runs it."""

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from readie.manifest import CheckpointSpec
from tests.pages import ROOT, Terminal, clone_project, read_blocks
from tests.sandboxes import control_groups, make_sealed_rootfs, needs_runsc
from tests.test_runsc import check_nothing_stays
from worker.runsc import Options, RunscRuntime

pytestmark = pytest.mark.scale
needs_runsc()

CALLS = 500
SPEC = CheckpointSpec(checkpoint_id="empty", generation="g")


@pytest.mark.parametrize("at_once", [1, 8])
def test_500_calls_leave_nothing(tmp_path: Path, at_once: int) -> None:
    """In a row, and eight at a time: processes, control groups, mounts, files, descriptors and threads as before."""
    runtime = RunscRuntime(make_sealed_rootfs(tmp_path / "rootfs", {}), tmp_path, Options(ahead=2))
    runtime.save(SPEC, tmp_path / "checkpoint", timeout=60)
    runtime.load(SPEC, tmp_path / "checkpoint", timeout=60)

    try:
        check_nothing_stays(runtime, CALLS, at_once)
    finally:
        runtime.close()
    assert count_left(runtime) == 0


@pytest.mark.timeout(3600)
def test_sandboxes_are_measured_as_the_page_says(tmp_path: Path) -> None:
    """The commands of docs/gvisor.md end with 0, which is to say that what they hold of restores is so here."""
    clone_project(tmp_path / "readie")
    (commands,) = [block.text for block in read_blocks(ROOT / "docs" / "gvisor.md") if "sandboxes.py" in block.text]
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    with closing(Terminal(tmp_path / "readie", environment, {})) as terminal:
        terminal.run(commands, seconds=3600)

    measured = json.loads((tmp_path / "readie" / "benchmarks" / "sandboxes.json").read_bytes())
    page = (tmp_path / "readie" / "docs" / "gvisor.md").read_text(encoding="utf-8")
    assert len(measured["cases"]) == 12
    assert f"Medians of {measured['rounds']} starts each" in page
    assert measured["machine"]["date"] in page


@pytest.mark.timeout(3600)
def test_the_demo_runs_in_gvisor(tmp_path: Path) -> None:
    """`make demo RUNTIME=runsc` in a clean clone: each of its calls is restored, at least five times faster in the median."""
    clone_project(tmp_path / "readie")
    with closing(Terminal(tmp_path / "readie", {}, {})) as terminal:
        printed = terminal.run("make demo RUNTIME=runsc", seconds=3600)

    (speed_up,) = re.findall(r"^demo: 10 calls, 10 from a checkpoint, median speed-up (\d+)×$", printed, re.MULTILINE)
    assert int(speed_up) >= 5


def count_left(runtime: RunscRuntime) -> int:
    """Processes and control groups of a runtime that has been closed."""
    listed = subprocess.run(["pgrep", "--full", "--count", runtime.prefix], capture_output=True, text=True, check=False)
    return int(listed.stdout) + len(control_groups(runtime.prefix))
