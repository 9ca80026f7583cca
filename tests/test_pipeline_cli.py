"""`readie-pipeline`: results to stdout, talk to stderr, one message for an error, exit 0, 1 or 2."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.analyze import read_measurements
from pipeline.cli import main
from pipeline.corpus import read_corpus
from pipeline.plan import PLANNERS
from readie.document import read_document
from tests.tiny import make_rootfs

PACKAGES = {
    "ground": {"ground/__init__.py": "blob = bytearray(10_000_000)\nimport time; time.sleep(0.03)\n"},
    "tower": {"tower/__init__.py": "import ground\nimport time; time.sleep(0.06)\n"},
    "broken": {"broken.py": "raise RuntimeError('not today')\n"},
}
EXAMPLES = {"one.py": "import tower\n", "two.py": "from ground import blob\n", "three.py": "import nope\n"}


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Done]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line in this process."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["readie-pipeline", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Done(int(ended.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rootfs(tmp_path_factory.mktemp("cli") / "rootfs", PACKAGES)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    for name, source in EXAMPLES.items():
        (folder / name).write_text(source)
    return folder


#: What keeps the tests short: nothing to calibrate, one checkpoint beside the empty one.
SHORT = ("--alpha", "0.0001", "--max-checkpoints", "2")


@pytest.fixture(scope="module")
def generated(
    rootfs: Path, examples: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The work folder that `generation` left, as a process of its own, and what it said."""
    out = tmp_path_factory.mktemp("generation")
    arguments = [
        "generation",
        "--rootfs",
        rootfs,
        "--out",
        out,
        "--repeats",
        "1",
        "--max-repeats",
        "1",
        *SHORT,
        examples,
    ]
    command = [sys.executable, "-m", "pipeline.cli", *map(str, arguments)]
    root = Path(__file__).parents[1]
    return out, subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture
