"""DESIGN §9: long work can be stopped at any moment, by `kill -9` too, and goes on where it was."""

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from pipeline.analyze import Run
from readie.manifest import read_manifest
from readie.projection import load_catalogue
from tests.tiny import make_rootfs

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "ground": {"ground/__init__.py": "blob = bytearray(10_000_000)\n"},
    "tower": {"tower/__init__.py": "import ground\n", "tower/roof.py": "blob = bytearray(5_000_000)\n"},
    # Each import takes 10 ms longer than the one before: its interval never is tight.
    "slower": {
        "slower.py": """
            import os, pathlib, time
            count = pathlib.Path(os.environ["XDG_CACHE_HOME"], "count")
            with count.open("ab") as file: file.write(b".")
            time.sleep(0.01 * count.stat().st_size)
        """
    },
    "broken": {"broken.py": "raise RuntimeError('not today')\n"},
}
CORPUS = '{"modules": ["tower.roof"], "count": 3, "sources": []}\n{"modules": ["ground"], "count": 1, "sources": []}\n'
#: A short run: no interval is made tighter, nothing is calibrated, one checkpoint beside the empty one.
OPTIONS = ("--repeats", 2, "--max-repeats", 2, "--alpha", "0.0001", "--max-checkpoints", 2)

#: Intervals are made tighter, and alpha comes from a calibration.
LONGER_OPTIONS = ("--repeats", 2, "--max-repeats", 4, "--max-checkpoints", 2)

