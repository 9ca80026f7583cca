"""Many calls in sandboxes of gVisor: nothing of them stays behind. `make scale` runs it."""

import subprocess
from pathlib import Path

import pytest

from readie.manifest import CheckpointSpec
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


def count_left(runtime: RunscRuntime) -> int:
    """Processes and control groups of a runtime that has been closed."""
    listed = subprocess.run(["pgrep", "--full", "--count", runtime.prefix], capture_output=True, text=True, check=False)
    return int(listed.stdout) + len(control_groups(runtime.prefix))
