"""The one specification of a gVisor sandbox: what `runsc` is told at a capture, at a restore and at a cold start.

A saved process can only be restored into a sandbox like the one that it was saved in. So there is one function that
writes the OCI configuration (the Open Container Initiative's runtime specification), and one list of flags. `sensitive`
is what a restore is sensitive to, for the fingerprint that checkpoints carry: arguments, mounts in order, namespaces,
overlay, network, user. Left out is what may differ: where mounts come from on the host, limits, the cgroup's path.
"""

import json
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from readie.errors import NeedsGpu
from readie.flavor import Flavor, check_gpu
from readie.resources import FILE as RESOURCES
from worker.bundle import BOOT, ENVIRONMENT

UID = 65534  # nobody: owns nothing in the root filesystem
CALL, BUNDLE, HOME, TMP = "/call", "/readie", "/tmp/work", "/tmp/tmp"  # inside  # noqa: S108
RESOLVER = "/etc/resolv.conf"  # the host's, for a sandbox that has the host's network; else empty
DRIVER = "/run"  # where the libraries of a GPU's driver are; empty in every root filesystem
PYTHON = "/usr/bin/python3"
CACHE = "/var/cache"
INSIDE = {  # what every executor is told
    "folder": CALL,
    "home": HOME,
    "tmp": TMP,
    "resources": f"/{RESOURCES}",
    "own_host_name": True,  # a restored process keeps the name that it was saved with, unless it can change it
}
CPU_PERIOD_US = 100_000

Network = Literal["none", "host"]


@dataclass(frozen=True)
class Limits:
    """What every sandbox of a worker is held to, besides its memory."""

    cpus: float = 0.0  # processors that it may keep busy; 0: all
    processes: int = 512  # host threads: two for each process inside, and about thirty of gVisor's own; 0: no limit


@dataclass(frozen=True)
class Gpu:
    """What of the host a sandbox needs to use its GPUs: device files, and the driver's libraries."""

    devices: tuple[Path, ...] = ()
    libraries: Path | None = None  # a folder with copies of them


