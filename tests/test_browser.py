"""The dashboard in a real browser: Debian's Chromium, on a router with a worker and the calls that it has run.

Where `make demo` has run last with its runtime `fork`, the data is the demo's: real packages, measured, captured, called.
Elsewhere a small line is made. `make screenshots` writes docs/images/ from the same run.
"""

import filecmp
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Request, ViewportSize, expect, sync_playwright

from app.application import create_app
from app.database import open_database
from app.settings import RouterSettings
from readie import remote
from tests.lines import Line
from tests.routers import ROOT, ask, serving
from tests.sandboxes import wait_for

expect.set_options(timeout=30_000)  # milliseconds

DEMO = ROOT / ".demo"
IMAGES = ROOT / "docs" / "images"
DRAWING = os.environ.get("SCREENSHOTS") == "1"
TOKEN = "token"
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
PHONE: ViewportSize = {"width": 360, "height": 740}

#: What has the focus: its name, and the style of its outline.
REACHED = """(() => {
    const reached = document.activeElement;
    const titled = document.getElementById(reached.getAttribute("aria-labelledby"));
    const name = reached.labels?.[0]?.innerText || reached.ariaLabel || (titled || reached).innerText;
    return [name, getComputedStyle(reached).outlineStyle];
})()"""

#: Violations of these impacts fail; axe reports matters of taste below them.
SERIOUS = {"serious", "critical"}


def find_chromium() -> str:
    """Where Chromium is; without it the tests fail, or are skipped where it was said that they cannot run."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        sentence = (
            "Chromium is not there. Install it: apt-get install --no-install-recommends chromium fonts-dejavu-core"
        )
        if os.environ.get("ALLOW_NO_CHROMIUM") == "1":
            pytest.skip(f"ALLOW_NO_CHROMIUM=1. {sentence}")
        pytest.fail(f"{sentence}, or set ALLOW_NO_CHROMIUM=1.")
    return found


@dataclass
class Seen:
    """What a browser's pages have done: errors on the console, and requests to anywhere else."""

    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def watch(self, page: Page, url: str) -> None:
        page.on("console", lambda said: self.errors.append(said.text) if said.type in {"error", "warning"} else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

        def look(request: Request) -> None:
            if not request.url.startswith((url, "data:")):
                self.elsewhere.append(request.url)

        page.on("request", look)


@dataclass(frozen=True)
class Shown:
    """A router with calls, and a browser that looks at it."""

    url: str
    browser: Browser
    seen: Seen
    modules: str  # that its catalogue knows

    @contextmanager
    def page(self, path: str = "", *, theme: str = "light", phone: bool = False) -> Iterator[Page]:
        context = self.context(theme=theme, phone=phone)
        page = context.new_page()
        self.seen.watch(page, self.url)
        if path:
            page.goto(self.url + path)
        yield page
        context.close()

    def context(self, *, theme: str = "light", phone: bool = False) -> BrowserContext:
        size: Any = PHONE if phone else {"width": 1280, "height": 800}
        scheme: Any = theme
        return self.browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce", locale="en-GB")


def rest(seconds: float) -> float:
    """A call that takes its time, so that the cluster has one to show."""
    time.sleep(seconds)
    return seconds


def answer() -> int:
    """A call that ends at once."""
    return 42


def answer_with_alpha() -> int:
    """A call that imports what a checkpoint of the small line holds."""
    import slowalpha  # type: ignore[import-not-found]

    return len(slowalpha.blob)


def has_run_demo(folder: Path) -> bool:
    """Whether that folder of `make demo` has a database, and the catalogue and the root filesystem that belong to it.

    With RUNTIME=runsc it has those of gVisor, whose packages no worker without gVisor can use.
    """
    served, forked = folder / "catalogues" / "cpu.json", folder / "generation" / "catalogue.json"
    needed = [folder / "readie.duckdb", folder / "rootfs" / "readie-demo", served, forked]
    return all(path.exists() for path in needed) and filecmp.cmp(served, forked, shallow=False)


@contextmanager
def demo_line(folder: Path) -> Iterator[tuple[str, str]]:
    """The demo's catalogue and recorded calls, with a worker of its root filesystem: (URL, modules).

    For pictures the worker holds the demo's checkpoints, and the demo's calls are run again; elsewhere that would take too
    long.
    """
    shutil.copyfile(DEMO / "readie.duckdb", folder / "readie.duckdb")
    database = f"duckdb:///{folder / 'readie.duckdb'}"
    with ExitStack() as stack:
        _, url, _ = stack.enter_context(serving(DATABASE_URL=database, CATALOGUE_DIR=str(DEMO / "catalogues")))
        worker = {
            "ROUTER_URL": url,
            "WORKER_ID": "demo",
            "WORKER_DIR": str(folder / "worker"),
            "WORKER_MEM_TOTAL": "8Gi",
            "ROOTFS": str(DEMO / "rootfs"),
        }
        if DRAWING:
            worker["CHECKPOINT_DIR"] = str(DEMO / "generation" / "checkpoints")
        log = stack.enter_context((folder / "worker.log").open("wb"))
        command = [sys.executable, "-m", "worker.cli", "serve"]
        process = stack.enter_context(
            subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **worker}, cwd=ROOT)
        )
        stack.callback(process.terminate)
        wait_for(lambda: any(each["state"] == "ready" for each in ask("GET", f"{url}/v1/workers").json()), 90)
        os.environ["ROUTER_URL"] = url
        if DRAWING:
            calls = runpy.run_path(str(ROOT / "demo" / "calls.py"), run_name="calls")["CALLS"]
            for each in calls:
                for cold in (True, False, False):
                    assert each.is_right(remote(each.function, cold=cold, memory="1Gi", queue_timeout=10)())
        yield url, "pandas sklearn.linear_model"


