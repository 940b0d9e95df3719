"""Every command and import that a document shows exists, and every link leads somewhere."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from kapelle.cli.parser import parse, split_words
from kapelle.errors import KapelleError
from kapelle.runtime.plugins import catalogue
from kapelle.setup.recipe import builtin_recipes, load_recipe, load_stages

ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(text: str, language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command line in the `sh` blocks, continuation lines joined."""
    for block in blocks(text, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def wrong(words: list[str]) -> str | None:
    """Return what a newcomer would stumble over when typing these words, or None."""
    program, *rest = words
    if program == "make":
        missing = [word for word in rest if "=" not in word and word not in TARGETS]
        return f"no target {missing}" if missing else None
    if program in {"kapelle", ".venv/bin/kapelle"}:
        return _wrong_kapelle(rest)
    if program == "torchrun":
        at = rest.index("-m")
        return _wrong_kapelle(rest[at + 2 :]) if rest[at + 1] == "kapelle" else "it starts another program"
    if program in {"python", ".venv/bin/python"}:
        missing = [word for word in rest if word.endswith(".py") and not (ROOT / word).exists()]
        return f"no file {missing}" if missing else None
    if program in {
        "pip",
        "cd",
        "git",
        "openssl",
        ".venv/bin/pip",
        ".venv-verifiers/bin/pip",
        ".venv/bin/pre-commit",
        ".venv/bin/ruff",
    }:
        return None
    return f"a program nobody vouches for: {program}"


def _wrong_kapelle(words: list[str]) -> str | None:
    try:
        parsed = parse(words)
        if not isinstance(parsed, str) and words[0] in {"train", "demo", "validate"}:
            named, settings = split_words(parsed[1].words)
            recipe, *overlays = named or ("demo",)
            known = recipe in builtin_recipes() and not overlays
            real = vars(parsed[1]).get("real", False)
            if known and not load_stages(recipe, settings=settings, real=real):
                load_recipe(recipe, settings=settings, real=real)
    except KapelleError as error:
        return str(error)
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_shown_exists(document: Path) -> None:
    problems = [(words, wrong(words)) for words in commands(document.read_text(encoding="utf-8"))]
    assert [(words, problem) for words, problem in problems if problem] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_python_block_parses_and_imports_what_exists(document: Path) -> None:
    for block in blocks(document.read_text(encoding="utf-8"), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kapelle"):
                assert [alias.name for alias in node.names if not _there(node.module or "", alias.name)] == []


def _there(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(module), name) or find_spec(f"{module}.{name}") is not None


def test_every_internal_link_leads_somewhere() -> None:
    done = subprocess.run(
        [sys.executable, "tools/check_links.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", ["algorithms", "environments", "workflows"])
def test_the_index_of_a_catalogue_names_every_piece(kind: str) -> None:
    index = (ROOT / "docs" / kind / "README.md").read_text(encoding="utf-8")
    named = {word.strip("`") for words in re.findall(r"\[([^\]]*)\]\(|`([^`]*)`", index) for word in words}
    missing = sorted(catalogue(f"kapelle.{kind}").keys() - named)
    assert not missing, (
        f"docs/{kind}/README.md names no {missing}: add a line, or `the name` to the line of its page"
    )
