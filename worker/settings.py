"""The agent's settings, each from the environment variable of its name, read once at start."""

import re
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from readie.errors import BadSetting
from readie.flavor import Flavor
from readie.logs import LogFormat
from readie.settings import DEFAULT_ROUTER_URL, Bytes, Duration, RouterUrl, check_token, read_settings
from readie.wire import IDENTIFIER, MAX_PAYLOAD


def default_worker_id() -> str:
    """The host's name, in the characters that an id may have."""
    return re.sub(r"[^A-Za-z0-9._:-]", "-", socket.gethostname()).lstrip("._:-")[:128] or "worker"


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `readie-worker serve` reads."""

    rootfs: Annotated[str, msgspec.Meta(description="a folder with its own bin/python")]  # the root filesystem
    router_url: RouterUrl = DEFAULT_ROUTER_URL  # the router that this worker offers itself to
    worker_token: str = ""  # what the router's WORKER_TOKEN is
    router_ca: str | None = None  # for an https router: a file of certificates (PEM) to trust alone
    worker_id: Annotated[
        str,
        msgspec.Meta(
            pattern=IDENTIFIER,
            description="up to 128 letters, digits and . _ : -, of which the first is a letter or digit",
        ),
    ] = msgspec.field(default_factory=default_worker_id)  # its name, one worker's own. Default: the host's name
    worker_flavor: Flavor = Flavor.CPU  # gpu needs NVIDIA devices
    worker_mem_total: Bytes | None = None  # what sandboxes and zygotes may use together; unset: not a limit
    worker_gpu_total: Bytes | None = None  # GPU memory; of gpu workers only
    worker_max_sandboxes: Annotated[
        int, msgspec.Meta(ge=0, le=100_000, description="a whole number from 0 (no limit) to 100000")
    ] = 0  # how many sandboxes may live at once
    worker_dir: str | None = None  # sandboxes' folders, one worker's own. Default: in the system's temporary folder
    checkpoint_dir: str | None = None  # the folder of <generation>/manifest.json; unset: every start is cold
    runtime: Literal["fork", "runsc"] = "fork"  # fork: forked processes, no isolation. runsc: gVisor
    max_payload: Bytes = Bytes(MAX_PAYLOAD)  # of a call and of a result
    max_output: Bytes = Bytes(10 * 1024 * 1024)  # of what one call prints; what is beyond is dropped
    start_timeout: Duration = 120.0  # until a sandbox answers, and then until the function starts: install, imports
    load_timeout: Duration = 300.0  # of making a checkpoint ready to restore
    sandbox_idle_ttl: Duration = 300.0  # how long a session's sandbox lives without a call
    sandbox_cpus: Annotated[
        float, msgspec.Meta(ge=0, le=10_000, description="a number of processors from 0 (all) to 10000")
    ] = 0.0  # what one sandbox may keep busy; of runsc alone
    sandbox_processes: Annotated[
        int, msgspec.Meta(ge=0, le=1_000_000, description="a whole number from 0 (no limit) to 1000000")
    ] = 512  # threads of the host that one sandbox may have: about thirty, and two for each process; of runsc alone
    sandbox_network: Literal["none", "host"] = (
        "none"  # host: calls have this host's network, and start cold; of runsc alone
    )
    sandboxes_ahead: Annotated[int, msgspec.Meta(ge=0, le=1000, description="a whole number from 0 to 1000")] = (
        1  # created before they are asked for, about 15 MB each (40 MB are set aside); of runsc alone
    )
    pool_size: Annotated[int, msgspec.Meta(ge=0, le=1000, description="a whole number from 0 (none) to 1000")] = (
        0  # sandboxes kept restored for the checkpoints that are asked for most
    )
    packages_index: (
        Annotated[str, msgspec.Meta(pattern=r"^https?://[^/]", description="a URL of a package index")] | None
    ) = None  # where the packages that calls bring may come from
    packages_wheels: str | None = None  # a folder of wheels that they may come from
    log_format: LogFormat = "text"  # json: one object a line, on stderr

    @property
    def folder(self) -> Path:
        """WORKER_DIR, or its default."""
        return Path(self.worker_dir or Path(tempfile.gettempdir()) / f"readie-{self.worker_id}").absolute()


def read_worker_settings(environ: Mapping[str, str]) -> WorkerSettings:
    """The settings. Raises `BadSetting`, which names the variable, its value and what is accepted."""
    settings = read_settings(WorkerSettings, environ)
    gpu = settings.worker_flavor is Flavor.GPU
    if gpu and settings.worker_gpu_total is None:
        raise BadSetting("WORKER_GPU_TOTAL is not set, and WORKER_FLAVOR=gpu", "Set it: bytes, or a size such as 16Gi.")
    if not gpu and settings.worker_gpu_total is not None:
        raise BadSetting(
            f"WORKER_GPU_TOTAL={settings.worker_gpu_total}: WORKER_FLAVOR is cpu", "Leave it out, or set gpu."
        )
    check_token("WORKER_TOKEN", settings.worker_token)
    if settings.packages_wheels is not None and not Path(settings.packages_wheels).is_dir():
        raise BadSetting(
            f"PACKAGES_WHEELS={settings.packages_wheels!r} is not a folder", "Accepted: a folder of wheels (*.whl)."
        )
    if settings.checkpoint_dir is not None and not Path(settings.checkpoint_dir).is_dir():
        raise BadSetting(
            f"CHECKPOINT_DIR={settings.checkpoint_dir!r} is not a folder",
            "Accepted: the folder that holds <generation>/manifest.json; leave it out to start every call cold.",
        )
    return settings
