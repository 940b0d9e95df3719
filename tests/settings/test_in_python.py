"""What people get wrong in Python, and what they are told."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pydantic
import pytest

import kapelle
from kapelle.algorithms.grpo import GRPO
from kapelle.environments.arithmetic import Arithmetic
from kapelle.workflows.solo import Solo

make: Any = GRPO
trainer: Any = kapelle.Trainer
REST: dict[str, Any] = {"workflow": Solo(), "algorithm": GRPO()}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: make(group_sise=3), "Unknown key 'group_sise'. Did you mean 'group_size'?"),
        (lambda: make(loss={"clip_lo": 1}), "Unknown key 'clip_lo'. Did you mean 'clip_low'?"),
        (lambda: make(group_size=0), "Input should be greater than or equal to 2"),
    ],
)
def test_settings_say_which_one_was_meant_in_three_lines(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        wrong()
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


def test_settings_are_given_by_name() -> None:
    with pytest.raises(TypeError, match=r"GRPO takes its settings by name, such as GRPO\(group_size=…\)\."):
        make(8)
    assert "values" not in signature(GRPO).parameters


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: trainer(enviroment=Arithmetic(), **REST), "`Trainer` has no keyword 'enviroment'. Did you mean 'environment'?"),
        (lambda: trainer(environment=Arithmetic, **REST), "`environment` is the class Arithmetic. Make one of it: environment=Arithmetic(…)."),
        (lambda: trainer(environment=Solo(), **REST), "The environment 'Solo' has no `reward_range`, no `sources`, no `size`, no `task`, no `start`."),
        (lambda: trainer(environment=Arithmetic(), steps=3, **REST), "`Trainer` has no keyword 'steps'. `kapelle.train(model, dataset, reward)` takes it, or `training={'steps': …}`."),
        (lambda: trainer("demo"), "Trainer takes no name of a recipe. Write Trainer.from_recipe('demo')."),
        (lambda: trainer.from_recipe("demo", steps=3), "`steps` cannot be combined with a whole recipe."),
        (lambda: trainer.from_recipe("demo", training={"steps": 3}), "`training` cannot be combined with a whole recipe."),
        (lambda: trainer.from_recipe("demo", {"training.steps": 3}), "{'training.steps': 3} is not a setting. Write it as text, such as 'training.steps=100'."),
    ],
)  # fmt: skip
def test_a_trainer_refuses_what_it_would_not_use(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(kapelle.ConfigError) as caught:
        wrong()
    assert str(caught.value).startswith(message)
