"""Root filesystems with tiny packages, installed as an installer does it, and the sandboxes that the pipeline runs."""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import dedent

from pipeline.corpus import ImportSet
from pipeline.processes import Sandbox


def make_rootfs(path: Path, packages: Mapping[str, Mapping[str, str]]) -> Path:
    """A virtual environment with a distribution for each entry: name → {file: content}. Made in milliseconds."""
    interpreter = Path(os.path.realpath(sys.executable))
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to(interpreter)
    (path / "pyvenv.cfg").write_text(f"home = {interpreter.parent}\ninclude-system-site-packages = false\n")
    site_of(path).mkdir(parents=True)
    for name, files in packages.items():
        install(path, name, files)
    return path


def site_of(rootfs: Path) -> Path:
    return rootfs / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def install(rootfs: Path, name: str, files: Mapping[str, str], version: str = "1.0") -> None:
    """Puts a distribution there: its files, METADATA and RECORD."""
    site = site_of(rootfs)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    for file, content in files.items():
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(content))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    recorded = [*files, f"{info.name}/METADATA", f"{info.name}/RECORD"]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in recorded))


def package(name: str, source: str) -> dict[str, dict[str, str]]:
    """A distribution that is one package of the same name."""
    return {name: {f"{name}/__init__.py": source}}


def sandbox_of(rootfs: Path, timeout_s: float = 30.0) -> Sandbox:
    return Sandbox(rootfs, "fork", timeout_s, "2Gi")


def asks(*modules: str, count: int = 1) -> ImportSet:
    return ImportSet(modules=tuple(sorted(modules)), count=count)


def asks_each(modules: Iterable[str]) -> list[ImportSet]:
    return [asks(module) for module in modules]
