"""Routes about catalogues: which are there, what is in the active one of a flavor; import one, activate one."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Annotated, Any

import msgspec
from litestar import get, post
from litestar.concurrency import sync_to_thread
from litestar.di import NamedDependency
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIType, Operation, RequestBody, Schema
from litestar.params import FromPath, JSONBody, QueryParameter
from sqlalchemy import Connection, Row

from app.api import JSON, PROBLEMS, FlavorPath, FlavorQuery, WireRequest
from app.catalogue import (
    activate_catalogue,
    find_active_catalogue,
    import_document,
    list_checkpoints,
    read_checkpoint,
    read_item,
)
from app.catalogue import list_catalogues as list_rows
from app.database import Database
from app.settings import RouterSettings
from readie.errors import BadDocument, PayloadTooLarge, Unavailable, UnknownCatalogue, UnknownCheckpoint, UnknownItem
from readie.flavor import Flavor, parse_flavor
from readie.units import ns_to_seconds
from readie.wire import ActivateRequest, CatalogueSummary, CheckpointView, ImportedCatalogue, ItemView


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
def list_all(
    database: NamedDependency[Database],
    flavor: FlavorQuery = None,
) -> list[CatalogueSummary]:
    """The catalogues that are imported, by flavor: the active one first, then the newest."""
    asked = None if flavor is None else parse_flavor(flavor)
    with database.reading() as connection:
        return read_summaries(connection, asked)


@dataclass
class _WithDocument(Operation):
    """Litestar describes the bodies that it decodes; this one is only passed on."""

    def __post_init__(self) -> None:
        document = OpenAPIMediaType(schema=Schema(type=OpenAPIType.OBJECT))
        self.request_body = RequestBody({JSON: document}, "A catalogue document, version 2", required=True)


@post(
    "/catalogues",
    operation_id="importCatalogue",
    operation_class=_WithDocument,
    request_max_body_size=None,  # MAX_CATALOGUE is: see _receive
    responses=PROBLEMS,
)
async def import_one(
    request: WireRequest,
    database: NamedDependency[Database],
    settings: NamedDependency[RouterSettings],
    sha256: Annotated[
        str | None, QueryParameter(pattern="^[0-9a-f]{64}$", description="refuse a document that has another")
    ] = None,
) -> ImportedCatalogue:
    """Imports the document that is the body and makes it the active catalogue of its flavor, or changes nothing."""
    try:
        with NamedTemporaryFile(prefix="readie-", suffix=".json") as file:
            digest = await _receive(request, file, settings.max_catalogue)
            if sha256 not in (None, digest):
                raise BadDocument(f"the body: its SHA-256 is {digest}, not {sha256}: it is not what was to be sent")
            return await sync_to_thread(_import, database, Path(file.name), digest)
    except OSError as error:
        way_out = "Make room in the router's TMPDIR, or put the file into its CATALOGUE_DIR."
        raise Unavailable(f"the document cannot be kept while it is read: {error.strerror}", way_out) from error


async def _receive(request: WireRequest, file: IO[bytes], most: int) -> str:
    """Writes the body to a file as it comes in; returns its SHA-256. Raises `PayloadTooLarge`."""
    digest, size = hashlib.sha256(), request.content_length or 0

    def keep(chunk: bytes) -> None:
        digest.update(chunk)
        file.write(chunk)

    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if max(size, received) > most:
            way_out = "Raise MAX_CATALOGUE on the router, or put the file into its CATALOGUE_DIR."
            raise PayloadTooLarge(f"the document is larger than the {most} bytes of MAX_CATALOGUE", way_out)
        await sync_to_thread(keep, chunk)
    await sync_to_thread(file.flush)
    return digest.hexdigest()


def _import(database: Database, path: Path, sha256: str) -> ImportedCatalogue:
    warnings = import_document(database, path, sha256, "the body")
    summary = read_summary(database, sha256)
    return ImportedCatalogue(**msgspec.structs.asdict(summary), warnings=list(warnings))


@post(
    "/catalogues/{flavor:str}/activate",
    operation_id="activateCatalogue",
    status_code=200,
    sync_to_thread=True,
    responses=PROBLEMS,
)
def activate(
    flavor: FlavorPath, data: JSONBody[ActivateRequest], database: NamedDependency[Database]
) -> CatalogueSummary:
    """Makes an imported catalogue the active one of its flavor, an earlier one too, until its file changes."""
    activate_catalogue(database, data.sha256, parse_flavor(flavor))
    return read_summary(database, data.sha256)


def read_summary(database: Database, sha256: str) -> CatalogueSummary:
    """The catalogue with this SHA-256. Raises `UnknownCatalogue`."""
    with database.reading() as connection:
        for summary in read_summaries(connection):
            if summary.sha256 == sha256:
                return summary
    raise UnknownCatalogue(f"catalogue {sha256} was dropped: others were imported since", "Import it again.")


@get("/catalogues/{flavor:str}", operation_id="readCatalogue", sync_to_thread=True, responses=PROBLEMS)
def read_active(flavor: FlavorPath, database: NamedDependency[Database]) -> CatalogueSummary:
    """The active catalogue of a flavor."""
    with database.reading() as connection:
        _active(connection, flavor)
        return read_summaries(connection, parse_flavor(flavor))[0]


@get("/catalogues/{flavor:str}/items/{key:path}", operation_id="readItem", sync_to_thread=True, responses=PROBLEMS)
def read_one_item(flavor: FlavorPath, key: FromPath[str], database: NamedDependency[Database]) -> ItemView:
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
    flavor: FlavorPath, checkpoint_id: FromPath[str], database: NamedDependency[Database]
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
