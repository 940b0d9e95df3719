"""Names that are imported on first use: `dir`, editors and errors about unknown names."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

from kapelle.algorithms import BUILTIN as ALGORITHMS
from kapelle.environments import BUILTIN as ENVIRONMENTS
from kapelle.runtime.plugins import find_class
from kapelle.workflows import BUILTIN as WORKFLOWS

OFFERING = ("kapelle", "kapelle.algorithms", "kapelle.environments", "kapelle.workflows")
PIECES = [
    (kind, name, catalogue)
    for kind, catalogue in (
        ("algorithm", ALGORITHMS),
        ("environment", ENVIRONMENTS),
        ("workflow", WORKFLOWS),
    )
    for name in catalogue
]


def seen_by_editors(package: str) -> dict[str, str]:
    """Return name → module of what a package imports for type checkers."""
    file = import_module(package).__file__
    assert file is not None
    [block] = [
        node
        for node in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    found = [
        (node.module or "", name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    ]
    assert all(name.asname == name.name for _, name in found), (
        "type checkers take only `X as X` for an export"
    )
    return {name.name: module for module, name in found}


@pytest.mark.parametrize("package", OFFERING)
def test_editors_see_what_a_package_offers(package: str) -> None:
    assert seen_by_editors(package) == dict(import_module(package).HOMES)
    assert set(import_module(package).HOMES) <= set(dir(import_module(package)))


@pytest.mark.parametrize(
    ("kind", "name", "catalogue"), PIECES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_piece_of_a_recipe_is_offered_as_a_class(
    kind: str, name: str, catalogue: dict[str, str]
) -> None:
    found = find_class(kind, name, catalogue)
    assert getattr(import_module(f"kapelle.{kind}s"), found.__name__) is found
    assert find_class(kind, f"kapelle.{kind}s:{found.__name__}", {}) is found


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("kapelle.algorithms GPRO", "GRPO"),
        ("kapelle.environments Arithmetics", "Arithmetic"),
        ("kapelle.workflows Chian", "Chain"),
        ("kapelle Trianer", "Trainer"),
    ],
)
def test_an_unknown_attribute_suggests_the_closest_name(wrong: str, meant: str) -> None:
    package, name = wrong.split()
    expected = f"module '{package}' has no attribute '{name}'. Did you mean '{meant}'?"
    with pytest.raises(AttributeError) as asked:
        getattr(import_module(package), name)
    assert str(asked.value) == expected
    with pytest.raises(ImportError) as imported:
        exec(f"from {package} import {name}")  # noqa: S102 - the statement itself is tested
    assert imported.value.msg == expected
