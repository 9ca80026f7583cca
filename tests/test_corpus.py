"""DESIGN §9, corpus: import sets of example code on disk, found without running it."""

import gzip
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pipeline.cli import app as pipeline
from pipeline.corpus import (
    MAX_FILE,
    Corpus,
    ImportSet,
    collect_corpus,
    read_corpus,
    write_corpus,
)
from pipeline.examples import examples_of_docstrings, python_of_cell
from readie.errors import BadFile, BadFlavor, BadSetting, ReadieError, RouterUnreachable, UsageError

# One broken cell, magics in every style, source as text and as lines (K01).
NOTEBOOK: list[tuple[str, str | list[str]]] = [
    ("code", "%pip install polars\nimport polars as pl"),
    ("code", ["if True:\n", "    !ls -l\n", "import h5py\n"]),
    ("code", "%%time\nimport numba"),
    ("code", "%%bash\nimport os_is_not_python"),
    ("code", "%%writefile helper.py\nimport fake_a"),
    ("code", "pl.DataFrame?\nimport rasterio"),
    ("code", "files = !ls\nimport fiona"),
    ("code", "x = 7 % 2\nimport pyproj"),
    ("code", "!pip install a b \\\n  c\nimport netCDF4"),
    ("code", "await foo()\nimport trio"),
    ("code", "for broken in\nimport never"),
    ("markdown", "import not_code"),
    ("raw", "import not_code2"),
]

MODULES = ["numpy", "numpy.linalg", "größe.π", "model:gpt2", "tokenizer:a/b c", "dataset:iris"]

# What only IPython understands, and what stands for it.
CELLS = [
    ("%matplotlib inline\nimport a", "pass\nimport a"),
    ("%%timeit -n 10\nimport a", "\nimport a"),
    ("%%capture out\nimport a", "\nimport a"),
    ("%%prun -s cumulative\nimport a", "\nimport a"),
    ("# timing\n\n%%time\nimport a", "\n\n\nimport a"),
    ("%%time import a\nimport b", "import a\nimport b"),
    ("%%capture\n%%time\nimport a", "\n\nimport a"),
    ("%%capture\n%%bash\nimport a", None),
    ("%%html\n<b>", None),
    ("%%sql\nSELECT 1", None),
    ("%md\n# Title of a page", None),
    ("%time import a", "import a"),
    ("%timeit -n 10 -r3 import a", "import a"),
    ("%load_ext autoreload\n%autoreload 2", "pass\npass"),
    ("pip install a\nimport b", "pass\nimport b"),
    ("cd ..\nimport b", "pass\nimport b"),
    ("cat = 1\nls = cat\n!x", "cat = 1\nls = cat\npass"),
    ("a, b = %sql SELECT 1\nimport c", "a, b = None\nimport c"),
    ("for x in y:\n    !echo {x}\n    %run x.py\nelse:\n  ?x\n", "for x in y:\n    pass\n    pass\nelse:\n  pass\n"),
    ("x = (7\n% 2)\nimport a", "x = (7\n% 2)\nimport a"),
    ("x = (7\n% 2)\n!ls\nimport a", "x = (7\n% 2)\npass\nimport a"),
    ('s = """\n!ls\n%x\n"""\n!ls', 's = """\n!ls\n%x\n"""\npass'),
    ("s = '# !' # it's\n!ls", "s = '# !' # it's\npass"),
    ("x = 1 + \\\n  2\n!ls", "x = 1 + \\\n  2\npass"),
    ("print('what?')\nprint??", "print('what?')\npass"),
    ("d['a=!b'] = 1\na != b\nx = !ls", "d['a=!b'] = 1\na != b\nx = None"),
    ("/f 1 2\n,g a b\n;h a b", "pass\npass\npass"),
    (">>> import a\n>>> for x in y:\n...     f(x)\nprinted\n", "import a\nfor x in y:\n    f(x)\n\n"),
    ("In [1]: import a\n   ...: import b\nOut[1]: 3", "import a\nimport b\n"),
    ("  import a\n  import b", "import a\nimport b"),
    ("import a\r\n!ls\r\n", "import a\npass\n"),
    ("", ""),
    ("# nothing\n\n", ""),
]


