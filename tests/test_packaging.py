"""The wheel and the source distribution: what is in them, and that each works alone, from the built file."""

import csv
import io
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator, Mapping
from datetime import date
from email import message_from_bytes
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.catalogues import make_worked_example, write

ROOT = Path(__file__).parent.parent
PACKAGES = ("readie", "app", "migrations", "pipeline", "worker")
CLIENT = {"cloudpickle", "httpx", "msgspec", "packaging", "rich"}


def run(*command: object, cwd: Path = ROOT, **environ: str) -> "subprocess.CompletedProcess[str]":
    """A command with nothing of this checkout on its path."""
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(cwd)} | environ
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def build(source: Path, into: Path, *targets: str) -> list[Path]:
    done = run(sys.executable, "-m", "hatchling", "build", "-d", into, *targets, cwd=source)
    assert done.returncode == 0, done.stderr
    return sorted(into.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution and the wheel of this checkout, as `make build` makes them."""
    wheel, sdist = sorted(build(ROOT, tmp_path_factory.mktemp("dist")), key=lambda path: path.suffix, reverse=True)
    return sdist, wheel


@pytest.fixture(scope="module")
def metadata(built: tuple[Path, Path]) -> Message:
    """What the wheel says of itself."""
    with zipfile.ZipFile(built[1]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(wheel.read(name))


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


def test_the_wheel_has_every_file_of_the_packages_and_no_other(built: tuple[Path, Path]) -> None:
    """SQL, pages, `py.typed` and migrations too; alembic's settings lie beside these."""
    here = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    assert {"readie/py.typed", "app/sql/scoring.sql", "pipeline/report.html"} <= here
    assert files_of(built[1]) == here | {"migrations/alembic.ini"}


def test_the_wheel_asks_for_no_more_than_the_client_needs(metadata: Message) -> None:
    """Everything else belongs to an extra."""
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]

    assert {each.name for each in requirements if each.marker is None} == CLIENT
    assert set(metadata.get_all("Provides-Extra", [])) == {"document", "router", "pipeline", "worker", "all"}


