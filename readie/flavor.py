"""Flavors: what kind of worker a sandbox, a checkpoint or a catalogue belongs to."""

from enum import StrEnum

from readie.errors import BadFlavor


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
