"""The agent: which checkpoints it offers, how it carries out placements, and how it meets a router that is away."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from readie import remote
from readie.client import Call
from readie.errors import (
    BadSetting,
    CallCancelled,
    DatabaseUnavailable,
    InstallFailed,
    PayloadTooLarge,
    RateLimited,
    ReadieError,
    RouterUnreachable,
    UnknownPlacement,
    WorkerLost,
)
from readie.files import write_json
from readie.flavor import Flavor
from readie.manifest import CheckpointSpec, Host
from readie.wire import Output
from tests.lines import GENERATION, HOST, Line, end, write_generation
from tests.sandboxes import alive, wait_for
from worker.checkpoints import find_checkpoints
from worker.output import PIECE, OutputSender
from worker.router import persist
from worker.settings import read_worker_settings

# ---- which checkpoints are offered ----


def test_checkpoints_of_just_such_a_worker_are_offered(tmp_path: Path) -> None:
    """Several generations side by side, each with its checkpoints."""
    write_generation(tmp_path, {"checkpoint_0": [], "checkpoint_1": ["numpy"]})
    write_generation(tmp_path, {"checkpoint_0": []}, generation="b" * 64)

    held, warnings = find_checkpoints(tmp_path, HOST, Flavor.CPU)

    assert [each.spec.key for each in held] == [
        ("a" * 64, "checkpoint_0"),
        ("a" * 64, "checkpoint_1"),
        ("b" * 64, "checkpoint_0"),
    ]
    assert held[1].spec.canonical == ("numpy",)
    assert warnings == []


def test_a_generation_of_another_cpu_limit_is_offered_with_a_warning(tmp_path: Path) -> None:
    """It can be restored; what was predicted will not hold."""
    write_generation(tmp_path, {"checkpoint_0": []}, host=msgspec.structs.replace(HOST, cpus=0.5))

    held, (warning,) = find_checkpoints(tmp_path, HOST, Flavor.CPU)

    assert [one.spec.checkpoint_id for one in held] == ["checkpoint_0"]
    assert "it was measured with SANDBOX_CPUS=0.5, this worker's is 0: predictions will not hold" in warning


@pytest.mark.parametrize(
    "field",
    [field for field in msgspec.structs.fields(Host) if field.name != "cpus"],
    ids=lambda field: str(field.name),
)
def test_a_host_that_differs_in_any_field_is_not_served(tmp_path: Path, field: msgspec.structs.FieldInfo) -> None:
    """The warning names the field and both values; nothing of that generation is offered."""
    other = {"runtime": "runsc", "protocol": 2}.get(field.name, "another")
    write_generation(tmp_path, {"checkpoint_0": []}, host=msgspec.structs.replace(HOST, **{field.name: other}))

    held, warnings = find_checkpoints(tmp_path, HOST, Flavor.CPU)

    assert held == []
    assert len(warnings) == 1
    assert f"{field.name} is {other}, this worker's is {getattr(HOST, field.name)}" in warnings[0]


@pytest.mark.parametrize(("captured", "worker"), [(Flavor.GPU, Flavor.CPU), (Flavor.CPU, Flavor.GPU)])
def test_a_generation_of_the_other_flavor_is_never_offered(tmp_path: Path, captured: Flavor, worker: Flavor) -> None:
    """A gpu checkpoint is not for cpu sandboxes, nor the other way round."""
    write_generation(tmp_path, {"checkpoint_0": []}, flavor=captured)

    held, warnings = find_checkpoints(tmp_path, HOST, worker)

    assert held == []
    assert f"flavor is {captured}, this worker's is {worker}" in warnings[0]


def test_what_is_broken_on_disk_is_left_out_with_a_warning(tmp_path: Path) -> None:
    """A manifest that is missing or bad, a folder by another name, a checkpoint that is gone or another's."""
    place = write_generation(tmp_path, {"good": [], "gone": [], "other": []})
    (place / "gone" / "checkpoint.json").unlink()
    other = CheckpointSpec(checkpoint_id="good", generation=GENERATION)
    write_json(place / "other" / "checkpoint.json", other)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "manifest.json").write_text("{}")
    write_generation(tmp_path, {"checkpoint_0": []}, generation="b" * 64).rename(tmp_path / "renamed")

    held, warnings = find_checkpoints(tmp_path, HOST, Flavor.CPU)

    assert [each.spec.checkpoint_id for each in held] == ["good"]
    assert len(warnings) == 5
    for place_named in ("empty/manifest.json", "bad/manifest.json", "renamed", "gone", "other/checkpoint.json"):
        assert any(place_named in warning for warning in warnings), place_named


# ---- settings ----


