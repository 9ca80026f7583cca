"""The three command lines, and their commands."""

import typer

import app.cli
import pipeline.cli
import worker.cli

COMMAND_LINES = {"readie-pipeline": pipeline.cli.app, "readie-router": app.cli.app, "readie-worker": worker.cli.app}
COMMANDS = {
    f"{name} {command}": definition
    for name, line in COMMAND_LINES.items()
    for command, definition in vars(typer.main.get_command(line))["commands"].items()
}
