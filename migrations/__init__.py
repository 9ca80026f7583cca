"""The schema's migrations, for Alembic; the same on DuckDB and on PostgreSQL."""
