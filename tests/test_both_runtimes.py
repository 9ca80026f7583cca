"""What an agent does is the same under both runtimes: real routers, agents and sandboxes, by real calls."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import pytest

from readie import remote
from readie.errors import SessionConflict, SessionExpired
from readie.wire import CallView
from tests.lines import Line, end
from tests.sandboxes import needs_runsc, site_packages, wait_for
from tests.test_rootfs_build import make_wheel

PACKAGES = {
    "slow": "import time; time.sleep(0.4)\nvalue = 41",
    "refuser": """
        import os, readie
        readie.after_restore(lambda: os._exit(9))
    """,
    "old": "value = 'old'",
    "dawdler": "import time; time.sleep(2); value = 1",
}
CHECKPOINTS = {"checkpoint_0": [], "checkpoint_1": ["slow"], "checkpoint_2": ["refuser"], "checkpoint_3": ["old"]}
MIB = 2**20


@pytest.fixture(scope="module", params=["fork", "runsc"])
def line(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Line]:
    """A router, and what workers of a runtime need."""
    kind: Literal["fork", "runsc"] = request.param
    if kind == "runsc":
        needs_runsc()
    made = Line(tmp_path_factory.mktemp(kind), PACKAGES, CHECKPOINTS, kind=kind)
    with made.processes:
        yield made


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels: `fresh` needs `helper`, `broken` names a wheel that nobody has."""
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(folder, "fresh", {"fresh.py": b"import helper\nvalue = helper.value"}, needs="helper")
    make_wheel(folder, "helper", {"helper.py": b"value = 'brought along'"})
    make_wheel(folder, "old", {"old/__init__.py": b"value = 'new'"})
    make_wheel(folder, "broken", {"broken.py": b""}, needs="nobody-has-it")
    (folder / "spoiled-1.0-py3-none-any.whl").write_bytes(b"PK no wheel")
    return folder


@pytest.fixture(scope="module")
def worker(line: Line, wheels: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker that runs through this file's tests, which may install wheels."""
    with line.worker(PACKAGES_WHEELS=str(wheels), SANDBOX_IDLE_TTL="600", SANDBOXES_AHEAD="2") as process:
        yield process


@pytest.fixture
def ready(line: Line, worker: object, monkeypatch: pytest.MonkeyPatch) -> Line:
    """The shared router and worker, which `remote` calls go to."""
    monkeypatch.setenv("ROUTER_URL", line.url)
    return line


# ---- calls ----


def use_slow() -> int:
    import slow  # type: ignore[import-not-found]

    return int(slow.value) + 1


def test_a_call_runs_in_a_clone_of_the_checkpoint_that_was_chosen(ready: Line) -> None:
    """The result says from what it really started, and what each phase took."""
    result = end(remote(use_slow).submit())

    assert result.outcome == "returned"
    assert result.started
    assert (result.started.how, result.started.checkpoint_id) == ("restored", "checkpoint_1")
    assert result.phases.imports < 0.4  # which its import takes
    assert 0 < result.phases.restore < result.phases.ready


def test_what_was_predicted_stands_beside_what_was_measured(ready: Line) -> None:
    """In the record of a restored call: seconds to ready, by the catalogue and by the worker's clock."""
    call = remote(use_slow).submit()
    measured = end(call).phases.ready
    views = msgspec.json.decode(ready.get("/v1/calls") or b"[]", type=list[CallView])
    [view] = [view for view in views if view.call_id == call.call_id]

    assert view.checkpoint_id == "checkpoint_1"
    assert view.predicted_ready
    assert view.measured_ready
    assert view.predicted_ready > 0
    assert view.measured_ready == pytest.approx(measured)


def test_a_checkpoint_that_cannot_be_restored_costs_a_cold_start(ready: Line) -> None:
    """The call is served all the same, and its result says why it was cold."""
    result = end(remote(use_slow, checkpoint_id="checkpoint_2").submit())

    assert result.outcome == "returned"
    assert result.started
    assert result.started.how == "cold"
    assert "checkpoint_2" in (result.started.fallback or "")


def nap() -> str:
    print("asleep", flush=True)
    time.sleep(8)
    return "rested"


def test_output_arrives_while_the_call_runs(ready: Line) -> None:
    """What was printed can be read before the result is there."""
    call = remote(nap).submit()

    wait_for(lambda: any(piece.text == "asleep\n" for piece in call.status.output))
    assert call.status.state == "accepted"
    assert call.result() == "rested"


def eat(seconds: float = 0.0) -> int:
    eaten = [bytearray(b"x") * 1_000_000 for _ in range(400)]
    time.sleep(seconds)
    return len(eaten)


def test_a_call_over_its_memory_fails_and_the_worker_goes_on(ready: Line) -> None:
    """Out of memory, by name; the next call is served."""
    starved = end(remote(eat, memory="200Mi").submit(60))  # a runtime that only looks has the time to
    grown = end(remote(eat, memory="200Mi", max_memory="1Gi").submit())

    assert starved.problem
    assert starved.problem.type == "urn:readie:problem:out-of-memory"
    assert (grown.outcome, grown.problem) == ("returned", None)


def test_eight_calls_run_side_by_side(ready: Line) -> None:
    """Each with its own answer."""

    def double(number: int) -> int:
        import time

        time.sleep(0.5)
        return 2 * number

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(remote(double, memory="256Mi"), range(8)))

    assert found == [2 * number for number in range(8)]


