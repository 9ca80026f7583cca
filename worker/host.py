"""The runtimes, by name."""

from pathlib import Path

from readie.errors import BadRequest
from worker.fork import ForkRuntime
from worker.runsc import Options, RunscRuntime
from worker.runtime import Runtime


def open_runtime(name: str, rootfs: Path, folder: Path, options: Options) -> Runtime:
    """The runtime called `name`, which keeps what it needs in `folder`; `options` are of runsc alone.

    Raises `RuntimeUnavailable`, `NeedsGpu`, `BadRequest`.
    """
    if name == "fork":
        return ForkRuntime(rootfs, folder)
    if name == "runsc":
        return RunscRuntime(rootfs, folder, options)
    raise BadRequest(f"{name!r} is not a runtime", "Use fork or runsc.")
