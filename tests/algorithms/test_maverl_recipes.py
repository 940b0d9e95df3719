"""MAVERL's recipes train, stop and resume at a small size, and the settings in their comments are valid."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.tiny import SIZE, same_bits

from kapelle.runs import checkpoint
from kapelle.setup.recipe import load_recipe
from kapelle.training.trainer import Trainer

LEARNERS = ("ippo", "vdn", "qmix", "magrpo", "mappo", "happo")
"""MAVERL's learners with a file each; CORY, the seventh, plays by a workflow of its own (`cory_gsm8k`)."""
RECIPES = pytest.mark.parametrize("recipe", [f"maverl_debate_{name}" for name in LEARNERS])
SMALL = (
    *(f"model.embedded.{key}={value}" for key, value in SIZE.items()),
    "team.lora.rank=2",
    "warmup=null",
    "algorithm.group_size=2",
    "training.steps=2",
    "training.tasks_per_step=2",
    "evaluation.before_and_after=false",
    "evaluation.every=0",
)
MIXED = ("algorithm.credit_warmup_steps=0", "algorithm.fit.min_fill=1")
OWN = {"maverl_debate_qmix": MIXED, "maverl_debate_vdn": MIXED}


@pytest.mark.long
@pytest.mark.slow
@RECIPES
def test_two_steps_and_one_then_the_other_end_at_the_same_bits(recipe: str, tmp_path: Path) -> None:
    settings = (*SMALL, *OWN.get(recipe, ()))
    with Trainer.from_recipe(recipe, *settings, run_dir=tmp_path / "whole") as whole:
        steps = list(whole.steps())
        expected = checkpoint.load(whole.save())
    with Trainer.from_recipe(recipe, *settings, run_dir=tmp_path / "halves") as first:
        list(first.steps(1))
        first.save()
    with Trainer.from_recipe(recipe, *settings, run_dir=tmp_path / "halves", resume=True) as second:
        assert [step.number for step in second.steps()] == [2]
        found = checkpoint.load(second.save())
    for part in expected.keys() - {"loop"}:
        assert same_bits(found[part], expected[part]), part
    turns = steps[0].groups[0].episodes[0].turns
    assert [turn.agent for turn in turns] == ["ada", "ben", "ada", "ben"]
    assert all(turn.score is not None for turn in turns), "what influence compares"


@RECIPES
def test_the_comments_settings_for_a_real_model_are_valid(recipe: str) -> None:
    run = load_recipe(
        recipe,
        (),
        (
            "model.path=Qwen/Qwen3-0.6B",
            "environment.name=math",
            "environment.path=openai/gsm8k",
            "team.sampling.max_tokens=512",
            "warmup=null",
        ),
    )
    assert run.config.environment.model_dump()["test"] == "test"
