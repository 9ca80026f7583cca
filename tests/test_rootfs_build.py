"""`readie-pipeline rootfs`: real root filesystems, on the host and where nothing of the host is there."""

import base64
import csv
import hashlib
import importlib.util
import json
import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline import rootfs_build
from pipeline.cli import main
from pipeline.rootfs_build import Built, build_rootfs, check_rootfs, find_loader, made_aside
from readie.errors import BadSetting, Unavailable

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its root")
SYSTEM = Path("/usr/bin/python3")
RESOURCES = '["dataset:sums"]\nloader = "lower:load"\n'


def make_wheel(folder: Path, name: str, files: dict[str, bytes], needs: str = "", program: str = "") -> Path:
    """What an installer takes: `files`, and metadata."""
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" + (f"Requires-Dist: {needs}\n" if needs else "")
    content = {
        **files,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{program}\n".encode(),
    }
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"]).encode()
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, data in content.items():
            archive.writestr(zipfile.ZipInfo(inside, (2026, 1, 1, 0, 0, 0)), data)
    return path


def lacking_library() -> bytes:
    """A real extension module, which needs a library that no host has."""
    spec = importlib.util.find_spec("_bz2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_bytes().replace(b"libbz2.so.1.0\0", b"libzz2.so.1.0\0")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(
        folder,
        "upper",
        {"upper/__init__.py": b"import lower\n", "upper/wrong.py": b"print 'Python 2'\n"},
        needs="lower",
    )
    lower = b"def main():\n    print('said by', __file__)\n\n\ndef fail():\n    raise ValueError('here')\n"
    make_wheel(folder, "lower", {"lower.py": lower, "_lacking.abi3.so": lacking_library()}, program="say=lower:main")
    return folder


@pytest.fixture(scope="module")
def requirements(wheels: Path) -> Path:
    path = wheels / "requirements.txt"
    path.write_text(f"--no-index\n--find-links {wheels}\nupper==1.0\n")
    return path


@pytest.fixture(scope="module")
def resources(wheels: Path) -> Path:
    path = wheels / "declared.toml"
    path.write_text(RESOURCES)
    return path


@pytest.fixture(scope="module")
def built(requirements: Path, resources: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Built]:
    """A root filesystem with a package and what that needs, and what was said of it."""
    rootfs = tmp_path_factory.mktemp("built") / "rootfs"
    return rootfs, build_rootfs(rootfs, [requirements], resources=resources)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root filesystem of the system's Python, where that is new enough, with nothing installed."""
    rootfs = tmp_path_factory.mktemp("other") / "below" / "rootfs"
    code = "import sys; sys.exit(sys.version_info < (3, 11))"
    new_enough = SYSTEM.exists() and not subprocess.run([SYSTEM, "-c", code], check=False).returncode
    build_rootfs(rootfs, [], python=str(SYSTEM) if new_enough else sys.executable)
    return rootfs


