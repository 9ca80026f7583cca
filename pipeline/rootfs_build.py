"""Builds a root filesystem that needs nothing of its host: a Python, what it is asked to have installed, and all the
libraries that these load. It can be the `/` of a sandbox, and its `bin/python` runs on the host as well.

    bin/                       links to all programs
    usr/bin/                   python3.X, python3, python, sh; usr/bin or usr/local/bin: the scripts of packages
    usr/lib/python3.X/         the standard library; with site-packages, or where else this Python installs
    usr/lib/<platform>/        shared libraries, where the loader looks by default
    lib, lib64, sbin           links into usr
    etc/, usr/share/zoneinfo/  users, names of hosts, certificates, time zones
    etc/readie/                rootfs.json (`Record`), and files.json: what `check_rootfs` compares with
    tmp, var/tmp, var/cache    what stays writable
    proc, dev, sys, run, call, readie, etc/resolv.conf    where sandboxes mount something

`bin` is a folder of links rather than a link to `usr/bin`, for Python finds its standard library by following the link
that it was started by, not by resolving the folders above: as `/bin/python` it would else look into `/bin` and `/`.
"""

import base64
import hashlib
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipeline.progress import stage
from readie.errors import BadFile, BadSetting, Unavailable
from readie.files import read_json, write_json
from readie.resources import FILE as RESOURCES
from readie.resources import read_resources

FORMAT = 1
OWN = "etc/readie"
RECORD, FILES = f"{OWN}/rootfs.json", f"{OWN}/files.json"
ASK_TIMEOUT = 60.0  # seconds in which a Python must have said what it is

#: Names in the standard library's folder that are not for programs: tests, what other places hold, the static library.
NOT_COPIED = ["test", "tests", "idlelib", "turtledemo", "__pycache__", "config-*"]
NOT_COPIED += ["site-packages", "dist-packages", "EXTERNALLY-MANAGED"]

#: What the C library loads at run time by name, so that no list of needed libraries has it: libgcc_s when a thread is
#: ended, the others to look up names of users and hosts (part of libc itself since glibc 2.34).
LOADED_BY_NAME = ("libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2")

MOUNT_POINTS = ("proc", "dev", "sys", "run", "call", "readie")
WRITABLE = {"tmp": 0o1777, "var/tmp": 0o1777, "var/cache": 0o1777}
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
ZONES = "/usr/share/zoneinfo"
ETC = {
    "passwd": "root:x:0:0:root:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n",
    "group": "root:x:0:\nnobody:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "resolv.conf": "",  # a sandbox with a network mounts the host's over it
}

_LISTED = re.compile(r"\s+(?:(?P<name>\S.*) => )?(?P<path>not found|/.*?)(?: \(0x[0-9a-f]+\))?")
_SHOWN = 3  # names in a warning


class Interpreter(msgspec.Struct, frozen=True):
    """What rootfs_python.py says. Paths are the host's; of a virtual environment, those of the Python below it."""

    implementation: str
    version: str
    platform: str
    executable: str
    prefix: str
    stdlib: str
    platstdlib: str
    sites: list[str]  # where pip installs
    scripts: str
    certificates: str

    @property
    def minor(self) -> tuple[int, int]:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


class Record(msgspec.Struct, frozen=True):
    """`etc/readie/rootfs.json`. The digest is over all entries but byte code, which other builds may write otherwise."""

    format: int
    digest: str  # SHA-256, see `hash_entries`
    python: str  # 3.11.7
    distributions: int
    bytes: int  # of all files


@dataclass(frozen=True)
class Built:
    record: Record
    warnings: tuple[str, ...]


