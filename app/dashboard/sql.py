"""The page with the SQL console: one SELECT over the views, with its limits; ready questions; the answer as CSV too."""

import csv
import io
from typing import Annotated, Any

from litestar import Response, get, post
from litestar.concurrency import sync_to_thread
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from app.api import WireRequest, check_text
from app.dashboard.render import page
from app.database import Database
from app.query import cell_of_csv, list_views, run_query
from app.sql import statement, statement_text, texts
from readie.errors import BadQuery, ReadieError
from readie.wire import SqlAnswer, SqlRequest, problem_of

#: Rows that the page shows and that a download has, at most, and seconds of a query.
MOST_SHOWN = 500
MOST_ROWS = 100_000
SECONDS = 20.0

#: Characters of a query, as the API has it.
MOST_QUERY = 100_000

#: What a spreadsheet would take for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def list_questions() -> dict[str, tuple[str, str]]:
    """Name → the question in words and in SQL."""
    return {
        name.removeprefix("question_"): (text.partition("\n")[0].removeprefix("-- "), statement_text(name))
        for name, text in texts().items()
        if name.startswith("question_")
    }


@get("/sql", operation_id="showSql", sync_to_thread=True)
def show_sql(
    database: NamedDependency[Database], question: Annotated[str, QueryParameter(max_length=64)] = ""
) -> Response[str]:
    """The console, with a ready question in it or none."""
    _, query = list_questions().get(question, ("", ""))
    return _show(database, query, question=question)


@post("/sql", operation_id="askSql", status_code=200)
async def ask_sql(request: WireRequest, database: NamedDependency[Database]) -> Response[str] | Response[bytes]:
    """The answer to a query: on the page, or as a file where the form asks for CSV."""
    form = await request.form()
    query, as_csv = str(form.get("query", "")), form.get("as") == "csv"
    check_text(query)
    whole = "hx-request" not in request.headers
    return await sync_to_thread(_ask, database, query, as_csv=as_csv, whole=whole)


def _ask(database: Database, query: str, *, as_csv: bool, whole: bool) -> Response[str] | Response[bytes]:
    try:
        if not query.strip() or len(query) > MOST_QUERY:
            raise BadQuery("it is empty" if not query.strip() else f"it has more than {MOST_QUERY} characters")
        most = MOST_ROWS if as_csv else MOST_SHOWN
        answer = run_query(database, SqlRequest(query=query, rows=most, seconds=SECONDS))
    except ReadieError as error:
        if whole:
            return _show(database, query, status_code=error.status, problem=problem_of(error))
        return page("sql_answer.html", status_code=error.status, problem=problem_of(error), answer=None, whole=False)
    if as_csv:
        # Where rows were left out, the name says so: a line about it would be taken for a row.
        name = f"readie-first-{most}-rows.csv" if answer.more else "readie.csv"
        headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
        return Response(write_csv(answer), media_type="text/csv", headers=headers)
    if whole:
        return _show(database, query, answer=answer)
    return page("sql_answer.html", problem=None, answer=answer, most=MOST_ROWS, whole=False)


def _show(database: Database, query: str, *, status_code: int = 200, **context: Any) -> Response[str]:
    views = list_views()
    columns: dict[str, list[str]] = {}
    with database.glancing() as connection:
        for row in connection.execute(statement("view_columns"), {"names": [name for name, _ in views]}):
            columns.setdefault(row.table_name, []).append(row.column_name)
    context = {"problem": None, "answer": None, "question": "", **context}
    return page(
        "sql.html",
        status_code=status_code,
        query=query,
        questions=list_questions(),
        views=[(name, about, columns.get(name, [])) for name, about in views],
        limits={"rows": MOST_SHOWN, "seconds": SECONDS},
        most=MOST_ROWS,
        whole=True,
        reader=database.reader_role(),
        **context,
    )


def write_csv(answer: SqlAnswer) -> bytes:
    """The answer as CSV, RFC 4180. Text that a spreadsheet would run as a formula gets an apostrophe before it."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(answer.columns)
    for row in answer.rows:
        writer.writerow(
            [
                f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else cell_of_csv(value)
                for value in row
            ]
        )
    return text.getvalue().encode()
