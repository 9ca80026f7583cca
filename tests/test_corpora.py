"""The corpus that the repository carries, and the script that makes it."""

import gzip
import importlib.util
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.corpus import Corpus, ImportSet, is_item_name, read_corpus, write_corpus
from readie.imports import outside_stdlib
from tests.tiny import make_rootfs, site_of

FOLDER = Path(__file__).parent.parent / "corpora"
COMMITTED = FOLDER / "cpu.jsonl.gz"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """corpora/make_corpus.py as a module."""
    spec = importlib.util.spec_from_file_location("make_corpus", FOLDER / "make_corpus.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def committed() -> list[ImportSet]:
    return read_corpus(COMMITTED)


class TestCommittedCorpus:
    """corpora/cpu.jsonl.gz"""

    def test_it_has_at_least_2000_sets_that_look_like_calls(
        self, committed: list[ImportSet], script: ModuleType
    ) -> None:
        """Each asks for few modules outside the standard library, none of them private or a test."""
        assert len(committed) == len({one.modules for one in committed}) >= 2000
        for one in committed:
            modules = [name for name in one.modules if ":" not in name]
            assert 0 < len(modules) <= script.MAX_MODULES
            assert set(modules) == outside_stdlib(modules)
            assert [script.public_module(name) for name in modules] == modules
            assert one.sources
            assert all(map(is_item_name, one.modules))

    def test_its_figures_are_those_of_the_readme(self, committed: list[ImportSet], script: ModuleType) -> None:
        """README.md was written with the corpus that lies beside it."""
        assert script.describe_sets(committed) in (FOLDER / "README.md").read_text()

    def test_its_lines_are_as_they_are_written(self, committed: list[ImportSet], tmp_path: Path) -> None:
        """Most frequent first, names sorted: written again, it is the same text."""
        write_corpus(Corpus(tuple(committed), (), (), 0, 0), tmp_path / "again.jsonl")

        assert (tmp_path / "again.jsonl").read_bytes() == gzip.decompress(COMMITTED.read_bytes())


ALPHA = {
    "alpha/__init__.py": '''
        """Alpha.

        >>> import alpha.sub
        >>> from beta import thing, _private
        """
        import never_as_no_example
        ''',
    "alpha/sub.py": '''
        def f():
            """Loads.

            >>> from alpha.sub import f
            >>> from sklearn.datasets import load_iris
            >>> load_iris()
            """
        ''',
    "alpha/_inner/deep.py": "",
    "alpha/tests/__init__.py": "",
    "alpha/tests/test_it.py": """
        import os, pytest, numpy.absent
        import alpha.tests.shared, beta.testing
        from alpha._inner.deep import x
        from .. import sub
        """,
    "alpha/tests/test_syntax.py": "import for",
    "alpha/conftest.py": "import beta",
}
BETA = {
    "beta/__init__.py": '"""Of no listed distribution.\n\n>>> import beta\n"""',
    "beta/testing.py": "",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root filesystem with two distributions, one of them listed, and that one's source distribution."""
    folder = tmp_path_factory.mktemp("corpora")
    make_rootfs(folder / "rootfs", {"alpha": ALPHA, "beta": BETA})
    metadata = site_of(folder / "rootfs") / "alpha-1.0.dist-info" / "METADATA"
    page = "\n```python\nimport beta, alpha.sub\n```\n"
    metadata.write_text(f"{metadata.read_text()}Description-Content-Type: text/markdown\n{page}")
    project = folder / "alpha-1.0"
    for name, text in {
        "docs/guide.rst": "Use\n\n>>> import alpha.sub\n>>> import beta\n",
        "examples/plot.py": "import alpha.sub\nimport beta\n",
        "alpha/__init__.py": "import beta",
        "setup.py": "import alpha, beta",
    }.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    (folder / "sources").mkdir()
    with tarfile.open(folder / "sources" / "alpha-1.0.tar.gz", "w:gz") as archive:
        archive.add(project, "alpha-1.0")
    (folder / "sources" / "gamma-1.0").mkdir()
    (folder / "list.txt").write_text("# what is wanted\nAlpha>=1\n")
    (folder / "README.md").write_text("before\n<!-- made by make_corpus.py -->\nold\n<!-- end -->\nafter\n")
    return folder


class TestMakingACorpus:
    """corpora/make_corpus.py over tiny distributions."""

    def test_examples_of_listed_distributions_become_sets(
        self, script: ModuleType, inputs: Path, tmp_path: Path
    ) -> None:
        """Docstrings, tests, pages and programs are read; names are public modules that are installed."""
        arguments = ["--rootfs", f"{inputs}/rootfs", "--sources", f"{inputs}/sources", "--list", f"{inputs}/list.txt"]
        arguments += ["--out", f"{tmp_path}/c.jsonl.gz", "--readme", f"{inputs}/README.md"]

        assert script.main(arguments) == 0
        assert read_corpus(tmp_path / "c.jsonl.gz") == [
            ImportSet(
                ("alpha.sub", "beta"), 4, ("alpha/alpha/__init__.py", "alpha/description", "alpha/docs/guide.rst")
            ),
            ImportSet(("alpha.sub",), 1, ("alpha/alpha/tests/test_it.py",)),
            ImportSet(("alpha.sub", "dataset:sklearn/iris"), 1, ("alpha/alpha/sub.py",)),
        ]
        first = (tmp_path / "c.jsonl.gz").read_bytes()
        readme = (inputs / "README.md").read_text()
        assert script.main(arguments) == 0
        assert (tmp_path / "c.jsonl.gz").read_bytes() == first
        assert (inputs / "README.md").read_text() == readme
        assert readme.startswith("before\n")
        assert readme.endswith("-->\nafter\n")
        assert "3 distinct sets, 6 in all, 2 modules of 2 packages, 1 keys" in readme

    @pytest.mark.parametrize(
        ("module", "public"),
        [
            ("scipy.linalg._decomp", "scipy.linalg"),
            ("numpy", "numpy"),
            ("_pytest.config", None),
            ("pandas.tests.frame", None),
            ("numpy.testing", None),
            ("pytest", None),
            ("sphinx.ext", None),
            ("torchtest", "torchtest"),
            (None, None),
        ],
    )
    def test_only_public_modules_are_asked_for(
        self, script: ModuleType, module: str | None, public: str | None
    ) -> None:
        """A private module stands for the package around it; tests and tools for nothing."""
        assert script.public_module(module) == public
