"""The pages about a catalogue: its items, what packages cost, what checkpoints hold, and what their size is worth."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import QueryParameter
from sqlalchemy import Connection, Row

from app.api import FlavorQuery
from app.catalogue import find_catalogue, list_catalogues, list_checkpoints
from app.dashboard.charts import Plot, plot, slope_of
from app.dashboard.render import page
from app.database import Database
from app.sql import statement
from readie.cost import COLD
from readie.errors import UnknownCatalogue
from readie.flavor import parse_flavor
from readie.units import ns_to_seconds
from readie.wire import MAX_NAME

#: Packages in the chart of costs and in the matrix.
MOST_PACKAGES = 20
MOST_ROWS = 15
#: Items that one search lists.
MOST_ITEMS = 20

_Sha256 = Annotated[str, QueryParameter(name="catalogue", pattern="^([0-9a-f]{64})?$")]


@dataclass(frozen=True)
class Saving:
    """A checkpoint: its size and the price of that, what it holds, and what a call that needs all of it saves."""

    checkpoint_id: str
    size_mb: float
    size_ns: int
    held_ns: int

    @property
    def saved_ns(self) -> int:
        """Against a cold start, at most."""
        return self.held_ns - self.size_ns


@dataclass(frozen=True)
class Fit:
    """How well alpha says what calls measured: restores by size, and lines as (seconds at 0, seconds per MB)."""

    restores: Sequence[Row[Any]]
    fixed_ns: int | None
    measured: tuple[float, float] | None
    plot: Plot | None


@get("/catalogue", operation_id="showCatalogue", sync_to_thread=True)
def show_catalogue(
    database: NamedDependency[Database], flavor: FlavorQuery = None, sha256: _Sha256 = ""
) -> Response[str]:
    """A catalogue: the one with this SHA-256, else the active one of the flavor, else any."""
    with database.browsing() as connection:
        catalogues = list_catalogues(connection)
        chosen = _choose(catalogues, parse_flavor(flavor).value if flavor else None, sha256)
        if chosen is None:
            return page("catalogue.html", catalogues=catalogues, chosen=None)
        of = {"catalogue_id": chosen.catalogue_id}
        packages = connection.execute(statement("costliest_packages"), {**of, "at_most": MOST_PACKAGES}).all()
        savings = read_savings(connection, chosen.catalogue_id)
        rows = [package.distribution for package in packages[:MOST_ROWS]]
        held = connection.execute(statement("packages_in_checkpoints"), {**of, "distributions": rows}).all()
        fit = _read_fit(connection, chosen)
    points = [(each.size_mb, ns_to_seconds(each.saved_ns), each.checkpoint_id) for each in savings]
    return page(
        "catalogue.html",
        catalogues=catalogues,
        chosen=chosen,
        packages=packages,
        most_ns=max((package.load_ns for package in packages), default=0),
        savings=savings,
        savings_plot=plot(points) if points else None,
        matrix_rows=packages[:MOST_ROWS],
        matrix={(each.distribution, each.ordinal): each for each in held},
        fit=fit,
    )


def _choose(catalogues: Sequence[Row[Any]], flavor: str | None, sha256: str) -> Row[Any] | None:
    if sha256:
        chosen = next((each for each in catalogues if each.sha256 == sha256), None)
        if chosen is None:
            raise UnknownCatalogue(f"no catalogue {sha256}")
        return chosen
    mine = [each for each in catalogues if flavor in (None, each.flavor)]
    return next((each for each in mine if each.active), mine[0] if mine else None)


def read_savings(connection: Connection, catalogue_id: int) -> list[Saving]:
    """The checkpoints of a catalogue, in its order, with what they hold.

    A call that needs every item pays a checkpoint's price and what it lacks: what is left to the cold start's cost is what
    the checkpoint saves, for it or for one that needs what the checkpoint holds and no more.
    """
    rows = connection.execute(statement("price_everything"), {"catalogue_id": catalogue_id})
    costs = {row.ordinal: row.cost_ns for row in rows}
    return [
        Saving(
            checkpoint_id=each.checkpoint_id,
            size_mb=each.size_mb,
            size_ns=each.size_ns,
            held_ns=costs[COLD] - costs[each.ordinal] + each.size_ns,
        )
        for each in list_checkpoints(connection, catalogue_id)
    ]


def _read_fit(connection: Connection, catalogue: Row[Any]) -> Fit:
    of = {"generation": catalogue.generation}
    restores = connection.execute(statement("restores_by_size"), of).all()
    fixed_ns = connection.execute(statement("fixed_parts"), of).one().restore_fixed_ns
    points = [(row.size_mb, row.restore_ns / 1e9) for row in restores]
    names = [(size_mb, seconds, row.checkpoint_id) for (size_mb, seconds), row in zip(points, restores, strict=True)]
    line = None if fixed_ns is None else (ns_to_seconds(fixed_ns), catalogue.alpha)
    return Fit(restores, fixed_ns, slope_of(points), plot(names, line) if points else None)


@get("/catalogue/items", operation_id="searchItems", sync_to_thread=True)
def search_items(
    database: NamedDependency[Database],
    sha256: _Sha256,
    wanted: Annotated[str, QueryParameter(max_length=MAX_NAME)] = "",
) -> Response[str]:
    """The items of a catalogue whose key contains the text: a part of the page, for each letter that is typed."""
    asked = {"wanted": wanted.strip(), "at_most": MOST_ITEMS}
    with database.browsing() as connection:
        catalogue = find_catalogue(connection, sha256)
        if catalogue is None:
            raise UnknownCatalogue(f"no catalogue {sha256}")
        found: Sequence[Row[Any]] = ()
        if asked["wanted"]:
            found = connection.execute(
                statement("search_items"), {**asked, "catalogue_id": catalogue.catalogue_id}
            ).all()
    return page("items.html", items=found, wanted=asked["wanted"], flavor=catalogue.flavor)
