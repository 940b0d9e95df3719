"""Every algorithm's page names the tests at the level of use that hold it, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "algorithms").glob("*.md"))
NO_ALGORITHM = {"README.md", "metrics.md"}


def named_tests(text: str) -> list[str]:
    """Return the tests (file, or file::Class::test) that a text names in backquotes."""
    return re.findall(r"`(tests/[\w/]+\.py(?:::\w+)*)`", text)


def missing(name: str) -> str | None:
    """Return what of a test's name does not exist, or None."""
    path, *parts = name.split("::")
    file = ROOT / path
    if not file.is_file():
        return path
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for part in parts:
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == part
        ]
        if not found:
            return f"{path}::{part}"
        body = found[0].body
    return None


def held_by(page: Path) -> str:
    """Return the section of a page that names its tests; empty where it has none."""
    parts = re.split(r"^## (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return "".join(text for title, text in zip(parts[1::2], parts[2::2], strict=True) if title == "Tests")


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in NO_ALGORITHM], ids=lambda p: p.stem)
def test_a_page_names_what_would_fail_if_the_algorithm_were_another(page: Path) -> None:
    names = named_tests(held_by(page))
    assert names, f"{page.name} needs a section '## Tests' that names a test"
    assert [gone for name in names if (gone := missing(name))] == []
