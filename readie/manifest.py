"""What lies in CHECKPOINT_DIR: written by the pipeline and the worker that captures, read by the worker that restores.

`<generation>/manifest.json` is what `capture` records about a generation of checkpoints, and a worker checks before it
uses them; `<generation>/<checkpoint_id>/checkpoint.json` is what the executor imported before it was saved.
"""

from pathlib import Path
from typing import Literal

import msgspec

from readie.files import read_json, write_json
from readie.flavor import Flavor
from readie.wire import Answer, Digest, Identifier, Name

_WAY_OUT = "Capture the generation again with readie-pipeline capture."


class Host(msgspec.Struct, frozen=True):
    """What a checkpoint is bound to. A worker whose own `Host` differs in any field but `cpus` starts cold instead."""

    runtime: Literal["fork", "runsc"]
    runtime_version: str
    python: str  # 3.11.7, of the root filesystem
    protocol: int  # of the executor
    fingerprint: str  # SHA-256 of the sandbox specification
    rootfs_digest: str  # SHA-256 over the root filesystem's distributions and their files
    cpu_features: str  # SHA-256 of the sorted flags
    cpus: float = 0.0  # that a sandbox may keep busy, 0: all. Times hold for sandboxes that may do as much

    @property
    def python_minor(self) -> str:
        return ".".join(self.python.split(".")[:2])


class Description(Answer, frozen=True, kw_only=True):
    """What a worker on this host with this root filesystem is."""

    host: Host
    markers: dict[str, str]  # PEP 508 marker environment of the root filesystem
    preload: list[str]  # standard-library modules that the executor has loaded before anything else
    memory_source: Literal["RssAnon", "VmRSS"]


class CheckpointSpec(Answer, frozen=True, kw_only=True):
    """`checkpoint.json`: what the executor imports before it is saved."""

    checkpoint_id: Identifier
    generation: Identifier  # a digest, or for ballast what it is for: it names a folder
    flavor: Flavor = Flavor.CPU
    canonical: tuple[Name, ...] = ()
    ballast_mb: float = 0.0  # memory written besides, for alpha's fit
    resources: str = ""  # SHA-256 of the declarations that its datasets, models and tokenizers are loaded by

    @property
    def key(self) -> tuple[str, str]:
        """What names a checkpoint: its id means nothing without the generation."""
        return (self.generation, self.checkpoint_id)


class CapturedCheckpoint(msgspec.Struct, frozen=True):
    checkpoint_id: str
    size_mb: float  # as planned: the sum of its items
    measured_mb: float  # the captured process, less an empty one
    restore_s: list[float]  # each timed restore to the first answer


class Point(msgspec.Struct, frozen=True):
    """One point of alpha's fit: ballast or checkpoint, MB in memory, median seconds of the restore."""

    name: str
    size_mb: float
    restore_s: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    version: Literal[1] = 1
    generation: Digest
    flavor: Flavor
    host: Host
    memory_source: Literal["RssAnon", "VmRSS"]
    alpha_planned: float  # seconds per MB
    alpha_measured: float
    alpha_written: float  # the catalogue's
    points: list[Point]
    restore_fixed_s: float  # seconds to ready of the empty checkpoint, before size and missing imports
    cold_fixed_s: float  # seconds to ready of a cold start that imports nothing
    checkpoints: list[CapturedCheckpoint]
    warnings: list[str] = []


def read_manifest(path: Path) -> Manifest:
    """The manifest at `path`. Raises `BadFile`, which names the file, the place and the rule."""
    return read_json(path, Manifest, _WAY_OUT)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes `path` whole or not at all."""
    write_json(path, manifest)


def read_spec(path: Path) -> CheckpointSpec:
    """The `checkpoint.json` at `path`. Raises `BadFile`."""
    return read_json(path, CheckpointSpec, _WAY_OUT)
