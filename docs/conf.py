"""The site of the documentation: `make site` builds it from the Markdown pages into build/site."""

import re

from sphinx.application import Sphinx

# Sphinx reads these names.
project = "Readie"
html_title = "Readie"
language = "en"
extensions = ["myst_parser"]
myst_heading_anchors = 4  # links such as page.md#a-heading, as a code host has them
root_doc = "index"
exclude_patterns = ["make_reference.py"]
html_theme = "furo"
html_extra_path = ["catalogue-2.schema.json"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
nitpicky = True


def adapt(app: Sphinx, page: str, source: list[str]) -> None:
    """Takes away links to files outside of docs/, which the site does not have, and gives the index its sidebar.

    The sidebar has the links of the index's own sections, then the pages that none of them names.
    """

    def keep_within(link: re.Match[str]) -> str:
        target = (app.srcdir / page).parent / link[2]
        return link[0] if target.resolve().is_relative_to(app.srcdir) else link[1]

    source[0] = re.sub(r"\[([^\]]*)\]\((\.\./[^)#\s]+)[^)]*\)", keep_within, source[0])
    if page != root_doc:
        return
    named: set[str] = set()
    trees = []
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE):
        title = "" if section.startswith("# ") else section.partition("\n")[0]
        pages = [link for link in re.findall(r"\]\(([\w./-]+)\.md\)", section) if link not in named]
        named.update(pages)
        trees.append((title, pages))
    trees.append(("More", sorted(app.env.found_docs - named - {root_doc})))
    for title, pages in trees:
        caption = f":caption: {title}\n" if title else ""
        if pages:
            source[0] += f"\n```{{toctree}}\n:hidden:\n{caption}\n" + "\n".join(pages) + "\n```\n"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", adapt)