def build_rootfs(
    out: Path, requirements: Sequence[Path], *, python: str | None = None, resources: Path | None = None
) -> Built:
    """Makes the folder `out`, whole or not at all, from requirement files and a copy of an interpreter.

    `python` is its path, or a name on PATH; default: the one that runs this. Raises `BadFile`, `BadSetting`, and
    `Unavailable` where pip cannot install.
    """
    for path in requirements:
        if not path.is_file():
            raise BadFile(f"{path}: no such file", "Give requirement files, as pip reads them.")
    if resources is not None:
        if not resources.is_file():
            raise BadFile(f"{resources}: no such file", "Give a file with declarations, or leave --resources out.")
        read_resources(resources)
    if requirements and importlib.util.find_spec("pip") is None:
        raise Unavailable(f"{sys.executable} has no pip to install with", "Install pip beside readie.")
    source = find_python(python)
    with made_aside(out) as root:
        with stage(f"Copying Python {source.version}"):
            copy_python(root, source)
            write_system_files(root, source.certificates)
            own = find_objects([root / "usr"])
            lost = copy_libraries(root, source, {path: original_of(path, root, source) for path in own})
        inside = ask(str(root / "usr/bin/python3"))
        for site in inside.sites:
            Path(site).mkdir(parents=True, exist_ok=True)
        if requirements:
            with stage(f"Installing {', '.join(map(str, requirements))}"):
                install(root, requirements)
                correct_scripts(root, Path(inside.scripts), inside.sites)
                installed = find_objects([*inside.sites, inside.scripts])
                lost |= copy_libraries(root, source, {path: path for path in installed})
        link_programs(root, root / "usr/bin")
        link_programs(root, Path(inside.scripts))
        if resources is not None:
            shutil.copyfile(resources, root / RESOURCES)
        with stage("Compiling byte code"):
            compile_modules(root, {inside.stdlib, inside.platstdlib, *inside.sites})
        with stage("Hashing all files"):
            record = finish(root, source.version, inside.sites)
        warnings = describe_lost(root, lost)
    return Built(record, tuple(warnings))


@contextmanager
def made_aside(out: Path) -> Iterator[Path]:
    """A folder beside `out` to build in: at the end it becomes `out`; after a failure it is removed. Raises `BadFile`."""
    out = out.absolute()
    if os.path.lexists(out):
        raise BadFile(f"{out} is there already", "Remove it, or give another folder with --out.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        root = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent.resolve()))
    except OSError as error:
        raise BadFile(f"{out}: {error.strerror}", "Give another folder with --out.") from error
    try:
        yield root
        root.rename(out)
    except BaseException:
        remove_rootfs(root)
        raise


def remove_rootfs(root: Path) -> None:
    """Removes the folder, also by a user for whom it is read-only."""
    for folder, _, _ in os.walk(root):
        Path(folder).chmod(0o700)
    shutil.rmtree(root)


# ---- Python ----


def find_python(python: str | None) -> Interpreter:
    """The interpreter to copy. Raises `BadSetting`."""
    named = python or sys.executable
    found = ask(named)
    if (found.implementation, found.platform) != ("CPython", "linux") or found.minor < (3, 11):
        is_what = f"{found.implementation} {found.version} for {found.platform}"
        raise BadSetting(f"--python {named} is {is_what}", "Give CPython 3.11 or later for Linux.")
    return found


def ask(python: str) -> Interpreter:
    """What a Python says of itself. Raises `BadSetting` where it says nothing of use."""
    command = [python, "-I", "-B", str(Path(__file__).with_name("rootfs_python.py"))]
    way_out = "Give CPython 3.11 or later with --python."
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_TIMEOUT, check=False)
        return msgspec.json.decode((done.stdout.splitlines() or [b""])[-1], type=Interpreter)
    except OSError as error:
        raise BadSetting(f"{python} cannot run: {error.strerror}", way_out) from error
    except subprocess.TimeoutExpired as error:
        raise BadSetting(f"{python} did not say what it is within {ASK_TIMEOUT:g} s", way_out) from error
    except msgspec.MsgspecError as error:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise BadSetting(f"{python} does not answer as a Python does: {said[0].rstrip('.')}", way_out) from error


def copy_python(root: Path, source: Interpreter) -> None:
    """Interpreter and standard library, which lies as far below `usr` as it lay below the interpreter's prefix."""
    name = "python{}.{}".format(*source.minor)
    for folder in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "bin"):
        (root / folder).mkdir(parents=True)
    for folder in ("sbin", "lib", "lib64"):
        (root / folder).symlink_to(f"usr/{folder}")
    shutil.copy(source.executable, root / "usr/bin" / name)
    (root / "usr/bin/python3").symlink_to(name)
    (root / "usr/bin/python").symlink_to("python3")
    for folder in {source.stdlib, source.platstdlib}:
        # Links become what they lead to: some lead out, as Debian's sitecustomize.py into /etc, or nowhere.
        shutil.copytree(
            folder,
            root / "usr" / os.path.relpath(folder, source.prefix),
            ignore=shutil.ignore_patterns(*NOT_COPIED),
            ignore_dangling_symlinks=True,
            dirs_exist_ok=True,
        )


