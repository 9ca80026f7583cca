"""Wheels for the packages that a call brings: fetched on the host, from where the operator allows.

pip resolves with the root filesystem's own Python, so that what is installed there counts; then it downloads just what
is missing. The executor installs the files without a network. Only wheels: a source distribution would run its own
code here, on the host. An index whose wheels themselves depend on addresses is trusted with that: pip follows them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from packaging.requirements import Requirement

from readie.errors import InstallFailed

LOOK_S = 0.1  # how often a fetch looks whether it is still wanted


@dataclass(frozen=True)
class Sources:
    """Where wheels may come from: an index's address, a folder of wheels, or both."""

    index: str | None = None
    wheels: Path | None = None

    def options(self) -> list[str]:
        """What tells pip so."""
        index = ["--index-url", self.index] if self.index else ["--no-index"]
        links = ["--find-links", str(self.wheels)] if self.wheels else []
        return ["--only-binary", ":all:", "--no-input", "--disable-pip-version-check", *index, *links]


def fetch_wheels(
    python: Path, requirements: Sequence[str], folder: Path, sources: Sources, give_up: Callable[[], object]
) -> list[str]:
    """Downloads what `requirements` need and the root filesystem lacks to `folder`; what is to be installed, by name.

    `give_up` is asked again and again, and ends it by raising. Raises `InstallFailed` with pip's output, or where the
    operator allows no such source.
    """
    if not sources.index and not sources.wheels:
        raise InstallFailed(f"{', '.join(requirements)}: this worker has no index and no wheel folder to install from")
    for text in requirements:
        if Requirement(text).url:
            raise InstallFailed(
                f"{text}: this worker installs from its own index or wheel folder, never from an address",
                "Leave the address out, or have the operator add the wheel to PACKAGES_WHEELS.",
            )
    with tempfile.TemporaryDirectory(prefix="readie-wheels-") as scratch:
        report = Path(scratch) / "report.json"
        # It honours what is installed; that alone is worth the second command.
        run_pip(python, ["install", "--dry-run", "--report", str(report), *sources.options(), *requirements], give_up)
        found = msgspec.json.decode(report.read_bytes(), type=dict[str, Any])["install"]
    if not found:
        return []
    exact = [f"{one['metadata']['name']}=={one['metadata']['version']}" for one in found]
    folder.mkdir()
    run_pip(python, ["download", "--no-deps", "--dest", str(folder), *sources.options(), *exact], give_up)
    return exact


def run_pip(python: Path, arguments: Sequence[str], give_up: Callable[[], object]) -> None:
    """Runs the worker's pip for another Python. Raises `InstallFailed` with its output, or what `give_up` raises."""
    # The operator's policy alone counts, not what the host has configured for pip; and pip needs none of our tokens.
    # What the host's user has installed, or has on a path of its own, is not in the root filesystem.
    dropped = ("PIP_", "PYTHON", "WORKER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PYTHONNOUSERSITE": "1"}
    with tempfile.TemporaryDirectory(prefix="readie-pip-") as scratch, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pip", "--python", str(python), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment | {"TMPDIR": scratch},  # pip that is killed removes nothing
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                give_up()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the pip of the other Python, which it has started
                process.wait()
                reap_rest(process.pid)
        output.seek(0)
        said = output.read().decode(errors="replace")
    if process.returncode:
        raise InstallFailed(said[-16_000:].strip(), "pip's output above says why.")


def reap_rest(group: int) -> None:
    """Reaps what was killed of a process group: where this process is a subreaper, the rest came to it with the end of
    the first.
    """
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-group, 0)
