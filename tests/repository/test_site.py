"""What the site is made of, without building it; `make docs` builds it."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tools import alias_table as alias_page
from tools.check_links import anchors
from tools.docs_site.diagrams import DRAWINGS, file_of
from tools.docs_site.diagrams import blocks as diagrams
from tools.docs_site.howto import blocks, files_of
from tools.docs_site.howto import pages as howtos
from tools.docs_site.links import ROOT, heading_anchor, rewritten
from tools.docs_site.notebooks import notebook, parts, shown_page
from tools.docs_site.notebooks import pages as tutorials
from tools.docs_site.reference import cli_page, keys, plugin_page, run_page, undocumented

from kapelle.settings.aliases import TABLE
from kapelle.setup.recipe import load_recipe

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


@pytest.mark.parametrize(
    "heading", ["Start: five minutes", '"The run at … has another config"', "Weights, by turn", "`a_b`"]
)
def test_an_anchor_is_that_of_git_hosts(heading: str) -> None:
    assert anchors(f"# {heading}\n") == {heading_anchor(heading)}


def test_every_diagram_has_its_drawing_and_nothing_else_is_kept() -> None:
    assert {path.name for path in DRAWINGS.glob("*.svg")} == {file_of(source).name for source in diagrams()}


def test_what_is_taken_from_others_is_what_they_published() -> None:
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
def test_the_reference_says_what_a_setting_means_its_default_and_its_bounds() -> None:
    run = run_page()
    assert "| `tasks_per_step` | integer, ≥ 1 | `32` | Tasks (groups) per step;" in run
    assert "| `microbatch_tokens` | integer, ≥ 1 or `auto` | `auto` |" in run
    assert "| from then on |" in run
    grpo = plugin_page("algorithms").partition("\n## grpo\n")[2].partition("\n## ")[0]
    assert "| `group_size` | integer, ≥ 2 | `8` | Episodes per task;" in grpo
    assert "### algorithm.loss" in grpo
    assert "## kapelle rollback" not in cli_page()
    assert "## kapelle runs" in cli_page()


def test_a_tutorial_becomes_a_notebook_and_shows_what_was_printed() -> None:
    page = "# T\n\nwords\n\n```python\n# m.py\nx = 1\n```\n\n```sh\nkapelle info\n```\n\n```text\nold\n```\n\n<!-- check: assert x -->\n\nend\n"
    kinds = [piece.kind for piece in parts(page)]
    assert kinds == ["prose", "python", "sh", "check", "prose"]
    sources = [cell["source"] for cell in notebook(page)["cells"]]
    assert sources == [
        "%pip install -q 'kapelle'",
        "# T\n\nwords",
        "%%writefile m.py\n# m.py\nx = 1",
        "!kapelle info",
        "end",
    ]
    first, *_ = notebook(page.replace("words", "It needs `pip install 'kapelle[games]'`."))["cells"]
    assert first["source"] == "%pip install -q 'kapelle[games]'"
    shown = shown_page(page, ["", "new"])
    assert "old" not in shown
    assert "check" not in shown
    assert "```sh\nkapelle info\n```\n\n```text\nnew\n```" in shown


@pytest.mark.parametrize("page", tutorials(), ids=lambda page: page.stem)
def test_every_tutorial_asserts_what_it_prints(page: Path) -> None:
    pieces = parts(page.read_text(encoding="utf-8"))
    checks = [piece.text for piece in pieces if piece.kind == "check"]
    assert len(checks) >= 3
    assert all(check.startswith("assert ") for check in checks)
    assert f"({page.name})" in (page.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", howtos(), ids=lambda page: page.stem)
def test_every_how_to_is_listed_and_shows_what_to_type(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    assert f"- [{title}]({page.name})" in (page.parent / "README.md").read_text(encoding="utf-8")
    assert list(blocks(text))


def test_the_recipes_of_how_tos_can_be_read(tmp_path: Path) -> None:
    read = 0
    others = [ROOT / "docs" / f"{name}.md" for name in ("team", "programs", "grading", "vllm")]
    for page in [*howtos(), *others]:
        for name, text in files_of(page.read_text(encoding="utf-8")).items():
            (tmp_path / name).write_text(text, encoding="utf-8")
            if "\nenvironment:" in text:
                load_recipe(str(tmp_path / name))
                read += 1
    assert read >= 7


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
def test_every_setting_says_what_it_means() -> None:
    assert undocumented() == []
