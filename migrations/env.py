"""Runs the migrations and rebuilds the views, in one transaction, on the database that is given or the one at DATABASE_URL."""

import os
from logging.config import fileConfig

from alembic import context
from alembic.ddl.impl import DefaultImpl
from alembic.util import CommandError
from sqlalchemy import Connection

from app.database import Database, create_views, drop_views, open_database
from app.settings import RouterSettings
from app.tables import metadata
from readie.errors import ReadieError
from readie.settings import read_settings


class _DuckDBImpl(DefaultImpl):
    """Alembic knows no DuckDB; what all databases have in common is enough for it."""

    __dialect__ = "duckdb"
    transactional_ddl = True


def run(database: Database, connection: Connection) -> None:
    # Deployers that start at once take turns. The revision is read after the lock, so the second finds nothing to do.
    database.lock(connection, "migrations")
    context.configure(connection=connection, target_metadata=metadata)
    # Views hold no data: they are rebuilt, not migrated, because PostgreSQL keeps one from changing what a view reads.
    drop_views(connection)
    context.run_migrations()
    if context.get_context().get_current_revision() == context.get_head_revision():
        create_views(connection)


def main() -> None:
    given: Database | None = context.config.attributes.get("database")
    if given is not None:
        with given.transaction() as connection:
            run(given, connection)
        return
    if context.config.config_file_name is not None:
        fileConfig(context.config.config_file_name, disable_existing_loggers=False)
    if context.is_offline_mode():
        raise CommandError("The SQL depends on the database: run the migrations on it, without --sql.")
    try:
        database = open_database(read_settings(RouterSettings, os.environ).database_url)
        try:
            with database.transaction() as connection:
                run(database, connection)
        finally:
            database.close()
    except ReadieError as error:  # alembic prints a CommandError without a traceback
        raise CommandError(str(error)) from error


main()
