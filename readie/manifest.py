"""`manifest.json`: what `capture` records about a generation of checkpoints, and a worker checks before it uses them.

It lies at `<CHECKPOINT_DIR>/<generation>/manifest.json`, beside one folder for each checkpoint.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from readie.errors import BadFile
from readie.flavor import Flavor


class Host(msgspec.Struct, frozen=True):
    """What a checkpoint is bound to. A worker whose own `Host` differs in any field starts cold instead."""

    runtime: Literal["fork", "runsc"]
    runtime_version: str
    python: str  # 3.11.7, of the root filesystem
    protocol: int  # of the executor
    fingerprint: str  # SHA-256 of the sandbox specification
    rootfs_digest: str  # SHA-256 over the root filesystem's distributions and their files
    cpu_features: str  # SHA-256 of the sorted flags


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
    generation: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
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
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadFile(f"{path}: {error}", "Capture the generation again with readie-pipeline capture.") from error


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes `path` whole or not at all."""
    aside = path.with_name(path.name + ".partial")
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    aside.rename(path)
