"""What the three command lines do alike."""

import contextlib
import logging
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest
import structlog
import typer

import pipeline.cli
import pipeline.progress
from app.catalogue import import_catalogue
from app.database import open_database
from readie.command_line import run_command_line, say, waiting
from readie.errors import UsageError
from readie.logs import log_to_stderr
from tests.catalogues import make_worked_example, read
from tests.commands import COMMAND_LINES, COMMANDS

ROOT = Path(__file__).parent.parent

#: Interrupts the import of what its first argument names, as Ctrl-C would, and runs the second's main().
INTERRUPTED = """
import importlib, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
importlib.import_module(sys.argv[2]).main()
"""


@pytest.mark.parametrize("package", ["app", "pipeline", "worker"])
@pytest.mark.parametrize("loaded", ["cli", "typer"])
def test_ctrl_c_while_a_command_line_loads(package: str, loaded: str) -> None:
    """One line and exit code 130, however early it comes."""
    module = f"{package}.cli" if loaded == "cli" else loaded
    command = [sys.executable, "-c", INTERRUPTED, module, f"{package}.__main__"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert (run.returncode, run.stdout) == (130, "")
    assert run.stderr in {f"readie-{name}: stopped\n" for name in ("router", "pipeline", "worker")}


#: Runs the second argument's main() as if what the first one names were not installed.
MISSING = """
import importlib, sys
sys.modules[sys.argv[1]] = None
importlib.import_module(sys.argv[2]).main()
"""


@pytest.mark.parametrize(
    ("package", "module", "extra"),
    [("app", "litestar", "router"), ("pipeline", "numpy", "pipeline"), ("worker", "typer", "worker")],
)
def test_a_command_line_says_which_extra_is_missing(package: str, module: str, extra: str) -> None:
    """Who has installed the client alone is told what to install."""
    command = [sys.executable, "-c", MISSING, module, f"{package}.__main__"]
    run = subprocess.run([*command], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == f"readie-{extra}: {module} is not installed. Run pip install 'readie[{extra}]'\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "name: stopped; it goes on"),
        (PermissionError(13, "Permission denied", "/file"), 1, "name: /file: Permission denied"),
        (OSError(5, "Input/output error"), 1, "name: Input/output error"),
        (LookupError("a\nb"), 1, "name: internal error: LookupError: a"),
        (UsageError("[/x] \x1b[2J\r\x9b of \u202fé\n\tä"), 2, "name: [/x] \ufffd[2J\ufffd\ufffd of \u202fé\n\tä"),
    ],
)
def test_what_ends_a_command_is_one_line(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says who speaks, of what, and why."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["name"])
    with pytest.raises(SystemExit) as ended:
        run_command_line("name", app, stopped="stopped; it goes on")

    assert ended.value.code == code
    assert capsys.readouterr().err.strip() == message


#: They report nothing: what they say is their log, or, of probe, JSON anyway.
WITHOUT_JSON = {"readie-router serve", "readie-worker serve", "readie-worker probe"}


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - WITHOUT_JSON))
def test_every_command_that_reports_does_so_in_json_too(name: str) -> None:
    """By the same option, with the same meaning."""
    options = {option: parameter for parameter in COMMANDS[name].params for option in parameter.opts}

    assert getattr(options["--json"], "help", "") == "Print JSON."


@pytest.mark.parametrize("name", COMMANDS)
def test_what_no_command_takes_is_a_usage_error(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, nothing on stdout, and one line that names the option."""
    line, command = name.split()
    monkeypatch.setattr(sys, "argv", [line, command, "--no-such-option"])
    with pytest.raises(SystemExit) as ended:
        run_command_line(line, COMMAND_LINES[line])
    said = capsys.readouterr()

    assert (ended.value.code, said.out) == (2, "")
    assert re.fullmatch(rf"{line}: .*--no-such-option.*\n", said.err)


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_each_says_its_version(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed one, with exit code 0."""
    monkeypatch.setattr(sys, "argv", [name, "--version"])
    with pytest.raises(SystemExit) as ended:
        run_command_line(name, COMMAND_LINES[name])

    assert (ended.value.code, capsys.readouterr().out) == (0, f"{name} {version('readie')}\n")


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_the_help_of_each_has_an_example(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of each command has one: a line to type, with a command that there is."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        run_command_line(name, COMMAND_LINES[name])
    (example,) = re.findall(rf"Example: .*({name} \w+)", capsys.readouterr().out)

    assert (ended.value.code, example in COMMANDS) == (0, True)


COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7])(?:;\d+)*m")


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Both outputs of this process are a terminal; what it has shown is in the list afterwards."""
    ours, theirs = pty.openpty()
    shown: list[str] = []
    reader = threading.Thread(target=lambda: shown.append(read_terminal(ours)))  # it holds no more than some KB
    reader.start()
    with os.fdopen(theirs, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "stderr", file)
        yield shown
    reader.join()


def read_terminal(ours: int) -> str:
    """What was shown until the other end was closed."""
    shown = b""
    with contextlib.suppress(OSError):  # the end
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    return shown.decode()


@pytest.fixture
def colourful(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment in which a terminal is shown colours, and no settings but a folder of its own."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "ROOTFS", "DATABASE_URL", "ROUTER_URL", "PIPELINE_OUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.chdir(tmp_path)


def show(line: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command line shows on a terminal."""
    name, *arguments = line.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with terminal(monkeypatch) as shown, pytest.raises(SystemExit):
        run_command_line(name, COMMAND_LINES[name])
    return shown[0]


