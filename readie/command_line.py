"""The top of the three command lines: what a failure is to whoever typed the command."""

import errno
import io
import os
import sys
from pathlib import Path
from typing import NoReturn

import typer

from readie.errors import ReadieError, UsageError

INTERRUPTED = 130  # the exit code after Ctrl-C


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
            _say(f"{name}: {stopped}")
        sys.stdout.flush()  # here, so that what cannot be written is told as anything else is
    except ReadieError as error:
        _say(f"{name}: {error}")
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except typer.TyperException as error:
        if error.format_message():  # there is none where the help was shown instead
            _say(f"{name}: {error.format_message()}")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _say(f"{name}: {stopped}")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os._exit(1)  # whoever read the output has gone
    except OSError as error:
        about = f"{error.filename}: " if error.filename else ""
        _say(f"{name}: {about}{error.strerror or error}")
        if error.errno == errno.ENOSPC:
            os._exit(1)  # what is left in the buffer would fail once more
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - a fault of ours; its first line says enough to report it
        _say(f"{name}: internal error: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
