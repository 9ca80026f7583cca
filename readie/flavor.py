"""Flavors: what kind of worker a sandbox, a checkpoint or a catalogue belongs to."""

from enum import StrEnum
from pathlib import Path

from readie.errors import BadFlavor, NeedsGpu


class Flavor(StrEnum):
    """`cpu`: no GPU access. `gpu`: CPU plus GPU, with its own root filesystem and checkpoints."""

    CPU = "cpu"
    GPU = "gpu"


def parse_flavor(text: object) -> Flavor:
    """The flavor called exactly `text`; anything else raises `BadFlavor`, which names both flavors."""
    if isinstance(text, str):
        for flavor in Flavor:
            if text == flavor.value:
                return flavor
    raise BadFlavor(f"{text!r} is not a flavor")


def check_gpu(flavor: Flavor) -> None:
    """Raises `NeedsGpu` for flavor gpu on a host without NVIDIA devices."""
    if flavor is Flavor.GPU and not (Path("/dev/nvidiactl").exists() and any(Path("/dev").glob("nvidia[0-9]*"))):
        raise NeedsGpu("flavor gpu needs a GPU, and this host has no /dev/nvidiactl and /dev/nvidia0")
