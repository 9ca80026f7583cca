"""The dashboard's pages in Chromium: how soon something is seen, and how fast items are found while somebody types.

    python -m benchmarks.pages --packages 5000
    python -m benchmarks.pages --packages 250 --database duckdb

A router process with the generated catalogue imported (5,000 packages: 400 MB), some hundred calls on record, and a
browser beside it on the same cores. First contentful paint is the browser's own figure, from the start of the navigation.
Each page is opened as in a new browser, whose cache is empty. Prints a table such as docs/dashboard.md has. The exit
status is 1 where a page is painted after more than a second, or a search takes more than 100 milliseconds.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator

import httpx
import structlog
from playwright.sync_api import Browser, sync_playwright

from benchmarks.bench import KINDS, Kind, opened_bench, percentile, say
from benchmarks.catalogues import BenchCatalogue
from benchmarks.router import running_router
from tests.test_browser import find_chromium

#: Times that each page is opened.
VISITS = 7
#: Calls on record.
CALLS = 400
#: Milliseconds, of the slowest first paint and of the slowest search.
PAINT_MS = 1000
SEARCH_MS = 100
SEARCH = "item search"

PAINTED = """() => new Promise(told => {
    const found = performance.getEntriesByName('first-contentful-paint')[0];
    if (found) { told(found.startTime); return; }
    new PerformanceObserver((list, observer) => {
        const late = list.getEntriesByName('first-contentful-paint')[0];
        if (late) { observer.disconnect(); told(late.startTime); }
    }).observe({type: 'paint', buffered: true});
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=int, default=5000, help="items of the catalogue: 250 are 1 MB, 5000 400 MB")
    parser.add_argument("--database", choices=[*KINDS, "both"], default="both")
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    kinds: tuple[Kind, ...] = KINDS if options.database == "both" else (options.database,)
    print("| what | database | median | slowest |\n|---|---|---:|---:|")
    late = []
    with opened_bench(options.packages, kinds, quick=False) as bench, sync_playwright() as driver:
        catalogue = bench.catalogue()
        browser = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        for kind in kinds:
            say(f"--- {kind}")
            with (
                bench.database(kind) as url,
                running_router(url, bench.folder / "router.log", catalogue.document.parent) as router,
            ):
                for name, milliseconds in measure(f"http://127.0.0.1:{router.port}", catalogue, browser):
                    middle, most = statistics.median(milliseconds), max(milliseconds)
                    print(f"| {name} | {kind} | {middle:.0f} ms | {most:.0f} ms |", flush=True)
                    if most > (SEARCH_MS if name.startswith(SEARCH) else PAINT_MS):
                        late.append(f"{name} on {kind}: {most:.0f} ms")
        browser.close()
    size = catalogue.size
    print(
        f"\n{size.megabytes:.0f} MB, {size.items} items, {size.edges} edges, {size.checkpoints} checkpoints", end=", "
    )
    print(f"{CALLS} calls")
    if late:
        raise SystemExit("too slow: " + "; ".join(late))


def measure(url: str, catalogue: BenchCatalogue, browser: Browser) -> Iterator[tuple[str, list[float]]]:
    """What is measured, and its milliseconds."""
    call_id = record_calls(url, catalogue)
    modules = "+".join(catalogue.module_sets(1, seed=3)[0])
    pages = {
        "Cluster": "/",
        "Calls": "/calls",
        "one call": f"/calls/{call_id}",
        "Catalogue": "/catalogue",
        "Explain": "/explain",
        "Explain, of three modules": f"/explain?asked={modules}",
        "SQL": "/sql",
    }
    for name, path in pages.items():
        yield f"{name}, first paint", [paint(browser, url + path) for _ in range(VISITS)]
    yield from search(url, catalogue)


def record_calls(url: str, catalogue: BenchCatalogue) -> str:
    """Has a worker that holds the generation, and calls that it has run: the id of the last."""
    held = {"generation": catalogue.generation, "checkpoint_ids": catalogue.checkpoint_ids, "restore_fixed": 0.05}
    status = {"flavor": "cpu", "state": "ready", "python": "3.11.7", "runtime": "fork", "generations": [held]}
    phases = {"queue": 0.001, "restore": 0.05, "install": 0.0, "imports": 0.1, "ready": 0.16, "run": 0.5}
    call_id = ""
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        client.put("/v1/workers/w", json=status).raise_for_status()
        sets = catalogue.module_sets(50, seed=4)
        for number in range(CALLS):
            asked = {"payload": "", "python": "3.11", "function": f"function_{number % 20}"}
            placed = (
                client.post("/v1/calls", json=asked | {"modules": sets[number % len(sets)]}).raise_for_status().json()
            )
            placement = placed["placement"]
            client.post(f"/v1/placements/{placement['placement_id']}/accept", params={"worker_id": "w"})
            how = "restored" if placement["checkpoint_id"] else "cold"
            result = {"outcome": "returned", "phases": phases, "started": {"how": how}}
            client.put(f"/v1/placements/{placement['placement_id']}/result", json=result).raise_for_status()
            call_id = placed["call_id"]
            if number % 20 == 0:
                client.put("/v1/workers/w", json=status).raise_for_status()
    return call_id


def paint(browser: Browser, url: str) -> float:
    """Milliseconds to the first contentful paint of a page."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(url)
    painted = float(page.evaluate(PAINTED))
    context.close()
    return painted


def search(url: str, catalogue: BenchCatalogue) -> Iterator[tuple[str, list[float]]]:
    """Answers to what somebody types letter by letter, each a request of its own."""
    words = [key.rpartition(".")[2] or key for key in random.Random(5).sample(catalogue.middle, 25)]
    typed = [word[:length] for word in words for length in range(1, len(word) + 1)]
    milliseconds = []
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        sha256 = client.get("/v1/catalogues/cpu").json()["sha256"]
        for wanted in typed:
            began_at = time.perf_counter()
            client.get("/catalogue/items", params={"catalogue": sha256, "wanted": wanted}).raise_for_status()
            milliseconds.append(1000 * (time.perf_counter() - began_at))
    yield f"{SEARCH}, {len(typed)} answers", milliseconds
    yield f"{SEARCH}, 95 of 100", [percentile(milliseconds, 0.95)]


if __name__ == "__main__":
    main()