def original_of(path: Path, root: Path, source: Interpreter) -> Path:
    """The file that this one of the tree was copied from, as far as it belongs to the interpreter."""
    original = Path(source.prefix) / path.relative_to(root / "usr")
    return original if original.is_file() else path


def write_system_files(root: Path, certificates: str) -> None:
    """What programs expect of a system besides Python. `certificates`: where the OpenSSL of this Python looks."""
    shutil.copy(os.path.realpath("/bin/sh"), root / "usr/bin/sh")
    for name in (*MOUNT_POINTS, *WRITABLE, "etc"):
        (root / name).mkdir(parents=True)
    for name, text in ETC.items():
        (root / "etc" / name).write_text(text)
    if Path(ZONES).is_dir():
        shutil.copytree(ZONES, within(root, ZONES), ignore_dangling_symlinks=True)
    found = [path for path in (CERTIFICATES, certificates) if path and Path(path).is_file()]
    if found:
        within(root, CERTIFICATES).parent.mkdir(parents=True)
        shutil.copyfile(found[0], within(root, CERTIFICATES))
        if certificates:
            link(within(root, certificates), within(root, CERTIFICATES))


def within(root: Path, path: str | Path) -> Path:
    """The place of an absolute path in the tree."""
    return root / Path(path).relative_to("/")


def link(path: Path, target: Path) -> None:
    """Makes `path` a link to `target` that is good wherever their tree lies, unless something is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(path):
        path.symlink_to(os.path.relpath(target.parent.resolve() / target.name, path.parent.resolve()))


def install(root: Path, requirements: Sequence[Path]) -> None:
    """Lets the pip that is installed beside the pipeline install into the tree. Raises `Unavailable`."""
    command = [sys.executable, "-P", "-m", "pip", "--python", str(root / "usr/bin/python3"), "install"]
    command += ["--no-compile", "--no-user", "--no-input", "--progress-bar", "off", "--disable-pip-version-check"]
    command += ["--no-warn-script-location", *(f"--requirement={path}" for path in requirements)]
    done = subprocess.run(
        command,
        env=environment() | {"PIP_REQUIRE_VIRTUALENV": "0"},  # the tree is no other's, as if it were one
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
        what = f"pip could not install {', '.join(map(str, requirements))}, and nothing was built"
        way_out = "Correct the requirements, or pip's settings, by what it said:\n" + "\n".join(lines[-5:])
        raise Unavailable(what, way_out)


def environment() -> dict[str, str]:
    """The environment, with pip's settings, for a Python that uses and finds nothing but what is its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    # Without the user's own packages, for pip takes what is there for installed. The seed orders sets in byte code.
    return kept | {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}


def correct_scripts(root: Path, scripts: Path, sites: Iterable[str]) -> None:
    """Has the scripts that pip made start the Python of the sandbox, not the one of the folder that this was built in.

    On the host they start the host's Python: there, `bin/python -m …` is the way.
    """
    python = re.escape(os.fsencode(root / "usr/bin/python3"))
    # Where the path is too long for the kernel, or has spaces, the shell starts it, in words that Python skips.
    start = re.compile(rb"#!(?:/bin/sh\n'''exec' )?\"?" + python + rb"\"?(?: \"\$0\" \"\$@\"\n' ''')?(?=\s)")
    replaced = {}
    for path in scripts.iterdir() if scripts.is_dir() else ():
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        if start.match(content):
            corrected = start.sub(b"#!/usr/bin/python3", content, count=1)
            path.write_bytes(corrected)
            replaced[recorded(content)] = recorded(corrected)
    for path in (path for site in sites for path in Path(site).glob("*.dist-info/RECORD")):
        rows = path.read_bytes()
        for before, after in replaced.items():
            rows = rows.replace(before, after)
        path.write_bytes(rows)


