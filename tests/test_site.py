"""The documentation as a site: it builds without a warning, and asks nobody else for anything."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make site` builds."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-E", "-d", str(folder / "read")]
    built = subprocess.run(
        [*command, str(ROOT / "docs"), str(folder / "site")], capture_output=True, text=True, check=False
    )
    assert (built.returncode, built.stderr) == (0, "")
    return folder / "site"


def test_every_page_is_in_it(site: Path) -> None:
    """Each Markdown page is one of the site, and the sidebar leads to it."""
    index = (site / "index.html").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]

    assert [page for page in pages if not (site / page).is_file()] == []
    assert [page for page in pages if f'href="{page}' not in index and page.name != "index.html"] == []


def test_no_page_asks_anybody_else(site: Path) -> None:
    """Scripts, styles, fonts and pictures are its own."""
    loads = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=["']((?:https?:)?//[^"']*)""")
    fetches = re.compile(r"""(?:@import|url\()\s*["']?((?:https?:)?//[^"')]*)""")
    asked = [
        (page.name, found)
        for page in site.rglob("*")
        if page.suffix in {".html", ".css"}
        for found in (loads if page.suffix == ".html" else fetches).findall(page.read_text(encoding="utf-8"))
    ]

    assert asked == []


def test_links_between_pages_lead_to_their_headings(site: Path) -> None:
    """A link to a heading of another page finds it there."""
    text = (site / "how-to" / "add-a-package.html").read_text(encoding="utf-8")

    assert 'href="roll-out.html#the-catalogue"' in text or 'href="roll-out.html#3-the-catalogue"' in text
