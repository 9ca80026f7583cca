"""`readie-worker` on the command line: what the pipeline reads, and what people see when something is wrong."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes import make_rootfs

PACKAGES = {
    "light": "value = 1",
    "blob": "data = b'x' * 20_000_000",
    "broken": "1 / 0",
    "slow": "import time; time.sleep(30)",
}
GENERATION = "a" * 64


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rootfs(tmp_path_factory.mktemp("cli") / "rootfs", PACKAGES)


def worker(*arguments: object, stdin: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs `readie-worker` to its end."""
    names = ("WORKER_", "ROUTER_", "ROOTFS", "CHECKPOINT_DIR", "RUNTIME")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    command = [sys.executable, "-m", "worker.cli", *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, env={**clean, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def answer(*arguments: object, **options: str) -> dict[str, Any]:
    """What a command that succeeds prints as JSON."""
    done = worker(*arguments, "--json", **options)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def write_checkpoint(path: Path, *canonical: str, **fields: object) -> Path:
    spec = {"checkpoint_id": "checkpoint_1", "generation": GENERATION, "flavor": "cpu", "canonical": canonical}
    path.write_text(json.dumps(spec | {"ballast_mb": 0} | fields))
    return path


def test_describe_says_what_checkpoints_are_bound_to(rootfs: Path) -> None:
    """The same every time; ROOTFS can take the option's place; people get lines, programs JSON."""
    description = answer("describe", "--rootfs", rootfs, "--runtime", "fork")

    assert description == answer("describe", ROOTFS=str(rootfs))
    assert set(description) == {"host", "markers", "preload", "memory_source"}
    assert description["host"]["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert len(description["preload"]) > 100
    assert f"rootfs_digest    {description['host']['rootfs_digest']}" in worker("describe", "--rootfs", rootfs).stdout


def test_probe_answers_each_request_in_order(rootfs: Path) -> None:
    """One JSON line for each request, with its id, whether the import worked or not; blank lines are nothing."""
    requests = [
        {"id": 1, "modules": ["light"], "mode": "time"},
        {"id": 2, "modules": ["blob"], "mode": "memory"},
        {"id": 3, "modules": ["broken"]},
        {"id": 4, "modules": ["light"], "mode": "edges"},
        {"id": 5, "modules": ["blob", "light"], "mode": "plain"},
        {"id": 6, "modules": ["slow"], "mode": "plain"},
    ]
    lines = "\n\n".join(json.dumps(request) for request in requests)

    done = worker("probe", "--rootfs", rootfs, "--timeout", "2", "--memory", "1Gi", stdin=lines)

    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [(each["id"], each["ok"]) for each in answers] == [
        (1, True),
        (2, True),
        (3, False),
        (4, True),
        (5, True),
        (6, False),
    ]
    assert answers[0]["modules"][0] | {"seconds": 0, "file": None} == {
        "name": "light",
        "seconds": 0,
        "kb": None,
        "threads": None,
        "asks": None,
        "stdlib": False,
        "file": None,
    }
    assert answers[1]["modules"][0]["kb"] == pytest.approx(19_531, abs=100)
    assert answers[2]["failure"] == {"kind": "raised", "detail": "import broken: ZeroDivisionError: division by zero"}
    assert answers[3]["modules"][0]["asks"] == []
    assert answers[4]["rss_mb"] == pytest.approx(20, abs=0.5)
    assert answers[5]["failure"] == {"kind": "timeout", "detail": "it took longer than 2 s"}


def test_save_and_restore_a_checkpoint(rootfs: Path, tmp_path: Path) -> None:
    """The folder is written, its memory measured, and each restore is timed to the first answer; cold starts too."""
    spec = write_checkpoint(tmp_path / "spec.json", "blob")
    place = ["--rootfs", rootfs, "--checkpoint-dir", tmp_path / "checkpoints"]

    saved = answer("save", *place, "--spec", spec)
    restored = answer("restore", *place, "--generation", GENERATION, "--checkpoint", "checkpoint_1", "--times", 5)
    cold = answer("restore", *place, "--cold", "--times", 2)

    assert saved | {"seconds": 0, "measured_mb": 0} == {
        "ok": True,
        "checkpoint_id": "checkpoint_1",
        "measured_mb": 0,
        "seconds": 0,
        "threads": 1,
    }
    assert 20 <= saved["measured_mb"] < 22
    assert json.loads((tmp_path / "checkpoints" / GENERATION / "checkpoint_1" / "checkpoint.json").read_text()) == {
        **json.loads(spec.read_text()),
        "ballast_mb": 0.0,
        "resources": "",
    }
    assert len(restored["seconds"]) == 5
    assert 0 < min(restored["seconds"]) < min(cold["seconds"])


def test_what_takes_a_while_is_said_in_a_line(rootfs: Path, tmp_path: Path) -> None:
    """On stderr, where it is no terminal; stdout has the result alone."""
    place = ["--rootfs", rootfs, "--checkpoint-dir", tmp_path / "checkpoints"]
    saved = worker("save", *place, "--spec", write_checkpoint(tmp_path / "spec.json", "light"))
    timed = worker("restore", *place, "--cold", "--times", 1)

    assert saved.stderr.splitlines()[-1] == "Capturing checkpoint_1 …"
    assert re.fullmatch(r"checkpoint_1: \d+\.\d MB in \d+\.\d\d s\n", saved.stdout)
    assert timed.stderr.splitlines()[-1] == "Timing cold starts …"
    assert timed.stdout.startswith("median ")


def test_a_failed_capture_leaves_what_was_there(rootfs: Path, tmp_path: Path) -> None:
    """It says why, in JSON and in words, and neither writes half a checkpoint nor removes a good one."""
    place = ["--rootfs", rootfs, "--checkpoint-dir", tmp_path / "checkpoints"]
    answer("save", *place, "--spec", write_checkpoint(tmp_path / "good.json", "light"))

    done = worker("save", *place, "--spec", write_checkpoint(tmp_path / "bad.json", "light", "broken"), "--json")

    assert done.returncode == 1
    detail = "import broken: ZeroDivisionError: division by zero"
    assert json.loads(done.stdout) == {"ok": False, "failure": {"kind": "raised", "detail": detail}}
    assert f"readie-worker: checkpoint_1: {detail}" in done.stderr
    folder = tmp_path / "checkpoints" / GENERATION
    assert [path.name for path in folder.iterdir()] == ["checkpoint_1"]
    assert json.loads((folder / "checkpoint_1" / "checkpoint.json").read_text())["canonical"] == ["light"]


@pytest.mark.parametrize("generation", ["../elsewhere", "", "a/b", "."])
def test_a_checkpoint_is_saved_within_its_folder(tmp_path: Path, generation: str, rootfs: Path) -> None:
    """A generation names a folder, and none but one of the checkpoints' own."""
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"checkpoint_id": "c", "generation": generation, "canonical": []}))
    folder = tmp_path / "a" / "checkpoints"
    done = worker("save", "--rootfs", str(rootfs), "--checkpoint-dir", str(folder), "--spec", str(spec))

    assert (done.returncode, "spec.json: " in done.stderr) == (2, True)
    assert not (tmp_path / "a").exists()


