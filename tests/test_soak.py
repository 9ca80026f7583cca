"""A minute of the soak: routers and agents are killed by turns, and every call has one outcome that may be."""

import json
import subprocess
import sys

import pytest

from tests.routers import ROOT


@pytest.mark.timeout(300)
def test_a_minute_of_calls_while_things_are_killed() -> None:
    """No call is lost, runs twice or ends as it may not; no worker has more than it has room for; `check` finds nothing.

    There are more clients than there is room for calls.
    """
    options = ["--seconds", "60", "--kill-every", "10", "--routers", "2", "--agents", "4", "--clients", "6"]
    command = [sys.executable, "-m", "benchmarks.soak", *options, "--room", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert done.returncode == 0
    assert sum(found["kills"].values()) >= 4
    assert found["calls"] == sum(found["outcomes"].values()) > 100
