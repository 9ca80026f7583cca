"""`readie-router`: serve, bring the database up to date, and look into it."""

import csv
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, TypeVar
from urllib.parse import urlencode

import httpx
import msgspec
import structlog
import typer
import uvicorn
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from sqlalchemy import Connection

from app.address import listen
from app.api.calls import MOST_LISTED, read_calls
from app.api.catalogues import read_summaries, read_summary
from app.api.sessions import read_sessions
from app.api.workers import MOST_WORKERS, read_workers
from app.application import create_app
from app.catalogue import activate_catalogue, import_catalogue, load_catalogue_dir
from app.check import check_rows
from app.database import Database, check_schema, copy_duckdb, migrate, open_database, read_revisions, shown
from app.explain import explain as explain_modules
from app.hangups import Hangups
from app.query import cell_of_csv, list_views, run_query
from app.settings import RouterSettings
from app.tls import server_certificate
from app.waiting import WakeUps
from readie.command_line import (
    SINCE_FORMATS,
    JsonOption,
    add_version,
    plain,
    print_json,
    report_checks,
    run_command_line,
    say,
    waiting,
)
from readie.document import hash_document
from readie.errors import (
    BadDocument,
    BadFile,
    DatabaseBehind,
    DatabaseInUse,
    DatabaseUnavailable,
    UnknownCatalogue,
    UsageError,
)
from readie.files import replaced
from readie.flavor import parse_flavor
from readie.http import connection, read_answer, unreachable
from readie.logs import log_to_stderr
from readie.projection import changed_while_read, load_catalogue
from readie.settings import check_token, read_settings
from readie.units import parse_size
from readie.wire import (
    ActivateRequest,
    CallState,
    CallView,
    CatalogueSummary,
    ExplainRequest,
    Explanation,
    ImportedCatalogue,
    SessionState,
    SessionView,
    SqlAnswer,
    SqlRequest,
    WorkerView,
)

app = typer.Typer(
    help="The Readie router: it places calls on workers, each on the checkpoint that costs least.",
    epilog="Example: readie-router serve --port 8700",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
add_version(app, "readie-router")

DatabaseUrl = Annotated[
    str | None,
    typer.Option("--database", envvar="DATABASE_URL", help="Default: duckdb:///readie.duckdb", show_default=False),
]
RouterUrl = Annotated[
    str | None,
    typer.Option(
        "--router", envvar="ROUTER_URL", help="Ask the router that serves there, not the database.", show_default=False
    ),
]
WorkerOption = Annotated[
    str | None, typer.Option("--worker", help="Only those of the worker with this id.", show_default=False)
]
LimitOption = Annotated[int, typer.Option(min=1, max=MOST_LISTED, help="How many at most.")]
OffsetOption = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="How many to leave out first.")]
#: Seconds that a router may take to import what was sent to it.
IMPORT_TIMEOUT = 900.0


Answer = TypeVar("Answer")


