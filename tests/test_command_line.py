"""What the three command lines do alike."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from readie.command_line import run_command_line

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
