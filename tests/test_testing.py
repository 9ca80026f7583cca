"""The pytest plugin `readie.testing`: what somebody else's tests get from the fixture `readie_local`."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from readie import testing

ROOT = Path(__file__).parent.parent

#: Somebody's project: a package that is called as one of ours, and tests of functions that run elsewhere.
PROJECT = {
    "pytest.ini": "[pytest]\n",
    "app/__init__.py": "",
    "app/numbers.py": "def double(number):\n    return 2 * number\n",
    "test_remote.py": """
import os

from app.numbers import double
from readie import remote


@remote
def work(number):
    return double(number), os.getpid()


@remote(session_id="notebook")
def remember(value):
    import builtins

    builtins.kept = [*getattr(builtins, "kept", []), value]
    return builtins.kept


def test_it_runs_in_another_process(readie_local):
    result, process = work(21)

    assert result == 42
    assert process != os.getpid()


def test_a_session_keeps_what_it_has(readie_local):
    remember("a")

    assert remember("b") == ["a", "b"]
    assert [call.state for call in readie_local.calls] == ["finished", "finished"]
    assert os.environ["ROUTER_URL"] == readie_local.url


def test_without_the_fixture_nothing_is_set():
    assert os.environ["ROUTER_URL"] == "http://elsewhere"
    assert "AUTH_TOKEN" not in os.environ
""",
}


def test_remote_functions_run_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results, output, exceptions, sessions, as docs/testing.md shows them; nothing runs on, and settings stay."""
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    (tmp_path / "test_page.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    for name, content in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setenv("ROUTER_URL", "http://elsewhere")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("AUTH_TOKEN", raising=False)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'made'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
    assert running_in(tmp_path / "made") == []


def running_in(folder: Path) -> list[str]:
    """The command lines of processes that have something to do with a folder."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in path.read_bytes():
                commands.append((path.parent / "cmdline").read_text())
        except OSError:
            continue
    return commands


def test_a_line_that_does_not_start_fails_the_test_with_its_reason(tmp_path: Path) -> None:
    """What the command said, such as which extra to install, is in the failure."""
    with (
        testing._process("no_such_part", "readie-router", tmp_path, {}) as (process, log),
        pytest.raises(pytest.fail.Exception, match=r"(?s)readie-router has ended:\n.*No module named no_such_part"),
    ):
        testing._wait_for(lambda: None, process, log, time.monotonic() + 30)


def test_a_process_ends_with_a_test_run_that_is_killed(tmp_path: Path) -> None:
    """A worker that would look for its router for ever is not left running where nobody ends it."""
    program = """
import os, signal, sys, time
from pathlib import Path
from readie import testing
settings = {"ROOTFS": sys.prefix, "WORKER_DIR": sys.argv[1] + "/worker", "ROUTER_URL": "http://127.0.0.1:1"}
starting = testing._process("worker", "readie-worker", Path(sys.argv[1]), settings)
process, log = starting.__enter__()
while process.poll() is None and "fork isolates nothing" not in log.read_text():
    time.sleep(0.05)
print(process.poll(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    deadline = time.monotonic() + 20
    while running_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert (killed.returncode, killed.stdout) == (-9, "None\n")
    assert running_in(tmp_path) == []
