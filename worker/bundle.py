"""What the worker brings into every sandbox, under either runtime, and what of it checkpoints are bound to."""

import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import readie
from readie.errors import ReadieError, RuntimeUnavailable
from readie.manifest import CheckpointSpec
from readie.resources import hash_resources, read_resources
from worker.runtime import SaveFailed, remove_tree

#: What processes find in their environment under either runtime, besides PATH, HOME, TMPDIR and XDG_CACHE_HOME. Nothing
#: of the worker's own environment, where its tokens are. Numeric libraries use one thread: see worker/fork.py.
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator would else start a thread
}
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); import readie_executor; readie_executor.main()"


def make_bundle(folder: Path, python: Path) -> Path:
    """A folder with the executor, the probe, cloudpickle, what functions use of `readie`, and nothing else of the worker's.

    Compiled by the Python that will run it: sandboxes write no byte code, so each start would compile it again. Raises
    `RuntimeUnavailable` where that Python cannot.
    """
    remove_tree(folder)
    folder.mkdir(parents=True)
    here = Path(__file__).parent
    shutil.copy(here / "executor.py", folder / "readie_executor.py")
    shutil.copy(here / "probe.py", folder / "readie_probe.py")
    (folder / "readie").mkdir()
    for name in ("__init__.py", "errors.py", "resources.py", "restore.py"):
        shutil.copy(Path(readie.__file__).with_name(name), folder / "readie")
    spec = importlib.util.find_spec("cloudpickle")
    if spec is None or spec.origin is None:
        raise RuntimeUnavailable("cloudpickle is not installed beside the worker", "Install readie[worker] again.")
    source = Path(spec.origin).parent
    shutil.copytree(source, folder / "cloudpickle", ignore=shutil.ignore_patterns("__pycache__"))
    compiler = [str(python), "-I", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(folder)]
    way_out = "ROOTFS (--rootfs) needs a Python 3.11 or later that runs on this host."
    try:
        done = subprocess.run(
            compiler, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
    except OSError as error:
        raise RuntimeUnavailable(f"{python} cannot be started: {error.strerror}", way_out) from error
    if done.returncode:
        last = (done.stdout.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise RuntimeUnavailable(f"{python} cannot run the executor: {last}", way_out)
    return folder


def make_python(script: Path, rootfs: Path) -> Path:
    """A script that starts the Python of a root filesystem that stands alone, on the host, by its own loader and with its
    own libraries: the host may be a container with an older C library.

    The Python itself where no loader is found (`readie-pipeline rootfs` copies one, and libraries to beside the C
    library), or where nothing in the script's folder may be executed.
    """
    python = rootfs / "usr" / "bin" / "python3"
    loaders = [path for place in ("lib64", "lib") for path in sorted((rootfs / place).glob("ld-*.so*"))]
    libraries = [path.parent for place in ("usr/lib*", "usr/lib/*") for path in rootfs.glob(f"{place}/libc.*so*")]
    if not loaders or not libraries:
        return python
    command = [str(loaders[0]), "--library-path", str(libraries[0]), str(python)]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    script.chmod(0o755)
    return script if os.access(script, os.X_OK) else python


def copy_pip(bundle: Path) -> None:
    """Puts the worker's pip beside the executor. Raises `RuntimeUnavailable` where there is none."""
    if (bundle / "pip").exists():
        return
    spec = importlib.util.find_spec("pip")
    if spec is None or spec.origin is None:
        raise RuntimeUnavailable(
            "pip is not installed beside the worker, and packages are to be installed with it",
            "Install pip there, or set neither PACKAGES_INDEX nor PACKAGES_WHEELS.",
        )
    aside = bundle / ".pip"
    remove_tree(aside)
    shutil.copytree(Path(spec.origin).parent, aside)
    aside.rename(bundle / "pip")


def fingerprint(bundle: Path, specification: object) -> str:
    """SHA-256 over everything that makes a sandbox what it is: executor (with its preload list), cloudpickle, and how a
    runtime starts it, as what JSON can say.

    The probe and pip are left out: they are in no process that is saved.
    """
    digest = hashlib.sha256(json.dumps(specification, sort_keys=True).encode())
    for file in sorted(bundle.rglob("*.py")):
        place = file.relative_to(bundle)
        if place.parts[0] not in {"readie_probe.py", "pip"}:
            digest.update(f"\n{place}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def cpu_features() -> str:
    """SHA-256 of the processor's sorted feature flags."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), ":")
    return hashlib.sha256(" ".join(sorted(flags.partition(":")[2].split())).encode()).hexdigest()


def check_resources(spec: CheckpointSpec, path: Path) -> None:
    """Raises `SaveFailed` unless the root filesystem declares what the checkpoint holds as it did at the capture."""
    try:
        declared = hash_resources(read_resources(path), spec.canonical)
    except ReadieError as error:
        raise SaveFailed("resources", error.detail) from error
    if declared != spec.resources:
        raise SaveFailed(
            "resources", f"{path} declares its datasets, models or tokenizers otherwise than at the capture"
        )
