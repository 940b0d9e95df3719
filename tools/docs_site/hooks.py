"""What MkDocs calls while it builds the site from docs/: links, diagrams, tutorials, the reference.

`mkdocs.yml` names this file. Nothing that is made here is committed: docs/ stays plain Markdown, and what is made from
the code cannot be out of date.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.docs_site import notebooks, reference
from tools.docs_site.diagrams import drawn
from tools.docs_site.links import ROOT, heading_anchor, in_lists, outside_pages, place, rewritten

DOCS = ROOT / "docs"
BY_FOLDER = {
    "Algorithms": "algorithms",
    "Environments": "environments",
    "Workflows": "workflows",
}
"""Titles of the menu's entries that list a folder by themselves, so that a new page is never omitted."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the menu's folders, and make anchors as git hosts do."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = heading_anchor
    nav: list[Any] = config.nav or []
    _fill(nav)
    listed = set(_pages(nav))
    rest = sorted(path.name for path in DOCS.glob("*.md") if path.name not in listed)
    if rest:
        nav.append({"More": rest})
    return config


def _fill(nav: list[Any]) -> None:
    for entry in nav:
        if isinstance(entry, dict):
            for title, inside in entry.items():
                if title in BY_FOLDER and isinstance(inside, str):
                    folder = DOCS / inside
                    names = sorted(path.name for path in folder.glob("*.md"))
                    names.sort(key=lambda name: name != "README.md")
                    entry[title] = [f"{inside}/{name}" for name in names]
                elif isinstance(inside, list):
                    _fill(inside)


def _pages(nav: list[Any]) -> list[str]:
    found: list[str] = []
    for entry in nav:
        for inside in entry.values() if isinstance(entry, dict) else [entry]:
            found += _pages(inside) if isinstance(inside, list) else [inside]
    return found


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that stand in no file of docs/."""
    for target, text in outside_pages().items():
        content = in_lists(rewritten(text, target)) if target.endswith(".md") else text
        files.append(File.generated(config, place(target), content=content))
    for target, content in reference.pages().items():
        files.append(File.generated(config, target, content=content))
    for path in notebooks.pages():
        made = json.dumps(notebooks.notebook(path.read_text(encoding="utf-8")), indent=1, ensure_ascii=False)
        files.append(File.generated(config, f"tutorials/{path.stem}.ipynb", content=made))
    return files


@cache
def _printed() -> dict[str, list[str]]:
    """Return what the tutorials print; nothing with KAPELLE_DOCS_DRAFT, for whoever looks at other pages."""
    return {} if os.environ.get("KAPELLE_DOCS_DRAFT") else notebooks.executed_pages()


LESS_SOUGHT = ("files/", "adr/", "claims/")
"""Pages of source files, decisions and single claims: the search lists them behind those that answer a question."""


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to places in the site, and put drawings in place of diagrams' sources."""
    if page.file.src_uri.startswith("tutorials/") and page.file.name in {
        path.stem for path in notebooks.pages()
    }:
        title, _, rest = markdown.partition("\n")
        if page.file.name in _printed():
            rest = notebooks.shown_page(rest, _printed()[page.file.name])
        markdown = f"{title}\n\n[Download as a notebook]({page.file.name}.ipynb)\n{rest}"
    if page.file.src_uri.startswith(LESS_SOUGHT):
        page.meta["search"] = {"boost": 0.1}
    if page.file.generated_by is None:
        markdown = in_lists(rewritten(markdown, f"docs/{page.file.src_uri}"))
    return re.sub(
        r"^```mermaid\n(.*?)^```$", lambda found: drawn(found[1]), markdown, flags=re.MULTILINE | re.DOTALL
    )