@pytest.fixture(scope="module")
def rootfs(built: tuple[Path, Built]) -> Path:
    return built[0]


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Done]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `readie-pipeline rootfs` in this process."""

    def run_main(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["readie-pipeline", "rootfs", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Done(int(ended.value.code or 0), printed.out, printed.err)

    return run_main


def run(*command: object) -> str:
    """What a command prints, in an environment of its own."""
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    return subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=True).stdout


def run_python(rootfs: Path, code: str) -> str:
    """What its Python prints on the host."""
    return run(rootfs / "bin" / "python", "-I", "-B", "-c", code)


def run_inside(rootfs: Path, *command: object) -> str:
    """What a command prints where `rootfs` is all that there is, for a user who owns nothing."""
    return run("chroot", "--userspec=65534:65534", rootfs, *command)


def python_inside(rootfs: Path, code: str) -> str:
    return run_inside(rootfs, "/usr/bin/python3", "-I", "-B", "-c", code)


class TestTree:
    """What was built, seen from the host."""

    def test_its_python_runs_on_the_host_with_its_own_packages(self, rootfs: Path) -> None:
        """`bin/python` finds the tree's `usr` as its prefix, and nothing of where it was copied from."""
        said = run_python(rootfs, "import sys, upper; print(sys.prefix, upper.__file__, *sys.path, sep='\\n')")
        prefix, module, *path = said.splitlines()

        assert (Path(prefix), prefix == module[: len(prefix)]) == (rootfs / "usr", True)
        assert [folder for folder in path if not folder.startswith(str(rootfs))] == []

    def test_requirements_bring_what_they_need_and_no_installer(self, built: tuple[Path, Built]) -> None:
        """Dependencies are resolved; pip itself stays where it is."""
        rootfs, made = built
        code = "import importlib.metadata as m; print(*sorted(d.name for d in m.distributions()))"

        assert run_python(rootfs, code).split() == ["lower", "upper"]
        assert made.record.distributions == 2

    def test_it_has_no_tests_and_is_no_virtual_environment(self, rootfs: Path) -> None:
        """Of the standard library there is what programs import."""
        names = {path.name for path in rootfs.rglob("*")}

        assert names & {"test", "tests", "idlelib", "turtledemo", "EXTERNALLY-MANAGED", "pyvenv.cfg"} == set()

    def test_links_are_relative_and_lead_somewhere(self, rootfs: Path) -> None:
        """So they are good on the host and in a sandbox."""
        links = {path: path.readlink() for path in rootfs.rglob("*") if path.is_symlink()}

        assert [path for path, target in links.items() if target.is_absolute() or not path.exists()] == []
        assert {name: str(links[rootfs / name]) for name in ("lib", "lib64", "sbin", "usr/bin/python")} == {
            "lib": "usr/lib",
            "lib64": "usr/lib64",
            "sbin": "usr/sbin",
            "usr/bin/python": "python3",
        }

    def test_everything_is_compiled(self, rootfs: Path) -> None:
        """Each module but the one that cannot be has byte code that is never checked."""
        sources = [path for path in rootfs.rglob("*.py") if path.parent.name != "bin"]
        tag = sys.implementation.cache_tag
        compiled = {path: path.parent / "__pycache__" / f"{path.stem}.{tag}.pyc" for path in sources}

        assert [path.name for path, code in compiled.items() if not code.exists()] == ["wrong.py"]
        assert {code.read_bytes()[4] for code in compiled.values() if code.exists()} == {1}

    def test_tracebacks_name_sources_where_they_are(self, rootfs: Path) -> None:
        """On the host below the root filesystem, although the byte code was written for the sandbox."""
        code = "import lower, traceback\ntry: lower.fail()\nexcept ValueError: print(traceback.format_exc())"
        said = run_python(rootfs, code)

        assert f'File "{rootfs}/usr' in said
        assert "raise ValueError('here')" in said

    def test_nothing_can_be_written_but_what_is_meant_to(self, rootfs: Path) -> None:
        """Permissions say so to everyone but root."""
        modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in rootfs.rglob("*") if not path.is_symlink()}
        open_ = {str(path.relative_to(rootfs)): mode for path, mode in modes.items() if mode & 0o222}

        assert open_ == {"tmp": 0o1777, "var/tmp": 0o1777, "var/cache": 0o1777}
        assert stat.S_IMODE(rootfs.stat().st_mode) == 0o555

    def test_there_is_a_place_for_each_mount(self, rootfs: Path) -> None:
        """Empty folders, and an empty file."""
        assert [list((rootfs / name).iterdir()) for name in rootfs_build.MOUNT_POINTS] == [[]] * 6
        assert (rootfs / "etc" / "resolv.conf").read_bytes() == b""

    def test_records_tell_the_truth_about_corrected_scripts(self, rootfs: Path) -> None:
        """A RECORD has the hash of the script as it is now, which starts the sandbox's Python."""
        (record,) = rootfs.rglob("lower-1.0.dist-info/RECORD")
        rows = {path: (digest, size) for path, digest, size in csv.reader(record.read_text().splitlines())}
        (name,) = [path for path in rows if path.endswith("bin/say")]
        script = (record.parents[1] / name).read_bytes()

        digest = base64.urlsafe_b64encode(hashlib.sha256(script).digest()).decode().rstrip("=")
        assert script.startswith(b"#!/usr/bin/python3\n")
        assert rows[name] == (f"sha256={digest}", str(len(script)))

    def test_no_file_names_the_folder_that_it_was_built_in(self, rootfs: Path) -> None:
        """That folder is gone."""
        files = [path for path in rootfs.rglob("*") if path.is_file() and not path.is_symlink()]

        assert [path for path in files if f"{rootfs}.partial-".encode() in path.read_bytes()] == []

    def test_declarations_of_resources_lie_at_the_top(self, rootfs: Path) -> None:
        """Where everyone looks for them."""
        assert (rootfs / "resources.toml").read_text() == RESOURCES

    def test_a_library_that_is_nowhere_is_a_warning(self, built: tuple[Path, Built]) -> None:
        """It names the library, and what needs it."""
        (warning,) = built[1].warnings

        assert "1 library was not found" in warning
        assert "libzz2.so.1.0 (for usr/" in warning
        assert "_lacking.abi3.so" in warning