def notebook(cells: list[tuple[str, str | list[str]]], metadata: Mapping[str, object] | None = None) -> str:
    listed: list[object] = [{"cell_type": kind, "metadata": {}, "source": source} for kind, source in cells]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": metadata or {}, "cells": listed})


def write(path: Path, text: str = "import zarr\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def names(corpus: Corpus) -> set[str]:
    return {name for found in corpus.sets for name in found.modules}


class TestNotebooks:
    """A notebook is one import set. Magics and shell lines are no Python; a broken cell spoils only itself."""

    def test_notebook_of_every_style_is_read(self, tmp_path: Path) -> None:
        """Exactly the imports that run as Python are found, and the one broken cell is reported (K01)."""
        path = write(tmp_path / "k01.ipynb", notebook(NOTEBOOK))
        corpus = collect_corpus([path])

        expected = ["fiona", "h5py", "netCDF4", "numba", "polars", "pyproj", "rasterio", "trio"]
        assert corpus.sets == (ImportSet(tuple(sorted(expected)), 1, (str(path),)),)
        assert [(error.place, error.error) for error in corpus.errors] == [("cell 11", "SyntaxError")]

    @pytest.mark.parametrize(("cell", "python"), CELLS)
    def test_cell_becomes_python_line_for_line(self, cell: str, python: str | None) -> None:
        """What only IPython understands becomes `pass`, and all else stays; None is another language."""
        assert python_of_cell(cell) == python

    @given(st.text(alphabet="a=(%!?)\"'#\\\n \t:,;/>[]1", max_size=40))
    def test_any_cell_keeps_its_lines(self, cell: str) -> None:
        """Whatever the text, there is no exception, and no more lines than there were."""
        python = python_of_cell(cell)

        assert python is None or python.count("\n") <= cell.count("\n")

    def test_later_cell_uses_what_an_earlier_one_imported(self, tmp_path: Path) -> None:
        """`np.linalg` in a later cell asks for `numpy.linalg`."""
        path = write(tmp_path / "n.ipynb", notebook([("code", "import numpy as np"), ("code", "np.linalg.norm([1])")]))

        assert names(collect_corpus([path])) == {"numpy.linalg"}

    @pytest.mark.parametrize(
        ("text", "error"),
        [
            ("{}", "BadNotebook"),
            ('{"cells": null}', "BadNotebook"),
            ("[]", "BadNotebook"),
            ('{"cells": [3]}', "BadNotebook"),
            ('{"cells": [{"cell_type": "code", "source": [1]}]}', "BadNotebook"),
            ('{"cells": [{"cell_type": "code"}]}', "BadNotebook"),
            ("not json", "JSONDecodeError"),
            ("[" * 100_000, "RecursionError"),
            ("9" * 5000, "ValueError"),
            ('{"cells": [{"cell_type": "code", "source": "x = \'\\ud800\'"}]}', "UnicodeEncodeError"),
            (notebook([("code", "library(x)")], {"kernelspec": {"language": "R"}}), "NotPython"),
        ],
    )
    def test_notebook_that_is_none_is_reported(self, tmp_path: Path, text: str, error: str) -> None:
        """It is listed with path and class, asks for nothing, and the others are still read."""
        path = write(tmp_path / "bad.ipynb", text)
        write(tmp_path / "good.py")
        corpus = collect_corpus([tmp_path])

        assert names(corpus) == {"zarr"}
        assert [(found.path, found.error) for found in corpus.errors] == [(str(path), error)]

    def test_notebook_of_format_3_is_read(self, tmp_path: Path) -> None:
        """The older format has worksheets, and `input` for source."""
        cells = [
            {"cell_type": "code", "input": "import seaborn"},
            {"cell_type": "code", "language": "bash", "input": "ls"},
        ]
        path = write(tmp_path / "old.ipynb", json.dumps({"nbformat": 3, "worksheets": [{"cells": cells}, {}]}))
        corpus = collect_corpus([path])

        assert (names(corpus), corpus.errors) == ({"seaborn"}, ())

    def test_empty_notebook_is_no_error(self, tmp_path: Path) -> None:
        """A notebook without cells asks for nothing."""
        corpus = collect_corpus([write(tmp_path / "empty.ipynb", notebook([]))])

        assert (corpus.sets, corpus.errors, corpus.without_imports) == ((), (), 1)


class TestMarkdown:
    """The Python blocks of a Markdown page are one import set."""

    def test_fenced_python_blocks_are_read(self, tmp_path: Path) -> None:
        """Blocks tagged as Python count, in lists and quotations too; other languages do not."""
        text = """
```python
import numpy as np
```
- a list

  ~~~~py title="x.py"
  ```
  from pandas import DataFrame
  ~~~~

> ```{code-cell} ipython3
> :tags: [hide]
>
> !pip install polars
> import polars
> ```

```pycon
$ python3
Python 3.11.7 on linux
>>> import h5py
>>> np.linalg.norm([1])
1.0
```

``` {.python}
import rasterio
```

```bash
import os_is_not_python
```

`import inline`
"""
        corpus = collect_corpus([write(tmp_path / "page.md", text)])

        assert names(corpus) == {"h5py", "numpy.linalg", "polars", "rasterio"}
        assert [(error.place, error.error) for error in corpus.errors] == [("line 7", "SyntaxError")]

    @pytest.mark.parametrize(
        ("block", "modules"),
        [
            ("import zarr\nzarr.open()", {"zarr"}),
            (">>> import zarr\n>>> for x in zarr:\n...     import h5py\n<zarr>", {"zarr", "h5py"}),
            ("In [1]: import zarr\nOut[1]: 3", {"zarr"}),
            ("import java.util.List;", set()),
            ("import qualified Data.Map as Map", set()),
            ("import { x } from 'y'", set()),
            ("$ import picture.png", set()),
            ("pip install zarr", set()),
            ("f(x)", set()),
        ],
    )
    @pytest.mark.parametrize("indented", [False, True])
    def test_untagged_block_counts_where_it_reads_as_python(
        self, tmp_path: Path, block: str, modules: set[str], indented: bool
    ) -> None:
        """A fence without a language, and an indented block, count if they import something, or have prompts."""
        lines = [f"    {line}" for line in block.split("\n")] if indented else ["```", *block.split("\n"), "```"]
        corpus = collect_corpus([write(tmp_path / "page.markdown", "\n".join(["Text:", "", *lines, "", "More."]))])

        assert (names(corpus), corpus.errors) == (modules, ())

    def test_page_that_is_not_utf_8_is_reported(self, tmp_path: Path) -> None:
        """It is listed with path and class."""
        for name in ("page.md", "page.rst"):
            (tmp_path / name).write_bytes(b"\xff\xfe```python")

        assert [error.error for error in collect_corpus([tmp_path]).errors] == ["UnicodeDecodeError"] * 2


class TestRest:
    """The Python blocks of a reStructuredText page are one import set."""

    def test_python_blocks_of_every_kind_are_read(self, tmp_path: Path) -> None:
        """Code directives, literal blocks and doctest blocks, inside of notes too; other languages are not."""
        text = """
.. code-block:: python
   :linenos:

   import numpy as np

.. note::

   .. sourcecode:: pycon

      >>> import h5py
      >>> np.linalg.norm([1])
      1.0

   >>> from pandas import DataFrame
   >>> DataFrame()
   Empty DataFrame

As in::

    import polars

    polars.scan_csv("x")

or, in a shell::

    pip install never

.. ipython:: python
   :okwarning:

   import rasterio
   @savefig plot.png width=4in
   rasterio.plot()

.. plot:: pyplots/never.py

.. plot::

   >>> import matplotlib.pyplot as plt

.. code-block:: bash

   import os_is_not_python

.. code-block::

   import zarr

.. testcode::

   import shapely

.. testoutput::

   import never

.. highlight:: python

.. a comment
   import never
"""
        corpus = collect_corpus([write(tmp_path / "page.rst", text)])

        expected = {"h5py", "matplotlib.pyplot", "numpy.linalg", "pandas.DataFrame", "polars", "rasterio", "shapely"}
        assert (names(corpus), corpus.errors) == (expected | {"zarr"}, ())

    def test_broken_block_spoils_only_itself(self, tmp_path: Path) -> None:
        """It is listed with the line of its directive."""
        text = ".. code:: python\n\n   import for\n\n>>> import zarr\n\n.. code:: python\n"
        corpus = collect_corpus([write(tmp_path / "page.rst", text)])

        assert names(corpus) == {"zarr"}
        assert [(error.place, error.error) for error in corpus.errors] == [("line 1", "SyntaxError")]

    @given(st.text(alphabet=".: >\n\tabimport", max_size=60))
    def test_any_text_is_a_page(self, text: str) -> None:
        """Whatever the text, reading it ends, without an exception."""
        with tempfile.TemporaryDirectory() as folder:
            collect_corpus([write(Path(folder, "page.rst"), text)])


class TestDocstrings:
    """The examples in a program's docstrings."""

    def test_each_docstring_has_its_own_examples(self) -> None:
        """Classes, methods and nested functions are named; doctests, fences and literal blocks count."""
        program = '''"""Module.

>>> import numpy
"""
class A:
    """No example."""
    def f(self):
        """Fenced.

        ```python
        from pandas import DataFrame
        ```
        """
        if True:
            async def g():
                """Text.

                Example::

                    import zarr
                """
def h(): "one line"
'''
        found = examples_of_docstrings(program.encode(), "x.py")

        assert [(one.owner, [source for _, source in one.pieces]) for one in found] == [
            ("", ["import numpy"]),
            ("A.f", ["from pandas import DataFrame\n"]),
            ("A.f.g", ["import zarr"]),
        ]

    def test_program_that_is_none_is_an_error(self) -> None:
        """What cannot be parsed has no docstrings, and says why."""
        with pytest.raises(SyntaxError):
            examples_of_docstrings(b"import for", "x.py")


class TestPrograms:
    """A program is one import set; a file that cannot be parsed is listed, and the rest is read."""

    def test_broken_deep_and_large_files_do_not_end_the_scan(self, tmp_path: Path) -> None:
        """Each yields its imports or is listed with path and class, in bounded time and memory; none is missing (K03)."""
        files = {
            "py2.py": 'import einops\nprint "x"\n',
            "conflict.py": "import einops\n<<<<<<< HEAD\nimport a\n=======\nimport b\n>>>>>>> x\n",
            "plus.py": "import einops\nx = " + "+".join(["1"] * 3000) + "\n",
            "attr.py": "import einops\nx = a" + ".b" * 20000 + "\n",
            "paren.py": "import einops\nx = " + "(" * 300 + "1" + ")" * 300 + "\n",
            "minus.py": "import einops\nx = " + "-" * 20000 + "1\n",
            "nul.py": "import einops\0\n",
            "tabs.py": "if 1:\n\timport einops\n        import zarr\n",
            "big.py": "import einops\n" + "V = 1\n" * 4_000_000,
            "ok.py": "import zarr\n",
        }
        for name, text in files.items():
            write(tmp_path / name, text)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
        before_kb = read_peak()
        corpus = collect_corpus([tmp_path])
        more_kb = read_peak() - before_kb

        assert more_kb < 100_000
        listed = {Path(error.path).name: error.error for error in corpus.errors}
        read = {Path(path).name for found in corpus.sets for path in found.sources}
        over = {Path(path).name for path in corpus.over_limit}
        assert read | listed.keys() | over == files.keys()
        assert len(read) + len(listed) + len(over) == len(files) == corpus.files
        assert names(corpus) <= {"einops", "zarr"}
        assert over == {"big.py"}
        assert "ok.py" in read
        assert {"paren.py", "py2.py", "conflict.py", "tabs.py"} <= listed.keys()
        assert listed["tabs.py"] == "TabError"

    def test_file_at_the_limit_is_read(self, tmp_path: Path) -> None:
        """10 MB are read, and a byte more is not."""
        at = write(tmp_path / "at.py", "import zarr\n#".ljust(MAX_FILE, "x"))
        over = write(tmp_path / "over.py", "import zarr\n#".ljust(MAX_FILE + 1, "x"))
        corpus = collect_corpus([tmp_path])

        assert [found.sources for found in corpus.sets] == [(str(at),)]
        assert corpus.over_limit == (str(over),)

    def test_other_encodings_are_read(self, tmp_path: Path) -> None:
        """A coding line and a byte order mark are followed; bytes that are neither are listed."""
        (tmp_path / "latin.py").write_bytes("# coding: latin-1\nimport zarr # ü\n".encode("latin-1"))
        (tmp_path / "mark.py").write_bytes(b"\xef\xbb\xbfimport h5py\n")
        (tmp_path / "bytes.py").write_bytes(b"import numba\nx = '\xff'\n")
        (tmp_path / "unknown.py").write_bytes(b"# coding: klingon\nimport numba\n")
        (tmp_path / "wide.py").write_text("import numba\n", encoding="utf-16")
        (tmp_path / "wider.py").write_text("import numba\n", encoding="utf-16-le")
        (tmp_path / "claims.py").write_text("# coding: utf-16\nimport numba\n", encoding="utf-16")
        corpus = collect_corpus([tmp_path])

        assert names(corpus) == {"zarr", "h5py"}
        listed = [Path(error.path).name for error in corpus.errors]
        assert listed == ["bytes.py", "claims.py", "unknown.py", "wide.py", "wider.py"]

    def test_standard_library_is_left_out(self, tmp_path: Path) -> None:
        """It is never an item; a file that asks for nothing else is counted, and is no set."""
        write(tmp_path / "a.py", "import os, json.decoder\nfrom collections import abc\n")
        corpus = collect_corpus([tmp_path])

        assert (corpus.sets, corpus.files, corpus.without_imports) == ((), 1, 1)

    def test_relative_imports_are_of_the_package_around_the_file(self, tmp_path: Path) -> None:
        """`from ..core import x` in a package means that package; outside of one it means nothing."""
        for folder in ("pkg", "pkg/sub"):
            write(tmp_path / folder / "__init__.py", "")
        write(tmp_path / "pkg/sub/inside.py", "from ..core import thing\n")
        write(tmp_path / "outside.py", "from .core import thing\nimport zarr\n")

        assert {found.modules for found in collect_corpus([tmp_path]).sets} == {("pkg.core.thing",), ("zarr",)}

    def test_what_a_program_loads_is_in_its_set(self, tmp_path: Path) -> None:
        """Datasets, models and tokenizers of literal names are keys beside the modules, in cells and pages too."""
        write(tmp_path / "a.py", "import seaborn as sns\nsns.load_dataset('titanic')\n")
        write(tmp_path / "b.ipynb", notebook([("code", "import seaborn as sns"), ("code", "sns.load_dataset('mpg')")]))
        write(tmp_path / "c.md", "```python\nfrom sklearn.datasets import load_iris\nload_iris()\n```\n")

        assert {found.modules for found in collect_corpus([tmp_path]).sets} == {
            ("dataset:seaborn/titanic", "seaborn"),
            ("dataset:seaborn/mpg", "seaborn"),
            ("dataset:sklearn/iris", "sklearn.datasets.load_iris"),
        }


class TestFolders:
    """Folders are read whole, in a fixed order, without what is not example code."""

    def test_same_sets_are_counted_with_up_to_five_sources(self, tmp_path: Path) -> None:
        """Files that ask for the same modules are one set, the most frequent first."""
        for number in range(7):
            write(tmp_path / f"{number}.py", "import zarr\nimport numpy as np\nnp.linalg.norm([1])\n")
        write(tmp_path / "a" / "other.py", "import h5py\n")
        corpus = collect_corpus([tmp_path])

        assert corpus.sets == (
            ImportSet(("numpy.linalg", "zarr"), 7, tuple(str(tmp_path / f"{number}.py") for number in range(5))),
            ImportSet(("h5py",), 1, (str(tmp_path / "a" / "other.py"),)),
        )
        assert corpus.files == 8

    def test_what_is_no_example_is_skipped(self, tmp_path: Path) -> None:
        """Hidden folders and files, virtual environments, node_modules, byte code and other endings are not read."""
        for hidden in (".git/a.py", "node_modules/a.py", "__pycache__/a.py", ".a.py", "a.txt", "a.pyc", "a"):
            write(tmp_path / hidden, "import never\n")
        write(tmp_path / "env" / "pyvenv.cfg")
        write(tmp_path / "env" / "lib" / "a.py", "import never\n")
        write(tmp_path / "conda" / "conda-meta" / "history")
        write(tmp_path / "conda" / "a.py", "import never\n")
        write(tmp_path / "deep" / "er" / "A.PY", "import zarr\n")
        corpus = collect_corpus([tmp_path])

        assert (names(corpus), corpus.files, corpus.errors) == ({"zarr"}, 1, ())

    def test_skipped_folder_is_read_when_it_is_asked_for(self, tmp_path: Path) -> None:
        """What the caller names is read, hidden or not."""
        write(tmp_path / ".hidden" / "a.py")

        assert names(collect_corpus([tmp_path / ".hidden"])) == {"zarr"}

    def test_links_and_pipes_are_not_followed(self, tmp_path: Path) -> None:
        """A link to a folder above does not loop, and a pipe does not block."""
        write(tmp_path / "outside.py", "import never\n")
        write(tmp_path / "root" / "a.py")
        (tmp_path / "root" / "loop").symlink_to(tmp_path / "root")
        (tmp_path / "root" / "link.py").symlink_to(tmp_path / "outside.py")
        (tmp_path / "root" / "broken.py").symlink_to(tmp_path / "nothing")
        os.mkfifo(tmp_path / "root" / "pipe.py")
        corpus = collect_corpus([tmp_path / "root"])

        assert (names(corpus), corpus.files) == ({"zarr"}, 1)

    def test_file_given_twice_counts_once(self, tmp_path: Path) -> None:
        """A folder and a file in it do not count the file twice."""
        path = write(tmp_path / "a.py")

        assert [found.count for found in collect_corpus([tmp_path, path]).sets] == [1]

    def test_order_of_creation_does_not_matter(self, tmp_path: Path) -> None:
        """The same files give the same corpus, byte for byte."""
        files = [f"{chr(97 + number % 5)}/{number}.py" for number in range(20)]
        for folder, ordered in (("one", files), ("two", files[::-1])):
            for name in ordered:
                write(tmp_path / folder / name, f"import m{int(Path(name).stem) % 3}\n")
        written = []
        for folder in ("one", "two"):
            write_corpus(collect_corpus([tmp_path / folder]), tmp_path / f"{folder}.jsonl")
            written.append((tmp_path / f"{folder}.jsonl").read_text().replace(f"/{folder}/", "/x/"))

        assert written[0] == written[1]

    def test_path_that_is_not_there_is_a_clear_error(self, tmp_path: Path) -> None:
        """A missing path and a file of another kind are named with the reason."""
        with pytest.raises(BadFile, match="no such file or folder"):
            collect_corpus([tmp_path / "missing"])
        with pytest.raises(BadFile, match="not example code"):
            collect_corpus([write(tmp_path / "data.csv")])

    def test_file_name_that_is_no_text_is_escaped(self, tmp_path: Path) -> None:
        """A file name in another encoding is shown with an escape, and the corpus can be written."""
        folder = os.fsencode(tmp_path)
        with open(folder + b"/\xff.py", "w") as file:  # noqa: PTH123 (a Path of bytes there is not)
            file.write("import zarr\n")
        corpus = collect_corpus([tmp_path])
        write_corpus(corpus, tmp_path / "corpus.jsonl")

        assert corpus.sets[0].sources == (f"{tmp_path}/\\udcff.py",)


class TestCorpusFile:
    """`corpus.jsonl`: one import set a line."""

    def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        """Reading gives the sets that were collected, and nothing lies beside the file."""
        write(tmp_path / "in" / "a.py", "import zarr, numpy\n")
        write(tmp_path / "in" / "b.py", "import h5py\n")
        corpus = collect_corpus([tmp_path / "in"])
        write_corpus(corpus, tmp_path / "corpus.jsonl")

        assert read_corpus(tmp_path / "corpus.jsonl") == list(corpus.sets)
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["corpus.jsonl"]

    def test_compressed_corpus_is_written_and_read(self, tmp_path: Path) -> None:
        """`.gz` is compressed, the same bytes each time; a file that is none is named."""
        sets = (ImportSet(("a", "b.c"), 3, ("x.py",)),)
        for name in ("one.jsonl.gz", "two.jsonl.gz"):
            write_corpus(Corpus(sets, (), (), 1, 0), tmp_path / name)

        assert (tmp_path / "one.jsonl.gz").read_bytes() == (tmp_path / "two.jsonl.gz").read_bytes()
        assert gzip.decompress((tmp_path / "one.jsonl.gz").read_bytes()).startswith(b'{"modules"')
        assert read_corpus(tmp_path / "one.jsonl.gz") == list(sets)
        for damaged in (b"plain", (tmp_path / "one.jsonl.gz").read_bytes()[:-9]):
            (tmp_path / "bad.jsonl.gz").write_bytes(damaged)
            with pytest.raises(BadFile, match=r"bad\.jsonl\.gz: "):
                read_corpus(tmp_path / "bad.jsonl.gz")

    def test_lines_are_plain_json(self, tmp_path: Path) -> None:
        """Each line is an object with modules, count and sources."""
        write_corpus(Corpus((ImportSet(("a", "b.c"), 3, ("x.py",)),), (), (), 1, 0), tmp_path / "corpus.jsonl")

        assert (tmp_path / "corpus.jsonl").read_text() == '{"modules":["a","b.c"],"count":3,"sources":["x.py"]}\n'

    def test_same_set_twice_is_added_up(self, tmp_path: Path) -> None:
        """Two corpora one after the other are a corpus; order within a set, blank lines and other keys do not matter."""
        lines = ['{"modules": ["b", "a"], "count": 2}', "", '{"modules": ["a", "b", "b"], "count": 3, "from": "here"}']
        path = write(tmp_path / "corpus.jsonl", "\n".join([*lines, '{"modules": ["dataset:iris"], "count": 9}']))

        assert read_corpus(path) == [ImportSet(("dataset:iris",), 9), ImportSet(("a", "b"), 5)]

    @pytest.mark.parametrize(
        ("line", "rule"),
        [
            ("nonsense", "JSON is malformed"),
            ("[]", "Expected `object`"),
            ('{"count": 1}', "missing required field `modules`"),
            ('{"modules": ["a"]}', "missing required field `count`"),
            ('{"modules": [], "count": 1}', r"length >= 1 - at `\$.modules`"),
            ('{"modules": [""], "count": 1}', r"length >= 1 - at `\$.modules\[0\]`"),
            ('{"modules": ["' + "x" * 1025 + '"], "count": 1}', "length <= 1024"),
            ('{"modules": ["a b"], "count": 1}', "'a b' is neither a dotted import name nor kind:name"),
            ('{"modules": ["a..b"], "count": 1}', "'a..b' is neither"),
            ('{"modules": ["disk:x"], "count": 1}', "'disk:x' is neither"),
            ('{"modules": ["model:\\u0000"], "count": 1}', "is neither"),
            ('{"modules": "a", "count": 1}', "Expected `array`"),
            ('{"modules": ["a"], "count": 0}', r">= 1 - at `\$.count`"),
            ('{"modules": ["a"], "count": 1.5}', "Expected `int`"),
            ('{"modules": ["a"], "count": true}', "Expected `int`"),
            ('{"modules": ["a"], "count": 99999999999999999999}', r"at `\$.count`"),
            ('{"modules": ["\\ud800"], "count": 1}', "surrogate|malformed|neither"),
            ("[" * 100_000, "recursion|malformed|Expected"),
        ],
    )
    def test_bad_line_is_named(self, tmp_path: Path, line: str, rule: str) -> None:
        """A line that is not an import set is refused, with the file, the line's number and the rule."""
        path = write(tmp_path / "corpus.jsonl", '{"modules": ["a"], "count": 1}\n' + line + "\n")

        with pytest.raises(BadFile, match=rule) as caught:
            read_corpus(path)
        assert caught.value.detail.startswith(f"{path}: line 2: ")

    def test_missing_file_is_a_clear_error(self, tmp_path: Path) -> None:
        """The error names the file and the way to a corpus."""
        with pytest.raises(BadFile, match="No such file or directory") as caught:
            read_corpus(tmp_path / "corpus.jsonl")
        assert "readie-pipeline corpus" in caught.value.hint

    @given(st.dictionaries(st.frozensets(st.sampled_from(MODULES), min_size=1), st.integers(1, 2**53), max_size=5))
    def test_any_sets_survive_the_file(self, counts: dict[frozenset[str], int]) -> None:
        """Writing and reading gives the same sets and counts."""
        sets = [ImportSet(tuple(sorted(modules)), count) for modules, count in counts.items()]
        with tempfile.TemporaryDirectory() as folder:
            write_corpus(Corpus(tuple(sets), (), (), len(sets), 0), Path(folder, "corpus.jsonl"))

            assert set(read_corpus(Path(folder, "corpus.jsonl"))) == set(sets)


class TestDemoCorpus:
    """The example code that the repository carries."""

    def test_every_example_is_read(self) -> None:
        """All of it parses, and asks for something outside the standard library."""
        folder = Path(__file__).parents[1] / "demo" / "corpus"
        corpus = collect_corpus([folder])

        assert corpus.errors == ()
        assert corpus.over_limit == ()
        assert corpus.without_imports == 0
        assert corpus.files >= 25
        assert {Path(path).suffix for found in corpus.sets for path in found.sources} == {".py", ".ipynb", ".md"}


class TestCommand:
    """`readie-pipeline corpus`"""

    def test_files_that_could_not_be_read_are_counted_and_listed(self, tmp_path: Path) -> None:
        """A broken file is skipped, counted and named with its error; the others are collected."""
        write(tmp_path / "in" / "good.py")
        write(tmp_path / "in" / "bad.py", "import for\n")
        write(tmp_path / "in" / "bad.ipynb", notebook([("code", "import for"), ("code", "import 1"), ("code", "a = ")]))
        done = CliRunner().invoke(pipeline, ["corpus", "--out", f"{tmp_path}/out", f"{tmp_path}/in"])

        assert done.exit_code == 0
        lines = done.stdout.splitlines()
        assert lines[:2] == [
            "3 files: 1 import sets, asked for 1 times",
            "2 files were not read, or only in part:",
        ]
        assert len(lines) == 6
        assert all("SyntaxError" in line for line in lines[2:])

    @pytest.mark.parametrize(
        ("arguments", "error", "about"),
        [
            ([], UsageError, "nothing to collect from"),
            (["x.py", "--since", "2026-11-01"], UsageError, "recorded calls"),
            (["x.py", "--flavor", "cpu"], UsageError, "recorded calls"),
            (["--from-router", "router"], BadSetting, "--from-router 'router'"),
            (["--from-router", "http://127.0.0.1:9"], RouterUnreachable, "127.0.0.1:9"),
            (["--from-router", "http://127.0.0.1:9", "--flavor", "tpu"], BadFlavor, "tpu"),
        ],
    )
    def test_what_cannot_be_done_is_said(
        self, tmp_path: Path, arguments: list[str], error: type[ReadieError], about: str
    ) -> None:
        """Nothing to collect, options that do nothing, a router that does not answer: each with its name."""
        done = CliRunner().invoke(pipeline, ["corpus", "--out", str(tmp_path), *arguments])

        assert isinstance(done.exception, error)
        assert about in str(done.exception)


def read_peak() -> int:
    """KiB of memory that this process had at most, since that was reset."""
    return int(re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)[0])
