"""What people's SQL may be: one SELECT over the views, of kinds of expression and functions that are listed here.

Apart from app/query.py, which imports it for a query only: the parser costs every start of a router a tenth of a second.
"""

import logging
from collections.abc import Iterator
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from app.sql import views
from readie.errors import BadQuery

# Kinds of expression, exactly these: what a later version of the parser adds is refused until it stands here.
_SYNTAX = {
    *(exp.Select, exp.Union, exp.Except, exp.Intersect, exp.Subquery, exp.With, exp.CTE, exp.From, exp.Join),
    *(exp.Table, exp.TableAlias, exp.Where, exp.Group, exp.Having, exp.Qualify, exp.Order, exp.Ordered, exp.Limit),
    *(exp.Offset, exp.Distinct, exp.Column, exp.Identifier, exp.Alias, exp.Star, exp.Literal, exp.Boolean, exp.Null),
    *(exp.Paren, exp.Tuple, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod, exp.Neg, exp.DPipe, exp.Collate),
    *(exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ, exp.NullSafeNEQ, exp.Is, exp.Between, exp.In),
    *(exp.Like, exp.ILike, exp.Escape, exp.And, exp.Or, exp.Not, exp.Exists, exp.Any, exp.All, exp.Bracket),
    *(exp.Case, exp.If, exp.Cast, exp.DataType, exp.Interval, exp.Var, exp.AtTimeZone),
    *(exp.Window, exp.WindowSpec, exp.Filter, exp.WithinGroup),
}
_FUNCTIONS = {
    *(exp.Count, exp.Sum, exp.Min, exp.Max, exp.Avg, exp.Stddev, exp.StddevSamp, exp.StddevPop, exp.Variance),
    *(exp.VariancePop, exp.LogicalAnd, exp.LogicalOr, exp.PercentileCont, exp.PercentileDisc, exp.ArrayAgg),
    *(exp.GroupConcat, exp.RowNumber, exp.Rank, exp.DenseRank, exp.Lag, exp.Lead, exp.FirstValue, exp.LastValue),
    *(exp.Ntile, exp.Abs, exp.Ceil, exp.Floor, exp.Round, exp.Sqrt, exp.Pow, exp.Ln, exp.Exp, exp.Sign, exp.Greatest),
    *(exp.Least, exp.Coalesce, exp.Nullif, exp.Lower, exp.Upper, exp.Length, exp.Substring, exp.Trim, exp.Concat),
    *(exp.Replace, exp.StrPosition, exp.Left, exp.Right, exp.StartsWith, exp.SplitPart, exp.Extract),
    *(exp.TimestampTrunc, exp.DateTrunc, exp.CurrentTimestamp, exp.CurrentDate, exp.ArrayToString, exp.Explode),
}
_ALLOWED = frozenset(_SYNTAX | _FUNCTIONS)
# Of functions that the parser has no kind for, those that both databases have.
_NAMED = frozenset({"array_to_string", "cardinality", "now"})

# It warns of every statement that it does not know, which is answered with a problem anyway.
logging.getLogger("sqlglot").setLevel(logging.ERROR)


def check_query(query: str, dialect: str, most_rows: int) -> str:
    """The query, written again, with at most `most_rows` rows. Raises `BadQuery` unless it is one SELECT over the views
    with the functions that are allowed.
    """
    try:
        parsed = [each for each in sqlglot.parse(query, read=dialect) if each is not None]
        if len(parsed) != 1:
            raise BadQuery(f"it has {len(parsed)} statements" if parsed else "it is empty")
        (tree,) = parsed
        if not isinstance(tree, exp.Query):
            raise BadQuery(f"it is no SELECT but {_called(tree)}")
        for node in tree.walk():
            _check_node(node, dialect)
        return _limited(tree, most_rows).sql(dialect, comments=False)
    except SqlglotError as error:
        raise BadQuery(_without_colors(str(error).partition("\n")[0])) from error
    except RecursionError:
        raise BadQuery("it is nested too deeply") from None


def _check_node(node: exp.Expr, dialect: str) -> None:
    if isinstance(node, exp.Anonymous):
        if node.name.lower() not in _NAMED:
            raise BadQuery(f"the function {node.name.lower()} is not allowed")
    elif type(node) not in _ALLOWED:
        raise BadQuery(f"{_called(node)} is not allowed")
    if isinstance(node, exp.Table):
        _check_table(node, dialect)
    elif isinstance(node, exp.From | exp.Join) and not isinstance(node.this, exp.Table | exp.Subquery):
        raise BadQuery(f"{_called(node.this)} is no view")
    elif isinstance(node, exp.CTE | exp.Subquery) and not isinstance(node.this, exp.Query | exp.Table):
        raise BadQuery(f"{_called(node.this)} is no SELECT")
    elif isinstance(node, exp.DataType) and node.this == exp.DataType.Type.USERDEFINED:
        raise BadQuery(f"the type {node.sql(dialect)} is not allowed")


def _check_table(table: exp.Table, dialect: str) -> None:
    if not isinstance(table.this, exp.Identifier):
        raise BadQuery(f"the table function {_called(table.this)} is not allowed")
    if table.args.get("db") or table.args.get("catalog"):
        raise BadQuery(f"{table.sql(dialect)} is no view")
    name = _name(table.this, dialect)
    if name not in views() and name not in _visible_ctes(table, dialect):
        raise BadQuery(f"{table.name} is no view")


def _visible_ctes(table: exp.Table, dialect: str) -> Iterator[str]:
    """The names that WITH gives where `table` stands. A CTE sees those before it, and itself only where it recurs: in
    `WITH calls AS (SELECT * FROM calls)` the inner name is the table's.
    """
    path: list[exp.Expr] = [table]
    outer: Any = table.parent
    while outer is not None:
        if isinstance(outer, exp.With):
            for cte in outer.expressions:
                if cte is path[-1]:
                    if (
                        outer.recursive
                        and isinstance(cte.this, exp.SetOperation)
                        and any(each is cte.this.expression for each in path)
                    ):
                        yield _name(cte.args["alias"].this, dialect)
                    break
                yield _name(cte.args["alias"].this, dialect)
        elif isinstance(given := outer.args.get("with_"), exp.With) and given is not path[-1]:
            yield from (_name(cte.args["alias"].this, dialect) for cte in given.expressions)
        path.append(outer)
        outer = outer.parent


def _name(identifier: exp.Identifier, dialect: str) -> str:
    """What the database takes the name for: DuckDB ignores case, PostgreSQL where there are no quotes."""
    name: str = identifier.name
    return name if identifier.quoted and dialect == "postgres" else name.lower()


def _limited(tree: exp.Query, most_rows: int) -> exp.Query:
    limit = tree.args.get("limit")
    if limit is None:
        return tree.limit(most_rows)
    wanted = limit.expression if isinstance(limit, exp.Limit) else None
    if not isinstance(wanted, exp.Literal) or not wanted.is_int or limit.args.get("limit_options"):
        raise BadQuery("LIMIT takes a whole number")
    if int(wanted.name) > most_rows:
        wanted.set("this", str(most_rows))
    return tree


def _called(node: object) -> str:
    """What people call this kind of expression."""
    if isinstance(node, exp.Anonymous):
        return node.name.lower()
    return node.sql_name() if isinstance(node, exp.Func) else type(node).__name__.upper()


def _without_colors(text: str) -> str:
    return text.replace("\033[4m", "").replace("\033[0m", "")
