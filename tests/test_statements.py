"""The statements of `app/sql/`: the same text on both databases, with exactly the parameters that it declares."""

import re
from typing import Any

import duckdb
import psycopg
import pytest
from sqlalchemy.dialects import postgresql

from app.database import Database
from app.sql import declared_parameters, statement, texts

NAMES = sorted(texts())


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_as_declared(name: str) -> None:
    """No `::` cast that binds nothing, no `:word` in a comment that binds something."""
    assert set(declared_parameters(name)) == set(statement(name).compile().params)


@pytest.mark.parametrize("name", NAMES)
def test_a_statement_says_what_it_is_for(name: str) -> None:
    """A sentence comes first, and the parameters are declared."""
    lines = texts()[name].splitlines()

    assert re.match(r"-- [A-Z].*", lines[0])
    assert any(line.startswith("-- parameters: ") for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_has_one_type(name: str) -> None:
    """Wherever it stands it is cast to the type that is declared: PostgreSQL cannot guess one, DuckDB guesses another."""
    for parameter, type_ in declared_parameters(name).items():
        uses = re.findall(rf"(CAST\()?:{parameter}\b(?: AS ([\w\[\]]+(?: [a-z]+)*)\))?", texts()[name])
        assert uses
        for cast, cast_to in uses:
            assert not cast or cast_to == type_, parameter


def test_every_statement_can_be_prepared(database: Database) -> None:
    """The database parses and plans each, with no more said about the parameters than the text says."""
    failures = []
    for name in NAMES:
        # $1, $2, ...: what both understand
        dialect = postgresql.asyncpg.dialect()  # type: ignore[no-untyped-call]
        numbered = str(statement(name).compile(dialect=dialect))
        with database.transaction() as connection:
            driver: Any = connection.connection.driver_connection
            try:
                driver.execute(f"PREPARE prepared AS {numbered}")
                driver.execute("DEALLOCATE prepared")
            except (duckdb.Error, psycopg.Error) as error:
                failures.append(f"{name}: {error}")
                driver.rollback()

    assert failures == []


def test_a_name_that_is_not_there_is_an_error() -> None:
    """A misspelt statement is found at its first use."""
    with pytest.raises(KeyError):
        statement("no_such_statement")