def find_gpu(flavor: Flavor, folder: Path) -> Gpu:
    """The host's NVIDIA devices and driver libraries, for flavor gpu; nothing for cpu. Raises `NeedsGpu`.

    The libraries are copied to `folder`: they are mounted as one, on a place that every root filesystem has.
    """
    if flavor is not Flavor.GPU:
        return Gpu()
    check_gpu(flavor)
    devices = sorted(path for path in Path("/dev").glob("nvidia*") if path.is_char_device())
    devices += sorted(Path("/dev/nvidia-caps").glob("nvidia-cap*"))
    if not any(path.name == "nvidiactl" for path in devices):
        raise NeedsGpu("/dev/nvidiactl is missing: the NVIDIA driver is not loaded")
    # The loader's cache knows where the driver's installer has put its libraries.
    listed = subprocess.run(
        ["/sbin/ldconfig", "-p"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    ).stdout
    libraries = find_driver(listed, platform.machine())
    if not libraries:
        raise NeedsGpu("the NVIDIA driver's libraries (libcuda.so.1) are not installed for this machine's architecture")
    folder.mkdir(exist_ok=True)
    for library in libraries:
        shutil.copyfile(library, folder / library.name)
    return Gpu(tuple(devices), folder)


def find_driver(listed: str, machine: str) -> list[Path]:
    """The driver's libraries in what `ldconfig -p` says, of the architecture `machine` (as `uname -m` has it) alone.

    Drivers install those of 32 bits as well, under the same names. Of two of one name the loader takes the first.
    """
    found: dict[str, Path] = {}
    for line in listed.splitlines():
        entry = LISTED.fullmatch(line.strip())
        if entry and entry["name"].startswith(DRIVER_LIBRARIES) and LISTED_AS.get(machine) in entry["kind"].split(","):
            found.setdefault(entry["name"], Path(entry["path"]))
    return list(found.values())


#: Of the driver, for the capabilities `compute` and `utility`. The list is that of NVIDIA's container toolkit.
DRIVER_LIBRARIES = (
    "libcuda.so",
    "libcudadebugger.so",
    "libnvidia-ml.so",
    "libnvidia-ptxjitcompiler.so",
    "libnvidia-nvvm.so",
    "libnvidia-allocator.so",
    "libnvidia-cfg.so",
)
#: A line of `ldconfig -p`, and how it names the architectures for which there are such drivers.
LISTED = re.compile(r"(?P<name>\S+) \((?P<kind>[^)]*)\) => (?P<path>/.*)")
LISTED_AS = {"x86_64": "x86-64", "aarch64": "AArch64"}


def make_arguments(mode: str, options: dict[str, Any]) -> list[str]:
    """The command of a sandbox's first process: the executor in `mode` (worker/executor.py)."""
    return [PYTHON, "-I", "-B", "-c", BOOT, BUNDLE, mode, json.dumps(options | INSIDE)]


def make_flags(network: Network, gpu: Gpu) -> list[str]:
    """The flags of every `runsc` command, but for `--root`."""
    return [
        "--platform=systrap",
        f"--network={network}",
        "--overlay2=root:memory",  # what is written to the root filesystem is memory, and ends with the sandbox
        "--host-uds=open",  # the executor connects to the socket in its folder
        "--host-fifo=open",  # and writes its output to the pipes there
        "--file-access=exclusive",  # the root filesystem is immutable
        "--file-access-mounts=shared",  # what the host adds to a sandbox's folder is seen
        *(["--nvproxy=true"] if gpu.devices else []),
    ]


def make_configuration(
    *,
    name: str,
    rootfs: Path,
    bundle: Path,
    folder: Path,
    arguments: list[str],
    memory: int,
    limits: Limits,
    network: Network,
    gpu: Gpu,
) -> dict[str, Any]:
    """The OCI configuration of one sandbox, as JSON says it.

    `name` is the sandbox's: of its host and of its control group. `bundle` is the executor's folder, `folder` the
    sandbox's own (worker/runtime.py); `memory` is in bytes.
    """
    resources: dict[str, Any] = {"memory": {"limit": memory}}
    if limits.processes:
        resources["pids"] = {"limit": limits.processes}
    if limits.cpus:
        resources["cpu"] = {"period": CPU_PERIOD_US, "quota": round(limits.cpus * CPU_PERIOD_US)}
    # Numeric libraries use one thread here too, so that both runtimes measure and capture the same.
    environment = ENVIRONMENT | {"PATH": "/usr/bin:/bin", "HOME": HOME, "TMPDIR": TMP, "XDG_CACHE_HOME": CACHE}
    if gpu.devices:
        environment |= {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
        environment["LD_LIBRARY_PATH"] = DRIVER
    devices = [describe_device(path) for path in gpu.devices]
    if devices:
        resources["devices"] = [
            {"allow": True, "type": "c", "major": one["major"], "minor": one["minor"], "access": "rwm"}
            for one in devices
        ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": UID, "gid": UID},
            "args": arguments,
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": {},
            "oomScoreAdj": 1000,  # if the machine runs out of memory, a sandbox goes before the agent
        },
        "root": {"path": str(rootfs), "readonly": False},  # the overlay takes what is written
        "hostname": name,
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            *(
                {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]}
                for path in ("/tmp", "/dev/shm")  # noqa: S108
            ),
            bind(bundle, BUNDLE),
            bind(folder, CALL, writable=True),
            *([bind(gpu.libraries, DRIVER)] if gpu.libraries else []),
            *([bind(Path(RESOLVER).resolve(), RESOLVER)] if network == "host" and Path(RESOLVER).exists() else []),
        ],
        "linux": {
            "namespaces": [
                {"type": kind}
                for kind in ("pid", "network", "ipc", "uts", "mount")
                if (kind, network) != ("network", "host")
            ],
            "resources": resources,
            "cgroupsPath": f"/{name}",
            "devices": devices,
        },
    }


def bind(source: Path, destination: str, *, writable: bool = False) -> dict[str, Any]:
    options = ["rbind", "rw" if writable else "ro", "nosuid", "nodev"]
    return {"destination": destination, "type": "bind", "source": str(source), "options": options}


def describe_device(path: Path) -> dict[str, Any]:
    status = path.stat()
    major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
    return {"path": str(path), "type": "c", "major": major, "minor": minor, "fileMode": 0o666, "uid": UID, "gid": UID}


def sensitive(network: Network, gpu: Gpu) -> object:
    """What of all this a restore is sensitive to, as JSON can say it."""
    anywhere = Path("/")
    configuration = make_configuration(
        name="",
        rootfs=anywhere,
        bundle=anywhere,
        folder=anywhere,
        arguments=make_arguments("", {}),
        memory=0,
        limits=Limits(0.0, 0),
        network=network,
        gpu=gpu,
    )
    configuration["linux"].pop("resources")
    for mount in configuration["mounts"]:
        mount.pop("source")
    return [make_flags(network, gpu), json.loads(json.dumps(configuration))]