@as_root
class TestSelfContained:
    """With the folder as `/`, so that nothing of the host is there."""

    def test_the_standard_library_is_all_there(self, rootfs: Path) -> None:
        """Every compiled module that can be imported on the host can be imported inside, by any user."""
        code = (
            "import importlib, os, sysconfig\n"
            "for file in sorted(os.listdir(os.path.join(sysconfig.get_path('platstdlib'), 'lib-dynload'))):\n"
            "    try: importlib.import_module(file.partition('.')[0])\n"
            "    except ImportError as error: print(error)\n"
        )

        assert python_inside(rootfs, code) == run_python(rootfs, code)
        assert python_inside(rootfs, "import ssl, sqlite3, ctypes, lzma, zoneinfo; print(ssl.OPENSSL_VERSION)")

    def test_packages_and_scripts_run(self, rootfs: Path) -> None:
        """A script by either of its paths."""
        expected = f"said by {python_inside(rootfs, 'import lower; print(lower.__file__)')}"

        assert run_inside(rootfs, "/bin/say") == expected
        assert run_inside(rootfs, "/bin/sh", "-c", "say") == expected

    @pytest.mark.parametrize("name", ["/usr/bin/python3", "/usr/bin/python", "/bin/python", "/bin/python3"])
    def test_python_has_the_same_prefix_by_each_of_its_names(self, rootfs: Path, name: str) -> None:
        """`/usr`, as it is on the host with the folder before it."""
        assert run_inside(rootfs, name, "-c", "import sys; print(sys.prefix, sys.exec_prefix)") == "/usr /usr\n"

    def test_there_is_a_shell(self, rootfs: Path) -> None:
        """`os.system` works."""
        assert python_inside(rootfs, "import os; print(os.system('exit 3') >> 8)") == "3\n"

    def test_sources_have_the_names_that_byte_code_has(self, rootfs: Path) -> None:
        """Nothing is to be put right when a module is imported."""
        code = "import marshal, lower; print(marshal.loads(open(lower.__cached__, 'rb').read()[16:]).co_filename)"

        assert python_inside(rootfs, code) == python_inside(rootfs, "import lower; print(lower.__file__)")

    def test_users_and_this_host_have_names(self, rootfs: Path) -> None:
        """Without any library that the C library loads by name being missing."""
        code = "import pwd, socket, pathlib; print(pwd.getpwuid(65534).pw_name, socket.gethostbyname('localhost'))"

        assert python_inside(rootfs, code) == "nobody 127.0.0.1\n"

    def test_threads_can_be_ended(self, rootfs: Path) -> None:
        """The C library finds what it ends them with, as it must for threads that are left when Python ends."""
        code = (
            "import ctypes, threading, time\n"
            "threading.Thread(target=ctypes.CDLL(None).pthread_exit, args=(None,), daemon=True).start()\n"
            "time.sleep(0.05)\n"
            "print('on')\n"
        )

        assert python_inside(rootfs, code) == "on\n"

    @pytest.mark.skipif(not Path("/usr/share/zoneinfo").is_dir(), reason="this host has no time zones")
    def test_time_zones_are_known(self, rootfs: Path) -> None:
        """As on the host that it was built on."""
        code = "import zoneinfo; print(zoneinfo.ZoneInfo('Europe/Berlin'))"

        assert python_inside(rootfs, code) == "Europe/Berlin\n"

    @pytest.mark.skipif(not Path(rootfs_build.CERTIFICATES).exists(), reason="this host has no certificates")
    def test_authorities_are_trusted_without_further_settings(self, rootfs: Path) -> None:
        """OpenSSL finds the certificates where it was built to look."""
        code = "import ssl; print(ssl.create_default_context().cert_store_stats()['x509_ca'] > 0)"

        assert python_inside(rootfs, code) == "True\n"


