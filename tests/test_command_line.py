"""What the three command lines do alike."""

import contextlib
import os
import pty
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

import pipeline.progress
from readie.command_line import run_command_line, waiting
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


COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7])(?:;\d+)*m")


def on_a_terminal(*arguments: str, **environ: str) -> tuple[int, str]:
    """The exit code of a command, and what it shows on a terminal."""
    ours, theirs = pty.openpty()
    clean: dict[str, Any] = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "ROOTFS"}}
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=clean | {"TERM": "xterm-256color"} | environ
    ) as process:
        os.close(theirs)
        shown = read_terminal(ours)
    return process.returncode, shown


def read_terminal(ours: int) -> str:
    """What was shown until the other end was closed."""
    shown = b""
    with contextlib.suppress(OSError):  # the end
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    return shown.decode()


def test_colours_obey_no_color() -> None:
    """On a terminal a failure is shown in colour, unless NO_COLOR is set."""
    code, coloured = on_a_terminal("worker", "doctor")
    _, plain = on_a_terminal("worker", "doctor", NO_COLOR="1")

    assert code == 1
    assert COLOUR.search(coloured)
    assert "ROOTFS is not set" in plain
    assert not COLOUR.search(plain)


def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pipe there is a plain line now and then, or nothing where there are no steps, and no control character."""
    monkeypatch.setattr(pipeline.progress, "_EVERY_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with pipeline.progress.Progress("measuring", 2) as progress, waiting("Importing"):
        progress.advance("numpy")
    in_a_pipe = capsys.readouterr().err
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with pipeline.progress.Progress("measuring", 2) as progress:
            progress.advance("numpy")
        with waiting("Importing"):
            pass
        monkeypatch.undo()
    on_terminal = read_terminal(ours)

    assert in_a_pipe == "  measuring: 1 of 2 (numpy)\n"
    assert "1/2" in on_terminal
    assert "Importing" in on_terminal
    assert "\x1b[" in on_terminal
