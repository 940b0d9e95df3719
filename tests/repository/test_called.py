"""Every public function of `functional` is called by the library, not by its tests alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "kapelle"
MATHEMATICS = "kapelle.functional"


def parsed(folder: Path) -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.py"))}


def functions(modules: Mapping[Path, ast.Module]) -> dict[str, ast.FunctionDef]:
    """Return the functions of these modules by name."""
    return {
        node.name: node
        for tree in modules.values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


def taken(tree: ast.Module) -> Iterator[str]:
    """Yield the names of `functional` that a module reads, however it has imported them."""
    origin: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            origin |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            *where, name = dotted(node, origin).split(".")
            if ".".join(where).startswith(MATHEMATICS):
                yield name


def dotted(node: ast.expr, origin: Mapping[str, str]) -> str:
    if isinstance(node, ast.Name):
        return origin.get(node.id, node.id)
    return f"{dotted(node.value, origin)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def uncalled(source: Path) -> list[str]:
    """Return the public functions of `source/functional` that no module outside reaches, also not through others of it."""
    inside = functions(parsed(source / "functional"))
    outside = [tree for file, tree in parsed(source).items() if source / "functional" not in file.parents]
    waiting = [name for tree in outside for name in taken(tree)]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in inside and name not in reached:
            reached.add(name)
            waiting += [node.id for node in ast.walk(inside[name]) if isinstance(node, ast.Name)]
    return [name for name in inside if name not in reached and not name.startswith("_")]


@pytest.mark.long
def test_all_mathematics_is_called() -> None:
    assert uncalled(SOURCE) == []