@pytest.mark.parametrize(
    ("variable", "value", "accepted"),
    [
        ("WORKER_FLAVOR", "tpu", "cpu or gpu"),
        ("WORKER_MEM_TOTAL", "16 GB", "a size such as 16Gi"),
        ("WORKER_MAX_SANDBOXES", "-1", "a whole number from 0"),
        ("WORKER_ID", "a b", "letters, digits"),
        ("ROUTER_URL", "localhost:8700", "a URL such as"),
        ("RUNTIME", "docker", "fork or runsc"),
        ("START_TIMEOUT", "0", "seconds above 0"),
        ("MAX_PAYLOAD", "0", "a size"),
        ("CHECKPOINT_DIR", "/nowhere", "manifest.json"),
        ("WORKER_GPU_TOTAL", "16Gi", "WORKER_FLAVOR is cpu"),
    ],
)
def test_a_bad_setting_names_variable_value_and_what_is_accepted(variable: str, value: str, accepted: str) -> None:
    """One message that says all three."""
    with pytest.raises(BadSetting) as caught:
        read_worker_settings({"ROOTFS": "rootfs", variable: value})

    assert variable in str(caught.value)
    assert value in str(caught.value) or variable == "WORKER_GPU_TOTAL"
    assert accepted in str(caught.value)


def test_the_root_filesystem_and_a_gpus_memory_have_no_default() -> None:
    """What cannot be guessed has to be set."""
    with pytest.raises(BadSetting, match="ROOTFS is not set"):
        read_worker_settings({})
    with pytest.raises(BadSetting, match="WORKER_GPU_TOTAL is not set"):
        read_worker_settings({"ROOTFS": "rootfs", "WORKER_FLAVOR": "gpu"})


def test_settings_have_units_and_defaults() -> None:
    """Sizes become bytes; the id is the host's name, the folder is named for the id."""
    settings = read_worker_settings({"ROOTFS": "rootfs", "WORKER_MEM_TOTAL": "4Gi", "WORKER_ID": "w-1"})

    assert settings.worker_mem_total == 4 * 2**30
    assert settings.folder.name == "readie-w-1"
    assert read_worker_settings({"ROOTFS": "rootfs"}).worker_id


# ---- output and patience ----


def test_output_is_sent_in_order_and_in_pieces() -> None:
    """What comes together travels together, streams apart; long text is cut; numbers count from 0."""
    sent: list[Output] = []
    gate = threading.Event()

    def send(output: Output) -> None:
        gate.wait(5)
        sent.append(output)

    sender = OutputSender(send, 10_000_000)
    sender.add("stdout", "first ")
    wait_for(lambda: not sender.waiting)
    for stream, text in (("stdout", "a"), ("stdout", "b"), ("stderr", "c"), ("stdout", "d" * (PIECE + 1))):
        sender.add(stream, text)  # type: ignore[arg-type]
    gate.set()
    sender.finish()

    assert [(output.stream, output.text) for output in sent] == [
        ("stdout", "first "),
        ("stdout", "ab"),
        ("stderr", "c"),
        ("stdout", "d" * PIECE),
        ("stdout", "d"),
    ]
    assert [output.sequence for output in sent] == [0, 1, 2, 3, 4]


def test_output_beyond_the_limit_is_dropped_and_said_so() -> None:
    """Everything up to the limit, then one line, then nothing."""
    sent: list[Output] = []
    sender = OutputSender(sent.append, 10)
    sender.add("stdout", "12345678")
    sender.add("stdout", "9012345")
    sender.add("stdout", "more")
    sender.finish()

    text = "".join(output.text for output in sent)
    assert text.startswith("1234567890\n[readie: output beyond 10 characters is dropped]")
    assert "more" not in text


def test_output_that_nobody_wants_does_not_hold_up_the_result() -> None:
    """When the router refuses a piece the rest is dropped."""

    def refuse(_: Output) -> None:
        raise UnknownPlacement("gone")

    sender = OutputSender(refuse, 100)
    sender.add("stdout", "text")
    sender.finish()