def out(generated: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    return generated[0]


class TestAllOfIt:
    """`generation` does everything, and again does nothing."""

    def test_from_example_code_to_a_catalogue(
        self, generated: tuple[Path, subprocess.CompletedProcess[str]], rootfs: Path
    ) -> None:
        """The report names root filesystem, failures, checkpoints, cost and alpha; the talk is on stderr."""
        out, done = generated

        assert done.returncode == 0, done.stderr
        assert str(rootfs) in done.stdout
        assert "broken: import broken: RuntimeError: not today" in done.stdout
        assert "asked for, and not there: nope" in done.stdout
        assert "without checkpoints" in done.stdout
        assert "alpha: planned" in done.stdout
        assert "Capturing 2 checkpoints" in done.stderr
        assert [one.checkpoint_id for one in read_document(out / "catalogue.json").checkpoints][:2] == [
            "checkpoint_0",
            "checkpoint_1",
        ]

    def test_again_it_changes_no_byte(self, command: Command, rootfs: Path, examples: Path, out: Path) -> None:
        """Everything is there already; `--json` gives the same facts."""
        names = ["corpus.jsonl", "measurements.parquet", "plan.json", "catalogue.json", "manifest.json"]
        before = [(out / name).read_bytes() for name in names]
        done = command(
            "generation",
            "--rootfs",
            rootfs,
            "--out",
            out,
            "--repeats",
            1,
            "--max-repeats",
            1,
            *SHORT,
            "--json",
            examples,
        )

        assert done.code == 0, done.err
        assert [(out / name).read_bytes() for name in names] == before
        assert done.json["generation"] == done.json["manifest"]["generation"]
        assert done.json["modules"] == 2
        assert done.json["absent"] == {"nope": 1}
        assert done.json["plan"]["requests"] == 3

    def test_each_step_alone_gives_the_same(self, command: Command, rootfs: Path, examples: Path, out: Path) -> None:
        """corpus, analyze and capture, over what `generation` left."""
        catalogue = (out / "catalogue.json").read_bytes()
        steps = [
            ("corpus", "--out", out, "--json", examples),
            ("analyze", "--out", out, "--rootfs", rootfs, "--repeats", 1, "--json"),
            ("capture", "--out", out, *SHORT, "--json"),
        ]
        done = [command(*step) for step in steps]

        assert [one.code for one in done] == [0, 0, 0]
        counts = {"sets": 3, "files": 3, "without_imports": 0, "recorded_sets": 0, "recorded_calls": 0}
        assert done[0].json == {**counts, "errors": [], "over_limit": []}
        assert done[1].json["modules"] == 2
        assert (done[1].json["noise"], done[1].json["memory_noise"]) == ([], [])
        assert (out / "catalogue.json").read_bytes() == catalogue

    def test_plan_prints_its_checkpoints(self, command: Command, out: Path, tmp_path: Path) -> None:
        """With the alpha given, into another folder by copies of its input."""
        for name in ("corpus.jsonl", "measurements.parquet"):
            (tmp_path / name).write_bytes((out / name).read_bytes())
        done = command("plan", "--out", tmp_path, "--alpha", "0.0001", "--checkpoint-mb", "5", "--json")

        assert done.code == 0, done.err
        assert done.json["alpha"] == 0.0001
        assert done.json["limits"]["checkpoint_mb"] == 5
        assert [one["canonical"] for one in done.json["checkpoints"]] == [[]]

    def test_plan_goes_on_without_the_root_filesystem(self, command: Command, out: Path, tmp_path: Path) -> None:
        """A warning says that nothing was filtered."""
        for name in ("corpus.jsonl", "measurements.parquet"):
            (tmp_path / name).write_bytes((out / name).read_bytes())
        done = command("plan", "--out", tmp_path, "--alpha", "0.0001", "--rootfs", tmp_path / "nowhere")

        assert done.code == 0, done.err
        assert "nothing was filtered" in done.err

    def test_fixed_sets_come_from_a_file(self, command: Command, out: Path, tmp_path: Path) -> None:
        """One set a line."""
        for name in ("corpus.jsonl", "measurements.parquet"):
            (tmp_path / name).write_bytes((out / name).read_bytes())
        (tmp_path / "sets.jsonl").write_text('{"modules": ["ground"]}\n')
        done = command(
            "plan", "--out", tmp_path, "--alpha", 0.001, "--planner", "fixed", "--sets", tmp_path / "sets.jsonl"
        )

        assert done.code == 0, done.err
        assert "Plan by fixed: 2 checkpoints" in done.out

    def test_what_if_shows_other_limits_and_writes_no_plan(self, command: Command, out: Path) -> None:
        """Two tables, and a plot in the work folder."""
        before = (out / "plan.json").read_bytes()
        done = command("plan", "--out", out, "--what-if", "--alpha", "0.001")

        assert (done.code, (out / "plan.json").read_bytes()) == (0, before)
        assert "By the number of checkpoints" in done.out
        assert "By the budget" in done.out
        assert (out / "what-if.svg").read_text().startswith("<?xml")

    def test_holdout_prices_what_was_not_planned_for(self, command: Command, out: Path) -> None:
        """A row for no checkpoints, and one for each planner."""
        done = command("plan", "--out", out, "--holdout", "0.5", "--seed", "3", "--alpha", "0.001", "--json")

        assert [row["planner"] for row in done.json["rows"]] == ["none", "fixed", "greedy", "optimal"]

    def test_verify_holds_predictions_to_reality(self, command: Command, out: Path) -> None:
        """Of every import of the sample, what the sum over its closure says, in MB and by the clock: tower needs ground."""
        once = ("--repeats", 1, "--max-repeats", 1)
        done = command("verify", "--out", out, "--sample", 2, "--seed", 1, *once, "--json")
        seconds = {item.key: item.seconds for item in read_measurements(out / "measurements.parquet").items}

        assert done.code == 0, done.err
        checked = {tuple(one["modules"]): one for one in done.json["checked"]}
        assert set(checked) == {("ground",), ("tower",)}
        for module, closure, slept in (("ground", ["ground"], 0.03), ("tower", ["ground", "tower"], 0.09)):
            one = checked[(module,)]
            assert one["predicted_mb"] == pytest.approx(one["measured_mb"], abs=2)
            assert one["predicted_s"] == pytest.approx(sum(seconds[item] for item in closure), abs=1e-8)
            assert one["clock_s"] >= slept

    def test_measurements_and_a_corpus_are_enough(
        self, command: Command, out: Path, rootfs: Path, tmp_path: Path
    ) -> None:
        """To verify and to plan in a folder that has nothing else, with a root filesystem that lies elsewhere."""
        (tmp_path / "corpus.jsonl").write_bytes((out / "corpus.jsonl").read_bytes())
        table = pq.read_table(out / "measurements.parquet")
        info = json.loads(table.schema.metadata[b"readie"]) | {"rootfs": "/nowhere"}
        pq.write_table(table.replace_schema_metadata({"readie": json.dumps(info)}), tmp_path / "measurements.parquet")
        where = ("--out", tmp_path, "--rootfs", rootfs)
        verified = command("verify", *where, "--sample", 2, "--repeats", 1, "--max-repeats", 1, "--json")
        planned = command("plan", *where, "--alpha", "0.0001", "--json")

        assert (verified.code, planned.code) == (0, 0), verified.err + planned.err
        assert {tuple(one["modules"]) for one in verified.json["checked"]} == {("ground",), ("tower",)}
        assert planned.json["checkpoints"]


class TestCollected:
    """Import sets that were collected before stand beside example code."""

    def test_equal_sets_are_added_up(self, command: Command, tmp_path: Path) -> None:
        """Of two files, one of them compressed, and a program."""
        (tmp_path / "one.jsonl").write_text('{"modules": ["ground"], "count": 3, "sources": ["a"]}\n')
        with gzip.open(tmp_path / "two.jsonl.gz", "wt") as file:
            file.write('{"modules": ["ground"], "count": 4}\n{"modules": ["tower"], "count": 1}\n')
        (tmp_path / "three.py").write_text("import ground\n")
        paths = [tmp_path / name for name in ("one.jsonl", "two.jsonl.gz", "three.py")]
        done = command("corpus", "--out", tmp_path / "out", *paths)

        assert done.code == 0, done.err
        assert {one.modules: one.count for one in read_corpus(tmp_path / "out" / "corpus.jsonl")} == {
            ("ground",): 8,
            ("tower",): 1,
        }

    def test_a_damaged_one_is_named(self, command: Command, tmp_path: Path) -> None:
        """With the line; nothing is written."""
        (tmp_path / "one.jsonl").write_text("[]\n")
        done = command("corpus", "--out", tmp_path / "out", tmp_path / "one.jsonl")

        assert done.code == 2
        assert "one.jsonl" in done.err
        assert not (tmp_path / "out" / "corpus.jsonl").exists()


class TestReport:
    """`report` makes text and page again from what lies in the work folder."""

    def test_the_text_is_the_one_that_generation_printed(
        self, command: Command, generated: tuple[Path, subprocess.CompletedProcess[str]]
    ) -> None:
        """And the page lies beside the catalogue."""
        out, first = generated
        (out / "report.html").unlink()
        done = command("report", "--out", out)

        assert (done.code, done.out) == (0, first.stdout)
        assert "broken: " not in done.err
        assert "not today" in (out / "report.html").read_text(encoding="utf-8")

    def test_json_has_the_facts(self, command: Command, out: Path) -> None:
        """Those of the text, and more."""
        done = command("report", "--out", out, "--json")

        assert done.code == 0, done.err
        assert [one["checkpoint_id"] for one in done.json["checkpoints"]] == ["checkpoint_0", "checkpoint_1"]
        assert done.json["failures"][0]["module"] == "broken"


class TestErrors:
    """One message that names the thing, the reason and the way out; never a traceback."""

    @pytest.fixture
    def places(self, rootfs: Path, examples: Path, tmp_path: Path) -> dict[str, Path]:
        (tmp_path / "file").write_text("")
        return {"tmp": tmp_path, "rootfs": rootfs, "examples": examples}

    @pytest.mark.parametrize(
        ("arguments", "code", "told"),
        [
            (["corpus", "{tmp}/nowhere"], 2, "nowhere: no such file"),
            (["corpus", "{tmp}"], 2, "none of 0 files imports anything"),
            (["corpus", "--out", "{tmp}/file/out", "{examples}"], 2, "--out"),
            (["analyze", "--rootfs", "{rootfs}"], 2, "Collect a corpus"),
            (["analyze", "--rootfs", "{tmp}"], 2, "has no bin/python"),
            (["analyze", "--rootfs", "{tmp}/nowhere"], 2, "no such folder"),
            (["analyze"], 2, "--rootfs"),
            (["analyze", "--rootfs", "{rootfs}", "--flavor", "tpu"], 2, "Use cpu or gpu"),
            (["analyze", "--rootfs", "{rootfs}", "--runtime", "docker"], 2, "Use fork or runsc"),
            (["analyze", "--rootfs", "{rootfs}", "--repeats", "0"], 2, "--repeats"),
            (["analyze", "--rootfs", "{rootfs}", "--memory", "lots"], 2, "'lots' is not a size"),
            (["analyze", "--rootfs", "{rootfs}", "--timeout", "nan"], 2, "--timeout"),
            (["plan"], 2, "Measure first"),
            (["plan", "--alpha", "0"], 2, "--alpha 0 is out of range"),
            (["plan", "--alpha", "nan"], 2, "--alpha nan is out of range"),
            (["plan", "--alpha", "much"], 2, "--alpha"),
            (["plan", "--checkpoint-mb", "inf"], 2, "--checkpoint-mb inf is out of range"),
            (["plan", "--max-checkpoints", "0"], 2, "--max-checkpoints"),
            (["plan", "--planner", "fixed"], 2, "--sets"),
            (["plan", "--planner", "fixed", "--sets", "{tmp}/nowhere"], 2, "one set a line"),
            (["capture"], 2, "Measure first"),
            (["report"], 2, "Capture first"),
            (["report", "--flavor", "tpu"], 2, "Use cpu or gpu"),
            (["generation", "--rootfs", "{rootfs}"], 2, "Collect a corpus"),
            (["verify", "--sample", "0"], 2, "--sample"),
            (["nonsense"], 2, "nonsense"),
        ],
    )
    def test_each_is_one_message(
        self, command: Command, places: dict[str, Path], *, arguments: list[str], code: int, told: str
    ) -> None:
        """Usage exits with 2, failure with 1; stdout stays empty."""
        given = [argument.format(**places) for argument in arguments]
        if "--out" not in given and given[0] != "nonsense":
            given[1:1] = ["--out", str(places["tmp"] / "out")]
        done = command(*given)

        assert (done.code, done.out) == (code, "")
        assert told in done.err
        assert done.err.count("readie-pipeline: ") == 1
        assert "Traceback" not in done.err

    def test_an_unknown_planner_lists_the_known_ones(self, command: Command, tmp_path: Path) -> None:
        """As a usage error."""
        done = command("plan", "--out", tmp_path, "--planner", "best")

        assert done.code == 2
        assert all(name in done.err for name in PLANNERS)

    @pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this host has a GPU")
    @pytest.mark.parametrize("name", ["analyze", "plan", "capture", "generation", "verify"])
    def test_flavor_gpu_needs_a_gpu(self, command: Command, rootfs: Path, tmp_path: Path, name: str) -> None:
        """And stops before any work: no folder is made."""
        arguments = ["--rootfs", rootfs] if name in {"analyze", "generation"} else []
        done = command(name, *arguments, "--out", tmp_path / "out", "--flavor", "gpu")

        assert done.code == 1
        assert "GPU" in done.err
        assert not (tmp_path / "out").exists()

    def test_two_at_once_in_one_folder_are_refused(self, command: Command, examples: Path, tmp_path: Path) -> None:
        """The second says that another works there."""
        from pipeline.cli import work_folder

        with work_folder(tmp_path):
            done = command("corpus", "--out", tmp_path, examples)

        assert done.code == 1
        assert "another readie-pipeline" in done.err

    def test_options_read_their_environment_variables(
        self, command: Command, rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The help names each."""
        monkeypatch.setenv("FLAVOR", "tpu")
        done = command("analyze", "--rootfs", rootfs, "--out", tmp_path)

        assert done.code == 2
        assert "tpu" in done.err
        assert "PIPELINE_OUT" in command("analyze", "--help").out
