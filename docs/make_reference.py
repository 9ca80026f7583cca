"""Writes docs/reference.md from what the program itself says: settings, problems, commands, routes, tables.

`make docs` runs it, and `make check` fails if the file is not what it would write.
"""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import typer
from litestar.routes import HTTPRoute
from litestar.serialization import decode_json, encode_json
from sqlalchemy import create_engine
from sqlalchemy.dialects import postgresql

import app.cli
import app.tables
import pipeline.cli
import worker.cli
from app.application import create_app
from app.database import Database
from app.settings import RouterSettings
from readie.client import ClientSettings
from readie.errors import problems
from readie.settings import Bytes, describe
from worker.settings import WorkerSettings

TARGET = Path(__file__).with_name("reference.md")
COMMANDS = {"readie-pipeline": pipeline.cli.app, "readie-router": app.cli.app, "readie-worker": worker.cli.app}
SETTINGS: dict[str, type[msgspec.Struct]] = {
    "The router": RouterSettings,
    "The worker": WorkerSettings,
    "The client": ClientSettings,
}


def row(*cells: object) -> str:
    """A row of a table; what Markdown would take for a tag or a column is escaped."""
    texts = [str(cell).replace("|", "\\|").replace("<", "\\<") for cell in cells]
    return f"| {' | '.join(texts)} |"


def code(value: object) -> str:
    return f"`{value}`" if value not in {None, ""} else ""


def settings_table(kind: type[msgspec.Struct]) -> list[str]:
    """One row a variable; what it means is the comment beside the field in the source."""
    lines = ["| variable | default | accepted | meaning |", "|---|---|---|---|"]
    source = inspect.getsource(kind)
    for field in msgspec.structs.fields(kind):
        text = re.search(rf"^    {field.name}:.*?(?=^    \w+:|^    @|^    # |\Z)", source, re.MULTILINE | re.DOTALL)
        comments = re.findall(r"\S +# (.*)", text[0]) if text else []
        default = "(required)" if field.required else code(show_default(field.default))
        lines.append(row(code(field.encode_name.upper()), default, describe(field.type), " ".join(comments)))
    return lines


def show_default(default: object) -> str:
    """A default as it would be written: sizes with their unit, numbers without a `.0`; nothing where there is none."""
    if default is None or default is msgspec.NODEFAULT:
        return ""
    if isinstance(default, Bytes):
        units = [(unit, default // 1024**power) for power, unit in ((3, "Gi"), (2, "Mi")) if not default % 1024**power]
        return next((f"{number}{unit}" for unit, number in units), str(int(default)))
    return f"{default:g}" if isinstance(default, float) else str(default)


def describe_command(name: str, command: Any) -> list[str]:
    """What a command does, its example, and a row for each of its arguments and options."""
    # Typer's marks for help on a terminal: a form feed, and single line breaks within a paragraph.
    said = [" ".join(part.split()) for part in (command.help or "").replace("\f", "").split("\n\n")]
    said += [command.epilog or ""]
    example = next((text.removeprefix("Example: ") for text in said if text.startswith("Example: ")), "")
    lines = [f"#### {name}", ""]
    lines += [line for text in said if text and not text.startswith("Example: ") for line in (text, "")]
    if example:
        lines += ["```sh", example, "```", ""]
    rows = [describe_parameter(parameter) for parameter in command.params]
    if rows:
        lines += ["| option | variable | default | meaning |", "|---|---|---|---|", *rows, ""]
    return lines


def describe_parameter(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        names = [parameter.metavar or parameter.name.upper()]
    default = "" if getattr(parameter, "is_flag", False) else show_default(parameter.default)
    meaning = parameter.help or ""
    if parameter.required:
        meaning = f"{meaning} Required."
    return row(", ".join(map(code, names)), code(getattr(parameter, "envvar", "")), code(default), meaning)


def routes_table() -> list[str]:
    """One row an operation of the API, those of one tag together; what it does is its handler's first sentence."""
    nowhere = Database(create_engine("postgresql+psycopg://127.0.0.1:1/readie"))  # nobody asks it for anything
    tokens = {"auth_token": "unused", "worker_token": "unused"}
    application = create_app(RouterSettings(**tokens), nowhere)
    said = {
        handler.operation_id: inspect.getdoc(getattr(handler.fn, "func", handler.fn)) or ""
        for route in application.routes
        if isinstance(route, HTTPRoute)
        for handler in route.route_handlers
    }
    paths: dict[str, dict[str, Any]] = decode_json(encode_json(application.openapi_schema.to_schema()))["paths"]
    operations = [
        (", ".join(operation.get("tags", [])), path, method.upper(), operation["operationId"])
        for path, methods in paths.items()
        for method, operation in methods.items()
    ]
    lines = ["| for | route | operation | what it does |", "|---|---|---|---|"]
    for tags, path, method, name in sorted(operations):
        sentence = re.split(r"(?<=\.) ", " ".join(said[name].split()))[0]
        lines.append(row(tags, code(f"{method} {path}"), code(name), sentence))
    return lines


def tables_of_database() -> list[str]:
    """A table for each of the database's, in the order of the source; what a column means is the comment beside it."""
    source = inspect.getsource(app.tables)
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    lines = []
    for table in app.tables.metadata.tables.values():
        text = source.partition(f'Table(\n    "{table.name}",\n')[2].partition("\n)\n")[0]
        lines += [f"### {table.name}", "", "| column | type | meaning |", "|---|---|---|"]
        for column in table.columns:
            named = rf'\w+\("{column.name}"' if f'("{column.name}"' in text else rf"_{column.name}\("
            found = re.search(rf"^    {named}[^\n#]*(?:# (.*))?$", text, re.MULTILINE)
            kind = column.type.compile(dialect=dialect).lower()
            if column.primary_key:
                kind = f"{kind}, key"
            elif column.nullable:
                kind = f"{kind} or null"
            lines.append(row(code(column.name), kind, (found and found[1]) or ""))
        lines.append("")
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
        row(code(slug), problem.status, problem.title, code(problem.__name__), problem.way_out)
        for slug, problem in sorted(problems().items())
    ]
    lines += ["", "## Commands", ""]
    lines += ["Every option that has a variable takes its default from it. Each command has `--help`.", ""]
    for name, cli in COMMANDS.items():
        group: Any = typer.main.get_command(cli)
        lines += [f"### {name}", "", group.help, "", "```sh", group.epilog.removeprefix("Example: "), "```", ""]
        for command in group.commands.values():
            lines += describe_command(f"{name} {command.name}", command)
    lines += [
        "## Routes",
        "",
        "A router describes its API at `/schema`, as OpenAPI. JSON and MessagePack both ways; bytes are base64 in JSON.",
        "",
        *routes_table(),
        "",
        "## Tables",
        "",
        "What is in the database, as PostgreSQL has it. Tables change with versions; the views of [sql.md](sql.md) stay.",
        "",
        *tables_of_database(),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
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