@pytest.mark.parametrize("error", [RouterUnreachable("away"), DatabaseUnavailable("away"), RateLimited("slow down")])
def test_a_result_is_kept_however_long_nobody_can_take_it(error: ReadieError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the router answers that its database is away: that is no refusal."""
    pauses: list[float] = []
    monkeypatch.setattr("worker.router.time.sleep", pauses.append)

    def answer_at_last() -> str:
        if len(pauses) < 100:
            raise error
        return "taken"

    assert persist(answer_at_last, lambda: False) == "taken"
    assert max(pauses) == 2.0


def test_a_router_that_is_away_is_asked_again_until_it_answers() -> None:
    """What it then answers counts, also when it refuses; without patience the first failure does."""
    tries: list[int] = []

    def answer_at_last() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise RouterUnreachable("away")
        return "here"

    def refuse() -> None:
        raise UnknownPlacement("gone")

    def away() -> None:
        raise RouterUnreachable("away")

    assert persist(answer_at_last, lambda: False) == "here"
    assert len(tries) == 3
    with pytest.raises(UnknownPlacement):
        persist(refuse, lambda: False)
    with pytest.raises(RouterUnreachable):
        persist(away, lambda: True)


# ---- with a real router ----

PACKAGES = {
    "slow": "import time; time.sleep(0.4)\nvalue = 41",
    "crash_on_fork": """
        import os
        os.register_at_fork(after_in_child=lambda: os._exit(9))
    """,
}
CHECKPOINTS = {
    "checkpoint_0": [],
    "checkpoint_1": ["slow"],
    "checkpoint_2": ["crash_on_fork"],
    "checkpoint_3": ["slow"],
}
MANY = 8 * 2**20


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """A router that runs through this file's tests."""
    made = Line(tmp_path_factory.mktemp("agent"), PACKAGES, CHECKPOINTS, lost="checkpoint_3")
    with made.processes:
        yield made


@pytest.fixture(scope="class")
def shared_worker(line: Line) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker that runs through a class of tests, the only one meanwhile."""
    with line.worker() as process:
        yield process


@pytest.fixture
def ready(line: Line, shared_worker: object, monkeypatch: pytest.MonkeyPatch) -> Line:
    """The shared router and worker, which `remote` calls go to."""
    monkeypatch.setenv("ROUTER_URL", line.url)
    return line


def use_slow() -> int:
    import slow  # type: ignore[import-not-found]

    return int(slow.value) + 1


def nap(seconds: float) -> str:

    print("asleep", flush=True)
    time.sleep(seconds)
    return "rested"


def started(call: "Call[Any]") -> None:
    wait_for(lambda: any("asleep" in piece.text for piece in call.status.output))


def sandboxes_of(line: Line, name: str) -> list[int]:
    """Process ids of a worker's sandboxes and zygotes."""
    files = (line.folder / name).glob("runtime/**/process")
    return [int(file.read_text().split()[0]) for file in files]


class TestPlacements:
    """Calls are carried out as the router orders, and what came of them is sent, whatever that is."""

    def test_a_restored_call_does_not_wait_for_imports(self, ready: Line) -> None:
        """The sandbox is a clone of the checkpoint that the router chose; every phase is in the result."""
        warm = [end(remote(use_slow).submit()) for _ in range(3)]
        cold = end(remote(use_slow, cold=True).submit())

        assert {result.outcome for result in warm} == {"returned"}
        started = warm[0].started
        assert started
        assert (started.how, started.generation, started.checkpoint_id) == (
            "restored",
            ready.generation,
            "checkpoint_1",
        )
        assert cold.started
        assert (cold.started.how, cold.started.fallback) == ("cold", None)
        assert min(result.phases.imports for result in warm) < 0.4 <= cold.phases.imports  # what importing it takes
        for result in (*warm, cold):
            assert 0 < result.phases.restore <= result.phases.ready

    def test_a_checkpoint_that_is_listed_and_not_held_falls_back_to_a_cold_start(self, ready: Line) -> None:
        """The call is served all the same, and the result says why it was cold."""
        result = end(remote(use_slow, checkpoint_id="checkpoint_3").submit())

        assert result.outcome == "returned"
        assert result.started
        assert result.started.how == "cold"
        assert "checkpoint_3" in (result.started.fallback or "")
        assert "does not hold it" in (result.started.fallback or "")

    def test_a_checkpoint_that_cannot_be_restored_is_given_up_after_three_failures(self, ready: Line) -> None:
        """Each call is served cold and says so; after the third failure the checkpoint is no longer offered."""
        assert "checkpoint_2" in ready.offered()
        fallbacks: list[str] = []
        while len(fallbacks) < 3:
            wait_for(lambda: "checkpoint_2" in ready.offered())
            result = end(remote(nap, checkpoint_id="checkpoint_2").submit(0))
            assert result.outcome == "returned"
            assert result.started
            if "could not be restored" in (result.started.fallback or ""):  # else the router did not know of it yet
                fallbacks.append(result.started.fallback or "")

        assert all("exit code 9" in fallback for fallback in fallbacks)
        wait_for(lambda: "checkpoint_2" not in ready.offered())
        late = end(remote(nap, checkpoint_id="checkpoint_2").submit(0))
        assert late.started
        assert "failed 3 times" in (late.started.fallback or "")
        assert "no longer offered" in ready.log()

    def test_packages_are_refused_as_long_as_the_operator_allows_no_source(self, ready: Line) -> None:
        """The call fails before anything runs, and the error says what is missing."""
        with pytest.raises(InstallFailed, match="no index and no wheel folder"):
            remote(nap, packages=["absent>=1"])(0)

    def test_a_payload_over_the_workers_limit_is_refused(self, ready: Line) -> None:
        """The worker's MAX_PAYLOAD may be lower than the router's."""
        with pytest.raises(PayloadTooLarge, match=f"MAX_PAYLOAD is {MANY}"):
            remote(len)(bytes(MANY))

    def test_a_running_call_counts_and_can_be_cancelled(self, ready: Line) -> None:
        """The worker reports its sandbox with the call's budget; cancelled, the sandbox is ended soon."""
        call = remote(nap, memory="300M").submit(120)

        wait_for(lambda: ready.view().memory_used == 300_000_000)
        call.cancel()
        with pytest.raises(CallCancelled):
            call.result()
        wait_for(lambda: ready.view().memory_used == 0 and ready.view().sandboxes == 0)
        wait_for(lambda: not list((ready.folder / "one" / "runtime" / "sandboxes").iterdir()))

    def test_a_zygote_that_dies_is_started_again(self, ready: Line) -> None:
        """Unasked, and what it is for is offered again."""
        zygotes = {
            path.parent: int(path.read_text().split()[0])
            for path in (ready.folder / "one").glob("runtime/zygote-*/process")
        }
        assert zygotes
        for pid in zygotes.values():
            os.kill(pid, signal.SIGKILL)

        def revived() -> bool:
            result = end(remote(use_slow, checkpoint_id="checkpoint_1").submit())
            return bool(result.outcome == "returned" and result.started and result.started.how == "restored")

        wait_for(revived, 40)


class TestStopsAndRestarts:
    """Whatever stops, a call's fate is told, and nothing stays behind."""

    @pytest.fixture(autouse=True)
    def _router_url(self, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ROUTER_URL", line.url)

    def test_a_worker_that_was_killed_leaves_nothing_and_comes_back(self, line: Line) -> None:
        """Its sandboxes end with it; the next run under its name removes their folders and serves calls."""
        with line.worker("phoenix") as process:
            call = remote(nap).submit(100)
            started(call)
            pids = sandboxes_of(line, "phoenix")
            assert len(pids) >= 2
            process.kill()
            process.wait()
            wait_for(lambda: not any(alive(pid) for pid in pids))
            assert list((line.folder / "phoenix" / "runtime" / "sandboxes").iterdir())
        with line.worker("phoenix"):
            assert list((line.folder / "phoenix" / "runtime" / "sandboxes").iterdir()) == []
            assert "removed what an earlier run left" in line.log("phoenix")
            with pytest.raises(WorkerLost):
                call.result()
            assert remote(nap)(0) == "rested"

    def test_a_worker_that_is_stopped_twice_ends_what_runs(self, line: Line) -> None:
        """The first signal lets calls finish, the second does not; nothing stays behind, and that is a success."""
        with line.worker("hasty") as process:
            call = remote(nap).submit(100)
            started(call)
            pids = sandboxes_of(line, "hasty")
            process.send_signal(signal.SIGINT)
            wait_for(lambda: line.view("hasty").state == "removed")
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)

            assert process.wait(20) == 0
            with pytest.raises(WorkerLost, match="stopped"):
                call.result()
            assert not any(alive(pid) for pid in pids)
            assert list((line.folder / "hasty" / "runtime" / "sandboxes").iterdir()) == []
            assert "Traceback" not in line.log("hasty")

    def test_a_worker_tells_a_router_that_refuses_it_from_one_that_is_away(self, line: Line) -> None:
        """A wrong token is named in the log, and the worker goes on trying until it is stopped."""
        settings = {"ROUTER_URL": line.url, "WORKER_DIR": str(line.folder / "wrong"), "ROOTFS": str(line.rootfs)}
        with line.process("worker.cli", "wrong", settings | {"WORKER_TOKEN": "wrong"}) as process:
            wait_for(lambda: "router refused" in line.log("wrong"), 40)
            assert "WORKER_TOKEN" in line.log("wrong")
            process.terminate()
            assert process.wait(20) == 0

    def test_a_result_outlives_a_restart_of_the_router(self, line: Line) -> None:
        """The call runs on while the router is away, and its result arrives afterwards."""
        with line.worker("patient"):
            call = remote(nap).submit(2)
            started(call)
            line.restart_router(pause=2.5)
            assert call.result() == "rested"
            wait_for(lambda: "router reached again" in line.log("patient"))
