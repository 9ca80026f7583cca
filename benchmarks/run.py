"""Runs the benchmarks: `make bench`, or

    python benchmarks/run.py --packages 250 --quick
    python benchmarks/run.py --only scoring --database postgresql

Each figure is one JSON line on standard output, and in benchmarks/results.jsonl, where it replaces the one of the same
name, database and size. `--table` measures nothing: it writes the tables of docs/benchmarks.md from that file.
docs/benchmarks.md says what each benchmark is about.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
if __name__ == "__main__":  # this folder's files are named for what they measure: they must not be found as packages
    sys.path[0] = str(ROOT)

import msgspec  # noqa: E402
import structlog  # noqa: E402

from benchmarks import api, growth, imports, memory, scoring, start, tables  # noqa: E402
from benchmarks.bench import KINDS, Bench, Kind, Line, opened_bench, say  # noqa: E402
from readie.files import replaced  # noqa: E402

BENCHMARKS: dict[str, Callable[[Bench], Iterator[Line]]] = {
    "start": start.run,
    "imports": imports.run,
    "memory": memory.run,
    "scoring": scoring.run,
    "api": api.run,
    "growth": growth.run,
}
RESULTS = ROOT / "benchmarks" / "results.jsonl"
PAGE = ROOT / "docs" / "benchmarks.md"


def main() -> int:
    """Exit status 1: a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=int, default=5000, help="items of the catalogue: 250 are 1 MB, 5000 400 MB")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--database", choices=[*KINDS, "both"], default="both")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results.jsonl, and none with --quick")
    parser.add_argument("--quick", action="store_true", help="once, and briefly: to see that all of it runs")
    parser.add_argument("--table", action="store_true", help="write the tables of docs/benchmarks.md")
    options = parser.parse_args()
    out = options.out or (None if options.quick else RESULTS)
    if options.table:
        page = tables.fill(PAGE.read_text(encoding="utf-8"), read_lines(options.out or RESULTS))
        PAGE.write_text(page, encoding="utf-8")
        return 0
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # standard output is for results
    kinds: tuple[Kind, ...] = KINDS if options.database == "both" else (options.database,)
    missed = False
    with opened_bench(options.packages, kinds, quick=options.quick) as bench:
        for name in options.only or BENCHMARKS:
            say(f"--- {name}")
            for line in BENCHMARKS[name](bench):
                print(msgspec.json.encode(line).decode(), flush=True)
                if out is not None:
                    keep_line(out, line)
                missed = missed or line.met is False
    return int(missed)


def read_lines(path: Path) -> list[Line]:
    """The lines of a file of results; none if it is not there."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines() if line]


def keep_line(path: Path, line: Line) -> None:
    """Puts a line into a file of results, in the place of the one that it replaces."""
    lines = {each.key: each for each in read_lines(path)} | {line.key: line}
    with replaced(path) as aside:
        aside.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in lines.values()))


if __name__ == "__main__":
    sys.exit(main())