class TestOtherPython:
    """`--python`, without anything to install. Debian's has other folders for packages."""

    def test_it_runs_on_the_host_and_has_nothing_installed(self, other: Path) -> None:
        """The folder for packages is there, and on the path, and empty."""
        code = "import importlib.metadata as m, sys; print(sys.prefix, len(list(m.distributions())))"

        assert run_python(other, code) == f"{other}/usr 0\n"
        assert run_python(other, "import sys, sysconfig; print(sysconfig.get_path('purelib') in sys.path)") == "True\n"

    @as_root
    def test_it_needs_nothing_of_the_host(self, other: Path) -> None:
        """Its own libraries came along."""
        code = "import ssl, sqlite3, sys; print(sys.prefix)"

        assert python_inside(other, code) == "/usr\n"


class TestDigest:
    """What says that a root filesystem is the same, and as it was built."""

    def test_the_same_input_gives_the_same_digest(
        self, command: Command, built: tuple[Path, Built], requirements: Path, resources: Path, tmp_path: Path
    ) -> None:
        """Wherever it is built, also where pip's scripts have to start Python by way of a shell."""
        out = tmp_path / ("a folder whose path is too long for the first line of a script " * 3).strip()
        done = command("--out", out, "--resources", resources, "--json", requirements)
        record = json.loads((out / "etc/readie/rootfs.json").read_bytes())

        assert done.code == 0, done.err
        assert done.json["warnings"] == list(built[1].warnings)
        assert record == msgspec.to_builtins(built[1].record)
        assert {name: done.json[name] for name in record} == record

    def test_what_is_as_it_was_passes(self, rootfs: Path) -> None:
        """Also after its Python ran, and after something was kept in its cache."""
        run_python(rootfs, "import upper")
        (rootfs / "var" / "cache" / "fonts").write_text("kept")

        assert check_rootfs(rootfs)[1] == []

    @pytest.mark.parametrize("name", ["usr/**/lower.py", "usr/**/lower.*.pyc", "etc/hosts"])
    def test_a_changed_file_is_found(self, rootfs: Path, name: str) -> None:
        """Byte code too, though it is not in the digest."""
        (path,) = rootfs.glob(name)
        content, mode = path.read_bytes(), path.stat().st_mode
        try:
            path.chmod(0o644)
            path.write_bytes(content + b"\n")
            path.chmod(mode)

            assert check_rootfs(rootfs)[1] == [f"changed: {path.relative_to(rootfs)}"]
        finally:
            path.chmod(0o644)
            path.write_bytes(content)
            path.chmod(mode)

    def test_what_came_went_and_became_writable_is_found(self, rootfs: Path) -> None:
        """Each by its path."""
        etc = rootfs / "etc"
        etc.chmod(0o755)
        (etc / "hosts").rename(etc / "hosts.old")
        try:
            assert check_rootfs(rootfs)[1] == ["missing: etc/hosts", "new: etc/hosts.old", "changed: etc"]
        finally:
            (etc / "hosts.old").rename(etc / "hosts")
            etc.chmod(0o555)

        assert check_rootfs(rootfs)[1] == []


