"""Every configuration key is read by something."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from kapelle import environments, workflows
from kapelle.algorithm import algorithm_class
from kapelle.algorithms import BUILTIN as ALGORITHMS
from kapelle.engines import rollout, train
from kapelle.engines.rollout.protocol import engine_class
from kapelle.engines.train.protocol import train_engine_class
from kapelle.environment import environment_class
from kapelle.settings.base import Settings
from kapelle.settings.feature import FeatureSettings
from kapelle.settings.schema import RunConfig, Timed
from kapelle.workflow import workflow_class

SOURCES = Path(__file__).parents[2] / "src" / "kapelle"


def roots() -> Iterator[type[Settings]]:
    yield RunConfig
    yield Timed
    yield from map(algorithm_class, ALGORITHMS)
    yield from map(environment_class, environments.BUILTIN)
    yield from map(workflow_class, workflows.BUILTIN)
    yield from map(engine_class, rollout.BUILTIN)
    yield from map(train_engine_class, train.BUILTIN)


def classes_in(annotation: object) -> Iterator[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
        for field in annotation.model_fields.values():
            yield from classes_in(field.annotation)
    for part in typing.get_args(annotation):
        yield from classes_in(part)


def all_keys() -> set[tuple[str, str]]:
    """Return (class, key) of everything that a recipe can say; a key of a base class counts once."""
    keys = set()
    for model in {each for root in roots() for each in classes_in(root)}:
        for key, field in model.model_fields.items():
            kinds = (field.annotation, *typing.get_args(field.annotation))
            if any(
                isinstance(kind, type) and issubclass(kind, FeatureSettings) and (kind.plan or kind.feature)
                for kind in kinds
            ):
                continue  # the type of the section names the code that reads it
            owner = next(
                base.__name__ for base in reversed(model.__mro__) if key in getattr(base, "model_fields", {})
            )
            keys.add((owner, key))
    return keys


def unread(keys: set[tuple[str, str]], texts: list[str]) -> set[tuple[str, str]]:
    """Return the keys that no code asks an object for, by attribute or in a match pattern."""
    asked = set()
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                asked.add(node.attr)
            elif isinstance(node, ast.MatchClass):
                asked.update(node.kwd_attrs)
    return {(owner, key) for owner, key in keys if key not in asked}


@pytest.mark.slow
def test_every_key_is_read() -> None:
    texts = [path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py")]
    assert unread(all_keys(), texts) == set()