def recorded(content: bytes) -> bytes:
    """How the row of a RECORD ends for a file with this content."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return b",sha256=%b,%d" % (digest, len(content))


def link_programs(root: Path, folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        link(root / "bin" / path.name, path)


def compile_modules(root: Path, folders: Iterable[str]) -> None:
    """Compiles all modules with unchecked hashes, so that no import looks at sources or compiles anything.

    Raises `Unavailable` where the compiler itself could not go on.

    The byte code names the sources as they are called in the sandbox. Where it is imported under another path, as on
    the host, Python puts that one into it while it loads, so that tracebacks are right there too.
    """
    command = [str(root / "usr/bin/python3"), "-P", "-m", "compileall", "-qq", "-f", "-j", "0"]
    command += ["--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/", *sorted(folders)]
    done = subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False)
    # 1: a file cannot be compiled. There always are some: templates, and code for other versions.
    if done.returncode not in {0, 1}:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise Unavailable(f"compiling byte code ended with {done.returncode}: {said[0]}", "")


# ---- shared libraries ----


def copy_libraries(root: Path, source: Interpreter, objects: Mapping[Path, Path]) -> dict[str, list[Path]]:
    """Copies what `objects` need and the tree lacks to where the loader looks by default.

    They are programs and libraries of the tree, each with the file to ask the loader about: what it finds can depend on
    where that lies. Returns library → objects that need it, for all that were not found. Raises `BadSetting`.
    """
    loader, default = find_loader(source.executable)
    by_name = [path for name in LOADED_BY_NAME if (path := default / name).exists()]
    asked = {**objects, **{path: path for path in by_name}}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for a process
        answers = list(pool.map(list_needed, asked.values()))
    # What packages bring, and load themselves before others need it, the loader does not find.
    here = {path.name for path in objects}
    found = {path.name: path for path in by_name}
    lost: dict[str, list[Path]] = {}
    for path, needed in zip(asked, answers, strict=True):
        for name, place in needed.items():
            if place is not None:
                found.setdefault(Path(name).name, place)
            elif name not in here:
                lost.setdefault(name, []).append(path)
    copies = {within(root, default / name): place for name, place in found.items() if name != loader.name}
    for target, place in {**copies, within(root, loader): loader}.items():
        if place.resolve().is_relative_to(root):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(place, target)
        if place.is_relative_to(source.prefix):  # where an interpreter looks by a path relative to its own
            link(root / "usr" / place.relative_to(source.prefix), target)
    return lost


def find_loader(executable: str) -> tuple[Path, Path]:
    """The dynamic loader that a program names, and a folder where it looks by default: that of the C library.

    Raises `BadSetting` where the program names none, or lacks something.
    """
    needed = list_needed(Path(executable))
    lacking = [name for name, place in needed.items() if place is None]
    loader = next((place for name, place in needed.items() if name == str(place)), None)
    if lacking or loader is None:
        reason = f"needs {', '.join(lacking)}, which the loader does not find" if lacking else "names no dynamic loader"
        raise BadSetting(f"{executable} {reason}", "Give another interpreter with --python.")
    libc = next((place for name, place in needed.items() if place and name.startswith("libc.")), loader)
    return loader, libc.parent


def list_needed(path: Path) -> dict[str, Path | None]:
    """Library → where the loader finds it, None: nowhere. Empty for what is not dynamic, or for another platform.

    Raises `Unavailable`.
    """
    try:
        done = subprocess.run(["ldd", path], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        raise Unavailable(f"ldd cannot run: {error.strerror}", "Install it: it comes with the C library.") from error
    lines = os.fsdecode(done.stdout).splitlines()
    listed = [match.groups() for match in map(_LISTED.fullmatch, lines) if match]
    return {name or place: None if place == "not found" else Path(os.path.normpath(place)) for name, place in listed}


def find_objects(folders: Iterable[str | Path]) -> list[Path]:
    """The programs and libraries below the folders that are in the format which the loader reads."""
    files = (Path(folder, name) for top in folders for folder, _, names in os.walk(top) for name in names)
    return sorted({path for path in files if is_object(path)})


def is_object(path: Path) -> bool:
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode) or not (".so" in path.name or mode & 0o111):
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def describe_lost(root: Path, lost: Mapping[str, Sequence[Path]]) -> list[str]:
    """A warning, if libraries were not found: many packages bring parts for which only some hosts have what they need."""
    if not lost:
        return []
    some = [f"{name} (for {objects[0].relative_to(root)})" for name, objects in sorted(lost.items())]
    more = f" and {len(some) - _SHOWN} more" if len(some) > _SHOWN else ""
    count = "1 library was" if len(some) == 1 else f"{len(some)} libraries were"
    return [f"{count} not found, and what needs them will not load: {', '.join(some[:_SHOWN])}{more}"]


# ---- what it is, and whether it still is ----


def finish(root: Path, python: str, sites: Iterable[str]) -> Record:
    """Takes the permission to write away, but for `WRITABLE`, and writes down what is there."""
    (root / OWN).mkdir(parents=True)
    for folder, _, names in os.walk(root):
        for path in (Path(folder), *(Path(folder, name) for name in names)):
            if not path.is_symlink():
                path.chmod(0o555 if path.stat().st_mode & 0o111 else 0o444)
    for name, mode in WRITABLE.items():
        (root / name).chmod(mode)
    entries = list_entries(root)
    record = Record(
        format=FORMAT,
        digest=hash_entries(entries),
        python=python,
        distributions=sum(1 for site in sites for _ in Path(site).glob("*.dist-info")),
        bytes=sum(int(entry.split()[2]) for entry in entries.values() if entry.startswith("file ")),
    )
    (root / OWN).chmod(0o755)
    write_json(root / RECORD, record)
    (root / FILES).write_text(write_entries(entries))
    for name, mode in ((RECORD, 0o444), (FILES, 0o444), (OWN, 0o555)):
        (root / name).chmod(mode)
    return record


def list_entries(root: Path) -> dict[str, str]:
    """Path → type, permissions, size and SHA-256, or a link's target; without what is in `WRITABLE` and `OWN`."""
    entries = {}
    for folder, names, files in os.walk(root):
        for path in (Path(folder, name) for name in (*names, *files)):
            entries[str(path.relative_to(root))] = describe_entry(path)
        names[:] = [name for name in names if str(Path(folder, name).relative_to(root)) not in (*WRITABLE, OWN)]
    return entries