def use_slow_once() -> bool:
    import slow

    used = hasattr(slow, "used")
    slow.used = True
    return used


def test_a_pool_serves_the_next_call_without_a_restore(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for is kept ready; the call that takes it says restored, and takes no time for that. No sandbox
    serves two calls.
    """
    monkeypatch.setenv("ROUTER_URL", line.url)
    with line.worker("pooled", POOL_SIZE="2", WORKER_MEM_TOTAL="64Gi"):
        pinned = remote(use_slow_once, checkpoint_id="checkpoint_1", memory="9Gi")  # more than the other worker has
        results, used = [], []

        def from_the_pool() -> bool:
            call = pinned.submit()
            results.append(end(call))
            used.append(call.result())
            return results[-1].phases.restore == 0.0

        wait_for(from_the_pool, 60)
        wait_for(from_the_pool, 60)

    assert {result.outcome for result in results} == {"returned"}
    assert set(used) == {False}
    assert results[-1].started
    assert results[-1].started.how == "restored"


# ---- packages ----


def use_fresh() -> tuple[str, str]:
    import fresh  # type: ignore[import-not-found]

    return fresh.value, fresh.__file__


def test_packages_are_installed_with_what_they_need(ready: Line) -> None:
    """From the operator's folder of wheels, without a network; the phase is timed."""
    result = end(remote(use_fresh, packages=["fresh"]).submit())
    value, path = remote(use_fresh, packages=["fresh"])()

    assert result.outcome == "returned", result.problem
    assert result.phases.install > 0
    assert value == "brought along"
    assert "packages" in path


def test_what_is_there_already_is_not_installed(ready: Line) -> None:
    """A requirement that the router keeps, and pip finds satisfied with all that it needs: the call runs."""
    site = site_packages(ready.rootfs) / "slow-1.0.dist-info"
    site.mkdir(exist_ok=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1.0\n")

    result = end(remote(use_slow, packages=["slow"], cold=True).submit())

    assert result.outcome == "returned", result.problem


def burrow() -> int:
    for _ in range(3000):
        os.mkdir("d")  # noqa: PTH102
        os.chdir("d")
    return 3000


def test_folders_however_deep_are_removed(ready: Line) -> None:
    """A call's folders end with it, and the worker goes on."""
    assert remote(burrow)() == 3000
    assert remote(use_slow)() == 42


def use_old() -> str:
    import old  # type: ignore[import-not-found]

    return str(old.value)


def test_an_installed_package_comes_before_that_of_the_root_filesystem(ready: Line) -> None:
    """It is first on sys.path, in this call alone."""
    assert remote(use_old, packages=["old>=1.0"], cold=True)() == "new"
    assert remote(use_old, cold=True)() == "old"


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("absent", "absent"),
        ("broken", "nobody-has-it"),
        ("spoiled", "spoiled"),
        ("fresh @ https://example.org/fresh-1.0-py3-none-any.whl", "never from an address"),
    ],
)
def test_what_cannot_be_installed_fails_the_call_with_the_installers_output(
    ready: Line, package: str, said: str
) -> None:
    """The function does not run; the problem says what pip said."""
    result = end(remote(use_slow, packages=[package]).submit())

    assert result.problem
    assert result.problem.type == "urn:readie:problem:install-failed"
    assert said in result.problem.detail


