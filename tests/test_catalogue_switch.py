"""Catalogues change while a router serves: by SIGHUP and by request, under load, and nobody notices but by the prices."""

import itertools
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.catalogues import make_checkpoint, make_document, make_item, read, write
from tests.routers import ask, serving

SECONDS = 3.0
WORKER: dict[str, Any] = {"flavor": "cpu", "state": "ready", "python": "3.11.7", "runtime": "fork"}


def priced(number: int, checkpoint: int, flavor: str = "cpu") -> dict[str, Any]:
    """As many documents as numbers, as many generations as checkpoints; each has a price of its own for pandas."""
    items = {"numpy": make_item(0.2), "pandas": make_item(0.5 + number / 100, ["numpy"])}
    held = [make_checkpoint(f"checkpoint_{checkpoint}", ["numpy"], 7), make_checkpoint("both", ["numpy", "pandas"], 80)]
    return make_document(items, held, flavor=flavor)


def sha256_of(document: dict[str, Any]) -> str:
    return read(document).sha256


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- SIGHUP ----


class Router:
    """A router process, and what a test does with it."""

    def __init__(self, process: subprocess.Popen[str], url: str, lines: list[str], folder: Path) -> None:
        self.process, self.url, self.lines, self.folder = process, url, lines, folder

    def hang_up(self) -> list[str]:
        """Sends SIGHUP, waits until the folder was read, returns the warnings that were logged about files."""
        start = len(self.lines)
        self.process.send_signal(signal.SIGHUP)
        wait_until(lambda: self.said("CATALOGUE_DIR was read", start))
        warnings = [line for line in self.lines[start:] if "catalogue file" in line and "projection" not in line]
        assert f"warnings={len(self.said('catalogue file', start))}" in self.said("CATALOGUE_DIR was read", start)[0]
        return warnings

    def said(self, words: str, start: int = 0) -> list[str]:
        return [line for line in self.lines[start:] if words in line]

    def active(self, flavor: str = "cpu") -> str | None:
        listed = ask("GET", f"{self.url}/v1/catalogues").json()
        return next((each["sha256"] for each in listed if each["active"] and each["flavor"] == flavor), None)

    def post(self, path: str, body: Any) -> None:
        answer = ask("POST", self.url + path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert answer.is_success, answer.text


Start = Callable[[], AbstractContextManager[Router]]


@pytest.fixture
def router(database_url: str, tmp_path: Path) -> Start:
    """Starts a router over the test's database and the folder of its catalogue files."""
    folder = tmp_path / "catalogues"
    folder.mkdir()

    @contextmanager
    def start() -> Iterator[Router]:
        with serving(DATABASE_URL=database_url, CATALOGUE_DIR=str(folder)) as (process, url, lines):
            yield Router(process, url, lines, folder)
            assert process.poll() is None
            assert not any("Traceback" in line for line in lines)

    return start


def test_sighup_reads_the_files_again(router: Start) -> None:
    """As at start: a changed file, a new one, a bad one with one warning, two of a flavor, one that is gone."""
    first, second, gpu = priced(1, 1), priced(2, 2), priced(3, 3, "gpu")
    with router() as running:
        folder = running.folder
        assert running.active() is None
        write(folder / "cpu.json", first)
        assert running.hang_up() == []
        assert running.active() == sha256_of(first)
        write(folder / "cpu.json", second)
        write(folder / "gpu.json", gpu)
        assert running.hang_up() == []
        assert (running.active(), running.active("gpu")) == (sha256_of(second), sha256_of(gpu))
        (folder / "cpu.json").write_text("{")
        for _ in range(2):
            [warning] = running.hang_up()
            assert f"{folder / 'cpu.json'}: " in warning
            assert running.active() == sha256_of(second)
        write(folder / "a.json", first)
        write(folder / "cpu.json", second)
        [warning] = running.hang_up()
        assert "a.json: not used, because cpu.json is of flavor cpu too" in warning
        assert running.active() == sha256_of(second)
        for path in folder.iterdir():
            path.unlink()
        assert running.hang_up() == []
        assert (running.active(), running.active("gpu")) == (None, None)


def test_a_request_holds_until_the_file_changes(router: Start) -> None:
    """Over SIGHUPs and restarts, over a bad file, over the same bytes in a new file; not over other bytes."""
    filed, asked, changed = priced(1, 1), priced(2, 2), priced(3, 3)
    with router() as running:
        path = write(running.folder / "cpu.json", filed)
        running.hang_up()
        running.post("/v1/catalogues", asked)
        assert running.active() == sha256_of(asked)
        running.hang_up()
        assert running.active() == sha256_of(asked)
        path.write_text("{")
        running.hang_up()
        assert running.active() == sha256_of(asked)
        write(path.with_suffix(".partial"), filed).rename(path)
        running.hang_up()
        assert running.active() == sha256_of(asked)
    with router() as running:
        assert running.active() == sha256_of(asked)
        write(path, changed)
        assert running.hang_up() == []
        assert running.active() == sha256_of(changed)
        running.post("/v1/catalogues/cpu/activate", {"sha256": sha256_of(filed)})
        running.hang_up()
        assert running.active() == sha256_of(filed)
    with router() as running:
        assert running.active() == sha256_of(filed)
        path.unlink()
        running.hang_up()
        assert running.active() is None
        running.post("/v1/catalogues/cpu/activate", {"sha256": sha256_of(asked)})
        running.hang_up()
        assert running.active() == sha256_of(asked)


def test_the_router_serves_while_it_reads_and_loses_no_signal(router: Start) -> None:
    """A file of 100 MB is read; requests are answered meanwhile, and what a second SIGHUP is about is seen after it."""
    with router() as running:
        for megabytes in (100, 400, 1600):  # should this process be kept waiting for longer than reading takes
            for path in running.folder.iterdir():
                path.unlink()
            running.hang_up()
            start = len(running.lines)
            (running.folder / "cpu.json").write_text(" " * megabytes * 1_000_000 + json.dumps(priced(1, 1)))
            running.process.send_signal(signal.SIGHUP)
            wait_until(partial(running.said, "reading CATALOGUE_DIR again", start))
            active = running.active()
            write(running.folder / "gpu.json", priced(2, 2, "gpu"))
            for _ in range(3):
                running.process.send_signal(signal.SIGHUP)
            if not running.said("CATALOGUE_DIR was read", start):
                break
        assert active is None
        wait_until(lambda: len(running.said("CATALOGUE_DIR was read", start)) == 2)

        assert running.active() is not None
        assert running.active("gpu") == sha256_of(priced(2, 2, "gpu"))


# ---- under load ----


def test_switching_under_load_fails_no_call_and_mixes_no_two_generations(database_url: str) -> None:
    """Eight clients place calls and explain while catalogues come, go and come back: each answer is of one of them."""
    documents = [priced(number, number // 2) for number in range(8)]  # two prices for each of four generations
    with serving(DATABASE_URL=database_url, WORKER_TTL="600") as (_, url, lines):
        known = [ask("POST", f"{url}/v1/catalogues", json=document).json() for document in documents]
        held = known[:4:2]  # the worker holds the first two generations: the others are dropped after three imports
        generations = [
            {"generation": each["generation"], "checkpoint_ids": [f"checkpoint_{number}", "both"]}
            for number, each in enumerate(held)
        ]
        assert ask("PUT", f"{url}/v1/workers/w", json=WORKER | {"generations": generations}).status_code == 204
        explained = {}
        for document, each in zip(documents, known, strict=True):
            ask("POST", f"{url}/v1/catalogues", json=document)
            answer = ask("POST", f"{url}/v1/explain", json={"modules": ["pandas"]}).json()
            assert (answer["catalogue"], answer["generation"]) == (each["sha256"], each["generation"])
            explained[each["sha256"]] = answer
        placements = {
            (answer["generation"], best["checkpoint_id"], best["total"], cold["total"])
            for answer in explained.values()
            for best in answer["options"][:1]
            for cold in answer["options"]
            if cold["checkpoint_id"] is None
        }
        assert len(placements) == len(documents)

        numbers = itertools.count()
        seen: list[str] = []
        wrong: list[Any] = []
        stop = threading.Event()

        def explain(client: httpx.Client) -> None:
            unknown = f"unknown{next(numbers)}"  # every question is new: no answer is a remembered one
            answer = client.post("/v1/explain", json={"modules": ["pandas", unknown]})
            expected = explained.get(answer.json().get("catalogue"), {})
            if answer.status_code != 200 or answer.json() != expected | {"matches": answer.json()["matches"]}:
                wrong.append(answer.text)
            else:
                seen.append(answer.json()["catalogue"])

        def place(client: httpx.Client) -> None:
            answer = client.post("/v1/calls", json={"payload": "", "python": "3.11", "modules": ["pandas"]})
            placed = answer.json().get("placement", {})
            names = ("generation", "checkpoint_id", "cost", "cold_cost")
            found = tuple(placed.get(name) for name in names)
            if answer.status_code != 201 or found not in placements or found[0] not in {x["generation"] for x in held}:
                wrong.append(answer.text)
            else:
                seen.append(str(found))

        def work(action: Callable[[httpx.Client], None]) -> None:
            with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
                while not stop.is_set():
                    try:
                        action(client)
                    except Exception as error:
                        wrong.append(error)

        threads = [threading.Thread(target=work, args=(action,)) for action in (explain, place) * 4]
        for thread in threads:
            thread.start()
        switches = 0
        deadline = time.monotonic() + SECONDS
        for number in itertools.cycle([0, 5, 2, 7, 1, 4, 3, 6]):
            late = time.monotonic() - deadline
            if late > 60 or (late > 0 and switches >= 12 and len(set(seen)) > 6):
                break
            ask("POST", f"{url}/v1/catalogues", json=documents[number]).raise_for_status()
            sha256 = known[number - 1 if number % 2 else 0]["sha256"]
            activated = ask("POST", f"{url}/v1/catalogues/cpu/activate", json={"sha256": sha256})
            assert activated.status_code in (200, 404), activated.text  # 404: it was dropped
            switches += 2
        stop.set()
        for thread in threads:
            thread.join()

        assert wrong == []
        assert len(set(seen)) > 6  # several catalogues answered both kinds of request
        assert not any("Traceback" in line for line in lines)
