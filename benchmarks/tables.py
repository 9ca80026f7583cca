"""The tables of docs/benchmarks.md, from the results: so that the page says what was measured."""

import re
from collections.abc import Iterable, Sequence

from benchmarks.bench import Line

_NAMES = {"duckdb": "DuckDB", "postgresql": "PostgreSQL", None: ""}


def fill(page: str, lines: Iterable[Line]) -> str:
    """The page with its tables written anew: each stands between `<!-- name -->` and `<!-- end -->`."""
    found = list(lines)
    tables = {"results": results(found), "growth": growth(found), "machine": machine(found)}
    for name, table in tables.items():
        place = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)
        if place is None:
            raise ValueError(f"the page has no place for {name}")
        page = f"{page[: place.start(1)]}\n{table}\n{page[place.end(1) :]}"
    return page


def results(lines: Sequence[Line]) -> str:
    """Every figure of the largest generated catalogue, and of the real one, beside those it is compared with."""
    real = [line for line in lines if line.name.endswith("-real")]
    largest = max((line.size.items for line in lines if line not in real), default=0)
    rows = [
        [
            line.name,
            _NAMES[line.database],
            f"**{_number(line.ours)}** {line.unit}",
            _number(line.baseline),
            _number(line.limit),
            _number(line.ratio),
            line.target or "",
            {True: "yes", False: "**no**", None: ""}[line.met],
            _number(line.peak_mb),
            _rest(line),
        ]
        for line in lines
        if line in real or (line.size.items == largest and not line.name.startswith("growth-"))
    ]
    head = ["benchmark", "database", "ours", "baseline", "limit", "ratio", "target", "met", "peak MB", "more"]
    return _table(head, rows)


def growth(lines: Sequence[Line]) -> str:
    """One row a size and database."""
    found = {line.key: line for line in lines if line.name.startswith("growth-")}
    rows = []
    for name, database, items in sorted(found, key=lambda key: (key[1] or "", key[2])):
        if name != "growth-import" or ("growth-scoring", database, items) not in found:
            continue
        loaded, scored = found[name, database, items], found["growth-scoring", database, items]
        rows.append(
            [
                _NAMES[database],
                *(_number(value) for value in (loaded.size.megabytes, items, loaded.size.edges)),
                *(_number(value) for value in (loaded.ours, loaded.baseline)),
                *(_number(value) for value in (loaded.peak_mb, loaded.detail["baseline_peak_mb"])),
                *(_number(value) for value in (scored.ours, scored.baseline, scored.limit)),
            ]
        )
    head = ["database", "MB", "items", "edges", "import s", "baseline's", "peak MB", "baseline's"]
    return _table([*head, "scoring ms", "baseline's", "limit's"], rows)


def machine(lines: Sequence[Line]) -> str:
    """Where, with what, and when."""
    places: dict[tuple[tuple[str, str], ...], list[Line]] = {}
    for line in lines:
        key = tuple(sorted((name, str(value)) for name, value in line.machine.items()))
        places.setdefault(key, []).append(line)
    said = []
    for place, measured in places.items():
        days = sorted({line.measured_at[:10] for line in measured})
        commits = sorted({line.commit for line in measured})
        said.append(
            f"{len(measured)} figures, {' to '.join(dict.fromkeys((days[0], days[-1])))}, commit {', '.join(commits)}: "
            + ", ".join(f"{name} {value}" for name, value in place)
            + "."
        )
    return "\n\n".join(said)


def _rest(line: Line) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in line.detail.items())


def _number(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