# ---- sessions ----


def remember(value: int) -> list[int]:
    import builtins

    kept: list[int] = builtins.__dict__.setdefault("KEPT", [])
    kept.append(value)
    return [os.getpid(), *kept]


def test_calls_of_a_session_share_a_sandbox(ready: Line) -> None:
    """What one leaves behind, the next one finds; another session, and a call without one, do not."""
    mine = remote(remember, session_id="mine")

    first, second = mine(1), mine(2)

    assert second == [*first, 2]
    assert remote(remember, session_id="yours")(3)[1:] == [3]
    assert remote(remember)(4)[1:] == [4]


def test_a_session_goes_on_after_an_exception(ready: Line) -> None:
    """And starts without a restore: its sandbox is there."""

    def fail() -> None:
        raise ValueError("for once")

    remote(remember, session_id="brave")(1)
    with pytest.raises(ValueError, match="for once"):
        remote(fail, session_id="brave")()
    result = end(remote(remember, session_id="brave").submit(2))

    assert result.outcome == "returned"
    assert result.phases.restore == 0.0
    assert result.started


def test_a_session_goes_on_after_a_result_that_cannot_be_sent_back(ready: Line) -> None:
    """The call fails; what the session holds is still there."""
    remote(remember, session_id="clumsy")(1)

    assert end(remote(lambda: (number for number in range(3)), session_id="clumsy").submit()).outcome == "failed"
    assert remote(remember, session_id="clumsy")(2)[1:] == [1, 2]


def import_slowly() -> int:
    import dawdler  # type: ignore[import-not-found]

    return int(dawdler.value)


def test_a_call_that_was_given_up_before_it_ran_costs_no_session(ready: Line) -> None:
    """It may still import when the next one comes: that waits for it."""
    for session_id in (f"patient-{number}" for number in range(12)):
        remote(remember, session_id=session_id)(1)
        given_up = remote(import_slowly, session_id=session_id).submit()
        given_up.cancel()
        assert end(given_up).outcome == "cancelled"
        with contextlib.suppress(SessionExpired):  # the worker was faster: it had taken the call, and ended the sandbox
            assert remote(remember, session_id=session_id)(2)[1:] == [1, 2]
            return
    pytest.fail("the worker took every call before it was cancelled")


def knock(url: str) -> int:
    import urllib.request

    with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return int(answer.status)


def test_whether_a_call_can_reach_the_router_itself(ready: Line) -> None:
    """Under gVisor it has no network, on which the API would be; fork isolates nothing."""
    knocked = remote(knock).submit(ready.url)

    assert end(knocked).outcome == {"fork": "returned", "runsc": "raised"}[ready.kind]


def test_a_session_that_takes_more_than_it_may_while_it_is_idle_is_ended(ready: Line) -> None:
    """Its threads go on after its calls; its memory is looked after all the same."""

    def grow() -> None:
        import threading
        import time

        def eat() -> None:
            time.sleep(0.5)
            eaten = [bytearray(b"x") * 1_000_000 for _ in range(400)]
            time.sleep(60)
            del eaten

        threading.Thread(target=eat, daemon=True).start()

    remote(grow, session_id="greedy", memory="200Mi")()

    wait_for(lambda: ready.session("greedy") == "expired")


