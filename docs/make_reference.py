"""Writes docs/reference.md from what the program itself says: settings, commands, problems.

`make docs` runs it, and `make check` fails if the file is not what it would write.
"""

import inspect
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pipeline.cli
import typer
from typer.testing import CliRunner

import app.cli
import worker.cli
from app.settings import RouterSettings
from readie.client import ClientSettings
from readie.errors import problems
from readie.settings import describe
from worker.settings import WorkerSettings

TARGET = Path(__file__).with_name("reference.md")
COMMANDS = {"readie-pipeline": pipeline.cli.app, "readie-router": app.cli.app, "readie-worker": worker.cli.app}
SETTINGS = {"The router": RouterSettings, "The worker": WorkerSettings, "The client": ClientSettings}


def settings_table(kind: type[msgspec.Struct]) -> list[str]:
    """One row a variable; what it means is the comment beside the field in the source."""
    lines = ["| variable | default | accepted | meaning |", "|---|---|---|---|"]
    source = inspect.getsource(kind)
    for field in msgspec.structs.fields(kind):
        after = re.search(rf"^    {field.name}:.*?(?=^    \w+:|^    @|\Z)", source, re.MULTILINE | re.DOTALL)
        comments = re.findall(r"[)\w\]\"'] +# (.*)", after[0]) if after else []
        default = "" if field.required else str(default_of(field))
        lines.append(
            f"| `{field.encode_name.upper()}` | {f'`{default}`' if default else ''} | {describe(field.type)} "
            f"| {' '.join(comments)} |"
        )
    return lines


def default_of(field: Any) -> object:
    if field.default is msgspec.NODEFAULT:
        return ""
    return "" if field.default is None else field.default


def help_of(name: str, cli: typer.Typer) -> list[str]:
    """The help of a command and of each of its subcommands, as a terminal of 100 columns shows it."""
    runner = CliRunner(env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"})
    commands = sorted(
        command.name or command.callback.__name__ for command in cli.registered_commands if command.callback
    )
    lines: list[str] = []
    for words in [[], *[[command.replace("_", "-")] for command in commands]]:
        result = runner.invoke(cli, [*words, "--help"], prog_name=name)
        text = "\n".join(line.rstrip() for line in result.output.strip().splitlines())
        lines += [f"### {' '.join([name, *words])}", "", "```text", text, "```", ""]
    return lines


def reference() -> str:
    lines = [
        "# Reference",
        "",
        "Written by `make docs` from the program itself.",
        "",
        "## Settings",
        "",
        "Environment variables, read once at start. Sizes are bytes, or text such as `512Mi` or `2G`. Times are seconds.",
        "",
    ]
    for title, kind in SETTINGS.items():
        lines += [f"### {title}", "", *settings_table(kind), ""]
    lines += [
        "## Problems",
        "",
        "Errors over HTTP are problem documents (RFC 9457). `type` is `urn:readie:problem:` and the name here.",
        "The client raises the exception of the same row; command lines print its message and the way out,",
        "and exit with 2 where the input is at fault, else with 1.",
        "",
        "| name | status | what happened | exception | way out |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{slug}` | {problem.status} | {problem.title} | `{problem.__name__}` | {problem.way_out} |"
        for slug, problem in sorted(problems().items())
    ]
    lines += ["", "## Commands", ""]
    for name, cli in COMMANDS.items():
        lines += help_of(name, cli)
    return textwrap.dedent("\n".join(lines)).rstrip() + "\n"


def main() -> int:
    os.environ["COLUMNS"] = "100"
    text = reference()
    if sys.argv[1:] == ["--check"]:
        if TARGET.read_text(encoding="utf-8") != text:
            print("docs/reference.md is stale: run make docs", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
