"""The page that explains: from code or names of modules to what every option would cost."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from keyword import iskeyword
from typing import Annotated, Any

import msgspec
from litestar import Response, get, post
from litestar.concurrency import sync_to_thread
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter
from sqlalchemy import Row

from app.api import Serving, WireRequest, check_text
from app.api.calls import explain_together
from app.catalogue import list_catalogues
from app.dashboard.charts import Bar, stack
from app.dashboard.render import page
from app.database import Database
from readie.errors import BadRequest, ReadieError
from readie.flavor import parse_flavor
from readie.imports import imports_of_source
from readie.units import parse_size
from readie.wire import MAX_MODULES, MAX_NAME, ExplainRequest, Explanation, Option, problem_of

#: Characters of code that are taken: to parse them takes some 30 times as much memory.
MOST_CODE = 200_000

#: A name as people type it, and what a list of names is made of: such names, and in quotes any others.
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*|(dataset|model|tokenizer):[^\s,]+")
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s,]+')


@dataclass(frozen=True)
class Asked:
    """What somebody typed, and the modules that it asks for."""

    text: str
    flavor: str
    memory: str
    modules: list[str]
    is_code: bool
    left_out: int  # modules that the code asks for besides


@dataclass(frozen=True)
class Priced:
    """An option with its bar: the price of its size, then what it lacks."""

    option: Option
    bar: list[Bar]


def find_modules(text: str) -> tuple[list[str], bool]:
    """The modules that a text names, or, where it is code, imports; and whether it is. Raises `BadRequest`."""
    names = _read_names(text)
    if names is None:
        asked = imports_of_source(text, "the code")
        if asked.errors:
            raise BadRequest(
                f"it is neither a list of modules nor Python: {asked.errors[0].message}",
                "Write names, such as pandas sklearn.svm, or paste code that Python can parse.",
            )
        return sorted(asked.names | asked.resources), True
    if any(len(name) > MAX_NAME for name in names) or len(names) > MAX_MODULES:
        raise BadRequest(f"names have {MAX_NAME} characters at most, and there are {MAX_MODULES} at most")
    return sorted(names), False


def _read_names(text: str) -> set[str] | None:
    """The names of a list of them, with blanks or commas between; None: it is no such list. Raises `BadRequest`."""
    names = set()
    for word in _WORD.findall(text):
        name = word
        if word.startswith('"'):
            with suppress(ValueError):
                name = json.loads(word)
            check_text(name)
        if not name or (name == word and not _is_plain(word)):
            return None
        names.add(name)
    return names


def write_names(names: Iterable[str]) -> str:
    """A list of names that `find_modules` reads: those that are not plain are in quotes, as in JSON."""
    return " ".join(name if _is_plain(name) else json.dumps(name, ensure_ascii=False) for name in names)


def _is_plain(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and not iskeyword(name)


@get("/explain", operation_id="showExplain")
async def show_explain(
    *,
    request: WireRequest,
    serving: NamedDependency[Serving],
    asked: Annotated[str, QueryParameter(max_length=16_000)] = "",
    module: FromQuery[list[str] | None] = None,
    flavor: Annotated[str, QueryParameter(max_length=16)] = "",
    memory: Annotated[str, QueryParameter(max_length=64)] = "",
) -> Response[str]:
    """The page, with what the address asks for: a text as it is typed, or each module by itself."""
    text = write_names(module) if module else asked
    return await sync_to_thread(_answer, request, serving, text, flavor, memory)


@post("/explain", operation_id="explainText", status_code=200)
async def explain_text(request: WireRequest, serving: NamedDependency[Serving]) -> Response[str]:
    """The same for what was typed or pasted: the whole page, or the explanation alone for the page that asks again."""
    form = await request.form()
    asked, flavor, memory = (str(form.get(name, "")) for name in ("asked", "flavor", "memory"))
    check_text(asked + flavor + memory)
    return await sync_to_thread(_answer, request, serving, asked, flavor, memory)


def _answer(request: WireRequest, serving: Serving, text: str, flavor: str, memory: str) -> Response[str]:
    context: dict[str, Any] = {"problem": None, "explanation": None, "found": None, "options": [], "closure": []}
    status = 200
    try:
        if len(text) > MOST_CODE:
            raise BadRequest(f"it has {len(text)} characters, {MOST_CODE} are taken at most")
        modules, is_code = find_modules(text)
        flavor_of_now = flavor or _first_flavor(serving.database)
        left_out = max(0, len(modules) - MAX_MODULES)
        found = Asked(text, flavor_of_now, memory, modules[:MAX_MODULES], is_code, left_out)
        context |= {"found": found}
        if text.strip():
            context |= _explain(serving, found)
    except ReadieError as error:
        status = error.status
        context |= {"problem": problem_of(error)}
    whole = "hx-request" not in request.headers
    typed = {"text": text, "flavor": flavor, "memory": memory}
    return page(
        "explain.html" if whole else "explanation.html", status_code=status, whole=whole, typed=typed, **context
    )


def _first_flavor(database: Database) -> str:
    with database.browsing() as connection:
        active: list[Row[Any]] = [row for row in list_catalogues(connection) if row.active]
    return str(active[0].flavor) if active else "cpu"


def _explain(serving: Serving, found: Asked) -> dict[str, Any]:
    asked = ExplainRequest(
        modules=found.modules,
        flavor=parse_flavor(found.flavor),
        memory=parse_size(found.memory.strip()) if found.memory.strip() else None,
        items_of="cold",
    )
    (explanation,) = explain_together(serving.database, serving.settings, [asked])
    most = max((option.total for option in explanation.options), default=0.0)
    return {
        "explanation": explanation,
        "options": [_price(option, most) for option in explanation.options],
        "closure": _closure(explanation),
    }


def _price(option: Option, most: float) -> Priced:
    parts = [("size", "s1", option.size), ("imports that it lacks", "s2", option.missing)]
    return Priced(option, stack(parts, most))


def _closure(explanation: Explanation) -> list[dict[str, Any]]:
    """All that is needed, the most expensive first: what the cold start lacks."""
    cold = next((option for option in explanation.options if option.checkpoint_id is None), None)
    return [msgspec.structs.asdict(item) for item in (cold.items or [] if cold else [])]