def test_a_session_ends_with_a_sandbox_that_died(ready: Line) -> None:
    """The call that killed it fails; the next one hears that the session has expired."""
    remote(remember, session_id="doomed")(1)

    assert end(remote(lambda: os._exit(3), session_id="doomed").submit()).outcome == "failed"
    with pytest.raises(SessionExpired):
        remote(remember, session_id="doomed")(2)


def test_a_session_that_is_ended_gives_its_memory_back(ready: Line) -> None:
    """By DELETE: its sandbox ends, and the worker's report counts it no more."""
    remote(remember, session_id="brief", memory="300Mi")(1)
    wait_for(lambda: ready.view().memory_used >= 300 * MIB)
    used = ready.view().memory_used

    assert httpx.delete(f"{ready.url}/v1/sessions/brief").is_success

    wait_for(lambda: ready.view().memory_used <= used - 300 * MIB)
    with pytest.raises(SessionExpired):
        remote(remember, session_id="brief")(2)


def test_an_idle_session_is_reaped(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SANDBOX_IDLE_TTL its sandbox ends, and so does the session."""
    monkeypatch.setenv("ROUTER_URL", line.url)
    with line.worker("reaper", SANDBOX_IDLE_TTL="1", WORKER_MEM_TOTAL="64Gi"):
        wait_for(lambda: line.view("reaper"))
        remote(remember, session_id="idle", memory="9Gi")(1)  # more than the other worker has
        wait_for(lambda: line.view("reaper").sandboxes == 0)

        with pytest.raises(SessionExpired):
            remote(remember, session_id="idle")(2)


def test_packages_of_a_session_stay_installed(ready: Line) -> None:
    """The next call has them, and installs nothing."""
    first = end(remote(use_fresh, session_id="packed", packages=["fresh"]).submit())
    second = end(remote(use_fresh, session_id="packed", packages=["fresh"]).submit())

    assert first.phases.install > 0
    assert (second.outcome, second.phases.install) == ("returned", 0.0)


def test_a_session_is_not_restored_from_elsewhere(ready: Line) -> None:
    """A call that wants another checkpoint than the session's sandbox came from is refused."""
    remote(remember, session_id="fixed", checkpoint_id="checkpoint_1")(1)

    with pytest.raises(SessionConflict):
        remote(remember, session_id="fixed", checkpoint_id="checkpoint_3")(2)


# ---- nothing stays behind ----


def sandboxes_of(line: Line, name: str) -> list[str]:
    folder = line.folder / name / "runtime"
    return sorted(path.name for part in ("sandboxes", "bundles") for path in (folder / part).glob("*"))


def test_a_worker_that_stops_leaves_no_sandbox(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of its sessions, nor of its pool, nor those made ahead."""
    monkeypatch.setenv("ROUTER_URL", line.url)
    with line.worker("tidy", POOL_SIZE="1", WORKER_MEM_TOTAL="64Gi"):
        wait_for(lambda: line.view("tidy"))
        remote(remember, session_id="last", memory="9Gi")(1)
        wait_for(lambda: sandboxes_of(line, "tidy"))

    assert sandboxes_of(line, "tidy") == []


def test_a_worker_that_was_killed_leaves_nothing_to_the_next(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sandboxes are removed at the next start, and that serves calls."""
    monkeypatch.setenv("ROUTER_URL", line.url)
    with line.worker("phoenix", WORKER_MEM_TOTAL="64Gi") as process:
        wait_for(lambda: line.view("phoenix"))
        remote(remember, session_id="burnt", memory="9Gi")(1)
        left: Any = sandboxes_of(line, "phoenix")
        process.kill()
        process.wait()

    with line.worker("phoenix", WORKER_MEM_TOTAL="64Gi"):
        assert not set(left) & set(sandboxes_of(line, "phoenix"))
        assert remote(remember, memory="9Gi")(1)[1:] == [1]
        assert "removed what an earlier run left" in line.log("phoenix")