@app.command(epilog="Example: readie-router serve --port 8700")
def serve(
    host: Annotated[
        str | None, typer.Option(envvar="ROUTER_HOST", help="Default: 127.0.0.1", show_default=False)
    ] = None,
    port: Annotated[
        str | None, typer.Option(envvar="ROUTER_PORT", help="Default: 8700; 0: any free one", show_default=False)
    ] = None,
    database: DatabaseUrl = None,
    migrate_first: Annotated[
        bool | None,
        typer.Option(
            "--migrate/--no-migrate",
            help="Bring the database up to date first. Default: only a DuckDB file.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve the API until stopped; catalogues of CATALOGUE_DIR are imported at start, and again at each SIGHUP."""
    settings = _settings(database, ROUTER_HOST=host, ROUTER_PORT=port)
    log_to_stderr(logging.INFO, settings.log_format)
    folder = None if settings.catalogue_dir is None else Path(settings.catalogue_dir)
    certificate = server_certificate(settings)
    hangups = Hangups()
    with (
        hangups.received(),
        listen(settings) as listener,
        closing(open_database(settings.database_url)) as opened,
    ):
        wake_ups = WakeUps()
        application = create_app(settings, opened, wake_ups)
        _bring_up_to_date(opened, settings, wanted=migrate_first)
        load_catalogue_dir(opened, folder)
        address, bound_port = listener.getsockname()[:2]
        config = uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=10,
            server_header=False,
            ssl_context_factory=None if certificate is None else lambda _config, _default: certificate,
        )
        structlog.get_logger().info("serving", host=address, port=bound_port, tls=certificate is not None)
        with hangups.answered(lambda: _read_again(opened, folder)):
            _Server(config, wake_ups).run(sockets=[listener])


def _read_again(opened: Database, folder: Path | None) -> None:
    """Looks at the files of CATALOGUE_DIR as at start; whatever goes wrong, the router goes on with what it has."""
    log = structlog.get_logger()
    log.info("reading CATALOGUE_DIR again", folder=str(folder))
    try:
        warnings = load_catalogue_dir(opened, folder)
    except DatabaseUnavailable as error:
        log.warning("CATALOGUE_DIR was not read", reason=error.detail)
    except Exception:
        log.exception("CATALOGUE_DIR was not read")
    else:
        log.info("CATALOGUE_DIR was read", warnings=len(warnings))


class _Server(uvicorn.Server):
    """A server whose long polls end as soon as it is told to stop."""

    def __init__(self, config: uvicorn.Config, wake_ups: WakeUps) -> None:
        super().__init__(config)
        self.wake_ups = wake_ups

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        # Not uvicorn's own: it would raise the signal again after the shutdown, and the process end by that.
        self.wake_ups.close()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


@app.command(epilog="Example: readie-router upgrade --database postgresql+psycopg://readie@db/readie")
def upgrade(as_json: JsonOption = False, database: DatabaseUrl = None) -> None:
    """Bring the database to this version's schema, as `alembic upgrade head` does in a checkout."""
    settings = _settings(database)
    with closing(open_database(settings.database_url)) as opened:
        before, _ = read_revisions(opened)
        _naming_it(opened, migrate)
        after, _ = read_revisions(opened)
    if as_json:
        print_json({"before": before, "revision": after})
    else:
        print("The database is up to date.")


@app.command("import", epilog="Example: readie-router import generation/cpu/catalogue.json")
def import_file(
    file: Annotated[Path, typer.Argument(help="A catalogue document.")],
    as_json: JsonOption = False,
    database: DatabaseUrl = None,
    router: RouterUrl = None,
) -> None:
    """Import a catalogue and make it the active one of its flavor, until that flavor's file in CATALOGUE_DIR changes."""
    settings = _settings(database)
    _check_file(file)
    router = router or _find_router(settings)
    with waiting(f"Importing {file}", as_json=as_json):
        imported = _import_here(settings, file) if router is None else _send_document(router, settings, file)
    if as_json:
        print_json(imported)
        return
    for warning in imported.warnings:
        say(f"warning: {warning}")
    _print_active(imported)


def _import_here(settings: RouterSettings, file: Path) -> ImportedCatalogue:
    try:
        catalogue = load_catalogue(file)
    except OSError as error:
        raise BadFile(f"{file}: {error.strerror}") from error
    with closing(open_database(settings.database_url)) as opened:
        _bring_up_to_date(opened, settings)
        import_catalogue(opened, catalogue)
        summary = read_summary(opened, catalogue.sha256)
    return ImportedCatalogue(**msgspec.structs.asdict(summary), warnings=list(catalogue.warnings))


def _send_document(router: str, settings: RouterSettings, file: Path) -> ImportedCatalogue:
    """Has a router import the file, which is read a piece at a time."""
    check_token("AUTH_TOKEN", settings.auth_token or "")
    options = connection(router, settings.auth_token or "", settings.router_ca, named="--router ")
    sha256 = hash_document(file)
    try:
        timeout = httpx.Timeout(30, read=IMPORT_TIMEOUT)
        with file.open("rb") as document, httpx.Client(**options, timeout=timeout) as http:
            headers = {"Content-Type": "application/json"}
            answer = http.post("/v1/catalogues", params={"sha256": sha256}, content=document, headers=headers)
        return read_answer(answer, ImportedCatalogue)
    except BadDocument as error:
        raise BadDocument(f"{file}{error.detail.removeprefix('the body')}", error.hint) from error
    except httpx.LocalProtocolError as error:  # it is longer or shorter than it was
        raise changed_while_read(file) from error
    except httpx.HTTPError as error:
        raise unreachable(router, error) from error
    except OSError as error:
        raise BadFile(f"{file}: {error.strerror}") from error


@app.command(epilog="Example: readie-router export catalogues/cpu.json cpu.duckdb")
def export(
    file: Annotated[Path, typer.Argument(help="A catalogue document.")],
    to: Annotated[Path, typer.Argument(help="The DuckDB file to make.")],
    as_json: JsonOption = False,
) -> None:
    """Write a catalogue as a DuckDB file with the views of docs/sql.md, for the duckdb shell and other tools.

    No router and no database is asked. The file has the storage format of DuckDB 1.2; tried with the shell of 1.5.6.
    """
    if to.exists():
        raise BadFile(f"{to} is there already", "Remove it, or name another file.")
    if not to.absolute().parent.is_dir():
        raise BadFile(f"{to}: there is no folder {to.parent}", "Make it, or name another file.")
    _check_file(file)
    with (
        waiting(f"Exporting {file}", as_json=as_json),
        tempfile.TemporaryDirectory(prefix="readie-export-") as folder,
        replaced(to) as aside,
    ):
        catalogue = load_catalogue(file)
        whole = Path(folder) / "readie.duckdb"
        with closing(open_database(f"duckdb:///{whole}")) as opened:
            migrate(opened)
            import_catalogue(opened, catalogue)
            summary = read_summary(opened, catalogue.sha256)
        aside.unlink(missing_ok=True)  # of an export that was killed
        copy_duckdb(whole, aside)
    if as_json:
        print_json(summary)
    else:
        print(f"{to}: {summary.flavor}, {summary.items} items, {summary.checkpoints} checkpoints")


def _check_file(file: Path) -> None:
    """Raises `BadFile` for a file that is not there."""
    if not file.is_file():
        reason = "it is not a file" if file.exists() else "no such file"
        raise BadFile(f"{file}: {reason}", "Name a catalogue document, such as generation/cpu/catalogue.json.")


@app.command(epilog="Example: readie-router activate 0123abcd4567 --flavor cpu")
def activate(
    sha256: Annotated[str, typer.Argument(help="Of an imported catalogue, or how it begins; catalogues lists them.")],
    *,
    flavor: Annotated[str, typer.Option(help="cpu or gpu")] = "cpu",
    as_json: JsonOption = False,
    database: DatabaseUrl = None,
    router: RouterUrl = None,
) -> None:
    """Make an imported catalogue the active one of its flavor, an earlier one too, until that flavor's file changes."""
    asked = parse_flavor(flavor)
    settings = _settings(database)
    sha256 = _whole_sha256(sha256, settings, router)
    request = ActivateRequest(sha256=sha256)

    def activate_here(opened: Database) -> CatalogueSummary:
        activate_catalogue(opened, sha256, asked)
        return read_summary(opened, sha256)

    route = ("POST", f"/v1/catalogues/{asked}/activate", request)
    activated = _answer(settings, router, activate_here, route, CatalogueSummary)
    if as_json:
        print_json(activated)
    else:
        _print_active(activated)


def _print_active(catalogue: CatalogueSummary) -> None:
    print(
        f"{catalogue.flavor}: active is {catalogue.sha256[:12]}, generation {catalogue.generation[:12]}, "
        f"{catalogue.items} items, {catalogue.checkpoints} checkpoints"
    )


@app.command(epilog="Example: readie-router explain pandas sklearn.svm.SVC --package 'numpy>=2'")
def explain(
    modules: Annotated[list[str], typer.Argument(help="What a call imports.", metavar="MODULE...")],
    *,
    flavor: Annotated[str, typer.Option(help="cpu or gpu")] = "cpu",
    package: Annotated[list[str] | None, typer.Option(help="A requirement of the call; repeatable.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="The call's budget, such as 512Mi: larger checkpoints drop out.")
    ] = None,
    catalogue: Annotated[
        str | None, typer.Option(help="SHA-256 of an imported one, or how it begins; default: the active one.")
    ] = None,
    items_of: Annotated[str | None, typer.Option(help="List what this checkpoint (or: cold) lacks, too.")] = None,
    as_json: JsonOption = False,
    database: DatabaseUrl = None,
    router: RouterUrl = None,
) -> None:
    """Show what every checkpoint would cost for some modules, cheapest first, and why."""
    asked = {
        "modules": modules,
        "flavor": parse_flavor(flavor),
        "packages": package or [],
        "memory": None if memory is None else parse_size(memory),
        "catalogue": catalogue,
        "items_of": items_of,
    }
    _check_texts(*modules, *(package or ()), items_of)
    settings = _settings(database)
    if catalogue is not None:
        asked["catalogue"] = _whole_sha256(catalogue, settings, router)
    try:
        request = msgspec.convert(asked, ExplainRequest)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        what = {"modules": "MODULE", "packages": "--package", "items_of": "--items-of"}
        raise UsageError(f"{what.get(place.partition('[')[0].rstrip('`'), place)}: {reason}") from error
    explanation = _read(
        settings,
        router,
        lambda connection: explain_modules(connection, request, settings.packages_policy),
        ("POST", "/v1/explain", request),
        Explanation,
    )
    if as_json:
        print_json(explanation)
    else:
        _print_explanation(explanation)


def _check_texts(*arguments: str | None) -> None:
    """Raises `UsageError` for an argument that was not text, but any bytes."""
    for each in arguments:
        try:
            (each or "").encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{each!r} is not text", "Give names as they are written in code.") from error


@app.command(epilog="Example: readie-router catalogues --json")
def catalogues(as_json: JsonOption = False, database: DatabaseUrl = None, router: RouterUrl = None) -> None:
    """List the imported catalogues."""
    summaries = _read(
        _settings(database), router, read_summaries, ("GET", "/v1/catalogues", None), list[CatalogueSummary]
    )
    if as_json:
        print_json(summaries)
        return
    table = Table("flavor", "active", "catalogue", "generation", "alpha s/MB", "items", "checkpoints", "imported")
    for each in summaries:
        _add_row(
            table,
            each.flavor,
            "yes" if each.active else "",
            each.sha256[:12],
            each.generation[:12],
            f"{each.alpha:g}",
            str(each.items),
            str(each.checkpoints),
            f"{each.imported_at:%Y-%m-%d %H:%M}",
        )
    _print(table)


@app.command(epilog="Example: readie-router workers --router http://127.0.0.1:8700")
def workers(as_json: JsonOption = False, database: DatabaseUrl = None, router: RouterUrl = None) -> None:
    """List the workers, with what is taken of them."""
    views = _read(
        _settings(database), router, read_workers, ("GET", f"/v1/workers?limit={MOST_WORKERS}", None), list[WorkerView]
    )
    if as_json:
        print_json(views)
        return
    table = Table(
        "worker", "flavor", "state", "runtime", "Python", "memory", "GPU memory", "sandboxes", "calls", "heard"
    )
    for each in views:
        _add_row(
            table,
            each.worker_id,
            each.flavor,
            each.state,
            each.runtime,
            each.python,
            _taken(each.memory_used + each.memory_reserved, each.memory_total),
            "" if each.gpu_total is None else _taken(each.gpu_used + each.gpu_reserved, each.gpu_total),
            f"{each.sandboxes} of {each.max_sandboxes}" if each.max_sandboxes else str(each.sandboxes),
            str(each.in_flight),
            f"{each.heard_at:%H:%M:%S}",
        )
    _print(table)


@app.command(epilog="Example: readie-router calls --state failed --since 2026-11-30")
def calls(
    *,
    state: Annotated[CallState | None, typer.Option(help="Only those in this state.", show_default=False)] = None,
    function: Annotated[
        str | None, typer.Option(help="Only those of the function with this name.", show_default=False)
    ] = None,
    worker: WorkerOption = None,
    since: Annotated[
        datetime | None,
        typer.Option(help="Only those placed then or later; a time in UTC.", formats=SINCE_FORMATS, show_default=False),
    ] = None,
    limit: LimitOption = 100,
    offset: OffsetOption = 0,
    as_json: JsonOption = False,
    database: DatabaseUrl = None,
    router: RouterUrl = None,
) -> None:
    """List the calls, the latest first: where they were placed, and how long it took until they were ready."""
    _check_texts(function, worker)
    moment = None if since is None else since.replace(tzinfo=UTC)
    asked: dict[str, str | None] = {"state": state, "function": function, "worker_id": worker}
    asked["since"] = None if moment is None else moment.isoformat()
    views = _read(
        _settings(database),
        router,
        lambda connection: read_calls(
            connection, state=state, function=function, worker_id=worker, since=moment, limit=limit, offset=offset
        ),
        _page("/v1/calls", asked, limit, offset),
        list[CallView],
    )
    if as_json:
        print_json(views)
        return
    table = Table("call", "function", "state", "placed", "worker", "checkpoint", "predicted s", "ready s")
    for column in table.columns[-2:]:
        column.justify = "right"
    for each in views:
        _add_row(
            table,
            each.call_id,
            each.function,
            each.state,
            f"{each.created_at:%Y-%m-%d %H:%M:%S}",
            each.worker_id or "",
            each.checkpoint_id or "",
            "" if each.predicted_ready is None else f"{each.predicted_ready:.3f}",
            "" if each.measured_ready is None else f"{each.measured_ready:.3f}",
        )
    _print(table)
    _say_if_full(views, limit)


@app.command(epilog="Example: readie-router sessions --state busy")
def sessions(
    *,
    state: Annotated[SessionState | None, typer.Option(help="Only those in this state.", show_default=False)] = None,
    worker: WorkerOption = None,
    limit: LimitOption = 100,
    offset: OffsetOption = 0,
    as_json: JsonOption = False,
    database: DatabaseUrl = None,
    router: RouterUrl = None,
) -> None:
    """List the sessions, the latest first; those that have expired are remembered for a day."""
    _check_texts(worker)
    views = _read(
        _settings(database),
        router,
        lambda connection: read_sessions(connection, state=state, worker_id=worker, limit=limit, offset=offset),
        _page("/v1/sessions", {"state": state, "worker_id": worker}, limit, offset),
        list[SessionView],
    )
    if as_json:
        print_json(views)
        return
    table = Table("session", "worker", "state", "call", "waiting", "memory", "begun", "used")
    for each in views:
        _add_row(
            table,
            each.session_id,
            each.worker_id,
            each.state,
            each.call_id or "",
            str(each.waiting),
            "" if each.memory is None else f"{each.memory / 2**30:.1f} GiB",
            f"{each.created_at:%Y-%m-%d %H:%M:%S}",
            f"{each.used_at:%Y-%m-%d %H:%M:%S}",
        )
    _print(table)
    _say_if_full(views, limit)


def _page(path: str, asked: Mapping[str, str | None], limit: int, offset: int) -> tuple[str, str, None]:
    """The route of a list: what is None is not asked for."""
    query = {name: value for name, value in asked.items() if value is not None}
    return "GET", f"{path}?{urlencode({**query, 'limit': limit, 'offset': offset})}", None


def _say_if_full(listed: Sequence[object], limit: int) -> None:
    if len(listed) == limit:
        say(f"These are {limit}, and there may be more: --limit and --offset show others.")


@app.command(epilog="Example: readie-router sql 'SELECT * FROM package_costs ORDER BY load_ns DESC LIMIT 5'")
def sql(
    query: Annotated[
        str | None,
        typer.Argument(
            help="A SELECT, a file with one, or - for standard input; none: list the views.", metavar="QUERY"
        ),
    ] = None,
    *,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    rows: Annotated[int, typer.Option(help="Rows to print at most, up to 100,000.")] = 1000,
    seconds: Annotated[float, typer.Option(help="Time that the query may take, up to 300.")] = 20.0,
    database: DatabaseUrl = None,
    router: RouterUrl = None,
) -> None:
    """Run a SELECT over the views that docs/sql.md describes; it cannot change anything."""
    if as_json and as_csv:
        raise UsageError("--json and --csv: give one of them")
    if query is None:
        _print_sql(
            SqlAnswer(columns=["view", "tells"], rows=[list(each) for each in list_views()], more=False),
            as_json,
            as_csv,
        )
        return
    try:
        request = msgspec.convert({"query": _read_query(query), "rows": rows, "seconds": seconds}, SqlRequest)
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from error
    answer = _answer(
        _settings(database), router, lambda opened: run_query(opened, request), ("POST", "/v1/sql", request), SqlAnswer
    )
    _print_sql(answer, as_json, as_csv)
    if answer.more:
        say(f"These are the first {rows} rows, and there are more: --rows allows more of them.")


@app.command(epilog="Example: readie-router check --json")
def check(as_json: JsonOption = False, database: DatabaseUrl = None) -> None:
    """Look for what must never be in the database; exit code 1 if there is something, 0 if not.

    Routers may run meanwhile. A DuckDB file belongs to its router: stop that first. Warnings are of what may be for a
    while, and count for nothing.
    """
    settings = _settings(database)
    _refuse_missing_file(settings)
    with closing(open_database(settings.database_url)) as opened:
        _naming_it(opened, check_schema)
        with opened.reading() as connection:
            findings = check_rows(connection, settings)
    if as_json:
        print_json(findings)
    else:
        for each in findings:
            print(plain(f"{'' if each.wrong else 'warning: '}{each.rule}: {each.about}: {each.found}"))
    if any(each.wrong for each in findings):
        raise typer.Exit(1)
    if not as_json:
        print("Nothing is wrong.")


@app.command(epilog="Example: readie-router doctor --json")
def doctor(as_json: JsonOption = False, database: DatabaseUrl = None) -> None:
    """Look at all that a router needs, and say how to mend it; exit code 1 if something fails. It changes nothing.

    Settings, tokens, certificate, catalogue files, address, database with its schema, rights and clock, catalogues,
    workers, and rows, as `check` looks at them.
    """
    from app.doctor import examine

    report_checks(examine(os.environ | ({} if database is None else {"DATABASE_URL": database})), as_json=as_json)


def _read_query(query: str) -> str:
    """The query that was given, or that of the file or of standard input."""
    if any(each.isspace() for each in query.strip()) and not query.endswith(".sql"):
        return query
    try:
        return (sys.stdin.buffer.read() if query == "-" else Path(query).read_bytes()).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadFile(f"{query}: {reason}", "Give a SELECT in one argument, or a file with one in UTF-8.") from error


def _taken(taken: int, total: int | None) -> str:
    of = "unknown" if total is None else f"{total / 2**30:.1f}"
    return f"{taken / 2**30:.1f} of {of} GiB"


# ---- where answers come from ----


def _whole_sha256(given: str, settings: RouterSettings, router: str | None) -> str:
    """The SHA-256 of the catalogue that is meant by how it begins, as `catalogues` prints it.

    Raises `UsageError` for what is none, and for the beginning of several; `UnknownCatalogue`.
    """
    way_out = "readie-router catalogues lists them."
    if re.fullmatch("[0-9a-f]{64}", given):
        return given
    if not re.fullmatch("[0-9a-f]{6,63}", given):
        raise UsageError(f"{given!r} is not a SHA-256, nor the first 6 digits of one or more", way_out)
    route = ("GET", "/v1/catalogues", None)
    listed = {each.sha256 for each in _read(settings, router, read_summaries, route, list[CatalogueSummary])}
    meant = sorted(each for each in listed if each.startswith(given))
    if not meant:
        raise UnknownCatalogue(f"none begins with {given}", way_out)
    if len(meant) > 1:
        raise UsageError(f"{given} begins {', '.join(each[:16] for each in meant)}", "Give more of its digits.")
    return meant[0]


def _settings(database: str | None, **options: str | None) -> RouterSettings:
    """The settings of the environment, with what was given on the command line in their place."""
    given = {"DATABASE_URL": database, **options}
    return read_settings(
        RouterSettings, os.environ | {name: value for name, value in given.items() if value is not None}
    )


def _bring_up_to_date(opened: Database, settings: RouterSettings, *, wanted: bool | None = None) -> None:
    """Migrates if so wanted (None: an embedded file only), else raises `DatabaseBehind` where it is behind."""
    if settings.database_url.startswith("duckdb:") if wanted is None else wanted:
        _naming_it(opened, migrate)
    else:
        _naming_it(opened, check_schema)


def _naming_it(opened: Database, action: Callable[[Database], None]) -> None:
    """Does it, and says which database it is that is behind: what the router answers to others does not."""
    try:
        action(opened)
    except DatabaseBehind as error:
        raise DatabaseBehind(f"{shown(opened.engine.url)}: {error.detail}", error.hint) from error


def _read(
    settings: RouterSettings,
    router: str | None,
    from_database: Callable[[Connection], Answer],
    route: tuple[str, str, msgspec.Struct | None],
    kind: type[Answer],
) -> Answer:
    """As `_answer`, of a connection to read with."""

    def read(opened: Database) -> Answer:
        with opened.reading() as connection:
            return from_database(connection)

    return _answer(settings, router, read, route, kind)


def _answer(
    settings: RouterSettings,
    router: str | None,
    from_database: Callable[[Database], Answer],
    route: tuple[str, str, msgspec.Struct | None],
    kind: type[Answer],
) -> Answer:
    """The answer of the database, or of a router: the one that was named, or the one that has the file open."""
    if router is not None:
        return _ask(router, settings, route, kind)
    _refuse_missing_file(settings)
    try:
        opened = open_database(settings.database_url)
    except DatabaseInUse:
        return _ask(_router_of(settings), settings, route, kind)
    with closing(opened):
        _naming_it(opened, check_schema)
        return from_database(opened)


def _refuse_missing_file(settings: RouterSettings) -> None:
    """Raises `DatabaseUnavailable` for a DuckDB file that is not there: opening it would create it."""
    file = _duckdb_file(settings)
    if settings.database_url.startswith("duckdb:///") and not Path(file).exists():
        raise DatabaseUnavailable(
            f"{file}: no such file", "Start a router with readie-router serve, or name the file in DATABASE_URL."
        )


def _find_router(settings: RouterSettings) -> str | None:
    """The router to ask, if another process has the DuckDB file open."""
    if settings.database_url.startswith("duckdb:///") and Path(_duckdb_file(settings)).exists():
        try:
            open_database(settings.database_url).close()
        except DatabaseInUse:
            return _router_of(settings)
    return None


def _router_of(settings: RouterSettings) -> str:
    """The router that should be the one that has the DuckDB file open; says so."""
    router = f"{'https' if settings.tls_cert else 'http'}://{settings.host}:{settings.port}"
    say(f"{_duckdb_file(settings)} is open in another process: asking the router at {router} (--router names another)")
    return router


def _duckdb_file(settings: RouterSettings) -> str:
    return settings.database_url.removeprefix("duckdb:///").partition("?")[0]


def _ask(
    router: str, settings: RouterSettings, route: tuple[str, str, msgspec.Struct | None], kind: type[Answer]
) -> Answer:
    method, path, body = route
    check_token("AUTH_TOKEN", settings.auth_token or "")
    options = connection(router, settings.auth_token or "", settings.router_ca, named="--router ")
    content = None if body is None else msgspec.json.encode(body)
    try:
        timeout = 30 + (body.seconds if isinstance(body, SqlRequest) else 0)
        with httpx.Client(**options, timeout=timeout) as http:
            answer = http.request(method, path, content=content, headers={"Content-Type": "application/json"})
    except httpx.HTTPError as error:
        raise unreachable(router, error) from error
    return read_answer(answer, kind)


# ---- what is printed ----


def _print_explanation(explanation: Explanation) -> None:
    if explanation.catalogue is None or explanation.generation is None:
        print(f"Flavor {explanation.flavor} has no active catalogue: every call starts cold.")
        return
    print(
        f"{explanation.flavor} catalogue {explanation.catalogue[:12]}, generation {explanation.generation[:12]}, "
        f"{explanation.alpha:g} seconds per MB"
    )
    for match in explanation.matches:
        if match.item != match.module:
            stands = f"stands for {match.item}" if match.item else "matches no item, counts nowhere"
            print(plain(f"  {match.module}: {stands}"))
    for skipped in explanation.skipped:
        why = skipped.reason or f"{skipped.installed or 'it'} is there"
        print(plain(f"  {skipped.requirement}: skipped, {why}"))
    for kept in explanation.kept:
        print(plain(f"  {kept.requirement}: installed for the call, {kept.reason}"))
    table = Table("option", "size s", "missing s", "total s", "")
    for column in table.columns[1:4]:
        column.justify = "right"
    for place, option in enumerate(explanation.options):
        note = f"no option: {option.excluded}" if option.excluded else "chosen" if place == 0 else ""
        numbers = (f"{seconds:.6f}" for seconds in (option.size, option.missing, option.total))
        _add_row(table, option.checkpoint_id or "cold start", *numbers, note)
    _print(table)
    for option in explanation.options:
        if option.items:
            title = _cell(f"{option.checkpoint_id or 'A cold start'} lacks")
            lacks = Table("seconds", "item", title=title, title_justify="left")
            lacks.columns[0].justify = "right"
            for item in option.items:
                _add_row(lacks, f"{item.seconds:.6f}", item.item)
            _print(lacks)


def _print_sql(answer: SqlAnswer, as_json: bool, as_csv: bool) -> None:
    if as_json:
        print_json(answer)
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(answer.columns)
        writer.writerows([cell_of_csv(each) for each in row] for row in answer.rows)
    else:
        table = Table(*(Column(_cell(name)) for name in answer.columns))
        for column, values in zip(table.columns, zip(*answer.rows, strict=True), strict=False):
            if all(isinstance(each, int | float | None) for each in values):
                column.justify = "right"
        for row in answer.rows:
            _add_row(table, *(_shown(each) for each in row))
        _print(table)


def _shown(value: object) -> str:
    """A value for people: fractions with six places, lists with commas, nothing for null."""
    match value:
        case None:
            return ""
        case float():
            return f"{value:.6f}"
        case list():
            return ", ".join(_shown(each) for each in value)
    return str(value)


def _add_row(table: Table, *cells: str) -> None:
    """Names are whatever somebody called a thing: no markup, and nothing that a terminal obeys."""
    table.add_row(*(_cell(text) for text in cells))


def _cell(text: str) -> Text:
    return Text(plain(text))


def _print(table: Table) -> None:
    console = Console()
    # A pipe has no width: a table in it is as wide as it needs to be.
    (console if console.is_terminal else Console(width=500)).print(table)


def main() -> None:
    """Entry of the console script."""
    log_to_stderr(logging.WARNING)
    run_command_line("readie-router", app)


if __name__ == "__main__":
    main()
