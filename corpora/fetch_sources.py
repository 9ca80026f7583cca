"""Fetches the source distributions that sources.txt names, unpacked, with pip as it is configured here.

    python corpora/fetch_sources.py --to sources

Nothing of them is built or run: pip would ask a build backend for metadata before it keeps a source distribution, so
it runs in an environment without one, and what it has unpacked by then is kept. Started again, it goes on where it was.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path


def fetch_sources(listed: Path, folder: Path) -> list[str]:
    """Fetches what is not there yet; returns what pip did not find."""
    lines = [line.strip() for line in listed.read_text().splitlines()]
    wanted = [line for line in lines if line and not line.startswith("#")]
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as inside:
        pip = Path(inside, "pip", "bin", "pip")
        venv.create(Path(inside, "pip"), with_pip=True)
        subprocess.run([pip, "uninstall", "--quiet", "--yes", "setuptools", "wheel"], check=True)
        for requirement in wanted:
            target = folder / requirement.replace("==", "-")
            if target.exists():
                continue
            unpacked = fetch(pip, requirement, Path(tempfile.mkdtemp(dir=inside)))
            if unpacked is None:
                missing.append(requirement)
                continue
            shutil.move(unpacked, target)
            print(f"{requirement}: fetched", file=sys.stderr)
    return missing


def fetch(pip: Path, requirement: str, inside: Path) -> Path | None:
    """The folder with the unpacked source distribution, or its archive; None where there is none."""
    name = requirement.partition("==")[0]
    command = [
        str(pip),
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--no-build-isolation",
        "--no-clean",
    ]
    subprocess.run(
        [*command, "--dest", str(inside / "whole"), requirement],
        env={**os.environ, "TMPDIR": str(inside)},
        capture_output=True,
        check=False,  # it fails for want of a backend, mostly
    )
    folders = [path for path in inside.glob(f"pip-download-*/{name}_*") if path.is_dir() and any(path.iterdir())]
    return next(iter([*folders, *inside.glob("whole/*")]), None)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetches source distributions, unpacked; nothing of them is run.")
    parser.add_argument("--to", type=Path, required=True, help="the folder that they are put into")
    parser.add_argument("--list", type=Path, default=Path(__file__).with_name("sources.txt"))
    arguments = parser.parse_args()
    missing = fetch_sources(arguments.list, arguments.to)
    for requirement in missing:
        print(f"{requirement}: no source distribution was found", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