class TestCommand:
    """What is printed, and what is refused: one message, and nothing left behind."""

    def test_it_says_where_and_what(self, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Warnings apart from results."""
        record = rootfs_build.Record(1, "d1ge57", "3.11.7", 57, 1_026_400_000)
        monkeypatch.setattr("pipeline.cli.build_rootfs", lambda *_, **__: Built(record, ("not all is well",)))
        done = command("--out", tmp_path / "rootfs")

        about = f"{tmp_path}/rootfs: Python 3.11.7, 57 distributions, 1026 MB, made in 0 s"
        assert (done.code, done.out) == (0, f"{about}\ndigest d1ge57\n")
        assert done.err == "warning: not all is well\n"

    def test_check_says_ok_or_what_differs(self, command: Command, built: tuple[Path, Built]) -> None:
        """Exit code 1 for what differs."""
        rootfs, made = built
        good = command("--check", rootfs)
        (rootfs / "usr").chmod(0o755)
        bad, bad_json = command("--check", rootfs), command("--check", rootfs, "--json")
        (rootfs / "usr").chmod(0o555)

        assert (good.code, good.out) == (0, f"{rootfs}: ok, as it was built\ndigest {made.record.digest}\n")
        assert (bad.code, bad.out) == (1, f"{rootfs} is not as it was built:\nchanged: usr\n")
        assert (bad_json.code, bad_json.json["changes"]) == (1, ["changed: usr"])

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            ([], "Give one of the two"),
            (["--out", "{tmp}/new", "--check", "{tmp}"], "Give one of the two"),
            (["--check", "{tmp}", "{tmp}/wrong.txt"], "Leave the rest out"),
            (["--check", "{tmp}"], "that readie-pipeline rootfs has built"),
            (["--out", "{tmp}/there"], "there is there already. Remove it"),
            (["--out", "{tmp}/wrong.txt/new"], "--out"),
            (["--out", "{tmp}/new", "{tmp}/nowhere.txt"], "nowhere.txt: no such file"),
            (["--out", "{tmp}/new", "--resources", "{tmp}/nowhere.toml"], "nowhere.toml: no such file"),
            (["--out", "{tmp}/new", "--resources", "{tmp}/wrong.txt"], "wrong.txt: "),
            (["--out", "{tmp}/new", "--python", "{tmp}/nowhere"], "nowhere cannot run: No such file"),
            (["--out", "{tmp}/new", "--python", "true"], "does not answer as a Python does: it said nothing"),
            (["--out", "{tmp}/new", "--python", "{tmp}/old"], "is CPython 3.10.13 for linux. Give CPython 3.11"),
            (["--out", "{tmp}/new", "--python", "{tmp}/pypy"], "is PyPy 3.11.13 for linux. Give CPython 3.11"),
        ],
    )
    def test_bad_usage_is_one_message(self, command: Command, tmp_path: Path, arguments: list[str], told: str) -> None:
        """Exit code 2, and the folder is as it was."""
        (tmp_path / "there").mkdir()
        (tmp_path / "wrong.txt").write_text("= nothing =")
        fake_python(tmp_path / "old", "CPython", "3.10.13")
        fake_python(tmp_path / "pypy", "PyPy", "3.11.13")
        before = set(tmp_path.iterdir())
        done = command(*(argument.format(tmp=tmp_path) for argument in arguments))

        assert (done.code, done.out) == (2, "")
        assert told in done.err
        assert done.err.count("readie-pipeline: ") == 1
        assert set(tmp_path.iterdir()) == before

    def test_what_pip_cannot_install_leaves_nothing(self, command: Command, wheels: Path, tmp_path: Path) -> None:
        """A hash that is wrong, here; the message has pip's own last lines."""
        lock = tmp_path / "requirements.lock"
        lock.write_text(f"--no-index\n--find-links {wheels}\nlower==1.0 --hash=sha256:{'0' * 64}\n")
        done = command("--out", tmp_path / "rootfs", lock)

        assert (done.code, done.out) == (1, "")
        assert f"pip could not install {lock}, and nothing was built" in done.err
        assert "0" * 64 in done.err
        assert list(tmp_path.iterdir()) == [lock]

    def test_without_pip_nothing_is_begun(
        self, monkeypatch: pytest.MonkeyPatch, requirements: Path, tmp_path: Path
    ) -> None:
        """The message names the Python that lacks it."""
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

        with pytest.raises(Unavailable, match=f"{sys.executable} has no pip"):
            build_rootfs(tmp_path / "rootfs", [requirements])
        assert list(tmp_path.iterdir()) == []

    def test_a_stopped_build_leaves_nothing(self, tmp_path: Path) -> None:
        """Also of what was made read-only before."""

        def stop() -> None:
            with made_aside(tmp_path / "rootfs") as root:
                (root / "usr").mkdir()
                (root / "usr" / "file").touch()
                (root / "usr").chmod(0o555)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            stop()
        assert list(tmp_path.iterdir()) == []

    def test_an_interpreter_that_names_no_loader_is_refused(self, tmp_path: Path) -> None:
        """As a script is none."""
        fake_python(tmp_path / "python", "CPython", "3.11.7")

        with pytest.raises(BadSetting, match="names no dynamic loader"):
            find_loader(str(tmp_path / "python"))


def fake_python(path: Path, implementation: str, version: str) -> None:
    """A script that answers as a Python does."""
    said = {"implementation": implementation, "version": version, "platform": "linux", "sites": []}
    said |= dict.fromkeys(["executable", "prefix", "stdlib", "platstdlib", "scripts", "certificates"], "/nowhere")
    path.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    path.chmod(0o755)