#: Forks a process for each line (as JSON: a file for stderr, where it stands still, and arguments), which runs the command
#: line: no start takes a second. Ballast is small here, for what is timed does not matter. A process stands still before
#: it says something, or writes more than so many lines of a journal: until it is killed, however late that comes.
STARTER = """
import json, os, signal, sys
import pipeline.analyze, pipeline.capture, pipeline.cli, pipeline.progress
import pipeline.report_page  # plots take a second to load
from pipeline.cli import main
pipeline.capture.BALLAST_MB = (0, 10)

def stand_still(module, name, is_far):
    original = getattr(module, name)
    def go_on(*args):
        while is_far(*args):
            signal.pause()
        return original(*args)
    setattr(module, name, go_on)

def is_full(writer, _):
    lines = writer.path.read_bytes().count(b"\\n") if writer.path.exists() else 0
    return lines >= journals.get(writer.path.name, lines + 1)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        said, still, *arguments = json.loads(line)
        text, journals = json.loads(still)
        stand_still(pipeline.analyze.Journal, "add", is_full)
        stand_still(pipeline.capture.Captures, "_note", is_full)
        for module in (pipeline.progress, pipeline.cli):
            stand_still(module, "say", lambda words: text is not None and words.startswith(text))
        sys.argv = ["readie-pipeline", *arguments]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        main()
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def starter() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def run(
    starter: "subprocess.Popen[str]",
    *arguments: object,
    kill_when: Callable[[], bool] | None = None,
    kill_after: float = 0.0,
    said: Path = Path(os.devnull),
    still_before: str | None = None,
    most_lines: Mapping[str, int] | None = None,
) -> int:
    """Runs a command and returns its wait status; kills it so many seconds after it has come as far as that.

    What it says on stderr is in `said`. It stands still before it says `still_before`, and before a journal has more
    than `most_lines` of its name.
    """
    assert starter.stdin is not None
    assert starter.stdout is not None
    still = msgspec.json.encode((still_before, most_lines or {})).decode()
    starter.stdin.write(msgspec.json.encode([str(one) for one in (said, still, *arguments)]).decode() + "\n")
    starter.stdin.flush()
    pid = int(starter.stdout.readline())
    if kill_when is not None:
        while not kill_when():
            ended, _, _ = select.select([starter.stdout], [], [], 0.005)
            if ended:
                return int(starter.stdout.readline())
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return int(starter.stdout.readline())


JOURNALS = MEASURED, CAPTURED = ("measurements.journal.jsonl", "captures.journal.jsonl")
#: Ten kills: some at the start, the others once there is a line more of this journal than at the kill before.
KILLS = (*[None] * 6, *[MEASURED] * 2, *[CAPTURED] * 2)


def whole_lines(path: Path) -> list[bytes]:
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith(b"\n")]


@pytest.fixture(scope="module")
def killed(
    starter: "subprocess.Popen[str]", tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, list[bytes]]]]:
    """The work folder of a generation that was killed ten times and then finished, and its journals after each kill.

    Each comes a moment after what it waits for: in the middle of whatever is next, and one line or two later at most.
    """
    folder = tmp_path_factory.mktemp("killed")
    rootfs, out = make_rootfs(folder / "rootfs", PACKAGES), folder / "out"
    out.mkdir()
    (out / "corpus.jsonl").write_text(CORPUS)
    arguments = ("generation", "--rootfs", rootfs, "--out", out, *OPTIONS)
    journals: list[dict[str, list[bytes]]] = []
    moments = random.Random(9)
    for name in KILLS:
        known = len(journals[-1][name]) if name else 0
        most = {name or MEASURED: known + 2 if name else len(journals) + 1}

        def is_further(name: str | None = name, known: int = known) -> bool:
            return name is None or len(whole_lines(out / name)) > known

        after = moments.uniform(0.0, 0.1 if name else 0.5)
        status = run(starter, *arguments, kill_when=is_further, kill_after=after, most_lines=most)
        assert status == signal.SIGKILL
        journals.append({name: whole_lines(out / name) for name in JOURNALS})
    assert run(starter, *arguments) == 0
    return out, journals


def test_kills_came_during_measurements_and_during_captures(
    killed: tuple[Path, list[dict[str, list[bytes]]]],
) -> None:
    """Each of a run that had come further than the one before, and none of a run that was as good as done."""
    out, journals = killed
    lines = {name: [len(journal[name]) for journal in journals] for name in JOURNALS}
    all_measured, all_captured = (len(whole_lines(out / name)) for name in JOURNALS)

    assert lines[MEASURED][5] < lines[MEASURED][6] < lines[MEASURED][7] < all_measured
    assert lines[MEASURED][8:] == [all_measured] * 2
    assert lines[CAPTURED][:8] == [0] * 8
    assert 0 < lines[CAPTURED][8] < lines[CAPTURED][9] < all_captured


def test_it_finishes(killed: tuple[Path, list[dict[str, list[bytes]]]]) -> None:
    """With the catalogue and the checkpoints of an undisturbed run."""
    out, _ = killed
    catalogue = load_catalogue(out / "catalogue.json")

    assert set(catalogue.keys) == {"ground", "slower", "tower", "tower.roof"}
    assert not catalogue.warnings
    assert len(catalogue.checkpoints) > 1
    assert not list(out.glob("**/*.partial"))


@pytest.mark.parametrize("name", JOURNALS)
def test_nothing_completed_is_lost(killed: tuple[Path, list[dict[str, list[bytes]]]], name: str) -> None:
    """What was in the journal at a kill is in the final one, in the same place: measurements and captures."""
    out, journals = killed
    final = whole_lines(out / name)

    for journal in journals:
        assert final[: len(journal[name])] == journal[name]


def test_no_completed_measurement_is_repeated(killed: tuple[Path, list[dict[str, list[bytes]]]]) -> None:
    """Edges once, time twice, memory once, of each process."""
    out, _ = killed
    runs = [msgspec.json.decode(line, type=Run) for line in whole_lines(out / "measurements.journal.jsonl")[1:]]
    wanted = {"edges": 1, "time": 2, "memory": 1}

    assert Counter((run.mode, run.roots) for run in runs) == {(run.mode, run.roots): wanted[run.mode] for run in runs}
    assert {run.mode for run in runs} == set(wanted)


def test_no_completed_capture_is_repeated(killed: tuple[Path, list[dict[str, list[bytes]]]]) -> None:
    """Each checkpoint of each purpose once."""
    out, _ = killed
    done = [msgspec.json.decode(line) for line in whole_lines(out / "captures.journal.jsonl")]
    captured = [(one["purpose"], msgspec.json.encode(one["spec"])) for one in done]

    assert len(captured) >= 2
    assert len(set(captured)) == len(captured)


def test_the_same_measurements_give_the_same_plan_and_catalogue(
    killed: tuple[Path, list[dict[str, list[bytes]]]], starter: "subprocess.Popen[str]"
) -> None:
    """Byte for byte, in a folder that has nothing but what was measured and captured."""
    out, _ = killed
    again = out.with_name("again")
    again.mkdir()
    for name in ("corpus.jsonl", "measurements.journal.jsonl", "captures.journal.jsonl"):
        shutil.copy(out / name, again)
    shutil.copytree(out / "checkpoints", again / "checkpoints")
    rootfs = out.with_name("rootfs")

    assert run(starter, "generation", "--rootfs", rootfs, "--out", again, *OPTIONS) == 0
    results = ["measurements.parquet", "plan.json", "manifest.json", "catalogue.json"]
    results += [str(path.relative_to(out)) for path in sorted((out / "catalogue.parquet").iterdir())]
    assert len(results) > 8
    for name in results:
        assert (again / name).read_bytes() == (out / name).read_bytes(), name


#: What is being done at each of the further kills, as it says, and the journal that has a line more by then.
STAGES = (
    ("Making intervals tighter", MEASURED),
    ("Calibrating alpha", CAPTURED),
    ("Planning with", None),
    ("Writing the catalogue", None),
)
#: What is said next, after each.
NEXT = ("Calibrating alpha", "Planning with", "Capturing", "the same as a page")


@pytest.fixture(scope="module")
def killed_later(
    killed: tuple[Path, list[dict[str, list[bytes]]]], starter: "subprocess.Popen[str]"
) -> tuple[Path, list[dict[str, list[bytes]]]]:
    """A work folder that has what was measured twice and captured, and its journals after a kill in each later stage."""
    done, _ = killed
    out, said = done.with_name("later"), done.with_name("said")
    out.mkdir()
    for name in ("corpus.jsonl", *JOURNALS):
        shutil.copy(done / name, out)
    shutil.copytree(done / "checkpoints", out / "checkpoints")
    arguments = ("generation", "--rootfs", done.with_name("rootfs"), "--out", out, *LONGER_OPTIONS)
    journals: list[dict[str, list[bytes]]] = []
    for (stage, journal), after in zip(STAGES, NEXT, strict=True):
        known = len(whole_lines(out / journal)) if journal else 0
        said.unlink(missing_ok=True)

        def is_there(stage: str = stage, journal: str | None = journal, known: int = known) -> bool:
            begun = said.exists() and stage in said.read_text()
            return begun and (journal is None or len(whole_lines(out / journal)) > known)

        assert run(starter, *arguments, kill_when=is_there, said=said, still_before=after) == signal.SIGKILL
        journals.append({name: whole_lines(out / name) for name in JOURNALS})
    assert run(starter, *arguments) == 0
    return out, journals


def test_kills_while_it_tightens_calibrates_plans_and_writes_lose_nothing(
    killed_later: tuple[Path, list[dict[str, list[bytes]]]],
) -> None:
    """What was in a journal at a kill is in the final one, once; with four times of what is never tight.

    The catalogue has the generation that was captured, and nothing is left aside.
    """
    out, journals = killed_later
    final = {name: whole_lines(out / name) for name in JOURNALS}
    runs = [msgspec.json.decode(line, type=Run) for line in final[MEASURED][1:]]
    captured = [msgspec.json.decode(line) for line in final[CAPTURED]]

    for journal in journals:
        assert all(final[name][: len(journal[name])] == journal[name] for name in JOURNALS)
    assert len(journals[0][MEASURED]) < len(final[MEASURED])
    assert len(journals[0][CAPTURED]) < len(journals[1][CAPTURED]) < len(final[CAPTURED])
    assert len([run for run in runs if (run.mode, run.roots) == ("time", ("slower",))]) == 4
    assert len({(one["purpose"], msgspec.json.encode(one["spec"])) for one in captured}) == len(captured)
    assert [one["purpose"] for one in captured].count("calibration") == 2
    assert load_catalogue(out / "catalogue.json").generation == read_manifest(out / "manifest.json").generation
    assert not list(out.glob("**/*.partial"))