def test_what_is_no_python_is_told_so(tmp_path: Path) -> None:
    """A bin/python that answers something else is one message."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho hello\n")
    python.chmod(0o755)
    done = worker("describe", "--rootfs", str(tmp_path))

    assert (done.returncode, done.stdout) == (1, "")
    assert "bin/python does not answer as a Python does: b'hello\\n'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["describe"], 2, "--rootfs"),
        (["describe", "--rootfs", "/nowhere"], 1, "/nowhere/bin/python is not an executable"),
        (["describe", "--rootfs", "ROOTFS", "--runtime", "runsc"], 1, "readie-pipeline rootfs"),
        (["describe", "--rootfs", "ROOTFS", "--flavor", "tpu"], 2, "'tpu'"),
        (["describe", "--rootfs", "ROOTFS", "--flavor", "gpu"], 1, "NVIDIA"),
        (["describe", "--rootfs", "ROOTFS", "--runtime", "docker"], 2, "'docker' is not a runtime. Use fork or runsc."),
        (["probe", "--rootfs", "ROOTFS", "--memory", "4 GB"], 2, "'4 GB' is not a size"),
        (["probe", "--rootfs", "ROOTFS", "--timeout", "-1"], 2, "--timeout"),
        (
            ["save", "--rootfs", "ROOTFS", "--checkpoint-dir", "x", "--spec", "/nowhere.json"],
            2,
            "/nowhere.json: No such",
        ),
        (["restore", "--rootfs", "ROOTFS"], 2, "--cold"),
        (["restore", "--rootfs", "ROOTFS", "--generation", "g", "--checkpoint", "c"], 2, "checkpoint.json: No such"),
        (["restore", "--rootfs", "ROOTFS", "--cold", "--times", "0"], 2, "--times"),
        (["measure"], 2, "measure"),
    ],
)
def test_an_error_is_one_message_with_the_way_out(rootfs: Path, arguments: list[str], code: int, said: str) -> None:
    """Exit 2 for usage, 1 for failure, never a traceback, nothing on stdout."""
    done = worker(*[str(rootfs) if argument == "ROOTFS" else argument for argument in arguments])

    assert done.returncode == code, done.stderr
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_probe_names_the_request_that_it_cannot_read(rootfs: Path) -> None:
    """What was sent, what is wrong with it, and what to send."""
    done = worker("probe", "--rootfs", rootfs, stdin='{"id": 1, "modules": []}\n')

    assert done.returncode == 2
    assert '\'{"id": 1, "modules": []}\'' in done.stderr
    assert '"mode": "time"' in done.stderr


def test_a_checkpoint_of_flavor_gpu_needs_a_gpu(rootfs: Path, tmp_path: Path) -> None:
    """Neither captured nor served on a host without NVIDIA devices, before any work."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this host has a GPU")
    spec = write_checkpoint(tmp_path / "spec.json", "light", flavor="gpu")

    places = ["--rootfs", rootfs, "--checkpoint-dir", tmp_path / "checkpoints", "--spec", spec]
    saved = worker("save", *places, "--flavor", "gpu")
    served = worker("serve", ROOTFS=str(rootfs), WORKER_FLAVOR="gpu", WORKER_GPU_TOTAL="16Gi")

    for done in (saved, served):
        assert done.returncode == 1
        assert "/dev/nvidiactl" in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "checkpoints").exists()


