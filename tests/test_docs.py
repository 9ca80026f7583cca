"""The documentation says what is there: settings, problems, commands, links, examples, the cluster's mounts."""

import ast
import re
import shlex
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

import app.tables
from app.settings import RouterSettings
from readie.client import ClientSettings
from readie.errors import ReadieError, problems
from readie.resources import read_resources
from tests.commands import COMMANDS
from tests.pages import Block, Terminal, prints, read_blocks
from worker.settings import WorkerSettings

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "catalogues" / "README.md",
    ROOT / "corpora" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
SETTINGS: list[type[msgspec.Struct]] = [RouterSettings, WorkerSettings, ClientSettings]


#: Pages that tests/test_tutorial.py follows, and all blocks of a page and a language that one test runs.
FOLLOWED = ["tutorial.md", *(f"how-to/{page.name}" for page in (ROOT / "docs" / "how-to").glob("*.md"))]
RUN_TOGETHER = {
    ("sql.md", "sql"),  # tests/test_sql.py, on both databases; what is printed there is the demo's
    ("reference.md", "sh"),  # tests/test_examples.py: the examples of --help
}
BLOCKS = [block for page in PAGES for block in read_blocks(page)]
CODE = [block for block in BLOCKS if block.language not in {"", "text", "json"}]


@pytest.fixture(scope="module")
def reference() -> str:
    return REFERENCE.read_text(encoding="utf-8")


def rows_of(text: str, first: str) -> list[list[str]]:
    """The cells of each table row whose first cell is `first`."""
    rows = [re.split(r" *(?<!\\)\| *", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0] == first]


