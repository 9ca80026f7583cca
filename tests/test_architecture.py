"""The parts know one another only as the architecture allows."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = {"readie", "app", "migrations", "pipeline", "worker", "tests"}
MAY_IMPORT = {
    "readie": set[str](),
    "app": {"readie", "migrations"},
    "migrations": {"readie", "app"},
    "pipeline": {"readie"},
    "worker": {"readie"},
}


def imported_parts(file: Path) -> set[str]:
    tree = ast.parse(file.read_bytes())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} & PARTS


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_only_what_the_architecture_allows(part: str) -> None:
    """No file of a part imports another part, except those that docs/architecture.md names."""
    files = list((ROOT / part).rglob("*.py"))
    strangers = {
        f"{file.relative_to(ROOT)} imports {other}"
        for file in files
        for other in imported_parts(file) - MAY_IMPORT[part] - {part}
    }

    assert files
    assert set() == strangers


def test_the_client_loads_no_database_web_framework_or_array_library() -> None:
    """Importing `remote` stays light: nothing that only router, pipeline or worker need is loaded."""
    heavy = {"sqlalchemy", "litestar", "duckdb", "psycopg", "numpy", "scipy", "pyarrow", "ijson", "typer", "structlog"}
    code = "import sys; from readie import remote; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert set() == heavy & set(loaded.split())


def test_the_executor_and_the_probe_need_the_standard_library_alone() -> None:
    """What runs inside a sandbox imports nothing that a root filesystem may lack; cloudpickle lies beside it."""
    for name in ("executor.py", "probe.py"):
        tree = ast.parse((ROOT / "worker" / name).read_bytes())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

        assert set() == {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)


@pytest.mark.parametrize("part", ["app", "pipeline", "readie", "worker"])
def test_programs_that_a_part_starts_have_an_input_of_their_own(part: str) -> None:
    """A worker's standard input has requests for it alone, and a terminal's what its user types."""
    starts = [
        (f"{file.relative_to(ROOT)}:{call.lineno}", {keyword.arg for keyword in call.keywords})
        for file in (ROOT / part).rglob("*.py")
        for call in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in {"subprocess.run", "subprocess.Popen"}
    ]

    assert [place for place, given in starts if not given & {"stdin", "input"}] == []