def describe_entry(path: Path) -> str:
    status = path.lstat()
    permissions = f"{stat.S_IMODE(status.st_mode):04o}"
    if stat.S_ISLNK(status.st_mode):
        return f"link {path.readlink()}"
    if stat.S_ISDIR(status.st_mode):
        return f"folder {permissions}"
    if not stat.S_ISREG(status.st_mode):
        return f"other {permissions}"
    with path.open("rb") as file:
        return f"file {permissions} {status.st_size} {hashlib.file_digest(file, 'sha256').hexdigest()}"


def write_entries(entries: Mapping[str, str]) -> str:
    """The same text for the same entries, one a line."""
    return json.dumps(entries, sort_keys=True, indent=0) + "\n"


def hash_entries(entries: Mapping[str, str]) -> str:
    """SHA-256 of their text, without byte code: it follows from the sources, but not always byte for byte."""
    kept = {path: entry for path, entry in entries.items() if not path.endswith((".pyc", "__pycache__"))}
    return hashlib.sha256(write_entries(kept).encode()).hexdigest()


def check_rootfs(root: Path) -> tuple[Record, list[str]]:
    """What was written down when it was built, and what is not so any more. Raises `BadFile`."""
    way_out = "Give a folder that readie-pipeline rootfs has built."
    record = read_json(root / RECORD, Record, way_out)
    if record.format != FORMAT:
        raise BadFile(f"{root / RECORD}: format {record.format} is not known", f"This version reads format {FORMAT}.")
    try:
        before: dict[str, str] = json.loads((root / FILES).read_bytes())
    except (OSError, ValueError) as error:
        raise BadFile(f"{root / FILES}: {error}", way_out) from error
    now = list_entries(root)
    changes = [f"missing: {path}" for path in sorted(before.keys() - now.keys())]
    changes += [f"new: {path}" for path in sorted(now.keys() - before.keys())]
    changes += [f"changed: {path}" for path in sorted(now.keys() & before.keys()) if now[path] != before[path]]
    if not changes and hash_entries(now) != record.digest:
        changes = [f"changed: {RECORD} or {FILES}, which do not belong together"]
    return record, changes
