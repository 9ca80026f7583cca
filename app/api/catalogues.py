"""Routes about catalogues: which are there, what is in the active one of a flavor."""

from typing import Any

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath
from sqlalchemy import Connection, Row

from app.api import PROBLEMS
from app.catalogue import find_active_catalogue, list_checkpoints, read_checkpoint, read_item
from app.catalogue import list_catalogues as list_rows
from app.database import Database
from readie.errors import UnknownCatalogue, UnknownCheckpoint, UnknownItem
from readie.flavor import Flavor, parse_flavor
from readie.units import ns_to_seconds
from readie.wire import CatalogueSummary, CheckpointView, ItemView


def read_summaries(connection: Connection, flavor: Flavor | None = None) -> list[CatalogueSummary]:
    """All catalogues, or those of one flavor: the active one first, then the newest."""
    return [
        CatalogueSummary(
            sha256=row.sha256,
            generation=row.generation,
            flavor=Flavor(row.flavor),
            alpha=row.alpha,
            active=row.active,
            imported_at=row.imported_at,
            items=row.item_count,
            checkpoints=row.checkpoint_count,
            distributions=row.distribution_count,
        )
        for row in list_rows(connection, flavor)
    ]


@get("/catalogues", operation_id="listCatalogues", sync_to_thread=True, responses=PROBLEMS)
def list_all(database: NamedDependency[Database]) -> list[CatalogueSummary]:
    """The catalogues that are imported, by flavor: the active one first, then the newest."""
    with database.reading() as connection:
        return read_summaries(connection)


@get("/catalogues/{flavor:str}", operation_id="readCatalogue", sync_to_thread=True, responses=PROBLEMS)
def read_active(flavor: FromPath[str], database: NamedDependency[Database]) -> CatalogueSummary:
    """The active catalogue of a flavor."""
    with database.reading() as connection:
        _active(connection, flavor)
        return read_summaries(connection, parse_flavor(flavor))[0]


@get("/catalogues/{flavor:str}/items/{key:path}", operation_id="readItem", sync_to_thread=True, responses=PROBLEMS)
def read_one_item(flavor: FromPath[str], key: FromPath[str], database: NamedDependency[Database]) -> ItemView:
    """An item of the flavor's active catalogue, and what importing it costs with all that it needs."""
    key = key.removeprefix("/")
    with database.reading() as connection:
        catalogue = _active(connection, flavor)
        item = read_item(connection, catalogue.catalogue_id, key)
    if item is None:
        raise UnknownItem(f"{key}: the {flavor} catalogue has no such item")
    return ItemView(
        key=item.key,
        load_time=ns_to_seconds(item.load_ns),
        size_mb=item.size_mb,
        resource_type=item.resource_type,
        distribution=item.distribution,
        closure=item.closure,
        closure_load_time=ns_to_seconds(item.closure_load_ns),
        closure_size_mb=item.closure_size_mb,
    )


@get(
    "/catalogues/{flavor:str}/checkpoints/{checkpoint_id:str}",
    operation_id="readCheckpoint",
    sync_to_thread=True,
    responses=PROBLEMS,
)
def read_one_checkpoint(
    flavor: FromPath[str], checkpoint_id: FromPath[str], database: NamedDependency[Database]
) -> CheckpointView:
    """A checkpoint of the flavor's active catalogue, and what it holds."""
    with database.reading() as connection:
        catalogue = _active(connection, flavor)
        checkpoint = read_checkpoint(connection, catalogue.catalogue_id, checkpoint_id)
        if checkpoint is None:
            listed = [row.checkpoint_id for row in list_checkpoints(connection, catalogue.catalogue_id)]
            raise UnknownCheckpoint(f"{checkpoint_id}: the {flavor} catalogue lists {', '.join(listed) or 'none'}")
    return CheckpointView(
        checkpoint_id=checkpoint.checkpoint_id,
        ordinal=checkpoint.ordinal,
        size_mb=checkpoint.size_mb,
        canonical=checkpoint.canonical,
        items=checkpoint.items,
    )


def _active(connection: Connection, flavor: str) -> Row[Any]:
    catalogue = find_active_catalogue(connection, parse_flavor(flavor))
    if catalogue is None:
        raise UnknownCatalogue(f"flavor {flavor} has no active catalogue")
    return catalogue