def test_the_reference_is_what_the_program_says_now() -> None:
    """`make docs` would write the same file."""
    script = str(ROOT / "docs" / "make_reference.py")
    checked = subprocess.run([sys.executable, script, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_problem_is_one_row_whatever_a_part_derives_from_it() -> None:
    """The table gives the public class of each slug, which is what clients catch."""
    assert {problem.__module__ for problem in problems().values()} == {"readie.errors"}


@pytest.mark.parametrize("problem", problems().values(), ids=lambda problem: problem.slug)
def test_every_problem_is_in_the_reference(reference: str, problem: type[ReadieError]) -> None:
    """Its row has the status, the exception and the way out."""
    (row,) = rows_of(reference, f"`{problem.slug}`")

    assert row[1:] == [str(problem.status), problem.title, f"`{problem.__name__}`", problem.way_out]


@pytest.mark.parametrize(
    ("kind", "field"),
    [(kind, field) for kind in SETTINGS for field in msgspec.structs.fields(kind)],
    ids=lambda value: getattr(value, "__name__", None) or value.encode_name,
)
def test_every_setting_is_in_the_reference_with_its_meaning(
    reference: str, kind: type[msgspec.Struct], field: Any
) -> None:
    """What it accepts and what it is for are both said, in its own part's table."""
    title = {RouterSettings: "The router", WorkerSettings: "The worker", ClientSettings: "The client"}[kind]
    section = reference.partition(f"### {title}\n")[2].partition("\n#")[0]
    (row,) = rows_of(section, f"`{field.encode_name.upper()}`")

    assert all(row[2:])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_reference_with_its_options(reference: str, name: str) -> None:
    """It has one sentence, an example, and a meaning for each option."""
    section = reference.partition(f"#### {name}\n")[2].partition("\n#")[0]
    options = [parameter.opts[0] for parameter in COMMANDS[name].params if parameter.param_type_name == "option"]

    assert re.search(r"\w\.\n", section)
    assert re.search(rf"```sh\n.*{name} ?.*\n```", section)
    assert [option for option in options if not re.search(rf"^\| `{option}`.*\S \|$", section, re.MULTILINE)] == []


def test_what_the_source_says_of_a_column_is_in_the_reference(reference: str) -> None:
    """The comment beside each column, in the row of its own table."""
    source = Path(app.tables.__file__).read_text(encoding="utf-8")
    said = {
        (table, column): meaning
        for table, text in re.findall(r'^\w+ = Table\(\n    "(\w+)",\n(.*?)^\)$', source, re.MULTILINE | re.DOTALL)
        for column, meaning in re.findall(r'^    (?:Column|_\w+)\("(\w+)".*  # (.*)$', text, re.MULTILINE)
    }
    shown = {
        (table, column): rows_of(reference.partition(f"\n### {table}\n")[2].partition("\n### ")[0], f"`{column}`")[0][2]
        for table, column in said
    }

    assert len(said) > 40
    assert shown == {key: meaning.replace("|", "\\|").replace("<", "\\<") for key, meaning in said.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    """Files and pictures that a page links to are in the repository."""
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]

    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_compile(page: Path) -> None:
    """Every Python block of a page is Python, with `await` where a notebook would take it."""
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_readme_shows_an_example_of_the_client() -> None:
    """There is a Python block, and it imports `remote`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert re.search(r"```python\nfrom readie import remote\n", text)


def test_commands_that_the_pages_name_exist() -> None:
    """Whoever copies a command from README or docs finds it."""
    said = {
        match
        for page in PAGES
        for match in re.findall(r"readie-(?:pipeline|router|worker) [a-z]+\b", page.read_text(encoding="utf-8"))
        if match.split()[1] not in {"in", "of", "that", "is", "and"}
    }

    assert set() == said - set(COMMANDS)


def test_targets_of_make_that_the_pages_name_exist() -> None:
    """Whoever types a `make` of README, docs or CHANGELOG finds it in the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    texts = [page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "CHANGELOG.md"]]
    typed = [line for block in BLOCKS if block.language == "sh" for line in block.text.splitlines()]
    typed += [span for text in texts for span in re.findall(r"`([^`\n]+)`", text)]
    said = {found[1] for line in typed if (found := re.match(r"make ([a-z]+)", line))}

    assert {"demo", "setup"} <= said
    assert said - targets == set()


def name_of(page: Path) -> str:
    """Within docs/, or from the top."""
    return page.relative_to(ROOT / "docs" if (ROOT / "docs") in page.parents else ROOT).as_posix()


PAGE = """
<!-- file: made.txt -->
```python
made
```

```sh
cat made.txt && touch run
```

```text
made
```

<!-- run by: tests/test_docs.py::test_who_follows_a_page_does_what_counts_as_done -->
```sh
touch left-to-a-test
```

```python
open("nobody-runs-python", "w")
```
"""


def test_who_follows_a_page_does_what_counts_as_done(tmp_path: Path) -> None:
    """Files are written, shells run and their output compared; what a test runs, and Python by itself, is not run."""
    (tmp_path / "page.md").write_text(PAGE)
    blocks = read_blocks(tmp_path / "page.md")
    with closing(Terminal(tmp_path, {}, {})) as terminal:
        terminal.follow(blocks)
        with pytest.raises(AssertionError, match="and this was printed\nmade"):
            terminal.follow([*blocks[:2], replace(blocks[2], text="something else\n")])

    assert [block.is_done for block in blocks] == [True, True, False, False, False]
    assert [path.name for path in sorted(tmp_path.iterdir())] == [".script.sh", "made.txt", "page.md", "run"]


@pytest.mark.parametrize("block", CODE, ids=str)
def test_every_block_is_run(block: Block) -> None:
    """By following its page, or by the test that it names."""
    name = name_of(block.page)

    assert block.is_left_out or (name, block.language) in RUN_TOGETHER or (name in FOLLOWED and block.is_done)


@pytest.mark.parametrize("block", [block for block in BLOCKS if "::" in block.marks.get("run by", "")], ids=str)
def test_a_block_is_run_by_the_test_that_it_names(block: Block) -> None:
    """It reads the page, or has its commands with their options; of a page without any of Readie's, a program of it."""
    file, name = block.marks["run by"].split("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    (test,) = [ast.get_source_segment(source, node) or "" for node in functions if node.name == name]
    commands = commands_of(block)
    options = {word for _, _, *arguments in commands for word in arguments if word.startswith("--")}
    others = re.findall(r"^(?:\S+/python )?(\S+)", block.text, re.MULTILINE)

    assert name.startswith("test_")
    assert f'"{block.page.name}"' in source or (
        block.language in {"sh", "bash"}
        and all(f'"{command}"' in source for _, command, *_ in commands)
        and all(f'"{option}"' in test for option in options)
        and (commands or any(f'"{word}"' in source for word in others))
    )


def test_a_block_that_is_not_followed_names_a_test_or_the_gate() -> None:
    """Nothing else counts as run."""
    named = {block.marks["run by"] for block in BLOCKS if "run by" in block.marks}

    assert [name for name in named if not re.fullmatch(r"\.ci/run|tests/\w+\.py::test_\w+", name)] == []


def test_the_gate_runs_what_the_readme_begins_with() -> None:
    """`make demo` and `make test`, as they stand there, are lines of .ci/run."""
    (block,) = [block for block in BLOCKS if block.marks.get("run by") == ".ci/run"]
    gate = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [line.partition("#")[0].strip() for line in block.text.splitlines()]

    assert commands[0].startswith("git clone ")
    assert commands[1:] == ["make demo", "make test"]
    assert set(commands[1:]) <= set(gate)


@pytest.mark.parametrize(
    ("said", "printed", "same"),
    [
        ("took 1.5 s", "took 22.75 s", True),
        ("took 1.5 s", "took long", False),
        ("checkpoint_1", "checkpoint_2", False),
        ("generation 4e018087c9d1", "generation 8ef9adb1e8c3", True),
        ("│ numpy │ 1 │", "│ numpy  │ 10 │", True),
        ("┏━━┳━┓", "┏━━━━━┳━┓", True),
        ("a … c", "a b c", True),
        ("…\nlast", "first\nsecond\nlast", True),
        ("…\nlast", "first\nlast\nmore", False),
        ("a", "a\nb", False),
        ("a\nb", "a", False),
        ("", "a", False),
    ],
)
def test_what_is_printed_is_what_a_page_says(said: str, printed: str, same: bool) -> None:
    """But for numbers, ids, the width of tables, and what `…` stands for."""
    assert prints(said, printed) is same


def commands_of(block: Block) -> list[list[str]]:
    """The words of each readie command in a block, up to where the shell has its own."""
    lines = shlex.shlex(block.text.replace("\\\n", " ").replace("\n", "\n;\n"), posix=True, punctuation_chars="|&;<>()")
    lines.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lines:
        if set(word) <= set("|&;<>()"):
            commands.append([])
        elif commands[-1] or re.fullmatch("readie-(pipeline|router|worker)", word):
            commands[-1].append(word)
    return [command for command in commands if len(command) > 1]


def test_commands_of_the_pages_have_the_options_that_they_are_given() -> None:
    """Each command line in a block is one that the program would take."""
    wrong = []
    for block in BLOCKS:
        for program, name, *arguments in commands_of(block) if block.language in {"sh", "bash"} else ():
            command = COMMANDS[f"{program} {name}"]
            try:
                command.make_parser(click.Context(command)).parse_args(arguments)
            except click.UsageError as error:
                wrong.append(f"{block}: {program} {name}: {error.format_message()}")

    assert wrong == []


def test_declarations_of_the_page_are_valid(tmp_path: Path) -> None:
    """The example of resources.toml is read as the pipeline reads one."""
    (block,) = [block for block in read_blocks(ROOT / "docs" / "resources.md") if block.language == "toml"]
    (tmp_path / "resources.toml").write_text(block.text, encoding="utf-8")

    assert list(read_resources(tmp_path / "resources.toml")) == [
        "dataset:sklearn/iris",
        "tokenizer:minilm",
        "model:ranker",
    ]


def test_promises_of_security_name_tests_that_exist() -> None:
    """Each row of the first table names the tests that hold it."""
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    promises = page.partition("## What is promised\n")[2].partition("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ")][1:]
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", page)

    assert rows
    assert [row for row in rows if "`tests/" not in row] == []
    assert [
        f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")
    ] == []


@pytest.mark.parametrize("file", [".ci/run", "Dockerfile"])
def test_apt_has_lists_of_packages_where_it_is_asked_for_a_mirror(file: str) -> None:
    """A slim image and a new machine keep none, and `apt-get indextargets` would name nothing."""
    before, asked, _ = (ROOT / file).read_text(encoding="utf-8").partition("apt-get indextargets")

    assert asked
    assert "apt-get update" in re.split(r"\n(?:RUN|    if) ", before)[-1]


def test_the_containers_read_the_catalogues_of_the_checkout() -> None:
    """compose.yaml mounts ./catalogues read-only where CATALOGUE_DIR of the router points."""
    router = (
        (ROOT / "compose.yaml").read_text(encoding="utf-8").partition("\n  router:\n")[2].partition("\n  worker:\n")[0]
    )

    assert (ROOT / "catalogues" / "README.md").is_file()  # what no file is in, no checkout has
    assert "\n      - ./catalogues:/var/lib/readie/catalogues:ro\n" in router
    assert "\n      CATALOGUE_DIR: /var/lib/readie/catalogues\n" in router
