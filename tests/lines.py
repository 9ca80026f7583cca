"""A router and workers as real processes, over one catalogue and its checkpoints."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec

from readie.client import Call
from readie.document import DocumentCheckpoint, DocumentItem, write_document
from readie.files import write_json
from readie.flavor import Flavor
from readie.manifest import CapturedCheckpoint, CheckpointSpec, Host, Manifest, write_manifest
from readie.wire import Result, WorkerView
from tests.sandboxes import make_rootfs, make_sealed_rootfs, wait_for
from worker.host import open_runtime
from worker.runsc import Options

GENERATION = "a" * 64
HOST = Host(
    runtime="fork",
    runtime_version="1",
    python="3.11.7",
    protocol=1,
    fingerprint="f" * 64,
    rootfs_digest="d" * 64,
    cpu_features="c" * 64,
)


def write_generation(
    folder: Path,
    checkpoints: dict[str, list[str]],
    *,
    generation: str = GENERATION,
    host: Host = HOST,
    flavor: Flavor = Flavor.CPU,
) -> Path:
    """A captured generation: checkpoint id → canonical."""
    place = folder / generation
    for checkpoint_id, canonical in checkpoints.items():
        (place / checkpoint_id).mkdir(parents=True)
        spec = CheckpointSpec(
            checkpoint_id=checkpoint_id, generation=generation, flavor=flavor, canonical=tuple(canonical)
        )
        write_json(place / checkpoint_id / "checkpoint.json", spec)
    captured = [
        CapturedCheckpoint(checkpoint_id=name, size_mb=0.0, measured_mb=0.0, restore_s=[0.01]) for name in checkpoints
    ]
    manifest = Manifest(
        generation=generation,
        flavor=flavor,
        host=host,
        memory_source="RssAnon",
        alpha_planned=1e-5,
        alpha_measured=1e-5,
        alpha_written=1e-5,
        points=[],
        restore_fixed_s=0.004,
        cold_fixed_s=0.15,
        checkpoints=captured,
    )
    write_manifest(place / "manifest.json", manifest)
    return place


class Line:
    """A router and workers: real processes, over one catalogue and its checkpoints.

    `packages` are files of the root filesystem, `checkpoints` what the catalogue lists; `lost` ones nobody captured. The
    database is a file of its own, unless another is given.
    """

    def __init__(
        self,
        folder: Path,
        packages: Mapping[str, str],
        checkpoints: Mapping[str, list[str]],
        *,
        lost: str = "",
        kind: Literal["fork", "runsc"] = "fork",
        database_url: str | None = None,
    ) -> None:
        self.folder = folder
        self.kind = kind
        self.database_url = database_url or f"duckdb:///{folder / 'readie.duckdb'}"
        self.rootfs = (make_rootfs if kind == "fork" else make_sealed_rootfs)(folder / "rootfs", packages)
        (folder / "describe").mkdir()
        self.runtime = open_runtime(kind, self.rootfs, folder / "describe", Options())
        (folder / "catalogues").mkdir()
        catalogue = write_document(
            folder / "catalogues" / "cpu.json",
            flavor=Flavor.CPU,
            alpha=1e-5,
            distributions={"dist": "1.0"},
            items={name: DocumentItem(0.4, 1.0, "package", (), "dist") for name in packages}.items(),
            checkpoints=[
                DocumentCheckpoint(name, modules, modules, len(modules)) for name, modules in checkpoints.items()
            ],
        )
        self.generation = catalogue.generation
        held = {name: modules for name, modules in checkpoints.items() if name != lost}
        host = self.runtime.describe().host
        place = write_generation(folder / "checkpoints", held, generation=self.generation, host=host)
        for name, modules in held.items():
            spec = CheckpointSpec(checkpoint_id=name, generation=self.generation, canonical=tuple(modules))
            shutil.rmtree(place / name)
            self.runtime.save(spec, place / name, timeout=60)
        self.runtime.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes = ExitStack()
        self.start_router()

    def start_router(self) -> None:
        environment = {
            "DATABASE_URL": self.database_url,
            "CATALOGUE_DIR": str(self.folder / "catalogues"),
            "ROUTER_PORT": str(self.port),
            "WORKER_TTL": "60",
            "WORKER_TOKEN": "secret",
        }
        self.router = self.processes.enter_context(self.process("app.cli", "router", environment))
        wait_for(lambda: self.get("/ready"), 60)

    def restart_router(self, pause: float) -> None:
        """Kills the router, and starts it again on the same database and port after a pause."""
        self.router.kill()
        self.router.wait()
        time.sleep(pause)
        self.start_router()

    @contextmanager
    def worker(self, name: str = "one", **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
        settings = {
            "ROUTER_URL": self.url,
            "WORKER_TOKEN": "secret",
            "WORKER_ID": name,
            "WORKER_DIR": str(self.folder / name),
            "WORKER_MEM_TOTAL": "8Gi",
            "CHECKPOINT_DIR": str(self.folder / "checkpoints"),
            "ROOTFS": str(self.rootfs),
            "RUNTIME": self.kind,
            "MAX_PAYLOAD": str(8 * 2**20),
        }
        before = self.log(name).count("] ready ")
        with self.process("worker.cli", name, settings | environment) as process:
            wait_for(lambda: self.log(name).count("] ready ") > before, 60)  # not what is known of an earlier one
            wait_for(lambda: self.view(name) and self.view(name).state == "ready", 60)
            yield process

    @contextmanager
    def process(self, module: str, name: str, environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("WORKER_", "ROUTER_"))}
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", module, "serve"]
            running = subprocess.Popen(command, stdout=log, stderr=log, env={**clean, **environment})
        try:
            yield running
        finally:
            running.terminate()
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()

    def get(self, path: str) -> bytes | None:
        try:
            answer = httpx.get(self.url + path, timeout=60)
        except httpx.TransportError:
            return None
        return answer.content if answer.is_success else None

    def view(self, name: str = "one") -> Any:
        views = msgspec.json.decode(self.get("/v1/workers") or b"[]", type=list[WorkerView])
        return next((view for view in views if view.worker_id == name), None)

    def session(self, name: str) -> str:
        """The state of a session, as the router tells it."""
        listed = msgspec.json.decode(self.get("/v1/sessions") or b"[]")
        return next((one["state"] for one in listed if one["session_id"] == name), "")

    def offered(self, name: str = "one") -> list[str]:
        view = self.view(name)
        return sorted(checkpoint for held in view.generations for checkpoint in held.checkpoint_ids)

    def log(self, name: str = "one") -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""


def end(call: "Call[Any]") -> Result:
    """The result of a call, however it ended."""
    wait_for(lambda: call.status.state in {"finished", "failed", "cancelled"}, 60)
    result = call.status.result
    assert result
    return result