@contextmanager
def small_line(folder: Path) -> Iterator[tuple[str, str]]:
    """Two packages and a checkpoint of one of them: as `demo_line`."""
    source = "import time\ntime.sleep(0.1)\nblob = bytearray(3_000_000)\n"
    line = Line(folder, {"slowalpha": source, "slowbeta": source}, {"checkpoint_0": [], "checkpoint_1": ["slowalpha"]})
    with line.processes, line.worker():
        os.environ["ROUTER_URL"] = line.url
        assert remote(answer_with_alpha, memory="64Mi")() == 3_000_000
        yield line.url, "slowalpha slowbeta"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """One router, one worker and one browser for all tests here."""
    chromium = find_chromium()
    folder = tmp_path_factory.mktemp("browser")
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("ROUTER_URL", "")
        url, modules = stack.enter_context((demo_line if has_run_demo(DEMO) else small_line)(folder))
        assert remote(answer, memory="64Mi")() == 42
        call = remote(rest, memory="512Mi", session_id="notebook").submit(600.0)
        stack.callback(call.cancel)
        driver = stack.enter_context(sync_playwright())
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        stack.callback(browser.close)
        yield Shown(url, browser, Seen(), modules)


def check(page: Page, name: str = "") -> None:
    """Axe finds nothing serious, in light and then in dark; keeps a picture of each where pictures were asked for."""
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        # Themes differ in colours alone.
        options = {"resultTypes": ["violations"]} | ({} if theme == "light" else {"runOnly": ["color-contrast"]})
        found = [
            f"{each['id']}: {each['help']}: {[node['target'] for node in each['nodes']][:3]}"
            for each in Axe().run(page, options=options).response["violations"]
            if each["impact"] in SERIOUS
        ]

        assert found == [], theme
        if name and DRAWING:
            page.screenshot(path=IMAGES / f"{name}-{theme}.png")
    page.emulate_media(color_scheme="light")


FORKED = {"catalogues/cpu.json": "forked", "generation/catalogue.json": "forked", "rootfs/readie-demo": ""}
UNDER_GVISOR = {"catalogues/cpu.json": "gVisor", "generation-runsc/catalogue.json": "gVisor"}


@pytest.mark.parametrize(
    ("left", "is_used"),
    [
        ({"readie.duckdb": ""} | FORKED, True),
        ({"readie.duckdb": ""} | UNDER_GVISOR, False),
        ({"readie.duckdb": ""} | FORKED | UNDER_GVISOR, False),
        (FORKED, False),
        ({}, False),
    ],
    ids=["fork", "runsc", "fork, then runsc", "stopped", "nothing"],
)
def test_the_demo_is_used_where_all_of_it_is_there(left: dict[str, str], is_used: bool, tmp_path: Path) -> None:
    """What RUNTIME=runsc, or a demo that was stopped, has left is no line that this worker can serve."""
    for name, text in left.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert has_run_demo(tmp_path) is is_used


def test_the_cluster_is_accessible(shown: Shown) -> None:
    """With a worker and a call on it: labels, names, order, contrast in both themes."""
    with shown.page("/") as page:
        expect(page.get_by_role("status")).to_have_text("Live")
        check(page, "cluster")