@pytest.mark.usefixtures("colourful")
@pytest.mark.parametrize("line", [*(f"{name} --help" for name in COMMAND_LINES), "readie-worker doctor"])
def test_colours_obey_no_color(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal help and checks are shown in colours, and in none where NO_COLOR is set."""
    coloured = show(line, monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = show(line, monkeypatch)

    assert COLOUR.search(coloured)
    assert not COLOUR.search(plain)
    assert re.search("Usage|ROOTFS is not set", plain)


@pytest.mark.usefixtures("colourful")
def test_tables_obey_no_color(monkeypatch: pytest.MonkeyPatch, duckdb_template: Path, tmp_path: Path) -> None:
    """Their headings are bold on a terminal, and nothing in them has a colour with NO_COLOR."""
    shutil.copyfile(duckdb_template, tmp_path / "readie.duckdb")
    with closing(open_database(f"duckdb:///{tmp_path}/readie.duckdb")) as database:
        import_catalogue(database, read(make_worked_example()))
    monkeypatch.setenv("COLUMNS", "200")
    bold = show("readie-router catalogues", monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = show("readie-router catalogues", monkeypatch)

    assert "\x1b[1m" in bold
    assert re.search("cpu.*yes.*0\\.006", plain)
    assert not COLOUR.search(plain)


@pytest.mark.usefixtures("colourful")
def test_logs_obey_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of router and worker, which are the same."""
    with terminal(monkeypatch) as coloured:
        log_to_stderr(logging.INFO)
        structlog.get_logger().info("ready", worker_id="w")
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal(monkeypatch) as plain:
        log_to_stderr(logging.INFO)
        structlog.get_logger().info("ready", worker_id="w")

    assert COLOUR.search(coloured[0])
    assert "worker_id=w" in plain[0]
    assert not COLOUR.search(plain[0])


def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pipe there is a plain line now and then, or one where there are no steps, and no control character; names are
    shown as they are.
    """
    monkeypatch.setattr(pipeline.progress, "_EVERY_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with waiting("Importing"), pipeline.progress.Progress("measuring", 2) as progress:
        progress.advance("numpy")
    with waiting("Exporting", as_json=True):
        pass
    with pipeline.progress.stage("Planning"):
        pass
    in_a_pipe = capsys.readouterr().err
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with pipeline.progress.Progress("measuring", 2) as progress:
            progress.advance("dataset:x[/y]\a")
        with waiting("Importing [bold]file"):
            pass
        monkeypatch.undo()
    on_terminal = read_terminal(ours)

    pattern = r"Importing …\n  measuring: 1 of 2 \(numpy\)\nPlanning …\nPlanning: \d+\.\d s\n"
    assert re.fullmatch(pattern, in_a_pipe)
    assert "1/2" in on_terminal
    assert "dataset:x[/y]\ufffd" in on_terminal
    assert "Importing [bold]file" in on_terminal
    assert "\x1b[" in on_terminal


def test_a_stage_without_a_bar_turns_a_spinner_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes when a bar comes; what is said meanwhile is shown, and names are shown as they are."""
    monkeypatch.setenv("TERM", "xterm")
    with terminal(monkeypatch) as alone, pipeline.progress.stage("Planning [bold]file"):
        time.sleep(0.2)  # it turns every 80 ms
        say("of 3 candidates")
    with terminal(monkeypatch) as beside, pipeline.progress.stage("Measuring"):
        time.sleep(0.2)
        with pipeline.progress.Progress("modules", 2) as progress:
            progress.advance("numpy")
            time.sleep(0.2)
    spinner = re.compile("[\u2800-\u28ff]")
    spinning, _, done = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", alone[0]).partition("of 3 candidates")
    before, _, growing = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", beside[0]).partition("modules")

    assert spinning.startswith("Planning [bold]file …")
    assert spinner.search(spinning)
    assert "Planning [bold]file: " in done
    assert spinner.search(before)
    assert not spinner.search(growing)
    assert "Measuring: " in growing


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("analyze --rootfs . --out nowhere", "stopped; started again, it goes on from here"),
        ("--verbose capture", "stopped; started again, it goes on from here"),
        ("generation", "stopped; started again, it goes on from here"),
        ("verify", "stopped; started again, it goes on from here"),
        ("rootfs --out rootfs analyze", "stopped"),
        ("plan", "stopped"),
        ("", "stopped"),
    ],
)
def test_ctrl_c_promises_no_more_than_is_true(
    said: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a command that has a journal goes on where it was."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["readie-pipeline", *said.split()])
    monkeypatch.setattr(typer.Typer, "__call__", interrupt)
    with pytest.raises(SystemExit) as ended:
        pipeline.cli.main()

    assert ended.value.code == 130
    assert capsys.readouterr().err == f"readie-pipeline: {message}\n"