def test_a_checkpoint_of_another_flavor_than_the_sandboxes_is_refused(rootfs: Path, tmp_path: Path) -> None:
    """The message says which flavor it is of."""
    spec = write_checkpoint(tmp_path / "spec.json", "light", flavor="gpu")

    done = worker("save", "--rootfs", rootfs, "--checkpoint-dir", tmp_path / "checkpoints", "--spec", spec)

    assert done.returncode == 2
    assert "--flavor gpu" in done.stderr


def test_serve_logs_an_object_a_line(rootfs: Path, tmp_path: Path) -> None:
    """With LOG_FORMAT=json, from the first line to the last; the token is in none; asked twice to end, it ends once."""
    settings = {"ROOTFS": str(rootfs), "WORKER_DIR": str(tmp_path), "ROUTER_URL": "http://127.0.0.1:1"}
    settings |= {"WORKER_TOKEN": "s3cret-agent", "LOG_FORMAT": "json"}
    command = [sys.executable, "-m", "worker.cli", "serve"]
    with subprocess.Popen(command, env=os.environ | settings, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "127.0.0.1:1" in line:  # it cannot report
                process.send_signal(signal.SIGTERM)

    logged = [json.loads(line) for line in lines]
    assert process.returncode == 0
    assert {"event", "level", "timestamp"} <= set.intersection(*map(set, logged))
    assert any("isolates nothing" in each["event"] for each in logged)
    assert "s3cret" not in "".join(lines)


@pytest.mark.parametrize(
    ("environment", "code", "said"),
    [
        ({}, 2, "ROOTFS is not set"),
        ({"ROOTFS": "/nowhere"}, 1, "virtual environment"),
        ({"WORKER_FLAVOR": "tpu"}, 2, "WORKER_FLAVOR='tpu'"),
        ({"RUNTIME": "runsc"}, 1, "readie-pipeline rootfs"),
        ({"SANDBOX_NETWORK": "bridge"}, 2, "none or host"),
        ({"POOL_SIZE": "-1"}, 2, "a whole number from 0 (none) to 1000"),
        ({"PACKAGES_WHEELS": "/nowhere"}, 2, "a folder of wheels"),
        ({"PACKAGES_INDEX": "nowhere"}, 2, "a URL of a package index"),
        ({"WORKER_DIR": "/proc/nowhere"}, 2, "WORKER_DIR=/proc/nowhere"),
        ({"ROUTER_URL": "http://[::1"}, 2, "ROUTER_URL"),
    ],
)
def test_serve_stops_at_a_bad_setting(
    rootfs: Path, tmp_path: Path, environment: dict[str, str], code: int, said: str
) -> None:
    """Before anything is started: the variable, its value, what is accepted."""
    settings = {"WORKER_DIR": str(tmp_path / "worker")} | ({"ROOTFS": str(rootfs)} if environment else {})

    done = worker("serve", **(settings | environment))

    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_two_workers_cannot_share_a_folder(rootfs: Path, tmp_path: Path) -> None:
    """The second one is told to take another, and harms nothing of the first one's."""
    import fcntl

    (tmp_path / "sandboxes" / "busy").mkdir(parents=True)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = worker("serve", ROOTFS=str(rootfs), WORKER_DIR=str(tmp_path))

    assert done.returncode == 2
    assert "is in use by another worker" in done.stderr
    assert (tmp_path / "sandboxes" / "busy").exists()


def test_every_command_has_a_sentence_and_an_example() -> None:
    """--help names the commands; each command's help ends with a line to copy, and names its environment variables."""
    from worker.cli import app

    names = [str(command.name or command.callback.__name__) for command in app.registered_commands if command.callback]
    overview = worker("--help").stdout

    assert set(names) == {"describe", "probe", "save", "restore", "serve", "doctor"}
    for command in app.registered_commands:
        assert command.callback
        assert "Example: " in (command.callback.__doc__ or "")
        assert (command.name or command.callback.__name__) in overview
    assert "ROOTFS" in worker("save", "--help").stdout
    assert "CHECKPOINT_DIR" in worker("save", "--help").stdout