def test_a_call_is_found_and_accessible(shown: Shown) -> None:
    """Search leads to a call, and its page has the phases."""
    function = "logistic_regression" if DRAWING else "answer"
    with shown.page("/calls") as page:
        if DRAWING:
            check(page, "calls")
        page.get_by_label("Part of the function's name").fill(function)
        page.get_by_role("button", name="Search").click()
        check(page)
        page.get_by_role("link", name=function).first.click()

        expect(page.get_by_role("heading", level=1)).to_have_text(function)
        expect(page.get_by_role("table", name="Phases, one after another")).to_contain_text("function")
        check(page, "call")


def test_a_restored_call_is_accessible(shown: Shown) -> None:
    """With the checkpoint that was chosen, and the bars of what was predicted and measured."""
    with shown.page("/calls?started=restored") as page:
        page.get_by_role("region", name="Latest first").get_by_role("link").first.click()

        expect(page.get_by_role("heading", name="Why this checkpoint")).to_be_visible()
        expect(page.get_by_role("img", name="Predicted seconds to ready")).to_be_visible()
        expect(page.get_by_role("img", name="Measured seconds to ready")).to_be_visible()
        check(page)


def test_a_problem_is_accessible(shown: Shown) -> None:
    """The page of a call that is not there; the console has its status, and nothing else."""
    context, seen = shown.context(), Seen()
    page = context.new_page()
    seen.watch(page, shown.url)
    page.goto(f"{shown.url}/calls/none")
    expect(page.get_by_role("alert")).to_contain_text("none was never placed, or is forgotten")
    check(page)
    context.close()

    assert ["404" in error for error in seen.errors] == [True]
    assert seen.elsewhere == []


def test_the_catalogue_is_accessible(shown: Shown) -> None:
    """With its matrix, its plots, and items that were found while somebody typed."""
    wanted = shown.modules.split()[-1]
    with shown.page("/catalogue") as page:
        page.get_by_label("A part of an item's name").press_sequentially(wanted)
        expect(page.get_by_role("region", name="Items that match").get_by_role("link").first).to_have_text(wanted)
        expect(page.get_by_role("status")).to_have_text(re.compile(r"[0-9,]+ items? match"))
        check(page, "catalogue")


def test_an_explanation_is_accessible(shown: Shown) -> None:
    """With its stacked bars, made while somebody types."""
    with shown.page("/explain") as page:
        code = "".join(f"import {module}\n" for module in shown.modules.split())
        page.get_by_label("Code, or names of modules").fill(code)
        expect(page.get_by_role("heading", name="Imports found")).to_be_visible()
        expect(page.get_by_role("row", name="the winner")).to_have_count(1)
        expect(page.get_by_role("status")).to_have_text(re.compile(r"wins: it costs [0-9.]+ "))
        check(page, "explain")


def test_the_console_is_accessible_and_used_by_keyboard(shown: Shown, tmp_path: Path) -> None:
    """A ready question, Control and Enter, the rows; the same as a file."""
    with shown.page("/sql") as page:
        page.get_by_role("link", name="Which packages cost most?").press("Enter")
        page.get_by_label("One SELECT over the views").press("Control+Enter")
        expect(page.locator("#answer caption")).to_contain_text("row")
        check(page, "sql")
        with page.expect_download() as download:
            page.get_by_role("button", name="Download as CSV").press("Enter")
        download.value.save_as(tmp_path / "answer.csv")

        assert (tmp_path / "answer.csv").read_text().startswith("distribution,version,items,load_s")


def test_pages_fit_a_phone(shown: Shown) -> None:
    """At 360 pixels nothing but tables in their own boxes is scrolled sideways."""
    call_ids = [call["call_id"] for call in ask("GET", f"{shown.url}/v1/calls").json()]
    explained = "/explain?asked=" + shown.modules.replace(" ", "+")
    with shown.page("/", phone=True) as page:
        widths = {}
        for path in [explained, "/calls", f"/calls/{call_ids[-1]}", "/sql", "/catalogue", "/"]:
            page.goto(shown.url + path)
            if path == "/catalogue":
                page.get_by_label("A part of an item's name").fill(shown.modules.split()[-1])
                expect(page.get_by_role("region", name="Items that match").get_by_role("link").first).to_be_visible()
            widths[path] = page.evaluate("document.documentElement.scrollWidth")
        if DRAWING:
            page.screenshot(path=IMAGES / "cluster-phone.png")

    assert set(widths.values()) == {360}, widths


