"""What the three command lines have in common: what a failure is to whoever typed a command, and how `doctor` reports."""

import errno
import io
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import msgspec
import typer

from readie.errors import ReadieError, UsageError
from readie.version import this_version
from readie.wire import Answer

INTERRUPTED = 130  # the exit code after Ctrl-C

#: How a time is given: a day, or a moment, in UTC.
SINCE_FORMATS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_version(app: typer.Typer, name: str) -> None:
    """Gives a command line its option `--version`."""

    def show(wanted: bool) -> None:
        if wanted:
            print(f"{name} {this_version()}")
            raise typer.Exit

    @app.callback()
    def line(
        *,
        version: Annotated[
            bool, typer.Option("--version", help="Say which version this is.", callback=show, is_eager=True)
        ] = False,
    ) -> None: ...


def print_json(answer: object) -> None:
    """One indented JSON document, as UTF-8 whatever the terminal's encoding is."""
    sys.stdout.flush()
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(answer), indent=2) + b"\n")


def run_command_line(name: str, app: typer.Typer, *, stopped: str = "stopped") -> NoReturn:
    """Runs what was typed and ends the process: 0, 2 where the usage is at fault, 130 when stopped, else 1.

    Whatever went wrong is one message on stderr, never a traceback; `stopped` is what is said after Ctrl-C.
    """
    if sys.stdout is None:  # it was closed by whoever started the command: nobody reads
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of fewer characters shows the rest so
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # typer has caught Ctrl-C itself, and says nothing
            say(f"{name}: {stopped}")
        sys.stdout.flush()  # here, so that what cannot be written is told as anything else is
    except ReadieError as error:
        say(f"{name}: {error}")
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except typer.TyperException as error:
        if error.format_message():  # there is none where the help was shown instead
            say(f"{name}: {error.format_message()}")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        say(f"{name}: {stopped}")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os._exit(1)  # whoever read the output has gone
    except OSError as error:
        about = f"{error.filename}: " if error.filename else ""
        say(f"{name}: {about}{error.strerror or error}")
        if error.errno == errno.ENOSPC:
            os._exit(1)  # what is left in the buffer would fail once more
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - a fault of ours; its first line says enough to report it
        say(f"{name}: internal error: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def waiting(text: str, *, as_json: bool = False) -> Iterator[None]:
    """Shows on a terminal that something is still being done; elsewhere it is one line, and none for who wants JSON."""
    if not sys.stderr.isatty():
        if not as_json:
            say(f"{text} …")
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(plain(text))):
        yield


def plain(text: str) -> str:
    """A text with names of whoever chose them: a mark stands for what a terminal would obey instead of showing it."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" or unicodedata.category(letter) == "Zs" else "\ufffd"
        for letter in text
    )


def say(text: str) -> None:
    """One line of talk, on stderr: results go to stdout."""
    print(plain(text), file=sys.stderr, flush=True)


# ---- doctor ----


class Check(Answer, frozen=True, kw_only=True):
    """One thing that `doctor` has looked at: what was found, and the way out where that is not ok."""

    name: str
    state: Literal["ok", "warning", "failed"]
    found: str
    way_out: str = ""


def seconds_ahead(clock_s: float, began_s: float, ended_s: float) -> float:
    """How far a clock, asked between two moments of this machine's, is ahead for certain; below 0: it is behind."""
    return clock_s - min(max(clock_s, began_s), ended_s)


class Doubt(ReadieError):
    """What was found works, and may not be what is meant: a warning."""

    way_out = ""


def check(name: str, look: Callable[[], str]) -> Check:
    """What `look` found: ok, a warning where it raises `Doubt`, failed where it raises anything else."""
    try:
        return Check(name=name, state="ok", found=look())
    except Doubt as doubt:
        return Check(name=name, state="warning", found=doubt.detail, way_out=doubt.hint)
    except ReadieError as error:
        return Check(name=name, state="failed", found=error.detail or error.title, way_out=error.hint)
    except OSError as error:
        about = f"{error.filename}: " if error.filename else ""
        return Check(name=name, state="failed", found=f"{about}{error.strerror or error}")
    except Exception as error:  # noqa: BLE001 - one that nobody thought of hides no other
        reason = str(error).partition("\n")[0]
        return Check(name=name, state="failed", found=f"{type(error).__name__}: {reason}")


_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def report_checks(checks: Iterable[Check], *, as_json: bool) -> None:
    """Prints each check as soon as it is made, or all of them as JSON; ends the command with 1 where one failed."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    made: list[Check] = []
    for each in checks:
        made.append(each)
        if not as_json:
            console.print(Text.assemble((f"{each.state:8}", _COLOURS[each.state]), f"{each.name}: {plain(each.found)}"))
            if each.way_out:
                console.print(Text(f"        {plain(each.way_out)}"))
    failed = sum(each.state == "failed" for each in made)
    warnings = sum(each.state == "warning" for each in made)
    if as_json:
        print_json(made)
    else:
        print(f"{len(made)} checks: {failed} failed, {warnings} with a warning")
    if failed:
        raise typer.Exit(1)
