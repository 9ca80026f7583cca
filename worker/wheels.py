"""Wheels for the packages that a call brings: fetched on the host, from where the operator allows.

pip resolves with the root filesystem's own Python, so that what is installed there counts; then it downloads just what
is missing. The executor installs the files without a network. Only wheels: a source distribution would run its own
code here, on the host.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from packaging.requirements import Requirement

from readie.errors import InstallFailed

FETCH_S = 300.0  # what resolving, and what downloading may take


@dataclass(frozen=True)
class Sources:
    """Where wheels may come from: an index's address, a folder of wheels, or both."""

    index: str | None = None
    wheels: Path | None = None

    def options(self) -> list[str]:
        """What tells pip so; whatever the host's own configuration of pip says does not count."""
        index = ["--index-url", self.index] if self.index else ["--no-index"]
        links = ["--find-links", str(self.wheels)] if self.wheels else []
        return ["--isolated", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", *index, *links]


def fetch_wheels(python: Path, requirements: Sequence[str], folder: Path, sources: Sources) -> list[str]:
    """Downloads what `requirements` need and the root filesystem lacks to `folder`; what is to be installed, by name.

    Raises `InstallFailed` with pip's output, or where the operator allows no such source.
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
        run_pip(python, ["install", "--dry-run", "--report", str(report), *sources.options(), *requirements])
        found = msgspec.json.decode(report.read_bytes(), type=dict[str, Any])["install"]
    if not found:
        return []
    exact = [f"{one['metadata']['name']}=={one['metadata']['version']}" for one in found]
    folder.mkdir()
    run_pip(python, ["download", "--no-deps", "--dest", str(folder), *sources.options(), *exact])
    return exact


def run_pip(python: Path, arguments: Sequence[str]) -> None:
    """Runs the worker's pip for another Python. Raises `InstallFailed` with its output."""
    command = [sys.executable, "-m", "pip", "--python", str(python), *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=FETCH_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InstallFailed(f"pip {arguments[0]} took longer than {FETCH_S:g} s") from None
    if done.returncode:
        raise InstallFailed(done.stdout.decode(errors="replace")[-16_000:].strip(), "pip's output above says why.")
