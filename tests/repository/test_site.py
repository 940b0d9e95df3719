"""Check the sources of the documentation site; `make docs` builds it."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator

import pytest
import yaml
from tools import alias_table as alias_page
from tools.docs_site.diagrams import DRAWINGS, file_of
from tools.docs_site.diagrams import blocks as diagrams
from tools.docs_site.links import ROOT, rewritten
from tools.docs_site.reference import cli_page, keys, plugin_page, run_page, undocumented

from kapelle.settings.aliases import TABLE

ASSETS = ROOT / "docs" / "assets"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[a](team.md#weights-by-turn)", "[a](team.md#weights-by-turn)"),
        ("[a](../src/kapelle/types.py)", "[a](files/src/kapelle/types.py.md)"),
        ("[a](../CONTRIBUTING.md) [b](#here)", "[a](files/CONTRIBUTING.md) [b](#here)"),
        (
            "[a](../examples) [b](https://example.org/x.py)",
            "[a](files/examples/README.md) [b](https://example.org/x.py)",
        ),
        ("[a\nb](../src/kapelle/types.py)", "[a\nb](files/src/kapelle/types.py.md)"),
        ("![a](pictures/x.png)", "![a](pictures/x.png)"),
        ("```\n[a](../src/kapelle/types.py)\n```", "```\n[a](../src/kapelle/types.py)\n```"),
    ],
)
def test_links_to_files_lead_to_pages_of_the_site(text: str, shown: str) -> None:
    assert rewritten(text, "docs/page.md") == shown


def test_every_diagram_has_its_drawing() -> None:
    assert {path.name for path in DRAWINGS.glob("*.svg")} == {file_of(source).name for source in diagrams()}


def test_vendored_files_have_their_published_hashes() -> None:
    for each in json.loads((ASSETS / "VENDORED.json").read_text(encoding="utf-8")):
        assert hashlib.sha256((ASSETS / each["file"]).read_bytes()).hexdigest() == each["sha256"]
        assert each["license"] == "MIT"


def test_the_menu_names_pages_that_exist_or_are_made() -> None:
    made = ("reference/settings", "reference/cli.md", "reference/api.md")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load(text)["nav"]

    def pages(entries: list[object]) -> list[str]:
        found: list[str] = []
        for entry in entries:
            for inside in entry.values() if isinstance(entry, dict) else [entry]:
                found += pages(inside) if isinstance(inside, list) else [str(inside)]
        return found

    listed = pages(nav)
    assert [
        page for page in listed if not (ROOT / "docs" / page).exists() and not page.startswith(made)
    ] == []
    assert len(listed) == len(set(listed))


@pytest.mark.slow
def test_the_reference_shows_meaning_default_and_bounds_of_a_setting() -> None:
    run = run_page()
    assert "| `tasks_per_step` | integer, ≥ 1 | `32` | " in run
    assert "| `microbatch_tokens` | integer, ≥ 1 or `auto` | `auto` |" in run
    assert "| from then on |" in run
    grpo = plugin_page("algorithms").partition("\n## grpo\n")[2].partition("\n## ")[0]
    assert "| `group_size` | integer, ≥ 2 | `8` |" in grpo
    assert "### algorithm.loss" in grpo
    assert "## kapelle rollback" not in cli_page()
    assert "## kapelle runs" in cli_page()


def ours(page: str) -> Iterator[str]:
    """Yield the settings of ours that a page's tables name, without the places in lists."""
    for line in page.splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if len(cells) == 6 and line.startswith("| `"):
            yield from (key.replace("[]", "") for key in re.findall(r"`([^`]+)`", cells[3]))


@pytest.mark.slow
def test_every_setting_of_ours_on_the_coming_from_pages_exists() -> None:
    known = keys()
    pages = [
        page
        for page in sorted((ROOT / "docs" / "coming_from").glob("*.md"))
        if page.name not in ("README.md", "names.md")
    ]
    assert len(pages) >= 7
    named = {page.name: list(ours(page.read_text(encoding="utf-8"))) for page in pages}
    assert {
        name: missing
        for name, all_ in named.items()
        if (missing := [key for key in all_ if key not in known])
    } == {}
    assert all(len(all_) >= 10 for all_ in named.values())


def test_the_page_of_names_that_are_read_is_the_table() -> None:
    assert alias_page.PAGE.read_text(encoding="utf-8") == alias_page.written()


def test_the_pages_on_other_libraries_agree_with_the_table_of_names() -> None:
    wrong = []
    for page, libraries in (("trl", {"TRL"}), ("verl", {"verl"}), ("comlrl", {"CoMLRL", "TRL"})):
        text = (ROOT / "docs" / "coming_from" / f"{page}.md").read_text(encoding="utf-8")
        shown = [re.split(r"(?<!\\)\|", line) for line in text.splitlines() if line.startswith("| `")]
        for alias in TABLE:
            last = alias.name.rpartition(".")[2]
            rows = [cells for cells in shown if last in re.findall(r"\w+", cells[1])]
            said = " ".join(cell for cells in rows for cell in cells[3:])
            if (
                alias.library in libraries
                and alias.ours
                and rows
                and not any(path in said for path in alias.ours)
            ):
                wrong.append((page, alias.name))
    assert wrong == []


THEIRS = tomllib.loads((ROOT / "tests" / "repository" / "their_settings.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", THEIRS)
def test_every_setting_of_theirs_is_on_its_page(name: str) -> None:
    page = (ROOT / "docs" / "coming_from" / f"{name}.md").read_text(encoding="utf-8")
    tables = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    shown = {word.split(".")[-1] for word in re.findall(r"[\w.]+", tables)}
    assert sorted(set(THEIRS[name]["names"].split()) - shown) == []


@pytest.mark.slow
def test_every_setting_has_a_docstring() -> None:
    assert undocumented() == []