def test_the_cluster_changes_as_it_is_looked_at(shown: Shown) -> None:
    """A call that is placed appears without a reload; paused, nothing changes until one goes on."""
    with shown.page("/") as page:
        expect(page.get_by_role("status")).to_have_text("Live")
        calls = page.get_by_role("region", name="Live calls")
        expect(calls).to_contain_text("1 call now")
        first = remote(rest, memory="64Mi").submit(600.0)
        expect(calls).to_contain_text("2 calls now")
        page.get_by_role("button", name="Pause updates").click()
        expect(page.get_by_role("status")).to_have_text("Paused")
        first.cancel()
        page.wait_for_timeout(1500)
        expect(calls).to_contain_text("2 calls now")
        page.get_by_role("button", name="Pause updates").click()
        expect(calls).to_contain_text("1 call now")


def test_the_keyboard_reaches_everything_in_order(shown: Shown) -> None:
    """First the way past the navigation, then the pages, the theme, the content; what has the focus can be seen."""
    with shown.page("/") as page:
        reached = []
        for _ in range(9):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    "[document.activeElement.innerText, getComputedStyle(document.activeElement).outlineStyle]"
                )
            )
        page.keyboard.press("Shift+Tab")

    names = [name.split("\n")[0] for name, _ in reached]
    assert names[:7] == ["Skip to the content", "Readie", "Cluster", "Calls", "Catalogue", "Explain", "SQL"]
    assert names[8] == "Pause updates"
    assert {outline for _, outline in reached} == {"solid"}


@pytest.mark.parametrize(
    ("path", "order"),
    [
        (
            "/calls",
            ["Part of the function's name", "Module or item", "State", "Flavor", "Started", "Search", "Latest first"],
        ),
        ("/catalogue", ["cpu, generation", "A part of an item's name", "Items that match", "{module}"]),
        ("/explain", ["Code, or names of modules", "Flavor", "Memory budget", "Explain", "Every option"]),
    ],
)
def test_the_keyboard_reaches_forms_and_what_they_find(shown: Shown, path: str, order: list[str]) -> None:
    """In the order of the page: the fields, then what was found; what has the focus can be seen."""
    module = shown.modules.split()[-1]
    found = {"/calls": "Latest first", "/catalogue": "Items that match", "/explain": "Every option"}[path]
    with shown.page(path) as page:
        if path != "/calls":
            page.get_by_role("main").locator("input[type=search], textarea").fill(module)
            expect(page.get_by_role("region", name=found)).to_contain_text(module if path == "/catalogue" else "cold")
        page.get_by_role("main").focus()
        reached = []
        for _ in order:
            page.keyboard.press("Tab")
            reached.append(page.evaluate(REACHED))

    names = [name for name, _ in reached]
    assert [name.startswith(start.format(module=module)) for name, start in zip(names, order, strict=True)] == [
        True
    ] * len(order), names
    assert {outline for _, outline in reached} == {"solid"}


def test_a_theme_that_was_chosen_stays(shown: Shown) -> None:
    """Over pages, against the system's."""
    with shown.page("/", theme="light") as page:
        page.get_by_label("Theme").select_option("dark")
        page.get_by_role("link", name="SQL").click()

        expect(page.get_by_label("Theme")).to_have_value("dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"


@contextmanager
def locked_router(path: Path) -> Iterator[str]:
    """A router in this process that wants a token: its URL."""
    with closing(open_database(f"duckdb:///{path}")) as database, socket.create_server(("127.0.0.1", 0)) as listener:
        application = create_app(RouterSettings(auth_token=TOKEN, worker_token="agents"), database)
        server = uvicorn.Server(uvicorn.Config(application, log_config=None, timeout_graceful_shutdown=3))
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        serving.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            serving.join()


def test_signing_in_and_out(shown: Shown, duckdb_template: Path, tmp_path: Path) -> None:
    """The token opens the page that was asked for; signed out, it is closed again."""
    shutil.copyfile(duckdb_template, tmp_path / "readie.duckdb")
    with locked_router(tmp_path / "readie.duckdb") as url:
        context, seen = shown.context(), Seen()
        page = context.new_page()
        seen.watch(page, url)
        page.goto(f"{url}/calls")
        check(page)
        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.get_by_label("Token for clients").fill("a guess")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("That is not the token")
        page.get_by_label("Token for clients").fill(TOKEN)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("Calls")
        page.get_by_role("link", name="Cluster").click()
        expect(page.get_by_role("status")).to_have_text("Live")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        context.close()

    # the console has the status of the page that refused the guess
    assert ["401" in error for error in seen.errors] == [True]
    assert seen.elsewhere == []


def test_nothing_went_wrong_and_nothing_was_loaded_from_elsewhere(shown: Shown) -> None:
    """On all pages of all tests before this one: no error on the console, no request to another host."""
    with shown.page("/"):
        pass

    assert shown.seen.errors == []
    assert shown.seen.elsewhere == []
