"""The runtimes, by name."""

from pathlib import Path

from readie.errors import BadRequest, RuntimeUnavailable
from worker.fork import ForkRuntime
from worker.runtime import Runtime


def open_runtime(name: str, rootfs: Path, folder: Path) -> Runtime:
    """The runtime called `name`, which keeps what it needs in `folder`. Raises `RuntimeUnavailable`, `BadRequest`."""
    if name == "fork":
        return ForkRuntime(rootfs, folder)
    if name == "runsc":
        raise RuntimeUnavailable("the runsc runtime is not built yet", "Use RUNTIME=fork (--runtime fork).")
    raise BadRequest(f"{name!r} is not a runtime", "Use fork or runsc.")