@pytest.fixture(scope="module")
def source(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is in the source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(built[0]) as sdist:
        sdist.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found


def test_the_source_distribution_builds_the_same_wheel(built: tuple[Path, Path], source: Path, tmp_path: Path) -> None:
    """Without git, and with the same version."""
    (again,) = build(source, tmp_path, "-t", "wheel")

    assert again.name == built[1].name
    assert files_of(again) == files_of(built[1])


#: As docs/releasing.md says.
TAG = ["tag", "--annotate", "v1.2.0", "--message", "Readie 1.2.0"]


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_version_is_the_last_tag_s(source: Path, tmp_path: Path) -> None:
    """Of a commit with a tag it is the tag; a copy without git has one too."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (copy / "PKG-INFO").unlink()
    git = ["git", "-c", "user.name=Tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false"]
    without = run(sys.executable, "-m", "hatchling", "version", cwd=copy)
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "All"], TAG):
        done = run(*git, *command, cwd=copy)
        assert done.returncode == 0, done.stderr
    tagged = run(sys.executable, "-m", "hatchling", "version", cwd=copy)

    assert (without.returncode, without.stdout.strip()) == (0, "0.1.dev0")
    assert (tagged.returncode, tagged.stdout.strip()) == (0, "1.2.0")


# ---- installed alone ----


def closure(requirements: list[Requirement]) -> set[str]:
    """The distributions that an installer would bring for these requirements, by canonical name."""
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(each.name, frozenset(each.extras)) for each in requirements]
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found.add(canonicalize_name(name))
        for text in distribution(name).requires or []:
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                waiting.append((needed.name, frozenset(needed.extras)))
    return found


def asked_for(metadata: Message, *extras: str) -> list[Requirement]:
    """What the wheel asks for with these extras, and with those of its own that they name."""
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    names = {"", *extras}
    while True:
        wanted = [
            each
            for each in requirements
            if each.marker is None or any(each.marker.evaluate({"extra": name}) for name in names)
        ]
        more = {name for each in wanted if each.name == "readie" for name in each.extras}
        if more <= names:
            return [each for each in wanted if each.name != "readie"]
        names |= more


def test_all_is_what_the_parts_ask_for(metadata: Message) -> None:
    """No more and no less, and all of it is installed here in versions that it accepts."""

    def asked(*extras: str) -> set[tuple[str, str, frozenset[str]]]:
        return {
            (canonicalize_name(each.name), str(each.specifier), frozenset(each.extras))
            for each in asked_for(metadata, *extras)
        }

    everything = asked_for(metadata, "all")

    assert len(everything) > len(CLIENT)
    assert asked("all") == asked("router") | asked("pipeline") | asked("worker") | asked("document")
    assert [str(each) for each in everything if not each.specifier.contains(distribution(each.name).version)] == []


def make_environment(folder: Path, metadata: Message, *extras: str) -> Path:
    """The packages' folder of a new environment with exactly what the wheel asks for with these extras, and not the wheel.

    They are linked to from here, in the locked versions: so no network is used, and nothing else can be imported.
    """
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    for name in closure(asked_for(metadata, *extras)):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in {"..", "__pycache__"}}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
    return site


@pytest.fixture(scope="module")
def client(built: tuple[Path, Path], metadata: Message, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the client alone, as pip installs it."""
    folder = tmp_path_factory.mktemp("client")
    make_environment(folder, metadata)
    pip = [sys.executable, "-m", "pip", "--python", folder, "--quiet", "--disable-pip-version-check"]
    done = run(*pip, "install", "--no-index", "--no-compile", built[1], cwd=folder)  # refuses what would be missing
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def client_from_source(built: tuple[Path, Path], metadata: Message, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same from the source distribution, which pip builds with the backend that is installed here."""
    folder = tmp_path_factory.mktemp("client-from-source")
    site = make_environment(folder, metadata)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-index"]
    done = run(*pip, "--no-compile", "--no-build-isolation", "--no-deps", "--target", site, built[0], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin" / "python"


@pytest.mark.parametrize("installed", ["client", "client_from_source"])
def test_the_client_alone_can_be_used(
    installed: str, metadata: Message, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """From wheel and source distribution: it knows its version, and a call gets as far as to look for a router."""
    client: Path = request.getfixturevalue(installed)
    program = """
from readie import RouterUnreachable, remote
from readie.version import this_version
try:
    remote(len)("abc")
except RouterUnreachable:
    print(this_version())
"""
    done = run(client, "-c", program, cwd=tmp_path, ROUTER_URL="http://127.0.0.1:1")

    assert (done.returncode, done.stdout.strip()) == (0, metadata["Version"]), done.stderr


@pytest.mark.parametrize("part", ["router", "pipeline", "worker"])
def test_the_client_alone_says_what_a_command_lacks(client: Path, part: str, tmp_path: Path) -> None:
    """The extra's name, and no traceback."""
    done = run(client.with_name(f"readie-{part}"), "--version", cwd=tmp_path)

    assert done.returncode == 1
    assert re.fullmatch(rf"readie-{part}: \w+ is not installed. Run pip install 'readie\[{part}\]'\n", done.stderr)


READ_CATALOGUE = (
    "from pathlib import Path; from readie.projection import load_catalogue; "
    "print(*[each.checkpoint_id for each in load_catalogue(Path('cpu.json')).checkpoints])"
)
#: What each part does with its extra alone: what Python is to run, each with a part of what it prints. The router is below.
USES: Mapping[str, list[tuple[str, str]]] = {
    "pipeline": [("-m pipeline corpus example.py", "1 import sets")],
    "worker": [("-m worker describe --rootfs environment", "python ")],
    "document": [(f'-c "{READ_CATALOGUE}"', "A B C")],
}


@pytest.mark.parametrize("part", USES)
def test_each_part_works_with_its_extra_alone(part: str, client: Path, metadata: Message, tmp_path: Path) -> None:
    """From what the wheel has installed, far from any checkout."""
    site = make_environment(tmp_path / "environment", metadata, part)
    for path in next(client.parents[1].glob("lib/python3*/site-packages")).iterdir():
        if path.name in PACKAGES or path.name.startswith("readie-"):
            (site / path.name).symlink_to(path)
    (tmp_path / "example.py").write_text("import numpy\n")
    write(tmp_path / "cpu.json", make_worked_example())
    for command, said in USES[part]:
        arguments = shlex.split(command.format(site=site))
        python = tmp_path / "environment" / "bin" / "python"
        done = run(python, *arguments, cwd=tmp_path, DATABASE_URL="duckdb:///made.duckdb")

        assert done.returncode == 0, done.stderr
        assert said in done.stdout


# ---- installed by pip, with extras ----


def make_wheel(name: str, folder: Path) -> None:
    """A wheel of what is installed here, which came out of one, but for its tests: pip needs no network to install it."""
    found = distribution(name)
    files = {str(file): file for file in found.files or []}
    (info,) = {path.removesuffix("/WHEEL") for path in files if path.endswith(".dist-info/WHEEL")}
    tags = [tag.split("-") for tag in re.findall("^Tag: (.*)$", found.read_text("WHEEL") or "", re.MULTILINE)]
    tag = "-".join(".".join(sorted(set(parts))) for parts in zip(*tags, strict=True))
    left = {f"{info}/{made}" for made in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")}
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(folder / f"{info.removesuffix('.dist-info')}-{tag}.whl", "w") as wheel:
        for path, file in files.items():
            if file.hash and path not in left and not {"..", "tests"} & set(file.parts):
                wheel.write(str(found.locate_file(path)), path)
                rows.writerow([path, f"{file.hash.mode}={file.hash.value}", file.size])
        rows.writerow([f"{info}/RECORD", "", ""])
        wheel.writestr(f"{info}/RECORD", record.getvalue())


@pytest.fixture(scope="module")
def by_pip(built: tuple[Path, Path], metadata: Message, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with the programs of an environment that `pip install 'readie[router,worker]' pytest` has made."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "wheels").mkdir()
    for name in closure([*asked_for(metadata, "router", "worker"), Requirement("pytest")]):
        make_wheel(name, folder / "wheels")
    venv.create(folder / "environment", symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "environment", "--quiet", "--disable-pip-version-check"]
    only = ["--no-index", "--find-links", folder / "wheels", "--no-compile"]
    done = run(*pip, "install", *only, f"{built[1]}[router,worker]", "pytest", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    yield folder / "environment" / "bin"
    shutil.rmtree(folder)  # half a gigabyte


def test_pip_installs_what_the_extras_ask_for(by_pip: Path, metadata: Message) -> None:
    """No more and no less, by the names and versions of wheels alone."""
    site = next(by_pip.parent.glob("lib/python3*/site-packages"))
    there = {canonicalize_name(path.name.split("-")[0]) for path in site.glob("*.dist-info")}

    assert there == {"readie", *closure([*asked_for(metadata, "router", "worker"), Requirement("pytest")])}


def test_the_router_serves_from_what_pip_has_installed(by_pip: Path, tmp_path: Path) -> None:
    """Its console script makes a database and serves it: a page, the files that it loads, and the API."""
    (migrations,) = by_pip.parent.glob("lib/python3*/site-packages/migrations")
    settings = {"DATABASE_URL": "duckdb:///made.duckdb", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    upgraded = run(by_pip / "readie-router", "upgrade", cwd=tmp_path, **settings)
    revision = run(by_pip / "alembic", "-c", migrations / "alembic.ini", "current", cwd=tmp_path, **settings)
    command = [str(by_pip / "readie-router"), "serve", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, env=settings, stderr=subprocess.PIPE, text=True) as router:
        try:
            assert router.stderr is not None
            log = ""
            while not (port := re.search(r"port=(\d+)", log)):
                line = router.stderr.readline()
                assert line, log
                log += line
            with httpx.Client(base_url=f"http://127.0.0.1:{port[1]}", trust_env=False, timeout=30) as client:
                page = client.get("/")
                loaded = {path: client.get(path) for path in re.findall(r'(?:src|href)="(/static/[^"]*)"', page.text)}
                workers = client.get("/v1/workers")
        finally:
            router.terminate()

    assert (upgraded.returncode, upgraded.stdout) == (0, "The database is up to date.\n")
    assert "(head)" in revision.stdout
    assert (page.status_code, "<h1>Cluster</h1>" in page.text) == (200, True)
    assert len(loaded) >= 5
    assert [path for path, file in loaded.items() if file.status_code != 200 or not file.content] == []
    assert (workers.status_code, workers.json()) == (200, [])


def test_the_worker_runs_from_what_pip_has_installed(by_pip: Path, metadata: Message, tmp_path: Path) -> None:
    """Its console script says the wheel's version."""
    done = run(by_pip / "readie-worker", "--version", cwd=tmp_path)

    assert (done.returncode, done.stdout) == (0, f"readie-worker {metadata['Version']}\n"), done.stderr


def test_functions_run_in_tests_from_what_pip_has_installed(by_pip: Path, tmp_path: Path) -> None:
    """The tests that docs/testing.md shows: plugin, router and worker come from the wheel and its extras."""
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    (tmp_path / "test_page.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    settings = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = run(by_pip / "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "test_page.py", cwd=tmp_path, **settings)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


# ---- the changelog ----


def test_the_changelog_is_kept() -> None:
    """Unreleased comes first, then versions with their dates, the latest first, each with sections that are known."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    released = [re.fullmatch(r"\[(\S+)\] - (\d{4}-\d\d-\d\d)", heading) for heading in headings]
    versions = [Version(match[1]) for match in released if match]

    assert first == "[Unreleased]"
    assert len(versions) == len(headings)
    assert versions == sorted(versions, reverse=True)
    assert all(date.fromisoformat(match[2]) for match in released if match)
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= {
        "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"
    }  # fmt: skip
