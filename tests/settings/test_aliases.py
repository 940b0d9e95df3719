"""Settings by the names of other libraries: read as ours, converted, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kapelle
from kapelle.algorithms.grpo import GRPO
from kapelle.environments.arithmetic import Arithmetic
from kapelle.setup.recipe import Recipe, load_recipe, to_yaml

make: Any = kapelle.Trainer
REST = "environment: {name: arithmetic}\nworkflow: {name: solo}\n"
RECIPE = f"{REST}algorithm: {{name: grpo}}\n"


def read(text: str, folder: Path, *settings: str) -> Recipe:
    """Return a recipe with this text, and settings of the command line."""
    path = folder / "r.yaml"
    path.write_text(text)
    return load_recipe(str(path), (), settings)


def at(config: Any, path: str) -> Any:
    """Return a setting by its dotted name."""
    for part in path.split("."):
        config = getattr(config, part)
    return config


THREE = {"optimizer.lr": 2e-5, "algorithm.group_size": 4, "algorithm.loss.kl_coefficient": 0.04}


def test_a_recipe_may_use_their_names_and_keeps_ours(tmp_path: Path) -> None:
    recipe = read(f"{RECIPE}learning_rate: 2e-5\nnum_generations: 4\nbeta: 0.04\n", tmp_path)
    assert {path: at(recipe.config, path) for path in THREE} == THREE
    (note,) = recipe.notes
    assert note.startswith(
        "learning_rate is read as optimizer.lr, num_generations is read as algorithm.group_size"
    )
    assert recipe.origin["optimizer.lr"].endswith("r.yaml")
    assert "learning_rate" not in to_yaml(recipe.config)


def test_so_may_a_command_line_over_a_recipe(tmp_path: Path) -> None:
    text = f"{REST}algorithm: {{name: grpo, group_size: 16}}\noptimizer: {{lr: 1.0}}\n"
    recipe = read(text, tmp_path, "learning_rate=2e-5", "num_generations=4", "beta=0.04")
    assert {path: at(recipe.config, path) for path in THREE} == THREE
    assert recipe.origin["algorithm.group_size"] == "command line"


def test_so_may_a_call() -> None:
    with pytest.warns(UserWarning, match="num_generations is read as algorithm.group_size"):
        trainer = make(
            environment=Arithmetic(),
            workflow={"name": "solo"},
            algorithm=GRPO(epochs=3),
            learning_rate=2e-5,
            num_generations=4,
            beta=0.04,
        )
    with trainer:
        assert {path: at(trainer.config, path) for path in THREE} == THREE
        assert at(trainer.config, "algorithm.epochs") == 3
