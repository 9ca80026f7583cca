"""What a call costs beside its function: `python benchmarks/overhead.py`.

A function that does nothing, called by `@remote` from its client to its result: one router, one worker (`fork`), a
checkpoint that holds what the call imports, nothing else on the machine. Embedded and on PostgreSQL, in turns in one run.
The result is one JSON document; the exit status is 1 where the median is above 15 ms embedded, or 20 ms on PostgreSQL.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.bench import KINDS, opened_bench  # noqa: E402
from readie import remote  # noqa: E402
from tests.lines import Line  # noqa: E402

MOST_MS = {"duckdb": 15.0, "postgresql": 20.0}


def nothing() -> None:
    """Does nothing, with a module that its checkpoint holds."""
    import light  # type: ignore[import-not-found]  # noqa: F401


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        bench = stack.enter_context(opened_bench(0, KINDS, quick=False))
        lines: dict[str, Line] = {}
        for kind in KINDS:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url = stack.enter_context(bench.database(kind))
            lines[kind] = Line(folder, {"light": "value = 1"}, {"light": ["light"]}, database_url=url)
            stack.callback(lines[kind].processes.close)
            stack.enter_context(lines[kind].worker())
        call = remote(nothing)
        for number in range(options.rounds + 20):
            for name, line in lines.items():
                os.environ["ROUTER_URL"] = line.url
                began = time.perf_counter()
                call()
                if number >= 20:  # what is prepared once
                    found[name].append(1000 * (time.perf_counter() - began))
    result = {
        kind: {
            "median_ms": round(statistics.median(each), 2),
            "p90_ms": round(sorted(each)[int(0.9 * len(each))], 2),
            "calls": len(each),
        }
        for kind, each in found.items()
    }
    print(json.dumps(result, indent=1))
    return int(any(statistics.median(each) > MOST_MS[kind] for kind, each in found.items()))


if __name__ == "__main__":
    sys.exit(main())
