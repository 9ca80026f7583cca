"""The checkpoints in CHECKPOINT_DIR, and which of them are this worker's to restore."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from readie.errors import BadFile
from readie.flavor import Flavor
from readie.manifest import CheckpointSpec, Host, Manifest, read_manifest, read_spec


@dataclass(frozen=True)
class Held:
    """A checkpoint that this worker may restore."""

    spec: CheckpointSpec
    folder: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        return f"{self.spec.checkpoint_id} of generation {self.spec.generation[:12]}"


def find_checkpoints(folder: Path, host: Host, flavor: Flavor) -> tuple[list[Held], list[str]]:
    """The checkpoints under `folder` that were captured for just such a worker, and why each other one is not offered."""
    held: list[Held] = []
    warnings: list[str] = []
    for generation in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        try:
            manifest = read_manifest(generation / "manifest.json")
        except BadFile as error:
            warnings.append(f"{error.detail}: its checkpoints are not offered")
            continue
        reasons = mismatches(manifest, generation.name, host, flavor)
        if reasons:
            warnings.append(f"{generation}: {'; '.join(reasons)}: its checkpoints are not offered")
            continue
        if manifest.host.cpus != host.cpus:
            warnings.append(
                f"{generation}: it was measured with SANDBOX_CPUS={manifest.host.cpus:g}, this worker's is {host.cpus:g}:"
                " predictions will not hold"
            )
        for captured in manifest.checkpoints:
            place = generation / captured.checkpoint_id
            try:
                spec = read_spec(place / "checkpoint.json")
            except BadFile as error:
                warnings.append(f"{error.detail}: {captured.checkpoint_id} is not offered")
                continue
            if (*spec.key, spec.flavor) != (manifest.generation, captured.checkpoint_id, manifest.flavor):
                warnings.append(f"{place / 'checkpoint.json'} belongs to another checkpoint: it is not offered")
                continue
            held.append(Held(spec, place, manifest))
    return held, warnings


def mismatches(manifest: Manifest, generation: str, host: Host, flavor: Flavor) -> list[str]:
    """In which fields a manifest is not this worker's: the field, its value, and the worker's."""
    fields = [("generation", manifest.generation, generation), ("flavor", manifest.flavor.value, flavor.value)]
    ours = msgspec.structs.asdict(host)
    theirs = msgspec.structs.asdict(manifest.host).items()
    fields += [(name, value, ours[name]) for name, value in theirs if name != "cpus"]
    return [f"{name} is {value}, this worker's is {own}" for name, value, own in fields if value != own]
