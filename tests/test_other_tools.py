"""A catalogue in other tools: what docs/other-tools.md shows is run, and all of them find the same."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from readie.projection import write_projection
from tests.catalogues import make_worked_example, read, write
from tests.pages import read_blocks

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "other-tools.md").read_text(encoding="utf-8")
BLOCKS: dict[str, str] = {
    title: next(iter(re.findall(rf"^{title}[^\n]*\n\n<!--[^\n]*\n```\w+\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)))
    for title in ("The `duckdb` shell", "pandas", "Polars", "DuckDB in Python", "One file")
}


def run_shell(block: str, folder: Path) -> str:
    """What the lines of a block print, in a shell whose duckdb is the one that is installed with the tests."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    clean = {name: value for name, value in os.environ.items() if name not in {"DATABASE_URL", "ROUTER_URL"}}
    done = subprocess.run(
        ["sh", "-ec", block], cwd=folder, env=clean | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def slowest() -> list[tuple[str, int]]:
    """The three items that take longest, as the JSON document has them."""
    items = json.loads((ROOT / "catalogues" / "cpu.json").read_bytes())["items"]
    found = sorted(items, key=lambda key: -items[key]["load_time"])[:3]
    return [(key, round(items[key]["load_time"] * 1e9)) for key in found]


@pytest.mark.parametrize("tool", ["pandas", "Polars", "DuckDB in Python"])
def test_python_reads_it_in_one_line(
    tool: str, slowest: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line of the block shows the items that take longest."""
    monkeypatch.chdir(ROOT)
    *lines, last = BLOCKS[tool].strip().splitlines()
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    shown = eval(compile(ast.parse(last, mode="eval"), tool, "eval"), names)
    rows = shown.rows() if tool == "Polars" else list(shown.itertuples(index=False, name=None))

    assert [(key, int(load_ns)) for key, load_ns in rows] == slowest


def test_the_shell_reads_it_in_one_line(slowest: list[tuple[str, int]]) -> None:
    """Without any setting, in the checkout."""
    shown = run_shell(BLOCKS["The `duckdb` shell"], ROOT)

    assert re.findall(r"│ (\S+) +│ +(\d+) │", shown) == [(key, str(load)) for key, load in slowest]


def test_a_duckdb_file_has_the_views(tmp_path: Path) -> None:
    """A catalogue of its own, exported and asked by a shell of an older release."""
    (tmp_path / "catalogues").mkdir()
    write(tmp_path / "catalogues" / "cpu.json", make_worked_example())
    shown = run_shell(BLOCKS["One file"], tmp_path)

    assert shown.startswith("cpu.duckdb: cpu, 3 items, 3 checkpoints\n")
    assert re.findall(r"│ (\w+) +│ +(\d+\.\d+) │", shown) == [("dist", "2.7")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["catalogues", "cpu.duckdb"]


def test_the_shell_answers_with_the_views_over_parquet_files(tmp_path: Path) -> None:
    """The block of docs/sql.md, in a folder that has what a checkout has: the files alone, and no router."""
    (block,) = [
        block.text for block in read_blocks(ROOT / "docs" / "sql.md") if block.section.startswith("Without a router")
    ]
    (tmp_path / "catalogues").mkdir()
    write_projection(read(make_worked_example()), tmp_path / "catalogues" / "cpu.parquet")
    (tmp_path / "app").symlink_to(ROOT / "app")

    assert re.findall(r"│ (\w+) +│ +(\d+\.\d+) │", run_shell(block, tmp_path)) == [("dist", "2.7")]
