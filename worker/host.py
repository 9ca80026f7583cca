"""What this host can do: which runtime, and whether there is a GPU."""

from pathlib import Path

from readie.errors import BadRequest, NeedsGpu, RuntimeUnavailable
from readie.flavor import Flavor
from worker.fork import ForkRuntime
from worker.runtime import Runtime


def open_runtime(name: str, rootfs: Path, folder: Path) -> Runtime:
    """The runtime called `name`, which keeps what it needs in `folder`. Raises `RuntimeUnavailable`, `BadRequest`."""
    if name == "fork":
        return ForkRuntime(rootfs, folder)
    if name == "runsc":
        raise RuntimeUnavailable("the runsc runtime is not built yet", "Use RUNTIME=fork (--runtime fork).")
    raise BadRequest(f"{name!r} is not a runtime", "Use fork or runsc.")


def check_gpu(flavor: Flavor) -> None:
    """Raises `NeedsGpu` for flavor gpu on a host without NVIDIA devices."""
    if flavor is Flavor.GPU and not (Path("/dev/nvidiactl").exists() and any(Path("/dev").glob("nvidia[0-9]*"))):
        raise NeedsGpu("flavor gpu needs /dev/nvidiactl and a /dev/nvidia0, and this host has none")
